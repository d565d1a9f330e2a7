"""Whether a live value may be given where an annotation stands: asked of arguments before anything is stored."""

from __future__ import annotations

import typing
from collections import abc
from collections.abc import Callable
from functools import partial
from types import NoneType, UnionType
from typing import Any, NamedTuple

from agent_run_ledger.rules import types
from agent_run_ledger.rules.canonical import segment


def misfit(annotation: object, value: object) -> str | None:
    """What is wrong with a value where an annotation stands, as a fragment of a sentence; None where it fits. Never raises.

    What a correct program or the JSON of a language model would pass fits: an integer for a float, a dict for a dataclass, a list for a
    tuple or set, an enum's value for its member. So does whatever cannot be told: an annotation that is no class, an iterator's items,
    a value whose own methods fail.

    >>> misfit(list[int], [1, 2])
    >>> misfit(list[int], [1, "2"])
    '[1]: expected int, found str'
    """
    try:
        check = _check(annotation)
        if type(value) in check.exact:
            return None
        found = check.look(value)
        return None if found is None else str(found)
    except Exception:  # the value's class may do anything in its methods: what it is nobody can say but the function
        return None


class _Misfit(NamedTuple):
    path: str
    """Where in the value it stands, as in `$.items[2]` without the `$`."""
    said: str

    def under(self, step: str) -> _Misfit:
        return _Misfit(step + self.path, self.said)

    def __str__(self) -> str:
        return f"{self.path}: {self.said}" if self.path else self.said


def _anything(value: Any) -> _Misfit | None:
    return None


class _Check:
    """What a value is asked. Before it is told what, it is content with anything."""

    __slots__ = ("exact", "expected", "look")

    def __init__(self) -> None:
        self.exact: frozenset[type] = frozenset()
        """A value whose type is one of these fits, whatever it is. So a thousand items are told in one pass without a call."""
        self.look: Callable[[Any], _Misfit | None] = _anything
        """Asked of every other value."""
        self.expected = "anything"

    def ask(self, value: Any) -> _Misfit | None:
        return None if type(value) in self.exact else self.look(value)

    def refusal(self, value: Any) -> _Misfit:
        return _Misfit("", f"expected {self.expected}, found {_shown(value, self.expected)}")


# --- checks are made once per annotation ------------------------------------------------------------------------------

_seen: dict[int, tuple[object, _Check]] = {}
"""By identity, which is quicker than to hash a union; the annotation is kept, so that no other gets its id."""
_known: dict[object, _Check] = {}
"""By equality, for annotations that are made anew for every call."""
_LIMIT = 1024

_Making = dict[object, _Check]
"""Checks that are in the making: an annotation may hold itself, by way of a TypedDict or a type alias."""


def _check(annotation: object) -> _Check:
    seen = _seen.get(id(annotation))
    if seen is not None and seen[0] is annotation:
        return seen[1]
    try:
        check = _known.get(annotation) or _made(annotation)
        _remember(_known, annotation, check)
    except Exception:  # unhashable, such as Annotated[int, []]
        check = _made(annotation)
    _remember(_seen, id(annotation), (annotation, check))
    return check


def _remember(known: dict[Any, Any], key: object, value: object) -> None:
    if len(known) >= _LIMIT:
        known.clear()
    known[key] = value


def _made(annotation: object) -> _Check:
    try:
        return _part(annotation, {})
    except Exception:  # RecursionError: it holds itself in a way that cannot be followed
        return _Check()


def _part(annotation: Any, making: _Making) -> _Check:
    """The check of an annotation that stands in another."""
    check = _Check()
    try:
        if (known := making.get(annotation)) is not None:
            return known
        making[annotation] = check
    except Exception:  # unhashable
        pass
    try:
        _tell(check, types._bare(annotation), making)
    except RecursionError:
        raise
    except Exception:  # an annotation may be any object: what it means stays unknown
        check.exact, check.look = frozenset(), _anything
    return check


