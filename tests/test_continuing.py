"""Continuing a step: an equal call after one that may have taken effect is sent with the same key, so that nothing happens twice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    BudgetExceededException,
    Effect,
    Receipt,
    RetryPolicy,
    RunawayLoopException,
    StepCancelled,
    StepFailed,
    StepInDoubt,
    current_run,
    current_step,
)
from agent_run_ledger.testing import MemoryStore
from support.ledgers import RUN, Bench, Died, never, program

pytestmark = pytest.mark.filterwarnings("ignore::agent_run_ledger.UndeclaredEffectWarning")

SLOW = TimeoutError("no answer in time")
NOT_READ = [Effect.IDEMPOTENT, None]
PATIENT: dict[str, Any] = {"loop_threshold": 100}


class Receiver:
    """The outside world: notes each request, and answers `answers` in turn, the last for ever; exceptions are raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, str, int, int]] = []
        """Key, position, attempt and amount of each."""

    def __call__(self, amount: int) -> Any:
        step = current_step()
        self.seen.append((step.idempotency_key, step.position, step.attempt, amount))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def keys(self) -> set[str]:
        return {key for key, _, _, _ in self.seen}

    @property
    def places(self) -> list[tuple[str, int]]:
        """Position and attempt of each."""
        return [(position, attempt) for _, position, attempt, _ in self.seen]


def pay(ledger: AgentRunLedger, function: Callable[..., Any], amount: int = 7, **options: Any) -> Any:
    return ledger.execute_step(RUN, "pay", {"amount": amount}, function, **options)


def fail(ledger: AgentRunLedger, receiver: Receiver, times: int = 1, **options: Any) -> None:
    for _ in range(times):
        with pytest.raises(StepFailed, match="no answer in time"):
            pay(ledger, receiver, **options)


def intents(bench: Bench) -> list[dict[str, Any]]:
    return [json.loads(row.body) for row in bench.rows(RUN) if row.kind == "intent"]


# --- what a continuing call is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_second_try_is_a_call_of_its_own_with_the_same_key_and_bytes_and_the_next_attempt(
    bench: Bench, effect: Effect | None
) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver, effect=effect)
    assert pay(ledger, receiver, effect=effect) == "paid"
    assert len(receiver.keys) == 1
    assert receiver.places == [("1", 1), ("2", 2)]
    first, second = intents(bench)
    assert "continues" not in first
    assert second["continues"] == "1"
    assert (first["step"], second["step"]) == (1, 2)
    assert first["key"] == second["key"]
    assert [row.payload for row in bench.rows(RUN) if row.kind == "intent"] == [b'{"amount":7}'] * 2
    assert [(step.step_number, step.position, step.state, step.attempts) for step in ledger.steps(RUN)] == [
        (1, "1", "FAILED", 1),
        (2, "2", "COMPLETED", 2),
    ]
    assert ledger.verify().ok


def test_a_replay_tells_the_same_and_sends_nothing(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver)
    pay(ledger, receiver)
    ledger = program(bench)
    with pytest.raises(StepFailed, match="no answer in time"):
        pay(ledger, never)
    assert pay(ledger, never) == "paid"


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError("reset"), type("HTTPError", (Exception,), {"status_code": 504})("gateway timeout")],
    ids=["a lost connection", "a gateway's word"],
)
def test_any_ambiguous_failure_is_continued(bench: Bench, error: Exception) -> None:
    receiver, ledger = Receiver(error, "paid"), program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, receiver)
    assert pay(ledger, receiver) == "paid"
    assert len(receiver.keys) == 1


@pytest.mark.parametrize("error", [ValueError("no"), ConnectionRefusedError("nobody there")])
def test_a_plain_failure_is_not_and_the_next_call_has_a_key_of_its_own(bench: Bench, error: Exception) -> None:
    receiver, ledger = Receiver(error, "paid"), program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, receiver)
    assert pay(ledger, receiver) == "paid"
    assert len(receiver.keys) == 2
    assert receiver.places == [("1", 1), ("2", 1)]


