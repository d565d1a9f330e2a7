"""What is seen of workers, and of runs that somebody should go on with and that do not get on, each with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, InvalidArguments, StuckRun
from agent_run_ledger.contract import Lease, QueueTerms
from support.fleets import LONG, Gate, until, worker
from support.ledgers import HOSTILE, Bench
from support.programs import RUN

HOUR = 3600.0


def registered(ledger: AgentRunLedger, name: str = "agent") -> Any:
    @ledger.agent(name=name)
    def agent(number: int = 0) -> int:
        return number

    return agent


def alive(ledger: AgentRunLedger, name: str = "w", **said: Any) -> None:
    """A worker says that it lives, and more."""
    words = {"state": "running", "queues": ["default"], "agents": ["agent"], "concurrency": 2, "lease_seconds": 30}
    ledger._store.beat(name, json.dumps(words | said).encode())


def claimed(ledger: AgentRunLedger, *, queue: str = "default") -> Lease:
    (lease,) = ledger._leases.claim_due([QueueTerms(queue)], ["agent"], 1)
    return lease


def only(found: list[StuckRun]) -> StuckRun:
    (stuck,) = found
    return stuck


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_is_seen_with_what_it_serves_and_works_on_until_it_has_ended(bench: Bench) -> None:
    bench.on_real_time()
    ledger, look, gate = bench.open(), bench.open(), Gate()
    ledger.queue("narrow", concurrency=3, per_key=1)

    @ledger.agent()
    def agent() -> Any:
        return gate()

    with worker(ledger, concurrency=2, queues=["default", "narrow"], name="w", poll_seconds=0.02) as working:
        working._heartbeat_seconds = 0.02
        ledger.submit(agent, run_id=RUN)
        gate.await_count(1)
        (seen,) = until(lambda: [each for each in look.workers() if each.running])
        assert seen.name == working.name
        assert (seen.queues, seen.agents, seen.concurrency) == (("default", "narrow"), ("agent",), 2)
        assert (seen.running, seen.running_count) == ((RUN,), 1)
        assert (seen.limits, seen.state, seen.is_alive) == ({"narrow": (3, 1)}, "running", True)
        assert seen.pid
        assert seen.host
        assert seen.version
        gate.open()
    assert look.workers() == []


def test_a_worker_that_has_been_silent_for_longer_than_its_lease_is_not_alive(bench: Bench) -> None:
    ledger = bench.open()
    alive(ledger, "short", lease_seconds=10)
    alive(ledger, "long", lease_seconds=100)
    bench.clock.advance(11)
    assert {each.name: each.is_alive for each in ledger.workers()} == {"short": False, "long": True}
    assert [round(each.idle_seconds) for each in ledger.workers()] == [11, 11]


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b"[]", b"7", b'{"queues": 5, "pid": "x", "running": [1], "limits": [2]}']
)
def test_what_a_worker_of_another_version_says_hides_no_other(bench: Bench, said: bytes) -> None:
    ledger = bench.open()
    ledger._store.beat("odd", said)
    alive(ledger)
    odd, other = ledger.workers()
    assert (odd.name, odd.queues, odd.pid, odd.running, odd.limits) == ("odd", (), 0, (), {})
    assert other.queues == ("default",)
    assert ledger.stuck() == []


def test_a_worker_names_no_more_than_a_hundred_runs(bench: Bench) -> None:
    bench.on_real_time()
    ledger, gate = bench.open(), Gate()

    @ledger.agent()
    def agent(number: int) -> Any:
        return gate(number)

    handles = [ledger.submit(agent, number) for number in range(110)]
    with worker(ledger, concurrency=110) as working:
        working._heartbeat_seconds = 0.02
        gate.await_count(110)
        seen = until(lambda: [each for each in ledger.workers() if each.running_count == 110])[0]
        assert len(seen.running) == 100
        gate.open()
        assert [handle.result(LONG) for handle in handles] == list(range(110))


# --- stuck runs -------------------------------------------------------------------------------------------------------


def test_what_gets_on_waits_by_plan_or_has_ended_is_not_stuck(bench: Bench) -> None:
    ledger = bench.open()
    alive(ledger)
    agent = registered(ledger)
    ledger.submit(agent, run_id="later", delay=10 * HOUR)
    ledger.run(agent, run_id="ended")
    ledger.create_run("by hand", "by hand")
    ledger.detach("by hand")
    bench.clock.advance(HOUR)
    ledger.create_run("now", "now")
    assert ledger.stuck() == []


def test_a_run_whose_owner_is_silent_says_so_and_who_takes_it(bench: Bench) -> None:
    ledger = bench.open()
    ledger.submit(registered(ledger), run_id=RUN)
    lease = claimed(ledger)
    ledger.create_run("by hand", "by hand")
    bench.clock.advance(400)
    queued, by_hand = ledger.stuck()
    assert (queued.run_id, queued.kind, queued.owner, queued.queue) == (RUN, "owner_silent", lease.owner, "default")
    assert queued.reason == (
        f"its owner {lease.owner!r} has not renewed its lease for 7 min: it is dead, or stands still; no live worker serves its "
        "queue 'default'"
    )
    assert round(queued.seconds) == 400
    assert (by_hand.kind, by_hand.queue) == ("owner_silent", None)
    assert by_hand.reason.endswith("it goes on when its program is started again")
    alive(ledger)
    assert ledger.stuck()[0].reason.endswith("a worker of queue 'default' is about to take it over")
    assert ledger.stuck(500) == []


def test_a_step_that_has_long_been_in_flight_is_named_with_its_timeout(bench: Bench) -> None:
    ledger, seen = bench.open(), list[StuckRun]()

    @ledger.tool(effect=Effect.READ, timeout=1000)
    def slow() -> int:
        for _ in range(40):  # its owner's heart beats
            bench.clock.advance(10)
            ledger._leases.beat()
        seen.extend(ledger.stuck())
        return 1

    @ledger.agent()
    def agent() -> int:
        return slow()

    assert ledger.run(agent, run_id=RUN) == 1
    stuck = only(seen)
    assert (stuck.run_id, stuck.status, stuck.kind) == (RUN, "RUNNING", "step_in_flight")
    assert stuck.reason == (
        "step 1 ('slow') has been in flight for 7 min while its owner renews the lease: it is slow, or hangs; its timeout is 17 min"
    )
    assert ledger.stuck() == []


def test_a_program_that_is_busy_outside_of_steps_is_told_from_a_step_that_hangs(bench: Bench) -> None:
    ledger, seen = bench.open(), list[StuckRun]()

    @ledger.tool(effect=Effect.READ)
    def quick() -> int:
        return 1

    @ledger.agent()
    def agent() -> int:
        number = quick()
        for _ in range(40):
            bench.clock.advance(10)
            ledger._leases.beat()
        seen.extend(ledger.stuck())
        return number

    ledger.run(agent, run_id=RUN)
    stuck = only(seen)
    assert (stuck.status, stuck.kind) == ("CHECKPOINTED", "program_busy")
    assert "no step of it has been in flight for 7 min while its owner renews the lease" in stuck.reason


def test_a_run_that_is_due_and_that_no_live_worker_serves_says_which_is_missing(bench: Bench) -> None:
    ledger = bench.open()
    ledger.submit(registered(ledger), run_id=RUN, queue="books")
    alive(ledger, "dead", queues=["books"])
    bench.clock.advance(400)
    assert only(ledger.stuck()).reason == "it has been due for 7 min, and no live worker serves its queue 'books'"
    alive(ledger, "other", queues=["default"])
    assert only(ledger.stuck()).kind == "no_worker"
    alive(ledger, "old", queues=["books"], agents=["another"])
    stuck = only(ledger.stuck())
    assert (stuck.kind, stuck.status, stuck.owner) == ("no_agent", "PENDING", None)
    assert stuck.reason.endswith("and the live worker of its queue 'books' does not know its agent 'agent'")
    alive(ledger, "older", queues=["books"], agents=[])
    assert only(ledger.stuck()).reason.endswith(
        "and none of the 2 live workers of its queue 'books' knows its agent 'agent'"
    )


def test_a_run_that_waits_in_a_full_queue_says_what_fills_it(bench: Bench) -> None:
    ledger, look = bench.open(), bench.open()
    agent = registered(ledger)
    for name in ("first", "second"):
        ledger.submit(agent, run_id=name, key="acme")
        bench.clock.advance(1)
    lease = claimed(ledger)
    for _ in range(40):
        bench.clock.advance(10)
        ledger._store.renew(lease.run_id, lease.token, 30)

    def reason() -> str:
        return next(each for each in look.stuck() if each.run_id == "second").reason.partition(", and ")[2]

    alive(ledger, limits={"default": [1, None]})
    assert reason() == "its queue 'default' is full: 1 of its runs may be worked on at once"
    alive(ledger, limits={"default": [None, 1]})
    assert reason() == "its queue 'default' has 1 with the key 'acme' at work, as many as may be at once"
    alive(ledger, running=["a", "b"], running_count=2)
    assert reason() == "all 2 slots of the live workers that know its agent are taken"
    alive(ledger, state="draining")
    assert reason().startswith("all 2 slots")
    alive(ledger)
    assert "free slots" in reason()
    look.queue("default", concurrency=1)
    assert "is full: 1 of its runs" in reason()


def test_hostile_names_stay_data_in_every_reason(bench: Bench) -> None:
    ledger = bench.open()
    names = [name for name in HOSTILE.values() if "\x7f" not in name]
    for name in names:
        ledger.submit(registered(ledger, name), run_id=name, queue=name, key=name)
        alive(ledger, name, queues=[name], agents=[name])
    bench.clock.advance(20)
    for each in ledger.stuck(10):
        assert repr(each.queue) in each.reason or "slots" in each.reason
    bench.clock.advance(20)
    assert [each.run_id for each in ledger.stuck(10)] == names
    assert {each.kind for each in ledger.stuck(10)} == {"no_worker"}
    assert [each.name for each in ledger.workers()] == names


@pytest.mark.parametrize("after", [-1, "5", float("nan"), None, True])
def test_a_time_that_is_none_is_refused(bench: Bench, after: Any) -> None:
    with pytest.raises(InvalidArguments):
        bench.open().stuck(after)
