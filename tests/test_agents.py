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
            return fn(*args, **kwargs)

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
        ledger.tool(speed="high")  # type: ignore[call-arg]
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
        """What a program is told that makes the call so many times and goes on whatever comes."""
        work = self(ledger, fn, **options)
        got: list[Any] = []

        def body() -> Any:
            for _ in range(times):
                try:
                    got.append((yield work()))
                except Exception as error:
                    got.append(error)
            yield current_run().step("the end", {}, self.way.function(lambda: None))

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
    forever = threading.Event()
    try:
        if spelling.way.is_async:  # a coroutine that never ends is cancelled; a thread is left to itself
            spelling.way.function = lambda fn: _like(fn, _sleeper(fn))  # type: ignore[method-assign]
        got = spelling.told(bench.open(), forever.wait, timeout=0.001)
        bench.owners_die()
        ledger = bench.open()
        again = spelling.told(ledger, forever.wait, timeout=0.001)
    finally:
        forever.set()
    assert type(got[0]) is StepFailed
    assert str(got[0]) == "Tool execution failed: TimeoutError: no result within 0.001 s"
    assert [str(each) for each in again] == [str(each) for each in got]
