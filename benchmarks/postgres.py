"""What durable steps cost on PostgreSQL, as ratios against a floor and against Absurd, on one server in one run.

    make bench
    PYTHONPATH=src:tests python benchmarks/postgres.py --json
    PYTHONPATH=src:tests python benchmarks/postgres.py --no-peers --dsn postgresql://...

The server is the embedded PostgreSQL 18 with its own settings and fsync on, reached by its socket, unless `--dsn` names another, whose
role may make databases. The floor F is one INSERT of a row of some 400 bytes and one UPDATE of a head by its key, two commits of
prepared statements on one connection: the least that a ledger of two commits a step can do. All take turns in short rounds, the floor
at the beginning and at the end of each: a ratio is the median of those of the rounds, so that both sides have met the same machine. The
half of the rounds counts in which the floor was the quickest, so that whoever else was busy on the machine is measured less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psycopg
from asynchronous import agent
from steps import median_microseconds, stepping

from agent_run_ledger import AgentRunLedger, Effect
from agent_run_ledger.stores.postgres import migrate
from support.postgres import Server

ROOT = Path(__file__).resolve().parent.parent
PEER = ".venv-absurd"
"""The environment of the peer, made by tools/environment.py."""

Durability = Literal["full", "process"]
DURABILITIES: tuple[Durability, ...] = ("full", "process")
Subject = Callable[[int], float]
"""Makes so many steps and says the median microseconds of one."""

ROUNDS, STEPS = 80, 15


class Databases:
    """Databases on one server, each made when it is asked for."""

    def __init__(self, url: str, server: Server | None = None) -> None:
        self._url = url
        self.server = server
        """The server itself, where it is ours."""
        self._made: list[str] = []

    def empty(self) -> str:
        """The URL of a new one."""
        name = f"bench_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        self._made.append(name)
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    def ledger(self) -> str:
        """The URL of a new one that is a ledger."""
        url = self.empty()
        migrate(url)
        return url

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def drop(self) -> None:
        for name in self._made:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def databases(url: str | None) -> Iterator[Databases]:
    """Those of the server at `url`, or of an embedded one that is there for the block, with the settings that PostgreSQL comes with."""
    if url is not None:
        made = Databases(url)
        try:
            yield made
        finally:
            made.drop()
        return
    defaults = {"shared_buffers": "128MB", "max_wal_size": "1GB", "autovacuum": "on"}
    with Server(fsync=True, settings=defaults) as server:
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale")
        server.home.run(server.programs / "initdb", f"--pgdata={server.data}", *options)
        server.start()
        yield Databases(server.dsn(), server)


# --- one step after the other -----------------------------------------------------------------------------------------


def floor(url: str, durability: Durability) -> Subject:
    """F: one INSERT and one UPDATE, two commits."""
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
    connection.execute("CREATE TABLE entries (run TEXT, seq BIGINT, body BYTEA, PRIMARY KEY (run, seq))")
    connection.execute("CREATE TABLE heads (run TEXT PRIMARY KEY, seq BIGINT)")
    connection.execute(f"SET synchronous_commit = {'on' if durability == 'full' else 'off'}")
    run, body = "run_4f0a6f8c1b2d3e4f5a6b", secrets.token_bytes(400)
    connection.execute("INSERT INTO heads VALUES (%s, 0)", (run,))
    cursor = connection.cursor()
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        cursor.execute("INSERT INTO entries VALUES (%s, %s, %s)", (run, number, body))
        cursor.execute("UPDATE heads SET seq = %s WHERE run = %s", (number, run))

    return partial(median_microseconds, step)


@contextmanager
def absurd(url: str) -> Iterator[tuple[str, Subject]]:
    """Its version, and its steps, made by a worker of its own process (see absurd.py)."""
    subprocess.run([sys.executable, ROOT / "tools" / "environment.py", PEER, "bench-absurd"], check=True)
    command = [str(ROOT / PEER / "bin" / "python"), str(ROOT / "benchmarks" / "absurd.py"), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        asked, told = peer.stdin, peer.stdout

        def steps(count: int) -> float:
            print(count, file=asked, flush=True)
            return float(told.readline())

        yield told.readline().strip(), steps
        asked.close()


def turns(base: Subject, subjects: dict[str, Subject]) -> dict[str, dict[str, float]]:
    """All beside their floor, in rounds; the half of them counts in which the floor was the quickest."""
    rounds: list[tuple[float, dict[str, float]]] = []
    for _ in range(ROUNDS + 1):
        before = base(STEPS)
        taken = {name: subject(STEPS) for name, subject in subjects.items()}
        rounds.append(((before + base(STEPS)) / 2, taken))
    counted = sorted(rounds[1:], key=lambda each: each[0])[: ROUNDS // 2]  # the first was for warming up
    costs = {"floor F": {"µs": statistics.median(floor for floor, _ in counted), "/ F": 1.0}}
    for name in subjects:
        costs[name] = {
            "µs": statistics.median(taken[name] for _, taken in counted),
            "/ F": statistics.median(taken[name] / floor for floor, taken in counted),
        }
    return costs


def one_run(made: Databases, peer: tuple[str, Subject] | None) -> dict[str, dict[str, float]]:
    """One run that makes its steps one after the other: two commits each, synced in `full`."""
    costs: dict[str, dict[str, float]] = {}
    for durability in DURABILITIES:
        with AgentRunLedger(made.ledger(), durability=durability, max_steps=10**9) as ledger:
            subjects = {f"step, {durability}": partial(median_microseconds, stepping(ledger))}
            if durability == "full":
                subjects["READ step, full"] = partial(median_microseconds, stepping(ledger, Effect.READ))
                if peer is not None:
                    subjects[peer[0]] = peer[1]
            measured = turns(floor(made.empty(), durability), subjects)
        costs[f"floor F, {durability}"] = measured.pop("floor F")
        costs |= measured
    return costs


# --- many runs side by side -------------------------------------------------------------------------------------------


def throughput(url: str, durability: Durability, runs: int, steps: int) -> float:
    """Durable steps a second of `runs` runs side by side in one event loop, each making its steps one after the other."""
    with AgentRunLedger(url, durability=durability, max_steps=10**9) as ledger:
        run_ids = [ledger.create_run("benchmark") for _ in range(runs)]

        async def all_of_them() -> float:
            begun = time.perf_counter()
            await asyncio.gather(*(agent(ledger, run_id, steps) for run_id in run_ids))
            return runs * steps / (time.perf_counter() - begun)

        return asyncio.run(all_of_them())


def side_by_side(made: Databases, *, quick: bool) -> dict[str, float]:
    rates: dict[str, float] = {}
    for durability in DURABILITIES:
        for runs, steps in ((1, 300), (64, 60), (256, 60)):
            url = made.ledger()
            found = [throughput(url, durability, runs, steps) for _ in range(2 if quick else 5)]
            rates[f"{runs} runs, {durability}"] = statistics.median(found)
    return rates


# --- what is told -----------------------------------------------------------------------------------------------------


def machine(made: Databases) -> dict[str, object]:
    return {
        "python": platform.python_version(), "psycopg": psycopg.__version__, "system": platform.platform(), "cores": os.cpu_count(),
        **{name: made.execute(f"SHOW {name}")[0][0] for name in ("server_version", "fsync", "wal_sync_method")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", help="another server; default: an embedded one under the temp directory")
    parser.add_argument("--no-peers", action="store_true", help="without Absurd")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of many runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args()
    with databases(given.dsn) as made:
        about = machine(made)
        if given.no_peers:
            costs = one_run(made, None)
        else:
            with absurd(made.empty()) as peer:
                costs = one_run(made, peer)
                ratio = costs["step, full"]["µs"] / costs[peer[0]]["µs"]
                costs["step, full"] |= {f"/ {peer[0]}": ratio}
        rates = side_by_side(made, quick=given.quick)
    if given.json:
        print(json.dumps({"machine": about, "one run": costs, "side by side (steps/s)": rates}))
        return
    print("   ".join(f"{key} {value}" for key, value in about.items()))
    for name, cost in costs.items():
        print(f"{name:<24}" + "   ".join(f"{value:>10.2f} {unit}" for unit, value in cost.items()))
    for name, rate in rates.items():
        print(f"{name:<24}{rate:>10,.0f} steps/s")


if __name__ == "__main__":
    main()
