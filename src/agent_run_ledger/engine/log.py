"""How a decision becomes entries: bodies, salted digests, leaves and roots."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agent_run_ledger import merkle
from agent_run_ledger.contract import Row
from agent_run_ledger.engine.history import History
from agent_run_ledger.model import Event
from agent_run_ledger.rules import digests, lifecycle

FORMAT = 1
"""The version of the body's fields."""

_body = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(slots=True)
class Draft:
    """An entry before it has a place in the log."""

    kind: str
    event: Event | None
    fields: dict[str, Any]
    payload: bytes | None = None
    position: str | None = None
    attempt: int | None = None
    digest: bytes | None = None
    """SHA-256 of the payload, and `salted` its salted digest, where they are known already."""
    salted: str | None = None
    fingerprint: bytes | None = None


def seal(history: History, token: int, at: float, drafts: Iterable[Draft]) -> list[tuple[Row, dict[str, Any]]]:
    """Give each draft its place after `history`: finished rows, each with its body as a dict. `history` is not changed.

    A body names everything that `verify` must be able to hold a row to, and no user text: payloads enter as salted digests.
    Raises `IllegalTransition` where the lifecycle has no such event.
    """
    seq, state, frontier = history.size, history.state, history.frontier
    steps, refused = history.steps, history.refused
    sealed = []
    for draft in drafts:
        if draft.event is not None:
            state = lifecycle.after(state, draft.event, history.run_id)
        if draft.kind == "intent":
            steps += draft.attempt == 1
        elif draft.kind == "refused":
            refused += 1
        body: dict[str, Any] = {
            "v": FORMAT,
            "run": history.run_id,
            "seq": seq + 1,
            "kind": draft.kind,
            "at": at,
            "token": token,
            "state": state,
            "steps": steps,
            "refused": refused,
        }
        if draft.position is not None:
            body["position"] = draft.position
        if draft.attempt is not None:
            body["attempt"] = draft.attempt
        body.update(draft.fields)
        digest = draft.digest
        if draft.payload is not None:
            body["payload"] = draft.salted or digests.salted(history.secret, draft.payload)
            if digest is None:
                digest = digests.plain(draft.payload)
        data = _body(body).encode()
        frontier, roots = merkle.append(frontier, seq, merkle.leaf_hash(data))
        seq += 1
        row = Row(
            seq, draft.kind, draft.position, draft.attempt, data, roots, draft.payload, digest, draft.fingerprint, None
        )
        sealed.append((row, body))
    return sealed
