"""What is written: entries in order, whole, fenced, and read as they were."""

from __future__ import annotations

from functools import partial

from agent_run_ledger.contract import Row, Store
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import (
    a_row,
    create,
    refuses,
)


class EntriesContract:
    """A part of `StoreContract`."""

    # --- append and read ----------------------------------------------------------------------------------------------

    def test_what_is_appended_is_read_as_it_was_byte_for_byte(self, store: Store) -> None:
        lease = create(store, "r")
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
        lease = create(store, "r")
        rows = [a_row(2), a_row(3, payload=b"x" * 200_000), a_row(4, payload=b"small")]
        assert store.append("r", lease.token, 0, rows, synced=True)
        assert store.read("r", 1) == rows

    def test_read_gives_what_comes_after(self, store: Store) -> None:
        lease = create(store, "r")
        store.append("r", lease.token, 0, [a_row(seq) for seq in range(2, 8)], synced=False)
        assert [row.seq for row in store.read("r")] == [1, 2, 3, 4, 5, 6, 7]
        assert [row.seq for row in store.read("r", 5)] == [6, 7]
        assert store.read("r", 7) == []
        assert store.read("unknown") == []

    def test_read_gives_as_many_entries_as_asked_for(self, store: Store) -> None:
        lease = create(store, "r")
        store.append("r", lease.token, 0, [a_row(seq) for seq in range(2, 8)], synced=False)
        assert [row.seq for row in store.read("r", limit=2)] == [1, 2]
        assert [row.seq for row in store.read("r", 2, limit=4)] == [3, 4, 5, 6]
        assert [row.seq for row in store.read("r", 6, limit=4)] == [7]
        assert store.read("r", 7, limit=4) == []
        assert store.read("r", limit=0) == []
        assert store.read("unknown", limit=4, payloads_up_to=4) == []

    def test_payloads_that_are_longer_than_asked_for_are_left_out_and_their_digests_are_not(self, store: Store) -> None:
        lease = create(store, "r", rows=[a_row(1, "created", b"1234")])
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
        lease = create(store, "r")
        payloads = [b"", b"\x00\xff", None, b"x" * 60_000, b"y" * 300_000, b"y" * 300_000]
        rows = [a_row(seq, payload=payload) for seq, payload in enumerate(payloads, start=2)]
        rows.append(Row(8, "note", None, None, b"{}", b"r" * 32, b"z" * 300_000, None, None, "zlib"))
        store.append("r", lease.token, 0, rows, synced=False)
        assert [store.payload("r", seq) for seq in range(2, 9)] == [row.payload for row in rows]
        for run_id, seq in (("r", 9), ("r", 0), ("r", -1), ("unknown", 1)):
            assert store.payload(run_id, seq) is None

    def test_an_old_token_appends_nothing(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        clock.advance(31.0)
        new = store.claim("r", "b", 30.0)
        refuses(LeaseLost, lambda: store.append("r", old.token, 0, [a_row(2)], synced=True))
        refuses(LeaseLost, lambda: store.append("r", old.token, 0, [a_row(2), a_row(3)], synced=True))
        assert len(store.read("r")) == 1
        assert store.append("r", new.token, 0, [a_row(2)], synced=True)

    def test_who_gave_the_run_back_appends_and_renews_nothing(self, store: Store) -> None:
        lease = create(store, "r")
        store.release("r", lease.token)
        refuses(LeaseLost, lambda: store.append("r", lease.token, 0, [a_row(2)], synced=True))
        refuses(LeaseLost, lambda: store.append("r", lease.token, 0, [a_row(2), a_row(3)], synced=True))
        refuses(LeaseLost, lambda: store.renew("r", lease.token, 30.0))
        assert len(store.read("r")) == 1

    def test_nothing_is_appended_to_a_run_that_nobody_knows(self, store: Store) -> None:
        refuses(RunNotFound, lambda: store.append("r", 1, 0, [a_row(1)], synced=True))
        refuses(RunNotFound, lambda: store.append("r", 1, 0, [a_row(1), a_row(2)], synced=True))
        refuses(RunNotFound, lambda: store.renew("r", 1, 30.0))
        assert store.read("r") == []

    def test_nothing_is_appended_past_a_request_that_was_not_read(self, store: Store) -> None:
        lease = create(store, "r")
        store.post("r", "cancel", b"", "operator", 1.0)
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True) is False
        assert store.append("r", lease.token, 0, [a_row(2), a_row(3)], synced=True) is False
        assert len(store.read("r")) == 1
        assert store.append("r", lease.token, 1, [a_row(2)], synced=True) is True

    def test_rows_are_written_all_or_none(self, store: Store) -> None:
        lease = create(store, "r")
        refuses(StoreError, lambda: store.append("r", lease.token, 0, [a_row(2), a_row(4)], synced=True))
        assert store.read("r") == [a_row(1, "created", b"{}")]
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)

    def test_no_entry_is_written_twice_and_none_is_left_out(self, store: Store) -> None:
        lease = create(store, "r")
        assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
        for seq in (1, 2, 4):
            refuses(StoreError, partial(store.append, "r", lease.token, 0, [a_row(seq, "other")], synced=True))
        assert [row.kind for row in store.read("r")] == ["created", "note"]

    def test_rows_that_stand_there_already_are_not_written_again_and_answer_true(self, store: Store) -> None:
        lease = create(store, "r")
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
        lease = create(store, "r")
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
            refuses(StoreError, partial(store.append, "r", lease.token, 0, other, synced=False))
        assert store.read("r", 1) == rows
        store.post("r", "cancel", b"", "operator", 1.0)
        for other in others:
            assert store.append("r", lease.token, 0, other, synced=True) is False
        assert store.read("r", 1) == rows

    def test_an_old_token_appends_nothing_even_where_it_stands_already(self, store: Store, clock: FakeClock) -> None:
        old = create(store, "r", lease_seconds=30.0)
        rows = [a_row(2)]
        assert store.append("r", old.token, 0, rows, synced=True)
        clock.advance(31.0)
        store.claim("r", "b", 30.0)
        refuses(LeaseLost, lambda: store.append("r", old.token, 0, rows, synced=True))

    def test_runs_know_nothing_of_each_other(self, store: Store) -> None:
        one, two = create(store, "one"), create(store, "two", owner="b")
        store.post("two", "signal", b"", "somebody", 1.0)
        assert store.append("one", one.token, 0, [a_row(2)], synced=True)
        assert store.append("two", two.token, 1, [a_row(2, payload=b"2")], synced=True)
        store.release("one", one.token)
        assert store.append("two", two.token, 1, [a_row(3)], synced=True)
        assert [row.payload for row in store.read("one")] == [b"{}", None]
        assert [row.payload for row in store.read("two")] == [b"{}", b"2", None]

    # --- roots, and what is on stable storage -------------------------------------------------------------------------

    def test_roots_are_those_of_the_entries_that_were_asked_for_and_no_others(self, store: Store) -> None:
        lease = create(store, "r")
        rows = [
            a_row(seq, payload=b"x" * 200_000 if seq == 4 else None)._replace(roots=bytes([seq]) * 32 * seq)
            for seq in range(2, 9)
        ]
        assert store.append("r", lease.token, 0, rows, synced=False)
        assert store.roots("r", [4, 2, 8]) == {2: b"\2" * 64, 4: b"\4" * 128, 8: b"\x08" * 256}
        assert store.roots("r", [9, 3, 0, -1, 3]) == {3: b"\3" * 96}
        assert store.roots("r", []) == store.roots("nobody", [1]) == {}

    def test_what_is_synced_stands_there_as_it_was_and_may_be_gone_on_with(self, store: Store) -> None:
        lease = create(store, "r")
        assert store.append("r", lease.token, 0, [a_row(2)], synced=False)
        before = store.head("r")
        store.sync("r")
        store.sync("nobody")
        after = store.head("r")
        assert before is not None
        assert after is not None
        assert (after.owner, after.token, after.inbox) == (before.owner, before.token, before.inbox)
        assert store.append("r", lease.token, 0, [a_row(3)], synced=False)
        assert [row.seq for row in store.read("r")] == [1, 2, 3]
