"""What a program asks for: a call of a tool, with what is declared about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from agent_run_ledger.engine import recovery
from agent_run_ledger.engine.live import Branch
from agent_run_ledger.errors import InvalidArguments, UnserialisableArguments
from agent_run_ledger.rules import canonical, digests, functions
from agent_run_ledger.rules.budget import Most
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import Effect

MAX_TIMEOUT = 366 * 86_400.0

if TYPE_CHECKING:
    from agent_run_ledger.model import MayRepeat, Receipt, RetryPolicy

    AskForReceipt = Callable[[str, dict[str, Any]], Receipt | Awaitable[Receipt]]
    """What a tool declares as `receipt=`: given an idempotency key and the arguments, it asks the receiver what became of the call."""


class Options(NamedTuple):
    """What is declared about a tool, in full."""

    effect: Effect | None = None
    retry: RetryPolicy | None = None
    returns: Any = None
    raises: tuple[type[BaseException], ...] = ()
    fatal: tuple[type[BaseException], ...] = ()
    may_repeat: bool | MayRepeat = False
    version: str | None = None
    kind: str = "tool"
    timeout: float | None = None
    identity: Callable[[dict[str, Any]], Any] | None = None
    step_key: str | None = None
    receipt: AskForReceipt | None = None
    key_window: float | None = None
    classify: Callable[[BaseException], str | None] | None = None
    max_tokens: int | None = None
    max_usd: Decimal | None = None


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
    may_repeat: bool | MayRepeat
    """Equal calls with an equal outcome are no loop, as often as `MayRepeat` says."""
    version: str | None
    """Stands for the tool's code: another one counts attempts afresh."""
    kind: Literal["tool", "model"]
    """`"model"` marks the call of a model: it is `Effect.READ` unless something else is declared."""
    timeout: float | None
    """Seconds after which an attempt has failed with `TimeoutError`; a synchronous function runs in a thread of its own then."""
    identity: Callable[[dict[str, Any]], Any] | None
    """What of the arguments identifies the call: a replay may differ in the rest."""
    step_key: str | None
    """A name for this call that gives it a position free of order, as the model's tool_call_id does."""
    receipt: AskForReceipt | None
    """Asks the receiver what became of a call: a function of (idempotency key, arguments) that returns a `Receipt`. It makes a tool
    that declares nothing else `Effect.MUTATE`."""
    key_window: float | timedelta | None
    """Seconds for which the receiver of an `Effect.IDEMPOTENT` call remembers its key; None: for ever."""
    classify: Callable[[BaseException], str | None] | None
    """What the tool knows of its errors: `"retryable"`, `"fatal"`, `"ambiguous"`, or None to leave it to the general rules."""
    max_tokens: int | None
    """The most tokens, of all kinds, that one call uses: so many of the budget are reserved for it."""
    max_usd: Decimal | int | str | float | None
    """The most US dollars that one call costs, likewise."""


