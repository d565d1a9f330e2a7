"""Errors as data: what a tool's exception was, in text that can always be stored, read and shown without its class."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from typing import Any

MAX_CAUSES = 5
"""How many exceptions of a cause chain are kept below the error itself."""
_MAX_BASES = 50
_MAX_FRAMES = 50
_NAME_LIMIT = 255


# --- exceptions to data -----------------------------------------------------------------------------------------------


def describe(error: BaseException, *, message_limit: int = 2000, traceback_limit: int = 8000) -> dict[str, Any]:
    """The record of an exception: `type`, `module`, `message`, `bases`, `traceback`, `cause`. Never raises.

    `bases` are the qualified names of its class and of those above it; `cause` is the record of what it was raised from or
    while handling, as Python would print it, or None. Limits count characters; a long message keeps its beginning, a long
    traceback its end, where the error is. Everything is plain data that `canonical.encode` takes.

    >>> record = describe(ValueError("no such invoice"))
    >>> record["module"], record["type"], record["message"], record["bases"]
    ('builtins', 'ValueError', 'no such invoice', ['builtins.ValueError', 'builtins.Exception', 'builtins.BaseException'])
    """
    chain = [error]
    while len(chain) <= MAX_CAUSES:
        cause = _cause(chain[-1])
        if cause is None or any(cause is known for known in chain):
            break
        chain.append(cause)
    record: dict[str, Any] | None = None
    for link in reversed(chain):
        record = _record(link, message_limit, traceback_limit, record)
    assert record is not None
    return record


def _record(
    error: BaseException, message_limit: int, traceback_limit: int, cause: dict[str, Any] | None
) -> dict[str, Any]:
    cls = type(error)
    bases = [_qualified(base) for base in MRO_OF(cls) if base is not object]
    module, name = names_of(cls)
    return {
        "type": _storable(name, _NAME_LIMIT),
        "module": _storable(module, _NAME_LIMIT),
        "message": _storable(_message(error), message_limit),
        "bases": [_storable(base, 2 * _NAME_LIMIT) for base in bases[:_MAX_BASES]],
        "traceback": _storable(_traceback(error), traceback_limit, keep_end=True),
        "cause": cause,
    }


# Read through `type` and `BaseException` themselves: a class or an exception may hide these names behind anything.
_QUALNAME_OF = type.__dict__["__qualname__"].__get__
_MODULE_OF = type.__dict__["__module__"].__get__
MRO_OF = type.__dict__["__mro__"].__get__
CAUSE_OF = BaseException.__dict__["__cause__"].__get__
CONTEXT_OF = BaseException.__dict__["__context__"].__get__
SUPPRESSED_OF = BaseException.__dict__["__suppress_context__"].__get__
_FRAMES_OF = BaseException.__dict__["__traceback__"].__get__


def names_of(cls: type) -> tuple[str, str]:
    """The module and the qualified name of a class as plain text; `?` for a module that is none."""
    try:
        module = _MODULE_OF(cls)
    except AttributeError:  # made where there was no module
        module = None
    return str.__str__(module) if issubclass(type(module), str) else "?", str.__str__(_QUALNAME_OF(cls))


def _qualified(cls: type) -> str:
    return ".".join(names_of(cls))


def _message(error: BaseException) -> str:
    try:
        return str.__str__(str(error))  # what `__str__` returns may be of a subclass with ideas of its own
    except Exception as trouble:
        return f"(its message could not be read: {names_of(type(trouble))[1]})"


def _traceback(error: BaseException) -> str:
    """The frames alone: message and causes have places of their own."""
    frames = _FRAMES_OF(error)
    if frames is None:
        return ""
    import traceback

    try:
        return "".join(traceback.format_tb(frames, limit=-_MAX_FRAMES))
    except Exception as trouble:  # a source file that cannot be read, say
        return f"(its traceback could not be read: {names_of(type(trouble))[1]})"


def _cause(error: BaseException) -> BaseException | None:
    """What Python would print above the error."""
    cause: BaseException | None = CAUSE_OF(error)
    if cause is None and not SUPPRESSED_OF(error):
        cause = CONTEXT_OF(error)
    return cause


def _storable(text: str, limit: int, keep_end: bool = False) -> str:
    """The text within its limit, with `?` for every lone surrogate, which UTF-8 cannot hold."""
    if len(text) > limit:
        mark = f"[… of {len(text)} characters]"
        kept = max(limit - len(mark), 0)
        text = (mark + text[len(text) - kept :] if keep_end else text[:kept] + mark)[:limit]
    return text.encode("utf-8", "replace").decode()


# --- data to text and to exceptions -----------------------------------------------------------------------------------


def text(description: dict[str, Any]) -> str:
    """`Type: message`, or just `Type` where there is no message.

    >>> text({"type": "KeyError", "message": "'id'"}), text({"type": "TimeoutError", "message": ""})
    ("KeyError: 'id'", 'TimeoutError')
    """
    kind, message = description.get("type") or "Exception", description.get("message")
    return f"{kind}: {message}" if message else str(kind)


def matches(description: dict[str, Any], cls: type[BaseException]) -> bool:
    """Whether the recorded exception was of this class or of one below it, by qualified name."""
    bases = description.get("bases")
    return isinstance(bases, list) and _qualified(cls) in bases


def revive(cls: type[BaseException], description: dict[str, Any], cause: BaseException | None) -> BaseException:
    """An instance of a declared exception class with the recorded message, made without running its constructor.

    It has the recorded text, `cause` as its cause, and none of the attributes that its constructor would have set. Of the classes
    below `cls` that this process has defined it is the one that was recorded, so that a narrower `except` catches it, too.
    """
    cls = _narrowest(cls, description)
    message = str(description.get("message") or "")
    for make in (_with_text, _with_bare_text, _with_fixed_text):
        try:
            revived = make(cls, message)
            if str(revived) == message:
                break
        except Exception:  # whatever a class does in `__str__` or when it is subclassed
            continue
    else:
        revived = _with_text(cls, message)
    revived.__cause__ = cause
    return revived


def _narrowest(cls: type[BaseException], description: dict[str, Any]) -> type[BaseException]:
    """The class that was recorded, or the nearest above it that is defined here; found among subclasses, never imported."""
    bases = description.get("bases")
    recorded = bases if isinstance(bases, list) else []
    known, waiting = {_qualified(cls): cls}, [cls]
    while waiting:
        for below in type.__subclasses__(waiting.pop()):
            name = _qualified(below)
            if name in recorded and name not in known:
                known[name] = below
                waiting.append(below)
    return next((known[name] for name in recorded if name in known), cls)


def _with_text(cls: type[BaseException], message: str) -> BaseException:
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    if issubclass(builtin, BaseExceptionGroup):  # a group cannot be empty
        revived: BaseException = builtin.__new__(cls, message, [Exception(message)])
    else:
        revived = builtin.__new__(cls)
        revived.args = (message,)
    return revived


class _BareText(str):
    """A text that is its own repr, for `KeyError` and others that print the repr of their argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _with_bare_text(cls: type[BaseException], message: str) -> BaseException:
    revived = _with_text(cls, message)
    revived.args = (_BareText(message),)
    return revived


def _with_fixed_text(cls: type[BaseException], message: str) -> BaseException:
    """For a class whose `__str__` needs what its constructor sets: a subclass of the same name that knows the text."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__str__": lambda _: message}
    metaclass: Any = type(cls)
    return _with_text(metaclass(cls.__name__, (cls,), names), message)
