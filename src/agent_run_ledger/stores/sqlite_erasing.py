"""How bytes leave an SQLite file: erased behind an entry that says so, deleted behind a tombstone, and gone from its free pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_run_ledger.contract import SECRET_BYTES, Erasure, Row, Tombstone
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError
from agent_run_ledger.stores.connections import FULL, Connections
from agent_run_ledger.stores.sqlite_log import Log, stand

if TYPE_CHECKING:
    from agent_run_ledger.stores.holding import Holding

_FENCE = "SELECT owner, fencing_token FROM runs WHERE run_id = ?"

_ERASE = """
UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL
WHERE run_id = ? AND seq BETWEEN ? AND ? AND (payload IS NOT NULL OR digest IS NOT NULL OR fingerprint IS NOT NULL)
"""
# What stays and copied from what goes.
_REPACK = """
UPDATE entries SET payload = ? WHERE run_id = ? AND seq = ? AND encoding = ? AND payload IS NOT NULL AND digest IS NOT NULL
"""
# What no entry names any more; then it may go with the digest that it was found by.
_ERASE_LARGE = """
UPDATE payloads SET bytes = NULL WHERE run_id = ?1 AND bytes IS NOT NULL
    AND digest NOT IN (SELECT digest FROM entries WHERE run_id = ?1 AND digest IS NOT NULL)
"""
_DROP_LARGE = "DELETE FROM payloads WHERE run_id = ? AND bytes IS NULL"
_ERASE_REQUESTS = "UPDATE inbox SET payload = CAST('{}' AS BLOB), who = '' WHERE run_id = ? AND id BETWEEN ? AND ?"
_ERASE_SECRET = "UPDATE secrets SET secret = NULL WHERE run_id = ? AND secret IS NOT NULL"
_ERASE_NOTE = "UPDATE runs SET note = NULL WHERE run_id = ? AND note IS NOT NULL"

_RESEAL = "UPDATE secrets SET secret = ? WHERE run_id = ? AND secret = ?"
_SIZE = "SELECT coalesce(max(seq), 0) FROM entries WHERE run_id = ?"
_TOMBSTONE = "SELECT run_id, size, root, who, why, at FROM tombstones WHERE run_id = ?"
_BURY = "INSERT INTO tombstones (run_id, size, root, who, why, at) VALUES (?, ?, ?, ?, ?, ?)"
_DELETE = ("entries", "payloads", "inbox", "secrets", "runs")

_OLDER_STATE = (
    "somebody still reads an older state of the database, so its log {0}-wal and its pages cannot be cut: end long reads and open "
    "transactions, then scrub again"
)
_COPY = (
    "{0} was left beside the ledger by a migration, a restore or a backup that was killed, and holds what stood there then: delete it when "
    "nobody needs it"
)


class Erasing:
    """What one store erases and deletes. What it promises is what `Store` promises of the same verbs."""

    def __init__(self, files: Connections, log: Log, holding: Holding) -> None:
        self._files = files
        self._log = log
        self._holding = holding

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        def work(db: sqlite3.Connection) -> None:
            self._require(db, run_id, token)
            if not stand(db, run_id, rows):
                self._log.insert(db, run_id, rows)
            for first, last in erasure.entries:
                db.execute(_ERASE, (run_id, first, last))
            for row in erasure.packed:
                db.execute(_REPACK, (row.payload, run_id, row.seq, row.encoding))
            db.execute(_ERASE_LARGE, (run_id,))
            db.execute(_DROP_LARGE, (run_id,))
            for first, last in erasure.requests:
                db.execute(_ERASE_REQUESTS, (run_id, first, last))
            if erasure.secret:
                db.execute(_ERASE_SECRET, (run_id,))
            db.execute(_ERASE_NOTE, (run_id,))

        self._files.write(FULL, work)

    def delete(self, tombstone: Tombstone, token: int) -> None:
        run_id = tombstone.run_id

        def work(db: sqlite3.Connection) -> None:
            self._require(db, run_id, token)
            if db.execute(_SIZE, (run_id,)).fetchone() != (tombstone.size,):
                raise StoreError(f"run {run_id!r} has grown, so it was not deleted; nothing was written. Call again.")
            db.execute(_BURY, tombstone)
            for table in _DELETE:
                db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))

        self._files.write(FULL, work)
        self._holding.lose(run_id, token)

    def reseal(self, run_id: str, sealed: bytes, anew: bytes) -> bool:
        if min(len(sealed), len(anew)) <= SECRET_BYTES:
            return False

        def work(db: sqlite3.Connection) -> bool:
            return db.execute(_RESEAL, (anew, run_id, sealed)).rowcount == 1

        return self._files.write(FULL, work)

    def tombstone(self, run_id: str) -> Tombstone | None:
        found = self._files.ask(_TOMBSTONE, run_id)
        return Tombstone._make(found[0]) if found else None

    def scrub(self) -> list[str]:
        try:
            pending = [] if self._files.scrub() else [_OLDER_STATE.format(self._files.path)]
        except StoreError as error:
            pending = [f"the database could not be rewritten, so free pages and its log may hold erased bytes: {error}"]
        kinds = (".v*.backup", ".replaced-*", ".*.unfinished")
        from glob import escape, glob

        copies = sorted(each for kind in kinds for each in glob(escape(self._files.path) + kind))
        return pending + [_COPY.format(copy) for copy in copies]

    def _require(self, db: sqlite3.Connection, run_id: str, token: int) -> None:
        """Raises `RunNotFound` and `LeaseLost`, in the transaction that would write."""
        found = db.execute(_FENCE, (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        if found[0] is None or found[1] != token or self._holding.is_inherited(run_id, token):
            raise LeaseLost(run_id, token)
