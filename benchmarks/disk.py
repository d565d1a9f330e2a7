"""How many bytes on the disk a byte of payload becomes: small steps, long new texts in a growing list of messages, a long conversation."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from harness import Bench, NotMeasured
from tables import Row, Table, Wanted

SUBJECTS = {
    "agent-run-ledger": ("ledger", ["process"]),
    "LangGraph": ("on_langgraph", ["NORMAL"]),
    "DBOS": ("on_dbos", ["NORMAL"]),
}
MOST_BYTES = 2 * 10**9
"""A conversation that is written anew at each turn is left out where all its turns together are longer."""
SMALL = len('{"invoice_id":"INV-109","n":500}') + len('{"ok":true,"total":12}')


class Talk(NamedTuple):
    """A conversation: its turns, and the new characters of a question and of a reply."""

    name: str
    turns: int
    asked: int
    answered: int
    kind: str


def measure(bench: Bench) -> Iterator[Table]:
    """The tables of this part."""
    times = 5 if bench.is_quick else 1
    talks = [
        Talk(f"{100 // times} steps, each with 50 KB of new text", 100 // times, 0, 50_000, "noise"),
        Talk(f"the same, of words that repeat: {100 // times} steps", 100 // times, 0, 50_000, "prose"),
        Talk(f"a conversation of {1_000 // times:,} turns of 500 bytes", 1_000 // times, 100, 400, "noise"),
        Talk(f"a conversation of {1_000 // times:,} turns of 4 KB of words", 1_000 // times, 3_000, 1_000, "prose"),
    ]
    steps = 1_000 // times
    table = Table(
        "disk",
        "Bytes on the disk",
        "The size of the database when all that it holds is in its file, by the bytes of payload. For small steps payload is what is passed and"
        " returned; in a conversation it is the new text alone: the model of the step is called with all messages so far and answers the next"
        " one. The text is letters drawn at random, which no compression brings below three quarters, or words of which the frequent ones"
        " repeat. LangGraph keeps the messages in its state. DBOS keeps what a step returned, not what was passed to it.",
        {"payload KB": 1, "disk KB": 1, "bytes a byte": 2},
    )
    for name, (program, options) in SUBJECTS.items():
        bench.say(f"{table.title}: {name}")
        table.rows.append(row(bench, f"{steps:,} small steps: {name}", program, options, SMALL * steps, "steps", steps))
        for talk in talks:
            new = talk.turns * (talk.asked + talk.answered)
            if program == "on_langgraph" and talk.turns * new > MOST_BYTES:
                left_out = f"it would write some {2.5 * talk.turns * new / 1e9:.0f} GB"
                table.rows.append(Row(f"{talk.name}: {name}", error=left_out))
                continue
            made = row(bench, f"{talk.name}: {name}", program, options, new, "turns", *talk[1:])
            made.wanted = [Wanted("bytes a byte", at_most=1.2)] if program == "ledger" else ()
            table.rows.append(made)
    table.rows.sort(key=lambda each: [at for at, talk in enumerate(talks) if each.name.startswith(f"{talk.name}:")])
    yield table


def row(bench: Bench, name: str, program: str, options: list[str], payload: int, verb: str, *given: object) -> Row:
    """What became of so many bytes of payload, when the subject has done what it was asked."""
    place = bench.place()
    try:
        with bench.subject(program, place, *options) as subject:
            subject.ask(verb, *given)
    except NotMeasured as error:
        return Row(name, error=str(error))
    finally:
        size = kept(place)
        shutil.rmtree(place.parent)
    return Row(name, {"payload KB": payload / 1e3, "disk KB": size / 1e3, "bytes a byte": size / payload})


def kept(place: Path) -> int:
    """The bytes of all files of a database, when its log has been brought into it."""
    if place.exists():
        with closing(sqlite3.connect(place)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return sum(path.stat().st_size for path in place.parent.rglob("*") if path.is_file())
