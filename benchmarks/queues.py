"""What queues cost on PostgreSQL and on SQLite: a claim, with all that may stand before it; a wake; and 1,000 children of one run.

    make bench
    PYTHONPATH=src:tests python benchmarks/queues.py --json
    PYTHONPATH=src:tests python benchmarks/queues.py --dsn postgresql://... --only claims

The server is the one of postgres.py. Every claim is a synced commit; beside it stands the least that one can be, an UPDATE of one head
by its key. Whoever claims finds so many runs due as the row says, and what was claimed is finished before the next.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psycopg
from postgres import Databases, databases, machine
from steps import median_microseconds

from agent_run_ledger import AgentRunLedger, Effect, current_run
from agent_run_ledger.contract import Lease, QueueTerms, Store
from agent_run_ledger.fleet.handle import Handle
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.pgbouncer import PgBouncer

BATCH = 50
BACKLOG = 100_000
CHILDREN = 1_000
LEASE_SECONDS = 600.0
AGENT = "agent"


class Shelf(Protocol):
    """A store with runs in it that stand there without a log, put there by SQL: a claim looks at heads only."""

    store: Store

    def execute(self, statement: str) -> None:
        """For all of them at once."""

    def add(self, count: int, *, queue: str = "q", due: str = "1", key: str = "NULL") -> None:
        """So many more runs. `due` and `key` may speak of their number, `n`."""


class Postgres:
    """`Shelf` in a database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url, durability="full", clock=SystemClock())
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute("SET synchronous_commit = off")
        self._count = 0

    def execute(self, statement: str) -> None:
        self.connection.execute(statement.encode())

    def add(self, count: int, *, queue: str = "q", due: str = "1", key: str = "NULL") -> None:
        for statement in _rows(self._count, count, queue, due, key):
            self.execute(
                statement.format(numbers=f"generate_series({self._count + 1}, {self._count + count}) AS g (n)")
            )
        self._count += count


class Sqlite:
    """`Shelf` in a file."""

    def __init__(self, path: Path) -> None:
        self.store = open_store(path, durability="full", clock=SystemClock())
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA synchronous = OFF")
        self._count = 0

    def execute(self, statement: str) -> None:
        self.connection.execute(statement)

    def add(self, count: int, *, queue: str = "q", due: str = "1", key: str = "NULL") -> None:
        numbers = f"WITH RECURSIVE g (n) AS (SELECT {self._count + 1} UNION ALL SELECT n + 1 FROM g LIMIT {count})"
        for statement in _rows(self._count, count, queue, due, key):
            table, _, rest = statement.partition(" SELECT ")
            self.execute(f"{numbers} {table} SELECT {rest.format(numbers='g')}")
        self._count += count


def _rows(before: int, count: int, queue: str, due: str, key: str) -> list[str]:
    return [
        "INSERT INTO secrets (run_id, secret) SELECT 'run-' || n, NULL FROM {numbers}",
        "INSERT INTO runs (run_id, fencing_token, created_at, agent, queue, key, due)"
        f" SELECT 'run-' || n, 0, 1.0, '{AGENT}', '{queue}', {key}, ({due}) * 1.0 FROM {{numbers}}",
    ]


# --- claims -----------------------------------------------------------------------------------------------------------


def claim(shelf: Shelf, at_most: int, times: int, queue: QueueTerms | None = None) -> float:
    """The median microseconds in which one run is claimed, where `at_most` are claimed at once; all that are due stay as many."""
    taken = []
    for _ in range(times):
        shelf.add(at_most)
        begun = time.perf_counter()
        leases = shelf.store.claim_due("bench", LEASE_SECONDS, [queue or QueueTerms("q")], [AGENT], at_most)
        taken.append((time.perf_counter() - begun) / len(leases))
        assert len(leases) == at_most
        finish(shelf, leases)
    return statistics.median(taken) * 1e6


def both(shelf: Shelf) -> dict[str, float]:
    claim(shelf, 1, 10), claim(shelf, BATCH, 3)  # for warming up
    return {"alone": claim(shelf, 1, 200), f"in batches of {BATCH}": claim(shelf, BATCH, 40)}


