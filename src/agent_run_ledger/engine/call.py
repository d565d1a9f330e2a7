"""What a program asks for: a call of a tool, with what is declared about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from agent_run_ledger.engine import recovery
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.model import Effect, RetryPolicy


class Options(NamedTuple):
    """What a caller declares about a tool: the options of `execute_step`, `step()` and `Step`."""

    effect: Effect | None = None
    retry: RetryPolicy | None = None
    returns: Any = None
    raises: tuple[type[BaseException], ...] = ()
    fatal: tuple[type[BaseException], ...] = ()
    may_repeat: bool = False
    version: str | None = None


class StepOptions(TypedDict, total=False):
    """The same as keywords, for those who pass them on."""

    effect: Effect | None
    retry: RetryPolicy | None
    returns: Any
    raises: tuple[type[BaseException], ...]
    fatal: tuple[type[BaseException], ...]
    may_repeat: bool
    version: str | None


@dataclass(slots=True)
class Call:
    """What the program asks for."""

    tool: str
    arguments: dict[str, Any]
    function: Callable[..., Any]
    options: Options
    environment: str
    """The tool's declared version or a digest of its code, and the versions beneath it."""
    passes_arguments: bool
    """Whether the function takes the stored arguments by keyword, or is called bare."""
    limit: int
    """The largest payload, in canonical bytes."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The annotations by which stored arguments are made into the declared classes again."""
    position: str | None = None
    """Its place, where it has a name of its own; None: the next of the run's own branch."""
    after: tuple[str, ...] = ()
    """The positions whose outputs it depends on."""
    stored: bytes = b""
    digest: bytes = b""
    step: StepHistory | None = None
    """The step that it has put in flight."""

    @property
    def max_attempts(self) -> int:
        """Dispatches over errors, crashes and reruns."""
        return self.options.retry.max_attempts if self.options.retry else recovery.DEFAULT_ATTEMPTS
