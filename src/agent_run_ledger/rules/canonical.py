"""One value, one sequence of bytes: the canonical JSON in which arguments and outputs are stored, and the way back."""

from __future__ import annotations

import json
from operator import is_

from agent_run_ledger.errors import PayloadTooLarge, PlainDataWarning
from agent_run_ledger.rules import compact

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    _Class = TypeVar("_Class")

MAX_NESTING = 200
"""How many containers may stand inside each other."""


class Unstorable(ValueError):
    """A value cannot be stored: `path` says where the trouble stands, the message what it is."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class Undecodable(ValueError):
    """These bytes were not written by `encode`."""


class _Refused(ValueError):
    """Why one value cannot be stored; `encode` finds out where it stands and says both."""


# --- there ------------------------------------------------------------------------------------------------------------


def encode(value: object, *, limit: int | None = None, what: str = "arguments", declared: object = None) -> bytes:
    """The canonical JSON of `value`: keys sorted, UTF-8, no spaces, integers exact, floats by their shortest repr.

    Types that JSON lacks are written as one-key objects, `{"$tuple":[1,2]}`; a dict that looks like one gets one more `$`.
    An object of a class becomes plain data, with one `PlainDataWarning` per class unless the class is registered or named by
    the annotation `declared`. A bytearray is written as bytes.

    Raises `Unstorable` with the JSON path, or `PayloadTooLarge` where the bytes are more than `limit`, and nothing else; `what`
    names the value in both messages.

    >>> encode({"id": "INV-109", "amount": 3})
    b'{"amount":3,"id":"INV-109"}'
    >>> encode((1, b"hi"))
    b'{"$tuple":[1,{"$bytes":"aGk="}]}'
    """
    covered = _NO_CLASSES if declared is None else _classes(declared)
    given = value
    try:
        is_flat = type(value) is dict and len(value) != 1 and _TEXT.issuperset(map(type, value))
        if not (is_flat and _SCALARS.issuperset(map(type, value.values()))):  # type: ignore[attr-defined]
            value = _plain(value, 1, covered)
        data = "".join(_pieces(value, 0)).encode()
    except PlainDataWarning as warning:  # the user's filters make it an error
        raise Unstorable(f"{what} cannot be stored: {warning}", "$") from None
    except Exception:
        data = b""  # no JSON is empty
    if not data:
        data = _encode_with_care(given, what, covered)
    if limit is not None and len(data) > limit:
        raise PayloadTooLarge(what, len(data), limit)
    return data


_pieces = compact.encoder(sort_keys=True)
_TEXT = frozenset({str})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_NO_CLASSES: frozenset[type] = frozenset()
_Covered = frozenset[type]


def _classes(annotation: object) -> _Covered:
    from agent_run_ledger.rules import types

    return types.classes(annotation)


def _plain(value: Any, depth: int, covered: _Covered) -> Any:
    """`value` in the terms of JSON: the very same object where nothing has to change, which is nearly always."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth > MAX_NESTING:
        raise _Refused(f"nesting deeper than {MAX_NESTING} levels")
    if kind is dict:
        changed = None
        for key, item in value.items():
            if type(key) is not str:
                return _map(value, depth, covered)
            if type(item) not in _SCALARS:
                plain = _plain(item, depth + 1, covered)
                if plain is not item:
                    if changed is None:
                        changed = dict(value)
                    changed[key] = plain
        plain = value if changed is None else changed
        return plain if len(plain) != 1 else _untagged(plain)
    if kind is list:
        if _SCALARS.issuperset(map(type, value)):
            return value
        items = []
        for item in value:  # no comprehension: it would take a second frame for every level
            items.append(_plain(item, depth + 1, covered))  # noqa: PERF401
        return value if all(map(is_, items, value)) else items
    container = _CONTAINERS.get(kind)
    if container is not None:
        return container(value, depth, covered)
    standard = _STANDARD.get((kind.__module__, kind.__qualname__))
    if standard is not None:
        return standard(value, kind)
    return _object(value, kind, depth, covered)


