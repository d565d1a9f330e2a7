"""Async programs stopped at every yield, in process: whatever was under way side by side, the next process goes on with it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import re
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from agent_run_ledger import (
    BudgetExceededException,
    Effect,
    IllegalTransition,
    ReplayStalledWarning,
    RetryPolicy,
    RunawayLoopException,
    RunClosed,
    Step,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    StoreFull,
    current_run,
)
from agent_run_ledger.drivers import asynchronous, leases
from agent_run_ledger.testing import FakeClock
from support.explorer import RUN, World, judge
from support.explorer_async import AsyncLife
from support.stage import Stage, Staged

Flow = Callable[[AsyncLife], Coroutine[Any, Any, Any]]


class Explored(NamedTuple):
    """A flow: its program, the options of its ledger, and what else than the undisturbed result may come out."""

    program: Flow
    options: dict[str, Any]
    also: Sequence[Any]


FLOWS: dict[str, Explored] = {}


def flow(name: str | None = None, also: Sequence[Any] = (), **options: Any) -> Callable[[Flow], Flow]:
    """An async program to be stopped at every tick. What it returns must come out the same, or one of `also`."""

    def register(program: Flow) -> Flow:
        FLOWS[name or program.__name__] = Explored(program, options, also)
        return program

    return register


def is_blocked(life: AsyncLife) -> bool:
    """Whether the run stands, as far as there was room to say so."""
    return life.full_at is not None or life.ledger.get_run(RUN).status == "BLOCKED"


async def beside(name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Await a call in a branch of its own."""
    with current_run().branch(name):
        return await call()


# --- the flows --------------------------------------------------------------------------------------------------------


@flow()
async def tools_side_by_side_in_one_branch(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 4 - given, effect=Effect.READ)
    note = life.atool("note", effect=Effect.IDEMPOTENT)

    async def program() -> Any:
        return await note(await asyncio.gather(look(1), look(2), look(3)))

    return await life.arun(program)


@flow()
async def named_branches_as_tasks(life: AsyncLife) -> Any:
    look = life.atool("look", turns=len, effect=Effect.READ)
    note = life.atool("note")

    async def line(name: str) -> Any:
        with current_run().branch(name):
            return await note(await look(name))

    async def program() -> Any:
        async with asyncio.TaskGroup() as tasks:
            lines = [tasks.create_task(line(name)) for name in ("first", "second one")]
        return await note([line.result() for line in lines])

    return await life.arun(program)


@flow()
async def answers_as_they_come(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 5 * given, effect=Effect.READ)
    note = life.atool("note", effect=Effect.IDEMPOTENT)

    async def program() -> Any:
        noted = []
        looks = [
            asyncio.create_task(look(given)) for given in (3, 1, 2)
        ]  # `as_completed` starts coroutines in any order
        for answer in asyncio.as_completed(looks):
            life.hears(came := await answer)
            noted.append(await note(came))
        return noted

    return await life.arun(program)


@flow()
async def a_failure_in_one_of_many_branches(life: AsyncLife) -> Any:
    def breaks(given: Any, n: int) -> Any:
        if given == 2:
            raise LookupError("there is no 2")
        return given

    look = life.atool("look", breaks, turns=lambda given: 6 - given, effect=Effect.READ, raises=(LookupError,))
    note = life.atool("note")

    async def program() -> Any:
        run = current_run()
        told = []
        for work in (
            run.map(look, [1, 2, 3]),
            run.gather(lambda: look(4), lambda: look(2)),
            run.map(look, [5, 2, 6], 1),
        ):
            try:
                told.append(await work)
            except LookupError as error:
                told.append(str(error))
            told.append(await note(len(told)))
        return told

    return await life.arun(program)


@flow()
async def a_task_group_that_a_failure_ends(life: AsyncLife) -> Any:
    def breaks(given: Any, n: int) -> Any:
        raise LookupError("not there")

    look = life.atool("look", turns=12, effect=Effect.READ)
    ask = life.atool("ask", breaks, turns=2)
    note = life.atool("note")

    async def program() -> Any:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(beside("slow", lambda: look(1)))
                tasks.create_task(beside("broken", lambda: ask(2)))
        except* StepFailed as failed:
            told = [str(error) for error in failed.exceptions]
        return await note(told)

    return await life.arun(program)


