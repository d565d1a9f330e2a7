"""A whole ledger as a file: taken while others write, whole or not at all, and put back so that no old owner can write to it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import stat
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest

from agent_run_ledger import (
    AgentRunLedger,
    BackupRefused,
    Effect,
    LeaseLost,
    NotALedger,
    NotDurableWarning,
    Run,
    StoreBusy,
    StoreError,
)
from agent_run_ledger.stores import backups, open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.testing.stores.entries import a_row
from agent_run_ledger.testing.stores.words import create
from support.databases import databases
from support.ledgers import raw
from support.processes import child
from support.shell import Shell

EPOCH = 2**20
WRITER = """
with AgentRunLedger(arguments[0], durability="process") as ledger:
    tell()
    for number in range(int(arguments[2])):
        with ledger.open_run("count", run_id=f"{arguments[1]}-{number}") as run:
            for step in range(5):
                run.step("count", {"n": step, "text": "x" * 3000}, lambda: step, effect=Effect.READ)
tell("done")
hear()
"""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with one run that has ended and one that was parked."""
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        play(ledger, "done")
        leave(ledger, "open", lambda run: run.step("look", {"n": 1}, lambda: 1, effect=Effect.READ))
    return path


def play(ledger: AgentRunLedger, run_id: str) -> None:
    with ledger.open_run("look", run_id=run_id) as run:
        run.step("look", {"n": 1}, lambda: 1, effect=Effect.READ)


def leave(ledger: AgentRunLedger, run_id: str, act: Callable[[Run], object] = lambda run: None) -> None:
    """Have an exception park a run."""

    def program() -> None:
        with ledger.open_run("look", run_id=run_id) as run:
            act(run)
            raise KeyError

    with pytest.raises(KeyError):
        program()


def tokens(path: Path) -> dict[str, int]:
    with AgentRunLedger.open_read_only(path) as ledger:
        return {run.run_id: run.fencing_token for run in ledger.runs()}


def files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# --- a backup ---------------------------------------------------------------------------------------------------------


def test_a_backup_is_a_ledger_in_one_file_with_the_same_entries(db: Path, tmp_path: Path) -> None:
    copy = tmp_path / "backups" / "copy.db"
    copy.parent.mkdir()
    os.chmod(db, 0o640)
    told: list[str] = []
    with AgentRunLedger(db) as ledger, ledger.open_run("look", run_id="held") as run:
        run.step("look", {"n": 1}, lambda: 1, effect=Effect.READ)
        report = ledger.backup(copy, told=told.append)
        assert (report.ok, report.runs, report.findings) == (True, 3, [])
        heads = {each.run_id: ledger.tree_head(each.run_id) for each in ledger.runs()}
    assert files(copy.parent) == {"copy.db"}
    assert stat.S_IMODE(copy.stat().st_mode) == 0o640  # whoever may not read the ledger may not read the copy
    assert any(text.startswith("copying: ") for text in told)
    with AgentRunLedger.open_read_only(copy) as copied:
        found = {each.run_id: copied.tree_head(each.run_id) for each in copied.runs()}
    assert found.keys() == heads.keys()
    assert all(found[each] == heads[each] for each in ("done", "open"))


@pytest.mark.slow
def test_a_backup_that_is_taken_while_four_processes_write_is_whole_and_keeps_nobody_waiting(
    db: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        writers = [stack.enter_context(child(WRITER, db, name, 60)) for name in "abcd"]
        for writer in writers:
            writer.hear()
        with AgentRunLedger.open_read_only(db) as ledger:
            sizes = [ledger.backup(tmp_path / f"copy-{number}.db").entries for number in range(4)]
        for writer in writers:
            assert writer.hear() == "done"
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]  # they wrote meanwhile
    for number, size in enumerate(sizes):
        with AgentRunLedger.open_read_only(tmp_path / f"copy-{number}.db") as copy:
            report = copy.verify()
        assert (report.ok, report.entries) == (True, size)
    with AgentRunLedger.open_read_only(db) as ledger:
        assert ledger.verify().runs == 2 + 4 * 60


def test_a_commit_that_comes_while_a_copy_is_made_is_not_in_it_and_does_not_begin_it_anew(
    db: Path, tmp_path: Path
) -> None:
    with AgentRunLedger(db, durability="process") as ledger:
        for number in range(40):
            with ledger.open_run("look", run_id=f"long-{number}") as run:
                text = random.Random(number).randbytes(400_000).hex()
                run.step("look", {"text": text}, lambda: None, effect=Effect.READ)
        parts: list[int] = []

        def told(done: int, of: int) -> None:
            parts.append(done)
            play(ledger, f"meanwhile-{len(parts)}")

        backups.copy_file(str(db), str(tmp_path / "copy.db"), told)
    assert len(parts) > 1
    assert parts == sorted(set(parts))
    assert not [name for name in tokens(tmp_path / "copy.db") if name.startswith("meanwhile")]


