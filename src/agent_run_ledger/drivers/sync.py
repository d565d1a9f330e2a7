"""The synchronous driver: performs what a flow asks for, in the caller's thread."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

from agent_run_ledger.contract import Clock, Store
from agent_run_ledger.drivers.context import StepContext, caller, step_variable
from agent_run_ledger.drivers.leases import POLL_SECONDS, HeldRun, Leases, is_owed
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.commit import prepare
from agent_run_ledger.engine.effects import (
    Ask,
    AwaitLate,
    Commit,
    Draw,
    Fetch,
    Flow,
    Inquire,
    Invoke,
    Quiet,
    Rest,
    Result,
    Room,
    Turn,
    Wait,
    Warn,
)
from agent_run_ledger.engine.log import Draft, Sealed, seal
from agent_run_ledger.engine.steps import is_replay
from agent_run_ledger.errors import LeaseLost, Reentered, StoreError
from agent_run_ledger.rules.budget import Most

T = TypeVar("T")

LONGEST_POLL_SECONDS = 0.5
"""How long whoever waits for a signal looks away at the most."""
FIRST_DRAW_SECONDS, DRAW_SECONDS = 0.005, 1.0
"""How soon an account that has no room is asked again, and for how long before the run is looked at anew."""


class Suspended(BaseException):
    """The program of a run waits for what has not come: nobody waits with it. It is begun anew when there is a reason to."""


class MustWait(Exception):
    """A commit has to be synced, and whoever asked for it is not to wait for the disk."""


class SyncDriver:
    """Obeys flows. Many threads may use one driver; what depends on a run is done under that run's lock."""

    def __init__(self, store: Store, clock: Clock, leases: Leases, durability: str) -> None:
        self._store = store
        self._clock = clock
        self._leases = leases
        self._synced = durability == "full"
        self._warned: set[str] = set()

    def make(self, run: HeldRun, call: Call) -> None:
        """The program makes this call now, in the calling thread or task. Raises `UnorderedStep`."""
        call.store_arguments()
        call.maker = caller()
        if run.lock._is_owned():  # type: ignore[attr-defined] # by this very thread, which a signal handler interrupted
            raise Reentered(f"run {run.run_id!r}")
        with run.lock:
            run.make(call)
            is_ready = run.is_held and not (run.requests or run.owed) and self._clock.elapsed() < run.expires
            if is_ready and is_replay(run, call):
                call.is_replay = run.is_touched = True
                run.replayed += 1

    def obey(self, flow: Flow[T]) -> T:
        """Perform the flow's effects one after the other; return what it returns, raise what it raises."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                effect = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as stop:
                return cast(T, stop.value)
            finally:
                error = None
            try:
                answer = self.perform(effect)
            except BaseException as raised:
                error = raised

    def perform(self, effect: Ask) -> Any:
        """Perform one effect and answer it. A test overrides this to stop at every effect, as a crash would."""
        if isinstance(effect, Commit):
            return self.commit(effect)
        if isinstance(effect, Invoke):
            return self._invoke(effect)
        if isinstance(effect, Wait):
            return self._wait(effect)
        if isinstance(effect, Warn):
            return self._warn(effect)
        if isinstance(effect, Turn):  # whoever calls from a thread of his own is in nobody's order
            return self._take_turn(effect)
        if isinstance(effect, Quiet | Room):
            return self._wait_for_quiet(effect)
        if isinstance(effect, Draw):
            return self._draw(effect)
        if isinstance(effect, AwaitLate):
            return self._await_late(effect)
        if isinstance(effect, Fetch):
            return self._store.payload(effect.run.run_id, effect.seq)
        if isinstance(effect, Inquire):
            return self._inquire(effect)
        if isinstance(effect, Rest):
            return self._rest(effect)
        with suppress(StoreError):  # what made the flow let go is the news; the lease runs out by itself
            self.give_back(cast(HeldRun, effect.run), effect.note, is_visit=effect.is_visit)
        return None

    def give_back(self, run: HeldRun, note: str | None = None, *, is_visit: bool = False) -> None:
        """Let go of the run, once nothing is owed to its log any more. Raises a `StoreError` and keeps it where that fails.

        It is kept, too, where somebody has made a call meanwhile: the last one that ends lets go of it.
        """
        with run.lock:
            if run.is_held and run.made.keys() <= run.resting:
                self.pay(run)
                self._leases.give_back(run, note, is_visit=is_visit)

    def pay(self, run: HeldRun) -> None:
        """Write the outcomes that the store could not take before. Call under the run's lock, with the run held."""
        while run.owed:
            owed = [draft for draft in run.owed if is_owed(run, draft)]
            sealed = seal(run.history, run.token, self._clock.now(), owed)
            if not sealed or self._append(run, sealed, owed, synced=True):
                run.owed = []

    def close(self, *, keeps_store: bool = False) -> None:
        """Write what is owed, as far as that can be done, and let go of everything; of the store, too, unless it is another's."""
        held = self._leases.held()
        if any(run.lock._is_owned() for run in held):  # type: ignore[attr-defined] # a signal handler closes
            raise Reentered("closing the ledger")
        for run in held:
            with run.lock, suppress(StoreError, LeaseLost):
                self.pay(run)
        self._leases.close(keeps_store=keeps_store)

    def commit(self, effect: Commit, *, waits: bool = True) -> Any:
        """Decide and write. Raises `MustWait`, with nothing written, where that takes a sync for which nobody `waits`."""
        run: HeldRun
        run, decide, token, _ = effect  # type: ignore[assignment] # what drivers are given are runs that are held
        if run.lock._is_owned():  # type: ignore[attr-defined] # by this very thread, which a signal handler interrupted
            raise Reentered(f"run {run.run_id!r}")
        leases = self._leases
        with run.lock:
            self.make_ready(run, token)
            while True:
                prepared = prepare(run, (decide,), leases.moment())
                sealed = prepared.sealed
                synced = self._synced if prepared.synced is None else prepared.synced
                if sealed and synced and not waits:
                    raise MustWait
                if not sealed or self._append(run, sealed, prepared.drafts, synced=synced):
                    break
            plan = prepared.plans[0]
            run.replayed += plan.is_replay
            if plan.error is not None:
                raise plan.error
            return plan.answer

    def make_ready(self, run: HeldRun, token: int | None) -> None:
        """Hold the run, under its lock, known up to its last entry and with nothing owed to it. Raises where it is not ours."""
        if token is not None:
            self._leases.require(run, token)
        elif run.is_held and self._clock.elapsed() < run.expires:
            run.is_touched = True  # the usual case, without a further call
        else:
            self._leases.hold(run)
        if run.owed:
            self.pay(run)

    def _append(self, run: HeldRun, sealed: list[Sealed], drafts: list[Draft], *, synced: bool) -> bool:
        """Append and take in; False where somebody has asked something of the run meanwhile, so decide again."""
        try:
            rows = [sealed[0][0]] if len(sealed) == 1 else [row for row, _ in sealed]
            written = self._store.append(run.run_id, run.token, run.inbox, rows, synced=synced)
            if written:
                self._leases.wrote(run, sealed)
        except BaseException as error:
            self._leases.failed(run, drafts, error)
            raise
        if not written:
            self._leases.fetch_requests(run)
        return written

    def still_ours(self, run: HeldRun, token: int) -> None:
        """The process may have been stopped since the last entry was written, or the ledger closed by another thread."""
        self._leases.require(run, token)
        if self._clock.elapsed() >= run.expires:
            self._leases.renew(run, token)

    def _invoke(self, effect: Invoke) -> Result:
        run = cast(HeldRun, effect.run)
        self.still_ours(run, effect.step.token)
        if run.replayed:
            self.tell_replayed(run)
        token = step_variable.set(StepContext(self._leases, run, effect.step))
        try:
            if effect.timeout is None:
                value = effect.function(**effect.arguments)
            else:
                result = self._in_a_thread(run, effect, effect.timeout)
                if result.error is not None:
                    return result
                value = result.value
        except BaseException as error:
            return Result(None, error)
        finally:
            step_variable.reset(token)
        return _not_awaited(value, repr(effect.step.tool))

    def _inquire(self, effect: Inquire) -> Result:
        """The receipt function's result. It may hang, as its receiver may: where the tool has a timeout, it is left to itself then."""
        run = cast(HeldRun, effect.run)
        token = step_variable.set(StepContext(self._leases, run, effect.step))  # what it calls is no step of the run
        try:
            if effect.timeout is None:
                value = effect.question(effect.step.key, effect.arguments)
            else:
                work = Work(
                    lambda: effect.question(effect.step.key, effect.arguments), {}, f"receipt of {effect.step.tool}"
                )
                work.start()
                if not work.wait(effect.timeout):
                    return Result(None, TimeoutError(f"no answer within {effect.timeout:g} s"))
                if work.result.error is not None:
                    return work.result
                value = work.result.value
        except BaseException as error:
            return Result(None, error)
        finally:
            step_variable.reset(token)
        return _not_awaited(value, f"the receipt of {effect.step.tool!r}")

    def _rest(self, effect: Rest) -> bool:
        try:
            return self._rest_until(effect, *self.lie_down(effect))
        finally:
            cast(HeldRun, effect.run).resting.discard(effect.call.position)

    def _rest_until(self, effect: Rest, seen: int, end: float) -> bool:
        pause = POLL_SECONDS
        while self.still_rests(effect, seen, end):
            self._clock.sleep(min(pause, self.left(effect, end)))
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        return self.left(effect, end) <= 0

    def obey_side_by_side(self, flows: Iterator[Flow[Any]], at_once: int | None) -> list[Result]:
        """Perform flows of one run that mostly wait, in the calling thread: each until it rests, then all of them rest together.

        What they return or raise, in order. Each is begun as it is taken from `flows`; once one has failed no further one is.
        """
        results: dict[int, Result] = {}
        resting: dict[int, tuple[Flow[Any], Rest, int, float]] = {}
        numbered = enumerate(flows)

        def go_on(number: int, flow: Flow[Any], answer: Any = None, error: BaseException | None = None) -> None:
            while True:
                try:
                    effect = flow.send(answer) if error is None else flow.throw(error)
                except StopIteration as stop:
                    results[number] = Result(stop.value, None)
                    return
                except Exception as raised:
                    results[number] = Result(None, raised)
                    return
                if isinstance(effect, Rest):
                    resting[number] = flow, effect, *self.lie_down(effect)
                    return
                error = None
                try:
                    answer = self.perform(effect)
                except BaseException as raised:
                    error = raised

        try:
            while True:
                while at_once is None or len(resting) < at_once:
                    if any(result.error is not None for result in results.values()):
                        break
                    if (following := next(numbered, None)) is None:
                        break
                    go_on(*following)
                if not resting:
                    return [results[number] for number in sorted(results)]
                _, effect, _, end = next(iter(resting.values()))
                is_over = self._rest_until(effect, min(seen for _, _, seen, _ in resting.values()), end)
                for number, (flow, effect, _, _) in list(resting.items()):
                    cast(HeldRun, effect.run).resting.discard(effect.call.position)
                    del resting[number]
                    go_on(number, flow, is_over)
        except BaseException as stopped:  # none of them goes on
            for flow, _, _, _ in resting.values():
                with suppress(BaseException):
                    flow.throw(stopped)
            raise

    def lie_down(self, effect: Rest) -> tuple[int, float]:
        """This call needs nobody to hold its run. Returns how many requests were seen by now, and when it ends, on the elapsed clock."""
        run = cast(HeldRun, effect.run)
        with run.lock:
            if run.made.get(effect.call.position) is effect.call:  # it may have been interrupted just now
                run.resting.add(effect.call.position)
            return effect.call.heard, math.inf if effect.at_most is None else self._clock.elapsed() + effect.at_most

    def left(self, effect: Rest, end: float) -> float:
        """Seconds until its time has come: by the wall clock, and never more than it was meant to wait in all."""
        by_the_wall = math.inf if effect.until is None else effect.until - self._clock.now()
        return max(0.0, min(by_the_wall, end - self._clock.elapsed()))

    def still_rests(self, effect: Rest, seen: int, end: float, *, is_quiet: bool = False) -> bool:
        """Whether there is nothing to do yet; then nobody need hold the run. Raises `Suspended` where its program was told to end."""
        if cast(HeldRun, effect.run).is_suspended:
            raise Suspended  # by another of its calls: whoever has taken the run since is no news here
        if not effect.leaves and self.is_roused(effect, seen, end):
            return False
        self.may_rest(effect, is_quiet=is_quiet)
        return True

    def may_rest(self, effect: Rest, *, is_quiet: bool = False) -> None:
        """Let go of the run, if none of its calls does anything but wait. Raises `Suspended` where nobody is to wait in a thread.

        `is_quiet`: what else of its program is at work has made no call for so long that it may be taken to wait, too.
        """
        run = cast(HeldRun, effect.run)
        with run.lock:
            if run.is_resting or (is_quiet and run.made.keys() <= run.resting):
                run.is_suspended = run.suspends
                if run.is_held:
                    with suppress(StoreError):  # the lease runs out by itself
                        self.pay(run)
                        self._leases.give_back(run)
                if run.suspends:
                    raise Suspended

    def is_roused(self, effect: Rest, seen: int, end: float) -> bool:
        """Whether its time has come, or somebody may have sent what it waits for, or has the run."""
        run = cast(HeldRun, effect.run)
        if self.left(effect, end) <= 0:
            return True
        with run.lock:
            if run.made.get(effect.call.position) is not effect.call or run.history.state.is_terminal:
                return True
            head = self._store.head(run.run_id)
            if head is None or (not run.is_held and head.token != run.token):
                return True
            if head.inbox == seen and not (run.is_held and run.sent):
                return False
            if run.is_held and head.inbox != run.inbox:
                self._leases.fetch_requests(run)
            return True

    def _in_a_thread(self, run: HeldRun, effect: Invoke, seconds: float) -> Result:
        """The function's result, or a `TimeoutError` after `seconds`; the thread is left to itself then."""
        work = Work(effect.function, effect.arguments, effect.step.tool)
        try:
            work.start()
            if work.wait(seconds):
                return work.result
        finally:  # also where an interrupt ends the wait
            if not (work.is_over or work.take_back()):
                with run.lock:
                    run.leave_running(effect.step.position, work)
        return Result(None, TimeoutError(f"no result within {seconds:g} s"))

    def _await_late(self, effect: AwaitLate) -> Result | None:
        run = cast(HeldRun, effect.run)
        work = run.left_running.get(effect.position)
        if work is None:
            return None
        with run:
            end = None if effect.at_most is None else self._clock.elapsed() + effect.at_most
            while not work.wait(
                POLL_SECONDS if end is None else min(POLL_SECONDS, max(0.0, end - self._clock.elapsed()))
            ):
                if run.is_cancelled or (end is not None and self._clock.elapsed() >= end):
                    return None
        with run.lock:
            run.let_go_of(effect.position)
        return work.result

    @staticmethod
    def _take_turn(effect: Turn) -> None:
        run, position = cast(HeldRun, effect.run), effect.call.position
        if run.turns is not None:
            run.turns.waiting(position, effect.seq)
            run.turns.handed(position)
            if run.order is not None:
                run.order.look()  # somebody in the event loop may have waited for this one

    def _wait_for_quiet(self, effect: Quiet | Room) -> None:
        while not effect.is_over:
            self._clock.sleep(POLL_SECONDS)

    def _draw(self, effect: Draw) -> Most | str | None:
        pause, end = FIRST_DRAW_SECONDS, self._clock.elapsed() + DRAW_SECONDS
        while (answer := self._leases.accounts.draw(effect)) is None:
            self._clock.sleep(pause)
            if not self.still_draws(effect, end):
                break
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        return answer

    def still_draws(self, effect: Draw, end: float) -> bool:
        """Whether a call that waits for others to leave room in an account asks it again before its run is looked at anew."""
        run = effect.run
        return not (run.is_cancelled or run.is_draining) and self._clock.elapsed() < end

    def _wait(self, effect: Wait) -> None:
        run = cast(HeldRun, effect.run)
        with run:
            end = self._clock.elapsed() + min(effect.until - self._clock.now(), effect.at_most)
            while (left := end - self._clock.elapsed()) > 0 and not run.is_cancelled:
                self._clock.sleep(min(left, 1.0))

    def _warn(self, effect: Warn) -> None:
        if effect.text not in self._warned:
            self._warned.add(effect.text)
            warnings.warn(effect.text, effect.category, stacklevel=6)

    @staticmethod
    def tell_replayed(run: HeldRun) -> None:
        """One INFO line a resume, for programs that log; `logging` is not imported for those that do not."""
        logging = sys.modules.get("logging")
        if logging is not None:
            logging.getLogger("agent_run_ledger").info(
                "run %s: replayed %d recorded steps of a run begun at Unix time %.0f", run.run_id, run.replayed,
                run.history.created_at,
            )  # fmt: skip
        run.replayed = 0


def _not_awaited(value: Any, what: str) -> Result:
    """A function's value, unless it is one that has to be awaited."""
    if not hasattr(type(value), "__await__"):  # asked of the class: an object may answer for itself with anything
        return Result(value, None)
    if hasattr(type(value), "close"):
        value.close()
    return Result(None, TypeError(f"{what} returned an awaitable: a synchronous run cannot await it"))
