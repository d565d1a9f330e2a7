"""A run of steps whose outputs are so long, made or replayed: the seconds, what is kept in memory, and the most that there was.

values.py PLACE STEPS SIZE [trace]
"""

from __future__ import annotations

import sys
import time
import tracemalloc

from talk import answer, peak_kib

from agent_run_ledger import AgentRunLedger

RUN = "run"


def main(place: str, steps: int, size: int, *options: str) -> None:
    is_traced = "trace" in options
    output = "x" * (size - 2)
    with AgentRunLedger(place, max_steps=10**9, durability="process") as ledger:
        if is_traced:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if is_traced else 0
        begun = time.perf_counter()
        ledger.create_run("benchmark", RUN)
        for number in range(steps):
            ledger.execute_step(RUN, "fetch", {"n": number}, lambda: output)
        seconds = time.perf_counter() - begun
        kept = tracemalloc.get_traced_memory()[0] - before if is_traced else 0
    answer({"seconds": seconds, "kept": kept, "peak MiB": peak_kib() / 1024})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
