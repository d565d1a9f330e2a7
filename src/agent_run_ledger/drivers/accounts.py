"""The budgets that runs share, as one ledger object draws on them: each account is owned for the moment of a draw."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress

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
from agent_run_ledger.model import SharedBudget
from agent_run_ledger.rules import budget
from agent_run_ledger.rules.budget import Amount, Limits, Most

_LEASE_SECONDS = 5.0
"""How long a draw may take before another owner takes the account: a process that dies in it holds up the others for so long at the most."""
_KEPT = 256
"""So many accounts, and the uses of so many runs, are kept in memory: the others are read when they are asked."""


class Accounts:
    """One owner's hand on all accounts. Of its threads one draws after the other."""

    def __init__(self, store: Store, clock: Clock, owner: str, declared: Mapping[str, Limits]) -> None:
        self._store = store
        self._clock = clock
        self._owner = owner
        self._declared = declared
        """What this program has declared about accounts, by their names."""
        self._lock = threading.Lock()
        self._full: set[str] = set()
        """Accounts that had no room when they were last asked: before one of them is owned again it is looked at."""
        self._books: dict[str, History] = {}
        """The logs of accounts, by their ids, as far as they were read."""
        self._uses: dict[str, Uses] = {}

    def draw(self, effect: Draw) -> Most | str | None:
        """What this attempt may use; why it may not begin; None where others have to come to an end first.

        Raises `InvalidArguments` where a budget is declared nowhere, and a `StoreError`.
        """
        run, most = effect.run, effect.most
        attempt = Grant(run.run_id, effect.call.position, effect.attempt)
        for account in sharing.accounts(run):
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

    def _draw(self, account: str, log_id: str, run: LiveRun, asked: Asked) -> Most | str:
        limits = run.limits if sharing.parent_of(account) == run.run_id else self._declared.get(account)
        if log_id in self._full and (answer := self._ask(log_id, run, asked, limits)[1]) is budget.WAITS:
            return answer
        lease = self._claim(account, log_id, limits)
        try:
            drafts, answer = self._ask(log_id, run, asked, limits)
            if drafts:
                self._append(log_id, lease, drafts)
        finally:
            with suppress(StoreError):  # the lease runs out by itself
                self._store.release(log_id, lease.token)
        (self._full.add if answer is budget.WAITS else self._full.discard)(log_id)
        return answer

    def _ask(self, log_id: str, run: LiveRun, asked: Asked, limits: Limits | None) -> tuple[list[Draft], Most | str]:
        """What the account would answer now, and the entries for it."""
        book = self._read(log_id)
        came_to = self._came_to(book)
        answered = sharing.grant(book, asked, limits, came_to)
        if answered[1] is budget.WAITS and (lost := self._lost(book, run, asked.grant.position)):
            answered = sharing.grant(book, asked, limits, came_to, lost)
        return answered

    def _lost(self, book: History, run: LiveRun, position: str) -> set[Grant]:
        """The grants for whose outcome nobody waits: whoever asked for them has died, or has lost the run since."""
        tokens: dict[str, int | None] = {}
        lost: set[Grant] = set()
        for grant, token in book.account.under.items():
            if grant.run_id == run.run_id:
                is_lost = sharing.is_lost(run, position, grant, token)
            else:
                if grant.run_id not in tokens:
                    head = self._store.head(grant.run_id)
                    is_owned = head is not None and head.lease_left is not None and head.lease_left > 0
                    tokens[grant.run_id] = head.token if head is not None and is_owned else None
                is_lost = tokens[grant.run_id] != token
            if is_lost:
                lost.add(grant)
        return lost

    def _claim(self, account: str, log_id: str, limits: Limits | None) -> Lease:
        """Own the account, which is opened where it was not. Raises `RunOwned`."""
        try:
            return self._store.claim(log_id, self._owner, _LEASE_SECONDS)
        except RunNotFound:
            pass
        before: list[Draft] = []
        if (parent := sharing.parent_of(account)) is not None:
            uses = self._used(parent)
            limits, before = limits or uses.limits, uses.before
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

    def _read(self, log_id: str) -> History:
        """The account as it is now. What stands in a log stays, so only what is new is read."""
        book = self._books.get(log_id)
        if book is None:
            if len(self._books) >= _KEPT:
                self._books.clear()
                self._full.clear()
            book = self._books[log_id] = History(log_id, self._store.secret(log_id))
        for page in reading.pages(self._store, log_id, book.size):
            book.take(page)
        return book

    def _append(self, log_id: str, lease: Lease, drafts: list[Draft]) -> None:
        book = self._books[log_id]
        sealed = seal(book, lease.token, self._clock.now(), drafts)
        inbox = 0  # nobody asks anything of an account
        if not self._store.append(log_id, lease.token, inbox, [row for row, _ in sealed], synced=True):
            raise LeaseLost(log_id, lease.token)
        for row, body in sealed:
            book.absorb(row, body)

    def _came_to(self, book: History) -> dict[Grant, Amount]:
        """What grants have come to of which that is known by now: whichever run it is, its own log says so, and what has ended stays so."""
        grants = (each for each in book.account.held if isinstance(each, Grant))
        known = ((each, self._used(each.run_id).came_to(each)) for each in grants)
        return {each: amount for each, amount in known if amount is not None}

    def _used(self, run_id: str) -> Uses:
        uses = self._uses.get(run_id)
        if uses is None:
            if len(self._uses) >= _KEPT:
                self._uses.clear()
            uses = self._uses[run_id] = Uses(run_id)
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
