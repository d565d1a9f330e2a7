"""The embedded store: one SQLite file in WAL mode, written by one connection at a time, read beside it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, cast

from agent_run_ledger.contract import Head, Lease, Request, Row, Summary
from agent_run_ledger.errors import (
    LeaseLost,
    RunNotFound,
    RunOwned,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.faults import leaves_doubt, named
from agent_run_ledger.stores.filelock import WriteLock
from agent_run_ledger.stores.owners import Grave, Owners
from agent_run_ledger.stores.schema import Database, objects

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A plain payload above this stands in `payloads`, once per run and digest."""

_NORMAL, _FULL = 1, 2
_PAGE_BYTES = 4096
_PAGES_PER_COMMIT = 3  # the leaf of the table, the leaf of its index, and now and then a page above them
_LOG_PAGES = 1000  # a longer log makes every commit slower: 2 x at 40,000 pages
_SUMMARIES_PER_PAGE = 200
_FORK_WAIT_SECONDS = 5.0
_never_closed: list[sqlite3.Connection] = []

# Fenced: the run is found only while it has an owner, its token is ours and its inbox has not moved. Else the run id is
# NULL and nothing is written. As VALUES it is an eighth cheaper than as SELECT, which a trigger sends through a temporary
# table.
_APPEND = """
INSERT OR IGNORE INTO entries
    (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
VALUES (
    (SELECT run_id FROM runs WHERE run_id = ? AND fencing_token = ? AND inbox = ? AND owner IS NOT NULL),
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
)
"""

# The same bytes may come again after they were erased.
_KEEP_PAYLOAD = """
INSERT INTO payloads (run_id, digest, bytes) VALUES (?, ?, ?)
ON CONFLICT (run_id, digest) DO UPDATE SET bytes = excluded.bytes WHERE bytes IS NULL
"""

# A run of that id that exists, or a tombstone of one, leaves everything as it is.
_CREATE = """
INSERT INTO runs (run_id, owner, fencing_token, lease_until, lease_seconds, lease_boot)
SELECT ?, ?, (SELECT value FROM meta WHERE key = 'epoch') * 1048576 + 1, ?, ?, ?
WHERE NOT EXISTS (SELECT 1 FROM runs WHERE run_id = ?)
RETURNING fencing_token
"""

# Compares with what was read in the same transaction; a new epoch begins above every token of the old ones.
_CLAIM = """
UPDATE runs SET owner = ?, lease_until = ?, lease_seconds = ?, lease_boot = ?, note = NULL,
    fencing_token = max(fencing_token, (SELECT value FROM meta WHERE key = 'epoch') * 1048576) + 1
WHERE run_id = ? AND fencing_token = ? AND owner IS ?
RETURNING fencing_token
"""

_RENEW = """
UPDATE runs SET lease_until = ?, lease_seconds = ?, lease_boot = ?
WHERE run_id = ? AND fencing_token = ? AND owner IS NOT NULL
RETURNING inbox
"""

_LEASE = "SELECT owner, fencing_token, lease_until, lease_seconds, lease_boot FROM runs WHERE run_id = ?"
_HEAD = "SELECT run_id, owner, fencing_token, inbox, note FROM runs WHERE run_id = ?"

_ROW = """{0}.seq, {0}.kind, {0}.position, {0}.attempt, {0}.body, {0}.roots,
    CASE WHEN {0}.payload IS NULL AND {0}.digest IS NOT NULL
        THEN (SELECT bytes FROM payloads p WHERE p.run_id = {0}.run_id AND p.digest = {0}.digest)
        ELSE {0}.payload END,
    {0}.digest, {0}.fingerprint, {0}.encoding"""

_READ = f"SELECT {_ROW.format('e')} FROM entries e WHERE e.run_id = ? AND e.seq > ? ORDER BY e.seq"

_SUMMARIES = f"""
SELECT r.rowid, r.run_id, r.owner, r.fencing_token, r.inbox, r.note, {_ROW.format("f")}, {_ROW.format("l")}
FROM runs r
JOIN entries f ON f.run_id = r.run_id AND f.seq = (SELECT min(seq) FROM entries WHERE run_id = r.run_id)
JOIN entries l ON l.run_id = r.run_id AND l.seq = (SELECT max(seq) FROM entries WHERE run_id = r.run_id)
WHERE {{}} ORDER BY r.rowid LIMIT {_SUMMARIES_PER_PAGE}
"""
_SUMMARIES_AFTER = _SUMMARIES.format("r.rowid > ?")
_SUMMARY_OF = _SUMMARIES.format("r.run_id = ?")

