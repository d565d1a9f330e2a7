"""Stopped at every yield, in process: whatever the moment, the next process goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    BudgetExceededException,
    Effect,
    IllegalTransition,
    RetryPolicy,
    RunawayLoopException,
    RunClosed,
    Step,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    StoreFull,
    UnserialisableOutput,
)
from support.explorer import RUN, Life, World, judge

Flow = Callable[[Life], Any]
FLOWS: dict[str, tuple[Flow, dict[str, Any]]] = {}


def flow(**options: Any) -> Callable[[Flow], Flow]:
    """A program to be stopped at every tick. `options` are those of the ledger; it returns what must come out the same."""

    def register(program: Flow) -> Flow:
        FLOWS[program.__name__] = (program, options)
        return program

    return register


def status(life: Life) -> str:
    return life.ledger.get_run(RUN).status


# --- the flows --------------------------------------------------------------------------------------------------------


@flow()
def plain_steps_and_a_finish(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    first = life.step("look", 1, effect=Effect.READ)
    second = life.step("note", first, effect=Effect.IDEMPOTENT)
    third = life.step("think", second)
    life.ledger.finish_run(RUN, third)
    life.ledger.finish_run(RUN, third)
    return third, status(life)


@flow()
def a_failing_step_and_further_ones(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    life.step("before", 1)

    def breaks(given: Any, n: int) -> Any:
        raise ValueError("no such invoice")

    with pytest.raises(StepFailed, match="no such invoice"):
        life.step("breaks", 2, breaks)
    after = life.step("after", 3)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow()
def a_failure_that_is_raised_as_itself(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)

    def breaks(given: Any, n: int) -> Any:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        life.step("breaks", 2, breaks, raises=(LookupError,))
    return life.step("after", 3)


@flow()
def retries_with_waits(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)

    def third_time_lucky(given: Any, n: int) -> Any:
        if n < 3:
            raise ConnectionError("try later")
        return "there"

    patient = RetryPolicy(max_attempts=6, base=100, cap=1000)
    got = life.step("ask", "?", third_time_lucky, effect=Effect.READ, retry=patient)
    after = life.step("after", got)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow()
def recorded_values(life: Life) -> Any:
    with life.ledger.open_run("goal", RUN) as run:
        at, chance, name = run.now(), run.random(), run.uuid4()
        noted = life.step("note", [at, chance, name])
        again = run.now()
        assert again >= at
        life.step("close", again)
        assert noted == ["note", [at, chance, name]]
    return status(life)


@flow()
def ended_by_its_program(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    try:
        life.step("look", 1, effect=Effect.READ)
        life.ledger.abort_run(RUN, "it makes no sense")
    except (RunClosed, IllegalTransition):
        pass
    return status(life), life.ledger.get_run(RUN).cause


@flow()
def cancelled_by_somebody_else(life: Life) -> Any:
    def is_cancelled_meanwhile(given: Any, n: int) -> Any:
        other = life.own(type(life.ledger)(life.mortal, **life.options))
        with contextlib.suppress(IllegalTransition):  # another life has cancelled it
            other.cancel(RUN, by="an operator", reason="wrong month")
        return "done"

    try:
        life.ledger.create_run("goal", RUN)
        life.step("before", 1, effect=Effect.READ)
        life.step("work", 2, is_cancelled_meanwhile, effect=Effect.READ)
        life.step("never", 3)
    except RunClosed:
        pass
    assert all(call.tool != "never" for call in life.world.calls)
    return status(life), life.ledger.get_run(RUN).cause


@flow()
def a_pipeline_with_a_diamond(life: Life) -> Any:
    def joins(left: Any, right: Any) -> Any:
        return life.tool("join", lambda given, n: given)([left, right])

    steps = [
        Step("top", life.tool("top", lambda given, n: given + 1), effect=Effect.READ),
        Step("left", _named("top", life.tool("left", lambda given, n: given * 2)), ["top"], effect=Effect.IDEMPOTENT),
        Step("right", _named("top", life.tool("right", lambda given, n: given * 3)), ["top"]),
        Step("join", joins, ["left", "right"]),
    ]
    ledger = life.pipeline(steps)
    result = ledger.execute(given=1)
    assert ledger.execute(given=1) == result
    return result, status(life)


def _named(parameter: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """The same function with its parameter named after a dependency."""
    assert parameter == "top"

    def named(top: Any) -> Any:
        return function(top)

    return named


@flow()
def parked_by_an_exception_and_run_again(life: Life) -> Any:
    def down_at_first(given: Any, n: int) -> Any:
        if n == 1:
            raise OSError("the server is down")
        return "up"

    for _ in range(3):
        try:
            with life.ledger.open_run("goal", RUN) as run:
                life.step("before", 1)
                run.result = life.step("ask", 2, down_at_first)
        except StepFailed:
            assert status(life) == "BLOCKED" or life.full_at
        else:
            break
    return status(life), life.ledger.get_run(RUN).result


@flow()
def a_pipeline_parked_and_run_again(life: Life) -> Any:
    def down_at_first(given: Any, n: int) -> Any:
        if n == 1:
            raise OSError("the server is down")
        return "up"

    def ask(got: Any) -> Any:
        return life.tool("ask", down_at_first)(got)

    steps = [Step("get", life.tool("get", lambda given, n: given)), Step("ask", ask, ["get"])]
    ledger = life.pipeline(steps)
    for _ in range(3):
        try:
            return ledger.execute(given=1), status(life)
        except StepFailed:
            assert status(life) == "BLOCKED" or life.full_at
    return None


@flow()
def resumed_at_the_frontier(life: Life) -> Any:
    if life.store.head(RUN) is None:
        life.ledger.create_run("goal", RUN)
    done = {step.tool_name for step in life.ledger.resume_run(RUN) if step.state == "COMPLETED"}
    for name in ("one", "two", "three"):
        if name not in done:
            life.step(name, name, effect=Effect.READ)
    life.ledger.finish_run(RUN)
    return status(life), [step.output_json for step in life.ledger.steps(RUN)]


@flow()
def interrupted_and_going_on(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)

    class Interrupted(KeyboardInterrupt):
        pass

    def is_interrupted(given: Any, n: int) -> Any:
        raise Interrupted

    with pytest.raises((Interrupted, StepCancelled)):
        life.step("work", 1, is_interrupted, effect=Effect.READ)
    after = life.step("after", 2)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow()
def a_step_that_must_not_happen_twice(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    try:
        life.step("look", 1, effect=Effect.READ)
        life.step("pay", 2, effect=Effect.MUTATE)
        life.step("look again", 3, effect=Effect.READ)
        life.ledger.finish_run(RUN)
    except StepInDoubt:
        (paid,) = [step for step in life.log().positions.values() if step.tool == "pay"]
        assert paid.outcome is None
        assert status(life) == "BLOCKED"
        return "in doubt"
    return status(life)


@flow()
def a_mutating_step_whose_failure_tells_nothing(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)

    def is_cut_off(given: Any, n: int) -> Any:
        raise ConnectionResetError("connection reset by peer")

    with pytest.raises(StepInDoubt):
        life.step("pay", 1, is_cut_off, effect=Effect.MUTATE)
    with pytest.raises(StepInDoubt):
        life.step("pay", 1, is_cut_off, effect=Effect.MUTATE)
    assert len(life.world.calls) <= 1
    return status(life)


@flow()
def a_mutation_whose_receiver_can_be_asked(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    seen = life.step("look", 1, effect=Effect.READ)
    paid = life.step("pay once", 2, effect=Effect.MUTATE, receipt=life.receipt("pay once"))
    life.ledger.finish_run(RUN, [seen, paid])
    return [seen, paid], status(life)


@flow()
def a_receiver_that_cannot_say_at_first(life: Life) -> Any:
    def is_cut_off(given: Any, n: int) -> Any:
        raise ConnectionResetError("connection reset by peer")

    life.ledger.create_run("goal", RUN)
    patient = RetryPolicy(max_attempts=6, base=100, cap=1000)
    receipt = life.receipt("pay once", unknown=2)
    paid = life.step("pay once", 2, is_cut_off, effect=Effect.MUTATE, receipt=receipt, retry=patient)
    after = life.step("after", paid)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow()
def a_request_that_is_lost_before_its_receiver_has_it(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    often = RetryPolicy(max_attempts=6, base=0.0)
    receipt = life.receipt("pay once")
    paid = life.step("pay once", 2, lost=2, effect=Effect.MUTATE, receipt=receipt, retry=often)
    life.ledger.finish_run(RUN, paid)
    return paid, status(life)


def is_late_at_first(given: Any, n: int) -> Any:
    """It takes effect each time, and the first answer does not come."""
    if n == 1:
        raise TimeoutError("no answer")
    return ["paid", given]


def _made_again(life: Life, effect: Effect | None) -> Any:
    """An agent that makes its call again where it was told that it had failed."""
    life.ledger.create_run("goal", RUN)
    paid = None
    for _ in range(3):
        try:
            paid = life.step("pay once", 1, is_late_at_first, effect=effect)
            break
        except StepFailed:
            life.step("think", "again", effect=Effect.READ, may_repeat=True)
    after = life.step("after", paid)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow()
def an_idempotent_call_made_again_after_it_was_too_slow(life: Life) -> Any:
    return _made_again(life, Effect.IDEMPOTENT)


@flow()
def an_undeclared_call_made_again_after_it_was_too_slow(life: Life) -> Any:
    return _made_again(life, None)


@flow()
def an_interrupted_mutation_that_is_made_again(life: Life) -> Any:
    class Interrupted(KeyboardInterrupt):
        pass

    def is_interrupted(given: Any, n: int) -> Any:
        raise Interrupted

    life.ledger.create_run("goal", RUN)
    paid = None
    for _ in range(3):
        try:
            receipt = life.receipt("pay once", unknown=1)
            paid = life.step("pay once", 1, is_interrupted, effect=Effect.MUTATE, receipt=receipt)
            break
        except (Interrupted, StepCancelled):
            pass
    after = life.step("after", paid)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow(undeclared="block")
def undeclared_steps_that_block(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    try:
        life.step("think", 1)
        life.ledger.finish_run(RUN)
    except StepInDoubt:
        assert status(life) == "BLOCKED"
        return "in doubt"
    return status(life)


@flow()
def an_output_that_cannot_be_stored(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    with pytest.raises(UnserialisableOutput):
        life.step("strange", 1, lambda given, n: object())
    after = life.step("after", 2)
    life.ledger.finish_run(RUN, after)
    return after, status(life)


@flow(loop_threshold=3)
def a_loop_that_is_refused(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    try:
        for _ in range(4):
            life.step("poll", "same", lambda given, n: "no news", effect=Effect.READ)
    except (RunawayLoopException, RunClosed):
        pass
    return status(life), life.ledger.get_run(RUN).cause, len({call.key for call in life.world.calls})


@flow(max_steps=2)
def a_budget_that_is_spent(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    try:
        for number in range(3):
            life.step(f"step {number}", number, effect=Effect.READ)
    except (BudgetExceededException, RunClosed):
        pass
    return status(life), life.ledger.get_run(RUN).cause, len({call.key for call in life.world.calls})


@flow()
def payloads_longer_than_64_kib(life: Life) -> Any:
    life.ledger.create_run("goal", RUN)
    long = "é" * 40_000
    first = life.step("fetch", 1, lambda given, n: long, effect=Effect.READ)
    second = life.step("send", first, lambda given, n: given, effect=Effect.IDEMPOTENT)
    life.ledger.finish_run(RUN, second)
    return second == long, status(life)


# --- the explorer -----------------------------------------------------------------------------------------------------

SHORT_FLOWS = ("undeclared_steps_that_block", "ended_by_its_program", "a_failure_that_is_raised_as_itself")
MAY_PARK = {"a_step_that_must_not_happen_twice", "undeclared_steps_that_block"}


@pytest.fixture(autouse=True)
def _undeclared_steps_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Explorer:
    """One flow, lived again and again."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.program, self.options = FLOWS[name]
        self.folder = folder
        self.worlds = 0
        world = self.world()
        self.expected, self.ticks = self.live(world)
        self.finish(world)

    def world(self) -> World:
        self.worlds += 1
        folder = None
        if self.folder is not None:
            folder = self.folder / str(self.worlds)
            folder.mkdir()
        return World(folder, self.options)

    def live(self, world: World, die_at: int | None = None) -> tuple[Any, list[str]]:
        """One life: what the program returned (None where it died), and the ticks that it passed."""
        result = None
        with world.life(die_at) as life:
            result = self.program(life)
            life.expect_live_equals_stored()
        assert die_at is None or len(life.ticks) == die_at, "it ended before it could die"
        return result, life.ticks

    def finish(self, world: World) -> None:
        """A reader of its own looks at what is left."""
        with world.life() as reader:
            judge(world, reader)

    def crash(self, *die_at: int) -> list[str]:
        """Die at these ticks, one life after the other, then run undisturbed, and judge. Returns the last life's ticks."""
        world = self.world()
        try:
            for tick in die_at:
                self.live(world, tick)
            result, ticks = self.live(world)
            if not (self.name in MAY_PARK and result == "in doubt"):
                assert result == self.expected
            self.finish(world)
        except Exception as error:
            error.add_note(f"stopped at ticks {die_at}; undisturbed: {list(enumerate(self.ticks, 1))}")
            raise
        return ticks


