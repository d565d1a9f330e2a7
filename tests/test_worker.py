"""A worker takes what is due, as many runs at once as it has slots and its queues allow, and ends in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    InvalidArguments,
    InvalidName,
    RetryPolicy,
    RunClosed,
    StoreReadOnly,
    StoreUnavailable,
    Worker,
)
from agent_run_ledger.contract import Store
from agent_run_ledger.stores.memory import MemoryStore
from support.fleets import LONG, Gate, until, worker
from support.ledgers import Bench, Tool
from support.programs import RUN, Way


@pytest.fixture
def real(bench: Bench) -> Bench:
    """Storage with the machine's clock."""
    return bench.on_real_time()


def gated(ledger: AgentRunLedger, gate: Gate, **options: Any) -> Any:
    """An agent with one step that stands in the gate."""

    @ledger.tool(name="pass", effect=Effect.READ)
    def passes(given: Any) -> Any:
        return gate(given)

    @ledger.agent(**{"name": "gated"} | options)
    def agent(given: Any) -> Any:
        return passes(given)

    return agent


def summing(ledger: AgentRunLedger, way: Way) -> Any:
    add = way.tool(ledger, lambda a, b: a + b, name="add", effect=Effect.READ)

    def total(count: int) -> Any:
        so_far = 0
        for number in range(count):
            so_far = yield add(so_far, number)
        return so_far

    return way.agent(ledger, total, name="total")


# --- taking what is due -----------------------------------------------------------------------------------------------


def test_runs_that_are_submitted_before_and_after_it_starts_are_brought_to_their_ends(real: Bench, way: Way) -> None:
    ledger = real.open()
    total = summing(ledger, way)
    before = [ledger.submit(total, count) for count in range(5)]
    with worker(ledger):
        after = [ledger.submit(total, count) for count in range(5)]
        assert [handle.result(LONG) for handle in before + after] == [0, 0, 1, 3, 6] * 2
    assert ledger.verify().findings == []


def test_sync_and_async_agents_are_worked_on_side_by_side(real: Bench) -> None:
    ledger = real.open()
    sync, others = Gate(), Gate(is_open=True)
    plain = gated(ledger, sync)

    @ledger.tool(name="apass", effect=Effect.READ)
    async def apasses(given: int) -> int:
        await asyncio.sleep(0)
        return int(others(given))

    @ledger.agent()
    async def aagent(given: int) -> int:
        return int(await apasses(given))

    with worker(ledger, concurrency=2):
        slow, quick = ledger.submit(plain, "slow"), [ledger.submit(aagent, number) for number in range(3)]
        assert [handle.result(LONG) for handle in quick] == [0, 1, 2]
        sync.open()
        assert slow.result(LONG) == "slow"


def test_many_async_runs_take_one_thread(real: Bench) -> None:
    ledger = real.open()
    threads: set[int] = set()
    inside: set[int] = set()
    most = [0]

    @ledger.agent()
    async def agent(number: int) -> int:
        threads.add(threading.get_ident())
        inside.add(number)
        most[0] = max(most[0], len(inside))
        while most[0] < 20:
            await asyncio.sleep(0.001)
        inside.discard(number)
        return number

    handles = [ledger.submit(agent, number) for number in range(20)]
    with worker(ledger, concurrency=20):
        assert [handle.result(LONG) for handle in handles] == list(range(20))
    assert (len(threads), most) == (1, [20])


def test_it_works_on_no_more_runs_at_once_than_it_has_slots(real: Bench) -> None:
    ledger, gate = real.open(), Gate()
    handles = [ledger.submit(gated(ledger, gate), number) for number in [0]]
    agent = ledger._agents["gated"]
    handles += [ledger.submit(_function(agent), number) for number in range(1, 9)]
    with worker(ledger, concurrency=3) as working:
        gate.await_count(3)
        assert len(working.running) == 3
        gate.open()
        assert sorted(handle.result(LONG) for handle in handles) == list(range(9))
    assert gate.most == 3


def _function(agent: Any) -> Any:
    """What stands for a registered agent where it is submitted."""

    def function() -> None: ...

    function.registered = agent  # type: ignore[attr-defined]
    return function


