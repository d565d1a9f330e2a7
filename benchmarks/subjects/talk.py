"""How a subject is asked and how it answers: a line of JSON each way. Needs the standard library alone, for every environment has that.

A subject is a process of its own, so that nobody pays for the garbage, the threads or the caches of another. Its first line says what it
is; then it answers each line of its input, which is a verb and what the verb takes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

INVOICE = "INV-109"
OUTPUT: dict[str, object] = {"ok": True, "total": 12}
"""What the function of every step answers. It costs nothing, so that what is measured is what keeps it."""

SYNCED = "synchronous_commit=on: survives the machine"
"""What a commit promises on PostgreSQL as it comes."""


def introduce(name: str, promise: str) -> None:
    """Say what this is, with its version, and what has become durable when one of its steps is over."""
    answer({"name": name, "promise": promise})


def requests() -> Iterator[tuple[str, list[Any]]]:
    """What is asked, until the input ends: verbs with their arguments."""
    for line in sys.stdin:
        verb, *given = json.loads(line)
        yield verb, given


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """Answer what is asked by these functions."""
    for verb, given in requests():
        answer(verbs[verb](*given))


def timed(step: Callable[[], object], count: int) -> list[float]:
    """The microseconds of each of so many calls."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        taken.append((time.perf_counter() - begun) * 1e6)
    return taken


def conversation(count: int, asked: int, answered: int, kind: str) -> Iterator[tuple[str, str]]:
    """What both sides say in so many turns, so many characters each, all of it new: `noise` or `prose`.

    Noise is letters of an alphabet of 64, which nothing can store in less than three quarters of its length. Prose is words of a vocabulary of
    2,000, drawn with the frequencies of a natural language (Zipf's law), which general compression brings to a third.
    """
    draw = random.Random(f"{count} {asked} {answered}")
    vocabulary = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 10))) for _ in range(2_000)]
    frequencies = list(itertools.accumulate(1 / rank for rank in range(1, 2_001)))

    def text(length: int) -> str:
        if kind == "noise":
            return "".join(draw.choices(string.ascii_letters + string.digits + "-_", k=length))
        return " ".join(draw.choices(vocabulary, cum_weights=frequencies, k=length // 2))[:length]

    for _ in range(count):
        yield text(asked), text(answered)


def level_of(db: sqlite3.Connection) -> str:
    """How this connection commits, and what a commit survives."""
    ((journal,), (level,)) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous"))
    name = "WAL" if journal == "wal" else "rollback journal"
    survives = "the machine" if level >= 2 else "the process"
    return f"{name}, synchronous={('OFF', 'NORMAL', 'FULL', 'EXTRA')[level]}: survives {survives}"


def peak_kib() -> int:
    """The most memory that this process has had at once, in KiB.

    It is the kernel's high-water mark of what the process runs now: `ru_maxrss` would count what its parent had at the moment of the
    fork, too.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def leave() -> None:
    """End this process without tidying up: nothing of that is measured."""
    sys.stdout.flush()
    os._exit(0)
