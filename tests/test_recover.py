"""recover() goes on with what nobody works on, ends what can be ended, and waits for nothing."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, Run, StoreUnavailable
from agent_run_ledger.stores.memory import MemoryStore
from support.ledgers import Bench, Tool, raw
from support.processes import child
from support.programs import RUN, Calls, Upset, Way
from support.waiting import Meanwhile, begun


def crash(way: Way, ledger: AgentRunLedger, bench: Bench, agent: Any, run_id: str = RUN) -> None:
    """Start it, and let it be interrupted by its first tool."""
    with pytest.raises(KeyboardInterrupt):
        way.start(ledger, agent, run_id=run_id)


def dies_once(answer: Any = 1) -> Tool:
    return Tool(KeyboardInterrupt(), answer)


def test_every_run_that_nobody_works_on_is_brought_to_its_end_once(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(*[KeyboardInterrupt()] * 3, 7)
    work = way.tool(ledger, tool, name="work", effect=Effect.READ)

    def agent() -> Any:
        return (yield work())

    works = way.agent(ledger, agent)
    for number in range(3):
        crash(way, ledger, bench, works, f"run {number}")
    assert sorted(ledger.recover()) == ["run 0", "run 1", "run 2"]
    assert [run.result for run in ledger.runs()] == [7, 7, 7]
    assert (ledger.recover(), tool.calls) == ([], 6)
    assert ledger.verify().findings == []


def test_runs_of_others_of_unknown_programs_and_in_quarantine_are_left_alone(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    other.create_run("by hand", "by hand")
    begun(way, other, bench, way.agent(other, _waits(), name="unknown"), "unknown")
    with other.open_run("busy", "busy"):
        before = {run.run_id: bench.kinds(run.run_id) for run in other.runs()}
        assert ledger.recover() == []
        assert {run_id: bench.kinds(run_id) for run_id in before} == before


def test_a_run_that_another_owner_works_on_is_left_to_it(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    work = Calls()

    def register(at: AgentRunLedger, does: Any) -> Any:
        tool = way.tool(at, does, name="work", effect=Effect.READ)

        def agent() -> Any:
            return (yield tool())

        return way.agent(at, agent)

    register(other, work)

    def does() -> int:
        if way.is_async:
            return 1  # a loop runs in this thread: recover() is for threads without one
        assert other.recover() == []
        return 1

    assert way.start(ledger, register(ledger, does)) == 1
    assert work.seen == []


def _waits(name: str = "go") -> Any:
    def waits(run: Run) -> Any:
        return (yield run.wait_for(name))

    return waits


def test_it_waits_with_nobody_and_goes_on_when_what_it_waits_for_has_come(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = dies_once()
    work = way.tool(ledger, tool, name="work", effect=Effect.READ)

    def agent(run: Run) -> Any:
        yield work()
        told = yield run.wait_for("go")
        yield run.sleep(60)
        return told

    crash(way, ledger, bench, way.agent(ledger, agent))
    seen = Meanwhile(bench)
    assert ledger.recover() == []
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).owner) == ("BLOCKED", None)
    written = bench.kinds(RUN)
    assert ledger.recover() == [] == bench.open().recover()
    assert bench.kinds(RUN) == written, "to look at what waits writes nothing"
    ledger.signal(RUN, "go", 5)
    assert ledger.recover() == []
    written = bench.kinds(RUN)
    bench.clock.advance(59)
    assert ledger.recover() == []
    assert bench.kinds(RUN) == written
    bench.clock.advance(2)
    assert ledger.recover() == [RUN]
    assert ledger.get_run(RUN).result == 5
    assert tool.calls == 2
    assert seen.looks < 5
    assert ledger.verify().findings == []


@pytest.mark.parametrize("sent", ["another name", "an approval twice", "too late"])
def test_what_was_sent_and_nobody_waits_for_keeps_no_sweep_going(sent: str, bench: Bench, way: Way) -> None:
    ledger = bench.open()

    starts: list[int] = []

    def agent(run: Run) -> Any:
        starts.append(1)
        if sent == "an approval twice":
            yield run.approve("pay", {})
        if sent == "too late":
            yield from _expires(run)
        return (yield run.wait_for("go"))

    waits = way.agent(ledger, agent)
    begun(way, ledger, bench, waits)
    if sent == "an approval twice":
        (request,) = ledger.approvals()
        ledger.approve(RUN, "pay", request.digest)
        ledger.approve(RUN, "pay", request.digest)
    elif sent == "too late":
        bench.clock.advance(20)
        ledger.signal(RUN, "soon", 1)
    else:
        ledger.signal(RUN, "stop", 1)
    for _ in range(3):
        assert ledger.recover() == []
    written, begun_before = bench.kinds(RUN), len(starts)
    assert ledger.recover() == []
    assert (bench.kinds(RUN), len(starts)) == (written, begun_before), "what waits is looked at and not begun"
    ledger.signal(RUN, "go", 1)
    assert ledger.recover() == [RUN]


def _expires(run: Run) -> Any:
    with suppress(TimeoutError):
        yield run.wait_for("soon", 10)


def test_what_a_program_does_as_it_ends_is_not_done_while_it_waits(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    starts, cleanings = dies_once(), Calls()
    start = way.tool(ledger, starts, name="start", effect=Effect.READ)
    clean = way.tool(ledger, lambda: len([cleanings()]), name="clean", effect=Effect.READ)

    def agent(run: Run) -> Any:
        yield start()
        try:
            return (yield run.wait_for("go"))
        finally:
            yield clean()

    crash(way, ledger, bench, way.agent(ledger, agent))
    assert ledger.recover() == []
    assert cleanings.seen == []
    assert bench.kinds(RUN)[-1] == "waiting"
    ledger.signal(RUN, "go", 1)
    assert ledger.recover() == [RUN]
    assert (len(cleanings.seen), ledger.get_run(RUN).result) == (1, 1)
    assert ledger.verify().findings == []


def test_a_program_that_swallows_everything_does_not_end_while_it_waits(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    starts = dies_once()
    start = way.tool(ledger, starts, name="start", effect=Effect.READ)

    def agent(run: Run) -> Any:
        yield start()
        try:
            return (yield run.wait_for("go"))
        except BaseException:
            return "swallowed"

    crash(way, ledger, bench, way.agent(ledger, agent))
    assert ledger.recover() == []
    assert ledger.get_run(RUN).status == "BLOCKED"
    ledger.signal(RUN, "go", 1)
    assert ledger.recover() == [RUN]
    assert ledger.get_run(RUN).result == 1


def test_tasks_of_a_group_that_all_wait_hold_nothing_up(bench: Bench) -> None:
    ledger = bench.open()
    starts = dies_once()
    start = ledger.tool(name="start", effect=Effect.READ)(Way(True).function(starts))

    @ledger.agent()
    async def agent(run: Run) -> list[Any]:
        await start()

        async def one(name: str) -> Any:
            with run.branch(name):
                return await run.wait_for(name)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in "ab"]
        return [task.result() for task in tasks]

    crash(Way(True), ledger, bench, agent)
    Meanwhile(bench)
    assert ledger.recover() == []
    assert ledger.get_run(RUN).owner is None
    for name in "ab":
        ledger.signal(RUN, name, name)
    assert ledger.recover() == [RUN]
    assert ledger.get_run(RUN).result == ["a", "b"]
    assert ledger.verify().findings == []


def test_an_agent_whose_child_waits_waits_too_and_both_are_held_by_nobody(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    starts, cleanings = dies_once(), Calls()
    start = way.tool(ledger, starts, name="start", effect=Effect.READ)
    clean = way.tool(ledger, lambda: len([cleanings()]), name="clean", effect=Effect.READ)
    kid = way.agent(ledger, _waits(), name="kid")

    def parent() -> Any:
        yield start()
        try:
            return (yield kid())
        finally:
            yield clean()

    crash(way, ledger, bench, way.agent(ledger, parent))
    for _ in range(2):
        assert ledger.recover() == []
        assert [run.owner for run in ledger.runs()] == [None, None]
    assert cleanings.seen == []
    (born,) = [run.run_id for run in ledger.runs() if run.run_id != RUN]
    ledger.signal(born, "go", 3)
    assert RUN in ledger.recover()
    assert ledger.get_run(born).status == "COMPLETED"
    assert (ledger.get_run(RUN).result, len(cleanings.seen)) == (3, 1)
    assert ledger.verify().findings == []


def test_a_run_that_an_exception_parked_is_begun_once_in_each_call(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    starts: list[int] = []

    def agent() -> Any:
        starts.append(1)
        if len(starts) < 4:
            raise Upset
        yield from ()
        return 1

    with pytest.raises(Upset):
        way.start(ledger, way.agent(ledger, agent))
    assert (ledger.recover(), len(starts)) == ([], 2)
    assert (ledger.recover(), len(starts)) == ([], 3)
    assert (ledger.recover(), len(starts)) == ([RUN], 4)


def test_a_run_whose_agent_takes_other_arguments_now_stands_with_that_cause_and_others_go_on(
    bench: Bench, way: Way
) -> None:
    old, new = bench.open(), bench.open()

    def before(number: int) -> Any:
        raise Upset
        yield  # type: ignore[unreachable] # a body is a generator

    def after(number: int, customer: str) -> Any:
        yield from ()

    with pytest.raises(Upset):
        way.start(old, way.agent(old, before, name="work"), 1, run_id="changed")
    begun(way, old, bench, way.agent(old, _waits(), name="other"), "other")
    way.agent(new, after, name="work")
    way.agent(new, _waits(), name="other")
    new.signal("other", "go", 1)
    assert new.recover() == ["other"]
    assert "customer" in (new.get_run("changed").cause or "")


def test_a_run_that_is_damaged_in_the_file_stops_no_other(way: Way, tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        for number in range(3):
            begun(
                way,
                ledger,
                bench,
                way.agent(ledger, _waits(), name="waits") if not number else _again(ledger),
                f"run {number}",
            )
            ledger.signal(f"run {number}", "go", number)
        ledger.close()
        with raw(bench.path, without_triggers=True) as connection:
            connection.execute("UPDATE entries SET body = x'7b' WHERE seq = 2 AND run_id = 'run 0'")
        fresh = bench.open()
        way.agent(fresh, _waits(), name="waits")
        assert fresh.recover() == ["run 1", "run 2"]
        assert {finding.run_id for finding in fresh.verify().findings} == {"run 0"}


def _again(ledger: AgentRunLedger) -> Any:
    from agent_run_ledger.agents import as_agent

    agent = ledger._agents["waits"]
    return as_agent(agent.function, agent, ledger)


def test_a_store_that_fails_is_told() -> None:
    class Gone(MemoryStore):
        gone = False

        def claim(self, *arguments: Any) -> Any:
            if self.gone:
                raise StoreUnavailable("it is gone")
            return super().claim(*arguments)

    store = Gone()
    ledger = AgentRunLedger(store, durability="process")

    @ledger.agent()
    def agent() -> int:
        raise Upset

    with pytest.raises(Upset):
        ledger.run(agent, run_id=RUN)
    store.gone = True
    with pytest.raises(StoreUnavailable):
        ledger.recover()
    ledger.close()


RECOVERING = """
from pathlib import Path
import os, signal
ledger = AgentRunLedger(arguments[0], durability="process")

