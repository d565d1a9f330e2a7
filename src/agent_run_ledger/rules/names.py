"""Which strings may name a run, a tool or a step: any text but the unusable. What is allowed stays data everywhere."""

from __future__ import annotations

from agent_run_ledger.errors import InvalidName

MAX_BYTES = 255


def check_name(what: str, name: object) -> str:
    """The name itself, or `InvalidName` that says what is wrong with it."""
    if not isinstance(name, str):
        raise InvalidName(f"{what} must be a string, not {type(name).__name__}")
    if name.isidentifier() and len(name) < 64 and name.isascii():
        return name  # the usual case, in one look
    if not name.strip():
        raise InvalidName(f"{what} is empty or white space only: give it a name")
    for index, character in enumerate(name):
        code = ord(character)
        if code < 0x20 or 0x7F <= code <= 0x9F:
            raise InvalidName(f"{what} {name[:80]!r} holds the control character U+{code:04X} at index {index}")
        if 0xD800 <= code <= 0xDFFF:
            raise InvalidName(f"{what} {name[:80]!r} holds the lone surrogate U+{code:04X} at index {index}")
    if (size := len(name.encode())) > MAX_BYTES:
        raise InvalidName(f"{what} {name[:40]!r}… takes {size} bytes, at most {MAX_BYTES} are allowed")
    return name
