"""One attempt of a step: its intent, its dispatch, its outcome, and what comes late."""

from __future__ import annotations

from functools import partial

from agent_run_ledger.engine import admission, outcomes, reconcile, waits
from agent_run_ledger.engine.call import Begun, Call, LeftBehind
from agent_run_ledger.engine.deciding import commit, leave
from agent_run_ledger.engine.effects import AwaitLate, Commit, Fetch, Flow, Invoke, Moment, Plan, Result, Wait, Warn
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.identity import divergence, lacks_arguments
from agent_run_ledger.engine.intents import dispatch_again, next_attempt, stored_arguments
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import UndeclaredEffectWarning
from agent_run_ledger.rules.classify import classify
from agent_run_ledger.words import Effect

_AMBIGUOUS = classify(TimeoutError())

_DISPATCHED_AGAIN = (
    "{tool!r} was dispatched again although it may have run before, because it declares no effect. Declare "
    "effect=Effect.READ, IDEMPOTENT or MUTATE, or open the ledger with undeclared='block'."
)


def _retry(call: Call, step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """The wait before a retry is over."""
    if run.made.get(call.position) is not call:
        return Plan()  # it was interrupted meanwhile
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    if step.is_open and outcomes.must_not_repeat(run, call, step, moment.now):
        return reconcile.doubt(run, call, step, "the receiver has forgotten its idempotency key")
    return dispatch_again(run, call, step, moment)


def wait_to_retry(run: LiveRun, call: Call, step: StepHistory, until: float) -> Flow[None]:
    """Wait, and write the next attempt's intent."""
    token = run.token  # whoever took the run over in the meantime has made the retry
    yield Wait(run, until, step.wait)  # a clock that was set back makes no wait longer than it was drawn
    if run.late:
        yield from take_late(run, call, None)
    if run.is_draining:
        yield from leave(run, call)
    if not step.is_settled:
        yield from commit(run, call, partial(_retry, call, step), token)


def take_late(run: LiveRun, call: Call, at_most: float | None) -> Flow[None]:
    """Where an attempt ran out of time and its function goes on in its thread: what it returns is the outcome after all.

    Only what has no side effect may be dispatched again beside it.
    """
    step = run.history.positions.get(call.position)
    runs_on = run.runs_on(step)
    if runs_on is None or step is None or step.stands or (call.options.effect or step.declared) is Effect.READ:
        return
    result: Result | None = yield AwaitLate(run, runs_on, at_most)
    if result is None:
        call.branch.answered.add(call.position)  # its failure stands until the thread has ended
        if at_most is not None and not run.is_cancelled:
            yield from commit(run, call, partial(_still_runs, call, TimeoutError(f"no result within {at_most:g} s")))
    elif result.error is None:
        draft = outcomes.returned(run, call, step, result.value)
        yield from commit(run, call, partial(_returned_late, call, draft))


def _still_runs(call: Call, error: TimeoutError, run: LiveRun, moment: Moment) -> Plan:
    """Where nobody waited for the attempt's end, since he was interrupted, it fails now; it must not be dispatched beside its thread."""
    step = run.history.positions.get(call.position)
    if step is None or step.outcome is not None or run.history.state.is_terminal:
        return Plan()
    if lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if divergence(run, call, step) is not None or outcomes.must_not_repeat(run, call, step):
        return Plan()
    return outcomes.settle(call, outcomes.raised(run, call, step, error, _AMBIGUOUS), error, run, moment)


def _returned_late(call: Call, draft: Draft, run: LiveRun, moment: Moment) -> Plan:
    """A function's late return is the receipt of its attempt. Where that one failed already, it stands as another, not dispatched."""
    step = run.history.positions.get(call.position)
    if step is None or step.stands or run.history.state.is_terminal:
        return Plan()
    if lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if divergence(run, call, step) is not None:
        return Plan()
    if step.outcome is None:
        return Plan([draft])
    intent = next_attempt(run, call, step)
    intent.fields["late"] = True
    return Plan([intent, draft._replace(attempt=intent.attempt)])


def attempt(run: LiveRun, call: Call, step: StepHistory) -> Flow[BaseException | None]:
    """Dispatch once and write the outcome. Returns the function's exception, for the caller's traceback."""
    token = run.token
    arguments = stored_arguments(call, step) if call.passes_arguments else {}
    if call.takes_key:
        arguments["idempotency_key"] = step.key
    if step.redispatched == step.attempts:
        yield Warn(UndeclaredEffectWarning, _DISPATCHED_AGAIN.format(tool=call.tool))  # a program may make it an error
    call.was_dispatched = True
    run.metered.pop(step.position, None)
    result: Result = yield Invoke(run, step, call.function, arguments, call.options.timeout, call.is_async)
    if call.options.receipt is not None and step.position in run.late:
        # It ran out of time and goes on in its thread: nothing is asked beside it, and what it returns is its receipt.
        result = (yield AwaitLate(run, step.position, call.options.timeout)) or result
    error, note = result.error, None
    if type(result.value) is Begun:
        yield from commit(run, call, partial(waits.begun, call, step, result.value.run_id), token)
        return None
    if error is None:
        settle = partial(outcomes.settle, call, outcomes.returned(run, call, step, result.value), None)
    elif isinstance(error, Exception):
        told = classify(error, call.options.classify)
        note = told.note
        if told.verdict == "ambiguous" and outcomes.must_not_repeat(run, call, step):
            yield Commit(run, partial(reconcile.failed, call, step, error), token)
            return error
        draft = outcomes.raised(run, call, step, error, told)
        settle = partial(outcomes.settle, call, draft, error, is_hopeless=told.verdict == "fatal")
    else:  # a cancellation is no outcome: it goes on its way, and the step is in doubt
        raise error
    if (yield Commit(run, settle, token)) is outcomes.CLOSING:
        yield from commit(run, call, partial(outcomes.end_fatally, step), token)
    if note is not None:
        from agent_run_ledger.rules.redaction import Redactor  # only who has gone wrong needs it

        yield Warn(UserWarning, f"{call.tool!r}: {Redactor().text(note)}")
    return error


def settle_left(run: LiveRun, call: Call, step: StepHistory, left: LeftBehind) -> Flow[None]:
    """A call that continues one whose thread had run out of time: that thread has returned, or it runs on and this call fails, too."""
    if left.has_returned:
        draft = outcomes.reconciled(outcomes.returned(run, call, step, left.value))
        yield Commit(run, partial(outcomes.settle, call, draft, None))
    else:
        error = TimeoutError("the call that it continues has not ended yet")
        if outcomes.must_not_repeat(run, call, step):
            yield Commit(run, partial(outcomes.park_ambiguous, step, error))
        draft = outcomes.raised(run, call, step, error, _AMBIGUOUS)
        yield Commit(run, partial(outcomes.settle, call, draft, error, is_hopeless=True))
