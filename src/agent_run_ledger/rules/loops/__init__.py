"""Loop detectors: each sees the last calls and their outcomes, and says ok, suspected or certain, with its evidence."""

from __future__ import annotations

from agent_run_ledger.rules import canonical, failures
from agent_run_ledger.rules.loops import signs
from agent_run_ledger.rules.loops.breaker import Breaker, Rule
from agent_run_ledger.rules.loops.calls import ERRORS_LOOKED_AT, LOOKED_AT

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from agent_run_ledger.rules.loops.similarity import Embedder

NOTICE, BLOCK, HALT = STAGES = ("notice", "block", "halt")
"""What a loop is met with, one after the other as it goes on."""
HALTS = {"suspected": HALT, "certain": HALT}
"""What it is met with first, where nobody says."""
MAX_REPETITIONS, ALIKE = 3, 0.92
"""What `LoopDetectorPolicy` has for `max_repetitions` and `threshold` where nobody says."""


def breaker(max_repetitions: int = MAX_REPETITIONS, threshold: float = ALIKE, embedder: Embedder | None = None) -> Rule:
    """A fresh rule, as a run's history is folded with."""
    row = max(max_repetitions, signs.TURNS)
    return Breaker(
        signs.Identical(max_repetitions),
        (
            signs.Cycle(),
            signs.Repetition(row),
            signs.SimilarInputs(row + 2, threshold, embedder),
            signs.NothingNew(row + 1, embedder),
        ),
    )


def looked_at(arguments: bytes | None) -> str | None:
    """Stored arguments as the rules look at them; None where they are too long, erased, or damaged."""
    if arguments is None or len(arguments) > LOOKED_AT:
        return None
    try:
        return arguments.decode()
    except ValueError:
        return None


def answered(outcome: bytes | None, *, is_error: bool) -> str | None:
    """A stored outcome as the rules look at it; None where it is too long, erased, or damaged.

    A text as it is, an error as `Type: message`, and all else as canonical JSON. Whoever is handed a damaged one is told that it is.
    """
    if outcome is None or len(outcome) > (ERRORS_LOOKED_AT if is_error else LOOKED_AT):
        return None
    try:
        if is_error:
            return failures.text(canonical.decode(outcome))
        return str(canonical.decode(outcome)) if outcome.startswith(b'"') else outcome.decode()
    except (ValueError, AttributeError):
        return None
