"""Steps whose outcome is not known, and failures that nobody acted upon: what is dispatched again, and what never is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Effect,
    RetryPolicy,
    RunClosed,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    UndeclaredEffectWarning,
    UnserialisableOutput,
    current_step,
)
from agent_run_ledger.engine.history import History, StepHistory
from agent_run_ledger.engine.recovery import Declaration, plan_recovery
from agent_run_ledger.model import Receipt
from support.ledgers import Bench, Died, Tool, never, raising, told

RUN, GOAL = "run", "go on"
SAFE = [Effect.READ, Effect.IDEMPOTENT]


def program(bench: Bench, **options: Any) -> AgentRunLedger:
    """A new process that begins the run, or begins it again at its first line."""
    bench.owners_die()
    ledger = bench.open(**options)
    assert ledger.create_run(GOAL, RUN) == RUN
    return ledger


def die_in(ledger: AgentRunLedger, tool: str = "t", arguments: dict[str, Any] | None = None, **options: Any) -> None:
    with pytest.raises(Died):
        ledger.execute_step(RUN, tool, arguments or {}, raising(Died()), **options)


def stop_with(kind: type[BaseException]) -> Callable[[float], None]:
    """A `sleep` from which the process does not wake."""

    def sleep(wait_seconds: float) -> None:
        raise kind

    return sleep


def fail_in(ledger: AgentRunLedger, tool: str = "t", **options: Any) -> None:
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, tool, {}, raising(ValueError("no")), **options)


# --- the table of effects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", SAFE)
def test_an_in_doubt_step_that_does_no_harm_is_dispatched_again_with_its_stored_arguments_and_key(
    bench: Bench, effect: Effect
) -> None:
    keys: list[tuple[str, int, dict[str, Any]]] = []

    def tool(**arguments: Any) -> str:
        keys.append((current_step().idempotency_key, current_step().attempt, arguments))
        if len(keys) == 1:
            raise Died
        return "done"

    def call(a: int, b: str) -> str:
        return tool(a=a, b=b)

    arguments = {"b": "x", "a": 1}
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "t", arguments, call, effect=effect)
    assert program(bench).execute_step(RUN, "t", {"a": 1, "b": "x"}, call, effect=effect) == "done"
    (key, first, given), (again, second, given_again) = keys
    assert (first, second) == (1, 2)
    assert key == again
    assert len(key) == 64
    assert given == given_again == arguments
    assert bench.kinds(RUN) == ["created", "intent", "intent", "outcome"]
    stored = [row.payload for row in bench.rows(RUN) if row.kind == "intent"]
    assert stored == [b'{"a":1,"b":"x"}'] * 2


def test_an_in_doubt_mutation_is_never_dispatched_again_and_the_run_stands_blocked(bench: Bench) -> None:
    die_in(program(bench), effect=Effect.MUTATE)
    for _ in range(6):
        ledger = program(bench)
        with pytest.raises(StepInDoubt, match="changes something each time") as caught:
            ledger.execute_step(RUN, "t", {}, never, effect=Effect.MUTATE)
        assert (caught.value.run_id, caught.value.step_number, caught.value.tool_name) == (RUN, 1, "t")
    assert bench.kinds(RUN) == ["created", "intent", "parked"], "parked once, however often it is tried"
    record = ledger.get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert record.cause is not None
    assert "in doubt" in record.cause
    assert [step.state for step in ledger.steps(RUN)] == ["BLOCKED"]


def test_what_was_declared_at_the_dispatch_counts_when_nothing_is_declared_any_more(bench: Bench) -> None:
    die_in(program(bench), effect=Effect.MUTATE)
    with pytest.raises(StepInDoubt):
        program(bench).execute_step(RUN, "t", {}, never)


def test_what_is_declared_now_counts_more_than_what_was_declared_then(bench: Bench) -> None:
    die_in(program(bench), effect=Effect.MUTATE)
    assert program(bench).execute_step(RUN, "t", {}, lambda: 1, effect=Effect.READ) == 1


def test_an_effect_may_be_given_by_its_name(bench: Bench) -> None:
    die_in(program(bench), effect="MUTATE")
    with pytest.raises(StepInDoubt):
        program(bench).execute_step(RUN, "t", {}, never, effect="MUTATE")  # type: ignore[arg-type]


def test_an_undeclared_step_in_doubt_is_dispatched_again_and_that_is_said_aloud(bench: Bench) -> None:
    die_in(program(bench))
    with told(UndeclaredEffectWarning) as warnings:
        assert program(bench).execute_step(RUN, "t", {}, lambda: 1) == 1
    assert len(warnings) == 1
    assert "'t'" in warnings[0]
    assert bench.kinds(RUN) == ["created", "intent", "redispatched_undeclared", "intent", "outcome"]


def test_the_warning_comes_once_per_tool(bench: Bench) -> None:
    ledger = program(bench)
    with told(UndeclaredEffectWarning) as warnings:
        for number in range(3):
            for tool in ("one", "two"):
                run_id = ledger.create_run("g")
                with pytest.raises(Died):
                    ledger.execute_step(run_id, tool, {"n": number}, raising(Died()))
                ledger.create_run("g", run_id)
                ledger.execute_step(run_id, tool, {"n": number}, lambda: None)
    assert len(warnings) == 2


def test_a_program_that_makes_the_warning_an_error_loses_nothing(bench: Bench) -> None:
    die_in(program(bench))
    ledger = program(bench)
    with pytest.raises(UndeclaredEffectWarning):
        ledger.execute_step(RUN, "t", {}, never)
    ledger = program(bench)
    with told(UndeclaredEffectWarning):
        assert ledger.execute_step(RUN, "t", {}, lambda: 1) == 1
        assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2


def test_undeclared_block_parks_instead(bench: Bench) -> None:
    die_in(program(bench, undeclared="block"))
    ledger = program(bench, undeclared="block")
    with pytest.raises(StepInDoubt, match="undeclared"):
        ledger.execute_step(RUN, "t", {}, never)
    assert ledger.get_run(RUN).status == "BLOCKED"
    with told(UndeclaredEffectWarning):
        assert program(bench, undeclared="dispatch").execute_step(RUN, "t", {}, lambda: 1) == 1


def test_a_run_with_a_mutation_in_doubt_cannot_be_finished_but_can_be_aborted(bench: Bench) -> None:
    die_in(program(bench), effect=Effect.MUTATE)
    bench.owners_die()
    ledger = bench.open()
    ledger.resume_run(RUN)
    with pytest.raises(StepInDoubt, match="never settled"):
        ledger.finish_run(RUN)
    assert ledger.get_run(RUN).owner is None
    ledger.abort_run(RUN, "looked at by hand")
    assert ledger.get_run(RUN).status == "FAILED"


def test_a_parked_step_does_not_stand_in_the_way_of_other_runs(bench: Bench) -> None:
    die_in(program(bench), effect=Effect.MUTATE)
    ledger = program(bench)
    with pytest.raises(StepInDoubt):
        ledger.execute_step(RUN, "t", {}, never, effect=Effect.MUTATE)
    other = ledger.create_run("another")
    assert ledger.execute_step(other, "t", {}, lambda: 1, effect=Effect.MUTATE) == 1


# --- ambiguous errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TimeoutError("slow"), ConnectionResetError("reset")])
def test_an_ambiguous_error_of_a_mutation_leaves_it_in_doubt(bench: Bench, error: Exception) -> None:
    ledger = program(bench)
    options: dict[str, Any] = {"effect": Effect.MUTATE, "retry": RetryPolicy()}
    with pytest.raises(StepInDoubt, match="does not tell whether it took effect") as caught:
        ledger.execute_step(RUN, "t", {}, raising(error), **options)
    assert caught.value.__cause__ is error
    with pytest.raises(StepInDoubt):
        ledger.execute_step(RUN, "other", {}, never)
    with pytest.raises(StepInDoubt):
        ledger.finish_run(RUN)
    with pytest.raises(StepInDoubt):
        program(bench).execute_step(RUN, "t", {}, never, **options)
    assert bench.clock.sleeps == []
    assert bench.kinds(RUN) == ["created", "intent", "parked"]


@pytest.mark.parametrize("effect", [None, *SAFE])
def test_an_ambiguous_error_of_another_step_is_an_outcome_the_agent_may_act_upon(
    bench: Bench, effect: Effect | None
) -> None:
    ledger = program(bench)
    with pytest.raises(StepFailed) as caught:
        ledger.execute_step(RUN, "t", {}, raising(TimeoutError("slow")), effect=effect)
    assert caught.value.is_a("builtins.TimeoutError")
    assert ledger.execute_step(RUN, "fallback", {}, lambda: 2) == 2
    assert b'"ambiguous":true' in next(row.body for row in bench.rows(RUN) if row.kind == "outcome")


@pytest.mark.parametrize("error", [ValueError("no"), ConnectionRefusedError("nobody there")])
def test_a_plain_error_of_a_mutation_is_an_outcome(bench: Bench, error: Exception) -> None:
    ledger = program(bench)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, raising(error), effect=Effect.MUTATE)
    assert ledger.execute_step(RUN, "t", {}, lambda: 1, effect=Effect.MUTATE) == 1


# --- failures and reruns ----------------------------------------------------------------------------------------------


def test_a_trailing_failure_is_dispatched_again_at_the_same_position_with_the_same_key(bench: Bench) -> None:
    keys = []

    def tool() -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) < 3:
            raise ValueError("no")
        return "done"

    for _ in range(2):
        with pytest.raises(StepFailed):
            program(bench).execute_step(RUN, "t", {}, tool)
    ledger = program(bench)
    assert ledger.execute_step(RUN, "t", {}, tool) == "done"
    assert len(set(keys)) == 1
    (step,) = ledger.steps(RUN)
    assert (step.position, step.step_number, step.attempts, step.state) == ("1", 1, 3, "COMPLETED")


def test_attempts_are_spent_by_reruns_and_the_run_is_then_a_dead_letter_with_a_reason(bench: Bench) -> None:
    for _ in range(4):
        fail_in(program(bench))
    with pytest.raises(AttemptsExhausted, match="dispatched 4 times") as caught:
        program(bench).execute_step(RUN, "t", {}, raising(ValueError("no")))
    assert (caught.value.attempts, caught.value.tool_name, caught.value.step_number) == (4, "t", 1)
    bench.owners_die()
    ledger = bench.open()
    record = ledger.get_run(RUN)
    assert (record.status, record.owner) == ("DEAD_LETTER", None)
    assert record.cause is not None
    assert "dispatched 4 times" in record.cause
    (step,) = ledger.steps(RUN)
    assert (step.state, step.error_message, step.retry_budget_remaining) == ("DEAD_LETTER", "ValueError: no", 0)
    ledger.create_run(GOAL, RUN)
    with pytest.raises(RunClosed, match="DEAD_LETTER"):
        ledger.execute_step(RUN, "t", {}, never)


def test_attempts_are_spent_by_crashes_too(bench: Bench) -> None:
    policy = RetryPolicy(max_attempts=2)
    die_in(program(bench), effect=Effect.READ, retry=policy)
    die_in(program(bench), effect=Effect.READ, retry=policy)
    with pytest.raises(AttemptsExhausted):
        program(bench).execute_step(RUN, "t", {}, raising(Died()), effect=Effect.READ, retry=policy)
    assert program(bench).get_run(RUN).status == "DEAD_LETTER"


def test_the_budget_of_retries_that_a_record_shows_counts_down(bench: Bench) -> None:
    left = []
    for _ in range(4):
        ledger = program(bench)
        fail_in(ledger)
        left += [step.retry_budget_remaining for step in ledger.steps(RUN)]
    assert left == [3, 2, 1, 0]


def test_changed_tool_code_starts_the_attempts_afresh(bench: Bench) -> None:
    for _ in range(4):
        fail_in(program(bench))

    def mended() -> str:
        return "mended"

    assert program(bench).execute_step(RUN, "t", {}, mended) == "mended"


def test_changed_code_has_as_many_attempts_as_the_first_and_no_more(bench: Bench) -> None:
    for version in ("1", "2"):
        for _ in range(4):
            fail_in(program(bench), version=version)
    with pytest.raises(AttemptsExhausted):
        program(bench).execute_step(RUN, "t", {}, raising(ValueError("no")), version="2")


def test_a_changed_version_starts_the_attempts_afresh_and_an_equal_one_does_not(bench: Bench) -> None:
    policy = RetryPolicy(max_attempts=1)
    fail_in(program(bench), retry=policy, version="1")
    with pytest.raises(StepFailed):
        program(bench).execute_step(RUN, "t", {}, raising(KeyError(1)), retry=policy, version="2")
    with pytest.raises(AttemptsExhausted):
        program(bench).execute_step(RUN, "t", {}, never, retry=policy, version="2")


def test_a_failure_that_a_step_follows_is_raised_from_the_record_and_not_dispatched_again(bench: Bench) -> None:
    ledger = program(bench)
    fail_in(ledger)
    ledger.execute_step(RUN, "fallback", {}, lambda: 2)
    ledger = program(bench)
    with pytest.raises(StepFailed, match="Tool execution failed: ValueError: no"):
        ledger.execute_step(RUN, "t", {}, never)
    assert ledger.execute_step(RUN, "fallback", {}, never) == 2


def test_a_failure_that_a_recorded_value_follows_is_raised_from_the_record(bench: Bench) -> None:
    def agent(fn: Callable[..., Any]) -> float:
        with bench.open().open_run(GOAL, RUN) as run:
            with pytest.raises(StepFailed):
                run.step("t", {}, fn)
            seen = run.now()
            raise Died(seen)

    times = []
    for function in (raising(ValueError("no")), never):
        with pytest.raises(Died) as died:
            agent(function)
        times.append(died.value.args[0])
    assert times[0] == times[1]


def test_a_park_between_does_not_make_a_failure_followed(bench: Bench) -> None:
    tool = Tool(ValueError("no"), "done")
    with pytest.raises(StepFailed), bench.open().open_run(GOAL, RUN) as run:
        run.step("t", {}, tool)
    assert bench.kinds(RUN)[-1] == "parked"
    with bench.open().open_run(GOAL, RUN) as run:
        assert run.step("t", {}, tool) == "done"
    assert tool.calls == 2


def test_resume_run_hands_the_failure_over_so_the_next_call_is_a_new_step(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "a", {}, lambda: 1)
    fail_in(ledger)
    bench.owners_die()
    ledger = bench.open()
    records = ledger.resume_run(RUN)
    assert [(step.tool_name, step.state, step.error_message, step.replayed) for step in records] == [
        ("a", "COMPLETED", None, True),
        ("t", "FAILED", "ValueError: no", True),
    ]
    assert ledger.execute_step(RUN, "t", {}, lambda: "again") == "again"
    assert [(step.position, step.attempts) for step in ledger.steps(RUN)] == [("1", 1), ("2", 1), ("3", 1)]


def test_resume_run_goes_on_at_an_in_doubt_step(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "a", {}, lambda: 1)
    die_in(ledger, effect=Effect.READ)
    bench.owners_die()
    ledger = bench.open()
    assert [step.state for step in ledger.resume_run(RUN)] == ["COMPLETED", "RUNNING"]
    assert ledger.execute_step(RUN, "t", {}, lambda: 2, effect=Effect.READ) == 2
    assert [(step.position, step.attempts) for step in ledger.steps(RUN)] == [("1", 1), ("2", 2)]


def test_a_fresh_process_that_did_not_resume_replays_from_the_first_step(bench: Bench) -> None:
    ledger = program(bench)
    for number in range(3):
        ledger.execute_step(RUN, "t", {"n": number}, lambda n: n)
    bench.owners_die()
    ledger = bench.open()
    assert [ledger.execute_step(RUN, "t", {"n": number}, never) for number in range(3)] == [0, 1, 2]
    assert ledger.execute_step(RUN, "t", {"n": 3}, lambda n: n) == 3


# --- retries ----------------------------------------------------------------------------------------------------------


def test_retries_are_stored_with_their_number_and_their_time(bench: Bench) -> None:
    ledger = program(bench)
    policy = RetryPolicy(max_attempts=3, base=4.0)
    tool = Tool(ValueError("1"), ValueError("2"), "done")
    begun = bench.clock.now()
    assert ledger.execute_step(RUN, "t", {}, tool, retry=policy) == "done"
    assert tool.calls == 3
    assert bench.kinds(RUN) == ["created", *["intent", "outcome"] * 3]
    waited = bench.clock.now() - begun
    assert 0 < waited <= 4.0 + 8.0
    assert waited == pytest.approx(sum(bench.clock.sleeps))
    (step,) = ledger.steps(RUN)
    assert (step.attempts, step.state, step.retry_budget_remaining) == (3, "COMPLETED", 0)


def test_the_error_that_uses_up_the_last_attempt_is_raised_and_the_agent_may_act_on_it(bench: Bench) -> None:
    ledger = program(bench)
    tool = Tool(ValueError("1"), ValueError("2"))
    with pytest.raises(StepFailed, match="ValueError: 2"):
        ledger.execute_step(RUN, "t", {}, tool, retry=RetryPolicy(max_attempts=2))
    assert ledger.execute_step(RUN, "fallback", {}, lambda: 1) == 1


def test_without_a_policy_an_error_is_final_at_once(bench: Bench) -> None:
    tool = Tool(ValueError("1"), "done")
    with pytest.raises(StepFailed):
        program(bench).execute_step(RUN, "t", {}, tool)
    assert tool.calls == 1
    assert bench.clock.sleeps == []


def test_while_a_retry_is_waited_for_the_run_is_blocked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    ledger = program(bench)
    sleep = bench.clock.sleep

    def look(wait_seconds: float) -> None:
        seen.append((ledger.get_run(RUN).status, ledger.steps(RUN)[0].state))
        sleep(wait_seconds)

    monkeypatch.setattr(bench.clock, "sleep", look)
    ledger.execute_step(RUN, "t", {}, Tool(ValueError("1"), "done"), retry=RetryPolicy(base=8.0, cap=8.0))
    assert set(seen) == {("BLOCKED", "FAILED")}


def die_in_the_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch, policy: RetryPolicy) -> float:
    """A process that dies while it waits for its second attempt. Returns when that attempt is due."""
    ledger = program(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.clock, "sleep", stop_with(Died))
        with pytest.raises(Died):
            ledger.execute_step(RUN, "t", {}, raising(ValueError("1")), retry=policy)
    due = History.read(RUN, b"", bench.rows(RUN)).positions["1"].outcome
    assert due is not None
    assert due.retry_at is not None
    return due.retry_at


def test_a_crash_during_the_wait_restarts_neither_the_count_nor_the_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RetryPolicy(max_attempts=2, base=1000.0, cap=1000.0, jitter="decorrelated")  # which is never short
    due = die_in_the_wait(bench, monkeypatch, policy)
    bench.clock.set_wall(due - 5.0)  # a part of the wait has passed while nobody was there
    bench.clock.advance(0)
    ledger = bench.open(lease_seconds=1e6)
    wall = bench.clock.now()
    bench.owners_die()
    bench.clock.set_wall(wall)
    ledger.create_run(GOAL, RUN)
    with pytest.raises(StepFailed, match="ValueError: 2"):
        ledger.execute_step(RUN, "t", {}, raising(ValueError("2")), retry=policy)
    assert sum(bench.clock.sleeps) == pytest.approx(5.0, abs=1e-3), "the rest of the wait, and no third attempt"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "intent", "outcome"]


def test_a_retry_whose_time_has_come_while_nobody_was_there_is_made_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = die_in_the_wait(bench, monkeypatch, RetryPolicy(base=10.0))
    bench.clock.set_wall(due + 1)
    assert program(bench).execute_step(RUN, "t", {}, lambda: 1, retry=RetryPolicy(base=10.0)) == 1
    assert bench.clock.sleeps == []


def test_resume_run_goes_on_at_a_step_that_waits_for_its_retry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    due = die_in_the_wait(bench, monkeypatch, RetryPolicy(base=10.0))
    bench.clock.set_wall(due)
    bench.owners_die()
    ledger = bench.open()
    assert [step.state for step in ledger.resume_run(RUN)] == ["FAILED"]
    assert ledger.execute_step(RUN, "t", {}, lambda: 1, retry=RetryPolicy(base=10.0)) == 1
    assert [(step.position, step.attempts) for step in ledger.steps(RUN)] == [("1", 2)]


def test_whoever_lost_the_run_during_a_wait_makes_no_retry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_run_ledger import LeaseLost

    ledger, policy = program(bench), RetryPolicy(base=8.0)
    sleep, taken_over = bench.clock.sleep, []

    def take_over(wait_seconds: float) -> None:
        if not taken_over:
            taken_over.append(program(bench).execute_step(RUN, "t", {}, lambda: "the other's", retry=policy))
        sleep(wait_seconds)

    monkeypatch.setattr(bench.clock, "sleep", take_over)
    tool = Tool(ValueError("1"), "mine")
    with pytest.raises(LeaseLost):
        ledger.execute_step(RUN, "t", {}, tool, retry=policy)
    assert tool.calls == 1
    assert bench.kinds(RUN) == ["created", *["intent", "outcome"] * 2]


def test_a_retry_that_the_program_gave_up_waiting_for_is_not_made_at_replay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = program(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.clock, "sleep", stop_with(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.execute_step(RUN, "t", {}, raising(ValueError("1")), retry=RetryPolicy(base=8.0))
    assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2
    ledger = program(bench)
    with pytest.raises(StepCancelled):  # it was told of no failure
        ledger.execute_step(RUN, "t", {}, never, retry=RetryPolicy(base=8.0))
    assert ledger.execute_step(RUN, "next", {}, never) == 2
    assert ledger.steps(RUN)[0].error_message == "ValueError: 1"


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_interruption_is_no_outcome_and_goes_on_its_way(bench: Bench, interrupt: BaseException) -> None:
    ledger = program(bench)
    with pytest.raises(type(interrupt)) as caught:
        ledger.execute_step(RUN, "t", {}, raising(interrupt))
    assert caught.value is interrupt
    assert bench.kinds(RUN) == ["created", "intent"]


def test_a_program_that_goes_on_after_an_interruption_has_the_step_recorded_as_cancelled(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "t", {}, raising(KeyboardInterrupt()))
    assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2
    assert ledger.execute_step(RUN, "third", {}, lambda: 3) == 3
    ledger = program(bench)
    with pytest.raises(StepCancelled) as caught:
        ledger.execute_step(RUN, "t", {}, never)
    assert isinstance(caught.value, TimeoutError)
    assert ledger.execute_step(RUN, "next", {}, never) == 2
    assert bench.kinds(RUN) == ["created", *["intent", "outcome"] * 3]


@pytest.mark.parametrize("goes_on", ["now", "random", "uuid4", None])
def test_a_recorded_value_and_the_end_of_the_run_count_as_going_on(bench: Bench, goes_on: str | None) -> None:
    with bench.open().open_run(GOAL, RUN) as run:
        with pytest.raises(KeyboardInterrupt):
            run.step("t", {}, raising(KeyboardInterrupt()))
        if goes_on:
            getattr(run, goes_on)()
    assert bench.kinds(RUN) == ["created", "intent", "outcome", *(["value"] if goes_on else []), "finished"]


@pytest.mark.parametrize(("effect", "undeclared"), [(Effect.MUTATE, "dispatch"), (None, "block")])
def test_a_program_cannot_go_on_after_an_interrupted_step_that_must_not_be_repeated(
    bench: Bench, effect: Effect | None, undeclared: str
) -> None:
    ledger = program(bench, undeclared=undeclared)
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "t", {}, raising(KeyboardInterrupt()), effect=effect)
    with pytest.raises(StepInDoubt, match="interrupted"):
        ledger.execute_step(RUN, "next", {}, never)
    with pytest.raises(StepInDoubt):
        ledger.finish_run(RUN)
    assert ledger.get_run(RUN).status == "BLOCKED"
    assert bench.kinds(RUN) == ["created", "intent", "parked"]


def test_a_recorded_value_does_not_get_past_a_mutation_in_doubt(bench: Bench) -> None:
    def agent() -> None:
        with bench.open().open_run(GOAL, RUN) as run:
            with pytest.raises(KeyboardInterrupt):
                run.step("t", {}, raising(KeyboardInterrupt()), effect=Effect.MUTATE)
            run.now()

    with pytest.raises(StepInDoubt):
        agent()
    assert bench.kinds(RUN) == ["created", "intent", "parked"]


# --- plan_recovery ----------------------------------------------------------------------------------------------------

SETTLED = ["failed, followed", "completed", "cancelled", "unstorable"]
FAILED = ["failed", "failed, ambiguous", "failed, unproven", "retry due", "retry due, ambiguous"]
IN_DOUBT = ["in doubt", "asked once", "asked twice", "said to be absent"]
NOW = 1_800_000_000.0
REFUSED = ConnectionRefusedError("nobody there")
"""A failure that proves that nothing has happened: whatever the effect, a rerun dispatches again."""


def a_step(
    tmp_path: Path, effect: Effect | None, state: str, attempts: int, undeclared: str = "dispatch"
) -> StepHistory:
    """A step as a real log tells it."""
    with Bench("memory", tmp_path) as bench:
        options: dict[str, Any] = {"effect": effect, "version": "1"}
        with told(UndeclaredEffectWarning):
            for _ in range(attempts - 1):
                with pytest.raises(StepFailed):
                    program(bench).execute_step(RUN, "t", {}, raising(REFUSED), **options)
            come_to(state, bench, program(bench, undeclared=undeclared), options, attempts)
        step = History.read(RUN, b"", bench.rows(RUN)).positions["1"]
    assert step.attempts == attempts
    return step


def come_to(state: str, bench: Bench, ledger: AgentRunLedger, options: dict[str, Any], attempts: int) -> None:
    """The last attempt of a step, and what became of it."""

    def fail(error: Exception, **further: Any) -> None:
        with pytest.raises(StepFailed):
            ledger.execute_step(RUN, "t", {}, raising(error), **options, **further)

    match state:
        case "in doubt":
            die_in(ledger, **options)
        case "asked once" | "asked twice":
            die_in(ledger, **options)
            for _ in range(1 if state == "asked once" else 2):
                asking = options | {"effect": Effect.MUTATE, "receipt": raising_receipt(Died())}
                with pytest.raises(Died):
                    program(bench).execute_step(RUN, "t", {}, never, **asking)
        case "said to be absent":
            die_in(ledger, **options)
            bench.owners_die()
            bench.open().resolve(RUN, 1, executed=False, by="an operator")
        case "completed":
            ledger.execute_step(RUN, "t", {}, lambda: 1, **options)
        case "unstorable":
            with pytest.raises(UnserialisableOutput):
                ledger.execute_step(RUN, "t", {}, object, **options)
        case "retry due" | "retry due, ambiguous":
            bench.clock.sleep = stop_with(Died)  # type: ignore[method-assign]
            options |= {"retry": RetryPolicy(max_attempts=attempts + 1, base=50.0)}
            error = ValueError("no") if state == "retry due" else TimeoutError("slow")
            with pytest.raises(Died):
                ledger.execute_step(RUN, "t", {}, raising(error), **options)
        case "cancelled":
            with pytest.raises(KeyboardInterrupt):
                ledger.execute_step(RUN, "t", {}, raising(KeyboardInterrupt()), effect=Effect.READ, version="1")
            ledger.execute_step(RUN, "next", {}, lambda: 1)
        case "failed, ambiguous":
            fail(TimeoutError("slow"))
        case "failed, unproven":
            fail(ValueError("no"))
        case "failed, followed":
            fail(REFUSED)
            ledger.execute_step(RUN, "next", {}, lambda: 1)
        case _:
            fail(REFUSED)


def raising_receipt(error: BaseException) -> Callable[[str, dict[str, Any]], Receipt]:
    """A question that ends like this."""

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        raise error

    return receipt


def expected(
    state: str, effect: Effect | None, used: int, declared: Declaration, receipt: Receipt | None, age: float
) -> str | None:
    """DESIGN's table, word for word."""
    if state in SETTLED:
        return None
    again = "dispatch" if used < declared.max_attempts else "dead_letter"
    if state in ("failed", "retry due"):
        return again
    unanswered = {"asked once": 1, "asked twice": 2}.get(state, 0)
    if state == "said to be absent" or effect is Effect.READ:
        return again
    if effect is None and not declared.blocks_undeclared:
        return "dispatch_undeclared" if again == "dispatch" and state not in FAILED else again
    if effect is Effect.IDEMPOTENT and (declared.key_window is None or age <= declared.key_window):
        return again
    if effect is None or not declared.has_receipt:
        return "park"
    if receipt is None:
        return "ask" if unanswered < declared.max_attempts else "park"
    return {"found": "record", "absent": again, "unknown": "wait"}[receipt.verdict]


