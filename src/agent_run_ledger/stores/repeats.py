"""What of a payload was there before in its run: payloads cut at what repeats in JSON, and the digests of what was cut off earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from agent_run_ledger.stores.packed import STRING_BYTES
from agent_run_ledger.stores.packing import MOST_BYTES, MOST_DEPTH, OWN, Packed, Piece, encode

_ELEMENT_BYTES = 64
"""Lists are cut between their elements where what comes before has so many bytes."""
_COPIED_BYTES = 32
"""To copy less saves nothing."""
_WORTH = 0.9

_MOST_ROOTS = 16_384
_MOST_LISTS = 4
_MOST_PARTS = 65_536
"""A payload of more parts is one part."""


class Parts(NamedTuple):
    """A payload as it was cut: the digest of each part, and where it begins; behind the last one, where it ends."""

    digests: list[bytes]
    offsets: list[int]

    @classmethod
    def of(cls, payload: bytes) -> Parts:
        offsets = [0, *_cuts(payload)]
        if offsets[-1] != len(payload):
            offsets.append(len(payload))
        if len(offsets) > _MOST_PARTS:
            offsets = [0, len(payload)]
        ends = iter(offsets)
        next(ends)
        return cls(
            [sha256(payload[begin:end]).digest() for begin, end in zip(offsets, ends, strict=False)],
            offsets,
        )


def _cuts(payload: bytes) -> Iterator[int]:
    """Where a payload is cut, ascending; any bytes will do, and JSON is cut where it repeats itself.

    It is gone through from quote to quote: what is between two of them is a string, or what stands between strings.
    """
    begin = 0  # of the part
    at = 0  # of what stands between two quotes
    opened = -1  # where the string began that this is in
    for said in payload.split(b'"'):
        end = at + len(said)
        if opened >= 0 and end == len(payload):
            return  # the string does not end
        if opened >= 0:
            if said.endswith(b"\\") and (len(said) - len(said.rstrip(b"\\"))) % 2:
                at = end + 1
                continue  # an escaped quote
            if end + 1 - opened >= STRING_BYTES:
                if opened > begin:
                    yield opened
                yield end + 1
                begin = end + 1
            opened = -1
        else:
            if len(said) >= STRING_BYTES:  # numbers, for one
                first, last = said.find(b"["), said.rfind(b"]")
                for cut in (at + first, at + last + 1):
                    if first >= 0 and last - first >= STRING_BYTES and cut > begin:
                        yield cut
                        begin = cut
            elif said == b",":
                if at - begin >= STRING_BYTES:  # an array of short strings
                    yield at
                    yield end
                    begin = end
            elif said.endswith(b"},{"):
                if end - 2 - begin >= _ELEMENT_BYTES:
                    yield end - 2
                    yield end - 1
                    begin = end - 1
            else:
                if (closed := said.find(b"]")) >= 0 and at + closed - begin >= _ELEMENT_BYTES:
                    yield at + closed
                    begin = at + closed
                if said.endswith((b"[{", b"[")) and end - 1 > begin:
                    yield end - 1
                    begin = end - 1
            opened = end
        at = end + 1


class Woven(NamedTuple):
    """A payload on its way into the store, and what is known once it is there."""

    seq: int
    kept: bytes | None
    """As it is packed; None where that is not worth it."""
    parts: Parts
    depth: int
    own: list[tuple[bytes, int, int]]
    """Which of its parts are kept here: their digests, the entry and the place in its payload."""
    follows: int | None
    """The entry of whose parts it repeats most."""


class _Sequence(NamedTuple):
    """The parts of a payload in their order."""

    seq: int
    depth: int
    parts: Parts
    first: dict[bytes, int]


class Repeats:
    """What is known of one run's payloads, to find it again: no bytes of theirs, but digests and places. It is bounded, so it may have forgotten.

    It learns of entries that stand in the store, and of no others.
    """

    __slots__ = ("_roots", "_sequences", "_waiting", "_waiting_bytes", "token")

    def __init__(self, token: int | None = None) -> None:
        self.token = token
        """Under which everything was written since, so that nobody else has written."""
        self._roots: dict[bytes, tuple[int, int]] = {}
        """Where the bytes of a part are kept: in the own bytes of this entry, at this place of its payload."""
        self._sequences: list[_Sequence] = []
        """Of the last payloads of several parts, each of which began something new."""
        self._waiting: list[tuple[int, bytes]] = []
        self._waiting_bytes = 0

    @property
    def size(self) -> int:
        """How many digests are kept."""
        return len(self._roots) + sum(len(each.parts.digests) for each in self._sequences)

    def note(self, seq: int, payload: bytes) -> None:
        """A short plain payload stands there; it is looked at when the next long one comes."""
        if self._waiting_bytes + len(payload) > _MOST_WAITING_BYTES:
            self._hear()
        self._waiting.append((seq, payload))
        self._waiting_bytes += len(payload)

    def weave(self, seq: int, payload: bytes) -> Woven:
        """The payload of an entry to come, in as few bytes as they can be."""
        self._hear()
        parts = Parts.of(payload)
        digests, offsets = parts
        pieces: list[Piece] = []
        own: list[bytes] = []
        new: list[tuple[bytes, int, int]] = []
        used: dict[int, int] = {}
        owned = depth = at = 0
        count = len(digests)
        while at < count:
            begin = offsets[at]
            piece, taken, deep, source = self._found(digests, offsets, at)
            at += taken
            if piece is None:
                size = offsets[at] - begin
                piece = Piece(size, OWN, owned)
                own.append(payload[begin : begin + size])
                owned += size
                if size >= _ELEMENT_BYTES:
                    new.append((digests[at - 1], seq, begin))
            else:
                depth = max(depth, deep)
                if source is not None:
                    used[source] = used.get(source, 0) + piece.size
            if pieces and (last := pieces[-1]).seq == piece.seq and last.offset + last.size == piece.offset:
                pieces[-1] = last._replace(size=last.size + piece.size)
            else:
                pieces.append(piece)
        follows = max(used, key=used.__getitem__, default=None)
        if len(payload) <= MOST_BYTES:
            kept = encode(seq, Packed(len(payload), depth, pieces, b"".join(own)))
            if len(kept) <= len(payload) * _WORTH:
                return Woven(seq, kept, parts, depth, new, follows)
        return Woven(seq, None, parts, 0, self._all_own(seq, parts), follows)

    def learn(self, woven: Woven) -> None:
        """It stands in the store."""
        for digest, seq, offset in woven.own:
            self._roots[digest] = (seq, offset)
        if len(self._roots) > _MOST_ROOTS:
            for digest in list(islice(self._roots, len(self._roots) // 4)):
                del self._roots[digest]
        if len(woven.parts.digests) > 2:
            sequence = _Sequence(woven.seq, woven.depth, woven.parts, _first(woven.parts.digests))
            others = [each for each in self._sequences if each.seq != woven.follows]
            self._sequences = [*others, sequence][-_MOST_LISTS:]

    def remember(self, seq: int, payload: bytes, depth: int, kept: Sequence[Piece]) -> None:
        """An entry was found in the store, of this depth. `kept` says of all its bytes, in order, in whose own bytes they are."""
        parts = Parts.of(payload)
        own: list[tuple[bytes, int, int]] = []
        places = iter(kept)
        place, place_begin, place_end = None, 0, 0
        for digest, begin, end in zip(parts.digests, parts.offsets, parts.offsets[1:], strict=False):
            while place_end <= begin and (place := next(places, None)) is not None:
                place_begin, place_end = place_end, place_end + place.size
            if place is not None and end <= place_end and end - begin >= _ELEMENT_BYTES:
                own.append((digest, place.seq, place.offset + begin - place_begin))
        self.learn(Woven(seq, None, parts, depth, own, None))

    def _hear(self) -> None:
        for seq, payload in self._waiting:
            for digest, source, offset in self._all_own(seq, Parts.of(payload)):
                self._roots[digest] = (source, offset)
        self._waiting = []
        self._waiting_bytes = 0

    @staticmethod
    def _all_own(seq: int, parts: Parts) -> list[tuple[bytes, int, int]]:
        return [
            (digest, seq, begin)
            for digest, begin, end in zip(parts.digests, parts.offsets, parts.offsets[1:], strict=False)
            if end - begin >= _ELEMENT_BYTES
        ]

    def _found(self, digests: list[bytes], offsets: list[int], at: int) -> tuple[Piece | None, int, int, int | None]:
        """Where the parts from `at` on stand already: a piece, how many of them it is, its depth, and the entry if it is one of several parts."""
        digest, begin = digests[at], offsets[at]
        best: tuple[Piece | None, int, int, int | None] = (None, 1, 0, None)
        longest = _COPIED_BYTES - 1
        for each in self._sequences:
            if each.depth >= MOST_DEPTH or (there := each.first.get(digest)) is None:
                continue
            theirs = each.parts.digests
            taken, most = 1, min(len(digests) - at, len(theirs) - there)
            while taken < most and digests[at + taken] == theirs[there + taken]:
                taken += 1
            size = offsets[at + taken] - begin
            if size > longest:
                longest = size
                best = (Piece(size, each.seq, each.parts.offsets[there]), taken, each.depth + 1, each.seq)
        size = offsets[at + 1] - begin
        if best[1] <= 1 and size >= _COPIED_BYTES and (root := self._roots.get(digest)) is not None:
            return Piece(size, *root), 1, 1, None  # where it is kept is nearer than where it was repeated
        return best


_MOST_WAITING_BYTES = 128 * 1024


def _first(digests: list[bytes]) -> dict[bytes, int]:
    first: dict[bytes, int] = {}
    for number, digest in enumerate(digests):
        first.setdefault(digest, number)
    return first
