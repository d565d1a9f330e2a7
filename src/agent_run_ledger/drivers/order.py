"""Who waits for his turn: hands the outcomes of one run out in an event loop, one at a time."""

from __future__ import annotations

import warnings
from _thread import get_ident
from contextlib import suppress
from typing import Any

from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.positions import is_keyed
from agent_run_ledger.engine.turns import Turns
from agent_run_ledger.errors import ReplayStalledWarning

TURNS_OF_THE_LOOP = 16
"""How long the next outcome is held back after one was handed out, so that whoever awaited that one has run on.

From 10 on no schedule of 500 differed; a race of branches that hold task groups takes 11 turns until its loser is gone.
"""
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.05, 0.5
_PATIENCE_SECONDS = 2.0
"""How long a replay waits for a call that was made the first time. For a call with a key, which may come in any order: one look."""


class Order:
    """The calls of one run that wait in one loop, and the pause after each hand-out."""

    __slots__ = ("_gives_way", "_is_pacing", "_look", "_run", "_since", "_thread", "_waiters", "loop", "turns")

    def __init__(self, run: LiveRun, turns: Turns, loop: Any) -> None:
        self.loop = loop
        self._thread = get_ident()
        self._run = run
        self.turns = turns
        self._waiters: dict[str, Any] = {}
        self._is_pacing = False
        self._look: Any = None
        self._since = 0.0
        self._gives_way = False
        """Whether this program was seen to go another way than the first time: it is not waited for again."""

    def at_once(self, position: str, seq: int) -> bool:
        """Whether the outcome may be handed out without any waiting; it counts as handed out then."""
        return not self._is_pacing and self.turns.at_once(position, seq)

    def is_of(self, turns: Turns | None) -> bool:
        """Whether this is the order of these turns, in the loop of the calling thread."""
        return self.turns is turns and self._thread == get_ident()

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits in this loop."""
        return not self._waiters

    def look(self) -> None:
        """Something was handed out beside the loop: see whether that was what others waited for."""
        if self._waiters:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._hand_out)

    async def wait(self, position: str, seq: int) -> None:
        """Return when it is this call's turn."""
        self.turns.waiting(position, seq)
        waiter = self._waiters[position] = self.loop.create_future()
        if (
            not self._is_pacing and len(self._waiters) == 1
        ):  # whatever was handed out last, its program has run on first
            self._is_pacing = True
            self.loop.call_soon(self._pace, TURNS_OF_THE_LOOP)
        else:
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
        """Nobody had his turn for a while: perhaps a call was dropped without a word, or the program goes another way than before.

        Waiting for ever would help nobody. What is handed out in another order is held to what is recorded all the same.
        """
        self._look = None
        self._run.let_go_of_dropped()
        if self.turns.next() is None and not self.turns.is_idle:
            missing = self.turns.holds_up()
            patience = _PATIENCE_SECONDS
            if self._gives_way or (missing is not None and is_keyed(missing.position)):
                patience = _LOOK_SECONDS
            if missing is None or self.loop.time() - self._since < patience:
                self._look = self.loop.call_later(pause, self._look_again, min(2 * pause, _LONGEST_LOOK_SECONDS))
                return
            self.turns.abandoned(missing.position)
            self._hand_out()
            if patience == _PATIENCE_SECONDS:
                self._gives_way = True
                warnings.warn(
                    f"run {self._run.run_id!r}: at replay {missing}, and the outcomes recorded after it waited {patience:g} s for "
                    "that. They are handed out now, in another order than the first time; whatever else differs is an error.",
                    ReplayStalledWarning,
                    stacklevel=1,
                )
            return
        self._hand_out()
