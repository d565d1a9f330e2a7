"""Bundles: one run as lines of JSON that need nothing else, for whoever has JSON, base64 and SHA-256 in twenty years.

A bundle is ASCII. Its lines are, in this order: the opening; one for each head, for each entry and for each request of the inbox; how
the run stands at its end; and the SHA-256 of all bytes before. Bytes are base64. Fields stand in one order, and all of them always: so
one run that is exported twice alike gives the same bytes. That last line finds damage and a file that was cut off. It proves nothing
against who wrote the file; roots and signed heads do.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple, NoReturn

from agent_run_ledger.checkpoints import Note, TreeHead, notes, signed
from agent_run_ledger.contract import Listing, Request, Row
from agent_run_ledger.errors import BadBundle, BadNote, InvalidName
from agent_run_ledger.merkle import HASH_BYTES
from agent_run_ledger.rules.names import check_name
from agent_run_ledger.words import LIBRARY_VERSION

BEGINS = b'{"bundle":"agent-run-ledger"'
"""The first bytes of every bundle, of whatever format."""
FORMAT = 1
LONGEST = 256 * 1024 * 1024
"""Bytes of one line, its line break among them: a payload of 190 MB fits, and no file makes a reader hold more."""

_OPENING = ("bundle", "format", "written_by", "run", "listing", "secret", "payloads")
_LISTING = ("created_at", "agent", "queue", "priority", "key")
_MOST = 2**53
"""Every number in a bundle is smaller: what reads JSON reads it exactly, and fencing tokens of all epochs to come have room."""
_ENTRY = ("seq", "kind", "position", "attempt", "body", "roots", "payload", "digest", "fingerprint", "encoding")
_REQUEST = ("request", "kind", "payload", "who", "at")
_HEAD = ("head", "proof")
_END = ("size", "root", "token", "inbox")
_DIGEST = ("sha256",)
_ORDER = (_OPENING, _HEAD, _ENTRY, _REQUEST, _END, _DIGEST)


class Opening(NamedTuple):
    """What stands first."""

    run_id: str
    listing: Listing
    secret: bytes | None
    """The run's secret, empty where it was erased; None where it is withheld."""
    has_payloads: bool
    """Whether payloads are in it, with what was asked of the run; else they are withheld, and nobody knows which were erased."""


class KeptHead(NamedTuple):
    """A head of the run that was written down at some time, and the proof that the tree of the bundle only adds to it."""

    note: Note
    head: TreeHead
    proof: list[bytes]


class End(NamedTuple):
    """How the run stood behind its last entry."""

    size: int
    root: bytes
    token: int
    inbox: int


class Digest(NamedTuple):
    """SHA-256 of all lines before: as the file says, and as it is."""

    said: bytes
    found: bytes


Part = Opening | Row | Request | KeptHead | End | Digest


# --- writing ----------------------------------------------------------------------------------------------------------


def opening_line(opening: Opening) -> bytes:
    """The first line."""
    run_id, listing, secret, has_payloads = opening
    listed = dict(zip(_LISTING, listing, strict=True))
    said = ("agent-run-ledger", FORMAT, LIBRARY_VERSION, run_id, listed, _text(secret), has_payloads)
    return _line(_OPENING, said)


def entry_line(row: Row, *, has_payloads: bool) -> bytes:
    """One entry; without payloads also without what gives small ones away."""
    seq, kind, position, attempt, body, roots, payload, digest, fingerprint, encoding = row
    if not has_payloads:
        payload = digest = fingerprint = encoding = None
    kept = (_text(payload), _text(digest), _text(fingerprint), encoding)
    return _line(_ENTRY, (seq, kind, position, attempt, _text(body), _text(roots), *kept))


def request_line(request: Request, *, has_payloads: bool) -> bytes:
    """One request; without payloads only that there was one."""
    payload, who = (_text(request.payload), request.who) if has_payloads else (None, None)
    return _line(_REQUEST, (request.id, request.kind, payload, who, request.at))


def head_line(note: str, proof: Sequence[bytes]) -> bytes:
    """One head, as a signed note or as a checkpoint that nobody has signed."""
    return _line(_HEAD, (note, [_text(each) for each in proof]))


def end_line(end: End) -> bytes:
    """How the run stood."""
    return _line(_END, (end.size, _text(end.root), end.token, end.inbox))


