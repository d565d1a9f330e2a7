"""What a worker does with one run: it goes on where it stands, is retried, drained, and waits for its children without a slot."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    LeaseLost,
    Receipt,
    RetryPolicy,
    Run,
    StepFailed,
    StoreUnavailable,
    current_step,
)
from agent_run_ledger.contract import QueueTerms, Store
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from support.ledgers import Bench, Tool
from support.programs import RUN, Way
from support.pumping import pump, submit, work_once


def stands(ledger: AgentRunLedger, run_id: str = RUN) -> tuple[str, Any, str | None]:
    run = ledger.get_run(run_id)
    return run.status, run.result, run.cause


# --- retries of a program ---------------------------------------------------------------------------------------------


def test_a_program_that_an_exception_leaves_has_failed_unless_its_agent_says_otherwise(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    work = way.tool(ledger, Tool(1), name="work", effect=Effect.READ)

    def agent() -> Any:
        yield work()
        raise ValueError("no")

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert pump(ledger, bench.clock) == [f"{RUN} ended"]
    assert stands(ledger) == ("FAILED", None, "ValueError: no")
    assert ledger.verify().findings == []


def test_it_is_begun_anew_as_often_as_its_agent_says_and_repeats_no_step(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool, ends = Tool(1), Tool(ValueError("one"), ValueError("two"), "done")
    work = way.tool(ledger, tool, name="work", effect=Effect.READ)

    def agent() -> Any:
        yield work()
        return ends()

    retry = RetryPolicy(max_attempts=3, base=10, cap=10)
    submit(ledger, way.agent(ledger, agent, name="agent", retry=retry), run_id=RUN)
    started = bench.clock.elapsed()
    assert pump(ledger, bench.clock) == [f"{RUN} waits", f"{RUN} waits", f"{RUN} ended"]
    assert stands(ledger) == ("COMPLETED", "done", None)
    assert (tool.calls, ends.calls) == (1, 3)
    assert bench.clock.elapsed() > started
    assert ledger.verify().findings == []


def test_its_retries_are_spent_over_all_workers_and_then_it_has_failed(bench: Bench, way: Way) -> None:
    tool = Tool(ValueError("again"))
    for _ in range(5):
        ledger = bench.open()

        def agent() -> Any:
            return tool()
            yield

        agent_of = way.agent(ledger, agent, name="agent", retry=RetryPolicy(max_attempts=3, base=1, cap=1))
        if not tool.calls:
            submit(ledger, agent_of, run_id=RUN)
        pump(ledger, bench.clock, until=2.0)
    look = bench.open()
    assert (stands(look), tool.calls) == (("FAILED", None, "ValueError: again"), 3)


def test_a_worker_that_died_before_it_could_say_when_leaves_the_retry_to_its_time(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    ends = Tool(ValueError("one"), "done")

    def agent() -> Any:
        return ends()
        yield

    def register(at: AgentRunLedger) -> Any:
        return way.agent(at, agent, name="agent", retry=RetryPolicy(base=500, cap=500, jitter="decorrelated"))

    submit(ledger, register(ledger), run_id=RUN)
    ledger._store.release = _lost  # type: ignore[method-assign] # the process dies with the entry written
    pump(ledger, bench.clock, until=0.0)
    del ledger._store.release  # type: ignore[method-assign]
    bench.owners_die()
    other = bench.open()
    register(other)
    retry_at = json.loads(bench.rows(RUN)[-1].body)["retry_at"]  # it is drawn, from nothing to 500 s
    pump(other, bench.clock, until=0.0)
    assert (ends.calls == 1) is (retry_at > bench.clock.now())
    pump(other, bench.clock)
    assert (stands(other), ends.calls) == (("COMPLETED", "done", None), 2)


def _lost(*_: Any, **__: Any) -> None:
    """What a process does that is dead."""


def test_a_fatal_error_ends_it_at_once(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(KeyError("gone"))

    def agent() -> Any:
        return tool()
        yield

    agent_of = way.agent(ledger, agent, name="agent", retry=RetryPolicy(), fatal=(LookupError,))
    submit(ledger, agent_of, run_id=RUN)
    assert pump(ledger, bench.clock) == [f"{RUN} ended"]
    assert (stands(ledger), tool.calls) == (("FAILED", None, "KeyError: 'gone'"), 1)


def test_a_run_that_was_cancelled_while_its_program_failed_is_cancelled(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent() -> Any:
        other.cancel(RUN, reason="enough")
        raise ValueError("no")
        yield

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    pump(ledger, bench.clock)
    assert stands(ledger)[::2] == ("CANCELLED", "enough")


def test_what_is_in_doubt_is_no_failure_of_its_program_and_goes_on_once_it_is_resolved(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(TimeoutError("no answer"))
    pay = way.tool(ledger, tool, name="pay", effect=Effect.MUTATE)

    def agent() -> Any:
        return (yield pay())

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert pump(ledger, bench.clock) == [f"{RUN} parked"]
    assert ledger.get_run(RUN).status == "BLOCKED"
    ledger.resolve(RUN, 1, output="paid", by="ann")
    assert pump(ledger, bench.clock) == [f"{RUN} ended"]
    assert (stands(ledger)[:2], tool.calls) == (("COMPLETED", "paid"), 1)


def test_a_program_that_differs_is_tried_again_after_a_while_and_appends_nothing(bench: Bench, way: Way) -> None:
    def register(name: str, *answers: Any) -> tuple[AgentRunLedger, Any]:
        ledger = bench.open()
        work = way.tool(ledger, Tool(1), name=name, effect=Effect.READ)
        ends = Tool(*answers)

        def agent() -> Any:
            yield work()
            return ends()

        return ledger, way.agent(ledger, agent, name="agent", retry=RetryPolicy(base=1, cap=1))

    old, agent = register("one", ValueError("once"), "done")
    submit(old, agent, run_id=RUN)
    pump(old, bench.clock, until=0.0)
    bench.clock.advance(1.0)
    before = bench.kinds(RUN)
    changed, _ = register("another")
    assert pump(changed, bench.clock, until=130.0) == [f"{RUN} parked"] * 3
    assert bench.kinds(RUN) == before
    assert changed.get_run(RUN).status == "BLOCKED"
    assert "one" in str(changed.get_run(RUN).cause)
    pump(old, bench.clock, until=60.0)
    assert stands(old) == ("COMPLETED", "done", None)


# --- timers, signals, drain -------------------------------------------------------------------------------------------


def test_a_run_that_waits_for_a_time_is_looked_at_then_and_not_before(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def agent(run: Run) -> Any:
        yield run.sleep(3600.0)
        return "awake"

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert pump(ledger, bench.clock, until=3599.0) == [f"{RUN} waits"]
    assert pump(ledger, bench.clock, until=3601.0) == [f"{RUN} ended"]
    assert stands(ledger)[:2] == ("COMPLETED", "awake")


def test_a_run_that_waits_for_a_signal_is_looked_at_when_it_comes_and_never_before(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        return (yield run.wait_for("go"))

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert pump(ledger, bench.clock, until=1e9) == [f"{RUN} waits"]
    other.signal(RUN, "other", 1)
    assert pump(ledger, bench.clock, until=1e9) == [f"{RUN} waits"]
    other.signal(RUN, "go", 2)
    assert pump(ledger, bench.clock, until=0.0) == [f"{RUN} ended"]
    assert stands(ledger)[:2] == ("COMPLETED", 2)


def test_what_comes_while_a_program_is_about_to_wait_is_not_overlooked(bench: Bench, way: Way) -> None:
    """It is sent behind the owner's last look, and before he lets go."""
    ledger, other = bench.open(), bench.open()

    def agent(run: Run) -> Any:
        return (yield run.wait_for("go"))

    release = ledger._store.release

    def late(*args: Any, **kwargs: Any) -> None:
        ledger._store.release = release  # type: ignore[method-assign]
        other.signal(RUN, "go", 2)
        release(*args, **kwargs)

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    ledger._store.release = late  # type: ignore[method-assign]
    assert pump(ledger, bench.clock, until=0.0) == [f"{RUN} waits", f"{RUN} ended"]


