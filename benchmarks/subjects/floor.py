"""The floor F: one INSERT and one UPDATE, two commits, through the standard library or psycopg. Nothing with two commits a step does less."""

from __future__ import annotations

import itertools
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

from talk import SYNCED, introduce, level_of, serve, timed

RUN, ARGUMENTS, OUTCOME = "run_4f0a6f8c1b2d3e4f5a6b", '{"invoice_id":"INV-109","n":1}', '{"ok":true,"total":12}'


def on_sqlite(db: sqlite3.Connection, key: str = "") -> Callable[[], None]:
    """A step of the floor. `key` adds to its table the least that finds the steps of a run again."""
    columns = "id INTEGER PRIMARY KEY, run TEXT, number INTEGER, arguments TEXT, state TEXT, output TEXT"
    db.execute(f"CREATE TABLE steps ({columns}{key})")
    insert = "INSERT INTO steps (run, number, arguments, state) VALUES (?, ?, ?, ?)"
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        db.execute("BEGIN IMMEDIATE")
        made = db.execute(insert, (RUN, number, ARGUMENTS, "RUNNING"))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE steps SET state = ?, output = ? WHERE id = ?", ("COMPLETED", OUTCOME, made.lastrowid))
        db.execute("COMMIT")

    return step


def in_batches(db: sqlite3.Connection) -> Callable[[int, int], float]:
    """The least for many runs at once: two rows for each step, in transactions of as many rows as there are runs."""
    db.execute("CREATE TABLE batches (run TEXT, seq INTEGER, body TEXT, PRIMARY KEY (run, seq))")
    insert = "INSERT INTO batches VALUES (?, ?, ?)"
    begun_runs = itertools.count()

    def throughput(runs: int, count: int) -> float:
        """Steps a second."""
        names = [f"{RUN} {next(begun_runs)}" for _ in range(runs)]
        begun = time.perf_counter()
        for seq in range(2 * count):
            db.execute("BEGIN IMMEDIATE")
            db.executemany(insert, [(name, seq, ARGUMENTS) for name in names])
            db.execute("COMMIT")
        return runs * count / (time.perf_counter() - begun)

    return throughput


def on_postgres(url: str, *, is_synced: bool) -> Callable[[], None]:
    """A step of the floor on a server: a row of some 400 bytes and a head, in prepared statements of one connection."""
    import psycopg

    connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
    connection.execute("CREATE TABLE entries (run TEXT, seq BIGINT, body BYTEA, PRIMARY KEY (run, seq))")
    connection.execute("CREATE TABLE heads (run TEXT PRIMARY KEY, seq BIGINT)")
    connection.execute(f"SET synchronous_commit = {'on' if is_synced else 'off'}")
    connection.execute("INSERT INTO heads VALUES (%s, 0)", (RUN,))
    cursor, body = connection.cursor(), secrets.token_bytes(400)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        cursor.execute("INSERT INTO entries VALUES (%s, %s, %s)", (RUN, number, body))
        cursor.execute("UPDATE heads SET seq = %s WHERE run = %s", (number, RUN))

    return step


def main(place: str, level: str, *options: str) -> None:
    verbs: dict[str, Callable[..., Any]] = {}
    is_synced = level == "FULL"
    if "://" in place:
        step = on_postgres(place, is_synced=is_synced)
        introduce("floor F", SYNCED if is_synced else "synchronous_commit=off: survives the process")
    else:
        db = sqlite3.connect(place, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={level}")
        step = on_sqlite(db, ", UNIQUE (run, number)" if "keyed" in options else "")
        verbs["throughput"] = in_batches(db)
        introduce("floor F", level_of(db))
    serve(verbs | {"steps": lambda count: timed(step, count)})


if __name__ == "__main__":
    main(*sys.argv[1:])
