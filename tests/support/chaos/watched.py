"""A store with a witness: whatever a worker claims, is told to be written, or loses, stands in its journal before it acts upon it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_run_ledger.contract import Append, Lease, Listing, QueueTerms, Row, Store
from agent_run_ledger.errors import LeaseLost, LedgerError, StoreError
from support.chaos.journal import Journal, now


class WatchedStore:
    """Passes every verb on, and notes those that give, use and end the right to write: when they began, and what they answered."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self._store = store
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        began = now()
        lease = self._told(lambda: self._store.create(run_id, owner, lease_seconds, secret, rows, listing), "create")
        if lease is not None:
            self._claimed([lease], began, lease_seconds)
            self._written(Append(run_id, lease.token, 0, rows), began, synced=True)
        return lease

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        began = now()
        is_new: bool = self._told(lambda: self._store.enqueue(run_id, secret, rows, listing, due_in), "enqueue", run_id)
        if is_new:
            self._journal.note("enqueued", run=run_id, began=began, due_in=due_in)
            self._written(Append(run_id, self._store.first_token() - 1, 0, rows), began, synced=True)
        return is_new

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        began = now()
        lease: Lease = self._told(lambda: self._store.claim(run_id, owner, lease_seconds), "claim")
        self._claimed([lease], began, lease_seconds)
        return lease

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        began = now()
        leases: list[Lease] = self._told(
            lambda: self._store.claim_due(owner, lease_seconds, queues, agents, at_most), "claim_due"
        )
        self._claimed(leases, began, lease_seconds, is_due=True)
        return leases

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        began = now()
        inbox: int = self._told(lambda: self._store.renew(run_id, token, lease_seconds), "renew", run_id)
        self._journal.note("renewed", run=run_id, token=token, began=began, seconds=lease_seconds)
        return inbox

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        self._journal.note("releases", run=run_id, token=token)
        self._told(lambda: self._store.release(run_id, token, inbox=inbox, due_in=due_in), "release", run_id)

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        self._journal.note("posts", run=run_id)
        counter: int = self._told(
            lambda: self._store.post(run_id, kind, payload, who, at, due_in=due_in), "post", run_id
        )
        return counter

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        began = now()
        written: bool = self._told(
            lambda: self._store.append(run_id, token, inbox, rows, synced=synced), "append", run_id
        )
        if written:
            self._written(Append(run_id, token, inbox, rows), began, synced=synced)
        return written

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        began = now()
        answers: list[bool | LedgerError] = self._told(
            lambda: self._store.append_all(appends, synced=synced), "append_all"
        )
        for append, answer in zip(appends, answers, strict=True):
            if answer is True:
                self._written(append, began, synced=synced)
            elif isinstance(answer, LedgerError):
                self._failed("append_all", append.run_id, answer)
        return answers

    def close(self) -> None:
        self._journal.note("closes")
        self._store.close()

    def _told(self, verb: Any, name: str, run_id: str | None = None) -> Any:
        try:
            return verb()
        except (LeaseLost, StoreError) as error:
            self._failed(name, run_id, error)
            raise

    def _failed(self, verb: str, run_id: str | None, error: LedgerError) -> None:
        self._journal.note("failed", verb=verb, run=run_id, error=type(error).__name__, said=str(error))

    def _claimed(self, leases: Sequence[Lease], began: float, seconds: float, *, is_due: bool = False) -> None:
        for lease in leases:
            about = {"run": lease.run_id, "token": lease.token, "began": began, "seconds": seconds}
            self._journal.note("claimed", is_due=is_due, **about)

    def _written(self, append: Append, began: float, *, synced: bool) -> None:
        entries = [
            {"seq": row.seq, "kind": row.kind, "position": row.position, "attempt": row.attempt, "leaf": row.roots[:32].hex()}
            for row in append.rows
        ]  # fmt: skip
        self._journal.note(
            "written", run=append.run_id, token=append.token, began=began, synced=synced, entries=entries
        )
