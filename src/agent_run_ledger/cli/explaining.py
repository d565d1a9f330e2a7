"""The command that says why a run was halted, or why it stands: explain."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from agent_run_ledger.cli.costs import amount, dollars, limits, limits_data
from agent_run_ledger.cli.shell import OK, command_for, opened_to_look
from agent_run_ledger.cli.terminal import as_json, columns_of, cut, labelled, plain, table, width
from agent_run_ledger.cli.waiting import data_of_waits, waits_of

if TYPE_CHECKING:
    from agent_run_ledger.cli.waiting import Wait
    from agent_run_ledger.model import Evidence, Explanation

_LEAST = 20
"""Columns that arguments and outcomes have at least, each."""
_MOST_OF_ARGUMENTS = 60


def explain(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        said = ledger.explain(given.run_id)
        waits = waits_of(ledger, ledger.get_run(given.run_id))
    if given.json:
        data = asdict(said) | {
            "spent_usd": dollars(said.spent_usd),
            "reserved_usd": dollars(said.reserved_usd),
            "limits": limits_data(said.limits),
            "waits_for": list(data_of_waits(waits)),
        }
        print(as_json(data))
        return OK
    print("\n\n".join(filter(None, _parts(given, said, waits))))
    return OK


def _parts(given: argparse.Namespace, said: Explanation, waits: Sequence[Wait]) -> Iterator[str]:
    has_cost = said.rule == "budget" or said.spent_tokens or said.spent_usd or said.reserved_tokens or said.reserved_usd
    yield labelled(
        [
            ("run", said.run_id),
            ("status", said.status),
            ("rule", said.rule),
            ("reason", said.reason),
            ("refused call", said.tool_name),
            ("steps", f"{said.steps:,}" + (f", and {said.refused:,} refused" if said.refused else "")),
            ("spent", amount(said.spent_tokens, said.spent_usd) if has_cost else None),
            ("reserved", amount(said.reserved_tokens, said.reserved_usd) if has_cost else None),
            ("limits", limits(said.limits)),
        ]
    )
    if said.evidence:
        yield side_by_side(said.evidence)
    if said.notices:
        rows = ((notice.step_number, notice.rule, notice.text) for notice in said.notices)
        yield "What its program was told\n" + table(("STEP", "RULE", "NOTICE"), rows, stretch=2, is_wrapped=True)
    if said.blocked:
        heads = ("AT", "TOOL", "RULE", "REASON", "STEPS")
        calls = (
            (each.position, each.tool_name, each.rule, each.reason, ", ".join(map(str, each.evidence)))
            for each in said.blocked
        )
        yield "Calls that were refused, while the run went on\n" + table(heads, calls, stretch=3, is_wrapped=True)
    yield "\n".join(_next(given, said, waits))


def side_by_side(evidence: Sequence[Evidence]) -> str:
    """The steps one below the other, so that what is equal in them stands in one column. It fits the terminal."""
    heads = ("STEP", "TOOL", "STATE", "ARGUMENTS", "OUTCOME")
    others = [max(columns_of(cut(getattr(each, name), 60)) for each in evidence) for name in ("tool_name", "state")]
    room = width() - max(*map(len, heads), *(len(str(each.step_number)) for each in evidence)) - sum(others) - 8
    most = min(max(room // 2, _LEAST), _MOST_OF_ARGUMENTS)
    rows = (
        (each.step_number, each.tool_name, each.state, cut(each.arguments, most), each.outcome) for each in evidence
    )
    return "What this rests on\n" + table(heads, rows, stretch=4)


def _next(given: argparse.Namespace, said: Explanation, waits: Sequence[Wait]) -> Iterator[str]:
    """What helps on."""
    if said.status == "COMPLETED":
        yield "It has come to its end: nothing stopped it."
    if said.status in ("DEAD_LETTER", "FAILED"):
        yield "All that happened, and a new run that goes on from it:"
        yield f"  {command_for(given, 'trace', said.run_id)}"
        yield f"  {command_for(given, 'redrive', said.run_id)}"
    for wait in waits:
        yield f"It waits for {plain(wait.what).rstrip('.')}."
        if wait.words:
            yield f"  {command_for(given, *wait.words)}"