@ledger.tool(effect=Effect.READ)
def work(number: int) -> int:
    with open(arguments[1], "a") as witness:
        witness.write(f"{number}\\n")
    return number

@ledger.agent()
def agent(number: int) -> int:
    if number == 19 and arguments[2] == "begin":
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments[2] == "begin":
        raise ValueError
    return work(number) + work(number + 100)

if arguments[2] == "begin":
    for number in range(20):
        try:
            ledger.run(agent, number, run_id=f"run {number}")
        except ValueError:
            pass
tell("ready")
hear()
tell(ledger.recover())
"""


def test_two_processes_that_recover_at_once_end_each_run_once(tmp_path: Path) -> None:
    path, witness = tmp_path / "ledger.db", tmp_path / "witness"
    with child(RECOVERING, path, witness, "begin") as first:
        assert first.ends() == -signal.SIGKILL
    with child(RECOVERING, path, witness, "go") as one, child(RECOVERING, path, witness, "go") as two:
        assert (one.hear(), two.hear()) == ("ready", "ready")
        one.tell()
        two.tell()
        ended = one.hear() + two.hear()
    assert sorted(ended) == sorted(f"run {number}" for number in range(20))
    called = [int(line) for line in witness.read_text().split()]
    assert sorted(called) == sorted([*range(20), *range(100, 120)])
    with AgentRunLedger(path) as ledger:
        assert {run.status for run in ledger.runs()} == {"COMPLETED"}
        assert ledger.verify().findings == []
