"""The store on PostgreSQL: the conformance suite, and what only a server can do to a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from agent_run_ledger.contract import Store
from agent_run_ledger.stores.postgres import PostgresStore
from agent_run_ledger.testing import StoreContract
from support.clocks import DatabaseClock, ledger_with_a_clock
from support.databases import Databases, databases
from support.pgbouncer import PgBouncer
from support.postgres import Server


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


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    with Server() as server, PgBouncer(server.start()) as pooler:
        yield pooler


@pytest.fixture(scope="module")
def made(pooler: PgBouncer) -> Iterator[Databases]:
    made = Databases(pooler.server.dsn())
    yield made
    made.close()


@pytest.mark.system("pgbouncer")
class TestPostgresStoreBehindPgBouncer(StoreContract):
    """In transaction mode: each statement may be done by another session than the last."""

    @pytest.fixture
    def dsn(self, made: Databases) -> Iterator[str]:
        with made.fresh(ledger_with_a_clock) as dsn:
            yield dsn

    @pytest.fixture
    def store(self, pooler: PgBouncer, dsn: str, clock: DatabaseClock) -> Iterator[Store]:
        store = PostgresStore(pooler.dsn(urlsplit(dsn).path[1:]), outage_seconds=5.0, _now=DatabaseClock.SQL)
        yield store
        store.close()
