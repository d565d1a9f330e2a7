"""The commands that say why a run stands where it stands, and what comes next: plan, trace, dead-letters, approvals."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from agent_run_ledger.cli.shell import OK, PROBLEM, command_for, data_of, opened_to_look, run_data
from agent_run_ledger.cli.terminal import as_json, cut, escaped, labelled, plain, since, table, took, when

if TYPE_CHECKING:
    from agent_run_ledger import RunRecord
    from agent_run_ledger.model import ApprovalRequest, PlannedAction, TraceLine

WILL = {
    "dispatch": "be dispatched, with its stored arguments and key",
    "dispatch_undeclared": "be dispatched, though its tool declares no effect: it may happen twice",
    "ask": "be asked for by its receipt",
    "wait": "wait",
    "park": "stay in doubt, until `resolve` says what became of it",
    "dead_letter": "end the run as DEAD_LETTER",
}
"""What `plan_recovery` does about a step, for people."""

_HALTS = frozenset({"park", "dead_letter"})
"""Actions behind which the run does not go on by itself."""


# --- plan -------------------------------------------------------------------------------------------------------------


def plan(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        record, planned = ledger.get_run(given.run_id), ledger.plan(given.run_id)
    status = PROBLEM if any(each.action in _HALTS for each in planned) else OK
    if given.json:
        data = {"run_id": record.run_id, "status": record.status, "plan": [data_of(each) for each in planned]}
        print(as_json(data))
        return status
    print(f"run {record.run_id!r} is {record.status}" + (f": {plain(record.cause)}" if record.cause else ""))
    print()
    print(next_start(record, planned))
    return status


def next_start(record: RunRecord, planned: Sequence[PlannedAction]) -> str:
    """What the next start does, as text for people."""
    from agent_run_ledger import RunState

    if RunState(record.status).is_terminal:
        return "The run has ended: nothing starts it again."
    if not planned:
        return "The next start hands out what is recorded and goes on behind it; no step is unsettled."
    rows = ((each.step_number, each.tool_name, WILL.get(each.action, each.action), _why(each)) for each in planned)
    return "At the next start\n" + table(("STEP", "TOOL", "WILL", "BECAUSE"), rows, stretch=3, is_wrapped=True)


def _why(action: PlannedAction) -> str:
    if action.not_before is None:
        return action.reason
    limit = "until" if action.action == "wait" else "not before"
    return f"{action.reason}; {limit} {when(action.not_before)}"


# --- trace ------------------------------------------------------------------------------------------------------------


def trace(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        record, lines = ledger.get_run(given.run_id), ledger.trace(given.run_id)
    status = PROBLEM if any(line.event == "unreadable" for line in lines) else OK
    if given.json:
        print(as_json({"run": run_data(record), "trace": [data_of(line) for line in lines]}))
        return status
    print(f"run {record.run_id!r} is {record.status}" + (f": {plain(record.cause)}" if record.cause else ""))
    print()
    print(traced(lines))
    return status


def traced(lines: Sequence[TraceLine]) -> str:
    """A trace as a table: each line's entry, its time, how long after the first line that was, and what happened, whole."""
    begun = next((line.at for line in lines if line.at), 0.0)
    rows = (_trace_row(line, begun) for line in lines)
    heads = ("ENTRY", "AT", "AFTER", "STEP", "TOOL", "ATTEMPT", "EVENT", "WHAT")
    return table(heads, rows, stretch=7, is_wrapped=True)


def _trace_row(line: TraceLine, begun: float) -> tuple[object, ...]:
    times = (when(line.at), f"+{took(max(0.0, line.at - begun))}") if line.at else ("", "")
    return (line.seq, *times, line.step_number, line.tool_name, line.attempt, line.event, line.text)


# --- dead letters -----------------------------------------------------------------------------------------------------


def dead_letters(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        found = [(record, ledger.trace(record.run_id)) for record in ledger.dead_letters()]
    if given.json:
        print(as_json({"dead_letters": [_letter(record, lines, given.trace) for record, lines in found]}))
        return OK
    if not found:
        print("no dead letters")
        return OK
    rows = (
        (record.run_id, when(record.updated_at), record.total_steps, cut(record.cause, 60), _last(lines))
        for record, lines in found
    )
    print(table(("RUN", "ENDED", "STEPS", "CAUSE", "LAST"), rows, stretch=4))
    if given.trace:
        for record, lines in found:
            print(f"\nrun {record.run_id!r}: {plain(record.cause or '')}\n\n{traced(lines)}")
    else:
        print()
        print(f"What led there: {command_for(given, 'trace', found[-1][0].run_id)}")
        print(f"A new run that goes on: {command_for(given, 'redrive', found[-1][0].run_id)}")
    return OK


def _last(lines: Sequence[TraceLine]) -> str:
    return f"{lines[-1].event}: {lines[-1].text}" if lines else ""


def _letter(record: RunRecord, lines: Sequence[TraceLine], is_whole: bool) -> dict[str, Any]:
    data = run_data(record) | {"last": data_of(lines[-1]) if lines else None}
    return data | {"trace": [data_of(line) for line in lines]} if is_whole else data


# --- approvals --------------------------------------------------------------------------------------------------------


def approvals(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        found = ledger.approvals(given.run_id)
    if given.json:
        print(as_json({"approvals": [data_of(each) for each in found]}))
        return OK
    if not found:
        print("nothing waits for approval")
    for number, request in enumerate(found):
        if number:
            print()
        print(labelled(facts_of(request)))
        for warning in warnings_about(request):
            print(warning)
        print(command_for(given, "approve", request.run_id, request.name, digest=request.digest))
    return OK


def facts_of(request: ApprovalRequest) -> Iterator[tuple[str, object]]:
    """What a person has to see of a request before deciding. The arguments are whole, and what a terminal would obey is spelt out."""
    yield "run", request.run_id
    yield "name", request.name
    yield "arguments", request.arguments_json
    yield "digest", request.digest
    yield "asked", f"{when(request.asked_at)} ({since(request.asked_at)})"
    if request.expires_at is not None:
        yield "expires", f"{when(request.expires_at)} ({since(request.expires_at)})"


def warnings_about(request: ApprovalRequest) -> Iterable[str]:
    """What about these arguments might deceive whoever reads them."""
    if request.arguments_json is None:
        yield "! These arguments were erased: nobody can see what this is about."
        return
    if plain(request.arguments_json) != escaped(request.arguments_json):
        yield (
            "! These arguments hold secrets, which are hidden above; --reveal shows them. The digest is over the arguments as they are."
        )
    if escaped(request.arguments_json) != request.arguments_json:
        yield (
            "! These arguments hold characters that a terminal obeys or hides (control, direction of text, invisible). They are spelt "
            "out above, like \\u202e; the digest is over the arguments as they are."
        )
