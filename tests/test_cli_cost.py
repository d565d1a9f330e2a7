"""What runs have cost and why they were halted, on the command line: cost, explain."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    CallBlocked,
    Effect,
    LoopDetectorPolicy,
    Price,
    PriceBook,
    Run,
    RunawayLoopDetectedException,
    StepFailed,
)
from agent_run_ledger.cli.costs import dollars
from agent_run_ledger.cli.terminal import columns_of
from support.ledgers import raw
from support.shell import TEXTS, Shell, heads, is_safe

PRICES = PriceBook({"m": Price(input="2", output="10")})
READING = [["cost"], ["cost", "paid"], ["cost", "--limit", "1"], ["explain", "loop"], ["explain", "spent"]]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def answer() -> dict[str, Any]:
    return {"model": "m", "usage": {"prompt_tokens": 1000, "completion_tokens": 500}}


def fails() -> None:
    raise ValueError("no such page: " + "very " * 40 + "far")


def loops(run: Run) -> None:
    while True:
        with contextlib.suppress(StepFailed, CallBlocked):
            run.step("fetch", {"page": "x" * 100}, fails, effect=Effect.READ)


def spends(run: Run) -> None:
    for number in range(3):
        run.step("ask", {"number": number}, answer, kind="model", max_tokens=1500, max_usd="0.01")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with a run that paid, one that its budget ended, one that was told, blocked and halted, and one that cost nothing."""
    path = tmp_path / "agent.db"
    policy = LoopDetectorPolicy(reactions={"suspected": "notice", "certain": "notice"})
    with AgentRunLedger(path, prices=PRICES, policy=policy) as ledger:
        with ledger.open_run("pays", run_id="paid") as run:
            run.step("ask", {}, answer, kind="model")
            run.step("forgets", {}, lambda: "?", kind="model")
        with pytest.raises(RunawayLoopDetectedException), ledger.open_run("loops", run_id="loop") as run:
            loops(run)
        ledger.create_run("idle", run_id="idle")
    budget = Budget(tokens=2000, usd="0.5")
    with (
        AgentRunLedger(path, prices=PRICES, budget=budget) as ledger,
        pytest.raises(BudgetExceededException),
        ledger.open_run("spends", run_id="spent") as run,
    ):
        spends(run)
    return path


@pytest.mark.parametrize("command", READING)
def test_looking_writes_nothing_and_is_safe_in_text_and_json(shell: Shell, db: Path, command: list[str]) -> None:
    before = heads(db)
    status, out, err = shell("--db", db, *command)
    assert (status, err) == (0, "")
    assert is_safe(out)
    assert "(null)" not in out
    shell.json("--db", db, *command)
    assert heads(db) == before


@pytest.mark.parametrize("command", ["cost", "explain"])
@pytest.mark.parametrize("run_id", ["nobody", "\u202egnp.exe", "\x1b[31m", " "])
def test_an_unknown_run_is_one_safe_line(shell: Shell, db: Path, command: str, run_id: str) -> None:
    shell.refused("--db", db, command, run_id)


@pytest.mark.parametrize("command", [["cost"], ["explain", "paid"]])
def test_a_missing_file_is_one_line_and_is_not_made(shell: Shell, tmp_path: Path, command: list[str]) -> None:
    assert "no database" in shell.refused("--db", tmp_path / "no.db", *command)
    assert os.listdir(tmp_path) == []


# --- cost -------------------------------------------------------------------------------------------------------------


def test_cost_of_a_run_has_its_buckets_models_tools_and_what_is_not_known(shell: Shell, db: Path) -> None:
    _, out, _ = shell("--db", db, "cost", "paid")
    lines = [line.split() for line in out.splitlines()]
    assert ["spent:", "1,500", "tokens,", "0.007", "USD"] in lines
    assert ["tokens:", "1,000", "input,", "500", "output"] in lines
    assert ["m", "1", "1,500", "0.007"] in lines
    assert ["(not", "known)", "1", "0", "0", "1"] in lines
    assert ["forgets", "1", "0", "0", "1"] in lines
    assert "! Of 1 call nobody told how many tokens it used." in out


def test_cost_of_a_run_in_json_has_every_digit_as_text(shell: Shell, db: Path) -> None:
    said = shell.json("--db", db, "cost", "paid")
    assert (said["run_id"], said["spent"]["tokens"], said["spent"]["usd"]) == ("paid", 1500, "0.007")
    model = said["models"]["m"]
    assert (model["input_tokens"], model["cache_read_tokens"], model["output_tokens"]) == (1000, 0, 500)
    assert (said["reserved_usd"], said["saved_usd"], said["limits"]["steps"], said["trouble"]) == ("0", "0", 50, None)
    limits = shell.json("--db", db, "cost", "spent")["limits"]
    assert (limits["steps"], limits["tokens"], limits["usd"], limits["deadline"]) == (50, 2000, "0.5", None)


