"""What the tests of a store speak in: entries as an engine could write them, and what is expected of a store's answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent_run_ledger.contract import Append, Head, Lease, Listing, QueueTerms, Row, Store
from agent_run_ledger.errors import LedgerError


def a_row(seq: int, kind: str = "note", payload: bytes | None = None, *, state: str = "RUNNING") -> Row:
    """An entry as an engine could write it; a store never looks inside."""
    body = b'{"seq":%d,"kind":"%s","state":"%s"}' % (seq, kind.encode(), state.encode())
    digest = None if payload is None else bytes(reversed(payload[:32])).ljust(32, b"\0")
    return Row(seq, kind, None, None, body, bytes([seq % 256]) * 32, payload, digest)


_E = TypeVar("_E", bound=LedgerError)
SECRET = b"s" * 32
LISTING = Listing(1.5)
"""What a run is found by that is in no queue."""


def create(
    store: Store,
    run_id: str,
    *,
    owner: str = "a",
    lease_seconds: float = 30.0,
    rows: Sequence[Row] | None = None,
) -> Lease:
    lease = store.create(run_id, owner, lease_seconds, SECRET, rows or [a_row(1, "created", b"{}")], LISTING)
    assert lease is not None
    return lease


def enqueue(
    store: Store,
    run_id: str,
    *,
    queue: str = "q",
    agent: str = "agent",
    priority: int = 0,
    key: str | None = None,
    due_in: float = 0.0,
) -> Listing:
    """A run that waits in a queue; its listing."""
    listing = Listing(1.5, agent, queue, priority, key)
    assert store.enqueue(run_id, SECRET, [a_row(1, "created", b"{}")], listing, due_in)
    return listing


def claim_due(
    store: Store, *queues: QueueTerms, owner: str = "a", agents: Sequence[str] = ("agent",), at_most: int = 100
) -> list[Lease]:
    """The runs of these queues, or else of "q", that are due, with a lease of 30 s for each."""
    return store.claim_due(owner, 30.0, queues or [QueueTerms("q")], agents, at_most)


def due_in_of(store: Store, run_id: str) -> float | None:
    return head_of(store, run_id).due_in


def head_of(store: Store, run_id: str = "r") -> Head:
    head = store.head(run_id)
    assert head is not None
    return head


def deaths_of(store: Store, run_id: str = "r") -> int:
    return head_of(store, run_id).deaths


def note_of(store: Store) -> str | None:
    return head_of(store).note


def answer_to(store: Store, append: Append, synced: bool) -> bool | LedgerError:
    try:
        return store.append(*append, synced=synced)
    except LedgerError as error:
        return error


def spelt(answer: bool | LedgerError) -> str:
    return str(answer) if isinstance(answer, bool) else f"{type(answer).__name__}: {answer}"


def refuses(kind: type[_E], call: Callable[[], object]) -> _E:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def in_threads(calls: Sequence[Callable[[], object]]) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait(30)
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
