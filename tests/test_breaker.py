"""With what a run that repeats itself is met: a notice that its model may read, the refusal of a call, its end; and its release."""

from __future__ import annotations

from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    CallBlocked,
    Effect,
    InvalidArguments,
    LoopDetectorPolicy,
    MayRepeat,
    ReplayDivergence,
    Run,
    RunawayLoopDetectedException,
    StepFailed,
)
from support.ledgers import Bench, Tool
from support.programs import RUN, Way

FAILS = "'fetch' was called 3 times in a row with equal arguments and an equal outcome"


def policy(first: str) -> LoopDetectorPolicy:
    return LoopDetectorPolicy(reactions={"suspected": first, "certain": first})


def fetching(ledger: AgentRunLedger, way: Way) -> tuple[Any, Any, Tool]:
    """A tool that fails each time in the same way, one that works, and what counts the calls of the first."""
    fails = Tool(ValueError("no such page"))
    fetch = way.tool(ledger, lambda page: fails(), name="fetch", effect=Effect.READ)
    search = way.tool(ledger, lambda words: f"found {words}", name="search", effect=Effect.READ)
    return fetch, search, fails


def test_a_model_that_reads_the_notice_changes_course_and_its_run_completes(bench: Bench, way: Way) -> None:
    ledger = bench.open(policy=policy("notice"))
    fetch, search, fails = fetching(ledger, way)
    programs = Tool()

    def agent(run: Run) -> Any:
        programs()
        said: list[str] = []
        while not said:
            try:
                yield fetch(7)
            except StepFailed:
                said = [notice.text for notice in run.notices()]
        return [*said, (yield search("the page"))]

    agent_of = way.agent(ledger, agent, name="agent")
    said = [f"Notice: {FAILS} (steps 1,2,3). Do something else: the next such call is refused.", "found the page"]
    assert way.start(ledger, agent_of) == said
    assert (fails.calls, ledger.get_run(RUN).status) == (3, "COMPLETED")
    assert ledger.verify().findings == []


def test_each_call_that_goes_on_with_it_meets_the_next_stage_and_a_replay_the_same(bench: Bench, way: Way) -> None:
    heard: list[list[str]] = []

    def live() -> tuple[AgentRunLedger, Tool]:
        bench.owners_die()
        ledger = bench.open(policy=policy("notice"))
        fetch, _, fails = fetching(ledger, way)

        def agent(run: Run) -> Any:
            heard.append([])
            for _ in range(9):
                try:
                    yield fetch(7)
                except (StepFailed, CallBlocked) as error:
                    heard[-1].append(f"{type(error).__name__}, {len(run.notices())}")
                if len(heard) == 1 and len(heard[0]) == 4:
                    raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, RunawayLoopDetectedException)):
            way.run(ledger, agent, name="agent")
        return ledger, fails

    ledger, fails = live()
    assert heard[0] == ["StepFailed, 0", "StepFailed, 0", "StepFailed, 1", "CallBlocked, 1"]
    assert (fails.calls, ledger.get_run(RUN).total_steps) == (3, 3)
    ledger, fails = live()
    assert (heard[1], fails.calls) == (heard[0], 0)
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    assert [line.event for line in ledger.trace(RUN) if line.event in ("notice", "blocked", "refused")] == [
        "notice", "blocked", "refused",
    ]  # fmt: skip
    assert ledger.verify().findings == []


def test_a_run_that_leaves_the_loop_begins_at_the_first_stage_again(bench: Bench, way: Way) -> None:
    ledger = bench.open(policy=policy("block"))
    fetch, search, fails = fetching(ledger, way)

    def agent() -> Any:
        met = []
        for _ in range(2):
            for _ in range(4):
                try:
                    yield fetch(7)
                except (StepFailed, CallBlocked) as error:
                    met.append(type(error).__name__)
            yield search("else")
            yield search("other")
        return met

    assert way.run(ledger, agent, name="agent") == [*["StepFailed"] * 3, "CallBlocked"] * 2
    assert fails.calls == 6


def test_another_call_where_one_was_blocked_is_a_divergence(bench: Bench, way: Way) -> None:
    pages = [7, 7, 7, 7]

    def live(*pages: int) -> None:
        bench.owners_die()
        ledger = bench.open(policy=policy("block"))
        fetch, _, _ = fetching(ledger, way)

        def agent() -> Any:
            for page in pages:
                try:
                    yield fetch(page)
                except (StepFailed, CallBlocked):
                    continue
            raise KeyboardInterrupt

        way.run(ledger, agent, name="agent")

    with pytest.raises(KeyboardInterrupt):
        live(*pages)
    with pytest.raises(ReplayDivergence, match="a call of 'fetch' that was blocked"):
        live(7, 7, 7, 8)


@pytest.mark.parametrize("again", [True, False])
def test_a_released_run_may_try_once_and_is_halted_at_once_if_it_repeats(bench: Bench, way: Way, again: bool) -> None:
    ledger = bench.open()
    answers = ["nothing"] * 3 + (["nothing"] if again else ["something"])
    tool = Tool(*answers)
    search = way.tool(ledger, lambda words, request_id: tool(), name="search", effect=Effect.READ)

    def agent() -> Any:
        for number in range(5):
            yield search("the page", f"request-{number}")

    agent_of = way.agent(ledger, agent, name="agent")
    with pytest.raises(RunawayLoopDetectedException):
        way.start(ledger, agent_of)
    assert (ledger.get_run(RUN).status, tool.calls) == ("QUARANTINE", 3)
    ledger.release(RUN)
    if again:
        with pytest.raises(RunawayLoopDetectedException):
            way.start(ledger, agent_of)
        assert (ledger.get_run(RUN).status, tool.calls) == ("QUARANTINE", 4)
    else:
        way.start(ledger, agent_of)
        assert (ledger.get_run(RUN).status, tool.calls) == ("COMPLETED", 5)
    assert ledger.verify().findings == []


@pytest.mark.parametrize(
    ("may_repeat", "calls", "reason"),
    [
        (MayRepeat(times=5), 5, "'poll' was called with equal arguments 5 times, as often as it may be"),
        (MayRepeat(seconds=25), 3, "'poll' was called with equal arguments 3 times in 30.. s, and may be for 25 s"),
        (MayRepeat(times=9, seconds=1000), 9, "as often as it may be"),
    ],
)
def test_what_may_repeat_may_do_so_as_often_and_as_long_as_its_tool_says(
    bench: Bench, way: Way, may_repeat: MayRepeat, calls: int, reason: str
) -> None:
    ledger = bench.open()
    polled = Tool(lambda: bench.clock.advance(10.0))
    poll = way.tool(ledger, polled, name="poll", effect=Effect.READ, may_repeat=may_repeat)

    def agent() -> Any:
        while True:
            yield poll()

    with pytest.raises(RunawayLoopDetectedException, match=reason):
        way.run(ledger, agent, name="agent")
    assert polled.calls == calls


@pytest.mark.parametrize("wrong", [{"certain": "stop"}, {"ok": "halt"}, {"suspected": None}])
def test_reactions_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reactions say"):
        LoopDetectorPolicy(reactions=wrong)


@pytest.mark.parametrize("wrong", [{"times": 0}, {"times": True}, {"seconds": 0}, {"seconds": float("inf")}])
def test_limits_of_repeating_that_are_none_are_refused(bench: Bench, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="MayRepeat"):
        MayRepeat(**wrong)
    with pytest.raises(InvalidArguments, match="may_repeat="):
        bench.open().tool(may_repeat=5)(Tool)  # type: ignore[arg-type]