def test_what_only_reads_continues_nothing(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "read"), program(bench)
    fail(ledger, receiver, effect=Effect.READ)
    assert pay(ledger, receiver, effect=Effect.READ) == "read"
    assert len(receiver.keys) == 2
    assert receiver.places == [("1", 1), ("2", 1)]


def test_a_call_that_only_reads_now_continues_nothing_whatever_was_declared_before(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "read"), program(bench)
    fail(ledger, receiver, effect=Effect.IDEMPOTENT)
    assert pay(ledger, receiver, effect=Effect.READ) == "read"
    assert len(receiver.keys) == 2


def test_other_tools_and_other_arguments_continue_nothing(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver)
    pay(ledger, receiver, amount=8)
    ledger.execute_step(RUN, "give", {"amount": 7}, receiver)
    assert len(receiver.keys) == 3
    assert pay(ledger, receiver) == "paid", "other calls in between do not matter"
    assert len(receiver.keys) == 3
    assert receiver.places == [("1", 1), ("2", 1), ("3", 1), ("4", 2)]


def test_a_failure_is_continued_once_and_after_success_an_equal_call_is_a_new_one(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver)
    for _ in range(2):
        pay(ledger, receiver)
    assert len(receiver.keys) == 2
    assert receiver.places == [("1", 1), ("2", 2), ("3", 1)]


def test_calls_continue_each_other_in_a_chain(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, SLOW, "paid"), program(bench)
    fail(ledger, receiver, 2)
    assert pay(ledger, receiver) == "paid"
    assert len(receiver.keys) == 1
    assert receiver.places == [("1", 1), ("2", 2), ("3", 3)]
    assert [intent.get("continues") for intent in intents(bench)] == [None, "1", "2"]
    assert ledger.verify().ok


# --- what it counts for -----------------------------------------------------------------------------------------------


def test_it_counts_for_the_budget_of_steps(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW), program(bench, max_steps=2)
    fail(ledger, receiver, 2)
    with pytest.raises(BudgetExceededException):
        pay(ledger, never)
    assert ledger.get_run(RUN).total_steps == 2


def test_it_is_a_call_of_its_own_for_the_breaker(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW), program(bench, loop_threshold=3)
    fail(ledger, receiver, 3)
    with pytest.raises(RunawayLoopException):
        pay(ledger, never)
    assert ledger.get_run(RUN).status == "DEAD_LETTER"


@pytest.mark.parametrize("effect", NOT_READ)
def test_it_draws_on_the_attempts_of_the_step_that_it_continues(bench: Bench, effect: Effect | None) -> None:
    receiver, ledger = Receiver(SLOW), program(bench, **PATIENT)
    fail(ledger, receiver, 4, effect=effect)
    assert [intent["left"] for intent in intents(bench)] == [3, 2, 1, 0]
    with pytest.raises(AttemptsExhausted, match="dispatched 4 times"):
        pay(ledger, receiver, effect=effect)
    assert len(receiver.seen) == 4
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    assert ledger.verify().ok


def test_retries_and_second_tries_share_their_attempts(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW), program(bench, **PATIENT)
    options: dict[str, Any] = {"effect": Effect.IDEMPOTENT, "retry": RetryPolicy(max_attempts=2, base=0.0)}
    fail(ledger, receiver, **options)
    assert len(receiver.seen) == 2
    with pytest.raises(AttemptsExhausted):
        pay(ledger, receiver, **options)
    assert len(receiver.keys) == 1


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_crash_lets_a_program_repeat_what_fails_as_often_as_it_would_have(
    bench: Bench, effect: Effect | None
) -> None:
    """The first attempt stays in doubt, so all have its key; but each of the others has failed, and its program knows."""
    receiver = Receiver(Died(), ValueError("no answer in time: never"))
    with pytest.raises(Died):
        pay(program(bench, **PATIENT), receiver, effect=effect)
    fail(ledger := program(bench, **PATIENT), receiver, 9, effect=effect)
    assert [intent["left"] for intent in intents(bench)] == [3, 2, *[3] * 8]
    assert len(receiver.keys) == 1
    assert ledger.verify().ok


