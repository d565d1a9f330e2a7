"""One step: replay it, or write its intent, dispatch it, and write its outcome."""

from __future__ import annotations

from functools import partial
from typing import Any, assert_never

from agent_run_ledger.engine import admission, outcomes, recovery
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import Commit, Flow, GiveBack, Invoke, Moment, Plan, Result, Wait, Warn
from agent_run_ledger.engine.history import StepHistory
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
    UnserialisableArguments,
)
from agent_run_ledger.model import Effect, Event, RunState, StepState
from agent_run_ledger.rules import budget, canonical, digests, failures, functions
from agent_run_ledger.rules.difference import difference


def step(run: LiveRun, call: Call) -> Flow[Any]:
    """Run one step at most as often as its effect allows, and return what its function returned, now or long ago."""
    _store_arguments(call)
    try:
        position = yield Commit(run, partial(_intend, call))
        this = run.history.positions[position]
        error: BaseException | None = None
        while not this.is_settled:
            if this.outcome is not None and this.outcome.retry_at is not None:
                yield from _wait_to_retry(run, call, this, this.outcome.retry_at)
            error = yield from _attempt(run, call, this)
    except ReplayDivergence as divergence:
        yield GiveBack(run, str(divergence))
        raise
    except (StepInDoubt, RunClosed, RunawayLoopDetectedException, BudgetExceededException):
        yield GiveBack(run)
        raise
    finally:
        if (
            call.step is not None
        ):  # still in flight: it was interrupted, or its lease or a park of it was lost on the way
            run.leave(call.step)
    if error is not None and run.history.state.is_terminal:  # it was fatal
        yield GiveBack(run)
    return outcomes.hand_out(run, call, this, error)


_DISPATCHED_AGAIN = (
    "{tool!r} was dispatched again although it may have run before, because it declares no effect. Declare "
    "effect=Effect.READ, IDEMPOTENT or MUTATE, or open the ledger with undeclared='block'."
)


def _store_arguments(call: Call) -> None:
    try:
        what = f"the arguments of {call.tool!r}"
        declared = functions.together(call.parameters.values()) if call.parameters else None
        call.stored = canonical.encode(call.arguments, limit=call.limit, what=what, declared=declared)
    except canonical.Unstorable as error:
        raise UnserialisableArguments(f"{error}. Nothing was dispatched and nothing was written.", error.path) from None
    call.digest = digests.plain(call.stored)


# --- intents ----------------------------------------------------------------------------------------------------------


def _intend(call: Call, run: LiveRun, moment: Moment) -> Plan:
    """Decide what a call at the run's next position is: a replay, a first dispatch, another attempt, or a refusal."""
    if (refusal := admission.refusal(run, call.tool, pipeline=call.position is not None)) is not None:
        return Plan(error=refusal)
    history = run.history
    position = call.position or str(run.cursor)
    if position in history.values:
        recorded = f"run.{history.values[position][0]['name']}()"
        return Plan(error=ReplayDivergence(run.run_id, position, recorded, repr(call.tool)))
    step = history.positions.get(position)
    if step is None:
        return _begin(run, call, position)
    if (divergence := _divergence(run, call, step)) is not None:
        return Plan(error=divergence)
    if step.outcome is not None and (step.outcome.is_final or step.followed or history.state.is_terminal):
        return Plan(answer=position, reached=position, is_replay=True)
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    return _resume(run, call, step, moment)


def _begin(run: LiveRun, call: Call, position: str) -> Plan:
    """A call that the log does not know: the first intent of a new step, or a refusal."""
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    drafts, doubt = admission.left_in_doubt(run)
    if doubt is not None:
        return Plan(drafts, error=doubt)
    history = run.history
    salted = digests.salted(history.secret, call.stored)
    verdict = history.verdict
    if verdict.level == "certain" and history.looping == (call.tool, salted) and not call.options.may_repeat:
        refusal = {"rule": verdict.rule, "reason": verdict.reason, "evidence": list(verdict.evidence)}
        error: Exception = RunawayLoopDetectedException(
            run.run_id, verdict.rule, verdict.reason, verdict.evidence, RunState.DEAD_LETTER
        )
        drafts.append(_refused(call, position, Event.LOOP_DETECTED, refusal))
        return Plan(drafts, error=error, synced=True)
    reason = budget.steps_spent(run.limit, history.steps, history.refused)
    reason = reason or budget.entries_spent(run.limit, history.size)
    if reason is not None:
        drafts.append(_refused(call, position, Event.BUDGET_EXHAUSTED, {"rule": "budget", "reason": reason}))
        return Plan(drafts, error=BudgetExceededException(run.run_id, reason), synced=True)
    key = digests.idempotency_key(history.secret, run.run_id, position, call.tool, call.stored)
    fields = _fields(call, history.steps + 1, key, call.max_attempts - 1)
    fingerprint = digests.fingerprint(call.tool, call.digest)
    intent = Draft("intent", Event.START_STEP, fields, call.stored, position, 1, call.digest, salted, fingerprint)
    return _dispatching([*drafts, intent], call, position)


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
                return Plan(answer=step.position, reached=step.position)
            return _dispatching([_next_attempt(call, step)], call, step.position)
        case "dispatch_undeclared":
            said = Draft("redispatched_undeclared", None, {"step": step.number}, None, step.position, step.attempts + 1)
            return _dispatching([said, _next_attempt(call, step)], call, step.position)
        case "park":
            park = [] if step.state == StepState.BLOCKED else [parked_in_doubt(step, action.reason)]
            return Plan(park, error=in_doubt(run, step, action.reason))
        case "dead_letter":
            fields = {"step": step.number, "step_state": StepState.DEAD_LETTER}
            payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}: {action.reason}"})
            spent = Draft("exhausted", Event.BUDGET_EXHAUSTED, fields, payload, step.position, step.attempts)
            error = AttemptsExhausted(run.run_id, step.number, step.tool, step.attempts)
            return Plan([spent], error=error, synced=True)
        case "ask" | "record" | "wait":
            raise NotImplementedError(f"receipts are not asked for yet, so nothing leads to {action.kind!r}")
        case _:
            assert_never(action.kind)


