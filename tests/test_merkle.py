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


# --- proofs -----------------------------------------------------------------------------------------------------------


class Standard:
    """MTH, PATH, PROOF and SUBPROOF of RFC 9162 §2.1 over leaves that are numbered, as the text has them: D[a:b] is `(a, b)`."""

    def __init__(self, leaf_hashes: list[bytes]) -> None:
        self.leaf_hashes = leaf_hashes
        self.known: dict[tuple[int, int], bytes] = {}

    @staticmethod
    def k(n: int) -> int:
        """The largest power of two smaller than n."""
        power = 1
        while power * 2 < n:
            power *= 2
        return power

    def mth(self, a: int, b: int) -> bytes:
        if (a, b) not in self.known:
            if a == b:
                made = sha256().digest()
            elif b == a + 1:
                made = self.leaf_hashes[a]
            else:
                k = self.k(b - a)
                made = sha256(bytes([1]) + self.mth(a, a + k) + self.mth(a + k, b)).digest()
            self.known[a, b] = made
        return self.known[a, b]

    def path(self, m: int, a: int, b: int) -> list[bytes]:
        if b - a == 1:
            return []
        k = self.k(b - a)
        if m < k:
            return [*self.path(m, a, a + k), self.mth(a + k, b)]
        return [*self.path(m - k, a + k, b), self.mth(a, a + k)]

    def proof(self, m: int, n: int) -> list[bytes]:
        return self.subproof(m, 0, n, True)

    def subproof(self, m: int, a: int, b: int, is_known: bool) -> list[bytes]:
        if m == b - a:
            return [] if is_known else [self.mth(a, b)]
        k = self.k(b - a)
        if m <= k:
            return [*self.subproof(m, a, a + k, is_known), self.mth(a + k, b)]
        return [*self.subproof(m - k, a + k, b, False), self.mth(a, a + k)]


def numbered(size: int) -> list[bytes]:
    return [merkle.leaf_hash(number.to_bytes(2, "big")) for number in range(size)]


def stored_with(leaf_hashes: list[bytes]) -> dict[int, bytes]:
    """What is stored with each leaf, counted from 1."""
    frontier: list[bytes] = []
    stored = {}
    for size, leaf in enumerate(leaf_hashes):
        frontier, stored[size + 1] = merkle.append(frontier, size, leaf)
    return stored


def from_stored(ranges: list[merkle.Range], stored: dict[int, bytes]) -> list[bytes]:
    """As a store answers: with what it was asked for, and nothing else."""
    return merkle.roots_from(ranges, {leaf: stored[leaf] for leaf in merkle.closing(ranges)})


SIZES = 300

# What implementations of Certificate Transparency expect of proofs in that tree of eight leaves.
NODE_1 = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
NODE_2_3 = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
NODE_4 = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"
NODE_4_5 = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
NODE_4_7 = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
NODE_6_7 = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
INCLUSIONS = [
    (0, 1, []),
    (0, 8, [NODE_1, NODE_2_3, NODE_4_7]),
    (5, 8, [NODE_4, NODE_6_7, ROOTS[4]]),
    (2, 3, [ROOTS[2]]),
    (1, 5, [ROOTS[1], NODE_2_3, NODE_4]),
]
CONSISTENCIES = [
    (1, 1, []),
    (1, 8, [NODE_1, NODE_2_3, NODE_4_7]),
    (6, 8, [NODE_4_5, NODE_6_7, ROOTS[4]]),
    (2, 5, [NODE_2_3, NODE_4]),
]


@pytest.mark.parametrize(("index", "size", "expected"), INCLUSIONS)
def test_the_standards_tree_gives_the_known_inclusion_proofs(index: int, size: int, expected: list[str]) -> None:
    leaves = [merkle.leaf_hash(leaf) for leaf in LEAVES[:size]]
    proof = merkle.inclusion_proof(leaves, index)
    assert [each.hex() for each in proof] == expected
    assert merkle.verify_inclusion(leaves[index], index, size, proof, bytes.fromhex(ROOTS[size]))


