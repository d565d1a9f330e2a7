"""Which runs this ledger holds: claims, renewals from a thread of their own, and what happens when a lease is lost."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from agent_run_ledger.contract import Clock, Lease, QueueTerms, Store
from agent_run_ledger.drivers import reading
from agent_run_ledger.drivers.accounts import Accounts
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine import runs, schedule, waits
from agent_run_ledger.engine.effects import Moment
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft, Sealed, seal
from agent_run_ledger.errors import (
    LeaseLost,
    RunMoved,
    RunNotFound,
    RunOwned,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.budget import Limits
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.stores.room import Room
from agent_run_ledger.words import RunState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_run_ledger.prices import Prices

POLL_SECONDS = 0.05
_LAST_BEAT_SECONDS = 5.0
_WAKE_SECONDS_PER_ENTRY, _LONGEST_WAKE_SECONDS = 1e-4, 1.0
"""How long the end of a child waits for those of its siblings: several times what it costs to begin their parent anew."""
_KEPT = 256
"""Beyond so many runs in memory, those that have ended are let go."""


def _draw() -> float:
    """A random number from [0, 1)."""
    import random  # only who retries needs it

    return random.random()


class HeldRun(LiveRun):
    """A run with its lock and its lease. `is_held` says whether this ledger may append to it, as far as it knows."""

    def __init__(self, history: History, given: Limits, undeclared: str, reactions: Mapping[str, str]) -> None:
        super().__init__(history, 0, given, undeclared, reactions)
        self.lock = threading.RLock()
        self.is_held = False
        self.expires = 0.0
        """When the lease ends, in seconds of the ledger's elapsed clock."""
        self._pins: list[None] = []
        """One for each call on the stack (a pipeline, an open run, a wait) that wants the lease kept. Changed without the lock."""
        self.is_touched = False
        """Whether the run was used since the last heartbeat."""
        self.is_settled = False
        """Whether the run has ended and its end is known here: there is nothing to claim and nothing more to read."""
        self.loop: Any = None
        """The event loop of its program, if that is async."""
        self.put_off = 0
        """How many of its commits were left to the thread that may wait for a sync."""
        self.order: Any = None
        """Who waits for his turn, where calls run side by side in an event loop."""
        self.suspends = False
        """Whether its program ends where it would have to wait for long, to be begun anew later."""
        self.left_running: dict[str, Work] = {}
        """The threads of steps that ran out of time, by position."""

    @property
    def pins(self) -> int:
        """How many calls on the stack want the lease kept."""
        return len(self._pins)

    def __enter__(self) -> None:
        self._pins.append(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pins:  # one that was abandoned may end after all
            self._pins.pop()

    def abandon(self) -> None:
        """Its program stands still for good, in a loop that is closed: nothing of it is under way any more."""
        for call in list(self.made.values()):
            self.ended(call, None)
        self._pins.clear()

    def leave_running(self, position: str, work: Work) -> None:
        """The step ran out of time, and its function goes on."""
        self.left_running[position] = work
        self.late.add(position)

    def let_go_of(self, position: str) -> None:
        """The function has ended, and what it did is known."""
        self.left_running.pop(position, None)
        self.late.discard(position)

    def slim(self) -> None:
        """Of the log of a run that is given back keep nothing, and of one that has ended how it ended: it is read when it is used."""
        before = self.history
        self.read_anew(History(self.run_id, b""))
        self.turns = self.order = None
        if before.state.is_terminal:
            self.history.secret, self.history.state = before.secret, before.state
            self.history.cause, self.history.result_digest = before.cause, before.result_digest
            self.is_settled = True
            self.left_running.clear()
            self.late.clear()


def is_owed(run: LiveRun, draft: Draft) -> bool:
    """Whether the log still lacks this outcome."""
    step = run.history.positions.get(draft.position or "")
    return step is not None and step.outcome is None and step.attempts == draft.attempt


class Leases:
    """The runs of one ledger object. One object is one owner, whatever threads use it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        label: str,
        lease_seconds: float,
        heartbeat_seconds: float,
        given: Limits,
        prices: Prices | None,
        unknown_price: str,
        undeclared: str,
        rule: Callable[[], Rule],
        reactions: Mapping[str, str],
        shared: Mapping[str, Limits],
    ) -> None:
        self._store = store
        self._clock = clock
        self._label = label
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._given = given
        self._prices = prices
        self._unknown_price = unknown_price
        self.undeclared = undeclared
        self._rule = rule
        self._reactions = reactions
        self._shared = shared
        self.room: Room | None = None
        """What watches the disk, where somebody wants it watched."""
        self.saw: Callable[[str, int, int, bool], None] | None = None
        """Who hears that a run which had so many entries has so many now, and whether it has ended."""
        self._forget()
        _alive.add(self)

    def _forget(self) -> None:
        """Be a new owner of nothing: at the start, and in a forked child, whose parent keeps what it holds."""
        self.owner = f"{self._label}-{os.urandom(6).hex()}"
        self.accounts = Accounts(self._store, self._clock, self.owner, self._shared, self._held_now)
        """The budgets that its runs share with others."""
        self._lock = threading.Lock()
        self._runs: dict[str, HeldRun] = {}
        self._claimed: dict[str, float] = {}
        """When the leases end that were claimed and not begun yet, in seconds of the elapsed clock."""
        self._is_draining = False
        self._most = _KEPT
        self._is_closed = False
        self._heart: threading.Lock | None = None
        """Held by the heartbeat's thread as long as it lives; None before there is one."""
        self._stop = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing to be had any more."""
        return self._is_closed

    def moment(self, *, begins: bool = True) -> Moment:
        """What a decision is taken by; where it `begins` nothing new nobody looks at the disk."""
        lack = self.room.lack() if begins and self.room is not None else None
        return Moment(self._clock.now(), _draw, lack)

    def known(self, run_id: str) -> HeldRun | None:
        """The run, if it is in this ledger's memory."""
        return self._runs.get(run_id) if type(run_id) is str else None

    def run(self, run_id: str) -> HeldRun:
        """The run in this ledger's memory; not yet claimed, and perhaps not existing."""
        run = self._runs.get(run_id)
        if run is None:
            with self._lock:
                if len(self._runs) >= self._most:
                    self._runs = {key: kept for key, kept in self._runs.items() if not kept.is_settled or kept.pins}
                    self._most = max(_KEPT, 2 * len(self._runs))  # so that looking for them costs little
                fresh = HeldRun(History(run_id, b""), self._given, self.undeclared, self._reactions)
                fresh.prices = self._prices
                fresh.refuses_unknown_prices = self._unknown_price == "refuse"
                run = self._runs.setdefault(run_id, fresh)
        return run

    def create(self, run_id: str, drafts: Sequence[Draft]) -> HeldRun | None:
        """Make a run that begins with these entries, and hold it. None where it exists."""
        secret = os.urandom(32)
        history = History(run_id, secret, self._rule)
        token = self._store.first_token()
        sealed = seal(history, token, self._clock.now(), drafts)
        expires = self._clock.elapsed() + self._lease_seconds
        rows = [row for row, _ in sealed]
        listing = runs.listing(sealed[0][1])
        if self._store.create(run_id, self.owner, self._lease_seconds, secret, rows, listing) is None:
            return None
        run = self.run(run_id)
        with run.lock:
            run.read_anew(history)
            self.wrote(run, sealed)
            self._took(run, token, expires)
        return run

    def wrote(self, run: HeldRun, sealed: list[Sealed]) -> None:
        """These entries stand in the store by now."""
        before = run.history.size
        run.absorb(sealed)
        if self.saw is not None:
            self.saw(run.run_id, before, run.history.size, run.history.state.is_terminal)

    def enqueue(self, run_id: str, drafts: Sequence[Draft], due_in: float) -> bool:
        """Make a run that begins with these entries and waits for a worker of its queue. False where it exists."""
        secret = os.urandom(32)
        sealed = seal(History(run_id, secret), self._store.first_token() - 1, self._clock.now(), drafts)
        return self._store.enqueue(run_id, secret, [row for row, _ in sealed], runs.listing(sealed[0][1]), due_in)

    def lay_down(self, run_id: str, drafts: Sequence[Draft]) -> bool:
        """Make a run that begins with these entries, and that nobody has and nobody looks for. False where it exists."""
        secret, token = os.urandom(32), self._store.first_token() - 1
        sealed = seal(History(run_id, secret), token, self._clock.now(), drafts)
        rows = [row for row, _ in sealed]
        return self._store.adopt(run_id, token, secret, runs.listing(sealed[0][1]), [rows], (), None)

    def forget(self, run_id: str) -> None:
        """Keep nothing in memory of a run that has ended: whoever asks for it reads what is left."""
        with self._lock:
            self._runs.pop(run_id, None)

    def wake(self, run: HeldRun) -> None:
        """Let a worker take a run of a queue now. Raises `RunNotFound`, and `RunOwned` while somebody has it."""
        with run.lock:
            if run.is_held:
                raise RunOwned(run.run_id, self.owner, 0.0)
            lease = self._store.claim(run.run_id, self.owner, self._lease_seconds)
            self._store.release(run.run_id, lease.token, due_in=0.0)

    def hold(self, run: HeldRun) -> None:
        """Make sure that the run is held and known up to its last entry. Call under its lock.

        An ended run is read and not claimed: nothing can be appended to it. Raises `RunNotFound` and `RunOwned`.
        """
        run.is_touched = True
        if run.is_held:
            if self._clock.elapsed() < run.expires:
                return
            try:
                self.renew(run, run.token)
                return
            except LeaseLost:
                pass  # somebody has it, or had it: claim it like anybody
        elif run.is_settled:
            return
        run.read_anew(self._read(run.run_id))
        run.is_settled = run.history.state.is_terminal
        if run.is_settled:
            return
        expires = self._clock.elapsed() + self._lease_seconds
        lease = self._store.claim(run.run_id, self.owner, self._lease_seconds)
        deaths = lease.deaths
        if self._store.read(
            run.run_id, run.history.size, limit=1, payloads_up_to=0
        ):  # its last owner wrote on until just now
            run.read_anew(self._read(run.run_id))
            deaths = 0
        self._took(run, lease.token, expires, deaths)
        if (
            run.history.state is RunState.BLOCKED or run.history.waiting
        ):  # nothing may have to be written that would hear of a request
            self.fetch_requests(run)

    def claim_due(self, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int) -> list[Lease]:
        """Take up to `at_most` runs that are due. Each is then `take`n and worked on, or given up by `put_back`."""
        expires = self._clock.elapsed() + self._lease_seconds
        leases = self._store.claim_due(self.owner, self._lease_seconds, queues, agents, at_most)
        for lease in leases:
            self._claimed[lease.run_id] = expires
        return leases

    def put_back(self, lease: Lease, due_in: float = 0.0) -> None:
        """Give up a run that was claimed and not begun: it is due in so many seconds."""
        self._claimed.pop(lease.run_id, None)
        self._store.release(lease.run_id, lease.token, due_in=due_in)

    def take(self, lease: Lease) -> HeldRun:
        """Hold a run that `claim_due` gave, known up to its last entry, on a worker's behalf.

        One that was taken before, and then the store was away, may be taken again: whether it is still ours shows when it is used.
        """
        run = self.run(lease.run_id)
        with run.lock:
            run.is_touched = True
            run.is_settled = False
            run.read_anew(self._read(run.run_id))
            is_heard_of = run.history.token == lease.token  # an entry was written here since it was claimed
            deaths = 0 if is_heard_of else lease.deaths
            self._took(run, lease.token, self._claimed.pop(run.run_id, 0.0), deaths)
            run.is_worked = run.suspends = True
            run.is_draining = self._is_draining
            self.fetch_requests(run)
        return run

    def drain(self) -> None:
        """From now on the runs that workers drive begin no new step."""
        self._is_draining = True
        for run in self.held():
            run.is_draining = run.is_worked

    def _read(self, run_id: str) -> History:
        return reading.read(self._store, run_id, self._rule)

    def _took(self, run: HeldRun, token: int, expires: float, deaths: int = 0) -> None:
        positions = run.history.positions
        if token != run.token:
            run.taken_over()
        run.token = token
        run.expires = expires
        run.deaths = deaths
        run.is_held = True
        run.in_flight = {position: positions[position] for position in run.in_flight if position in positions}
        run.requests = []
        run.inbox = run.history.honoured
        if self._heart is None:
            self._start()

    def await_claim(self, run: HeldRun, wait_seconds: float | None) -> None:
        """Hold the run, waiting up to `wait_seconds` for another owner to let go of it."""
        deadline = self._clock.elapsed() + (wait_seconds or 0.0)
        while True:
            try:
                with run.lock:
                    return self.hold(run)
            except RunOwned:
                if self._clock.elapsed() >= deadline:
                    raise
            self._clock.sleep(POLL_SECONDS)

    def renew(self, run: HeldRun, token: int) -> None:
        """Move the lease's end. Raises `LeaseLost` where the run was taken over; it is not held here any more then."""
        with run.lock:
            expires = self._clock.elapsed() + self._lease_seconds
            if not run.is_held or run.token != token:
                raise LeaseLost(run.run_id, token)
            try:
                inbox = self._store.renew(run.run_id, token, self._lease_seconds)
            except (LeaseLost, RunNotFound):
                self.lost(run)
                raise LeaseLost(run.run_id, token) from None
            run.expires = expires
            if inbox != run.inbox:
                self.fetch_requests(run)

    def fetch_requests(self, run: HeldRun) -> None:
        """Read what others ask of the run; the next append answers it."""
        requests = self._store.inbox(run.run_id, after=run.history.honoured)
        if requests:
            run.inbox = requests[-1].id
        run.requests = run.unanswered(requests)

    def require(self, run: HeldRun, token: int) -> None:
        """Raises where the run is not ours under this token any more. What was in doubt is read anew."""
        if self._is_closed:
            raise StoreUnavailable(
                f"the ledger was closed while a step of run {run.run_id!r} was under way: its outcome cannot be written, so the "
                "step is in doubt. Open the ledger anew and run the program again."
            )
        if not run.is_held and run.token == token:
            try:
                self.hold(run)
            except RunOwned:
                raise LeaseLost(run.run_id, token) from None
        if run.token != token:
            raise LeaseLost(run.run_id, token)

    def lost(self, run: HeldRun) -> None:
        """Somebody else has the run. What is in flight here is the new owner's to settle."""
        run.is_held = False
        run.token = 0  # what was begun under the old one has lost it, whoever holds the run next
        run.in_flight.clear()
        run.owed = []

    def failed(self, run: HeldRun, drafts: list[Draft], error: BaseException) -> None:
        """An append failed. What functions have done is owed to the log; where it is not known what was written, it is read anew."""
        if isinstance(error, LeaseLost):
            self.lost(run)
            return
        if isinstance(error, StoreError):
            # An outcome that goes before another step's intent is decided anew with it.
            run.owed += [draft for draft in drafts if draft.kind == "outcome" and draft.position in run.in_flight]
        if not isinstance(error, StoreBusy | StoreFull):  # those two say that nothing was written
            run.is_held = False

    def give_back(self, run: HeldRun, note: str | None = None, *, is_visit: bool = False) -> None:
        """Let go of the run, so that anybody may claim it at once. The parent of one that has ended is told before.

        `is_visit`: nothing was done that its program does, so a worker is to look at it at once.
        """
        with run.lock:
            if run.is_held:
                history = run.history
                if history.state.is_terminal and history.queue is not None:
                    for waiting in waits.watchers(run):
                        self._tell(run, waiting)
                due_in = schedule.due_in(run, self._clock.now())
                if is_visit and not history.state.is_terminal:
                    due_in = 0.0
                run.is_held = False  # first: whoever is interrupted here claims it again like anybody
                self._store.release(run.run_id, run.token, inbox=run.inbox, due_in=due_in)
                if note is not None:
                    self._store.annotate(run.run_id, run.token, note)
                run.slim()

    def _tell(self, run: HeldRun, parent: str) -> None:
        """Tell the parent how its child has ended. It is woken the later the longer its own replay takes: many may end at once."""
        said = {"name": run.run_id, "value": waits.ended(run), "by": f"run {run.run_id}"}
        summary = next(iter(self._store.summaries(parent)), None)
        if summary is not None:
            wake_in = min(_LONGEST_WAKE_SECONDS, summary.last.seq * _WAKE_SECONDS_PER_ENTRY)
            payload = canonical.encode(said)
            with suppress(RunMoved):  # and this one with it: it is told there
                self._store.post(parent, "signal", payload, str(said["by"]), self._clock.now(), due_in=wake_in)

    def _held_now(self, run_id: str) -> HeldRun | None:
        run = self._runs.get(run_id)
        return run if run is not None and run.is_held else None

    def held(self) -> list[HeldRun]:
        """The runs that are held now."""
        return [run for run in list(self._runs.values()) if run.is_held]

    def close(self, *, keeps_store: bool = False) -> None:
        """Let go of everything. The store gives the leases back as it closes, unless it is another's to close."""
        _alive.discard(self)
        self._is_closed = True
        self._stop.set()
        for run in self.held():
            with run.lock:
                run.is_held = False
        # Its last beat is over soon, unless it waits for a lock that the frame below a signal handler holds.
        if self._heart is not None and self._heart.acquire(timeout=_LAST_BEAT_SECONDS):
            self._heart.release()
        if not keeps_store:
            self._store.close()

    # --- heartbeat ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._heart is None:
                self._heart = threading.Lock()
                self._heart.acquire()
                # Not `threading.Thread`, whose start waits until the new thread has had its turn: every resume would pay for that.
                arguments = (weakref.ref(self), self._stop, self._heartbeat_seconds, self._heart)
                _thread.start_new_thread(_beat, arguments)

    def beat(self) -> None:
        """Renew every lease that is in use: a step in flight, a call on the stack, or a step since the last beat."""
        for run in self.held():
            with run.lock:
                if run.is_held and (run.made or run.pins or run.is_touched):
                    run.is_touched = False
                    try:
                        self.renew(run, run.token)
                    except Exception:
                        # A lost lease stops the run's next write. Whatever else is wrong shows there, too, and not in this thread,
                        # which must go on beating for the other runs.
                        continue


def _beat(leases: weakref.ref[Leases], stop: threading.Event, seconds: float, heart: threading.Lock) -> None:
    try:
        while not stop.wait(seconds):
            alive = leases()
            if alive is None:
                return
            alive.beat()
            del alive
    finally:
        heart.release()


_alive: weakref.WeakSet[Leases] = weakref.WeakSet()


def _in_child() -> None:
    for leases in list(_alive):
        leases._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