def test_it_leaves_other_queues_and_agents_that_it_does_not_know_alone(real: Bench, way: Way) -> None:
    ledger, other = real.open(), real.open()
    total = summing(ledger, way)
    unknown = way.agent(other, lambda: iter(()), name="unknown")
    elsewhere = ledger.submit(total, 1, queue="elsewhere")
    nobodys = other.submit(unknown)
    with worker(ledger, queues=["default", "second"]):
        assert ledger.submit(total, 3, queue="second").result(LONG) == 3
        assert ledger.submit(total, 3).result(LONG) == 3
    assert (elsewhere.status, nobodys.status) == ("PENDING", "PENDING")


def test_an_agent_that_is_registered_later_is_known_from_then_on(real: Bench, way: Way) -> None:
    ledger = real.open()
    with worker(ledger):
        assert ledger.submit(summing(ledger, way), 4).result(LONG) == 6


def test_children_of_a_run_are_worked_on_by_whoever_has_a_slot(real: Bench, way: Way) -> None:
    ledger = real.open()
    total = summing(ledger, way)

    def parent(count: int) -> Any:
        from agent_run_ledger import current_run

        results = yield current_run().map(total, list(range(count)))
        return sum(results)

    handle = ledger.submit(way.agent(ledger, parent), 10)
    with worker(ledger, concurrency=2):
        assert handle.result(LONG) == sum(sum(range(count)) for count in range(10))


def test_two_workers_of_one_ledger_are_two_owners_and_do_each_step_once(real: Bench, way: Way) -> None:
    ledger, calls = real.open(), Counter[str]()
    owners: set[str] = set()

    def work(number: int) -> int:
        calls[f"{number}"] += 1
        return number

    step = way.tool(ledger, work, name="work", effect=Effect.READ)

    def agent(number: int) -> Any:
        from agent_run_ledger import current_run

        owners.add(str(ledger.get_run(current_run().run_id).owner))
        return (yield step(number))

    of = way.agent(ledger, agent)
    handles = [ledger.submit(of, number) for number in range(60)]
    with worker(ledger, concurrency=2, name="one") as one, worker(ledger, concurrency=2, name="two") as two:
        assert [handle.result(LONG) for handle in handles] == list(range(60))
        assert one.name.startswith("one-")
        assert owners <= {one.name, two.name}
    assert set(calls.values()) == {1}


# --- limits -----------------------------------------------------------------------------------------------------------


def test_no_more_runs_of_a_queue_are_worked_on_at_once_than_it_allows(real: Bench) -> None:
    ledger, other = real.open(), real.open()
    gate = Gate()
    for each in (ledger, other):
        each.queue("narrow", concurrency=2)
        gated(each, gate)
    agent = _function(ledger._agents["gated"])
    handles = [ledger.submit(agent, number, queue="narrow") for number in range(10)]
    with worker(ledger, queues=["narrow"]), worker(other, queues=["narrow"]):
        gate.await_count(2)
        gate.open()
        assert sorted(handle.result(LONG) for handle in handles) == list(range(10))
    assert gate.most <= 2


def test_a_limit_that_is_declared_later_counts_from_then_on(real: Bench) -> None:
    ledger, gate = real.open(), Gate()
    agent = gated(ledger, gate)
    with worker(ledger):
        ledger.queue("default", concurrency=1)
        handles = [ledger.submit(agent, number) for number in range(3)]
        gate.await_count(1)
        gate.open()
        assert sorted(handle.result(LONG) for handle in handles) == [0, 1, 2]
    assert gate.most == 1


