"""What workers tell each other: that there is news, and that they live."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agent_run_ledger.contract import Lease, Listing, Store
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import SECRET, a_row, claim_due, create, enqueue

_DAY_SECONDS = 86_400.0
_LONG_SECONDS = 30.0
"""Longer than any machine takes to tell; only a store that does not tell waits for so long."""


def nothing_is_new(store: Store) -> None:
    """Wait until a wait tells of nothing: a hint may come more than once."""
    for _ in range(200):
        if not store.wait_for_work(0.01):
            return
    raise AssertionError("there is no end of news, though nobody does anything")


class WorkersContract:
    """A part of `StoreContract`."""

    # --- news ---------------------------------------------------------------------------------------------------------

    def test_a_wait_ends_though_nothing_comes(self, store: Store) -> None:
        enqueue(store, "r", due_in=60.0)
        nothing_is_new(store)
        nothing_is_new(store)

    def test_a_wait_ends_as_soon_as_a_run_may_be_due(self, store: Store) -> None:
        """What came since this thread waited last counts too: between a claim that found nothing and the wait, something may come."""
        plain = create(store, "plain")
        enqueue(store, "r")
        (lease,) = claim_due(store)
        in_queue = Listing(1.5, "agent", "q")
        news: dict[str, Callable[[], object]] = {
            "enqueue": lambda: enqueue(store, "later", due_in=60.0),
            "release": lambda: store.release("r", lease.token, due_in=60.0),
            "post": lambda: store.post("r", "signal", b"", "somebody", 1.0),
            "adopt": lambda: store.adopt("adopted", 1, SECRET, in_queue, [[a_row(1)]], [], 60.0),
            "wake": store.wake,
        }
        for what, happens in news.items():
            nothing_is_new(store)
            happens()
            assert store.wait_for_work(_LONG_SECONDS), what
        nothing_is_new(store)
        store.append("plain", plain.token, 0, [a_row(2)], synced=False)
        store.release("plain", plain.token)
        nothing_is_new(store)

    def test_who_waits_in_a_thread_is_told_when_another_enqueues(self, store: Store) -> None:
        waits = threading.Event()
        got: list[Lease] = []
        told: list[bool] = []

        def work() -> None:
            nothing_is_new(store)
            waits.set()
            while not got:
                told.append(store.wait_for_work(_LONG_SECONDS))
                got.extend(claim_due(store))

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        assert waits.wait(60)
        enqueue(store, "r")
        worker.join(60)
        assert [lease.run_id for lease in got] == ["r"]
        assert told
        assert all(told)

    def test_who_waits_for_the_first_time_is_told_of_what_came_before(self, store: Store) -> None:
        told: list[bool] = []
        enqueue(store, "r", due_in=60.0)
        worker = threading.Thread(target=lambda: told.append(store.wait_for_work(_LONG_SECONDS)), daemon=True)
        worker.start()
        worker.join(60)
        assert told == [True]

    def test_who_is_woken_goes_on_in_all_threads(self, store: Store) -> None:
        told: list[bool] = []
        ready = threading.Barrier(5)

        def work() -> None:
            nothing_is_new(store)
            ready.wait(60)
            told.append(store.wait_for_work(_LONG_SECONDS))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait(60)
        store.wake()
        for thread in threads:
            thread.join(60)
        assert told == [True] * 4

    def test_nobody_waits_for_a_store_that_is_closed(self, store: Store) -> None:
        nothing_is_new(store)
        told: list[bool] = []
        worker = threading.Thread(target=lambda: told.append(store.wait_for_work(_LONG_SECONDS)), daemon=True)
        worker.start()
        store.close()
        worker.join(60)
        assert told == [True]
        assert store.wait_for_work(_LONG_SECONDS)
        store.wake()

    # --- beats --------------------------------------------------------------------------------------------------------

    def test_what_a_worker_said_last_is_known_and_how_long_ago(self, store: Store, clock: FakeClock) -> None:
        store.beat("w", b'"\xff\x00"')
        clock.advance(10.0)
        store.beat("v", b"")
        clock.advance(5.0)
        heard = store.workers()
        assert [(beat.worker, beat.said) for beat in heard] == [("w", b'"\xff\x00"'), ("v", b"")]
        assert [15.0 <= heard[0].idle_seconds < 20.0, 5.0 <= heard[1].idle_seconds < 10.0] == [True, True]
        store.beat("w", b"new")
        (first, second) = store.workers()
        assert (first.worker, first.said, second.worker) == ("w", b"new", "v"), "who was heard first stays first"
        assert 0.0 <= first.idle_seconds < 5.0

    def test_a_worker_that_left_is_not_listed(self, store: Store) -> None:
        for worker in ("w", "v"):
            store.beat(worker, b"")
        store.leave("w")
        store.leave("w")
        store.leave("unknown")
        assert [beat.worker for beat in store.workers()] == ["v"]
        store.beat("w", b"again")
        assert [beat.worker for beat in store.workers()] == ["v", "w"]

    def test_a_dead_worker_is_listed_for_a_day_and_then_forgotten(self, store: Store, clock: FakeClock) -> None:
        store.beat("dead", b"")
        clock.advance(_DAY_SECONDS / 2)
        store.beat("old", b"")
        clock.advance(_DAY_SECONDS / 2 - 60.0)
        assert [beat.worker for beat in store.workers()] == ["dead", "old"]
        clock.advance(120.0)
        store.beat("young", b"")
        assert [beat.worker for beat in store.workers()] == ["old", "young"]
        clock.advance(2 * _DAY_SECONDS)
        assert store.workers() == []
