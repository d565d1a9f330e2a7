"""Face A: one pipeline, one run. How values find their parameters, and what a rerun does."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import itertools
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from typing import Any

import anyio
import hypothesis
import pydantic
import pytest
from hypothesis import strategies

from agent_run_ledger import (
    AttemptsExhausted,
    Effect,
    InvalidArguments,
    InvalidName,
    InvalidPipeline,
    LedgerError,
    PlainDataWarning,
    ReplayDivergence,
    RetryPolicy,
    RunClosed,
    RunInputMismatch,
    RunLedger,
    RunOwned,
    Step,
    StepFailed,
    StepInDoubt,
    UndeclaredEffectWarning,
    UnserialisableArguments,
    UnserialisableOutput,
    current_step,
)
from agent_run_ledger.engine.effects import Result
from agent_run_ledger.pipeline import Schedule
from support.ledgers import Bench, Died, told

RUN = "audit"


class Calls(list[str]):
    """Which functions were called, in order."""

    def one(self, name: str, answer: Any = None) -> Any:
        self.append(name)
        if isinstance(answer, BaseException):
            raise answer
        return name if answer is None else answer


# --- binding ----------------------------------------------------------------------------------------------------------


def test_keywords_are_bound_by_name_and_outputs_by_the_name_of_the_dependency(bench: Bench) -> None:
    def fetch(company: str) -> str:
        return f"data of {company}"

    def report(fetch: str, company: str, *, year: int) -> list[Any]:
        return [fetch, company, year]

    ledger = bench.pipeline(RUN, Step("fetch", fetch), Step("report", report, ["fetch"]))
    assert ledger.execute(company="acme", year=2026) == ["data of acme", "acme", 2026]


def test_parameters_that_are_left_take_the_outputs_of_the_dependencies_in_order(bench: Bench) -> None:
    ledger = bench.pipeline(
        RUN,
        Step("one", lambda: 1),
        Step("two", lambda: 2),
        Step("three", lambda: 3),
        Step("last", lambda a, two, b: [a, two, b], ["three", "two", "one"]),
    )
    assert ledger.execute() == [3, 2, 1]


def test_an_output_that_nobody_has_a_parameter_for_is_order_only(bench: Bench) -> None:
    calls = Calls()
    ledger = bench.pipeline(
        RUN, Step("last", lambda: calls.one("last"), ["first"]), Step("first", lambda: calls.one("first"))
    )
    assert ledger.execute() == "last"
    assert calls == ["first", "last"]


def test_a_default_is_used_where_nothing_is_given_and_not_where_something_is(bench: Bench) -> None:
    def step(a: int = 1, b: int = 2) -> list[int]:
        return [a, b]

    assert bench.pipeline("one", Step("s", step)).execute() == [1, 2]
    assert bench.pipeline("two", Step("s", step)).execute(b=5) == [1, 5]


def test_one_sink_gives_its_output_and_several_give_a_dict(bench: Bench) -> None:
    steps = [Step("a", lambda: 1), Step("b", lambda a: a + 1, ["a"]), Step("c", lambda a: a + 2, ["a"])]
    for _ in range(2):
        assert bench.pipeline("one", *steps[:2]).execute() == 2
        assert bench.pipeline("many", *steps).execute() == {"b": 2, "c": 3}


def test_steps_run_after_those_they_depend_on_and_else_as_they_were_registered(bench: Bench) -> None:
    calls = Calls()
    graph = {"d": ["b", "c"], "a": [], "c": ["a"], "b": ["a"], "e": []}

    def calling(name: str) -> Callable[[], Any]:
        return lambda: calls.one(name)

    bench.pipeline(RUN, *(Step(name, calling(name), needs) for name, needs in graph.items())).execute()
    assert sorted(calls) == sorted(graph)
    for name, needs in graph.items():
        assert all(calls.index(need) < calls.index(name) for need in needs)
    assert calls[0] == "a"
    assert calls.index("c") < calls.index("b")


def test_a_decorated_function_is_plain_when_it_is_called_outside_a_run(bench: Bench) -> None:
    ledger = bench.pipeline(RUN)

    @ledger.step()
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    assert ledger.execute(x=1) == 2
    assert [step.tool_name for step in ledger.steps(RUN)] == ["double"]


def test_the_function_of_a_step_knows_its_position_and_key(bench: Bench) -> None:
    def step() -> list[Any]:
        here = current_step()
        return [here.position, here.tool_name, here.step_number, here.attempt, len(here.idempotency_key)]

    assert bench.pipeline(RUN, Step("first", lambda: 0), Step("s", step, ["first"])).execute() == ["s", "s", 2, 1, 64]


# --- types ------------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    FULL = "full"


@dataclass
class Figures:
    total: Decimal
    day: dt.date


class Report(pydantic.BaseModel):
    kind: Kind
    figures: list[Figures]


def test_typed_inputs_outputs_and_results_are_rebuilt_live_and_at_replay(bench: Bench) -> None:
    seen: list[Any] = []

    def fetch(kind: Kind, day: dt.date) -> list[Figures]:
        return [Figures(Decimal("1.10"), day)]

    def report(kind: Kind, data: list[Figures]) -> Report:
        seen.append((kind, data))
        if len(seen) == 1:
            raise Died
        return Report(kind=kind, figures=data)

    results = []
    for life in range(3):
        ledger = bench.pipeline(RUN, Step("fetch", fetch), Step("report", report, ["fetch"], effect=Effect.READ))
        if life == 0:
            with pytest.raises(Died):
                ledger.execute(kind=Kind.FULL, day=dt.date(2026, 10, 1))
        else:
            results.append(ledger.execute(kind=Kind.FULL, day=dt.date(2026, 10, 1)))
    figures = [Figures(Decimal("1.10"), dt.date(2026, 10, 1))]
    assert seen == [(Kind.FULL, figures)] * 2
    assert results == [Report(kind=Kind.FULL, figures=figures)] * 2


def test_a_parameter_without_an_annotation_takes_an_output_as_what_it_was_returned_as(bench: Bench) -> None:
    def figures() -> Figures:
        return Figures(Decimal(1), dt.date(2026, 10, 1))

    steps = [
        Step("figures", figures),
        Step("plain", lambda: {"x": 1}),
        Step("sum", lambda data, plain: [type(data).__name__, plain], ["figures", "plain"]),
    ]
    assert bench.pipeline(RUN, *steps).execute() == ["Figures", {"x": 1}]


def test_a_step_of_an_undeclared_class_gets_plain_data_and_a_warning_says_so(bench: Bench) -> None:
    local: Any = make_dataclass(f"Undeclared_{bench.kind}", [("amount", int)])
    with told(PlainDataWarning) as warnings:
        assert bench.pipeline(RUN, Step("a", lambda: local(1)), Step("b", lambda a: a, ["a"])).execute() == {
            "amount": 1
        }
    assert len(warnings) == 1


# --- refused before anything runs -------------------------------------------------------------------------------------


def wrong_pipelines(calls: Calls) -> dict[str, tuple[list[Step], dict[str, Any], type[LedgerError], str]]:
    def take(x: int) -> Any:
        return calls.one("take", x)

    def first() -> Any:
        return calls.one("first")

    return {
        "a cycle": ([Step("f", first), Step("a", first, ["b"]), Step("b", first, ["a"])], {}, InvalidPipeline, "circle"),
        "itself": ([Step("a", first, ["a"])], {}, InvalidPipeline, "circle"),
        "an unknown dependency": ([Step("f", first), Step("a", first, ["z"])], {}, InvalidPipeline, "'z', which is no step"),
        "no steps": ([], {}, InvalidPipeline, "no steps"),
        "a missing argument": ([Step("f", first), Step("t", take)], {}, InvalidArguments, "parameter 'x'"),
        "an extra argument": ([Step("f", first), Step("t", take)], {"x": 1, "y": 2}, InvalidArguments, "'y'"),
        "an argument named as a dependency": (
            [Step("x", first), Step("t", take, ["x"])], {"x": 1}, InvalidArguments, "'x'",
        ),
        "an argument that cannot be stored": (
            [Step("f", first), Step("t", take)], {"x": object()}, UnserialisableArguments, r"\$\.input\.x",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("what", wrong_pipelines(Calls()))
def test_what_cannot_work_is_refused_before_anything_runs(bench: Bench, what: str) -> None:
    calls = Calls()
    steps, given, error, says = wrong_pipelines(calls)[what]
    ledger = bench.pipeline(RUN, *steps)
    with pytest.raises(error, match=says):
        ledger.execute(**given)
    assert calls == []
    assert ledger.runs() == []


def test_a_step_that_makes_no_sense_is_refused_where_it_is_made(bench: Bench) -> None:
    ledger = bench.pipeline(RUN, Step("a", lambda: 1))
    with pytest.raises(InvalidPipeline, match="already"):
        ledger.step(name="a")(lambda: 2)
    with pytest.raises(InvalidPipeline, match="list of step names"):
        Step("b", lambda: 1, depends_on="a")
    with pytest.raises(InvalidPipeline, match="step_key"):
        Step("b", lambda: 1, step_key="call_7")
    with pytest.raises(InvalidPipeline, match="generator"):
        Step("b", lambda: (yield))
    with pytest.raises(InvalidName):
        Step("", lambda: 1)
    with pytest.raises(InvalidArguments, match="not callable"):
        Step("b", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="effect="):
        Step("b", lambda: 1, effect="write")  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        RunLedger("", bench.path)


# --- reruns -----------------------------------------------------------------------------------------------------------


def two_steps(bench: Bench, calls: Calls, second: Any = "two", **options: Any) -> RunLedger:
    def fetch(n: int) -> str:
        return str(calls.one("fetch", "one"))

    def post(fetch: str) -> str:
        return str(calls.one("post", second))

    return bench.pipeline(RUN, Step("fetch", fetch), Step("post", post, ["fetch"], **options))


def test_a_step_that_has_an_outcome_is_not_called_again_and_the_one_that_failed_is(bench: Bench) -> None:
    calls = Calls()
    with pytest.raises(StepFailed, match="ValueError: no"):
        two_steps(bench, calls, ValueError("no")).execute(n=1)
    record = two_steps(bench, calls).get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert record.cause is not None
    assert "ValueError: no" in record.cause
    assert two_steps(bench, calls).execute(n=1) == "two"
    assert calls == ["fetch", "post", "post"]


def test_a_completed_pipeline_gives_its_result_without_a_call_a_write_or_a_claim(bench: Bench) -> None:
    calls = Calls()
    ledger = two_steps(bench, calls)
    assert ledger.execute(n=1) == "two"
    before = bench.rows(RUN), ledger.get_run(RUN)
    for again in (ledger, two_steps(bench, calls), ledger):
        assert again.execute(n=1) == "two"
    assert calls == ["fetch", "post"]
    assert (bench.rows(RUN), ledger.get_run(RUN)) == before


@pytest.mark.parametrize("given", [{"n": 2}, {"n": 1.0}, {"n": "1"}])
def test_another_input_under_the_same_id_is_refused(bench: Bench, given: dict[str, Any]) -> None:
    calls = Calls()
    two_steps(bench, calls).execute(n=1)
    before = bench.rows(RUN)
    with pytest.raises(RunInputMismatch, match="another input"):
        two_steps(bench, calls).execute(**given)
    assert calls == ["fetch", "post"]
    assert bench.rows(RUN) == before


def test_a_run_of_the_step_by_step_face_is_not_taken_for_a_pipeline(bench: Bench) -> None:
    bench.open().create_run("something else", RUN)
    bench.owners_die()
    with pytest.raises(RunInputMismatch, match="another goal"):
        two_steps(bench, Calls()).execute(n=1)


def test_a_pipeline_that_dies_in_a_step_goes_on_there(bench: Bench) -> None:
    calls = Calls()
    with pytest.raises(Died):
        two_steps(bench, calls, Died(), effect=Effect.READ).execute(n=1)
    bench.owners_die()
    assert two_steps(bench, calls, effect=Effect.READ).execute(n=1) == "two"
    assert calls == ["fetch", "post", "post"]


def test_a_pipeline_that_dies_in_a_mutation_is_blocked(bench: Bench) -> None:
    calls = Calls()
    with pytest.raises(Died):
        two_steps(bench, calls, Died(), effect=Effect.MUTATE).execute(n=1)
    for _ in range(3):
        bench.owners_die()
        with pytest.raises(StepInDoubt):
            two_steps(bench, calls, effect=Effect.MUTATE).execute(n=1)
    assert calls == ["fetch", "post"]
    assert two_steps(bench, calls).get_run(RUN).status == "BLOCKED"


def test_attempts_are_spent_by_reruns(bench: Bench) -> None:
    calls = Calls()
    for _ in range(4):
        with pytest.raises(StepFailed):
            two_steps(bench, calls, ValueError("no")).execute(n=1)
    with pytest.raises(AttemptsExhausted):
        two_steps(bench, calls, ValueError("no")).execute(n=1)
    with pytest.raises(RunClosed, match="DEAD_LETTER"):
        two_steps(bench, calls).execute(n=1)
    assert calls.count("post") == 4
    assert calls.count("fetch") == 1


def test_retries_are_made_within_one_execution(bench: Bench) -> None:
    answers: list[Any] = [ValueError("no"), ValueError("no"), "done"]
    calls = Calls()
    step = Step("s", lambda: calls.one("s", answers.pop(0)), retry=RetryPolicy(max_attempts=3))
    assert bench.pipeline(RUN, step).execute() == "done"
    assert len(calls) == 3


def test_an_output_that_cannot_be_stored_is_not_made_again(bench: Bench) -> None:
    calls = Calls()
    for _ in range(3):
        with pytest.raises(UnserialisableOutput):
            bench.pipeline(RUN, Step("s", lambda: calls.one("s", object()))).execute()
    assert calls == ["s"]


def test_the_breaker_does_not_mind_many_alike_steps(bench: Bench) -> None:
    steps = [Step(f"s{number}", lambda: None) for number in range(12)]
    assert bench.pipeline(RUN, *steps).execute() == {step.name: None for step in steps}


# --- other code -------------------------------------------------------------------------------------------------------


def failed_pipeline(bench: Bench, calls: Calls) -> None:
    """`a` and then `b` after `a` have outcomes; `c` failed."""
    steps = [
        Step("a", lambda: calls.one("a")),
        Step("b", lambda a: calls.one("b"), ["a"]),
        Step("c", lambda b: calls.one("c", ValueError("no")), ["b"]),
    ]
    with pytest.raises(StepFailed):
        bench.pipeline(RUN, *steps).execute()


def test_steps_without_an_intent_may_be_added_and_changed(bench: Bench) -> None:
    calls = Calls()
    failed_pipeline(bench, calls)
    steps = [
        Step("before", lambda: calls.one("before")),
        Step("a", lambda: calls.one("a")),
        Step("b", lambda a: calls.one("b"), ["a"]),
        Step("c", lambda b: calls.one("c"), ["b"]),
        Step("d", lambda c, before: [c, before], ["before", "c"]),
    ]
    assert bench.pipeline(RUN, *steps).execute() == ["c", "before"]
    assert calls == ["a", "b", "c", "before", "c"]


@pytest.mark.parametrize("change", ["missing", "rewired", "renamed", "order of dependencies"])
def test_a_recorded_step_that_is_missing_or_rewired_diverges_and_nothing_is_run(bench: Bench, change: str) -> None:
    calls = Calls()
    one = [Step("a", lambda: calls.one("a")), Step("x", lambda: calls.one("x"))]
    good = [
        *one,
        Step("b", lambda: calls.one("b"), ["a", "x"]),
        Step("c", lambda b: calls.one("c", ValueError(1)), ["b"]),
    ]
    with pytest.raises(StepFailed):
        bench.pipeline(RUN, *good).execute()
    made, before = len(calls), bench.rows(RUN)
    wrong = {
        "missing": [*one, Step("c", lambda: calls.one("c"))],
        "rewired": [
            Step("new", lambda: calls.one("new")),
            *one,
            Step("b", lambda: calls.one("b"), ["a"]),
            Step("c", lambda b: calls.one("c"), ["b"]),
        ],
        "renamed": [*one, Step("b2", lambda: calls.one("b"), ["a", "x"]), Step("c", lambda b2: calls.one("c"), ["b2"])],
        "order of dependencies": [*one, Step("b", lambda: calls.one("b"), ["x", "a"]), good[-1]],
    }[change]
    with pytest.raises(ReplayDivergence, match="'b'"):
        bench.pipeline(RUN, *wrong).execute()
    assert len(calls) == made
    assert bench.rows(RUN) == before
    record = bench.pipeline(RUN).get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    with pytest.raises(StepFailed):
        bench.pipeline(RUN, *good).execute()


def test_steps_added_after_the_end_change_no_result(bench: Bench) -> None:
    calls = Calls()

    def figures() -> Figures:
        calls.append("figures")
        return Figures(Decimal(1), dt.date(2026, 10, 1))

    first = Step("figures", figures)
    result = bench.pipeline(RUN, first).execute()
    more = [Step("mail", lambda figures: calls.one("mail"), ["figures"]), Step("log", lambda: calls.one("log"))]
    for added in ([], more[:1], more[1:], more):
        assert bench.pipeline(RUN, first, *added).execute() == result
    assert calls == ["figures"]
    with pytest.raises(ReplayDivergence):
        bench.pipeline(RUN, *more[1:]).execute()


def test_a_pipeline_that_another_owner_executes_is_owned(bench: Bench) -> None:
    other = two_steps(bench, Calls())

    def step() -> str:
        with pytest.raises(RunOwned):
            other.execute(n=1)
        with pytest.raises(RunOwned):
            ledger.execute(n=1)
        return "done"

    ledger = bench.pipeline(RUN, Step("s", lambda n: step()))
    assert ledger.execute(n=1) == "done"


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "2", None])
def test_max_parallel_is_a_whole_number_of_at_least_one(bench: Bench, wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_parallel is a whole number"):
        bench.pipeline(RUN, max_parallel=wrong)


# --- options of a step ------------------------------------------------------------------------------------------------


def test_a_parameter_idempotency_key_is_given_the_key_and_the_step_counts_as_idempotent(bench: Bench) -> None:
    keys: list[str] = []

    def post(amount: int, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise Died
        return idempotency_key

    for life in range(2):
        ledger = bench.pipeline(RUN, Step("post", post))
        if life == 0:
            with pytest.raises(Died):
                ledger.execute(amount=1)
            bench.owners_die()
        else:
            assert ledger.execute(amount=1) == keys[0]
    (step,) = ledger.steps(RUN)
    assert keys == [step.idempotency_key] * 2
    assert step.effect == Effect.IDEMPOTENT
    with pytest.raises(InvalidArguments, match="idempotency_key"):
        ledger.execute(amount=1, idempotency_key="mine")


def test_identity_and_kind_say_the_same_of_a_step_as_of_any_call(bench: Bench) -> None:
    calls = Calls()

    def ask(prompt: str, extra: dict[str, int]) -> str:
        return str(calls.one("ask", Died() if len(calls) == 0 else "answer"))

    options: Any = {"kind": "model", "identity": lambda given: given["prompt"]}
    with pytest.raises(Died):
        bench.pipeline(RUN, Step("extra", lambda: {"a": 1}), Step("ask", ask, ["extra"], **options)).execute(prompt="p")
    ledger = bench.pipeline(RUN, Step("extra", lambda: {"a": 1}), Step("ask", ask, ["extra"], **options))
    assert ledger.execute(prompt="p") == "answer"
    assert [step.effect for step in ledger.steps(RUN)] == [None, Effect.READ]


# --- side by side -----------------------------------------------------------------------------------------------------

WAYS = ("in threads", "as tasks", "sync steps in a loop")


class Meeting:
    """Steps that wait for each other, in threads or in tasks: nobody sleeps, and who waits in vain is an error."""

    def __init__(self, way: str) -> None:
        self.way = way
        self._events: dict[str, threading.Event] = {}

    def event(self, name: str) -> threading.Event:
        return self._events.setdefault(name, threading.Event())

    def step(
        self, name: str, depends_on: Any = (), *, after: str | None = None, answer: Any = None, **options: Any
    ) -> Step:
        """A step that waits for the end of the one called `after`, without depending on it."""

        def end() -> Any:
            self.event(f"{name} ends").set()
            if isinstance(answer, BaseException):
                raise answer
            return answer() if callable(answer) else name if answer is None else answer

        def sync() -> Any:
            self.event(f"{name} begins").set()
            if after is not None:
                assert self.event(after).wait(20), f"{name} waited in vain for: {after}"
            return end()

        async def asynchronous() -> Any:
            self.event(f"{name} begins").set()
            for _ in range(200_000):
                if after is None or self.event(after).is_set():
                    return end()
                await asyncio.sleep(0)
            pytest.fail(f"{name} waited in vain for: {after}")

        return Step(name, asynchronous if self.way == "as tasks" else sync, depends_on, **options)

    def execute(self, ledger: RunLedger, **given: Any) -> Any:
        if self.way == "sync steps in a loop":
            return asyncio.run(ledger.aexecute(**given))
        return ledger.execute(**given)


@pytest.fixture(params=WAYS)
def meeting(request: pytest.FixtureRequest) -> Meeting:
    return Meeting(request.param)


@strategies.composite
def graphs(draw: strategies.DrawFn) -> list[Step]:
    async def asynchronous() -> None: ...

    steps: list[Step] = []
    for number in range(draw(strategies.integers(1, 9))):
        needs = draw(strategies.lists(strategies.sampled_from(steps), unique=True)) if steps else []
        function = draw(strategies.sampled_from([asynchronous, lambda: None]))
        steps.append(Step(f"s{number}", function, [need.name for need in needs]))
    return steps


@hypothesis.given(graphs(), strategies.integers(1, 3), strategies.data())
def test_a_step_begins_once_as_soon_as_it_can_and_never_before(
    steps: list[Step], at_once: int, data: strategies.DataObject
) -> None:
    schedule = Schedule(steps, at_once)
    running: list[Step] = []
    begun: list[str] = []
    while True:
        for step in schedule.begin():
            assert step.name not in begun
            begun.append(step.name)
            running.append(step)
        plain = [step for step in running if not step.takes.is_async]
        assert len(plain) <= at_once
        for step in steps:
            can = step.name not in begun and set(step.depends_on) <= schedule.outputs.keys()
            assert not can or (not step.takes.is_async and len(plain) == at_once)
        for step in running:
            assert set(step.depends_on) <= schedule.outputs.keys()
        if not running:
            break
        ended = running.pop(data.draw(strategies.integers(0, len(running) - 1)))
        schedule.ended(ended, Result(ended.name, None))
    assert schedule.outputs == {step.name: step.name for step in steps}
    assert schedule.error is None


@hypothesis.given(graphs(), strategies.data())
def test_the_error_is_that_of_the_first_step_in_order_and_nothing_begins_after_one(
    steps: list[Step], data: strategies.DataObject
) -> None:
    schedule = Schedule(steps, 3)
    running = schedule.begin()
    failed: list[Step] = []
    for step in data.draw(strategies.permutations(running)):
        if data.draw(strategies.booleans()):
            failed.append(step)
            schedule.ended(step, Result(None, ValueError(step.name)))
        else:
            schedule.ended(step, Result(step.name, None))
        if failed:
            assert schedule.begin() == []
            assert str(schedule.error) == min(step.name for step in failed)


def test_an_interruption_is_not_hidden_behind_a_failure() -> None:
    steps = [Step("a", lambda: 1), Step("b", lambda: 1)]
    schedule = Schedule(steps, 2)
    schedule.begin()
    schedule.ended(steps[0], Result(None, ValueError()))
    schedule.ended(steps[1], Result(None, KeyboardInterrupt()))
    assert isinstance(schedule.error, KeyboardInterrupt)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_outputs_find_their_parameters_whatever_ends_first(
    bench: Bench, meeting: Meeting, order: tuple[str, ...]
) -> None:
    before = dict(zip(order[1:], order, strict=False))
    steps = [meeting.step(name, after=f"{before[name]} ends" if name in before else None) for name in "abc"]
    steps.append(Step("sum", lambda a, b, c: [a, b, c], ["a", "b", "c"]))
    for _ in range(2):
        assert meeting.execute(bench.pipeline(RUN, *steps, max_parallel=3)) == ["a", "b", "c"]
    assert bench.kinds(RUN).count("intent") == 4


@pytest.mark.parametrize("durability", ["process", "full"])
def test_fifty_steps_of_one_shape_are_in_flight_at_once_and_none_is_called_twice(
    bench: Bench, meeting: Meeting, durability: str
) -> None:
    calls = Calls()

    def answer(name: str) -> Callable[[], str]:
        return lambda: str(calls.one(name))

    names = [f"s{number}" for number in range(50)]
    # each waits for the next to begin, so that none ends before all have begun
    steps = [
        meeting.step(name, after=f"{after} begins", answer=answer(name))
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    ]
    for _ in range(2):
        ledger = bench.pipeline(RUN, *steps, max_parallel=50, durability=durability)
        assert meeting.execute(ledger) == {name: name for name in names}
    assert sorted(calls) == sorted(names)
    assert sorted(step.step_number for step in ledger.steps(RUN)) == list(range(1, 51))
    assert ledger.verify(RUN).ok


def test_starts_respect_the_graph_in_a_diamond_of_sync_and_async_steps(bench: Bench) -> None:
    calls = Calls()

    async def left(top: str) -> str:
        calls.append("left")
        await asyncio.sleep(0)
        return top + "l"

    def right(top: str) -> str:
        calls.append("right")
        return top + "r"

    async def bottom(left: str, right: str) -> list[str]:
        return [calls.one("bottom"), left, right]

    steps = [
        Step("bottom", bottom, ["left", "right"]),
        Step("left", left, ["top"]),
        Step("right", right, ["top"]),
        Step("top", lambda: calls.one("top", "t")),
    ]
    for _ in range(2):
        assert bench.pipeline(RUN, *steps).execute() == ["bottom", "tl", "tr"]
        assert asyncio.run(bench.pipeline(RUN, *steps).aexecute()) == ["bottom", "tl", "tr"]
    assert (calls[0], sorted(calls[1:3]), calls[3:]) == ("top", ["left", "right"], ["bottom"])


def test_a_sync_step_that_blocks_does_not_stop_the_async_ones(bench: Bench) -> None:
    done = threading.Event()

    def blocks() -> bool:
        return done.wait(20)

    async def one() -> int:
        await asyncio.sleep(0)
        return 1

    async def two(one: int) -> int:
        done.set()
        return one + 1

    steps = [Step("blocks", blocks), Step("one", one), Step("two", two, ["one"])]
    assert bench.pipeline(RUN, *steps).execute() == {"blocks": True, "two": 2}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_at_most_max_parallel_sync_steps_are_under_way_and_as_many_as_that(bench: Bench, asynchronous: bool) -> None:
    together, lock, live, most = threading.Barrier(3), threading.Lock(), 0, 0

    def step() -> None:
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        together.wait(20)  # breaks unless three are here
        with lock:
            live -= 1

    ledger = bench.pipeline(RUN, *(Step(f"s{number}", step) for number in range(12)), max_parallel=3)
    asyncio.run(ledger.aexecute()) if asynchronous else ledger.execute()
    assert most == 3


def test_sync_steps_run_one_at_a_time_where_nothing_else_is_said(bench: Bench) -> None:
    live, most, threads = 0, 0, set[int]()

    def step() -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        threads.add(threading.get_ident())
        live -= 1

    steps = [Step(f"s{number}", step) for number in range(5)]
    asyncio.run(bench.pipeline("loop", *steps).aexecute())
    assert threading.get_ident() not in threads
    threads.clear()
    bench.pipeline("thread", *steps).execute()
    assert (most, threads) == (1, {threading.get_ident()})


def test_aexecute_checks_replays_and_refuses_as_execute_does(bench: Bench) -> None:
    calls = Calls()

    async def fetch(n: int) -> str:
        return str(calls.one("fetch"))

    def ledger() -> RunLedger:
        return bench.pipeline(RUN, Step("fetch", fetch))

    with pytest.raises(InvalidArguments, match="parameter 'n'"):
        asyncio.run(ledger().aexecute())
    assert ledger().runs() == []
    assert asyncio.run(ledger().aexecute(n=1)) == "fetch"
    before = bench.rows(RUN), ledger().get_run(RUN)
    again = ledger()
    for _ in range(2):
        assert asyncio.run(again.aexecute(n=1)) == "fetch"
        assert again.execute(n=1) == "fetch"
    with pytest.raises(RunInputMismatch):
        asyncio.run(ledger().aexecute(n=2))
    assert (bench.rows(RUN), ledger().get_run(RUN)) == before
    assert calls == ["fetch"]


def test_execute_with_async_steps_in_a_running_loop_names_aexecute(bench: Bench) -> None:
    async def step() -> None: ...

    async def main() -> None:
        ledger = bench.pipeline(RUN, Step("s", step))
        with pytest.raises(InvalidArguments, match=r"await ledger\.aexecute"):
            ledger.execute()
        assert ledger.runs() == []

    asyncio.run(main())


def test_executions_of_one_ledger_object_wait_for_each_other(bench: Bench, meeting: Meeting) -> None:
    calls = Calls()
    ledger = bench.pipeline(RUN, meeting.step("s", answer=lambda: calls.one("s")), max_parallel=2)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(meeting.execute(ledger))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["s"] * 3
    assert calls == ["s"]


@pytest.mark.parametrize("max_parallel", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_executes_its_own_pipeline_is_refused(bench: Bench, max_parallel: int, asynchronous: bool) -> None:
    def step() -> str:
        with pytest.raises(RunOwned):
            ledger.execute()
        return "done"

    async def astep() -> str:
        with pytest.raises(RunOwned):
            await ledger.aexecute()
        return "done"

    ledger = bench.pipeline(RUN, Step("s", astep if asynchronous else step), max_parallel=max_parallel)
    assert ledger.execute() == "done"


# --- side by side, and something goes wrong ---------------------------------------------------------------------------


def test_after_a_failure_nothing_begins_what_runs_ends_and_the_run_goes_on_later(
    bench: Bench, meeting: Meeting
) -> None:
    calls = Calls()
    fails: list[Any] = [ValueError("no"), "b"]

    def steps() -> list[Step]:
        return [
            meeting.step("a", answer=lambda: calls.one("a"), after="b ends"),
            meeting.step("b", answer=lambda: calls.one("b", fails.pop(0)), after="a begins"),
            meeting.step("c", ["b"], answer=lambda: calls.one("c")),
        ]

    with pytest.raises(StepFailed, match="ValueError: no"):
        meeting.execute(bench.pipeline(RUN, *steps(), max_parallel=4))
    assert sorted(calls) == ["a", "b"]
    record = bench.pipeline(RUN).get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert bench.kinds(RUN) == ["created", "intent", "intent", "outcome", "outcome", "parked"]
    assert meeting.execute(bench.pipeline(RUN, *steps(), max_parallel=4)) == {"a": "a", "c": "c"}
    assert sorted(calls) == ["a", "b", "b", "c"]


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_failures_the_first_in_the_pipelines_order_is_raised_and_both_are_recorded(
    bench: Bench, meeting: Meeting, first: str
) -> None:
    second = "b" if first == "a" else "a"
    after = {first: f"{second} begins", second: f"{first} ends"}
    steps = [meeting.step(name, answer=ValueError(name), after=after[name]) for name in "ab"]
    ledger = bench.pipeline(RUN, *steps, max_parallel=2)
    with pytest.raises(StepFailed, match="ValueError: a"):
        meeting.execute(ledger)
    assert [step.error_message for step in ledger.steps(RUN)] in (
        ["ValueError: a", "ValueError: b"],
        ["ValueError: b", "ValueError: a"],
    )
    assert bench.kinds(RUN).count("parked") == 1


@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_crash_with_several_in_flight_goes_on_by_what_each_declares(
    bench: Bench, meeting: Meeting, durability: str
) -> None:
    calls = Calls()
    lives = iter([0, 1, 2])
    effects = {"read": Effect.READ, "post": Effect.IDEMPOTENT, "say": None, "pay": Effect.MUTATE}
    keys: dict[str, list[str]] = {name: [] for name in effects}

    def steps(life: int) -> list[Step]:
        def answer(name: str) -> Callable[[], Any]:
            def call() -> Any:
                keys[name].append(current_step().idempotency_key)
                return calls.one(name, Died() if life == 0 else None)

            return call

        names = list(effects)
        circle = dict(zip(names, [*names[1:], names[0]], strict=True))
        return [
            meeting.step("done", answer=lambda: calls.one("done")),
            *(
                meeting.step(name, ["done"], after=f"{circle[name]} begins", answer=answer(name), effect=effect)
                for name, effect in effects.items()
            ),
        ]

    first = bench.pipeline(RUN, *steps(next(lives)), max_parallel=4, durability=durability)
    with pytest.raises(Died):
        meeting.execute(first)
    while first._leases.run(RUN).pins:  # the thread that writes still parks it
        threading.Event().wait(0.001)
    assert sorted(calls) == ["done", "pay", "post", "read", "say"]
    for _ in range(2):
        bench.owners_die()
        ledger = bench.pipeline(RUN, *steps(next(lives)), max_parallel=4, durability=durability)
        with told(UndeclaredEffectWarning), pytest.raises(StepInDoubt, match="pay"):
            meeting.execute(ledger)
    assert sorted(calls) == ["done", "pay", "post", "post", "read", "read", "say", "say"]
    assert all(len(set(used)) == 1 for used in keys.values())
    assert "redispatched_undeclared" in bench.kinds(RUN)
    assert (ledger.get_run(RUN).status, ledger.get_run(RUN).owner) == ("BLOCKED", None)
    assert ledger.verify(RUN).ok


def test_a_crash_with_three_in_flight_goes_on_one_at_a_time(bench: Bench) -> None:
    calls, together = Calls(), threading.Barrier(3)

    def pipeline(dies: bool, max_parallel: int) -> RunLedger:
        def answer(name: str) -> Callable[[], str]:
            def call() -> str:
                if dies:
                    together.wait(20)
                return str(calls.one(name, Died() if dies else None))

            return call

        steps = [Step(name, answer(name), effect=Effect.READ) for name in "abc"]
        return bench.pipeline(RUN, *steps, max_parallel=max_parallel)

    with pytest.raises(Died):
        asyncio.run(pipeline(dies=True, max_parallel=3).aexecute())
    bench.owners_die()
    # an outcome that waited for the calls of the log to be made would wait for ever here
    again = asyncio.wait_for(pipeline(dies=False, max_parallel=1).aexecute(), 20)
    assert asyncio.run(again) == {"a": "a", "b": "b", "c": "c"}
    assert sorted(calls) == ["a", "a", "b", "b", "c", "c"]


def test_a_fatal_error_ends_the_run_when_what_is_in_flight_is_recorded_and_nothing_new_begins(
    bench: Bench, meeting: Meeting
) -> None:
    calls = Calls()

    def is_recorded() -> bool:
        return "outcome" in bench.kinds(RUN)

    def other() -> str:
        meeting.event("other begins").set()
        while not is_recorded():
            meeting.event("never").wait(0.01)
        return str(calls.one("other"))

    async def aother() -> str:
        meeting.event("other begins").set()
        while not is_recorded():
            await asyncio.sleep(0)
        return str(calls.one("other"))

    ledger = bench.pipeline(
        RUN,
        meeting.step("fatal", answer=ValueError("no"), after="other begins", fatal=(ValueError,)),
        Step("other", aother if meeting.way == "as tasks" else other),
        meeting.step("x", ["other"], answer=lambda: calls.one("x")),
        meeting.step("y", ["x"], answer=lambda: calls.one("y")),
        max_parallel=4,
    )
    with pytest.raises(StepFailed, match="no"):
        meeting.execute(ledger)
    assert ledger.get_run(RUN).status == "FAILED"
    states = {step.tool_name: step.state for step in ledger.steps(RUN)}
    assert (states["fatal"], states["other"]) == ("FAILED", "COMPLETED")
    assert "y" not in states
    with pytest.raises(RunClosed):
        meeting.execute(ledger)
    assert calls in (["other"], ["other", "x"])


def test_a_request_to_cancel_lets_what_is_in_flight_end_and_begins_nothing(bench: Bench, meeting: Meeting) -> None:
    calls = Calls()
    other = bench.pipeline(RUN)

    def cancel() -> str:
        other.cancel(RUN, by="me")
        return str(calls.one("a"))

    ledger = bench.pipeline(
        RUN,
        meeting.step("a", answer=cancel, after="b begins"),
        meeting.step("b", answer=lambda: calls.one("b"), after="a ends"),
        meeting.step("c", ["a", "b"], answer=lambda: calls.one("c")),
        max_parallel=3,
    )
    with pytest.raises(RunClosed, match="CANCELLED"):
        meeting.execute(ledger)
    assert sorted(calls) == ["a", "b"]
    assert ledger.get_run(RUN).status == "CANCELLED"
    assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED", "COMPLETED"]


class Keyboard:
    """Somebody who presses Ctrl-C until he is heard."""

    def __init__(self) -> None:
        self.presses = [threading.Event()]

    def press(self) -> None:
        """Interrupt the main thread once. It may be about to wait, and would sleep over a single signal."""
        press = self.presses[-1]
        while not press.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _interrupted(self, number: int, frame: Any) -> None:
        if not self.presses[-1].is_set():
            self.presses[-1].set()
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._interrupted)

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def test_an_interrupt_waits_for_the_threads_and_begins_nothing(bench: Bench) -> None:
    meeting, calls, keyboard = Meeting("in threads"), Calls(), Keyboard()

    def interrupt() -> str:
        keyboard.press()
        meeting.event("interrupted").set()
        return str(calls.one("a"))

    steps = [
        meeting.step("a", answer=interrupt, after="b begins"),
        meeting.step("b", answer=lambda: calls.one("b"), after="interrupted"),
        meeting.step("c", ["a"], answer=lambda: calls.one("c")),
    ]
    ledger = bench.pipeline(RUN, *steps, max_parallel=2)
    with keyboard, pytest.raises(KeyboardInterrupt):
        ledger.execute()
    assert sorted(calls) == ["a", "b"]
    record = ledger.get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert ledger.execute() == {"b": "b", "c": "c"}
    assert sorted(calls) == ["a", "b", "c"]


def test_a_second_interrupt_leaves_the_threads_and_the_next_execution_waits_for_them(bench: Bench) -> None:
    meeting, calls, keyboard = Meeting("in threads"), Calls(), Keyboard()

    def interrupt() -> str:
        keyboard.press()
        keyboard.presses.append(threading.Event())
        keyboard.press()
        assert meeting.event("let go").wait(20)
        return str(calls.one("a"))

    steps = [
        meeting.step("a", answer=interrupt, after="b begins"),
        meeting.step("b", answer=lambda: calls.one("b"), after="let go"),
        meeting.step("c", ["a"], answer=lambda: calls.one("c")),
    ]
    ledger = bench.pipeline(RUN, *steps, max_parallel=2)
    with keyboard, pytest.raises(KeyboardInterrupt) as interrupted:
        ledger.execute()
    assert "in flight" in str(interrupted.value.__notes__)
    assert (list(calls), ledger.get_run(RUN).status) == ([], "RUNNING")
    meeting.event("let go").set()
    assert ledger.execute() == {"b": "b", "c": "c"}
    assert sorted(calls) == ["a", "b", "c"]


@pytest.mark.parametrize("scope", ["task", "twice", "timeout", "anyio"])
@pytest.mark.parametrize("durability", ["process", "full"])
def test_a_cancelled_aexecute_leaves_its_steps_in_doubt_and_goes_on_later(
    bench: Bench, scope: str, durability: str
) -> None:
    calls = Calls()
    begun, blocked, let_go, ended = asyncio.Event(), threading.Event(), threading.Event(), 0

    async def slow() -> str:
        nonlocal ended
        calls.append("slow")
        if ended:
            return "slow"
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ended += 1
        return "never"

    def thread() -> str:
        calls.append("thread")
        blocked.set()
        assert let_go.wait(20)
        return "thread"

    async def later(slow: str) -> str:
        return str(calls.one("later"))

    steps = [Step("slow", slow, effect=Effect.READ), Step("thread", thread), Step("later", later, ["slow"])]
    ledger = bench.pipeline(RUN, *steps, durability=durability)

    async def in_flight() -> None:
        await begun.wait()
        while not blocked.is_set():
            await asyncio.sleep(0)

    async def main() -> None:
        if scope == "anyio":
            with anyio.CancelScope() as cancelling:
                async with anyio.create_task_group() as group:
                    group.start_soon(ledger.aexecute)
                    await in_flight()
                    cancelling.cancel()
            return
        task = asyncio.create_task(ledger.aexecute())
        await in_flight()
        if scope == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0)
            return
        task.cancel()
        if scope == "twice":
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    asyncio.run(ledger._asynchronous.in_thread(lambda: None))  # what is cancelled does not wait for its last write
    assert ended == 1
    assert sorted(calls) == ["slow", "thread"]
    record = ledger.get_run(RUN)
    assert (record.status, record.owner) == ("BLOCKED", None)
    assert bench.kinds(RUN) == ["created", "intent", "intent", "parked"]
    let_go.set()
    assert ledger.execute() == {"thread": "thread", "later": "later"}
    assert sorted(calls) == ["later", "slow", "slow", "thread"]  # what the thread returned after all is its outcome
    assert ledger.verify(RUN).ok


def test_a_timeout_is_a_failure_of_its_step_alone(bench: Bench, meeting: Meeting) -> None:
    ledger = bench.pipeline(
        RUN,
        meeting.step("slow", after="late", timeout=0.01),
        meeting.step("other"),
        max_parallel=2,
    )
    try:
        with pytest.raises(StepFailed, match="TimeoutError") as caught:
            meeting.execute(ledger)
        assert isinstance(caught.value, StepFailed)
        assert {step.tool_name: step.state for step in ledger.steps(RUN)}["other"] == "COMPLETED"
    finally:
        meeting.event("late").set()


def small_diamond(calls: Calls, way: str) -> list[Step]:
    def top() -> str:
        return str(calls.one("top"))

    def left(top: str) -> str:
        return str(calls.one("left", f"{top}l"))

    def right(top: str) -> str:
        return str(calls.one("right", f"{top}r"))

    def bottom(left: str, right: str) -> list[str]:
        return list(calls.one("bottom", [left, right]))

    async def atop() -> str:
        await asyncio.sleep(0)
        return top()

    async def aleft(top: str) -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return left(top)

    async def aright(top: str) -> str:
        await asyncio.sleep(0)
        return right(top)

    functions = [atop, aleft, aright, bottom] if way == "as tasks" else [top, left, right, bottom]
    needs = [[], ["top"], ["top"], ["left", "right"]]
    named = zip(["top", "left", "right", "bottom"], functions, needs, strict=True)
    return [Step(name, function, before, effect=Effect.READ) for name, function, before in named]


def mortal(ledger: RunLedger, way: str, effects: int) -> RunLedger:
    """A ledger whose process dies at its n-th effect and performs nothing any more."""
    driver: Any = ledger._driver if way == "in threads" else ledger._asynchronous
    perform, left = driver.perform, itertools.count(effects - 1, -1)

    def dying(effect: Any) -> Any:
        if next(left) <= 0:
            raise Died
        return perform(effect)

    driver.perform = dying
    driver.behind = lambda run, flow: flow.close()
    return ledger


@pytest.mark.parametrize("again", [2, 5])
def test_a_pipeline_that_dies_at_any_effect_and_then_again_starts_no_completed_step_twice(
    bench: Bench, meeting: Meeting, again: int
) -> None:
    for first in range(1, 21):
        run_id, calls = f"run {first}", Calls()
        result = None
        for death in (first, again, 1000):
            ledger = mortal(
                bench.pipeline(run_id, *small_diamond(calls, meeting.way), max_parallel=2), meeting.way, death
            )
            recorded = ledger.steps(run_id) if any(run.run_id == run_id for run in ledger.runs()) else []
            completed = [step.tool_name for step in recorded if step.state == "COMPLETED"]
            calls.clear()
            try:
                result = meeting.execute(ledger)
            except Died:
                bench.owners_die()
            assert not set(calls) & set(completed)
        assert result == ["topl", "topr"]
        assert ledger.verify(run_id).ok


def test_an_aexecute_that_is_cancelled_in_any_turn_of_the_loop_goes_on_later(bench: Bench) -> None:
    async def cancelled_after(turns: int, ledger: RunLedger) -> None:
        task = asyncio.create_task(ledger.aexecute())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    for turns in range(40):
        run_id, calls = f"run {turns}", Calls()
        ledger = bench.pipeline(run_id, *small_diamond(calls, "as tasks"))
        ledger._asynchronous.start = in_this_turn  # type: ignore[method-assign]
        asyncio.run(cancelled_after(turns, ledger))
        recorded = ledger.steps(run_id) if any(run.run_id == run_id for run in ledger.runs()) else []
        calls.clear()
        assert asyncio.run(ledger.aexecute()) == ["topl", "topr"]
        assert not set(calls) & {step.tool_name for step in recorded if step.state == "COMPLETED"}
        assert ledger.verify(run_id).ok


async def in_this_turn(start: Callable[[], Any], wait: float | None, *, waits_for_itself: bool) -> Any:
    """Take the run without the writer's thread, whose time no turn of the loop tells."""
    while True:
        try:
            return start()
        except RunOwned:  # what was cancelled is still being parked
            await asyncio.sleep(0)
