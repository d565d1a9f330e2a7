"""The store that many machines share: one PostgreSQL database, one round trip a commit, leases by the database's clock."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import psycopg

from agent_run_ledger.contract import Append, Head, Lease, Listing, Request, Row, Summary
from agent_run_ledger.errors import LeaseLost, LedgerError, RunNotFound, RunOwned, StoreError, StoreReadOnly
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.postgres.connections import Connections, Link
from agent_run_ledger.stores.postgres.faults import named
from agent_run_ledger.stores.postgres.schema import findings, refuse_unusable

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A plain payload above this stands in `payloads`, once per run and digest."""

_SUMMARIES_PER_PAGE = 200
_DATABASE_CLOCK = "extract(epoch FROM clock_timestamp())::double precision"

# Each transaction says for itself whether it is synced: nothing is left in a session. It must stand where a row is looked at.
_SYNCED = "set_config('synchronous_commit', %s, true) IS NOT NULL"

# Fenced: the run is found only while it has an owner, its token is ours and its inbox has not moved. Its row stays locked until the
# commit, so a claim waits for an append that is under way, and an append for a claim, and then looks at the row anew: without that an
# old token could be written after the new owner has read the run. Two of one seq are refused by the key, gaps by the last condition.
_APPEND = f"""
INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
SELECT run_id, %s::bigint, %s, %s, %s::bigint, %b, %b, %b, %b, %b, %s FROM runs
WHERE run_id = %s AND fencing_token = %s AND inbox = %s AND owner IS NOT NULL AND {_SYNCED}
    AND (SELECT coalesce(max(seq), 0) FROM entries WHERE run_id = %s) = %s
FOR NO KEY UPDATE
""".encode()

