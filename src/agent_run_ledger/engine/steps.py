"""One step: replay it, or write its intent, dispatch it, and write its outcome."""

from __future__ import annotations

from functools import partial
from typing import Any, assert_never

from agent_run_ledger.engine import admission, outcomes, recovery
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import (
    AwaitLate,
    Commit,
    Decision,
    Fetch,
    Flow,
    GiveBack,
    Invoke,
    Moment,
    Plan,
    Quiet,
    Result,
    Turn,
    Wait,
    Warn,
)
from agent_run_ledger.engine.history import Missed, StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import in_doubt, parked_in_doubt
from agent_run_ledger.errors import (
    AttemptsExhausted,
    BudgetExceededException,
    IntentDrift,
    ReplayDivergence,
    RunawayLoopDetectedException,
    RunClosed,
    StepInDoubt,
    UndeclaredEffectWarning,
)
from agent_run_ledger.model import Effect, Event, RunState, StepState
from agent_run_ledger.rules import budget, canonical, digests, failures
from agent_run_ledger.rules.difference import difference, hint


def step(run: LiveRun, call: Call) -> Flow[Any]:
    """Run one step at most as often as its effect allows, and return what its function returned, now or long ago.

    The call has been made: it has its position.
    """
    position = call.position
    error: BaseException | None = None
    try:
        if run.late:
            yield from _take_late(run, call, call.options.timeout)
        decide = partial(_intend, call)
        if (answer := (yield Commit(run, decide, None, position in run.history.positions))) is not None:
            yield from _insist(run, call, decide, None, answer)
        # Looked up each time: a run that was in doubt is read anew, and what it was before learns of nothing any more.
        while (this := run.history.positions.get(position)) is not None and not this.is_settled:
            if this.outcome is None:
                error = yield from _attempt(run, call, this)
            else:
                assert this.outcome.retry_at is not None
                yield from _wait_to_retry(run, call, this, this.outcome.retry_at)
        payload: bytes | None = None
        if this is not None and this.outcome is not None:
            payload = this.outcome.payload
            if payload is None and this.outcome.digest is not None and not this.missed:
                payload = yield Fetch(run, this.outcome.seq)  # before its turn, which no pause may follow
        if run.turns is not None:
            yield Turn(run, call, _given_by(run, position), 0.0 if this is None else this.interrupted_after)
        call.is_delivered = True
    except BaseException as raised:
        run.ended(call, raised)
        if isinstance(raised, _LETS_GO):
            yield from _let_go(run, call, raised)
        raise
    run.ended(call, None)
    if run.leaving is not None or (error is not None and run.history.state.is_terminal):  # it was fatal
        yield from _let_go(run, call, None)
    if this is not None and this.outcome is not None and this.outcome.ok == "failed":
        call.branch.hears[position] = this.attempts
    if this is not None:
        this.let_go_of_long()
    return outcomes.hand_out(run, call, this, payload, error)


_LETS_GO = (ReplayDivergence, StepInDoubt, RunClosed, RunawayLoopDetectedException, BudgetExceededException)
"""What ends a program's work on a run: its lease is given back, as soon as none of its calls is under way."""


def _let_go(run: LiveRun, call: Call, error: BaseException | None) -> Flow[None]:
    note = str(error) if isinstance(error, ReplayDivergence) else None
    if isinstance(error, ReplayDivergence):
        run.divergence = error
    run.leaving = note or run.leaving or ""
    if not run.is_busy:
        try:
            yield GiveBack(run, run.leaving or None)
        except BaseException as interruption:
            if not isinstance(interruption, Exception):
                run.interrupt(call)
            raise


def _given_by(run: LiveRun, position: str) -> int:
    """When the program gets what it gets of this call, in the order of hand-outs: as a rule the seq of the outcome."""
    step = run.history.positions.get(position)
    if step is None:
        return run.history.missed[position].order
    assert step.outcome is not None
    return step.missed or step.outcome.order


def _commit(run: LiveRun, call: Call, decide: Decision, token: int | None = None) -> Flow[None]:
    """Commit what may end the run, or has to look at arguments that are not in memory."""
    if (answer := (yield Commit(run, decide, token))) is not None:
        yield from _insist(run, call, decide, token, answer)


def _insist(run: LiveRun, call: Call, decide: Decision, token: int | None, answer: Any) -> Flow[None]:
    """Do what the decision lacks, and have it taken anew, until it is.

    Before the end of a run whatever is in flight finishes and is recorded, and nothing new begins; what is not in memory is fetched.
    """
    try:
        while answer is not None:
            if isinstance(answer, Fetch):
                call.recorded = yield answer
                call.is_fetched = True
            elif answer is outcomes.CLOSING:
                run.closing.add(call.position)  # until the end is written
                yield Quiet(run, ends=True)
            else:
                assert answer is outcomes.HELD
                run.closing.discard(call.position)
                yield Quiet(run, ends=False)
            answer = yield Commit(run, decide, token)
    finally:
        run.closing.discard(call.position)


