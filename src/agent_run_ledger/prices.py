"""What tokens cost: the seam that a price list stands behind, and a list with exact decimals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from agent_run_ledger.rules import money
from agent_run_ledger.usage import Usage

_DATE = re.compile(r"(?:-\d{4}-\d{2}-\d{2}|[-@]\d{8})\Z", re.ASCII)


class Prices(Protocol):
    """Where prices come from."""

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """What this usage of this model costs, in dollars, exactly; None where that is not known. Its ``usd`` is not looked at."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a model charges for each bucket, in dollars per million tokens: a text, an int or a `Decimal`, no float.

    A bucket without a price is not free: a usage that has tokens in it has no known cost. ``long_cache_write`` is for writes
    that are kept longer than usual. Reasoning is charged as output. ::

        Price(input="3", cache_read="0.30", cache_write="3.75", long_cache_write="6", output="15")
    """

    input: Decimal | str | int
    output: Decimal | str | int
    cache_read: Decimal | str | int | None = None
    cache_write: Decimal | str | int | None = None
    long_cache_write: Decimal | str | int | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cache_read", "cache_write", "long_cache_write"):
            value = getattr(self, name)
            if isinstance(value, float):
                raise TypeError(f"Price.{name} is exact: write {value!r} as a text")
            if value is not None or name in ("input", "output"):
                object.__setattr__(self, name, money.exact_usd(value))

    def of(self, usage: Usage) -> Decimal | None:
        """What this usage costs, or None where a bucket with tokens has no price."""
        amounts = []
        for tokens, price in (
            (usage.input_tokens, self.input),
            (usage.cache_read_tokens, self.cache_read),
            (usage.cache_write_tokens - usage.long_cache_write_tokens, self.cache_write),
            (usage.long_cache_write_tokens, self.long_cache_write),
            (usage.output_tokens, self.output),
        ):
            if tokens and price is None:
                return None
            if tokens:
                assert isinstance(price, Decimal)  # made so above
                amounts.append(money.per_million(tokens, price))
        return money.add(amounts)


class PriceBook:
    """A list of prices by model.

    A model is looked up by its name as it is; else without the date at its end (``-2026-05-01``, ``-20260501``, ``@20260501``) and
    without ``models/`` at its beginning, as Gemini puts it. Upper and lower case differ. No other name is guessed at. ::

        PriceBook({"some-model": Price(input="2.50", cache_read="1.25", output="10")})
    """

    def __init__(self, prices: Mapping[str, Price]) -> None:
        for model, price in prices.items():
            if type(model) is not str or type(price) is not Price:
                raise TypeError(f"a PriceBook has a Price for each model's name, not {price!r} for {model!r}")
        self._prices = dict(prices)

    def __repr__(self) -> str:
        return f"PriceBook({self._prices!r})"

    def price(self, model: str) -> Price | None:
        """The price of this model, or None."""
        name = model.removeprefix("models/")
        for candidate in (model, name, _DATE.sub("", name)):
            if candidate in self._prices:
                return self._prices[candidate]
        return None

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """As `Prices.cost`."""
        price = self.price(model)
        return None if price is None else price.of(usage)


def cost_of(usage: Usage, model: str | None, prices: Prices | None) -> Decimal | None:
    """What a usage costs: the dollars that the provider said, else by the prices, else None, which is not 0."""
    if usage.usd is not None:
        return usage.usd
    return None if model is None or prices is None else listed(usage, model, prices)


def listed(usage: Usage, model: str, prices: Prices) -> Decimal | None:
    """What a list of prices says. One that fails, or says what is no price, does not know: what a call has answered is worth more."""
    try:
        cost = prices.cost(usage, model)
        return None if cost is None else money.exact_usd(cost)
    except Exception as error:
        import logging  # not free to import, and seldom needed

        said = f"{type(error).__name__}: {error}"
        logging.getLogger("agent_run_ledger").error("the price of %r is not known, for its list fails: %s", model, said)
        return None
