"""How runs come to workers: they wait in queues, are due at a time, and are claimed by rank and within limits."""

from __future__ import annotations

from collections import Counter
from functools import partial

from agent_run_ledger.contract import Lease, Listing, QueueTerms, Row, Store
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError, StoreUnavailable
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import (
    LISTING,
    SECRET,
    a_row,
    claim_due,
    create,
    deaths_of,
    due_in_of,
    enqueue,
    head_of,
    in_threads,
    refuses,
)

_SOON_SECONDS = 5.0
"""What a slow machine may need for a few calls; times of these tests are told apart by more than that."""


class QueuesContract:
    """A part of `StoreContract`."""

    # --- enqueue ------------------------------------------------------------------------------------------------------

    def test_an_enqueued_run_has_its_entries_and_its_listing_and_nobody_owns_it(self, store: Store) -> None:
        rows = [a_row(1, "created", b"{}"), a_row(2, payload=b"x" * 100_000)]
        listing = Listing(1_790_000_000.1234567, "agent ä", "q", -3, "key")
        assert store.enqueue("r", SECRET, rows, listing, 60.0)
        assert (store.read("r"), store.secret("r"), store.inbox("r", 0)) == (rows, SECRET, [])
        head = head_of(store)
        assert (head.run_id, head.owner, head.inbox, head.note, head.listing) == ("r", None, 0, None, listing)
        assert (head.token, head.idle_seconds, head.lease_left) == (store.first_token() - 1, None, None)
        assert [summary.head.listing for summary in store.summaries()] == [listing]

    def test_what_is_enqueued_twice_is_there_once_and_as_it_was(self, store: Store) -> None:
        listing = enqueue(store, "r", due_in=60.0)
        before = (store.read("r"), store.secret("r"), head_of(store).listing, head_of(store).token)
        other = listing._replace(agent="other", queue="other", priority=9, key="other", created_at=9.5)
        assert not store.enqueue("r", b"o" * 32, [a_row(1, "created", b"other"), a_row(2)], other, 0.0)
        assert (store.read("r"), store.secret("r"), head_of(store).listing, head_of(store).token) == before
        assert claim_due(store, QueueTerms("q"), QueueTerms("other"), agents=["agent", "other"]) == []

    def test_a_run_that_exists_in_no_queue_is_not_enqueued(self, store: Store) -> None:
        lease = create(store, "r")
        assert not store.enqueue("r", SECRET, [a_row(1)], Listing(1.5, "agent", "q"), 0.0)
        assert (head_of(store).listing, head_of(store).owner, head_of(store).token) == (LISTING, "a", lease.token)

    def test_a_run_that_was_enqueued_is_not_created(self, store: Store) -> None:
        enqueue(store, "r")
        assert store.create("r", "a", 30.0, SECRET, [a_row(1)], LISTING) is None
        assert head_of(store).owner is None

    def test_a_run_that_could_not_be_enqueued_whole_does_not_exist(self, store: Store) -> None:
        listing = Listing(1.5, "agent", "q")
        refuses(StoreError, lambda: store.enqueue("r", SECRET, [a_row(1), a_row(3)], listing, 0.0))
        assert (store.head("r"), store.read("r"), store.secret("r")) == (None, [], b"")
        enqueue(store, "r")

    def test_of_threads_that_enqueue_one_run_one_does(self, store: Store) -> None:
        made: list[bool] = []
        listing = Listing(1.5, "agent", "q")
        in_threads([lambda: made.append(store.enqueue("r", SECRET, [a_row(1)], listing, 0.0)) for _ in range(8)])
        assert sorted(made) == [False] * 7 + [True]
        assert len(store.read("r")) == 1

    # --- claims -------------------------------------------------------------------------------------------------------

    def test_a_run_that_is_due_is_claimed_under_a_new_token_and_can_be_gone_on_with(self, store: Store) -> None:
        enqueue(store, "r")
        (lease,) = claim_due(store, owner="w")
        assert lease == Lease("r", "w", store.first_token(), SECRET, "agent")
        head = head_of(store)
        assert (head.owner, head.token) == ("w", lease.token)
        assert head.idle_seconds is not None
        assert head.idle_seconds < _SOON_SECONDS
        assert head.lease_left is not None
        assert 30.0 - _SOON_SECONDS < head.lease_left <= 30.0
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
        assert store.renew("r", lease.token, 30.0) == 0
        assert claim_due(store, owner="v") == []

    def test_an_owner_that_claims_by_name_what_it_claimed_has_the_same_lease(self, store: Store) -> None:
        enqueue(store, "r")
        (lease,) = claim_due(store, owner="w")
        again = store.claim("r", "w", 30.0)
        assert (again.token, again.secret) == (lease.token, lease.secret)

    def test_a_claim_takes_at_most_as_many_as_were_asked_for(self, store: Store) -> None:
        for number in range(5):
            enqueue(store, f"r{number}")
        assert claim_due(store, at_most=0) == []
        taken = [lease.run_id for count in (2, 2, 2, 2) for lease in claim_due(store, at_most=count)]
        assert sorted(taken) == [f"r{number}" for number in range(5)]
        assert len(set(taken[:2])) == 2

    def test_a_claim_takes_no_run_of_another_queue_or_agent(self, store: Store) -> None:
        enqueue(store, "other queue", queue="other")
        enqueue(store, "other agent", agent="other")
        enqueue(store, "mine")
        assert store.enqueue("no agent", SECRET, [a_row(1)], Listing(1.5, None, "q"), 0.0)
        assert store.claim_due("a", 30.0, [], ["agent"], 9) == []
        assert store.claim_due("a", 30.0, [QueueTerms("q")], [], 9) == []
        assert [lease.run_id for lease in claim_due(store)] == ["mine"]
        assert claim_due(store, QueueTerms("nobody's"), agents=["agent", "nobody's"]) == []
        both = claim_due(store, QueueTerms("q"), QueueTerms("other"), agents=["agent", "other"])
        assert sorted((lease.run_id, lease.agent) for lease in both) == [
            ("other agent", "other"),
            ("other queue", "agent"),
        ]

    def test_a_run_is_due_after_its_delay_and_not_before(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r", due_in=60.0)
        due_in = due_in_of(store, "r")
        assert due_in is not None
        assert 60.0 - _SOON_SECONDS < due_in <= 60.0
        clock.advance(50.0)
        assert claim_due(store) == []
        clock.advance(10.5)
        assert [lease.run_id for lease in claim_due(store)] == ["r"]

    def test_the_wall_clock_decides_about_no_due_time(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "delayed", due_in=60.0)
        enqueue(store, "due")
        for wall in (clock.now() + 1e6, 0.0):
            clock.set_wall(wall)
            assert [lease.run_id for lease in claim_due(store)] == (["due"] if wall else [])
        clock.advance(61.0)
        assert [lease.run_id for lease in claim_due(store)] == ["delayed"]

    def test_larger_priorities_come_first_then_what_has_been_due_for_longer_over_all_queues(
        self, store: Store, clock: FakeClock
    ) -> None:
        order = [("d", 0), ("b", 7), ("e", 0), ("f", -1), ("c", 7), ("a", 20), ("g", -1)]
        for number, (run_id, priority) in enumerate(order):
            enqueue(store, run_id, priority=priority, queue="pq"[number % 2], agent=("agent", "other")[number % 3 == 0])
            clock.advance(1.0)
        enqueue(store, "not yet", priority=99, due_in=60.0)
        queues, agents = [QueueTerms("p"), QueueTerms("q")], ["agent", "other"]
        taken = [store.claim_due("a", 30.0, queues, agents, 1) for _ in range(2)]
        taken += [store.claim_due("a", 30.0, queues, agents, 4), store.claim_due("a", 30.0, queues, agents, 9)]
        assert ["".join(lease.run_id for lease in leases) for leases in taken] == ["a", "b", "cdef", "g"]

    def test_what_is_not_due_yet_hides_nothing_that_comes_after_it(self, store: Store) -> None:
        for priority in range(10, 20):
            enqueue(store, f"not yet {priority}", agent="a", priority=priority, due_in=60.0)
        enqueue(store, "first", agent="a", priority=9)
        for priority in range(8):
            enqueue(store, f"later {priority}", agent="b", priority=priority)
        assert [lease.run_id for lease in claim_due(store, agents=["b", "a"], at_most=1)] == ["first"]
        taken = claim_due(store, agents=["b", "a"], at_most=3)
        assert [lease.run_id for lease in taken] == ["later 7", "later 6", "later 5"]

    def test_it_is_when_a_run_is_due_that_counts_and_not_when_it_came(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "late", due_in=40.0)
        enqueue(store, "soon", due_in=20.0)
        clock.advance(10.0)
        enqueue(store, "now")
        clock.advance(60.0)
        assert [lease.run_id for lease in claim_due(store)] == ["now", "soon", "late"]

    def test_a_claim_takes_the_note_away(self, store: Store) -> None:
        enqueue(store, "r")
        (lease,) = claim_due(store)
        store.annotate("r", lease.token, "divergence at 3")
        store.release("r", lease.token, due_in=0.0)
        (lease,) = claim_due(store)
        assert head_of(store).note is None
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False)

    def test_each_claim_of_a_run_has_a_larger_token(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r")
        tokens: list[int] = []
        for turn in range(6):
            (lease,) = claim_due(store, owner="ab"[turn % 2])
            if tokens:
                refuses(LeaseLost, partial(store.append, "r", tokens[-1], 0, [a_row(2)], synced=True))
            tokens.append(lease.token)
            if turn % 3:
                store.release("r", lease.token, due_in=0.0)
            else:
                clock.advance(31.0)
                assert store.free_dead() == 1
        assert tokens == sorted(set(tokens))

    # --- limits -------------------------------------------------------------------------------------------------------

    def test_of_a_queue_no_more_are_owned_than_it_allows_whoever_owns_them(self, store: Store) -> None:
        for number in range(6):
            enqueue(store, f"r{number}")
        enqueue(store, "free", queue="free")
        q = QueueTerms("q", concurrency=3)
        first = claim_due(store, q, owner="a", at_most=2)
        second = claim_due(store, q, QueueTerms("free"), owner="b")
        assert (len(first), sorted(lease.run_id == "free" for lease in second)) == (2, [False, True])
        assert claim_due(store, q, owner="c") == []
        store.release(first[0].run_id, first[0].token)
        assert len(claim_due(store, q, owner="c")) == 1
        assert claim_due(store, q, owner="c") == []

    def test_who_has_a_run_by_name_counts(self, store: Store) -> None:
        enqueue(store, "r0")
        enqueue(store, "r1", key="k")
        enqueue(store, "r2", key="k")
        listing = Listing(1.5, "agent", "q", 0, "k")
        created = store.create("r3", "a", 30.0, SECRET, [a_row(1)], listing)
        assert created is not None
        named = store.claim("r0", "b", 30.0)
        assert claim_due(store, QueueTerms("q", concurrency=2)) == []
        store.release("r0", named.token)
        assert claim_due(store, QueueTerms("q", per_key=1)) == []
        assert len(claim_due(store, QueueTerms("q", concurrency=2))) == 1

    def test_of_one_key_no_more_are_owned_than_its_queue_allows(self, store: Store, clock: FakeClock) -> None:
        for run_id, key in [("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("x", None), ("b1", "b"), ("y", None)]:
            enqueue(store, run_id, key=key)
            clock.advance(1.0)
        enqueue(store, "elsewhere", key="a", queue="p")
        terms = [QueueTerms("q", per_key=1), QueueTerms("p", per_key=1)]
        first = claim_due(store, *terms)
        assert [lease.run_id for lease in first] == ["a0", "b0", "x", "y", "elsewhere"]
        assert claim_due(store, *terms) == []
        store.release("a0", first[0].token)
        assert [lease.run_id for lease in claim_due(store, *terms, owner="b")] == ["a1"]
        assert [lease.run_id for lease in claim_due(store, QueueTerms("q", per_key=2), owner="b")] == ["a2", "b1"]

    def test_both_limits_of_a_queue_hold(self, store: Store, clock: FakeClock) -> None:
        for number in range(8):
            enqueue(store, f"r{number}", key="ab"[number % 2])
            clock.advance(1.0)
        leases = claim_due(store, QueueTerms("q", concurrency=3, per_key=2))
        assert [lease.run_id for lease in leases] == ["r0", "r1", "r2"]

    def test_a_key_at_its_limit_keeps_no_others_waiting_and_changes_no_order(
        self, store: Store, clock: FakeClock
    ) -> None:
        for number in range(40):
            enqueue(store, f"a{number}", key="a", priority=9)
        enqueue(store, "b", key="b", priority=9)
        clock.advance(1.0)
        for run_id in ("c", "d", "e"):
            enqueue(store, run_id)
            clock.advance(1.0)
        leases = claim_due(store, QueueTerms("q", per_key=1), at_most=3)
        assert [lease.run_id[0] for lease in leases] == ["a", "b", "c"]
        assert [lease.run_id for lease in claim_due(store, QueueTerms("q", per_key=1), at_most=3)] == ["d", "e"]

    def test_threads_that_claim_at_once_pass_no_limit_and_share_no_run(self, store: Store) -> None:
        for number in range(60):
            enqueue(store, f"r{number}", key="abc"[number % 3])
        q = QueueTerms("q", concurrency=11, per_key=4)
        for _ in range(3):
            got: list[Lease] = []

            def work(owner: str, into: list[Lease] = got) -> None:
                for _ in range(4):
                    into += claim_due(store, q, owner=owner, at_most=2)

            in_threads([partial(work, owner) for owner in "abcdefgh"])
            assert len({lease.run_id for lease in got}) == len(got) <= 11
            got += claim_due(store, q, owner="i")  # what somebody was looking at may have been skipped by others
            keys = Counter(head_of(store, lease.run_id).listing.key for lease in got)
            assert (len(got), max(keys.values())) == (11, 4)
            for lease in got:
                head = head_of(store, lease.run_id)
                assert (head.owner, head.token) == (lease.owner, lease.token)
                store.release(lease.run_id, lease.token, due_in=0.0)

    def test_threads_that_claim_at_once_get_each_run_once(self, store: Store) -> None:
        for number in range(60):
            enqueue(store, f"r{number}", priority=number % 3)
        got: list[Lease] = []

        def work(owner: str) -> None:
            misses = 0
            while misses < 3:
                leases = claim_due(store, owner=owner, at_most=4)
                misses += not leases
                got.extend(leases)

        in_threads([partial(work, owner) for owner in "abcdefgh"])
        got += claim_due(store, owner="i")
        assert sorted(lease.run_id for lease in got) == sorted(f"r{number}" for number in range(60))
        assert all(head_of(store, lease.run_id).owner == lease.owner for lease in got)

    # --- when runs are due --------------------------------------------------------------------------------------------

    def test_a_run_that_was_given_back_is_due_when_its_owner_said(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r")
        (lease,) = claim_due(store)
        store.release("r", lease.token, due_in=60.0)
        clock.advance(50.0)
        assert claim_due(store) == []
        clock.advance(10.5)
        (lease,) = claim_due(store)
        store.release("r", lease.token, due_in=0.0)
        assert len(claim_due(store)) == 1

    def test_a_run_that_waits_for_a_request_is_not_due_before_one_comes(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r")
        (lease,) = claim_due(store)
        store.release("r", lease.token)
        assert due_in_of(store, "r") is None
        clock.advance(1e6)
        assert claim_due(store) == []
        assert store.next_due(["q"], ["agent"]) is None
        store.post("r", "signal", b"", "somebody", 1.0)
        assert [each.run_id for each in claim_due(store)] == ["r"]

    def test_a_run_whose_owner_has_not_seen_all_requests_is_due_at_once(self, store: Store) -> None:
        enqueue(store, "r")
        for looked, is_due in ((0, True), (1, True), (2, False), (2, True)):
            (lease,) = claim_due(store)
            store.post("r", "signal", b"", "somebody", 1.0)
            if not is_due:
                looked = head_of(store).inbox
            store.release("r", lease.token, inbox=looked, due_in=60.0)
            assert (store.next_due(["q"], ["agent"]) == 0.0) is is_due
            if not is_due:
                store.post("r", "signal", b"", "somebody", 1.0)

    def test_who_has_lost_a_run_says_no_more_when_it_is_due(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r")
        (old,) = claim_due(store)
        clock.advance(31.0)
        assert store.free_dead() == 1
        store.release("r", old.token)
        assert store.next_due(["q"], ["agent"]) == 0.0
        (new,) = claim_due(store, owner="b")
        store.release("r", old.token, due_in=60.0)
        assert head_of(store).owner == "b"
        store.release("r", new.token, due_in=60.0)
        store.release("r", new.token, due_in=0.0)
        assert claim_due(store) == []

    def test_a_request_brings_a_run_forward_and_never_puts_it_off(self, store: Store, clock: FakeClock) -> None:
        enqueue(store, "r", due_in=60.0)
        store.post("r", "signal", b"", "somebody", 1.0, due_in=90.0)
        due_in = due_in_of(store, "r")
        assert due_in is not None
        assert due_in <= 60.0
        store.post("r", "signal", b"", "somebody", 1.0, due_in=30.0)
        clock.advance(20.0)
        assert claim_due(store) == []
        clock.advance(10.5)
        (lease,) = claim_due(store)
        store.release("r", lease.token, inbox=2)
        store.post("r", "signal", b"", "somebody", 1.0, due_in=60.0)
        clock.advance(50.0)
        assert claim_due(store) == []
        clock.advance(10.5)
        assert len(claim_due(store)) == 1

    def test_a_run_in_no_queue_is_never_due(self, store: Store, clock: FakeClock) -> None:
        listing = Listing(1.5, "agent")
        lease = store.create("r", "a", 30.0, SECRET, [a_row(1)], listing)
        assert lease is not None
        for act in (
            lambda token: None,
            lambda token: store.post("r", "signal", b"", "somebody", 1.0),
            lambda token: store.release("r", token, due_in=0.0),
        ):
            act(lease.token)
            assert due_in_of(store, "r") is None
            clock.advance(31.0)
            assert (store.free_dead(), claim_due(store), store.next_due(["q"], ["agent"])) == (0, [], None)
        lease = store.claim("r", "b", 30.0)
        assert due_in_of(store, "r") is None
        store.release("r", lease.token, inbox=0)
        assert due_in_of(store, "r") is None

    def test_a_run_that_is_created_in_a_queue_is_due_once_its_owner_is_dead(
        self, store: Store, clock: FakeClock
    ) -> None:
        listing = Listing(1.5, "agent", "q", 3, "k")
        lease = store.create("r", "a", 30.0, SECRET, [a_row(1)], listing)
        assert lease == Lease("r", "a", store.first_token(), SECRET)
        head = head_of(store)
        assert head.listing == listing
        assert head.due_in is not None
        assert head.due_in <= 0.0
        assert claim_due(store, owner="b") == []
        clock.advance(31.0)
        assert store.free_dead() == 1
        (taken,) = claim_due(store, owner="b")
        assert taken.token > lease.token

    def test_a_run_that_was_claimed_by_name_is_due_once_its_owner_is_dead(self, store: Store, clock: FakeClock) -> None:
        """Whatever it waited for before: its owner may have gone on with it."""
        enqueue(store, "waits")
        enqueue(store, "timer", due_in=1e6)
        (lease,) = claim_due(store)
        store.release("waits", lease.token)
        for run_id in ("waits", "timer"):
            store.claim(run_id, "a", 30.0)
        assert claim_due(store, owner="b") == []
        clock.advance(31.0)
        assert store.free_dead() == 2
        assert sorted(each.run_id for each in claim_due(store, owner="b")) == ["timer", "waits"]

    def test_what_is_due_next_is_known(self, store: Store, clock: FakeClock) -> None:
        queues, agents = ["q", "p"], ["agent", "other"]
        assert store.next_due(queues, agents) is None
        enqueue(store, "late", due_in=90.0, priority=9)
        enqueue(store, "soon", due_in=60.0, queue="p", agent="other")
        enqueue(store, "elsewhere", queue="elsewhere")
        enqueue(store, "another's", agent="another")
        due_in = store.next_due(queues, agents)
        assert due_in is not None
        assert 60.0 - _SOON_SECONDS < due_in <= 60.0
        due_in = store.next_due(["q"], agents)
        assert due_in is not None
        assert 90.0 - _SOON_SECONDS < due_in <= 90.0
        assert store.next_due(["p"], ["agent"]) is None
        assert store.next_due([], agents) is store.next_due(queues, []) is None
        clock.advance(61.0)
        assert store.next_due(queues, agents) == 0.0
        assert len(claim_due(store, QueueTerms("p"), agents=agents)) == 1
        due_in = store.next_due(queues, agents)
        assert due_in is not None
        assert 0.0 < due_in <= 29.0

    # --- dead owners --------------------------------------------------------------------------------------------------

    def test_only_queued_runs_whose_leases_ran_out_are_taken_from_their_owners(
        self, store: Store, clock: FakeClock
    ) -> None:
        for run_id in ("dead", "renewed", "waits", "not due"):
            enqueue(store, run_id, due_in=1e6 if run_id == "not due" else 0.0)
        leases = {lease.run_id: lease for lease in claim_due(store)}
        store.release("waits", leases["waits"].token)
        create(store, "plain")
        assert store.free_dead() == 0
        clock.advance(20.0)
        store.renew("renewed", leases["renewed"].token, 30.0)
        enqueue(store, "young")
        claim_due(store, owner="b")
        clock.advance(11.0)
        assert store.free_dead() == 1
        assert store.free_dead() == 0
        owners = {summary.head.run_id: summary.head.owner for summary in store.summaries()}
        assert owners == {
            "dead": None, "renewed": "a", "waits": None, "not due": None, "plain": "a", "young": "b",
        }  # fmt: skip
        refuses(LeaseLost, lambda: store.append("dead", leases["dead"].token, 0, [a_row(2)], synced=True))
        (again,) = claim_due(store, owner="b")
        assert again.run_id == "dead"
        assert again.token > leases["dead"].token

    def test_a_lease_that_runs_out_alone_frees_nothing_in_a_queue(self, store: Store, clock: FakeClock) -> None:
        """Whoever serves queues frees the dead first; else a claim would have to look at all that is owned."""
        enqueue(store, "r")
        (lease,) = claim_due(store)
        clock.advance(31.0)
        assert claim_due(store, owner="b") == []
        assert store.renew("r", lease.token, 30.0) == 0
        assert store.free_dead() == 0

    def test_of_threads_that_free_the_dead_each_run_is_counted_once(self, store: Store, clock: FakeClock) -> None:
        for number in range(12):
            enqueue(store, f"r{number}")
        claim_due(store)
        clock.advance(31.0)
        freed: list[int] = []
        in_threads([lambda: freed.append(store.free_dead()) for _ in range(6)])
        assert sum(freed) == 12

    def test_the_deaths_of_a_run_are_counted_wherever_it_is_taken_and_told_to_whoever_claims_it(
        self, store: Store, clock: FakeClock
    ) -> None:
        enqueue(store, "r")
        enqueue(store, "given back")
        for deaths, queue in enumerate((QueueTerms("q"), QueueTerms("q", 2, 1), QueueTerms("q"))):
            leases = {lease.run_id: lease for lease in claim_due(store, queue)}
            assert {run_id: lease.deaths for run_id, lease in leases.items()} == {"r": deaths, "given back": 0}
            store.release("given back", leases["given back"].token, due_in=0.0)
            clock.advance(31.0)
            assert store.free_dead() == 1
            assert deaths_of(store, "r") == deaths + 1
        assert store.claim("r", "b", 30.0).deaths == 3
        clock.advance(31.0)
        lease = store.claim("r", "c", 30.0)
        assert lease.deaths == 4
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
        store.release("r", lease.token, due_in=0.0)
        assert {lease.run_id: lease.deaths for lease in claim_due(store)} == {"r": 0, "given back": 0}

    # --- adopt --------------------------------------------------------------------------------------------------------

    def test_an_adopted_run_is_there_as_it_stood_and_nobody_owns_it(self, store: Store) -> None:
        other = Listing(1_790_000_000.1234567, "agent", "q", 2, "key")
        rows = [
            a_row(seq, "created" if seq == 1 else "note", b"x" * 100_000 if seq == 3 else b"y") for seq in range(1, 8)
        ]
        source = {"s1": b'"\xff\x00"', "s2": b""}
        lease = create(store, "source")
        for who, payload in source.items():
            store.post("source", "signal", payload, who, 2.5)
        requests = store.inbox("source", 0)
        assert store.adopt(
            "r", lease.token + 40, SECRET, other, iter([rows[:2], rows[2:5], [], rows[5:]]), requests, None
        )
        assert (store.read("r"), store.secret("r"), store.inbox("r", 0)) == (rows, SECRET, requests)
        head = head_of(store)
        assert (head.owner, head.token, head.inbox, head.note) == (None, lease.token + 40, 2, None)
        assert (head.listing, head.due_in, head.lease_left) == (other, None, None)
        assert store.post("r", "signal", b"", "somebody", 1.0) == 3
        claimed = store.claim("r", "b", 30.0)
        assert claimed.token > lease.token + 40
        assert store.append("r", claimed.token, 3, [a_row(8)], synced=True)

    def test_a_run_is_adopted_whole_or_not_at_all(self, store: Store) -> None:
        def pages() -> object:
            yield [a_row(1), a_row(2)]
            yield [a_row(3)]
            raise ConnectionError("the source is away")

        def gap() -> object:
            yield [a_row(1)]
            yield [a_row(3)]

        listing = Listing(1.5, "agent", "q")
        for broken, kind in ((pages, ConnectionError), (gap, StoreError)):
            try:
                store.adopt("r", 7, SECRET, listing, broken(), [], 0.0)  # type: ignore[arg-type]
            except kind:
                pass
            else:
                raise AssertionError("what could not be read was adopted")
            assert (store.head("r"), store.read("r"), store.secret("r"), store.inbox("r", 0)) == (None, [], b"", [])
        assert claim_due(store) == []
        assert store.adopt("r", 7, SECRET, listing, [[a_row(1)]], [], 0.0)

    def test_a_run_that_exists_is_not_adopted_and_stays_as_it_is(self, store: Store) -> None:
        lease = create(store, "r")
        listing = Listing(1.5, "agent", "q")
        pages: list[list[Row]] = [[a_row(1), a_row(2)]]
        assert not store.adopt("r", 99, b"o" * 32, listing, pages, [], 0.0)
        head = head_of(store)
        assert (head.owner, head.token, head.listing, len(store.read("r"))) == ("a", lease.token, LISTING, 1)

    def test_an_adopted_run_is_due_as_it_was_said(self, store: Store, clock: FakeClock) -> None:
        rows = [[a_row(1)]]
        for run_id, due_in in (("now", 0.0), ("later", 60.0), ("waits", None)):
            assert store.adopt(run_id, 7, SECRET, Listing(1.5, "agent", "q"), rows, [], due_in)
        assert store.adopt("plain", 7, SECRET, Listing(1.5, "agent"), rows, [], 0.0)
        assert [(lease.run_id, lease.token > 7) for lease in claim_due(store)] == [("now", True)]
        clock.advance(61.0)
        assert [lease.run_id for lease in claim_due(store)] == ["later"]
        assert due_in_of(store, "waits") is due_in_of(store, "plain") is None

    # --- the end ------------------------------------------------------------------------------------------------------

    def test_who_closes_in_good_order_gives_runs_of_queues_back_and_they_are_due(self, store: Store) -> None:
        enqueue(store, "r")
        claim_due(store)
        assert store.free_dead() == 0
        store.close()
        for call in (
            lambda: enqueue(store, "s"),
            lambda: claim_due(store),
            lambda: store.next_due(["q"], ["agent"]),
            lambda: store.free_dead(),
            lambda: store.beat("w", b""),
            lambda: store.workers(),
            lambda: store.adopt("s", 1, SECRET, LISTING, [[a_row(1)]], [], None),
        ):
            error = refuses(StoreUnavailable, call)
            assert "closed" in str(error)

    def test_a_run_that_nobody_knows_has_no_due_time_to_bring_forward(self, store: Store) -> None:
        refuses(RunNotFound, lambda: store.post("r", "signal", b"", "somebody", 1.0, due_in=5.0))
        store.release("r", 1, due_in=0.0)
        assert claim_due(store) == []