def test_runs_with_one_key_wait_for_each_other_and_for_no_others(real: Bench) -> None:
    ledger = real.open()
    ledger.queue("default", per_key=1)
    gates = {key: Gate() for key in ("acme", "globex")}

    @ledger.tool(name="pass", effect=Effect.READ)
    def passes(key: str, number: int) -> int:
        return int(gates[key](number))

    @ledger.agent()
    def agent(name: str, number: int) -> int:
        return passes(name, number)

    with worker(ledger):
        handles = [ledger.submit(agent, name, n, key=name) for n in range(4) for name in gates]
        for gate in gates.values():
            gate.await_count(1)
        gates["globex"].open()
        assert [handle.result(LONG) for handle in handles[1::2]] == [0, 1, 2, 3]
        gates["acme"].open()
        assert [handle.result(LONG) for handle in handles[::2]] == [0, 1, 2, 3]
    assert [gate.most for gate in gates.values()] == [1, 1]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_agent_that_raises_ends_its_run_and_not_the_worker(real: Bench, way: Way) -> None:
    ledger = real.open()

    def fails() -> Any:
        raise ValueError("no")
        yield

    with worker(ledger):
        with pytest.raises(RunClosed, match="ValueError: no"):
            ledger.submit(way.agent(ledger, fails)).result(LONG)
        assert ledger.submit(summing(ledger, way), 3).result(LONG) == 3


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")], ids=repr)
def test_what_an_agent_means_for_its_process_is_logged_and_ends_no_worker(
    real: Bench, way: Way, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = real.open()

    def ends() -> Any:
        raise error
        yield

    with worker(ledger), caplog.at_level(logging.ERROR, "agent_run_ledger"):
        handle = ledger.submit(way.agent(ledger, ends), run_id=RUN)
        until(lambda: handle.status == "BLOCKED" and ledger.get_run(RUN).owner is None)
        assert ledger.submit(summing(ledger, way), 3).result(LONG) == 3
        until(lambda: any(type(error).__name__ in record.getMessage() for record in caplog.records))
    assert ledger.get_run(RUN).due_in_seconds is None


def test_a_task_of_an_async_agent_that_ends_the_process_stops_no_other_run(real: Bench) -> None:
    ledger = real.open()

    @ledger.agent()
    async def ends() -> None:
        async def leave() -> None:
            raise SystemExit(3)

        await asyncio.wait([asyncio.create_task(leave())])

    @ledger.agent()
    async def goes_on(number: int) -> int:
        for _ in range(20):
            await asyncio.sleep(0.001)
        return number

    with worker(ledger):
        handles = [ledger.submit(goes_on, number) for number in range(3)]
        ledger.submit(ends)
        handles += [ledger.submit(goes_on, number) for number in range(3, 6)]
        assert [handle.result(LONG) for handle in handles] == list(range(6))


class Behind(MemoryStore):
    """A store behind a network, in which it takes a while until it is written that a run is parked; only so long as it matters."""

    is_remote = True

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def append(self, run_id: str, token: int, inbox: int, rows: Any, *, synced: bool) -> bool:
        if rows[0].kind == "parked":
            self.released.wait(0.3)
        return super().append(run_id, token, inbox, rows, synced=synced)

    def release(self, run_id: str, token: int, **options: Any) -> None:
        super().release(run_id, token, **options)
        self.released.set()


def test_a_run_whose_process_was_to_end_is_not_let_go_of_before_that_is_written() -> None:
    store = Behind()
    with AgentRunLedger(store) as ledger:

        @ledger.agent()
        async def ends() -> None:
            raise SystemExit(3)

        with worker(ledger):
            handle = ledger.submit(ends, run_id=RUN)
            until(store.released.is_set)
        assert (handle.status, ledger.get_run(RUN).due_in_seconds) == ("BLOCKED", None)


class Away:
    """A store that can be taken away: every verb but `close` and `wake` raises then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_away = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        if self.is_away and name not in ("close", "wake", "is_remote", "place", "path"):
            self.asked += 1
            raise StoreUnavailable("the server is away; nothing was done.")
        return getattr(self._store, name)


@pytest.fixture
def away() -> Iterator[tuple[AgentRunLedger, AgentRunLedger, Away]]:
    """A ledger on a store that can be taken away, and one beside it that sees the store all the time."""
    store = MemoryStore()
    taken = Away(store)
    with AgentRunLedger(taken) as ledger, AgentRunLedger(store) as beside:  # type: ignore[arg-type] # it is one
        yield ledger, beside, taken
        taken.is_away = False


def test_an_outage_of_the_store_is_waited_for_and_ends_neither_worker_nor_run(
    away: tuple[AgentRunLedger, AgentRunLedger, Away], way: Way
) -> None:
    ledger, beside, store = away
    total = summing(ledger, way)
    with worker(ledger):
        assert ledger.submit(total, 2).result(LONG) == 1
        store.is_away = True
        handle = beside.submit(total, 4)
        until(lambda: store.asked > 2)
        assert handle.status == "PENDING"
        store.is_away = False
        assert handle.result(LONG) == 6


@pytest.mark.parametrize("is_draining", [False, True], ids=["goes on", "drains"])
def test_what_a_step_did_in_an_outage_is_written_when_the_store_is_back_and_not_done_again(
    away: tuple[AgentRunLedger, AgentRunLedger, Away], is_draining: bool
) -> None:
    ledger, beside, store = away
    gate, after = Gate(), Tool("done")

    @ledger.tool(name="pass", effect=Effect.MUTATE)
    def passes() -> Any:
        return gate("paid")

    @ledger.tool(name="after", effect=Effect.READ)
    def afterwards() -> Any:
        return after()

    @ledger.agent()
    def agent() -> Any:
        return passes(), afterwards()

    working = ledger.worker(poll_seconds=0.02)
    handle = beside.submit(agent, run_id=RUN)
    gate.await_count(1)
    store.is_away = True
    gate.open()
    until(lambda: store.asked > 5)
    assert beside.get_run(RUN).status == "RUNNING"
    if is_draining:
        working.drain()
    store.is_away = False
    if is_draining:
        assert working.stop()
        assert beside.steps(RUN)[0].state == "COMPLETED"
        working = ledger.worker(poll_seconds=0.02)
    assert handle.result(LONG) == ("paid", "done")
    assert working.stop()
    assert (gate.came, after.calls) == (["paid"], 1)
    assert beside.verify().findings == []


def test_a_worker_may_be_started_while_the_store_is_away(
    away: tuple[AgentRunLedger, AgentRunLedger, Away], way: Way
) -> None:
    ledger, beside, store = away
    handle = beside.submit(summing(ledger, way), 3)
    store.is_away = True
    with worker(ledger):
        until(lambda: store.asked > 2)
        store.is_away = False
        assert handle.result(LONG) == 3


def test_a_worker_drains_while_the_store_is_away(away: tuple[AgentRunLedger, AgentRunLedger, Away]) -> None:
    ledger, _, store = away
    with worker(ledger) as working:
        store.is_away = True
        until(lambda: store.asked > 2)
        assert working.stop()


def test_runs_of_a_dead_worker_are_taken_over(bench: Bench, way: Way) -> None:
    """The clock stands still but for the moment in which the dead one's lease runs out."""
    dead, ledger = bench.open(), bench.open()
    total = summing(ledger, way)
    ledger.submit(total, 4, run_id=RUN)
    (lease,) = dead._leases.claim_due([_default()], ["total"], 1)
    with worker(ledger):
        assert ledger.get_run(RUN).owner == lease.owner
        bench.owners_die()
        bench.clock.advance(6)  # who swept before the store knew the new time sweeps again
        until(lambda: ledger.get_run(RUN).status == "COMPLETED")


def _default() -> Any:
    from agent_run_ledger.contract import QueueTerms

    return QueueTerms("default")


# --- ending -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_lets_steps_in_flight_finish_and_begins_no_new_one(real: Bench, way: Way) -> None:
    ledger, gate, after = real.open(), Gate(), Tool("after")
    passes = way.tool(ledger, lambda: gate("first"), name="pass", effect=Effect.MUTATE)
    afterwards = way.tool(ledger, after, name="after", effect=Effect.READ)

    def agent() -> Any:
        first = yield passes()
        return first, (yield afterwards())

    working = ledger.worker(poll_seconds=0.02)
    handle = ledger.submit(way.agent(ledger, agent), run_id=RUN)
    gate.await_count(1)
    assert not working.stop(timeout=0)
    assert working.state == "draining"
    gate.open()
    assert working.stop()
    assert (working.state, working.running) == ("stopped", [])
    assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED"]
    run = ledger.get_run(RUN)
    assert (run.owner, after.calls) == (None, 0)
    assert run.due_in_seconds is not None
    assert run.due_in_seconds <= 0
    with worker(ledger):
        assert handle.result(LONG) == ("first", "after")
    assert gate.came == ["first"]
    assert ledger.verify().findings == []


def test_a_draining_worker_takes_nothing_new(real: Bench) -> None:
    ledger, gate = real.open(), Gate()
    agent = gated(ledger, gate)
    working = ledger.worker(poll_seconds=0.02)
    first = ledger.submit(agent, "first")
    gate.await_count(1)
    working.drain()
    second = ledger.submit(agent, "second")
    until(lambda: [record.state for record in ledger.workers()] == ["draining"] or working.drain())
    assert (gate.came, second.status) == (["first"], "PENDING")
    gate.open()
    assert working.stop()
    assert first.status == "COMPLETED"


def test_steps_that_outlast_the_time_to_drain_are_left_to_themselves(real: Bench) -> None:
    ledger, gate = real.open(), Gate()
    working = ledger.worker(poll_seconds=0.02, drain_seconds=0.05)
    handle = ledger.submit(gated(ledger, gate), "slow", run_id=RUN)
    gate.await_count(1)
    assert not working.stop()
    assert working.state == "stopped"
    assert ledger.get_run(RUN).owner == working.name
    gate.open()
    until(lambda: ledger.get_run(RUN).owner is None)
    assert ledger.steps(RUN)[0].state == "COMPLETED"
    assert handle.status == "COMPLETED"


def test_a_closed_ledger_has_stopped_its_workers(real: Bench) -> None:
    ledger, gate, other = real.open(), Gate(), real.open()
    working = ledger.worker(poll_seconds=0.02)
    agent = gated(ledger, gate)
    ledger.submit(agent, 1, run_id=RUN)
    gate.await_count(1)
    closing = threading.Thread(target=ledger.close)
    closing.start()
    until(lambda: working.state == "draining")
    gate.open()
    closing.join()
    assert working.state == "stopped"
    if real.kind != "memory":
        assert other.steps(RUN)[0].state == "COMPLETED"
    with pytest.raises(StoreUnavailable, match="no worker was started"):
        ledger.worker()


def test_a_run_that_stops_its_own_worker_does_not_wait_for_itself(real: Bench, way: Way) -> None:
    ledger = real.open()
    working: list[Worker] = []
    stop = way.tool(ledger, lambda: working[0].stop(), name="stop", effect=Effect.READ)

    def agent() -> Any:
        return (yield stop())

    working.append(ledger.worker(poll_seconds=0.02))
    handle = ledger.submit(way.agent(ledger, agent), run_id=RUN)
    assert working[0].wait(LONG)
    assert ledger.steps(RUN)[0].output_json == "false"
    with worker(ledger):
        assert handle.result(LONG) is False


def test_run_and_wait_return_when_the_worker_was_stopped(real: Bench) -> None:
    ledger = real.open()
    working = ledger.worker()
    waits = threading.Thread(target=working.run)
    waits.start()
    assert not working.wait(0)
    assert working.stop()
    waits.join()
    working.run()
    assert working.wait()


def test_the_signal_is_what_it_was_when_the_last_worker_has_ended(real: Bench) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ledger = real.open()
    one, two = ledger.worker(), ledger.worker()
    one.stop()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    two.stop()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_program_that_handles_the_signal_itself_keeps_its_handler(real: Bench) -> None:
    def mine(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with worker(real.open()):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"concurrency": 0},
        {"concurrency": 2.0},
        {"concurrency": True},
        {"concurrency": 10_001},
        {"queues": ()},
        {"queues": "default"},
        {"queues": [""]},
        {"queues": ["a\nb"]},
        {"queues": [1]},
        {"poll_seconds": 0},
        {"poll_seconds": float("nan")},
        {"poll_seconds": "1"},
        {"drain_seconds": -1},
        {"drain_seconds": float("inf")},
        {"name": ""},
        {"health": ("127.0.0.1", 70_000)},
        {"health": ("127.0.0.1", "80")},
        {"health": 8080},
    ],
    ids=repr,
)
def test_a_worker_that_cannot_be_is_refused_and_leaves_no_trace(bench: Bench, given: dict[str, Any]) -> None:
    ledger = bench.open()
    with pytest.raises((InvalidArguments, InvalidName)):
        ledger.worker(**given)
    assert ledger.workers() == []


