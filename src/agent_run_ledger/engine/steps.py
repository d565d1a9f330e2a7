"""One step: replay it, or write its intent, dispatch it, and write its outcome."""

from __future__ import annotations

from functools import partial
from typing import Any, assert_never

from agent_run_ledger.engine import admission, attempts, breaking, charging, outcomes, reconcile, recovery, waits
from agent_run_ledger.engine.call import Call, LeftBehind
from agent_run_ledger.engine.deciding import insist, leave
from agent_run_ledger.engine.effects import AwaitLate, Commit, Draw, Fetch, Flow, GiveBack, Moment, Plan, Turn
from agent_run_ledger.engine.history import AT_WORK, Outcome, StepHistory
from agent_run_ledger.engine.identity import difference, divergence, lacks_arguments
from agent_run_ledger.engine.intents import dispatch_again, exhausted, first_intent, no_room
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import Standing, in_doubt, parked_in_doubt
from agent_run_ledger.errors import (
    BudgetExceededException,
    ReplayDivergence,
    RunawayLoopDetectedException,
    RunClosed,
    StepInDoubt,
)
from agent_run_ledger.rules import budget, canonical, digests, loops
from agent_run_ledger.rules.budget import Amount
from agent_run_ledger.words import Effect, Event


def step(run: LiveRun, call: Call) -> Flow[Any]:
    """Run one step at most as often as its effect allows, and return what its function returned, now or long ago.

    The call has been made: it has its position.
    """
    position = call.position
    error: BaseException | None = None
    try:
        if run.late:
            yield from attempts.take_late(run, call, call.options.timeout)
        if run.is_draining and ((there := run.history.positions.get(position)) is None or not there.is_settled):
            yield from leave(run, call)
        if not (call.is_replay and position in run.history.positions):  # the ledger may have been closed meanwhile
            decide = partial(_intend, call)
            if (answer := (yield Commit(run, decide, None, position in run.history.positions))) is not None:
                yield from insist(run, call, decide, None, answer)
        # Looked up each time: a run that was in doubt is read anew, and what it was before learns of nothing any more.
        while (this := run.history.positions.get(position)) is not None and not this.is_settled:
            if this.outcome is not None:
                if call.settles:
                    break  # its program waits for the retry, beside whatever else it does
                assert this.outcome.retry_at is not None
                yield from attempts.wait_to_retry(run, call, this, this.outcome.retry_at)
            elif this.waits is not None:
                yield from waits.rest(run, call, this.child)
            elif this.is_asked:
                yield from reconcile.ask(run, call, this, error)
            elif this.ask_at is not None:
                yield from reconcile.ask_again(run, call, this, this.ask_at)
            elif call.left is not None and call.left.decides:
                yield from attempts.settle_left(run, call, this, call.left)
            else:
                error = yield from attempts.attempt(run, call, this)
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
    if this is None and (blocked := run.history.blocked.get(position)) is not None:
        raise breaking.told(run, blocked)
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
        blocked = run.history.blocked.get(position)
        return (blocked or run.history.missed[position]).order
    assert step.outcome is not None
    return step.missed or step.outcome.order


# --- intents ----------------------------------------------------------------------------------------------------------


def is_replay(run: LiveRun, call: Call) -> bool:
    """Whether the log has the outcome of this very call, and it stands: then there is nothing to decide. Ask under the run's lock.

    False says nothing: recorded may be what needs a closer look.
    """
    step = run.history.positions.get(call.position)
    return (
        step is not None
        and (step.tool, step.digest, step.dependencies) == (call.tool, call.digest, call.after)
        and step.stands
        and not run.late
        and admission.refusal(run, pipeline=call.place is not None) is None
    )


