"""What others ask and see: the inbox, the note, listings, many threads, and the end."""

from __future__ import annotations

import contextlib
from functools import partial

from agent_run_ledger.contract import Lease, Store
from agent_run_ledger.errors import RunNotFound, RunOwned, StoreUnavailable
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import (
    LISTING,
    SECRET,
    a_row,
    create,
    head_of,
    in_threads,
    note_of,
    refuses,
)


class LookingContract:
    """A part of `StoreContract`."""

    # --- inbox and note -----------------------------------------------------------------------------------------------

    def test_requests_are_kept_in_the_order_in_which_they_came(self, store: Store) -> None:
        create(store, "r")
        assert store.post("r", "signal", b'"\xff\x00"', "ann", 1.5) == 1
        assert store.post("r", "cancel", b"", "bob", 2.5) == 2
        requests = store.inbox("r", 0)
        assert [(r.id, r.kind, r.payload, r.who, r.at) for r in requests] == [
            (1, "signal", b'"\xff\x00"', "ann", 1.5),
            (2, "cancel", b"", "bob", 2.5),
        ]
        assert store.inbox("r", 1) == requests[1:]
        assert store.inbox("r", 2) == []
        assert store.inbox("unknown", 0) == []
        head = head_of(store)
        assert head.inbox == 2

    def test_a_request_to_a_run_that_nobody_knows_is_refused(self, store: Store) -> None:
        refuses(RunNotFound, lambda: store.post("r", "cancel", b"", "operator", 1.0))
        assert store.inbox("r", 0) == []

    def test_a_request_needs_no_lease_and_outlives_an_owner(self, store: Store) -> None:
        lease = create(store, "r")
        store.release("r", lease.token)
        assert store.post("r", "cancel", b"", "operator", 1.0) == 1
        lease = store.claim("r", "b", 30.0)
        assert store.renew("r", lease.token, 30.0) == 1
        assert len(store.inbox("r", 0)) == 1

    def test_a_note_goes_with_the_next_entry(self, store: Store) -> None:
        lease = create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        assert note_of(store) == "divergence at 3"
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False)
        assert note_of(store) is None
        store.annotate("r", lease.token, "again")
        store.annotate("r", lease.token, None)
        assert note_of(store) is None

    def test_a_note_goes_with_the_next_claim(self, store: Store) -> None:
        lease = create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        store.release("r", lease.token)
        assert note_of(store) == "divergence at 3"
        store.claim("r", "b", 30.0)
        assert note_of(store) is None

    def test_a_refused_entry_leaves_the_note(self, store: Store) -> None:
        lease = create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False) is False
        assert note_of(store) == "divergence at 3"

    def test_an_old_token_notes_nothing(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        store.annotate("r", old.token, "late")
        store.annotate("unknown", 1, "nobody")
        assert note_of(store) is None

    # --- looking ------------------------------------------------------------------------------------------------------

    def test_a_run_that_nobody_knows_has_no_head_and_no_secret(self, store: Store) -> None:
        assert store.head("r") is None
        assert store.secret("r") == b""
        assert list(store.summaries("r")) == []

    def test_summaries_show_head_and_first_and_last_entry_oldest_run_first(self, store: Store) -> None:
        tokens = {run_id: create(store, run_id, owner=f"o-{run_id}").token for run_id in ("z", "a", "m")}
        store.append("a", tokens["a"], 0, [a_row(2), a_row(3, payload=b"x" * 100_000)], synced=False)
        store.post("m", "cancel", b"", "operator", 1.0)
        found = list(store.summaries())
        assert [summary.head for summary in found] == [store.head(run_id) for run_id in ("z", "a", "m")]
        assert [(summary.first, summary.last) for summary in found] == [
            (store.read(run_id)[0], store.read(run_id)[-1]) for run_id in ("z", "a", "m")
        ]
        assert list(store.summaries("a")) == [found[1]]

    def test_summaries_list_many_runs_once_each_while_others_write(self, store: Store) -> None:
        lease = create(store, "r0")
        for number in range(1, 450):
            create(store, f"r{number}")
        listed = []
        for number, summary in enumerate(store.summaries()):
            listed.append(summary.head.run_id)
            if number < 3:
                assert store.append("r0", lease.token, 0, [a_row(2 + number)], synced=False)
        assert listed == [f"r{number}" for number in range(450)]

    def test_a_sound_store_finds_nothing_wrong_with_itself(self, store: Store) -> None:
        create(store, "r")
        assert list(store.check()) == []

    # --- threads and the end ------------------------------------------------------------------------------------------

    def test_threads_append_to_their_own_runs_at_once(self, store: Store) -> None:
        leases = [create(store, f"r{number}", owner=f"o{number}") for number in range(8)]

        def work(lease: Lease) -> None:
            for seq in range(2, 42):
                assert store.append(lease.run_id, lease.token, 0, [a_row(seq, lease.run_id)], synced=False)
                assert store.read(lease.run_id, seq - 1) == [a_row(seq, lease.run_id)]

        in_threads([partial(work, lease) for lease in leases])
        for lease in leases:
            assert [row.seq for row in store.read(lease.run_id)] == list(range(1, 42))

    def test_of_threads_that_claim_one_run_one_gets_it(self, store: Store) -> None:
        lease = create(store, "r")
        store.release("r", lease.token)
        got: list[Lease] = []

        def work(owner: str) -> None:
            with contextlib.suppress(RunOwned):
                got.append(store.claim("r", owner, 30.0))

        in_threads([partial(work, owner) for owner in "abcdefgh"])
        assert len(got) == 1
        head = head_of(store)
        assert (head.owner, head.token) == (got[0].owner, got[0].token)

    def test_of_threads_that_create_one_run_one_gets_it(self, store: Store) -> None:
        got: list[Lease | None] = []

        def work(owner: str) -> None:
            got.append(store.create("r", owner, 30.0, SECRET, [a_row(1, "created")], LISTING))

        in_threads([partial(work, owner) for owner in "abcdefgh"])
        assert sum(lease is not None for lease in got) == 1
        assert len(store.read("r")) == 1

    def test_of_threads_that_post_each_gets_a_number_of_its_own(self, store: Store) -> None:
        create(store, "r")
        got: list[int] = []
        in_threads([lambda: got.append(store.post("r", "signal", b"", "x", 1.0)) for _ in range(8)])
        assert sorted(got) == list(range(1, 9))
        assert [request.id for request in store.inbox("r", 0)] == list(range(1, 9))

    def test_a_closed_store_says_so_and_can_be_closed_again(self, store: Store) -> None:
        lease = create(store, "r")
        store.close()
        store.close()
        for call in (
            lambda: create(store, "s"),
            lambda: store.claim("r", "a", 30.0),
            lambda: store.renew("r", lease.token, 30.0),
            lambda: store.append("r", lease.token, 0, [a_row(2)], synced=True),
            lambda: store.read("r"),
            lambda: store.payload("r", 1),
            lambda: store.head("r"),
            lambda: list(store.summaries()),
            lambda: store.post("r", "cancel", b"", "operator", 1.0),
        ):
            error = refuses(StoreUnavailable, call)
            assert "closed" in str(error)
