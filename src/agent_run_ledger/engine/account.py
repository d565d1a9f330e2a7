"""What is spent, and what calls have reserved: the part of a fold over entries that is about money."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent_run_ledger.rules.budget import NOTHING, Amount


class Grant(NamedTuple):
    """One attempt of a call, by what it is known where runs share a budget."""

    run_id: str
    position: str
    attempt: int


class Account:
    """As the entries tell it: intents reserve, outcomes give back what was reserved and say what was used.

    In the log of a budget that runs share, grants reserve and settlements give back, likewise.
    """

    __slots__ = ("held", "program", "saved", "spent", "under")

    def __init__(self, spent: Amount = NOTHING, held: Mapping[str | Grant, Amount] | None = None) -> None:
        self.spent = spent
        """What calls have used, and what those may have used of which that is not known."""
        self.held: dict[str | Grant, Amount] = dict(held or {})
        """What calls may use that are dispatched and have no outcome, by position."""
        self.under: dict[Grant, int] = {}
        """Under which fencing token its run was owned when a call was granted what it may use."""
        self.saved = NOTHING
        """What was not paid again each time another owner's program began anew and was given what is recorded."""
        self.program = 0
        """The fencing token under which a program has made calls last."""

    def began(self, token: int) -> None:
        """Another program makes a call, the first under this fencing token: it was given all that had been paid for by then."""
        self.saved, self.program = self.saved.plus(self.spent), token

    def copy(self) -> Account:
        """What is spent and held, to go on with."""
        return Account(self.spent, self.held)

    def take(self, kind: str, position: str | None, fields: Mapping[str, Any]) -> None:
        """Take one more entry in. What an earlier attempt of the same step has used nobody knows: it is as much as it could."""
        if kind == "intent":
            if self.held and position in self.held and "late" not in fields:
                self.spent = self.spent.plus(self.held.pop(position))
            if "holds" in fields:
                self.held[position or ""] = Amount.read(fields["holds"])
        elif kind == "outcome":
            if self.held:
                self.held.pop(position or "", None)
            if "charges" in fields:
                self.spent = self.spent.plus(Amount.read(fields["charges"]))
        elif kind == "granted":
            grant = Grant(*fields["grant"])
            self.held[grant], self.under[grant] = Amount.read(fields["holds"]), fields["under"]
        elif kind == "settled":
            grant = Grant(*fields["grant"])
            self.held.pop(grant, None)
            self.under.pop(grant, None)
            self.spent = self.spent.plus(Amount.read(fields["charges"]))

    def closed(self) -> None:
        """The run has ended: what is not known to have come to less has come to what it reserved."""
        for amount in self.held.values():
            self.spent = self.spent.plus(amount)
        self.held.clear()


COUNTED = frozenset({"intent", "outcome", "granted", "settled"})
"""The kinds of entries that an account takes in."""
