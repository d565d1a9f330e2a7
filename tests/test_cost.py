"""What runs have cost: every token and every dollar once, by model and by tool, over crashes, retries, replays and redrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Cost,
    Effect,
    Price,
    PriceBook,
    RunNotFound,
    Spending,
    StepFailed,
    current_step,
)
from agent_run_ledger.drivers import reading
from support.ledgers import Bench, Died, Tool
from support.programs import RUN, Way

PRICES = PriceBook({"small": Price(input="2", output="10"), "large": Price(input="20", cache_read="2", output="100")})


def answer(model: str = "small", given: int = 100, said: int = 50, cached: int = 0) -> dict[str, Any]:
    """What a model's client returns."""
    details = {"cached_tokens": cached}
    return {
        "model": model,
        "usage": {"prompt_tokens": given, "completion_tokens": said, "prompt_tokens_details": details},
    }


def charged(parts: Iterable[Spending]) -> tuple[int, Decimal]:
    tokens, usd = 0, Decimal(0)
    for part in parts:
        tokens, usd = tokens + part.tokens, usd + part.usd
    return tokens, usd


def cost_of(ledger: AgentRunLedger, run_id: str | None = RUN) -> Cost:
    """What the ledger says, which adds up and agrees with the run's record."""
    cost = ledger.cost(run_id)
    whole = cost.spent.tokens, cost.spent.usd
    assert whole == charged(cost.models.values()) == charged(cost.tools.values())
    if run_id is not None:
        account = reading.read(ledger._store, run_id).account
        committed = account.spent.tokens + sum(amount.tokens for amount in account.held.values())
        assert committed == cost.spent.tokens + cost.reserved_tokens + cost.carried_tokens
        if not account.held:
            run = ledger.get_run(run_id)
            assert (run.spent_tokens, run.spent_usd) == (
                cost.spent.tokens + cost.carried_tokens,
                cost.spent.usd + cost.carried_usd,
            )
    return cost


def test_each_model_and_each_tool_has_what_its_calls_used(bench: Bench, way: Way) -> None:
    ledger = bench.open(prices=PRICES)
    draft = way.tool(ledger, Tool(answer(), answer(given=10)), name="draft", kind="model")
    judge = way.tool(ledger, Tool(answer("large", given=100, said=10, cached=40)), name="judge", kind="model")
    look = way.tool(ledger, Tool("nothing"), name="look", effect=Effect.READ)

    def agent() -> Any:
        yield draft()
        yield look()
        yield draft()
        yield judge()

    way.run(ledger, agent, name="agent")
    cost = cost_of(ledger)
    assert list(cost.tools) == ["draft", "judge"], "what costs nothing is in no list"
    assert {name: (part.calls, part.tokens, part.usd) for name, part in cost.models.items()} == {
        "small": (2, 210, Decimal("0.00122")),
        "large": (1, 110, Decimal("0.00228")),
    }
    buckets = (
        cost.spent.input_tokens,
        cost.spent.cache_read_tokens,
        cost.spent.cache_write_tokens,
        cost.spent.output_tokens,
    )
    assert (buckets, cost.spent.told_tokens) == ((170, 40, 0, 110), 320)
    assert (cost.spent.calls, cost.spent.usd) == (3, Decimal("0.0035"))
    assert (cost.status, cost.reserved_tokens, cost.saved_tokens, cost.limits) == ("COMPLETED", 0, 0, Budget(steps=50))


def test_one_call_that_uses_several_models_is_one_call_of_its_tool(bench: Bench, way: Way) -> None:
    ledger = bench.open(prices=PRICES)

    def model() -> str:
        current_step().record_usage(answer())
        current_step().record_usage(answer("large"))
        current_step().record_usage(answer("unheard of"))
        return "done"

    ask = way.tool(ledger, model, name="ask", kind="model", max_usd="0.5")

    def agent() -> Any:
        yield ask()

    way.run(ledger, agent, name="agent", budget=Budget(usd=1))
    cost = cost_of(ledger)
    assert (cost.tools["ask"].calls, cost.tools["ask"].tokens, cost.tools["ask"].usd) == (1, 450, Decimal("0.5"))
    assert cost.models["large"].usd == Decimal("0.007")
    assert cost.models[""].usd == Decimal("0.5") - Decimal("0.007") - Decimal("0.0007")
    assert (cost.spent.unpriced, cost.models[""].unpriced) == (1, 1), (
        "whose tokens had no price cannot be told of a sum"
    )


def test_what_nobody_told_is_counted_and_charged_as_it_was_reserved(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000, usd=1))
    forgets = way.tool(ledger, Tool("I forgot"), name="forgets", kind="model", max_tokens=300, max_usd="0.25")
    unknown = way.tool(ledger, Tool(answer("other")), name="unknown", kind="model", max_tokens=150, max_usd="0.1")
    more = way.tool(ledger, Tool(answer()), name="more", kind="model", max_tokens=100, max_usd="0.1")

    def agent() -> Any:
        yield forgets()
        yield unknown()
        yield more()

    way.run(ledger, agent, name="agent")
    spent = cost_of(ledger).spent
    assert (spent.unmetered, spent.unpriced, spent.overran) == (1, 2, 1)
    assert (spent.tokens, spent.told_tokens, spent.usd) == (600, 300, Decimal("0.45"))


