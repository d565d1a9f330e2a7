"""Runs and steps as readers see them: records made from what the log says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agent_run_ledger.contract import Row, Summary
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.model import DamagedRunRecord, RunRecord, StepRecord
from agent_run_ledger.rules import canonical, failures
from agent_run_ledger.rules.budget import Amount
from agent_run_ledger.words import RunState

Payload = Callable[[int], bytes | None]
"""What gives the payload of an entry by its seq, where a history does not keep it."""


def step_record(run_id: str, step: StepHistory, fetch: Payload, *, replayed: bool = False) -> StepRecord:
    """One step as a reader sees it, whole."""
    arguments, output, error = step.arguments, None, None
    if arguments is None and step.digest is not None:
        arguments = fetch(step.seq)
    outcome = step.outcome or step.earlier
    completed = outcome is not None and outcome.ok == "completed"
    if outcome is not None:
        output = outcome.payload
        if output is None and outcome.digest is not None:
            output = fetch(outcome.seq)
        if not completed and output is not None:
            error = _error_text(output)
    return StepRecord(
        step_id=f"step_{step.leaf[:10].hex()}",
        run_id=run_id,
        step_number=step.number,
        tool_name=step.tool,
        arguments_json=_text(arguments),
        state=str(step.state),
        output_json=_text(output) if completed else None,
        error_message=error,
        fingerprint=step.fingerprint.hex() if step.fingerprint else "",
        created_at=step.created_at,
        completed_at=step.outcome.at if step.outcome is not None else None,
        state_version=step.version,
        idempotency_key=step.key,
        input_digest=step.digest.hex() if step.digest else "",
        output_digest=outcome.digest.hex() if outcome is not None and completed and outcome.digest else None,
        retry_budget_remaining=step.left,
        fencing_token=step.token,
        position=step.position,
        attempts=step.attempts,
        effect=str(step.effect) if step.effect else None,
        replayed=replayed,
    )


def _error_text(payload: bytes) -> str:
    try:
        return failures.text(canonical.decode(payload))
    except (ValueError, AttributeError):  # one bad row is no reason not to show the others
        return "(unreadable)"


def run_record(summary: Summary, end: Row) -> RunRecord:
    """A run from its head, its first and last entry, and the one that it ended or stands with. One that cannot be read is a record that says so: the others can be."""
    head = summary.head
    try:
        return _run_record(summary, end)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        cause = f"its entries cannot be read ({type(error).__name__}: {error}): run verify, restore from a backup"
        return DamagedRunRecord(head.run_id, None, RunState.PENDING, 0, 0.0, 0.0, head.owner, head.token, cause=cause)


def _run_record(summary: Summary, end: Row) -> RunRecord:
    head, first, last = summary
    begun, stands = json.loads(first.body), json.loads(last.body)
    state = RunState(stands["state"])
    spent = Amount.read(stands.get("spent", {}))
    diverged = head.note is not None and not state.is_terminal
    for number in (begun["at"], stands["at"], stands["steps"]):
        if type(number) not in (float, int):
            raise TypeError(f"{number!r} is no number")
    return RunRecord(
        run_id=head.run_id,
        goal=_member(first, "goal"),
        status=RunState.BLOCKED if diverged else stands["state"],
        total_steps=stands["steps"],
        created_at=begun["at"],
        updated_at=stands["at"],
        owner=head.owner,
        fencing_token=head.token,
        spent_tokens=spent.tokens,
        spent_usd=spent.usd,
        result=_decoded(end) if end.kind == "finished" else None,
        cause=str(head.note) if diverged else _cause(end),
        parent_run_id=begun.get("parent"),
        queue=head.listing.queue,
        due_in_seconds=head.due_in,
        moved_to=head.moved_to,
    )


def _cause(end: Row) -> str | None:
    if end.kind not in ("parked", "refused", "exhausted", "aborted", "cancelled") or end.payload is None:
        return None
    reason: str | None = _member(end, "reason")
    return reason


def _member(row: Row, name: str) -> Any:
    """What an entry's payload says under this name; None where it was erased, or is encrypted and the key is not here."""
    decoded = _decoded(row)
    return None if decoded is None else decoded[name]


def _decoded(row: Row) -> Any:
    return canonical.decode(row.payload) if row.payload is not None and row.encoding is None else None


def _text(payload: bytes | None) -> str | None:
    return payload.decode(errors="replace") if payload is not None else None
