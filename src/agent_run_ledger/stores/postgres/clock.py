"""What time it is on the server: whoever shares a database counts timers by it, whatever the clocks of their own machines say."""

from __future__ import annotations

from agent_run_ledger.stores.clock import SystemClock

SERVER_TIME = "extract(epoch FROM clock_timestamp())::double precision"
_DRIFT = 1e-4
"""Seconds by which two clocks that nobody sets may part in a second."""


class ServerClock:
    """A `Clock` whose wall clock is the server's. It asks nobody: it goes on from what the server has said last, by the way."""

    elapsed = staticmethod(SystemClock.elapsed)
    sleep = staticmethod(SystemClock.sleep)

    def __init__(self) -> None:
        self._known: tuple[float, float, float] | None = None
        """What the server said, when that was by the elapsed clock, and how far off it may have been: all in seconds."""

    def now(self) -> float:
        if self._known is None:
            return SystemClock.now()
        said, at, _ = self._known
        return said + self.elapsed() - at

    def hear(self, said: float, asked_at: float, *, is_another: bool = False) -> None:
        """The server has just said what time it is, and was asked at `asked_at` of the elapsed clock. `is_another`: it may be another one."""
        answered_at = self.elapsed()
        off = (answered_at - asked_at) / 2
        if self._known is None or is_another or off <= self._known[2] + _DRIFT * (answered_at - self._known[1]):
            self._known = said, asked_at + off, off
