"""A step in doubt whose receiver can be asked: every question and answer is an entry, and nothing is sent on a guess."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any, NoReturn

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Effect,
    InvalidArguments,
    Receipt,
    RetryPolicy,
    RunClosed,
    StepFailed,
    StepInDoubt,
    UnserialisableOutput,
    current_step,
)
from agent_run_ledger.model import TraceLine
from agent_run_ledger.testing import MemoryStore
from support.ledgers import RUN, Bench, Died, Tool, never, program, raising
from support.programs import Invoice

pytestmark = pytest.mark.filterwarnings("ignore::agent_run_ledger.UndeclaredEffectWarning")

SLOW = TimeoutError("no answer in time")
NOW_AND_AGAIN = RetryPolicy(max_attempts=3, base=10.0, cap=15.0)


def die(*_: Any) -> NoReturn:
    """The process ends here."""
    raise Died


class Asked:
    """A receipt function that notes what it is asked and gives `answers` one after the other, the last for ever."""

    def __init__(self, *answers: Any) -> None:
        self._answer = Tool(*answers)
        self.questions: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, key: str, arguments: dict[str, Any]) -> Any:
        self.questions.append((key, arguments))
        return self._answer()

    def __len__(self) -> int:
        return len(self.questions)


def pay(ledger: AgentRunLedger, function: Callable[..., Any], receipt: Any = None, **options: Any) -> Any:
    """The one call of these programs."""
    options = {"effect": Effect.MUTATE, "receipt": receipt} | options
    return ledger.execute_step(RUN, "pay", {"amount": 7}, function, **options)


def die_while_paying(bench: Bench, **options: Any) -> None:
    """A process that is gone between the dispatch and its outcome."""
    with pytest.raises(Died):
        pay(program(bench), raising(Died()), **options)


def bodies(bench: Bench, *kinds: str) -> list[dict[str, Any]]:
    return [json.loads(row.body) for row in bench.rows(RUN) if row.kind in kinds]


def trace(bench: Bench) -> list[TraceLine]:
    return bench.open().trace(RUN)


def verdicts(bench: Bench) -> list[tuple[str, str]]:
    """What each question was answered, and the reason as it stands in the log."""
    told = []
    for row in bench.rows(RUN):
        if row.kind == "answered":
            reason = json.loads(row.payload)["reason"] if row.payload else ""
            told.append((json.loads(row.body)["verdict"], reason))
    return told


# --- what each answer leads to ----------------------------------------------------------------------------------------


def test_found_is_the_outcome_and_nothing_is_dispatched(bench: Bench) -> None:
    die_while_paying(bench)
    asked = Asked(Receipt.found({"id": "ch_1"}))
    assert pay(program(bench), never, asked) == {"id": "ch_1"}
    assert bench.kinds(RUN) == ["created", "intent", "asked", "answered", "outcome"]
    (outcome,) = bodies(bench, "outcome")
    assert (outcome["ok"], outcome["reconciled"], outcome["attempt"]) == ("completed", True, 1)
    assert verdicts(bench) == [("found", "")]
    assert pay(program(bench), never, never) == {"id": "ch_1"}, "a replay asks nobody"
    assert bench.open().verify().ok


def test_absent_dispatches_again_with_the_same_key_and_bytes(bench: Bench) -> None:
    sent: list[tuple[str, int, int]] = []

    def send(amount: int) -> str:
        sent.append((current_step().idempotency_key, current_step().attempt, amount))
        if len(sent) == 1:
            raise Died
        return "paid"

    with pytest.raises(Died):
        pay(program(bench), send)
    asked = Asked(Receipt.absent())
    assert pay(program(bench), send, asked) == "paid"
    (first, second) = sent
    assert (first[0], first[2]) == (second[0], second[2])
    assert [first[1], second[1]] == [1, 2]
    assert asked.questions == [(first[0], {"amount": 7})], "the stored key and the stored arguments"
    assert bench.kinds(RUN) == ["created", "intent", "asked", "answered", "intent", "outcome"]
    assert [row.payload for row in bench.rows(RUN) if row.kind == "intent"] == [b'{"amount":7}'] * 2
    assert "reconciled" not in bodies(bench, "outcome")[0]


def test_unknown_waits_by_the_retry_policy_and_asks_again(bench: Bench) -> None:
    die_while_paying(bench, retry=NOW_AND_AGAIN)
    asked = Asked(Receipt.unknown("the status page is down"), Receipt.unknown("still"), Receipt.found(1))
    begun = bench.clock.now()
    assert pay(program(bench), never, asked, retry=NOW_AND_AGAIN) == 1
    begun += 31  # until the dead owner's lease had run out
    assert len(asked) == 3
    assert verdicts(bench) == [("unknown", "the status page is down"), ("unknown", "still"), ("found", "")]
    first, second, last = bodies(bench, "answered")
    assert 0 <= first["wait"] <= 10.0
    assert 0 <= second["wait"] <= 15.0
    assert first["retry_at"] == pytest.approx(first["at"] + first["wait"])
    assert "retry_at" not in last
    assert bench.clock.now() - begun == pytest.approx(first["wait"] + second["wait"])
    assert [entry["question"] for entry in bodies(bench, "asked")] == [1, 1, 1], "each was answered"
    assert bench.kinds(RUN) == ["created", "intent", *["asked", "answered"] * 3, "outcome"]


def test_while_a_receiver_cannot_say_the_run_is_blocked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    die_while_paying(bench)
    ledger, sleep, seen = program(bench), bench.clock.sleep, []

    def look(seconds: float) -> None:
        seen.append((ledger.get_run(RUN).status, ledger.steps(RUN)[0].state))
        sleep(seconds)

    monkeypatch.setattr(bench.clock, "sleep", look)
    pay(ledger, never, Asked(Receipt.unknown("?"), Receipt.unknown("?"), Receipt.found(1)))
    assert set(seen) == {("BLOCKED", "BLOCKED")}


def test_after_as_many_questions_as_attempts_the_run_parks_in_doubt_and_the_next_start_asks_anew(bench: Bench) -> None:
    die_while_paying(bench)
    asked = Asked(Receipt.unknown("down"))
    for life in (1, 2):
        ledger = program(bench)
        with pytest.raises(StepInDoubt, match="could not say: down"):
            pay(ledger, never, asked, retry=RetryPolicy(max_attempts=3))
        assert len(asked) == 3 * life
        record = ledger.get_run(RUN)
        assert (record.status, record.owner) == ("BLOCKED", None)
        assert "could not say: down" in (record.cause or "")
    assert pay(program(bench), never, Asked(Receipt.found("paid"))) == "paid"
    assert bench.kinds(RUN).count("parked") == 2
    assert bench.open().verify().ok


def test_a_crash_while_it_waits_for_the_next_question_restarts_no_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = RetryPolicy(base=1000.0, cap=1000.0)
    die_while_paying(bench, retry=patient)
    ledger = program(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.clock, "sleep", die)
        with pytest.raises(Died):
            pay(ledger, never, Asked(Receipt.unknown("?")), retry=patient)
    (answer,) = bodies(bench, "answered")
    ledger = program(bench)
    bench.clock.set_wall(answer["retry_at"] - 5.0)
    bench.clock.sleeps.clear()
    assert pay(ledger, never, Asked(Receipt.found(1)), retry=patient) == 1
    assert sum(bench.clock.sleeps) == pytest.approx(5.0), "the rest of the wait"


# --- what is no answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OSError("unreachable"), "it raised OSError: unreachable"),
        (None, "receipt= returned NoneType, not a Receipt"),
        ("found", "receipt= returned str, not a Receipt"),
        ({"verdict": "found"}, "receipt= returned dict, not a Receipt"),
        (Receipt.unknown(""), ""),
        (Receipt.unknown("x" * 5000), "x" * 2000),
        (Receipt.unknown("lone \ud800"), "lone ?"),
    ],
)
def test_whatever_is_no_receipt_says_nothing(bench: Bench, answer: Any, reason: str) -> None:
    die_while_paying(bench)
    assert pay(program(bench), never, Asked(answer, Receipt.found("paid"))) == "paid"
    assert verdicts(bench) == [("unknown", reason), ("found", "")]


def test_an_interruption_in_a_question_goes_on_its_way(bench: Bench) -> None:
    die_while_paying(bench)
    ledger = program(bench)
    with pytest.raises(KeyboardInterrupt):
        pay(ledger, never, Asked(KeyboardInterrupt()))
    assert bench.kinds(RUN) == ["created", "intent", "asked"]
    with pytest.raises(StepInDoubt):
        ledger.execute_step(RUN, "next", {}, never)
    assert pay(program(bench), never, Asked(Receipt.found(1))) == 1


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_question_that_hangs_is_given_up_after_the_tools_timeout(bench: Bench, gate: threading.Event) -> None:
    die_while_paying(bench)

    def hangs_at_first(key: str, arguments: dict[str, Any]) -> Receipt:
        questions.append(key)
        if len(questions) == 1:
            assert gate.wait(60)
        return Receipt.found("paid")

    questions: list[str] = []
    assert pay(program(bench), never, hangs_at_first, timeout=0.2) == "paid"
    (first, *_) = verdicts(bench)
    assert first == ("unknown", "it raised TimeoutError: no answer within 0.2 s")


def test_an_async_question_is_awaited_and_one_that_hangs_is_cancelled(bench: Bench) -> None:
    die_while_paying(bench)
    cancelled = []

    async def hangs_at_first(key: str, arguments: dict[str, Any]) -> Receipt:
        if not cancelled:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(key)
        return Receipt.found("paid")

    async def resumes() -> Any:
        ledger = program(bench)
        options: dict[str, Any] = {"effect": Effect.MUTATE, "receipt": hangs_at_first, "timeout": 0.2}
        return await ledger.aexecute_step(RUN, "pay", {"amount": 7}, never, **options)

    assert asyncio.run(resumes()) == "paid"
    assert len(cancelled) == 1
    assert [verdict for verdict, _ in verdicts(bench)] == ["unknown", "found"]


def test_a_plain_question_does_not_hold_up_the_event_loop_of_an_async_program(bench: Bench) -> None:
    die_while_paying(bench)

    async def resumes() -> Any:
        ledger, loop = program(bench), asyncio.get_running_loop()
        turned = threading.Event()

        def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
            loop.call_soon_threadsafe(turned.set)
            return Receipt.found(turned.wait(60))

        return await ledger.aexecute_step(RUN, "pay", {"amount": 7}, never, effect=Effect.MUTATE, receipt=receipt)

    assert asyncio.run(resumes()) is True


# --- questions that end their process ---------------------------------------------------------------------------------


def test_questions_that_killed_their_process_count_and_are_then_not_asked_any_more(bench: Bench) -> None:
    policy = RetryPolicy(max_attempts=3)
    die_while_paying(bench, retry=policy)
    for _ in range(3):
        with pytest.raises(Died):
            pay(program(bench), never, Asked(Died()), retry=policy)
    assert [entry["question"] for entry in bodies(bench, "asked")] == [1, 2, 3]
    for _ in range(2):
        ledger = program(bench)
        with pytest.raises(StepInDoubt, match="the process ended 3 times while its receiver was asked"):
            pay(ledger, never, never, retry=policy)
        assert ledger.get_run(RUN).status == "BLOCKED"


def test_a_question_that_was_answered_ends_the_row_of_those_that_killed(bench: Bench) -> None:
    policy = RetryPolicy(max_attempts=2, base=0.0)
    die_while_paying(bench, retry=policy)
    for _ in range(3):
        with pytest.raises(Died):
            pay(program(bench), never, Asked(Receipt.unknown("?"), Died()), retry=policy)
    assert pay(program(bench), never, Asked(Receipt.found(1)), retry=policy) == 1


# --- what was found ---------------------------------------------------------------------------------------------------


def test_what_was_found_is_handed_out_as_the_functions_own_output(bench: Bench) -> None:
    die_while_paying(bench, returns=Invoice)
    for receipt in (Asked(Receipt.found(Invoice(1, "ann"))), never):
        assert pay(program(bench), never, receipt, returns=Invoice) == Invoice(1, "ann")


def test_plain_data_that_was_found_is_built_as_it_is_declared(bench: Bench) -> None:
    die_while_paying(bench, returns=Invoice)
    found = Receipt.found({"number": 1, "customer": "ann"})
    for receipt in (Asked(found), never):
        assert pay(program(bench), never, receipt, returns=Invoice) == Invoice(1, "ann")


def test_found_with_none_is_an_output(bench: Bench) -> None:
    die_while_paying(bench)
    for receipt in (Asked(Receipt.found(None)), never):
        assert pay(program(bench), never, receipt) is None
    assert [step.output_json for step in bench.open().steps(RUN)] == ["null"]


def test_an_output_that_was_found_and_cannot_be_stored_is_recorded_as_executed(bench: Bench) -> None:
    die_while_paying(bench)
    for receipt in (Asked(Receipt.found(object())), never):
        with pytest.raises(UnserialisableOutput):
            pay(program(bench), never, receipt)
    (outcome,) = bodies(bench, "outcome")
    assert (outcome["ok"], outcome["reconciled"]) == ("unstorable", True)


def test_the_trace_tells_of_question_answer_and_where_the_outcome_comes_from(bench: Bench) -> None:
    die_while_paying(bench)
    pay(program(bench), never, Asked(Receipt.unknown("down"), Receipt.found(1)))
    lines = [(line.event, line.text) for line in trace(bench) if line.step_number == 1]
    events = [event for event, _ in lines]
    assert events == [
        "dispatched",
        "receipt asked",
        "receipt unknown",
        "receipt asked",
        "receipt found",
        "reconciled, completed",
    ]
    assert lines[2][1] == "down"
    assert "changes something each time" in lines[1][1]


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_question_is_in_the_log_before_it_is_asked(bench: Bench) -> None:
    die_while_paying(bench)

    def looks(key: str, arguments: dict[str, Any]) -> Receipt:
        kinds.append(bench.kinds(RUN))
        return Receipt.found(1)

    kinds: list[list[str]] = []
    pay(program(bench), never, looks)
    assert kinds == [["created", "intent", "asked"]]


def test_the_question_gets_the_stored_key_and_the_arguments_as_they_are_annotated(bench: Bench) -> None:
    seen: list[Any] = []

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        seen.append((key, arguments))
        return Receipt.absent() if len(seen) == 2 else Receipt.found("posted")

    def post(invoice: Invoice, day: date) -> str:
        seen.append((current_step().idempotency_key, {"invoice": invoice, "day": day}))
        raise Died

    arguments = {"invoice": Invoice(1, "ann"), "day": date(2026, 10, 1)}
    for _ in range(2):
        with pytest.raises(Died):
            program(bench).execute_step(RUN, "post", arguments, post, receipt=receipt)
    assert program(bench).execute_step(RUN, "post", arguments, post, receipt=receipt) == "posted"
    assert len(seen) == 4
    assert all(each == seen[0] for each in seen)
    assert seen[0][1] == arguments


def test_a_question_to_a_changed_program_asks_about_what_was_sent_then(bench: Bench) -> None:
    """`identity=` lets a replay differ in the rest of the arguments; the receiver knows what was sent."""
    by_amount: dict[str, Any] = {"effect": Effect.MUTATE, "identity": lambda arguments: arguments["amount"]}
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "pay", {"amount": 7, "note": "a"}, raising(Died()), **by_amount)
    asked = Asked(Receipt.found(1))
    program(bench).execute_step(RUN, "pay", {"amount": 7, "note": "b"}, never, receipt=asked, **by_amount)
    assert [arguments for _, arguments in asked.questions] == [{"amount": 7, "note": "a"}]


def test_long_arguments_are_asked_about_too(bench: Bench) -> None:
    long = "é" * 5000
    with pytest.raises(Died):
        program(bench).execute_step(RUN, "pay", {"text": long}, raising(Died()), effect=Effect.MUTATE)
    asked = Asked(Receipt.unknown("?"), Receipt.absent())
    assert program(bench).execute_step(RUN, "pay", {"text": long}, lambda text: len(text), receipt=asked) == 5000
    assert [arguments for _, arguments in asked.questions] == [{"text": long}] * 2


# --- declaring it -----------------------------------------------------------------------------------------------------


def test_a_receipt_makes_a_tool_that_declares_nothing_else_a_mutation(bench: Bench) -> None:
    ledger = program(bench)
    ledger.execute_step(RUN, "pay", {}, lambda: 1, receipt=never)
    assert ledger.steps(RUN)[0].effect == "MUTATE"


@pytest.mark.parametrize("options", [{"effect": Effect.READ}, {"kind": "model"}, {"effect": "READ"}])
def test_a_receipt_of_what_changes_nothing_is_refused(bench: Bench, options: dict[str, Any]) -> None:
    ledger = program(bench)
    with pytest.raises(InvalidArguments, match="changes nothing"):
        ledger.execute_step(RUN, "look", {}, never, receipt=never, **options)
    with pytest.raises(InvalidArguments, match="changes nothing"):
        ledger.tool(name="look", receipt=never, **options)(lambda: None)
    assert bench.kinds(RUN) == ["created"]


@pytest.mark.parametrize("name", ["receipt", "classify"])
def test_what_is_no_function_is_refused(bench: Bench, name: str) -> None:
    options: dict[str, Any] = {name: Receipt.absent()}
    with pytest.raises(InvalidArguments, match=f"{name}= is a function"):
        program(bench).execute_step(RUN, "pay", {}, never, **options)


@pytest.mark.parametrize("window", [0, -1.0, timedelta(0), "1 day", True, float("nan")])
def test_a_key_window_that_is_no_length_of_time_is_refused(bench: Bench, window: Any) -> None:
    with pytest.raises(InvalidArguments, match="key_window= is a number of seconds or a timedelta"):
        program(bench).execute_step(RUN, "pay", {}, never, effect=Effect.IDEMPOTENT, key_window=window)


# --- ambiguous errors, in one life ------------------------------------------------------------------------------------


def test_an_ambiguous_error_is_asked_about_at_once_and_found_is_what_the_call_returns(bench: Bench) -> None:
    tool, asked = Tool(SLOW), Asked(Receipt.found("paid"))
    ledger = program(bench)
    assert pay(ledger, tool, asked) == "paid"
    assert tool.calls == 1
    assert bench.kinds(RUN) == ["created", "intent", "asked", "answered", "outcome"]
    assert ledger.steps(RUN)[0].state == "COMPLETED"
    assert "TimeoutError: no answer in time does not tell" in [line.text for line in trace(bench)][2]


def test_absent_after_an_ambiguous_error_sends_it_again_in_the_same_life_with_the_same_key(bench: Bench) -> None:
    keys = []

    def send(amount: int) -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            raise SLOW
        return "paid"

    assert pay(program(bench), send, Asked(Receipt.absent())) == "paid"
    assert len(keys) == 2
    assert len(set(keys)) == 1


@pytest.mark.parametrize("retry", [None, RetryPolicy(max_attempts=4)])
def test_absent_with_its_attempts_used_up_raises_the_live_error_and_says_that_nothing_happened(
    bench: Bench, retry: RetryPolicy | None
) -> None:
    tool, asked = Tool(SLOW), Asked(Receipt.absent())
    ledger = program(bench)
    with pytest.raises(StepFailed, match="no answer in time") as caught:
        pay(ledger, tool, asked, retry=retry)
    assert caught.value.__cause__ is SLOW
    assert (tool.calls, len(asked)) == (4, 4)
    (outcome,) = bodies(bench, "outcome")
    assert (outcome["ok"], outcome["left"]) == ("failed", 0)
    assert not {"ambiguous", "unproven"} & outcome.keys(), "it is known that it did not take effect"
    assert ledger.execute_step(RUN, "fallback", {}, lambda: 2) == 2
    with pytest.raises(StepFailed):
        pay(program(bench), never, never, retry=retry)


def test_a_declared_error_comes_through_when_the_receipt_says_absent(bench: Bench) -> None:
    with pytest.raises(TimeoutError) as caught:
        pay(program(bench), Tool(SLOW), Asked(Receipt.absent()), raises=TimeoutError)
    assert caught.value is SLOW


def test_absent_with_its_attempts_used_up_by_crashes_is_a_dead_letter(bench: Bench) -> None:
    options: dict[str, Any] = {"retry": RetryPolicy(max_attempts=2), "version": "1"}
    die_while_paying(bench, **options)
    with pytest.raises(Died):
        pay(program(bench), raising(Died()), Asked(Receipt.absent()), **options)
    with pytest.raises(AttemptsExhausted, match="dispatched 2 times"):
        pay(program(bench), never, Asked(Receipt.absent()), **options)
    ledger = bench.open()
    assert ledger.get_run(RUN).status == "DEAD_LETTER"
    assert bench.kinds(RUN)[-3:] == ["asked", "answered", "exhausted"]
    assert [run.run_id for run in ledger.dead_letters()] == [RUN]
    with pytest.raises(RunClosed):
        pay(program(bench), never, never, **options)
    assert ledger.verify().ok


def test_unknown_after_an_ambiguous_error_parks_with_the_doubt_and_the_program_cannot_go_on(bench: Bench) -> None:
    ledger, asked = program(bench), Asked(Receipt.unknown("down"))
    with pytest.raises(StepInDoubt, match="could not say: down"):
        pay(ledger, Tool(SLOW), asked)
    assert len(asked) == 4
    with pytest.raises(StepInDoubt):
        ledger.execute_step(RUN, "other", {}, never)
    assert pay(program(bench), never, Asked(Receipt.found(1))) == 1


def test_a_mutation_whose_tool_says_that_its_error_is_ambiguous_is_asked_about(bench: Bench) -> None:
    ours = {"classify": lambda error: "ambiguous"}
    assert pay(program(bench), Tool(ValueError("odd")), Asked(Receipt.found(1)), **ours) == 1


# --- failures that prove nothing --------------------------------------------------------------------------------------


def test_a_trailing_failure_of_a_mutation_that_proves_nothing_is_asked_about_by_a_rerun(bench: Bench) -> None:
    with pytest.raises(StepFailed):
        pay(program(bench), Tool(ValueError("odd")), never)
    (outcome,) = bodies(bench, "outcome")
    assert outcome["unproven"] is True
    assert pay(program(bench), never, Asked(Receipt.found("paid"))) == "paid"
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "asked", "answered", "outcome"]
    assert bench.open().verify().ok


def test_without_a_receipt_a_rerun_parks_instead(bench: Bench) -> None:
    with pytest.raises(StepFailed):
        pay(program(bench), Tool(ValueError("odd")))
    for _ in range(2):
        ledger = program(bench)
        with pytest.raises(StepInDoubt):
            pay(ledger, never)
        assert ledger.get_run(RUN).status == "BLOCKED"


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ConnectionRefusedError("nobody there"), {}),
        (ValueError("odd"), {"raises": ValueError}),
        (ValueError("odd"), {"classify": lambda error: "fatal"}),
        (ValueError("odd"), {"classify": lambda error: "retryable"}),
        (ValueError("odd"), {"retry": RetryPolicy(max_attempts=1)}),
    ],
)
def test_a_failure_that_proves_or_declares_that_nothing_happened_is_tried_again(
    bench: Bench, error: Exception, options: dict[str, Any]
) -> None:
    with pytest.raises((StepFailed, ValueError)):
        pay(program(bench), Tool(error), **options)
    assert "unproven" not in bodies(bench, "outcome")[0]
    if "retry" in options:
        options = {"retry": RetryPolicy(max_attempts=2)}
    assert pay(program(bench), lambda: "paid", **options) == "paid"


def test_a_failure_that_proves_nothing_is_an_error_like_any_for_its_own_program(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, Tool(ValueError("odd")))
    assert ledger.execute_step(RUN, "fallback", {}, lambda: 2) == 2
    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, never)
    assert ledger.execute_step(RUN, "fallback", {}, never) == 2


# --- key windows ------------------------------------------------------------------------------------------------------

IDEMPOTENT: dict[str, Any] = {"effect": Effect.IDEMPOTENT, "key_window": timedelta(hours=1)}
HOUR = 3600.0


def test_within_its_window_a_key_is_sent_again_unasked(bench: Bench) -> None:
    die_while_paying(bench, **IDEMPOTENT)
    (intent,) = bodies(bench, "intent")
    assert intent["key_window"] == HOUR
    bench.clock.set_wall(intent["at"] + HOUR)
    ledger = program(bench)
    bench.clock.set_wall(intent["at"] + HOUR)
    assert pay(ledger, lambda: "paid", never, **IDEMPOTENT) == "paid"


def test_past_its_window_a_key_is_not_sent_any_more(bench: Bench) -> None:
    die_while_paying(bench, **IDEMPOTENT)
    bench.clock.advance(HOUR)
    ledger = program(bench)
    with pytest.raises(StepInDoubt, match="forgotten its idempotency key"):
        pay(ledger, never, **IDEMPOTENT)
    assert ledger.get_run(RUN).status == "BLOCKED"


@pytest.mark.parametrize("effect", [Effect.IDEMPOTENT, "IDEMPOTENT"], ids=["as it is", "by its name"])
def test_past_its_window_the_receiver_is_asked_where_it_can_be(bench: Bench, effect: Any) -> None:
    options = IDEMPOTENT | {"effect": effect}
    die_while_paying(bench, **options)
    bench.clock.advance(HOUR)
    assert pay(program(bench), never, Asked(Receipt.found("paid")), **options) == "paid"
    assert [line.text for line in trace(bench)][2].endswith("the receiver has forgotten its idempotency key")


def test_a_window_counts_from_the_first_dispatch_and_not_from_the_last(bench: Bench) -> None:
    for _ in range(2):
        die_while_paying(bench, **IDEMPOTENT)
        bench.clock.advance(HOUR * 0.6)
    with pytest.raises(StepInDoubt):
        pay(program(bench), never, **IDEMPOTENT)


@pytest.mark.parametrize("has_receipt", [False, True])
def test_a_retry_whose_wait_outlasts_the_window_is_not_made_after_an_ambiguous_error(
    bench: Bench, has_receipt: bool
) -> None:
    slow_down = SlowDown("later", HOUR * 2)
    tool = Tool(slow_down, never)
    options = IDEMPOTENT | {"retry": RetryPolicy(), "classify": lambda error: "ambiguous"}
    ledger = program(bench)
    if has_receipt:
        assert pay(ledger, tool, Asked(Receipt.found("paid")), **options) == "paid"
    else:
        with pytest.raises(StepInDoubt, match="forgotten"):
            pay(ledger, tool, **options)
    assert tool.calls == 1
    assert bench.open().verify().ok


class SlowDown(Exception):
    """An error as HTTP clients raise it: with the answer's headers."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.status_code = 429
        self.headers = {"retry-after": f"{seconds:.0f}"}


