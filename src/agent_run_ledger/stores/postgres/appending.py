"""Appending: one statement that is fenced, for one row or for the rows of many runs, and what it answers when it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from agent_run_ledger.contract import Append, Row
from agent_run_ledger.errors import LeaseLost, LedgerError, RunNotFound, StoreError
from agent_run_ledger.stores.postgres.link import SYNCED, Link, level

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A plain payload above this stands in `payloads`, once per run and digest."""

# Fenced: the run is found only while it has an owner, its token is ours and its inbox has not moved. Its row stays locked until the
# commit, so a claim waits for an append that is under way, and an append for a claim, and then looks at the row anew: without that an
# old token could be written after the new owner has read the run. Two of one seq are refused by the key, gaps by the last condition.
# Where the entry before was written under this very token, and by this very session, it is the last one: nobody else has written since.
_FENCED = f"""
INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
SELECT run_id, %s::bigint, %s, %s, %s::bigint, %b, %b, %b, %b, %b, %s FROM runs
WHERE run_id = %s AND fencing_token = %s AND inbox = %s AND owner IS NOT NULL AND {SYNCED} []
FOR NO KEY UPDATE
"""
_APPEND = _FENCED.replace("[]", "AND (SELECT coalesce(max(seq), 0) FROM entries WHERE run_id = %s) = %s").encode()
_APPEND_NEXT = _FENCED.replace("[]", "").encode()