def test_changed_code_has_attempts_of_its_own_and_the_same_key(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW), program(bench, **PATIENT)
    fail(ledger, receiver, 4, version="1")
    fail(ledger, receiver, version="2")
    assert len(receiver.keys) == 1
    assert receiver.places[-1] == ("5", 5)
    assert intents(bench)[-1]["left"] == 3


# --- processes, branches, keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_crash_in_it_is_followed_by_its_next_attempt_in_the_next_process(bench: Bench, effect: Effect | None) -> None:
    receiver = Receiver(SLOW, Died(), "paid")
    ledger = program(bench)
    fail(ledger, receiver, effect=effect)
    with pytest.raises(Died):
        pay(ledger, receiver, effect=effect)
    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, never, effect=effect)
    assert pay(ledger, receiver, effect=effect) == "paid"
    assert len(receiver.keys) == 1
    assert receiver.places == [("1", 1), ("2", 2), ("2", 3)]
    assert ledger.verify().ok


def test_the_failure_of_a_former_process_is_continued(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver)
    ledger.execute_step(RUN, "next", {}, lambda: 2)
    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, never)
    ledger.execute_step(RUN, "next", {}, never)
    assert pay(ledger, receiver) == "paid"
    assert receiver.places == [("1", 1), ("3", 2)]
    assert len(receiver.keys) == 1


def test_whoever_resumed_the_run_continues_the_failure_that_he_was_handed(bench: Bench) -> None:
    receiver = Receiver(SLOW, "paid")
    fail(program(bench), receiver)
    bench.owners_die()
    ledger = bench.open()
    assert [record.state for record in ledger.resume_run(RUN)] == ["FAILED"]
    assert pay(ledger, receiver) == "paid"
    assert receiver.places == [("1", 1), ("2", 2)]
    assert len(receiver.keys) == 1


def test_a_call_in_another_branch_continues_it_too(bench: Bench) -> None:
    receiver, arguments = Receiver(SLOW, "paid"), {"amount": 7}
    with bench.open().open_run("go on", RUN) as run:
        with run.branch("left"), pytest.raises(StepFailed):
            run.step("pay", arguments, receiver)
        with run.branch("right"):
            assert run.step("pay", arguments, receiver) == "paid"
    assert receiver.places == [("@left.1", 1), ("@right.1", 2)]
    assert len(receiver.keys) == 1
    assert bench.open().verify().ok


def test_calls_with_keys_of_their_own_continue_it_too(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, "paid"), program(bench)
    fail(ledger, receiver, step_key="call_1")
    assert pay(ledger, receiver, step_key="call_2") == "paid"
    assert receiver.places == [("#call_1", 1), ("#call_2", 2)]
    assert len(receiver.keys) == 1


def test_the_same_key_again_gets_the_failure_that_its_program_was_told(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, never), program(bench)
    fail(ledger, receiver, step_key="call_1")
    fail(ledger, receiver, step_key="call_1")
    assert len(receiver.seen) == 1


# --- what was interrupted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", NOT_READ)
def test_a_call_after_an_interrupted_one_continues_it(bench: Bench, effect: Effect | None) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), "paid"), program(bench)
    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver, effect=effect)
    assert pay(ledger, receiver, effect=effect) == "paid"
    assert receiver.places == [("1", 1), ("2", 2)]
    assert len(receiver.keys) == 1
    ledger = program(bench)
    with pytest.raises(StepCancelled):
        pay(ledger, never, effect=effect)
    assert pay(ledger, never, effect=effect) == "paid"
    assert ledger.verify().ok


def test_one_that_stands_behind_other_calls_continues_it_as_well(bench: Bench) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), "paid"), program(bench)
    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver)
    ledger.execute_step(RUN, "next", {}, lambda: 2)
    assert pay(ledger, receiver) == "paid"
    assert receiver.places == [("1", 1), ("3", 2)]
    assert len(receiver.keys) == 1


