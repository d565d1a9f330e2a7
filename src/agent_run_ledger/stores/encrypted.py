"""A store in front of another one, in which new runs are encrypted: what it is given and gives is plain, what it keeps is not."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from agent_run_ledger.contract import (
    Append,
    Erasure,
    Head,
    Lease,
    Listing,
    QueueTerms,
    Request,
    Row,
    Store,
    Summary,
    Tombstone,
    sealed_under,
)
from agent_run_ledger.errors import KeyUnavailable, LedgerError, StoreCorrupt
from agent_run_ledger.stores.encryption import OVERHEAD_BYTES, Encryption, RunCipher, new_data_key

_SEALED = b"\x00sealed"
"""Before what is encrypted and stands where JSON would: no JSON begins so."""
_NOTED = "sealed:"
_HIDDEN_NOTE = "(encrypted)"
_NO_KEY_SECONDS = 60.0
"""A worker that has no key for a run leaves it alone for so long: another one may have it."""
_KEPT = 10_000
"""The keys of so many runs are kept in memory."""


def encrypted(store: Store, encryption: Encryption) -> Store:
    """The store, with all new runs encrypted. Runs that are there plainly stay plain."""
    return cast(Store, EncryptedStore(store, encryption))


class EncryptedStore:
    """What holds text of users is encrypted on its way in and decrypted on its way out; all else goes to the store behind, as it is."""

    def __init__(self, inner: Store, encryption: Encryption) -> None:
        self.inner = inner
        self._encryption = encryption
        self._ciphers: dict[str, RunCipher | None] = {}
        """Of the runs that were seen; None: it is a plain one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # --- making and claiming ------------------------------------------------------------------------------------------

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        sealed, cipher = self._new(run_id, secret)
        rows = list(map(cipher.seal_row, rows))
        lease = self.inner.create(run_id, owner, lease_seconds, sealed, rows, listing)
        if lease is None:
            return None
        self._keep(run_id, cipher)
        return self._plain_lease(lease)

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        sealed, cipher = self._new(run_id, secret)
        return self.inner.enqueue(run_id, sealed, list(map(cipher.seal_row, rows)), listing, due_in)

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
        cipher: RunCipher | None
        if (standing := self.inner.secret(run_id)) or not secret:  # it comes back, or what it has kept was erased
            sealed, cipher = standing or secret, self._cipher(run_id)
        else:
            sealed, cipher = self._new(run_id, secret)
        if cipher is not None:
            pages = ([cipher.seal_row(row) for row in page] for page in pages)
            requests = [_sealed_request(cipher, each) for each in requests]
        return self.inner.adopt(run_id, token, sealed, listing, pages, requests, due_in)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        self._cipher(run_id)  # who has no key leaves the run to others
        return self._plain_lease(self.inner.claim(run_id, owner, lease_seconds))

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        leases = []
        for lease in self.inner.claim_due(owner, lease_seconds, queues, agents, at_most):
            try:
                leases.append(self._plain_lease(lease))
            except KeyUnavailable:
                self.inner.release(lease.run_id, lease.token, due_in=_NO_KEY_SECONDS)
        return leases

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        return self.inner.append(run_id, token, inbox, self._sealed(run_id, rows), synced=synced)

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        sealed = [each._replace(rows=self._sealed(each.run_id, each.rows)) for each in appends]
        return self.inner.append_all(sealed, synced=synced)

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        cipher = self._cipher(run_id)
        if cipher is not None:
            payload = _SEALED + cipher.seal(payload, b"inbox", kind.encode())
        return self.inner.post(run_id, kind, payload, who, at, due_in=due_in)

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        cipher = self._cipher(run_id) if note is not None else None
        if cipher is not None and note is not None:
            piece = cipher.seal(note.encode(errors="replace"), b"note")
            note = _NOTED + base64.b64encode(piece).decode()
        self.inner.annotate(run_id, token, note)

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        erasure = erasure._replace(packed=self._sealed(run_id, erasure.packed))
        self.inner.erase(run_id, token, self._sealed(run_id, rows), erasure)
        if erasure.secret:
            self._ciphers.pop(run_id, None)

    def delete(self, tombstone: Tombstone, token: int) -> None:
        self.inner.delete(tombstone, token)
        self._ciphers.pop(tombstone.run_id, None)

    def rewrap(self, run_id: str) -> bool:
        """Seal the key of a run under the key that new runs get; False where it is, or where the run is a plain one."""
        sealed = self.inner.secret(run_id)
        key_id = sealed_under(sealed)
        if key_id is None or key_id == self._encryption.key_id:
            return False
        anew = self._encryption.wrap(run_id, *self._encryption.unwrap(run_id, sealed))
        return self.inner.reseal(run_id, sealed, anew)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        if payloads_up_to is not None and self._cipher(run_id) is not None:
            payloads_up_to += OVERHEAD_BYTES
        rows = self.inner.read(run_id, after, limit=limit, payloads_up_to=payloads_up_to)
        return [self.open_row(run_id, row) for row in rows]

    def payload(self, run_id: str, seq: int) -> bytes | None:
        rows = self.read(run_id, seq - 1, limit=1) if seq > 0 else []
        return rows[0].payload if rows else None

    def secret(self, run_id: str) -> bytes:
        return self._plain(run_id, self.inner.secret(run_id))

    def open_row(self, run_id: str, row: Row) -> Row:
        """A row of the store behind, as it was given. Raises `KeyUnavailable` and `StoreCorrupt`."""
        if row.encoding is None:
            return row
        cipher = self._cipher(run_id)
        return row if cipher is None else cipher.open_row(row)

    def head(self, run_id: str) -> Head | None:
        head = self.inner.head(run_id)
        return None if head is None else self._open_head(head)

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        """One that cannot be decrypted here is given as it is kept."""
        for summary in self.inner.summaries(run_id):
            head, first, last = summary
            with suppress(KeyUnavailable, StoreCorrupt):
                first, last = self.open_row(head.run_id, first), self.open_row(head.run_id, last)
            yield Summary(self._open_head(head), first, last)

    def inbox(self, run_id: str, after: int) -> list[Request]:
        return [self._open_request(run_id, each) for each in self.inner.inbox(run_id, after)]

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _new(self, run_id: str, secret: bytes) -> tuple[bytes, RunCipher]:
        data_key = new_data_key()
        return self._encryption.wrap(run_id, secret, data_key), RunCipher.of(run_id, data_key)

    def _cipher(self, run_id: str) -> RunCipher | None:
        """What encrypts for this run; None where it is a plain one, or there is none. Raises `KeyUnavailable`."""
        try:
            return self._ciphers[run_id]
        except KeyError:
            self._plain(run_id, self.inner.secret(run_id))
            return self._ciphers.get(run_id)

    def _plain(self, run_id: str, secret: bytes) -> bytes:
        """The secret itself; the run's key is known from now on."""
        if not secret:
            return secret
        if sealed_under(secret) is None:
            self._keep(run_id, None)
            return secret
        plain, data_key = self._encryption.unwrap(run_id, secret)
        if run_id not in self._ciphers:
            self._keep(run_id, RunCipher.of(run_id, data_key))
        return plain

    def _keep(self, run_id: str, cipher: RunCipher | None) -> None:
        if len(self._ciphers) >= _KEPT:
            self._ciphers = {}
        self._ciphers[run_id] = cipher

    def _plain_lease(self, lease: Lease) -> Lease:
        return lease._replace(secret=self._plain(lease.run_id, lease.secret))

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _sealed(self, run_id: str, rows: Sequence[Row]) -> Sequence[Row]:
        cipher = self._cipher(run_id)
        return rows if cipher is None else list(map(cipher.seal_row, rows))

    def _open_request(self, run_id: str, request: Request) -> Request:
        cipher = self._cipher(run_id) if request.payload.startswith(_SEALED) else None
        if cipher is None:
            return request
        try:
            payload = cipher.open(request.payload.removeprefix(_SEALED), b"inbox", request.kind.encode())
        except ValueError as error:
            raise StoreCorrupt(f"run {run_id!r}, request {request.id}: it was not encrypted for this place.") from error
        return Request(request.id, request.kind, payload, request.who, request.at)

    def _open_head(self, head: Head) -> Head:
        note = head.note
        if note is None or not note.startswith(_NOTED):
            return head
        try:
            cipher = self._cipher(head.run_id)
            opened = _HIDDEN_NOTE
            if cipher is not None:
                opened = cipher.open(base64.b64decode(note.removeprefix(_NOTED)), b"note").decode()
        except (KeyUnavailable, StoreCorrupt, ValueError):
            opened = _HIDDEN_NOTE
        return head._replace(note=opened)


def _sealed_request(cipher: RunCipher, request: Request) -> Request:
    payload = _SEALED + cipher.seal(request.payload, b"inbox", request.kind.encode())
    return Request(request.id, request.kind, payload, request.who, request.at)
