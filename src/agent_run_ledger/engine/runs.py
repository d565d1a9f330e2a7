"""The decisions that concern a whole run: making it, finishing it, parking it, ending it, and recorded values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from agent_run_ledger.contract import Listing
from agent_run_ledger.engine import admission, schedule
from agent_run_ledger.engine.effects import Commit, Flow, GiveBack, Moment, Plan
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.live import Branch, LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import (
    BudgetExceededException,
    LeaseLost,
    PayloadErased,
    ReplayDivergence,
    RunClosed,
    RunInputMismatch,
    RunOwned,
    StepInDoubt,
    StoreError,
    UnorderedStep,
    UnserialisableArguments,
)
from agent_run_ledger.rules import backoff, budget, canonical, digests, failures
from agent_run_ledger.rules.budget import Limits
from agent_run_ledger.words import Event, RunState

FORMAT = 1
"""The version of the entries' bodies."""


def stored(value: Any, what: str, limit: int | None = None, declared: Any = None) -> bytes:
    """What somebody says about a run, as it is stored. Raises `UnserialisableArguments` and `PayloadTooLarge`."""
    try:
        return canonical.encode(value, limit=limit, what=what, declared=declared)
    except canonical.Unstorable as error:
        raise UnserialisableArguments(f"{error}. Nothing was written.", error.path) from None


def created(
    goal: str,
    given: Any,
    *,
    pipeline: bool,
    limit: int,
    limits: Limits,
    declared: Any = None,
    agent: str | None = None,
    parent: str | None = None,
    queue: str | None = None,
    priority: int = 0,
    key: str | None = None,
) -> Draft:
    """The first entry: what the run is for, what it was given, what it may use, which agent's run it is, whose child, and where it waits."""
    fields: dict[str, Any] = {"format": FORMAT} | limits.written()
    if pipeline:
        fields["pipeline"] = True
    if priority:
        fields["priority"] = priority
    named = {"agent": agent, "parent": parent, "queue": queue, "key": key}
    fields |= {name: value for name, value in named.items() if value is not None}
    payload = stored({"goal": goal, "input": given}, "the goal or input of the run", limit, declared)
    return Draft("created", None, fields, payload)


def listing(body: Mapping[str, Any]) -> Listing:
    """What a run is found by, as its first entry says. Raises `LookupError` where that lacks something."""
    return Listing(body["at"], body.get("agent"), body.get("queue"), body.get("priority", 0), body.get("key"))


def check_same(history: History, draft: Draft) -> None:
    """Raises `RunInputMismatch` where the run was created with another goal or input, and `PayloadErased` where nobody can tell."""
    assert draft.payload is not None
    if history.state.is_terminal and not history.secret:
        raise PayloadErased(history.run_id, "what it was given")
    if history.created_digest == digests.salted(history.secret, draft.payload):
        return
    what = "goal or input"
    if history.created is not None:
        recorded, asked = canonical.decode(history.created), canonical.decode(draft.payload)
        what = "goal" if recorded["goal"] != asked["goal"] else "input"
    raise RunInputMismatch(history.run_id, what)


def result_of(history: History) -> bytes:
    """The result of a completed run, as it is stored. Raises `PayloadErased`."""
    if history.result is None:
        raise PayloadErased(history.run_id, "the result")
    return history.result


def skip_recorded(run: LiveRun) -> None:
    """Put the program behind every position that has an outcome. It is handed failures too, so what follows acts on them."""
    history, branch = run.history, run.root
    while True:
        position = str(branch.cursor)
        step = history.positions.get(position)
        if step is not None:
            if not step.is_settled:
                return
            run.replayed += 1
            branch.hears[position] = step.attempts
        elif position not in history.values and position not in history.missed and position not in history.blocked:
            return
        branch.take()


def check_wiring(run: LiveRun, wiring: Mapping[str, tuple[str, ...]]) -> Flow[None]:
    """Raises `ReplayDivergence` where a recorded step of a pipeline is missing or depends on other steps now."""
    try:
        yield Commit(run, partial(_check_wiring, wiring))
    except ReplayDivergence as divergence:
        yield GiveBack(run, str(divergence))
        raise