def test_a_mutation_nobody_can_be_asked_about_is_not_continued_but_in_doubt(bench: Bench) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), never), program(bench)
    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver, effect=Effect.MUTATE)
    for _ in range(3):
        with pytest.raises(StepInDoubt):
            pay(ledger, receiver, effect=Effect.MUTATE)
    assert len(receiver.seen) == 1


@pytest.mark.parametrize(
    ("says", "output", "places"),
    [
        (Receipt.found("found"), "found", [("1", 1)]),
        (Receipt.absent(), "paid", [("1", 1), ("2", 2)]),
    ],
)
def test_a_mutation_is_asked_about_before_a_second_try_is_sent(
    bench: Bench, says: Receipt, output: str, places: list[tuple[str, int]]
) -> None:
    receiver, ledger, asked = Receiver(KeyboardInterrupt(), "paid"), program(bench), []

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        asked.append((key, arguments))
        return says

    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver, receipt=receipt)
    assert pay(ledger, receiver, receipt=receipt) == output
    assert receiver.places == places
    assert asked == [(receiver.seen[0][0], {"amount": 7})]
    assert len(receiver.keys) == 1
    ledger = program(bench)
    with pytest.raises(StepCancelled):
        pay(ledger, never, receipt=never)
    assert pay(ledger, never, receipt=never) == output
    assert ledger.verify().ok


def test_a_second_try_of_which_the_receiver_cannot_say_parks_and_is_asked_about_anew(bench: Bench) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), never), program(bench)
    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver, receipt=never)
    with pytest.raises(StepInDoubt, match="could not say"):
        pay(ledger, receiver, receipt=lambda key, arguments: Receipt.unknown("down"))
    ledger = program(bench)
    with pytest.raises(StepCancelled):
        pay(ledger, never, receipt=never)
    assert pay(ledger, never, receipt=lambda key, arguments: Receipt.found("found")) == "found"
    assert len(receiver.seen) == 1
    assert ledger.verify().ok


def test_a_second_try_that_is_interrupted_in_its_question_is_continued_by_the_third(bench: Bench) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), never), program(bench)
    answers: list[Any] = [KeyboardInterrupt(), KeyboardInterrupt(), Receipt.found("found")]

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Receipt)
        return answer

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            pay(ledger, receiver, receipt=receipt)
    assert pay(ledger, receiver, receipt=receipt) == "found"
    assert len(receiver.seen) == 1
    assert {intent["key"] for intent in intents(bench)} == receiver.keys
    assert ledger.verify().ok


def test_a_process_that_dies_in_the_question_of_a_second_try_is_followed_by_one_that_asks_again(bench: Bench) -> None:
    receiver, ledger = Receiver(KeyboardInterrupt(), never), program(bench)

    def dies(key: str, arguments: dict[str, Any]) -> Receipt:
        raise Died

    with pytest.raises(KeyboardInterrupt):
        pay(ledger, receiver, receipt=dies)
    with pytest.raises(Died):
        pay(ledger, receiver, receipt=dies)
    ledger = program(bench)
    with pytest.raises(StepCancelled):
        pay(ledger, never, receipt=never)
    assert pay(ledger, never, receipt=lambda key, arguments: Receipt.found("found")) == "found"
    assert len(receiver.seen) == 1


def test_past_the_window_of_its_key_a_second_try_is_not_sent(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, never), program(bench)
    options: dict[str, Any] = {"effect": Effect.IDEMPOTENT, "key_window": 20.0}
    fail(ledger, receiver, **options)
    bench.clock.advance(20.5)
    with pytest.raises(StepInDoubt, match="forgotten its idempotency key"):
        pay(ledger, receiver, **options)
    assert len(receiver.seen) == 1
    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, never, **options)
    found = lambda key, arguments: Receipt.found("found")  # noqa: E731
    assert pay(ledger, never, receipt=found, **options) == "found"