def _intend(call: Call, run: LiveRun, moment: Moment) -> Plan:
    """Decide what a call at its position is: a replay, a first dispatch, another attempt, or a refusal."""
    history, position = run.history, call.position
    if history.state not in AT_WORK or history.pipeline is not (call.place is not None):
        refusal = admission.refusal(run, pipeline=None if call.settles else call.place is not None)
        if refusal is not None:
            return Plan(error=refusal)
    if run.made.get(position) is not call:
        return Plan()  # it was interrupted before anything was written of it, and nobody would make the call
    step = history.positions.get(position)
    if step is None:
        return _begin(run, call, position, moment)
    if lacks_arguments(call, step):
        return Plan(answer=Fetch(run, step.seq))
    if (differs := divergence(run, call, step)) is not None:
        return Plan(error=differs)
    is_told = position in call.branch.answered or (position in run.settled and not step.is_retried)
    if step.stands or (step.outcome is not None and (history.state.is_terminal or is_told)):
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
    if (blocked := history.blocked.get(position)) is not None:
        if (blocked.tool, blocked.input) == (call.tool, digests.salted(history.secret, call.stored)):
            return Plan(is_replay=True)
        recorded, asked = f"a call of {blocked.tool!r} that was blocked", f"{call.tool!r} with these arguments"
        return Plan(error=ReplayDivergence(run.run_id, position, recorded, asked))
    if (missed := history.missed.get(position)) is not None:
        differs = difference(run, call, missed)
        return Plan(error=differs) if differs is not None else Plan(is_replay=True)
    if run.requests or run.divergence is not None or history.state not in AT_WORK:
        ending = admission.ending(run)
        if ending is not None:
            return Plan(error=ending)
    salted = digests.salted(history.secret, call.stored)
    continued = action = None
    if (history.doubts or call.behind) and call.place is None and call.wait is None:
        continued = _continued(run, call, salted)
    if continued is not None:
        declared = recovery.declaration(call, undeclared=run.undeclared)
        action = recovery.in_doubt(continued, declared, None, moment.now, continued.attempts_to_draw_on)
    drafts: list[Draft] = []
    if call.behind:
        asks = continued if action is not None and action.kind == "ask" else None
        drafts, doubt = admission.left_in_doubt(run, call.behind, asks)
        if doubt is not None:
            return Plan(drafts, error=doubt)
    if (verdict := breaking.against(run, call, salted, moment.now)) is not None:
        if breaking.stage(run, verdict) == loops.BLOCK:
            return Plan([*drafts, breaking.blocked(run, call, salted, verdict)])
        event, state = breaking.ENDS[verdict.level]
        refusal = breaking.refusal(verdict)
        error: Exception = RunawayLoopDetectedException(
            run.run_id, verdict.rule, verdict.reason, verdict.evidence, state
        )
        return _refusing(run, call, drafts, event, refusal, error)
    entries = history.size - history.asides
    reason = budget.used_up(run.limits, history.steps + run.ahead, history.refused, entries, moment.now)
    holds: Amount | str | Draw | None = None
    if run.limits_calls and reason is None and not run.closing:
        holds = charging.reserve(run, call, history.at_work(moment.now), continued.attempts + 1 if continued else 1)
        if holds is budget.WAITS:
            return Plan(answer=outcomes.NO_ROOM)
        if isinstance(holds, Draw):
            return Plan(answer=holds)
        reason = holds if isinstance(holds, str) else None
    if reason is not None:
        error = BudgetExceededException(run.run_id, reason)
        refusal = {"rule": "budget", "reason": reason, "limits": run.limits.written()}
        return _refusing(run, call, drafts, Event.BUDGET_EXHAUSTED, refusal, error)
    if run.closing:
        return Plan(answer=outcomes.HELD)
    if moment.too_full is not None:
        return Plan(error=no_room(run, call, moment.too_full))
    assert not isinstance(holds, str | Draw)
    if continued is not None and action is not None:
        return _continue(run, call, continued, action, drafts, salted, holds)
    intent = first_intent(run, call, salted, holds)
    if call.wait is not None:
        return Plan([*drafts, intent, waits.waiting(call.wait, intent, moment)])
    return Plan([*drafts, intent], synced=False if call.options.effect is Effect.READ else None)


# --- continuing -------------------------------------------------------------------------------------------------------


def _continued(run: LiveRun, call: Call, salted: str) -> StepHistory | None:
    """The step of the same tool and arguments that may have taken effect, although its program was told that it failed.

    Or was told nothing, since it was interrupted. A call without side effects continues nothing: there is nothing that could be doubled.
    """
    if call.options.effect is Effect.READ:
        return None
    for position in call.behind:  # interrupted, and about to be recorded as such
        step = run.history.positions.get(position)
        if step is not None and (step.tool, step.input) == (call.tool, salted) and step.may_have_taken_effect:
            _, interrupted = run.interrupted.get(position, (None, None))
            is_undispatched = interrupted is not None and admission.is_undispatched(run, interrupted, step)
            return None if step.outcome is None and is_undispatched else step
    return run.history.doubts.get((call.tool, salted))


