"""How alike two inputs are: the cosine of their words, or of what an embedder makes of them."""

from __future__ import annotations

from math import sqrt

from agent_run_ledger.rules.loops import wording

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Embedder = Callable[[str], Sequence[float]]


def count_words(text: str) -> dict[str, int]:
    """How often each word stands in the text: a vector with a dimension for every word, of which few are not zero."""
    counts: dict[str, int] = {}
    for word in wording.words(text):
        counts[word] = counts.get(word, 0) + 1
    return counts


def cosine_of_words(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """From 0, no word in common, to 1, the same words equally often."""
    if len(other) < len(one):
        one, other = other, one
    common = sum([count * other[word] for word, count in one.items() if word in other])
    return _ratio(common, sum([x * x for x in one.values()]) * sum([x * x for x in other.values()]))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors of one length, from -1 to 1; 0 where one of them is all zeros."""
    if len(one) != len(other):
        raise ValueError(f"the embedder gave vectors of {len(one)} and of {len(other)} numbers")
    common = sum([x * y for x, y in zip(one, other, strict=True)])
    return _ratio(common, sum([x * x for x in one]) * sum([y * y for y in other]))


def _ratio(common: float, squares: float) -> float:
    return common / sqrt(squares) if squares else 0.0
