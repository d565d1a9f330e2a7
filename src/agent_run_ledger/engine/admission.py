"""Whether a run takes a call now: what is asked of every call before anything else."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import Branch, LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import cancelled, in_doubt, missed, must_not_repeat, park
from agent_run_ledger.errors import LedgerError, PayloadErased, RunClosed, RunInputMismatch, StepInDoubt
from agent_run_ledger.words import RunState


def refusal(run: LiveRun, *, pipeline: bool | None = None) -> LedgerError | None:
    """Why the run answers no call at all, not even with what it recorded: it ended badly.

    `pipeline` says what kind of program asks, where that matters: a pipeline's run takes no steps of another program.
    """
    state = run.history.state
    if pipeline is not None and run.history.pipeline != pipeline:
        return RunInputMismatch(run.run_id, "kind of program")
    if state is RunState.COMPLETED and run.history.size and not run.history.secret:
        return PayloadErased(run.run_id, "the secret, without which no call can be told from another,")
    if state is RunState.QUARANTINE or (state.is_terminal and state is not RunState.COMPLETED):
        return closed(run)
    return None


def ending(run: LiveRun) -> LedgerError | None:
    """Why nothing new may begin: the run has ended, its end was asked for, or its program is not the one that is recorded."""
    if run.history.state.is_terminal:
        return closed(run)
    if run.is_cancelled:
        return RunClosed(run.run_id, RunState.CANCELLED)
    return run.divergence


def follows(run: LiveRun, branch: Branch) -> dict[str, Any]:
    """The field that names the failures which the program of this branch was told of: whatever it does next acts upon them."""
    named = [position for position in run.history.trailing if position in branch.hears]
    return {"follows": named} if named else {}


def closed(run: LiveRun) -> RunClosed:
    """The refusal of a run that has ended or is quarantined, with the cause."""
    return RunClosed(run.run_id, run.history.state, run.history.cause_text)


def seen(run: LiveRun, call: Call) -> dict[str, int]:
    """The field that says when a call was made or interrupted, where outcomes are recorded by now that its program did not know of."""
    if call.seen is None or not (run.is_settling or call.seen < run.history.last_outcome):
        return {}
    return {"seen": call.seen}


def when(call: Call) -> dict[str, int]:
    """The field that says when a call was interrupted: what it is written in stands later in the log than that."""
    return {"seen": call.seen} if call.seen is not None else {}


def left_in_doubt(
    run: LiveRun, behind: frozenset[str] | None, continued: StepHistory | None = None
) -> tuple[list[Draft], StepInDoubt | None]:
    """What comes first when a program goes on although a call gave it no outcome: that it was interrupted is recorded.

    Where a second dispatch could do harm nothing is recorded of it: the run parks, and the program is told that the step is in doubt.
    `behind` are the positions of the calls behind which it goes on. None: it wants to end, and every step is looked at. What is going to
    be found out about a step that is `continued` concerns the step that continues it.
    """
    if behind is not None and not behind:
        return [], None
    drafts: list[Draft] = []
    steps = run.history.positions
    for position, (_, call) in list(run.interrupted.items()):
        if behind is not None and position not in behind:
            continue
        step = steps.get(position)
        if step is not None and step.outcome is None:
            is_dispatched = not is_undispatched(run, call, step)
            if step is not continued and must_not_repeat(run, None, step) and is_dispatched:
                return _doubt(run, step)
            drafts.append(cancelled(run, step, when(call), is_dispatched=is_dispatched))
        elif position not in run.history.missed and not (step is not None and step.is_missed):
            drafts.append(missed(call, step, when(call)))
    for step in steps.values() if behind is None else ():
        if step.outcome is None and step.position not in run.interrupted:
            if must_not_repeat(run, None, step):
                return _doubt(run, step)
            drafts.append(cancelled(run, step, {}))
    return drafts, None


def is_undispatched(run: LiveRun, call: Call, step: StepHistory) -> bool:
    """Whether the intent is this very call's, which was interrupted before it was dispatched. A former process may have done so.

    One that continues another may have taken effect when that was dispatched.
    """
    is_its_own = step.seq > call.since and step.token == run.token and step.continues is None
    return is_its_own and not call.was_dispatched


def _doubt(run: LiveRun, step: StepHistory) -> tuple[list[Draft], StepInDoubt]:
    why = "it was interrupted or never settled, and the program goes on"
    return park(run, step, why), in_doubt(run, step, why)
