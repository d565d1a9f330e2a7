"""What an auditor is handed of a run's tree: heads and proofs as data, and heads as texts that can be kept and signed anywhere.

A head is written as a *checkpoint* (C2SP tlog-checkpoint): three lines, the origin, the size in decimal and the root in base64.
Signed it is a *signed note* (C2SP signed-note): the text, an empty line, and a line for each signature. Nothing here signs or checks
a signature; `signing` does.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from agent_run_ledger.errors import BadNote
from agent_run_ledger.merkle import HASH_BYTES

ORIGIN = "agent-run-ledger/run/"
"""What the origin of every head begins with; the run's id follows, with all but letters, digits, `-`, `.`, `_` and `~` as `%` and hex."""

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_MARK = "— "
"""An em dash and a space: how a line of a signature begins."""
_LONGEST = 100_000
"""Characters of one note: no head is nearly as long, and what is no note is not gone through for ever."""


class Signs(Protocol):
    """Whoever can sign a text: `signing.Signer`."""

    def sign(self, text: str) -> str:
        """The text as a signed note."""


@dataclass(frozen=True, slots=True)
class TreeHead:
    """The size and the RFC 9162 root of one run's tree: whoever keeps it elsewhere can find a rewritten or cut log."""

    run_id: str
    size: int
    root: bytes

    def note(self, signer: Signs | None = None) -> str:
        """The head as a C2SP checkpoint; with a `signer` as a signed note.

        >>> print(TreeHead("october", 3, bytes(32)).note(), end="")
        agent-run-ledger/run/october
        3
        AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
        """
        text = f"{origin(self.run_id)}\n{self.size}\n{b64encode(self.root).decode()}\n"
        return text if signer is None else signer.sign(text)

    @classmethod
    def read(cls, text: str) -> Self:
        """The head that a checkpoint states, signed or not; what follows its three lines says nothing of the head. Raises `BadNote`."""
        lines = text.partition("\n\n")[0].split("\n")
        if len(lines) < 3:
            raise BadNote("a checkpoint has three lines: origin, size and root", text)
        named, size, root = lines[:3]
        run_id = _run_of(named, text)
        if not _SIZE.fullmatch(size):
            raise BadNote(f"its size is {size[:40]!r}, which is no size in decimal", text)
        return cls(run_id, int(size), exactly(root, HASH_BYTES, "root", text))


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """That an entry is in the tree of `size` entries: `merkle.verify_inclusion` takes these fields and the root, in this order."""

    leaf_hash: bytes
    index: int
    """From 0: the entry's seq less one."""
    size: int
    proof: list[bytes]


@dataclass(frozen=True, slots=True)
class ConsistencyProof:
    """That the tree of `size2` only adds to that of `size1`: `merkle.verify_consistency` takes these fields and both roots, in this order."""

    size1: int
    size2: int
    proof: list[bytes]


class Signature(NamedTuple):
    """One line of a signed note."""

    name: str
    """Of the key, as its owner calls it."""
    key_id: bytes
    """Four bytes: a hint at the key, and no proof."""
    signature: bytes


class Note(NamedTuple):
    """A text and the signatures on it, none of which is checked yet."""

    text: str
    """What is signed, with the line break at its end."""
    signatures: list[Signature]


def origin(run_id: str) -> str:
    """What a head of this run is headed with.

    >>> origin("invoices 10/2026")
    'agent-run-ledger/run/invoices%2010%2F2026'
    """
    return ORIGIN + "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in run_id.encode())


def _run_of(named: str, text: str) -> str:
    escaped = named.removeprefix(ORIGIN)
    try:
        given = re.sub(rb"%([0-9A-F]{2})", lambda each: bytes([int(each[1], 16)]), escaped.encode("ascii"))
        run_id = given.decode()
    except UnicodeError:
        run_id = ""
    if not run_id or origin(run_id) != named:  # one run, one origin: nothing is spelt in two ways
        raise BadNote(
            f"its origin {named[:80]!r} names no run of a ledger: it should be {ORIGIN} and the run's id", text
        )
    return run_id


def notes(text: str) -> Iterator[Note]:
    """The notes in a text, one behind the other, signed or not, with empty lines between them. Raises `BadNote`."""
    lines: list[str] = []
    signatures: list[Signature] = []
    is_body = True
    for line in [*text.split("\n"), "", ORIGIN]:  # the sentinel begins a note that never comes
        if line.startswith(_MARK) and lines:
            signatures.append(_signature(line, text))
            is_body = False
        elif not line:
            is_body = False
        elif is_body and not line.startswith(ORIGIN):
            lines.append(line)
        else:
            if lines:
                yield Note(_whole(lines), signatures)
            lines, signatures, is_body = [line], [], True


def _whole(lines: list[str]) -> str:
    text = "\n".join(lines) + "\n"
    if len(text) > _LONGEST or _CONTROL.search(text):
        raise BadNote("it is too long, or holds control characters", text)
    return text


def signed(text: str, *signatures: Signature) -> str:
    """The text as a note with these signatures; without any it is the text alone."""
    lines = [f"{_MARK}{each.name} {b64encode(each.key_id + each.signature).decode()}\n" for each in signatures]
    return "\n".join([text, *lines[:1]]) + "".join(lines[1:])


def _signature(line: str, text: str) -> Signature:
    name, _, encoded = line.removeprefix(_MARK).partition(" ")
    found = exactly(encoded, None, "signature", text)
    if not is_key_name(name) or len(found) < 5:
        raise BadNote(f"the line {line[:80]!r} is no signature", text)
    return Signature(name, found[:4], found[4:])


def is_key_name(name: object) -> bool:
    """Whether a key may have this name: text without white space and without a plus sign."""
    return isinstance(name, str) and bool(name) and name.isprintable() and not re.search(r"[\s+]", name)


def exactly(encoded: str, length: int | None, what: str, text: str) -> bytes:
    """The bytes that stand there in base64, so many of them. Raises `BadNote`."""
    try:
        found = b64decode(encoded, validate=True)
    except ValueError:
        found = b""
    if not found or b64encode(found).decode() != encoded or (length is not None and len(found) != length):
        size = "bytes" if length is None else f"{length} bytes"
        raise BadNote(f"its {what} {encoded[:60]!r} is not {size} in base64", text)
    return found
