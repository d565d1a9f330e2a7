"""A run in the hands of its program: steps, branches, and values that a replay gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast

from agent_run_ledger.drivers.context import caller, place_variable, step_variable
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.drivers.sync import Suspended
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine import runs
from agent_run_ledger.engine.call import MAX_TIMEOUT, Call, DurableWait, Options, StepOptions, declared
from agent_run_ledger.engine.effects import Flow
from agent_run_ledger.engine.live import Branch
from agent_run_ledger.engine.steps import step
from agent_run_ledger.errors import InvalidArguments, LedgerError, ProgramEnded, StoreError, UnorderedStep
from agent_run_ledger.rules import canonical, functions
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import Effect

if TYPE_CHECKING:
    import uuid

    from agent_run_ledger.ledger import Ledger
    from agent_run_ledger.model import Approval, Notice

T = TypeVar("T")

MOST_THREADS = 32
"""How many items a `map` in threads works on at once, where nobody says."""


class Place(NamedTuple):
    """Whose program the calling code is: which run, and which branch of it."""

    run: Run
    branch: Branch


def current_run() -> Run:
    """The run whose program the calling code is. Raises `RuntimeError` outside of one."""
    place = place_variable.get()
    if place is None:
        raise RuntimeError(
            "current_run() was called outside of a run: it is known inside of an agent, of `with ledger.open_run(...)`, and of "
            "what they call"
        )
    return cast(Place, place).run


class Run:
    """A run in its program's hands: what `open_run` gives, what `current_run()` finds, and what a parameter annotated `Run` gets.

    In an async agent, and under `async with`, `step`, `gather` and `map` are awaited.
    """

    def __init__(self, ledger: Ledger, held: HeldRun, *, is_async: bool = False) -> None:
        self._ledger = ledger
        self._held = held
        self._is_async = is_async
        self._is_over = False
        self.run_id = held.run_id
        self.result: Any = None
        """What `open_run` finishes the run with."""

    def step(
        self, tool: str, arguments: Mapping[str, Any], fn: Callable[..., Any], **options: Unpack[StepOptions]
    ) -> Any:
        """One durable step: `execute_step` without the run's id. In an async program it returns an awaitable."""
        limit = self._ledger._payload_limit
        call = function_call(tool, arguments, fn, declared(options), limit, may_await=self._is_async)
        return self.perform(call, is_async=self._is_async)

    @property
    def ledger(self) -> Ledger:
        """The ledger that the run is in."""
        return self._ledger

    @property
    def suspends(self) -> bool:
        """Whether its program ends where it would have to wait for what has not come, to be begun anew later."""
        return self._held.suspends

    @property
    def payload_limit(self) -> int:
        """The largest payload, in canonical bytes."""
        return self._ledger._payload_limit

    def perform(self, call: Call, *, is_async: bool) -> Any:
        """Make a call in the branch that the calling code is in; if `is_async` return what is awaited for its outcome."""
        call.branch = self.stand(call.tool)
        return perform(self._ledger, self._held, call, is_async=is_async)

    def now(self) -> float:
        """The time in Unix seconds, recorded: a replay gets the same."""
        return cast(float, self._value("now", self._ledger._clock.now()))

    def random(self) -> float:
        """A random number from [0, 1), recorded: a replay gets the same."""
        import random

        return cast(float, self._value("random", random.random()))

    def notices(self) -> list[Notice]:
        """What the ledger has to say of the calls made so far: that they repeat themselves, or that a budget is nearly used up.

        Each belongs to a step, and its `text` is for the model to read beside that step's answer. A replay finds each where it was.
        """
        return self._held.notices

    def uuid4(self) -> uuid.UUID:
        """A random UUID, recorded: a replay gets the same."""
        from uuid import uuid4  # looks at the platform first, which takes a while

        return cast("uuid.UUID", self._value("uuid4", uuid4()))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> Any:
        """Wait so many seconds, over any crash: the time is counted from the first start on. Awaited in an async program.

        Nobody holds the run meanwhile, as long as nothing else of it is under way.
        """
        return self._wait("run.sleep", DurableWait("sleep", "", _seconds("seconds", seconds)), {"seconds": seconds})

    def wait_for(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a signal of this name and return what was sent with it, which may be None. Awaited in an async program.

        Each signal is taken by one wait, in the order in which they were sent; one that came early is there already. Raises
        `WaitTimeout` where none was sent within `timeout` seconds of the first start of this wait; that is final.
        """
        seconds = _seconds("timeout", timeout) if timeout is not None else None
        wait = DurableWait("signal", check_name("signal", name), seconds)
        return self._wait("run.wait_for", wait, {"name": name, "timeout": timeout})

    def approve(self, name: str, arguments: Any, timeout: float | None = None) -> Any:
        """Wait for somebody to approve exactly these arguments, and return the `Approval`. Awaited in an async program.

        `ledger.approvals()` shows them, `ledger.approve(...)` and `ledger.deny(...)` answer: for these very bytes and no others. Raises
        `ApprovalDenied`, and `WaitTimeout` where nobody answered within `timeout` seconds. Use what `.arguments` holds.
        """
        seconds = _seconds("timeout", timeout) if timeout is not None else None
        wait = DurableWait("approval", check_name("approval", name), seconds)
        call = self._waiting("run.approve", wait, {"name": name, "arguments": arguments})
        said = self.perform(call, is_async=self._is_async)
        return _approved_later(said, call) if self._is_async else _approved(said, call)

    def _wait(self, tool: str, wait: DurableWait, arguments: dict[str, Any]) -> Any:
        return self.perform(self._waiting(tool, wait, arguments), is_async=self._is_async)

    def _waiting(self, tool: str, wait: DurableWait, arguments: dict[str, Any]) -> Call:
        options = Options(effect=Effect.READ, may_repeat=True, identity=_IDENTITY.get(wait.sort))
        environment = functions.environment("wait")
        return Call(tool, arguments, _nobody, options, environment, False, self.payload_limit, {}, wait=wait)

    # --- branches -----------------------------------------------------------------------------------------------------

    def over(self) -> None:
        """Its program has returned, or an exception has left it: whatever it left running makes no further call."""
        self._is_over = True

    @property
    def is_async(self) -> bool:
        """Whether its program is async."""
        return self._is_async

    def stand(self, asked: str) -> Branch:
        """The branch of this run that the calling code is in. Raises `UnorderedStep` inside of one of its steps, `ProgramEnded` behind."""
        if self._is_over:
            raise ProgramEnded(self.run_id, asked)
        return branch_of(self._held, asked)

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """A line of calls that goes on beside others: calls inside have positions of their own, whatever the others do.

        For a task or thread that makes calls one after another while others do. A name is a place in the run: opened again, the
        branch goes on where it was left.
        """
        check_name("branch", name)
        parent = self.stand(f"branch {name!r}")
        with self._held.lock:
            opened = self._held.open_branch(parent, name)
        with self.standing_in(opened):
            try:
                yield
            finally:
                with self._held.lock:
                    self._held.close_branch(opened, parent)

    def gather(self, *thunks: Any) -> Any:
        """Run functions side by side, each in a branch of its own, and return what they return, in the order in which they are given.

        All of them come to their end; then the first error in that order is raised. In threads, or in an async program as tasks;
        there a coroutine may be given as well.
        """
        branches = self._branches(len(thunks))
        if self._is_async:
            return self._ledger._asynchronous.gather(self, branches, thunks, None, self._held.strands)
        return self._in_threads(branches, thunks, len(thunks))

    def map(self, tool: Callable[..., Any], items: Iterable[Any], concurrency: int | None = None) -> Any:
        """Call `tool` with each item, side by side, each in a branch of its own, and return the results in the items' order.

        At most `concurrency` at once; without it all in an async program and 32 in threads. After an error nothing new is begun;
        what runs comes to its end, and then the first error is raised.
        """
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise InvalidArguments(f"concurrency is a whole number of at least 1, not {concurrency!r}")
        items = list(items)
        thunks = [_thunk(tool, item) for item in items]
        branches = self._branches(len(thunks))
        if not self._is_async:
            child = getattr(getattr(tool, "registered", None), "child", None)
            if child is not None and self._held.is_worked:  # workers do the work: whoever waits for it needs no thread
                return self._in_turn(branches, [partial(child, args=(item,), kwargs={}) for item in items], concurrency)
            return self._in_threads(branches, thunks, concurrency or MOST_THREADS)
        if not functions.signature(tool).is_async:
            thunks = [self._ledger._asynchronous.threaded(thunk, functions.name_of(tool)) for thunk in thunks]
        return self._ledger._asynchronous.gather(self, branches, thunks, concurrency, self._held.strands)

    def _branches(self, number: int) -> list[Branch]:
        parent = self.stand("gather")
        with self._held.lock:
            self._held.admit(parent, caller(), "gather")
            position = parent.take()
            return [self._held.open_branch(parent, number=f"{position}.{each}") for each in range(1, number + 1)]

    def _in_threads(self, branches: list[Branch], thunks: Iterable[Callable[[], Any]], concurrency: int) -> list[Any]:
        waiting = list(zip(branches, thunks, strict=True))
        works: list[Work] = []
        running: list[Work] = []
        strands = self._held.strands
        try:
            for branch, thunk in waiting:
                if len(running) >= concurrency:
                    running = _rest(running)
                if any(work.is_over and work.result.error is not None for work in works) and concurrency < len(waiting):
                    break
                work = Work(self.in_branch, {"branch": branch, "thunk": thunk}, "branch")
                works.append(work)
                running.append(work)
                strands.add(branch)
                strands.discard(caller())
                work.start()
        finally:  # an interrupt waits for the threads; a second one leaves them to themselves
            for work in works:
                work.wait(None)
            strands.difference_update(branches)
            strands.add(caller())
            self.joined(branches)
        for work in works:
            if work.result.error is not None:
                raise work.result.error
        return [work.result.value for work in works]

    def _in_turn(
        self, branches: list[Branch], calls: list[Callable[[Place], Call]], concurrency: int | None
    ) -> list[Any]:
        """Calls that begin other runs, each made in its branch: the calling thread makes them one after the other, and waits for all."""

        def flows() -> Iterator[Flow[Any]]:
            for branch, made in zip(branches, calls, strict=True):
                call = made(Place(self, branch))
                call.branch = branch
                self._ledger._driver.make(self._held, call)
                yield step(self._held, call)

        try:
            results = self._ledger._driver.obey_side_by_side(flows(), concurrency)
        finally:
            self.joined(branches)
        for result in results:
            if result.error is not None:
                raise result.error
        return [result.value for result in results]

    def in_branch(self, branch: Branch, thunk: Callable[[], T]) -> T:
        """Call `thunk` as the program of this branch, in a thread of its own."""
        strands = self._held.strands
        strands.add(caller())
        strands.discard(branch)
        try:
            with self.standing_in(branch):
                return thunk()
        finally:
            strands.discard(caller())

    def joined(self, branches: list[Branch]) -> None:
        """The program goes on behind these branches."""
        parent = branch_of(self._held, "gather")
        with self._held.lock:
            for branch in branches:
                self._held.close_branch(branch, parent)

    @contextmanager
    def standing_in(self, branch: Branch) -> Iterator[None]:
        token = place_variable.set(Place(self, branch))
        try:
            yield
        finally:
            with suppress(ValueError):  # closed from elsewhere, as a generator may be
                place_variable.reset(token)

    def _value(self, name: str, fresh: Any) -> Any:
        branch = self.stand(f"run.{name}()")
        with self._held.lock:
            self._held.admit(branch, caller(), f"run.{name}()")
            if branch.unbegun:
                self._held.let_go_of_dropped(branch)
            position = branch.take()
        return self._ledger._driver.obey(runs.value(self._held, branch, position, name, fresh))


_IDENTITY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sleep": lambda arguments: None,
    "signal": lambda arguments: arguments["name"],
}
"""How long a program waits may change while it waits: the time is the first one's. What is to be approved may not."""


def _nobody() -> None:
    """What a wait calls."""


def _seconds(name: str, given: Any) -> float:
    if type(given) not in (int, float) or not 0 <= given <= MAX_TIMEOUT:
        raise InvalidArguments(
            f"{name} is a number of seconds from 0 to {MAX_TIMEOUT:.0f}, not {given!r}; nothing was written"
        )
    return float(given)


def _approved(said: dict[str, Any], call: Call) -> Approval:
    from agent_run_ledger.model import Approval

    return Approval(**said, arguments=canonical.decode(call.stored)["arguments"])


async def _approved_later(said: Any, call: Call) -> Approval:
    return _approved(await said, call)


def branch_of(held: HeldRun, asked: str) -> Branch:
    """The branch of this run that the calling code is in. Raises `UnorderedStep` inside of one of its steps."""
    if held.is_suspended:  # whatever a `finally` asks for is asked for again when the program is begun anew
        raise Suspended
    inside = step_variable.get()
    if inside is not None and inside.run_id == held.run_id:
        raise UnorderedStep(held.run_id, asked, inside.tool_name)
    place: Place | None = place_variable.get()
    if place is None or place.run._held is not held:
        return held.root
    if place.run._is_over:
        raise ProgramEnded(held.run_id, asked)
    return place.branch


def _thunk(tool: Callable[..., T], item: Any) -> Callable[[], T]:
    return lambda: tool(item)


def _rest(running: list[Work]) -> list[Work]:
    """Those that still run, once one has ended."""
    import threading

    one_ended = threading.Event()
    for work in running:
        work.when_over(one_ended.set)
    one_ended.wait()
    return [work for work in running if not work.is_over]


def perform(ledger: Ledger, held: HeldRun, call: Call, *, is_async: bool) -> Any:
    """Make a call, now; in an event loop return what is awaited for its outcome."""
    if is_async:
        return ledger._asynchronous.call(held, call)
    receipt = call.options.receipt
    if receipt is not None and functions.signature(receipt).is_async:
        raise InvalidArguments(
            f"the receipt= of {call.tool!r} is an async function, and this call is not: nobody could await it; nothing was dispatched"
        )
    ledger._driver.make(held, call)
    return ledger._driver.obey(step(held, call))


class OpenRun:
    """The context manager of `open_run`, for `with` and for `async with`."""

    def __init__(self, ledger: Ledger, start: Callable[[float | None], HeldRun], wait: float | None) -> None:
        self._ledger = ledger
        self._start = start
        self._wait = wait

    def __enter__(self) -> Run:
        return self._enter(self._start(self._wait), is_async=False)

    def _enter(self, held: HeldRun, *, is_async: bool) -> Run:
        self._held = held
        self._run = Run(self._ledger, held, is_async=is_async)
        self._tokens = place_variable.set(Place(self._run, held.root)), step_variable.set(None)
        held.strands = {caller()}
        return self._run

    def _leave(self) -> None:
        self._held.strands = set()
        self._run.over()
        place, inside = self._tokens
        with suppress(ValueError):  # left in another context than it was entered in
            place_variable.reset(place)
            step_variable.reset(inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        try:
            if error is None:
                finish(self._ledger, self._held, self._run.result)
        except BaseException as unfinished:  # a result that cannot be stored, say
            error = unfinished
            raise
        finally:
            try:
                if error is not None:
                    park(self._ledger, self._held, error)
            finally:
                self._held.__exit__(kind, error, trace)

    async def __aenter__(self) -> Run:
        driver = self._ledger._asynchronous
        held = await driver.start(lambda: self._start(None), self._wait, waits_for_itself=False)
        return self._enter(held, is_async=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        driver = self._ledger._asynchronous
        try:
            if error is None:
                payload = runs.stored(self._run.result, "the result", self._ledger._payload_limit)
                await driver.finish(self._held, payload)
        except BaseException as unfinished:
            error = unfinished
            raise
        finally:
            try:
                if error is not None:
                    await driver.park(self._held, error)
            finally:
                self._held.__exit__(kind, error, trace)


def finish(ledger: Ledger, held: HeldRun, result: Any) -> None:
    """Complete the run with a result."""
    ledger._driver.obey(runs.finish(held, runs.stored(result, "the result", ledger._payload_limit)))


def park(ledger: Ledger, held: HeldRun, error: BaseException) -> None:
    """Park a run that an exception left, unless it ended or is somebody else's by now. The exception stays the news."""
    if not held.is_held:
        return
    if isinstance(error, Suspended):  # it has said what it waits for
        with suppress(StoreError):  # the lease runs out by itself
            ledger._driver.give_back(held)
        return
    try:
        if not ledger._driver.obey(runs.park(held, error)):
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
    passes = bool(takes.required)
    if not passes and takes.names:
        passes = bool(arguments) and all(name in takes.names for name in arguments)
    if takes.required:
        functions.check_arguments(tool, takes, arguments)
    annotated = passes and getattr(function, "__annotations__", None)
    return Call(
        check_name("tool_name", tool),
        arguments if type(arguments) is dict else dict(arguments),
        function,
        with_key(options) if takes.takes_key else options,
        functions.environment(options.version) if options.version else takes.environment,
        passes,
        limit,
        {n: a for n, a in functions.hints(function).items() if n != "return"} if annotated else {},
        is_async=takes.is_async,
        takes_key=takes.takes_key,
    )


def with_key(options: Options) -> Options:
    """What takes the key gives it to a receiver that knows what to do with it."""
    return options if options.effect is not None else options._replace(effect=Effect.IDEMPOTENT)
