"""Processes with an event loop inside the test's own: every turn of the loop is the same each time, and any of them may be the last."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from agent_run_ledger import Receipt, current_step
from agent_run_ledger.drivers.asynchronous import AsyncDriver
from support.explorer import RUN, Crash, Life, World

TURNS_OF_A_WRITE = 3
"""How long the thread that writes for the loop gathers what comes together."""

MOST_TURNS = 1000
"""So many turns of the loop in which nothing happens are too many."""


class Hang(AssertionError):
    """Everybody waits, and nothing is left that could happen."""


class AsyncLife(Life):
    """One process whose program runs in an event loop. It is cancelled, as by Ctrl-C, at its `interrupt_at`-th tick."""

    def __init__(self, world: World, die_at: int | None, full_at: int | None, interrupt_at: int | None) -> None:
        super().__init__(world, die_at, full_at, None)
        self.cancel_at = interrupt_at
        self.program: asyncio.Task[Any] | None = None

    def own(self, ledger: Any) -> Any:
        super().own(ledger)
        ledger._async_driver = MortalAsyncDriver(ledger, self)
        return ledger

    def tick(self, place: str) -> None:
        super().tick(place)
        if len(self.ticks) == self.cancel_at and self.program is not None:
            self.program.cancel()

    def play(self, program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run the program in a loop of its own, and end what it leaves behind as `asyncio.run` does."""
        loop = Loop(self)
        try:
            self.program = loop.create_task(program())
            return loop.run_until_complete(self.program)
        finally:
            self.program = None
            if not self.is_dead:
                loop.run_until_complete(_end_the_others())
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                for ledger in self._ledgers:
                    ledger._async_driver._writer.flush()
            bury(loop)

    # --- what flows are made of ---------------------------------------------------------------------------------------

    def atool(
        self,
        name: str,
        does: Callable[[Any, int], Any] | None = None,
        turns: Callable[[Any], int] | int = 1,
        **options: Any,
    ) -> Callable[..., Any]:
        """An async tool that answers after so many turns of the loop. What `does` returns is awaited if it can be."""

        async def call(given: Any) -> Any:
            seen = self.takes_effect(name, given)
            for _ in range(turns(given) if callable(turns) else turns):
                await asyncio.sleep(0)
            answer = does(given, seen) if does is not None else [name, given]
            return await answer if isinstance(answer, Awaitable) else answer

        self.ledger._tools.pop(name, None)  # the program that begins again in this life registers its tools again
        return self.ledger.tool(name=name, **options)(call)

    def areceipt(self, name: str, unknown: int = 0) -> Callable[[str, dict[str, Any]], Awaitable[Receipt]]:
        """The question to the outside world, whose answer takes some turns of the loop."""
        ask = self.receipt(name, unknown)

        async def aask(key: str, arguments: dict[str, Any]) -> Receipt:
            await asyncio.sleep(0)
            answer = ask(key, arguments)
            await asyncio.sleep(0)
            return answer

        return aask

    def agent(self, function: Callable[..., Any], name: str | None = None, **options: Any) -> Callable[..., Any]:
        """An agent of this life's ledger."""
        name = name or function.__name__
        self.world.agents.add(name)
        self.ledger._agents.pop(name, None)
        return self.ledger.agent(name=name, **options)(function)

    async def arun(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Run an agent as the run that is explored."""
        return await self.ledger.arun(self.agent(function, "explored", **options), *given, run_id=RUN)


class MortalAsyncDriver(AsyncDriver):
    """The driver of a process that may die at every yield. The loop's own thread plays the one that writes for it."""

    def __init__(self, ledger: Any, life: Life) -> None:
        super().__init__(ledger._driver, ledger._store, ledger._clock, ledger._leases, ledger._durability)
        self._life = life
        self._writer: Any = WriterInTheLoop(self._write)

    def perform(self, effect: Any) -> Awaitable[Any]:
        return self._perform(effect)

    async def _perform(self, effect: Any) -> Any:
        self._life.tick(f"before {type(effect).__name__}")
        answer = await super().perform(effect)
        self._life.tick(f"after {type(effect).__name__}")
        return answer


class WriterInTheLoop:
    """What the writer's thread does, done in the loop some turns later: so it happens at the same moment each time."""

    def __init__(self, write: Callable[[list[Any]], None]) -> None:
        self._write = write
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        if not self._items:
            self._later(TURNS_OF_A_WRITE)
        self._items.append(item)

    def _later(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._later, turns - 1)
        else:
            items, self._items = self._items, []
            self._write(items)

    def flush(self) -> None:
        """Write what is left when the loop has come to its end: a thread would do so."""
        while self._items:
            items, self._items = self._items, []
            self._write(items)

    def close(self, rest: Any) -> None:
        """A life ends by `Life.end`."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits: its time is the world's, and goes on when nothing else is left to do."""

    def __init__(self, life: Life) -> None:
        self._life = life
        super().__init__(_Selector(life))
        self.set_exception_handler(self._broken)

    def time(self) -> float:
        return self._life.world.clock.elapsed()

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._life.is_dead:
            self._life.world.broken.append(f"{context['message']}: {context.get('exception')!r}")


class _Selector(selectors.DefaultSelector):
    """Sleeps by moving the world's clock. The loop of a process that is dead ends here, at its next turn."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life
        self._ticks = self._turns = 0

    def select(self, timeout: float | None = None) -> Any:
        if self._life.is_dead:
            raise Crash
        self._turns = self._turns + 1 if len(self._life.ticks) == self._ticks else 0
        self._ticks = len(self._life.ticks)
        if timeout is None or self._turns > MOST_TURNS:
            raise Hang("everybody waits for something that nobody will do")
        found = super().select(0)
        if timeout > 0 and not found:
            self._life.world.clock.advance(timeout)
        return found


async def _end_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def bury(loop: asyncio.AbstractEventLoop) -> None:
    """Let go of a loop and of whatever stands still in it. Nothing of it reaches the store any more."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with suppress(BaseException):
            task.get_coro().close()  # type: ignore[union-attr]
    loop.close()


__all__ = ["RUN", "AsyncLife", "Hang", "Loop", "MortalAsyncDriver", "World", "current_step"]
