"""`workers`, `wake`, `runs --stuck` and `worker`, on the command line: what they show, refuse, and end with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect
from agent_run_ledger.testing import FakeClock
from support.pumping import pump
from support.shell import NAMES, Shell, is_safe

RUN = "run"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger in the current folder, in which the modules of a test lie; what is imported from it is forgotten again."""
    known, places = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "agent.db"
    for name in set(sys.modules) - known:
        del sys.modules[name]
    sys.path[:] = places


def submitted(path: Path, *run_ids: str, **options: Any) -> None:
    """Runs that wait for a worker."""
    with AgentRunLedger(path) as ledger:
        agent = ledger.agent(name="agent")(lambda number=0: number)
        for run_id in run_ids:
            ledger.submit(agent, run_id=run_id, **options)


def says(path: Path, name: str, **said: Any) -> None:
    """A worker says that it lives."""
    words = {"state": "running", "queues": ["default"], "agents": ["agent"], "concurrency": 8, "lease_seconds": 3600}
    words |= {"host": "build-7", "pid": 17, "started_at": 1.0, "running": ["a"], "running_count": 1}
    with AgentRunLedger(path) as ledger:
        ledger._store.beat(name, json.dumps(words | said).encode())


# --- workers ----------------------------------------------------------------------------------------------------------


def test_workers_are_listed_with_what_they_do(shell: Shell, path: Path) -> None:
    AgentRunLedger(path).close()
    assert shell("--db", path, "workers") == (0, "no worker has been heard of in the last day\n", "")
    says(path, "one")
    says(path, "two", lease_seconds=1e-9, queues=["a", "b"])
    status, out, err = shell("--db", path, "workers")
    assert (status, err) == (0, "")
    heads, one, two = (line.split("  ") for line in out.splitlines())
    assert [head for head in heads if head] == [
        "WORKER", "HOST", " PID", "STATE", " RUNS", "STARTED", " HEARD OF", " QUEUES",
    ] or out.startswith("WORKER")  # fmt: skip
    assert "build-7" in out
    assert "running" in "  ".join(one)
    assert "1 of 8" in "  ".join(one)
    assert "silent" in "  ".join(two)
    assert "  ".join(two).endswith("a, b")
    first, second = shell.json("--db", path, "workers")["workers"]
    assert (first["name"], first["is_alive"], first["running"], first["pid"]) == ("one", True, ["a"], 17)
    assert second["is_alive"] is False


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_are_data_in_every_line(shell: Shell, path: Path, name: str) -> None:
    submitted(path, name, queue=name)
    says(path, name, queues=[name], agents=[name], host=name, state=name)
    for command in (
        ["workers"],
        ["runs"],
        ["runs", "--stuck", "--after", "0"],
        ["show", "--", name],
        ["wake", "--", name],
    ):
        _, out, err = shell("--db", path, *command)
        assert is_safe(out), command
        assert err == ""
        _, out, _ = shell("--db", path, "--json", *command)
        assert out.isascii()
        json.loads(out)


# --- stuck runs -------------------------------------------------------------------------------------------------------


def test_stuck_runs_are_listed_with_their_reasons_and_the_status_says_that_there_are_some(
    shell: Shell, path: Path
) -> None:
    submitted(path, "one", "two", queue="books")
    status, out, _ = shell("--db", path, "runs", "--stuck")
    assert (status, out) == (0, "every run that somebody should go on with has got on within the last 5 min\n")
    status, out, err = shell("--db", path, "runs", "--stuck", "--after", "0")
    assert (status, err) == (1, "")
    assert out.count("no live worker serves its queue 'books'") == 2
    data = shell.json("--db", path, "runs", "--stuck", "--after", "0")["stuck"]
    assert [(each["run_id"], each["kind"]) for each in data] == [("one", "no_worker"), ("two", "no_worker")]
    assert shell("--db", path, "runs", "--stuck", "--after", "0", "--limit", "1")[1].count("books") == 1
    assert shell("--db", path, "runs", "--stuck", "--after", "0", "--status", "RUNNING")[0] == 0


