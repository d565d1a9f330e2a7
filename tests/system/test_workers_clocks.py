"""Workers whose wall clocks disagree by three minutes: no live lease is taken, and on a server timers are by the server's clock."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.stores.postgres import migrate
from support.chaos.arenas import ServerArena
from support.chaos.schedule import DISTURBANCES, schedule
from support.chaos.storm import Plan, blow
from support.databases import databases
from support.faketime import clocked
from support.processes import child
from support.witness import Witness

BEHIND, AHEAD = "-90s", "+90s"

WORKER = """
from pathlib import Path
from support.faketime import sleep_otherwise
from support.witness import Witness
import time
sleep_otherwise()
place, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(place, lease_seconds=4, heartbeat_seconds=0.5)

@ledger.tool(effect="READ")
def look(number):
    witness.note("look", number=number, clock=time.time())
    time.sleep(6)  # longer than the lease
    return number

@ledger.agent()
def agent(number):
    return look(number)

with ledger.worker(concurrency=3):
    tell("working")
    hear()
ledger.close()
"""

ASKER = """
from support.faketime import sleep_otherwise
sleep_otherwise()
AgentRunLedger(arguments[0]).signal(arguments[1], "word", "it is late")
tell("sent")
"""


@pytest.mark.system("faketime")
def test_no_live_lease_is_taken(place: str, tmp_path: Path) -> None:
    witness = Witness(tmp_path / "witness")
    with (
        AgentRunLedger(place) as ledger,
        child(WORKER, place, witness.path, prefix=clocked(BEHIND)) as one,
        child(WORKER, place, witness.path, prefix=clocked(AHEAD)) as two,
    ):

        @ledger.agent()
        def agent(number: int) -> int:
            raise AssertionError("workers run it")

        assert (one.hear(), two.hear()) == ("working", "working")
        handles = [ledger.submit(agent, number, run_id=f"run-{number}") for number in range(6)]
        assert [handle.result(90) for handle in handles] == list(range(6))
        for process in (one, two):
            process.tell("end")
            assert process.ends() == 0
        notes = witness.notes("look")
        assert sorted(note["number"] for note in notes) == list(range(6)), "each step once"
        assert max(note["clock"] for note in notes) - min(note["clock"] for note in notes) > 120, "both have worked"
        assert {run.fencing_token for run in ledger.runs()} == {1}, "each run was taken once"
        assert ledger.verify().findings == []


@pytest.mark.system("faketime")
def test_timers_and_delays_are_by_the_clock_of_the_server(tmp_path: Path) -> None:
    faulthandler.dump_traceback_later(280, exit=True)  # it may take longer than others
    terms = {"seconds": 8.0, "every": 1.0, "lease_seconds": 4.0}
    faults = tuple(schedule(1, DISTURBANCES, slots=2, **terms))
    plan = Plan(workers=2, runs=24, seconds=8.0, lease_seconds=4.0, clocks=(BEHIND, AHEAD), faults=faults)
    report = blow(plan, ServerArena(), tmp_path)  # three minutes late, if a timer were by the clock of the next worker
    assert report.problems == [], "\n".join(report.summary)


@pytest.mark.system("faketime")
def test_a_signal_is_in_time_whatever_the_clock_of_its_sender_says(tmp_path: Path) -> None:
    with databases().fresh(migrate) as place, AgentRunLedger(place) as ledger:

        @ledger.agent()
        def agent() -> str:
            from agent_run_ledger import current_run

            return str(current_run().wait_for("word", timeout=60))

        with ledger.worker():
            handle = ledger.submit(agent)
            with child(ASKER, place, handle.run_id, prefix=clocked(AHEAD)) as asker:
                assert asker.hear() == "sent"
            assert handle.result(90) == "it is late"
