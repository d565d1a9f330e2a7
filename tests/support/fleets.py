"""Workers in the test's own process, on real time, and tools that say what goes on at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.fleet.worker import Worker

LONG = 60.0
"""Seconds that no wait lasts unless something is broken."""
QUICK = 0.02
"""How often a worker of a test looks by itself."""


def until(holds: Callable[[], Any]) -> Any:
    """Look again and again until it holds, and return what it gave; fail after a minute."""
    end = time.monotonic() + LONG
    while not (given := holds()):
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.002)
    return given


@contextmanager
def worker(ledger: AgentRunLedger, **options: Any) -> Iterator[Worker]:
    """A worker that looks often, and that is stopped at the end in good order."""
    with ledger.worker(**({"poll_seconds": QUICK} | options)) as started:
        yield started
    assert started.state == "stopped"


class Gate:
    """A tool's function that is passed only once it is open: who came, in order, and how many stood in it at once."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._changed = threading.Condition()
        self._is_open = is_open
        self._inside = 0
        self.came: list[Any] = []
        self.most = 0

    def __call__(self, given: Any = None) -> Any:
        with self._changed:
            self.came.append(given)
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, LONG)
            self._inside -= 1
        return given

    def open(self) -> None:
        """Let all through, those who come later too."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody through any more."""
        with self._changed:
            self._is_open = False

    def await_count(self, count: int) -> None:
        """Wait until so many have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.came) >= count, LONG), self.came