def _dumps(plain: Any) -> str:
    return "".join(_pieces(plain, 0))


def _untagged(plain: dict[str, Any]) -> dict[str, Any]:
    """A user's dict that looks like a tag gets one more `$`."""
    if len(plain) == 1:
        for key in plain:
            if key.startswith("$"):
                return {"$" + key: plain[key]}
    return plain


def _map(value: dict[Any, Any], depth: int, covered: _Covered) -> dict[str, Any]:
    """A dict with other than string keys: it keeps its order, since such keys have none that all could agree on."""
    pairs: list[list[Any]] = []
    for key, item in value.items():
        pairs.append([_hashable(_plain(key, depth + 1, covered)), _plain(item, depth + 1, covered)])
    keys = [key for key, _ in pairs]
    if len(set(map(write, keys))) != len(keys):
        raise _Refused("a dict of which two keys are the same as plain data")
    if all(type(key) is str for key in keys):  # keys of a class, such as StrEnum, that were strings all along
        return _untagged(dict(pairs))
    return {"$map": pairs}


def _tuple(value: tuple[Any, ...], depth: int, covered: _Covered) -> dict[str, Any]:
    items = []
    for item in value:
        items.append(_plain(item, depth + 1, covered))  # noqa: PERF401
    return {"$tuple": items}


def _set(value: set[Any] | frozenset[Any], depth: int, covered: _Covered) -> dict[str, Any]:
    """The members by their canonical text: the order of iteration changes from process to process."""
    members = []
    for member in value:
        members.append(_hashable(_plain(member, depth + 1, covered)))  # noqa: PERF401
    if len(members) > 1:
        members.sort(key=write)
    return {"$set" if isinstance(value, set) else "$frozenset": members}


def _hashable(plain: Any) -> Any:
    """Refuse, as key or as member of a set, what could not be one when it is read."""
    if type(plain) in _SCALARS:
        return plain
    tag = next(iter(plain), "") if type(plain) is dict and len(plain) == 1 else ""
    if tag == "$tuple":
        for item in plain[tag]:
            _hashable(item)
    elif tag in ("$set", "$map") or tag not in _READERS:
        raise _Refused("a container with a key or member that is not hashable as plain data; register_type its class")
    return plain


def _bytes(value: bytes | bytearray, depth: int, covered: _Covered) -> dict[str, Any]:
    from binascii import b2a_base64

    return {"$bytes": b2a_base64(value, newline=False).decode()}


_CONTAINERS: dict[type, Callable[[Any, int, _Covered], Any]] = {
    tuple: _tuple,
    set: _set,
    frozenset: _set,
    bytes: _bytes,
    bytearray: _bytes,
}


def _datetime(value: Any, cls: Any) -> dict[str, Any]:
    return {"$datetime": _moment(value, cls)}


def _time(value: Any, cls: Any) -> dict[str, Any]:
    return {"$time": _moment(value, cls)}


def _moment(value: Any, cls: Any) -> str | list[Any]:
    """ISO text, or `[ISO text, fold, zone key, zone name]` where the text does not say it all.

    A named zone is written without its offset: the rules of a zone change, and the same argument must keep its bytes.
    """
    zone, key, name = value.tzinfo, None, None
    if zone is not None:
        kind = type(zone)
        qualified = (kind.__module__, kind.__qualname__)
        if qualified == ("zoneinfo", "ZoneInfo"):
            key = zone.key
            if key is None:
                raise _Refused("a ZoneInfo without a key; nobody could find that zone again")
            value = cls.replace(value, tzinfo=None)
        elif qualified == ("datetime", "timezone"):
            name = (*zone.__getinitargs__(), None)[1]
        else:
            from agent_run_ledger.rules import types

            types.warn_undeclared(kind)
    text = cls.isoformat(value)
    return text if not value.fold and key is None and name is None else [text, value.fold, key, name]


