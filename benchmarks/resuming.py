"""How long a fresh process takes to take up a run whose process died, and what a replay adds, against a raw probe of the same rows."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import Bench
from tables import Table, Wanted

PROBE = "probe"
RESUMES = {
    PROBE: "open the file, read all rows of the run, take the fence",
    "resume": "`resume_run`",
    "dispatch_read": "to the dispatch of the next step, a `READ`",
    "dispatch": "to the dispatch of the next step, which declares no effect",
}
REPLAYS = {"steps": "`execute_step` by `execute_step`", "agent": "an agent's calls of a registered tool"}


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    yield resumed(bench)
    yield replayed(bench)


def dead(bench: Bench, what: str, count: int) -> Path:
    """A ledger whose one run has so many steps, and whose process died."""
    place = bench.place()
    bench.once("again", what, place, count)
    return place


def once(bench: Bench, what: str, original: Path, count: int, *other: Path) -> dict[str, float]:
    """One fresh process, with copies of its own."""
    copies = []
    for each in (original, *other):
        copy = bench.place()
        shutil.copytree(each.parent, copy.parent, dirs_exist_ok=True)
        copies.append(copy)
    found = bench.once("again", what, copies[0], count, *copies[1:])
    for copy in copies:
        shutil.rmtree(copy.parent)
    return found


def resumed(bench: Bench) -> Table:
    table = Table(
        "resume",
        "Taking up a run whose process died",
        "A fresh process for each figure, with a copy of a run that was killed; all take turns, and the half of the rounds counts whose probe was"
        " the quickest. *ms* counts from when all modules are loaded (the same was done before to another ledger), *with imports* from the"
        " interpreter's first line. The next commit is synced.",
        {"ms": 2, "of the probe": 2, "with imports": 1, "peak MiB": 1},
    )
    counts = {45: 5, 10_000: 3} if bench.is_quick else {45: 25, 10_000: 9, 100_000: 3}
    small = dead(bench, "steps", 1)
    wants: dict[tuple[int, str], Sequence[Wanted]] = {
        (45, "dispatch_read"): [Wanted("of the probe", at_most=2)],
        (45, "dispatch"): [Wanted("of the probe", at_most=2)],
        (10_000, "resume"): [Wanted("of the probe", at_most=1.5)],
    }
    for count, times in counts.items():
        bench.say(f"{table.title}: {count:,} steps")
        run = dead(bench, "steps", count)
        loaded = [{what: once(bench, what, run, count, small) for what in RESUMES} for _ in range(times)]
        whole = [{what: once(bench, what, run, count) for what in RESUMES} for _ in range(max(1, times // 3))]
        shutil.rmtree(run.parent)
        loaded, whole = quiet(loaded), quiet(whole)
        for what, name in RESUMES.items():
            figures = {
                "ms": statistics.median(each[what]["ms"] for each in loaded),
                "of the probe": statistics.median(each[what]["ms"] / each[PROBE]["ms"] for each in loaded),
                "with imports": statistics.median(each[what]["ms"] for each in whole),
                "peak MiB": statistics.median(each[what]["peak MiB"] for each in whole),
            }
            table.add(f"{count:,} steps: {name}", figures, *wants.get((count, what), ()))
    return table


def quiet(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
    """The half of the rounds whose probe was the quickest, at least one."""
    return sorted(rounds, key=lambda each: each[PROBE]["ms"])[: (len(rounds) + 1) // 2]


def replayed(bench: Bench) -> Table:
    count = 2_000 if bench.is_quick else 10_000
    table = Table(
        "replay",
        f"Replaying a run of {count:,} steps",
        "A fresh process runs the program again from its first step; every call is answered from the log. Opening the ledger and reading the"
        " run are in *ms* and not in *µs a step*. The half of the processes counts that were the quickest.",
        {"ms": 1, "µs a step": 2, "peak MiB": 1},
    )
    for what, name in REPLAYS.items():
        bench.say(f"{table.title}: {name}")
        run, small = dead(bench, what, count), dead(bench, what, 1)
        times = 3 if bench.is_quick else 11
        found = sorted((once(bench, what, run, count, small) for _ in range(times)), key=lambda each: each["µs a step"])
        found = found[: (times + 1) // 2]
        figures = {column: statistics.median(each[column] for each in found) for column in table.columns}
        table.add(name, figures, Wanted("µs a step", at_most=10))
    return table
