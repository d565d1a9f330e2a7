"""Clocks for tests: one that moves when told, and one in which waiting takes no time."""

from __future__ import annotations

import threading
import time

from agent_run_ledger.stores.clock import SystemClock


class FakeClock:
    """A `Clock` that stands still until `advance` or `sleep` moves it.

    >>> clock = FakeClock()
    >>> started = clock.elapsed()
    >>> clock.sleep(30)
    >>> clock.elapsed() - started
    30.0
    """

    def __init__(self, now: float = 1_700_000_000.0, elapsed: float = 1_000.0) -> None:
        self._mutex = threading.Lock()
        self._now = now
        self._elapsed = elapsed
        self.sleeps: list[float] = []
        """What `sleep` was asked for, in order."""

    def now(self) -> float:
        return self._now

    def elapsed(self) -> float:
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks."""
        with self._mutex:
            self._now += seconds
            self._elapsed += seconds

    def set_wall(self, now: float) -> None:
        """Set the wall clock, as an administrator does: leases must not care."""
        self._now = now


_YIELD_SECONDS = 0.001


class SkippingClock:
    """The machine's own clock, but for what somebody sleeps: that time is skipped, and everybody is that much later."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._skipped = 0.0

    def now(self) -> float:
        return SystemClock.now() + self._skipped

    def elapsed(self) -> float:
        return SystemClock.elapsed() + self._skipped

    def sleep(self, seconds: float) -> None:
        with self._mutex:
            self._skipped += seconds
        time.sleep(min(seconds, _YIELD_SECONDS))  # whoever is waited for in a thread has his turn

    def skip_to(self, now: float) -> None:
        """Let the wall clock show at least `now`."""
        with self._mutex:
            self._skipped += max(0.0, now - self.now())
