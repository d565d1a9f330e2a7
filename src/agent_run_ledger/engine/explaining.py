"""Why a run was halted, or why it stands, with the steps that this rests on."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.records import Payload, step_record
from agent_run_ledger.model import BlockedCall, Evidence, Explanation, RunRecord
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.budget import NOTHING, Limits

_LONGEST_TEXT = 1000


def explain(history: History, record: RunRecord, fetch: Payload) -> Explanation:
    """What the log says of it. A program that met another call than the recorded one stands for that, and for nothing before."""
    said: dict[str, Any] = {}
    has_diverged = record.cause is not None and record.cause != history.cause_text
    if history.cause is not None and not has_diverged:
        said = canonical.decode(history.cause)
    numbers = set(said.get("evidence", ()))
    halted_at = history.positions.get(history.caused_at or "") if said else None
    evidence = [step for step in history.positions.values() if step.number in numbers or step is halted_at]
    held = NOTHING
    for amount in history.account.held.values():
        held = held.plus(amount)
    limits = Limits.read(said["limits"]) if "limits" in said else history.granted
    return Explanation(
        history.run_id,
        record.status,
        said.get("rule"),
        record.cause or history.cause_text,
        history.caused_by if said else None,
        tuple([_evidence(history.run_id, step, fetch) for step in evidence]),
        tuple(history.notices),
        tuple([_blocked(each) for each in history.blocked.values()]),
        history.steps,
        history.refused,
        *history.account.spent,
        *held,
        limits=limits.as_budget(),
    )


def _blocked(blocked: Any) -> BlockedCall:
    said = blocked.refusal
    return BlockedCall(blocked.position, blocked.tool, said["rule"], said["reason"], tuple(said["evidence"]))


def _evidence(run_id: str, step: StepHistory, fetch: Payload) -> Evidence:
    record = step_record(run_id, step, fetch)
    outcome = record.output_json if record.error_message is None else record.error_message
    return Evidence(record.step_number, record.tool_name, _short(record.arguments_json), _short(outcome), record.state)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
