"""The operator's hand on the command line: what is shown before, what is written with --yes, and that nothing is without it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    ApprovalDenied,
    BudgetExceededException,
    Effect,
    LoopDetectorPolicy,
    Run,
    RunawayLoopDetectedException,
    RunState,
    Verdict,
    current_run,
    current_step,
)
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import Call
from support.ledgers import never
from support.processes import SOURCE, child
from support.shell import NAMES, Shell, heads, is_one_line, is_safe

GOAL = "refund the order"
WHO = ("--by", "ann", "--reason", "looked at the dashboard")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("LOGNAME", "ann")
    return Shell(capsys, monkeypatch)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


class World:
    """The outside: what was called with which key. The first refund is interrupted, and nobody can say whether it took effect."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def refund(self) -> dict[str, str]:
        self.keys.append(current_step().idempotency_key)
        if len(self.keys) == 1:
            raise KeyboardInterrupt
        return {"refund": "re_1"}


def play(db: Path, world: World, run_id: str = "refund-209") -> Any:
    """The program: it looks, refunds, and tells the customer."""
    with AgentRunLedger(db) as ledger, ledger.open_run(GOAL, run_id=run_id) as run:
        order = run.step("look", {"order": 209}, lambda: {"total": 120}, effect=Effect.READ)
        refunded = run.step("refund", {"order": 209, "amount": order["total"]}, world.refund, effect=Effect.MUTATE)
        run.step("tell", {"refund": refunded}, lambda: "told", effect=Effect.IDEMPOTENT)
        run.result = refunded
        return refunded


def interrupt(db: Path) -> World:
    """Have the program of run `refund-209` interrupted while it refunds: step 2 is in doubt."""
    world = World()
    with pytest.raises(KeyboardInterrupt):
        play(db, world)
    return world


def die(db: Path) -> str:
    """Have a dead letter: three steps, and the fourth was one too many."""
    with AgentRunLedger(db, max_steps=3) as ledger:
        ledger.create_run("count", run_id="dead")

        def count(number: int) -> None:
            ledger.execute_step("dead", "count", {"n": number}, lambda: "done", effect=Effect.READ)

        for number in range(3):
            count(number)
        with pytest.raises(BudgetExceededException):
            count(3)
    return "dead"


class Suspicion(LoopDetectorPolicy):
    """Suspects what others are certain of."""

    def rule(self) -> Rule:
        found = super().rule()

        class Suspected:
            continues, remember, reach = found.continues, found.remember, found.reach

            def observe(self, call: Call) -> Verdict:
                verdict = found.observe(call)
                return verdict if verdict.level == "ok" else Verdict("suspected", *_rest(verdict))

        return Suspected()


def _rest(verdict: Verdict) -> tuple[str, str, tuple[int, ...]]:
    return verdict.rule, verdict.reason, verdict.evidence


def halt(db: Path) -> str:
    """Have a run that was halted on suspicion."""
    with AgentRunLedger(db, policy=Suspicion(max_repetitions=2)) as ledger:
        ledger.create_run("poll", run_id="halted")

        def poll() -> None:
            ledger.execute_step("halted", "poll", {}, lambda: "pending", effect=Effect.READ)

        for _ in range(2):
            poll()
        with pytest.raises(RunawayLoopDetectedException):
            poll()
        assert ledger.get_run("halted").status == RunState.QUARANTINE
    return "halted"


class Gone(Exception):
    """The program of a run ends before it began."""


def waiting(db: Path, run_id: str, wait: Callable[[Run], Any]) -> None:
    """Have a run that waits, and that no process works on."""
    with AgentRunLedger(db) as ledger:
        starts: list[None] = []

        @ledger.agent(name="waiter")
        def waiter() -> Any:
            starts.append(None)
            if len(starts) == 1:
                raise Gone
            return wait(current_run())

        with pytest.raises(Gone):
            ledger.run(waiter, run_id=run_id)
        assert ledger.recover() == []
        assert len(starts) == 2


