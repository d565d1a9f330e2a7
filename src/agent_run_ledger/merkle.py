"""Merkle trees as RFC 9162 §2.1 defines them, one leaf an entry: hash, append, root.

Every function is pure. Hashes are 32 bytes. A tree that grows is kept as its *frontier*: the roots of the perfect subtrees it
consists of, largest first, which is all that an append or the tree's root needs (at most one per bit of the size).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

EMPTY_ROOT = sha256(b"").digest()
"""The root of the tree without leaves."""


def leaf_hash(data: bytes) -> bytes:
    """SHA-256(0x00 ‖ data): the hash of one entry."""
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right): the hash of two neighbouring subtrees."""
    return sha256(b"\x01" + left + right).digest()


def append(frontier: Sequence[bytes], size: int, leaf: bytes) -> tuple[list[bytes], bytes]:
    """Add `leaf` to the tree of `size` leaves; return the new frontier and the roots of all subtrees that the leaf closes.

    The closed roots stand one after the other, smallest first, and begin with the leaf itself; they number one plus the trailing
    one bits of `size`, so 1.985 a leaf on average over 64 leaves.
    """
    grown = list(frontier)
    closed = node = leaf
    while size & 1:
        node = sha256(b"\x01" + grown.pop() + node).digest()
        closed += node
        size >>= 1
    grown.append(node)
    return grown, closed


def frontier_root(frontier: Sequence[bytes]) -> bytes:
    """The root of the tree whose frontier this is."""
    if not frontier:
        return EMPTY_ROOT
    node = frontier[-1]
    for left in reversed(frontier[:-1]):
        node = node_hash(left, node)
    return node


def root(leaf_hashes: Sequence[bytes]) -> bytes:
    """The root of the tree over these leaves."""
    frontier: list[bytes] = []
    for size, leaf in enumerate(leaf_hashes):
        frontier, _ = append(frontier, size, leaf)
    return frontier_root(frontier)
