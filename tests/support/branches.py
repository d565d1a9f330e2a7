"""An async agent with parallel steps, branches, children and timeouts, in processes that kill themselves at a durable boundary.

Run as a module it is a nursery, as `support.twelve` is.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, StepInDoubt, current_run, current_step
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.twelve import Boundaries, Bounded, serve
from support.witness import Witness, digest

RUN = "branches"
MANY = 3
CALLS = {"begin": 1, "look": MANY, "pay": 1, "child look": 2, "child note": 2, "end": 1}
"""How often each tool is called in a run that nobody disturbs; beside them `slow`, which is cancelled at some moment."""


class Life:
    """One process of the program: what it opens, calls and reports."""

    def __init__(self, folder: Path, number: int, durability: Any, die_at: int | None) -> None:
        self.number = number
        self.witness = Witness(folder / "witness")
        self.boundary = Boundaries(die_at)
        store = open_store(folder / "runs.db", durability=durability, clock=SystemClock())
        # A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
        self.ledger = AgentRunLedger(Bounded(store, self.boundary), durability=durability, lease_seconds=3600.0)

    def tool(self, name: str, effect: Effect | None, after: Callable[[Any], int] = lambda given: 0) -> Any:
        """An async tool: its effect is one line in the witness's file. It answers after so many turns of the loop."""

        async def call(given: Any) -> Any:
            step = current_step()
            self.boundary(f"in {name}, before its effect")
            facts = {"key": step.idempotency_key, "bytes": digest(given), "effect": effect}
            self.witness.note("call", step=name, life=self.number, **facts)
            self.boundary(f"in {name}, after its effect")
            for _ in range(after(given)):
                await asyncio.sleep(0)
            return [name, given]

        return self.ledger.tool(name=name, effect=effect)(call)

    def told(self, kind: str, what: Any) -> None:
        """What the program knows now, as far as it may not change."""
        self.witness.note(kind, life=self.number, what=what)

    def report(self, kind: str, **facts: Any) -> None:
        """What the ledger says of all runs, for the witness."""
        runs = {}
        for run in self.ledger.runs():
            steps = [[step.tool_name, step.idempotency_key, step.state] for step in self.ledger.steps(run.run_id)]
            runs[run.run_id] = {"status": run.status, "steps": steps}
        self.witness.note(kind, runs=runs, **facts)


def agent_of(life: Life) -> Callable[[], Any]:
    """The agent, with everything that stands side by side in it."""
    begin = life.tool("begin", None)
    look = life.tool("look", Effect.READ, lambda given: 7 * (MANY - given))
    slow = life.tool("slow", Effect.READ, lambda given: 1_000_000)
    pay = life.tool("pay", Effect.MUTATE, lambda given: 12)
    end = life.tool("end", Effect.IDEMPOTENT)
    child_look = life.tool("child look", Effect.READ, lambda given: given)
    child_note = life.tool("child note", Effect.IDEMPOTENT)

    @life.ledger.agent()
    async def child(number: int) -> Any:
        return await child_note(await child_look(number))

    @life.ledger.agent()
    async def parent() -> Any:
        run = current_run()
        life.told("heard", await begin(0))

        async def pays() -> Any:
            with run.branch("payment"):
                return await pay(1)

        payment = asyncio.create_task(pays())
        told = []
        for answer in asyncio.as_completed([asyncio.create_task(look(given)) for given in range(MANY)]):
            told.append(await answer)
            life.told("heard", told[-1])
        loser = asyncio.create_task(slow(2))
        for _ in range(20):
            await asyncio.sleep(0)
        loser.cancel()
        try:
            told.append(await loser)
        except (asyncio.CancelledError, TimeoutError):
            told.append("cancelled")
        told += await run.map(child, [1, 2])
        return await end([told, await payment])

    return lambda: life.ledger.arun(parent, run_id=RUN)


def live(program: str, folder: str, number: int, durability: str, die_at: int | None) -> None:
    """One life of the agent. Opening the ledger and reading it are no boundaries: nothing is written there."""
    warnings.simplefilter("ignore")  # that an undeclared step is dispatched again is said, and meant here
    life = Life(Path(folder), number, durability, die_at)
    life.report("before", life=number)
    start = agent_of(life)
    result, error = None, None
    try:
        result = asyncio.run(start())
    except StepInDoubt as raised:
        error = type(raised).__name__
    findings = [str(finding) for finding in life.ledger.verify().findings]
    life.report("after", life=number, result=result, error=error, findings=findings)
    life.ledger.close()
    life.witness.note("passed", places=life.boundary.passed)


if __name__ == "__main__":
    serve(live)