@pytest.mark.parametrize(("size1", "size2", "expected"), CONSISTENCIES)
def test_the_standards_tree_gives_the_known_consistency_proofs(size1: int, size2: int, expected: list[str]) -> None:
    leaves = [merkle.leaf_hash(leaf) for leaf in LEAVES[:size2]]
    proof = merkle.consistency_proof(leaves, size1)
    assert [each.hex() for each in proof] == expected
    roots = [bytes.fromhex(ROOTS[size]) for size in (size1, size2)]
    assert merkle.verify_consistency(size1, size2, proof, *roots)


def test_every_inclusion_proof_from_stored_roots_is_the_standards_and_proves_its_leaf() -> None:
    standard, stored = Standard(numbered(SIZES)), stored_with(numbered(SIZES))
    for size in range(1, SIZES + 1):
        root = standard.mth(0, size)
        assert from_stored([(0, size)], stored) == [root]
        for index in range(size):
            proof = from_stored(merkle.inclusion_ranges(index, size), stored)
            assert proof == standard.path(index, 0, size)
            assert merkle.verify_inclusion(standard.leaf_hashes[index], index, size, proof, root)


def test_every_consistency_proof_from_stored_roots_is_the_standards_and_proves_the_earlier_tree() -> None:
    standard, stored = Standard(numbered(SIZES)), stored_with(numbered(SIZES))
    for size2 in range(1, SIZES + 1):
        for size1 in range(1, size2 + 1):
            proof = from_stored(merkle.consistency_ranges(size1, size2), stored)
            assert proof == standard.proof(size1, size2)
            assert merkle.verify_consistency(size1, size2, proof, standard.mth(0, size1), standard.mth(0, size2))


def check_against_the_standard(size: int) -> None:
    leaves = numbered(size)
    standard = Standard(leaves)
    assert merkle.root(leaves) == standard.mth(0, size)
    for number in range(size):
        assert merkle.inclusion_proof(leaves, number) == standard.path(number, 0, size)
        assert merkle.consistency_proof(leaves, number + 1) == standard.proof(number + 1, size)


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33, 127, 300])
def test_proofs_from_all_leaves_are_the_standards(size: int) -> None:
    check_against_the_standard(size)


@pytest.mark.slow
def test_proofs_from_all_leaves_are_the_standards_at_every_size() -> None:
    for size in range(1, SIZES + 1):
        check_against_the_standard(size)


def flipped(node: bytes) -> bytes:
    return bytes([node[0] ^ 1]) + node[1:]


def spoiled(proof: list[bytes]) -> list[list[bytes]]:
    """The proof with each of its nodes changed, left out or doubled, with two swapped, and with one more at either end."""
    made = [[*proof, merkle.EMPTY_ROOT], [merkle.EMPTY_ROOT, *proof]]
    for number, node in enumerate(proof):
        made.append([*proof[:number], flipped(node), *proof[number + 1 :]])
        made.append([*proof[:number], *proof[number + 1 :]])
        made.append([*proof[:number], node, node, *proof[number + 1 :]])
        if number and node != proof[number - 1]:
            made.append([*proof[: number - 1], node, proof[number - 1], *proof[number + 1 :]])
    return made


@pytest.mark.parametrize("size", range(1, 34))
def test_an_inclusion_proof_with_anything_changed_proves_nothing(size: int) -> None:
    leaves = numbered(size)
    root = merkle.root(leaves)
    for index in range(size):
        leaf, proof = leaves[index], merkle.inclusion_proof(leaves, index)
        for wrong in spoiled(proof):
            assert not merkle.verify_inclusion(leaf, index, size, wrong, root)
        assert not merkle.verify_inclusion(flipped(leaf), index, size, proof, root)
        assert not merkle.verify_inclusion(leaf, index, size, proof, flipped(root))
        for other in range(-1, size + 2):
            assert merkle.verify_inclusion(leaf, other, size, proof, root) == (other == index)


