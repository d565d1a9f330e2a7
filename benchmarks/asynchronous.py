"""Many runs side by side in one event loop: durable steps a second, latency beside tools that block, memory over 10,000 runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from harness import Bench, Subject
from tables import Row, Table, Wanted

RUNS, QUICK = (1, 16, 256), (1, 256)
OURS, PROBE = "agent-run-ledger", "bare probe"
SUBJECTS = {
    OURS: ("ledger", {"NORMAL": ["process"], "FULL": ["full"]}),
    "LangGraph": ("on_langgraph", {"NORMAL": ["NORMAL", "async"], "FULL": ["FULL", "async"]}),
    "DBOS": ("on_dbos", {"NORMAL": ["NORMAL", "async"], "FULL": ["FULL", "async"]}),
}
WANTED = {
    ("NORMAL", 256): [Wanted("steps/s", at_least=18_000), Wanted("steps/s", at_least=25_000, note="stretch")],
    ("NORMAL", 1): [Wanted("steps/s", at_least=8_000)],
}


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    yield throughput(bench, "NORMAL", "process", "Many runs in one event loop, nothing synced")
    yield throughput(bench, "FULL", "full", "Many runs in one event loop, every commit synced")
    if not bench.is_quick:
        yield beside_tools_that_block(bench)
        yield many_runs(bench)


def throughput(bench: Bench, level: str, durability: str, title: str) -> Table:
    table = Table(
        f"throughput-{durability}",
        title,
        "Steps a second of one process, on the disk. Each run makes its steps one after the other, of an async function that costs nothing."
        " Medians of rounds in which all take turns. *of the probe* is the rate by that of the bare probe beside it: two rows for each step, in"
        " transactions of as many rows as there are runs.",
        {"steps/s": 0, "µs a step": 1, "of the probe": 3},
    )
    bench.say(table.title)
    programs = {PROBE: ("floor", {level: [level]}), **SUBJECTS}
    wanted = {name: (program, bench.place(), options[level]) for name, (program, options) in programs.items()}
    with bench.subjects(wanted, "throughput", 1, 2) as started:
        for runs in QUICK if bench.is_quick else RUNS:
            rates: dict[str, list[float]] = {}
            for _ in range(1 if bench.is_quick else 5):
                for name in list(started.subjects):
                    found = started.trying(name, rate, runs, 0.3 if bench.is_quick else 1.0)
                    rates.setdefault(name, []).extend([found] if found else [])
            probe = statistics.median(rates[PROBE])
            for name in started.subjects:
                median = statistics.median(rates[name])
                figures = {"steps/s": median, "µs a step": 1e6 / median, "of the probe": median / probe}
                limits = WANTED.get((level, runs), ()) if name == OURS else ()
                table.add(f"{_runs(runs)}: {name}", figures, *limits)
        table.rows += [Row(name, error=error) for name, error in started.errors.items()]
    return table


def rate(subject: Subject, runs: int, seconds: float) -> float:
    """Its rate over about so many seconds, after a short warm-up which says how many steps that is."""
    first: float = subject.ask("throughput", runs, max(2, 64 // runs))
    found: float = subject.ask("throughput", runs, max(2, min(2_000, int(first * seconds / runs))))
    return found


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def beside_tools_that_block(bench: Bench) -> Table:
    table = Table(
        "blocking",
        "Steps beside tools that block",
        "20 async runs on leases of 3 s, one more whose plain tool blocks for 10 s in a thread of its own, and one that computes there."
        " Latencies of the 20 runs' steps; that nobody's run was taken over is read from the log.",
        {"steps": 0, "p50 ms": 1, "p99 ms": 1, "longest ms": 1, "taken over": 0},
    )
    bench.say(table.title)
    figures = bench.once("side_by_side", "blocking", bench.place())
    table.add("a step of the 20 runs", figures, Wanted("taken over", at_most=0))
    return table


def many_runs(bench: Bench) -> Table:
    table = Table(
        "many-runs",
        "10,000 runs in one process",
        "Each an agent of three steps, at most 16 of them at a time.",
        {"MiB": 1, "threads": 0},
    )
    bench.say(table.title)
    told = bench.once("side_by_side", "many", bench.place(), 10_000)
    for when in ("1,000", "10,000"):
        table.add(f"after {when}", {"MiB": told[f"MiB after {when}"], "threads": told[f"threads after {when}"]})
    return table
