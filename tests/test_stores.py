"""Every store keeps the promise: the conformance suite on SQLite and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_run_ledger.contract import Store
from agent_run_ledger.errors import StoreError
from agent_run_ledger.stores import open_store
from agent_run_ledger.testing import FakeClock, StoreContract


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
