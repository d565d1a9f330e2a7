"""Async programs stopped at every yield, in process: whatever was under way side by side, the next process goes on with it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    Effect,
    ReplayStalledWarning,
    current_run,
)
from support.explorer import World, judge
from support.explorer_async import AsyncLife

Flow = Callable[[AsyncLife], Coroutine[Any, Any, Any]]
FLOWS: dict[str, tuple[Flow, dict[str, Any]]] = {}


def flow(**options: Any) -> Callable[[Flow], Flow]:
    """An async program to be stopped at every tick. `options` are those of the ledger; what it returns must come out the same."""

    def register(program: Flow) -> Flow:
        FLOWS[program.__name__] = (program, options)
        return program

    return register


# --- the flows --------------------------------------------------------------------------------------------------------


@flow()
async def tools_side_by_side_in_one_branch(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 4 - given, effect=Effect.READ)
    note = life.atool("note", effect=Effect.IDEMPOTENT)

    async def program() -> Any:
        return await note(await asyncio.gather(look(1), look(2), look(3)))

    return await life.arun(program)


@flow()
async def named_branches_as_tasks(life: AsyncLife) -> Any:
    look = life.atool("look", turns=len, effect=Effect.READ)
    note = life.atool("note")

    async def line(name: str) -> Any:
        with current_run().branch(name):
            return await note(await look(name))

    async def program() -> Any:
        async with asyncio.TaskGroup() as tasks:
            lines = [tasks.create_task(line(name)) for name in ("first", "second one")]
        return await note([line.result() for line in lines])

    return await life.arun(program)


@flow()
async def answers_as_they_come(life: AsyncLife) -> Any:
    look = life.atool("look", turns=lambda given: 5 * given, effect=Effect.READ)
    note = life.atool("note", effect=Effect.IDEMPOTENT)

    async def program() -> Any:
        noted = []
        looks = [asyncio.create_task(look(given)) for given in (3, 1, 2)]  # `as_completed` starts coroutines in any order
        for answer in asyncio.as_completed(looks):
            life.hears(came := await answer)
            noted.append(await note(came))
        return noted

    return await life.arun(program)


# --- the explorer -----------------------------------------------------------------------------------------------------

MAY_PARK: set[str] = set()


@pytest.fixture(autouse=True)
def _what_is_meant() -> Iterator[None]:
    """A process that dies leaves coroutines that nobody awaits; that a replay stands still is never meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ReplayStalledWarning)
        yield
        gc.collect()


class Explorer:
    """One flow, lived again and again."""

    def __init__(self, name: str, folder: Path | None, **options: Any) -> None:
        self.name = name
        self.program, given = FLOWS[name]
        self.options = {"durability": "process"} | given | options
        self.folder = folder
        self.worlds = 0
        world = self.world()
        self.expected, self.ticks = self.live(world)
        self.heard = world.heard[0]
        self.finish(world)

    def world(self) -> World:
        self.worlds += 1
        folder = None
        if self.folder is not None:
            folder = self.folder / str(self.worlds)
            folder.mkdir()
        return World(folder, self.options)

    def live(self, world: World, die_at: int | None = None) -> tuple[Any, list[str]]:
        """One life: what the program returned (None where it died), and the ticks that it passed."""
        result = None
        with world.life(die_at, kind=AsyncLife) as life:
            result = life.play(lambda: self.program(life))
            life.expect_live_equals_stored()
        assert die_at is None or len(life.ticks) == die_at, "it ended before it could die"
        return result, life.ticks

    def finish(self, world: World) -> None:
        """A reader of its own looks at what is left."""
        with world.life() as reader:
            judge(world, reader)

    def expect(self, world: World, result: Any) -> None:
        """The result of a life that was not disturbed, after some that were."""
        if not (self.name in MAY_PARK and result == "in doubt"):
            assert result == self.expected
            assert world.heard[-1] == self.heard

    def crash(self, *die_at: int) -> list[str]:
        """Die at these ticks, one life after the other, then run undisturbed, and judge. Returns the last life's ticks."""
        world = self.world()
        try:
            for tick in die_at:
                self.live(world, tick)
            result, ticks = self.live(world)
            self.expect(world, result)
            self.finish(world)
        except Exception as error:
            error.add_note(f"stopped at ticks {die_at}; undisturbed: {list(enumerate(self.ticks, 1))}")
            raise
        return ticks


def different(ticks: list[str]) -> list[int]:
    """The ticks before which something happened: between the end of one effect and the beginning of the next nothing does."""
    pairs = itertools.pairwise(["", *ticks])
    return [
        n for n, (last, this) in enumerate(pairs, 1) if not (last.startswith("after") and this.startswith("before"))
    ]


@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("name", FLOWS)
def test_an_async_run_stopped_at_any_yield_goes_on_as_if_nothing_had_happened(name: str, durability: str) -> None:
    explorer = Explorer(name, None, durability=durability)
    assert {"before Commit", "after Commit", "before append_all", "after append_all"} <= set(explorer.ticks)
    assert Explorer(name, None, durability=durability).ticks == explorer.ticks, "its ticks are not the same each time"
    for tick in range(1, len(explorer.ticks) + 1):
        explorer.crash(tick)
