"""Two owners of one run, a crash and a lost lease, in every order in which they can come: the promises hold in each state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agent_run_ledger import Effect, RetryPolicy, StepFailed
from support.interleavings import Search
from support.replayed import GOAL, RUN, WALL, Life, Script, nothing_random

TOOLS = ("first", "second", "third")
READ, IDEMPOTENT, MUTATE, UNDECLARED = Effect.READ, Effect.IDEMPOTENT, Effect.MUTATE, None
IN_DOUBT = ("returned", "StepInDoubt")


@pytest.fixture(autouse=True)
def _the_same_each_time() -> Iterator[None]:
    with nothing_random():
        yield


# --- the programs -----------------------------------------------------------------------------------------------------


def three_steps(*effects: Effect | None, **options: Any) -> Script:
    """Each step is given what the one before it returned."""

    def play(life: Life) -> Any:
        life.ledger.create_run(GOAL, RUN)
        got: Any = 0
        for tool, effect in zip(TOOLS, effects, strict=True):
            got = life.step(tool, got, effect=effect)
        return life.finish(got)

    once = tuple(tool for tool, effect in zip(TOOLS, effects, strict=True) if effect is MUTATE)
    ends = IN_DOUBT if once else ("returned",)
    return Script(play, ["third", ["second", ["first", 0]]], must_not_repeat=once, may_end=ends, **options)


def resumed(life: Life) -> Any:
    records = life.ledger.resume_run(RUN)
    done = [json.loads(record.output_json) for record in records if record.output_json is not None]
    got = done[-1] if done else 0
    for tool in TOOLS[len(done) :]:
        got = life.step(tool, got, effect=READ)
    return life.finish(got)


def with_a_retry(*before: str) -> Script:
    """A step that succeeds the second time, between these and another."""

    def second_time_lucky(given: Any, attempt: int) -> Any:
        if attempt == 1:
            raise ConnectionError("try later")
        return given + 1

    def play(life: Life) -> Any:
        life.ledger.create_run(GOAL, RUN)
        for tool in before:
            life.step(tool, 0, effect=READ)
        two = life.step("second", 1, second_time_lucky, effect=READ, retry=RetryPolicy(max_attempts=2, base=1.0))
        return life.finish(life.step("third", two, effect=IDEMPOTENT))

    return Script(play, ["third", 2], attempts={"second": 2}, may_end=("returned", "AttemptsExhausted", "RunClosed"))


def a_failure_that_is_acted_upon(life: Life) -> Any:
    def breaks(given: Any, attempt: int) -> Any:
        raise ValueError("no such invoice")

    life.ledger.create_run(GOAL, RUN)
    life.step("first", 0, effect=READ)
    with pytest.raises(StepFailed, match="no such invoice"):
        life.step("second", 1, breaks, effect=READ)
    return life.finish(life.step("third", 2, effect=READ))


def an_error_that_tells_nothing(life: Life) -> Any:
    def is_cut_off(given: Any, attempt: int) -> Any:
        raise ConnectionResetError("connection reset by peer")

    life.ledger.create_run(GOAL, RUN)
    life.step("first", 0, effect=READ)
    life.step("second", 1, is_cut_off, effect=MUTATE)
    return life.finish(None)


def an_open_run_with_a_value(life: Life) -> Any:
    with life.ledger.open_run(GOAL, RUN) as run:
        one = life.step("first", 0, effect=READ)
        at = run.now()
        run.result = life.step("second", [one, at], effect=IDEMPOTENT)
    return run.result


def a_budget_that_is_spent(life: Life) -> Any:
    life.ledger.create_run(GOAL, RUN)
    for tool in TOOLS:
        life.step(tool, 0, effect=READ)
    return life.finish(None)


def functions_that_say_they_live(life: Life) -> Any:
    life.ledger.create_run(GOAL, RUN)
    got: Any = 0
    for tool in TOOLS:
        got = life.step(tool, got, beats=True, effect=IDEMPOTENT)
    return life.finish(got)


def a_cancellation(life: Life) -> None:
    life.ledger.cancel(RUN, by="an operator", reason="wrong month")


def or_closed(script: Script) -> Script:
    """The same program, where somebody else may end the run."""
    return replace(script, may_end=(*script.may_end, "RunClosed"))


BLOCKING = replace(
    three_steps(UNDECLARED, READ, UNDECLARED),
    options={"undeclared": "block"},
    must_not_repeat=("first", "third"),
    may_end=IN_DOUBT,
)
FAILING = Script(
    a_failure_that_is_acted_upon,
    ["third", 2],
    starts_again=(
        "RunOwned",
        "ReplayDivergence",
    ),  # an owner that was overtaken has acted on an attempt that is not the last any more
)
CUT_OFF = Script(an_error_that_tells_nothing, must_not_repeat=("second",), may_end=("StepInDoubt",))
OPEN = Script(an_open_run_with_a_value, ["second", [["first", 0], WALL]], on_loss="begins again")
SPENDING = Script(
    a_budget_that_is_spent, options={"max_steps": 2}, max_steps=2, may_end=("BudgetExceededException", "RunClosed")
)
LIVING = Script(functions_that_say_they_live, ["third", ["second", ["first", 0]]])
RESUMED = Script(resumed, ["third", ["second", ["first", 0]]], starts_again=("RunOwned", "RunNotFound"))
CANCELLING = Script(
    a_cancellation,
    on_loss="begins again",
    starts_again=("RunNotFound",),  # it has not been made yet
    may_end=("returned", "IllegalTransition"),  # it has ended
)


# --- what is explored -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two owners, what must come up while they are explored, and how many states there were when they were counted."""

    left: Script
    right: Script
    counted: int
    """With a crash and a lost lease."""
    beating: int
    """With a lost lease and a heartbeat."""
    reaches: frozenset[str]
    third: Script | None = None

    def search(self, *, is_merging: bool = True) -> Search:
        return Search(self.left, self.right, third=self.third, is_merging=is_merging)


