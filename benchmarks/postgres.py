"""A durable step on PostgreSQL, ours and others', against the floor on the same server; and many runs in one event loop."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from asynchronous import rate
from harness import Bench, NotMeasured, floor_cost, in_turns
from servers import VARIABLE, Databases, databases
from steps import ASYNC, COLUMNS, READ, STEP, fill
from tables import Row, Table

FLOOR = (
    f"The server is the embedded PostgreSQL with its own settings and fsync on, reached by its socket (the variable {VARIABLE} names another). F is one"
    " `INSERT` of some 400 bytes and one `UPDATE` of a head by its key, two commits of prepared statements. Each step is one of a trivial function, one after the other in one run."
)
Programs = Mapping[str, tuple[str, Sequence[str]]]
FULL: Programs = {
    STEP: ("ledger", ["full"]),
    READ: ("ledger", ["full", "READ"]),
    ASYNC: ("ledger", ["full", "async"]),
    "Absurd": ("on_absurd", []),
    "DBOS": ("on_dbos", []),
    "LangGraph, a super-step": ("on_langgraph", []),
}
PROCESS: Programs = {STEP: ("ledger", ["process"]), ASYNC: ("ledger", ["process", "async"])}


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    with databases() as made:
        bench.versions["postgres"] = str(made)
        title = "A step on PostgreSQL"
        yield steps(bench, made, Table("postgres-full", f"{title}, synced", FLOOR, COLUMNS), "FULL", FULL)
        yield steps(
            bench,
            made,
            Table("postgres-process", f"{title}, not synced", FLOOR, COLUMNS),
            "NORMAL",
            PROCESS,
        )
        yield throughput(bench, made)


def steps(bench: Bench, made: Databases, table: Table, level: str, programs: Programs) -> Table:
    bench.say(table.title)
    places = {name: made.ledger() if program == "ledger" else made.empty() for name, (program, _) in programs.items()}
    wanted = {name: (program, places[name], options) for name, (program, options) in programs.items()}
    with bench.subject("floor", made.empty(), level) as floor, bench.subjects(wanted, "steps", 1) as started:
        # short turns, for a server's own work comes and goes
        rounds = in_turns(floor, started, rounds=4 if bench.is_quick else 60, seconds=0.012)
        table.rows.append(Row("floor F", floor_cost(rounds), note=floor.promise))
        fill(table, rounds, {name: subject.promise for name, subject in started.subjects.items()})
    table.rows += [Row(name, error=error) for name, error in started.errors.items()]
    return table


def throughput(bench: Bench, made: Databases) -> Table:
    table = Table(
        "postgres-throughput",
        "Many runs in one event loop, on PostgreSQL",
        "Steps a second of one process, as above; medians.",
        {"steps/s": 0, "µs a step": 1},
    )
    bench.say(table.title)
    for durability in ("full", "process"):
        for runs in (1, 64, 256):
            name = f"agent-run-ledger, `{durability}`, {runs} run{'s' if runs > 1 else ''}"
            rates = []
            try:
                for _ in range(2 if bench.is_quick else 5):
                    with bench.subject("ledger", made.ledger(), durability) as subject:
                        rates.append(rate(subject, runs, 0.3 if bench.is_quick else 1.0))
            except NotMeasured as error:
                table.rows.append(Row(name, error=str(error)))
            else:
                median = statistics.median(rates)
                table.add(name, {"steps/s": median, "µs a step": 1e6 / median})
    return table
