"""The words that every step needs: how runs and steps stand, what happens to them, and what is said of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

LIBRARY_VERSION = "0.1.0"
"""What every intent names as a part of its environment; the package's `__version__`."""


MIN_FREE = "AGENT_RUN_LEDGER_MIN_FREE"
"""The environment variable that says how many bytes of the disk stay free, where the program does not say it."""


class RunState(StrEnum):
    """Where a run stands. The last four are final (`is_terminal`)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    BLOCKED = "BLOCKED"
    CHECKPOINTED = "CHECKPOINTED"
    QUARANTINE = "QUARANTINE"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    DEAD_LETTER = "DEAD_LETTER"
    CANCELLED = "CANCELLED"

    __hash__ = str.__hash__  # equal strings hash alike anyway, and Enum's own hash is Python code on the step path

    is_terminal: bool


for _state in RunState:
    _state.is_terminal = _state in (RunState.COMPLETED, RunState.FAILED, RunState.DEAD_LETTER, RunState.CANCELLED)


class Event(StrEnum):
    """What can happen to a run."""

    START_STEP = "START_STEP"
    STEP_SUCCESS = "STEP_SUCCESS"
    STEP_ERROR = "STEP_ERROR"
    HEARTBEAT_EXPIRED = "HEARTBEAT_EXPIRED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    LOOP_DETECTED = "LOOP_DETECTED"
    LOOP_SUSPECTED = "LOOP_SUSPECTED"
    WAIT = "WAIT"
    WAKE = "WAKE"
    RELEASE = "RELEASE"
    FINISH = "FINISH"
    ABORT = "ABORT"
    CANCEL = "CANCEL"

    __hash__ = str.__hash__  # as above


class StepState(StrEnum):
    """Where a step stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"
    DEAD_LETTER = "DEAD_LETTER"


class Effect(StrEnum):
    """What a second dispatch of a tool would do to the outside world."""

    READ = "READ"
    """No side effect: running it again harms nobody."""
    IDEMPOTENT = "IDEMPOTENT"
    """The receiver deduplicates on the idempotency key."""
    MUTATE = "MUTATE"
    """It changes something each time it runs."""


class Verdict(NamedTuple):
    """What a loop detector says after a call: ``level`` is ``"ok"``, ``"suspected"`` or ``"certain"``."""

    level: Literal["ok", "suspected", "certain"] = "ok"
    rule: str = ""
    reason: str = ""
    evidence: tuple[int, ...] = ()


ACCOUNTS = "@account/"
"""With what the ids of those runs begin in which shared budgets are kept, and those of no others."""


TELLS_USAGE = frozenset(
    {
        "usage", "usage_metadata", "usageMetadata", "usd", "prompt_tokens", "input_tokens", "prompt_token_count", "promptTokenCount",
        "inputTokens",
    }
)  # fmt: skip
"""Of these names one at least is in every output, as a mapping, that tells how many tokens a model has used."""
