"""What only the queues of SQLite promise: a clock that outlives reboots, deaths that the kernel proves, and who idles writes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from agent_run_ledger.contract import Lease, Listing, QueueTerms
from agent_run_ledger.errors import LeaseLost, RunOwned, StoreError, StoreReadOnly, StoreUnavailable
from agent_run_ledger.stores import clock as clock_module
from agent_run_ledger.stores import timeline
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock, a_row
from agent_run_ledger.testing.stores.words import SECRET, claim_due, create, due_in_of, enqueue, head_of, in_threads
from agent_run_ledger.testing.stores.workers import nothing_is_new
from support.processes import Child, child
from test_sqlite_store import Failing, in_a_fork

Q = QueueTerms("q")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(path: Path, clock: FakeClock) -> Iterator[SqliteStore]:
    store = SqliteStore(path, clock=clock)
    yield store
    store.close()


# --- the clock of the ledger ------------------------------------------------------------------------------------------


class Machine:
    """A machine with a ledger on it: it is started anew, and its wall clock is whatever somebody set it to."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._path, self._patch = path, patch
        self._boots = 0

    @contextlib.contextmanager
    def boot(self, wall: float, uptime: float = 20.0) -> Iterator[tuple[SqliteStore, FakeClock]]:
        """From a start to the next: the first program opens the ledger when the machine has been up for so long."""
        self._boots += 1
        for module in (clock_module, timeline):
            self._patch.setattr(module, "boot_id", lambda name=f"boot {self._boots}": name)
        clock = FakeClock(now=wall, elapsed=uptime)
        store = SqliteStore(self._path, clock=clock)
        yield store, clock
        store.close()


NOON = 1_790_000_000.0
HOUR = 3600.0


@pytest.fixture
def machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(path, monkeypatch)


def test_a_timer_goes_on_while_the_machine_is_off(machine: Machine) -> None:
    with machine.boot(NOON, uptime=9e6) as (store, clock):
        enqueue(store, "r", due_in=HOUR)
        clock.advance(600.0)
    with machine.boot(NOON + 1800.0) as (store, clock):
        assert due_in_of(store, "r") == pytest.approx(1800.0)
        clock.advance(1799.0)
        assert claim_due(store) == []
        clock.advance(2.0)
        assert len(claim_due(store)) == 1


@pytest.mark.parametrize("wall", [0.0, NOON - 1e8, NOON + 1e8])
def test_a_wall_clock_that_was_wrong_when_the_machine_started_loses_no_timer(machine: Machine, wall: float) -> None:
    with machine.boot(NOON) as (store, clock):
        enqueue(store, "r", due_in=HOUR)
    with machine.boot(wall) as (store, clock):
        clock.set_wall(NOON)  # it is set right, too late for us
        enqueue(store, "s", due_in=HOUR)
        clock.advance(HOUR + 1.0)
        assert sorted(lease.run_id for lease in claim_due(store)) == ["r", "s"]
        enqueue(store, "t", due_in=HOUR)
    with machine.boot(NOON + 2 * HOUR) as (store, clock):
        due_in = due_in_of(store, "t")
        assert due_in is not None
        assert due_in <= HOUR, "what the first boot of a wrong clock put off is not put off for good"


def test_what_became_due_while_the_wall_clock_was_wrong_is_due(machine: Machine) -> None:
    with machine.boot(NOON) as (store, clock):
        clock.set_wall(NOON + 1e9)
        enqueue(store, "r")
        clock.set_wall(NOON)
        assert store.next_due(["q"], ["agent"]) == 0.0
        clock.set_wall(0.0)
        assert len(claim_due(store)) == 1


def times(store: SqliteStore) -> dict[str, float | None]:
    """When each run is due, and how long ago each worker was heard."""
    told = {summary.head.run_id: summary.head.due_in for summary in store.summaries()}
    told |= {beat.worker: beat.idle_seconds for beat in store.workers()}
    return {name: seconds and round(seconds, 3) for name, seconds in told.items()}


@pytest.mark.parametrize("act", ["beat", "enqueue", "post", "release"])
def test_the_clock_never_goes_back_to_before_what_somebody_did_in_a_queue(machine: Machine, act: str) -> None:
    with machine.boot(NOON) as (store, clock):
        for run_id in ("r", "s"):
            enqueue(store, run_id)
        leases = {lease.run_id: lease for lease in claim_due(store)}
        store.release("s", leases["s"].token)
        store.beat("w", b"")
        clock.advance(100 * HOUR)
        match act:
            case "beat":
                store.beat("w", b"")
            case "enqueue":
                enqueue(store, "t", due_in=HOUR)
            case "post":
                store.post("s", "signal", b"", "somebody", 1.0, due_in=HOUR)
            case "release":
                store.release("r", leases["r"].token, due_in=HOUR)
        before = times(store)
    with machine.boot(0.0) as (store, _):
        assert times(store) == before


