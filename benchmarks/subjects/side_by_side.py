"""Our runs side by side in one event loop: beside tools that block and compute, and 10,000 of them one after the other.

side_by_side.py blocking PLACE
side_by_side.py many PLACE COUNT
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

from talk import OUTPUT, answer

from agent_run_ledger import AgentRunLedger, Effect

BLOCKING_SECONDS, LEASE_SECONDS = 10.0, 3.0


async def total(n: int) -> dict[str, object]:
    """A tool that costs nothing."""
    return OUTPUT


def blocking(place: str) -> dict[str, float]:
    """Latencies of 20 runs beside one tool that waits and one that computes, and how many steps were made under another lease."""
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
            latencies.append((time.perf_counter() - begun) * 1e3)
            await asyncio.sleep(0.02)

    async def all_of_them(ledger: AgentRunLedger) -> None:
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
    with AgentRunLedger(place, durability="process", **options) as ledger:
        asyncio.run(all_of_them(ledger))
        taken = sum(step.fencing_token != 1 for run in ledger.runs() for step in ledger.steps(run.run_id))
    ordered = sorted(latencies)
    return {
        "steps": len(ordered),
        "p50 ms": statistics.median(ordered),
        "p99 ms": ordered[int(len(ordered) * 0.99)],
        "longest ms": ordered[-1],
        "taken over": taken,
    }


def resident_mib() -> float:
    """The process's memory now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def many(place: str, count: str) -> dict[str, float]:
    """Memory and threads after a tenth of so many runs and after all, each an agent of three steps."""
    seen: dict[str, float] = {}
    runs = int(count)
    with AgentRunLedger(place, durability="process") as ledger:

        @ledger.tool(effect=Effect.READ)
        async def look(n: int) -> int:
            return n

        @ledger.agent()
        async def short(n: int) -> int:
            return sum([await look(n), await look(n + 1), await look(n + 2)])

        async def one_after_another() -> None:
            tasks: set[asyncio.Task[Any]] = set()
            for n in range(runs):
                program: Coroutine[Any, Any, int] = ledger.arun(short, n)
                tasks.add(asyncio.create_task(program))
                if len(tasks) >= 16:
                    _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if n + 1 in (runs // 10, runs):
                    await asyncio.gather(*tasks)
                    tasks = set()
                    gc.collect()
                    seen[f"MiB after {n + 1:,}"] = resident_mib()
                    seen[f"threads after {n + 1:,}"] = len(os.listdir("/proc/self/task"))

        asyncio.run(one_after_another())
    return seen


if __name__ == "__main__":
    answer({"blocking": blocking, "many": many}[sys.argv[1]](*sys.argv[2:]))