def recovered(db: Path, run_id: str, wait: Callable[[Run], Any]) -> Any:
    """The result of the run, recovered in a process that has its program."""
    with AgentRunLedger(db) as ledger:

        @ledger.agent(name="waiter")
        def waiter() -> Any:
            return wait(current_run())

        assert ledger.recover() == [run_id]
        return ledger.get_run(run_id).result


def pays(run: Run) -> Any:
    approval = run.approve("pay", {"iban": "DE02", "amount": 120})
    return {"by": approval.by, "reason": approval.reason, "pays": approval.arguments}


def ask(db: Path) -> str:
    """Have a run that waits for somebody to approve a payment; the digest of its arguments."""
    waiting(db, "payment", pays)
    with AgentRunLedger(db) as ledger:
        (found,) = ledger.approvals()
    return found.digest


@pytest.fixture
def world(db: Path) -> World:
    return interrupt(db)


@pytest.fixture
def dead(db: Path) -> str:
    return die(db)


@pytest.fixture
def quarantined(db: Path) -> str:
    return halt(db)


@pytest.fixture
def request_id(db: Path) -> str:
    return ask(db)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A ledger on which every act that writes can be done, and the acts."""
    db = tmp_path_factory.mktemp("acts") / "agent.db"
    interrupt(db)
    dead, halted, digest = die(db), halt(db), ask(db)
    return db, {
        "resolve --output": ["resolve", "refund-209", "2", "--output", '{"refund": "re_9"}'],
        "resolve --not-executed": ["resolve", "refund-209", "2", "--not-executed"],
        "release": ["release", halted],
        "cancel": ["cancel", "refund-209"],
        "redrive": ["redrive", dead, "--max-steps", "10"],
        "fork": ["fork", dead, "--from-step", "2"],
        "signal": ["signal", "payment", "paid", "--payload", "null"],
        "approve": ["approve", "payment", "pay", "--digest", digest],
        "deny": ["deny", "payment", "pay", "--digest", digest],
    }


@pytest.fixture
def everything(db: Path, made: tuple[Path, dict[str, list[str]]]) -> dict[str, list[str]]:
    """The acts, on a copy of that ledger."""
    shutil.copy(made[0], db)
    return made[1]


ACTS = [
    "resolve --output", "resolve --not-executed", "release", "cancel", "redrive", "fork", "signal", "approve", "deny",
]  # fmt: skip


def said_in_the_log(db: Path, run_id: str) -> list[dict[str, Any]]:
    """What entries of a run say about who did something and why."""
    with AgentRunLedger.open_read_only(db) as ledger:
        payloads = [row.payload for row in ledger._store.read(run_id) if row.payload is not None]
    found = [json.loads(payload) for payload in payloads]
    return [each for each in found if isinstance(each, dict) and "by" in each]


# --- without --yes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS)
def test_without_yes_an_act_is_shown_and_nothing_is_written(
    shell: Shell, db: Path, everything: dict[str, list[str]], act: str
) -> None:
    before, bytes_before = heads(db), db.read_bytes()
    status, out, err = shell("--db", db, *everything[act], "--by", "ann")
    assert (status, err) == (3, "")
    assert out.startswith("This will ")
    assert out.endswith("Nothing was written. With --yes it is done.\n")
    assert "by:            ann\n" in out
    status, out, err = shell("--db", db, "--json", *everything[act], "--by", "ann")
    assert (status, err) == (3, "")
    shown = json.loads(out)
    assert (shown["is_done"], shown["is_asked"], shown["by"], shown["new_run_id"]) == (False, False, "ann", None)
    assert (heads(db), db.read_bytes()) == (before, bytes_before)
    with AgentRunLedger.open_read_only(db) as ledger:
        assert all(ledger._store.inbox(run_id, 0) == [] for run_id in before), "nothing was asked of anybody either"


@pytest.mark.parametrize("act", ACTS)
def test_with_yes_the_preview_comes_first_and_then_what_was_done(
    shell: Shell, db: Path, everything: dict[str, list[str]], act: str
) -> None:
    preview = shell("--db", db, *everything[act], "--by", "ann")[1].partition("\n\nNothing was written")[0]
    status, out, err = shell("--db", db, *everything[act], "--by", "ann", "--yes")
    assert (status, err) == (0, "")
    without_times = [re.sub(r"\([^)]* ago\)", "", text) for text in (out, preview)]
    assert without_times[0].startswith(without_times[1])
    assert "\n\nDone: " in out or "\n\nSent: " in out
    heads(db)


@pytest.mark.parametrize("act", ACTS)
def test_with_yes_json_says_how_the_run_stands_then(
    shell: Shell, db: Path, everything: dict[str, list[str]], act: str
) -> None:
    shown = shell.json("--db", db, *everything[act], "--yes")
    assert shown["is_done"] is not shown["is_asked"]
    assert shown["is_asked"] is (act in ("signal", "approve", "deny"))
    assert (shown["new_run_id"] is not None) is (act in ("redrive", "fork"))
    with AgentRunLedger.open_read_only(db) as ledger:
        assert shown["run"]["status"] == ledger.get_run(shown["run"]["run_id"]).status
        assert [each["action"] for each in shown["next_start"]] == [
            each.action for each in ledger.plan(shown["run"]["run_id"])
        ]


@pytest.mark.parametrize(("answer", "is_done"), [("y", True), ("Yes", True), ("n", False), ("", False), (None, False)])
def test_a_person_at_a_terminal_is_asked(db: Path, world: World, answer: str | None, is_done: bool) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "agent_run_ledger", "--db", str(db), "cancel", "refund-209"]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        seen = b""
        while b"Do it? [y/N] " not in seen:
            seen += os.read(master, 1024)
        os.write(master, f"{answer}\n".encode() if answer is not None else b"\x04")
        assert process.wait() == (0 if is_done else 3)
    os.close(master)
    with AgentRunLedger.open_read_only(db) as ledger:
        assert (ledger.get_run("refund-209").status == "CANCELLED") is is_done


def test_nobody_is_asked_where_nobody_sits(db: Path, world: World) -> None:
    command = [sys.executable, "-m", "agent_run_ledger", "--db", str(db), "cancel", "refund-209"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, input="y\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert "Do it?" not in done.stdout


# --- resolve ----------------------------------------------------------------------------------------------------------


def test_the_preview_of_resolve_names_all_that_is_known_of_the_step(shell: Shell, db: Path, world: World) -> None:
    _, out, _ = shell("--db", db, "resolve", "refund-209", "2", "--output", '{"refund":"re_9"}', *WHO)
    (key,) = world.keys
    for words in (
        "step 2 ('refund') of run 'refund-209' that it took effect",
        "refund  (MUTATE)",
        '{"amount":120,"order":209}',
        key,
        "ms ago)" if "ms ago)" in out else " s ago)",
        "attempts:      1",
        '{"refund":"re_9"}',
        "ann",
        "looked at the dashboard",
        "dispatched",
        "The next start hands out what is recorded and goes on behind it",
    ):
        assert words in out
    shown = shell.json("--db", db, "resolve", "refund-209", "2", "--not-executed")
    assert (shown["step"]["step_number"], shown["step"]["idempotency_key"]) == (2, key)
    assert [each["event"] for each in shown["trace"]] == ["dispatched"]
    assert [(each["step_number"], each["action"]) for each in shown["next_start"]] == [(2, "dispatch")]


def test_long_arguments_are_cut_in_text_and_whole_in_json(shell: Shell, db: Path) -> None:
    with AgentRunLedger(db) as ledger, pytest.raises(KeyboardInterrupt), ledger.open_run(GOAL, run_id="long") as run:
        run.step("mail", {"text": "x" * 5000}, World().refund, effect=Effect.MUTATE)
    out = shell("--db", db, "resolve", "long", "1", "--not-executed")[1]
    assert "xxx…\n" in out
    assert len(out) < 3000
    shown = shell.json("--db", db, "resolve", "long", "1", "--not-executed")
    assert json.loads(shown["step"]["arguments_json"]) == {"text": "x" * 5000}


def test_what_took_effect_is_handed_out_and_never_sent_again(shell: Shell, db: Path, world: World) -> None:
    status, out, _ = shell("--db", db, "resolve", "refund-209", "2", "--output", '{"refund": "re_9"}', *WHO, "--yes")
    assert (status, "Done: run 'refund-209' is " in out) == (0, True)
    assert play(db, world) == {"refund": "re_9"}
    assert len(world.keys) == 1
    assert {"by": "ann", "reason": "looked at the dashboard"} in said_in_the_log(db, "refund-209")
    (line,) = [line for line in shell.json("--db", db, "trace", "refund-209")["trace"] if line["event"] == "resolved"]
    assert line["step_number"] == 2
    assert "ann" in line["text"]
    assert "looked at the dashboard" in line["text"]
    heads(db)


def test_what_did_not_take_effect_is_sent_once_more_with_the_same_key(shell: Shell, db: Path, world: World) -> None:
    assert shell("--db", db, "resolve", "refund-209", "2", "--not-executed", *WHO, "--yes")[0] == 0
    assert [each["action"] for each in shell.json("--db", db, "plan", "refund-209")["plan"]] == ["dispatch"]
    assert play(db, world) == {"refund": "re_1"}
    assert len(world.keys) == 2
    assert len(set(world.keys)) == 1
    assert {"by": "ann", "reason": "looked at the dashboard"} in said_in_the_log(db, "refund-209")
    heads(db)


def test_without_by_the_log_names_the_user_and_the_host(shell: Shell, db: Path, world: World) -> None:
    shell("--db", db, "cancel", "refund-209", "--yes")
    (said,) = said_in_the_log(db, "refund-209")
    assert said["by"].startswith("ann@")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("-5", -5),
        ("[1.5, true]", [1.5, True]),
        ('"sent"', "sent"),
        ('{"$tuple": [1]}', {"$tuple": [1]}),
        (f"{2**80}", 2**80),
    ],
)
def test_any_json_may_be_the_output(shell: Shell, db: Path, world: World, text: str, value: Any) -> None:
    assert shell("--db", db, "resolve", "refund-209", "2", "--output", text, "--yes")[0] == 0
    assert play(db, world) == value


def test_the_output_comes_from_a_file_or_from_standard_input_too(
    shell: Shell, db: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = db.parent / "output.json"
    file.write_text('{"refund": "from a file"}\n', encoding="utf-8")
    shown = shell.json("--db", db, "resolve", "refund-209", "2", "--output", f"@{file}")
    assert json.loads(shown["output"]) == {"refund": "from a file"}
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"refund": "from a pipe"}'))
    assert shell("--db", db, "resolve", "refund-209", "2", "--output", "-", "--yes")[0] == 0
    assert play(db, world) == {"refund": "from a pipe"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "sent", "{'a': 1}", "NaN", "[Infinity]", '{"a": 1, "a": 2}', "1 2", "[" * 100_000, '"\\ud800"', "\x1b[31m", "-"],
)  # fmt: skip
def test_what_is_no_json_is_one_safe_line(
    shell: Shell, db: Path, world: World, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    before = heads(db)
    assert "--output" in shell.refused("--db", db, "resolve", "refund-209", "2", "--output", text, "--yes")
    assert heads(db) == before


def test_a_file_that_is_not_there_or_is_no_text_is_one_line(shell: Shell, db: Path, world: World) -> None:
    assert "No such file" in shell.refused("--db", db, "resolve", "refund-209", "2", "--output", "@nowhere.json")
    (db.parent / "bytes").write_bytes(b"\xff\xfe")
    assert "is no JSON" in shell.refused("--db", db, "resolve", "refund-209", "2", "--output", f"@{db.parent}/bytes")


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", "9" * 30, "٣"])
def test_a_step_number_is_a_number(shell: Shell, db: Path, world: World, number: str) -> None:
    assert shell.refused("--db", db, "resolve", "refund-209", number, "--not-executed")


def test_only_a_step_that_is_not_settled_can_be_resolved(
    shell: Shell, db: Path, world: World, request_id: str, dead: str, quarantined: str
) -> None:
    before = heads(db)
    for given, said in (
        (["refund-209", "1"], "RESOLVE of step 1, which is COMPLETED already"),
        (["refund-209", "7"], "has no step 7: it has 2 steps"),
        (["payment", "1"], "step 1 of run 'payment' calls nobody"),
        (["dead", "1"], "a run that is DEAD_LETTER cannot take RESOLVE"),
        (["halted", "1"], "a run that is QUARANTINE cannot take RESOLVE"),
        (["nobody", "1"], "nobody"),
    ):
        for way in (["--not-executed"], ["--output", "1"], ["--not-executed", "--yes"]):
            assert said in shell.refused("--db", db, "resolve", *given, *way)
    assert "--output" in shell.refused("--db", db, "resolve", "refund-209", "2")
    assert "not allowed with" in shell.refused(
        "--db", db, "resolve", "refund-209", "2", "--output", "1", "--not-executed"
    )
    assert heads(db) == before


# --- release, cancel --------------------------------------------------------------------------------------------------


def test_a_released_run_goes_on(shell: Shell, db: Path, quarantined: str) -> None:
    assert "out of quarantine" in shell("--db", db, "show", quarantined)[1]
    assert shell("--db", db, "release", quarantined, *WHO, "--yes")[0] == 0
    with AgentRunLedger(db) as ledger:
        assert ledger.get_run(quarantined).status == RunState.CHECKPOINTED
        ledger.resume_run(quarantined)
        assert ledger.execute_step(quarantined, "poll", {}, lambda: "done", effect=Effect.READ) == "done"
    assert said_in_the_log(db, quarantined) == [{"by": "ann", "reason": "looked at the dashboard"}]


def test_a_cancelled_run_is_closed(shell: Shell, db: Path, world: World) -> None:
    out = shell("--db", db, "cancel", "refund-209", *WHO, "--yes")[1]
    assert "! In doubt: step 2. What it did outside, if it did it, is not undone." in out
    assert "Done: run 'refund-209' is CANCELLED." in out
    assert said_in_the_log(db, "refund-209") == [{"by": "ann", "reason": "looked at the dashboard"}]
    assert "cannot take CANCEL" in shell.refused("--db", db, "cancel", "refund-209", "--yes")


@pytest.mark.parametrize("command", [["release"], ["redrive"]])
def test_a_run_in_a_wrong_state_is_one_line_before_anything_is_shown(
    shell: Shell, db: Path, world: World, command: list[str]
) -> None:
    for more in ([], ["--yes"], ["--json"]):
        assert f"a run that is BLOCKED cannot take {command[0].upper()}" in shell.refused(
            "--db", db, *command, "refund-209", *more
        )


@pytest.mark.parametrize("act", ACTS)
def test_an_unknown_run_is_one_line_for_every_act(
    shell: Shell, db: Path, everything: dict[str, list[str]], act: str
) -> None:
    words = everything[act]
    for run_id in ("nobody", "\u202egnp.exe", "\x1b[31m", " ", "x" * 300):
        for more in ([], ["--yes"]):
            shell.refused("--db", db, words[0], run_id, *words[2:], *more)


@pytest.mark.parametrize("act", ACTS)
def test_a_ledger_that_is_not_there_is_not_made(
    shell: Shell, db: Path, everything: dict[str, list[str]], act: str
) -> None:
    nowhere = db.parent / "nowhere" / "agent.db"
    nowhere.parent.mkdir()
    assert "no database" in shell.refused("--db", nowhere, *everything[act], "--yes")
    assert os.listdir(nowhere.parent) == []


@pytest.mark.parametrize("act", ACTS)
def test_who_acts_has_a_usable_name(shell: Shell, db: Path, everything: dict[str, list[str]], act: str) -> None:
    before = heads(db)
    status, out, err = shell("--db", db, *everything[act], "--yes", "--by", "\x1b[31mann")
    assert (status, is_safe(out), is_one_line(err), "U+001B" in err) == (2, True, True, True)
    assert heads(db) == before


# --- redrive, fork ----------------------------------------------------------------------------------------------------


def test_a_redriven_run_goes_on_behind_what_the_old_one_has(shell: Shell, db: Path, dead: str) -> None:
    before = heads(db)[dead]
    out = shell("--db", db, "redrive", dead, "--max-steps", "9", "--as", "dead-2", *WHO, "--yes")[1]
    assert "with all 3 steps of it" in out
    assert "Done: run 'dead-2' was made and not started." in out
    calls: list[int] = []
    with AgentRunLedger(db) as ledger:
        assert ledger.create_run("count", run_id="dead-2") == "dead-2"
        for number in range(4):
            ledger.execute_step(
                "dead-2", "count", {"n": number}, lambda n=number: calls.append(n) or "done", effect=Effect.READ
            )
        ledger.finish_run("dead-2")
    assert calls == [3]
    assert heads(db)[dead] == before
    assert {"by": "ann", "reason": "looked at the dashboard"} in said_in_the_log(db, "dead-2")


def test_a_fork_has_the_steps_before_and_warns_of_what_may_happen_twice(shell: Shell, db: Path, world: World) -> None:
    shell("--db", db, "resolve", "refund-209", "2", "--output", '{"refund": "re_9"}', "--yes")
    play(db, world)
    out = shell("--db", db, "fork", "refund-209", "--from-step", "2", "--as", "again", *WHO)[1]
    assert "with the 1 step before step 2" in out
    assert "! Step 2, 3 may have changed something already." in out
    assert shell.json("--db", db, "fork", "refund-209", "--from-step", "2")["not_carried"] == [2, 3]
    assert shell("--db", db, "fork", "refund-209", "--from-step", "2", "--as", "again", *WHO, "--yes")[0] == 0
    with AgentRunLedger.open_read_only(db) as ledger:
        assert [step.tool_name for step in ledger.steps("again")] == ["look"]
        assert len(ledger.steps("refund-209")) == 3
    assert {"by": "ann", "reason": "looked at the dashboard"} in said_in_the_log(db, "again")


def test_a_new_run_needs_a_free_name_and_steps_that_exist(shell: Shell, db: Path, dead: str) -> None:
    before = heads(db)
    for command in (["redrive", dead], ["fork", dead, "--from-step", "1"]):
        for more in ([], ["--yes"]):
            assert "there is a run 'dead' already" in shell.refused("--db", db, *command, "--as", dead, *more)
            assert "U+001B" in shell.refused("--db", db, *command, "--as", "\x1b", *more)
    for number, more in (("5", []), ("99", ["--yes"]), ("0", [])):
        shell.refused("--db", db, "fork", dead, "--from-step", number, *more)
    assert heads(db) == before


# --- signals and approvals --------------------------------------------------------------------------------------------


def test_a_signal_arrives_with_its_payload(shell: Shell, db: Path) -> None:
    waiting(db, "order", lambda run: run.wait_for("paid"))
    assert "This run waits for the signal 'paid'." in shell("--db", db, "show", "order")[1]
    payload = '{"amount": 120}'
    assert "The run waits for it." in shell("--db", db, "signal", "order", "paid", "--payload", payload)[1]
    assert "nothing of that name is waited for now" in shell("--db", db, "signal", "order", "sent")[1]
    out = shell("--db", db, "signal", "order", "paid", "--payload", payload, "--by", "ann", "--yes")[1]
    assert "Sent: its program takes it" in out
    assert recovered(db, "order", lambda run: run.wait_for("paid")) == {"amount": 120}
    assert [each["by"] for each in said_in_the_log(db, "order")] == ["ann"]


def test_a_signal_without_a_payload_carries_null(shell: Shell, db: Path) -> None:
    waiting(db, "order", lambda run: [run.wait_for("paid")])
    assert shell("--db", db, "signal", "order", "paid", "--yes")[0] == 0
    assert recovered(db, "order", lambda run: [run.wait_for("paid")]) == [None]


def test_what_waits_for_approval_is_listed_with_its_exact_bytes(shell: Shell, db: Path, request_id: str) -> None:
    for listed in (
        shell.json("--db", db, "approvals")["approvals"],
        shell.json("--db", db, "approvals", "payment")["approvals"],
    ):
        (found,) = listed
        assert (found["run_id"], found["name"], found["digest"]) == ("payment", "pay", request_id)
        assert json.loads(found["arguments_json"])["arguments"] == {"iban": "DE02", "amount": 120}
    out = shell("--db", db, "approvals")[1]
    for words in ('"amount":120', '"iban":"DE02"', request_id, f"approve --digest {request_id} payment pay"):
        assert words in out
    assert shell.refused("--db", db, "approvals", "nobody")


def test_nothing_to_approve_is_said(shell: Shell, db: Path, world: World) -> None:
    assert shell("--db", db, "approvals") == (0, "nothing waits for approval\n", "")
    assert shell.json("--db", db, "approvals") == {"approvals": []}


def test_an_approval_reaches_the_program_with_who_and_why(shell: Shell, db: Path, request_id: str) -> None:
    out = shell("--db", db, "approve", "payment", "pay", "--digest", request_id, *WHO, "--yes")[1]
    assert '"iban":"DE02"' in out
    result = recovered(db, "payment", pays)
    assert result == {"by": "ann", "reason": "looked at the dashboard", "pays": {"iban": "DE02", "amount": 120}}


def test_a_denial_reaches_the_program_with_who_and_why(shell: Shell, db: Path, request_id: str) -> None:
    assert shell("--db", db, "deny", "payment", "pay", "--digest", request_id, *WHO, "--yes")[0] == 0
    said: list[str] = []

    def asks(run: Run) -> str:
        try:
            return str(pays(run))
        except ApprovalDenied as denied:
            said.extend((denied.by, denied.reason))
            return "denied"

    assert recovered(db, "payment", asks) == "denied"
    assert said == ["ann", "looked at the dashboard"]


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_another_digest_or_name_is_refused(shell: Shell, db: Path, request_id: str, verb: str) -> None:
    before = heads(db)
    for digest in ("0" * 64, request_id[:32], request_id.upper(), "", "\x1b[31m"):
        for more in ([], ["--yes"]):
            said = shell.refused("--db", db, verb, "payment", "pay", "--digest", digest, *more)
            assert "another digest" in said
            assert "approvals payment" in said
    assert "what waits is 'pay'" in shell.refused("--db", db, verb, "payment", "sell", "--digest", request_id, "--yes")
    assert heads(db) == before
    with AgentRunLedger.open_read_only(db) as ledger:
        assert ledger._store.inbox("payment", 0) == []


def test_arguments_that_would_deceive_a_terminal_are_spelt_out_whole_and_said_so(shell: Shell, db: Path) -> None:
    hidden = {"to": "\u202eeb.elpmaxe", "note": "\u200bx" * 300, "line": "a\u2028b", "esc": "\x1b[2J"}
    waiting(db, "sly", lambda run: run.approve("pay", hidden).by)
    (found,) = shell.json("--db", db, "approvals")["approvals"]
    for command in (["approvals"], ["approve", "sly", "pay", "--digest", found["digest"]]):
        out = shell("--db", db, *command)[1]
        assert is_safe(out)
        assert "! These arguments hold characters that a terminal obeys or hides" in out
        assert "\\u202eeb.elpmaxe" in out
        assert out.count("\\u200bx") == 300


def test_when_an_approval_runs_out_is_shown(shell: Shell, db: Path) -> None:
    waiting(db, "payment", lambda run: run.approve("pay", {}, timeout=86_400.0).by)
    assert "(in 23 h 59 min)" in (out := shell("--db", db, "approvals")[1]) or "(in 1 d 0 h)" in out
    assert ", until " in shell("--db", db, "show", "payment")[1]


# --- runs that somebody works on --------------------------------------------------------------------------------------


OWNER = """
with AgentRunLedger(arguments[0]) as ledger:
    with ledger.open_run("work", run_id="owned") as run:
        def slow():
            tell("in the step")
            return hear()
        run.step("slow", {}, slow, effect=Effect.READ)
        try:
            tell(run.wait_for("paid", timeout=60))
        except RunClosed as closed:
            tell(closed.status)
