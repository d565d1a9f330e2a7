"""Processes inside the test's own: each stops dead at any tick it is told, and what it leaves is what a crash leaves."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agent_run_ledger import AgentRunLedger, Effect, Receipt, RunLedger, Step, current_step
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.drivers.context import StepContext
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine.history import KEPT_BYTES, History, StepHistory
from agent_run_ledger.errors import StoreFull
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock
from agent_run_ledger.words import RunState

RUN = "run"
LEASE_SECONDS = 3600.0
WRITES = frozenset({"create", "claim", "append", "append_all", "release", "annotate", "post"})


TOLD = frozenset({"completed", "failed", "unstorable"})
"""The outcomes that somebody outside was called for."""


class Crash(BaseException):
    """The process is dead. Nothing it does from now on reaches anybody."""


@dataclass(frozen=True)
class Seen:
    """One real call, as the outside world saw it."""

    life: int
    run: str
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
        self.lost = 0
        """How many requests were lost before they reached anybody."""
        self.questions: list[str] = []
        """The keys that receivers were asked about, each time."""
        self.lives = 0
        self.options = options
        self.broken: list[str] = []
        """Promises that were seen broken inside a step, where an assertion would pass for the step's own failure."""
        self.settled: list[set[str]] = []
        """For each life, the keys of the steps that nobody may call any more, as it began."""
        self.heard: list[list[Any]] = []
        """For each life, what its program was told, in the order in which it was told."""
        self.agents: set[str] = set()
        """The names of agents: a step of that name is a run of its own, and nobody outside sees its call."""
        self._folder = folder
        self._memory = MemoryStore(clock=self.clock) if folder is None else None

    def store(self) -> Store:
        if self._memory is not None:
            return self._memory
        assert self._folder is not None
        return SqliteStore(self._folder / "runs.db", durability="process", clock=self.clock)

    @contextmanager
    def life(
        self,
        die_at: int | None = None,
        full_at: int | None = None,
        interrupt_at: int | None = None,
        kind: type[AnyLife] | None = None,
    ) -> Iterator[AnyLife]:
        """One process, from its start until it ends or dies. A `Crash` goes no further than this block."""
        life: Any = (kind or Life)(self, die_at, full_at, interrupt_at)
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
        world.heard.append([])
        logs = [self.log(run_id) for run_id in self.runs()]
        world.settled.append({key for log in logs for key, step in _by_key(log).items() if _is_settled(step, log)})
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
            durability = self.world.options.get("durability", "full")
            self._pipeline = self.own(RunLedger(RUN, self.mortal, steps=steps, durability=durability, **self.options))
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
            self.store._holding.owners.abandon()
            self.store.close()

    def runs(self) -> list[str]:
        """The runs in the store."""
        return [summary.head.run_id for summary in self.store.summaries()]

    def log(self, run_id: str = RUN) -> History:
        """A run as it stands in the store."""
        return History.read(run_id, self.store.secret(run_id), packed(self.store).read(run_id))

    # --- what flows are made of ---------------------------------------------------------------------------------------

    def tool(self, name: str, does: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
        """A function whose calls are seen. `does(given, n)` is told how often this very call has been seen by now."""

        def call(given: Any) -> Any:
            return does(given, self.takes_effect(name, given))

        return call

    def takes_effect(self, name: str, given: Any) -> int:
        """The calling step does what the outside world sees. Returns how often it has seen this very call by now."""
        context = current_step()
        if self.is_dead:
            raise Crash
        self._expect_intent(context)
        try:
            self.expect_live_equals_stored()
        except AssertionError as error:
            self.world.broken.append(f"the live run is not the stored one: {error}")
        self.tick(f"in {name}, before its effect")
        key, at = context.idempotency_key, self.world.clock.now()
        self.world.calls.append(Seen(self.number, context.run_id, name, key, context.attempt, repr(given), at))
        self.tick(f"in {name}, after its effect")
        return len(self.world.seen(key))

    def receipt(self, name: str, unknown: int = 0) -> Callable[[str, dict[str, Any]], Receipt]:
        """What the outside world says of a key, honestly; it cannot say anything to the first `unknown` questions."""

        def ask(key: str, arguments: dict[str, Any]) -> Receipt:
            if self.is_dead:
                raise Crash
            self.tick(f"in the question about {name}, before it is heard")
            self.world.questions.append(key)
            if len(self.world.questions) <= unknown:
                answer = Receipt.unknown("the receiver is down")
            elif self.world.seen(key):
                answer = Receipt.found([name, arguments["given"]])
            else:
                answer = Receipt.absent()
            self.tick(f"in the question about {name}, after it is heard")
            return answer

        return ask

    def is_lost(self, times: int) -> bool:
        """Whether this request gets lost on its way, as the first `times` do."""
        self.world.lost += self.world.lost < times + 1
        return self.world.lost <= times

    def hears(self, told: Any) -> None:
        """The program knows this now: whatever it does next may depend on it."""
        if not self.is_dead:
            self.world.heard[self.number].append(told)

    def step(
        self, name: str, given: Any, does: Callable[[Any, int], Any] | None = None, lost: int = 0, **options: Any
    ) -> Any:
        """One step of face B. What it returns must be in the store by then, and the live run must be what the store says.

        The first `lost` requests never get there, of which their sender sees no more than that nobody answers.
        """
        reaches = self.tool(name, does or (lambda given, n: [name, given]))

        def function(given: Any) -> Any:
            if lost and self.is_lost(lost):
                raise TimeoutError("nobody answers")
            return reaches(given)

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
        """Whoever holds a run knows of it what the store says, no more and no less."""
        for ledger in self._ledgers:
            for run in ledger._leases.held():
                with run.lock:
                    if not self.is_dead and run.is_held:
                        assert facts(run.history) == facts(self.log(run.run_id))

    def _expect_intent(self, context: StepContext) -> None:
        step = self.log(context.run_id).positions.get(context.position)
        written = None if step is None else (step.key, step.attempts, step.outcome)
        if written != (context.idempotency_key, context.attempt, None):
            self.world.broken.append(f"{context.tool_name} was dispatched, and the log says {written} of it")


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
            elif verb == "append_all":
                self._life.appends += 1
                if self._life.appends == self._life.full_at:  # it raises nothing, and tells each of them
                    return [StoreFull("the disk is full") for _ in arguments[0]]
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


AnyLife = TypeVar("AnyLife", bound=Life)


def _by_key(log: History) -> dict[str, StepHistory]:
    """The steps of a run by key; of those that continue each other the last."""
    return {step.key: step for step in log.positions.values()}


def _is_settled(step: StepHistory, log: History) -> bool:
    """Whether a step has an outcome that stands, and no later call may continue it: any but a failure that nothing has followed."""
    return step.stands and log.doubts.get((step.tool, step.input)) is not step


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
    ignored = ("suspicion",)
    told = {name: facts(value) for name, value in said.items() if name not in ignored}
    for name in ("arguments", "payload"):  # what is long is not kept in memory, its digest is
        if isinstance(told.get(name), bytes) and len(told[name]) > KEPT_BYTES:
            told[name] = None
    return told


def judge(world: World, reader: Life) -> None:
    """Hold all runs to their promises after their last life, whatever happened in between."""
    assert world.broken == [], world.broken
    assert reader.ledger.verify().findings == []
    logs = {run_id: reader.log(run_id) for run_id in reader.runs()}
    steps = {key: (run_id, step) for run_id, log in logs.items() for key, step in _by_key(log).items()}
    for call in world.calls:
        assert call.key in steps, f"{call.tool} was called and is not in the log"
        assert call.key not in world.settled[call.life], f"{call.tool} has an outcome and was called again"
    for key, (run_id, step) in steps.items():
        seen = world.seen(key)
        assert {call.run for call in seen} <= {run_id}
        assert len({call.given for call in seen}) <= 1, f"{step.tool} was given other arguments"
        assert len(seen) <= step.attempts, f"{step.tool} was called without an intent"
        if step.declared is Effect.MUTATE:
            assert len(seen) <= 1, f"{step.tool} took effect twice"
        if seen and step.declared is Effect.MUTATE and logs[run_id].doubts.get((step.tool, step.input)) is not step:
            assert step.outcome is None or step.outcome.ok != "cancelled", (
                f"{step.tool} took effect, and is written off"
            )
        assert max(Counter((call.life, call.attempt) for call in seen).values(), default=0) <= 1
        if step.stands and step.outcome is not None and step.outcome.ok in TOLD - ({"failed"} if world.lost else set()):
            assert seen or step.tool in world.agents, f"{step.tool} has an outcome and was never called"
    keys = {(call.run, call.tool, call.given): call.key for call in world.calls if call.tool.startswith("pay once")}
    for call in world.calls:
        what = (call.run, call.tool, call.given)
        assert call.key == keys.get(what, call.key), f"{call.tool} was sent with a second key"
    for run_id in logs:
        judge_log(run_id, reader.store.read(run_id))
    for earlier, later in itertools.combinations([heard for heard in world.heard if heard], 2):
        shorter = min(len(earlier), len(later))
        assert earlier[:shorter] == later[:shorter], "a program was told something else than the one before it"


def judge_log(run_id: str, rows: list[Row]) -> None:
    """Hold one run's entries to what must be true after each of them."""
    retry_at: dict[str | None, float] = {}
    mutating: dict[str | None, str] = {}
    in_flight: dict[
        str | None, int
    ] = {}  # by position, under which token: what an earlier owner dispatched runs no more
    log = History(run_id, b"")
    for row in rows:
        body = json.loads(row.body)
        log.absorb(row, body)
        if row.kind in ("intent", "asked"):
            assert body["at"] >= retry_at.pop(row.position, 0.0), f"{row.position} was tried again before its time"
        if row.kind == "intent":
            assert mutating.get(row.position, "outcome") == "outcome", f"{body['tool']} in doubt was dispatched again"
            in_flight[row.position] = body["token"]
        elif row.position in in_flight and row.kind in ("outcome", "parked", "asked"):
            del in_flight[row.position]
        if "retry_at" in body:
            retry_at[row.position] = body["retry_at"]
            assert body["retry_at"] == body["at"] + body["wait"]
        if body.get("effect") == Effect.MUTATE or row.position in mutating:
            is_absent = row.kind == "answered" and body["verdict"] == "absent"
            mutating[row.position] = "outcome" if is_absent else row.kind
        if row.kind in ("intent", "outcome") or (row.kind == "parked" and row.position is not None):
            quiet = RunState.BLOCKED if log.waiting else RunState.RUNNING if in_flight else RunState.CHECKPOINTED
            runs = body["token"] in in_flight.values()
            assert body["state"] == (RunState.RUNNING if runs else quiet), f"after entry {row.seq}, {row.kind}"
