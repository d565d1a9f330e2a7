"""The loop rules are shown what has ended when somebody asks them, and of many outcomes the last ones: nobody sees a difference."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger import LoopDetectorPolicy
from agent_run_ledger.contract import Row
from agent_run_ledger.engine import suspicion
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.suspicion import Suspicion
from support.looping import LOOPS, Kind, Step, text

THOUGHTS = [
    Kind("a note", lambda draw, at: Step("think", {"thought": f"once more, {at % 3}"}, ""), 0),
    Kind("a new step", lambda draw, at: Step("look", {"at": text(draw)}, text(draw)), 0),
    Kind("the next of many", lambda draw, at: Step("load", {"page": at}, {"ok": True, "total": at}), 0),
]


def ended(number: int, step: Step, *, is_thought: bool) -> tuple[StepHistory, Row, dict[str, Any]]:
    """A step and its outcome, as the fold knows them."""
    arguments = json.dumps(step.arguments, separators=(",", ":")).encode()
    common = {
        "at": 0.0,
        "left": 0,
        "token": 1,
        "environment": "e",
        "step": number,
        "tool": step.tool,
        "key": "",
        "attempt": 1,
    }
    asked = {**common, "payload": arguments.hex(), "step_state": "RUNNING", "model": is_thought}
    row = Row(2 * number, "intent", f"{number}", 1, b"", bytes(32), arguments, bytes(32))
    history = StepHistory(row, asked, None)
    said: Any = step.result
    if step.error is not None:
        name, _, message = step.error.partition(": ")
        said = {"type": name, "message": message}
    payload = json.dumps(said, separators=(",", ":")).encode()
    body = {
        **common,
        "payload": payload.hex(),
        "ok": "completed" if step.error is None else "failed",
        "step_state": "x",
    }
    return history, Row(2 * number + 1, "outcome", f"{number}", 1, b"", bytes(32), payload, bytes(32)), body


def events(seed: int) -> Iterator[tuple[str, Any]]:
    """What happens to a run: calls that go round, between others and thoughts, and now and then a word of the breaker or an operator."""
    draw, number = random.Random(seed), 0
    while number < 420:
        kind = draw.choice([*LOOPS, *THOUGHTS, *THOUGHTS])
        for at in range(draw.choice([1, 2, 5, 9, 30])):
            again = draw.random() < 0.05 and number > 0  # another attempt of the last step
            number += not again
            yield "ended", ended(number, kind.make(draw, at), is_thought=draw.random() < 0.1)
        if draw.random() < 0.04:
            yield "warn", draw.choice([1, 2])
        if draw.random() < 0.03:
            yield "begin_afresh", draw.random() < 0.7


def happen(to: Suspicion, event: str, what: Any) -> None:
    if event == "ended":
        to.ended(*what)
    elif event == "warn":
        to.warn(what)
    else:
        to.begin_afresh(is_overruled=what)


def says(of: Suspicion, asked: list[Row]) -> Any:
    return (
        of.verdict,
        of.warned,
        [of.goes_on(tool, row.payload.hex(), row.payload) for row in asked for tool in ("berth", "look")],
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3]), st.sampled_from([0.0, 0.004, 0.02]))
def test_whoever_asks_seldom_is_told_what_whoever_asks_always_is_told(seed: int, limit: int, often: float) -> None:
    rule = LoopDetectorPolicy(max_repetitions=limit).rule
    always, seldom, draw = Suspicion(rule), Suspicion(rule), random.Random(seed)
    last: list[Row] = []
    for event, what in events(seed):
        happen(always, event, what)
        happen(seldom, event, what)
        last = [what[1], *last[:3]] if event == "ended" else last
        said = says(always, last)
        if draw.random() < often:
            assert says(seldom, last) == said
    assert says(seldom, last) == said
    for event, what in list(events(seed + 1))[:60]:  # and what comes next
        happen(always, event, what)
        happen(seldom, event, what)
        assert says(seldom, last) == says(always, last)


def test_few_outcomes_wait_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion, "_MOST_UNSEEN", 150)
    of = Suspicion(LoopDetectorPolicy().rule)
    for seed in range(3):
        for event, what in events(seed):
            happen(of, event, what)
            assert len(of._unseen) < 150