def _retry(call: Call, step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """The wait before a retry is over."""
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    return _dispatching([_next_attempt(call, step)], call, None)


def _dispatching(drafts: list[Draft], call: Call, reached: str | None) -> Plan:
    """The plan whose drafts end with an intent. That of a step without side effects may be lost with the machine: no harm is done."""
    synced = False if call.options.effect is Effect.READ else None
    return Plan(drafts, answer=reached, reached=reached, call=call, synced=synced)


def _next_attempt(call: Call, step: StepHistory) -> Draft:
    """Stored arguments, stored key: only the attempt's number is new."""
    used = step.attempts_of_code if call.environment == step.environment else 0
    fields = _fields(call, step.number, step.key, max(0, call.max_attempts - used - 1))
    stored, digest = (call.stored, call.digest) if step.arguments is None else (step.arguments, step.digest)
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


def _refused(call: Call, position: str, event: Event, refusal: dict[str, Any]) -> Draft:
    return Draft("refused", event, {"tool": call.tool, "rule": refusal["rule"]}, canonical.encode(refusal), position)


def _divergence(run: LiveRun, call: Call, step: StepHistory) -> ReplayDivergence | None:
    if step.tool == call.tool and list(call.after) == step.dependencies:
        same = (
            step.digest == call.digest if step.digest else step.input == digests.salted(run.history.secret, call.stored)
        )
        if same:
            return None
    path = None
    recorded, asked = repr(step.tool), repr(call.tool)
    if step.tool == call.tool and list(call.after) != step.dependencies:
        recorded += f" after {step.dependencies}"
        asked += f" after {list(call.after)}"
    elif step.tool == call.tool and step.arguments is not None:
        path = difference(step.arguments, call.stored)
    if step.outcome is None:
        stored = step.arguments.decode() if step.arguments is not None else "(erased)"
        return IntentDrift(run.run_id, step.position, recorded, asked, path, f"{step.tool}({stored})")
    return ReplayDivergence(run.run_id, step.position, recorded, asked, path)


# --- attempts ---------------------------------------------------------------------------------------------------------


def _wait_to_retry(run: LiveRun, call: Call, step: StepHistory, until: float) -> Flow[None]:
    """Wait, and write the next attempt's intent. The call is in flight meanwhile: nobody else's comes in between."""
    token = run.token  # whoever took the run over in the meantime has made the retry
    run.in_flight = step
    try:
        yield Wait(run, until, step.wait)  # a clock that was set back makes no wait longer than it was drawn
        yield Commit(run, partial(_retry, call, step), token)
    except BaseException:
        if run.in_flight is step and step.outcome is not None:  # no attempt is under way: this is no doubt
            run.in_flight = None
        raise


def _attempt(run: LiveRun, call: Call, step: StepHistory) -> Flow[BaseException | None]:
    """Dispatch once and write the outcome. Returns the function's exception, for the caller's traceback."""
    token = run.token
    arguments = canonical.decode(step.arguments) if call.passes_arguments and step.arguments is not None else {}
    for name, annotation in call.parameters.items():
        if name in arguments:
            arguments[name] = canonical.rebuild(annotation, arguments[name])
    if step.redispatched == step.attempts:
        yield Warn(UndeclaredEffectWarning, _DISPATCHED_AGAIN.format(tool=call.tool))  # a program may make it an error
    result: Result = yield Invoke(run, step, call.function, arguments)
    error = result.error
    if error is None:
        draft = outcomes.returned(run, call, step, result.value)
    elif isinstance(error, Exception):
        if failures.is_ambiguous(error) and admission.must_not_repeat(run, call.options.effect or step.declared):
            yield Commit(run, partial(outcomes.park_ambiguous, step, error), token)
        draft = outcomes.raised(run, call, step, error)
    else:  # a cancellation is no outcome: it goes on its way, and the step is in doubt
        raise error
    yield Commit(run, partial(outcomes.settle, call, draft, error), token)
    return error
