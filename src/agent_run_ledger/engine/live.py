"""A run as its owner holds it: what the log says, plus what only lives in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from agent_run_ledger.contract import Request
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.log import Draft, Sealed
from agent_run_ledger.engine.positions import branch_of, keyed, named, within
from agent_run_ledger.errors import ReplayDivergence, StepInDoubt, UnorderedStep
from agent_run_ledger.rules.budget import NO_LIMITS, NOTHING, Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_run_ledger.engine.call import Call
    from agent_run_ledger.engine.charging import Metered
    from agent_run_ledger.engine.turns import Turns
    from agent_run_ledger.model import Notice, RetryPolicy
    from agent_run_ledger.prices import Prices


SENT = frozenset({"signal", "approval"})
"""What others send to a run: it becomes an entry also while steps are in flight, for it changes nothing for them."""


class Branch:
    """One line of calls: the run's own, or one that goes on beside it. Its positions begin with its path."""

    __slots__ = ("answered", "behind", "cursor", "hears", "maker", "numbered", "path", "unbegun")

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.cursor = 1
        """The number of the next call that has no key."""
        self.numbered = 0
        """How many of its calls are under way, those with a key left out, and `maker` is who made them."""
        self.maker: object = None
        self.unbegun: dict[str, Call] = {}
        """Its calls whose coroutine has not begun, by position: a task that is cancelled early closes it without a word."""
        self.hears: dict[str, int] = {}
        """The positions of failures that its program was told of, and of which attempt."""
        self.behind: set[str] = set()
        """The positions of interrupted calls of the branches around it: whoever opened it has gone on behind them."""
        self.answered: set[str] = set()
        """The positions with a key that its program was given in this life: asked again they are not called again."""

    def take(self) -> str:
        """The next position, which belongs to the caller now."""
        position = within(self.path, str(self.cursor)) if self.path else str(self.cursor)
        self.cursor += 1
        return position


