"""One step, live and at replay: what its function gets, what its caller gets, and when it is refused."""

from __future__ import annotations

import datetime as dt
import enum
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic
import pytest

import agent_run_ledger
from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    IllegalTransition,
    InvalidArguments,
    InvalidName,
    LoopDetectorPolicy,
    NotDurableWarning,
    PlainDataWarning,
    RetryPolicy,
    RunawayLoopDetectedException,
    RunawayLoopException,
    RunClosed,
    RunInputMismatch,
    RunNotFound,
    RunOwned,
    StepFailed,
    UnorderedStep,
    UnserialisableArguments,
    UnserialisableOutput,
    current_step,
)
from support.ledgers import GOAL, RUN, Bench, Died, Tool, never, program, raising, told

# --- first value = replayed value -------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


class Invoice(pydantic.BaseModel):
    number: int
    due: dt.date
    total: Decimal


VALUES: list[Any] = [
    None, True, 0, -1, 2**200, 0.1, -0.0, 1e300, "", "ä\U0001f600\x00", [], {}, [1, [2, {"a": None}]],
    (1, 2), (), [(1,), (2,)], {1, 2}, frozenset({"a"}), b"\x00\xff", {1: "a", (2, 3): "b"}, {"$": 1}, {"$tuple": [1]},
    dt.datetime(2026, 10, 1, 12, 30, 0, 5, tzinfo=dt.UTC), dt.datetime(2026, 10, 1), dt.date(2026, 10, 1),  # noqa: DTZ001
    dt.time(1, 2, 3), dt.timedelta(days=-1, microseconds=7), Decimal("1.10"), Decimal("-0"), uuid.UUID(int=7),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_first_value_is_the_replayed_value_and_of_the_same_type(bench: Bench, value: Any) -> None:
    first = program(bench).execute_step(RUN, "t", {}, lambda: value)
    replayed = program(bench).execute_step(RUN, "t", {}, never)
    assert repr(first) == repr(replayed) == repr(value)
    assert type(first) is type(replayed) is type(value)


def test_the_order_of_keys_is_the_same_the_first_time_and_at_replay(bench: Bench) -> None:
    first = program(bench).execute_step(RUN, "t", {}, lambda: {"b": 1, "a": {"d": 1, "c": 2}})
    replayed = program(bench).execute_step(RUN, "t", {}, never)
    assert repr(first) == repr(replayed)


def test_a_caller_who_changes_what_he_got_changes_nothing_but_his_own(bench: Bench) -> None:
    kept: dict[str, list[int]] = {"list": [1]}
    ledger = program(bench)
    first = ledger.execute_step(RUN, "t", {}, lambda: kept)
    first["list"].append(2)
    assert kept == {"list": [1]}
    assert program(bench).execute_step(RUN, "t", {}, never) == {"list": [1]}


def test_a_function_that_changes_its_arguments_changes_nothing_that_is_recorded(bench: Bench) -> None:
    given = {"items": [3, 1, 2]}

    def tool(items: list[int]) -> int:
        items.sort()
        return items[0]

    ledger = program(bench)
    assert ledger.execute_step(RUN, "t", given, tool) == 1
    assert given == {"items": [3, 1, 2]}
    assert ledger.steps(RUN)[0].arguments_json == '{"items":[3,1,2]}'


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (Money(Decimal("1.10")), Money),
        ([Money(Decimal(1)), Money(Decimal(2), "USD")], list[Money]),
        ({"a": Money(Decimal(1))}, dict[str, Money]),
        (Colour.RED, Colour),
        (Invoice(number=7, due=dt.date(2026, 10, 1), total=Decimal("9.90")), Invoice),
        (None, Money | None),
    ],
    ids=repr,
)
def test_a_declared_class_is_what_the_caller_gets_both_times(bench: Bench, value: Any, returns: Any) -> None:
    first = program(bench).execute_step(RUN, "t", {}, lambda: value, returns=returns)
    replayed = program(bench).execute_step(RUN, "t", {}, never, returns=returns)
    assert first == replayed == value
    assert type(first) is type(replayed) is type(value)


def test_an_undeclared_class_is_plain_data_both_times_and_one_warning_names_returns(bench: Bench) -> None:
    local: Any = make_dataclass(f"Local_{bench.kind}", [("amount", int)])  # a class is warned of once
    with told(PlainDataWarning) as warnings:
        first = program(bench).execute_step(RUN, "t", {}, lambda: local(1))
        replayed = program(bench).execute_step(RUN, "t", {}, never)
    assert first == replayed == {"amount": 1}
    assert len(warnings) == 1
    assert "returns=" in warnings[0]


