"""Durable waits: a time, a signal, somebody's approval. A wait is a step that calls nobody, and needs no owner while it lasts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from agent_run_ledger.engine import admission
from agent_run_ledger.engine.call import Call, DurableWait
from agent_run_ledger.engine.deciding import commit, leave
from agent_run_ledger.engine.effects import Fetch, Flow, Moment, Plan, Rest, Wait
from agent_run_ledger.engine.history import History, Signal, StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import child_ended, waited
from agent_run_ledger.errors import RunOwned
from agent_run_ledger.rules import canonical
from agent_run_ledger.words import Event, RunState, StepState

_A_GLANCE_SECONDS = 0.2
"""How long whoever waits leaves the run to somebody else before he looks again."""


def waiting(wait: DurableWait, intent: Draft, moment: Moment) -> Draft:
    """The entry that says that a run waits. What it waits for, and until when, stands in the intent, from the first time on."""
    intent.fields["waits"] = wait.sort
    if wait.seconds is not None:
        intent.fields["until"] = moment.now + wait.seconds
    fields = {"step": intent.fields["step"], "step_state": StepState.BLOCKED}
    return Draft("waiting", Event.WAIT, fields, None, intent.position, intent.attempt)


def begun(call: Call, step: StepHistory, child: str, run: LiveRun, moment: Moment) -> Plan:
    """The call has begun another run. That one is there for sure, so from now on there is nothing to do but wait for its end."""
    if step.outcome is not None or run.made.get(call.position) is not call:
        return Plan()
    fields = {"step": step.number, "step_state": StepState.BLOCKED, "child": child}
    return Plan([Draft("waiting", Event.WAIT, fields, None, step.position, step.attempts)])


WATCH = "@tell-me-the-end"
"""The signal by which a run that was made from a child's parent asks to be told, too: its value is that run's id."""


def watchers(run: LiveRun) -> list[str]:
    """The runs that wait for the end of this one: its parent, and those that were made from it."""
    asked = [signal.payload for signal in run.history.signals.get(WATCH, ())]
    asked += [request.payload for request in run.requests if request.kind == "signal"]
    told = [canonical.decode(payload) for payload in asked if payload is not None]
    found = [said["value"] for said in told if said.get("name", WATCH) == WATCH]
    return list(dict.fromkeys([*([run.history.parent] if run.history.parent else []), *found]))


def ended(run: LiveRun) -> dict[str, object]:
    """What the parent of a run that has ended is told: `value` as a signal under the child's id."""
    history = run.history
    if history.state is RunState.COMPLETED:
        result = canonical.decode(history.result) if history.result is not None else None
        return {"ok": True, "result": result}
    why = canonical.decode(history.cause) if history.cause is not None else {"reason": ""}
    described = why.get("error") or {
        "type": "RunClosed",
        "module": "agent_run_ledger.errors",
        "message": f"run {run.run_id!r} is {history.state}: {why['reason']}",
        "bases": [],
    }
    return {"ok": False, "error": described}


def rest(run: LiveRun, call: Call, child: str | None) -> Flow[None]:
    """Wait until what the call waits for has come, or its time has. `child` is the run that it has begun, if that is what it waits for."""
    is_over = False
    if child is not None:
        call.wait = DurableWait("child", child, None)
    while True:
        try:
            yield from commit(run, call, partial(_come, call, is_over))
        except (
            RunOwned
        ):  # somebody looks at it, or goes on with it: in the end he lets go of it, and the log says what came
            if run.is_draining:
                yield from leave(run, call)
            yield Wait(run, math.inf, _A_GLANCE_SECONDS)
            continue
        this = run.history.positions.get(call.position)
        if this is None or this.outcome is not None or run.made.get(call.position) is not call:
            return
        if call.wait is not None and has_come(run.history, this, call.wait) is not None:
            continue  # it has become an entry this very moment
        is_over = yield Rest(run, call, this.until, call.wait.seconds if call.wait is not None else None)


def _come(call: Call, is_over: bool, run: LiveRun, moment: Moment) -> Plan:
    step, wait, call.heard = run.history.positions.get(call.position), call.wait, run.inbox
    if wait is None or (step is not None and step.outcome is not None) or run.made.get(call.position) is not call:
        return Plan()
    if (ending := admission.ending(run)) is not None:  # of a run that ended here nothing else may be in memory any more
        return Plan(error=ending)
    if step is None:
        return Plan()
    if (signal := has_come(run.history, step, wait)) is not None:
        if signal.payload is None and signal.seq not in call.fetched:
            return Plan(answer=Fetch(run, signal.seq))
        sent = signal.payload or call.fetched.get(signal.seq)
        told = canonical.decode(sent) if sent is not None else {"by": "", "value": None}
        return Plan([_taken(run, step, wait, signal, told)])
    if step.until is None or not (is_over or moment.now >= step.until):
        return Plan()
    if any(request.at <= step.until for request in run.sent):
        return Plan()  # sent in time: what it is shows once it is an entry, in this very append
    if wait.sort == "sleep":
        return Plan([waited(step, "completed", canonical.encode(None))])
    said = {"type": "WaitTimeout", "message": f"{wait.name!r} did not come in time", "name": wait.name}
    return Plan([waited(step, "expired", canonical.encode(said))])


def has_come(history: History, step: StepHistory, wait: DurableWait) -> Signal | None:
    """The first that was sent in time, whenever it is read.

    An answer to a request for approval is one to this very request: somebody's word on a payment says nothing about the next one.
    """
    if wait.sort == "sleep":
        return None
    of, at = (step.input, step.position) if wait.sort == "approval" else (None, None)
    for signal in history.signals.get(wait.name, ()):
        if (signal.digest, signal.position) == (of, at) and (step.until is None or signal.sent <= step.until):
            return signal
    return None


def _taken(run: LiveRun, step: StepHistory, wait: DurableWait, signal: Signal, told: dict[str, Any]) -> Draft:
    if wait.sort == "signal":
        draft = waited(step, "completed", canonical.encode(told["value"]))
    elif wait.sort == "child":
        draft = child_ended(run, step, told["value"])
    else:
        said = {"by": told["by"], "reason": told["value"], "at": signal.sent}
        if signal.has_approved:
            draft = waited(step, "completed", canonical.encode(said))
        else:
            message = f"{told['by']!r} denied {wait.name!r}"
            error = {"type": "ApprovalDenied", "message": message, "name": wait.name, **said}
            draft = waited(step, "denied", canonical.encode(error))
    draft.fields["signal"] = signal.seq
    return draft