def test_a_backup_replaces_a_file_only_if_it_is_told_to(db: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("mine")
    with AgentRunLedger(db) as ledger:
        with pytest.raises(BackupRefused, match="already"):
            ledger.backup(copy)
        assert copy.read_text() == "mine"
        assert ledger.backup(copy, overwrite=True).ok
        with pytest.raises(BackupRefused, match="the ledger itself"):
            ledger.backup(db, overwrite=True)


def test_what_stood_beside_a_file_is_not_played_into_the_backup_that_replaces_it(db: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    with AgentRunLedger(target) as other:
        for number in range(20):
            other.create_run("another", f"another {number}")
        for suffix in ("", "-wal"):
            (tmp_path / f"kept{suffix}").write_bytes(Path(f"{target}{suffix}").read_bytes())
    for suffix in ("", "-wal"):
        Path(f"{target}{suffix}").write_bytes((tmp_path / f"kept{suffix}").read_bytes())
    with AgentRunLedger(db) as ledger:
        report = ledger.backup(target, overwrite=True)
        runs = [run.run_id for run in ledger.runs()]
    with AgentRunLedger.open_read_only(target) as copy:
        assert [run.run_id for run in copy.runs()] == runs
        assert copy.verify().entries == report.entries


def test_a_backup_does_not_replace_a_ledger_that_is_in_use(db: Path, tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "other.db") as other, AgentRunLedger(db) as ledger:
        other.create_run("goal")
        with pytest.raises(StoreBusy, match="in use"):
            ledger.backup(tmp_path / "other.db", overwrite=True)


def test_a_copy_that_does_not_verify_replaces_no_backup_and_is_kept_for_inspection(db: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with AgentRunLedger(db) as ledger:
        ledger.backup(copy)
    before = copy.read_bytes()
    with raw(db, without_triggers=True) as file:
        file.execute("UPDATE entries SET body = body || ' ' WHERE run_id = 'done' AND seq = 2")
    with AgentRunLedger(db) as ledger, pytest.raises(BackupRefused, match="does not verify"):
        ledger.backup(copy, overwrite=True)
    assert copy.read_bytes() == before
    assert (tmp_path / "copy.db.unsound").exists()


def test_a_backup_that_fails_leaves_nothing(db: Path, tmp_path: Path) -> None:
    before = files(tmp_path)

    def told(text: str) -> None:
        raise KeyboardInterrupt

    with AgentRunLedger(db) as ledger:
        with pytest.raises(KeyboardInterrupt):
            ledger.backup(tmp_path / "copy.db", told=told)
        with pytest.raises(StoreError):
            ledger.backup(tmp_path / "no such folder" / "copy.db")
    assert files(tmp_path) - {"agent.db-wal", "agent.db-shm"} == before


def test_what_is_no_file_is_not_backed_up_here(tmp_path: Path) -> None:
    with (
        pytest.warns(NotDurableWarning),
        AgentRunLedger(":memory:") as ledger,
        pytest.raises(BackupRefused, match="in memory"),
    ):
        ledger.backup(tmp_path / "copy.db")
    with (
        databases().fresh(AgentRunLedger.migrate) as dsn,
        AgentRunLedger(dsn) as ledger,
        pytest.raises(BackupRefused, match="pg_dump"),
    ):
        ledger.backup(tmp_path / "copy.db")
    for given in (("postgresql://x", "agent.db"), ("agent.db", "postgresql://x")):
        with pytest.raises(BackupRefused, match="new-epoch"):
            AgentRunLedger.restore(*given)


# --- a restore --------------------------------------------------------------------------------------------------------


def test_a_run_that_is_taken_over_after_a_restore_has_a_token_above_all_that_the_lost_ledger_gave(
    db: Path, tmp_path: Path
) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    for number in range(5):
        with AgentRunLedger(db) as ledger:
            leave(ledger, "open")
            play(ledger, f"lost-{number}")
    lost = max(tokens(db).values())
    restored = AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)
    assert (restored.runs, restored.path) == (2, str(db))
    with AgentRunLedger(db) as ledger:
        leave(ledger, "open")
        play(ledger, "new")
        assert ledger.verify().ok
    assert min(tokens(db)["open"], tokens(db)["new"]) > restored.epoch * EPOCH > lost
    assert set(tokens(db)) == {"done", "open", "new"}
    assert restored.replaced is not None
    assert max(tokens(Path(restored.replaced)).values()) == lost  # what stood there is kept, whole


def test_an_old_owner_cannot_write_to_what_was_restored(db: Path, tmp_path: Path) -> None:
    """It has the very run and token that the backup holds."""
    store = open_store(db, durability="full", clock=SystemClock())
    lease = store.claim("open", "old", 3600.0)
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    assert tokens(tmp_path / "copy.db")["open"] == lease.token
    store.close()
    AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)
    with closing(open_store(db, durability="full", clock=SystemClock())) as store:
        with pytest.raises(LeaseLost):
            store.renew("open", lease.token, 3600.0)
        rows = [a_row(len(store.read("open")) + 1, "value", b"{}")]
        with pytest.raises(LeaseLost):
            store.append("open", lease.token, 0, rows, synced=True)
        taken = store.claim("open", "new", 30.0)  # at once: nobody has it
        assert taken.token > lease.token


@pytest.mark.parametrize("call", ["link", "replace", "fsync"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_whoever_dies_while_he_restores_leaves_the_old_ledger_or_the_new_one(
    db: Path, tmp_path: Path, call: str, moment: str
) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
        play(ledger, "lost")
    script = f"""
import os, signal
real = os.{call}
def die(*given):
    if {moment!r} == "after":
        real(*given)
    os.kill(os.getpid(), signal.SIGKILL)
import agent_run_ledger.stores.backups, agent_run_ledger.backups, agent_run_ledger.stores.sqlite
os.{call} = die
AgentRunLedger.restore(arguments[1], arguments[0], overwrite=True)
tell("restored")
"""
    with child(script, db, tmp_path / "copy.db") as process:
        assert process.process.wait(60) == -signal.SIGKILL
    with AgentRunLedger(db) as ledger:
        assert ledger.verify().ok
        assert {run.run_id for run in ledger.runs()} in ({"done", "open", "lost"}, {"done", "open"})
    assert AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True).runs == 2
    assert set(tokens(db)) == {"done", "open"}


def test_two_restores_of_one_backup_give_no_token_twice(db: Path, tmp_path: Path) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    epochs, seen = [], set[int]()
    for _ in range(3):
        epochs.append(AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True).epoch)
        with AgentRunLedger(db) as ledger:
            leave(ledger, "open")
        token = tokens(db)["open"]
        assert token not in seen
        seen.add(token)
    assert epochs == sorted(set(epochs))  # within one second, too


def test_a_restore_begins_a_ledger_where_there_is_none(db: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    (tmp_path / "new.db-wal").write_bytes(b"what is left of a ledger that was deleted")
    restored = AgentRunLedger.restore(db, new)
    assert restored.replaced == f"{new}.replaced-{restored.epoch}"
    assert Path(f"{restored.replaced}-wal").read_bytes().startswith(b"what is left")
    with AgentRunLedger(new) as ledger:
        assert ledger.verify().ok
        assert ledger.workers() == []
    assert AgentRunLedger.restore(db, tmp_path / "other.db").replaced is None
    assert not [name for name in files(tmp_path) if "unfinished" in name]


@pytest.mark.parametrize("how", ["a ledger", "a reader", "a connection"])
def test_a_ledger_that_is_in_use_is_not_replaced(db: Path, tmp_path: Path, how: str) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    use = {
        "a ledger": "ledger = AgentRunLedger(arguments[0]); ledger.create_run('x', 'x'); tell(); hear()",
        "a reader": "ledger = AgentRunLedger.open_read_only(arguments[0]); ledger.runs(); tell(); hear()",
        "a connection": "import sqlite3; db = sqlite3.connect(arguments[0]); db.execute('SELECT * FROM runs').fetchall(); tell(); hear()",
    }[how]
    with child(use, db) as process:
        process.hear()
        before = db.stat().st_ino
        with pytest.raises(StoreBusy, match="is in use"):
            AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)
        assert db.stat().st_ino == before
        process.kill()
    assert AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True).runs == 2
    with AgentRunLedger(db) as own:
        own.runs()
        with pytest.raises(StoreBusy, match="is in use"):
            AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)


