"""The embedded store: one SQLite file in WAL mode, written by one connection at a time, read beside it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from agent_run_ledger.contract import Append, Head, Lease, Request, Row, Summary
from agent_run_ledger.errors import (
    LeaseLost,
    LedgerError,
    RunNotFound,
    RunOwned,
    StoreError,
    StoreUnavailable,
)
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.connections import FULL, NORMAL, PAGE_BYTES, Connections
from agent_run_ledger.stores.faults import code, is_refused, leaves_doubt, named
from agent_run_ledger.stores.owners import Owners
from agent_run_ledger.stores.schema import OBJECTS

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A plain payload above this stands in `payloads`, once per run and digest."""

_SUMMARIES_PER_PAGE = 200

_Answer = bool | LedgerError | None
"""What becomes of one of many appends; None where that depends: its rows stand there already, and may not be synced yet."""

_NOT_KNOWN_TO_BE_SYNCED = (
    "these entries are written, but it is not known whether they are on stable storage yet: somebody still reads an older "
    "state of the database. Call again."
)

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
_EPOCH = "SELECT value FROM meta WHERE key = 'epoch'"
_SECRET = "SELECT secret FROM secrets WHERE run_id = ?"
_HEAD = "SELECT run_id, owner, fencing_token, inbox, note FROM runs WHERE run_id = ?"

_ROW = """{0}.seq, {0}.kind, {0}.position, {0}.attempt, {0}.body, {0}.roots,
    CASE WHEN {0}.payload IS NULL AND {0}.digest IS NOT NULL
        THEN (SELECT bytes FROM payloads p WHERE p.run_id = {0}.run_id AND p.digest = {0}.digest)
        ELSE {0}.payload END,
    {0}.digest, {0}.fingerprint, {0}.encoding"""

_READ = f"SELECT {_ROW.format('e')} FROM entries e WHERE e.run_id = ? AND e.seq > ? ORDER BY e.seq LIMIT ?"

# `length` of a blob is asked of the record's header: what is left out is not read.
_READ_SHORT = """
SELECT seq, kind, position, attempt, body, roots,
    CASE WHEN digest IS NULL THEN payload
        WHEN payload IS NULL THEN (SELECT bytes FROM payloads p
            WHERE p.run_id = e.run_id AND p.digest = e.digest AND length(p.bytes) <= ?)
        WHEN length(payload) <= ? THEN payload END,
    digest, fingerprint, encoding
FROM entries e WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?
"""
_PAYLOAD = """
SELECT CASE WHEN payload IS NULL AND digest IS NOT NULL
    THEN (SELECT bytes FROM payloads p WHERE p.run_id = e.run_id AND p.digest = e.digest)
    ELSE payload END
FROM entries e WHERE run_id = ? AND seq = ?
"""

_SUMMARIES = f"""
SELECT r.rowid, r.run_id, r.owner, r.fencing_token, r.inbox, r.note, {_ROW.format("f")}, {_ROW.format("l")}
FROM runs r
JOIN entries f ON f.run_id = r.run_id AND f.seq = (SELECT min(seq) FROM entries WHERE run_id = r.run_id)
JOIN entries l ON l.run_id = r.run_id AND l.seq = (SELECT max(seq) FROM entries WHERE run_id = r.run_id)
WHERE {{}} ORDER BY r.rowid LIMIT {_SUMMARIES_PER_PAGE}
"""
_SUMMARIES_AFTER = _SUMMARIES.format("r.rowid > ?")
_SUMMARY_OF = _SUMMARIES.format("r.run_id = ?")

