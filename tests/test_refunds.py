"""209 refunds, each killed when the money has moved: none is made twice. The script that says so is a benchmark, since others can run it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from support.processes import TESTS, environment

SCRIPT = TESTS.parent / "benchmarks" / "refunds.py"


@pytest.fixture(scope="module", params=[12, pytest.param(209, marks=pytest.mark.slow)])
def figures(request: pytest.FixtureRequest) -> tuple[int, dict[str, dict[str, Any]]]:
    """How many refunds there were, and what the receiver's log says of them, by what the tool declares."""
    command = [sys.executable, str(SCRIPT), "--json", "--no-peers", "--count", str(request.param)]
    told = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True).stdout
    rows: list[dict[str, Any]] = json.loads(told)
    assert all(row["killed"] == request.param for row in rows)
    return request.param, {row["subject"].partition(", ")[2]: row for row in rows}


def test_with_a_key_every_refund_is_sent_again_and_none_is_made_twice(figures: Any) -> None:
    count, rows = figures
    row = rows["IDEMPOTENT, a key"]
    assert (row["requests"], row["refunds"], row["duplicates"]) == (2 * count, count, 0)
    assert (row["finished"], row["parked"]) == (count, 0)


def test_with_a_receipt_no_refund_is_sent_again(figures: Any) -> None:
    count, rows = figures
    row = rows["MUTATE, a receipt"]
    assert (row["requests"], row["refunds"], row["duplicates"]) == (count, count, 0)
    assert (row["finished"], row["parked"]) == (count, 0)


def test_with_neither_all_are_parked_and_nothing_is_sent(figures: Any) -> None:
    count, rows = figures
    row = rows["MUTATE, neither"]
    assert (row["requests"], row["refunds"], row["duplicates"]) == (count, count, 0)
    assert (row["finished"], row["parked"]) == (0, count)


def test_no_model_is_asked_twice_for_what_is_recorded(figures: Any) -> None:
    count, rows = figures
    assert [row["model calls"] for row in rows.values()] == [count] * 3
