"""submit leaves a run to workers: checked whole before anything is written, made once, and found again by its handle."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    Effect,
    Handle,
    IllegalTransition,
    InvalidArguments,
    InvalidName,
    LedgerError,
    Run,
    RunClosed,
    RunInputMismatch,
    RunNotEnded,
    RunNotFound,
    RunOwned,
    UnorderedStep,
    current_run,
)
from support.fleets import until
from support.ledgers import HOSTILE, Bench, Tool
from support.programs import RUN, Invoice, Way
from support.pumping import pump


def adder(ledger: AgentRunLedger, way: Way, tool: Tool | None = None) -> Any:
    """An agent that adds, in a step of its own."""
    add = way.tool(
        ledger, (lambda a, b: a + b) if tool is None else lambda a, b: tool(), name="add", effect=Effect.READ
    )

    def total(a: int, b: int = 2) -> Any:
        return (yield add(a, b))

    return way.agent(ledger, total, name="total")


def first(bench: Bench, run_id: str = RUN) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bench.rows(run_id)[0].body)
    return body


# --- submitting -------------------------------------------------------------------------------------------------------


def test_a_submitted_run_is_written_down_and_waits_for_a_worker(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    handle = ledger.submit(total, 1, run_id=RUN, queue="books", priority=7, key="acme", b=4)
    assert (handle.run_id, handle.status, repr(handle)) == (RUN, "PENDING", "<Handle of run 'run'>")
    told = first(bench)
    assert {name: told[name] for name in ("agent", "queue", "priority", "key")} == {
        "agent": "total", "queue": "books", "priority": 7, "key": "acme",
    }  # fmt: skip
    run = ledger.get_run(RUN)
    assert (run.owner, run.queue, run.due_in_seconds) == (None, "books", 0.0)
    assert ledger.verify().findings == []


def test_whoever_works_for_the_queue_brings_it_to_its_end(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    handle = ledger.submit(adder(ledger, way), 1)
    assert pump(ledger, bench.clock) == [f"{handle.run_id} ended"]
    assert (handle.result(), handle.status) == (3, "COMPLETED")
    assert asyncio.run(handle.aresult()) == 3


def test_it_can_be_submitted_and_awaited_in_an_event_loop(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)

    async def program() -> Any:
        handle = await ledger.asubmit(total, 1, run_id=RUN, delay=5)
        with pytest.raises(InvalidArguments, match="aresult"):
            handle.result()
        worked = asyncio.create_task(asyncio.to_thread(pump, ledger, bench.clock))
        result = await handle.aresult()
        await worked
        return result

    assert asyncio.run(program()) == 3


def test_a_delayed_run_is_due_when_its_time_has_come(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    ledger.submit(adder(ledger, way), 1, run_id=RUN, delay=10)
    assert pump(ledger, bench.clock, until=9) == []
    bench.clock.advance(9.5)
    assert pump(ledger, bench.clock, until=1) == [f"{RUN} ended"]


def test_the_larger_priority_goes_first_and_among_equals_the_earlier(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    for number, priority in enumerate((0, -3, 5, 0, 5)):
        ledger.submit(total, number, run_id=f"{number}", priority=priority)
        bench.clock.advance(1)
    assert [line.split()[0] for line in pump(ledger, bench.clock)] == ["2", "4", "0", "3", "1"]


# --- made once --------------------------------------------------------------------------------------------------------


def test_a_run_id_with_equal_arguments_is_attached_to_and_nothing_is_written(bench: Bench, way: Way) -> None:
    ledger, tool = bench.open(), Tool(5)
    total = adder(ledger, way, tool)
    ledger.submit(total, 1, run_id=RUN, priority=1)
    written = bench.rows(RUN)
    again = ledger.submit(total, 1, run_id=RUN, priority=9, queue="elsewhere")
    assert bench.rows(RUN) == written
    pump(ledger, bench.clock)
    assert again.result() == 5
    assert ledger.submit(total, 1, run_id=RUN).result() == 5
    assert tool.calls == 1
    assert len(ledger.runs()) == 1


def test_many_that_submit_the_same_run_at_once_make_it_once(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    start = threading.Barrier(8)

    def submit() -> None:
        start.wait()
        ledger.submit(total, 1, run_id=RUN)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.run_id for run in ledger.runs()] == [RUN]
    assert pump(ledger, bench.clock) == [f"{RUN} ended"]


@pytest.mark.parametrize("given", [(2,), (1, 3)], ids=["another", "one more"])
def test_a_run_id_with_other_arguments_is_refused(bench: Bench, way: Way, given: tuple[int, ...]) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    ledger.submit(total, 1, run_id=RUN)
    with pytest.raises(RunInputMismatch, match="another input"):
        ledger.submit(total, *given, run_id=RUN)
    other = way.agent(ledger, lambda a, b=2: iter(()), name="other")
    with pytest.raises(RunInputMismatch, match="another goal"):
        ledger.submit(other, 1, run_id=RUN)


def test_a_run_that_was_begun_by_hand_is_only_attached_to(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    assert way.start(ledger, total, 1) == 3
    assert ledger.submit(total, 1, run_id=RUN).result() == 3


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"run_id": ""},
        {"run_id": "a\nb"},
        {"queue": ""},
        {"queue": "a\0b"},
        {"queue": "q" * 256},
        {"queue": None},
        {"priority": 1.5},
        {"priority": True},
        {"priority": 2**31},
        {"priority": "high"},
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"delay": "soon"},
        {"key": ""},
        {"key": 7},
        {"key": "\ud800"},
        {"c": 1},
        {"a": "text"},
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_before_anything_is_written(bench: Bench, given: dict[str, Any]) -> None:
    ledger = bench.open()
    total = adder(ledger, Way(is_async=False))
    with pytest.raises((InvalidArguments, InvalidName)) as refused:
        ledger.submit(total, **({"a": 1} | given))
    assert isinstance(refused.value, LedgerError)
    assert ledger.runs() == []


def test_only_agents_are_submitted(bench: Bench) -> None:
    ledger = bench.open()
    with pytest.raises(InvalidArguments, match="is no agent"):
        ledger.submit(len, [])
    assert ledger.runs() == []


@pytest.mark.parametrize("name", ["run_id", "queue", "priority", "delay", "key"])
def test_a_parameter_of_the_same_name_is_never_swallowed(bench: Bench, name: str) -> None:
    ledger = bench.open()
    names: dict[str, Any] = {}
    exec(f"def agent(a, {name}='of the agent'): return a, {name}", names)
    agent = ledger.agent()(names["agent"])
    for given in ({}, {name: "x"}):
        with pytest.raises(InvalidArguments, match=f"a parameter '{name}'"):
            ledger.submit(agent, 1, **given)
    assert ledger.runs() == []
    handle = ledger.submit(agent, 1, "by position")
    pump(ledger, bench.clock)
    assert handle.result() == (1, "by position")


def test_a_program_does_not_submit_what_its_replay_would_submit_again(bench: Bench, way: Way) -> None:
    ledger, said = bench.open(), []
    total = adder(ledger, way)

    def agent() -> Any:
        with pytest.raises(InvalidArguments, match=r"run\.map\(total, items\)") as refused:
            ledger.submit(total, 1)
        said.append(str(refused.value))
        return ledger.submit(total, 1, run_id="named").run_id
        yield

    assert way.run(ledger, agent) == "named"
    assert "nothing was written" in said[0]
    assert {run.run_id for run in ledger.runs()} == {RUN, "named"}


def test_hostile_names_are_data(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    total = adder(ledger, way)
    for number, name in enumerate(HOSTILE.values()):
        if "\x7f" in name:
            with pytest.raises(InvalidName):
                ledger.submit(total, number, queue=name)
            continue
        ledger.submit(total, number, run_id=name, queue=name, key=name)
        assert (ledger.get_run(name).queue, first(bench, name)["key"]) == (name, name)
    assert ledger.verify().findings == []


# --- handles ----------------------------------------------------------------------------------------------------------


def test_a_handle_of_another_process_rebuilds_the_result_where_the_agent_is_known(bench: Bench) -> None:
    def register(ledger: AgentRunLedger) -> Any:
        @ledger.agent()
        def bill(number: int) -> Invoice:
            return Invoice(number, "acme")

        return bill

    ledger, other, reader = bench.open(), bench.open(), bench.open()
    ledger.submit(register(ledger), 7, run_id=RUN)
    pump(ledger, bench.clock)
    register(other)
    assert other.handle(RUN).result() == Invoice(7, "acme")
    assert reader.handle(RUN).result() == {"number": 7, "customer": "acme"}
    with pytest.raises(RunNotFound):
        reader.handle("nowhere")


def test_a_result_that_does_not_come_in_time_says_how_the_run_stands(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    handle = ledger.submit(adder(ledger, way), 1, run_id=RUN, queue="books", delay=100)
    with pytest.raises(RunNotEnded, match=r"within 2 s: it is PENDING, and due in .* worker of queue 'books'") as late:
        handle.result(timeout=2)
    assert isinstance(late.value, TimeoutError)
    assert (late.value.run_id, late.value.seconds, late.value.status) == (RUN, 2, "PENDING")
    bench.clock.advance(200)
    with pytest.raises(RunNotEnded, match="has been due for"):
        asyncio.run(handle.aresult(timeout=0))
    (lease,) = ledger._leases.claim_due([_terms("books")], ["total"], 1)
    with pytest.raises(RunNotEnded, match=f"owned by {ledger._leases.owner!r}"):
        handle.result(timeout=0)
    ledger._store.release(RUN, lease.token)
    with pytest.raises(RunNotEnded, match="no worker looks at it before somebody asks"):
        handle.result(timeout=0)


def _terms(name: str) -> Any:
    from agent_run_ledger.contract import QueueTerms

    return QueueTerms(name)


@pytest.mark.parametrize("timeout", [-1, "1", float("nan"), True])
def test_a_timeout_that_is_none_is_refused(bench: Bench, timeout: Any) -> None:
    ledger = bench.open()
    handle = ledger.submit(adder(ledger, Way(is_async=False)), 1)
    with pytest.raises(InvalidArguments):
        handle.result(timeout)


def test_what_ends_without_a_result_is_raised_with_its_cause(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def fails() -> Any:
        raise ValueError("no such month")
        yield

    def spends() -> Any:
        yield work()
        yield work()

    work = way.tool(ledger, Tool(1, 2), name="work")
    failed = ledger.submit(way.agent(ledger, fails, name="fails"))
    spent = ledger.submit(way.agent(ledger, spends, name="spends", budget=Budget(steps=1)))
    cancelled = ledger.submit(adder(ledger, way), 1)
    cancelled.cancel(reason="enough", by="ann")
    pump(ledger, bench.clock)
    for handle, status, cause in (
        (failed, "FAILED", "ValueError: no such month"),
        (spent, "DEAD_LETTER", "steps"),
        (cancelled, "CANCELLED", "enough"),
    ):
        with pytest.raises(RunClosed, match=cause) as closed:
            handle.result()
        assert (closed.value.status, handle.status) == (status, status)
        assert "it has no result" in str(closed.value)
        with pytest.raises(RunClosed, match=cause):
            asyncio.run(handle.aresult())


def test_a_parked_run_is_waited_for_and_one_in_quarantine_is_not(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pay = way.tool(ledger, Tool(TimeoutError("no answer")), name="pay", effect=Effect.MUTATE)

    def pays() -> Any:
        return (yield pay())

    handle = ledger.submit(way.agent(ledger, pays, name="pays"), run_id=RUN)
    pump(ledger, bench.clock)
    assert handle.status == "BLOCKED"
    with pytest.raises(RunNotEnded, match="it was left by"):
        handle.result(timeout=1)
    ledger.resolve(RUN, 1, output="paid")
    pump(ledger, bench.clock)
    assert handle.result() == "paid"


def test_a_program_that_waits_for_itself_is_told(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent(run: Run) -> Any:
        with pytest.raises(UnorderedStep, match="its own program"):
            ledger.handle(current_run().run_id).result()
        return "told"
        yield

    handle = ledger.submit(way.agent(ledger, agent), run_id=RUN)
    pump(ledger, bench.clock)
    assert handle.result() == "told"


def test_a_handle_is_found_in_the_front_door() -> None:
    assert Handle.__module__ == "agent_run_ledger.fleet.handle"


# --- waking -----------------------------------------------------------------------------------------------------------


def parked(bench: Bench, way: Way) -> tuple[AgentRunLedger, Tool, Any]:
    """A run that its program was stopped in by an interrupt of its process: nobody looks at it any more."""
    ledger, tool = bench.open(), Tool(SystemExit("stopped"), 5)
    work = way.tool(ledger, Tool(1), name="work", effect=Effect.READ)

    def agent() -> Any:
        yield work()
        return tool()

    agent_of = way.agent(ledger, agent, name="agent")
    ledger.submit(agent_of, run_id=RUN, queue="books", priority=3, key="acme")
    with pytest.raises(SystemExit):
        pump(ledger, bench.clock, queues=[_terms("books")])
    until(
        lambda: ledger.get_run(RUN).due_in_seconds is None
    )  # an async program is parked behind what waits to be written
    return ledger, tool, agent_of


def test_a_parked_run_that_is_woken_is_due_at_once(bench: Bench, way: Way) -> None:
    ledger, tool, _ = parked(bench, way)
    written = bench.rows(RUN)
    ledger.wake(RUN)
    assert bench.rows(RUN) == written
    assert pump(ledger, bench.clock, queues=[_terms("books")]) == [f"{RUN} ended"]
    assert tool.calls == 2


def test_a_parked_run_that_is_submitted_again_is_due_at_once(bench: Bench, way: Way) -> None:
    ledger, _, agent = parked(bench, way)
    handle = ledger.submit(agent, run_id=RUN)
    pump(ledger, bench.clock, queues=[_terms("books")])
    assert handle.result() == 5


def test_what_nobody_may_go_on_with_is_not_woken(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    total = adder(ledger, way)
    with pytest.raises(RunNotFound):
        ledger.wake("nowhere")
    way.start(ledger, total, 1, run_id="by hand")
    with pytest.raises(InvalidArguments, match="in no queue"):
        ledger.wake("by hand")
    ledger.submit(total, 1, run_id=RUN)
    (lease,) = other._leases.claim_due([_terms("default")], ["total"], 1)
    with pytest.raises(RunOwned):
        ledger.wake(RUN)
    other._leases.put_back(lease)
    pump(ledger, bench.clock)
    with pytest.raises(IllegalTransition, match="WAKE"):
        ledger.wake(RUN)


def test_a_run_in_the_hands_of_this_very_ledger_is_not_woken(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent() -> Any:
        with pytest.raises(RunOwned):
            ledger.wake(RUN)
        return "still mine"
        yield

    handle = ledger.submit(way.agent(ledger, agent), run_id=RUN)
    pump(ledger, bench.clock)
    assert handle.result() == "still mine"


@pytest.mark.parametrize("how", ["redrive", "fork"])
def test_a_run_made_from_one_of_a_queue_is_in_that_queue_and_not_started(bench: Bench, way: Way, how: str) -> None:
    ledger, tool = bench.open(), Tool(7)
    work = way.tool(ledger, tool, name="work", effect=Effect.READ)
    ends = Tool(ValueError("no"), "done")

    def agent() -> Any:
        yield work()
        return ends()

    ledger.submit(way.agent(ledger, agent), run_id=RUN, queue="books", priority=3, key="acme")
    pump(ledger, bench.clock, queues=[_terms("books")])
    new = ledger.redrive(RUN) if how == "redrive" else ledger.fork(RUN, 2)
    told = first(bench, new)
    assert {name: told[name] for name in ("queue", "priority", "key")} == {
        "queue": "books", "priority": 3, "key": "acme",
    }  # fmt: skip
    bench.owners_die()
    assert pump(ledger, bench.clock, queues=[_terms("books")]) == []
    ledger.wake(new)
    assert pump(ledger, bench.clock, queues=[_terms("books")]) == [f"{new} ended"]
    assert (ledger.handle(new).result(), tool.calls) == ("done", 1)
    assert ledger.verify().findings == []


def test_a_redriven_run_is_started_by_submitting_it_under_its_new_id(bench: Bench, way: Way) -> None:
    ledger, ends = bench.open(), Tool(ValueError("no"), "done")

    def agent() -> Any:
        return ends()
        yield

    agent_of = way.agent(ledger, agent)
    ledger.submit(agent_of, run_id=RUN)
    pump(ledger, bench.clock)
    handle = ledger.submit(agent_of, run_id=ledger.redrive(RUN, new_run_id="new"))
    pump(ledger, bench.clock)
    assert handle.result() == "done"


# --- queues -----------------------------------------------------------------------------------------------------------


def test_a_queue_is_declared_once(bench: Bench) -> None:
    ledger = bench.open()
    ledger.queue("books", concurrency=2, per_key=1)
    ledger.queue("books", concurrency=2, per_key=1)
    with pytest.raises(InvalidArguments, match="concurrency=2, per_key=1 already"):
        ledger.queue("books", concurrency=3)


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"per_key": -1}, {"concurrency": 1.5}, {"per_key": True}])
def test_limits_that_are_none_are_refused(bench: Bench, given: dict[str, Any]) -> None:
    ledger = bench.open()
    with pytest.raises(InvalidArguments, match="whole number of at least 1"):
        ledger.queue("books", **given)
    with pytest.raises(InvalidName):
        ledger.queue("")
    ledger.queue("books")