def test_a_model_of_which_nothing_is_told_is_unmetered_without_a_budget_too(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    ask = way.tool(ledger, Tool("I forgot"), name="ask", kind="model")

    def agent() -> Any:
        yield ask()

    way.run(ledger, agent, name="agent")
    assert {name: (part.calls, part.tokens, part.unmetered) for name, part in cost_of(ledger).tools.items()} == {
        "ask": (1, 0, 1)
    }


def test_attempts_that_failed_or_died_are_calls_that_cost_what_they_reserved(bench: Bench, way: Way) -> None:
    def start(*answers: Any) -> AgentRunLedger:
        bench.owners_die()
        ledger = bench.open(budget=Budget(tokens=1000))
        ask = way.tool(ledger, Tool(*answers), name="ask", kind="model", max_tokens=300)

        def agent() -> Any:
            with contextlib.suppress(StepFailed):
                yield ask()
            yield ask()

        agent_of = way.agent(ledger, agent, name="agent")
        with contextlib.suppress(Died):
            way.start(ledger, agent_of)
        return ledger

    cost = cost_of(start(Died()))
    assert (cost.spent.tokens, cost.reserved_tokens) == (0, 300)
    cost = cost_of(start(ValueError("odd"), answer()))
    assert (cost.spent.calls, cost.spent.tokens, cost.spent.unmetered) == (3, 300 + 300 + 150, 2)
    assert (cost.reserved_tokens, cost.models[""].calls, cost.models["small"].calls) == (0, 2, 1)


def test_a_replay_costs_nothing_and_what_it_saved_is_said(bench: Bench, way: Way) -> None:
    def start(last: Any) -> AgentRunLedger:
        bench.owners_die()
        ledger = bench.open(prices=PRICES)
        ask = way.tool(ledger, Tool(answer()), name="ask", kind="model")
        stop = way.tool(ledger, Tool(last), name="stop", effect=Effect.READ)

        def agent() -> Any:
            yield ask()
            yield ask()
            yield stop()

        with contextlib.suppress(Died):
            way.run(ledger, agent, name="agent")
        return ledger

    assert cost_of(start(Died())).saved_tokens == 0
    for times in (1, 2):
        cost = cost_of(start(Died() if times == 1 else "done"))
        assert (cost.spent.calls, cost.spent.tokens) == (2, 300)
        assert (cost.saved_tokens, cost.saved_usd) == (300 * times, Decimal("0.0014") * times)


def test_a_redriven_run_carries_what_another_has_paid_and_no_sum_has_it_twice(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=400), prices=PRICES)
    ask = way.tool(ledger, Tool(answer()), name="ask", kind="model", max_tokens=150)

    def agent() -> Any:
        for _ in range(4):
            yield ask()

    agent_of = way.agent(ledger, agent, name="agent")
    with pytest.raises(BudgetExceededException):
        way.start(ledger, agent_of)
    assert cost_of(ledger).limits == Budget(steps=50, tokens=400), "where a budget ended the run the log says which"
    again = ledger.redrive(RUN, budget=Budget(tokens=700, usd="0.5"))
    assert cost_of(ledger, again).limits == Budget(steps=None, tokens=700, usd="0.5")
    way.start(ledger, agent_of, run_id=again)
    cost = cost_of(ledger, again)
    assert (cost.spent.calls, cost.spent.tokens, cost.carried_tokens, cost.saved_tokens) == (2, 300, 300, 300)
    whole = cost_of(ledger, None)
    assert [each.run_id for each in whole.runs] == [RUN, again]
    assert (whole.run_id, whole.spent.calls, whole.spent.tokens, whole.carried_tokens) == (None, 4, 600, 0)
    assert whole.tools.keys() == {"ask"}


def test_what_a_carried_call_in_doubt_had_reserved_is_in_one_run_only(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000))
    ask = way.tool(ledger, Tool(Died(), answer()), name="ask", kind="model", max_tokens=300)

    def agent() -> Any:
        yield ask()

    agent_of = way.agent(ledger, agent, name="agent")
    with contextlib.suppress(Died):
        way.start(ledger, agent_of)
    bench.owners_die()
    again = bench.open().fork(RUN, 2)
    cost = cost_of(ledger, again)
    assert (cost.reserved_tokens, cost.carried_tokens) == (0, 300)
    way.start(ledger, agent_of, run_id=again)
    cost = cost_of(ledger, again)
    assert (cost.spent.tokens, cost.spent.unmetered, cost.carried_tokens) == (150, 0, 300)
    whole = ledger.cost()
    assert (whole.spent.tokens, whole.reserved_tokens) == (150, 300)


def test_ten_thousand_small_costs_sum_exactly_and_no_step_is_kept() -> None:
    from agent_run_ledger.contract import Row
    from agent_run_ledger.engine.costing import Costing

    def row(seq: int, kind: str, fields: str) -> Row:
        body = f'{{"at":1,"token":1,"kind":"{kind}",{fields}}}'.encode()
        return Row(seq, kind, str(seq // 2), 1, body, b"", None, None, None, None)

    fold = Costing(RUN)
    for number in range(10_000):
        fold.take(row(2 * number, "intent", '"tool":"ask","model":true'))
        uses = '"usage":[{"model":"m","input_tokens":1,"usd":"0.0000001"}],"charges":{"tokens":1,"usd":"0.0000001"}'
        fold.take(row(2 * number + 1, "outcome", f'"ok":"completed",{uses}'))
    spent = fold.cost("RUNNING").spent
    assert (spent.calls, spent.tokens, spent.usd) == (10_000, 10_000, Decimal("0.001"))


def test_nothing_at_all_costs_nothing(bench: Bench) -> None:
    ledger = bench.open()
    assert ledger.cost().runs == ()
    ledger.create_run("idle", RUN)
    cost = cost_of(ledger, None)
    assert (cost.spent.calls, cost.spent.usd, len(cost.runs)) == (0, Decimal(0), 1)
    with pytest.raises(RunNotFound):
        ledger.cost("nobody")
