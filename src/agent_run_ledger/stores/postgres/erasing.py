"""How bytes leave the tables of a database: erased behind an entry that says so, or deleted behind a tombstone. The rest is its server's."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from agent_run_ledger.contract import Erasure, Row, Tombstone
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError
from agent_run_ledger.stores.postgres.appending import refuse_gaps, stand
from agent_run_ledger.stores.postgres.link import SYNCED, Link

# The run stays locked until the commit, as for an append.
_FENCE = f"SELECT owner, fencing_token FROM runs WHERE run_id = %s AND {SYNCED} FOR UPDATE".encode()
_SIZE = b"SELECT coalesce(max(seq), 0) FROM entries WHERE run_id = %s"
_INSERT = b"""
INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
VALUES (%s, %s, %s, %s, %s, %b, %b, %b, %b, %b, %s)
"""

_ERASE = b"""
UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL
WHERE run_id = %s AND seq BETWEEN %s AND %s AND (payload IS NOT NULL OR digest IS NOT NULL OR fingerprint IS NOT NULL)
"""
# What stays and copied from what goes.
_REPACK = b"""
UPDATE entries SET payload = %b WHERE run_id = %s AND seq = %s AND encoding = %s AND payload IS NOT NULL AND digest IS NOT NULL
"""
# What no entry names any more; then it may go with the digest that it was found by.
_ERASE_LARGE = b"""
UPDATE payloads SET bytes = NULL WHERE run_id = %s AND bytes IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM entries e WHERE e.run_id = payloads.run_id AND e.digest = payloads.digest)
"""
_DROP_LARGE = b"DELETE FROM payloads WHERE run_id = %s AND bytes IS NULL"
_ERASE_REQUESTS = b"UPDATE inbox SET payload = '{}', who = '' WHERE run_id = %s AND id BETWEEN %s AND %s"
_ERASE_SECRET = b"UPDATE secrets SET secret = NULL WHERE run_id = %s AND secret IS NOT NULL"
_ERASE_NOTE = b"UPDATE runs SET note = NULL WHERE run_id = %s AND note IS NOT NULL"

_RESEAL = f"UPDATE secrets SET secret = %b WHERE run_id = %s AND secret = %b AND {SYNCED}".encode()
_SECRET = b"SELECT secret FROM secrets WHERE run_id = %s"

TOMBSTONE = b"SELECT run_id, size, root, who, why, at FROM tombstones WHERE run_id = %s"
_BURY = b"INSERT INTO tombstones (run_id, size, root, who, why, at) VALUES (%s, %s, %b, %s, %s, %s)"
_DELETE = (
    b"DELETE FROM entries WHERE run_id = %s",
    b"DELETE FROM payloads WHERE run_id = %s",
    b"DELETE FROM inbox WHERE run_id = %s",
    b"DELETE FROM secrets WHERE run_id = %s",
    b"DELETE FROM runs WHERE run_id = %s",
)

PENDING = (
    "the server keeps erased and deleted rows in its tables until these are rewritten: `VACUUM (FULL) entries, payloads, inbox, "
    "secrets, runs;` by their owner, which locks them meanwhile; a plain VACUUM lets new rows overwrite them in time",
    "the server's write-ahead log, its archive, standbys and backups hold them for as long as each is kept",
)
"""What still holds the bytes, and what takes them out."""


def erase(run_id: str, token: int, rows: Sequence[Row], erasure: Erasure, link: Link) -> None:
    """See `Store.erase`. May be done twice."""
    with link.transaction():
        _require(link, run_id, token)
        if not stand(link, run_id, rows):
            ((size,),) = link.execute(_SIZE, (run_id,)).fetchall()
            refuse_gaps(rows, size + 1)
            for row in rows:
                link.execute(_INSERT, (run_id, *row))
        for first, last in erasure.entries:
            link.execute(_ERASE, (run_id, first, last))
        for row in erasure.packed:
            link.execute(_REPACK, (row.payload, run_id, row.seq, row.encoding))
        link.execute(_ERASE_LARGE, (run_id,))
        link.execute(_DROP_LARGE, (run_id,))
        for first, last in erasure.requests:
            link.execute(_ERASE_REQUESTS, (run_id, first, last))
        if erasure.secret:
            link.execute(_ERASE_SECRET, (run_id,))
        link.execute(_ERASE_NOTE, (run_id,))


def delete(tombstone: Tombstone, token: int, link: Link) -> None:
    """See `Store.delete`. May be done twice: the second time the tombstone stands."""
    run_id = tombstone.run_id
    with link.transaction():
        if tombstone == standing(link, run_id):
            return
        _require(link, run_id, token)
        if link.execute(_SIZE, (run_id,)).fetchone() != (tombstone.size,):
            raise StoreError(f"run {run_id!r} has grown, so it was not deleted; nothing was written. Call again.")
        link.execute(_BURY, tombstone)
        for statement in _DELETE:
            link.execute(statement, (run_id,))


def reseal(run_id: str, sealed: bytes, anew: bytes, link: Link) -> bool:
    """See `Store.reseal`. May be done twice."""
    with link.transaction():
        if link.execute(_RESEAL, (anew, run_id, sealed, "on")).rowcount == 1:
            return True
        return link.execute(_SECRET, (run_id,)).fetchone() == (anew,)


def standing(link: Link, run_id: str) -> Tombstone | None:
    """The tombstone of a run, if it has one."""
    found = link.execute(TOMBSTONE, (run_id,), binary=True).fetchone()
    return None if found is None else Tombstone._make(found)


def refusal(place: str, error: psycopg.errors.InsufficientPrivilege) -> StoreError:
    """What a role is told that may use the ledger and not rewrite it."""
    return StoreError(
        f"this role may add to the ledger on {place} and take nothing away ({' '.join(str(error).split())}); nothing was erased. Erase with "
        "the role that owns the tables, as `migrate` does."
    )


def _require(link: Link, run_id: str, token: int) -> None:
    """Raises `RunNotFound` and `LeaseLost`, in the transaction that would write."""
    found = link.execute(_FENCE, (run_id, "on")).fetchone()
    if found is None:
        raise RunNotFound(run_id)
    if found[0] is None or found[1] != token:
        raise LeaseLost(run_id, token)
