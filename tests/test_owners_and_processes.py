"""Many threads, many processes, owners that stop, die, wake and fork: one writer a run, and nothing lost or done twice."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    RunClosed,
    RunOwned,
    StepCancelled,
    StepInDoubt,
    StoreFull,
    UnorderedStep,
    current_step,
)
from support.processes import child, environment
from support.witness import Witness

LONG_LEASE = 600.0
"""Far beyond what any test lasts: who waits for it to run out is seen to hang."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@pytest.fixture
def ledger(database: Path) -> Iterator[AgentRunLedger]:
    with AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) as opened:
        yield opened


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path / "witness")


def in_threads(work: Callable[[int], None], number: int) -> None:
    """Run `work(0)` to `work(number - 1)` at once; raise what any of them raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(number)

    def run(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_threads_drive_two_hundred_steps_each_on_one_ledger(ledger: AgentRunLedger, database: Path) -> None:
    threads, steps = 50, 200
    ledger.close()
    calls: Counter[tuple[int, int]] = Counter()
    mutex = threading.Lock()
    with AgentRunLedger(database, max_steps=steps, durability="process", lease_seconds=LONG_LEASE) as shared:

        def drive(thread: int) -> None:
            run_id = shared.create_run("many steps", f"run-{thread}")
            for step in range(steps):

                def work(thread: int, step: int) -> list[int]:
                    with mutex:
                        calls[thread, step] += 1
                    return [thread, step]

                arguments = {"thread": thread, "step": step}
                assert shared.execute_step(run_id, "work", arguments, work, effect=Effect.READ) == [thread, step]
            shared.finish_run(run_id, thread)

        in_threads(drive, threads)
        assert calls == Counter({(thread, step): 1 for thread in range(threads) for step in range(steps)})
        report = shared.verify()
        assert report.findings == []
        assert (report.runs, report.entries) == (threads, threads * (2 * steps + 2))
        records = shared.runs()
        assert {(record.status, record.total_steps) for record in records} == {("COMPLETED", steps)}
        assert {record.run_id: record.result for record in records} == {f"run-{i}": i for i in range(threads)}


MANY_RUNS = """
from support.witness import Witness
from pathlib import Path
database, witness, me = arguments[0], Witness(Path(arguments[1])), int(arguments[2])
tell("ready")
hear()
with AgentRunLedger(database, durability="process") as ledger:
    for number in range(50):
        run_id = ledger.create_run("one of many", f"{me}-{number}")
        for step in range(4):
            def work(step, run_id=run_id):
                witness.note("call", run=run_id, step=step)
                return step
            assert ledger.execute_step(run_id, "work", {"step": step}, work, effect=Effect.READ) == step
        ledger.finish_run(run_id, number)
tell("done")
"""


@pytest.mark.slow
def test_eight_processes_open_one_file_at_once_and_make_fifty_runs_each(database: Path, witness: Witness) -> None:
    processes, runs, steps = 8, 50, 4
    scripts = [child(MANY_RUNS, database, witness.path, i) for i in range(processes)]
    children = [script.__enter__() for script in scripts]
    try:
        for each in children:
            assert each.hear() == "ready"
        assert not database.exists()
        for each in children:
            each.tell("go")
        for each in children:
            assert each.hear() == "done"
            assert each.ends() == 0
    finally:
        for script in scripts:
            script.__exit__(None, None, None)
    expected = {f"{i}-{n}" for i in range(processes) for n in range(runs)}
    seen = Counter((note["run"], note["step"]) for note in witness.notes("call"))
    assert seen == Counter({(run, step): 1 for run in expected for step in range(steps)})
    with AgentRunLedger(database) as ledger:
        report = ledger.verify()
        assert report.findings == []
        assert report.entries == processes * runs * (2 * steps + 2)
        assert {record.run_id for record in ledger.runs(status="COMPLETED")} == expected
        assert [record.owner for record in ledger.runs() if record.owner] == []


# --- one owner --------------------------------------------------------------------------------------------------------

OWNER = """
from support.witness import Witness
from pathlib import Path
database, witness, lease = arguments[0], Witness(Path(arguments[1])), float(arguments[2])
ledger = AgentRunLedger(database, durability="process", lease_seconds=lease, heartbeat_seconds=lease / 10)
for run_id in arguments[3:]:
    ledger.create_run("owned", run_id)
    ledger.execute_step(run_id, "first", {"run": run_id}, lambda: witness.note("call", step="first"))
