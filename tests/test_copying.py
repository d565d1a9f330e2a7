"""Copying: a run stands in the other ledger byte for byte, goes on in one place alone, and no crash makes two of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    BudgetExceededException,
    CopiedRun,
    CopyRefused,
    Effect,
    LedgerError,
    Run,
    RunawayLoopException,
    RunMoved,
    RunNotFound,
    RunOwned,
    RunRecord,
    Step,
    StoreFull,
    StoreUnavailable,
    current_step,
)
from agent_run_ledger.contract import Head, QueueTerms, Request, Row, Store
from agent_run_ledger.stores import open_store
from support.ledgers import HOSTILE, RUN, Bench, Tool, packs_nothing, raw
from support.programs import Way
from support.pumping import pump, submit, work_once

PAIRS = [
    ("sqlite", "sqlite"),
    ("memory", "sqlite"),
    ("sqlite", "postgres"),
    ("postgres", "memory"),
    ("postgres", "postgres"),
]


class Two:
    """Two ledgers, `here` and `there`, each with a clock of its own that moves with the other's."""

    def __init__(self, kinds: tuple[str, str], folder: Path) -> None:
        for name in ("here", "there"):
            (folder / name).mkdir()
        self.here, self.there = Bench(kinds[0], folder / "here"), Bench(kinds[1], folder / "there")

    def owners_die(self) -> None:
        self.here.owners_die()
        self.there.owners_die()

    def standing(self, bench: Bench, run_id: str = RUN) -> tuple[Head | None, list[Row], bytes, list[Request]]:
        """Everything that a storage has of a run."""
        store = bench.store()
        return store.head(run_id), bench.rows(run_id), store.secret(run_id), store.inbox(run_id, 0)


@pytest.fixture(params=PAIRS, ids="-to-".join)
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    made = Two(request.param, tmp_path)
    with made.here, made.there:
        yield made


def begun(ledger: AgentRunLedger, steps: int = 2, run_id: str = RUN) -> list[Any]:
    """A run with so many steps, driven one by one."""
    ledger.create_run("go on", run_id)
    return [ledger.execute_step(run_id, "look", {"at": number}, lambda at: [at]) for number in range(steps)]


def is_clean(*ledgers: AgentRunLedger) -> bool:
    return all(ledger.verify().findings == [] for ledger in ledgers)


# --- a run that has not ended -----------------------------------------------------------------------------------------


