"""Conversations are kept once: what a run repeats costs next to nothing, whoever goes on with it, and whatever becomes of it."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, Encryption, ReplayDivergence, StoreCorrupt, verify_bundle
from agent_run_ledger.contract import PACKED, PACKED_AES_GCM
from agent_run_ledger.drivers import reading
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.testing import crashtest
from support.ledgers import GOAL, RUN, Bench, Died, never, program, raising, raw
from support.processes import child
from support.talking import as_payload, message, noise, text

Text = Callable[[random.Random, int], str]
KINDS = ("sqlite", "postgres")
Messages = list[dict[str, str]]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(request.param, tmp_path) as opened:
        yield opened


class Talk:
    """A model that is asked again and again, each time with all that was said before, and the bytes that are new in that."""

    def __init__(self, said: Text, size: int, window: int | None = None) -> None:
        self._said, self._size, self._window = said, size, window
        self._rng = random.Random(5)
        self.messages: Messages = []
        self.asked: list[Messages] = []
        self.answers: list[str] = []
        self.new = 0

    def turn(self, ledger: AgentRunLedger, run_id: str = RUN) -> None:
        """One more answer of so many bytes, which is in what is asked next."""
        answer = self._said(self._rng, self._size)
        asked = self.messages
        assert (
            ledger.execute_step(run_id, "ask", {"messages": asked}, lambda messages: answer, effect=Effect.READ)
            == answer
        )
        self.new += len(answer)
        self.asked.append(asked)
        self.answers.append(answer)
        self.messages = [*asked, message("assistant" if len(self.answers) % 2 else "user", answer)][
            -(self._window or sys.maxsize) :
        ]

    def replay(self, ledger: AgentRunLedger, run_id: str = RUN) -> None:
        """Every call is answered from the log, byte for byte."""
        for asked, answer in zip(self.asked, self.answers, strict=True):
            found = ledger.execute_step(run_id, "ask", {"messages": asked}, never, effect=Effect.READ)
            assert found == answer


def arguments_of(ledger: AgentRunLedger, run_id: str = RUN) -> list[bytes]:
    return [(step.arguments_json or "").encode() for step in ledger.steps(run_id)]


def outputs_of(ledger: AgentRunLedger, run_id: str = RUN) -> list[Any]:
    return [json.loads(step.output_json or "null") for step in ledger.steps(run_id)]


def size_on_disk(path: Path) -> int:
    """Of the database and its log, once it is closed."""
    return sum(each.stat().st_size for each in (path, path.with_name(path.name + "-wal")) if each.exists())


def kept_by(bench: Bench, run_id: str = RUN) -> int:
    """How many bytes of payloads the storage has of a run."""
    if bench.kind == "memory":
        return sum(len(row.payload or b"") for row in bench.store().read(run_id))
    ((inline, beside),) = bench.ask(
        f"SELECT (SELECT sum(length(payload)) FROM entries WHERE run_id = '{run_id}'), "
        f"(SELECT coalesce(sum(length(bytes)), 0) FROM payloads WHERE run_id = '{run_id}')"
    )
    return int(inline + beside)


# --- how large it gets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [text, noise])
def test_a_hundred_steps_with_50_kb_of_new_text_each_take_less_than_what_is_new(said: Text, tmp_path: Path) -> None:
    talk, path = Talk(said, 50_000), tmp_path / "agent.db"
    with AgentRunLedger(path, durability="process", max_steps=200) as ledger:
        ledger.create_run(GOAL, RUN)
        for _ in range(100):
            talk.turn(ledger)
        ledger.finish_run(RUN)
    assert talk.new == 5_000_000
    assert size_on_disk(path) < 0.75 * talk.new


PER_TURN = 1_750
"""Bytes that two entries take, whatever they say: bodies, roots, digests, the index, and what is left over of a page."""


@pytest.mark.slow
@pytest.mark.parametrize("said", [text, noise])
@pytest.mark.parametrize(("size", "most"), [(1_000, 2.5), (2_000, 1.6), (4_000, 1.2)])
def test_a_conversation_of_a_thousand_turns_takes_little_more_than_is_said_in_it(
    said: Text, size: int, most: float, tmp_path: Path
) -> None:
    talk, path = Talk(said, size), tmp_path / "agent.db"
    with AgentRunLedger(path, durability="process", max_steps=2000) as ledger:
        ledger.create_run(GOAL, RUN)
        for _ in range(1_000):
            talk.turn(ledger)
        ledger.finish_run(RUN)
        assert ledger.verify().findings == []
    assert size_on_disk(path) < min(most * talk.new, 0.7 * talk.new + PER_TURN * 1_000 + 100_000)


@pytest.mark.parametrize("window", [None, 100])
def test_a_conversation_grows_by_what_is_new_whether_it_is_sent_whole_or_its_last_messages(
    bench: Bench, window: int | None
) -> None:
    talk = Talk(noise, 2_000, window)
    ledger = program(bench, max_steps=400)
    grown = []
    for _ in range(3):
        for _ in range(100):
            talk.turn(ledger)
        grown.append(kept_by(bench))
    hundred = 0.75 * 100 * 2_000
    assert (grown[0] < hundred, grown[1] - grown[0] < hundred, grown[2] - grown[1] < hundred) == (True, True, True)


def test_a_document_that_is_passed_along_is_kept_once(bench: Bench) -> None:
    rng = random.Random(2)
    ledger = program(bench)
    page = ledger.execute_step(RUN, "fetch", {}, lambda: noise(rng, 50_000))
    for number in range(10):
        asked = {"page": page, "question": f"what is {number}?", "sources": [{"id": 7, "text": page}]}
        assert ledger.execute_step(RUN, "ask", asked, lambda page, question, sources: page) == page
    assert kept_by(bench) < 0.65 * 50_000
    assert ledger.verify().findings == []


def test_short_values_are_kept_as_they_are(bench: Bench) -> None:
    ledger = program(bench)
    for number in range(20):
        ledger.execute_step(RUN, "look", {"n": number, "text": f"{number} " * 1_000}, lambda n, text: text)
    assert {row.encoding for row in bench.store().read(RUN)} == {None}


# --- whoever goes on with it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 30])
def test_a_program_that_takes_a_conversation_over_goes_on_as_cheaply_and_replays_it_byte_for_byte(
    bench: Bench, window: int | None
) -> None:
    talk = Talk(noise, 3_000, window)
    for _ in range(5):
        ledger = program(bench, max_steps=400)
        talk.replay(ledger)
        before = kept_by(bench)
        for _ in range(20):
            talk.turn(ledger)
        # 0.57 of what is said, and once what the first list began with
        assert kept_by(bench) - before < 20 * 3_000 * 0.75
    talk.replay(program(bench))
    ledger = bench.open()
    assert arguments_of(ledger) == [as_payload({"messages": each}) for each in talk.asked]
    assert ledger.verify().findings == []


def test_a_fresh_process_goes_on_with_a_conversation_as_cheaply(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    script = """
import sys
from agent_run_ledger import AgentRunLedger
from support.ledgers import never
from test_conversations import Talk, noise
talk, ledger = Talk(noise, 4_000), AgentRunLedger(sys.argv[1], durability="process", max_steps=400)
ledger.create_run("go on", "run")
for turn in range(int(sys.argv[2]) + 30):
    if turn == int(sys.argv[2]):
        tell(turn)
    talk.turn(ledger)
