"""A run that repeats itself until the breaker halts it, in the test's process or in one that dies at the boundary it is told.

As a module it is a nursery, as `support.twelve` is.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, RunawayLoopDetectedException, RunClosed, StepFailed
from agent_run_ledger.contract import Store
from agent_run_ledger.rules import canonical
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore
from support.looping import LOOPS, Step, act
from support.twelve import Boundaries, Bounded, serve
from support.witness import Witness

RUN = "run"
STEPS = 24
KINDS = {kind.name: kind for kind in LOOPS}


def steps_of(kind: str) -> list[Step]:
    draw = random.Random(2)
    return [KINDS[kind].make(draw, at) for at in range(STEPS)]


def loop(ledger: AgentRunLedger, steps: list[Step], takes_effect: Callable[[Step], Any]) -> None:
    """Make these steps until the run halts. A write may be made again, so that nothing stays in doubt."""
    ledger.create_run("loop", RUN)
    for step in steps:

        def call(step: Step = step) -> Any:
            takes_effect(step)
            return act(step)

        effect = Effect.IDEMPOTENT if step.write else Effect.READ if step.error else None
        try:
            ledger.execute_step(RUN, step.tool, step.arguments, lambda call=call: call(), effect=effect)
        except StepFailed:
            pass
        except (RunawayLoopDetectedException, RunClosed):
            return
    raise AssertionError("it was not halted")


def halted(ledger: AgentRunLedger, store: Store) -> dict[str, Any]:
    """At which step the run has halted, and why."""
    run = ledger.get_run(RUN)
    refusal = canonical.decode(store.read(RUN)[-1].payload or b"")
    return {"status": run.status, "steps": run.total_steps, "cause": run.cause} | refusal


def live(folder: str, kind: str, die_at: int | None) -> None:
    """One life of the run, in a process of its own."""
    warnings.simplefilter("ignore")  # that a step of which nobody knows is made again is meant
    boundary, witness = Boundaries(die_at), Witness(Path(folder) / "witness")
    store = SqliteStore(Path(folder) / "runs.db", durability="process", clock=SystemClock())
    mortal: Any = Bounded(store, boundary)

    def takes_effect(step: Step) -> None:
        boundary("before the call")
        witness.note("call", tool=step.tool)
        boundary("after the call")

    with AgentRunLedger(mortal, lease_seconds=3600.0) as ledger:
        loop(ledger, steps_of(kind), takes_effect)
        findings = [str(finding) for finding in ledger.verify().findings]
        witness.note("halted", findings=findings, places=len(boundary.passed), **halted(ledger, store))


if __name__ == "__main__":
    serve(live)
