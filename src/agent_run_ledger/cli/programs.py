"""The commands that start a program: recover the user's, and the demo."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout

from agent_run_ledger.cli.shell import OK, PROBLEM, TERMINATED, UsageError, run_data
from agent_run_ledger.cli.signals import Ending
from agent_run_ledger.cli.terminal import Progress, as_json, counted, plain, table


def demo(given: argparse.Namespace) -> int:
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


def recover(given: argparse.Namespace) -> int:
    from agent_run_ledger.cli.loading import ledger_of
    from agent_run_ledger.cli.waiting import data_of_waits, told, waits_of

    # What the user's code prints must not come between the JSON.
    aside = redirect_stdout(sys.stderr) if given.json else nullcontext()
    # SIGTERM ends it as Ctrl-C does: the step in flight is left in doubt, and every lease is given back.
    ending = Ending()
    with ending.guarded(), aside, ledger_of(given.module) as ledger:
        try:
            ended = [ledger.get_run(run_id) for run_id in ledger.recover()]
        except SystemExit as exit_:
            if exit_.code == TERMINATED and ending.has_come:
                raise
            sys.stderr.write(
                f"agent-run-ledger: an agent ended the process with status {exit_.code!r} while its run was recovered: the run is parked, and "
                "those behind it were not begun. Recover again: parked runs come last\n"
            )
            return PROBLEM
        waits = [(record, found) for record in ledger.runs() if (found := waits_of(ledger, record))]
    stuck = {record.run_id for record, found in waits if any(wait.needs_somebody for wait in found)}
    is_well = not stuck and all(record.status == "COMPLETED" for record in ended)
    if given.json:
        waiting = [run_data(record) | {"waits_for": list(data_of_waits(found))} for record, found in waits]
        data = {
            "ok": is_well,
            "ended": [run_data(record) for record in ended],
            "waiting": waiting,
            "needs_somebody": sorted(stuck),
        }
        print(as_json(data))
        return OK if is_well else PROBLEM
    print(f"{counted(len(ended), 'run', 'runs')} ended, {counted(len(waits), 'run', 'runs')} left waiting")
    if ended:
        print()
        rows = ((record.run_id, record.status, record.total_steps, record.cause) for record in ended)
        print(table(("ENDED", "STATUS", "STEPS", "CAUSE"), rows, stretch=3))
    if waits:
        print()
        left = (
            (record.run_id, record.status, "!" if record.run_id in stuck else "", told(found))
            for record, found in waits
        )
        print(table(("WAITING", "STATUS", "", "WHY"), left, stretch=3, is_wrapped=True))
    if stuck:
        print("\n! a person has to look: `agent-run-ledger show RUN` says which command helps")
    return OK if is_well else PROBLEM
