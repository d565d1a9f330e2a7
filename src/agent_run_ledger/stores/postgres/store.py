"""The store that many machines share: one PostgreSQL database, one round trip a commit, leases by the database's clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import psycopg

from agent_run_ledger.contract import (
    SECRET_BYTES,
    Append,
    Beat,
    Erasure,
    Head,
    Lease,
    Listing,
    QueueTerms,
    Request,
    Row,
    Summary,
    Tombstone,
)
from agent_run_ledger.errors import (
    LeaseLost,
    LedgerError,
    RunMoved,
    RunNotFound,
    RunOwned,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.postgres import erasing, reading
from agent_run_ledger.stores.postgres import queues as waiting
from agent_run_ledger.stores.postgres.appending import append_row, append_together, is_large
from agent_run_ledger.stores.postgres.bell import Bell
from agent_run_ledger.stores.postgres.clock import SERVER_TIME
from agent_run_ledger.stores.postgres.connections import Connections
from agent_run_ledger.stores.postgres.faults import named
from agent_run_ledger.stores.postgres.link import SYNCED, Link, timed
from agent_run_ledger.stores.postgres.making import Making, new_mark
from agent_run_ledger.stores.postgres.schema import findings, refuse_unusable

# Ours already where a call of this very store took it: then it is renewed, under the token that it has. So a claim whose answer was
# lost is simply made again. A new epoch begins above every token of the old ones.
_CLAIM = f"""
UPDATE runs SET
    owner = %s, lease_until = {{now}} + %s::float8, lease_seconds = %s, lease_call = %s,
    note = CASE WHEN owner = %s AND starts_with(lease_call, %s) THEN note END,
    due = CASE WHEN owner = %s AND starts_with(lease_call, %s) THEN due WHEN queue IS NOT NULL THEN least(due, {{now}}) END,
    deaths = CASE WHEN owner IS NULL OR (owner = %s AND starts_with(lease_call, %s)) THEN deaths ELSE {reading.ONE_MORE_DEATH} END,
    deaths_after = CASE WHEN owner IS NULL OR (owner = %s AND starts_with(lease_call, %s)) THEN deaths_after ELSE {reading.LAST_SEQ} END,
    fencing_token = CASE WHEN owner = %s AND starts_with(lease_call, %s) THEN fencing_token
        ELSE greatest(fencing_token, (SELECT value FROM meta WHERE meta.key = 'epoch') * 1048576) + 1 END
WHERE run_id = %s AND moved_to IS NULL AND (owner IS NULL OR lease_until <= {{now}} OR (owner = %s AND starts_with(lease_call, %s))) AND {SYNCED}
RETURNING fencing_token, (SELECT secret FROM secrets s WHERE s.run_id = runs.run_id), {reading.DEATHS.format("runs")}
"""

_RENEW = f"""
UPDATE runs SET lease_until = {{now}} + %s::float8, lease_seconds = %s
WHERE run_id = %s AND fencing_token = %s AND owner IS NOT NULL AND {SYNCED}
RETURNING inbox, {SERVER_TIME}
"""

_RELEASE = f"""
UPDATE runs SET owner = NULL, due = CASE
    WHEN queue IS NULL THEN NULL
    WHEN inbox > %s THEN {{now}}
    ELSE {{now}} + %s::float8 END
