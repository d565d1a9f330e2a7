"""When a run has used up what it may use."""

from __future__ import annotations

ENTRIES_PER_STEP = 20
"""A run that writes many entries but few steps (values, retries, parks) ends at this many entries per allowed step."""


def steps_spent(limit: int, steps: int, refused: int) -> str | None:
    """Why no further step may start, or None. First dispatches and refusals count against the limit, retries do not."""
    return f"all {limit} steps of its budget are used" if steps + refused >= limit else None


def entries_spent(limit: int, entries: int) -> str | None:
    """Why no further entry may be written that is no outcome, or None."""
    if entries < ENTRIES_PER_STEP * limit:
        return None
    return f"it has written {entries} entries, {ENTRIES_PER_STEP} times its budget of {limit} steps"


def too_late(deadline: float | None, now: float) -> str | None:
    """Why nothing new may be dispatched at `now`, or None. Both are Unix seconds."""
    return f"its deadline passed {now - deadline:.1f} s ago" if deadline is not None and now >= deadline else None
