"""The entries written before an attempt is dispatched: what they say, and when there is none."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine import admission, charging, outcomes
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import Draw, Moment, Plan
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.identity import recorded_arguments
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import AttemptsExhausted, BudgetExceededException, StoreFull
from agent_run_ledger.rules import budget, canonical, digests
from agent_run_ledger.rules.budget import Amount
from agent_run_ledger.words import Effect, Event, StepState


def first_intent(
    run: LiveRun,
    call: Call,
    salted: str,
    holds: Amount | None,
    continued: StepHistory | None = None,
    *,
    is_dispatched: bool = True,
) -> Draft:
    """The first intent of a step: with a key of its own, or as another attempt of the step that it continues."""
    history, position = run.history, call.position
    if continued is None:
        key, attempt, used = digests.idempotency_key(history.secret, run.run_id, position, call.tool, call.stored), 1, 0
    else:
        key, attempt = continued.key, continued.attempts + is_dispatched
        used = continued.attempts_to_draw_on if call.environment == continued.environment else 0
    left = max(0, call.max_attempts - used - is_dispatched)
    fields = _fields(call, history.steps + run.ahead + 1, key, left)
    if continued is not None:
        fields["continues"] = continued.position
    if not is_dispatched:
        fields["undispatched"] = True
    if holds is not None:
        fields["holds"] = holds.written()
    if run.spending != history.stated:
        fields["limits"] = run.spending.written()
    if history.trailing:
        fields |= admission.follows(run, call.branch)
    if call.seen is not None:
        fields |= admission.seen(run, call)
    fingerprint = digests.fingerprint(call.tool, call.digest)
    return Draft("intent", Event.START_STEP, fields, call.stored, position, attempt, call.digest, salted, fingerprint)


def exhausted(run: LiveRun, step: StepHistory, reason: str, before: list[Draft]) -> Plan:
    """The end of a run one of whose steps has used up its attempts."""
    if run.has_under_way:
        return Plan(answer=outcomes.CLOSING)
    fields = {"step": step.number, "step_state": StepState.DEAD_LETTER}
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}: {reason}"})
    spent = Draft("exhausted", Event.BUDGET_EXHAUSTED, fields, payload, step.position, step.attempts)
    error = AttemptsExhausted(run.run_id, step.number, step.tool, step.attempts)
    return Plan([*before, spent], error=error, synced=True)


def no_room(run: LiveRun, call: Call, why: str) -> StoreFull:
    """Why nothing new is dispatched although the store would take it: soon it might not take the outcome."""
    return StoreFull(
        f"run {run.run_id!r}: {why}, so {call.tool!r} was not dispatched and nothing was written. Make room and call "
        "again: the run goes on where it stands."
    )


def dispatch_again(run: LiveRun, call: Call, step: StepHistory, moment: Moment, *said: Draft) -> Plan:
    """The next attempt of a step, unless the run is at its end or the disk is."""
    if run.closing:
        return Plan(answer=outcomes.HELD)
    if moment.too_full is not None:
        return Plan(error=no_room(run, call, moment.too_full))
    reason = budget.entries_spent(run.most_steps, run.history.size - run.history.asides)
    reason = reason or budget.too_late(run.limits.deadline, moment.now)
    if reason is None:
        holds = charging.reserve(run, call, run.history.at_work(moment.now), step.attempts + 1)
        if holds is budget.WAITS:
            return Plan(answer=outcomes.NO_ROOM)
        if isinstance(holds, Draw):
            return Plan(answer=holds)
        reason = holds if isinstance(holds, str) else None
    if reason is not None:
        if run.has_under_way:
            return Plan(answer=outcomes.CLOSING)
        refusal = {"rule": "budget", "reason": f"step {step.number}, {step.tool!r}: {reason}"}
        payload = canonical.encode(refusal | {"limits": run.limits.written()})
        spent = Draft("exhausted", Event.BUDGET_EXHAUSTED, {"step": step.number}, payload, step.position, step.attempts)
        return Plan([spent], error=BudgetExceededException(run.run_id, reason), synced=True)
    # the intent of a step without side effects may be lost with the machine: no harm is done
    assert not isinstance(holds, str | Draw)
    return Plan(
        [*said, next_attempt(run, call, step, holds)], synced=False if call.options.effect is Effect.READ else None
    )


def next_attempt(run: LiveRun, call: Call, step: StepHistory, holds: Amount | None = None) -> Draft:
    """Stored arguments, stored key: only the attempt's number is new."""
    used = step.attempts_of_code if call.environment == step.environment else 0
    fields = _fields(call, step.number, step.key, max(0, call.max_attempts - used - 1))
    if holds is not None:
        fields["holds"] = holds.written()
        if run.spending != run.history.stated:
            fields["limits"] = run.spending.written()
    recorded = recorded_arguments(call, step)
    stored, digest = (call.stored, call.digest) if recorded is None else (recorded, step.digest)
    fingerprint = step.fingerprint or digests.fingerprint(call.tool, call.digest)
    attempt = step.attempts + 1
    return Draft("intent", Event.START_STEP, fields, stored, step.position, attempt, digest, step.input, fingerprint)


def _fields(call: Call, number: int, key: str, left: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "step": number,
        "tool": call.tool,
        "key": key,
        "environment": call.environment,
        "left": left,
        "step_state": StepState.RUNNING,
    }
    if call.options.effect is not None:
        fields["effect"] = call.options.effect
    if call.options.kind == "model":
        fields["model"] = True
    if call.options.receipt is not None:
        fields["receipt"] = True
    if call.options.key_window is not None:
        fields["key_window"] = call.options.key_window
    if call.begins_run:
        fields["begins"] = True
    if call.after:
        fields["after"] = list(call.after)  # as it will be read
    return fields


def stored_arguments(call: Call, step: StepHistory) -> dict[str, Any]:
    """The arguments that stand in the log, built into the classes that are declared for them."""
    arguments: dict[str, Any] = canonical.decode(recorded_arguments(call, step) or call.stored)
    for name, annotation in call.parameters.items():
        if name in arguments:
            arguments[name] = canonical.rebuild(annotation, arguments[name])
    return arguments
