"""When a run has used up what it may use, and what a call may reserve of the rest."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agent_run_ledger.errors import InvalidName
from agent_run_ledger.rules import money
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import ACCOUNTS

if TYPE_CHECKING:
    from agent_run_ledger.model import Budget

ENTRIES_PER_STEP = 20
"""A run that writes many entries but few steps (values, retries, parks) ends at this many entries per allowed step."""


class Amount(NamedTuple):
    """What calls use, or may use: tokens of all kinds, and US dollars."""

    tokens: int = 0
    usd: Decimal = Decimal(0)

    def plus(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, money.add((self.usd, other.usd)))

    def minus(self, other: Amount) -> Amount:
        return self.plus(Amount(-other.tokens, other.usd.copy_negate()))

    @property
    def in_words(self) -> str:
        """`1,200 tokens and 0.5 USD`; what is nothing is left out."""
        parts = (("tokens", self.tokens), ("usd", self.usd))
        return " and ".join(_named(name, amount) for name, amount in parts if amount) or "nothing"

    def written(self) -> dict[str, Any]:
        """As it stands in an entry; what is nothing is left out."""
        named: dict[str, Any] = {"tokens": self.tokens} if self.tokens else {}
        if self.usd:
            named["usd"] = format(self.usd, "f")
        return named

    @classmethod
    def read(cls, written: dict[str, Any]) -> Amount:
        return cls(written.get("tokens", 0), Decimal(written.get("usd", 0)))


NOTHING = Amount()


_LAST = 253_402_300_799
"""The last second of which a datetime can tell."""

_WRITTEN = {"steps": "max_steps", "tokens": "max_tokens", "usd": "max_usd", "seconds": "max_seconds"}
"""What a limit is called in a run's first entry, where that is not its own name."""


class Limits(NamedTuple):
    """How much a run may use; None: as much as it likes."""

    steps: int | None = None
    tokens: int | None = None
    usd: Decimal | None = None
    seconds: float | None = None
    deadline: float | None = None
    """The Unix time from which on nothing new is dispatched."""
    notice_at: float | None = None
    within: tuple[str, ...] | None = None
    """The accounts that it shares with other runs: their calls are granted by these, too."""

    @classmethod
    def of(cls, given: Budget | None) -> Limits:
        """Those of a budget; none where there is no budget."""
        if given is None:
            return cls()
        assert given.usd is None or isinstance(given.usd, Decimal)
        assert isinstance(given.within, tuple)
        deadline = given.deadline.timestamp() if given.deadline is not None else None
        return cls(
            given.steps,
            given.tokens,
            given.usd,
            given.seconds,
            deadline,
            given.notice_at,
            tuple(each.account for each in given.within) or None,
        )

    def over(self, others: Limits) -> Limits:
        """These, and of the others those that are not said here."""
        own: list[Any] = [mine if mine is not None else other for mine, other in zip(self, others, strict=True)]
        return Limits(*own)

    def written(self) -> dict[str, Any]:
        """As they stand in an entry."""
        named = {name: limit for name, limit in self._asdict().items() if limit is not None}
        if self.usd is not None:
            named["usd"] = format(self.usd, "f")
        if self.within is not None:
            named["within"] = list(self.within)
        return {_WRITTEN.get(name, name): limit for name, limit in named.items()}

    @classmethod
    def read(cls, written: dict[str, Any]) -> Limits:
        """Those that an entry says; it may say other things, too."""
        named = {name: written.get(_WRITTEN.get(name, name)) for name in cls._fields}
        usd, within = named["usd"], named["within"]
        return cls(**named)._replace(
            usd=Decimal(usd) if usd is not None else None, within=tuple(within) if within is not None else None
        )

    def as_budget(self) -> Budget | None:
        """As whoever declares them writes them; None where there are none."""
        if self == NO_LIMITS:
            return None
        from datetime import UTC, datetime

        from agent_run_ledger.model import Budget, SharedLimits

        deadline = datetime.fromtimestamp(min(self.deadline, _LAST), UTC) if self.deadline is not None else None
        within = tuple(SharedLimits(account) for account in self.within or ())
        return Budget(self.steps, self.tokens, self.usd, self.seconds, deadline, self.notice_at, within)

    @property
    def of_calls(self) -> tuple[int | None, Decimal | None]:
        """Those of tokens and of dollars."""
        return self.tokens, self.usd

    @property
    def of_spending(self) -> Limits:
        """Those that an audit holds the log to: of steps, tokens and dollars."""
        return Limits(self.steps, self.tokens, self.usd)

    @property
    def are_of_calls(self) -> bool:
        """Whether calls have to reserve what they may use of them."""
        return self.tokens is not None or self.usd is not None


NO_LIMITS = Limits()

FOR_GOOD, DAILY = f"{ACCOUNTS}budget/", f"{ACCOUNTS}daily/"
"""Accounts of budgets that are spent once and for all, and of those of which each day has its own."""

_LONGEST_NAME = 200


