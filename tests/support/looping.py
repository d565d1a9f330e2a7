"""Loops of every kind that the breaker knows, as the steps that an agent would make in one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

WORDS = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "kettle", "lagoon", "meadow", "nectar",
    "orchard", "pebble", "quarry", "ridge", "saddle", "timber", "umber", "valley", "willow", "yarrow", "zephyr", "anchor", "bridge",
]  # fmt: skip


class Step(NamedTuple):
    tool: str
    arguments: Any
    result: Any = None
    error: str | None = None
    may_repeat: bool = False
    write: bool | None = None


def act(step: Step) -> Any:
    """What the tool of a step does: it answers, or raises."""
    if step.error is None:
        return step.result
    name, _, message = step.error.partition(": ")
    raise type(name, (Exception,), {})(message)


class Kind(NamedTuple):
    name: str
    make: Callable[[random.Random, int], Step]
    """The step at a place of the loop, from 0."""
    by: int
    """The step after which it has tripped at the latest."""


def text(draw: random.Random, count: int = 12) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def hexes(draw: random.Random) -> str:
    return f"{draw.getrandbits(64):016x}"


def clock(at: int) -> str:
    return f"2031-05-04T10:{at // 60:02}:{at % 60:02}Z"


ROUTE = (
    "find the ferry",
    "where does the ferry go",
    "the ferry: timetable",
    "ferry the find",
    "tell me of the ferry now",
    "the ferry (all)",
)
STUBBORN = "PermissionError: the harbour register is locked"

LOOPS = [
    Kind("one call", lambda draw, at: Step("berth", {"pier": 4}, {"free": 0, "names": ["a", "b"]}), 3),
    Kind("one failing call", lambda draw, at: Step("berth", {"pier": 4}, None, STUBBORN), 3),
    Kind(
        "one call that times out",
        lambda draw, at: Step("berth", {"pier": 4}, None, "TimeoutError: no answer in 30 s"),
        3,
    ),
    Kind(
        "a request id",
        lambda draw, at: Step("berth", {"pier": 4, "request_id": hexes(draw)}, "no berth is free today"),
        3,
    ),
    Kind(
        "a camel-cased time",
        lambda draw, at: Step("berth", {"pier": 4, "sentAt": clock(at)}, "no berth is free today"),
        3,
    ),
    Kind(
        "ids and times on both sides",
        lambda draw, at: Step(
            "berth",
            {"pier": 4, "nonce": hexes(draw)},
            json.dumps(
                {"trace_id": hexes(draw), "served_at": clock(at), "elapsed_ms": draw.randint(100, 999), "berths": []}
            ),
        ),
        3,
    ),
    Kind(
        "lines with a timestamp",
        lambda draw, at: Step("log", {}, f"level: low\ntimestamp: 2031-05-04 10:00:{at:02}\npumps: 3\n"),
        3,
    ),
    Kind(
        "case and spaces",
        lambda draw, at: Step("find", {"q": ("The Ferry", "the  ferry", "THE ferry")[at % 3]}, "not in the book"),
        3,
    ),
    Kind(
        "a write that is made again",
        lambda draw, at: Step(
            "book",
            {"to": "Wells", "seats": 2},
            {"booking_id": 100 + at, "created_at": clock(at), "to": "Wells", "seats": 2},
        ),
        3,
    ),
    Kind(
        "a write that answers in a sentence",
        lambda draw, at: Step("book", {"to": "Wells"}, f"Seat #{400 + at} to Wells is yours."),
        3,
    ),
    Kind(
        "a declared write that answers with something new",
        lambda draw, at: Step("book", {"to": "Wells"}, {"seat": hexes(draw), "to": "Wells"}, write=True),
        3,
    ),
    Kind(
        "a long input that is changed a little",
        lambda draw, at: Step(
            "score", {"text": " ".join(WORDS * 8), "aspect": draw.choice(WORDS)}, "too long to be scored"
        ),
        5,
    ),
    Kind(
        "a declared write that answers with an id",
        lambda draw, at: Step("book", {"to": "Wells", "seats": 2}, {"id": 100 + at}, write=True),
        3,
    ),
    Kind(
        "two in turn",
        lambda draw, at: Step(*(("look", {}, "a grey door"), ("push", {"what": "door"}, "it is shut"))[at % 2]),
        6,
    ),
    *[
        Kind(
            f"{period} in turn",
            lambda draw, at, period=period: Step(
                f"room {at % period}", {"n": at % period}, f"a room with {at % period} doors"
            ),  # type: ignore[misc]
            3 * period,
        )
        for period in range(3, 7)
    ],
    Kind(
        "three in turn, with times",
        lambda draw, at: Step(
            f"room {at % 3}", {}, json.dumps({"ts": clock(at), "data": f"a room with {at % 3} doors"})
        ),
        9,
    ),
    Kind(
        "two that acknowledge",
        lambda draw, at: Step(*(("lock", {"door": 1}, "OK"), ("unlock", {"door": 1}, "OK"))[at % 2]),
        6,
    ),
    Kind(
        "one error, other arguments",
        lambda draw, at: Step("register", {draw.choice(WORDS): text(draw, 3)}, None, STUBBORN),
        5,
    ),
    Kind(
        "one error, with ids in it",
        lambda draw, at: Step(
            "register",
            {draw.choice(WORDS): text(draw, 3)},
            None,
            f"{STUBBORN} (request {hexes(draw)[:9]}7, line {draw.randint(10, 99)})",
        ),
        5,
    ),
    Kind(
        "one error of several tools",
        lambda draw, at: Step(draw.choice(WORDS[:3]), {"what": text(draw, 3)}, None, STUBBORN),
        5,
    ),
    Kind(
        "an error that echoes",
        lambda draw, at: Step(
            "ledger",
            {"sql": f"select name from boats where harbour = 'Wells' and tide > 3 order by c{at}"},
            None,
            f"Error: no column c{at}",
        ),
        5,
    ),
    Kind(
        "an error that is returned",
        lambda draw, at: Step("register", {"x": text(draw, 3)}, {"error": "the register is locked"}),
        5,
    ),
    Kind("other words, no answer", lambda draw, at: Step("find", {"query": ROUTE[at % len(ROUTE)]}, "[]"), 6),
    Kind(
        "a growing text",
        lambda draw, at: Step(
            "draft", {"prompt": " Also say more on tides.".join(["Write of Wells."] * (at + 1))}, "Rejected."
        ),
        5,
    ),
    Kind(
        "thoughts between",
        lambda draw, at: (
            Step("think", {"thought": text(draw)}, "")
            if at % 2
            else Step("berth", {"pier": 4}, "no berth is free today")
        ),
        5,
    ),
    Kind(
        "wandering in one house",
        lambda draw, at: Step(
            "enter", {"room": (room := draw.randint(0, 4))}, f"room {room}: a table and {room} chairs"
        ),
        16,
    ),
    Kind(
        "lines in any order",
        lambda draw, at: Step(
            "scan", {"net": 7}, "\n".join(draw.sample(["eel: down", "bass: down", "cod: no route to it"], k=3))
        ),
        9,
    ),
]
