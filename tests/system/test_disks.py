"""A disk that is full, one that cannot be written, and one that fails: named errors, nothing half-written, and on it goes.

FAULTS=all makes every single call fail, where the default is a sample of them.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger, StoreFull, StoreReadOnly
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.powercut import Recording, Sync, Told, cut, record, where_something_was_told
from support.powercut_programs import PATIENCE
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
import random
from pathlib import Path
from support.witness import Witness
database, witness, ballast = arguments[0], Witness(Path(arguments[1])), Path(arguments[2])
ledger = AgentRunLedger(database, durability=arguments[3], max_steps=1000)
ledger.create_run("goal", "r")

def work(number):
    witness.note("call", number=number)
    return random.Random(number).randbytes(60_000).hex()  # what is equal would be kept once, and what repeats itself short

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


def fill(disk: Path) -> Path:
    """Take all the room that a disk has left. To remove the file that is returned makes room."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return ballast


@pytest.mark.system("mount", "umount")
def test_a_ledger_that_finds_no_room_to_be_made_is_made_when_there_is_room(disk: Path) -> None:
    ballast = fill(disk)
    for _ in range(2):
        with pytest.raises(StoreFull, match=r"Make room"):
            AgentRunLedger(disk / "agent.db")
    ballast.unlink()
    with AgentRunLedger(disk / "agent.db") as ledger:
        ledger.create_run("goal", "r")
        assert ledger.execute_step("r", "work", {}, lambda: "worked") == "worked"
        assert ledger.verify().findings == []


@pytest.mark.system("mount", "umount")
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_process_that_begins_on_a_full_disk_calls_nothing_and_changes_nothing(
    state: str, disk: Path, request: pytest.FixtureRequest
) -> None:
    database: Path = request.getfixturevalue(state)
    ballast = fill(disk)

    def begin() -> None:
        with AgentRunLedger(database) as ledger:
            ledger.resume_run("r")
            ledger.execute_step("r", "next", {"long": "x" * 100_000}, lambda: pytest.fail("it was called"))

    with pytest.raises(StoreFull):
        begin()
    ballast.unlink()
    with AgentRunLedger(database) as ledger:
        assert ledger.verify().findings == []
        assert [step.output_json for step in ledger.resume_run("r")] == ['"worked"']
        assert ledger.execute_step("r", "next", {}, lambda: "next") == "next"


FILLS_SIDE_BY_SIDE = """
import asyncio, random
from pathlib import Path
from support.witness import Witness
database, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(database, max_steps=1000)

def work(number):
    step = current_step()
    witness.note("call", run=step.run_id, number=number)
    return random.Random(f"{step.run_id} {number}").randbytes(15_000).hex()  # likewise

@ledger.agent()
async def agent():
    run = current_run()
    for first in range(0, 200, 4):
        made = [run.step(f"work {number}", {"number": number}, lambda number: work(number), effect=Effect.MUTATE)
            for number in range(first, first + 4)]
        answers = await asyncio.gather(*made, return_exceptions=True)
        for error in answers:
            if isinstance(error, Exception):
                raise error
        if is_over:
            return

async def both():
    return await asyncio.gather(*[ledger.arun(agent, run_id=run_id) for run_id in "ab"], return_exceptions=True)

is_over = False
for _ in range(2):
    hear()
    tell([type(ended).__name__ for ended in asyncio.run(both())])
    is_over = True
ledger.close()
"""


