"""Looking at a ledger: nothing is disturbed by it, and damage hides nothing but itself."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    RunNotFound,
    RunState,
    StepFailed,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.ledger import as_stored, ledgers_in
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with one run of three steps (8 entries), and one that an exception parked."""
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        with ledger.open_run("Reconcile October", run_id="october") as run:
            for name in ("fetch", "match", "post"):
                run.step(name, {"id": 1}, lambda name=name: name, effect=Effect.READ, version=f"{name} 2")
        with pytest.raises(StepFailed), ledger.open_run("Reconcile November", run_id="november") as run:
            run.step("fetch", {"id": 2}, lambda: 1 / 0, effect=Effect.READ)
    return path


def files_beside(path: Path) -> list[str]:
    """What lies in the folder, but for what SQLite itself keeps beside a database that it has open."""
    return sorted({*os.listdir(path.parent)} - {f"{path.name}-shm", f"{path.name}-wal"})


def damage(path: Path, run_id: str, *seqs: int, body: Any = b"\x00\xff", column: str = "body") -> None:
    with sqlite3.connect(path, isolation_level=None) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        for seq in seqs:
            statement = f"UPDATE entries SET {column} = ? WHERE run_id = ? AND seq = ?"
            assert connection.execute(statement, (body, run_id, seq)).rowcount == 1
        for _, sql in triggers:
            connection.execute(sql)
    connection.close()


# --- without writing --------------------------------------------------------------------------------------------------


def test_a_ledger_that_is_looked_at_stays_as_it_is(db: Path) -> None:
    before, files = db.read_bytes(), files_beside(db)
    with AgentRunLedger.open_read_only(db) as ledger:
        assert [run.run_id for run in ledger.runs()] == ["october", "november"]
        assert ledger.get_run("october").status == "COMPLETED"
        assert len(ledger.steps("october")) == 3
        assert ledger.verify().ok
        assert ledger.tree_head("october").size == 8
    AgentRunLedger.diagnose(db)
    assert (db.read_bytes(), files_beside(db)) == (before, files)


