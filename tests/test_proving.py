"""Heads and proofs of runs, on every store: put together from a few stored roots, and equal to what all entries give."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    ConsistencyProof,
    Effect,
    InclusionProof,
    RunNotFound,
    StoreCorrupt,
    StoreError,
    merkle,
)
from agent_run_ledger.contract import Listing, Row
from agent_run_ledger.stores.memory import MemoryStore
from support.ledgers import KINDS, Bench, raw
from support.processes import environment

RUN = "proved"


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(request.param, tmp_path) as opened:
        yield opened


def leaves_of(bench: Bench) -> list[bytes]:
    return [merkle.leaf_hash(row.body) for row in bench.rows(RUN)]


def some_steps(bench: Bench, steps: int = 9) -> AgentRunLedger:
    ledger = bench.open()
    with ledger.open_run("prove it", RUN) as run:
        for number in range(steps):
            run.step("step", {"n": number, "long": "x" * 70_000 * (number == 3)}, lambda: None, effect=Effect.READ)
    return ledger


def test_every_head_and_every_proof_is_what_all_entries_give(bench: Bench) -> None:
    ledger = some_steps(bench)
    leaves = leaves_of(bench)
    assert len(leaves) == 20
    assert ledger.tree_head(RUN) == ledger.tree_head(RUN, 20)
    for size in range(1, 21):
        head = ledger.tree_head(RUN, size)
        assert (head.run_id, head.size, head.root) == (RUN, size, merkle.root(leaves[:size]))
        for seq in range(1, size + 1):
            proved = ledger.prove(RUN, seq, size)
            proof = merkle.inclusion_proof(leaves[:size], seq - 1)
            assert proved == InclusionProof(leaves[seq - 1], seq - 1, size, proof)
            assert merkle.verify_inclusion(proved.leaf_hash, proved.index, proved.size, proved.proof, head.root)
            grown = ledger.prove_consistency(RUN, seq, size)
            assert grown == ConsistencyProof(seq, size, merkle.consistency_proof(leaves[:size], seq))
            before = ledger.tree_head(RUN, seq).root
            assert merkle.verify_consistency(grown.size1, grown.size2, grown.proof, before, head.root)
    assert ledger.prove(RUN, 3) == ledger.prove(RUN, 3, 20)
    assert ledger.prove_consistency(RUN, 3) == ledger.prove_consistency(RUN, 3, 20)


def test_a_proof_of_what_is_not_there_is_refused(bench: Bench) -> None:
    ledger = some_steps(bench, 1)
    for wrong in (0, -1, 5, True, 1.0, "1", 2**70):
        with pytest.raises(ValueError, match="number of"):
            ledger.tree_head(RUN, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="number of"):
            ledger.prove(RUN, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="number of"):
            ledger.prove_consistency(RUN, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from 1 to 2"):
        ledger.prove_consistency(RUN, 3, 2)
    for ask in (
        ledger.tree_head,
        lambda run_id: ledger.prove(run_id, 1),
        lambda run_id: ledger.prove_consistency(run_id, 1),
    ):
        with pytest.raises(RunNotFound):
            ask("nobody")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET roots = substr(roots, 1, 32) WHERE seq = 4",
        "UPDATE entries SET roots = 'text that is as long as a hash of it' WHERE seq = 4",
        "UPDATE entries SET body = CAST('{}' AS BLOB) WHERE seq = 3",
        "UPDATE entries SET roots = zeroblob(length(roots)) WHERE seq = 4",
        "DELETE FROM entries WHERE seq = 3",
    ],
)
def test_of_entries_that_were_changed_nothing_is_proved(tmp_path: Path, statement: str) -> None:
    with Bench("sqlite", tmp_path) as bench:
        some_steps(bench, 2)
        with raw(bench.path, without_triggers=True) as connection:
            assert connection.execute(statement).rowcount == 1
        ledger = bench.open()
        with pytest.raises(StoreCorrupt, match="nothing can be proved"):
            ledger.prove(RUN, 3)
        if "body" not in statement:  # of bodies only what is proved itself is looked at
            with pytest.raises(StoreCorrupt, match="nothing can be proved"):
                ledger.prove_consistency(RUN, 3)
        assert not ledger.verify().ok


def test_a_ledger_opened_read_only_gives_heads_and_proofs(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = some_steps(bench)
        with AgentRunLedger.open_read_only(bench.path) as looking:
            assert looking.tree_head(RUN) == ledger.tree_head(RUN)
            assert looking.prove(RUN, 7) == ledger.prove(RUN, 7)


_LOOKS = """
import sys
from agent_run_ledger import AgentRunLedger
with AgentRunLedger.open_read_only(sys.argv[1]) as ledger:
    head = ledger.tree_head("proved")