def different(ticks: list[str]) -> list[int]:
    """The ticks before which something happened: between the end of one effect and the beginning of the next nothing does."""
    pairs = itertools.pairwise(["", *ticks])
    return [
        n for n, (last, this) in enumerate(pairs, 1) if not (last.startswith("after") and this.startswith("before"))
    ]


@pytest.fixture(params=["memory", "sqlite"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path


@pytest.mark.parametrize("name", FLOWS)
def test_a_run_stopped_at_any_yield_goes_on_as_if_nothing_had_happened(name: str, folder: Path | None) -> None:
    explorer = Explorer(name, folder)
    assert {"before Commit", "after Commit", "before append", "after append"} <= set(explorer.ticks)
    for tick in range(1, len(explorer.ticks) + 1):
        explorer.crash(tick)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_a_second_crash_at_any_yield_of_the_recovery_changes_nothing(name: str) -> None:
    explore_pairs(Explorer(name, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT_FLOWS)
def test_a_second_crash_changes_nothing_where_the_kernel_frees_the_run(name: str, tmp_path: Path) -> None:
    explore_pairs(Explorer(name, tmp_path))


def explore_pairs(explorer: Explorer) -> None:
    for first in different(explorer.ticks):
        for second in different(explorer.crash(first)):
            explorer.crash(first, second)


@pytest.mark.parametrize("calls_again", [True, False], ids=["the step is called again", "the program begins again"])
@pytest.mark.parametrize("name", FLOWS)
def test_whatever_write_finds_the_disk_full_the_same_process_goes_on_once_there_is_room(
    name: str, calls_again: bool
) -> None:
    explorer = Explorer(name, None)
    for full_at in range(1, explorer.ticks.count("before append") + 1):
        world = explorer.world()
        with world.life(full_at=full_at) as life:
            life.calls_again = calls_again
            try:
                result = explorer.program(life)
            except StoreFull:
                result = explorer.program(life)
            assert result == explorer.expected, f"the disk was full at append {full_at}"
        explorer.finish(world)


@pytest.mark.parametrize("name", FLOWS)
def test_a_program_interrupted_at_any_yield_or_write_can_begin_again_in_the_same_process(name: str) -> None:
    explorer = Explorer(name, None)
    for tick in range(1, len(explorer.ticks) + 1):
        world = explorer.world()
        with world.life(interrupt_at=tick) as life:
            try:
                result = explorer.program(life)
            except KeyboardInterrupt:
                result = explorer.program(life)
            may_park = name in MAY_PARK and result == "in doubt"
            assert may_park or result == explorer.expected, f"interrupted at tick {tick} of {explorer.ticks}"
        explorer.finish(world)
