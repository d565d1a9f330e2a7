"""Measure everything in one run on one machine: our own figures, the floor under them, and others' beside them.

    make bench                                      # all of it, with the page and the JSON
    python benchmarks --quick                       # a taste of it in a few minutes
    python benchmarks --only steps --only cold      # some parts
    python benchmarks --list                        # which parts there are

Peers are installed into environments of their own from requirements/bench-*.txt; one that cannot be is told in its row. Progress goes to
the standard error. What is wanted is told beside what is measured; it is a fact, and no reason for another exit status.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests")]  # what is measured is this checkout

from harness import Bench, bench, commit, load, machine, now, stopwatch  # noqa: E402 - the path first
from tables import Table, as_data, markdown  # noqa: E402

PARTS = {
    "steps": "steps",
    "counts": "counts",
    "lengths": "lengths",
    "resuming": "resuming",
    "cold": "cold",
    "async": "asynchronous",
    "disk": "disk",
    "verify": "verify",
    "breaker": "breaker",
    "postgres": "postgres",
    "queues": "queues",
    "long-values": "long_values",
}
"""The modules that measure, by the part's name, in the order of the page."""


def described(module: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))) or "").split("\n")[0]


def measured(made: Bench, parts: Sequence[str]) -> tuple[list[Table], dict[str, str], dict[str, float]]:
    """The tables of these parts, printed as they come; which parts broke, and why; and the seconds that each took."""
    tables: list[Table] = []
    broken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for part in parts:
        made.say(f"--- {part}")
        with stopwatch() as taken:
            try:
                for table in importlib.import_module(PARTS[part]).measure(made):
                    print(markdown(table), flush=True)
                    tables.append(table)
            except Exception as error:
                traceback.print_exc()
                broken[part] = f"{type(error).__name__}: {error}"
        seconds[part] = round(taken[0], 1)
    return tables, broken, seconds


def page(tables: Sequence[Table], facts: dict[str, Any]) -> str:
    """All tables as a page of the documentation."""
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "<!-- Written by `make bench`: change benchmarks/, not this page. -->",
            "",
            f"Written by `make bench`: one run on one machine, commit {facts['commit']}, {facts['when']}.",
            "Where the time goes, and what each guarantee costs: [what a step costs](explanation/what-a-step-costs.md).",
            "",
            *(["**A quick run**: short counts, good for a look and nothing else.", ""] if facts["is_quick"] else []),
            METHOD,
            summary(tables, facts),
            *map(markdown, tables),
        ]
    )


def summary(tables: Sequence[Table], facts: dict[str, Any]) -> str:
    """The machine, what was measured, and what is wanted and not met."""
    rows = [(table, row) for table in tables for row in table.rows]
    first, last = (" ".join(f"{each:.2f}" for each in load) for load in facts["load"])
    lines = [
        *(f"- {name}: {value}" for name, value in facts["machine"].items()),
        f"- load at the beginning and at the end: {first}, {last}",
        *(f"- {name}" for name in facts["versions"].values()),
        *(f"- **broken**: {part}: {error}" for part, error in facts["broken"].items()),
        *(f"- **not measured**: {row.name} ({table.title}): {row.error}" for table, row in rows if row.error),
    ]
    wanted = [(table, row, each) for table, row in rows for each in row.wanted]
    missed = [
        f"- {table.title}: {row.name}: {each}" for table, row, each in wanted if each.is_met(row.figures) is False
    ]
    lines += [
        "",
        f"Of {len(wanted)} figures that are wanted, {len(missed)} are not met:"
        if missed
        else "All wanted figures are met.",
    ]
    return "\n".join([*lines, "", *missed, *([""] if missed else [])])


METHOD = """\
**The floor**, F, is one `INSERT` and one `UPDATE` of a small row, each in a transaction of its own, through Python's `sqlite3` (psycopg on
a server) on one connection: the least that a log with two commits a step can do. Every subject, the floor too, is a process of its
own, all on the same interpreter. They take turns: in each round every subject makes a burst of steps, between two bursts of
the floor. A ratio is that of one burst to the floors before and after it; told is the median over the rounds. The half of a
subject's bursts counts whose floors were the quickest. *p50* and *p99* are those of single steps, *of F* is such a ratio and *from* and *to*
are its quartiles; *of our step* is a row by the first row of ours, burst by burst. Each peer is called as its documentation shows, with the settings that it comes
with unless a table says otherwise; the last column says which they are, and what a step survives at them once it is over.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help="this part, and others so named")
    parser.add_argument("--list", action="store_true", help="say which parts there are, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="short counts")
    parser.add_argument("--dir", help="a folder on the disk to measure; default: that for temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables there, as a page")
    given = parser.parse_args()
    if given.list:
        for part, module in PARTS.items():
            print(f"{part:<14} {described(module)}")
        return 0
    begun = load()
    with bench(given.dir, is_quick=given.quick) as made:
        about = machine(made.disk)
        tables, broken, seconds = measured(made, given.only or list(PARTS))
        facts = {
            "commit": commit(),
            "when": now(),
            "is_quick": given.quick,
            "machine": about,
            "load": [begun, load()],
            "versions": made.versions,
            "seconds": seconds,
            "broken": broken,
        }
    print(summary(tables, facts))
    if given.page is not None:
        given.page.write_text(page(tables, facts), encoding="utf-8")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(as_data(tables, facts), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
