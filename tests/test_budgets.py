"""Budgets hold: what a call may use is reserved before it is made, and what it used is charged, over crashes, retries and branches."""

from __future__ import annotations

import contextlib
import threading
from decimal import Decimal
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    InvalidArguments,
    Price,
    PriceBook,
    RetryPolicy,
    Run,
    StepFailed,
    Usage,
    current_step,
)
from agent_run_ledger.drivers import reading
from agent_run_ledger.rules.budget import NOTHING, Amount
from support.ledgers import Bench, Died, Tool
from support.programs import RUN, Way, calling

PRICES = PriceBook({"m": Price(input="2", output="10")})


def answer(given: int = 100, said: int = 50, **more: Any) -> dict[str, Any]:
    """What a model's client returns."""
    return {"model": "m", "usage": {"prompt_tokens": given, "completion_tokens": said}, **more}


def spent(ledger: AgentRunLedger, run_id: str = RUN) -> tuple[int, Decimal]:
    run = ledger.get_run(run_id)
    return run.spent_tokens, run.spent_usd


def held(ledger: AgentRunLedger) -> Amount:
    """What is reserved, all calls together."""
    of = NOTHING
    for amount in reading.read(ledger._store, RUN).account.held.values():
        of = of.plus(amount)
    return of


def committed(ledger: AgentRunLedger) -> Amount:
    """What is spent and what is reserved, at one moment."""
    account = reading.read(ledger._store, RUN).account
    total = account.spent
    for amount in account.held.values():
        total = total.plus(amount)
    return total


def test_what_a_model_says_that_it_used_is_charged_and_a_replay_costs_nothing(bench: Bench, way: Way) -> None:
    model = Tool(answer())
    ledger = bench.open(prices=PRICES)
    ask = way.tool(ledger, model, name="ask", kind="model")

    def agent() -> Any:
        yield ask()
        yield ask()

    agent_of = way.agent(ledger, agent, name="agent")
    way.start(ledger, agent_of)
    assert spent(ledger) == (300, Decimal("0.0014"))
    way.start(ledger, agent_of)
    assert (spent(ledger), model.calls) == ((300, Decimal("0.0014")), 2)
    assert ledger.verify().findings == []


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(tokens=400), "the call may use 150 tokens, and of 400 tokens 100 tokens are left"),
        (Budget(usd="0.002"), "the call may use 0.0008 USD, and of 0.002 USD 0.0006 USD are left"),
    ],
)
def test_a_call_that_may_use_more_than_is_left_is_not_made(bench: Bench, way: Way, budget: Budget, reason: str) -> None:
    model = Tool(answer())
    ledger = bench.open(prices=PRICES, budget=budget)
    ask = way.tool(ledger, model, name="ask", kind="model", max_tokens=150, max_usd="0.0008")

    def agent() -> Any:
        while True:
            yield ask()

    with pytest.raises(BudgetExceededException, match=reason):
        way.run(ledger, agent, name="agent")
    assert (ledger.get_run(RUN).status, model.calls) == ("DEAD_LETTER", 2)
    assert ledger.verify().findings == []


def test_one_of_which_nothing_is_known_reserves_what_is_left_and_is_charged_what_it_used(
    bench: Bench, way: Way
) -> None:
    ledger = bench.open(budget=Budget(tokens=1000), prices=PRICES)
    seen: list[Amount] = []

    def model() -> Any:
        seen.append(held(ledger))
        return answer()

    ask = way.tool(ledger, model, name="ask", kind="model")

    def agent() -> Any:
        yield ask()
        yield ask()

    way.run(ledger, agent, name="agent")
    assert [amount.tokens for amount in seen] == [1000, 850]
    assert (spent(ledger)[0], held(ledger)) == (300, Amount())


def test_a_request_that_bounds_itself_reserves_no_more_than_that(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=100_000), prices=PRICES)
    seen: list[Amount] = []

    def model(messages: list[dict[str, str]], max_tokens: int, model: str) -> Any:
        seen.append(held(ledger))
        return answer()

    ask = way.tool(ledger, model, name="ask", kind="model")

    def agent() -> Any:
        yield ask([{"role": "user", "content": "How are you?"}], max_tokens=200, model="m")

    way.run(ledger, agent, name="agent")
    assert 200 < seen[0].tokens < 2000


def test_usage_that_nobody_tells_is_charged_as_it_was_reserved(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000, usd=1), prices=PRICES)
    ask = way.tool(ledger, Tool("I forgot"), name="ask", kind="model", max_tokens=300, max_usd="0.25")

    def agent() -> Any:
        yield ask()

    way.run(ledger, agent, name="agent")
    assert spent(ledger) == (300, Decimal("0.25"))


def test_tokens_without_a_known_price_are_charged_as_the_money_that_was_reserved(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(usd=1))
    ask = way.tool(ledger, Tool(answer()), name="ask", kind="model", max_usd="0.25")

    def agent() -> Any:
        yield ask()

    way.run(ledger, agent, name="agent")
    assert spent(ledger) == (150, Decimal("0.25"))


