"""What a run with long values costs: memory while it is made and while it is replayed, and the time of a replay."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from harness import Bench
from tables import Table

SIZES = (100, 1_000, 50_000)


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    steps = 500 if bench.is_quick else 10_000
    table = Table(
        "long-values",
        f"{steps:,} steps with long outputs",
        "One process makes the run, another replays it. *kept* is what the interpreter's allocator holds for Python's objects at the end beyond"
        " what it held after the ledger was opened (tracemalloc, in a replay of its own, since tracing slows a program down); *peak* is the"
        " most memory of the process, interpreter and SQLite's cache included.",
        {"made, peak MiB": 1, "replayed, peak MiB": 1, "kept MiB": 2, "kept bytes a step": 0, "replay µs a step": 1},
    )
    for size in SIZES:
        bench.say(f"{table.title}: {size:,} bytes")
        place = bench.place()
        made = bench.once("values", place, steps, size)
        replays = [bench.once("values", place, steps, size) for _ in range(2 if bench.is_quick else 5)]
        traced = bench.once("values", place, steps, size, "trace")
        figures = {
            "made, peak MiB": made["peak MiB"],
            "replayed, peak MiB": statistics.median(each["peak MiB"] for each in replays),
            "kept MiB": traced["kept"] / 2**20,
            "kept bytes a step": traced["kept"] / steps,
            "replay µs a step": statistics.median(each["seconds"] for each in replays) * 1e6 / steps,
        }
        table.add(f"outputs of {size:,} bytes", figures)
    yield table