def test_typed_parameters_are_rebuilt_live_and_when_the_step_is_dispatched_again(bench: Bench) -> None:
    got: list[Any] = []

    def tool(money: Money, colour: Colour, invoice: Invoice) -> None:
        got.append((money, colour, invoice))
        if len(got) == 1:
            raise Died

    given = {
        "money": Money(Decimal(1)),
        "colour": Colour.RED,
        "invoice": Invoice(number=7, due=dt.date(2026, 10, 1), total=Decimal(9)),
    }
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "t", given, tool, effect=Effect.READ)
    program(bench).execute_step(RUN, "t", given, tool, effect=Effect.READ)
    assert got == [tuple(given.values())] * 2


# --- what the function is called with ---------------------------------------------------------------------------------


def test_a_function_with_required_parameters_gets_the_stored_arguments_and_a_bare_one_gets_none(bench: Bench) -> None:
    ledger = program(bench)
    assert ledger.execute_step(RUN, "t", {"a": 1, "b": (2,)}, lambda a, b: [a, b]) == [1, (2,)]
    assert ledger.execute_step(RUN, "t", {"a": 1}, lambda: "bare") == "bare"
    assert ledger.execute_step(RUN, "t", {"a": 2}, lambda a=5: a) == 2, "it can take everything by name"
    assert ledger.execute_step(RUN, "t", {"a": 2, "b": 3}, lambda a=5: a) == 5, (
        "it cannot take everything, and needs nothing"
    )
    assert ledger.execute_step(RUN, "t", {"a": 1, "b": 2}, lambda a, **rest: [a, rest]) == [1, {"b": 2}]


def test_the_function_knows_the_step_it_runs_in(bench: Bench) -> None:
    seen = []

    def tool() -> None:
        step = current_step()
        step.heartbeat()
        seen.append((step.run_id, step.step_number, step.position, step.tool_name, step.attempt, step.fencing_token))
        seen.append(step.idempotency_key)

    ledger = program(bench)
    ledger.execute_step(RUN, "first", {}, lambda: 1)
    ledger.execute_step(RUN, "t", {}, tool)
    record = ledger.steps(RUN)[1]
    assert seen == [(RUN, 2, "2", "t", 1, record.fencing_token), record.idempotency_key]


def test_outside_of_a_step_there_is_no_current_step(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    with pytest.raises(RuntimeError, match="outside of a step"):
        current_step()


def test_equal_calls_at_two_positions_have_two_keys(bench: Bench) -> None:
    ledger = program(bench)
    keys = {ledger.execute_step(RUN, "t", {}, lambda: current_step().idempotency_key) for _ in range(3)}
    assert len(keys) == 3


def test_an_async_function_is_an_error_that_names_aexecute_step(bench: Bench) -> None:
    async def tool() -> None: ...

    ledger = program(bench)
    with pytest.raises(InvalidArguments, match="aexecute_step"):
        ledger.execute_step(RUN, "t", {}, tool)
    with pytest.raises(StepFailed, match="awaitable"):
        ledger.execute_step(RUN, "t", {}, lambda: tool())
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]


# --- outputs that cannot be stored ------------------------------------------------------------------------------------


