"""The price list that the package genai-prices carries, behind the seam of `Prices`. The extra ``[prices]`` installs it."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

from agent_run_ledger.usage import Usage


class GenaiPrices:
    """Prices of the public models of many providers, as bundled with the installed version of genai-prices. No network is used.

    The package finds a model by its own rules, dated and prefixed names too, and knows prices that depend on the length of the
    input: price each call, not a sum of calls. Without ``provider`` ("openai", "anthropic", "google", "aws", …) it takes the
    provider that fits the name best. A bucket for which its list has no price is not known here, where the package would charge
    it as input or as nothing. Raises ImportError where genai-prices is not installed.
    """

    def __init__(self, provider: str | None = None) -> None:
        try:
            import genai_prices
        except ImportError as error:
            raise ImportError(
                "GenaiPrices needs the package genai-prices: install the extra [prices]. A PriceBook needs nothing."
            ) from error
        self._package = genai_prices
        self._provider = provider

    def cost(self, usage: Usage, model: str) -> Decimal | None:
        """As `Prices.cost`."""
        long_writes = usage.long_cache_write_tokens
        counts = {
            "input_tokens": usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens,
            "cache_read_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "cache_write_1h_tokens": long_writes,
            "output_tokens": usage.output_tokens,
        }
        with localcontext(Context(prec=120)):  # a program's own precision rounds nothing
            try:
                found = self._package.calc_price(
                    self._package.Usage(**{name: count for name, count in counts.items() if count}),
                    model,
                    provider_id=self._provider,
                )
            except LookupError:
                return None
        has_price = {
            "input_mtok": usage.input_tokens,
            "cache_read_mtok": usage.cache_read_tokens,
            "cache_write_mtok": usage.cache_write_tokens - long_writes,
            "cache_write_1h_mtok": long_writes,
            "output_mtok": usage.output_tokens,
        }
        if any(tokens and getattr(found.model_price, name, None) is None for name, tokens in has_price.items()):
            return None
        return Decimal(found.total_price)
