"""Signed heads that are kept elsewhere: how they are written, what the signer refuses, and what `verify` finds with them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import (
    AgentRunLedger,
    BadNote,
    Effect,
    HeadLog,
    HeadRefused,
    RunLedger,
    RunNotFound,
    Signer,
    TreeHead,
    Verifier,
    merkle,
)
from agent_run_ledger.checkpoints import notes, origin
from support.ledgers import KINDS, Bench, raw
from support.processes import environment
from support.shell import Shell

RUN = "october"
SIGNER = Signer.generate("billing-host")
OTHER = Signer.generate("billing-host")
ROOT = bytes(range(32))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_head_is_a_checkpoint_of_three_lines() -> None:
    text = TreeHead(RUN, 3, ROOT).note()
    assert text == "agent-run-ledger/run/october\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n"
    assert TreeHead.read(text) == TreeHead(RUN, 3, ROOT)
    assert TreeHead.read(text + "an extension line\n") == TreeHead(RUN, 3, ROOT)


_ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60).filter(str.strip)


@given(_ids, st.integers(0, 10**15), st.binary(min_size=32, max_size=32))
def test_any_head_comes_back_from_its_note_and_its_signed_note(run_id: str, size: int, root: bytes) -> None:
    head = TreeHead(run_id, size, root)
    assert TreeHead.read(head.note()) == head
    assert head.note().isascii()
    note = head.note(SIGNER)
    assert Verifier(SIGNER.verifier).text_of(note) == head.note()
    assert [TreeHead.read(found.text) for found in notes(f"{head.note()}\n{note}\n{note}")] == [head] * 3


def test_two_runs_never_have_one_origin() -> None:
    names = ["a", "a/b", "a%2Fb", "a b", "a+b", "ä", "A", "%", "a\u202eb"]
    assert len({origin(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "agent-run-ledger/run/october\n3\n",
        "agent-run-ledger/run/\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/%6Fctober\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/octöber\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/%FF\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "example.com/log\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/october\n03\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/october\n-3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n",
        "agent-run-ledger/run/october\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh9=\n",
        "agent-run-ledger/run/october\n3\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHg==\n",
        "agent-run-ledger/run/october\n3\nno base64\n",
        "agent-run-ledger/run/october\r\n3\r\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\r\n",
    ],
)
def test_what_is_no_head_of_a_run_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadNote, match="this proves nothing"):
        TreeHead.read(text)


# --- signed notes and keys --------------------------------------------------------------------------------------------


def test_a_signed_note_is_what_its_format_says_byte_for_byte() -> None:
    """Written from the text of the format, with nothing of ours but the note."""
    text, signature = TreeHead(RUN, 3, ROOT).note(SIGNER).split("\n\n")
    mark, name, encoded = signature.removesuffix("\n").split(" ")
    assert (mark, name) == ("\u2014", "billing-host")
    name, key_hash, encoded_key = SIGNER.verifier.split("+", 2)
    kind, public = b64decode(encoded_key)[:1], b64decode(encoded_key)[1:]
    assert (name, kind, len(public)) == ("billing-host", b"\x01", 32)
    assert key_hash == sha256(b"billing-host\n\x01" + public).hexdigest()[:8]
    assert b64decode(encoded)[:4].hex() == key_hash
    Ed25519PublicKey.from_public_bytes(public).verify(b64decode(encoded)[4:], (text + "\n").encode())
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(public).verify(b64decode(encoded)[4:], text.encode())


def test_the_key_of_a_widely_used_go_implementation_is_read() -> None:
    """The example keys in the documentation of signed notes."""
    private = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
    public = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
    assert Signer(private).verifier == public
    text = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
    note = f"{text}\n\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    assert Signer(private).sign(text) == note
    assert Verifier(public).text_of(note) == text


def test_a_key_comes_back_from_its_text_and_shows_nothing_of_itself() -> None:
    again = Signer(f"  {SIGNER.key}\n")
    assert (again.name, again.key, again.verifier) == (SIGNER.name, SIGNER.key, SIGNER.verifier)
    assert SIGNER.verifier in repr(again)
    assert SIGNER.key.split("+", 4)[4] not in repr(again)
    assert TreeHead(RUN, 3, ROOT).note(again) == TreeHead(RUN, 3, ROOT).note(SIGNER)


@pytest.mark.parametrize("name", ["", " ", "a b", "a+b", "a\tb", "a\nb", "\u202e", None, 7])
def test_a_key_has_a_name_that_a_line_of_a_signature_can_hold(name: Any) -> None:
    with pytest.raises(ValueError, match="a key's name"):
        Signer.generate(name)


def damaged(key: str) -> list[str]:
    *front, encoded = key.rsplit("+", 1) if "+" in key else [key]
    swapped = key.replace("billing-host", "billing-hosu", 1)
    return ["", "x", key[:-1], key + "A", swapped, key.replace("+", " "), *front, f"{encoded}", key[:5] + "+" + key[5:]]


def test_a_damaged_key_is_refused_and_a_private_one_is_not_repeated() -> None:
    for key in [*damaged(SIGNER.key), SIGNER.verifier]:
        with pytest.raises(BadNote) as refused:
            Signer(key)
        assert SIGNER.key[-20:] not in str(refused.value)
    for key in [*damaged(SIGNER.verifier), SIGNER.key]:
        with pytest.raises(BadNote) as refused:
            Verifier(key)
        assert SIGNER.key[-20:] not in str(refused.value)


def test_a_note_that_another_key_signed_or_nobody_is_refused_and_says_so() -> None:
    head = TreeHead(RUN, 3, ROOT)
    with pytest.raises(BadNote, match="signed by 'billing-host' with another key"):
        Verifier(SIGNER.verifier).text_of(head.note(OTHER))
    with pytest.raises(BadNote, match="it is not signed, and should be by billing-host"):
        Verifier(SIGNER.verifier).text_of(head.note())
    with pytest.raises(BadNote, match="holds 2 notes"):
        Verifier(SIGNER.verifier).text_of(head.note(SIGNER) * 2)
    both = head.note(SIGNER) + head.note(OTHER).split("\n\n")[1]
    for signer in (SIGNER, OTHER):
        assert Verifier(signer.verifier).text_of(both) == head.note()


def test_a_signed_note_with_any_byte_changed_is_refused() -> None:
    note = TreeHead(RUN, 3, ROOT).note(SIGNER)
    verifier = Verifier(SIGNER.verifier)
    for at in range(len(note)):
        for other in ("A", "0", "\n", " "):
            if note[at] == other or at == len(note) - 1:
                continue
            with pytest.raises(BadNote):
                verifier.text_of(note[:at] + other + note[at + 1 :])


_WITHOUT = """
import sys
sys.modules["cryptography"] = None
from agent_run_ledger import AgentRunLedger, Signer, TreeHead
assert TreeHead.read(TreeHead("r", 1, bytes(32)).note()).size == 1
AgentRunLedger(sys.argv[1]).create_run("goal", "r")
ledger = AgentRunLedger(sys.argv[1])
assert ledger.verify(against=ledger.tree_head("r").note()).ok
for ask in (lambda: Signer.generate("a"), lambda: ledger.verify(against=ledger.tree_head("r").note(), key=sys.argv[2])):
    try:
        ask()
    except ImportError as error:
        print(error)
