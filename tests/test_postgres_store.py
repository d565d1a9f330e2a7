"""The store on PostgreSQL: the conformance suite, and what only a server can do to a ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_run_ledger.contract import Store
from agent_run_ledger.stores.postgres import PostgresStore
from agent_run_ledger.testing import StoreContract
from support.clocks import DatabaseClock, ledger_with_a_clock
from support.databases import databases


@pytest.fixture
def dsn() -> Iterator[str]:
    with databases().fresh(ledger_with_a_clock) as dsn:
        yield dsn


@pytest.fixture
def clock(dsn: str) -> Iterator[DatabaseClock]:
    with DatabaseClock(dsn) as clock:
        yield clock


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def store(self, dsn: str, clock: DatabaseClock) -> Iterator[Store]:
        store = PostgresStore(dsn, outage_seconds=5.0, _now=DatabaseClock.SQL)
        yield store
        store.close()