def test_a_drained_program_ends_before_its_next_step_and_another_worker_goes_on_at_once(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    one, two = Tool(lambda: ledger._leases.drain() or 1), Tool(2)

    def register(at: AgentRunLedger) -> Any:
        first = way.tool(at, one, name="first", effect=Effect.READ)
        second = way.tool(at, two, name="second", effect=Effect.READ)

        def agent() -> Any:
            return [(yield first()), (yield second())]

        return way.agent(at, agent, name="agent")

    submit(ledger, register(ledger), run_id=RUN)
    register(other)
    assert work_once(ledger) == "waits"
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]  # what was in flight is recorded, nothing new is begun
    assert pump(other, bench.clock, until=0.0) == [f"{RUN} ended"]
    assert (stands(other)[:2], one.calls, two.calls) == (("COMPLETED", [1, 2]), 1, 1)
    assert other.verify().findings == []


def lanes(at: AgentRunLedger, way: Way, names: str, call: Callable[[str], object]) -> Any:
    """An agent with a branch for each name, of two steps each: a1 and a2, b1 and b2 ..."""

    def does(name: str) -> str:
        call(name)
        return name

    tool = way.tool(at, does, name="tool", effect=Effect.READ)

    def lane(name: str) -> Any:
        one = yield tool(f"{name}1")
        return [one, (yield tool(f"{name}2"))]

    played = way.program(lane)

    def agent(run: Run) -> Any:
        return (yield run.gather(*[lambda name=name: played(name) for name in names]))

    return way.agent(at, agent, name="agent")


