"""What goes wrong in a storm, and when: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

DISTURBANCES = {"kill": 6, "stop": 5, "drain": 1}
"""What happens to processes, and how often of so many times."""
OUTAGES = {"terminate": 3, "crash": 3}
"""What happens to the server."""
TROUBLES = {"lose reply": 8, "lose request": 2, "cut": 2, "refuse": 1, "black hole": 1, "delay": 2}
"""What happens on the way to it."""

_LASTING = {"refuse": (0.2, 1.5), "black hole": (0.5, 5.0), "delay": (1.0, 5.0)}


class Fault(NamedTuple):
    """One thing that goes wrong."""

    at: float
    """Seconds after the storm has begun."""
    kind: str
    slot: int
    """The worker that it happens to, where it happens to one."""
    lasts: float
    """Seconds until it is over; 0 where it is over at once."""
    seed: int
    """For what else is left to chance."""


def schedule(
    seed: int, kinds: Mapping[str, int], *, seconds: float, slots: int, every: float, lease_seconds: float
) -> list[Fault]:
    """The faults of a storm of so many seconds, one `every` so many on the average. Each kind comes before any has come too often."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    at = chance.expovariate(1 / every)
    while at < seconds:
        if not deck:
            deck = [kind for kind, count in kinds.items() for _ in range(count)]
            chance.shuffle(deck)
        kind = deck.pop()
        lasts = 0.0
        if kind == "stop":  # mostly for longer than its lease
            lasts = lease_seconds * chance.uniform(0.5, 2.0)
        elif kind in _LASTING:
            lasts = chance.uniform(*_LASTING[kind])
        faults.append(Fault(at, kind, chance.randrange(slots), lasts, chance.getrandbits(32)))
        at += chance.expovariate(1 / every)
    return faults
