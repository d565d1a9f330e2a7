"""Every store keeps the promise: the conformance suite on SQLite and in memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger.contract import Append, Row, Store
from agent_run_ledger.errors import LedgerError
from agent_run_ledger.stores import open_store
from agent_run_ledger.testing import FakeClock, StoreContract, a_row
from agent_run_ledger.testing.stores.words import LISTING
from support.ledgers import KINDS, Bench


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestSqliteStore(StoreContract):
    @pytest.fixture(params=["full", "process"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
        store = open_store(tmp_path / "ledger.db", durability=request.param, clock=clock)
        yield store
        store.close()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, clock: FakeClock) -> Iterator[Store]:
        store = open_store(":memory:", durability="full", clock=clock)
        yield store
        store.close()


def some_rows(start: int, kinds: list[str], payload: bytes | None) -> list[Row]:
    return [a_row(seq, kind, payload) for seq, kind in enumerate(kinds, start)]


several_rows = st.builds(
    some_rows,
    st.integers(2, 5),
    st.lists(st.sampled_from(["note", "other"]), max_size=3),
    st.sampled_from([None, b"", b"small", b"x" * 70_000]),
)
several_appends = st.lists(
    st.builds(
        Append,
        st.sampled_from(["held", "posted", "taken over", "given back", "noted", "unknown"]),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([0, 0, 0, 1]),
        several_rows,
    ),
    max_size=12,
)


def a_busy_store(bench: Bench) -> Store:
    store = bench.store()
    for run_id in ("taken over", "held", "posted", "given back", "noted"):
        assert store.create(run_id, "a", 10.0 if run_id == "taken over" else 1e6, b"s" * 32, [a_row(1)], LISTING)
    bench.clock.advance(11.0)
    store.claim("taken over", "b", 1e6)
    store.post("posted", "signal", b"", "somebody", 1.0)
    store.release("given back", 1)
    store.annotate("noted", 1, "a note")
    return store


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(batches=st.lists(several_appends, max_size=3), synced=st.booleans())
def test_appends_that_come_together_do_what_they_would_do_one_after_the_other(
    kind: str, batches: list[list[Append]], synced: bool
) -> None:
    def alone(store: Store, append: Append) -> bool | LedgerError:
        try:
            return store.append(*append, synced=synced)
        except LedgerError as error:
            return error

    def said(answers: list[bool | LedgerError]) -> list[str]:
        return [repr(answer).replace(other.place, one.place) for answer in answers]

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        benches = [stack.enter_context(Bench(kind, Path(folder) / which)) for which in ("one", "other")]
        for bench in benches:
            bench.path.parent.mkdir()
        one, other = (a_busy_store(bench) for bench in benches)
        stack.callback(one.close)
        stack.callback(other.close)
        for batch in batches:
            expected = [alone(one, append) for append in batch]
            assert said(other.append_all(batch, synced=synced)) == said(expected)
            for summary in one.summaries():
                run_id = summary.head.run_id
                assert (other.head(run_id), other.read(run_id)) == (summary.head, one.read(run_id))
        assert list(other.check()) == []


def test_a_forked_child_has_a_copy_of_a_store_in_memory(clock: FakeClock) -> None:
    store = open_store(":memory:", durability="full", clock=clock)
    assert store.create("r", "a", 30.0, b"s" * 32, [a_row(1)], LISTING)
    child = os.fork()
    if child == 0:
        try:
            is_written = store.append("r", 1, 0, [a_row(2)], synced=True)
            os._exit(0 if is_written and len(store.read("r")) == 2 else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(store.read("r")) == 1
    store.close()