@pytest.mark.system("mount", "umount")
def test_steps_side_by_side_that_fill_the_disk_stop_and_go_on_with_none_called_twice(
    disk: Path, tmp_path: Path
) -> None:
    witness, ballast = Witness(tmp_path / "witness"), disk / "ballast"
    ballast.write_bytes(bytes(MEBIBYTE))
    with child(FILLS_SIDE_BY_SIDE, disk / "agent.db", witness.path) as agent:
        agent.tell()
        assert agent.hear() == ["StoreFull", "StoreFull"]
        with AgentRunLedger.open_read_only(disk / "agent.db") as ledger:
            known = {(run.run_id, step.position) for run in ledger.runs() for step in ledger.steps(run.run_id)}
        called = [(note["run"], str(note["number"] + 1)) for note in witness.notes("call")]
        assert set(called) <= known
        ballast.unlink()
        agent.tell()
        assert set(agent.hear()) <= {"NoneType", "StepInDoubt"}  # an outcome that found no room may be unknown by then
        assert agent.ends() == 0
    calls = Counter((note["run"], note["number"]) for note in witness.notes("call"))
    assert set(calls.values()) == {1}
    assert len(calls) > 20
    with AgentRunLedger(disk / "agent.db", durability="process") as ledger:
        assert ledger.verify().findings == []
        for run in ledger.runs():  # what was in flight when there was no room for its outcome is in doubt
            assert run.status in ("COMPLETED", "BLOCKED") or ledger.inspect(run.run_id).in_doubt


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A disk of its own in a file, with an ext4 that is not mounted."""
    path = tmp_path / "image"
    path.touch()
    os.truncate(path, 16 * MEBIBYTE)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True, timeout=60)
    return path


WORKS = """
from pathlib import Path
from support.witness import Witness
witness = Witness(Path(arguments[1]))
while (word := hear()) != "end":
    ledger = AgentRunLedger(arguments[0])
    ledger.create_run("goal", "r")
    number = 0
    while word == "work":
        try:
            ledger.execute_step("r", f"work {number}", {"number": number}, lambda number: witness.note("call", number=number),
                effect=Effect.MUTATE)
            number += 1
            tell(number)
        except StoreError as error:
            tell(type(error).__name__)
        word = hear()
    ledger.close()
    tell("closed")