"""


def test_without_the_extra_signing_says_what_to_install_and_all_else_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, tmp_path / "a.db", SIGNER.verifier],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all("install the extra [sign]" in line for line in said)


# --- against heads that were kept -------------------------------------------------------------------------------------


def steps(ledger: AgentRunLedger, run_id: str, count: int, *, ends: bool = True) -> None:
    """A run that goes on to so many steps."""
    ledger.create_run("goal", run_id)
    ledger.resume_run(run_id)
    done = len(ledger.steps(run_id))
    for number in range(done, count):
        ledger.execute_step(run_id, "step", {"n": number}, lambda: None, effect=Effect.READ)
    if ends:
        ledger.finish_run(run_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ledger_that_has_only_grown_agrees_with_every_head_that_was_kept(tmp_path: Path, kind: str) -> None:
    with Bench(kind, tmp_path) as bench:
        ledger = bench.open()
        heads: list[TreeHead | str] = []
        for count in range(1, 6):
            steps(ledger, RUN, count, ends=count == 5)
            heads += [ledger.tree_head(RUN), ledger.tree_head(RUN).note(SIGNER)]
        steps(ledger, "other", 1)
        report = ledger.verify(against=heads)
        assert (report.findings, report.heads, report.runs) == ([], 10, 2)
        assert ledger.verify(RUN, heads).heads == 10
        assert ledger.verify(against=heads[-1], key=SIGNER.verifier).ok
        assert ledger.verify(against="\n".join(map(str, heads[1::2])), key=SIGNER.verifier).heads == 5
        assert ledger.verify().heads == 0


def found(path: Path, against: Any, run_id: str | None = None) -> list[tuple[str, int | None, str]]:
    with AgentRunLedger.open_read_only(path) as ledger:
        report = ledger.verify(run_id, against)
    assert report.ok == (not report.findings)
    return [(each.run_id, each.seq, each.code) for each in report.findings]


def test_the_whole_file_put_back_to_an_older_state_is_found_by_a_head_alone(tmp_path: Path) -> None:
    path, older = tmp_path / "agent.db", tmp_path / "older.db"
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 2, ends=False)
    shutil.copyfile(path, older)
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 3)
        steps(ledger, "later", 1)
        heads = [ledger.tree_head(RUN), ledger.tree_head("later")]
        early = ledger.tree_head(RUN, 2)
    assert found(path, heads) == []
    assert found(older, None) == []
    assert found(older, heads) == [(RUN, None, "rollback"), ("later", None, "rollback")]
    assert found(older, heads, RUN) == [(RUN, None, "rollback")]
    assert found(older, heads[1], "later") == [("later", None, "rollback")]
    assert found(older, early) == []


def test_a_run_that_was_rebuilt_from_its_first_entry_on_is_found_by_a_head_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "agent.db", tmp_path / "other.db"
    for place in (path, other):
        with AgentRunLedger(place) as ledger:
            steps(ledger, RUN, 3)
            head = ledger.tree_head(RUN)
            heads = [ledger.tree_head(RUN, size).note(SIGNER) for size in (1, 5, head.size)]
        if place == path:
            kept = heads
    assert found(path, kept) == []
    assert found(other, None) == []
    assert found(other, kept) == [(RUN, 1, "fork"), (RUN, 5, "fork"), (RUN, head.size, "fork")]


def test_a_run_that_goes_on_from_an_older_copy_is_found_where_it_parted(tmp_path: Path) -> None:
    path, fork = tmp_path / "agent.db", tmp_path / "fork.db"
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 2, ends=False)
        shared = ledger.tree_head(RUN)
    shutil.copyfile(path, fork)
    for place in (path, fork):
        with AgentRunLedger(place) as ledger:
            steps(ledger, RUN, 4)
    with AgentRunLedger(path) as ledger:
        last = ledger.tree_head(RUN)
    assert found(fork, None) == []
    assert found(fork, [shared]) == []
    assert found(fork, [shared, last]) == [(RUN, last.size, "fork")]


def test_a_log_that_was_cut_at_its_end_is_found(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 2, ends=False)
        head = ledger.tree_head(RUN)
    with raw(path, without_triggers=True) as connection:
        connection.execute("DELETE FROM entries WHERE seq = ?", (head.size,))
    assert found(path, None) == []
    assert found(path, head) == [(RUN, None, "rollback")]


def test_the_empty_tree_is_before_every_run(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 1)
    assert found(path, TreeHead(RUN, 0, merkle.EMPTY_ROOT)) == []
    assert found(path, TreeHead(RUN, 0, ROOT)) == [(RUN, 0, "fork")]


def test_what_is_no_head_or_not_signed_as_it_should_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 1)
        head = ledger.tree_head(RUN)
        for against, key in (
            ("", None),
            ("\n\n", None),
            ([], None),
            ("hello", None),
            (head.note(), SIGNER.verifier),
            (head.note(OTHER), SIGNER.verifier),
            ([head.note(SIGNER), head], SIGNER.verifier),
            (head.note(SIGNER).replace(f"\n{head.size}\n", "\n1\n"), SIGNER.verifier),
            (head.note(SIGNER), "no key"),
            (head.note(SIGNER), SIGNER.key),
        ):
            with pytest.raises(BadNote):
                ledger.verify(against=against, key=key)
        with pytest.raises(ValueError, match="give both"):
            ledger.verify(key=SIGNER.verifier)
        with pytest.raises(ValueError, match="none of run 'other'"):
            ledger.verify("other", head)
        with pytest.raises(RunNotFound):
            ledger.verify("other")
        with pytest.raises(TypeError, match="against="):
            ledger.verify(against=[7])  # type: ignore[list-item]


# --- the log of heads -------------------------------------------------------------------------------------------------


def heads_in(path: Path) -> list[tuple[str, int]]:
    verifier = Verifier(SIGNER.verifier)
    read = []
    for note in notes(path.read_text()):
        verifier.check(note)
        head = TreeHead.read(note.text)
        read.append((head.run_id, head.size))
    return read


def test_a_head_is_added_when_a_run_ends(tmp_path: Path) -> None:
    log, path = tmp_path / "heads.log", tmp_path / "agent.db"
    with AgentRunLedger(path, heads=HeadLog(log, SIGNER)) as ledger:
        steps(ledger, RUN, 2, ends=False)
        steps(ledger, "ended", 1)
        steps(ledger, "cancelled", 1, ends=False)
        ledger.cancel("cancelled")
        sizes = {run.run_id: ledger.tree_head(run.run_id).size for run in ledger.runs()}
    assert heads_in(log) == [("ended", sizes["ended"]), ("cancelled", sizes["cancelled"])]
    assert found(path, log.read_text()) == []


def test_a_pipeline_and_an_async_agent_have_heads_too(tmp_path: Path) -> None:
    log = HeadLog(tmp_path / "heads.log", SIGNER)
    with RunLedger("pipeline", tmp_path / "agent.db", heads=log) as pipeline:
        pipeline.step(name="one")(lambda: 1)
        pipeline.execute()
    with AgentRunLedger(tmp_path / "agent.db", heads=log) as ledger:

        @ledger.tool(effect=Effect.READ)
        async def look() -> int:
            return 1

        @ledger.agent()
        async def agent() -> int:
            return await look()

        assert ledger.run(agent, run_id="async") == 1
    assert [run_id for run_id, _ in heads_in(tmp_path / "heads.log")] == ["pipeline", "async"]


@pytest.mark.parametrize("durability", ["full", "process"])
def test_with_every_n_entries_a_run_has_a_head_not_far_behind(tmp_path: Path, durability: Any) -> None:
    log, path = tmp_path / "heads.log", tmp_path / "agent.db"
    with AgentRunLedger(path, heads=HeadLog(log, SIGNER, every=5), durability=durability) as ledger:
        steps(ledger, RUN, 20, ends=False)
    sizes = [size for _, size in heads_in(log)]
    assert sizes[-1] == 40
    assert sizes == sorted(set(sizes))
    assert all(size % 5 in (0, 1) for size in sizes)
    assert found(path, log.read_text()) == []


def test_what_is_signed_already_is_not_signed_again(tmp_path: Path) -> None:
    log = HeadLog(tmp_path / "heads.log", SIGNER)
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 2)
        head = ledger.tree_head(RUN)
        assert log.add(ledger, RUN, 3) == ledger.tree_head(RUN, 3).note(SIGNER)
        assert log.add(ledger, RUN, 2) is None
        assert log.add(ledger, RUN) == head.note(SIGNER)
        for again in (log, HeadLog(tmp_path / "heads.log", SIGNER)):
            assert again.add(ledger, RUN) is None
            assert again.add(ledger, RUN, 1) is None
    assert heads_in(tmp_path / "heads.log") == [(RUN, 3), (RUN, head.size)]


@pytest.fixture(params=["the same process", "another process"])
def signing(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], HeadLog]:
    """The log, as it is in the process that has signed before, or as a new one opens it."""
    log = HeadLog(tmp_path / "heads.log", SIGNER)
    return lambda: log if request.param == "the same process" else HeadLog(tmp_path / "heads.log", SIGNER)


def test_the_signer_refuses_a_run_that_was_rolled_back(tmp_path: Path, signing: Callable[[], HeadLog]) -> None:
    path, older = tmp_path / "agent.db", tmp_path / "older.db"
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 1, ends=False)
    shutil.copyfile(path, older)
    with AgentRunLedger(path) as ledger:
        steps(ledger, RUN, 2)
        signing().add(ledger, RUN)
    before = (tmp_path / "heads.log").read_bytes()
    with AgentRunLedger(older) as ledger, pytest.raises(HeadRefused, match="rolled back") as refused:
        signing().add(ledger, RUN)
    assert refused.value.run_id == RUN
    assert (tmp_path / "heads.log").read_bytes() == before


@pytest.mark.parametrize("count", [2, 5])
def test_the_signer_refuses_another_past_of_a_run_as_long_or_longer(
    tmp_path: Path, signing: Callable[[], HeadLog], count: int
) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 2)
        signing().add(ledger, RUN)
    before = (tmp_path / "heads.log").read_bytes()
    with AgentRunLedger(tmp_path / "rebuilt.db") as ledger:
        steps(ledger, RUN, count)
        for size in (None, 2):
            with pytest.raises(HeadRefused, match="not those that are signed for"):
                signing().add(ledger, RUN, size)
        steps(ledger, "another", 1)
        assert signing().add(ledger, "another") is not None
    assert (tmp_path / "heads.log").read_bytes().startswith(before)


def test_a_run_that_grows_while_its_head_is_signed_is_no_contradiction(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 1, ends=False)
        log = HeadLog(tmp_path / "heads.log", SIGNER)
        true_head = ledger.tree_head

        def head_and_on(run_id: str, size: int | None = None) -> TreeHead:
            head = true_head(run_id, size)
            if size is None:
                steps(ledger, RUN, len(ledger.steps(RUN)) + 1, ends=False)
            return head

        ledger.tree_head = head_and_on  # type: ignore[method-assign]
        for _ in range(3):
            assert log.add(ledger, RUN) is not None
    assert heads_in(tmp_path / "heads.log") == [(RUN, 3), (RUN, 5), (RUN, 7)]


def test_what_a_crash_left_of_a_note_is_cut_off_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "heads.log"
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        for count in (1, 2):
            steps(ledger, RUN, count, ends=False)
            HeadLog(path, SIGNER).add(ledger, RUN)
        whole = path.read_bytes()
        first = whole.index(b"\n\n", whole.index(b"\n\n") + 2) + 2
        for cut in range(first, len(whole)):
            path.write_bytes(whole[:cut])
            assert HeadLog(path, SIGNER).add(ledger, RUN) is not None
            assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "other",
    [
        b"-- my notes\n\nnot a log",
        b"SQLite format 3\0" + bytes(5000),
        b"agent-run-ledger/run/r\r\n3\r\n",
        b"PRIVATE+KEY+x\n",
    ],
    ids=["notes", "a database", "other line ends", "a key"],
)
def test_what_is_no_log_of_heads_is_not_touched(tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "heads.log"
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 1)
        HeadLog(tmp_path / "own.log", SIGNER).add(ledger, RUN)
        for held in (other, (tmp_path / "own.log").read_bytes().replace(b"\n", b"\r\n")):
            path.write_bytes(held)
            with pytest.raises(BadNote, match="no log of heads"):
                HeadLog(path, SIGNER).add(ledger, RUN)
            assert path.read_bytes() == held


def test_heads_of_a_deleted_run_are_told_apart(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 2)
        early, late = ledger.tree_head(RUN, 2), ledger.tree_head(RUN)
        ledger.gc(0, by="ann", reason="old")
        report = ledger.verify(against=[early, late])
    assert (report.ok, report.heads, report.unheld) == (True, 1, 1)


def test_many_threads_and_two_logs_of_one_file_sign_one_history(tmp_path: Path) -> None:
    logs = [HeadLog(tmp_path / "heads.log", SIGNER) for _ in range(2)]
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        steps(ledger, RUN, 6)
        threads = [
            threading.Thread(target=lambda log=log, size=size: log.add(ledger, RUN, size))  # type: ignore[misc]
            for size in range(1, 11)
            for log in logs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    sizes = [size for _, size in heads_in(tmp_path / "heads.log")]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 10


def test_heads_go_to_standard_output_where_programs_that_ship_logs_find_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with AgentRunLedger(tmp_path / "agent.db", heads=HeadLog("-", SIGNER)) as ledger:
        steps(ledger, RUN, 1)
        head = ledger.tree_head(RUN)
    assert capsys.readouterr().out == head.note(SIGNER) + "\n"


def test_a_log_that_cannot_be_written_ends_no_run_and_is_told_as_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "no folder" / "heads.log"
    with AgentRunLedger(tmp_path / "agent.db", heads=HeadLog(nowhere, SIGNER)) as ledger:
        steps(ledger, RUN, 1)
        assert ledger.get_run(RUN).status == "COMPLETED"
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "'october'" in record.getMessage()
    assert "no folder" in record.getMessage()


def test_a_log_of_heads_is_one_and_every_is_a_number_of_entries(tmp_path: Path) -> None:
    for wrong in (0, -1, 1.5, True, "7"):
        with pytest.raises(ValueError, match="every is a number of entries"):
            HeadLog(tmp_path / "heads.log", SIGNER, every=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="heads is a HeadLog"):
        AgentRunLedger(tmp_path / "agent.db", heads="heads.log")  # type: ignore[arg-type]
    assert not os.path.exists(tmp_path / "heads.log")


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    with AgentRunLedger("agent.db") as ledger:
        steps(ledger, RUN, 2)
        steps(ledger, "other", 1)
    return Shell(capsys, monkeypatch)


def test_a_key_is_made_signs_a_head_and_checks_it(shell: Shell) -> None:
    status, public, err = shell("keygen", "billing-host", "--out", "head.key")
    assert (status, err) == (0, "")
    assert os.stat("head.key").st_mode & 0o777 == 0o600
    assert "File exists" in shell.refused("keygen", "billing-host", "--out", "head.key")
    status, note, _ = shell("--db", "agent.db", "head", RUN, "--sign", "head.key")
    assert status == 0
    Path("kept").write_text(note)
    Path("public").write_text(public)
    assert shell("--db", "agent.db", "verify", "--against", "kept", "--key", public.strip())[0] == 0
    status, out, _ = shell("--db", "agent.db", "verify", "--against", "kept", "--key", "@public")
    assert status == 0
    assert "no findings, held to 1 kept head over 6 entries\n" in out
    assert "with another key" in shell.refused(
        "--db", "agent.db", "verify", "--against", "kept", "--key", OTHER.verifier
    )
    assert "give both" in shell.refused("--db", "agent.db", "verify", "--key", "@public")


def test_heads_of_all_runs_are_added_to_a_log_once(shell: Shell) -> None:
    shell("keygen", "billing-host", "--out", "head.key")
    status, out, err = shell("--db", "agent.db", "head", "--sign", "head.key", "--log", "heads.log")
    assert (status, err) == (0, "")
    assert Path("heads.log").read_text() == out
    assert out.count("agent-run-ledger/run/") == 2
    status, out, err = shell("--db", "agent.db", "head", "--sign", "head.key", "--log", "heads.log")
    assert (status, out) == (0, "")
    assert "nothing new of run 'october'" in err
    shown = shell.json("--db", "agent.db", "head", "--sign", "head.key", "--log", "heads.log")["heads"]
    assert [each["note"] for each in shown] == [None, None]
    assert shell("--db", "agent.db", "verify", "--against", "heads.log")[0] == 0


def test_one_damaged_run_keeps_no_other_from_having_a_head(shell: Shell) -> None:
    with raw(Path("agent.db"), without_triggers=True) as connection:
        connection.execute("UPDATE entries SET roots = x'00' WHERE run_id = 'october'")
    status, out, err = shell("--db", "agent.db", "head")
    assert status == 1
    assert "run/other\n" in out
    assert "october" not in out
    assert err.startswith("PROBLEM: run 'october'")
    first, second = shell.json("--db", "agent.db", "head")["heads"]
    assert (first["note"], second["trouble"]) == (None, None)
    assert "verify" in first["trouble"]
    assert "'october'" in shell.refused("--db", "agent.db", "head", RUN)


def test_a_fork_and_a_rollback_are_found_with_exit_status_1(shell: Shell) -> None:
    Path("kept").write_text(shell("--db", "agent.db", "head")[1])
    os.rename("agent.db", "old.db")
    with AgentRunLedger("agent.db") as ledger:
        steps(ledger, RUN, 2)
    status, out, _ = shell("--db", "agent.db", "verify", "--against", "kept")
    assert status == 1
    assert "fork" in out
    assert "rollback" in out
    report = shell.json("--db", "agent.db", "verify", "--against", "kept")
    assert report["heads"] == 2
    assert {(each["run_id"], each["code"]) for each in report["findings"]} == {(RUN, "fork"), ("other", "rollback")}


def test_prove_prints_what_rfc_9162_verifies(shell: Shell) -> None:
    proved = shell.json("--db", "agent.db", "prove", RUN, "3")
    nodes = [bytes.fromhex(node) for node in proved["proof"]]
    leaf, root = bytes.fromhex(proved["leaf_hash"]), bytes.fromhex(proved["root"])
    assert merkle.verify_inclusion(leaf, proved["index"], proved["size"], nodes, root)
    grown = shell.json("--db", "agent.db", "prove", RUN, "--since", "3")
    roots = bytes.fromhex(grown["root1"]), bytes.fromhex(grown["root"])
    assert merkle.verify_consistency(grown["size1"], grown["size"], [bytes.fromhex(n) for n in grown["proof"]], *roots)
    status, out, _ = shell("--db", "agent.db", "prove", RUN, "3", "--size", "4")
    assert status == 0
    assert "leaf hash:" in out
    assert (
        b64encode(
            bytes.fromhex(shell.json("--db", "agent.db", "head", RUN, "--size", "4")["heads"][0]["root"])
        ).decode()
        in out
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prove", RUN, "99"], "number of one of the 6 entries"),
        (["prove", RUN, "3", "--size", "99"], "has 6"),
        (["prove", RUN], "required"),
        (["prove", "nobody", "1"], "no run 'nobody'"),
        (["head", "nobody"], "no run 'nobody'"),
        (["head", "--size", "3"], "name it"),
        (["head", RUN, "--log", "heads.log"], "give --sign"),
        (["head", RUN, "--sign", "no such file"], "No such file"),
        (["head", RUN, "--sign", "agent.db"], "no private key"),
        (["verify", "--against", "no such file"], "No such file"),
        (["verify", "--against", "agent.db"], "this proves nothing"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(shell: Shell, words: list[str], says: str) -> None:
    assert says in shell.refused("--db", "agent.db", *words)


def test_a_head_that_contradicts_the_log_is_refused(shell: Shell) -> None:
    shell("keygen", "billing-host", "--out", "head.key")
    shell("--db", "agent.db", "head", "--sign", "head.key", "--log", "heads.log")
    with AgentRunLedger("rebuilt.db") as ledger:
        steps(ledger, RUN, 3)
    before = Path("heads.log").read_text()
    assert "not those that are signed for" in shell.refused(
        "--db", "rebuilt.db", "head", RUN, "--sign", "head.key", "--log", "heads.log"
    )
    assert Path("heads.log").read_text() == before
