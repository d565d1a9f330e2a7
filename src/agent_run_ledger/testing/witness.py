"""What the outside saw of one trial: the difference between what a witness says before it and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from agent_run_ledger.testing.flows import as_text

Witness = Callable[[], Any]
"""Says what the outside has now: a list of effects, a mapping of what to how often, or a number."""

THE_NUMBER = "the number of effects"


def look(witness: Witness | None) -> Counter[str] | None:
    """What the outside has now, as counts. Raises `TypeError` for an answer that cannot be counted."""
    if witness is None:
        return None
    said = witness()
    if isinstance(said, Mapping):
        if not all(_is_number(count) for count in said.values()):
            raise TypeError(f"a witness's mapping says of each thing how often it was seen, and not {said!r}")
        return Counter({as_text(what): count for what, count in said.items()})
    if _is_number(said):
        return Counter({THE_NUMBER: said})
    if isinstance(said, Iterable) and not isinstance(said, str | bytes):
        return Counter(map(as_text, said))
    raise TypeError(f"a witness returns a list of effects, a mapping of what to how often, or a number, not {said!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def since(before: Counter[str] | None, after: Counter[str] | None) -> Counter[str] | None:
    """What came in between. What was taken away counts as nothing."""
    if before is None or after is None:
        return None
    # A sum of floats is seldom the same to the last digit.
    return Counter(
        {what: round(count, 9) if isinstance(count, float) else count for what, count in (after - before).items()}
    )
