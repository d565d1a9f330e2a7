"""What is declared about a step, in each spelling of one: options, keys of calls, and keys for receivers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Effect,
    InvalidArguments,
    InvalidName,
    ReplayDivergence,
    RetryPolicy,
    RunawayLoopDetectedException,
    RunClosed,
    Step,
    StepFailed,
    StepInDoubt,
    current_run,
    current_step,
)
from support.ledgers import Bench, Died
from support.programs import LONG, RUN, Calls, Invoice, Way, calling, dies, mortal, positions

# --- what is declared about a step, in each of its spellings ----------------------------------------------------------


class Spelling:
    """A step named `work` without arguments, as a program may spell it. `Step`, which is a program of its own, is tried below."""

    def __init__(self, name: str, way: Way) -> None:
        self.name = name
        self.way = way

    def __call__(self, ledger: AgentRunLedger, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """What makes the call, in a program of the run `RUN`; it takes `step_key=`."""
        function = self.way.function(fn)
        if self.name == "tool":
            return ledger.tool(name="work", **options)(function)
        if self.name == "Run.step":
            return lambda **key: current_run().step("work", {}, function, **options, **key)
        step: Any = ledger.aexecute_step if self.way.is_async else ledger.execute_step
        return lambda **key: step(RUN, "work", {}, function, **options, **key)

    def told(self, ledger: AgentRunLedger, fn: Callable[..., Any], times: int = 1, **options: Any) -> list[Any]:
        """What a program is told that makes the call so many times, goes on whatever comes, and is gone before its run has ended."""
        work = self(ledger, fn, **options)
        after = self.way.function(lambda: None)
        got: list[Any] = []

        def body() -> Any:
            for _ in range(times):
                try:
                    got.append((yield work()))
                except Exception as error:
                    got.append(error)
            yield current_run().step("after", {}, after)
            raise Died

        with pytest.raises(Died):
            self.way.run(ledger, body)
        return got


@pytest.fixture(params=["tool", "Run.step", "execute_step"])
def spelling(request: pytest.FixtureRequest, way: Way) -> Spelling:
    return Spelling(request.param, way)


def test_the_call_of_a_model_changes_nothing(bench: Bench, spelling: Spelling) -> None:
    ledger = bench.open()
    spelling.told(ledger, lambda: None, kind="model")
    assert ledger.steps(RUN)[0].effect == "READ"


@pytest.mark.parametrize("effect", [*Effect, None])
def test_an_effect_is_recorded_with_the_step(bench: Bench, spelling: Spelling, effect: Effect | None) -> None:
    ledger = bench.open()
    spelling.told(ledger, lambda: None, effect=effect)
    assert ledger.steps(RUN)[0].effect == effect


def test_a_failing_step_is_retried_as_its_policy_says(bench: Bench, spelling: Spelling) -> None:
    calls = Calls(ValueError("1"), ValueError("2"))
    ledger = bench.open()
    got = spelling.told(ledger, lambda: calls("done"), retry=RetryPolicy(max_attempts=3))
    assert got == ["done"]
    assert ledger.steps(RUN)[0].attempts == 3


def test_a_step_that_is_out_of_time_has_failed_now_and_at_replay(bench: Bench, spelling: Spelling) -> None:
    gate = threading.Event()
    slow: Any = (lambda: asyncio.Event().wait()) if spelling.way.is_async else gate.wait
    try:
        got = spelling.told(bench.open(), slow, timeout=0.001)
        bench.owners_die()
        ledger = bench.open()
        got += spelling.told(ledger, slow, timeout=0.001)
    finally:
        gate.set()
    for error in got:
        assert type(error) is StepFailed
        assert str(error) == "Tool execution failed: TimeoutError: no result within 0.001 s"
        assert error.is_a("builtins.TimeoutError")
    assert [step.attempts for step in ledger.steps(RUN)] == [1, 1]


def test_an_output_is_built_as_it_is_declared_now_and_at_replay(bench: Bench, spelling: Spelling) -> None:
    calls = Calls()
    got: list[Any] = []
    for _ in range(2):
        got += spelling.told(bench.open(), lambda: calls(Invoice(1, "ACME")), returns=Invoice)
        bench.owners_die()
    assert got == [Invoice(1, "ACME")] * 2
    assert len(calls.seen) == 1


class NotFound(Exception):
    def __init__(self, number: int, *, where: str) -> None:
        super().__init__(f"no invoice {number} in {where}")
        self.number = number


class NotThere(NotFound):
    pass


def test_an_error_that_is_declared_is_raised_as_itself_now_and_at_replay(bench: Bench, spelling: Spelling) -> None:
    got: list[Any] = []
    calls = Calls(NotThere(7, where="the books"))
    for _ in range(2):
        got += spelling.told(bench.open(), calls, raises=(NotFound,))
        bench.owners_die()
    assert len(calls.seen) == 1
    assert [type(error) for error in got] == [NotThere, NotThere]
    assert [str(error) for error in got] == ["no invoice 7 in the books"] * 2
    assert type(got[1].__cause__) is StepFailed


def test_an_error_that_is_not_declared_is_a_step_failed_now_and_at_replay(bench: Bench, spelling: Spelling) -> None:
    got: list[Any] = []
    calls = Calls(ValueError("7"))
    for _ in range(2):
        got += spelling.told(bench.open(), calls, raises=(NotFound,))
        bench.owners_die()
    assert len(calls.seen) == 1
    assert [(type(error), str(error)) for error in got] == [(StepFailed, "Tool execution failed: ValueError: 7")] * 2


def test_a_fatal_error_ends_the_run(bench: Bench, spelling: Spelling) -> None:
    ledger = bench.open()
    work = spelling(ledger, Calls(NotFound(7, where="the books")), fatal=(NotFound,), retry=RetryPolicy())
    agent = spelling.way.agent(ledger, calling(work))
    with pytest.raises(StepFailed, match="no invoice 7"):
        spelling.way.start(ledger, agent)
    assert ledger.get_run(RUN).status == "FAILED"
    assert ledger.steps(RUN)[0].attempts == 1
    with pytest.raises(RunClosed, match="FAILED"):
        spelling.way.start(ledger, agent)


def test_equal_calls_with_equal_outcomes_may_be_declared_no_loop(bench: Bench, spelling: Spelling) -> None:
    calls = Calls()
    assert spelling.told(bench.open(), lambda: calls("same"), times=6, may_repeat=True) == ["same"] * 6


def test_equal_calls_with_equal_outcomes_are_a_loop_where_nothing_is_declared(bench: Bench, spelling: Spelling) -> None:
    calls = Calls()
    ledger = bench.open()
    work = spelling(ledger, lambda: calls("same"))

    def body() -> Any:
        for _ in range(6):
            yield work()

    with pytest.raises(RunawayLoopDetectedException):
        spelling.way.run(ledger, body)
    assert len(calls.seen) == 3
    assert ledger.get_run(RUN).status == "DEAD_LETTER"


def test_another_version_counts_attempts_afresh(bench: Bench, spelling: Spelling) -> None:
    calls = Calls(Died(), Died())
    retry = RetryPolicy(max_attempts=1)

    def started(version: str) -> Any:
        bench.owners_die()
        ledger = bench.open()
        work = spelling(ledger, lambda: calls("done"), version=version, retry=retry, effect=Effect.READ)
        return spelling.way.start(ledger, spelling.way.agent(ledger, calling(work)))

    with pytest.raises(Died):
        started("1")
    with pytest.raises(Died):
        started("2")
    assert started("3") == "done"
    bench.owners_die()


def test_the_same_version_has_its_attempts_spent(bench: Bench, spelling: Spelling) -> None:
    calls = Calls(Died())
    for error in (Died, AttemptsExhausted):
        ledger = bench.open()
        options: Any = {"version": "1", "retry": RetryPolicy(max_attempts=1), "effect": Effect.READ}
        work = spelling(ledger, lambda: calls("done"), **options)
        agent = spelling.way.agent(ledger, calling(work))
        with pytest.raises(error):
            spelling.way.start(ledger, agent)
        bench.owners_die()
    assert len(calls.seen) == 1
    assert ledger.get_run(RUN).status == "DEAD_LETTER"


def test_a_mutation_in_doubt_parks_the_run_and_is_never_called_again(bench: Bench, spelling: Spelling) -> None:
    calls = Calls(Died())
    for error in (Died, StepInDoubt, StepInDoubt):
        ledger = bench.open()
        work = spelling(ledger, lambda: calls("done"), effect=Effect.MUTATE)
        agent = spelling.way.agent(ledger, calling(work))
        with pytest.raises(error):
            spelling.way.start(ledger, agent)
        bench.owners_die()
    assert len(calls.seen) == 1
    assert ledger.get_run(RUN).status == "BLOCKED"


@pytest.mark.parametrize(
    "options",
    [
        {"effect": "SOMETIMES"},
        {"retry": 3},
        {"timeout": 0},
        {"timeout": "5"},
        {"kind": "robot"},
        {"identity": "amount"},
        {"version": ""},
        {"raises": ("ValueError",)},
        {"fatal": int},
    ],
)
def test_an_option_that_is_not_what_it_should_be_is_refused_before_anything_is_written(
    bench: Bench, spelling: Spelling, options: dict[str, Any]
) -> None:
    ledger = bench.open()

    def body() -> Any:
        with pytest.raises((InvalidArguments, InvalidName)):
            spelling(ledger, lambda: None, **options)()
        return (yield current_run().step("after", {}, spelling.way.function(lambda: None)))

    spelling.way.run(ledger, body)
    assert positions(ledger) == ["1"]


# --- the options of a pipeline's step ---


def executed(bench: Bench, fn: Callable[..., Any], **options: Any) -> Any:
    bench.owners_die()
    return bench.pipeline(RUN, Step("work", fn, **options)).execute()


def test_a_pipelines_step_takes_the_same_options(bench: Bench) -> None:
    calls = Calls(NotFound(7, where="a"), NotFound(7, where="b"))
    options: dict[str, Any] = {
        "kind": "model",
        "retry": RetryPolicy(max_attempts=2),
        "timeout": LONG,
        "raises": NotFound,
        "returns": Invoice,
        "version": "1",
        "may_repeat": True,
    }
    with pytest.raises(NotFound):
        executed(bench, lambda: calls({"number": 1, "customer": "ACME"}), **options)
    options["version"] = "2"
    assert executed(bench, lambda: calls({"number": 1, "customer": "ACME"}), **options) == Invoice(1, "ACME")
    assert len(calls.seen) == 3
    assert bench.open().steps(RUN)[0].effect == "READ"


def test_a_fatal_error_ends_a_pipeline(bench: Bench) -> None:
    calls = Calls(NotFound(7, where="a"))
    with pytest.raises(StepFailed):
        executed(bench, calls, fatal=NotFound)
    assert bench.open().get_run(RUN).status == "FAILED"


def test_a_pipelines_step_is_given_its_key(bench: Bench) -> None:
    keys: list[str] = []

    def pay(idempotency_key: str) -> None:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise Died

    with pytest.raises(Died):
        executed(bench, pay)
    executed(bench, pay)
    (step,) = bench.open().steps(RUN)
    assert keys == [step.idempotency_key] * 2
    assert step.effect == "IDEMPOTENT"


# --- identity ---------------------------------------------------------------------------------------------------------


def test_identity_says_which_arguments_identify_a_call(bench: Bench, way: Way) -> None:
    def ask(question: str, at: str) -> object:
        return calls((question, at))

    def life(today: str) -> None:
        def body() -> Any:
            got.append((yield tool("why?", today)))
            raise Died

        bench.owners_die()
        ledger = bench.open()
        tool = way.tool(ledger, ask, identity=lambda arguments: arguments["question"])
        with pytest.raises(Died):
            way.run(ledger, body)

    calls = Calls()
    got: list[Any] = []
    life("Monday")
    life("Tuesday")
    assert got == [("why?", "Monday")] * 2
    assert len(calls.seen) == 1


def test_without_identity_every_argument_counts(bench: Bench, way: Way) -> None:
    def ask(question: str, at: str) -> object:
        return calls((question, at))

    def life(today: str) -> None:
        def body() -> Any:
            yield tool("why?", today)
            raise Died

        bench.owners_die()
        ledger = bench.open()
        tool = way.tool(ledger, ask)
        way.run(ledger, body)

    calls = Calls()
    with pytest.raises(Died):
        life("Monday")
    with pytest.raises(ReplayDivergence, match=r"\$\.at"):
        life("Tuesday")
    assert len(calls.seen) == 1


# --- step_key ---------------------------------------------------------------------------------------------------------


def test_a_key_gives_a_call_a_position_free_of_order(bench: Bench, way: Way) -> None:
    def double(n: int) -> object:
        return 2 * calls(n)

    def life(*order: int) -> None:
        def body() -> Any:
            for n in order:
                assert (yield tool(n, step_key=f"call {n}")) == 2 * n
            assert (yield tool(100)) == 200
            die()

        ledger, die = mortal(bench)
        tool = way.tool(ledger, double)
        with dies(bench):
            way.run(ledger, body)

    calls = Calls()
    life(1, 2, 3)
    life(3, 1, 2)
    assert calls.seen == [1, 2, 3, 100]
    assert positions(bench.open()) == ["#call 1", "#call 2", "#call 3", "1"]


def test_a_key_that_is_used_again_gives_an_equal_call_its_recorded_outcome(bench: Bench, spelling: Spelling) -> None:
    calls = Calls()
    ledger = bench.open()
    work = spelling(ledger, lambda: calls("done"))

    def body() -> Any:
        got = set()
        for _ in range(5):
            got.add((yield work(step_key="k")))
        return got

    assert spelling.way.run(ledger, body) == {"done"}
    assert len(calls.seen) == 1
    assert positions(ledger) == ["#k"]


def test_a_key_that_is_used_again_for_another_call_is_a_divergence(bench: Bench, way: Way) -> None:
    def double(n: int) -> object:
        return 2 * calls(n)

    def body() -> Any:
        yield tool(1, step_key="k")
        yield tool(2, step_key="k")

    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, double)
    with pytest.raises(ReplayDivergence, match=r"\$\.n"):
        way.run(ledger, body)
    assert calls.seen == [1]
    assert ledger.get_run(RUN).status == "BLOCKED"


def test_a_key_belongs_to_its_branch(bench: Bench, way: Way) -> None:
    def double(n: int) -> object:
        return 2 * calls(n)

    def body() -> Any:
        got = [(yield tool(1, step_key="k"))]
        for name in ("left", "right"):
            with current_run().branch(name):
                got.append((yield tool(len(got) + 1, step_key="k")))
        return got

    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, double)
    assert way.run(ledger, body) == [2, 4, 6]
    assert positions(ledger) == ["#k", "@left.#k", "@right.#k"]


def test_a_tool_may_have_a_parameter_step_key_of_its_own(bench: Bench, way: Way) -> None:
    def work(step_key: str) -> object:
        return step_key

    ledger = bench.open()
    tool = way.tool(ledger, work)
    assert way.run(ledger, calling(lambda: tool(step_key="mine"))) == "mine"
    assert positions(ledger) == ["1"]


@pytest.mark.parametrize("key", ["", " ", "a\0b", "x" * 256, 5])
def test_a_key_that_is_no_name_is_refused(bench: Bench, spelling: Spelling, key: Any) -> None:
    ledger = bench.open()
    work = spelling(ledger, lambda: None)

    def body() -> Any:
        with pytest.raises(InvalidName):
            work(step_key=key)
        yield work()

    spelling.way.run(ledger, body)
    assert positions(ledger) == ["1"]


# --- idempotency_key --------------------------------------------------------------------------------------------------


def test_a_parameter_idempotency_key_gets_the_key_of_the_step_the_same_at_every_attempt(bench: Bench, way: Way) -> None:
    calls = Calls(OSError("1"), Died(), OSError("2"))

    def pay(amount: int, idempotency_key: str) -> object:
        assert current_step().idempotency_key == idempotency_key
        keys.append(idempotency_key)
        return calls(amount)

    keys: list[str] = []
    for error in (Died, None):
        ledger = bench.open()
        tool = way.tool(ledger, pay, retry=RetryPolicy(max_attempts=9))
        agent = way.agent(ledger, calling(functools.partial(tool, 5)))
        if error is not None:
            with pytest.raises(error):
                way.start(ledger, agent)
        else:
            assert way.start(ledger, agent) == 5
        bench.owners_die()
    (step,) = ledger.steps(RUN)
    assert keys == [step.idempotency_key] * 4
    assert step.effect == "IDEMPOTENT"
    assert step.arguments_json == '{"amount":5}'


def test_what_is_declared_goes_before_the_parameter(bench: Bench, way: Way) -> None:
    def pay(idempotency_key: str) -> object:
        return None

    ledger = bench.open()
    tool = way.tool(ledger, pay, effect=Effect.MUTATE)
    way.run(ledger, calling(tool))
    assert ledger.steps(RUN)[0].effect == "MUTATE"


def test_a_key_parameter_is_filled_in_each_spelling(bench: Bench, spelling: Spelling) -> None:
    def pay(idempotency_key: str) -> object:
        return idempotency_key

    ledger = bench.open()
    (got,) = spelling.told(ledger, pay)
    assert ledger.steps(RUN)[0].idempotency_key == got
    assert ledger.steps(RUN)[0].effect == "IDEMPOTENT"


def test_equal_calls_have_keys_of_their_own(bench: Bench, way: Way) -> None:
    def pay(amount: int, idempotency_key: str) -> object:
        return idempotency_key

    def body() -> Any:
        return [(yield tool(5)), (yield tool(5))]

    ledger = bench.open()
    tool = way.tool(ledger, pay)
    first, second = way.run(ledger, body)
    assert first != second
