"""How a decision becomes entries: bodies, salted digests, leaves and roots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from agent_run_ledger import merkle
from agent_run_ledger.contract import Row
from agent_run_ledger.engine.account import COUNTED
from agent_run_ledger.engine.history import History
from agent_run_ledger.rules import compact, digests, lifecycle
from agent_run_ledger.rules.budget import NOTHING
from agent_run_ledger.words import Event, RunState

Sealed = tuple[Row, dict[str, Any]]
"""A finished row and its body, not yet in the store."""

_pieces = compact.encoder(sort_keys=False)
_number = float.__repr__
_STATES = {state: str(state) for state in RunState}


PAUSES = frozenset({"outcome", "parked", "asked", "waiting", "resolved"})
"""The kinds of entry behind which a step is not running any more."""


class Draft(NamedTuple):
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

    @property
    def is_first(self) -> bool:
        """Whether it is the first intent of a step: what `steps` counts."""
        return self.kind == "intent" and (self.attempt == 1 or "continues" in self.fields)


def seal(history: History, token: int, at: float, drafts: Iterable[Draft]) -> list[Sealed]:
    """Give each draft its place after `history`: finished rows, each with its body. `history` is not changed.

    A body names everything that `verify` must be able to hold a row to, and no user text: payloads enter as salted digests.
    Raises `IllegalTransition` where the lifecycle has no such event.
    """
    run_id, secret = history.run_id, history.secret
    named, at = "".join(_pieces(run_id, 0)), float(at)
    seq, state, frontier = history.size, history.state, history.frontier
    steps, refused = history.steps, history.refused
    sealed: list[Sealed] = []
    begun: set[str | None] = set()
    settled: set[str] = set()
    waiting: set[str] = set()
    account = history.account  # a copy of it from the first entry on that changes it
    for kind, event, fields, payload, position, attempt, digest, salted, fingerprint in drafts:
        if event is not None:
            state = lifecycle.after(state, event, run_id)
            if position is not None and kind in PAUSES:
                settled.add(position)
                begun.discard(position)
                if state is RunState.BLOCKED:  # by this very event: the others of this append are told
                    waiting.add(position)
                else:
                    waiting.discard(position)
                if begun:
                    state = RunState.RUNNING
                elif len(history.running) > 1 or history.waiting or waiting:
                    state = history.stands_as(RunState.BLOCKED if waiting else state, settled, token)
        if kind == "intent":
            begun.add(position)
            waiting.discard(position or "")
            steps += attempt == 1 or "continues" in fields
        elif kind in ("refused", "blocked"):
            refused += 1
        seq += 1
        name = _STATES[state]
        body: dict[str, Any] = {
            "run": run_id, "seq": seq, "kind": kind, "at": at, "token": token, "state": name, "steps": steps,
        }  # fmt: skip
        # What every entry says is written out, a third cheaper than to have it encoded.
        text = f'{{"run":{named},"seq":{seq},"kind":"{kind}","at":{_number(at)},"token":{token},"state":"{name}","steps":{steps}'
        if refused:
            body["refused"] = refused
            text = f'{text},"refused":{refused}'
        if position is not None:
            body["position"] = position
            text = f'{text},"position":{"".join(_pieces(position, 0))}'
        if attempt is not None:
            body["attempt"] = attempt
            text = f'{text},"attempt":{attempt}'
        if fields:
            body |= fields
            text = f"{text},{''.join(_pieces(fields, 0))[1:-1]}"
        if kind in COUNTED and (account.held or "holds" in fields or "charges" in fields):
            if account is history.account:
                account = account.copy()
            account.take(kind, position, fields)
        if account.held and state.is_terminal:
            if account is history.account:
                account = account.copy()
            account.closed()
        if account.spent is not NOTHING:
            spent = body["spent"] = account.spent.written()
            text = f'{text},"spent":{"".join(_pieces(spent, 0))}'
        if payload is not None:
            salted = body["payload"] = salted or digests.salted(secret, payload)
            digest = digest or digests.plain(payload)
            text = f'{text},"payload":"{salted}"'
        data = f"{text}}}".encode()
        frontier, roots = merkle.append(frontier, seq - 1, merkle.leaf_hash(data))
        row = Row(seq, kind, position, attempt, data, roots, payload, digest, fingerprint, None)
        sealed.append((row, body))
    return sealed