tell("done")
hear()
"""
    sizes = []
    for done in (0, 30, 60):
        with child(script, path, done) as process:
            assert [process.hear(), process.hear()] == [done, "done"]
            process.kill()
        with closing(sqlite3.connect(path)) as connection:
            sizes.append(connection.execute("SELECT sum(length(payload)) FROM entries").fetchone()[0])
    assert [sizes[0] < 90_000, sizes[1] - sizes[0] < 90_000, sizes[2] - sizes[1] < 90_000] == [True] * 3


def test_an_owner_who_was_replaced_meanwhile_copies_from_nothing_that_is_not_there(bench: Bench) -> None:
    first, second = bench.open(), None
    talk = Talk(noise, 5_000)
    first.create_run(GOAL, RUN)
    for _ in range(3):
        talk.turn(first)
    for _ in range(3):
        bench.owners_die()
        second, first = first, bench.open() if second is None else second
        first.create_run(GOAL, RUN)
        talk.replay(first)
        talk.turn(first)
    talk.replay(program(bench))
    assert bench.open().verify().findings == []


@pytest.mark.slow
def test_a_conversation_that_is_killed_at_any_boundary_goes_on_byte_for_byte() -> None:
    def flow(ledger: AgentRunLedger) -> list[str]:
        rng, messages = random.Random(1), [message("system", text(random.Random(9), 5_000))]
        with ledger.open_run("talk", "talk") as run:
            for _ in range(4):
                answer = text(rng, 3_000)
                said = run.step(
                    "ask", {"messages": messages}, lambda messages, answer=answer: answer, effect=Effect.READ
                )
                messages = [*messages, message("assistant", said)]
            run.result = [each["content"] for each in messages]
        return [each["content"] for each in messages]

    report = crashtest(flow, kill=True)
    report.check()
    assert report.boundaries > 12


@pytest.mark.slow
def test_who_is_killed_between_two_entries_leaves_a_conversation_that_replays(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    script = """
import sys
from agent_run_ledger import AgentRunLedger
from test_conversations import Talk, text
talk, ledger = Talk(text, 6_000), AgentRunLedger(sys.argv[1], durability="process", max_steps=400)
ledger.create_run("go on", "run")
while True:
    talk.turn(ledger)
    tell(len(talk.answers))
