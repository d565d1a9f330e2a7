"""Face A: one pipeline, one run. How values find their parameters, and what a rerun does."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from typing import Any

import pydantic
import pytest

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
    UnserialisableArguments,
    UnserialisableOutput,
    current_step,
)
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
    async def asynchronous() -> None: ...

    ledger = bench.pipeline(RUN, Step("a", lambda: 1))
    with pytest.raises(InvalidPipeline, match="already"):
        ledger.step(name="a")(lambda: 2)
    with pytest.raises(InvalidPipeline, match="list of step names"):
        Step("b", lambda: 1, depends_on="a")
    with pytest.raises(InvalidPipeline, match="async"):
        Step("b", asynchronous)
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
