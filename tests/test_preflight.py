"""preflight says what changed code makes of open runs: it dispatches nothing, writes nothing, and names what would diverge."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agent_run_ledger
from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    RetryPolicy,
    RunLedger,
    Step,
    StoreUnavailable,
    current_run,
)
from agent_run_ledger.preflight import Foreseen, nothing_is_opened, preflight
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.testing import MemoryStore
from support.programs import Way


class Stopped(BaseException):
    """The process of the old code ends here."""


class Deployment:
    """One database, old code that leaves runs open in it, and new code that is looked at before it is deployed."""

    def __init__(self, path: Path, way: Way) -> None:
        self.path = path
        self.way = way
        self.called: list[Any] = []
        """What tools of the new code were called with. Nobody may call them."""

    def leave(self, program: Callable[..., Any], *given: Any, stop_at: int, run_id: str = "run", **tools: Any) -> None:
        """Run the old code until its tools have been called `stop_at` times; the process dies inside that call."""
        calls: list[Any] = []

        def called(value: Any) -> Any:
            calls.append(value)
            if len(calls) == stop_at:
                raise Stopped
            return value

        with AgentRunLedger(self.path, durability="process") as ledger:
            agent = self.register(ledger, program, called, **tools)
            with pytest.raises(Stopped):
                self.way.start(ledger, agent, *given, run_id=run_id)

    def register(
        self, ledger: AgentRunLedger, program: Callable[..., Any], called: Callable[[Any], Any], **tools: Any
    ) -> Callable[..., Any]:
        """The program as an agent. Its parameters that are named like a tool are given it."""

        def tool(name: str, options: dict[str, Any]) -> Callable[..., Any]:
            def function(value: Any) -> Any:
                return called(value)

            function.__name__ = name
            return self.way.tool(ledger, function, **options)

        made = {name: tool(name, options) for name, options in (tools or {"look": {"effect": Effect.READ}}).items()}
        return self.way.agent(ledger, program(**made), name="agent")

    def foreseen(
        self, program: Callable[..., Any], *, timeout: float = 30.0, tools: Any = None, **options: Any
    ) -> Foreseen:
        """What the new code makes of the one run."""
        ledger = AgentRunLedger(MemoryStore(), **options)
        self.register(ledger, program, self.called.append, **(tools or {}))
        forecast = preflight(ledger, self.path, timeout=timeout)
        (run,) = forecast.runs
        assert forecast.ok is (run.verdict not in ("diverges", "fails"))
        assert self.called == []
        ledger.close()
        return run


@pytest.fixture
def deployment(tmp_path: Path, way: Way) -> Deployment:
    return Deployment(tmp_path / "agent.db", way)


def pages(look: Callable[[int], Any]) -> Callable[..., Any]:
    """The old code: looks at four pages."""

    def agent(first: int) -> Any:
        for number in range(4):
            yield look(first + number)

    return agent


# --- going on and diverging -------------------------------------------------------------------------------------------


def test_code_that_makes_the_recorded_calls_goes_on_at_the_frontier(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)
    run = deployment.foreseen(pages)
    assert (run.run_id, run.program, run.verdict, run.position) == ("run", "agent", "goes on", "3")
    assert run.text == "step 3 'look' would be dispatched, attempt 2"


def test_the_renamed_tool_is_named(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def renamed(fetch: Callable[[int], Any]) -> Callable[..., Any]:
        return pages(fetch)

    run = deployment.foreseen(renamed, tools={"fetch": {"effect": Effect.READ}})
    assert (run.verdict, run.position, run.recorded, run.asked) == ("diverges", "1", "'look'", "'fetch'")
    assert run.text == "recorded is 'look', the code asks for 'fetch'"


def test_the_changed_argument_is_named_with_its_path(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def changed(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            for number in range(4):
                yield look(first + 10 * number)

        return agent

    run = deployment.foreseen(changed)
    assert (run.verdict, run.position, run.path) == ("diverges", "2", "$.value")


def test_a_divergence_at_a_step_in_doubt_is_one_too(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3, look={"effect": Effect.MUTATE})

    def changed(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            for page in (first, first + 1, 99):
                yield look(page)

        return agent

    run = deployment.foreseen(changed, tools={"look": {"effect": Effect.MUTATE}})
    assert (run.verdict, run.position) == ("diverges", "3")
    run = deployment.foreseen(pages, tools={"look": {"effect": Effect.MUTATE}})
    assert (run.verdict, run.position) == ("stands", "3")
    assert "is in doubt" in run.text


def test_code_that_has_more_to_do_behind_the_recorded_calls_goes_on(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def more(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int, last: int = 9) -> Any:  # a new parameter with a default fits
            for page in range(first, last):
                yield look(page)

        return agent

    assert deployment.foreseen(more).verdict == "goes on"


def test_code_that_ends_where_the_old_code_went_on_is_seen_to_end(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def shorter(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            return [(yield look(first)), (yield look(first + 1))]

        return agent

    run = deployment.foreseen(shorter)
    assert (run.verdict, run.text) == ("goes on", "the program comes to its end without another call")


def test_a_value_that_is_not_recorded_yet_is_a_frontier_too(deployment: Deployment) -> None:
    with AgentRunLedger(deployment.path, durability="process") as ledger:
        agent = deployment.register(ledger, then_breaks, lambda value: value)
        with pytest.raises(ValueError, match="broken"):
            deployment.way.start(ledger, agent, run_id="run")

    def timed(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent() -> Any:
            yield look(1)
            yield look(2)
            current_run().now()
            yield look(3)

        return agent

    run = deployment.foreseen(timed)
    assert (run.verdict, run.position, run.text) == ("goes on", "3", "run.now() would be recorded")


def test_a_divergence_that_the_code_swallows_is_found(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def swallows(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            for page in (1, 5, 6):
                try:
                    yield look(page)
                except Exception:
                    continue

        return agent

    run = deployment.foreseen(swallows)
    assert (run.verdict, run.position) == ("diverges", "2")


def test_every_branch_is_replayed_to_its_own_frontier(deployment: Deployment) -> None:
    def both(look: Callable[[int], Any]) -> Callable[..., Any]:
        return beside(look, [20, 21, 22, 23])

    def other(look: Callable[[int], Any]) -> Callable[..., Any]:
        return beside(look, [20, 21, 99, 23])

    def beside(look: Callable[[int], Any], second: list[int]) -> Callable[..., Any]:
        async def line(values: list[int]) -> list[Any]:
            return [await look(value) for value in values]

        def agent() -> Any:
            lines = [[10, 11], second]
            if deployment.way.is_async:
                return (yield current_run().gather(*(line(values) for values in lines)))
            return current_run().gather(*(lambda values=values: [look(value) for value in values] for values in lines))
            yield

        return agent

    store = MemoryStore()
    old = AgentRunLedger(store, durability="process")
    done: list[int] = []

    def called(value: int) -> int:
        if value == 11:
            raise Stopped  # the first branch ends here, the second one later
        done.append(value)
        if value == 22:
            raise Stopped
        return value

    agent = deployment.register(old, both, called)
    with pytest.raises(Stopped):
        deployment.way.start(old, agent)
    for run_id in [run.run_id for run in old.runs()]:
        old.detach(run_id)
    steps = {step.position: step for step in old.steps("run")}
    assert steps["1.1.2"].completed_at is None
    assert steps["1.2.3"].completed_at is None
    for program, verdict in ((both, "goes on"), (other, "diverges")):
        new = AgentRunLedger(store, durability="process")
        deployment.register(new, program, deployment.called.append)
        (run,) = preflight(new).runs
        assert run.verdict == verdict, run
    assert run.position == "1.2.3"
    assert deployment.called == []


def test_a_task_that_stands_at_its_frontier_takes_no_other_one_with_it() -> None:
    """A plain `asyncio.gather` would let go of its other tasks as soon as one of them raises."""

    def made(ledger: AgentRunLedger, second: list[int]) -> Callable[..., Any]:
        @ledger.tool(effect=Effect.READ)
        async def look(page: int) -> int:
            if page == 10:
                await asyncio.Event().wait()
            if page == 24:
                raise Stopped
            return page

        async def line(name: str, values: list[int]) -> None:
            with current_run().branch(name):
                for value in values:
                    await look(value)

        @ledger.agent()
        async def agent() -> None:
            await asyncio.gather(line("a", [10]), line("b", second))

        return agent

    store = MemoryStore()
    old = AgentRunLedger(store, durability="process")
    with pytest.raises(Stopped):
        old.run(made(old, [20, 21, 22, 23, 24]), run_id="run")
    assert {step.position for step in old.steps("run") if step.completed_at is not None} == {
        f"@b.{n}" for n in (1, 2, 3, 4)
    }
    for second, verdict in (([20, 21, 22, 23, 24], "goes on"), ([20, 21, 22, 99], "diverges")):
        new = AgentRunLedger(store, durability="process")
        made(new, second)
        (run,) = preflight(new).runs
        assert run.verdict == verdict, run


# --- what cannot be replayed ------------------------------------------------------------------------------------------


def test_arguments_that_no_longer_fit_are_told(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def renamed(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(start: int) -> Any:
            return (yield look(start))

        return agent

    def typed(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: str) -> Any:
            return (yield look(int(first)))

        return agent

    for program in (renamed, typed):
        run = deployment.foreseen(program)
        assert (run.verdict, run.position) == ("fails", None)
        assert run.text.startswith("its arguments no longer fit: 'agent'")


def test_an_exception_in_the_code_is_told(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def broken(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            yield look(first)
            raise KeyError("page")

        return agent

    run = deployment.foreseen(broken)
    assert (run.verdict, run.text) == ("fails", "the code raises KeyError: 'page'")


def test_a_run_that_is_left_by_the_same_error_stands_as_before(tmp_path: Path, way: Way) -> None:
    deployment = Deployment(tmp_path / "agent.db", way)

    def broken(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            yield look(first)
            raise ValueError("no such month")

        return agent

    with AgentRunLedger(deployment.path, durability="process") as ledger:
        agent = deployment.register(ledger, broken, lambda value: value)
        with pytest.raises(ValueError, match="no such month"):
            way.start(ledger, agent, 1, run_id="run")
    run = deployment.foreseen(broken)
    assert (run.verdict, run.text) == ("stands", "it is left by ValueError: no such month, as it was")


@pytest.mark.parametrize("busy", ["a loop", "a wait"])
def test_code_that_never_comes_to_its_next_call_is_given_up(deployment: Deployment, busy: str) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def endless(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            yield look(first)
            while True:
                if busy == "a wait":
                    if deployment.way.is_async:
                        yield asyncio.sleep(3600)
                    else:
                        threading.Event().wait(3600)

        return agent

    run = deployment.foreseen(endless, timeout=0.3)
    assert run.verdict == "fails"
    assert "took longer than 0.3 s" in run.text


def test_code_that_never_gives_up_at_its_frontier_goes_on_there(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def stubborn(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            for page in (1, 2):
                yield look(page)
            for _ in range(3):
                try:
                    yield look(3)
                except BaseException:
                    continue

        return agent

    run = deployment.foreseen(stubborn, timeout=5)
    assert (run.verdict, run.position) == ("goes on", "3")


def test_a_run_that_would_be_ended_by_the_new_limits_is_told(deployment: Deployment) -> None:
    with AgentRunLedger(deployment.path, durability="process") as ledger:
        agent = deployment.register(ledger, then_breaks, lambda value: value)
        with pytest.raises(ValueError, match="broken"):
            deployment.way.start(ledger, agent, run_id="run")

    def mended(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent() -> Any:
            for page in (1, 2, 3):
                yield look(page)

        return agent

    assert deployment.foreseen(mended).verdict == "goes on"
    run = deployment.foreseen(mended, max_steps=2)
    assert run.verdict == "fails"
    assert "it would be ended" in run.text


def then_breaks(look: Callable[[int], Any]) -> Callable[..., Any]:
    def agent() -> Any:
        yield look(1)
        yield look(2)
        raise ValueError("broken")

    return agent


def test_programs_that_are_not_registered_here_are_told_and_no_failure(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=2, run_id="of an agent")
    with AgentRunLedger(deployment.path) as ledger:
        ledger.create_run("step by step", "of a program")
    with RunLedger("of a pipeline", deployment.path) as pipeline:

        @pipeline.step()
        def fails() -> None:
            raise Stopped

        with pytest.raises(Stopped):
            pipeline.execute()
    new = AgentRunLedger(MemoryStore())
    forecast = preflight(new, deployment.path)
    assert forecast.ok
    assert [(run.run_id, run.program, run.verdict) for run in forecast.runs] == [
        ("of an agent", "agent", "not here"),
        ("of a program", None, "not here"),
        ("of a pipeline", "of a pipeline", "not here"),
    ]
    other = RunLedger("another pipeline", MemoryStore())
    assert {run.verdict for run in preflight(other, deployment.path).runs} == {"not here"}


def test_runs_that_have_ended_are_not_looked_at_and_a_quarantined_one_stands(tmp_path: Path) -> None:
    store = MemoryStore()
    with AgentRunLedger(store, durability="process") as ledger:

        @ledger.agent()
        def agent() -> None:
            return None

        ledger.run(agent, run_id="done")
        assert preflight(ledger).runs == []


# --- what waits -------------------------------------------------------------------------------------------------------


def test_a_run_that_waits_for_a_signal_stands(deployment: Deployment) -> None:
    def waits(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent() -> Any:
            yield look(1)
            return (yield current_run().wait_for("paid"))

        return agent

    with AgentRunLedger(deployment.path, durability="process") as ledger:
        deployment.register(ledger, waits, lambda value: value)
        held = ledger._start("run", ledger._agents["agent"].created({}, ledger, None), None)
        held.__exit__(None, None, None)
        ledger.detach("run")
        assert ledger.recover() == []
        assert ledger.get_run("run").status == "BLOCKED"
    run = deployment.foreseen(waits)
    assert (run.verdict, run.position, run.text) == ("stands", "2", "it waits for the signal 'paid'")
    with AgentRunLedger(deployment.path, durability="process") as ledger:
        ledger.signal("run", "paid", 5)
    run = deployment.foreseen(waits)
    assert (run.verdict, run.text) == ("goes on", "what was sent to it would be taken")


def test_a_step_that_is_to_be_tried_again_goes_on(deployment: Deployment) -> None:
    retried = {"look": {"effect": Effect.READ, "retry": RetryPolicy(base=3600, cap=3600)}}
    with AgentRunLedger(deployment.path, durability="process", clock=Impatient()) as ledger:

        def fails(value: Any) -> Any:
            raise ConnectionRefusedError("try later")

        agent = deployment.register(ledger, pages, fails, **retried)
        with pytest.raises(Stopped):
            deployment.way.start(ledger, agent, 1, run_id="run")
    run = deployment.foreseen(pages, tools=retried)
    assert run.verdict == "goes on"


class Impatient(SystemClock):
    """The machine's clock; whoever sleeps by it ends the process."""

    @staticmethod
    def sleep(seconds: float) -> None:
        raise Stopped


