"""Whoever cancels, whenever and however often: it goes on its way at once, nothing hangs, and a replay goes the same way."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agent_run_ledger import AgentRunLedger, Effect, RetryPolicy, Run, StepCancelled, StepInDoubt
from agent_run_ledger.contract import Row
from agent_run_ledger.drivers import order
from agent_run_ledger.testing import FakeClock, MemoryStore
from support.loops import CountingLoop, HeldUp, run

pytestmark = pytest.mark.filterwarnings("ignore::agent_run_ledger.UndeclaredEffectWarning")

RUN, INTERRUPTED = "run", "interrupted"
LONG = 1e6
"""Seconds that nothing waits unless it is cancelled."""
MOST_TURNS = 60
"""Turns of the loop between a cancellation and the program's next line, where nothing spins."""

Thunk = Callable[[], Awaitable[Any]]


class Clock(FakeClock):
    """It stands still, and whoever pauses by it pauses in the event loop's time."""

    sleep = staticmethod(time.sleep)  # type: ignore[assignment]


class Stopped(Exception):
    """What the program raises of its own accord, so that its run can be run again."""


class Scene:
    """One store and the lives of one program on it. In the first one somebody cancels, once the chosen moment has come."""

    def __init__(self, durability: str) -> None:
        self.durability: Any = durability
        self.memory = MemoryStore(clock=Clock())
        self.store: Any = HeldUp(self.memory)
        self.life = 0
        self.cancel: Callable[[], object] = lambda: None
        """How whoever cancels does it, in the loop's thread."""
        self.is_over = False
        self.cancelled_at = self.went_on_at = 0
        self.has_gone_on = threading.Event()
        self.calls = self.cleanups = 0
        self.said: list[Any] = []

    @property
    def is_first(self) -> bool:
        return self.life == 1

    def now(self) -> None:
        """The moment has come. Call in the loop's thread."""
        if self.is_first and not self.is_over:
            self.is_over = True
            self.cancelled_at = self.loop.turns
            self.cancel()

    def once_more(self) -> None:
        """Whoever cancels does it again."""
        self.cancel()

    def goes_on(self) -> None:
        """The program has its next line."""
        self.went_on_at = self.loop.turns
        self.has_gone_on.set()

    def at(self, kind: str, position: str | None) -> Callable[[Row], None]:
        """The moment at which such an entry is being written. Another thread goes on with that when the program goes on."""

        def reached(row: Row) -> None:
            if (row.kind, row.position) != (kind, position) or self.is_over or not self.is_first:
                return
            if threading.get_ident() == self.thread:
                self.now()
                return
            self.loop.call_soon_threadsafe(self.now)
            assert self.has_gone_on.wait(LONG)

        return reached

    async def as_soon_as(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0)
        self.now()

    def live(self, program: Callable[[AgentRunLedger], Callable[..., Any]], *, stays: bool = False) -> Any:
        """Another process runs the program; what the agent returns, or the exception that left it.

        `stays`: its event loop goes on when the agent has ended, for as long as a call is under way.
        """
        self.life += 1
        self.said = []
        threads = _thread._count()
        self.ledger = AgentRunLedger(self.store, durability=self.durability, clock=self.memory.clock)
        agent = program(self.ledger)

        async def lived() -> Any:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, CountingLoop)
            self.loop, self.thread = loop, threading.get_ident()
            try:
                return await self.ledger.arun(agent, run_id=RUN)
            except (Stopped, StepInDoubt, TimeoutError, asyncio.CancelledError) as error:
                return error
            finally:
                while stays and self.ledger._leases.run(RUN).made:
                    await asyncio.sleep(0)

        result = run(lived)
        self.ledger._asynchronous.close()  # all is written
        held = self.ledger._leases.run(RUN)
        assert (held.made, held.in_flight, held.pins) == ({}, {}, 0)
        assert held.interrupted == {} or isinstance(result, BaseException)
        head = self.memory.head(RUN)
        assert head is not None
        assert head.owner is None, "the lease was not given back"
        assert self.ledger.verify().findings == []
        assert self.calls == self.cleanups
        self.ledger.close()
        while _thread._count() > threads:
            os.sched_yield()
        return result

    @property
    def entries(self) -> list[tuple[str, str | None]]:
        return [(row.kind, row.position) for row in self.memory.read(RUN)]