def digest_line(digest: bytes) -> bytes:
    """The last line."""
    return _line(_DIGEST, (digest.hex(),))


def _line(names: tuple[str, ...], values: Sequence[Any]) -> bytes:
    fields = dict(zip(names, values, strict=True))
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


# --- reading ----------------------------------------------------------------------------------------------------------


def parts(lines: Iterable[bytes], place: str) -> Iterator[Part]:
    """What the lines of a bundle say, one after the other. Raises `BadBundle` where they are none, or not all of them.

    Every value has its type, every number fits into 64 bits; whether they agree with each other is left to who reads them. `place` is
    the file's name, for the error.
    """
    digest = sha256()
    number, at, has_payloads = 0, 0, True
    lines = iter(lines)
    for number, line in enumerate(lines, 1):
        read = _Line(line, number, place)
        shape = _ORDER[at]
        # Lines of heads, entries and requests may be none or many; all others are one.
        while not read.is_(shape) and shape in (_HEAD, _ENTRY, _REQUEST):
            at += 1
            shape = _ORDER[at]
        if not read.is_(shape):
            read.refuse(_misplaced(read, at))
        if shape is _OPENING:
            opening = read.opening()
            has_payloads = opening.has_payloads
            yield opening
        elif shape is _ENTRY:
            yield read.entry(has_payloads=has_payloads)
        elif shape is _REQUEST:
            yield read.request(has_payloads=has_payloads)
        elif shape is _HEAD:
            yield read.head()
        elif shape is _END:
            yield read.end()
        else:
            yield Digest(read.hex("sha256"), digest.digest())
        if shape in (_OPENING, _END, _DIGEST):
            at += 1
        digest.update(line)
        if at == len(_ORDER):
            break
    if at < len(_ORDER):
        raise BadBundle(place, number or 1, "it was cut off behind this line" if number else "it is empty")
    for _ in lines:
        raise BadBundle(place, number + 1, "something stands behind its end")


def _misplaced(read: _Line, at: int) -> str:
    if at == 0:
        return 'it is no bundle: the first line of one begins with {"bundle":"agent-run-ledger"'
    return f"a line with the fields {', '.join(read.names)[:200]} is not expected here"


