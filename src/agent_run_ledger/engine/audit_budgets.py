"""The part of an audit that is about budgets: what calls reserve and use is held to the limits that the log states, and accounts to the runs
that draw on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from agent_run_ledger.contract import Row
from agent_run_ledger.engine.account import Grant
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.engine.sharing import Uses, of_children, parent_of
from agent_run_ledger.model import Finding
from agent_run_ledger.rules import money
from agent_run_ledger.rules.budget import NOTHING, Amount
from agent_run_ledger.words import ACCOUNTS

_OF_ACCOUNTS = frozenset({"created", "limited", "granted", "settled"})
"""All that the log of an account is made of; but for the first, no other log has any of these."""


class Found(Protocol):
    """Whoever is told what was found at an entry."""

    def __call__(
        self, seq: int | None, code: str, message: str, expected: object = None, found: object = None, /
    ) -> None: ...


class Settled(NamedTuple):
    """What an entry of an account says of an attempt of another run: what it has come to, or may."""

    seq: int
    grant: Grant
    token: int | None
    """Under which it was granted what it may use; None where it has come to so much."""
    amount: Amount


class BudgetAudit:
    """Whether the calls of one run keep to what its log allows them, as its entries are folded into `history`.

    Where a call has used more than it had reserved, and says so, the limits may be passed by as much.
    """

    def __init__(self, history: History, found: Found) -> None:
        self._history = history
        self._found = found
        self._over = NOTHING
        """What calls have used above what they had reserved."""
        self._is_account = history.run_id.startswith(ACCOUNTS)
        self._is_opening = False
        """Whether an account is told what its run had spent and reserved by the time of its first child."""
        self.settled: list[Settled] = []
        """For an account: what it says that attempts of other runs have come to."""
        self.given_up: dict[Grant, Settled] = {}
        """Those of them that have come to nothing, and for which nothing was granted again: as a rule they were never made."""
        self.opening: list[Settled] = []
        """For one of a run and its children: what it was opened with."""

    def before(self, row: Row, body: dict[str, Any]) -> None:
        """An entry that is not folded in yet."""
        kind = row.kind
        if kind in _OF_ACCOUNTS:
            self._of_accounts(row, body)
        elif self._is_account:
            self._found(row.seq, "lifecycle", f"an account has no entry of kind {kind!r}")
        if kind == "outcome" and ("charges" in body or "overran" in body):
            self._charged(row, body)

    def after(self, row: Row, body: dict[str, Any]) -> None:
        """It is folded in."""
        history = self._history
        if "carried" in body:
            return
        if row.kind == "intent":
            limit = history.stated.steps
            if limit is not None and (row.attempt == 1 or "continues" in body) and "late" not in body:
                used = history.steps + history.refused
                if used > limit:
                    self._found(
                        row.seq, "budget", f"{used} steps and refusals, and the log allows {limit}", limit, used
                    )
            if "holds" in body:
                self._within(row.seq, self._over)
        elif row.kind == "granted" and not self._is_opening:
            self._within(row.seq, NOTHING)

    def _within(self, seq: int, over: Amount) -> None:
        """What is spent and reserved is within the limits."""
        limits, account = self._history.stated, self._history.account
        used = account.spent
        for amount in account.held.values():
            used = used.plus(amount)
        kept = used.minus(over) if over is not NOTHING else used
        is_over = limits.tokens is not None and kept.tokens > limits.tokens
        if is_over or (limits.usd is not None and kept.usd > limits.usd):
            allowed = Amount(limits.tokens or 0, limits.usd or NOTHING.usd)
            message = f"{used.in_words} are spent and reserved, and the log allows {allowed.in_words}"
            self._found(seq, "budget", message, allowed.in_words, used.in_words)

    def _charged(self, row: Row, body: dict[str, Any]) -> None:
        """More than was reserved is used by calls that say so, and by those of which nobody had asked to reserve anything."""
        held = self._history.account.held.get(row.position or "", NOTHING)
        charged = Amount.read(body.get("charges", {}))
        has_overrun = bool((held.tokens and charged.tokens > held.tokens) or (held.usd and charged.usd > held.usd))
        if has_overrun is not ("overran" in body):
            says = "says so" if "overran" in body else "does not say so"
            message = (
                f"of {held.in_words} that were reserved {charged.in_words} were used, and the entry {says} (overran)"
            )
            self._found(row.seq, "budget", message, has_overrun, "overran" in body)
        tokens = max(0, charged.tokens - held.tokens)
        usd = max(NOTHING.usd, money.add((charged.usd, held.usd.copy_negate())))
        if tokens or usd:
            self._over = self._over.plus(Amount(tokens, usd))

    def _of_accounts(self, row: Row, body: dict[str, Any]) -> None:
        kind, run_id = row.kind, self._history.run_id
        if kind == "created":
            account = body.get("account")
            is_its_own = account == run_id or (type(account) is str and run_id.startswith(f"{account}/"))
            if self._is_account is not ("account" in body) or (self._is_account and not is_its_own):
                self._found(row.seq, "lifecycle", f"the log {run_id!r} is said to be that of account {account!r}")
            self._is_opening = parent_of(run_id) is not None
            return
        if not self._is_account:
            self._found(row.seq, "lifecycle", f"an entry of kind {kind!r} in a log that is no account's")
            return
        if kind == "limited":
            self._is_opening = False
            return
        grant = Grant(*body["grant"])
        is_granted = kind == "granted"
        said = Settled(
            row.seq,
            grant,
            body["under"] if is_granted else None,
            Amount.read(body["holds" if is_granted else "charges"]),
        )
        # what the parent had spent and reserved, and what its children had that were carried over
        is_before = not is_granted and grant[1:] == ("", 0)
        self._is_opening = self._is_opening and (is_before or (is_granted and grant.run_id == parent_of(run_id)))
        if self._is_opening:
            self.opening.append(said)
        elif is_granted:
            self.given_up.pop(grant, None)
        else:
            if said.amount == NOTHING:
                self.given_up[grant] = said
            else:
                self.settled.append(said)
            if grant not in self._history.account.held:
                self._found(
                    row.seq, "budget", f"what {_named(grant)} has used is counted, and nothing was granted for it"
                )


def _named(grant: Grant) -> str:
    return f"attempt {grant.attempt} of the call at {grant.position} of run {grant.run_id!r}"


# --- accounts and the runs that draw on them --------------------------------------------------------------------------


class Settlements:
    """What accounts say of the attempts of runs, to be held to what the logs of these runs say."""

    def __init__(self) -> None:
        self._by_run: dict[str, list[tuple[str, Settled]]] = {}
        self._openings: dict[str, list[Settled]] = {}
        """What the account of a run and its children was opened with, by that run."""

    def note(self, account: str, audit: BudgetAudit) -> None:
        """The log of an account was read whole."""
        for each in (*audit.settled, *audit.given_up.values()):
            self._by_run.setdefault(each.grant.run_id, []).append((account, each))
        if (parent := parent_of(account)) is not None:
            self._openings[parent] = audit.opening

    @property
    def runs(self) -> Iterator[str]:
        """The runs whose logs are to be read again."""
        yield from self._by_run
        yield from (each for each in self._openings if each not in self._by_run)

    def hold(self, run_id: str, rows: Iterable[Row], report: Callable[[Finding], None]) -> None:
        """Hold what was said of one run to its log. Raises `StoreCorrupt` where that cannot be read."""
        uses = Uses(run_id)
        said = self._by_run.get(run_id, ())
        came_to: dict[Grant, list[Amount]] = {each.grant: [] for _, each in said}
        for row in rows:
            uses.take(row)
            if row.attempt is None or row.kind not in ("intent", "outcome"):
                continue
            # an attempt ends with its outcome, or for all that is known when the next one begins; what is settled then may be added to
            grant = Grant(run_id, row.position or "", row.attempt - (row.kind == "intent"))
            if (known := came_to.get(grant)) is not None and (amount := uses.came_to(grant)) is not None:
                known.append(amount)
        for account, each in said:
            known = came_to[each.grant]
            if (last := uses.came_to(each.grant)) is not None:
                known = [*known, last]
            if each.amount not in known and not (each.amount == NOTHING and not uses.was_made(each.grant)):
                expected, found = known[-1].in_words if known else None, each.amount.in_words
                says = f"says {expected}" if known else "does not say that it has ended"
                message = f"{_named(each.grant)} is settled with {found}, and that run's log {says}"
                report(Finding(account, each.seq, "budget", message, expected, found))
        if (opening := self._openings.get(run_id)) is not None:
            self._hold_opening(run_id, uses.before or [], opening, report)

    def _hold_opening(
        self, run_id: str, before: list[Draft], opening: list[Settled], report: Callable[[Finding], None]
    ) -> None:
        expected = [_told(draft) for draft in before]
        found = [(each.grant, each.token, each.amount) for each in opening][: len(expected)]
        if found != expected:
            message = f"it does not begin with what run {run_id!r} had spent and reserved when it began its first child"
            report(Finding(of_children(run_id), 2, "budget", message, _shown(expected), _shown(found)))


def _told(draft: Draft) -> tuple[Grant, int | None, Amount]:
    fields = draft.fields
    return Grant(*fields["grant"]), fields.get("under"), Amount.read(fields.get("holds", fields.get("charges", {})))


def _shown(told: Iterable[tuple[Grant, int | None, Amount]]) -> str:
    return "; ".join(f"{grant.position or 'before'}: {amount.in_words}" for grant, _, amount in told)
