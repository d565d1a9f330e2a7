"""A worker: takes runs that are due, has them gone on with in threads and an event loop, and says that it lives."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agent_run_ledger.contract import Lease, QueueTerms
from agent_run_ledger.drivers.context import place_variable, step_variable
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine.effects import Result
from agent_run_ledger.errors import InvalidArguments, LedgerError, StoreError, StoreReadOnly, StoreUnavailable
from agent_run_ledger.fleet import ending
from agent_run_ledger.fleet.watching import MOST_RUNNING
from agent_run_ledger.redacting import of_this_process, redacted
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import LIBRARY_VERSION
from agent_run_ledger.working import awork, is_async, work

if TYPE_CHECKING:
    from agent_run_ledger.drivers.asynchronous import Loop
    from agent_run_ledger.fleet.health import Health
    from agent_run_ledger.ledger import AgentRunLedger

_MOST_SLOTS = 10_000
_MOST_AT_ONCE = 100
"""How many runs one claim takes."""
_LONGEST_SWEEP_SECONDS = 5.0
"""How long a dead owner's run waits at the most until somebody looks."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""How long a store that is away is left alone."""
SILENT_SECONDS = 30.0
"""So long may the loop that claims be silent, and the store not have answered, until its health is called bad."""
_SUSPECT_DEATHS = 2
"""Runs of which so many owners have died since the last entry are worked on one at a time: one of them may take the process along, and that
the others did not shows when they write something."""
_APART_SECONDS = 1.0
"""How long such a run is left alone while there is another."""
_STRAY_SECONDS = 5.0
"""After which a run may be taken again whose work could not be begun, or ended in no good order."""
_LONGEST_POLL_SECONDS = 3600.0
_LISTENING_SECONDS = 0.5
_MARGIN_SECONDS = 5.0
"""Beyond the time to drain, whoever stops a worker waits so long for its last words."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One run that is worked on. The next time that it is worked on is another slot, perhaps before this one is told to be free."""

    lease: Lease
    outages: int = 0
    """How often its work met a store that was away."""
    error: BaseException | None = None
    """What came out of its work that does not end in good order: whatever became of the run, it is not to be lost."""
    again_at: float | None = None
    """When it is looked at again after one of these, in seconds of the elapsed clock; None while it is worked on."""


