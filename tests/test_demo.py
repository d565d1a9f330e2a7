"""The demo: what it promises is asked of the service's own database and of a model endpoint that counts for itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.cli import main
from agent_run_ledger.demo import models, stage
from agent_run_ledger.demo.bookkeeping import Books, Refused
from agent_run_ledger.demo.models import ModelSettings, ScriptedModel

SOURCE = Path(__file__).resolve().parent.parent / "src"
NO_MODEL = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
MOST_SECONDS = 100


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agent_run_ledger", "demo", *arguments]


def played(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A demo in a process of its own that keeps its files in `folder`."""
    return subprocess.run(
        command("--keep", str(folder), *options),
        env=NO_MODEL | {"PYTHONPATH": str(SOURCE)} | environment,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )


def examples_in_the_help_of(*command: str) -> list[str]:
    """The command lines that `--help` shows as examples."""
    shown = subprocess.run(
        [sys.executable, "-m", "agent_run_ledger", *command, "--help"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return re.findall(r"^(?:example:|  (?=\S*=\S* agent-run-ledger)|  (?=agent-run-ledger)) *(.*)$", shown, re.M)


def asked_of_the_service(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "books.db")) as books:
        return books.execute(statement).fetchall()


def living_programs_of(folder: Path) -> list[str]:
    """The command lines of all processes that name the folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if process.name.isdecimal() and str(folder) in line:
            found.append(line)
    return found


# --- the scripted model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage") / "demo"


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    """Played as the example in the help of `demo` says."""
    (example,) = examples_in_the_help_of("demo")
    done = subprocess.run(
        [sys.executable, "-m", "agent_run_ledger", *shlex.split(example)[1:], "--json"],
        cwd=folder.parent,
        env=NO_MODEL | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_the_demo_holds_every_promise_that_it_lists(figures: dict[str, Any]) -> None:
    assert figures["ok"] is True
    assert [each["promise"] for each in figures["promises"] if not each["held"]] == []
    assert len(figures["promises"]) == 9


def test_the_agent_dies_of_sigkill_in_step_38_of_45_with_a_posting_in_doubt(figures: dict[str, Any]) -> None:
    assert figures["model"] == {"name": "scripted", "is_scripted": True}
    assert figures["crash"] == {
        "signal": "SIGKILL", "exit_status": -signal.SIGKILL, "step": 38, "tool": "post_entry", "steps_in_doubt": [38],
    }  # fmt: skip
    assert (figures["run"]["status"], figures["run"]["steps"], figures["steps_replayed"]) == ("COMPLETED", 45, 37)


def test_the_run_went_to_its_new_owner_before_anybody_could_have_waited_for_a_lease(figures: dict[str, Any]) -> None:
    with AgentRunLedger.open_read_only(figures["ledger"]) as ledger:
        tokens = [step.fencing_token for step in ledger.steps(figures["run"]["run_id"])]
    assert tokens == [1] * 37 + [2] * 8
    with closing(sqlite3.connect(figures["ledger"])) as connection:
        lease = connection.execute("SELECT lease_seconds FROM runs WHERE run_id = ?", (figures["run"]["run_id"],))
        assert lease.fetchone()[0] > stage._WAIT_FOR_A_MODEL_SECONDS


def test_the_service_has_booked_each_paid_invoice_once(figures: dict[str, Any], folder: Path) -> None:
    booked = asked_of_the_service(folder, "SELECT invoice, count(*) FROM entries GROUP BY invoice ORDER BY invoice")
    assert booked == [(f"INV-{number}", 1) for number in (1041, 1042, 1043, 1045, 1046, 1047)]
    assert figures["postings"] == {
        "requests": 7, "keys": 6, "sent_more_than_once": 1, "deduplicated": 1, "booked": 6, "duplicates": 0,
        "booked_again_by_the_model": 0,
    }  # fmt: skip


def test_the_posting_in_doubt_was_sent_twice_with_one_key_and_no_other_was(
    figures: dict[str, Any], folder: Path
) -> None:
    posts = asked_of_the_service(folder, "SELECT step, key, note FROM requests WHERE method = 'POST' ORDER BY id")
    assert [(step, note) for step, _, note in posts] == [
        *((step, "booked") for step in (10, 16, 22, 32, 38)), (38, "deduplicated"), (44, "booked"),
    ]  # fmt: skip
    assert posts[4][1] == posts[5][1]
    assert len({key for _, key, _ in posts}) == 6


def test_no_model_call_and_no_other_tool_call_was_repeated(figures: dict[str, Any], folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "calls.log").read_text().splitlines()]
    keys = [(line["tool"], line["key"]) for line in lines if "tool" in line]
    assert figures["model_calls"] == {"made": 23, "repeated": 0}
    assert figures["tool_calls"] == {"made": 23, "repeated": 1}
    assert len({key for tool, key in keys if tool == "call_model"}) == 23
    assert len(keys) == 46
    assert [tool for tool, key in keys if keys.count((tool, key)) > 1] == ["post_entry"] * 2


def test_the_runaway_loop_reached_the_service_three_times(figures: dict[str, Any], folder: Path) -> None:
    fetched = asked_of_the_service(folder, "SELECT path, answer FROM requests WHERE method = 'GET'")
    assert fetched == [("/invoices/INV-9999", 404)] * 3
    assert figures["runaway"]["calls_asked_for"] == 4
    assert figures["runaway"]["status"] == "DEAD_LETTER"


def test_the_figures_are_measured(figures: dict[str, Any]) -> None:
    recovery = figures["recovery"]
    assert 0 < recovery["seconds_from_first_line_of_main"] < recovery["seconds_from_process_start"] < figures["seconds"]
    assert 0 < figures["tokens"]["saved"] < figures["tokens"]["paid"]
    assert figures["tokens"]["is_estimate"] is True
    assert figures["verification"] == {"ok": True, "entries": 101, "runs": 2, "findings": []}


def test_the_kept_ledger_is_an_ordinary_one(figures: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--db", figures["ledger"], "show", figures["run"]["run_id"], "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["step_number"] for step in steps] == list(range(1, 46))
    assert [step["step_number"] for step in steps if step["attempts"] == 2] == [38]


@pytest.mark.parametrize("command", [[], ["runs"], ["show"], ["verify"], ["doctor"]])
def test_every_example_in_the_help_works_on_the_kept_demo(
    figures: dict[str, Any], folder: Path, tmp_path: Path, command: list[str]
) -> None:
    program = tmp_path / "agent-run-ledger"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m agent_run_ledger "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    examples = examples_in_the_help_of(*command)
    assert len(examples) == (1 if command else 5)
    for example in examples:
        if " demo --keep " in example:
            continue  # the demo that is looked at
        done = subprocess.run(
            ["sh", "-c", example],
            cwd=folder.parent,
            env=NO_MODEL | {"PYTHONPATH": str(SOURCE), "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), example
        assert "no run is" not in done.stdout, example


def test_a_finished_agent_that_is_started_again_calls_nobody(figures: dict[str, Any], folder: Path) -> None:
    calls = (folder / "calls.log").read_text().count('"tool"')
    places = ("--ledger", figures["ledger"], "--data", str(folder / "data"), "--witness", str(folder / "calls.log"))
    again = subprocess.run(
        [sys.executable, "-m", "agent_run_ledger.demo.agent", *places, "--service", "http://127.0.0.1:1"],
        env=NO_MODEL | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert (again.returncode, again.stderr) == (0, "")
    assert [json.loads(line)["is_replayed"] for line in again.stdout.splitlines()] == [True] * 45
    assert (folder / "calls.log").read_text().count('"tool"') == calls


def test_the_reference_names_every_figure(figures: dict[str, Any]) -> None:
    reference = (SOURCE.parent / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    paragraph = reference[reference.index("`demo --json` prints") :]
    assert set(re.findall(r"`(\w+)`", paragraph)) == {*figures, "promise", "held"}


def test_the_demo_leaves_no_process_behind(figures: dict[str, Any], folder: Path) -> None:
    assert figures["ok"]
    assert living_programs_of(folder) == []


def test_people_are_told_the_same_and_nothing_is_kept_unless_asked_for(tmp_path: Path) -> None:
    environment = NO_MODEL | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for said in (
        "a scripted model",
        "23 made, 0 repeated",
        "1 sent twice, booked once",
        "recovery",
        "tokens saved",
        "DEAD_LETTER",
    ):
        assert said in done.stdout
    assert "BROKEN" not in done.stdout
    assert "\x1b" not in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_broken_promise_is_shown_and_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(stage, "SCRIPTED_STEPS", 46)
    assert main(["demo"]) == 1
    assert "BROKEN  the run went on and completed" in capsys.readouterr().out


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mine"]


# --- any OpenAI-compatible endpoint -----------------------------------------------------------------------------------


class Endpoint(ThreadingHTTPServer):
    """Speaks chat.completions, and notes what it was asked. It answers as the scripted model would, or never."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), EndpointHandler)
        self.answers = answers
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.was_asked = threading.Event()
        self.is_over = threading.Event()
        self.base = f"http://127.0.0.1:{self.server_address[1]}/v1"


class EndpointHandler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], asked))
        self.server.was_asked.set()
        if not self.server.answers:
            self.server.is_over.wait()
            return
        message = ScriptedModel()("any", asked["messages"])["message"] | {"refusal": None}
        usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
        answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    server = Endpoint(answers=getattr(request, "param", True))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_any_openai_compatible_endpoint_drives_the_demo(endpoint: Endpoint, tmp_path: Path) -> None:
    done = played(
        tmp_path / "kept",
        "--json",
        OPENAI_BASE_URL=endpoint.base,
        OPENAI_MODEL="some-model",
        OPENAI_API_KEY="no-secret",
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["model"] == {"name": "some-model", "is_scripted": False}
    assert {(path, key, asked["model"]) for path, key, asked in endpoint.asked} == {
        ("/v1/chat/completions", "Bearer no-secret", "some-model")
    }
    conversations = [json.dumps(asked["messages"]) for _, _, asked in endpoint.asked]
    assert len(conversations) == len(set(conversations)) == figures["model_calls"]["made"] == 23
    assert figures["model_calls"]["repeated"] == 0
    assert figures["crash"]["step"] == 22, "the first posting from step 20 on"
    assert figures["tokens"] == {"paid": 23 * 1010, "saved": 11 * 1010, "is_estimate": False}
    booked = asked_of_the_service(tmp_path / "kept", "SELECT count(*), count(DISTINCT invoice) FROM entries")
    assert booked == [(6, 6)]


def test_the_conversation_offers_the_tools_and_tells_what_came_of_each_call(endpoint: Endpoint, tmp_path: Path) -> None:
    assert played(tmp_path / "kept", OPENAI_BASE_URL=endpoint.base, OPENAI_MODEL="m").returncode == 0
    _, key, asked = endpoint.asked[-1]
    assert key is None, "an endpoint without a key, like Ollama, is asked without one"
    assert {tool["function"]["name"] for tool in asked["tools"]} == {
        "list_invoices", "read_bank", "read_invoice", "find_match", "post_entry",
    }  # fmt: skip
    calls = [call["id"] for message in asked["messages"] for call in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in asked["messages"] if message["role"] == "tool"]
    assert len(calls) == 22


@pytest.mark.parametrize("endpoint", [False], indirect=True)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_demo_is_quiet_and_leaves_nothing_behind(
    endpoint: Endpoint, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    environment = NO_MODEL | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        command("--json"),
        env=environment | {"OPENAI_BASE_URL": endpoint.base, "OPENAI_MODEL": "m"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert endpoint.was_asked.wait(MOST_SECONDS)
        assert len(living_programs_of(tmp_path)) == 2
        demo.send_signal(number)
        out, err = demo.communicate(timeout=MOST_SECONDS)
    finally:
        demo.kill()
        demo.wait()
    assert (demo.returncode, out) == (status, "")
    assert "Traceback" not in err
    assert living_programs_of(tmp_path) == []
    assert os.listdir(tmp_path) == []


@pytest.fixture
def ignored_hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("ignored_hangup")
def test_a_demo_under_nohup_goes_on_after_a_hangup() -> None:
    with stage._ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_second_signal_does_not_end_the_cleaning_up() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)]
    cleaned = []

    def ended_and_cleans_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            clean()

    def clean() -> None:
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        cleaned.append("all")

    with pytest.raises(SystemExit) as end, stage._ended_by_signals():
        ended_and_cleans_up()
    assert (end.value.code, cleaned) == (129, ["all"])
    assert [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)] == before


