"""Runs that come from another store and go to one: taken in whole, let go of for good, and able to come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_run_ledger.contract import Listing, QueueTerms, Request, Row, Store
from agent_run_ledger.errors import LeaseLost, RunMoved, RunNotFound, StoreError
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import LISTING, SECRET, a_row, create, head_of, refuses

QUEUED = Listing(1.5, "agent", "queue", 3, "key")
ELSEWHERE = "postgresql://elsewhere/ledger"
FIRST, SECOND = Request(1, "signal", b"one", "a person", 2.5), Request(2, "cancel", b"two", "\u00e4", 3.5)


def _taken(store: Store) -> list[str]:
    """Which runs a worker is given."""
    return [lease.run_id for lease in store.claim_due("worker", 30.0, [QueueTerms("queue")], ["agent"], 9)]


class MovingContract:
    """A part of `StoreContract`."""

    # --- adopt --------------------------------------------------------------------------------------------------------

    def test_an_adopted_run_stands_as_it_stood_and_its_next_token_is_larger(self, store: Store) -> None:
        pages = [[a_row(1, "created", b"{}"), a_row(2)], [a_row(3, payload=b"x" * 70_000), a_row(4, payload=b"")]]
        assert store.adopt("r", 7, SECRET, LISTING, pages, [FIRST, SECOND], None)
        head = head_of(store)
        assert (head.owner, head.token, head.inbox, head.listing, head.due_in, head.moved_to) == (
            *(None, 7, 2, LISTING, None, None),
        )
        assert store.read("r") == [*pages[0], *pages[1]]
        assert store.secret("r") == SECRET
        assert store.inbox("r", 0) == [FIRST, SECOND]
        assert store.claim("r", "a", 30.0).token > 7

    def test_an_adopted_run_goes_on(self, store: Store) -> None:
        store.adopt("r", 7, SECRET, LISTING, [[a_row(1)]], [FIRST], None)
        lease = store.claim("r", "a", 30.0)
        assert store.append("r", lease.token, 1, [a_row(2)], synced=True)
        assert store.post("r", "signal", b"", "somebody", 4.0) == 2

    def test_what_was_erased_stays_erased(self, store: Store) -> None:
        erased = a_row(2)._replace(position="1", attempt=1)
        store.adopt("r", 1, b"", LISTING, [[a_row(1), erased]], (), None)
        assert store.read("r") == [a_row(1), erased]
        assert store.payload("r", 2) is None
        assert store.secret("r") == b""

    def test_a_run_that_is_there_is_not_adopted(self, store: Store) -> None:
        create(store, "r")
        before = (store.head("r"), store.read("r"), store.secret("r"), store.inbox("r", 0))
        assert not store.adopt("r", 9, b"other".ljust(32), LISTING, [[a_row(1), a_row(2)]], [FIRST], None)
        after = (store.head("r"), store.read("r"), store.secret("r"), store.inbox("r", 0))
        assert [before[0] and before[0].token, *before[1:]] == [after[0] and after[0].token, *after[1:]]

    def test_a_run_that_cannot_be_read_to_its_end_is_not_adopted_at_all(self, store: Store) -> None:
        def pages() -> Iterator[Sequence[Row]]:
            yield [a_row(1), a_row(2, payload=b"x" * 70_000)]
            raise ZeroDivisionError

        try:
            store.adopt("r", 1, SECRET, LISTING, pages(), [FIRST], None)
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the error of the pages is the caller's to see")
        refuses(StoreError, lambda: store.adopt("r", 1, SECRET, LISTING, [[a_row(1)], [a_row(3)]], [FIRST], None))
        assert store.head("r") is None
        assert (store.read("r"), store.inbox("r", 0), store.secret("r")) == ([], [], b"")
        assert store.adopt("r", 1, SECRET, LISTING, [[a_row(1)]], (), None)

    def test_an_adopted_run_of_a_queue_is_due_when_it_is_said_to_be(self, store: Store, clock: FakeClock) -> None:
        store.adopt("now", 1, SECRET, QUEUED, [[a_row(1)]], (), 0.0)
        store.adopt("later", 1, SECRET, QUEUED, [[a_row(1)]], (), 60.0)
        store.adopt("never", 1, SECRET, QUEUED, [[a_row(1)]], (), None)
        store.adopt("in no queue", 1, SECRET, LISTING, [[a_row(1)]], (), 0.0)
        assert _taken(store) == ["now"]
        clock.advance(61.0)
        assert _taken(store) == ["later"]

    def test_the_deaths_of_a_run_stay_where_its_owners_died(self, store: Store, clock: FakeClock) -> None:
        create(store, "r")
        clock.advance(31.0)
        lease = store.claim("r", "b", 30.0)
        assert lease.deaths == 1
        store.move_away("r", lease.token, ELSEWHERE)
        assert store.adopt("r", lease.token, SECRET, LISTING, (), (), None)
        assert store.adopt("s", lease.token, SECRET, LISTING, [[a_row(1)]], (), None)
        assert [store.claim(run_id, "b", 30.0).deaths for run_id in ("r", "s")] == [0, 0]

    # --- move_away ----------------------------------------------------------------------------------------------------

    def test_a_run_that_was_moved_away_can_be_looked_at_and_nothing_else(self, store: Store, clock: FakeClock) -> None:
        lease = create(store, "r")
        store.move_away("r", lease.token, ELSEWHERE)
        head = head_of(store)
        assert (head.owner, head.token, head.due_in, head.moved_to) == (None, lease.token, None, ELSEWHERE)
        assert [summary.head.moved_to for summary in store.summaries()] == [ELSEWHERE]
        assert len(store.read("r")) == 1
        for seconds in (0.0, 31.0, 1e9):
            clock.advance(seconds)
            error = refuses(RunMoved, lambda: store.claim("r", "a", 30.0))
            assert (error.run_id, error.place) == ("r", ELSEWHERE)
            refuses(RunMoved, lambda: store.post("r", "cancel", b"", "somebody", 1.0))
            refuses(LeaseLost, lambda: store.append("r", lease.token, 0, [a_row(2)], synced=True))
            refuses(LeaseLost, lambda: store.renew("r", lease.token, 30.0))
            store.release("r", lease.token, due_in=0.0)
            store.free_dead()
        assert store.create("r", "b", 30.0, SECRET, [a_row(1)], LISTING) is None
        assert not store.enqueue("r", SECRET, [a_row(1)], QUEUED, 0.0)
        assert (head_of(store).moved_to, len(store.read("r")), store.inbox("r", 0)) == (ELSEWHERE, 1, [])

    def test_no_worker_is_given_a_run_that_was_moved_away(self, store: Store, clock: FakeClock) -> None:
        store.enqueue("r", SECRET, [a_row(1)], QUEUED, 0.0)
        lease = store.claim("r", "a", 30.0)
        store.move_away("r", lease.token, ELSEWHERE)
        assert store.next_due(["queue"], ["agent"]) is None
        clock.advance(1e6)
        assert store.free_dead() == 0
        assert _taken(store) == []

    def test_only_its_owner_moves_a_run_away(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        new = store.claim("r", "b", 30.0)
        error = refuses(LeaseLost, lambda: store.move_away("r", old.token, ELSEWHERE))
        assert (error.run_id, error.token) == ("r", old.token)
        store.release("r", new.token)
        refuses(LeaseLost, lambda: store.move_away("r", new.token, ELSEWHERE))
        refuses(RunNotFound, lambda: store.move_away("unknown", 1, ELSEWHERE))
        assert head_of(store).moved_to is None
        store.claim("r", "c", 30.0)

    def test_a_run_that_was_moved_away_comes_back_with_what_has_become_of_it(self, store: Store) -> None:
        lease = create(store, "r", rows=[a_row(1), a_row(2)])
        store.post("r", FIRST.kind, FIRST.payload, FIRST.who, FIRST.at)
        store.move_away("r", lease.token, ELSEWHERE)
        later = [[a_row(3, payload=b"x" * 70_000)], [a_row(4)]]
        assert store.adopt("r", lease.token + 5, SECRET, LISTING, later, [SECOND], None)
        head = head_of(store)
        assert (head.owner, head.token, head.inbox, head.moved_to) == (None, lease.token + 5, 2, None)
        assert store.read("r") == [a_row(1), a_row(2), *later[0], *later[1]]
        assert store.inbox("r", 0) == [FIRST, SECOND]
        again = store.claim("r", "a", 30.0)
        assert again.token > lease.token + 5
        assert again.secret == SECRET
        assert store.append("r", again.token, 2, [a_row(5)], synced=True)

    def test_what_comes_back_comes_back_whole_or_not_at_all(self, store: Store) -> None:
        lease = create(store, "r")
        store.move_away("r", lease.token, ELSEWHERE)
        refuses(StoreError, lambda: store.adopt("r", 9, SECRET, LISTING, [[a_row(2)], [a_row(4)]], [FIRST], None))
        refuses(StoreError, lambda: store.adopt("r", 9, SECRET, LISTING, [[a_row(1), a_row(2)]], [FIRST], None))
        head = head_of(store)
        assert (head.token, head.inbox, head.moved_to) == (lease.token, 0, ELSEWHERE)
        assert (len(store.read("r")), store.inbox("r", 0)) == (1, [])

    def test_a_run_of_which_nothing_has_become_comes_back_as_it_was(self, store: Store, clock: FakeClock) -> None:
        store.enqueue("r", SECRET, [a_row(1)], QUEUED, 0.0)
        lease = store.claim("r", "a", 30.0)
        store.move_away("r", lease.token, ELSEWHERE)
        assert store.adopt("r", lease.token, SECRET, QUEUED, (), (), 60.0)
        assert not store.adopt("r", lease.token, SECRET, QUEUED, (), (), 60.0)
        assert _taken(store) == []
        clock.advance(61.0)
        assert _taken(store) == ["r"]
        assert head_of(store).token > lease.token
