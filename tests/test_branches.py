"""Calls that go on beside each other: branches, gather, map, and calls that have no order."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_run_ledger import (
    InvalidArguments,
    InvalidName,
    ReplayStalledWarning,
    Run,
    StepFailed,
    UnorderedStep,
    current_run,
)
from agent_run_ledger.drivers import order
from support.ledgers import Bench
from support.programs import LONG, RUN, Calls, Way, dies, mortal, positions

# --- branches ---------------------------------------------------------------------------------------------------------


def test_a_branch_has_positions_of_its_own(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        got = [(yield tool(1))]
        with run.branch("left"):
            got.append((yield tool(2)))
            with run.branch("inner.most"):
                got.append((yield tool(3)))
            got.append((yield tool(4)))
        got.append((yield tool(5)))
        with run.branch("left"):  # opened again it goes on
            got.append((yield tool(6)))
        return got

    ledger = bench.open()
    tool = way.tool(ledger, lambda n: n, name="tool")
    assert way.run(ledger, body) == [1, 2, 3, 4, 5, 6]
    assert positions(ledger) == ["1", "@left.1", "@left.@inner%2Emost.1", "@left.2", "2", "@left.3"]


@pytest.fixture
def impatient(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A replay in an event loop gives way soon where the program goes another way than the first time, and says so."""
    monkeypatch.setattr(order, "_PATIENCE_SECONDS", 0.06)
    with pytest.warns(ReplayStalledWarning) if way.is_async else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("impatient")
def test_a_step_that_is_added_in_one_branch_moves_nothing_in_another(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        with run.branch("left"):
            for n in range(length):
                yield tool(n)
        with run.branch("right"):
            got = yield tool(10)
        end()
        return got

    calls = Calls()
    length = 1
    ledger, end = mortal(bench)
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    with dies(bench):
        way.run(ledger, body)
    length = 2
    ledger, end = bench.open(), lambda: None
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    assert way.run(ledger, body) == 10
    assert calls.seen == [0, 10, 1]


@pytest.mark.parametrize("name", ["", " ", "a\0b", "x" * 256])
def test_a_branch_that_is_no_name_is_refused(bench: Bench, way: Way, name: str) -> None:
    def body(run: Run) -> Any:
        with pytest.raises(InvalidName), run.branch(name):
            pass
        return (yield run.step("a", {}, way.function(lambda: 1)))

    assert way.run(bench.open(), body) == 1


class Sides:
    """A tool that knows how many of its calls run at once, and waits until as many as it is told do."""

    def __init__(self, way: Way, meet: int = 1) -> None:
        self.way = way
        self.meet = meet
        self.running = self.most = 0
        self.calls: list[int] = []
        self.changed = threading.Condition()

    def _begin(self, n: int) -> None:
        with self.changed:
            self.calls.append(n)
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()

    def _end(self) -> None:
        with self.changed:
            self.running -= 1

    def function(self) -> Callable[..., Any]:
        def work(n: int) -> int:
            self._begin(n)
            with self.changed:
                assert self.changed.wait_for(lambda: self.most >= self.meet, LONG)
            self._end()
            return -n

        async def awork(n: int) -> int:
            self._begin(n)
            while self.most < self.meet:
                await asyncio.sleep(0)
            for _ in range(20 - n):  # the last is the first to be ready
                await asyncio.sleep(0)
            self._end()
            return -n

        awork.__name__ = "work"
        return awork if self.way.is_async else work


def test_a_map_gives_results_in_the_order_of_the_items(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        return (yield run.map(tool, range(5)))

    sides = Sides(way, meet=5)
    ledger = bench.open()
    tool = ledger.tool()(sides.function())
    assert way.run(ledger, body) == [0, -1, -2, -3, -4]
    assert sides.most == 5  # all at once, since each waited for the others
    assert sorted(positions(ledger)) == [f"1.{n}.1" for n in range(1, 6)]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_a_map_works_on_as_many_items_at_once_as_it_may(bench: Bench, way: Way, concurrency: int) -> None:
    def body(run: Run) -> Any:
        return (yield run.map(tool, iter(range(9)), concurrency=concurrency))

    sides = Sides(way, meet=concurrency)
    ledger = bench.open()
    tool = ledger.tool()(sides.function())
    assert way.run(ledger, body) == [-n for n in range(9)]
    assert sides.most == concurrency


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, "2"])
def test_a_concurrency_that_is_no_number_is_refused(bench: Bench, way: Way, concurrency: Any) -> None:
    def body(run: Run) -> Any:
        with pytest.raises(InvalidArguments, match="concurrency"):
            run.map(print, [1], concurrency=concurrency)
        return (yield run.step("a", {}, way.function(lambda: 1)))

    ledger = bench.open()
    assert way.run(ledger, body) == 1
    assert positions(ledger) == ["1"]