# --- who cancels ------------------------------------------------------------------------------------------------------


def _task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def from_outside(scene: Scene, thunk: Thunk) -> Any:
    scene.cancel = _task().cancel
    return await thunk()


async def twice(scene: Scene, thunk: Thunk) -> Any:
    task = _task()
    scene.cancel = lambda: (task.cancel(), task.cancel())
    return await thunk()


async def the_task_that_calls(scene: Scene, thunk: Thunk) -> Any:
    task = asyncio.ensure_future(thunk())
    scene.cancel = task.cancel
    return await task


async def again_and_again(scene: Scene, thunk: Thunk) -> Any:
    task = asyncio.ensure_future(thunk())

    def cancel(more: int = 5) -> None:
        task.cancel()
        if more:
            scene.loop.call_soon(cancel, more - 1)

    scene.cancel = cancel
    return await task


def _let_time_pass(scene: Scene) -> Callable[[], None]:
    def pass_by() -> None:
        scene.loop.ahead += 3600

    return pass_by


async def timeout(scene: Scene, thunk: Thunk) -> Any:
    scene.cancel = _let_time_pass(scene)
    async with asyncio.timeout(60):
        return await thunk()


async def wait_for(scene: Scene, thunk: Thunk) -> Any:
    scene.cancel = _let_time_pass(scene)
    return await asyncio.wait_for(thunk(), 60)


async def a_failing_sibling(scene: Scene, thunk: Thunk) -> Any:
    fails = asyncio.Event()
    scene.cancel = fails.set

    async def sibling() -> None:
        await fails.wait()
        raise TimeoutError

    async def call() -> Any:
        return await thunk()

    try:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(sibling())
            calling = group.create_task(call())
            calling.add_done_callback(lambda _: waiting.cancel())
    except* TimeoutError:
        if calling.cancelled():
            raise TimeoutError from None
    return calling.result()


async def move_on_after(scene: Scene, thunk: Thunk) -> Any:
    scene.cancel = _let_time_pass(scene)
    with anyio.move_on_after(60 if scene.is_first else 0.1):  # whose end a replay waits for
        return await thunk()
    return INTERRUPTED


async def fail_after(scene: Scene, thunk: Thunk) -> Any:
    scene.cancel = _let_time_pass(scene)
    with anyio.fail_after(60 if scene.is_first else 0.1):
        return await thunk()


async def a_cancel_scope(scene: Scene, thunk: Thunk) -> Any:
    with anyio.CancelScope() as scope:
        scene.cancel = scope.cancel
        return await thunk()
    return INTERRUPTED


async def an_anyio_group(scene: Scene, thunk: Thunk) -> Any:
    results: list[Any] = []

    async def call() -> None:
        try:
            results.append(await thunk())
        except TimeoutError:
            results.append(INTERRUPTED)

    async with anyio.create_task_group() as group:
        scene.cancel = group.cancel_scope.cancel
        group.start_soon(call)
    return results[0] if results else INTERRUPTED


WHO = [
    from_outside, twice, the_task_that_calls, again_and_again, timeout, wait_for, a_failing_sibling, move_on_after, fail_after,
    a_cancel_scope, an_anyio_group,
]  # fmt: skip

# --- when -------------------------------------------------------------------------------------------------------------

MOMENTS = [
    "when the call is made", "while its intent is written", "when its intent is written", "in flight", "in flight by key",
    "from inside and outside in one turn", "again while it cleans up", "while its outcome is written", "when its outcome is written", "before its turn", "before a retry",
    "in a gather", "in a map", "in a child agent",
]  # fmt: skip


ONCE_MORE = ("from inside and outside in one turn", "again while it cleans up")


