"""The command line: what it shows, what it returns, and that it disturbs neither ledgers nor terminals."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    RunRecord,
    RunState,
    StepFailed,
    StepRecord,
    UndeclaredEffectWarning,
    __version__,
)
from agent_run_ledger.cli.commands import _parser
from agent_run_ledger.cli.terminal import columns_of, cut, plain, table
from agent_run_ledger.stores.diagnosis import has_wal_reset_bug
from support.shell import NAMES, TEXTS, Shell, is_one_line, is_safe

COMMANDS = [
    "runs", "show", "plan", "trace", "cost", "explain", "dead-letters", "approvals", "verify", "head", "prove", "keygen", "doctor", "resolve", "release", "cancel", "redrive", "fork",
    "signal", "approve", "deny", "recover", "preflight", "supervise", "demo",
]  # fmt: skip
SOURCE = Path(__file__).resolve().parent.parent / "src"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with a completed run of two steps, and one that an exception parked after a failed step."""
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        with ledger.open_run("Reconcile October", run_id="october") as run:
            run.step("fetch", {"id": 1}, lambda: {"total": 120}, effect=Effect.READ)
            run.step("post", {"id": 1}, lambda: "posted", effect=Effect.IDEMPOTENT)
            run.result = {"booked": 1}
        with pytest.raises(StepFailed), ledger.open_run("Reconcile November", run_id="november") as run:
            run.step("fetch", {"id": 2}, lambda: 1 / 0, effect=Effect.READ)
    return path


def tampered(path: Path, statement: str, *values: Any) -> None:
    """Do to a ledger what somebody does who has the file: its triggers are in nobody's way."""
    with sqlite3.connect(path, isolation_level=None) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        assert connection.execute(statement, values).rowcount > 0
        for _, sql in triggers:
            connection.execute(sql)
    connection.close()


# --- asking -----------------------------------------------------------------------------------------------------------


def test_the_module_is_the_command_line() -> None:
    command = [sys.executable, "-m", "agent_run_ledger", "--version"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"agent-run-ledger {__version__}\n", "")


def test_help_shows_every_command_with_examples_and_the_exit_status(shell: Shell) -> None:
    status, out, _ = shell("--help")
    assert status == 0
    assert all(word in out for word in (*COMMANDS, "examples:", "exit status"))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(shell: Shell, command: str) -> None:
    status, out, _ = shell(command, "--help")
    assert status == 0
    (example,) = [line for line in out.splitlines() if line.startswith("example: agent-run-ledger ")]
    words = shlex.split(example)[2:]
    assert command in words
    assert _parser().parse_args(words).command


@pytest.mark.parametrize("arguments", [[], ["fly"], ["show"], ["runs", "--limit", "x\x1b[31m"], ["runs", "--fast"]])
def test_a_wrong_command_line_is_one_safe_line_and_status_2(shell: Shell, arguments: list[str]) -> None:
    status, out, err = shell(*arguments)
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert "\x1b" not in err


def test_without_a_path_the_error_lists_the_ledgers_of_the_folder_and_leaves_no_trace(
    shell: Shell, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (db.parent / "notes.txt").write_text("no ledger")
    foreign = sqlite3.connect(db.parent / "foreign.db")
    foreign.execute("PRAGMA journal_mode=WAL")
    foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    monkeypatch.chdir(db.parent)
    before = sorted(os.listdir())
    status, out, err = shell("runs")
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert err.rstrip().endswith("ledgers in this folder: agent.db")
    assert sorted(os.listdir()) == before


def test_without_a_path_and_a_ledger_the_error_says_so(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no ledger in this folder" in shell("verify")[2]


def test_the_path_comes_from_the_environment_too(shell: Shell, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUN_LEDGER_DB", str(db))
    assert shell("runs")[0] == 0


def test_options_may_stand_before_or_after_the_command(shell: Shell, db: Path) -> None:
    assert shell("--db", db, "--json", "runs") == shell("runs", "--json", "--db", db)


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["runs"], ["show", "october"], ["verify"], ["doctor"]])
def test_a_missing_file_is_one_line_and_is_not_made(shell: Shell, tmp_path: Path, command: list[str]) -> None:
    status, out, err = shell("--db", tmp_path / "no\x1b[31m.db", *command)
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert "\x1b" not in err
    assert "no database" in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [["runs"], ["show", "october"], ["verify"]])
