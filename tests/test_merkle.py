"""The tree over a run's entries, against the standard's own tree and a slow, obvious one."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import merkle

# The tree of eight leaves with which implementations of Certificate Transparency (RFC 6962) are tested.
LEAVES = [
    bytes.fromhex(leaf)
    for leaf in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def obvious_root(leaf_hashes: list[bytes]) -> bytes:
    """MTH of RFC 9162 §2.1.1, word for word."""
    size = len(leaf_hashes)
    if size == 0:
        return sha256(b"").digest()
    if size == 1:
        return leaf_hashes[0]
    split = 1
    while split * 2 < size:
        split *= 2
    return sha256(b"\x01" + obvious_root(leaf_hashes[:split]) + obvious_root(leaf_hashes[split:])).digest()


def obvious_closed(leaf_hashes: list[bytes]) -> list[bytes]:
    """The roots of the perfect subtrees that end at the last leaf, smallest first."""
    size, closed, width = len(leaf_hashes), [], 1
    while size % width == 0:
        closed.append(obvious_root(leaf_hashes[size - width :]))
        width *= 2
    return closed


@pytest.mark.parametrize("size", range(9))
def test_the_standards_tree_has_the_standards_root_at_every_size(size: int) -> None:
    assert merkle.root([merkle.leaf_hash(leaf) for leaf in LEAVES[:size]]).hex() == ROOTS[size]


def test_the_empty_tree_has_the_hash_of_nothing_as_its_root() -> None:
    assert merkle.root([]) == merkle.EMPTY_ROOT == merkle.frontier_root([]) == sha256(b"").digest()


def test_a_leaf_and_a_node_of_equal_bytes_have_different_hashes() -> None:
    left, right = merkle.leaf_hash(b"a"), merkle.leaf_hash(b"b")
    assert merkle.node_hash(left, right) != merkle.leaf_hash(left + right)
    assert merkle.node_hash(left, right) != merkle.node_hash(right, left)


def test_a_tree_that_grows_has_the_obvious_root_and_closes_the_obvious_subtrees_at_every_size() -> None:
    leaves = [merkle.leaf_hash(number.to_bytes(2, "big")) for number in range(130)]
    frontier: list[bytes] = []
    for size, leaf in enumerate(leaves):
        before = list(frontier)
        grown, closed = merkle.append(frontier, size, leaf)
        assert frontier == before, "the old frontier is still that of the old tree"
        frontier = grown
        assert merkle.frontier_root(frontier) == obvious_root(leaves[: size + 1])
        assert closed == b"".join(obvious_closed(leaves[: size + 1]))
        assert len(frontier) == (size + 1).bit_count()


def test_sixty_four_leaves_close_127_subtrees() -> None:
    frontier: list[bytes] = []
    closed = 0
    for size in range(64):
        frontier, roots = merkle.append(frontier, size, merkle.leaf_hash(bytes([size])))
        closed += len(roots) // 32
    assert closed == 127


@given(st.lists(st.binary(max_size=8), max_size=40), st.data())
def test_any_change_of_any_leaf_changes_the_root(leaves: list[bytes], data: st.DataObject) -> None:
    hashes = [merkle.leaf_hash(leaf) for leaf in leaves]
    assert merkle.root(hashes) == obvious_root(hashes)
    if not leaves:
        return
    index = data.draw(st.integers(0, len(leaves) - 1))
    changed = [*hashes[:index], merkle.leaf_hash(leaves[index] + b"!"), *hashes[index + 1 :]]
    assert merkle.root(changed) != merkle.root(hashes)
    assert merkle.root(hashes[:index] + hashes[index + 1 :]) != merkle.root(hashes)
