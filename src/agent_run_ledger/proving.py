"""Heads and proofs of a run, put together from the roots that are stored with a few of its entries."""

from __future__ import annotations

from collections.abc import Sequence

from agent_run_ledger import merkle
from agent_run_ledger.checkpoints import ConsistencyProof, InclusionProof, TreeHead
from agent_run_ledger.contract import Store
from agent_run_ledger.errors import RunNotFound, StoreCorrupt


def tree_head(store: Store, run_id: str, size: int | None = None) -> TreeHead:
    """The head of the run at a size, by default as it stands; what it covers is on stable storage. As `Ledger.tree_head`."""
    size = _size(store, run_id, "size", size)
    store.sync(run_id)
    (root,) = _roots(store, run_id, [(0, size)])
    return TreeHead(run_id, size, root)


def inclusion(store: Store, run_id: str, seq: int, size: int | None = None) -> InclusionProof:
    """As `Ledger.prove`. What does not prove what it should is not handed out."""
    size = _size(store, run_id, "size", size)
    if not _is_within(seq, size):
        raise ValueError(f"seq is the number of one of the {size} entries of run {run_id!r}, from 1, not {seq!r}")
    entry = store.read(run_id, seq - 1, limit=1, payloads_up_to=0)
    if not entry or entry[0].seq != seq or not isinstance(entry[0].body, bytes):
        raise _corrupt(run_id, f"entry {seq} is missing")
    leaf, index = merkle.leaf_hash(entry[0].body), seq - 1
    root, *proof = _roots(store, run_id, [(0, size), *merkle.inclusion_ranges(index, size)])
    if not merkle.verify_inclusion(leaf, index, size, proof, root):
        raise _corrupt(run_id, f"entry {seq} is not the one whose hash is in the stored roots")
    return InclusionProof(leaf, index, size, proof)


def consistency(store: Store, run_id: str, size1: int, size2: int | None = None) -> ConsistencyProof:
    """As `Ledger.prove_consistency`. What does not prove what it should is not handed out."""
    size2 = _size(store, run_id, "size2", size2)
    if not _is_within(size1, size2):
        raise ValueError(f"size1 is a number of entries from 1 to {size2}, not {size1!r}")
    root1, root2, *proof = _roots(store, run_id, [(0, size1), (0, size2), *merkle.consistency_ranges(size1, size2)])
    if not merkle.verify_consistency(size1, size2, proof, root1, root2):
        raise _corrupt(run_id, f"the stored roots of {size1} and of {size2} entries are not those of one tree")
    return ConsistencyProof(size1, size2, proof)


def _size(store: Store, run_id: str, name: str, asked: int | None) -> int:
    """How many entries the run has, or how many of them are `asked` for."""
    summary = next(iter(store.summaries(run_id)), None)
    if summary is None:
        raise RunNotFound(run_id)
    stands = summary.last.seq
    if asked is not None and not _is_within(asked, stands):
        raise ValueError(f"{name} is a number of entries, and run {run_id!r} has {stands}, not {asked!r}")
    return asked if asked is not None else stands


def _is_within(number: object, most: int) -> bool:
    return type(number) is int and 1 <= number <= most


def _roots(store: Store, run_id: str, ranges: Sequence[merkle.Range]) -> list[bytes]:
    closed = store.roots(run_id, merkle.closing(ranges))
    if not all(isinstance(each, bytes) for each in closed.values()):
        raise _corrupt(run_id, "stored roots are no bytes")
    try:
        return merkle.roots_from(ranges, closed)
    except LookupError as error:
        raise _corrupt(run_id, f"a stored root is missing ({error})") from error


def _corrupt(run_id: str, what: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"run {run_id!r}: {what}, so that nothing can be proved of it; nothing was changed. "
        "`agent-run-ledger verify` says what is damaged."
    )
