"""The demo from outside: starts the service and the agent, kills the agent, starts it again, and asks who saw what."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import agent_run_ledger
from agent_run_ledger import AgentRunLedger, Effect, RunawayLoopException, StepFailed
from agent_run_ledger.cli.terminal import Progress
from agent_run_ledger.demo import models, witness
from agent_run_ledger.demo.agent import RUN_ID
from agent_run_ledger.demo.tools import MONTH

SCRIPTED_STEPS = 45
CRASH_STEP = 38
"""The step of the scripted run in which the agent is killed; it posts an entry."""
CRASH_FROM_STEP = 20
"""With a real model nobody knows which step posts what: the crash comes at the first posting from this step on."""
RUNAWAY_RUN_ID = "runaway-loop"
LOOP_THRESHOLD = 3
_WAIT_SECONDS = 60
_WAIT_FOR_A_MODEL_SECONDS = 600
Figures = dict[str, Any]


class DemoFailed(Exception):
    """The demo could not be played to its end. Nothing is said about the promises then."""


class FolderUnusable(Exception):
    """The folder that the demo is to keep its files in cannot be used. Nothing was done."""


def play(keep: str | None, progress: Progress) -> Figures:
    """Play the demo in a temporary folder, or in `keep`, which has to be new or empty. Returns what was measured.

    Every process that it starts has ended when this returns or raises.
    """
    model = models.chosen()
    began = time.monotonic()
    with _ended_by_signals(), _folder(keep) as folder:
        with Stage(folder, progress, model) as stage:
            figures = _play(stage, model)
        kept = {"folder": str(folder), "ledger": stage.ledger} if keep is not None else {"folder": None, "ledger": None}
        ok = all(promise["held"] for promise in figures["promises"])
        return {"ok": ok, "seconds": time.monotonic() - began} | kept | figures


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="agent-run-ledger-demo-") as name:
            yield Path(name)
        return
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise FolderUnusable(f"the folder {keep!r} cannot be used: {error.strerror}") from error
    if not is_empty:
        raise FolderUnusable(f"the folder {keep!r} is not empty; give one that is new or empty")
    yield folder


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C. What is ignored (`nohup`) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        # A hang-up may come twice, from the kernel and from the shell: the second must not end the cleaning up.
        for each in heeded:
            signal.signal(each, lambda *_: None)
        sys.exit(128 + number)

    for number in heeded:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


class Program:
    """A program of the demo. Its lines of JSON go to `news`, and None when it has ended."""

    def __init__(self, name: str, arguments: Sequence[str], news: queue.Queue[tuple[Program, Any]]) -> None:
        package = str(Path(agent_run_ledger.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.name = name
        self.began = time.monotonic()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the program
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"agent_run_ledger.demo.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C comes to the demo alone, which ends its programs
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(news,), daemon=True)
        self._reader.start()

    def _read(self, news: queue.Queue[tuple[Program, Any]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news.put((self, json.loads(line)))
        news.put((self, None))

    def kill(self) -> int:
        """Send SIGKILL and wait for the end; returns the exit status, minus the signal."""
        self._process.kill()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        status = self._process.wait()
        self._reader.join()
        return status

    def close(self) -> None:
        """See to it that it has ended."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        self.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Stage:
    """The folder and the programs of one demo."""

    def __init__(self, folder: Path, progress: Progress, model: models.Model) -> None:
        self.ledger = str(folder / "agent.db")
        self.books = folder / "books.db"
        self.calls = folder / "calls.log"
        self.data = folder / "data"
        self.progress = progress
        self.is_scripted = isinstance(model, models.ScriptedModel)
        self.url = ""
        self._wait_seconds = _WAIT_SECONDS if self.is_scripted else _WAIT_FOR_A_MODEL_SECONDS
        self._news: queue.Queue[tuple[Program, Any]] = queue.Queue()
        self._programs: list[Program] = []

    def __enter__(self) -> Stage:
        shutil.copytree(Path(__file__).parent / "data", self.data)
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.close()

    def start_service(self) -> None:
        """The service holds back the answer to one posting, which tells us when to kill."""
        step = CRASH_STEP if self.is_scripted else CRASH_FROM_STEP
        service = self._start("bookkeeping", "--books", str(self.books), "--hold-from-step", str(step))
        _, line = self._next(service)
        self.url = line["url"]

    def start_agent(self) -> Program:
        places = (
            "--ledger",
            self.ledger,
            "--data",
            str(self.data),
            "--service",
            self.url,
            "--witness",
            str(self.calls),
        )
        return self._start("agent", *places)

    def watch(self, agent: Program) -> tuple[dict[str, Any] | None, int]:
        """Wait until the service holds an answer back and return what it says of it, or None when the agent has ended.

        Also returns how many steps the agent was handed out of the ledger.
        """
        steps = replayed = 0
        while True:
            program, line = self._next(agent)
            if program is agent and line is not None:
                steps += 1
                replayed += line["is_replayed"]
                note = "  (from the ledger)" if line["is_replayed"] else ""
                self.progress.show(f"step {steps:3}  {line['tool']} {line['about']}{note}")
            elif program is agent or program.name == "bookkeeping":
                self.progress.clear()
                return dict(line["held"]) if line is not None else None, replayed

    def _start(self, name: str, *arguments: str) -> Program:
        program = Program(name, arguments, self._news)
        self._programs.append(program)
        return program

    def _next(self, wanted: Program) -> tuple[Program, Any]:
        """The next line of any program. Raises `DemoFailed` when the service has ended, or when nothing comes."""
        try:
            program, line = self._news.get(timeout=self._wait_seconds)
        except queue.Empty:
            raise DemoFailed(f"the {wanted.name} program said nothing for {self._wait_seconds} s") from None
        if line is None and program.name == "bookkeeping":
            raise DemoFailed(f"the bookkeeping service ended: {program.last_words()}")
        return program, line