@pytest.mark.parametrize("size2", range(1, 34))
def test_a_consistency_proof_with_anything_changed_proves_nothing(size2: int) -> None:
    leaves = numbered(size2)
    root2 = merkle.root(leaves)
    for size1 in range(1, size2 + 1):
        root1, proof = merkle.root(leaves[:size1]), merkle.consistency_proof(leaves, size1)
        for wrong in spoiled(proof):
            assert not merkle.verify_consistency(size1, size2, wrong, root1, root2)
        assert not merkle.verify_consistency(size1, size2, proof, flipped(root1), root2)
        assert not merkle.verify_consistency(size1, size2, proof, root1, flipped(root2))
        for other in range(-1, size2 + 2):
            assert merkle.verify_consistency(other, size2, proof, root1, root2) == (other == size1)


@given(st.integers(1, 2**40), st.data())
def test_a_proof_needs_a_logarithm_of_stored_leaves(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    bits = size.bit_length()
    assert len(merkle.closing(merkle.inclusion_ranges(index, size))) <= 2 * bits
    assert len(merkle.closing(merkle.consistency_ranges(index + 1, size))) <= 2 * bits
    assert len(merkle.closing([(0, size)])) == size.bit_count()


def test_nothing_is_proved_of_the_empty_tree() -> None:
    assert not merkle.verify_consistency(0, 0, [], merkle.EMPTY_ROOT, merkle.EMPTY_ROOT)
    assert not merkle.verify_consistency(0, 3, [], merkle.EMPTY_ROOT, merkle.root(numbered(3)))
    assert not merkle.verify_inclusion(merkle.EMPTY_ROOT, 0, 0, [], merkle.EMPTY_ROOT)
    for size1, size in ((0, 0), (0, 3), (4, 3), (-1, 3)):
        with pytest.raises(ValueError, match="nothing is proved"):
            merkle.consistency_proof(numbered(size), size1)
    for index, size in ((0, 0), (3, 3), (-1, 3)):
        with pytest.raises(ValueError, match="has no leaf"):
            merkle.inclusion_proof(numbered(size), index)


@pytest.mark.parametrize("size", range(1, 18))
def test_a_proof_that_is_longer_than_its_place_needs_proves_no_root_that_it_was_made_for(size: int) -> None:
    leaves, extra = numbered(size), merkle.leaf_hash(b"extra")
    root = merkle.root(leaves)
    made = [merkle.node_hash(extra, root), merkle.node_hash(root, extra)]
    for index in range(size):
        proof = [*merkle.inclusion_proof(leaves, index), extra]
        assert not any(merkle.verify_inclusion(leaves[index], index, size, proof, wrong) for wrong in made)
    for size1 in range(1, size + 1):
        earlier, proof = merkle.root(leaves[:size1]), [*merkle.consistency_proof(leaves, size1), extra]
        for wrong in made:
            for root1 in (earlier, merkle.node_hash(extra, earlier), merkle.node_hash(earlier, extra)):
                assert not merkle.verify_consistency(size1, size, proof, root1, wrong)


MALFORMED = [
    None,
    True,
    1.0,
    "1",
    -1,
    2**64,
    10**400,
    b"",
    b"x" * 31,
    b"x" * 33,
    "x" * 32,
    [],
    [None],
    ["x" * 32],
    [b"x"],
]
MALFORMED += [object(), {}, {b"x" * 32}, iter([]), [b"x" * 32] * 5000, bytearray(32), float("nan")]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_input_of_any_type_in_any_place_proves_nothing(number: int) -> None:
    wrong = MALFORMED[number]
    leaves = numbered(5)
    root = merkle.root(leaves)
    inclusion = [leaves[2], 2, 5, merkle.inclusion_proof(leaves, 2), root]
    consistency = [3, 5, merkle.consistency_proof(leaves, 3), merkle.root(leaves[:3]), root]
    for verify, right in ((merkle.verify_inclusion, inclusion), (merkle.verify_consistency, consistency)):
        assert verify(*right) is True  # type: ignore[operator]
        for place in range(len(right)):
            assert verify(*right[:place], wrong, *right[place + 1 :]) is False  # type: ignore[operator]


def test_a_stored_leaf_without_the_root_that_is_needed_of_it_gives_no_proof() -> None:
    stored = stored_with(numbered(4))
    with pytest.raises(LookupError):
        merkle.roots_from([(0, 4)], {})
    with pytest.raises(LookupError, match="leaf 4 is stored without"):
        merkle.roots_from([(0, 4)], {4: stored[4][:64]})
