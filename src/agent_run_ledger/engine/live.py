"""A run as its owner holds it: what the log says, plus what only lives in memory."""

from __future__ import annotations

from agent_run_ledger.contract import Request
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.log import Sealed


class LiveRun:
    """One run in the hands of one ledger. Everything in it is read and changed under the driver's lock of this run."""

    def __init__(self, history: History, token: int, limit: int, undeclared: str) -> None:
        self.history = history
        self.token = token
        self.limit = limit
        """How many steps and refusals the run may have."""
        self.undeclared = undeclared
        """`dispatch` or `block`: what an in-doubt step of a tool that declares no effect gets."""
        self.requests: list[Request] = []
        """What others asked for and no entry answers yet."""
        self.inbox = 0
        """The inbox counter as it was last seen: an append is refused when it has moved."""
        self.cursor = 1
        """The next position of the run's own branch, for the program that drives it."""
        self.in_flight: StepHistory | None = None
        self.interrupted: str | None = None
        """The position of a step that a cancellation left in doubt while its program goes on."""
        self.owed: list[Sealed] = []
        """Sealed outcomes that the store could not take: they go first once it can."""
        self.replayed = 0

    @property
    def run_id(self) -> str:
        return self.history.run_id

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for the run's end; the next append records it."""
        return bool(self.requests) and any(request.kind == "cancel" for request in self.requests)

    def restart(self) -> None:
        """A program begins at its first line: its next call is the run's first."""
        self.cursor = 1
        self.interrupted = None

    def advance(self, position: str | None) -> None:
        """The program has made the call at this position."""
        if position == str(self.cursor):
            self.cursor += 1

    def stand_before(self, step: StepHistory) -> None:
        """The program did not get this step's outcome: it stands before that call again, and asking again replays or continues it."""
        if step.position.isdecimal():
            self.cursor = min(self.cursor, int(step.position))

    def leave(self, step: StepHistory) -> None:
        """A cancellation ended this step's attempt: there is no outcome, the step is in doubt, and its program may go on."""
        if self.in_flight is step:
            self.in_flight = None
            self.interrupted = step.position
            self.advance(step.position)

    def absorb(self, sealed: list[Sealed]) -> None:
        """The store has taken these entries."""
        for row, body in sealed:
            self.history.absorb(row, body)
            if row.kind == "intent":
                self.in_flight = self.history.positions[row.position or ""]
                self.interrupted = None
                self.advance(row.position)
            elif row.kind == "value":
                self.interrupted = None
                self.advance(row.position)
            elif self.in_flight is not None and row.position == self.in_flight.position:
                if row.kind == "parked":
                    self.leave(self.in_flight)
                else:
                    self.in_flight = None
        if self.requests:
            self.requests = [request for request in self.requests if request.id > self.history.honoured]
