"""A guard around one function: timeout, retries and checked arguments anywhere, and inside a run a durable step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from agent_run_ledger.agents import Tool, as_tool
from agent_run_ledger.contract import Clock
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.engine.call import declared
from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.model import RetryPolicy
from agent_run_ledger.rules import backoff, functions
from agent_run_ledger.stores.clock import SystemClock

F = TypeVar("F", bound=Callable[..., Any])

_clock: Clock = SystemClock()
"""What the waits between calls outside of a run are measured by."""


def forge_or_sentinel_guard(timeout_ms: float | None = None, max_retries: int = 0) -> Callable[[F], F]:
    """Give the function below, sync or async, a timeout, retries and checked arguments; inside a run it is a durable step, too.

    It is no sandbox: the function runs in this process, with all its rights. A synchronous one that is out of time is left to
    itself in its thread; as long as it goes on it is waited for again and not called a second time. `max_retries` counts calls
    beyond the first; before each of them passes a random time, as `RetryPolicy` has it. What does not come in `timeout_ms` is a
    `TimeoutError`. The last error is raised: as itself outside of a run, inside of one as steps raise theirs.

    >>> @forge_or_sentinel_guard(timeout_ms=2_000, max_retries=2)
    ... def convert(amount: int, rate: float) -> float:
    ...     return amount * rate
    >>> convert(100, rate=1.25)
    125.0
    """
    if callable(timeout_ms):
        raise InvalidArguments("@forge_or_sentinel_guard takes parentheses: @forge_or_sentinel_guard(timeout_ms=...)")
    if timeout_ms is not None and (type(timeout_ms) not in (int, float) or not 0 < timeout_ms < float("inf")):
        raise InvalidArguments(f"timeout_ms= is a number of milliseconds, more than 0, not {timeout_ms!r}")
    if type(max_retries) is not int or max_retries < 0:
        raise InvalidArguments(f"max_retries= is a whole number of at least 0, not {max_retries!r}")
    seconds = timeout_ms / 1000 if timeout_ms is not None else None
    return lambda function: as_tool(function, Guarded(function, seconds, max_retries))


class Guarded(Tool):
    """A function that keeps its timeout and its retries where there is no step to make of its call."""

    def __init__(self, function: Callable[..., Any], seconds: float | None, max_retries: int) -> None:
        # Without retries it declares no policy: the attempts of a step count crashes, too, and one crash is not the end.
        self.retry = RetryPolicy(max_attempts=max_retries + 1) if max_retries else None
        options = declared({"timeout": seconds, "retry": self.retry, "raises": (TimeoutError,)})
        super().__init__(function, None, options)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function outside of a run, or inside of a step; of an async one return what is awaited for its value."""
        self.arguments(args, {name: value for name, value in kwargs.items() if name != functions.KEY})
        call = _Call(self, args, kwargs)
        return call.awaited() if self.takes.is_async else call.made()


class _Call:
    """One call, from its first attempt to its last."""

    def __init__(self, guarded: Guarded, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._guarded = guarded
        self._seconds = guarded.options.timeout
        self._args = args
        self._kwargs = kwargs
        self._waits = _waits(guarded.retry)

    def made(self) -> Any:
        work: Work | None = None
        while True:
            try:
                if self._seconds is None:
                    return self._begin()
                if work is None:
                    work = Work(self._begin, {}, self._guarded.name)
                    work.start()
                if not work.wait(self._seconds):
                    raise self._out_of_time()
                result, work = work.result, None
                if result.error is not None:
                    raise result.error
                return result.value
            except Exception:
                if (wait := next(self._waits, None)) is None:
                    raise
            _clock.sleep(wait)

    async def awaited(self) -> Any:
        from agent_run_ledger.drivers.asynchronous import in_time, pause

        while True:
            try:
                return await in_time(self._begin, self._seconds, self._out_of_time)
            except Exception:
                if (wait := next(self._waits, None)) is None:
                    raise
            await pause(_clock, wait)

    def _begin(self) -> Any:
        return self._guarded.function(*self._args, **self._kwargs)

    def _out_of_time(self) -> TimeoutError:
        return TimeoutError(f"{self._guarded.name!r}: no result within {self._seconds:g} s")


def _waits(retry: RetryPolicy | None) -> Iterator[float]:
    """The seconds to wait before each retry, as long as there are retries left."""
    if retry is not None:
        for number in range(retry.max_attempts - 1):
            yield backoff.delay(number, retry, random.random())
