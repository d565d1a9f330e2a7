"""Many runs in one event loop: what they share, what they must not share, and what blocks whom."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, BudgetExceededException, Effect, LeaseLost, RunOwned
from agent_run_ledger.contract import Append
from agent_run_ledger.drivers.together import AT_ONCE
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.ledgers import RUN, Bench, program

RUNS = 12


async def double(n: int) -> int:
    return 2 * n


class Counting:
    """A store that tells how many appends came together, and may hold the first of them up."""

    def __init__(self, store: Any, hold: Callable[[], None] | None = None) -> None:
        self._store = store
        self._hold = hold
        self.together: list[int] = []
        self.synced: list[bool] = []

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> Any:
        self.together.append(len(appends))
        self.synced.append(synced)
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold()
        return self._store.append_all(appends, synced=synced)


def counting(bench: Bench, durability: Any, hold: Callable[[], None] | None = None) -> tuple[AgentRunLedger, Counting]:
    store: Any = Counting(bench.store(), hold)
    return AgentRunLedger(store, clock=bench.clock, durability=durability), store


def is_written_as(store: Counting, expected: list[int]) -> bool:
    """Whether so many runs were written together, one transaction after the other.

    The loop itself writes to what is near. For a server a thread does, and takes what has come by the time at which it looks.
    """
    if not store.is_remote:
        return store.together == expected
    return sum(store.together) == sum(expected) and max(store.together) <= AT_ONCE


async def one_step_each(ledger: AgentRunLedger, run_ids: list[str]) -> list[int]:
    calls = [ledger.aexecute_step(run_id, "double", {"n": n}, double) for n, run_id in enumerate(run_ids)]
    return await asyncio.gather(*calls)


def test_what_runs_commit_in_one_turn_of_the_loop_is_one_transaction(bench: Bench) -> None:
    ledger, store = counting(bench, "process")
    run_ids = [ledger.create_run("goal") for _ in range(RUNS)]
    assert asyncio.run(one_step_each(ledger, run_ids)) == [2 * n for n in range(RUNS)]
    assert is_written_as(store, [RUNS, RUNS])
    assert not any(store.synced)
    ledger.close()


def test_so_many_runs_that_memory_would_fill_are_several_transactions(bench: Bench) -> None:
    ledger, store = counting(bench, "process")
    run_ids = [ledger.create_run("goal") for _ in range(AT_ONCE + 1)]
    asyncio.run(one_step_each(ledger, run_ids))
    assert is_written_as(store, [AT_ONCE, 1] * 2)
    ledger.close()


def test_parallel_steps_of_one_run_share_their_transactions(bench: Bench) -> None:
    ledger, store = counting(bench, "process")
    run_id = ledger.create_run("goal")

    async def side_by_side() -> list[int]:
        return await asyncio.gather(*(ledger.aexecute_step(run_id, "double", {"n": n}, double) for n in range(RUNS)))

    assert asyncio.run(side_by_side()) == [2 * n for n in range(RUNS)]
    assert store.together == [1, 1] or (store.is_remote and {*store.together} == {1})
    assert [step.step_number for step in ledger.steps(run_id)] == list(range(1, RUNS + 1))
    assert ledger.verify(run_id).ok
    ledger.close()


def test_runs_share_a_sync_with_whatever_came_together_while_the_last_one_was_written(bench: Bench) -> None:
    everybody_waits = threading.Event()
    ledger, store = counting(bench, "full", hold=lambda: None if everybody_waits.wait(60) else pytest.fail("alone"))
    run_ids = [ledger.create_run("goal") for _ in range(RUNS)]

    async def main() -> list[int]:
        first = asyncio.create_task(ledger.aexecute_step(run_ids[0], "double", {"n": 0}, double))
        while not store.together:  # its intent is being written
            await asyncio.sleep(0)
        others = asyncio.gather(*(one(n) for n in range(1, RUNS)))
        while ledger._asynchronous._writer._items.qsize() < RUNS - 1:
            await asyncio.sleep(0)
        everybody_waits.set()
        return [await first, *await others]

    async def one(n: int) -> int:
        doubled: int = await ledger.aexecute_step(run_ids[n], "double", {"n": n}, double)
        return doubled

    assert asyncio.run(main()) == [2 * n for n in range(RUNS)]
    assert store.together[0] == 1
    assert store.together[1] >= RUNS - 1  # the first one's outcome may be among them
    assert all(store.synced)
    ledger.close()


# --- alone ------------------------------------------------------------------------------------------------------------


class Watching(Counting):
    """A store that tells besides in which thread each append was made, whether it was synced, and if it came alone."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.alone: list[tuple[int, bool]] = []

    def append(self, run_id: str, token: int, inbox: int, rows: Any, *, synced: bool) -> Any:
        self.alone.append((threading.get_ident(), synced))
        return self._store.append(run_id, token, inbox, rows, synced=synced)


def test_a_run_that_is_alone_does_not_wait_for_company_and_gives_way_all_the_same(bench: Bench) -> None:
    store: Any = Watching(bench.store())
    ledger = AgentRunLedger(store, clock=bench.clock, durability="process")
    run_id, ticks, is_over = ledger.create_run("goal"), 0, False

    async def tick() -> None:
        nonlocal ticks
        while not is_over:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> None:
        nonlocal is_over, ticks
        ticking = asyncio.create_task(tick())
        for n in range(50):
            if n == 10:  # by now nobody has come for longer than anybody is waited for
                ticks = 0
            assert await ledger.aexecute_step(run_id, "double", {"n": n}, double) == 2 * n
        is_over = True
        await ticking

    asyncio.run(main())
    assert ticks >= 8
    assert store.is_remote or (len(store.together) < 20 < len(store.alone))
    assert ledger.verify(run_id).ok
    ledger.close()


