"""Workers in processes of their own, on one file: told to end, killed and stopped, and judged by what the outside saw."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from support.fleets import LONG, until
from support.ledgers import raw
from support.processes import child, environment
from support.witness import Witness

APP = """
import json, os, sys, time
from pathlib import Path
from agent_run_ledger import AgentRunLedger, Budget, Effect, current_run, current_step
from support.witness import Witness

ledger = AgentRunLedger("agent.db", **json.loads(os.environ.get("LEDGER", "{}")))
witness = Witness(Path("witness"))
STEPS = 4

def await_file(name):
    while not Path(name).exists():
        time.sleep(0.005)

@ledger.tool(effect=Effect.IDEMPOTENT)
def slow(name):
    witness.note("begun", step="slow", run=current_step().run_id)
    await_file(name)
    witness.note("done", step="slow", run=current_step().run_id)
    return name

@ledger.tool(effect=Effect.READ)
def quick(number):
    witness.note("begun", step=f"quick {number}", run=current_step().run_id, pid=os.getpid(), at=time.time())
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return number

@ledger.agent()
def waits(given):
    return slow(given), quick(1)

@ledger.agent()
async def awaits(given):
    return slow(given), quick(1)

@ledger.agent()
def steps(given):
    return [quick(given + number) for number in range(STEPS)]

@ledger.agent(budget=Budget(steps=100))
def fans(given):
    return sum(current_run().map(counted, list(range(given))))

@ledger.agent()
def counted(given):
    return quick(given)
"""


class Place:
    """A folder with a program, its ledger, and what the outside saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "app.py").write_text(APP, encoding="utf-8")
        self.path = folder / "agent.db"
        self.witness = Witness(folder / "witness")
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """A process in this folder; standard output and error are read when it has ended."""
        started = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(started)
        return started

    def worker(self, *options: str, **variables: str) -> subprocess.Popen[str]:
        return self.start("-m", "agent_run_ledger", "worker", "app", "--poll", "0.05", *options, **variables)

    def submit(self, agent: str, given: Any, run_id: str) -> None:
        """Leave a run to workers. The agent is known by its name here, and nobody runs it."""
        with AgentRunLedger(self.path) as ledger:
            ledger.submit(ledger.agent(name=agent)(_nobody), given, run_id=run_id)

    def begun(self, step: str = "slow") -> list[dict[str, Any]]:
        return [note for note in self.witness.notes("begun") if note["step"] == step]

    def look(self) -> AgentRunLedger:
        return AgentRunLedger.open_read_only(self.path)


