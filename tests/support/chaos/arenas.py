"""Where a storm takes place: a server that crashes behind a network that fails, or a file that processes of one host share."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from agent_run_ledger.stores.postgres import migrate
from support.chaos.journal import Journal, now
from support.chaos.schedule import DISTURBANCES, OUTAGES, TROUBLES, Fault
from support.daemons import wait_until
from support.pair import Pair
from support.pgbouncer import PgBouncer
from support.postgres import Server
from support.proxy import Loss, Proxy, is_any

_DATABASE = "storm"
_WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


class Arena(Protocol):
    """A ledger's place and what can go wrong with it."""

    kinds: Mapping[str, int]
    """The faults that there are here, and how often of so many each comes."""
    is_death_proved: bool
    """Whether the store may know that an owner is dead before its lease is over."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def place(self, slot: int | None) -> str:
        """What the ledger is opened with by the worker of this slot; None: by whoever looks after the storm."""

    def inflict(self, fault: Fault, journal: Journal) -> Callable[[], None] | None:
        """Do something that is not about one worker; what ends it, and whatever else is wrong with the network, where it lasts."""

    def calm(self, journal: Journal) -> None:
        """Nothing goes wrong any more."""


class FileArena:
    """An SQLite file."""

    kinds: Mapping[str, int] = DISTURBANCES
    is_death_proved = True

    def __init__(self, folder: Path) -> None:
        self._path = folder / "storm.db"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A file needs no end."""

    def place(self, slot: int | None) -> str:
        return str(self._path)

    def inflict(self, fault: Fault, journal: Journal) -> None:
        raise AssertionError(f"{fault.kind} cannot happen to a file")

    def calm(self, journal: Journal) -> None:
        """Nothing went wrong with it."""


class ServerArena:
    """One PostgreSQL server. Every second worker, and whoever asks something of runs, goes through a network that fails.

    `pooled`: all go through PgBouncer in transaction mode. `partitions`: into so many the tables are divided.
    """

    kinds: Mapping[str, int] = DISTURBANCES | OUTAGES | TROUBLES
    is_death_proved = False

    def __init__(self, *, pooled: bool = False, partitions: int | None = None) -> None:
        # What a COMMIT has answered is with the kernel at least, which does not crash here; with fsync it also takes its time.
        self._server = Server(fsync=True)
        self._pooler = PgBouncer(self._server) if pooled else None
        self._proxy = Proxy((self._pooler or self._server).address)
        self._partitions = partitions
        self._losses: list[tuple[str, Loss]] = []

    def __enter__(self) -> Self:
        self._server.start()
        with self._server.connect() as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}")
        migrate(self._server.dsn(_DATABASE), partitions=self._partitions)
        if self._pooler is not None:
            self._pooler.start()
        self._proxy.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._proxy.refuse()
        self._proxy.cut()
        if self._pooler is not None:
            self._pooler.close()
        self._server.close()

    def place(self, slot: int | None) -> str:
        way = (self._pooler or self._server) if slot is not None and slot % 2 else self._proxy
        return way.dsn(_DATABASE, connect_timeout="3")

    def inflict(self, fault: Fault, journal: Journal) -> Callable[[], None] | None:
        chance, proxy = random.Random(fault.seed), self._proxy
        if fault.kind == "crash":
            began = now()
            self._server.kill()
            journal.note("crash", began=began)
            self._server.start()
        elif fault.kind == "terminate":
            journal.note("terminate", hit=self._server.terminate_backends(_DATABASE))
        elif fault.kind == "cut":
            journal.note("cut", hit=proxy.cut())
        elif fault.kind == "lose reply":
            self._losses.append((fault.kind, proxy.lose_reply(chance.choice([_writes_entries, _changes, _changes]))))
        elif fault.kind == "lose request":
            self._losses.append((fault.kind, proxy.lose_request(is_any)))
        elif fault.kind == "refuse":
            journal.note("refuse", hit=1)
            proxy.refuse()
            proxy.cut()
            return proxy.heal
        elif fault.kind == "black hole":
            journal.note("black hole", hit=1)
            proxy.black_hole()
            return proxy.heal
        else:
            journal.note("delay", hit=1)
            most = chance.choice([0.005, 0.02, 0.1])
            proxy.delay(lambda: chance.uniform(0.0, most))
            return proxy.heal
        return None

    def calm(self, journal: Journal) -> None:
        self._proxy.heal()
        for kind, loss in self._losses:
            if loss.wait(0.0):
                journal.note(kind, hit=1, statement=" ".join((loss.statement or "").split())[:60])


class PairArena:
    """A primary and its standby, which has all that the primary has answered for. Everybody goes to whichever takes writes."""

    kinds: Mapping[str, int] = {"failover": 1}
    is_death_proved = False

    def __init__(self) -> None:
        self._pair = Pair()

    def __enter__(self) -> Self:
        self._pair.start()
        with self._pair.primary.connect() as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}")
        migrate(self._pair.dsn(_DATABASE))
        with self._pair.standby.connect() as connection:  # as in a house where both are set up alike
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pair.__exit__(kind, error, trace)

    def place(self, slot: int | None) -> str:
        return self._pair.dsn(_DATABASE)

    def inflict(self, fault: Fault, journal: Journal) -> None:
        """The primary is no more. An operator promotes the standby; when he sees commits wait for a further standby, he lets them go on."""
        assert fault.kind == "failover"
        began = now()
        self._pair.primary.kill()
        journal.note("crash", began=began)
        self._pair.promote()
        with self._pair.standby.connect() as connection:
            wait_until(
                lambda: connection.execute(_WAITING).fetchone(), "a commit to wait for a standby that is not there"
            )
            journal.note("failover")
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")

    def calm(self, journal: Journal) -> None:
        """What is dead stays dead."""


def _changes(statement: str) -> bool:
    return "UPDATE" in statement or "INSERT" in statement


def _writes_entries(statement: str) -> bool:
    return "INSERT INTO entries" in statement
