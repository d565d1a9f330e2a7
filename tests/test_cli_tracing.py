"""Why a run stands where it stands, on the command line: plan, trace, dead letters, and what `show` says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    Receipt,
    RetryPolicy,
    Run,
    RunClosed,
    RunState,
    StepFailed,
    StepInDoubt,
    current_run,
)
from agent_run_ledger.cli.terminal import folded, since, table, took
from agent_run_ledger.model import PlannedAction, TraceLine
from support.ledgers import raw
from support.shell import TEXTS, Shell, is_safe

READING = [["plan", "refund"], ["trace", "refund"], ["dead-letters"], ["dead-letters", "--trace"], ["approvals"]]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def interrupt() -> None:
    raise KeyboardInterrupt


def unavailable() -> None:
    raise ConnectionError("the service is away: " + "very " * 60 + "far")


def files_beside(path: Path) -> list[str]:
    """What lies in the folder, but for what SQLite itself keeps beside a database that it has open."""
    return sorted({*os.listdir(path.parent)} - {f"{path.name}-shm", f"{path.name}-wal"})


def refunds(ledger: AgentRunLedger) -> None:
    """A program that is interrupted in its second step, of which nobody can say then whether it took effect."""
    with ledger.open_run("refund the order", run_id="refund") as run:
        run.step("look", {"order": 209}, lambda: 120, effect=Effect.READ)
        run.step("refund", {"order": 209}, interrupt, effect=Effect.MUTATE)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with a run in doubt, a dead letter whose step was tried twice, a failed run and a completed one."""
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        with pytest.raises(KeyboardInterrupt):
            refunds(ledger)
        twice = RetryPolicy(max_attempts=2, base=0.0)
        with pytest.raises(StepFailed), ledger.open_run("fetch it", run_id="dead") as run:
            run.step("fetch", {}, unavailable, effect=Effect.READ, retry=twice)
        with pytest.raises(RunClosed), ledger.open_run("fetch it", run_id="dead") as run:
            run.step("fetch", {}, unavailable, effect=Effect.READ, retry=twice)
        ledger.create_run("ends", run_id="failed")
        ledger.abort_run("failed", "no more")
        with ledger.open_run("ends well", run_id="done") as run:
            run.step("look", {}, lambda: 1, effect=Effect.READ)
    return path


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", READING)
def test_reading_writes_nothing_and_is_safe_in_text_and_json(shell: Shell, db: Path, command: list[str]) -> None:
    before, files = db.read_bytes(), files_beside(db)
    status, out, err = shell("--db", db, *command)
    assert (status in (0, 1), err) == (True, "")
    assert is_safe(out)
    json.loads(shell("--db", db, *command, "--json")[1])
    assert (db.read_bytes(), files_beside(db)) == (before, files)


@pytest.mark.parametrize("command", ["plan", "trace", "approvals"])
@pytest.mark.parametrize("run_id", ["nobody", "\u202egnp.exe", "\x1b[31m", " "])
def test_an_unknown_run_is_one_safe_line(shell: Shell, db: Path, command: str, run_id: str) -> None:
    shell.refused("--db", db, command, run_id)


@pytest.mark.parametrize("command", READING)
def test_a_missing_file_is_one_line_and_is_not_made(shell: Shell, tmp_path: Path, command: list[str]) -> None:
    assert "no database" in shell.refused("--db", tmp_path / "no.db", *command)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("seq", [1, 2, 4, 5])
@pytest.mark.parametrize("body", [b"\x00\xff", b"[]", b"{}", "text", 5])
def test_a_damaged_entry_is_told_as_such_and_hides_no_other(shell: Shell, db: Path, seq: int, body: Any) -> None:
    with raw(db, without_triggers=True) as connection:
        connection.execute("UPDATE entries SET body = ? WHERE run_id = 'refund' AND seq = ?", (body, seq))
    status, out, err = shell("--db", db, "trace", "refund")
    assert (status, err) == (1, "")
    assert [line.split()[0] for line in out.splitlines() if "unreadable" in line] == [str(seq)]
    told = [line.split()[0] for line in out.splitlines()[3:] if not line.startswith(" ")]
    assert told == ["1", "2", "3", "4", "5"], "the other entries are told"
    shell.refused("--db", db, "plan", "refund")
    shell.refused("--db", db, "resolve", "refund", "2", "--not-executed", "--yes")
    assert shell("--db", db, "show", "refund")[0] == 1
    assert "dead" in shell("--db", db, "dead-letters", "--trace")[1]
    assert "done" in shell("--db", db, "runs")[1]
    assert shell("--db", db, "approvals")[0] in (0, 2)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_says_what_the_next_start_would_do_and_why(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "plan", "refund")
    assert status == 1, "it would leave the run in doubt"
    assert out.startswith("run 'refund' is BLOCKED")
    assert "stay in doubt, until `resolve` says what became of it" in out
    planned = shell.json("--db", db, "plan", "refund")
    assert (planned["run_id"], planned["status"]) == ("refund", "BLOCKED")
    (action,) = planned["plan"]
    assert list(action) == [each.name for each in fields(PlannedAction)]
    assert (action["step_number"], action["tool_name"], action["action"]) == (2, "refund", "park")


