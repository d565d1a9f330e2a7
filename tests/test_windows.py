"""What leaves a ledger to be looked at: no command, error, warning or log line shows a secret that the ledger holds."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    IntentDrift,
    InvalidArguments,
    InvalidPrivateList,
    ReplayDivergence,
    RunawayLoopDetectedException,
    StepFailed,
    current_run,
    redacted,
    redacting,
)
from agent_run_ledger.cli.commands import _parser
from agent_run_ledger.fleet.worker import _log
from support.ledgers import never, raising
from support.processes import environment
from support.shell import Shell

SECRETS = {
    "by its name": "corr3ct-horse",
    "in a header": "hdr-Zx81-tok",
    "in an address": "p4ss-in-address",
    "in a query": "query-parameter-77",
    "by its shape": "sk-proj-abcdefghijklmnop0123456789",
    "in JSON inside of a text": "nested-client-secret",
    "behind a quote that is escaped": "tail-of-a-quoted-one",
    "by a private name": "078-05-1120",
    "by a private value": "Project Bluebird",
    "by a private variable": "value-of-a-variable",
    "in a key of PEM": "MIIEowIBAAKCAQEA7",
}
"""One of every kind, each in no other text."""
S = list(SECRETS.values())

ARGUMENTS: dict[str, Any] = {
    "user": "ann",
    "password": S[0],
    "headers": [["Authorization", f"Bearer {S[1]}"], ["Accept", "text/html"]],
    "url": f"https://ann:{S[2]}@db.internal/x?page=2&api_key={S[3]}",
    "note": f"use {S[4]} for this",
    "body": json.dumps({"clientSecret": S[5], "other": json.dumps({"dbPassword": f'with "a" {S[6]}'})}),
    "customer": {"ssn": S[7], "project": S[8], "variable": S[9]},
    "pem": f"-----BEGIN RSA PRIVATE KEY-----\n{S[10]}\n-----END RSA PRIVATE KEY-----",
}
TEXT = f"login failed for ann: {ARGUMENTS!r} sent as {json.dumps(ARGUMENTS)}, password={S[0]}, see {ARGUMENTS['url']}"
"""What an error or a goal may say."""


class LoginFailed(Exception):
    pass


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private list of this machine."""
    path = tmp_path / "private.toml"
    path.write_text(f'names = ["ssn"]\nvalues = ["{S[8]}"]\nvariables = ["SOME_VARIABLE", "NOT_SET"]\n')
    monkeypatch.setenv("SOME_VARIABLE", S[9])
    monkeypatch.setenv("AGENT_RUN_LEDGER_PRIVATE", str(path))
    return path