def test_within_the_window_an_ambiguous_error_is_retried_as_ever(bench: Bench) -> None:
    tool = Tool(SLOW, SLOW, "paid")
    assert pay(program(bench), tool, never, **IDEMPOTENT, retry=RetryPolicy(base=1.0)) == "paid"
    assert tool.calls == 3


# --- what a server asks for -------------------------------------------------------------------------------------------


def test_the_wait_that_a_server_asks_for_wins_where_it_is_longer(bench: Bench) -> None:
    tool = Tool(SlowDown("later", 120), "paid")
    begun = bench.clock.now() + 31
    assert pay(program(bench), tool, retry=RetryPolicy(base=1.0)) == "paid"
    assert bench.clock.now() - begun == pytest.approx(120.0)
    assert bodies(bench, "outcome")[0]["wait"] == 120.0


def test_a_shorter_one_does_not(bench: Bench) -> None:
    pay(
        program(bench),
        Tool(SlowDown("later", 0), "paid"),
        retry=RetryPolicy(base=64.0, cap=64.0, jitter="decorrelated"),
    )
    assert bodies(bench, "outcome")[0]["wait"] >= 64.0


def test_a_crash_does_not_restart_the_wait_that_a_server_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = program(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.clock, "sleep", die)
        with pytest.raises(Died):
            pay(ledger, Tool(SlowDown("later", 500)), retry=RetryPolicy())
    due = bodies(bench, "outcome")[0]["retry_at"]
    ledger = program(bench)
    bench.clock.set_wall(due - 7.0)
    assert pay(ledger, lambda: "paid", retry=RetryPolicy()) == "paid"
    assert sum(bench.clock.sleeps) == pytest.approx(7.0)