_DISPATCHED_AGAIN = (
    "{tool!r} was dispatched again although it may have run before, because it declares no effect. Declare "
    "effect=Effect.READ, IDEMPOTENT or MUTATE, or open the ledger with undeclared='block'."
)


# --- intents ----------------------------------------------------------------------------------------------------------


def _intend(call: Call, run: LiveRun, moment: Moment) -> Plan:
    """Decide what a call at its position is: a replay, a first dispatch, another attempt, or a refusal."""
    if (refusal := admission.refusal(run, pipeline=call.place is not None)) is not None:
        return Plan(error=refusal)
    history, position = run.history, call.position
    if run.made.get(position) is not call:
        return Plan()  # it was interrupted before anything was written of it, and nobody would make the call
    step = history.positions.get(position)
    if step is None:
        return _begin(run, call, position, moment)
    if _lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if (divergence := _divergence(run, call, step)) is not None:
        return Plan(error=divergence)
    if step.stands or (step.outcome is not None and (history.state.is_terminal or position in call.branch.answered)):
        return Plan(is_replay=True)
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    return _resume(run, call, step, moment)


def _begin(run: LiveRun, call: Call, position: str, moment: Moment) -> Plan:
    """A call of which the log knows no step: the first intent of one, a refusal, or an interruption that is recorded."""
    history = run.history
    if position in history.values:
        recorded = f"run.{history.values[position][0]['name']}()"
        return Plan(error=ReplayDivergence(run.run_id, position, recorded, repr(call.tool)))
    if (missed := history.missed.get(position)) is not None:
        divergence = _difference(run, call, missed)
        return Plan(error=divergence) if divergence is not None else Plan(is_replay=True)
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    drafts, doubt = admission.left_in_doubt(run, call.behind)
    if doubt is not None:
        return Plan(drafts, error=doubt)
    salted = digests.salted(history.secret, call.stored)
    verdict = history.verdict
    if verdict.level == "certain" and history.looping == (call.tool, salted) and not call.options.may_repeat:
        refusal = {"rule": verdict.rule, "reason": verdict.reason, "evidence": list(verdict.evidence)}
        error: Exception = RunawayLoopDetectedException(
            run.run_id, verdict.rule, verdict.reason, verdict.evidence, RunState.DEAD_LETTER
        )
        return _refusing(run, call, drafts, Event.LOOP_DETECTED, refusal, error)
    reason = budget.steps_spent(run.limit, history.steps + run.ahead, history.refused)
    reason = reason or budget.entries_spent(run.limit, history.size) or budget.too_late(run.deadline, moment.now)
    if reason is not None:
        error = BudgetExceededException(run.run_id, reason)
        return _refusing(run, call, drafts, Event.BUDGET_EXHAUSTED, {"rule": "budget", "reason": reason}, error)
    if run.closing:
        return Plan(answer=outcomes.HELD)
    key = digests.idempotency_key(history.secret, run.run_id, position, call.tool, call.stored)
    fields = _fields(call, history.steps + run.ahead + 1, key, call.max_attempts - 1)
    if history.trailing:
        fields |= admission.follows(run, call.branch)
    if call.seen is not None:
        fields |= admission.seen(run, call)
    fingerprint = digests.fingerprint(call.tool, call.digest)
    intent = Draft("intent", Event.START_STEP, fields, call.stored, position, 1, call.digest, salted, fingerprint)
    return _dispatching([*drafts, intent], call)


def _refusing(
    run: LiveRun, call: Call, drafts: list[Draft], event: Event, refusal: dict[str, Any], error: Exception
) -> Plan:
    """The plan that refuses a call and ends the run: a refusal is written before it is raised."""
    if run.in_flight:
        return Plan(answer=outcomes.CLOSING)
    fields = {"tool": call.tool, "rule": refusal["rule"]} | admission.follows(run, call.branch)
    refused = Draft("refused", event, fields, canonical.encode(refusal), call.position)
    return Plan([*drafts, refused], error=error, synced=True)


