"""The effects a flow may yield. A driver performs each and answers; every yield is a place at which a process may die."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.rules.budget import Most


class Moment(NamedTuple):
    """What a decision may not fetch for itself: the time (Unix seconds), random numbers from [0, 1), and how the disk is."""

    now: float
    draw: Callable[[], float]
    too_full: str | None = None
    """Why nothing new is to be dispatched: the disk has less room than is asked for."""


class Plan:
    """What to append, and what to tell the flow once it is appended: `answer`, or `error` raised.

    A decision changes nothing by itself, since it is taken anew when somebody's request comes in between. What is to change in the
    run's memory once the entries are written, is said here.
    """

    __slots__ = ("answer", "drafts", "error", "is_replay", "synced")

    def __init__(
        self,
        drafts: list[Draft] | None = None,
        answer: Any = None,
        error: BaseException | None = None,
        synced: bool | None = None,
        is_replay: bool = False,
    ) -> None:
        self.drafts = [] if drafts is None else drafts
        self.answer = answer
        self.error = error
        self.synced = synced
        """Whether stable storage is needed before going on; None leaves it to the ledger's durability."""
        self.is_replay = is_replay


Decision = Callable[[LiveRun, Moment], Plan]


class Commit(NamedTuple):
    """Decide on the run as it is under its lock, and append what was decided, in one transaction."""

    run: LiveRun
    decide: Decision
    token: int | None = None
    """Refused with `LeaseLost` unless the run is still held under this token; None: whoever holds it now."""
    is_recorded: bool = False
    """Whether the log seems to have the answer already, so that nothing will have to be written."""


class Result(NamedTuple):
    """What a function did: it returned `value`, or raised `error`."""

    value: Any
    error: BaseException | None


class Invoke(NamedTuple):
    """Call the user's function, outside every lock and transaction; the answer is a `Result`, also where it raised.

    Before it is called the driver makes sure that the lease still holds; `LeaseLost` is thrown into the flow where it does not.
    """

    run: LiveRun
    step: StepHistory
    function: Callable[..., Any]
    arguments: dict[str, Any]
    timeout: float | None = None
    """Seconds after which the answer is a `TimeoutError`, whatever the function does then."""
    is_async: bool = False


class Inquire(NamedTuple):
    """Ask the receiver of a step what became of it, outside every lock and transaction; the answer is a `Result`, also where it raised.

    What was asked is an entry by then. A question changes nothing, and whoever has lost the run by then cannot write the answer.
    """

    run: LiveRun
    step: StepHistory
    question: Callable[..., Any]
    arguments: dict[str, Any]
    timeout: float | None = None


class AwaitLate(NamedTuple):
    """What a function did after its time was up: a `Result`, or None where no such call is left or `at_most` seconds were too few."""

    run: LiveRun
    position: str
    at_most: float | None


class Turn(NamedTuple):
    """Wait until it is this call's turn to hand its outcome out."""

    run: LiveRun
    call: Call
    seq: int
    """Where it stands in the order of hand-outs."""
    interrupted_after: float | None
    """Where what is handed out is that the program was interrupted here: after how many seconds it was, at the most."""


class Quiet(NamedTuple):
    """Wait until no step of the run is in flight, for whoever `ends` the run; for others until nobody waits to end it."""

    run: LiveRun
    ends: bool

    @property
    def is_over(self) -> bool:
        return not (self.run.in_flight if self.ends else self.run.closing)


class Room(NamedTuple):
    """Wait until another step of the run has had its outcome after the entry `since`, or none is in flight: it may use less than it could."""

    run: LiveRun
    since: int

    @property
    def is_over(self) -> bool:
        return self.run.history.last_outcome > self.since or not self.run.in_flight


class Draw(NamedTuple):
    """Have the accounts that the run shares grant this attempt what it may use, outside of every lock of the run.

    The answer is what it may use; why it may not begin; or None, where others have to come to an end first, after a while.
    """

    run: LiveRun
    call: Call
    attempt: int
    accounts: tuple[str, ...]
    """In the one order in which all runs ask: whoever holds a grant of one waits for a later one only."""
    most: Most


class Wait(NamedTuple):
    """Come back when the wall clock has reached `until`, after `at_most` seconds at the latest, or when the run is cancelled."""

    run: LiveRun
    until: float
    at_most: float


class Rest(NamedTuple):
    """Come back when the time has come, and answer whether it has, or when somebody has asked something of the run.

    Unless other calls are under way nobody holds the run meanwhile.
    """

    run: LiveRun
    call: Call
    until: float | None
    """Unix seconds; None: only what somebody asks ends it."""
    at_most: float | None
    """Seconds that it waits in this process at the most: a clock that is set back makes no wait longer than it was meant to be."""
    leaves: bool = False
    """Whether it goes on for nothing that comes: it only waits for the other calls, so that its program can end."""


class Fetch(NamedTuple):
    """Read the payload of one entry, which is too long to be kept in memory; None where it was erased."""

    run: LiveRun
    seq: int


class GiveBack(NamedTuple):
    """Let go of the run's lease; leave `note` on its head."""

    run: LiveRun
    note: str | None = None
    is_visit: bool = False
    """Whether whoever had it has only done what somebody asked, so that its program is to go on with it at once."""


class Warn(NamedTuple):
    """Tell the caller something that is no error."""

    category: type[Warning]
    text: str


Ask = Commit | Invoke | Inquire | AwaitLate | Turn | Quiet | Room | Draw | Wait | Rest | Fetch | GiveBack | Warn

T = TypeVar("T")
Flow = Generator[Ask, Any, T]
