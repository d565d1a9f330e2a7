"""What only the SQLite store promises: one file, real processes, real locks, and errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent_run_ledger.contract import Append, Listing, QueueTerms, Row
from agent_run_ledger.errors import (
    LeaseLost,
    LedgerError,
    NotALedger,
    Reentered,
    RunOwned,
    SchemaTooNew,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.stores import clock as clock_module
from agent_run_ledger.stores import open_store, owners, schema
from agent_run_ledger.stores.connections import Connections
from agent_run_ledger.stores.diagnosis import diagnose
from agent_run_ledger.stores.faults import named
from agent_run_ledger.stores.filelock import WriteLock
from agent_run_ledger.stores.owners import file_system_of
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock, a_row
from agent_run_ledger.testing.stores.words import LISTING

SECRET = b"s" * 32
SOURCES = str(Path(schema.__file__).parents[2])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def store(path: Path, clock: FakeClock) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        yield store


def create(store: SqliteStore, run_id: str = "r", owner: str = "a", rows: list[Row] | None = None) -> int:
    lease = store.create(run_id, owner, 30.0, SECRET, rows or [a_row(1, "created", b"{}")], LISTING)
    assert lease is not None
    return lease.token


def look(path: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(path, isolation_level=None))


def python(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process of its own, that runs `script`; what it prints first is read as the sign that it is ready."""
    head = (
        "import os, sys, contextlib\n"
        "from agent_run_ledger.contract import Row\n"
        "from agent_run_ledger.errors import *\n"
        "from agent_run_ledger.stores.sqlite import SqliteStore\n"
        "from agent_run_ledger.contract import Listing\n"
        "from agent_run_ledger.testing import FakeClock, a_row\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
        **options,
    )


