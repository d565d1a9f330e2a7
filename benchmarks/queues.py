"""What queues cost on PostgreSQL and on SQLite: a claim, with all that may stand before it; a wake; and 1,000 children of one run."""

from __future__ import annotations

import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
from harness import SUBJECTS, Bench, environment
from servers import Databases, databases
from subjects.talk import timed
from subjects.worker import begins
from tables import Row, Table

from agent_run_ledger import AgentRunLedger, Effect, current_run
from agent_run_ledger.contract import Lease, QueueTerms, Store
from agent_run_ledger.fleet.handle import Handle
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.pgbouncer import PgBouncer

BATCH = 50
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


def claims(make: Callable[[], Shelf], backlog: int) -> dict[str, dict[str, float]]:
    """Microseconds of a claim, by what stands in the store beside."""
    costs: dict[str, dict[str, float]] = {}
    shelf = make()
    costs["nothing else due"] = both(shelf)
    shelf.add(1_000)
    costs["1,000 due"] = both(shelf)
    shelf.add(backlog - 1_000)
    costs[f"{backlog:,} due"] = both(shelf)
    shelf.store.close()

    shelf = make()
    shelf.add(backlog, due="NULL")
    costs[f"{backlog:,} finished"] = both(shelf)
    shelf.store.close()

    shelf = make()
    if isinstance(shelf, Postgres):
        shelf.execute("ALTER TABLE runs SET (autovacuum_enabled = off)")
    drain(shelf, backlog)
    costs[f"{backlog:,} claimed and finished, no vacuum since"] = both(shelf)
    shelf.store.close()

    if isinstance(shelf, Postgres):
        shelf = make()
        shelf.execute("ALTER TABLE runs SET (autovacuum_enabled = off)")
        with psycopg.connect(shelf.url) as reader:  # in a transaction until the end of the block
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT count(*) FROM runs")
            drain(shelf, backlog)
            costs["the same, beside a transaction older than all that"] = both(shelf)
        shelf.store.close()

    shelf = make()
    shelf.add(1, queue="hot", key="'hot'")
    hot = QueueTerms("hot", per_key=1)
    assert shelf.store.claim_due("other", LEASE_SECONDS, [hot], [AGENT], 1)
    costs["a queue with per_key=1"] = {"alone": per_key(shelf, hot)}
    shelf.add(backlog, queue="hot", key="'hot'")
    shelf.execute("ANALYZE runs")
    costs[f"the same, before {backlog:,} due of a key that is busy"] = {"alone": per_key(shelf, hot)}
    shelf.store.close()
    return costs


def drain(shelf: Shelf, backlog: int) -> None:
    """Claim and finish the whole backlog, as workers do."""
    shelf.add(backlog)
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
    return statistics.median(timed(lambda: cursor.execute(statement, ("bench", "run-500")), 300))


# --- wakes ------------------------------------------------------------------------------------------------------------


@contextmanager
def elsewhere(role: str, place: str) -> Iterator[tuple[Callable[[], None], Callable[[], str]]]:
    """Play a role of subjects/worker.py in another process: what asks it to go on, and what reads what it says."""
    command = [sys.executable, str(SUBJECTS / "worker.py"), role, place]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment("worker")) as process:
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


def wakes(place: str, *, count: int) -> dict[str, float]:
    """Milliseconds from the call of `submit` to the return of `wait_for_work` in another process."""
    with AgentRunLedger(place) as ledger, elsewhere("wait", place) as (go_on, told):
        begin = begins(ledger)
        taken: list[float] = []
        for number in range(count + 5):
            go_on()
            time.sleep(0.06)  # so that it waits
            called = time.monotonic()
            ledger.submit(begin, number)
            taken.append((float(told()) - called) * 1e3)
    return percentiles(taken[5:])


def percentiles(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {"p50 ms": statistics.median(ordered), "p99 ms": ordered[math.ceil(len(ordered) * 0.99) - 1]}


def waking(made: Databases, bench: Bench) -> dict[str, dict[str, float]]:
    count = 20 if bench.is_quick else 200
    found: dict[str, dict[str, float]] = {}
    for name, place in (("PostgreSQL", made.ledger()), ("SQLite", str(bench.place()))):
        found[f"{name}: a waiting worker wakes"] = wakes(place, count=count)
    for name, place in (("PostgreSQL", made.ledger()), ("SQLite", str(bench.place()))):
        found[f"{name}: the agent's first line"] = latencies(place, count=count)
    if made.server is not None and shutil.which("pgbouncer"):
        with PgBouncer(made.server) as pooler:
            database = made.ledger().rpartition("/")[2].partition("?")[0]
            found["through PgBouncer: the agent's first line"] = latencies(pooler.dsn(database), count=count // 10)
    return found


# --- children ---------------------------------------------------------------------------------------------------------


def fan_out(place: str, children: int) -> float:
    """Seconds of one run that starts so many others, of one step each, and waits for them; one worker, 8 at once, one process."""
    with AgentRunLedger(place, max_steps=2 * children) as ledger:  # a child is a step of its parent

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
            assert ledger.submit(parent, children).result(600.0) == sum(n * n for n in range(children))
            return time.perf_counter() - begun


# --- what is told -----------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    backlog, children = (5_000, 100) if bench.is_quick else (100_000, 1_000)
    with databases() as made:
        bench.versions["postgres"] = str(made)
        bench.say("claims")
        yield claiming(made, bench, backlog)
        bench.say("wakes")
        yield table(
            "wakes", "From `submit` to another process", "Milliseconds from the call of `submit`.", waking(made, bench)
        )
        bench.say("children")
        seconds = {"PostgreSQL": {"seconds": fan_out(made.ledger(), children)}}
        seconds["SQLite"] = {"seconds": fan_out(str(bench.place()), children)}
        about = "One run starts them, each of one step, and waits for all; one worker, 8 at once."
        yield table("children", f"{children:,} children of one run", about, seconds)


def claiming(made: Databases, bench: Bench, backlog: int) -> Table:
    """Both stores side by side."""
    alone, batched = "alone, µs", f"in batches of {BATCH}, µs each"
    sides = {
        "PostgreSQL": {
            "an UPDATE by its key": {"alone": update(made.empty())},
            **claims(lambda: Postgres(made.ledger()), backlog),
        },
        "SQLite": claims(lambda: Sqlite(bench.place()), backlog),
    }
    shown = {
        f"{store}: {name}": {
            column: told[short]
            for column, short in ((alone, "alone"), (batched, f"in batches of {BATCH}"))
            if short in told
        }
        for store, costs in sides.items()
        for name, told in costs.items()
    }
    about = (
        "A claim of a run that is due, in a synced commit, by what stands in the ledger beside. The least that one can be is an `UPDATE` of"
        " one head by its key. What was claimed is finished before the next claim."
    )
    return table("claims", "Claiming", about, shown)


def table(key: str, title: str, about: str, found: dict[str, dict[str, float]]) -> Table:
    """Rows with whatever columns they have."""
    columns = dict.fromkeys((column for told in found.values() for column in told), 1)
    return Table(key, title, about, columns, [Row(name, told) for name, told in found.items()])
