"""Forgetting: what is erased is gone for good, the log still verifies and says so, and nothing else of it changes."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    IllegalTransition,
    InvalidArguments,
    PayloadErased,
    Run,
    RunDeleted,
    RunInputMismatch,
    RunMoved,
    RunNotFound,
    StepFailed,
    current_run,
    current_step,
)
from agent_run_ledger.drivers import reading
from agent_run_ledger.stores.sqlite import SqliteStore
from support.ledgers import GOAL, RUN, Bench, Died, never, program, raising, raw
from support.processes import environment

MARK = "Ada Lovelace, 12 St James's Square"
WHO: Any = {"by": "ann", "reason": "the customer asked for it"}


def ended(ledger: AgentRunLedger, run_id: str = RUN, mark: str = MARK) -> None:
    """A run with its mark in arguments, outputs, errors, values and signals of all sizes, that has ended."""
    with ledger.open_run(f"write to {mark}", run_id) as run:
        for size in (1, 40, 300, 9_000):
            run.step("look", {"about": mark * size}, lambda about: {"said": about})
        with pytest.raises(StepFailed):
            run.step("fail", {"to": mark}, raising(ValueError(mark)))
        ledger.signal(run_id, "news", {"of": mark}, by=f"{mark}'s clerk")
        assert run.wait_for("news") == {"of": mark}
        run.now()
        run.result = {"sent": mark}


def kept(bench: Bench, run_id: str = RUN) -> int:
    return sum(row.payload is not None for row in bench.rows(run_id))


# --- erasing ----------------------------------------------------------------------------------------------------------


def test_a_run_forgets_everything_it_was_told_and_its_log_still_verifies(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    before = bench.rows(RUN)
    forgotten = ledger.forget(RUN, **WHO)
    rows = bench.rows(RUN)
    assert forgotten.payloads == sum(row.payload is not None for row in before)
    assert [row[:6] for row in rows[:-1]] == [row[:6] for row in before]
    assert all((row.payload, row.digest, row.fingerprint) == (None, None, None) for row in rows)
    assert MARK not in repr([ledger.get_run(RUN), ledger.steps(RUN), ledger.trace(RUN), bench.store().inbox(RUN, 0)])
    assert ledger.verify().findings == []
    line = ledger.trace(RUN)[-1]
    assert (line.event, line.text) == ("erased", "all payloads (by ann): the customer asked for it")
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).goal, ledger.get_run(RUN).result) == (
        "COMPLETED",
        None,
        None,
    )


def test_one_step_is_forgotten_and_the_others_and_the_result_stay(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    payloads = kept(bench)
    assert ledger.forget(RUN, 2, **WHO).payloads == 2
    steps = ledger.steps(RUN)
    assert [step.arguments_json is None for step in steps] == [False, True, False, False, False, False]
    assert [step.output_json is None for step in steps[:4]] == [False, True, False, False]
    assert (steps[1].input_digest, steps[1].output_digest, steps[1].fingerprint) == ("", None, "")
    assert ledger.get_run(RUN).result == {"sent": MARK}
    assert kept(bench) == payloads - 2
    assert ledger.trace(RUN)[-1].text == "step 2 (by ann): the customer asked for it"
    assert ledger.verify().findings == []


def test_the_signal_that_a_wait_has_taken_is_forgotten_with_it(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    (wait,) = [step for step in ledger.steps(RUN) if step.tool_name == "run.wait_for"]
    assert ledger.forget(RUN, wait.step_number).payloads == 3
    (signal,) = [row for row in bench.rows(RUN) if row.kind == "signal"]
    assert signal.payload is None
    assert [(request.payload, request.who) for request in bench.store().inbox(RUN, 0)] == [(b"{}", "")]
    assert ledger.verify().findings == []


def test_a_long_payload_that_another_step_shares_stays_until_that_one_is_forgotten(bench: Bench) -> None:
    ledger = bench.open()
    long = "x" * 200_000
    with ledger.open_run(GOAL, RUN) as run:
        for number in range(2):
            run.step("read", {"n": number}, lambda n: long)
    ledger.forget(RUN, 1)
    assert [step.output_json for step in ledger.steps(RUN)] == [None, json.dumps(long)]
    ledger.forget(RUN, 2)
    assert [step.output_json for step in ledger.steps(RUN)] == [None, None]
    assert ledger.verify().findings == []
    if bench.kind == "sqlite":
        with raw(bench.path) as connection:
            assert connection.execute("SELECT count(*) FROM payloads").fetchone()[0] == 0, "its digest goes, too"


def test_with_everything_the_secret_goes_and_nobody_can_try_what_it_was(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    assert ledger.forget(RUN, everything=True, **WHO).is_everything
    assert bench.store().secret(RUN) == b""
    assert ledger.verify().findings == []
    assert ledger.trace(RUN)[-1].text == "all payloads, and the run's secret (by ann): the customer asked for it"
    later = ledger.forget(RUN, everything=True)
    assert (later.payloads, later.is_everything) == (0, False)
    assert len([line for line in ledger.trace(RUN) if line.event == "erased"]) == 1


def test_what_is_gone_already_is_no_error_and_no_entry(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    ledger.forget(RUN, 1)
    ledger.forget(RUN)
    size = len(bench.rows(RUN))
    assert [ledger.forget(RUN, 1).payloads, ledger.forget(RUN).payloads] == [0, 0]
    assert len(bench.rows(RUN)) == size
    assert ledger.verify().findings == []


def test_a_dry_run_says_what_would_go_and_erases_nothing(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    before = bench.rows(RUN)
    told = ledger.forget(RUN, everything=True, dry_run=True)
    assert (told.payloads, told.is_everything, told.pending) == (kept(bench), True, ())
    assert bench.rows(RUN) == before


def test_a_run_that_goes_on_forgets_nothing(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    ledger.execute_step(RUN, "look", {"at": MARK}, lambda at: at)
    for call in (lambda: ledger.forget(RUN), lambda: ledger.forget(RUN, 1)):
        with pytest.raises(IllegalTransition, match="its replay needs what is recorded"):
            call()
    with pytest.raises(RunNotFound):
        ledger.forget("unknown")
    ledger.cancel(RUN)
    with pytest.raises(InvalidArguments, match="no step 2"):
        ledger.forget(RUN, 2)
    for wrong in ("1", 1.0, True):
        with pytest.raises(InvalidArguments, match="number of a step"):
            ledger.forget(RUN, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="one of them"):
        ledger.forget(RUN, 1, everything=True)
    assert kept(bench) == 4
    assert ledger.forget(RUN).payloads == 4


def test_a_child_is_not_forgotten_before_its_parent_has_ended(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    def child() -> str:
        return MARK

    @ledger.agent()
    def parent(run: Run) -> str:
        said = child()
        children = [each.run_id for each in ledger.runs() if each.parent_run_id == current_run().run_id]
        with pytest.raises(IllegalTransition, match="which has begun it"):
            ledger.forget(children[0])
        bench.clock.advance(1)
        assert [run_id for run_id, _ in ledger.gc(0).left] == children
        return str(said)

    ledger.run(parent, run_id=RUN)
    bench.clock.advance(1)
    assert len(ledger.gc(0).runs) == 2


def test_a_run_that_was_moved_away_is_forgotten_where_it_went(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger, AgentRunLedger(tmp_path / "b.db") as other:
        ledger.create_run(GOAL, RUN)
        ledger.copy(RUN, other)
        other.cancel(RUN)
        with pytest.raises(RunMoved):
            ledger.forget(RUN)
        assert ledger.gc(0).runs == ()
        assert other.forget(RUN).payloads == 2


# --- what a replay says -----------------------------------------------------------------------------------------------


def test_a_replay_that_comes_to_what_was_erased_says_so_and_makes_nothing_up(bench: Bench) -> None:
    with bench.open().open_run(GOAL, RUN) as run:
        run.step("look", {"n": 1}, lambda n: MARK)
        run.step("look", {"n": 2}, lambda n: MARK)
    bench.open().forget(RUN, 2)
    ledger = program(bench)
    assert ledger.execute_step(RUN, "look", {"n": 1}, never) == MARK
    with pytest.raises(PayloadErased, match=r"what became of step 2 \('look'\) was erased"):
        ledger.execute_step(RUN, "look", {"n": 2}, never)


def test_a_result_that_was_erased_is_an_error_and_not_none(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    def agent(name: str) -> str:
        return name

    assert ledger.run(agent, MARK, run_id=RUN) == MARK
    ledger.forget(RUN)
    with pytest.raises(PayloadErased, match="the result was erased"):
        ledger.run(agent, MARK, run_id=RUN)
    with pytest.raises(RunInputMismatch):
        ledger.run(agent, "another", run_id=RUN)
    ledger.forget(RUN, everything=True)
    with pytest.raises(PayloadErased, match="what it was given was erased"):
        ledger.run(agent, "another", run_id=RUN)


def test_a_run_whose_result_was_not_forgotten_still_returns_it(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool(effect=Effect.READ)
    def look(name: str) -> str:
        return name

    @ledger.agent()
    def agent(name: str) -> str:
        return look(name)

    ledger.run(agent, MARK, run_id=RUN)
    ledger.forget(RUN, 1)
    assert ledger.run(agent, MARK, run_id=RUN) == MARK
    assert ledger.handle(RUN).result() == MARK


def test_no_run_is_made_from_one_that_has_forgotten(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    ledger.execute_step(RUN, "look", {"n": 1}, lambda n: n)
    ledger.abort_run(RUN, "no")
    ledger.forget(RUN, 1)
    with pytest.raises(InvalidArguments, match="erased"):
        ledger.redrive(RUN)


# --- what verify says -------------------------------------------------------------------------------------------------


def test_an_entry_that_says_more_or_less_than_was_erased_is_found(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        ended(ledger)
        before = {row.seq: row for row in bench.rows(RUN)}
        ledger.forget(RUN, 2)
        seqs = [row.seq for row in bench.rows(RUN) if row.payload is None and before.get(row.seq, row).payload]
        with raw(bench.path, without_triggers=True) as db:
            for seq in seqs[:1]:
                row = before[seq]
                db.execute(
                    "UPDATE entries SET payload = ?, digest = ?, fingerprint = ? WHERE run_id = ? AND seq = ?",
                    (row.payload, row.digest, row.fingerprint, RUN, seq),
                )
        assert [(each.seq, each.code) for each in ledger.verify(RUN).findings] == [(seqs[0], "erased")]
        with raw(bench.path, without_triggers=True) as db:
            db.execute("UPDATE secrets SET secret = NULL")
        codes = {each.code for each in ledger.verify(RUN).findings}
        assert codes == {"erased", "secret"}


# --- collecting -------------------------------------------------------------------------------------------------------


def test_gc_deletes_the_runs_that_ended_long_ago_and_leaves_tombstones(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger, "old")
    ended(ledger, "also old")
    ledger.create_run(GOAL, "open")
    bench.clock.advance(31 * 86_400)
    ended(ledger, "new")
    head = ledger.tree_head("old")
    tried = ledger.gc(timedelta(days=30), dry_run=True)
    assert (tried.is_tried, [each.run_id for each in tried.runs]) == (True, ["old", "also old"])
    assert len(ledger.runs()) == 4
    done = ledger.gc(timedelta(days=30), **WHO)
    assert [each.run_id for each in done.runs] == ["old", "also old"]
    assert all(each.is_deleted for each in done.runs)
    assert {run.run_id for run in ledger.runs()} == {"open", "new"}
    assert ledger.verify().findings == []
    stone = bench.store().tombstone("old")
    assert stone is not None
    assert (stone.size, stone.root, stone.who, stone.why) == (head.size, head.root, WHO["by"], WHO["reason"])
    for call in (
        lambda: ledger.get_run("old"),
        lambda: ledger.steps("old"),
        lambda: ledger.verify("old"),
        lambda: ledger.create_run(GOAL, "old"),
        lambda: ledger.forget("old"),
        lambda: ledger.resume_run("old"),
        lambda: ledger.detach("old"),
    ):
        with pytest.raises(RunDeleted, match="deleted by 'ann'") as caught:
            call()
        assert (caught.value.size, caught.value.root) == (head.size, head.root)


def test_gc_that_keeps_proofs_keeps_every_entry_and_no_payload(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    bench.clock.advance(100)
    assert ledger.gc(200, keep_proofs=True).runs == ()
    heads = [row.roots for row in bench.rows(RUN)]
    (forgotten,) = ledger.gc(50, keep_proofs=True, **WHO).runs
    assert (forgotten.run_id, forgotten.is_deleted, forgotten.is_everything) == (RUN, False, False)
    assert [row.roots for row in bench.rows(RUN)][:-1] == heads
    assert kept(bench) == 0
    assert ledger.gc(50, keep_proofs=True).runs == (), "there is nothing left"
    assert ledger.verify().findings == []


def test_the_age_of_a_run_is_counted_from_its_end_and_not_from_when_it_forgot(bench: Bench) -> None:
    ledger = bench.open()
    ended(ledger)
    end = ledger.get_run(RUN).updated_at
    bench.clock.advance(100)
    ledger.forget(RUN)
    (tried,) = ledger.gc(50, dry_run=True).runs
    assert tried.ended_at == end


def test_what_a_deleted_run_has_used_of_a_shared_budget_stays_used(bench: Bench) -> None:
    ledger = bench.open(prices=None)
    pool = ledger.budget("team", usd="1.00")

    @ledger.tool(kind="model", max_usd="0.40")
    def ask() -> str:
        current_step().record_usage(usd="0.30")
        return "said"

    @ledger.agent(budget=pool)
    def agent() -> str:
        return ask()

    ledger.run(agent, run_id="one")
    bench.clock.advance(1)
    assert len(ledger.gc(0).runs) == 1
    (shared,) = ledger.budgets()
    assert (str(shared.spent_usd), str(shared.reserved_usd)) == ("0.30", "0")
    ledger.run(agent, run_id="two")
    assert ledger.verify().findings == []


def test_gc_leaves_a_run_that_cannot_be_read_and_says_so(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        ended(ledger, "sound")
        ended(ledger, "damaged")
        with raw(bench.path, without_triggers=True) as db:
            db.execute("UPDATE entries SET body = x'00' WHERE run_id = 'damaged' AND seq = 3")
        bench.clock.advance(1)
        done = ledger.gc(0)
        assert [each.run_id for each in done.runs] == ["sound"]
        assert [run_id for run_id, _ in done.left] == ["damaged"]


@pytest.mark.parametrize("age", [-1, float("inf"), "30d", None, True])
def test_an_age_that_is_none_is_refused(bench: Bench, age: Any) -> None:
    with pytest.raises(InvalidArguments, match="older_than"):
        bench.open().gc(age)


# --- the raw files ----------------------------------------------------------------------------------------------------


def found_in_files(path: Path, mark: str) -> list[str]:
    """Which of the files of a ledger hold these bytes, anywhere in them."""
    return [
        file.name for file in sorted(path.parent.iterdir()) if file.is_file() and mark.encode() in file.read_bytes()
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("seed", range(3))
def test_after_forget_and_gc_no_byte_is_left_in_the_file_its_log_and_its_free_pages(path: Path, seed: int) -> None:
    """Runs of mixed sizes, interleaved, so that pages are split, merged and freed before anything is forgotten."""
    draw = random.Random(seed)
    marks = {f"run {number}": f"marked{number}ofseed{seed}" for number in range(6)}
    with AgentRunLedger(path, max_steps=1_000, durability="process") as ledger:
        without_zeros(ledger)
        for run_id, mark in marks.items():
            ledger.create_run(mark, run_id)
        for number in range(40 * len(marks)):
            run_id, mark = draw.choice(list(marks.items()))
            long = (mark + "-") * draw.choice([1, 5, 40, 200, 400, 7_000])
            ledger.execute_step(run_id, "look", {"long": long, "n": number}, lambda long, n: {"said": long, "n": n})
        for run_id, mark in marks.items():
            ledger.finish_run(run_id, mark)
        for mark in marks.values():
            assert found_in_files(path, mark)
        assert ledger.forget("run 0").pending == ()
        assert ledger.forget("run 1", 1, scrub=False).pending == ()
        assert ledger.forget("run 1", everything=True).pending == ()
        for number, mark in enumerate(marks.values()):
            assert bool(found_in_files(path, mark)) == (number > 1), mark
        assert ledger.verify().findings == []
        assert ledger.gc(0).pending == ()
        assert [mark for mark in marks.values() if found_in_files(path, mark)] == []
        assert ledger.verify().ok
    assert [mark for mark in marks.values() if found_in_files(path, mark)] == []


def test_what_was_overwritten_long_before_is_gone_from_its_page_too(path: Path) -> None:
    """A note that has gone leaves its bytes in the page of its head, unless SQLite was built to write zeros over all that it deletes."""
    with AgentRunLedger(path) as ledger:
        without_zeros(ledger)
        ledger.create_run(GOAL, RUN)
        head = ledger._store.head(RUN)
        assert head is not None
        ledger._store.annotate(RUN, head.token, MARK * 20)
        ledger.execute_step(RUN, "look", {}, lambda: 1)  # and the note goes
        ledger.finish_run(RUN)
        ledger.forget(RUN, scrub=False)
        store_of(ledger)._files.is_emptied()
        assert path.name in found_in_files(path, MARK)
        assert ledger.forget(RUN).pending == ()
        assert found_in_files(path, MARK) == []


def store_of(ledger: AgentRunLedger) -> SqliteStore:
    """What keeps its bytes."""
    store = reading.behind(ledger._store)
    assert isinstance(store, SqliteStore)
    return store


def without_zeros(ledger: AgentRunLedger) -> None:
    """As most builds of SQLite are."""
    store_of(ledger)._files.ready().execute("PRAGMA secure_delete=OFF")


def test_without_the_rewriting_the_bytes_are_there_until_the_next_time(path: Path) -> None:
    with AgentRunLedger(path) as ledger:
        without_zeros(ledger)
        ended(ledger)
        ledger.forget(RUN, scrub=False)
        store_of(ledger)._files.is_emptied()
        assert found_in_files(path, MARK) == ["ledger.db", "ledger.db-wal"]
        assert ledger.forget(RUN).payloads == 0
        assert found_in_files(path, MARK) == []


def test_a_reader_who_holds_the_log_is_named_as_pending_and_the_next_call_finishes(path: Path) -> None:
    with AgentRunLedger(path) as ledger:
        ended(ledger)
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM entries").fetchone()
            (pending,) = ledger.forget(RUN).pending
            assert "somebody still reads an older state" in pending
            assert found_in_files(path, MARK)
            ledger.create_run(GOAL, "goes on meanwhile")
        assert ledger.forget(RUN).pending == ()
        assert found_in_files(path, MARK) == []
        assert ledger.verify().ok


def test_a_copy_that_was_made_before_the_schema_changed_is_named_as_pending(path: Path) -> None:
    with AgentRunLedger(path) as ledger:
        ended(ledger)
        copy = path.with_name("ledger.db.v1.backup")
        copy.write_bytes(b"an older one")
        (pending,) = ledger.forget(RUN).pending
        assert str(copy) in pending


def test_a_file_that_cannot_be_rewritten_is_erased_all_the_same_and_that_is_said(
    path: Path,
) -> None:
    with AgentRunLedger(path) as ledger:
        ended(ledger)
        writer = store_of(ledger)._files.ready()

        def refuses_to_rewrite(action: int, *_: Any) -> int:
            return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK  # as VACUUM begins

        writer.set_authorizer(refuses_to_rewrite)
        (pending,) = ledger.forget(RUN).pending
        assert "could not be rewritten" in pending
        writer.set_authorizer(None)
        assert ledger.steps(RUN)[0].arguments_json is None
        assert ledger.forget(RUN).pending == ()
        assert found_in_files(path, MARK) == []


def test_a_server_says_what_still_holds_the_bytes(tmp_path: Path) -> None:
    with Bench("postgres", tmp_path) as bench:
        ledger = bench.open()
        ended(ledger)
        told = " ".join(ledger.forget(RUN).pending)
        for word in ("VACUUM (FULL) entries, payloads, inbox, secrets, runs;", "standbys", "backups"):
            assert word in told
        assert bench.dsn is not None
        with psycopg.connect(bench.dsn, autocommit=True) as owner:
            owner.execute("VACUUM (FULL) entries, payloads, inbox, secrets, runs")
        assert ledger.verify().findings == []


# --- killed -----------------------------------------------------------------------------------------------------------


class Mortal:
    """A store in front of which, or behind which, the process dies at its n-th write."""

    WRITES = frozenset({"claim", "erase", "delete", "release", "scrub"})

    def __init__(self, store: Any, dies_at: int, *, behind: bool) -> None:
        self._store, self._left, self._behind = store, dies_at, behind
        self.is_over = False

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name not in self.WRITES:
            return verb

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_over:
                raise Died
            self._left -= 1
            if self._left:
                return verb(*args, **kwargs)
            self.is_over = True
            if self._behind:
                verb(*args, **kwargs)
            raise Died

        return call


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("what", ["forget", "gc", "gc with proofs"])
def test_whoever_dies_in_the_middle_leaves_each_run_as_it_was_or_done(bench: Bench, what: str, behind: bool) -> None:
    def do(ledger: AgentRunLedger, run_id: str) -> None:
        if what == "forget":
            ledger.forget(run_id, everything=True)
        else:
            ledger.gc(0, keep_proofs=what == "gc with proofs")

    for dies_at in range(1, 9):
        runs = [f"{run_id} {dies_at}" for run_id in ("one", "two")]
        ledger = bench.open()
        for run_id in runs:
            ended(ledger, run_id)
        bench.clock.advance(1)
        mortal = bench.open()
        mortal._store = Mortal(mortal._store, dies_at, behind=behind)
        is_dead = False
        try:
            do(mortal, runs[0])
        except Died:
            is_dead = True
        mortal._store = mortal._store._store
        bench.owners_die()
        for run_id in runs:
            payloads = [row.payload is not None for row in bench.rows(run_id) if b'"payload":' in row.body]
            assert len(set(payloads)) <= 1, "a run is as it was, or done"
        assert ledger.verify().findings == []
        survivor = bench.open()
        do(survivor, runs[0])
        assert kept(bench, runs[0]) == 0
        assert survivor.verify().findings == []
        if not is_dead:
            return
    pytest.fail("it did not come to its end")


KILLED = """
import os, signal, sys
from agent_run_ledger import AgentRunLedger

