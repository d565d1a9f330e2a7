"""Exact dollars: amounts that are never rounded, whatever decimal context the program has set."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow

_EXACT = Context(prec=120, traps=[DivisionByZero, Inexact, InvalidOperation, Overflow])
"""Amounts have at most 15 + 30 digits, token counts at most 19: no sum or product of a run comes near 120, and one that did
would be an error, not a rounded amount."""

_MOST = Decimal(10) ** 15
_FINEST = -30
_LONGEST_TEXT = 64


def exact_usd(value: object) -> Decimal:
    """The amount as an exact decimal: an int, a text, a `Decimal`, or a float by its shortest text (0.1 is one tenth).

    At least 0, below 10**15, at most 30 decimals. Raises `TypeError` for other types, `ValueError` for other amounts.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise TypeError(f"an amount of dollars is an int, a text, a Decimal or a float, not {type(value).__name__}")
    if isinstance(value, int) and not 0 <= value < _MOST:
        raise ValueError("an amount of dollars is at least 0 and below 10**15")
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        raise ValueError("an amount of dollars has at most 64 characters")
    try:
        amount = Decimal(float.__repr__(value) if isinstance(value, float) else value)
    except InvalidOperation as error:
        raise ValueError(f"an amount of dollars is a number, not {value!r}") from error
    exponent = amount.as_tuple().exponent
    if not isinstance(exponent, int) or not 0 <= amount < _MOST or exponent < _FINEST:
        raise ValueError(f"an amount of dollars is at least 0, below 10**15, with at most 30 decimals, not {value!r}")
    return amount.copy_abs()


def add(amounts: Iterable[Decimal]) -> Decimal:
    """Their exact sum; 0 for none."""
    total = Decimal(0)
    for amount in amounts:
        total = _EXACT.add(total, amount)
    return total


def per_million(tokens: int, price: Decimal) -> Decimal:
    """What so many tokens cost exactly, at a price in dollars per million."""
    return _EXACT.scaleb(_EXACT.multiply(Decimal(tokens), price), -6)
