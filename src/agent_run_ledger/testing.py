"""For tests: a clock that moves when told, and the store's promise as a suite that any store can be put through."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from agent_run_ledger.contract import Append, Head, Lease, Row, Store
from agent_run_ledger.errors import LeaseLost, LedgerError, RunNotFound, RunOwned, StoreError, StoreUnavailable
from agent_run_ledger.stores.memory import MemoryStore

__all__ = ["FakeClock", "MemoryStore", "StoreContract"]


class FakeClock:
    """A `Clock` that stands still until `advance` or `sleep` moves it.

    >>> clock = FakeClock()
    >>> started = clock.elapsed()
    >>> clock.sleep(30)
    >>> clock.elapsed() - started
    30.0
    """

    def __init__(self, now: float = 1_700_000_000.0, elapsed: float = 1_000.0) -> None:
        self._mutex = threading.Lock()
        self._now = now
        self._elapsed = elapsed
        self.sleeps: list[float] = []
        """What `sleep` was asked for, in order."""

    def now(self) -> float:
        return self._now

    def elapsed(self) -> float:
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks."""
        with self._mutex:
            self._now += seconds
            self._elapsed += seconds

    def set_wall(self, now: float) -> None:
        """Set the wall clock, as an administrator does: leases must not care."""
        self._now = now


def a_row(seq: int, kind: str = "note", payload: bytes | None = None, *, state: str = "RUNNING") -> Row:
    """An entry as an engine could write it; a store never looks inside."""
    body = b'{"seq":%d,"kind":"%s","state":"%s"}' % (seq, kind.encode(), state.encode())
    digest = None if payload is None else bytes(reversed(payload[:32])).ljust(32, b"\0")
    return Row(seq, kind, None, None, body, bytes([seq % 256]) * 32, payload, digest)