def test_programs_whose_wall_clocks_differ_agree_on_what_is_due(path: Path) -> None:
    stores = [SqliteStore(path, clock=FakeClock(now=NOON + skew)) for skew in (0.0, 90.0, -90.0)]
    enqueue(stores[1], "r", due_in=60.0)
    assert [due_in_of(store, "r") for store in stores] == [60.0] * 3
    for store in stores:
        store.close()


def test_programs_that_open_a_ledger_at_once_in_a_new_boot_agree_on_its_clock(path: Path) -> None:
    opened: list[SqliteStore] = []
    in_threads(
        [lambda wall=wall: opened.append(SqliteStore(path, clock=FakeClock(now=NOON + wall))) for wall in range(6)]
    )
    assert len({store._timeline.now() for store in opened}) == 1
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM boots").fetchone() == (1,)
    for store in opened:
        store.close()


def test_who_may_only_read_knows_when_runs_are_due_in_a_new_boot_too(machine: Machine, path: Path) -> None:
    with machine.boot(NOON) as (store, _):
        enqueue(store, "r", due_in=HOUR)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE boots SET boot = 'an earlier one', news = 7")
    before = path.read_bytes()
    clock = FakeClock(now=NOON + 600.0, elapsed=3.0)
    with contextlib.closing(SqliteStore(path, clock=clock, read_only=True)) as reader:
        assert due_in_of(reader, "r") == pytest.approx(3000.0)
        assert (reader.next_due(["q"], ["agent"]), reader.workers()) == (pytest.approx(3000.0), [])
        for call in (
            lambda: enqueue(reader, "s"),
            lambda: reader.free_dead(),
            lambda: reader.beat("w", b""),
            lambda: reader.leave("w"),
        ):
            with pytest.raises(StoreReadOnly, match="opened read-only"):
                call()
    assert path.read_bytes() == before


def test_workers_that_are_forgotten_take_no_room(store: SqliteStore, path: Path, clock: FakeClock) -> None:
    for number in range(20):
        store.beat(f"w{number}", b"")
    clock.advance(2 * 86_400.0)
    store.beat("w", b"")
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT worker FROM workers").fetchall() == [("w",)]


# --- who idles writes and locks nothing -------------------------------------------------------------------------------


@contextlib.contextmanager
def nobody_can_write(path: Path) -> Iterator[None]:
    """Another process has the lock of the writers, and a transaction open."""
    script = """
import os, sqlite3
from agent_run_ledger.stores.filelock import WriteLock
lock = WriteLock(arguments[0] + ".lock", 30.0)
lock.acquire()
db = sqlite3.connect(arguments[0], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
tell()
hear()
"""
    with child(script, path) as other:
        other.hear()
        yield


def test_who_finds_nothing_to_do_waits_for_no_lock(path: Path, clock: FakeClock) -> None:
    with contextlib.closing(SqliteStore(path, clock=clock, busy_seconds=0.0)) as store:
        for run_id, key in (("r", "k"), ("s", "k"), ("t", None), ("later", None)):
            enqueue(store, run_id, key=key, due_in=60.0 if run_id == "later" else 0.0)
        claim_due(store, at_most=1)
        nothing_is_new(store)
        full = [QueueTerms("q", concurrency=1), QueueTerms("p")]
        claim_due(store, QueueTerms("q", per_key=1))
        with nobody_can_write(path):
            assert store.claim_due("a", 30.0, [QueueTerms("p")], ["agent"], 9) == []
            assert store.claim_due("a", 30.0, [Q], ["other"], 9) == []
            assert store.claim_due("a", 30.0, full, ["agent"], 9) == []
            assert claim_due(store, QueueTerms("q", per_key=1)) == [], "the one that waits has a key at its limit"
            assert store.next_due(["q"], ["agent"]) == 0.0
            assert store.free_dead() == 0
            assert store.wait_for_work(0.01) is False
            assert store.workers() == []
            with pytest.raises(StoreError):
                claim_due(store)


