"""What a Python function tells about itself: the parameters it takes, how a call binds to them, and a digest of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, GenericAlias
from typing import Any, NamedTuple, get_type_hints

from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.rules import digests
from agent_run_ledger.words import LIBRARY_VERSION

KEY = "idempotency_key"
"""A parameter of this name is given by the ledger: a step's own key, for the receiver."""

_VARARGS, _VARKEYWORDS, _GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x04, 0x08, 0x20, 0x80, 0x200


class Signature(NamedTuple):
    """What may be given to a function by keyword, and what it is made of."""

    names: tuple[str, ...]
    """The parameters that a caller may give by keyword; `idempotency_key`, which the ledger gives, is none of them."""
    required: tuple[str, ...]
    positional: tuple[str, ...]
    """Those that may be given by position too, in Python's order; here `idempotency_key` keeps its place."""
    unnamed: tuple[str, ...]
    """What cannot be given by keyword: positional-only parameters, and `*args` with its star."""
    takes_any: bool
    takes_key: bool
    """Whether it has a parameter `idempotency_key` for the ledger to fill."""
    is_async: bool
    is_generator: bool
    environment: str
    """What its result may depend on beside its input: a digest of its code, and the versions beneath it."""

    def without(self, names: Collection[str]) -> Signature:
        """The same without parameters that no caller gives."""
        left = [
            tuple(name for name in some if name not in names) for some in (self.names, self.required, self.positional)
        ]
        return self._replace(names=left[0], required=left[1], positional=left[2])


def signature(function: Callable[..., Any]) -> Signature:
    """Read a function's parameters. Raises `InvalidArguments` for what cannot be called."""
    if type(function) is not FunctionType or function.__dict__:  # a wrapper keeps what it wraps in its dict
        return _inspected(function)
    code, defaults = function.__code__, len(function.__defaults__ or ())
    keyword_defaults = frozenset(function.__kwdefaults__ or ())
    known = _known.get(id(code))
    if known is None or known[0] is not code or known[1] != defaults or known[2] != keyword_defaults:
        known = code, defaults, keyword_defaults, _of_code(code, defaults, keyword_defaults)
        if len(_known) >= _KNOWN:
            _known.clear()
        _known[id(code)] = known
    return known[3]


_known: dict[int, tuple[CodeType, int, frozenset[str], Signature]] = {}
_KNOWN = 4096
"""Functions remembered by their code, which stays the same object however often a lambda is made of it."""


def _of_code(code: CodeType, defaults: int, keyword_defaults: frozenset[str]) -> Signature:
    positional = code.co_varnames[: code.co_argcount]
    named_from = code.co_argcount + code.co_kwonlyargcount
    keyword_only = code.co_varnames[code.co_argcount : named_from]
    unnamed = positional[: code.co_posonlyargcount]
    if code.co_flags & _VARARGS:
        unnamed += (f"*{code.co_varnames[named_from]}",)
    return _made(
        positional=positional[code.co_posonlyargcount :],
        keyword_only=keyword_only,
        required=positional[: len(positional) - defaults] + tuple(n for n in keyword_only if n not in keyword_defaults),
        unnamed=unnamed,
        takes_any=bool(code.co_flags & _VARKEYWORDS),
        is_async=bool(code.co_flags & (_COROUTINE | _ASYNC_GENERATOR)),
        is_generator=bool(code.co_flags & (_GENERATOR | _ASYNC_GENERATOR)),
        code=code,
    )


def _inspected(function: Callable[..., Any]) -> Signature:
    import inspect

    if not callable(function):
        raise InvalidArguments(f"{function!r} is not callable; nothing was dispatched")
    layers = _layers(function)
    inner = layers[-1]
    call = getattr(type(inner), "__call__", None)  # noqa: B004 - its code is wanted, not whether it can be called
    code = getattr(inner, "__code__", None) or getattr(call, "__code__", None)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions without a signature
        parameters = []
    kinds = inspect.Parameter
    rest = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    return _made(
        positional=tuple(p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD),
        keyword_only=tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY),
        required=tuple(p.name for p in parameters if p.default is p.empty and p.kind not in rest),
        unnamed=tuple(
            f"*{p.name}" if p.kind is kinds.VAR_POSITIONAL else p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)
        ),
        takes_any=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        is_async=any(map(_is_async, layers)),
        is_generator=inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner),
        code=code,
    )


def _layers(function: Any) -> list[Any]:
    """A callable and what it wraps, outermost first: what functools.wraps, functools.partial and methods leave to be seen."""
    layers = [function]
    while len(layers) < 100:  # an object that answers to every name would go on for ever
        outer = layers[-1]
        inside = [getattr(outer, name) for name in ("__wrapped__", "func", "__func__") if hasattr(outer, name)]
        if not inside:
            break
        layers.append(inside[0])
    return layers


def _is_async(layer: Any) -> bool:
    import inspect

    if inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer):
        return True
    call = getattr(type(layer), "__call__", None)  # noqa: B004 - its kind is wanted, not whether it can be called
    return not isinstance(layer, type) and (inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call))


def _made(
    positional: tuple[str, ...],
    keyword_only: tuple[str, ...],
    required: tuple[str, ...],
    unnamed: tuple[str, ...],
    takes_any: bool,
    is_async: bool,
    is_generator: bool,
    code: object,
) -> Signature:
    names = positional + keyword_only
    takes_key = KEY in names
    return Signature(
        names=tuple(name for name in names if name != KEY),
        required=tuple(name for name in required if name != KEY or not takes_key),
        positional=positional,
        unnamed=unnamed,
        takes_any=takes_any,
        takes_key=takes_key,
        is_async=is_async,
        is_generator=is_generator,
        environment=environment(digests.code_digest(code) if isinstance(code, CodeType) else "unknown"),
    )