def _nobody(given: Any) -> Any:
    pytest.fail("a run was begun in the test's own process")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    opened = Place(tmp_path)
    yield opened
    for process in opened.processes:
        if process.poll() is None:
            process.kill()
            process.send_signal(signal.SIGCONT)
        process.communicate()


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How a process ends, and what it said."""
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


# --- told to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["waits", "awaits"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_in_flight_finish_and_another_worker_goes_on_behind_it(
    place: Place, agent: str, number: signal.Signals
) -> None:
    place.submit(agent, "go", "run")
    first = place.worker("--name", "first")
    until(place.begun)
    first.send_signal(number)
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        assert first.poll() is None
        (place.folder / "go").touch()
        status, out, err = ends(first)
        assert (status, err) == (0, "")
        assert out.splitlines()[0].startswith("worker first-")
        assert out.splitlines()[-1].endswith("every run was given back")
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED"]
        run = ledger.get_run("run")
        assert (run.owner, ledger.workers()) == (None, [])
        assert run.due_in_seconds is not None
        assert run.due_in_seconds <= 0
        second = place.worker()
        until(lambda: ledger.get_run("run").status == "COMPLETED")
        second.terminate()
        assert ends(second)[0] == 0
        assert ledger.get_run("run").result == ("go", 1)
        assert ledger.verify().findings == []
    assert Counter(note["step"] for note in place.witness.notes("begun")) == {"slow": 1, "quick 1": 1}


def test_a_second_signal_ends_the_process_at_once_and_its_run_is_taken_over(place: Place) -> None:
    place.submit("waits", "go", "run")
    first = place.worker()
    until(place.begun)
    first.terminate()
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
    first.terminate()
    assert ends(first)[0] == -signal.SIGTERM
    (place.folder / "go").touch()
    second = place.worker()
    with place.look() as ledger:
        until(lambda: ledger.get_run("run").status == "COMPLETED")
        assert ledger.verify().findings == []
    second.terminate()
    assert ends(second)[0] == 0
    assert len(place.begun()) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_step_that_outlasts_the_time_to_drain_is_left_in_doubt(
    place: Place, number: signal.Signals, status: int
) -> None:
    place.submit("waits", "never", "run")
    first = place.worker("--drain", "0.1", "--json")
    until(place.begun)
    first.send_signal(number)
    ended, out, err = ends(first)
    assert (ended, err) == (status, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["started", "ended"]
    assert lines[1]["left"] == ["run"]
    with place.look() as ledger:
        assert ledger.inspect("run").in_doubt == [1]


LIBRARY = """
import signal, sys, time
import app
worker = app.ledger.worker(poll_seconds=0.05)
try:
    print("ready", flush=True)
    {waits}
    print("returned", flush=True)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ("time.sleep(600)", ["cleaned up"]),
        ("worker.run()", ["returned", "cleaned up"]),
        ("app.await_file('nothing')", ["cleaned up"]),
        ("import threading; threading.Event().wait()", ["cleaned up"]),
    ],
    ids=["sleeps", "runs", "loops", "waits for a lock"],
)
def test_a_program_whose_worker_was_started_in_its_main_thread_ends_with_status_0_when_it_is_drained(
    place: Place, waits: str, said: list[str]
) -> None:
    place.submit("waits", "go", "run")
    process = place.start("-c", LIBRARY.format(waits=waits))
    until(place.begun)
    process.terminate()
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        (place.folder / "go").touch()
        assert ends(process) == (0, "\n".join(["ready", *said, ""]), "")
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED"]
        assert ledger.get_run("run").owner is None


ASLEEP = """
import signal, threading
import app

def send():
    app.await_file("now")
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    app.await_file("never")

worker = app.ledger.worker(poll_seconds=0.05)
threading.Thread(target=send, daemon=True).start()
threading.Event().wait()
"""


@contextmanager
def drained_asleep(place: Place) -> Iterator[tuple[subprocess.Popen[str], AgentRunLedger]]:
    """A program whose worker drains by such a signal while a step of it is in flight, and a ledger to look with."""
    place.submit("waits", "go", "run")
    process = place.start("-c", ASLEEP)
    until(place.begun)
    (place.folder / "now").touch()
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        yield process, ledger


def test_a_signal_that_does_not_wake_the_main_thread_drains_all_the_same(place: Place) -> None:
    with drained_asleep(place) as (process, ledger):
        (place.folder / "go").touch()
        assert ends(process) == (0, "", "")
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED"]
        assert ledger.get_run("run").owner is None


def test_the_signal_after_one_that_did_not_wake_the_main_thread_ends_the_process_at_once(place: Place) -> None:
    with drained_asleep(place) as (process, ledger):
        process.terminate()
        assert ends(process) == (-signal.SIGTERM, "", "")
        assert ledger.get_run("run").owner is not None


TAKES_OVER = """
import os, signal, time
import app

worker = app.ledger.worker(poll_seconds=0.05)
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
app.await_file("now")
os.kill(os.getpid(), signal.SIGTERM)
app.await_file("go")
until = time.monotonic() + 1.0
while time.monotonic() < until:
    time.sleep(0.01)
print(len(heard), worker.state, flush=True)
"""


def test_a_signal_that_the_program_has_taken_over_since_is_left_to_it(place: Place) -> None:
    place.submit("waits", "go", "run")
    process = place.start("-c", TAKES_OVER)
    until(place.begun)
    (place.folder / "now").touch()
    (place.folder / "go").touch()
    assert ends(process) == (0, "1 running\n", "")


def test_a_signal_to_a_forked_child_is_none_to_its_parent(place: Place) -> None:
    place.submit("waits", "go", "run")
    process = place.start("-c", FORKS)
    until(place.begun)
    until((place.folder / "ended").exists)
    (place.folder / "go").touch()
    with place.look() as ledger:
        until(lambda: ledger.get_run("run").status == "COMPLETED")
        assert [each.state for each in ledger.workers()] == ["running"]
    process.terminate()
    assert ends(process) == (0, f"{-signal.SIGTERM}\n", "")