# What belongs to no run that can be listed, or to no entry, so that nobody who goes through the runs would come by it.
_STRAYS = """
SELECT 'run ' || quote(run_id) || ' has entries and no head' FROM (
    SELECT run_id FROM entries EXCEPT SELECT run_id FROM runs)
UNION ALL
SELECT 'run ' || quote(run_id) || ' has a head and no entries' FROM (
    SELECT run_id FROM runs EXCEPT SELECT run_id FROM entries EXCEPT SELECT run_id FROM tombstones)
UNION ALL
SELECT 'run ' || quote(run_id) || ' has a payload that no entry names' FROM (
    SELECT run_id, digest FROM payloads WHERE bytes IS NOT NULL EXCEPT SELECT run_id, digest FROM entries)
"""

# One writer per run: others only put requests here and move the counter, the one column that needs no token.
_POST = "UPDATE runs SET inbox = inbox + 1 WHERE run_id = ? RETURNING inbox"


class SqliteStore:
    """A `Store` in one file on one machine.

    Every write and every checkpoint of all processes runs under the lock file beside the database. Connections never
    cross a fork: they are closed before it and opened anew on both sides when next needed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Literal["full", "process"] = "full",
        clock: Clock,
        busy_seconds: float = 30.0,
        read_only: bool = False,
        migrations: Sequence[str] | None = None,
    ) -> None:
        self.path = os.path.realpath(os.fsdecode(path))
        self.durability = durability
        self.clock = clock
        self.read_only = read_only
        self._is_closed = False
        self._file_lock = WriteLock(self.path + ".lock", busy_seconds)
        self._owners = Owners(self.path)
        self._database = Database(self.path, self._file_lock, busy_seconds, migrations)
        self._mutex = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._level = _FULL
        self._reader_mutex = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._log_pages = 0
        self._held: dict[str, int] = {}
        self._noted: set[str] = set()
        self._watched: dict[str, tuple[tuple[object, ...], float]] = {}
        self._inherited: dict[str, int] = {}
        self._inherited_owners: frozenset[str] = frozenset()
        self._was_held = (False, False)
        self._was_torn = False
        if read_only:
            self._reader = self._database.open_reader(is_alone=True)
        else:
            self._connection()
        lifetime.watch(self)

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def first_token(self) -> int:
        with self._mutex, self._naming_errors():
            row = self._connection().execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            return int(row[0]) * 1048576 + 1

    def create(self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row]) -> Lease | None:
        owner = self._own_name(owner)
        with self._mutex:
            self._connection()
            self._owners.hold(owner)
            end = self.clock.elapsed() + lease_seconds
            try:
                with self._transaction(_FULL) as db:
                    made = db.execute(_CREATE, (run_id, owner, end, lease_seconds, boot_id(), run_id)).fetchone()
                    if made is None:
                        return None
                    token = int(made[0])
                    db.execute("INSERT INTO secrets (run_id, secret) VALUES (?, ?)", (run_id, secret))
                    self._insert(db, run_id, token, 0, rows)
            except sqlite3.Error as error:
                token = self._look_up_created(error, run_id, owner, end)
            self._held[run_id] = token
            return Lease(run_id, owner, token, secret)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        owner = self._own_name(owner)
        with self._mutex, self._naming_errors():
            self._connection()
            self._owners.hold(owner)
            grave: Grave | None = None
            try:
                # A failed COMMIT leaves it open whether the run is ours. Nothing was done under the new token then, and
                # we hold this owner's lock: the next claim takes the run from ourselves.
                with self._transaction(_FULL) as db:
                    token, grave = self._take(db, run_id, owner, lease_seconds)
                    secret = _secret(db, run_id)
            except BaseException:
                if grave is not None:
                    grave.leave()
                raise
            if grave is not None:
                grave.bury()
            if self._held.get(run_id) != token:
                self._held[run_id] = token
                self._noted.discard(run_id)
                self._watched.pop(run_id, None)
            return Lease(run_id, owner, token, secret)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        if self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)
        with self._mutex, self._naming_errors(), self._transaction(_NORMAL) as db:
            end = self.clock.elapsed() + lease_seconds
            renewed = db.execute(_RENEW, (end, lease_seconds, boot_id(), run_id, token)).fetchone()
            if renewed is None:
                raise LeaseLost(run_id, token) if self._exists(db, run_id) else RunNotFound(run_id)
            return int(renewed[0])

    def release(self, run_id: str, token: int) -> None:
        if self._inherited.get(run_id) == token:
            return
        with self._mutex, self._naming_errors(), self._transaction(_NORMAL) as db:
            db.execute("UPDATE runs SET owner = NULL WHERE run_id = ? AND fencing_token = ?", (run_id, token))
            if self._held.get(run_id) == token:
                del self._held[run_id]

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        if self._inherited and self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)
        is_plain = len(rows) == 1 and run_id not in self._noted and not _is_large(rows[0])
        with self._mutex:
            try:
                db = self._writer or self._connection()
                self._file_lock.acquire()
                try:
                    level = _FULL if synced else _NORMAL
                    if level != self._level:
                        self._set_level(db, level)
                    if is_plain:  # one statement is a transaction of its own, a tenth cheaper than BEGIN and COMMIT
                        is_written = db.execute(_APPEND, (run_id, token, inbox, *rows[0])).rowcount == 1
                    else:
                        is_written = self._append_all(db, run_id, token, inbox, rows)
                    if is_written:
                        self._mind_the_log(db, rows[0].payload if is_plain else None)
                        return True
                    return self._why_refused(db, run_id, token, inbox)
                finally:
                    self._file_lock.release()
            except sqlite3.Error as error:
                return self._look_up_appended(error, run_id, rows, synced)

    def read(self, run_id: str, after: int = 0) -> list[Row]:
        with self._reading() as db:
            return list(map(Row._make, db.execute(_READ, (run_id, after))))

    def head(self, run_id: str) -> Head | None:
        with self._reading() as db:
            found = db.execute(_HEAD, (run_id,)).fetchone()
        return None if found is None else Head(*found)

    def secret(self, run_id: str) -> bytes:
        with self._reading() as db:
            return _secret(db, run_id)

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        statement, key = (_SUMMARIES_AFTER, cast(Any, 0)) if run_id is None else (_SUMMARY_OF, run_id)
        while True:
            with self._reading() as db:
                page = db.execute(statement, (key,)).fetchall()
            for found in page:
                yield Summary(Head(*found[1:6]), Row._make(found[6:16]), Row._make(found[16:]))
            if run_id is not None or len(page) < _SUMMARIES_PER_PAGE:
                return
            key = page[-1][0]

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float) -> int:
        with self._mutex, self._naming_errors(), self._transaction(_FULL) as db:
            counted = db.execute(_POST, (run_id,)).fetchone()
            if counted is None:
                raise RunNotFound(run_id)
            request = (run_id, counted[0], kind, payload, who, at)
            db.execute("INSERT INTO inbox (run_id, id, kind, payload, who, at) VALUES (?, ?, ?, ?, ?, ?)", request)
            return int(counted[0])

    def inbox(self, run_id: str, after: int) -> list[Request]:
        statement = "SELECT id, kind, payload, who, at FROM inbox WHERE run_id = ? AND id > ? ORDER BY id"
        with self._reading() as db:
            return [Request(*found) for found in db.execute(statement, (run_id, after))]

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        if self._inherited.get(run_id) == token:
            return
        with self._mutex, self._naming_errors(), self._transaction(_NORMAL) as db:
            self._noted.add(run_id)  # so that the next append looks; the plain one has no time to
            db.execute("UPDATE runs SET note = ? WHERE run_id = ? AND fencing_token = ?", (note, run_id, token))

    def check(self) -> Iterable[str]:
        try:
            with self._reading() as db:
                wrong = [f"{self.path}: {said}" for (said,) in db.execute("PRAGMA integrity_check") if said != "ok"]
                present = objects(db)
                wrong += [f"{self.path}: {said}" for (said,) in db.execute(_STRAYS)]
        except StoreError as error:
            return [str(error)]
        for name, sql in self._database.expected_objects().items():
            if name not in present:
                wrong.append(f"{self.path}: the {name} is missing from the schema")
            elif present[name] != sql:
                wrong.append(f"{self.path}: the {name} of the schema was changed")
        return wrong

    def close(self) -> None:
        self._close(self._file_lock.busy_seconds)

    def __del__(self) -> None:
        # Whoever collects garbage may hold the lock that closing in good order needs: it is not waited for.
        if not getattr(self, "_is_closed", True):
            self._close(0.0)

    # --- inside a transaction -----------------------------------------------------------------------------------------

    def _take(self, db: sqlite3.Connection, run_id: str, owner: str, lease_seconds: float) -> tuple[int, Grave | None]:
        """The token under which `owner` now has the run, and the grave of the dead owner whose runs were all freed."""
        found = db.execute(_LEASE, (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        holder, token, until, seconds, boot = found
        elapsed = self.clock.elapsed()
        lease = (elapsed + lease_seconds, lease_seconds, boot_id())
        if holder == owner and self._held.get(run_id) == token:
            db.execute(_RENEW, (*lease, run_id, token)).fetchone()
            return int(token), None
        grave = None
        if holder is not None:
            is_free, grave = self._is_free(run_id, holder, token, until, seconds, boot)
            if not is_free:
                raise RunOwned(run_id, holder, max(0.0, elapsed - (until - seconds)) if boot == boot_id() else 0.0)
        try:
            if grave is not None:
                db.execute("UPDATE runs SET owner = NULL WHERE owner = ?", (holder,))
                holder = None
            (taken,) = db.execute(_CLAIM, (owner, *lease, run_id, token, holder)).fetchone()
        except BaseException:
            if grave is not None:
                grave.leave()
            raise
        return int(taken), grave

    def _is_free(
        self, run_id: str, holder: str, token: int, until: float, seconds: float, boot: str | None
    ) -> tuple[bool, Grave | None]:
        """Whether the run may be taken from `holder`, with its grave where the kernel proves it dead."""
        elapsed, here = self.clock.elapsed(), boot_id()
        is_local = self._owners.is_local()
        if boot and boot == here:
            if holder in self._owners.held and is_local:
                # Ours by name. Unless it is ours by token too, it was a dead owner's of the same name.
                return until <= elapsed or self._held.get(run_id) != token, None
            grave = self._owners.prove_death(holder) if is_local else None
            return grave is not None or until <= elapsed, grave
        if boot and here and is_local:
            # This machine was started anew since, and nothing of that boot is alive.
            return True, self._owners.prove_death(holder)
        # Another machine's clock says nothing here: the lease is watched, unchanged, for as long as it is valid.
        lease = (holder, token, until)
        watched, since = self._watched.get(run_id, (None, elapsed))
        if watched != lease:
            self._watched[run_id] = (lease, elapsed)
            return False, None
        return elapsed - since >= seconds, None

    def _append_all(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int, rows: Sequence[Row]) -> bool:
        db.execute("BEGIN IMMEDIATE")
        try:
            found = db.execute(_HEAD, (run_id,)).fetchone()
            is_fenced = found is not None and found[1] is not None and found[2:4] == (token, inbox)
            if is_fenced:
                self._insert(db, run_id, token, inbox, rows)
                if found[4] is not None:
                    db.execute("UPDATE runs SET note = NULL WHERE run_id = ?", (run_id,))
            db.execute("COMMIT" if is_fenced else "ROLLBACK")
        except BaseException:
            if db.in_transaction:
                db.rollback()
            raise
        if is_fenced:
            self._noted.discard(run_id)
        return is_fenced

    def _insert(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self._log_pages += len(row.payload or b"") // _PAGE_BYTES
            if _is_large(row):
                db.execute(_KEEP_PAYLOAD, (run_id, row.digest, row.payload))
                row = row._replace(payload=None)
            if db.execute(_APPEND, (run_id, token, inbox, *row)).rowcount != 1:
                raise StoreError(f"run {run_id!r}: entry {row.seq} lacks its kind, body or roots; nothing was written.")

    def _why_refused(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int) -> bool:
        found = db.execute(_HEAD, (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        if found[1] is None or found[2] != token:
            raise LeaseLost(run_id, token)
        if found[3] == inbox:
            raise StoreError(f"run {run_id!r}: an entry without kind, body or roots was refused; nothing was written.")
        return False

    def _exists(self, db: sqlite3.Connection, run_id: str) -> bool:
        return db.execute(_HEAD, (run_id,)).fetchone() is not None

    # --- connections and locks ----------------------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        """The writer, under the mutex; opened anew where a failure or a fork closed it."""
        if self._writer is None:
            self._refuse_if_closed()
            if self.read_only:
                raise StoreReadOnly(f"the ledger {self.path!r} was opened read-only; nothing was written.")
            self._writer = self._database.open_writer()
            self._level = _FULL
            self._log_pages = _LOG_PAGES if self._log_is_long() else 0
        return self._writer

    @contextmanager
    def _transaction(self, level: int) -> Iterator[sqlite3.Connection]:
        """One write transaction under the lock file, all or nothing."""
        db = self._connection()
        self._file_lock.acquire()
        try:
            if level != self._level:
                self._set_level(db, level)
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.rollback()
                raise
            self._mind_the_log(db, None)
        finally:
            self._file_lock.release()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read from. The writer where it has nothing to do: a second one would cost its opening."""
        try:
            if not self.read_only and self._mutex.acquire(blocking=False):
                try:
                    yield self._connection()
                finally:
                    self._mutex.release()
            else:
                with self._reader_mutex:
                    if self._reader is None:
                        self._refuse_if_closed()
                        self._reader = self._database.open_reader(is_alone=self.read_only)
                    yield self._reader
        except sqlite3.Error as error:
            raise named(error, self.path) from error

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"the ledger {self.path!r} is closed; nothing was done. Open it anew.")
        if self._was_torn:
            raise StoreUnavailable(
                f"this process was forked while another thread was writing to {self.path!r}, so the ledger cannot be used "
                "here; nothing was done. Open the ledger in the child."
            )

    def _set_level(self, db: sqlite3.Connection, level: int) -> None:
        db.execute(f"PRAGMA synchronous={level}")
        self._level = level

    def _log_is_long(self) -> bool:
        try:
            return os.stat(self.path + "-wal").st_size > 2 * _LOG_PAGES * _PAGE_BYTES
        except OSError:
            return False

    def _mind_the_log(self, db: sqlite3.Connection, payload: bytes | None) -> None:
        """Count what was committed, under the lock file, and empty the log when it is long."""
        self._log_pages += _PAGES_PER_COMMIT if payload is None else _PAGES_PER_COMMIT + len(payload) // _PAGE_BYTES
        if self._log_pages > _LOG_PAGES:
            self._log_pages = 0
            with suppress(sqlite3.Error):  # what was committed stands in the log; the next time it is tried again
                self._empty_log(db)

    def _empty_log(self, db: sqlite3.Connection) -> bool:
        """Copy what the log holds into the file, both synced; whether nothing is left in it."""
        _, pages, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return bool(pages == copied)

    # --- when a write fails -------------------------------------------------------------------------------------------

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """For a write under the mutex that its caller can simply do again."""
        try:
            yield
        except sqlite3.Error as error:
            self._drop_if_in_doubt(error)
            raise named(error, self.path) from error

    def _drop_if_in_doubt(self, error: sqlite3.Error) -> bool:
        """Under the mutex: after a failure in which nothing is known the connection is not used again."""
        if not leaves_doubt(error):
            return False
        writer, self._writer = self._writer, None
        self._close_connections(writer)
        return True

    def _look_up_created(self, error: sqlite3.Error, run_id: str, owner: str, end: float) -> int:
        fault = named(error, self.path)
        if self._drop_if_in_doubt(error):
            statement = "SELECT fencing_token FROM runs WHERE run_id = ? AND owner = ? AND lease_until = ?"
            try:
                found = self._connection().execute(statement, (run_id, owner, end)).fetchone()
                if found is not None and self._is_emptied():
                    return int(found[0])
            except (sqlite3.Error, StoreError):
                pass  # the first failure says more
        raise fault from error

    def _look_up_appended(self, error: sqlite3.Error, run_id: str, rows: Sequence[Row], synced: bool) -> bool:
        fault = named(error, self.path)
        if self._drop_if_in_doubt(error) and rows:
            statement = "SELECT body FROM entries WHERE run_id = ? AND seq = ?"
            try:
                found = self._connection().execute(statement, (run_id, rows[-1].seq)).fetchone()
                if found == (rows[-1].body,) and (not synced or self._is_emptied()):
                    return True
            except (sqlite3.Error, StoreError):
                pass  # the first failure says more
        raise fault from error

    def _is_emptied(self) -> bool:
        """After a failed sync what reads back may be nowhere but in memory: only a synced copy in the file counts."""
        self._file_lock.acquire()
        try:
            return self._empty_log(self._connection())
        finally:
            self._file_lock.release()

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def _own_name(self, owner: str) -> str:
        """An owner id from before a fork names the parent's owner; the child's is spelt with its process id."""
        return f"{owner}.{os.getpid():x}" if owner in self._inherited_owners else owner

    def _close(self, wait_seconds: float) -> None:
        with self._mutex, self._reader_mutex:
            if self._is_closed:
                return
            self._file_lock.busy_seconds = wait_seconds
            if self._writer is not None:
                with suppress(sqlite3.Error):
                    self._writer.execute(f"PRAGMA busy_timeout={int(wait_seconds * 1000)}")
            is_given_back = self._give_back()
            self._is_closed = True
            writer, reader = self._writer, self._reader
            self._writer = self._reader = None
            self._close_connections(reader, writer)
            self._owners.close(remove=is_given_back)
            self._file_lock.close()
        lifetime.forget(self)

    def _give_back(self) -> bool:
        """Free every run of our owners. Where that fails their locks go with their files left, which proves them dead."""
        owners = self._owners.held
        if not owners:
            return True
        try:
            with self._transaction(_NORMAL) as db:
                for owner in owners:
                    db.execute("UPDATE runs SET owner = NULL WHERE owner = ?", (owner,))
        except (sqlite3.Error, StoreError):
            return False
        return True

    def _close_connections(self, *connections: sqlite3.Connection | None) -> None:
        """Close under the lock file, since the last connection to a file empties the log.

        Whoever else has the lock has the file open, so then ours is not the last one and can be closed without it.
        """
        if not any(connections):
            return
        is_locked = not self.read_only  # who cannot write empties no log, and makes no lock file either
        if is_locked:
            try:
                self._file_lock.acquire()
            except StoreError:
                is_locked = False
        try:
            for connection in connections:
                if connection is not None:
                    connection.close()
        finally:
            if is_locked:
                self._file_lock.release()

    def before_fork(self) -> None:
        """Stand still and close the connections: SQLite's own book of locks must not be copied into the child."""
        self._was_held = (
            self._mutex.acquire(timeout=_FORK_WAIT_SECONDS),
            self._reader_mutex.acquire(timeout=_FORK_WAIT_SECONDS),
        )
        if all(self._was_held) and not self._is_closed:
            writer, reader = self._writer, self._reader
            self._writer = self._reader = None
            self._close_connections(reader, writer)

    def after_fork_in_parent(self) -> None:
        for mutex, was_held in zip((self._mutex, self._reader_mutex), self._was_held, strict=True):
            if was_held:
                mutex.release()

    def after_fork_in_child(self) -> None:
        if not all(self._was_held):  # a thread that is not here was in the middle of something
            self._was_torn = True
            _never_closed.extend(filter(None, (self._writer, self._reader)))
            self._writer = self._reader = None
        self._mutex, self._reader_mutex = threading.Lock(), threading.Lock()
        self._file_lock.close()
        self._inherited_owners |= frozenset(self._owners.abandon())
        self._inherited |= self._held
        self._held = {}
        self._noted = set()


def _is_large(row: Row) -> bool:
    payload = row.payload
    return (
        payload is not None and len(payload) > LARGE_PAYLOAD_BYTES and row.digest is not None and row.encoding is None
    )


def _secret(db: sqlite3.Connection, run_id: str) -> bytes:
    found = db.execute("SELECT secret FROM secrets WHERE run_id = ?", (run_id,)).fetchone()
    return found[0] or b"" if found is not None else b""