def work_of(store: SqliteStore, act: Callable[[], object]) -> int:
    """How many instructions of SQLite's own machine it takes, in tens."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    store._files.ready().set_progress_handler(step, 10)
    act()
    store._files.ready().set_progress_handler(None, 0)
    return count


@pytest.mark.parametrize("due_in", [0.0, 60.0])
def test_a_long_backlog_makes_no_claim_dearer(store: SqliteStore, due_in: float) -> None:
    def fill(count: int) -> None:
        db = store._files.ready()
        db.execute("BEGIN")
        (size,) = db.execute("SELECT count(*) FROM runs").fetchone()
        now = store._timeline.now()
        db.executemany(
            "INSERT INTO runs (run_id, fencing_token, agent, queue, priority, key, due) VALUES (?, 0, ?, ?, ?, ?, ?)",
            (
                (f"r{number}", "ab"[number % 2], "pq"[number % 3 == 0], number % 5, f"k{number}", now + due_in + number)
                for number in range(size, size + count)
            ),
        )
        db.execute("COMMIT")

    def look() -> None:
        store.claim_due("w", 30.0, [QueueTerms("q", 99, 9), QueueTerms("p")], ["a", "b"], 3)
        store.next_due(["q", "p"], ["a", "b"])

    fill(100)
    look()
    few = work_of(store, look)
    fill(5000)
    assert work_of(store, look) < 2 * few


# --- deaths -----------------------------------------------------------------------------------------------------------

WORKER = """
from agent_run_ledger.contract import Listing, QueueTerms
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock, a_row
path, owner, *runs = arguments
store = SqliteStore(path, clock=FakeClock())
store.create("plain of " + owner, owner, 30.0, b"s" * 32, [a_row(1)], Listing(1.5))
tell([lease.run_id for lease in store.claim_due(owner, 30.0, [QueueTerms("q")], ["agent"], 2)])
hear()
store.close()
tell()
"""


@contextlib.contextmanager
def workers(path: Path, *owners: str) -> Iterator[list[Child]]:
    """Processes that have claimed two runs each, and have one that is in no queue."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(child(WORKER, path, owner)) for owner in owners]
        for worker in started:
            assert len(worker.hear()) == 2
        yield started


def owners_of(store: SqliteStore) -> dict[str, int]:
    """How many runs each has."""
    owners = [summary.head.owner or "nobody" for summary in store.summaries()]
    return {owner: owners.count(owner) for owner in owners}


def test_all_runs_of_all_dead_owners_are_freed_at_once_and_of_the_living_none(store: SqliteStore, path: Path) -> None:
    for number in range(8):
        enqueue(store, f"r{number}")
    with workers(path, "dead", "stopped", "dead too") as (dead, stopped, dead_too):
        claim_due(store, owner="here", at_most=1)
        stopped.stop()
        assert store.free_dead() == 0
        dead.kill()
        dead_too.kill()
        assert store.free_dead() == 4, "those in no queue are free as well, and nobody waits for them"
        assert owners_of(store) == {"nobody": 7, "stopped": 3, "here": 1}
        assert sorted(os.listdir(f"{path}.owners")) == ["here", "stopped"]
        assert store.free_dead() == 0
        assert len(claim_due(store, owner="here")) == 5
        stopped.send(signal.SIGCONT)


def test_a_worker_that_was_stopped_for_longer_than_its_lease_loses_its_runs_and_is_refused(
    store: SqliteStore, path: Path, clock: FakeClock
) -> None:
    for number in range(2):
        enqueue(store, f"r{number}")
    with workers(path, "stopped") as (stopped,):
        stopped.stop()
        clock.advance(31.0)
        assert store.free_dead() == 2
        leases = claim_due(store, owner="here")
        assert [lease.token for lease in leases] == [2, 2]
        stopped.send(signal.SIGCONT)
        stopped.tell()
        stopped.hear()
        assert owners_of(store) == {"here": 2, "nobody": 1}
        assert all(store.append(lease.run_id, lease.token, 0, [a_row(2)], synced=False) for lease in leases)


def test_a_worker_that_ends_in_good_order_gives_its_runs_back(store: SqliteStore, path: Path) -> None:
    for number in range(2):
        enqueue(store, f"r{number}")
    with workers(path, "good") as (good,):
        good.tell()
        good.hear()
        assert sorted(lease.run_id for lease in claim_due(store)) == ["r0", "r1"]


def test_a_run_of_an_earlier_boot_is_freed(store: SqliteStore, path: Path) -> None:
    enqueue(store, "r")
    claim_due(store)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE runs SET lease_boot = 'an earlier one', lease_until = 1e9, owner = 'x'")
    assert store.free_dead() == 1
    assert len(claim_due(store)) == 1