"""


def test_a_run_that_another_process_owns_is_cancelled_by_its_owner(shell: Shell, db: Path) -> None:
    with child(OWNER, db) as owner:
        assert owner.hear() == "in the step"
        preview = shell("--db", db, "cancel", "owned", *WHO)[1]
        assert "works on this run now: it is asked to" in preview
        status, out, err = shell("--db", db, "cancel", "owned", *WHO, "--yes")
        assert (status, err) == (0, "")
        assert "Asked: the run's owner takes this into the log" in out
        with AgentRunLedger.open_read_only(db) as ledger:
            assert ledger.get_run("owned").status == "RUNNING"
        owner.tell("the outcome")
        assert owner.hear() == "CANCELLED"
    assert said_in_the_log(db, "owned") == [{"by": "ann", "reason": "looked at the dashboard"}]
    with AgentRunLedger.open_read_only(db) as ledger:
        assert [step.state for step in ledger.steps("owned")] == ["COMPLETED"], "its step was recorded first"
    heads(db)


def test_a_signal_reaches_the_process_that_owns_the_run(shell: Shell, db: Path) -> None:
    with child(OWNER, db) as owner:
        assert owner.hear() == "in the step"
        assert shell("--db", db, "signal", "owned", "paid", "--payload", "120", "--by", "ann", "--yes")[0] == 0
        owner.tell("the outcome")
        assert owner.hear() == 120
        assert owner.ends() == 0
    assert [each["by"] for each in said_in_the_log(db, "owned")] == ["ann"]


DRIVER = """
def interrupted():
    raise KeyboardInterrupt

