"""Budgets that several runs share: each has an account, in whose log their calls are granted what they may use.

An account is a run without a program: `created` says what it allows, `limited` what it allows from then on, `granted` what one attempt of a
call may use, and `settled` what that attempt has come to, as its own run's log says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.account import Grant
from agent_run_ledger.engine.history import History, parse, unreadable
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.rules import budget, canonical
from agent_run_ledger.rules.budget import DAILY, FOR_GOOD, NOTHING, Amount, Limits, Most
from agent_run_ledger.words import ACCOUNTS, RunState

if TYPE_CHECKING:
    from agent_run_ledger.model import SharedBudget

_CHILDREN = f"{ACCOUNTS}children/"


def of_children(run_id: str) -> str:
    """The account that a run shares with those that it has begun, and they with theirs."""
    return _CHILDREN + run_id


def parent_of(account: str) -> str | None:
    """The run whose budget the account stands for; None where it is nobody's alone."""
    return account.removeprefix(_CHILDREN) if account.startswith(_CHILDREN) else None


def in_words(log_id: str) -> str:
    """What messages call an account: by the id of its log."""
    if (parent := parent_of(log_id)) is not None:
        return f"the budget of run {parent!r} and its children"
    name, day = _name_and_day(log_id)
    return f"budget {name!r}" + (f" of {day}" if day else "")


def _name_and_day(log_id: str) -> tuple[str, str | None]:
    name, _, day = log_id.removeprefix(FOR_GOOD).removeprefix(DAILY).partition("/")
    return name, day or None


def log_of(account: str, now: float) -> str:
    """The run id of the log in which an account is kept at this time, Unix seconds. Days are those of UTC."""
    return f"{account}/{datetime.fromtimestamp(now, UTC):%Y-%m-%d}" if account.startswith(DAILY) else account


def accounts(run: LiveRun) -> tuple[str, ...]:
    """On which accounts the calls of this run draw, and those of the runs that it begins, in the order in which they are asked."""
    begins = run.history.begins_runs or run.is_beginning
    limits = run.limits
    if not (begins or limits.within):
        return ()
    own = (of_children(run.run_id),) if begins and limits.are_of_calls else ()
    return tuple(sorted({*(limits.within or ()), *own}))


class Asked(NamedTuple):
    """What a run asks of an account, for one attempt of a call."""

    grant: Grant
    token: int
    """The fencing token under which the run is owned."""
    most: Most
    refuses_unknown: bool
    """Whether a call is refused of which nothing says what it may cost."""


# --- what an account grants -------------------------------------------------------------------------------------------


def opened(account: str, log_id: str, limits: Limits) -> Draft:
    """The first entry of an account."""
    payload = canonical.encode({"goal": in_words(log_id), "input": None})
    return Draft("created", None, {"format": 1, "account": account, **_written(limits)}, payload)


def grant(
    account: History, asked: Asked, limits: Limits | None, came_to: Mapping[Grant, Amount], lost: Collection[Grant] = ()
) -> tuple[list[Draft], Most | str]:
    """What the account answers to a call that may use so much, and the entries for it: the part that it may use, or why it may not begin.

    `limits` are what the account allows from now on; None: what its log says. `came_to` is what is known of earlier grants, and of
    `lost` ones it is known that nobody waits for their outcome. The answer is `budget.WAITS` where the call would fit if the others
    came to nothing. Asked again, for the same attempt, it grants the same.
    """
    drafts: list[Draft] = []
    if limits is None or limits.of_calls == account.granted.of_calls:
        limits = account.granted
    else:
        drafts.append(Draft("limited", None, _written(limits)))
    most = asked.most
    spent, held = account.account.spent, dict(account.account.held)
    for each, amount in came_to.items():
        if held.pop(each, None) is not None:
            spent = spent.plus(amount)
            drafts.append(settled(each, amount))
    mine = held.pop(asked.grant, None)
    if mine is not None and _covers(mine, most) and account.account.under[asked.grant] == asked.token:
        return drafts, _part(limits, mine, most)
    others = unknown = NOTHING
    for one, amount in held.items():
        if one in lost:
            unknown = unknown.plus(amount)
        else:
            others = others.plus(amount)
    if limits.usd is not None and most.usd is None and asked.refuses_unknown:
        return drafts, "nothing says what the call may cost: its model has no known price, or its request no bound"
    spent = spent.plus(unknown)
    answer = budget.overspent(limits, spent) or budget.reserve(limits, spent, others, most)
    if isinstance(answer, str):
        if answer is not budget.WAITS and unknown != NOTHING:
            answer = f"{answer} ({unknown.in_words} of it by calls of which nobody knows how they ended)"
        return drafts, answer
    drafts.append(granted(asked.grant, asked.token, answer))
    return drafts, _part(limits, answer, most)