@flow()
async def a_race_whose_loser_is_cancelled(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 10 * given, effect=Effect.READ)
    note = life.atool("note")

    async def program() -> Any:
        runners = [asyncio.create_task(look(given)) for given in (3, 1, 2)]
        done, losers = await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED)
        for loser in losers:
            loser.cancel()
        await asyncio.gather(*losers, return_exceptions=True)
        won = [each.result() for each in done]
        noted = await note(won)
        life.hears(won)
        return [noted, await look(4)]

    return await life.arun(program)


async def _cancelled_after(life: AsyncLife, turns: int, effect: Effect) -> Any:
    look = life.atool("look", turns=6, effect=effect)
    other = life.atool("other", turns=9, effect=Effect.READ)
    note = life.atool("note", effect=Effect.READ)

    async def program() -> Any:
        beyond = asyncio.create_task(beside("beyond", lambda: other(1)))
        call = asyncio.create_task(look(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        try:
            got = await call
        except (asyncio.CancelledError, StepCancelled):
            got = "cancelled"
        noted = await note(got)
        life.hears(noted)
        return [noted, await note("and on"), await beyond]

    try:
        return await life.arun(program)
    except StepInDoubt:
        assert is_blocked(life)
        return "in doubt"


def _came_out(got: Any) -> Any:
    return [["note", got], ["note", "and on"], ["other", 1]]


for turns in range(1, 41, 3):
    either = [_came_out("cancelled"), _came_out(["look", 1])]
    flow(f"cancelled_after_{turns}_turns", also=either)(
        lambda life, turns=turns: _cancelled_after(life, turns, Effect.READ)  # type: ignore[misc]
    )
    flow(f"a_mutating_call_cancelled_after_{turns}_turns", also=[*either, "in doubt"])(
        lambda life, turns=turns: _cancelled_after(life, turns, Effect.MUTATE)  # type: ignore[misc]
    )


@flow(also=[["in time", 1, "late", ["note", 2]]])
async def calls_that_run_out_of_time(life: AsyncLife) -> Any:
    async def takes_long(given: Any) -> Any:
        await asyncio.sleep(given)
        return given

    look = life.atool("look", lambda given, n: takes_long(given), kind="model")
    timed = life.atool("timed", lambda given, n: takes_long(given), kind="model", timeout=5.0)
    note = life.atool("note")

    async def program() -> Any:
        told: list[Any] = []
        for seconds in (1, 60):
            try:
                told += ["in time", await asyncio.wait_for(look(seconds), 10)]
            except TimeoutError:
                told += ["late"]
        told.append(await note(len(told)))
        for seconds in (1, 60):
            try:
                told += ["in time", await timed(seconds)]
            except StepFailed as error:
                told += [error.original_type]
        async with asyncio.timeout(10):
            told.append(await note(len(told)))
        return told

    return await life.arun(program)


@flow()
async def retries_that_wait_while_another_branch_works(life: AsyncLife) -> Any:
    def third_time_lucky(given: Any, n: int) -> Any:
        if n < 3:
            raise ConnectionError("try later")
        return "there"

    patient = RetryPolicy(max_attempts=6, base=100, cap=1000)
    ask = life.atool("ask", third_time_lucky, effect=Effect.READ, retry=patient)
    look = life.atool("look", turns=4, effect=Effect.READ)

    async def program() -> Any:
        async def works() -> Any:
            return [await look(given) for given in range(3)]

        asked, looked = await asyncio.gather(beside("patient", lambda: ask(1)), beside("busy", works))
        return [asked, looked, await look(9)]

    return await life.arun(program)


@flow()
async def calls_that_have_keys(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 4 - given, effect=Effect.READ)
    note = life.atool("note")

    async def program() -> Any:
        first = await asyncio.gather(*[look(given, step_key=f"call.{given}") for given in (1, 2, 3)])
        return [first, await note(first), await look(2, step_key="call.2")]

    return await life.arun(program)


@flow()
async def agents_inside_an_agent(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 3 * given, effect=Effect.READ)
    note = life.atool("note")

    async def child(number: int) -> Any:
        return [await look(number), await note(number)]

    child = life.agent(child)

    async def program() -> Any:
        first = await child(3)
        others = await current_run().map(child, [2, 1])
        return await note([first, others])

    return await life.arun(program)


@flow()
async def a_child_that_fails_beside_one_that_does_not(life: AsyncLife) -> Any:
    def down_at_first(given: Any, n: int) -> Any:
        if given == 2 and n == 1:
            raise OSError("the server is down")
        return given

    look = life.atool("look", down_at_first, turns=2, effect=Effect.READ)
    note = life.atool("note")

    async def child(number: int) -> Any:
        return await note(await look(number))

    child = life.agent(child)

    async def program() -> Any:
        return await note(await current_run().map(child, [1, 2]))

    for _ in range(4):
        try:
            return await life.arun(program)
        except StepFailed:
            assert is_blocked(life)
    raise AssertionError("it fails for ever")


@flow(also=["in doubt"])
async def a_step_in_doubt_while_other_branches_go_on(life: AsyncLife) -> Any:
    pay = life.atool("pay", turns=4, effect=Effect.MUTATE)
    look = life.atool("look", effect=Effect.READ)

    async def program() -> Any:
        payment = asyncio.create_task(beside("payment", lambda: pay(1)))
        looked = [await look(given) for given in range(3)]
        return [looked, await payment]

    try:
        return await life.arun(program)
    except StepInDoubt:
        assert is_blocked(life)
        states = {step.tool_name: step.state for step in life.ledger.steps(RUN)}
        assert states["pay"] == "BLOCKED"
        assert states.get("look") in (
            None,
            "COMPLETED",
            "RUNNING",
        )  # what only reads is left to a program that may begin
        return "in doubt"


@flow()
async def mutations_side_by_side_whose_receivers_can_be_asked(life: AsyncLife) -> Any:
    receipt = life.areceipt("pay once", unknown=1)

    def is_cut_off(given: Any, n: int) -> Any:
        if given == 1:
            raise ConnectionResetError("connection reset by peer")
        return ["pay once", given]

    patient = RetryPolicy(6, base=100, cap=1000)
    pay = life.atool("pay once", is_cut_off, turns=3, effect=Effect.MUTATE, receipt=receipt, retry=patient)
    look = life.atool("look", turns=4, effect=Effect.READ)

    async def program() -> Any:
        return await current_run().gather(lambda: pay(1), lambda: look(2), lambda: pay(3))

    return await life.arun(program)


async def _made_again(life: AsyncLife, **options: Any) -> Any:
    """A call that its program gives up while it is under way, and makes again; nobody outside may see two of it."""
    pay = life.atool("pay once", turns=lambda given: 500 if len(life.world.calls) == 1 else 2, **options)
    note = life.atool("note", effect=Effect.READ)

    async def program() -> Any:
        call = asyncio.create_task(pay(1))
        for _ in range(60):
            await asyncio.sleep(0)
        call.cancel()
        try:
            paid = await call
        except (asyncio.CancelledError, StepCancelled):
            paid = await pay(1)
        return await note(paid)

    return await life.arun(program)


@flow()
async def an_idempotent_call_that_is_given_up_and_made_again(life: AsyncLife) -> Any:
    return await _made_again(life, effect=Effect.IDEMPOTENT)


@flow()
async def a_mutation_that_is_given_up_and_made_again(life: AsyncLife) -> Any:
    return await _made_again(life, effect=Effect.MUTATE, receipt=life.areceipt("pay once"))


@flow()
async def a_call_made_again_after_it_was_too_slow(life: AsyncLife) -> Any:
    async def is_late_at_first(given: Any, n: int) -> Any:
        await asyncio.sleep(60 if n == 1 else 1)
        return ["paid", given]

    pay = life.atool("pay once", lambda given, n: is_late_at_first(given, n), effect=Effect.IDEMPOTENT, timeout=10)
    note = life.atool("note", effect=Effect.READ)

    async def program() -> Any:
        paid = None
        for _ in range(3):
            try:
                paid = await pay(1)
                break
            except StepFailed as error:
                await note(error.original_type)
        return await note(paid)

    return await life.arun(program)


@flow(also=["in doubt"])
async def a_call_made_while_one_is_cancelled_that_must_not_be_repeated(life: AsyncLife) -> Any:
    pay = life.atool("pay", turns=100, effect=Effect.MUTATE)
    look = life.atool("look", turns=2, effect=Effect.READ)
    looked: list[Any] = []

    async def program() -> Any:
        payment = asyncio.create_task(pay(1))
        for _ in range(20):
            await asyncio.sleep(0)
        if payment.done() and isinstance(payment.exception(), StoreFull):
            await payment
        beyond = asyncio.create_task(look(2))
        await asyncio.sleep(0)
        payment.cancel()
        looked.append(await beyond)  # it was made before, so it goes on
        with suppress(asyncio.CancelledError, StepInDoubt):
            await payment
        return await look(3)

    with pytest.raises(StepInDoubt) as told:
        await life.arun(program)
    assert is_blocked(life)
    assert told.value.tool_name == "pay"
    return looked or "in doubt"


async def _refused(life: AsyncLife, program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What is left of a run that is ended while a call is under way in another branch: that one comes to its end first."""
    slow = life.atool("slow", turns=80, effect=Effect.READ)

    async def with_another_branch() -> Any:
        other = asyncio.create_task(beside("other", lambda: slow(1)))
        try:
            return await program()
        finally:
            with suppress(RunClosed):
                await other

    with suppress(RunawayLoopException, BudgetExceededException, RunClosed, StepFailed):
        await life.arun(with_another_branch)
    run = life.ledger.get_run(RUN)
    cause = re.sub(r"step \d+", "a step", run.cause or "")  # which of the two is begun first is nobody's promise
    return run.status, cause, sorted((step.tool_name, step.state) for step in life.ledger.steps(RUN))


@flow(loop_threshold=3)
async def a_loop_refused_while_another_branch_works(life: AsyncLife) -> Any:
    poll = life.atool("poll", lambda given, n: "no news", effect=Effect.READ)

    async def program() -> Any:
        return [
            await poll(1) for _ in range(8)
        ]  # another branch's outcome breaks a row, so there may have to be a second

    status, cause, _ = await _refused(life, program)
    return status, cause.partition(":")[0]


@flow(max_steps=3)
async def a_budget_spent_while_another_branch_works(life: AsyncLife) -> Any:
    look = life.atool("look", effect=Effect.READ)

    async def program() -> Any:
        return [await look(given) for given in range(4)]

    return await _refused(life, program)


@flow()
async def a_fatal_error_while_another_branch_works(life: AsyncLife) -> Any:
    def breaks(given: Any, n: int) -> Any:
        raise LookupError("the account is closed")

    ask = life.atool("ask", breaks, effect=Effect.READ, fatal=(LookupError,))

    async def program() -> Any:
        return await ask(1)

    return await _refused(life, program)


@flow()
async def cancelled_by_somebody_else_while_branches_work(life: AsyncLife) -> Any:
    def is_cancelled_meanwhile(given: Any, n: int) -> Any:
        other = life.own(type(life.ledger)(life.mortal, **life.options))
        with suppress(IllegalTransition):
            other.cancel(RUN, by="an operator", reason="wrong month")
        return "done"

    work = life.atool("work", is_cancelled_meanwhile, effect=Effect.READ)
    never = life.atool("never")

    async def program() -> Any:
        await work(1)
        await never(2)

    status, cause, _ = await _refused(life, program)  # what was under way as the process died stays as it was
    assert all(call.tool != "never" for call in life.world.calls)
    return status, cause


@flow()
async def recorded_values_in_branches(life: AsyncLife) -> Any:
    note = life.atool("note", lambda given, n: given, turns=2)

    async def line(name: str) -> Any:
        run = current_run()
        with run.branch(name):
            at, chance = run.now(), run.random()
            noted = await note([at, chance, str(run.uuid4())])
            assert noted[:2] == [at, chance]
            return run.now() >= at

    async def program() -> Any:
        return await asyncio.gather(line("left"), line("right"))

    return await life.arun(program)


@flow()
async def parked_by_an_exception_while_another_branch_works(life: AsyncLife) -> Any:
    def down_at_first(given: Any, n: int) -> Any:
        if n == 1:
            raise OSError("the server is down")
        return "up"

    ask = life.atool("ask", down_at_first, turns=3)
    look = life.atool("look", turns=20, effect=Effect.READ)

    async def program() -> Any:
        other = asyncio.create_task(beside("other", lambda: look(1)))
        other.add_done_callback(lambda task: task.cancelled() or task.exception())  # where nobody awaits it any more
        return [await ask(2), await other]

    for _ in range(4):
        try:
            return await life.arun(program)
        except StepFailed:
            assert is_blocked(life)
    raise AssertionError("it fails for ever")


@flow()
async def step_by_step_in_an_open_run(life: AsyncLife) -> Any:
    async def looks(given: Any) -> Any:
        return [life.takes_effect("look", given), await asyncio.sleep(0, given)][1]

    def notes(given: Any) -> Any:
        return [life.takes_effect("note", given), given][1]

    async with life.ledger.open_run("goal", RUN) as run:
        looked = await asyncio.gather(
            *[run.step("look", {"given": given}, looks, effect=Effect.READ) for given in (1, 2)]
        )
        run.result = await run.step("note", {"given": looked}, notes, effect=Effect.IDEMPOTENT)
    return life.ledger.get_run(RUN).result


@flow()
async def plain_tools_in_threads_beside_async_ones(life: AsyncLife) -> Any:
    look = life.atool("look", turns=3, effect=Effect.READ)

    def counts(given: Any) -> Any:
        return [life.takes_effect("count", given), given][1]

    life.ledger._tools.pop("count", None)
    count = life.ledger.tool(name="count", effect=Effect.READ)(counts)

    async def program() -> Any:
        run = current_run()
        looked = asyncio.create_task(beside("beside", lambda: look(1)))
        return [count(0), await run.map(count, [1, 2, 3], 2), await looked]

    return await life.arun(program)


@flow()
async def a_pipeline_with_steps_side_by_side(life: AsyncLife) -> Any:
    def step(name: str, turns: int) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        async def call(given: Any) -> Any:
            life.takes_effect(name, given)
            for _ in range(turns):
                await asyncio.sleep(0)
            return [name, given]

        return call

    async def joins(left: Any, right: Any) -> Any:
        return await step("join", 1)([left, right])

    def plain(top: Any) -> Any:
        life.takes_effect("plain", top)
        return top

    steps = [
        Step("top", step("top", 1), effect=Effect.READ),
        Step("left", step("left", 9), ["top"], effect=Effect.READ),
        Step("right", step("right", 4), ["top"], effect=Effect.IDEMPOTENT),
        Step("plain", plain, ["top"]),
        Step("join", joins, ["left", "right"]),
    ]
    return await life.pipeline(steps).aexecute(given=1)


# --- the explorer -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _what_is_meant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that dies leaves coroutines that nobody awaits; that a replay stands still is never meant."""
    monkeypatch.setattr(leases, "os", SimpleNamespace(urandom=random.randbytes))  # so that a seed gives the same ids
    monkeypatch.setattr(
        asynchronous, "Work", partial(Staged, Stage(FakeClock()))
    )  # a thread is over before the loop goes on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ReplayStalledWarning)
        yield
        gc.collect()


class Explorer:
    """One flow, lived again and again."""

    def __init__(self, name: str, folder: Path | None, **options: Any) -> None:
        self.name = name
        self.program, given, self.also = FLOWS[name]
        self.options = {"durability": "process"} | given | options
        self.folder = folder
        self.worlds = 0
        world = self.world()
        self.expected, self.ticks = self.live(world)
        self.finish(world)

    def world(self) -> World:
        self.worlds += 1
        random.seed(self.name)
        folder = None
        if self.folder is not None:
            folder = self.folder / str(self.worlds)
            folder.mkdir()
        return World(folder, self.options)

    def live(self, world: World, die_at: int | None = None) -> tuple[Any, list[str]]:
        """One life: what the program returned (None where it died), and the ticks that it passed."""
        result = None
        with world.life(die_at, kind=AsyncLife) as life:
            result = life.play(lambda: self.program(life))
            life.expect_live_equals_stored()
        assert die_at is None or len(life.ticks) == die_at, "it ended before it could die"
        return result, life.ticks

    def finish(self, world: World) -> None:
        """A reader of its own looks at what is left."""
        with world.life() as reader:
            judge(world, reader)

    def expect(self, world: World, result: Any) -> None:
        """The result of a life that was not disturbed, after some that were."""
        if result not in self.also:
            assert result == self.expected

    def crash(self, *die_at: int) -> list[str]:
        """Die at these ticks, one life after the other, then run undisturbed, and judge. Returns the last life's ticks."""
        world = self.world()
        try:
            for tick in die_at:
                self.live(world, tick)
            result, ticks = self.live(world)
            self.expect(world, result)
            self.finish(world)
        except Exception as error:
            error.add_note(f"stopped at ticks {die_at}; undisturbed: {list(enumerate(self.ticks, 1))}")
            raise
        return ticks

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Say of a failure when it happened."""
        try:
            yield
        except Exception as error:
            error.add_note(f"{what}; undisturbed: {list(enumerate(self.ticks, 1))}")
            raise


def different(ticks: list[str]) -> list[int]:
    """The ticks before which something happened: between the end of one effect and the beginning of the next nothing does."""
    pairs = itertools.pairwise(["", *ticks])
    return [
        n for n, (last, this) in enumerate(pairs, 1) if not (last.startswith("after") and this.startswith("before"))
    ]


CANCELLATIONS = [name for name in FLOWS if "cancelled_after" in name]
"""A family of flows, one for each moment of a cancellation."""
SHORT_FLOWS = ("tools_side_by_side_in_one_branch", "a_mutating_call_cancelled_after_10_turns", "calls_that_have_keys")


@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("name", FLOWS)
def test_an_async_run_stopped_at_any_yield_goes_on_as_if_nothing_had_happened(name: str, durability: str) -> None:
    explorer = Explorer(name, None, durability=durability)
    assert {"before Commit", "after Commit", "before append_all", "after append_all"} <= set(explorer.ticks)
    assert Explorer(name, None, durability=durability).ticks == explorer.ticks, "its ticks are not the same each time"
    for tick in different(explorer.ticks):
        explorer.crash(tick)


@pytest.mark.parametrize("name", SHORT_FLOWS)
def test_an_async_run_goes_on_where_the_kernel_frees_it(name: str, tmp_path: Path) -> None:
    explorer = Explorer(name, tmp_path)
    for tick in different(explorer.ticks):
        explorer.crash(tick)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLOWS if name not in CANCELLATIONS] + CANCELLATIONS[::6])
def test_a_second_crash_at_any_yield_of_an_async_recovery_changes_nothing(name: str) -> None:
    explorer = Explorer(name, None)
    first = different(explorer.ticks)
    for tick in first[:: 1 + len(first) // MOST_FIRST]:
        second = different(explorer.crash(tick))
        for again in second[:: 1 + len(second) // MOST_SECOND]:
            explorer.crash(tick, again)


MOST_FIRST, MOST_SECOND = 40, 40
"""Of a longer flow every second or third moment is tried."""


@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("name", FLOWS)
def test_whatever_write_of_a_loop_finds_the_disk_full_the_same_process_goes_on_once_there_is_room(
    name: str, durability: str
) -> None:
    explorer = Explorer(name, None, durability=durability)
    for full_at in range(1, sum(tick.startswith("before append") for tick in explorer.ticks) + 1):
        world = explorer.world()
        with (
            world.life(full_at=full_at, kind=AsyncLife) as life,
            explorer.noting(f"the disk was full at write {full_at}"),
        ):
            try:
                result = life.play(lambda life=life: explorer.program(life))  # type: ignore[misc]
            except (StoreFull, StepFailed, ExceptionGroup):  # also that of a child, or in a group of tasks
                result = life.play(lambda life=life: explorer.program(life))  # type: ignore[misc]
            explorer.expect(world, result)
            life.expect_live_equals_stored()
        explorer.finish(world)


@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("name", FLOWS)
def test_a_program_cancelled_at_any_yield_can_begin_again_in_the_same_process(name: str, durability: str) -> None:
    explorer = Explorer(name, None, durability=durability)
    for tick in different(explorer.ticks):
        world = explorer.world()
        with world.life(interrupt_at=tick, kind=AsyncLife) as life, explorer.noting(f"cancelled at tick {tick}"):
            try:
                result = life.play(lambda life=life: explorer.program(life))  # type: ignore[misc]
            except asyncio.CancelledError:
                result = life.play(lambda life=life: explorer.program(life))  # type: ignore[misc]
            explorer.expect(world, result)
            life.expect_live_equals_stored()
        explorer.finish(world)
