"""A run is made from the first steps of another one: with what they returned, in the same order, and with nothing of what came later."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    InvalidArguments,
    InvalidName,
    Run,
    RunInputMismatch,
    RunOwned,
    StepFailed,
    StepInDoubt,
)
from support.ledgers import Bench, raising, raw
from support.programs import RUN, Calls, Way
from support.waiting import Meanwhile


class Flow:
    """Six steps: one, a failure that its program acts upon, two side by side, one with a key, and a last one. Values are recorded between."""

    def __init__(self, way: Way, ledger: AgentRunLedger) -> None:
        self.calls: list[str] = []
        self.seen: list[Any] = []
        self.way = way
        self.tool = way.tool(ledger, self._work, name="work", effect=Effect.MUTATE)
        self.agent = way.agent(ledger, self._body, name="flow")

    def _work(self, name: str) -> str:
        self.calls.append(name)
        if name == "fails":
            raise ValueError("always")
        return name.upper()

    def _body(self, goal: str, run: Run) -> Any:
        told: list[Any] = [(yield self.tool("one")), run.random()]
        try:
            yield self.tool("fails")
        except StepFailed as failed:
            told.append(str(failed))
        told += yield run.gather(lambda: self.tool("left"), lambda: self.tool("right"))
        told.append(str(run.uuid4()))
        told.append((yield self.tool("keyed", step_key="k")))
        told.append((yield self.tool("last")))
        return told


@pytest.mark.parametrize("before", range(1, 8))
def test_a_fork_has_the_steps_before_and_makes_the_others_anew(before: int, bench: Bench, way: Way) -> None:
    ledger = bench.open()
    flow = Flow(way, ledger)
    result = way.start(ledger, flow.agent, "go")
    old, rows, calls = ledger.steps(RUN), bench.rows(RUN), list(flow.calls)
    new = ledger.fork(RUN, before, by="ann", reason="try again", new_run_id="fork")
    carried = ledger.steps(new)
    assert [step.step_number for step in carried] == list(range(1, before))
    for step, was in zip(carried, old, strict=False):
        same = (
            "position",
            "tool_name",
            "arguments_json",
            "output_json",
            "error_message",
            "idempotency_key",
            "created_at",
            "state",
        )
        assert all(getattr(step, name) == getattr(was, name) for name in same)
    assert (flow.calls, ledger.get_run(new).owner) == (calls, None)
    again = way.start(ledger, flow.agent, "go", run_id=new)
    numbers = [old[number].arguments_json for number in range(before - 1, 6)]
    assert sorted(flow.calls[len(calls) :]) == sorted(json.loads(each or "")["name"] for each in numbers)
    random, uuid = 1, 5
    assert [each for at, each in enumerate(again) if at not in (random, uuid)] == [
        each for at, each in enumerate(result) if at not in (random, uuid)
    ]
    assert (again[random] == result[random]) == (before >= 2)
    assert (again[uuid] == result[uuid]) == (before >= 5)
    new_keys = {step.idempotency_key for step in ledger.steps(new)[before - 1 :]}
    assert not new_keys & {step.idempotency_key for step in old}, "what is made anew has keys of its own"
    assert bench.rows(RUN) == rows
    assert way.start(ledger, flow.agent, "go", run_id=new) == again
    assert ledger.verify().findings == []


def test_a_fork_of_a_fork_is_like_the_first(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    flow = Flow(way, ledger)
    way.start(ledger, flow.agent, "go")
    first = ledger.fork(RUN, 6, new_run_id="first")
    result = way.start(ledger, flow.agent, "go", run_id=first)
    second = ledger.fork(first, 7, new_run_id="second")
    third = ledger.fork(second, 7, new_run_id="third")
    calls = len(flow.calls)
    assert way.start(ledger, flow.agent, "go", run_id=third) == result
    assert len(flow.calls) == calls
    assert [step.idempotency_key for step in ledger.steps(third)] == [
        step.idempotency_key for step in ledger.steps(first)
    ]
    assert ledger.verify().findings == []


def test_a_fork_is_for_the_same_input(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    flow = Flow(way, ledger)
    way.start(ledger, flow.agent, "go")
    ledger.fork(RUN, 3, new_run_id="fork")
    with pytest.raises(RunInputMismatch):
        way.start(ledger, flow.agent, "stop", run_id="fork")


@pytest.mark.parametrize("from_step", [0, -1, 8, 1.0, "2", True, None])
def test_a_fork_begins_before_a_step_that_there_is_or_behind_the_last(from_step: Any, bench: Bench) -> None:
    ledger = bench.open()
    flow = Flow(Way(False), ledger)
    Way(False).start(ledger, flow.agent, "go")
    with pytest.raises(InvalidArguments, match="from 1 to 7"):
        ledger.fork(RUN, from_step)
    assert len(ledger.runs()) == 1


def test_a_fork_takes_no_id_that_is_taken_or_cannot_be_one(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("a", RUN)
    ledger.create_run("b", "taken")
    before = bench.rows("taken")
    with pytest.raises(InvalidArguments, match="already"):
        ledger.fork(RUN, 1, new_run_id="taken")
    with pytest.raises(InvalidName):
        ledger.fork(RUN, 1, new_run_id="")
    assert bench.rows("taken") == before


def test_a_fork_whose_steps_were_erased_is_refused(way: Way, tmp_path: Any) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        flow = Flow(way, ledger)
        way.start(ledger, flow.agent, "go")
        with raw(bench.path, without_triggers=True) as connection:
            there = "WHERE run_id = ? AND seq = 3"
            connection.execute(
                f"UPDATE payloads SET bytes = NULL WHERE digest = (SELECT digest FROM entries {there})", (RUN,)
            )
            connection.execute(f"UPDATE entries SET payload = NULL, digest = NULL {there}", (RUN,))
        assert ledger.fork(RUN, 1, new_run_id="before it") == "before it"
        with pytest.raises(InvalidArguments, match="erased"):
            ledger.fork(RUN, 7, new_run_id="with it")
        assert [run.run_id for run in ledger.runs()] == [RUN, "before it"]


def test_side_by_side_a_fork_is_handed_its_outcomes_in_the_first_order(bench: Bench) -> None:
    ledger = bench.open()
    order: list[str] = []

    @ledger.agent()
    async def agent(run: Run) -> list[str]:
        gates = {name: asyncio.Event() for name in "abcd"}
        came: list[str] = []

        async def one(name: str) -> None:
            async def work() -> str:
                await gates[name].wait()
                return name

            came.append(await run.step(name, {}, work, effect=Effect.READ))
            follower = await run.step(f"after {name}", {"came": list(came)}, lambda came: len(came), effect=Effect.READ)
            came.append(str(follower))
            order_of = "dbca"
            following = order_of[order_of.index(name) + 1 :]
            if following:
                gates[following[0]].set()

        gates["d"].set()
        await run.gather(*[lambda name=name: one(name) for name in "abcd"])
        order.append(",".join(came))
        return came

    result = ledger.run(agent, run_id=RUN)
    numbers = len(ledger.steps(RUN))
    for before in range(1, numbers + 2):
        new = ledger.fork(RUN, before, new_run_id=f"fork {before}")
        told = ledger.run(agent, run_id=new)
        order.clear()
        deep = ledger.fork(new, numbers + 1, new_run_id=f"deep {before}")
        assert ledger.run(agent, run_id=deep) == told
        assert order == [",".join(told)]
    assert told == result, "all steps are carried, in the order in which they were handed out"
    assert ledger.verify().findings == []


def test_an_interruption_is_carried(bench: Bench) -> None:
    ledger = bench.open()
    calls = Calls()

    @ledger.agent()
    async def agent(run: Run) -> list[str]:
        told = []

        async def hangs() -> None:
            calls("hangs")
            await asyncio.Event().wait()

        try:
            async with asyncio.timeout(0.5):
                await run.step("hangs", {}, hangs, effect=Effect.READ)
        except TimeoutError:
            told.append("gave up")
        told.append(await run.step("next", {}, lambda: calls("next"), effect=Effect.READ))
        return told

    result = ledger.run(agent, run_id=RUN)
    for before in (2, 3):
        new = ledger.fork(RUN, before)
        assert ledger.run(agent, run_id=new) == result
    assert calls.seen == ["hangs", "next", "next"]
    assert ledger.verify().findings == []


def test_waits_are_carried_and_signals_that_no_carried_wait_took_are_there_to_be_taken(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        told = [(yield run.wait_for("go")), (yield run.sleep(10))]
        approval = yield run.approve("pay", {"amount": 1})
        return [*told, approval.by, (yield run.wait_for("end"))]

    def approve() -> None:
        (request,) = other.approvals(RUN)
        other.approve(RUN, "pay", request.digest, by="ann")
        other.signal(RUN, "end", "first")

    waits = way.agent(ledger, agent)
    other_acts = [lambda: (other.signal(RUN, "go", 1), other.signal(RUN, "go", "left over"))]
    Meanwhile(bench, *other_acts, always=lambda: approve() if other.approvals(RUN) else None)
    assert way.start(ledger, waits) == [1, None, "ann", "first"]
    new = ledger.fork(RUN, 4, new_run_id="fork")
    assert way.start(ledger, waits, run_id=new) == [1, None, "ann", "first"]
    assert bench.kinds(new)[: bench.kinds(new).index("forked")].count("signal") == 2  # "left over" and "first"
    assert ledger.verify().findings == []


def test_a_wait_that_is_open_where_the_fork_begins_goes_on_there(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    work = way.tool(ledger, lambda n: n, name="work", effect=Effect.READ)

    def waiting(run: Run) -> Any:
        return run.wait_for("go")

    def agent(run: Run) -> Any:
        def works() -> Any:
            return work(1)

        told = yield run.gather(lambda: waiting(run), works)
        yield work(2)
        return told

    waits = way.agent(ledger, agent)
    started: list[str] = []

    def send() -> None:
        if "outcome" in bench.kinds(RUN) and not started:
            with suppress(RunOwned):  # as long as something else of it is at work
                other.abort_run(RUN, "stop here")
                started.append("go")

    Meanwhile(bench, always=send, looks=20_000)
    with pytest.raises(Exception, match="stop here"):
        way.start(ledger, waits)
    new = ledger.fork(RUN, 3, new_run_id="fork")
    assert ledger.get_run(new).status == "BLOCKED"
    assert [action.action for action in ledger.plan(new)] == ["wait"]
    Meanwhile(bench, lambda: other.signal(new, "go", 7), looks=20_000)
    assert way.start(ledger, waits, run_id=new) == [7, 1]
    assert ledger.verify().findings == []


def test_a_step_in_doubt_is_carried_as_in_doubt(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("pay", RUN)
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "pay", {}, raising(KeyboardInterrupt()), effect=Effect.MUTATE)
    ledger.detach(RUN)
    new = ledger.fork(RUN, 2)
    assert [action.action for action in ledger.plan(new)] == ["park"]
    ledger.create_run("pay", new)
    with pytest.raises(StepInDoubt):
        ledger.execute_step(new, "pay", {}, raising(AssertionError()), effect=Effect.MUTATE)
    ledger.resolve(new, 1, output=5)
    ledger.create_run("pay", new)
    assert ledger.execute_step(new, "pay", {}, raising(AssertionError()), effect=Effect.MUTATE) == 5
    assert ledger.get_run(RUN).status == "RUNNING"
    assert ledger.verify().findings == []


def test_a_step_that_failed_and_that_nobody_acted_upon_is_tried_again_in_a_fork(bench: Bench) -> None:
    ledger = bench.open()
    with pytest.raises(StepFailed), ledger.open_run("work", RUN) as run:
        run.step("look", {}, raising(ValueError()), effect=Effect.READ)
    new = ledger.fork(RUN, 2)
    with ledger.open_run("work", new) as run:
        assert run.step("look", {}, lambda: 1, effect=Effect.READ) == 1
    assert ledger.verify().findings == []


def test_a_fork_carries_what_is_long(bench: Bench) -> None:
    ledger, long = bench.open(), "x" * 50_000

    def play(run_id: str) -> Any:
        with ledger.open_run("work", run_id) as run:
            first = run.step("long", {"given": long}, lambda given: given + "y", effect=Effect.READ)
            run.result = [len(first), run.step("next", {}, lambda: 1, effect=Effect.READ)]
        return run.result

    assert play(RUN) == [50_001, 1]
    new = ledger.fork(RUN, 2)
    assert play(new) == [50_001, 1]
    assert ledger.steps(new)[0].output_json == ledger.steps(RUN)[0].output_json
    assert ledger.verify().findings == []


def test_a_pipeline_is_forked_by_the_number_of_a_step(bench: Bench) -> None:
    from agent_run_ledger import Step

    calls: list[str] = []

    def noted(name: str) -> Any:
        def step() -> str:
            calls.append(name)
            return name

        return step

    steps = [Step("a", noted("a"), effect=Effect.READ), Step("b", noted("b"), depends_on=["a"], effect=Effect.READ)]
    assert bench.pipeline(RUN, *steps).execute() == "b"
    ledger = bench.open()
    new = ledger.fork(RUN, 2, new_run_id="fork")
    assert bench.pipeline(new, *steps).execute() == "b"
    assert calls == ["a", "b", "b"]
    assert ledger.verify().findings == []