def test_a_ledger_that_is_open_to_look_at_has_no_workers(tmp_path: Any) -> None:
    AgentRunLedger(tmp_path / "ledger.db").close()
    with AgentRunLedger.open_read_only(tmp_path / "ledger.db") as ledger, pytest.raises(StoreReadOnly):
        ledger.worker()


class Slow(MemoryStore):
    """A store in which a run that was given back is claimed again before whoever gave it back is told that it was."""

    def release(self, run_id: str, token: int, **options: Any) -> None:
        super().release(run_id, token, **options)
        until(lambda: (head := self.head(run_id)) is None or head.owner is not None or head.due_in is None)


def test_a_run_that_is_due_again_the_moment_it_is_given_back_keeps_its_slot() -> None:
    store, gate = Slow(), Gate()
    starts: list[int] = []
    with AgentRunLedger(store) as ledger:

        @ledger.agent(retry=RetryPolicy(max_attempts=2, base=0.0, cap=0.0))
        def agent() -> Any:
            starts.append(1)
            if len(starts) == 1:
                raise ValueError("again")
            return gate("done")

        with worker(ledger, concurrency=2) as working:
            handle = ledger.submit(agent, run_id=RUN)
            gate.await_count(1)
            until(lambda: working.running == [RUN])
            gate.open()
            assert handle.result(LONG) == "done"
            until(lambda: working.running == [])
