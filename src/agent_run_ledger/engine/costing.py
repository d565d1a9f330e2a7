"""What a run has cost, by model and by tool: a fold over its entries for whoever looks."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.account import Account
from agent_run_ledger.engine.history import parse, unreadable
from agent_run_ledger.model import Cost, Spending
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.budget import NO_LIMITS, NOTHING, Amount, Limits
from agent_run_ledger.words import RunState

_BUCKETS = ("input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens")
_COUNTS = (*_BUCKETS, "long_cache_write_tokens", "reasoning_tokens")


class Sum:
    """What several calls have used together, while it is being added up."""

    __slots__ = ("calls", "charged", "counts", "overran", "unmetered", "unpriced")

    def __init__(self) -> None:
        self.calls = self.unmetered = self.unpriced = self.overran = 0
        self.charged = NOTHING
        self.counts = dict.fromkeys(_COUNTS, 0)

    def use(self, use: dict[str, Any]) -> None:
        """Take in the tokens of one use of a model, as it stands in an entry."""
        for name in _COUNTS:
            self.counts[name] += use.get(name, 0)

    def mark(self, body: dict[str, Any]) -> None:
        """Count what an outcome says was not known, or was more than reserved."""
        self.unmetered += "unmetered" in body
        self.unpriced += "unpriced" in body
        self.overran += "overran" in body

    def add(self, other: Spending) -> None:
        """Take in what is added up already."""
        self.calls += other.calls
        self.unmetered += other.unmetered
        self.unpriced += other.unpriced
        self.overran += other.overran
        self.charged = self.charged.plus(Amount(other.tokens, other.usd))
        for name in _COUNTS:
            self.counts[name] += getattr(other, name)

    def spending(self) -> Spending:
        """As a reader sees it."""
        return Spending(
            calls=self.calls,
            tokens=self.charged.tokens,
            usd=self.charged.usd,
            unmetered=self.unmetered,
            unpriced=self.unpriced,
            overran=self.overran,
            **self.counts,
        )


class Costing:
    """The fold. What was carried from another run was paid for there, and is told apart from what this one's calls have used."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._account = Account()
        self._carried = Account()
        self._tools: dict[str, str] = {}
        """The tool of each step by its position."""
        self._models: set[str] = set()
        """The positions of calls that are declared to be of a model."""
        self._by_tool: dict[str, Sum] = {}
        self._by_model: dict[str, Sum] = {}
        self._limits = NO_LIMITS

    def take(self, row: Row) -> None:
        """Take the next entry in; refusals and ends come with their payloads. Raises `StoreCorrupt` where it cannot be read."""
        try:
            body = parse(row.body)
            position = row.position or ""
            if row.kind == "intent":
                self._intent(position, body)
            elif row.kind == "outcome":
                self._outcome(position, body)
            elif row.kind == "created":
                self._limits = Limits.read(body)
            elif row.kind in LIMITS_SAID and row.payload is not None:
                said = canonical.decode(row.payload)
                self._limits = Limits.read(said["limits"]) if "limits" in said else self._limits
            if self._account.held and RunState(body["state"]).is_terminal:
                self._close()
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise unreadable(self._run_id, row, error) from error

    def _intent(self, position: str, body: dict[str, Any]) -> None:
        is_late, is_carried = "late" in body, "carried" in body
        self._tools.setdefault(position, body["tool"])
        if "model" in body:
            self._models.add(position)
        lost = self._account.held.get(position) if not is_late and position not in self._carried.held else None
        if not is_carried and body["token"] != self._account.program:
            self._account.began(body["token"])
        self._account.take("intent", position, body)
        self._carried.take("intent", position, body if is_carried else {"late": True} if is_late else {})
        if is_carried:
            return
        tool = self._tool(position)
        if lost is not None:
            self._lose(tool, lost)
        tool.calls += not (is_late or "undispatched" in body or "waits" in body)

    def _lose(self, tool: Sum, reserved: Amount) -> None:
        """The process of an attempt died: what it used nobody knows."""
        self._model("").calls += 1
        for each in (tool, self._model("")):
            each.charged = each.charged.plus(reserved)
            each.unmetered += 1

    def _close(self) -> None:
        """The run has ended: nobody will ever know what became of those that are reserved for."""
        for position, reserved in self._account.held.items():
            if isinstance(position, str) and position not in self._carried.held:
                self._lose(self._tool(position), reserved)
        self._account.closed()
        self._carried.closed()

    def _outcome(self, position: str, body: dict[str, Any]) -> None:
        if "carried" in body:
            self._account.take("outcome", position, body)
            self._carried.take("outcome", position, body)
            return
        self._account.take("outcome", position, body)
        self._carried.take("outcome", position, {})
        uses: list[dict[str, Any]] = body.get("usage", [])
        if position in self._models and not uses and body["ok"] == "completed":
            body = body | {"unmetered": True}  # nothing was reserved for it, and nothing told
        rest, tool = Amount.read(body.get("charges", {})), self._tool(position)
        tool.mark(body)
        tool.charged = tool.charged.plus(rest)
        for use in uses:
            model = self._model(use.get("model", ""))
            model.calls += 1
            model.use(use)
            tool.use(use)
            cost = Amount(sum(use.get(name, 0) for name in _BUCKETS), Decimal(use.get("usd", 0)))
            model.charged, rest = model.charged.plus(cost), rest.minus(cost)
        named = {use.get("model", "") for use in uses}
        model = self._model(named.pop() if len(named) == 1 else "")
        model.mark(body)
        model.charged = model.charged.plus(rest)
        model.calls += not uses and "unmetered" in body

    def _tool(self, position: str) -> Sum:
        return self._by_tool.setdefault(self._tools[position], Sum())

    def _model(self, name: str) -> Sum:
        return self._by_model.setdefault(name, Sum())

    def cost(self, status: str) -> Cost:
        """What the entries up to here say."""
        carried, held = self._carried.spent, NOTHING
        for amount in self._carried.held.values():
            carried = carried.plus(amount)
        for position, amount in self._account.held.items():
            held = held.plus(amount) if position not in self._carried.held else held
        tools = {name: each.spending() for name, each in sorted(self._by_tool.items()) if _has_cost(each)}
        whole = Sum()
        for each in tools.values():
            whole.add(each)
        return Cost(
            self._run_id,
            status,
            whole.spending(),
            *held,
            *self._account.saved,
            *carried,
            models={name: each.spending() for name, each in sorted(self._by_model.items()) if _has_cost(each)},
            tools=tools,
            limits=self._limits.as_budget(),
        )