def test_no_server_makes_a_step_wait_for_longer_than_a_day(bench: Bench) -> None:
    pay(program(bench), Tool(SlowDown("later", 1e9), "paid"), retry=RetryPolicy())
    assert bodies(bench, "outcome")[0]["wait"] == 86_400.0


# --- what the tool knows of its errors --------------------------------------------------------------------------------


class Odd(Exception):
    """An error of which nobody knows anything but its tool."""


@pytest.mark.parametrize(
    ("answer", "calls", "is_ambiguous"),
    [("retryable", 3, False), ("fatal", 1, False), ("ambiguous", 3, True), (None, 3, False)],
)
def test_what_a_tool_says_of_its_error_is_followed(
    bench: Bench, answer: str | None, calls: int, is_ambiguous: bool
) -> None:
    tool, asked = Tool(Odd("?")), []

    def classify(error: BaseException) -> str | None:
        asked.append(error)
        return answer

    ledger = program(bench)
    with pytest.raises(StepFailed):
        pay(ledger, tool, effect=Effect.IDEMPOTENT, classify=classify, retry=RetryPolicy(max_attempts=3, base=0.0))
    assert tool.calls == calls
    assert len(asked) == calls
    assert {"ambiguous" in outcome for outcome in bodies(bench, "outcome")} == {is_ambiguous}
    assert ledger.execute_step(RUN, "fallback", {}, lambda: 2) == 2