# --- nothing is done --------------------------------------------------------------------------------------------------


def contents(path: Path) -> str:
    """Everything in a database, as a digest."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return hashlib.sha256("\n".join(connection.iterdump()).encode()).hexdigest()


def test_nothing_is_written_to_the_database(deployment: Deployment) -> None:
    deployment.leave(pages, 1, stop_at=3)
    before = contents(deployment.path), hashlib.sha256(deployment.path.read_bytes()).hexdigest()

    def renamed(fetch: Callable[[int], Any]) -> Callable[..., Any]:
        return pages(fetch)

    deployment.foreseen(pages)
    deployment.foreseen(renamed, tools={"fetch": {}})
    assert (contents(deployment.path), hashlib.sha256(deployment.path.read_bytes()).hexdigest()) == before


def test_a_run_that_is_at_work_meanwhile_is_not_disturbed(deployment: Deployment) -> None:
    with AgentRunLedger(deployment.path, durability="process") as ledger:

        def called(value: Any) -> Any:
            if value == 2:
                foreseen.append(deployment.foreseen(pages))
            return value

        foreseen: list[Foreseen] = []
        agent = deployment.register(ledger, pages, called)
        if deployment.way.is_async:
            with pytest.raises(RuntimeError, match="call it from plain code"):
                deployment.way.start(ledger, agent, 1, run_id="run")
            return
        deployment.way.start(ledger, agent, 1, run_id="run")
    assert (foreseen[0].verdict, foreseen[0].position) == ("goes on", "2")


def test_no_tool_is_called_even_beside_its_run(deployment: Deployment) -> None:
    """A thread that the agent starts by itself is no program of the run: a tool that it calls is called plainly, and must not be."""
    deployment.leave(pages, 1, stop_at=3)

    def threaded(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            thread = threading.Thread(target=lambda: errors.append(_error_of(look, 99)))
            thread.start()
            thread.join()
            return (yield look(first))

        return agent

    errors: list[BaseException | None] = []
    run = deployment.foreseen(threaded)
    assert run.verdict == "goes on"
    if not deployment.way.is_async:
        assert "preflight calls no tool" in str(errors[0])


def _error_of(function: Callable[[int], Any], value: int) -> BaseException | None:
    try:
        made = function(value)
        if asyncio.iscoroutine(made):
            made.close()
    except BaseException as error:
        return error
    return None


def test_tools_can_be_called_again_afterwards() -> None:
    ledger = AgentRunLedger(MemoryStore())

    @ledger.tool()
    def look(value: int) -> int:
        return value

    preflight(ledger)
    assert look(5) == 5


def test_what_the_code_prints_is_left_alone(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    deployment.leave(pages, 1, stop_at=3)

    def loud(look: Callable[[int], Any]) -> Callable[..., Any]:
        def agent(first: int) -> Any:
            sys.stdout.write(f"from page {first}\n")
            return (yield look(first))

        return agent

    deployment.foreseen(loud)
    assert capsys.readouterr().out == "from page 1\n"


def test_progress_is_told(deployment: Deployment) -> None:
    for number in range(3):
        deployment.leave(pages, 1, stop_at=2, run_id=f"run {number}")
    ledger = AgentRunLedger(MemoryStore())
    deployment.register(ledger, pages, deployment.called.append)
    told: list[tuple[int, int]] = []
    forecast = preflight(ledger, deployment.path, told=lambda done, of: told.append((done, of)))
    assert told == [(0, 3), (1, 3), (2, 3)]
    assert [run.verdict for run in forecast.runs] == ["goes on"] * 3


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        preflight(AgentRunLedger(MemoryStore()), tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreUnavailable, match="in memory"):
        preflight(AgentRunLedger(MemoryStore()), ":memory:")


def test_ledgers_of_an_imported_module_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with nothing_is_opened():
        ledger = AgentRunLedger("agent.db")
        with pytest.raises(StoreUnavailable, match="while it is imported"):
            ledger.create_run("at import")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreUnavailable, match="there is no database"):
        preflight(ledger)
    with AgentRunLedger("agent.db") as opened:
        opened.create_run("now", "run")
    assert [run.verdict for run in preflight(ledger).runs] == ["not here"]
    ledger.close()


# --- pipelines --------------------------------------------------------------------------------------------------------


def report(*, is_async: bool, steps: dict[str, tuple[str, ...]], path: Any, stop: str = "") -> RunLedger:
    """A pipeline whose steps come after each other as said; the step `stop` ends the process."""
    way = Way(is_async)
    made = [Step(name, way.function(_of_month(name, stop)), after, effect=Effect.READ) for name, after in steps.items()]
    return RunLedger("report", path, steps=made, durability="process")


def _of_month(name: str, stop: str) -> Callable[[str], str]:
    def step(month: str) -> str:
        if name == stop:
            raise Stopped
        return f"{name} of {month}"

    return step


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_renamed_step_of_a_pipeline_is_named(tmp_path: Path, is_async: bool) -> None:
    path = tmp_path / "runs.db"
    wiring: dict[str, tuple[str, ...]] = {"fetch": (), "rates": ("fetch",), "write": ("rates",)}
    old = report(is_async=is_async, steps=wiring, path=path, stop="write")
    with pytest.raises(Stopped):
        old.execute(month="2026-10")
    old.close()

    def foreseen(**steps: tuple[str, ...]) -> Foreseen:
        (run,) = preflight(report(is_async=is_async, steps=steps, path=MemoryStore()), path).runs
        return run

    same = foreseen(**wiring)
    assert (same.verdict, same.position) == ("goes on", "write")
    renamed = foreseen(fetch=(), exchange=("fetch",), write=("exchange",))
    assert (renamed.verdict, renamed.position) == ("diverges", "rates")
    assert "'rates'" in renamed.text
    rewired = foreseen(fetch=(), rates=(), write=("rates",))
    assert (rewired.verdict, rewired.position) == ("diverges", "rates")
    longer = foreseen(**wiring, send=("write",))
    assert longer.verdict == "goes on"


# --- the command ------------------------------------------------------------------------------------------------------

OLD = """
import os, sys
from agent_run_ledger import AgentRunLedger

