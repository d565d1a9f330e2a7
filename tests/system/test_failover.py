"""A primary that is no more: what was acknowledged is with its standby, and work goes on there, in the same processes."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, StoreUnavailable
from agent_run_ledger.stores.postgres import migrate
from support.chaos.arenas import PairArena
from support.chaos.schedule import Fault
from support.chaos.storm import Plan, blow
from support.pair import Pair

pytestmark = pytest.mark.system


def test_workers_go_on_at_the_standby_and_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    faulthandler.dump_traceback_later(280, exit=True)  # longer than tests may take elsewhere
    plan = Plan(workers=3, runs=120, seconds=8.0, faults=(Fault(3.0, "failover", 0, 0.0, 0),))
    report = blow(plan, PairArena(), tmp_path)
    assert report.problems == [], "\n".join(report.summary)
    assert report.replaced == 0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as started:
        migrate(started.dsn())
        yield started


@pytest.mark.parametrize("asked", ["create", "submit", "signal", "step", "claim"])
def test_what_only_the_primary_has_is_never_acknowledged(asked: str, pair: Pair) -> None:
    with AgentRunLedger(pair.dsn(), outage_seconds=3.0, owner="one") as ledger:

        @ledger.agent()
        def agent(asked: str) -> str:
            return asked

        run_id = f"{asked}, there before"
        ledger.submit(agent, asked, run_id=run_id)
        own = ledger.create_run("goal", f"{asked}, our own")
        verbs: dict[str, Callable[[], Any]] = {
            "create": lambda: ledger.create_run("goal", f"{asked} anew"),
            "submit": lambda: ledger.submit(agent, asked, run_id=f"{asked} anew"),
            "signal": lambda: ledger.signal(run_id, "word"),
            "step": lambda: ledger.execute_step(own, "work", {}, lambda: None, effect="IDEMPOTENT"),
            "claim": lambda: ledger._store.claim(run_id, "one", 30.0),
        }
        pair.standby.kill()
        try:
            with pytest.raises(StoreUnavailable):
                verbs[asked]()
        finally:
            pair.standby.start()
        verbs[asked]()  # as soon as there is a standby
        assert ledger.verify().findings == []


def test_no_run_is_let_go_of_before_the_standby_knows(pair: Pair) -> None:
    with AgentRunLedger(pair.dsn(), outage_seconds=3.0, owner="one") as ledger:
        run_id = ledger.create_run("goal", "moved")
        head = ledger._store.head(run_id)
        assert head is not None
        pair.standby.kill()
        try:
            with pytest.raises(StoreUnavailable):  # else it could go on in two places, here behind a failover and there
                ledger._store.move_away(run_id, head.token, "elsewhere.db")
        finally:
            pair.standby.start()
