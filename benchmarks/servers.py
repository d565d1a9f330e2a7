"""The PostgreSQL server that the benchmarks measure on: an embedded one with the settings that it comes with, or another that is named."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg

from agent_run_ledger.stores.postgres import migrate
from support.postgres import Server

VARIABLE = "BENCH_POSTGRES"
"""The environment variable that names another server, whose role may make databases."""


class Databases:
    """Databases on one server, each made when it is asked for."""

    def __init__(self, url: str, server: Server | None = None) -> None:
        self._url = url
        self.server = server
        """The server itself, where it is ours."""
        self._made: list[str] = []

    def empty(self) -> str:
        """The URL of a new one."""
        name = f"bench_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        self._made.append(name)
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    def ledger(self) -> str:
        """The URL of a new one that is a ledger."""
        url = self.empty()
        migrate(url)
        return url

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def drop(self) -> None:
        for name in self._made:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def __str__(self) -> str:
        """What it is and how it syncs."""
        names = ("server_version", "fsync", "wal_sync_method")
        shown = [f"{name} {self.execute(f'SHOW {name}')[0][0]}" for name in names]
        return f"PostgreSQL {', '.join(shown)}, psycopg {psycopg.__version__}"


@contextmanager
def databases() -> Iterator[Databases]:
    """Those of the server that the environment names, or of an embedded one that is there for the block."""
    if url := os.environ.get(VARIABLE):
        made = Databases(url)
        try:
            yield made
        finally:
            made.drop()
        return
    defaults = {"shared_buffers": "128MB", "max_wal_size": "1GB", "autovacuum": "on"}
    with Server(fsync=True, settings=defaults) as server:
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale")
        server.home.run(server.programs / "initdb", f"--pgdata={server.data}", *options)
        server.start()
        yield Databases(server.dsn(), server)
