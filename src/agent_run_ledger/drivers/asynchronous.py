"""The asynchronous driver: performs what flows ask for in an event loop, and leaves what waits for a sync to a thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from agent_run_ledger.contract import Clock, Store
from agent_run_ledger.drivers.context import StepContext, caller, callers, step_variable
from agent_run_ledger.drivers.leases import POLL_SECONDS, HeldRun, Leases
from agent_run_ledger.drivers.order import Order
from agent_run_ledger.drivers.sync import (
    DRAW_SECONDS,
    FIRST_DRAW_SECONDS,
    LONGEST_POLL_SECONDS,
    MustWait,
    Suspended,
    SyncDriver,
)
from agent_run_ledger.drivers.together import Together
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.drivers.writer import Writer
from agent_run_ledger.engine import runs
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import (
    Ask,
    AwaitLate,
    Commit,
    Draw,
    Fetch,
    Flow,
    GiveBack,
    Inquire,
    Invoke,
    Plan,
    Quiet,
    Rest,
    Result,
    Room,
    Turn,
    Wait,
    Warn,
)
from agent_run_ledger.engine.live import Branch
from agent_run_ledger.engine.steps import step
from agent_run_ledger.errors import InvalidArguments, LedgerError, RunOwned, StoreError
from agent_run_ledger.rules import functions
from agent_run_ledger.rules.budget import Most

T = TypeVar("T")

_PAUSE_AT_COMMIT = 8
"""So often one that is alone lets others have their turn: they wait for half a millisecond."""
_USED_TO_BE_ALONE = 8
"""After so many turns of the loop with one commit each the next one is not kept waiting for company."""
_PAUSE_AT_REPLAY = 64
"""After so many answers from the log that needed no waiting the other tasks of the loop have a turn."""
_GRACE_SECONDS, _PATIENCE_SECONDS = 0.05, 2.0
"""How long a replay waits for its program to cancel a call again: beyond the time of the first time, and without a known deadline."""
_QUIET_SECONDS = 2.0
"""After so long without a call the tasks of a program that is not to be waited with are taken to wait for those that do."""
_STOP_SECONDS = 5.0
"""How long an agent that has returned waits for calls of its own that it left behind, once they are cancelled."""


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


callers.task = _task


class Run(Protocol):
    """What the program's view of a run does for branches."""

    def standing_in(self, branch: Branch) -> AbstractContextManager[None]: ...

    def joined(self, branches: list[Branch]) -> None: ...


class _NotBegun(Exception):
    """A branch that was not begun, since another one had failed."""


def mark_as_coroutine_function(wrapper: Callable[..., Any]) -> None:
    """Have frameworks see that what this plain function returns is awaited."""
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(wrapper)
    else:
        wrapper._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


async def pause(clock: Clock, seconds: float) -> None:
    """Let `seconds` pass by this clock: one that a test moves is moved."""
    if clock.sleep is time.sleep:
        await asyncio.sleep(seconds)
    else:
        clock.sleep(seconds)
        await asyncio.sleep(0)


async def in_time(
    function: Callable[[], Awaitable[T]], seconds: float | None, out_of_time: Callable[[], TimeoutError]
) -> T:
    """What an async function returns. Where it does not return in `seconds` it is cancelled, and `out_of_time` says so."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await function()
    except TimeoutError:
        if limit.expired():
            raise out_of_time() from None
        raise


class _Item:
    """Something that is to be written in its turn, and perhaps somebody who waits for it."""

    __slots__ = ("answer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop = loop
        self.answer: asyncio.Future[Any] | None = None if loop is None else loop.create_future()

    def resolve(self, value: Any, error: BaseException | None) -> None:
        """Tell whoever waits, in the loop's thread."""
        answer = self.answer
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)