def _resume(run: LiveRun, call: Call, step: StepHistory, moment: Moment) -> Plan:
    """A recorded step without a final outcome: what recovery's rules say of it."""
    declared = recovery.Declaration(
        effect=call.options.effect,
        max_attempts=call.max_attempts,
        blocks_undeclared=run.undeclared == "block",
        environment=call.environment,
    )
    (action,) = recovery.plan_recovery([step], {call.tool: declared}, {}, moment.now)
    match action.kind:
        case "dispatch":
            if action.not_before is not None and action.not_before > moment.now:
                return Plan()
            return _dispatch_again(run, call, step, moment)
        case "dispatch_undeclared":
            said = Draft("redispatched_undeclared", None, {"step": step.number}, None, step.position, step.attempts + 1)
            return _dispatch_again(run, call, step, moment, said)
        case "park":
            park = [] if step.state == StepState.BLOCKED else [parked_in_doubt(step, action.reason)]
            return Plan(park, error=in_doubt(run, step, action.reason))
        case "dead_letter":
            fields = {"step": step.number, "step_state": StepState.DEAD_LETTER}
            payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}: {action.reason}"})
            spent = Draft("exhausted", Event.BUDGET_EXHAUSTED, fields, payload, step.position, step.attempts)
            error = AttemptsExhausted(run.run_id, step.number, step.tool, step.attempts)
            if run.in_flight:
                return Plan(answer=outcomes.CLOSING)
            return Plan([spent], error=error, synced=True)
        case "ask" | "record" | "wait":
            raise NotImplementedError(f"receipts are not asked for yet, so nothing leads to {action.kind!r}")
        case _:
            assert_never(action.kind)


def _retry(call: Call, step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """The wait before a retry is over."""
    if run.made.get(call.position) is not call:
        return Plan()  # it was interrupted meanwhile
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    return _dispatch_again(run, call, step, moment)


def _dispatch_again(run: LiveRun, call: Call, step: StepHistory, moment: Moment, *said: Draft) -> Plan:
    """The next attempt of a step, unless the run is at its end."""
    if run.closing:
        return Plan(answer=outcomes.HELD)
    if (reason := budget.too_late(run.deadline, moment.now)) is not None:
        if run.in_flight:
            return Plan(answer=outcomes.CLOSING)
        payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}: {reason}"})
        spent = Draft("exhausted", Event.BUDGET_EXHAUSTED, {"step": step.number}, payload, step.position, step.attempts)
        return Plan([spent], error=BudgetExceededException(run.run_id, reason), synced=True)
    return _dispatching([*said, _next_attempt(call, step)], call)


def _dispatching(drafts: list[Draft], call: Call) -> Plan:
    """The plan whose drafts end with an intent. That of a step without side effects may be lost with the machine: no harm is done."""
    return Plan(drafts, synced=False if call.options.effect is Effect.READ else None)


def _next_attempt(call: Call, step: StepHistory) -> Draft:
    """Stored arguments, stored key: only the attempt's number is new."""
    used = step.attempts_of_code if call.environment == step.environment else 0
    fields = _fields(call, step.number, step.key, max(0, call.max_attempts - used - 1))
    recorded = _arguments(call, step)
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
    if call.after:
        fields["after"] = list(call.after)  # as it will be read
    return fields


def _lacks_arguments(call: Call, step: StepHistory) -> bool:
    """Whether it takes recorded arguments that are not in memory to decide: those that are not the call's, byte for byte."""
    is_left_out = step.arguments is None and step.digest is not None
    return is_left_out and step.digest != call.digest and not call.is_fetched


def _arguments(call: Call, recorded: StepHistory | Missed) -> bytes | None:
    """The recorded arguments, from wherever they are; None where they were erased."""
    if recorded.arguments is not None:
        return recorded.arguments
    return call.stored if recorded.digest == call.digest else call.recorded


def _divergence(run: LiveRun, call: Call, step: StepHistory) -> ReplayDivergence | None:
    """What the program is told where it asks for another call than the one that stands at this position."""
    if step.tool == call.tool and call.after != step.dependencies:
        recorded, asked = f"{step.tool!r} after {list(step.dependencies)}", f"{call.tool!r} after {list(call.after)}"
        return ReplayDivergence(run.run_id, step.position, recorded, asked)
    return _difference(run, call, step)


def _difference(run: LiveRun, call: Call, recorded: StepHistory | Missed) -> ReplayDivergence | None:
    path = None
    is_same_tool = recorded.tool == call.tool
    if is_same_tool and (recorded.digest == call.digest if recorded.digest else _is_same_input(run, call, recorded)):
        return None
    arguments = _arguments(call, recorded)
    if is_same_tool and arguments is not None:
        if call.options.identity is not None and _is_identical(call, arguments):
            return None
        path = difference(arguments, call.stored)
    names = run.run_id, recorded.position, repr(recorded.tool), repr(call.tool)
    if isinstance(recorded, StepHistory) and recorded.outcome is None:
        stored = arguments.decode() if arguments is not None else "(erased)"
        return IntentDrift(*names, path, f"{recorded.tool}({stored})")
    said = _KEY_IS_USED.format(call.key) if call.key is not None else ""
    return ReplayDivergence(*names, path, said + hint(arguments, call.stored))