def in_a_fork(work: Any) -> str:
    """What `work()` returns, or raises, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                said = str(work())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


# --- append-only ------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(store: SqliteStore, path: Path) -> Iterator[sqlite3.Connection]:
    """A ledger with one run of three entries, seen by somebody with plain SQL."""
    token = create(store)
    big = Row(3, "note", None, None, b"{}", b"r" * 32, b"x" * 100_000, b"d" * 32)
    store.append("r", token, 0, [a_row(2, payload=b"two"), big], synced=True)
    with look(path) as db:
        yield db


SAID = """
INSERT INTO entries (run_id, seq, kind, body, roots)
SELECT 'r', 1 + max(seq), 'erased', CAST('{}' AS BLOB), x'00' FROM entries WHERE run_id = 'r'
"""
"""The entry behind which something may be erased."""


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET body = x'00' WHERE seq = 2",
        "UPDATE entries SET kind = 'other' WHERE seq = 2",
        "UPDATE entries SET payload = x'00' WHERE seq = 2",
        "UPDATE entries SET payload = NULL WHERE seq = 2",
        "UPDATE entries SET digest = NULL WHERE seq = 2",
        "UPDATE entries SET seq = 9 WHERE seq = 3",
        "UPDATE entries SET run_id = 'x'",
        "UPDATE entries SET rowid = 99 WHERE seq = 3",
        "UPDATE OR REPLACE entries SET seq = 2 WHERE seq = 3",
        "UPDATE entries SET roots = x'', payload = NULL, digest = NULL WHERE seq = 2",
        "DELETE FROM entries",
        "DELETE FROM entries WHERE seq = 3",
        "INSERT OR REPLACE INTO entries (run_id, seq, kind, body, roots) VALUES ('r', 2, 'x', x'', x'')",
        "INSERT OR REPLACE INTO entries (rowid, run_id, seq, kind, body, roots) VALUES (1, 'r', 4, 'x', x'', x'')",
        "INSERT INTO entries (run_id, seq, kind, body, roots) VALUES ('r', 5, 'x', x'', x'')",
        "INSERT INTO entries (run_id, seq, kind, body, roots) VALUES ('r', 0, 'x', x'', x'')",
        "UPDATE payloads SET bytes = x'00'",
        "UPDATE payloads SET digest = x'00', bytes = NULL",
        "DELETE FROM payloads",
        "INSERT OR REPLACE INTO payloads SELECT run_id, digest, x'00' FROM payloads",
        "UPDATE secrets SET secret = x'00'",
        "UPDATE runs SET fencing_token = 0",
        "UPDATE runs SET run_id = 'x'",
        "DELETE FROM runs",
        "INSERT OR REPLACE INTO runs (run_id, fencing_token) VALUES ('r', 0)",
        "INSERT INTO tombstones VALUES ('r', 3, x'00', 'me', 'it still runs', 1.0)",
        "INSERT INTO tombstones VALUES ('unknown', 3, x'00', 'me', 'there is none', 1.0)",
    ],
)
def test_what_was_written_is_neither_changed_nor_deleted(written: sqlite3.Connection, statement: str) -> None:
    before = list(written.iterdump())
    with pytest.raises(sqlite3.IntegrityError) as refused:
        written.execute(statement)
    assert any(word in str(refused.value) for word in ("append-only", "erased", "run", "tombstone"))
    assert list(written.iterdump()) == before


@pytest.mark.parametrize(
    "change",
    ["rowid = 99", "run_id = 'x'", "seq = 9", "kind = ''", "position = ''", "attempt = 9", "body = x''", "roots = x''"],
)
def test_while_a_payload_is_erased_nothing_else_can_be_changed(written: sqlite3.Connection, change: str) -> None:
    erase = "payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL"
    written.execute(SAID)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        written.execute(f"UPDATE entries SET {erase}, {change} WHERE seq = 3")
    written.execute(f"UPDATE entries SET {erase} WHERE seq = 3")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE seq = 2",
        "UPDATE payloads SET bytes = NULL",
        "UPDATE secrets SET secret = NULL",
    ],
)
def test_nothing_is_erased_but_behind_an_entry_that_says_so(written: sqlite3.Connection, statement: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="behind an entry that says so"):
        written.execute(statement)
    written.execute(SAID)
    written.execute(statement)


def test_the_secret_that_is_sealed_under_a_key_can_be_sealed_under_another_and_no_plain_one(
    written: sqlite3.Connection,
) -> None:
    for forbidden in ("zeroblob(32)", "zeroblob(33)", "x''"):
        with pytest.raises(sqlite3.IntegrityError, match="not changed"):
            written.execute(f"UPDATE secrets SET secret = {forbidden}")
    written.execute("INSERT INTO secrets VALUES ('other', zeroblob(100))")
    written.execute("UPDATE secrets SET secret = zeroblob(90) WHERE run_id = 'other'")
    with pytest.raises(sqlite3.IntegrityError, match="not changed"):
        written.execute("UPDATE secrets SET secret = zeroblob(32) WHERE run_id = 'other'")
    with pytest.raises(sqlite3.IntegrityError, match="tombstone"):
        written.execute("DELETE FROM secrets")


def test_a_payload_can_be_erased_together_with_all_that_tells_of_it(
    written: sqlite3.Connection, store: SqliteStore
) -> None:
    erase = "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE seq = ?"
    written.execute(SAID)
    written.execute("UPDATE payloads SET bytes = NULL")
    written.execute(erase, (2,))
    written.execute(erase, (3,))
    written.execute("UPDATE secrets SET secret = NULL")
    rows = store.read("r", 1)
    assert [(row.payload, row.digest) for row in rows] == [(None, None)] * 3
    assert [row.body for row in rows[:2]] == [a_row(2).body, b"{}"]
    assert store.secret("r") == b""
    # The same bytes come again, rightfully, in a later entry.
    again = Row(5, "note", None, None, b"{}", b"r" * 32, b"x" * 100_000, b"d" * 32)
    assert store.append("r", 1, 0, [again], synced=True)
    assert store.read("r", 4) == [again]
    with pytest.raises(sqlite3.IntegrityError, match="once they are erased"):
        written.execute("DELETE FROM payloads")


def test_an_ended_run_is_deleted_only_behind_a_tombstone_that_stays(store: SqliteStore, path: Path) -> None:
    create(store, rows=[a_row(1, "finished", b"{}", state="COMPLETED")])
    with look(path) as db:
        with pytest.raises(sqlite3.IntegrityError):
            db.execute("DELETE FROM entries WHERE run_id = 'r'")
        db.execute("INSERT INTO tombstones VALUES ('r', 1, x'00', 'me', 'asked to', 1.0)")
        for table in ("entries", "runs"):
            db.execute(f"DELETE FROM {table} WHERE run_id = 'r'")
        for statement in (
            "UPDATE tombstones SET why = 'no'",
            "DELETE FROM tombstones",
            "INSERT OR REPLACE INTO tombstones VALUES ('r', 0, x'', '', '', 0)",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(statement)
    assert store.read("r") == []
    assert store.create("r", "a", 30.0, SECRET, [a_row(1)], LISTING) is None
    assert not store.enqueue("r", SECRET, [a_row(1)], LISTING, 0.0)


# --- payloads ---------------------------------------------------------------------------------------------------------


def test_a_large_payload_is_kept_once_per_run(store: SqliteStore, path: Path) -> None:
    payload = os.urandom(70_000)
    digest = hashlib.sha256(payload).digest()
    rows = [Row(seq, "note", None, None, b"{}", b"r" * 32, payload, digest) for seq in (2, 3, 4)]
    for run_id in ("one", "two"):
        token = create(store, run_id)
        for row in rows:
            assert store.append(run_id, token, 0, [row], synced=False)
        assert store.read(run_id, 1) == rows
    with look(path) as db:
        kept = db.execute("SELECT run_id, digest, length(bytes) FROM payloads ORDER BY run_id").fetchall()
        assert kept == [("one", digest, 70_000), ("two", digest, 70_000)]


# --- views ------------------------------------------------------------------------------------------------------------


class Flow:
    """Writes the entries of steps as an engine writes them."""

    def __init__(self, store: SqliteStore, run_id: str = "r") -> None:
        self.store, self.run_id, self.seq = store, run_id, 1
        body = {"at": 100.0, "state": "PENDING", "steps": 0, "token": 1}
        create(store, run_id, rows=[self._row("created", None, body, b'{"goal":"G","input":null}')])

    def _row(self, kind: str, position: str | None, body: dict[str, Any], payload: bytes | None, **more: Any) -> Row:
        body = {"run": self.run_id, "seq": self.seq, "kind": kind, **body}
        digest = None if payload is None else hashlib.sha256(payload).digest()
        data = json.dumps(body).encode()
        root = hashlib.sha256(b"\0" + data).digest()
        return Row(self.seq, kind, position, body.get("attempt"), data, root * 2, payload, digest, **more)

    def write(self, kind: str, position: str | None, payload: bytes | None = None, **body: Any) -> Row:
        self.seq += 1
        more = {"fingerprint": b"\xfa" * 32} if kind == "intent" else {}
        row = self._row(kind, position, {"at": 100.0 + self.seq, "token": 1, "steps": 1, **body}, payload, **more)
        assert self.store.append(self.run_id, 1, 0, [row], synced=False)
        return row

    def intent(self, position: str, step: int, payload: bytes = b'{"x":1}', attempt: int = 1, left: int = 3) -> Row:
        body = {"pos": position, "step": step, "attempt": attempt, "tool": f"t{step}", "key": f"k{step}", "input": "55"}
        return self.write("intent", position, payload, state="RUNNING", step_state="RUNNING", left=left, **body)

    def outcome(self, position: str, ok: str, payload: bytes, step_state: str = "COMPLETED", left: int = 3) -> Row:
        return self.write(
            "outcome", position, payload, state="CHECKPOINTED", ok=ok, step_state=step_state, left=left, steps=2
        )


def ask(path: Path, statement: str, *values: object) -> list[dict[str, Any]]:
    with look(path) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(statement, values)]


def test_the_views_have_exactly_their_columns(store: SqliteStore, path: Path) -> None:
    with look(path) as db:
        columns = {
            view: [column[0] for column in db.execute(f"SELECT * FROM {view}").description]
            for view in ("agent_runs", "run_steps", "agent_step_journal")
        }
    assert columns == {
        "agent_runs": ["run_id", "goal", "status", "total_steps", "created_at", "updated_at"],
        "run_steps": [
            "step_id",
            "run_id",
            "step_number",
            "tool_name",
            "arguments_json",
            "state",
            "output_json",
            "error_message",
            "fingerprint",
            "created_at",
            "completed_at",
            "state_version",
            "idempotency_key",
            "input_digest",
            "output_digest",
            "retry_budget_remaining",
            "fencing_token",
        ],
        "agent_step_journal": [
            "task_id",
            "step_index",
            "tool_name",
            "idempotency_key",
            "arguments_json",
            "status",
            "output_json",
            "created_at",
            "updated_at",
        ],
    }


def test_a_completed_step_is_one_row_of_run_steps(store: SqliteStore, path: Path) -> None:
    flow = Flow(store)
    intent = flow.intent("1", 1)
    flow.outcome("1", "completed", b'"done"')
    (step,) = ask(path, "SELECT * FROM run_steps WHERE run_id = 'r'")
    assert step == {
        "step_id": "step_" + intent.roots[:10].hex(),
        "run_id": "r",
        "step_number": 1,
        "tool_name": "t1",
        "arguments_json": '{"x":1}',
        "state": "COMPLETED",
        "output_json": '"done"',
        "error_message": None,
        "fingerprint": "fa" * 32,
        "created_at": 102.0,
        "completed_at": 103.0,
        "state_version": 3,
        "idempotency_key": "k1",
        "input_digest": hashlib.sha256(b'{"x":1}').hexdigest(),
        "output_digest": hashlib.sha256(b'"done"').hexdigest(),
        "retry_budget_remaining": 3,
        "fencing_token": 1,
    }
    (run,) = ask(path, "SELECT * FROM agent_runs")
    assert run == {
        "run_id": "r",
        "goal": "G",
        "status": "CHECKPOINTED",
        "total_steps": 2,
        "created_at": 100.0,
        "updated_at": 103.0,
    }
    (journal,) = ask(path, "SELECT * FROM agent_step_journal")
    assert journal == {
        "task_id": "r",
        "step_index": 1,
        "tool_name": "t1",
        "idempotency_key": "k1",
        "arguments_json": '{"x":1}',
        "status": "committed",
        "output_json": '"done"',
        "created_at": 102.0,
        "updated_at": 103.0,
    }


def test_the_views_show_where_each_step_stands(store: SqliteStore, path: Path) -> None:
    flow = Flow(store)
    flow.intent("1", 1)
    flow.outcome("1", "failed", b'{"type":"ValueError","message":"no"}', "FAILED", left=2)
    flow.intent("2", 2)
    flow.outcome("2", "failed", b'{"type":"KeyError","message":""}', "FAILED")
    flow.intent("2", 2, attempt=2, left=1)
    flow.intent("10", 3)
    flow.write("value", "11", b"1.5", state="RUNNING")
    flow.write("parked", "10", b'{"why":"?"}', state="BLOCKED", step_state="BLOCKED")
    flow.intent("12", 4)
    flow.outcome("12", "unstorable", b'{"type":"UnserialisableOutput","message":"at $.x"}', "COMPLETED")
    columns = "step_number, state, error_message, completed_at, state_version, retry_budget_remaining, output_json"
    assert [tuple(step.values()) for step in ask(path, f"SELECT {columns} FROM run_steps")] == [
        (1, "FAILED", "ValueError: no", 103.0, 3, 2, None),
        (2, "RUNNING", "KeyError", None, 6, 1, None),
        (3, "BLOCKED", None, None, 9, 3, None),
        (4, "COMPLETED", "UnserialisableOutput: at $.x", 111.0, 11, 3, None),
    ]
    status = "SELECT step_index, status FROM agent_step_journal"
    journal = [tuple(step.values()) for step in ask(path, status)]
    assert journal == [(1, "failed"), (2, "pending"), (3, "pending"), (4, "failed")]
    store.release("r", 1)
    journal = [tuple(step.values()) for step in ask(path, status)]
    assert journal == [(1, "failed"), (2, "in_doubt"), (3, "in_doubt"), (4, "failed")]
    store.claim("r", "b", 30.0)
    journal = [tuple(step.values()) for step in ask(path, status)]
    assert journal == [(1, "failed"), (2, "in_doubt"), (3, "in_doubt"), (4, "failed")]


def test_a_note_shows_a_run_as_blocked_unless_it_has_ended(store: SqliteStore, path: Path) -> None:
    flow = Flow(store)
    store.annotate("r", 1, "divergence")
    assert ask(path, "SELECT status FROM agent_runs") == [{"status": "BLOCKED"}]
    flow.write("finished", None, b"1", state="COMPLETED")
    assert ask(path, "SELECT status FROM agent_runs") == [{"status": "COMPLETED"}]
    store.annotate("r", 1, "late")
    assert ask(path, "SELECT status FROM agent_runs") == [{"status": "COMPLETED"}]


def test_the_views_show_large_payloads_whole_and_erased_or_encoded_ones_not_at_all(
    store: SqliteStore, path: Path
) -> None:
    flow = Flow(store)
    large = json.dumps("x" * 80_000).encode()
    flow.intent("1", 1, large)
    flow.outcome("1", "completed", large)
    columns = "arguments_json, output_json, input_digest, output_digest, fingerprint"
    (step,) = ask(path, f"SELECT {columns} FROM run_steps")
    assert step["arguments_json"] == step["output_json"] == large.decode()
    with look(path) as db:
        db.execute(SAID)
        db.execute(
            "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE seq = 3"
        )
    (step,) = ask(path, f"SELECT {columns} FROM run_steps")
    assert (step["arguments_json"], step["output_json"], step["output_digest"]) == (large.decode(), None, None)
    with look(path) as db:
        db.execute("UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL")
    assert set(ask(path, f"SELECT {columns} FROM run_steps")[0].values()) == {None}
    assert ask(path, "SELECT goal FROM agent_runs") == [{"goal": None}]
    sealed = (b"cipher", b"sealed", b"sealed", "aes")
    rows = [
        Row(5, "intent", "2", 1, b'{"tool":"t"}', b"r" * 32, *sealed),
        Row(6, "outcome", "2", 1, b'{"ok":"completed"}', b"r" * 32, *sealed),
    ]
    assert store.append("r", 1, 0, rows, synced=False)
    assert set(ask(path, f"SELECT {columns} FROM run_steps WHERE tool_name = 't'")[-1].values()) == {None}


def test_a_body_that_is_not_json_hides_no_other_run(store: SqliteStore, path: Path) -> None:
    Flow(store, "good").intent("1", 1)
    bad = Row(1, "created", None, None, b"\xff{", b"r" * 32, b"\xff{")
    worse = Row(2, "intent", "1", 1, b"\xff{", b"r" * 32, b"\xff{")
    create(store, "bad", rows=[bad, worse])
    assert [run["run_id"] for run in ask(path, "SELECT * FROM agent_runs ORDER BY run_id")] == ["bad", "good"]
    assert {step["run_id"] for step in ask(path, "SELECT * FROM run_steps")} == {"bad", "good"}
    assert {step["task_id"] for step in ask(path, "SELECT * FROM agent_step_journal")} == {"bad", "good"}


def test_a_view_of_one_run_reads_that_run_only(store: SqliteStore, path: Path) -> None:
    for view, column in (("agent_runs", "run_id"), ("run_steps", "run_id"), ("agent_step_journal", "task_id")):
        with look(path) as db:
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {view} WHERE {column} = 'r'")]
        assert [line for line in plan if line.startswith("SCAN entries")] == [], plan
        assert any("run_id=?" in line for line in plan)


# --- owners -----------------------------------------------------------------------------------------------------------

OWNER = """
store = SqliteStore(sys.argv[1], clock=FakeClock())
for run_id in ("r", "s"):
    store.create(run_id, sys.argv[2], 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@contextlib.contextmanager
def another_owner(path: Path, owner: str = "a") -> Iterator[subprocess.Popen[str]]:
    process = python(OWNER, str(path), owner)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_owner_is_known_to_be_dead_at_once_and_all_its_runs_are_free(path: Path, clock: FakeClock) -> None:
    with another_owner(path) as process, contextlib.closing(SqliteStore(path, clock=clock)) as store:
        with pytest.raises(RunOwned):
            store.claim("r", "b", 30.0)
        process.kill()
        process.wait()
        assert store.claim("r", "b", 30.0).token == 2
        other = store.head("s")
        assert other is not None
        assert (other.owner, other.token) == (None, 1)
        assert os.listdir(f"{path}.owners") == ["b"]
        assert store.claim("s", "b", 30.0).token == 2


def test_a_paused_owner_keeps_its_run_till_the_lease_runs_out_and_is_refused_after(
    path: Path, clock: FakeClock
) -> None:
    with another_owner(path) as process, contextlib.closing(SqliteStore(path, clock=clock)) as store:
        os.kill(process.pid, signal.SIGSTOP)
        clock.advance(29.0)
        with pytest.raises(RunOwned):
            store.claim("r", "b", 30.0)
        clock.advance(2.0)
        assert store.claim("r", "b", 30.0).token == 2
        with pytest.raises(LeaseLost):
            store.append("r", 1, 0, [a_row(2)], synced=True)


def test_a_closed_store_gives_its_runs_back_at_once(path: Path, clock: FakeClock) -> None:
    with another_owner(path) as process, contextlib.closing(SqliteStore(path, clock=clock)) as store:
        process.communicate("")
        head = store.head("r")
        assert head is not None
        assert head.owner is None
        assert os.listdir(f"{path}.owners") == []


def test_a_missing_owner_file_proves_nothing(path: Path, clock: FakeClock) -> None:
    with another_owner(path), contextlib.closing(SqliteStore(path, clock=clock)) as store:
        os.unlink(f"{path}.owners/a")
        with pytest.raises(RunOwned):
            store.claim("r", "b", 30.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)


def test_an_owner_id_belongs_to_one_living_ledger(path: Path, clock: FakeClock) -> None:
    with another_owner(path, "same") as process, contextlib.closing(SqliteStore(path, clock=clock)) as store:
        with pytest.raises(StoreError, match="alive under the owner id 'same'"):
            store.claim("r", "same", 30.0)
        process.kill()
        process.wait()
        assert store.claim("r", "same", 30.0).token == 2


def test_a_run_of_an_earlier_boot_is_free(store: SqliteStore, path: Path) -> None:
    create(store)
    with look(path) as db:
        db.execute("UPDATE runs SET lease_boot = 'an earlier one', lease_until = 1e9, owner = 'x'")
    assert store.claim("r", "b", 30.0).token == 2


def test_a_lease_of_another_machine_is_watched_for_as_long_as_it_is_valid(
    store: SqliteStore, path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._holding.owners, "is_local", lambda: False)
    create(store)
    with look(path) as db:
        db.execute("UPDATE runs SET lease_boot = 'another machine', lease_until = 5.0, owner = 'x'")
        for _ in range(3):
            with pytest.raises(RunOwned):
                store.claim("r", "b", 30.0)
            clock.advance(20.0)
            db.execute("UPDATE runs SET lease_until = lease_until + 3.0")  # it lives
    with pytest.raises(RunOwned):
        store.claim("r", "b", 30.0)
    clock.advance(31.0)
    assert store.claim("r", "b", 30.0).token == 2


def test_a_new_epoch_begins_above_all_tokens_of_the_old_ones(store: SqliteStore, path: Path) -> None:
    token = create(store)
    with look(path) as db:
        db.execute("UPDATE meta SET value = 1700000000 WHERE key = 'epoch'")
    store.release("r", token)
    lease = store.claim("r", "b", 30.0)
    assert lease.token == (1_700_000_000 << 20) + 1
    assert create(store, "s") == store.first_token() == (1_700_000_000 << 20) + 1
    store.release("r", lease.token)
    assert store.claim("r", "c", 30.0).token == lease.token + 1


def test_an_owner_id_is_data_and_never_a_path(store: SqliteStore, path: Path) -> None:
    for number, owner in enumerate(["../../evil", "/etc/x", "..", "", "a\0b", "x" * 300, "ä b", ".hidden"]):
        create(store, f"r{number}", owner)
    assert all(os.path.isfile(f"{path}.owners/{name}") for name in os.listdir(f"{path}.owners"))
    assert len(os.listdir(f"{path}.owners")) == 8
    assert sorted(os.listdir(path.parent)) == [
        "ledger.db",
        "ledger.db-shm",
        "ledger.db-wal",
        "ledger.db.lock",
        "ledger.db.owners",
    ]


def test_the_file_system_of_a_path_is_that_of_the_mount_nearest_above_it() -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:40 / /home\\040dir rw shared:2 master:1 - nfs4 host:/home rw\n"
        "24 22 0:41 / /home rw - fuse.sshfs host: rw\n"
        "25 22 0:42 / /tmp rw - tmpfs tmpfs rw\n"
        "26 25 0:43 / /tmp rw - overlay overlay rw\n"
    )
    paths = ["/x.db", "/home dir/x.db", "/home/x.db", "/homes/x.db", "/tmp/x.db"]
    assert [file_system_of(path, mounts) for path in paths] == ["ext4", "nfs4", "fuse.sshfs", "ext4", "overlay"]