def test_runs_of_another_machine_are_watched_for_as_long_as_their_leases_are_valid(
    store: SqliteStore, path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._holding.owners, "is_local", lambda: False)
    for run_id in ("lives", "dead"):
        enqueue(store, run_id)
    claim_due(store)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE runs SET lease_boot = 'another machine', lease_until = 5.0, owner = 'x'")
        for _ in range(2):
            assert store.free_dead() == 0
            clock.advance(16.0)
            db.execute("UPDATE runs SET lease_until = lease_until + 3.0 WHERE run_id = 'lives'")
    assert store.free_dead() == 1
    assert [lease.run_id for lease in claim_due(store)] == ["dead"]
    head = head_of(store, "lives")
    assert (head.owner, head.idle_seconds, head.lease_left) == ("x", None, None), "its clock says nothing here"


# --- failures ---------------------------------------------------------------------------------------------------------


def fail(store: SqliteStore, *, after: bool, statement: str = "COMMIT") -> None:
    """Let the next write meet an error of the disk: before it is done, or after."""
    store._files.writer = cast(Any, Failing(store._files.ready(), 10, after=after, statement=statement))


@pytest.mark.parametrize("after", [False, True])
def test_an_enqueue_whose_commit_failed_is_looked_up(store: SqliteStore, after: bool) -> None:
    store.head("r")
    fail(store, after=after)
    if after:
        enqueue(store, "r")
    else:
        with pytest.raises(StoreUnavailable):
            enqueue(store, "r")
        assert store.head("r") is None
    assert len(claim_due(store)) == after


@pytest.mark.parametrize("after", [False, True])
def test_a_claim_whose_commit_failed_loses_no_run(store: SqliteStore, after: bool) -> None:
    """Who does not know that the runs are his does nothing with them, and the next sweep frees them though he is alive."""
    for number in range(3):
        enqueue(store, f"r{number}")
    fail(store, after=after)
    with pytest.raises(StoreUnavailable):
        claim_due(store, at_most=2)
    assert store.free_dead() == (2 if after else 0)
    leases = claim_due(store)
    assert sorted(lease.run_id for lease in leases) == ["r0", "r1", "r2"]
    assert all(store.append(lease.run_id, lease.token, 0, [a_row(2)], synced=True) for lease in leases)
    assert store.free_dead() == 0


@pytest.mark.parametrize("after", [False, True])
def test_a_sweep_whose_commit_failed_can_be_made_again(store: SqliteStore, path: Path, after: bool) -> None:
    for number in range(2):
        enqueue(store, f"r{number}")
    with workers(path, "dead") as (dead,):
        dead.kill()
        fail(store, after=after)
        with pytest.raises(StoreUnavailable):
            store.free_dead()
        assert os.listdir(f"{path}.owners") == ["dead"], "it is buried once its runs are known to be free"
        assert store.free_dead() == (0 if after else 2)
        assert len(claim_due(store)) == 2


def test_a_run_that_cannot_be_adopted_for_want_of_the_disk_does_not_exist(store: SqliteStore) -> None:
    create(store, "source")
    store.post("source", "signal", b"", "somebody", 1.0)
    fail(store, after=False)
    pages = [[a_row(1), a_row(2, payload=b"x" * 100_000)]]
    requests = store.inbox("source", 0)
    with pytest.raises(StoreUnavailable):
        store.adopt("r", 7, SECRET, Listing(1.5, "agent", "q"), pages, requests, 0.0)
    assert (store.head("r"), store.read("r"), store.inbox("r", 0), store.secret("r")) == (None, [], [], b"")
    assert store.adopt("r", 7, SECRET, Listing(1.5, "agent", "q"), pages, requests, 0.0)
    assert store.read("r") == pages[0]
    assert list(store.check()) == []


def test_nobody_waits_for_the_lock_while_a_run_is_read_from_elsewhere(store: SqliteStore, path: Path) -> None:
    def pages() -> Iterator[list[Any]]:
        yield [a_row(1)]
        with contextlib.closing(SqliteStore(path, clock=FakeClock(), busy_seconds=0.0)) as other:
            create(other, "meanwhile")
        yield [a_row(2)]

    assert store.adopt("r", 7, SECRET, Listing(1.5), pages(), [], None)
    assert len(store.read("r")) == 2


# --- processes --------------------------------------------------------------------------------------------------------

WRITER = """
from agent_run_ledger.contract import Listing
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock, a_row
store = SqliteStore(arguments[0], clock=FakeClock())
while True:
    what, run_id = hear()
    if what == "enqueue":
        store.enqueue(run_id, b"s" * 32, [a_row(1)], Listing(1.5, "agent", "q"), 0.0)
    elif what == "post":
        store.post(run_id, "signal", b"", "somebody", 1.0)
    elif what == "claim":
        token = store.claim(run_id, "writer", 30.0).token
    elif what == "release":
        store.release(run_id, token)
    tell()
"""


