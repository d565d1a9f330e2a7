"""Forgetting on the command line: what is shown before, what is done with --yes, and that what still holds the bytes is said."""

from __future__ import annotations

import importlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from support.shell import NAMES, Shell, heads, is_safe

SECRET = "4111 1111 1111 1111"
WHO = ("--by", "ann", "--reason", "the customer asked for it")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("LOGNAME", "ann")
    return Shell(capsys, monkeypatch)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A ledger with two runs that have ended and one that goes on."""
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        for run_id in ("refund-209", "refund-210", "open"):
            ledger.create_run("refund the order", run_id)
            for number in range(2):
                ledger.execute_step(run_id, "pay", {"card": SECRET, "n": number}, lambda card, n: card)
            if run_id != "open":
                ledger.finish_run(run_id, SECRET)
    return path


def test_forget_shows_what_it_would_erase_and_erases_it_only_with_yes(shell: Shell, db: Path) -> None:
    before = heads(db)
    status, out, _ = shell("--db", db, "forget", "refund-209", *WHO)
    assert status == 3
    assert "This will erase 6 payloads of run 'refund-209'." in out
    assert "Nothing was written. With --yes it is done." in out
    assert heads(db) == before
    status, out, _ = shell("--db", db, "forget", "refund-209", *WHO, "--yes")
    assert status == 0
    assert "pending" not in out
    with AgentRunLedger.open_read_only(db) as ledger:
        assert {step.output_json for step in ledger.steps("refund-209")} == {None}
        assert ledger.trace("refund-209")[-1].text == "all payloads (by ann): the customer asked for it"
    assert shell("--db", db, "verify")[0] == 0


def test_forget_takes_a_step_or_all_with_the_secret(shell: Shell, db: Path) -> None:
    data = shell.json("--db", db, "forget", "refund-209", "--step", "2", "--yes")
    assert (data["is_done"], data["run"]["payloads"], data["run"]["pending"]) == (True, 2, [])
    data = shell.json("--db", db, "forget", "refund-209", "--all")
    assert (data["is_done"], data["run"]["payloads"], data["run"]["is_everything"]) == (False, 4, True)
    assert "more than one step" in shell.refused("--db", db, "forget", "refund-209", "--all", "--step", "2")
    assert shell("--db", db, "forget", "refund-209", "--all", "--yes")[0] == 0
    with AgentRunLedger.open_read_only(db) as ledger:
        assert ledger.verify().ok


def test_forget_refuses_a_run_that_goes_on_and_one_that_is_not_there(shell: Shell, db: Path) -> None:
    assert "its replay needs what is recorded" in shell.refused("--db", db, "forget", "open", "--yes")
    assert "there is no run" in shell.refused("--db", db, "forget", "unknown", "--yes")
    assert "has no step 7" in shell.refused("--db", db, "forget", "refund-209", "--step", "7", "--yes")


def test_what_still_holds_the_bytes_is_said(shell: Shell, db: Path) -> None:
    with AgentRunLedger(db), closing(sqlite3.connect(db, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        status, out, _ = shell("--db", db, "forget", "refund-209", "--yes")
        assert status == 0
        assert "! pending: somebody still reads an older state of the database" in out


def test_gc_lists_deletes_and_leaves_what_is_not_old(shell: Shell, db: Path) -> None:
    status, out, _ = shell("--db", db, "gc", "--older-than", "1d", "--dry-run")
    assert (status, "No run is that old." in out) == (0, True)
    data = shell.json("--db", db, "gc", "--older-than", "0s", "--dry-run")
    assert (data["is_done"], [each["run_id"] for each in data["runs"]]) == (False, ["refund-209", "refund-210"])
    status, out, _ = shell("--db", db, "gc", "--older-than", "0s")
    assert status == 3
    assert "This will delete these runs." in out
    status, out, _ = shell("--db", db, "gc", "--older-than", "0s", *WHO, "--yes")
    assert (status, "Done: 2 runs." in out) == (0, True)
    assert list(heads(db)) == ["open"]
    assert "was deleted by 'ann'" in shell.refused("--db", db, "show", "refund-209")


def test_gc_keeps_proofs_where_that_is_asked(shell: Shell, db: Path) -> None:
    before = heads(db)
    data = shell.json("--db", db, "gc", "--older-than", "0s", "--keep-proofs", "--yes", "--no-scrub")
    assert [(each["payloads"], each["is_deleted"]) for each in data["runs"]] == [(6, False)] * 2
    after = heads(db)
    assert [after[run_id][0] - before[run_id][0] for run_id in before] == [1, 1, 0]


@pytest.mark.parametrize("age", ["30", "d", "-1d", "nan d", "1y", "", "infd"])
def test_an_age_that_is_none_is_a_line(shell: Shell, db: Path, age: str) -> None:
    assert "a time such as 30d" in shell.refused("--db", db, "gc", f"--older-than={age}")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_kind_are_shown_safely(shell: Shell, db: Path, name: str) -> None:
    with AgentRunLedger(db) as ledger:
        ledger.create_run(name, name)
        ledger.finish_run(name)
    for arguments in (("forget", "--yes", "--", name), ("gc", "--older-than", "0s", "--yes")):
        status, out, err = shell("--db", db, *arguments)
        assert (status, err) == (0, "")
        assert is_safe(out)


# --- encrypted --------------------------------------------------------------------------------------------------------

KEYS = """
from agent_run_ledger import Encryption

