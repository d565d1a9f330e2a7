"""The clock of a ledger: seconds that go on while its machine sleeps, is off, or has its wall clock set, and never go back."""

from __future__ import annotations

import sqlite3
from functools import partial
from typing import TYPE_CHECKING

from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.connections import FULL, Connections

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

_AHEAD = "SELECT ahead FROM boots WHERE boot = ?"
_REACHED = "SELECT max(at) FROM (SELECT max(began) AS at FROM boots UNION ALL SELECT max(beat) FROM workers)"
_BEGIN = "INSERT INTO boots (boot, began, ahead) VALUES (?, ?, ?) ON CONFLICT (boot) DO NOTHING"


class Timeline:
    """Tells the time by which runs are due and workers are heard.

    The clock of leases starts anew with the machine, and a timer may have to outlive that; the wall clock may be set back by years, and
    what was due while it was wrong would be lost. So within one boot this is the clock of leases, plus a constant that whoever
    opens the ledger first in that boot writes down: then the wall clock is asked, once, and it is believed where it is not behind what
    is known to have been reached. If it was wrong, timers come early or late by what it was wrong by, and none is lost.
    """

    def __init__(self, files: Connections, clock: Clock) -> None:
        """Raises a `StoreError` where this boot is new to the ledger and that cannot be written down."""
        self._clock = clock
        self._ahead = self._find(files)

    def now(self) -> float:
        """Seconds; about the Unix time."""
        return self._clock.elapsed() + self._ahead

    def _find(self, files: Connections) -> float:
        boot = boot_id()
        if not (found := files.ask(_AHEAD, boot)) and not files.read_only:
            files.write(FULL, partial(self._begin, boot))
            found = files.ask(_AHEAD, boot)
        return float(found[0][0]) if found else self._begun(files.ask(_REACHED)[0][0]) - self._clock.elapsed()

    def _begin(self, boot: str, db: sqlite3.Connection) -> None:
        began = self._begun(db.execute(_REACHED).fetchone()[0])
        db.execute(_BEGIN, (boot, began, began - self._clock.elapsed()))

    def _begun(self, reached: float | None) -> float:
        return max(self._clock.now(), reached or 0.0)
