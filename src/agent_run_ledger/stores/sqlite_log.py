"""Entries in one SQLite file: written fenced, alone or together, read as they were, and looked up after a failure."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter

from agent_run_ledger.contract import Append, Listing, Row
from agent_run_ledger.errors import LeaseLost, LedgerError, RunNotFound, StoreError, StoreUnavailable
from agent_run_ledger.stores.connections import FULL, NORMAL, PAGE_BYTES, Connections
from agent_run_ledger.stores.faults import code, is_refused, leaves_doubt, named
from agent_run_ledger.stores.holding import Holding

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A plain payload above this stands in `payloads`, once per run and digest."""

_Answer = bool | LedgerError | None
"""What becomes of one of many appends; None where that depends: its rows stand there already, and may not be synced yet."""

_NOT_KNOWN_TO_BE_SYNCED = (
    "these entries are written, but it is not known whether they are on stable storage yet: somebody still reads an older "
    "state of the database. Call again."
)

# Fenced: the run is found only while it has an owner, its token is ours and its inbox has not moved. Else the run id is
# NULL and nothing is written. As VALUES it is an eighth cheaper than as SELECT, which a trigger sends through a temporary
# table.
APPEND = """
INSERT OR IGNORE INTO entries
    (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
VALUES (
    (SELECT run_id FROM runs WHERE run_id = ? AND fencing_token = ? AND inbox = ? AND owner IS NOT NULL),
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
)
"""

# What was read in the same transaction is the fence.
_INSERT = """
INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_FENCE = "SELECT owner, fencing_token, inbox, note FROM runs WHERE run_id = ?"

# A run of that id that exists, or a tombstone of one, leaves everything as it is.
_MAKE = """
INSERT INTO runs (run_id, fencing_token, owner, lease_until, lease_seconds, lease_boot,
    created_at, agent, queue, priority, key, due, inbox)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13
WHERE NOT EXISTS (SELECT 1 FROM runs WHERE run_id = ?1) AND NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = ?1)
RETURNING 1
"""

# Nobody else can have written to it since it was moved away.
_COME_BACK = """
UPDATE runs SET moved_to = NULL, deaths = 0, fencing_token = max(fencing_token, ?2), inbox = inbox + ?3,
    due = CASE WHEN queue IS NOT NULL THEN ?4 END
