"""Programs of face C: one body, as a sync and as an async program, and processes that die under it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    StoreUnavailable,
)
from support.ledgers import Bench, Died

RUN, GOAL = "run", "do it"
LONG = 60.0
"""Seconds that no wait lasts unless something is broken."""

Body = Callable[..., Generator[Any, Any, Any]]


class Way:
    """One of the two ways to write a program. What a test writes once is a sync program here and an async one there.

    A body is a generator: what it yields is a call, and what comes back is the call's value, which an async program awaits.
    """

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a sync or an async one."""
        if not self.is_async:
            return _like(fn, lambda *args, **kwargs: fn(*args, **kwargs))

        async def afunction(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            value = fn(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return _like(fn, afunction)

    def program(self, body: Body) -> Callable[..., Any]:
        """The body as a sync or an async function."""

        def play(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            answer: Any = None
            while True:
                try:
                    answer = steps.send(answer)
                except StopIteration as stop:
                    return stop.value

        async def aplay(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            resume = functools.partial(steps.send, None)
            while True:
                try:
                    asked = resume()
                except StopIteration as stop:
                    return stop.value
                try:
                    resume = functools.partial(steps.send, await asked)
                except BaseException as error:
                    resume = functools.partial(steps.throw, error)

        return _like(body, aplay if self.is_async else play)

    def tool(self, ledger: AgentRunLedger, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return ledger.tool(**options)(self.function(fn))

    def agent(self, ledger: AgentRunLedger, body: Body, **options: Any) -> Callable[..., Any]:
        return ledger.agent(**options)(self.program(body))

    def start(self, ledger: AgentRunLedger, agent: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {"run_id": RUN} | kwargs
        if self.is_async:
            return asyncio.run(ledger.arun(agent, *args, **options))
        return ledger.run(agent, *args, **options)

    def run(self, ledger: AgentRunLedger, body: Body, *args: Any, **options: Any) -> Any:
        """Register the body as an agent and run it."""
        return self.start(ledger, self.agent(ledger, body, **options), *args)


def calling(call: Callable[[], Any]) -> Body:
    """The body of a program that makes one call and returns its value."""

    def agent() -> Any:
        return (yield call())

    return agent


def _like(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = getattr(original, "__name__", "work")
    function.__annotations__ = get_type_hints(original) if hasattr(original, "__annotations__") else {}
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function


class Calls:
    """What was really called, in order; a function of it may be told to raise."""

    def __init__(self, *errors: BaseException) -> None:
        self.seen: list[Any] = []
        self.errors = list(errors)

    def __call__(self, given: Any = None) -> Any:
        self.seen.append(given)
        if self.errors:
            raise self.errors.pop(0)
        return given


class Mortal:
    """A store that a process loses when it dies."""

    def __init__(self, bench: Bench) -> None:
        self._store = bench.store()
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        if self.is_dead and name != "close":
            raise StoreUnavailable("this process is dead")
        return getattr(self._store, name)


def mortal(bench: Bench) -> tuple[AgentRunLedger, Callable[[], None]]:
    """A ledger whose process can die in the middle of anything: nothing is parked or given back, the lease runs out."""
    store = Mortal(bench)
    ledger = AgentRunLedger(store, durability="process", clock=bench.clock)  # type: ignore[arg-type]

    def die() -> None:
        store.is_dead = True
        raise Died

    return ledger, die


@contextmanager
def dies(bench: Bench) -> Iterator[None]:
    with pytest.raises((Died, StoreUnavailable)):
        yield
    bench.owners_die()


def positions(ledger: AgentRunLedger, run_id: str = RUN) -> list[str]:
    return [step.position for step in ledger.steps(run_id)]


@dataclass
class Invoice:
    number: int
    customer: str


class Upset(Exception):
    pass
