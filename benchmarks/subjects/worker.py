"""Another process that waits for work, or does it, and says the machine's time when it woke or began.

worker.py wait PLACE      # waits once for each line of its input
worker.py work PLACE      # is a worker until its input ends
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock


def begins(ledger: AgentRunLedger) -> Callable[[int], int]:
    """The agent of which it is measured when it begins; the machine's clock is the same in all processes."""

    @ledger.agent()
    def begin(number: int) -> int:
        print(time.monotonic(), flush=True)
        return number

    return begin


def wait(place: str) -> None:
    store = open_store(place, durability="full", clock=SystemClock())
    while store.wait_for_work(0.1):  # what happened before the first wait
        pass
    print("ready", flush=True)
    for _ in sys.stdin:
        while not store.wait_for_work(10.0):
            pass
        print(time.monotonic(), flush=True)


def work(place: str) -> None:
    ledger = AgentRunLedger(place)
    begins(ledger)
    with ledger.worker(4):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"wait": wait, "work": work}[sys.argv[1]](sys.argv[2])