"""
    for at_least in (5, 12, 30):
        with child(script, path) as process:
            while process.hear() < at_least:
                pass
            process.kill()
    with AgentRunLedger(path) as ledger:
        assert ledger.verify().findings == []
        talk = Talk(text, 6_000)
        for step in ledger.steps(RUN):
            assert (step.arguments_json or "").encode() == as_payload({"messages": talk.messages})
            answer = text(talk._rng, 6_000)
            assert step.output_json in (json.dumps(answer), None)
            talk.messages = [*talk.messages, message("user" if len(talk.messages) % 2 else "assistant", answer)]
        assert len(talk.messages) >= 30


# --- what becomes of it -----------------------------------------------------------------------------------------------


def talked(ledger: AgentRunLedger, said: Text = text, size: int = 3_000, turns: int = 8) -> Talk:
    """A conversation that has ended."""
    talk = Talk(said, size)
    ledger.create_run(GOAL, RUN)
    for _ in range(turns):
        talk.turn(ledger)
    ledger.finish_run(RUN, "said")
    return talk


def test_an_encrypted_conversation_is_kept_once_and_shows_nothing(tmp_path: Path) -> None:
    encryption = Encryption(key_id="k", key={"k": b"k" * 32}.__getitem__)
    with Bench("sqlite", tmp_path) as bench:
        talk = talked(bench.open(encryption=encryption), size=10_000)
        assert kept_by(bench) < 0.9 * talk.new
        assert {row.encoding for row in bench.store().read(RUN)} >= {PACKED_AES_GCM}
        held = bench.path.read_bytes()
        assert not any(each[100:120].encode() in held for each in talk.answers)
        ledger = bench.open(encryption=encryption)
        assert outputs_of(ledger) == talk.answers
        assert ledger.verify().findings == []
        without = bench.open().verify()
        assert (without.findings, without.unchecked > 10) == ([], True)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("forgotten", [1, 4, 8])
def test_one_step_is_forgotten_and_the_others_are_read_byte_for_byte(
    bench: Bench, forgotten: int, is_encrypted: bool
) -> None:
    encryption = Encryption(key_id="k", key={"k": b"k" * 32}.__getitem__) if is_encrypted else None
    ledger = bench.open(encryption=encryption)
    talk = talked(ledger)
    secret = f"my number is {forgotten} 7718 2049"
    ledger.create_run(GOAL, "other")
    for number in range(1, 9):
        said = secret if number == forgotten else "nothing"
        messages = [message("user", said * 30 + each["content"]) for each in talk.asked[-1][:number]]
        ledger.execute_step("other", "ask", {"messages": messages}, lambda messages: messages, effect=Effect.READ)
    ledger.finish_run("other")
    before = {run_id: bench.open(encryption=encryption).steps(run_id) for run_id in (RUN, "other")}
    for run_id in (RUN, "other"):
        ledger.forget(run_id, forgotten, by="ann")
        for reader in (ledger, bench.open(encryption=encryption)):
            steps = reader.steps(run_id)
            for was, step in zip(before[run_id], steps, strict=True):
                is_gone = step.step_number == forgotten
                said = (was.arguments_json, was.output_json)
                assert (step.arguments_json, step.output_json) == ((None, None) if is_gone else said)
            assert reader.verify(run_id).findings == []
    # once all is forgotten nothing has anything to copy from
    for number in range(1, 9):
        ledger.forget("other", number, by="ann")
    assert ledger.verify().findings == []


def test_what_only_the_forgotten_step_held_is_gone_from_the_file_however_it_was_packed(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        ledger.create_run(GOAL, RUN)
        rng = random.Random(4)
        parts = [noise(rng, 2_000) for _ in range(6)]
        for number in range(5):
            ledger.execute_step(
                RUN, "look", {"parts": parts[number : number + 2], "all": text(rng, 5_000)}, lambda parts, all: None
            )
        ledger.finish_run(RUN)
        assert any(row.encoding == PACKED for row in bench.store().read(RUN))
        ledger.forget(RUN, 1, by="ann")
        with bench.open() as other:
            assert [step.arguments_json is None for step in other.steps(RUN)] == [True, False, False, False, False]
            whole = b"".join(row.payload or b"" for row in packed(bench.store()).read(RUN))
        inflated = as_far_as_it_inflates(bench)
        assert parts[0].encode() not in inflated
        assert parts[1].encode() in whole, "the second step holds it, too"
        assert parts[1].encode() in inflated


def as_far_as_it_inflates(bench: Bench) -> bytes:
    from agent_run_ledger.stores.packing import decode

    with closing(bench.store()) as store:
        rows = store.read(RUN)
    return b"".join(
        decode(row.seq, row.payload).own if row.encoding == PACKED and row.payload else row.payload or b""
        for row in rows
    )


@pytest.mark.parametrize(
    "kinds",
    [("sqlite", "postgres"), ("postgres", "sqlite"), ("sqlite", "memory"), ("memory", "sqlite")],
    ids="-to-".join,
)
def test_a_conversation_is_exported_imported_and_copied_and_is_packed_there(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    with Bench(kinds[0], tmp_path / "here") as here, Bench(kinds[1], tmp_path / "there") as there:
        ledger, target = here.open(), there.open()
        talk = talked(ledger)
        path = tmp_path / "talk.arl"
        ledger.export(RUN, path, secret=True)
        assert verify_bundle(path).findings == []
        assert path.stat().st_size > 4 * talk.new, "a bundle needs nothing but itself"
        target.import_run(path)
        assert target.verify().findings == []
        assert there.rows(RUN) == here.rows(RUN)
        assert kept_by(there) < 1.1 * talk.new
        ledger.create_run(GOAL, "open")
        going_on = Talk(text, 3_000)
        for _ in range(4):
            going_on.turn(ledger, "open")
        ledger.copy("open", target)
        target.create_run(GOAL, "open")
        going_on.replay(target, "open")
        for _ in range(4):
            going_on.turn(target, "open")
        target.copy("open", ledger)  # and back, behind what stands here
        ledger.create_run(GOAL, "open")
        going_on.replay(ledger, "open")
        going_on.turn(ledger, "open")
        assert outputs_of(ledger, "open") == going_on.answers
        assert arguments_of(ledger, "open") == [as_payload({"messages": each}) for each in going_on.asked]
        assert kept_by(here, "open") < going_on.new
        assert ledger.verify().findings == []


def test_a_backup_and_a_fork_of_a_conversation_are_whole(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        talk = talked(ledger)
        ledger.fork(RUN, 5, by="ann", new_run_id="forked")
        assert outputs_of(ledger, "forked") == talk.answers[:4]
        assert kept_by(bench, "forked") < talk.new
        assert ledger.backup(tmp_path / "backup.db").ok
        with AgentRunLedger.open_read_only(tmp_path / "backup.db") as copy:
            assert outputs_of(copy) == talk.answers
            assert copy.verify().findings == []


def test_a_divergence_in_a_conversation_names_the_place(bench: Bench) -> None:
    talk = Talk(text, 3_000)
    ledger = program(bench)
    for _ in range(4):
        talk.turn(ledger)
    ledger = program(bench)
    talk.asked[3] = [*talk.asked[3][:1], message("user", "something else"), *talk.asked[3][2:]]
    with pytest.raises(ReplayDivergence, match=r"messages\[1\]\.content"):
        talk.replay(ledger)


def test_arguments_that_are_dispatched_again_are_those_of_the_first_time(bench: Bench) -> None:
    talk = Talk(text, 3_000)
    ledger = program(bench)
    for _ in range(4):
        talk.turn(ledger)
    with pytest.raises(Died):
        ledger.execute_step(RUN, "ask", {"messages": talk.messages}, raising(Died()), effect=Effect.READ)
    ledger = program(bench)
    talk.replay(ledger)
    got: list[Any] = []
    ledger.execute_step(
        RUN, "ask", {"messages": talk.messages}, lambda messages: got.append(messages), effect=Effect.READ
    )
    assert got == [talk.messages]
    intents = [row.payload for row in bench.rows(RUN) if row.kind == "intent"]
    assert intents[-1] == intents[-2] == as_payload({"messages": talk.messages})


# --- what is damaged --------------------------------------------------------------------------------------------------


def test_a_packed_payload_that_was_changed_is_found_and_named_and_whoever_needs_it_is_told(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        with bench.open() as ledger:
            talk = talked(ledger)
        seqs = [row.seq for row in bench.store().read(RUN) if row.encoding == PACKED]
        damaged = seqs[len(seqs) // 2]
        with raw(bench.path, without_triggers=True) as connection:
            ((payload,),) = connection.execute("SELECT payload FROM entries WHERE seq = ?", (damaged,)).fetchall()
            connection.execute(
                "UPDATE entries SET payload = ? WHERE seq = ?", (payload[:-9] + b"\x00" + payload[-8:], damaged)
            )
        with bench.open() as ledger:
            findings = ledger.verify().findings
            assert ("payload", damaged) in {(each.code, each.seq) for each in findings}
            assert {each.seq for each in findings} <= set(seqs[seqs.index(damaged) :])
            with pytest.raises(
                StoreCorrupt, match=f"entry {damaged}: its payload is packed and cannot be put together"
            ):
                ledger._store.payload(RUN, damaged)
            outputs = outputs_of(ledger)
            assert outputs[:2] == talk.answers[:2]


def test_the_ledger_of_a_run_reads_what_it_packed_through_the_same_store(bench: Bench) -> None:
    """What looks past the store that packs sees packed payloads, so nothing but `verify` may."""
    ledger = bench.open()
    talked(ledger)
    assert {row.encoding for row in ledger._store.read(RUN)} == {None}
    assert PACKED in {row.encoding for row in reading.behind(ledger._store).read(RUN)}
