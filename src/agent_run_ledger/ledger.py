"""Face B, and what all faces share: opening a ledger, looking at runs, and driving one step by step."""

from __future__ import annotations

import atexit
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from random import random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from agent_run_ledger.contract import Clock, Row, Store, Summary
from agent_run_ledger.drivers.context import caller
from agent_run_ledger.drivers.leases import POLL_SECONDS, HeldRun, Leases
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine import audit, damage, records, runs
from agent_run_ledger.engine.call import Call, Options, StepOptions, declared
from agent_run_ledger.engine.effects import Flow
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.steps import step
from agent_run_ledger.errors import (
    InvalidArguments,
    LedgerError,
    NotDurableWarning,
    RunInputMismatch,
    RunNotFound,
    RunOwned,
    StoreCorrupt,
    UnorderedStep,
    UnserialisableArguments,
)
from agent_run_ledger.model import (
    Budget,
    Diagnosis,
    Finding,
    Inspection,
    RunRecord,
    RunState,
    StepRecord,
    TreeHead,
    VerificationReport,
)
from agent_run_ledger.rules import canonical, digests, functions
from agent_run_ledger.rules.loops import LoopDetectorPolicy
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock

if TYPE_CHECKING:
    from agent_run_ledger.drivers.asynchronous import AsyncDriver

Durability = Literal["full", "process"]


_LONGEST_LEASE = 10 * 366 * 86_400


class _Unsaid(int):
    """A default that can be told apart from the same number given by the caller."""


_LOOP_THRESHOLD = _Unsaid(LoopDetectorPolicy().max_repetitions)

PAYLOAD_LIMIT = 16 * 1024 * 1024

_open: weakref.WeakSet[Ledger] = weakref.WeakSet()


def compute_fingerprint(tool_name: str, arguments: Any) -> str:
    """What the loop rules call the same call, in hex: SHA-256 over the tool's name and the digest of its canonical arguments.

    >>> compute_fingerprint("fetch", {"id": 1, "page": 2}) == compute_fingerprint("fetch", {"page": 2, "id": 1})
    True
    """
    try:
        stored = canonical.encode(arguments)
    except canonical.Unstorable as error:
        raise UnserialisableArguments(f"these arguments have no fingerprint: {error}", error.path) from None
    return digests.fingerprint(check_name("tool_name", tool_name), digests.plain(stored)).hex()


def as_stored(value: Any) -> str:
    """A value as ledgers keep it: canonical JSON, with a tag where a type is none of JSON's.

    >>> as_stored({"b": 1, "a": (2, 3)})
    '{"a":{"$tuple":[2,3]},"b":1}'
    """
    return canonical.encode(value).decode()


def ledgers_in(folder: str) -> list[str]:
    """The names of the files in a folder that are ledgers."""
    from agent_run_ledger.stores import diagnosis  # only who looks needs it

    return diagnosis.ledgers_in(folder)