def test_of_branches_that_are_drained_each_finishes_its_step(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    calls = Counter[str]()

    def call(name: str) -> None:
        calls[name] += 1
        if name == "b1":
            ledger._leases.drain()

    submit(ledger, lanes(ledger, way, "ab", call), run_id=RUN)
    lanes(other, way, "ab", call)
    assert work_once(ledger) == "waits"
    pump(other, bench.clock, until=0.0)
    assert stands(other)[:2] == ("COMPLETED", [["a1", "a2"], ["b1", "b2"]])
    assert calls == {"a1": 1, "a2": 1, "b1": 1, "b2": 1}


def test_branches_that_are_drained_end_although_another_worker_takes_the_run_at_once(bench: Bench, way: Way) -> None:
    """The last of them gives it back; the others must not take it for news that somebody else has it."""
    ledger, other = bench.open(), bench.open()
    agent = lanes(ledger, way, "abc", lambda name: ledger._leases.drain() if name == "b1" else None)
    submit(ledger, agent, run_id=RUN)
    taken: list[Any] = []
    give_back, look = ledger._store.release, ledger._store.head

    def release(*given: Any, **named: Any) -> Any:
        done = give_back(*given, **named)
        taken.append(other._store.claim(RUN, "another", 30.0))
        return done

    def head(run_id: str) -> Any:
        looks.append(run_id)
        assert len(looks) < 1000, "it looks again and again"
        return look(run_id)

    looks: list[str] = []
    ledger._store.release, ledger._store.head = release, head  # type: ignore[method-assign]
    assert work_once(ledger) == "waits"
    assert len(taken) == 1


def test_a_retry_of_a_step_is_left_to_another_worker_where_its_own_is_drained_meanwhile(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()

    def fails() -> None:
        ledger._leases.drain()
        raise ValueError("once")

    calls = Tool(fails, 2)

    def register(at: AgentRunLedger) -> Any:
        tool = way.tool(at, calls, name="tool", effect=Effect.READ, retry=RetryPolicy(base=10, cap=10))

        def agent() -> Any:
            return (yield tool())

        return way.agent(at, agent, name="agent")

    submit(ledger, register(ledger), run_id=RUN)
    register(other)
    assert work_once(ledger) == "waits"
    assert calls.calls == 1
    pump(other, bench.clock)
    assert (stands(other)[:2], calls.calls) == (("COMPLETED", 2), 2)


def test_a_run_that_is_claimed_while_its_worker_drains_begins_nothing(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(1)
    work = way.tool(ledger, tool, name="work", effect=Effect.READ)

    def agent() -> Any:
        return (yield work())

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    ledger._leases.drain()
    assert (work_once(ledger), tool.calls) == ("waits", 0)


def test_a_run_in_doubt_is_gone_on_with_when_an_operator_says_that_nothing_happened(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(TimeoutError("no answer"), "paid")
    pay = way.tool(ledger, tool, name="pay", effect=Effect.MUTATE)

    def agent() -> Any:
        return (yield pay())

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    pump(ledger, bench.clock)
    ledger.resolve(RUN, 1, executed=False, by="ann")
    assert pump(ledger, bench.clock, until=0.0) == [f"{RUN} ended"]
    assert (stands(ledger)[:2], tool.calls) == (("COMPLETED", "paid"), 2)


def test_a_receiver_that_could_not_say_is_asked_again_after_a_while(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = Tool(TimeoutError("no answer"))
    answers = iter([Receipt.unknown("busy")] * 4 + [Receipt.found("paid")])
    pay = way.tool(ledger, tool, name="pay", receipt=lambda key, arguments: next(answers))

    def agent() -> Any:
        return (yield pay())

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert pump(ledger, bench.clock, until=0.0) == [f"{RUN} parked"]
    assert pump(ledger, bench.clock, until=61.0) == [f"{RUN} ended"]
    assert (stands(ledger)[:2], tool.calls) == (("COMPLETED", "paid"), 1)


def test_recover_leaves_the_runs_of_queues_to_their_workers(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    def agent() -> int:
        return 1

    submit(ledger, agent, run_id=RUN, due_in=60.0)
    assert ledger.recover() == []
    assert ledger.get_run(RUN).status == "PENDING"


# --- children ---------------------------------------------------------------------------------------------------------


def family(at: AgentRunLedger, way: Way, body: Callable[[Any, Run, Any], Any], look: Any) -> Any:
    """A parent with this body, given its child, its run and what it was given; the child looks, and fails for -1."""
    looks = way.tool(at, look, name="look", effect=Effect.READ)

    def child(number: int) -> Any:
        if number < 0:
            raise ValueError("below zero")
        return (yield looks(number))

    begin = way.agent(at, child, name="child")

    def parent(given: Any, run: Run) -> Any:
        return (yield from body(begin, run, given))

    return way.agent(at, parent, name="parent", retry=RetryPolicy(max_attempts=2, base=0, cap=0))


def test_a_parent_waits_for_its_child_without_an_owner_and_gets_its_result(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        return [(yield child(given)), (yield child(given + 1))]

    submit(ledger, family(ledger, way, body, lambda number: number * 2), 3, run_id=RUN)
    said = pump(ledger, bench.clock)
    assert [line.partition(" ")[2] for line in said] == ["waits", "ended", "waits", "ended", "ended"]
    assert stands(ledger)[:2] == ("COMPLETED", [6, 8])
    assert {run.parent_run_id for run in ledger.runs() if run.run_id != RUN} == {RUN}
    assert ledger.verify().findings == []


def test_the_failure_of_a_child_is_the_failure_of_its_step(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        try:
            yield child(given)
        except StepFailed as error:
            return [str(error), error.is_a("builtins.ValueError"), (yield child(1))]

    submit(ledger, family(ledger, way, body, lambda number: number), -1, run_id=RUN)
    pump(ledger, bench.clock)
    assert stands(ledger)[:2] == ("COMPLETED", ["Tool execution failed: ValueError: below zero", True, 1])
    assert ledger.verify().findings == []


def test_a_parent_whose_child_has_failed_for_good_fails_too_and_the_child_is_not_run_again(
    bench: Bench, way: Way
) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield child(given))

    submit(ledger, family(ledger, way, body, lambda number: number), -1, run_id=RUN)
    said = pump(ledger, bench.clock)
    assert stands(ledger)[0] == "FAILED"
    assert len([line for line in said if not line.startswith(RUN + " ")]) == 1


def test_a_map_begins_all_children_before_it_waits_for_any(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield run.map(child, range(given)))

    submit(ledger, family(ledger, way, body, lambda number: number * 2), 40, run_id=RUN)
    said = pump(ledger, bench.clock)
    assert stands(ledger)[:2] == ("COMPLETED", [2 * number for number in range(40)])
    assert len([line for line in said if line.startswith(RUN + " ")]) < 10  # it is not begun anew for each of them
    assert ledger.verify().findings == []


def test_a_map_of_few_children_at_once_begins_no_more_and_none_after_a_failure(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield run.map(child, [0, 1, -1, 3, 4, 5], concurrency=2))

    submit(ledger, family(ledger, way, body, lambda number: number), 0, run_id=RUN)
    pump(ledger, bench.clock)
    assert stands(ledger)[0] == "FAILED"
    assert len(ledger.runs()) == 1 + 4


def test_cancelling_a_parent_ends_its_children_only_where_that_is_asked_for(bench: Bench, way: Way) -> None:
    for asked, expected in ((False, "PENDING"), (True, "CANCELLED")):
        ledger = bench.open()

        def body(child: Any, run: Run, given: int) -> Any:
            return (yield run.map(child, range(given)))

        run_id = f"{RUN} {asked}"
        submit(ledger, family(ledger, way, body, lambda number: number), 3, run_id=run_id)
        assert work_once(ledger) == "waits"
        ledger.cancel(run_id, children=asked, reason="enough")
        children = [run for run in ledger.runs() if run.parent_run_id == run_id]
        assert [run.status for run in children] == [expected] * 3
        assert stands(ledger, run_id)[::2] == ("CANCELLED", "enough")
        pump(ledger, bench.clock)


def test_a_child_that_was_begun_while_its_parent_was_cancelled_ends_when_a_worker_looks_at_it(
    bench: Bench, way: Way
) -> None:
    ledger = bench.open()
    look = Tool(1)

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield child(given))

    submit(ledger, family(ledger, way, body, lambda number: look()), 3, run_id=RUN)
    assert work_once(ledger) == "waits"
    (child,) = [run.run_id for run in ledger.runs() if run.parent_run_id == RUN]
    # as if the child were not known to whoever cancels: only the parent's end says it
    ledger._ask(RUN, "cancel", {"reason": "enough", "children": True}, "ann")
    pump(ledger, bench.clock)
    assert (ledger.get_run(child).status, look.calls) == ("CANCELLED", 0)


def test_a_run_made_from_a_parent_gets_the_end_of_the_child_that_is_still_at_work(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    look = Tool(7)

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield child(given))

    submit(ledger, family(ledger, way, body, lambda number: look()), 3, run_id=RUN)
    assert work_once(ledger) == "waits"
    ledger.abort_run(RUN, "by mistake")
    again = ledger.redrive(RUN)
    ledger.wake(again)
    assert work_once(ledger, "parent") == "waits"
    pump(ledger, bench.clock)
    assert stands(ledger, again)[:2] == ("COMPLETED", 7)
    assert look.calls == 1
    assert ledger.verify().findings == []


def test_a_run_made_from_a_parent_gets_the_end_of_the_child_that_has_ended_meanwhile(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    look = Tool(7)

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield child(given))

    submit(ledger, family(ledger, way, body, lambda number: look()), 3, run_id=RUN)
    assert work_once(ledger) == "waits"
    ledger.abort_run(RUN, "by mistake")
    pump(ledger, bench.clock)
    again = ledger.redrive(RUN)
    ledger.wake(again)
    pump(ledger, bench.clock)
    assert stands(ledger, again)[:2] == ("COMPLETED", 7)
    assert look.calls == 1


def test_many_children_that_end_at_once_wake_their_parent_once(bench: Bench, way: Way) -> None:
    ledger = bench.open()

    def body(child: Any, run: Run, given: int) -> Any:
        return (yield run.map(child, range(given)))

    submit(ledger, family(ledger, way, body, lambda number: number), 20, run_id=RUN)
    assert work_once(ledger) == "waits"
    assert work_once(ledger, "child") == "ended"
    assert ledger._store.next_due(["default"], ["parent"]) is not None  # it is to be woken, and not yet
    assert ledger._leases.claim_due([QueueTerms("default")], ["parent"], 1) == []
    pump(ledger, bench.clock)
    assert stands(ledger)[:2] == ("COMPLETED", list(range(20)))


def test_a_child_that_ended_before_its_parent_could_write_that_it_waits_is_not_waited_for(
    bench: Bench, way: Way
) -> None:
    """The parent's process dies with the child in the queue."""
    for given in (2, -1):
        ledger = bench.open()
        enqueue = ledger._leases.enqueue

        def dies(*args: Any, enqueue: Any = enqueue) -> None:
            enqueue(*args)
            raise KeyboardInterrupt

        def body(child: Any, run: Run, given: int) -> Any:
            return (yield child(given))

        run_id = f"{RUN} {given}"
        submit(ledger, family(ledger, way, body, lambda number: number * 2), given, run_id=run_id)
        ledger._leases.enqueue = dies  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            work_once(ledger, "parent")
        ledger._leases.enqueue = enqueue  # type: ignore[method-assign]
        assert work_once(ledger, "child") == "ended"
        pump(ledger, bench.clock)
        expected = ("COMPLETED", 4) if given > 0 else ("FAILED", None)
        assert stands(ledger, run_id)[:2] == expected
        if given < 0:
            assert "below zero" in str(ledger.get_run(run_id).cause)


def test_an_agent_that_begins_equal_children_with_equal_outcomes_is_a_loop(bench: Bench, way: Way) -> None:
    ledger = bench.open(loop_threshold=3)

    def body(child: Any, run: Run, given: int) -> Any:
        while True:
            yield child(given)

    submit(ledger, family(ledger, way, body, lambda number: number), 1, run_id=RUN)
    pump(ledger, bench.clock)
    assert stands(ledger)[0] == "DEAD_LETTER"
    assert len(ledger.runs()) == 1 + 3


# --- crashes ----------------------------------------------------------------------------------------------------------

WRITES = ("create", "claim", "claim_due", "enqueue", "append", "append_all", "post", "release", "renew")


class Crash(BaseException):
    """The process is dead."""


class Mortal:
    """A store under a process that dies at a write of its choice: before it, or with it done and nobody told."""

    def __init__(self, store: Store, at: int, *, is_done: bool) -> None:
        self.store = store
        self.at = at
        self.is_done = is_done
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)
        return self._dying(verb) if name in WRITES else verb

    def _dying(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            if self.writes > self.at:
                # the heart of a process that is dead does not beat any more: its thread is here all the same
                raise StoreUnavailable("the process is dead") if verb.__name__ == "renew" else Crash
            self.writes += 1
            if self.writes <= self.at:
                return verb(*args, **kwargs)
            if self.is_done:
                verb(*args, **kwargs)
            raise Crash

        return write

    def close(self) -> None:
        """What outlives a process stays."""


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "behind it"])
def test_a_family_that_is_killed_at_any_write_ends_as_if_nothing_had_happened(way: Way, is_done: bool) -> None:
    """A parent maps over two children, and a third one fails: no key is used for two calls too many, and nothing is left."""
    for at in itertools.count():
        if not _is_killed_at(at, way, is_done):
            break
    assert at > 30


def _is_killed_at(at: int, way: Way, is_done: bool) -> bool:
    """Whether there is such a write; it was the last one of its process, then."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    keys = Counter[str]()

    def look(number: int) -> int:
        keys[current_step().idempotency_key] += 1
        return number * 2

    def body(child: Any, run: Run, given: int) -> Any:
        doubled = yield run.map(child, [1, 2])
        try:
            yield child(-1)
        except StepFailed:
            return [*doubled, (yield child(3))]

    mortal = Mortal(store, at, is_done=is_done)
    for life in (mortal, store):
        ledger = AgentRunLedger(life, clock=clock, heartbeat_seconds=20.0)
        agent = family(ledger, way, body, look)
        try:
            if store.head(RUN) is None:
                submit(ledger, agent, 1, run_id=RUN)
            pump(ledger, clock)
        except Crash:
            clock.advance(31.0)  # the leases run out
    assert stands(ledger)[:2] == ("COMPLETED", [2, 4, 6]), at
    assert Counter(run.status for run in ledger.runs()) == {"COMPLETED": 4, "FAILED": 1}, at
    assert len(keys) == 3
    assert sum(keys.values()) <= 4  # a step without side effects is run again where its outcome was lost
    assert ledger.verify().findings == []
    assert store.next_due(["default"], list(ledger._agents)) is None
    return mortal.writes > at


@pytest.mark.parametrize("tells", [False, True], ids=["as it is", "in its own words"])
def test_a_program_that_lost_its_run_does_nothing_to_it_though_its_own_worker_has_it_again(
    bench: Bench, way: Way, tells: bool
) -> None:
    ledger = bench.open()
    calls: list[int] = []
    again: list[threading.Thread] = []

    def stands_still() -> int:
        calls.append(1)
        if (
            len(calls) == 1
        ):  # this process is stopped for longer than its lease, and its worker claims the run once more
            bench.clock.advance(31)
            assert ledger._store.free_dead() == 1
            again.append(threading.Thread(target=work_once, args=(ledger,)))
            again[0].start()
            while ledger._run(RUN).token < 2:
                os.sched_yield()
        return len(calls)

    work = way.tool(ledger, stands_still, name="work", effect=Effect.READ)

    def agent() -> Any:
        try:
            return (yield work())
        except LeaseLost:
            if tells:
                raise ValueError("the work could not be done") from None
            raise

    submit(ledger, way.agent(ledger, agent, name="agent"), run_id=RUN)
    assert work_once(ledger) == "waits"
    again[0].join()
    pump(ledger, bench.clock)
    assert stands(ledger) == ("COMPLETED", 2, None)
    assert "parked" not in bench.kinds(RUN)
    assert ledger.verify().findings == []
