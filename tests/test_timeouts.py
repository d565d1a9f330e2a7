"""What has its time: async tools are cancelled, threads are left behind and heard of later, a run's deadline begins nothing new."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    RetryPolicy,
    Run,
    StepFailed,
    StepInDoubt,
    current_step,
)
from agent_run_ledger.testing import FakeClock, MemoryStore
from support.loops import CountingLoop, HeldUp, run
from support.processes import child

pytestmark = pytest.mark.filterwarnings("ignore::agent_run_ledger.UndeclaredEffectWarning")

RUN = "run"
SHORT, LONG = 0.01, 1e6
"""Seconds that are over soon, and seconds that never are."""
NOT_READ = [Effect.IDEMPOTENT, None]


class Process:
    """One process on a store: agents are run in it one after the other, and threads that they leave behind live as long as it."""

    def __init__(self, store: Any | None = None, clock: Any | None = None) -> None:
        self.store = HeldUp(MemoryStore(clock=clock)) if store is None else store
        self.ledger = AgentRunLedger(self.store, durability="process", clock=clock)

    def next(self) -> Process:
        """The next process, when this one has ended."""
        self.ledger.close()
        return Process(self.store)

    def run(self, agent: Callable[..., Any], *args: Any, late: Callable[[CountingLoop], None] | None = None) -> Any:
        """Run the agent, or go on with its run; `late` is called in the loop that an async one runs in."""
        if not asyncio.iscoroutinefunction(agent.registered.function):  # type: ignore[attr-defined]
            return self.ledger.run(agent, *args, run_id=RUN)

        async def arun() -> Any:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, CountingLoop)
            if late is not None:
                late(loop)
            return await self.ledger.arun(agent, *args, run_id=RUN)

        return run(arun)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(row.body) for row in self.store.read(RUN)]

    @property
    def outcomes(self) -> list[str]:
        return [body["ok"] for body in self.bodies if body["kind"] == "outcome"]


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.ledger.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a function in a thread waits at until the test lets it on; open at the latest when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def passes(loop: CountingLoop) -> None:
    """A second passes with each turn of this loop."""
    loop.ahead += 1
    loop.call_soon(passes, loop)


# --- async tools ------------------------------------------------------------------------------------------------------


class Slow:
    """An async tool that is never in time in its first attempts, and an agent that calls it."""

    def __init__(self, attempts: int = 1) -> None:
        self.attempts = attempts
        self.calls = self.cleanups = 0
        self.caught: list[BaseException] = []

    async def tool(self) -> str:
        self.calls += 1
        try:
            if self.calls <= self.attempts:
                await asyncio.sleep(LONG)
            return "in time"
        finally:
            self.cleanups += 1

    def agent(self, ledger: AgentRunLedger, *, is_caught: bool = True, **options: Any) -> Callable[..., Any]:
        tool = ledger.tool(timeout=5, **options)(self.tool)

        @ledger.tool()
        async def other() -> str:
            return "other"

        @ledger.agent()
        async def agent() -> Any:
            try:
                return await tool()
            except Exception as error:
                self.caught.append(error)
                if not is_caught:
                    raise
            return await other()

        return agent


def test_an_async_tool_that_is_not_in_time_is_cancelled_once_and_its_failure_is_the_same_at_replay(
    process: Process,
) -> None:
    slow = Slow()
    agent = slow.agent(process.ledger)
    assert process.run(agent, late=passes) == "other"
    (failed,) = (body for body in process.bodies if body.get("ok") == "failed")
    assert failed["ambiguous"] is True
    assert (slow.calls, slow.cleanups) == (1, 1)
    (live,) = slow.caught
    assert isinstance(live, StepFailed)
    assert live.is_a("builtins.TimeoutError")
    assert isinstance(live.__cause__, TimeoutError)
    assert str(live) == "Tool execution failed: TimeoutError: no result within 5 s"
    assert process.ledger.verify().ok


def test_a_program_gets_the_same_timeout_again_when_it_is_replayed(process: Process) -> None:
    slow = Slow()
    stops = [True]

    def program(ledger: AgentRunLedger) -> Callable[..., Any]:
        tool = ledger.tool(timeout=5, raises=TimeoutError)(slow.tool)
        other = ledger.tool(name="other")(Slow(0).tool)

        @ledger.agent()
        async def agent() -> Any:
            try:
                await tool()
            except TimeoutError as error:
                slow.caught.append(error)
            result = await other()
            if stops[0]:
                raise LookupError("stopped")
            return result

        return agent

    with pytest.raises(LookupError, match="stopped"):
        process.run(program(process.ledger), late=passes)
    stops[0] = False
    second = process.next()
    assert second.run(program(second.ledger)) == "in time"
    live, replayed = slow.caught
    assert type(live) is type(replayed) is TimeoutError
    assert str(live) == str(replayed) == "no result within 5 s"
    assert isinstance(replayed.__cause__, StepFailed)
    assert slow.calls == 1
    second.ledger.close()


def test_each_attempt_has_its_own_time(process: Process) -> None:
    slow = Slow(attempts=2)
    agent = slow.agent(process.ledger, retry=RetryPolicy(max_attempts=3, base=0.0))
    assert process.run(agent, late=passes) == "in time"
    assert (slow.calls, slow.cleanups) == (3, 3)
    assert process.outcomes == ["failed", "failed", "completed"]


def test_a_timeout_of_the_tool_itself_is_an_error_like_any(process: Process) -> None:
    own = TimeoutError("my own")

    async def tool() -> None:
        raise own

    slow = Slow()
    slow.tool = tool  # type: ignore[assignment, method-assign]
    with pytest.raises(TimeoutError) as caught:
        process.run(slow.agent(process.ledger, is_caught=False, raises=TimeoutError))
    assert caught.value is own


def test_what_an_async_tool_returns_instead_of_ending_is_its_outcome(process: Process) -> None:
    slow = Slow()

    async def tool() -> str:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            return "nevertheless"
        return ""

    slow.tool = tool  # type: ignore[method-assign]
    assert process.run(slow.agent(process.ledger), late=passes) == "nevertheless"
    assert process.outcomes == ["completed"]


@pytest.mark.parametrize(("effect", "undeclared"), [(Effect.MUTATE, "dispatch"), (None, "block")])
def test_an_async_tool_that_must_not_be_repeated_is_in_doubt_when_its_time_is_up(
    process: Process, effect: Effect | None, undeclared: str
) -> None:
    slow = Slow()
    for late in (passes, None):
        process.ledger._leases.undeclared = undeclared
        with pytest.raises(StepInDoubt):
            process.run(slow.agent(process.ledger, is_caught=False, effect=effect), late=late)
        process = process.next()
    assert slow.calls == 1
    assert process.outcomes == []
    assert process.ledger.get_run(RUN).status == "BLOCKED"
    process.ledger.close()


# --- plain tools: threads ---------------------------------------------------------------------------------------------


class Threaded:
    """A plain tool that waits at a gate in its thread, and a sync or async agent that calls it."""

    def __init__(self, gate: threading.Event, *, is_async: bool) -> None:
        self.gate = gate
        self.is_async = is_async
        self.calls: list[tuple[str, int]] = []
        self.threads: list[threading.Thread] = []

    def tool(self) -> str:
        step = current_step()
        self.calls.append((step.idempotency_key, step.attempt))
        self.threads.append(threading.current_thread())
        if len(self.calls) == 1:
            assert self.gate.wait(60)
        return f"call {len(self.threads)}"

    def agent(self, ledger: AgentRunLedger, *, timeout: float = SHORT, **options: Any) -> Callable[..., Any]:
        ledger._agents.clear()  # a later one of a test has other options
        if self.is_async:

            @ledger.agent(name="agent")
            async def aagent(this: Run) -> Any:
                return await this.step("tool", {}, self.tool, timeout=timeout, **options)

            return aagent

        @ledger.agent(name="agent")
        def agent(this: Run) -> Any:
            return this.step("tool", {}, self.tool, timeout=timeout, **options)

        return agent

    def end(self, process: Process) -> None:
        """The thread that was left behind returns."""
        (work,) = process.ledger._leases.run(RUN).left_running.values()
        self.gate.set()
        assert work.wait(60)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def threaded(request: pytest.FixtureRequest, gate: threading.Event) -> Threaded:
    return Threaded(gate, is_async=request.param)


def test_a_function_without_a_timeout_runs_in_its_callers_thread_and_with_one_in_another(
    process: Process, threaded: Threaded
) -> None:
    threaded.gate.set()
    agent = threaded.agent(process.ledger, timeout=LONG)

    @process.ledger.agent()
    def untimed(this: Run) -> Any:
        return this.step("untimed", {}, threading.current_thread)

    assert process.run(agent) == "call 1"
    assert threaded.threads != [threading.current_thread()]
    assert threaded.calls[0][1] == 1, "it knows its step there"


@pytest.mark.parametrize("effect", [Effect.READ, *NOT_READ])
def test_a_plain_tool_that_is_not_in_time_fails_and_is_left_to_itself(
    process: Process, threaded: Threaded, effect: Effect | None
) -> None:
    with pytest.raises(TimeoutError, match=r"no result within 0\.01 s") as caught:
        process.run(threaded.agent(process.ledger, raises=TimeoutError, effect=effect))
    assert not isinstance(caught.value, StepFailed)
    assert process.bodies[2]["ambiguous"] is True
    assert process.ledger._leases.run(RUN).left_running.keys() == {"1"}
    assert process.store.head(RUN).owner is None
    threaded.end(process)
    assert len(process.bodies) == 4, "nobody writes what it returns before it is asked for"


def test_only_what_has_no_side_effect_is_dispatched_again_beside_the_thread(
    process: Process, threaded: Threaded
) -> None:
    with pytest.raises(StepFailed):
        process.run(threaded.agent(process.ledger, effect=Effect.READ))
    assert process.run(threaded.agent(process.ledger, effect=Effect.READ, timeout=60.0)) == "call 2"
    assert not threaded.gate.is_set()
    assert [attempt for _, attempt in threaded.calls] == [1, 2]


@pytest.mark.parametrize("effect", NOT_READ)
def test_another_is_waited_for_within_its_time_and_then_fails_again(
    process: Process, threaded: Threaded, effect: Effect | None
) -> None:
    agent = threaded.agent(process.ledger, effect=effect)
    for _ in range(3):
        with pytest.raises(StepFailed, match="no result within"):
            process.run(agent)
    assert len(threaded.calls) == 1
    assert process.outcomes == ["failed"]


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_late_return_is_the_outcome_of_the_next_call(
    process: Process, threaded: Threaded, effect: Effect | None
) -> None:
    agent = threaded.agent(process.ledger, effect=effect)
    with pytest.raises(StepFailed):
        process.run(agent)
    threaded.end(process)
    assert process.run(agent) == "call 1"
    assert len(threaded.calls) == 1
    assert process.outcomes == ["failed", "completed"]
    assert process.ledger.verify().ok
    assert process.ledger._leases.run(RUN).left_running == {}


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_call_that_waits_for_the_thread_is_given_what_it_returns(
    process: Process, threaded: Threaded, effect: Effect | None
) -> None:
    with pytest.raises(StepFailed):
        process.run(threaded.agent(process.ledger, effect=effect))
    (work,) = process.ledger._leases.run(RUN).left_running.values()
    opener = threading.Timer(0.05, threaded.gate.set)
    opener.start()
    assert process.run(threaded.agent(process.ledger, effect=effect, timeout=60.0)) == "call 1"
    assert work.is_over
    assert len(threaded.calls) == 1
    opener.join()


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_retry_waits_for_the_threads_end_and_takes_what_it_returns(
    process: Process, threaded: Threaded, effect: Effect | None
) -> None:
    opener = threading.Timer(0.1, threaded.gate.set)
    opener.start()
    agent = threaded.agent(process.ledger, effect=effect, retry=RetryPolicy(max_attempts=3, base=0.0))
    assert process.run(agent) == "call 1"
    opener.join()
    assert len(threaded.calls) == 1
    assert process.outcomes == ["failed", "completed"]


def test_a_retry_of_what_has_no_side_effect_does_not_wait_for_the_thread(process: Process, threaded: Threaded) -> None:
    retry = RetryPolicy(max_attempts=9, base=0.0)  # a busy machine may keep one of them from being in time
    agent = threaded.agent(process.ledger, effect=Effect.READ, timeout=0.2, retry=retry)
    assert process.run(agent) in [f"call {number}" for number in range(2, 10)]
    assert not threaded.gate.is_set()


@pytest.mark.parametrize(("effect", "undeclared"), [(Effect.MUTATE, "dispatch"), (None, "block")])
def test_what_must_not_be_repeated_is_in_doubt_until_its_thread_returns(
    process: Process, threaded: Threaded, effect: Effect | None, undeclared: str
) -> None:
    process.ledger._leases.undeclared = undeclared
    agent = threaded.agent(process.ledger, effect=effect)
    for _ in range(2):
        with pytest.raises(StepInDoubt):
            process.run(agent)
        assert process.ledger.get_run(RUN).status == "BLOCKED"
        assert process.store.head(RUN).owner is None
    threaded.end(process)
    assert process.run(agent) == "call 1"
    assert len(threaded.calls) == 1
    assert process.outcomes == ["completed"]
    assert process.ledger.verify().ok


def test_a_thread_that_fails_late_leaves_its_step_to_the_next_attempt(process: Process, threaded: Threaded) -> None:
    fails = threaded.tool

    def tool() -> str:
        if fails() == "call 1":
            raise OSError("late")
        return "second"

    threaded.tool = tool  # type: ignore[method-assign]
    with pytest.raises(StepFailed):
        process.run(threaded.agent(process.ledger, effect=Effect.IDEMPOTENT))
    threaded.end(process)
    assert process.run(threaded.agent(process.ledger, effect=Effect.IDEMPOTENT, timeout=60.0)) == "second"
    assert [attempt for _, attempt in threaded.calls] == [1, 2]
    assert len({key for key, _ in threaded.calls}) == 1


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_thread_whose_caller_was_cancelled_is_not_doubled_either(
    process: Process, gate: threading.Event, effect: Effect | None
) -> None:
    threaded = Threaded(gate, is_async=True)
    agent = threaded.agent(process.ledger, effect=effect, timeout=0.2)

    def cancel(loop: CountingLoop) -> None:
        task = asyncio.current_task()
        assert task is not None

        def as_soon_as_it_runs() -> None:
            if threaded.calls:
                task.cancel()
            else:
                loop.call_soon(as_soon_as_it_runs)

        as_soon_as_it_runs()

    with pytest.raises(asyncio.CancelledError):
        process.run(agent, late=cancel)
    with pytest.raises((StepInDoubt, StepFailed)):
        process.run(agent)
    assert len(threaded.calls) == 1, "it was dispatched beside its own thread"
    threaded.end(process)
    assert process.run(agent) == "call 1"
    assert len(threaded.calls) == 1


LEFT_BEHIND = """
import threading
from agent_run_ledger import *
ledger = AgentRunLedger(arguments[0])
is_async = arguments[1] == "async"

