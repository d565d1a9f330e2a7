"""What can be crashed: an agent, a pipeline, or a function of a ledger; each is run on a ledger of the process it is in."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from agent_run_ledger.errors import InvalidArguments, ReplayStalledWarning
from agent_run_ledger.ledger import AgentRunLedger
from agent_run_ledger.pipeline import RunLedger
from agent_run_ledger.rules import functions
from agent_run_ledger.testing.life import Crash, Life, Unanswered
from agent_run_ledger.testing.notes import Ended, Stalled


class Flow(Protocol):
    """A program that can be started again and again."""

    name: str
    is_async: bool

    def run(self, life: Life, run_id: str) -> str:
        """Run it in this process, or go on where it stopped, and return its result as text."""


class OfAgent:
    """A registered agent: it runs on a ledger like the one that it is registered with."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.name = function.registered.name
        self.is_async = function.registered.takes.is_async
        self._agent, self._args, self._kwargs = function, args, kwargs

    def run(self, life: Life, run_id: str) -> str:
        ledger = life.own(self._agent.ledger._elsewhere(life.store, life.clock))
        ledger.run(self._agent, *self._args, run_id=run_id, **self._kwargs)
        return ""  # the run has it


class OfPipeline:
    """A pipeline, which is a `RunLedger`: another like it, under another run id."""

    def __init__(self, pipeline: RunLedger, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if args:
            raise InvalidArguments("a pipeline takes what `execute` takes, by keyword; nothing was run")
        self.name = pipeline.run_id
        self.is_async = any(step.takes.is_async for step in pipeline._steps.values())
        self._pipeline, self._kwargs = pipeline, kwargs

    def run(self, life: Life, run_id: str) -> str:
        ledger = self._pipeline._elsewhere(life.store, life.clock)
        ledger.run_id = run_id
        life.own(ledger).execute(**self._kwargs)
        return ""


class OfFunction:
    """A function that is given an `AgentRunLedger`, and makes its runs in it under ids that it knows again."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any] | None,
    ) -> None:
        self.name = functions.name_of(function)
        self.is_async = functions.signature(function).is_async
        self._function, self._args, self._kwargs, self._options = function, args, kwargs, options or {}

    def run(self, life: Life, run_id: str) -> str:
        options = {"durability": "process", **self._options}
        ledger = life.own(AgentRunLedger(life.store, clock=life.clock, **options))
        if self.is_async:
            returned = ledger._asynchronous.run(lambda: self._function(ledger, *self._args, **self._kwargs))
        else:
            returned = self._function(ledger, *self._args, **self._kwargs)
        return as_text(returned)


def flow_of(flow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any] | None) -> Flow:
    """What was given, as something that can be started again. Raises `InvalidArguments` for what is none."""
    if isinstance(flow, RunLedger):
        made: Flow = OfPipeline(flow, args, kwargs)
    elif hasattr(flow, "registered") and hasattr(flow, "ledger"):
        made = OfAgent(flow, args, kwargs)
    elif hasattr(flow, "registered"):
        raise InvalidArguments(
            f"{flow.__name__!r} is a tool: crashtest takes an agent, a pipeline, or a function of a ledger"
        )
    elif callable(flow):
        return OfFunction(flow, args, kwargs, options)
    else:
        raise InvalidArguments(f"crashtest takes an agent, a pipeline, or a function of a ledger, not {flow!r}")
    if options is not None:
        raise InvalidArguments("options= makes the ledger that a function is given; an agent or a pipeline has its own")
    return made


def live(flow: Flow, life: Life, run_id: str) -> Exception | None:
    """One process that starts the flow. It notes how that ended, if it lives to see it; an error is returned, too."""
    ended: Ended | None = None
    raised: BaseException | None = None
    try:
        with _noting_stalls(life):
            ended = Ended(None, flow.run(life, run_id))
    except Crash:
        pass
    except Unanswered as unanswered:
        raise InvalidArguments(str(unanswered)) from None
    except BaseException as error:
        if not life.is_dead and not _is_the_flows(error):
            raise  # an interrupt by the user, or a test that gives up
        ended = Ended(f"{type(error).__module__}.{type(error).__qualname__}", f"{type(error).__name__}: {error}")
        raised = error
    finally:
        has_died = life.is_dead
        life.end()
    if ended is not None and not has_died:
        life.note(ended)
    return raised if isinstance(raised, Exception) and not has_died else None


@contextmanager
def _noting_stalls(life: Life) -> Iterator[None]:
    """That a replay stalled is for the report; every other warning is given when the block ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplayStalledWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, ReplayStalledWarning):
            life.note(Stalled(str(warning.message)))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _is_the_flows(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "CancelledError"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def as_text(value: Any) -> str:
    """A value as text that is the same for equal values, as far as that can be."""
    try:
        text = json.dumps(value, sort_keys=True, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return _ADDRESS.sub("", text)