def both(script: Script, counted: int, beating: int, reaches: frozenset[str]) -> Case:
    """Two owners of one program, of which one begins again where the other makes its call again."""
    return Case(script, replace(script, on_loss="begins again"), counted, beating, reaches)


TAKEN_OVER = frozenset({"append: LeaseLost", "renew: LeaseLost", "claim: RunOwned", "a last owner: returned"})
AGAIN = TAKEN_OVER | {"dispatched again", "a late effect of a former owner", "returned"}
DOUBT = TAKEN_OVER | {"StepInDoubt", "a last owner: StepInDoubt", "returned"}
CLOSED = TAKEN_OVER | {"append: the inbox has moved", "RunClosed", "a last owner: RunClosed", "post"}
EXHAUSTED = frozenset({"a last owner: AttemptsExhausted", "AttemptsExhausted", "RunClosed"})

QUICK = {
    "a mutation between others": both(three_steps(READ, MUTATE, IDEMPOTENT), 99_286, 21_136, AGAIN | DOUBT),
    "cancelled by the other": Case(
        or_closed(three_steps(READ, IDEMPOTENT, UNDECLARED)), CANCELLING, 87_235, 14_300, CLOSED
    ),
}
LONG = {
    "one of each that is dispatched again": both(three_steps(READ, IDEMPOTENT, UNDECLARED), 112_171, 23_090, AGAIN),
    "mutations only": both(three_steps(MUTATE, MUTATE, MUTATE), 74_917, 17_124, DOUBT),
    "reads only": both(three_steps(READ, READ, READ), 112_121, 23_090, AGAIN),
    "undeclared and blocking": both(BLOCKING, 87_424, 19_078, DOUBT),
    "a retry": both(with_a_retry(), 125_901, 32_510, AGAIN | EXHAUSTED),
    "an error that tells nothing": both(CUT_OFF, 40_157, 9_485, DOUBT - {"returned", "a last owner: returned"}),
    "an open run with a value": Case(OPEN, OPEN, 76_584, 16_398, AGAIN),
    "a budget that is spent": both(
        SPENDING,
        51_535,
        12_228,
        frozenset({"a last owner: BudgetExceededException", "BudgetExceededException", "RunClosed"}),
    ),
    "functions that say they live": both(LIVING, 122_262, 26_789, AGAIN),
    "resumed at the frontier": Case(three_steps(READ, READ, READ), RESUMED, 58_417, 9_951, AGAIN, third=RESUMED),
}
RETRY = both(with_a_retry("first"), 228_111, 50_929, AGAIN | EXHAUSTED)
FAILURE = both(FAILING, 80_000, 23_792, AGAIN)
DOUBT_AND_CANCEL = Case(or_closed(three_steps(READ, MUTATE, READ)), CANCELLING, 84_097, 14_300, CLOSED)


