"""What a durable step, a resume and an import cost, as ratios against the raw SQLite floor measured in the same run.

    make bench                              # both durabilities, on the disk under the temp directory
    python benchmarks/steps.py --dir /dev/shm --json

The floor F is one INSERT and one UPDATE, each in a transaction of its own, through the standard library, at the same sync level:
the least that a ledger of two commits a step can do. Figures are medians over interleaved rounds, so that both sides meet the same
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agent_run_ledger import AgentRunLedger, Effect

ROUNDS = 7


def floor(path: Path, synchronous: str, key: str = "") -> Callable[[], None]:
    """F: one INSERT and one UPDATE in two transactions. `key` adds the least that finds the steps of a run again."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={synchronous}")
    columns = "id INTEGER PRIMARY KEY, run TEXT, number INTEGER, arguments TEXT, state TEXT, output TEXT"
    db.execute(f"CREATE TABLE steps ({columns}{key})")
    arguments, output = '{"invoice_id":"INV-109","n":1}', '{"ok":true,"total":12}'
    insert = "INSERT INTO steps (run, number, arguments, state) VALUES (?, ?, ?, ?)"
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        db.execute("BEGIN IMMEDIATE")
        made = db.execute(insert, ("run_4f0a6f8c1b2d3e4f5a6b", number, arguments, "RUNNING"))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE steps SET state = ?, output = ? WHERE id = ?", ("COMPLETED", output, made.lastrowid))
        db.execute("COMMIT")

    return step


def durable(path: Path, durability: str, effect: Effect | None = None) -> Callable[[], None]:
    """One step of one run, with every guarantee on."""
    return stepping(AgentRunLedger(path, max_steps=10**9, durability=durability), effect)


def stepping(ledger: AgentRunLedger, effect: Effect | None = None) -> Callable[[], None]:
    """One step of a run that is made here."""
    run_id = ledger.create_run(goal="benchmark")
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        arguments = {"invoice_id": "INV-109", "n": number}
        ledger.execute_step(run_id, "fetch_invoice", arguments, lambda: {"ok": True, "total": 12}, effect=effect)

    return step


def median_microseconds(step: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def interleaved(steps: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """The median of each, over rounds in which all take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rounds[name].append(median_microseconds(step, count))
    return {name: statistics.median(each) for name, each in rounds.items()}


def step_costs(folder: Path) -> dict[str, float]:
    process = interleaved(
        {
            "floor, NORMAL": floor(folder / "floor-normal.db", "NORMAL"),
            "floor with a key, NORMAL": floor(folder / "floor-keyed.db", "NORMAL", ", UNIQUE (run, number)"),
            "step, process": durable(folder / "process.db", "process"),
        },
        500,
    )
    full = interleaved(
        {
            "floor, FULL": floor(folder / "floor-full.db", "FULL"),
            "step, full": durable(folder / "full.db", "full"),
            "READ step, full": durable(folder / "full-read.db", "full", Effect.READ),
        },
        60,
    )
    return process | full


def flatness(folder: Path) -> dict[str, float]:
    """The median of the steps around the 10th and the 10,000th of one run, and of the floor at the same two times."""
    ledger, raw = durable(folder / "flat.db", "process"), floor(folder / "flat-floor.db", "NORMAL")
    for _ in range(10):
        ledger(), raw()
    early = interleaved({"ledger": ledger, "floor": raw}, 40)
    for _ in range(10_000 - 10 - 40 * ROUNDS):
        ledger(), raw()
    late = interleaved({"ledger": ledger, "floor": raw}, 40)
    return {"step 10": early["ledger"] / early["floor"], "step 10,000": late["ledger"] / late["floor"]}


RESUME = """
import sqlite3, sys, time
path, run_id = sys.argv[1:]
from agent_run_ledger import AgentRunLedger, Effect
import agent_run_ledger.stores.sqlite
begun = time.perf_counter()
def dispatched():
    print(time.perf_counter() - begun)
ledger = AgentRunLedger(path)
ledger.resume_run(run_id)
ledger.execute_step(run_id, "fetch_invoice", {"n": 46}, dispatched, effect=EFFECT)
"""

PROBE = """
import sqlite3, sys, time
path, run_id = sys.argv[1:]
begun = time.perf_counter()
db = sqlite3.connect(path, isolation_level=None)
db.execute("PRAGMA synchronous=FULL")
rows = db.execute("SELECT * FROM entries WHERE run_id = ? ORDER BY seq", (run_id,)).fetchall()
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE runs SET fencing_token = fencing_token + 1 WHERE run_id = ?", (run_id,))
db.execute("COMMIT")
print(time.perf_counter() - begun)
"""


def resume(folder: Path) -> dict[str, float]:
    """Milliseconds, after imports, to the dispatch of step 46 in a fresh process; and to open, read all rows and take the fence.

    The intent of a step that declares no effect is synced before its dispatch, that of a READ step is not.
    """
    programs = {
        "probe": PROBE,
        "resume, next READ": RESUME.replace("EFFECT)", "Effect.READ)"),
        "resume, next undeclared": RESUME.replace("EFFECT)", "None)"),
    }
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(15):
        for name, program in programs.items():
            path = folder / f"{name}-{number}.db"
            with AgentRunLedger(path, durability="process") as ledger:
                run_id = ledger.create_run(goal="benchmark")
                for n in range(45):
                    ledger.execute_step(run_id, "fetch_invoice", {"n": n}, lambda: {"ok": True, "total": 12})
            command = [sys.executable, "-c", program, str(path), run_id]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            measured[name].append(float(said) * 1000)
    return {name: statistics.median(each) for name, each in measured.items()}


def import_milliseconds() -> dict[str, float]:
    """What the import costs a fresh interpreter, measured inside it; medians of 15."""
    program = "import time; a = time.perf_counter(); import agent_run_ledger; print(time.perf_counter() - a)"
    command = [sys.executable, "-c", program]
    times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(15)]
    return {"import agent_run_ledger": statistics.median(times) * 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where the databases are made (default: the temp directory)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        costs, flat, resumed, imported = step_costs(folder), flatness(folder), resume(folder), import_milliseconds()
    normal, full = costs["floor, NORMAL"], costs["floor, FULL"]
    ratios = {
        "step, process / F": costs["step, process"] / normal,
        "step, process / F with a key": costs["step, process"] / costs["floor with a key, NORMAL"],
        "step, full / F at FULL": costs["step, full"] / full,
        "READ step, full / F at FULL": costs["READ step, full"] / full,
        "step 10 / F": flat["step 10"],
        "step 10,000 / F": flat["step 10,000"],
        "resume, next READ / probe": resumed["resume, next READ"] / resumed["probe"],
        "resume, next undeclared / probe": resumed["resume, next undeclared"] / resumed["probe"],
    }
    machine = {
        "python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "system": platform.platform(),
        "cores": os.cpu_count(),
    }  # fmt: skip
    if given.json:
        print(
            json.dumps(
                {"machine": machine, "microseconds": costs, "milliseconds": resumed | imported, "ratios": ratios}
            )
        )
        return
    print("   ".join(f"{key} {value}" for key, value in machine.items()))
    for name, each in costs.items():
        print(f"{name:<32}{each:>10.1f} µs")
    for name, each in {f"45 steps, {key}": value for key, value in resumed.items()}.items():
        print(f"{name:<32}{each:>10.2f} ms")
    for name, each in imported.items():
        print(f"{name:<32}{each:>10.2f} ms")
    print()
    for name, each in ratios.items():
        print(f"{name:<32}{each:>10.2f}")


if __name__ == "__main__":
    main()
