"""Whose turn it is: the order in which a program is handed its outcomes, the same at every replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple


class HoldUp(NamedTuple):
    """The one call that all others wait for."""

    position: str
    is_made: bool
    """Made, and its outcome is recorded, but nobody awaits it; otherwise it has not been made."""

    def __str__(self) -> str:
        return f"the call at position {self.position} " + (
            "is made but not awaited" if self.is_made else "has not been made"
        )


class Turns:
    """Decides which of the outcomes that a run's calls wait for is handed to the program next.

    A program that makes calls side by side sees in which order they come back (`as_completed`, `wait`, a flag that one branch
    sets and another reads). So outcomes are handed out one at a time, and a replay repeats two things: the order of the
    hand-outs, and which calls had been made before each of them, since a call may have been made *instead of* waiting for an
    outcome that came soon after. Between two hand-outs the driver leaves the program time to run on; here is no time.

    `intents` are `(order, position)` of all calls that the log shows to have been made: each was made before any outcome of a
    greater order was handed out. `outcomes` are `(order, position)` of what will be replayed; those of one order go as listed.

    The order of an outcome is its seq. The order of a call is what had been `seen` when it was made, and so is that of an
    interruption, which is replayed like an outcome. Their seqs say less: they are written down later than they happen, so that
    an outcome may stand before them that the program did not know of.

    A recorded outcome is handed out when its call waits for it, every recorded outcome before it is handed out or abandoned, and
    every call that was made before it is made. A live outcome waits until all recorded ones are handed out or abandoned and all
    calls of the log are made, since they were made without it; among live ones the lowest seq goes first. A driver reports live
    outcomes in the order in which they were recorded, all those of one transaction before it asks for the next. An outcome whose
    turn is over (a call with a key that is made again) goes first of all.

    Nothing is scanned: a step costs O(1), amortised, or O(log n) of the live outcomes that wait. Not thread-safe.
    """

    __slots__ = ("_due", "_end", "_intents", "_is_alone", "_live", "_open", "_recorded", "_unmade", "_waiting", "seen")

    def __init__(self, intents: Iterable[tuple[int, str]] = (), outcomes: Iterable[tuple[int, str]] = ()) -> None:
        self._intents = deque(sorted(intents, key=_order))
        self._unmade = {position for _, position in self._intents}
        """The calls among `_intents` that this program has not made yet."""
        self._recorded = deque(sorted(outcomes, key=_order))
        self._due = {position for _, position in self._recorded}
        """The outcomes among `_recorded` that are neither handed out nor abandoned. The head of the queue always is."""
        self._end = self._recorded[-1][0] if self._recorded else 0
        self._open: set[str] = set()
        """Calls that were made and have not been handed their outcome."""
        self._is_alone = True
        """Whether the last hand-out left no call in flight: what the program does since, it does for that one outcome."""
        self._waiting: dict[str, int] = {}
        self._live: list[tuple[int, str]] = []
        """A heap of the outcomes that are not, or no longer, due; those that no longer wait are dropped when they come up."""
        self.seen = 0
        """The order of the last outcome handed out: what the program knows of when it makes a call now."""

    @property
    def is_idle(self) -> bool:
        """Whether no call waits for its turn."""
        return not self._waiting

    @property
    def is_replaying(self) -> bool:
        """Whether recorded outcomes are still to be handed out."""
        return bool(self._recorded)

    def made(self, position: str) -> None:
        """The program has made the call at this position, and will wait for its outcome or abandon it."""
        self._open.add(position)
        if self._unmade:
            self._unmade.discard(position)

    def waiting(self, position: str, seq: int) -> None:
        """The call is awaited and has an outcome with this seq, a recorded or a live one: all it lacks is its turn."""
        self._waiting[position] = seq
        if position not in self._due:
            heappush(self._live, (seq, position))

    def next(self) -> str | None:
        """The position whose outcome may be handed out now; None: everybody waits for something still to happen."""
        live = self._live
        while live and self._waiting.get(live[0][1]) != live[0][0]:
            heappop(live)
        if live and (live[0][0] <= self._end or not (self._recorded or self._unmade)):
            return live[0][1]
        if not self._recorded:
            return None
        order, position = self._recorded[0]
        return position if position in self._waiting and not self._lacks_a_call_before(order) else None

    def handed(self, position: str) -> None:
        """The program has been given the outcome that `next` named."""
        recorded = self._recorded
        order = recorded[0][0] if recorded and recorded[0][1] == position else self._waiting[position]
        if order > self.seen:
            self.seen = order
        self._leave(position)
        self._is_alone = not self._open

    def at_once(self, position: str, seq: int) -> bool:
        """Hand out without any waiting, if no other call has been in flight since the last hand-out, and it is this one's turn.

        True: the outcome counts as handed out. False: nothing has changed. A call that was in flight *beside* the last one has to
        wait even when it is the only one left: whoever got the last outcome may be about to see that this one is not there yet.

        Not for an interruption: that somebody else does to a call, who needs his time. And the first outcome that is not handed
        out at once comes a pause after the last that was. What a program runs beside its only call gets no time at all by this.
        """
        if not self._is_alone or len(self._open) != 1 or position not in self._open:
            return False
        if self._recorded:
            order, first = self._recorded[0]
            if first != position or self._lacks_a_call_before(order):
                return False
            self._recorded.popleft()
            self._due.remove(position)
            self._drop_what_is_gone()
        elif self._unmade:
            return False
        else:
            order = seq
        if order > self.seen:
            self.seen = order
        self._open.clear()
        return True

    def abandoned(self, position: str) -> None:
        """The call was cancelled or closed before its turn, or, at the end of the run, was never made: nobody waits for it."""
        self._unmade.discard(position)
        self._leave(position)

    def holds_up(self) -> HoldUp | None:
        """Which call all that wait are waiting for. None: nobody waits, or somebody's turn has come."""
        if not self._waiting or self.next() is not None:
            return None
        if self._recorded and (position := self._recorded[0][1]) not in self._waiting:
            return HoldUp(position, is_made=position in self._open)
        missing = self._first_unmade()
        return HoldUp(missing[1], is_made=False) if missing is not None else None

    def _first_unmade(self) -> tuple[int, str] | None:
        intents = self._intents
        while intents and intents[0][1] not in self._unmade:
            intents.popleft()
        return intents[0] if intents else None

    def _lacks_a_call_before(self, order: int) -> bool:
        missing = self._first_unmade()
        return missing is not None and missing[0] < order

    def _leave(self, position: str) -> None:
        self._open.discard(position)
        self._waiting.pop(position, None)
        if position in self._due:
            self._due.remove(position)
            self._drop_what_is_gone()

    def _drop_what_is_gone(self) -> None:
        recorded, due = self._recorded, self._due
        while recorded and recorded[0][1] not in due:
            recorded.popleft()


def _order(entry: tuple[int, str]) -> int:
    return entry[0]
