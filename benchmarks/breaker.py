"""What a check of the breaker costs, for several kinds of calls, early and late in a run."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Bench
from loops import costs
from tables import Table


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    late = 2_000 if bench.is_quick else 100_000
    columns = {"step 10": "about step 10, µs", f"step {late}": f"about step {late:,}, µs"}
    table = Table(
        "breaker",
        "A check of the breaker",
        "Microseconds of processor time in which the default policy looks at one call and its outcome, with results of 2,000 characters.",
        dict.fromkeys(columns.values(), 1),
    )
    bench.say(table.title)
    for name, told in costs(late).items():
        table.add(name, {columns[when]: value for when, value in told.items()})
    yield table
