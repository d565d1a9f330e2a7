"""A run waits for a time, a signal or a person, over any crash, and nobody has to hold it meanwhile."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    IllegalTransition,
    InvalidArguments,
    InvalidName,
    PayloadTooLarge,
    ReplayDivergence,
    Run,
    RunClosed,
    RunNotFound,
    UnorderedStep,
    UnserialisableArguments,
)
from agent_run_ledger.errors import ApprovalDenied, ApprovalMismatch, WaitTimeout
from support.ledgers import HOSTILE, Bench
from support.processes import child
from support.programs import RUN, Calls, Upset, Way, calling
from support.waiting import Meanwhile, Patience, begun


def outcome(bench: Bench, run_id: str = RUN) -> list[str]:
    return [kind for kind in bench.kinds(run_id) if kind not in ("created", "intent", "finished", "parked")]


def expect_clean(ledger: AgentRunLedger) -> None:
    assert ledger.verify().findings == []


# --- sleeping ---------------------------------------------------------------------------------------------------------


def test_a_sleep_over_crashes_ends_at_the_time_that_the_first_start_set(bench: Bench, way: Way) -> None:
    def agent(run: Run) -> Any:
        yield run.sleep(3600)
        return 1

    ledger = bench.open()
    sleeper, started = way.agent(ledger, agent), bench.clock.now()
    begun(way, ledger, bench, sleeper)
    for _ in range(20):
        bench.clock.advance(100)
        begun(way, ledger, bench, sleeper)
    assert bench.clock.now() - started < 3600
    Meanwhile(bench, looks=10_000)
    assert way.start(ledger, sleeper) == 1
    assert 3600 <= bench.clock.now() - started < 3601
    assert bench.kinds(RUN) == ["created", "intent", "waiting", "outcome", "finished"]
    expect_clean(ledger)


def test_a_sleep_whose_time_came_while_nobody_ran_is_over_at_once(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    agent = way.agent(ledger, _sleeps(60))
    begun(way, ledger, bench, agent)
    bench.clock.advance(61)
    seen = Meanwhile(bench)
    assert way.start(ledger, agent) is None
    assert seen.looks == 0


def _sleeps(seconds: Any) -> Any:
    def sleeps(run: Run) -> Any:
        return (yield run.sleep(seconds))

    return sleeps


def _waits_for(name: str, timeout: float | None = None) -> Any:
    def waits(run: Run) -> Any:
        return (yield run.wait_for(name, timeout))

    return waits


def test_a_clock_that_is_set_back_makes_no_wait_longer(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    seen = Meanwhile(bench, lambda: bench.clock.set_wall(bench.clock.now() - 7200))
    started = bench.clock.elapsed()
    assert way.start(ledger, way.agent(ledger, _sleeps(60))) is None
    assert 60 <= bench.clock.elapsed() - started < 61
    assert seen.looks < 500


def test_a_sleep_of_nothing_is_over_at_once_and_recorded(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    seen = Meanwhile(bench)
    assert way.start(ledger, way.agent(ledger, _sleeps(0))) is None
    assert seen.looks == 0
    assert bench.kinds(RUN) == ["created", "intent", "waiting", "outcome", "finished"]


@pytest.mark.parametrize("seconds", [-1, -0.1, math.nan, math.inf, 10.0**12, True, "5", None, 10**400])
def test_a_sleep_is_a_sensible_number_of_seconds(seconds: Any, bench: Bench, way: Way) -> None:
    ledger = bench.open()
    with pytest.raises(InvalidArguments, match="nothing was written"):
        way.start(ledger, way.agent(ledger, _sleeps(seconds)))
    assert "intent" not in bench.kinds(RUN)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, True, "5"])
def test_a_timeout_is_a_sensible_number_of_seconds(seconds: Any, bench: Bench, way: Way) -> None:
    ledger = bench.open()
    with pytest.raises(InvalidArguments, match="nothing was written"):
        way.start(ledger, way.agent(ledger, _waits_for("go", seconds)))
    assert "intent" not in bench.kinds(RUN)


def test_how_long_a_program_waits_may_change_while_it_waits_and_the_first_time_counts(bench: Bench, way: Way) -> None:
    ledger, changed = bench.open(), bench.open()
    begun(way, ledger, bench, way.agent(ledger, _sleeps(10), name="sleeps"))
    Meanwhile(bench)
    started = bench.clock.now()
    assert way.start(changed, way.agent(changed, _sleeps(100_000), name="sleeps")) is None
    assert bench.clock.now() - started <= 11


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [None, 0, "", [], {"paid": 120}, "ü\x00", "x" * 5_000_000])
def test_a_signal_brings_what_was_sent_also_nothing_and_also_a_lot(payload: Any, bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    Meanwhile(bench, lambda: other.signal(RUN, "go", payload, by="ann"))
    agent = way.agent(ledger, _waits_for("go"))
    assert way.start(ledger, agent) == payload
    assert outcome(bench) == ["waiting", "signal", "outcome"]
    assert way.start(ledger, agent) == payload
    expect_clean(ledger)


def test_a_signal_may_come_before_anybody_waits_for_it(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent(run: Run) -> Any:
        ledger.signal(RUN, "go", 1)
        first = yield run.sleep(5)
        return first, (yield run.wait_for("go"))

    assert way.start(ledger, way.agent(ledger, agent, returns=tuple)) in ((None, 1), [None, 1])
    expect_clean(ledger)


def test_signals_are_taken_in_the_order_in_which_they_came_each_by_one_wait(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        first, second = (yield run.wait_for("a")), (yield run.wait_for("b"))
        return [first, second, (yield run.wait_for("a")), (yield run.wait_for("a"))]

    def send() -> None:
        for name, payload in (("a", 1), ("a", 2), ("c", 8), ("b", 9)):
            other.signal(RUN, name, payload)

    Meanwhile(bench, send, lambda: None, lambda: other.signal(RUN, "a", 3))
    waits = way.agent(ledger, agent)
    assert way.start(ledger, waits) == [1, 9, 2, 3]
    assert way.start(ledger, waits) == [1, 9, 2, 3]
    expect_clean(ledger)


@pytest.mark.parametrize("durability", ["process", "full"])
def test_two_that_wait_side_by_side_never_get_the_same_signal(durability: str, bench: Bench, way: Way) -> None:
    ledger, other = bench.open(durability=durability), bench.open()

    def agent(run: Run) -> Any:
        return (yield run.gather(*[lambda: run.wait_for("go")] * 3))

    lock = threading.Lock()
    left = [1, 2, 3]

    def send() -> None:
        with lock:
            if left:
                other.signal(RUN, "go", left.pop(0))

    Meanwhile(bench, send, send, send)
    waits = way.agent(ledger, agent)
    taken = way.start(ledger, waits)
    assert sorted(taken) == [1, 2, 3]
    assert way.start(ledger, waits) == taken
    expect_clean(ledger)


def test_a_signal_that_is_still_unread_after_a_crash_is_there(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    agent = way.agent(ledger, _waits_for("go"))
    begun(way, ledger, bench, agent)
    other.signal(RUN, "go", {"a": 1}, by="ann")
    assert way.start(ledger, agent) == {"a": 1}


def test_a_signal_to_nobody_or_to_a_run_that_has_ended_is_refused(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    with pytest.raises(RunNotFound):
        ledger.signal("nobody", "go")
    way.run(ledger, calling(lambda: _nothing(way)))
    before = bench.kinds(RUN)
    with pytest.raises(IllegalTransition):
        ledger.signal(RUN, "go")
    assert bench.kinds(RUN) == before


def _nothing(way: Way) -> Any:
    return asyncio.sleep(0) if way.is_async else None


@pytest.mark.parametrize("name", ["", "a\nb", "a" * 5000, None, 7, "\ud800"])
def test_a_signal_has_a_name_that_can_be_one(name: Any, bench: Bench, way: Way) -> None:
    ledger = bench.open()
    begun(way, ledger, bench, way.agent(ledger, _waits_for("go")))
    with pytest.raises((InvalidName, InvalidArguments)):
        ledger.signal(RUN, name)
    with pytest.raises((InvalidName, InvalidArguments)):
        way.start(ledger, way.agent(ledger, _waits_for(name), name="other"), run_id="other")
    assert outcome(bench) == ["waiting"]


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_and_payloads_of_signals_stay_data(name: str, bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    if not name.isprintable():
        name = ascii(name)
    Meanwhile(bench, lambda: other.signal(RUN, name, name))
    assert way.start(ledger, way.agent(ledger, _waits_for(name))) == name
    expect_clean(ledger)


def test_a_payload_that_cannot_be_stored_is_refused_and_nothing_is_sent(bench: Bench, way: Way) -> None:
    ledger = bench.open(payload_limit=1000)
    begun(way, ledger, bench, way.agent(ledger, _waits_for("go")))
    with pytest.raises(UnserialisableArguments):
        ledger.signal(RUN, "go", object())
    with pytest.raises(PayloadTooLarge):
        ledger.signal(RUN, "go", "x" * 1001)
    store = bench.store()
    assert store.inbox(RUN, 0) == []
    if bench.kind == "sqlite":
        store.close()


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_what_does_not_come_in_time_is_a_timeout_live_and_at_every_replay(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent(run: Run) -> Any:
        try:
            yield run.wait_for("go", 30)
        except TimeoutError as error:
            late = getattr(error, "name", None)
        return late, (yield run.wait_for("end"))

    waits = way.agent(ledger, agent)
    started = bench.clock.now()
    begun_at: list[float] = []

    def late() -> None:
        if bench.clock.now() - started > 31:
            begun_at.append(bench.clock.now())
            bench.open().signal(RUN, "go", "late")
            raise Patience

    Meanwhile(bench, *[late] * 400)
    with pytest.raises(Patience):
        way.start(ledger, waits)
    assert begun_at
    Meanwhile(bench, lambda: ledger.signal(RUN, "end", 1))
    assert list(way.start(ledger, waits)) == ["go", 1]
    expect_clean(ledger)


def test_a_signal_that_was_sent_in_time_counts_whenever_it_is_read(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    agent = way.agent(ledger, _waits_for("go", 60))
    begun(way, ledger, bench, agent)
    bench.clock.advance(50)
    other.signal(RUN, "go", "in time")
    bench.clock.advance(500)
    assert way.start(ledger, agent) == "in time"


def test_a_signal_that_was_sent_too_late_does_not_count_and_is_for_the_next_wait(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        try:
            return (yield run.wait_for("go", 60))
        except WaitTimeout:
            return ["next", (yield run.wait_for("go"))]

    waits = way.agent(ledger, agent)
    begun(way, ledger, bench, waits)
    bench.clock.advance(61)
    other.signal(RUN, "go", "late")
    assert way.start(ledger, waits) == ["next", "late"]
    assert way.start(ledger, waits) == ["next", "late"]


def test_a_timeout_that_leaves_the_program_is_not_lifted_by_a_signal_that_comes_later(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    agent = way.agent(ledger, _waits_for("go", 5))
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            way.start(ledger, agent)
        other.signal(RUN, "go", 1)
    assert bench.kinds(RUN).count("outcome") == 1
    expect_clean(ledger)


# --- nobody holds what waits ------------------------------------------------------------------------------------------


def test_nobody_owns_a_run_that_waits(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    owners: list[Any] = []

    def look() -> None:
        owners.append(other.get_run(RUN).owner)
        store = bench.store()
        head = store.head(RUN)
        owners.append(head.owner if head is not None else "?")
        if bench.kind == "sqlite":
            store.close()

    Meanwhile(bench, look, look, lambda: other.signal(RUN, "go", 1))
    assert way.start(ledger, way.agent(ledger, _waits_for("go"))) == 1
    assert owners == [None] * 4


def test_a_run_one_of_whose_branches_works_is_held_while_the_others_wait(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    owners = []

    def work() -> int:
        for _ in range(3):
            bench.clock.sleep(0.05)
        owners.append(other.get_run(RUN).owner)
        other.signal(RUN, "go", 5)
        return 1

    tool = way.tool(ledger, work, effect=Effect.READ)

    def agent(run: Run) -> Any:
        return (yield run.gather(lambda: run.wait_for("go"), tool))

    Meanwhile(bench, looks=20_000, always=lambda: None)
    assert way.start(ledger, way.agent(ledger, agent)) == [5, 1]
    assert owners[0] is not None
    expect_clean(ledger)


def test_another_process_takes_over_what_waits_and_the_former_one_replays_what_that_did(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    calls = Calls()

    def register(at: AgentRunLedger) -> Any:
        tool = way.tool(at, lambda: len([calls(at)]), name="work", effect=Effect.READ)

        def agent(run: Run) -> Any:
            told = yield run.wait_for("go")
            yield tool_of[at]()
            return told

        tool_of[at] = tool
        return way.agent(at, agent)

    tool_of: dict[AgentRunLedger, Any] = {}
    here, there = register(ledger), register(other)
    results: list[Any] = []

    def take_over() -> None:
        other.signal(RUN, "go", "x")
        thread = threading.Thread(target=lambda: results.append(way.start(other, there)))
        thread.start()
        thread.join()

    Meanwhile(bench, take_over)
    results.append(way.start(ledger, here))
    assert results == ["x", "x"]
    assert len(calls.seen) == 1
    expect_clean(ledger)


def test_a_run_that_waits_can_be_cancelled_and_whoever_waits_hears_of_it_at_once(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    seen = Meanwhile(bench, lambda: other.cancel(RUN, by="ann", reason="not needed"))
    with pytest.raises(RunClosed, match="CANCELLED"):
        way.start(ledger, way.agent(ledger, _waits_for("go")))
    assert seen.looks == 1
    run = ledger.get_run(RUN)
    assert (run.status, run.cause, run.owner) == ("CANCELLED", "not needed", None)
    expect_clean(ledger)


def test_the_ledger_that_waits_itself_may_cancel_too(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    Meanwhile(bench, lambda: ledger.cancel(RUN))
    with pytest.raises(RunClosed, match="CANCELLED"):
        way.start(ledger, way.agent(ledger, _waits_for("go")))
    expect_clean(ledger)


# --- what else holds for waits ----------------------------------------------------------------------------------------


def test_a_wait_is_no_attempt_however_often_its_program_is_started(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    agent = way.agent(ledger, _waits_for("go"))
    for _ in range(20):
        begun(way, ledger, bench, agent)
    assert bench.kinds(RUN) == ["created", "intent", "waiting"]
    ledger.signal(RUN, "go", 1)
    assert way.start(ledger, agent) == 1


def test_equal_waits_trip_no_breaker_and_count_as_steps(bench: Bench, way: Way) -> None:
    ledger = bench.open(max_steps=8)

    def agent(run: Run) -> Any:
        for _ in range(8):
            yield run.sleep(1)
        yield run.sleep(1)

    Meanwhile(bench)
    with pytest.raises(BudgetExceededException):
        way.start(ledger, way.agent(ledger, agent))
    assert ledger.get_run(RUN).total_steps == 8
    expect_clean(ledger)


def test_signals_that_nobody_takes_use_up_no_limit(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(max_steps=2), bench.open()

    def agent(run: Run) -> Any:
        told = yield run.wait_for("go")
        run.now()
        return told

    Meanwhile(bench, lambda: [other.signal(RUN, "noise") for _ in range(60)], lambda: other.signal(RUN, "go", 1))
    assert way.start(ledger, way.agent(ledger, agent)) == 1
    expect_clean(ledger)


def test_a_run_that_was_sent_a_lot_is_parked_like_others(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(max_steps=2), bench.open()

    def agent(run: Run) -> Any:
        yield run.wait_for("go")
        raise Upset

    Meanwhile(bench, lambda: [other.signal(RUN, "noise") for _ in range(60)], lambda: other.signal(RUN, "go", 1))
    with pytest.raises(Upset):
        way.start(ledger, way.agent(ledger, agent))
    assert ledger.get_run(RUN).status == "BLOCKED"


def test_a_deadline_refuses_what_comes_behind_a_wait(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    deadline = datetime.fromtimestamp(bench.clock.now() + 60, UTC)

    def agent(run: Run) -> Any:
        yield run.sleep(100)
        yield run.sleep(1)

    Meanwhile(bench)
    with pytest.raises(BudgetExceededException, match="deadline"):
        way.start(ledger, way.agent(ledger, agent, budget=Budget(deadline=deadline)))
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    expect_clean(ledger)


def test_a_step_must_not_wait_for_its_own_run(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    asked: list[Any] = []

    def agent(run: Run) -> Any:
        def work() -> Any:
            for wait in (lambda: run.sleep(1), lambda: run.wait_for("go"), lambda: run.approve("pay", {})):
                with pytest.raises(UnorderedStep):
                    wait()
                asked.append(wait)

        return (yield run.step("work", {}, way.function(work), effect=Effect.READ))

    way.start(ledger, way.agent(ledger, agent))
    assert len(asked) == 3
    assert "waiting" not in bench.kinds(RUN)


def test_a_wait_for_another_name_at_the_same_place_is_a_divergence(bench: Bench, way: Way) -> None:
    ledger, changed = bench.open(), bench.open()
    begun(way, ledger, bench, way.agent(ledger, _waits_for("go")))
    with pytest.raises(ReplayDivergence):
        way.start(changed, way.agent(changed, _waits_for("come"), name="waits"))
    assert bench.kinds(RUN) == ["created", "intent", "waiting"]


def test_a_wait_that_its_program_gives_up_is_cancelled_at_every_replay(bench: Bench) -> None:
    ledger, other = bench.open(), bench.open()

    @ledger.agent()
    async def agent(run: Run) -> list[Any]:
        with suppress(TimeoutError):
            await asyncio.wait_for(run.wait_for("go"), 0.01)
        return ["gave up", await run.wait_for("go")]

    bench.clock.sleep = bench.clock.advance  # type: ignore[method-assign] # looking up is not what ends it
    sent = threading.Event()

    def advance(seconds: float) -> None:
        bench.clock.advance(seconds)
        if "outcome" in bench.kinds(RUN) and not sent.is_set():
            sent.set()
            other.signal(RUN, "go", 1)

    bench.clock.sleep = advance  # type: ignore[method-assign]
    assert ledger.run(agent, run_id=RUN) == ["gave up", 1]
    assert ledger.run(agent, run_id=RUN) == ["gave up", 1]
    expect_clean(ledger)


@pytest.mark.parametrize("first", ["signal", "step"])
def test_which_of_a_wait_and_a_step_came_first_is_the_same_at_every_replay(first: str, bench: Bench) -> None:
    ledger, other = bench.open(), bench.open()

    def program(at: AgentRunLedger) -> Any:
        @at.agent(name="race")
        async def race(run: Run) -> list[str]:
            came: list[str] = []

            async def waits() -> None:
                await run.wait_for("go")
                came.append("signal")

            async def works() -> None:
                gate = asyncio.Event()

                async def work() -> int:
                    if first == "step":
                        return 1
                    while "outcome" not in bench.kinds(RUN):
                        await asyncio.sleep(0)
                    gate.set()
                    return 1

                await run.step("work", {}, work, effect=Effect.READ)
                came.append("step")
                if first == "step":
                    other.signal(RUN, "go")

            await run.gather(waits, works)
            await run.sleep(0 if came[0] == first else 1)
            if not done:
                raise KeyboardInterrupt
            return came

        return race

    done: list[int] = []
    Meanwhile(bench, *([lambda: other.signal(RUN, "go")] if first == "signal" else []), looks=5000)
    with pytest.raises(KeyboardInterrupt):
        ledger.run(program(ledger), run_id=RUN)
    written = bench.kinds(RUN)
    done.append(1)
    for _ in range(3):
        again = bench.open()
        came = again.run(program(again), run_id=RUN)
        assert came[0] == first
    assert bench.kinds(RUN)[: len(written) - 1] == written[:-1]
    expect_clean(ledger)


def test_a_map_of_waits_gives_each_what_was_sent_to_it(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        def item(name: str) -> Any:
            return run.wait_for(name)

        async def aitem(name: str) -> Any:
            return await run.wait_for(name)

        return (yield run.map(aitem if way.is_async else item, ["a", "b", "c"]))

    Meanwhile(bench, *[lambda n=n: other.signal(RUN, n, n.upper()) for n in "cab"])
    waits = way.agent(ledger, agent)
    assert way.start(ledger, waits) == ["A", "B", "C"]
    assert way.start(ledger, waits) == ["A", "B", "C"]
    expect_clean(ledger)


def test_a_run_that_is_open_in_a_with_block_waits_too(bench: Bench) -> None:
    ledger, other = bench.open(), bench.open()
    Meanwhile(bench, lambda: other.signal(RUN, "go", 7))
    with ledger.open_run("wait", RUN) as run:
        run.result = run.wait_for("go")
    assert ledger.get_run(RUN).result == 7
    expect_clean(ledger)


# --- approvals --------------------------------------------------------------------------------------------------------

PAYMENT = {"to": "ACME", "amount": 120}


def _asks(arguments: Any = PAYMENT, timeout: float | None = None, times: int = 1) -> Any:
    def asks(run: Run) -> Any:
        said = []
        for _ in range(times):
            approval = yield run.approve("pay", arguments, timeout)
            said.append([approval.by, approval.reason, approval.at, approval.arguments])
        return said

    return asks


def test_an_approval_is_of_the_exact_bytes_that_were_shown(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    at: list[float] = []

    def approve() -> None:
        (request,) = other.approvals()
        assert (request.run_id, request.name, request.expires_at) == (RUN, "pay", None)
        assert request.arguments_json == '{"arguments":{"amount":120,"to":"ACME"},"name":"pay"}'
        assert other.approvals(RUN) == [request]
        at.append(bench.clock.now())
        other.approve(RUN, "pay", request.digest, by="ann", reason="it is right")

    Meanwhile(bench, approve)
    agent = way.agent(ledger, _asks())
    assert way.start(ledger, agent) == [["ann", "it is right", at[0], PAYMENT]]
    assert way.start(ledger, agent) == [["ann", "it is right", at[0], PAYMENT]]
    assert other.approvals() == []
    (line,) = [line for line in ledger.trace(RUN) if line.event == "signal"]
    assert "ann" in line.text
    expect_clean(ledger)


def test_who_says_no_is_heard_with_his_reason_also_at_replay(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def deny() -> None:
        (request,) = other.approvals()
        other.deny(RUN, "pay", request.digest, by="bob", reason="wrong account")

    Meanwhile(bench, deny)
    agent = way.agent(ledger, _asks())
    for _ in range(3):
        with pytest.raises(ApprovalDenied, match="wrong account") as denied:
            way.start(ledger, agent)
        assert (denied.value.by, denied.value.reason, denied.value.name) == ("bob", "wrong account", "pay")
    assert bench.kinds(RUN).count("outcome") == 1
    expect_clean(ledger)


@pytest.mark.parametrize("wrong", ["digest", "name", "run", "prefix"])
def test_an_answer_to_what_is_not_asked_is_a_mismatch_and_writes_nothing(wrong: str, bench: Bench, way: Way) -> None:
    ledger = bench.open()
    begun(way, ledger, bench, way.agent(ledger, _asks()))
    (request,) = ledger.approvals()
    digest = {"digest": "0" * 64, "prefix": request.digest[:12]}.get(wrong, request.digest)
    name = "refund" if wrong == "name" else "pay"
    begun(way, ledger, bench, way.agent(ledger, _waits_for("x")), run_id="other")
    for answer in (ledger.approve, ledger.deny):
        with pytest.raises(ApprovalMismatch):
            answer("other" if wrong == "run" else RUN, name, digest, by="ann")
    store = bench.store()
    assert store.inbox(RUN, 0) == []
    if bench.kind == "sqlite":
        store.close()


def test_other_arguments_in_the_code_are_a_divergence_and_no_approval_is_used(bench: Bench, way: Way) -> None:
    ledger, changed = bench.open(), bench.open()
    begun(way, ledger, bench, way.agent(ledger, _asks()))
    (request,) = ledger.approvals()
    ledger.approve(RUN, "pay", request.digest, by="ann")
    with pytest.raises(ReplayDivergence, match="amount"):
        way.start(changed, way.agent(changed, _asks({"to": "ACME", "amount": 9999})))


def test_nobody_who_answers_in_time_is_a_timeout_and_later_answers_are_refused(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    agent = way.agent(ledger, _asks(timeout=60))
    begun(way, ledger, bench, agent)
    (request,) = other.approvals()
    assert request.expires_at == request.asked_at + 60
    bench.clock.advance(61)
    with pytest.raises(ApprovalMismatch):
        other.approve(RUN, "pay", request.digest, by="ann")
    with pytest.raises(WaitTimeout):
        way.start(ledger, agent)
    assert other.approvals() == []


def test_approving_twice_approves_one_request_and_not_the_next_equal_one(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def twice() -> None:
        (request,) = other.approvals()
        for _ in range(2):
            other.approve(RUN, "pay", request.digest, by="ann")

    Meanwhile(bench, twice)
    with pytest.raises(Patience):
        way.start(ledger, way.agent(ledger, _asks(times=2)))
    assert len(other.approvals()) == 1
    expect_clean(ledger)


def test_of_two_requests_of_one_name_each_gets_the_answer_to_its_own_arguments(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def ask(run: Run, amount: int) -> Any:
        def one() -> Any:
            return run.approve("pay", {"amount": amount})

        return one

    def agent(run: Run) -> Any:
        first, second = yield run.gather(ask(run, 1), ask(run, 2))
        return [[each.by, each.arguments["amount"]] for each in (first, second)]

    answering = threading.Lock()

    def answer() -> None:
        asked = other.approvals()
        if len(asked) == 2 and answering.acquire(blocking=False):  # once, by whichever of the two looks first
            for request in reversed(asked):
                assert request.arguments_json is not None
                by = "big" if '"amount":2' in request.arguments_json else "small"
                other.approve(RUN, "pay", request.digest, by=by)

    Meanwhile(bench, looks=20_000, always=answer)
    assert way.start(ledger, way.agent(ledger, agent)) == [["small", 1], ["big", 2]]
    expect_clean(ledger)


def test_a_plain_signal_approves_nothing_and_an_approval_is_no_signal(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    agent = way.agent(ledger, _asks())
    begun(way, ledger, bench, agent)
    other.signal(RUN, "pay", {"by": "mallory"})
    begun(way, ledger, bench, agent)
    assert len(other.approvals()) == 1


# --- real processes ---------------------------------------------------------------------------------------------------

WAITING = """
ledger = AgentRunLedger(arguments[0])

