"""Event loops whose turns are counted and whose time a test moves, and stores that hold a write up at a chosen entry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from agent_run_ledger.contract import Append, Row, Store

HANGS_SECONDS = 20.0
"""How long a program may take that should take no time at all."""


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts its turns. `ahead` seconds are added to its time: whoever moves it fires timers."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def run(
    program: Callable[[], Coroutine[Any, Any, Any]], loop: Callable[[], asyncio.AbstractEventLoop] = CountingLoop
) -> Any:
    """What the program returns or raises, in a loop of its own. Fails where it hangs, or where the loop has something to complain of."""
    complaints: list[Any] = []
    is_hanging = threading.Event()

    async def guarded() -> Any:
        here, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        here.set_exception_handler(lambda _, context: complaints.append(context))

        def give_up() -> None:
            is_hanging.set()
            here.call_soon_threadsafe(task.cancel)

        guard = threading.Timer(HANGS_SECONDS, give_up)
        guard.daemon = True
        guard.start()
        try:
            return await program()
        finally:
            guard.cancel()
            guard.join()

    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(guarded())
    finally:
        if is_hanging.is_set():
            pytest.fail("the program hangs")
        assert complaints == [], complaints


class HeldUp:
    """A store that calls `before` and `after` with each of the rows that it appends, in whatever thread it writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.before: Callable[[Row], None] = lambda row: None
        self.after: Callable[[Row], None] = lambda row: None

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[Any]:
        rows = [row for append in appends for row in append.rows]
        for row in rows:
            self.before(row)
        answers = self._store.append_all(appends, synced=synced)
        for row in rows:
            self.after(row)
        return answers

    def close(self) -> None:
        """Others look at what is in it."""
