"""Merkle trees as RFC 9162 §2.1 defines them, one leaf an entry: hash, append, root, proofs, and how proofs are verified.

Every function is pure. Hashes are 32 bytes. A tree that grows is kept as its *frontier*: the roots of the perfect subtrees it
consists of, largest first, which is all that an append or the tree's root needs (at most one per bit of the size).

Each leaf is stored with the roots of the subtrees that it *closes*, those whose last leaf it is. So the root of any run of leaves
that begins where a subtree does, and with it any earlier root and any proof, is put together from O(log n) stored leaves: `closing`
says which, `roots_from` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TypeGuard

HASH_BYTES = 32

EMPTY_ROOT = sha256(b"").digest()
"""The root of the tree without leaves."""

Range = tuple[int, int]
"""Some leaves that stand next to each other: the index of the first, and one past that of the last."""

_LARGEST = 2**64
"""Above every size that a tree can have (RFC 9162 §4.10 counts in 64 bits)."""


def leaf_hash(data: bytes) -> bytes:
    """SHA-256(0x00 ‖ data): the hash of one entry."""
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 ‖ left ‖ right): the hash of two neighbouring subtrees."""
    return sha256(b"\x01" + left + right).digest()


# --- growing ----------------------------------------------------------------------------------------------------------


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


# --- proving ----------------------------------------------------------------------------------------------------------


def inclusion_proof(leaf_hashes: Sequence[bytes], index: int) -> list[bytes]:
    """What proves that the leaf at `index` (from 0) is in the tree over these leaves: PATH of §2.1.3.1. Raises `ValueError`."""
    return [root(leaf_hashes[begin:end]) for begin, end in inclusion_ranges(index, len(leaf_hashes))]


def consistency_proof(leaf_hashes: Sequence[bytes], size1: int) -> list[bytes]:
    """What proves that the first `size1` of these leaves are the tree of an earlier day: PROOF of §2.1.4.1. Raises `ValueError`."""
    return [root(leaf_hashes[begin:end]) for begin, end in consistency_ranges(size1, len(leaf_hashes))]


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """The leaves whose roots are the inclusion proof of the leaf at `index` in a tree of `size`, in the proof's order."""
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    ranges = []
    begin, end = 0, size
    while end - begin > 1:
        middle = begin + _split(end - begin)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    return ranges[::-1]


def consistency_ranges(size1: int, size2: int) -> list[Range]:
    """The leaves whose roots are the consistency proof between a tree of `size1` leaves and its later self of `size2`."""
    if not 1 <= size1 <= size2:
        raise ValueError(f"nothing is proved between trees of {size1} and {size2} leaves: the first has 1 to {size2}")
    ranges = []
    begin, end = 0, size2
    while end > size1:
        middle = begin + _split(end - begin)
        if size1 <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    if begin > 0:  # else it is the whole first tree, whose root the verifier has
        ranges.append((begin, end))
    return ranges[::-1]


def closing(ranges: Iterable[Range]) -> list[int]:
    """Which leaves, counted from 1, close the subtrees that these ranges consist of: what has to be looked up for `roots_from`."""
    return sorted({end for begin, end in ranges for _, end in _subtrees(begin, end)})


def roots_from(ranges: Iterable[Range], closed: Mapping[int, bytes]) -> list[bytes]:
    """The root of each range, from what `append` gave for the leaves that are `closing` them.

    Raises `LookupError` where one is missing, or stored without the root that is needed of it.
    """
    return [frontier_root([_stored(part, closed) for part in _subtrees(*each)]) for each in ranges]


def _stored(subtree: Range, closed: Mapping[int, bytes]) -> bytes:
    begin, end = subtree
    level = (end - begin).bit_length() - 1
    found = closed[end][level * HASH_BYTES : (level + 1) * HASH_BYTES]
    if len(found) != HASH_BYTES:
        raise LookupError(f"leaf {end} is stored without the root of the {end - begin} leaves that it closes")
    return found


def _subtrees(begin: int, end: int) -> Iterator[Range]:
    """The perfect subtrees that a range consists of, largest first: it begins where its largest does."""
    while begin < end:
        width = 1 << ((end - begin).bit_length() - 1)
        yield begin, begin + width
        begin += width


def _split(size: int) -> int:
    """The largest power of two below `size`: how many leaves are in the left subtree."""
    return 1 << ((size - 1).bit_length() - 1)


# --- verifying --------------------------------------------------------------------------------------------------------


def verify_inclusion(leaf_hash: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether `proof` shows that a tree of `size` leaves with this root has this leaf at `index` (from 0): §2.1.3.2.

    What is malformed, of whatever type, proves nothing: False.
    """
    if not (_is_size(index) and _is_size(size) and index < size and _are_hashes(proof, leaf_hash, root)):
        return False
    return _root_of_inclusion(leaf_hash, index, size, proof) == root


def verify_consistency(size1: int, size2: int, proof: Sequence[bytes], root1: bytes, root2: bytes) -> bool:
    """Whether `proof` shows that the tree of `size2` leaves only adds leaves to that of `size1`: §2.1.4.2.

    Equal sizes need equal roots and no proof. Of the empty tree nothing is proved: `size1` of 0 is False, as what is malformed is.
    """
    if not (_is_size(size1) and _is_size(size2) and 1 <= size1 <= size2 and _are_hashes(proof, root1, root2)):
        return False
    if size1 == size2:
        return not proof and root1 == root2
    return _roots_of_consistency(size1, size2, proof, root1) == (root1, root2)


def _root_of_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes | None:
    """The root that the proof implies; None where it is too short or too long for the place."""
    first, last, node = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return None
        if first & 1 or first == last:
            node = node_hash(sibling, node)
            while first and not first & 1:
                first, last = first >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        first, last = first >> 1, last >> 1
    return node if last == 0 else None


def _roots_of_consistency(size1: int, size2: int, proof: Sequence[bytes], root1: bytes) -> tuple[bytes, bytes] | None:
    """The earlier and the later root that the proof implies; None where it is too short or too long for the sizes."""
    is_perfect = size1 & (size1 - 1) == 0
    path = [root1, *proof] if is_perfect else list(proof)
    if not proof:
        return None
    first, last = size1 - 1, size2 - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    earlier = later = path[0]
    for node in path[1:]:
        if last == 0:
            return None
        if first & 1 or first == last:
            earlier, later = node_hash(node, earlier), node_hash(node, later)
            while first and not first & 1:
                first, last = first >> 1, last >> 1
        else:
            later = node_hash(later, node)
        first, last = first >> 1, last >> 1
    return (earlier, later) if last == 0 else None


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LARGEST


def _are_hashes(proof: object, *others: object) -> bool:
    return isinstance(proof, list | tuple) and all(
        isinstance(each, bytes) and len(each) == HASH_BYTES for each in (*proof, *others)
    )
