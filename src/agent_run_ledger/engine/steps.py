"""One step: replay it, or write its intent, dispatch it, and write its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypedDict

from agent_run_ledger.engine import recovery
from agent_run_ledger.engine.effects import Commit, Flow, GiveBack, Invoke, Moment, Plan, Result, Wait, Warn
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import (
    AttemptsExhausted,
    BudgetExceededException,
    IntentDrift,
    ReplayDivergence,
    RunawayLoopDetectedException,
    RunClosed,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    StoreError,
    UndeclaredEffectWarning,
    UnorderedStep,
    UnserialisableArguments,
    UnserialisableOutput,
)
from agent_run_ledger.model import Effect, Event, RetryPolicy, RunState, StepState
from agent_run_ledger.rules import backoff, budget, canonical, digests, failures, functions


class Options(NamedTuple):
    """What a caller declares about a tool: the options of `execute_step`, `step()` and `Step`."""

    effect: Effect | None = None
    retry: RetryPolicy | None = None
    returns: Any = None
    raises: tuple[type[BaseException], ...] = ()
    fatal: tuple[type[BaseException], ...] = ()
    may_repeat: bool = False
    version: str | None = None


class StepOptions(TypedDict, total=False):
    """The same as keywords, for those who pass them on."""

    effect: Effect | None
    retry: RetryPolicy | None
    returns: Any
    raises: tuple[type[BaseException], ...]
    fatal: tuple[type[BaseException], ...]
    may_repeat: bool
    version: str | None


@dataclass(slots=True)
class Call:
    """What the program asks for."""

    tool: str
    arguments: dict[str, Any]
    function: Callable[..., Any]
    options: Options
    environment: str
    """The tool's declared version or a digest of its code, and the versions beneath it."""
    passes_arguments: bool
    """Whether the function takes the stored arguments by keyword, or is called bare."""
    limit: int
    """The largest payload, in canonical bytes."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The annotations by which stored arguments are made into the declared classes again."""
    position: str | None = None
    """Its place, where it has a name of its own; None: the next of the run's own branch."""
    after: tuple[str, ...] = ()
    """The positions whose outputs it depends on."""
    stored: bytes = b""
    digest: bytes = b""


def step(run: LiveRun, call: Call) -> Flow[Any]:
    """Run one step at most as often as its effect allows, and return what its function returned, now or long ago."""
    _store_arguments(call)
    try:
        position = yield Commit(run, partial(_intend, call))
        this = run.history.positions[position]
        error: BaseException | None = None
        while not _is_settled(this):
            if this.outcome is not None and this.outcome.retry_at is not None:
                yield from _wait_to_retry(run, call, this, this.outcome.retry_at)
            error = yield from _attempt(run, call, this)
    except ReplayDivergence as divergence:
        yield GiveBack(run, str(divergence))
        raise
    except (StepInDoubt, RunClosed, RunawayLoopDetectedException, BudgetExceededException):
        yield GiveBack(run)
        raise
    if error is not None and run.history.state.is_terminal:  # it was fatal
        yield GiveBack(run)
    return _hand_out(run, call, this, error)


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


def _is_settled(step: StepHistory) -> bool:
    """A failure whose retry was due is settled, too, once something follows it: the program went on without the retry."""
    return step.outcome is not None and (step.outcome.retry_at is None or step.followed)


def _effect(call: Call, step: StepHistory) -> Effect | None:
    """What is declared now counts; what was declared at the dispatch, where nothing is declared any more."""
    return call.options.effect or (Effect(step.effect) if step.effect else None)


def _must_not_repeat(run: LiveRun, effect: Effect | None) -> bool:
    return effect is Effect.MUTATE or (effect is None and run.undeclared == "block")


# --- intents ----------------------------------------------------------------------------------------------------------


def _intend(call: Call, run: LiveRun, moment: Moment) -> Plan:
    """Decide what a call at the run's next position is: a replay, a first dispatch, another attempt, or a refusal."""
    history = run.history
    closed = history.state is RunState.QUARANTINE or (
        history.state.is_terminal and history.state is not RunState.COMPLETED
    )
    if closed:
        return Plan(error=RunClosed(run.run_id, history.state, cause_of(history.cause)))
    if run.in_flight is not None:
        return Plan(error=UnorderedStep(run.run_id, call.tool, run.in_flight.tool))
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
        run.advance(position)
        run.replayed += 1
        return Plan(answer=position)
    if run.is_cancelled:
        return Plan(error=RunClosed(run.run_id, RunState.CANCELLED))
    return _resume(run, call, step, moment)


