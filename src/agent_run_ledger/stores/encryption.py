"""How what a run keeps is encrypted: a key for each run, sealed under a key that somebody else keeps. The extra ``[crypto]`` installs it."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from agent_run_ledger.contract import AES_GCM, PACKED, PACKED_AES_GCM, SEALED, SECRET_BYTES, Row, sealed_under
from agent_run_ledger.errors import KeyUnavailable, StoreCorrupt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY_BYTES, _NONCE_BYTES = 32, 12
OVERHEAD_BYTES = _NONCE_BYTES + 16
"""By how much a piece is longer once it is encrypted: its nonce and its tag."""
_MOST_KEY_ID_BYTES = 255
_SEALED_AS = {None: AES_GCM, PACKED: PACKED_AES_GCM}
_OPENED_AS: dict[str | None, str | None] = {AES_GCM: None, PACKED_AES_GCM: PACKED}
"""How what is encrypted is kept, and what it is once it is decrypted."""


class Encryption:
    """Encrypts the payloads of new runs by AES-256-GCM, each run with a key of its own that is wrapped by the key of this ``key_id``.

    ``key`` is asked for a wrapping key by its id and returns its 32 bytes; it is asked once for each id, and for older ids as long as
    runs are wrapped by them. It raises `LookupError` where it does not know one. A key that is lost is lost with all that is under it.

    >>> keys = {"2026-11": bytes(32)}  # from a vault, not from a program's text
    >>> encryption = Encryption(key_id="2026-11", key=keys.__getitem__)
    >>> ledger = AgentRunLedger("encrypted.db", encryption=encryption)
    """

    def __init__(self, *, key_id: str, key: Callable[[str], bytes]) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ImportError("Encryption needs the package cryptography: install the extra [crypto].") from error
        if type(key_id) is not str or not 1 <= len(key_id.encode()) <= _MOST_KEY_ID_BYTES:
            raise ValueError(f"key_id is a name of at most {_MOST_KEY_ID_BYTES} bytes, not {key_id!r}")
        if not callable(key):
            raise TypeError(f"key is a function that returns the 32 bytes of a key by its id, not {key!r}")
        self.key_id = key_id
        self._key = key
        self._cipher = AESGCM
        self._wrapping: dict[str, AESGCM] = {}
        self._under(key_id, "")  # what is wrong with it shows now, and not with the first run

    def wrap(self, run_id: str, secret: bytes, data_key: bytes) -> bytes:
        """The run's secret and its key, sealed under the key of `key_id`."""
        name = self.key_id.encode()
        head = SEALED + bytes([len(name)]) + name
        nonce = os.urandom(_NONCE_BYTES)
        return head + nonce + self._under(self.key_id, run_id).encrypt(nonce, secret + data_key, head + run_id.encode())

    def unwrap(self, run_id: str, sealed: bytes) -> tuple[bytes, bytes]:
        """The run's secret and its key. Raises `KeyUnavailable`, and `StoreCorrupt` where this is not what was sealed for this run."""
        from cryptography.exceptions import InvalidTag

        key_id = sealed_under(sealed)
        if key_id is None:
            raise StoreCorrupt(f"run {run_id!r}: its secret is neither plain nor sealed. Restore a backup.")
        size = len(SEALED) + 1 + len(key_id.encode())
        head, nonce, rest = sealed[:size], sealed[size:][:_NONCE_BYTES], sealed[size + _NONCE_BYTES :]
        try:
            both = self._under(key_id, run_id).decrypt(nonce, rest, head + run_id.encode())
        except (InvalidTag, ValueError) as error:
            raise KeyUnavailable(
                run_id, key_id, "what the key of this id opens is not this: it is another key, or it was changed"
            ) from error
        return both[:SECRET_BYTES], both[SECRET_BYTES:]

    def _under(self, key_id: str, run_id: str) -> AESGCM:
        cipher = self._wrapping.get(key_id)
        if cipher is None:
            try:
                key = self._key(key_id)
            except LookupError as error:
                raise KeyUnavailable(run_id, key_id, f"{type(error).__name__}: {error}") from error
            if type(key) is not bytes or len(key) != _KEY_BYTES:
                raise ValueError(f"the key {key_id!r} is not of {_KEY_BYTES} bytes")
            cipher = self._wrapping[key_id] = self._cipher(key)
        return cipher


def new_data_key() -> bytes:
    """A key for one run."""
    return os.urandom(_KEY_BYTES)


class RunCipher(NamedTuple):
    """What encrypts and decrypts for one run.

    Every piece is bound to its place. Nonces are made of the piece, its place and a second key (as in RFC 5297, *SIV*), so the same entry
    is encrypted alike however often it is written, as a store that looks up its own lost writes needs it, and no nonce comes twice with
    different pieces.
    """

    run_id: str
    cipher: AESGCM
    nonces: bytes

    @classmethod
    def of(cls, run_id: str, data_key: bytes) -> RunCipher:
        """The cipher of a run by its key."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return cls(run_id, AESGCM(_derived(data_key, b"encrypt")), _derived(data_key, b"nonce"))

    def seal_row(self, row: Row) -> Row:
        """The row with its payload and its digests encrypted."""
        if row.payload is None or row.digest is None or row.encoding not in _SEALED_AS:
            return row
        place = _place_of(row)
        digests = row.digest + (row.fingerprint or b"")
        payload, digest = self.seal(row.payload, b"payload", *place), self.seal(digests, b"digest", *place)
        return row._replace(payload=payload, digest=digest, fingerprint=None, encoding=_SEALED_AS[row.encoding])

    def open_row(self, row: Row) -> Row:
        """The row as it was. Raises `StoreCorrupt` where it is not what was encrypted for this place."""
        if row.encoding not in _OPENED_AS:
            return row
        place = _place_of(row)
        try:
            digests = self.open(row.digest or b"", b"digest", *place)
            payload = self.open(row.payload, b"payload", *place) if row.payload is not None else None
        except ValueError as error:
            raise StoreCorrupt(
                f"run {self.run_id!r}, entry {row.seq}: what is encrypted there was not encrypted for this entry, or was changed. Nothing was "
                "changed now; run `agent-run-ledger verify` and restore from a backup."
            ) from error
        return row._replace(
            payload=payload, digest=digests[:32], fingerprint=digests[32:] or None, encoding=_OPENED_AS[row.encoding]
        )

    def seal(self, piece: bytes, *place: bytes) -> bytes:
        """The piece, encrypted for this place."""
        bound = self._bound(place)
        nonce = hmac.digest(self.nonces, bound + b"\x00" + piece, "sha256")[:_NONCE_BYTES]
        return nonce + self.cipher.encrypt(nonce, piece, bound)

    def open(self, sealed: bytes, *place: bytes) -> bytes:
        """The piece that was sealed for this place. Raises `ValueError`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self.cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], self._bound(place))
        except InvalidTag as error:
            raise ValueError("it is not what was sealed here") from error

    def _bound(self, place: tuple[bytes, ...]) -> bytes:
        return b"\x00".join((self.run_id.encode(), *place))  # no id and no kind holds a NUL


def _place_of(row: Row) -> tuple[bytes, bytes]:
    return b"%d" % row.seq, row.kind.encode()


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, purpose, "sha256")