@pytest.mark.parametrize("kind", ["text", "foreign", "truncated", "newer", "folder"])
def test_what_is_no_readable_ledger_is_named_in_one_line_and_not_changed(
    shell: Shell, db: Path, command: list[str], kind: str
) -> None:
    if kind == "text":
        db.write_bytes(b"hello " * 2000)
    elif kind == "foreign":
        db.unlink()
        connection = sqlite3.connect(db)
        connection.execute("CREATE TABLE t (x)")
        connection.close()
    elif kind == "truncated":
        db.write_bytes(db.read_bytes()[: 4096 + 100])
    elif kind == "newer":
        connection = sqlite3.connect(db, isolation_level=None)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    else:
        db.unlink()
        db.mkdir()
    before = db.read_bytes() if db.is_file() else b""
    status, out, err = shell("--db", db, *command)
    if kind == "truncated" and command == ["verify"]:
        assert status in (1, 2)
    else:
        assert (status, out) == (2, "")
        assert is_one_line(err)
    assert (db.read_bytes() if db.is_file() else b"") == before


def test_doctor_reports_a_damaged_file_as_a_problem(shell: Shell, db: Path) -> None:
    db.write_bytes(b"hello " * 2000)
    status, out, _ = shell("--db", db, "doctor")
    assert status == 1
    assert any(line.startswith("problem") and "not an SQLite database" in line for line in out.splitlines())


@pytest.mark.parametrize("run_id", [*NAMES, "x" * 300, "\x1b[31m", " "])
def test_a_run_that_does_not_exist_is_one_safe_line(shell: Shell, db: Path, run_id: str) -> None:
    for command in ("show", "verify"):
        status, out, err = shell("--db", db, command, run_id)
        assert (status, out) == (2, "")
        assert is_one_line(err)
        assert is_safe(err)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_lists_all_runs_with_their_causes(shell: Shell, db: Path) -> None:
    status, out, err = shell("--db", db, "runs")
    assert (status, err) == (0, "")
    heads, october, november = out.splitlines()
    assert heads.split() == ["RUN", "STATUS", "STEPS", "UPDATED", "GOAL", "CAUSE"]
    assert october.startswith("october")
    assert "COMPLETED" in october
    assert "BLOCKED" in november
    assert "ZeroDivisionError" in november


def test_runs_json_has_the_fields_of_run_records(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "runs", "--json")
    runs = json.loads(out)["runs"]
    assert status == 0
    assert [list(run) for run in runs] == [[each.name for each in fields(RunRecord)]] * 2
    assert [run["run_id"] for run in runs] == ["october", "november"]
    assert runs[0]["result"] == {"booked": 1}
    assert runs[0]["spent_usd"] == "0"


def test_runs_can_be_limited_to_one_state(shell: Shell, db: Path) -> None:
    assert [
        run["run_id"] for run in json.loads(shell("--db", db, "runs", "--status", "BLOCKED", "--json")[1])["runs"]
    ] == ["november"]
    assert shell("--db", db, "runs", "--status", "FAILED")[:2] == (0, "no run is FAILED\n")
    status, _, err = shell("--db", db, "runs", "--status", "blocked")
    assert status == 2
    assert "BLOCKED" in err


