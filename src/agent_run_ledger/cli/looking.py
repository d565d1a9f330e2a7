"""The commands that look: runs, show, verify, doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import agent_run_ledger
from agent_run_ledger.cli.bundles import is_bundle
from agent_run_ledger.cli.fleet import stuck
from agent_run_ledger.cli.proving import heads_given, key_given, signing
from agent_run_ledger.cli.shell import (
    OK,
    PROBLEM,
    UsageError,
    command_for,
    data_of,
    encryption_of,
    opened_to_look,
    path_of,
    run_data,
)
from agent_run_ledger.cli.terminal import (
    Progress,
    as_json,
    as_json_line,
    counted,
    cut,
    labelled,
    plain,
    table,
    took,
    when,
    width,
)
from agent_run_ledger.cli.waiting import Wait, data_of_waits, queued, told, waits_of

if TYPE_CHECKING:
    from agent_run_ledger.model import Inspection

_PROVED = """\
This proves that the database agrees with itself: damage and careless changes are found. Who can write the file can
rebuild it whole, or put an older copy in its place; only a tree head kept elsewhere finds that: --against."""
_FILE_PROVED = """\
This proves that the file agrees with itself: damage and careless changes are found. Who can write it can write all of it
anew; only a head that you have from elsewhere (--against), or a signed one in it and the key that you know (--key), finds that."""
_PROVED_AGAINST = """\
This proves that the ledger agrees with itself, and that what the heads cover is what it was when they were signed.
Entries behind the last head of a run, and runs without one, are proved by the ledger alone."""
_PROVED_UNSIGNED = """\
This proves that the ledger agrees with itself and with these heads. Who signed them was not looked at (--key does that):
they prove as much as the place where they were kept. Entries behind the last head of a run are proved by the ledger alone."""
_WITHHELD = "they, or the run's secret, were left out of this file when it was exported."
_ENCRYPTED = "they are encrypted under keys that are not here (--keys)."

_WIDE = 130
"""From this many columns on a step's arguments are shown, too."""


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(given: argparse.Namespace) -> int:
    states = list(agent_run_ledger.RunState)
    if given.status is not None and given.status not in states:
        raise UsageError(f"there is no run state {given.status!r}; the states are {', '.join(states)}")
    if given.after is not None and not given.stuck:
        raise UsageError("--after says how long a run is stuck: give --stuck with it")
    with opened_to_look(given) as ledger:
        if given.stuck:
            return stuck(given, ledger)
        records = ledger.runs(given.status)
        limit = given.limit if given.limit is not None else 0 if given.json else 50
        shown = records[-limit:] if limit else records
        status = PROBLEM if any(record.is_damaged for record in records) else OK
        if given.json:
            print(as_json({"runs": [run_data(record) for record in shown]}))
            return status
        if not records:
            print("no runs" if given.status is None else f"no run is {given.status}")
            return OK
        if len(shown) < len(records):
            print(f"the newest {len(shown)} of {len(records)} runs (--limit 0 shows all):")
        heads = ("RUN", "STATUS", "STEPS", "UPDATED", "GOAL", "CAUSE")
        print(table(heads, (_run_row(ledger, record) for record in shown), stretch=5))
    return status


def _run_row(ledger: agent_run_ledger.AgentRunLedger, record: agent_run_ledger.RunRecord) -> tuple[str | None, ...]:
    cause = f"moved to {record.moved_to}" if record.moved_to else record.cause or told(waits_of(ledger, record))
    updated = when(record.updated_at) if record.updated_at else ""
    return (record.run_id, record.status, str(record.total_steps), updated, cut(record.goal, 40), cause)


# --- show -------------------------------------------------------------------------------------------------------------


