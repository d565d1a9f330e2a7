"""How a run is read: page by page, without its long payloads, which are fetched one at a time where somebody needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

from agent_run_ledger.contract import Row, Store, sealed_under
from agent_run_ledger.engine.history import KEPT_BYTES, READ_BYTES, History
from agent_run_ledger.errors import KeyUnavailable, RunDeleted, RunNotFound, StoreCorrupt
from agent_run_ledger.rules.loops.breaker import Rule

_ROWS_PER_PAGE = 500


def pages(store: Store, run_id: str, after: int = 0, payloads_up_to: int = KEPT_BYTES) -> Iterator[list[Row]]:
    """The entries of a run behind `after`, without the payloads that nobody keeps in memory. No transaction is held in between."""
    seen = after
    while page := store.read(run_id, seen, limit=_ROWS_PER_PAGE, payloads_up_to=payloads_up_to):
        yield page
        if len(page) < _ROWS_PER_PAGE:
            return
        seen = page[-1].seq


def behind(store: Store) -> Store:
    """What keeps a store's bytes, as they are kept: the last of the stores, where others in front of it pack and encrypt."""
    while (kept := getattr(store, "inner", None)) is not None:
        store = kept
    return store


def opened(store: Store, run_id: str) -> bytes:
    """The run's secret, to read what it has kept by. Raises `KeyUnavailable` where that is encrypted and no key is here."""
    secret = store.secret(run_id)
    if (key_id := sealed_under(secret)) is not None:
        raise KeyUnavailable(run_id, key_id)
    return secret


def as_far_as_it_opens(store: Store, run_id: str) -> tuple[bytes, Iterator[Row]]:
    """The run's secret and its whole entries for whoever checks them: as they are kept where they cannot be decrypted.

    Without the key the secret is the sealed one.
    """
    kept = behind(store)
    open_row = getattr(store, "open_row", None)
    try:
        secret = store.secret(run_id)
    except KeyUnavailable:
        secret, open_row = kept.secret(run_id), None

    def rows() -> Iterator[Row]:
        for page in pages(kept, run_id):
            for row in page:
                row = whole(kept, run_id, row)
                if open_row is not None:
                    with suppress(StoreCorrupt):
                        row = open_row(run_id, row)
                yield row

    return secret, rows()


def absent(store: Store, run_id: str) -> RunNotFound:
    """What whoever asks for a run is told that is not there: whether it was deleted, and by whom."""
    stone = store.tombstone(run_id)
    return RunNotFound(run_id) if stone is None else RunDeleted(*stone)


def whole(store: Store, run_id: str, row: Row) -> Row:
    """The row with its payload, if that was left out."""
    if row.payload is not None or row.digest is None:
        return row
    return row._replace(payload=store.payload(run_id, row.seq))


def read(store: Store, run_id: str, rule: Callable[[], Rule] | None = None) -> History:
    """Fold a run, without the long arguments and outputs of its steps. Raises `RunNotFound`, `RunDeleted`, `KeyUnavailable` and `StoreCorrupt`."""
    found = pages(store, run_id, payloads_up_to=KEPT_BYTES if rule is None else READ_BYTES)
    first = next(found, None)
    if first is None:
        raise absent(store, run_id)
    history = History(run_id, opened(store, run_id), rule)
    history.take(
        [row if row.kind in _FETCHED else whole(store, run_id, row) for row in page] for page in chain([first], found)
    )
    return history


_FETCHED = frozenset({"intent", "outcome", "signal"})
"""The kinds of entries whose payloads the engine asks for when it needs them."""
