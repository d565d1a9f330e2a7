"""The store that is gone with the process: dictionaries under one lock, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_run_ledger.contract import Append, Head, Lease, Request, Row, Summary
from agent_run_ledger.errors import LeaseLost, LedgerError, RunNotFound, RunOwned, StoreError, StoreUnavailable
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.clock import SystemClock

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock


@dataclass(slots=True)
class _Run:
    owner: str | None
    token: int
    until: float
    seconds: float
    secret: bytes
    rows: list[Row]
    requests: list[Request] = field(default_factory=list)
    note: str | None = None


class MemoryStore:
    """A `Store` that several ledgers of one process can share. Nobody can die here alone, so only time frees a run."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._mutex = threading.RLock()
        self._runs: dict[str, _Run] = {}
        self._is_closed = False
        lifetime.watch(self)

    def first_token(self) -> int:
        return 1

    def create(self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row]) -> Lease | None:
        with self._mutex:
            self._refuse_if_closed()
            if run_id in self._runs:
                return None
            _refuse_gaps([], rows)
            until = self.clock.elapsed() + lease_seconds
            self._runs[run_id] = _Run(owner, 1, until, lease_seconds, secret, list(rows))
            return Lease(run_id, owner, 1, secret)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        with self._mutex:
            run = self._run(run_id)
            elapsed = self.clock.elapsed()
            if run.owner != owner:
                if run.owner is not None and run.until > elapsed:
                    raise RunOwned(run_id, run.owner, max(0.0, elapsed - (run.until - run.seconds)))
                run.owner, run.token, run.note = owner, run.token + 1, None
            run.until, run.seconds = elapsed + lease_seconds, lease_seconds
            return Lease(run_id, owner, run.token, run.secret)

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        with self._mutex:
            run = self._fenced(run_id, token)
            run.until, run.seconds = self.clock.elapsed() + lease_seconds, lease_seconds
            return len(run.requests)

    def release(self, run_id: str, token: int) -> None:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            if run is not None and run.token == token:
                run.owner = None

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        with self._mutex:
            run = self._fenced(run_id, token)
            if rows and run.rows[rows[0].seq - 1 :][: len(rows)] == list(rows):
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

    def head(self, run_id: str) -> Head | None:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            return None if run is None else _head(run_id, run)

    def secret(self, run_id: str) -> bytes:
        with self._mutex:
            self._refuse_if_closed()
            run = self._runs.get(run_id)
            return b"" if run is None else run.secret

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        with self._mutex:
            self._refuse_if_closed()
            ids = [key for key in self._runs if run_id is None or key == run_id]
        for key in ids:
            with self._mutex:
                self._refuse_if_closed()
                run = self._runs[key]
                summary = Summary(_head(key, run), run.rows[0], run.rows[-1])
            yield summary

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float) -> int:
        with self._mutex:
            run = self._run(run_id)
            run.requests.append(Request(len(run.requests) + 1, kind, payload, who, at))
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

    def check(self) -> Iterable[str]:
        return ()

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._runs.clear()

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.RLock()  # the child's runs are a copy, and go their own way

    def _answer(self, append: Append, synced: bool) -> bool | LedgerError:
        try:
            return self.append(*append, synced=synced)
        except LedgerError as error:
            return error

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("this ledger in memory is closed, and what was in it is gone; nothing was done.")

    def _run(self, run_id: str) -> _Run:
        self._refuse_if_closed()
        run = self._runs.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    def _fenced(self, run_id: str, token: int) -> _Run:
        run = self._run(run_id)
        if run.owner is None or run.token != token:
            raise LeaseLost(run_id, token)
        return run


def _head(run_id: str, run: _Run) -> Head:
    return Head(run_id, run.owner, run.token, len(run.requests), run.note)


def _shortened(row: Row, payloads_up_to: int) -> Row:
    if row.payload is None or row.digest is None or len(row.payload) <= payloads_up_to:
        return row
    return row._replace(payload=None)


def _refuse_gaps(rows: Sequence[Row], new: Sequence[Row]) -> None:
    if [row.seq for row in new] != list(range(len(rows) + 1, len(rows) + 1 + len(new))):
        raise StoreError("an entry must have the seq that follows its run's last one; nothing was written.")
