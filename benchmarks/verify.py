"""How fast a ledger is verified, how fast its entries are hashed alone, how long a proof takes, and what hashing takes of a step.

Run it with `python benchmarks/verify.py`. It needs 1.5 GB in the folder for temporary files, most of it for the run of 1,000,000 entries.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from agent_run_ledger import AgentRunLedger, Effect, merkle
from agent_run_ledger.contract import Listing, Row
from agent_run_ledger.rules import digests
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore

RUNS, STEPS, TIMES = 5, 2_000, 5
LONG = 1_000_000
ARGUMENTS = {"invoice": "R-2026-0042", "text": "an amount that does not match " * 2}
OUTPUT = {"matched": False, "rows": [17, 18, 19], "text": "none of these"}


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


def floor(rows: list[Row]) -> None:
    """The least that anybody does who reads entries: each body parsed and hashed once."""
    for row in rows:
        json.loads(row.body)
        sha256(row.body).digest()


def long_log(store: SqliteStore) -> None:
    """A run of so many entries, of which nothing but the tree is looked at."""

    def pages() -> Iterator[list[Row]]:
        frontier: list[bytes] = []
        for first in range(0, LONG, 10_000):
            page = []
            for size in range(first, first + 10_000):
                body = b'{"run":"long","seq":%d,"kind":"value","token":1}' % (size + 1)
                frontier, roots = merkle.append(frontier, size, merkle.leaf_hash(body))
                page.append(Row(size + 1, "value", None, None, body, roots))
            yield page

    store.adopt("long", 1, b"x" * 32, Listing(0.0), pages(), [], None)


def proofs(path: Path) -> list[float]:
    """Milliseconds of proofs of entries all over the run, in a ledger that was just opened."""
    with AgentRunLedger(path, durability="process") as ledger:
        root = ledger.tree_head("long").root
        taken = []
        for seq in range(7, LONG, LONG // 199):
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        filled(path)
        with AgentRunLedger.open_read_only(path) as ledger:
            rows = [row for number in range(RUNS) for row in ledger._store.read(f"run-{number}")]
            report = ledger.verify()
            assert report.ok
            least = fastest(lambda: floor(rows))
            checks = fastest(ledger.verify)
        hashes = fastest(lambda: [hashed(ledger_rows) for ledger_rows in by_run(rows)])
        count = len(rows)
        print(f"entries, with their runs: {count:,}, {RUNS}")
        print(f"a body parsed and hashed once: {count / least:,.0f} a second (1)")
        print(f"verify, all checks: {count / checks:,.0f} a second ({checks / least:.1f} times as long)")
        print(f"hashes alone: {count / hashes:,.0f} a second ({hashes / least:.2f} times as long)")
        step, hashing = share_of_hashing(Path(folder) / "steps.db")
        print(f"a step in process: {step:.0f} µs of CPU, of which hashing {hashing:.1f} µs, {hashing / step:.1%}")
        store = SqliteStore(Path(folder) / "long.db", durability="process", clock=SystemClock())
        long_log(store)
        store.close()
        taken = proofs(Path(folder) / "long.db")
        print(
            f"a proof in a run of {LONG:,} entries: median {statistics.median(taken):.2f} ms, longest {max(taken):.2f} ms"
        )


def by_run(rows: list[Row]) -> list[list[Row]]:
    starts = [index for index, row in enumerate(rows) if row.seq == 1] + [len(rows)]
    return [rows[begin:end] for begin, end in pairwise(starts)]


if __name__ == "__main__":
    main()
