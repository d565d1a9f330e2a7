"""SIGKILL at every durable boundary of an async agent with branches and children, judged by what somebody outside saw."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import Effect
from support import twelve
from support.branches import CALLS, RUN
from support.twelve import Nursery
from test_kill import SIGKILLED, Story

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with twelve.nursery("support.branches") as process:
        yield process


class Lives:
    """The agent's lives in one durability, and what comes out of it where nobody disturbs it."""

    def __init__(self, nursery: Nursery, folder: Path, durability: str) -> None:
        self.nursery = nursery
        self.folder = folder
        self.durability = durability
        undisturbed = self.begin("undisturbed")
        assert undisturbed.live() == 0
        self.places: list[str] = undisturbed.told("passed")["places"]
        self.result = undisturbed.told("after")["result"]
        judge(undisturbed, self.result)

    def begin(self, name: str) -> Story:
        return Story(self.nursery, self.folder / name, "agent", self.durability)

    def kill(self, *die_at: int) -> bool:
        """Kill at these boundaries, one life after the other, then let it live, and judge. Whether a step is left in doubt."""
        story = self.begin("-".join(map(str, die_at)))
        try:
            for boundary in die_at:
                ended = story.live(boundary)
                if ended == 0:  # its thread wrote more at once this time, so there were fewer boundaries
                    break
                assert ended == SIGKILLED
            assert story.live() == 0
            in_doubt = judge(story, self.result)
        except AssertionError as error:
            error.add_note(f"killed at {die_at} of {list(enumerate(self.places, 1))}")
            raise
        shutil.rmtree(story.folder)
        return in_doubt


@pytest.mark.parametrize("durability", ["full", "process"])
def test_an_agent_with_branches_that_is_killed_at_any_durable_boundary_goes_on(
    durability: str, nursery: Nursery, tmp_path: Path
) -> None:
    lives = Lives(nursery, tmp_path, durability)
    expect_every_boundary(lives.places)
    in_doubt = [lives.kill(die_at) for die_at in range(1, len(lives.places) + 1)]
    assert any(in_doubt)
    assert not all(in_doubt)


@pytest.mark.parametrize("durability", ["full", "process"])
def test_it_goes_on_too_where_the_process_that_recovers_it_is_killed_as_well(
    durability: str, nursery: Nursery, tmp_path: Path
) -> None:
    lives = Lives(nursery, tmp_path, durability)
    for first, second in itertools.product(range(2, len(lives.places), 11), range(3, len(lives.places), 17)):
        lives.kill(first, second)


def expect_every_boundary(places: list[str]) -> None:
    """The net has no hole: each write and each call is there, before and after."""
    count = Counter(places)
    for moment in ("before", "after"):
        assert count[f"{moment} create"] == 3  # the agent's run and its children's
        assert count[f"{moment} append_all"] >= 10
        assert count[f"{moment} close"] == 1
        for tool, calls in CALLS.items():
            assert count[f"in {tool}, {moment} its effect"] == calls


def judge(story: Story, result: Any) -> bool:
    """Hold the agent to its promises. Returns whether it parked because nobody knows what a step did."""
    witness = story.witness
    found = {note["life"]: note["runs"] for note in witness.notes("before")}
    after = witness.notes("after")[-1]
    assert after["findings"] == []

    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in witness.notes("call"):
        seen[call["key"]].append(call)
    for key, calls in seen.items():
        assert len({(call["step"], call["bytes"]) for call in calls}) == 1, "another call under the same key"
        assert max(Counter(call["life"] for call in calls).values()) == 1
        for call in calls:
            states = states_in(found[call["life"]])
            assert states.get(key) != "COMPLETED", f"{call['step']} has an outcome and was called again"
            later = states_in(found.get(call["life"] + 1, after["runs"]))
            assert key in later, f"{call['step']} was dispatched before its intent was written"
        assert calls[0]["effect"] != Effect.MUTATE or len(calls) == 1
    keys = {(calls[0]["step"], calls[0]["bytes"]) for calls in seen.values()}
    assert len(keys) == len(seen), "one call under two keys"

    heard = [[note["what"] for note in notes] for _, notes in by_life(witness.notes("heard"))]
    for earlier, later in itertools.combinations(heard, 2):
        shorter = min(len(earlier), len(later))
        assert earlier[:shorter] == later[:shorter], "a program was told something else than the one before it"

    if after["error"] is None:
        assert after["result"] == result
        assert {run["status"] for run in after["runs"].values()} == {"COMPLETED"}
        assert len(after["runs"]) == 3
        assert Counter(calls[0]["step"] for calls in seen.values() if calls[0]["step"] != "slow") == CALLS
        return False
    assert after["error"] == "StepInDoubt"
    assert after["runs"][RUN]["status"] == "BLOCKED"
    states = {step: state for step, _, state in after["runs"][RUN]["steps"]}
    assert states.pop("pay") == "BLOCKED"
    assert states.pop("slow", "FAILED") == "FAILED"
    assert set(states.values()) <= {"COMPLETED", "RUNNING"}, "what only reads is left to a program that may begin"
    calls = len(witness.notes("call"))
    assert story.live() == 0  # and it stays so, however often the program is run
    assert witness.notes("after")[-1]["error"] == "StepInDoubt"
    assert len(witness.notes("call")) == calls
    return True


def states_in(runs: dict[str, Any]) -> dict[str, str]:
    """The state of each step of all runs, by its key."""
    return {key: state for run in runs.values() for _, key, state in run["steps"]}


def by_life(notes: list[dict[str, Any]]) -> Any:
    return itertools.groupby(notes, key=lambda note: note["life"])