ledger = AgentRunLedger("agent.db", durability="process")

@ledger.tool(effect="READ")
def look(page: int) -> int:
    if page == 3:
        os._exit(9)
    return page

@ledger.agent()
def agent(first: int) -> int:
    print("this is the agent")
    for page in range(first, first + 5):
        look(page)

if __name__ == "__main__":
    ledger.run(agent, 1, run_id="left")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "old_code.py").write_text(OLD, encoding="utf-8")
    (tmp_path / "new_code.py").write_text(OLD.replace("look(page", "fetch(page"), encoding="utf-8")
    assert python(tmp_path, "old_code.py").returncode == 9
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    source = Path(agent_run_ledger.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "agent_run_ledger", *words)


def test_the_command_says_that_all_goes_on(folder: Path) -> None:
    before = contents(folder / "agent.db")
    done = command(folder, "preflight", "old_code")
    assert (done.returncode, done.stderr) == (0, "")
    assert "this is the agent" in done.stdout
    assert "step 3 'look' would be dispatched, attempt 2" in done.stdout
    assert done.stdout.endswith("1 open run: 1 would go on\n")
    assert contents(folder / "agent.db") == before


def test_the_command_names_the_renamed_step_and_fails(folder: Path) -> None:
    done = command(folder, "preflight", "new_code:ledger", "--db", "agent.db")
    assert (done.returncode, done.stderr) == (1, "")
    assert "recorded is 'look', the code asks for 'fetch'" in done.stdout
    assert done.stdout.endswith("1 open run: 1 would diverge\n")