def _begin(run: LiveRun, call: Call, position: str) -> Plan:
    """A call that the log does not know: the first intent of a new step, or a refusal."""
    history = run.history
    if history.state.is_terminal:
        return Plan(error=RunClosed(run.run_id, history.state, cause_of(history.cause)))
    if run.is_cancelled:
        return Plan(error=RunClosed(run.run_id, RunState.CANCELLED))
    drafts: list[Draft] = []
    if (left := left_in_doubt(run)) is not None:
        if left.error is not None:
            return left
        drafts += left.drafts
    salted = digests.salted(history.secret, call.stored)
    verdict = history.verdict
    if verdict.level == "certain" and history.looping == (call.tool, salted) and not call.options.may_repeat:
        refusal = {"rule": verdict.rule, "reason": verdict.reason, "evidence": list(verdict.evidence)}
        error: Exception = RunawayLoopDetectedException(
            run.run_id, verdict.rule, verdict.reason, verdict.evidence, RunState.DEAD_LETTER
        )
        drafts.append(_refused(call, position, Event.LOOP_DETECTED, refusal))
        return Plan(drafts, error=error, synced=True)
    reason = budget.exhausted(run.limit, history.steps, history.refused, history.size)
    if reason is not None:
        drafts.append(_refused(call, position, Event.BUDGET_EXHAUSTED, {"rule": "budget", "reason": reason}))
        return Plan(drafts, error=BudgetExceededException(run.run_id, reason), synced=True)
    key = digests.idempotency_key(history.secret, run.run_id, position, call.tool, call.stored)
    drafts.append(_intent(run, call, position, history.steps + 1, 1, key, call.stored, call.digest, salted))
    return Plan(drafts, answer=position, synced=_synced(call.options.effect))


def _resume(run: LiveRun, call: Call, step: StepHistory, moment: Moment) -> Plan:
    """A recorded step without a final outcome: what recovery's rules say of it."""
    declared = recovery.Declaration(
        effect=call.options.effect,
        max_attempts=_max_attempts(call),
        blocks_undeclared=run.undeclared == "block",
        environment=call.environment,
    )
    (action,) = recovery.plan_recovery([step], {call.tool: declared}, {}, moment.now)
    drafts = []
    if action.kind == "park":
        if step.state != StepState.BLOCKED:
            drafts.append(_parked_in_doubt(step, action.reason))
        return Plan(drafts, error=_in_doubt(run, step, action.reason))
    if action.kind == "dead_letter":
        fields = {"step": step.number, "step_state": StepState.DEAD_LETTER}
        payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}: {action.reason}"})
        drafts.append(Draft("exhausted", Event.BUDGET_EXHAUSTED, fields, payload, step.position, step.attempts))
        error = AttemptsExhausted(run.run_id, step.number, step.tool, step.attempts)
        return Plan(drafts, error=error, synced=True)
    if action.not_before is not None and action.not_before > moment.now:
        run.advance(step.position)
        return Plan(answer=step.position)
    if action.kind == "dispatch_undeclared":
        fields = {"step": step.number}
        drafts.append(Draft("redispatched_undeclared", None, fields, None, step.position, step.attempts + 1))
    drafts.append(_next_attempt(run, call, step))
    return Plan(drafts, answer=step.position, synced=_synced(call.options.effect))


def _retry(call: Call, step: StepHistory, run: LiveRun, moment: Moment) -> Plan:
    """The wait before a retry is over."""
    if run.is_cancelled:
        return Plan(error=RunClosed(run.run_id, RunState.CANCELLED))
    return Plan([_next_attempt(run, call, step)], synced=_synced(call.options.effect))


def _next_attempt(run: LiveRun, call: Call, step: StepHistory) -> Draft:
    """Stored arguments, stored key: only the attempt's number is new."""
    stored = step.arguments if step.arguments is not None else call.stored
    return _intent(
        run,
        call,
        step.position,
        step.number,
        step.attempts + 1,
        step.key,
        stored,
        step.digest or call.digest,
        step.input,
    )


