"""The benchmark that kills what it replays counts what it says that it counts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.halting import KINDS, STEPS
from support.processes import environment

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "replay_recordings.py"
PROMISES = ("calls repeated", "outcomes changed", "runs lost", "halts moved", "findings of verify")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A recording of a loop of each of four kinds, and of a run in which nothing repeats itself."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for name in ("one call", "one failing call", "two in turn", "one error, other arguments"):
        draw = random.Random(1)
        made = [KINDS[name].make(draw, at) for at in range(STEPS // 3)]
        steps[name] = [
            {
                "tool": step.tool,
                "args": step.arguments,
                "error": step.error,
                "result": step.error or json.dumps(step.result),
            }
            for step in made
        ]
    steps["healthy"] = [
        {"tool": "read", "args": {"page": at}, "error": None, "result": f"page {at}"} for at in range(8)
    ]
    path = tmp_path / "recordings.jsonl"
    with path.open("w") as file:
        for name, each in steps.items():
            file.write(json.dumps({"id": name, "set": "natural", "steps": each}) + "\n")
    return path


def told(data: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, BENCHMARK, "--data", data, "--dir", data.parent, "--json", *options]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=100)
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def test_every_run_is_killed_and_nothing_is_repeated_changed_or_lost(data: Path) -> None:
    figures = told(data)
    assert {name: figures[name] for name in PROMISES} == dict.fromkeys(PROMISES, 0)
    assert (figures["runs"], figures["runs killed"], figures["runs halted"]) == (5, 5, 0)
    assert figures["steps"] == 5 * 8
    again = figures["calls in doubt made again"] + figures["last failures tried again"]
    assert figures["calls"] == figures["steps"] + again


def test_every_run_that_repeats_itself_is_killed_and_halted_where_it_would_have_been(data: Path) -> None:
    figures = told(data, "--halts")
    assert {name: figures[name] for name in PROMISES} == dict.fromkeys(PROMISES, 0)
    assert (figures["runs"], figures["runs killed"], figures["runs halted"]) == (4, 4, 4)
    assert figures["steps"] == 3 + 3 + 6 + 5