LIMITS_SAID = frozenset({"refused", "exhausted"})
"""The kinds of entries whose payload may say what the run was allowed to use."""


def _has_cost(added: Sum) -> bool:
    return added.charged != NOTHING or any((*added.counts.values(), added.unmetered, added.unpriced, added.overran))


def together(costs: Iterable[Cost]) -> Cost:
    """What all these runs have cost. Nothing is in it twice: what runs carry from others is in those others."""
    runs = tuple(costs)
    whole, held, saved = Sum(), NOTHING, NOTHING
    by_model: dict[str, Sum] = {}
    by_tool: dict[str, Sum] = {}
    for cost in runs:
        whole.add(cost.spent)
        held = held.plus(Amount(cost.reserved_tokens, cost.reserved_usd))
        saved = saved.plus(Amount(cost.saved_tokens, cost.saved_usd))
        for sums, added in ((by_model, cost.models), (by_tool, cost.tools)):
            for name, spending in added.items():
                sums.setdefault(name, Sum()).add(spending)
    return Cost(
        None,
        None,
        whole.spending(),
        *held,
        *saved,
        *NOTHING,
        models={name: each.spending() for name, each in sorted(by_model.items())},
        tools={name: each.spending() for name, each in sorted(by_tool.items())},
        limits=None,
        runs=runs,
    )


def unread(run_id: str, status: str, trouble: str) -> Cost:
    """The line of a run that cannot be read: what it has cost is not known, and that is said."""
    return Cost(run_id, status, Sum().spending(), *NOTHING, *NOTHING, *NOTHING, {}, {}, None, trouble=trouble)