class Worker:
    """Goes on with runs of some queues until it is stopped: what `AgentRunLedger.worker` starts.

    It is an owner of its own, `name`. As a context manager it is stopped at the end.
    """

    def __init__(
        self,
        ledger: AgentRunLedger,
        concurrency: int,
        queues: Sequence[str],
        poll_seconds: float,
        name: str | None,
        health: tuple[str, int] | None,
        drain_seconds: float | None,
    ) -> None:
        _check(concurrency, queues, poll_seconds, drain_seconds)
        of_this_process()  # a private list that cannot be used is found here, and not when there is something to log
        if ledger._leases.is_closed:
            raise StoreUnavailable("this ledger is closed; no worker was started. Open it anew.")
        label = check_name("name", name) if name is not None else None
        names = dict.fromkeys(check_name("queue", queue) for queue in queues)
        self._home = ledger
        self._ledger = ledger._beside(label)
        self._leases, self._store, self._clock = self._ledger._leases, self._ledger._store, self._ledger._clock
        self._lease_seconds, self._heartbeat_seconds = self._ledger._terms[1:3]
        self.name = self._leases.owner
        """Who owns the runs that it works on: its name, or host and process, and something that no other worker has."""
        self.concurrency = concurrency
        """How many runs it works on at once."""
        self.queues = tuple(names)
        """The queues that it serves."""
        self._poll_seconds, self._drain_seconds = poll_seconds, drain_seconds
        self._sweep_seconds = min(self._lease_seconds / 3, _LONGEST_SWEEP_SECONDS)
        self._started_at = self._clock.now()
        self._pid = os.getpid()

        self._changed = threading.Condition()
        self._slots: set[_Slot] = set()
        self._is_stopping = False
        self._is_drained = False
        self._over = threading.Event()
        self._may_be_due = True
        """Whether there may be something to claim."""
        self._pause = _FIRST_PAUSE_SECONDS
        self._is_alone = False
        """Whether the store was away when it was asked last."""
        self._loop: Loop | None = None
        self._beats_at = self._sweeps_at = self._ticked_at = self._answered_at = self._clock.elapsed()
        self._health: Health | None = None
        if health is not None:
            from agent_run_ledger.fleet.health import Health

            self._health = Health(self, health)
        try:
            self._say()
        except StoreReadOnly:
            if self._health is not None:
                self._health.close()
            raise
        except StoreError:
            pass  # it may be away for a while, as at any time
        ledger._workers.add(self)
        ending.guard(self)  # before it works on anything
        try:
            threading.Thread(target=Context().run, args=(self._live,), name=f"worker {self.name}", daemon=True).start()
        except BaseException:  # no thread is to be had
            self._leave()
            raise

    def __repr__(self) -> str:
        return f"<Worker {self.name!r} of {', '.join(self.queues)}: {self.state}, {len(self._slots)} of {self.concurrency} runs>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- what others ask of it ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`running`, `draining`, or `stopped`."""
        return (
            "stopped" if self._over.is_set() or self._is_elsewhere else "draining" if self._is_stopping else "running"
        )

    @property
    def running(self) -> list[str]:
        """The ids of the runs that it works on."""
        with self._changed:
            return [slot.lease.run_id for slot in self._slots]

    @property
    def agents(self) -> list[str]:
        """The names of the agents that it knows by now."""
        return sorted(self._ledger._agents)

    @property
    def health_address(self) -> tuple[str, int] | None:
        """Where it says how it is, if it was given an address: host, and the port that was found where 0 was given."""
        return self._health.address if self._health is not None else None

    def drain(self) -> None:
        """Take nothing new and begin no new step; give each run back when its steps in flight have ended. Waits for nothing."""
        if not self._is_stopping and not self._is_elsewhere:
            self._is_stopping = True
            self._leases.drain()
            with self._changed:
                self._changed.notify_all()
            with suppress(StoreError):  # it looks by itself before long
                self._store.wake()

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, and wait until that is done or `timeout` is up: whether all that was in flight has ended and was given back.

        Steps in flight are never interrupted. Those that outlast the `drain_seconds` of the worker go on in their threads, and their runs
        stay this worker's for as long. In one of its own runs this does not wait.
        """
        if self._is_elsewhere:
            return True
        self.drain()
        if not self._is_called_by_itself():
            self.wait(self._longest(timeout))
            ending.unguard(self)  # here, too: only the main thread may say what a signal does
        return self._is_drained

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker has ended, or `timeout` is up: whether it has."""
        return self._is_elsewhere or self._over.wait(timeout)

    def run(self) -> None:
        """Wait until the worker has ended; in the main thread the first SIGTERM or Ctrl-C drains it, a second one ends the process.

        Raises `SystemExit` where steps in flight outlasted `drain_seconds`, so that the process ends with them. Signals for which the
        program has a handler of its own are left to that.
        """
        with ending.awaited(self):
            while not self.wait(_LISTENING_SECONDS):  # a signal that comes just before a wait is only handled behind it
                pass

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a forked child, which has none of the threads, and locks that nobody will ever release."""
        return os.getpid() != self._pid

    def _longest(self, timeout: float | None) -> float | None:
        if self._drain_seconds is None:
            return timeout
        longest = self._drain_seconds + _MARGIN_SECONDS
        return longest if timeout is None else min(timeout, longest)

    def _is_called_by_itself(self) -> bool:
        place, step = place_variable.get(), step_variable.get()
        run_id = step.run_id if step is not None else place.run.run_id if place is not None else None
        return run_id in self.running

    # --- how it is ----------------------------------------------------------------------------------------------------

    def why_unhealthy(self) -> str | None:
        """None where the loop that claims goes round, else since when it does not, in a sentence."""
        silent = self._clock.elapsed() - self._ticked_at
        most = SILENT_SECONDS + (self._ledger._outage_seconds if self._store.is_remote else 0.0)
        return None if silent < most else f"the loop that claims runs has been silent for {silent:.0f} s"

    def why_unready(self) -> str | None:
        """None where it takes runs that are due, else why it does not, in a sentence."""
        if self._is_stopping:
            return "it is draining"
        silent = self._clock.elapsed() - self._answered_at
        return None if silent < SILENT_SECONDS else f"the store has not answered for {silent:.0f} s"

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while not self._is_stopping:
                self._try(self._go_round)
            self._end()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._health is not None:
            self._health.close()
        self._home._workers.discard(self)
        ending.unguard(self)
        self._over.set()

    def _try(self, act: Callable[[], None]) -> None:
        """Do what may meet a store that is away: that is waited for a little, and it ends no worker."""
        self._ticked_at = self._clock.elapsed()
        try:
            act()
        except StoreError as error:
            if not self._is_alone:
                _log("warning", "worker %s: the store is away, and is tried again: %s", self.name, str(error))
            self._leave_alone()
        except Exception as error:
            _log("error", "worker %s goes on after an error of its own", self.name, error=error)
            self._leave_alone()

    def _leave_alone(self) -> None:
        self._is_alone = True
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        with self._changed:
            if not self._is_stopping or self._slots:
                self._changed.wait(pause)

    def _has_answered(self) -> None:
        self._answered_at = self._clock.elapsed()
        if self._is_alone:
            self._is_alone, self._pause, self._may_be_due = False, _FIRST_PAUSE_SECONDS, True
            _log("info", "worker %s: the store answers again", self.name)

    def _go_round(self) -> None:
        """Claim what there is room for, or wait until there may be something to do."""
        self._keep_house()
        agents = tuple(self._ledger._agents)
        free = self.concurrency - len(self._slots)
        if not free:
            self._await_a_slot()
            return
        is_refused = False
        if self._may_be_due and agents:
            at_most = min(free, _MOST_AT_ONCE)
            leases = self._leases.claim_due(self._terms, agents, at_most)
            self._has_answered()
            for lease in self._without_two_suspects(leases):
                self._begin(lease)
            self._may_be_due = len(leases) == at_most
            if leases:
                return
            is_refused = True
        due_in = self._store.next_due(self.queues, agents) if agents else None
        self._has_answered()
        if due_in == 0.0 and not is_refused:
            self._may_be_due = True
            return
        pause = min(self._poll_seconds, self._until_house())
        if due_in:  # what is due now a limit keeps from being taken, or somebody else is taking it
            pause = min(pause, due_in)
        self._may_be_due = self._store.wait_for_work(pause)

    def _await_a_slot(self) -> None:
        with self._changed:
            if not self._is_stopping and len(self._slots) >= self.concurrency:
                self._changed.wait(self._until_house())
        self._may_be_due = True

    def _end(self) -> None:
        """Wait for what is in flight, as long as that may take, and leave."""
        began = self._beats_at = self._clock.elapsed()  # others are told at once
        while self._slots:
            lasted = self._clock.elapsed() - began
            if self._drain_seconds is not None and lasted >= self._drain_seconds:
                break
            if lasted >= self._lease_seconds and all(slot.again_at is not None for slot in list(self._slots)):
                break  # the store is away, and by now their leases are over
            self._try(self._keep_house)
            left = math.inf if self._drain_seconds is None else self._drain_seconds - lasted
            with self._changed:
                if self._slots:
                    self._changed.wait(max(0.0, min(left, self._until_house())))
        self._is_drained = not self._slots
        with suppress(StoreError):
            self._store.leave(self.name)
        if self._loop is not None:
            self._loop.close()
        if self._is_drained:
            with suppress(LedgerError):
                self._ledger.close()

    # --- what it does beside ------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """What is to be done from time to time, whatever else there is."""
        now = self._clock.elapsed()
        if now >= self._beats_at:
            self._say()
            self._beats_at = now + self._heartbeat_seconds
            self._has_answered()
        if now >= self._sweeps_at and not self._is_stopping:
            if self._store.free_dead():
                self._may_be_due = True
            self._sweeps_at = now + self._sweep_seconds
        for slot in list(self._slots):
            if slot.again_at is not None and now >= slot.again_at:
                self._look_again(slot)

    def _until_house(self) -> float:
        """Seconds until there is something of that to be done."""
        times = [slot.again_at for slot in list(self._slots) if slot.again_at is not None]
        if not self._is_stopping:
            times.append(self._sweeps_at)
        return max(0.0, min([self._beats_at, *times]) - self._clock.elapsed())

    def _say(self) -> None:
        """Tell others that it lives, and what it does."""
        running = self.running
        said = {
            "host": socket.gethostname(),
            "pid": self._pid,
            "started_at": self._started_at,
            "state": self.state,
            "queues": self.queues,
            "limits": {each.name: each[1:] for each in self._terms if each.is_limited},
            "agents": self.agents,
            "concurrency": self.concurrency,
            "running": running[:MOST_RUNNING],
            "running_count": len(running),
            "lease_seconds": self._lease_seconds,
            "version": LIBRARY_VERSION,
        }
        self._store.beat(self.name, json.dumps(said).encode())

    @property
    def _terms(self) -> list[QueueTerms]:
        """Its queues, and what is declared about them by now."""
        declared = self._ledger._queues
        return [declared.get(queue) or QueueTerms(queue) for queue in self.queues]

    def _look_again(self, slot: _Slot) -> None:
        """Go on with a run after an outage, or make sure that nobody loses one that was left by what is no ordinary error."""
        lease, error = slot.lease, slot.error
        if error is None:
            slot.again_at = None
            self._set_to_work(slot)
        elif self._leases.run(lease.run_id).pins:  # it is still to be written how it stands
            slot.again_at = self._clock.elapsed() + _FIRST_PAUSE_SECONDS
        else:
            self._leases.put_back(lease, _STRAY_SECONDS)  # nothing happens where it was given back, as it should be
            self._free(slot)
            _log("error", "worker %s: run %s was left by %s", self.name, lease.run_id, repr(error), error=error)

    def _free(self, slot: _Slot) -> None:
        with self._changed:
            self._slots.discard(slot)
            self._changed.notify_all()
        if any(each.is_limited for each in self._terms):  # there may be room for one that waits
            self._store.wake()

    # --- work ---------------------------------------------------------------------------------------------------------

    def _without_two_suspects(self, leases: list[Lease]) -> list[Lease]:
        """Those of them that may be begun now. What has to wait is given back first, so that nobody takes it along."""
        suspects = [lease for lease in leases if lease.deaths >= _SUSPECT_DEATHS]
        if not any(self._is_suspect(slot.lease) for slot in list(self._slots)):
            suspects = suspects[1:]
        for lease in suspects:
            with suppress(StoreError):  # the lease runs out by itself
                self._leases.put_back(lease, _APART_SECONDS)
        return [lease for lease in leases if lease not in suspects]

    def _is_suspect(self, lease: Lease) -> bool:
        """Whether nothing was heard yet of a run that is worked on here and may be what its owners died of."""
        return lease.deaths >= _SUSPECT_DEATHS and self._leases.run(lease.run_id).history.token != lease.token

    def _begin(self, lease: Lease) -> None:
        if self._is_stopping:
            with suppress(StoreError):  # the lease runs out by itself
                self._leases.put_back(lease)
            return
        slot = _Slot(lease)
        with self._changed:
            self._slots.add(slot)
        self._set_to_work(slot)

    def _set_to_work(self, slot: _Slot) -> None:
        """Have the run gone on with, elsewhere."""
        ledger, lease, ended = self._ledger, slot.lease, partial(self._ended, slot)
        if not is_async(ledger, lease):
            task = Work(partial(work, ledger, lease), {}, f"run {lease.run_id}")
            task.when_over(lambda: ended(task.result))
            with suppress(RuntimeError):  # no thread is to be had: then that is its result
                task.start()
            return
        if self._loop is None:
            self._loop = ledger._asynchronous.loop(f"runs of {self.name}")
        try:
            self._loop.start(partial(awork, ledger, lease), ended)
        except RuntimeError as error:
            ended(Result(None, error))

    def _ended(self, slot: _Slot, result: Result) -> None:
        """Its work is over, for now or for good. Called where it was done, so nothing is waited for."""
        error, pause = result.error, 0.0
        if error is None:
            self._free(slot)
            return
        if isinstance(error, StoreError):
            # What its steps have done is owed to the log: it is gone on with here, and that is written first.
            pause = min(_FIRST_PAUSE_SECONDS * 2**slot.outages, _LONGEST_PAUSE_SECONDS)
            slot.outages += 1
        else:
            slot.error = error
        with self._changed:
            slot.again_at = self._clock.elapsed() + pause
            self._changed.notify_all()
        with suppress(StoreError):
            self._store.wake()


def _check(concurrency: int, queues: object, poll_seconds: float, drain_seconds: float | None) -> None:
    if type(concurrency) is not int or not 1 <= concurrency <= _MOST_SLOTS:
        raise InvalidArguments(f"concurrency is a whole number from 1 to {_MOST_SLOTS}, not {concurrency!r}")
    if isinstance(queues, str) or not isinstance(queues, Sequence) or not queues:
        raise InvalidArguments(f'queues are names, like ("default",), and at least one; not {queues!r}')
    if type(poll_seconds) not in (int, float) or not 0 < poll_seconds <= _LONGEST_POLL_SECONDS:
        raise InvalidArguments(
            f"poll_seconds is a number of seconds, more than 0 and at most {_LONGEST_POLL_SECONDS:.0f}, not {poll_seconds!r}"
        )
    if drain_seconds is not None and (type(drain_seconds) not in (int, float) or not 0 <= drain_seconds < math.inf):
        raise InvalidArguments(f"drain_seconds is a number of seconds of at least 0, or None, not {drain_seconds!r}")


def _log(level: str, text: str, *about: str, error: BaseException | None = None) -> None:
    """A line for programs that log, without secrets; `logging` is not imported for those that do not.

    The traceback of an error is text, and no `exc_info`: what handlers would make of that nobody could redact.
    """
    logging = sys.modules.get("logging")
    if logging is not None:
        if error is not None:
            text, about = f"{text}\n%s", (*about, "".join(traceback.format_exception(error)).rstrip())
        getattr(logging.getLogger("agent_run_ledger"), level)(text, *map(redacted, about))
