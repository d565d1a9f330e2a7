"""The same steps on DBOS: a workflow that calls a `@DBOS.step`, whose output is committed when the function has returned."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import time
from importlib.metadata import version
from typing import Any

from dbos import DBOS, DBOSConfig
from talk import INVOICE, OUTPUT, SYNCED, conversation, introduce, level_of, serve, timed


class InWal(sqlite3.Connection):
    """A connection at the sync level that our `process` has; DBOS itself leaves SQLite's settings as they are."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.execute("PRAGMA journal_mode=WAL")
        self.execute("PRAGMA synchronous=NORMAL")


@DBOS.step()
def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
    return OUTPUT


@DBOS.step()
def model(messages: list[dict[str, str]], reply: str) -> dict[str, str]:
    return {"role": "assistant", "content": reply}


@DBOS.workflow()
def agent() -> None:
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        fetch_invoice(INVOICE, number)

    def turns(count: int, asked: int, answered: int, kind: str) -> None:
        messages: list[dict[str, str]] = []
        for question, reply in conversation(count, asked, answered, kind):
            messages += [{"role": "user", "content": question}] if question else []
            messages.append(model(messages, reply))

    serve({"steps": lambda count: timed(step, count), "turns": turns})


@DBOS.step()
async def afetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
    return OUTPUT


@DBOS.workflow()
async def aagent(count: int) -> None:
    for n in range(count):
        await afetch_invoice(INVOICE, n)


async def side_by_side(runs: int, count: int) -> float:
    """Steps a second of so many workflows in one event loop, of so many steps each."""
    begun = time.perf_counter()
    await asyncio.gather(*(aagent(count) for _ in range(runs)))
    return runs * count / (time.perf_counter() - begun)


def main(place: str, synchronous: str | None = None, *options: str) -> None:
    is_server = place.startswith("postgresql:")
    url = place.replace("postgresql:", "postgresql+psycopg:", 1) if is_server else f"sqlite:///{place}"
    config: DBOSConfig = {"name": "benchmark", "system_database_url": url, "log_level": "CRITICAL"}
    connection = InWal if synchronous == "NORMAL" else sqlite3.Connection
    if synchronous == "NORMAL":
        config["db_engine_kwargs"] = {"connect_args": {"factory": connection}}
    logging.disable(logging.CRITICAL)
    DBOS(config=config)
    DBOS.launch()
    introduce(f"dbos {version('dbos')}", SYNCED if is_server else level_of(sqlite3.connect(place, factory=connection)))
    if "async" in options:
        serve({"throughput": lambda runs, count: asyncio.run(side_by_side(runs, count))})
    else:
        agent()


if __name__ == "__main__":
    main(*sys.argv[1:])
