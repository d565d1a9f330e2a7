"""The connections to one SQLite file: one that writes, one that reads beside it, and the locks that each is used under."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from agent_run_ledger.errors import Reentered, StoreError, StoreReadOnly, StoreUnavailable
from agent_run_ledger.stores.faults import is_failed_sync, leaves_doubt, named
from agent_run_ledger.stores.filelock import WriteLock
from agent_run_ledger.stores.schema import Database

NORMAL, FULL = 1, 2
"""How a commit is synced: with the next checkpoint, or before it is done."""
PAGE_BYTES = 4096

_UNKNOWN = 0
_PAGES_PER_COMMIT = 3  # the leaf of the table, the leaf of its index, and now and then a page above them
_LOG_PAGES = 2000  # a longer log makes every commit slower: 2 x at 40,000 pages
_CHUNK_BYTES = 1 << 20
_FRAME_BYTES = 24 + PAGE_BYTES  # https://www.sqlite.org/fileformat2.html, 4.1: WAL File Format
_ROOM_AHEAD = 256
_FIRST_ROOM = 32  # who makes a few steps and ends needs no more
_FORK_WAIT_SECONDS = 5.0
_READERS_WAIT_MS = 500
_never_closed: list[sqlite3.Connection] = []

T = TypeVar("T")


class Connections:
    """The writer, the reader and their locks. Connections never cross a fork.

    A KeyboardInterrupt can come at every call of a Python function and after every call into C, and must leave no lock
    held and no transaction open. So whatever is taken is taken inside the `try` that gives it back, and what gives it
    back is a call into C that comes first there: a context manager written in Python would be interrupted before its
    first line.
    """

    def __init__(
        self, path: str, busy_seconds: float, *, read_only: bool = False, migrations: Sequence[str] | None = None
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.lock = WriteLock(path + ".lock", busy_seconds)
        self.database = Database(path, self.lock, busy_seconds, migrations)
        self.mutex = threading.RLock()  # so that a thread can tell that it is inside already: see `refuse_reentry`
        self.writer: sqlite3.Connection | None = None
        self.log_pages = 0
        self._log_room = 0
        """So many pages find their place in the log without its file growing; one page more, and it is given room anew."""
        self.is_closed = False
        self._is_log_whole = True
        """False after a sync that failed: what it should have written may be nowhere but in memory, and no later sync writes it."""
        self._level = _UNKNOWN
        self._file: tuple[int, int] | None = None
        """Which file the path named when it was first opened: device and inode."""
        self._reader_mutex = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._stood_still: list[bool] = []
        self._was_torn = False

    def open(self) -> None:
        """Open what a store of this kind needs first, so that what is wrong with the file is told at once."""
        if self.read_only:
            self._reader = self.database.open_reader(is_alone=True)
        else:
            self.ready()

    def refuse_reentry(self) -> None:
        """Raises `Reentered` where this thread is inside of the store: only a signal handler can come here then.

        Waiting for itself it would wait for ever, and what it wrote would go into the transaction that it interrupted.
        """
        if is_owned(self.mutex):
            raise Reentered(f"the ledger {self.path!r}")

    # --- writing ------------------------------------------------------------------------------------------------------

    def ready(self) -> sqlite3.Connection:
        """The writer, under the mutex, with no transaction open; opened anew where a failure or a fork left none."""
        writer = self.writer
        if writer is not None:
            if not writer.in_transaction:
                return writer
            try:  # nothing that was said to be written is in it, and nothing may be built on it
                writer.rollback()
                return writer
            except sqlite3.Error:
                self.drop()
        self._refuse_if_closed()
        if self.read_only:
            raise StoreReadOnly(f"the ledger {self.path!r} was opened read-only; nothing was written.")
        self.refuse_moved()
        self._level = _UNKNOWN
        self.log_pages = _LOG_PAGES if self._log_is_long() else 0
        self._log_room = _FIRST_ROOM
        self.writer = self.database.open_writer()
        self._file = self._file or self._file_at_path()
        return self.writer

    def refuse_moved(self) -> None:
        """Raises `StoreUnavailable` where the path names another file by now, or none: what we wrote on would be seen by nobody.

        Looked at whenever a lease is taken or renewed and whenever the log is emptied, so a few seconds late at most.
        """
        if self._file is not None and self._file != self._file_at_path():
            self.drop()
            raise StoreUnavailable(
                f"the database {self.path!r} was moved, deleted or replaced while it was open; nothing more is written to it. "
                "What was acknowledged since is in the file that stood there. Put it back, or open the ledger anew."
            )

    def _file_at_path(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def run_alone(self, level: int, statement: str, values: Sequence[object], payload: bytes | None) -> bool:
        """Whether one INSERT wrote its row. It is a transaction of its own, a tenth cheaper than BEGIN and COMMIT.

        The same care as in `under_lock`, written out: every step of every run comes here twice.
        """
        db = self.writer
        if db is None or db.in_transaction:
            db = self.ready()
        lock = self.lock
        try:
            try:
                lock.take()
            except OSError:
                lock.acquire()
            if level != self._level:
                self._set_level(db, level)
            is_written = db.execute(statement, values).rowcount == 1
            if is_written:
                self.mind_the_log(db, payload)
            return is_written
        finally:
            try:
                lock.release()
            except BaseException:
                lock.release()
                raise

    def under_lock(self, level: int, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` under the lock file, with every commit in it synced as `level` says. Under the mutex."""
        db = self.ready()
        lock = self.lock
        try:
            lock.acquire()
            if level != self._level:
                self._set_level(db, level)
            return work(db)
        finally:
            try:
                lock.release()
            except BaseException:  # an audit hook written in Python runs before it, and can be interrupted
                lock.release()
                raise

    def transact(self, level: int, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction under the lock file, all or nothing. Under the mutex."""

        def all_or_nothing(db: sqlite3.Connection) -> T:
            self.refuse_moved()
            try:
                db.execute("BEGIN IMMEDIATE")
                answer = work(db)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.rollback()
                raise
            self.mind_the_log(db)
            return answer

        return self.under_lock(level, all_or_nothing)

    def write(self, level: int, work: Callable[[sqlite3.Connection], T]) -> T:
        """Take the mutex for one transaction that its caller can simply do again when it fails."""
        self.refuse_reentry()
        with self.mutex:
            try:
                return self.transact(level, work)
            except (sqlite3.Error, OSError) as error:
                raise self.failed(error) from error

    def _set_level(self, db: sqlite3.Connection, level: int) -> None:
        self._level = _UNKNOWN
        db.execute(f"PRAGMA synchronous={level}")
        if not self._is_log_whole:
            self._mend_log()
        self._level = level

    def _mend_log(self) -> None:
        """Write the bytes of the log once more, and sync them, under the lock file: whatever stands behind a gap would be lost.

        SQLite takes no locks on the log, so none is lost when it is closed here.
        """
        with suppress(FileNotFoundError):
            log = os.open(self.path + "-wal", os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            try:
                at = 0
                while chunk := os.pread(log, _CHUNK_BYTES, at):
                    at += os.pwrite(log, chunk, at)
                os.fsync(log)
            finally:
                os.close(log)
        self._is_log_whole = True

    def sync_log(self) -> None:
        """Have the bytes of the log on stable storage, whoever wrote them: what is not in the log is in the file, and synced."""
        self.refuse_reentry()
        with self.mutex:
            try:
                if self._is_log_whole:
                    self._fsync_log()
                else:
                    self.lock.during(self._mend_log)
            except OSError as error:
                self._is_log_whole = False
                raise named(error, self.path) from error

    def _fsync_log(self) -> None:
        with suppress(FileNotFoundError):  # then the file has all
            log = os.open(self.path + "-wal", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                os.fsync(log)
            finally:
                os.close(log)

    def mind_the_log(self, db: sqlite3.Connection, payload: bytes | None = None) -> None:
        """Count what was committed, under the lock file, and empty the log when it is long."""
        self.log_pages += _PAGES_PER_COMMIT if payload is None else _PAGES_PER_COMMIT + len(payload) // PAGE_BYTES
        if self.log_pages > _LOG_PAGES:
            self.log_pages = 0
            try:
                _empty_log(db)
            except sqlite3.Error as error:  # what was committed stands in the log; the next time it is tried again
                if is_failed_sync(error):
                    self.failed(error)
        elif self.log_pages > self._log_room and self._level == FULL:
            self._log_room = self.log_pages + _ROOM_AHEAD // 2
            with suppress(sqlite3.Error, OSError):  # then each sync goes on to write down that the file has grown
                _give_room(db, self.path + "-wal", (self.log_pages + _ROOM_AHEAD) * _FRAME_BYTES)

    def is_emptied(self) -> bool:
        """After a failed sync what reads back may be nowhere but in memory: only a synced copy in the file counts."""
        return self.under_lock(FULL, _empty_log)

    def scrub(self) -> bool:
        """Rewrite the file, so that no free page or gap holds what was deleted, and cut the log to nothing, synced.

        False where somebody still reads an older state, which has to stay until he is done. He is not waited for for long: whoever
        wants to write waits meanwhile.
        """

        def work(db: sqlite3.Connection) -> bool:
            self.refuse_moved()
            db.execute("VACUUM")
            self.log_pages = _LOG_PAGES
            try:
                db.execute(f"PRAGMA busy_timeout={_READERS_WAIT_MS}")
                busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                db.execute(f"PRAGMA busy_timeout={int(self.lock.busy_seconds * 1000)}")
            if not busy:
                self.log_pages = 0
            return not busy

        self.refuse_reentry()
        with self.mutex:
            try:
                return self.under_lock(FULL, work)
            except (sqlite3.Error, OSError) as error:
                raise self.failed(error) from error

    # --- reading ------------------------------------------------------------------------------------------------------

    def ask(self, statement: str, *values: object) -> list[Any]:
        """All rows of a query. By the writer where it has nothing to do: a second connection would cost its opening."""
        taken: list[bool] = []
        try:
            try:
                if not self.read_only and not is_owned(self.mutex):
                    # one call into C tries the mutex and writes down whether it has it
                    taken.extend(map(self.mutex.acquire, (False,)))
                if True in taken:
                    return self.ready().execute(statement, values).fetchall()
            finally:
                if True in taken:
                    self.mutex.release()
            if is_owned(self._reader_mutex):
                raise Reentered(f"the ledger {self.path!r}")
            with self._reader_mutex:
                if self._reader is None:
                    self._refuse_if_closed()
                    self._reader = self.database.open_reader(is_alone=self.read_only)
                return self._reader.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise named(error, self.path) from error

    # --- when something fails -----------------------------------------------------------------------------------------

    def failed(self, error: sqlite3.Error | OSError) -> StoreError:
        """What `error` means, under the mutex: after a failure in which nothing is known the writer is not used again."""
        if is_failed_sync(error):
            self._is_log_whole = False
            with suppress(OSError, StoreError):  # then it is tried again before anything more is written
                self.lock.during(self._mend_log)
        if leaves_doubt(error):
            self.drop()
        return named(error, self.path)

    def drop(self) -> None:
        """Close the writer, under the mutex and the lock file: the last connection to a file empties the log.

        Whoever else has the lock has the file open, so then ours is not the last one and can be closed without it.
        """
        try:
            if not self.read_only:  # who cannot write empties no log, and makes no lock file either
                with suppress(StoreError):
                    self.lock.acquire()
            writer, self.writer = self.writer, None
            if writer is not None:
                writer.close()
        finally:
            try:
                self.lock.release()
            except OSError:
                self.lock.close()  # and the lock goes with it
            except BaseException:
                self.lock.release()
                raise

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise StoreUnavailable(f"the ledger {self.path!r} is closed; nothing was done. Open it anew.")
        if self._was_torn:
            raise StoreUnavailable(
                f"this process was forked while another thread was writing to {self.path!r}, so the ledger cannot be used "
                "here; nothing was done. Open the ledger in the child."
            )

    def _log_is_long(self) -> bool:
        try:
            return os.stat(self.path + "-wal").st_size > 2 * _LOG_PAGES * PAGE_BYTES
        except OSError:
            return False

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def close(self, wait_seconds: float, give_back: Callable[[], None]) -> None:
        """`give_back` what the store has, with no wait longer than `wait_seconds`, and close all. Does so once."""
        self.refuse_reentry()
        with self.mutex, self._reader_mutex:
            if self.is_closed:
                return
            self.lock.busy_seconds = wait_seconds
            if self.writer is not None:
                with suppress(sqlite3.Error):
                    self.writer.execute(f"PRAGMA busy_timeout={int(wait_seconds * 1000)}")
            give_back()
            self._close_both()
            self.lock.close()
            self.is_closed = True  # last, so that who was interrupted can close again

    def _close_both(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()  # it cannot write, so it empties no log
        if self.writer is not None:
            if (
                self.log_pages
            ):  # SQLite empties the log as well when it is closed, and tells nobody of a sync that failed then
                try:
                    self.is_emptied()
                except (sqlite3.Error, OSError) as error:
                    self.failed(error)
                except StoreError:
                    pass
            self.drop()

    def before_fork(self) -> None:
        """Stand still and close the connections: SQLite's own book of locks must not be copied into the child."""
        if is_owned(self.mutex):  # a signal handler forks inside of a write of its own thread: nothing stands still
            return
        for mutex in (self.mutex, self._reader_mutex):
            self._stood_still.extend(map(mutex.acquire, (True,), (_FORK_WAIT_SECONDS,)))
        if self._is_still() and not self.is_closed:
            self._close_both()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        stood_still, self._stood_still = self._stood_still, []
        for mutex, is_ours in zip((self.mutex, self._reader_mutex), stood_still, strict=False):
            if is_ours:
                mutex.release()

    def after_fork_in_child(self) -> None:
        """Go on with mutexes and files of one's own, or never again, where a thread that is not here was using them."""
        if not self._is_still():
            self._was_torn = True
            _never_closed.extend(filter(None, (self.writer, self._reader)))
            self.writer = self._reader = None
        self._stood_still = []
        self.mutex, self._reader_mutex = threading.RLock(), threading.RLock()
        self.lock.close()

    def _is_still(self) -> bool:
        return self._stood_still == [True, True]


def is_owned(lock: threading.RLock) -> bool:
    """Whether the calling thread holds this lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined] # what `threading.Condition` asks it, too


def _give_room(db: sqlite3.Connection, path: str, size: int) -> None:
    """Have the log's file so many bytes long, the new ones zeros: a sync of a file that does not grow takes little more than half the time.

    SQLite reads a log up to the first frame that is none, so zeros say nothing. The transaction, which changes nothing, keeps everybody
    from writing where the file ends, also those who do not know of the lock file.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        log = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            end = os.fstat(log).st_size
            is_given = size <= end
            try:
                is_given = is_given or os.pwrite(log, bytes(size - end), end) == size - end
            finally:
                if not is_given:  # no zeros shall take what is left of a disk
                    os.ftruncate(log, end)
        finally:
            os.close(log)
    finally:
        db.rollback()


def _empty_log(db: sqlite3.Connection) -> bool:
    """Copy what the log holds into the file, both synced; whether nothing is left in it."""
    _, pages, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return bool(pages == copied)