# --- many processes ---------------------------------------------------------------------------------------------------


def test_eight_processes_that_open_a_new_ledger_at_once_make_it_once(path: Path) -> None:
    script = """
print("ready", flush=True)
sys.stdin.readline()
with contextlib.closing(SqliteStore(sys.argv[1], clock=FakeClock())) as store:
    store.create(sys.argv[2], sys.argv[2], 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
"""
    processes = [python(script, str(path), f"r{number}") for number in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert list(path.parent.glob("*backup*")) == []
    with contextlib.closing(SqliteStore(path, clock=FakeClock())) as store:
        assert len(list(store.summaries())) == 8
        assert list(store.check()) == []


def test_processes_that_write_at_once_all_get_their_turn(path: Path) -> None:
    script = """
store = SqliteStore(sys.argv[1], clock=FakeClock(), durability="process")
name = sys.argv[2]
store.create(name, name, 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
for seq in range(2, 402):
    assert store.append(name, 1, 0, [a_row(seq, payload=b"x" * 4000)], synced=seq % 50 == 0)
store.close()
"""
    processes = [python(script, str(path), f"r{number}") for number in range(3)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    with contextlib.closing(SqliteStore(path, clock=FakeClock())) as store:
        assert [summary.last.seq for summary in store.summaries()] == [401] * 3
        assert list(store.check()) == []


def test_what_was_acknowledged_survives_a_kill_in_the_middle_of_writing(path: Path) -> None:
    script = """
store = SqliteStore(sys.argv[1], clock=FakeClock(), durability="process")
store.create("r", "a", 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
seq = 1
while True:
    pair = [a_row(seq + 1, payload=b"x" * 3000), a_row(seq + 2)]
    assert store.append("r", 1, 0, pair, synced=False)
    seq += 2
    print(seq, flush=True)
"""
    for size in (1, 60, 450):
        process = python(script, f"{path}{size}")
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(size)][-1]
        process.kill()
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.communicate()
        with contextlib.closing(SqliteStore(f"{path}{size}", clock=FakeClock())) as store:
            seqs = [row.seq for row in store.read("r")]
            assert seqs == list(range(1, len(seqs) + 1))
            assert acknowledged <= len(seqs) <= acknowledged + 2
            assert len(seqs) % 2 == 1  # each pair whole or not at all
            assert list(store.check()) == []


def test_a_long_log_is_copied_into_the_file_while_the_ledger_is_in_use(store: SqliteStore, path: Path) -> None:
    token = create(store)
    for seq in range(2, 1502):
        assert store.append("r", token, 0, [a_row(seq, payload=b"x" * 20_000)], synced=False)
    assert os.path.getsize(f"{path}-wal") < 16 * 1024 * 1024
    assert os.path.getsize(path) > 20 * 1024 * 1024


def test_who_waits_too_long_for_the_lock_is_told_that_the_store_is_busy(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock, busy_seconds=0.02)) as store:
        token = create(store)
        other = WriteLock(f"{path}.lock", 0.0)
        other.acquire()
        with pytest.raises(StoreBusy, match="nothing was written"):
            store.append("r", token, 0, [a_row(2)], synced=True)
        other.release()
        other.close()
        with look(path) as db:  # somebody who does not know our lock
            db.execute("BEGIN IMMEDIATE")
            for rows in ([a_row(2)], [a_row(2), a_row(3)]):
                with pytest.raises(StoreBusy, match="nothing was written"):
                    store.append("r", token, 0, rows, synced=True)
            db.execute("ROLLBACK")
        assert store.append("r", token, 0, [a_row(2)], synced=True)


def test_a_reader_does_not_wait_for_a_writer(store: SqliteStore, path: Path) -> None:
    create(store)
    with store._files.mutex:  # another thread is in the middle of a write
        assert len(store.read("r")) == 1
        assert store.head("r") is not None
        assert len(list(store.summaries())) == 1


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_works_with_a_connection_and_an_owner_of_its_own(store: SqliteStore, path: Path) -> None:
    token = create(store)

    def child() -> str:
        assert len(store.read("r")) == 1
        lease = store.create("of the child", "a", 30.0, SECRET, [a_row(1)], LISTING)
        assert lease is not None
        assert store.append("of the child", lease.token, 0, [a_row(2)], synced=True)
        assert store.claim("of the child", "a", 30.0) == lease
        store.close()
        return lease.owner

    assert in_a_fork(child).startswith("a.")
    assert store.append("r", token, 0, [a_row(2)], synced=True)
    assert [summary.last.seq for summary in store.summaries()] == [2, 2]
    assert list(store.check()) == []


