"""A disk that is full, and one that cannot be written: named errors, nothing half-written, and on it goes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger, StoreReadOnly
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.processes import child
from support.witness import Witness

MEBIBYTE = 1024 * 1024


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of four mebibytes."""
    point = tmp_path / "disk"
    point.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", point)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=60)


FILLS = """
from pathlib import Path
from support.witness import Witness
database, witness, ballast = arguments[0], Witness(Path(arguments[1])), Path(arguments[2])
ledger = AgentRunLedger(database, durability=arguments[3], max_steps=1000)
ledger.create_run("goal", "r")

def work(number):
    witness.note("call", number=number)
    return f"{number:06}" * 20_000  # equal ones would be kept once

number = 0
while (word := hear()) != "end":
    try:
        while True:
            ledger.execute_step("r", "work", {"number": number}, work, effect=Effect.MUTATE)
            witness.note("acknowledged", number=number)
            number += 1
            if word == "one":
                break
        tell("done")
    except LedgerError as error:
        tell([type(error).__name__, number])
ledger.finish_run("r")
ledger.close()
"""


@pytest.mark.system("mount", "umount")
@pytest.mark.parametrize("durability", ["full", "process"])
def test_a_full_disk_stops_the_run_with_nothing_half_written_and_it_goes_on_after_room_is_made(
    durability: str, disk: Path, tmp_path: Path
) -> None:
    witness, ballast = Witness(tmp_path / "witness"), disk / "ballast"
    ballast.write_bytes(bytes(MEBIBYTE))
    with child(FILLS, disk / "agent.db", witness.path, ballast, durability) as agent:
        agent.tell("until it fails")
        error, reached = agent.hear()
        assert error == "StoreFull"
        assert reached > 3
        agent.tell("one")
        assert agent.hear() == ["StoreFull", reached]
        calls = [note["number"] for note in witness.notes("call")]
        assert calls == sorted(set(calls)), "a step was called again"
        ballast.unlink()
        for _ in range(3):
            agent.tell("one")
            assert agent.hear() == "done"
        agent.tell("end")
        assert agent.ends() == 0
    with AgentRunLedger(disk / "agent.db", durability="process") as ledger:
        assert ledger.verify().findings == []
        assert ledger.get_run("r").status == "COMPLETED"
        steps = ledger.steps("r")
    acknowledged = [note["number"] for note in witness.notes("acknowledged")]
    assert acknowledged == list(range(reached + 3))
    assert [note["number"] for note in witness.notes("call")] == acknowledged
    assert [(step.state, step.attempts) for step in steps] == [("COMPLETED", 1)] * len(acknowledged)


@pytest.mark.system("mount", "umount")
def test_a_run_killed_on_a_full_disk_has_lost_nothing_that_was_acknowledged(disk: Path, tmp_path: Path) -> None:
    witness, ballast = Witness(tmp_path / "witness"), disk / "ballast"
    ballast.write_bytes(bytes(MEBIBYTE))
    with child(FILLS, disk / "agent.db", witness.path, ballast, "full") as agent:
        agent.tell("until it fails")
        assert agent.hear()[0] == "StoreFull"
        agent.kill()
    ballast.unlink()
    with AgentRunLedger(disk / "agent.db") as ledger:
        assert ledger.verify().findings == []
        completed = [step for step in ledger.resume_run("r") if step.state == "COMPLETED"]
        assert len(completed) >= len(witness.notes("acknowledged"))
        assert len(ledger.steps("r")) >= len(witness.notes("call"))


@pytest.fixture
def finished(disk: Path) -> Path:
    database = disk / "agent.db"
    with AgentRunLedger(database) as ledger:
        ledger.create_run("goal", "r")
        ledger.execute_step("r", "work", {}, lambda: "worked")
    return database


@pytest.fixture
def interrupted(disk: Path, tmp_path: Path) -> Path:
    """A ledger that nobody closed: its last entries stand in the log beside the file."""
    database = disk / "agent.db"
    script = """
with AgentRunLedger(arguments[0]) as ledger:
    ledger.create_run("goal", "r")
    ledger.execute_step("r", "work", {}, lambda: "worked")
    tell("worked")
    hear()
"""
    with child(script, database) as agent:
        assert agent.hear() == "worked"
        agent.kill()
    return database


@pytest.mark.system("mount", "umount")
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_disk_that_cannot_be_written_is_refused_to_writers_and_open_to_readers(
    state: str, disk: Path, request: pytest.FixtureRequest
) -> None:
    database: Path = request.getfixturevalue(state)
    before = contents(disk)
    mount("-o", "remount,ro", disk)
    with pytest.raises(StoreReadOnly, match=r"writable"):
        AgentRunLedger(database)
    with AgentRunLedger(open_store(database, durability="full", clock=SystemClock(), read_only=True)) as reader:
        assert [step.output_json for step in reader.steps("r")] == ['"worked"']
        assert reader.verify().findings == []
        with pytest.raises(StoreReadOnly):
            reader.execute_step("r", "work", {}, lambda: pytest.fail("it was called"))
    assert contents(disk) == before
    mount("-o", "remount,rw", disk)
    with AgentRunLedger(database) as ledger:
        ledger.resume_run("r")
        assert ledger.execute_step("r", "next", {}, lambda: "next") == "next"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
