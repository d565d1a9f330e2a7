"""Where two canonical documents differ first, as a JSON path that a person can follow."""

from __future__ import annotations

import re

from agent_run_ledger.rules.canonical import read_raw, segment, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def difference(stored: bytes, asked: bytes) -> str | None:
    """The JSON path of the first difference between two canonical documents, or None where there is none.

    >>> difference(b'{"a":[1,2]}', b'{"a":[1,3]}')
    '$.a[1]'
    """
    if stored == asked:
        return None
    try:
        return _differ(read_raw(stored.decode())[0], read_raw(asked.decode())[0], "$") or "$"
    except Exception:  # one of them is not ours
        return "$"


def hint(stored: bytes | None, asked: bytes) -> str:
    """What to say of the first difference where it is a time or an id, which a program makes anew at each start; else nothing."""
    if stored is None:
        return ""
    try:
        pair = _differing(read_raw(stored.decode())[0], read_raw(asked.decode())[0])
    except Exception:  # one of them is not ours
        return ""
    for pattern, said in ((_ID, "an id: take it from `run.uuid4()`"), (_TIME, "a time: take it from `run.now()`")):
        if pair is not None and all(re.search(pattern, write(value)) for value in pair):
            return f" What differs is {said}, which a replay gives back as it was."
    return ""


_ID = r"(?i)[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}"
_TIME = r'^1[0-9]{9}([0-9]{3})?(\.[0-9]+)?$|[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}|")|"\$(datetime|time)"'


def _differing(one: Any, other: Any) -> tuple[Any, Any] | None:
    """The two innermost values that differ first."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(one[key], other[key]) for key in sorted(one)]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = list(zip(one, other, strict=True))
    else:
        return one, other
    return next((_differing(*pair) for pair in pairs if write(pair[0]) != write(pair[1])), None)


def _differ(one: Any, other: Any, path: str) -> str | None:
    if type(one) is not type(other):
        return path
    if isinstance(one, dict):
        if len(one) == 1 and one.keys() == other.keys() and (key := next(iter(one))).startswith("$"):
            return _differ_in_tag(key, one[key], other[key], path)
        for key in sorted(one.keys() | other.keys()):
            at = path + segment(key)
            if key not in one or key not in other:
                return at
            if (found := _differ(one[key], other[key], at)) is not None:
                return found
        return None
    if isinstance(one, list):
        for number, pair in enumerate(zip(one, other, strict=False)):
            if (found := _differ(*pair, f"{path}[{number}]")) is not None:
                return found
        return f"{path}[{min(len(one), len(other))}]" if len(one) != len(other) else None
    return None if write(one) == write(other) else path


def _differ_in_tag(tag: str, one: Any, other: Any, path: str) -> str | None:
    """A tag is how a value is written, not where it stands, so it is no part of the path."""
    if tag.startswith("$$"):
        return _differ(one, other, path + segment(tag[1:]))
    if tag == "$tuple":
        return _differ(one, other, path)
    if tag == "$type" and one[0] == other[0]:
        return _differ(one[1], other[1], path)
    if tag == "$map" and [key for key, _ in one] == [key for key, _ in other]:
        for (key, mine), (_, theirs) in zip(one, other, strict=True):
            if (found := _differ(mine, theirs, f"{path}[{write(key)}]")) is not None:
                return found
        return None
    return None if write(one) == write(other) else path