def test_the_runs_of_a_parent_stay_its_own_after_a_fork(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    token = create(store)

    def child() -> str:
        with pytest.raises(LeaseLost):
            store.append("r", token, 0, [a_row(2)], synced=True)
        with pytest.raises(LeaseLost):
            store.renew("r", token, 30.0)
        store.release("r", token)
        store.annotate("r", token, "not mine")
        with pytest.raises(RunOwned):
            store.claim("r", "a", 30.0)
        store.close()
        return "refused"

    assert in_a_fork(child) == "refused"
    head = store.head("r")
    assert head is not None
    assert (head.owner, head.token, head.note) == ("a", token, None)
    # The child is gone, and the parent's lock still holds.
    with contextlib.closing(SqliteStore(path, clock=clock)) as other, pytest.raises(RunOwned):
        other.claim("r", "b", 30.0)
    assert store.append("r", token, 0, [a_row(2)], synced=True)


def test_what_a_child_writes_after_its_parent_closed_is_kept(store: SqliteStore, path: Path) -> None:
    create(store)
    (to_parent, from_child), (to_child, from_parent) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lease = store.create("of the child", "c", 30.0, SECRET, [a_row(1)], LISTING)
            assert lease is not None
            os.write(from_child, b"x")
            os.read(to_child, 1)
            assert store.append("of the child", lease.token, 0, [a_row(2)], synced=True)
            os.write(from_child, b"y")
        finally:
            os._exit(0)  # and its log is left to the next
    assert os.read(to_parent, 1) == b"x"
    store.close()
    os.write(from_parent, b"x")
    assert os.read(to_parent, 1) == b"y"
    os.waitpid(child, 0)
    for fd in (to_parent, from_child, to_child, from_parent):
        os.close(fd)
    with contextlib.closing(SqliteStore(path, clock=FakeClock())) as store:
        assert len(store.read("of the child")) == 2
        assert list(store.check()) == []


def test_a_child_that_outlives_its_parent_does_not_keep_its_runs(path: Path, clock: FakeClock) -> None:
    script = """
store = SqliteStore(sys.argv[1], clock=FakeClock())
store.create("r", "a", 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
child = os.fork()
if child == 0:
    store.head("r")
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    process = python(script, str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.wait()
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        assert store.claim("r", "b", 30.0).token == 2
    process.communicate("")


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_store_that_is_thrown_away_keeps_no_file_open(path: Path, clock: FakeClock) -> None:
    def open_files() -> set[str]:
        return {
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)
        }

    store = SqliteStore(path, clock=clock)
    create(store)
    with store._files.mutex:
        store.read("r")
    assert any(str(path) in name for name in open_files())
    del store
    assert [name for name in open_files() if str(path) in name] == []
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        assert store.claim("r", "b", 30.0).token == 2


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_process_that_exits_without_closing_gives_its_runs_back(path: Path, clock: FakeClock) -> None:
    process = python(OWNER.replace("store.close()", ""), str(path), "a")
    process.communicate("")
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        head = store.head("r")
        assert head is not None
        assert head.owner is None


# --- opening ----------------------------------------------------------------------------------------------------------


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def a_foreign_database(path: Path) -> None:
    with look(path) as db:
        db.execute("CREATE TABLE notes (text)")


def a_foreign_database_with_an_id(path: Path) -> None:
    with look(path) as db:
        db.execute("PRAGMA application_id=77")
        db.execute("CREATE TABLE notes (text)")


def a_foreign_database_whose_writer_was_killed(path: Path) -> None:
    script = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('CREATE TABLE notes (text)'); db.execute('PRAGMA journal_mode=WAL')\n"
        "db.execute('INSERT INTO notes VALUES (1)'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert os.path.getsize(f"{path}-wal") > 0


def a_text(path: Path) -> None:
    path.write_text("Dear diary, today I was not a database.\n" * 100)


def a_newer_ledger(path: Path) -> None:
    SqliteStore(path, clock=FakeClock()).close()
    with look(path) as db:
        db.execute("PRAGMA user_version=99")


def a_ledger_without_a_version(path: Path) -> None:
    SqliteStore(path, clock=FakeClock()).close()
    with look(path) as db:
        db.execute("PRAGMA user_version=0")


def a_truncated_ledger(path: Path) -> None:
    with contextlib.closing(SqliteStore(path, clock=FakeClock())) as store:
        create(store)
    os.truncate(path, 8192)


def is_killed_at(limit_bytes: int, write: Any) -> bool:
    """Whether a forked child that does `write()` is killed by the kernel as it writes a file beyond this size."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            write()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGXFSZ
    return status != 0


def write_as_if_killed_in_the_commit(path: Path, *statements: str) -> None:
    """Leave the file and its journal as they stand when all is written and the journal not yet deleted."""
    with look(path) as db:
        assert db.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
        db.execute("PRAGMA synchronous=OFF")  # so that every byte of the journal is in it before the commit
        db.execute("BEGIN")
        for statement in statements:
            db.execute(statement)
        journal = Path(f"{path}-journal").read_bytes()
        db.execute("COMMIT")
    Path(f"{path}-journal").write_bytes(journal)


def a_foreign_database_half_made(path: Path, application_id: int = 77) -> None:
    def make() -> None:
        db = sqlite3.connect(path, isolation_level=None)
        db.executescript(f"BEGIN; PRAGMA application_id={application_id}; CREATE TABLE a (x); CREATE TABLE b (x); END;")

    assert is_killed_at(4096, make)
    assert os.path.getsize(f"{path}-journal") > 0


def a_foreign_database_without_an_id_half_made(path: Path) -> None:
    a_foreign_database_half_made(path, 0)


def a_foreign_database_half_changed(path: Path) -> None:
    a_foreign_database(path)
    write_as_if_killed_in_the_commit(path, "CREATE TABLE more (x)")


def a_text_in_the_place_of_a_half_made_ledger(path: Path) -> None:
    assert is_killed_at(4096, lambda: SqliteStore(path, clock=FakeClock()))
    Path(f"{path}.lock").unlink()
    a_text(path)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (a_foreign_database, NotALedger, "another program"),
        (a_foreign_database_with_an_id, NotALedger, "application id 77"),
        (a_foreign_database_whose_writer_was_killed, NotALedger, "another program"),
        (a_foreign_database_half_made, StoreCorrupt, "damaged or truncated"),
        (a_foreign_database_without_an_id_half_made, StoreCorrupt, "damaged or truncated"),
        (a_foreign_database_half_changed, NotALedger, "another program"),
        (a_text, NotALedger, "not an SQLite database"),
        (a_text_in_the_place_of_a_half_made_ledger, NotALedger, "not an SQLite database"),
        (a_newer_ledger, SchemaTooNew, "schema 99"),
        (a_ledger_without_a_version, StoreCorrupt, "schema version 0"),
        (a_truncated_ledger, StoreCorrupt, "damaged or truncated"),
    ],
)
def test_what_is_no_ledger_of_ours_is_named_and_left_as_it_is(
    path: Path, make: Any, error: type[StoreError], says: str, read_only: bool
) -> None:
    make(path)
    before = everything_in(path.parent)
    with pytest.raises(error, match=says) as refused:
        open_store(path, durability="full", clock=FakeClock(), read_only=read_only)
    assert str(path) in str(refused.value)
    assert "not changed" in str(refused.value)
    assert everything_in(path.parent) == before


@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_folder_is_named(path: Path, read_only: bool) -> None:
    with pytest.raises(StoreUnavailable, match="there is no"):
        SqliteStore(path / "sub" / "x.db", clock=FakeClock(), read_only=read_only)
    assert list(path.parent.iterdir()) == []


def test_a_folder_is_no_database(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreUnavailable, match="is a folder"):
        SqliteStore(path, clock=FakeClock())


