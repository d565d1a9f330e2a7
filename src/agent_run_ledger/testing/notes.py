"""What a crashed process leaves for whoever judges it: the notes it made while it lived, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Passed(NamedTuple):
    """A durable boundary was reached: `where` says behind what."""

    where: str


class Called(NamedTuple):
    """The function of a step was really called."""

    run_id: str
    position: str
    number: int
    tool: str
    effect: str | None
    """What is declared about the tool; None: nothing."""
    key: str
    same: str
    """Equal for calls of one tool with the same arguments, in whatever run."""
    is_intended: bool
    """Whether the store had this attempt's intent by then."""
    is_settled: bool
    """Whether its outcome had been recorded by a former process."""

    @property
    def step(self) -> str:
        return f"step {self.number} {self.tool!r}"


class Asked(NamedTuple):
    """The receiver of a step was asked for its receipt."""

    run_id: str
    position: str


class TookKey(NamedTuple):
    """The function of a step took its idempotency key."""

    tool: str


class Diverged(NamedTuple):
    """The program asked for another call than the one that is recorded."""

    position: str
    recorded: str
    asked: str
    path: str | None
    text: str


class Doubted(NamedTuple):
    """The program was told that a step is in doubt."""

    number: int | None
    tool: str
    text: str


class Stalled(NamedTuple):
    """A replay waited for a call that was not made, and went on in another order."""

    text: str


class Ended(NamedTuple):
    """The flow came to its end: it returned, or it raised `error` (`module.Type`)."""

    error: str | None
    text: str


class LeftRunning(NamedTuple):
    """The process ended, and a function that it had called in a thread went on for longer than anybody wants to wait."""

    number: int


class Stood(NamedTuple):
    """A run as the store has it when the last process has ended. `steps` are position, tool and outcome of each."""

    run_id: str
    state: str
    is_over: bool
    result: str
    steps: tuple[tuple[str, str, str], ...]


Note = Passed | Called | Asked | TookKey | Diverged | Doubted | Stalled | Ended | LeftRunning | Stood
MakeNote = Callable[[Note], object]

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Passed, Called, Asked, TookKey, Diverged, Doubted, Stalled, Ended, LeftRunning, Stood)
}


def to_line(note: Note) -> bytes:
    """A note as one line of JSON."""
    import json

    return json.dumps([type(note).__name__, *note]).encode() + b"\n"


def from_lines(lines: Iterable[str]) -> list[Note]:
    """The notes in these lines. The last may have been cut short by the process's end: it is left out."""
    import json

    notes: list[Note] = []
    for line in lines:
        if not line.endswith("\n"):
            break
        name, *fields = json.loads(line)
        note = _KINDS[name](*fields)
        if isinstance(note, Stood):
            note = note._replace(steps=tuple((position, tool, outcome) for position, tool, outcome in note.steps))
        notes.append(note)
    return notes