def _tell(check: _Check, annotation: Any, making: _Making) -> None:
    """Tell a check what to ask for; one of which nothing can be said is left as it is."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union or origin is UnionType:
        return _tell_union(check, [_part(arg, making) for arg in args])
    if origin is typing.Literal:
        return _tell_literal(check, args)
    cls = annotation if origin is None else origin
    if cls is None or cls is NoneType:
        check.exact, check.expected, check.look = frozenset((NoneType,)), "None", check.refusal
        return None
    if not isinstance(cls, type) or cls in _UNTOLD or cls.__module__ == "typing":
        return None
    check.expected = cls.__name__
    if types._is_buildable(cls):
        _tell_object(check, annotation, cls, args)
    elif types._is_typed_dict(cls):
        _tell_typed_dict(check, cls, args, making)
    elif origin is not None and issubclass(cls, abc.Container | abc.Iterable) and hasattr(annotation, "__args__"):
        _tell_container(check, cls, args, making)
    else:
        _tell_instance(check, cls)
    return None


_UNTOLD = (object, type, abc.Callable)
"""Everything is an object; of a class or function there is nothing to ask that its use would not tell. The classes of `typing` itself
(Any, TextIO) are those of no object."""

_STAND_FOR: dict[type, tuple[type, ...]] = {
    float: (float, int),
    complex: (complex, float, int),
    bytes: (bytes, bytearray),
    tuple: (tuple, list),
    set: (set, list),
    frozenset: (frozenset, list),
    abc.Set: (abc.Set, list),
    abc.MutableSet: (abc.MutableSet, list),
}
"""What else may be given for a class: for numbers and bytes as PEP 484 has it; a list where JSON has no other way to write it."""


# --- one check for each kind of annotation ----------------------------------------------------------------------------


def _tell_instance(check: _Check, cls: type) -> None:
    classes = _STAND_FOR.get(cls, (cls,))
    # To Python a bool is an int, but not to who wrote `amount: int`.
    but = bool if cls in (int, float, complex) else None

    def look(value: Any) -> _Misfit | None:
        return None if _is_instance(value, classes) and type(value) is not but else check.refusal(value)

    check.exact, check.look = frozenset(classes), look


def _is_instance(value: Any, classes: tuple[type, ...]) -> bool:
    try:
        return isinstance(value, classes)
    except Exception:  # a Protocol, or a class that refuses to be asked
        return True


def _tell_union(check: _Check, members: list[_Check]) -> None:
    check.exact = frozenset().union(*(member.exact for member in members))
    check.expected = _listed(" | ", list(dict.fromkeys(member.expected for member in members)))

    def look(value: Any) -> _Misfit | None:
        tried: list[tuple[_Check, _Misfit]] = []
        for member in members:
            if (found := member.ask(value)) is None:
                return None
            tried.append((member, found))
        inside = [found for member, found in tried if found != member.refusal(value)]
        if len(inside) == 1:
            return inside[0]
        return _Misfit("", ", or ".join(map(str, inside[:3]))) if inside else check.refusal(value)

    check.look = look


def _tell_literal(check: _Check, choices: tuple[Any, ...]) -> None:
    plain = [choice.value if types._is_enum(type(choice)) else choice for choice in choices]
    check.expected = f"one of {_listed(', ', [_quoted(choice) for choice in plain])}"

    def look(value: Any) -> _Misfit | None:
        for choice in (*choices, *plain):
            if type(value) is type(choice) and value == choice:
                return None
        return check.refusal(value)

    check.look = look


def _tell_object(check: _Check, annotation: Any, cls: type, args: tuple[Any, ...]) -> None:
    """Enums, dataclasses, models, named tuples and classes of a built-in's kind: an object, or data that one can be built from."""
    check.exact = frozenset((cls,))
    if types._is_enum(cls):
        values = [member.value for member in typing.cast("Any", cls)]
        if values and all(type(value) in _QUOTABLE for value in values):
            check.expected = f"one of {_listed(', ', [_quoted(value) for value in values])}"

    def look(value: Any) -> _Misfit | None:
        if _is_instance(value, (cls,)):
            return None
        try:
            types._build(annotation, value, strict=True)
        except types.Misfit as misfit:
            try:
                return _where(check, annotation, cls, args, value, misfit)
            except Exception:  # while looking for words; that it does not fit is known
                return check.refusal(value)
        return None

    check.look = look


def _where(
    check: _Check, annotation: Any, cls: Any, args: tuple[Any, ...], value: Any, misfit: types.Misfit
) -> _Misfit | None:
    """Where in the data the trouble is, and whether it is one: a field is asked no more than an argument is."""
    if not isinstance(value, dict) or types._is_enum(cls):
        return check.refusal(value)
    if types._is_model(cls):
        return _invalid(misfit) or _Misfit("", _short(misfit))
    if types._is_dataclass(cls):
        for name, hint in types._substituted(cls, args).items():
            if name in value and (found := _check(hint).ask(value[name])) is not None:
                return found.under(_step(name))
        try:
            types._build(annotation, value, strict=False)
        except types.Misfit as still:
            return _Misfit("", _short(still))
        return None
    return check.refusal(value)


def _invalid(misfit: types.Misfit) -> _Misfit | None:
    """The first of the errors that a model's validation names."""
    error: Any = misfit.__cause__
    while error is not None and not callable(getattr(error, "errors", None)):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    first = error.errors()[0]
    path = "".join(map(_step, first["loc"]))
    return _Misfit(path, _short(first["msg"]))


def _tell_typed_dict(check: _Check, cls: Any, args: tuple[Any, ...], making: _Making) -> None:
    fields = {name: _part(hint, making) for name, hint in types._substituted(cls, args).items()}
    required = _required_keys(cls)
    others = _other_keys(cls, making)

    def look(value: Any) -> _Misfit | None:
        if not isinstance(value, dict):
            return check.refusal(value)
        if not value.keys() >= required:
            missing = next(name for name in fields if name in required and name not in value)
            return _Misfit("", f"{missing!r} is missing")
        for key, item in value.items():
            field = fields.get(key, others)
            if field is None:
                return _Misfit("", f"{check.expected} has no key {_quoted(key)}")
            if type(item) not in field.exact and (found := field.look(item)) is not None:
                return found.under(_step(key))
        return None

    check.look = look