WHERE run_id = ?1 AND moved_to IS NOT NULL
RETURNING 1
"""

# The same bytes may come again after they were erased.
_KEEP_PAYLOAD = """
INSERT INTO payloads (run_id, digest, bytes) VALUES (?, ?, ?)
ON CONFLICT (run_id, digest) DO UPDATE SET bytes = excluded.bytes WHERE bytes IS NULL
"""

ROW = """{0}.seq, {0}.kind, {0}.position, {0}.attempt, {0}.body, {0}.roots,
    CASE WHEN {0}.payload IS NULL AND {0}.digest IS NOT NULL
        THEN (SELECT bytes FROM payloads p WHERE p.run_id = {0}.run_id AND p.digest = {0}.digest)
        ELSE {0}.payload END,
    {0}.digest, {0}.fingerprint, {0}.encoding"""
"""What makes a `Row` of an entry, with the name of its table to be put in."""

_READ = f"SELECT {ROW.format('e')} FROM entries e WHERE e.run_id = ? AND e.seq > ? ORDER BY e.seq LIMIT ?"

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

_STANDING = """
SELECT seq, kind, position, attempt, body, roots, digest FROM entries
WHERE run_id = ? AND seq BETWEEN ? AND ? ORDER BY seq
"""


class Log:
    """The entries of all runs of one store. What it promises is what `Store` promises of the same verbs."""

    def __init__(self, files: Connections, holding: Holding) -> None:
        self._files = files
        self._holding = holding
        self.noted: set[str] = set()
        """Runs whose head may have a note, which goes with the next entry; the plain append has no time to look."""

    def make(
        self,
        db: sqlite3.Connection,
        run_id: str,
        token: int,
        secret: bytes,
        listing: Listing,
        pages: Iterable[Sequence[Row]],
        *,
        due: float | None,
        held: Sequence[object] = (None, None, None, None),
        inbox: int = 0,
    ) -> bool:
        """Make a run with its entries in this transaction; False where there is one of that id.

        `held` is who owns it, until when, for how long, and in which boot.
        """
        due = due if listing.queue is not None else None
        if db.execute(_MAKE, (run_id, token, *held, *listing, due, inbox)).fetchone() is None:
            return False
        db.execute("INSERT INTO secrets (run_id, secret) VALUES (?, ?)", (run_id, secret))
        for rows in pages:
            self.insert(db, run_id, rows)
        return True

    def bring_back(
        self,
        db: sqlite3.Connection,
        run_id: str,
        token: int,
        pages: Iterable[Sequence[Row]],
        *,
        due: float | None,
        inbox: int,
    ) -> bool:
        """Add to a run that was moved away what has become of it, in this transaction; False where there is no such run."""
        if db.execute(_COME_BACK, (run_id, token, inbox, due)).fetchone() is None:
            return False
        for rows in pages:
            self.insert(db, run_id, rows)
        return True

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        if self._holding.is_inherited(run_id, token):
            raise LeaseLost(run_id, token)
        files, level = self._files, FULL if synced else NORMAL
        files.refuse_reentry()
        with files.mutex:
            try:
                if len(rows) == 1 and run_id not in self.noted and not _is_large(row := rows[0]):
                    is_written = files.run_alone(level, APPEND, (run_id, token, inbox, *row), row.payload)
                else:
                    is_written = files.transact(level, partial(self._append_rows, run_id, token, inbox, rows))
                    if is_written:
                        self.noted.discard(run_id)
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
            if self.noted:
                self.noted -= {append.run_id for append, answer in zip(appends, answers, strict=True) if answer is True}
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

    def roots(self, run_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
        places = ", ".join("?" * len(seqs))
        statement = f"SELECT seq, roots FROM entries WHERE run_id = ? AND seq IN ({places})"
        return dict(self._files.ask(statement, run_id, *seqs))

    def sync(self, run_id: str) -> None:
        self._files.sync_log()

    def _append_each(self, appends: Sequence[Append], answers: list[_Answer], db: sqlite3.Connection) -> None:
        self._files.log_pages += len(appends)  # each has a leaf of the index to itself
        if self._append_plain(db, appends):
            answers[:] = [True] * len(appends)
            return
        for number, append in enumerate(appends):
            answers[number] = self._append_one(db, *append)

    def _append_plain(self, db: sqlite3.Connection, appends: Sequence[Append]) -> bool:
        """Write all of them, each one row of a run that is ours, as nearly always; False: nothing is written, look at them one by one."""
        rows = [append.rows[0] for append in appends if len(append.rows) == 1 and not _is_large(append.rows[0])]
        if len(rows) < len(appends) or self.noted or self._holding.inherited:
            return False
        db.execute("SAVEPOINT plain")
        is_written = False
        try:
            written = db.executemany(
                APPEND, [(run_id, token, inbox, *rows[0]) for run_id, token, inbox, rows in appends]
            )
            is_written = written.rowcount == len(rows)
        except sqlite3.Error:
            if not db.in_transaction:
                raise
        finally:
            if db.in_transaction:
                if not is_written:
                    db.execute("ROLLBACK TO plain")
                db.execute("RELEASE plain")
        if is_written:
            self._files.log_pages += sum([len(row.payload) // PAGE_BYTES for row in rows if row.payload is not None])
        return is_written

    def _append_one(self, db: sqlite3.Connection, run_id: str, token: int, inbox: int, rows: Sequence[Row]) -> _Answer:
        """One of many appends, whole or not at all. Raises only what leaves no transaction to go on with."""
        if self._holding.is_inherited(run_id, token):
            return LeaseLost(run_id, token)
        try:
            if len(rows) == 1 and run_id not in self.noted and not _is_large(rows[0]):
                row = rows[0]
                self._files.log_pages += len(row.payload or b"") // PAGE_BYTES
                is_written = db.execute(APPEND, (run_id, token, inbox, *row)).rowcount == 1
            else:
                is_written = self._append_whole(run_id, token, inbox, rows, db)
            if is_written:
                return True
            _refuse(db, run_id, token, inbox)
            return None if stand(db, run_id, rows) else False
        except LedgerError as error:
            return error
        except sqlite3.Error as error:
            # What says that nothing was written undid this one's statement only; so did what Python refused to bind, which
            # has no code. After all else SQLite wants a rollback, or has done it.
            is_alone = not leaves_doubt(error) or code(error) == 0
            if not is_alone or not db.in_transaction:
                raise
            return None if is_refused(error) and stand(db, run_id, rows) else self._fault(error)

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
        owner, *fence, note = db.execute(_FENCE, (run_id,)).fetchone() or (None, None, None, None)
        if owner is None or fence != [token, inbox]:
            return False
        self.insert(db, run_id, rows)
        if note is not None:
            db.execute("UPDATE runs SET note = NULL WHERE run_id = ?", (run_id,))
        return True

    def insert(self, db: sqlite3.Connection, run_id: str, rows: Sequence[Row]) -> None:
        """Write these rows in this transaction, whose caller has looked at the fence."""
        for row in rows:
            self._files.log_pages += len(row.payload or b"") // PAGE_BYTES
            if _is_large(row):
                db.execute(_KEEP_PAYLOAD, (run_id, row.digest, row.payload))
                row = row._replace(payload=None)
            db.execute(_INSERT, (run_id, *row))

    # --- when a write is refused, or fails ----------------------------------------------------------------------------

    def _look_up_appended(self, error: sqlite3.Error | OSError, run_id: str, rows: Sequence[Row], synced: bool) -> bool:
        """True where the rows stand there all the same: from this call, or from an earlier one that could not tell."""
        fault = self._files.failed(error)
        if leaves_doubt(error) or is_refused(error):
            try:
                if self._counts(run_id, rows, synced):
                    return True
            except (sqlite3.Error, OSError, StoreError) as second:
                if is_refused(error):  # then they may be written, and the refusal says that nothing was
                    fault = second if isinstance(second, StoreError) else named(second, self._files.path)
        raise fault from error

    def _counts(self, run_id: str, rows: Sequence[Row], synced: bool) -> bool:
        """Whether rows that this call did not write count as written: they stand there, on stable storage if `synced`."""
        if not stand(self._files.ready(), run_id, rows):
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
                    not self._holding.is_inherited(run_id, token) and stand(db, run_id, rows)
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
        fault = named(error, self._files.path)
        fault.__cause__ = error
        return fault


@contextmanager
def kept_aside(pages: Iterable[Sequence[Row]]) -> Iterator[Iterable[Sequence[Row]]]:
    """The same rows in the same pages, all of them read and kept in a temporary file, however many they are."""
    with closing(sqlite3.connect("")) as file:
        file.execute(f"CREATE TABLE aside (page, {', '.join(Row._fields)})")
        for page, rows in enumerate(pages):
            marks = ", ".join("?" * len(Row._fields))
            file.executemany(f"INSERT INTO aside VALUES ({page}, {marks})", rows)
        found = file.execute("SELECT * FROM aside ORDER BY rowid")
        yield ([Row._make(row[1:]) for row in kept] for _, kept in groupby(found, itemgetter(0)))


def _refuse(db: sqlite3.Connection, run_id: str, token: int, inbox: int) -> None:
    """Raise why the fence did not hold, unless it is the inbox that moved."""
    found = db.execute(_FENCE, (run_id,)).fetchone()
    if found is None:
        raise RunNotFound(run_id)
    if found[0] is None or found[1] != token:
        raise LeaseLost(run_id, token)
    if found[2] == inbox:
        raise StoreError(f"run {run_id!r}: an entry without kind, body or roots was refused; nothing was written.")


def stand(db: sqlite3.Connection, run_id: str, rows: Sequence[Row]) -> bool:
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
