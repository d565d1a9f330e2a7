"""Forgetting: payloads of ended runs are erased behind an entry that says so, or old runs are deleted behind a tombstone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent_run_ledger.contract import Lease, Summary, Tombstone
from agent_run_ledger.drivers import reading
from agent_run_ledger.engine import erasing
from agent_run_ledger.engine.history import parse
from agent_run_ledger.engine.log import seal
from agent_run_ledger.errors import IllegalTransition, InvalidArguments, LedgerError, RunMoved
from agent_run_ledger.model import Collected, Forgotten
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.ledger import Ledger

_LEASE_SECONDS = 30.0


class Forgetting:
    """What one call of `forget` or `gc` does to the runs of a ledger, on whose behalf, and why.

    Each run is claimed, erased or deleted in one transaction, and given back, so at any moment a run is as it was or done. What was
    deleted from the tables leaves the storage last, in `scrub`: if this dies before, the same call again does that.
    """

    def __init__(self, ledger: Ledger, by: str, reason: str) -> None:
        self._ledger = ledger
        self._store = ledger._store
        self._by = by
        self._reason = reason

    def forget(
        self, run_id: str, step_number: int | None, *, everything: bool, is_tried: bool, scrub: bool
    ) -> Forgotten:
        """See `Operator.forget`."""
        erased = self._erase(self._ended(run_id), step_number, everything=everything, is_tried=is_tried)
        return erased if is_tried or not scrub else replace(erased, pending=tuple(self._store.scrub()))

    def collect(self, older_than: float, *, keep_proofs: bool, is_tried: bool, scrub: bool) -> Collected:
        """See `Operator.gc`."""
        before = self._ledger._clock.now() - older_than
        done: list[Forgotten] = []
        left: list[tuple[str, str]] = []
        for summary in self._store.summaries():
            run_id = summary.head.run_id
            try:
                if not self._is_old(summary, before):
                    continue
                self._refuse_needed(summary)
                if keep_proofs:
                    found = self._erase(summary, None, everything=False, is_tried=is_tried)
                    if found.payloads:
                        done.append(found)
                else:
                    done.append(self._delete(summary, is_tried=is_tried))
            except (LedgerError, ValueError, LookupError, TypeError) as error:
                left.append((run_id, str(error)))
        pending = self._store.scrub() if scrub and not is_tried else []
        return Collected(tuple(done), tuple(left), tuple(pending), is_tried)

    # --- which runs ---------------------------------------------------------------------------------------------------

    def _ended(self, run_id: str) -> Summary:
        """The summary of a run that has ended and that nobody needs. Raises `RunNotFound`, `RunMoved` and `IllegalTransition`."""
        summary = self._ledger._summary(run_id)
        state = RunState(parse(summary.last.body)["state"])
        if summary.head.moved_to is not None:
            raise RunMoved(run_id, summary.head.moved_to)
        if not state.is_terminal:
            raise IllegalTransition(
                state, "FORGET: its replay needs what is recorded. Cancel it first, or wait for its end", run_id
            )
        self._refuse_needed(summary)
        return summary

    def _is_old(self, summary: Summary, before: float) -> bool:
        """Whether the run has ended, here, before this time."""
        if summary.head.moved_to is not None or not RunState(parse(summary.last.body)["state"]).is_terminal:
            return False
        return self._ended_at(summary) < before

    def _ended_at(self, summary: Summary) -> float:
        """When the run ended, whatever was forgotten of it since."""
        return float(parse(self._ledger._end(summary).body)["at"])

    def _refuse_needed(self, summary: Summary) -> None:
        """Raises `IllegalTransition` where a run that goes on has begun this one, and may ask for its result yet."""
        run_id, parent = summary.head.run_id, parse(summary.first.body).get("parent")
        if not isinstance(parent, str):
            return
        found = next(iter(self._store.summaries(parent)), None)
        if found is None or found.head.moved_to is not None:
            return
        state = RunState(parse(found.last.body)["state"])
        if not state.is_terminal:
            ended = RunState(parse(summary.last.body)["state"])
            raise IllegalTransition(ended, f"FORGET before run {parent!r}, which has begun it, has ended, too", run_id)

    # --- what is done to one run --------------------------------------------------------------------------------------

    def _erase(self, summary: Summary, step_number: int | None, *, everything: bool, is_tried: bool) -> Forgotten:
        run_id = summary.head.run_id
        history = reading.read(self._store, run_id)
        step = None
        if step_number is not None:
            step = next((each for each in history.positions.values() if each.number == step_number), None)
            if step is None:
                raise InvalidArguments(f"run {run_id!r} has no step {step_number}; nothing was erased")
        rows = (row for page in reading.pages(self._store, run_id, payloads_up_to=0) for row in page)
        planned = erasing.plan(
            rows, history.secret, summary.head.inbox, self._by, self._reason, step=step, everything=everything
        )
        erased = Forgotten(
            run_id, str(history.state), self._ended_at(summary), planned.payloads, planned.erasure.secret, False
        )
        if planned.draft is None or is_tried:
            return erased
        with _Visit(self._ledger, summary) as lease:
            sealed = seal(history, lease.token, self._ledger._clock.now(), [planned.draft])
            self._store.erase(run_id, lease.token, [row for row, _ in sealed], planned.erasure)
        return erased

    def _delete(self, summary: Summary, *, is_tried: bool) -> Forgotten:
        run_id = summary.head.run_id
        history = reading.read(self._store, run_id)
        deleted = Forgotten(run_id, str(history.state), self._ended_at(summary), self._payloads(run_id), True, True)
        if is_tried:
            return deleted
        self._ledger._leases.accounts.settle(run_id)
        with _Visit(self._ledger, summary) as lease:
            now = self._ledger._clock.now()
            stone = Tombstone(run_id, history.size, history.root, self._by, self._reason, now)
            self._store.delete(stone, lease.token)
        return deleted

    def _payloads(self, run_id: str) -> int:
        pages = reading.pages(self._store, run_id, payloads_up_to=0)
        return sum(row.digest is not None for page in pages for row in page)


class _Visit:
    """A run that has ended, claimed for one write: nobody else writes to it meanwhile, and its lease is given back in any case."""

    def __init__(self, ledger: Ledger, summary: Summary) -> None:
        self._ledger = ledger
        self._run_id, self._inbox = summary.head.run_id, summary.head.inbox

    def __enter__(self) -> Lease:
        leases = self._ledger._leases
        self._lease = self._ledger._store.claim(self._run_id, leases.owner, _LEASE_SECONDS)
        return self._lease

    def __exit__(self, *_: object) -> None:
        self._ledger._leases.forget(self._run_id)
        self._ledger._store.release(self._run_id, self._lease.token, inbox=self._inbox)