def shown(account: History, came_to: Mapping[Grant, Amount]) -> SharedBudget:
    """An account as a reader sees it, with what is known by now of what it has granted."""
    spent, held = account.account.spent, NOTHING
    for each, amount in account.account.held.items():
        if isinstance(each, Grant) and each in came_to:
            spent = spent.plus(came_to[each])
        else:
            held = held.plus(amount)
    log_id, limits = account.run_id, account.granted
    parent = parent_of(log_id)
    name, day = _name_and_day(log_id) if parent is None else (None, None)
    from agent_run_ledger.model import SharedBudget

    return SharedBudget(log_id, name, day, parent, limits.tokens, limits.usd, *spent, *held)


def unread(log_id: str, trouble: str) -> SharedBudget:
    """The line of an account that cannot be read."""
    parent = parent_of(log_id)
    name, day = _name_and_day(log_id) if parent is None else (None, None)
    from agent_run_ledger.model import SharedBudget

    return SharedBudget(log_id, name, day, parent, None, None, *NOTHING, *NOTHING, trouble)


def granted(attempt: Grant, token: int, amount: Amount) -> Draft:
    """The entry that says what an attempt may use, and under which fencing token its run is owned."""
    return Draft("granted", None, {"grant": list(attempt), "under": token, "holds": amount.written()})


def settled(attempt: Grant, amount: Amount) -> Draft:
    """The entry that says what it has used."""
    return Draft("settled", None, {"grant": list(attempt), "charges": amount.written()})


def _written(limits: Limits) -> dict[str, Any]:
    return Limits(tokens=limits.tokens, usd=limits.usd).written()


def _covers(have: Amount, most: Most) -> bool:
    return (most.tokens or 0) <= have.tokens and (most.usd or 0) <= have.usd


def _part(limits: Limits, answer: Amount, most: Most) -> Most:
    """What the call may use, as the account's limits have left it."""
    return Most(
        answer.tokens if limits.tokens is not None else most.tokens,
        answer.usd if limits.usd is not None else most.usd,
        most.is_declared,
    )


# --- what grants have come to -----------------------------------------------------------------------------------------


class Uses:
    """What the calls of one run have come to, as its log says: a fold over its entries."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.size = 0
        self.limits = budget.NO_LIMITS
        """What the run may use itself, as its first entry says."""
        self.spent = NOTHING
        self.before: list[Draft] | None = None
        """What the run had used, and reserved, when it began its first child: an account of it begins with that."""
        self.begun: list[str] = []
        """The keys of the calls that are runs of their own."""
        self.carried: list[str] = []
        """Those that it has taken over from the run that it was made from, and that have cost what they have cost."""
        self._at_work: dict[str, tuple[Grant, int, Amount]] = {}
        """The attempts that have no outcome, by position: under which token they were dispatched, and what they have reserved."""
        self._ended: dict[Grant, Amount] = {}
        self._is_over = False

    def take(self, row: Row) -> None:
        """The next entry. Raises `StoreCorrupt` where it cannot be read."""
        try:
            body = parse(row.body)
            position = row.position or ""
            if row.kind == "intent":
                self._intent(position, body)
            elif row.kind == "outcome":
                self._at_work.pop(position, None)
                self._end(Grant(self.run_id, position, body["attempt"]), Amount.read(body.get("charges", {})))
            elif row.kind == "created":
                self.limits = Limits.read(body)
            elif row.kind == "forked" and self.begun:
                self.carried = list(self.begun)
                self._stand_before()
            self._is_over = RunState(body["state"]).is_terminal
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise unreadable(self.run_id, row, error) from error
        self.size = row.seq

    def _intent(self, position: str, body: dict[str, Any]) -> None:
        if position in self._at_work and "late" not in body:
            attempt, _, holds = self._at_work.pop(position)
            self._end(attempt, holds)
        attempt, holds = Grant(self.run_id, position, body["attempt"]), Amount.read(body.get("holds", {}))
        self._at_work[position] = attempt, body["token"], holds
        if "begins" in body:
            self.begun.append(body["key"])
            if self.before is None and "carried" not in body:
                self._stand_before()

    def _stand_before(self) -> None:
        at_work = [granted(*each) for each in self._at_work.values() if each[2] != NOTHING]
        self.before = [settled(Grant(self.run_id, "", 0), self.spent), *at_work]

    def _end(self, attempt: Grant, amount: Amount) -> None:
        self._ended[attempt] = self._ended.get(attempt, NOTHING).plus(amount)
        self.spent = self.spent.plus(amount)

    def came_to(self, asked: Grant) -> Amount | None:
        """What this attempt has used; None where that is not known yet. One that was never made has used nothing."""
        if asked in self._ended or not self._is_over:
            return self._ended.get(asked)
        attempt, _, holds = self._at_work.get(asked.position, (None, 0, NOTHING))
        return holds if attempt == asked else NOTHING

    def was_made(self, asked: Grant) -> bool:
        """Whether this attempt was dispatched."""
        return asked in self._ended or self._at_work.get(asked.position, (None,))[0] == asked
