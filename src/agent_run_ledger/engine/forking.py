"""A new run made from another one: which of its entries are carried over, and how they read there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.history import History, parse
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.rules import canonical
from agent_run_ledger.words import Event

_STEP_KINDS = frozenset({"intent", "waiting", "outcome", "missed", "redispatched_undeclared", "notice"})
_KEPT = ("format", "pipeline", "agent", "parent", "queue", "priority", "key", "within")
"""What the first entry of the new run says as that of the old one did."""
_MADE_ANEW = (
    "run",
    "seq",
    "kind",
    "token",
    "state",
    "steps",
    "refused",
    "position",
    "attempt",
    "payload",
    "signal",
    "request",
    "limits",
    "spent",
)


def carried(
    history: History, rows: Iterable[Row], before: int, told: dict[str, str], limits: dict[str, Any], name: str
) -> list[Draft]:
    """The entries of a new run that stands where the run of `history` stood before its step number `before` began.

    `rows` are that run's entries, whole. Steps keep their keys, their times and what they returned, and signals that none of them has taken
    are there to be taken; what else others did to the run, and where it stood and ended, is left behind. `told` is who makes it and why, `limits` what the new run may do, `name` its id.
    Raises `InvalidArguments` where something that has to be carried was erased.
    """
    drafts: list[Draft] = []
    outcomes: list[int] = []
    places: dict[int, int] = {}
    taken = {step.signal.seq for step in history.positions.values() if step.signal is not None and step.number < before}
    until = min((step.seq for step in history.positions.values() if step.number >= before), default=history.size + 1)
    for row in rows:
        body = parse(row.body)
        if row.kind == "created":
            kept: dict[str, Any] = {name: body[name] for name in _KEPT if name in body}
            payload = _payload(row, body)
            if history.pipeline and payload is not None:  # its goal names its run
                payload = payload.replace(_goal(history.run_id), _goal(name), 1)
            drafts.append(Draft("created", None, {**kept, "forked_from": history.run_id, **limits}, payload))
            continue
        step = history.positions.get(row.position or "")
        is_carried = (row.kind in _STEP_KINDS and step is not None and step.number < before) or (
            row.kind in ("value", "missed", "blocked") and step is None and row.seq < until
        )
        is_carried = is_carried or (row.kind == "signal" and "of" not in body and row.seq not in taken)
        if not is_carried or "child" in body:  # a child tells of its end whom it knows of: the new run has to ask it
            continue
        fields = {name: value for name, value in body.items() if name not in _MADE_ANEW} | {"carried": True}
        if "seen" in fields:
            at = bisect_right(outcomes, fields["seen"])
            fields["seen"] = places[outcomes[at - 1]] if at else min(fields["seen"], 1)
        if row.kind == "outcome":
            outcomes.append(row.seq)
            places[row.seq] = len(drafts) + 1
        drafts.append(
            Draft(row.kind, _event(row.kind, body), fields, _payload(row, body), row.position, row.attempt, row.digest,
                  None, row.fingerprint)
        )  # fmt: skip
    fork: dict[str, Any] = {"from": history.run_id, "size": history.size, "root": history.root.hex()}
    followed = {position for draft in drafts for position in draft.fields.get("follows", ())}
    acted_upon = [each.position for each in history.positions.values() if each.followed and each.number < before]
    if not history.pipeline and (left := [position for position in acted_upon if position not in followed]):
        fork["follows"] = left  # what had acted upon them is not carried, and they are no news all the same
    drafts.append(Draft("forked", None, fork, canonical.encode(told)))
    return drafts


def _goal(run_id: str) -> bytes:
    return b'{"goal":' + canonical.encode(f"pipeline {run_id}")


def _payload(row: Row, body: dict[str, Any]) -> bytes | None:
    if row.payload is None and "payload" in body:
        raise InvalidArguments(
            f"run {body['run']!r}, entry {row.seq}: its payload was erased, so no run can be made that carries it; nothing was written"
        )
    return row.payload


def _event(kind: str, body: dict[str, Any]) -> Event | None:
    if kind in ("intent", "waiting"):
        return Event.START_STEP if kind == "intent" else Event.WAIT
    if kind != "outcome":
        return None
    if "retry_at" in body:
        return Event.WAIT
    return Event.STEP_SUCCESS if body["ok"] == "completed" else Event.STEP_ERROR