def _play(stage: Stage, model: models.Model) -> Figures:
    say = stage.progress.milestone
    stage.start_service()
    say(f"Bookkeeping service: a process of its own at {stage.url}, with its own database.")
    by = "a scripted model (OPENAI_BASE_URL is not set)" if stage.is_scripted else f"the model {model.name!r}"
    say(f"Agent: another process, driven by {by}. It reconciles the invoices of {MONTH}.")

    first = stage.start_agent()
    held, _ = stage.watch(first)
    if held is None and first.wait() == 0:
        raise DemoFailed(
            f"the model was done without posting from step {CRASH_FROM_STEP} on, so no crash could be tried"
        )
    if held is None:
        raise DemoFailed(f"the agent ended before it could be killed: {first.last_words()}")
    status = first.kill()
    with AgentRunLedger.open_read_only(stage.ledger) as ledger:
        stands = ledger.inspect(RUN_ID)
    crash = {
        "signal": "SIGKILL",
        "exit_status": status,
        "step": held["step"],
        "tool": next((step.tool_name for step in stands.steps if step.step_number == held["step"]), None),
        "steps_in_doubt": stands.in_doubt,
    }
    say(
        f"Killed with SIGKILL in step {held['step']}: the service has booked entry {held['number']} and not answered yet."
    )

    again = stage.start_agent()
    held_again, replayed = stage.watch(again)
    if held_again is not None or again.wait() != 0:
        raise DemoFailed(f"the agent that was started again did not finish: {again.last_words()}")
    say("Started again with the same command: it went on and finished.")

    runaway = _run_away(stage)
    say(f"A runaway loop was tripped: {runaway['calls_asked_for']} equal failing calls asked for.")
    figures = _figures(stage, model, crash, again, replayed, runaway)
    stage.progress.clear()
    return figures