def test_cost_of_all_runs_lists_those_that_cost_something_and_sums_them(shell: Shell, db: Path) -> None:
    _, out, _ = shell("--db", db, "cost")
    listed = [line.split()[:4] for line in out.splitlines() if line.startswith(("paid", "spent ", "idle", "loop"))]
    assert listed == [["paid", "COMPLETED", "1,500", "0.007"], ["spent", "DEAD_LETTER", "1,500", "0.007"]]
    assert "2 runs have cost nothing" in out
    assert "3,000 tokens, 0.014 USD" in out
    said = shell.json("--db", db, "cost")
    assert (said["run_id"], said["spent"]["usd"], [each["run_id"] for each in said["runs"]]) == (
        None, "0.014", ["paid", "loop", "idle", "spent"],
    )  # fmt: skip
    assert "the newest 1 of 2 runs" in shell("--db", db, "cost", "--limit", "1")[1]
    assert len(shell.json("--db", db, "cost", "--limit", "1")["runs"]) == 1


def test_a_damaged_run_is_an_error_in_words_and_hides_no_other(shell: Shell, db: Path) -> None:
    with raw(db, without_triggers=True) as connection:
        connection.execute("UPDATE entries SET body = ? WHERE run_id = 'paid' AND seq = 3", (b"[]",))
    assert "entry 3" in shell.refused("--db", db, "cost", "paid")
    assert "entry 3" in shell.refused("--db", db, "explain", "paid")
    status, out, err = shell("--db", db, "cost")
    assert (status, err) == (1, "")
    assert "PROBLEM: run 'paid', entry 3" in out
    assert "1,500 tokens, 0.007 USD" in out, "what is not known is in no sum"
    status, out, _ = shell("--db", db, "cost", "--json")
    assert status == 1
    assert [each["run_id"] for each in json.loads(out)["runs"] if each["trouble"]] == ["paid"]


def test_dollars_are_shown_exactly_and_without_an_exponent() -> None:
    from decimal import Decimal

    shown = [dollars(Decimal(each)) for each in ("0", "1E-7", "1.50", "1E+2", "0.00", "123456789.000000001")]
    assert shown == ["0", "0.0000001", "1.5", "100", "0", "123456789.000000001"]


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_shows_the_evidence_side_by_side_and_what_came_before(shell: Shell, db: Path) -> None:
    _, out, _ = shell("--db", db, "explain", "loop")
    assert "rule:          identical_calls" in out
    rows = [line for line in out.splitlines() if line.split()[1:3] == ["fetch", "FAILED"]]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert {row.index('{"page":"xxx') for row in rows} == {rows[0].index('{"page":"xxx')}
    assert len({row[rows[0].index('{"page"') :] for row in rows}) == 1, "what is equal stands in one column"
    assert "What its program was told" in out
    assert "Calls that were refused, while the run went on" in out
    assert f"agent-run-ledger --db {db} redrive loop" in out


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_evidence_fits_the_terminal(shell: Shell, db: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("agent_run_ledger.cli.terminal.width", lambda: columns)
    monkeypatch.setattr("agent_run_ledger.cli.explaining.width", lambda: columns)
    _, out, _ = shell("--db", db, "explain", "loop")
    rows = [line for line in out.splitlines() if line.split()[1:3] == ["fetch", "FAILED"]]
    assert max(map(columns_of, rows)) <= max(columns, 70)


def test_explain_of_a_budget_says_what_was_spent_reserved_and_allowed(shell: Shell, db: Path) -> None:
    _, out, _ = shell("--db", db, "explain", "spent")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "reason: the call may use 1,500 tokens, and of 2,000 tokens 500 tokens are left" in lines
    assert "spent: 1,500 tokens, 0.007 USD" in lines
    assert "reserved: 0 tokens, 0 USD" in lines
    assert "limits: 50 steps, 2,000 tokens, 0.5 USD" in lines
    said = shell.json("--db", db, "explain", "spent")
    assert (said["rule"], said["tool_name"], said["spent_usd"], said["limits"]["usd"]) == (
        "budget",
        "ask",
        "0.007",
        "0.5",
    )


def test_explain_of_a_run_that_stands_says_what_it_waits_for(shell: Shell, db: Path) -> None:
    with AgentRunLedger(db) as ledger, pytest.raises(KeyError), ledger.open_run("stops", run_id="stops"):
        raise KeyError("x")
    _, out, _ = shell("--db", db, "explain", "stops")
    assert "KeyError" in out
    assert "It waits for its program" in out
    assert "It has come to its end: nothing stopped it." in shell("--db", db, "explain", "paid")[1]


@pytest.mark.parametrize("text", TEXTS)
def test_hostile_texts_reach_no_terminal(shell: Shell, db: Path, text: str) -> None:
    def says() -> None:
        raise ValueError(text)

    def goes_round(run: Run) -> None:
        model = {"model": text, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        run.step("ask", {"text": text}, lambda: model, kind="model")
        for _ in range(4):
            with contextlib.suppress(StepFailed):
                run.step("say", {"text": text}, says)

    with (
        AgentRunLedger(db) as ledger,
        pytest.raises(RunawayLoopDetectedException),
        ledger.open_run(text, run_id="hostile") as run,
    ):
        goes_round(run)
    for command in (["cost"], ["cost", "hostile"], ["explain", "hostile"]):
        for more in ([], ["--json"]):
            _, out, err = shell("--db", db, *command, *more)
            assert err == ""
            assert is_safe(out)
