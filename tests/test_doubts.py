"""A doubt is a step's, not an attempt's: no later failure disproves that an earlier attempt took effect."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    ApprovalMismatch,
    BudgetExceededException,
    Effect,
    IllegalTransition,
    InvalidArguments,
    LeaseLost,
    Receipt,
    RetryPolicy,
    RunClosed,
    RunOwned,
    StepFailed,
    StepInDoubt,
    StoreCorrupt,
    StoreFull,
    current_run,
    current_step,
)
from agent_run_ledger.rules import canonical
from support.ledgers import RUN, Bench, Died, never, program, raising


class TooMany(Exception):
    """A receiver that says no for now."""

    status_code = 429


class Keys:
    """A tool that fails in one way after the other, and then returns; the keys it was called with."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[str] = []

    def __call__(self, amount: int) -> Any:
        self.seen.append(current_step().idempotency_key)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_second_try_behind_a_timeout_and_a_refusal_has_the_first_key(bench: Bench) -> None:
    tool, options = Keys(TimeoutError(), TooMany(), "paid"), {"effect": Effect.IDEMPOTENT}
    retry = RetryPolicy(max_attempts=2, base=0.0)
    ledger = program(bench)
    with pytest.raises(StepFailed, match="TooMany"):
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, retry=retry, **options)  # type: ignore[arg-type]
    more = RetryPolicy(max_attempts=3, base=0.0)
    assert ledger.execute_step(RUN, "pay", {"amount": 5}, tool, retry=more, **options) == "paid"  # type: ignore[arg-type]
    assert len(set(tool.seen)) == 1


def test_a_second_try_behind_a_crash_and_a_refusal_has_the_first_key(bench: Bench) -> None:
    tool = Keys(Died(), TooMany(), "paid")
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT)
    bench.owners_die()
    ledger = program(bench)
    with pytest.raises(StepFailed, match="TooMany"):
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT)
    assert ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT) == "paid"
    assert len(set(tool.seen)) == 1


def test_a_refusal_alone_leaves_no_doubt_and_a_second_try_is_another_call(bench: Bench) -> None:
    tool = Keys(TooMany(), "paid")
    ledger = program(bench)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT)
    assert ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT) == "paid"
    assert len(set(tool.seen)) == 2


def test_a_retry_past_the_key_window_is_not_sent_whatever_the_last_error_said(bench: Bench) -> None:
    tool = Keys(TimeoutError(), TooMany())
    retry = RetryPolicy(max_attempts=5, base=100.0, cap=100.0, jitter="decorrelated")
    with pytest.raises(StepInDoubt, match="forgotten"):
        program(bench).execute_step(
            RUN, "pay", {"amount": 5}, tool, effect=Effect.IDEMPOTENT, retry=retry, key_window=150.0
        )
    assert len(tool.seen) == 2


@pytest.mark.parametrize("error", [ValueError("cannot read the answer"), RuntimeError("500")])
def test_a_second_try_of_a_mutation_that_failed_without_proof_is_asked_for_first(
    bench: Bench, error: Exception
) -> None:
    tool = Keys(error)
    asked: list[str] = []

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        asked.append(key)
        return Receipt.found("paid")

    ledger = program(bench)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, receipt=receipt)
    assert ledger.execute_step(RUN, "pay", {"amount": 5}, tool, receipt=receipt) == "paid"
    assert asked == tool.seen


def test_taking_over_a_doubt_is_no_attempt(bench: Bench) -> None:
    answers = [Receipt.absent(), Receipt.absent()]
    tool = Keys(KeyboardInterrupt(), "paid")
    ledger, options = program(bench), {"receipt": lambda key, arguments: answers.pop(0)}
    retry = RetryPolicy(max_attempts=2, base=0.0)
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, retry=retry, **options)  # type: ignore[arg-type]
    assert ledger.execute_step(RUN, "pay", {"amount": 5}, tool, retry=retry, **options) == "paid"  # type: ignore[arg-type]
    assert len(tool.seen) == 2


# --- what a receipt may do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_receipt_calls_is_no_step_of_the_run(bench: Bench, is_async: bool) -> None:
    ledger = bench.open()
    looked: list[str] = []

    @ledger.tool(effect=Effect.READ)
    def look(key: str) -> str:
        looked.append(key)
        return "seen"

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        assert current_step().idempotency_key == key
        return Receipt.found(look(key))

    async def areceipt(key: str, arguments: dict[str, Any]) -> Receipt:
        await asyncio.sleep(0)
        return receipt(key, arguments)

    if is_async:

        @ledger.tool(receipt=areceipt)
        async def pay() -> str:
            raise TimeoutError

        @ledger.agent()
        async def agent() -> list[str]:
            return [await pay(), look("again")]
    else:

        @ledger.tool(receipt=receipt)
        def pay() -> str:
            raise TimeoutError

        @ledger.agent()
        def agent() -> list[str]:
            return [pay(), look("again")]

    assert ledger.run(agent, run_id=RUN) == ["seen", "seen"]
    assert [step.tool_name for step in ledger.steps(RUN)] == ["pay", "look"]