def test_plan_of_a_run_without_unsettled_steps_says_so(shell: Shell, db: Path) -> None:
    assert "The run has ended" in shell("--db", db, "plan", "done")[1]
    assert shell.json("--db", db, "plan", "done")["plan"] == []
    with AgentRunLedger(db) as ledger:
        ledger.create_run("not yet begun", run_id="fresh")
    status, out, _ = shell("--db", db, "plan", "fresh")
    assert (status, "no step is unsettled" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "action", "status"),
    [
        ({"effect": Effect.READ}, "dispatch", 0),
        ({"effect": Effect.IDEMPOTENT}, "dispatch", 0),
        ({}, "dispatch_undeclared", 0),
        ({"effect": Effect.MUTATE}, "park", 1),
        ({"effect": Effect.MUTATE, "receipt": lambda key, arguments: Receipt.absent()}, "ask", 0),
        ({"effect": Effect.READ, "retry": RetryPolicy(max_attempts=1)}, "dead_letter", 1),
    ],
)
def test_plan_knows_what_was_declared(
    shell: Shell, tmp_path: Path, options: dict[str, Any], action: str, status: int
) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger, pytest.raises(KeyboardInterrupt), ledger.open_run("try", run_id="run") as run:
        run.step("call", {}, interrupt, **options)
    assert [each["action"] for each in shell.json("--db", db, "plan", "run")["plan"]] == [action]
    assert shell("--db", db, "plan", "run")[0] == status


# --- trace ------------------------------------------------------------------------------------------------------------


def test_trace_tells_every_attempt_and_error_whole_and_in_order(shell: Shell, db: Path) -> None:
    told = shell.json("--db", db, "trace", "dead")
    assert told["run"]["status"] == "DEAD_LETTER"
    assert all(list(line) == [each.name for each in fields(TraceLine)] for line in told["trace"])
    assert [line["seq"] for line in told["trace"]] == sorted(line["seq"] for line in told["trace"])
    events = [(line["event"], line["attempt"]) for line in told["trace"] if line["step_number"] == 1]
    assert events[:4] == [("dispatched", 1), ("failed", 1), ("dispatched", 2), ("failed", 2)]
    assert told["trace"][-1]["event"] == "dead letter"
    out = shell("--db", db, "trace", "dead")[1]
    assert " ".join(out.split()).count("very " * 60 + "far") >= 2, "errors are not cut"
    assert "+0.0 ms" in out