@ledger.agent()
def plain(this: Run):
    this.step("forever", {}, threading.Event().wait, timeout=0.01)

@ledger.agent()
async def awaited(this: Run):
    await this.step("forever", {}, threading.Event().wait, timeout=0.01)

try:
    ledger.run(awaited if is_async else plain, run_id="run")
except StepFailed as error:
    tell(str(error))
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_thread_that_never_ends_does_not_keep_the_interpreter_from_exiting(tmp_path: Any, kind: str) -> None:
    with child(LEFT_BEHIND, tmp_path / "ledger.db", kind) as process:
        assert process.hear() == "Tool execution failed: TimeoutError: no result within 0.01 s"
        assert process.ends() == 0


# --- the run's deadline -----------------------------------------------------------------------------------------------


def deadline(clock: FakeClock, seconds: float) -> Budget:
    return Budget(deadline=datetime.fromtimestamp(clock.now() + seconds, UTC))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_deadline_interrupts_nothing_and_begins_nothing_new(is_async: bool) -> None:
    clock = FakeClock()
    process = Process(clock=clock)
    calls: list[str] = []

    def work() -> str:
        calls.append("work")
        clock.advance(20)
        return "done"

    if is_async:

        @process.ledger.agent(name="agent", budget=deadline(clock, 10))
        async def agent(this: Run) -> Any:
            assert await this.step("work", {}, work) == "done"
            await this.step("work", {}, work)

    else:

        @process.ledger.agent(name="agent", budget=deadline(clock, 10))
        def agent(this: Run) -> Any:  # type: ignore[misc]
            assert this.step("work", {}, work) == "done"
            this.step("work", {}, work)

    with pytest.raises(BudgetExceededException):
        process.run(agent)
    assert calls == ["work"]
    assert process.outcomes == ["completed"]
    assert process.ledger.get_run(RUN).status == "DEAD_LETTER"
    assert process.store.head(RUN).owner is None
    process.ledger.close()


