"""What happened to a run, line by line, for whoever has to find out why it stands where it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.history import parse
from agent_run_ledger.model import TraceLine
from agent_run_ledger.rules import canonical, failures


def trace(rows: Iterable[Row]) -> list[TraceLine]:
    """Every entry but recorded values, in log order. `rows` are whole. One that is damaged is a line that says so."""
    lines: list[TraceLine] = []
    numbers: dict[str | None, tuple[int, str]] = {}
    for row in rows:
        try:
            line = _line(row, parse(row.body), numbers)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            at = lines[-1].at if lines else 0.0
            line = TraceLine(row.seq, at, "unreadable", None, None, None, f"{type(error).__name__}: {error}")
        if row.kind != "value" or line.event == "unreadable":
            lines.append(line)
    return lines


def _line(row: Row, body: dict[str, Any], numbers: dict[str | None, tuple[int, str]]) -> TraceLine:
    """The line of one entry. `numbers` are the steps by position, as far as the rows before have told; it is added to."""
    if row.kind == "intent":
        numbers.setdefault(row.position, (body["step"], body["tool"]))
    number, tool = numbers.get(row.position, (None, body.get("tool"))) if row.position else (None, None)
    return TraceLine(row.seq, float(body["at"]), _event(row, body), number, tool, row.attempt, _text(row, body))


def _event(row: Row, body: dict[str, Any]) -> str:
    """What happened, in a word."""
    kind = row.kind
    if kind == "intent":
        return "dispatched" if "undispatched" not in body else "taken over"
    if kind == "outcome":
        ok = str(body["ok"])
        return f"reconciled, {ok}" if "reconciled" in body else ok
    if kind == "answered":
        return f"receipt {body['verdict']}"
    if kind == "resolved":
        return "resolved" if body["executed"] else "resolved, not executed"
    return {"asked": "receipt asked", "exhausted": "dead letter", "redispatched_undeclared": "undeclared"}.get(
        kind, kind
    )


def _text(row: Row, body: dict[str, Any]) -> str:
    payload = canonical.decode(row.payload) if row.payload is not None and row.encoding is None else None
    told = (
        f" (by {payload['by']})"
        if isinstance(payload, dict) and payload.get("by") and row.kind not in ("intent", "outcome")
        else ""
    )
    match row.kind:
        case "created":
            return f"goal: {payload['goal']}" if payload else ""
        case "intent":
            parts = [f"key {body['key'][:12]}…", f"effect {body.get('effect', 'undeclared')}"]
            if "continues" in body:
                parts.append(f"continues the call at {body['continues']}")
            return ", ".join(parts)
        case "outcome":
            said = failures.text(payload) if body["ok"] in ("failed", "cancelled", "unstorable") and payload else ""
            if "ambiguous" in body:
                said += "; it may have taken effect"
            elif "unproven" in body:
                said += "; that does not prove that it took no effect"
            if "retry_at" in body:
                said += f"; tried again after {body['wait']:.1f} s"
            return said
        case "waiting":
            return ""
        case "signal":
            return f"{body['name']}{told}"
        case "declined":
            return f"{body['asked']}: {payload['reason'] if payload else ''}{told}"
        case "erased":
            which = f"step {body['step']}" if "step" in body else "all payloads"
            lost = ", and the run's secret" if "secret" in body else ""
            return f"{which}{lost} (by {body['by']}): {body['reason']}"
        case "forked":
            return f"from run {body['from']}, {body['size']} entries{told}: {payload['reason'] if payload else ''}"
        case _:
            return f"{payload.get('reason') or ''}{told}".strip() if isinstance(payload, dict) else ""