def test_the_window_of_a_key_counts_from_its_first_dispatch_through_all_that_continue_it(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, SLOW, never), program(bench)
    options: dict[str, Any] = {"effect": Effect.IDEMPOTENT, "key_window": 20.0}
    fail(ledger, receiver, **options)
    bench.clock.advance(15.0)
    fail(ledger, receiver, **options)
    bench.clock.advance(15.0)
    with pytest.raises(StepInDoubt, match="forgotten its idempotency key"):
        pay(ledger, receiver, **options)
    assert len(receiver.seen) == 2


def test_undeclared_calls_that_block_are_in_doubt_and_not_continued(bench: Bench) -> None:
    receiver, ledger = Receiver(SLOW, never), program(bench, undeclared="block")
    for _ in range(2):
        with pytest.raises(StepInDoubt):
            pay(ledger, receiver)
    assert len(receiver.seen) == 1


# --- event loops ------------------------------------------------------------------------------------------------------


class Slow:
    """An async receiver whose first call never ends; it is cancelled by whoever waited for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    async def __call__(self, amount: int) -> str:
        step = current_step()
        self.seen.append((step.idempotency_key, step.position, step.attempt))
        if len(self.seen) == 1:
            await asyncio.Event().wait()
        return f"paid {amount}"


def in_time(ledger: AgentRunLedger, slow: Slow, **options: Any) -> Any:
    """An async agent that gives up its first call after a moment, and makes it again."""

    @ledger.tool(name="pay", **options)
    async def pay(amount: int) -> str:
        return await slow(amount)

    @ledger.agent()
    async def agent() -> Any:
        try:
            return await asyncio.wait_for(pay(7), 0.02)
        except (TimeoutError, StepCancelled):
            return await pay(7)

    return asyncio.run(ledger.arun(agent, run_id=RUN))


@pytest.mark.parametrize("effect", NOT_READ)
def test_an_async_call_after_one_that_was_given_up_continues_it(bench: Bench, effect: Effect | None) -> None:
    slow = Slow()
    assert in_time(bench.open(), slow, effect=effect) == "paid 7"
    assert [(position, attempt) for _, position, attempt in slow.seen] == [("1", 1), ("2", 2)]
    assert len({key for key, _, _ in slow.seen}) == 1
    assert bench.open().verify().ok


def test_an_async_mutation_that_was_given_up_is_asked_about_first(bench: Bench) -> None:
    slow, asked = Slow(), []

    async def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        asked.append(key)
        return Receipt.found("found")

    assert in_time(bench.open(), slow, receipt=receipt) == "found"
    assert len(slow.seen) == 1
    assert asked == [slow.seen[0][0]]


def test_an_async_mutation_nobody_can_be_asked_about_is_in_doubt(bench: Bench) -> None:
    slow = Slow()
    with pytest.raises(StepInDoubt):
        in_time(bench.open(), slow, effect=Effect.MUTATE)
    assert len(slow.seen) == 1


def test_of_two_equal_calls_side_by_side_one_continues_and_the_other_is_new(bench: Bench) -> None:
    """One failure is continued by one call: two calls side by side are two payments, whatever failed before."""
    receiver, ledger = Receiver(SLOW, "paid"), bench.open()

    @ledger.tool(effect=Effect.IDEMPOTENT)
    async def pay(amount: int) -> Any:
        return receiver(amount)

    @ledger.agent()
    async def agent() -> Any:
        with pytest.raises(StepFailed):
            await pay(7)
        return await current_run().gather(lambda: pay(7), lambda: pay(7))

    assert asyncio.run(ledger.arun(agent, run_id=RUN)) == ["paid", "paid"]
    assert sorted(attempt for _, attempt in receiver.places) == [1, 1, 2]
    assert len(receiver.keys) == 2
    assert bench.open().verify().ok


# --- threads that go on -----------------------------------------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


class Held:
    """A receiver whose first call waits at the gate, in a thread that outlives its time."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.seen: list[tuple[str, str, int]] = []

    def __call__(self, amount: int) -> str:
        step = current_step()
        self.seen.append((step.idempotency_key, step.position, step.attempt))
        if len(self.seen) == 1:
            assert self.gate.wait(60)
        return f"call {len(self.seen)}"