def _run_away(stage: Stage) -> Figures:
    """An agent that makes one failing call again and again. Returns how often it asked, and what stopped it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(invoice_id: str) -> None:
        try:
            opener.open(f"{stage.url}/invoices/{invoice_id}", timeout=_WAIT_SECONDS).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise

    asked, stopped = 0, None
    with AgentRunLedger(stage.ledger, max_steps=30, loop_threshold=LOOP_THRESHOLD) as ledger:
        ledger.create_run("Fetch an invoice that does not exist, for ever", run_id=RUNAWAY_RUN_ID)
        while asked < 10 and stopped is None:
            asked += 1
            try:
                ledger.execute_step(
                    RUNAWAY_RUN_ID, "fetch_invoice", {"invoice_id": "INV-9999"}, fetch, effect=Effect.READ
                )
            except StepFailed:
                continue
            except RunawayLoopException as error:
                stopped = error
    return {"calls_asked_for": asked, "stopped_by": type(stopped).__name__ if stopped else None}


def _figures(
    stage: Stage, model: models.Model, crash: Figures, again: Program, replayed: int, runaway: Figures
) -> Figures:
    """What the outside saw, beside what the ledger says."""
    seen = witness.read(stage.calls)
    calls = [line for line in seen if "tool" in line]
    with AgentRunLedger.open_read_only(stage.ledger) as ledger:
        run, looping = ledger.get_run(RUN_ID), ledger.get_run(RUNAWAY_RUN_ID)
        steps = ledger.steps(RUN_ID)
        report = ledger.verify(told=stage.progress.checked)
    with closing(sqlite3.connect(stage.books)) as books:
        booked = books.execute("SELECT count(*), count(DISTINCT invoice) FROM entries").fetchone()
        posts = books.execute("SELECT key, note FROM requests WHERE method = 'POST' ORDER BY id").fetchall()
        (fetches,) = books.execute("SELECT count(*) FROM requests WHERE method = 'GET'").fetchone()

    made_again = [line for line in calls if line["pid"] == again.pid]
    if not made_again:
        raise DemoFailed("the agent that was started again made no call")
    keys_again = {line["key"] for line in made_again}
    usages = {
        step.idempotency_key: json.loads(step.output_json)["usage"]
        for step in steps
        if step.tool_name == "call_model" and step.output_json is not None
    }
    in_doubt = next((step.idempotency_key for step in steps if step.step_number == crash["step"]), None)
    sent = Counter(key for key, _ in posts)
    posted = sum(step.tool_name == "post_entry" and step.state == "COMPLETED" for step in steps)
    began = next(line["began"] for line in seen if line["pid"] == again.pid and "began" in line)
    dispatched = made_again[0]["at"]
    model_calls, tool_calls = _counts(calls, "call_model", True), _counts(calls, "call_model", False)
    repeated_keys = {key for key, count in Counter(line["key"] for line in calls).items() if count > 1}
    runaway = runaway | {"calls_dispatched": fetches, "status": looping.status, "cause": looping.cause}
    figures: Figures = {
        "model": {"name": model.name, "is_scripted": stage.is_scripted},
        "run": {"run_id": RUN_ID, "status": run.status, "steps": run.total_steps, "result": run.result},
        "crash": crash,
        "model_calls": model_calls,
        "tool_calls": tool_calls,
        "steps_replayed": replayed,
        "postings": {
            "requests": len(posts),
            "keys": len(sent),
            "sent_more_than_once": sum(count > 1 for count in sent.values()),
            "deduplicated": sum(note == "deduplicated" for _, note in posts),
            "booked": booked[0],
            "duplicates": booked[0] - posted,
            "booked_again_by_the_model": posted - booked[1],
        },
        "recovery": {
            "seconds_from_process_start": dispatched - again.began,
            "seconds_from_first_line_of_main": dispatched - began,
        },
        "tokens": {
            "paid": sum(_tokens(usages.get(line["key"])) for line in calls),
            "saved": sum(_tokens(usage) for key, usage in usages.items() if key not in keys_again),
            "is_estimate": any(usage["is_estimate"] for usage in usages.values()),
        },
        "runaway": runaway,
        "verification": {
            "ok": report.ok,
            "entries": report.entries,
            "runs": report.runs,
            "findings": [asdict(finding) for finding in report.findings],
        },
    }
    expected = SCRIPTED_STEPS if stage.is_scripted else run.total_steps
    promises = {
        "the agent was killed while a posting was in flight": crash["exit_status"] == -signal.SIGKILL
        and crash["steps_in_doubt"] == [crash["step"]],
        "the run went on and completed": run.status == "COMPLETED" and run.total_steps == len(steps) == expected,
        "no model call was repeated": model_calls["repeated"] == 0,
        "no tool call was repeated but the one in doubt": repeated_keys == {in_doubt},
        "the posting in doubt was sent twice and booked once": sent[in_doubt] == 2
        and figures["postings"]["deduplicated"] == 1,
        "nothing was posted twice": figures["postings"]["duplicates"] == 0
        and not (stage.is_scripted and booked[0] != booked[1]),
        # The lease is longer than anybody waits here, so whoever has got the run has not waited for it.
        "the dead owner's lease was not waited for": run.fencing_token > steps[0].fencing_token,
        "the loop was stopped before its next call": fetches == LOOP_THRESHOLD
        and runaway["calls_asked_for"] == LOOP_THRESHOLD + 1
        and looping.status == "DEAD_LETTER",
        "the ledger verifies": report.ok,
    }
    return figures | {"promises": [{"promise": what, "held": held} for what, held in promises.items()]}


def _counts(calls: list[dict[str, Any]], tool: str, is_tool: bool) -> Figures:
    """Calls that were really made, of one tool or of all others: how many, and how many of them for a second time."""
    keys = [line["key"] for line in calls if (line["tool"] == tool) is is_tool]
    return {"made": len(keys), "repeated": len(keys) - len(set(keys))}


def _tokens(usage: dict[str, Any] | None) -> int:
    return int(usage["input_tokens"]) + int(usage["output_tokens"]) if usage is not None else 0