def test_a_long_list_says_what_it_leaves_out(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "many.db"
    with AgentRunLedger(db, durability="process") as ledger:
        for number in range(60):
            ledger.create_run("a goal", run_id=f"run-{number}")
    listed = shell("--db", db, "runs")[1].splitlines()
    assert listed[0] == "the newest 50 of 60 runs (--limit 0 shows all):"
    assert listed[2].startswith("run-10 ")
    assert len(shell("--db", db, "runs", "--limit", "0")[1].splitlines()) == 61
    assert len(json.loads(shell("--db", db, "runs", "--json")[1])["runs"]) == 60


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_the_run_and_its_steps(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "show", "october")
    assert status == 0
    facts, steps = out.split("\n\n")
    assert "goal:          Reconcile October" in facts
    assert "result:        {'booked': 1}" in facts
    first = steps.splitlines()[1].split()
    assert first[:5] == ["1", "fetch", "COMPLETED", "1", "READ"]
    assert first[-1] == '{"total":120}'


def test_show_json_has_the_fields_of_step_records(shell: Shell, db: Path) -> None:
    shown = json.loads(shell("--db", db, "show", "november", "--json")[1])
    assert list(shown) == [
        "run", "steps", "is_waiting_for_its_program", "waits_for", "steps_in_doubt", "redispatched_undeclared", "trouble",
    ]  # fmt: skip
    assert [list(step) for step in shown["steps"]] == [[*(each.name for each in fields(StepRecord)), "environment"]]
    assert f" {__version__} python " in shown["steps"][0]["environment"]
    assert shown["steps"][0]["error_message"] == "ZeroDivisionError: division by zero"
    assert shown["is_waiting_for_its_program"] is True


def test_show_says_that_a_parked_run_waits_for_its_program(shell: Shell, db: Path) -> None:
    assert "waits for its program" in shell("--db", db, "show", "november")[1]
    assert "waits for its program" not in shell("--db", db, "show", "october")[1]


def test_a_long_run_shows_its_last_steps_and_says_so(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "long.db"
    with AgentRunLedger(db, max_steps=100, durability="process") as ledger:
        run_id = ledger.create_run("long", run_id="long")
        for number in range(60):
            ledger.execute_step(run_id, "count", {"n": number}, lambda: "done")
    lines = shell("--db", db, "show", "long")[1].split("\n\n")[1].splitlines()
    assert lines[0] == "the last 50 of 60 steps (--steps 0 shows all):"
    assert lines[2].split()[0] == "11"
    assert len(shell("--db", db, "show", "long", "--steps", "3")[1].split("\n\n")[1].splitlines()) == 5
    assert len(json.loads(shell("--db", db, "show", "long", "--json")[1])["steps"]) == 60


def interrupt() -> None:
    raise KeyboardInterrupt


def test_show_and_doctor_mark_steps_that_were_dispatched_again_on_nobodys_word(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger:
        ledger.create_run("a goal", run_id="run")
        with pytest.raises(KeyboardInterrupt):
            ledger.execute_step("run", "send_mail", {}, interrupt)
    shown = shell("--db", db, "show", "run")[1]
    assert "RUNNING (in doubt)" in shown
    assert "in doubt    " in shell("--db", db, "doctor")[1]
    with AgentRunLedger(db) as ledger:
        ledger.create_run("a goal", run_id="run")
        with pytest.warns(UndeclaredEffectWarning):
            ledger.execute_step("run", "send_mail", {}, lambda: "sent")
    shown = shell("--db", db, "show", "run")[1]
    assert "2 !" in shown
    assert "it may have happened twice" in shown
    assert json.loads(shell("--db", db, "show", "run", "--json")[1])["redispatched_undeclared"] == [1]
    assert "'send_mail' (1 ×)" in shell("--db", db, "doctor")[1]


def test_show_tells_of_a_step_in_doubt_that_may_not_be_repeated(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger, pytest.raises(KeyboardInterrupt), ledger.open_run("a goal", run_id="run") as run:
        run.step("pay", {}, interrupt, effect=Effect.MUTATE)
    status, out, _ = shell("--db", db, "show", "run")
    assert status == 0
    assert json.loads(shell("--db", db, "show", "run", "--json")[1])["steps_in_doubt"] == [1]
    assert "in doubt" in out


def test_reading_works_while_an_agent_is_in_a_step_and_makes_no_file(shell: Shell, db: Path) -> None:
    seen: dict[str, tuple[int, str, str]] = {}
    files: list[list[str]] = []

    def look() -> str:
        files.append(sorted(os.listdir(db.parent)))
        for command in (["runs"], ["show", "live"], ["verify"], ["doctor"]):
            seen[command[0]] = shell("--db", db, *command)
        files.append(sorted(os.listdir(db.parent)))
        return "seen"

    with AgentRunLedger(db) as ledger, ledger.open_run("look at me", run_id="live") as run:
        run.step("look", {}, look, effect=Effect.READ)
    assert [status for status, _, _ in seen.values()] == [0, 0, 0, 0]
    assert "RUNNING" in seen["show"][1]
    assert "(alive)" in seen["show"][1]
    assert "in doubt" not in seen["show"][1]
    assert files[0] == files[1]


def test_reading_leaves_the_database_as_it_is(shell: Shell, db: Path) -> None:
    before = db.read_bytes()
    for command in (["runs"], ["show", "october"], ["verify"], ["doctor"]):
        shell("--db", db, *command)
    assert db.read_bytes() == before


# --- damaged rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [1, 3, 6])
@pytest.mark.parametrize("body", [b"\x00\xff", b"[]", b'{"at":"\x1b[31m"}', "text", 5])
def test_a_damaged_row_stops_no_command_and_is_found(shell: Shell, db: Path, seq: int, body: Any) -> None:
    tampered(db, "UPDATE entries SET body = ? WHERE run_id = 'october' AND seq = ?", body, seq)
    status, out, _ = shell("--db", db, "runs")
    assert "november" in out
    assert status == (1 if seq in (1, 6) else 0)
    status, out, _ = shell("--db", db, "show", "october")
    assert status == 1
    assert "PROBLEM: run 'october', entry " in out or "PROBLEM: step" in out
    assert ["fetch" in out, "post" in out] == [True, True], "each step is shown whose intent can be read"
    assert "in doubt" not in out, "what cannot be read is not what is not known"
    status, out, _ = shell("--db", db, "verify", "--json")
    assert status == 1
    assert ("october", seq) in [(each["run_id"], each["seq"]) for each in json.loads(out)["findings"]]
    assert shell("--db", db, "doctor")[0] == 1


def test_a_damaged_run_is_no_parked_one(shell: Shell, db: Path) -> None:
    tampered(db, "UPDATE entries SET body = x'00' WHERE run_id = 'november' AND seq = 1")
    assert shell("--db", db, "runs", "--status", "BLOCKED") == (0, "no run is BLOCKED\n", "")
    assert "cannot be read" in shell("--db", db, "runs")[1]
    assert "1 COMPLETED, 1 that cannot be read" in shell("--db", db, "doctor")[1]
    shown = shell("--db", db, "show", "november")
    assert (shown[0], "waits for its program" in shown[1]) == (1, False)


def test_a_damaged_payload_stops_no_command_and_is_found(shell: Shell, db: Path) -> None:
    tampered(
        db, "UPDATE entries SET payload = x'fe' WHERE run_id = 'november' AND kind IN ('outcome', 'intent', 'created')"
    )
    for command in (["runs"], ["show", "november"], ["doctor"]):
        assert shell("--db", db, *command)[0] in (0, 1)
        assert shell("--db", db, *command, "--json")[0] in (0, 1)
    assert shell("--db", db, "verify")[0] == 1


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_says_what_it_proves(shell: Shell, db: Path) -> None:
    status, out, err = shell("--db", db, "verify")
    assert (status, err) == (0, "")
    assert out.startswith("10 entries of 2 runs: no findings\n")
    assert "rebuild it whole" in out


def test_verify_shows_each_finding_and_returns_1(shell: Shell, db: Path) -> None:
    tampered(db, "UPDATE entries SET payload = ? WHERE run_id = 'october' AND seq = 3", b'{"total":999}')
    status, out, _ = shell("--db", db, "verify", "october")
    assert status == 1
    assert any(line.split()[:3] == ["october", "3", "payload"] for line in out.splitlines())
    found = json.loads(shell("--db", db, "verify", "--json")[1])
    assert list(found) == ["findings", "ok", "entries", "runs", "heads", "covered", "unheld", "unchecked"]
    assert found["ok"] is False
    assert {"run_id", "seq", "code", "message", "expected", "found"} == set(found["findings"][0])
    assert shell("--db", db, "verify", "november")[0] == 0


def test_the_json_of_verify_is_one_object_that_has_each_finding_in_a_line(shell: Shell, db: Path) -> None:
    assert json.loads(shell("--db", db, "verify", "--json")[1]) == {
        "findings": [], "ok": True, "entries": 10, "runs": 2, "heads": 0, "covered": 0, "unheld": 0, "unchecked": 0,
    }  # fmt: skip
    tampered(db, "UPDATE entries SET payload = ? WHERE kind = 'outcome'", b'{"total":999}')
    out = shell("--db", db, "verify", "--json")[1]
    found = json.loads(out)["findings"]
    assert len(found) == len([line for line in out.splitlines() if line.startswith('  {"run_id"')]) > 2


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_machine_file_and_runs(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "doctor", "--json")
    report = json.loads(out)
    assert status == 0
    assert report["ok"] is True
    assert [check["name"] for check in report["checks"]] == [
        "python", "sqlite", "file system", "free disk", "size", "schema", "journal mode", "runs", "to decide", "waiting",
        "in doubt", "undeclared",
    ]  # fmt: skip
    said = {check["name"]: check for check in report["checks"]}
    assert said["runs"]["message"] == "1 BLOCKED, 1 COMPLETED"
    assert said["waiting"]["level"] == "warn"
    assert "'november'" in said["waiting"]["message"]


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
    ],
)
def test_doctor_knows_which_sqlite_has_the_wal_reset_bug(version: tuple[int, int, int], has_bug: bool) -> None:
    assert has_wal_reset_bug(version) is has_bug


def test_doctor_claims_no_journal_mode_that_this_user_cannot_read(db: Path) -> None:
    script = """
import os, sys
from agent_run_ledger.cli import main
main(["--db", sys.argv[1], "doctor"])  # what it imports may be out of reach for the other user
for name in ("-wal", "-shm"):
    if os.path.exists(sys.argv[1] + name):
        os.unlink(sys.argv[1] + name)
os.chmod(os.path.dirname(sys.argv[1]), 0o555)
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.stdout.write("--- as another user ---\\n")
sys.exit(main(["--db", sys.argv[1], "doctor"]))
"""
    for folder in db.parent.parents[:3]:
        folder.chmod(0o755)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(db)],
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        db.parent.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    before, _, after = done.stdout.partition("--- as another user ---\n")
    assert "journal mode  wal\n" in before
    assert "journal mode  could not be read" in after
    assert "put back" not in after


def test_doctor_says_which_other_journal_mode_a_file_has(shell: Shell, db: Path) -> None:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        assert connection.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    assert "journal mode  delete; it is put back to wal" in shell("--db", db, "doctor")[1]


def test_the_reference_names_every_check_and_key(shell: Shell, db: Path) -> None:
    reference = (SOURCE.parent / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    checks = json.loads(shell("--db", db, "doctor", "--json")[1])["checks"]
    shown = json.loads(shell("--db", db, "show", "october", "--json")[1])
    for name in [*(check["name"] for check in checks), *shown, *RunState]:
        assert f"`{name}`" in reference
    assert all(f"| `{command}" in reference or f", `{command} " in reference for command in COMMANDS)


# --- terminals --------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=())))
def test_text_for_a_terminal_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    assert is_safe(plain(text))
    assert "\n" not in plain(text)


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 50))
def test_a_cell_is_never_wider_than_its_column(text: str, columns: int) -> None:
    assert columns_of(cut(text, columns)) <= columns


