"""What a program leaves behind: tasks, threads and loops that outlive it, and calls from where nobody expects them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, InvalidArguments, ProgramEnded, Run, StepInDoubt
from agent_run_ledger.engine.effects import Commit, Plan
from support.ledgers import Bench, Died

RUN = "run"


def test_a_task_that_outlives_its_agent_writes_nothing_into_the_run(bench: Bench) -> None:
    ledger = bench.open()
    heard: list[BaseException | None] = []

    @ledger.tool(effect=Effect.READ)
    async def look(n: int) -> int:
        return n

    async def straggler(may_go_on: asyncio.Event) -> None:
        await look(1)
        await may_go_on.wait()
        await look(2)

    @ledger.agent()
    async def leaves_one_behind() -> None:
        may_go_on = asyncio.Event()
        left.append((asyncio.create_task(straggler(may_go_on)), may_go_on))
        while len(ledger.steps(RUN)) < 1 or ledger.steps(RUN)[0].state != "COMPLETED":
            await asyncio.sleep(0)
        for _ in range(40):  # until the straggler has its answer
            await asyncio.sleep(0)
        raise ValueError("and fails")

    left: list[Any] = []

    async def main() -> None:
        with pytest.raises(ValueError, match="and fails"):
            await ledger.arun(leaves_one_behind, run_id=RUN)
        before = bench.kinds(RUN)
        [(task, may_go_on)] = left
        may_go_on.set()
        await asyncio.wait([task])
        heard.append(task.exception())
        assert bench.kinds(RUN) == before

    asyncio.run(main())
    assert isinstance(heard[0], ProgramEnded)
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).owner) == ("BLOCKED", None)


def test_a_run_object_is_of_no_use_once_its_block_is_left(bench: Bench) -> None:
    ledger = bench.open()
    with ledger.open_run("goal", RUN) as run:
        run.step("one", {}, lambda: 1)
    for ask in (
        lambda: run.step("two", {}, lambda: 2),
        run.now,
        lambda: run.gather(lambda: 1),
        lambda: run.map(len, ["a"]),
        lambda: run.branch("b").__enter__(),
    ):
        with pytest.raises(ProgramEnded):
            ask()
    assert ledger.get_run(RUN).status == "COMPLETED"


def test_an_interrupted_map_waits_for_its_threads_before_the_run_is_parked(bench: Bench) -> None:
    ledger = bench.open()
    both = threading.Barrier(2)

    def work(n: int) -> int:
        both.wait(60)
        if n == 0:
            raise Died
        return n

    tool = ledger.tool(name="work")(work)

    @ledger.agent()
    def side_by_side(run: Run) -> Any:
        return run.map(tool, range(2))

    with pytest.raises(Died):
        ledger.run(side_by_side, run_id=RUN)
    assert {step.position: step.state for step in ledger.steps(RUN)}["1.2.1"] == "COMPLETED"
    assert ledger.get_run(RUN).owner is None
    assert ledger.verify(RUN).ok


def test_two_event_loops_in_one_run_hang_nobody(bench: Bench) -> None:
    def life(ledger: AgentRunLedger) -> Any:
        @ledger.tool(effect=Effect.READ)
        async def look(n: int) -> int:
            calls.append(n)
            await asyncio.sleep(0)
            return n

        async def several(first: int) -> list[int]:
            return await asyncio.gather(*(look(first + n) for n in range(3)))

        @ledger.agent()
        def in_two_loops(run: Run) -> list[list[int]]:
            found: list[list[int]] = run.map(lambda first: asyncio.run(several(first)), [0, 10])
            if not is_over:
                raise Died
            return found

        return ledger.run(in_two_loops, run_id=RUN)

    calls: list[int] = []
    is_over: list[bool] = []
    with pytest.raises(Died):
        life(bench.open())
    bench.owners_die()
    is_over.append(True)
    assert life(bench.open()) == [[0, 1, 2], [10, 11, 12]]
    assert sorted(calls) == [0, 1, 2, 10, 11, 12]


def test_a_loop_that_was_closed_in_the_middle_holds_no_run(bench: Bench) -> None:
    ledger = bench.open()
    begun = threading.Event()

    @ledger.tool(effect=Effect.READ)
    async def look() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.get_running_loop().create_future()
        return "seen"

    @ledger.agent()
    async def looks() -> str:
        return await look()

    loop = asyncio.new_event_loop()
    task = loop.create_task(ledger.arun(looks, run_id=RUN))

    async def until_it_looks() -> None:
        while not begun.is_set():
            await asyncio.sleep(0)

    loop.run_until_complete(until_it_looks())
    loop.close()
    assert asyncio.run(ledger.arun(looks, run_id=RUN)) == "seen"
    task._log_destroy_pending = False  # type: ignore[attr-defined] # that it was left pending is the point
    del task
    gc.collect()
    assert ledger.get_run(RUN).status == "COMPLETED"


def test_commits_gathered_in_a_loop_are_written_when_its_thread_takes_up_another_loop(bench: Bench) -> None:
    ledger = bench.open()
    first, second = ledger.create_run("goal"), ledger.create_run("goal")

    async def double(n: int) -> int:
        return 2 * n

    async def one(run_id: str) -> int:
        doubled: int = await ledger.aexecute_step(run_id, "double", {"n": 1}, double)
        return doubled

    left, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    task = left.create_task(one(first))
    left.call_soon(left.stop)
    left.run_forever()  # one turn: its intent is gathered, and perhaps not written
    assert other.run_until_complete(one(second)) == 2
    assert left.run_until_complete(task) == 2
    left.close()
    other.close()


def test_one_commits_error_is_not_given_to_those_that_are_written_with_it(bench: Bench) -> None:
    ledger = bench.open()
    run_id = ledger.create_run("goal")

    def identity(_arguments: dict[str, Any]) -> Any:
        raise ValueError("only mine")

    async def double(n: int) -> int:
        return 2 * n

    async def main(given: int) -> list[Any]:
        calls = [
            ledger.aexecute_step(run_id, "double", {"n": 1}, double, effect=Effect.READ, step_key=f"one {given}"),
            ledger.aexecute_step(run_id, "double", {"n": given}, double, step_key="two", identity=identity),
            ledger.aexecute_step(run_id, "double", {"n": 3}, double, effect=Effect.READ, step_key=f"three {given}"),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.run(main(2)) == [2, 4, 6]
    one, two, three = asyncio.run(main(20))
    assert (one, three) == (2, 6)
    assert isinstance(two, ValueError)


class Asked:
    """A commit as the event loop's driver hands it over."""

    is_abandoned = False

    def __init__(self, run: Any, decide: Any) -> None:
        self.run = run
        self.effect = Commit(run, decide)