def test_a_damaged_ledger_is_replaced_and_kept(db: Path, tmp_path: Path) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    bytes_ = bytearray(db.read_bytes())
    bytes_[4096:] = b"\xff" * len(bytes_[4096:])
    db.write_bytes(bytes_)
    restored = AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)
    assert Path(restored.replaced or "").read_bytes() == bytes_
    with AgentRunLedger(db) as ledger:
        assert ledger.verify().ok


def test_nothing_is_replaced_by_what_is_no_sound_ledger_nor_what_is_none(db: Path, tmp_path: Path) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.backup(tmp_path / "copy.db")
    before = db.read_bytes()
    with pytest.raises(BackupRefused, match="already"):
        AgentRunLedger.restore(tmp_path / "copy.db", db)
    with pytest.raises(BackupRefused, match="the ledger itself"):
        AgentRunLedger.restore(db, db, overwrite=True)
    with pytest.raises(StoreError):
        AgentRunLedger.restore(tmp_path / "none.db", db, overwrite=True)
    with raw(tmp_path / "copy.db", without_triggers=True) as file:
        file.execute("UPDATE entries SET body = body || ' ' WHERE run_id = 'done' AND seq = 2")
    with pytest.raises(BackupRefused, match="does not verify"):
        AgentRunLedger.restore(tmp_path / "copy.db", db, overwrite=True)
    assert db.read_bytes() == before
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    theirs = (tmp_path / "other.db").read_bytes()
    with pytest.raises(NotALedger):
        AgentRunLedger.restore(db, tmp_path / "other.db", overwrite=True)
    assert (tmp_path / "other.db").read_bytes() == theirs


