"""The command that says, before a deploy, what changed code makes of the runs that are open."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

import agent_run_ledger
from agent_run_ledger.cli.options import some_seconds
from agent_run_ledger.cli.shell import OK, PROBLEM
from agent_run_ledger.cli.terminal import Progress, as_json, counted, plain, table

if TYPE_CHECKING:
    from agent_run_ledger.preflight import Forecast

_WORST_FIRST = ("diverges", "fails", "not here", "stands", "goes on")
_PHRASES = {
    "diverges": "would diverge",
    "fails": "cannot be replayed",
    "not here": "of programs that are not registered here",
    "stands": "would stand where they stand",
    "goes on": "would go on",
}


def preflight(given: argparse.Namespace) -> int:
    from agent_run_ledger.cli.loading import made_by
    from agent_run_ledger.preflight import nothing_is_opened, preflight

    progress = Progress(sys.stderr)
    # What the user's code prints is left alone, but must not come between the JSON.
    with redirect_stdout(sys.stderr) if given.json else nullcontext():
        with nothing_is_opened():
            ledger = made_by(given.module, agent_run_ledger.AgentRunLedger, agent_run_ledger.RunLedger)
        try:
            forecast = preflight(
                ledger,
                given.db,
                timeout=given.timeout,
                told=lambda done, of: progress.show(f"replaying: {done} of {counted(of, 'open run', 'open runs')}"),
            )
        finally:
            progress.clear()
    if given.json:
        print(as_json(asdict(forecast)))
    else:
        _print(forecast)
    return OK if forecast.ok else PROBLEM


def add(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = add(
        "preflight",
        "preflight",
        "Say before a deploy what the code, as it is now, makes of the runs that are open. Each is replayed on a copy, with nothing "
        "dispatched and nothing written, up to the first call that is not recorded. MODULE is imported as `python -m` would find it; "
        "it makes an AgentRunLedger or a RunLedger, named by LEDGER where there are several. Without --db the database is that "
        "ledger's own. The exit status is 1 if a run would diverge or cannot be replayed.",
        "--db agent.db preflight billing.agent:ledger",
    )
    command.add_argument("module", metavar="MODULE[:LEDGER]")
    command.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=some_seconds,
        default=10.0,
        help="how long one replay may take (default: 10)",
    )


def _print(forecast: Forecast) -> None:
    if not forecast.runs:
        print("no run is open")
        return
    runs = sorted(forecast.runs, key=lambda run: _WORST_FIRST.index(run.verdict))
    rows = ((run.run_id, run.program, run.status, run.verdict, run.position, run.text) for run in runs)
    print(table(("RUN", "PROGRAM", "STATUS", "VERDICT", "AT", "WHY"), rows, stretch=5))
    number = Counter[str](run.verdict for run in runs)
    said = ", ".join(f"{number[verdict]} {_PHRASES[verdict]}" for verdict in _WORST_FIRST if number[verdict])
    print(f"\n{plain(counted(len(runs), 'open run', 'open runs'))}: {said}")
