"""A durable step, ours and others', against the floor at the same sync level: on the disk and in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness import Bench, Rounds, cost, floor_cost, in_turns, times
from tables import Row, Table, Wanted

STEP, ASYNC, READ, LEAST = "step", "step in an event loop", "READ step", "the least for our bytes"
CHOWKI, LANGGRAPH, TASK, DBOS, BURR, NAIVE = (
    "chowki",
    "LangGraph, a super-step",
    "LangGraph, a @task",
    "DBOS",
    "Burr",
    "naive ledger",
)
Wants = Mapping[str, Sequence[Wanted]]
COLUMNS = {"p50 µs": 1, "p99 µs": 1, "of F": 2, "from": 2, "to": 2, "of our step": 2}

ABOUT = "One step of a trivial function, one after the other in one run."


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    yield synced(bench)
    yield unsynced(bench)
    if bench.memory is not None:
        yield in_memory(bench, bench.memory)
        yield in_memory_synced(bench, bench.memory)


def synced(bench: Bench) -> Table:
    return _measured(
        bench,
        Table("steps-full", "A step whose commits are synced", f"{ABOUT} On the disk.", COLUMNS),
        bench.disk,
        "FULL",
        {
            STEP: ("ledger", ["full"]),
            READ: ("ledger", ["full", "READ"]),
            ASYNC: ("ledger", ["full", "async"]),
            LANGGRAPH: ("on_langgraph", []),
            TASK: ("on_langgraph", ["FULL", "task"]),
            DBOS: ("on_dbos", []),
            BURR: ("on_burr", []),
            NAIVE: ("naive", []),
        },
        {
            STEP: [Wanted("of F", at_most=1.2)],
            READ: [Wanted("of F", at_most=0.75)],
            LANGGRAPH: [Wanted("of our step", at_least=2.5)],
            DBOS: [Wanted("of our step", at_least=5)],
        },
    )


def unsynced(bench: Bench) -> Table:
    return _measured(
        bench,
        Table(
            "steps-process",
            "A step that survives the process, not the machine",
            f"{ABOUT} On the disk; no commit waits for it. LangGraph, DBOS and Burr come with synced commits; here their connection"
            " was set to what ours has in `process`: WAL and `NORMAL`.",
            COLUMNS,
        ),
        bench.disk,
        "NORMAL",
        {
            STEP: ("ledger", ["process"]),
            ASYNC: ("ledger", ["process", "async"]),
            LEAST: ("least", []),
            "floor with a key": ("floor", ["NORMAL", "keyed"]),
            CHOWKI: ("on_chowki", []),
            LANGGRAPH: ("on_langgraph", ["NORMAL"]),
            TASK: ("on_langgraph", ["NORMAL", "task"]),
            DBOS: ("on_dbos", ["NORMAL"]),
            BURR: ("on_burr", ["NORMAL"]),
        },
        {
            STEP: [Wanted("of F", at_most=3.0), Wanted("of F", at_most=2.5, note="stretch")],
            CHOWKI: [Wanted("of our step", at_least=2)],
        },
    )


def in_memory(bench: Bench, folder: Path) -> Table:
    return _measured(
        bench,
        Table(
            "steps-memory",
            "A step where syncing costs nothing",
            f"{ABOUT} In a filesystem in memory (tmpfs), each as it comes.",
            COLUMNS,
        ),
        folder,
        "NORMAL",
        {
            STEP: ("ledger", ["process"]),
            ASYNC: ("ledger", ["process", "async"]),
            LEAST: ("least", []),
            CHOWKI: ("on_chowki", []),
            LANGGRAPH: ("on_langgraph", []),
            TASK: ("on_langgraph", ["FULL", "task"]),
            DBOS: ("on_dbos", []),
            BURR: ("on_burr", []),
            NAIVE: ("naive", []),
        },
        {
            STEP: [Wanted("of F", at_most=3.0), Wanted("of F", at_most=2.5, note="stretch")],
            CHOWKI: [Wanted("of our step", at_least=2)],
            LANGGRAPH: [Wanted("of our step", at_least=9)],
            DBOS: [Wanted("of our step", at_least=14)],
        },
    )


def in_memory_synced(bench: Bench, folder: Path) -> Table:
    return _measured(
        bench,
        Table(
            "steps-memory-full",
            'The same with `durability="full"`',
            f"{ABOUT} In a filesystem in memory (tmpfs).",
            COLUMNS,
        ),
        folder,
        "FULL",
        {
            STEP: ("ledger", ["full"]),
            READ: ("ledger", ["full", "READ"]),
            ASYNC: ("ledger", ["full", "async"]),
        },
        {},
    )


def _measured(
    bench: Bench,
    table: Table,
    folder: Path,
    level: str,
    subjects: Mapping[str, tuple[str, Sequence[str]]],
    wants: Wants,
) -> Table:
    """Fill the table: the floor, then each subject in turn with it."""
    bench.say(table.title)
    wanted = {name: (program, bench.place(folder), options) for name, (program, options) in subjects.items()}
    with bench.subject("floor", bench.place(folder), level) as floor, bench.subjects(wanted, "steps", 1) as started:
        rounds = in_turns(floor, started, rounds=3 if bench.is_quick else 21, seconds=0.03 if bench.is_quick else 0.08)
        table.rows.append(Row("floor F", floor_cost(rounds), note=floor.promise))
        fill(table, rounds, {name: subject.promise for name, subject in started.subjects.items()})
    table.rows += [Row(name, error=error) for name, error in started.errors.items()]
    for row in table.rows:
        row.wanted = wants.get(row.name, ())
    return table


def fill(table: Table, rounds: Rounds, promises: Mapping[str, str], ours: str = STEP) -> None:
    """A row for each subject that took part."""
    for name, bursts in rounds.items():
        figures = cost(bursts)
        if ours in rounds and name != ours:
            figures["of our step"] = times(rounds, name, ours)
        table.rows.append(Row(name, figures, note=promises.get(name, "")))
