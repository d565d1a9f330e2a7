"""Which strings may name a run, a tool or a step: any text but the unusable. What is allowed stays data everywhere."""

from __future__ import annotations

from keyword import iskeyword

from agent_run_ledger.errors import InvalidName
from agent_run_ledger.words import ACCOUNTS

MAX_BYTES = 255
MAX_IDENTIFIER = 63
"""Characters of an identifier: as many as PostgreSQL keeps."""

_SEPARATORS = " -."


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


def child_of(key: str) -> str:
    """The id of the run that an agent's call inside another agent is: `key` is that of the step there."""
    return f"run_{key[:20]}"


def is_account(run_id: str) -> bool:
    """Whether this is the log of a budget that runs share."""
    return run_id.startswith(ACCOUNTS)


def check_run_id(run_id: object, what: str = "run_id") -> str:
    """The id of a run that programs and people may act upon, or `InvalidName`: a budget that runs share is kept by the ledger alone."""
    name = check_name(what, run_id)
    if is_account(name):
        raise InvalidName(
            f"{what} {name!r}: ids that begin with {ACCOUNTS} are those of shared budgets; nothing was done"
        )
    return name


def sanitize_identifier(name: object) -> str:
    """An identifier for SQL, file names, URLs and Python: ASCII letters, digits and underscores, 63 at most, and no keyword.

    Spaces, hyphens and dots between other characters become one underscore, a leading digit gets one before it, a keyword of Python
    one behind it. Nothing else is mended: `InvalidName` says which character may not be in it, and where it stands. An identifier that
    came out of here stays as it is.

    >>> sanitize_identifier("fetch invoice-2026.10")
    'fetch_invoice_2026_10'
    >>> sanitize_identifier("class")
    'class_'
    """
    if not isinstance(name, str):
        raise InvalidName(f"an identifier is made of a string, not of {type(name).__name__}")
    text = str.__str__(name)  # what it holds, whatever a subclass says
    if not text:
        raise InvalidName("an identifier cannot be made of an empty string")
    for index, character in enumerate(text):
        if not (character.isascii() and (character.isalnum() or character == "_" or character in _SEPARATORS)):
            raise _unfit(text, index, "only ASCII letters, digits and underscores may stand in an identifier")
    if ".." in text:
        raise _unfit(text, text.index("..") + 1, "two dots in a row lead out of a folder")
    for index in (0, len(text) - 1):
        if text[index] in _SEPARATORS:
            raise _unfit(text, index, "an identifier neither begins nor ends with a space, a hyphen or a dot")
    for separator in _SEPARATORS:
        text = text.replace(separator, " ")
    identifier = "_".join(text.split())
    if identifier[0].isdigit():
        identifier = f"_{identifier}"
    if iskeyword(identifier):
        identifier = f"{identifier}_"
    if len(identifier) > MAX_IDENTIFIER:
        raise InvalidName(
            f"the identifier {identifier[:40]!r}… has {len(identifier)} characters, at most {MAX_IDENTIFIER} are allowed"
        )
    return identifier


def _unfit(text: str, index: int, rule: str) -> InvalidName:
    character = text[index]
    named = repr(character) if character.isascii() and character.isprintable() else f"U+{ord(character):04X}"
    return InvalidName(f"{text[:80]!r} holds {named} at index {index}: {rule}")