class _Pending(_Item):
    """A commit that somebody awaits."""

    __slots__ = ("effect", "is_put_off", "run")

    def __init__(self, run: HeldRun, effect: Commit, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.run = run
        self.effect = effect
        self.is_put_off = False

    @property
    def is_abandoned(self) -> bool:
        """Whether whoever awaited it was cancelled."""
        return self.answer is not None and self.answer.cancelled()


class _Nothing:
    """An awaitable without a wait."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_NOTHING_TO_AWAIT = _Nothing()


class _Job(_Item):
    """Something else, that may make its thread wait."""

    __slots__ = ("work",)

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(loop)
        self.work = work


_Answers = list[tuple[_Item, Any, BaseException | None]]


class _InLoop(threading.local):
    """What one thread's loop has gathered in this turn."""

    loop: asyncio.AbstractEventLoop | None = None
    items: list[_Item]
    replayed = 0
    calls = 0
    """How many calls are under way in it."""
    alone = 0
    """How many turns in a row had one commit to write."""
    unpaused = 0
    """How many commits were written since without a turn of the loop."""

    def __init__(self) -> None:
        self.looked_at: set[Branch] = set()
        """The branches whose calls that have not begun were looked at: nobody is cancelled within a turn."""


class AsyncDriver:
    """Obeys flows in an event loop. Many loops and threads may use one driver.

    In `process` the commits of one turn of the loop are written in one transaction at its end. In `full`, and where the store is
    behind a network, a thread writes and syncs whatever has come together while it wrote last, for all runs. What must wait for a sync
    or a lock, such as taking a run, is always done in that thread.
    """

    def __init__(self, sync: SyncDriver, store: Store, clock: Clock, leases: Leases, durability: str) -> None:
        self.sync = sync
        self._store = store
        self._clock = clock
        self._leases = leases
        self._waits = store.is_remote or durability == "full"
        """Whether every commit may make its thread wait, for a sync or a network."""
        self._in_loop = _InLoop()
        self._together: Together[_Pending] = Together(store, clock, leases, sync, synced=durability == "full")
        self._writer: Writer[_Item] = Writer(self._write)

    # --- what faces ask for -------------------------------------------------------------------------------------------

    def call(self, run: HeldRun, call: Call) -> Coroutine[Any, Any, Any]:
        """The program makes this call now; whoever awaits what this returns gets its outcome. Raises `UnorderedStep`."""
        branch = call.branch
        if branch.unbegun and branch not in self._in_loop.looked_at:
            self._look_for_dropped(run, branch)
        call.store_arguments()
        call.maker = caller()
        run.make(call)  # without the run's lock, which the writer's thread holds while it waits for a sync
        made = self.obey(step(run, call), call)
        made.__qualname__ = call.tool  # type: ignore[attr-defined] # for who forgets to await it
        call.coroutine = weakref.ref(made)
        branch.unbegun[call.position] = call
        return made

    def _look_for_dropped(self, run: HeldRun, branch: Branch) -> None:
        """Whoever makes a call goes on behind those that were cancelled before they began. Looked for once in a turn."""
        run.let_go_of_dropped(branch)
        looked_at = self._in_loop.looked_at
        if not looked_at:
            asyncio.get_running_loop().call_soon(looked_at.clear)
        looked_at.add(branch)

    async def obey(self, flow: Flow[T], call: Call | None = None) -> T:
        """Perform the flow's effects one after the other; return what it returns, raise what it raises. `call` is whose flow it is."""
        if call is not None:
            call.coroutine = None  # it has begun, and says itself how it ends
            call.branch.unbegun.pop(call.position, None)
            call.task = asyncio.current_task()
        answer: Any = None
        error: BaseException | None = None
        in_loop = self._in_loop
        in_loop.calls += 1
        try:
            while True:
                try:
                    effect = flow.send(answer) if error is None else flow.throw(error)
                except StopIteration as stop:
                    return cast(T, stop.value)
                finally:
                    error = None
                try:
                    answer = await self.perform(effect)
                except BaseException as raised:
                    error = raised
        finally:
            in_loop.calls -= 1

    def perform(self, effect: Ask) -> Awaitable[Any]:
        """Perform one effect; what is awaited is its answer. A test overrides this to stop at every effect, as a crash would."""
        if isinstance(effect, Commit):
            run = cast(HeldRun, effect.run)
            if effect.is_recorded or run.turns is None:
                return self._look_up(run, effect)
            return self._commit(run, effect)
        if isinstance(effect, Invoke):
            return self._invoke(effect)
        if isinstance(effect, Turn):
            order: Order | None = cast(HeldRun, effect.run).order
            has_order = order is not None and order.is_of(effect.run.turns) and effect.interrupted_after is None
            if has_order and cast(Order, order).at_once(effect.call.position, effect.seq):
                return _NOTHING_TO_AWAIT
            return self._take_turn(effect)
        return self._perform_seldom(effect)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may make a thread wait, in the writer's thread."""
        job = _Job(work, asyncio.get_running_loop())
        self._writer.put(job)
        assert job.answer is not None
        return cast(T, await job.answer)

    async def looked_up(self, look: Callable[[], T]) -> T:
        """What somebody reads of the store: here and now, or in the writer's thread where it may wait for a network."""
        return await self.in_thread(look) if self._store.is_remote else look()

    def behind(self, run: HeldRun, flow: Flow[Any]) -> None:
        """Obey a flow that calls nobody, behind everything of the run that is to be written by now, and wait for nothing.

        For whoever is cancelled and must not await any more. The run stays pinned until it is done.
        """

        def work() -> None:
            try:
                with suppress(LedgerError):  # nobody is there to hear of it, and the lease runs out by itself
                    self.sync.obey(flow)
            finally:
                run.__exit__(None, None, None)

        run.__enter__()
        job = _Job(work, None)
        loop = _running_loop()
        try:
            if run.put_off or loop is None:  # what waits for a sync in the thread comes first
                self._writer.put(job)
            else:
                self._enqueue(job, loop)
        except StoreError:  # the ledger is closed, and has given the run back
            run.__exit__(None, None, None)

    # --- programs -----------------------------------------------------------------------------------------------------

    async def start(self, start: Callable[[], HeldRun], wait: float | None, *, waits_for_itself: bool) -> HeldRun:
        """Take a run, in the writer's thread. Whoever else has it is waited for here, where others can go on."""
        deadline = self._clock.elapsed() + (wait or 0.0)
        taken: list[HeldRun] = []

        def take() -> HeldRun:
            taken.append(start())
            return taken[0]

        def let_go() -> None:
            for run in taken:
                run.__exit__(None, None, None)
                with suppress(LedgerError):  # the lease runs out by itself
                    self.sync.give_back(run)

        while True:
            try:
                held = await self.in_thread(take)
                held.loop = asyncio.get_running_loop()
                return held
            except asyncio.CancelledError:  # the thread takes it all the same, or has taken it
                with suppress(StoreError):  # the ledger is closed, and has given it back
                    self._writer.put(_Job(let_go, None))
                raise
            except RunOwned as owned:
                is_ours = waits_for_itself and owned.owner == self._leases.owner
                if is_ours and (run := self._leases.run(owned.run_id)).loop is not None and run.loop.is_closed():
                    run.abandon()  # its program is never going to end
                    continue
                if not is_ours and self._clock.elapsed() >= deadline:
                    raise
            await self.pause(POLL_SECONDS)

    async def finish(self, run: HeldRun, payload: bytes) -> None:
        """Complete the run. Calls that are still under way, whose outcome nobody wants any more, are cancelled first."""
        await self._stop_calls(run)
        await self.obey(runs.finish(run, payload))

    async def park(self, run: HeldRun, error: BaseException) -> None:
        """Park a run that an exception left, unless it ended or is somebody else's by now. The exception stays the news."""
        if not run.is_held:
            return
        if isinstance(error, Suspended):  # it has said what it waits for
            with suppress(StoreError):  # the lease runs out by itself
                await self.in_thread(lambda: self.sync.give_back(run))
            return
        if not isinstance(error, Exception):  # nothing can be awaited any more
            self._park_behind(run, error)
            return
        try:
            await self._stop_calls(run)
            if not await self.obey(runs.park(run, error)):
                error.add_note("the run was not parked: calls of it are still under way")
        except LedgerError as trouble:
            error.add_note(f"the run could not be parked: {trouble}")
        except BaseException:  # cancelled, while it parks for another reason
            self._park_behind(run, error)
            raise

    def _park_behind(self, run: HeldRun, error: BaseException) -> None:
        """Park the run as soon as the last of its calls, which are cancelled, has ended. Waits for nothing."""
        under_way = set(self._cancel_calls(run))

        def ended(task: asyncio.Task[Any]) -> None:
            under_way.discard(task)
            if not under_way:
                self.behind(run, runs.park(run, error))

        for task in list(under_way):
            task.add_done_callback(ended)
        if not under_way:
            self.behind(run, runs.park(run, error))

    def _cancel_calls(self, run: HeldRun) -> list[asyncio.Task[Any]]:
        here = _task()
        for call in [call for call in run.made.values() if call.task is None]:  # made, and never begun
            run.ended(call, None)
        tasks = {call.task for call in run.made.values() if call.task is not None and call.task is not here}
        for task in tasks:
            with suppress(RuntimeError):  # its loop is closed
                task.cancel()
        return list(tasks)

    async def _stop_calls(self, run: HeldRun) -> None:
        if run.is_busy and (tasks := self._cancel_calls(run)):
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)

    async def gather(
        self, run: Run, branches: list[Branch], thunks: Sequence[Any], concurrency: int | None, strands: set[object]
    ) -> list[Any]:
        """See `Run.gather` and `Run.map`. `strands` are the tasks in which the run's program is at work."""
        limit = asyncio.Semaphore(concurrency) if concurrency is not None else None
        failed = False

        async def one(branch: Branch, thunk: Any) -> Any:
            nonlocal failed
            if limit is not None:
                await limit.acquire()
            try:
                if failed and limit is not None:
                    raise _NotBegun
                with run.standing_in(branch):
                    value = thunk() if callable(thunk) else thunk
                    return await value if hasattr(type(value), "__await__") else value
            except BaseException:
                failed = True
                raise
            finally:
                if limit is not None:
                    limit.release()

        tasks = [asyncio.create_task(one(branch, thunk)) for branch, thunk in zip(branches, thunks, strict=True)]
        strands.update(tasks)
        strands.discard(caller())
        for task in tasks:
            task.add_done_callback(strands.discard)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            strands.add(caller())
            for thunk in thunks:
                if inspect.iscoroutine(thunk) and inspect.getcoroutinestate(thunk) == inspect.CORO_CREATED:
                    thunk.close()  # its branch was not begun
            run.joined(branches)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _NotBegun):
                raise result
        return results

    def threaded(self, function: Callable[[], T], name: str) -> Callable[[], Coroutine[Any, Any, T]]:
        """An async function that calls a plain one in a thread of its own."""

        async def call() -> T:
            work = Work(function, {}, name)
            await _over(work)
            if work.result.error is not None:
                raise work.result.error
            value: Any = work.result.value
            return cast(T, await value if hasattr(type(value), "__await__") else value)

        return call

    def in_a_thread(self, run: HeldRun, function: Callable[..., T], name: str) -> Callable[..., Coroutine[Any, Any, T]]:
        """A step's plain function as an async one: it is called in a thread of its own.

        Where that is cancelled the thread goes on; what it returns is its step's late outcome.
        """

        async def call(**arguments: Any) -> T:
            work, inside = Work(function, arguments, name), step_variable.get()
            try:
                await _over(work)
            except BaseException:
                if inside is not None and not work.take_back():
                    run.leave_running(inside.position, work)
                raise
            if work.result.error is not None:
                raise work.result.error
            value = work.result.value
            return cast(T, await value if hasattr(type(value), "__await__") else value)

        return call

    @staticmethod
    async def side_by_side(
        begin: Callable[[], Sequence[T]],
        work: Callable[[T], Coroutine[Any, Any, Any]],
        ended: Callable[[T, Result], None],
    ) -> None:
        """Work on what `begin` gives, each in a task of its own, and tell `ended` of each, until there is nothing left to begin.

        `begin` is asked at first, and whenever a task has ended. Where this is cancelled the tasks are, and the cancellation goes on
        its way when the last of them has ended.
        """
        running: dict[asyncio.Task[Any], T] = {}
        over: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        try:
            while True:
                for each in begin():
                    task = asyncio.create_task(work(each))
                    running[task] = each
                    task.add_done_callback(over.put_nowait)
                if not running:
                    return
                task = await over.get()
                ended(running.pop(task), _result_of(task))
        except BaseException as error:
            for task in running:
                task.cancel()
            while running and not isinstance(error, GeneratorExit):  # which must not await
                with suppress(asyncio.CancelledError):  # once is enough: a task may be busy with cleaning up
                    task = await over.get()
                    del running[task]
                    _result_of(task)  # so that nobody says it was never asked for
            raise

    @staticmethod
    def run(program: Callable[[], Coroutine[Any, Any, T]], instead: str = "arun") -> T:
        """Run an async program to its end from a thread that has no event loop."""
        if _running_loop() is None:
            return asyncio.run(program())
        raise InvalidArguments(
            f"an event loop runs in this thread, which must not wait: `await ledger.{instead}(...)` instead; nothing was started"
        )

    @staticmethod
    def loop(name: str) -> Loop:
        """An event loop for the programs of a worker, in a thread of that name once there is a program."""
        return Loop(name)

    def close(self) -> None:
        """Write what has been gathered, and end the thread."""
        items, self._in_loop.items = getattr(self._in_loop, "items", []), []
        self._writer.close(items)

    # --- effects ------------------------------------------------------------------------------------------------------

    async def _perform_seldom(self, effect: Ask) -> Any:
        if isinstance(effect, Wait):
            return await self._wait(effect)
        if isinstance(effect, Fetch) and self._store.is_remote:
            return await self.in_thread(lambda: self.sync.perform(effect))
        if isinstance(effect, Warn | Fetch):  # to read a value costs less than to decode it, and waits for no sync
            return self.sync.perform(effect)
        if isinstance(effect, Quiet | Room):
            return await self._wait_for_quiet(effect)
        if isinstance(effect, Draw):
            return await self._draw(effect)
        if isinstance(effect, AwaitLate):
            return await self._await_late(effect)
        if isinstance(effect, Inquire):
            return await self._inquire(effect)
        if isinstance(effect, Rest):
            return await self._rest(effect)
        assert isinstance(effect, GiveBack)
        job = _Job(lambda: self.sync.perform(effect), asyncio.get_running_loop())
        self._enqueue(job, asyncio.get_running_loop())
        assert job.answer is not None
        return await job.answer

    def _commit(self, run: HeldRun, effect: Commit) -> Awaitable[Any]:
        """Have it written. Where whoever awaits the answer is cancelled, so is the future, and it is written all the same."""
        loop = asyncio.get_running_loop()
        gathered = self._in_loop
        if (
            gathered.alone >= _USED_TO_BE_ALONE
            and gathered.calls == len(run.made) == 1
            and gathered.loop is loop
            and not (gathered.items or run.put_off)
            and self._is_ours(run)
        ):
            return self._commit_alone(run, effect, loop)
        pending = _Pending(run, effect, loop)
        self._enqueue(pending, loop)
        return cast(Awaitable[Any], pending.answer)

    async def _commit_alone(self, run: HeldRun, effect: Commit, loop: asyncio.AbstractEventLoop) -> Any:
        """Have it written now: for a while there was nobody in this loop with whom it could have shared a transaction."""
        put_off: _Pending | None = None
        answer: Any = None
        try:
            answer = self.sync.commit(effect, waits=False)
        except MustWait:
            put_off = _Pending(run, effect, loop)
        if put_off is not None:
            self._put_off(put_off)
            return await cast(Awaitable[Any], put_off.answer)
        gathered = self._in_loop
        gathered.unpaused += 1
        if gathered.unpaused >= _PAUSE_AT_COMMIT:  # the program may go on for ever without a pause of its own
            gathered.unpaused = 0
            await asyncio.sleep(0)
        return answer

    def _is_ours(self, run: HeldRun) -> bool:
        return run.is_held and self._clock.elapsed() < run.expires

    async def _look_up(self, run: HeldRun, effect: Commit) -> Any:
        """The answer of the log, as far as it seems to have one: nothing has to be written then."""
        # the steps of a pipeline are known by name, in whatever order they come
        if run.turns is None and run.is_begun and not run.history.pipeline:
            await self._begin_order(run)
        if effect.is_recorded and (plan := self._recorded(run, effect)) is not None:
            self._in_loop.replayed += 1
            if self._in_loop.replayed % _PAUSE_AT_REPLAY == 0:
                await asyncio.sleep(0)
            if plan.error is not None:
                raise plan.error
            return plan.answer
        return await self._commit(run, effect)

    async def _begin_order(self, run: HeldRun) -> None:
        """Know the run, and so in which order its program is to be handed what is recorded."""

        def hold() -> None:
            with run.lock:
                self._leases.hold(run)

        if not run.is_held:
            await self.in_thread(hold)
        with run.lock:
            if run.turns is None:
                run.begin_turns()

    def _recorded(self, run: HeldRun, effect: Commit) -> Plan | None:
        """The answer of the log, where there is nothing to write and nothing to wait for."""
        if not run.lock.acquire(blocking=False):
            return None
        try:
            if run.requests or run.owed or not (run.is_settled or self._is_ours(run)):
                return None
            plan = effect.decide(run, self._leases.moment(begins=False))
            if plan.drafts:
                return None
            run.is_touched = True
            run.replayed += plan.is_replay
            return plan
        finally:
            run.lock.release()

    async def _invoke(self, effect: Invoke) -> Result:
        run = cast(HeldRun, effect.run)
        token = effect.step.token
        if not run.is_held or run.token != token or self._clock.elapsed() >= run.expires:
            await self.in_thread(lambda: self._still_ours(run, token))
        if run.replayed:
            self.sync.tell_replayed(run)
        context = step_variable.set(StepContext(self._leases, run, effect.step))
        try:
            if effect.timeout is None:
                value = effect.function(**effect.arguments)
                if hasattr(type(value), "__await__"):
                    value = await value
                return Result(value, None)
            return await self._invoke_in_time(run, effect, effect.timeout)
        except BaseException as error:
            return Result(None, error)
        finally:
            with suppress(ValueError):  # closed from elsewhere, as a coroutine is whose loop is closed
                step_variable.reset(context)

    def _still_ours(self, run: HeldRun, token: int) -> None:
        with run.lock:
            self.sync.still_ours(run, token)

    async def _inquire(self, effect: Inquire) -> Result:
        """The receipt function's result; a plain function is called in a thread, where it may wait for its receiver."""
        run, step = cast(HeldRun, effect.run), effect.step

        async def ask() -> Any:
            if functions.signature(effect.question).is_async:
                return await effect.question(step.key, effect.arguments)
            return await self.threaded(lambda: effect.question(step.key, effect.arguments), f"receipt of {step.tool}")()

        context = step_variable.set(StepContext(self._leases, run, step))  # what it calls is no step of the run
        try:
            seconds = effect.timeout
            return Result(await in_time(ask, seconds, lambda: TimeoutError(f"no answer within {seconds:g} s")), None)
        except BaseException as error:
            return Result(None, error)
        finally:
            with suppress(ValueError):  # closed from elsewhere, as a coroutine is whose loop is closed
                step_variable.reset(context)

    async def _rest(self, effect: Rest) -> bool:
        run = cast(HeldRun, effect.run)
        seen, end = await self.in_thread(lambda: self.sync.lie_down(effect))
        pause, stands, since = POLL_SECONDS, None, self._clock.elapsed()
        try:
            while True:
                if (now_stands := (run.history.size, frozenset(run.made))) != stands:
                    stands, since = now_stands, self._clock.elapsed()
                is_quiet = run.suspends and self._clock.elapsed() - since >= _QUIET_SECONDS
                if not await self.in_thread(partial(self.sync.still_rests, effect, seen, end, is_quiet=is_quiet)):
                    break
                await self.pause(min(pause, self.sync.left(effect, end)))
                pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        finally:
            run.resting.discard(effect.call.position)
        return self.sync.left(effect, end) <= 0

    async def _invoke_in_time(self, run: HeldRun, effect: Invoke, seconds: float) -> Result:
        """A coroutine is cancelled when its time is up; a thread is left to itself."""
        out_of_time = TimeoutError(f"no result within {seconds:g} s")
        limit = asyncio.timeout(seconds)
        work: Work | None = None
        try:
            async with limit:
                if effect.is_async:
                    value = effect.function(**effect.arguments)
                else:
                    work = Work(effect.function, effect.arguments, effect.step.tool)
                    await _over(work)
                    if work.result.error is not None:
                        return work.result
                    value = work.result.value
                if hasattr(type(value), "__await__"):
                    value = await value
                return Result(value, None)
        except TimeoutError as error:
            return Result(None, out_of_time if limit.expired() else error)
        finally:  # also where it is cancelled
            if work is not None and not (work.is_over or work.take_back()):
                run.leave_running(effect.step.position, work)

    async def _await_late(self, effect: AwaitLate) -> Result | None:
        run = cast(HeldRun, effect.run)
        work = run.left_running.get(effect.position)
        if work is None:
            return None
        loop = asyncio.get_running_loop()
        end = None if effect.at_most is None else loop.time() + effect.at_most
        over = loop.create_task(_over(work))
        try:
            with run:
                while not over.done():
                    left = 1.0 if end is None else min(1.0, end - loop.time())
                    if left <= 0 or run.is_cancelled:
                        return None
                    await asyncio.wait({over}, timeout=left)
        finally:
            over.cancel()
        run.let_go_of(effect.position)
        return work.result

    async def _take_turn(self, effect: Turn) -> None:
        run, loop = cast(HeldRun, effect.run), asyncio.get_running_loop()
        order: Order | None = run.order
        if order is not None and order.loop is not loop and not order.is_idle:
            self.sync.perform(effect)  # whoever calls from a second loop is in nobody's order, as a thread is
            return
        if order is None or order.turns is not run.turns or order.loop is not loop:
            assert run.turns is not None
            order = run.order = Order(run, run.turns, loop)
        if effect.interrupted_after is not None:
            await order.wait(effect.call.position, effect.seq)
            await _await_own_cancellation(effect.interrupted_after)
        elif not order.at_once(effect.call.position, effect.seq):
            await order.wait(effect.call.position, effect.seq)

    async def _draw(self, effect: Draw) -> Most | str | None:
        pause, end = FIRST_DRAW_SECONDS, self._clock.elapsed() + DRAW_SECONDS
        while (answer := await self.in_thread(lambda: self._leases.accounts.draw(effect))) is None:
            await self.pause(pause)
            if not self.sync.still_draws(effect, end):
                break
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        return answer

    async def _wait(self, effect: Wait) -> None:
        run = cast(HeldRun, effect.run)
        with run:
            end = self._clock.elapsed() + min(effect.until - self._clock.now(), effect.at_most)
            while (left := end - self._clock.elapsed()) > 0 and not run.is_cancelled:
                await self.pause(min(left, 1.0))

    async def pause(self, seconds: float) -> None:
        """Let `seconds` pass, by the clock of the ledger."""
        await pause(self._clock, seconds)

    @staticmethod
    async def _wait_for_quiet(effect: Quiet | Room) -> None:
        pause = 0.001
        while not effect.is_over:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _enqueue(self, item: _Item, loop: asyncio.AbstractEventLoop) -> None:
        if self._waits:
            self._writer.put(item)
            return
        if isinstance(item, _Pending) and not self._is_ours(item.run):
            self._writer.put(item)  # taking a run waits for a sync
            return
        gathered = self._in_loop
        if gathered.loop is not loop:
            if gathered.loop is not None and gathered.items:  # its turn has not come to an end, and perhaps never will
                self._write_turn()
            gathered.loop, gathered.items = loop, []
            gathered.looked_at.clear()
        if not gathered.items:
            loop.call_soon(self._write_turn)
        gathered.items.append(item)

    def _write_turn(self) -> None:
        items, self._in_loop.items = self._in_loop.items, []
        self._in_loop.alone = self._in_loop.alone + 1 if len(items) == 1 else 0
        self._write(items, is_inline=True)

    def _put_off(self, pending: _Pending) -> None:
        """Have the thread write what must wait for a sync."""
        pending.is_put_off = True
        pending.run.put_off += 1
        try:
            self._writer.put(pending)
        except StoreError:
            pending.run.put_off -= 1
            raise

    def _write(self, items: list[_Item], is_inline: bool = False) -> None:
        """Write everything that has come together, the commits of all runs in one transaction."""
        commits: list[_Pending] = []
        jobs: list[_Job] = []
        for item in items:
            (commits if isinstance(item, _Pending) else jobs).append(item)  # type: ignore[arg-type]
        # The loop waits for no sync.
        answers: _Answers = []
        try:
            answers += self._together.write(commits, self._put_off if is_inline else None)
        except BaseException as trouble:  # whoever waits must hear of it, and the thread that writes for others go on
            answers += [(commit, None, trouble) for commit in commits]
        for job in jobs:
            value, error = None, None
            try:
                value = job.work()
            except BaseException as raised:
                error = raised
            if job.loop is not None:
                answers.append((job, value, error))
        if is_inline:
            _resolve(answers)
            return
        for commit in commits:
            commit.run.put_off -= commit.is_put_off
        told: dict[asyncio.AbstractEventLoop, _Answers] = {}
        for answer in answers:
            told.setdefault(cast(asyncio.AbstractEventLoop, answer[0].loop), []).append(answer)
        for loop, its in told.items():
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(_resolve, its)


