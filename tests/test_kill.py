"""SIGKILL at every durable boundary of a run, in a real process, judged by what somebody outside saw."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import Effect
from support import twelve
from support.twelve import PROGRAMS, STEPS, Nursery
from support.witness import Witness

SIGKILLED = -9


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with twelve.nursery() as process:
        yield process


class Story:
    """The lives of one run, from its first process to its last."""

    def __init__(self, nursery: Nursery, folder: Path, program: str, durability: str) -> None:
        self.nursery = nursery
        self.folder = folder
        self.program = program
        self.durability = durability
        self.lives = 0
        self.witness = Witness(folder / "witness")
        folder.mkdir()

    def live(self, die_at: int | None = None) -> int:
        """One more process. Returns how it ended."""
        order = {"program": self.program, "folder": str(self.folder), "durability": self.durability}
        ended = self.nursery.live(**order, number=self.lives, die_at=die_at)
        self.lives += 1
        return ended

    def told(self, kind: str) -> dict[str, Any]:
        return self.witness.notes(kind)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["full", "process"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_is_killed_at_any_durable_boundary_goes_on_as_if_nothing_had_happened(
    program: str, durability: str, nursery: Nursery, tmp_path: Path
) -> None:
    undisturbed = Story(nursery, tmp_path / "undisturbed", program, durability)
    assert undisturbed.live() == 0
    places = undisturbed.told("passed")["places"]
    expect_every_boundary(places)
    in_doubt = 0
    for die_at, place in enumerate(places, 1):
        story = Story(nursery, tmp_path / f"{die_at}", program, durability)
        assert story.live(die_at) == SIGKILLED
        assert story.live() == 0
        try:
            in_doubt += judge(story, undisturbed.told("after"))
        except AssertionError as error:
            error.add_note(f"killed at boundary {die_at}, {place}")
            raise
        shutil.rmtree(story.folder)
    # after its intent and before its outcome there are four places at which each of the three MUTATE steps can be left
    assert in_doubt == 3 * 4


def expect_every_boundary(places: list[str]) -> None:
    """The net has no hole: each write and each call is there, before and after."""
    count = Counter(places)
    for moment in ("before", "after"):
        assert count[f"{moment} create"] == 1
        assert count[f"{moment} append"] == 2 * STEPS + 1  # intents, outcomes and the end
        assert count[f"{moment} close"] == 1
        assert count[f"{moment} release"] == 1
        for number in range(STEPS):
            assert count[f"in {twelve.name(number)}, {moment} its effect"] == 1


def judge(story: Story, undisturbed: dict[str, Any]) -> bool:
    """Hold a run that was killed once to its promises. Returns whether it parked because nobody knows what a step did."""
    witness = story.witness
    seen = defaultdict(list)
    for call in witness.notes("call"):
        seen[call["step"]].append(call)
    found = {step["step"]: step for step in witness.notes("before")[1]["steps"]}
    completed = {name for name, step in found.items() if step["state"] == "COMPLETED"}
    after = witness.notes("after")[-1]
    after_steps = {step["step"]: step for step in after["steps"]}

    for name, calls in seen.items():
        assert len({(call["key"], call["bytes"]) for call in calls}) == 1, f"{name}: another key or other bytes"
        first_life = [call for call in calls if call["life"] == 0]
        assert not first_life or name in found, f"{name} was dispatched before its intent was written"
        if name in completed:
            assert len(calls) == len(first_life) == 1, f"{name} has an outcome and was called again"
        elif name not in found:
            assert len(calls) == 1
        else:
            assert len(calls) <= 2

    for note in witness.notes("acknowledged"):
        entry = (found if note["life"] == 0 else after_steps)[note["step"]]
        assert (entry["state"], entry["output"]) == ("COMPLETED", note["output"]), "what was acknowledged is lost"
    if any(note["life"] == 0 for note in witness.notes("created")):
        assert witness.notes("before")[1]["status"]
    if any(note["life"] == 0 for note in witness.notes("finished")):
        assert witness.notes("before")[1]["status"] == "COMPLETED"

    assert after["findings"] == []
    if after["error"] is None:
        assert after["result"] == undisturbed["result"]
        assert after["steps"] == undisturbed["steps"]
        assert after["status"] == "COMPLETED"
        assert len(seen) == STEPS
        return False
    (left,) = found.keys() - completed
    assert after["error"] == "StepInDoubt"
    assert after["status"] == "BLOCKED"
    assert twelve.effect(int(left.removeprefix("step-"))) is Effect.MUTATE
    assert len(seen[left]) <= 1
    assert story.live() == 0  # and it stays so, however often the program is run
    assert witness.notes("after")[-1]["error"] == "StepInDoubt"
    assert [call["step"] for call in witness.notes("call")].count(left) == len(seen[left])
    return True