@pytest.mark.parametrize("broken", [lambda error: "perhaps", raising(ZeroDivisionError())], ids=["answers", "raises"])
def test_a_broken_classifier_is_said_aloud_and_costs_no_outcome(bench: Bench, broken: Callable[..., Any]) -> None:
    tool, ledger = Tool(Odd("?")), program(bench)
    options: dict[str, Any] = {"effect": Effect.READ, "classify": broken, "retry": RetryPolicy(base=0.0)}
    with pytest.warns(UserWarning, match="classify=") as warnings, pytest.raises(StepFailed, match="Odd"):
        pay(ledger, tool, **options)
    assert len(warnings) == 1, "once, whatever it is asked"
    assert tool.calls == 4


def test_a_program_that_makes_that_warning_an_error_loses_no_outcome(bench: Bench) -> None:
    options: dict[str, Any] = {"classify": lambda error: "perhaps"}
    with pytest.raises(UserWarning, match="perhaps"):
        pay(program(bench), Tool(Odd("?")), effect=Effect.IDEMPOTENT, **options)
    assert [outcome["ok"] for outcome in bodies(bench, "outcome")] == ["failed"]


@pytest.mark.parametrize("error", [NotImplementedError("x"), type("HTTP", (Exception,), {"status_code": 404})("gone")])
def test_what_cannot_be_helped_by_another_try_is_not_retried(bench: Bench, error: Exception) -> None:
    from agent_run_ledger.rules.classify import classify

    tool = Tool(error)
    with pytest.raises(StepFailed):
        pay(program(bench), tool, effect=Effect.READ, retry=RetryPolicy(base=0.0))
    assert tool.calls == (1 if classify(error).verdict == "fatal" else 4)


