"""Whether a step costs as much late in a long run as early in a short one."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Bench, cost, floor_cost, in_turns, times
from tables import Row, Table, Wanted

LENGTHS, QUICK = (10, 100, 1_000, 10_000, 100_000), (10, 1_000, 10_000)


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    lengths = QUICK if bench.is_quick else LENGTHS
    table = Table(
        "lengths",
        "A step by the length of its run",
        "Steps of runs that have about so many already, on the disk, in turns with the floor and with one another; a run is left for a new"
        " one when it is a tenth longer.",
        {"p50 µs": 1, "p99 µs": 1, "of F": 2, "from": 2, "to": 2, "of step 10": 3},
    )
    bench.say(table.title)
    wanted = {f"{length:,} steps": ("ledger", bench.place(), ["process", str(length)]) for length in lengths}
    first = next(iter(wanted))
    with bench.subject("floor", bench.place(), "NORMAL") as floor, bench.subjects(wanted, "steps", 1) as started:
        # short bursts, for short runs have to be made again and again
        rounds = in_turns(floor, started, rounds=3 if bench.is_quick else 15, seconds=0.02)
        table.rows.append(Row("floor F", floor_cost(rounds), note=floor.promise))
        for name, bursts in rounds.items():
            row = Row(name, cost(bursts), note=started.subjects[name].promise)
            if name != first:
                row.figures["of step 10"] = times(rounds, name, first)
            table.rows.append(row)
    table.rows += [Row(name, error=error) for name, error in started.errors.items()]
    table.rows[-1].wanted = [Wanted("of step 10", at_most=1.15)]
    yield table