class Hostile:
    """Answers every question about itself with an error."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)


class Angry(pydantic.BaseModel):
    """A model that cannot be read when it is asked for its data."""

    def model_dump(self, *_: Any, **__: Any) -> Any:
        raise OSError("disk")

    def __getattribute__(self, name: str) -> Any:
        raise OSError(name)


@pytest.mark.parametrize(
    "value", [object(), float("nan"), {"a": [1, "\ud800"]}, lambda: 1, Hostile(), iter([]), threading.Lock()],
    ids=["object", "nan", "surrogate", "function", "hostile", "iterator", "lock"],
)  # fmt: skip
def test_an_output_that_cannot_be_stored_is_recorded_as_executed_and_not_run_again(bench: Bench, value: Any) -> None:
    tool = Tool()
    tool._answers = [lambda: value]
    texts = set()
    for _ in range(3):
        with pytest.raises(UnserialisableOutput, match="was executed") as caught:
            program(bench).execute_step(RUN, "t", {}, tool)
        texts.add(str(caught.value))
    assert tool.calls == 1
    assert len(texts) == 1
    ledger = program(bench)
    assert [(step.state, step.output_json) for step in ledger.steps(RUN)] == [("FAILED", None)]
    with pytest.raises(UnserialisableOutput):
        ledger.execute_step(RUN, "t", {}, never)
    assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2
    assert ledger.verify().ok


def test_whatever_an_output_does_while_it_is_stored_its_step_is_recorded(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(UnserialisableOutput):
        ledger.execute_step(RUN, "t", {}, Angry.model_construct)
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]
    assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2


def test_an_output_over_the_limit_is_recorded_as_executed(bench: Bench) -> None:
    ledger = program(bench, payload_limit=100)
    tool = Tool("x" * 200)
    with pytest.raises(UnserialisableOutput, match="limit is 100"):
        ledger.execute_step(RUN, "t", {}, tool)
    with pytest.raises(UnserialisableOutput, match="limit is 100"):
        program(bench).execute_step(RUN, "t", {}, tool)
    assert tool.calls == 1


# --- errors as data ---------------------------------------------------------------------------------------------------


class InvoiceNotFound(LookupError):
    def __init__(self, number: int, *, where: str) -> None:
        super().__init__(f"no invoice {number} in {where}")
        self.number = number


class NoSuchInvoice(InvoiceNotFound):
    pass


def chained() -> None:
    try:
        raise KeyError("id")
    except KeyError as cause:
        raise NoSuchInvoice(7, where="acme") from cause


def test_a_tools_error_is_step_failed_live_and_at_replay_with_all_that_is_known_of_it(bench: Bench) -> None:
    failures = []
    for function in (chained, never):
        ledger = program(bench)
        with pytest.raises(StepFailed) as caught:
            ledger.execute_step(RUN, "t", {}, function)
        failures.append(caught.value)
        ledger.execute_step(RUN, "next", {}, lambda: 1)
    live, replayed = failures
    assert isinstance(live.__cause__, NoSuchInvoice), "live the tool's own traceback is shown"
    assert replayed.__cause__ is None
    for failure in failures:
        assert str(failure) == "Tool execution failed: NoSuchInvoice: no invoice 7 in acme"
        assert isinstance(failure, RuntimeError)
        assert failure.original_type == f"{__name__}.NoSuchInvoice"
        assert failure.is_a(f"{__name__}.InvoiceNotFound")
        assert failure.is_a("builtins.LookupError")
        assert not failure.is_a("builtins.ValueError")
        cause: Any = failure.error["cause"]
        assert (cause["type"], cause["message"]) == ("KeyError", "'id'")
        assert (failure.run_id, failure.step_number, failure.tool_name) == (RUN, 1, "t")
        assert "chained" in str(failure.error["traceback"])
    assert live.error == replayed.error


@pytest.mark.parametrize("declared", [InvoiceNotFound, (ValueError, LookupError), NoSuchInvoice])
def test_a_declared_error_is_raised_as_itself_both_times(bench: Bench, declared: Any) -> None:
    ledger = program(bench)
    with pytest.raises(LookupError, match="no invoice 7 in acme") as live:
        ledger.execute_step(RUN, "t", {}, chained, raises=declared)
    assert live.value.number == 7  # type: ignore[attr-defined]
    ledger.execute_step(RUN, "next", {}, lambda: 1)
    with pytest.raises(declared, match="no invoice 7 in acme") as replayed:
        program(bench).execute_step(RUN, "t", {}, never, raises=declared)
    assert isinstance(replayed.value.__cause__, StepFailed)
    assert str(replayed.value) == str(live.value)


def test_an_error_that_is_not_declared_stays_step_failed(bench: Bench) -> None:
    with pytest.raises(StepFailed):
        program(bench).execute_step(RUN, "t", {}, chained, raises=(ValueError,))


@pytest.mark.parametrize("wrong", [ValueError("x"), "ValueError", (int,), None, 3])
def test_raises_and_fatal_take_exception_classes(bench: Bench, wrong: Any) -> None:
    ledger = program(bench)
    for option in ("raises", "fatal"):
        with pytest.raises(InvalidArguments, match="exception classes"):
            ledger.execute_step(RUN, "t", {}, never, **{option: wrong})


def test_a_fatal_error_ends_the_run(bench: Bench) -> None:
    ledger = program(bench)
    tool = Tool(InvoiceNotFound(7, where="acme"))
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, tool, fatal=(LookupError,), retry=RetryPolicy())
    assert tool.calls == 1
    record = ledger.get_run(RUN)
    assert record.status == "FAILED"
    assert record.cause is not None
    assert "fatal" in record.cause
    with pytest.raises(RunClosed):
        program(bench).execute_step(RUN, "t", {}, tool)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Shifty(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no")


HOSTILE_ERRORS: dict[str, Callable[[], Exception]] = {
    "unspeakable": Unspeakable,
    "shifty": lambda: Shifty("x"),
    "surrogate": lambda: Exception("\ud800"),
    "huge": lambda: Exception("x" * 1_000_000),
    "control": lambda: Exception("\x00\x1b[31m"),
    "group": lambda: ExceptionGroup("g", [ValueError(1)]),
    "stop": lambda: StopIteration(3),
}


@pytest.mark.parametrize("kind", HOSTILE_ERRORS)
def test_a_hostile_exception_is_recorded_like_any_other(bench: Bench, kind: str) -> None:
    error = HOSTILE_ERRORS[kind]()
    ledger = program(bench)
    with pytest.raises(StepFailed) as live:
        ledger.execute_step(RUN, "t", {}, raising(error), raises=(ValueError,), fatal=(KeyError,))
    assert ledger.execute_step(RUN, "next", {}, lambda: 1) == 1
    assert len(bench.rows(RUN)[2].payload or b"") < 20_000
    with pytest.raises(StepFailed) as replayed:
        program(bench).execute_step(RUN, "t", {}, never)
    assert str(live.value) == str(replayed.value)
    assert ledger.steps(RUN)[0].error_message == str(live.value).removeprefix("Tool execution failed: ")


# --- the exact breaker ------------------------------------------------------------------------------------------------


def test_after_n_equal_calls_with_equal_outcome_the_next_is_refused_and_the_run_is_a_dead_letter(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=3)
    tool = Tool({"total": 1})
    for _ in range(3):
        ledger.execute_step(RUN, "t", {"id": 1}, tool)
    with pytest.raises(RunawayLoopException) as caught:
        ledger.execute_step(RUN, "t", {"id": 1}, tool)
    assert tool.calls == 3
    error = caught.value
    assert RunawayLoopException is RunawayLoopDetectedException
    assert isinstance(error, RuntimeError)
    assert (error.run_id, error.rule, error.evidence, error.status) == (
        RUN,
        "identical_calls",
        (1, 2, 3),
        "DEAD_LETTER",
    )
    bench.owners_die()
    other = bench.open()
    record = other.get_run(RUN)
    assert (record.status, record.total_steps, record.owner) == ("DEAD_LETTER", 3, None)
    assert record.cause == error.reason
    other.create_run(GOAL, RUN)
    with pytest.raises(RunClosed, match="DEAD_LETTER") as closed:
        other.execute_step(RUN, "t", {"id": 2}, never)
    assert (closed.value.status, closed.value.cause) == ("DEAD_LETTER", error.reason)
    with pytest.raises(RunClosed):
        ledger.execute_step(RUN, "t", {"id": 2}, never)


def test_equal_errors_are_equal_outcomes_and_their_tracebacks_do_not_matter(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    for function in (raising(TimeoutError("slow")), Tool(TimeoutError("slow"))):
        with pytest.raises(StepFailed):
            ledger.execute_step(RUN, "t", {}, function, effect=Effect.IDEMPOTENT)
    with pytest.raises(RunawayLoopException):
        ledger.execute_step(RUN, "t", {}, never, effect=Effect.IDEMPOTENT)


def test_equal_calls_with_new_outcomes_pass(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2, max_steps=100)
    tool = Tool(*range(50))
    assert [ledger.execute_step(RUN, "poll", {}, tool) for _ in range(20)] == list(range(20))


def test_a_call_that_leaves_the_pattern_passes_and_the_pattern_must_begin_anew(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    for _ in range(2):
        ledger.execute_step(RUN, "t", {}, lambda: 1)
    assert ledger.execute_step(RUN, "t", {"other": 1}, lambda: 1) == 1
    for _ in range(2):
        assert ledger.execute_step(RUN, "t", {}, lambda: 1) == 1
    with pytest.raises(RunawayLoopException) as caught:
        ledger.execute_step(RUN, "t", {}, never)
    assert caught.value.evidence == (4, 5)


def test_a_call_that_may_repeat_is_never_refused(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    for _ in range(10):
        assert ledger.execute_step(RUN, "poll", {}, lambda: "pending", may_repeat=True) == "pending"


def test_calls_that_may_repeat_are_no_part_of_a_loop_and_pass_where_it_would_refuse(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    for may_repeat in (True, True, True, False, False, True):
        assert ledger.execute_step(RUN, "poll", {}, lambda: "pending", may_repeat=may_repeat) == "pending"
    for _ in range(2):
        ledger.execute_step(RUN, "poll", {}, lambda: "pending")
    with pytest.raises(RunawayLoopException) as caught:
        ledger.execute_step(RUN, "poll", {}, never)
    assert caught.value.evidence == (7, 8)


def test_a_call_that_may_repeat_breaks_a_row_of_others(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    for _ in range(4):
        ledger.execute_step(RUN, "t", {}, lambda: 1)
        ledger.execute_step(RUN, "poll", {}, lambda: "pending", may_repeat=True)
    detector = LoopDetectorPolicy(max_repetitions=2).detector()
    levels = [
        detector.observe(tool, {}, 1, may_repeat=tool == "poll").level for tool in ("t", "poll", "t", "poll", "t", "t")
    ]
    assert levels == ["ok"] * 5 + ["certain"]


def test_all_attempts_of_a_step_are_one_call(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=2)
    policy = RetryPolicy(max_attempts=3, base=0.0)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, raising(ValueError("no")), retry=policy)
    assert ledger.steps(RUN)[0].attempts == 3
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, raising(ValueError("no")), retry=policy)
    with pytest.raises(RunawayLoopException) as caught:
        ledger.execute_step(RUN, "t", {}, never, retry=policy)
    assert caught.value.evidence == (1, 2)


def test_a_failed_attempt_that_is_made_again_does_not_break_the_row(bench: Bench) -> None:
    ledger = program(bench, loop_threshold=3)
    for _ in range(2):
        ledger.execute_step(RUN, "t", {}, lambda: 1)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, raising(ValueError("no")))
    ledger = program(bench, loop_threshold=3)
    for _ in range(3):
        assert ledger.execute_step(RUN, "t", {}, lambda: 1) == 1
    with pytest.raises(RunawayLoopException) as caught:
        ledger.execute_step(RUN, "t", {}, never)
    assert caught.value.evidence == (1, 2, 3)


def test_replayed_steps_never_count_twice_and_a_restart_halts_at_the_same_step(bench: Bench) -> None:
    for crash_after in range(1, 5):
        run_id = f"crash after {crash_after}"
        halted = None
        for life in range(2):
            bench.owners_die()
            ledger = bench.open(loop_threshold=4)
            ledger.create_run(GOAL, run_id)
            for number in range(1, 8):
                if life == 0 and number > crash_after:
                    break
                try:
                    ledger.execute_step(run_id, "t", {}, lambda: 1)
                except RunawayLoopException:
                    halted = number
                    break
        assert halted == 5


# --- the step budget --------------------------------------------------------------------------------------------------


def test_the_step_beyond_the_budget_is_refused_and_the_run_is_a_dead_letter(bench: Bench) -> None:
    ledger = program(bench, max_steps=5)
    for number in range(5):
        ledger.execute_step(RUN, "t", {"n": number}, lambda n: n)
    with pytest.raises(BudgetExceededException) as caught:
        ledger.execute_step(RUN, "t", {"n": 5}, never)
    assert isinstance(caught.value, RuntimeError)
    assert "5 steps" in caught.value.reason
    bench.owners_die()
    other = bench.open(max_steps=100)
    assert other.get_run(RUN).status == "DEAD_LETTER"
    other.create_run(GOAL, RUN)
    with pytest.raises(RunClosed):
        other.execute_step(RUN, "t", {"n": 5}, never)


def test_a_budget_of_its_own_counts_more_than_max_steps(bench: Bench) -> None:
    ledger = program(bench, max_steps=100, budget=Budget(steps=1))
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    with pytest.raises(BudgetExceededException):
        ledger.execute_step(RUN, "u", {}, never)


def test_retries_replays_and_reruns_do_not_count_against_the_budget(bench: Bench) -> None:
    policy = RetryPolicy(max_attempts=3, base=0.0)
    for _ in range(3):
        ledger = program(bench, max_steps=2)
        assert ledger.execute_step(RUN, "t", {}, Tool(ValueError(1), ValueError(2), "x"), retry=policy) == "x"
        assert ledger.execute_step(RUN, "u", {}, lambda: 1) == 1
    with pytest.raises(BudgetExceededException):
        ledger.execute_step(RUN, "v", {}, never)


def test_a_run_that_makes_only_values_ends_too(bench: Bench) -> None:
    ledger = bench.open(max_steps=2)

    def agent() -> None:
        with ledger.open_run(GOAL, RUN) as run:
            for _ in range(1000):
                run.now()

    with pytest.raises(BudgetExceededException, match="entries"):
        agent()
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    assert len(bench.rows(RUN)) <= 2 * 20 + 30


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_finished_is_completed_and_takes_nothing_more(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    ledger.finish_run(RUN, {"total": Decimal("1.10"), "at": (1, 2)})
    ledger.finish_run(RUN, {"at": (1, 2), "total": Decimal("1.10")})
    record = ledger.get_run(RUN)
    assert (record.status, record.result, record.owner) == ("COMPLETED", {"total": Decimal("1.10"), "at": (1, 2)}, None)
    with pytest.raises(RunClosed, match="COMPLETED"):
        ledger.finish_run(RUN, "another result")
    with pytest.raises(RunClosed, match="COMPLETED"):
        ledger.execute_step(RUN, "t", {}, never)
    with pytest.raises(IllegalTransition):
        ledger.abort_run(RUN, "late")
    with pytest.raises(IllegalTransition):
        ledger.cancel(RUN)
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "finished"]


def test_a_completed_run_is_replayed_without_a_write_or_a_claim(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    ledger.finish_run(RUN)
    before = bench.rows(RUN), ledger.get_run(RUN)
    again = program(bench)
    assert again.execute_step(RUN, "t", {}, never) == 1
    again.finish_run(RUN)
    assert [step.state for step in again.resume_run(RUN)] == ["COMPLETED"]
    assert (bench.rows(RUN), again.get_run(RUN)) == before


def test_an_aborted_run_is_failed_with_its_reason(bench: Bench) -> None:
    ledger = program(bench)
    ledger.abort_run(RUN, "the customer left")
    record = ledger.get_run(RUN)
    assert (record.status, record.cause, record.owner) == ("FAILED", "the customer left", None)
    with pytest.raises(RunClosed, match="the customer left"):
        ledger.execute_step(RUN, "t", {}, never)
    with pytest.raises(IllegalTransition):
        ledger.abort_run(RUN, "again")


def test_open_run_finishes_on_a_clean_exit(bench: Bench) -> None:
    ledger = bench.open()
    with ledger.open_run(GOAL) as run:
        run.result = run.step("t", {"a": 1}, lambda a: a + 1)
    record = ledger.get_run(run.run_id)
    assert (record.status, record.result, record.owner) == ("COMPLETED", 2, None)
    assert run.run_id.startswith("run_")
    assert len(run.run_id) == 24


@pytest.mark.parametrize("error", [ValueError("the agent's own"), KeyboardInterrupt()])
def test_open_run_parks_on_an_exception_and_goes_on_when_it_is_run_again(bench: Bench, error: BaseException) -> None:
    tool = Tool("done")

    def agent(error: BaseException | None) -> None:
        with bench.open().open_run(GOAL, RUN) as run:
            run.step("t", {}, tool)
            if error:
                raise error

    with pytest.raises(type(error)) as caught:
        agent(error)
    assert caught.value is error
    record = bench.open().get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert record.cause == (f"ValueError: {error}" if str(error) else "KeyboardInterrupt")
    agent(None)
    assert tool.calls == 1
    assert bench.open().get_run(RUN).status == "COMPLETED"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "parked", "finished"]


def test_a_known_run_id_with_an_equal_goal_attaches_and_with_another_is_refused(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    ledger.detach(RUN)
    other = bench.open()
    with pytest.raises(RunInputMismatch, match="another goal"):
        other.create_run("another goal", RUN)
    assert ledger.create_run(GOAL, RUN) == RUN, "whoever was refused does not keep the lease"


def test_a_refused_goal_does_not_disturb_the_program_that_works_on_the_run(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "a", {}, lambda: 1)
    with pytest.raises(RunInputMismatch):
        ledger.create_run("another goal", RUN)
    assert ledger.execute_step(RUN, "b", {}, lambda: 2) == 2


def test_ids_that_nobody_names_are_new_each_time(bench: Bench) -> None:
    ledger = bench.open()
    assert len({ledger.create_run(GOAL) for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.get_run("unknown"),
        lambda ledger: ledger.steps("unknown"),
        lambda ledger: ledger.resume_run("unknown"),
        lambda ledger: ledger.finish_run("unknown"),
        lambda ledger: ledger.abort_run("unknown", "why"),
        lambda ledger: ledger.cancel("unknown"),
        lambda ledger: ledger.tree_head("unknown"),
        lambda ledger: ledger.verify("unknown"),
        lambda ledger: ledger.execute_step("unknown", "t", {}, never),
    ],
    ids=["get", "steps", "resume", "finish", "abort", "cancel", "head", "verify", "execute"],
)
def test_a_run_that_nobody_knows_is_not_found(bench: Bench, call: Any) -> None:
    with pytest.raises(RunNotFound, match="unknown") as caught:
        call(bench.open())
    assert isinstance(caught.value, ValueError)


# --- owners -----------------------------------------------------------------------------------------------------------


def test_a_run_that_another_owner_works_on_is_refused(bench: Bench) -> None:
    ledger = program(bench, owner="first")
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    bench.clock.advance(5)
    other = bench.open()
    for call in (
        lambda: other.create_run(GOAL, RUN),
        lambda: other.execute_step(RUN, "t", {}, never),
        lambda: other.resume_run(RUN),
        lambda: other.finish_run(RUN),
        lambda: other.abort_run(RUN, "why"),
    ):
        with pytest.raises(RunOwned) as caught:
            call()
        assert caught.value.owner.startswith("first-")
        assert caught.value.idle_seconds == pytest.approx(5.0)
    assert other.get_run(RUN).status == "CHECKPOINTED", "looking needs no lease"


def test_a_detached_run_is_free_at_once(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    ledger.detach(RUN)
    other = bench.open()
    other.create_run(GOAL, RUN)
    assert other.execute_step(RUN, "t", {}, never) == 1
    with pytest.raises(RunOwned):
        ledger.execute_step(RUN, "u", {}, never)


def test_wait_waits_for_the_owner_and_no_longer_than_it_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = program(bench)
    other = bench.open()
    begun = bench.clock.elapsed()
    with pytest.raises(RunOwned):
        other.create_run(GOAL, RUN, wait=10)
    assert bench.clock.elapsed() - begun == pytest.approx(10, abs=0.2)
    sleep = bench.clock.sleep

    def detach_meanwhile(wait_seconds: float) -> None:
        ledger.detach(RUN)
        sleep(wait_seconds)

    monkeypatch.setattr(bench.clock, "sleep", detach_meanwhile)
    assert other.resume_run(RUN, wait=10) == []
    with pytest.raises(RunOwned):
        ledger.create_run(GOAL, RUN)


def test_each_change_of_owner_raises_the_token_and_every_step_carries_the_one_it_was_written_under(
    bench: Bench,
) -> None:
    for number in range(3):
        ledger = program(bench)
        for step in range(number + 1):
            ledger.execute_step(RUN, "t", {"n": step}, lambda n: n)
    tokens = [step.fencing_token for step in ledger.steps(RUN)]
    assert tokens == sorted(set(tokens))
    assert ledger.get_run(RUN).fencing_token == tokens[-1]


def test_a_call_while_another_of_the_run_is_in_flight_is_refused(bench: Bench) -> None:
    ledger = program(bench)
    refused: list[BaseException] = []

    def from_another_thread() -> None:
        for call in (
            lambda: ledger.execute_step(RUN, "other", {}, never),
            lambda: ledger.finish_run(RUN),
            lambda: ledger.abort_run(RUN, "why"),
            lambda: ledger.detach(RUN),
        ):
            with pytest.raises(UnorderedStep) as caught:
                call()
            refused.append(caught.value)

    def tool() -> str:
        thread = threading.Thread(target=from_another_thread)
        thread.start()
        thread.join()
        return "done"

    assert ledger.execute_step(RUN, "t", {}, tool) == "done"
    assert len(refused) == 4
    assert all("'t'" in str(error) for error in refused)
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]


def test_a_call_while_another_of_the_run_waits_for_its_retry_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = program(bench)
    sleep, refused = bench.clock.sleep, []

    def call_meanwhile(wait_seconds: float) -> None:
        with pytest.raises(UnorderedStep) as caught:
            ledger.execute_step(RUN, "other", {}, never)
        refused.append(caught.value)
        sleep(wait_seconds)

    monkeypatch.setattr(bench.clock, "sleep", call_meanwhile)
    policy = RetryPolicy(base=8.0, cap=8.0)
    assert ledger.execute_step(RUN, "t", {}, Tool(ValueError(1), "done"), retry=policy) == "done"
    assert refused
    monkeypatch.undo()
    assert ledger.execute_step(RUN, "other", {}, lambda: 2) == 2


def test_threads_on_runs_of_their_own_do_not_disturb_each_other(bench: Bench) -> None:
    ledger = bench.open(max_steps=100)
    results: dict[str, list[int]] = {}

    def agent(name: str) -> None:
        ledger.create_run(name, name)
        results[name] = [ledger.execute_step(name, "t", {"n": n}, lambda n: n * 2) for n in range(20)]
        ledger.finish_run(name)

    threads = [threading.Thread(target=agent, args=(f"run {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [[n * 2 for n in range(20)]] * 6
    assert ledger.verify().ok
    assert {run.status for run in ledger.runs()} == {"COMPLETED"}


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_the_owner_cancels_at_once(bench: Bench) -> None:
    ledger = program(bench)
    ledger.cancel(RUN, by="ann", reason="not needed")
    record = ledger.get_run(RUN)
    assert (record.status, record.cause, record.owner) == ("CANCELLED", "not needed", None)
    with pytest.raises(RunClosed, match="not needed"):
        ledger.execute_step(RUN, "t", {}, never)


def test_a_run_of_nobody_is_cancelled_at_once_by_anybody(bench: Bench) -> None:
    program(bench).detach(RUN)
    other = bench.open()
    other.cancel(RUN, by="bob")
    record = other.get_run(RUN)
    assert (record.status, record.cause, record.owner) == ("CANCELLED", "cancelled by bob", None)


def test_another_owner_cancels_through_the_inbox_and_the_step_in_flight_is_recorded_first(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()

    def tool() -> str:
        other.cancel(RUN, by="bob", reason="stop")
        return "done"

    assert ledger.execute_step(RUN, "t", {}, tool) == "done"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "cancelled"]
    with pytest.raises(RunClosed, match="CANCELLED"):
        ledger.execute_step(RUN, "u", {}, never)
    assert other.get_run(RUN).cause == "stop"
    assert other.verify().ok


def test_of_two_requests_to_cancel_the_first_ends_the_run(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()

    def tool() -> str:
        other.cancel(RUN, reason="first")
        other.cancel(RUN, reason="second")
        return "done"

    assert ledger.execute_step(RUN, "t", {}, tool) == "done"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "cancelled"]
    assert other.get_run(RUN).cause == "first"
    assert other.verify().ok


def test_a_request_to_cancel_stops_the_next_step_before_it_is_dispatched(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    other.cancel(RUN)
    assert other.get_run(RUN).status == "CHECKPOINTED", "only its owner writes"
    with pytest.raises(RunClosed, match="CANCELLED"):
        ledger.execute_step(RUN, "u", {}, never)
    assert other.get_run(RUN).status == "CANCELLED"
    with pytest.raises(IllegalTransition):
        other.cancel(RUN)


def test_a_request_to_cancel_ends_a_wait_for_a_retry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, other = program(bench), bench.open()
    sleep, cancelled = bench.clock.sleep, []

    def cancel_meanwhile(wait_seconds: float) -> None:
        if not cancelled:
            other.cancel(RUN)
            cancelled.append(True)
        sleep(wait_seconds)

    monkeypatch.setattr(bench.clock, "sleep", cancel_meanwhile)
    tool = Tool(ValueError(1))
    with pytest.raises(RunClosed, match="CANCELLED"):
        ledger.execute_step(RUN, "t", {}, tool, retry=RetryPolicy(base=8.0))
    assert tool.calls == 1
    assert other.get_run(RUN).status == "CANCELLED"


def test_the_same_ledger_cancels_a_step_in_flight_without_losing_its_outcome(bench: Bench) -> None:
    ledger = program(bench)

    def tool() -> str:
        ledger.cancel(RUN)
        return "done"

    assert ledger.execute_step(RUN, "t", {}, tool) == "done"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "cancelled"]


def test_replay_of_recorded_steps_goes_on_until_the_cancellation(bench: Bench) -> None:
    ledger, other = program(bench), bench.open()
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    other.cancel(RUN)
    bench.owners_die()
    third = bench.open()
    third.create_run(GOAL, RUN)
    with pytest.raises(RunClosed, match="CANCELLED"):
        [third.execute_step(RUN, tool, {}, never) for tool in ("t", "u")]
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "cancelled"]


# --- constructors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"policy": LoopDetectorPolicy(), "loop_threshold": 3}, ValueError, "one of them"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"max_steps": "many"}, ValueError, "max_steps"),
        ({"loop_threshold": 0}, ValueError, "max_repetitions"),
        ({"durability": "none"}, ValueError, "durability"),
        ({"undeclared": "ask"}, ValueError, "undeclared"),
        ({"lease_seconds": 3.0}, ValueError, "heartbeat_seconds"),
        ({"heartbeat_seconds": 0.0}, ValueError, "heartbeat_seconds"),
        ({"owner": "a\x00b"}, InvalidName, "owner"),
    ],
    ids=repr,
)
def test_a_constructor_refuses_what_makes_no_sense(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    path = tmp_path / "ledger.db"
    with pytest.raises(error, match=says):
        AgentRunLedger(path, **options)
    assert not path.exists()


def test_a_ledger_in_memory_works_and_warns_once() -> None:
    with told(NotDurableWarning) as warnings, AgentRunLedger() as ledger:
        run_id = ledger.create_run(GOAL)
        assert ledger.execute_step(run_id, "t", {}, lambda: 1) == 1
    assert len(warnings) == 1


def test_a_closed_ledger_says_so_and_can_be_closed_again(tmp_path: Path) -> None:
    ledger = AgentRunLedger(tmp_path / "ledger.db")
    run_id = ledger.create_run(GOAL)
    ledger.close()
    ledger.close()
    with pytest.raises(agent_run_ledger.StoreUnavailable, match="closed"):
        ledger.execute_step(run_id, "t", {}, never)
    with AgentRunLedger(tmp_path / "ledger.db") as other:
        other.create_run(GOAL, run_id)


def test_arguments_that_cannot_be_stored_leave_the_run_as_it_was(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(UnserialisableArguments) as caught:
        ledger.execute_step(RUN, "t", {"a": [1, object()]}, never)
    assert caught.value.path == "$.a[1]"
    assert bench.kinds(RUN) == ["created"]
    assert ledger.execute_step(RUN, "t", {"a": 1}, lambda: 1) == 1
    assert ledger.steps(RUN)[0].position == "1", "a call refused for bad input takes no position"
