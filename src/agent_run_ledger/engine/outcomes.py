"""How an attempt ends: the entries that record it, and what the caller gets of them, now and at every replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.engine import charging
from agent_run_ledger.engine.call import Call, LeftBehind
from agent_run_ledger.engine.effects import Moment, Plan, Result
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import (
    ApprovalDenied,
    PayloadErased,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    StoreCorrupt,
    UnserialisableOutput,
    WaitTimeout,
)
from agent_run_ledger.rules import backoff, canonical, digests, failures
from agent_run_ledger.rules.classify import Classified, retry_after
from agent_run_ledger.words import Effect, Event, RunState, StepState

if TYPE_CHECKING:
    from agent_run_ledger.model import MayRepeat

CLOSING = "closing"
"""The answer to what would end the run while other steps are in flight: they finish and are recorded first."""
HELD = "held"
"""The answer to what would begin something new meanwhile."""
NO_ROOM = "no room"
"""The answer to a call that the budget has room for as soon as others use less than they may."""


def _outcome(step: StepHistory, ok: str, payload: bytes, may_repeat: bool | MayRepeat) -> Draft:
    fields: dict[str, Any] = {"step": step.number, "ok": ok, "left": step.left, "step_state": StepState.FAILED}
    event = Event.STEP_ERROR
    if ok == "completed":
        fields["step_state"] = StepState.COMPLETED
        event = Event.STEP_SUCCESS
    if may_repeat:
        fields["may_repeat"] = True
    return Draft("outcome", event, fields, payload, step.position, step.attempts)


def left_behind(result: Result | None) -> LeftBehind:
    """What a thread that had run out of time did in the end; None where it runs on."""
    if result is None:
        return LeftBehind(is_running=True, has_returned=False, value=None)
    return LeftBehind(is_running=False, has_returned=result.error is None, value=result.value)


def reconciled(draft: Draft) -> Draft:
    """The same outcome, as it was learnt from the receiver or from an operator and not from the call itself."""
    draft.fields["reconciled"] = True
    return draft


def returned(run: LiveRun, call: Call, step: StepHistory, value: Any) -> Draft:
    """The outcome of a function that returned; one whose value cannot be stored is recorded as executed, without it."""
    try:
        payload = canonical.encode(
            value, limit=call.limit, what=f"the output of {call.tool!r}", declared=call.options.returns
        )
    except Exception as error:  # also what an object's own methods raise, or a warning that the program made an error
        unstorable = UnserialisableOutput(str(error), getattr(error, "path", "$"))
        return raised(run, call, step, unstorable, None, ok="unstorable")
    draft = _outcome(step, "completed", payload, call.options.may_repeat)
    draft.fields.update(charging.charged(run, step.position, value))
    return draft


def raised(
    run: LiveRun, call: Call, step: StepHistory, error: Exception, told: Classified | None, *, ok: str = "failed"
) -> Draft:
    """An error as data; `error_id` is what the loop rules compare, since a traceback differs each time.

    `told` is what the error says about the call; None where nothing is left open.
    """
    described = failures.describe(error)
    if ok == "unstorable":
        described["path"] = getattr(error, "path", "$")
    draft = _outcome(step, ok, canonical.encode(described), call.options.may_repeat)
    draft.fields["error_id"] = digests.salted(run.history.secret, failures.text(described).encode())
    was_executed = told is None or not told.is_executed_never
    draft.fields.update(charging.charged(run, step.position, None, was_executed=was_executed))
    if told is not None and told.verdict == "ambiguous":
        draft.fields["ambiguous"] = True
    elif told is not None and leaves_open(run, call, step, error, told):
        draft.fields["unproven"] = True
    return draft


def leaves_open(run: LiveRun, call: Call, step: StepHistory, error: Exception, told: Classified) -> bool:
    """Whether a call that must not be made twice may have taken effect before it failed, for all that its error and its tool say."""
    if call.options.retry is not None or told.is_executed_never:
        return False
    return must_not_repeat(run, call, step) and not issubclass(type(error), (*call.options.raises, *call.options.fatal))


def must_not_repeat(run: LiveRun, call: Call | None, step: StepHistory, now: float | None = None) -> bool:
    """Whether a second dispatch could do harm, as far as is declared: by the call, or where there is none at the last dispatch.

    A receiver that deduplicates does no harm, as long as it remembers the key.
    """
    effect = step.declared if call is None else call.options.effect or step.declared
    if effect is Effect.IDEMPOTENT and call is not None and call.options.key_window is not None and now is not None:
        return bool(now - step.keyed_at > call.options.key_window)
    return effect is Effect.MUTATE or (effect is None and run.undeclared == "block")


def resolved_with(run: LiveRun, step: StepHistory, output: bytes) -> Draft:
    """The outcome that an operator knows of."""
    draft = reconciled(_outcome(step, "completed", output, may_repeat=False))
    draft.fields.update(charging.charged(run, step.position, None))
    return draft


def child_ended(run: LiveRun, step: StepHistory, end: dict[str, Any]) -> Draft:
    """The outcome of a step that has waited for the end of another run: `end` is what that one's owner said."""
    if end["ok"]:
        return _outcome(step, "completed", canonical.encode(end["result"]), may_repeat=False)
    draft = _outcome(step, "failed", canonical.encode(end["error"]), may_repeat=False)
    draft.fields["error_id"] = digests.salted(run.history.secret, failures.text(end["error"]).encode())
    return draft


def waited(step: StepHistory, ok: str, payload: bytes) -> Draft:
    """The outcome of a step that waited: what came, or that nothing did. No loop is made of it."""
    return _outcome(step, ok, payload, may_repeat=True)


