"""What this process shows of data: one redactor for everything that is printed, logged or handed on, with the private list it was given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from agent_run_ledger.errors import InvalidPrivateList
from agent_run_ledger.rules.redaction import Private, Scan
from agent_run_ledger.rules.redaction import Redactor as Redactor
from agent_run_ledger.rules.redaction import without_passwords as without_passwords

PRIVATE = "AGENT_RUN_LEDGER_PRIVATE"
"""The environment variable that names the private list."""

_KEYS = {"names": list, "values": list, "variables": list, "scanner": bool}


def redacted(value: Any) -> Any:
    """A copy of a text or of data that may be shown: secrets are hidden, as the command line hides them.

    Records of this library become dicts. Raises `InvalidPrivateList` where `$AGENT_RUN_LEDGER_PRIVATE` names a list that cannot be used.

    >>> redacted({"user": "ann", "password": "s3cret"})
    {'user': 'ann', 'password': '[redacted]'}
    """
    redactor = of_this_process()
    return redactor.text(value) if isinstance(value, str) else redactor.data(_plain(value))


def of_this_process() -> Redactor:
    """The redactor with the private list that the environment names, read once. Raises `InvalidPrivateList`."""
    return _read(os.environ.get(PRIVATE) or None)


@lru_cache(maxsize=8)
def _read(path: str | None) -> Redactor:
    if path is None:
        return Redactor()
    import tomllib

    try:
        with open(path, "rb") as file:
            given = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise InvalidPrivateList(path, str(error)) from None
    for key, value in given.items():
        if key not in _KEYS:
            raise InvalidPrivateList(path, f"it has {key!r}, and may have {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or (
            isinstance(value, list) and not all(type(each) is str for each in value)
        ):
            raise InvalidPrivateList(path, f"{key!r} is {'true or false' if key == 'scanner' else 'a list of texts'}")
    values = [
        *given.get("values", ()),
        *(os.environ[each] for each in given.get("variables", ()) if os.environ.get(each)),
    ]
    try:
        private = Private.of(given.get("names", ()), values)
    except ValueError as error:
        raise InvalidPrivateList(path, str(error)) from None
    return Redactor(private, _scanner(path) if given.get("scanner") else None)


def _scanner(path: str) -> Scan:
    """The scanner of the extra `[guard]`. It looks for shapes in this process alone: nothing is asked whether a secret is valid."""
    try:
        from kingfisher_sdk.rules import Rules
        from kingfisher_sdk.scanner import Scanner
    except ImportError as error:
        raise InvalidPrivateList(path, f"its scanner is not installed ({error}): install the extra [guard]") from None
    scanner = Scanner(Rules())

    def scan(text: str) -> Iterator[tuple[int, int]]:
        stored = text.encode("utf-8", "replace")  # as many bytes for a lone surrogate as characters: one
        for finding in scanner.scan(stored):
            begin, end = finding.location["start_offset"], finding.location["end_offset"]
            yield len(stored[:begin].decode("utf-8", "ignore")), len(stored[:end].decode("utf-8", "ignore"))

    return scan


def _plain(value: Any) -> Any:
    """Records as dicts, one in the other too; everything else as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