def test_what_has_to_be_synced_keeps_no_loop_waiting_although_its_run_is_alone(bench: Bench) -> None:
    store: Any = Watching(bench.store())
    ledger = AgentRunLedger(store, clock=bench.clock, durability="process", max_steps=20)
    run_id = ledger.create_run("goal")

    async def main() -> None:
        for n in range(30):
            await ledger.aexecute_step(run_id, "double", {"n": n}, double)

    with pytest.raises(BudgetExceededException):
        asyncio.run(main())
    assert not [thread for thread, synced in store.alone if synced and thread == threading.get_ident()]
    assert store.synced.count(True) + [synced for _, synced in store.alone].count(True) == 1
    assert ledger.verify(run_id).ok
    ledger.close()


@pytest.mark.parametrize("turns", range(10))
def test_a_run_that_is_alone_and_cancelled_repeats_nothing_that_is_recorded(bench: Bench, turns: int) -> None:
    ledger = program(bench)
    calls = Counter[int]()

    async def count(n: int) -> int:
        calls[n] += 1
        if n == 15:
            begun.set()
            await asyncio.sleep(0)
        return n

    async def agent() -> list[int]:
        return [await ledger.aexecute_step(RUN, "count", {"n": n}, count, effect=Effect.READ) for n in range(20)]

    async def main() -> None:
        task = asyncio.create_task(agent())
        await begun.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    begun = asyncio.Event()
    asyncio.run(main())
    settled = {step.step_number for step in ledger.steps(RUN) if step.output_json is not None}
    ledger = program(bench)
    assert asyncio.run(agent()) == list(range(20))
    assert all(calls[number - 1] == 1 for number in settled)
    assert ledger.verify(RUN).ok


def test_a_stale_run_fails_none_of_those_that_are_written_with_it(bench: Bench) -> None:
    ledger, store = counting(bench, "process")
    run_ids = [ledger.create_run("goal") for _ in range(RUNS)]

    async def main() -> list[Any]:
        bench.owners_die()
        other = bench.open()
        other.resume_run(run_ids[3])
        ledger._leases.run(run_ids[3]).expires = bench.clock.elapsed() + 60  # it does not know yet
        for run_id in run_ids:
            if run_id != run_ids[3]:
                ledger._leases.renew(ledger._leases.run(run_id), 1)
        calls = [ledger.aexecute_step(run_id, "double", {"n": n}, double) for n, run_id in enumerate(run_ids)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(main())
    assert store.together[0] == RUNS
    assert isinstance(results.pop(3), LeaseLost)
    assert results == [2 * n for n in range(RUNS) if n != 3]
    ledger.close()


def test_a_request_to_cancel_one_run_disturbs_none_of_those_that_are_written_with_it(bench: Bench) -> None:
    ledger, _ = counting(bench, "process")
    run_ids = [ledger.create_run("goal") for _ in range(RUNS)]
    bench.store().post(run_ids[5], "cancel", b'{"by":"me","reason":"enough"}', "me", 0.0)
    results = asyncio.run(gathered(ledger, run_ids))
    assert type(results.pop(5)).__name__ == "RunClosed"
    assert results == [2 * n for n in range(RUNS) if n != 5]
    assert ledger.get_run(run_ids[5]).status == "CANCELLED"
    ledger.close()


async def gathered(ledger: AgentRunLedger, run_ids: list[str]) -> list[Any]:
    calls = [ledger.aexecute_step(run_id, "double", {"n": n}, double) for n, run_id in enumerate(run_ids)]
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the loop", "in a thread", "computing in the loop"])
def test_a_tool_that_blocks_for_three_leases_loses_no_run_of_its_loop(where: str, tmp_path: Path) -> None:
    lease, clock = 1.0, SystemClock()
    options: dict[str, Any] = {"lease_seconds": lease, "heartbeat_seconds": 0.1, "durability": "process"}
    ledger = AgentRunLedger(tmp_path / "runs.db", max_steps=1000, **options)
    run_ids = [ledger.create_run("goal", f"run-{n}") for n in range(20)]
    tried: list[str] = []
    is_over = threading.Event()

    def block() -> str:
        store = open_store(tmp_path / "runs.db", durability="process", clock=clock)
        end = clock.elapsed() + 3 * lease
        while clock.elapsed() < end:
            for run_id in run_ids:
                with pytest.raises(RunOwned):
                    store.claim(run_id, "a thief", lease)
            tried.append(where)
            if where != "computing in the loop":
                is_over.wait(0.02)
        store.close()
        return "done"

    async def works(run_id: str) -> None:
        while not is_over.is_set():
            await ledger.aexecute_step(run_id, "double", {"n": 1}, double, effect=Effect.READ, may_repeat=True)
            await asyncio.sleep(0.05)

    async def main() -> str:
        others = [asyncio.create_task(works(run_id)) for run_id in run_ids[1:]]
        limit = 100.0 if where == "in a thread" else None
        done: str = await ledger.aexecute_step(run_ids[0], "block", {}, block, timeout=limit)
        is_over.set()
        await asyncio.gather(*others)
        return done

    assert asyncio.run(main()) == "done"
    assert tried
    assert {step.fencing_token for run_id in run_ids for step in ledger.steps(run_id)} == {1}
    ledger.close()


def test_runs_that_have_ended_leave_nothing_in_memory(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def short(n: int) -> int:
        return n

    async def main() -> None:
        for n in range(600):
            assert await ledger.arun(short, n) == n

    asyncio.run(main())
    assert len(ledger._leases._runs) <= 257
    assert all(not run.history.positions and run.history.created is None for run in ledger._leases._runs.values())