def test_the_command_prints_json_and_nothing_between_it(folder: Path) -> None:
    done = command(folder, "--json", "preflight", "new_code")
    assert done.returncode == 1
    assert done.stderr == "this is the agent\n"
    said = json.loads(done.stdout)
    (run,) = said["runs"]
    assert (said["ok"], run["verdict"], run["position"], run["recorded"], run["asked"]) == (
        False, "diverges", "1", "'look'", "'fetch'",
    )  # fmt: skip


def test_the_command_says_what_is_wrong_with_the_module(folder: Path) -> None:
    (folder / "no_ledger.py").write_text("x = 1\n", encoding="utf-8")
    (folder / "two.py").write_text(
        OLD.replace("ledger = ", "other = ledger = ") + "\nthird = AgentRunLedger(':memory:')\n", encoding="utf-8"
    )
    (folder / "runs_at_once.py").write_text(OLD.replace('if __name__ == "__main__":', "if True:"), encoding="utf-8")
    for words, said in (
        (["preflight", "nowhere"], "there is no module 'nowhere'"),
        (["preflight", "no_ledger"], "no AgentRunLedger and no RunLedger"),
        (["preflight", "two"], "several ledgers: say which, like two:"),
        (["preflight", "old_code:agent"], "is no AgentRunLedger and no RunLedger"),
        (["preflight", "runs_at_once"], "uses its ledger"),
        (["preflight", "old_code", "--db", "none.db"], "there is no database"),
        (["preflight", "old_code", "--timeout", "soon"], "a number of seconds is needed"),
    ):
        done = command(folder, *words)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (folder / "none.db").exists()


def test_importing_the_module_makes_no_database(tmp_path: Path) -> None:
    (tmp_path / "code_only.py").write_text(OLD, encoding="utf-8")
    done = command(tmp_path, "preflight", "code_only")
    assert done.returncode == 2
    assert "there is no database" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"code_only.py", "__pycache__"}


def test_the_command_says_that_no_run_is_open(folder: Path) -> None:
    with AgentRunLedger(folder / "agent.db") as ledger:
        ledger.cancel("left")
    done = command(folder, "preflight", "new_code")
    assert (done.returncode, done.stdout) == (0, "no run is open\n")
