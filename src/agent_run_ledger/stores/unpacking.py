"""Packed payloads are put together again: from their own bytes, and from what earlier entries of their run hold."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from agent_run_ledger.contract import PACKED, Row
from agent_run_ledger.errors import StoreCorrupt
from agent_run_ledger.stores.packing import OWN, Packed, Piece, decode

if TYPE_CHECKING:
    from agent_run_ledger.contract import Store

_KEPT_BYTES = 1024 * 1024
"""Of what was read last so much is kept in memory, and twice the length of the longest payload among the last: the next one copies from it."""
_ROWS_AT_ONCE = 32
_ROW_BYTES = 256 * 1024
"""Beside an entry that is needed its neighbours are read, unless they are longer."""


class _Source:
    """The payload of one entry, as others copy from it."""

    __slots__ = ("begins", "bytes_kept", "packed", "plain")

    def __init__(self, plain: bytes | None, packed: Packed | None) -> None:
        self.plain, self.packed = plain, packed
        self.begins = [] if packed is None else [0, *accumulate(piece.size for piece in packed.pieces)]
        self.bytes_kept = 200 + len(plain or b"") + (len(packed.own) + 150 * len(packed.pieces) if packed else 0)


class _Unseen(NamedTuple):
    """An entry that was read beside another one: nobody has looked into it."""

    row: Row
    bytes_kept: int


class Unpacking:
    """Puts the payloads of one store together. What it keeps of them is bounded, and only ever saves reading."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[str, int], _Source | _Unseen] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = _KEPT_BYTES
        self._lock = threading.Lock()

    def row(self, run_id: str, row: Row) -> Row:
        """The row as it was given. Raises `StoreCorrupt` where its payload cannot be put together."""
        if row.encoding != PACKED:
            return row
        if row.payload is None:
            return row._replace(encoding=None)
        try:
            payload = self._put_together(run_id, row.seq, row.payload)
            is_right = sha256(payload).digest() == row.digest
        except ValueError:
            is_right = False
        if not is_right:
            # What it copies from may have been erased since that was read, or lost with a server, and others stand there now.
            self.forget(run_id)
            found = self._store.read(run_id, row.seq - 1, limit=1)
            row = found[0] if found and found[0].seq == row.seq else row
            if row.encoding != PACKED or row.payload is None:
                return row._replace(encoding=None)
            try:
                payload = self._put_together(run_id, row.seq, row.payload)
            except ValueError as error:
                raise StoreCorrupt(
                    f"run {run_id!r}, entry {row.seq}: its payload is packed and cannot be put together: {error}. Nothing was changed now; "
                    "run `agent-run-ledger verify` and restore from a backup."
                ) from error
        return row._replace(payload=payload, encoding=None)

    def kept_in(self, run_id: str, seq: int, size: int) -> list[Piece]:
        """Of a payload of this size, in order, in whose own bytes its bytes are. Raises `ValueError`."""
        found: list[Piece] = []
        self._trace(found, run_id, Piece(size, seq, 0), self.depth_of(run_id, seq))
        return found

    def parts_of(self, run_id: str, seq: int, offset: int, size: int) -> Iterator[Piece]:
        """These bytes of one entry's payload, as it says itself that they come about; `OWN` are its own. Raises `ValueError`."""
        source = self._source(run_id, seq)
        if source.packed is None:
            yield Piece(size, OWN, offset)
            return
        yield from _within(source, offset, size)

    def bytes_of(self, run_id: str, seq: int, offset: int, size: int) -> bytes:
        """These bytes of a payload. Raises `ValueError`."""
        found: list[bytes] = []
        self._take(found, run_id, Piece(size, seq, offset), self.depth_of(run_id, seq))
        return b"".join(found)

    def depth_of(self, run_id: str, seq: int) -> int:
        """Through how many entries at most a byte of this payload is traced. Raises `ValueError`."""
        packed = self._source(run_id, seq).packed
        return 0 if packed is None else packed.depth

    def forget(self, run_id: str) -> None:
        """Keep nothing of this run in memory."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == run_id]:
                self._kept_bytes -= self._kept.pop(key).bytes_kept

    def _put_together(self, run_id: str, seq: int, kept: bytes) -> bytes:
        packed = decode(seq, kept)
        self._most_bytes = max(_KEPT_BYTES + 2 * packed.size, self._most_bytes - self._most_bytes // 64)
        found: list[bytes] = []
        for piece in packed.pieces:
            if piece.seq == OWN:
                found.append(packed.own[piece.offset : piece.offset + piece.size])
            else:
                self._take(found, run_id, piece, packed.depth - 1)
        payload = b"".join(found)
        self._keep(run_id, seq, _Source(payload, packed))
        return payload

    def _take(self, found: list[bytes], run_id: str, piece: Piece, depth: int) -> None:
        """Add the bytes of a piece that stands in an earlier entry, and is `depth` deep there at most."""
        source = self._source(run_id, piece.seq)
        size, _, offset = piece
        if source.plain is not None:
            if offset + size > len(source.plain):
                raise ValueError(f"entry {piece.seq}, from which it copies, is too short")
            found.append(source.plain[offset : offset + size])
            return
        packed = source.packed
        assert packed is not None
        for each in _within(source, offset, size):
            if each.seq == OWN:
                found.append(packed.own[each.offset : each.offset + each.size])
            elif not depth:
                raise ValueError(f"entry {piece.seq}, from which it copies, is deeper than it says")
            else:
                self._take(found, run_id, each, depth - 1)

    def _trace(self, found: list[Piece], run_id: str, piece: Piece, depth: int) -> None:
        size, seq, offset = piece
        source = self._source(run_id, seq)
        if source.packed is None:
            found.append(piece)
            return
        for each in _within(source, offset, size):
            if each.seq == OWN:
                found.append(Piece(each.size, seq, offset))
            elif not depth:
                raise ValueError(f"entry {seq} is deeper than it says")
            else:
                self._trace(found, run_id, each, depth - 1)
            offset += each.size

    # --- what is kept in memory ---------------------------------------------------------------------------------------

    def _source(self, run_id: str, seq: int) -> _Source:
        with self._lock:
            source = self._kept.get((run_id, seq))
            if isinstance(source, _Source):
                self._kept.move_to_end((run_id, seq))
                return source
        source = _as_source(source.row) if source is not None else self._fetched(run_id, seq)
        self._keep(run_id, seq, source)
        return source

    def _fetched(self, run_id: str, seq: int) -> _Source:
        try:
            rows = self._store.read(run_id, seq - 1, limit=_ROWS_AT_ONCE, payloads_up_to=_ROW_BYTES)
        except StoreCorrupt:  # it need not be this one
            rows = []
        row = rows[0] if rows and rows[0].seq == seq else None
        if row is None or (row.payload is None and row.digest is not None):
            rows = self._store.read(run_id, seq - 1, limit=1)
        source = None
        for row in rows:
            if row.payload is None:
                continue
            if row.seq == seq:
                source = _as_source(row)
            else:
                self._keep(run_id, row.seq, _Unseen(row, 200 + len(row.payload)))
        if source is None:
            raise ValueError(f"entry {seq}, from which it copies, has no payload")
        return source

    def _keep(self, run_id: str, seq: int, source: _Source | _Unseen) -> None:
        key = (run_id, seq)
        with self._lock:
            if key in self._kept and isinstance(source, _Unseen):
                return
            if (before := self._kept.pop(key, None)) is not None:
                self._kept_bytes -= before.bytes_kept
            self._kept[key] = source
            self._kept_bytes += source.bytes_kept
            while self._kept_bytes > self._most_bytes and self._kept:
                self._kept_bytes -= self._kept.popitem(last=False)[1].bytes_kept


def _as_source(row: Row) -> _Source:
    assert row.payload is not None
    if row.encoding == PACKED:
        return _Source(None, decode(row.seq, row.payload))
    if row.encoding is not None:
        raise ValueError(f"entry {row.seq}, from which it copies, cannot be read")
    return _Source(row.payload, None)


def _within(source: _Source, offset: int, size: int) -> Iterator[Piece]:
    """The pieces of these bytes of a packed payload. Raises `ValueError`."""
    packed, begins = source.packed, source.begins
    assert packed is not None
    if offset + size > packed.size:
        raise ValueError("an entry from which it copies is too short")
    number = bisect_right(begins, offset) - 1
    while size:
        piece = packed.pieces[number]
        inside = offset - begins[number]
        taken = min(piece.size - inside, size)
        yield Piece(taken, piece.seq, piece.offset + inside)
        offset, size, number = offset + taken, size - taken, number + 1