@pytest.fixture
def db(made: Path, tmp_path: Path) -> Path:
    """A ledger with runs in every state that has something to show, and secrets wherever a program may put them."""
    shutil.copytree(made, tmp_path / "ledger")
    return tmp_path / "ledger" / "agent.db"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a ledger, which nobody changes."""
    path = tmp_path_factory.mktemp("made") / "agent.db"
    with AgentRunLedger(path) as ledger:
        ledger.signal(ledger.create_run(TEXT, "done"), "paid", ARGUMENTS)
        with ledger.open_run(TEXT, run_id="done") as run:
            run.step("login", ARGUMENTS, lambda: ARGUMENTS, effect=Effect.READ)
            run.wait_for("paid")
            run.result = ARGUMENTS
        for run_id, fatal in (("failed", (LoginFailed,)), ("parked", ())):
            with pytest.raises(StepFailed), ledger.open_run(TEXT, run_id=run_id) as run:
                run.step("login", ARGUMENTS, raising(LoginFailed(TEXT)), effect=Effect.READ, fatal=fatal)
        for run_id, fresh in (("looping", False), ("suspected", True)):
            with suppress(RunawayLoopDetectedException), ledger.open_run(TEXT, run_id=run_id) as run:
                for number in range(5):
                    arguments = ARGUMENTS | {"request_id": f"request-{number}" if fresh else "request"}
                    run.step("login", arguments, lambda: TEXT, effect=Effect.READ)
            assert ledger.get_run(run_id).status == ("QUARANTINE" if fresh else "DEAD_LETTER")
        with pytest.raises(KeyboardInterrupt), ledger.open_run(TEXT, run_id="in-doubt") as run:
            run.step("login", ARGUMENTS, raising(KeyboardInterrupt()), effect=Effect.MUTATE)
        begun: list[str] = []

        @ledger.agent()
        def asks(text: str) -> Any:
            begun.append(text)
            if len(begun) <= 2:
                raise LoginFailed(text)
            run = current_run()
            return run.approve("refund", ARGUMENTS) if run.run_id == "asking" else run.wait_for("paid")

        for run_id in ("asking", "waiting"):
            with pytest.raises(LoginFailed):
                ledger.run(asks, TEXT, run_id=run_id)
        ledger.recover()
        ledger.submit(asks, TEXT, run_id="queued")
    return path.parent


def digest(db: Path) -> str:
    with AgentRunLedger.open_read_only(db) as ledger:
        return ledger.approvals("asking")[0].digest


PROGRAM = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from agent_run_ledger import AgentRunLedger, current_run
from test_windows import ARGUMENTS, TEXT, LoginFailed

ledger = AgentRunLedger("agent.db", max_steps=50)

@ledger.tool()
def login(**arguments):
    raise LoginFailed(TEXT)

class Left(BaseException):
    pass

@ledger.agent()
def asks(text):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start() if "worker" in sys.argv else None
    current_run().step("login", ARGUMENTS | {{"password": "another"}}, login)
"""

