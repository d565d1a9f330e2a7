"""PgBouncer in transaction mode in front of a server: any statement may be done by another session than the last."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Self

import psycopg

from support.daemons import Home, free_port, wait_until
from support.postgres import Address, Server, dsn

_SETTINGS = """
[databases]
* = host={host} port={port}

[pgbouncer]
listen_addr = {address.host}
listen_port = {address.port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
admin_users = postgres
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 500
server_lifetime = 60
log_connections = 0
log_disconnections = 0
"""


class PgBouncer:
    """A pooler that lets clients have one of so many sessions of a database for the time of one transaction."""

    def __init__(self, server: Server, *, sessions: int = 5) -> None:
        self.server = server
        self.home = Home("pgbouncer")
        self.address = Address("127.0.0.1", free_port())
        self._settings = self.home.path / "pgbouncer.ini"
        users = self.home.path / "users.txt"
        users.write_text('"postgres" ""\n')
        host, port = server.socket
        self._settings.write_text(
            _SETTINGS.format(host=host, port=port, address=self.address, users=users, sessions=sessions)
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def dsn(self, database: str = "postgres", **parameters: str) -> str:
        """A URL for a client."""
        return dsn(database, self.address, **parameters)

    def start(self) -> Self:
        """Start it, and return when it lets clients in."""
        assert self._process is None, "it is up"
        log = self.home.path / "log"
        self._process = self.home.start("pgbouncer", self._settings, cwd=self.home.path, log=log)
        wait_until(self._is_ready, "PgBouncer to be ready")
        return self

    def kill(self) -> None:
        """SIGKILL: its clients' connections end there."""
        assert self._process is not None, "it is down"
        self._process.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """End it, and remove all that it kept."""
        if self._process is not None:
            self.kill()
        self.home.close()

    def _is_ready(self) -> bool:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            self._process = None
            raise AssertionError(f"PgBouncer ended with status {status}:\n{(self.home.path / 'log').read_text()}")
        try:
            psycopg.connect(self.dsn("pgbouncer"), autocommit=True).close()
        except psycopg.OperationalError:
            return False
        return True
