"""How fast a ledger is verified and its entries are hashed, how long a proof takes, and what hashing takes of a step."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from harness import Bench
from tables import Table, Wanted

from agent_run_ledger import AgentRunLedger, Effect, merkle
from agent_run_ledger.contract import Listing, Row
from agent_run_ledger.rules import digests
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore

RUNS, STEPS, TIMES = 5, 2_000, 5
LONG, QUICK = 1_000_000, 20_000
ARGUMENTS = {"invoice": "R-2026-0042", "text": "an amount that does not match " * 2}
OUTPUT = {"matched": False, "rows": [17, 18, 19], "text": "none of these"}


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    yield verifying(bench)
    yield hashing(bench)
    yield proving(bench)


def verifying(bench: Bench) -> Table:
    table = Table(
        "verify",
        "Verifying a ledger",
        f"{RUNS} runs of {2 * STEPS + 2:,} entries in SQLite; seconds are those of the processor, the best of {TIMES} times.",
        {"entries/s": 0, "of the floor": 2},
    )
    bench.say(table.title)
    path = bench.place()
    filled(path)
    with AgentRunLedger.open_read_only(path) as ledger:
        rows = [row for number in range(RUNS) for row in ledger._store.read(f"run-{number}")]
        assert ledger.verify().ok
        runs = by_run(rows)
        least, checks = fastest(lambda: floor(rows)), fastest(ledger.verify)
        hashes = fastest(lambda: all_hashed(runs))

    def figures(seconds: float) -> dict[str, float]:
        return {"entries/s": len(rows) / seconds, "of the floor": least / seconds}

    table.add("floor: each body parsed as JSON and hashed once", figures(least))
    table.add("`verify`, all its checks", figures(checks), Wanted("entries/s", at_least=40_000))
    table.add("the hashes alone, from bodies in memory", figures(hashes), Wanted("entries/s", at_least=150_000))
    return table


def hashing(bench: Bench) -> Table:
    table = Table(
        "hashing",
        "Hashing in a step",
        'A step in `durability="process"`, and all hashes and keys that stand in its two entries, made again.',
        {"µs of CPU": 1, "% of a step": 1},
    )
    bench.say(table.title)
    step, hashes = share_of_hashing(bench.place())
    table.add("a step", {"µs of CPU": step, "% of a step": 100.0})
    share = {"µs of CPU": hashes, "% of a step": 100 * hashes / step}
    table.add("its hashes and keys", share, Wanted("% of a step", at_most=15))
    return table


def proving(bench: Bench) -> Table:
    length = QUICK if bench.is_quick else LONG
    table = Table(
        "proofs",
        "Proving an entry",
        f"Proofs of 199 entries all over a run of {length:,}, in a ledger that was just opened.",
        {"p50 ms": 3, "longest ms": 3},
    )
    bench.say(table.title)
    path = bench.place()
    store = SqliteStore(path, durability="process", clock=SystemClock())
    long_log(store, length)
    store.close()
    taken = proofs(path, length)
    told = {"p50 ms": statistics.median(taken), "longest ms": max(taken)}
    table.add("a proof", told, Wanted("p50 ms", at_most=10))
    return table


def filled(path: Path) -> None:
    with AgentRunLedger(path, durability="process", max_steps=STEPS) as ledger:
        for number in range(RUNS):
            with ledger.open_run("benchmark", f"run-{number}") as run:
                for step in range(STEPS):
                    run.step("look", ARGUMENTS | {"n": step}, lambda n, **_: OUTPUT | {"n": n}, effect=Effect.READ)


def fastest(function: Callable[[], object]) -> float:
    """Seconds of CPU, of the best time: the machine has other work."""
    taken = []
    for _ in range(TIMES):
        begun = time.process_time()
        function()
        taken.append(time.process_time() - begun)
    return min(taken)


def hashed(rows: list[Row]) -> None:
    frontier: list[bytes] = []
    for size, row in enumerate(rows):
        frontier, roots = merkle.append(frontier, size, merkle.leaf_hash(row.body))
        assert roots == row.roots


def all_hashed(runs: list[list[Row]]) -> None:
    for rows in runs:
        hashed(rows)


def floor(rows: list[Row]) -> None:
    """The least that anybody does who reads entries: each body parsed and hashed once."""
    for row in rows:
        json.loads(row.body)
        sha256(row.body).digest()


def long_log(store: SqliteStore, length: int) -> None:
    """A run of so many entries, of which nothing but the tree is looked at."""

    def pages() -> Iterator[list[Row]]:
        frontier: list[bytes] = []
        for first in range(0, length, 10_000):
            page = []
            for size in range(first, first + 10_000):
                body = b'{"run":"long","seq":%d,"kind":"value","token":1}' % (size + 1)
                frontier, roots = merkle.append(frontier, size, merkle.leaf_hash(body))
                page.append(Row(size + 1, "value", None, None, body, roots))
            yield page

    store.adopt("long", 1, b"x" * 32, Listing(0.0), pages(), [], None)


def proofs(path: Path, length: int) -> list[float]:
    """Milliseconds of proofs of entries all over the run, in a ledger that was just opened."""
    with AgentRunLedger(path, durability="process") as ledger:
        root = ledger.tree_head("long").root
        taken = []
        for seq in range(7, length, length // 199):
            begun = time.perf_counter()
            proof = ledger.prove("long", seq)
            taken.append(1000 * (time.perf_counter() - begun))
            assert merkle.verify_inclusion(proof.leaf_hash, proof.index, proof.size, proof.proof, root)
    return taken


def share_of_hashing(path: Path) -> tuple[float, float]:
    """Microseconds of a step in `process`, and how many of them its hashes take: all that stands in its two entries, made again."""
    with AgentRunLedger(path, durability="process", max_steps=STEPS) as ledger:
        with ledger.open_run("benchmark", "steps") as run:
            begun = time.process_time()
            for step in range(STEPS):
                run.step("look", ARGUMENTS | {"n": step}, lambda n, **_: OUTPUT | {"n": n}, effect=Effect.READ)
            step_seconds = (time.process_time() - begun) / STEPS
        store = ledger._store
        rows, secret = store.read("steps"), store.secret("steps")

    def again() -> None:
        frontier: list[bytes] = []
        for size, row in enumerate(rows):
            frontier, _ = merkle.append(frontier, size, merkle.leaf_hash(row.body))
            if row.payload is not None:
                digests.salted(secret, row.payload)
                digest = digests.plain(row.payload)
                if row.kind == "intent":
                    digests.fingerprint("look", digest)
                    digests.idempotency_key(secret, "steps", row.position or "", "look", row.payload)

    return 1e6 * step_seconds, 1e6 * fastest(again) / STEPS


def by_run(rows: list[Row]) -> list[list[Row]]:
    starts = [index for index, row in enumerate(rows) if row.seq == 1] + [len(rows)]
    return [rows[begin:end] for begin, end in pairwise(starts)]
