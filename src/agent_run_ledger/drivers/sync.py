"""The synchronous driver: performs what a flow asks for, in the caller's thread."""

from __future__ import annotations

import random
import sys
import warnings
from contextlib import suppress
from typing import Any, TypeVar, cast

from agent_run_ledger.contract import Clock, Store
from agent_run_ledger.drivers.context import StepContext, step_variable
from agent_run_ledger.drivers.leases import HeldRun, Leases
from agent_run_ledger.engine.commit import prepare
from agent_run_ledger.engine.effects import Ask, Commit, Flow, Invoke, Moment, Result, Wait, Warn
from agent_run_ledger.engine.log import Sealed
from agent_run_ledger.errors import LeaseLost, Reentered, StoreBusy, StoreError, StoreFull

T = TypeVar("T")


class SyncDriver:
    """Obeys flows. Many threads may use one driver; what depends on a run is done under that run's lock."""

    def __init__(self, store: Store, clock: Clock, leases: Leases, durability: str) -> None:
        self._store = store
        self._clock = clock
        self._leases = leases
        self._synced = durability == "full"
        self._warned: set[str] = set()

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
            return self._commit(effect)
        if isinstance(effect, Invoke):
            return self._invoke(effect)
        if isinstance(effect, Wait):
            return self._wait(effect)
        if isinstance(effect, Warn):
            return self._warn(effect)
        with suppress(StoreError):  # what made the flow let go is the news; the lease runs out by itself
            self.give_back(cast(HeldRun, effect.run), effect.note)
        return None

    def give_back(self, run: HeldRun, note: str | None = None) -> None:
        """Let go of the run, once nothing is owed to its log any more. Raises a `StoreError` and keeps it where that fails."""
        with run.lock:
            if run.is_held:
                self.pay(run)
                self._leases.give_back(run, note)

    def pay(self, run: HeldRun) -> None:
        """Write the outcomes that the store could not take before. Call under the run's lock, with the run held."""
        while run.owed:
            if self._append(run, run.owed, synced=True):
                run.owed = []

    def close(self) -> None:
        """Write what is owed, as far as that can be done, and let go of everything."""
        held = self._leases.held()
        if any(run.lock._is_owned() for run in held):  # type: ignore[attr-defined] # a signal handler closes
            raise Reentered("closing the ledger")
        for run in held:
            with run.lock, suppress(StoreError, LeaseLost):
                self.pay(run)
        self._leases.close()

    def _commit(self, effect: Commit) -> Any:
        run = cast(HeldRun, effect.run)
        if run.lock._is_owned():  # type: ignore[attr-defined] # by this very thread, which a signal handler interrupted
            raise Reentered(f"run {run.run_id!r}")
        with run.lock:
            before = run.in_flight
            try:
                return self._decide(run, effect)
            except Exception:
                raise
            except (
                BaseException
            ):  # interrupted between the write and the flow's next line: nobody else would let go of the step
                if run.in_flight is not None and run.in_flight is not before:
                    run.leave(run.in_flight)
                raise

    def _decide(self, run: HeldRun, effect: Commit) -> Any:
        if effect.token is not None:
            self._leases.require(run, effect.token)
        elif run.is_held and self._clock.elapsed() < run.expires:
            run.is_touched = True  # the usual case, without a further call
        else:
            self._leases.hold(run)
        if run.owed:
            self.pay(run)
        while True:
            plan, sealed = prepare(run, effect.decide, Moment(self._clock.now(), random.random()))
            if not sealed or self._append(run, sealed, self._synced if plan.synced is None else plan.synced):
                break
        if plan.call is not None:
            plan.call.step = run.in_flight
        if plan.reached is not None:
            run.advance(plan.reached)
            run.replayed += plan.is_replay
        if plan.error is not None:
            raise plan.error
        return plan.answer

    def _append(self, run: HeldRun, sealed: list[Sealed], synced: bool) -> bool:
        """Append and take in; False where somebody has asked something of the run meanwhile, so decide again."""
        try:
            written = self._store.append(run.run_id, run.token, run.inbox, [row for row, _ in sealed], synced=synced)
            if written:
                run.absorb(sealed)
        except LeaseLost:
            self._leases.lost(run)
            raise
        except StoreError as error:
            # Only what the function has done is owed. An outcome that goes before another step's intent is decided anew with it.
            step = run.in_flight
            if step is not None and any(row.kind == "outcome" and row.position == step.position for row, _ in sealed):
                run.owed = sealed
                run.in_flight = None
                run.stand_before(step)
            if not isinstance(error, StoreBusy | StoreFull):  # those two say that nothing was written
                self._leases.doubt(run)
            raise
        except BaseException:
            self._leases.doubt(run)
            raise
        if not written:
            self._leases.fetch_requests(run)
        return written

    def _invoke(self, effect: Invoke) -> Result:
        run = cast(HeldRun, effect.run)
        # The process may have been stopped since the intent was written, or the ledger closed by another thread.
        self._leases.require(run, effect.step.token)
        if self._clock.elapsed() >= run.expires:
            self._leases.renew(run, run.token)
        if run.replayed:
            self._tell_replayed(run)
        token = step_variable.set(StepContext(self._leases, run, effect.step))
        try:
            value = effect.function(**effect.arguments)
        except BaseException as error:
            return Result(None, error)
        finally:
            step_variable.reset(token)
        if hasattr(type(value), "__await__"):  # asked of the class: an object may answer for itself with anything
            if hasattr(type(value), "close"):
                value.close()
            return Result(
                None, TypeError(f"{effect.step.tool!r} returned an awaitable: a synchronous run cannot await it")
            )
        return Result(value, None)

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
    def _tell_replayed(run: HeldRun) -> None:
        """One INFO line a resume, for programs that log; `logging` is not imported for those that do not."""
        logging = sys.modules.get("logging")
        if logging is not None:
            logging.getLogger("agent_run_ledger").info(
                "run %s: replayed %d recorded steps of a run begun at Unix time %.0f", run.run_id, run.replayed,
                run.history.created_at,
            )  # fmt: skip
        run.replayed = 0
