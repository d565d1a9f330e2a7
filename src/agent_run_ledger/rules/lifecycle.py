"""δ: what each event does to a run in each state, as one table. What the table does not list is illegal.

`python -m agent_run_ledger.rules.lifecycle` prints the state diagram of the documentation, made from the table.
"""

from __future__ import annotations

from agent_run_ledger.errors import IllegalTransition
from agent_run_ledger.words import Event, RunState

_PENDING, _RUNNING, _BLOCKED = RunState.PENDING, RunState.RUNNING, RunState.BLOCKED
_CHECKPOINTED, _QUARANTINE = RunState.CHECKPOINTED, RunState.QUARANTINE

_EVERY_LIVE_RUN = {
    Event.FINISH: RunState.COMPLETED,
    Event.ABORT: RunState.FAILED,
    Event.CANCEL: RunState.CANCELLED,
    Event.BUDGET_EXHAUSTED: RunState.DEAD_LETTER,
}

DELTA: dict[RunState, dict[Event, RunState]] = {
    _PENDING: {
        **_EVERY_LIVE_RUN,
        Event.START_STEP: _RUNNING,
        Event.WAIT: _BLOCKED,
        Event.HEARTBEAT_EXPIRED: _PENDING,
    },
    _RUNNING: {
        **_EVERY_LIVE_RUN,
        Event.START_STEP: _RUNNING,
        Event.STEP_SUCCESS: _CHECKPOINTED,
        Event.STEP_ERROR: _CHECKPOINTED,
        Event.LOOP_DETECTED: RunState.DEAD_LETTER,
        Event.LOOP_SUSPECTED: _QUARANTINE,
        Event.WAIT: _BLOCKED,
        Event.HEARTBEAT_EXPIRED: _RUNNING,
    },
    _BLOCKED: {
        **_EVERY_LIVE_RUN,
        Event.START_STEP: _RUNNING,
        Event.STEP_SUCCESS: _CHECKPOINTED,
        Event.STEP_ERROR: _CHECKPOINTED,
        Event.LOOP_DETECTED: RunState.DEAD_LETTER,
        Event.LOOP_SUSPECTED: _QUARANTINE,
        Event.WAIT: _BLOCKED,
        Event.WAKE: _CHECKPOINTED,
        Event.HEARTBEAT_EXPIRED: _BLOCKED,
    },
    _CHECKPOINTED: {
        **_EVERY_LIVE_RUN,
        Event.START_STEP: _RUNNING,
        Event.LOOP_DETECTED: RunState.DEAD_LETTER,
        Event.LOOP_SUSPECTED: _QUARANTINE,
        Event.WAIT: _BLOCKED,
        Event.HEARTBEAT_EXPIRED: _CHECKPOINTED,
    },
    _QUARANTINE: {
        Event.RELEASE: _CHECKPOINTED,
        Event.ABORT: RunState.FAILED,
        Event.CANCEL: RunState.CANCELLED,
        Event.HEARTBEAT_EXPIRED: _QUARANTINE,
    },
    RunState.COMPLETED: {},
    RunState.FAILED: {},
    RunState.DEAD_LETTER: {},
    RunState.CANCELLED: {},
}
"""Who owns a run is no part of its state, so an expired heartbeat changes nothing but who may claim it."""

ENDINGS = frozenset(event for row in DELTA.values() for event, state in row.items() if state.is_terminal)
"""The events behind which a run takes nothing more."""


def after(state: RunState, event: Event, run_id: str | None = None) -> RunState:
    """The state that follows. Raises `IllegalTransition` where the table lists none."""
    try:
        return DELTA[state][event]
    except KeyError:
        raise IllegalTransition(state, event, run_id) from None


def diagram() -> str:
    """The table as a Mermaid state diagram, one arrow a pair of states. An expired heartbeat moves nothing and is left out."""
    arrows: dict[tuple[RunState, RunState], list[str]] = {}
    for state, row in DELTA.items():
        for event, target in row.items():
            if event is not Event.HEARTBEAT_EXPIRED:
                arrows.setdefault((state, target), []).append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {RunState.PENDING}"]
    lines += [f"    {state} --> {target}: {', '.join(events)}" for (state, target), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in RunState if state.is_terminal]
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())  # noqa: T201 - this module can be run for it
