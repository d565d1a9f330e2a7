"""What durable steps cost in an event loop: alone, many runs side by side, beside tools that block, and over 10,000 runs.

    make bench
    python benchmarks/asynchronous.py --dir /dev/shm --json

Throughput is steps a second of one process; each figure stands beside the raw SQLite floor F (see steps.py) of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

from steps import floor, median_microseconds

from agent_run_ledger import AgentRunLedger, Effect

Durability = Literal["full", "process"]
ROUNDS = 5
BLOCKING_SECONDS, LEASE_SECONDS = 10.0, 3.0


async def total(n: int) -> dict[str, int]:
    """A tool that costs nothing, so that what is measured is the ledger."""
    return {"n": n}


async def agent(ledger: AgentRunLedger, run_id: str, steps: int) -> None:
    for n in range(steps):
        await ledger.aexecute_step(run_id, "total", {"n": n}, total)


def throughput(folder: Path, durability: Durability, runs: int, steps: int) -> float:
    """Durable steps a second of `runs` runs side by side, each making its steps one after the other."""

    async def all_of_them() -> float:
        run_ids = [ledger.create_run("benchmark") for _ in range(runs)]
        begun = time.perf_counter()
        await asyncio.gather(*(agent(ledger, run_id, steps) for run_id in run_ids))
        return runs * steps / (time.perf_counter() - begun)

    path = folder / f"{durability}-{runs}-{time.monotonic_ns()}.db"
    with AgentRunLedger(path, durability=durability, max_steps=10**9) as ledger:
        return asyncio.run(all_of_them())


def beside_tools_that_block(folder: Path) -> dict[str, float]:
    """20 async runs on a lease of 3 s, one more whose plain tool blocks for 10 s in a thread of its own, and one that computes.

    Latencies of the 20 runs' steps, in milliseconds; that no run was taken over is looked up in the log: all have one token.
    """
    path = folder / "blocking.db"
    latencies: list[float] = []

    def block(seconds: float) -> str:
        threading.Event().wait(seconds)
        return "done"

    def compute(seconds: float) -> int:
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            rounds += 1
        return rounds

    async def works(ledger: AgentRunLedger, run_id: str, until: float) -> None:
        while time.monotonic() < until:
            begun = time.perf_counter()
            await ledger.aexecute_step(run_id, "total", {"n": len(latencies)}, total)
            latencies.append(time.perf_counter() - begun)
            await asyncio.sleep(0.02)

    async def main() -> None:
        run_ids = [ledger.create_run("benchmark") for _ in range(22)]
        until = time.monotonic() + BLOCKING_SECONDS
        given = {"seconds": BLOCKING_SECONDS}
        limit = 2 * BLOCKING_SECONDS
        await asyncio.gather(
            ledger.aexecute_step(run_ids[0], "block", given, block, timeout=limit),
            ledger.aexecute_step(run_ids[1], "compute", given, compute, timeout=limit),
            *(works(ledger, run_id, until) for run_id in run_ids[2:]),
        )

    options: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.5, "max_steps": 10**9}
    with AgentRunLedger(path, durability="process", **options) as ledger:
        asyncio.run(main())
        taken = sum(step.fencing_token != 1 for run in ledger.runs() for step in ledger.steps(run.run_id))
    ordered = sorted(latencies)
    return {
        "steps": len(ordered),
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(len(ordered) * 0.99)],
        "max_ms": 1e3 * ordered[-1],
        "taken_over": taken,
    }


def resident_kib() -> int:
    """The process's memory in KiB."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def many_runs(folder: Path, count: int) -> dict[str, int]:
    """Memory and threads of one process after a tenth of `count` runs and after all, each run an agent of three steps."""
    path = folder / "many.db"
    seen: dict[str, int] = {}
    with AgentRunLedger(path, durability="process") as ledger:

        @ledger.tool(effect=Effect.READ)
        async def look(n: int) -> int:
            return n

        @ledger.agent()
        async def short(n: int) -> int:
            return sum([await look(n), await look(n + 1), await look(n + 2)])

        async def one_after_another() -> None:
            tasks: set[asyncio.Task[Any]] = set()
            for n in range(count):
                program: Coroutine[Any, Any, int] = ledger.arun(short, n)
                tasks.add(asyncio.create_task(program))
                if len(tasks) >= 16:
                    _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if n + 1 in (count // 10, count):
                    await asyncio.gather(*tasks)
                    tasks = set()
                    gc.collect()
                    seen[f"KiB after {n + 1}"] = resident_kib()
                    seen[f"threads after {n + 1}"] = len(os.listdir("/proc/self/task"))

        asyncio.run(one_after_another())
    return seen


def measured(folder: Path, *, quick: bool) -> dict[str, Any]:
    steps = 20 if quick else 60
    figures: dict[str, Any] = {}
    for durability, synchronous in (("process", "NORMAL"), ("full", "FULL")):
        base = median_microseconds(floor(folder / f"floor-{durability}.db", synchronous), 300)
        figures[f"floor F, {durability} (µs)"] = base
        sizes = ((1, 10 * steps), (256, steps)) if durability == "process" else ((1, 3 * steps), (64, steps))
        for runs, each in sizes:
            rates = [throughput(folder, durability, runs, each) for _ in range(2 if quick else ROUNDS)]  # type: ignore[arg-type]
            rate = statistics.median(rates)
            figures[f"{durability}, {runs} runs (steps/s)"] = rate
            figures[f"{durability}, {runs} runs (µs a step / F)"] = 1e6 / rate / base
    figures["full, 64 runs / one"] = figures["full, 64 runs (steps/s)"] / figures["full, 1 runs (steps/s)"]
    if not quick:
        figures["beside tools that block"] = beside_tools_that_block(folder)
        figures["10,000 runs in one process"] = many_runs(folder, 10_000)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where the databases are made; default: the temp directory")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, without the two long parts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        figures = measured(Path(folder), quick=options.quick)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        shown = f"{figure:,.1f}" if isinstance(figure, float) else figure
        print(f"{name:44} {shown}")


if __name__ == "__main__":
    main()