def _continue(
    run: LiveRun,
    call: Call,
    step: StepHistory,
    action: recovery.Action,
    drafts: list[Draft],
    salted: str,
    holds: Amount | None,
) -> Plan:
    """A call that continues another step: at its own position, with that one's key and with the attempts that it has left.

    Where nothing may be sent before it is known what became of the other, the intent says that it is not dispatched.
    """
    if call.left is None and step.outcome is not None and step.outcome.ok == "completed":
        if (known := _output(call, step.outcome)) is None:
            return Plan(answer=Fetch(run, step.outcome.seq))
        call.left = known
    if call.left is None and (runs_on := run.runs_on(step)) is not None:
        return Plan(answer=AwaitLate(run, runs_on, call.options.timeout))
    is_known = call.left is not None and call.left.decides
    if action.kind == "dead_letter" and not is_known:
        return exhausted(run, step, action.reason, drafts)
    is_dispatched = action.kind in ("dispatch", "dispatch_undeclared") and not is_known
    intent = first_intent(run, call, salted, holds if is_dispatched else None, step, is_dispatched=is_dispatched)
    standing = Standing(call.position, intent.fields["step"], call.tool, intent.attempt or 0)
    if action.kind == "dispatch_undeclared" and is_dispatched:
        return Plan([*drafts, intent, _said(standing, standing.attempts)])
    if is_dispatched or is_known:
        return Plan([*drafts, intent])
    if action.kind == "ask":
        return Plan([*drafts, intent, reconcile.question(standing, action.reason)])
    return Plan(
        [*drafts, intent, parked_in_doubt(standing, action.reason)], error=in_doubt(run, standing, action.reason)
    )


def _said(step: StepHistory | Standing, attempt: int) -> Draft:
    """The entry that says aloud that nobody knows what this attempt does a second time."""
    return Draft("redispatched_undeclared", None, {"step": step.number}, None, step.position, attempt)


def _output(call: Call, outcome: Outcome) -> LeftBehind | None:
    """What the other one returned, which its program was never told; None where that has to be looked up."""
    payload = outcome.payload
    if payload is None and outcome.digest is not None:
        if outcome.seq not in call.fetched:
            return None
        payload = call.fetched[outcome.seq]
    value = canonical.decode(payload) if payload is not None else None
    return LeftBehind(is_running=False, has_returned=True, value=value)


def _refusing(
    run: LiveRun, call: Call, drafts: list[Draft], event: Event, refusal: dict[str, Any], error: Exception
) -> Plan:
    """The plan that refuses a call and ends the run: a refusal is written before it is raised."""
    if run.has_under_way:
        return Plan(answer=outcomes.CLOSING)
    fields = {"tool": call.tool, "rule": refusal["rule"]} | admission.follows(run, call.branch)
    refused = Draft("refused", event, fields, canonical.encode(refusal), call.position)
    return Plan([*drafts, refused], error=error, synced=True)


def _resume(run: LiveRun, call: Call, step: StepHistory, moment: Moment) -> Plan:
    """A recorded step without a final outcome: what recovery's rules say of it."""
    if step.waits is not None:
        return Plan()
    (action,) = recovery.plan_recovery(
        [step], {call.tool: recovery.declaration(call, undeclared=run.undeclared)}, {}, moment.now
    )
    match action.kind:
        case "dispatch":
            if action.not_before is not None and action.not_before > moment.now:
                return Plan()
            return dispatch_again(run, call, step, moment)
        case "dispatch_undeclared":
            return dispatch_again(run, call, step, moment, _said(step, step.attempts + 1))
        case "park":
            return _park(run, step, action.reason)
        case "dead_letter":
            return exhausted(run, step, action.reason, [])
        case "ask" if run.runs_on(step) is not None:  # what a receiver has not seen may be on its way
            return _park(run, step, "it ran out of time, and its function goes on in its thread")
        case "ask":
            if action.not_before is not None and action.not_before > moment.now:
                return Plan()
            return Plan([reconcile.question(step, action.reason, step.unanswered)])
        case "record" | "wait":
            raise AssertionError(f"nobody was asked, so nothing leads to {action.kind!r}")
        case _:
            assert_never(action.kind)


def _park(run: LiveRun, step: StepHistory, why: str) -> Plan:
    return Plan(outcomes.park(run, step, why), error=in_doubt(run, step, why))