_STANDING = """
SELECT seq, kind, position, attempt, body, roots, digest FROM entries
WHERE run_id = ? AND seq BETWEEN ? AND ? ORDER BY seq
"""

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
        self._owners = Owners(self.path)
        self._held: dict[str, int] = {}
        self._noted: set[str] = set()
        self._watched: dict[str, tuple[tuple[object, ...], float]] = {}
        self._inherited: dict[str, int] = {}
        self._inherited_owners: frozenset[str] = frozenset()
        self._files = Connections(self.path, busy_seconds, read_only=read_only, migrations=migrations)
        self._files.open()
        lifetime.watch(self)

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def first_token(self) -> int:
        return int(self._files.ask(_EPOCH)[0][0]) * 1048576 + 1

    def create(self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row]) -> Lease | None:
        owner = self._own_name(owner)
        self._files.refuse_reentry()
        with self._files.mutex:
            end = self.clock.elapsed() + lease_seconds
            head = (run_id, owner, end, lease_seconds, boot_id(), run_id)
            try:
                self._files.ready()
                self._owners.hold(owner)
                token = self._files.transact(FULL, partial(self._make, head=head, secret=secret, rows=rows))
            except (sqlite3.Error, OSError) as error:
                token = self._look_up_created(error, run_id, owner, end)
            if token is None:
                return None
            self._held[run_id] = token
            return Lease(run_id, owner, token, secret)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        owner = self._own_name(owner)
        self._files.refuse_reentry()
        with self._files.mutex:
            try:
                self._files.ready()
                self._owners.hold(owner)
                # A failed COMMIT leaves it open whether the run is ours. Nothing was done under the new token then, and
                # we hold this owner's lock: the next claim takes the run from ourselves.
                take = partial(self._take, run_id=run_id, owner=owner, lease_seconds=lease_seconds)
                token, secret = self._files.transact(FULL, take)
                self._owners.bury()
            except (sqlite3.Error, OSError) as error:
                raise self._files.failed(error) from error
            finally:
                self._owners.leave()
            if self._held.get(run_id) != token:
                self._held[run_id] = token
                self._noted.discard(run_id)
                self._watched.pop(run_id, None)
            return Lease(run_id, owner, token, secret)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        if self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)

        def work(db: sqlite3.Connection) -> int:
            end = self.clock.elapsed() + lease_seconds
            renewed = db.execute(_RENEW, (end, lease_seconds, boot_id(), run_id, token)).fetchone()
            if renewed is None:
                is_known = db.execute(_HEAD, (run_id,)).fetchone() is not None
                raise LeaseLost(run_id, token) if is_known else RunNotFound(run_id)
            return int(renewed[0])

        return self._files.write(NORMAL, work)

    def release(self, run_id: str, token: int) -> None:
        if self._inherited.get(run_id) == token:
            return

        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE runs SET owner = NULL WHERE run_id = ? AND fencing_token = ?", (run_id, token))
            if self._held.get(run_id) == token:  # where it fails and is ours still, a claim takes it from ourselves
                del self._held[run_id]

        self._files.write(NORMAL, work)

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        if self._inherited and self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)
        files, level = self._files, FULL if synced else NORMAL
        files.refuse_reentry()
        with files.mutex:
            try:
                if len(rows) == 1 and run_id not in self._noted and not _is_large(rows[0]):
                    row = rows[0]
                    is_written = files.run_alone(level, _APPEND, (run_id, token, inbox, *row), row.payload)
                else:
                    is_written = files.transact(level, partial(self._append_rows, run_id, token, inbox, rows))
                    if is_written:
                        self._noted.discard(run_id)
                if is_written:
                    return True
                _refuse(files.ready(), run_id, token, inbox)
                # The inbox may have moved after these very rows were written by a call that could not tell.
                return self._counts(run_id, rows, synced)
            except (sqlite3.Error, OSError) as error:
                return self._look_up_appended(error, run_id, rows, synced)

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        files = self._files
        files.refuse_reentry()
        if len(appends) == 1:  # alone it is cheaper
            try:
                return [self.append(*appends[0], synced=synced)]
            except LedgerError as error:
                return [error]
        answers: list[_Answer] = [None] * len(appends)
        with files.mutex:
            try:
                files.transact(FULL if synced else NORMAL, partial(self._append_each, appends, answers))
            except (sqlite3.Error, OSError) as error:
                return self._settled(self._look_up_each(error, appends, answers), synced)
            except StoreError as error:  # nothing was begun
                return [_likewise(error) for _ in appends]
            if self._noted:
                self._noted -= {
                    append.run_id for append, answer in zip(appends, answers, strict=True) if answer is True
                }
            return self._settled(answers, synced)

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        most = -1 if limit is None else limit  # as SQLite spells no limit
        if payloads_up_to is None:
            return list(map(Row._make, self._files.ask(_READ, run_id, after, most)))
        return list(map(Row._make, self._files.ask(_READ_SHORT, payloads_up_to, payloads_up_to, run_id, after, most)))

    def payload(self, run_id: str, seq: int) -> bytes | None:
        found = self._files.ask(_PAYLOAD, run_id, seq)
        return found[0][0] if found else None

    def head(self, run_id: str) -> Head | None:
        found = self._files.ask(_HEAD, run_id)
        return Head(*found[0]) if found else None

    def secret(self, run_id: str) -> bytes:
        found = self._files.ask(_SECRET, run_id)
        return found[0][0] or b"" if found else b""

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        statement, key = (_SUMMARIES_AFTER, cast(Any, 0)) if run_id is None else (_SUMMARY_OF, run_id)
        while True:
            page = self._files.ask(statement, key)
            for found in page:
                yield Summary(Head(*found[1:6]), Row._make(found[6:16]), Row._make(found[16:]))
            if run_id is not None or len(page) < _SUMMARIES_PER_PAGE:
                return
            key = page[-1][0]

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float) -> int:
        def work(db: sqlite3.Connection) -> int:
            counted = db.execute(_POST, (run_id,)).fetchone()
            if counted is None:
                raise RunNotFound(run_id)
            request = (run_id, counted[0], kind, payload, who, at)
            db.execute("INSERT INTO inbox (run_id, id, kind, payload, who, at) VALUES (?, ?, ?, ?, ?, ?)", request)
            return int(counted[0])

        return self._files.write(FULL, work)

    def inbox(self, run_id: str, after: int) -> list[Request]:
        statement = "SELECT id, kind, payload, who, at FROM inbox WHERE run_id = ? AND id > ? ORDER BY id"
        return [Request(*found) for found in self._files.ask(statement, run_id, after)]

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        if self._inherited.get(run_id) == token:
            return

        def work(db: sqlite3.Connection) -> None:
            self._noted.add(run_id)  # so that the next append looks; the plain one has no time to
            db.execute("UPDATE runs SET note = ? WHERE run_id = ? AND fencing_token = ?", (note, run_id, token))

        self._files.write(NORMAL, work)

    def check(self) -> Iterable[str]:
        try:
            wrong = [said for (said,) in self._files.ask("PRAGMA integrity_check") if said != "ok"]
            present = dict(self._files.ask(OBJECTS))
            wrong += [said for (said,) in self._files.ask(_STRAYS)]
            expected = self._files.database.expected_objects()
        except StoreError as error:
            return [str(error)]
        for name, sql in expected.items():
            if name not in present:
                wrong.append(f"the {name} is missing from the schema")
            elif present[name] != sql:
                wrong.append(f"the {name} of the schema was changed")
        return [f"{self.path}: {said}" for said in wrong]

    def close(self) -> None:
        self._close(self._files.lock.busy_seconds)

    def __del__(self) -> None:
        # Whoever collects garbage may hold the lock that closing in good order needs: it is not waited for.
        if hasattr(self, "_files"):
            self._close(0.0)

    # --- inside a transaction -----------------------------------------------------------------------------------------

    def _make(
        self, db: sqlite3.Connection, *, head: tuple[object, ...], secret: bytes, rows: Sequence[Row]
    ) -> int | None:
        """The token of the new run; None where there is one of that id."""
        made = db.execute(_CREATE, head).fetchone()
        if made is None:
            return None
        run_id, token = str(head[0]), int(made[0])
        db.execute("INSERT INTO secrets (run_id, secret) VALUES (?, ?)", (run_id, secret))
        self._insert(db, run_id, token, 0, rows)
        return token

    def _take(self, db: sqlite3.Connection, *, run_id: str, owner: str, lease_seconds: float) -> tuple[int, bytes]:
        """The token under which `owner` now has the run, and its secret. Of a dead owner all runs were freed."""
        found = db.execute(_LEASE, (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        holder, token, until, seconds, boot = found
        elapsed = self.clock.elapsed()
        lease = (elapsed + lease_seconds, lease_seconds, boot_id())
        if holder == owner and self._held.get(run_id) == token:
            db.execute(_RENEW, (*lease, run_id, token)).fetchone()
        else:
            if holder is not None:
                if not self._is_free(run_id, holder, token, until, seconds, boot):
                    raise RunOwned(run_id, holder, max(0.0, elapsed - (until - seconds)) if boot == boot_id() else 0.0)
                if self._owners.dead == holder:
                    db.execute("UPDATE runs SET owner = NULL WHERE owner = ?", (holder,))
                    holder = None
            (token,) = db.execute(_CLAIM, (owner, *lease, run_id, token, holder)).fetchone()
        secret = db.execute(_SECRET, (run_id,)).fetchone()
        return int(token), (secret[0] or b"" if secret is not None else b"")

    def _is_free(self, run_id: str, holder: str, token: int, until: float, seconds: float, boot: str | None) -> bool:
        """Whether the run may be taken from `holder`, whose grave is open where the kernel proves it dead."""
        elapsed, here = self.clock.elapsed(), boot_id()
        is_local = self._owners.is_local()
        if boot and boot == here:
            if holder in self._owners.held and is_local:
                # Ours by name. Unless it is ours by token too, it was a dead owner's of the same name.
                return until <= elapsed or self._held.get(run_id) != token
            return (is_local and self._owners.prove_death(holder)) or until <= elapsed
        if boot and here and is_local:
            # This machine was started anew since, and nothing of that boot is alive.
            self._owners.prove_death(holder)
            return True
        # Another machine's clock says nothing here: the lease is watched, unchanged, for as long as it is valid.
        lease = (holder, token, until)
        watched, since = self._watched.get(run_id, (None, elapsed))
        if watched != lease:
            self._watched[run_id] = (lease, elapsed)
            return False
        return elapsed - since >= seconds

    def _append_each(self, appends: Sequence[Append], answers: list[_Answer], db: sqlite3.Connection) -> None:
        self._files.log_pages += len(appends)  # each has a leaf of the index to itself
        for number, append in enumerate(appends):
            answers[number] = self._append_one(db, *append)

    def _append_one(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int, rows: Sequence[Row]) -> _Answer:
        """One of many appends, whole or not at all. Raises only what leaves no transaction to go on with."""
        if self._inherited and self._inherited.get(run_id) == token:
            return LeaseLost(run_id, token)
        try:
            if len(rows) == 1 and run_id not in self._noted and not _is_large(rows[0]):
                row = rows[0]
                self._files.log_pages += len(row.payload or b"") // PAGE_BYTES
                is_written = db.execute(_APPEND, (run_id, token, inbox, *row)).rowcount == 1
            else:
                is_written = self._append_whole(run_id, token, inbox, rows, db)
            if is_written:
                return True
            _refuse(db, run_id, token, inbox)
            return None if _stand(db, run_id, rows) else False
        except LedgerError as error:
            return error
        except sqlite3.Error as error:
            # What says that nothing was written undid this one's statement only; so did what Python refused to bind, which
            # has no code. After all else SQLite wants a rollback, or has done it.
            is_alone = not leaves_doubt(error) or code(error) == 0
            if not is_alone or not db.in_transaction:
                raise
            return None if is_refused(error) and _stand(db, run_id, rows) else self._fault(error)

    def _append_whole(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], db: sqlite3.Connection) -> bool:
        """All rows or none, in a transaction that goes on in either case."""
        db.execute("SAVEPOINT one")
        try:
            return self._append_rows(run_id, token, inbox, rows, db)
        except (sqlite3.Error, StoreError):
            if db.in_transaction:
                db.execute("ROLLBACK TO one")
            raise
        finally:
            if db.in_transaction:
                db.execute("RELEASE one")

    def _append_rows(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], db: sqlite3.Connection) -> bool:
        found = db.execute(_HEAD, (run_id,)).fetchone()
        if found is None or found[1] is None or found[2:4] != (token, inbox):
            return False
        self._insert(db, run_id, token, inbox, rows)
        if found[4] is not None:
            db.execute("UPDATE runs SET note = NULL WHERE run_id = ?", (run_id,))
        return True

    def _insert(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self._files.log_pages += len(row.payload or b"") // PAGE_BYTES
            if _is_large(row):
                db.execute(_KEEP_PAYLOAD, (run_id, row.digest, row.payload))
                row = row._replace(payload=None)
            if db.execute(_APPEND, (run_id, token, inbox, *row)).rowcount != 1:
                raise StoreError(f"run {run_id!r}: entry {row.seq} lacks its kind, body or roots; nothing was written.")

    # --- when a write is refused, or fails ----------------------------------------------------------------------------

    def _look_up_created(self, error: sqlite3.Error | OSError, run_id: str, owner: str, end: float) -> int:
        fault = self._files.failed(error)
        if leaves_doubt(error):
            statement = "SELECT fencing_token FROM runs WHERE run_id = ? AND owner = ? AND lease_until = ?"
            try:
                found = self._files.ready().execute(statement, (run_id, owner, end)).fetchone()
                if found is not None and self._files.is_emptied():
                    return int(found[0])
            except (sqlite3.Error, OSError, StoreError):
                pass  # the first failure says more
        raise fault from error

    def _look_up_appended(self, error: sqlite3.Error | OSError, run_id: str, rows: Sequence[Row], synced: bool) -> bool:
        """True where the rows stand there all the same: from this call, or from an earlier one that could not tell."""
        fault = self._files.failed(error)
        if leaves_doubt(error) or is_refused(error):
            try:
                if self._counts(run_id, rows, synced):
                    return True
            except (sqlite3.Error, OSError, StoreError) as second:
                if is_refused(error):  # then they may be written, and the refusal says that nothing was
                    fault = second if isinstance(second, StoreError) else named(second, self.path)
        raise fault from error

    def _counts(self, run_id: str, rows: Sequence[Row], synced: bool) -> bool:
        """Whether rows that this call did not write count as written: they stand there, on stable storage if `synced`."""
        if not _stand(self._files.ready(), run_id, rows):
            return False
        if synced and not self._files.is_emptied():
            raise StoreUnavailable(_NOT_KNOWN_TO_BE_SYNCED)
        return True

    def _look_up_each(
        self, error: sqlite3.Error | OSError, appends: Sequence[Append], answers: Sequence[_Answer]
    ) -> list[_Answer]:
        """After a transaction that failed. Who was refused in it stays so; else None where the rows stand there all the same."""
        self._files.failed(error)
        are_there = [False] * len(appends)
        if leaves_doubt(error):
            with suppress(sqlite3.Error, OSError, StoreError):  # the first failure says more
                db = self._files.ready()
                are_there = [
                    self._inherited.get(run_id) != token and _stand(db, run_id, rows)
                    for run_id, token, _, rows in appends
                ]
        return [
            answer if answer is False or isinstance(answer, LedgerError) else None if is_there else self._fault(error)
            for answer, is_there in zip(answers, are_there, strict=True)
        ]

    def _settled(self, answers: list[_Answer], synced: bool) -> list[bool | LedgerError]:
        """The answers, where rows that stand there count as in `_counts`: they are looked after once for all."""
        doubt = self._why_not_synced() if synced and None in answers else None
        return [(doubt is None or _likewise(doubt)) if answer is None else answer for answer in answers]

    def _why_not_synced(self) -> StoreError | None:
        try:
            return None if self._files.is_emptied() else StoreUnavailable(_NOT_KNOWN_TO_BE_SYNCED)
        except (sqlite3.Error, OSError) as error:
            return self._files.failed(error)
        except StoreError as error:
            return error

    def _fault(self, error: sqlite3.Error | OSError) -> StoreError:
        fault = named(error, self.path)
        fault.__cause__ = error
        return fault

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def _own_name(self, owner: str) -> str:
        """An owner id from before a fork names the parent's owner; the child's is spelt with its process id."""
        return f"{owner}.{os.getpid():x}" if owner in self._inherited_owners else owner

    def _close(self, wait_seconds: float) -> None:
        self._files.close(wait_seconds, self._give_back)
        lifetime.forget(self)

    def _give_back(self) -> None:
        """Free every run of our owners. Where that fails their locks go with their files left, which proves them dead."""
        owners = self._owners.held

        def work(db: sqlite3.Connection) -> None:
            for owner in owners:
                db.execute("UPDATE runs SET owner = NULL WHERE owner = ?", (owner,))

        try:
            if owners:
                self._files.transact(NORMAL, work)
            is_given_back = True
        except (sqlite3.Error, OSError, StoreError):
            is_given_back = False
        self._owners.close(remove=is_given_back)

    def before_fork(self) -> None:
        self._files.before_fork()

    def after_fork_in_parent(self) -> None:
        self._files.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        self._files.after_fork_in_child()
        self._inherited_owners |= frozenset(self._owners.abandon())
        self._inherited |= self._held
        self._held = {}
        self._noted = set()


def _refuse(db: sqlite3.Connection, run_id: str, token: int, inbox: int) -> None:
    """Raise why the fence did not hold, unless it is the inbox that moved."""
    found = db.execute(_HEAD, (run_id,)).fetchone()
    if found is None:
        raise RunNotFound(run_id)
    if found[1] is None or found[2] != token:
        raise LeaseLost(run_id, token)
    if found[3] == inbox:
        raise StoreError(f"run {run_id!r}: an entry without kind, body or roots was refused; nothing was written.")


def _stand(db: sqlite3.Connection, run_id: str, rows: Sequence[Row]) -> bool:
    """Whether the ledger has exactly these rows already."""
    if not rows:
        return False
    found = db.execute(_STANDING, (run_id, rows[0].seq, rows[-1].seq)).fetchall()
    if len(found) != len(rows):
        return False
    for row, (*there, digest) in zip(rows, found, strict=True):
        if tuple(there) != row[:6] or digest not in (None, row.digest):  # None: the payload was erased since
            return False
    return True


def _likewise(error: StoreError) -> StoreError:
    """The same error for one more caller: an exception that several raise would gather all their tracebacks."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again


def _is_large(row: Row) -> bool:
    payload = row.payload
    return (
        payload is not None and len(payload) > LARGE_PAYLOAD_BYTES and row.digest is not None and row.encoding is None
    )
