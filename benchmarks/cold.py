"""What a fresh process pays in an environment with nothing else in it: the import, the first durable step, and memory."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, SUBJECTS, Bench, NotMeasured, installed, last_words
from tables import Row, Table, Wanted

OURS = "agent-run-ledger"
SUBJECT_OF = {
    "the interpreter alone": ("", "bare"),
    "agent-run-ledger, the import alone": ("", "front_door"),
    OURS: ("", "agent_run_ledger"),
    "chowki": ("chowki", "chowki"),
    "LangGraph": ("langgraph", "langgraph"),
    "DBOS": ("dbos", "dbos"),
    "Burr": ("burr", "burr"),
}
"""The peer's environment, or ours, and the function of subjects/first.py."""


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    table = Table(
        "cold",
        "A fresh process",
        "Each library in an environment that holds it and what it needs; ours from the wheel of this checkout. *import* is the statement that its"
        " documentation begins with, measured inside; *first step* is from the start of the process until its first durable step is recorded,"
        " less the same of a process that only says a line; *peak* is the most memory that the process had until then. Medians of processes that"
        " take turns; all of them ran before, so that bytecode is there.",
        {"import ms": 2, "first step ms": 1, "peak MiB": 1},
    )
    bench.say(table.title)
    pythons: dict[str, Path] = {}
    for name, (peer, _) in SUBJECT_OF.items():
        try:
            pythons[name] = bench.python(peer) if peer else pythons.get(OURS) or _ours(bench)
            pythons.setdefault(OURS, pythons[name])
        except NotMeasured as error:
            table.rows.append(Row(name, error=str(error)))
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in pythons}
    for turn in range((3 if bench.is_quick else 21) + 1):
        for name in list(taken):
            try:
                found = started(bench, pythons[name], SUBJECT_OF[name][1])
            except NotMeasured as error:
                del taken[name]
                table.rows.append(Row(name, error=str(error)))
            else:
                taken[name] += [found] if turn else []
    bare = statistics.median(wall for wall, _, _ in taken["the interpreter alone"])
    medians = {name: [statistics.median(each) for each in zip(*all_of, strict=True)] for name, all_of in taken.items()}
    rows = [
        Row(name, {"import ms": imported, "first step ms": wall - bare, "peak MiB": peak})
        for name, (wall, imported, peak) in medians.items()
    ]
    for row in rows:
        if row.name in ("the interpreter alone", "agent-run-ledger, the import alone"):
            del row.figures["first step ms"]
        if row.name == "agent-run-ledger, the import alone":
            row.wanted = [Wanted("import ms", at_most=1.5)]
        if row.name == OURS:
            row.wanted = [
                Wanted("first step ms", at_most=30),
                Wanted("first step ms", at_most=15, note="stretch"),
                Wanted("peak MiB", at_most=24),
            ]
    table.rows[:0] = rows
    yield table


def _ours(bench: Bench) -> Path:
    """The interpreter of an environment into which the wheel of this checkout was installed, and nothing else."""
    folder = bench.disk / "environment"
    command = [sys.executable, str(ROOT / "tools" / "try_wheel.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise NotMeasured(last_words(done.stderr, done.returncode))
    return folder / "bin" / "python"


def started(bench: Bench, python: Path, library: str) -> tuple[float, float, float]:
    """Milliseconds until it said that its step is recorded and those of its import, and the MiB that it had."""
    place = bench.place()
    command = [str(python), str(SUBJECTS / "first.py"), library, str(place)]
    begun = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True, env=installed(), cwd=place.parent
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        wall = time.perf_counter() - begun
        said = process.stderr.read()
    shutil.rmtree(place.parent)
    if not line:
        raise NotMeasured(last_words(said, process.returncode))
    imported, peak = line.split()
    return wall * 1e3, float(imported) * 1e3, float(peak) / 1024