def test_a_call_that_was_surely_not_carried_out_costs_nothing(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000))
    ask = way.tool(
        ledger, Tool(ConnectionRefusedError("down"), ValueError("odd")), name="ask", kind="model", max_tokens=300
    )

    def agent() -> Any:
        for _ in range(2):
            with contextlib.suppress(StepFailed):
                yield ask()

    way.run(ledger, agent, name="agent")
    assert spent(ledger) == (300, Decimal(0))  # of the second nobody knows


def test_a_retry_reserves_anew_and_what_failed_is_spent(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=700), clock=bench.clock)
    model = Tool(ValueError("odd"))
    ask = way.tool(
        ledger, model, name="ask", kind="model", max_tokens=300, retry=RetryPolicy(max_attempts=9, base=0.01, cap=0.01)
    )

    def agent() -> Any:
        yield ask()

    with pytest.raises(
        BudgetExceededException, match="the call may use 300 tokens, and of 700 tokens 100 tokens are left"
    ):
        way.run(ledger, agent, name="agent")
    assert (model.calls, spent(ledger)[0]) == (2, 600)
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    assert ledger.verify().findings == []


def test_an_attempt_whose_process_died_has_spent_what_it_reserved(bench: Bench, way: Way) -> None:
    def start(*answers: Any) -> AgentRunLedger:
        bench.owners_die()
        ledger = bench.open(budget=Budget(tokens=1000))
        ask = way.tool(ledger, Tool(*answers), name="ask", kind="model", max_tokens=300)

        def agent() -> Any:
            yield ask()

        agent_of = way.agent(ledger, agent, name="agent")
        with contextlib.suppress(Died):
            way.start(ledger, agent_of)
        return ledger

    assert spent(start(Died()))[0] == 0
    ledger = start(answer())
    assert spent(ledger)[0] == 300 + 150
    assert ledger.verify().findings == []


def test_an_overrun_is_recorded_and_ends_dispatching(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=400))
    ask = way.tool(ledger, Tool(answer(900, 100)), name="ask", kind="model", max_tokens=300)
    look = way.tool(ledger, Tool("nothing"), name="look", effect=Effect.READ)

    def agent() -> Any:
        yield ask()
        yield look()

    with pytest.raises(BudgetExceededException, match="1,000 tokens were used where 400 tokens were allowed"):
        way.run(ledger, agent, name="agent")
    assert spent(ledger)[0] == 1000
    assert b'"overran":true' in bench.rows(RUN)[2].body


def test_a_call_waits_while_only_what_others_have_reserved_stands_in_its_way(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000), prices=PRICES)
    most: list[int] = []
    lock = threading.Lock()
    running = [0]

    def model(number: int) -> Any:
        with lock:
            running[0] += 1
            most.append(running[0])
            assert committed(ledger).tokens <= 1000
        with lock:
            running[0] -= 1
        return answer(50, 50)

    ask = way.tool(ledger, model, name="ask", kind="model", max_tokens=400)

    def agent(run: Run) -> Any:
        return (yield run.map(ask, [1, 2, 3, 4, 5, 6]))

    assert len(way.run(ledger, agent, name="agent")) == 6
    assert (spent(ledger)[0], len(most)) == (600, 6)
    assert ledger.verify().findings == []


def test_what_a_step_records_of_its_usage_goes_before_what_its_answer_says(bench: Bench, way: Way) -> None:
    ledger = bench.open(prices=PRICES)

    def model() -> Any:
        current_step().record_usage({"prompt_tokens": 10, "completion_tokens": 5}, model="m")
        current_step().record_usage(Usage(input_tokens=1), usd="0.5")
        current_step().record_usage(usd=Decimal("0.25"))
        for wrong in ({"usage": "?"}, None):
            with pytest.raises(InvalidArguments, match="nothing was recorded"):
                current_step().record_usage(wrong)
        return answer()

    ask = way.tool(ledger, model, name="ask")

    def agent() -> Any:
        yield ask()

    way.run(ledger, agent, name="agent")
    assert spent(ledger) == (16, Decimal("0.75007"))


def test_the_time_in_which_a_program_is_at_work_is_limited_and_waiting_is_not(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(seconds=10))

    def work() -> None:
        bench.clock.advance(4.0)

    work_for_long = way.tool(ledger, work, name="work", effect=Effect.READ, may_repeat=True)

    def agent(run: Run) -> Any:
        yield work_for_long()
        yield run.sleep(20.0)
        for _ in range(5):
            yield work_for_long()

    with pytest.raises(BudgetExceededException, match=r"it was at work for 12\.\d s, and may be for 10 s"):
        way.run(ledger, agent, name="agent")
    assert ledger.get_run(RUN).total_steps == 4


