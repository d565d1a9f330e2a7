"""What is written together: many appends in one transaction, each answered as if it came alone."""

from __future__ import annotations

from functools import partial

from agent_run_ledger.contract import Append, Row, Store
from agent_run_ledger.errors import LeaseLost, RunNotFound, StoreError, StoreUnavailable
from agent_run_ledger.testing.clock import FakeClock
from agent_run_ledger.testing.stores.words import (
    a_row,
    answer_to,
    create,
    in_threads,
    spelt,
)


class TogetherContract:
    """A part of `StoreContract`."""

    # --- append_all ---------------------------------------------------------------------------------------------------

    def test_appends_of_many_runs_are_all_written_and_answered_in_order(self, store: Store) -> None:
        tokens = {f"r{number}": create(store, f"r{number}").token for number in range(300)}
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
        appends = [Append(f"r{number}", create(store, f"r{number}").token, 0, new) for number, new in enumerate(rows)]
        assert store.append_all(appends, synced=True) == [True] * len(rows)
        for append in appends:
            assert store.read(append.run_id, 1) == append.rows

    def test_each_of_many_appends_is_answered_as_if_it_came_alone(self, store: Store, clock: FakeClock) -> None:
        """Once one after the other, and once together: the same answers, and the same runs."""

        def prepared(prefix: str) -> list[Append]:
            lost = create(store, prefix + "lost", lease_seconds=10.0)
            clock.advance(11.0)
            store.claim(prefix + "lost", "b", 30.0)
            names = ("good", "moved", "read", "given back", "stands", "moved after", "noted", "gap", "other", "large")
            tokens = {name: create(store, prefix + name).token for name in names}
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
            expected = [answer_to(store, append, synced) for append in alone]
            answers = store.append_all(together, synced=synced)
            assert {True, False} < set(answers)
            for one, other, append in zip(expected, answers, together, strict=True):
                assert spelt(other) == spelt(one).replace("alone", "together"), append
            for one_run, other_run in zip(alone, together, strict=True):
                assert store.read(other_run.run_id) == store.read(one_run.run_id)
                one_head, other_head = store.head(one_run.run_id), store.head(other_run.run_id)
                assert (one_head and one_head.note) == (other_head and other_head.note)
        assert list(store.check()) == []

    def test_an_append_that_is_refused_fails_no_other(self, store: Store) -> None:
        good = [create(store, f"good {number}").token for number in range(2)]
        bad: list[Append] = [
            Append("unknown", 1, 0, [a_row(2)]),
            Append("held", create(store, "held").token + 1, 0, [a_row(2)]),
            Append("gap", create(store, "gap").token, 0, [a_row(2, payload=b"x" * 200_000), a_row(4)]),
            Append("moved", create(store, "moved").token, 0, [a_row(2)]),
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
        old = create(store, "old", lease_seconds=10.0).token
        clock.advance(11.0)
        store.claim("old", "b", 30.0)
        gap = create(store, "gap").token
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
        token = create(store, "r").token
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
        tokens = [create(store, f"r{number}").token for number in range(3)]
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
        tokens = {run_id: create(store, run_id).token for run_id in ("r", "s", "t")}
        rows = [a_row(seq, payload=b"x" * 100_000 if seq % 7 == 0 else None) for seq in range(2, 20)]
        for row in rows:
            appends = [Append(run_id, token, 0, [row]) for run_id, token in tokens.items()]
            alone = appends.pop(row.seq % 3)
            assert store.append(*alone, synced=row.seq % 2 == 0)
            assert store.append_all(appends, synced=row.seq % 5 == 0) == [True, True]
        for run_id in tokens:
            assert store.read(run_id, 1) == rows

    def test_a_note_goes_with_an_entry_that_comes_with_those_of_others(self, store: Store) -> None:
        tokens = {run_id: create(store, run_id).token for run_id in ("r", "s", "t")}
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
        tokens = {f"r{number}": create(store, f"r{number}", owner=f"o{number}").token for number in range(12)}

        def work(mine: list[str]) -> None:
            for seq in range(2, 32):
                appends = [Append(run_id, tokens[run_id], 0, [a_row(seq, run_id)]) for run_id in mine]
                assert store.append_all(appends, synced=False) == [True] * len(mine)

        in_threads([partial(work, [f"r{number + 4 * turn}" for turn in range(3)]) for number in range(4)])
        for run_id in tokens:
            assert store.read(run_id, 1) == [a_row(seq, run_id) for seq in range(2, 32)]

    def test_a_closed_store_says_so_in_every_answer(self, store: Store) -> None:
        tokens = [create(store, f"r{number}").token for number in range(3)]
        store.close()
        for count in (1, 3):
            appends = [Append(f"r{number}", tokens[number], 0, [a_row(2)]) for number in range(count)]
            answers = store.append_all(appends, synced=True)
            assert len({id(answer) for answer in answers}) == count  # an error of its own for each
            for answer in answers:
                assert isinstance(answer, StoreUnavailable)
                assert "closed" in str(answer)