JSON = json.dumps(ARGUMENTS)
OTHER = "the commands that start a program run in a process of their own"
COMMANDS: dict[str, list[list[str]] | str] = {
    "runs": [["runs"], ["runs", "--status", "BLOCKED"], ["runs", "--stuck", "--after", "0"]],
    "show": [["show", run] for run in ("done", "failed", "parked", "looping", "suspected", "in-doubt", "asking", "waiting", "queued")],
    "plan": [["plan", run] for run in ("done", "failed", "parked", "in-doubt", "asking", "waiting")],
    "trace": [["trace", run] for run in ("done", "failed", "parked", "looping", "suspected", "in-doubt", "asking", "waiting")],
    "cost": [["cost"], ["cost", "done"]],
    "budgets": [["budgets"]],
    "explain": [["explain", run] for run in ("done", "failed", "parked", "looping", "suspected", "in-doubt", "asking")],
    "dead-letters": [["dead-letters"], ["dead-letters", "--trace"]],
    "approvals": [["approvals"], ["approvals", "asking"]],
    "verify": [["verify"], ["verify", "done"]],
    "head": [["head", "done"], ["keygen", "secret", "--out", "key"], ["head", "--sign", "key", "--log", "heads.log"]],
    "export": [["export", "done", "--out", "run.arl", "--with-secret"], ["export", "done", "--out", "run.arl"], ["verify", "run.arl"]],
    "import": [["export", "done", "--out", "run.arl", "--with-secret"], ["import", "run.arl"], ["--db", "other.db", "import", "run.arl"]],
    "prove": [["prove", "done", "1"], ["prove", "done", "--since", "1"]],
    "keygen": [["keygen", "ann", "--out", "key"]],
    "doctor": [["doctor"]],
    "resolve": [
        ["resolve", "in-doubt", "1", "--output", JSON, "--reason", TEXT],
        ["resolve", "in-doubt", "1", "--not-executed", "--reason", TEXT],
        ["resolve", "in-doubt", "9", "--output", TEXT],
        ["resolve", "in-doubt", "1", "--output", JSON, "--reason", TEXT, "--yes"],
    ],
    "release": [["release", "suspected", "--reason", TEXT], ["release", "suspected", "--reason", TEXT, "--yes"]],
    "cancel": [["cancel", "in-doubt", "--reason", TEXT], ["cancel", "in-doubt", "--reason", TEXT, "--yes"]],
    "redrive": [["redrive", "failed", "--reason", TEXT], ["redrive", "looping", "--reason", TEXT, "--as", "again", "--yes"]],
    "fork": [["fork", "looping", "--from-step", "2", "--reason", TEXT], ["fork", "looping", "--from-step", "2", "--as", "other", "--yes"]],
    "signal": [["signal", "waiting", "paid", "--payload", JSON], ["signal", "waiting", "paid", "--payload", JSON, "--yes"]],
    "approve": [["approve", "asking", "refund", "--digest", "DIGEST", "--reason", TEXT]],
    "deny": [["deny", "asking", "refund", "--digest", "DIGEST", "--reason", TEXT, "--yes"], ["deny", "asking", TEXT, "--digest", "DIGEST"]],
    "forget": [["forget", "done", "--reason", TEXT], ["forget", "failed", "--all", "--reason", TEXT, "--yes"]],
    "gc": [["gc", "--older-than", "30d", "--reason", TEXT], ["gc", "--older-than", "0d", "--keep-proofs", "--reason", TEXT, "--yes"]],
    "rewrap": [["rewrap"], ["rewrap", "--yes"]],
    "copy": [["copy", "done", "failed", "--to", "other.db"]],
    "backup": [["backup", "--to", "copy.db"], ["backup", "--to", "agent.db"]],
    "restore": [["restore", "agent.db"], ["--db", "restored.db", "restore", "agent.db"]],
    "new-epoch": [["new-epoch"], ["new-epoch", "--yes"]],
    "migrate": [["migrate"], ["--db", f"postgresql://ann:{S[2]}@127.0.0.1:1/x?password={S[2]}", "migrate"]],
    "workers": [["workers"]],
    "wake": [["wake", "queued"], ["wake", "done"]],
    "worker": OTHER,
    "recover": OTHER,
    "preflight": OTHER,
    "supervise": OTHER,
    "demo": "it shows a ledger of its own, with invoices that are part of this package",
}  # fmt: skip


