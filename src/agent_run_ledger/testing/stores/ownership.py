"""Who may write: a run is made once, and belongs to one owner at a time."""

from __future__ import annotations

from agent_run_ledger.contract import Append, Lease, Store
from agent_run_ledger.errors import LeaseLost, RunNotFound, RunOwned, StoreError
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import (
    LISTING,
    SECRET,
    a_row,
    create,
    deaths_of,
    head_of,
    refuses,
)


class OwnershipContract:
    """A part of `StoreContract`."""

    # --- create -------------------------------------------------------------------------------------------------------

    def test_create_gives_the_run_to_its_owner_with_the_first_token(self, store: Store) -> None:
        lease = create(store, "r", rows=[a_row(1, "created", b"{}"), a_row(2)])
        assert lease == Lease("r", "a", 1, SECRET)
        head = head_of(store)
        assert (head.run_id, head.owner, head.token, head.inbox, head.note) == ("r", "a", 1, 0, None)
        assert store.read("r") == [a_row(1, "created", b"{}"), a_row(2)]
        assert store.secret("r") == SECRET

    def test_create_gives_the_first_token_that_was_announced(self, store: Store) -> None:
        announced = store.first_token()
        assert [create(store, run_id).token for run_id in ("r", "s")] == [announced, announced]

    def test_a_run_is_created_once_and_a_second_create_changes_nothing(self, store: Store) -> None:
        create(store, "r")
        before = (store.head("r"), store.read("r"), store.secret("r"))
        assert store.create("r", "b", 30.0, b"other".ljust(32), [a_row(1, "created", b"other")], LISTING) is None
        assert store.create("r", "a", 30.0, SECRET, [a_row(1)], LISTING) is None
        assert (store.head("r"), store.read("r"), store.secret("r")) == before

    def test_a_run_that_could_not_be_created_whole_does_not_exist(self, store: Store) -> None:
        refuses(StoreError, lambda: create(store, "r", rows=[a_row(1), a_row(3)]))
        assert store.head("r") is None
        assert store.read("r") == []
        assert create(store, "r").token == 1

    def test_ids_are_data_whatever_they_hold(self, store: Store) -> None:
        ids = ["'; DROP TABLE entries; --", "../../etc/passwd", "ä\u202e\U0001f600", "%s{0}", "a" * 255, "A", "A "]
        for run_id in ids:
            create(store, run_id)
        assert [summary.head.run_id for summary in store.summaries()] == ids
        assert all(len(store.read(run_id)) == 1 for run_id in ids)

    # --- claim, renew, release ----------------------------------------------------------------------------------------

    def test_a_run_that_nobody_knows_cannot_be_claimed(self, store: Store) -> None:
        error = refuses(RunNotFound, lambda: store.claim("r", "a", 30.0))
        assert error.run_id == "r"

    def test_a_run_that_somebody_holds_cannot_be_claimed_and_stays_as_it_is(
        self, store: Store, clock: FakeClock
    ) -> None:
        lease = create(store, "r")
        clock.advance(12.0)
        error = refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        assert (error.run_id, error.owner) == ("r", "a")
        assert abs(error.idle_seconds - 12.0) < 0.001
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)

    def test_a_run_that_was_given_back_goes_to_the_next_with_a_higher_token(self, store: Store) -> None:
        first = create(store, "r")
        store.release("r", first.token)
        head = head_of(store)
        assert head.owner is None
        second = store.claim("r", "b", 30.0)
        assert (second.run_id, second.owner, second.secret) == ("r", "b", SECRET)
        assert second.token > first.token
        head = head_of(store)
        assert (head.owner, head.token) == ("b", second.token)

    def test_a_lease_that_ran_out_can_be_taken_and_not_a_moment_earlier(self, store: Store, clock: FakeClock) -> None:
        first = create(store, "r", lease_seconds=30.0)
        clock.advance(29.0)
        refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        clock.advance(1.5)
        assert store.claim("r", "b", 30.0).token > first.token

    def test_the_wall_clock_decides_about_no_lease(self, store: Store, clock: FakeClock) -> None:
        create(store, "r", lease_seconds=30.0)
        clock.set_wall(clock.now() + 1e6)
        refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        clock.set_wall(0.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)

    def test_an_owner_that_claims_its_own_run_gets_the_lease_it_has_renewed(
        self, store: Store, clock: FakeClock
    ) -> None:
        first = create(store, "r", lease_seconds=30.0)
        clock.advance(20.0)
        assert store.claim("r", "a", 30.0) == first
        clock.advance(20.0)
        refuses(RunOwned, lambda: store.claim("r", "b", 30.0))

    def test_an_owner_that_gave_its_run_back_gets_a_new_token(self, store: Store) -> None:
        first = create(store, "r")
        store.release("r", first.token)
        assert store.claim("r", "a", 30.0).token > first.token

    def test_no_token_is_handed_out_twice(self, store: Store, clock: FakeClock) -> None:
        tokens = [create(store, "r").token]
        for turn in range(6):
            if turn % 2:
                store.release("r", tokens[-1])
            else:
                clock.advance(31.0)
            tokens.append(store.claim("r", "ab"[turn % 2 == 0], 30.0).token)
        assert tokens == sorted(set(tokens))

    def test_renew_moves_the_end_of_the_lease(self, store: Store, clock: FakeClock) -> None:
        lease = create(store, "r", lease_seconds=30.0)
        clock.advance(20.0)
        store.renew("r", lease.token, 30.0)
        clock.advance(20.0)
        error = refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        assert abs(error.idle_seconds - 20.0) < 0.001
        clock.advance(11.0)
        store.claim("r", "b", 30.0)

    def test_renew_tells_how_many_requests_there_are(self, store: Store) -> None:
        lease = create(store, "r")
        assert store.renew("r", lease.token, 30.0) == 0
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.renew("r", lease.token, 30.0) == 1

    def test_an_old_token_renews_nothing(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        error = refuses(LeaseLost, lambda: store.renew("r", old.token, 1e6))
        assert (error.run_id, error.token) == ("r", old.token)
        clock.advance(31.0)
        store.claim("r", "c", 30.0)

    def test_an_old_token_releases_nothing(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        new = store.claim("r", "b", 30.0)
        store.release("r", old.token)
        head = head_of(store)
        assert (head.owner, head.token) == ("b", new.token)
        store.release("unknown", 1)

    # --- deaths -------------------------------------------------------------------------------------------------------

    def test_every_owner_from_whom_the_run_is_taken_counts_as_a_death(self, store: Store, clock: FakeClock) -> None:
        assert create(store, "r").deaths == deaths_of(store) == 0
        for deaths, owner in enumerate("bcd", 1):
            clock.advance(31.0)
            assert store.claim("r", owner, 30.0).deaths == deaths_of(store) == deaths
        assert store.claim("r", "d", 30.0).deaths == 3
        assert [summary.head.deaths for summary in store.summaries()] == [3]

    def test_who_gives_a_run_back_leaves_the_deaths_before_as_they_are(self, store: Store, clock: FakeClock) -> None:
        create(store, "r")
        clock.advance(31.0)
        for _ in range(3):
            lease = store.claim("r", "b", 30.0)
            assert lease.deaths == 1
            store.annotate("r", lease.token, "a note")
            assert store.renew("r", lease.token, 30.0) == 0
            store.release("r", lease.token)
        assert deaths_of(store) == 1

    def test_an_owner_that_claims_its_own_run_late_has_not_died(self, store: Store, clock: FakeClock) -> None:
        first = create(store, "r")
        clock.advance(31.0)
        assert store.claim("r", "a", 30.0) == first
        assert deaths_of(store) == 0

    def test_deaths_are_counted_from_the_last_entry_on(self, store: Store, clock: FakeClock) -> None:
        create(store, "r")
        for owner in "bc":
            clock.advance(31.0)
            lease = store.claim("r", owner, 30.0)
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
        assert deaths_of(store) == 0
        store.release("r", lease.token)
        lease = store.claim("r", "d", 30.0)
        assert lease.deaths == 0
        clock.advance(31.0)
        lease = store.claim("r", "e", 30.0)
        assert lease.deaths == 1
        assert store.append("r", lease.token, 0, [a_row(3), a_row(4)], synced=True)
        assert store.append_all([Append("r", lease.token, 0, [a_row(5)])], synced=True) == [True]
        for owner, deaths in (("f", 1), ("g", 2)):
            clock.advance(31.0)
            assert store.claim("r", owner, 30.0).deaths == deaths

    def test_each_run_has_its_own_deaths(self, store: Store, clock: FakeClock) -> None:
        for run_id in ("r", "s", "t"):
            create(store, run_id)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        clock.advance(31.0)
        store.claim("r", "c", 30.0)
        store.claim("s", "c", 30.0)
        assert [deaths_of(store, run_id) for run_id in ("r", "s", "t")] == [2, 1, 0]
