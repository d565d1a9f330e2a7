"""The breaker's memory is the ledger: a run that is killed halts where it would have halted, by the same rule and for the same evidence."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.explorer import Life, World, judge
from support.halting import KINDS, halted, loop, steps_of
from support.looping import Step
from support.twelve import Nursery, nursery
from support.witness import Witness

SIGKILLED = -9


@pytest.fixture(autouse=True)
def _undeclared_steps_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lived(world: World, kind: str, die_at: int | None = None) -> tuple[dict[str, Any] | None, int]:
    """One life in this process: how the run was halted (None where it died before), and how many ticks it had."""
    told = None
    with world.life(die_at) as life:
        loop(life.ledger, steps_of(kind), partial(_seen, life))
        told = halted(life.ledger, life.store)
    return told, len(life.ticks)


def _seen(life: Life, step: Step) -> None:
    life.takes_effect(step.tool, step.arguments)


def killed_at(kind: str, *die_at: int) -> dict[str, Any] | None:
    """How the run is halted whose processes have died at these ticks."""
    world = World(None, {"durability": "process"})
    for tick in die_at:
        lived(world, kind, tick)
    told, _ = lived(world, kind)
    with world.life() as reader:
        judge(world, reader)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_at_any_yield_halts_at_the_same_step(kind: str) -> None:
    undisturbed, ticks = lived(World(None, {"durability": "process"}), kind)
    assert undisturbed is not None
    for tick in range(1, ticks + 1):
        assert killed_at(kind, tick) == undisturbed, f"stopped at tick {tick} of {ticks}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_several_times_halts_at_the_same_step(kind: str) -> None:
    undisturbed, ticks = lived(World(None, {"durability": "process"}), kind)
    draw = random.Random(kind)
    for _ in range(4):
        stops = sorted(draw.choices(range(1, ticks + 1), k=3))
        assert killed_at(kind, *stops) == undisturbed, f"stopped at ticks {stops} of {ticks}"


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    with nursery("support.halting") as process:
        yield process


@pytest.mark.parametrize(
    "kind",
    ["one call", "one failing call", "three in turn, with times", "one error, other arguments", "thoughts between"],
)
def test_a_run_whose_process_is_killed_halts_at_the_same_step(kind: str, processes: Nursery, tmp_path: Path) -> None:
    def live(name: str, die_at: int | None = None) -> int:
        (tmp_path / name).mkdir(exist_ok=True)
        return processes.live(folder=str(tmp_path / name), kind=kind, die_at=die_at)

    def told(name: str) -> dict[str, Any]:
        (note,) = Witness(tmp_path / name / "witness").notes("halted")
        assert note["findings"] == []
        return note

    assert live("undisturbed") == 0
    undisturbed = told("undisturbed")
    places = undisturbed.pop("places")
    for die_at in random.Random(kind).sample(range(1, places + 1), 5):
        assert live(f"{die_at}", die_at) == SIGKILLED
        assert live(f"{die_at}") == 0
        killed = told(f"{die_at}")
        assert killed.pop("places") <= places
        assert killed == undisturbed, f"killed at boundary {die_at} of {places}"
        calls = len(Witness(tmp_path / f"{die_at}" / "witness").notes("call"))
        assert undisturbed["steps"] <= calls <= undisturbed["steps"] + 1
