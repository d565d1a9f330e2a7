"""Whether a run takes a call now: what is asked of every call before anything else."""

from __future__ import annotations

from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.outcomes import cancelled, in_doubt, parked_in_doubt
from agent_run_ledger.errors import LedgerError, RunClosed, RunInputMismatch, StepInDoubt, UnorderedStep
from agent_run_ledger.model import Effect, RunState, StepState


def refusal(run: LiveRun, asked: str, *, pipeline: bool | None = None) -> LedgerError | None:
    """Why the run answers no call at all, not even with what it recorded: it ended badly, or another call is in flight.

    `pipeline` says what kind of program asks, where that matters: a pipeline's run takes no steps of another program.
    """
    state = run.history.state
    if pipeline is not None and run.history.pipeline != pipeline:
        return RunInputMismatch(run.run_id, "kind of program")
    if state is RunState.QUARANTINE or (state.is_terminal and state is not RunState.COMPLETED):
        return closed(run)
    if run.in_flight is not None:
        return UnorderedStep(run.run_id, asked, run.in_flight.tool)
    return None


def ending(run: LiveRun) -> RunClosed | None:
    """Why nothing new may begin: the run has ended, or its end was asked for and is recorded with the next append."""
    if run.history.state.is_terminal:
        return closed(run)
    if run.is_cancelled:
        return RunClosed(run.run_id, RunState.CANCELLED)
    return None


def closed(run: LiveRun) -> RunClosed:
    """The refusal of a run that has ended or is quarantined, with the cause."""
    return RunClosed(run.run_id, run.history.state, run.history.cause_text)


def must_not_repeat(run: LiveRun, effect: Effect | None) -> bool:
    """Whether a second dispatch could do harm, as far as is declared."""
    return effect is Effect.MUTATE or (effect is None and run.undeclared == "block")


def left_in_doubt(run: LiveRun, *, whole: bool = False) -> tuple[list[Draft], StepInDoubt | None]:
    """What comes first when a program goes on although a step has no outcome: the step is recorded as cancelled.

    Where a second dispatch could do harm nothing is recorded of it: the run parks, and the program is told that the step is in doubt.
    `whole` looks at every step, for a program that wants to end; else only at the one that was interrupted.
    """
    drafts: list[Draft] = []
    for step in run.history.positions.values() if whole else _interrupted(run):
        if step.outcome is not None:
            continue
        if must_not_repeat(run, step.declared):
            why = "it was interrupted or never settled, and the program goes on"
            park = [] if step.state == StepState.BLOCKED else [parked_in_doubt(step, why)]
            return park, in_doubt(run, step, why)
        drafts.append(cancelled(step))
    return drafts, None


def _interrupted(run: LiveRun) -> list[StepHistory]:
    return [] if run.interrupted is None else [run.history.positions[run.interrupted]]
