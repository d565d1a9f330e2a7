"""One process under test: it notes what it does, and stops dead at the durable boundary it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from agent_run_ledger.contract import Row, Store
from agent_run_ledger.drivers.context import StepContext, callers, step_variable
from agent_run_ledger.engine.effects import Inquire, Invoke, Rest, Turn, Wait, Warn
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.errors import ReplayDivergence, StepInDoubt, UndeclaredEffectWarning
from agent_run_ledger.ledger import Ledger
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.testing.clock import SkippingClock
from agent_run_ledger.testing.notes import (
    Asked,
    Called,
    Diverged,
    Doubted,
    LeftRunning,
    MakeNote,
    Passed,
    Stood,
    TookKey,
)

AnyLedger = TypeVar("AnyLedger", bound=Ledger)
T = TypeVar("T")
Perform = Callable[[Any], Any]
PerformAsync = Callable[[Any], Awaitable[Any]]
Answer = Callable[[Any, str], object]
"""What the outside does when a run waits for a signal or an approval: it is given the ledger and the run's id."""

PATIENCE_SECONDS = 5.0
"""How long a process that has ended is waited for, while functions that it called in threads go on."""


class Crash(SystemExit):
    """The process is dead: nothing it does from now on reaches the store.

    It is a `SystemExit`, for which an event loop stands still at once and a thread ends without a word.
    """


_MOST_ANSWERS = 10
"""How often somebody who answers is asked to, for one wait: what he sends may be for another one."""


class Unanswered(BaseException):
    """The flow waits for somebody, and nobody is there who would answer."""