def second(run):
    witness.note("call", step="second")
    tell("in the second step")
    return hear()
tell("owner")
while (word := hear()) != "end":
    if word == "step":
        try:
            tell(["returned", ledger.execute_step(run_id, "second", {"run": run_id}, second)])
        except LedgerError as error:
            tell(["raised", type(error).__name__])
    elif word == "another":
        try:
            tell(["returned", ledger.execute_step(run_id, "third", {}, lambda: witness.note("call", step="third"))])
        except LedgerError as error:
            tell(["raised", type(error).__name__])
"""


def steps_seen(witness: Witness) -> list[str]:
    return [note["step"] for note in witness.notes("call")]


def test_a_second_process_is_refused_on_a_live_run_and_goes_on_at_once_when_its_owner_is_killed(
    ledger: AgentRunLedger, database: Path, witness: Witness
) -> None:
    with child(OWNER, database, witness.path, LONG_LEASE, "r") as owner:
        assert owner.hear() == "owner"
        with pytest.raises(RunOwned) as refused:
            ledger.resume_run("r")
        assert refused.value.owner == ledger.get_run("r").owner
        owner.tell("step")
        assert owner.hear() == "in the second step"
        with pytest.raises(RunOwned):
            ledger.execute_step("r", "first", {"run": "r"}, lambda: None)
        owner.kill()
    done, in_doubt = ledger.resume_run("r")  # would hang for ten minutes if it waited for the lease
    assert (done.state, in_doubt.state) == ("COMPLETED", "RUNNING")

    def again(run: str) -> str:
        witness.note("call", step="second")
        return run

    assert ledger.execute_step("r", "second", {"run": "r"}, again, effect=Effect.READ) == "r"
    assert steps_seen(witness) == ["first", "second", "second"]
    assert ledger.steps("r")[1].attempts == 2
    assert ledger.verify().findings == []


def test_all_runs_of_a_killed_owner_are_free_at_once_for_several_takers(database: Path, witness: Witness) -> None:
    runs = [f"r{i}" for i in range(6)]
    with child(OWNER, database, witness.path, LONG_LEASE, *runs) as owner:
        assert owner.hear() == "owner"
        owner.kill()
    one, two = (AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) for _ in range(2))
    with one, two:
        takers = (one, two)

        def take(i: int) -> None:
            for run_id in runs[i::2]:
                takers[i].resume_run(run_id)

        in_threads(take, 2)
        for i, run_id in enumerate(runs):
            assert one.get_run(run_id).owner == takers[i % 2]._leases.owner
            assert one.get_run(run_id).fencing_token == 2
            with pytest.raises(RunOwned):
                takers[1 - i % 2].resume_run(run_id)


def test_of_many_takers_of_one_dead_owners_run_one_gets_it(database: Path, witness: Witness) -> None:
    with child(OWNER, database, witness.path, LONG_LEASE, "r") as owner:
        assert owner.hear() == "owner"
        owner.kill()
    takers = [AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) for _ in range(8)]
    answers: list[str] = []

    def take(i: int) -> None:
        try:
            takers[i].resume_run("r")
            answers.append("taken")
        except RunOwned:
            answers.append("owned")

    in_threads(take, len(takers))
    for taker in takers:
        taker.close()
    assert Counter(answers) == {"taken": 1, "owned": 7}


def test_an_owner_that_was_stopped_beyond_its_lease_writes_nothing_and_starts_nothing_when_it_wakes(
    database: Path, witness: Witness
) -> None:
    with child(OWNER, database, witness.path, 0.5, "r") as owner:
        assert owner.hear() == "owner"
        owner.tell("step")
        assert owner.hear() == "in the second step"
        owner.stop()
        with AgentRunLedger(database, durability="process") as taker:
            taker.resume_run("r", wait=60.0)  # comes back as soon as the lease has run out

            def settle(run: str) -> str:
                witness.note("call", step="settled by the taker")
                return "taker"

            assert taker.execute_step("r", "second", {"run": "r"}, settle, effect=Effect.READ) == "taker"
            entries = taker.tree_head("r")
            owner.tell("what the function returns")
            owner.tell("another")
            owner.send(signal.SIGCONT)
            assert owner.hear() == ["raised", "LeaseLost"]
            assert owner.hear() == ["raised", "RunOwned"]  # it reads the run anew, and finds somebody there
            assert taker.tree_head("r") == entries
            assert steps_seen(witness) == ["first", "second", "settled by the taker"]
            assert taker.execute_step("r", "third", {}, lambda: "third") == "third"
            assert taker.verify().findings == []


STOPPED_BEFORE_THE_DISPATCH = """
import os, signal
from support.witness import Witness
from pathlib import Path
database, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(database, durability="process", lease_seconds=0.5, heartbeat_seconds=0.4)
ledger.create_run("owned", "r")
append = ledger._store.append
def stops_after_it(*given, **options):
    answer = append(*given, **options)
    if witness.notes("call") == [] and given[3][0].kind == "intent":
        os.kill(os.getpid(), signal.SIGSTOP)  # after the intent was written, before its function is called
    return answer
