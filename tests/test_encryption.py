"""Encryption at rest: no text of a user stands in the storage, everything works as without it, and without the key it is said so."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    Encryption,
    InvalidArguments,
    KeyUnavailable,
    Run,
    Step,
    StepFailed,
    StoreCorrupt,
)
from agent_run_ledger.contract import AES_GCM, PACKED_AES_GCM, Row, Store
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.encrypted import encrypted
from agent_run_ledger.stores.encryption import RunCipher
from agent_run_ledger.testing import FakeClock, StoreContract, a_row
from agent_run_ledger.testing.stores.words import LISTING
from support.ledgers import GOAL, RUN, Bench, Died, Tool, never, raising, raw

MARK = "Grace Hopper, 7 Harbour Street"
KEYS = {"2026-10": b"o" * 32, "2026-11": b"n" * 32}


def encryption(key_id: str = "2026-11", keys: dict[str, bytes] = KEYS) -> Encryption:
    return Encryption(key_id=key_id, key=keys.__getitem__)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestEncryptedStore(StoreContract):
    """What is encrypted is a store like any other, but that it seals secrets itself."""

    @pytest.fixture(params=["memory", "sqlite"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
        place = ":memory:" if request.param == "memory" else tmp_path / "ledger.db"
        store = encrypted(open_store(place, durability="process", clock=clock), encryption())
        yield store
        store.close()

    def test_a_sealed_secret_is_put_in_the_place_of_the_one_that_stands_there_and_of_no_plain_one(
        self, store: Store
    ) -> None:
        """That is for the store behind it; this one has `rewrap`."""


def work(ledger: AgentRunLedger, run_id: str = RUN) -> None:
    """A run with its mark wherever a user's text can stand, that has ended."""
    with ledger.open_run(f"write to {MARK}", run_id) as run:
        for size in (1, 100, 9_000):
            assert run.step("look", {"about": MARK * size}, lambda about: {"said": about}) == {"said": MARK * size}
        with pytest.raises(StepFailed):
            run.step("fail", {"to": MARK}, raising(ValueError(MARK)))
        ledger.signal(run_id, "news", {"of": MARK})
        assert run.wait_for("news") == {"of": MARK}
        run.result = {"sent": MARK}


def kept_rows(bench: Bench, run_id: str = RUN) -> list[Row]:
    return bench.store().read(run_id)


# --- as without it ----------------------------------------------------------------------------------------------------


def test_nothing_of_a_user_stands_in_the_storage_and_everything_is_read_as_it_was(bench: Bench) -> None:
    ledger = bench.open(encryption=encryption())
    work(ledger)
    rows = kept_rows(bench)
    assert {row.encoding for row in rows if row.payload is not None} == {AES_GCM, PACKED_AES_GCM}
    assert MARK not in repr(rows)
    assert MARK.encode() not in b"".join(request.payload for request in bench.store().inbox(RUN, 0))
    record = ledger.get_run(RUN)
    assert (record.goal, record.result) == (f"write to {MARK}", {"sent": MARK})
    steps = ledger.steps(RUN)
    assert steps[0].arguments_json == json.dumps({"about": MARK}, separators=(",", ":"))
    assert steps[3].error_message == f"ValueError: {MARK}"
    assert ledger.verify().findings == []
    assert (ledger.verify().unchecked, ledger.verify().ok) == (0, True)