class LiveRun:
    """One run in the hands of one ledger.

    What the log says is read and changed under the driver's lock of this run. What a program's calls leave here is changed by their own
    thread or event loop too, each time by one operation that other threads see as a whole.
    """

    limits: Limits
    """What the run may use: what was said when it was made from another one goes before."""
    spending: Limits
    """Those of them that the log says and an audit holds it to."""
    gives_notice: bool
    """Whether anything is said before it is refused."""
    limits_calls: bool
    """Whether anything limits what calls use, and not only how many there are."""

    def __init__(
        self, history: History, token: int, given: Limits, undeclared: str, reactions: Mapping[str, str]
    ) -> None:
        self.run_id = history.run_id
        self.token = token
        self.given = given
        """What its program may use, as its ledger and its agent say; the number of steps is among it."""
        self.reactions = reactions
        """With what a loop that is `suspected` or `certain` is met first."""
        self.read_anew(history)
        self.prices: Prices | None = None
        """What tokens cost."""
        self.refuses_unknown_prices = False
        """Whether a call is refused of which nothing says what it may cost, where money is limited; else it reserves what is left."""
        self.metered: dict[str, list[Metered]] = {}
        """What functions that are at work have said that they use, by position."""
        self.undeclared = undeclared
        """`dispatch` or `block`: what an in-doubt step of a tool that declares no effect gets."""
        self.requests: list[Request] = []
        """What others asked for and no entry answers yet."""
        self.inbox = 0
        """The inbox counter as it was last seen: an append is refused when it has moved."""
        self.owed: list[Draft] = []
        """Outcomes that the store could not take: they go first once it can."""
        self.made: dict[str, Call] = {}
        """The calls that are under way, by position, whether they are dispatched by now or not."""
        self.in_flight: dict[str, StepHistory] = {}
        """Those of them that are dispatched."""
        self.late: set[str] = set()
        """The positions of steps that ran out of time and whose function goes on in its thread."""
        self.ahead = 0
        """How many steps the append that is being decided begins already."""
        self.is_dispatching = False
        """Whether that append dispatches anything: no end of the run goes into it."""
        self.is_beginning = False
        """Whether it dispatches a call that is a run of its own, whose calls share what this one may use."""
        self.reserved_ahead = NOTHING
        """What those steps have reserved."""
        self.is_settling = False
        """Whether it records an outcome already, of which no program knows yet."""
        self.deaths = 0
        """How many of its owners died, or lost it, since its last entry was written."""
        self.replayed = 0
        self.before_change: Callable[[], None] | None = None
        """Who wants to see the log once more as it is, before the next entry is taken in."""
        self.turns: Turns | None = None
        """The order in which outcomes are handed out, where calls run side by side in an event loop."""
        self.is_begun = True
        """Whether a program is at work; not while steps are settled before it begins, in whatever order."""
        self.retry: RetryPolicy | None = None
        """How often its program is begun anew after an exception has left it, where a worker drives it; None: its error is final."""
        self.fatal: tuple[type[BaseException], ...] = ()
        """Exceptions that end the run at once then."""
        self.is_worked = False
        """Whether a worker drives it, so that nobody else would run its program again."""
        self.is_draining = False
        """Whether its program is to end where it begins nothing new, to be begun anew elsewhere."""
        self.again_in: float | None = None
        """Seconds after which it should be tried again, where what stopped its program may have passed by then."""
        self.strands: set[object] = set()
        """The tasks and threads in which the program is at work, as far as they are known: each may be about to make a call."""
        self.restart()

    def read_anew(self, history: History) -> None:
        """From now on this is what the log says."""
        self.history = history
        self.allow(self.given)

    def allow(self, given: Limits) -> None:
        """From now on its program may use this, as far as the log does not say otherwise."""
        self.given = given
        granted, within = self.history.granted, self.history.within
        limits = given if granted is NO_LIMITS else granted.over(given)
        if within:
            limits = limits._replace(within=tuple(sorted({*within, *(limits.within or ())})))
        self.limits, self.spending = limits, limits.of_spending
        self.limits_calls = limits.are_of_calls or limits.seconds is not None or limits.within is not None
        self.gives_notice = limits.notice_at is not None or "notice" in self.reactions.values()

    @property
    def most_steps(self) -> int:
        """How many steps and refusals it may have."""
        steps = self.limits.steps
        assert steps is not None
        return steps

    @property
    def has_under_way(self) -> bool:
        """Whether anything is dispatched by now, or by the append that is being decided: the run does not end before its outcome."""
        return bool(self.in_flight) or self.is_dispatching

    @property
    def is_resting(self) -> bool:
        """Whether nothing of the run does anything but wait, so that nobody need own it."""
        return self.made.keys() <= self.resting and self.strands <= {call.maker for call in list(self.made.values())}

    @property
    def sent(self) -> list[Request]:
        """What others have sent and the next append turns into entries, whatever is in flight."""
        return [request for request in self.requests if request.kind in SENT]

    def unanswered(self, requests: list[Request]) -> list[Request]:
        """Those of these requests that no entry answers yet."""
        history = self.history
        return [each for each in requests if each.id > history.honoured and each.id not in history.answered]

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for the run's end; it is recorded as soon as nothing is in flight."""
        return bool(self.requests) and any(request.kind == "cancel" for request in self.requests)

    def runs_on(self, step: StepHistory | None) -> str | None:
        """The position at which this step, or one that it continues, was dispatched to a thread that has not ended; None: there is none."""
        while step is not None and step.position not in self.late:
            step = self.history.positions.get(step.continues or "")
        return step.position if step is not None else None

    def restart(self) -> None:
        """A program begins at its first line: its next call is the run's first."""
        self.root = Branch()
        self.branches: dict[str, Branch] = {"": self.root}
        self.interrupted: dict[str, tuple[Branch, Call]] = {}
        """The calls whose program was interrupted before it got their outcome, and the branch that may go on."""
        self.closing: set[str] = set()
        """The positions of calls that wait to end the run as soon as nothing is in flight: nothing new begins."""
        self.divergence: ReplayDivergence | None = None
        """What the program was told when it asked for something else than what is recorded: it appends nothing any more."""
        self.turns = None
        self.is_suspended = False
        """Whether its program has been told to end, to be begun anew when what it waits for has come: it does nothing more."""
        self.resting: set[str] = set()
        """The positions of calls that wait for something outside, and need no owner meanwhile."""
        self.settled: set[str] = set()
        """The positions of steps that were settled just before the program began: it is told how they failed, if they did."""
        self.again_in = None
        self.leaving: str | None = None
        """Whether the last call that ends gives the run back, and with which note; None: it does not."""

    def taken_over(self) -> None:
        """Somebody else had the run in the meantime, and has settled what was ours to settle. `history` is read anew.

        A program that acts on a failure which that one has dispatched again since would go on from what never was.
        """
        positions = self.history.positions
        self.owed = []
        self.in_flight.clear()
        for branch in self.branches.values():
            for at, attempt in branch.hears.items():
                if at in positions and positions[at].attempts != attempt:
                    step = positions[at]
                    recorded = f"attempt {step.attempts} of {step.tool!r}, made by another owner"
                    hint = " Begin the program again: it was told of an attempt that is not the last any more."
                    asked = f"what follows on attempt {attempt}"
                    self.divergence = ReplayDivergence(self.run_id, at, recorded, asked, None, hint)

    # --- branches -----------------------------------------------------------------------------------------------------

    def open_branch(self, parent: Branch, name: str | None = None, number: str | None = None) -> Branch:
        """The branch of this name, or of this number below a position that was taken for it, to go on with."""
        path = within(parent.path, named(name)) if name is not None else str(number)
        branch = self.branches.get(path)
        if branch is None:
            branch = self.branches[path] = Branch(path)
        branch.hears |= parent.hears
        if parent.unbegun:
            self.let_go_of_dropped(parent)
        if self.interrupted:
            branch.behind |= parent.behind
            branch.behind |= {position for position, (owner, _) in self.interrupted.items() if owner is parent}
        return branch

    def close_branch(self, branch: Branch, parent: Branch) -> None:
        """What the branch knows and left undone is its parent's now. The branch may be opened again."""
        parent.hears |= branch.hears
        for position, (owner, call) in list(self.interrupted.items()):
            if owner is branch:
                self.interrupted[position] = (parent, call)
        if branch.path.rpartition(".")[2].isdecimal():
            self.branches.pop(branch.path, None)  # nobody can come back to a number

    # --- calls --------------------------------------------------------------------------------------------------------

    def make(self, call: Call) -> None:
        """A program makes this call: it has its position from now on, whenever it is awaited.

        Raises `UnorderedStep` while a call that another task or thread made in the same branch is under way.
        """
        branch = call.branch
        call.since = self.history.size
        if self.interrupted:
            call.behind = self.left_behind(branch)
        key = call.options.step_key
        if key is not None or call.place is not None:
            call.position = call.place or within(branch.path, keyed(key or ""))
            if call.position in self.made:
                self.let_go_of_dropped()
                if call.position in self.made:
                    raise UnorderedStep(self.run_id, call.tool, self.made[call.position].tool)
        else:
            if branch.numbered:
                self.admit(branch, call.maker, call.tool)
            call.position = branch.take()
            branch.maker = call.maker
            branch.numbered += 1
        self.made[call.position] = call
        if self.turns is not None:
            call.seen = self.turns.seen
            self.turns.made(call.position)

    def left_behind(self, branch: Branch) -> frozenset[str]:
        """The positions of the interrupted calls behind which the program of this branch goes on by whatever it does now."""
        interrupted = self.interrupted.items()
        return frozenset(at for at, (owner, _) in interrupted if owner is branch or at in branch.behind)

    def admit(self, branch: Branch, maker: object, asked: str) -> None:
        """Raises `UnorderedStep` where somebody else's call is under way in this branch, or this very thread's, below a step."""
        if branch.numbered and (branch.maker != maker or type(maker) is int):
            self.let_go_of_dropped()
            if branch.numbered:
                other = next(call for call in self.made.values() if call.branch is branch and call.key is None)
                raise UnorderedStep(self.run_id, asked, other.tool)

    def ended(self, call: Call, error: BaseException | None) -> None:
        """The call is over: its outcome goes to its program, or `error` does before there is one."""
        position, branch, key = call.position, call.branch, call.options.step_key
        if self.made.get(position) is not call:  # the run was taken anew meanwhile
            return
        del self.made[position]
        self.in_flight.pop(position, None)
        self.resting.discard(position)
        branch.unbegun.pop(position, None)
        if key is None and call.place is None:
            branch.numbered -= 1
        if call.is_delivered:
            if key is not None:
                branch.answered.add(position)
            return
        if self.turns is not None:
            call.seen = self.turns.seen
            self.turns.abandoned(position)
        # Whoever goes on behind a step in doubt is told of the doubt again.
        is_behind = isinstance(error, StepInDoubt)
        if isinstance(error, Exception) and not is_behind:
            self._stand_before(call)
        elif call.place is None and not self.history.is_missed(position):
            # a pipeline that goes on is a pipeline that begins again
            self.interrupted[position] = (branch, call)

    def interrupt(self, call: Call) -> None:
        """The program of a call that has ended was interrupted before it could be told how: it stands behind the call."""
        if call.key is None and call.place is None:
            call.branch.cursor = max(call.branch.cursor, int(call.position.rpartition(".")[2]) + 1)
        if call.place is None:
            self.interrupted[call.position] = (call.branch, call)

    def begin_turns(self) -> None:
        """From now on this program is handed its outcomes in turn, the recorded ones in the order of the first time."""
        from agent_run_ledger.engine.turns import Turns  # only an event loop needs it

        history = self.history
        # Entry 1 is no outcome: who has seen none has seen that one, as an interruption that is not 0 has.
        calls = [(max(1, step.order), position) for position, step in history.positions.items()]
        calls += [(missed.order, position) for position, missed in history.missed.items()]
        calls += [(blocked.order, position) for position, blocked in history.blocked.items()]
        given = [(blocked.order, position) for position, blocked in history.blocked.items()]
        interrupted = [(missed.order, position) for position, missed in history.missed.items()]
        for position, step in history.positions.items():
            if step.is_missed:
                interrupted.append((step.missed or step.outcome.order if step.outcome else step.missed, position))
            elif step.stands and step.outcome is not None:
                given.append((step.outcome.order, position))
        outcomes = given + interrupted  # whoever is interrupted behind an outcome has seen it
        is_begun = len(self.branches) > 1 or self.root.cursor > 1 + self.root.numbered or bool(self.root.answered)
        if is_begun:  # it was handed outcomes before there was an order, or put behind them
            calls = [each for each in calls if not self._is_past(each[1])]
            outcomes = [each for each in outcomes if not self._is_past(each[1])]
        self.turns = Turns(calls, outcomes)
        if is_begun:
            self.turns.seen = history.last_outcome
        for position in list(self.made):
            self.turns.made(position)

    @property
    def notices(self) -> list[Notice]:
        """Those that belong to calls which this program has behind it."""
        return [notice for notice in self.history.notices if self._is_past(notice.position)]

    def _is_past(self, position: str) -> bool:
        """Whether this program has the call at this position, or the branches that one opened, behind it."""
        path, _, segment = position.rpartition(".")
        branch = self.branches.get(path)
        if branch is None:
            opener = branch_of(path)
            return bool(opener) and path.rpartition(".")[2].isdecimal() and self._is_past(opener)
        if position in self.made:
            return False
        return int(segment) < branch.cursor if segment.isdecimal() else position in branch.answered

    def _stand_before(self, call: Call) -> None:
        """The program did not get this call's outcome: it stands before the call again, and asking again replays or continues it."""
        if call.key is None and call.place is None:
            call.branch.cursor = min(call.branch.cursor, int(call.position.rpartition(".")[2]))

    def let_go_of_dropped(self, branch: Branch | None = None) -> None:
        """Calls that were made, in this branch or in any, and whose coroutine was closed before it began."""
        made = self.made if branch is None else branch.unbegun
        for call in list(made.values()):
            if call.is_dropped:
                self.ended(call, None)

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        if self.made:
            self.let_go_of_dropped()
        return bool(self.made)

    @property
    def busy_with(self) -> str:
        """The tool of a call that is under way."""
        return next(iter(self.made.values())).tool

    # --- the log ------------------------------------------------------------------------------------------------------

    def absorb(self, sealed: list[Sealed]) -> None:
        """The store has taken these entries."""
        if self.before_change is not None:
            look, self.before_change = self.before_change, None
            with suppress(Exception):  # then whoever looks later is told
                look()
        history, made = self.history, self.made
        self.deaths = 0
        for row, body in sealed:
            history.absorb(row, body)
            position = row.position
            if position is None:
                self.allow(self.given)  # the entry may have said what it is granted
                continue
            if row.kind == "intent":
                if position in made:
                    self.in_flight[position] = history.positions[position]
            elif row.kind != "redispatched_undeclared":
                self.in_flight.pop(position, None)
            if self.interrupted and (row.kind == "missed" or body.get("ok") == "cancelled"):
                self.interrupted.pop(position, None)
        if self.requests:
            self.requests = self.unanswered(self.requests)
