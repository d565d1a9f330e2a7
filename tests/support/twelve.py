"""A program of twelve steps in each spelling, run in processes that kill themselves at a durable boundary.

Run as a module it is a nursery: for each order, a line of JSON on standard input, it forks a process and answers how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, LedgerError, RunLedger, RunNotFound, Step, current_step
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.processes import environment
from support.witness import Witness, digest

RUN, GOAL, STEPS = "twelve", "count to twelve", 12
EFFECTS = (Effect.READ, Effect.IDEMPOTENT, None, Effect.MUTATE)
LONG = "x" * 70_000
"""Kept in a table of its own, since it is longer than 64 KiB."""


def name(number: int) -> str:
    return f"step-{number}"


def effect(number: int) -> Effect | None:
    return EFFECTS[number % len(EFFECTS)]


class Boundaries:
    """Counts the places at which the process may die, and dies at the one it was told."""

    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at
        self.passed: list[str] = []

    def __call__(self, place: str) -> None:
        self.passed.append(place)
        if len(self.passed) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Bounded:
    """A store with a place to die before and after everything that it writes."""

    WRITES = ("create", "claim", "append", "append_all", "release", "annotate", "close")

    def __init__(self, store: Any, boundary: Callable[[str], None]) -> None:
        self._store = store
        self._boundary = boundary

    def __getattr__(self, verb: str) -> Any:
        perform = getattr(self._store, verb)
        if verb not in self.WRITES:
            return perform

        def bounded(*arguments: Any, **options: Any) -> Any:
            self._boundary(f"before {verb}")
            answer = perform(*arguments, **options)
            self._boundary(f"after {verb}")
            return answer

        return bounded


class Life:
    """One process of the program: what it opens, calls and reports."""

    def __init__(self, folder: Path, number: int, durability: Any, die_at: int | None) -> None:
        self.number = number
        self.witness = Witness(folder / "witness")
        self.boundary = Boundaries(die_at)
        store = open_store(folder / "runs.db", durability=durability, clock=SystemClock())
        # A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
        self.options: dict[str, Any] = {"durability": durability, "lease_seconds": 3600.0}
        self.store: Any = Bounded(store, self.boundary)

    def tool(self, number: int) -> Callable[[Any], Any]:
        """The function of a step: its effect is one line in the witness's file."""

        def call(carried: Any) -> Any:
            self.boundary(f"in {name(number)}, before its effect")
            if number:
                self.acknowledge(number - 1, carried)
            key = current_step().idempotency_key
            self.witness.note("call", step=name(number), life=self.number, key=key, bytes=digest(carried))
            self.boundary(f"in {name(number)}, after its effect")
            return {"sum": carried["sum"] + number, "long": LONG if number % 5 == 4 else ""}

        return call

    def acknowledge(self, number: int, output: Any) -> None:
        self.witness.note("acknowledged", step=name(number), life=self.number, output=digest(output))

    def report(self, ledger: AgentRunLedger | RunLedger, kind: str, **facts: Any) -> None:
        """What the ledger says of the run, for the witness."""
        try:
            steps = ledger.steps(RUN)
            status = ledger.get_run(RUN).status
        except RunNotFound:
            steps, status = [], ""
        told = [
            {"step": step.tool_name, "state": step.state, "output": digest(json.loads(step.output_json or "null"))}
            for step in steps
        ]
        self.witness.note(kind, steps=told, status=status, **facts)


FIRST = {"sum": 0, "long": ""}


def as_a_pipeline(life: Life) -> Iterator[Any]:
    def begin(given: Any) -> Any:
        return life.tool(0)(given)

    steps = [Step(name(0), begin, effect=effect(0))]
    steps += [Step(name(i), life.tool(i), depends_on=[name(i - 1)], effect=effect(i)) for i in range(1, STEPS)]
    ledger = RunLedger(RUN, life.store, steps=steps, **life.options)
    yield ledger
    yield ledger.execute(given=FIRST)


def run_again_from_the_top(life: Life) -> Iterator[Any]:
    ledger = AgentRunLedger(life.store, **life.options)
    yield ledger
    ledger.create_run(GOAL, RUN)
    life.witness.note("created", life=life.number)
    yield _go_on(life, ledger, 0, FIRST)


def resumed(life: Life) -> Iterator[Any]:
    ledger = AgentRunLedger(life.store, **life.options)
    yield ledger
    done: list[Any] = []
    if life.witness.notes("created"):
        done = [json.loads(step.output_json) for step in ledger.resume_run(RUN) if step.output_json]
        if ledger.get_run(RUN).status == "COMPLETED":
            yield ledger.get_run(RUN).result
            return
    else:
        ledger.create_run(GOAL, RUN)
        life.witness.note("created", life=life.number)
    yield _go_on(life, ledger, len(done), done[-1] if done else FIRST)


def _go_on(life: Life, ledger: AgentRunLedger, first: int, carried: Any) -> Any:
    for number in range(first, STEPS):
        arguments = {"carried": carried}
        carried = ledger.execute_step(RUN, name(number), arguments, life.tool(number), effect=effect(number))
        life.acknowledge(number, carried)
    ledger.finish_run(RUN, carried)
    life.witness.note("finished", life=life.number)
    return carried


def in_an_open_run(life: Life) -> Iterator[Any]:
    ledger = AgentRunLedger(life.store, **life.options)
    yield ledger
    carried: Any = FIRST
    with ledger.open_run(GOAL, RUN) as run:
        life.witness.note("created", life=life.number)
        for number in range(STEPS):
            carried = run.step(name(number), {"carried": carried}, life.tool(number), effect=effect(number))
            life.acknowledge(number, carried)
        run.result = carried
    life.witness.note("finished", life=life.number)
    yield carried


PROGRAMS = {program.__name__: program for program in (as_a_pipeline, run_again_from_the_top, resumed, in_an_open_run)}


def live(program: str, folder: str, number: int, durability: str, die_at: int | None) -> None:
    """One life of the program. Opening the ledger and reading it are no boundaries: nothing is written there."""
    warnings.simplefilter("ignore")  # that an undeclared step is dispatched again is said, and meant here
    life = Life(Path(folder), number, durability, die_at)
    playing = PROGRAMS[program](life)
    ledger = next(playing)
    life.report(ledger, "before", life=number)
    try:
        result, error = digest(next(playing)), None
    except LedgerError as raised:
        result, error = None, type(raised).__name__
    findings = [str(finding) for finding in ledger.verify().findings]
    life.report(ledger, "after", life=number, result=result, error=error, findings=findings)
    ledger.close()
    life.witness.note("passed", places=life.boundary.passed)


def serve(live: Callable[..., None]) -> None:
    """Fork a process for each order, and say how it ended."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                live(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class Nursery:
    """A warm process whose children live the program's lives: a real process each, without the start of an interpreter."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, **order: Any) -> int:
        """One life from its start to its end; the exit code, negative for a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def nursery(module: str = "support.twelve") -> Iterator[Nursery]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


if __name__ == "__main__":
    serve(live)
