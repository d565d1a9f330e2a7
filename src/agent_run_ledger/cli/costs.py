"""The commands that say what runs have cost, and what is left of the budgets that they share: cost, budgets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from agent_run_ledger.cli.shell import OK, PROBLEM, opened_to_look
from agent_run_ledger.cli.terminal import as_json, counted, labelled, plain, table

if TYPE_CHECKING:
    from agent_run_ledger import Budget
    from agent_run_ledger.model import Cost, SharedBudget, SharedLimits, Spending

_BUCKETS = {
    "input_tokens": "input",
    "cache_read_tokens": "read from a cache",
    "cache_write_tokens": "written to a cache",
    "output_tokens": "output",
}


def cost(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        found = ledger.cost(given.run_id)
    status = PROBLEM if any(each.trouble for each in found.runs) else OK
    limit = given.limit if given.limit is not None else 0 if given.json else 50
    if given.json:
        data = _data(found)
        if found.run_id is None:
            data["runs"] = [_data(each) for each in found.runs[-limit:]]
        print(as_json(data))
        return status
    if found.run_id is None:
        _print_runs(found, limit)
    print("\n".join(_described(found)))
    for what, parts in (("MODEL", found.models), ("TOOL", found.tools)):
        if parts:
            print("\n" + _parts(what, parts))
    return status


def budgets(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        found = ledger.budgets()
    if given.json:
        print(as_json([asdict(each) | {name: _text(getattr(each, name)) for name in _DOLLARS} for each in found]))
        return OK
    if not found:
        print("no budget is shared by now: none has been drawn on")
        return OK
    heads = ("BUDGET", "DAY", "SPENT", "RESERVED", "OF TOKENS", "SPENT", "RESERVED", "OF USD")
    print(table(heads, map(_budget_row, found), stretch=0))
    return OK


_DOLLARS = ("usd", "spent_usd", "reserved_usd")


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else dollars(amount)


def _budget_row(each: SharedBudget) -> tuple[object, ...]:
    tokens = (each.spent_tokens, each.reserved_tokens, each.tokens)
    usd = (each.spent_usd, each.reserved_usd, each.usd)
    return (
        each.name if each.parent_run_id is None else f"run {each.parent_run_id} and its children",
        each.day or "",
        *("" if each.tokens is None or count is None else number(count) for count in tokens),
        *("" if each.usd is None else _text(amount) for amount in usd),
    )


def _print_runs(found: Cost, limit: int) -> None:
    shown = [each for each in found.runs if _has_cost(each)]
    if len(shown) < len(found.runs):
        print(f"{counted(len(found.runs) - len(shown), 'run has', 'runs have')} cost nothing")
    if limit and len(shown) > limit:
        print(f"the newest {limit} of {len(shown)} runs (--limit 0 shows all):")
        shown = shown[-limit:]
    if shown:
        heads = ("RUN", "STATUS", "TOKENS", "USD", "RESERVED", "USD", "SAVED", "USD")
        print(table(heads, (_run_row(each) for each in shown if not each.trouble), stretch=0))
        for each in shown:
            if each.trouble:
                print(plain(f"PROBLEM: {each.trouble}"))
        print()


def _run_row(each: Cost) -> tuple[object, ...]:
    spent = each.spent
    amounts = (spent.tokens, spent.usd, each.reserved_tokens, each.reserved_usd, each.saved_tokens, each.saved_usd)
    shown = [number(amount) if isinstance(amount, int) else dollars(amount) for amount in amounts]
    return (each.run_id, each.status, *shown)


def _has_cost(each: Cost) -> bool:
    return bool(each.tools or each.reserved_tokens or each.reserved_usd or each.carried_tokens or each.trouble)


def _described(found: Cost) -> Iterator[str]:
    spent = found.spent
    told = [f"{number(count)} {name}" for field, name in _BUCKETS.items() if (count := getattr(spent, field)) > 0]
    untold = spent.tokens - spent.told_tokens
    if untold > 0:
        told.append(f"{number(untold)} of which nobody told, as they were reserved")
    facts: list[tuple[str, object]] = [
        ("run", found.run_id),
        ("status", found.status),
        ("spent", amount(spent.tokens, spent.usd)),
        ("tokens", ", ".join(told) or None),
        ("reserved", _some(found.reserved_tokens, found.reserved_usd)),
        ("carried", _some(found.carried_tokens, found.carried_usd)),
        ("saved", _some(found.saved_tokens, found.saved_usd)),
        ("limits", limits(found.limits)),
    ]
    yield labelled(facts)
    for count, what in (
        (spent.unmetered, "nobody told how many tokens it used"),
        (spent.unpriced, "nobody told what its tokens cost"),
        (spent.overran, "more was used than was reserved"),
    ):
        if count:
            yield f"! Of {counted(count, 'call', 'calls')} {what}."
    if spent.unmetered or spent.unpriced:
        yield "! What is not known is counted as it was reserved, and as nothing where nothing was reserved."


def _parts(what: str, parts: Mapping[str, Spending]) -> str:
    heads = (what, "CALLS", "TOKENS", "USD", "UNMETERED", "UNPRICED", "OVERRAN")
    rows = (
        (
            name or "(not known)",
            number(part.calls),
            number(part.tokens),
            dollars(part.usd),
            *(number(count) if count else "" for count in (part.unmetered, part.unpriced, part.overran)),
        )
        for name, part in parts.items()
    )
    return table(heads, rows, stretch=0)


def number(count: int) -> str:
    """`12,345`."""
    return f"{count:,}"


def dollars(amount: Decimal) -> str:
    """An amount exactly as it is: no digit is left out, and no exponent is shown."""
    return f"{amount.normalize():f}" if amount else "0"


def amount(tokens: int, usd: Decimal) -> str:
    """Tokens and dollars in a line."""
    return f"{number(tokens)} {'token' if tokens == 1 else 'tokens'}, {dollars(usd)} USD"


def _some(tokens: int, usd: Decimal) -> str | None:
    return amount(tokens, usd) if tokens or usd else None


def limits(known: Budget | None) -> str | None:
    """The limits that are known, in a line."""
    if known is None:
        return None
    named = [
        ("{} steps", known.steps),
        ("{} tokens", known.tokens),
        ("{} USD", known.usd),
        ("{} s at work", known.seconds),
        ("within {}", ", ".join(each.account.rpartition("/")[2] for each in _within(known))),
        ("until {}", known.deadline and known.deadline.astimezone().strftime("%Y-%m-%d %H:%M:%S")),
    ]
    return ", ".join(text.format(f"{limit:,}" if isinstance(limit, int) else limit) for text, limit in named if limit)


def _data(found: Cost) -> dict[str, Any]:
    """For `--json`: amounts of dollars are texts, so that they stay exact."""
    data = asdict(replace(found, runs=()))
    for spending in (data["spent"], *data["models"].values(), *data["tools"].values()):
        spending["usd"] = dollars(spending["usd"])
    for name in ("reserved_usd", "carried_usd", "saved_usd"):
        data[name] = dollars(data[name])
    data["limits"] = limits_data(found.limits)
    del data["runs"]
    return data


def limits_data(known: Budget | None) -> dict[str, Any] | None:
    """The limits for `--json`: the deadline in Unix seconds, as every time is."""
    if known is None:
        return None
    deadline = known.deadline.timestamp() if known.deadline is not None else None
    within = [each.account for each in _within(known)]
    return asdict(known) | {
        "usd": None if known.usd is None else str(known.usd),
        "deadline": deadline,
        "within": within,
    }


def _within(known: Budget) -> tuple[SharedLimits, ...]:
    assert isinstance(known.within, tuple)
    return known.within