def test_a_tool_may_call_an_ambiguous_error_harmless(bench: Bench) -> None:
    """What its tool knows of a timeout goes before what timeouts mean elsewhere."""
    tool = Tool(SLOW, "paid")
    assert pay(program(bench), tool, classify=lambda error: "retryable", retry=RetryPolicy(base=0.0)) == "paid"
    assert tool.calls == 2


@pytest.mark.parametrize("answer", ["retryable", "fatal", None])
def test_a_fatal_error_ends_the_run_whatever_the_classifier_says(bench: Bench, answer: str | None) -> None:
    ledger, tool = program(bench), Tool(Odd("?"))
    with pytest.raises(StepFailed):
        pay(ledger, tool, fatal=Odd, classify=lambda error: answer, retry=RetryPolicy(base=0.0))
    assert tool.calls == 1
    assert ledger.get_run(RUN).status == "FAILED"


def test_an_ambiguous_error_of_a_mutation_is_in_doubt_even_where_it_is_declared_fatal(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(StepInDoubt):
        pay(ledger, Tool(SLOW), fatal=TimeoutError)
    assert ledger.get_run(RUN).status == "BLOCKED"


# --- threads that go on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [Receipt.absent(), Receipt.found("asked")])
def test_while_its_thread_runs_on_nobody_is_asked_and_its_late_return_is_the_receipt(
    gate: threading.Event, says: Receipt
) -> None:
    """A receiver that says *absent* of a call that is on its way would have it made twice."""
    calls, asked = [], Asked(says)

    def slow(amount: int) -> str:
        calls.append(amount)
        assert gate.wait(60)
        return "paid after all"

    with AgentRunLedger(MemoryStore(), durability="process") as ledger:  # its thread takes real time
        ledger.create_run("pay", RUN)
        for _ in range(2):
            with pytest.raises(StepInDoubt):
                pay(ledger, slow, asked, timeout=0.05)
        gate.set()
        assert pay(ledger, slow, asked, timeout=60.0) == "paid after all"
        assert calls == [7]
        assert len(asked) == 0
        assert ledger.verify().ok


# --- settling before a program begins ---------------------------------------------------------------------------------


class Shop:
    """A ledger with registered tools, and an agent that calls them: what happens is noted in order."""

    def __init__(
        self, bench: Bench, happened: list[str], *, is_async: bool, dies_in: str = "", **receipts: Any
    ) -> None:
        bench.owners_die()
        self.ledger, self.is_async = bench.open(), is_async
        self.happened = happened
        self.dies_in = dies_in
        self.tools = {
            "think": self.tool("think", kind="model"),
            "look": self.tool("look", effect=Effect.READ),
            "note": self.tool("note", effect=Effect.IDEMPOTENT),
            "pay": self.tool("pay", effect=Effect.MUTATE, receipt=receipts.get("pay", self.receipt)),
            "give": self.tool("give", effect=Effect.MUTATE),
        }

    def tool(self, name: str, **options: Any) -> Callable[..., Any]:
        def work(given: str) -> str:
            self.happened.append(f"{name}({given})")
            if given in self.dies_in.split():
                raise Died
            return f"{name} {given}"

        async def awork(given: str) -> str:
            return work(given)

        return self.ledger.tool(name=name, **options)(awork if self.is_async else work)

    def receipt(self, key: str, arguments: dict[str, Any]) -> Receipt:
        self.happened.append(f"receipt({arguments['given']})")
        return Receipt.found("found")

    def run(self, name: str) -> Any:
        """The agent calls one tool, and another one after it."""
        tools = self.tools
        if self.is_async:

            async def agent() -> Any:
                self.happened.append("agent")
                return [await tools[name]("1"), await tools["look"]("2")]

            return asyncio.run(self.ledger.arun(self.ledger.agent()(agent), run_id=RUN))

        def plain() -> Any:
            self.happened.append("agent")
            return [tools[name]("1"), tools["look"]("2")]

        return self.ledger.run(self.ledger.agent(name="agent")(plain), run_id=RUN)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("name", "settling", "output"),
    [
        ("look", ["agent", "look(1)"], "look 1"),
        ("note", ["note(1)", "agent"], "note 1"),
        ("pay", ["receipt(1)", "agent"], "found"),
        ("think", ["agent", "think(1)"], "think 1"),
    ],
)
def test_what_a_program_left_in_doubt_is_settled_before_its_code_runs_but_no_model_is_asked(
    bench: Bench, name: str, settling: list[str], output: str, is_async: bool
) -> None:
    with pytest.raises(Died):
        Shop(bench, [], is_async=is_async, dies_in="1").run(name)
    happened: list[str] = []
    assert Shop(bench, happened, is_async=is_async).run(name) == [output, "look 2"]
    assert happened == [*settling, "look(2)"]
    assert bench.open().verify().ok


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_mutation_nobody_can_be_asked_about_keeps_its_program_from_beginning(bench: Bench, is_async: bool) -> None:
    with pytest.raises(Died):
        Shop(bench, [], is_async=is_async, dies_in="1").run("give")
    happened: list[str] = []
    for _ in range(2):
        shop = Shop(bench, happened, is_async=is_async)
        with pytest.raises(StepInDoubt):
            shop.run("give")
        assert shop.ledger.get_run(RUN).status == "BLOCKED"
    assert happened == []
    assert [row.position for row in bench.rows(RUN) if row.kind == "parked"].count("1") == 1