def _check_wiring(wiring: Mapping[str, tuple[str, ...]], run: LiveRun, moment: Moment) -> Plan:
    for step in run.history.positions.values():
        recorded = f"step {step.position!r} after {list(step.dependencies)}"
        if step.position not in wiring:
            return Plan(error=ReplayDivergence(run.run_id, step.position, recorded, "a pipeline without that step"))
        if wiring[step.position] != step.dependencies:
            asked = f"it after {list(wiring[step.position])}"
            return Plan(error=ReplayDivergence(run.run_id, step.position, recorded, asked))
    return Plan()


def finish(run: LiveRun, result: bytes) -> Flow[None]:
    """Complete the run. A completed run with an equal result is left as it is."""
    try:
        yield Commit(run, partial(_finish, result))
    except StepInDoubt:
        yield GiveBack(run)
        raise
    yield GiveBack(run)


def _finish(result: bytes, run: LiveRun, moment: Moment) -> Plan:
    history = run.history
    if history.state is RunState.COMPLETED and history.result_digest == digests.salted(history.secret, result):
        return Plan()
    if run.is_busy:
        return Plan(error=UnorderedStep(run.run_id, "finish_run", run.busy_with))
    refusal = admission.refusal(run) or admission.ending(run)
    if refusal is not None:
        return Plan(error=refusal)
    drafts, doubt = admission.left_in_doubt(run, None)
    if doubt is not None:
        return Plan(drafts, error=doubt)
    drafts.append(Draft("finished", Event.FINISH, {}, result))
    return Plan(drafts, synced=True)


def park(run: LiveRun, error: BaseException) -> Flow[bool]:
    """An exception left the program: the run stands, with its cause, until the program is run again.

    Where a worker drives it nobody runs it again but workers: it is tried again as its agent says, and has failed in the end.
    While a step is in flight in another thread nothing is parked or given back (False): its outcome is still to be written.
    """
    if isinstance(error, LeaseLost) and error.run_id == run.run_id:
        # The run is held under a later token, which this program knows nothing of: there is nothing to be said against the run.
        run.again_in = 0.0
        yield GiveBack(run)
        return True
    decide = partial(_park, failures.describe(error))
    if isinstance(error, LeaseLost | RunOwned | StoreError):
        run.again_in = schedule.SOON_SECONDS
    elif run.is_worked and isinstance(error, Exception) and not isinstance(error, StepInDoubt | ReplayDivergence):
        decide = partial(_fail, error, failures.describe(error))
    answer = yield Commit(run, decide)
    if answer is False:
        return False
    if answer is not True:
        run.again_in = answer
    yield GiveBack(run)
    return True


def _park(described: dict[str, Any], run: LiveRun, moment: Moment) -> Plan:
    history, reason = run.history, failures.text(described)
    if run.is_busy:
        return Plan(answer=False)
    if history.state.is_terminal or history.state is RunState.QUARANTINE:
        return Plan(answer=True)
    if history.state is RunState.BLOCKED and history.cause_text == reason:
        return Plan(answer=True)  # it stands for this very reason already
    return _stands(run, described, {})


def _fail(error: Exception, described: dict[str, Any], run: LiveRun, moment: Moment) -> Plan:
    """One more failure of a program that workers drive: it is begun anew after so many seconds (the answer), or the run has failed."""
    history, retry = run.history, run.retry
    if run.is_busy:
        return Plan(answer=False)
    if history.state.is_terminal or history.state is RunState.QUARANTINE or run.is_cancelled:
        return Plan(answer=True)
    if retry is None or history.failures + 1 >= retry.max_attempts or issubclass(type(error), run.fatal):
        payload = canonical.encode({"reason": failures.text(described), "error": described})
        return Plan([Draft("aborted", Event.ABORT, {}, payload)], answer=True, synced=True)
    wait = backoff.delay(history.failures, retry, moment.draw())
    plan = _stands(run, described, {"retry_at": moment.now + wait})
    plan.answer = wait
    return plan


def _stands(run: LiveRun, described: dict[str, Any], fields: dict[str, Any]) -> Plan:
    history, reason = run.history, failures.text(described)
    if (spent := budget.entries_spent(run.most_steps, history.size - history.asides)) is not None:
        payload = canonical.encode({"reason": f"{spent}; last it was left by {reason}"})
        return Plan([Draft("exhausted", Event.BUDGET_EXHAUSTED, {}, payload)], answer=True, synced=True)
    payload = canonical.encode({"reason": reason, "error": described})
    return Plan([Draft("parked", Event.WAIT, fields, payload)], answer=True)