FORKS = """
import multiprocessing, pathlib, time
import app

worker = app.ledger.worker(poll_seconds=0.05)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join()
print(child.exitcode, flush=True)
pathlib.Path("ended").touch()
worker.run()
"""


def test_ctrl_c_in_a_program_that_waits_for_its_worker_drains_it(place: Place) -> None:
    place.submit("waits", "go", "run")
    process = place.start("-c", LIBRARY.format(waits="worker.run()"))
    until(place.begun)
    process.send_signal(signal.SIGINT)
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        (place.folder / "go").touch()
        assert ends(process) == (0, "ready\nreturned\ncleaned up\n", "")
        assert ledger.get_run("run").owner is None


def test_a_program_that_comes_to_its_end_drains_its_worker_first(place: Place) -> None:
    place.submit("waits", "go", "run")
    process = place.start("-c", LIBRARY.format(waits="app.await_file('end')"))
    until(place.begun)
    (place.folder / "end").touch()
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        process.terminate()  # it ends already
        (place.folder / "go").touch()
        assert ends(process) == (0, "ready\nreturned\ncleaned up\n", "")
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED"]


def test_a_forked_child_has_no_worker_and_ends_as_it_likes(place: Place) -> None:
    script = """
import os
pid = os.fork()
if pid == 0:
    worker.stop()
    app.ledger.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert worker.state == "running"
worker.stop()
"""
    process = place.start("-W", "ignore::DeprecationWarning", "-c", LIBRARY.replace("    {waits}\n", _indented(script)))
    assert ends(process) == (0, "ready\nreturned\ncleaned up\n", "")


def _indented(script: str) -> str:
    return "".join(f"    {line}\n" for line in script.splitlines())