print(head.size, head.root.hex())
"""


def test_a_head_that_a_reader_gives_is_that_of_the_writer_on_a_server(tmp_path: Path) -> None:
    with Bench("postgres", tmp_path) as bench:
        head = some_steps(bench).tree_head(RUN)
        done = subprocess.run(
            [sys.executable, "-c", _LOOKS, str(bench.dsn)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == (f"{head.size} {head.root.hex()}\n", "")


class Counted(MemoryStore):
    """A store that counts the entries it is asked for."""

    looked = 0

    def roots(self, run_id: str, seqs: list[int]) -> dict[int, bytes]:  # type: ignore[override]
        self.looked += len(seqs)
        return super().roots(run_id, seqs)

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        found = super().read(run_id, after, limit=limit, payloads_up_to=payloads_up_to)
        self.looked += len(found)
        return found


def test_a_proof_looks_up_a_logarithm_of_entries() -> None:
    size = 5000
    frontier: list[bytes] = []
    rows = []
    for number in range(size):
        body = b"%d" % number
        frontier, roots = merkle.append(frontier, number, merkle.leaf_hash(body))
        rows.append(Row(number + 1, "note", None, None, body, roots))
    store = Counted()
    assert store.create(RUN, "a", 30.0, b"", rows, Listing(1.5)) is not None
    with closing(AgentRunLedger(store)) as ledger:
        for ask in (
            lambda: ledger.tree_head(RUN, 4999),
            lambda: ledger.prove(RUN, 2718, 4999),
            lambda: ledger.prove_consistency(RUN, 2718, 4999),
        ):
            store.looked = 0
            ask()
            assert 0 < store.looked <= 2 * size.bit_length() + 1


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were synced by a call of the system that Python makes, and not SQLite."""
    files: list[str] = []
    true_fsync = os.fsync

    def fsync(file: int) -> None:
        files.append(os.readlink(f"/proc/self/fd/{file}"))
        true_fsync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    return files


@pytest.mark.parametrize("read_only", [False, True])
def test_what_a_head_covers_is_synced_before_the_head_is_given(
    tmp_path: Path, synced: list[str], read_only: bool
) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open(durability="process")
        ledger.create_run("goal", RUN)
        ledger.execute_step(RUN, "step", {}, lambda: None)
        synced.clear()
        if read_only:
            with AgentRunLedger.open_read_only(bench.path) as looking:
                looking.tree_head(RUN)
        else:
            ledger.tree_head(RUN)
        assert synced == [f"{bench.path}-wal"]


def test_without_a_sync_there_is_no_head_and_the_log_is_mended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open(durability="process")
        ledger.create_run("goal", RUN)
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.EIO, "no such sector")))
            for _ in range(2):
                with pytest.raises(StoreError):
                    ledger.tree_head(RUN)
        written: list[int] = []
        true_pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *given: written.append(true_pwrite(*given)) or written[-1])
        assert ledger.tree_head(RUN).size == 1
        assert sum(written) == os.stat(f"{bench.path}-wal").st_size