ledger._store.append = stops_after_it
try:
    ledger.execute_step("r", "work", {}, lambda: witness.note("call", step="by the owner"))
except LedgerError as error:
    tell(type(error).__name__)
"""


def test_an_owner_that_was_stopped_between_intent_and_dispatch_does_not_dispatch_when_it_wakes(
    database: Path, witness: Witness
) -> None:
    with child(STOPPED_BEFORE_THE_DISPATCH, database, witness.path) as owner:
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WNOWAIT)
        with AgentRunLedger(database, durability="process") as taker:
            taker.resume_run("r", wait=60.0)
            taker.execute_step("r", "work", {}, lambda: witness.note("call", step="by the taker"), effect=Effect.READ)
            owner.send(signal.SIGCONT)
            assert owner.hear() == "LeaseLost"
            assert steps_seen(witness) == ["by the taker"]


STOPPED_IN_A_STEP = """
import os, signal
ledger = AgentRunLedger(arguments[0], durability="process", lease_seconds=0.5, heartbeat_seconds=0.4)
ledger._leases.beat = lambda: None  # a heartbeat that wakes first would find it out before the write does
ledger.create_run("owned", "r")
try:
    ledger.execute_step("r", "work", {}, lambda: os.kill(os.getpid(), signal.SIGSTOP))
except LedgerError as error:
    tell(type(error).__name__)