def shared_budget(
    name: str,
    *,
    tokens: int | None = None,
    usd: Decimal | int | str | float | None = None,
    tokens_per_day: int | None = None,
    usd_per_day: Decimal | int | str | float | None = None,
) -> Budget:
    """A budget that runs share, by name: to be given as `budget=`, or within one, `Budget(usd=2, within=pool)`.

    All runs of all programs that have it, and those that these begin, use no more than this together: in all, or on each day (in UTC).
    Every program that drives such runs declares it; the limits that were declared last hold. Nothing is written here. Raises
    `ValueError` where it limits nothing, and `InvalidName`.
    """
    from agent_run_ledger.model import Budget, SharedLimits

    if "/" in check_name("the budget's name", name):
        raise InvalidName(f"the budget's name {name!r} holds a slash, which stands between name and day")
    if (size := len(name.encode())) > _LONGEST_NAME:
        raise InvalidName(f"the budget's name takes {size} bytes, at most {_LONGEST_NAME} are allowed")
    terms = {
        FOR_GOOD + name: Budget(tokens=tokens, usd=usd),
        DAILY + name: Budget(tokens=tokens_per_day, usd=usd_per_day),
    }
    within = [SharedLimits(account, *Limits.of(each).of_calls) for account, each in terms.items() if each != Budget()]
    if not within:
        raise ValueError(f"budget {name!r}: give tokens=, usd=, tokens_per_day= or usd_per_day=")
    return Budget(within=tuple(within))


def shared(given: Budget | None) -> dict[str, Limits]:
    """What a budget declares about those that it is within, by their accounts."""
    within = given.within if given is not None else ()
    assert isinstance(within, tuple)
    terms = {each.account: Limits(tokens=each.tokens, usd=each.usd) for each in within}
    return {account: limits for account, limits in terms.items() if limits != NO_LIMITS}


class Most(NamedTuple):
    """What a call may use at the most, as far as that is known: as its tool declares, or as it is estimated from what it asks for."""

    tokens: int | None = None
    usd: Decimal | None = None
    is_declared: bool = False


WAITS: Literal["waits"] = "waits"
"""The answer to a call that fits as soon as others have used less than they may."""


def reserve(limits: Limits, spent: Amount, held: Amount, most: Most) -> Amount | str:
    """What a call reserves, `WAITS`, or why it may not begin.

    One of which it is not known what it may use reserves all that is left, and so does one whose estimate is more than that: an
    estimate is no promise. Where a tool declares more than what is left, nothing that others give back would help.
    """
    taken: list[Any] = []
    is_waiting = False
    each: list[tuple[str, Any, Any, Any, Any]] = [
        ("tokens", limits.tokens, spent.tokens, held.tokens, most.tokens),
        ("usd", limits.usd, spent.usd, held.usd, most.usd),
    ]
    for name, limit, used, others, asked in each:
        if limit is None:
            taken.append(asked or 0)
            continue
        left = money.add((limit, used.copy_negate())) if isinstance(used, Decimal) else limit - used
        if left <= 0:
            return f"{_named(name, used)} of {_named(name, limit)} are spent"
        if asked is None or (asked > left and not most.is_declared):
            asked = left
        if asked > left:
            return f"the call may use {_named(name, asked)}, and of {_named(name, limit)} {_named(name, left)} are left"
        is_waiting = is_waiting or asked + others > left
        taken.append(asked)
    return WAITS if is_waiting else Amount(taken[0], Decimal(taken[1]))


def overspent(limits: Limits, spent: Amount) -> str | None:
    """Why nothing more is dispatched, or None: calls have used more than they were to."""
    if limits.tokens is not None and spent.tokens > limits.tokens:
        return f"{_named('tokens', spent.tokens)} were used where {_named('tokens', limits.tokens)} were allowed"
    if limits.usd is not None and spent.usd > limits.usd:
        return f"{_named('usd', spent.usd)} were used where {_named('usd', limits.usd)} were allowed"
    return None


def _named(name: str, amount: Any) -> str:
    return f"{amount:,} tokens" if name == "tokens" else f"{amount.normalize():f} USD"


def nearly_spent(limits: Limits, steps: int, spent: Amount, fraction: float) -> list[str]:
    """A sentence for each limit of which at least this fraction is used. It says nothing that grows, so that it is said once."""
    used = (("steps", limits.steps, steps), ("tokens", limits.tokens, spent.tokens), ("USD", limits.usd, spent.usd))
    return [
        f"more than {fraction:.0%} of the budget of {limit} {name} is used"
        for name, limit, amount in used
        if limit is not None and amount >= Decimal(repr(float(fraction))) * limit
    ]


def ran_for(limits: Limits, seconds: float) -> str | None:
    """Why nothing more is dispatched, or None: the run was at work for so many seconds."""
    if limits.seconds is None or seconds < limits.seconds:
        return None
    return f"it was at work for {seconds:.1f} s, and may be for {limits.seconds:g} s"


def used_up(limits: Limits, steps: int, refused: int, entries: int, now: float) -> str | None:
    """Why no further step may start at `now`, Unix seconds, whatever it may use; or None."""
    limit, deadline = limits.steps, limits.deadline
    assert limit is not None
    if steps + refused < limit and entries < ENTRIES_PER_STEP * limit and (deadline is None or now < deadline):
        return None  # as nearly always, and asked before every step
    return steps_spent(limit, steps, refused) or entries_spent(limit, entries) or too_late(deadline, now)


def steps_spent(limit: int, steps: int, refused: int) -> str | None:
    """Why no further step may start, or None. First dispatches and refusals count against the limit, retries do not."""
    return f"all {limit} steps of its budget are used" if steps + refused >= limit else None


def entries_spent(limit: int, entries: int) -> str | None:
    """Why no further entry may be written that is no outcome, or None."""
    if entries < ENTRIES_PER_STEP * limit:
        return None
    return f"it has written {entries} entries, {ENTRIES_PER_STEP} times its budget of {limit} steps"


def too_late(deadline: float | None, now: float) -> str | None:
    """Why nothing new may be dispatched at `now`, or None. Both are Unix seconds."""
    return f"its deadline passed {now - deadline:.1f} s ago" if deadline is not None and now >= deadline else None
