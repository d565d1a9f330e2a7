"""A ledger's storage with a clock that a test moves, and as many programs on it as the test wants."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import psycopg
import pytest

from agent_run_ledger import AgentRunLedger, RunLedger, Step
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.drivers import reading
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.packed import PackedStore, packed
from agent_run_ledger.stores.postgres import PostgresStore
from agent_run_ledger.testing import FakeClock
from support.clocks import DatabaseClock, ledger_with_a_clock
from support.databases import databases

SYSTEM = SystemClock()
KINDS = ("memory", "sqlite", "postgres")
LEASE_SECONDS = 30.0

HOSTILE = {
    "path traversal": "../../etc/passwd",
    "script tag": "<script>alert(1)</script>",
    "SQL": "'; DROP TABLE entries; --",
    "template": "{{7*7}}",
    "ELF": "\x7fELF\x02\x01\x01\x00",
}
"""The five samples that must stay data wherever they come in."""


class Died(BaseException):
    """The process ends here: no outcome, no word to anybody."""


class Bench:
    """One storage, one clock. Every ledger that is opened here is another owner, as another process is."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "ledger.db"
        self._resources = ExitStack()
        self.clock: Any = FakeClock()
        self._shared: MemoryStore | None = None
        self.dsn: str | None = None
        if kind == "memory":
            self._shared = MemoryStore(clock=self.clock)
        elif kind == "postgres":
            self.dsn = self._resources.enter_context(databases().fresh(ledger_with_a_clock))
            self.clock = self._resources.enter_context(DatabaseClock(self.dsn))
        self._opened: list[AgentRunLedger | RunLedger] = []
        self._looking: Store | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            for ledger in self._opened:
                ledger.close()
            if self._looking is not None:
                self._looking.close()

    def on_real_time(self) -> Self:
        """The same storage with the machine's clock: for workers, which wait in threads of their own. Before anything is opened."""
        self.clock = SYSTEM
        if self._shared is not None:
            self._shared = MemoryStore(clock=SYSTEM)
        return self

    def store(self) -> Store:
        """A store on this storage, to look with."""
        if self._shared is not None:
            return self._shared
        if self.dsn is not None:
            moved = {} if self.clock is SYSTEM else {"_now": DatabaseClock.SQL}
            return PostgresStore(self.dsn, **moved)
        return open_store(self.path, durability="process", clock=self.clock)

    def place(self) -> Any:
        """What a ledger is opened with: a path, or a store where the place alone does not say whose clock counts."""
        return self.path if self.kind == "sqlite" else self.store()

    def open(self, **options: Any) -> AgentRunLedger:
        """Face B, for a new owner."""
        ledger = AgentRunLedger(self.place(), **({"durability": "process", "clock": self.clock} | options))
        self._opened.append(ledger)
        return ledger

    def pipeline(self, run_id: str, *steps: Step, **options: Any) -> RunLedger:
        """Face A, for a new owner."""
        defaults = {"steps": steps, "durability": "process", "clock": self.clock}
        ledger = RunLedger(run_id, self.place(), **(defaults | options))
        self._opened.append(ledger)
        return ledger

    def owners_die(self) -> None:
        """Let every lease run out, as it does when the processes that hold them are gone."""
        self.clock.advance(LEASE_SECONDS + 1)

    def rows(self, run_id: str) -> list[Row]:
        """Every entry of a run, as it was written."""
        if self._looking is None:
            self._looking = packed(self.store())
        return self._looking.read(run_id)

    def kinds(self, run_id: str) -> list[str]:
        """What the entries of a run are, in order."""
        return [row.kind for row in self.rows(run_id)]

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """What anybody with the storage can read in it, where it speaks SQL."""
        if self.dsn is None:
            with raw(self.path) as file:
                return [tuple(row) for row in file.execute(statement)]
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(statement).fetchall()  # type: ignore[call-overload, no-any-return]

    def execute(self, *statements: str, without_triggers: bool = False) -> None:
        """What anybody with the storage can do to it, where it speaks SQL: these statements, in one transaction."""
        if self.dsn is None:
            with raw(self.path, without_triggers=without_triggers) as file:
                for statement in statements:
                    file.execute(statement)
            return
        with psycopg.connect(self.dsn) as connection:
            if without_triggers:
                connection.execute("SET LOCAL session_replication_role = replica")
            for statement in statements:
                connection.execute(statement)


def packs_nothing(ledger: AgentRunLedger) -> AgentRunLedger:
    """The ledger, from now on as one of a schema before 6: all its payloads stand plainly, long ones in a table of their own."""
    ledger._stand_on(cast(Store, _PacksNothing(reading.behind(ledger._store))), ledger._clock)
    return ledger


class _PacksNothing(PackedStore):
    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        for verb in ("create", "enqueue", "adopt", "append", "append_all"):
            setattr(self, verb, getattr(inner, verb))


RUN, GOAL = "run", "go on"


def program(bench: Bench, **options: Any) -> AgentRunLedger:
    """A program that begins at its first line after whoever had the run before has died."""
    bench.owners_die()
    ledger = bench.open(**options)
    ledger.create_run(GOAL, RUN)
    return ledger


class Tool:
    """A function that counts its calls. It answers `answers` one after the other, the last for ever; exceptions are raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers) or [None]
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        answer = self._answers[min(self.calls, len(self._answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises."""

    def function(**_: Any) -> NoReturn:
        raise error

    return function


def never(**_: Any) -> NoReturn:
    """The function of a step that must not be dispatched."""
    pytest.fail("a step was dispatched that must not be")


@contextmanager
def raw(path: Path, *, without_triggers: bool = False) -> Iterator[sqlite3.Connection]:
    """What anybody with the file can do to it: a plain connection, committed and closed at the end."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    try:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for trigger in triggers if without_triggers else ():
            connection.execute(f"DROP TRIGGER {trigger['name']}")
        yield connection
        for trigger in triggers if without_triggers else ():
            connection.execute(trigger["sql"])
        connection.commit()
    finally:
        connection.close()


@contextmanager
def told(category: type[Warning]) -> Iterator[list[str]]:
    """The texts of the warnings of one category that the block gives."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if issubclass(warning.category, category)]