def declared(given: StepOptions) -> Options:
    """The options as they are used. Raises `InvalidArguments` where one of them is not what it should be."""
    if not given:
        return _NOTHING
    try:
        options = Options(**given)  # type: ignore[arg-type] # what key_window is, is looked at below
    except TypeError:
        unknown = ", ".join(sorted(given.keys() - set(Options._fields)))
        raise InvalidArguments(f"there is no option {unknown}; there are {', '.join(Options._fields)}") from None
    if options.retry is not None:
        from agent_run_ledger.model import RetryPolicy

        if not isinstance(options.retry, RetryPolicy):
            raise InvalidArguments(f"retry= is a RetryPolicy, not {options.retry!r}; nothing was dispatched")
    if options.version is not None:
        check_name("version", options.version)
    if options.step_key is not None:
        check_name("step_key", options.step_key)
    if options.timeout is not None and (
        type(options.timeout) not in (int, float) or not 0 < options.timeout <= MAX_TIMEOUT
    ):
        raise InvalidArguments(f"timeout= is a number of seconds, more than 0, not {options.timeout!r}")
    if options.identity is not None and not callable(options.identity):
        raise InvalidArguments(f"identity= is a function of the arguments, not {options.identity!r}")
    if type(options.may_repeat) is not bool:
        from agent_run_ledger.model import MayRepeat

        if not isinstance(options.may_repeat, MayRepeat):
            raise InvalidArguments(f"may_repeat= is True, False or a MayRepeat, not {options.may_repeat!r}")
    if options.max_tokens is not None and (type(options.max_tokens) is not int or options.max_tokens < 1):
        raise InvalidArguments(f"max_tokens= is a whole number of at least 1, not {options.max_tokens!r}")
    if options.max_usd is not None:
        from agent_run_ledger.model import dollars

        try:
            options = options._replace(max_usd=dollars(options.max_usd, "max_usd="))
        except ValueError as error:
            raise InvalidArguments(str(error)) from None
    for name in ("receipt", "classify"):
        if getattr(options, name) is not None and not callable(getattr(options, name)):
            raise InvalidArguments(f"{name}= is a function, not {getattr(options, name)!r}; nothing was dispatched")
    if options.classify is not None and functions.signature(options.classify).is_async:
        raise InvalidArguments("classify= is a plain function, not an async one; nothing was dispatched")
    if options.key_window is not None:
        options = options._replace(key_window=_seconds(options.key_window))
    if options.kind != "tool":
        if options.kind != "model":
            raise InvalidArguments(f"kind= is 'tool' or 'model', not {options.kind!r}; nothing was dispatched")
        options = options._replace(effect=options.effect or Effect.READ)
    if options.effect is not None and type(options.effect) is not Effect:
        options = options._replace(effect=_effect(options.effect))
    if options.receipt is not None:
        if options.effect is Effect.READ:
            raise InvalidArguments(
                "receipt= asks what a call has changed, and effect=Effect.READ says that it changes nothing"
            )
        options = options._replace(effect=options.effect or Effect.MUTATE)
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


def _seconds(given: float | timedelta) -> float:
    """`key_window=` in seconds."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if type(seconds) not in (int, float) or not seconds > 0:
        raise InvalidArguments(f"key_window= is a number of seconds or a timedelta, more than 0, not {given!r}")
    return float(seconds)


def _exceptions(given: Any) -> tuple[type[BaseException], ...]:
    """`raises=` and `fatal=` as a tuple of exception classes, checked."""
    types = given if isinstance(given, tuple) else (given,)
    for each in types:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise InvalidArguments(f"raises= and fatal= take exception classes, not {each!r}")
    return types


class DurableWait(NamedTuple):
    """What a program waits for: a time, a signal, somebody's approval of its arguments, or the end of a run that it has begun."""

    sort: Literal["sleep", "signal", "approval", "child"]
    name: str
    seconds: float | None
    """How long it waits at the most, from the first time on; None: for ever."""


class Begun(NamedTuple):
    """What a call returns that has begun another run, for whose end it is to wait."""

    run_id: str


class LeftBehind(NamedTuple):
    """What a thread that had run out of time did in the end: `value` if it returned, nothing if it raised or `is_running` still."""

    is_running: bool
    has_returned: bool
    value: Any

    @property
    def decides(self) -> bool:
        """Whether nothing has to be sent or asked: it has an output, or has to be waited for."""
        return self.is_running or self.has_returned


_NOTHING = Options()
_NOWHERE: Any = None