def test_a_run_that_was_taken_over_while_its_receiver_was_asked_is_not_written_to(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        bench.clock.sleep(1000.0)
        other.resolve(RUN, 1, output="theirs", by="ann")
        return Receipt.absent()

    with pytest.raises((LeaseLost, RunOwned)):
        ledger.execute_step(RUN, "pay", {}, raising(TimeoutError()), receipt=receipt)
    assert other.steps(RUN)[0].output_json == '"theirs"'
    assert ledger.execute_step(RUN, "pay", {}, never, receipt=receipt) == "theirs"
    assert other.verify().findings == []


# --- what is sent, beside what waits ----------------------------------------------------------------------------------


def test_a_signal_is_not_held_up_by_what_waits_for_a_step_in_flight(tmp_path: Path) -> None:
    path, going = tmp_path / "agent.db", threading.Event()
    taken: list[Any] = []
    with AgentRunLedger(path, durability="process") as ledger, AgentRunLedger(path, durability="process") as other:
        is_slow = threading.Event()

        @ledger.tool(effect=Effect.READ)
        def slow() -> int:
            is_slow.set()
            assert going.wait(30)
            return 1

        def waits() -> Any:
            taken.append(current_run().wait_for("word", timeout=30))
            going.set()
            return taken[0]

        @ledger.agent()
        def agent() -> Any:
            return current_run().gather(slow, waits)

        program = threading.Thread(target=lambda: taken.append(ledger.run(agent, run_id="run")))
        program.start()
        assert is_slow.wait(30)
        other.release("run", by="ann")  # is to be declined, once nothing is in flight
        other.signal("run", "word", "go")
        program.join(30)
        assert not program.is_alive()
        assert taken == ["go", [1, "go"]]
        events = [line.event for line in other.trace("run")]
        assert events.index("signal") < events.index("declined")
        assert other.verify().findings == []


def test_what_a_newer_version_asks_is_declined_and_holds_nothing_up(bench: Bench) -> None:
    ledger = program(bench)
    ledger._store.post(RUN, "dance", b'{"how":"well"}', "ann", 1.0)
    ledger._store.post(RUN, "cancel", b'{"by":"ann","reason":"enough"}', "ann", 2.0)
    with pytest.raises(RunClosed, match="CANCELLED"):
        ledger.execute_step(RUN, "t", {}, never)
    assert [line.event for line in ledger.trace(RUN)][-2:] == ["declined", "cancelled"]
    assert ledger.verify().findings == []


def test_a_refused_act_does_not_take_the_run_from_its_program(bench: Bench) -> None:
    ledger = bench.open()
    with ledger.open_run("goal", RUN) as run:
        run.step("t", {}, lambda: 1)
        with pytest.raises(IllegalTransition):
            ledger.release(RUN)
        assert ledger.get_run(RUN).owner is not None
        with pytest.raises(RunOwned):
            bench.open().create_run("goal", RUN)


def test_recover_in_an_event_loop_says_that_it_cannot(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def agent() -> None: ...

    async def main() -> None:
        with pytest.raises(InvalidArguments, match="event loop"):
            ledger.recover()

    asyncio.run(main())


# --- room -------------------------------------------------------------------------------------------------------------


class Disk:
    """What the system says of a disk, as a test wants it."""

    f_blocks, f_frsize = 1000, 1

    def __init__(self, free: int) -> None:
        self.f_bavail = free


@pytest.mark.parametrize("is_async", [False, True])
def test_below_the_limit_nothing_new_is_dispatched_and_what_runs_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    disk = Disk(1000)
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open(min_free_bytes=500)

        def fills() -> str:
            disk.f_bavail = 10
            bench.clock.sleep(2.0)
            return "filled"

        if is_async:

            @ledger.agent()
            async def agent() -> list[Any]:
                run = current_run()
                return [await run.step("fills", {}, fills), await run.step("next", {}, lambda: 2)]
        else:

            @ledger.agent()
            def agent() -> list[Any]:
                run = current_run()
                return [run.step("fills", {}, fills), run.step("next", {}, lambda: 2)]

        with pytest.raises(StoreFull, match="10 bytes free"):
            ledger.run(agent, run_id=RUN)
        assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED"]
        bench.clock.sleep(2.0)
        with pytest.raises(StoreFull):
            ledger.run(agent, run_id=RUN)
        disk.f_bavail = 1000
        bench.clock.sleep(2.0)
        assert ledger.run(agent, run_id=RUN) == ["filled", 2]
        assert ledger.verify().findings == []


# --- what a reader sees -----------------------------------------------------------------------------------------------


def test_a_run_parked_beside_a_call_that_died_with_its_process_is_blocked_and_says_why(bench: Bench) -> None:
    def start() -> None:
        ledger, is_asked = bench.open(), asyncio.Event()

        @ledger.tool(kind="model")
        async def ask() -> None:
            is_asked.set()
            await asyncio.Event().wait()

        @ledger.tool(effect=Effect.MUTATE)
        async def pay() -> None:
            await is_asked.wait()
            raise Died

        @ledger.agent()
        async def agent() -> Any:
            return await asyncio.gather(ask(), pay())

        ledger.run(agent, run_id=RUN)

    with pytest.raises(Died):
        start()
    bench.owners_die()
    with pytest.raises(StepInDoubt):
        start()
    record = bench.open().get_run(RUN)
    assert record.status == "BLOCKED"
    assert "'pay', is in doubt" in (record.cause or "")
    assert bench.open().verify().findings == []


def test_what_goes_on_beside_a_parked_step_does_not_hide_why_the_run_stands(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def agent() -> Any:
        run, is_called = current_run(), asyncio.Event()

        async def others() -> None:
            await is_called.wait()
            for number in range(3):
                await run.step("look", {"number": number}, lambda number: number, effect=Effect.READ)

        def breaks() -> None:
            is_called.set()
            raise ConnectionResetError

        return await run.gather(lambda: run.step("pay", {}, breaks, effect=Effect.MUTATE), others)

    with pytest.raises(StepInDoubt):
        ledger.run(agent, run_id=RUN)
    kinds = bench.kinds(RUN)
    assert "intent" in kinds[kinds.index("parked") :], "nothing went on beside it"
    record = ledger.get_run(RUN)
    assert (record.status, "ConnectionResetError" in (record.cause or "")) == ("BLOCKED", True)
    assert ledger.verify().findings == []


def test_a_signal_does_not_hide_why_a_run_was_parked(bench: Bench) -> None:
    ledger = bench.open()

    def program() -> None:
        with ledger.open_run("goal", RUN) as run:
            run.step("t", {}, lambda: 1)
            raise KeyError("no such invoice")

    for _ in range(2):
        with pytest.raises(KeyError):
            program()
        ledger.signal(RUN, "word")
    ledger.create_run("goal", RUN)
    ledger.detach(RUN)
    assert ledger.get_run(RUN).cause == "KeyError: 'no such invoice'"


def test_a_signal_whose_wait_was_interrupted_is_for_the_next_wait(tmp_path: Path) -> None:
    is_taken_and_missed = 0
    for turns in range(40):
        with AgentRunLedger(tmp_path / f"{turns}.db", durability="process") as ledger:

            @ledger.agent()
            async def agent(turns: int) -> Any:
                run = current_run()
                await run.step("send", {}, lambda: ledger.signal("run", "word", turns), effect=Effect.READ)
                waits = asyncio.create_task(run.wait_for("word"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                waits.cancel()
                (got,) = await asyncio.gather(waits, return_exceptions=True)
                return got if got == turns else await run.wait_for("word", timeout=5)

            assert ledger.run(agent, turns, run_id="run") == turns
            events = [line.event for line in ledger.trace("run") if line.tool_name == "run.wait_for"]
            is_taken_and_missed += events.count("missed") > 0 and events.count("completed") == 2
            assert ledger.verify().findings == []
    assert is_taken_and_missed, "no turn lies between a signal's arrival and its delivery"


def test_a_redriven_run_finds_the_signals_that_nobody_took(bench: Bench) -> None:
    ledger = bench.open(max_steps=1)

    @ledger.agent()
    def agent() -> Any:
        run = current_run()
        run.step("t", {}, lambda: ledger.signal(run.run_id, "paid", "yes"), effect=Effect.READ)
        return run.wait_for("paid", timeout=5)

    with pytest.raises(BudgetExceededException):
        ledger.run(agent, run_id=RUN)
    new = ledger.redrive(RUN, max_steps=10)
    assert ledger.run(agent, run_id=new) == "yes"
    assert ledger.verify().findings == []


def test_a_run_whose_step_is_in_flight_is_not_forked_behind_it(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()

    def forks() -> str:
        with pytest.raises(IllegalTransition, match="in flight"):
            other.fork(RUN, 2)
        assert other.steps(other.fork(RUN, 1)) == []
        return "done"

    assert ledger.execute_step(RUN, "t", {}, forks) == "done"


def test_an_answer_to_one_request_is_none_to_a_later_equal_one(bench: Bench) -> None:
    ledger, other = bench.open(), bench.open()
    told: list[Any] = []
    asked: list[Any] = []

    @ledger.agent()
    def agent() -> list[str]:
        run = current_run()
        return [run.approve("pay", {"amount": 5}, timeout=5).by for _ in range(2)]

    def sleep(seconds: float) -> None:
        requests = other.approvals(RUN)
        if requests and not told:
            told.append(requests[0])
            other.approve(RUN, "pay", requests[0].digest, position=requests[0].position, by="ann")
        elif requests and requests[0].position != told[0].position and not asked:
            asked.append(requests[0])
            with pytest.raises(ApprovalMismatch):  # a second click on the first
                other.approve(RUN, "pay", told[0].digest, position=told[0].position, by="ann")
            other.approve(RUN, "pay", requests[0].digest, position=requests[0].position, by="bob")
        moves(seconds)

    moves, bench.clock.sleep = bench.clock.sleep, sleep  # type: ignore[method-assign]
    assert ledger.run(agent, run_id=RUN) == ["ann", "bob"]


def test_an_agent_that_ends_with_more_than_an_exception_stops_no_other_run(bench: Bench) -> None:
    class Odd(BaseException):
        """Nobody expects it."""

    ledger = bench.open()

    @ledger.agent()
    def agent(kind: str) -> str:
        if kind != "good":
            raise {"odd": Odd, "exit": SystemExit, "closed": GeneratorExit}[kind]
        return kind

    for number, kind in enumerate(("odd", "exit", "closed", "good")):
        draft = agent.registered.created({"kind": kind}, ledger, None)  # type: ignore[attr-defined]
        run = ledger._leases.create(f"run {number}", [draft])
        assert run is not None
        ledger._leases.give_back(run)
    for _ in range(2):  # it may be meant for whoever recovers; the next time its run comes last
        with pytest.raises(SystemExit):
            ledger.recover()
    assert [run.status for run in ledger.runs()] == ["BLOCKED", "BLOCKED", "BLOCKED", "COMPLETED"]


def test_a_recorded_output_that_was_damaged_is_named_where_it_is_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        ledger.create_run("goal", "run")
        ledger.execute_step("run", "t", {}, lambda: "an output")
    damaged = sqlite3.connect(path)
    for (name,) in damaged.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        damaged.execute(f"DROP TRIGGER {name}")
    damaged.execute("UPDATE entries SET payload = X'FF' WHERE kind = 'outcome'")
    damaged.commit()
    damaged.close()
    with AgentRunLedger(path) as ledger:
        ledger.create_run("goal", "run")
        with pytest.raises(StoreCorrupt, match=r"step 1 \('t'\)"):
            ledger.execute_step("run", "t", {}, never)


def test_an_answer_that_comes_when_its_request_is_over_is_declined(bench: Bench) -> None:
    ledger, other = bench.open(), bench.open()
    first: list[Any] = []

    @ledger.agent()
    def agent() -> list[str]:
        run = current_run()
        return [run.approve("pay", {"amount": 5}, timeout=50).by for _ in range(2)]

    def sleep(seconds: float) -> None:
        (request,) = other.approvals(RUN)
        if not first:
            first.append(request)
            other.approve(RUN, "pay", request.digest, position=request.position, by="ann")
        elif request.position != first[0].position and len(first) == 1:
            first.append(request)  # posted when the first request still stood, and read now
            said = {"name": "pay", "digest": request.digest, "approved": True, "reason": "", "by": "eve"}
            late = canonical.encode({**said, "position": first[0].position})
            other._store.post(RUN, "approval", late, "eve", bench.clock.now())
        elif len(first) == 2 and "declined" in bench.kinds(RUN):
            first.append(request)
            other.approve(RUN, "pay", request.digest, by="bob")
        moves(seconds)

    moves, bench.clock.sleep = bench.clock.sleep, sleep  # type: ignore[method-assign]
    assert ledger.run(agent, run_id=RUN) == ["ann", "bob"]
