"""A ledger's file as a whole: a copy of it while it is in use, another file put in its place, and the epoch that begins then."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from agent_run_ledger.errors import NotALedger, StoreBusy, StoreError
from agent_run_ledger.stores.connections import FULL
from agent_run_ledger.stores.faults import named
from agent_run_ledger.stores.filelock import WriteLock, try_lock
from agent_run_ledger.stores.owners import Owners
from agent_run_ledger.stores.schema import Database

TOKENS = 1 << 20
"""How many fencing tokens an epoch has."""

_BUSY_SECONDS = 30.0
_PAGES_AT_ONCE = 2560
_BESIDE = ("-wal", "-journal")
"""What belongs to a database file and has commits in it."""

_LAST_EPOCH = """
SELECT max((SELECT value FROM meta WHERE key = 'epoch'), coalesce((SELECT max(fencing_token) FROM runs), 0) / 1048576)
"""

# Nobody has a run any more, and nobody who ever had one can write to it: every token from now on is above every one before.
_BEGIN_EPOCH = (
    "UPDATE meta SET value = :epoch WHERE key = 'epoch'",
    """UPDATE runs SET owner = NULL, lease_until = NULL, lease_seconds = NULL, lease_boot = NULL,
    fencing_token = :epoch * 1048576""",
    "DELETE FROM workers",
)


def copy_file(path: str, target: str, told: Callable[[int, int], None]) -> None:
    """Copy the ledger's file to `target`, a new file, as it is at one moment, while others write to it. It keeps nobody waiting.

    The copy is one file, for good on the disk, and whoever may read the ledger may read it. `told` hears how many bytes are copied,
    and of how many. Raises a `StoreError`; nothing stands at `target` then.
    """
    with _read(path) as source:
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.chmod(target, os.stat(path).st_mode & 0o777)
            with closing(sqlite3.connect(target, isolation_level=None)) as copy:
                # In one transaction from its first page on: else it would begin anew with every commit of others.
                source.execute("BEGIN")
                source.execute("SELECT 1 FROM sqlite_master").fetchone()
                (size,) = source.execute("PRAGMA page_size").fetchone()
                source.backup(
                    copy, pages=_PAGES_AT_ONCE, progress=lambda _, left, of: told((of - left) * size, of * size)
                )
                copy.execute("PRAGMA journal_mode=DELETE")
            _sync(target)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(target)
            if isinstance(error, sqlite3.Error | OSError):
                raise named(error, target) from error
            raise


def put_in_place(made: str, path: str) -> None:
    """Give the file `made` the name `path`, for good."""
    os.replace(made, path)
    _sync(os.path.dirname(os.path.abspath(path)))


def without_commits(path: str) -> None:
    """Remove what stands beside a file that is about to be replaced: SQLite would play its commits into the new one."""
    for suffix in (*_BESIDE, "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


def last_epoch(path: str) -> int:
    """The newest epoch that a ledger's file knows of, also by its tokens. Raises a `StoreError`."""
    with _read(path) as db:
        return int(db.execute(_LAST_EPOCH).fetchone()[0])


def new_epoch(path: str, least: int) -> int:
    """Begin an epoch above every one that the file knows of, and not below `least`: nobody has a run then, and old tokens are refused."""
    lock = WriteLock(path + ".lock", _BUSY_SECONDS)
    try:
        with closing(Database(path, lock, _BUSY_SECONDS, None).open_writer()) as db:
            return lock.during(lambda: _begin_epoch(db, least))
    except sqlite3.Error as error:
        raise named(error, path) from error
    finally:
        lock.close()


def _begin_epoch(db: sqlite3.Connection, least: int) -> int:
    db.execute(f"PRAGMA synchronous={FULL}")
    try:
        db.execute("BEGIN IMMEDIATE")
        epoch = max(least, int(db.execute(_LAST_EPOCH).fetchone()[0]) + 1)
        for statement in _BEGIN_EPOCH:
            db.execute(statement, {"epoch": epoch} if ":epoch" in statement else {})
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.rollback()
        raise
    return epoch


def as_one_file(path: str) -> None:
    """Have everything that belongs to a database that nobody else uses in its one file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    for suffix in (".lock", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)
    _sync(path)


@contextmanager
def alone(path: str) -> Iterator[int]:
    """Be the only one who uses the ledger at `path`, if there is one, while another file takes its place; gives the last epoch it knows.

    Raises `StoreBusy` where somebody uses it, and `NotALedger` where another program's database stands there.
    """
    lock = WriteLock(path + ".lock", _BUSY_SECONDS)
    try:
        lock.acquire()
        epoch = refuse_used(path)
        if not os.path.exists(path):
            yield epoch
            return
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0.0)) as db:
            try:
                db.execute("PRAGMA journal_mode=DELETE")  # refused while anybody else has it open, be it to read
                db.execute("BEGIN EXCLUSIVE")
            except sqlite3.Error as error:
                if isinstance(refused := named(error, path), StoreBusy):
                    raise StoreBusy(_IN_USE.format(path)) from refused
                # It is damaged, and nobody can use it.
            yield epoch
    finally:
        lock.release()
        lock.close()


def replace(path: str, made: str, epoch: int) -> str | None:
    """Put `made` in the place of the ledger at `path`; what stood there, or is left of it, is kept under the name that is returned."""
    aside = f"{path}.replaced-{epoch}"
    stood = os.path.exists(path)
    for suffix in _BESIDE:  # of a file that is damaged, or gone: SQLite would play it into the new one
        if os.path.exists(path + suffix):
            os.rename(path + suffix, aside + suffix)
            stood = True
    with suppress(FileNotFoundError):
        os.unlink(path + "-shm")
    if os.path.exists(path):
        try:
            os.link(path, aside)  # so that at no moment nothing stands at `path`
        except OSError:  # a file system without such names
            os.rename(path, aside)
    put_in_place(made, path)
    return aside if stood else None


_IN_USE = "the ledger {!r} is in use, by a program or by somebody who looks at it; nothing was changed. Stop them all, and do it again."


def refuse_used(path: str) -> int:
    """The last epoch that the ledger at `path` knows of, 0 where there is none or it cannot be read.

    Raises `StoreBusy` where an owner of runs is alive, though its connections may be closed for a moment, and `NotALedger`.
    """
    folder = Owners(path).folder
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        with suppress(FileNotFoundError):
            fd = os.open(os.path.join(folder, name), os.O_RDWR)
            try:
                if not try_lock(fd, name):
                    raise StoreBusy(_IN_USE.format(path))
            finally:
                os.close(fd)
    try:
        return last_epoch(path)
    except NotALedger:
        raise
    except StoreError:
        return 0


@contextmanager
def _read(path: str) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, to what is a ledger."""
    lock = WriteLock(path + ".lock", _BUSY_SECONDS)
    try:
        with closing(Database(path, lock, _BUSY_SECONDS, None).open_reader(is_alone=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise named(error, path) from error
    finally:
        lock.close()


def _sync(path: str) -> None:
    """Have a file, or the names in a folder, on the disk for good."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
