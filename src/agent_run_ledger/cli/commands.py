"""The commands: what each takes, prints and returns."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, NoReturn

import agent_run_ledger
from agent_run_ledger.cli.terminal import (
    Progress,
    as_json,
    counted,
    cut,
    plain,
    table,
    took,
    when,
    width,
    writable,
)

if TYPE_CHECKING:
    from agent_run_ledger.model import Inspection

OK, PROBLEM, ERROR, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_WIDE = 130
"""From this many columns on a step's arguments are shown, too."""
VARIABLE = "AGENT_RUN_LEDGER_DB"

_EPILOG = f"""\
examples:
  agent-run-ledger demo --keep demo
  agent-run-ledger --db demo/agent.db runs --status DEAD_LETTER
  agent-run-ledger --db demo/agent.db show reconcile-2026-10
  agent-run-ledger --db demo/agent.db verify && echo sound
  {VARIABLE}=demo/agent.db agent-run-ledger doctor --json

exit status: 0 all is well; 1 a problem was found (a finding, a broken promise); 2 the command was wrong or the
ledger cannot be read; 130 interrupted; 141 whoever read the output went away.
Reading commands open the ledger read-only and may be used while agents work on it."""


class UsageError(Exception):
    """The command line asks for what cannot be done."""


@writable()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Prints errors as one line; raises nothing but `SystemExit` for usage."""
    try:
        given = _parser().parse_args(arguments)
        status: int = given.command(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes at exit, which would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (UsageError, agent_run_ledger.LedgerError, OSError) as error:
        sys.stderr.write(f"agent-run-ledger: {plain(str(error))}\n")
        return ERROR
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"{self.prog}: {plain(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="agent-run-ledger",
        description="Look at and verify the runs of AI agents in a ledger, or see a demo of a crash and the recovery from it.",
        epilog=_EPILOG,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"agent-run-ledger {agent_run_ledger.__version__}")
    # Both before and after the command. SUPPRESS, so that the second does not undo the first.
    for_all = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for_all.add_argument("--json", action="store_true", help="print one JSON value, for programs")
    for_reading = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for_reading.add_argument("--db", metavar="PATH", help=f"the ledger's file (default: ${VARIABLE})")
    parser.add_argument("--db", metavar="PATH", help=f"the ledger's file (default: ${VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print one JSON value, for programs")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Any, text: str, example: str, *, reads: bool = True) -> argparse.ArgumentParser:
        parents = [for_all, for_reading] if reads else [for_all]
        added = commands.add_parser(
            name, help=text, description=text, epilog=f"example: {example}", parents=parents, formatter_class=formatter
        )
        added.set_defaults(command=command)
        return added

    demo = add(
        "demo",
        _demo,
        "Kill a real agent with SIGKILL at step 38 of 45, let it go on, and show what the outside saw. Without "
        "OPENAI_BASE_URL its model is scripted; with it (and OPENAI_MODEL, OPENAI_API_KEY) any OpenAI-compatible endpoint.",
        "agent-run-ledger demo --keep demo",
        reads=False,
    )
    demo.add_argument("--keep", metavar="DIR", help="keep the demo's files in this new or empty folder")

    runs = add(
        "runs", _runs, "List the runs of a ledger.", "agent-run-ledger --db demo/agent.db runs --status DEAD_LETTER"
    )
    runs.add_argument("--status", metavar="STATE", help="only runs in this state, like BLOCKED or COMPLETED")
    runs.add_argument(
        "--limit", metavar="N", type=_count, help="only the newest N runs (default: 50; 0 and --json: all)"
    )

    show = add(
        "show",
        _show,
        "Show one run and its steps.",
        "agent-run-ledger --db demo/agent.db show reconcile-2026-10 --steps 0",
    )
    show.add_argument("run_id", metavar="RUN")
    show.add_argument(
        "--steps", metavar="N", type=_count, help="only the last N steps (default: 50; 0 and --json: all)"
    )

    verify = add(
        "verify",
        _verify,
        "Recompute every entry of one run, or of all, and report what does not agree. A database alone proves only that "
        "it agrees with itself.",
        "agent-run-ledger --db demo/agent.db verify",
    )
    verify.add_argument("run_id", metavar="RUN", nargs="?")

    add(
        "doctor",
        _doctor,
        "Check the machine, the database file and the runs for what may be in the way.",
        "agent-run-ledger --db demo/agent.db doctor",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number of at least 0 is needed, not {plain(text)!r}")
    return int(text)


def _path(given: argparse.Namespace) -> str:
    """The ledger that is meant. Raises `UsageError` that lists those in the current folder."""
    path: str | None = given.db if given.db is not None else os.environ.get(VARIABLE)
    if path == ":memory:":
        raise UsageError("a ledger in memory is seen by its own process only; give the path of a file")
    if path:
        return path
    from agent_run_ledger.ledger import ledgers_in

    found = ledgers_in(os.curdir)
    where = f"ledgers in this folder: {', '.join(found)}" if found else "there is no ledger in this folder"
    raise UsageError(f"which ledger? Give --db PATH or set {VARIABLE}; {where}")


# --- demo -------------------------------------------------------------------------------------------------------------


def _demo(given: argparse.Namespace) -> int:
    from agent_run_ledger.demo.models import ModelSettings
    from agent_run_ledger.demo.report import page
    from agent_run_ledger.demo.stage import DemoFailed, FolderUnusable, play

    progress = Progress(sys.stderr if given.json else sys.stdout)
    try:
        figures = play(given.keep, progress)
    except (ModelSettings, FolderUnusable) as error:
        raise UsageError(str(error)) from None
    except DemoFailed as error:
        progress.clear()
        sys.stderr.write(f"agent-run-ledger: the demo could not be played: {plain(str(error))}\n")
        return PROBLEM
    finally:
        progress.clear()
    print(as_json(figures) if given.json else page(figures))
    return OK if figures["ok"] else PROBLEM


# --- runs -------------------------------------------------------------------------------------------------------------


def _runs(given: argparse.Namespace) -> int:
    states = list(agent_run_ledger.RunState)
    if given.status is not None and given.status not in states:
        raise UsageError(f"there is no run state {given.status!r}; the states are {', '.join(states)}")
    with agent_run_ledger.AgentRunLedger.open_read_only(_path(given)) as ledger:
        records = ledger.runs(given.status)
        limit = given.limit if given.limit is not None else 0 if given.json else 50
        shown = records[-limit:] if limit else records
        status = PROBLEM if any(record.is_damaged for record in records) else OK
        if given.json:
            print(as_json({"runs": [_run_data(record) for record in shown]}))
            return status
        if not records:
            print("no runs" if given.status is None else f"no run is {given.status}")
            return OK
        if len(shown) < len(records):
            print(f"the newest {len(shown)} of {len(records)} runs (--limit 0 shows all):")
        heads = ("RUN", "STATUS", "STEPS", "UPDATED", "GOAL", "CAUSE")
        print(table(heads, (_run_row(record, ledger.is_waiting(record)) for record in shown), stretch=5))
    return status


def _run_row(record: agent_run_ledger.RunRecord, is_waiting: bool) -> tuple[str | None, ...]:
    cause = record.cause or ("waiting for its program" if is_waiting else None)
    updated = when(record.updated_at) if record.updated_at else ""
    return (record.run_id, record.status, str(record.total_steps), updated, cut(record.goal, 40), cause)


def _run_data(record: agent_run_ledger.RunRecord) -> dict[str, Any]:
    return _plain_data(record) | {"spent_usd": str(record.spent_usd), "result": _canonical(record.result)}


def _plain_data(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, one level deep."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _canonical(value: Any) -> Any:
    """A result as the ledger stores it, in JSON with its tags."""
    import json

    from agent_run_ledger.ledger import as_stored

    return json.loads(as_stored(value))


# --- show -------------------------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> int:
    with agent_run_ledger.AgentRunLedger.open_read_only(_path(given)) as ledger:
        seen = ledger.inspect(given.run_id)
    record, is_seen = seen.run, seen.is_owner_seen
    limit = given.steps if given.steps is not None else 0 if given.json else 50
    shown = seen.steps[-limit:] if limit else seen.steps
    status = PROBLEM if seen.trouble or record.is_damaged else OK
    if given.json:
        steps = [
            _plain_data(step) | {"environment": environment}
            for step, environment in zip(seen.steps, seen.environments, strict=True)
        ]
        data = {
            "run": _run_data(record),
            "steps": steps[-limit:] if limit else steps,
            "is_waiting_for_its_program": seen.is_waiting,
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
    notes = list(_notes(seen, shown))
    if seen.trouble:
        notes.append(f"PROBLEM: {seen.trouble}")
    if notes:
        print()
    for note in notes:
        print(plain(note))
    return status


def _described(record: agent_run_ledger.RunRecord, is_seen: bool) -> str:
    owner = record.owner and f"{record.owner} ({'alive' if is_seen else 'not seen alive on this machine'})"
    facts: list[tuple[str, Any]] = [
        ("run", record.run_id),
        ("goal", record.goal),
        ("status", record.status),
        ("cause", record.cause),
        ("steps", record.total_steps),
        ("created", when(record.created_at) if record.created_at else None),
        ("updated", when(record.updated_at) if record.updated_at else None),
        ("owner", owner),
        ("fencing token", record.fencing_token),
        ("result", None if record.result is None else repr(record.result)),
    ]
    return "\n".join(f"{name + ':':<15}{cut(str(value), 400)}" for name, value in facts if value is not None)


def _step_row(
    step: agent_run_ledger.StepRecord, in_doubt: Sequence[int], redispatched: Sequence[int]
) -> list[str | None]:
    state = f"{step.state}{' (in doubt)' if step.step_number in in_doubt else ''}"
    attempts = str(step.attempts) + (" !" if step.step_number in redispatched else "")
    duration = took(step.completed_at - step.created_at) if step.completed_at is not None else ""
    said = step.error_message if step.error_message is not None else step.output_json
    effect = step.effect or "undeclared"
    return [str(step.step_number), step.tool_name, state, attempts, effect, duration, said]


def _notes(seen: Inspection, shown: Sequence[agent_run_ledger.StepRecord]) -> Iterable[str]:
    if any(step.step_number in seen.redispatched for step in shown):
        yield (
            "! dispatched again after a crash although its tool declares no effect: it may have happened twice. Declare effect= "
            "for the tool."
        )
    if not seen.is_waiting:
        return
    in_doubt = [step for step in shown if step.step_number in seen.in_doubt]
    if seen.run.status == "BLOCKED" and any(step.effect == "MUTATE" for step in in_doubt):
        yield (
            "A step that changes something is in doubt, and nobody can be asked whether it took effect: it is not dispatched "
            "again. Look in the outside world; this version can only cancel the run."
        )
    else:
        yield "This run waits for its program: start the program again, and it goes on where it stands."


# --- verify -----------------------------------------------------------------------------------------------------------


def _verify(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    with agent_run_ledger.AgentRunLedger.open_read_only(_path(given)) as ledger:
        try:
            report = ledger.verify(given.run_id, told=progress.checked)
        finally:
            progress.clear()
    if given.json:
        print(as_json(asdict(report)))
        return OK if report.ok else PROBLEM
    print(
        f"{counted(report.entries, 'entry', 'entries')} of {counted(report.runs, 'run', 'runs')}: "
        f"{counted(len(report.findings), 'finding', 'findings')}"
    )
    if report.findings:
        print()
        rows = (
            (each.run_id, "" if each.seq is None else str(each.seq), each.code, each.message)
            for each in report.findings
        )
        print(table(("RUN", "ENTRY", "CODE", "MESSAGE"), rows, stretch=3))
    print()
    print(
        "This proves that the database agrees with itself: damage and careless changes are found. Who can write the file can\n"
        "rebuild it whole, or put an older copy in its place; only a tree head kept elsewhere finds that."
    )
    return OK if report.ok else PROBLEM


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor(given: argparse.Namespace) -> int:
    from agent_run_ledger.cli.doctor import examine

    checks = list(examine(_path(given)))
    ok = all(check.level != "problem" for check in checks)
    if given.json:
        print(as_json({"ok": ok, "checks": [_plain_data(check) for check in checks]}))
        return OK if ok else PROBLEM
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.level:<8} {check.name:<{width}}  {plain(check.message)}")
    return OK if ok else PROBLEM
