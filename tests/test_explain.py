"""Why a run was halted: the rule, the reason, the steps that this rests on, and what its program had been told before."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import Any

import pytest

from agent_run_ledger import (
    BlockedCall,
    Budget,
    BudgetExceededException,
    CallBlocked,
    Effect,
    LoopDetectorPolicy,
    ReplayDivergence,
    RetryPolicy,
    Run,
    RunawayLoopDetectedException,
    RunNotFound,
    StepFailed,
    StepInDoubt,
)
from support.ledgers import Bench, Died, Tool
from support.programs import RUN, Way

FAILS = "'fetch' was called 3 times in a row with equal arguments and an equal outcome"


def looping(bench: Bench, way: Way, policy: LoopDetectorPolicy | None = None, long: int = 0) -> Any:
    """A ledger with a run that fetches one page for ever, and is halted for it."""
    ledger = bench.open(policy=policy)
    fails = Tool(ValueError("no such page" + "!" * long))
    fetch = way.tool(ledger, lambda page: fails(), name="fetch", effect=Effect.READ)
    look = way.tool(ledger, Tool("x"), name="look", effect=Effect.READ)

    def agent(run: Run) -> Any:
        yield look()
        while True:
            with contextlib.suppress(StepFailed, CallBlocked):
                yield fetch("p" * (long or 1))

    with pytest.raises(RunawayLoopDetectedException):
        way.run(ledger, agent, name="agent")
    return ledger


def test_a_loop_is_explained_by_its_rule_and_the_steps_side_by_side(bench: Bench, way: Way) -> None:
    said = looping(bench, way).explain(RUN)
    assert (said.status, said.rule, said.reason, said.tool_name) == ("DEAD_LETTER", "identical_calls", FAILS, "fetch")
    assert [each.step_number for each in said.evidence] == [2, 3, 4]
    told = ("fetch", '{"page":"p"}', "ValueError: no such page", "FAILED")
    assert {(each.tool_name, each.arguments, each.outcome, each.state) for each in said.evidence} == {told}
    assert (said.notices, said.blocked, said.steps, said.refused, said.limits) == ((), (), 4, 1, None)


def test_what_was_said_and_refused_before_the_halt_is_part_of_it(bench: Bench, way: Way) -> None:
    policy = LoopDetectorPolicy(reactions={"suspected": "notice", "certain": "notice"})
    said = looping(bench, way, policy).explain(RUN)
    assert [(notice.step_number, notice.rule, notice.evidence) for notice in said.notices] == [
        (4, "identical_calls", (2, 3, 4))
    ]
    assert said.blocked == (BlockedCall("5", "fetch", "identical_calls", FAILS, (2, 3, 4)),)
    assert (said.rule, said.refused) == ("identical_calls", 2)


def test_long_arguments_and_outcomes_are_shortened(bench: Bench, way: Way) -> None:
    for each in looping(bench, way, long=3000).explain(RUN).evidence:
        assert each.arguments is not None
        assert each.outcome is not None
        assert (len(each.arguments), len(each.outcome)) == (1000, 1000)
        assert each.arguments.endswith("…")


def test_a_released_run_is_not_explained_by_what_it_was_let_out_of(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    search = way.tool(ledger, lambda request_id: "nothing", name="search", effect=Effect.READ)

    def agent() -> Any:
        for number in range(9):
            yield search(f"request-{number}")

    with pytest.raises(RunawayLoopDetectedException):
        way.run(ledger, agent, name="agent")
    said = ledger.explain(RUN)
    assert said.status == "QUARANTINE"
    assert said.evidence
    ledger.signal(RUN, "hello")
    assert ledger.explain(RUN) == said, "what comes in later does not hide it"
    ledger.release(RUN)
    said = ledger.explain(RUN)
    assert (said.rule, said.reason, said.evidence) == (None, None, ())


def test_the_end_of_a_budget_says_which_limit_and_what_was_spent_and_reserved(bench: Bench, way: Way) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 50}
    ledger = bench.open(budget=Budget(tokens=400, usd="0.5"))
    ask = way.tool(ledger, Tool({"usage": usage}), name="ask", kind="model", max_tokens=150, max_usd="0.1")

    def agent() -> Any:
        while True:
            yield ask()

    with pytest.raises(BudgetExceededException):
        way.run(ledger, agent, name="agent")
    said = ledger.explain(RUN)
    assert (said.rule, said.tool_name, said.evidence) == ("budget", "ask", ())
    assert said.reason == "the call may use 150 tokens, and of 400 tokens 100 tokens are left"
    assert (said.spent_tokens, said.spent_usd, said.reserved_tokens) == (300, Decimal("0.2"), 0)
    assert said.limits == Budget(steps=50, tokens=400, usd="0.5")


def test_a_budget_that_ends_a_retry_names_the_step(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=700))
    retry = RetryPolicy(max_attempts=9, base=0.01, cap=0.01)
    ask = way.tool(ledger, Tool(ValueError("odd")), name="ask", kind="model", max_tokens=300, retry=retry)

    def agent() -> Any:
        yield ask()

    with pytest.raises(BudgetExceededException):
        way.run(ledger, agent, name="agent")
    said = ledger.explain(RUN)
    assert said.rule == "budget"
    assert said.reason is not None
    assert said.reason.startswith("step 1, 'ask': the call may use 300 tokens")
    assert [(each.step_number, each.outcome) for each in said.evidence] == [(1, "ValueError: odd")]
    assert (said.limits, said.spent_tokens) == (Budget(steps=50, tokens=700), 600)


def test_a_step_in_doubt_explains_why_a_run_stands(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pay = way.tool(ledger, Tool(Died()), name="pay", effect=Effect.MUTATE)

    def agent() -> Any:
        yield pay()

    agent_of = way.agent(ledger, agent, name="agent")
    with contextlib.suppress(Died):
        way.start(ledger, agent_of)
    bench.owners_die()
    with pytest.raises(StepInDoubt):
        way.start(ledger, agent_of)
    said = ledger.explain(RUN)
    assert (said.status, said.rule, [each.tool_name for each in said.evidence]) == ("BLOCKED", None, ["pay"])
    assert said.reason


def test_a_divergence_explains_itself_and_nothing_that_was_before(bench: Bench) -> None:
    def start(page: int) -> None:
        bench.owners_die()
        with bench.open().open_run("pay", run_id=RUN) as run:
            run.step("look", {"page": page}, lambda page: page, effect=Effect.READ)
            run.step("pay", {}, Tool(Died()), effect=Effect.MUTATE)

    for page, error, evidence in ((1, Died, ["pay"]), (1, StepInDoubt, ["pay"]), (2, ReplayDivergence, [])):
        with pytest.raises(error):
            start(page)
        said = bench.open().explain(RUN)
        assert error is Died or [each.tool_name for each in said.evidence] == evidence
    assert (said.status, said.rule, said.limits) == ("BLOCKED", None, None)
    assert said.reason is not None
    assert "look" in said.reason


def test_a_run_that_ended_well_has_nothing_to_explain(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent() -> Any:
        yield from ()

    way.run(ledger, agent, name="agent")
    said = ledger.explain(RUN)
    assert (said.status, said.rule, said.reason, said.evidence) == ("COMPLETED", None, None, ())
    with pytest.raises(RunNotFound):
        ledger.explain("nobody")
