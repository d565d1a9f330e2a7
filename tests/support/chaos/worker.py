"""The script of one worker process of a storm: it goes on with what is due, and keeps a journal, until it is told to end or killed."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from pathlib import Path
from typing import TypedDict

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.chaos.journal import Journal
from support.chaos.outside import Outside
from support.chaos.program import register
from support.chaos.watched import WatchedStore


class Order(TypedDict):
    """What one worker is told."""

    name: str
    place: str
    """Where the ledger is: an address or a path."""
    door: str
    """Of the outside world."""
    journal: str
    lease_seconds: float
    outage_seconds: float
    concurrency: int


def ledger_in(order: Order, journal: Journal) -> AgentRunLedger:
    """The ledger as a worker opens it."""
    store = open_store(
        order["place"], durability="full", clock=SystemClock(), outage_seconds=order["outage_seconds"], busy_seconds=60.0
    )
    return AgentRunLedger(
        WatchedStore(store, journal),  # type: ignore[arg-type] # what it does not watch it passes on
        lease_seconds=order["lease_seconds"],
        heartbeat_seconds=order["lease_seconds"] / 5,
        outage_seconds=order["outage_seconds"],
        owner=order["name"],
    )


def main(order: Order) -> None:
    journal = Journal(Path(order["journal"]))
    faulthandler.register(signal.SIGUSR1)  # so that whoever waits for it in vain can see where it stands
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ledger = ledger_in(order, journal)
    register(ledger, Outside(order["door"]), journal)
    worker = ledger.worker(order["concurrency"], poll_seconds=0.5, name=order["name"])
    journal.note("begins", name=order["name"])
    worker.run()
    ledger.close()
    journal.note("ends")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
