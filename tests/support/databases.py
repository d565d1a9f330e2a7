"""Databases that are there for one test, on the server that the tests start, or on one that they are told."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from urllib.parse import quote, urlsplit

import psycopg

from support.daemons import wait_until
from support.postgres import Server

OTHER_SERVER = "AGENT_RUN_LEDGER_TEST_DSN"
"""The environment variable with a URL of another server, whose role may make databases: the same tests run there then."""

Prepare = Callable[[str], object]
"""Is given the URL of an empty database and makes in it what every test wants to find there."""


class Databases:
    """Databases on one server, each a copy of a template that is prepared once. Not for use by several threads at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.prefix = f"test_{secrets.token_hex(4)}"
        """What the names of its databases begin with: several test runs may share a server."""
        self._count = 0
        self._templates: dict[Prepare, str] = {}
        self._over: list[str] = []
        self._connection: psycopg.Connection | None = None

    def url(self, database: str) -> str:
        """Where a database of this server is."""
        return urlsplit(self._url)._replace(path=f"/{quote(database)}").geturl()

    @contextmanager
    def fresh(self, prepare: Prepare) -> Iterator[str]:
        """A database as `prepare` makes them, for one test: its URL.

        It is dropped later, when another one is made: those who were connected have gone by then, and nobody waits for their end.
        """
        self._drop_all_but(1)
        name = self._new_name()
        self._execute(f"CREATE DATABASE {name} TEMPLATE {self._template(prepare)} STRATEGY file_copy")
        try:
            yield self.url(name)
        finally:
            self._over.append(name)

    def close(self) -> None:
        """Drop all that was made here."""
        self._over += self._templates.values()
        self._templates.clear()
        self._drop_all_but(0)
        if self._connection is not None:
            self._connection.close()

    def _template(self, prepare: Prepare) -> str:
        if prepare not in self._templates:
            name = self._new_name()
            self._execute(f"CREATE DATABASE {name} TEMPLATE template0")
            self._templates[prepare] = name
            prepare(self.url(name))
            self._let_nobody_stay(name)
        return self._templates[prepare]

    def _let_nobody_stay(self, database: str) -> None:
        """What somebody is connected to, as a pooler still is, can be no template."""
        ended = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{database}'"
        wait_until(lambda: self._execute(ended).fetchone() == (0,), "a template that nobody is connected to")

    def _drop_all_but(self, last: int) -> None:
        while len(self._over) > last:
            self._execute(f"DROP DATABASE IF EXISTS {self._over.pop(0)} WITH (FORCE)")

    def _new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}_{self._count}"

    def _execute(self, statement: str) -> psycopg.Cursor:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True, prepare_threshold=None)
        return self._connection.execute(statement)


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
    if server is None:
        made.close()
    else:
        server.close()
    _of_this_process.cache_clear()