def _required_keys(cls: Any) -> frozenset[str]:
    """Python's own list does not see `NotRequired` where annotations are strings; nor can we where one cannot be resolved."""
    required = set(cls.__required_keys__)
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:
        hints = types._hints(cls)
        required -= {name for name, hint in hints.items() if hint is Any}
    for name, hint in hints.items():
        while (origin := typing.get_origin(hint)) is typing.Annotated or getattr(origin, "_name", "") == "ReadOnly":
            hint = typing.get_args(hint)[0]
        if origin is typing.NotRequired:
            required.discard(name)
        elif origin is typing.Required:
            required.add(name)
    return frozenset(required)


def _other_keys(cls: Any, making: _Making) -> _Check | None:
    """What PEP 728 asks of keys that a TypedDict does not name; None where it has no others."""
    extra = getattr(cls, "__extra_items__", None)
    if extra not in (None, typing.Never) and type(extra).__name__ != "NoExtraItemsType":
        return _part(extra, making)
    return _Check() if getattr(cls, "__closed__", None) is False else None


def _tell_container(check: _Check, cls: type, args: tuple[Any, ...], making: _Making) -> None:
    """A generic class with its arguments: items are looked at where that takes nothing from anybody, in the plain containers."""
    classes = _STAND_FOR.get(cls, (cls,))
    inside: Callable[[Any], _Misfit | None] = _anything
    if cls is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if not any(getattr(arg, "__unpacked__", False) or typing.get_origin(arg) is typing.Unpack for arg in args):
            inside = partial(_in_places, [_part(arg, making) for arg in args])
    elif len(args) == 1 or cls is tuple:
        inside = partial(_in_items, _part(args[0], making))
    elif len(args) == 2 and issubclass(cls, abc.Mapping):
        inside = partial(_in_dict, *(_part(arg, making) for arg in args))

    def look(value: Any) -> _Misfit | None:
        if type(value) in classes or _is_instance(value, classes):
            return inside(value)
        return check.refusal(value)

    check.look = look


def _in_items(items: _Check, value: Any) -> _Misfit | None:
    kind = type(value)
    if kind in (str, bytes, bytearray):  # made of str or int throughout: one item says it for all
        found = items.ask(value[:1] if kind is str else 0)
        return found and found.under("[0]")
    if kind not in _PLAIN or items.look is _anything or items.exact.issuperset(map(type, value)):
        return None
    for number, item in enumerate(value):
        if type(item) not in items.exact and (found := items.look(item)) is not None:
            return found.under("[*]" if kind in (set, frozenset) else f"[{number}]")
    return None


_PLAIN = (list, tuple, set, frozenset, dict)


def _in_places(places: list[_Check], value: Any) -> _Misfit | None:
    if type(value) not in (tuple, list):
        return None
    if len(value) != len(places):
        return _Misfit("", f"expected {len(places)} items, found {len(value)}")
    for number, (place, item) in enumerate(zip(places, value, strict=True)):
        if (found := place.ask(item)) is not None:
            return found.under(f"[{number}]")
    return None


def _in_dict(keys: _Check, values: _Check, value: Any) -> _Misfit | None:
    if type(value) is not dict:
        return None
    if keys.look is not _anything and not keys.exact.issuperset(map(type, value)):
        for key in value:
            if (found := keys.ask(key)) is not None:
                return _Misfit("", f"the key {_quoted(key)}: {found.said}")
    if values.look is _anything or values.exact.issuperset(map(type, value.values())):
        return None
    for key, item in value.items():
        if (found := values.ask(item)) is not None:
            return found.under(_step(key))
    return None


# --- words ------------------------------------------------------------------------------------------------------------

_QUOTABLE = (str, int, bool, float, NoneType)


def _shown(value: Any, expected: str) -> str:
    """What was found: its type, or itself where it is one of some values that is missing."""
    if value is None:
        return "None"
    return _quoted(value) if expected.startswith("one of ") else type(value).__name__


def _step(key: object) -> str:
    """A key as a step of a path."""
    return segment(key) if type(key) is str and len(key) <= 80 else f"[{_quoted(key)}]"


def _quoted(value: Any) -> str:
    """A value in a few characters; of what may be long or talks for itself, the type."""
    kind = type(value)
    if kind is str:
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}…"
    if kind in _QUOTABLE and (kind is not int or value.bit_length() < 128):
        return repr(value)
    return kind.__name__


def _listed(between: str, words: list[str]) -> str:
    return between.join(words if len(words) <= 12 else [*words[:12], "…"])


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 200 else f"{line[:200]}…"
