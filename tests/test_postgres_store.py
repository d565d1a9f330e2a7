"""The store on PostgreSQL: the conformance suite, and what only a server can do to a ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest

from agent_run_ledger.contract import Store
from agent_run_ledger.stores.postgres import PostgresStore, migrate
from agent_run_ledger.testing import FakeClock, StoreContract

NOW = "(SELECT seconds FROM test_clock)"


class DatabaseClock(FakeClock):
    """A clock whose time the database knows: leases there are measured by a table."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("CREATE TABLE test_clock AS SELECT %s::float8 AS seconds", [self.elapsed()])

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._connection.execute("UPDATE test_clock SET seconds = %s", [self.elapsed()])

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def dsn() -> Iterator[str]:
    base = os.environ["AGENT_RUN_LEDGER_TEST_DSN"]
    name = f"t{os.urandom(6).hex()}"
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{base}&options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture
def clock(dsn: str) -> Iterator[DatabaseClock]:
    clock = DatabaseClock(dsn)
    yield clock
    clock.close()


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def store(self, dsn: str, clock: DatabaseClock) -> Iterator[Store]:
        migrate(dsn)
        store = PostgresStore(dsn, outage_seconds=5.0, _now=NOW)
        yield store  # type: ignore[misc]
        store.close()