def test_columns_stand_below_each_other_whatever_is_in_them() -> None:
    shown = table(("A", "B"), [("漢字", "x"), ("e\u0301", "x"), ("plain", "x")]).splitlines()
    assert [columns_of(line[: line.rindex("x")]) for line in shown[1:]] == [7, 7, 7]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_and_values_stay_data(shell: Shell, tmp_path: Path, name: str) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger:
        ledger.create_run("".join(TEXTS), run_id=name)
        for text in TEXTS:
            ledger.execute_step(name, name, {text: text}, lambda text=text: [text])
        with pytest.raises(StepFailed):
            ledger.execute_step(name, name, {}, lambda: int("".join(TEXTS)))
        ledger.finish_run(name, {"result": TEXTS})
    for command in (["runs"], ["show", name], ["verify", name], ["doctor"]):
        status, out, err = shell("--db", db, *command)
        assert (status, err) == (0, "")
        assert is_safe(out)
        status, out, err = shell("--db", db, *command, "--json")
        assert (status, err) == (0, "")
        assert out.isascii()
        assert is_safe(out)
    shown = json.loads(shell("--db", db, "show", name, "--json")[1])
    assert shown["run"]["run_id"] == name
    assert shown["run"]["result"] == {"result": TEXTS}
    assert [json.loads(step["output_json"]) for step in shown["steps"][:-1]] == [[text] for text in TEXTS]
    assert all(each.startswith("agent.db") for each in os.listdir(tmp_path))


