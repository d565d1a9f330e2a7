"""What happens while somebody waits: a clock that does one thing after the other whenever someone would sleep, and agents that wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from agent_run_ledger import AgentRunLedger
from support.ledgers import Bench
from support.programs import RUN, Way

Act = Callable[[], Any]


class Patience(BaseException):
    """Nothing happens any more, and somebody waits on and on."""


class Meanwhile:
    """Do these things, one at each look up of whoever waits, and then what is `always` done. After `looks` looks: `Patience`."""

    def __init__(self, bench: Bench, *acts: Act, looks: int = 20_000, always: Act | None = None) -> None:
        self._clock, self._left, self._looks = bench.clock, list(acts), looks
        self._always = always
        self.looks = 0
        bench.clock.sleep = self._sleep  # type: ignore[method-assign] # that is what this is for

    def _sleep(self, seconds: float) -> None:
        self.looks += 1
        self._clock.sleeps.append(seconds)
        self._clock.advance(seconds)
        if self._left:
            self._left.pop(0)()
        elif self._always is not None:
            self._always()
        os.sched_yield()  # where several threads look, the others have their turn
        if self.looks > self._looks:
            raise Patience


def begun(way: Way, ledger: AgentRunLedger, bench: Bench, agent: Callable[..., Any], run_id: str = RUN) -> None:
    """Start the agent, and take its process away once it waits. Nothing is parked, and nobody holds the run."""

    def kill() -> None:
        raise Patience

    Meanwhile(bench, kill)
    try:
        way.start(ledger, agent, run_id=run_id)
    except Patience:
        pass
    else:
        raise AssertionError("it did not wait")
    finally:
        Meanwhile(bench)
