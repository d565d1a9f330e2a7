"""No false alarm: `verify` finds nothing in ledgers that random programs have made, crashed and recovered ones included."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Store
from support.healthy import healthy
from support.ledgers import Bench

LEDGERS, AT_A_TIME = 5_000, 500
OFTEN = {
    "created", "intent", "outcome", "waiting", "value", "granted", "settled", "signal", "parked", "asked", "answered", "refused",
    "finished", "forked", "exhausted", "cancelled",
}  # fmt: skip
"""The kinds of entries of which there are some among so many ledgers."""


def findings(store: Store, clock: object, seen: Counter[str]) -> list[object]:
    for summary in store.summaries():
        seen.update(row.kind for row in store.read(summary.head.run_id))
        seen["died"] += summary.head.owner is not None
    with closing(AgentRunLedger(store, clock=clock)) as ledger:  # type: ignore[arg-type]
        return list(ledger.verify().findings)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, LEDGERS, AT_A_TIME))
def test_nothing_is_found_in_a_healthy_ledger(first: int) -> None:
    seen = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that a step is dispatched again, or a divergence met: programs are told, and go on
        for seed in range(first, first + AT_A_TIME):
            world = healthy(seed)
            assert findings(world.store(), world.clock, seen) == [], f"seed {seed}"
    assert seen.keys() >= OFTEN
    assert seen["died"]


@pytest.mark.slow
def test_nor_in_one_on_a_disk(tmp_path: Path) -> None:
    seen = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(120):
            folder = tmp_path / str(seed)
            folder.mkdir()
            world = healthy(seed, folder)
            assert findings(world.store(), world.clock, seen) == [], f"seed {seed}"


def test_a_fork_says_what_its_own_entries_have_spent(tmp_path: Path) -> None:
    """What was carried over without the call that was paid for says nothing of that."""
    with Bench("memory", tmp_path) as bench:
        ledger = bench.open()

        @ledger.tool(kind="model", max_usd="1.00")
        def ask() -> None:
            from agent_run_ledger import current_step

            current_step().record_usage(usd="0.50")

        with ledger.open_run("pay", "paid") as run:
            ask()
            ledger.signal("paid", "later", by="ann")
            run.step("look", {}, lambda: 1)
        forked = ledger.fork("paid", 1, by="ann")
        assert "signal" in bench.kinds(forked)
        assert all("spent" not in json.loads(row.body) for row in bench.rows(forked))
        assert ledger.verify().findings == []
