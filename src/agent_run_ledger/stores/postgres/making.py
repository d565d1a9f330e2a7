"""Making runs: with an owner, for a queue, or as they stood in another store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from agent_run_ledger.contract import Listing, Request, Row
from agent_run_ledger.stores.postgres.appending import columns, large_payloads, refuse_gaps
from agent_run_ledger.stores.postgres.link import SYNCED, Link, timed

# A run of that id that exists, or a tombstone of one, leaves everything as it is. In a new epoch tokens begin above all of the old ones.
_HEAD = f"""
INSERT INTO runs (run_id, owner, lease_until, lease_seconds, lease_call, fencing_token, inbox, created_at, agent, queue, priority, key, due)
SELECT %s, %s, {{now}} + %s::float8, %s::float8, %s, greatest(%s, value * 1048576 + %s), %s, %s, %s, %s::text, %s, %s,
    CASE WHEN %s::text IS NOT NULL THEN {{now}} + %s::float8 END
FROM meta WHERE meta.key = 'epoch' AND {SYNCED} AND NOT EXISTS (SELECT 1 FROM tombstones t WHERE t.run_id = %s)
ON CONFLICT (run_id) DO NOTHING
RETURNING run_id, fencing_token
"""
_SALTED = "INSERT INTO secrets (run_id, secret) SELECT run_id, %b FROM made"
_ROWS = """
    INSERT INTO payloads (run_id, digest, bytes)
    SELECT run_id, p.digest, p.bytes FROM made, unnest(%b::bytea[], %b::bytea[]) AS p (digest, bytes)
    ON CONFLICT (run_id, digest) DO UPDATE SET bytes = excluded.bytes WHERE payloads.bytes IS NULL
), written AS (
    INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    SELECT run_id, n.* FROM made, unnest(
        %b::bigint[], %b::text[], %b::text[], %b::bigint[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[], %b::text[]
    ) AS n (seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
"""
_MAKE = f"WITH made AS ({_HEAD}), salted AS ({_SALTED}), kept AS ({_ROWS}) SELECT fencing_token FROM made"
_ADOPT = f"WITH made AS ({_HEAD}), salted AS ({_SALTED}) SELECT fencing_token, 0 FROM made"
_MORE = f"WITH made AS (SELECT %s::text AS run_id), kept AS ({_ROWS}) SELECT 1".encode()

_ASKED = b"""
INSERT INTO inbox (run_id, id, kind, payload, who, at)
SELECT %s, q.* FROM unnest(%b::bigint[], %b::text[], %b::bytea[], %b::text[], %b::float8[]) AS q (id, kind, payload, who, at)
"""
# What is seen need not be where its commit should have brought it: to the disk, and to the standby. The commit of this lock waits for that.
_MADE = f"""
SELECT fencing_token FROM runs r JOIN secrets s ON s.run_id = r.run_id
WHERE r.run_id = %s AND s.secret = %b AND r.moved_to IS NULL AND {SYNCED}
FOR NO KEY UPDATE OF r
""".encode()

# Nobody else can have written to a run since it was moved away.
_COME_BACK = f"""
UPDATE runs SET moved_to = NULL, deaths = 0, fencing_token = greatest(fencing_token, %s), inbox = inbox + %s,
    due = CASE WHEN queue IS NOT NULL THEN {{now}} + %s::float8 END
WHERE run_id = %s AND moved_to IS NOT NULL AND {SYNCED}
RETURNING fencing_token, (SELECT coalesce(max(seq), 0) FROM entries e WHERE e.run_id = runs.run_id)
"""


class Making:
    """One call that makes a run. `make` and `take_in` give its token, None where a run of that id exists already."""

    def __init__(
        self,
        now: str,
        run_id: str,
        secret: bytes,
        listing: Listing,
        *,
        owner: str | None = None,
        mark: str | None = None,
        lease_seconds: float | None = None,
        token: int = 0,
        inbox: int = 0,
        due_in: float | None,
    ) -> None:
        self._now = now
        self._run_id = run_id
        self._secret = secret
        lease = (lease_seconds, lease_seconds, mark, token, 0 if owner is None else 1, inbox)
        self._return = (token, inbox, due_in, run_id, "on")
        self._head = (run_id, owner, *lease, *listing, listing.queue, due_in, "on", run_id, secret)

    def make(self, rows: Sequence[Row], link: Link) -> int | None:
        """One statement. Raises `StoreError` where the rows are not a run's first ones."""
        refuse_gaps(rows)
        found = link.execute(timed(_MAKE, self._now), (*self._head, *_arrays(self._run_id, rows))).fetchone()
        return None if found is None else int(found[0])

    def take_in(self, pages: Iterable[Sequence[Row]], requests: Sequence[Request], link: Link) -> int | None:
        """One transaction, a statement for each page; they are gone through once. What was moved away from here comes back."""
        with link.transaction():
            found = link.execute(timed(_COME_BACK, self._now), self._return).fetchone()
            if found is None:
                found = link.execute(timed(_ADOPT, self._now), self._head).fetchone()
            if found is None:
                return None
            token, last = found
            for page in pages:
                refuse_gaps(page, last + 1)
                last += len(page)
                link.execute(_MORE, (self._run_id, *_arrays(self._run_id, page)))
            if requests:
                link.execute(_ASKED, (self._run_id, *map(list, zip(*map(_told, requests), strict=True))))
            return int(token)

    def find(self, link: Link) -> int | None:
        """The token of the run that this very call has made, whose answer was lost: nobody else knows its secret."""
        found = link.execute(_MADE, (self._run_id, self._secret, "on")).fetchone()
        return None if found is None else int(found[0])


def new_mark() -> str:
    """What names one store, or one call of it, in the database, whatever its owners are called."""
    return os.urandom(8).hex()


def _told(request: Request) -> tuple[object, ...]:
    return request.id, request.kind, request.payload, request.who, request.at


def _arrays(run_id: str, rows: Sequence[Row]) -> tuple[list[object], ...]:
    large = large_payloads([run_id] * len(rows), rows)
    return ([digest for _, digest in large], list(large.values()), *columns(rows))