class Program:
    """An agent that makes one call, is perhaps cancelled in it, and then does what `then` says."""

    def __init__(self, scene: Scene, who: Any, moment: str, then: str, effect: Effect | None = None) -> None:
        self.scene, self.who, self.moment, self.then, self.effect = scene, who, moment, then, effect
        self.other_is_back = asyncio.Event()

    async def work(self) -> str:
        scene, moment = self.scene, self.moment
        scene.calls += 1
        try:
            if scene.is_first and (moment.startswith("in ") or moment in ONCE_MORE):
                if moment == "from inside and outside in one turn":
                    scene.loop.call_soon(scene.once_more)
                    scene.now()
                else:
                    scene.loop.call_soon(scene.now)
                try:
                    await asyncio.sleep(LONG)
                finally:
                    if moment == "again while it cleans up":
                        scene.loop.call_soon(scene.once_more)
                        for _ in range(5):  # a time limit cancels no second time
                            await asyncio.sleep(0)
            if scene.is_first and moment == "before a retry":
                raise ConnectionRefusedError
            if scene.is_first and moment == "before its turn":
                await self.other_is_back.wait()
            return "value"
        finally:
            scene.cleanups += 1

    def __call__(self, ledger: AgentRunLedger) -> Callable[..., Any]:
        scene, moment = self.scene, self.moment
        retry = RetryPolicy(max_attempts=9, base=LONG, cap=LONG) if moment == "before a retry" else None

        @ledger.tool(effect=self.effect, retry=retry)
        async def tool(number: int = 0) -> str:
            return await self.work()

        @ledger.tool()
        async def other() -> str:
            return "other"

        @ledger.agent()
        async def child() -> Any:
            return await tool()

        @ledger.agent()
        async def agent(this: Run) -> Any:
            held = ledger._leases.run(RUN)
            thunk: Thunk = tool
            beside: list[asyncio.Task[Any]] = []
            if moment == "when the call is made":

                def thunk() -> Awaitable[Any]:
                    made: Awaitable[Any] = tool()
                    scene.now()
                    return made

            elif moment == "while its intent is written":
                scene.store.before = scene.at("intent", "1")
            elif moment == "when its intent is written":
                scene.store.after = scene.at("intent", "1")
            elif moment == "while its outcome is written":
                scene.store.before = scene.at("outcome", "1")
            elif moment == "when its outcome is written":
                scene.store.after = scene.at("outcome", "1")
            elif moment == "in flight by key":
                thunk = lambda: tool(step_key="key")  # noqa: E731
            elif moment == "in a gather":
                thunk = lambda: this.gather(lambda: tool(1), lambda: tool(2))  # noqa: E731
            elif moment == "in a map":
                thunk = lambda: this.map(tool, [1, 2, 3], concurrency=2)  # noqa: E731
            elif moment == "in a child agent":
                thunk = child
            elif moment == "before a retry":
                beside.append(asyncio.create_task(scene.as_soon_as(lambda: held.history.waiting)))
            elif moment == "before its turn":

                async def in_a_branch() -> Any:
                    with this.branch("beside"):
                        await other()
                        self.other_is_back.set()

                beside.append(asyncio.create_task(in_a_branch()))
                beside.append(asyncio.create_task(scene.as_soon_as(lambda: held.order and "1" in held.order._waiters)))
            try:
                return await self.body(thunk, other)
            finally:
                for task in beside:
                    task.cancel()

        return agent

    async def body(self, thunk: Thunk, other: Callable[[], Awaitable[Any]]) -> Any:
        scene = self.scene
        try:
            scene.said.append(await self.who(scene, thunk))
            scene.goes_on()
        except (TimeoutError, asyncio.CancelledError):
            scene.goes_on()
            if self.then == "ends":
                raise
            scene.said.append(INTERRUPTED)
        if self.then == "goes on":
            scene.said.append(await other())
            if scene.is_first:
                raise Stopped
        return scene.said


