"""Look at a ledger without disturbing it: while an agent works on it, and where rows of it are damaged."""

from __future__ import annotations

import bisect
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from agent_run_ledger import (
    AgentRunLedger,
    RunRecord,
    RunState,
    StepRecord,
    StoreCorrupt,
    VerificationReport,
)
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.records import step_records
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.schema import APPLICATION_ID

MOST_FILES = 1000
"""How many files of a folder are looked at for ledgers."""
_OPEN = frozenset(RunState) - {state for state in RunState if state.is_terminal} - {RunState.QUARANTINE}
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError)


@dataclass(slots=True)
class Steps:
    """The steps of a run as far as its entries can be read."""

    records: list[StepRecord] = field(default_factory=list)
    in_doubt: list[int] = field(default_factory=list)
    """Numbers of steps that were dispatched and have no outcome; they are in flight while the run's owner lives."""
    redispatched: list[int] = field(default_factory=list)
    """Numbers of steps that were dispatched again although their tool does not declare what that does."""
    trouble: str | None = None
    """What could not be read."""


@contextmanager
def reading(path: str) -> Iterator[Reading]:
    """The ledger at `path`, read-only. Raises a `StoreError` that says what is wrong with the file."""
    store = open_store(path, durability="full", clock=SystemClock(), read_only=True)
    ledger = AgentRunLedger(store)
    try:
        yield Reading(ledger, store, path)
    finally:
        ledger.close()


class Reading:
    """One ledger, opened read-only."""

    def __init__(self, ledger: AgentRunLedger, store: Store, path: str) -> None:
        self._ledger = ledger
        self._store = store
        self.path = path

    def runs(self, status: str | None = None) -> list[RunRecord]:
        """All runs, oldest first; those of one status where it is given."""
        return self._ledger.runs(status)

    def run(self, run_id: str) -> RunRecord:
        """One run. Raises `RunNotFound`."""
        return self._ledger.get_run(run_id)

    def steps(self, run_id: str) -> Steps:
        """The steps of a run, up to the first entry that cannot be read."""
        rows = self._store.read(run_id)
        secret = self._store.secret(run_id)
        steps = Steps()
        try:
            history = History.read(run_id, secret, rows)
        except StoreCorrupt as error:
            readable = bisect.bisect_left(
                range(len(rows)), True, key=lambda count: not _is_readable(run_id, rows[: count + 1])
            )
            history = History.read(run_id, secret, rows[:readable])
            steps.trouble = f"{error} The steps before that entry are shown."
        for step in list(history.positions.values()):
            steps.records.append(_record(history, step, steps))
            if step.outcome is None:
                steps.in_doubt.append(step.number)
            if step.redispatched:
                steps.redispatched.append(step.number)
        return steps

    def verify(self, run_id: str | None, told: Callable[[str], None]) -> VerificationReport:
        """As `verify` of every ledger; `told` hears how far it is."""
        total = 1 if run_id is not None else sum(1 for _ in self._store.summaries())
        ledger = AgentRunLedger(cast(Store, _Watched(self._store, total, told)))
        return ledger.verify(run_id)

    def owner_is_seen(self, owner: str | None) -> bool:
        """Whether a process that can be seen from here holds the lock of this owner; where nothing can be seen, whether there is one.

        The kernel's list is read. To try the lock would tell more, and could make a program that takes the run over at that moment
        believe that somebody has it.
        """
        if owner is None or self._locked is None:
            return owner is not None
        folder = os.path.realpath(self.path) + ".owners"
        for name in (owner, "sha256_" + hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()):
            try:
                inode = os.stat(os.path.join(folder, name)).st_ino
            except (OSError, ValueError):
                continue
            if str(inode) in self._locked:
                return True
        return False

    @cached_property
    def _locked(self) -> set[str] | None:
        """The inodes of files that somebody has locked whole; None where the kernel keeps no list."""
        try:
            with open(
                "/proc/locks", encoding="ascii"
            ) as locks:  # "1: FLOCK  ADVISORY  WRITE 16489 fe:00:2189639 0 EOF"
                return {
                    line.split()[5].rpartition(":")[2] for line in locks if " FLOCK " in line and " -> " not in line
                }
        except (OSError, IndexError):
            return None

    def is_waiting(self, record: RunRecord) -> bool:
        """Whether a run goes on as soon as its program runs again: it has not ended, and nobody seems to work on it."""
        return record.status in _OPEN and not is_damaged(record) and not self.owner_is_seen(record.owner)


def is_damaged(record: RunRecord) -> bool:
    """Whether the entries that a listing needs cannot be read; the record's cause says why."""
    return not record.created_at


class _Watched:
    """A store that says which run is being read."""

    def __init__(self, store: Store, total: int, told: Callable[[str], None]) -> None:
        self._store = store
        self._total = total
        self._told = told
        self._count = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    def read(self, run_id: str, after: int = 0) -> list[Row]:
        self._count += 1
        self._told(f"verifying run {self._count} of {self._total}: {run_id}")
        return self._store.read(run_id, after)


def _is_readable(run_id: str, rows: Sequence[Row]) -> bool:
    try:
        History.read(run_id, b"", rows)
    except StoreCorrupt:
        return False
    return True


def _record(history: History, step: StepHistory, steps: Steps) -> StepRecord:
    history.positions = {step.position: step}
    try:
        (record,) = step_records(history)
        float(record.created_at), float(record.completed_at or 0)
    except _DAMAGE as error:
        said = f"step {step.number} cannot be read ({type(error).__name__}: {error})"
        steps.trouble = steps.trouble or said
        record = StepRecord("", history.run_id, step.number, step.tool, None, step.state, error_message=said)
    return record


def ledgers_in(folder: str) -> list[str]:
    """The names of the files in a folder that are ledgers. They are looked at through connections that leave no trace."""
    with os.scandir(folder) as entries:
        files = sorted(entry.name for _, entry in zip(range(MOST_FILES), entries, strict=False) if entry.is_file())
    return [name for name in files if _is_ledger(os.path.join(folder, name))]


def _is_ledger(path: str) -> bool:
    escaped = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    try:
        with closing(sqlite3.connect(f"file:{escaped}?immutable=1", uri=True)) as connection:
            return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)
    except (sqlite3.Error, ValueError):  # not a database, or a name that SQLite cannot take
        return False
