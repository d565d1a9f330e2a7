"""Face C: tools, agents and their runs, child runs and limits, in sync and async programs."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    EffectConflict,
    InvalidArguments,
    InvalidName,
    RetryPolicy,
    Run,
    RunClosed,
    RunInputMismatch,
    RunOwned,
    StepFailed,
    StoreUnavailable,
    UnorderedStep,
    current_run,
    current_step,
)
from support.ledgers import Bench, Died
from support.programs import GOAL, LONG, RUN, Body, Calls, Invoice, Upset, Way, calling, dies, mortal, positions

# --- tools ------------------------------------------------------------------------------------------------------------


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


ONLY_CHECKED = """
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from somewhere import Somewhat
    from agent_run_ledger import Run

def agent(number: int, other: Somewhat, *, run: Run) -> Somewhat:
    return [number, other, run.run_id]
"""


def test_a_run_is_given_where_its_class_is_imported_for_type_checkers_only(bench: Bench) -> None:
    module: dict[str, Any] = {"__name__": "a_module"}
    exec(ONLY_CHECKED, module)
    ledger = bench.open()
    agent = ledger.agent()(module["agent"])
    assert ledger.run(agent, 1, "x", run_id=RUN) == [1, "x", RUN]
    with pytest.raises(
        InvalidArguments, match="argument number: expected int, found str"
    ):  # the others are still known
        ledger.run(agent, "1", "x", run_id="other")


def test_an_annotation_that_is_a_class_and_one_that_is_its_name_give_the_run(bench: Bench) -> None:
    ledger = bench.open()

    @ledger.agent()
    def by_name(n: int, run: Run) -> str:
        return run.run_id

    def by_class(n: int, run: Any) -> str:
        return str(run.run_id)

    by_class.__annotations__ = {"n": int, "run": Run, "return": str}
    assert ledger.run(by_name, 1, run_id="a") == "a"
    assert ledger.run(ledger.agent()(by_class), 1, run_id="b") == "b"


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
        return {"number": 1, "customer": "ACME"}

    ledger = bench.open()
    agent = way.agent(ledger, body, returns=Invoice)
    assert way.start(ledger, agent) == Invoice(1, "ACME")
    assert way.start(ledger, agent) == Invoice(1, "ACME")


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
        agent = other.agent(name="body")(lambda: None)
        with pytest.raises(RunOwned):
            contextvars.Context().run(other.run, agent, run_id=RUN)
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


# --- child runs -------------------------------------------------------------------------------------------------------


class Family:
    """A parent with a child of two steps, in a process that dies where it is told."""

    def __init__(self, bench: Bench, way: Way) -> None:
        self.bench = bench
        self.way = way
        self.calls = Calls()

    def life(self, *, die_in: str = "", child: Body | None = None, catches: bool = False) -> Any:
        bench, way, calls = self.bench, self.way, self.calls
        self.ledger, self.die = mortal(bench)

        def work(what: str) -> object:
            calls(what)
            if what == die_in:
                self.die()
            return what.upper()

        def child_of(n: int) -> Any:
            return [n, (yield tool(f"child {n} a")), (yield tool(f"child {n} b"))]

        def parent() -> Any:
            first = yield tool("parent a")
            try:
                second = yield child_agent(1)
            except StepFailed as error:
                if not catches:
                    raise
                second = str(error)
            return [first, second, (yield tool("parent b"))]

        tool = way.tool(self.ledger, work, effect=Effect.IDEMPOTENT)
        child_agent = way.agent(self.ledger, child or child_of)
        try:
            return way.start(self.ledger, way.agent(self.ledger, parent))
        finally:
            bench.owners_die()

    @property
    def child(self) -> Any:
        (child,) = (run for run in self.bench.open().runs() if run.parent_run_id is not None)
        return child


@pytest.fixture
def family(bench: Bench, way: Way) -> Family:
    return Family(bench, way)


RESULT = ["PARENT A", [1, "CHILD 1 A", "CHILD 1 B"], "PARENT B"]
ALL = ["parent a", "child 1 a", "child 1 b", "parent b"]


def test_an_agent_inside_of_an_agent_is_a_run_of_its_own(bench: Bench, family: Family) -> None:
    assert family.life() == RESULT
    assert family.calls.seen == ALL
    ledger = bench.open()
    assert family.child.parent_run_id == RUN
    assert family.child.status == "COMPLETED"
    assert family.child.goal == "child_of"
    assert [step.tool_name for step in ledger.steps(RUN)] == ["work", "child_of", "work"]
    assert [step.tool_name for step in ledger.steps(family.child.run_id)] == ["work", "work"]
    assert ledger.get_run(RUN).parent_run_id is None
    assert ledger.verify().ok


@pytest.mark.parametrize("die_in", ALL)
def test_a_crash_anywhere_and_no_completed_step_starts_again(family: Family, die_in: str) -> None:
    with pytest.raises((Died, StoreUnavailable)):
        family.life(die_in=die_in)
    assert family.life() == RESULT
    assert family.calls.seen == [what for each in ALL for what in ([each] * 2 if each == die_in else [each])]
    assert family.child.status == "COMPLETED"


def test_many_crashes_in_a_child_do_not_spend_the_attempts_of_its_parent(bench: Bench, way: Way) -> None:
    family = Family(bench, way)
    steps = [f"{n}" for n in range(8)]

    def child(n: int) -> Any:
        done = 0
        for step in steps:
            assert (yield current_run().step(step, {}, way.function(crash_once(step)), effect=Effect.READ)) == step
            done += 1
        return done

    def crash_once(step: str) -> Callable[[], object]:
        def work() -> object:
            family.calls(step)
            if family.calls.seen.count(step) == 1:
                family.die()
            return step

        return work

    for _ in steps:
        with pytest.raises(Died):
            family.life(child=child)
    assert family.life(child=child)[1] == len(steps)
    assert [call for call in family.calls.seen if call in steps] == [step for step in steps for _ in range(2)]


def test_a_failure_of_a_child_is_a_failed_step_of_its_parent(family: Family) -> None:
    def child(n: int) -> Any:
        yield current_run().step("a", {}, family.way.function(lambda: None))
        raise Upset("the child's")

    got = family.life(child=child, catches=True)
    assert got == ["PARENT A", "Tool execution failed: Upset: the child's", "PARENT B"]
    assert family.child.status == "BLOCKED"
    assert family.bench.open().get_run(RUN).status == "COMPLETED"


def test_a_child_whose_failure_nobody_acted_upon_goes_on_when_the_parent_is_run_again(family: Family) -> None:
    troubles: list[Exception] = [Upset("the child's")]

    def child(n: int) -> Any:
        got = yield current_run().step("a", {}, family.way.function(lambda: family.calls("child a")))
        if troubles:
            raise troubles.pop()
        return got

    with pytest.raises(StepFailed, match="the child's"):
        family.life(child=child)
    assert family.life(child=child) == ["PARENT A", "child a", "PARENT B"]
    assert family.calls.seen == ["parent a", "child a", "parent b"]


def test_children_are_mapped(bench: Bench, way: Way) -> None:
    def child(n: int) -> Any:
        return [n, (yield tool(n))]

    def parent(run: Run) -> Any:
        return (yield run.map(child_agent, [1, 2, 3], concurrency=2))

    ledger = bench.open()
    calls = Calls()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    child_agent = way.agent(ledger, child)
    agent = way.agent(ledger, parent)
    assert way.start(ledger, agent) == [[1, 1], [2, 2], [3, 3]]
    assert way.start(ledger, agent) == [[1, 1], [2, 2], [3, 3]]
    assert sorted(calls.seen) == [1, 2, 3]
    assert [run.parent_run_id for run in ledger.runs()] == [None, RUN, RUN, RUN]
    assert sorted(positions(ledger)) == ["1.1.1", "1.2.1", "1.3.1"]


def test_a_child_has_its_own_budget(bench: Bench, way: Way) -> None:
    def child() -> Any:
        for n in range(5):
            yield tool(n)

    def parent() -> Any:
        with pytest.raises(StepFailed, match="BudgetExceededException"):
            yield child_agent()
        yield tool(9)
        return "done"

    ledger = bench.open()
    calls = Calls()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    child_agent = way.agent(ledger, child, budget=Budget(steps=2))
    assert way.run(ledger, parent) == "done"
    assert calls.seen == [0, 1, 9]


def test_childrens_arguments_are_checked_before_anything_happens(bench: Bench, way: Way) -> None:
    def child(n: int) -> Any:
        yield None

    def parent() -> Any:
        with pytest.raises(InvalidArguments, match="'child': argument n"):
            child_agent("x")
        return (yield current_run().step("a", {}, way.function(lambda: 1)))

    ledger = bench.open()
    child_agent = way.agent(ledger, child)
    assert way.run(ledger, parent) == 1
    assert positions(ledger) == ["1"]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_agents_budget_of_steps_ends_its_run(bench: Bench, way: Way) -> None:
    def body() -> Any:
        for n in range(9):
            yield tool(n)

    ledger = bench.open(max_steps=3)
    calls = Calls()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    agent = way.agent(ledger, body, budget=Budget(steps=5))
    with pytest.raises(BudgetExceededException):
        way.start(ledger, agent)
    assert calls.seen == [0, 1, 2, 3, 4]
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    with pytest.raises(RunClosed, match="DEAD_LETTER"):
        way.start(ledger, agent)
    other = way.agent(ledger, body, name="without a budget")
    with pytest.raises(BudgetExceededException):
        way.start(ledger, other, run_id="other")
    assert calls.seen == [0, 1, 2, 3, 4, 0, 1, 2]


def test_nothing_is_dispatched_after_the_deadline(bench: Bench, way: Way) -> None:
    def body() -> Any:
        yield tool(1)
        bench.clock.advance(3600)
        yield tool(2)

    def due() -> datetime:
        return datetime.fromtimestamp(bench.clock.now() + 60, UTC)

    calls = Calls()
    for budget, options in ((Budget(deadline=due()), {}), (None, {"budget": Budget(deadline=due())})):
        ledger = bench.open(budget=budget)
        tool = way.tool(ledger, lambda n: calls(n), name="tool")
        agent = way.agent(ledger, body, **options)
        with pytest.raises(BudgetExceededException, match="deadline"):
            way.start(ledger, agent, run_id=f"{budget is None}")
        assert ledger.get_run(f"{budget is None}").status == "DEAD_LETTER"
        bench.clock.set_wall(bench.clock.now() - 3600)
    assert calls.seen == [1, 1]


def test_a_retry_after_the_deadline_is_not_made(bench: Bench, way: Way) -> None:
    def work() -> object:
        bench.clock.advance(3600)
        return calls()

    calls = Calls(ValueError("1"))
    due = datetime.fromtimestamp(bench.clock.now() + 60, UTC)
    ledger = bench.open(budget=Budget(deadline=due))
    tool = way.tool(ledger, work, retry=RetryPolicy())
    with pytest.raises(BudgetExceededException, match="deadline"):
        way.run(ledger, calling(tool))
    assert len(calls.seen) == 1
    assert ledger.get_run(RUN).status == "DEAD_LETTER"


def test_a_replay_after_the_deadline_gives_what_is_recorded(bench: Bench, way: Way) -> None:
    def body() -> Any:
        got = yield tool(1)
        end()
        return got

    due = datetime.fromtimestamp(bench.clock.now() + 60, UTC)
    calls = Calls()
    ledger, end = mortal(bench)
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    with dies(bench):
        way.run(ledger, body, budget=Budget(deadline=due))
    bench.clock.advance(3600)
    ledger, end = bench.open(), lambda: None
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    assert way.run(ledger, body, budget=Budget(deadline=due)) == 1
    assert calls.seen == [1]


# --- open_run ---------------------------------------------------------------------------------------------------------


def opened(way: Way, ledger: AgentRunLedger, body: Body) -> Any:
    """What the body returns as the program of `with ledger.open_run(...)`, or `async with`."""
    program = way.program(body)
    if not way.is_async:
        with ledger.open_run(GOAL, RUN) as run:
            run.result = program()
        return run.result

    async def main() -> Any:
        async with ledger.open_run(GOAL, RUN) as run:
            run.result = await program()
        return run.result

    return asyncio.run(main())


def test_tools_are_steps_inside_of_an_open_run_and_plain_behind_it(bench: Bench, way: Way) -> None:
    def body() -> Any:
        return [(yield tool(1)), (yield current_run().step("other", {}, way.function(lambda: 2)))]

    ledger = bench.open()
    tool = way.tool(ledger, lambda n: n, name="tool")
    assert opened(way, ledger, body) == [1, 2]
    assert [step.tool_name for step in ledger.steps(RUN)] == ["tool", "other"]
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).result) == ("COMPLETED", [1, 2])
    with pytest.raises(RuntimeError):
        current_run()


def test_an_exception_parks_an_open_run_which_goes_on_when_it_is_opened_again(bench: Bench, way: Way) -> None:
    def body() -> Any:
        got = yield tool(1)
        if troubles:
            raise troubles.pop()
        return got

    troubles = [Upset("no")]
    calls = Calls()
    ledger = bench.open()
    tool = way.tool(ledger, lambda n: calls(n), name="tool")
    with pytest.raises(Upset):
        opened(way, ledger, body)
    assert ledger.get_run(RUN).status == "BLOCKED"
    assert opened(way, ledger, body) == 1
    assert calls.seen == [1]
    assert ledger.get_run(RUN).status == "COMPLETED"


def test_an_agent_inside_of_an_open_run_is_a_child(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = way.tool(ledger, lambda: 1, name="tool")
    agent = way.agent(ledger, calling(tool))
    assert opened(way, ledger, calling(agent)) == 1
    assert [run.parent_run_id for run in ledger.runs()] == [None, RUN]
