"""What a run with long values costs: memory while it is made and while it is replayed, and the time of a replay.

    python benchmarks/replay.py                       # 10,000 steps with outputs of 100 bytes, 1 KB and 50 KB
    python benchmarks/replay.py --steps 2000 --json

Each figure is taken in a fresh process: one makes the run, a second one replays it. `kept` is what the interpreter's allocator holds for
Python's objects at the end beyond what it held after opening the ledger (tracemalloc, in a replay of its own, since tracing slows a
program down); `peak` is the largest resident size of the replaying process, the page cache of SQLite and the interpreter included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from agent_run_ledger import AgentRunLedger

RUN, SIZES = "run", (100, 1_000, 50_000)
REPLAYS = 5


def drive(path: Path, steps: int, size: int, *, is_traced: bool) -> dict[str, float]:
    """Make the run at `path`, or replay it, and say what that cost."""
    output = "x" * (size - 2)
    with AgentRunLedger(path, max_steps=10**9, durability="process") as ledger:
        if is_traced:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if is_traced else 0
        begun = time.perf_counter()
        ledger.create_run("benchmark", RUN)
        for number in range(steps):
            ledger.execute_step(RUN, "fetch", {"n": number}, lambda: output)
        seconds = time.perf_counter() - begun
        kept = tracemalloc.get_traced_memory()[0] - before if is_traced else 0
    return {"seconds": seconds, "kept": kept, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def in_a_process(path: Path, steps: int, size: int, *options: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--drive", str(path), "--steps", str(steps), "--size", str(size), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def measure(folder: Path, steps: int, size: int) -> dict[str, float]:
    path = folder / f"{size}.db"
    made = in_a_process(path, steps, size)
    replays = [in_a_process(path, steps, size) for _ in range(REPLAYS)]
    traced = in_a_process(path, steps, size, "--trace")
    return {
        "made, peak MB": made["peak"] / 1e6,
        "replayed, peak MB": statistics.median(each["peak"] for each in replays) / 1e6,
        "replayed, kept MB": traced["kept"] / 1e6,
        "replayed, kept bytes a step": traced["kept"] / steps,
        "replayed, microseconds a step": statistics.median(each["seconds"] for each in replays) * 1e6 / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where the databases are made (default: the temp directory)")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive is not None:
        print(json.dumps(drive(given.drive, given.steps, given.size, is_traced=given.trace)))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        measured = {size: measure(Path(name), given.steps, size) for size in SIZES}
    machine = {
        "python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "system": platform.platform(),
        "cores": os.cpu_count(), "steps": given.steps,
    }  # fmt: skip
    if given.json:
        print(json.dumps({"machine": machine, "measured": measured}))
        return
    print("   ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{'outputs of':<32}" + "".join(f"{size:>12,} B" for size in SIZES))
    for what in measured[SIZES[0]]:
        print(f"{what:<32}" + "".join(f"{measured[size][what]:>14.1f}" for size in SIZES))


if __name__ == "__main__":
    main()