def test_trace_shows_receipts_and_what_operators_did(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    answers = [Receipt.unknown("the status page is away"), Receipt.absent()]

    def play() -> None:
        with AgentRunLedger(db) as ledger, ledger.open_run("pay", run_id="run") as run:
            run.step(
                "pay", {}, interrupt, effect=Effect.MUTATE, receipt=lambda *_: answers.pop(0),
                retry=RetryPolicy(max_attempts=9, base=0.0),
            )  # fmt: skip

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            play()
    shell("--db", db, "cancel", "run", "--by", "ann", "--reason", "enough", "--yes")
    lines = [(line["event"], line["text"]) for line in shell.json("--db", db, "trace", "run")["trace"]]
    events = [event for event, _ in lines]
    assert events[:2] == ["created", "dispatched"]
    assert [event for event in events if event.startswith("receipt")] == [
        "receipt asked", "receipt unknown", "receipt asked", "receipt absent",
    ]  # fmt: skip
    assert ("the status page is away" in dict(lines)["receipt unknown"], events[-1]) == (True, "cancelled")
    assert lines[-1][1] == "enough (by ann)"


# --- dead letters -----------------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_with_their_cause_and_what_happened_last(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "dead-letters")
    assert status == 0
    assert out.splitlines()[0].split() == ["RUN", "ENDED", "STEPS", "CAUSE", "LAST"]
    assert [line.split()[0] for line in out.splitlines()[1:2]] == ["dead"]
    assert "dead letter: " in out
    assert f"agent-run-ledger --db {db} trace dead" in out
    assert f"agent-run-ledger --db {db} redrive dead" in out
    assert "failed" not in out.replace("'fetch'", "")
    (letter,) = shell.json("--db", db, "dead-letters")["dead_letters"]
    assert (letter["run_id"], letter["last"]["event"], "trace" in letter) == ("dead", "dead letter", False)


def test_dead_letters_show_the_whole_trace_where_it_is_asked_for(shell: Shell, db: Path) -> None:
    whole = shell("--db", db, "trace", "dead")[1].split("\n\n", 1)[1]
    assert whole in shell("--db", db, "dead-letters", "--trace")[1]
    (letter,) = shell.json("--db", db, "dead-letters", "--trace")["dead_letters"]
    assert letter["trace"] == shell.json("--db", db, "trace", "dead")["trace"]


def test_a_ledger_without_dead_letters_says_so(shell: Shell, tmp_path: Path) -> None:
    AgentRunLedger(tmp_path / "agent.db").close()
    assert shell("--db", tmp_path / "agent.db", "dead-letters") == (0, "no dead letters\n", "")


def test_show_of_a_dead_letter_names_the_commands_that_tell_why_and_go_on(shell: Shell, db: Path) -> None:
    out = shell("--db", db, "show", "dead")[1]
    assert f"agent-run-ledger --db {db} trace dead" in out
    assert f"agent-run-ledger --db {db} redrive dead" in out


# --- what a run waits for ---------------------------------------------------------------------------------------------


class Gone(Exception):
    """The program of a run ends before it began."""


def waiting(db: Path, wait: Callable[[Run], Any]) -> None:
    """Have a run `waits` that waits, and that no process works on."""
    with AgentRunLedger(db) as ledger:
        starts: list[None] = []

        @ledger.agent()
        def waiter() -> Any:
            starts.append(None)
            if len(starts) == 1:
                raise Gone
            return wait(current_run())

        with pytest.raises(Gone):
            ledger.run(waiter, run_id="waits")
        assert ledger.recover() == []


@pytest.mark.parametrize(
    ("wait", "kind", "said", "helps"),
    [
        (lambda run: run.sleep(9_000.0), "time", "This run waits for its time, ", None),
        (lambda run: run.wait_for("paid"), "signal", "This run waits for the signal 'paid'.", "signal waits paid"),
        (
            lambda run: run.wait_for("paid", timeout=9_000.0),
            "signal",
            "This run waits for the signal 'paid', until ",
            "signal waits paid",
        ),
        (
            lambda run: run.approve("pay", {"amount": 1}),
            "approval",
            "This run waits for somebody to approve 'pay'.",
            "approvals waits",
        ),
    ],
)
def test_show_says_what_a_run_waits_for_and_which_command_helps(
    shell: Shell, tmp_path: Path, wait: Callable[[Run], Any], kind: str, said: str, helps: str | None
) -> None:
    db = tmp_path / "agent.db"
    waiting(db, wait)
    out = shell("--db", db, "show", "waits")[1]
    assert said in out
    assert [line.strip() for line in out.splitlines() if line.startswith("  ")] == (
        [f"agent-run-ledger --db {db} {helps}"] if helps else []
    )
    (wanted,) = shell.json("--db", db, "show", "waits")["waits_for"]
    assert list(wanted) == ["kind", "what", "step_number", "until"]
    assert (wanted["kind"], wanted["step_number"]) == (kind, 1)
    assert f"waits for {wanted['what'][:20]}" in shell("--db", db, "runs")[1]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"effect": Effect.MUTATE}, "resolve", "somebody who says whether step 1 ('call') took effect"),
        (
            {"effect": Effect.MUTATE, "receipt": lambda key, arguments: Receipt.absent()},
            "receipt",
            "its program, to ask for the receipt of step 1 ('call')",
        ),
        ({"effect": Effect.READ}, "program", "its program, to dispatch step 1 ('call') again"),
    ],
)
def test_show_says_what_becomes_of_a_step_in_doubt(
    shell: Shell, tmp_path: Path, options: dict[str, Any], kind: str, said: str
) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db) as ledger, pytest.raises(KeyboardInterrupt), ledger.open_run("try", run_id="run") as run:
        run.step("call", {}, interrupt, **options)
    out = shell("--db", db, "show", "run")[1]
    assert f"This run waits for {said}" in out
    assert ("resolve --not-executed run 1" in out) is (kind == "resolve")
    assert ("Start its program again" in out) is (kind != "resolve")
    assert [each["kind"] for each in shell.json("--db", db, "show", "run")["waits_for"]] == [kind]


