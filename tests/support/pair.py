"""Two servers, of which the second has all that the first has answered for: what a failover needs."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self

from support.daemons import wait_until
from support.postgres import Server, dsn


class Pair:
    """A primary that answers a COMMIT when its standby has it on its disk, and the standby. Both listen on 127.0.0.1."""

    def __init__(self, programs: Literal["embedded", "distribution"] = "embedded") -> None:
        self.primary, self.standby = Server(programs, tcp=True), Server(programs, tcp=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.primary.close()
        self.standby.close()

    def dsn(self, database: str = "postgres", **parameters: str) -> str:
        """A URL for a client that finds whichever of the two takes writes."""
        parameters = {"target_session_attrs": "read-write", "connect_timeout": "5"} | parameters
        return dsn(database, self.primary.address, self.standby.address, **parameters)

    def start(self) -> Self:
        """Start both, and return when the primary waits for the standby with every COMMIT."""
        self.primary.start()
        source = dsn("postgres", self.primary.socket)
        options = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        self.standby.home.run(
            self.standby.programs / "pg_basebackup", f"--pgdata={self.standby.data}", f"--dbname={source}", *options
        )
        self.standby.start()
        with self.primary.connect() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(self._is_synchronous, "the standby to be synchronous")
        return self

    def promote(self) -> None:
        """Make a primary of the standby, which waits for nobody, and return when it takes writes."""
        with self.standby.connect() as connection:
            connection.execute("SELECT pg_promote(wait => true)")

    def _is_synchronous(self) -> bool:
        with self.primary.connect() as connection:
            return (
                connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone() is not None
            )