def claims(make: Callable[[], Shelf]) -> dict[str, dict[str, float]]:
    """A claim, by what stands in the store beside."""
    costs: dict[str, dict[str, float]] = {}
    shelf = make()
    costs["nothing else due"] = both(shelf)
    shelf.add(1_000)
    costs["1,000 due"] = both(shelf)
    shelf.add(BACKLOG - 1_000)
    costs[f"{BACKLOG:,} due"] = both(shelf)
    shelf.store.close()

    shelf = make()
    shelf.add(BACKLOG, due="NULL")
    costs[f"{BACKLOG:,} finished"] = both(shelf)
    shelf.store.close()

    shelf = make()
    if isinstance(shelf, Postgres):
        shelf.execute("ALTER TABLE runs SET (autovacuum_enabled = off)")
    drain(shelf)
    costs[f"{BACKLOG:,} claimed and finished, no vacuum since"] = both(shelf)
    shelf.store.close()

    if isinstance(shelf, Postgres):
        shelf = make()
        shelf.execute("ALTER TABLE runs SET (autovacuum_enabled = off)")
        with psycopg.connect(shelf.url) as reader:  # in a transaction until the end of the block
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT count(*) FROM runs")
            drain(shelf)
            costs["the same, beside a transaction older than all that"] = both(shelf)
        shelf.store.close()

    shelf = make()
    shelf.add(1, queue="hot", key="'hot'")
    hot = QueueTerms("hot", per_key=1)
    assert shelf.store.claim_due("other", LEASE_SECONDS, [hot], [AGENT], 1)
    costs["a queue with per_key=1"] = {"alone": per_key(shelf, hot)}
    shelf.add(BACKLOG, queue="hot", key="'hot'")
    shelf.execute("ANALYZE runs")
    costs[f"the same, before {BACKLOG:,} due of a key that is busy"] = {"alone": per_key(shelf, hot)}
    shelf.store.close()
    return costs


def drain(shelf: Shelf) -> None:
    """Claim and finish the whole backlog, as workers do."""
    shelf.add(BACKLOG)
    while leases := shelf.store.claim_due("bench", LEASE_SECONDS, [QueueTerms("q")], [AGENT], 1_000):
        finish(shelf, leases)


def finish(shelf: Shelf, leases: list[Lease]) -> None:
    """Let these be over."""
    ids = ", ".join(f"'{lease.run_id}'" for lease in leases)
    shelf.execute(f"UPDATE runs SET owner = NULL, due = NULL WHERE run_id IN ({ids})")


def per_key(shelf: Shelf, queue: QueueTerms) -> float:
    """The median microseconds of a claim of the one run of a limited queue whose key is free."""
    taken = []
    for _ in range(15):
        shelf.add(1, queue=queue.name, key="'cold ' || n", due="2")
        begun = time.perf_counter()
        leases = shelf.store.claim_due("bench", LEASE_SECONDS, [queue], [AGENT], BATCH)
        taken.append(time.perf_counter() - begun)
        assert len(leases) == 1
        finish(shelf, leases)
    return statistics.median(taken) * 1e6


def update(url: str) -> float:
    """The floor of a claim: one head is found by its key and updated, in one synced commit."""
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
    connection.execute("CREATE TABLE heads (run TEXT PRIMARY KEY, owner TEXT, token BIGINT)")
    connection.execute("INSERT INTO heads SELECT 'run-' || n, NULL, 0 FROM generate_series(1, 1000) AS g (n)")
    cursor = connection.cursor()
    statement = "UPDATE heads SET owner = %s, token = token + 1 WHERE run = %s RETURNING token"
    return median_microseconds(lambda: cursor.execute(statement, ("bench", "run-500")), 300)


# --- wakes ------------------------------------------------------------------------------------------------------------


def begins(ledger: AgentRunLedger) -> Callable[[int], int]:
    """The agent of which it is measured when it begins; the machine's clock is the same in all processes."""

    @ledger.agent()
    def begin(number: int) -> int:
        print(time.monotonic(), flush=True)
        return number

    return begin


def wait(place: str) -> None:
    """Wait for work again and again, and say when it woke."""
    store = open_store(place, durability="full", clock=SystemClock())
    while store.wait_for_work(0.1):  # what happened before the first wait
        pass
    print("ready", flush=True)
    for _ in sys.stdin:
        while not store.wait_for_work(10.0):
            pass
        print(time.monotonic(), flush=True)