def test_an_empty_file_becomes_a_ledger(path: Path, clock: FakeClock) -> None:
    path.touch()
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
    with look(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA_VERSION,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("keeps_lock", [True, False])
def test_a_ledger_whose_maker_was_killed_at_any_write_can_be_opened(tmp_path: Path, keeps_lock: bool) -> None:
    half_made = 0
    for limit_bytes in (1024, 2048, 4096, 4096 + 512, *range(8192, 1_000_000, 4096)):
        path = tmp_path / f"{limit_bytes}.db"
        if not is_killed_at(limit_bytes, functools.partial(SqliteStore, path, clock=FakeClock())):
            break
        if not keeps_lock:
            Path(f"{path}.lock").unlink()
        half_made += path.stat().st_size > 0 and os.path.getsize(f"{path}-journal") > 0
        with contextlib.closing(SqliteStore(path, clock=FakeClock())) as store:
            create(store)
            assert list(store.check()) == []
        assert not os.path.exists(f"{path}-journal")
    assert half_made > 10


def test_a_half_made_ledger_of_zeros_can_be_opened(path: Path, clock: FakeClock) -> None:
    assert is_killed_at(8192, lambda: SqliteStore(path, clock=clock))
    path.write_bytes(bytes(8192))  # as a power cut can leave it: the journal was synced, and of the file only its size
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
        assert list(store.check()) == []


def test_who_may_only_read_a_half_made_ledger_is_told_to_open_it_for_writing(path: Path) -> None:
    assert is_killed_at(4096, lambda: SqliteStore(path, clock=FakeClock()))
    before = everything_in(path.parent)
    with pytest.raises(StoreReadOnly, match="once for writing"):
        SqliteStore(path, clock=FakeClock(), read_only=True)
    assert "once for writing" in str(diagnose(path).trouble)
    assert everything_in(path.parent) == before


@pytest.mark.parametrize("has_owners", [True, False])
def test_what_a_kill_left_half_written_in_a_ledger_is_undone(path: Path, clock: FakeClock, has_owners: bool) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
    if not has_owners:
        shutil.rmtree(f"{path}.owners")
    write_as_if_killed_in_the_commit(path, "CREATE TABLE extra (x)")
    with pytest.raises(StoreReadOnly, match="once for writing"):
        SqliteStore(path, clock=clock, read_only=True)
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        assert list(store.check()) == []
        assert len(store.read("r")) == 1
    assert ask(path, "SELECT 1 FROM sqlite_master WHERE name = 'extra'") == []


def test_a_foreign_database_that_only_looks_empty_gets_its_tables_back_and_is_refused(
    path: Path, clock: FakeClock
) -> None:
    a_foreign_database(path)
    before = path.read_bytes()
    write_as_if_killed_in_the_commit(path, "DROP TABLE notes")
    with pytest.raises(NotALedger, match="another program"):
        SqliteStore(path, clock=clock)
    assert path.read_bytes() == before


def test_a_database_that_was_deleted_moved_or_replaced_while_it_was_open_is_not_written_any_more(
    store: SqliteStore, path: Path, clock: FakeClock
) -> None:
    token = create(store)
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(StoreUnavailable, match="moved, deleted or replaced"):
        store.renew("r", token, 30.0)
    with pytest.raises(StoreUnavailable, match="moved, deleted or replaced"):
        store.append("r", token, 0, [a_row(2)], synced=False)
    assert not path.exists()
    SqliteStore(path, clock=clock).close()
    with pytest.raises(StoreUnavailable, match="moved, deleted or replaced"):
        store.append("r", token, 0, [a_row(2)], synced=False)


def test_a_disk_error_on_a_full_disk_says_that_the_disk_is_full(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    assert type(named(error, str(path))) is StoreUnavailable
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert type(named(error, str(path))) is StoreFull


def test_a_signal_handler_inside_of_a_write_may_read_and_gets_an_error_for_all_else(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create(store)
    refused: list[str] = []
    minding = store._files.mind_the_log

    def handler(*arguments: Any) -> None:
        """What a signal handler does that comes when the row is written and the locks are still held."""
        monkeypatch.setattr(store._files, "mind_the_log", minding)
        assert [row.seq for row in store.read("r")] == [1, 2]
        for call in (
            lambda: store.append("r", token, 0, [a_row(3)], synced=False),
            lambda: store.append_all([Append("r", token, 0, [a_row(3)])], synced=False),
            lambda: store.append_all([Append("r", token, 0, [a_row(3)])] * 2, synced=False),
            lambda: store.renew("r", token, 30.0),
            lambda: store.claim("r", "a", 30.0),
            lambda: create(store, "s"),
            lambda: store.release("r", token),
            store.close,
        ):
            with pytest.raises(Reentered) as caught:
                call()
            refused.append(str(caught.value))
        minding(*arguments)

    monkeypatch.setattr(store._files, "mind_the_log", handler)
    assert store.append("r", token, 0, [a_row(2)], synced=False)
    assert len(refused) == 8
    assert store.append("r", token, 0, [a_row(3)], synced=False)


def test_a_file_that_is_made_between_two_looks_is_no_foreign_one(path: Path, clock: FakeClock) -> None:
    looks = 0

    class Late(sqlite3.Connection):
        """Somebody else makes the ledger after this connection's first statement and before its second."""

        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            nonlocal looks
            looks += 1
            if looks == 2:
                SqliteStore(path, clock=clock).close()
            return super().execute(*arguments)

    database = schema.Database(str(path), WriteLock(f"{path}.lock", 1.0), 1.0, None)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, factory=Late)) as connection:
        assert not database._is_new(connection)
    assert looks >= 2


def test_opening_an_up_to_date_ledger_reads_no_migration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path, clock=FakeClock()).close()

    def read() -> list[str]:
        raise AssertionError("migrations were read")

    monkeypatch.setattr(schema, "load_migrations", read)
    SqliteStore(path, clock=FakeClock()).close()