def settle(
    call: Call, draft: Draft, error: BaseException | None, run: LiveRun, moment: Moment, *, is_hopeless: bool = False
) -> Plan:
    """Write an outcome; a failure that may be retried says when, and one that is declared fatal ends the run.

    `is_hopeless`: another try cannot help, as far as the error tells.
    """
    step = run.history.positions[draft.position or ""]
    if step.outcome is not None:
        return Plan()  # that its program was interrupted and has gone on was written first, by another thread
    if error is None:
        return Plan([draft])
    if issubclass(type(error), call.options.fatal):  # an exception may hide behind its `__class__`
        others = run.in_flight.keys() - {step.position}  # its own may be in flight no more
        if others or run.is_dispatching:
            return Plan([draft], answer=CLOSING)
        return Plan([draft, _fatal(step)], synced=True)
    retry = call.options.retry
    if retry is not None and not is_hopeless and step.attempts_of_code < retry.max_attempts:
        wait = backoff.delay(max(0, step.attempts_of_code - 1), retry, moment.draw(), step.wait)
        wait = max(wait, retry_after(error, moment.now) or 0.0)
        later = {**draft.fields, "retry_at": moment.now + wait, "wait": wait}
        return Plan([draft._replace(event=Event.WAIT, fields=later)])
    return Plan([draft])


def end_fatally(step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """End the run for an error that is recorded, as soon as nothing is in flight."""
    if run.history.state.is_terminal:
        return Plan()
    return Plan(answer=CLOSING) if run.has_under_way else Plan([_fatal(step)], synced=True)


def _fatal(step: StepHistory) -> Draft:
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, failed with a fatal error"})
    return Draft("aborted", Event.ABORT, {}, payload)


def ambiguity(error: Exception) -> str:
    """Why a step is in doubt whose call has failed."""
    return f"{failures.text(failures.describe(error))} does not tell whether it took effect"


def park_ambiguous(step: StepHistory, error: Exception, run: LiveRun, moment: Moment) -> Plan:
    """Park a run whose step failed in a way that leaves open whether it took effect, and must not be repeated."""
    why = ambiguity(error)
    doubt = in_doubt(run, step, why)
    doubt.__cause__ = error
    return Plan(park(run, step, why), error=doubt)


_INTERRUPTED = {
    "type": "CancelledError",
    "module": "agent_run_ledger",
    "message": "the step was interrupted",
    "bases": [],
}


def cancelled(run: LiveRun, step: StepHistory, seen: dict[str, int], *, is_dispatched: bool = True) -> Draft:
    """The outcome of a step that was interrupted and whose program went on. One that was dispatched may have taken effect."""
    draft = _outcome(step, "cancelled", canonical.encode(_INTERRUPTED), may_repeat=False)
    if not is_dispatched:
        draft.fields["undispatched"] = True
    draft.fields.update(seen)
    draft.fields.update(charging.charged(run, step.position, None, was_executed=is_dispatched))
    return draft


def missed(call: Call, step: StepHistory | None, seen: dict[str, int]) -> Draft:
    """The entry of a call whose program was interrupted before it got the outcome, and went on: that is what a replay tells it.

    There is an outcome that it did not get, or nothing was written of the call at all; then its arguments are kept here.
    """
    if step is None:
        return Draft("missed", None, {"tool": call.tool} | seen, call.stored, call.position, digest=call.digest)
    return Draft("missed", None, {"step": step.number, "tool": call.tool} | seen, None, call.position)


class Standing(NamedTuple):
    """A step as far as a park or a question names it, where its first intent goes into the same append."""

    position: str
    number: int
    tool: str
    attempts: int


def parked_in_doubt(step: StepHistory | Standing, why: str) -> Draft:
    """The entry of a run that stands because nobody knows whether this step took effect."""
    fields = {"step": step.number, "step_state": StepState.BLOCKED}
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, is in doubt: {why}"})
    return Draft("parked", Event.WAIT, fields, payload, step.position, step.attempts)


def park(run: LiveRun, step: StepHistory, why: str) -> list[Draft]:
    """The entry of a park, unless the run stands for this step already, or will when what is in flight has ended."""
    is_said = step.state == StepState.BLOCKED and (run.history.state is RunState.BLOCKED or bool(run.in_flight))
    return [] if is_said else [parked_in_doubt(step, why)]


def in_doubt(run: LiveRun, step: StepHistory | Standing, why: str) -> StepInDoubt:
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
        value = _decoded(run, step, payload)
        return canonical.rebuild(call.options.returns, value) if call.options.returns is not None else value
    described = _decoded(run, step, payload)
    if outcome.ok == "expired":
        raise WaitTimeout(run.run_id, described.get("name", call.tool))
    if outcome.ok == "denied":
        raise ApprovalDenied(
            run.run_id, described.get("name", call.tool), described.get("by", ""), described.get("reason", "")
        )
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


def _decoded(run: LiveRun, step: StepHistory, payload: bytes | None) -> Any:
    """What was recorded. Raises `PayloadErased`, and `StoreCorrupt` where the bytes are not what was written."""
    if payload is None:
        raise PayloadErased(run.run_id, f"what became of step {step.number} ({step.tool!r})")
    try:
        return canonical.decode(payload)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(
            f"run {run.run_id!r}, step {step.number} ({step.tool!r}): what is recorded of it cannot be read ({error}). Nothing was changed; run "
            "`agent-run-ledger verify` and restore from a backup."
        ) from error