_KEY_IS_USED = " The position is that of step_key {!r}, which names the recorded call: give another call another key."


def _is_same_input(run: LiveRun, call: Call, recorded: StepHistory | Missed) -> bool:
    return recorded.input == digests.salted(run.history.secret, call.stored)


def _is_identical(call: Call, recorded: bytes) -> bool:
    """Whether the two calls are one by what their tool says identifies a call."""
    identity = call.options.identity
    assert identity is not None
    told = [canonical.encode(identity(canonical.decode(stored))) for stored in (recorded, call.stored)]
    return told[0] == told[1]


# --- attempts ---------------------------------------------------------------------------------------------------------


def _wait_to_retry(run: LiveRun, call: Call, step: StepHistory, until: float) -> Flow[None]:
    """Wait, and write the next attempt's intent."""
    token = run.token  # whoever took the run over in the meantime has made the retry
    yield Wait(run, until, step.wait)  # a clock that was set back makes no wait longer than it was drawn
    if run.late:
        yield from _take_late(run, call, None)
    if not step.is_settled:
        yield from _commit(run, call, partial(_retry, call, step), token)


def _take_late(run: LiveRun, call: Call, at_most: float | None) -> Flow[None]:
    """Where an attempt ran out of time and its function goes on in its thread: what it returns is the outcome after all.

    Only what has no side effect may be dispatched again beside it.
    """
    step = run.history.positions.get(call.position)
    if call.position not in run.late or step is None or (call.options.effect or step.declared) is Effect.READ:
        return
    result: Result | None = yield AwaitLate(run, call.position, at_most)
    if result is None:
        call.branch.answered.add(call.position)  # its failure stands until the thread has ended
        if at_most is not None and not run.is_cancelled:
            yield from _commit(run, call, partial(_still_runs, call, TimeoutError(f"no result within {at_most:g} s")))
    elif result.error is None:
        draft = outcomes.returned(run, call, step, result.value)
        yield from _commit(run, call, partial(_returned_late, call, draft))


def _still_runs(call: Call, error: TimeoutError, run: LiveRun, moment: Moment) -> Plan:
    """Where nobody waited for the attempt's end, since he was interrupted, it fails now; it must not be dispatched beside its thread."""
    step = run.history.positions.get(call.position)
    if step is None or step.outcome is not None or run.history.state.is_terminal:
        return Plan()
    if _lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if _divergence(run, call, step) is not None or admission.must_not_repeat(run, call.options.effect or step.declared):
        return Plan()
    return outcomes.settle(call, outcomes.raised(run, call, step, error), error, run, moment)


def _returned_late(call: Call, draft: Draft, run: LiveRun, moment: Moment) -> Plan:
    """A function's late return is the receipt of its attempt. Where that one failed already, it stands as another, not dispatched."""
    step = run.history.positions.get(call.position)
    if step is None or step.stands or run.history.state.is_terminal:
        return Plan()
    if _lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if _divergence(run, call, step) is not None:
        return Plan()
    if step.outcome is None:
        return Plan([draft])
    intent = _next_attempt(call, step)
    intent.fields["late"] = True
    return Plan([intent, draft._replace(attempt=intent.attempt)])


def _attempt(run: LiveRun, call: Call, step: StepHistory) -> Flow[BaseException | None]:
    """Dispatch once and write the outcome. Returns the function's exception, for the caller's traceback."""
    token = run.token
    arguments = canonical.decode(_arguments(call, step) or call.stored) if call.passes_arguments else {}
    for name, annotation in call.parameters.items():
        if name in arguments:
            arguments[name] = canonical.rebuild(annotation, arguments[name])
    if call.takes_key:
        arguments["idempotency_key"] = step.key
    if step.redispatched == step.attempts:
        yield Warn(UndeclaredEffectWarning, _DISPATCHED_AGAIN.format(tool=call.tool))  # a program may make it an error
    call.was_dispatched = True
    result: Result = yield Invoke(run, step, call.function, arguments, call.options.timeout, call.is_async)
    error = result.error
    if error is None:
        draft = outcomes.returned(run, call, step, result.value)
    elif isinstance(error, Exception):
        if failures.is_ambiguous(error) and admission.must_not_repeat(run, call.options.effect or step.declared):
            yield Commit(run, partial(outcomes.park_ambiguous, step, error), token)
        draft = outcomes.raised(run, call, step, error)
    else:  # a cancellation is no outcome: it goes on its way, and the step is in doubt
        raise error
    if (yield Commit(run, partial(outcomes.settle, call, draft, error), token)) is outcomes.CLOSING:
        yield from _commit(run, call, partial(outcomes.end_fatally, step), token)
    return error