def test_a_decision_that_is_impossible_fails_alone_also_in_one_run(bench: Bench) -> None:
    ledger = bench.open()
    run = ledger._run(ledger.create_run("goal"))

    def impossible(_run: Any, _moment: Any) -> Plan:
        raise ValueError("only mine")

    asked = [Asked(run, lambda run, moment: Plan(answer="one")), Asked(run, impossible), Asked(run, lambda *_: Plan())]
    answers = {commit: (value, error) for commit, value, error in ledger._asynchronous._together.write(asked, None)}  # type: ignore[arg-type, var-annotated]
    assert answers[asked[0]] == ("one", None)
    assert isinstance(answers[asked[1]][1], ValueError)
    assert answers[asked[2]] == (None, None)


def test_a_run_is_not_given_back_under_a_call_that_was_made_in_the_same_instant(bench: Bench) -> None:
    ledger = bench.open()
    run = ledger._run(ledger.create_run("goal", RUN))

    def lets_go() -> str:
        ledger._driver.give_back(run)  # as another thread does, whose call was told to let go before this one was made
        return "kept"

    assert ledger.execute_step(RUN, "one", {}, lets_go) == "kept"
    assert [step.fencing_token for step in ledger.steps(RUN)] == [1]
    ledger.detach(RUN)
    assert ledger.get_run(RUN).owner is None


def test_steps_by_the_runs_id_are_refused_to_what_outlives_its_program(bench: Bench) -> None:
    ledger = bench.open()
    with ledger.open_run("goal", RUN):
        outlives = contextvars.copy_context()
    with pytest.raises(ProgramEnded):
        outlives.run(ledger.execute_step, RUN, "late", {}, lambda: 1)
    assert bench.kinds(RUN) == ["created", "finished"]