MOST_DEATHS = 4
"""So many owners of a run may die since its last entry: as often as a step is dispatched by default."""
MOST_DEATHS_WHILE_WAITING = 10
"""The same where a step waits for its next attempt, or for somebody: that takes its time, and nothing is written meanwhile."""


def give_up(run: LiveRun) -> Flow[None]:
    """End a run whose program is to begin, and has died outside of steps again and again, with the process that it was in."""
    if _is_given_up(run):
        yield Commit(run, _give_up)


def _is_given_up(run: LiveRun) -> bool:
    most = MOST_DEATHS_WHILE_WAITING if run.history.waiting else MOST_DEATHS
    return run.deaths >= most and not (run.history.state.is_terminal or run.is_cancelled)


def _give_up(run: LiveRun, moment: Moment) -> Plan:
    if not _is_given_up(run):  # somebody has asked for its end just now
        return Plan()
    reason = f"its program was begun {run.deaths} times and wrote nothing: each time its process died, or lost the run, outside of a step"
    payload = canonical.encode({"reason": reason})
    return Plan([Draft("exhausted", Event.BUDGET_EXHAUSTED, {}, payload)], synced=True)


def abortion(reason: str) -> bytes:
    """The payload of an end that its program chose."""
    return stored({"reason": reason}, "the reason")


def abort(run: LiveRun, payload: bytes) -> Flow[None]:
    """End the run as FAILED."""
    yield Commit(run, partial(_abort, Draft("aborted", Event.ABORT, {}, payload)))
    yield GiveBack(run)


def _abort(draft: Draft, run: LiveRun, moment: Moment) -> Plan:
    if run.is_busy:  # its outcome is written before anything ends the run
        return Plan(error=UnorderedStep(run.run_id, "abort_run", run.busy_with))
    return Plan([draft], synced=True)


def value(run: LiveRun, branch: Branch, position: str, name: str, fresh: Any) -> Flow[Any]:
    """A value that the program may not make twice: `fresh` the first time, what was recorded ever after."""
    try:
        return (yield Commit(run, partial(_value, branch, position, name, fresh)))
    except BaseException as error:
        branch.cursor -= 1  # it stands before this call again
        if isinstance(error, ReplayDivergence):
            run.divergence = error
        if isinstance(error, ReplayDivergence | StepInDoubt | RunClosed | BudgetExceededException) and not run.is_busy:
            yield GiveBack(run, str(error) if isinstance(error, ReplayDivergence) else None)
        raise


def _value(branch: Branch, position: str, name: str, fresh: Any, run: LiveRun, moment: Moment) -> Plan:
    if (refusal := admission.refusal(run, pipeline=False)) is not None:
        return Plan(error=refusal)
    history = run.history
    for recorded in (history.positions.get(position), history.missed.get(position)):
        if recorded is not None:
            return Plan(error=ReplayDivergence(run.run_id, position, repr(recorded.tool), f"run.{name}()"))
    if position in history.values:
        body, payload = history.values[position]
        if body["name"] != name:
            return Plan(error=ReplayDivergence(run.run_id, position, f"run.{body['name']}()", f"run.{name}()"))
        if payload is None:
            return Plan(error=PayloadErased(run.run_id, f"the value of run.{name}() at {position!r}"))
        return Plan(answer=canonical.decode(payload))
    if (ending := admission.ending(run)) is not None:
        return Plan(error=ending)
    drafts, doubt = admission.left_in_doubt(run, run.left_behind(branch))
    if doubt is not None:
        return Plan(drafts, error=doubt)
    reason = budget.entries_spent(run.most_steps, history.size - history.asides)
    if reason is not None and not run.has_under_way:
        fields = {"rule": "budget"} | admission.follows(run, branch)
        refused = Draft("refused", Event.BUDGET_EXHAUSTED, fields, canonical.encode({"reason": reason}), position)
        return Plan([*drafts, refused], error=BudgetExceededException(run.run_id, reason), synced=True)
    fields = {"name": name} | admission.follows(run, branch)
    drafts.append(Draft("value", None, fields, canonical.encode(fresh), position))
    return Plan(drafts, answer=fresh)