def work(place: str) -> None:
    """Be a worker, until the input ends."""
    ledger = AgentRunLedger(place)
    begins(ledger)
    with ledger.worker(4):
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def elsewhere(role: str, place: str) -> Iterator[tuple[Callable[[], None], Callable[[], str]]]:
    """Play a role in another process: what asks it to go on, and what reads what it says."""
    command = [sys.executable, __file__, "--role", role, "--dsn", place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout
        assert told.readline() == "ready\n"
        yield lambda: print(file=asked, flush=True), told.readline
        asked.close()


def latencies(place: str, *, count: int) -> dict[str, float]:
    """Milliseconds from the call of `submit`, which returns when the run is on stable storage, to its first line in another process."""
    with AgentRunLedger(place) as ledger, elsewhere("work", place) as (_, told):
        begin = begins(ledger)
        taken: list[float] = []
        for number in range(count + 5):
            called = time.monotonic()
            handle: Handle = ledger.submit(begin, number)
            taken.append((float(told()) - called) * 1e3)
            handle.result(60.0)
    return percentiles(taken[5:])


def wakes(place: str) -> dict[str, float]:
    """Milliseconds from the call of `submit` to the return of `wait_for_work` in another process."""
    with AgentRunLedger(place) as ledger, elsewhere("wait", place) as (go_on, told):
        begin = begins(ledger)
        taken: list[float] = []
        for number in range(205):
            go_on()
            time.sleep(0.06)  # so that it waits
            called = time.monotonic()
            ledger.submit(begin, number)
            taken.append((float(told()) - called) * 1e3)
    return percentiles(taken[5:])


def percentiles(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {"p50 ms": statistics.median(ordered), "p99 ms": ordered[math.ceil(len(ordered) * 0.99) - 1]}


def waking(made: Databases, folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, place in (("PostgreSQL", made.ledger()), ("SQLite", str(folder / "wakes.db"))):
        found[f"{name}, submit to woken"] = wakes(place)
    for name, place in (("PostgreSQL", made.ledger()), ("SQLite", str(folder / "begins.db"))):
        found[f"{name}, submit to begun"] = latencies(place, count=200)
    if made.server is not None and shutil.which("pgbouncer"):
        with PgBouncer(made.server) as pooler:
            url = made.ledger()
            found["through PgBouncer, submit to begun"] = latencies(
                pooler.dsn(url.rpartition("/")[2].partition("?")[0]), count=20
            )
    return found


# --- children ---------------------------------------------------------------------------------------------------------


def fan_out(place: str) -> float:
    """Seconds of one run that starts 1,000 others, of one step each, and waits for them; one worker, 8 at once, one process."""
    with AgentRunLedger(place, max_steps=2 * CHILDREN) as ledger:  # a child is a step of its parent

        @ledger.tool(effect=Effect.READ)
        def square(n: int) -> int:
            return n * n

        @ledger.agent()
        def child(n: int) -> int:
            return square(n)

        @ledger.agent()
        def parent(count: int) -> int:
            return sum(current_run().map(child, list(range(count))))

        with ledger.worker(8):
            begun = time.perf_counter()
            assert ledger.submit(parent, CHILDREN).result(600.0) == sum(n * n for n in range(CHILDREN))
            return time.perf_counter() - begun


# --- what is told -----------------------------------------------------------------------------------------------------

PARTS = ("claims", "wakes", "children")


def measured(made: Databases, folder: Path, parts: tuple[str, ...]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if "claims" in parts:
        numbers = iter(range(100))
        figures["claims, PostgreSQL (µs each)"] = {
            "an UPDATE by its key": {"alone": update(made.empty())},
            **claims(lambda: Postgres(made.ledger())),
        }
        figures["claims, SQLite (µs each)"] = claims(lambda: Sqlite(folder / f"claims-{next(numbers)}.db"))
    if "wakes" in parts:
        figures["wakes"] = waking(made, folder)
    if "children" in parts:
        name = f"{CHILDREN:,} children"
        figures["children"] = {
            f"{name}, PostgreSQL": {"seconds": fan_out(made.ledger())},
            f"{name}, SQLite": {"seconds": fan_out(str(folder / "children.db"))},
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", help="another server; default: an embedded one under the temp directory")
    parser.add_argument("--only", choices=PARTS, help="a part alone")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--role", choices=("wait", "work"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        {"wait": wait, "work": work}[given.role](given.dsn)
        return
    with databases(given.dsn) as made, tempfile.TemporaryDirectory() as folder:
        about = machine(made) | {"sqlite": sqlite3.sqlite_version}
        figures = measured(made, Path(folder), (given.only,) if given.only else PARTS)
    if given.json:
        print(json.dumps({"machine": about, **figures}))
        return
    print("   ".join(f"{key} {value}" for key, value in about.items()))
    for part, rows in figures.items():
        print(f"\n{part}")
        for name, row in rows.items():
            print(f"{name:<60}" + "   ".join(f"{value:>10.2f} {unit}" for unit, value in row.items()))


if __name__ == "__main__":
    main()