def _date(value: Any, cls: Any) -> dict[str, Any]:
    return {"$date": cls.isoformat(value)}


def _timedelta(value: Any, cls: Any) -> dict[str, Any]:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _decimal(value: Any, cls: Any) -> dict[str, Any]:
    # The exponent's letter follows the caller's decimal context; the stored text must not. NaN is exact text here, so it may pass.
    return {"$decimal": cls.__str__(value).replace("e", "E")}


def _uuid(value: Any, cls: Any) -> dict[str, Any]:
    return {"$uuid": cls.__str__(value)}


# By name, so that the modules of types that are never met are never imported.
_STANDARD: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("datetime", "datetime"): _datetime,
    ("datetime", "date"): _date,
    ("datetime", "time"): _time,
    ("datetime", "timedelta"): _timedelta,
    ("decimal", "Decimal"): _decimal,
    ("uuid", "UUID"): _uuid,
}


def _object(value: object, kind: type, depth: int, covered: _Covered) -> Any:
    """An object of a class as plain data: tagged with its registered name, or with a warning if nothing will rebuild it."""
    from agent_run_ledger.rules import types

    name = types.registered_name(kind)
    try:
        for base in kind.__mro__[1:]:
            standard = _STANDARD.get((base.__module__, base.__qualname__))
            if standard is not None:
                plain = standard(value, base)
                break
        else:
            plain = _plain(types.unwrapped(value, kind in covered or name is not None), depth, covered)
    except types.Opaque as opaque:
        raise _Refused(str(opaque)) from None
    if name is not None:
        return {"$type": [name, plain]}
    if kind not in covered:
        types.warn_undeclared(kind)
    return plain


# --- there, slowly ----------------------------------------------------------------------------------------------------


def _encode_with_care(value: object, what: str, covered: _Covered) -> bytes:
    """What the fast way could not do: integers beyond Python's limit for text; for everything else, say where it stands."""
    try:
        found = _locate(value, covered)
        if found is None:
            return write(_plain(value, 1, covered)).encode()
    except RecursionError:
        found = "$", "nested too deeply for what is left of the stack"
    except Exception as error:  # a value that changes while it is read, say
        found = "$", f"not storable ({type(error).__name__}: {error})"
    path, reason = found
    shown = path if len(path) <= 120 else f"{path[:60]}…{path[-50:]}"
    raise Unstorable(f"{what} cannot be stored: {shown} is {reason}", path)


def write(plain: Any) -> str:
    """Canonical text of plain data, with integers of any size."""
    kind = type(plain)
    if kind is int:
        return _digits(plain)
    if kind is list:
        return "[" + ",".join(map(write, plain)) + "]"
    if kind is dict:
        return "{" + ",".join(f"{_dumps(key)}:{write(plain[key])}" for key in sorted(plain)) + "}"
    return _dumps(plain)


_SMALL_BITS = 2000
"""Python may be told to refuse texts of integers from 640 digits on; 2000 bits are 603."""


def _digits(number: int) -> str:
    """Decimal digits by halves, each within Python's limit: the limit is a setting of the user's process, not of ours."""
    if number < 0:
        return "-" + _digits(-number)
    bits = number.bit_length()
    if bits <= _SMALL_BITS:
        return str(number)
    low_digits = bits * 3 // 20  # half of log10(2) * bits
    high, low = divmod(number, 10**low_digits)
    return _digits(high) + _digits(low).rjust(low_digits, "0")


def _integer(text: str) -> int:
    """The inverse of `_digits`."""
    if text.startswith("-"):
        return -_integer(text[1:])
    if len(text) <= 600:
        return int(text)
    low_digits = len(text) // 2
    shift: int = 10**low_digits
    return _integer(text[:-low_digits]) * shift + _integer(text[-low_digits:])


