"""What somebody who is not a run's program asks of it: each becomes an entry, with who asked and why."""

from __future__ import annotations

from functools import partial
from typing import Any

from agent_run_ledger.contract import Request
from agent_run_ledger.engine.effects import Commit, Flow, GiveBack, Moment, Plan
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import resolved_with
from agent_run_ledger.errors import IllegalTransition, InvalidArguments
from agent_run_ledger.rules import canonical
from agent_run_ledger.words import Event, RunState, StepState


def honour(run: LiveRun, request: Request, before: list[Draft]) -> list[Draft]:
    """The entries that answer a request of somebody else, behind those that go `before` them into the same append.

    There are none where what it is about is just being written down: it is answered next time.
    """
    try:
        if request.kind not in _DO:  # a newer version may have posted it: whoever asked reads that it was not done
            raise InvalidArguments(f"this version does not know what {request.kind!r} asks for")
        drafts = _DO[request.kind](run, canonical.decode(request.payload), request.who, request.at)
        if request.kind == "resolve" and any(draft.position == drafts[0].position for draft in before):
            return []
    except (IllegalTransition, InvalidArguments) as refusal:
        payload = canonical.encode({"reason": str(refusal), "by": request.who})
        drafts = [Draft("declined", None, {"asked": request.kind}, payload)]
    drafts[0].fields["request"] = request.id
    return drafts


def act(run: LiveRun, kind: str, said: dict[str, Any], who: str, *, keeps: bool) -> Flow[bool]:
    """Do what is asked, by the run's own owner. False while a step is in flight: its outcome is written first.

    Its program `keeps` the run where it is at work in this very ledger. Raises `IllegalTransition` where the run, or the step, is not in a
    state for it.
    """
    try:
        done = yield Commit(run, partial(_act, kind, said, who))
    except (IllegalTransition, InvalidArguments):
        if not keeps:
            yield GiveBack(run, is_visit=True)
        raise
    if done and not keeps:
        yield GiveBack(run, is_visit=True)
    return bool(done)


def answer(run: LiveRun, *, keeps: bool) -> Flow[None]:
    """Answer what others have asked, if that can be done now, and let go of the run unless its program `keeps` it."""
    yield Commit(run, _nothing)
    if not keeps:
        yield GiveBack(run, is_visit=True)


def _nothing(run: LiveRun, moment: Moment) -> Plan:
    return Plan()


def _act(kind: str, said: dict[str, Any], who: str, run: LiveRun, moment: Moment) -> Plan:
    if run.made.keys() - run.resting:
        return Plan(answer=False)
    return Plan(_DO[kind](run, said, who, moment.now), answer=True, synced=True)


def _cancel(run: LiveRun, said: dict[str, Any], who: str, at: float) -> list[Draft]:
    fields = {"children": True} if said.get("children") else {}
    return [Draft("cancelled", Event.CANCEL, fields, canonical.encode(said))]


def _release(run: LiveRun, said: dict[str, Any], who: str, at: float) -> list[Draft]:
    if run.history.state is not RunState.QUARANTINE:
        raise IllegalTransition(run.history.state, Event.RELEASE, run.run_id)
    return [Draft("released", Event.RELEASE, {}, canonical.encode(said))]


def _resolve(run: LiveRun, said: dict[str, Any], who: str, at: float) -> list[Draft]:
    """A step in doubt, or one that failed and that nobody has acted upon: it took effect, with this output, or it did not."""
    state = run.history.state
    if state.is_terminal:
        raise IllegalTransition(state, "RESOLVE", run.run_id)
    step = next((step for step in run.history.positions.values() if step.number == said["step"]), None)
    if step is None:
        raise InvalidArguments(f"run {run.run_id!r} has no step {said['step']}; nothing was written")
    if state is RunState.QUARANTINE or step.waits is not None or step.stands:
        raise IllegalTransition(state, f"RESOLVE of step {step.number}, which {_stands_as(step)}", run.run_id)
    fields = {"step": step.number, "step_state": StepState.BLOCKED, "executed": said["executed"]}
    told = canonical.encode({"reason": said["reason"], "by": said["by"]})
    drafts = [Draft("resolved", Event.WAIT, fields, told, step.position, step.attempts)]
    if said["executed"]:
        drafts.append(resolved_with(run, step, canonical.encode(said["output"])))
    return drafts


def _stands_as(step: StepHistory) -> str:
    if step.waits is not None:
        return "waits and calls nobody: send what it waits for"
    return f"is {step.state} already" if step.outcome is None or step.outcome.is_final else "failed, and was acted upon"


def _signal(run: LiveRun, said: dict[str, Any], who: str, at: float) -> list[Draft]:
    payload = canonical.encode({"by": said["by"], "value": said["value"]})
    return [Draft("signal", None, {"name": said["name"], "sent": at}, payload)]


def _approval(run: LiveRun, said: dict[str, Any], who: str, at: float) -> list[Draft]:
    """Somebody's word on the exact arguments that he was shown, to the first who asks and has no answer: to others it says nothing."""
    answered = {signal.position for signal in run.history.signals.get(said["name"], ())}
    meant = said.get("position")
    asking = [
        step for step in run.history.positions.values() if step.outcome is None and meant in (None, step.position)
    ]
    for step in sorted(asking, key=lambda step: step.position in answered):
        if step.waits == "approval" and step.digest is not None and step.digest.hex() == said["digest"]:
            fields = {"name": said["name"], "sent": at, "of": step.input, "approved": said["approved"]}
            payload = canonical.encode({"by": said["by"], "value": said["reason"]})
            return [Draft("signal", None, fields, payload, step.position)]
    raise InvalidArguments(f"run {run.run_id!r} asks nobody to approve these arguments")


_DO = {"cancel": _cancel, "release": _release, "resolve": _resolve, "signal": _signal, "approval": _approval}