WHERE run_id = %s AND fencing_token = %s AND owner IS NOT NULL AND {SYNCED}
RETURNING queue IS NOT NULL
"""

_MOVE_AWAY = f"""
UPDATE runs SET owner = NULL, due = NULL, moved_to = %s
WHERE run_id = %s AND fencing_token = %s AND owner IS NOT NULL AND {SYNCED}
""".encode()

# What was done by a call whose answer was lost is written once more: that commit waits until it is on the disk, and with the standby.
_MOVED_AWAY = f"""
UPDATE runs SET moved_to = moved_to WHERE run_id = %s AND fencing_token = %s AND moved_to = %s AND {SYNCED}
""".encode()

_GIVE_BACK = f"""
UPDATE runs SET owner = NULL FROM unnest(%b::text[], %b::bigint[]) AS h (id, token)
WHERE run_id = h.id AND fencing_token = h.token AND owner IS NOT NULL AND {SYNCED}
RETURNING queue IS NOT NULL
""".encode()

_ANNOTATE = f"UPDATE runs SET note = %s WHERE run_id = %s AND fencing_token = %s AND {SYNCED}".encode()

# One writer per run: others only put requests here and move the counter, the one column that needs no token.
_POST = f"""
WITH counted AS (
    UPDATE runs SET inbox = inbox + 1, due = CASE
        WHEN queue IS NOT NULL AND (due IS NULL OR due > {{now}} + %s::float8) THEN {{now}} + %s::float8 ELSE due END
    WHERE run_id = %s AND moved_to IS NULL AND {SYNCED}
    RETURNING run_id, inbox, queue
), kept AS (
    INSERT INTO inbox (run_id, id, kind, payload, who, at, nonce) SELECT run_id, inbox, %s, %b, %s, %s, %s FROM counted
)
SELECT inbox, queue IS NOT NULL FROM counted
"""
# Its commit waits until what is seen here is on the disk, and with the standby.
_POSTED = f"""
SELECT i.id, r.queue IS NOT NULL FROM inbox i JOIN runs r ON r.run_id = i.run_id
WHERE i.run_id = %s AND i.nonce = %s AND {SYNCED}
FOR NO KEY UPDATE OF r
""".encode()

# A lock of a row stands in the server's log, so that its commit waits for all that was written there before, and for the standby.
_SYNC = f"SELECT 1 FROM runs WHERE run_id = %s AND {SYNCED} FOR NO KEY UPDATE".encode()
_UNTIL_FLUSHED_SECONDS = 0.02


T = TypeVar("T")


class PostgresStore:
    """A `Store` in one database, which any number of machines may use at once.

    No statement needs what another left in its session, so a pooler may stand between. Every write can be looked up by its key: where
    its answer is lost it is made again, and is not done twice.
    """

    is_remote = True

    def __init__(
        self, dsn: str, *, outage_seconds: float = 60.0, read_only: bool = False, _now: str = SERVER_TIME
    ) -> None:
        self._links = Connections(dsn, outage_seconds, read_only=read_only)
        self.place = self._links.place
        self.clock = self._links.clock
        self._now = _now
        self._held: dict[str, int] = {}
        self._noted: set[str] = set()
        self._owners: set[str] = set()
        self._inherited: dict[str, int] = {}
        self._inherited_owners: frozenset[str] = frozenset()
        self._begin()
        try:
            self._links.run(partial(refuse_unusable, place=self.place))
        except BaseException:
            self._links.close()
            raise
        lifetime.watch(self)

    def _begin(self) -> None:
        mark = new_mark()
        self._mark = f"{mark}."
        """What the leases that this store takes are known by, whatever its owners are called."""
        self._bell = Bell(self._links, mark)
        self._claims = waiting.Claims(self._links, self._now, mark)

    # --- owning -------------------------------------------------------------------------------------------------------

    def first_token(self) -> int:
        return int(self._ask(reading.EPOCH)[0][0]) * 1048576 + 1

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        self._refuse_reading()
        owner = self._own_name(owner)
        making = Making(
            self._now, run_id, secret, listing, owner=owner, mark=self._mark, lease_seconds=lease_seconds, due_in=0.0
        )
        make = partial(making.make, rows)
        token = self._links.run(make, lambda link: make(link) or making.find(link))
        if token is None:
            return None
        self._held[run_id] = token
        return Lease(run_id, owner, token, secret)

    def adopt(
        self,
        run_id: str,
        token: int,
        secret: bytes,
        listing: Listing,
        pages: Iterable[Sequence[Row]],
        requests: Sequence[Request],
        due_in: float | None,
    ) -> bool:
        self._refuse_reading()
        making = Making(self._now, run_id, secret, listing, token=token, inbox=len(requests), due_in=due_in)

        def take_in(link: Link) -> bool:
            if making.take_in(pages, requests, link) is None:
                return False
            if listing.queue is not None:
                self._bell.ring_elsewhere(link)
            return True

        def was_taken_in(link: Link) -> bool:
            if making.find(link) is None:
                raise StoreUnavailable(  # whoever does it there may be at it still
                    f"the connection to {self.place} was lost while run {run_id!r} was taken in, and it may be written yet. Call again."
                )
            return True

        return self._links.run(take_in, was_taken_in)

    def move_away(self, run_id: str, token: int, place: str) -> None:
        self._refuse_reading()
        if self._is_inherited(run_id, token):
            raise LeaseLost(run_id, token)

        def move(link: Link) -> bool:
            return link.execute(_MOVE_AWAY, (place, run_id, token, "on")).rowcount == 1

        def was_moved(link: Link) -> bool:
            return move(link) or link.execute(_MOVED_AWAY, (run_id, token, place, "on")).rowcount == 1

        if not self._links.run(move, was_moved):
            raise RunNotFound(run_id) if self.head(run_id) is None else LeaseLost(run_id, token)
        self._held.pop(run_id, None)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        self._refuse_reading()
        owner = self._own_name(owner)
        mine = (owner, self._mark)
        values = (owner, lease_seconds, lease_seconds, self._mark, *mine * 5, run_id, *mine, "on")

        def take(link: Link) -> Lease:
            while True:
                found = link.execute(timed(_CLAIM, self._now), values, binary=True).fetchone()
                if found is not None:
                    return Lease(run_id, owner, found[0], found[1] or b"", deaths=found[2])
                head = self._here(run_id, link)
                if head.owner is not None and head.lease_left is not None and head.lease_left > 0:
                    raise RunOwned(run_id, head.owner, head.idle_seconds or 0.0)

        lease = self._links.run(take)
        self._take(run_id, lease.token)
        return lease

    def _take(self, run_id: str, token: int) -> None:
        if self._held.get(run_id) != token:
            self._held[run_id] = token
            self._noted.discard(run_id)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        self._refuse_reading()
        if self._is_inherited(run_id, token):
            raise LeaseLost(run_id, token)

        def work(link: Link) -> int:
            values = (lease_seconds, lease_seconds, run_id, token, "off")
            asked_at = self.clock.elapsed()
            renewed = link.execute(timed(_RENEW, self._now), values).fetchone()
            if renewed is None:
                raise RunNotFound(run_id) if self._head(run_id, link) is None else LeaseLost(run_id, token)
            self.clock.hear(renewed[1], asked_at)
            return int(renewed[0])

        return self._links.run(work)

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        self._refuse_reading()
        if self._is_inherited(run_id, token):
            return

        def work(link: Link) -> None:
            values = (inbox, due_in, run_id, token, "off")
            if link.execute(timed(_RELEASE, self._now), values).fetchone() == (True,):
                self._bell.ring_elsewhere(link)

        self._links.run(work)
        if self._held.get(run_id) == token:
            del self._held[run_id]

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        self._refuse_reading()
        if self._is_inherited(run_id, token):
            raise LeaseLost(run_id, token)
        append = Append(run_id, token, inbox, rows)
        if len(rows) == 1 and run_id not in self._noted and not is_large(rows[0]):
            return self._links.run(partial(append_row, append, synced=synced))
        (answer,) = self._links.run(partial(append_together, [append], synced=synced))
        if isinstance(answer, LedgerError):
            raise answer
        if answer:
            self._noted.discard(run_id)
        return answer

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        if len(appends) == 1:  # alone it is cheaper
            try:
                return [self.append(*appends[0], synced=synced)]
            except LedgerError as error:
                return [error]
        answers: list[bool | LedgerError] = [
            LeaseLost(append.run_id, append.token) if self._is_inherited(append.run_id, append.token) else False
            for append in appends
        ]
        left = [number for number, answer in enumerate(answers) if answer is False]
        while left:
            first: dict[str, int] = {}  # a run's second append builds on its first: it goes with the next statement
            for number in left:
                first.setdefault(appends[number].run_id, number)
            together = [appends[number] for number in first.values()]
            try:
                self._refuse_reading()
                found = self._links.run(partial(append_together, together, synced=synced))
            except StoreError as error:
                found = [_likewise(error) for _ in together]
            for (run_id, number), answer in zip(first.items(), found, strict=True):
                answers[number] = answer
                if answer is True:
                    self._noted.discard(run_id)
            left = [number for number in left if first[appends[number].run_id] != number]
        return answers

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        self._refuse_reading()
        if self._is_inherited(run_id, token):
            return
        self._noted.add(run_id)  # so that the next append looks; the plain one has no time to
        values = (None if note is None else _printable(note), run_id, token, "off")
        self._links.run(lambda link: link.execute(_ANNOTATE, values))

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        self._refuse_reading()
        nonce = new_mark()
        values = (due_in, due_in, run_id, "on", kind, payload, who, at, nonce)

        def work(link: Link) -> int:
            while True:
                try:
                    found = link.execute(timed(_POST, self._now), values).fetchone()
                except psycopg.IntegrityError as error:  # this very call did it, and its answer was lost
                    found = link.execute(_POSTED, (run_id, nonce, "on")).fetchone()
                    if found is None:
                        raise named(error, self.place) from error
                if found is not None:
                    break
                self._here(run_id, link)  # raises, unless it has come back in this moment
            if found[1]:
                self._bell.ring_elsewhere(link)
            return int(found[0])

        return self._links.run(work)

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        if self._is_inherited(run_id, token):
            raise LeaseLost(run_id, token)
        self._take_away(partial(erasing.erase, run_id, token, rows, erasure))

    def delete(self, tombstone: Tombstone, token: int) -> None:
        if self._is_inherited(tombstone.run_id, token):
            raise LeaseLost(tombstone.run_id, token)
        self._take_away(partial(erasing.delete, tombstone, token))
        self._held.pop(tombstone.run_id, None)

    def _take_away(self, work: Callable[[Link], T]) -> T:
        self._refuse_reading()
        try:
            return self._links.run(work)
        except StoreError as error:
            if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
                raise erasing.refusal(self.place, error.__cause__) from error.__cause__
            raise

    def tombstone(self, run_id: str) -> Tombstone | None:
        return self._links.run(lambda link: erasing.standing(link, run_id))

    def scrub(self) -> list[str]:
        self._refuse_reading()
        return list(erasing.PENDING)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        if payloads_up_to is None:
            return list(map(Row._make, self._ask(reading.READ, run_id, after, limit)))
        most = payloads_up_to
        return list(map(Row._make, self._ask(reading.READ_SHORT, most, most, run_id, after, limit)))

    def payload(self, run_id: str, seq: int) -> bytes | None:
        found = self._ask(reading.PAYLOAD, run_id, seq)
        return found[0][0] if found else None

    def head(self, run_id: str) -> Head | None:
        return self._links.run(partial(self._head, run_id))

    def roots(self, run_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
        return dict(self._ask(reading.ROOTS, run_id, list(seqs)))

    def sync(self, run_id: str) -> None:
        if not self._links.read_only:
            self._ask(_SYNC, run_id, "on")
            return
        end, page, segment = self._ask(reading.LOG_END)[0]
        if end is not None:
            written = reading.last_written(int(end), page, segment)
            while not self._ask(reading.IS_FLUSHED_TO, written)[0][0]:
                time.sleep(_UNTIL_FLUSHED_SECONDS)

    def secret(self, run_id: str) -> bytes:
        found = self._ask(reading.SECRET, run_id)
        return found[0][0] or b"" if found else b""

    def reseal(self, run_id: str, sealed: bytes, anew: bytes) -> bool:
        if min(len(sealed), len(anew)) <= SECRET_BYTES:
            return False
        return self._take_away(partial(erasing.reseal, run_id, sealed, anew))

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        if run_id is not None:
            yield from map(reading.as_summary, self._ask(timed(reading.SUMMARY_OF, self._now), run_id))
            return
        place = reading.BEFORE_ALL
        while page := self._ask(timed(reading.SUMMARIES_AFTER, self._now), *place):
            yield from map(reading.as_summary, page)
            place = reading.place_in_order(page[-1])

    def inbox(self, run_id: str, after: int) -> list[Request]:
        return [Request(*found) for found in self._ask(reading.INBOX, run_id, after)]

    def check(self) -> Iterable[str]:
        try:
            return [f"{self.place}: {said}" for said in self._links.run(findings)]
        except StoreError as error:
            return [str(error)]

    def _ask(self, statement: bytes, *values: object) -> list[tuple[Any, ...]]:
        return self._links.run(lambda link: link.execute(statement, values, binary=True).fetchall())

    def _head(self, run_id: str, link: Link) -> Head | None:
        found = link.execute(timed(reading.HEAD, self._now), (run_id,), binary=True).fetchone()
        return None if found is None else reading.as_head(found)

    def _here(self, run_id: str, link: Link) -> Head:
        """The head of a run that is there. Raises `RunNotFound` and `RunMoved`."""
        head = self._head(run_id, link)
        if head is None:
            raise RunNotFound(run_id)
        if head.moved_to is not None:
            raise RunMoved(run_id, head.moved_to)
        return head

    # --- queues -------------------------------------------------------------------------------------------------------

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        self._refuse_reading()
        making = Making(self._now, run_id, secret, listing, due_in=due_in)

        def make(find: Callable[[Link], int | None], link: Link) -> bool:
            if making.make(rows, link) is None and find(link) is None:
                return False
            if listing.queue is not None:
                self._bell.ring_elsewhere(link)
            return True

        return self._links.run(partial(make, lambda link: None), partial(make, making.find))

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        self._refuse_reading()
        leases = self._claims.claim_due(self._own_name(owner), lease_seconds, queues, agents, at_most)
        for lease in leases:
            self._take(lease.run_id, lease.token)
        return leases

    def next_due(self, queues: Sequence[str], agents: Sequence[str]) -> float | None:
        return self._links.run(partial(waiting.next_due, queues, agents, self._now))

    def free_dead(self) -> int:
        self._refuse_reading()

        def work(link: Link) -> int:
            freed = waiting.free_dead(self._now, link)
            if freed:
                self._bell.ring_elsewhere(link)
            return freed

        return self._links.run(work)

    def wait_for_work(self, seconds: float) -> bool:
        return self._bell.wait(seconds)

    def wake(self) -> None:
        self._bell.ring()

    def beat(self, worker: str, said: bytes) -> None:
        self._refuse_reading()
        self._links.run(partial(waiting.beat, worker, said, self._now))

    def leave(self, worker: str) -> None:
        self._refuse_reading()
        self._links.run(partial(waiting.leave, worker, self._now))

    def workers(self) -> list[Beat]:
        return self._links.run(partial(waiting.workers, self._now))

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def close(self) -> None:
        held, self._held = self._held, {}

        def give_back(link: Link) -> None:
            found = link.execute(_GIVE_BACK, (list(held), list(held.values()), "off")).fetchall()
            if (True,) in found:
                self._bell.ring_elsewhere(link)

        self._links.close(give_back if held else None)
        self._bell.close()
        lifetime.forget(self)

    def before_fork(self) -> None:
        """Connections are not copied: the child opens its own."""

    def after_fork_in_parent(self) -> None:
        """Nothing was changed for the fork."""

    def after_fork_in_child(self) -> None:
        self._links.abandon()
        self._begin()
        self._inherited_owners |= self._owners
        self._inherited |= self._held
        self._owners, self._held, self._noted = set(), {}, set()

    def _own_name(self, owner: str) -> str:
        """An owner id from before a fork names the parent's owner; the child's is spelt with its process id."""
        if owner in self._inherited_owners:
            return f"{owner}.{os.getpid():x}"
        self._owners.add(owner)
        return owner

    def _is_inherited(self, run_id: str, token: int) -> bool:
        return bool(self._inherited) and self._inherited.get(run_id) == token

    def _refuse_reading(self) -> None:
        if self._links.read_only:
            raise StoreReadOnly(f"the ledger on {self.place} was opened read-only; nothing was written.")


def _printable(note: str) -> str:
    """A note without what PostgreSQL cannot keep in a text; it is for people, and proves nothing."""
    return note.replace("\0", "\ufffd").encode(errors="replace").decode()


def _likewise(error: StoreError) -> StoreError:
    """The same error for one more caller: an exception that several raise would gather all their tracebacks."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again