class _Line:
    """One line of a bundle, and what its fields should be."""

    def __init__(self, line: bytes, number: int, place: str) -> None:
        self._number, self._place = number, place
        if not line.endswith(b"\n"):
            self.refuse(f"it is longer than {LONGEST} bytes" if len(line) >= LONGEST else "it was cut off in this line")
        try:
            # A field that stands twice is in the names twice, and they are not those of any line then.
            pairs = json.loads(line.decode("ascii"), object_pairs_hook=_Pairs, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            self.refuse(f"it is no JSON in ASCII: {str(error)[:200]}")
        if not isinstance(pairs, _Pairs):
            self.refuse("it is no JSON object")
        self.names = tuple(name for name, _ in pairs)
        self._fields = dict(pairs)

    def refuse(self, why: str) -> NoReturn:
        raise BadBundle(self._place, self._number, why)

    def is_(self, shape: tuple[str, ...]) -> bool:
        """Whether it is such a line; of an opening the first two fields say so, for it may be of another format."""
        if shape is _OPENING:
            return self.names[:2] == _OPENING[:2] and self._fields["bundle"] == "agent-run-ledger"
        return self.names == shape

    def opening(self) -> Opening:
        version = self._whole("format")
        if version != FORMAT:
            self.refuse(
                f"its format is {version}, and this version reads format {FORMAT}. A newer version of the library may read it"
            )
        if self.names != _OPENING:
            self.refuse(f"its fields are {', '.join(self.names)[:200]}, and should be {', '.join(_OPENING)}")
        self._str("written_by")
        run_id = self._str("run")
        try:
            check_name("run", run_id)
        except InvalidName as error:
            self.refuse(str(error))
        listed = self._fields["listing"]
        if not isinstance(listed, _Pairs) or tuple(name for name, _ in listed) != _LISTING:
            self.refuse(f"listing should be an object of {', '.join(_LISTING)}")
        self._fields |= dict(listed)
        listing = Listing(
            self._number_of("created_at"),
            self._maybe(self._str, "agent"),
            self._maybe(self._str, "queue"),
            self._whole("priority"),
            self._maybe(self._str, "key"),
        )
        has_payloads = self._fields["payloads"]
        if type(has_payloads) is not bool:
            self.refuse("payloads should be true or false")
        return Opening(run_id, listing, self._maybe(self._bytes, "secret"), has_payloads)

    def entry(self, *, has_payloads: bool) -> Row:
        """An entry; where payloads are withheld, so is what goes with them."""
        if not has_payloads:
            self._refuse_unless_null("payload", "digest", "fingerprint", "encoding")
        return Row(
            self._whole("seq"),
            self._str("kind"),
            self._maybe(self._str, "position"),
            self._maybe(self._whole, "attempt"),
            self._bytes("body"),
            self._bytes("roots"),
            self._maybe(self._bytes, "payload"),
            self._maybe(self._bytes, "digest"),
            self._maybe(self._bytes, "fingerprint"),
            self._maybe(self._str, "encoding"),
        )

    def request(self, *, has_payloads: bool) -> Request:
        """A request; where payloads are withheld, so is what was asked and by whom."""
        if not has_payloads:
            self._refuse_unless_null("payload", "who")
        payload, who = (self._bytes("payload"), self._str("who")) if has_payloads else (b"", "")
        return Request(self._whole("request"), self._str("kind"), payload, who, self._number_of("at"))

    def head(self) -> KeptHead:
        text, proof = self._str("head"), self._fields["proof"]
        if type(proof) is not list:
            self.refuse("proof should be a list")
        try:
            found = list(notes(text))
            if len(found) != 1:
                self.refuse(f"head should be one note, and there are {len(found)}")
            head = TreeHead.read(found[0].text)
            if signed(found[0].text, *found[0].signatures) != text:
                self.refuse("head is not written as a note is")
        except BadNote as error:
            self.refuse(error.why)
        return KeptHead(found[0], head, [self._hash("proof", each) for each in proof])

    def end(self) -> End:
        return End(
            self._whole("size"), self._hash("root", self._fields["root"]), self._whole("token"), self._whole("inbox")
        )

    def hex(self, name: str) -> bytes:
        """A hash in hex."""
        try:
            found = bytes.fromhex(self._str(name))
        except ValueError:
            found = b""
        if len(found) != HASH_BYTES or found.hex() != self._fields[name]:
            self.refuse(f"{name} should be {HASH_BYTES} bytes in hex")
        return found

    def _refuse_unless_null(self, *names: str) -> None:
        if there := [name for name in names if self._fields[name] is not None]:
            self.refuse(f"{there[0]} should be null, since payloads are withheld")

    def _maybe(self, kind: Callable[[str], Any], name: str) -> Any:
        return None if self._fields[name] is None else kind(name)

    def _str(self, name: str) -> str:
        value = self._fields[name]
        if type(value) is not str or not _is_text(value):
            self.refuse(f"{name} should be a text")
        return value

    def _whole(self, name: str) -> int:
        value = self._fields[name]
        if type(value) is not int or not -_MOST < value < _MOST:
            self.refuse(f"{name} should be a whole number of at most 64 bits")
        return value

    def _number_of(self, name: str) -> float:
        value = self._fields[name]
        if type(value) not in (int, float) or not -_MOST < value < _MOST or not isfinite(value):
            self.refuse(f"{name} should be a number of seconds")
        return value  # type: ignore[no-any-return]

    def _bytes(self, name: str) -> bytes:
        return self._decoded(name, self._fields[name])

    def _hash(self, name: str, value: object) -> bytes:
        found = self._decoded(name, value)
        if len(found) != HASH_BYTES:
            self.refuse(f"{name} should be {HASH_BYTES} bytes in base64")
        return found

    def _decoded(self, name: str, value: object) -> bytes:
        try:
            found = b64decode(value, validate=True) if type(value) is str else None
        except ValueError:
            found = None
        if found is None or b64encode(found).decode() != value:  # bits that stand for nothing are none of ours
            self.refuse(f"{name} should be bytes in base64")
        return found


class _Pairs(list[tuple[str, Any]]):
    """The fields of an object in their order, those that stand twice, too."""


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can spell half of a character."""
    return not any("\ud800" <= each <= "\udfff" for each in value) if not value.isascii() else True
