"""Every store keeps the promise: the conformance suite on SQLite and in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_run_ledger.contract import Store
from agent_run_ledger.errors import StoreError
from agent_run_ledger.stores import open_store
from agent_run_ledger.testing import FakeClock, StoreContract, a_row


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


@pytest.mark.parametrize("path", ["postgresql://localhost/agents", "postgres://localhost/agents"])
def test_postgresql_is_refused_by_name(path: str) -> None:
    with pytest.raises(StoreError, match="PostgreSQL is not in this version"):
        open_store(path, durability="full", clock=FakeClock())


def test_a_forked_child_has_a_copy_of_a_store_in_memory(clock: FakeClock) -> None:
    store = open_store(":memory:", durability="full", clock=clock)
    assert store.create("r", "a", 30.0, b"s" * 32, [a_row(1)])
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
