"""What may be done about steps whose outcome is not known or not acted upon: the table of effects, as one function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.words import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_run_ledger.engine.call import Call
    from agent_run_ledger.model import Receipt

DEFAULT_ATTEMPTS = 4
"""Dispatches of one step over crashes and reruns, where its tool has no retry policy."""


class Declaration(NamedTuple):
    """What a tool says about itself, as far as recovery is concerned."""

    effect: Effect | None = None
    max_attempts: int = DEFAULT_ATTEMPTS
    has_receipt: bool = False
    key_window: float | None = None
    """Seconds for which the receiver remembers an idempotency key; None: for ever."""
    blocks_undeclared: bool = False
    environment: str | None = None
    """What the next attempt would run in; another one than the last attempt's counts attempts afresh."""


UNDECLARED = Declaration()


def declaration(call: Call, *, undeclared: str) -> Declaration:
    """What the tool of a call says about itself, in a ledger that treats undeclared effects as `undeclared` says."""
    return Declaration(
        effect=call.options.effect,
        max_attempts=call.max_attempts,
        has_receipt=call.options.receipt is not None,
        key_window=call.options.key_window,
        blocks_undeclared=undeclared == "block",
        environment=call.environment,
    )


ActionKind = Literal["dispatch", "dispatch_undeclared", "ask", "record", "wait", "park", "dead_letter"]


class Action(NamedTuple):
    """One thing to do about one step, and why."""

    kind: ActionKind
    position: str
    reason: str
    not_before: float | None = None
    """Unix seconds before which a retry may not start, or the next question be asked."""


def plan_recovery(
    steps: Iterable[StepHistory],
    declarations: Mapping[str, Declaration],
    receipts: Mapping[str, Receipt],
    now: float,
) -> list[Action]:
    """One action per unsettled step, in log order.

    `declarations` are by tool name, `receipts` by position (what the outside world answered, where it was asked), `now` is Unix
    seconds. A step with a final outcome, or with a failure that something follows, needs nothing and gets no action.
    """
    actions = []
    for step in steps:
        declared = declarations.get(step.tool, UNDECLARED)
        receipt = receipts.get(step.position)
        if step.outcome is None:
            actions.append(in_doubt(step, declared, receipt, now))
        elif not step.stands:
            actions.append(_failed(step, declared, receipt, now))
    return actions


def _failed(step: StepHistory, declared: Declaration, receipt: Receipt | None, now: float) -> Action:
    """A failure that was not acted upon is tried again, unless it may have taken effect and a second dispatch could do harm."""
    assert step.outcome is not None
    if step.is_open:
        action = in_doubt(step, declared, receipt, now)
        if action.kind not in ("dispatch", "dispatch_undeclared"):
            return action
    return _again(step, declared, "its failure was not acted upon", step.outcome.retry_at)


def in_doubt(
    step: StepHistory, declared: Declaration, receipt: Receipt | None, now: float, used: int | None = None
) -> Action:
    """What may be done about a step of which it is not known whether it took effect: the table of effects.

    `used`: how many attempts count, where those of the step do not all.
    """
    if step.waits is not None:
        return Action("wait", step.position, _WAITS[step.waits], step.until)
    if step.is_absent:
        return _again(step, declared, "an operator has said that it did not take effect", used=used)
    effect = declared.effect or (Effect(step.effect) if step.effect else None)
    if effect is Effect.READ:
        return _again(step, declared, "it has no side effect", used=used)
    if effect is None:
        if declared.blocks_undeclared:
            return Action(
                "park", step.position, "its tool declares no effect, and undeclared steps are not dispatched again"
            )
        again = _again(step, declared, "its tool declares no effect", used=used)
        return again if again.kind == "dead_letter" else Action("dispatch_undeclared", step.position, again.reason)
    if effect is Effect.IDEMPOTENT:
        if declared.key_window is None or now - step.keyed_at <= declared.key_window:
            return _again(step, declared, "the receiver deduplicates on its idempotency key", used=used)
        why = "the receiver has forgotten its idempotency key"
    else:
        why = "its tool changes something each time it runs"
    if not declared.has_receipt:
        return Action("park", step.position, f"{why}, and nobody can be asked whether it took effect")
    if receipt is None:
        if step.unanswered >= declared.max_attempts:
            return Action(
                "park", step.position, f"the process ended {step.unanswered} times while its receiver was asked"
            )
        return Action("ask", step.position, why, step.ask_at)
    if receipt.verdict == "found":
        return Action("record", step.position, "the receiver has seen its idempotency key")
    if receipt.verdict == "absent":
        return _again(step, declared, "the receiver has never seen its idempotency key", used=used)
    return Action("wait", step.position, f"the receiver could not say: {receipt.reason}")


_WAITS = {
    "sleep": "it waits for its time to come",
    "signal": "it waits for a signal",
    "approval": "it waits for somebody's approval",
    "child": "it waits for the end of a run that it has begun",
}


def _again(
    step: StepHistory, declared: Declaration, why: str, not_before: float | None = None, used: int | None = None
) -> Action:
    changed = declared.environment is not None and declared.environment != step.environment
    used = 0 if changed else step.attempts_of_code if used is None else used
    if used >= declared.max_attempts:
        return Action("dead_letter", step.position, f"it was dispatched {used} times without a result")
    return Action("dispatch", step.position, why, not_before)
