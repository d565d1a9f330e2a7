"""Commands of the command line, run in the process of the test."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.cli import main

PATH, SCRIPT, SQL, TEMPLATE = "../../etc/passwd", "<script>alert(1)</script>", "'; DROP TABLE runs; --", "{{7*7}}"
ELF = "\x7fELF\x02\x01\x01\x00\x00"
TERMINAL = "\x1b[2J\x1b]0;title\x07\x9b31m \u202egnp.exe\u2066 \u2028\r\b"
NAMES = [PATH, SCRIPT, SQL, TEMPLATE, "\u202egnp.exe\u200f"]
TEXTS = [*NAMES, ELF, TERMINAL]


class Shell:
    """Runs a command in this process: its exit status, standard output and standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AGENT_RUN_LEDGER_DB", raising=False)
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self._capsys.readouterr()
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def json(self, *arguments: str | Path) -> Any:
        """What a command prints with --json; it must say nothing on standard error."""
        _, out, err = self(*arguments, "--json")
        assert err == ""
        return json.loads(out)

    def refused(self, *arguments: str | Path) -> str:
        """The one safe line on standard error with which a command refuses; it prints nothing else and returns 2."""
        status, out, err = self(*arguments)
        assert (status, out) == (2, ""), (status, out, err)
        assert is_one_line(err)
        assert is_safe(err)
        return err


def is_one_line(text: str) -> bool:
    return text.endswith("\n") and text.count("\n") == 1


def is_safe(text: str) -> bool:
    return all(each == "\n" or unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for each in text)


def heads(path: Path) -> dict[str, tuple[int, bytes]]:
    """Size and root of every run's log, which is sound."""
    with AgentRunLedger.open_read_only(path) as ledger:
        assert ledger.verify().findings == []
        found = {run.run_id: ledger.tree_head(run.run_id) for run in ledger.runs()}
    return {run_id: (head.size, head.root) for run_id, head in found.items()}
