"""The store that is gone with the process: dictionaries under one lock, for tests and for trying things out."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_run_ledger.contract import (
    PACKED,
    PACKED_AES_GCM,
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
    StoreUnavailable,
)
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.clock import SystemClock

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

_FORGOTTEN_SECONDS = 86_400.0
_ENDS = ("COMPLETED", "FAILED", "DEAD_LETTER", "CANCELLED")


@dataclass(slots=True)
class _Run:
    owner: str | None
    token: int
    until: float
    seconds: float
    secret: bytes
    rows: list[Row]
    listing: Listing
    due: float | None
    """When a worker may take it, in seconds of the elapsed clock."""
    requests: list[Request] = field(default_factory=list)
    note: str | None = None
    moved_to: str | None = None
    died: int = 0
    """How many owners died after the entry `died_after`, the last one then."""
    died_after: int = 0

    @property
    def deaths(self) -> int:
        """See `Head.deaths`."""
        return self.died if self.died_after == len(self.rows) else 0

    def bereave(self) -> None:
        """Take it from an owner that is dead, or had its time."""
        self.owner, self.died, self.died_after = None, self.deaths + 1, len(self.rows)


class MemoryStore:
    """A `Store` that several ledgers of one process can share. Nobody can die here alone, so only time frees a run."""

    is_remote = False
    place = ":memory:"

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._runs: dict[str, _Run] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._is_closed = False
        self._renew_locks()
        lifetime.watch(self)

    def _renew_locks(self) -> None:
        self._mutex = threading.RLock()
        self._news = threading.Condition(self._mutex)
        self._told = 0
        """How often something came up that a worker could wait for."""
        self._heard = threading.local()
        """`told` is what that was when the thread waited last."""

    def first_token(self) -> int:
        return 1

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        with self._mutex:
            self._refuse_if_closed()
            if run_id in self._runs or run_id in self._tombstones:
                return None
            _refuse_gaps([], rows)
            elapsed = self.clock.elapsed()
            due = elapsed if listing.queue is not None else None
            until = elapsed + lease_seconds
            self._runs[run_id] = _Run(owner, 1, until, lease_seconds, secret, list(rows), listing, due)
            return Lease(run_id, owner, 1, secret)

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
        rows = [row for page in pages for row in page]
        with self._mutex:
            self._refuse_if_closed()
            here = self._runs.get(run_id)
            if run_id in self._tombstones or (here is not None and here.moved_to is None):
                return False
            before, asked = ([], []) if here is None else (here.rows, here.requests)
            _refuse_gaps(before, rows)
            run = _Run(None, token, 0.0, 0.0, secret, before + rows, listing, None, [*asked, *requests])
            self._runs[run_id] = run
            self._be_due(run, due_in)
            return True

    def move_away(self, run_id: str, token: int, place: str) -> None:
        with self._mutex:
            run = self._fenced(run_id, token)
            run.owner, run.due, run.moved_to = None, None, place

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        with self._mutex:
            run = self._run(run_id, is_here=True)
            elapsed = self.clock.elapsed()
            if run.owner != owner:
                if run.owner is not None and run.until > elapsed:
                    raise RunOwned(run_id, run.owner, max(0.0, elapsed - (run.until - run.seconds)))
                if run.owner is not None:
                    run.bereave()
                run.owner, run.token, run.note = owner, run.token + 1, None
                if run.listing.queue is not None:
                    run.due = elapsed if run.due is None else min(run.due, elapsed)
            run.until, run.seconds = elapsed + lease_seconds, lease_seconds
            return Lease(run_id, owner, run.token, run.secret, deaths=run.deaths)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        with self._mutex:
            run = self._fenced(run_id, token)
            run.until, run.seconds = self.clock.elapsed() + lease_seconds, lease_seconds
            return len(run.requests)

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            if run is not None and run.token == token and run.owner is not None:
                run.owner = None
                self._be_due(run, 0.0 if len(run.requests) > inbox else due_in)

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        with self._mutex:
            run = self._fenced(run_id, token)
            if rows and _stand(run.rows[rows[0].seq - 1 :][: len(rows)], rows):
                return True
            if len(run.requests) != inbox:
                return False
            _refuse_gaps(run.rows, rows)
            run.rows.extend(rows)
            run.note = None
            return True

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        with self._mutex:
            return [self._answer(append, synced) for append in appends]

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            after = max(after, 0)
            rows = [] if run is None else run.rows[after : None if limit is None else after + limit]
        return rows if payloads_up_to is None else [_shortened(row, payloads_up_to) for row in rows]

    def payload(self, run_id: str, seq: int) -> bytes | None:
        rows = self.read(run_id, seq - 1, limit=1) if seq > 0 else []
        return rows[0].payload if rows else None

    def roots(self, run_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
        with self._mutex:
            self._refuse_if_closed()
            rows = self._runs[run_id].rows if run_id in self._runs else []
            return {seq: rows[seq - 1].roots for seq in seqs if 0 < seq <= len(rows)}

    def sync(self, run_id: str) -> None:
        self._refuse_if_closed()

    def head(self, run_id: str) -> Head | None:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            return None if run is None else self._head(run_id, run)

    def secret(self, run_id: str) -> bytes:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            return b"" if run is None else run.secret

    def reseal(self, run_id: str, sealed: bytes, anew: bytes) -> bool:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            if run is None or run.secret != sealed or min(len(sealed), len(anew)) <= SECRET_BYTES:
                return False
            run.secret = anew
            return True

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        with self._mutex:
            self._refuse_if_closed()
            ids = [key for key in self._runs if run_id is None or key == run_id]
        for key in ids:
            with self._mutex:
                self._refuse_if_closed()
                if (run := self._runs.get(key)) is None:
                    continue  # deleted since
                summary = Summary(self._head(key, run), run.rows[0], run.rows[-1])
            yield summary

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        with self._mutex:
            run = self._run(run_id, is_here=True)
            run.requests.append(Request(len(run.requests) + 1, kind, payload, who, at))
            due = self.clock.elapsed() + due_in
            if run.due is None or due < run.due:
                self._be_due(run, due_in)
            return len(run.requests)

    def inbox(self, run_id: str, after: int) -> list[Request]:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            return [] if run is None else run.requests[max(after, 0) :]

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            if run is not None and run.token == token:
                run.note = note

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        with self._mutex:
            run = self._fenced(run_id, token)
            if not _stand(run.rows[rows[0].seq - 1 :], rows):
                _refuse_gaps(run.rows, rows)
                run.rows.extend(rows)
            for first, last in erasure.entries:
                run.rows[first - 1 : last] = [
                    row._replace(payload=None, digest=None, fingerprint=None, encoding=None)
                    for row in run.rows[first - 1 : last]
                ]
            for anew in erasure.packed:
                before = run.rows[anew.seq - 1]
                if before.encoding == anew.encoding and before.encoding in (PACKED, PACKED_AES_GCM):
                    run.rows[anew.seq - 1] = before._replace(payload=anew.payload)
            for first, last in erasure.requests:
                asked = run.requests[first - 1 : last]
                run.requests[first - 1 : last] = [each._replace(payload=b"{}", who="") for each in asked]
            if erasure.secret:
                run.secret = b""
            run.note = None

    def delete(self, tombstone: Tombstone, token: int) -> None:
        with self._mutex:
            run = self._fenced(tombstone.run_id, token)
            if len(run.rows) != tombstone.size:
                raise StoreError(f"run {tombstone.run_id!r} has grown, so it was not deleted; nothing was written.")
            if json.loads(run.rows[-1].body)["state"] not in _ENDS:
                raise StoreError("a run can be deleted once, and only after it has ended; nothing was written.")
            self._tombstones[tombstone.run_id] = tombstone
            del self._runs[tombstone.run_id]

    def tombstone(self, run_id: str) -> Tombstone | None:
        with self._mutex:
            self._refuse_if_closed()
            return self._tombstones.get(run_id)

    def scrub(self) -> list[str]:
        return []

    def check(self) -> Iterable[str]:
        return ()

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._runs.clear()
            self._tell()

    # --- queues -------------------------------------------------------------------------------------------------------

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        with self._mutex:
            self._refuse_if_closed()
            if run_id in self._runs or run_id in self._tombstones:
                return False
            _refuse_gaps([], rows)
            run = self._runs[run_id] = _Run(None, 0, 0.0, 0.0, secret, list(rows), listing, None)
            self._be_due(run, due_in)
            return True

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        with self._mutex:
            self._refuse_if_closed()
            terms = {queue.name: queue for queue in queues}
            busy = Counter[tuple[str | None, str | None]]()
            for run in self._runs.values():
                if run.owner is not None and run.due is not None:
                    _count(busy, run.listing)
            elapsed = self.clock.elapsed()
            leases: list[Lease] = []
            for run_id, run in sorted(self._unowned(list(terms), agents), key=lambda item: _rank(item[1])):
                if len(leases) == at_most or run.due is None or run.due > elapsed:
                    continue
                if _is_full(busy, terms[run.listing.queue or ""], run.listing.key):
                    continue
                _count(busy, run.listing)
                run.owner, run.token, run.note = owner, run.token + 1, None
                run.until, run.seconds = elapsed + lease_seconds, lease_seconds
                leases.append(Lease(run_id, owner, run.token, run.secret, run.listing.agent, run.deaths))
            return leases

    def next_due(self, queues: Sequence[str], agents: Sequence[str]) -> float | None:
        with self._mutex:
            self._refuse_if_closed()
            due = [run.due for _, run in self._unowned(queues, agents) if run.due is not None]
            return max(0.0, min(due) - self.clock.elapsed()) if due else None

    def free_dead(self) -> int:
        with self._mutex:
            self._refuse_if_closed()
            elapsed = self.clock.elapsed()
            dead = [
                run
                for run in self._runs.values()
                if run.owner is not None and run.due is not None and run.until <= elapsed
            ]
            for run in dead:
                run.bereave()
            if dead:
                self._tell()
            return len(dead)

    def wait_for_work(self, seconds: float) -> bool:
        with self._mutex:
            heard = getattr(self._heard, "told", None)
            is_new = self._news.wait_for(lambda: self._told != heard or self._is_closed, seconds)
            self._heard.told = self._told
            return is_new

    def wake(self) -> None:
        with self._mutex:
            self._tell()

    def beat(self, worker: str, said: bytes) -> None:
        with self._mutex:
            self._refuse_if_closed()
            self._beats[worker] = said, self.clock.elapsed()

    def leave(self, worker: str) -> None:
        with self._mutex:
            self._beats.pop(worker, None)

    def workers(self) -> list[Beat]:
        with self._mutex:
            self._refuse_if_closed()
            now = self.clock.elapsed()
            self._beats = {
                worker: (said, at) for worker, (said, at) in self._beats.items() if now - at < _FORGOTTEN_SECONDS
            }
            return [Beat(worker, said, now - at) for worker, (said, at) in self._beats.items()]

    def _unowned(self, queues: Sequence[str], agents: Sequence[str]) -> Iterator[tuple[str, _Run]]:
        for run_id, run in self._runs.items():
            if run.owner is None and run.listing.queue in queues and run.listing.agent in agents:
                yield run_id, run

    def _be_due(self, run: _Run, due_in: float | None) -> None:
        if run.listing.queue is not None:
            run.due = None if due_in is None else self.clock.elapsed() + due_in
            self._tell()  # if it is not to be taken, it has made room for another

    def _tell(self) -> None:
        self._told += 1
        self._news.notify_all()

    # --- forks, and what goes wrong -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        self._renew_locks()  # the child's runs are a copy, and go their own way

    def _answer(self, append: Append, synced: bool) -> bool | LedgerError:
        try:
            return self.append(*append, synced=synced)
        except LedgerError as error:
            return error

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("this ledger in memory is closed, and what was in it is gone; nothing was done.")

    def _run(self, run_id: str, *, is_here: bool = False) -> _Run:
        """The run. Raises `RunNotFound`, and where it should be `is_here` and was moved away, `RunMoved`."""
        self._refuse_if_closed()
        run = self._runs.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        if is_here and run.moved_to is not None:
            raise RunMoved(run_id, run.moved_to)
        return run

    def _fenced(self, run_id: str, token: int) -> _Run:
        run = self._run(run_id)
        if run.owner is None or run.token != token:
            raise LeaseLost(run_id, token)
        return run

    def _head(self, run_id: str, run: _Run) -> Head:
        elapsed = self.clock.elapsed()
        return Head(
            run_id,
            run.owner,
            run.token,
            len(run.requests),
            run.note,
            run.listing,
            idle_seconds=max(0.0, elapsed - (run.until - run.seconds)) if run.owner is not None else None,
            lease_left=run.until - elapsed if run.owner is not None else None,
            due_in=run.due - elapsed if run.due is not None else None,
            moved_to=run.moved_to,
            deaths=run.deaths,
        )


def _rank(run: _Run) -> tuple[int, float]:
    return -run.listing.priority, run.due or 0.0


def _count(busy: Counter[tuple[str | None, str | None]], listing: Listing) -> None:
    busy[listing.queue, None] += 1
    if listing.key is not None:
        busy[listing.queue, listing.key] += 1


def _is_full(busy: Counter[tuple[str | None, str | None]], terms: QueueTerms, key: str | None) -> bool:
    if terms.concurrency is not None and busy[terms.name, None] >= terms.concurrency:
        return True
    return terms.per_key is not None and key is not None and busy[terms.name, key] >= terms.per_key


def _shortened(row: Row, payloads_up_to: int) -> Row:
    if row.payload is None or row.digest is None or len(row.payload) <= payloads_up_to:
        return row
    return row._replace(payload=None)


def _stand(there: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether these are the same entries, however their payloads are kept; they may have been erased since."""
    return len(there) == len(rows) and all(
        old[:6] == new[:6] and old.digest in (None, new.digest) for old, new in zip(there, rows, strict=True)
    )


def _refuse_gaps(rows: Sequence[Row], new: Sequence[Row]) -> None:
    if [row.seq for row in new] != list(range(len(rows) + 1, len(rows) + 1 + len(new))):
        raise StoreError("an entry must have the seq that follows its run's last one; nothing was written.")