def test_who_waits_is_told_of_what_another_process_does(store: SqliteStore, path: Path) -> None:
    with child(WRITER, path) as writer:
        for what in ("enqueue", "claim", "post", "release"):
            nothing_is_new(store)
            writer.tell([what, "r"])
            if what != "claim":
                assert store.wait_for_work(30.0), what
            writer.hear()


def test_a_forked_child_claims_waits_and_ends_for_itself(store: SqliteStore, path: Path) -> None:
    for number in range(4):
        enqueue(store, f"r{number}")
    (mine,) = claim_due(store, owner="a", at_most=1)
    nothing_is_new(store)
    waiting = threading.Thread(target=lambda: store.wait_for_work(30.0), daemon=True)
    waiting.start()

    def work() -> str:
        (lease,) = claim_due(store, owner="a", at_most=1)
        assert lease.owner.startswith("a.")
        with pytest.raises(LeaseLost):
            store.renew(mine.run_id, mine.token, 30.0)
        store.release(mine.run_id, mine.token, due_in=0.0)
        with pytest.raises(RunOwned):
            store.claim(mine.run_id, "b", 30.0)
        assert store.free_dead() == 0
        assert store.append(lease.run_id, lease.token, 0, [a_row(2)], synced=False)
        assert not store._news._waiting, "the parent's threads do not wait here"
        nothing_is_new(store)
        store.wake()
        assert store.wait_for_work(30.0)
        claim_due(store, owner="b", at_most=1)
        store.close()
        return lease.run_id

    run_id = in_a_fork(work)
    store.wake()
    waiting.join(60)
    assert not waiting.is_alive()
    assert head_of(store, mine.run_id).owner == "a"
    assert store.free_dead() == 0
    assert store.append(mine.run_id, mine.token, 0, [a_row(2)], synced=False)
    assert run_id in {lease.run_id for lease in claim_due(store, owner="a")}


def test_threads_and_processes_that_claim_at_once_pass_no_limit(store: SqliteStore, path: Path) -> None:
    script = """
from agent_run_ledger.contract import QueueTerms
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock
store = SqliteStore(arguments[0], clock=FakeClock())
while True:
    owner = hear()
    tell([[lease.run_id, lease.token] for _ in range(5) for lease in
        store.claim_due(owner, 30.0, [QueueTerms("q", 7, 3)], ["agent"], 2)])
"""

    def take(owner: str, got: list[Lease]) -> None:
        got.extend(claim_due(store, QueueTerms("q", 7, 3), owner=owner, at_most=3))

    for number in range(30):
        enqueue(store, f"r{number}", key="abc"[number % 3])
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(child(script, path)) for _ in range(3)]
        for turn in range(5):
            for number, other in enumerate(others):
                other.tell(f"{turn} {number}")
            got: list[Lease] = []
            in_threads([partial(take, name, got) for name in "xy"])
            claimed = [(lease.run_id, lease.token) for lease in got]
            claimed += [tuple(each) for other in others for each in other.hear()]
            assert len({run_id for run_id, _ in claimed}) == len(claimed) == 7
            keys = [head_of(store, run_id).listing.key for run_id, _ in claimed]
            assert max(map(keys.count, keys)) <= 3
            for run_id, token in claimed:
                store.release(run_id, token, due_in=0.0)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET due = 1.0 WHERE run_id = 'plain'",
        "UPDATE runs SET due = 'soon'",
        "UPDATE runs SET priority = 'high'",
        "UPDATE runs SET queue = NULL WHERE run_id = 'r'",
    ],
)
def test_a_head_that_no_claim_could_read_cannot_be_written(store: SqliteStore, path: Path, statement: str) -> None:
    create(store, "plain")
    enqueue(store, "r")
    with contextlib.closing(sqlite3.connect(path)) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(statement)


@pytest.mark.parametrize("name", ["runs_that_wait", "runs_that_are_busy"])
def test_check_names_an_index_that_is_missing(store: SqliteStore, path: Path, name: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"DROP INDEX {name}")
    assert [f"index {name} is missing" in said for said in store.check()] == [True]


def test_check_names_a_table_of_queues_that_was_changed(store: SqliteStore, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE workers")
        db.execute("CREATE TABLE workers (worker, said, beat)")
    assert any("table workers of the schema was changed" in said for said in store.check())
