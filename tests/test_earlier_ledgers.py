"""A ledger that an earlier version of the schema was written by opens, is brought up to date, replays, goes on and verifies.

Each file in `ledgers` is what the library of that time wrote, as SQL: five runs that have ended, were made from another one, or whose process died.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger, Effect, RunClosed, StepFailed
from agent_run_ledger.stores.schema import SCHEMA_VERSION
from support.ledgers import never

LEDGERS = Path(__file__).parent / "ledgers"
VERSIONS = range(1, SCHEMA_VERSION)


def test_there_is_one_of_each_earlier_version() -> None:
    assert {path.name for path in LEDGERS.iterdir()} == {f"schema-{version}.sql" for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A ledger file as it stood then."""
    made = tmp_path / "agent.db"
    with closing(sqlite3.connect(made)) as connection:
        connection.executescript((LEDGERS / f"schema-{request.param}.sql").read_text(encoding="utf-8"))
        assert connection.execute("PRAGMA user_version").fetchone() == (request.param,)
        assert connection.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    return made


RUNS = {
    "finished": "COMPLETED",
    "dead": "DEAD_LETTER",
    "cancelled": "CANCELLED",
    "forked": "CHECKPOINTED",
    "open": "RUNNING",
}


def test_it_verifies_before_and_after_it_is_brought_up_to_date(path: Path) -> None:
    with AgentRunLedger.open_read_only(path) as ledger:
        assert ledger.verify().findings == []
        heads = [ledger.tree_head(run.run_id) for run in ledger.runs()]
    with AgentRunLedger(path) as ledger:
        assert {run.run_id: run.status for run in ledger.runs()} == RUNS
        report = ledger.verify(against=heads)
        assert (report.findings, report.heads, report.runs) == ([], 5, 5)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_what_is_recorded_is_replayed_and_what_had_stopped_goes_on(path: Path) -> None:
    with AgentRunLedger(path) as ledger:
        with ledger.open_run("reconcile", "finished") as run:
            run.now()
            assert run.step("fetch", {"n": 1}, never, effect=Effect.READ) == {"n": 1, "text": "ä"}
            assert run.step("large", {}, never) == "x" * 70_000
            with pytest.raises(StepFailed, match="ZeroDivisionError"):
                run.step("fails", {}, never)
            assert run.step("pay", {"n": 2}, never, effect=Effect.MUTATE) == "paid"
        with pytest.raises(RunClosed):
            ledger.execute_step("dead", "t", {"other": 1}, never)
        ledger.create_run("doubt", "open")
        assert ledger.execute_step("open", "look", {"n": 1}, never, effect=Effect.READ) == 1
        assert ledger.execute_step("open", "note", {"n": 2}, lambda n: n, effect=Effect.IDEMPOTENT) == 2
        ledger.finish_run("open", 3)
        with ledger.open_run("reconcile", "forked") as run:
            run.now()
            assert run.step("fetch", {"n": 1}, never, effect=Effect.READ) == {"n": 1, "text": "ä"}
            assert run.step("large", {}, lambda: "less") == "less"
        assert {run.run_id: run.status for run in ledger.runs()} == RUNS | {"open": "COMPLETED", "forked": "COMPLETED"}
        assert ledger.verify().findings == []