def show(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        seen = ledger.inspect(given.run_id)
        waits = waits_of(ledger, seen.run, seen.steps)
    record, is_seen = seen.run, seen.is_owner_seen
    limit = given.steps if given.steps is not None else 0 if given.json else 50
    shown = seen.steps[-limit:] if limit else seen.steps
    status = PROBLEM if seen.trouble or record.is_damaged else OK
    if given.json:
        steps = [
            data_of(step) | {"environment": environment}
            for step, environment in zip(seen.steps, seen.environments, strict=True)
        ]
        data = {
            "run": run_data(record),
            "steps": steps[-limit:] if limit else steps,
            "is_waiting_for_its_program": seen.is_waiting,
            "waits_for": list(data_of_waits(waits)),
            "steps_in_doubt": [] if is_seen else seen.in_doubt,
            "redispatched_undeclared": seen.redispatched,
            "trouble": seen.trouble,
        }
        print(as_json(data))
        return status
    print(_described(record, is_seen))
    if shown:
        print()
    if len(shown) < len(seen.steps):
        print(f"the last {len(shown)} of {len(seen.steps)} steps (--steps 0 shows all):")
    if shown:
        heads = ["STEP", "TOOL", "STATE", "ATTEMPTS", "EFFECT", "TOOK", "OUTPUT OR ERROR"]
        rows = [_step_row(step, [] if is_seen else seen.in_doubt, seen.redispatched) for step in shown]
        if width() >= _WIDE:
            heads.insert(6, "ARGUMENTS")
            for row, step in zip(rows, shown, strict=True):
                row.insert(6, cut(step.arguments_json, 40))
        print(table(heads, rows, stretch=len(heads) - 1))
    notes = list(_notes(given, seen, shown, waits))
    if notes:
        print()
    for note in notes:
        print(note)
    return status


def _described(record: agent_run_ledger.RunRecord, is_seen: bool) -> str:
    owner = record.owner and f"{record.owner} ({'alive' if is_seen else 'not seen alive'})"
    facts: list[tuple[str, Any]] = [
        ("run", record.run_id),
        ("goal", record.goal),
        ("status", record.status),
        ("cause", record.cause),
        ("steps", record.total_steps),
        ("created", when(record.created_at) if record.created_at else None),
        ("updated", when(record.updated_at) if record.updated_at else None),
        ("queue", record.queue and record.queue + queued(record)),
        ("owner", owner),
        ("moved to", record.moved_to),
        ("fencing token", record.fencing_token),
        ("result", None if record.result is None else repr(record.result)),
    ]
    return labelled(facts, columns=400)


def _step_row(
    step: agent_run_ledger.StepRecord, in_doubt: Sequence[int], redispatched: Sequence[int]
) -> list[str | None]:
    state = f"{step.state}{' (in doubt)' if step.step_number in in_doubt else ''}"
    attempts = str(step.attempts) + (" !" if step.step_number in redispatched else "")
    duration = took(step.completed_at - step.created_at) if step.completed_at is not None else ""
    said = step.error_message if step.error_message is not None else step.output_json
    effect = step.effect or "undeclared"
    return [str(step.step_number), step.tool_name, state, attempts, effect, duration, said]


def _notes(
    given: argparse.Namespace, seen: Inspection, shown: Sequence[agent_run_ledger.StepRecord], waits: Sequence[Wait]
) -> Iterator[str]:
    """What a person has to know of the run, and the commands that help."""
    run_id = seen.run.run_id
    if any(step.step_number in seen.redispatched for step in shown):
        yield (
            "! dispatched again after a crash although its tool declares no effect: it may have happened twice. Declare effect= "
            "for the tool."
        )
    for wait in waits:
        yield f"This run waits for {plain(wait.what).rstrip('.')}."
        if wait.kind == "program" and wait.words:
            yield "A worker goes on with it where it stands, once somebody says so:"
            yield f"  {command_for(given, *wait.words)}"
        elif wait.kind in ("program", "receipt"):
            yield "Start its program again, and it goes on where it stands."
        elif wait.kind == "resolve":
            yield "Look in the outside world first; then one of these shows what it would do, and does it with --yes:"
            yield f"  {command_for(given, *wait.words, output='JSON')}"
            yield f"  {command_for(given, *wait.words, not_executed=True)}"
        elif wait.words:
            yield f"  {command_for(given, *wait.words)}"
    if seen.run.status == "DEAD_LETTER":
        yield "What led there, and a new run that goes on from it:"
        yield f"  {command_for(given, 'trace', run_id)}"
        yield f"  {command_for(given, 'redrive', run_id)}"
    if seen.trouble:
        yield plain(f"PROBLEM: {seen.trouble}")


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(given: argparse.Namespace) -> int:
    is_file = given.db is None and given.run_id is not None and is_bundle(given.run_id)
    if given.key is not None and given.against is None and not is_file:
        raise UsageError("--key says who has signed the heads of --against: give both")
    progress = Progress(sys.stderr)
    shown = _JsonReport()

    def found(finding: agent_run_ledger.Finding) -> None:
        progress.clear()
        if given.json:
            shown.add(finding)
        else:
            at = "-" if finding.seq is None else finding.seq
            where = f"{cut(finding.run_id or '-', 60)}  {cut(at, 20)}  {finding.code}"
            print(f"{where}  {cut(finding.message, 2000)}", flush=True)

    with signing(), nullcontext() if is_file else opened_to_look(given) as ledger:
        against = heads_given(given.against) if given.against is not None else None
        look = agent_run_ledger.verify_bundle if ledger is None else ledger.verify
        try:
            report = look(given.run_id, against, key=key_given(given.key), told=progress.checked, found=found)
        finally:
            progress.clear()
    status = OK if report.ok else PROBLEM
    if given.json:
        shown.end(report)
        return status
    if report.findings:
        print()
    print(
        f"{counted(report.entries, 'entry', 'entries')} of {counted(report.runs, 'run', 'runs')}: "
        f"{counted(len(report.findings), 'finding', 'findings')}"
        + (f", held to {counted(report.heads, 'kept head', 'kept heads')}" if report.heads else "")
        + (f" over {counted(report.covered, 'entry', 'entries')}" if report.heads else "")
    )
    if report.unheld:
        print(
            f"{counted(report.unheld, 'kept head is', 'kept heads are')} of runs that were deleted: their tombstones say who and why, "
            "and nothing is left that could be held to them"
        )
    print()
    proved = _FILE_PROVED if is_file else _PROVED
    print(_PROVED_AGAINST if given.key is not None else _PROVED_UNSIGNED if given.against is not None else proved)
    if report.unchecked:
        why = _WITHHELD if is_file else _ENCRYPTED
        print(f"{counted(report.unchecked, 'payload', 'payloads')} could not be held to the log: {why}")
    return status


class _JsonReport:
    """One JSON object that is written as it becomes known: first the findings, a line each."""

    def __init__(self) -> None:
        self._before = '{"findings": [\n  '

    def add(self, finding: agent_run_ledger.Finding) -> None:
        print(f"{self._before}{as_json_line(asdict(finding))}", end="", flush=True)
        self._before = ",\n  "

    def end(self, report: agent_run_ledger.VerificationReport) -> None:
        begun = "\n], " if report.findings else '{"findings": [], '
        facts = {
            name: getattr(report, name) for name in ("ok", "entries", "runs", "heads", "covered", "unheld", "unchecked")
        }
        print(begun + as_json_line(facts)[1:])


# --- doctor -----------------------------------------------------------------------------------------------------------


def doctor(given: argparse.Namespace) -> int:
    from agent_run_ledger.cli.doctor import examine

    checks = list(examine(path_of(given), encryption_of(given)))
    ok = all(check.level != "problem" for check in checks)
    if given.json:
        print(as_json({"ok": ok, "checks": [data_of(check) for check in checks]}))
        return OK if ok else PROBLEM
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.level:<8} {check.name:<{width}}  {plain(check.message)}")
    return OK if ok else PROBLEM
