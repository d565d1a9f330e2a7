"""A run that is made until its process dies, and what takes it up in a fresh process: the raw probe, a resume, a replay.

    again.py WHAT PLACE COUNT           # what takes the run of so many steps up; `steps` and `agent` make it where there is none
    again.py WHAT PLACE COUNT OTHER     # the same, when it was done to the small run at OTHER before, so that all modules are loaded

It dies where the clock is read. Told are the milliseconds until then, without OTHER those of all imports among them; where steps are
replayed, the microseconds of each; and the most memory that the process had.
"""

from __future__ import annotations

import time

BEGUN = time.perf_counter()

import sys  # noqa: E402 - after the clock was read
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from talk import INVOICE, OUTPUT, answer, leave, peak_kib  # noqa: E402

RUN = "run"
Reached = Callable[[float | None], None]
"""What is called at the moment that is measured; with the time at which a replay began, where that is what is done."""


def probe(place: str, count: int, reached: Reached) -> None:
    """The least that a resume can do: open the file, read all rows of the run, take the fence in a synced commit."""
    import sqlite3

    db = sqlite3.connect(place, isolation_level=None)
    db.execute("PRAGMA synchronous=FULL")
    db.execute("SELECT * FROM entries WHERE run_id = ? ORDER BY seq", (RUN,)).fetchall()
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE runs SET fencing_token = fencing_token + 1 WHERE run_id = ?", (RUN,))
    db.execute("COMMIT")
    reached(None)


def resume(place: str, count: int, reached: Reached) -> None:
    """`resume_run`, in a ledger that is opened for it."""
    from agent_run_ledger import AgentRunLedger

    with AgentRunLedger(place) as ledger:
        ledger.resume_run(RUN)
        reached(None)


def dispatch_read(place: str, count: int, reached: Reached) -> None:
    """The same, to the call of the next step's function, where the step is a `READ`."""
    from agent_run_ledger import Effect

    _dispatch(place, count, reached, Effect.READ)


def dispatch(place: str, count: int, reached: Reached) -> None:
    """The same, where the step declares no effect, so that its intent is synced first."""
    _dispatch(place, count, reached, None)


def _dispatch(place: str, count: int, reached: Reached, effect: Any) -> None:
    from agent_run_ledger import AgentRunLedger

    with AgentRunLedger(place, max_steps=10**9) as ledger:
        ledger.resume_run(RUN)
        arguments = {"invoice_id": INVOICE, "n": count}
        ledger.execute_step(RUN, "fetch_invoice", arguments, lambda: reached(None), effect=effect)


def steps(place: str, count: int, reached: Reached) -> None:
    """A program that makes its steps one by one, from the first: all that are recorded are replayed."""
    from agent_run_ledger import AgentRunLedger

    with AgentRunLedger(place, max_steps=10**9, durability="process") as ledger:
        ledger.create_run("benchmark", RUN)
        begun = time.perf_counter()
        for n in range(count):
            ledger.execute_step(RUN, "fetch_invoice", {"invoice_id": INVOICE, "n": n}, lambda: OUTPUT)
        reached(begun)


def agent(place: str, count: int, reached: Reached) -> None:
    """The same as an agent, whose steps are calls of a registered tool."""
    from agent_run_ledger import AgentRunLedger, Effect

    with AgentRunLedger(place, max_steps=10**9, durability="process") as ledger:

        @ledger.tool(effect=Effect.READ)
        def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
            return OUTPUT

        @ledger.agent()
        def invoices(count: int) -> None:
            begun = time.perf_counter()
            for n in range(count):
                fetch_invoice(INVOICE, n)
            reached(begun)

        ledger.run(invoices, count, run_id=RUN)


WHAT = {each.__name__: each for each in (probe, resume, dispatch_read, dispatch, steps, agent)}


def main(what: str, place: str, count: int, other: str | None = None) -> None:
    begun = BEGUN
    if other is not None:
        WHAT[what](other, 1, lambda _: None)
        begun = time.perf_counter()

    def reached(replay_begun: float | None) -> None:
        now = time.perf_counter()
        told = {"ms": (now - begun) * 1e3, "peak MiB": peak_kib() / 1024}
        if replay_begun is not None:
            told["µs a step"] = (now - replay_begun) * 1e6 / count
        answer(told)
        leave()

    WHAT[what](place, count, reached)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
