"""What of an ended run is erased, and the entry that says so: which payloads, by whom, and why. Nothing else of its log changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from agent_run_ledger.contract import Erasure, Row
from agent_run_ledger.engine.history import StepHistory, parse
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.words import RunState


class Erasing(NamedTuple):
    """What is to be done: `payloads` of them go, and `draft` says so; None where everything that is asked for is gone already."""

    payloads: int
    erasure: Erasure
    draft: Draft | None


def plan(
    rows: Iterable[Row],
    secret: bytes,
    requests: int,
    by: str,
    reason: str,
    *,
    step: StepHistory | None,
    everything: bool,
) -> Erasing:
    """Erase the payloads of one step, or of the whole run; `everything`: its secret, too. `rows` may be without their payloads.

    `requests` is how many requests are in its inbox. A step's payloads are those of the entries at its position, and that of the
    signal that its wait has taken.
    """
    spans, asked = Spans(), Spans()
    payloads = ended = size = 0
    signals: dict[int, int | None] = {}
    taken: set[int] = set()
    for row in rows:
        body, size = parse(row.body), row.seq
        if not ended and RunState(body["state"]).is_terminal:
            ended = row.seq
        is_ours = step is None or row.position == step.position
        if is_ours and "signal" in body:
            taken.add(body["signal"])
        if row.payload is None and row.digest is None:
            continue  # it has none, or it is gone already
        if is_ours:
            payloads += 1
            spans.add(row.seq)
            if "request" in body:
                asked.add(body["request"])
        elif row.kind == "signal":
            signals[row.seq] = body.get("request")
    for seq in taken & signals.keys() if step is not None else ():
        payloads += 1
        spans.insert(seq)
        if (request := signals[seq]) is not None:
            asked.insert(request)
    if step is None:
        spans.found, asked.found = [[1, size]], [[1, requests]] if requests else []
    loses_secret = everything and bool(secret)
    erasure = Erasure(spans.pairs, asked.pairs, loses_secret)
    if not payloads and not loses_secret:
        return Erasing(0, erasure, None)
    fields: dict[str, Any] = {"entries": spans.found, "ended": ended, "by": by, "reason": reason}
    if step is not None:
        fields["step"] = step.number
    if loses_secret:
        fields["secret"] = True
    return Erasing(payloads, erasure, Draft("erased", None, fields))


class Spans:
    """Ascending numbers, kept as runs of neighbours: `[[1, 4], [7, 7]]`."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def add(self, number: int) -> None:
        """The next number, larger than all before."""
        if self.found and self.found[-1][1] == number - 1:
            self.found[-1][1] = number
        else:
            self.found.append([number, number])

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((first, last) for first, last in self.found)

    def insert(self, number: int) -> None:
        """A number that is not among them."""
        self.found = sorted([*self.found, [number, number]])

    def within(self, first: int, last: int) -> list[list[int]]:
        """Those of the numbers from `first` to `last`."""
        return [[max(low, first), min(high, last)] for low, high in self.found if low <= last and first <= high]

    def remove(self, first: int, last: int) -> None:
        """Leave out the numbers from `first` to `last`."""
        parts = [part for low, high in self.found for part in ([low, min(high, first - 1)], [max(low, last + 1), high])]
        self.found = [part for part in parts if part[0] <= part[1]]


def ended_at(last: Row) -> int | None:
    """The entry with which a run ended whose last entry is this one, where it is not this one itself.

    Raises as `parse` does where the entry is damaged.
    """
    return int(parse(last.body)["ended"]) if last.kind == "erased" else None


def says_erased(row: Row | None) -> bool:
    """Whether there is nothing behind the end of a run but what says that something was erased."""
    return row is None or row.kind == "erased"
