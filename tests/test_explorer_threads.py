"""Programs with threads stopped at every yield, in process: the next process goes on with all that was under way."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from agent_run_ledger import Effect, RetryPolicy, StepFailed, StepInDoubt, StoreFull, current_run
from agent_run_ledger import run as run_module
from agent_run_ledger.drivers import sync
from support.explorer import RUN, judge
from support.stage import Staged, ThreadedLife, ThreadedWorld

Flow = Callable[[ThreadedLife], Any]
FLOWS: dict[str, Flow] = {}


def flow(program: Flow) -> Flow:
    """A program to be stopped at every tick; it returns what must come out the same, or that a step is in doubt."""
    FLOWS[program.__name__] = program
    return program


def tool(life: ThreadedLife, name: str, does: Callable[[Any, int], Any] | None = None, **options: Any) -> Any:
    """A registered tool, whose calls are seen."""
    life.ledger._tools.pop(name, None)
    call = life.tool(name, does or (lambda given, n: [name, given]))

    def named(given: Any) -> Any:
        return call(given)

    return life.ledger.tool(name=name, **options)(named)


def run(life: ThreadedLife, program: Callable[..., Any], name: str = "explored") -> Any:
    """Run an agent as the run that is explored."""
    life.world.agents.add(name)
    life.ledger._agents.pop(name, None)
    return life.ledger.run(life.ledger.agent(name=name)(program), run_id=RUN)


@flow
def branches_in_threads(life: ThreadedLife) -> Any:
    look = tool(life, "look", effect=Effect.READ)
    note = tool(life, "note")

    def line(given: Any) -> Any:
        return note(look(given))

    def program() -> Any:
        return note(current_run().gather(*[partial(line, given) for given in (1, 2, 3)]))

    return run(life, program)


@flow
def a_failure_in_one_of_the_threads(life: ThreadedLife) -> Any:
    def breaks(given: Any, n: int) -> Any:
        if given == 2:
            raise LookupError("there is no 2")
        return given

    look = tool(life, "look", breaks, effect=Effect.READ)
    note = tool(life, "note")

    def program() -> Any:
        with pytest.raises(StepFailed, match="there is no 2"):
            current_run().map(look, [1, 2, 3])
        return note("and on")

    return run(life, program)


@flow
def children_in_threads(life: ThreadedLife) -> Any:
    look = tool(life, "look", effect=Effect.READ)
    note = tool(life, "note", effect=Effect.IDEMPOTENT)

    def child(number: int) -> Any:
        return note(look(number))

    life.world.agents.add("child")
    life.ledger._agents.pop("child", None)
    begun = life.ledger.agent(name="child")(child)

    def program() -> Any:
        return note(current_run().map(begun, [1, 2]))

    return run(life, program)


@flow
def a_step_in_doubt_in_one_of_the_threads(life: ThreadedLife) -> Any:
    look = tool(life, "look", effect=Effect.READ)
    pay = tool(life, "pay", effect=Effect.MUTATE)

    def program() -> Any:
        return current_run().gather(lambda: pay(1), lambda: [look(1), look(2)])

    try:
        return run(life, program)
    except StepInDoubt:
        assert life.full_at is not None or life.ledger.get_run(RUN).status == "BLOCKED"
        return "in doubt"


@flow
def a_call_that_outlasts_its_time_and_returns_late(life: ThreadedLife) -> Any:
    def outlasts(given: Any, n: int) -> Any:
        if n == 1:
            life.stage.hang()
        return ["late", given]

    slow = tool(life, "slow", outlasts, effect=Effect.IDEMPOTENT, timeout=5.0)
    note = tool(life, "note", effect=Effect.READ)

    def program() -> Any:
        told = []
        try:
            told.append(slow(1))
        except StepFailed as error:
            told.append(error.original_type)
        life.stage.let_go()
        told.append(note(len(told)))
        return told

    run(life, program)
    return life.ledger.get_run(RUN).status  # a process that died may have had its answer in the second attempt


@flow
def a_call_that_outlasts_its_time_is_retried_behind_its_thread(life: ThreadedLife) -> Any:
    def outlasts(given: Any, n: int) -> Any:
        if n == 1:
            life.stage.hang()
        return ["done", given]

    patient = RetryPolicy(max_attempts=6, base=10, cap=10)
    slow = tool(life, "slow", outlasts, effect=Effect.IDEMPOTENT, timeout=5.0, retry=patient)
    look = tool(life, "look", effect=Effect.READ)

    def looks() -> Any:
        try:
            return [look(1), look(2)]
        finally:
            life.stage.let_go()

    def program() -> Any:
        return current_run().gather(lambda: slow(1), looks)

    return run(life, program)


@pytest.fixture(autouse=True)
def _undeclared_steps_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Explorer:
    """One flow, lived again and again."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.monkeypatch = monkeypatch
        world = self.world()
        self.expected, self.ticks = self.live(world)
        self.finish(world)

    def world(self) -> ThreadedWorld:
        random.seed(self.name)
        return ThreadedWorld(None, {})

    def on(self, life: ThreadedLife) -> None:
        """From now on threads are on this life's stage."""
        for module in (run_module, sync):
            self.monkeypatch.setattr(module, "Work", partial(Staged, life.stage))

    def live(self, world: ThreadedWorld, die_at: int | None = None) -> tuple[Any, list[str]]:
        """One life: what the program returned (None where it died), and the ticks that it passed."""
        result = None
        with world.life(die_at, kind=ThreadedLife) as life:
            self.on(life)
            result = FLOWS[self.name](life)
            life.expect_live_equals_stored()
        assert die_at is None or len(life.ticks) == die_at, "it ended before it could die"
        return result, life.ticks

    def finish(self, world: ThreadedWorld) -> None:
        """A reader of its own looks at what is left."""
        with world.life() as reader:
            judge(world, reader)

    def crash(self, *die_at: int) -> list[str]:
        """Die at these ticks, one life after the other, then run undisturbed, and judge. Returns the last life's ticks."""
        world = self.world()
        try:
            for tick in die_at:
                self.live(world, tick)
            result, ticks = self.live(world)
            assert result in (self.expected, "in doubt")
            self.finish(world)
        except Exception as error:
            error.add_note(f"stopped at ticks {die_at}; undisturbed: {list(enumerate(self.ticks, 1))}")
            raise
        return ticks


@pytest.mark.parametrize("name", FLOWS)
def test_a_run_with_threads_stopped_at_any_yield_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(name, monkeypatch)
    assert Explorer(name, monkeypatch).ticks == explorer.ticks, "its ticks are not the same each time"
    for tick in range(1, len(explorer.ticks) + 1):
        explorer.crash(tick)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_a_second_crash_of_a_run_with_threads_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(name, monkeypatch)
    for first in range(1, len(explorer.ticks) + 1, 3):
        for second in range(1, len(explorer.crash(first)) + 1, 3):
            explorer.crash(first, second)


@pytest.mark.parametrize("name", FLOWS)
def test_whatever_write_of_a_thread_finds_the_disk_full_the_process_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = Explorer(name, monkeypatch)
    for full_at in range(1, explorer.ticks.count("before append") + 1):
        world = explorer.world()
        with world.life(full_at=full_at, kind=ThreadedLife) as life:
            explorer.on(life)
            for _ in range(3):
                try:
                    result = FLOWS[name](life)
                except (StoreFull, StepFailed):  # also that of a child
                    continue
                break
            assert result in (explorer.expected, "in doubt"), f"the disk was full at write {full_at}"
        explorer.finish(world)