"""


def test_the_write_of_an_old_owner_is_refused_though_the_new_one_has_written_nothing_yet(database: Path) -> None:
    with child(STOPPED_IN_A_STEP, database) as owner:
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WNOWAIT)
        with AgentRunLedger(database, durability="process") as taker:
            (in_doubt,) = taker.resume_run("r", wait=60.0)
            before = taker.tree_head("r")
            owner.send(signal.SIGCONT)
            assert owner.hear() == "LeaseLost"
            assert taker.tree_head("r") == before
            assert taker.steps("r") == [dataclasses.replace(in_doubt, replayed=False)]


def test_a_step_that_lasts_longer_than_the_lease_keeps_it(database: Path, witness: Witness) -> None:
    with child(OWNER, database, witness.path, 1.0, "r") as owner:
        assert owner.hear() == "owner"
        owner.tell("step")
        assert owner.hear() == "in the second step"
        with AgentRunLedger(database, durability="process") as other:
            with pytest.raises(RunOwned):
                other.resume_run("r", wait=2.0)
            owner.tell("at last")
            assert owner.hear() == ["returned", "at last"]


# --- leases that are given back ---------------------------------------------------------------------------------------


def test_close_gives_every_lease_back(ledger: AgentRunLedger, database: Path) -> None:
    with AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) as first:
        for run_id in ("a", "b"):
            first.create_run("goal", run_id)
            with pytest.raises(RunOwned):
                ledger.resume_run(run_id)
    for run_id in ("a", "b"):
        assert ledger.get_run(run_id).owner is None
        assert ledger.resume_run(run_id) == []


def test_detach_gives_one_lease_back(ledger: AgentRunLedger, database: Path) -> None:
    with AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) as first:
        for run_id in ("a", "b"):
            first.create_run("goal", run_id)
        first.detach("a")
        ledger.resume_run("a")
        with pytest.raises(RunOwned):
            ledger.resume_run("b")


def test_the_end_of_the_interpreter_gives_leases_back(ledger: AgentRunLedger, database: Path, witness: Witness) -> None:
    with child(OWNER, database, witness.path, LONG_LEASE, "r") as owner:
        assert owner.hear() == "owner"
        owner.tell("end")
        assert owner.ends() == 0
    assert ledger.get_run("r").owner is None
    assert list(Path(f"{database}.owners").iterdir()) == []


def test_two_ledgers_of_one_process_are_two_owners(ledger: AgentRunLedger, database: Path) -> None:
    ledger.create_run("goal", "r")
    with AgentRunLedger(database, durability="process", lease_seconds=LONG_LEASE) as other:
        with pytest.raises(RunOwned):
            other.execute_step("r", "work", {}, lambda: 1)
        assert [record.run_id for record in other.runs()] == ["r"]
        ledger.detach("r")
        assert other.execute_step("r", "work", {}, lambda: 1) == 1
        with pytest.raises(RunOwned):
            ledger.execute_step("r", "work", {}, lambda: 2)
    assert ledger.execute_step("r", "work", {}, lambda: 2) == 1


# --- forks ------------------------------------------------------------------------------------------------------------

FORKED = """
import os
from support.witness import Witness
from pathlib import Path
database, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(database, durability="process", lease_seconds=600)
ledger.create_run("goal", "parent's")
ledger.execute_step("parent's", "first", {}, lambda: witness.note("call", step="first"))
pid = os.fork()
if pid == 0:
    try:
        ledger.execute_step("parent's", "second", {}, lambda: witness.note("call", step="child's second"))
        outcome = "went on"
    except RunOwned:
        outcome = "RunOwned"
    ledger.create_run("goal", "child's")
    ledger.execute_step("child's", "first", {}, lambda: witness.note("call", step="child's first"))
    ledger.finish_run("child's")
    ledger.close()
    witness.note("child", outcome=outcome)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ledger.execute_step("parent's", "second", {}, lambda: witness.note("call", step="second"))
