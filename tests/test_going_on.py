"""A program that goes on after it lost something: its lease, the disk, a thread, an interrupt, its place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    BudgetExceededException,
    Effect,
    IntentDrift,
    InvalidArguments,
    InvalidPipeline,
    LeaseLost,
    LedgerError,
    Reentered,
    RetryPolicy,
    RunClosed,
    RunInputMismatch,
    RunNotFound,
    RunOwned,
    Step,
    StepFailed,
    StepInDoubt,
    StoreFull,
    StoreUnavailable,
    UnserialisableArguments,
    UnserialisableOutput,
)
from support.ledgers import Bench, Died, Tool, never, program, raising

RUN, GOAL = "run", "go on"


def taken_over(bench: Bench, **options: Any) -> tuple[AgentRunLedger, Tool]:
    """A ledger whose step is in flight while another owner takes the run; the step's outcome is refused with `LeaseLost`."""
    mine = bench.open()
    mine.create_run(GOAL, RUN)
    tool = Tool("mine")

    def overtaken() -> object:
        bench.owners_die()
        bench.open().resume_run(RUN)
        return tool()

    with pytest.raises(LeaseLost):
        mine.execute_step(RUN, "pay", {"amount": 7}, overtaken, **options)
    assert tool.calls == 1
    return mine, tool


def test_a_mutation_whose_lease_was_lost_is_not_sent_again_by_a_program_that_calls_again(bench: Bench) -> None:
    mine, _ = taken_over(bench, effect=Effect.MUTATE)
    bench.owners_die()
    for _ in range(2):
        with pytest.raises(StepInDoubt):
            mine.execute_step(RUN, "pay", {"amount": 7}, never, effect=Effect.MUTATE)
    assert mine.get_run(RUN).status == "BLOCKED"
    assert [step.attempts for step in mine.steps(RUN)] == [1]


def test_a_call_made_again_after_a_lost_lease_continues_the_step_with_its_key(bench: Bench) -> None:
    mine, tool = taken_over(bench, effect=Effect.IDEMPOTENT)
    bench.owners_die()
    assert mine.execute_step(RUN, "pay", {"amount": 7}, tool, effect=Effect.IDEMPOTENT) == "mine"
    assert [(step.attempts, step.state) for step in mine.steps(RUN)] == [(2, "COMPLETED")]
    assert len({row.fingerprint for row in bench.rows(RUN) if row.kind == "intent"}) == 1


def test_a_program_that_asks_for_something_else_after_a_lost_lease_is_stopped(bench: Bench) -> None:
    mine, _ = taken_over(bench, effect=Effect.READ)
    bench.owners_die()
    with pytest.raises(IntentDrift):
        mine.execute_step(RUN, "other", {}, never)


def test_a_run_is_never_completed_over_a_step_without_an_outcome(bench: Bench) -> None:
    mine, _ = taken_over(bench, effect=Effect.READ)
    bench.owners_die()
    mine.finish_run(RUN, "done")
    assert [step.state for step in mine.steps(RUN)] == ["FAILED"]
    assert mine.steps(RUN)[0].error_message == "CancelledError: the step was interrupted"
    again = bench.open()
    again.create_run(GOAL, RUN)
    with pytest.raises(StepFailed, match="interrupted"):
        again.execute_step(RUN, "pay", {"amount": 7}, never, effect=Effect.READ)
    assert again.verify(RUN).ok


