"""The commands about workers: start one, see those that there are, see which runs are stuck, and wake one."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from agent_run_ledger.cli.options import address, number, seconds, some_seconds
from agent_run_ledger.cli.shell import OK, PROBLEM, UsageError, data_of, opened, opened_to_look, run_data
from agent_run_ledger.cli.terminal import as_json, as_json_line, counted, plain, since, table, took

if TYPE_CHECKING:
    from agent_run_ledger import AgentRunLedger, Worker, WorkerRecord


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands by `add_command(name, module, text, example)`, which returns a command's parser."""
    worker = add_command(
        "worker",
        "fleet",
        "Work on the runs of a program's agents that were left to workers, until SIGTERM or Ctrl-C. Then nothing new is begun, steps in "
        "flight end, and the status is 0; a second signal ends it at once. MODULE is imported as `python -m` would find it; it makes an "
        "AgentRunLedger, named by LEDGER where there are several. With --json each line is a JSON object.",
        "worker billing.agent --concurrency 16 --queue billing --health 0.0.0.0:8080",
        of="program",
    )
    worker.add_argument("module", metavar="MODULE[:LEDGER]")
    worker.add_argument("--concurrency", metavar="N", type=number, default=8, help="how many runs at once (default: 8)")
    worker.add_argument(
        "--queue",
        dest="queues",
        metavar="Q",
        action="append",
        help="the queue to work for; may be given several times (default: default)",
    )
    worker.add_argument(
        "--health",
        metavar="HOST:PORT",
        type=address,
        help="say at /healthz and /readyz there how it is; port 0 finds one",
    )
    worker.add_argument(
        "--poll",
        metavar="SECONDS",
        type=some_seconds,
        default=1.0,
        help="how long it may not see what is due where nobody tells it (default: 1)",
    )
    worker.add_argument(
        "--drain",
        metavar="SECONDS",
        type=seconds,
        help="how long steps in flight may take to end once it is told to; then the status is 143, or 130 (default: for ever)",
    )
    worker.add_argument("--name", metavar="NAME", help="what others see of it (default: this host and its process)")
    add_command(
        "workers",
        "fleet",
        "List the workers of a ledger, on all machines: what they serve, how many runs they work on, and when they were heard of last. "
        "One that died is listed for a day.",
        "--db agent.db workers",
    )
    wake = add_command(
        "wake",
        "fleet",
        "Let a worker take a run of a queue now: one that was redriven or forked, that is parked, or that has a delay. Nothing is written "
        "in its log.",
        "--db agent.db wake invoice-7",
    )
    wake.add_argument("run_id", metavar="RUN")


# --- one worker -------------------------------------------------------------------------------------------------------


def worker(given: argparse.Namespace) -> int:
    import logging  # noqa: F401 - what the worker has to say is heard then, on standard error where the program says nothing else

    from agent_run_ledger.cli.loading import ledger_of

    said, began = sys.stdout, time.monotonic()
    # What the user's code prints must not come between the lines for programs.
    with redirect_stdout(sys.stderr if given.json else sys.stdout), ledger_of(given.module) as ledger:
        started = ledger.worker(
            given.concurrency,
            given.queues or ("default",),
            poll_seconds=given.poll,
            name=given.name,
            health=given.health,
            drain_seconds=given.drain,
        )
        if not started.agents:
            started.stop()
            raise UsageError(f"module {given.module!r} has a ledger without agents: register them with @ledger.agent()")
        _say(given, said, "started", started, _began(started))
        try:
            started.run()
        finally:
            left = len(started.running)
            steps = (
                f"{counted(left, 'run is', 'runs are')} left with a step in flight"
                if left
                else "every run was given back"
            )
            lasted = took(time.monotonic() - began)
            _say(given, said, "ended", started, f"worker {started.name} ended after {lasted}: {steps}")
    return OK


def _began(started: Worker) -> str:
    health = started.health_address
    at = f"; health at http://{health[0]}:{health[1]}/healthz" if health is not None else ""
    return (
        f"worker {started.name} works on up to {counted(started.concurrency, 'run', 'runs')} at once of "
        f"{'queue' if len(started.queues) == 1 else 'queues'} {', '.join(started.queues)}, for the agents {', '.join(started.agents)}{at}"
    )


def _say(given: argparse.Namespace, stream: Any, event: str, started: Worker, text: str) -> None:
    facts: dict[str, Any] = {"event": event, "at": time.time(), "worker": started.name}
    if event == "started":
        facts |= {
            "concurrency": started.concurrency,
            "queues": started.queues,
            "agents": started.agents,
            "health": started.health_address,
        }
    else:
        facts["left"] = started.running
    stream.write((as_json_line(facts) if given.json else plain(text)) + "\n")
    stream.flush()


# --- all workers ------------------------------------------------------------------------------------------------------


def workers(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        records = ledger.workers()
    if given.json:
        print(as_json({"workers": [data_of(record) for record in records]}))
        return OK
    if not records:
        print("no worker has been heard of in the last day")
        return OK
    heads = ("WORKER", "HOST", "PID", "STATE", "RUNS", "STARTED", "HEARD OF", "QUEUES")
    print(table(heads, map(_row, records), stretch=7))
    return OK


def _row(record: WorkerRecord) -> tuple[str, ...]:
    state = record.state if record.is_alive else "silent"
    runs = f"{record.running_count} of {record.concurrency}"
    heard = f"{took(record.idle_seconds)} ago"
    started = since(record.started_at) if record.started_at else ""
    return (record.name, record.host, str(record.pid), state, runs, started, heard, ", ".join(record.queues))


# --- runs -------------------------------------------------------------------------------------------------------------


def stuck(given: argparse.Namespace, ledger: AgentRunLedger) -> int:
    """What `runs --stuck` shows."""
    after = 300.0 if given.after is None else given.after
    found = [each for each in ledger.stuck(after) if given.status in (None, each.status)]
    if given.limit:
        found = found[-given.limit :]
    if given.json:
        print(as_json({"stuck": [data_of(each) for each in found]}))
    elif not found:
        print(f"every run that somebody should go on with has got on within the last {took(after)}")
    else:
        rows = ((each.run_id, each.status, took(each.seconds), each.reason) for each in found)
        print(table(("RUN", "STATUS", "FOR", "WHY"), rows, stretch=3, is_wrapped=True))
    return PROBLEM if found else OK


def wake(given: argparse.Namespace) -> int:
    with opened(given) as ledger:
        ledger.wake(given.run_id)
        record = ledger.get_run(given.run_id)
        is_served = any(each.is_alive and record.queue in each.queues for each in ledger.workers())
    if given.json:
        print(as_json({"run": run_data(record), "is_served": is_served}))
        return OK
    rest = "" if is_served else "; but no live worker serves it"
    print(plain(f"Run {record.run_id!r} is due: a worker of its queue {record.queue!r} takes it{rest}."))
    return OK
