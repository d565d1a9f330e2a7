"""The guard: timeout, retries and checked arguments of a plain function, and the durable step it is inside a run."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import agent_run_ledger.guard
from agent_run_ledger import (
    AgentRunLedger,
    InvalidArguments,
    LedgerError,
    Run,
    StepFailed,
    UndeclaredEffectWarning,
    current_step,
    forge_or_sentinel_guard,
)
from agent_run_ledger.drivers.workers import Work
from agent_run_ledger.testing import FakeClock
from support.ledgers import Bench, Died, raising

LONG_MS = 60_000
"""A timeout that nothing runs into unless something is broken."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """What the guard waits by; every wait is the longest that may be drawn."""
    clock = FakeClock()
    monkeypatch.setattr(agent_run_ledger.guard, "_clock", clock)
    monkeypatch.setattr(random, "random", lambda: 1.0)
    return clock


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a function waits at until the test lets it on; open at the latest when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The calls that guards made in threads."""
    works: list[Work] = []

    class Seen(Work):
        def start(self) -> None:
            works.append(self)
            super().start()

    monkeypatch.setattr(agent_run_ledger.guard, "Work", Seen)
    return works


class Flaky:
    """Raises the errors that it was given, one a call, and answers then."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def guarded(flaky: Flaky, *, is_async: bool, **options: Any) -> Callable[[], Any]:
    """A guarded function, sync or async, that is called like a sync one."""

    @forge_or_sentinel_guard(**options)
    def work() -> str:
        return flaky()

    @forge_or_sentinel_guard(**options)
    async def awork() -> str:
        return flaky()

    return (lambda: asyncio.run(awork())) if is_async else work


both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
in_time_or_not_timed = pytest.mark.parametrize("timeout_ms", [None, LONG_MS], ids=["untimed", "timed"])


# --- outside of a run -------------------------------------------------------------------------------------------------


@both_ways
@in_time_or_not_timed
def test_a_function_that_succeeds_is_called_once(is_async: bool, timeout_ms: int | None, clock: FakeClock) -> None:
    flaky = Flaky()
    assert guarded(flaky, is_async=is_async, timeout_ms=timeout_ms, max_retries=3)() == "done"
    assert flaky.calls == 1
    assert clock.sleeps == []


@both_ways
@in_time_or_not_timed
def test_max_retries_counts_calls_beyond_the_first_and_waits_grow_as_the_backoff_rule_says(
    is_async: bool, timeout_ms: int | None, clock: FakeClock
) -> None:
    flaky = Flaky(ValueError("1"), OSError("2"))
    assert guarded(flaky, is_async=is_async, timeout_ms=timeout_ms, max_retries=2)() == "done"
    assert flaky.calls == 3
    assert clock.sleeps == [0.5, 1.0]


@both_ways
@in_time_or_not_timed
def test_the_last_error_is_raised_as_itself(is_async: bool, timeout_ms: int | None) -> None:
    last = ValueError("2")
    flaky = Flaky(OSError("1"), last, ValueError("3"))
    with pytest.raises(ValueError, match="2") as raised:
        guarded(flaky, is_async=is_async, timeout_ms=timeout_ms, max_retries=1)()
    assert raised.value is last
    assert flaky.calls == 2


@both_ways
def test_without_retries_the_first_error_is_final(is_async: bool, clock: FakeClock) -> None:
    flaky = Flaky(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        guarded(flaky, is_async=is_async)()
    assert flaky.calls == 1
    assert clock.sleeps == []


@both_ways
@in_time_or_not_timed
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_retried(is_async: bool, timeout_ms: int | None, interrupt: type[BaseException]) -> None:
    flaky = Flaky(interrupt())
    with pytest.raises(interrupt):
        guarded(flaky, is_async=is_async, timeout_ms=timeout_ms, max_retries=3)()
    assert flaky.calls == 1


def test_a_function_that_takes_too_long_is_a_timeout_error(gate: threading.Event) -> None:
    @forge_or_sentinel_guard(timeout_ms=1)
    def slow() -> None:
        gate.wait()

    with pytest.raises(TimeoutError, match=r"'slow': no result within 0\.001 s"):
        slow()


def test_a_function_that_is_out_of_time_is_not_called_a_second_time_while_it_goes_on(
    gate: threading.Event, works: list[Work]
) -> None:
    @forge_or_sentinel_guard(timeout_ms=1, max_retries=3)
    def slow() -> None:
        gate.wait()

    with pytest.raises(TimeoutError):
        slow()
    assert len(works) == 1


def test_what_a_function_that_was_out_of_time_returns_late_is_the_result(
    gate: threading.Event, works: list[Work], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @forge_or_sentinel_guard(timeout_ms=1, max_retries=1)
    def slow() -> str:
        calls.append(1)
        gate.wait()
        return "late"

    def sleep(seconds: float) -> None:  # the wait before the retry lasts until the function has returned
        gate.set()
        assert works[0].wait(LONG_MS / 1000)

    monkeypatch.setattr(clock, "sleep", sleep)
    assert slow() == "late"
    assert calls == [1]


def test_an_async_function_that_is_out_of_time_is_cancelled_and_called_again(clock: FakeClock) -> None:
    seen: list[str] = []

    @forge_or_sentinel_guard(timeout_ms=1, max_retries=1)
    async def slow() -> str:
        seen.append("called")
        if len(seen) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")
        return "done"

    assert asyncio.run(slow()) == "done"
    assert seen == ["called", "cancelled", "called"]
    assert clock.sleeps == [0.5]


def test_an_async_function_that_is_never_in_time_is_a_timeout_error() -> None:
    calls = []

    @forge_or_sentinel_guard(timeout_ms=1, max_retries=2)
    async def slow() -> None:
        calls.append(1)
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="'slow': no result within"):
        asyncio.run(slow())
    assert len(calls) == 3


@both_ways
def test_a_timeout_error_of_the_function_itself_stays_that_error(is_async: bool) -> None:
    own = TimeoutError("the server's")
    with pytest.raises(TimeoutError) as raised:
        guarded(Flaky(own), is_async=is_async, timeout_ms=LONG_MS)()
    assert raised.value is own


def test_whoever_cancels_the_task_cancels_the_function_and_nothing_is_retried() -> None:
    seen: list[str] = []

    @forge_or_sentinel_guard(timeout_ms=LONG_MS, max_retries=3)
    async def slow() -> None:
        seen.append("called")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.create_task(slow())
        while not seen:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["called", "cancelled"]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (("ten",), {}, r"argument amount: expected int, found str"),
        ((), {"amount": 1, "to": ["a", 2]}, r"argument to\[1\]: expected str, found int"),
        ((), {}, "missing a required argument: 'amount'"),
        ((1,), {"amount": 1}, "multiple values for argument 'amount'"),
        ((1,), {"when": 1}, "unexpected keyword argument 'when'"),
        ((1, [], 3), {}, "too many positional arguments"),
    ],
)
def test_arguments_are_checked_before_the_function_is_called(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    calls = []

    @forge_or_sentinel_guard(max_retries=3)
    def pay(amount: int, to: list[str] | None = None) -> None:
        calls.append(1)

    with pytest.raises(InvalidArguments, match=said) as raised:
        pay(*args, **kwargs)
    assert "'pay'" in str(raised.value)
    assert isinstance(raised.value, LedgerError)
    assert isinstance(raised.value, TypeError)
    assert calls == []


def test_arguments_of_an_async_function_are_checked_when_it_is_called() -> None:
    @forge_or_sentinel_guard()
    async def pay(amount: int) -> None:
        pytest.fail("it must not be called")

    with pytest.raises(InvalidArguments, match="argument amount"):
        pay("ten")  # type: ignore[arg-type]


def test_arguments_come_as_the_very_objects_that_were_given() -> None:
    @forge_or_sentinel_guard(timeout_ms=LONG_MS)
    def same(value: list[object], *, other: object) -> tuple[object, object]:
        return value, other

    value, other = [object()], object()
    got = same(value, other=other)
    assert got[0] is value
    assert got[1] is other


def test_a_key_may_be_given_where_no_ledger_gives_one() -> None:
    @forge_or_sentinel_guard()
    def pay(amount: int, idempotency_key: str = "none") -> str:
        return f"{amount} {idempotency_key}"

    assert pay(1) == "1 none"
    assert pay(1, idempotency_key="mine") == "1 mine"


def test_a_method_can_be_guarded() -> None:
    class Account:
        total = 0

        @forge_or_sentinel_guard(max_retries=1)
        def pay(self, amount: int) -> int:
            self.total += amount
            return self.total

    account = Account()
    account.pay(2)
    assert account.pay(amount=3) == 5
    with pytest.raises(InvalidArguments, match="argument amount"):
        account.pay("3")  # type: ignore[arg-type]


def test_a_guarded_function_looks_like_the_one_below_it() -> None:
    @forge_or_sentinel_guard()
    def pay(amount: int) -> int:
        """Pay."""
        return amount

    @forge_or_sentinel_guard()
    async def apay(amount: int) -> int:
        return amount

    assert (pay.__name__, pay.__doc__) == ("pay", "Pay.")
    assert list(inspect.signature(pay).parameters) == ["amount"]
    assert asyncio.run(apay(1)) == 1


@pytest.mark.parametrize("timeout_ms", [0, -1, True, "5", float("nan"), float("inf"), 1e300, [5]])
def test_a_timeout_that_is_no_time_is_refused(timeout_ms: Any) -> None:
    with pytest.raises(InvalidArguments, match="timeout"):
        forge_or_sentinel_guard(timeout_ms=timeout_ms)(lambda: None)


@pytest.mark.parametrize("max_retries", [-1, True, 1.0, "1", None])
def test_a_number_of_retries_that_is_none_is_refused(max_retries: Any) -> None:
    with pytest.raises(InvalidArguments, match="max_retries= is a whole number of at least 0"):
        forge_or_sentinel_guard(max_retries=max_retries)


def test_a_guard_without_parentheses_says_that_it_takes_them() -> None:
    with pytest.raises(InvalidArguments, match="takes parentheses"):
        forge_or_sentinel_guard(lambda: None)  # type: ignore[arg-type]


def test_what_cannot_be_guarded_is_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    def positional(amount: int, /) -> None: ...

    for function, said in ((generator, "generator"), (positional, "by keyword"), (5, "not callable")):
        with pytest.raises(InvalidArguments, match=said):
            forge_or_sentinel_guard()(function)  # type: ignore[type-var]


def test_what_fails_late_has_failed_and_the_next_retry_is_a_call_of_its_own(
    gate: threading.Event, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @forge_or_sentinel_guard(timeout_ms=1000, max_retries=2)
    def slow() -> str:
        calls.append(1)
        if len(calls) == 1:
            gate.wait()
            raise ValueError("late")
        return "done"

    times = iter([False, True, True])

    class Late(Work):
        def wait(self, seconds: float | None) -> bool:
            if next(times):
                gate.set()
                return super().wait(None)
            return False

    monkeypatch.setattr(agent_run_ledger.guard, "Work", Late)
    assert slow() == "done"
    assert len(calls) == 2
    assert clock.sleeps == [0.5, 1.0]


# --- inside a run -----------------------------------------------------------------------------------------------------

RUN, GOAL = "run", "pay"


def pays(ledger: AgentRunLedger, pay: Callable[..., Any], after: Callable[[], None]) -> Any:
    with ledger.open_run(GOAL, RUN) as run:
        run.result = pay(5)
        after()
        return run.result


def apays(ledger: AgentRunLedger, pay: Callable[..., Any], after: Callable[[], None]) -> Any:
    async def main() -> Any:
        async with ledger.open_run(GOAL, RUN) as run:
            run.result = await pay(5)
            after()
            return run.result

    return asyncio.run(main())


class Payments:
    """A guarded function, sync or async, and a program with one call of it."""

    def __init__(self, is_async: bool, work: Callable[[int], Any], **options: Any) -> None:
        @forge_or_sentinel_guard(**options)
        def pay(amount: int) -> Any:
            return work(amount)

        async def apay(amount: int) -> Any:
            return work(amount)

        apay.__name__ = "pay"
        self._pay = forge_or_sentinel_guard(**options)(apay) if is_async else pay
        self._program = apays if is_async else pays

    def __call__(self, ledger: AgentRunLedger, after: Callable[[], None] = lambda: None) -> Any:
        return self._program(ledger, self._pay, after)


@both_ways
def test_inside_a_run_a_guarded_function_is_a_step_with_its_arguments(bench: Bench, is_async: bool) -> None:
    ledger = bench.open()
    assert Payments(is_async, lambda amount: {"paid": amount}, timeout_ms=LONG_MS)(ledger) == {"paid": 5}
    (step,) = ledger.steps(RUN)
    assert (step.tool_name, step.arguments_json, step.output_json) == ("pay", '{"amount":5}', '{"paid":5}')


@both_ways
def test_a_recorded_step_is_not_called_again(bench: Bench, is_async: bool) -> None:
    calls = []
    program = Payments(is_async, calls.append, max_retries=1)
    with pytest.raises(Died):
        program(bench.open(), after=raising(Died()))
    bench.owners_die()
    again = bench.open()
    program(again)
    assert calls == [5]
    assert again.get_run(RUN).status == "COMPLETED"


@both_ways
def test_inside_a_run_retries_are_attempts_of_one_step(bench: Bench, is_async: bool) -> None:
    flaky = Flaky(ValueError("1"), ValueError("2"))
    ledger = bench.open()
    assert Payments(is_async, lambda _: flaky(), max_retries=2)(ledger) == "done"
    assert flaky.calls == 3
    assert [step.attempts for step in ledger.steps(RUN)] == [3]


@both_ways
def test_inside_a_run_the_last_error_is_a_step_failed(bench: Bench, is_async: bool) -> None:
    flaky = Flaky(ValueError("1"), ValueError("2"), ValueError("3"))
    with pytest.raises(StepFailed, match="ValueError: 2"):
        Payments(is_async, lambda _: flaky(), max_retries=1)(bench.open())
    assert flaky.calls == 2


def test_inside_a_run_a_timeout_is_a_timeout_error_too_now_and_at_replay(bench: Bench, gate: threading.Event) -> None:
    @forge_or_sentinel_guard(timeout_ms=1)
    def slow() -> None:
        gate.wait()

    @forge_or_sentinel_guard()
    def after() -> str:
        return "after"

    def program(ledger: AgentRunLedger) -> None:
        with ledger.open_run(GOAL, RUN):
            try:
                slow()
            except TimeoutError as error:
                said.append(str(error))
            after()
            raise Died

    said: list[str] = []
    with pytest.raises(Died):
        program(bench.open())
    bench.owners_die()
    again = bench.open()
    with pytest.raises(Died):
        program(again)
    assert [step.attempts for step in again.steps(RUN)] == [1, 1]
    assert said[0] == said[1]
    assert "no result within 0.001 s" in said[0]


@both_ways
def test_without_retries_a_crash_is_no_end_of_the_run(bench: Bench, is_async: bool) -> None:
    flaky = Flaky(Died())
    program = Payments(is_async, lambda _: flaky())
    with pytest.raises(Died):
        program(bench.open())
    bench.owners_die()
    with pytest.warns(UndeclaredEffectWarning):
        assert program(bench.open()) == "done"
    assert flaky.calls == 2


@both_ways
def test_inside_a_run_arguments_are_checked_before_anything_is_written(bench: Bench, is_async: bool) -> None:
    @forge_or_sentinel_guard()
    def pay(amount: int) -> None:
        pytest.fail("it must not be called")

    ledger = bench.open()
    with ledger.open_run(GOAL, RUN) as run:
        with pytest.raises(InvalidArguments, match="'pay': argument amount: expected int, found str"):
            pay("five")  # type: ignore[arg-type]
        assert run.step("next", {}, lambda: current_step().position) == "1"


def test_a_guarded_function_is_given_the_key_of_its_step(bench: Bench) -> None:
    @forge_or_sentinel_guard(max_retries=1)
    def pay(amount: int, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise OSError("not now")
        return idempotency_key

    keys: list[str] = []
    ledger = bench.open()
    with ledger.open_run(GOAL, RUN):
        key = pay(1)  # type: ignore[call-arg]
    assert keys == [key, key]
    assert [(step.idempotency_key, step.effect) for step in ledger.steps(RUN)] == [(key, "IDEMPOTENT")]


def test_inside_a_step_a_guarded_function_keeps_its_retries_and_is_no_step_of_its_own(bench: Bench) -> None:
    flaky = Flaky(OSError("1"))

    @forge_or_sentinel_guard(max_retries=1)
    def inner() -> str:
        return flaky()

    ledger = bench.open()
    with ledger.open_run(GOAL, RUN) as run:
        assert run.step("outer", {}, inner) == "done"
    assert flaky.calls == 2
    assert [(step.tool_name, step.attempts) for step in ledger.steps(RUN)] == [("outer", 1)]


@both_ways
def test_guarded_functions_run_side_by_side_in_a_map(bench: Bench, is_async: bool) -> None:
    @forge_or_sentinel_guard(timeout_ms=LONG_MS, max_retries=1)
    def double(n: int) -> int:
        return 2 * n

    @forge_or_sentinel_guard(timeout_ms=LONG_MS, max_retries=1)
    async def adouble(n: int) -> int:
        return 2 * n

    ledger = bench.open()

    @ledger.agent()
    def agent(run: Run) -> list[int]:
        return run.map(double, [1, 2, 3])  # type: ignore[no-any-return]

    @ledger.agent(name="aagent")
    async def aagent(run: Run) -> list[int]:
        return await run.map(adouble, [1, 2, 3])  # type: ignore[no-any-return]

    assert ledger.run(aagent if is_async else agent, run_id=RUN) == [2, 4, 6]
    assert [step.state for step in ledger.steps(RUN)] == ["COMPLETED"] * 3