@pytest.mark.parametrize("given", ["-1", "soon", "nan", "inf", ""])
def test_a_time_that_is_none_is_refused(shell: Shell, path: Path, given: str) -> None:
    AgentRunLedger(path).close()
    assert "a number of seconds of at least 0 is needed" in shell.refused(
        "--db", path, "runs", "--stuck", f"--after={given}"
    )


def test_after_is_about_stuck_runs(shell: Shell, path: Path) -> None:
    AgentRunLedger(path).close()
    assert "give --stuck with it" in shell.refused("--db", path, "runs", "--after", "5")


# --- waking -----------------------------------------------------------------------------------------------------------


def test_a_woken_run_is_due_and_whether_somebody_takes_it_is_said(shell: Shell, path: Path) -> None:
    submitted(path, RUN, delay=3600)
    assert "(due in 1 h" in shell("--db", path, "runs")[1]
    status, out, err = shell("--db", path, "wake", RUN)
    assert (status, err) == (0, "")
    assert out == "Run 'run' is due: a worker of its queue 'default' takes it; but no live worker serves it.\n"
    says(path, "one")
    assert shell("--db", path, "wake", RUN)[1] == "Run 'run' is due: a worker of its queue 'default' takes it.\n"
    data = shell.json("--db", path, "wake", RUN)
    assert (data["is_served"], data["run"]["queue"]) == (True, "default")
    assert data["run"]["due_in_seconds"] <= 0


def test_what_cannot_be_woken_is_refused_in_one_line(shell: Shell, path: Path) -> None:
    with AgentRunLedger(path) as ledger:
        ledger.create_run("by hand", "by hand")
    assert "there is no run" in shell.refused("--db", path, "wake", RUN)
    assert "is in no queue" in shell.refused("--db", path, "wake", "by hand")
    submitted(path, RUN)
    with AgentRunLedger(path) as ledger:
        ledger.cancel(RUN)
    assert "WAKE" in shell.refused("--db", path, "wake", RUN)


def test_a_parked_run_of_a_queue_is_shown_with_the_command_that_wakes_it(shell: Shell, path: Path) -> None:
    clock = FakeClock()
    with AgentRunLedger(path, clock=clock) as ledger:

        def leaves() -> None:
            raise SystemExit("stopped")

        ledger.submit(ledger.agent(name="leaves")(leaves), run_id=RUN)
        with pytest.raises(SystemExit):
            pump(ledger, clock)
    _, out, _ = shell("--db", path, "show", RUN)
    assert "queue:         default (not due)" in out
    assert f"agent-run-ledger --db {path} wake run" in out
    assert shell.json("--db", path, "show", RUN)["waits_for"][0]["kind"] == "program"


def test_a_run_that_waits_for_a_worker_needs_nobody(shell: Shell, path: Path) -> None:
    submitted(path, RUN)
    assert shell.json("--db", path, "show", RUN)["waits_for"][0]["kind"] == "worker"
    _, out, _ = shell("--db", path, "show", RUN)
    assert "This run waits for a worker of queue 'default' (due for" in out
    checks = {check["name"]: check for check in shell.json("--db", path, "doctor")["checks"]}
    assert checks["waiting"]["level"] == "ok"
    assert "1 run ('run') waiting" in checks["waiting"]["message"]