class Loop:
    """An event loop in a thread of its own, in which the programs of many runs go on side by side."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._programs: set[asyncio.Task[Result]] = set()
        self._is_closing = False
        self._runner = asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()

    def start(self, program: Callable[[], Coroutine[Any, Any, Any]], ended: Callable[[Result], None]) -> None:
        """Begin an async program. `ended` hears in the loop's thread what it returned or raised, `SystemExit` too. Waits for nothing.

        Raises `RuntimeError` where no thread is to be had.
        """
        with self._mutex:
            if self._loop is None:
                begun: SimpleQueue[asyncio.AbstractEventLoop] = SimpleQueue()
                threading.Thread(target=self._live, args=(begun,), name=self._name, daemon=True).start()
                self._loop = begun.get()
        self._loop.call_soon_threadsafe(self._begin, program, ended)

    def close(self) -> None:
        """End the thread when the last of the programs has ended. Waits for nothing."""
        with self._mutex, suppress(RuntimeError):  # it has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end)

    def _live(self, begun: SimpleQueue[asyncio.AbstractEventLoop]) -> None:
        with self._runner as runner:
            loop = runner.get_loop()
            begun.put(loop)
            while not (self._is_closing and not self._programs):
                # A task of a program that raises `SystemExit` stops the loop; the others are not to pay for it.
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()

    def _begin(self, program: Callable[[], Coroutine[Any, Any, Any]], ended: Callable[[Result], None]) -> None:
        async def whole() -> Result:
            try:
                return Result(await program(), None)
            except BaseException as error:
                return Result(None, error)

        def over(task: asyncio.Task[Result]) -> None:
            self._programs.discard(task)
            ended(task.result())
            if self._is_closing:
                self._end()

        task = asyncio.get_running_loop().create_task(whole())
        self._programs.add(task)
        task.add_done_callback(over)

    def _end(self) -> None:
        self._is_closing = True
        if not self._programs:
            asyncio.get_running_loop().stop()


def _resolve(answers: _Answers) -> None:
    for item, value, error in answers:
        with suppress(RuntimeError):  # its loop is closed
            item.resolve(value, error)


def _result_of(task: asyncio.Task[Any]) -> Result:
    if task.cancelled():
        return Result(None, asyncio.CancelledError())
    error = task.exception()
    return Result(None if error is not None else task.result(), error)


async def _await_own_cancellation(at_most: float) -> None:
    """Be cancelled by the program itself, if it is going to cancel this call again: what a scope or a group swallows is no error.

    It is waited for no longer than it took the first time. Scopes of asyncio turn a cancellation into `TimeoutError`, which
    `StepCancelled` is, so that without a deadline of anyio a short patience will do.
    """
    anyio = sys.modules.get("anyio")
    loop = asyncio.get_running_loop()
    left = anyio.current_effective_deadline() - loop.time() if anyio is not None else float("inf")
    patience = min(at_most, _PATIENCE_SECONDS if left == float("inf") else left)
    await asyncio.sleep(max(patience, 0.0) + _GRACE_SECONDS)


async def _over(work: Work) -> None:
    """Wait until the work is over; where nobody waits any more it goes on."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    work.when_over(lambda: loop.call_soon_threadsafe(tell))
    work.start()
    await done