def test_an_agent_that_swallows_a_doubt_is_told_of_it_again(bench: Bench) -> None:
    def life(ledger: AgentRunLedger, dies: bool) -> list[str]:
        def pay() -> None:
            if dies:
                raise Died
            pytest.fail("a payment that is in doubt was made again")

        heard = []
        with ledger.open_run("goal", RUN) as run:
            run.step("look", {}, lambda: 1, effect=Effect.READ)
            for tool, function in (("pay", pay), ("look", lambda: 2), ("look", lambda: 3)):
                try:
                    run.step(tool, {}, function, effect=Effect.MUTATE if tool == "pay" else Effect.READ)
                except StepInDoubt as doubt:
                    heard.append(doubt.tool_name)
        return heard

    with pytest.raises(Died):
        life(bench.open(), dies=True)
    bench.owners_die()
    with pytest.raises(StepInDoubt, match="pay"):
        life(bench.open(), dies=False)
    assert [(step.tool_name, step.attempts) for step in bench.open().steps(RUN)] == [("look", 1), ("pay", 1)]


def test_a_group_whose_own_error_cancelled_a_call_ends_with_that_error_at_every_start(bench: Bench) -> None:
    def life(ledger: AgentRunLedger) -> Any:
        @ledger.tool(effect=Effect.READ)
        async def watch() -> None:
            await asyncio.get_running_loop().create_future()

        @ledger.tool(effect=Effect.READ)
        async def close() -> str:
            return "closed"

        @ledger.agent()
        async def watches() -> str:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(watch())
                    await asyncio.sleep(0.02)
                    raise LookupError("nothing to watch")
            except* LookupError:
                pass
            closed = await close()
            if not starts:
                starts.append(1)
                raise Died
            return closed

        return ledger.run(watches, run_id=RUN)

    starts: list[int] = []
    with pytest.raises(Died):
        life(bench.open())
    bench.owners_die()
    assert life(bench.open()) == "closed"


def test_what_fails_in_an_async_agent_has_no_other_error_behind_it(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def fails() -> None:
        raise ValueError("plain")

    with pytest.raises(ValueError, match="plain") as caught:
        ledger.run(fails, run_id=RUN)
    assert caught.value.__context__ is None


def test_an_async_tool_in_a_plain_agent_is_refused_by_name(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def look() -> int:
        return 1

    @ledger.agent()
    def plain() -> Any:
        return look()

    with pytest.raises(InvalidArguments, match="'look' is an async tool"):
        ledger.run(plain, run_id=RUN)
    assert ledger.steps(RUN) == []


def test_a_ledger_that_nobody_closes_leaves_no_thread_behind(tmp_path: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    async def one(ledger: AgentRunLedger) -> None:
        async with ledger.open_run("goal"):
            pass

    asyncio.run(one(AgentRunLedger(tmp_path / "warm.db", heartbeat_seconds=0.01)))
    gc.collect()
    before = threads()
    for n in range(5):
        asyncio.run(one(AgentRunLedger(tmp_path / f"{n}.db", heartbeat_seconds=0.01)))
    gc.collect()
    waiting = threading.Event()
    while threads() > before + 1:  # they end by themselves; a thread that does not hangs this test
        waiting.wait(0.01)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("seen", 99), ("seen", -5), ("seen", "x"), ("follows", 5), ("follows", ["77"]), ("follows", [["1"]])],
)
def test_verify_finds_an_order_that_never_was(field: str, wrong: Any) -> None:
    from agent_run_ledger.contract import Row
    from agent_run_ledger.engine.audit import audit
    from agent_run_ledger.engine.history import History
    from agent_run_ledger.engine.log import Draft, seal
    from agent_run_ledger.words import Event

    history = History("r", b"s" * 32)
    rows: list[Row] = []

    def add(*drafts: Draft) -> None:
        for row, body in seal(history, 1, 1.0, drafts):
            rows.append(row)
            history.absorb(row, body)

    add(Draft("created", None, {"format": 1}, b'{"goal":"g","input":null}'))
    fields = {"step": 1, "tool": "t", "key": "k", "environment": "e", "left": 3, "step_state": "RUNNING", field: wrong}
    try:
        add(Draft("intent", Event.START_STEP, fields, b"{}", "1", 1))
    except TypeError:  # the fold refuses what has no place in any order
        rows.append(seal(history, 1, 1.0, [Draft("intent", Event.START_STEP, fields, b"{}", "1", 1)])[0][0])
    assert "order" in {finding.code for finding in audit("r", None, b"s" * 32, rows)}
