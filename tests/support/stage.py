"""Threads of one process that take turns: where they change is said by the program, so it is the same each time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.testing import FakeClock
from support.explorer import Crash, Life, World


class Stage:
    """One thread at a time is on it. The others rest in the order in which they will come back, or hang until they are let go."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.resting: list[Staged] = []
        self.hanging: list[Staged] = []
        self.is_open = False
        self.here = threading.local()
        self.is_dead = False

    def rest(self, where: list[Staged] | None = None) -> None:
        """Let another thread go on. Does nothing in a thread that is not of this stage."""
        work: Staged | None = getattr(self.here, "work", None)
        if work is None:
            return
        if not self.is_dead:
            (self.resting if where is None else where).append(work)
            work.has_stopped.release()
            work.may_go.acquire()
        if self.is_dead:
            raise Crash

    def hang(self) -> None:
        """Stand still until `let_go`, whoever waits."""
        self.rest(None if self.is_open else self.hanging)

    def let_go(self) -> None:
        """What hangs rests now, and comes back in its turn. Nothing hangs any more."""
        self.is_open = True
        self.resting += self.hanging
        self.hanging.clear()

    def go_on(self) -> bool:
        """Let the next one go on until it rests or is over. False where nobody rests."""
        if not self.resting:
            return False
        work = self.resting.pop(0)
        work.may_go.release()
        work.has_stopped.acquire()
        return True

    def end(self) -> None:
        """The process is gone, and its threads with it."""
        self.is_dead = True
        self.let_go()
        while self.go_on():
            pass


class Staged(Work):
    """A call in a thread that is on the stage as soon as it is started. Its starter waits until it rests or is over."""

    __slots__ = ("has_stopped", "may_go", "stage")

    def __init__(self, stage: Stage, function: Callable[..., Any], arguments: Any, name: str) -> None:
        self.stage = stage
        self.may_go, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__(partial(self._enter, function), arguments, name)

    def _enter(self, function: Callable[..., Any], **arguments: Any) -> Any:
        self.stage.here.work = self
        try:
            return function(**arguments)
        finally:
            self.stage.here.work = None

    def start(self) -> None:
        if self.is_over:  # it was taken back
            return
        super().start()
        self.has_stopped.acquire()

    def _tell(self) -> None:
        super()._tell()
        self.has_stopped.release()

    def wait(self, seconds: float | None) -> bool:
        """Time passes where nobody else can go on."""
        while not self.is_over and self.stage.go_on():
            pass
        if not self.is_over:
            assert seconds is not None, "everybody waits for something that nobody will do"
            self.stage.clock.advance(seconds)
        return super().wait(0)


class StagedClock(FakeClock):
    """Whoever sleeps lets the others go on."""

    def __init__(self, now: float, elapsed: float) -> None:
        super().__init__(now, elapsed)
        self.stage = Stage(self)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if getattr(self.stage.here, "work", None) is not None:
            self.stage.rest()
        else:
            self.stage.go_on()


class ThreadedWorld(World):
    """A world whose processes have threads."""

    def __init__(self, folder: Any, options: dict[str, Any]) -> None:
        super().__init__(folder, options)
        clock = StagedClock(self.clock.now(), self.clock.elapsed())
        self.clock = clock
        if self._memory is not None:
            self._memory.clock = clock


class ThreadedLife(Life):
    """One process whose program makes calls in threads. They change at every effect."""

    def __init__(self, world: World, die_at: int | None, full_at: int | None, interrupt_at: int | None) -> None:
        super().__init__(world, die_at, full_at, interrupt_at)
        clock: Any = world.clock
        self.stage = clock.stage = Stage(clock)

    def tick(self, place: str) -> None:
        if place.removeprefix("before ") in CHANGES:
            self.stage.rest()
        super().tick(place)

    def end(self) -> None:
        self.is_dead = True
        self.stage.end()
        super().end()


CHANGES = frozenset({"Commit", "Invoke", "Turn", "GiveBack"})
"""The effects before which another thread goes on; all are performed outside of locks."""