def _locate(value: object, covered: _Covered) -> tuple[str, str] | None:
    """Path and reason of the first thing that cannot be stored: go down into the first child that fails by itself."""
    if _trouble(value, 1, covered) is None:
        return None
    path, depth, above = "$", 1, {id(value): "$"}
    descending = True
    while descending:
        descending = False
        for segment, child in _children(value):
            if _trouble(child, depth + 1, covered) is not None:
                path, depth, value, descending = path + segment, depth + 1, child, True
                break
        if descending and type(value) not in _SCALARS:
            if id(value) in above:
                return path, f"a cycle: it is the same object as {above[id(value)]}"
            above[id(value)] = path
    return path, _trouble(value, depth, covered) or "not storable"


def _trouble(value: object, depth: int, covered: _Covered) -> str | None:
    """Why this value cannot be stored, or None."""
    try:
        plain = _plain(value, depth, covered)
        try:
            _dumps(plain).encode()
        except ValueError:
            write(plain).encode()
    except UnicodeEncodeError as error:
        whose = "a string" if isinstance(value, str) else "a dict with a key"
        return f"{whose} with the lone surrogate U+{ord(error.object[error.start]):04X}, which UTF-8 cannot hold"
    except RecursionError:
        return "nested too deeply for what is left of the stack"
    except _Refused as refused:
        return str(refused)
    except Exception as error:
        return f"{value!r}, which JSON cannot hold" if type(value) is float else f"not storable ({error})"
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What stands directly in a value, each with its segment of the JSON path."""
    kind = type(value)
    if kind is dict:
        for number, (key, item) in enumerate(value.items()):
            if type(key) is not str:
                yield f"[key {number}]", key
            yield segment(key), item
    elif kind is list or kind is tuple:
        for number, item in enumerate(value):
            yield f"[{number}]", item
    elif kind is set or kind is frozenset:
        for item in value:
            yield "[*]", item
    elif kind not in _SCALARS and kind not in _CONTAINERS:
        from agent_run_ledger.rules import types

        try:
            inner = types.unwrapped(value, True)
        except types.Opaque:
            return
        if type(inner) in _SCALARS:
            yield "", inner
        else:
            yield from _children(inner)


def segment(key: object) -> str:
    """A key as a step of a JSON path."""
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
    return f"[{key!a:.80}]"


# --- and back ---------------------------------------------------------------------------------------------------------


def decode(data: bytes) -> Any:
    """The value that `encode` was given, with dicts in the order of their sorted keys. Raises `Undecodable`.

    >>> decode(b'{"$tuple":[1,{"$bytes":"aGk="}]}')
    (1, b'hi')
    """
    try:
        text = data.decode()
        # Canonical text has no spaces and escapes quotes inside strings, so this finds every tag and little else.
        value, end = (_read_tagged if "$" in text and '{"$' in text else _read_plain)(text)
    except json.JSONDecodeError as error:
        raise Undecodable(f"not canonical JSON: {error}") from error
    except (ValueError, RecursionError):
        value, end, text = _decode_with_care(data)
    if end != len(text):
        raise Undecodable(f"not canonical JSON: {len(text) - end} characters too many")
    return value


def _decode_with_care(data: bytes) -> tuple[Any, int, str]:
    """What the fast way could not do: integers beyond Python's limit for text."""
    try:
        text = data.decode()
        return *_read_big(text), text
    except Undecodable:
        raise
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"not canonical JSON: {error}") from error