tell(ledger.get_run("parent's").owner == ledger._leases.owner)
hear()
"""


def test_a_forked_child_owns_nothing_of_its_parent_and_its_parent_keeps_all(
    ledger: AgentRunLedger, database: Path, witness: Witness
) -> None:
    with child(FORKED, database, witness.path) as parent:
        assert parent.hear() is True
        assert [note["outcome"] for note in witness.notes("child")] == ["RunOwned"]
        assert steps_seen(witness) == ["first", "child's first", "second"]
        with pytest.raises(RunOwned):  # the child's end has not dropped the parent's lock
            ledger.resume_run("parent's")
        parent.kill()
    assert [step.state for step in ledger.resume_run("parent's")] == ["COMPLETED", "COMPLETED"]
    assert ledger.get_run("child's").status == "COMPLETED"
    assert ledger.verify().findings == []


FORKED_WHILE_IN_A_STEP = """
import os, threading
database = arguments[0]
ledger = AgentRunLedger(database, durability="process", lease_seconds=600, heartbeat_seconds=0.01)
ledger.create_run("goal", "parent's")
def forks():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ledger.get_run("parent's").status == "RUNNING" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
tell([ledger.execute_step("parent's", "fork", {"n": n}, forks, effect=Effect.READ) for n in range(20)])
"""


def test_a_function_that_forks_leaves_its_run_whole(ledger: AgentRunLedger, database: Path) -> None:
    with child(FORKED_WHILE_IN_A_STEP, database) as parent:
        assert parent.hear() == [0] * 20
        assert parent.ends() == 0
    assert ledger.verify().findings == []


# --- threads, interruptions, requests ---------------------------------------------------------------------------------


def test_another_thread_is_refused_on_a_run_whose_step_is_in_flight(ledger: AgentRunLedger) -> None:
    ledger.create_run("goal", "r")
    is_in_flight, may_return = threading.Event(), threading.Event()

    def waits() -> str:
        is_in_flight.set()
        assert may_return.wait(60)
        return "slow"

    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ledger.execute_step("r", "slow", {}, waits)))
    thread.start()
    assert is_in_flight.wait(60)
    called: list[str] = []
    with pytest.raises(UnorderedStep) as refused:
        ledger.execute_step("r", "fast", {}, lambda: called.append("fast"))
    assert (refused.value.tool_name, refused.value.in_flight) == ("fast", "slow")
    with pytest.raises(UnorderedStep):
        ledger.finish_run("r")
    may_return.set()
    thread.join()
    assert answers == ["slow"]
    assert called == []
    assert [step.tool_name for step in ledger.steps("r")] == ["slow"]
    assert ledger.execute_step("r", "fast", {}, lambda: "now") == "now"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupted_step_is_in_doubt_and_recorded_as_cancelled_by_the_next_call(ledger: AgentRunLedger) -> None:
    ledger.create_run("goal", "r")
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step("r", "work", {}, interrupt)
    assert [step.state for step in ledger.steps("r")] == ["RUNNING"]
    assert ledger.execute_step("r", "next", {}, lambda: "went on") == "went on"
    work, _ = ledger.steps("r")
    assert work.state == "FAILED"
    assert work.error_message is not None
    assert "interrupted" in work.error_message
    ledger.create_run("goal", "r")  # the program begins again, and is told the same
    with pytest.raises(StepCancelled):
        ledger.execute_step("r", "work", {}, lambda: pytest.fail("it was called again"))
    assert ledger.execute_step("r", "next", {}, lambda: pytest.fail("it was called again")) == "went on"
    assert ledger.verify().findings == []


def test_an_interrupted_step_that_nothing_follows_is_run_again(ledger: AgentRunLedger) -> None:
    ledger.create_run("goal", "r")
    keys: list[str] = []

    def interrupted_once() -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            interrupt()
        return "done"

    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step("r", "work", {}, interrupted_once, effect=Effect.IDEMPOTENT)
    ledger.create_run("goal", "r")
    assert ledger.execute_step("r", "work", {}, interrupted_once, effect=Effect.IDEMPOTENT) == "done"
    assert len(keys) == 2
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    "go_on",
    [
        lambda ledger: ledger.execute_step("r", "next", {}, lambda: pytest.fail("it was called")),
        lambda ledger: ledger.finish_run("r"),
    ],
    ids=["next step", "finish"],
)
def test_a_mutating_step_that_was_interrupted_lets_nothing_follow(
    ledger: AgentRunLedger, go_on: Callable[[AgentRunLedger], Any]
) -> None:
    ledger.create_run("goal", "r")
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step("r", "pay", {}, interrupt, effect=Effect.MUTATE)
    with pytest.raises(StepInDoubt):
        go_on(ledger)
    assert ledger.get_run("r").status == "BLOCKED"
    ledger.create_run("goal", "r")
    called: list[str] = []
    with pytest.raises(StepInDoubt):
        ledger.execute_step("r", "pay", {}, lambda: called.append("pay"), effect=Effect.MUTATE)
    assert called == []
    assert ledger.verify().findings == []


class FullDisk:
    """A store that refuses every entry while its disk `is_full`; a disk that really is stands in the system tests."""

    def __init__(self, ledger: AgentRunLedger) -> None:
        self._append = ledger._store.append
        self.is_full = False
        ledger._store.append = self.append  # type: ignore[method-assign]

    def append(self, *arguments: Any, **options: Any) -> bool:
        if self.is_full:
            raise StoreFull("the disk is full")
        return self._append(*arguments, **options)


@pytest.mark.parametrize("effect", [Effect.READ, Effect.MUTATE, None])
def test_an_outcome_that_the_full_disk_refused_is_written_later_and_its_step_is_not_called_again(
    ledger: AgentRunLedger, effect: Effect | None
) -> None:
    disk = FullDisk(ledger)
    ledger.create_run("goal", "r")
    calls: list[str] = []

    def fills_the_disk() -> str:
        calls.append("work")
        disk.is_full = True
        return "worked"

    for _ in range(2):
        with pytest.raises(StoreFull):
            ledger.execute_step("r", "work", {}, fills_the_disk, effect=effect)
    assert [step.state for step in ledger.steps("r")] == ["RUNNING"]
    disk.is_full = False
    assert ledger.execute_step("r", "work", {}, fills_the_disk, effect=effect) == "worked"
    assert calls == ["work"]
    disk.is_full = False
    assert ledger.execute_step("r", "next", {}, lambda: "next") == "next"
    assert [(step.state, step.attempts) for step in ledger.steps("r")] == [("COMPLETED", 1)] * 2
    assert ledger.verify().findings == []


def test_an_intent_that_the_full_disk_refused_dispatches_nothing(ledger: AgentRunLedger) -> None:
    disk = FullDisk(ledger)
    ledger.create_run("goal", "r")
    disk.is_full = True
    calls: list[str] = []
    with pytest.raises(StoreFull):
        ledger.execute_step("r", "work", {}, lambda: calls.append("work"))
    assert calls == []
    assert ledger.steps("r") == []
    disk.is_full = False
    ledger.execute_step("r", "work", {}, lambda: calls.append("work"))
    assert calls == ["work"]


CANCELS = """
database, run_id = arguments
with AgentRunLedger(database) as ledger:
    ledger.cancel(run_id, by="operator", reason="wrong month")