class StoreContract:
    """The conformance suite of `contract.Store`: a subclass per store, with pytest fixtures `store` and `clock`.

    `store` is a fresh, empty store that measures leases by `clock`, a `FakeClock`.

        class TestMyStore(StoreContract):
            @pytest.fixture
            def clock(self) -> FakeClock: return FakeClock()

            @pytest.fixture
            def store(self, clock: FakeClock) -> Iterator[Store]: ...
    """

    # --- create -------------------------------------------------------------------------------------------------------

    def test_create_gives_the_run_to_its_owner_with_the_first_token(self, store: Store) -> None:
        lease = _create(store, "r", rows=[a_row(1, "created", b"{}"), a_row(2)])
        assert lease == Lease("r", "a", 1, _SECRET)
        head = _head(store)
        assert (head.run_id, head.owner, head.token, head.inbox, head.note) == ("r", "a", 1, 0, None)
        assert store.read("r") == [a_row(1, "created", b"{}"), a_row(2)]
        assert store.secret("r") == _SECRET

    def test_create_gives_the_first_token_that_was_announced(self, store: Store) -> None:
        announced = store.first_token()
        assert [_create(store, run_id).token for run_id in ("r", "s")] == [announced, announced]

    def test_a_run_is_created_once_and_a_second_create_changes_nothing(self, store: Store) -> None:
        _create(store, "r")
        before = (store.head("r"), store.read("r"), store.secret("r"))
        assert store.create("r", "b", 30.0, b"other".ljust(32), [a_row(1, "created", b'{"goal":"other"}')]) is None
        assert store.create("r", "a", 30.0, _SECRET, [a_row(1)]) is None
        assert (store.head("r"), store.read("r"), store.secret("r")) == before

    def test_a_run_that_could_not_be_created_whole_does_not_exist(self, store: Store) -> None:
        _refuses(StoreError, lambda: _create(store, "r", rows=[a_row(1), a_row(3)]))
        assert store.head("r") is None
        assert store.read("r") == []
        assert _create(store, "r").token == 1

    def test_ids_are_data_whatever_they_hold(self, store: Store) -> None:
        ids = ["'; DROP TABLE entries; --", "../../etc/passwd", "ä\u202e\U0001f600", "%s{0}", "a" * 255, "A", "A "]
        for run_id in ids:
            _create(store, run_id)
        assert [summary.head.run_id for summary in store.summaries()] == ids
        assert all(len(store.read(run_id)) == 1 for run_id in ids)

    # --- claim, renew, release ----------------------------------------------------------------------------------------

    def test_a_run_that_nobody_knows_cannot_be_claimed(self, store: Store) -> None:
        error = _refuses(RunNotFound, lambda: store.claim("r", "a", 30.0))
        assert error.run_id == "r"

    def test_a_run_that_somebody_holds_cannot_be_claimed_and_stays_as_it_is(
        self, store: Store, clock: FakeClock
    ) -> None:
        lease = _create(store, "r")
        clock.advance(12.0)
        error = _refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        assert (error.run_id, error.owner) == ("r", "a")
        assert abs(error.idle_seconds - 12.0) < 0.001
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)

    def test_a_run_that_was_given_back_goes_to_the_next_with_a_higher_token(self, store: Store) -> None:
        first = _create(store, "r")
        store.release("r", first.token)
        head = _head(store)
        assert head.owner is None
        second = store.claim("r", "b", 30.0)
        assert (second.run_id, second.owner, second.secret) == ("r", "b", _SECRET)
        assert second.token > first.token
        head = _head(store)
        assert (head.owner, head.token) == ("b", second.token)

    def test_a_lease_that_ran_out_can_be_taken_and_not_a_moment_earlier(self, store: Store, clock: FakeClock) -> None:
        first = _create(store, "r", lease_seconds=30.0)
        clock.advance(29.0)
        _refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        clock.advance(1.5)
        assert store.claim("r", "b", 30.0).token > first.token

    def test_the_wall_clock_decides_about_no_lease(self, store: Store, clock: FakeClock) -> None:
        _create(store, "r", lease_seconds=30.0)
        clock.set_wall(clock.now() + 1e6)
        _refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        clock.set_wall(0.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)

    def test_an_owner_that_claims_its_own_run_gets_the_lease_it_has_renewed(
        self, store: Store, clock: FakeClock
    ) -> None:
        first = _create(store, "r", lease_seconds=30.0)
        clock.advance(20.0)
        assert store.claim("r", "a", 30.0) == first
        clock.advance(20.0)
        _refuses(RunOwned, lambda: store.claim("r", "b", 30.0))

    def test_an_owner_that_gave_its_run_back_gets_a_new_token(self, store: Store) -> None:
        first = _create(store, "r")
        store.release("r", first.token)
        assert store.claim("r", "a", 30.0).token > first.token

    def test_no_token_is_handed_out_twice(self, store: Store, clock: FakeClock) -> None:
        tokens = [_create(store, "r").token]
        for turn in range(6):
            if turn % 2:
                store.release("r", tokens[-1])
            else:
                clock.advance(31.0)
            tokens.append(store.claim("r", "ab"[turn % 2 == 0], 30.0).token)
        assert tokens == sorted(set(tokens))

    def test_renew_moves_the_end_of_the_lease(self, store: Store, clock: FakeClock) -> None:
        lease = _create(store, "r", lease_seconds=30.0)
        clock.advance(20.0)
        store.renew("r", lease.token, 30.0)
        clock.advance(20.0)
        error = _refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
        assert abs(error.idle_seconds - 20.0) < 0.001
        clock.advance(11.0)
        store.claim("r", "b", 30.0)

    def test_renew_tells_how_many_requests_there_are(self, store: Store) -> None:
        lease = _create(store, "r")
        assert store.renew("r", lease.token, 30.0) == 0
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.renew("r", lease.token, 30.0) == 1

    def test_an_old_token_renews_nothing(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        error = _refuses(LeaseLost, lambda: store.renew("r", old.token, 1e6))
        assert (error.run_id, error.token) == ("r", old.token)
        clock.advance(31.0)
        store.claim("r", "c", 30.0)

    def test_an_old_token_releases_nothing(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        new = store.claim("r", "b", 30.0)
        store.release("r", old.token)
        head = _head(store)
        assert (head.owner, head.token) == ("b", new.token)
        store.release("unknown", 1)

    # --- append and read ----------------------------------------------------------------------------------------------

    def test_what_is_appended_is_read_as_it_was_byte_for_byte(self, store: Store) -> None:
        lease = _create(store, "r")
        rows = [
            Row(2, "intent", "3.1.2", 1, b'{"a":"\xc3\xa4"}', b"r" * 96, b"\x00\xff", b"d" * 32, b"f" * 32),
            Row(3, "outcome", "3.1.2", 1, b"{}", b"r" * 32, b"", b"e" * 32),
            Row(4, "value", None, None, b"{}", b"r" * 32),
            Row(5, "outcome", "4", 2, b"{}", b"r" * 32, b"cipher", None, None, "aes"),
            Row(6, "outcome", "4", 3, b"{}", b"r" * 32, b"x" * 300_000, b"g" * 32),
            Row(7, "outcome", "4", 4, b"{}", b"r" * 32, b"x" * 300_000, b"g" * 32),
            Row(8, "outcome", "4", 5, b"{}", b"r" * 32, b"y" * 300_000, b"h" * 32, None, "zlib"),
        ]
        for row in rows:
            assert store.append("r", lease.token, 0, [row], synced=row.seq % 2 == 0)
        assert store.read("r", 1) == rows

    def test_rows_that_are_appended_together_are_read_together(self, store: Store) -> None:
        lease = _create(store, "r")
        rows = [a_row(2), a_row(3, payload=b"x" * 200_000), a_row(4, payload=b"small")]
        assert store.append("r", lease.token, 0, rows, synced=True)
        assert store.read("r", 1) == rows

    def test_read_gives_what_comes_after(self, store: Store) -> None:
        lease = _create(store, "r")
        store.append("r", lease.token, 0, [a_row(seq) for seq in range(2, 8)], synced=False)
        assert [row.seq for row in store.read("r")] == [1, 2, 3, 4, 5, 6, 7]
        assert [row.seq for row in store.read("r", 5)] == [6, 7]
        assert store.read("r", 7) == []
        assert store.read("unknown") == []

    def test_read_gives_as_many_entries_as_asked_for(self, store: Store) -> None:
        lease = _create(store, "r")
        store.append("r", lease.token, 0, [a_row(seq) for seq in range(2, 8)], synced=False)
        assert [row.seq for row in store.read("r", limit=2)] == [1, 2]
        assert [row.seq for row in store.read("r", 2, limit=4)] == [3, 4, 5, 6]
        assert [row.seq for row in store.read("r", 6, limit=4)] == [7]
        assert store.read("r", 7, limit=4) == []
        assert store.read("r", limit=0) == []
        assert store.read("unknown", limit=4, payloads_up_to=4) == []

    def test_payloads_that_are_longer_than_asked_for_are_left_out_and_their_digests_are_not(self, store: Store) -> None:
        lease = _create(store, "r", rows=[a_row(1, "created", b"1234")])
        kept_twice = b"x" * 200_000
        rows = [a_row(2, payload=b""), a_row(3, payload=b"12345"), a_row(4), a_row(5, payload=kept_twice)]
        rows += [a_row(6, payload=kept_twice), a_row(7, payload=b"y" * 60_000)]
        rows += [Row(8, "note", None, None, b"{}", b"r" * 32, b"no digest", None, None, "aes")]
        store.append("r", lease.token, 0, rows, synced=False)
        whole = store.read("r")
        for most in (0, 4, 5, 60_000, 199_999, 200_000):
            short = store.read("r", payloads_up_to=most)
            assert short == [
                row._replace(payload=None)
                if row.payload is not None and row.digest is not None and len(row.payload) > most
                else row
                for row in whole
            ]
        assert store.read("r", 4, limit=2, payloads_up_to=4) == [row._replace(payload=None) for row in rows[3:5]]

    def test_the_payload_of_one_entry_is_read_byte_for_byte(self, store: Store) -> None:
        lease = _create(store, "r")
        payloads = [b"", b"\x00\xff", None, b"x" * 60_000, b"y" * 300_000, b"y" * 300_000]
        rows = [a_row(seq, payload=payload) for seq, payload in enumerate(payloads, start=2)]
        rows.append(Row(8, "note", None, None, b"{}", b"r" * 32, b"z" * 300_000, None, None, "zlib"))
        store.append("r", lease.token, 0, rows, synced=False)
        assert [store.payload("r", seq) for seq in range(2, 9)] == [row.payload for row in rows]
        for run_id, seq in (("r", 9), ("r", 0), ("r", -1), ("unknown", 1)):
            assert store.payload(run_id, seq) is None

    def test_an_old_token_appends_nothing(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        new = store.claim("r", "b", 30.0)
        _refuses(LeaseLost, lambda: store.append("r", old.token, 0, [a_row(2)], synced=True))
        _refuses(LeaseLost, lambda: store.append("r", old.token, 0, [a_row(2), a_row(3)], synced=True))
        assert len(store.read("r")) == 1
        assert store.append("r", new.token, 0, [a_row(2)], synced=True)

    def test_who_gave_the_run_back_appends_and_renews_nothing(self, store: Store) -> None:
        lease = _create(store, "r")
        store.release("r", lease.token)
        _refuses(LeaseLost, lambda: store.append("r", lease.token, 0, [a_row(2)], synced=True))
        _refuses(LeaseLost, lambda: store.append("r", lease.token, 0, [a_row(2), a_row(3)], synced=True))
        _refuses(LeaseLost, lambda: store.renew("r", lease.token, 30.0))
        assert len(store.read("r")) == 1

    def test_nothing_is_appended_to_a_run_that_nobody_knows(self, store: Store) -> None:
        _refuses(RunNotFound, lambda: store.append("r", 1, 0, [a_row(1)], synced=True))
        _refuses(RunNotFound, lambda: store.append("r", 1, 0, [a_row(1), a_row(2)], synced=True))
        _refuses(RunNotFound, lambda: store.renew("r", 1, 30.0))
        assert store.read("r") == []

    def test_nothing_is_appended_past_a_request_that_was_not_read(self, store: Store) -> None:
        lease = _create(store, "r")
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True) is False
        assert store.append("r", lease.token, 0, [a_row(2), a_row(3)], synced=True) is False
        assert len(store.read("r")) == 1
        assert store.append("r", lease.token, 1, [a_row(2)], synced=True) is True

    def test_rows_are_written_all_or_none(self, store: Store) -> None:
        lease = _create(store, "r")
        _refuses(StoreError, lambda: store.append("r", lease.token, 0, [a_row(2), a_row(4)], synced=True))
        assert store.read("r") == [a_row(1, "created", b"{}")]
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)

    def test_no_entry_is_written_twice_and_none_is_left_out(self, store: Store) -> None:
        lease = _create(store, "r")
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
        for seq in (1, 2, 4):
            _refuses(StoreError, partial(store.append, "r", lease.token, 0, [a_row(seq, "other")], synced=True))
        assert [row.kind for row in store.read("r")] == ["created", "note"]

    def test_rows_that_stand_there_already_are_not_written_again_and_answer_true(self, store: Store) -> None:
        lease = _create(store, "r")
        one, several = [a_row(2, payload=b"2")], [a_row(3, payload=b"x" * 200_000), a_row(4)]
        for rows in (one, several, one, several, several[1:], [*one, *several]):
            for synced in (False, True):
                assert store.append("r", lease.token, 0, rows, synced=synced) is True
        assert store.read("r", 1) == [*one, *several]
        store.post("r", "cancel", b"", "operator", 1.0)
        for rows in (one, several):
            assert store.append("r", lease.token, 0, rows, synced=True) is True
        assert store.append("r", lease.token, 0, [a_row(5)], synced=True) is False
        assert store.read("r", 1) == [*one, *several]

    def test_other_bytes_are_refused_where_an_entry_stands_already(self, store: Store) -> None:
        lease = _create(store, "r")
        rows = [a_row(2, payload=b"2"), a_row(3)]
        assert store.append("r", lease.token, 0, rows, synced=True)
        others: list[list[Row]] = [
            [rows[0]._replace(body=b"{}")],
            [rows[0]._replace(roots=b"q" * 32)],
            [rows[0]._replace(kind="other")],
            [rows[0]._replace(position="1")],
            [rows[0]._replace(attempt=1)],
            [a_row(2, payload=b"other")],
            [rows[0], rows[1]._replace(body=b"{}")],
            [rows[0]._replace(body=b"{}"), rows[1]],
            [rows[1], a_row(4)],
            [rows[1], rows[0]],
        ]
        for other in others:
            _refuses(StoreError, partial(store.append, "r", lease.token, 0, other, synced=False))
        assert store.read("r", 1) == rows
        store.post("r", "cancel", b"", "operator", 1.0)
        for other in others:
            assert store.append("r", lease.token, 0, other, synced=True) is False
        assert store.read("r", 1) == rows

    def test_an_old_token_appends_nothing_even_where_it_stands_already(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "r", lease_seconds=30.0)
        rows = [a_row(2)]
        assert store.append("r", old.token, 0, rows, synced=True)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        _refuses(LeaseLost, lambda: store.append("r", old.token, 0, rows, synced=True))

    def test_runs_know_nothing_of_each_other(self, store: Store) -> None:
        one, two = _create(store, "one"), _create(store, "two", owner="b")
        store.post("two", "signal", b"", "somebody", 1.0)
        assert store.append("one", one.token, 0, [a_row(2)], synced=True)
        assert store.append("two", two.token, 1, [a_row(2, payload=b"2")], synced=True)
        store.release("one", one.token)
        assert store.append("two", two.token, 1, [a_row(3)], synced=True)
        assert [row.payload for row in store.read("one")] == [b"{}", None]
        assert [row.payload for row in store.read("two")] == [b"{}", b"2", None]

    # --- append_all ---------------------------------------------------------------------------------------------------

    def test_appends_of_many_runs_are_all_written_and_answered_in_order(self, store: Store) -> None:
        tokens = {f"r{number}": _create(store, f"r{number}").token for number in range(300)}
        for seq in (2, 3):
            for synced in (False, True):
                appends = [
                    Append(run_id, token, 0, [a_row(2 * seq - 2 + synced, run_id)]) for run_id, token in tokens.items()
                ]
                assert store.append_all(appends, synced=synced) == [True] * 300
        for run_id in tokens:
            assert store.read(run_id, 1) == [a_row(seq, run_id) for seq in (2, 3, 4, 5)]

    def test_no_append_at_all_has_no_answer(self, store: Store) -> None:
        assert store.append_all([], synced=True) == []

    def test_rows_that_come_with_those_of_others_are_read_as_they_were_byte_for_byte(self, store: Store) -> None:
        rows: list[list[Row]] = [
            [Row(2, "intent", "3.1.2", 1, b'{"a":"\xc3\xa4"}', b"r" * 96, b"\x00\xff", b"d" * 32, b"f" * 32)],
            [
                Row(2, "outcome", "4", 2, b"{}", b"r" * 32, b"cipher", None, None, "aes"),
                a_row(3),
                a_row(4, payload=b""),
            ],
            [Row(2, "outcome", "4", 3, b"{}", b"r" * 32, b"x" * 300_000, b"g" * 32)],
            [a_row(2), Row(3, "outcome", "4", 4, b"{}", b"r" * 32, b"x" * 300_000, b"g" * 32)],
            [Row(2, "outcome", "4", 5, b"{}", b"r" * 32, b"y" * 300_000, b"h" * 32, None, "zlib")],
            [Row(2, "outcome", "4", 6, b"{}", b"r" * 32, b"z" * 60_000, b"i" * 32)],
        ]
        appends = [Append(f"r{number}", _create(store, f"r{number}").token, 0, new) for number, new in enumerate(rows)]
        assert store.append_all(appends, synced=True) == [True] * len(rows)
        for append in appends:
            assert store.read(append.run_id, 1) == append.rows

    def test_each_of_many_appends_is_answered_as_if_it_came_alone(self, store: Store, clock: FakeClock) -> None:
        """Once one after the other, and once together: the same answers, and the same runs."""

        def prepared(prefix: str) -> list[Append]:
            lost = _create(store, prefix + "lost", lease_seconds=10.0)
            clock.advance(11.0)
            store.claim(prefix + "lost", "b", 30.0)
            names = ("good", "moved", "read", "given back", "stands", "moved after", "noted", "gap", "other", "large")
            tokens = {name: _create(store, prefix + name).token for name in names}
            store.release(prefix + "given back", tokens["given back"])
            for name in ("stands", "moved after", "other"):
                assert store.append(prefix + name, tokens[name], 0, [a_row(2), a_row(3)], synced=False)
            for name in ("moved", "read", "moved after"):
                store.post(prefix + name, "signal", b"", "somebody", 1.0)
            store.annotate(prefix + "noted", tokens["noted"], "a note")
            members: list[tuple[str, int, int, list[Row]]] = [
                ("good", tokens["good"], 0, [a_row(2)]),
                ("lost", lost.token, 0, [a_row(2)]),
                ("lost", lost.token, 0, [a_row(2), a_row(3)]),
                ("good", tokens["good"] + 1, 0, [a_row(3)]),
                ("unknown", 1, 0, [a_row(1)]),
                ("unknown", 1, 0, [a_row(1), a_row(2)]),
                ("moved", tokens["moved"], 0, [a_row(2)]),
                ("moved", tokens["moved"], 0, [a_row(2), a_row(3)]),
                ("read", tokens["read"], 1, [a_row(2)]),
                ("read", tokens["read"], 2, [a_row(3)]),
                ("given back", tokens["given back"], 0, [a_row(2)]),
                ("gap", tokens["gap"], 0, [a_row(3)]),
                ("gap", tokens["gap"], 0, [a_row(2), a_row(4)]),
                ("gap", tokens["gap"], 0, [a_row(2, payload=b"x" * 200_000), a_row(4)]),
                ("gap", tokens["gap"], 0, [a_row(2)]),
                ("gap", tokens["gap"], 0, [a_row(2, payload=b"x" * 200_000)]),
                ("stands", tokens["stands"], 0, [a_row(2)]),
                ("stands", tokens["stands"], 0, [a_row(2), a_row(3)]),
                ("stands", tokens["stands"], 0, [a_row(3), a_row(4)]),
                ("stands", tokens["stands"] + 1, 0, [a_row(3)]),
                ("moved after", tokens["moved after"], 0, [a_row(3)]),
                ("moved after", tokens["moved after"], 0, [a_row(2), a_row(3)]),
                ("moved after", tokens["moved after"], 0, [a_row(4)]),
                ("other", tokens["other"], 0, [a_row(2, "other")]),
                ("other", tokens["other"], 0, [a_row(3)._replace(roots=b"q" * 32)]),
                ("other", tokens["other"], 0, [a_row(2), a_row(3, "other")]),
                ("noted", tokens["noted"], 0, []),
                ("large", tokens["large"], 0, [a_row(2, payload=b"x" * 200_000)]),
                ("large", tokens["large"], 0, [a_row(3, payload=b"x" * 200_000), a_row(4)]),
                ("large", tokens["large"], 0, [a_row(5, payload=b"x" * 199_999 + b"y")]),
                ("good", tokens["good"], 0, [a_row(3)]),
            ]
            return [Append(prefix + name, token, inbox, rows) for name, token, inbox, rows in members]

        for synced in (True, False):
            alone, together = prepared(f"alone {synced} "), prepared(f"together {synced} ")
            expected = [_answer(store, append, synced) for append in alone]
            answers = store.append_all(together, synced=synced)
            assert {True, False} < set(answers)
            for one, other, append in zip(expected, answers, together, strict=True):
                assert _said(other) == _said(one).replace("alone", "together"), append
            for one_run, other_run in zip(alone, together, strict=True):
                assert store.read(other_run.run_id) == store.read(one_run.run_id)
                one_head, other_head = store.head(one_run.run_id), store.head(other_run.run_id)
                assert (one_head and one_head.note) == (other_head and other_head.note)
        assert list(store.check()) == []

    def test_an_append_that_is_refused_fails_no_other(self, store: Store) -> None:
        good = [_create(store, f"good {number}").token for number in range(2)]
        bad: list[Append] = [
            Append("unknown", 1, 0, [a_row(2)]),
            Append("held", _create(store, "held").token + 1, 0, [a_row(2)]),
            Append("gap", _create(store, "gap").token, 0, [a_row(2, payload=b"x" * 200_000), a_row(4)]),
            Append("moved", _create(store, "moved").token, 0, [a_row(2)]),
        ]
        store.post("moved", "cancel", b"", "operator", 1.0)
        for seq, append in enumerate(bad, start=2):
            first, refused, last = store.append_all(
                [
                    Append("good 0", good[0], 0, [a_row(seq)]),
                    append,
                    Append("good 1", good[1], 0, [a_row(seq)]),
                ],
                synced=True,
            )
            assert (first, last) == (True, True)
            assert refused is not True
            for number in range(2):
                assert [row.seq for row in store.read(f"good {number}")] == list(range(1, seq + 1))
        assert [len(store.read(append.run_id)) for append in bad] == [0, 1, 1, 1]
        assert list(store.check()) == []

    def test_an_error_among_the_answers_is_the_one_that_append_raises(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "old", lease_seconds=10.0).token
        clock.advance(11.0)
        store.claim("old", "b", 30.0)
        gap = _create(store, "gap").token
        answers = store.append_all(
            [
                Append("old", old, 0, [a_row(2)]),
                Append("unknown", 1, 0, [a_row(2)]),
                Append("gap", gap, 0, [a_row(3)]),
                Append("gap", gap, 0, [a_row(3), a_row(4)]),
            ],
            synced=True,
        )
        assert [type(answer) for answer in answers[:2]] == [LeaseLost, RunNotFound]
        assert isinstance(answers[0], LeaseLost)
        assert (answers[0].run_id, answers[0].token) == ("old", old)
        assert isinstance(answers[1], RunNotFound)
        assert answers[1].run_id == "unknown"
        for answer in answers[2:]:
            assert isinstance(answer, StoreError)
            assert "the seq that follows" in str(answer)

    def test_appends_of_one_run_build_on_each_other(self, store: Store) -> None:
        token = _create(store, "r").token
        answers = store.append_all(
            [
                Append("r", token, 0, [a_row(2)]),
                Append("r", token, 0, [a_row(3), a_row(4)]),
                Append("r", token, 0, [a_row(3, "other")]),
                Append("r", token, 0, [a_row(2)]),
                Append("r", token, 0, [a_row(3), a_row(4)]),
                Append("r", token, 0, [a_row(6)]),
                Append("r", token, 0, [a_row(5, payload=b"x" * 100_000)]),
                Append("r", token, 0, [a_row(6)]),
            ],
            synced=False,
        )
        assert [answer if isinstance(answer, bool) else type(answer) for answer in answers] == [
            True, True, StoreError, True, True, StoreError, True, True,
        ]  # fmt: skip
        assert [(row.seq, row.kind) for row in store.read("r", 1)] == [(seq, "note") for seq in (2, 3, 4, 5, 6)]

    def test_what_stands_there_already_is_not_written_again_among_others(self, store: Store) -> None:
        tokens = [_create(store, f"r{number}").token for number in range(3)]
        appends = [
            Append("r0", tokens[0], 0, [a_row(2, payload=b"2")]),
            Append("r1", tokens[1], 0, [a_row(2, payload=b"x" * 200_000), a_row(3)]),
            Append("r2", tokens[2], 0, [a_row(2)]),
        ]
        assert store.append(*appends[0], synced=False)
        assert store.append_all(appends[:2], synced=False) == [True, True]
        store.post("r1", "signal", b"", "somebody", 1.0)
        for synced in (True, False):
            assert store.append_all(appends, synced=synced) == [True, True, True]
        for append in appends:
            assert store.read(append.run_id, 1) == append.rows

    def test_appends_together_and_alone_go_on_where_the_other_stopped(self, store: Store) -> None:
        tokens = {run_id: _create(store, run_id).token for run_id in ("r", "s", "t")}
        rows = [a_row(seq, payload=b"x" * 100_000 if seq % 7 == 0 else None) for seq in range(2, 20)]
        for row in rows:
            appends = [Append(run_id, token, 0, [row]) for run_id, token in tokens.items()]
            alone = appends.pop(row.seq % 3)
            assert store.append(*alone, synced=row.seq % 2 == 0)
            assert store.append_all(appends, synced=row.seq % 5 == 0) == [True, True]
        for run_id in tokens:
            assert store.read(run_id, 1) == rows

    def test_a_note_goes_with_an_entry_that_comes_with_those_of_others(self, store: Store) -> None:
        tokens = {run_id: _create(store, run_id).token for run_id in ("r", "s", "t")}
        for run_id in ("r", "s", "t"):
            store.annotate(run_id, tokens[run_id], "divergence at 3")
        store.post("s", "signal", b"", "somebody", 1.0)
        appends = [Append(run_id, tokens[run_id], 0, [a_row(2)]) for run_id in ("r", "s")]
        assert store.append_all(appends, synced=False) == [True, False]
        heads = [store.head(run_id) for run_id in ("r", "s", "t")]
        assert [head and head.note for head in heads] == [None, "divergence at 3", "divergence at 3"]
        again = [Append("r", tokens["r"], 0, [a_row(3)]), Append("s", tokens["s"], 1, [a_row(2)])]
        assert store.append_all(again, synced=False) == [True, True]
        heads = [store.head(run_id) for run_id in ("r", "s", "t")]
        assert [head and head.note for head in heads] == [None, None, "divergence at 3"]

    def test_threads_append_together_at_once(self, store: Store) -> None:
        tokens = {f"r{number}": _create(store, f"r{number}", owner=f"o{number}").token for number in range(12)}

        def work(mine: list[str]) -> None:
            for seq in range(2, 32):
                appends = [Append(run_id, tokens[run_id], 0, [a_row(seq, run_id)]) for run_id in mine]
                assert store.append_all(appends, synced=False) == [True] * len(mine)

        _in_threads([partial(work, [f"r{number + 4 * turn}" for turn in range(3)]) for number in range(4)])
        for run_id in tokens:
            assert store.read(run_id, 1) == [a_row(seq, run_id) for seq in range(2, 32)]

    def test_a_closed_store_says_so_in_every_answer(self, store: Store) -> None:
        tokens = [_create(store, f"r{number}").token for number in range(3)]
        store.close()
        for count in (1, 3):
            appends = [Append(f"r{number}", tokens[number], 0, [a_row(2)]) for number in range(count)]
            answers = store.append_all(appends, synced=True)
            assert len({id(answer) for answer in answers}) == count  # an error of its own for each
            for answer in answers:
                assert isinstance(answer, StoreUnavailable)
                assert "closed" in str(answer)

    # --- inbox and note -----------------------------------------------------------------------------------------------

    def test_requests_are_kept_in_the_order_in_which_they_came(self, store: Store) -> None:
        _create(store, "r")
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
        head = _head(store)
        assert head.inbox == 2

    def test_a_request_to_a_run_that_nobody_knows_is_refused(self, store: Store) -> None:
        _refuses(RunNotFound, lambda: store.post("r", "cancel", b"", "operator", 1.0))
        assert store.inbox("r", 0) == []

    def test_a_request_needs_no_lease_and_outlives_an_owner(self, store: Store) -> None:
        lease = _create(store, "r")
        store.release("r", lease.token)
        assert store.post("r", "cancel", b"", "operator", 1.0) == 1
        lease = store.claim("r", "b", 30.0)
        assert store.renew("r", lease.token, 30.0) == 1
        assert len(store.inbox("r", 0)) == 1

    def test_a_note_goes_with_the_next_entry(self, store: Store) -> None:
        lease = _create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        assert _note(store) == "divergence at 3"
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False)
        assert _note(store) is None
        store.annotate("r", lease.token, "again")
        store.annotate("r", lease.token, None)
        assert _note(store) is None

    def test_a_note_goes_with_the_next_claim(self, store: Store) -> None:
        lease = _create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        store.release("r", lease.token)
        assert _note(store) == "divergence at 3"
        store.claim("r", "b", 30.0)
        assert _note(store) is None

    def test_a_refused_entry_leaves_the_note(self, store: Store) -> None:
        lease = _create(store, "r")
        store.annotate("r", lease.token, "divergence at 3")
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False) is False
        assert _note(store) == "divergence at 3"

    def test_an_old_token_notes_nothing(self, store: Store, clock: FakeClock) -> None:
        old = _create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        store.annotate("r", old.token, "late")
        store.annotate("unknown", 1, "nobody")
        assert _note(store) is None

    # --- looking ------------------------------------------------------------------------------------------------------

    def test_a_run_that_nobody_knows_has_no_head_and_no_secret(self, store: Store) -> None:
        assert store.head("r") is None
        assert store.secret("r") == b""
        assert list(store.summaries("r")) == []

    def test_summaries_show_head_and_first_and_last_entry_oldest_run_first(self, store: Store) -> None:
        tokens = {run_id: _create(store, run_id, owner=f"o-{run_id}").token for run_id in ("z", "a", "m")}
        store.append("a", tokens["a"], 0, [a_row(2), a_row(3, payload=b"x" * 100_000)], synced=False)
        store.post("m", "cancel", b"", "operator", 1.0)
        found = list(store.summaries())
        assert [summary.head for summary in found] == [store.head(run_id) for run_id in ("z", "a", "m")]
        assert [(summary.first, summary.last) for summary in found] == [
            (store.read(run_id)[0], store.read(run_id)[-1]) for run_id in ("z", "a", "m")
        ]
        assert list(store.summaries("a")) == [found[1]]

    def test_summaries_list_many_runs_once_each_while_others_write(self, store: Store) -> None:
        lease = _create(store, "r0")
        for number in range(1, 450):
            _create(store, f"r{number}")
        listed = []
        for number, summary in enumerate(store.summaries()):
            listed.append(summary.head.run_id)
            if number < 3:
                assert store.append("r0", lease.token, 0, [a_row(2 + number)], synced=False)
        assert listed == [f"r{number}" for number in range(450)]

    def test_a_sound_store_finds_nothing_wrong_with_itself(self, store: Store) -> None:
        _create(store, "r")
        assert list(store.check()) == []

    # --- threads and the end ------------------------------------------------------------------------------------------

    def test_threads_append_to_their_own_runs_at_once(self, store: Store) -> None:
        leases = [_create(store, f"r{number}", owner=f"o{number}") for number in range(8)]

        def work(lease: Lease) -> None:
            for seq in range(2, 42):
                assert store.append(lease.run_id, lease.token, 0, [a_row(seq, lease.run_id)], synced=False)
                assert store.read(lease.run_id, seq - 1) == [a_row(seq, lease.run_id)]

        _in_threads([partial(work, lease) for lease in leases])
        for lease in leases:
            assert [row.seq for row in store.read(lease.run_id)] == list(range(1, 42))

    def test_of_threads_that_claim_one_run_one_gets_it(self, store: Store) -> None:
        lease = _create(store, "r")
        store.release("r", lease.token)
        got: list[Lease] = []

        def work(owner: str) -> None:
            with contextlib.suppress(RunOwned):
                got.append(store.claim("r", owner, 30.0))

        _in_threads([partial(work, owner) for owner in "abcdefgh"])
        assert len(got) == 1
        head = _head(store)
        assert (head.owner, head.token) == (got[0].owner, got[0].token)

    def test_of_threads_that_create_one_run_one_gets_it(self, store: Store) -> None:
        got: list[Lease | None] = []

        def work(owner: str) -> None:
            got.append(store.create("r", owner, 30.0, _SECRET, [a_row(1, "created")]))

        _in_threads([partial(work, owner) for owner in "abcdefgh"])
        assert sum(lease is not None for lease in got) == 1
        assert len(store.read("r")) == 1

    def test_of_threads_that_post_each_gets_a_number_of_its_own(self, store: Store) -> None:
        _create(store, "r")
        got: list[int] = []
        _in_threads([lambda: got.append(store.post("r", "signal", b"", "x", 1.0)) for _ in range(8)])
        assert sorted(got) == list(range(1, 9))
        assert [request.id for request in store.inbox("r", 0)] == list(range(1, 9))

    def test_a_closed_store_says_so_and_can_be_closed_again(self, store: Store) -> None:
        lease = _create(store, "r")
        store.close()
        store.close()
        for call in (
            lambda: _create(store, "s"),
            lambda: store.claim("r", "a", 30.0),
            lambda: store.renew("r", lease.token, 30.0),
            lambda: store.append("r", lease.token, 0, [a_row(2)], synced=True),
            lambda: store.read("r"),
            lambda: store.payload("r", 1),
            lambda: store.head("r"),
            lambda: list(store.summaries()),
            lambda: store.post("r", "cancel", b"", "operator", 1.0),
        ):
            error = _refuses(StoreUnavailable, call)
            assert "closed" in str(error)


_E = TypeVar("_E", bound=LedgerError)
_SECRET = b"s" * 32


def _create(
    store: Store,
    run_id: str,
    *,
    owner: str = "a",
    lease_seconds: float = 30.0,
    rows: Sequence[Row] | None = None,
) -> Lease:
    lease = store.create(run_id, owner, lease_seconds, _SECRET, rows or [a_row(1, "created", b"{}")])
    assert lease is not None
    return lease


def _head(store: Store) -> Head:
    head = store.head("r")
    assert head is not None
    return head


def _note(store: Store) -> str | None:
    return _head(store).note


def _answer(store: Store, append: Append, synced: bool) -> bool | LedgerError:
    try:
        return store.append(*append, synced=synced)
    except LedgerError as error:
        return error


def _said(answer: bool | LedgerError) -> str:
    return str(answer) if isinstance(answer, bool) else f"{type(answer).__name__}: {answer}"


def _refuses(kind: type[_E], call: Callable[[], object]) -> _E:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def _in_threads(calls: Sequence[Callable[[], object]]) -> None:
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
