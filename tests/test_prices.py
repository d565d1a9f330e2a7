from __future__ import annotations

import socket
import subprocess
import sys
from decimal import Decimal, localcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import GenaiPrices, Price, PriceBook, Prices, Usage
from agent_run_ledger.prices import cost_of
from support.processes import environment
from test_usage import SHAPES, WORK, Shape, gemini, usages

SONNET = Price(input="3", cache_read="0.30", cache_write="3.75", long_cache_write="6", output="15")
BOOK = PriceBook({"sonnet": SONNET, "gpt-5": Price(input="1.25", cache_read=Decimal("0.125"), output=10)})


# --- a list with exact decimals ---------------------------------------------------------------------------------------


def test_each_bucket_is_charged_once_at_its_own_price() -> None:
    # 1200 × 3 + 5000 × 0.30 + 500 × 3.75 + 300 × 6 + 450 × 15, reasoning inside the output
    assert BOOK.cost(WORK, "sonnet") == Decimal("0.015525")


@pytest.mark.parametrize("shape", SHAPES)
@given(work=usages())
def test_the_same_work_costs_the_same_in_every_shape(shape: Shape, work: Usage) -> None:
    read = Usage.read(shape(work))
    assert read is not None
    assert BOOK.cost(read, "sonnet") == BOOK.cost(work, "sonnet")


def test_the_same_work_costs_the_same_at_gemini() -> None:
    work = Usage(input_tokens=2000, cache_read_tokens=5000, output_tokens=450, reasoning_tokens=300)
    read = Usage.read({"usageMetadata": gemini(work)})
    assert read is not None
    assert BOOK.cost(read, "sonnet") == BOOK.cost(work, "sonnet") == Decimal("0.01425")


@given(st.lists(usages(), min_size=1, max_size=20))
def test_the_cost_of_a_sum_is_the_sum_of_the_costs(works: list[Usage]) -> None:
    total = sum(works, Usage())
    costs = [cost for work in works if (cost := BOOK.cost(work, "sonnet")) is not None]
    assert BOOK.cost(total, "sonnet") == sum(costs)


def test_ten_thousand_small_costs_are_exact_at_any_precision() -> None:
    book = PriceBook({"m": Price(input="0.0000007", output="0.0000011")})
    with localcontext() as context:
        context.prec = 2
        cost = book.cost(Usage(input_tokens=1, output_tokens=1), "m")
        assert cost == Decimal("0.0000000000018")
        total = sum((Usage(usd=cost) for _ in range(10_000)), Usage())
    assert total.usd == Decimal("0.000000018")


@given(usages(), st.decimals(min_value=0, max_value=10**6, places=12))
def test_a_cost_is_exactly_the_fraction_that_it_is(work: Usage, price: Decimal) -> None:
    from fractions import Fraction

    cost = Price(price, price, price, price, price).of(work)
    assert cost is not None
    assert Fraction(cost) == Fraction(price) * work.total_tokens / 10**6


@pytest.mark.parametrize(
    "usage",
    [Usage(cache_read_tokens=1), Usage(cache_write_tokens=1), Usage(cache_write_tokens=1, long_cache_write_tokens=1)],
)
def test_a_bucket_without_a_price_is_unknown_and_not_free(usage: Usage) -> None:
    assert Price(input=1, output=1).of(usage) is None
    assert Price(input=1, output=1).of(Usage(input_tokens=1)) == Decimal("0.000001")


def test_nothing_costs_nothing_and_a_free_model_too() -> None:
    assert BOOK.cost(Usage(), "sonnet") == 0
    assert Price(input=0, output=0).of(Usage(5, 0, 0, 5)) == 0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gpt-5", True),
        ("gpt-5-2026-08-07", True),
        ("gpt-5-20260807", True),
        ("gpt-5@20260807", True),
        ("models/gpt-5", True),
        ("models/gpt-5-2026-08-07", True),
        ("gpt-5-mini", False),
        ("gpt-5-mini-2026-08-07", False),
        ("gpt-5-2026", False),
        ("gpt-5-latest", False),
        ("gpt-5-2026-08-07\n", False),
        ("GPT-5", False),
        ("openai/gpt-5", False),
        ("gpt", False),
        ("", False),
    ],
)
def test_a_model_is_found_by_its_name_with_or_without_a_date_and_by_no_other(name: str, found: bool) -> None:
    assert (BOOK.cost(Usage(1), name) is not None) is found


