"""A clock that moves when told, and that a database looks at: leases there are measured by its own time."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psycopg

from agent_run_ledger.stores.postgres import migrate
from agent_run_ledger.testing import FakeClock


def ledger_with_a_clock(url: str) -> None:
    """Make a ledger of an empty database, and in it the table by which `DatabaseClock` tells the time."""
    migrate(url)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE test_clock AS SELECT %s::double precision AS seconds", [FakeClock().elapsed()])
        connection.execute("GRANT SELECT ON test_clock TO PUBLIC")


class DatabaseClock(FakeClock):
    """A `FakeClock` for a database that `ledger_with_a_clock` made, which says the same time there."""

    SQL = "(SELECT seconds FROM test_clock)"
    """Its time as a `PostgresStore` asks for it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._connection: psycopg.Connection | None = None
        self._telling = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()

    def advance(self, seconds: float) -> None:
        with self._telling:
            if self._connection is None:  # most tests let no time pass
                self._connection = psycopg.connect(self._url, autocommit=True, prepare_threshold=None)
            # The database goes first: whoever sees here that it is time to look finds there that it is.
            self._connection.execute("UPDATE test_clock SET seconds = %s", [self.elapsed() + seconds])
            super().advance(seconds)
