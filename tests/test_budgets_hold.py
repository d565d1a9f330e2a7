"""Whatever a program asks for and whenever it is stopped, what it has spent and what it has reserved never pass its budget."""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Budget,
    BudgetExceededException,
    CallBlocked,
    Effect,
    LoopDetectorPolicy,
    RetryPolicy,
    RunawayLoopDetectedException,
    RunClosed,
    StepFailed,
    Usage,
    current_run,
    current_step,
)
from agent_run_ledger import run as run_module
from agent_run_ledger.drivers import asynchronous, sync
from agent_run_ledger.rules.budget import ENTRIES_PER_STEP, Amount
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from support.explorer import RUN, World
from support.explorer_async import AsyncLife
from support.spending import PRICES, RATE, judge
from support.stage import Stage, Staged, ThreadedLife, ThreadedWorld

LIMIT = Budget(tokens=1000, usd=Decimal("0.0024"))
ENDS = (BudgetExceededException, AttemptsExhausted, RunawayLoopDetectedException, RunClosed)


@pytest.fixture(autouse=True)
def _undeclared_steps_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- what programs do -------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a model: what it declares, what it really uses, and how that is told. 0 at the most: a call that costs nothing."""

    most: int
    used: int
    how: str
    effect: Effect | None = None
    retries: bool = False

    @property
    def is_told(self) -> bool:
        """Whether its usage is known where its attempt has an outcome."""
        return self.how in ("answers", "records", "records and fails")

    @property
    def is_made(self) -> bool:
        return self.how != "is refused"

    @property
    def charged(self) -> int:
        """The tokens that one attempt with an outcome costs."""
        return self.used if self.is_told else self.most if self.is_made else 0


HOWS = ("answers", "records", "says nothing", "fails", "records and fails", "is refused")


@st.composite
def calls(draw: st.DrawFn) -> Call:
    most = draw(st.integers(1, 400))
    effect = draw(st.sampled_from([None, Effect.READ, Effect.IDEMPOTENT]))
    return Call(most, draw(st.integers(0, most)), draw(st.sampled_from(HOWS)), effect, draw(st.booleans()))


FREE = Call(0, 0, "answers")

programs = st.lists(
    st.one_of(st.just(FREE), calls(), st.lists(st.lists(calls(), min_size=1, max_size=3), min_size=2, max_size=4)),
    min_size=1,
    max_size=5,
)
"""A program is a row of calls, and of branches side by side, each of which is a row of calls."""


class Outside:
    """What models were really asked to use, whoever died meanwhile."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def ask(self, call: Call) -> Any:
        """Make the call: its function."""
        if not call.is_made:
            raise ConnectionRefusedError("nobody is there")
        self.used.append(call.used)
        usage = Usage(input_tokens=call.used // 2, output_tokens=call.used - call.used // 2)
        if call.how.startswith("records"):
            current_step().record_usage(usage, model="m")
        if call.how.endswith("fails"):
            raise ValueError("it makes no sense")
        if call.how == "answers":
            given, said = usage.input_tokens, usage.output_tokens
            return {"model": "m", "usage": {"prompt_tokens": given, "completion_tokens": said}}
        return "done"

    @property
    def tokens(self) -> int:
        return sum(self.used)


def step(outside: Outside, call: Call, number: int, alive: Callable[[], object]) -> Any:
    """Make the call as a step of the run that the calling code is in; in an async program that is awaited."""
    run = current_run()

    def ask() -> Any:
        alive()
        return outside.ask(call)

    async def aask() -> Any:
        await asyncio.sleep(0)  # the others of its loop are at it meanwhile
        return ask()

    if not call.most:
        return run.step("look", {"number": number}, lambda: None, effect=Effect.READ, may_repeat=True)
    options: dict[str, Any] = {"effect": call.effect} if call.effect else {}
    if call.retries:
        options["retry"] = RetryPolicy(max_attempts=3, base=0.01, cap=0.01)
    return run.step(
        "ask", {"number": number}, aask if run.is_async else ask, kind="model", max_tokens=call.most, max_usd=RATE * call.most,
        may_repeat=True, **options,
    )  # fmt: skip


def play(outside: Outside, program: list[Any], alive: Callable[[], object]) -> None:
    """Make all calls of a program, in the order that it says. A failure ends nothing."""

    def row(calls: list[Call], number: int) -> None:
        for call in calls:
            with contextlib.suppress(StepFailed):
                step(outside, call, number, alive)

    for number, part in enumerate(program):
        if isinstance(part, Call):
            row([part], number)
        else:
            current_run().gather(*[partial(row, calls, number) for calls in part])


async def aplay(outside: Outside, program: list[Any], alive: Callable[[], object]) -> None:
    """The same in an event loop."""

    async def row(calls: list[Call], number: int) -> None:
        for call in calls:
            with contextlib.suppress(StepFailed):
                await step(outside, call, number, alive)

    for number, part in enumerate(program):
        if isinstance(part, Call):
            await row([part], number)
        else:
            await current_run().gather(*[partial(row, calls, number) for calls in part])


# --- any program, stopped anywhere ------------------------------------------------------------------------------------


class InThreads:
    """Programs whose branches are threads. They change at every effect."""

    def world(self) -> World:
        return ThreadedWorld(None, OPTIONS)

    def live(self, world: World, outside: Outside, program: list[Any], die_at: int | None) -> int:
        """One life of the program. Returns how many ticks it had."""
        with pytest.MonkeyPatch.context() as patch, world.life(die_at, kind=ThreadedLife) as life:
            for module in (run_module, sync):
                patch.setattr(module, "Work", partial(Staged, life.stage))
            agent = life.ledger.agent(name="agent")(
                lambda: play(outside, program, lambda: life.tick("before the call"))
            )
            with contextlib.suppress(*ENDS):
                life.ledger.run(agent, run_id=RUN)
        return len(life.ticks)


class InALoop:
    """Programs whose branches are tasks of an event loop."""

    def world(self) -> World:
        return World(None, OPTIONS)

    def live(self, world: World, outside: Outside, program: list[Any], die_at: int | None) -> int:
        """One life of the program. Returns how many ticks it had."""
        with pytest.MonkeyPatch.context() as patch, world.life(die_at, kind=AsyncLife) as life:
            patch.setattr(asynchronous, "Work", partial(Staged, Stage(FakeClock())))  # over before the loop goes on

            async def agent() -> None:
                await aplay(outside, program, lambda: life.tick("before the call"))

            with contextlib.suppress(*ENDS):
                life.play(lambda: life.arun(agent))
        return len(life.ticks)


OPTIONS: dict[str, Any] = {"budget": LIMIT, "prices": PRICES, "durability": "process"}
WAYS = pytest.mark.parametrize("way", [InThreads(), InALoop()], ids=["threads", "tasks"])


@WAYS
@given(program=programs, stops=st.lists(st.floats(0, 1), max_size=4))
def test_no_program_passes_its_budget_wherever_it_is_stopped(
    way: InThreads | InALoop, program: list[Any], stops: list[float]
) -> None:
    ticks = way.live(way.world(), Outside(), program, None)
    world, outside = way.world(), Outside()
    for stop in stops:
        way.live(world, outside, program, 1 + int(stop * (ticks - 1)))
        look(world, outside)
    way.live(world, outside, program, None)
    look(world, outside, is_last=True)


def look(world: World, outside: Outside, *, is_last: bool = False) -> None:
    with world.life() as reader:
        if RUN not in reader.runs():
            return
        committed = judge(reader.store.read(RUN), LIMIT, outside.tokens)
        run = reader.ledger.get_run(RUN)
        assert reader.ledger.verify().findings == []
        if is_last:
            assert run.status in ("COMPLETED", "DEAD_LETTER")
            assert run.status == "DEAD_LETTER" or (run.spent_tokens, run.spent_usd) == committed, (
                "something is reserved"
            )


@given(program=st.lists(calls(), min_size=1, max_size=30))
@settings(max_examples=50)
def test_the_sum_of_what_is_charged_is_exact(program: list[Call]) -> None:
    outside = Outside()
    with ledger_of(budget=None) as ledger:
        ledger.run(
            ledger.agent(name="agent")(
                lambda: play(outside, [call._replace(retries=False) for call in program], lambda: None)
            ),
            run_id=RUN,
        )
        run = ledger.get_run(RUN)
    told = sum(call.charged for call in program if call.is_told)
    assert (run.spent_tokens, run.spent_usd) == (told, RATE * told)  # without a budget nothing is reserved


def ledger_of(**options: Any) -> AgentRunLedger:
    clock = FakeClock()
    return AgentRunLedger(
        MemoryStore(clock=clock), clock=clock, prices=PRICES, durability="process", **({"max_steps": 100} | options)
    )


@WAYS
@given(
    program=st.lists(
        st.just(FREE) | st.builds(Call, st.integers(1, 400), st.integers(0, 900), st.just("answers")),
        min_size=1,
        max_size=12,
    ),
    branches=st.integers(1, 4),
)
def test_an_overrun_is_said_and_once_it_passes_the_budget_nothing_more_is_dispatched(
    way: InThreads | InALoop, program: list[Call], branches: int
) -> None:
    """Calls that keep to no maximum, in branches side by side: those that are under way come to their end, no other begins."""
    world, outside = way.world(), Outside()
    way.live(world, outside, [[program] * branches], None)
    with world.life() as reader:
        committed = judge(reader.store.read(RUN), LIMIT, outside.tokens, keeps=False)
        assert reader.ledger.verify().findings == []
    assert committed == Amount(outside.tokens, RATE * outside.tokens)


# --- every run ends ---------------------------------------------------------------------------------------------------


class Tireless:
    """An agent that never stops: whatever it hears, it does the next thing at random."""

    def __init__(self, seed: int, doings: list[str]) -> None:
        self.draw, self.doings = random.Random(seed), doings

    def __call__(self) -> None:
        while True:
            with contextlib.suppress(StepFailed, CallBlocked):
                getattr(self, self.draw.choice(self.doings))()

    def step(self, fn: Any, **options: Any) -> None:
        arguments = {"at": self.draw.randrange(10**9)} if self.draw.random() < 0.5 else {}
        current_run().step(self.draw.choice("abc"), arguments, fn, **options)

    def work(self) -> None:
        self.step(lambda: self.draw.random())

    def repeat(self) -> None:
        current_run().step("same", {}, lambda: "same", may_repeat=self.draw.random() < 0.5)

    def fail(self) -> None:
        self.step(raising(ValueError("no")))

    def retry(self) -> None:
        policy = RetryPolicy(max_attempts=10_000, base=0.01, cap=0.01)
        self.step(raising(ConnectionRefusedError("no")), effect=Effect.READ, retry=policy)

    def values(self) -> None:
        current_run().now()
        current_run().random()

    def branches(self) -> None:
        current_run().map(lambda item: self.work(), [1, 2, 3], concurrency=1)

    def sleep(self) -> None:
        current_run().sleep(1.0)


def raising(error: Exception) -> Any:
    def function() -> Any:
        raise error

    return function


DOINGS = ["work", "repeat", "fail", "retry", "values", "branches", "sleep"]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    doings=st.lists(st.sampled_from(DOINGS), min_size=1, unique=True),
    steps=st.integers(1, 5),
    reaction=st.sampled_from(["notice", "block", "halt"]),
)
def test_every_run_ends(seed: int, doings: list[str], steps: int, reaction: str) -> None:
    """Within 20 entries for each step of its budget, one more where it waits, and the few that end it."""
    policy = LoopDetectorPolicy(reactions={"suspected": reaction, "certain": reaction})
    with ledger_of(budget=Budget(steps=steps), policy=policy) as ledger:
        agent = ledger.agent(name="agent")(Tireless(seed, doings))
        with pytest.raises(ENDS):
            ledger.run(agent, run_id=RUN)
        run, entries = ledger.get_run(RUN), len(ledger._store.read(RUN))
    assert run.status in ("DEAD_LETTER", "QUARANTINE")
    assert run.total_steps <= steps
    assert entries <= (ENTRIES_PER_STEP + 1) * steps + 4