ledger = AgentRunLedger(arguments[0], lease_seconds=600, heartbeat_seconds=0.05)
ledger.create_run("drive step by step", run_id="owned")
try:
    ledger.execute_step("owned", "refund", {"order": 7}, interrupted, effect=Effect.MUTATE)
except KeyboardInterrupt:
    tell("in doubt")
hear()
ledger.close()
tell("closed")
"""


def test_a_step_of_a_run_that_another_process_owns_is_resolved_through_its_inbox(shell: Shell, db: Path) -> None:
    with child(DRIVER, db) as owner:
        assert owner.hear() == "in doubt"
        status, out, _ = shell("--db", db, "resolve", "owned", "1", "--output", '"re_9"', *WHO, "--yes")
        assert status == 0
        assert "\n\nAsked: " in out or "\n\nDone: " in out
        owner.tell()
        assert owner.hear() == "closed"
    with AgentRunLedger(db) as ledger:
        ledger.create_run("drive step by step", run_id="owned")
        assert ledger.execute_step("owned", "refund", {"order": 7}, never, effect=Effect.MUTATE) == "re_9"
    assert {"by": "ann", "reason": "looked at the dashboard"} in said_in_the_log(db, "owned")
    heads(db)


# --- hostile names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "-x", "--yes", "a'b\\c $(id)"])
def test_hostile_names_are_data_in_every_act_and_in_every_command_that_is_offered(
    shell: Shell, db: Path, name: str
) -> None:
    with AgentRunLedger(db) as ledger, pytest.raises(KeyboardInterrupt), ledger.open_run(name, run_id=name) as run:
        run.step(name, {name: name}, World().refund, effect=Effect.MUTATE)
    for command in (["show"], ["plan"], ["trace"], ["cancel"], ["fork", "--from-step", "1"]):
        status, out, err = shell("--db", db, *command, "--", name)
        assert (status in (0, 1, 3), err) == (True, "")
        assert is_safe(out)
        assert shell("--db", db, *command, "--json", "--", name)[1].isascii()
    offered = [
        line.strip()
        for line in shell("--db", db, "show", "--", name)[1].splitlines()
        if line.startswith("  agent-run-ledger") and " --not-executed " in line
    ]
    program = db.parent / "agent-run-ledger"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agent_run_ledger "$@"\n')
    program.chmod(0o755)
    path = f"{db.parent}{os.pathsep}{os.environ['PATH']}"
    (line,) = offered
    done = subprocess.run(
        ["bash", "-c", line.replace(" --not-executed ", " --not-executed --yes ")],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), line
    with AgentRunLedger.open_read_only(db) as ledger:
        assert [each.action for each in ledger.plan(name)] == ["dispatch"]
