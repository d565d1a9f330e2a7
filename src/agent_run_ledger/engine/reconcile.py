"""A step in doubt whose receiver can be asked: the questions, and what each answer leads to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from agent_run_ledger.engine import admission, outcomes, recovery
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.deciding import commit
from agent_run_ledger.engine.effects import Flow, Inquire, Moment, Plan, Result, Wait
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.intents import dispatch_again, exhausted, stored_arguments
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import Standing
from agent_run_ledger.rules import backoff, canonical, failures
from agent_run_ledger.words import Event, StepState

if TYPE_CHECKING:
    from agent_run_ledger.model import Receipt


def question(step: StepHistory | Standing, why: str, asked_before: int = 0) -> Draft:
    """The entry that is written before a receiver is asked: one that ends the process counts, too."""
    fields = {"step": step.number, "step_state": StepState.BLOCKED, "question": asked_before + 1}
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, is in doubt: {why}"})
    return Draft("asked", Event.WAIT, fields, payload, step.position, step.attempts)


def doubt(run: LiveRun, call: Call, step: StepHistory, why: str) -> Plan:
    """Nothing may be sent before it is known what became of this step: its receiver is asked, or else the run parks."""
    if call.options.receipt is not None:
        return Plan([question(step, why, step.unanswered)])
    return Plan([outcomes.parked_in_doubt(step, why)], error=outcomes.in_doubt(run, step, why))


def failed(call: Call, step: StepHistory, error: Exception, run: LiveRun, moment: Moment) -> Plan:
    """A call that must not be made twice has failed in a way that leaves open whether it took effect."""
    if call.options.receipt is None or step.position in run.late:
        return outcomes.park_ambiguous(step, error, run, moment)
    return Plan([question(step, outcomes.ambiguity(error))])


def ask(run: LiveRun, call: Call, step: StepHistory, error: BaseException | None) -> Flow[None]:
    """Ask the receiver, and write down what it says and what follows from it. `error` is how the call failed, in this life."""
    assert call.options.receipt is not None
    token = run.token
    call.questions += 1
    arguments = stored_arguments(call, step)
    result: Result = yield Inquire(run, step, call.options.receipt, arguments, call.options.timeout)
    receipt = _read(result)
    found = None
    if receipt.verdict == "found":
        found = outcomes.reconciled(outcomes.returned(run, call, step, receipt.output))
    yield from commit(run, call, partial(_answered, call, receipt, found, error), token)


def _read(result: Result) -> Receipt:
    """What the receiver said; whatever is no receipt says nothing."""
    from agent_run_ledger.model import Receipt

    error = result.error
    if error is not None:
        if not isinstance(error, Exception):
            raise error
        return Receipt.unknown(f"it raised {failures.text(failures.describe(error))}")
    if not isinstance(result.value, Receipt):
        return Receipt.unknown(f"receipt= returned {type(result.value).__name__}, not a Receipt")
    return result.value


def _answered(
    call: Call, receipt: Receipt, found: Draft | None, error: BaseException | None, run: LiveRun, moment: Moment
) -> Plan:
    step = run.history.positions.get(call.position)
    if step is None or not step.is_asked or run.made.get(call.position) is not call:
        return Plan()  # somebody has said meanwhile what became of it, or its program was interrupted
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    answer = _answer(step, receipt)
    action = recovery.in_doubt(step, recovery.declaration(call, undeclared=run.undeclared), receipt, moment.now)
    if action.kind == "record":
        assert found is not None
        return Plan([answer, found])
    if action.kind == "wait":
        return _unknown(run, call, step, answer, action.reason, moment)
    if action.kind == "dispatch":
        plan = dispatch_again(run, call, step, moment)
        if plan.drafts:
            plan.drafts.insert(0, answer)
        return plan
    assert action.kind == "dead_letter", action
    if isinstance(error, Exception):  # the program gets the error of the last attempt, which did not take effect
        return Plan([answer, outcomes.raised(run, call, step, error, None)])
    return exhausted(run, step, action.reason, [answer])


def _answer(step: StepHistory, receipt: Receipt) -> Draft:
    reason = str(receipt.reason)[:2000].encode("utf-8", "replace").decode()
    fields: dict[str, Any] = {"step": step.number, "verdict": receipt.verdict}
    payload = canonical.encode({"reason": reason}) if reason else None
    return Draft("answered", None, fields, payload, step.position, step.attempts)


def _unknown(run: LiveRun, call: Call, step: StepHistory, answer: Draft, why: str, moment: Moment) -> Plan:
    """The receiver could not say: it is asked again later, until that was tried as often as the step may be."""
    from agent_run_ledger.model import RetryPolicy

    if call.questions >= call.max_attempts:
        return Plan([answer, outcomes.parked_in_doubt(step, why)], error=outcomes.in_doubt(run, step, why))
    wait = backoff.delay(call.questions - 1, call.options.retry or RetryPolicy(), moment.draw(), step.wait)
    answer.fields.update(retry_at=moment.now + wait, wait=wait)
    return Plan([answer])


def ask_again(run: LiveRun, call: Call, step: StepHistory, until: float) -> Flow[None]:
    """Wait until it is time, and put the next question down."""
    token = run.token
    yield Wait(run, until, step.wait)
    yield from commit(run, call, partial(_next_question, call), token)


def _next_question(call: Call, run: LiveRun, moment: Moment) -> Plan:
    step = run.history.positions.get(call.position)
    if step is None or step.outcome is not None or run.made.get(call.position) is not call:
        return Plan()
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    return Plan([question(step, "the receiver could not say", step.unanswered)])