def test_a_step_that_is_retried_without_end_ends_its_run() -> None:
    policy = RetryPolicy(max_attempts=10_000, base=0.01, cap=0.01)
    ledger = ledger_of(budget=Budget(steps=2))
    ledger.create_run("try", RUN)
    with ledger, pytest.raises(BudgetExceededException, match="20 times its budget of 2 steps"):
        ledger.execute_step(RUN, "ask", {}, raising(ConnectionRefusedError("no")), retry=policy)


def test_a_step_that_begins_together_with_one_that_is_refused_has_its_outcome_before_the_run_ends() -> None:
    """Both are decided for one append: what the first of them dispatches is under way when the second would end the run."""

    async def look(number: int) -> int:
        await asyncio.sleep(0)
        return number

    heard: list[Any] = []

    async def program() -> None:
        calls = (current_run().step("look", {"number": at}, look) for at in (1, 2))
        heard.extend(await asyncio.gather(*calls, return_exceptions=True))

    with ledger_of(max_steps=1) as ledger:
        with pytest.raises(RunClosed):  # the program goes on behind the refusal, to its end
            asyncio.run(ledger.arun(ledger.agent(name="agent")(program), run_id=RUN))
        assert [type(each) for each in heard] == [int, BudgetExceededException]
        assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED"]
        assert ledger.get_run(RUN).status == "DEAD_LETTER"
        assert ledger.verify().findings == []