# The same for many runs, and for several rows of one; each is found by its key and locked, in the order in which they are given. It
# answers which of them were written.
_APPEND_ALL = f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%b::text[], %b::bigint[], %b::bigint[], %b::bigint[]) AS a (run_id, token, inbox, last)
), held AS MATERIALIZED (
    SELECT h.* FROM asked a CROSS JOIN LATERAL (
        SELECT r.run_id, r.note FROM runs r
        WHERE r.run_id = a.run_id AND r.fencing_token = a.token AND r.inbox = a.inbox AND r.owner IS NOT NULL
            AND (a.last IS NULL OR a.last = (SELECT coalesce(max(e.seq), 0) FROM entries e WHERE e.run_id = r.run_id))
        FOR NO KEY UPDATE
    ) h
), cleared AS (
    UPDATE runs SET note = NULL WHERE run_id IN (SELECT run_id FROM held WHERE note IS NOT NULL)
), kept AS (
    INSERT INTO payloads (run_id, digest, bytes)
    SELECT p.run_id, p.digest, p.bytes FROM unnest(%b::text[], %b::bytea[], %b::bytea[]) AS p (run_id, digest, bytes)
    JOIN held ON held.run_id = p.run_id
    ON CONFLICT (run_id, digest) DO UPDATE SET bytes = excluded.bytes WHERE payloads.bytes IS NULL
), written AS (
    INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    SELECT n.* FROM unnest(
        %b::text[], %b::bigint[], %b::text[], %b::text[], %b::bigint[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[],
        %b::bytea[], %b::text[]
    ) AS n (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    JOIN held ON held.run_id = n.run_id
)
SELECT run_id FROM held WHERE {SYNCED}
""".encode()

_STANDING = b"""
SELECT seq, kind, position, attempt, body, roots, digest FROM entries
WHERE run_id = %s AND seq BETWEEN %s AND %s ORDER BY seq
"""

# Waits for what is under way for this run; its commit brings to the disk whatever was committed before it.
_FENCE = f"SELECT owner, fencing_token, inbox FROM runs WHERE run_id = %s AND {SYNCED} FOR NO KEY UPDATE".encode()


def append_row(append: Append, link: Link, *, synced: bool) -> bool:
    """Append one row that is not large, of a run without a note. Answers and raises as `Store.append`; may be done twice."""
    run_id, token, inbox, (row,) = append
    values = (*row, run_id, token, inbox, level(synced))
    try:
        if (link.is_next(run_id, token, row.seq) and link.written(_APPEND_NEXT, values) == 1) or link.execute(
            _APPEND, (*values, run_id, row.seq - 1)
        ).rowcount == 1:
            link.note(run_id, token, row.seq)
            return True
    except psycopg.IntegrityError:
        pass  # it stands there already, or something else does
    return _refused(append, link, synced)


def append_together(appends: Sequence[Append], link: Link, *, synced: bool) -> list[bool | LedgerError]:
    """One append of each of many runs, in one transaction. Where that is refused as a whole each goes alone. May be done twice."""
    fit = sorted((append for append in appends if _is_in_order(append.rows)), key=_run_id)  # all lock in this order
    written: set[str] = set()
    try:
        if fit:
            written = {run_id for (run_id,) in link.execute(_APPEND_ALL, (*_arrays(fit), level(synced)))}
    except psycopg.IntegrityError:
        if len(appends) > 1:
            return [append_together([append], link, synced=synced)[0] for append in appends]
    return [append.run_id in written or _answer(append, link, synced) for append in appends]


def _answer(append: Append, link: Link, synced: bool) -> bool | LedgerError:
    try:
        return _refused(append, link, synced)
    except LedgerError as error:
        return error


def _refused(append: Append, link: Link, synced: bool) -> bool:
    """What an append answers that wrote nothing. True where its rows stand there all the same, by an earlier call."""
    run_id, token, inbox, rows = append
    fence = (run_id, level(synced))
    found = link.execute(_FENCE, fence).fetchone()
    if found is None:
        raise RunNotFound(run_id)
    if found[0] is None or found[1] != token:
        raise LeaseLost(run_id, token)
    if stand(link, run_id, rows):
        link.execute(_FENCE, fence)  # whoever wrote them need not have waited for the disk
        return True
    if found[2] != inbox:
        return False
    raise StoreError(
        f"run {run_id!r}: an entry must have a kind, a body and roots, and the seq that follows its run's last one; nothing was written."
    )


def stand(link: Link, run_id: str, rows: Sequence[Row]) -> bool:
    """Whether the ledger has exactly these rows already."""
    if not rows:
        return False
    found = link.execute(_STANDING, (run_id, rows[0].seq, rows[-1].seq), binary=True).fetchall()
    if len(found) != len(rows):
        return False
    for row, (*there, digest) in zip(rows, found, strict=True):
        if tuple(there) != row[:6] or digest not in (None, row.digest):  # None: the payload was erased since
            return False
    return True


def _arrays(appends: Sequence[Append]) -> tuple[list[Any], ...]:
    """The arguments of `_APPEND_ALL` that say what is to be written."""
    rows: list[Row] = []
    ids: list[str] = []
    for run_id, _, _, new in appends:
        rows += new
        ids += [run_id] * len(new)
    large = large_payloads(ids, rows)
    return (
        [append.run_id for append in appends],
        [append.token for append in appends],
        [append.inbox for append in appends],
        [append.rows[0].seq - 1 if append.rows else None for append in appends],
        [run_id for run_id, _ in large],
        [digest for _, digest in large],
        list(large.values()),
        ids,
        *columns(rows),
    )


def large_payloads(ids: Sequence[str], rows: Sequence[Row]) -> dict[tuple[str, bytes | None], bytes | None]:
    """What stands in `payloads` of these rows of these runs, by run and digest."""
    return {(run_id, row.digest): row.payload for run_id, row in zip(ids, rows, strict=True) if is_large(row)}


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """The rows as they stand in `entries`, one list for each of their columns."""
    if not rows:
        return [[] for _ in Row._fields]
    kept = [row._replace(payload=None) if is_large(row) else row for row in rows]
    return list(map(list, zip(*kept, strict=True)))


def is_large(row: Row) -> bool:
    """Whether the row's payload stands in `payloads`."""
    payload = row.payload
    return (
        payload is not None and len(payload) > LARGE_PAYLOAD_BYTES and row.digest is not None and row.encoding is None
    )


def _run_id(append: Append) -> str:
    return append.run_id


def _is_in_order(rows: Sequence[Row]) -> bool:
    return all(row.seq == rows[0].seq + number for number, row in enumerate(rows))


def refuse_gaps(rows: Sequence[Row], first: int = 1) -> None:
    """Raises `StoreError` unless these are a run's rows from `first` on."""
    if not _is_in_order(rows) or (rows and rows[0].seq != first):
        raise StoreError("an entry must have the seq that follows its run's last one; nothing was written.")