def test_what_is_in_flight_at_the_deadline_is_recorded_before_the_run_ends() -> None:
    clock = FakeClock()
    process = Process(clock=clock)
    said: list[Any] = []

    @process.ledger.agent(budget=deadline(clock, 10))
    async def agent(this: Run) -> Any:
        ends = asyncio.Event()

        async def slow() -> str:
            await ends.wait()
            return "slow"

        async def late() -> None:
            await asyncio.sleep(0)
            clock.advance(20)
            asyncio.get_running_loop().call_later(SHORT, ends.set)
            await this.step("late", {}, lambda: said.append("late was called"))

        async def beside() -> None:
            said.append(await this.step("slow", {}, slow))

        await this.gather(beside, late)

    with pytest.raises(BudgetExceededException):
        process.run(agent)
    assert said == ["slow"]
    assert process.outcomes == ["completed"]
    assert process.ledger.get_run(RUN).status == "DEAD_LETTER"
    process.ledger.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_retry_is_not_made_after_the_deadline(is_async: bool) -> None:
    clock = FakeClock()
    process = Process(clock=clock)
    calls: list[str] = []

    def fails() -> None:
        calls.append("fails")
        clock.advance(20)
        raise ConnectionRefusedError

    retry = RetryPolicy(max_attempts=5, base=1.0)
    if is_async:

        @process.ledger.agent(name="agent", budget=deadline(clock, 10))
        async def agent(this: Run) -> Any:
            await this.step("fails", {}, fails, retry=retry)

    else:

        @process.ledger.agent(name="agent", budget=deadline(clock, 10))
        def agent(this: Run) -> Any:  # type: ignore[misc]
            this.step("fails", {}, fails, retry=retry)

    with pytest.raises(BudgetExceededException):
        process.run(agent)
    assert calls == ["fails"]
    assert process.ledger.get_run(RUN).status == "DEAD_LETTER"
    process.ledger.close()