"""


@pytest.mark.system("mount", "umount", "mkfs.ext4", "e2fsck")
def test_a_disk_that_turns_read_only_under_a_run_lets_nothing_be_called_until_it_is_mended(
    image: Path, tmp_path: Path
) -> None:
    """What ext4 does when it finds an error of its own."""
    point, witness = tmp_path / "disk", Witness(tmp_path / "witness")
    point.mkdir()
    mount("-o", "loop,errors=remount-ro", image, point)
    try:
        with child(WORKS, point / "agent.db", witness.path) as agent:
            for number in range(1, 4):
                agent.tell("work")
                assert agent.hear() == number
            device = Path(os.path.realpath(f"/sys/dev/block/{disk_number(point)}")).name
            Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1", encoding="ascii")
            for _ in range(3):
                agent.tell("work")
                assert agent.hear() in {"StoreUnavailable", "StoreReadOnly"}
            assert len(witness.notes("call")) == 3
            agent.tell("close")
            assert agent.hear() == "closed"
            subprocess.run(["umount", str(point)], check=True, timeout=60)
            assert subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, timeout=60).returncode in {0, 1}
            mount("-o", "loop", image, point)
            for number in range(1, 6):
                agent.tell("work")
                assert agent.hear() == number
            agent.tell("close")
            assert agent.hear() == "closed"
            agent.tell("end")
            assert agent.ends() == 0
        assert [note["number"] for note in witness.notes("call")] == [0, 1, 2, 3, 4]
        with AgentRunLedger(point / "agent.db") as ledger:
            assert ledger.verify().findings == []
    finally:
        subprocess.run(["umount", "--lazy", str(point)], timeout=60)


def disk_number(point: Path) -> str:
    device = point.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


# --- a disk that fails at one call ------------------------------------------------------------------------------------

ALL = os.environ.get("FAULTS") == "all"


def failing(
    program: str,
    folder: Path,
    call: str,
    errors: list[str],
    numbers: Iterable[int],
    lasting: str = "",
    log_pages: int = 16,
) -> Iterator[Recording]:
    """The program with one such call failing, and another in another recording, for as long as there are such calls.

    What a failing sync of the folder would do is no question: SQLite ignores it, and a file system whose journal fails
    writes nothing more.
    """
    for turn, number in enumerate(count(1) if ALL else numbers):
        fault = f"{call}:error={errors[turn % len(errors)]}:when={number}{lasting}"
        recording = record(program, folder / f"{number}", "full", fault=fault, log_pages=log_pages)
        if recording.faults == 0:
            return
        failed = {event.path for event in recording.events if isinstance(event, Sync) and not event.is_done}
        if str(recording.folder) not in failed:
            yield recording


def goes_on(recording: Recording) -> None:
    """Each step was called once and acknowledged, and wherever the power is cut nothing of that is lost."""
    called = [(facts["run"], facts["position"]) for facts in recording.told("called")]
    assert len(set(called)) == len(called), "a step was called again"
    runs = {run for run, _ in called}
    assert sorted(called) == sorted((run, str(number + 1)) for run in runs for number in range(4))
    assert {facts["run"] for facts in recording.told("finished")} == runs
    holds(recording)


def holds(recording: Recording) -> None:
    report = cut(recording, 0, where=where_something_was_told)
    assert (report.losses, report.damage) == ({}, {}), (recording.folder.name, report)


@pytest.mark.system("strace")
@pytest.mark.parametrize(
    ("program", "log_pages"), [("insistent", 5), ("insistent", 10), ("insistent_beside_another", 16)]
)
def test_what_a_failed_sync_of_the_log_lost_takes_nothing_with_it_that_is_acknowledged_later(
    program: str, log_pages: int, tmp_path: Path
) -> None:
    """The log is emptied at another moment each time: behind an intent that need not be synced, and when it is closed."""
    clean = record(program, tmp_path / "clean", "full", log_pages=log_pages)
    syncs = [event.path for event in clean.events if isinstance(event, Sync)]
    of_the_log = [number for number, path in enumerate(syncs, 1) if path.endswith("-wal")]
    assert len(of_the_log) > 12
    for recording in failing(program, tmp_path, "fdatasync", ["EIO"], of_the_log, log_pages=log_pages):
        goes_on(recording)


@pytest.mark.system("strace")
@pytest.mark.parametrize(
    ("program", "call", "errors", "stride"),
    [
        ("insistent", "fdatasync", ["EIO"], 5),
        ("insistent_side_by_side", "fdatasync", ["EIO"], 5),
        ("insistent", "pwrite64", ["ENOSPC", "EIO", "EROFS"], 11),
        ("insistent_side_by_side", "pwrite64", ["ENOSPC", "EIO", "EROFS"], 29),
    ],
)
def test_whichever_call_fails_once_the_error_has_a_name_and_the_program_that_calls_again_goes_on(
    program: str, call: str, errors: list[str], stride: int, tmp_path: Path
) -> None:
    named: Counter[str] = Counter()
    for recording in failing(program, tmp_path, call, errors, count(1, stride)):
        named.update(facts["error"] for facts in recording.told("failed"))
        goes_on(recording)
    assert set(named) == ({"StoreFull", "StoreUnavailable"} if "ENOSPC" in errors else {"StoreUnavailable"})


@pytest.mark.system("strace")
@pytest.mark.parametrize(("call", "error", "stride"), [("fdatasync", "EIO", 5), ("pwrite64", "ENOSPC", 23)])
@pytest.mark.parametrize("program", ["insistent", "insistent_beside_another"])
def test_from_the_first_call_that_fails_for_good_nothing_is_called_and_a_new_process_goes_on(
    program: str, call: str, error: str, stride: int, tmp_path: Path
) -> None:
    for recording in failing(program, tmp_path, call, [error], count(1, stride), lasting="+"):
        told = [event.facts for event in recording.events if isinstance(event, Told)]
        first = next((number for number, facts in enumerate(told) if facts["kind"] == "failed"), len(told))
        assert [facts for facts in told[first:] if facts["kind"] == "called" and facts["effect"] != "READ"] == []
        assert len(recording.told("failed")) in {0, PATIENCE}
        holds(recording)
