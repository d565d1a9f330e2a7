"""The clock of a ledger: seconds that go on while its machine sleeps, is off, or has its wall clock set, and never go back."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.connections import FULL, Connections

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

_AHEAD = "SELECT ahead FROM boots WHERE boot = ?"
_REACHED = "SELECT max(reached) FROM boots"
_BEGIN = "INSERT INTO boots (boot, ahead, reached) VALUES (?, ?, ?) ON CONFLICT (boot) DO NOTHING"
_MARK = "UPDATE boots SET reached = max(reached, ?), news = news + ? WHERE boot = ?"


class Timeline:
    """Tells the time by which runs are due and workers are heard.

    The clock of leases starts anew with the machine, and a timer may have to outlive that; the wall clock may be set back by years, and
    what was due while it was wrong would be lost. So within one boot this is the clock of leases, plus a constant that whoever
    opens the ledger first in that boot writes down: then the wall clock is asked, once, and it is believed where it is not behind what
    was reached before. If it was wrong, timers come early, or late by as long as the machine was off; none is later than it was when
    it was set.
    """

    def __init__(self, files: Connections, clock: Clock) -> None:
        """Raises a `StoreError` where this boot is new to the ledger and that cannot be written down."""
        self._clock = clock
        self._boot = boot_id()
        self._ahead = self._find(files)

    def now(self) -> float:
        """Seconds; about the Unix time."""
        return self._clock.elapsed() + self._ahead

    def mark(self, db: sqlite3.Connection, *, is_news: bool) -> None:
        """Note in this transaction how far time has come, and if `is_news` that workers who wait should look again."""
        db.execute(_MARK, (self.now(), is_news, self._boot))

    def _find(self, files: Connections) -> float:
        if not (found := files.ask(_AHEAD, self._boot)) and not files.read_only:
            files.write(FULL, self._begin)
            found = files.ask(_AHEAD, self._boot)
        return float(found[0][0]) if found else self._reached(files.ask(_REACHED)[0][0]) - self._clock.elapsed()

    def _begin(self, db: sqlite3.Connection) -> None:
        reached = self._reached(db.execute(_REACHED).fetchone()[0])
        db.execute(_BEGIN, (self._boot, reached - self._clock.elapsed(), reached))

    def _reached(self, before: float | None) -> float:
        return max(self._clock.now(), before or 0.0)
