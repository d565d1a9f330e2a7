"""How an attempt ends: the entries that record it, and what the caller gets of them, now and at every replay."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import Moment, Plan
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import StepCancelled, StepFailed, StepInDoubt, UnserialisableOutput
from agent_run_ledger.model import Event, StepState
from agent_run_ledger.rules import backoff, canonical, digests, failures

CLOSING = "closing"
"""The answer to what would end the run while other steps are in flight: they finish and are recorded first."""
HELD = "held"
"""The answer to what would begin something new meanwhile."""


def _outcome(step: StepHistory, ok: str, payload: bytes, may_repeat: bool) -> Draft:
    fields: dict[str, Any] = {"step": step.number, "ok": ok, "left": step.left, "step_state": StepState.FAILED}
    event = Event.STEP_ERROR
    if ok == "completed":
        fields["step_state"] = StepState.COMPLETED
        event = Event.STEP_SUCCESS
    if may_repeat:
        fields["may_repeat"] = True
    return Draft("outcome", event, fields, payload, step.position, step.attempts)


def returned(run: LiveRun, call: Call, step: StepHistory, value: Any) -> Draft:
    """The outcome of a function that returned; one whose value cannot be stored is recorded as executed, without it."""
    try:
        payload = canonical.encode(
            value, limit=call.limit, what=f"the output of {call.tool!r}", declared=call.options.returns
        )
    except Exception as error:  # also what an object's own methods raise, or a warning that the program made an error
        return raised(run, call, step, UnserialisableOutput(str(error), getattr(error, "path", "$")), ok="unstorable")
    return _outcome(step, "completed", payload, call.options.may_repeat)


def raised(run: LiveRun, call: Call, step: StepHistory, error: Exception, *, ok: str = "failed") -> Draft:
    """An error as data; `error_id` is what the loop rules compare, since a traceback differs each time."""
    described = failures.describe(error)
    if ok == "unstorable":
        described["path"] = getattr(error, "path", "$")
    draft = _outcome(step, ok, canonical.encode(described), call.options.may_repeat)
    draft.fields["error_id"] = digests.salted(run.history.secret, failures.text(described).encode())
    if failures.is_ambiguous(error):
        draft.fields["ambiguous"] = True
    return draft


def settle(call: Call, draft: Draft, error: BaseException | None, run: LiveRun, moment: Moment) -> Plan:
    """Write an outcome; a failure that may be retried says when, and one that is fatal ends the run."""
    step = run.history.positions[draft.position or ""]
    if step.outcome is not None:
        return Plan()  # that its program was interrupted and has gone on was written first, by another thread
    if error is None:
        return Plan([draft])
    if issubclass(type(error), call.options.fatal):  # an exception may hide behind its `__class__`
        if run.in_flight.keys() - {step.position}:  # its own call may have been interrupted, and be in flight no more
            return Plan([draft], answer=CLOSING)
        return Plan([draft, _fatal(step)], synced=True)
    retry = call.options.retry
    if retry is not None and step.attempts_of_code < retry.max_attempts:
        wait = backoff.delay(step.attempts_of_code - 1, retry, moment.draw, step.wait)
        later = {**draft.fields, "retry_at": moment.now + wait, "wait": wait}
        return Plan([draft._replace(event=Event.WAIT, fields=later)])
    return Plan([draft])


def end_fatally(step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """End the run for an error that is recorded, as soon as nothing is in flight."""
    if run.history.state.is_terminal:
        return Plan()
    return Plan(answer=CLOSING) if run.in_flight else Plan([_fatal(step)], synced=True)


def _fatal(step: StepHistory) -> Draft:
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, failed with a fatal error"})
    return Draft("aborted", Event.ABORT, {}, payload)


def park_ambiguous(step: StepHistory, error: Exception, run: LiveRun, moment: Moment) -> Plan:
    """Park a run whose step failed in a way that leaves open whether it took effect, and must not be repeated."""
    why = f"{failures.text(failures.describe(error))} does not tell whether it took effect"
    doubt = in_doubt(run, step, why)
    doubt.__cause__ = error
    park = [] if step.state == StepState.BLOCKED else [parked_in_doubt(step, why)]
    return Plan(park, error=doubt)


_INTERRUPTED = {
    "type": "CancelledError",
    "module": "agent_run_ledger",
    "message": "the step was interrupted",
    "bases": [],
}


def cancelled(step: StepHistory, seen: dict[str, int]) -> Draft:
    """The outcome of a step that was interrupted and whose program went on."""
    draft = _outcome(step, "cancelled", canonical.encode(_INTERRUPTED), may_repeat=False)
    draft.fields.update(seen)
    return draft


def missed(call: Call, step: StepHistory | None, seen: dict[str, int]) -> Draft:
    """The entry of a call whose program was interrupted before it got the outcome, and went on: that is what a replay tells it.

    There is an outcome that it did not get, or nothing was written of the call at all; then its arguments are kept here.
    """
    if step is None:
        return Draft("missed", None, {"tool": call.tool} | seen, call.stored, call.position, digest=call.digest)
    return Draft("missed", None, {"step": step.number, "tool": call.tool} | seen, None, call.position)


def parked_in_doubt(step: StepHistory, why: str) -> Draft:
    """The entry of a run that stands because nobody knows whether this step took effect."""
    fields = {"step": step.number, "step_state": StepState.BLOCKED}
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, is in doubt: {why}"})
    return Draft("parked", Event.WAIT, fields, payload, step.position, step.attempts)


def in_doubt(run: LiveRun, step: StepHistory, why: str) -> StepInDoubt:
    """The error for whoever asked for it."""
    return StepInDoubt(run.run_id, step.number, step.tool, step.position, why)


def hand_out(
    run: LiveRun, call: Call, step: StepHistory | None, payload: bytes | None, cause: BaseException | None
) -> Any:
    """The recorded outcome, by the same way live and at replay. `cause` is the live exception, where there is one.

    `payload` is what the outcome's entry holds, which need not be in memory any more; None where it was erased. `step` is None where
    the program was interrupted before anything of this call was written but that.
    """
    if step is None or step.missed:
        text = failures.text(_INTERRUPTED)
        raise StepCancelled(run.run_id, step.number if step is not None else None, call.tool, dict(_INTERRUPTED), text)
    outcome = step.outcome
    assert outcome is not None
    if outcome.ok == "completed":
        value = canonical.decode(payload) if payload is not None else None
        return canonical.rebuild(call.options.returns, value) if call.options.returns is not None else value
    described = canonical.decode(payload) if payload is not None else {"type": "(erased)"}
    text = failures.text(described)
    if outcome.ok == "unstorable":
        raise UnserialisableOutput(
            f"{call.tool!r} was executed, and is recorded as executed, without its output: {described.get('message')}",
            described.get("path", "$"),
        )
    kind = StepCancelled if outcome.ok == "cancelled" else StepFailed
    failed = kind(run.run_id, step.number, step.tool, described, text)
    for declared in call.options.raises:
        if cause is not None and issubclass(type(cause), declared):
            raise cause
        if cause is None and failures.matches(described, declared):
            raise failures.revive(declared, described, failed)
    raise failed from cause