path, what, dies_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = AgentRunLedger(path)
seen = 0

def count(statement):
    global seen
    seen += 1
    if seen == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

ledger._store._files.ready().set_trace_callback(count)
ledger.forget("run", everything=True) if what == "forget" else ledger.gc(0)
print(seen)
"""


@pytest.mark.parametrize("what", ["forget", "gc"])
def test_a_kill_at_any_statement_leaves_either_state_and_the_next_call_finishes(tmp_path: Path, what: str) -> None:
    for dies_at in range(1, 80, 6):
        path = tmp_path / f"{dies_at}.db"
        with AgentRunLedger(path, durability="process") as ledger:
            ended(ledger)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), what, str(dies_at)],
            env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        with AgentRunLedger(path) as ledger:
            assert ledger.verify().findings == []
            with raw(path) as db:
                left = {row[0] for row in db.execute("SELECT payload IS NOT NULL FROM entries WHERE kind = 'finished'")}
            assert len(left) <= 1
            finished = ledger.gc(0) if what == "gc" else ledger.forget(RUN, everything=True)
            assert finished.pending == ()
            assert ledger.verify().findings == []
        for suffix in ("", "-wal"):
            file = Path(f"{path}{suffix}")
            assert not file.exists() or MARK.encode() not in file.read_bytes()
        if done.returncode == 0:
            assert dies_at > 8, "it was killed before"
            return
    pytest.fail("it did not come to its end")