def test_a_reader_that_goes_away_is_no_error(db: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "agent_run_ledger", "--db", str(db), "show", "october"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("runs", 0),
        ("show october", 0),
        ("verify", 0),
        ("doctor", 0),
        ("trace october", 0),
        ("dead-letters", 0),
        ("cost", 0),
        ("explain november", 0),
        ("cancel november", 3),
        ("cancel november --yes", 0),
        ("show nobody", 2),
        ("fly", 2),
        ("--help", 0),
    ],
)
def test_closed_standard_output_changes_neither_the_exit_status_nor_the_error(
    db: Path, command: str, status: int, closed: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -X dev -m agent_run_ledger --db "$1" {command} {closed}', sys.executable, str(db)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == status
    if status == 2 and "2>&-" not in closed:
        assert is_one_line(done.stderr)
    else:
        assert done.stderr == ""


def test_what_the_encoding_of_the_output_does_not_have_is_spelt_out(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger:
        ledger.create_run("Zahlung prüfen", run_id="zürich-漢")
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"}
    for command, status in (
        (["runs"], 0),
        (["show", "zürich-漢"], 0),
        (["verify"], 0),
        (["doctor"], 0),
        (["show", "ö"], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "agent_run_ledger", "--db", str(db), *command],
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == status
        assert b"Traceback" not in done.stderr
        assert (done.stdout + done.stderr).isascii()
        if command[0] == "show" and status == 0:
            assert b"Zahlung pr\\xfcfen" in done.stdout