class Ledger:
    """A ledger that is open: a context manager, thread-safe, closed at the latest when the interpreter exits."""

    def __init__(
        self,
        db_path: str | os.PathLike[str] | Store,
        *,
        limit: int,
        deadline: float | None = None,
        policy: LoopDetectorPolicy,
        durability: Durability,
        lease_seconds: float,
        heartbeat_seconds: float,
        undeclared: str,
        owner: str | None,
        payload_limit: int,
        clock: Clock | None,
    ) -> None:
        if durability not in ("full", "process"):
            raise ValueError(f"durability is 'full' or 'process', not {durability!r}")
        if undeclared not in ("dispatch", "block"):
            raise ValueError(f"undeclared is 'dispatch' or 'block', not {undeclared!r}")
        for name, seconds in (("heartbeat_seconds", heartbeat_seconds), ("lease_seconds", lease_seconds)):
            if type(seconds) not in (int, float) or not 0 < seconds <= _LONGEST_LEASE:
                raise ValueError(
                    f"{name} is a number of seconds, more than 0 and at most {_LONGEST_LEASE}, not {seconds!r}"
                )
        if heartbeat_seconds >= lease_seconds:
            raise ValueError("heartbeat_seconds must be less than lease_seconds")
        if type(payload_limit) is not int or payload_limit < 1:
            raise ValueError(f"payload_limit is a whole number of bytes, at least 1, not {payload_limit!r}")
        if not isinstance(policy, LoopDetectorPolicy):
            raise TypeError(f"policy is a LoopDetectorPolicy, not {policy!r}")
        if not isinstance(db_path, str | os.PathLike) and not hasattr(db_path, "append"):
            raise TypeError(f"db_path is a path, ':memory:' or a store, not {db_path!r}")
        if isinstance(db_path, str) and "\0" in db_path:
            raise ValueError(f"db_path {db_path!r} holds a NUL character, which no file name has")
        label = check_name("owner", owner) if owner is not None else f"{socket.gethostname()}-{os.getpid()}"
        self._clock: Clock = clock or SystemClock()
        self._payload_limit = payload_limit
        if isinstance(db_path, str | os.PathLike):
            if os.fspath(db_path) == ":memory:":
                import warnings

                text = "this ledger is in memory: its runs are gone with the process. Give a path to keep them."
                warnings.warn(text, NotDurableWarning, stacklevel=3)
            self._store = open_store(db_path, durability=durability, clock=self._clock)
        else:
            self._store = db_path
        arguments = (label, lease_seconds, heartbeat_seconds, limit, deadline, undeclared, policy.rule)
        self._leases = Leases(self._store, self._clock, *arguments)
        self._driver = SyncDriver(self._store, self._clock, self._leases, durability)
        self._async_driver: AsyncDriver | None = None
        self._durability = durability
        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give every lease back and let go of the storage. Calling it again does nothing."""
        _open.discard(self)
        if self._async_driver is not None:
            self._async_driver.close()
        self._driver.close()

    @property
    def _asynchronous(self) -> AsyncDriver:
        """The driver for event loops, made when somebody uses one: `asyncio` is not free to import."""
        if self._async_driver is None:
            from agent_run_ledger.drivers.asynchronous import AsyncDriver

            self._async_driver = AsyncDriver(self._driver, self._store, self._clock, self._leases, self._durability)
        return self._async_driver

    # --- looking ------------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> RunRecord:
        """The run as it stands. Raises `RunNotFound`."""
        return self._record(self._summary(run_id))

    def runs(self, status: str | None = None) -> list[RunRecord]:
        """All runs, oldest first; those in one state where `status` names it. Nobody may act upon a damaged run: it is in none."""
        if status is not None and status not in RunState.__members__:
            raise ValueError(f"there is no run state {status!r}; the states are {', '.join(RunState)}")
        found = map(self._record, self._store.summaries())
        return [run for run in found if status is None or (run.status == status and not run.is_damaged)]

    def steps(self, run_id: str) -> list[StepRecord]:
        """The steps of a run that can be read, in the order of their first intents. Raises `RunNotFound`."""
        return self._readable(run_id).steps

    def inspect(self, run_id: str) -> Inspection:
        """The run and its steps as closely as they can be looked at; where they are damaged, too. Raises `RunNotFound`."""
        run, seen = self.get_run(run_id), self._readable(run_id)
        is_seen = self._is_seen(run.owner)
        return Inspection(
            run=run,
            steps=seen.steps,
            environments=seen.environments,
            in_doubt=seen.in_doubt,
            redispatched=seen.redispatched,
            is_owner_seen=is_seen,
            is_waiting=self._waits(run, is_seen),
            trouble=seen.trouble,
        )

    def is_waiting(self, run: RunRecord) -> bool:
        """Whether the run goes on as soon as its program runs again: it has not ended, and nobody is seen to work on it."""
        return self._waits(run, self._is_seen(run.owner))

    def _is_seen(self, owner: str | None) -> bool:
        from agent_run_ledger.stores import diagnosis

        return diagnosis.is_seen(self._store, owner)

    @staticmethod
    def _waits(run: RunRecord, is_owner_seen: bool) -> bool:
        state = RunState(run.status)
        return not (is_owner_seen or run.is_damaged or state.is_terminal or state is RunState.QUARANTINE)

    def verify(self, run_id: str | None = None, *, told: Callable[[int], None] | None = None) -> VerificationReport:
        """Recompute every entry, of one run or of all, and report each disagreement. `told` hears how many entries are done.

        A database without a tree head kept elsewhere proves only that it agrees with itself: who can write the file can rebuild it.
        """
        findings: list[Finding] = []
        entries = number = 0
        if run_id is None:
            findings += [Finding("", None, "storage", message) for message in self._store.check()]
            ids: Iterator[str] = (summary.head.run_id for summary in self._store.summaries())
        else:
            ids = iter((check_name("run_id", run_id),))
        for each in ids:
            try:
                rows, head = self._store.read(each), self._store.head(each)
            except StoreCorrupt as error:
                findings.append(Finding(each, None, "storage", str(error)))
                continue
            if not rows and head is None:
                raise RunNotFound(each)
            findings += audit.audit(each, head, self._store.secret(each), rows, self._store.inbox(each, 0))
            entries += len(rows)
            number += 1
            if told is not None:
                told(entries)
        return VerificationReport(not findings, findings, entries, number)

    def tree_head(self, run_id: str) -> TreeHead:
        """The size and root of the run's tree as it is now. Raises `RunNotFound`."""
        history = self._history(run_id)
        return TreeHead(run_id, history.size, history.root)

    def _record(self, summary: Summary) -> RunRecord:
        record = records.run_record(summary)
        if record.is_damaged:
            record.status = str(damage.last_state(self._store.read(record.run_id)))
        return record

    def _summary(self, run_id: str) -> Summary:
        summary = next(iter(self._store.summaries(check_name("run_id", run_id))), None)
        if summary is None:
            raise RunNotFound(run_id)
        return summary

    def _rows(self, run_id: str) -> list[Row]:
        rows = self._store.read(check_name("run_id", run_id))
        if not rows:
            raise RunNotFound(run_id)
        return rows

    def _readable(self, run_id: str) -> damage.Readable:
        rows = self._rows(run_id)
        return damage.readable(run_id, self._store.secret(run_id), rows)

    def _history(self, run_id: str) -> History:
        rows = self._rows(run_id)
        return History.read(run_id, self._store.secret(run_id), rows)

    # --- acting -------------------------------------------------------------------------------------------------------

    def cancel(self, run_id: str, *, by: str = "", reason: str = "") -> None:
        """End a run as CANCELLED: at once where nobody works on it, else by its owner before its next step.

        A step in flight finishes and is recorded first. Raises `RunNotFound` and, for a run that has ended, `IllegalTransition`.
        """
        who = check_name("by", by or self._leases.owner)
        payload = runs.cancellation(who, reason)
        run = self._run(run_id)
        for is_posted in (
            False,
            True,
        ):  # the owner may let go of the run before it can see what was posted: then it is ours to end
            try:
                self._leases.await_claim(run, None)
                if is_posted and run.history.state is RunState.CANCELLED:
                    return
                if self._driver.obey(runs.cancel(run, payload)):
                    return
            except RunOwned:
                pass
            if not is_posted:
                self._store.post(run_id, "cancel", payload, who, self._clock.now())

    def detach(self, run_id: str) -> None:
        """Give the run back, so that another process may go on with it at once.

        Raises `UnorderedStep` while a step is in flight: its outcome could not be written any more.
        """
        run = self._run(run_id)
        with run.lock:
            if run.is_busy:
                raise UnorderedStep(run_id, "detach", run.busy_with)
            if not run.is_held and self._store.head(run_id) is None:
                raise RunNotFound(run_id)
            self._driver.give_back(run)

    def _run(self, run_id: str) -> HeldRun:
        return self._leases.run(check_name("run_id", run_id))

    def _attach(self, run: HeldRun, wait: float | None, draft: Draft | None = None) -> None:
        """Take a run that exists, if it was created as `draft` says; its program begins at its first line."""
        deadline = self._clock.elapsed() + (wait or 0.0)
        while True:
            with run.lock:
                if not run.is_busy and not run.pins:
                    was_held = run.is_held
                    run.is_settled = False
                    break
            if self._clock.elapsed() >= deadline:
                raise RunOwned(run.run_id, self._leases.owner, 0.0)  # another thread of this ledger drives it
            self._clock.sleep(POLL_SECONDS)
        self._leases.await_claim(run, deadline - self._clock.elapsed())
        if draft is not None:
            try:
                runs.check_same(run.history, draft)
            except RunInputMismatch:
                if not was_held:
                    self._leases.give_back(run)
                raise
        with run.lock:
            if run.is_held:
                self._driver.pay(run)
            run.restart()

    def _start(self, run_id: str | None, draft: Draft, wait: float | None) -> HeldRun:
        """Create a run, or attach to the one that has this id: its program begins at its first line."""
        name = f"run_{os.urandom(10).hex()}" if run_id is None else check_name("run_id", run_id)
        if run_id is None or self._store.head(name) is None:
            run = self._leases.create(name, draft)
            if run is not None:
                return run
        run = self._leases.run(name)
        self._attach(run, wait, draft)
        return run

    def _perform(self, run: HeldRun, call: Call) -> Any:
        self._driver.make(run, call)
        return self._driver.obey(step(run, call))