@pytest.mark.parametrize("then", ["ends", "goes on", "finishes"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("who", WHO, ids=lambda who: who.__name__)
@pytest.mark.parametrize("durability", ["process", "full"])
def test_cancelled_a_program_neither_hangs_nor_spins_and_its_replay_goes_the_same_way(
    durability: str, who: Any, moment: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moment == "before its turn":
        monkeypatch.setattr(order, "TURNS_OF_THE_LOOP", 3000)  # it is seen to wait
    scene = Scene(durability)
    program = Program(scene, who, moment, then)
    first = scene.live(program)
    assert scene.is_over, "the moment never came"
    assert scene.went_on_at - scene.cancelled_at <= MOST_TURNS
    said, calls, entries = scene.said, scene.calls, scene.entries
    scene.memory.clock.advance(LONG)  # type: ignore[attr-defined] # whatever retry is due
    second = scene.live(program)
    assert scene.ledger.get_run(RUN).status == "COMPLETED"
    if then == "goes on":
        assert scene.said == said
    if then == "finishes":
        assert second == first
    if then != "ends" or (("outcome", "1") in entries and moment != "before a retry"):
        assert scene.calls == calls


# --- what has changed something must not be done twice ----------------------------------------------------------------

BLOCKED = [(Effect.MUTATE, "dispatch"), (None, "block")]


def posting(scene: Scene, effect: Effect | None, undeclared: str, *, goes_on: bool) -> Callable[[AgentRunLedger], Any]:
    """An agent that is cancelled while it posts something."""

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        ledger._leases.undeclared = undeclared

        @ledger.tool(effect=effect)
        async def post() -> str:
            scene.calls += 1
            try:
                if scene.is_first:
                    scene.loop.call_soon(scene.now)
                    await asyncio.sleep(LONG)
                return "posted"
            finally:
                scene.cleanups += 1

        @ledger.tool()
        async def other() -> str:
            return "other"

        @ledger.agent()
        async def agent() -> Any:
            try:
                return await the_task_that_calls(scene, post)
            except asyncio.CancelledError:
                if not goes_on:
                    raise
            try:
                return await other()
            except StepInDoubt as doubt:
                scene.said.append(doubt.step_number)
                raise

        return agent

    return program


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("effect", "undeclared"), BLOCKED)
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_cancelled_step_that_must_not_be_repeated_stays_in_doubt_and_stops_its_program(
    durability: str, effect: Effect | None, undeclared: str, goes_on: bool
) -> None:
    scene = Scene(durability)
    program = posting(scene, effect, undeclared, goes_on=goes_on)
    first = scene.live(program)
    assert isinstance(first, StepInDoubt if goes_on else asyncio.CancelledError)
    assert scene.said == ([1] if goes_on else [])
    assert scene.entries == [("created", None), ("intent", "1"), ("parked", "1" if goes_on else None)]
    second = scene.live(program)
    assert isinstance(second, StepInDoubt)
    assert scene.calls == 1
    assert scene.ledger.get_run(RUN).status == "BLOCKED"


@pytest.mark.parametrize(
    "moment", ["when the call is made", "while its intent is written", "when its intent is written"]
)
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_call_that_was_cancelled_before_it_was_dispatched_leaves_nothing_in_doubt(
    durability: str, moment: str
) -> None:
    scene = Scene(durability)
    program = Program(scene, from_outside, moment, "goes on", effect=Effect.MUTATE)
    assert isinstance(scene.live(program), Stopped)
    assert scene.said == [INTERRUPTED, "other"]
    scene.live(program)
    assert (scene.said, scene.calls) == ([INTERRUPTED, "other"], 0)


@pytest.mark.parametrize("moment", ["while its outcome is written", "when its outcome is written", "before its turn"])
@pytest.mark.parametrize("durability", ["process", "full"])
def test_an_outcome_that_was_cancelled_on_its_way_is_no_doubt(
    durability: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "TURNS_OF_THE_LOOP", 3000)
    scene = Scene(durability)
    program = Program(scene, from_outside, moment, "goes on", effect=Effect.MUTATE)
    assert isinstance(scene.live(program), Stopped)
    assert scene.said == [INTERRUPTED, "other"]
    scene.live(program)
    assert (scene.said, scene.calls) == ([INTERRUPTED, "other"], 1)


@pytest.mark.parametrize("durability", ["process", "full"])
def test_what_was_interrupted_is_at_replay_an_error_that_whoever_waited_for_a_timeout_catches(durability: str) -> None:
    scene = Scene(durability)
    errors: list[Exception] = []

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool()
        async def wait() -> None:
            if scene.is_first:
                scene.loop.call_soon(scene.now)
                await asyncio.sleep(LONG)

        @ledger.tool()
        async def other() -> str:
            return "other"

        @ledger.agent()
        async def agent() -> Any:
            try:
                await wait_for(scene, wait)
            except TimeoutError as error:
                errors.append(error)
            await other()
            if scene.is_first:
                raise Stopped
            return "done"

        return agent

    scene.live(program)
    assert scene.live(program) == "done"
    live, replayed = errors
    assert type(live) is TimeoutError
    assert isinstance(replayed, StepCancelled)
    assert isinstance(replayed, TimeoutError)


# --- calls that end without a word ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["task", "group", "close", "drop", "key"])
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_call_that_never_began_is_interrupted_too(durability: str, how: str) -> None:
    """Its coroutine is closed or thrown away, and nobody runs any line of it."""
    scene = Scene(durability)

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool()
        async def tool() -> str:
            scene.calls += 1
            scene.cleanups += 1
            return "value"

        @ledger.tool()
        async def other() -> str:
            return "other"

        async def call() -> Any:
            made = tool(step_key="key") if how == "key" else tool()  # type: ignore[call-arg]
            if not scene.is_first:
                return await made
            if how == "close":
                made.close()
            elif how == "drop":
                with pytest.warns(RuntimeWarning, match="never awaited"):
                    del made
            elif how == "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(made)
                    raise TimeoutError
            else:
                task = asyncio.create_task(made)
                task.cancel()
                await task
            return INTERRUPTED

        @ledger.agent()
        async def agent() -> Any:
            try:
                scene.said.append(await call())
            except* (asyncio.CancelledError, TimeoutError):
                scene.said.append(INTERRUPTED)
            scene.said.append(await other())
            if scene.is_first:
                raise Stopped
            return scene.said

        return agent

    scene.live(program)
    assert scene.live(program) == [INTERRUPTED, "other"]
    assert scene.calls == 0


@pytest.mark.parametrize("durability", ["process", "full"])
def test_coroutines_of_a_gather_that_was_cancelled_before_they_began_are_closed(durability: str) -> None:
    scene = Scene(durability)

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool()
        async def tool(number: int) -> int:
            return number

        @ledger.agent()
        async def agent(this: Run) -> Any:
            gathering = asyncio.ensure_future(this.gather(tool(1), tool(2)))
            await asyncio.sleep(0)
            gathering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gathering
            return "done"

        return agent

    assert scene.live(program) == "done"
    gc.collect()
    assert scene.entries == [("created", None), ("missed", "1"), ("missed", "2"), ("finished", None)]


# --- whoever else writes ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def busy_writer(ledger: AgentRunLedger) -> AsyncIterator[None]:
    """The thread that writes has something else to do: what is put into its queue stays there."""
    is_busy, goes_on = threading.Event(), threading.Event()
    writer = asyncio.ensure_future(ledger._asynchronous.in_thread(lambda: (is_busy.set(), goes_on.wait(LONG))))
    while not is_busy.is_set():
        await asyncio.sleep(0)
    yield
    goes_on.set()
    await writer


def test_an_intent_that_still_waits_for_the_writer_is_not_written_any_more() -> None:
    scene = Scene("full")

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool(effect=Effect.MUTATE)
        async def tool() -> str:
            scene.calls += 1
            scene.cleanups += 1
            return "value"

        @ledger.agent()
        async def agent() -> Any:
            await tool()
            if scene.is_first:
                async with busy_writer(ledger):
                    calling = asyncio.create_task(tool())
                    for _ in range(10):
                        await asyncio.sleep(0)
                    calling.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await calling
            else:
                with pytest.raises(StepCancelled):
                    await tool()
            await tool()
            if scene.is_first:
                raise Stopped
            return "done"

        return agent

    scene.live(program)
    assert ("intent", "2") not in scene.entries
    assert scene.live(program) == "done"
    assert scene.calls == 2


def test_an_outcome_is_written_once_although_another_thread_wrote_first_that_it_was_missed() -> None:
    """`run.now()` writes from the loop's thread, past what waits for the writer."""
    scene = Scene("full")

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        returns, ends = asyncio.Event(), asyncio.Event()

        @ledger.tool()
        async def tool() -> str:
            await returns.wait()
            return "value"

        @ledger.tool()
        async def beside() -> str:
            await ends.wait()
            return "beside"

        async def in_a_branch(this: Run) -> str:
            with this.branch("beside"):
                return await beside()  # type: ignore[no-any-return]

        @ledger.agent()
        async def agent(this: Run) -> Any:
            held = ledger._leases.run(RUN)
            other, calling = asyncio.create_task(in_a_branch(this)), asyncio.create_task(tool())
            while len(held.in_flight) < 2:
                await asyncio.sleep(0)
            async with busy_writer(ledger):
                returns.set()
                for _ in range(10):  # its outcome waits for the writer
                    await asyncio.sleep(0)
                calling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await calling
                this.now()
            ends.set()
            return await other

        return agent

    assert scene.live(program) == "beside"
    outcomes = [position for kind, position in scene.entries if kind == "outcome"]
    assert sorted(outcomes, key=str) == ["1", "@beside.1"]


@pytest.mark.parametrize("then", ["ends", "finishes"])
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_call_that_waits_for_the_end_of_the_run_is_cancelled_like_any(durability: str, then: str) -> None:
    """A fatal error ends the run when nothing is in flight any more; until then its call waits."""
    scene = Scene(durability)

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool(fatal=ZeroDivisionError)
        async def fails() -> None:
            raise ZeroDivisionError

        @ledger.tool()
        async def beside() -> None:
            await asyncio.sleep(LONG)

        async def in_a_branch(this: Run) -> None:
            with this.branch("beside"):
                await beside()

        @ledger.agent()
        async def agent(this: Run) -> Any:
            held = ledger._leases.run(RUN)
            other = asyncio.create_task(in_a_branch(this))
            while not held.in_flight:
                await asyncio.sleep(0)
            waiting = asyncio.create_task(scene.as_soon_as(lambda: held.closing))
            try:
                await the_task_that_calls(scene, fails)
            except asyncio.CancelledError:
                if then == "ends":
                    raise
            finally:
                waiting.cancel()
                other.cancel()
            assert not held.closing
            return "done"

        return agent

    result = scene.live(program)
    assert isinstance(result, asyncio.CancelledError) if then == "ends" else result == "done"


# --- whoever is cancelled while a run begins or ends ------------------------------------------------------------------


async def stops() -> None:
    raise Stopped


@pytest.mark.parametrize("verb", ["create", "claim"])
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_run_that_nobody_waits_for_any_more_is_given_back_as_soon_as_it_is_taken(durability: str, verb: str) -> None:
    scene = Scene(durability)
    scene.life = 1
    has_begun, goes_on = threading.Event(), threading.Event()
    if verb == "claim":
        scene.live(lambda ledger: ledger.agent()(stops))
    perform = getattr(scene.memory, verb)

    def hold_up(*arguments: Any) -> Any:
        has_begun.set()
        assert goes_on.wait(LONG)
        return perform(*arguments)

    with AgentRunLedger(scene.store, durability=scene.durability, clock=scene.memory.clock) as ledger:

        @ledger.agent(name="stops")
        async def agent() -> str:
            return "done"

        async def begin() -> Any:
            task = asyncio.ensure_future(ledger.arun(agent, run_id=RUN))
            while not has_begun.is_set():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            goes_on.set()
            setattr(scene.store, verb, perform)
            return await ledger.arun(agent, run_id=RUN)

        setattr(scene.store, verb, hold_up)
        assert run(begin) == "done"
        assert ledger._leases.run(RUN).pins == 0


@pytest.mark.parametrize("durability", ["process", "full"])
def test_calls_that_are_left_behind_end_before_their_run_is_given_back(durability: str) -> None:
    scene = Scene(durability)

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.tool()
        async def tool(number: int) -> None:
            scene.calls += 1
            try:
                await asyncio.sleep(LONG)
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)
                scene.cleanups += 1

        @ledger.agent()
        async def agent(this: Run) -> None:
            async def in_a_branch(number: int) -> None:
                with this.branch(f"branch {number}"):
                    await asyncio.gather(asyncio.create_task(tool(number)))

            tasks = [asyncio.create_task(in_a_branch(number)) for number in range(3)]
            held = ledger._leases.run(RUN)
            while len(held.in_flight) < len(tasks):
                await asyncio.sleep(0)
            _task().cancel()
            await asyncio.sleep(LONG)

        return agent

    assert isinstance(scene.live(program, stays=True), asyncio.CancelledError)
    assert scene.entries[-1] == ("parked", None)


@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_program_that_is_cancelled_while_it_parks_is_parked_nevertheless(durability: str) -> None:
    scene = Scene(durability)

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.agent()
        async def agent() -> None:
            scene.cancel = _task().cancel
            scene.store.before = scene.at("parked", None)
            scene.has_gone_on.set()
            raise Stopped

        return agent

    scene.live(program)
    (parked,) = (row for row in scene.memory.read(RUN) if row.kind == "parked")
    assert b"Stopped" in (parked.payload or b"")


@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_loop_that_shuts_down_leaves_runs_that_can_go_on(durability: str) -> None:
    """`asyncio.run` cancels what its program has left behind."""
    scene = Scene(durability)
    program = posting(scene, Effect.READ, "dispatch", goes_on=False)
    scene.life = 1
    scene.is_over = True  # nobody else cancels
    with AgentRunLedger(scene.store, durability=scene.durability, clock=scene.memory.clock) as ledger:
        agent = program(ledger)
        left: list[asyncio.Task[Any]] = []

        async def leaves() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, CountingLoop)
            scene.loop = loop
            left.append(asyncio.create_task(ledger.arun(agent, run_id=RUN)))
            while not scene.calls:
                await asyncio.sleep(0)

        run(leaves)
        assert left[0].cancelled()
        ledger._asynchronous.close()
        assert scene.entries == [("created", None), ("intent", "1"), ("parked", None)]
        assert (head := scene.memory.head(RUN)) is not None
        assert head.owner is None
    assert scene.live(program) == "posted"
    assert scene.calls == 2


@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["async tool", "plain tool"])
def test_ctrl_c_ends_the_loop_and_leaves_the_step_in_doubt(durability: str, is_plain: bool) -> None:
    scene = Scene(durability)

    async def tool() -> str:
        scene.calls += 1
        if scene.is_first:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(LONG)
        return "value"

    def plain() -> str:
        scene.calls += 1
        if scene.is_first:
            raise KeyboardInterrupt
        return "value"

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        @ledger.agent()
        async def agent(this: Run) -> Any:
            return await this.step("tool", {}, plain if is_plain else tool)

        return agent

    scene.life = 1
    with AgentRunLedger(scene.store, durability=scene.durability, clock=scene.memory.clock) as ledger:
        agent = program(ledger)
        with pytest.raises(KeyboardInterrupt):
            run(lambda: ledger.arun(agent, run_id=RUN))
        ledger._asynchronous.close()
        assert scene.entries == [("created", None), ("intent", "1"), ("parked", None)]
        assert (head := scene.memory.head(RUN)) is not None
        assert head.owner is None
    scene.cleanups = 2
    assert scene.live(program) == "value"
    assert scene.calls == 2
