"""Digests and keys: what identifies a call, its bytes and its environment. SHA-256 throughout."""

from __future__ import annotations

from hashlib import sha256
from types import CodeType


def plain(data: bytes) -> bytes:
    """SHA-256 of the bytes: stands beside a payload and goes with it, because it gives small payloads away."""
    return sha256(data).digest()


def salted(secret: bytes, data: bytes) -> str:
    """SHA-256(secret ‖ data) as hex: binds a payload into an entry's body without telling anything about it."""
    return sha256(secret + data).hexdigest()


def fingerprint(tool: str, argument_digest: bytes) -> bytes:
    """What the loop rules call the same call: SHA-256(tool ‖ NUL ‖ digest of the canonical arguments)."""
    return sha256(tool.encode() + b"\x00" + argument_digest).digest()


def idempotency_key(secret: bytes, run_id: str, position: str, tool: str, arguments: bytes) -> str:
    """The key of every attempt of one step, in hex.

    Scoped to run and position on purpose: two rightful identical calls must not share a key. Names hold no NUL, so the parts cannot
    run into each other.
    """
    return sha256(b"\x00".join((secret, run_id.encode(), position.encode(), tool.encode(), arguments))).hexdigest()


def code_digest(code: CodeType) -> str:
    """A digest of a function's bytecode and constants, nested functions included, file names and line numbers left out."""
    digest = sha256(code.co_code)
    digest.update(" ".join((*code.co_names, *code.co_varnames, *code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(code_digest(constant).encode())
        elif isinstance(constant, frozenset):  # its order differs from process to process
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())
    return digest.hexdigest()[:16]