def can_be(state: str, effect: Effect | None, undeclared: str) -> bool:
    """Whether a log can tell this: what must not be repeated is parked where its error is ambiguous, and is no failure then."""
    must_not = effect is Effect.MUTATE or (effect is None and undeclared == "block")
    if state == "cancelled":
        return effect is Effect.READ
    if state.endswith("ambiguous"):
        return not must_not
    return must_not if state == "failed, unproven" else True


KINDS_OF_STEPS = [
    (state, effect, undeclared)
    for state in [*IN_DOUBT, *FAILED, *SETTLED]
    for effect, undeclared in [(None, "dispatch"), (None, "block"), *((effect, "dispatch") for effect in Effect)]
    if can_be(state, effect, undeclared)
]


@pytest.mark.parametrize(("state", "recorded", "undeclared"), KINDS_OF_STEPS)
def test_plan_recovery_is_the_designs_table(
    tmp_path: Path, state: str, recorded: Effect | None, undeclared: str
) -> None:
    receipts = [None, Receipt.found(1), Receipt.absent(), Receipt.unknown("down")]
    for attempts in (1, 2):
        step = a_step(tmp_path, recorded, state, attempts, undeclared)
        assert step.unanswered == {"asked once": 1, "asked twice": 2}.get(state, 0)
        for declared_effect, limit, has_receipt, window, blocks, changed in itertools.product(
            [None, *Effect], [1, 2, 3], [False, True], [None, 10.0], [False, True], [False, True]
        ):
            declared = Declaration(
                effect=declared_effect,
                max_attempts=limit,
                has_receipt=has_receipt,
                key_window=window,
                blocks_undeclared=blocks,
                environment="another" if changed else step.environment,
            )
            used = 0 if changed or state == "said to be absent" else attempts
            for receipt, age in itertools.product(receipts, [10.0, 10.5]):
                given = {step.position: receipt} if receipt else {}
                actions = plan_recovery([step], {"t": declared}, given, step.created_at + age)
                wanted = expected(state, declared_effect or recorded, used, declared, receipt, age)
                assert [action.kind for action in actions] == ([] if wanted is None else [wanted])
                for action in actions:
                    assert action.position == "1"
                    assert action.reason
                    due = step.outcome.retry_at if step.outcome else None
                    assert action.not_before == (due if wanted == "dispatch" else None)


def test_plan_recovery_takes_steps_in_log_order_and_tools_that_declare_nothing(tmp_path: Path) -> None:
    steps = [a_step(tmp_path, None, state, 1) for state in ("in doubt", "completed", "failed")]
    assert [action.kind for action in plan_recovery(steps, {}, {}, NOW)] == ["dispatch_undeclared", "dispatch"]