def test_redrive_goes_on_with_a_larger_budget_and_pays_nothing_again(bench: Bench, way: Way) -> None:
    model = Tool(answer())
    ledger = bench.open(budget=Budget(tokens=400), prices=PRICES)
    ask = way.tool(ledger, model, name="ask", kind="model", max_tokens=150)

    def agent() -> Any:
        for _ in range(4):
            yield ask()

    agent_of = way.agent(ledger, agent, name="agent")
    with pytest.raises(BudgetExceededException):
        way.start(ledger, agent_of)
    again = ledger.redrive(RUN, budget=Budget(tokens=700))
    way.start(ledger, agent_of, run_id=again)
    assert (model.calls, spent(ledger, again)[0]) == (4, 600)
    assert ledger.verify().findings == []


def test_a_notice_says_once_that_a_budget_is_nearly_used_up(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000, notice_at=0.5), prices=PRICES)
    ask = way.tool(ledger, Tool(answer(200, 100)), name="ask", kind="model", max_tokens=300)

    def agent(run: Run) -> Any:
        heard = []
        for _ in range(3):
            yield ask()
            heard.append([notice.text for notice in run.notices()])
        return heard

    said = "Notice: more than 50% of the budget of 1000 tokens is used. Come to an end soon."
    assert way.run(ledger, agent, name="agent") == [[], [said], [said]]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"tokens": 1.5}, {"usd": 0}, {"usd": "much"}, {"usd": True}, {"usd": float("inf")}, {"seconds": 0},
     {"seconds": float("nan")}, {"notice_at": 1.5}, {"notice_at": 0}],
)  # fmt: skip
def test_a_budget_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Budget.{next(iter(wrong))}"):
        Budget(**wrong)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"max_tokens": "9"}, {"max_usd": -1}, {"max_usd": "x"}])
def test_a_maximum_that_is_none_is_refused(bench: Bench, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments, match=next(iter(wrong))):
        bench.open().tool(**wrong)(answer)


def test_where_unknown_prices_are_refused_no_call_is_made_of_which_nothing_says_what_it_may_cost(
    bench: Bench, way: Way
) -> None:
    ledger = bench.open(budget=Budget(usd=1), prices=PRICES, unknown_price="refuse")
    model = Tool(answer())
    known = way.tool(ledger, lambda messages, max_tokens, model: answer(), name="known", kind="model")
    bounded = way.tool(ledger, Tool(answer()), name="bounded", kind="model", max_usd="0.1")
    unknown = way.tool(ledger, model, name="unknown", kind="model")

    def agent() -> Any:
        yield known([{"role": "user", "content": "?"}], max_tokens=9, model="m")
        yield bounded()
        yield unknown()

    with pytest.raises(BudgetExceededException, match="nothing says what a call of 'unknown' may cost"):
        way.run(ledger, agent, name="agent")
    assert (model.calls, ledger.get_run(RUN).total_steps) == (0, 2)
    with pytest.raises(ValueError, match="unknown_price"):
        bench.open(unknown_price="free")


def test_a_price_is_found_by_the_model_that_a_request_names_where_its_answer_names_none(bench: Bench, way: Way) -> None:
    ledger = bench.open(prices=PRICES)
    said = {"usage": {"inputTokens": 100, "outputTokens": 50, "totalTokens": 150}}
    ask = way.tool(ledger, lambda modelId: said, name="ask", kind="model")  # noqa: N803 - as it is called there

    def agent() -> Any:
        yield ask("m")

    way.run(ledger, agent, name="agent")
    assert spent(ledger) == (150, Decimal("0.0007"))


# --- what is somebody else's ------------------------------------------------------------------------------------------


class Failing:
    """A list of prices that says this, or raises it."""

    def __init__(self, says: Any) -> None:
        self._says = says

    def cost(self, usage: Usage, model: str) -> Any:
        if isinstance(self._says, Exception):
            raise self._says
        return self._says


@pytest.mark.parametrize("says", [RuntimeError("down"), Decimal("NaN"), Decimal(-1), Decimal(10) ** 40, "x", object()])
def test_a_price_list_that_fails_loses_no_answer_and_gives_no_room_back(
    bench: Bench, way: Way, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tool(answer())
    ledger = bench.open(prices=Failing(says), budget=Budget(usd=1))
    ask = way.tool(ledger, model, name="ask", kind="model", max_usd="0.25")
    way.run(ledger, calling(ask), name="agent")
    assert model.calls == 1
    assert spent(ledger) == (150, Decimal("0.25"))
    assert ledger.cost(RUN).spent.unpriced == 1
    assert "the price of 'm' is not known" in caplog.text


def test_usage_is_recorded_while_the_step_is_at_work(bench: Bench) -> None:
    ledger = bench.open()
    kept: list[Any] = []
    with ledger.open_run("goal", RUN) as run:
        run.step("tool", {}, lambda: kept.append(current_step()))
        with pytest.raises(InvalidArguments, match="step 1 had ended"):
            kept[0].record_usage(usd=1)


def test_a_tool_that_is_no_model_and_declares_dollars_alone_uses_no_tokens(bench: Bench, way: Way) -> None:
    ledger = bench.open(budget=Budget(tokens=1000, usd=1))

    def pay() -> None:
        current_step().record_usage(usd="0.01")

    way.run(ledger, calling(way.tool(ledger, pay, max_usd="0.05")), name="agent")
    assert spent(ledger) == (0, Decimal("0.01"))