def _untag(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        return found
    [(key, inner)] = found.items()
    if not key.startswith("$"):
        return found
    if key.startswith("$$"):
        return {key[1:]: inner}
    reader = _READERS.get(key)
    if reader is None:
        raise Undecodable(f"not written by this version: the tag {key!r} is unknown")
    try:
        return reader(inner)
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(f"not written by this library: the tag {key!r} holds {error}") from error


def _items(inner: object) -> list[Any]:
    if type(inner) is not list:
        raise Undecodable("not written by this library: a tag that should hold a list")
    return inner


def _read_moment(cls: Any, inner: str | list[Any]) -> Any:
    if isinstance(inner, str):
        return cls.fromisoformat(inner)
    text, fold, key, name = inner
    moment = cls.fromisoformat(text).replace(fold=fold)
    if key is not None:
        from zoneinfo import ZoneInfo

        return moment.replace(tzinfo=ZoneInfo(key))
    if name is not None:
        from datetime import timezone

        return moment.replace(tzinfo=timezone(moment.utcoffset(), name))
    return moment


def _read_datetime(inner: Any) -> Any:
    from datetime import datetime

    return _read_moment(datetime, inner)


def _read_time(inner: Any) -> Any:
    from datetime import time

    return _read_moment(time, inner)


def _read_date(inner: str) -> Any:
    from datetime import date

    return date.fromisoformat(inner)


def _read_timedelta(inner: Any) -> Any:
    from datetime import timedelta

    return timedelta(*_items(inner))


def _read_decimal(inner: str) -> Any:
    from decimal import Decimal

    return Decimal(inner)


def _read_uuid(inner: str) -> Any:
    from uuid import UUID

    return UUID(inner)


def _read_bytes(inner: str) -> bytes:
    from binascii import a2b_base64

    return a2b_base64(inner, strict_mode=True)


def _read_type(inner: Any) -> Any:
    from agent_run_ledger.rules import types

    name, plain = _items(inner)
    return types.rebuild_registered(name, plain)


_READERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda inner: tuple(_items(inner)),
    "$set": lambda inner: set(_items(inner)),
    "$frozenset": lambda inner: frozenset(_items(inner)),
    "$map": lambda inner: dict(_items(inner)),
    "$bytes": _read_bytes,
    "$datetime": _read_datetime,
    "$date": _read_date,
    "$time": _read_time,
    "$timedelta": _read_timedelta,
    "$decimal": _read_decimal,
    "$uuid": _read_uuid,
    "$type": _read_type,
}


def _no_constant(name: str) -> Any:
    raise Undecodable(f"not canonical JSON: it has no {name}")


_read_plain = json.JSONDecoder(parse_constant=_no_constant).raw_decode
_read_tagged = json.JSONDecoder(parse_constant=_no_constant, object_hook=_untag).raw_decode
_read_big = json.JSONDecoder(parse_constant=_no_constant, object_hook=_untag, parse_int=_integer).raw_decode
read_raw = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer).raw_decode


# --- declared classes -------------------------------------------------------------------------------------------------


_NOTHING_TO_BUILD = frozenset(
    {None, type(None), str, int, float, bool, bytes, dict, list, tuple, set, frozenset, object}
)


def declared(annotation: object) -> bool:
    """Whether the annotation names a class that `rebuild` could build; cheap enough to be asked for every call."""
    try:
        if annotation in _NOTHING_TO_BUILD:
            return False
    except TypeError:  # an unhashable annotation
        pass
    return bool(_classes(annotation))


def rebuild(annotation: object, plain: Any) -> Any:
    """The value that the annotation declares, built from decoded data. Deterministic; never raises.

    Builds enums, dataclasses, pydantic models, named tuples and subclasses of built-in types, also inside containers and unions
    (of a union the first member that fits, as written). What cannot be built stays plain, with one warning per class. The live
    value takes this way as well as the replayed one: `rebuild(annotation, decode(encode(value, declared=annotation)))`.
    """
    if not declared(annotation):
        return plain
    from agent_run_ledger.rules import types

    return types.rebuild(annotation, plain)


def register_type(cls: type[_Class], name: str | None = None) -> type[_Class]:
    """Have objects of `cls` stored under `name` (default: the class's own) and rebuilt wherever they stand.

    For enums, dataclasses, pydantic models, named tuples and subclasses of built-in types; usable as a decorator. The name is
    looked up among registered classes and never imported. Raises `ValueError` where the class or the name is taken, `TypeError`
    where the class is of no kind that can be rebuilt.
    """
    from agent_run_ledger.rules import types

    types.register(cls, name)
    return cls