def test_a_model_that_cannot_be_reached_is_said_in_one_line(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.shutdown()
    endpoint.server_close()
    done = played(tmp_path / "kept", "--json", OPENAI_BASE_URL=endpoint.base, OPENAI_MODEL="m")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Connection refused" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_endpoint_without_a_model_name_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = played(tmp_path / "kept", OPENAI_BASE_URL="http://127.0.0.1:1/v1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "OPENAI_MODEL" in done.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "environment", [{"OPENAI_BASE_URL": "http://h/v1"}, {"OPENAI_BASE_URL": "ftp://h", "OPENAI_MODEL": "m"}]
)
def test_half_a_setting_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ModelSettings):
        models.chosen(environment)


def test_a_key_alone_sends_nothing_to_anybody() -> None:
    assert isinstance(models.chosen({"OPENAI_API_KEY": "secret"}), ScriptedModel)


# --- the bookkeeping service ------------------------------------------------------------------------------------------


def entry(debit: str, credit: str) -> str:
    return json.dumps({"invoice": "INV-1", "lines": [{"debit": debit}, {"credit": credit}]})


def test_the_service_books_a_key_once_and_logs_every_request(tmp_path: Path) -> None:
    books = Books(str(tmp_path / "books.db"))
    assert books.post("key", 1, entry("1.00", "1.00")) == (1, False)
    assert books.post("key", 1, entry("1.00", "1.00")) == (1, True)
    assert books.post("other", 2, entry("1.00", "1.00")) == (2, False)
    assert asked_of_the_service(tmp_path, "SELECT key, note FROM requests") == [
        ("key", "booked"),
        ("key", "deduplicated"),
        ("other", "booked"),
    ]


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("key", entry("2.00", "2.00"), 409),
        ("new", entry("1.00", "2.00"), 422),
        ("new", entry("0", "0"), 422),
        ("new", "[]", 422),
        ("new", "no json", 422),
        ("new", '{"invoice": 1, "lines": [{"debit": "x"}]}', 422),
    ],
)
def test_the_service_refuses_what_it_cannot_book(tmp_path: Path, key: str, body: str, status: int) -> None:
    books = Books(str(tmp_path / "books.db"))
    books.post("key", 1, entry("1.00", "1.00"))
    with pytest.raises(Refused) as refused:
        books.post(key, 2, body)
    assert refused.value.status == status
    assert asked_of_the_service(tmp_path, "SELECT count(*) FROM entries") == [(1,)]