def test_siblings_of_a_parked_step_are_settled_once_and_not_at_every_start(bench: Bench) -> None:
    """Six starts of a program with a mutation in doubt: its sibling that may be sent again is called once in all."""

    def start(happened: list[str], dies_in: str = "") -> None:
        shop = Shop(bench, happened, is_async=True, dies_in=dies_in)

        async def both() -> Any:
            happened.append("agent")
            return await asyncio.gather(shop.tools["note"]("1"), shop.tools["give"]("1"))

        asyncio.run(shop.ledger.arun(shop.ledger.agent()(both), run_id=RUN))

    first: list[str] = []
    with pytest.raises(Died):
        start(first, dies_in="1")
    happened: list[str] = []
    for _ in range(6):
        with pytest.raises(StepInDoubt):
            start(happened)
    assert happened == ["note(1)"]


def test_a_sibling_that_fails_while_it_is_settled_is_not_called_again_at_every_start_either(bench: Bench) -> None:
    def start(happened: list[str], error: BaseException) -> None:
        bench.owners_die()
        ledger = bench.open()

        @ledger.tool(effect=Effect.IDEMPOTENT)
        async def look() -> None:
            happened.append("look")
            raise error

        @ledger.tool(effect=Effect.MUTATE)
        async def give() -> None:
            happened.append("give")
            await asyncio.Event().wait()

        @ledger.agent()
        async def both() -> Any:
            happened.append("agent")
            return await asyncio.gather(give(), look())

        asyncio.run(ledger.arun(both, run_id=RUN))

    with pytest.raises(Died):
        start([], Died())
    happened: list[str] = []
    for _ in range(6):
        with pytest.raises(StepInDoubt):
            start(happened, ConnectionRefusedError("nobody there"))
    assert happened == ["look"]
    assert bench.open().get_run(RUN).status == "BLOCKED"


