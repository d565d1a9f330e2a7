"""The programs whose power is cut: they tell the outside world what they do, and do the same when they are run again.

Run as a module this is the program that is recorded, on a ledger that may have been weakened.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, StoreError, current_run, current_step
from agent_run_ledger.stores import connections
from agent_run_ledger.stores import sqlite as sqlite_store
from support.witness import Witness, digest

GOAL, STEPS = "pay what is due", 12
EFFECTS = (Effect.READ, Effect.IDEMPOTENT, None, Effect.MUTATE)
LENGTHS = {4: 9_000, 7: 70_000}
"""How long the outputs of some steps are: of several pages, and kept in a table of its own, since it is longer than 64 KiB."""
PATIENCE = 6
"""How often a program that insists makes a call that the store fails."""

Note = Callable[..., None]
"""Tells the outside world what happened: its kind and its facts."""
Open = Callable[[], AgentRunLedger]
Program = Callable[[Open, Note], None]


class GaveUp(Exception):
    """The store fails for good."""


def effect(number: int) -> Effect | None:
    return EFFECTS[number % len(EFFECTS)]


def tool(number: int, note: Note) -> Callable[[int], Any]:
    """The function of a step: it tells the outside world that it was called, and with what."""

    def call(given: int) -> Any:
        step = current_step()
        facts = {"key": step.idempotency_key, "bytes": digest({"given": given}), "effect": effect(number)}
        note("called", run=step.run_id, position=step.position, **facts)
        return {"position": step.position, "long": "x" * LENGTHS.get(number, 0)}

    return call


def step(call: Callable[..., Any], number: int, note: Note, *run_id: str) -> Any:
    """One step of a run, by `execute_step` or the like."""
    return call(*run_id, f"step {number}", {"given": number}, tool(number, note), effect=effect(number))


def acknowledged(note: Note, run_id: str, output: Any) -> None:
    note("acknowledged", run=run_id, position=output["position"], output=digest(output))


def one_after_another(opened: Open, note: Note) -> None:
    """Twelve steps of one run. In the middle the ledger is closed, which empties the log and removes it, and opened anew."""
    for steps in (STEPS // 2, STEPS):
        with opened() as ledger:
            run_id = ledger.create_run(GOAL, "sync")
            note("created", run=run_id)
            for number in range(steps):
                acknowledged(note, run_id, step(ledger.execute_step, number, note, run_id))
            if steps == STEPS:
                ledger.finish_run(run_id, "done")
                note("finished", run=run_id)


def insist(call: Callable[[], Any], note: Note) -> Any:
    for _ in range(PATIENCE):
        try:
            return call()
        except StoreError as error:
            note("failed", error=type(error).__name__)
    raise GaveUp


async def ainsist(call: Callable[[], Awaitable[Any]], note: Note) -> Any:
    for _ in range(PATIENCE):
        try:
            return await call()
        except StoreError as error:
            note("failed", error=type(error).__name__)
    raise GaveUp


def insistent(opened: Open, note: Note) -> None:
    """Four steps. Each call that the store fails is made again, a few times. In the middle the ledger is closed and opened anew."""
    with suppress(GaveUp):
        for steps in (2, 4):
            with insist(opened, note) as ledger:
                run_id = insist(functools.partial(ledger.create_run, GOAL, "insistent"), note)
                note("created", run=run_id)
                for number in range(steps):
                    execute = functools.partial(step, ledger.execute_step, number, note, run_id)
                    acknowledged(note, run_id, insist(execute, note))
                if steps == 4:
                    insist(functools.partial(ledger.finish_run, run_id, "done"), note)
                    note("finished", run=run_id)


def insistent_beside_another(opened: Open, note: Note) -> None:
    """The same, while another ledger has the file open, so that the log is not emptied when the first is closed."""
    with suppress(StoreError), opened() as other:
        other.runs()
        insistent(opened, note)
        return
    insistent(opened, note)


def insistent_side_by_side(opened: Open, note: Note) -> None:
    """The same in two runs of an async agent at once."""

    async def agent() -> None:
        run = current_run()
        note("created", run=run.run_id)
        for number in range(4):
            acknowledged(note, run.run_id, await ainsist(functools.partial(step, run.step, number, note), note))

    with suppress(GaveUp), insist(opened, note) as ledger:
        asyncio.run(run_both(ledger, agent, note))


def side_by_side(opened: Open, note: Note) -> None:
    """Two runs of an async agent at once, each of several steps at once, a recorded value, and steps that follow."""

    async def agent() -> None:
        run = current_run()
        note("created", run=run.run_id)

        async def await_all(*numbers: int) -> None:
            async def await_one(made: Any) -> None:
                acknowledged(note, run.run_id, await made)

            await asyncio.gather(*[await_one(step(run.step, number, note)) for number in numbers])

        await await_all(0, 1, 2, 3)
        note("valued", run=run.run_id, value=str(run.uuid4()))
        await await_all(7)
        await await_all(9, 10)

    with opened() as ledger:
        asyncio.run(run_both(ledger, agent, note))


async def run_both(ledger: AgentRunLedger, agent: Callable[[], Any], note: Note) -> None:
    """Two runs of the agent at once. What ends one of them does not keep the other from going on."""
    registered = ledger.agent()(agent)

    async def run(run_id: str) -> None:
        await ainsist(lambda: ledger.arun(registered, run_id=run_id), note)
        note("finished", run=run_id)

    for ended in await asyncio.gather(run("left"), run("right"), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


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
    append = sqlite_store.SqliteStore.append

    def weak_append(self: Any, run_id: str, token: int, inbox: int, rows: Any, *, synced: bool) -> bool:
        return append(self, run_id, token, inbox, rows, synced=synced and rows[-1].kind != "intent")

    sqlite_store.SqliteStore.append = weak_append  # type: ignore[method-assign]


WEAKENED: dict[str, Callable[[], None]] = {weaken.__name__: weaken for weaken in (never_sync, sync_no_intents)}


def main(program: str, database: str, witness: str, durability: Any, log_pages: str, *weakened: str) -> None:
    connections._LOG_PAGES = int(log_pages)
    for weakness in weakened:
        WEAKENED[weakness]()
    PROGRAMS[program](lambda: AgentRunLedger(database, durability=durability), Witness(Path(witness)).note)


if __name__ == "__main__":
    main(*sys.argv[1:])
