"""Calls that come back in a random order, in processes that are killed at random: a replay is told them in the order of the first time."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect
from support import twelve
from support.ledgers import Bench
from support.programs import dies, mortal
from support.random_order import EQUALS, LOST, NAMES, ROUNDS, TOLD, Death
from support.twelve import Nursery
from support.witness import Witness
from test_kill import SIGKILLED

SEEDS, AT_A_TIME = 200, 10
DEATHS = 3
LOSERS = ROUNDS * (len(NAMES) - 1)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with twelve.nursery("support.random_order") as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_a_program_that_is_killed_again_and_again_is_told_everything_in_the_order_of_the_first_time(
    first: int, nursery: Nursery, tmp_path: Path
) -> None:
    orders = set()
    for seed in range(first, first + AT_A_TIME):
        folder = tmp_path / str(seed)
        folder.mkdir()
        story = Witness(folder / "witness")
        deaths = deaths_of(seed)
        try:
            for number, death in enumerate([*deaths, None]):
                durability = ["full", "process"][seed % 2]
                order = {"folder": str(folder), "seed": seed, "durability": durability}
                assert nursery.live(**order, number=number, death=death) == (SIGKILLED if death else 0)
            orders.add(judge(story))
        except AssertionError as error:
            error.add_note(f"seed {seed}, {deaths}")
            raise
        shutil.rmtree(folder)
    assert len(orders) == AT_A_TIME, "the order is not random, so that this test says little"


def deaths_of(seed: int) -> list[Death]:
    """Where its processes are killed: of half of the runs each comes further than the one before, of the others some die at replay."""
    draw = random.Random(seed)
    told = [draw.randrange(TOLD - 10) for _ in range(DEATHS)]
    if draw.random() < 0.5:
        told.sort()
    return [Death(heard, draw.randint(1, 9), by_thread=draw.random() < 0.5) for heard in told]


def judge(witness: Witness) -> tuple[int, ...]:
    """Hold the agent to its promises. Returns in which order its equally named calls came back."""
    assert witness.notes("complaint") == [], "no divergence, no warning, nothing that the event loop has to complain of"
    found = {note["life"]: note for note in witness.notes("before")}
    after = witness.notes("after")[-1]
    assert [note["findings"] for note in [*found.values(), after]] == [[]] * (DEATHS + 2)

    told: list[list[Any]] = [[] for _ in range(DEATHS + 1)]
    for note in witness.notes("told"):
        told[note["life"]].append([note["asked"], note["answer"]])
    expect_one_order(told, {life for life, note in found.items() if note["status"] == "COMPLETED"})
    heard = max(told, key=len)
    assert len(heard) == TOLD
    assert after["result"] == heard
    assert after["status"] == "COMPLETED"

    called: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in witness.notes("call"):
        called[call["position"]].append(call)
    for position, calls in called.items():
        assert len({(call["tool"], call["key"], call["bytes"]) for call in calls}) == 1, "two calls at one position"
        assert max(Counter(call["life"] for call in calls).values()) == 1
        for call in calls:
            state = found[call["life"]]["steps"].get(position)
            assert state in (None, "RUNNING"), f"{call} has an outcome and was started again"
            later = found.get(call["life"] + 1, after)
            assert position in later["steps"], f"{call} was dispatched before its intent was written"
    assert len({calls[0]["key"] for calls in called.values()}) == len(called)

    last = {(calls[-1]["tool"], str(calls[-1]["given"])): calls[-1]["life"] for calls in called.values()}
    for (tool, given), answer in heard:
        if answer != LOST:
            assert answer == [tool, given, last[tool, str(given)]], "the result of another call, or of an earlier one"
    assert sum(answer == LOST for _, answer in heard) == LOSERS, "two outcomes were handed out at once"
    states = Counter(after["steps"].values())
    assert states.keys() <= {"COMPLETED", "FAILED"}
    assert states["FAILED"] <= LOSERS, "a step that nobody interrupted failed"
    assert TOLD - LOSERS <= states.total() <= TOLD
    order = tuple(given for (tool, given), _ in heard if tool == "equal")
    assert len(order) == EQUALS
    return order


def expect_one_order(told: list[list[Any]], only_read: set[int]) -> None:
    """Whatever a program was told, each later one was told the same before anything else, as far as it came."""
    for earlier, later in combinations(range(len(told)), 2):
        if later in only_read:  # the run was complete, and so was told at once
            assert told[later] == []
            continue
        shorter = min(len(told[earlier]), len(told[later]))
        assert told[earlier][:shorter] == told[later][:shorter], f"life {later} was told another order than {earlier}"


async def turns_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_call_that_is_made_while_an_outcome_is_on_its_way_does_not_know_of_it(bench: Bench) -> None:
    """The program loses its patience some turns before, while, and after it is handed the outcome of its other call."""

    def impatient(ledger: AgentRunLedger, patience: int, end: Callable[[], None]) -> Any:
        @ledger.tool(effect=Effect.READ)
        async def slow() -> str:
            await turns_of_the_loop(10)
            return "slow"

        @ledger.tool(effect=Effect.READ)
        async def then(what: str) -> str:
            return what

        @ledger.agent()
        async def agent() -> list[str]:
            asked = asyncio.create_task(slow())
            for _ in range(patience):
                await asyncio.sleep(0)
                if asked.done():
                    break
            told = [await then("thank" if asked.done() else "remind"), await asked]
            end()
            return told

        return asyncio.run(ledger.arun(agent, run_id=f"patience {patience}"))

    answers = set()
    for patience in (*range(10, 50), 1_000_000):
        ledger, end = mortal(bench)
        with dies(bench):
            impatient(ledger, patience, end)
        answers.add(tuple(impatient(bench.open(), patience, lambda: None)))
    assert answers == {("remind", "slow"), ("thank", "slow")}
