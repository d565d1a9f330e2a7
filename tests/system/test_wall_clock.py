"""A wall clock that is set back or forward, and another boot: no live lease is lost, no dead one is kept, and waits end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger
from support.faketime import clocked
from support.processes import Child, child
from support.witness import Witness

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
    with child(OWNER, database, lease_seconds, prefix=clocked(clock)) as started:
        yield started


def set_clock(clock: Path, shift: str) -> None:
    """From now on it is off by `shift`. The file is never seen half-written, which would be a time of its own."""
    new = clock.with_suffix(".new")
    new.write_text(f"{shift}\n", encoding="ascii")
    new.replace(clock)


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
    set_clock(clock, "+0")
    with process(database, 600, clock) as owner, process(database, 600, "+0") as other:
        assert asks(owner, "create") == "create"
        assert asks(owner, "step") == "step"
        set_clock(clock, shift)
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


# --- waits that outlive their process, and times that are written down ------------------------------------------------

WAITER = """
import select, time, warnings
from pathlib import Path
from agent_run_ledger import Receipt, WaitTimeout
from agent_run_ledger.stores.clock import SystemClock
from support.witness import Witness
time.sleep = lambda seconds: select.select([], [], [], seconds)  # libfaketime refuses the call that time.sleep makes
SystemClock.sleep = staticmethod(time.sleep)
warnings.simplefilter("ignore", UndeclaredEffectWarning)
database, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(database, durability="process", lease_seconds=600)
SOON = RetryPolicy(max_attempts=3, base=0.2, cap=0.2)
will_fail = False

@ledger.tool(effect="READ", retry=SOON)
def look():
    witness.note("look", attempt=current_step().attempt)
    if will_fail:
        raise ConnectionRefusedError
    return "seen"

def ask(key, given):
    witness.note("ask", key=key)
    return Receipt.unknown("not yet") if will_fail else Receipt.found("paid")

@ledger.tool(receipt=ask, retry=SOON)
def pay():
    witness.note("pay")
    raise TimeoutError

@ledger.tool(effect="IDEMPOTENT", key_window=3_600)
def pay_by_key():
    witness.note("pay by key")
    if will_fail:
        tell("paid")
        hear()

@ledger.tool(effect="READ")
def note(what):
    witness.note("went on", what=what)
    return what

@ledger.agent()
def agent(how):
    run = current_run()
    witness.note("begun")
    if how in ("sleep", "nap"):
        run.sleep(1_800 if how == "sleep" else 5)
    elif how in ("wait", "short wait"):
        try:
            run.wait_for("word", timeout=1_800 if how == "wait" else 5)
        except WaitTimeout:
            return note("in vain")
    else:
        return {"look": look, "pay": pay, "pay by key": pay_by_key}[how]()
    return note("woken")

word, how = hear()
will_fail = word == "begin and fail"
try:
    tell([ledger.run(agent, how, run_id="r"), time.time()])
except LedgerError as error:
    tell([type(error).__name__, time.time()])