def _intent(
    run: LiveRun,
    call: Call,
    position: str,
    number: int,
    attempt: int,
    key: str,
    stored: bytes,
    digest: bytes,
    salted: str,
) -> Draft:
    used = attempt
    if attempt > 1:
        step = run.history.positions[position]
        used = step.attempts_of_code + 1 if call.environment == step.environment else 1
    fields: dict[str, Any] = {
        "step": number,
        "tool": call.tool,
        "key": key,
        "environment": call.environment,
        "left": max(0, _max_attempts(call) - used),
        "step_state": StepState.RUNNING,
    }
    if call.options.effect is not None:
        fields["effect"] = call.options.effect
    if call.after:
        fields["after"] = list(call.after)  # as it will be read
    fingerprint = digests.fingerprint(call.tool, digest)
    return Draft("intent", Event.START_STEP, fields, stored, position, attempt, digest, salted, fingerprint)


def _max_attempts(call: Call) -> int:
    return call.options.retry.max_attempts if call.options.retry else recovery.DEFAULT_ATTEMPTS


def _synced(effect: Effect | None) -> bool | None:
    """An intent of a step without side effects may be lost with the machine: running it again harms nobody."""
    return False if effect is Effect.READ else None


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
        path = canonical.difference(step.arguments, call.stored)
    if step.outcome is None:
        stored = step.arguments.decode() if step.arguments is not None else "(erased)"
        return IntentDrift(run.run_id, step.position, recorded, asked, path, f"{step.tool}({stored})")
    return ReplayDivergence(run.run_id, step.position, recorded, asked, path)


def _wait_to_retry(run: LiveRun, call: Call, step: StepHistory, until: float) -> Flow[None]:
    """Wait, and write the next attempt's intent. The call is in flight meanwhile: nobody else's comes in between."""
    token = run.token  # whoever took the run over in the meantime has made the retry
    run.in_flight = step
    try:
        yield Wait(run, until)
        yield Commit(run, partial(_retry, call, step), token)
    except BaseException:
        if run.in_flight is step:
            run.in_flight = None
        raise


# --- attempts and outcomes --------------------------------------------------------------------------------------------


def _attempt(run: LiveRun, call: Call, step: StepHistory) -> Flow[BaseException | None]:
    """Dispatch once and write the outcome. Returns the function's exception, for the caller's traceback."""
    token = run.token
    try:
        arguments = canonical.decode(step.arguments) if call.passes_arguments and step.arguments is not None else {}
        for name, annotation in call.parameters.items():
            if name in arguments:
                arguments[name] = canonical.rebuild(annotation, arguments[name])
        if step.redispatched == step.attempts:
            yield Warn(
                UndeclaredEffectWarning, _DISPATCHED_AGAIN.format(tool=call.tool)
            )  # may be made an error by the program
        result: Result = yield Invoke(run, step, call.function, arguments)
        error = result.error
        if error is None:
            draft = _returned(run, call, step, result.value)
        elif isinstance(error, Exception):
            if failures.is_ambiguous(error) and _must_not_repeat(run, _effect(call, step)):
                yield Commit(run, partial(_park_ambiguous, step, error), token)
            draft = _error(run, call, step, "failed", error)
        else:  # a cancellation is no outcome: it goes on its way, and the step is in doubt
            raise error
    except BaseException:  # also where the driver was stopped, the lease was gone, or a park could not be written
        run.leave(step)
        raise
    try:
        yield Commit(run, partial(_settle, call, draft, error), token)
    except StoreError:
        # The outcome is owed to the log. Until it is written the program stands before this call: asking again replays it.
        run.cursor = min(run.cursor, _index(step.position) or run.cursor)
        raise
    return error


def _index(position: str) -> int | None:
    return int(position) if position.isdecimal() else None


def _outcome(step: StepHistory, ok: str, payload: bytes, may_repeat: bool) -> Draft:
    fields: dict[str, Any] = {"step": step.number, "ok": ok, "left": step.left, "step_state": StepState.FAILED}
    event = Event.STEP_ERROR
    if ok == "completed":
        fields["step_state"] = StepState.COMPLETED
        event = Event.STEP_SUCCESS
    if may_repeat:
        fields["may_repeat"] = True
    return Draft("outcome", event, fields, payload, step.position, step.attempts)


def _returned(run: LiveRun, call: Call, step: StepHistory, value: Any) -> Draft:
    try:
        payload = canonical.encode(
            value, limit=call.limit, what=f"the output of {call.tool!r}", declared=call.options.returns
        )
    except Exception as error:  # also what an object's own methods raise, or a warning that the program made an error
        return _error(run, call, step, "unstorable", error)
    return _outcome(step, "completed", payload, call.options.may_repeat)


