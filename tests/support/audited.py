"""A ledger that holds one of everything, and what anybody who can write into its tables does to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from agent_run_ledger import AgentRunLedger, Budget, Effect, LedgerError, Receipt, RetryPolicy, StepFailed, current_step
from support.ledgers import Bench, Died, packs_nothing, raising, raw
from support.talking import message, text

LONG = "long"
"""A run of a thousand entries."""


def everything(bench: Bench) -> None:
    """Runs with retries, branches, doubts, signals, children, a shared budget, a dead letter, a fork, long payloads, packed ones and 1,000 entries."""
    ledger = bench.open(loop_threshold=3, max_steps=600)
    pool = ledger.budget("team", usd="1.00")

    @ledger.tool(kind="model", max_usd="0.10", may_repeat=True)
    def ask(n: int) -> str:
        current_step().record_usage(usd="0.05" if n else "0.15")
        return "said"

    @ledger.tool(effect=Effect.READ)
    def look(n: int) -> dict[str, Any]:
        return {"n": n, "text": "ä"}

    @ledger.agent(budget=Budget(usd="0.50"))
    def child(n: int) -> int:
        ask(n)
        return n

    @ledger.agent(budget=Budget(usd="0.90", within=pool))
    def parent() -> int:
        ask(1)
        return child(0) + child(1)  # type: ignore[no-any-return]

    ledger.run(parent, run_id="parent")
    ledger.submit(parent, run_id="queued", queue="nightly", priority=3, key="customer")

    with ledger.open_run("audit", "varied") as run:
        run.now()
        run.step("large", {"n": 2}, lambda: "x" * 70_000)
        with suppress(StepFailed):
            run.step("b", {}, raising(ValueError("no")), retry=RetryPolicy(max_attempts=2, base=0.0))
        with suppress(KeyboardInterrupt):
            run.step("c", {}, raising(KeyboardInterrupt()), effect=Effect.READ)
        with suppress(StepFailed):
            run.step("e", {"n": 5}, raising(TimeoutError("slow")), effect=Effect.IDEMPOTENT)
        run.step("e", {"n": 5}, lambda: 5, effect=Effect.IDEMPOTENT)
        answers = [Receipt.unknown("down"), Receipt.found(6)]
        run.step("f", {"n": 6}, raising(TimeoutError("slow")), receipt=lambda key, arguments: answers.pop(0))
        for name in ("left", "right"):
            with run.branch(name):
                look(1)
        ledger.signal("varied", "go", {"n": 1}, by="ann")
        assert run.wait_for("go") == {"n": 1}
        with suppress(LedgerError):
            run.sleep(5)
    ledger.fork("varied", 3, by="ann", new_run_id="forked")

    with packs_nothing(bench.open()).open_run("audit", "plain") as run:
        run.step("large", {"n": 2}, lambda: "x" * 70_000)
    rng, messages = random.Random(1), []
    with ledger.open_run("talk", "talks") as run:
        for _ in range(5):
            messages = [*messages, message("user", text(rng, 2_500))]
            run.step("ask", {"messages": messages}, lambda messages: messages[-1]["content"], effect=Effect.READ)

    ledger.create_run("loop", "looping")
    with suppress(LedgerError):
        for _ in range(9):
            ledger.execute_step("looping", "t", {}, lambda: 1)
    with suppress(Died), bench.open().open_run("open", "open") as run:
        run.step("t", {}, raising(Died()))
    bench.owners_die()
    with bench.open().open_run("open", "open") as run:
        run.step("t", {}, lambda: 1, effect=Effect.READ)
    ledger.create_run("cancelled", "cancelled")
    ledger.execute_step("cancelled", "t", {}, lambda: bench.open().cancel("cancelled", by="ann"))

    with ledger.open_run("a thousand", LONG) as run:
        for n in range(499):
            run.step("look", {"n": n}, lambda n: {"n": n}, effect=Effect.READ)


class Tables:
    """The tables of a ledger in the hands of somebody whom no trigger stops."""

    def __init__(self, bench: Bench) -> None:
        self._is_server = bench.kind == "postgres"
        self._connection: Any
        if self._is_server:
            self._connection = psycopg.connect(bench.dsn)
            self._connection.execute("SET session_replication_role = replica")
            self._connection.commit()
        else:
            with raw(bench.path) as connection:
                triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
                for (name,) in triggers:
                    connection.execute(f"DROP TRIGGER {name}")
            import sqlite3

            self._connection = sqlite3.connect(bench.path)
            self._connection.execute("PRAGMA synchronous = OFF")

    def close(self) -> None:
        self._connection.close()

    def columns(self) -> dict[str, list[str]]:
        """Every column of every table, as the schema says now."""
        if self._is_server:
            found = self.rows(
                "SELECT c.table_name, c.column_name FROM information_schema.columns c JOIN information_schema.tables t "
                "USING (table_schema, table_name) WHERE c.table_schema = current_schema() AND t.table_type = 'BASE TABLE'"
            )
        else:
            found = self.rows(
                "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
            )
        tables: dict[str, list[str]] = {}
        for table, column in found:
            if table == "test_clock":  # the tests' own
                continue
            tables.setdefault(table, []).append(column)
        return tables

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._connection.execute(self._spelt(statement), parameters).fetchall()
        self._connection.commit()
        return found

    def write(self, *statements: tuple[str, Sequence[Any]]) -> int:
        """All of these in one transaction. Returns how many rows were changed."""
        changed = 0
        try:
            for statement, parameters in statements:
                changed += self._connection.execute(self._spelt(statement), tuple(parameters)).rowcount
            self._connection.commit()
        finally:
            self._connection.rollback()  # nothing, where all went well
        return changed

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        self.write(*((statement, row) for row in rows))

    @contextmanager
    def changed(self, table: str, run_id: str, change: Callable[[], Any]) -> Iterator[None]:
        """A table in which something of a run was changed; afterwards it is as it was."""
        columns = self.columns()[table]
        kept = self.rows(f"SELECT {', '.join(columns)} FROM {table} WHERE run_id = ?", run_id)
        others = {run for (run,) in self.rows(f"SELECT DISTINCT run_id FROM {table}")}
        try:
            change()
            yield
        finally:
            self.write((f"DELETE FROM {table} WHERE run_id = ?", (run_id,)))
            for (other,) in self.rows(f"SELECT DISTINCT run_id FROM {table}"):
                if other not in others:
                    self.write((f"DELETE FROM {table} WHERE run_id = ?", (other,)))
            self.insert(table, columns, kept)

    def _spelt(self, statement: str) -> str:
        return statement.replace("?", "%s") if self._is_server else statement


def read_only(bench: Bench) -> AgentRunLedger:
    """A ledger to verify with."""
    return AgentRunLedger(bench.place(), clock=bench.clock)
