"""A wall clock that is set back or forward neither frees a lease nor keeps one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.processes import Child, child

DAY, HOUR = 86_400.0, 3_600.0

OWNER = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds)  # libfaketime refuses the call that time.sleep makes
database, lease = arguments[0], float(arguments[1])
ledger = AgentRunLedger(database, durability="process", lease_seconds=lease, heartbeat_seconds=lease / 4)
number = 0
while (word := hear()) != "end":
    try:
        if word == "create":
            ledger.create_run("goal", "r")
        elif word == "take":
            ledger.resume_run("r")
        elif word == "step":
            ledger.execute_step("r", "work", {"number": number}, lambda: None)
            number += 1
        tell([word, time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)])
    except LedgerError as error:
        tell([type(error).__name__, time.time(), 0])
"""


@contextmanager
def process(database: Path, lease_seconds: float, clock: str | Path) -> Iterator[Child]:
    """A process whose wall clock is off by `clock`, or by what stands in that file at the moment; its other clocks are true.

    By "+0" it is the machine's own, without libfaketime.
    """
    settings = ["FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_NO_CACHE=1"]
    if isinstance(clock, Path):  # `faketime` itself takes no such file: what it does is to preload this library
        (library, *_) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        prefix = ["env", *settings, f"FAKETIME_TIMESTAMP_FILE={clock}", f"LD_PRELOAD={library}"]
    else:
        prefix = [] if clock == "+0" else ["env", *settings, "faketime", "-f", clock]
    with child(OWNER, database, lease_seconds, prefix=prefix) as started:
        yield started


def asks(process: Child, word: str) -> str:
    process.tell(word)
    return str(process.hear()[0])


@pytest.mark.system("faketime")
@pytest.mark.parametrize("shift", ["-1d", "+1d"])
def test_the_witness_moves_the_wall_clock_and_no_other(shift: str, tmp_path: Path) -> None:
    with process(tmp_path / "agent.db", 30, shift) as moved:
        moved.tell("times")
        _, wall, boot = moved.hear()
        expected = DAY if shift == "+1d" else -DAY
        assert abs(wall - time.time() - expected) < HOUR
        assert abs(boot - time.clock_gettime(time.CLOCK_BOOTTIME)) < HOUR


@pytest.mark.system("faketime")
@pytest.mark.parametrize("shift", ["-1d", "+1d"])
def test_whose_clock_is_a_day_off_takes_no_run_from_a_live_owner(shift: str, tmp_path: Path) -> None:
    database = tmp_path / "agent.db"
    with process(database, 600, "+0") as owner, process(database, 600, shift) as other:
        assert asks(owner, "create") == "create"
        assert asks(other, "take") == "RunOwned"
        assert asks(owner, "step") == "step"
        assert asks(other, "take") == "RunOwned"


@pytest.mark.system("faketime")
@pytest.mark.parametrize("shift", ["-1d", "+1d"])
def test_an_owner_whose_clock_is_set_while_it_works_keeps_its_run(shift: str, tmp_path: Path) -> None:
    database, clock = tmp_path / "agent.db", tmp_path / "clock"
    clock.write_text("+0\n", encoding="ascii")
    with process(database, 600, clock) as owner, process(database, 600, "+0") as other:
        assert asks(owner, "create") == "create"
        assert asks(owner, "step") == "step"
        clock.write_text(f"{shift}\n", encoding="ascii")
        owner.tell("step")
        answer, wall, _ = owner.hear()
        assert abs(wall - time.time()) > DAY / 2, "the clock was not set"
        assert answer == "step"
        assert asks(other, "take") == "RunOwned"
        assert asks(owner, "step") == "step"


@pytest.mark.system("faketime")
@pytest.mark.parametrize(("owners", "takers"), [("-1d", "+0"), ("+1d", "+0"), ("+0", "-1d"), ("+0", "+1d")])
def test_a_lease_runs_out_after_its_seconds_whatever_the_wall_clocks_say(
    owners: str, takers: str, tmp_path: Path
) -> None:
    database = tmp_path / "agent.db"
    with process(database, 0.5, owners) as owner, process(database, 600, takers) as taker:
        assert asks(owner, "create") == "create"
        owner.stop()
        while (answer := asks(taker, "take")) == "RunOwned":  # for a day, if leases were measured by the wall clock
            pass
        assert answer == "take"
        owner.send(signal.SIGCONT)
        assert asks(owner, "step") == "RunOwned"