def _error(run: LiveRun, call: Call, step: StepHistory, ok: str, error: Exception) -> Draft:
    """An error as data; `error_id` is what the loop rules compare, since a traceback differs each time."""
    described = failures.describe(error)
    if type(error) is canonical.Unstorable:
        described["path"] = error.path
    draft = _outcome(step, ok, canonical.encode(described), call.options.may_repeat)
    draft.fields["error_id"] = digests.salted(run.history.secret, failures.text(described).encode())
    if failures.is_ambiguous(error):
        draft.fields["ambiguous"] = True
    return draft


def _settle(call: Call, draft: Draft, error: BaseException | None, run: LiveRun, moment: Moment) -> Plan:
    """Write an outcome; a failure that may be retried says when, and one that is fatal ends the run."""
    if error is None:
        return Plan([draft])
    step = run.history.positions[draft.position or ""]
    if issubclass(type(error), call.options.fatal):  # an exception may hide behind its `__class__`
        payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, failed with a fatal error"})
        return Plan([draft, Draft("aborted", Event.ABORT, {}, payload)], synced=True)
    retry = call.options.retry
    if retry is not None and step.attempts_of_code < retry.max_attempts:
        wait = backoff.delay(step.attempts_of_code - 1, retry, moment.draw, step.wait)
        later = {**draft.fields, "retry_at": moment.now + wait, "wait": wait}
        return Plan([draft._replace(event=Event.WAIT, fields=later)])
    return Plan([draft])


def _park_ambiguous(step: StepHistory, error: Exception, run: LiveRun, moment: Moment) -> Plan:
    why = f"{failures.text(failures.describe(error))} does not tell whether it took effect"
    doubt = _in_doubt(run, step, why)
    doubt.__cause__ = error
    run.interrupted = step.position
    return Plan([_parked_in_doubt(step, why)], error=doubt)


def left_in_doubt(run: LiveRun) -> Plan | None:
    """What comes first when a program goes on although a step of it was interrupted: the step is recorded as cancelled.

    Where a second dispatch could do harm nothing is recorded; the run parks and the program is told that the step is in doubt.
    """
    if run.interrupted is None:
        return None
    step = run.history.positions[run.interrupted]
    if not _must_not_repeat(run, Effect(step.effect) if step.effect else None):
        return Plan([_cancelled(step)])
    why = "it was interrupted, and the program goes on"
    drafts = [] if step.state == StepState.BLOCKED else [_parked_in_doubt(step, why)]
    return Plan(drafts, error=_in_doubt(run, step, why))


def unsettled(run: LiveRun) -> StepInDoubt | None:
    """The first step of which nobody knows whether it took effect, where a second dispatch could do harm."""
    for step in run.history.positions.values():
        if step.outcome is None and _must_not_repeat(run, Effect(step.effect) if step.effect else None):
            return _in_doubt(run, step, "it was never settled")
    return None


def _cancelled(step: StepHistory) -> Draft:
    described = {
        "type": "CancelledError",
        "module": "agent_run_ledger",
        "message": "the step was interrupted",
        "bases": [],
    }
    return _outcome(step, "cancelled", canonical.encode(described), may_repeat=False)


def _parked_in_doubt(step: StepHistory, why: str) -> Draft:
    fields = {"step": step.number, "step_state": StepState.BLOCKED}
    payload = canonical.encode({"reason": f"step {step.number}, {step.tool!r}, is in doubt: {why}"})
    return Draft("parked", Event.WAIT, fields, payload, step.position, step.attempts)


def _in_doubt(run: LiveRun, step: StepHistory, why: str) -> StepInDoubt:
    return StepInDoubt(run.run_id, step.number, step.tool, step.position, why)


def cause_of(payload: bytes | None) -> str | None:
    """The reason that a refusal, park or end was given, in words."""
    return canonical.decode(payload)["reason"] if payload is not None else None


# --- what the caller gets ---------------------------------------------------------------------------------------------


def _hand_out(run: LiveRun, call: Call, step: StepHistory, cause: BaseException | None) -> Any:
    """The recorded outcome, by the same way live and at replay. `cause` is the live exception, where there is one."""
    outcome = step.outcome
    assert outcome is not None
    if outcome.ok == "completed":
        value = canonical.decode(outcome.payload) if outcome.payload is not None else None
        return canonical.rebuild(call.options.returns, value) if call.options.returns is not None else value
    described = canonical.decode(outcome.payload) if outcome.payload is not None else {"type": "(erased)"}
    text = failures.text(described)
    if outcome.ok == "unstorable":
        raise UnserialisableOutput(
            f"{call.tool!r} was executed, and is recorded as executed, but its output cannot be stored: {text}",
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