# --- a worker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "0"], "a whole number of at least 1 is needed"),
        (["--concurrency", "20000"], "concurrency is a whole number from 1 to 10000"),
        (["--queue", ""], "queue is empty"),
        (["--queue", "a\x1b[31m"], "holds the control character"),
        (["--poll", "0"], "a number of seconds is needed"),
        (["--drain", "-1"], "a number of seconds of at least 0 is needed"),
        (["--health", "nowhere"], "an address like 127.0.0.1:8080 is needed"),
        (["--health", "127.0.0.1:99999"], "an address like 127.0.0.1:8080 is needed"),
        (["--name", ""], "name is empty"),
    ],
)
def test_a_worker_that_cannot_be_is_refused_in_one_line(
    shell: Shell, path: Path, options: list[str], said: str
) -> None:
    _app(path)
    assert said in shell.refused("worker", "app", *options)


def _app(path: Path, text: str = "ledger.agent(name='agent')(lambda: None)") -> None:
    module = f"from agent_run_ledger import AgentRunLedger\nledger = AgentRunLedger('agent.db')\n{text}\n"
    (path.parent / "app.py").write_text(module, encoding="utf-8")


def test_a_program_without_agents_has_nothing_to_work_on(shell: Shell, path: Path) -> None:
    _app(path, "")
    assert "a ledger without agents" in shell.refused("worker", "app")
    with AgentRunLedger(path) as ledger:
        assert ledger.workers() == []


def test_a_module_that_cannot_be_imported_is_said_so(shell: Shell, path: Path) -> None:
    assert "there is no module 'nowhere'" in shell.refused("worker", "nowhere")


def test_a_worker_says_what_it_works_on_and_how_it_ended(shell: Shell, path: Path) -> None:
    """The agent itself has the worker end."""
    _app(path, "ledger.agent(name='agent')(lambda: [worker.drain() for worker in ledger._workers] and None)")
    with AgentRunLedger(path) as ledger:
        ledger.submit(ledger.agent(name="agent")(lambda: None), run_id=RUN, queue="books")
    options = ["worker", "app", "--queue", "books", "--queue", "more", "--name", "w", "--health", "127.0.0.1:0"]
    status, out, err = shell(*options)
    assert (status, err) == (0, "")
    began, ended = out.splitlines()
    assert began.startswith("worker w-")
    assert (
        "works on up to 8 runs at once of queues books, more, for the agents agent; health at http://127.0.0.1:"
        in began
    )
    assert ended.endswith(": every run was given back")
    with AgentRunLedger.open_read_only(path) as ledger:
        assert ledger.get_run(RUN).status == "COMPLETED"


def test_with_json_each_line_is_an_object_whatever_the_program_prints(shell: Shell, path: Path) -> None:
    _app(
        path, "def agent():\n    print('noise')\n    [each.drain() for each in ledger._workers]\nledger.agent()(agent)"
    )
    with AgentRunLedger(path) as ledger:
        ledger.submit(ledger.agent(name="agent")(lambda: None), run_id=RUN)
    status, out, err = shell("worker", "app", "--json")
    assert (status, err) == (0, "noise\n")
    began, ended = map(json.loads, out.splitlines())
    assert (began["event"], began["queues"], began["agents"], began["health"]) == (
        "started",
        ["default"],
        ["agent"],
        None,
    )
    assert (ended["event"], ended["left"], ended["worker"]) == ("ended", [], began["worker"])


def test_a_health_address_that_is_taken_is_said_in_one_line(shell: Shell, path: Path) -> None:
    import socket

    _app(path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in shell.refused("worker", "app", "--health", f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_redriven_run_of_a_queue_is_said_to_need_a_wake(shell: Shell, path: Path) -> None:
    clock = FakeClock()
    with AgentRunLedger(path, clock=clock) as ledger:

        def fails() -> None:
            raise ValueError("no")

        ledger.submit(ledger.agent(name="fails")(fails), run_id=RUN)
        ledger.tool(name="unused", effect=Effect.READ)(lambda: None)
        pump(ledger, clock)
    status, out, _ = shell("--db", path, "redrive", RUN, "--as", "new", "--yes")
    assert (status, "Done: run 'new' was made and not started." in out) == (0, True)
    assert "wake new" in shell("--db", path, "show", "new")[1]