def test_a_run_goes_on_in_the_other_ledger_under_its_id_and_repeats_nothing(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    head, *before = two.standing(two.here)
    copied = here.copy(RUN, there)
    after, *arrived = two.standing(two.there)
    assert copied == [CopiedRun(RUN, there._store.place, len(before[0]), is_moved=True, was_there=False)]
    assert arrived == before
    assert here.tree_head(RUN) == there.tree_head(RUN)
    assert here.steps(RUN) == there.steps(RUN)
    assert head is not None
    assert after is not None
    assert (after.token, after.owner, after.listing) == (head.token, None, head.listing)
    there.create_run("go on", RUN)
    seen: list[int] = []
    for number in range(3):
        there.execute_step(RUN, "look", {"at": number}, lambda at: seen.append(at))
    assert seen == [2]
    there.finish_run(RUN, "done")
    assert there.get_run(RUN).result == "done"
    assert there.steps(RUN)[2].fencing_token > max(step.fencing_token for step in here.steps(RUN))
    assert is_clean(here, there)


def test_nobody_goes_on_with_it_here_and_everybody_who_tries_is_told_where_it_is(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    here.agent(name="agent")(lambda number: number)
    begun(here)
    here.copy(RUN, there)
    _, *before = two.standing(two.here)
    other = two.here.open()
    two.owners_die()
    for ledger in (here, other):
        for attempt in (
            lambda at: at.create_run("go on", RUN),
            lambda at: at.execute_step(RUN, "look", {"at": 2}, lambda at: at),
            lambda at: at.resume_run(RUN),
            lambda at: at.finish_run(RUN),
            lambda at: at.abort_run(RUN, "no"),
            lambda at: at.cancel(RUN),
            lambda at: at.signal(RUN, "go", 1),
            lambda at: at.handle(RUN).result(timeout=1),
            lambda at: at.copy(RUN, two.there.open(), children=True) and at.create_run("go on", RUN),
        ):
            with pytest.raises(RunMoved) as caught:
                attempt(ledger)
            assert (caught.value.run_id, caught.value.place) == (RUN, there._store.place)
    assert other.recover() == []
    run = other.get_run(RUN)
    assert (run.moved_to, run.owner, run.status) == (there._store.place, None, "CHECKPOINTED")
    assert (other.is_waiting(run), other.plan(RUN), other.approvals()) == (False, [], [])
    assert two.standing(two.here)[1:] == tuple(before)
    assert is_clean(other)


def test_its_budget_goes_with_it(two: Two) -> None:
    here, there = two.here.open(max_steps=3), two.there.open(max_steps=3)
    begun(here, 2)
    here.copy(RUN, there)
    there.resume_run(RUN)
    there.execute_step(RUN, "look", {"at": 2}, lambda at: at)
    with pytest.raises(BudgetExceededException):
        there.execute_step(RUN, "look", {"at": 3}, lambda at: at)


def test_its_loops_go_with_it(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    here.create_run("go on", RUN)
    for _ in range(2):
        here.execute_step(RUN, "look", {}, lambda: "same")
    here.copy(RUN, there)
    there.resume_run(RUN)
    there.execute_step(RUN, "look", {}, lambda: "same")
    with pytest.raises(RunawayLoopException):
        there.execute_step(RUN, "look", {}, lambda: "same")


def test_what_was_sent_to_it_goes_with_it_and_is_taken_there(two: Two, way: Way) -> None:
    def agent(run: Run) -> Any:
        first = yield run.wait_for("first")
        second = yield run.wait_for("second")
        return [first, second]

    here, there = two.here.open(), two.there.open()
    submit(here, way.agent(here, agent, name="agent"), run_id=RUN)
    way.agent(there, agent, name="agent")
    assert work_once(here) == "waits"
    here.signal(RUN, "first", 1)
    here.signal(RUN, "second", 2)
    here.copy(RUN, there)
    pump(there, two.there.clock)
    assert there.get_run(RUN).result == [1, 2]
    assert is_clean(here, there)


def test_a_step_in_doubt_is_in_doubt_there_and_keeps_its_key(two: Two) -> None:
    keys: list[str] = []

    def pay(amount: int) -> None:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            raise SystemExit("the process is told to end")

    here, there = two.here.open(), two.there.open()
    here.create_run("go on", RUN)
    with pytest.raises(SystemExit):
        here.execute_step(RUN, "pay", {"amount": 1}, pay, effect=Effect.IDEMPOTENT)
    here.copy(RUN, there)
    there.create_run("go on", RUN)
    there.execute_step(RUN, "pay", {"amount": 1}, pay, effect=Effect.IDEMPOTENT)
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert there.steps(RUN)[0].attempts == 2


def test_a_pipeline_goes_on_there(two: Two) -> None:
    first, second = Tool(1), Tool(RuntimeError("away"), 2)
    steps = [Step("first", first), Step("second", lambda first: second(), depends_on=["first"])]
    pipeline = two.here.pipeline(RUN, *steps)
    with pytest.raises(RuntimeError):
        pipeline.execute()
    pipeline.copy(RUN, two.there.open())
    with pytest.raises(RunMoved):
        two.here.pipeline(RUN, *steps).execute()
    assert two.there.pipeline(RUN, *steps).execute() == 2
    assert (first.calls, second.calls) == (1, 2)


def test_a_run_that_was_moved_can_be_moved_back_and_forth(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here, 1)
    at, other = here, there
    for number in range(1, 5):
        at.copy(RUN, other)
        at, other = other, at
        at.resume_run(RUN)
        at.execute_step(RUN, "look", {"at": number}, lambda at: at)
        at.signal(RUN, "note", number)
        assert (at.get_run(RUN).moved_to, other.get_run(RUN).moved_to) == (None, at._store.place)
    assert [step.step_number for step in here.steps(RUN)] == [1, 2, 3, 4, 5]
    assert [request.id for request in two.here.store().inbox(RUN, 0)] == [1, 2, 3, 4]
    here.finish_run(RUN)
    (back,) = here.copy(RUN, there)  # what has ended comes back, too, and stands in both
    assert (back.is_moved, back.was_there) == (False, False)
    assert [ledger.get_run(RUN).status for ledger in (here, there)] == ["COMPLETED", "COMPLETED"]
    assert [ledger.get_run(RUN).moved_to for ledger in (here, there)] == [None, None]
    assert here.tree_head(RUN) == there.tree_head(RUN)
    assert is_clean(here, there)


def test_a_run_that_its_ledger_holds_is_moved_between_two_of_its_steps_and_not_during_one(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    here.create_run("go on", RUN)

    def moves() -> str:
        with pytest.raises(RunOwned):
            here.copy(RUN, there)
        return "not moved"

    assert here.execute_step(RUN, "move", {}, moves) == "not moved"
    with here.open_run("another", "other") as run:
        with pytest.raises(RunOwned):
            here.copy("other", there)
        run.step("look", {}, lambda: 1)
    assert there.runs() == []
    here.copy(RUN, there)
    assert [run.run_id for run in there.runs()] == [RUN]


def test_a_run_that_somebody_works_on_stays_with_him(two: Two) -> None:
    worker, here, there = two.here.open(), two.here.open(), two.there.open()
    begun(worker, 1)
    with pytest.raises(RunOwned):
        here.copy(RUN, there)
    worker.execute_step(RUN, "look", {"at": 1}, lambda at: at)
    assert there.runs() == []


# --- a run that has ended ---------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_stands_in_both_ledgers_and_a_second_copy_says_so(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    here.finish_run(RUN, {"total": 1})
    _, *before = two.standing(two.here)
    (copied,) = here.copy(RUN, there)
    assert (copied.is_moved, copied.was_there) == (False, False)
    assert two.standing(two.there)[1:] == two.standing(two.here)[1:] == tuple(before)
    assert [ledger.get_run(RUN).result for ledger in (here, there)] == [{"total": 1}] * 2
    (again,) = two.here.open().copy(RUN, there)
    assert (again.is_moved, again.was_there, again.entries) == (False, True, copied.entries)
    assert here.get_run(RUN).moved_to is None
    assert is_clean(here, there)


def test_a_dead_letter_is_redriven_there(two: Two) -> None:
    here, there = two.here.open(max_steps=2), two.there.open(max_steps=5)
    begun(here, 2)
    with pytest.raises(BudgetExceededException):
        here.execute_step(RUN, "look", {"at": 2}, lambda at: at)
    here.copy(RUN, there)
    again = there.redrive(RUN, max_steps=5)
    there.resume_run(again)
    there.execute_step(again, "look", {"at": 2}, lambda at: at)
    assert len(there.steps(again)) == 3


# --- queues, parents and children -------------------------------------------------------------------------------------


def test_a_run_of_a_queue_is_due_there_as_it_was_here(two: Two, way: Way) -> None:
    def agent(number: int) -> Any:
        return number
        yield

    here, there = two.here.open(), two.there.open()
    agents = [way.agent(ledger, agent, name="agent") for ledger in (here, there)]
    for run_id, due_in, priority in (("first", 0.0, 1), ("second", 0.0, 2), ("later", 500.0, 3)):
        submit(here, agents[0], 1, run_id=run_id, due_in=due_in, priority=priority)
        here.copy(run_id, there)
    assert here._leases.claim_due([QueueTerms("default")], ["agent"], 9) == []
    store = two.there.store()
    leases = store.claim_due("worker", 30.0, [QueueTerms("default")], ["agent"], 9)
    assert [lease.run_id for lease in leases] == ["second", "first"]
    head = store.head("later")
    assert head is not None
    assert head.due_in is not None
    assert 490.0 < head.due_in <= 500.0
    assert (head.listing.queue, head.listing.priority, head.listing.agent) == ("default", 3, "agent")


def family(ledger: AgentRunLedger, way: Way, look: Callable[[], Any]) -> Any:
    """An agent whose run waits for two children."""

    def child(number: int) -> Any:
        return number * look()
        yield

    def parent(run: Run) -> Any:
        return (yield run.map(child_of, [1, 2]))

    child_of = way.agent(ledger, child, name="child")
    return way.agent(ledger, parent, name="parent")


def children_of(ledger: AgentRunLedger) -> list[RunRecord]:
    return [run for run in ledger.runs() if run.parent_run_id == RUN]


def test_a_parent_is_moved_with_the_children_that_it_waits_for_and_they_end_there(two: Two, way: Way) -> None:
    here, there, look = two.here.open(), two.there.open(), Tool(10)
    submit(here, family(here, way, look), run_id=RUN)
    family(there, way, look)
    assert work_once(here) == "waits"
    copied = here.copy(RUN, there, children=True)
    assert [each.run_id for each in copied][-1] == RUN
    assert len(copied) == 3
    assert pump(here, two.here.clock) == []
    pump(there, two.there.clock)
    assert there.get_run(RUN).result == [10, 20]
    assert look.calls == 2
    assert is_clean(here, there)


def test_a_parent_is_moved_with_the_child_that_has_ended_and_could_not_tell_it_yet(two: Two, way: Way) -> None:
    here, there, look = two.here.open(), two.there.open(), Tool(10)
    submit(here, family(here, way, look), run_id=RUN)
    family(there, way, look)
    assert [work_once(here) for _ in range(2)] == ["waits", "ended"]
    here.copy(RUN, there, children=True)
    assert set(pump(here, two.here.clock)) <= {f"{child.run_id} ended" for child in children_of(here)}
    pump(there, two.there.clock)
    assert there.get_run(RUN).result == [10, 20]
    assert look.calls == 2


def test_neither_a_parent_nor_a_child_that_it_waits_for_is_moved_alone(two: Two, way: Way) -> None:
    here, there, look = two.here.open(), two.there.open(), Tool(10)
    submit(here, family(here, way, look), run_id=RUN)
    assert work_once(here) == "waits"
    (child, _) = children_of(here)
    with pytest.raises(CopyRefused, match="which it has begun"):
        here.copy(RUN, there)
    with pytest.raises(CopyRefused, match=f"run '{RUN}' waits for its end"):
        here.copy(child.run_id, there)
    assert there.runs() == []
    pump(here, two.here.clock)
    assert here.get_run(RUN).result == [10, 20]
    assert len(here.copy(RUN, there)) == 1  # what has ended needs its children no more
    assert len(here.copy(child.run_id, there)) == 1
    assert len(here.copy(RUN, there, children=True)) == 3
    assert len(there.runs()) == 3


def test_a_family_of_which_one_is_worked_on_stays_whole(two: Two, way: Way) -> None:
    here, there, worker, look = two.here.open(), two.there.open(), two.here.open(), Tool(10)
    submit(here, family(here, way, look), run_id=RUN)
    family(worker, way, look)
    assert work_once(here) == "waits"
    (lease,) = worker._leases.claim_due([QueueTerms("default")], ["child"], 1)
    with pytest.raises(RunOwned) as caught:
        here.copy(RUN, there, children=True)
    assert caught.value.run_id == lease.run_id
    worker._leases.put_back(lease)
    assert there.runs() == []
    pump(here, two.here.clock)
    assert here.get_run(RUN).result == [10, 20]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_another_run_of_the_same_id_there_is_named_and_neither_is_changed(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    begun(there)
    there.detach(RUN)
    standing = [two.standing(bench)[1:] for bench in (two.here, two.there)]
    with pytest.raises(CopyRefused, match="another run of this id stands there; they differ at entry 1"):
        here.copy(RUN, there)
    assert [two.standing(bench)[1:] for bench in (two.here, two.there)] == standing
    for ledger in (here, there):
        ledger.execute_step(RUN, "look", {"at": 2}, lambda at: at)  # both go on, where they stood


def test_a_run_that_goes_on_in_both_ledgers_is_let_go_of_here(two: Two) -> None:
    """As after a backup of this ledger was put back that is older than the move."""
    here, there = two.here.open(), two.there.open()
    begun(here)
    here.copy(RUN, there)
    store = two.here.store()
    head = store.head(RUN)
    assert head is not None
    assert store.adopt(RUN, head.token, b"", head.listing, (), (), None)  # it is not moved any more
    there.resume_run(RUN)
    there.execute_step(RUN, "look", {"at": 2}, lambda at: at)
    (copied,) = here.copy(RUN, there)
    assert (copied.is_moved, copied.was_there) == (True, True)
    assert here.get_run(RUN).moved_to == there._store.place


def test_a_run_that_goes_on_in_both_ledgers_and_was_asked_something_here_is_refused(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    here.copy(RUN, there)
    store = two.here.store()
    head = store.head(RUN)
    assert head is not None
    store.adopt(RUN, head.token, b"", head.listing, (), (), None)
    here.signal(RUN, "lost", 1)
    with pytest.raises(CopyRefused, match="something was asked of it here since"):
        here.copy(RUN, there)
    assert here.get_run(RUN).moved_to is None


def test_a_run_whose_log_was_cut_there_is_refused(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    here.finish_run(RUN)
    store, target = two.here.store(), two.there.store()
    rows, head = store.read(RUN), store.head(RUN)
    assert head is not None
    target.adopt(RUN, head.token, store.secret(RUN), head.listing, [rows[:-1]], (), None)
    with pytest.raises(CopyRefused, match=f"they differ at entry {len(rows)}"):
        here.copy(RUN, there)


def test_the_ledger_in_which_it_stands_is_no_place_to_copy_it_to(two: Two) -> None:
    here, same = two.here.open(), two.here.open()
    begun(here)
    with pytest.raises(CopyRefused, match="the ledger in which it stands"):
        here.copy(RUN, same)
    here.execute_step(RUN, "look", {"at": 2}, lambda at: at)


def test_a_ledger_is_known_by_its_file_whatever_leads_there(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger:
        begun(ledger)
        (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
        for place in ("a.db", "link.db", "../" + tmp_path.name + "/a.db"):
            with pytest.raises(CopyRefused, match="the ledger in which it stands"):
                ledger.copy(RUN, tmp_path / place)
            ledger.execute_step(RUN, "look", {"at": place}, lambda at: at)


def test_a_place_that_would_be_gone_at_once_and_a_run_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger:
        begun(ledger)
        with pytest.raises(ValueError, match="gone at once"):
            ledger.copy(RUN, ":memory:")
        with pytest.raises(RunNotFound):
            ledger.copy("unknown", tmp_path / "b.db")
        assert not (tmp_path / "b.db").exists()


def test_a_damaged_run_is_not_carried_on_and_stays(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger:
        begun(ledger)
        ledger.detach(RUN)
        with raw(tmp_path / "a.db", without_triggers=True) as db:
            db.execute("UPDATE entries SET payload = CAST('[7]' AS BLOB) WHERE seq = 3")
        with pytest.raises(CopyRefused, match=r"it is damaged: the payload .* `verify` says more"):
            ledger.copy(RUN, tmp_path / "b.db")
        assert ledger.get_run(RUN).moved_to is None
    with AgentRunLedger(tmp_path / "b.db") as other:
        assert other.runs() == []


def test_a_run_that_was_deleted_there_does_not_come_again(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger, AgentRunLedger(tmp_path / "b.db") as other:
        begun(ledger)
        begun(other)
        other.finish_run(RUN)
        with raw(tmp_path / "b.db") as db:
            db.execute("INSERT INTO tombstones VALUES (?, 1, x'00', 'somebody', 'on request', 1.0)", (RUN,))
            for table in ("entries", "payloads", "runs", "secrets"):
                db.execute(f"DELETE FROM {table} WHERE run_id = ?", (RUN,))
        with pytest.raises(LedgerError, match="existed and was deleted"):
            ledger.copy(RUN, other)
        ledger.execute_step(RUN, "look", {"at": 2}, lambda at: at)  # it goes on here
        assert other.runs() == []


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_names_and_long_payloads_arrive_as_they_were(two: Two) -> None:
    here, there = two.here.open(), two.there.open()
    for name, text in HOSTILE.items():
        run_id = text if name != "ELF" else "elf"
        here.create_run(text, run_id)
        for size in (1, 1_000, 70_000, 2_000_000):
            here.execute_step(run_id, "write", {"text": text, "size": size}, lambda text, size: text * (size // 10))
        here.copy(run_id, there)
        assert two.standing(two.there, run_id)[1:] == two.standing(two.here, run_id)[1:]
    assert is_clean(here, there)


def test_what_was_erased_here_stays_erased_there(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger, AgentRunLedger(tmp_path / "b.db") as other:
        ledger.create_run("go on", RUN)
        for size in (10, 200_000):
            ledger.execute_step(RUN, "look", {"size": size}, lambda size: "secret" * size)
        ledger.finish_run(RUN)
        ledger.forget(RUN, 2)
        ledger.copy(RUN, other)
        assert [step.output_json is None for step in other.steps(RUN)] == [False, True]
        assert other.verify().findings == []
        assert b"secret" * 20 not in (tmp_path / "b.db").read_bytes()


@pytest.mark.parametrize("where", ["here", "there", "in both"])
def test_what_was_erased_since_is_the_same_run_all_the_same(tmp_path: Path, where: str) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger, AgentRunLedger(tmp_path / "b.db") as other:
        begun(ledger)
        ledger.finish_run(RUN)
        ledger.copy(RUN, other)
        for each in {"here": [ledger], "there": [other], "in both": [ledger, other]}[where]:
            each.forget(RUN, by=where)
        assert ledger.copy(RUN, other)[0].was_there
        assert ledger.verify().ok
        assert other.verify().ok


class Measured:
    """A store that notes how much it is given at once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.most_bytes = self.most_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def adopt(self, run_id: str, token: int, secret: bytes, listing: Any, pages: Any, *rest: Any) -> bool:
        def measured() -> Iterator[list[Row]]:
            for page in pages:
                self.most_bytes = max(self.most_bytes, sum(len(row.payload or b"") for row in page))
                self.most_rows = max(self.most_rows, len(page))
                yield page

        return self.store.adopt(run_id, token, secret, listing, measured(), *rest)


def test_a_long_run_travels_in_small_parts_and_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[str] = []
    with AgentRunLedger(tmp_path / "a.db", max_steps=2000, durability="process") as ledger:
        ledger.create_run("go on", RUN)
        for number in range(600):
            ledger.execute_step(RUN, "look", {"at": number}, lambda at: "x" * (20_000 if at % 2 else 1))
        store = Measured(open_store(tmp_path / "b.db", durability="process", clock=ledger._clock))
        with AgentRunLedger(store) as other:  # type: ignore[arg-type]
            ledger.copy(RUN, packs_nothing(other), told=told.append)
            assert other.tree_head(RUN).size == 1201
        assert 100_000 < store.most_bytes < 1_200_000
        assert store.most_rows < 1_201
    assert told == [f"run 'run': {count} entries {what}" for what in ("checked", "copied") for count in (500, 1000)]


# --- failures and crashes ---------------------------------------------------------------------------------------------


class Failing:
    """A store whose `adopt` fails: before anything was written, or with it written and the answer lost."""

    def __init__(self, store: Store, error: Exception, *, is_written: bool) -> None:
        self.store, self.error, self.is_written = store, error, is_written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def adopt(self, *arguments: Any) -> bool:
        if self.is_written:
            assert self.store.adopt(*arguments)
        raise self.error


@pytest.mark.parametrize("error", [StoreFull("full"), RuntimeError("a bug")])
def test_a_target_that_refuses_leaves_the_run_where_it_was(two: Two, error: Exception) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    with pytest.raises(type(error)):
        here.copy(RUN, AgentRunLedger(Failing(there._store, error, is_written=False)))  # type: ignore[arg-type]
    here.resume_run(RUN)
    here.execute_step(RUN, "look", {"at": 2}, lambda at: at)
    assert there.runs() == []
    assert is_clean(here)


@pytest.mark.parametrize("is_written", [False, True])
def test_where_nobody_knows_whether_it_was_written_it_goes_on_nowhere_until_the_same_call(
    two: Two, is_written: bool
) -> None:
    here, there = two.here.open(), two.there.open()
    begun(here)
    lost = Failing(there._store, StoreUnavailable("the line is dead"), is_written=is_written)
    with pytest.raises(StoreUnavailable):
        here.copy(RUN, AgentRunLedger(lost))  # type: ignore[arg-type]
    with pytest.raises(RunMoved, match="call the same copy again"):
        two.here.open().resume_run(RUN)
    (copied,) = two.here.open().copy(RUN, there)
    assert (copied.is_moved, copied.was_there) == (True, is_written)
    there.resume_run(RUN)
    there.execute_step(RUN, "look", {"at": 2}, lambda at: at)
    assert is_clean(here, there)


def test_what_was_on_its_way_to_one_ledger_is_not_given_to_another(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger, AgentRunLedger(tmp_path / "b.db") as other:
        begun(ledger)
        lost = Failing(other._store, StoreUnavailable("the line is dead"), is_written=False)
        with pytest.raises(StoreUnavailable):
            ledger.copy(RUN, AgentRunLedger(lost))  # type: ignore[arg-type]
        with pytest.raises(RunMoved, match=r"was moved to .*b\.db"):
            ledger.copy(RUN, tmp_path / "c.db")
        ledger.copy(RUN, tmp_path / "b.db")
        assert other.get_run(RUN).moved_to is None


class Crash(BaseException):
    """The process is dead."""


class Life:
    """How many writes a process makes before it dies: before the next one, or with it done and nobody told."""

    def __init__(self, at: int, *, is_done: bool) -> None:
        self.at, self.is_done = at, is_done
        self.writes = 0

    def under(self, store: Store) -> Any:
        return Mortal(self, store)


class Mortal:
    """A store under a process that dies."""

    WRITES = ("adopt", "claim", "append", "append_all", "move_away", "post", "release", "renew")

    def __init__(self, life: Life, store: Store) -> None:
        self.life, self.store = life, store

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)
        return self._dying(verb) if name in self.WRITES else verb

    def _dying(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            life = self.life
            if life.writes > life.at:
                # the heart of a process that is dead does not beat any more: its thread is here all the same
                raise StoreUnavailable("the process is dead") if verb.__name__ == "renew" else Crash
            life.writes += 1
            if life.writes <= life.at:
                return verb(*args, **kwargs)
            if life.is_done:
                verb(*args, **kwargs)
            raise Crash

        return write

    def close(self) -> None:
        """What outlives a process stays."""


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "behind it"])
def test_a_copy_that_is_killed_at_any_write_is_finished_by_the_same_call_and_never_makes_two(
    tmp_path: Path, is_done: bool
) -> None:
    """A family of three: at no moment anything of it can go on in two places, and in the end all of it goes on in one."""
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        if not _is_killed_at(at, folder, is_done):
            assert at > 8
            return


def _is_killed_at(at: int, folder: Path, is_done: bool) -> bool:
    two, way, look = Two(("sqlite", "sqlite"), folder), Way(is_async=False), Tool(10)
    with two.here, two.there:
        here, there = two.here.open(), two.there.open()
        submit(here, family(here, way, look), run_id=RUN)
        family(there, way, look)
        assert work_once(here) == "waits"
        members = [RUN, *(child.run_id for child in children_of(here))]
        life = Life(at, is_done=is_done)
        dying, end = (
            AgentRunLedger(life.under(bench.store()), clock=bench.clock, heartbeat_seconds=29.0)
            for bench in (two.here, two.there)
        )
        with suppress(Crash):
            dying.copy(RUN, end, children=True)
        is_killed = life.writes > at
        two.owners_die()
        assert [_places(two, run_id) for run_id in members if _places(two, run_id) > 1] == []
        if there._store.head(RUN) is None:  # nobody would tell it of the end of a child
            assert there._store.next_due(["default"], ["child"]) is None
        pump(there, two.there.clock)  # what came there may go on already
        two.here.open().copy(RUN, there, children=True)
        assert [_places(two, run_id) for run_id in members] == [1, 1, 1]
        pump(here, two.here.clock)
        pump(there, two.there.clock)
        assert there.get_run(RUN).result == [10, 20], at
        assert look.calls == 2
        assert is_clean(here, there)
        return is_killed


def _places(two: Two, run_id: str) -> int:
    """In how many places the run can go on, or has ended: somebody tries to claim it in both."""
    found = 0
    for bench in (two.here, two.there):
        store = bench.store()
        with suppress(RunMoved, RunNotFound):
            head = store.head(run_id)
            lease = store.claim(run_id, "somebody", 30.0)
            store.release(run_id, lease.token, due_in=None if head is None else head.due_in)
            found += 1
        if bench.kind != "memory":
            store.close()
    return found
