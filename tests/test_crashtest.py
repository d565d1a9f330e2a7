"""crashtest finds what a crash would do to a user's flow, names it, says what to declare, and is quiet where all is well."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import agent_run_ledger
from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    InvalidArguments,
    Receipt,
    RetryPolicy,
    Run,
    RunLedger,
    Step,
    WaitTimeout,
    current_run,
    current_step,
)
from agent_run_ledger.drivers.leases import Leases
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine import recovery
from agent_run_ledger.testing import MemoryStore, Report, Trouble, crashtest
from agent_run_ledger.testing.clock import SkippingClock
from agent_run_ledger.testing.crashes import spread
from support.programs import Way

AFTER_THE_CHARGE = "after the call of step 2 'charge', before its outcome"


class Bank:
    """The outside world: it keeps every charge, and those with a key once for each key."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, int]] = []

    def charge(self, amount: int, key: str | None = None) -> str:
        if key is None or all(key != known for known, _ in self.charges):
            self.charges.append((key or "without a key", amount))
        return f"charged {amount}"

    def witness(self) -> list[tuple[str, int]]:
        return self.charges

    def receipt(self, key: str, arguments: dict[str, Any]) -> Receipt:
        found = [amount for known, amount in self.charges if known == key]
        return Receipt.found(f"charged {found[0]}") if found else Receipt.absent()


@pytest.fixture
def ledger() -> AgentRunLedger:
    """What the user's module has at its top level. Nothing of a crashtest may come into it."""
    return AgentRunLedger(MemoryStore())


@pytest.fixture
def bank() -> Bank:
    return Bank()


def shop(ledger: AgentRunLedger, way: Way, charge: Callable[[int], str], **options: Any) -> Callable[..., Any]:
    """An agent: a model is asked, a charge is made, the model is asked again."""
    ask = way.tool(ledger, _ask, kind="model")
    tool = way.tool(ledger, _named(charge, "charge"), **options)

    def agent(amount: int) -> Any:
        plan = yield ask(f"charge {amount}?")
        done = yield tool(amount)
        return [plan, done, (yield ask(f"{done}, thank you"))]

    return way.agent(ledger, agent)


def _ask(question: str) -> str:
    return f"yes: {question}"


def _named(function: Callable[[int], str], name: str) -> Callable[[int], str]:
    def call(amount: int) -> str:
        return function(amount)

    call.__name__ = name
    return call


def tools(found: list[Trouble]) -> set[str | None]:
    return {trouble.tool_name for trouble in found}


# --- charges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_witness", [False, True], ids=["alone", "with a witness"])
def test_a_charge_without_a_key_is_found_and_named(
    ledger: AgentRunLedger, way: Way, bank: Bank, has_witness: bool
) -> None:
    report = crashtest(shop(ledger, way, bank.charge), 5, witness=bank.witness if has_witness else None)
    assert not report.ok
    assert [(trouble.boundary, trouble.tool_name) for trouble in report.doubled] == [(AFTER_THE_CHARGE, "charge")]
    assert (report.repeated, report.differing, report.parked, report.broken) == ([], [], [], [])
    (advice,) = report.advice
    assert advice.startswith("'charge' declares no effect and was dispatched twice: declare effect=Effect.IDEMPOTENT")
    assert "receipt=" in advice
    with pytest.raises(AssertionError, match="crashtest of 'agent': FAILED"):
        report.check()


@pytest.mark.parametrize("has_witness", [False, True], ids=["alone", "with a witness"])
def test_a_charge_with_a_key_that_the_receiver_knows_again_passes(
    ledger: AgentRunLedger, way: Way, bank: Bank, has_witness: bool
) -> None:
    agent = shop(
        ledger, way, lambda amount: bank.charge(amount, current_step().idempotency_key), effect=Effect.IDEMPOTENT
    )
    report = crashtest(agent, 5, witness=bank.witness if has_witness else None)
    assert report == Report(ok=True, flow="agent", boundaries=report.boundaries, stopped_at=report.boundaries, calls=3)
    assert report.boundaries >= 11  # the run, three times intent, call and outcome, and its end
    report.check()


