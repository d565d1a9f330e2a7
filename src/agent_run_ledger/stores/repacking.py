"""What is left of a run's payloads when some of them are erased: those that copied from them get what they need into their own bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent_run_ledger.contract import PACKED, Row, Store
from agent_run_ledger.errors import StoreCorrupt
from agent_run_ledger.stores.packing import OWN, Packed, Piece, decode, encode
from agent_run_ledger.stores.unpacking import Unpacking

_ROWS_PER_PAGE = 100
_ROW_BYTES = 64 * 1024


def without(store: Store, unpacking: Unpacking, run_id: str, erased: Sequence[tuple[int, int]]) -> list[Row]:
    """The entries that stay and copy from one of these, each with a payload that does not, and is as deep as before.

    `erased` is from first to last, each. Raises `StoreCorrupt` where a payload that has to be packed anew cannot be put together.
    """
    rewriting = _Rewriting(unpacking, run_id, erased)
    return [anew for row in _packed(store, run_id) if (anew := rewriting.row(row)) is not None]


def _packed(store: Store, run_id: str) -> Iterator[Row]:
    seen = 0
    while page := store.read(run_id, seen, limit=_ROWS_PER_PAGE, payloads_up_to=_ROW_BYTES):
        for row in page:
            if row.encoding == PACKED:
                yield row if row.payload is not None else store.read(run_id, row.seq - 1, limit=1)[0]
        seen = page[-1].seq


class _Rewriting:
    def __init__(self, unpacking: Unpacking, run_id: str, erased: Sequence[tuple[int, int]]) -> None:
        self._unpacking = unpacking
        self._run_id = run_id
        self._erased = erased
        self._moved: dict[int, list[tuple[int, int, int, int]]] = {}
        """Where bytes of erased payloads stand by now, by the entry that had them: from, to, the entry that has them, and where."""

    def row(self, row: Row) -> Row | None:
        """The row with another payload; None where it stays as it is, or is erased itself."""
        if row.payload is None or self._is_erased(row.seq):
            return None
        try:
            before = decode(row.seq, row.payload)
            if not any(self._is_erased(piece.seq) for piece in before.pieces):
                return None
            return row._replace(payload=encode(row.seq, self._anew(row.seq, before)))
        except ValueError as error:
            raise StoreCorrupt(
                f"run {self._run_id!r}, entry {row.seq}: its payload copies from what is to be erased, and cannot be put together: {error}. "
                "Nothing was erased; run `agent-run-ledger verify` and restore from a backup."
            ) from error

    def _anew(self, seq: int, before: Packed) -> Packed:
        pieces: list[Piece] = []
        own = bytearray()
        at = 0
        for piece in before.pieces:
            for each in self._survivors(piece, seq):
                if each.seq == OWN:  # it was its own before
                    bytes_own = before.own[each.offset : each.offset + each.size]
                elif self._is_erased(each.seq):
                    bytes_own = self._unpacking.bytes_of(self._run_id, each.seq, each.offset, each.size)
                    moved = self._moved.setdefault(each.seq, [])
                    moved.append((each.offset, each.offset + each.size, seq, at))
                else:
                    pieces.append(each)
                    at += each.size
                    continue
                pieces.append(Piece(each.size, OWN, len(own)))
                own += bytes_own
                at += each.size
        return Packed(before.size, before.depth, pieces, bytes(own))

    def _survivors(self, piece: Piece, seq: int) -> Iterator[Piece]:
        """Where its bytes stand for the entry `seq` when all is done: in an entry that stays, or, at an erased entry, nowhere yet."""
        if piece.seq == OWN or not self._is_erased(piece.seq):
            yield piece
            return
        offset = piece.offset
        for each in self._unpacking.parts_of(self._run_id, piece.seq, piece.offset, piece.size):
            if each.seq == OWN:
                yield from self._since_moved(Piece(each.size, piece.seq, offset), seq)
            else:
                yield from self._survivors(each, seq)
            offset += each.size

    def _since_moved(self, piece: Piece, seq: int) -> Iterator[Piece]:
        size, erased, offset = piece
        while size:
            taken, place = size, Piece(size, erased, offset)
            for first, last, there, begin in self._moved.get(erased, ()):
                if there >= seq:
                    continue
                if first <= offset < last:
                    taken = min(size, last - offset)
                    place = Piece(taken, there, begin + offset - first)
                    break
                if offset < first < offset + taken:
                    taken = first - offset
                    place = Piece(taken, erased, offset)
            yield place
            offset, size = offset + taken, size - taken

    def _is_erased(self, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self._erased)