def test_a_file_holds_no_byte_of_it(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db", encryption=encryption()) as ledger:
        work(ledger)
        with pytest.raises(ValueError, match=MARK), ledger.open_run(GOAL, "parked"):
            raise ValueError(MARK)
        ledger.create_run(MARK, "diverges")
        ledger.execute_step("diverges", "look", {"at": MARK}, lambda at: at)
        ledger.detach("diverges")
        ledger.create_run(MARK, "diverges")
        with pytest.raises(Exception, match=r"diverges|recorded"):
            ledger.execute_step("diverges", "look", {"at": MARK + "!"}, never)
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or MARK.encode() not in file.read_bytes(), file
        assert MARK in str(ledger.get_run("parked").cause)
        with raw(tmp_path / "agent.db") as db:
            for view in ("agent_runs", "run_steps", "agent_step_journal"):
                for row in db.execute(f"SELECT * FROM {view}"):
                    hidden = {"goal", "arguments_json", "output_json", "error_message", "fingerprint", "input_digest"}
                    assert {row[name] for name in hidden & set(row.keys())} == {None}


def test_notes_and_requests_are_encrypted_like_entries_and_hidden_without_the_key(bench: Bench) -> None:
    kept = bench.store()
    store = encrypted(kept, encryption())
    lease = store.create(RUN, "a", 30.0, b"s" * 32, [a_row(1, "created", b"{}")], LISTING)
    assert lease is not None
    store.annotate(RUN, lease.token, f"it diverged at {MARK}")
    store.post(RUN, "signal", MARK.encode(), "ann", 1.5)
    head, hidden = store.head(RUN), kept.head(RUN)
    assert head is not None
    assert hidden is not None
    assert head.note == f"it diverged at {MARK}"
    assert MARK not in str(hidden.note)
    assert [request.payload for request in store.inbox(RUN, 0)] == [MARK.encode()]
    assert MARK.encode() not in kept.inbox(RUN, 0)[0].payload
    blind = encrypted(kept, encryption("2026-10", {"2026-10": b"o" * 32}))
    assert [each.head.note for each in blind.summaries()] == ["(encrypted)"]
    with pytest.raises(KeyUnavailable):
        blind.inbox(RUN, 0)


def test_a_run_that_was_killed_goes_on_and_is_replayed(bench: Bench) -> None:
    def dies() -> None:
        raise Died

    first = bench.open(encryption=encryption())
    first.create_run(GOAL, RUN)
    first.execute_step(RUN, "one", {"long": MARK * 500}, lambda long: long)
    with pytest.raises(Died):
        first.execute_step(RUN, "two", {}, dies, effect=Effect.READ)
    bench.owners_die()
    second = bench.open(encryption=encryption())
    second.create_run(GOAL, RUN)
    assert second.execute_step(RUN, "one", {"long": MARK * 500}, never) == MARK * 500
    assert second.execute_step(RUN, "two", {}, lambda: MARK, effect=Effect.READ) == MARK
    second.finish_run(RUN)
    assert second.verify().findings == []


def test_agents_children_pipelines_forks_and_workers_work_as_without(bench: Bench) -> None:
    ledger = bench.open(encryption=encryption())
    look = Tool(MARK)

    @ledger.tool(effect=Effect.READ)
    def see() -> str:
        return str(look())

    @ledger.agent()
    def child(name: str) -> str:
        return see() + name

    @ledger.agent()
    def parent(run: Run) -> list[str]:
        return [child("a")]

    assert ledger.run(parent, run_id=RUN) == [MARK + "a"]
    assert ledger.run(parent, run_id=RUN) == [MARK + "a"]
    assert look.calls == 1
    fork = ledger.fork(RUN, 2, reason=MARK)
    assert ledger.verify(fork).findings == []
    pipeline = bench.pipeline("pipe", Step("one", lambda: MARK), encryption=encryption())
    assert pipeline.execute() == MARK
    assert MARK not in repr([kept_rows(bench, each.run_id) for each in ledger.runs()])
    assert ledger.verify().findings == []


def test_a_run_that_stood_there_plainly_stays_plain_and_goes_on(bench: Bench) -> None:
    plain = bench.open()
    plain.create_run(MARK, "old")
    plain.execute_step("old", "look", {"n": 1}, lambda n: MARK)
    plain.detach("old")
    ledger = bench.open(encryption=encryption())
    ledger.create_run(MARK, "old")
    assert ledger.execute_step("old", "look", {"n": 1}, never) == MARK
    ledger.execute_step("old", "look", {"n": 2}, lambda n: n)
    assert {row.encoding for row in kept_rows(bench, "old")} == {None}
    assert ledger.verify().findings == []


def test_an_encrypted_run_is_forgotten_like_any(bench: Bench) -> None:
    ledger = bench.open(encryption=encryption())
    work(ledger)
    ledger.forget(RUN, 2)
    assert ledger.verify().findings == []
    ledger.forget(RUN, everything=True)
    assert bench.store().secret(RUN) == b"", "its key goes with its secret"
    assert ledger.verify().findings == []
    assert bench.open().get_run(RUN).goal is None, "there is nothing left to be decrypted"
    bench.clock.advance(1)
    assert len(ledger.gc(0).runs) == 1


def test_a_copy_is_encrypted_where_its_ledger_is(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db", encryption=encryption()) as ledger:
        work(ledger)
        ledger.copy(RUN, tmp_path / "b.db")
    with AgentRunLedger(tmp_path / "b.db", encryption=encryption()) as other:
        assert other.get_run(RUN).result == {"sent": MARK}
        assert other.verify().findings == []
        with AgentRunLedger(tmp_path / "plain.db") as plain:
            other.copy(RUN, plain)
            assert plain.get_run(RUN).result == {"sent": MARK}
            with AgentRunLedger(tmp_path / "c.db", encryption=encryption("2026-10")) as anew:
                plain.copy(RUN, anew)
                assert anew.verify().findings == []
    for name in ("a.db", "b.db", "c.db"):
        assert MARK.encode() not in (tmp_path / name).read_bytes()
    with AgentRunLedger(tmp_path / "b.db") as keyless, AgentRunLedger(tmp_path / "d.db") as other:
        with pytest.raises(KeyUnavailable):
            keyless.copy(RUN, other)
        assert other.runs() == []


def test_a_run_that_was_moved_away_comes_back_under_its_own_key(tmp_path: Path) -> None:
    with (
        AgentRunLedger(tmp_path / "a.db", encryption=encryption()) as ledger,
        AgentRunLedger(tmp_path / "b.db", encryption=encryption()) as other,
    ):
        ledger.create_run(GOAL, RUN)
        ledger.execute_step(RUN, "one", {}, lambda: MARK)
        ledger.detach(RUN)
        ledger.copy(RUN, other)
        other.create_run(GOAL, RUN)
        assert other.execute_step(RUN, "one", {}, never) == MARK
        other.execute_step(RUN, "two", {}, lambda: MARK)
        other.detach(RUN)
        other.copy(RUN, ledger)
        ledger.create_run(GOAL, RUN)
        assert [ledger.execute_step(RUN, name, {}, never) for name in ("one", "two")] == [MARK, MARK]
        assert ledger.verify().findings == []


# --- without the key --------------------------------------------------------------------------------------------------


def keyless(bench: Bench, which: str) -> AgentRunLedger:
    """A ledger that lacks the key of the runs that are there."""
    return bench.open() if which == "none" else bench.open(encryption=encryption("2026-10", {"2026-10": b"o" * 32}))


@pytest.mark.parametrize("which", ["none", "another"])
def test_without_the_key_nothing_is_made_up_and_the_error_says_which_key_it_takes(bench: Bench, which: str) -> None:
    with_key = bench.open(encryption=encryption())
    work(with_key)
    with_key.create_run(GOAL, "open")
    with_key.execute_step("open", "look", {}, lambda: MARK)
    with_key.detach("open")
    ledger = keyless(bench, which)
    calls: list[Callable[[], Any]] = [
        lambda: ledger.get_run(RUN),
        lambda: ledger.steps(RUN),
        lambda: ledger.trace(RUN),
        lambda: ledger.inspect(RUN),
        lambda: ledger.plan("open"),
        lambda: ledger.create_run(GOAL, "open"),
        lambda: ledger.execute_step("open", "look", {}, never),
        lambda: ledger.resume_run("open"),
        lambda: ledger.cancel("open"),
        lambda: ledger.signal("open", "news"),
        lambda: ledger.fork(RUN, 2),
        lambda: ledger.forget(RUN),
        lambda: ledger.explain(RUN),
        lambda: ledger.cost(RUN),
    ]
    for call in calls:
        with pytest.raises(KeyUnavailable, match="2026-11") as caught:
            call()
        assert caught.value.key_id == "2026-11"
    assert [(run.run_id, run.goal, run.result, run.is_damaged) for run in ledger.runs()] == [
        (RUN, None, None, False),
        ("open", None, None, False),
    ]
    assert [each.trouble is not None for each in ledger.cost().runs] == [True, True]
    before = [len(kept_rows(bench, run_id)) for run_id in (RUN, "open")]
    assert before == [len(bench.rows(run_id)) for run_id in (RUN, "open")]


@pytest.mark.parametrize("which", ["none", "another"])
def test_without_the_key_verify_checks_all_the_rest_and_says_what_it_could_not(bench: Bench, which: str) -> None:
    work(bench.open(encryption=encryption()))
    payloads = sum(row.payload is not None for row in kept_rows(bench))
    report = keyless(bench, which).verify()
    assert (report.findings, report.unchecked) == ([], payloads)
    if bench.kind == "sqlite":
        with raw(bench.path, without_triggers=True) as db:
            db.execute("UPDATE entries SET body = replace(body, 'look', 'hook') WHERE seq = 2")
        assert {finding.code for finding in keyless(bench, which).verify().findings} >= {"root"}


def test_a_worker_without_the_key_leaves_the_run_to_one_that_has_it(bench: Bench) -> None:
    with_key, without = bench.open(encryption=encryption()), keyless(bench, "another")
    leases = {}
    for name, ledger in (("without", without), ("with", with_key)):

        @ledger.agent(name="agent")
        def agent(name: str) -> str:
            return name

        leases[name] = agent
    handle = with_key.submit(leases["with"], MARK)
    assert without._store.claim_due("one", 30.0, [_terms("default")], ["agent"], 9) == []
    bench.clock.advance(61)
    (lease,) = with_key._store.claim_due("two", 30.0, [_terms("default")], ["agent"], 9)
    assert (lease.run_id, len(lease.secret)) == (handle.run_id, 32)


def _terms(name: str) -> Any:
    from agent_run_ledger.contract import QueueTerms

    return QueueTerms(name)


# --- what was changed -------------------------------------------------------------------------------------------------


def test_a_payload_that_stands_at_another_place_or_was_changed_is_found(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open(encryption=encryption())
        work(ledger)
        work(ledger, "other")
        for change in (
            "SET payload = (SELECT payload FROM entries WHERE run_id = 'run' AND seq = 4)",
            "SET payload = (SELECT payload FROM entries WHERE run_id = 'other' AND seq = 2)",
            "SET digest = (SELECT digest FROM entries WHERE run_id = 'run' AND seq = 4)",
            "SET payload = x'00'",
            "SET payload = CAST(payload || x'00' AS BLOB)",
        ):
            with closing(sqlite3.connect(bench.path)) as db:
                kept = db.execute("SELECT payload, digest FROM entries WHERE run_id = 'run' AND seq = 2").fetchone()
            with raw(bench.path, without_triggers=True) as changed:
                changed.execute(f"UPDATE entries {change} WHERE run_id = 'run' AND seq = 2")
            assert [(each.seq, each.code) for each in ledger.verify().findings] == [(2, "payload")], change
            with pytest.raises(StoreCorrupt, match="was not encrypted for this entry"):
                bench.open(encryption=encryption()).resume_run(RUN)
            with raw(bench.path, without_triggers=True) as changed:
                changed.execute("UPDATE entries SET payload = ?, digest = ? WHERE run_id = 'run' AND seq = 2", kept)
        assert ledger.verify().findings == []


def test_another_runs_sealed_secret_opens_nothing(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        work(bench.open(encryption=encryption()))
        work(bench.open(encryption=encryption()), "other")
        with raw(bench.path, without_triggers=True) as db:
            db.execute("UPDATE secrets SET secret = (SELECT secret FROM secrets WHERE run_id = 'other')")
        with pytest.raises(KeyUnavailable, match="it was changed"):
            bench.open(encryption=encryption()).get_run(RUN)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_rewrapping_changes_what_the_keys_are_sealed_under_and_no_entry(bench: Bench) -> None:
    old = bench.open(encryption=encryption("2026-10"))
    work(old)
    old.create_run(GOAL, "open")
    old.execute_step("open", "one", {}, lambda: MARK)
    before = kept_rows(bench)
    ledger = bench.open(encryption=encryption("2026-11"))
    assert set(ledger.rewrap().runs) == {RUN, "open"}
    assert ledger.rewrap().runs == ()
    assert kept_rows(bench) == before
    old.execute_step("open", "two", {}, lambda: MARK)  # whoever is at work does not notice
    old.detach("open")
    new = bench.open(encryption=encryption("2026-11", {"2026-11": KEYS["2026-11"]}))
    assert new.get_run(RUN).result == {"sent": MARK}
    assert new.verify().findings == []
    with pytest.raises(KeyUnavailable):
        bench.open(encryption=encryption("2026-10", {"2026-10": KEYS["2026-10"]})).get_run(RUN)


def test_rewrapping_leaves_a_run_whose_key_is_not_here_and_says_so(bench: Bench) -> None:
    work(bench.open(encryption=encryption("2026-10")))
    done = bench.open(encryption=encryption("2026-11", {"2026-11": b"n" * 32})).rewrap()
    assert (done.runs, [run_id for run_id, _ in done.left]) == ((), [RUN])
    with pytest.raises(InvalidArguments, match="without encryption="):
        bench.open().rewrap()


def test_a_key_is_asked_for_once_and_must_be_32_bytes() -> None:
    asked: list[str] = []

    def key(key_id: str) -> bytes:
        asked.append(key_id)
        return KEYS[key_id]

    with _in_memory(key) as ledger:
        for number in range(3):
            work(ledger, str(number))
    assert asked == ["2026-11"]
    with pytest.raises(ValueError, match="32 bytes"):
        Encryption(key_id="short", key=lambda _: b"too short")
    with pytest.raises(KeyUnavailable, match="KeyError"):
        encryption("unknown")
    for wrong in ("", "x" * 256, 7):
        with pytest.raises(ValueError, match="key_id"):
            Encryption(key_id=wrong, key=lambda _: bytes(32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function"):
        Encryption(key_id="k", key=bytes(32))  # type: ignore[arg-type]


def _in_memory(key: Callable[[str], bytes]) -> AgentRunLedger:
    return AgentRunLedger(
        open_store(":memory:", durability="process", clock=FakeClock()),
        encryption=Encryption(key_id="2026-11", key=key),
    )


def test_the_same_entry_is_encrypted_alike_and_every_other_one_differently() -> None:
    cipher = RunCipher.of("r", b"k" * 32)
    row = Row(2, "outcome", "1", 1, b"{}", b"", b"yes", b"d" * 32)
    sealed = cipher.seal_row(row)
    assert sealed == cipher.seal_row(row), "so that a lost write can be looked up"
    assert cipher.open_row(sealed) == row
    others = [row._replace(seq=3), row._replace(kind="value"), row._replace(payload=b"no")]
    nonces = {cipher.seal_row(each).payload[:12] for each in [row, *others] if each.payload}  # type: ignore[index]
    nonces |= {RunCipher.of("s", b"k" * 32).seal_row(row).payload[:12]}  # type: ignore[index]
    assert len(nonces) == 5
