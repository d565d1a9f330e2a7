"""Four processes compete for runs at nine tenths of their budgets, and are killed: what the outside was asked for never passes a limit."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Row
from support.processes import Child, child
from support.spending import KEEPING, LARGE, LAST, LIMIT, OVERRUNNING, judge, judge_account

WORKER = "from support.spending import work; work(*arguments)"
MOST_KILLS = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_the_outside_was_asked_for_passes_no_limit_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    asked, kills = compete(tmp_path / "outside", str(tmp_path / "runs.db"), seed, MOST_KILLS)
    used = Counter[str]()
    for note in asked:
        used[note["run"]] += note["used"]
    assert kills > 8
    side_by_side, overruns = 0, 0
    with AgentRunLedger(tmp_path / "runs.db") as ledger:
        assert ledger.verify().findings == []
        for run_id in (*KEEPING, *OVERRUNNING):
            assert ledger.get_run(run_id).status == "DEAD_LETTER"
            rows = ledger._store.read(run_id)
            judge(rows, LIMIT, used[run_id], keeps=run_id in KEEPING)
            assert run_id in OVERRUNNING or used[run_id] <= (LIMIT.tokens or 0)
            side_by_side = max(side_by_side, most_under_way(rows))
            overruns += sum("overran" in json.loads(row.body) for row in rows)
    assert side_by_side >= 4
    assert overruns


@pytest.mark.slow
def test_nor_do_runs_that_share_a_budget_pass_its_limit_together(tmp_path: Path, place: str) -> None:
    asked, kills = compete(tmp_path / "outside", place, 7, 12, "shares")
    used = sum(note["used"] for note in asked)
    assert kills
    assert len({note["run"] for note in asked}) >= 4
    with AgentRunLedger(place) as ledger:
        assert ledger.verify().findings == []
        assert {run.status for run in ledger.runs()} == {"DEAD_LETTER"}
        (account,) = ledger.budgets()
        committed = judge_account(ledger._store.read(account.account), LIMIT)
        assert used <= committed.tokens <= (LIMIT.tokens or 0)
        assert committed.tokens > 0.8 * (LIMIT.tokens or 0)
        assert sum(run.spent_tokens for run in ledger.runs()) == account.spent_tokens


def compete(outside: Path, place: str, seed: int, most_kills: int, *more: str) -> tuple[list[dict[str, Any]], int]:
    """Have four processes go on with the runs, and others in the place of those that are killed. Returns what models were asked for."""
    draw = random.Random(seed)
    asked: list[dict[str, Any]] = []
    os.mkfifo(outside)
    with ExitStack() as stack:
        notes = stack.enter_context(open(os.open(outside, os.O_RDWR), encoding="utf-8"))  # never at its end
        workers: dict[str, Child] = {}
        kills = 0

        def another() -> None:
            name = f"{seed}-{kills}-{len(workers)}"
            workers[name] = stack.enter_context(child(WORKER, outside, place, name, *more))

        while len(workers) < 4:
            another()
        while workers:
            note = json.loads(notes.readline())
            if note["kind"] == "ended":
                if (worker := workers.pop(note["worker"], None)) is not None:
                    assert worker.ends() == 0
                continue
            asked.append(note)
            if note["run"] != LAST and kills < most_kills and draw.random() < (0.01 if note["used"] == LARGE else 0.15):
                for _ in range(draw.randrange(30_000)):
                    pass
                victim = (
                    note["worker"] if note["worker"] in workers and draw.random() < 0.7 else draw.choice([*workers])
                )
                workers.pop(victim).kill()
                kills += 1
                another()
    return asked, kills


def most_under_way(rows: list[Row]) -> int:
    """How many calls were under way at once at the most."""
    under_way, most = set[str | None](), 0
    for row in rows:
        (under_way.add if row.kind == "intent" else under_way.discard)(row.position)
        most = max(most, len(under_way))
    return most