def test_a_charge_that_can_be_asked_for_passes(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    def charge(amount: int) -> str:
        return bank.charge(amount, current_step().idempotency_key)

    report = crashtest(shop(ledger, way, charge, receipt=bank.receipt), 5, witness=bank.witness)
    assert (report.ok, report.parked, report.advice) == (True, [], [])


def test_a_receipt_that_says_absent_of_what_took_effect_is_found(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    agent = shop(ledger, way, bank.charge, receipt=lambda key, arguments: Receipt.absent())
    report = crashtest(agent, 5, witness=bank.witness)
    assert tools(report.doubled) == {"charge"}
    assert any("does its receipt= answer absent" in advice for advice in report.advice)


def test_a_charge_that_nobody_can_be_asked_about_is_parked_which_is_no_failure(
    ledger: AgentRunLedger, way: Way, bank: Bank
) -> None:
    report = crashtest(shop(ledger, way, bank.charge, effect=Effect.MUTATE), 5, witness=bank.witness)
    assert report.ok
    assert {(trouble.step_number, trouble.tool_name) for trouble in report.parked} == {(2, "charge")}
    assert AFTER_THE_CHARGE in {trouble.boundary for trouble in report.parked}
    (advice,) = report.advice
    assert "'charge' is parked after a crash until a person resolves it" in advice


def test_what_says_that_it_changes_nothing_and_does_is_found_by_the_witness(
    ledger: AgentRunLedger, way: Way, bank: Bank
) -> None:
    agent = shop(ledger, way, bank.charge, effect=Effect.READ)
    assert crashtest(agent, 5).ok  # nobody sees
    report = crashtest(agent, 5, witness=bank.witness)
    assert tools(report.doubled) == {"charge"}
    assert any("'charge' is READ" in advice for advice in report.advice)


def test_what_says_that_its_receiver_knows_the_key_and_never_sends_one_is_found(
    ledger: AgentRunLedger, way: Way, bank: Bank
) -> None:
    agent = shop(ledger, way, bank.charge, effect=Effect.IDEMPOTENT)
    for report in (crashtest(agent, 5), crashtest(agent, 5, witness=bank.witness)):
        assert any("'charge' is IDEMPOTENT and never took its key" in advice for advice in report.advice)
    assert tools(report.doubled) == {"charge"}


def test_a_receiver_that_takes_the_same_key_twice_is_found(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    def charge(amount: int) -> str:
        bank.charges.append((current_step().idempotency_key, amount))
        return "charged"

    report = crashtest(shop(ledger, way, charge, effect=Effect.IDEMPOTENT), 5, witness=bank.witness)
    assert [trouble.text for trouble in report.doubled] == [
        "the outside saw [\"<the key of 'charge' at 2>\", 5] twice instead of once; step 2 'charge' is IDEMPOTENT and was called twice"
    ]
    assert any("does the receiver deduplicate on it?" in advice for advice in report.advice)


def test_an_effect_beside_all_steps_is_found(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    look = way.tool(ledger, _ask, effect=Effect.READ)

    def agent() -> Any:
        bank.charge(5)
        return (yield look("?"))

    report = crashtest(way.agent(ledger, agent), witness=bank.witness)
    assert len(report.doubled) == 3  # wherever it died before the end of the code, the code ran again
    assert any("Make it a step" in advice for advice in report.advice)


def test_an_effect_that_a_crash_loses_is_found(ledger: AgentRunLedger, bank: Bank) -> None:
    """The agent charges only if it has not looked before; after a crash the memory says that it has not, and the log that it has."""
    seen: list[int] = []

    @ledger.tool(effect=Effect.READ)
    def look() -> int:
        seen.append(1)
        return len(seen)

    @ledger.agent()
    def agent() -> None:
        look()
        if len(seen) == 1:
            bank.charge(5)
        look()

    report = crashtest(agent, witness=bank.witness, reset=seen.clear)
    assert any(
        "the outside saw" in trouble.text and "never instead of once" in trouble.text for trouble in report.differing
    )


# --- what a flow may be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_parallel", [1, 2])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_pipeline_is_stopped_at_each_of_its_boundaries(bank: Bank, is_async: bool, max_parallel: int) -> None:
    way = Way(is_async)

    def fetch(company: str) -> dict[str, str]:
        return {"company": company}

    def rates(company: str) -> int:
        return 3

    def charge(fetch: dict[str, str], rates: int) -> str:
        return bank.charge(rates)

    def keyed(fetch: dict[str, str], rates: int, idempotency_key: str) -> str:
        return bank.charge(rates, idempotency_key)

    for function, is_right in ((charge, False), (keyed, True)):
        pipeline = RunLedger("audit", MemoryStore(), max_parallel=max_parallel)
        for name, each, after in (("fetch", fetch, ()), ("rates", rates, ())):
            pipeline._add(Step(name, way.function(each), after, effect=Effect.READ))
        pipeline._add(Step("charge", way.function(function), ("fetch", "rates")))
        report = crashtest(pipeline, company="acme", witness=bank.witness)
        assert report.ok is is_right, report
        assert tools(report.doubled) == (set() if is_right else {"charge"})
        assert pipeline.runs() == []
        pipeline.close()


def test_a_function_of_a_ledger_is_run_with_its_arguments(bank: Bank) -> None:
    def flow(ledger: AgentRunLedger, amount: int, *, times: int) -> int:
        with ledger.open_run("charge", run_id="charge-7") as run:
            for number in range(times):
                arguments = {"amount": amount + number}
                run.step(
                    "charge",
                    arguments,
                    lambda: bank.charge(amount, current_step().idempotency_key),
                    effect=Effect.IDEMPOTENT,
                )
        return times

    report = crashtest(flow, 5, times=2, witness=bank.witness)
    assert report.ok
    assert report.calls == 2


def test_an_async_function_of_a_ledger_is_run_in_an_event_loop(bank: Bank) -> None:
    async def flow(ledger: AgentRunLedger) -> None:
        async def charge(amount: int) -> str:
            await asyncio.sleep(0)
            return bank.charge(amount)

        async with ledger.open_run("charge", run_id="charge-7") as run:
            await run.step("charge", {"amount": 5}, charge)

    report = crashtest(flow, witness=bank.witness)
    assert tools(report.doubled) == {"charge"}


def test_a_function_that_does_not_know_its_run_again_is_told_so(bank: Bank) -> None:
    def flow(ledger: AgentRunLedger) -> None:
        with ledger.open_run("charge") as run:
            run.step(
                "charge",
                {"amount": 5},
                lambda amount: bank.charge(amount, current_step().idempotency_key),
                effect=Effect.IDEMPOTENT,
            )

    report = crashtest(flow, witness=bank.witness)
    assert "2 keys" in report.doubled[0].text
    assert "there are 2 runs instead of 1" in report.differing[0].text
    assert any("with run_id=" in advice for advice in report.advice)


def test_the_agent_of_a_function_runs_on_the_ledger_that_the_function_has(ledger: AgentRunLedger, bank: Bank) -> None:
    @ledger.tool()
    def charge(amount: int) -> str:
        return bank.charge(amount)

    @ledger.agent()
    def agent(amount: int) -> str:
        return charge(amount)

    def flow(fresh: AgentRunLedger) -> list[str]:
        assert fresh is not ledger
        return [fresh.run(agent, amount, run_id=f"charge-{amount}") for amount in (1, 2)]

    report = crashtest(flow)
    assert [trouble.step_number for trouble in report.doubled] == [1, 1]
    assert ledger.runs() == []


def test_options_make_the_ledger_of_a_function() -> None:
    def flow(ledger: AgentRunLedger) -> None:
        with ledger.open_run("many", run_id="many") as run:
            for number in range(3):
                run.step("look", {"number": number}, lambda: None, effect=Effect.READ)

    assert crashtest(flow, options={"max_steps": 3}).ok
    assert any("BudgetExceeded" in advice for advice in crashtest(flow, options={"max_steps": 2}).advice)


def test_what_is_no_flow_is_refused(ledger: AgentRunLedger) -> None:
    @ledger.tool()
    def charge(amount: int) -> int:
        return amount

    @ledger.agent()
    def agent(amount: int) -> int:
        return charge(amount)

    with pytest.raises(InvalidArguments, match="'charge' is a tool"):
        crashtest(charge, 5)
    with pytest.raises(InvalidArguments, match="an agent, a pipeline, or a function of a ledger, not 5"):
        crashtest(5)
    with pytest.raises(InvalidArguments, match="makes no run"):
        crashtest(lambda ledger: None)
    with pytest.raises(InvalidArguments, match="amount"):
        crashtest(agent)
    with pytest.raises(InvalidArguments, match="by keyword"):
        crashtest(RunLedger("p", MemoryStore()), 5)
    with pytest.raises(InvalidArguments, match="options="):
        crashtest(agent, 5, options={"max_steps": 2})
    with pytest.raises(InvalidArguments, match="limit="):
        crashtest(agent, 5, limit=0)


def test_a_function_that_raises_before_its_run_raises_it_here() -> None:
    def flow(ledger: AgentRunLedger) -> None:
        raise ZeroDivisionError("before anything")

    with pytest.raises(ZeroDivisionError, match="before anything"):
        crashtest(flow)


def test_an_async_flow_is_refused_in_an_event_loop(ledger: AgentRunLedger) -> None:
    agent = shop(ledger, Way(True), lambda amount: "")

    async def test() -> None:
        crashtest(agent, 5)

    with pytest.raises(InvalidArguments, match="call it from plain code"):
        asyncio.run(test())


def test_the_ledger_of_the_users_module_is_not_touched(tmp_path: Path, way: Way, bank: Bank) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        crashtest(shop(ledger, way, bank.charge), 5)
        assert ledger.runs() == []


def test_an_interrupt_by_the_user_ends_the_test(ledger: AgentRunLedger, way: Way) -> None:
    def interrupted(amount: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crashtest(shop(ledger, way, interrupted), 5)


# --- what agents do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["gather", "map"])
def test_branches_are_stopped_wherever_one_of_them_stands(
    ledger: AgentRunLedger, way: Way, bank: Bank, spelling: str
) -> None:
    def charge(amount: int, idempotency_key: str) -> str:
        return bank.charge(amount, idempotency_key)

    def careless(amount: int) -> str:
        return bank.charge(amount)

    keyed, unkeyed = way.tool(ledger, charge), way.tool(ledger, careless)

    def agent(tool: str) -> Any:
        run, call = current_run(), {"charge": keyed, "careless": unkeyed}[tool]
        if spelling == "map":
            return (yield run.map(call, [1, 2, 3]))
        return (yield run.gather(*(lambda amount=amount: call(amount) for amount in (1, 2, 3))))

    if not way.is_async:

        def plain(tool: str) -> Any:
            (awaited,) = agent(tool)  # a sync run has done it when it is asked
            return awaited

        flow = ledger.agent(name="agent")(plain)
    else:
        flow = way.agent(ledger, agent)
    report = crashtest(flow, "charge", witness=bank.witness)
    assert report.ok, report
    report = crashtest(flow, "careless", witness=bank.witness)
    assert tools(report.doubled) == {"careless"}
    assert {trouble.step_number for trouble in report.doubled} == {1, 2, 3}


def test_of_calls_side_by_side_the_one_that_changes_something_is_blamed(ledger: AgentRunLedger, bank: Bank) -> None:
    @ledger.tool(effect=Effect.READ)
    async def look(page: int) -> int:
        return page

    @ledger.tool()
    async def charge(amount: int) -> str:
        return bank.charge(amount)

    @ledger.agent()
    async def agent() -> list[Any]:
        return await asyncio.gather(look(1), charge(5), look(2))

    report = crashtest(agent, witness=bank.witness)
    assert tools(report.doubled) == {"charge"}
    assert not any("'look'" in advice for advice in report.advice)


def test_each_trial_is_a_run_with_an_id_of_its_own(ledger: AgentRunLedger, way: Way) -> None:
    """Whoever deduplicates by the id of the run would see nothing after the first trial."""
    ids: set[str] = set()

    def look(number: int) -> str:
        ids.add(current_step().run_id)
        return current_step().run_id  # what differs by that is nothing that a crash has changed

    tool = way.tool(ledger, look, effect=Effect.READ)

    def agent(number: int) -> Any:
        return (yield tool(number))

    report = crashtest(way.agent(ledger, agent), 1)
    assert report.ok, report
    assert len(ids) == report.boundaries + 1
    ids.clear()
    report = crashtest(
        RunLedger("p", MemoryStore(), steps=[Step("look", way.function(look), effect=Effect.READ)]), number=1
    )
    assert report.ok, report
    assert len(ids) == report.boundaries + 1


def test_agents_within_agents_are_stopped_too(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    tool = way.tool(ledger, _named(bank.charge, "charge"))

    def child(amount: int) -> Any:
        return (yield tool(amount))

    pay = way.agent(ledger, child)

    def parent(amounts: list[int]) -> Any:
        first, second = amounts
        return [(yield pay(first)), (yield pay(second))]

    report = crashtest(way.agent(ledger, parent), [5, 7], witness=bank.witness)
    assert [trouble.boundary for trouble in report.doubled] == [
        "after the call of step 1 'charge' of a child run, before its outcome"
    ] * 2
    assert (report.repeated, report.differing, report.broken) == ([], [], [])
    assert ledger.runs() == []


def test_agents_within_agents_that_are_right_pass(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    def charge(amount: int, idempotency_key: str) -> str:
        return bank.charge(amount, idempotency_key)

    tool = way.tool(ledger, charge)

    def child(amount: int) -> Any:
        return (yield tool(amount))

    pay = way.agent(ledger, child)

    def parent() -> Any:
        return [(yield pay(5)), (yield pay(7))]

    report = crashtest(way.agent(ledger, parent), witness=bank.witness)
    assert report == Report(ok=True, flow="parent", boundaries=report.boundaries, stopped_at=report.boundaries, calls=4)


def test_a_model_is_asked_once_for_each_answer_that_was_recorded(ledger: AgentRunLedger, way: Way) -> None:
    asked: Counter[str] = Counter()

    def ask(question: str) -> str:
        asked[question] += 1
        return question

    model = way.tool(ledger, ask, kind="model")

    def agent() -> Any:
        for number in range(4):
            yield model(f"question {number}")

    report = crashtest(way.agent(ledger, agent))
    assert (report.ok, report.repeated) == (True, [])
    # Once without a crash, once for each boundary, and once more where it died with that very call behind it and no outcome written.
    assert set(asked.values()) == {1 + report.boundaries + 1}


def test_waits_before_retries_take_no_time(ledger: AgentRunLedger, way: Way, bank: Bank) -> None:
    def flaky(amount: int) -> str:
        if current_step().attempt % 2:
            raise ConnectionRefusedError("try later")
        return bank.charge(amount, current_step().idempotency_key)

    retry = RetryPolicy(max_attempts=4, base=3600, cap=3600)
    report = crashtest(shop(ledger, way, flaky, effect=Effect.IDEMPOTENT, retry=retry), 5, witness=bank.witness)
    assert report.ok, report
    assert report.calls == 4


def test_a_step_that_may_be_tried_once_has_no_attempt_left_after_a_crash(ledger: AgentRunLedger, way: Way) -> None:
    agent = shop(ledger, way, lambda amount: "done", effect=Effect.READ, retry=RetryPolicy(max_attempts=1))
    report = crashtest(agent, 5)
    assert {trouble.boundary for trouble in report.differing} >= {AFTER_THE_CHARGE}
    assert any("no attempt left after one crash" in advice for advice in report.advice)


def test_an_agent_that_acts_on_failures_passes(ledger: AgentRunLedger, way: Way) -> None:
    def fails(number: int) -> int:
        raise ValueError(f"no {number}")

    def works(number: int) -> int:
        return number

    look, other = way.tool(ledger, fails, effect=Effect.READ), way.tool(ledger, works, effect=Effect.READ)

    def agent() -> Any:
        try:
            return (yield look(1))
        except RuntimeError as error:
            return [str(error), (yield other(2))]

    report = crashtest(way.agent(ledger, agent))
    assert report.ok, report


def test_an_agent_that_ends_with_an_error_ends_with_it_after_a_crash_too(ledger: AgentRunLedger, way: Way) -> None:
    def fails(number: int) -> int:
        raise ValueError(f"no {number}")

    look = way.tool(ledger, fails, effect=Effect.READ)

    def agent() -> Any:
        return (yield look(1))

    report = crashtest(way.agent(ledger, agent))
    assert report.ok, report
    assert report.advice == [
        "the flow ends with an error without any crash, too: StepFailed: Tool execution failed: ValueError: no 1"
    ]


def test_an_async_agent_that_cancels_its_own_calls_passes(ledger: AgentRunLedger) -> None:
    @ledger.tool(effect=Effect.READ)
    async def look(page: int) -> int:
        await asyncio.sleep(0)
        return page

    @ledger.tool(effect=Effect.READ)
    async def slow() -> None:
        await asyncio.sleep(0.2)

    @ledger.agent()
    async def agent() -> list[Any]:
        first = await look(1)
        try:
            async with asyncio.timeout(0.01):
                await slow()
        except TimeoutError:
            pass
        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [first, await look(2)]

    report = crashtest(agent)
    assert report.ok, report


def test_a_dead_event_loop_leaves_nothing_behind(ledger: AgentRunLedger, caplog: pytest.LogCaptureFixture) -> None:
    @ledger.tool(effect=Effect.READ)
    async def look(page: int) -> int:
        await asyncio.sleep(0.0001 * page)
        return page

    @ledger.agent()
    async def child(page: int) -> list[int]:
        return await asyncio.gather(look(page), look(page + 1))

    @ledger.agent()
    async def agent(run: Run) -> list[Any]:
        children = await run.map(child, [1, 2])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_within(run, str(page), look, page)) for page in (1, 2, 3)]
        return [children, *(task.result() for task in tasks)]

    async def many(fresh: AgentRunLedger) -> list[Any]:
        return await asyncio.gather(*(fresh.arun(child, page, run_id=f"child {page}") for page in (1, 2, 3)))

    before = threading.active_count()
    for flow in (agent, many):
        report = crashtest(flow)
        assert report.ok, report
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert threading.active_count() == before


async def _within(run: Run, name: str, tool: Callable[[int], Any], page: int) -> int:
    with run.branch(name):
        first = await tool(page)
        assert run.now() > 0
        return first + await tool(page + 10)


def test_waits_come_at_once_and_an_answer_is_sent_where_somebody_waits(ledger: AgentRunLedger, way: Way) -> None:
    def agent() -> Any:
        run = current_run()
        yield run.sleep(86_400)
        return (yield run.wait_for("paid"))

    flow = way.agent(ledger, agent)  # nobody waits for a day: its time comes at once
    report = crashtest(flow, answer=lambda ledger, run_id: ledger.signal(run_id, "paid", 5))
    assert report.ok, report
    with pytest.raises(InvalidArguments, match="waits for 'paid', and nobody sends it"):
        crashtest(flow)


def test_an_answer_to_something_else_ends_no_wait_and_keeps_nobody_for_ever(ledger: AgentRunLedger, way: Way) -> None:
    def agent(seconds: float | None) -> Any:
        try:
            return (yield current_run().wait_for("paid", seconds))
        except WaitTimeout:
            return "late"

    def answer(ledger: AgentRunLedger, run_id: str) -> None:
        ledger.signal(run_id, "something else")

    flow = way.agent(ledger, agent)
    assert crashtest(flow, 60, answer=answer).ok
    with pytest.raises(InvalidArguments, match="nobody sends it"):
        crashtest(flow, None, answer=answer)


# --- what differs -----------------------------------------------------------------------------------------------------


def test_an_agent_that_is_not_deterministic_is_found_and_the_position_is_named(
    ledger: AgentRunLedger, way: Way
) -> None:
    look = way.tool(ledger, _ask, effect=Effect.READ)
    log = way.tool(ledger, _log, effect=Effect.READ)

    def agent() -> Any:
        yield look("anything new?")
        yield log({"at": time.time(), "what": "looked"})

    report = crashtest(way.agent(ledger, agent))
    assert not report.ok
    assert {trouble.text for trouble in report.differing} == {
        "at position 2 is recorded '_log', and the flow then asks for '_log', first difference at $.entry.at"
    }
    (advice,) = report.advice
    assert "at position 2" in advice
    assert "$.entry.at" in advice
    assert "run.now()" in advice

    def mended() -> Any:
        yield look("anything new?")
        yield log({"at": current_run().now(), "id": str(current_run().uuid4()), "what": "looked"})

    assert crashtest(way.agent(ledger, mended)).ok


def _log(entry: dict[str, Any]) -> None:
    return None


def test_an_agent_that_swallows_the_divergence_is_found_all_the_same(ledger: AgentRunLedger, way: Way) -> None:
    log = way.tool(ledger, _log, effect=Effect.READ)

    def agent() -> Any:
        try:
            yield log({"at": time.time()})
        except Exception:
            return None
        return None

    assert "at position 1" in crashtest(way.agent(ledger, agent)).differing[0].text


def test_a_result_that_depends_on_the_memory_of_a_process_is_found(ledger: AgentRunLedger, way: Way) -> None:
    starts: list[int] = []
    look = way.tool(ledger, _ask, effect=Effect.READ)

    def agent() -> Any:
        starts.append(1)
        yield look("?")
        return len(starts)

    report = crashtest(way.agent(ledger, agent), reset=starts.clear)
    assert {trouble.text for trouble in report.differing} == {"the result is 2 instead of 1"}


def test_a_result_that_differs_without_any_crash_is_nobodys_fault(ledger: AgentRunLedger, way: Way) -> None:
    numbers = iter(range(1000))

    def fresh() -> int:
        return next(numbers)

    number = way.tool(ledger, fresh, effect=Effect.READ)

    def agent() -> Any:
        first = yield number()
        return [first, str(current_run().uuid4()), current_step_is_none()]

    assert crashtest(way.agent(ledger, agent)).ok


def current_step_is_none() -> bool:
    with pytest.raises(RuntimeError):
        current_step()
    return True


def test_ids_that_the_outside_makes_are_counted_and_not_compared(ledger: AgentRunLedger, way: Way) -> None:
    """The outside gives each charge a number of its own: no two trials have the same."""
    charges: list[str] = []

    def charge(amount: int) -> str:
        charges.append(f"charge {len(charges)}: {amount}")
        return charges[-1]

    report = crashtest(shop(ledger, way, charge, effect=Effect.READ), 5, witness=lambda: charges)
    assert [trouble.text for trouble in report.doubled] == [
        "the outside saw 2 effects instead of 1; step 2 'charge' is READ and was called twice"
    ]
    assert report.differing == []


# --- the witness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("witness", "seen"),
    [
        (lambda bank: bank.charges, '["without a key", 5] twice instead of once'),
        (lambda bank: set(enumerate(bank.charges)), "2 effects instead of 1"),
        (lambda bank: Counter(amount for _, amount in bank.charges), "5 twice instead of once"),
        (lambda bank: len(bank.charges), "2 effects instead of 1"),
        (lambda bank: Decimal(sum(amount for _, amount in bank.charges)), "10 effects instead of 5"),
    ],
    ids=["list", "set", "mapping", "number", "sum"],
)
def test_a_witness_may_count_in_any_way(
    ledger: AgentRunLedger, bank: Bank, witness: Callable[[Bank], Any], seen: str
) -> None:
    report = crashtest(shop(ledger, Way(False), bank.charge), 5, witness=lambda: witness(bank))
    assert [trouble.text.split(";")[0] for trouble in report.doubled] == [f"the outside saw {seen}"]


@pytest.mark.parametrize("said", ["text", None, True, {"a": "b"}])
def test_a_witness_that_says_nothing_that_can_be_counted_is_refused(
    ledger: AgentRunLedger, bank: Bank, said: Any
) -> None:
    with pytest.raises(TypeError, match="a witness"):
        crashtest(shop(ledger, Way(False), bank.charge), 5, witness=lambda: said)


def test_the_witness_is_asked_before_and_after_each_trial_and_the_outside_is_put_back_before(
    ledger: AgentRunLedger, bank: Bank
) -> None:
    said: list[str] = []

    def witness() -> int:
        said.append("witness")
        return 0

    crashtest(shop(ledger, Way(False), bank.charge), 5, witness=witness, reset=lambda: said.append("reset"), limit=2)
    assert said == ["reset", "witness", "witness"] * 3


# --- how much is tried ------------------------------------------------------------------------------------------------


def test_at_most_limit_boundaries_are_tried_and_the_report_says_so(ledger: AgentRunLedger, bank: Bank) -> None:
    agent = shop(ledger, Way(False), bank.charge)
    whole = crashtest(agent, 5, limit=None)
    assert (whole.stopped_at, whole.boundaries) == (11, 11)
    report = crashtest(agent, 5, limit=4)
    assert (report.stopped_at, report.boundaries) == (4, 11)
    assert "stopped at 4 of 11, evenly spread, durable boundaries" in str(report)


def test_boundaries_are_spread_evenly() -> None:
    for boundaries in range(1, 40):
        for limit in range(1, 45):
            chosen = spread(boundaries, limit)
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(limit, boundaries)
            assert set(chosen) <= set(range(1, boundaries + 1))
            if limit > 1:
                assert {1, boundaries} <= set(chosen)
        assert spread(boundaries, None) == list(range(1, boundaries + 1))


def test_the_report_is_for_people() -> None:
    trouble = Trouble(AFTER_THE_CHARGE, "the outside saw 5 twice", 2, "charge")
    report = Report(
        False,
        doubled=[trouble, trouble],
        advice=["declare something"],
        flow="shop",
        boundaries=11,
        stopped_at=11,
        calls=3,
    )
    assert str(report).splitlines() == [
        "crashtest of 'shop': FAILED",
        "  stopped at 11 of 11 durable boundaries and started again; 3 calls without a crash",
        "  doubled:",
        f"    {AFTER_THE_CHARGE} (and at 1 more): the outside saw 5 twice",
        "  advice:",
        "    - declare something",
    ]


def test_time_that_is_slept_is_skipped() -> None:
    clock = SkippingClock()
    now, elapsed = clock.now(), clock.elapsed()
    clock.sleep(3600)
    assert 3600 <= clock.now() - now < 7200
    assert 3600 <= clock.elapsed() - elapsed < 7200
    clock.skip_to(now + 86_400)
    assert clock.now() >= now + 86_400
    clock.skip_to(now)
    assert clock.now() >= now + 86_400


# --- engines that break their promises --------------------------------------------------------------------------------


def test_an_engine_that_writes_intents_late_is_found(
    ledger: AgentRunLedger, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes each intent together with its outcome: after a crash nobody knows that anything was dispatched."""
    append = SyncDriver._append
    kept: dict[str, Any] = {}

    def late(self: SyncDriver, run: Any, sealed: Any, drafts: Any, *, synced: bool) -> bool:
        if drafts[-1].kind == "intent":
            kept[run.run_id] = (self, sealed, drafts)
            run.absorb(sealed)
            return True
        owner, before, _ = kept.pop(run.run_id, (None, [], []))
        if owner is self and before:
            rows = [row for row, _ in [*before, *sealed]]
            assert self._store.append(run.run_id, run.token, run.inbox, rows, synced=synced)
            run.absorb(sealed)
            return True
        return append(self, run, sealed, drafts, synced=synced)

    monkeypatch.setattr(SyncDriver, "_append", late)
    report = crashtest(shop(ledger, Way(False), bank.charge, effect=Effect.MUTATE), 5)
    assert not report.ok
    assert {trouble.tool_name for trouble in report.broken} == {"_ask", "charge"}
    assert AFTER_THE_CHARGE in {trouble.boundary for trouble in report.doubled}


def test_an_engine_that_dispatches_again_whatever_the_effect_is_found(
    ledger: AgentRunLedger, way: Way, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "in_doubt", lambda step, *_: recovery.Action("dispatch", step.position, "why not"))
    report = crashtest(shop(ledger, way, bank.charge, effect=Effect.MUTATE), 5)
    assert tools(report.doubled) == {"charge"}
    assert "and its receiver was not asked" in report.doubled[0].text or "is MUTATE" in report.doubled[0].text


def test_an_engine_that_calls_again_what_has_an_outcome_is_found(
    ledger: AgentRunLedger, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes every recorded outcome for one that may be tried again, as soon as another process has the run."""
    hold = Leases.hold

    def holding(self: Leases, run: Any) -> None:
        was_held = run.is_held
        hold(self, run)
        if not was_held:
            for step in run.history.positions.values():
                step.doubted()

    monkeypatch.setattr(Leases, "hold", holding)
    report = crashtest(shop(ledger, Way(False), bank.charge, effect=Effect.IDEMPOTENT), 5)
    assert {trouble.tool_name for trouble in report.repeated} == {"_ask", "charge"}


# --- real processes ---------------------------------------------------------------------------------------------------


class Register:
    """An outside that outlives processes: a file with a line for each charge."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def charge(self, amount: int, key: str | None = None) -> str:
        if key is None or not any(line.startswith(key) for line in self.witness()):
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{key or 'without a key'}: {amount}\n")
        return f"charged {amount}"

    def witness(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def register(tmp_path: Path) -> Register:
    return Register(tmp_path / "register")


def test_sigkill_finds_a_charge_without_a_key(ledger: AgentRunLedger, way: Way, register: Register) -> None:
    report = crashtest(shop(ledger, way, register.charge), 5, witness=register.witness, kill=True)
    assert [(trouble.boundary, trouble.tool_name) for trouble in report.doubled] == [(AFTER_THE_CHARGE, "charge")]
    assert (report.repeated, report.differing, report.parked, report.broken) == ([], [], [], [])
    assert (report.kill, report.stopped_at) == (True, report.boundaries)
    assert "killed at 11 of 11 durable boundaries" in str(report)


def test_sigkill_passes_a_charge_with_a_key(ledger: AgentRunLedger, way: Way, register: Register) -> None:
    agent = shop(
        ledger, way, lambda amount: register.charge(amount, current_step().idempotency_key), effect=Effect.IDEMPOTENT
    )
    report = crashtest(agent, 5, witness=register.witness, kill=True)
    assert report == Report(ok=True, flow="agent", boundaries=11, stopped_at=11, calls=3, kill=True)


def test_sigkill_loses_what_a_process_had_in_memory(ledger: AgentRunLedger, register: Register) -> None:
    """The tool remembers in memory what it has charged: that lasts for as long as its process does."""
    charged: set[int] = set()

    def charge(amount: int) -> str:
        if amount not in charged:
            charged.add(amount)
            register.charge(amount)
        return "charged"

    agent = shop(ledger, Way(False), charge, effect=Effect.IDEMPOTENT)
    assert crashtest(agent, 5, witness=register.witness, reset=charged.clear).ok
    charged.clear()
    assert tools(crashtest(agent, 5, witness=register.witness, kill=True).doubled) == {"charge"}
    assert charged == set()  # nothing of it took place in this process


def test_sigkill_lets_nobody_clean_up(ledger: AgentRunLedger, way: Way, register: Register) -> None:
    """A `finally:` block runs for whoever is stopped by an exception; for whoever is killed it does not."""
    look = way.tool(ledger, _ask, effect=Effect.READ)

    def agent() -> Any:
        try:
            yield look("?")
        finally:
            register.charge(1)

    flow = way.agent(ledger, agent)
    assert not crashtest(flow, witness=register.witness).ok
    assert crashtest(flow, witness=register.witness, kill=True).ok


def test_sigkill_stops_pipelines_and_functions_too(register: Register) -> None:
    pipeline = RunLedger("audit", MemoryStore(), steps=[Step("charge", lambda amount: register.charge(amount))])
    assert tools(crashtest(pipeline, amount=5, witness=register.witness, kill=True).doubled) == {"charge"}

    def flow(ledger: AgentRunLedger) -> None:
        with ledger.open_run("charge", run_id="charge-7") as run:
            run.step("charge", {"amount": 5}, register.charge, effect=Effect.MUTATE)

    report = crashtest(flow, witness=register.witness, kill=True, limit=3)
    assert (report.ok, report.stopped_at, tools(report.parked)) == (True, 3, {"charge"})


def test_a_process_that_does_not_end_is_killed_and_its_test_fails(ledger: AgentRunLedger) -> None:
    agent = shop(ledger, Way(False), lambda amount: str(threading.Event().wait()))
    with pytest.raises(TimeoutError, match=r"did not end within 0\.5 s"):
        crashtest(agent, 5, kill=True, timeout=0.5)


def test_a_process_that_fails_says_why(ledger: AgentRunLedger, capfd: pytest.CaptureFixture[str]) -> None:
    def flow(ledger: AgentRunLedger) -> None:
        with ledger.open_run("charge", run_id="charge-7") as run:
            run.step("charge", {"amount": 5}, lambda: sys.exit(3), effect=Effect.READ)

    with pytest.raises(RuntimeError, match="ended with status 1"):
        crashtest(flow, kill=True)
    assert "SystemExit: 3" in capfd.readouterr().err


def test_nothing_is_forked_beside_a_thread(ledger: AgentRunLedger, way: Way) -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, name="the other one")
    other.start()
    try:
        with pytest.raises(InvalidArguments, match="the other one"):
            crashtest(shop(ledger, way, lambda amount: ""), 5, kill=True)
    finally:
        over.set()
        other.join()


def test_the_idle_threads_of_this_library_are_in_nobodys_way(ledger: AgentRunLedger, register: Register) -> None:
    agent = shop(ledger, Way(False), register.charge, effect=Effect.READ, timeout=5)
    assert crashtest(agent, 5, limit=1).ok  # leaves a thread behind that waits for work
    assert crashtest(agent, 5, limit=1, kill=True).ok


# --- in pytest --------------------------------------------------------------------------------------------------------

SUITE = """
from agent_run_ledger import AgentRunLedger
from agent_run_ledger.testing import MemoryStore

ledger = AgentRunLedger(MemoryStore())

@ledger.tool()
def charge(amount: int) -> int:
    return amount

@ledger.tool(effect="READ")
def look(amount: int) -> int:
    return amount

@ledger.agent()
def careless(amount: int) -> int:
    return charge(amount)

@ledger.agent()
def careful(amount: int) -> int:
    return look(amount)

def test_careless(crashtest):
    crashtest(careless, 5)

def test_careful(crashtest):
    report = crashtest(careful, 5)
    print(f"killed: {report.kill}, stopped at {report.stopped_at} of {report.boundaries}")

def test_unchecked(crashtest):
    report = crashtest(careless, 5, check=False)
    assert report.doubled
    assert report.ok
"""


def pytest_on(folder: Path, *options: str) -> str:
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    source = Path(agent_run_ledger.__file__).resolve().parent.parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "agent_run_ledger.testing.pytest_plugin",
            "-p",
            "no:cacheprovider",
            "-rP",
            *options,
        ],
        cwd=folder,
        env={"PYTHONPATH": str(source), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_the_fixture_fails_a_test_with_the_whole_report(tmp_path: Path) -> None:
    said = pytest_on(tmp_path)
    assert "2 failed, 1 passed" in said
    assert (
        said.count("crashtest of 'careless': FAILED") >= 2
    )  # where it is checked, and where the test failed for another reason
    assert "'charge' declares no effect and was dispatched twice" in said
    assert "killed: False, stopped at 5 of 5" in said


def test_options_of_the_command_line_are_for_the_whole_suite(tmp_path: Path) -> None:
    assert "killed: True, stopped at 2 of 5" in pytest_on(tmp_path, "--crashtest-kill", "--crashtest-limit=2")


def test_the_plugin_costs_a_suite_nothing_that_does_not_use_it() -> None:
    source = Path(agent_run_ledger.__file__).resolve().parent.parent
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r}); import pytest; before = set(sys.modules); "
        "import agent_run_ledger.testing.pytest_plugin; print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(loaded.stdout.split()) == {
        "agent_run_ledger",
        "agent_run_ledger.testing",
        "agent_run_ledger.testing.pytest_plugin",
    }