def test_show_of_a_parked_run_names_what_parked_it(shell: Shell, tmp_path: Path) -> None:
    db = tmp_path / "agent.db"

    def fails(ledger: AgentRunLedger) -> None:
        with ledger.open_run("try", run_id="run"):
            raise Gone("no more paper")

    with AgentRunLedger(db) as ledger, pytest.raises(Gone):
        fails(ledger)
    assert "waits for its program, which was left by Gone: no more paper." in shell("--db", db, "show", "run")[1]


def test_a_parked_step_that_a_rerun_left_in_doubt_is_shown_as_such(shell: Shell, db: Path) -> None:
    with AgentRunLedger(db) as ledger, pytest.raises(StepInDoubt):
        refunds(ledger)
    out = shell("--db", db, "show", "refund")[1]
    assert "This run waits for somebody who says whether step 2 ('refund') took effect" in out
    assert "only cancel" not in out


def test_a_run_that_somebody_works_on_or_that_ended_waits_for_nothing(shell: Shell, db: Path) -> None:
    seen: list[Any] = []
    with AgentRunLedger(db) as ledger, ledger.open_run("look at me", run_id="live") as run:
        run.step("look", {}, lambda: seen.append(shell.json("--db", db, "show", "live")), effect=Effect.READ)
    assert seen[0]["waits_for"] == []
    assert [shell.json("--db", db, "show", run_id)["waits_for"] for run_id in ("done", "dead", "failed")] == [[]] * 3


def test_doctor_counts_what_a_person_has_to_decide_as_a_problem_and_waits_by_plan_as_none(
    shell: Shell, db: Path, tmp_path: Path
) -> None:
    status, out, _ = shell("--db", db, "doctor")
    assert status == 1
    assert "problem  to decide" in out
    assert "1 run ('refund') standing until a person decides" in out
    shell("--db", db, "cancel", "refund", "--yes")
    waiting(db, lambda run: run.wait_for("paid"))
    status, out, _ = shell("--db", db, "doctor")
    assert status == 0
    assert "no run stands until a person decides" in out
    assert "no run waits for its program; 1 run ('waits') waiting for a time, a signal or an approval" in out


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0012, "1.2 ms"), (1, "1.0 s"), (119, "119.0 s"), (120, "2 min"), (3599, "1 h 0 min"), (3600, "1 h 0 min"),
        (8000, "2 h 13 min"), (86_400, "1 d 0 h"), (100_000, "1 d 3 h"), (None, ""),
    ],
)  # fmt: skip
def test_a_duration_is_said_in_units_that_fit_it(seconds: float | None, text: str) -> None:
    assert took(seconds) == text


def test_a_time_is_said_as_how_far_off_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    assert (since(9_700.0), since(10_300.0)) == ("5 min ago", "in 5 min")


def test_a_wrapped_cell_loses_nothing_and_keeps_its_column() -> None:
    text = "word " * 100 + "x" * 300
    shown = table(("A", "B"), [("first", text), ("second", "short")], stretch=1, is_wrapped=True).splitlines()
    assert shown[0] == "A       B"
    assert "".join("".join(line[8:].split()) for line in shown[1:-1]) == text.replace(" ", "")
    assert all(line.startswith(" " * 8) for line in shown[2:-1])
    assert shown[-1] == "second  short"
    assert folded("", 5) == [""]
    assert folded("漢字漢字", 4) == ["漢字", "漢字"]


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_causes_and_errors_stay_data(shell: Shell, tmp_path: Path, text: str) -> None:
    db = tmp_path / "agent.db"
    with AgentRunLedger(db, max_steps=1) as ledger:
        ledger.create_run(text, run_id="run")
        with pytest.raises(StepFailed):
            ledger.execute_step("run", "fail", {text: text}, lambda: int(text), effect=Effect.READ)
        ledger.cancel("run", reason=text, by="ann")
    for command in (["trace", "run"], ["plan", "run"], ["show", "run"], ["dead-letters", "--trace"]):
        status, out, err = shell("--db", db, *command)
        assert (status, err) == (0, "")
        assert is_safe(out)
        assert shell("--db", db, *command, "--json")[1].isascii()
    assert shell.json("--db", db, "trace", "run")["trace"][-1]["text"] == f"{text} (by ann)"
    assert RunState(shell.json("--db", db, "trace", "run")["run"]["status"]).is_terminal