keys = {"2026-10": b"o" * 32, "2026-11": b"n" * 32}
old = Encryption(key_id="2026-10", key=keys.__getitem__)
new = Encryption(key_id="2026-11", key=keys.__getitem__)
"""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that has keys."""
    name = f"keys_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(KEYS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_every_command_takes_keys_and_says_what_it_lacks_without_them(shell: Shell, tmp_path: Path, keys: str) -> None:
    db = tmp_path / "encrypted.db"
    with AgentRunLedger(db, encryption=made(keys).old) as ledger, ledger.open_run(SECRET, "one") as run:
        run.step("pay", {"card": SECRET}, lambda card: card)
    assert SECRET in shell("--db", db, "--keys", f"{keys}:old", "show", "one")[1]
    assert SECRET in shell("--db", db, "show", "one", "--keys", f"{keys}:old")[1]
    assert "encrypted under the key '2026-10'" in shell.refused("--db", db, "show", "one")
    assert "encrypted under the key '2026-10'" in shell.refused("--db", db, "forget", "one", "--yes")
    status, out, _ = shell("--db", db, "runs")
    assert (status, "one" in out, SECRET in out) == (0, True, False)
    status, out, _ = shell("--db", db, "verify")
    assert (status, "4 payloads could not be held to the log" in out) == (0, True)
    status, out, _ = shell("--db", db, "verify", "--keys", f"{keys}:old")
    assert (status, "could not be held" in out) == (0, False)
    assert shell("--db", db, "doctor", "--keys", f"{keys}:old")[0] == 0
    assert "several" in shell.refused("--db", db, "--keys", keys, "runs")
    assert "has no 'neither'" in shell.refused("--db", db, "--keys", f"{keys}:neither", "runs")


def test_rewrap_seals_all_keys_anew_with_yes(
    shell: Shell, tmp_path: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "encrypted.db"
    with AgentRunLedger(db, encryption=made(keys).old) as ledger, ledger.open_run(SECRET, "one"):
        pass
    assert "which keys?" in shell.refused("--db", db, "rewrap", "--yes")
    monkeypatch.setenv("AGENT_RUN_LEDGER_KEYS", f"{keys}:new")
    assert shell("--db", db, "rewrap")[0] == 3
    assert shell.json("--db", db, "rewrap", "--yes")["runs"] == ["one"]
    assert shell.json("--db", db, "rewrap", "--yes")["runs"] == []
    assert "Done: no runs." in shell("--db", db, "rewrap", "--yes")[1]
    assert SECRET in shell("--db", db, "show", "one")[1]


def made(module: str) -> Any:
    return importlib.import_module(module)
