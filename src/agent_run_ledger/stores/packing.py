"""The form in which a payload is kept that repeats what earlier entries of its run hold: pieces that are copied, and bytes of its own.

A packed payload is, with numbers as varints of seven bits a byte, the lowest first:

- one byte: `1`, or `2` where the body is deflated;
- how long the payload is, and its depth; where the body is deflated, how long that is;
- the body: how many pieces there are; each piece, `2 * n` for the next n of its own bytes, or `2 * n + 1` for n bytes that are copied,
  followed by how many entries back they stand and at which byte of the payload there; then its own bytes;
- the CRC-32 of all that, in four bytes.

Pieces are addressed in the *plain* payload of an earlier entry, however that is kept. So nothing here depends on how it was decided what
to copy, and an entry that others copy from can be packed anew without a change to them.
"""

from __future__ import annotations

from binascii import crc32
from typing import NamedTuple

OWN = 0
"""In the place of the entry's number: the bytes are the payload's own."""
MOST_BYTES = 256 * 1024 * 1024
"""Longer payloads are not packed, and what says that it is longer is refused: nothing small may take all memory when it is read."""
MOST_DEPTH = 64
"""Through so many entries at most a byte is traced to where it is kept."""

_PLAIN, _DEFLATED = 1, 2
_LEVEL = 1  # an eighth longer than by the usual level, in half the time
_WORTH = 0.9
_CHECK_BYTES = 4
_LONGEST_VARINT = 9


class Piece(NamedTuple):
    """Some bytes of a payload that stand together elsewhere."""

    size: int
    seq: int
    """The earlier entry that holds them, or `OWN`."""
    offset: int
    """Where: in the plain payload of that entry, or in the own bytes of this one."""


class Packed(NamedTuple):
    """What stands in a packed payload. The pieces give it, one after the other."""

    size: int
    """Of the payload, once it is put together."""
    depth: int
    """Through how many entries at most a byte of it is traced to where it is kept."""
    pieces: list[Piece]
    own: bytes


def encode(seq: int, packed: Packed) -> bytes:
    """What is kept in the entry `seq`. Own pieces take their bytes in order, and leave none."""
    body = bytearray(_varint(len(packed.pieces)))
    for size, source, offset in packed.pieces:
        if source == OWN:
            body += _varint(size << 1)
        else:
            body += _varint(size << 1 | 1) + _varint(seq - source) + _varint(offset)
    body += packed.own
    head = _varint(packed.size) + _varint(packed.depth)
    deflated = _deflated(body)
    if len(deflated) <= len(body) * _WORTH:
        kept = bytes([_DEFLATED]) + head + _varint(len(body)) + deflated
    else:
        kept = bytes([_PLAIN]) + head + bytes(body)
    return kept + crc32(kept).to_bytes(_CHECK_BYTES, "big")


def decode(seq: int, kept: bytes) -> Packed:
    """What stands in the entry `seq`. Raises `ValueError` where that is not exactly what `encode` makes."""
    if len(kept) <= _CHECK_BYTES or crc32(kept[:-_CHECK_BYTES]).to_bytes(_CHECK_BYTES, "big") != kept[-_CHECK_BYTES:]:
        raise ValueError("its check sum is not that of its bytes")
    size, at = _number(kept, 1)
    depth, at = _number(kept, at)
    if kept[0] not in (_PLAIN, _DEFLATED) or size > MOST_BYTES or depth > MOST_DEPTH:
        raise ValueError(f"it is of kind {kept[0]}, says that it has {size} bytes, and is {depth} deep")
    body = kept[at:-_CHECK_BYTES]
    if kept[0] == _DEFLATED:
        length, at = _number(kept, at)
        body = _inflated(kept[at:-_CHECK_BYTES], length, 2 * size + 64)
    count, at = _number(body, 0)
    if count > len(body):
        raise ValueError(f"it says that it has {count} pieces")
    pieces: list[Piece] = []
    given = owned = 0
    for _ in range(count):
        number, at = _number(body, at)
        length = number >> 1
        given += length
        if not number & 1:
            pieces.append(Piece(length, OWN, owned))
            owned += length
        else:
            back, at = _number(body, at)
            offset, at = _number(body, at)
            if not 0 < back < seq or not depth:
                raise ValueError(f"it copies from {back} entries before")
            pieces.append(Piece(length, seq - back, offset))
        if not length:
            raise ValueError("it has an empty piece")
    if given != size or owned != len(body) - at:
        raise ValueError(f"its pieces have {given} bytes of {size}, and {owned} of its own {len(body) - at}")
    return Packed(size, depth, pieces, body[at:])


def plain_size(kept: bytes) -> int:
    """How long a packed payload is, once it is put together, as it says itself. Raises `ValueError`."""
    return _number(kept, 1)[0]


def _deflated(body: bytearray) -> bytes:
    try:
        import zlib
    except ImportError:  # a Python that was built without: then nothing is worth it
        return bytes(body)
    deflating = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflating.compress(body) + deflating.flush()


def _inflated(deflated: bytes, length: int, most: int) -> bytes:
    """Takes no more memory than it is long. Raises `ValueError`."""
    import zlib

    if length > most:
        raise ValueError(f"its body would have {length} bytes")
    inflating = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        body = inflating.decompress(deflated, length + 1)
    except zlib.error as error:
        raise ValueError(f"its body cannot be inflated: {error}") from error
    if len(body) != length or not inflating.eof or inflating.unused_data:
        raise ValueError("its body does not end where it says")
    return body


def _varint(number: int) -> bytes:
    said = bytearray()
    while number > 0x7F:
        said.append(number & 0x7F | 0x80)
        number >>= 7
    said.append(number)
    return bytes(said)


def _number(said: bytes, at: int) -> tuple[int, int]:
    """The varint at this place, and the place behind it. Raises `ValueError`."""
    number = 0
    for shift, byte in enumerate(said[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if shift and not byte:
                break
            return number, at + shift + 1
    raise ValueError("a number in it does not end, or is longer than it has to be")
