"""What a run that stands still waits for, and which command helps it on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from agent_run_ledger import RunState, StoreCorrupt
from agent_run_ledger.cli.terminal import took, when

if TYPE_CHECKING:
    from agent_run_ledger import AgentRunLedger, RunRecord, StepRecord
    from agent_run_ledger.model import PlannedAction

Kind = Literal["time", "signal", "approval", "receipt", "resolve", "release", "program", "worker"]


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a run waits for."""

    kind: Kind
    what: str
    """For people, to be read behind `waits for`."""
    step_number: int | None = None
    until: float | None = None
    """Unix seconds at which it is over, or may be tried again."""
    words: tuple[str, ...] = ()
    """The command that helps, with what it is about; nothing where time or the program does."""

    @property
    def needs_somebody(self) -> bool:
        """Whether the run stands until a person decides, without having asked for that itself."""
        return self.kind in ("resolve", "release", "program")


def waits_of(ledger: AgentRunLedger, record: RunRecord, steps: Sequence[StepRecord] | None = None) -> list[Wait]:
    """What the run waits for; nothing where it has ended or moved, where somebody works on it, and where its log cannot be read."""
    if record.is_damaged or record.moved_to is not None or RunState(record.status).is_terminal:
        return []
    if record.status == RunState.QUARANTINE:
        what = f"somebody who lets it out of quarantine: {record.cause or 'it was halted on suspicion'}"
        return [Wait("release", what, words=("release", record.run_id))]
    if not ledger.is_waiting(record):
        return []
    try:
        planned = ledger.plan(record.run_id)
        if steps is None:  # which are read for the names of waits only
            steps = ledger.steps(record.run_id) if any(each.action == "wait" for each in planned) else []
    except StoreCorrupt:
        return []
    known = {step.step_number: step for step in steps}
    waits = [_wait(record, action, known.get(action.step_number)) for action in planned]
    because = f", which was left by {record.cause}" if record.cause else ""
    waits = waits or [Wait("program", f"its program{because}")]
    return waits if record.queue is None else [_by_worker(record, wait) for wait in waits]


def _by_worker(record: RunRecord, wait: Wait) -> Wait:
    """What a run of a queue waits for: nobody has to start its program, but somebody may have to say that it may be begun."""
    if wait.kind not in ("program", "receipt"):
        return wait
    if record.due_in_seconds is None:
        return replace(wait, kind="program", words=("wake", record.run_id)) if wait.kind == "program" else wait
    worker = f"a worker of queue {record.queue!r}{queued(record)}"
    return replace(wait, kind="worker", what=worker + wait.what.removeprefix("its program"))


def queued(record: RunRecord) -> str:
    """When a run of a queue is due, to be read behind the queue's name; nothing where somebody works on it."""
    due_in = record.due_in_seconds
    if record.owner is not None:
        return ""
    if due_in is None:
        return " (not due)"
    return f" (due in {took(due_in)})" if due_in > 0 else f" (due for {took(-due_in)})"


def _wait(record: RunRecord, action: PlannedAction, step: StepRecord | None) -> Wait:
    number, until, named = action.step_number, action.not_before, f"step {action.step_number} ({action.tool_name!r})"
    at_latest = f", until {when(until)} at the latest" if until is not None else ""
    match action.action, action.tool_name:
        case "wait", "run.sleep":
            return Wait("time", f"its time, {when(until or 0.0)}", number, until)
        case "wait", "run.wait_for":
            name = _name(step)
            return Wait("signal", f"the signal {name!r}{at_latest}", number, until, ("signal", record.run_id, name))
        case "wait", "run.approve":
            what = f"somebody to approve {_name(step)!r}{at_latest}"
            return Wait("approval", what, number, until, ("approvals", record.run_id))
        case (("ask" | "wait"), _):
            return Wait("receipt", f"its program, to ask for the receipt of {named}", number, until)
        case "park", _:
            what = f"somebody who says whether {named} took effect: {action.reason}"
            return Wait("resolve", what, number, until, ("resolve", record.run_id, str(number)))
        case "dead_letter", _:
            return Wait("program", f"its program, and ends then as DEAD_LETTER: {named}: {action.reason}", number)
        case _:
            at = f", not before {when(until)}" if until is not None else ""
            return Wait("program", f"its program, to dispatch {named} again{at}", number, until)


def _name(step: StepRecord | None) -> str:
    """The name that a wait was given in the program."""
    try:
        given: Any = json.loads(step.arguments_json or "") if step is not None else {}
        return str(given["name"])
    except (ValueError, KeyError, TypeError):
        return "?"


def told(waits: Sequence[Wait]) -> str | None:
    """All that a run waits for, in one line; None where it is nothing."""
    return "waits for " + "; for ".join(wait.what for wait in waits) if waits else None


def data_of_waits(waits: Sequence[Wait]) -> Iterator[dict[str, Any]]:
    """For `--json`."""
    for wait in waits:
        yield {"kind": wait.kind, "what": wait.what, "step_number": wait.step_number, "until": wait.until}