class AgentRunLedger(Ledger):
    """The agent's loop, step by step, over many runs.

    `db_path` is a file, `":memory:"`, or a store. `max_steps` limits each run, `loop_threshold` equal calls with an equal outcome
    trip the breaker. `durability="full"` survives a power cut, `"process"` any death of the process. `owner` is a label for people.

    >>> ledger = AgentRunLedger("agent.db")
    >>> run_id = ledger.create_run(goal="Reconcile October invoices")
    >>> ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": "INV-109"}, lambda: {"total": 120})
    {'total': 120}
    >>> ledger.finish_run(run_id)
    >>> ledger.close()
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] | Store = ":memory:",
        max_steps: int = 50,
        loop_threshold: int = _LOOP_THRESHOLD,
        *,
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        heartbeat_seconds: float = 3.0,
        budget: Budget | None = None,
        policy: LoopDetectorPolicy | None = None,
        undeclared: str = "dispatch",
        owner: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        clock: Clock | None = None,
    ) -> None:
        if policy is not None and loop_threshold is not _LOOP_THRESHOLD:
            raise ValueError(
                "loop_threshold=N is short for policy=LoopDetectorPolicy(max_repetitions=N): give one of them"
            )
        if type(max_steps) is not int or max_steps < 1:
            raise ValueError(f"max_steps must be a whole number of at least 1, not {max_steps!r}")
        if budget is not None and not isinstance(budget, Budget):
            raise TypeError(f"budget is a Budget, not {budget!r}")
        steps = budget.steps if budget is not None and budget.steps is not None else max_steps
        super().__init__(
            db_path,
            limit=steps,
            deadline=budget.deadline.timestamp() if budget is not None and budget.deadline is not None else None,
            policy=policy
            or LoopDetectorPolicy(
                max_repetitions=int(loop_threshold) if loop_threshold is _LOOP_THRESHOLD else loop_threshold
            ),
            durability=durability,
            lease_seconds=lease_seconds,
            heartbeat_seconds=heartbeat_seconds,
            undeclared=undeclared,
            owner=owner,
            payload_limit=payload_limit,
            clock=clock,
        )

    @classmethod
    def open_read_only(cls, path: str | os.PathLike[str], *, clock: Clock | None = None) -> Self:
        """The ledger at `path` to look at, also while agents work on it: it is not made, written or migrated.

        What would write raises `StoreReadOnly`. Raises `StoreUnavailable` where there is no such file, else as opening it does.

        >>> with AgentRunLedger.open_read_only("agent.db") as ledger:
        ...     [run.goal for run in ledger.runs()]
        ['Reconcile October invoices']
        """
        if os.fspath(path) == ":memory:":
            raise ValueError("a ledger in memory is seen by its own ledger object only: give the path of a file")
        timed = clock or SystemClock()
        return cls(open_store(path, durability="full", clock=timed, read_only=True), clock=timed)

    @staticmethod
    def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
        """What stands around the file of a ledger, also of one that cannot be read. Raises `StoreError` where there is no file."""
        from agent_run_ledger.stores import diagnosis

        return diagnosis.diagnose(path)

    def create_run(self, goal: str, run_id: str | None = None, *, wait: float | None = None) -> str:
        """Make a run and return its id. A `run_id` that exists with an equal goal is attached to: the next call replays it.

        Raises `RunInputMismatch` for another goal, and `RunOwned` where another owner has the run for more than `wait` seconds.
        """
        return self._start(run_id, self._created(goal), wait).run_id

    def _created(self, goal: str) -> Draft:
        if not isinstance(goal, str):
            raise InvalidArguments(f"goal must be a string, not {type(goal).__name__}; nothing was written")
        return runs.created(goal, None, pipeline=False, limit=self._payload_limit)

    def execute_step(
        self,
        run_id: str,
        tool_name: str,
        arguments: Mapping[str, Any],
        execution_fn: Callable[..., Any],
        **options: Unpack[StepOptions],
    ) -> Any:
        """Run one step, or return what it returned when it ran before. The options are those of `StepOptions`.

        The exact `arguments` and the step's idempotency key are on stable storage before `execution_fn` is called, and its outcome
        before this returns. A function with required parameters is called with the stored arguments by keyword, another one bare.
        Raises `StepFailed` where it raises, `RunawayLoopDetectedException` and `BudgetExceededException` where it is refused,
        `RunClosed` on a run that has ended, `ReplayDivergence` where the log has another call at this place.
        """
        call = function_call(tool_name, arguments, execution_fn, declared(options), self._payload_limit)
        run = self._run(run_id)
        call.branch = run.root
        return self._perform(run, call)

    def aexecute_step(
        self,
        run_id: str,
        tool_name: str,
        arguments: Mapping[str, Any],
        execution_fn: Callable[..., Any],
        **options: Unpack[StepOptions],
    ) -> Coroutine[Any, Any, Any]:
        """`execute_step` in an event loop: the call is made now, and what this returns is awaited for its outcome.

        `execution_fn` may be an async function or a plain one; a plain one runs in the loop's thread, or with `timeout=` in one of
        its own. Calls that are awaited together run side by side.
        """
        call = function_call(tool_name, arguments, execution_fn, declared(options), self._payload_limit, may_await=True)
        run = self._run(run_id)
        call.branch = run.root
        return self._asynchronous.call(run, call)

    def resume_run(self, run_id: str, *, wait: float | None = None) -> list[StepRecord]:
        """Take a run over and return its steps; the next `execute_step` goes on at the first position without an outcome.

        The caller is handed failures as records, so what he does next has acted on them. A run that has ended is only read.
        """
        run = self._run(run_id)
        self._attach(run, wait)
        with run.lock:
            runs.skip_recorded(run)
            return records.step_records(run.history, replayed=True)

    def finish_run(self, run_id: str, result: Any = None) -> None:
        """Complete the run, with an optional result. Completing it again with an equal result does nothing."""
        self._obey_finish(self._run(run_id), result)

    def _obey_finish(self, run: HeldRun, result: Any) -> None:
        self._driver.obey(runs.finish(run, runs.stored(result, "the result", self._payload_limit)))

    def abort_run(self, run_id: str, reason: str) -> None:
        """End the run as FAILED. Raises `IllegalTransition` where it has ended."""
        self._driver.obey(runs.abort(self._run(run_id), runs.abortion(reason)))

    def open_run(self, goal: str, run_id: str | None = None, *, wait: float | None = None) -> OpenRun:
        """A run as a context manager: it is finished on a clean exit, parked on an exception, and its lease is kept meanwhile."""
        return OpenRun(self, lambda: self._start(run_id, self._created(goal), wait))

    def _obey(self, flow: Flow[Any]) -> Any:
        return self._driver.obey(flow)


class Run:
    """A run in its program's hands: what `open_run` gives."""

    def __init__(self, ledger: AgentRunLedger, run: HeldRun) -> None:
        self._ledger = ledger
        self._run = run
        self.run_id = run.run_id
        self.result: Any = None
        """What the run is finished with."""

    def step(
        self, tool: str, arguments: Mapping[str, Any], fn: Callable[..., Any], **options: Unpack[StepOptions]
    ) -> Any:
        """One durable step: `execute_step` without the run's id."""
        return self._ledger.execute_step(self.run_id, tool, arguments, fn, **options)

    def now(self) -> float:
        """The time in Unix seconds, recorded: a replay gets the same."""
        return cast(float, self._value("now", self._ledger._clock.now()))

    def random(self) -> float:
        """A random number from [0, 1), recorded: a replay gets the same."""
        return cast(float, self._value("random", random()))

    def uuid4(self) -> uuid.UUID:
        """A random UUID, recorded: a replay gets the same."""
        return cast(uuid.UUID, self._value("uuid4", uuid.uuid4()))

    def _value(self, name: str, fresh: Any) -> Any:
        return self._ledger._obey(runs.value(self._run, self._run.root, caller(), name, fresh))