@ledger.agent()
def agent(run: Run):
    tell("begun")
    told = run.wait_for("go", 3600)
    run.sleep(0.01)
    return told

tell(ledger.run(agent, run_id="run"))
"""


def test_a_process_that_is_killed_while_its_run_waits_leaves_it_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with child(WAITING, path) as first:
        assert first.hear() == "begun"
        with AgentRunLedger(path) as ledger:
            while "waiting" not in [line.event for line in ledger.trace("run")]:
                pass
        first.send(signal.SIGKILL)
        assert first.ends() == -signal.SIGKILL
    with AgentRunLedger(path) as ledger:
        ledger.signal("run", "go", {"a": 1})
    with child(WAITING, path) as second:
        assert second.hear() == "begun"
        assert second.hear() == {"a": 1}
        assert second.ends() == 0
    with AgentRunLedger(path) as ledger:
        assert ledger.get_run("run").status == "COMPLETED"
        expect_clean(ledger)


def test_a_signal_and_a_cancel_reach_a_run_that_waits_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with child(WAITING, path) as waiting, AgentRunLedger(path) as ledger:
        assert waiting.hear() == "begun"
        ledger.signal("run", "go", 7, by="ann")
        assert waiting.hear() == 7
        assert waiting.ends() == 0
        expect_clean(ledger)
