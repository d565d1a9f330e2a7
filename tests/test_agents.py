"""Face C: tools, agents, child runs and branches, in sync and async programs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Budget,
    BudgetExceededException,
    Effect,
    EffectConflict,
    InvalidArguments,
    InvalidName,
    ReplayDivergence,
    RetryPolicy,
    Run,
    RunawayLoopDetectedException,
    RunClosed,
    RunInputMismatch,
    RunOwned,
    Step,
    StepFailed,
    StepInDoubt,
    StoreUnavailable,
    UnorderedStep,
    current_run,
    current_step,
)
from support.ledgers import Bench, Died

RUN, GOAL = "run", "do it"
LONG = 60.0
"""Seconds that no wait lasts unless something is broken."""

Body = Callable[..., Generator[Any, Any, Any]]


class Way:
    """One of the two ways to write a program. What a test writes once is a sync program here and an async one there.

    A body is a generator: what it yields is a call, and what comes back is the call's value, which an async program awaits.
    """

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a sync or an async one."""
        if not self.is_async:
            return _like(fn, lambda *args, **kwargs: fn(*args, **kwargs))

        async def afunction(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            value = fn(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return _like(fn, afunction)

    def program(self, body: Body) -> Callable[..., Any]:
        """The body as a sync or an async function."""

        def play(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            answer: Any = None
            while True:
                try:
                    answer = steps.send(answer)
                except StopIteration as stop:
                    return stop.value

        async def aplay(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            resume = functools.partial(steps.send, None)
            while True:
                try:
                    asked = resume()
                except StopIteration as stop:
                    return stop.value
                try:
                    resume = functools.partial(steps.send, await asked)
                except BaseException as error:
                    resume = functools.partial(steps.throw, error)

        return _like(body, aplay if self.is_async else play)

    def tool(self, ledger: AgentRunLedger, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return ledger.tool(**options)(self.function(fn))

    def agent(self, ledger: AgentRunLedger, body: Body, **options: Any) -> Callable[..., Any]:
        return ledger.agent(**options)(self.program(body))

    def start(self, ledger: AgentRunLedger, agent: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {"run_id": RUN} | kwargs
        if self.is_async:
            return asyncio.run(ledger.arun(agent, *args, **options))
        return ledger.run(agent, *args, **options)

    def run(self, ledger: AgentRunLedger, body: Body, *args: Any, **options: Any) -> Any:
        """Register the body as an agent and run it."""
        return self.start(ledger, self.agent(ledger, body, **options), *args)


def calling(call: Callable[[], Any]) -> Body:
    """The body of a program that makes one call and returns its value."""

    def agent() -> Any:
        return (yield call())

    return agent


def _like(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = original.__name__
    function.__annotations__ = original.__annotations__
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


class Calls:
    """What was really called, in order; a function of it may be told to raise."""

    def __init__(self, *errors: BaseException) -> None:
        self.seen: list[Any] = []
        self.errors = list(errors)

    def __call__(self, given: Any = None) -> Any:
        self.seen.append(given)
        if self.errors:
            raise self.errors.pop(0)
        return given


class Mortal:
    """A store that a process loses when it dies."""

    def __init__(self, bench: Bench) -> None:
        self._store = bench.store()
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        if self.is_dead and name != "close":
            raise StoreUnavailable("this process is dead")
        return getattr(self._store, name)


def mortal(bench: Bench) -> tuple[AgentRunLedger, Callable[[], None]]:
    """A ledger whose process can die in the middle of anything: nothing is parked or given back, the lease runs out."""
    store = Mortal(bench)
    ledger = AgentRunLedger(store, durability="process", clock=bench.clock)  # type: ignore[arg-type]

    def die() -> None:
        store.is_dead = True
        raise Died

    return ledger, die


@contextmanager
def dies(bench: Bench) -> Iterator[None]:
    with pytest.raises((Died, StoreUnavailable)):
        yield
    bench.owners_die()


def positions(ledger: AgentRunLedger, run_id: str = RUN) -> list[str]:
    return [step.position for step in ledger.steps(run_id)]


# --- tools ------------------------------------------------------------------------------------------------------------


@dataclass
class Invoice:
    number: int
    customer: str


def test_a_tool_outside_of_a_run_is_a_plain_call(bench: Bench, way: Way) -> None:
    def add(a: int, b: int = 1) -> object:
        return a + b

    ledger = bench.open()
    add_ = way.tool(ledger, add, effect=Effect.MUTATE, timeout=LONG, retry=RetryPolicy())
    got = [add_(1, b=2), add_("a", "b"), add_(5, step_key="a key")]  # nothing is checked, nothing is stored
    if way.is_async:
        got = [asyncio.run(each) for each in got]
    assert got == [3, "ab", 6]
    assert ledger.runs() == []


def test_a_tool_inside_of_a_run_is_a_step_with_its_arguments_by_name(bench: Bench, way: Way) -> None:
    def add(a: int, b: int = 1, **rest: int) -> object:
        return a + b

    def body() -> Any:
        first = yield tool(1)
        second = yield tool(first, b=first, c=3)
        return [first, second]

    ledger = bench.open()
    tool = way.tool(ledger, add, effect=Effect.READ)
    assert way.run(ledger, body) == [2, 4]
    assert [(s.position, s.tool_name, s.arguments_json, s.output_json, s.effect) for s in ledger.steps(RUN)] == [
        ("1", "add", '{"a":1}', "2", "READ"),
        ("2", "add", '{"a":2,"b":2,"c":3}', "4", "READ"),
    ]
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).goal) == ("COMPLETED", "body")
    assert ledger.verify().ok


def test_a_replay_calls_nothing_and_gives_the_same(bench: Bench, way: Way) -> None:
    calls = Calls()

    def find(number: int) -> Invoice:
        calls(number)
        return Invoice(number, "ACME")

    def body() -> Any:
        found = []
        for number in range(3):
            found.append((yield tool(number)))
            assert isinstance(found[-1], Invoice)
        seen.append(found)
        end()
        return found[-1].customer

    seen: list[Any] = []
    ledger, end = mortal(bench)
    tool = way.tool(ledger, find)
    with dies(bench):
        way.run(ledger, body)
    ledger, end = bench.open(), lambda: None
    tool = way.tool(ledger, find)
    assert way.run(ledger, body) == "ACME"
    assert calls.seen == [0, 1, 2]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (("x",), {}, "'pay': argument amount: expected int, found str"),
        ((1,), {"to": [1]}, r"'pay': argument to\[0\]: expected str, found int"),
        ((1,), {"invoice": {"number": "x", "customer": "y"}}, r"'pay': argument invoice"),
        ((), {}, "'pay': missing a required argument: 'amount'"),
        ((1,), {"amount": 1}, "'pay': multiple values for argument 'amount'"),
        ((1,), {"when": 1}, "'pay': got an unexpected keyword argument 'when'"),
        ((1,), {"idempotency_key": "k"}, "'pay': 'idempotency_key' is given by the ledger"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name_and_take_no_position(
    bench: Bench, way: Way, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    def pay(
        amount: int, to: list[str] | None = None, invoice: Invoice | None = None, idempotency_key: str = ""
    ) -> object:
        return amount

    def body() -> Any:
        with pytest.raises(InvalidArguments, match=said):  # it is the call that is refused, not the waiting for it
            tool(*args, **kwargs)
        return (yield tool(7))

    ledger = bench.open()
    tool = way.tool(ledger, pay)
    assert way.run(ledger, body) == 7
    assert positions(ledger) == ["1"]
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "finished"]


def test_stored_arguments_are_what_the_tool_gets_as_their_annotations_say(bench: Bench, way: Way) -> None:
    def pay(invoice: Invoice, to: tuple[str, ...]) -> object:
        got.append((invoice, to))
        return None

    def body() -> Any:
        yield tool(Invoice(1, "ACME"), ("a",))
        yield tool({"number": 2, "customer": "ACME"}, ["b"])

    got: list[Any] = []
    ledger = bench.open()
    tool = way.tool(ledger, pay)
    way.run(ledger, body)
    assert got[0] == (Invoice(1, "ACME"), ("a",))
    assert got[1][0] == Invoice(2, "ACME")


def test_a_tool_is_registered_under_its_name_once(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    def fetch() -> None: ...

    with pytest.raises(InvalidName, match="there is tool 'fetch' already"):
        ledger.tool(name="fetch")(lambda: None)
    ledger.tool(name="fetch 2")(lambda: None)
    ledger.agent(name="fetch")(lambda: None)  # agents have names of their own
    bench.open().tool(name="fetch")(lambda: None)  # and so has each ledger
    with pytest.raises(InvalidName, match="tool name"):
        ledger.tool(name=" ")(lambda: None)


def test_a_tools_name_is_never_its_module(bench: Bench, way: Way) -> None:
    def fetch() -> None: ...

    def body() -> Any:
        yield tool()
        yield named()

    ledger = bench.open()
    tool, named = way.tool(ledger, fetch), way.tool(ledger, fetch, name="other/name")
    way.run(ledger, body)
    assert [step.tool_name for step in ledger.steps(RUN)] == ["fetch", "other/name"]


def test_decorators_take_parentheses(bench: Bench) -> None:
    ledger = bench.open()
    for decorator in (ledger.tool, ledger.agent):
        with pytest.raises(InvalidArguments, match="takes parentheses"):
            decorator(lambda: None)


def test_what_cannot_be_a_tool_or_an_agent_is_refused_where_it_is_declared(bench: Bench) -> None:
    def generator() -> Iterator[int]:
        yield 1

    def positional(amount: int, /) -> None: ...

    def many(*amounts: int) -> None: ...

    ledger = bench.open()
    for function, said in ((generator, "generator"), (positional, "by keyword"), (many, "by keyword"), (5, "callable")):
        for decorator in (ledger.tool(name="a"), ledger.agent(name="b")):
            with pytest.raises(InvalidArguments, match=said):
                decorator(function)  # type: ignore[type-var]
    with pytest.raises(InvalidArguments, match="step_key"):
        ledger.tool(step_key="one")(lambda: None)
    with pytest.raises(InvalidArguments, match="there is no option speed"):
        ledger.tool(speed="high")(lambda: None)  # type: ignore[call-arg]
    with pytest.raises(InvalidArguments, match="budget="):
        ledger.agent(budget=5)(lambda: None)  # type: ignore[arg-type]


def test_a_registered_function_looks_like_the_one_below(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    def fetch(number: int) -> int:
        """Fetch it."""
        return number

    @ledger.tool(name="a")
    async def afetch(number: int) -> int:
        return number

    assert (fetch.__name__, fetch.__doc__) == ("fetch", "Fetch it.")
    assert list(inspect.signature(fetch).parameters) == ["number"]
    assert not inspect.iscoroutinefunction(fetch)
    assert inspect.isawaitable(made := afetch(1))
    assert asyncio.run(made) == 1


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
        got = []
        for _ in range(5):
            got.append((yield work(step_key="k")))
        return got

    assert spelling.way.run(ledger, body) == ["done"] * 5
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


# --- current_run, current_step, and a parameter annotated Run ---------------------------------------------------------


def test_nobody_is_in_a_run_outside_of_one(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    way.run(ledger, calling(lambda: current_run().step("a", {}, way.function(lambda: None))))
    with pytest.raises(RuntimeError, match="outside of a run"):
        current_run()
    with pytest.raises(RuntimeError, match="outside of a step"):
        current_step()


def test_an_agent_finds_its_run(bench: Bench, way: Way) -> None:
    def body() -> Any:
        assert current_run().run_id == RUN
        with pytest.raises(RuntimeError, match="outside of a step"):
            current_step()
        return (yield tool())

    def look() -> object:
        step = current_step()
        return [current_run().run_id, step.run_id, step.position, step.step_number, step.tool_name, step.attempt]

    ledger = bench.open()
    tool = way.tool(ledger, look)
    assert way.run(ledger, body) == [RUN, RUN, "1", 1, "look", 1]


def test_a_parameter_annotated_run_gets_the_run_and_is_no_argument(bench: Bench, way: Way) -> None:
    def body(month: str, run: Run, day: int = 1) -> Any:
        assert run is current_run()
        first = yield run.step("a", {"x": 1}, way.function(lambda: 2))
        return [first, run.run_id, month, day]

    ledger = bench.open()
    agent = way.agent(ledger, body)
    assert way.start(ledger, agent, "2026-10", day=3) == [2, RUN, "2026-10", 3]
    assert way.start(ledger, agent, "2026-10", day=3) == [2, RUN, "2026-10", 3]
    with pytest.raises(RunInputMismatch):
        way.start(ledger, agent, "2026-10", day=4)
    with pytest.raises(InvalidArguments, match="run"):
        way.start(ledger, agent, "2026-10", run=5, run_id="other")


def test_times_and_ids_are_the_same_at_replay(bench: Bench, way: Way) -> None:
    def body(run: Run) -> Any:
        seen.append([run.now(), run.random(), run.uuid4()])
        yield run.step("a", {}, way.function(lambda: None))
        raise Died

    seen: list[Any] = []
    for _ in range(2):
        ledger = bench.open()
        with pytest.raises(Died):
            way.run(ledger, body)
        bench.owners_die()
    assert seen[0] == seen[1]


# --- calls inside of a step -------------------------------------------------------------------------------------------


def nested(bench: Bench, way: Way, outer: Effect | None, inner: Effect | None) -> tuple[AgentRunLedger, Any]:
    """A run whose one step calls another tool."""

    def inside() -> object:
        return calls("inside")

    def outside() -> object:
        return [inner_tool(), current_step().tool_name]

    calls = Calls()
    ledger = bench.open()
    inner_tool = ledger.tool(effect=inner)(inside)
    outer_tool = way.tool(ledger, outside, effect=outer)
    return ledger, lambda: way.run(ledger, calling(outer_tool))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(None, None), (Effect.READ, Effect.READ), (Effect.MUTATE, Effect.MUTATE), (None, Effect.MUTATE)],
)
def test_a_tool_inside_of_a_step_is_a_plain_call(
    bench: Bench, way: Way, outer: Effect | None, inner: Effect | None
) -> None:
    ledger, run = nested(bench, way, outer, inner)
    assert run() == ["inside", "outside"]
    assert [step.tool_name for step in ledger.steps(RUN)] == ["outside"]


def test_a_mutation_inside_of_a_read_is_refused(bench: Bench, way: Way) -> None:
    _, run = nested(bench, way, Effect.READ, Effect.MUTATE)
    with pytest.raises(StepFailed, match="EffectConflict") as raised:
        run()
    assert isinstance(raised.value.__cause__, EffectConflict)


def test_a_step_of_the_same_run_inside_of_a_step_is_refused(bench: Bench, way: Way) -> None:
    def outside() -> object:
        with pytest.raises(UnorderedStep):
            current_run().step("inner", {}, lambda: None)
        with pytest.raises(UnorderedStep):
            current_run().now()
        with pytest.raises(UnorderedStep):
            current_run().gather(lambda: None)
        with pytest.raises(UnorderedStep), current_run().branch("b"):
            pass
        return "done"

    ledger = bench.open()
    tool = way.tool(ledger, outside)
    assert way.run(ledger, calling(tool)) == "done"
    assert positions(ledger) == ["1"]


def test_an_agent_inside_of_a_step_is_a_plain_call(bench: Bench, way: Way) -> None:
    def outside() -> object:
        return child(3)

    ledger = bench.open()
    child = ledger.agent(name="child")(lambda n: n + 1)
    tool = way.tool(ledger, outside)
    assert way.run(ledger, calling(tool)) == 4
    assert len(ledger.runs()) == 1


# --- running agents ---------------------------------------------------------------------------------------------------


def test_a_completed_run_returns_its_result_without_a_call_or_a_write(bench: Bench, way: Way) -> None:
    def body(n: int) -> Any:
        started.append(n)
        number = yield tool(n)
        return Invoice(number, "ACME")

    body.__annotations__["return"] = Invoice
    started: list[int] = []
    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    agent = way.agent(ledger, body)
    first = way.start(ledger, agent, 1)
    rows = bench.rows(RUN)
    second = way.start(ledger, agent, 1)
    bench.owners_die()
    other = bench.open()
    third = way.start(other, way.agent(other, body), 1)
    assert [first, second, third] == [Invoice(1, "ACME")] * 3
    assert (started, calls.seen) == ([1], [1])
    assert bench.rows(RUN) == rows


def test_the_first_result_is_what_a_replay_gets(bench: Bench, way: Way) -> None:
    def body() -> Any:
        yield current_run().step("a", {}, way.function(lambda: None))
        return Invoice(1, "ACME")

    ledger = bench.open()
    agent = way.agent(ledger, body, returns=dict[str, Any])
    first = way.start(ledger, agent)
    assert type(first) is dict
    assert way.start(ledger, agent) == first == {"number": 1, "customer": "ACME"}


class Upset(Exception):
    pass


def test_an_exception_of_the_agent_is_raised_as_itself_and_parks_the_run_which_goes_on(bench: Bench, way: Way) -> None:
    def body() -> Any:
        got = yield tool("a")
        if troubles:
            raise troubles.pop()
        return [got, (yield tool("b"))]

    trouble = Upset("not today")
    troubles = [trouble]
    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    agent = way.agent(ledger, body)
    with pytest.raises(Upset) as raised:
        way.start(ledger, agent)
    assert raised.value is trouble
    assert ledger.get_run(RUN).status == "BLOCKED"
    assert "not today" in (ledger.get_run(RUN).cause or "")
    assert way.start(ledger, agent) == ["a", "b"]
    assert calls.seen == ["a", "b"]
    assert ledger.get_run(RUN).status == "COMPLETED"


def test_a_parked_run_is_free_for_another_process_at_once(bench: Bench, way: Way) -> None:
    def body() -> Any:
        yield current_run().step("a", {}, way.function(lambda: 1))
        if is_first:
            raise Upset
        return "done"

    is_first = True
    ledger = bench.open()
    with pytest.raises(Upset):
        way.run(ledger, body)
    is_first = False
    assert way.run(bench.open(), body) == "done"


def test_a_run_that_another_process_works_on_is_not_run(bench: Bench, way: Way) -> None:
    def body() -> Any:
        other = bench.open()
        with pytest.raises(RunOwned):
            other.run(other.agent(name="body")(lambda: None), run_id=RUN)
        return (yield current_run().step("a", {}, way.function(lambda: 1)))

    assert way.run(bench.open(), body) == 1


def test_other_arguments_under_the_same_id_are_refused(bench: Bench, way: Way) -> None:
    def body(n: int) -> Any:
        yield current_run().step("a", {}, way.function(lambda: 1))

    def other(n: int) -> Any:
        yield current_run().step("a", {}, way.function(lambda: 1))

    ledger = bench.open()
    agent = way.agent(ledger, body)
    way.start(ledger, agent, 1)
    rows = bench.rows(RUN)
    with pytest.raises(RunInputMismatch, match="another input"):
        way.start(ledger, agent, 2)
    with pytest.raises(RunInputMismatch, match="another goal"):
        way.start(ledger, way.agent(ledger, other), 1)
    assert bench.rows(RUN) == rows


def test_arguments_of_agents_are_checked_before_a_run_is_made(bench: Bench, way: Way) -> None:
    def body(n: int) -> Any:
        yield None

    ledger = bench.open()
    agent = way.agent(ledger, body)
    for args, said in (
        (("x",), "'body': argument n: expected int, found str"),
        ((), "missing a required argument: 'n'"),
    ):
        with pytest.raises(InvalidArguments, match=said):
            way.start(ledger, agent, *args)
    assert ledger.runs() == []


def test_agents_get_their_arguments_as_a_replay_does(bench: Bench, way: Way) -> None:
    def body(invoice: Invoice, rest: Any) -> Any:
        seen.append((invoice, rest))
        yield current_run().step("a", {}, way.function(lambda: 1))
        raise Died

    seen: list[Any] = []
    invoice, rest = Invoice(1, "ACME"), {"tags": ("a", "b"), "at": datetime(2026, 10, 1, tzinfo=UTC)}
    for _ in range(2):
        ledger = bench.open()
        with pytest.raises(Died):
            way.run(ledger, body, invoice, rest)
        bench.owners_die()
    assert seen[0] == seen[1] == (invoice, rest)
    assert seen[0][0] is not invoice


def test_runs_that_ended_otherwise_are_closed(bench: Bench, way: Way) -> None:
    def body() -> Any:
        yield current_run().step("a", {}, way.function(lambda: 1))
        raise Upset

    ledger = bench.open()
    agent = way.agent(ledger, body)
    for run_id in ("failed", "cancelled"):
        with pytest.raises(Upset):
            way.start(ledger, agent, run_id=run_id)
    ledger.abort_run("failed", "enough")
    ledger.cancel("cancelled")
    for run_id in ("failed", "cancelled"):
        with pytest.raises(RunClosed, match=run_id.upper()):
            way.start(ledger, agent, run_id=run_id)


def test_a_run_gets_an_id_where_nobody_gives_one(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    agent = way.agent(ledger, calling(lambda: current_run().step("a", {}, way.function(lambda: 1))))
    assert way.start(ledger, agent, run_id=None) == 1
    assert way.start(ledger, agent, run_id=None) == 1
    first, second = ledger.runs()
    assert first.run_id != second.run_id
    assert first.run_id.startswith("run_")
    assert len(first.run_id) == 24


@pytest.mark.parametrize("run_id", ["", " ", "a\0b", "x" * 256])
def test_a_run_id_that_is_no_name_is_refused(bench: Bench, way: Way, run_id: str) -> None:
    ledger = bench.open()
    agent = way.agent(ledger, calling(lambda: None))
    with pytest.raises(InvalidName):
        way.start(ledger, agent, run_id=run_id)


def test_only_agents_are_run(bench: Bench) -> None:
    ledger = bench.open()
    tool = ledger.tool(name="tool")(lambda: None)
    for no_agent in (tool, lambda: None, 5, None):
        with pytest.raises(InvalidArguments, match="is no agent"):
            ledger.run(no_agent)  # type: ignore[arg-type]
        with pytest.raises(InvalidArguments, match="is no agent"):
            ledger.arun(no_agent)  # type: ignore[arg-type]


def test_an_agent_is_registered_under_its_name_once(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    def reconcile() -> None: ...

    with pytest.raises(InvalidName, match="there is agent 'reconcile' already"):
        ledger.agent(name="reconcile")(lambda: None)
    ledger.agent(name="reconcile 2")(lambda: None)


def test_an_agent_outside_of_a_run_is_a_plain_call(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = way.tool(ledger, lambda n: n + 1, name="tool")
    agent = way.agent(ledger, calling(lambda: tool(1)))
    got = agent()
    assert (asyncio.run(got) if way.is_async else got) == 2
    assert ledger.runs() == []


def test_a_result_that_cannot_be_stored_parks_the_run(bench: Bench, way: Way) -> None:
    def body() -> Any:
        yield tool()
        return float("nan") if is_first else 1.0

    is_first = True
    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, lambda: calls(1), name="tool")
    agent = way.agent(ledger, body)
    with pytest.raises(TypeError, match="the result of 'body'"):
        way.start(ledger, agent)
    assert ledger.get_run(RUN).status == "BLOCKED"
    is_first = False
    assert way.start(ledger, agent) == 1.0
    assert calls.seen == [1]


# --- sync and async ---------------------------------------------------------------------------------------------------


def test_an_async_agent_can_be_run_from_plain_code(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def double(n: int) -> int:
        return 2 * n

    @ledger.agent()
    async def agent(n: int) -> int:
        return await double(n)

    assert ledger.run(agent, 3, run_id=RUN) == 6
    assert ledger.steps(RUN)[0].output_json == "6"


def test_an_async_agent_is_not_run_where_a_loop_would_have_to_wait(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def agent() -> int:
        return 1

    async def main() -> None:
        with pytest.raises(InvalidArguments, match="arun"):
            ledger.run(agent, run_id=RUN)

    asyncio.run(main())
    assert ledger.runs() == []


def test_a_sync_agent_can_be_awaited_and_leaves_the_loop_free(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    def wait(n: int) -> int:
        assert gate.wait(LONG)
        return n

    @ledger.agent()
    def agent(n: int, run: Run) -> list[Any]:
        return [wait(n), run.run_id, current_run().run_id]

    async def main() -> Any:
        task = asyncio.create_task(ledger.arun(agent, 3, run_id=RUN))
        await asyncio.sleep(0)
        gate.set()  # somebody in the loop lets the agent go on
        return await task

    gate = threading.Event()
    assert asyncio.run(main()) == [3, RUN, RUN]


def test_an_async_agent_calls_sync_tools_and_a_sync_agent_no_async_ones(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    def plain(n: int) -> int:
        return n

    @ledger.agent()
    async def agent() -> int:
        return plain(2)

    assert ledger.run(agent, run_id=RUN) == 2
    assert positions(ledger) == ["1"]


def test_a_step_of_an_async_program_takes_plain_functions_too(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    async def agent(run: Run) -> list[int]:
        async def one() -> int:
            return 1

        return [await run.step("a", {}, one), await run.step("b", {}, lambda: 2)]

    assert ledger.run(agent, run_id=RUN) == [1, 2]


def test_an_async_function_in_a_sync_program_is_refused_before_anything_happens(bench: Bench) -> None:
    ledger = bench.open()

    async def one() -> int:
        return 1

    with ledger.open_run(GOAL, RUN) as run:
        with pytest.raises(InvalidArguments, match="async"):
            run.step("a", {}, one)
        assert run.step("b", {}, lambda: current_step().position) == "1"


# --- twice at once ----------------------------------------------------------------------------------------------------


def test_a_second_run_in_another_thread_waits_for_the_first_and_gets_its_result(bench: Bench) -> None:
    ledger = bench.open()
    began, go_on = threading.Event(), threading.Event()
    calls = Calls()

    @ledger.tool()
    def work() -> Any:
        began.set()
        assert go_on.wait(LONG)
        return calls("done")

    @ledger.agent()
    def agent() -> Any:
        return work()

    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(ledger.run(agent, run_id=RUN))) for _ in range(3)]
    threads[0].start()
    assert began.wait(LONG)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(LONG)
    assert got == ["done"] * 3
    assert calls.seen == ["done"]


def test_a_second_run_in_another_task_waits_for_the_first_and_gets_its_result(bench: Bench) -> None:
    ledger = bench.open()
    calls = Calls()

    @ledger.tool()
    async def work() -> Any:
        for _ in range(50):
            await asyncio.sleep(0)
        return calls("done")

    @ledger.agent()
    async def agent() -> Any:
        return await work()

    async def main() -> Any:
        return await asyncio.gather(*(ledger.arun(agent, run_id=RUN) for _ in range(3)))

    assert asyncio.run(main()) == ["done"] * 3
    assert calls.seen == ["done"]


def test_a_second_run_goes_on_where_the_first_failed(bench: Bench) -> None:
    ledger = bench.open()
    calls = Calls()

    @ledger.tool()
    async def work() -> Any:
        return calls("done")

    @ledger.agent()
    async def agent() -> Any:
        got = await work()
        await asyncio.sleep(0)
        if troubles:
            raise troubles.pop()
        return got

    troubles = [Upset("the first")]

    async def main() -> Any:
        return await asyncio.gather(*(ledger.arun(agent, run_id=RUN) for _ in range(2)), return_exceptions=True)

    first, second = asyncio.run(main())
    assert isinstance(first, Upset)
    assert second == "done"
    assert calls.seen == ["done"]


def test_a_program_does_not_run_its_own_run(bench: Bench, way: Way) -> None:
    def body() -> Any:
        with pytest.raises(UnorderedStep, match="its own program"):
            ledger.run(me, run_id=RUN)
        return (yield current_run().step("a", {}, way.function(lambda: 1)))

    ledger = bench.open()
    me = ledger.agent(name="me")(lambda: None)
    assert way.run(ledger, body) == 1


def test_many_runs_in_one_loop_do_not_mix(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.tool()
    async def work(n: int) -> list[Any]:
        await asyncio.sleep(0)
        return [n, current_run().run_id, current_step().run_id]

    @ledger.agent()
    async def agent(n: int) -> list[Any]:
        return [await work(n), await work(n + 1)]

    async def main() -> Any:
        return await asyncio.gather(*(ledger.arun(agent, n, run_id=f"run {n}") for n in range(20)))

    got = asyncio.run(main())
    assert got == [[[n, f"run {n}", f"run {n}"], [n + 1, f"run {n}", f"run {n}"]] for n in range(20)]
    assert all(positions(ledger, f"run {n}") == ["1", "2"] for n in range(20))
