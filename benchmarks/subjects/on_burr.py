"""The same steps on Burr: one action of an application that loops, with its persister for SQLite, which keeps the whole state of each."""

from __future__ import annotations

import sqlite3
import sys
from importlib.metadata import version

from burr.core import ApplicationBuilder, State, action
from burr.core.persistence import SQLitePersister
from talk import INVOICE, OUTPUT, introduce, level_of, serve, timed


@action(reads=["n"], writes=["n", "output"])
def fetch_invoice(state: State) -> State:
    return state.update(n=state["n"] + 1, output=OUTPUT)


def main(place: str, synchronous: str | None = None) -> None:
    connection = sqlite3.connect(place)
    if synchronous is not None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
    persister = SQLitePersister(place, connection=connection)
    persister.initialize()
    application = (
        ApplicationBuilder()
        .with_actions(fetch_invoice)
        .with_transitions(("fetch_invoice", "fetch_invoice"))
        .with_identifiers(app_id="benchmark")
        .initialize_from(
            persister,
            resume_at_next_action=True,
            default_state={"invoice_id": INVOICE, "n": 0, "output": {}},
            default_entrypoint="fetch_invoice",
        )
        .with_state_persister(persister)
        .build()
    )
    introduce(f"apache-burr {version('apache-burr')}", level_of(connection))
    serve({"steps": lambda count: timed(application.step, count)})


if __name__ == "__main__":
    main(*sys.argv[1:])