@pytest.fixture
def real() -> Iterator[AgentRunLedger]:
    """A ledger by the machine's own clock: threads take real time."""
    with AgentRunLedger(MemoryStore(), durability="process") as ledger:
        ledger.create_run("go on", RUN)
        yield ledger


ASKED: list[dict[str, Any]] = [{"receipt": lambda key, arguments: Receipt.absent()}]


@pytest.mark.parametrize("options", [{"effect": Effect.IDEMPOTENT}, {}, *ASKED], ids=["IDEMPOTENT", "none", "receipt"])
def test_while_the_thread_of_a_call_runs_no_second_try_is_sent_and_what_it_returns_is_the_outcome(
    real: AgentRunLedger, gate: threading.Event, options: dict[str, Any]
) -> None:
    held = Held(gate)
    for _ in range(3):  # each waits within its own time, for the first one's thread
        with pytest.raises((StepFailed, StepInDoubt)):
            pay(real, held, timeout=0.05, **options)
    assert len(held.seen) == 1
    gate.set()
    assert pay(real, held, timeout=60.0, **options) == "call 1"
    assert len(held.seen) == 1
    assert [step.position for step in real.steps(RUN)] == ["1", "2", "3", "4"]
    assert len({step.idempotency_key for step in real.steps(RUN)}) == 1
    assert real.verify().ok


@pytest.mark.parametrize("options", [{"effect": Effect.IDEMPOTENT}, {}, *ASKED], ids=["IDEMPOTENT", "none", "receipt"])
def test_a_program_that_begins_again_beside_its_own_thread_sends_nothing_either(
    real: AgentRunLedger, gate: threading.Event, options: dict[str, Any]
) -> None:
    held = Held(gate)

    def start(timeout: float) -> Any:
        with real.open_run("go on", RUN) as run:
            try:
                return run.step("pay", {"amount": 7}, held, timeout=timeout, **options)
            except StepFailed:
                return run.step("pay", {"amount": 7}, held, timeout=timeout, **options)

    for _ in range(3):
        with pytest.raises((StepFailed, StepInDoubt)):
            start(0.05)
    assert len(held.seen) == 1
    gate.set()
    assert start(60.0) == "call 1"
    assert len(held.seen) == 1
    assert real.verify().ok


def test_a_mutation_whose_thread_runs_on_lets_nothing_else_begin(real: AgentRunLedger, gate: threading.Event) -> None:
    held = Held(gate)
    for _ in range(2):
        with pytest.raises(StepInDoubt):
            pay(real, held, timeout=0.05, receipt=lambda key, arguments: Receipt.absent())
    with pytest.raises(StepInDoubt):
        real.execute_step(RUN, "other", {}, never)


def test_a_thread_that_fails_in_the_end_leaves_the_call_to_the_second_try(
    real: AgentRunLedger, gate: threading.Event
) -> None:
    held = Held(gate)

    def fails_at_first(amount: int) -> str:
        if held(amount) == "call 1":
            raise OSError("late")
        return "second"

    with pytest.raises(StepFailed):
        pay(real, fails_at_first, timeout=0.05, effect=Effect.IDEMPOTENT)
    gate.set()
    assert pay(real, fails_at_first, timeout=60.0, effect=Effect.IDEMPOTENT) == "second"
    assert [(position, attempt) for _, position, attempt in held.seen] == [("1", 1), ("2", 2)]
    assert len({key for key, _, _ in held.seen}) == 1


def test_a_thread_of_a_mutation_that_fails_in_the_end_is_asked_about(
    real: AgentRunLedger, gate: threading.Event
) -> None:
    held, asked = Held(gate), []

    def fails_at_first(amount: int) -> str:
        if held(amount) == "call 1":
            raise OSError("late")
        return "second"

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        asked.append(key)
        return Receipt.absent()

    with pytest.raises(StepInDoubt):
        pay(real, fails_at_first, timeout=0.05, receipt=receipt)
    assert asked == []
    gate.set()
    assert pay(real, fails_at_first, timeout=60.0, receipt=receipt) == "second"
    assert asked == [held.seen[0][0]]
    assert len({key for key, _, _ in held.seen}) == 1