def test_a_dated_price_goes_before_an_undated_one() -> None:
    book = PriceBook({"m": Price(1, 1), "m-2026-01-01": Price(2, 2)})
    assert book.cost(Usage(1_000_000), "m-2026-01-01") == 2
    assert book.cost(Usage(1_000_000), "m-2026-01-02") == 1


@pytest.mark.parametrize("wrong", [0.5, True, None, b"1"])
def test_prices_that_are_not_exact_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        Price(input=wrong, output="1")
    with pytest.raises(TypeError):
        Price(input="1", output=wrong)


@pytest.mark.parametrize("wrong", ["-1", "NaN", "cheap", "1e-31", 10**15])
def test_impossible_prices_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="dollars"):
        Price(input="1", cache_read=wrong, output="1")


@pytest.mark.parametrize("wrong", [{"m": "1"}, {1: Price(1, 1)}])
def test_a_book_has_prices_by_name_only(wrong: Any) -> None:
    with pytest.raises(TypeError, match="PriceBook"):
        PriceBook(wrong)


def test_a_book_does_not_change_with_what_it_was_made_of() -> None:
    prices = {"m": Price(1, 1)}
    book = PriceBook(prices)
    prices.clear()
    assert book.cost(Usage(1), "m") is not None


# --- what the engine asks ---------------------------------------------------------------------------------------------


def test_what_the_provider_says_goes_before_the_list() -> None:
    assert cost_of(Usage(1_000_000, usd=Decimal("0.5")), "sonnet", BOOK) == Decimal("0.5")
    assert cost_of(Usage(1_000_000), "sonnet", BOOK) == 3
    assert cost_of(Usage(1_000_000, usd=Decimal(0)), "sonnet", BOOK) == 0


@pytest.mark.parametrize(("model", "prices"), [(None, BOOK), ("sonnet", None), ("other", BOOK)])
def test_a_cost_that_nobody_knows_is_none(model: str | None, prices: Prices | None) -> None:
    assert cost_of(Usage(1), model, prices) is None


# --- genai-prices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
def test_bundled_prices_agree_with_a_list_of_the_same_prices() -> None:
    prices: Prices = GenaiPrices()
    assert prices.cost(WORK, "claude-sonnet-4-5") == BOOK.cost(WORK, "sonnet")
    assert prices.cost(WORK, "claude-sonnet-4-5-20250929") == BOOK.cost(WORK, "sonnet")
    assert GenaiPrices("anthropic").cost(WORK, "claude-sonnet-4-5") == BOOK.cost(WORK, "sonnet")


@given(work=st.builds(Usage, *[st.integers(0, 60_000)] * 4))
def test_bundled_prices_are_exact_at_any_precision(work: Usage) -> None:
    with localcontext() as context:
        context.prec = 2
        assert GenaiPrices().cost(work, "claude-sonnet-4-5") == BOOK.cost(work, "sonnet")


def test_bundled_prices_know_that_long_inputs_cost_more() -> None:
    assert GenaiPrices().cost(Usage(300_000), "gemini-2.5-pro") == Decimal("0.75")
    assert GenaiPrices().cost(Usage(100_000), "gemini-2.5-pro") == Decimal("0.125")


@pytest.mark.parametrize(
    ("usage", "model", "provider"),
    [
        (Usage(1), "no-such-model", None),
        (Usage(1), "", None),
        (Usage(1), "claude-sonnet-4-5", "no-such-provider"),
        (Usage(1), "claude-sonnet-4-5", "openai"),
        (Usage(cache_write_tokens=1), "gpt-4o", None),
        (Usage(cache_write_tokens=1, long_cache_write_tokens=1), "gpt-4o", None),
    ],
)
def test_bundled_prices_say_none_where_they_have_no_price(usage: Usage, model: str, provider: str | None) -> None:
    assert GenaiPrices(provider).cost(usage, model) is None


def test_bundled_prices_are_loaded_when_they_are_asked_for() -> None:
    program = (
        "import sys; from agent_run_ledger import GenaiPrices; assert 'genai_prices' not in sys.modules\n"
        "GenaiPrices(); assert 'genai_prices' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    with pytest.raises(ImportError, match=r"\[prices\]"):
        GenaiPrices()
