"""Processes inside the test's own: each stops dead at any tick it is told, and what it leaves is what a crash leaves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, RunLedger, Step, current_step
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine.history import History
from agent_run_ledger.errors import StoreFull
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock

RUN = "run"
LEASE_SECONDS = 3600.0
WRITES = frozenset({"create", "claim", "append", "release", "annotate", "post"})


class Crash(BaseException):
    """The process is dead. Nothing it does from now on reaches anybody."""


@dataclass(frozen=True)
class Seen:
    """One real call, as the outside world saw it."""

    life: int
    tool: str
    key: str
    attempt: int
    given: str
    at: float


class World:
    """What outlives a process: the store's contents, the clock, and whoever is called."""

    def __init__(self, folder: Path | None, options: dict[str, Any]) -> None:
        self.clock = FakeClock()
        self.calls: list[Seen] = []
        self.lives = 0
        self.options = options
        self.broken: list[str] = []
        """Promises that were seen broken inside a step, where an assertion would pass for the step's own failure."""
        self.settled: list[set[str]] = []
        """For each life, the keys of the steps that nobody may call any more, as it began."""
        self._folder = folder
        self._memory = MemoryStore(clock=self.clock) if folder is None else None

    def store(self) -> Store:
        if self._memory is not None:
            return self._memory
        assert self._folder is not None
        return SqliteStore(self._folder / "runs.db", durability="process", clock=self.clock)

    @contextmanager
    def life(
        self, die_at: int | None = None, full_at: int | None = None, interrupt_at: int | None = None
    ) -> Iterator[Life]:
        """One process, from its start until it ends or dies. A `Crash` goes no further than this block."""
        life = Life(self, die_at, full_at, interrupt_at)
        try:
            yield life
        except Crash:
            pass
        finally:
            life.end()
            if self._memory is not None:
                self.clock.advance(LEASE_SECONDS + 1)  # there is no kernel to say that an owner in memory is dead

    def seen(self, key: str) -> list[Seen]:
        return [call for call in self.calls if call.key == key]