"""


def waiter(folder: Path, clock: str | Path) -> AbstractContextManager[Child]:
    return child(WAITER, folder / "agent.db", folder / "witness", prefix=clocked(clock))


def await_entry(folder: Path, kind: str) -> None:
    """Wait until somebody has written an entry of that kind."""
    with AgentRunLedger(folder / "agent.db") as ledger:
        while all(row.kind != kind for row in ledger._store.read("r")):
            pass


@pytest.mark.system("faketime")
@pytest.mark.parametrize(("how", "result"), [("sleep", "woken"), ("wait", "in vain")])
def test_a_wait_is_over_when_the_clock_is_set_behind_its_end_and_its_run_goes_on_once(
    how: str, result: str, tmp_path: Path
) -> None:
    clock, witness = tmp_path / "clock", Witness(tmp_path / "witness")
    set_clock(clock, "+0")
    with waiter(tmp_path, clock) as one, waiter(tmp_path, clock) as two, AgentRunLedger(tmp_path / "agent.db") as here:
        for number, process in enumerate((one, two), 1):
            process.tell(["begin", how])
            while len(witness.notes("begun")) < number:
                pass
            while here.get_run("r").owner is not None:  # whoever waits holds no lease
                pass
        assert here.get_run("r").status == "BLOCKED"
        set_clock(clock, "+1h")
        answers = dict(process.hear() for process in (one, two))  # half an hour later, if the clock had not been set
        assert answers.pop(result) - time.time() > HOUR / 2, "the clock was not set"
        assert answers.keys() <= {"RunOwned"}, "who is second gets the same, or is told that another goes on"
        assert len(witness.notes("went on")) == 1
        assert (here.get_run("r").status, here.verify().findings) == ("COMPLETED", [])


@pytest.mark.system("faketime")
@pytest.mark.parametrize(("how", "result"), [("nap", "woken"), ("short wait", "in vain")])
def test_a_clock_that_is_set_back_makes_a_wait_no_longer_than_it_was_asked_for(
    how: str, result: str, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, "+0")
    with waiter(tmp_path, clock) as process:
        process.tell(["begin", how])
        await_entry(tmp_path, "waiting")
        set_clock(clock, "-1h")
        answer, wall = process.hear()  # an hour later, if it waited for the time that was written down
        assert time.time() - wall > HOUR / 2, "the clock was not set"
        assert answer == result
    assert len(Witness(tmp_path / "witness").notes("went on")) == 1


@pytest.mark.system("faketime")
@pytest.mark.parametrize("shift", ["-1h", "+1h"])
@pytest.mark.parametrize("how", ["look", "pay"])
def test_a_retry_and_a_question_whose_time_is_written_down_wait_no_longer_because_of_the_clock(
    how: str, shift: str, tmp_path: Path
) -> None:
    with waiter(tmp_path, "+0") as first:
        first.tell(["begin and fail", how])
        await_entry(tmp_path, {"look": "outcome", "pay": "answered"}[how])
        first.kill()
    witness = Witness(tmp_path / "witness")
    tried = len(witness.notes("look") + witness.notes("ask"))
    with waiter(tmp_path, shift) as second:
        second.tell(["begin", how])
        answer, wall = second.hear()  # an hour later, if it waited for the time that was written down
        assert abs(abs(wall - time.time()) - HOUR) < HOUR / 2, "the clock was not set"
        assert answer == {"look": "seen", "pay": "paid"}[how]
    assert len(witness.notes("look") + witness.notes("ask")) == tried + 1
    assert [note["attempt"] for note in witness.notes("look")] == list(range(1, tried + 2))[
        : len(witness.notes("look"))
    ]
    assert len(witness.notes("pay")) == (how == "pay")


@pytest.mark.system("faketime")
def test_a_key_is_taken_for_forgotten_when_the_clock_says_so(tmp_path: Path) -> None:
    with waiter(tmp_path, "+0") as first:
        first.tell(["begin and fail", "pay by key"])
        assert first.hear() == "paid"
        first.kill()
    with waiter(tmp_path, "+2h") as second:
        second.tell(["begin", "pay by key"])
        assert second.hear()[0] == "StepInDoubt"
    assert len(Witness(tmp_path / "witness").notes("pay by key")) == 1


# --- another boot -----------------------------------------------------------------------------------------------------

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def booted(folder: Path, boot: str) -> list[str]:
    """What a command is put behind to be run as on a machine of another boot."""
    named = folder / boot
    named.write_text(f"{boot}\n", encoding="ascii")
    return ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"', str(named)]


FIRST_BOOT, SECOND_BOOT = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"


@pytest.mark.system("unshare", "mount")
def test_the_lease_of_an_earlier_boot_is_dead_and_one_of_this_boot_is_not(tmp_path: Path) -> None:
    database, long_lease = tmp_path / "agent.db", 600
    before, after = booted(tmp_path, FIRST_BOOT), booted(tmp_path, SECOND_BOOT)
    with child(OWNER, database, long_lease, prefix=before) as owner:
        assert asks(owner, "create") == "create"
        owner.kill()
    for proof in tmp_path.glob(
        "agent.db.owners/*"
    ):  # the kernel's proof of the owner's death, which a copied folder lacks
        proof.unlink()
    with child(OWNER, database, long_lease, prefix=before) as of_that_boot:
        assert asks(of_that_boot, "take") == "RunOwned"
    with child(OWNER, database, long_lease, prefix=after) as taker:
        assert asks(taker, "take") == "take"  # ten minutes later, if it waited for the lease
        assert asks(taker, "step") == "step"
        with child(OWNER, database, long_lease, prefix=after) as other:
            assert asks(other, "take") == "RunOwned"
        assert asks(taker, "step") == "step"
