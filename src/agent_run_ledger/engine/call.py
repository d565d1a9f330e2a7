"""What a program asks for: a call of a tool, with what is declared about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from agent_run_ledger.engine import recovery
from agent_run_ledger.engine.history import StepHistory
from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.model import Effect, RetryPolicy
from agent_run_ledger.rules.names import check_name


class Options(NamedTuple):
    """What is declared about a tool, in full."""

    effect: Effect | None = None
    retry: RetryPolicy | None = None
    returns: Any = None
    raises: tuple[type[BaseException], ...] = ()
    fatal: tuple[type[BaseException], ...] = ()
    may_repeat: bool = False
    version: str | None = None


class StepOptions(TypedDict, total=False):
    """What a caller may declare about a tool, by keyword."""

    effect: Effect | None
    """What a second dispatch would do to the outside world; None is said aloud wherever it matters."""
    retry: RetryPolicy | None
    """How a failing call is made again; None: its error is final at once."""
    returns: Any
    """The annotation by which an output is built into a class again."""
    raises: tuple[type[BaseException], ...]
    """Exception classes that come through as themselves, now and at replay; others come as `StepFailed`."""
    fatal: tuple[type[BaseException], ...]
    """Exception classes that end the run as FAILED."""
    may_repeat: bool
    """Equal calls with an equal outcome are no loop."""
    version: str | None
    """Stands for the tool's code: another one counts attempts afresh."""


def declared(given: StepOptions) -> Options:
    """The options as they are used. Raises `InvalidArguments` where one of them is not what it should be."""
    if not given:
        return _NOTHING
    try:
        options = Options(**given)
    except TypeError:
        unknown = ", ".join(sorted(given.keys() - set(Options._fields)))
        raise InvalidArguments(f"there is no option {unknown}; there are {', '.join(Options._fields)}") from None
    if options.retry is not None and not isinstance(options.retry, RetryPolicy):
        raise InvalidArguments(f"retry= is a RetryPolicy, not {options.retry!r}; nothing was dispatched")
    if options.version is not None:
        check_name("version", options.version)
    if options.effect is not None and type(options.effect) is not Effect:
        options = options._replace(effect=_effect(options.effect))
    if options.raises != () or options.fatal != ():
        options = options._replace(raises=_exceptions(options.raises), fatal=_exceptions(options.fatal))
    return options


def _effect(given: Effect | str | None) -> Effect | None:
    """`effect=` as what it is, also where it is given by its name."""
    if given is None or type(given) is Effect:
        return given
    try:
        return Effect(given)
    except ValueError:
        raise InvalidArguments(
            f"effect= is one of {', '.join(Effect)}, not {given!r}; nothing was dispatched"
        ) from None


def _exceptions(given: Any) -> tuple[type[BaseException], ...]:
    """`raises=` and `fatal=` as a tuple of exception classes, checked."""
    types = given if isinstance(given, tuple) else (given,)
    for each in types:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise InvalidArguments(f"raises= and fatal= take exception classes, not {each!r}")
    return types


_NOTHING = Options()


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
