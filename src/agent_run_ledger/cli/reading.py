"""Look at a ledger and leave no trace in it: while an agent works on it, and where rows of it are damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agent_run_ledger import AgentRunLedger, LedgerError, RunRecord, RunState, StepRecord, StoreError, VerificationReport
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.records import step_records
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock

UNREADABLE = "UNREADABLE"
"""The status that is shown for a run whose first or last entry is damaged."""
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError)


@dataclass(slots=True)
class Steps:
    """The steps of a run as far as its entries can be read; `trouble` says where they cannot."""

    records: list[StepRecord] = field(default_factory=list)
    in_doubt: list[StepRecord] = field(default_factory=list)
    """Dispatched, without an outcome."""
    redispatched: set[int] = field(default_factory=set)
    """The numbers of steps that were dispatched again although their tool declares no effect."""
    trouble: str | None = None


class Reading:
    """One ledger, opened read-only."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._ledger = AgentRunLedger(store)

    def runs(self, status: str | None = None) -> list[RunRecord]:
        """All runs, oldest first. A run that cannot be read is among them, as `UNREADABLE`."""
        found = (self._run(summary.head.run_id) for summary in self.store.summaries())
        return [record for record in found if status is None or record.status == status]

    def run(self, run_id: str) -> RunRecord:
        """One run. Raises `RunNotFound`."""
        return self._run(run_id)

    def _run(self, run_id: str) -> RunRecord:
        try:
            return self._ledger.get_run(run_id)
        except LedgerError:
            raise
        except _DAMAGE as error:
            cause = f"its first or last entry cannot be read ({type(error).__name__}: {error}); `verify` says more"
            return RunRecord(run_id, None, UNREADABLE, 0, 0.0, 0.0, cause=cause)

    def steps(self, run_id: str) -> Steps:
        """The steps of a run up to the first entry that cannot be read."""
        rows = self.store.read(run_id)
        history = History(run_id, self.store.secret(run_id))
        steps = Steps()
        for row in rows:
            try:
                History.read(run_id, b"", ())
                _absorb(history, row)
            except _DAMAGE as error:
                steps.trouble = f"entry {row.seq} cannot be read ({type(error).__name__}: {error}); what follows it is not shown"
                break
        for step in history.positions.values():
            try:
                (record,) = step_records(_only(history, step))
            except _DAMAGE as error:
                steps.trouble = steps.trouble or f"step {step.number} cannot be read ({type(error).__name__}: {error})"
                continue
            steps.records.append(record)
            if step.outcome is None:
                steps.in_doubt.append(record)
            if step.redispatched:
                steps.redispatched.add(step.number)
        return steps

    def verify(self, run_id: str | None) -> VerificationReport:
        """As `Ledger.verify`."""
        return self._ledger.verify(run_id)
