"""What may leave a store: what runs that have ended have kept, behind an entry that says so, and such runs as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from agent_run_ledger.contract import Erasure, Lease, Request, Row, Store, Tombstone
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError
from agent_run_ledger.testing.stores.words import LISTING, SECRET, a_row, create, head_of, refuses

LARGE = b"x" * 100_000


def _ended(store: Store, rows: Sequence[Row] = (), run_id: str = "r") -> Lease:
    """A run of three entries, of which the second has a payload, or of these, that has ended, and a lease to erase it."""
    lease = create(store, run_id)
    rows = rows or [a_row(2, payload=b"two"), a_row(3, "finished", b"end", state="COMPLETED")]
    assert store.append(run_id, lease.token, 0, rows, synced=True)
    return lease


def _said(seq: int) -> Row:
    return a_row(seq, "erased", state="COMPLETED")


def _stone(size: int, run_id: str = "r") -> Tombstone:
    return Tombstone(run_id, size, b"root".ljust(32), "ann", "old", 2.5)


class ForgettingContract:
    """A part of `StoreContract`."""

    # --- erase --------------------------------------------------------------------------------------------------------

    def test_what_is_erased_is_gone_with_all_that_tells_of_it_and_nothing_else_changes(self, store: Store) -> None:
        intent = a_row(2, "intent", b"two")._replace(fingerprint=b"f" * 32)
        lease = _ended(store, [intent, a_row(3, payload=LARGE), a_row(4, "finished", b"end", state="COMPLETED")])
        before = store.read("r")
        store.erase("r", lease.token, [_said(5)], Erasure([(2, 3)]))
        rows = store.read("r")
        assert rows[0] == before[0]
        assert rows[1:3] == [row._replace(payload=None, digest=None, fingerprint=None) for row in before[1:3]]
        assert rows[3:] == [before[3], _said(5)]
        assert (store.payload("r", 2), store.payload("r", 3), store.payload("r", 4)) == (None, None, b"end")
        assert store.secret("r") == SECRET
        assert list(store.check()) == []

    def test_a_large_payload_that_another_entry_shares_stays_that_ones(self, store: Store) -> None:
        rows = [a_row(seq, payload=LARGE) for seq in (2, 3)]
        lease = _ended(store, [*rows, a_row(4, "finished", state="COMPLETED")])
        store.erase("r", lease.token, [_said(5)], Erasure([(2, 2)]))
        assert (store.payload("r", 2), store.payload("r", 3)) == (None, LARGE)
        store.erase("r", lease.token, [_said(6)], Erasure([(3, 3)]))
        assert (store.payload("r", 2), store.payload("r", 3)) == (None, None)
        assert list(store.check()) == []

    def test_requests_lose_what_was_asked_and_who_asked(self, store: Store) -> None:
        lease = create(store, "r")
        for number in range(3):
            store.post("r", "signal", b"said %d" % number, "ann", 2.5)
        store.append("r", lease.token, 3, [a_row(2, "finished", state="COMPLETED")], synced=True)
        store.erase("r", lease.token, [_said(3)], Erasure([], [(1, 1), (3, 3)]))
        kept = Request(2, "signal", b"said 1", "ann", 2.5)
        assert store.inbox("r", 0) == [Request(1, "signal", b"{}", "", 2.5), kept, Request(3, "signal", b"{}", "", 2.5)]
        assert head_of(store).inbox == 3

    def test_the_secret_goes_only_where_that_is_asked(self, store: Store) -> None:
        lease = _ended(store)
        store.erase("r", lease.token, [_said(4)], Erasure([(1, 3)], secret=True))
        assert store.secret("r") == b""
        assert store.claim("r", "a", 30.0).secret == b""

    def test_an_old_token_erases_nothing(self, store: Store) -> None:
        lease = _ended(store)
        store.release("r", lease.token)
        store.claim("r", "b", 30.0)
        before = store.read("r")
        refuses(LeaseLost, lambda: store.erase("r", lease.token, [_said(4)], Erasure([(1, 3)], secret=True)))
        refuses(RunNotFound, lambda: store.erase("unknown", 1, [_said(4)], Erasure([(1, 3)])))
        assert (store.read("r"), store.secret("r")) == (before, SECRET)

    def test_an_entry_that_does_not_follow_erases_nothing(self, store: Store) -> None:
        lease = _ended(store)
        before = store.read("r")
        refuses(StoreError, lambda: store.erase("r", lease.token, [_said(7)], Erasure([(1, 3)], secret=True)))
        assert (store.read("r"), store.secret("r")) == (before, SECRET)

    def test_to_erase_once_more_as_it_was_does_nothing_more(self, store: Store) -> None:
        lease = _ended(store)
        for _ in range(2):
            store.erase("r", lease.token, [_said(4)], Erasure([(1, 3)]))
        assert [row.seq for row in store.read("r")] == [1, 2, 3, 4]

    def test_the_note_goes_with_what_is_erased(self, store: Store) -> None:
        lease = _ended(store)
        store.annotate("r", lease.token, "it says what it should not")
        store.erase("r", lease.token, [_said(4)], Erasure([(1, 3)]))
        assert head_of(store).note is None

    def test_a_sealed_secret_is_put_in_the_place_of_the_one_that_stands_there_and_of_no_plain_one(
        self, store: Store
    ) -> None:
        sealed, anew = b"sealed".ljust(90), b"anew".ljust(90)
        assert store.enqueue("sealed", sealed, [a_row(1)], LISTING, 0.0)
        create(store, "plain")
        assert not store.reseal("sealed", anew, b"other".ljust(90))
        assert not store.reseal("sealed", sealed, SECRET)
        assert not store.reseal("plain", SECRET, anew)
        assert not store.reseal("unknown", sealed, anew)
        assert store.reseal("sealed", sealed, anew)
        assert (store.secret("sealed"), store.secret("plain")) == (anew, SECRET)

    # --- delete -------------------------------------------------------------------------------------------------------

    def test_of_a_deleted_run_a_tombstone_is_left_and_its_id_is_not_used_again(self, store: Store) -> None:
        lease = _ended(store, [a_row(2, payload=LARGE), a_row(3, "finished", state="COMPLETED")])
        store.post("r", "signal", b"{}", "ann", 2.5)
        create(store, "other")
        store.delete(_stone(3), lease.token)
        assert store.tombstone("r") == _stone(3)
        assert (store.head("r"), store.read("r"), store.secret("r"), store.inbox("r", 0)) == (None, [], b"", [])
        assert [summary.head.run_id for summary in store.summaries()] == ["other"]
        assert list(store.check()) == []
        assert store.create("r", "a", 30.0, SECRET, [a_row(1)], LISTING) is None
        assert not store.enqueue("r", SECRET, [a_row(1)], LISTING, 0.0)
        assert not store.adopt("r", 9, SECRET, LISTING, [[a_row(1)]], (), None)
        refuses(RunNotFound, lambda: store.claim("r", "a", 30.0))
        store.release("r", lease.token)

    def test_a_run_that_goes_on_or_has_another_size_is_not_deleted(self, store: Store) -> None:
        going_on = create(store, "going on")
        refuses(StoreError, lambda: store.delete(_stone(1, "going on"), going_on.token))
        lease = _ended(store)
        refuses(StoreError, lambda: store.delete(_stone(2), lease.token))
        store.release("r", lease.token)
        store.claim("r", "b", 30.0)
        refuses(LeaseLost, lambda: store.delete(_stone(3), lease.token))
        refuses(RunNotFound, lambda: store.delete(_stone(3, "unknown"), 1))
        assert [len(store.read(run_id)) for run_id in ("going on", "r")] == [1, 3]
        assert (store.tombstone("r"), store.tombstone("going on")) == (None, None)

    def test_what_may_still_hold_the_bytes_is_said_in_sentences(self, store: Store) -> None:
        assert all(type(said) is str and said for said in store.scrub())
        lease = _ended(store)
        assert len(store.read("r")) == 3
        assert store.renew("r", lease.token, 30.0) == 0
