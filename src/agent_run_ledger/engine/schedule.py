"""When a worker has to look again at a run that is given back: nobody polls runs, so whoever lets go of one says so."""

from __future__ import annotations

from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.words import RunState

AGAIN_SECONDS = 60.0
"""How long a run that only other code, or a receiver that answers, can help is left alone before it is tried again."""
SOON_SECONDS = 5.0
"""The same for one that met somebody who had what it needs."""


def due_in(run: LiveRun, now: float) -> float | None:
    """Seconds until somebody should go on with the run as its owner leaves it; None: not before somebody asks something of it.

    `now` is the owner's wall clock, as the times in the log are: only the difference leaves the process.
    """
    history = run.history
    if history.state.is_terminal or history.state is RunState.QUARANTINE:
        return None
    if run.is_draining or run.requests:
        return 0.0
    if run.again_in is not None:
        return run.again_in
    if run.divergence is not None:
        return AGAIN_SECONDS
    if history.retry_at is not None and history.retry_at > now:
        return history.retry_at - now
    open_steps = [step for step in history.positions.values() if step.outcome is None]
    if run.is_suspended or run.resting:
        ends = [step.until for step in open_steps if step.until is not None]
        return max(0.0, min(ends) - now) if ends else None
    if history.state is not RunState.BLOCKED:
        return 0.0  # it was stopped between two steps
    return AGAIN_SECONDS if any(step.has_receipt for step in open_steps) else None