def test_a_ledger_that_is_not_in_wal_mode_is_put_into_it(path: Path) -> None:
    SqliteStore(path, clock=FakeClock()).close()
    with look(path) as db:
        db.execute("PRAGMA journal_mode=DELETE")  # as a crash right after the schema was made would leave it
    SqliteStore(path, clock=FakeClock()).close()
    with look(path) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_damage_that_shows_later_is_named(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        token = create(store)
        for seq in range(2, 300):
            store.append("r", token, 0, [a_row(seq, payload=b"x" * 500)], synced=False)
    pages = os.path.getsize(path) // 4096
    with open(path, "r+b") as file:
        for page in range(25, pages):
            file.seek(page * 4096)
            file.write(b"\xde\xad" * 2048)
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        with pytest.raises(StoreCorrupt, match="restore a backup"):
            store.read("r")
        assert list(store.check()) != []


def test_check_names_what_is_missing_from_the_schema(store: SqliteStore, path: Path) -> None:
    with look(path) as db:
        db.execute("DROP TRIGGER entries_are_never_deleted")
        db.execute("DROP VIEW run_steps")
        db.execute("CREATE VIEW run_steps AS SELECT 1")
    wrong = "\n".join(store.check())
    assert "trigger entries_are_never_deleted is missing" in wrong
    assert "view run_steps of the schema was changed" in wrong


def test_a_read_only_store_reads_and_writes_nothing(store: SqliteStore, path: Path) -> None:
    token = create(store)
    with contextlib.closing(SqliteStore(path, clock=FakeClock(), read_only=True)) as reader:
        assert len(reader.read("r")) == 1
        assert reader.head("r") == store.head("r")
        assert len(list(reader.summaries())) == 1
        assert list(reader.check()) == []
        for call in (
            lambda: reader.create("s", "b", 30.0, SECRET, [a_row(1)], LISTING),
            lambda: reader.claim("r", "b", 30.0),
            lambda: reader.renew("r", token, 30.0),
            lambda: reader.release("r", token),
            lambda: reader.append("r", token, 0, [a_row(2)], synced=True),
            lambda: reader.post("r", "cancel", b"", "me", 1.0),
            lambda: reader.annotate("r", token, "x"),
        ):
            with pytest.raises(StoreReadOnly, match="opened read-only"):
                call()
        store.append("r", token, 0, [a_row(2)], synced=True)
        assert len(reader.read("r")) == 2
    os.unlink(f"{path}.lock")
    with contextlib.closing(SqliteStore(path, clock=FakeClock(), read_only=True)) as reader:
        assert in_a_fork(lambda: len(reader.read("r"))) == "2"
        assert len(reader.read("r")) == 2
    assert not os.path.exists(f"{path}.lock")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_file_is_made_only_by_who_may_write(path: Path, read_only: bool) -> None:
    if read_only:
        with pytest.raises(StoreUnavailable, match="there is no database"):
            SqliteStore(path, clock=FakeClock(), read_only=True)
        assert list(path.parent.iterdir()) == []
    else:
        SqliteStore(path, clock=FakeClock()).close()
        assert path.exists()


def test_a_ledger_that_this_user_may_not_write_is_named_and_can_be_read(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    for folder in path.parent.parents[:3]:
        folder.chmod(0o755)
    script = """
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    SqliteStore(sys.argv[1], clock=FakeClock())
except StoreReadOnly as error:
    print("refused" if "not writable" in str(error) and "read-only" in str(error) else error)
print(len(SqliteStore(sys.argv[1], clock=FakeClock(), read_only=True).read("r")))
try:
    SqliteStore(os.path.dirname(sys.argv[1]) + "/new.db", clock=FakeClock())
except StoreReadOnly as error:
    print("refused")
"""
    try:
        process = python(script, str(path))
        said, _ = process.communicate(timeout=60)
    finally:
        path.parent.chmod(0o755)
    assert said.split() == ["refused", "1", "refused"]


def test_a_name_with_odd_characters_is_a_name(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "a b?mode=ro&x#y%41'\"ä.db"
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
        with store._files.mutex:
            assert len(store.read("r")) == 1
    with contextlib.closing(SqliteStore(path, clock=clock, read_only=True)) as store:
        assert len(store.read("r")) == 1
    assert path.exists()


def test_a_link_to_a_ledger_is_that_ledger(tmp_path: Path, path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
        link = tmp_path / "link.db"
        link.symlink_to(path)
        with contextlib.closing(SqliteStore(link, clock=clock)) as other, pytest.raises(RunOwned):
            other.claim("r", "b", 30.0)
    assert not Path(f"{link}.lock").exists()


# --- migrations -------------------------------------------------------------------------------------------------------


def test_the_schema_version_is_the_number_of_the_last_migration() -> None:
    assert len(schema.load_migrations()) == schema.SCHEMA_VERSION


def test_an_older_ledger_is_migrated_after_a_backup_copy(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
    newer = [*schema.load_migrations(), "CREATE TABLE extra (x); -- the end", "ALTER TABLE extra ADD COLUMN y;"]
    with contextlib.closing(SqliteStore(path, clock=clock, migrations=newer)) as store:
        assert len(store.read("r")) == 1
        assert list(store.check()) == []
    with look(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA_VERSION + 2,)
        assert db.execute("SELECT x, y FROM extra").fetchall() == []
    with look(Path(f"{path}.v{schema.SCHEMA_VERSION}.backup")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA_VERSION,)
        assert db.execute("SELECT count(*) FROM entries").fetchone() == (1,)
        assert db.execute("SELECT 1 FROM sqlite_master WHERE name = 'extra'").fetchone() is None
    with pytest.raises(SchemaTooNew):
        SqliteStore(path, clock=clock)


def brought_to(path: Path, version: int, scripts: Sequence[str] | None = None) -> None:
    """Make the file, or bring it on, as an earlier version of the library would."""
    files = Connections(str(path), 30.0, migrations=(scripts or schema.load_migrations())[:version])
    files.open()
    files.close(30.0, lambda: None)


def test_a_file_of_every_earlier_version_comes_to_the_schema_of_a_new_one(tmp_path: Path, clock: FakeClock) -> None:
    scripts = schema.load_migrations()
    wanted = None
    for version in range(len(scripts), 0, -1):
        path = tmp_path / f"{version}.db"
        brought_to(path, version)
        with contextlib.closing(SqliteStore(path, clock=clock)) as store:
            create(store)
            assert list(store.check()) == []
        with look(path) as db:
            objects = sorted(db.execute(schema.OBJECTS).fetchall())
            assert db.execute("SELECT count(*) FROM agent_step_journal").fetchone() == (0,)
        wanted = wanted or objects
        assert objects == wanted


def test_a_new_file_is_what_the_migrations_make_of_an_empty_one(tmp_path: Path) -> None:
    seen = []
    for path, scripts in ((tmp_path / "whole.db", None), (tmp_path / "in_order.db", schema.load_migrations())):
        files = Connections(str(path), 30.0, migrations=scripts)
        files.open()
        files.close(30.0, lambda: None)
        with look(path) as db:
            made = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
            names = [name for kind, name, *_ in made if kind == "table"]
            rows = [db.execute(f'SELECT * FROM "{name}"').fetchall() for name in names]
            stamps = [
                db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version", "page_size")
            ]
            seen.append((made, rows, stamps))
    assert seen[0] == seen[1], "run tools/whole_schema.py"


LEDGERS_OF_OLD = """
INSERT INTO runs (run_id, owner, fencing_token) VALUES ('r', NULL, 7), ('plain', NULL, 1), ('broken', NULL, 1), ('odd', NULL, 1);
INSERT INTO secrets VALUES ('r', x'01');
INSERT INTO entries (run_id, seq, kind, body, roots) VALUES
    ('r', 1, 'created', CAST('{"at":1790000000.1234567,"agent":"books \\"ä\\""}' AS BLOB), zeroblob(32)),
    ('plain', 1, 'created', CAST('{"at":1.5}' AS BLOB), zeroblob(32)),
    ('broken', 1, 'created', x'ff00', zeroblob(32)),
    ('odd', 1, 'created', CAST('{"at":[],"agent":"\\ud800"}' AS BLOB), zeroblob(32)),
    ('r', 2, 'note', CAST('{"at":2.5,"agent":"other"}' AS BLOB), zeroblob(32));
"""
LISTED_SINCE = (
    3,
    """
UPDATE runs SET created_at = 1790000000.1234567, agent = 'books "ä"' WHERE run_id = 'r';
UPDATE runs SET created_at = 1.5 WHERE run_id = 'plain';
""",
)
"""The version from which on heads say themselves what their runs are found by, and what those of the ledgers above say."""


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("read_only", [False, True])
def test_the_runs_of_an_older_ledger_are_listed_as_their_first_entries_say(
    path: Path, clock: FakeClock, version: int, read_only: bool
) -> None:
    """To the last bit, for `verify` compares them; and who may not write the file reads it as if it had been brought up to date."""
    brought_to(path, version)
    with look(path) as db:
        db.executescript(LEDGERS_OF_OLD + (LISTED_SINCE[1] if version >= LISTED_SINCE[0] else ""))
    with contextlib.closing(SqliteStore(path, clock=clock, read_only=read_only)) as store:
        listings = {summary.head.run_id: summary.head.listing for summary in store.summaries()}
        assert listings == {
            "r": Listing(1790000000.1234567, 'books "ä"'),
            "plain": Listing(1.5),
            "broken": Listing(None),  # type: ignore[arg-type]
            "odd": Listing(None),  # type: ignore[arg-type]
        }
        head = store.head("r")
        assert head is not None
        assert (head.token, head.listing, head.due_in, head.deaths) == (7, listings["r"], None, 0)
        assert list(store.check()) == []
        if not read_only:
            assert store.claim("r", "a", 30.0).token == 8
            clock.advance(31.0)
            assert store.claim("r", "b", 30.0).deaths == 1
            assert store.claim_due("a", 30.0, [QueueTerms("default")], ['books "ä"'], 9) == []
    with look(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version if read_only else schema.SCHEMA_VERSION,)


def test_a_migration_that_fails_changes_nothing(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        create(store)
    before = path.read_bytes()
    with pytest.raises(StoreError):
        SqliteStore(
            path, clock=clock, migrations=[*schema.load_migrations(), "CREATE TABLE extra (x);", "NO SUCH SQL;"]
        )
    assert path.read_bytes() == before
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        assert len(store.read("r")) == 1


def test_all_migrations_one_after_the_other_give_the_schema_of_a_new_file(path: Path) -> None:
    scripts = [*schema.load_migrations(), "CREATE TABLE extra (x);"]
    for version in range(1, len(scripts) + 1):
        brought_to(path, version, scripts)
    brought_to(Path(f"{path}.new"), len(scripts), scripts)
    with look(path) as old, look(Path(f"{path}.new")) as new:
        assert schema.objects(old) == schema.objects(new)


# --- the log grows ahead ----------------------------------------------------------------------------------------------


def test_a_synced_log_grows_ahead_of_what_is_written_and_zeros_say_nothing(
    store: SqliteStore, path: Path, tmp_path: Path
) -> None:
    token = create(store)
    sizes = set()
    for seq in range(2, 402):
        assert store.append("r", token, 0, [a_row(seq, payload=b"x" * 500)], synced=True)
        sizes.add(os.path.getsize(f"{path}-wal"))
    assert len(sizes) < 40  # else one for each append
    for end in ("", "-wal"):  # what a process that is killed now leaves behind
        shutil.copy(f"{path}{end}", tmp_path / f"left.db{end}")
    with contextlib.closing(SqliteStore(tmp_path / "left.db", clock=FakeClock())) as left:
        assert left.read("r") == store.read("r")
        assert list(left.check()) == []


def test_a_log_that_is_not_synced_does_not(store: SqliteStore, path: Path) -> None:
    token = create(store)
    for seq in range(2, 102):
        assert store.append("r", token, 0, [a_row(seq)], synced=False)
    assert os.path.getsize(f"{path}-wal") < 1024 * 1024


def test_it_takes_nothing_of_a_disk_that_has_too_little(store: SqliteStore, path: Path) -> None:
    token = create(store)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 900_000, before[1]))
    try:
        for seq in range(2, 52):
            assert store.append("r", token, 0, [a_row(seq)], synced=True)
        assert os.path.getsize(f"{path}-wal") < 800_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row.seq for row in store.read("r")] == list(range(1, 52))
    assert list(store.check()) == []


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_is_named_and_nothing_is_lost_when_there_is_room_again(
    store: SqliteStore, path: Path, count: int
) -> None:
    token = create(store)
    rows = [a_row(2 + number)._replace(payload=b"x" * 500_000) for number in range(count)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(os.path.getsize(path), os.path.getsize(f"{path}-wal"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, before[1]))
    try:
        with pytest.raises((StoreFull, StoreUnavailable)):
            store.append("r", token, 0, rows, synced=True)
        assert [row.seq for row in store.read("r")] == [1]
        with pytest.raises((StoreFull, StoreUnavailable)):
            store.append("r", token, 0, rows, synced=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.append("r", token, 0, rows, synced=True)
    assert store.read("r", 1) == rows
    assert list(store.check()) == []


def test_a_database_that_may_not_grow_is_full(store: SqliteStore) -> None:
    token = create(store)
    assert store._files.writer is not None
    (pages,) = store._files.writer.execute("PRAGMA page_count").fetchone()
    store._files.writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreFull, match="Make room"):
        store.append("r", token, 0, [a_row(2, payload=b"x" * 60_000)], synced=True)
    assert store.append("r", token, 0, [a_row(2, payload=b"x" * 60_000)], synced=True)


class Failing:
    """A connection whose next write fails: before it is done, or after, when nobody can tell."""

    def __init__(self, connection: sqlite3.Connection, code: int, *, after: bool, statement: str) -> None:
        self._connection, self._code, self._after, self._statement = connection, code, after, statement

    def execute(self, statement: str, values: Any = ()) -> Any:
        if self._statement in statement and self._after:
            self._connection.execute(statement, values)
        if self._statement in statement:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self._code
            raise error
        return self._connection.execute(statement, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("code", [10, 10 | (4 << 8), 13, 11])
@pytest.mark.parametrize("rows", [[a_row(2)], [a_row(2), a_row(3)]])
@pytest.mark.parametrize("synced", [True, False])
def test_a_commit_that_failed_is_looked_up_and_counts_if_it_is_there(
    store: SqliteStore, rows: list[Row], code: int, synced: bool
) -> None:
    token = create(store)
    statement = "COMMIT" if len(rows) > 1 else "INTO entries"
    for after in (False, True):
        assert store._files.writer is not None
        failing: Any = Failing(store._files.writer, code, after=after, statement=statement)
        store._files.writer = failing
        if after:
            assert store.append("r", token, 0, rows, synced=synced) is True
        else:
            with pytest.raises(StoreError):
                store.append("r", token, 0, rows, synced=synced)
            assert len(store.read("r")) == 1
        assert store._files.writer is not failing
    assert store.read("r", 1) == rows
    assert store.append("r", token, 0, [a_row(2 + len(rows))], synced=synced)


@pytest.mark.parametrize("rows", [[a_row(2)], [a_row(2), a_row(3, payload=b"x" * 100_000)]])
@pytest.mark.parametrize("synced", [True, False])
def test_what_was_written_and_could_not_be_looked_up_can_be_appended_again_as_it_was(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, rows: list[Row], synced: bool
) -> None:
    token = create(store)
    statement = "COMMIT" if len(rows) > 1 else "INTO entries"
    failing: Any = Failing(store._files.ready(), 10, after=True, statement=statement)
    store._files.writer = failing

    def fail() -> sqlite3.Connection:
        raise StoreUnavailable("the disk is gone for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(store._files.database, "open_writer", fail)
        with pytest.raises(StoreUnavailable, match="may not be written"):
            store.append("r", token, 0, rows, synced=synced)
    assert store.append("r", token, 0, rows, synced=synced) is True
    assert store.read("r", 1) == rows
    assert store.append("r", token, 0, [a_row(2 + len(rows))], synced=synced)


def test_rows_that_stand_there_count_as_synced_only_when_they_are_copied_into_the_file(
    store: SqliteStore, path: Path
) -> None:
    token = create(store)
    with look(path) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM entries").fetchall()  # who reads an older state keeps the log from being copied
        assert store.append("r", token, 0, [a_row(2)], synced=False)
        assert store.append("r", token, 0, [a_row(2)], synced=False) is True
        with pytest.raises(StoreUnavailable, match="are written, but it is not known"):
            store.append("r", token, 0, [a_row(2)], synced=True)
    assert store.append("r", token, 0, [a_row(2)], synced=True) is True


def raising(answers: list[bool | LedgerError]) -> None:
    for answer in answers:
        if isinstance(answer, LedgerError):
            raise answer


def verbs(store: SqliteStore, token: int) -> list[Any]:
    return [
        lambda: store.create("s", "b", 30.0, SECRET, [a_row(1)], LISTING),
        lambda: store.claim("r", "c", 30.0),
        lambda: store.renew("r", token, 30.0),
        lambda: store.release("r", token),
        lambda: store.append("r", token, 0, [a_row(2)], synced=True),
        lambda: store.append("r", token, 0, [a_row(2), a_row(3)], synced=True),
        lambda: raising(
            store.append_all([Append("r", token, 0, [a_row(2)]), Append("s", 1, 0, [a_row(2)])], synced=True)
        ),
        lambda: store.post("r", "cancel", b"", "me", 1.0),
        lambda: store.annotate("r", token, "x"),
    ]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO, errno.EBADF])
def test_where_the_system_gives_no_locks_every_write_says_so(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    token = create(store)

    def fail(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        patch.setattr(store._files.lock, "take", lambda: fail(0, 0))
        for verb in verbs(store, token):
            with pytest.raises(StoreUnavailable, match="gives no lock"):
                verb()
        assert len(store.read("r")) == 1
    assert store.append("r", token, 0, [a_row(2)], synced=True)


def test_a_lock_that_cannot_be_given_back_goes_with_its_file(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    token = create(store)
    with contextlib.closing(SqliteStore(path, clock=clock, busy_seconds=0.0)) as other:
        for number, verb in enumerate(verbs(store, token)):
            create(store, f"r{number}", f"o{number}")  # opens the lock file

            def fail() -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            store._files.lock.release = fail
            with contextlib.suppress(StoreError, LeaseLost):
                verb()
            assert other.post("r", "signal", b"", "somebody", 1.0)
    assert list(store.check()) == []


def test_whose_owner_file_cannot_be_locked_is_not_known_to_be_dead(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    with look(path) as db:
        db.execute("UPDATE runs SET owner = 'dead'")
    Path(f"{path}.owners", "dead").touch()

    def fail(fd: int, path: str) -> bool:
        raise StoreUnavailable("no locks")

    with monkeypatch.context() as patch:
        patch.setattr(owners, "try_lock", fail)
        with pytest.raises(RunOwned):
            store.claim("r", "a", 30.0)
    assert store.claim("r", "a", 30.0).token == 2


def test_what_could_not_be_read_of_the_machine_is_read_again_the_next_time() -> None:
    clock_module._boot_id.cache_clear()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        assert clock_module.boot_id() == ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(clock_module.boot_id()) == 36


def test_without_descriptors_a_store_says_what_is_wrong(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    token = create(store)
    for prepare in (store._files.drop, store._files.lock.close):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        for number in range(len(verbs(store, token))):
            prepare()
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
            try:
                with pytest.raises(StoreUnavailable):
                    verbs(store, token)[number]()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert store.append("r", token, 0, [a_row(2)], synced=True)


@pytest.mark.parametrize("after", [False, True])
def test_a_create_or_claim_that_failed_is_settled(store: SqliteStore, after: bool) -> None:
    failing: Any = Failing(store._files.ready(), 10, after=after, statement="COMMIT")
    store._files.writer = failing
    if after:
        token = create(store)
    else:
        with pytest.raises(StoreUnavailable, match="may not be written"):
            create(store)
        token = create(store)
    store.release("r", token)
    failing = Failing(store._files.ready(), 10, after=after, statement="COMMIT")
    store._files.writer = failing
    with pytest.raises(StoreUnavailable):
        store.claim("r", "b", 30.0)
    assert store.claim("r", "b", 30.0).token == 2 + after


def test_the_level_of_syncing_is_what_was_asked_for(store: SqliteStore) -> None:
    token = create(store)

    def level() -> Any:
        assert store._files.writer is not None
        return store._files.writer.execute("PRAGMA synchronous").fetchone()[0]

    assert level() == 2
    store.append("r", token, 0, [a_row(2)], synced=False)
    assert level() == 1
    store.append("r", token, 0, [a_row(3)], synced=True)
    assert level() == 2
    store.renew("r", token, 30.0)
    assert level() == 1
    store.claim("r", "a", 30.0)
    assert level() == 2
    store.append("r", token, 0, [a_row(4)], synced=False)
    store.post("r", "cancel", b"", "me", 1.0)
    assert level() == 2
    for seq, synced in ((5, False), (7, True)):
        two = [Append("r", token, 1, [a_row(seq)]), Append("r", token, 1, [a_row(seq + 1)])]
        assert store.append_all(two, synced=synced) == [True, True]
        assert level() == 1 + synced


def test_a_reader_and_a_writer_never_checkpoint_by_themselves(store: SqliteStore) -> None:
    assert store._files.writer is not None
    assert store._files.writer.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    create(store)
    with store._files.mutex:
        store.read("r")
    assert store._files._reader is not None
    assert store._files._reader.execute("PRAGMA query_only").fetchone() == (1,)


# --- many appends in one transaction ----------------------------------------------------------------------------------


def create_all(store: SqliteStore, *run_ids: str) -> dict[str, int]:
    return {run_id: create(store, run_id) for run_id in run_ids}


def one_each(tokens: dict[str, int], seq: int = 2, payload: bytes | None = None) -> list[Append]:
    return [Append(run_id, token, 0, [a_row(seq, payload=payload)]) for run_id, token in tokens.items()]


@pytest.fixture
def mixed(store: SqliteStore) -> list[Append]:
    """Five that can be written (the last builds on the first), one that stands already, and three that are refused."""
    tokens = create_all(store, "r", "s", "noted", "stands", "moved", "gap")
    store.annotate("noted", tokens["noted"], "a note")
    store.post("moved", "cancel", b"", "somebody", 1.0)
    assert store.append("stands", tokens["stands"], 0, [a_row(2)], synced=False)
    return [
        Append("r", tokens["r"], 0, [a_row(2)]),
        Append("r", tokens["r"] + 1, 0, [a_row(3)]),
        Append("stands", tokens["stands"], 0, [a_row(2)]),
        Append("s", tokens["s"], 0, [a_row(2, payload=b"x" * 100_000), a_row(3)]),
        Append("moved", tokens["moved"], 0, [a_row(2)]),
        Append("gap", tokens["gap"], 0, [a_row(2), a_row(4)]),
        Append("noted", tokens["noted"], 0, [a_row(2)]),
        Append("r", tokens["r"], 0, [a_row(3), a_row(4)]),
        Append("r", tokens["r"], 0, [a_row(5)]),
    ]


MIXED = [bool, LeaseLost, bool, bool, bool, StoreError, bool, bool, bool]
MIXED_IS_WRITTEN = [True, False, True, True, False, False, True, True, True]


def sizes(store: SqliteStore, appends: list[Append]) -> dict[str, int]:
    return {append.run_id: len(store.read(append.run_id)) for append in appends}


def assert_is_written(store: SqliteStore, appends: list[Append]) -> None:
    assert sizes(store, appends) == {"r": 5, "stands": 2, "s": 3, "moved": 1, "gap": 1, "noted": 2}
    assert list(store.check()) == []


@pytest.mark.parametrize("synced", [True, False])
def test_many_appends_are_one_transaction_whatever_becomes_of_each(
    store: SqliteStore, mixed: list[Append], synced: bool
) -> None:
    statements: list[str] = []
    writer = store._files.ready()
    store._files._log_room = 1000  # the log need not be given room meanwhile
    writer.set_trace_callback(statements.append)
    answers = store.append_all(mixed, synced=synced)
    writer.set_trace_callback(None)
    assert [type(answer) for answer in answers] == MIXED
    assert [answer is True for answer in answers] == MIXED_IS_WRITTEN
    assert [said for said in statements if said.split()[0] in ("BEGIN", "COMMIT", "ROLLBACK")] == [
        "BEGIN IMMEDIATE",
        "ROLLBACK TO one",
        "COMMIT",
    ]
    assert not store._log.noted  # the next append looks for no note
    assert_is_written(store, mixed)


@pytest.mark.parametrize("code", [10, 10 | (4 << 8), 13, 11])
@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_after_a_commit_of_many_that_failed_each_is_looked_up(
    store: SqliteStore, mixed: list[Append], code: int, synced: bool, after: bool
) -> None:
    failing: Any = Failing(store._files.ready(), code, after=after, statement="COMMIT")
    store._files.writer = failing
    answers = store.append_all(mixed, synced=synced)
    assert store._files.writer is not failing
    for append, answer, is_written in zip(mixed, answers, MIXED_IS_WRITTEN, strict=True):
        if is_written and not after and append.run_id != "stands":
            assert isinstance(answer, StoreError)
            assert isinstance(answer.__cause__, sqlite3.Error)
        else:
            assert (answer is True) == is_written
    errors = [answer for answer in answers if isinstance(answer, LedgerError)]
    assert len({id(error) for error in errors}) == len(errors)  # several tasks will raise them
    assert [type(answers[number]) for number in (1, 4)] == [LeaseLost, bool]
    if not after:
        assert sizes(store, mixed) == {"r": 1, "stands": 2, "s": 1, "moved": 1, "gap": 1, "noted": 1}
        head = store.head("noted")
        assert head is not None
        assert head.note == "a note"
    again = store.append_all(mixed, synced=synced)
    assert [type(answer) for answer in again] == MIXED
    assert [answer is True for answer in again] == MIXED_IS_WRITTEN
    head = store.head("noted")
    assert head is not None
    assert head.note is None
    assert_is_written(store, mixed)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("statement", ["INTO entries", "INTO payloads", "SAVEPOINT", "BEGIN"])
def test_where_the_disk_fails_in_the_middle_of_many_none_is_written_and_all_say_so(
    store: SqliteStore, mixed: list[Append], statement: str, after: bool
) -> None:
    store._files.writer = cast(Any, Failing(store._files.ready(), 10, after=after, statement=statement))
    answers = store.append_all(mixed, synced=True)
    assert [answer is True for answer in answers] == [append.run_id == "stands" for append in mixed]
    failed = [answer for answer, is_written in zip(answers, MIXED_IS_WRITTEN, strict=True) if is_written]
    assert [type(answer) for answer in failed] == [StoreUnavailable, bool, *[StoreUnavailable] * 4]
    assert sizes(store, mixed) == {"r": 1, "stands": 2, "s": 1, "moved": 1, "gap": 1, "noted": 1}
    assert [answer is True for answer in store.append_all(mixed, synced=True)] == MIXED_IS_WRITTEN
    assert_is_written(store, mixed)


@pytest.mark.parametrize("synced", [True, False])
def test_many_that_were_written_and_could_not_be_looked_up_can_be_appended_again_as_they_were(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, mixed: list[Append], synced: bool
) -> None:
    store._files.writer = cast(Any, Failing(store._files.ready(), 10, after=True, statement="COMMIT"))

    def fail() -> sqlite3.Connection:
        raise StoreUnavailable("the disk is gone for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(store._files.database, "open_writer", fail)
        answers = store.append_all(mixed, synced=synced)
    for answer, is_written in zip(answers, MIXED_IS_WRITTEN, strict=True):
        assert answer is not True
        if is_written:
            assert isinstance(answer, StoreUnavailable)
            assert "may not be written" in str(answer)
    assert [answer is True for answer in store.append_all(mixed, synced=synced)] == MIXED_IS_WRITTEN
    assert_is_written(store, mixed)


def test_of_many_those_that_stand_there_count_as_synced_only_when_they_are_copied_into_the_file(
    store: SqliteStore, path: Path
) -> None:
    tokens = create_all(store, "r", "s", "t")
    old, new = one_each(tokens)[:2], one_each(tokens)[2:]
    with look(path) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM entries").fetchall()  # who reads an older state keeps the log from being copied
        assert store.append_all(old, synced=False) == [True, True]
        assert store.append_all(old, synced=False) == [True, True]
        *unknown, written = store.append_all([*old, *new], synced=True)
        assert written is True
        for answer in unknown:
            assert isinstance(answer, StoreUnavailable)
            assert "are written, but it is not known" in str(answer)
    assert store.append_all([*old, *new], synced=True) == [True, True, True]


def test_whether_many_are_on_stable_storage_is_not_known_while_the_disk_fails(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = create_all(store, "r", "s", "t")
    old, new = one_each(tokens)[:2], one_each(tokens)[2:]
    assert store.append_all(old, synced=False) == [True, True]

    store._files.writer = cast(Any, Failing(store._files.ready(), 10, after=False, statement="wal_checkpoint"))
    assert [type(answer) for answer in store.append_all([*old, *new], synced=True)] == [StoreUnavailable] * 2 + [bool]

    def fail() -> bool:
        raise StoreBusy("somebody has the lock")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "is_emptied", fail)
        assert [type(answer) for answer in store.append_all([*old, *new], synced=True)] == [StoreBusy] * 3
    assert store.append_all([*old, *new], synced=True) == [True, True, True]


@pytest.mark.parametrize("stale", range(3))
def test_of_many_appends_of_one_row_each_a_stale_one_is_refused_alone(store: SqliteStore, stale: int) -> None:
    tokens = create_all(store, "r", "s", "t")
    appends = one_each(tokens)
    appends[stale] = appends[stale]._replace(token=appends[stale].token + 1)
    answers = store.append_all(appends, synced=False)
    assert [type(answer) for answer in answers] == [LeaseLost if number == stale else bool for number in range(3)]
    assert [len(store.read(run_id)) for run_id in tokens] == [1 if number == stale else 2 for number in range(3)]


def test_on_a_full_disk_many_appends_all_say_so_and_nothing_is_lost_when_there_is_room_again(
    store: SqliteStore, path: Path
) -> None:
    appends = one_each(create_all(store, *(f"r{number}" for number in range(20))), payload=b"x" * 200_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(os.path.getsize(path), os.path.getsize(f"{path}-wal"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300_000, before[1]))
    try:
        for _ in range(2):
            answers = store.append_all(appends, synced=True)
            assert all(isinstance(answer, StoreFull | StoreUnavailable) for answer in answers)
            assert set(sizes(store, appends).values()) == {1}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.append_all(appends, synced=True) == [True] * 20
    assert set(sizes(store, appends).values()) == {2}
    assert list(store.check()) == []


def test_a_database_that_may_not_grow_is_full_for_all_of_many(store: SqliteStore) -> None:
    appends = one_each(create_all(store, "r", "s", "t"), payload=b"x" * 40_000)
    (pages,) = store._files.ready().execute("PRAGMA page_count").fetchone()
    store._files.ready().execute(f"PRAGMA max_page_count={pages + 12}")  # there is room for one of them
    assert [type(answer) for answer in store.append_all(appends, synced=False)] == [StoreFull] * 3
    assert set(sizes(store, appends).values()) == {1}
    assert store.append_all(appends, synced=False) == [True] * 3


def test_while_somebody_has_the_lock_all_of_many_say_that_the_store_is_busy(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock, busy_seconds=0.02)) as store:
        appends = one_each(create_all(store, "r", "s"))
        other = WriteLock(f"{path}.lock", 0.0)
        other.acquire()
        answers = store.append_all(appends, synced=True)
        other.release()
        other.close()
        with look(path) as db:  # somebody who does not know our lock
            db.execute("BEGIN IMMEDIATE")
            answers += store.append_all(appends, synced=True)
            db.execute("ROLLBACK")
        assert [type(answer) for answer in answers] == [StoreBusy] * 4
        assert len({id(answer) for answer in answers}) == 4
        assert all("nothing was written" in str(answer) for answer in answers)
        assert store.append_all(appends, synced=True) == [True, True]


def test_values_that_cannot_be_stored_fail_no_other_of_many(store: SqliteStore) -> None:
    tokens = create_all(store, "r", "s", "t")
    writer = store._files.ready()
    writer.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    unbindable: Any = ["a list"]
    for seq, payload in ((2, unbindable), (3, b"x" * 60_000)):
        first, bad, last = one_each(tokens, seq)
        for rows in ([a_row(seq)._replace(payload=payload)], [a_row(seq), a_row(seq + 1)._replace(payload=payload)]):
            answers = store.append_all([first, bad._replace(rows=rows), last], synced=False)
            assert (answers[0], answers[2]) == (True, True)
            assert isinstance(answers[1], StoreError)
        assert len(store.read("s")) == seq - 1
        assert store.append(*bad, synced=False)
    assert store._files.writer is writer
    assert sizes(store, one_each(tokens)) == {"r": 3, "s": 3, "t": 3}


def test_what_is_no_error_of_the_ledger_goes_on_its_way_and_nothing_of_many_is_written(store: SqliteStore) -> None:
    tokens = create_all(store, "r", "s")
    first, second = one_each(tokens)
    with pytest.raises(UnicodeEncodeError):
        store.append_all([first, second._replace(rows=[a_row(2)._replace(kind="\ud800")])], synced=False)
    assert sizes(store, [first, second]) == {"r": 1, "s": 1}
    assert store.append_all([first, second], synced=True) == [True, True]


def test_a_child_appends_its_own_rows_and_none_of_its_parents(store: SqliteStore) -> None:
    token = create(store)
    own = create_all(store, "s")

    def child() -> str:
        tokens = {"r": token, **create_all(store, "of the child"), **own}
        answers = store.append_all(one_each(tokens), synced=True)
        for seq, statement in ((3, "COMMIT"), (2, "BEGIN")):
            store._files.writer = cast(Any, Failing(store._files.ready(), 10, after=True, statement=statement))
            answers += store.append_all(one_each(tokens, seq), synced=True)
        store.close()
        return " ".join(type(answer).__name__ for answer in answers)

    assert store.append("r", token, 0, [a_row(2)], synced=True)
    assert in_a_fork(child).split() == [
        *("LeaseLost", "bool", "LeaseLost"),
        *("LeaseLost", "bool", "LeaseLost"),
        *(
            "StoreUnavailable",
            "bool",
            "StoreUnavailable",
        ),  # what the parent wrote does not count, though it stands there
    ]
    assert store.append_all(one_each({"r": token, **own}), synced=True) == [True, True]
    assert len(store.read("of the child")) == 3


def test_of_many_appends_that_a_kill_interrupts_all_are_written_or_none(path: Path) -> None:
    script = """
from agent_run_ledger.contract import Append
store = SqliteStore(sys.argv[1], clock=FakeClock(), durability="process")
names = [f"r{number}" for number in range(40)]
for name in names:
    store.create(name, "a", 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
seq = 1
while True:
    seq += 1
    assert store.append_all([Append(name, 1, 0, [a_row(seq, payload=b"x" * 3000)]) for name in names], synced=False) == [True] * 40
    print(seq, flush=True)
"""
    for size in (1, 20):
        process = python(script, f"{path}{size}")
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(size)][-1]
        process.kill()
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.communicate()
        with contextlib.closing(SqliteStore(f"{path}{size}", clock=FakeClock())) as store:
            (last,) = {summary.last.seq for summary in store.summaries()}
            assert acknowledged <= last <= acknowledged + 1
            assert list(store.check()) == []


@pytest.mark.parametrize(("count", "payload"), [(50, b"x" * 20_000), (250, b"x" * 400)])
def test_many_appends_at_once_keep_the_log_short(store: SqliteStore, path: Path, count: int, payload: bytes) -> None:
    tokens = create_all(store, *(f"r{number}" for number in range(count)))
    for seq in range(2, 52):
        assert store.append_all(one_each(tokens, seq, payload), synced=False) == [True] * count
    assert os.path.getsize(f"{path}-wal") < 12 * 1024 * 1024
    assert os.path.getsize(path) > 5 * 1024 * 1024
