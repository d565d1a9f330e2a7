"""What a Python function tells about itself: the parameters it takes, and a digest of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, GenericAlias
from typing import Any, get_type_hints

from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.model import LIBRARY_VERSION
from agent_run_ledger.rules import digests

_VARKEYWORDS, _GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x08, 0x20, 0x80, 0x200


@dataclass(frozen=True, slots=True)
class Signature:
    """What may be given to a function by keyword, and what it is made of."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool
    is_async: bool
    is_generator: bool
    environment: str
    """What its result may depend on beside its input: a digest of its code, and the versions beneath it."""


def signature(function: Callable[..., Any]) -> Signature:
    """Read a function's parameters. Raises `TypeError` for what cannot be called."""
    if type(function) is not FunctionType or function.__dict__:  # a wrapper keeps what it wraps in its dict
        return _inspected(function)
    code = function.__code__
    known = _known.get(id(code))
    if known is None or known[0] is not code or function.__defaults__ or function.__kwdefaults__:
        defaults = len(function.__defaults__ or ())
        known = code, _of_code(code, defaults, frozenset(function.__kwdefaults__ or ()))
        if len(_known) >= _KNOWN:
            _known.clear()
        _known[id(code)] = known
    return known[1]


_known: dict[int, tuple[CodeType, Signature]] = {}
_KNOWN = 4096
"""Functions remembered by their code, which stays the same object however often a lambda is made of it."""


def _of_code(code: CodeType, defaults: int, keyword_defaults: frozenset[str]) -> Signature:
    positional = code.co_varnames[: code.co_argcount]
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    required = positional[: len(positional) - defaults] + tuple(n for n in keyword_only if n not in keyword_defaults)
    return Signature(
        names=positional[code.co_posonlyargcount :] + keyword_only,
        required=required,
        takes_any=bool(code.co_flags & _VARKEYWORDS),
        is_async=bool(code.co_flags & (_COROUTINE | _ASYNC_GENERATOR)),
        is_generator=bool(code.co_flags & _GENERATOR),
        environment=environment(digests.code_digest(code)),
    )


def _inspected(function: Callable[..., Any]) -> Signature:
    import inspect

    if not callable(function):
        raise InvalidArguments(f"{function!r} is not callable; nothing was dispatched")
    inner = inspect.unwrap(function)
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    call = getattr(type(inner), "__call__", None)  # noqa: B004 - its code is wanted, not whether it can be called
    code = getattr(inner, "__code__", None) or getattr(call, "__code__", None)
    is_async = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
    if not is_async and not isinstance(inner, type):
        is_async = inspect.iscoroutinefunction(call)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions without a signature
        parameters = []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Signature(
        names=tuple(p.name for p in parameters if p.kind in named),
        required=tuple(
            p.name for p in parameters if p.default is p.empty and p.kind in (*named, inspect.Parameter.POSITIONAL_ONLY)
        ),
        takes_any=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        is_async=is_async,
        is_generator=inspect.isgeneratorfunction(inner),
        environment=environment(digests.code_digest(code) if isinstance(code, CodeType) else "unknown"),
    )


def check_arguments(tool: str, takes: Signature, arguments: Mapping[str, Any]) -> None:
    """Raises `InvalidArguments` where the stored arguments could not be given to the function by keyword."""
    missing = [name for name in takes.required if name not in arguments]
    extra = [name for name in arguments if name not in takes.names and not (takes.takes_any and isinstance(name, str))]
    if missing or extra:
        said = [f"missing: {', '.join(missing)}"] if missing else []
        said += [f"not a parameter: {', '.join(map(str, extra))}"] if extra else []
        raise InvalidArguments(
            f"{tool!r} cannot be called with these arguments ({'; '.join(said)}); nothing was dispatched"
        )


def environment(version: str) -> str:
    """A tool's version, declared or a digest of its code, with the versions of this library and of Python beneath it."""
    return f"{version} {_BENEATH}"


_BENEATH = f"{LIBRARY_VERSION} python {sys.version_info.major}.{sys.version_info.minor}"


def together(annotations: Iterable[Any]) -> Any:
    """One annotation that names the classes of all of them, for `canonical.encode(declared=)`; None where there are none."""
    parts = tuple(annotations)
    return GenericAlias(tuple, parts) if parts else None


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, resolved; {} where it has none or they name what is not there."""
    try:
        return get_type_hints(function, include_extras=True)
    except (
        Exception
    ):  # an annotation may be any expression: without it values stay plain, which is what they are stored as
        return {}