"""


def cancel_from_another_process(database: Path, run_id: str) -> None:
    script = f"from agent_run_ledger import *\nimport sys\narguments = sys.argv[1:]\n{CANCELS}"
    subprocess.run([sys.executable, "-c", script, database, run_id], env=environment(), check=True, timeout=60)


def test_a_run_that_another_process_cancels_records_the_step_in_flight_and_starts_no_other(
    ledger: AgentRunLedger, database: Path
) -> None:
    ledger.create_run("goal", "r")

    def is_cancelled_meanwhile() -> str:
        cancel_from_another_process(database, "r")
        return "finished first"

    assert ledger.execute_step("r", "work", {}, is_cancelled_meanwhile) == "finished first"
    called: list[str] = []
    with pytest.raises(RunClosed) as closed:
        ledger.execute_step("r", "next", {}, lambda: called.append("next"))
    assert closed.value.status == "CANCELLED"
    assert called == []
    record = ledger.get_run("r")
    assert (record.status, record.cause) == ("CANCELLED", "wrong month")
    assert [step.output_json for step in ledger.steps("r")] == ['"finished first"']
    assert ledger.verify().findings == []


def test_a_run_that_another_process_cancels_between_two_steps_starts_no_other(
    ledger: AgentRunLedger, database: Path
) -> None:
    ledger.create_run("goal", "r")
    ledger.execute_step("r", "work", {}, lambda: 1)
    cancel_from_another_process(database, "r")
    called: list[str] = []
    with pytest.raises(RunClosed):
        ledger.execute_step("r", "next", {}, lambda: called.append("next"))
    assert called == []
    assert ledger.get_run("r").status == "CANCELLED"


def test_a_run_without_an_owner_is_cancelled_at_once(ledger: AgentRunLedger, database: Path) -> None:
    ledger.create_run("goal", "r")
    ledger.detach("r")
    cancel_from_another_process(database, "r")
    assert ledger.get_run("r").status == "CANCELLED"