def test_a_forked_child_of_a_worker_dies_of_the_signal_as_any_process(place: Place) -> None:
    script = """
import os
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""
    process = place.start("-W", "ignore::DeprecationWarning", "-c", LIBRARY.replace("    {waits}\n", _indented(script)))
    assert ends(process) == (0, "ready\nreturned\ncleaned up\n", "")


def test_it_drains_under_a_supervisor(place: Place) -> None:
    place.submit("waits", "go", "run")
    command = [sys.executable, "-m", "agent_run_ledger", "worker", "app", "--poll", "0.05"]
    process = place.start("-m", "agent_run_ledger", "supervise", "--", *command)
    until(place.begun)
    process.terminate()
    with place.look() as ledger:
        until(lambda: [each.state for each in ledger.workers()] == ["draining"])
        (place.folder / "go").touch()
        status, out, _ = ends(process)
        assert status == 0
        assert out.splitlines()[-1].endswith("every run was given back")
        assert ledger.get_run("run").owner is None
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED"]


def test_a_worker_that_dies_under_a_supervisor_is_started_again_and_goes_on(place: Place) -> None:
    place.submit("waits", "go", "run")
    command = [sys.executable, "-m", "agent_run_ledger", "worker", "app", "--poll", "0.05"]
    process = place.start("-m", "agent_run_ledger", "supervise", "--backoff-base", "0.01", "--", *command)
    until(place.begun)
    with place.look() as ledger:
        (first,) = ledger.workers()
        os.kill(first.pid, signal.SIGKILL)
        (place.folder / "go").touch()
        until(lambda: ledger.get_run("run").status == "COMPLETED")
    process.terminate()
    assert ends(process)[0] == 0
    assert Counter(note["step"] for note in place.witness.notes("begun")) == {"slow": 2, "quick 1": 1}


# --- killed and stopped -----------------------------------------------------------------------------------------------


STANDS_SECONDS = 5.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_are_killed_and_stopped_bring_every_run_to_its_end_and_repeat_nothing_that_is_recorded(
    place: Place, seed: int
) -> None:
    chance = random.Random(seed)
    count, terms = 80, json.dumps({"lease_seconds": 1.0, "heartbeat_seconds": 0.2})
    for number in range(count):
        place.submit("steps", 10 * number, f"run {number}")
    settings = {"LEDGER": terms, "PAUSE": "0.1"}
    workers = [place.worker("--concurrency", "4", **settings) for _ in range(3)]
    disturbed, came = 0, 0
    with place.look() as ledger:
        while disturbed < 4:
            came += 30
            until(lambda came=came: len(place.witness.notes("begun")) >= came or _are_done(ledger))
            victim = chance.randrange(3)
            if workers[victim].poll() is None and chance.random() < 0.5:
                workers[victim].kill()
                workers[victim].wait()
                workers[victim] = place.worker("--concurrency", "4", **settings)
            else:
                _stand_still(workers[victim], ledger)
            disturbed += 1
        until(lambda: _are_done(ledger))
        assert len(ledger.runs()) == count
        assert [run.result for run in ledger.runs()] == [[10 * n + step for step in range(4)] for n in range(count)]
        assert ledger.verify().findings == []
        until(lambda: {worker.pid for worker in workers} <= {each.pid for each in ledger.workers()})
        for worker in workers:
            worker.terminate()
        assert [ends(worker)[0] for worker in workers] == [0, 0, 0]
        assert [each.owner for each in ledger.runs()] == [None] * count
    _expect_nothing_recorded_was_called_again(place, 4 * count)


def _are_done(ledger: AgentRunLedger) -> bool:
    return all(run.status == "COMPLETED" for run in ledger.runs())


def _stand_still(worker: subprocess.Popen[str], ledger: AgentRunLedger) -> None:
    """Stop a worker until its leases are over and others have its runs, then let it go on and find out."""
    worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
    names = [each.name for each in ledger.workers() if each.pid == worker.pid]
    end = time.monotonic() + STANDS_SECONDS  # one that was stopped while it wrote keeps all others from writing
    until(lambda: time.monotonic() > end or not any(run.owner in names for run in ledger.runs()))
    worker.send_signal(signal.SIGCONT)


def _expect_nothing_recorded_was_called_again(place: Place, count: int) -> None:
    """Each step has one outcome, and every call of it began before that was written."""
    began: dict[tuple[str, str], float] = {}
    for note in place.witness.notes("begun"):
        began[note["run"], note["step"]] = max(note["at"], began.get((note["run"], note["step"]), 0.0))
    assert len(began) == count
    with place.look() as ledger:
        for run in ledger.runs():
            steps = ledger.steps(run.run_id)
            assert [step.state for step in steps] == ["COMPLETED"] * 4
            for step in steps:
                number = json.loads(step.arguments_json or "")["number"]
                assert step.completed_at is not None
                assert began[run.run_id, f"quick {number}"] <= step.completed_at
    with raw(place.path) as db:
        outcomes = db.execute(
            "SELECT run_id, position, count(*) AS n FROM entries WHERE kind = 'outcome' GROUP BY 1, 2"
        )
        assert {row["n"] for row in outcomes} == {1}


@pytest.mark.slow
def test_children_are_spread_over_processes_and_their_parent_is_told_once(place: Place) -> None:
    AgentRunLedger(place.path).close()
    workers = [place.worker("--concurrency", "2", PAUSE="0.01") for _ in range(3)]
    with place.look() as ledger:
        until(lambda: len(ledger.workers()) == 3)
        place.submit("fans", 60, "parent")
        until(lambda: ledger.get_run("parent").status == "COMPLETED")
        assert ledger.get_run("parent").result == sum(range(60))
        assert ledger.verify().findings == []
    for worker in workers:
        worker.terminate()
    assert [ends(worker)[0] for worker in workers] == [0, 0, 0]
    notes = place.witness.notes("begun")
    assert len(notes) == 60
    assert len({note["pid"] for note in notes}) > 1


def test_a_process_that_begins_many_handles_waits_for_workers_elsewhere(place: Place) -> None:
    worker = place.worker()
    script = """
import asyncio
sys.path.insert(0, arguments[0])
import os; os.chdir(arguments[0])
import app

async def main():
    handles = [await app.ledger.asubmit(app.steps, 10 * number) for number in range(10)]
    return await asyncio.gather(*(handle.aresult(60) for handle in handles))

tell(asyncio.run(main()))
app.ledger.close()
"""
    with child(script, place.folder) as program:
        assert program.hear() == [[10 * n + step for step in range(4)] for n in range(10)]
        assert program.ends() == 0
    worker.terminate()
    assert ends(worker)[0] == 0
