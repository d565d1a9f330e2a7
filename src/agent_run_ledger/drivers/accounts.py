"""The budgets that runs share, as one ledger object draws on them: each account is owned for the moment of a draw."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from agent_run_ledger.contract import Clock, Lease, Store
from agent_run_ledger.drivers import reading
from agent_run_ledger.engine import runs, sharing
from agent_run_ledger.engine.account import Grant
from agent_run_ledger.engine.effects import Draw
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft, seal
from agent_run_ledger.engine.sharing import Asked, Uses
from agent_run_ledger.errors import InvalidArguments, LeaseLost, RunNotFound, RunOwned, StoreError
from agent_run_ledger.rules import budget
from agent_run_ledger.rules.budget import NOTHING, Amount, Limits, Most
from agent_run_ledger.rules.names import child_of, is_account

if TYPE_CHECKING:
    from agent_run_ledger.model import SharedBudget

_LEASE_SECONDS = 5.0
"""How long a draw may take before another owner takes the account: a process that dies in it holds up the others for so long at the most."""
_KEPT = 4096
"""So many accounts, and the uses of so many runs, are kept in memory: the others are read when they are asked."""

K = TypeVar("K")
V = TypeVar("V")


class Accounts:
    """One owner's hand on all accounts. Of its threads one draws after the other."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        owner: str,
        declared: Mapping[str, Limits],
        held: Callable[[str], LiveRun | None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._owner = owner
        self._declared = declared
        """What this program has declared about accounts, by their names."""
        self._held = held
        """A run that this very owner holds now."""
        self._lock = threading.Lock()
        self._full: set[str] = set()
        """Accounts that had no room when they were last asked: before one of them is owned again it is looked at."""
        self._said: dict[str, Limits] = {}
        """What of that was said to accounts by now: from then on what their logs say holds, which others may have changed."""
        self._in_force: dict[str, Limits] = {}
        """What accounts allow, as their logs said last: a new day begins with it."""
        self._books: dict[str, History] = {}
        """The logs of accounts, by their ids, as far as they were read."""
        self._uses: dict[str, Uses] = {}

    def draw(self, effect: Draw) -> Most | str | None:
        """What this attempt may use; why it may not begin; None where others have to come to an end first.

        Raises `InvalidArguments` where a budget is declared nowhere, and a `StoreError`.
        """
        run, most = effect.run, effect.most
        attempt = Grant(run.run_id, effect.call.position, effect.attempt)
        for account in effect.accounts:
            log_id = sharing.log_of(account, self._clock.now())
            try:
                with self._lock:
                    asked = Asked(attempt, run.token, most, run.refuses_unknown_prices)
                    answer = self._draw(account, log_id, run, asked)
            except (RunOwned, LeaseLost):  # another owner draws just now
                return None
            if answer is budget.WAITS:
                return None
            if isinstance(answer, str):
                return f"{sharing.in_words(log_id)}: {answer}"
            most = answer
        return most

    def settle(self, run_id: str) -> None:
        """Write down what a run that has ended came to, in each account that has not: its own log is about to go.

        Raises `RunOwned` where another owner draws just now.
        """
        for log_id in [each.head.run_id for each in self._store.summaries() if is_account(each.head.run_id)]:
            with self._lock:
                if all(asked.run_id != run_id for asked in self._came_to(self._read(log_id))):
                    continue
                lease = self._store.claim(log_id, self._owner, _LEASE_SECONDS)
                try:
                    came_to = self._came_to(self._read(log_id)).items()
                    drafts = [sharing.settled(asked, amount) for asked, amount in came_to if asked.run_id == run_id]
                    if drafts:
                        self._append(log_id, lease, drafts)
                finally:
                    with suppress(StoreError):  # the lease runs out by itself
                        self._store.release(log_id, lease.token)

    def _draw(self, account: str, log_id: str, run: LiveRun, asked: Asked) -> Most | str:
        declared = run.limits if sharing.parent_of(account) == run.run_id else self._declared.get(account)
        declared = declared and Limits(tokens=declared.tokens, usd=declared.usd)
        news = declared if declared != self._said.get(account) else None
        if log_id in self._full and (answer := self._ask(log_id, asked, news)[1]) is budget.WAITS:
            return answer
        lease = self._claim(account, log_id, news or self._in_force.get(account) or declared)
        try:
            drafts, answer = self._ask(log_id, asked, news)
            if drafts:
                self._append(log_id, lease, drafts)
        finally:
            with suppress(StoreError):  # the lease runs out by itself
                self._store.release(log_id, lease.token)
        if news is not None:
            _keep(self._said, account, news)
        _keep(self._in_force, account, self._books[log_id].granted)
        (self._full.add if answer is budget.WAITS else self._full.discard)(log_id)
        return answer

    def _ask(self, log_id: str, asked: Asked, limits: Limits | None) -> tuple[list[Draft], Most | str]:
        """What the account would answer now, and the entries for it."""
        book = self._read(log_id)
        came_to = self._came_to(book, asked.grant)
        answered = sharing.grant(book, asked, limits, came_to)
        if answered[1] is budget.WAITS and (lost := self._lost(book, asked.grant)):
            came_to = self._came_to(book, asked.grant)  # what is not under way any more may just have ended
            answered = sharing.grant(book, asked, limits, came_to, lost - came_to.keys())
        return answered

    def _lost(self, book: History, asked: Grant) -> set[Grant]:
        """The grants for whose outcome nobody waits: whoever asked for them has died, or has lost the run since."""
        return {each for each, token in book.account.under.items() if self._is_given_up(each, token, asked)}

    def _is_given_up(self, grant: Grant, token: int, asked: Grant | None) -> bool:
        """Whether the call for which this was granted, under this fencing token, is not under way any more; `asked` is made now."""
        if asked is not None and grant[:2] == asked[:2]:
            return grant != asked  # an earlier attempt of it
        run = self._held(grant.run_id)
        if run is not None and run.token == token:
            return grant.position not in run.made
        head = self._store.head(grant.run_id)
        is_owned = head is not None and head.lease_left is not None and head.lease_left > 0
        return not (is_owned and head is not None and head.token == token)

    def _is_let_go(self, grant: Grant, token: int, asked: Grant | None) -> bool:
        """Whether that call cannot be dispatched under this token any more, whatever its owner does. One whose lease ran out still could."""
        if asked is not None and grant == asked:
            return False
        run = self._held(grant.run_id)
        if run is not None and run.token == token:
            return grant.position not in run.made
        head = self._store.head(grant.run_id)
        return head is None or head.owner is None or head.token != token

    def _claim(self, account: str, log_id: str, limits: Limits | None) -> Lease:
        """Own the account, which is opened where it was not. Raises `RunOwned`."""
        try:
            return self._store.claim(log_id, self._owner, _LEASE_SECONDS)
        except RunNotFound:
            pass
        before: list[Draft] = []
        if (parent := sharing.parent_of(account)) is not None:
            uses = self._used(parent)
            limits, before = limits or uses.limits, list(uses.before or ())
            for child in uses.carried:
                before.append(sharing.settled(Grant(child_of(child), "", 0), self._whole(child_of(child))))
        if limits is None:
            raise InvalidArguments(
                f"nothing is known of {sharing.in_words(log_id)}, which this run shares: declare it with `ledger.budget(...)` "
                "in every program that drives such runs. Nothing was dispatched."
            )
        secret, drafts = os.urandom(32), [sharing.opened(account, log_id, limits), *before]
        sealed = seal(History(log_id, secret), self._store.first_token(), self._clock.now(), drafts)
        rows, listing = [row for row, _ in sealed], runs.listing(sealed[0][1])
        lease = self._store.create(log_id, self._owner, _LEASE_SECONDS, secret, rows, listing)
        return lease if lease is not None else self._store.claim(log_id, self._owner, _LEASE_SECONDS)

    def _whole(self, run_id: str) -> Amount:
        """What a run has spent, and all that it has begun."""
        uses = self._used(run_id)
        spent = uses.spent
        for key in uses.begun:
            spent = spent.plus(self._whole(child_of(key)))
        return spent

    def _read(self, log_id: str) -> History:
        """The account as it is now. What stands in a log stays, so only what is new is read."""
        book = self._books.get(log_id) or _keep(self._books, log_id, History(log_id, self._store.secret(log_id)))
        book.take(reading.pages(self._store, log_id, book.size))
        return book

    def _append(self, log_id: str, lease: Lease, drafts: list[Draft]) -> None:
        book = self._books[log_id]
        sealed = seal(book, lease.token, self._clock.now(), drafts)
        inbox = 0  # nobody asks anything of an account
        if not self._store.append(log_id, lease.token, inbox, [row for row, _ in sealed], synced=True):
            raise LeaseLost(log_id, lease.token)
        for row, body in sealed:
            book.absorb(row, body)

    def _came_to(self, book: History, asked: Grant | None = None) -> dict[Grant, Amount]:
        """What grants have come to of which that is known by now: a run's own log says so, and what has ended stays so.

        One whose call was given up before it was dispatched has come to nothing.
        """
        found: dict[Grant, Amount] = {}
        for grant, token in book.account.under.items():
            uses = self._used(grant.run_id)
            amount = uses.came_to(grant)
            if amount is None and not uses.was_made(grant) and self._is_let_go(grant, token, asked):
                uses = self._used(grant.run_id)  # whoever has let go of it may have dispatched it just before
                amount = uses.came_to(grant) if uses.was_made(grant) else NOTHING
            if amount is not None:
                found[grant] = amount
        return found

    def _used(self, run_id: str) -> Uses:
        uses = self._uses.get(run_id) or _keep(self._uses, run_id, Uses(run_id))
        for page in reading.pages(self._store, run_id, uses.size, payloads_up_to=0):
            for row in page:
                uses.take(row)
        return uses

    # --- looking ------------------------------------------------------------------------------------------------------

    def look(self, log_id: str) -> SharedBudget:
        """How much of it is used, by what the logs of its runs say now. Writes nothing. Raises `RunNotFound` and `StoreCorrupt`."""
        with self._lock:
            book = self._read(log_id)
            return sharing.shown(book, self._came_to(book))


def _keep(known: dict[K, V], key: K, value: V) -> V:
    """Put it behind the others, of which the oldest goes where there are too many."""
    known.pop(key, None)
    if len(known) >= _KEPT:
        del known[next(iter(known))]
    known[key] = value
    return value
