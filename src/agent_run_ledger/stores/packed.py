"""A store in front of another one, in which long payloads are packed: what the run holds already is not kept twice, and the rest is deflated."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from agent_run_ledger.contract import (
    PACKED,
    Append,
    Erasure,
    Lease,
    Listing,
    Request,
    Row,
    Store,
    Summary,
    Tombstone,
)
from agent_run_ledger.errors import LedgerError, StoreCorrupt
from agent_run_ledger.stores import lifetime

if TYPE_CHECKING:  # what only long payloads need is imported with the first of them
    from agent_run_ledger.stores.repeats import Repeats
    from agent_run_ledger.stores.unpacking import Unpacking

STRING_BYTES = 512
"""A string, or an array without one, of so many bytes is found again wherever it stands; a payload that is shorter holds nothing to copy."""
LONG_BYTES = 4096
"""Payloads from this on are packed."""
CONVERSATION_BYTES = 1024
"""In a run that has long ones, payloads from this on: its turns stand in the long ones, too."""
_MOST_DIGESTS = 131_072
"""Of all runs together; those that were written to last are kept."""

_ROWS_LOOKED_AT = 32
_PAGES_LOOKED_AT = 8
_LONG_LOOKED_AT = 4
_LOOKED_AT_BYTES = 1 << 20


def packed(store: Store) -> Store:
    """The store, with long payloads packed."""
    return store if isinstance(store, PackedStore) else cast(Store, PackedStore(store))


class PackedStore:
    """Long payloads are packed on their way in and put together on their way out; all else goes to the store behind, as it is."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.is_remote = inner.is_remote
        self._know_nothing()
        lifetime.watch(self)

    def _know_nothing(self) -> None:
        self._made_unpacking: Unpacking | None = None
        self._runs: dict[str, Repeats] = {}
        """What is known of the runs that were written to last. Who packs takes it out, and puts it back once that is written."""
        self._digests = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def _unpacking(self) -> Unpacking:
        if self._made_unpacking is None:
            from agent_run_ledger.stores.unpacking import Unpacking

            self._made_unpacking = Unpacking(self.inner)
        return self._made_unpacking

    # --- forks, and the end -------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Nothing is open here, and the store behind looks after itself."""

    def after_fork_in_parent(self) -> None:
        """What is known stays known."""

    def after_fork_in_child(self) -> None:
        """Whoever held the lock or was half done is not here."""
        self._know_nothing()

    def close(self) -> None:
        self.inner.close()
        lifetime.forget(self)

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        return self.inner.create(run_id, owner, lease_seconds, secret, self._first(rows), listing)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        lease = self.inner.claim(run_id, owner, lease_seconds)
        self._let_go(run_id)
        return lease

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        return self.inner.enqueue(run_id, secret, self._first(rows), listing, due_in)

    def adopt(
        self,
        run_id: str,
        token: int,
        secret: bytes,
        listing: Listing,
        pages: Iterable[Sequence[Row]],
        requests: Sequence[Request],
        due_in: float | None,
    ) -> bool:
        # What comes back goes on behind what stands here; anything else begins with its first entry.
        repeats = self._looked_at(run_id, None if self.inner.secret(run_id) else 1)

        def woven() -> Iterator[list[Row]]:
            for page in pages:
                yield [self._learnt(repeats, row) for row in page]

        return self.inner.adopt(run_id, token, secret, listing, woven(), requests, due_in)

    def _first(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The first rows of a run, as they are kept."""
        if all(len(row.payload or b"") < LONG_BYTES for row in rows):
            return rows
        from agent_run_ledger.stores.repeats import Repeats

        repeats = Repeats()
        return [self._learnt(repeats, row) for row in rows]

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        try:
            if self._is_to_be_seen(run_id, rows):
                return self._append_long(Append(run_id, token, inbox, rows), synced)
            return self.inner.append(run_id, token, inbox, rows, synced=synced)
        except BaseException:  # a server may have taken over that never had what was acknowledged before
            self._let_go(run_id)
            raise

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        given: list[tuple[Append, Repeats | None]] = [
            self._pack(each) if self._is_to_be_seen(each.run_id, each.rows) else (each, None) for each in appends
        ]
        answers = self.inner.append_all([append for append, _ in given], synced=synced)
        for (append, repeats), answer in zip(given, answers, strict=True):
            if isinstance(answer, LedgerError):
                self._let_go(append.run_id)
            elif repeats is not None and answer:
                self._put_back(append.run_id, repeats)
        return answers

    def _is_to_be_seen(self, run_id: str, rows: Sequence[Row]) -> bool:
        """Whether there is anything to pack, or to find again later: what is asked of every append."""
        for row in rows:
            payload = row.payload
            if (
                payload is not None
                and len(payload) >= STRING_BYTES
                and (len(payload) >= LONG_BYTES or run_id in self._runs)
            ):
                return True
        return False

    def _append_long(self, append: Append, synced: bool) -> bool:
        (run_id, token, inbox, rows), repeats = self._pack(append)
        is_written = self.inner.append(run_id, token, inbox, rows, synced=synced)
        if is_written and repeats is not None:
            self._put_back(run_id, repeats)
        return is_written

    def _pack(self, append: Append) -> tuple[Append, Repeats | None]:
        """The rows as they are kept, and what is known of the run once they stand there."""
        run_id, token, _, rows = append
        with self._lock:
            repeats = self._runs.pop(run_id, None)
            if repeats is not None:
                self._digests -= repeats.size
        if repeats is None or repeats.token != token:  # somebody else may have written meanwhile
            if all(row.payload is None or len(row.payload) < LONG_BYTES for row in rows):
                return append, None  # it is looked at when a long one comes
            repeats = self._looked_at(run_id, rows[0].seq)
            repeats.token = token
        return append._replace(rows=[self._learnt(repeats, row) for row in rows]), repeats

    @staticmethod
    def _learnt(repeats: Repeats, row: Row) -> Row:
        return _woven(repeats, row, CONVERSATION_BYTES if repeats.size else LONG_BYTES)

    def _put_back(self, run_id: str, repeats: Repeats) -> None:
        with self._lock:
            if (before := self._runs.pop(run_id, None)) is not None:
                self._digests -= before.size
            self._runs[run_id] = repeats
            self._digests += repeats.size
            while self._digests > _MOST_DIGESTS and len(self._runs) > 1:
                self._digests -= self._runs.pop(next(iter(self._runs))).size

    def _looked_at(self, run_id: str, seq: int | None) -> Repeats:
        """What the last entries before this one hold, or the last there are: the long ones, and what stands between them."""
        from agent_run_ledger.stores.repeats import Repeats

        repeats = Repeats()
        found: list[Row] = []
        long = 0
        try:
            if seq is None:
                summary = next(iter(self.inner.summaries(run_id)), None)
                seq = 1 if summary is None else summary.last.seq + 1
            for _ in range(_PAGES_LOOKED_AT):
                if seq == 1 or long >= _LONG_LOOKED_AT:
                    break
                after = max(0, seq - 1 - _ROWS_LOOKED_AT)
                page = self.inner.read(run_id, after, limit=seq - 1 - after, payloads_up_to=_LOOKED_AT_BYTES)
                page = [row for row in page if row.encoding == PACKED or len(row.payload or b"") >= STRING_BYTES]
                long += sum(row.encoding == PACKED or len(row.payload or b"") >= LONG_BYTES for row in page)
                found[:0] = page
                seq = after + 1
            skipped = long - _LONG_LOOKED_AT  # a list that was longer later holds what they hold
            for row in found:
                is_long = row.encoding == PACKED or len(row.payload or b"") >= LONG_BYTES
                skipped -= is_long
                if not is_long or skipped < 0:
                    self._remember(repeats, run_id, row)
        except (LedgerError, ValueError):
            return Repeats()  # whoever reads it is told; what is appended can do without
        return repeats

    def _remember(self, repeats: Repeats, run_id: str, row: Row) -> None:
        plain = self._unpacking.row(run_id, row).payload
        if plain is None:
            return
        kept = self._unpacking.kept_in(run_id, row.seq, len(plain))
        repeats.remember(row.seq, plain, self._unpacking.depth_of(run_id, row.seq), kept)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        rows = self.inner.read(run_id, after, limit=limit, payloads_up_to=payloads_up_to)
        for number, row in enumerate(rows):
            if row.encoding == PACKED:
                rows[number] = self._opened(run_id, row, payloads_up_to)
        return rows

    def payload(self, run_id: str, seq: int) -> bytes | None:
        rows = self.read(run_id, seq - 1, limit=1) if seq > 0 else []
        return rows[0].payload if rows and rows[0].seq == seq else None

    def open_row(self, run_id: str, row: Row) -> Row:
        """A row of the store that keeps the bytes, as it was given. Raises `KeyUnavailable` and `StoreCorrupt`."""
        if (open_row := getattr(self.inner, "open_row", None)) is not None:
            row = open_row(run_id, row)
        return self._unpacking.row(run_id, row)

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        """One that cannot be put together is given as it is kept."""
        for summary in self.inner.summaries(run_id):
            head, first, last = summary
            if first.encoding == PACKED or last.encoding == PACKED:
                first, last = self._as_far_as_it_opens(head.run_id, first), self._as_far_as_it_opens(head.run_id, last)
                summary = Summary(head, first, last)
            yield summary

    def _as_far_as_it_opens(self, run_id: str, row: Row) -> Row:
        try:
            return self._unpacking.row(run_id, row)
        except StoreCorrupt:
            return row

    def _opened(self, run_id: str, row: Row, payloads_up_to: int | None) -> Row:
        if payloads_up_to is not None and row.payload is not None:
            from agent_run_ledger.stores.packing import plain_size

            try:
                if plain_size(row.payload) > payloads_up_to:
                    return row._replace(payload=None, encoding=None)
            except ValueError:
                pass  # it is damaged, and said to be below
        return self._unpacking.row(run_id, row)

    # --- erasing ------------------------------------------------------------------------------------------------------

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        from agent_run_ledger.stores.repacking import without

        erasure = erasure._replace(packed=without(self.inner, self._unpacking, run_id, erasure.entries))
        self._let_go(run_id)
        self.inner.erase(run_id, token, rows, erasure)
        self._let_go(run_id)

    def delete(self, tombstone: Tombstone, token: int) -> None:
        self.inner.delete(tombstone, token)
        self._let_go(tombstone.run_id)

    def _let_go(self, run_id: str) -> None:
        if self._made_unpacking is not None:
            self._made_unpacking.forget(run_id)
        with self._lock:
            if (repeats := self._runs.pop(run_id, None)) is not None:
                self._digests -= repeats.size


def _woven(repeats: Repeats, row: Row, least: int) -> Row:
    """The row as it is kept; from now on what it holds is known."""
    payload = row.payload
    if payload is None or len(payload) < STRING_BYTES or row.digest is None or row.encoding is not None:
        return row
    if len(payload) < least:
        if repeats.size:
            repeats.note(row.seq, payload)
        return row
    woven = repeats.weave(row.seq, payload)
    repeats.learn(woven)
    return row if woven.kept is None else row._replace(payload=woven.kept, encoding=PACKED)
