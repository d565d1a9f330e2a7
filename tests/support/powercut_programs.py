"""The programs whose power is cut: they tell the outside world what they do, and do the same when they are run again.

Run as a module this is the program that is recorded, on a ledger that may have been weakened.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, Receipt, StoreError, current_run, current_step
from agent_run_ledger.stores import connections
from agent_run_ledger.stores import sqlite as sqlite_store
from support.witness import Witness, digest

GOAL, STEPS = "pay what is due", 12
EFFECTS = (Effect.READ, Effect.IDEMPOTENT, None, Effect.MUTATE)
WITH_RECEIPT = {7, 11}
"""Which of the steps with an effect that must not happen twice can be asked for."""
LENGTHS = {4: 9_000, 7: 70_000}
"""How long the outputs of some steps are: of several pages, and kept in a table of its own, since it is longer than 64 KiB."""
PATIENCE = 6
"""How often a program that insists makes a call that the store fails."""

Note = Callable[..., None]
Open = Callable[[], AgentRunLedger]


class Outside:
    """The outside world. It is told what happens, and can be asked what became of a call."""

    def __init__(self, note: Note, called: Mapping[str, str] | None = None) -> None:
        self._note = note
        self._called = dict(called or {})
        """The positions of the steps that were called, by their keys."""

    def note(self, kind: str, **facts: Any) -> None:
        self._note(kind, **facts)

    def call(self, number: int) -> Any:
        """What the function of a step does here."""
        step = current_step()
        facts = {"key": step.idempotency_key, "bytes": digest({"given": number}), "effect": effect(number)}
        self.note("called", run=step.run_id, position=step.position, has_receipt=number in WITH_RECEIPT, **facts)
        self._called[step.idempotency_key] = step.position
        return output(number, step.position)

    def receipt(self, key: str, arguments: dict[str, Any]) -> Receipt:
        position = self._called.get(key)
        self.note("asked", verdict="absent" if position is None else "found")
        return Receipt.absent() if position is None else Receipt.found(output(arguments["given"], position))

    def acknowledged(self, run_id: str, output: Any) -> None:
        self.note("acknowledged", run=run_id, position=output["position"], output=digest(output))


Program = Callable[[Open, Outside], None]


class GaveUp(Exception):
    """The store fails for good."""


def effect(number: int) -> Effect | None:
    return EFFECTS[number % len(EFFECTS)]


def output(number: int, position: str) -> dict[str, Any]:
    return {"position": position, "long": "x" * LENGTHS.get(number, 0)}


def parks(step: Any) -> bool:
    """Whether a run waits for somebody because of this step: it must not happen twice, and cannot be asked for."""
    number = int(step.tool_name.removeprefix("step "))
    return step.state != "COMPLETED" and effect(number) is Effect.MUTATE and number not in WITH_RECEIPT


def step(execute: Callable[..., Any], number: int, outside: Outside, *run_id: str) -> Any:
    """Make one step of a run, by `execute_step` or the like."""

    def call(given: int) -> Any:
        return outside.call(given)

    options: dict[str, Any] = {"receipt": outside.receipt} if number in WITH_RECEIPT else {}
    return execute(*run_id, f"step {number}", {"given": number}, call, effect=effect(number), **options)


def one_after_another(opened: Open, outside: Outside) -> None:
    """Twelve steps of one run. In the middle the ledger is closed, which empties the log and removes it, and opened anew."""
    for steps in (STEPS // 2, STEPS):
        with opened() as ledger:
            run_id = ledger.create_run(GOAL, "sync")
            outside.note("created", run=run_id)
            for number in range(steps):
                outside.acknowledged(run_id, step(ledger.execute_step, number, outside, run_id))
            if steps == STEPS:
                ledger.finish_run(run_id, "done")
                outside.note("finished", run=run_id)


def side_by_side(opened: Open, outside: Outside) -> None:
    """Two runs of an async agent at once, each of several steps at once, a recorded value, and steps that follow."""

    async def agent() -> None:
        run = current_run()
        outside.note("created", run=run.run_id)

        async def await_all(*numbers: int) -> None:
            async def await_one(made: Any) -> None:
                outside.acknowledged(run.run_id, await made)

            await asyncio.gather(*[await_one(step(run.step, number, outside)) for number in numbers])

        await await_all(0, 1, 2, 3)
        outside.note("valued", run=run.run_id, value=str(run.uuid4()))
        await await_all(7)
        await await_all(9, 10)

    with opened() as ledger:
        asyncio.run(run_both(ledger, agent, outside))


async def run_both(ledger: AgentRunLedger, agent: Callable[[], Any], outside: Outside) -> None:
    """Two runs of the agent at once. What ends one of them does not keep the other from going on."""
    registered = ledger.agent()(agent)

    async def run(run_id: str) -> None:
        await ainsist(lambda: ledger.arun(registered, run_id=run_id), outside)
        outside.note("finished", run=run_id)

    for ended in await asyncio.gather(run("left"), run("right"), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


# --- programs that insist ---------------------------------------------------------------------------------------------


def insist(call: Callable[[], Any], outside: Outside) -> Any:
    for _ in range(PATIENCE):
        try:
            return call()
        except StoreError as error:
            outside.note("failed", error=type(error).__name__)
    raise GaveUp


async def ainsist(call: Callable[[], Awaitable[Any]], outside: Outside) -> Any:
    for _ in range(PATIENCE):
        try:
            return await call()
        except StoreError as error:
            outside.note("failed", error=type(error).__name__)
    raise GaveUp


def insistent(opened: Open, outside: Outside) -> None:
    """Four steps. Each call that the store fails is made again, a few times. In the middle the ledger is closed and opened anew."""
    with suppress(GaveUp):
        for steps in (2, 4):
            with insist(opened, outside) as ledger:
                run_id = insist(functools.partial(ledger.create_run, GOAL, "insistent"), outside)
                outside.note("created", run=run_id)
                for number in range(steps):
                    execute = functools.partial(step, ledger.execute_step, number, outside, run_id)
                    outside.acknowledged(run_id, insist(execute, outside))
                if steps == 4:
                    insist(functools.partial(ledger.finish_run, run_id, "done"), outside)
                    outside.note("finished", run=run_id)


def insistent_beside_another(opened: Open, outside: Outside) -> None:
    """The same, while another ledger has the file open, so that the log is not emptied when the first is closed."""
    with suppress(StoreError), opened() as other:
        other.runs()
        insistent(opened, outside)
        return
    insistent(opened, outside)


def insistent_side_by_side(opened: Open, outside: Outside) -> None:
    """The same in two runs of an async agent at once."""

    async def agent() -> None:
        run = current_run()
        outside.note("created", run=run.run_id)
        for number in range(4):
            execute = functools.partial(step, run.step, number, outside)
            outside.acknowledged(run.run_id, await ainsist(execute, outside))

    with suppress(GaveUp), insist(opened, outside) as ledger:
        asyncio.run(run_both(ledger, agent, outside))


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        one_after_another,
        side_by_side,
        insistent,
        insistent_beside_another,
        insistent_side_by_side,
    )
}


# --- the process that is recorded -------------------------------------------------------------------------------------


def never_sync() -> None:
    """Have SQLite leave every commit to the system."""

    def set_level(self: connections.Connections, db: Any, level: int) -> None:
        db.execute("PRAGMA synchronous=OFF")

    connections.Connections._set_level = set_level  # type: ignore[method-assign]


def sync_no_intents() -> None:
    """Have every intent written like that of a step without side effects."""
    append, append_all = sqlite_store.SqliteStore.append, sqlite_store.SqliteStore.append_all

    def are_intents(*appends: Any) -> bool:
        return all(rows[-1].kind == "intent" for rows in appends)

    def weak_append(self: Any, run_id: str, token: int, inbox: int, rows: Any, *, synced: bool) -> bool:
        return append(self, run_id, token, inbox, rows, synced=synced and not are_intents(rows))

    def weak_append_all(self: Any, appends: Any, *, synced: bool) -> Any:
        weak = are_intents(*[each.rows for each in appends])
        return append_all(self, appends, synced=synced and not weak)

    sqlite_store.SqliteStore.append = weak_append  # type: ignore[method-assign]
    sqlite_store.SqliteStore.append_all = weak_append_all  # type: ignore[method-assign]


WEAKENED: dict[str, Callable[[], None]] = {weaken.__name__: weaken for weaken in (never_sync, sync_no_intents)}


def main(program: str, database: str, witness: str, durability: Any, log_pages: str, *weakened: str) -> None:
    connections._LOG_PAGES = int(log_pages)
    connections._FIRST_ROOM, connections._ROOM_AHEAD = 3, 8  # the log grows ahead, and often
    for weakness in weakened:
        WEAKENED[weakness]()
    outside = Outside(Witness(Path(witness)).note)
    PROGRAMS[program](lambda: AgentRunLedger(database, durability=durability), outside)


if __name__ == "__main__":
    main(*sys.argv[1:])