class OpenRun:
    """The context manager of `open_run`."""

    def __init__(self, ledger: AgentRunLedger, start: Callable[[], HeldRun]) -> None:
        self._ledger = ledger
        self._start = start

    def __enter__(self) -> Run:
        self._held = self._start()
        self._held.__enter__()
        self._run = Run(self._ledger, self._held)
        return self._run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._ledger._obey_finish(self._held, self._run.result)
        except BaseException as unfinished:  # a result that cannot be stored, say
            error = unfinished
            raise
        finally:
            try:
                if error is not None:
                    park(self._ledger._driver, self._held, error)
            finally:
                self._held.__exit__(kind, error, trace)


def park(driver: SyncDriver, run: HeldRun, error: BaseException) -> None:
    """Park a run that an exception left, unless it ended or is somebody else's by now. The exception stays the news."""
    if not run.is_held:
        return
    try:
        if not driver.obey(runs.park(run, error)):
            error.add_note("the run was not parked: another thread has a step of it in flight")
    except LedgerError as trouble:
        error.add_note(f"the run could not be parked: {trouble}")


def function_call(
    tool: str,
    arguments: Mapping[str, Any],
    function: Callable[..., Any],
    options: Options,
    limit: int,
    *,
    may_await: bool = False,
) -> Call:
    """A call as the program spells it, checked as far as it can be before anything happens."""
    if type(arguments) is not dict and not isinstance(arguments, Mapping):
        raise InvalidArguments(f"the arguments of {tool!r} must be a mapping, not {type(arguments).__name__}")
    takes = functions.signature(function)
    if takes.is_async and not may_await:
        raise InvalidArguments(
            f"{tool!r} is an async function: execute_step cannot await it, aexecute_step is for that; nothing was dispatched"
        )
    if takes.is_generator:
        raise InvalidArguments(
            f"{tool!r} is a generator function: calling it runs nothing of it; nothing was dispatched. Return a list."
        )
    passes = bool(takes.required) or (bool(arguments) and all(name in takes.names for name in arguments))
    if takes.required:
        functions.check_arguments(tool, takes, arguments)
    annotated = passes and getattr(function, "__annotations__", None)
    return Call(
        check_name("tool_name", tool),
        arguments if type(arguments) is dict else dict(arguments),
        function,
        options,
        functions.environment(options.version) if options.version else takes.environment,
        passes,
        limit,
        is_async=takes.is_async,
        parameters={n: a for n, a in functions.hints(function).items() if n != "return"} if annotated else {},
    )


@atexit.register
def _close_all() -> None:
    for ledger in list(_open):
        ledger.close()
