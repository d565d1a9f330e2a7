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


def on_copies(bench: Bench, what: str, original: Path, count: int, times: int, *other: Path) -> dict[str, float]:
    """The medians over so many fresh processes, each with a copy of its own."""
    found: list[dict[str, float]] = []
    for _ in range(times):
        copies = []
        for each in (original, *other):
            copy = bench.place()
            shutil.copytree(each.parent, copy.parent, dirs_exist_ok=True)
            copies.append(copy)
        found.append(bench.once("again", what, copies[0], count, *copies[1:]))
        for copy in copies:
            shutil.rmtree(copy.parent)
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def resumed(bench: Bench) -> Table:
    table = Table(
        "resume",
        "Taking up a run whose process died",
        "A fresh process for each figure, with a copy of a run that was killed; medians. *ms* counts from when all modules are loaded (the same"
        " was done before to another ledger), *with imports* from the interpreter's first line. The next commit is synced.",
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
        least = 0.0
        for what, name in RESUMES.items():
            loaded = on_copies(bench, what, run, count, times, small)
            whole = on_copies(bench, what, run, count, max(3, times // 3))
            least = least or loaded["ms"]
            figures = {
                "ms": loaded["ms"],
                "of the probe": loaded["ms"] / least,
                "with imports": whole["ms"],
                "peak MiB": whole["peak MiB"],
            }
            table.add(f"{count:,} steps: {name}", figures, *wants.get((count, what), ()))
        shutil.rmtree(run.parent)
    return table


def replayed(bench: Bench) -> Table:
    count = 2_000 if bench.is_quick else 10_000
    table = Table(
        "replay",
        f"Replaying a run of {count:,} steps",
        "A fresh process runs the program again from its first step; every call is answered from the log. Opening the ledger and reading the"
        " run are in *ms* and not in *µs a step*.",
        {"ms": 1, "µs a step": 2, "peak MiB": 1},
    )
    for what, name in REPLAYS.items():
        bench.say(f"{table.title}: {name}")
        figures = on_copies(
            bench, what, dead(bench, what, count), count, 3 if bench.is_quick else 7, dead(bench, what, 1)
        )
        table.add(name, figures, Wanted("µs a step", at_most=10))
    return table
