"""Long values: every byte comes back, and none of them stays in memory once the program has it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    IntentDrift,
    ReplayDivergence,
    RetryPolicy,
    RunState,
    Step,
    StepFailed,
    UnserialisableOutput,
)
from agent_run_ledger.contract import Append
from agent_run_ledger.engine.effects import Ask, Fetch
from agent_run_ledger.engine.history import KEPT_BYTES
from agent_run_ledger.errors import LedgerError, PayloadErased, PayloadTooLarge, StoreUnavailable
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from support.ledgers import GOAL, RUN, Bench, Died, never, program
from support.processes import environment

SIZES = [KEPT_BYTES - 2, KEPT_BYTES - 1, 60_000, 70_000, 1_000_000]
"""Around what is kept in memory (two bytes are the quotes of a string), around what stands in a table of its own, and long."""


def text(size: int, letter: str = "ä") -> str:
    """A string of this many bytes that no two sizes have in common."""
    return f"{size} {letter}".ljust(size - len(letter.encode()) + len(letter), "x")


def erase(bench: Bench, kind: str) -> None:
    """Payloads of a run that goes on are taken out of its storage, by somebody who has it in his hands."""
    if bench.kind == "memory":
        rows = cast("MemoryStore", bench.store())._runs[RUN].rows
        rows[:] = [
            row._replace(payload=None, digest=None, fingerprint=None) if row.kind == kind else row for row in rows
        ]
        return
    bench.execute(
        f"UPDATE payloads SET bytes = NULL WHERE digest IN (SELECT digest FROM entries WHERE kind = '{kind}')",
        f"UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE kind = '{kind}'",
        without_triggers=True,
    )


def fetched(ledger: AgentRunLedger) -> list[int]:
    """The entries whose payloads are fetched from now on."""
    seqs: list[int] = []
    driver = ledger._driver
    perform = driver.perform

    def watched(effect: Ask) -> Any:
        if isinstance(effect, Fetch):
            seqs.append(effect.seq)
        return perform(effect)

    driver.perform = watched  # type: ignore[method-assign]
    return seqs


# --- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_long_arguments_and_outputs_come_back_byte_for_byte(bench: Bench, size: int) -> None:
    arguments, output = {"page": text(size)}, {"html": text(size), "ok": True}
    ledger = program(bench)
    assert ledger.execute_step(RUN, "fetch", arguments, lambda page: {"html": page, "ok": True}) == output
    ledger.create_run(GOAL, RUN)
    assert ledger.execute_step(RUN, "fetch", arguments, never) == output, "in the process that made it"
    again = program(bench)
    assert again.execute_step(RUN, "fetch", arguments, never) == output
    assert again.execute_step(RUN, "next", {}, lambda: "new") == "new"
    assert again.verify().ok


def test_what_is_short_is_fetched_by_nobody_and_what_is_long_once(bench: Bench) -> None:
    ledger = program(bench)
    live = fetched(ledger)
    for size in SIZES:
        ledger.execute_step(RUN, "fetch", {"page": text(size)}, lambda page: page)
    assert live == []
    again = program(bench)
    replayed = fetched(again)
    for size in SIZES:
        assert again.execute_step(RUN, "fetch", {"page": text(size)}, never) == text(size)
    # created, then an intent and an outcome each: the outcomes of all but the first
    assert replayed == [5, 7, 9, 11]


def test_a_long_error_comes_back_as_it_was(bench: Bench) -> None:
    def fails() -> None:
        raise ValueError(text(3_000))

    said = []
    for _ in range(2):
        ledger = program(bench)
        with pytest.raises(StepFailed) as caught:
            ledger.execute_step(RUN, "fails", {}, fails)
        said.append(str(caught.value))
        ledger.execute_step(RUN, "next", {}, lambda: None)
    assert said[0] == said[1]


def test_side_by_side_long_outputs_come_back_in_the_order_of_the_first_time(bench: Bench) -> None:
    outputs = [text(200_000, "b"), "short", text(5_000, "c"), text(100, "d"), text(70_000, "e")]

    def life() -> tuple[list[str], int]:
        ledger, order, calls = program(bench), [], 0

        async def tool(number: int) -> str:
            nonlocal calls
            calls += 1
            for _ in range(3 * (len(outputs) - number)):  # the last is over first
                await asyncio.sleep(0)
            return outputs[number]

        async def main() -> None:
            made = [ledger.aexecute_step(RUN, "tool", {"number": n}, tool) for n in range(len(outputs))]
            for done in asyncio.as_completed(made):
                said = await done
                order.append(said)

        asyncio.run(main())
        return order, calls

    first, second = life(), life()
    assert sorted(first[0]) == sorted(outputs)
    assert (first[1], second) == (5, (first[0], 0))


def test_a_pipeline_hands_long_outputs_on_after_a_crash(bench: Bench) -> None:
    long = text(200_000)

    def load() -> str:
        return long

    def dies(load: str) -> str:
        raise Died

    def count(load: str) -> int:
        assert load == long
        return len(load)

    with pytest.raises(Died):
        bench.pipeline(RUN, Step("load", load), Step("count", dies, depends_on=["load"], effect=Effect.READ)).execute()
    bench.owners_die()
    again = bench.pipeline(RUN, Step("load", never), Step("count", count, depends_on=["load"], effect=Effect.READ))
    assert again.execute() == len(long)


# --- divergence -------------------------------------------------------------------------------------------------------


def asked_for(page: str, tail: str) -> dict[str, Any]:
    return {"page": page, "options": {"tags": ["a", tail]}}


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_divergence_in_long_arguments_says_where(bench: Bench, is_attached: bool) -> None:
    program(bench).execute_step(RUN, "fetch", asked_for(text(1_000_000), "b"), lambda: "one")
    bench.owners_die()
    ledger = bench.open()
    if is_attached:
        ledger.create_run(GOAL, RUN)
    with pytest.raises(ReplayDivergence) as caught:
        ledger.execute_step(RUN, "fetch", asked_for(text(1_000_000), "c"), never)
    assert (type(caught.value), caught.value.path) == (ReplayDivergence, "$.options.tags[1]")


def test_a_drift_from_long_arguments_in_doubt_says_what_was_dispatched(bench: Bench) -> None:
    def dies(**_: Any) -> None:
        raise Died

    long = text(100_000)
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "fetch", {"page": long, "n": 1}, dies, effect=Effect.READ)
    with pytest.raises(IntentDrift) as caught:
        program(bench).execute_step(RUN, "fetch", {"page": long, "n": 2}, never, effect=Effect.READ)
    assert caught.value.path == "$.n"
    assert long in caught.value.stored_arguments
    with pytest.raises(IntentDrift) as caught:
        program(bench).execute_step(RUN, "post", {"page": long, "n": 1}, never, effect=Effect.READ)
    assert long in caught.value.stored_arguments


def test_what_identifies_a_call_is_told_from_long_arguments(bench: Bench) -> None:
    def identity(arguments: dict[str, Any]) -> Any:
        return arguments["page"]

    long = text(300_000)
    first = program(bench)
    first.execute_step(RUN, "fetch", {"page": long, "at": 1}, lambda: long, identity=identity)
    assert program(bench).execute_step(RUN, "fetch", {"page": long, "at": 2}, never, identity=identity) == long
    with pytest.raises(ReplayDivergence) as caught:
        program(bench).execute_step(RUN, "fetch", {"page": long + "!", "at": 1}, never, identity=identity)
    assert caught.value.path == "$.page"


# --- dispatched again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
def test_what_is_dispatched_again_gets_the_stored_arguments_long_as_they_are(bench: Bench, at: int) -> None:
    """Equal ones, and ones that are equal by `identity=` only: then the stored ones count."""
    long, got = text(400_000), []

    def dies(page: str, at: int) -> None:
        got.append((page, at))
        raise Died

    def works(page: str, at: int) -> str:
        got.append((page, at))
        return page

    options: dict[str, Any] = {"effect": Effect.IDEMPOTENT, "identity": lambda arguments: arguments["page"]}
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "fetch", {"page": long, "at": 1}, dies, **options)
    assert program(bench).execute_step(RUN, "fetch", {"page": long, "at": at}, works, **options) == long
    assert got == [(long, 1), (long, 1)]
    intents = [row for row in bench.rows(RUN) if row.kind == "intent"]
    assert len(intents) == 2
    assert (
        intents[0].payload
        == intents[1].payload
        == json.dumps({"at": 1, "page": long}, ensure_ascii=False, separators=(",", ":")).encode()
    )
    assert bench.open().verify().ok


@pytest.mark.parametrize("crashes", [False, True])
def test_every_retry_gets_the_long_arguments(bench: Bench, crashes: bool) -> None:
    long, got = text(100_000), []

    def flaky(page: str) -> str:
        got.append(page)
        if len(got) == 2 and crashes:
            raise Died
        if len(got) < 3:
            raise ConnectionResetError("not yet")
        return page

    retry: dict[str, Any] = {"retry": RetryPolicy(max_attempts=5), "effect": Effect.READ}
    for _ in range(2 if crashes else 1):
        try:
            assert program(bench).execute_step(RUN, "fetch", {"page": long}, flaky, **retry) == long
        except Died:
            continue
    assert got == [long] * 3
    assert program(bench).execute_step(RUN, "fetch", {"page": long}, never, **retry) == long


@pytest.mark.parametrize("is_after", [False, True], ids=["before the effect", "after the effect"])
def test_a_run_of_long_values_goes_on_from_every_effect_at_which_it_may_die(bench: Bench, is_after: bool) -> None:
    long = text(80_000)

    def life(ledger: AgentRunLedger, calls: list[int]) -> Any:
        def tool(page: str, n: int) -> str:
            calls.append(n)
            return page + str(n)

        outputs = [
            ledger.execute_step(RUN, "tool", {"page": long, "n": n}, tool, effect=Effect.IDEMPOTENT) for n in range(2)
        ]
        ledger.finish_run(RUN, [len(output) for output in outputs])
        return outputs

    wanted = [long + "0", long + "1"]
    died_at: list[str] = []
    for number in range(1, 200):
        folder = bench.path.parent / str(number)
        folder.mkdir()
        with Bench(bench.kind, folder) as own:
            calls: list[int] = []
            program(own).execute_step(RUN, "tool", {"page": long, "n": 0}, lambda page, n: page + str(n))
            mortal = program(own)
            effects = _dies_at(mortal, number, is_after)
            try:
                assert life(mortal, calls) == wanted
            except Died:
                died_at.append(effects[-1])
                assert life(program(own), calls) == wanted
            else:
                break
            assert calls in ([1], [1, 1]), "what was recorded is called by nobody"
            reader = own.open()
            assert (reader.get_run(RUN).status, reader.get_run(RUN).result) == (
                RunState.COMPLETED,
                [len(wanted[0])] * 2,
            )
            assert reader.verify().ok
    assert {"Fetch", "Commit", "Invoke", "GiveBack"} <= set(died_at)


def _dies_at(ledger: AgentRunLedger, number: int, is_after: bool) -> list[str]:
    """Let the process end at its nth effect; whatever it asks for then is not done any more. Returns the effects as they come."""
    seen: list[str] = []
    driver = ledger._driver
    perform = driver.perform

    def mortal(effect: Ask) -> Any:
        seen.append(type(effect).__name__)
        if len(seen) > number or (len(seen) == number and not is_after):
            if len(seen) > number:
                seen.pop()
            raise Died
        answer = perform(effect)
        if len(seen) == number:
            raise Died
        return answer

    driver.perform = mortal  # type: ignore[method-assign]
    return seen


class Moody(MemoryStore):
    """A store that can be told not to be there."""

    is_away = False

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        if self.is_away:
            raise StoreUnavailable("the storage is not there")
        return super().append_all(appends, synced=synced)


def test_a_run_that_is_read_anew_while_a_step_runs_calls_that_step_once() -> None:
    store = Moody(clock=FakeClock())
    long, calls = text(100_000), 0

    async def main() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow(page: str) -> str:
            nonlocal calls
            calls += 1
            begun.set()
            await may_end.wait()
            return page

        with AgentRunLedger(store, clock=store.clock, durability="process", heartbeat_seconds=29.0) as ledger:
            ledger.create_run(GOAL, RUN)
            running = asyncio.create_task(
                _awaited(ledger.aexecute_step(RUN, "slow", {"page": long}, slow, step_key="a"))
            )
            await begun.wait()
            store.is_away = True
            with pytest.raises(StoreUnavailable):
                await ledger.aexecute_step(RUN, "other", {}, never, step_key="b")
            store.is_away = False
            may_end.set()
            assert await running == long
            assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED"]

    asyncio.run(main())
    assert calls == 1


async def _awaited(made: Any) -> Any:
    return await made


# --- erased -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5_000, 100_000])
def test_an_erased_payload_stays_erased(bench: Bench, size: int) -> None:
    long = text(size)
    program(bench).execute_step(RUN, "fetch", {"page": long}, lambda page: page)
    erase(bench, "outcome")
    ledger = program(bench)
    fetches = fetched(ledger)
    with pytest.raises(PayloadErased, match="step 1"):
        ledger.execute_step(RUN, "fetch", {"page": long}, never)
    assert fetches == []
    (step,) = ledger.steps(RUN)
    assert (step.output_json, step.output_digest, step.arguments_json) == (None, None, json.dumps({"page": long}, ensure_ascii=False, separators=(",", ":")))  # fmt: skip
    erase(bench, "intent")
    ledger = program(bench)
    with pytest.raises(ReplayDivergence) as caught:
        ledger.execute_step(RUN, "fetch", {"page": long + "!"}, never)
    assert caught.value.path is None, "nobody knows any more where"
    with pytest.raises(PayloadErased, match="step 1"):
        program(bench).execute_step(RUN, "fetch", {"page": long}, never)
    assert {finding.code for finding in bench.open().verify().findings} == {"erased"}, "no entry says so"


def test_a_step_in_doubt_whose_arguments_were_erased_is_dispatched_with_the_same_ones_of_its_program(
    bench: Bench,
) -> None:
    long = text(5_000)

    def dies(page: str) -> None:
        raise Died

    with pytest.raises(Died):
        program(bench).execute_step(RUN, "fetch", {"page": long}, dies, effect=Effect.READ)
    erase(bench, "intent")
    assert program(bench).execute_step(RUN, "fetch", {"page": long}, lambda page: page, effect=Effect.READ) == long


# --- too long ---------------------------------------------------------------------------------------------------------


def test_arguments_beyond_the_limit_are_refused_before_anything_is_dispatched_or_written(bench: Bench) -> None:
    ledger = program(bench, payload_limit=200_000)
    before = bench.rows(RUN)
    with pytest.raises(PayloadTooLarge):
        ledger.execute_step(RUN, "fetch", {"page": text(200_000)}, never)
    assert bench.rows(RUN) == before
    assert ledger.execute_step(RUN, "fetch", {"page": text(100_000)}, lambda page: page) == text(100_000)


def test_an_output_beyond_the_limit_is_recorded_as_executed_and_is_not_made_again(bench: Bench) -> None:
    calls: list[int] = []

    def fetch() -> str:
        calls.append(1)
        return text(200_000)

    for limit in (200_000, 1_000_000):
        ledger = program(bench, payload_limit=limit)
        with pytest.raises(UnserialisableOutput, match="executed"):
            ledger.execute_step(RUN, "fetch", {}, fetch)
    assert calls == [1]
    (step,) = bench.open().steps(RUN)
    assert (step.state, step.output_json) == ("FAILED", None)


# --- looking ----------------------------------------------------------------------------------------------------------


def test_the_records_of_steps_are_whole(bench: Bench) -> None:
    ledger = program(bench)
    for size in SIZES:
        ledger.execute_step(RUN, "fetch", {"page": text(size)}, lambda page: page)
    views: list[Callable[[], Any]] = [
        lambda: ledger.steps(RUN),
        lambda: ledger.inspect(RUN).steps,
        lambda: program(bench).resume_run(RUN),
    ]
    for view in views:
        told = [(step.arguments_json, step.output_json) for step in view()]
        assert told == [(f'{{"page":"{text(size)}"}}', f'"{text(size)}"') for size in SIZES]


def test_more_entries_than_a_page_holds_are_one_run(bench: Bench) -> None:
    ledger = program(bench, max_steps=1_000)
    for number in range(600):
        ledger.execute_step(RUN, "count", {"n": number}, lambda n: n)
    head = ledger.tree_head(RUN)
    assert head.size == len(bench.rows(RUN)) == 1 + 2 * 600
    assert [step.output_json for step in ledger.steps(RUN)] == [str(number) for number in range(600)]
    again = program(bench, max_steps=1_000)
    assert len(again.resume_run(RUN)) == 600
    assert again.execute_step(RUN, "count", {"n": 600}, lambda n: n) == 600
    report = again.verify(RUN)
    assert (report.ok, report.entries) == (True, head.size + 2)


# --- memory -----------------------------------------------------------------------------------------------------------

KEEPS = """
import gc, sys, tracemalloc
from agent_run_ledger import AgentRunLedger
path, size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
arguments, output = "a" * (size // 2), "b" * (size // 2)
with AgentRunLedger(path, max_steps=10**9, durability="process") as ledger:
    ledger.create_run("keep", "warm")
    ledger.execute_step("warm", "fetch", {"page": arguments}, lambda page: output)
    tracemalloc.start()
    ledger.create_run("keep", "run")
    for n in range(steps):
        ledger.execute_step("run", "fetch", {"page": arguments, "n": n}, lambda page, n: output)
    gc.collect()
    print(tracemalloc.get_traced_memory()[0])
    tracemalloc.reset_peak()
    assert ledger.verify("run").ok
    ledger.tree_head("run")
    print(tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0])
"""


def keeps(path: str, size: int, steps: int) -> tuple[int, int]:
    """Bytes that a process holds for a run that it made or replayed, and bytes that verifying it needs beyond."""
    command = [sys.executable, "-c", KEEPS, path, str(size), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    kept, needed = map(int, done.stdout.split())
    return kept, needed


@pytest.mark.slow
def test_what_a_process_keeps_of_a_step_does_not_depend_on_how_long_its_values_are(tmp_path: Any) -> None:
    steps = 2_000
    live, verified = keeps(str(tmp_path / "long.db"), 50_000, steps)
    replayed, verified_again = keeps(str(tmp_path / "long.db"), 50_000, steps)
    longer, _ = keeps(str(tmp_path / "longer.db"), 200_000, 500)
    assert live < 10_000_000
    assert replayed < 10_000_000
    assert abs(longer / 500 - live / steps) < 1_000
    assert max(verified, verified_again) < 10_000_000