def slowly(cases: dict[str, Case]) -> list[Any]:
    return [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in cases.items()]


def quickly(cases: dict[str, Case]) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in cases.items()]


Record = Callable[[str, object], None]


def explore(case: Case, record: Record, counted: int, reaches: frozenset[str], **may_happen: Any) -> None:
    """Explore a case, say how large it was, and fail where a fifth of it is missing or where what it is for did not come up."""
    search = case.search().run(**may_happen)
    record("states", search.states)
    record("transitions", search.transitions)
    assert {name for name in reaches if not search.reached[name]} == set()
    assert search.states > 0.8 * counted
    assert search.transitions > 1.6 * counted


@pytest.mark.parametrize("case", [*quickly(QUICK), *slowly(LONG)])
def test_every_interleaving_of_two_owners_a_crash_and_a_lost_lease_keeps_all_promises(
    case: Case, record_property: Record
) -> None:
    explore(case, record_property, case.counted, case.reaches | {"crash"}, crashes=1, lapses=1)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "counted"), [("crash", 88_379), ("lapse", 160_275)])
def test_every_interleaving_with_a_retry_in_three_steps_keeps_all_promises(
    first: str, counted: int, record_property: Record
) -> None:
    explore(RETRY, record_property, counted, RETRY.reaches | {"crash"}, crashes=1, lapses=1, first=first)


OTHERS = {
    "a retry in three steps": RETRY,
    "a failure that is acted upon": FAILURE,
    "cancelled in doubt": DOUBT_AND_CANCEL,
}


@pytest.mark.parametrize("case", [*quickly(QUICK), *slowly(LONG | OTHERS)])
def test_a_heartbeat_at_any_moment_of_them_gives_no_run_back_to_a_former_owner(
    case: Case, record_property: Record
) -> None:
    explore(case, record_property, case.beating, case.reaches, crashes=0, lapses=1, beats=1)


@pytest.mark.slow
def test_a_failure_that_is_acted_upon_stays_what_it_was_whoever_crashes(record_property: Record) -> None:
    explore(FAILURE, record_property, 5_000, frozenset({"crash", "dispatched again"}), crashes=1, lapses=0)


@pytest.mark.slow
def test_a_failure_that_is_acted_upon_stays_what_it_was_whoever_crashes_and_wakes_up(record_property: Record) -> None:
    explore(FAILURE, record_property, FAILURE.counted, FAILURE.reaches, crashes=1, lapses=1)


@pytest.mark.slow
def test_a_request_to_cancel_ends_a_run_that_stands_in_doubt(record_property: Record) -> None:
    explore(DOUBT_AND_CANCEL, record_property, DOUBT_AND_CANCEL.counted, CLOSED, crashes=1, lapses=1)


@pytest.mark.parametrize(
    "may_happen", [{"crashes": 1, "lapses": 0}, {"crashes": 0, "lapses": 1}], ids=["crash", "lapse"]
)
@pytest.mark.slow
def test_programs_that_know_the_same_do_the_same(may_happen: dict[str, Any]) -> None:
    """The search takes them for one; without that it is ten times as long and comes to the same moments."""
    case = LONG["a budget that is spent"]
    merged, apart = case.search(), case.search(is_merging=False)
    merged.run(**may_happen)
    apart.run(**may_happen)
    assert apart.states > 5 * merged.states
    assert apart.moments() == merged.moments()