ACTS: dict[str, Callable[[AgentRunLedger], Any]] = {
    "create_run": lambda ledger: ledger.create_run("a goal"),
    "create_run, existing": lambda ledger: ledger.create_run("Reconcile November", run_id="november"),
    "execute_step": lambda ledger: ledger.execute_step("november", "fetch", {"id": 2}, lambda: pytest.fail("called")),
    "resume_run": lambda ledger: ledger.resume_run("november"),
    "finish_run": lambda ledger: ledger.finish_run("november"),
    "abort_run": lambda ledger: ledger.abort_run("november", "no more"),
    "open_run": lambda ledger: ledger.open_run("a goal").__enter__(),
    "cancel": lambda ledger: ledger.cancel("november"),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_what_would_write_is_refused_by_name_and_nothing_is_written(
    db: Path, act: Callable[[AgentRunLedger], Any]
) -> None:
    before, files = db.read_bytes(), files_beside(db)
    with AgentRunLedger.open_read_only(db) as ledger, pytest.raises(StoreReadOnly):
        act(ledger)
    wal = db.with_name(db.name + "-wal")
    assert not wal.exists() or wal.stat().st_size == 0
    assert (db.read_bytes(), files_beside(db)) == (before, files)


def test_looking_makes_no_ledger_and_brings_none_up_to_date(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        AgentRunLedger.open_read_only(tmp_path / "none.db")
    with pytest.raises(StoreUnavailable):
        AgentRunLedger.diagnose(tmp_path / "none.db")
    with pytest.raises(ValueError, match="in memory"):
        AgentRunLedger.open_read_only(":memory:")
    assert os.listdir(tmp_path) == []


def test_an_owner_goes_on_while_somebody_looks(db: Path) -> None:
    with AgentRunLedger(db) as agent, agent.open_run("look at me", run_id="live") as run:
        run.step("count", {"n": 1}, lambda: 1)
        with AgentRunLedger.open_read_only(db) as ledger:
            seen = ledger.inspect("live")
            assert (seen.is_owner_seen, seen.is_waiting, len(seen.steps)) == (True, False, 1)
            assert not ledger.is_waiting(seen.run)
            run.step("count", {"n": 2}, lambda: 2)
            assert len(ledger.steps("live")) == 2


# --- closely ----------------------------------------------------------------------------------------------------------


def test_an_inspection_tells_which_code_ran_each_step(db: Path) -> None:
    with AgentRunLedger.open_read_only(db) as ledger:
        seen = ledger.inspect("october")
    assert [each.partition(" python")[0] for each in seen.environments] == [
        f"{step.tool_name} 2 0.1.0" for step in seen.steps
    ]
    assert (seen.trouble, seen.in_doubt, seen.redispatched) == (None, [], [])


def test_a_run_waits_for_its_program_until_it_has_ended_or_somebody_owns_it(db: Path) -> None:
    with AgentRunLedger.open_read_only(db) as ledger:
        assert {run.run_id: ledger.is_waiting(run) for run in ledger.runs()} == {"october": False, "november": True}


def test_where_nothing_can_be_seen_an_owner_counts_as_alive() -> None:
    with AgentRunLedger(MemoryStore(clock=FakeClock()), clock=FakeClock()) as ledger:
        ledger.create_run("a goal", run_id="run")
        assert ledger.inspect("run").is_owner_seen
        ledger.detach("run")
        assert ledger.inspect("run").is_waiting


def test_a_run_that_there_is_not_cannot_be_inspected(db: Path) -> None:
    with AgentRunLedger.open_read_only(db) as ledger, pytest.raises(RunNotFound):
        ledger.inspect("december")


def test_verify_says_after_each_run_how_many_entries_are_done(db: Path) -> None:
    told: list[int] = []
    with AgentRunLedger.open_read_only(db) as ledger:
        report = ledger.verify(told=told.append)
    assert told == [8, report.entries]


def test_a_value_is_told_as_it_is_stored() -> None:
    assert as_stored({"b": 1, "a": (2, 3)}) == '{"a":{"$tuple":[2,3]},"b":1}'


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqs", "left"), [((4,), [1, 3]), ((2, 3), [2, 3]), ((1, 8), [1, 2, 3]), ((3, 5), [1, 2, 3])])
@pytest.mark.parametrize("body", [b"\x00\xff", b"[]", b"{}", "text", 5, None, b"[" * 100_000])
def test_every_step_that_can_be_read_is_given(db: Path, seqs: tuple[int, ...], left: list[int], body: Any) -> None:
    damage(db, "october", *seqs, body=b"" if body is None else body)
    with AgentRunLedger.open_read_only(db) as ledger:
        steps, seen = ledger.steps("october"), ledger.inspect("october")
    assert [step.step_number for step in steps] == left
    assert seen.steps == steps
    assert seen.in_doubt == [], "what cannot be read is not what is not known"
    assert f"entry {seqs[0]}:" in str(seen.trouble)


def test_an_entry_that_is_taken_in_by_half_changes_no_step(db: Path) -> None:
    with AgentRunLedger.open_read_only(db) as ledger:
        whole = ledger.steps("october")
    damage(db, "october", 8, body=b'{"attempt":9,"environment":"x"}')
    damage(db, "october", 8, body="intent", column="kind")
    damage(db, "october", 8, body="3", column="position")
    with AgentRunLedger.open_read_only(db) as ledger:
        assert ledger.steps("october") == whole
        assert ledger.inspect("october").trouble is not None


@pytest.mark.parametrize(("run_id", "seq"), [("october", 1), ("october", 8), ("november", 1), ("november", 4)])
@pytest.mark.parametrize("body", [b"\x00\xff", b"[]", b"{}", b'{"at":"x","steps":1,"state":"BLOCKED"}', b"[" * 100_000])
def test_a_run_that_cannot_be_read_is_listed_and_is_in_no_state(db: Path, run_id: str, seq: int, body: bytes) -> None:
    damage(db, run_id, seq, body=body)
    with AgentRunLedger.open_read_only(db) as ledger:
        listed = {run.run_id: run for run in ledger.runs()}
        assert list(listed) == ["october", "november"]
        assert [name for name, run in listed.items() if run.is_damaged] == [run_id]
        assert "cannot be read" in str(listed[run_id].cause)
        assert listed[run_id].status in RunState.__members__
        assert run_id not in [run.run_id for state in RunState for run in ledger.runs(state)]
        assert not ledger.is_waiting(listed[run_id])
        assert ledger.get_run(run_id) == listed[run_id]


def test_a_damaged_run_stands_where_its_last_readable_entry_says(db: Path) -> None:
    damage(db, "october", 8)
    damage(db, "november", *range(1, 5))
    with AgentRunLedger.open_read_only(db) as ledger:
        assert [run.status for run in ledger.runs()] == ["CHECKPOINTED", "PENDING"]


ODD = {"nothing": None, "number": -1.5, "bytes": b"\x00\xff", "nested": b"[" * 100_000, "text": '{"goal":[]}'}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("entries", name) for name in ("kind", "position", "attempt", "body", "roots", "payload", "digest", "fingerprint", "encoding")),
        *(("runs", name) for name in ("owner", "fencing_token", "inbox", "note")),
        ("secrets", "secret"),
    ],
)  # fmt: skip
def test_whatever_stands_in_a_column_hides_no_other_run(db: Path, table: str, column: str, value: object) -> None:
    with sqlite3.connect(db, isolation_level=None) as connection:
        connection.execute("PRAGMA ignore_check_constraints=1")
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        # a column that may not hold nothing stays as it is
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE run_id = 'october'", (value,))
    connection.close()
    with AgentRunLedger.open_read_only(db) as ledger:
        october, november = ledger.runs()
        assert (october.run_id, november.run_id, november.is_damaged) == ("october", "november", False)
        assert ledger.inspect("october").steps == ledger.steps("october")
        assert not ledger.is_waiting(october)
        assert "november" not in {finding.run_id for finding in ledger.verify().findings}


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_diagnosis_tells_what_stands_around_the_file(db: Path) -> None:
    seen = AgentRunLedger.diagnose(str(db))
    assert seen.path == str(db.resolve())
    assert (seen.schema_version, seen.journal_mode, seen.trouble) == (seen.newest_schema_version, "wal", None)
    assert seen.size_bytes == db.stat().st_size
    assert seen.sqlite_version == sqlite3.sqlite_version


@pytest.mark.parametrize("content", [b"hello " * 2000, b"SQLite format 3\0" + b"\xff" * 8192])
def test_a_file_that_is_no_ledger_is_diagnosed_and_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(content)
    seen = AgentRunLedger.diagnose(path)
    assert seen.trouble is not None
    assert (seen.schema_version, seen.size_bytes) == (None, len(content))
    assert (os.listdir(tmp_path), path.read_bytes()) == (["other.db"], content)


def test_the_ledgers_of_a_folder_are_found_without_a_trace(db: Path) -> None:
    (db.parent / "notes.txt").write_text("no ledger")
    before = sorted(os.listdir(db.parent))
    assert ledgers_in(str(db.parent)) == ["agent.db"]
    assert sorted(os.listdir(db.parent)) == before
