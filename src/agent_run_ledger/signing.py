"""Ed25519 keys that sign and check notes, in the encodings of signed notes. The only place that knows the package of the extra [sign]."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from types import ModuleType
from typing import Self

from agent_run_ledger.checkpoints import Note, Signature, exactly, is_key_name, notes, signed
from agent_run_ledger.errors import BadNote

_ED25519 = b"\x01"
_KEY_BYTES = 32
_PRIVATE = "PRIVATE+KEY+"


class Signer:
    """Whoever can sign notes: made from the text of a private key, `PRIVATE+KEY+name+hash+base64`, as `generate` or `keygen` gives it.

    Raises `BadNote` where the text is no such key, without repeating it, and `ImportError` without the extra [sign].

    >>> signer = Signer.generate("billing-host")
    >>> note = TreeHead("october", 3, bytes(32)).note(signer)
    >>> Verifier(signer.verifier).text_of(note) == TreeHead("october", 3, bytes(32)).note()
    True
    """

    def __init__(self, key: str) -> None:
        self.key = key.strip()
        self.name, key_id, seed = _parsed(self.key, is_private=True)
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes_raw()
        self._key_id = _key_id(self.name, public)
        if self._key_id != key_id:
            raise _damaged(self.name)
        self.verifier = _written(self.name, public, public)
        """The text of the public key, `name+hash+base64`: for whoever checks."""

    @classmethod
    def generate(cls, name: str) -> Self:
        """A new key. Its `name` says for people whose it is; it has no white space and no plus sign. Raises `ValueError`."""
        if not is_key_name(name):
            raise ValueError(f"a key's name is a text without white space and without a plus sign, not {name!r}")
        made = _ed25519().Ed25519PrivateKey.generate()
        return cls(_PRIVATE + _written(name, made.public_key().public_bytes_raw(), made.private_bytes_raw()))

    def sign(self, text: str) -> str:
        """The text, which ends with a line break, as a signed note."""
        return signed(text, Signature(self.name, self._key_id, self._key.sign(text.encode())))

    def __repr__(self) -> str:
        return f"<Signer {self.verifier}>"


class Verifier:
    """Whoever can check notes: made from the text of a public key, `name+hash+base64`. Raises as `Signer` does."""

    def __init__(self, key: str) -> None:
        self.key = key.strip()
        self.name, key_id, public = _parsed(self.key, is_private=False)
        self._key_id = _key_id(self.name, public)
        if self._key_id != key_id:
            raise _damaged(self.name)
        self._key = _ed25519().Ed25519PublicKey.from_public_bytes(public)

    def text_of(self, note: str) -> str:
        """What a signed note says. Raises `BadNote` where it is not one note, or this key has not signed it."""
        found = list(notes(note))
        if len(found) != 1:
            raise BadNote(f"it holds {len(found)} notes, not one", note)
        self.check(found[0])
        return found[0].text

    def check(self, note: Note) -> None:
        """Raises `BadNote` unless this key has signed the note. What others have signed beside it says nothing, either way."""
        from cryptography.exceptions import InvalidSignature

        ours = [each for each in note.signatures if (each.name, each.key_id) == (self.name, self._key_id)]
        if not ours:
            by = ", ".join(sorted({repr(each.name) for each in note.signatures}))
            other = f"it is signed by {by} with another key" if by else "it is not signed"
            raise BadNote(f"{other}, and should be by {self.key}", note.text)
        for each in ours:
            try:
                self._key.verify(each.signature, note.text.encode())
            except InvalidSignature:
                why = f"the signature of {self.name!r} on it is wrong: it was changed, or somebody else signed it"
                raise BadNote(why, note.text) from None


def _key_id(name: str, public: bytes) -> bytes:
    return sha256(name.encode() + b"\n" + _ED25519 + public).digest()[:4]


def _written(name: str, public: bytes, key: bytes) -> str:
    return f"{name}+{_key_id(name, public).hex()}+{b64encode(_ED25519 + key).decode()}"


def _parsed(key: str, *, is_private: bool) -> tuple[str, bytes, bytes]:
    """The name, the hash and the 32 bytes of a key. Raises `BadNote`, which does not repeat it: it may be a private one."""
    kind, starts = ("private", _PRIVATE) if is_private else ("public", "")
    name, _, rest = key.removeprefix(starts).partition("+")
    key_id, _, encoded = rest.partition("+")
    try:
        found = exactly(encoded, 1 + _KEY_BYTES, "key", "") if key.startswith(starts) else b""
    except BadNote:
        found = b""
    if not is_key_name(name) or not re.fullmatch("[0-9a-f]{8}", key_id) or found[:1] != _ED25519:
        raise BadNote(f"it is no {kind} key of Ed25519, {starts}name+hash+base64")
    return name, bytes.fromhex(key_id), found[1:]


def _damaged(name: str) -> BadNote:
    return BadNote(f"the key of {name!r} is damaged: name, hash and key do not belong together")


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ImportError(
            "Signing and checking heads needs the package cryptography: install the extra [sign]."
        ) from error
    return ed25519