def check_arguments(tool: str, takes: Signature, arguments: Mapping[str, Any]) -> None:
    """Raises `InvalidArguments` where the stored arguments could not be given to the function by keyword."""
    if takes.takes_key and KEY in arguments:
        raise InvalidArguments(f"{tool!r}: {_GIVEN_BY_THE_LEDGER}; nothing was dispatched")
    missing = [name for name in takes.required if name not in arguments]
    extra = [name for name in arguments if name not in takes.names and not (takes.takes_any and isinstance(name, str))]
    if missing or extra:
        said = [f"missing: {', '.join(missing)}"] if missing else []
        said += [f"not a parameter: {', '.join(map(str, extra))}"] if extra else []
        raise InvalidArguments(
            f"{tool!r} cannot be called with these arguments ({'; '.join(said)}); nothing was dispatched"
        )


_GIVEN_BY_THE_LEDGER = f"{KEY!r} is given by the ledger, leave it out of the arguments"


def bound(takes: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], *, tool: str = "") -> dict[str, Any]:
    """The arguments of a Python call by the names of their parameters, as they were given: defaults are not filled in.

    Raises `InvalidArguments`, in Python's words, where Python could not make the call, and where the function has parameters without
    a name to give them by. `tool` is whose call it is, for the message.

    >>> def pay(customer: str, amount: int, currency: str = "EUR") -> None: ...
    >>> bound(signature(pay), ("ACME",), {"amount": 5})
    {'customer': 'ACME', 'amount': 5}
    """
    arguments = dict(zip(takes.positional, args, strict=False)) if args else {}
    arguments.update(kwargs)
    if (trouble := _misbound(takes, arguments, args, kwargs)) is not None:
        raise InvalidArguments(
            f"{tool!r}: {trouble}; nothing was dispatched" if tool else f"{trouble}; nothing was dispatched"
        )
    return arguments


def _misbound(
    takes: Signature, arguments: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why a call cannot be made, or None; asked of every call, so it is plain loops."""
    if takes.unnamed:
        return _unnamed(takes)
    if takes.takes_key and KEY in arguments:
        return _GIVEN_BY_THE_LEDGER
    if len(args) > len(takes.positional):
        return "too many positional arguments"
    if len(arguments) < len(args) + len(kwargs):
        twice = next(name for name in takes.positional if name in kwargs)
        return f"multiple values for argument {twice!r}"
    for name in takes.required:
        if name not in arguments:
            return f"missing a required argument: {name!r}"
    if not takes.takes_any:
        names = takes.names
        for name in kwargs:
            if name not in names:
                return f"got an unexpected keyword argument {name!r}"
    return None


def check_takes_keywords(takes: Signature, tool: str) -> None:
    """Raises `InvalidArguments` where the function has parameters without a name to give them by."""
    if takes.unnamed:
        raise InvalidArguments(f"{tool!r}: {_unnamed(takes)}")


def _unnamed(takes: Signature) -> str:
    return f"a tool takes its arguments by keyword, and {', '.join(takes.unnamed)} cannot be given so"


def environment(version: str) -> str:
    """A tool's version, declared or a digest of its code, with the versions of this library and of Python beneath it."""
    return f"{version} {_BENEATH}"


_BENEATH = f"{LIBRARY_VERSION} python {sys.version_info.major}.{sys.version_info.minor}"


def together(annotations: Iterable[Any]) -> Any:
    """One annotation that names the classes of all of them, for `canonical.encode(declared=)`; None where there are none."""
    parts = tuple(annotations)
    return GenericAlias(tuple, parts) if parts else None


def name_of(function: Callable[..., Any]) -> str:
    """A function's own name, without its module; its class's where it has none."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function that can be resolved.

    One may be any expression, or name what only a type checker imports: without it values stay plain, which is what they are stored as.
    """
    code = function.__code__ if type(function) is FunctionType and not hasattr(function, "__wrapped__") else None
    if code is not None:
        known = _hinted.get(id(code))
        if known is not None and known[1] is function.__globals__ and known[2] == function.__annotations__:
            return known[3].copy()
    try:
        resolved = get_type_hints(function, include_extras=True)
    except Exception:
        pass
    else:
        if code is not None:
            if len(_hinted) >= _KNOWN:
                _hinted.clear()
            _hinted[id(code)] = (code, function.__globals__, dict(function.__annotations__), resolved.copy())
        return resolved
    found: dict[str, Any] = {}
    for name, annotation in as_written(function).items():
        with suppress(Exception):
            found |= get_type_hints(_annotated(name, annotation), _globals(function), include_extras=True)
    return found


_hinted: dict[int, tuple[CodeType, dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
"""What the annotations of functions are, by their code: where it is made anew it is annotated in the same words, in the same module."""


def as_written(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function as they are written, which may be text."""
    with suppress(Exception):
        return dict(_layers(function)[-1].__annotations__)
    return {}


def _annotated(name: str, annotation: Any) -> Callable[[], None]:
    def function() -> None: ...

    function.__annotations__ = {name: annotation}
    return function


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    found = getattr(_layers(function)[-1], "__globals__", {})
    return found if isinstance(found, dict) else {}