class FullAtOutcomes:
    """A store whose disk is full for outcomes, as long as `is_full` says so."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, run_id: str, token: int, inbox: int, rows: Any, *, synced: bool) -> bool:
        if self.is_full and any(row.kind == "outcome" for row in rows):
            raise StoreFull("no room")
        return bool(self._store.append(run_id, token, inbox, rows, synced=synced))


def owing(bench: Bench) -> tuple[AgentRunLedger, FullAtOutcomes, Tool]:
    """A ledger that owes an outcome to its store."""
    store = FullAtOutcomes(bench.store())
    ledger = AgentRunLedger(store, clock=bench.clock)  # type: ignore[arg-type]
    ledger.create_run(GOAL, RUN)
    tool = Tool("once")
    with pytest.raises(StoreFull):
        ledger.execute_step(RUN, "pay", {}, tool)
    return ledger, store, tool


def test_a_run_is_not_given_back_while_an_outcome_is_owed_to_it(bench: Bench) -> None:
    ledger, store, tool = owing(bench)
    with pytest.raises(StoreFull):
        ledger.detach(RUN)
    store.is_full = False
    ledger.detach(RUN)
    assert ledger.steps(RUN)[0].state == "COMPLETED"
    assert ledger.execute_step(RUN, "pay", {}, never) == "once"
    assert tool.calls == 1
    ledger.close()


def test_resuming_and_closing_write_what_is_owed(bench: Bench) -> None:
    ledger, store, _ = owing(bench)
    store.is_full = False
    assert [record.state for record in ledger.resume_run(RUN)] == ["COMPLETED"]
    store.is_full = True
    with pytest.raises(StoreFull):
        ledger.execute_step(RUN, "pay", {"n": 2}, lambda: "twice")
    store.is_full = False
    if bench.kind == "sqlite":  # a memory store is gone when it is closed
        ledger.close()
        assert [record.state for record in bench.open().steps(RUN)] == ["COMPLETED", "COMPLETED"]


def test_resuming_stands_behind_a_failure_whose_retry_the_program_gave_up(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    bench.clock.sleep = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "a", {}, raising(ValueError("no")), retry=RetryPolicy(base=10, cap=10))
    del bench.clock.sleep  # type: ignore[method-assign]
    assert ledger.execute_step(RUN, "b", {}, lambda: 1) == 1
    ledger.detach(RUN)
    other = bench.open()
    assert [record.tool_name for record in other.resume_run(RUN)] == ["a", "b"]
    assert other.execute_step(RUN, "c", {}, lambda: 2) == 2


def test_a_request_that_nobody_knows_does_not_cut_a_wait_short(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    bench.store().post(RUN, "of a newer version", b"{}", "somebody", 0.0)
    tool = Tool(ValueError("no"), "yes")
    assert ledger.execute_step(RUN, "t", {}, tool, retry=RetryPolicy(base=4.0, cap=4.0)) == "yes"
    assert ledger.execute_step(RUN, "t2", {}, lambda: 2) == 2
    first, second = (step for step in ledger.steps(RUN))
    assert first.attempts == 2
    assert sum(bench.clock.sleeps) > 0 or bench.rows(RUN)[2].body.count(b'"wait":0.0')
    assert second.state == "COMPLETED"


def test_a_request_between_two_decisions_does_not_move_the_program(bench: Bench) -> None:
    first = bench.open()
    first.create_run(GOAL, RUN)
    assert [first.execute_step(RUN, name, {}, lambda name=name: name) for name in "abc"] == list("abc")
    first.detach(RUN)
    second = bench.open()
    second.create_run(GOAL, RUN)
    cancel = ("cancel", b'{"by":"me","reason":"enough"}', "me", 0.0)
    bench.store().post(RUN, *cancel)
    second._leases.beat()  # the owner hears of the first request, and not of the second
    bench.store().post(RUN, *cancel)
    assert second.execute_step(RUN, "a", {}, never) == "a"
    assert second._run(RUN).root.cursor == 2
    with pytest.raises(RunClosed):
        second.execute_step(RUN, "b", {}, never)


def test_an_exception_does_not_park_a_run_while_another_thread_is_in_a_step_of_it(bench: Bench) -> None:
    ledger = bench.open()
    started, go_on, results = threading.Event(), threading.Event(), []

    def slow() -> str:
        started.set()
        assert go_on.wait(60)
        return "kept"

    threads = []

    def program() -> None:
        with ledger.open_run(GOAL, RUN) as run:
            threads.append(threading.Thread(target=lambda: results.append(run.step("slow", {}, slow))))
            threads[0].start()
            assert started.wait(60)
            raise RuntimeError("the program left")

    with pytest.raises(RuntimeError, match="program") as caught:
        program()
    assert "not parked" in caught.value.__notes__[0]
    go_on.set()
    threads[0].join(60)
    assert results == ["kept"]
    assert ledger.steps(RUN)[0].state == "COMPLETED"


def test_a_pipelines_run_takes_no_steps_of_another_program(bench: Bench) -> None:
    pipeline = bench.pipeline("pp", Step("a", lambda: 1), Step("b", raising(ValueError("no")), ["a"]))
    with pytest.raises(StepFailed):
        pipeline.execute()
    other = bench.open()
    assert len(other.resume_run("pp")) == 2
    with pytest.raises(RunInputMismatch, match="kind of program"):
        other.execute_step("pp", "x", {}, never)
    other.detach("pp")
    with pytest.raises(StepFailed):
        pipeline.execute()


def test_a_ledger_closed_under_a_step_says_so_and_starts_nothing_more(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)

    def closing() -> None:
        ledger.close()

    with pytest.raises(StoreUnavailable, match="closed"):
        ledger.execute_step(RUN, "t", {}, closing)


def test_another_thread_of_the_same_ledger_can_be_waited_for(bench: Bench) -> None:
    ledger = bench.open()
    with ledger.open_run(GOAL, RUN):
        with pytest.raises(RunOwned):
            ledger.resume_run(RUN, wait=1.0)
        assert sum(bench.clock.sleeps) >= 1.0
    assert ledger.resume_run(RUN, wait=1.0) == []


def test_a_program_that_fails_at_its_first_line_for_ever_does_not_write_for_ever(bench: Bench) -> None:
    for number in range(60):
        ledger = bench.open(max_steps=1)
        try:
            with ledger.open_run(GOAL, RUN):
                raise ValueError("the same" if number < 30 else f"another, {number}")
        except ValueError:
            pass
        except RunClosed:
            break
        ledger.close() if bench.kind == "sqlite" else ledger.detach(RUN)
    kinds = bench.kinds(RUN)
    assert len(kinds) <= 21
    assert kinds.count("parked") < 20
    assert bench.open().get_run(RUN).status == "DEAD_LETTER"


def test_recorded_values_end_at_a_limit_that_names_the_limit_that_was_given(bench: Bench) -> None:
    ledger = bench.open(max_steps=1)

    def program() -> None:
        with ledger.open_run(GOAL, RUN) as run:
            while True:
                run.random()

    with pytest.raises(BudgetExceededException, match="20 times its budget of 1 steps"):
        program()


def test_an_output_that_cannot_be_stored_is_recorded_under_the_name_that_is_raised(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    with pytest.raises(UnserialisableOutput) as caught:
        ledger.execute_step(RUN, "t", {}, lambda: {"a": float("nan")})
    assert caught.value.path == "$.a"
    assert (ledger.steps(RUN)[0].error_message or "").startswith("UnserialisableOutput: the output of 't'")


def test_an_interrupt_right_behind_the_intent_leaves_the_run_usable(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    perform = ledger._driver.perform
    done: list[object] = []

    def interrupted(effect: Any) -> Any:
        answer = perform(effect)
        done.append(effect)
        if len(done) == 1:
            raise Died
        return answer

    ledger._driver.perform = interrupted  # type: ignore[method-assign]
    with pytest.raises(Died):
        ledger.execute_step(RUN, "a", {}, never)
    assert ledger.execute_step(RUN, "b", {}, lambda: 2) == 2
    assert [step.state for step in ledger.steps(RUN)] == ["FAILED", "COMPLETED"]
    ledger.finish_run(RUN)


class Timeout(Exception):
    """What a client library that nobody here knows calls its timeouts."""


class Answer(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the server said {status}")
        self.response = type("Response", (), {"status_code": status})()


def wrapped(error: Exception) -> Any:
    """A tool that raises an error of its own for one that it met."""

    def tool() -> None:
        try:
            raise error
        except Exception as met:
            raise RuntimeError("the payment did not work") from met

    return tool


@pytest.mark.parametrize("error", [Timeout(), Answer(503), ConnectionResetError(), TimeoutError()], ids=repr)
@pytest.mark.parametrize("hides", [True, False], ids=["wrapped", "bare"])
def test_a_mutation_that_failed_without_saying_whether_it_took_effect_is_never_sent_again(
    bench: Bench, error: Exception, hides: bool
) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    tool = wrapped(error) if hides else raising(error)
    options: Any = {"effect": Effect.MUTATE, "retry": RetryPolicy(base=0.0)}
    with pytest.raises(StepInDoubt):
        ledger.execute_step(RUN, "pay", {}, tool, **options)
    bench.owners_die()
    again = bench.open()
    again.create_run(GOAL, RUN)
    with pytest.raises(StepInDoubt):
        again.execute_step(RUN, "pay", {}, never, **options)


@pytest.mark.parametrize("error", [Answer(429), ConnectionRefusedError(), ValueError()], ids=repr)
def test_a_mutation_that_surely_took_no_effect_may_be_tried_again(bench: Bench, error: Exception) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    tool = Tool(error, "paid")
    assert ledger.execute_step(RUN, "pay", {}, tool, effect=Effect.MUTATE, retry=RetryPolicy(base=0.0)) == "paid"


def test_a_function_that_can_take_all_arguments_by_name_is_given_them(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)

    def search(query: str = "", limit: int = 5) -> list[Any]:
        return [query, limit]

    assert ledger.execute_step(RUN, "search", {"query": "x", "limit": 50}, search) == ["x", 50]
    assert ledger.execute_step(RUN, "search", {"limit": 7}, search) == ["", 7]
    assert ledger.execute_step(RUN, "bare", {"other": 1}, lambda limit=3: limit) == 3


def test_a_wait_is_never_longer_than_it_was_drawn_whatever_the_wall_clock_does(bench: Bench) -> None:
    sleep = bench.clock.sleep
    retry = RetryPolicy(base=4.0, cap=4.0)

    def die(_seconds: float) -> None:
        raise Died

    bench.clock.sleep = die  # type: ignore[method-assign]
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "t", {}, raising(ValueError("no")), retry=retry)
    slept: list[float] = []

    def counted(seconds: float) -> None:
        slept.append(seconds)
        assert sum(slept) <= 4.0, "it waits for the old time of day to come again"
        sleep(seconds)

    bench.clock.sleep = counted  # type: ignore[method-assign]
    again = program(bench)
    bench.clock._now -= 900_000_000.0  # the wall clock is set back by years while the retry is due
    assert again.execute_step(RUN, "t", {}, lambda: "yes", retry=retry) == "yes"
    assert again.steps(RUN)[0].attempts == 2


def test_a_generator_function_is_refused_before_anything_happens(bench: Bench) -> None:
    def chunks() -> Iterator[int]:
        yield 1

    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    with pytest.raises(InvalidArguments, match="generator function"):
        ledger.execute_step(RUN, "t", {}, chunks)
    with pytest.raises(InvalidPipeline, match="generator function"):
        Step("t", chunks)
    assert bench.kinds(RUN) == ["created"]


def test_a_step_registered_without_parentheses_is_refused(bench: Bench) -> None:
    pipeline = bench.pipeline("pp")
    with pytest.raises(InvalidPipeline, match="parentheses"):
        pipeline.step(lambda: 1)  # type: ignore[arg-type]


def test_a_run_that_cannot_be_finished_is_parked_and_given_back(bench: Bench) -> None:
    def program() -> None:
        with bench.open().open_run(GOAL, RUN) as run:
            run.result = float("nan")

    with pytest.raises(UnserialisableArguments, match="the result cannot be stored"):
        program()
    assert bench.open().get_run(RUN).status == "BLOCKED"
    assert bench.open().resume_run(RUN) == []


def test_detaching_a_run_that_does_not_exist_says_so(bench: Bench) -> None:
    with pytest.raises(RunNotFound):
        bench.open().detach("nobody's")


def test_a_signal_handler_that_calls_the_ledger_inside_of_itself_gets_an_error_and_hangs_nobody(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    seen: list[BaseException] = []
    now = bench.clock.now

    def handler() -> float:
        """What a signal handler does that comes in the middle of a decision, which asks for the time."""
        bench.clock.now = now  # type: ignore[method-assign]
        for call in (
            lambda: ledger.execute_step(RUN, "inner", {}, never),
            lambda: ledger.finish_run(RUN),
            lambda: ledger.cancel(RUN),
        ):
            try:
                call()
            except LedgerError as error:
                seen.append(error)
        return now()

    bench.clock.now = handler  # type: ignore[method-assign]
    assert ledger.execute_step(RUN, "outer", {}, lambda: 1) == 1
    assert [type(error) for error in seen] == [Reentered, Reentered, Reentered]
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]