class Life:
    """One process with one ledger, `ledger` for face B.

    It dies at its `die_at`-th tick, is interrupted at its `interrupt_at`-th, and finds no room for its `full_at`-th append.
    """

    def __init__(self, world: World, die_at: int | None, full_at: int | None, interrupt_at: int | None) -> None:
        self.world = world
        self.number = world.lives
        world.lives += 1
        self.die_at = die_at
        self.full_at = full_at
        self.interrupt_at = interrupt_at
        self.appends = 0
        self.calls_again = False
        """Whether a step that the full disk refused is called again at once; else its program begins again."""
        self.ticks: list[str] = []
        self.is_dead = False
        self.store = world.store()
        self.mortal: Any = MortalStore(self.store, self)
        self._ledgers: list[AgentRunLedger | RunLedger] = []
        self._pipeline: RunLedger | None = None
        world.settled.append({step.key for step in self.log().positions.values() if _is_settled(step)})
        # No heartbeat comes on its own: time is the test's.
        self.options: dict[str, Any] = {
            "clock": world.clock,
            "lease_seconds": LEASE_SECONDS,
            "heartbeat_seconds": LEASE_SECONDS / 2,
        }
        self.ledger: AgentRunLedger = self.own(AgentRunLedger(self.mortal, **(self.options | world.options)))

    def own(self, ledger: Any) -> Any:
        """Make a ledger part of this process: it stops where the process stops."""
        ledger._driver = MortalDriver(ledger._driver, self)
        self._ledgers.append(ledger)
        return ledger

    def pipeline(self, steps: list[Step]) -> RunLedger:
        """Face A in this process: one ledger, as often as its program begins."""
        if self._pipeline is None:
            self._pipeline = self.own(RunLedger(RUN, self.mortal, steps=steps, **self.options))
        return self._pipeline

    def tick(self, place: str) -> None:
        """A place at which the process may die."""
        if self.is_dead:
            raise Crash
        self.ticks.append(place)
        if len(self.ticks) == self.interrupt_at:
            raise KeyboardInterrupt
        if len(self.ticks) == self.die_at:
            self.is_dead = True
            raise Crash

    def end(self) -> None:
        """What the kernel does for a process that is gone: its locks and descriptors go, and nothing is given back."""
        self.is_dead = True
        for ledger in self._ledgers:
            ledger._leases._stop.set()
            if ledger._leases._heart is not None:
                with ledger._leases._heart:
                    pass
        if isinstance(self.store, SqliteStore):
            self.store._owners.abandon()
            self.store.close()

    def log(self) -> History:
        """The run as it stands in the store."""
        return History.read(RUN, self.store.secret(RUN), self.store.read(RUN))

    # --- what flows are made of ---------------------------------------------------------------------------------------

    def tool(self, name: str, does: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
        """A function whose calls are seen. `does(given, n)` is told how often this very call has been seen by now."""

        def call(given: Any) -> Any:
            context = current_step()
            self._expect_intent(context.idempotency_key, context.attempt)
            try:
                self.expect_live_equals_stored()
            except AssertionError as error:
                self.world.broken.append(f"the live run is not the stored one: {error}")
            self.tick(f"in {name}, before its effect")
            seen = Seen(
                self.number, name, context.idempotency_key, context.attempt, repr(given), self.world.clock.now()
            )
            self.world.calls.append(seen)
            self.tick(f"in {name}, after its effect")
            return does(given, len(self.world.seen(context.idempotency_key)))

        return call

    def step(self, name: str, given: Any, does: Callable[[Any, int], Any] | None = None, **options: Any) -> Any:
        """One step of face B. What it returns must be in the store by then, and the live run must be what the store says."""
        function = self.tool(name, does or (lambda given, n: [name, given]))
        try:
            try:
                return self.ledger.execute_step(RUN, name, {"given": given}, function, **options)
            except StoreFull:
                if not self.calls_again:
                    raise
                return self.ledger.execute_step(RUN, name, {"given": given}, function, **options)
        finally:
            self.expect_live_equals_stored()

    def expect_live_equals_stored(self) -> None:
        """Whoever holds the run knows of it what the store says, no more and no less."""
        for ledger in self._ledgers:
            run = ledger._leases.run(RUN)
            if not self.is_dead and run.is_held:
                assert facts(run.history) == facts(self.log())

    def _expect_intent(self, key: str, attempt: int) -> None:
        last: Row = self.store.read(RUN)[-1]
        written = self.log().positions.get(last.position or "")
        if last.kind != "intent" or written is None or (written.key, written.attempts) != (key, attempt):
            self.world.broken.append(f"{key}, attempt {attempt}, was dispatched and its intent is not in the store")


class MortalStore:
    """A store in the hands of a process that may die just before and just after it writes."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store = store
        self._life = life

    def __getattr__(self, verb: str) -> Any:
        perform = getattr(self._store, verb)

        def mortal(*arguments: Any, **options: Any) -> Any:
            if self._life.is_dead:
                raise Crash
            if verb not in WRITES:
                return perform(*arguments, **options)
            self._life.tick(f"before {verb}")
            if verb == "append":
                self._life.appends += 1
                if self._life.appends == self._life.full_at:
                    raise StoreFull("the disk is full")
            answer = perform(*arguments, **options)
            self._life.tick(f"after {verb}")
            return answer

        return mortal

    def close(self) -> None:
        """A process that is dead gives nothing back, and a live one ends by `Life.end`."""


class MortalDriver(SyncDriver):
    """The driver of a process that may die at every yield: before its effect is performed, and after."""

    def __init__(self, driver: SyncDriver, life: Life) -> None:
        self.__dict__.update(driver.__dict__)
        self._life = life

    def perform(self, effect: Any) -> Any:
        self._life.tick(f"before {type(effect).__name__}")
        answer = super().perform(effect)
        self._life.tick(f"after {type(effect).__name__}")
        return answer


def _is_settled(step: Any) -> bool:
    """Whether a step has an outcome that stands: any but a failure that nothing has followed."""
    return bool(step.stands)


def facts(history: Any) -> Any:
    """All that a history says, as plain data: two of them can be compared."""
    if isinstance(history, dict):
        return {key: facts(value) for key, value in history.items()}
    if isinstance(history, list):
        return [facts(value) for value in history]
    slots = [name for kind in type(history).__mro__ for name in getattr(kind, "__slots__", ())]
    if not type(history).__module__.startswith("agent_run_ledger.engine"):
        return history
    said = vars(history) if hasattr(history, "__dict__") else {name: getattr(history, name, None) for name in slots}
    # The rule's memory is no part of the log; what it made of it is known to those who fold with a rule.
    ignored = ("_rule", "verdict", "looping")
    return {name: facts(value) for name, value in said.items() if name not in ignored}


def judge(world: World, rows: list[Row], log: History, findings: list[Any]) -> None:
    """Hold a run to its promises after its last life, whatever happened in between."""
    assert world.broken == []
    assert findings == []
    steps = {step.key: step for step in log.positions.values()}
    for call in world.calls:
        assert call.key in steps, f"{call.tool} was called and is not in the log"
        assert call.key not in world.settled[call.life], f"{call.tool} has an outcome and was called again"
    for key, step in steps.items():
        seen = world.seen(key)
        assert len({call.given for call in seen}) <= 1, f"{step.tool} was given other arguments"
        assert len(seen) <= step.attempts, f"{step.tool} was called without an intent"
        assert max(Counter((call.life, call.attempt) for call in seen).values(), default=0) <= 1
        if _is_settled(step):
            assert seen or step.outcome is None or step.outcome.ok == "cancelled"
    retry_at: dict[str | None, float] = {}
    for row in rows:
        body = json.loads(row.body)
        if row.kind == "intent":
            assert body["at"] >= retry_at.pop(row.position, 0.0), f"{body['tool']} was tried again before its time"
        elif "retry_at" in body:
            retry_at[row.position] = body["retry_at"]
            assert body["retry_at"] == body["at"] + body["wait"]
