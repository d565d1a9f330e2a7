"""A naive ledger: two tables, a connection for each call, a row before the step and its update afterwards. It cannot resume anything."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

from talk import INVOICE, OUTPUT, introduce, level_of, serve, timed

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (run_id TEXT PRIMARY KEY, goal TEXT, status TEXT, created_at REAL);
CREATE TABLE IF NOT EXISTS steps (
    step_id TEXT PRIMARY KEY, run_id TEXT REFERENCES runs (run_id), name TEXT, arguments TEXT, status TEXT, output TEXT,
    started_at REAL, ended_at REAL
);
"""


class NaiveLedger:
    """What is written first when somebody wants a ledger: it notes what happens and helps nobody after a crash."""

    def __init__(self, path: str) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as db:
            db.executescript(SCHEMA)

    def create_run(self, goal: str) -> str:
        run_id = str(uuid.uuid4())
        self._commit("INSERT INTO runs VALUES (?, ?, 'RUNNING', ?)", run_id, goal, time.time())
        return run_id

    def execute_step(self, run_id: str, name: str, arguments: dict[str, Any], function: Callable[[], Any]) -> Any:
        step_id = str(uuid.uuid4())
        self._commit(
            "INSERT INTO steps (step_id, run_id, name, arguments, status, started_at) VALUES (?, ?, ?, ?, 'RUNNING', ?)",
            step_id, run_id, name, json.dumps(arguments), time.time(),
        )  # fmt: skip
        output = function()
        self._commit(
            "UPDATE steps SET status = 'COMPLETED', output = ?, ended_at = ? WHERE step_id = ?",
            json.dumps(output), time.time(), step_id,
        )  # fmt: skip
        return output

    def _commit(self, statement: str, *values: Any) -> None:
        with closing(sqlite3.connect(self._path)) as db, db:
            db.execute(statement, values)


def main(place: str) -> None:
    ledger = NaiveLedger(place)
    run_id = ledger.create_run("benchmark")
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": INVOICE, "n": number}, lambda: OUTPUT)

    with closing(sqlite3.connect(place)) as db:
        introduce("naive ledger", level_of(db))
    serve({"steps": lambda count: timed(step, count)})


if __name__ == "__main__":
    main(sys.argv[1])
