"""What can be read of a run whose entries may be damaged: each step for itself, and what is wrong with the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.records import Payload, step_record
from agent_run_ledger.errors import StoreCorrupt
from agent_run_ledger.model import StepRecord
from agent_run_ledger.words import RunState

DAMAGE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)
"""What reading may meet where somebody else has written into the file."""

Pages = Callable[[], Iterator[list[Row]]]


@dataclass(slots=True)
class Readable:
    """What the entries of a run tell, as far as they can be read. The fields are those of `Inspection`."""

    trouble: str | None
    steps: list[StepRecord] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)
    in_doubt: list[int] = field(default_factory=list)
    redispatched: list[int] = field(default_factory=list)


def readable(run_id: str, secret: bytes, read: Pages, fetch: Payload) -> Readable:
    """Every step of the run that can be read. An entry that cannot be is left out, and `trouble` names the first one.

    `read` begins to read the run's entries, as often as it is called.
    """
    history, trouble, damaged = _as_far_as_it_goes(run_id, secret, read)
    seen = Readable(trouble)
    for step in history.positions.values():
        try:
            record = _sound(step_record(run_id, step, fetch))
        except (*DAMAGE, StoreCorrupt) as error:
            said = f"step {step.number} cannot be read ({type(error).__name__}: {error})"
            seen.trouble = seen.trouble or said
            record = StepRecord("", run_id, step.number, step.tool, None, str(step.state), error_message=said)
        seen.steps.append(record)
        seen.environments.append(step.environment)
        if step.outcome is None and step.position not in damaged:
            seen.in_doubt.append(step.number)
        if step.redispatched:
            seen.redispatched.append(step.number)
    return seen


def last_state(rows: Sequence[Row]) -> RunState:
    """The state that the last entry that can be read says; PENDING, as before any entry, where none can be."""
    for row in reversed(rows):
        try:
            return RunState(json.loads(row.body)["state"])
        except DAMAGE:
            continue
    return RunState.PENDING


def _as_far_as_it_goes(run_id: str, secret: bytes, read: Pages) -> tuple[History, str | None, set[str | None]]:
    """The fold without the entries that it cannot take, what is wrong with the first of them, and where they stand."""
    history = History(run_id, secret)
    for page in read():
        try:
            history.take([page])
        except (StoreCorrupt, RecursionError):
            return _without_damage(run_id, secret, chain.from_iterable(read()))
    return history, None, set()


def _without_damage(run_id: str, secret: bytes, rows: Iterable[Row]) -> tuple[History, str | None, set[str | None]]:
    history = History(run_id, secret)
    trouble: str | None = None
    damaged: set[str | None] = set()
    for row in rows:
        before: StepHistory | None = copy(history.positions.get(row.position or ""))
        try:
            history.absorb(row, json.loads(row.body.decode()))
        except DAMAGE as error:
            damaged.add(row.position)
            trouble = trouble or (
                f"run {run_id!r}, entry {row.seq}: its body cannot be read ({type(error).__name__}: {error}). Nothing was changed; "
                "run `agent-run-ledger verify` and restore from a backup. Every step that can be read is shown."
            )
            if before is not None:  # an entry may have been taken in by half
                history.positions[before.position] = before
            else:
                history.positions.pop(row.position or "", None)
    return history, trouble, damaged


def _sound(record: StepRecord) -> StepRecord:
    """The record, if its times are times."""
    for at in (record.created_at, record.completed_at):
        if type(at) not in (float, int) and at is not None:
            raise TypeError(f"a time is of type {type(at).__name__}")
    return record