def test_a_worker_of_the_backup_is_not_taken_for_a_live_one(db: Path, tmp_path: Path) -> None:
    with AgentRunLedger(db) as ledger:
        ledger._store.beat("one", b'{"lease_seconds": 3600}')
        assert len(ledger.workers()) == 1
        ledger.backup(tmp_path / "copy.db")
    AgentRunLedger.restore(tmp_path / "copy.db", tmp_path / "new.db")
    with AgentRunLedger(tmp_path / "new.db") as ledger:
        assert ledger.workers() == []


# --- a new epoch ------------------------------------------------------------------------------------------------------


def test_a_database_that_was_put_back_by_other_tools_begins_a_new_epoch() -> None:
    with databases().fresh(AgentRunLedger.migrate) as dsn, AgentRunLedger(dsn) as old:
        lease = create(old._store, "x", lease_seconds=3600.0)
        old._store.beat("one", b'{"lease_seconds": 3600}')
        first = AgentRunLedger.new_epoch(dsn)
        second = AgentRunLedger.new_epoch(dsn)
        assert second > first
        with pytest.raises(LeaseLost):
            old._store.renew("x", lease.token, 3600.0)
        assert old._store.first_token() == second * EPOCH + 1
        assert old._store.claim("x", "new", 30.0).token == second * EPOCH + 1
        assert old.workers() == []
    with databases().fresh(AgentRunLedger.migrate) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DROP TABLE meta CASCADE")
        with pytest.raises(NotALedger):
            AgentRunLedger.new_epoch(dsn)


def test_a_file_that_was_put_back_by_other_tools_begins_a_new_epoch(shell: Shell, db: Path, tmp_path: Path) -> None:
    shutil.copy(db, tmp_path / "copied.db")
    assert shell("--db", tmp_path / "copied.db", "new-epoch")[0] == 3
    assert tokens(tmp_path / "copied.db")["open"] < EPOCH
    epoch = shell.json("--db", tmp_path / "copied.db", "new-epoch", "--yes")["epoch"]
    assert tokens(tmp_path / "copied.db")["open"] == epoch * EPOCH
    assert "there is no database" in shell.refused("--db", tmp_path / "none.db", "new-epoch", "--yes")


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_backs_up_and_restores(shell: Shell, db: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    status, out, err = shell("--db", db, "backup", "--to", copy)
    assert (status, out, err) == (0, f"{copy} is a copy of the ledger: 8 entries of 2 runs, all verified\n", "")
    assert "already" in shell.refused("--db", db, "backup", "--to", copy)
    assert shell.json("--db", db, "backup", "--to", copy, "--overwrite") == {
        "backup": str(copy),
        "runs": 2,
        "entries": 8,
    }
    assert "already" in shell.refused("--db", db, "restore", copy)
    status, out, err = shell("--db", db, "restore", copy, "--overwrite")
    assert (status, err) == (0, "")
    assert f"what stood there is kept as {db}.replaced-" in out
    assert shell.json("--db", tmp_path / "new.db", "restore", copy)["replaced"] is None
    assert "new-epoch" in shell.refused("--db", "postgresql://x@127.0.0.1:1/x", "restore", copy)
