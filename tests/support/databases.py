"""Databases that are there for one test, on the server that the tests start, or on one that they are told."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote, urlsplit

import psycopg
from psycopg.rows import TupleRow

from support.daemons import wait_until
from support.postgres import Server

OTHER_SERVER = "AGENT_RUN_LEDGER_TEST_DSN"
"""The environment variable with the URL of another server, for a role that may do anything there: the same tests run on that then."""

Prepare = Callable[[str], object]
"""Is given the URL of an empty database and makes in it what every test wants to find there."""


class Databases:
    """Databases on one server, each as `prepare` makes them. Not for use by several threads at once.

    To make one costs far more than most tests do. So one that a test has left is used again: under another name, that nobody who was
    left behind knows, with the rows that it was prepared with, and only where its schema is as it was prepared, too.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.prefix = f"test_{secrets.token_hex(4)}"
        """What the names of its databases begin with: several test runs may share a server."""
        self._count = 0
        self._prepared: dict[Prepare, _Prepared] = {}
        self._connection: psycopg.Connection | None = None

    def url(self, database: str) -> str:
        """Where a database of this server is."""
        return urlsplit(self._url)._replace(path=f"/{quote(database)}").geturl()

    @contextmanager
    def fresh(self, prepare: Prepare) -> Iterator[str]:
        """A database as `prepare` makes them, for one test: its URL."""
        if prepare not in self._prepared:
            self._prepared[prepare] = self._prepare(prepare)
        prepared = self._prepared[prepare]
        name = self._used_again(prepared) or self._new(prepared.template)
        try:
            yield self.url(name)
        finally:
            prepared.left.append(name)

    def close(self) -> None:
        """Drop all that was made here."""
        for prepared in self._prepared.values():
            for name in (prepared.template, *prepared.left):
                self._drop(name)
        self._prepared.clear()
        if self._connection is not None:
            self._connection.close()

    def _prepare(self, prepare: Prepare) -> _Prepared:
        name = self._new("template0")
        prepare(self.url(name))
        with psycopg.connect(self.url(name)) as connection:
            tables = [table for (table,) in connection.execute(_TABLES_WITH_ROWS)]
            schema = connection.execute(_SCHEMA).fetchone()
            rows = {table: _copied_out(connection, table) for table in tables}
        self._send_home(name)
        return _Prepared(name, schema, rows)

    def _used_again(self, prepared: _Prepared) -> str | None:
        """The one that was left first, as it was prepared; None where there is none, or it was left just now."""
        while len(prepared.left) > 1:
            name, left = self._new_name(), prepared.left.pop(0)
            self._send_home(left)
            self._execute(f"ALTER DATABASE {left} RENAME TO {name}")
            with psycopg.connect(self.url(name), prepare_threshold=None) as connection:
                if connection.execute(_SCHEMA).fetchone() == prepared.schema:
                    prepared.restore(connection)
                    return name
            self._drop(name)
        return None

    def _new(self, template: str) -> str:
        name = self._new_name()
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return name

    def _drop(self, name: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _send_home(self, database: str) -> None:
        """End all who are connected to a database; a pooler may be for long."""
        ended = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{database}'"
        wait_until(lambda: self._execute(ended).fetchone() == (0,), "a database that nobody is connected to")

    def _new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}_{self._count}"

    def _execute(self, statement: str) -> psycopg.Cursor:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True, prepare_threshold=None)
        return self._connection.execute(statement)


_OURS = "relnamespace::regnamespace::text !~ '^pg_|^information_schema$'"

_TABLES_WITH_ROWS = f"""
SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND {_OURS} AND pg_relation_size(oid) > 0
"""

# All that a test may have changed beside rows.
_SCHEMA = f"""
WITH ours AS (SELECT * FROM pg_class WHERE {_OURS}), told AS (
    SELECT concat_ws(' ', oid, relname, relkind, reloptions, relacl) AS what FROM ours
    UNION ALL SELECT concat_ws(' ', attrelid, attname, atttypid, attnotnull) FROM pg_attribute
        WHERE attrelid IN (SELECT oid FROM ours)
    UNION ALL SELECT concat_ws(' ', conrelid, conname) FROM pg_constraint WHERE conrelid IN (SELECT oid FROM ours)
    UNION ALL SELECT concat_ws(' ', tgrelid, tgname, tgenabled) FROM pg_trigger
    UNION ALL SELECT concat_ws(' ', oid, proname, prosrc) FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', setrole, setconfig) FROM pg_db_role_setting
        WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
)
SELECT count(*), md5(string_agg(what, '' ORDER BY what)) FROM told
"""


@dataclass
class _Prepared:
    template: str
    schema: TupleRow | None
    rows: dict[str, bytes]
    """What the tables that are not empty hold."""
    left: list[str] = field(default_factory=list)
    """Its copies that tests have left, the first one first."""

    def restore(self, connection: psycopg.Connection) -> None:
        """Take away all rows, and put back those that were there."""
        tables = [table for (table,) in connection.execute(_TABLES_WITH_ROWS)]
        connection.execute(
            "SET LOCAL session_replication_role = replica"
        )  # triggers keep a ledger's rows from changing
        if tables:
            connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
        for table, rows in self.rows.items():
            with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
                copy.write(rows)


def _copied_out(connection: psycopg.Connection, table: str) -> bytes:
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} TO STDOUT") as copy:
        return b"".join(copy)


@cache
def _of_this_process() -> tuple[Databases, Server | None]:
    if url := os.environ.get(OTHER_SERVER):
        return Databases(url), None
    server = Server().start()
    return Databases(server.dsn()), server


def databases() -> Databases:
    """Those of this test process. Its server starts when it is first asked for, unless the environment names another."""
    return _of_this_process()[0]


def let_go() -> None:
    """Stop the server of this test process, if there is one; called when its tests are over."""
    if not _of_this_process.cache_info().currsize:
        return
    made, server = _of_this_process()
    made.close()
    if server is not None:
        server.close()
    _of_this_process.cache_clear()
