"""Who waits for his turn: hands the outcomes of one run out in an event loop, one at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.turns import Turns
from agent_run_ledger.errors import ReplayStalledWarning

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, TimerHandle

TURNS_OF_THE_LOOP = 8
"""How long the next outcome is held back after one was handed out, so that whoever awaited that one has run on."""
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, _STALLED_SECONDS = 0.05, 1.0, 10.0


class Order:
    """The calls of one run that wait in one loop, and the pause after each hand-out."""

    __slots__ = ("_is_pacing", "_look", "_run", "_since", "_waiters", "loop", "turns")

    def __init__(self, run: LiveRun, turns: Turns, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._run = run
        self.turns = turns
        self._waiters: dict[str, Future[None]] = {}
        self._is_pacing = False
        self._look: TimerHandle | None = None
        self._since = 0.0

    def at_once(self, position: str, seq: int) -> bool:
        """Whether the outcome may be handed out without any waiting; it counts as handed out then."""
        return not self._is_pacing and self.turns.at_once(position, seq)

    async def wait(self, position: str, seq: int) -> None:
        """Return when it is this call's turn."""
        self.turns.waiting(position, seq)
        waiter = self._waiters[position] = self.loop.create_future()
        self._hand_out()
        try:
            await waiter
        finally:
            del self._waiters[position]
            if waiter.cancelled() or not waiter.done():
                self.turns.abandoned(position)
                self._hand_out()

    def _hand_out(self) -> None:
        """Hand out what has its turn, if anything has, and come back when its program has run on."""
        if self._is_pacing:
            return
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while (position := self.turns.next()) is not None:
            waiter = self._waiters.get(position)
            if waiter is not None and not waiter.done():
                self.turns.handed(position)
                waiter.set_result(None)
                self._is_pacing = True
                self.loop.call_soon(self._pace, TURNS_OF_THE_LOOP)
                return
            self.turns.abandoned(position)
        if not self.turns.is_idle:
            self._since = self.loop.time()
            self._look = self.loop.call_later(_LOOK_SECONDS, self._look_again, _LOOK_SECONDS)

    def _pace(self, left: int) -> None:
        if left:
            self.loop.call_soon(self._pace, left - 1)
        else:
            self._is_pacing = False
            self._hand_out()

    def _look_again(self, pause: float) -> None:
        """Nobody had his turn for a while: perhaps a call was dropped without a word, or the program has changed."""
        self._look = None
        self._run.let_go_of_dropped()
        if self.turns.next() is not None:
            self._hand_out()
        elif not self.turns.is_idle:
            waited = self.loop.time() - self._since
            if waited < _STALLED_SECONDS <= waited + pause and (missing := self.turns.holds_up()) is not None:
                warnings.warn(
                    f"run {self._run.run_id!r} stands still at replay: recorded outcomes wait for their turn, and {missing}. "
                    "The program has to make the calls that are recorded, in the order of the first time; nothing is lost.",
                    ReplayStalledWarning,
                    stacklevel=1,
                )
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            self._look = self.loop.call_later(pause, self._look_again, pause)