def commands() -> list[str]:
    (action,) = [each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return list(action.choices)


def shows_none(text: str) -> None:
    """As JSON and Python spell them, too, though none of these secrets has a character that they would spell otherwise."""
    assert [kind for kind, secret in SECRETS.items() if secret in text] == [], text


def test_every_command_of_the_command_line_is_looked_at() -> None:
    assert sorted(COMMANDS) == sorted(commands())


@pytest.mark.parametrize("command", [name for name, lines in COMMANDS.items() if not isinstance(lines, str)])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_command_shows_a_secret(
    shell: Shell,
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
    form: list[str],
) -> None:
    monkeypatch.chdir(db.parent)
    caplog.set_level(logging.DEBUG)
    said = ""
    for line in COMMANDS[command]:
        assert not isinstance(line, str)
        status, out, err = shell("--db", db, *(digest(db) if word == "DIGEST" else word for word in line), *form)
        shows_none(out + err)
        said += out
        if form and status != 2:
            json.loads(out)
    shows_none(caplog.text)
    if command in ("show", "trace", "approvals", "resolve", "explain", "dead-letters"):
        assert "[redacted]" in said  # there was something to hide


@pytest.mark.parametrize("command", ["recover", "preflight", "worker", "supervise"])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_no_command_that_starts_a_program_shows_a_secret_of_its_runs(db: Path, command: str, form: list[str]) -> None:
    (db.parent / "program.py").write_text(PROGRAM)
    line = {
        "recover": ["recover", "program"],
        "preflight": ["preflight", "program"],
        "worker": ["worker", "program", "--poll", "0.05"],
        "supervise": ["supervise", "--max-deaths", "1", "--before", f"false --password {S[0]}", "--",
                      sys.executable, "-c", "raise SystemExit(3)", f"--api-key={S[3]}", "--token", S[4], ARGUMENTS["url"]],
    }[command]  # fmt: skip
    line = [*form, *line] if command == "supervise" else [*line, *form]
    done = subprocess.run(
        [sys.executable, "-m", "agent_run_ledger", *line],
        cwd=db.parent, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout + done.stderr
    shows_none(done.stdout + done.stderr)


def test_what_is_shown_is_shown_as_it_is_to_an_operator_who_asks(shell: Shell, db: Path) -> None:
    shown = shell.json("--db", db, "show", "done", "--reveal")
    with AgentRunLedger.open_read_only(db) as ledger:
        (step, _), record = ledger.steps("done"), ledger.get_run("done")
    assert json.loads(step.arguments_json or "") == ARGUMENTS  # stored exactly, and data for the program
    assert record.goal == TEXT
    assert shown["steps"][0]["arguments_json"] == step.arguments_json
    assert shown["run"]["goal"] == TEXT
    assert S[0] in shell("--db", db, "--reveal", "trace", "failed")[1]
    assert S[0] not in shell("--db", db, "trace", "failed")[1]  # that was for the one command


def test_the_password_of_a_database_is_revealed_to_nobody(shell: Shell) -> None:
    for form in ([], ["--reveal"]):
        status, out, err = shell("--db", f"postgresql://ann:{S[2]}@127.0.0.1:1/x", *form, "runs")
        assert status == 2
        shows_none(out + err)


def test_who_approves_is_told_that_something_is_hidden(shell: Shell, db: Path) -> None:
    assert "! These arguments hold secrets" in shell("--db", db, "approvals")[1]
    assert "! These arguments hold secrets" not in shell("--db", db, "approvals", "--reveal")[1]


# --- errors, warnings and log lines -----------------------------------------------------------------------------------


def test_the_error_of_a_call_in_doubt_that_differs_shows_no_secret_and_carries_the_exact_arguments(db: Path) -> None:
    with (
        AgentRunLedger(db) as ledger,
        pytest.raises(IntentDrift) as told,
        ledger.open_run(TEXT, run_id="in-doubt") as run,
    ):
        run.step("login", ARGUMENTS | {"password": "another"}, never, effect=Effect.MUTATE)
    for secret in (S[0], S[1], S[2], S[3], S[4], S[5], S[6], S[10]):  # what a private list names is for windows alone
        assert secret not in "".join(traceback.format_exception_only(told.value))
    assert json.loads(told.value.stored_arguments.removeprefix("login(").removesuffix(")")) == ARGUMENTS
    assert told.value.path == "$.password"


def test_the_error_of_a_call_that_differs_shows_no_secret(db: Path) -> None:
    with (
        AgentRunLedger(db) as ledger,
        pytest.raises(ReplayDivergence) as told,
        ledger.open_run(TEXT, run_id="parked") as run,
    ):
        run.step("login", ARGUMENTS | {"password": "another"}, never, effect=Effect.READ)
    shows_none(str(told.value))


def test_the_error_of_arguments_that_do_not_fit_shows_no_secret(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger, ledger.open_run("x", run_id="x"):

        @ledger.tool(effect=Effect.READ)
        def login(token: Literal["a", "b"], keys: dict[str, int]) -> None:
            never()

        for given in ({"token": S[4], "keys": {}}, {"token": "a", "keys": {S[4]: "x"}}):
            with pytest.raises(InvalidArguments) as told:
                login(**given)
            assert S[4] not in str(told.value)


def test_the_message_of_a_failed_step_is_data_for_the_program(tmp_path: Path) -> None:
    """It may be the argument of the next step: what a private list hides of it would be another call after the list was changed."""
    with AgentRunLedger(tmp_path / "agent.db") as ledger, ledger.open_run("x", run_id="x") as run:
        with pytest.raises(StepFailed) as told:
            run.step("login", {}, raising(LoginFailed(TEXT)), effect=Effect.READ)
        run.result = None
    assert TEXT in str(told.value)


def test_a_warning_about_what_could_not_be_rebuilt_shows_no_secret(tmp_path: Path) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Login(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        password: int

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AgentRunLedger(tmp_path / "agent.db") as ledger, ledger.open_run("x", run_id="x") as run:
            run.step("login", {}, lambda: {"password": S[0]}, effect=Effect.READ, returns=Login)
    said = "".join(str(each.message) for each in caught)
    assert "could not be made into" in said
    shows_none(said)


def test_the_log_of_a_worker_shows_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise LoginFailed(TEXT)
    except LoginFailed as error:
        _log("error", "worker %s: run %s was left by %s", "one", "run", repr(error), error=error)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "in test_the_log_of_a_worker_shows_no_secret" in caplog.text  # the traceback is there
    shows_none(caplog.text)


# --- the private list -------------------------------------------------------------------------------------------------


def test_python_has_what_the_command_line_shows(db: Path) -> None:
    with AgentRunLedger.open_read_only(db) as ledger:
        step, record = ledger.steps("failed")[0], ledger.get_run("failed")
    shown = redacted(step)
    assert (shown["tool_name"], shown["step_number"]) == ("login", 1)
    shows_none(json.dumps([shown, redacted(record), redacted(TEXT), redacted([step])], default=str))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("names = [", "Invalid value"),
        ("name = []", "it has 'name', and may have names, values, variables, scanner"),
        ('values = "x"', "'values' is a list of texts"),
        ("scanner = 1", "'scanner' is true or false"),
        ('values = ["abc"]', "at least 4 characters"),
        ('names = ["--"]', "has no word in it"),
    ],
)
def test_a_list_that_cannot_be_used_shows_nothing(shell: Shell, db: Path, private: Path, text: str, why: str) -> None:
    path = private.with_name("wrong.toml")
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AGENT_RUN_LEDGER_PRIVATE", str(path))
        assert why in shell.refused("--db", db, "runs")
        with pytest.raises(InvalidPrivateList):
            redacted("x")
        with AgentRunLedger(db) as ledger, pytest.raises(InvalidPrivateList):
            ledger.worker(1)
        patched.setenv("AGENT_RUN_LEDGER_PRIVATE", str(path.with_name("none.toml")))
        assert "No such file" in shell.refused("--db", db, "runs")


# --- the scanner of the extra [guard] ---------------------------------------------------------------------------------


@pytest.fixture
def scanning(private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scanning.toml"
    path.write_text("scanner = true\n")
    monkeypatch.setenv("AGENT_RUN_LEDGER_PRIVATE", str(path))
    monkeypatch.setenv("KF_RULE_CACHE_DIR", str(tmp_path / "rules"))
    return path


def test_a_scanner_finds_what_has_neither_name_nor_a_shape_that_we_know(scanning: Path) -> None:
    key = "dop_v1_" + "3f9a17bc" * 8
    assert redacted(f"é {key} and so on") == "é [redacted] and so on"
    assert redacted({"text": [f"{key}"]}) == {"text": ["[redacted]"]}
    assert redacted("nothing \udc80 of that") == "nothing \udc80 of that"


def test_a_scanner_that_is_not_installed_is_said_so(
    scanning: Path, shell: Shell, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kingfisher_sdk.scanner", None)
    assert "install the extra [guard]" in shell.refused("--db", db, "runs")


def test_nothing_that_asks_somebody_about_a_secret_is_used_of_the_scanner() -> None:
    text = Path(redacting.__file__).read_text()
    assert [line.strip() for line in text.splitlines() if "kingfisher" in line] == [
        "from kingfisher_sdk.rules import Rules",
        "from kingfisher_sdk.scanner import Scanner",
    ]