class Life:
    """One process, from its start to its end or its death. What flows are run on is made its own with `own`.

    Its boundaries are where the durable state changes: behind every write to the store, and behind every call of a step's function.
    A death between two of them leaves what a death at the former leaves. Dead is what no longer reaches the store; a function that
    runs in a thread at that moment comes to its end, as it might have just before.
    """

    def __init__(
        self,
        store: Store,
        clock: SkippingClock,
        note: MakeNote,
        *,
        answer: Answer | None = None,
        die_at: int | None = None,
        by_sigkill: bool = False,
    ) -> None:
        self.clock = clock
        self.note = note
        self.is_dead = False
        self.store: Any = _MortalStore(store, self)
        """What stands for the store in this process: it is gone when the process is dead."""
        self.owners: set[str] = set()
        self._inner = store
        self._answer = answer
        self._answers: Counter[tuple[str, str]] = Counter()
        """How often an answer was asked for, for each wait."""
        self._die_at = die_at
        self._by_sigkill = by_sigkill
        self._passed = 0
        self._mutex = threading.RLock()
        self._calls_end = threading.Condition()
        self._under_way = 0
        self._ledgers: list[Ledger] = []
        self._steps: dict[tuple[str, str], str] = {}
        self._children: set[str] = set()
        self._main: str | None = None
        self._settled: set[tuple[str, str]] = set()
        self._has_left_its_loop = False
        for history in histories(store):
            for step in history.positions.values():
                self._steps[history.run_id, step.position] = f"step {step.number} {step.tool!r}"
                if step.stands:
                    self._settled.add((history.run_id, step.position))

    def own(self, ledger: AnyLedger) -> AnyLedger:
        """Make a ledger that stands on `self.store` a part of this process: it stops where the process stops."""
        sync, asynchronous = vars(ledger._driver), vars(ledger._asynchronous)
        sync["perform"] = self._performing(ledger, ledger._driver.perform)
        asynchronous["perform"] = self._performing_async(ledger, ledger._asynchronous.perform)
        # What a thread does for an event loop may find that the process is dead, too.
        in_thread, threaded = ledger._asynchronous.in_thread, ledger._asynchronous.threaded
        asynchronous["in_thread"] = lambda work: self._unless_dead(in_thread(work))
        asynchronous["threaded"] = lambda work, name: lambda: self._unless_dead(threaded(work, name)())
        self._ledgers.append(ledger)
        return ledger

    def end(self) -> None:
        """What the kernel does for a process that is gone: its ledgers are let go, and its owners are known to be dead."""
        self._die_at = None  # what is written now is the end of a process that lives
        with self._calls_end:
            if not self._calls_end.wait_for(lambda: not self._under_way, PATIENCE_SECONDS):
                self.note(LeftRunning(self._under_way))
        for ledger in self._ledgers:
            for run in ledger._leases.held() if self.is_dead else ():
                run.owed.clear()  # whom it is owed to is out of reach
            ledger.close()
        self.is_dead = True
        for summary in self._inner.summaries():
            if summary.head.owner in self.owners:
                self._inner.release(summary.head.run_id, summary.head.token)

    # --- death --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Crash` where the process is dead."""
        if self.is_dead:
            raise Crash

    def boundary(self, where: str) -> None:
        """The durable state has changed: the process may die here."""
        with self._mutex:
            self.check()
            self._passed += 1
            self.note(Passed(where))
            if self._passed != self._die_at:
                return
            if self._by_sigkill:
                os.kill(os.getpid(), signal.SIGKILL)
            self.is_dead = True
        raise Crash

    def written(self, rows: Sequence[tuple[str, Row]]) -> None:
        """The store has these rows, each of its run."""
        with self._mutex:
            said = [text for run_id, row in rows if (text := self._described(run_id, row))]
        if said:
            self.boundary("after " + "; ".join(dict.fromkeys(said)))

    def _where(self, run_id: str) -> str:
        if run_id == self._main:
            return ""
        return " of a child run" if run_id in self._children else f" of run {run_id!r}"

    def _described(self, run_id: str, row: Row) -> str:
        body = json.loads(row.body)
        if row.kind == "created":
            if self._main is None:
                self._main = run_id
            elif "parent" in body:
                self._children.add(run_id)
        where = self._where(run_id)
        if row.kind == "intent":
            step = self._steps[run_id, row.position or ""] = f"step {body['step']} {body['tool']!r}"
            return f"the intent of {step}{where}, before its call"
        step = self._steps.get((run_id, row.position or ""), f"position {row.position}")
        match row.kind:
            case "outcome":
                return f"the outcome of {step}{where}"
            case "value":
                return f"the value of run.{body['name']}() at position {row.position}{where}"
            case "created":
                return "the run was made" if not where else f"the making{where}"
            case "finished":
                return f"the end{where or ' of the run'}"
            case "redispatched_undeclared":
                return ""  # it comes with an intent
        return f"the entry {row.kind!r}" + (f" of {step}" if row.position is not None else "") + where

    # --- what drivers do ----------------------------------------------------------------------------------------------

    def _performing(self, ledger: Ledger, perform: Perform) -> Perform:
        def performing(effect: Any) -> Any:
            try:
                self.check()
                if _is_said_by_the_report(effect):
                    return None
                with self._noting():
                    answer = perform(self._watched(ledger, effect))
                self._performed(effect)
            except Crash:
                if (
                    callers.task is not None and callers.task() is not None
                ):  # as `run.now()` is called in an async program
                    raise self._left_in_its_loop() from None
                raise
            return answer

        return performing

    def _performing_async(self, ledger: Ledger, perform: PerformAsync) -> PerformAsync:
        async def performing(effect: Any) -> Any:
            self.check()
            if _is_said_by_the_report(effect):
                return None
            with self._noting():
                answer = await perform(self._watched(ledger, effect))
            self._performed(effect)
            return answer

        def perform_or_take_turn(effect: Any) -> Awaitable[Any]:
            if isinstance(effect, Turn) and not self.is_dead:
                return perform(effect)
            return self._unless_dead(performing(effect))

        return perform_or_take_turn

    def _performed(self, effect: Any) -> None:
        if isinstance(effect, Invoke):
            self.boundary(f"after the call of {self._named(effect)}, before its outcome")
        elif isinstance(effect, Inquire):
            self.boundary(f"after the question for the receipt of {self._named(effect)}, before its answer is recorded")

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what the program is told of its place in the log, whatever it makes of that."""
        try:
            yield
        except ReplayDivergence as error:
            self.note(Diverged(error.position, error.recorded, error.asked, error.path, str(error)))
            raise
        except StepInDoubt as error:
            self.note(Doubted(error.step_number, error.tool_name, str(error)))
            raise

    def _named(self, effect: Invoke | Inquire) -> str:
        return f"step {effect.step.number} {effect.step.tool!r}{self._where(effect.run.run_id)}"

    def _watched(self, ledger: Ledger, effect: Any) -> Any:
        if isinstance(effect, Invoke):
            return effect._replace(function=self._seen(effect))
        if isinstance(effect, Inquire):
            self.note(Asked(effect.run.run_id, effect.step.position))
        elif isinstance(effect, Wait):
            self.clock.skip_to(effect.until)
        elif isinstance(effect, Rest):
            self._let_it_come(ledger, effect)
        return effect

    def _let_it_come(self, ledger: Ledger, effect: Rest) -> None:
        """What a run waits for comes now: its time, or what somebody is there to send. Raises `Unanswered` where nothing will."""
        wait, place = effect.call.wait, (effect.run.run_id, effect.call.position)
        asks = wait is not None and wait.sort != "sleep" and self._answer is not None
        if asks and self._answers[place] < _MOST_ANSWERS and self._answer is not None:
            self._answers[place] += 1
            self._answer(ledger, effect.run.run_id)
        elif effect.until is not None:
            self.clock.skip_to(effect.until)
        else:
            name = wait.name if wait is not None else ""
            raise Unanswered(f"the flow waits for {name!r}, and nobody sends it: give crashtest an answer= that does")

    def _seen(self, effect: Invoke) -> Callable[..., Any]:
        run_id, step, function = effect.run.run_id, effect.step, effect.function

        def call(**arguments: Any) -> Any:
            with self._calling():
                self.check()
                self.note(
                    Called(
                        run_id, step.position, step.number, step.tool, step.effect, step.key,
                        step.fingerprint.hex() if step.fingerprint else "", self._is_intended(run_id, step),
                        (run_id, step.position) in self._settled,
                    )
                )  # fmt: skip
                if "idempotency_key" in arguments:
                    self.note(TookKey(step.tool))
                elif (context := step_variable.get()) is not None:
                    step_variable.set(_WatchedStep(context, self.note))  # the driver puts back what was there before
                return function(**arguments)

        return call

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._calls_end:
            self._under_way += 1
        try:
            yield
        finally:
            with self._calls_end:
                self._under_way -= 1
                self._calls_end.notify_all()

    def _is_intended(self, run_id: str, step: StepHistory) -> bool:
        rows = self._inner.read(run_id, max(0, step.seq - 1), payloads_up_to=0)
        return any(
            row.kind == "intent" and row.position == step.position and row.attempt == step.attempts for row in rows
        )

    async def _unless_dead(self, work: Awaitable[T]) -> T:
        """What is awaited, in a process that lives."""
        try:
            return await work
        except Crash:
            raise self._left_in_its_loop() from None

    def _left_in_its_loop(self) -> BaseException:
        """The process died in an event loop, which is left at once. Returns what ends a task there without a word."""
        asyncio = sys.modules["asyncio"]
        if not self._has_left_its_loop:
            asyncio.get_running_loop().call_soon(self._leave_its_loop)
        error: BaseException = asyncio.CancelledError()
        return error

    def _leave_its_loop(self) -> None:
        if not self._has_left_its_loop:
            self._has_left_its_loop = True
            raise Crash


class _WatchedStep(StepContext):
    """The step as its function sees it; that it took the key is noted."""

    __slots__ = ("_note",)

    def __init__(self, context: StepContext, note: MakeNote) -> None:
        super().__init__(context._leases, context._run, context._step)
        self.fencing_token = context.fencing_token
        self._note = note

    @property
    def idempotency_key(self) -> str:
        self._note(TookKey(self.tool_name))
        return super().idempotency_key


class _MortalStore:
    """A store in the hands of a process that may die behind each of its writes."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store = store
        self._life = life

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        return self._mortal(name, verb) if callable(verb) else verb

    def _mortal(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        life = self._life

        def perform(*arguments: Any, **options: Any) -> Any:
            life.check()
            if name in ("create", "claim"):
                life.owners.add(arguments[1])
            answer = verb(*arguments, **options)
            match name:
                case "create" if answer is not None:
                    life.written([(arguments[0], row) for row in arguments[4]])
                case "append" if answer:
                    life.written([(arguments[0], row) for row in arguments[3]])
                case "append_all":
                    pairs = zip(arguments[0], answer, strict=True)
                    life.written(
                        [
                            (append.run_id, row)
                            for append, is_written in pairs
                            if is_written is True
                            for row in append.rows
                        ]
                    )
                case "post":
                    life.boundary(f"after the request {arguments[1]!r} was put into the inbox of the run")
            return answer

        return perform

    def close(self) -> None:
        """A process that is dead gives nothing back, and a live one ends by `Life.end`."""


def histories(store: Store) -> Iterator[History]:
    """Every run in a store, as its log says it."""
    store = packed(store)
    for summary in list(store.summaries()):
        run_id = summary.head.run_id
        yield History.read(run_id, store.secret(run_id), store.read(run_id))


def standing(store: Store) -> Iterator[Stood]:
    """Every run in a store, as it stands."""
    for history in histories(store):
        steps = (
            (step.position, step.tool, "" if step.outcome is None else f"{step.outcome.ok} {_outcome(step)}")
            for step in history.positions.values()
        )
        result = (history.result or b"").decode()
        yield Stood(history.run_id, str(history.state), history.state.is_terminal, result, tuple(steps))


def _outcome(step: StepHistory) -> str:
    """What stands as the outcome of a step; of an error its type and message, since a traceback differs each time."""
    payload = (step.outcome.payload if step.outcome is not None else None) or b""
    if step.outcome is not None and step.outcome.ok != "completed":
        described = json.loads(payload or b"{}")
        if isinstance(described, dict) and "type" in described:
            return f"{described['type']}: {described.get('message')}"
    return payload.decode()


def _is_said_by_the_report(effect: Any) -> bool:
    return isinstance(effect, Warn) and issubclass(effect.category, UndeclaredEffectWarning)