class Call:
    """What the program asks for, and how far it has come. What most calls never need stands in the class."""

    maker: object = None
    """The task or thread that makes it."""
    stored: bytes = b""
    digest: bytes = b""
    position: str = ""
    """Its place in the run, from the moment at which it is made."""
    task: Any = None
    """The task that waits for it, where it is awaited."""
    seen: int | None = None
    """The seq of the last outcome that its program had been handed, in an event loop, when it made this call or was interrupted."""
    behind: frozenset[str] = frozenset()
    """The positions of the calls that were interrupted before it was made: its program has gone on behind them."""
    since: int = 0
    """How many entries its run had when it was made."""
    is_replay: bool = False
    """Whether the log had its outcome when it was made."""
    was_dispatched: bool = False
    is_delivered: bool = False
    """Whether its program was given the outcome."""
    coroutine: Callable[[], Any] | None = None
    """A weak reference to the coroutine that was made for it and has not begun."""
    heard: int = 0
    """Up to which request of others its run was known when it was last looked whether that has come."""
    drawn: tuple[int, tuple[str, ...], Most | str] | None = None
    """For which attempt the accounts that its run shares were asked, which ones, and what they answered."""
    questions: int = 0
    """How often the receiver was asked for its receipt, in this life."""
    left: LeftBehind | None = None
    """What became of the thread of the step that it continues, once that is known."""
    settles: bool = False
    """Whether nobody asks for the outcome: recovery settles the step before its program runs."""

    def __init__(
        self,
        tool: str,
        arguments: dict[str, Any],
        function: Callable[..., Any],
        options: Options,
        environment: str,
        passes_arguments: bool,
        limit: int,
        parameters: Mapping[str, Any],
        *,
        is_async: bool = False,
        takes_key: bool = False,
        attempts: int = 0,
        branch: Branch = _NOWHERE,
        place: str | None = None,
        after: tuple[str, ...] = (),
        wait: DurableWait | None = None,
        begins_run: bool = False,
    ) -> None:
        self.tool = tool
        self.arguments = arguments
        self.function = function
        self.options = options
        self.environment = environment
        """The tool's declared version or a digest of its code, and the versions beneath it."""
        self.passes_arguments = passes_arguments
        """Whether the function takes the stored arguments by keyword, or is called bare."""
        self.limit = limit
        """The largest payload, in canonical bytes."""
        self.parameters = parameters
        """The annotations by which stored arguments are made into the declared classes again."""
        self.is_async = is_async
        """Whether the function has to be awaited."""
        self.takes_key = takes_key
        """Whether the function is given the idempotency key as `idempotency_key`."""
        self.attempts = attempts
        """Dispatches over errors, crashes and reruns; 0: as its options say."""
        self.branch = branch
        """The branch in which it is made: whoever makes it says so."""
        self.place = place
        """Its position, where it has a name of its own as the steps of a pipeline have."""
        self.after = after
        """The positions whose outputs it depends on."""
        self.wait = wait
        """What it waits for, where it calls nobody."""
        self.begins_run = begins_run
        """Whether what it calls is a run of its own."""
        self.fetched: dict[int, bytes | None] = {}
        """Payloads of the log that had to be looked up for it, by seq; None: erased."""

    @property
    def max_attempts(self) -> int:
        """Dispatches over errors, crashes and reruns."""
        retry = self.options.retry
        return self.attempts or (retry.max_attempts if retry else recovery.DEFAULT_ATTEMPTS)

    @property
    def is_dropped(self) -> bool:
        """Whether nobody will ever ask for its outcome: its coroutine was closed before it began."""
        if self.coroutine is None:
            return False
        coroutine = self.coroutine()
        return coroutine is None or coroutine.cr_frame is None

    @property
    def key(self) -> str | None:
        """Its `step_key`."""
        return self.options.step_key

    def store_arguments(self) -> None:
        """Take the arguments as they are now. Raises `UnserialisableArguments` and `PayloadTooLarge`."""
        try:
            declared = functions.together(self.parameters.values()) if self.parameters else None
            what = f"the arguments of {self.tool!r}"
            self.stored = canonical.encode(self.arguments, limit=self.limit, what=what, declared=declared)
        except canonical.Unstorable as error:
            raise UnserialisableArguments(
                f"{error}. Nothing was dispatched and nothing was written.", error.path
            ) from None
        self.digest = digests.plain(self.stored)
