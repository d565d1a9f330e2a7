"""The script of one worker process of a storm: it goes on with what is due, and keeps a journal, until it is told to end or killed."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.errors import StoreUnavailable
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.chaos.journal import Journal
from support.chaos.outside import Outside
from support.chaos.program import register
from support.chaos.watched import WatchedStore
from support.faketime import sleep_otherwise


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
    clock: str
    """By how much its wall clock is wrong, as `support.faketime.clocked` takes it."""


def ledger_in(order: Order, journal: Journal) -> AgentRunLedger:
    """The ledger as a worker opens it."""
    store = open_store(
        order["place"],
        durability="full",
        clock=SystemClock(),
        outage_seconds=order["outage_seconds"],
        busy_seconds=60.0,
    )
    return AgentRunLedger(
        WatchedStore(store, journal),  # type: ignore[arg-type] # what it does not watch it passes on
        lease_seconds=order["lease_seconds"],
        heartbeat_seconds=order["lease_seconds"] / 5,
        outage_seconds=order["outage_seconds"],
        owner=order["name"],
    )


def patiently(open_ledger: Callable[[], AgentRunLedger]) -> AgentRunLedger:
    """What a supervisor would do where the store is away when a worker starts: start it again."""
    while True:
        with suppress(StoreUnavailable):
            return open_ledger()


def main(order: Order) -> None:
    if order["clock"] != "+0":
        sleep_otherwise()
    journal = Journal(Path(order["journal"]))
    faulthandler.register(signal.SIGUSR1)  # so that whoever waits for it in vain can see where it stands
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ledger = patiently(lambda: ledger_in(order, journal))
    register(ledger, Outside(order["door"]), journal)
    worker = ledger.worker(order["concurrency"], poll_seconds=0.5, name=order["name"])
    journal.note("begins", name=order["name"])
    worker.run()
    ledger.close()
    journal.note("ends")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