# The same for many runs, and for several rows of one; locked in the order of their ids. It answers which of them were written.
_APPEND_ALL = f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[]) AS a (run_id, token, inbox, last)
), held AS MATERIALIZED (
    SELECT r.run_id, r.note FROM asked a JOIN runs r ON r.run_id = a.run_id
    WHERE r.fencing_token = a.token AND r.inbox = a.inbox AND r.owner IS NOT NULL
        AND (a.last IS NULL OR a.last = (SELECT coalesce(max(e.seq), 0) FROM entries e WHERE e.run_id = r.run_id))
    ORDER BY r.run_id
    FOR NO KEY UPDATE OF r
), cleared AS (
    UPDATE runs SET note = NULL WHERE run_id IN (SELECT run_id FROM held WHERE note IS NOT NULL)
), kept AS (
    INSERT INTO payloads (run_id, digest, bytes)
    SELECT p.run_id, p.digest, p.bytes FROM unnest(%s::text[], %s::bytea[], %s::bytea[]) AS p (run_id, digest, bytes)
    JOIN held ON held.run_id = p.run_id
    ON CONFLICT (run_id, digest) DO UPDATE SET bytes = excluded.bytes WHERE payloads.bytes IS NULL
), written AS (
    INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    SELECT n.* FROM unnest(
        %s::text[], %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::bytea[], %s::bytea[], %s::bytea[], %s::bytea[],
        %s::bytea[], %s::text[]
    ) AS n (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    JOIN held ON held.run_id = n.run_id
)
SELECT run_id FROM held WHERE {_SYNCED}
""".encode()

# A run of that id that exists, or a tombstone of one, leaves everything as it is.
_CREATE = f"""
WITH made AS (
    INSERT INTO runs (run_id, owner, lease_until, lease_seconds, lease_call, fencing_token, created_at, agent, queue, priority, key, due)
    SELECT %s, %s::text, {{now}} + %s::float8, %s::float8, %s, value * 1048576 + 1, %s, %s::text, %s::text, %s, %s::text,
        CASE WHEN %s::text IS NULL THEN NULL ELSE {{now}} END
    FROM meta WHERE meta.key = 'epoch' AND {_SYNCED} AND NOT EXISTS (SELECT 1 FROM tombstones WHERE run_id = %s)
    ON CONFLICT (run_id) DO NOTHING
    RETURNING run_id, fencing_token
), salted AS (
    INSERT INTO secrets (run_id, secret) SELECT run_id, %b FROM made
), kept AS (
    INSERT INTO payloads (run_id, digest, bytes)
    SELECT run_id, p.digest, p.bytes FROM made, unnest(%s::bytea[], %s::bytea[]) AS p (digest, bytes)
), written AS (
    INSERT INTO entries (run_id, seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
    SELECT run_id, n.* FROM made, unnest(
        %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::bytea[], %s::bytea[], %s::bytea[], %s::bytea[], %s::bytea[], %s::text[]
    ) AS n (seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding)
)
SELECT fencing_token FROM made
"""
_MADE = b"""
SELECT fencing_token FROM runs r JOIN secrets s ON s.run_id = r.run_id
WHERE r.run_id = %s AND s.secret = %b
"""

# Ours already where a call of this very store took it: then it is renewed, under the token that it has. So a claim whose answer was
# lost is simply made again. A new epoch begins above every token of the old ones.
_CLAIM = f"""
UPDATE runs SET
    owner = %s, lease_until = {{now}} + %s::float8, lease_seconds = %s, lease_call = %s,
    note = CASE WHEN owner = %s AND starts_with(lease_call, %s) THEN note END,
    fencing_token = CASE WHEN owner = %s AND starts_with(lease_call, %s) THEN fencing_token
        ELSE greatest(fencing_token, (SELECT value FROM meta WHERE meta.key = 'epoch') * 1048576) + 1 END
WHERE run_id = %s AND (owner IS NULL OR lease_until <= {{now}} OR (owner = %s AND starts_with(lease_call, %s))) AND {_SYNCED}
RETURNING fencing_token, (SELECT secret FROM secrets s WHERE s.run_id = runs.run_id)
"""

_RENEW = f"""
UPDATE runs SET lease_until = {{now}} + %s::float8, lease_seconds = %s
WHERE run_id = %s AND fencing_token = %s AND owner IS NOT NULL AND {_SYNCED}
RETURNING inbox
"""

_RELEASE = f"""
UPDATE runs SET owner = NULL, due = CASE
    WHEN queue IS NULL THEN NULL
    WHEN inbox > %s THEN {{now}}
    ELSE {{now}} + %s::float8 END
WHERE run_id = %s AND fencing_token = %s AND owner IS NOT NULL AND {_SYNCED}
"""

_GIVE_BACK = f"""
UPDATE runs SET owner = NULL FROM unnest(%s::text[], %s::bigint[]) AS h (id, token)
WHERE run_id = h.id AND fencing_token = h.token AND owner IS NOT NULL AND {_SYNCED}
""".encode()

_ANNOTATE = f"UPDATE runs SET note = %s WHERE run_id = %s AND fencing_token = %s AND {_SYNCED}".encode()

# One writer per run: others only put requests here and move the counter, the one column that needs no token.
_POST = f"""
WITH counted AS (
    UPDATE runs SET inbox = inbox + 1, due = CASE
        WHEN queue IS NOT NULL AND (due IS NULL OR due > {{now}} + %s::float8) THEN {{now}} + %s::float8 ELSE due END
    WHERE run_id = %s AND {_SYNCED}
    RETURNING run_id, inbox, queue
), kept AS (
    INSERT INTO inbox (run_id, id, kind, payload, who, at, nonce) SELECT run_id, inbox, %s, %b, %s, %s, %s FROM counted
)
SELECT inbox, queue IS NOT NULL FROM counted
"""
_POSTED = b"SELECT id, true FROM inbox WHERE run_id = %s AND nonce = %s"

_LISTING = "{0}.created_at, {0}.agent, {0}.queue, {0}.priority, {0}.key"
_HEAD_OF = f"""{{0}}.run_id, {{0}}.owner, {{0}}.fencing_token, {{0}}.inbox, {{0}}.note, {_LISTING},
    CASE WHEN {{0}}.owner IS NOT NULL THEN greatest(0, {{{{now}}}} - ({{0}}.lease_until - {{0}}.lease_seconds)) END,
    CASE WHEN {{0}}.owner IS NOT NULL THEN {{0}}.lease_until - {{{{now}}}} END,
    {{0}}.due - {{{{now}}}}"""
_HEAD_COLUMNS = 13

_HEAD = f"SELECT {_HEAD_OF.format('r')} FROM runs r WHERE run_id = %s"
_SECRET = b"SELECT secret FROM secrets WHERE run_id = %s"
_EPOCH = b"SELECT value FROM meta WHERE key = 'epoch'"

_ROW_OF = """{0}.seq, {0}.kind, {0}.position, {0}.attempt, {0}.body, {0}.roots,
    CASE WHEN {0}.payload IS NULL AND {0}.digest IS NOT NULL
        THEN (SELECT bytes FROM payloads p WHERE p.run_id = {0}.run_id AND p.digest = {0}.digest)
        ELSE {0}.payload END,
    {0}.digest, {0}.fingerprint, {0}.encoding"""
_ROW_COLUMNS = len(Row._fields)

_READ = f"SELECT {_ROW_OF.format('e')} FROM entries e WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s".encode()

# The length of what is kept apart from its row is known without reading it.
_READ_SHORT = b"""
SELECT seq, kind, position, attempt, body, roots,
    CASE WHEN digest IS NULL THEN payload
        WHEN payload IS NULL THEN (SELECT bytes FROM payloads p
            WHERE p.run_id = e.run_id AND p.digest = e.digest AND octet_length(p.bytes) <= %s)
        WHEN octet_length(payload) <= %s THEN payload END,
    digest, fingerprint, encoding
FROM entries e WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s
"""
_PAYLOAD = b"""
SELECT CASE WHEN payload IS NULL AND digest IS NOT NULL
    THEN (SELECT bytes FROM payloads p WHERE p.run_id = e.run_id AND p.digest = e.digest)
    ELSE payload END
FROM entries e WHERE run_id = %s AND seq = %s
"""

_SUMMARIES = f"""
SELECT {_HEAD_OF.format("r")}, {_ROW_OF.format("f")}, {_ROW_OF.format("l")}, r.made
FROM runs r
CROSS JOIN LATERAL (SELECT * FROM entries WHERE run_id = r.run_id ORDER BY seq LIMIT 1) f
CROSS JOIN LATERAL (SELECT * FROM entries WHERE run_id = r.run_id ORDER BY seq DESC LIMIT 1) l
WHERE [] ORDER BY r.made, r.run_id LIMIT {_SUMMARIES_PER_PAGE}
"""
_SUMMARIES_AFTER = _SUMMARIES.replace("[]", "(r.made, r.run_id) > (%s, %s)")
_SUMMARY_OF = _SUMMARIES.replace("[]", "r.run_id = %s")

_STANDING = b"""
SELECT seq, kind, position, attempt, body, roots, digest FROM entries
WHERE run_id = %s AND seq BETWEEN %s AND %s ORDER BY seq
"""

# Waits for what is under way for this run; its commit brings to the disk whatever was committed before it.
_FENCE = f"SELECT owner, fencing_token, inbox FROM runs WHERE run_id = %s AND {_SYNCED} FOR NO KEY UPDATE".encode()


class PostgresStore:
    """A `Store` in one database, which any number of machines may use at once.

    No statement needs what another left in its session, so a pooler may stand between. Every write can be looked up by its key: where
    its answer is lost it is made again, and is not done twice.
    """

    is_remote = True

    def __init__(
        self, dsn: str, *, outage_seconds: float = 60.0, read_only: bool = False, _now: str = _DATABASE_CLOCK
    ) -> None:
        self._links = Connections(dsn, outage_seconds, read_only=read_only)
        self.place = self._links.place
        self._now = _now
        self._begin_calls()
        self._held: dict[str, int] = {}
        self._noted: set[str] = set()
        self._inherited: dict[str, int] = {}
        self._owners: set[str] = set()
        self._inherited_owners: frozenset[str] = frozenset()
        try:
            self._links.run(partial(refuse_unusable, place=self.place))
        except BaseException:
            self._links.close()
            raise
        lifetime.watch(self)

    def _begin_calls(self) -> None:
        self._self = os.urandom(8).hex()
        """What this store is known by in the database, whatever its owners are called."""

    # --- owning -------------------------------------------------------------------------------------------------------

    def first_token(self) -> int:
        return int(self._ask(_EPOCH)[0][0]) * 1048576 + 1

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        self._refuse_reading()
        owner = self._own_name(owner)
        _refuse_gaps(rows)
        statement = _timed(_CREATE, self._now)
        mark = f"{self._self}."
        head = (run_id, owner, lease_seconds, lease_seconds, mark, *listing, listing.queue, "on", run_id)
        values = (*head, secret, *_first_rows(rows))

        def make(link: Link) -> int | None:
            found = link.execute(statement, values).fetchone()
            return int(found[0]) if found is not None else None

        def make_or_find(link: Link) -> int | None:
            if (token := make(link)) is not None:
                return token
            found = link.execute(_MADE, (run_id, secret)).fetchone()
            return int(found[0]) if found is not None else None

        token = self._links.run(make, make_or_find)
        if token is None:
            return None
        self._held[run_id] = token
        return Lease(run_id, owner, token, secret)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        self._refuse_reading()
        owner = self._own_name(owner)
        mine = (owner, f"{self._self}.")
        values = (owner, lease_seconds, lease_seconds, f"{self._self}.", *mine, *mine, run_id, *mine, "on")

        def take(link: Link) -> tuple[int, bytes]:
            while True:
                found = link.execute(_timed(_CLAIM, self._now), values, binary=True).fetchone()
                if found is not None:
                    return int(found[0]), found[1] or b""
                head = self._head(link, run_id)
                if head is None:
                    raise RunNotFound(run_id)
                if head.owner is not None and head.lease_left is not None and head.lease_left > 0:
                    raise RunOwned(run_id, head.owner, head.idle_seconds or 0.0)

        token, secret = self._links.run(take)
        if self._held.get(run_id) != token:
            self._held[run_id] = token
            self._noted.discard(run_id)
        return Lease(run_id, owner, token, secret)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        self._refuse_reading()
        if self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)

        def work(link: Link) -> int:
            values = (lease_seconds, lease_seconds, run_id, token, "off")
            renewed = link.execute(_timed(_RENEW, self._now), values).fetchone()
            if renewed is None:
                raise RunNotFound(run_id) if self._head(link, run_id) is None else LeaseLost(run_id, token)
            return int(renewed[0])

        return self._links.run(work)

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        self._refuse_reading()
        if self._inherited.get(run_id) == token:
            return
        values = (inbox, due_in, run_id, token, "off")
        self._links.run(lambda link: link.execute(_timed(_RELEASE, self._now), values))
        if self._held.get(run_id) == token:
            del self._held[run_id]

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        self._refuse_reading()
        if self._inherited and self._inherited.get(run_id) == token:
            raise LeaseLost(run_id, token)
        append = Append(run_id, token, inbox, rows)
        if len(rows) == 1 and run_id not in self._noted and not _is_large(rows[0]):
            return self._links.run(partial(self._append_row, append, rows[0], "on" if synced else "off"))
        (answer,) = self._links.run(partial(self._append_together, [append], "on" if synced else "off"))
        if isinstance(answer, LedgerError):
            raise answer
        return answer

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        level = "on" if synced else "off"
        answers: list[bool | LedgerError] = [False] * len(appends)
        left = list(range(len(appends)))
        while left:
            # A run's second append builds on its first: it goes with the next statement.
            first: dict[str, int] = {}
            for number in left:
                first.setdefault(appends[number].run_id, number)
            numbers = list(first.values())
            together = [appends[number] for number in numbers]
            try:
                self._refuse_reading()
                found = self._links.run(partial(self._append_together, together, level))
            except StoreError as error:
                found = [_likewise(error) for _ in together]
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
            left = [number for number in left if first[appends[number].run_id] != number]
        return answers

    def _append_row(self, append: Append, row: Row, level: str, link: Link) -> bool:
        run_id, token, inbox, _ = append
        values = (*row, run_id, token, inbox, level, run_id, row.seq - 1)
        try:
            if link.execute(_APPEND, values).rowcount == 1:
                return True
        except psycopg.IntegrityError:
            pass  # it stands there already, or something else does
        return self._refused(append, level, link)

    def _append_together(self, appends: Sequence[Append], level: str, link: Link) -> list[bool | LedgerError]:
        """One statement for many runs, one append for each. Where it is refused as a whole each goes alone."""
        clean = [append for append in appends if not self._is_inherited(append) and _is_in_order(append.rows)]
        try:
            written = {run_id for (run_id,) in link.execute(_APPEND_ALL, _many(clean, level))} if clean else set()
        except psycopg.IntegrityError:
            if len(clean) > 1:
                return [self._append_together([append], level, link)[0] for append in appends]
            written = set()
        self._noted -= written
        return [
            True if append.run_id in written and append in clean else self._answer(append, level, link)
            for append in appends
        ]

    def _answer(self, append: Append, level: str, link: Link) -> bool | LedgerError:
        if self._is_inherited(append):
            return LeaseLost(append.run_id, append.token)
        try:
            return self._refused(append, level, link)
        except LedgerError as error:
            return error

    def _refused(self, append: Append, level: str, link: Link) -> bool:
        """What an append answers that wrote nothing. True where its rows stand there all the same, by an earlier call."""
        run_id, token, inbox, rows = append
        fence = (run_id, level)
        found = link.execute(_FENCE, fence).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        if found[0] is None or found[1] != token:
            raise LeaseLost(run_id, token)
        if _stand(link, run_id, rows):
            link.execute(_FENCE, fence)  # whoever wrote them need not have waited for the disk
            return True
        if found[2] != inbox:
            return False
        raise StoreError(
            f"run {run_id!r}: an entry must have a kind, a body and roots, and the seq that follows its run's last one; nothing was "
            "written."
        )

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        self._refuse_reading()
        if self._inherited.get(run_id) == token:
            return
        self._noted.add(run_id)  # so that the next append looks; the plain one has no time to
        values = (None if note is None else _printable(note), run_id, token, "off")
        self._links.run(lambda link: link.execute(_ANNOTATE, values))

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        self._refuse_reading()
        nonce = os.urandom(12).hex()
        values = (due_in, due_in, run_id, "on", kind, payload, who, at, nonce)

        def work(link: Link) -> int:
            try:
                found = link.execute(_timed(_POST, self._now), values).fetchone()
            except psycopg.IntegrityError as error:  # this very call did it, and its answer was lost
                found = link.execute(_POSTED, (run_id, nonce)).fetchone()
                if found is None:
                    raise named(error, self.place) from error
            if found is None:
                raise RunNotFound(run_id)
            return int(found[0])

        return self._links.run(work)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        if payloads_up_to is None:
            return list(map(Row._make, self._ask(_READ, run_id, after, limit)))
        return list(map(Row._make, self._ask(_READ_SHORT, payloads_up_to, payloads_up_to, run_id, after, limit)))

    def payload(self, run_id: str, seq: int) -> bytes | None:
        found = self._ask(_PAYLOAD, run_id, seq)
        return found[0][0] if found else None

    def head(self, run_id: str) -> Head | None:
        return self._links.run(partial(self._head, run_id=run_id))

    def secret(self, run_id: str) -> bytes:
        found = self._ask(_SECRET, run_id)
        return found[0][0] or b"" if found else b""

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        statement = _timed(_SUMMARIES_AFTER if run_id is None else _SUMMARY_OF, self._now)
        key: tuple[object, ...] = (float("-inf"), "") if run_id is None else (run_id,)
        while True:
            page = self._ask(statement, *key)
            for found in page:
                first, last = found[_HEAD_COLUMNS:][:_ROW_COLUMNS], found[_HEAD_COLUMNS + _ROW_COLUMNS : -1]
                yield Summary(_as_head(found), Row._make(first), Row._make(last))
            if run_id is not None or len(page) < _SUMMARIES_PER_PAGE:
                return
            key = (page[-1][-1], page[-1][0])

    def inbox(self, run_id: str, after: int) -> list[Request]:
        statement = b"SELECT id, kind, payload, who, at FROM inbox WHERE run_id = %s AND id > %s ORDER BY id"
        return [Request(*found) for found in self._ask(statement, run_id, after)]

    def check(self) -> Iterable[str]:
        try:
            return [f"{self.place}: {said}" for said in self._links.run(findings)]
        except StoreError as error:
            return [str(error)]

    def _ask(self, statement: bytes, *values: object) -> list[tuple[Any, ...]]:
        return self._links.run(lambda link: link.execute(statement, values, binary=True).fetchall())

    def _head(self, link: Link, run_id: str) -> Head | None:
        found = link.execute(_timed(_HEAD, self._now), (run_id,), binary=True).fetchone()
        return None if found is None else _as_head(found)

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def close(self) -> None:
        held, self._held = self._held, {}
        if held and not self._links.is_closed:
            values = (list(held), list(held.values()), "off")
            with suppress(LedgerError):  # where it fails, the leases run out
                self._links.run(lambda link: link.execute(_GIVE_BACK, values))
        self._links.close()
        lifetime.forget(self)

    def before_fork(self) -> None:
        """Connections are not copied: the child opens its own."""

    def after_fork_in_parent(self) -> None:
        """Nothing was changed for the fork."""

    def after_fork_in_child(self) -> None:
        self._links.abandon()
        self._begin_calls()
        self._inherited_owners |= self._owners
        self._inherited |= self._held
        self._owners, self._held, self._noted = set(), {}, set()

    def _own_name(self, owner: str) -> str:
        """An owner id from before a fork names the parent's owner; the child's is spelt with its process id."""
        if owner in self._inherited_owners:
            return f"{owner}.{os.getpid():x}"
        self._owners.add(owner)
        return owner

    def _is_inherited(self, append: Append) -> bool:
        return bool(self._inherited) and self._inherited.get(append.run_id) == append.token

    def _refuse_reading(self) -> None:
        if self._links.read_only:
            raise StoreReadOnly(f"the ledger on {self.place} was opened read-only; nothing was written.")


@cache
def _timed(statement: str, now: str) -> bytes:
    """A statement in which the expression that says what time it is stands where `{now}` stood."""
    return statement.replace("{now}", now).encode()


def _as_head(found: Sequence[Any]) -> Head:
    run_id, owner, token, inbox, note, *listing, idle, left, due_in = found[:_HEAD_COLUMNS]
    return Head(run_id, owner, token, inbox, note, Listing._make(listing), idle, left, due_in)


def _first_rows(rows: Sequence[Row]) -> tuple[list[Any], ...]:
    """The rows of a new run as arrays, those of `payloads` first."""
    kept = {row.digest: row.payload for row in rows if _is_large(row)}
    return (list(kept), list(kept.values()), *_columns(rows))


def _many(appends: Sequence[Append], level: str) -> tuple[object, ...]:
    """The arguments of `_APPEND_ALL`."""
    kept: dict[tuple[str, bytes | None], bytes | None] = {}
    rows: list[Row] = []
    ids: list[str] = []
    for run_id, _, _, new in appends:
        rows += new
        ids += [run_id] * len(new)
        for row in new:
            if _is_large(row):
                kept[run_id, row.digest] = row.payload
    return (
        [append.run_id for append in appends],
        [append.token for append in appends],
        [append.inbox for append in appends],
        [append.rows[0].seq - 1 if append.rows else None for append in appends],
        [run_id for run_id, _ in kept],
        [digest for _, digest in kept],
        list(kept.values()),
        ids,
        *_columns(rows),
        level,
    )


def _columns(rows: Sequence[Row]) -> tuple[list[Any], ...]:
    if not rows:
        return tuple([] for _ in Row._fields)
    return tuple(map(list, zip(*(row._replace(payload=None) if _is_large(row) else row for row in rows), strict=True)))


def _is_in_order(rows: Sequence[Row]) -> bool:
    return all(row.seq == rows[0].seq + number for number, row in enumerate(rows))


def _refuse_gaps(rows: Sequence[Row]) -> None:
    if not rows or rows[0].seq != 1 or not _is_in_order(rows):
        raise StoreError("an entry must have the seq that follows its run's last one; nothing was written.")


def _stand(link: Link, run_id: str, rows: Sequence[Row]) -> bool:
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


def _printable(note: str) -> str:
    """A note without what PostgreSQL cannot keep in a text; it is for people, and proves nothing."""
    return note.replace("\0", "\ufffd").encode(errors="replace").decode()


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