def test_resume_run_settles_what_its_tools_are_given_for(bench: Bench) -> None:
    die_while_paying(bench)
    ledger = program(bench)
    with pytest.raises(Died):
        ledger.execute_step(RUN, "pay", {"amount": 7}, raising(Died()), receipt=Asked(Receipt.absent()))
    bench.owners_die()
    ledger = bench.open()
    happened: list[str] = []

    def receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        happened.append(f"asked about {arguments}")
        return Receipt.found("paid")

    def work(amount: int) -> str:
        pytest.fail("it was dispatched again")

    ledger.tool(name="pay", effect=Effect.MUTATE, receipt=receipt)(work)
    (record,) = ledger.resume_run(RUN)
    assert (record.state, record.output_json, record.replayed) == ("COMPLETED", '"paid"', True)
    assert happened == ["asked about {'amount': 7}"]
    assert ledger.execute_step(RUN, "next", {}, lambda: 2) == 2


def test_resume_run_leaves_what_it_cannot_settle_blocked(bench: Bench) -> None:
    die_while_paying(bench)
    bench.owners_die()
    ledger = bench.open()
    (record,) = ledger.resume_run(RUN, tools={"pay": never})
    assert record.state == "BLOCKED"
    assert bench.kinds(RUN) == ["created", "intent", "parked"]


def test_a_step_of_a_tool_that_nobody_has_is_left_to_its_program(bench: Bench) -> None:
    die_while_paying(bench)
    bench.owners_die()
    ledger = bench.open()
    (record,) = ledger.resume_run(RUN, tools={"another": never})
    assert record.state == "RUNNING"
    assert bench.kinds(RUN) == ["created", "intent"]


def test_an_operators_word_goes_before_every_receipt(bench: Bench) -> None:
    die_while_paying(bench)
    bench.owners_die()
    bench.open().resolve(RUN, 1, executed=False, by="ann", reason="looked")
    assert pay(program(bench), lambda: "paid", never) == "paid"