def test_nothing_to_map_and_nothing_to_gather_is_nothing(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        return [(yield run.map(tool, [])), (yield run.gather())]

    ledger = bench.open()
    tool = way.tool(ledger, lambda n: n, name="tool")
    assert way.run(ledger, body) == [[], []]


@pytest.mark.usefixtures("impatient")
def test_a_map_replays_whatever_its_concurrency(bench: Bench, way: Way) -> None:
    def life(concurrency: int, dies_at_end: bool) -> Any:
        def body(run: Run) -> Any:
            got = yield run.map(tool, range(6), concurrency=concurrency)
            if dies_at_end:
                die()
            return got

        ledger, die = mortal(bench)
        tool = ledger.tool()(sides.function())
        if dies_at_end:
            with dies(bench):
                way.run(ledger, body)
            return None
        return way.run(ledger, body)

    sides = Sides(way)
    life(6, True)
    life(3, True)
    assert life(3, False) == [-n for n in range(6)]
    assert sorted(sides.calls) == list(range(6))


def test_a_map_of_plain_functions_makes_steps_inside_of_them(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        return (yield run.map(way.program(each), ["a", "b"]))

    def each(item: str) -> Any:
        return [(yield tool(item)), (yield tool(item * 2))]

    ledger = bench.open()
    tool = way.tool(ledger, lambda n: n, name="tool")
    assert way.run(ledger, body) == [["a", "aa"], ["b", "bb"]]
    assert sorted(positions(ledger)) == ["1.1.1", "1.1.2", "1.2.1", "1.2.2"]


def test_a_gather_gives_results_in_the_order_in_which_its_functions_are_given(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        got = yield run.gather(lambda: tool(1), lambda: tool(2), lambda: tool(3))
        return [*got, (yield tool(4))]

    sides = Sides(way, meet=3)
    ledger = bench.open()
    tool = ledger.tool()(sides.function())
    assert way.run(ledger, body) == [-1, -2, -3, -4]
    assert sorted(positions(ledger)) == ["1.1.1", "1.2.1", "1.3.1", "2"]


def test_a_gather_lets_all_come_to_their_end_and_raises_the_first_error_in_its_order(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        try:
            yield run.gather(lambda: tool(0), lambda: tool(1), lambda: tool(2), lambda: tool(3))
        except StepFailed as error:
            return [str(error), (yield tool(4))]

    def work(n: int) -> object:
        calls(n)
        if n in (1, 2):
            raise ValueError(f"no {n}")
        return n

    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, work)
    assert way.run(ledger, body) == ["Tool execution failed: ValueError: no 1", 4]
    assert sorted(calls.seen) == [0, 1, 2, 3, 4]


def test_after_an_error_a_limited_map_begins_nothing_new(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        yield run.map(tool, range(9), concurrency=1)

    def work(n: int) -> object:
        calls(n)
        if n == 2:
            raise ValueError("no 2")
        return n

    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, work)
    with pytest.raises(StepFailed, match="no 2"):
        way.run(ledger, body)
    assert calls.seen == [0, 1, 2]


def test_a_map_of_a_sync_tool_in_an_async_agent_runs_in_threads(bench: Bench) -> None:
    ledger = bench.open()
    sides = Sides(Way(False), meet=4)
    tool = ledger.tool()(sides.function())

    @ledger.agent()
    async def agent(run: Run) -> Any:
        return await run.map(tool, range(4))

    assert ledger.run(agent, run_id=RUN) == [0, -1, -2, -3]


def test_a_gather_in_an_async_agent_takes_coroutines_too(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def tool(n: int) -> int:
        return n

    async def twice(n: int) -> int:
        return await tool(n) + await tool(n)

    @ledger.agent()
    async def agent(run: Run) -> Any:
        return await run.gather(twice(1), lambda: twice(2))

    assert ledger.run(agent, run_id=RUN) == [2, 4]
    assert sorted(positions(ledger)) == ["1.1.1", "1.1.2", "1.2.1", "1.2.2"]


# --- order ------------------------------------------------------------------------------------------------------------


def test_calls_of_two_threads_in_one_branch_have_no_order(bench: Bench) -> None:
    ledger = bench.open()
    began, go_on = threading.Event(), threading.Event()

    @ledger.tool()
    def slow() -> str:
        began.set()
        assert go_on.wait(LONG)
        return "slow"

    @ledger.tool()
    def other() -> str:
        pytest.fail("it must not be dispatched")

    @ledger.agent()
    def agent() -> Any:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: got.append(slow()),))
        thread.start()
        assert began.wait(LONG)
        try:
            with pytest.raises(UnorderedStep, match="'other' was asked for while 'slow' is in flight"):
                other()
            with pytest.raises(UnorderedStep):
                current_run().now()
            with current_run().branch("mine"):
                mine = current_run().step("mine", {}, lambda: "mine")
        finally:
            go_on.set()
            thread.join(LONG)
        return [*got, mine, current_run().step("after", {}, lambda: "after")]

    got: list[Any] = []
    assert ledger.run(agent, run_id=RUN) == ["slow", "mine", "after"]
    assert positions(ledger) == ["1", "@mine.1", "2"]


def test_calls_of_two_tasks_in_one_branch_have_no_order(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def work(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def one_by_one(*numbers: int) -> list[int]:
        return [await work(n) for n in numbers]

    @ledger.agent()
    async def agent() -> Any:
        first, second = await asyncio.gather(one_by_one(1, 2), one_by_one(3, 4), return_exceptions=True)
        assert isinstance(second, UnorderedStep)
        return first

    assert ledger.run(agent, run_id=RUN) == [1, 2]


def test_calls_that_one_task_makes_and_then_awaits_together_run_side_by_side(bench: Bench) -> None:
    def life(dies_at_end: bool) -> Any:
        ledger, die = mortal(bench)
        tool = ledger.tool()(sides.function())

        @ledger.agent()
        async def agent() -> Any:
            got = await asyncio.gather(tool(1), tool(2), asyncio.create_task(tool(3)))
            if dies_at_end:
                die()
            return got

        if dies_at_end:
            with dies(bench):
                ledger.run(agent, run_id=RUN)
            return None
        return ledger.run(agent, run_id=RUN)

    sides = Sides(Way(True), meet=3)
    life(True)
    assert life(False) == [-1, -2, -3]
    assert sorted(sides.calls) == [1, 2, 3]


def test_a_call_that_is_never_awaited_holds_nothing_up(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def work(n: int) -> int:
        return n

    @ledger.agent()
    async def agent() -> Any:
        work(1).close()  # type: ignore[attr-defined]
        return await work(2)

    assert ledger.run(agent, run_id=RUN) == 2
    assert ledger.get_run(RUN).status == "COMPLETED"
