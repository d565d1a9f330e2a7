"""What people may do about a run from outside, and what they are told of it: each act is an entry with who and why."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    Effect,
    IllegalTransition,
    InvalidArguments,
    InvalidName,
    LedgerError,
    LoopDetectorPolicy,
    PayloadTooLarge,
    Receipt,
    RetryPolicy,
    Run,
    RunawayLoopDetectedException,
    RunClosed,
    RunNotFound,
    StepFailed,
    StepInDoubt,
    UnserialisableArguments,
)
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import Call
from agent_run_ledger.words import Verdict
from support.ledgers import Bench, Tool, raising
from support.processes import child
from support.programs import RUN
from support.waiting import Meanwhile, Patience


def told(bench: Bench, run_id: str = RUN) -> list[tuple[str, dict[str, Any]]]:
    """The operators' entries of a run: what was done, and what was said with it."""
    acts = ("cancelled", "resolved", "released", "declined", "forked")
    return [(row.kind, canonical.decode(row.payload or b"{}")) for row in bench.rows(run_id) if row.kind in acts]


def in_doubt(bench: Bench, effect: Effect | None = Effect.MUTATE, how: str = "died", **options: Any) -> AgentRunLedger:
    """A run whose second step is in doubt; the ledger that is returned owns nothing."""
    ledger = bench.open()
    ledger.create_run("pay", RUN)
    ledger.execute_step(RUN, "look", {}, lambda: 1, effect=Effect.READ)
    errors: dict[str, BaseException] = {
        "died": KeyboardInterrupt(),
        "ambiguous": TimeoutError(),
        "failed": ValueError(),
    }
    with suppress(KeyboardInterrupt, LedgerError):
        ledger.execute_step(RUN, "pay", {"amount": 5}, raising(errors[how]), effect=effect, **options)
    if bench.open().get_run(RUN).owner:
        ledger.detach(RUN)
    return bench.open()


def rerun(bench: Bench, tool: Any, effect: Effect | None = Effect.MUTATE, **options: Any) -> Any:
    ledger = bench.open()
    ledger.create_run("pay", RUN)
    ledger.execute_step(RUN, "look", {}, lambda: 1, effect=Effect.READ)
    return ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=effect, **options)


# --- resolve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["died", "ambiguous", "failed", "parked"])
def test_a_step_in_doubt_that_took_effect_has_the_output_that_somebody_says(how: str, bench: Bench) -> None:
    ledger = in_doubt(bench, how="died" if how == "parked" else how)
    if how == "parked":
        with pytest.raises(StepInDoubt):
            rerun(bench, raising(AssertionError()))
    ledger.resolve(RUN, 2, output={"id": "re_17"}, by="ann", reason="seen in the dashboard")
    assert told(bench)[-1] == ("resolved", {"by": "ann", "reason": "seen in the dashboard"})
    assert ledger.get_run(RUN).status == "CHECKPOINTED"
    assert ledger.steps(RUN)[1].state == "COMPLETED"
    tool = Tool()
    assert rerun(bench, tool) == {"id": "re_17"}
    assert tool.calls == 0
    assert ledger.verify().findings == []


@pytest.mark.parametrize("output", [None, 0, "", [], {"a": [1, 2.5, None]}, "x" * 100_000, (1, 2), b"\x00"])
def test_any_output_that_can_be_stored_can_be_said(output: Any, bench: Bench) -> None:
    in_doubt(bench).resolve(RUN, 2, output=output)
    assert rerun(bench, Tool()) == output


@pytest.mark.parametrize("how", ["died", "ambiguous", "failed"])
@pytest.mark.parametrize("effect", [Effect.MUTATE, None, Effect.IDEMPOTENT])
def test_a_step_that_did_not_take_effect_is_sent_again_with_the_same_key(
    how: str, effect: Effect | None, bench: Bench
) -> None:
    ledger = in_doubt(bench, effect, how)
    key = ledger.steps(RUN)[1].idempotency_key
    ledger.resolve(RUN, 2, executed=False, by="ann", reason="nothing there")
    assert [(action.action, action.step_number) for action in ledger.plan(RUN)] == [("dispatch", 2)]
    assert ledger.steps(RUN)[1].state == "BLOCKED"
    tool = Tool("paid")
    assert rerun(bench, tool, effect) == "paid"
    assert tool.calls == 1
    assert bench.open().steps(RUN)[1].idempotency_key == key
    assert ledger.verify().findings == []


def test_that_it_did_not_take_effect_gives_a_step_fresh_attempts(bench: Bench) -> None:
    ledger = in_doubt(bench)
    for _ in range(6):
        ledger.resolve(RUN, 2, executed=False)
        with pytest.raises(KeyboardInterrupt):
            rerun(bench, raising(KeyboardInterrupt()))
        bench.owners_die()
    ledger.resolve(RUN, 2, executed=False)
    assert rerun(bench, Tool("paid")) == "paid"
    assert bench.open().steps(RUN)[1].attempts == 8


def test_a_step_that_died_while_its_receiver_was_asked_can_be_resolved(bench: Bench) -> None:
    def dies(key: str, arguments: dict[str, Any]) -> Receipt:
        raise KeyboardInterrupt

    ledger = in_doubt(bench)
    with pytest.raises(KeyboardInterrupt):
        rerun(bench, Tool(), receipt=dies)
    bench.owners_die()
    ledger.resolve(RUN, 2, output="found it")
    assert rerun(bench, Tool(), receipt=dies) == "found it"
    assert ledger.verify().findings == []


@pytest.mark.parametrize("step", [1, 3, "waiting"])
def test_only_what_is_unsettled_can_be_resolved(step: Any, bench: Bench) -> None:
    ledger = in_doubt(bench)
    before = bench.kinds(RUN)
    if step == "waiting":
        Meanwhile(bench, raising(Patience()))
        with pytest.raises(Patience), ledger.open_run("wait", "waits") as run:
            run.wait_for("go")
        with pytest.raises(IllegalTransition, match="waits"):
            bench.open().resolve("waits", 1, output=1)
    else:
        with pytest.raises((IllegalTransition, InvalidArguments), match=r"nothing was written|no step 3"):
            ledger.resolve(RUN, step, output=1)
    assert bench.kinds(RUN) == before


@pytest.mark.parametrize("number", [0, -1, 1.0, "2", True, None, 10**30])
def test_a_step_is_named_by_its_number(number: Any, bench: Bench) -> None:
    ledger = in_doubt(bench)
    with pytest.raises((InvalidArguments, IllegalTransition)):
        ledger.resolve(RUN, number, output=1)
    assert told(bench) == []


@pytest.mark.parametrize("said", [{}, {"executed": True}, {"executed": False, "output": 1}, {"output": object()}])
def test_what_is_said_is_clear_or_refused(said: dict[str, Any], bench: Bench) -> None:
    ledger = in_doubt(bench)
    with pytest.raises((InvalidArguments, UnserialisableArguments)):
        ledger.resolve(RUN, 2, **said)
    assert told(bench) == []


def test_a_run_that_has_ended_or_is_not_there_takes_nothing(bench: Bench) -> None:
    ledger = in_doubt(bench)
    ledger.cancel(RUN, by="ann", reason="enough")
    before = bench.kinds(RUN)
    for act in (lambda: ledger.resolve(RUN, 2, output=1), lambda: ledger.release(RUN), lambda: ledger.cancel(RUN)):
        with pytest.raises(IllegalTransition, match="nothing was written"):
            act()
    assert bench.kinds(RUN) == before
    for act in (
        lambda: ledger.resolve("nobody", 1, output=1), lambda: ledger.release("nobody"), lambda: ledger.cancel("nobody"),
        lambda: ledger.plan("nobody"), lambda: ledger.trace("nobody"), lambda: ledger.redrive("nobody"),
        lambda: ledger.fork("nobody", 1), lambda: ledger.approvals("nobody"),
    ):  # fmt: skip
        with pytest.raises(RunNotFound):
            act()


@pytest.mark.parametrize("by", ["a\nb", "x" * 5000, 7])
def test_who_does_it_has_a_name(by: Any, bench: Bench) -> None:
    ledger = in_doubt(bench)
    with pytest.raises((InvalidName, InvalidArguments)):
        ledger.resolve(RUN, 2, output=1, by=by)
    assert told(bench) == []


def test_a_reason_is_text_of_a_sensible_length(bench: Bench) -> None:
    ledger = in_doubt(bench)
    with pytest.raises(PayloadTooLarge):
        ledger.resolve(RUN, 2, output=1, reason="x" * 20_000)
    with pytest.raises(InvalidArguments):
        ledger.resolve(RUN, 2, output=1, reason=7)  # type: ignore[arg-type]
    assert told(bench) == []


def test_nobody_who_gives_no_name_is_the_ledgers_owner(bench: Bench) -> None:
    in_doubt(bench)
    bench.open(owner="night shift").resolve(RUN, 2, output=1)
    assert told(bench)[-1][1]["by"].startswith("night shift")


# --- a run that another process works on ------------------------------------------------------------------------------

WORKING = """
ledger = AgentRunLedger(arguments[0], durability="process")

@ledger.tool(effect=Effect.MUTATE)
def pay(number: int) -> int:
    tell("paying")
    return hear()

@ledger.agent()
def agent() -> int:
    return pay(1) + pay(2)

try:
    tell(ledger.run(agent, run_id="run"))
except RunClosed as closed:
    tell(str(closed))
"""


def test_a_run_of_another_process_gets_what_is_asked_through_its_inbox(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with child(WORKING, path) as works, AgentRunLedger(path) as ledger:
        assert works.hear() == "paying"
        ledger.resolve("run", 1, output=7, by="ann")  # its step is in flight: the outcome comes first
        ledger.release("run", by="bob")
        works.tell(3)
        assert works.hear() == "paying"
        ledger.cancel("run", by="eve", reason="stop it")
        works.tell(4)
        assert "stop it" in works.hear()
        assert works.ends() == 0
        lines = [(line.event, line.text) for line in ledger.trace("run") if line.event in ("declined", "cancelled")]
        assert [event for event, _ in lines] == ["declined", "declined", "cancelled"]
        assert all(name in text for name, (_, text) in zip(("ann", "bob", "eve"), lines, strict=True))
        assert [step.state for step in ledger.steps("run")] == ["COMPLETED", "COMPLETED"]
        assert ledger.verify().findings == []


def test_a_run_whose_process_was_killed_is_acted_upon_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with child(WORKING, path) as works:
        assert works.hear() == "paying"
        works.send(signal.SIGKILL)
        works.ends()
    with AgentRunLedger(path) as ledger:
        ledger.resolve("run", 1, executed=False, by="ann")
        assert ledger.trace("run")[-1].event == "resolved, not executed"
        assert ledger.get_run("run").owner is None


# --- quarantine -------------------------------------------------------------------------------------------------------


class Suspicious(LoopDetectorPolicy):
    """What the usual policy is certain of, this one suspects."""

    def rule(self) -> Rule:
        found = super().rule()

        class Suspects:
            continues, remember, reach = found.continues, found.remember, found.reach

            def observe(self, call: Call) -> Verdict:
                seen = found.observe(call)
                return seen if seen.level == "ok" else Verdict("suspected", seen.rule, seen.reason, seen.evidence)

        return Suspects()


def test_a_run_in_quarantine_takes_nothing_until_it_is_released_and_is_there_again_at_once_if_it_goes_on(
    bench: Bench,
) -> None:
    tool = Tool(0)

    def loops(calls: int) -> None:
        ledger = bench.open(policy=Suspicious(max_repetitions=3))
        with ledger.open_run("ask", RUN) as run:
            for _ in range(calls):
                run.step("ask", {}, tool, effect=Effect.READ)

    ledger = bench.open(policy=Suspicious(max_repetitions=3))
    for released in range(3):
        with pytest.raises(RunawayLoopDetectedException):
            loops(20)
        assert ledger.get_run(RUN).status == "QUARANTINE"
        assert tool.calls == 3 + released
        with pytest.raises(RunClosed):
            loops(20)
        with pytest.raises(IllegalTransition):
            ledger.resolve(RUN, 1, output=1)
        ledger.release(RUN, by="ann", reason="it is meant")
        assert (ledger.get_run(RUN).status, ledger.get_run(RUN).cause) == ("CHECKPOINTED", None)
        with pytest.raises(IllegalTransition):
            ledger.release(RUN)
    loops(6)
    assert (ledger.get_run(RUN).status, tool.calls) == ("COMPLETED", 6)
    assert told(bench) == [("released", {"by": "ann", "reason": "it is meant"})] * 3
    assert ledger.verify().findings == []


def test_a_run_in_quarantine_may_be_cancelled(bench: Bench) -> None:
    ledger = bench.open(policy=Suspicious(max_repetitions=1))
    ledger.create_run("ask", RUN)
    ledger.execute_step(RUN, "ask", {}, Tool(0), effect=Effect.READ)
    with pytest.raises(RunawayLoopDetectedException):
        ledger.execute_step(RUN, "ask", {}, Tool(0), effect=Effect.READ)
    ledger.cancel(RUN)
    assert ledger.get_run(RUN).status == "CANCELLED"


# --- redrive ----------------------------------------------------------------------------------------------------------


class Dead:
    """A run that ended badly: three good calls, and then what `cause` says."""

    def __init__(self, bench: Bench, cause: str) -> None:
        self.bench, self.cause, self.is_mended = bench, cause, False
        self.calls: list[tuple[str, int, str]] = []
        self.deadline = datetime.fromtimestamp(bench.clock.now() + 1000, UTC)

    def play(self, run_id: str = RUN) -> Any:
        options: dict[str, Any] = {}
        if self.cause == "budget":
            options["max_steps"] = 3
        if self.cause == "deadline":
            options["budget"] = Budget(deadline=self.deadline)
        ledger = self.bench.open(**options)
        with ledger.open_run("work", run_id) as run:
            done = [run.step("good", {"n": n}, self._good(n), effect=Effect.MUTATE) for n in range(3)]
            if self.cause == "deadline" and not self.is_mended:
                self.bench.clock.advance(2000)
            last = 5 if self.cause == "loop" else 1
            done += [
                run.step("last", {}, self._last(run_id), effect=Effect.READ, fatal=(ZeroDivisionError,))
                for _ in range(last)
            ]
            run.result = done
            if self.cause == "abort" and not self.is_mended:
                ledger.abort_run(run_id, "give up")
        return done

    def _good(self, n: int) -> Any:
        def good() -> int:
            self.calls.append(("good", n, ""))
            return n

        return good

    def _last(self, run_id: str) -> Any:
        def last() -> str:
            self.calls.append(("last", 0, run_id))
            if not self.is_mended and self.cause == "attempts":
                raise KeyboardInterrupt
            if not self.is_mended and self.cause == "fatal":
                raise ZeroDivisionError
            return "same"

        return last

    def die(self) -> None:
        for _ in range(10):
            try:
                self.play()
            except (LedgerError, KeyboardInterrupt):
                self.bench.owners_die()
            if self.bench.open().get_run(RUN).status in ("FAILED", "DEAD_LETTER"):
                return
        raise AssertionError("it lives")


CAUSES = {
    "attempts": "DEAD_LETTER", "budget": "DEAD_LETTER", "deadline": "DEAD_LETTER", "loop": "DEAD_LETTER",
    "fatal": "FAILED", "abort": "FAILED",
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_a_dead_run_is_made_anew_with_all_that_it_had_and_stays_as_it_is(cause: str, bench: Bench) -> None:
    dead = Dead(bench, cause)
    dead.die()
    ledger = bench.open()
    assert ledger.get_run(RUN).status == CAUSES[cause]
    assert [run.run_id for run in ledger.dead_letters()] == ([RUN] if CAUSES[cause] == "DEAD_LETTER" else [])
    before, calls = bench.rows(RUN), list(dead.calls)
    later = Budget(steps=50, deadline=datetime.fromtimestamp(bench.clock.now() + 5000, UTC))
    new = ledger.redrive(RUN, budget=later, by="ann", reason="mended", new_run_id="anew")
    assert (new, dead.calls) == ("anew", calls)
    assert ledger.get_run(new).status not in CAUSES.values()
    old_steps, new_steps = ledger.steps(RUN), ledger.steps(new)
    assert [step.idempotency_key for step in new_steps] == [step.idempotency_key for step in old_steps]
    assert [step.output_json for step in new_steps] == [step.output_json for step in old_steps]
    assert told(bench, new) == [("forked", {"by": "ann", "reason": "mended"})]
    dead.is_mended = True
    assert dead.play(new)[:3] == [0, 1, 2]
    assert {tool for tool, _, _ in dead.calls[len(calls) :]} <= {"last"}, "what is settled is not called again"
    assert ledger.get_run(new).status == "COMPLETED"
    assert ledger.steps(new)[3].idempotency_key == (old_steps + ledger.steps(new)[len(old_steps) :])[3].idempotency_key
    assert bench.rows(RUN) == before
    assert ledger.verify().findings == []


def test_what_its_program_acted_upon_is_not_tried_again_in_the_new_run(bench: Bench) -> None:
    calls: list[int] = []

    def fails(n: int) -> Any:
        calls.append(n)
        raise ValueError(n)

    def play(ledger: AgentRunLedger, run_id: str) -> None:
        with ledger.open_run("work", run_id) as run:
            for n in range(4):
                with pytest.raises(StepFailed):
                    run.step("fails", {"n": n}, lambda n: fails(n), effect=Effect.READ)

    ledger = bench.open(max_steps=2)
    with pytest.raises(BudgetExceededException):
        play(ledger, RUN)
    new = ledger.redrive(RUN, max_steps=10)
    play(ledger, new)
    assert calls == [0, 1, 2, 3]
    assert ledger.verify().findings == []


def test_a_limit_that_was_not_raised_ends_the_new_run_at_once(bench: Bench) -> None:
    dead = Dead(bench, "budget")
    dead.die()
    new = bench.open().redrive(RUN)
    with pytest.raises(BudgetExceededException):
        dead.play(new)


def test_only_what_failed_or_is_a_dead_letter_can_be_redriven(bench: Bench) -> None:
    ledger = in_doubt(bench)
    with pytest.raises(IllegalTransition, match="REDRIVE"):
        ledger.redrive(RUN)
    ledger.cancel(RUN)
    with pytest.raises(IllegalTransition, match="REDRIVE"):
        ledger.redrive(RUN)
    ledger.create_run("done", "done")
    ledger.finish_run("done")
    with pytest.raises(IllegalTransition, match="REDRIVE"):
        ledger.redrive("done")
    assert len(ledger.runs()) == 2


@pytest.mark.parametrize("max_steps", [0, -1, 1.5, True, "9"])
def test_a_raised_limit_is_a_sensible_number(max_steps: Any, bench: Bench) -> None:
    Dead(bench, "abort").die()
    ledger = bench.open()
    with pytest.raises(ValueError, match="max_steps"):
        ledger.redrive(RUN, max_steps=max_steps)
    assert len(ledger.runs()) == 1


def test_a_new_run_takes_no_id_that_is_taken(bench: Bench) -> None:
    Dead(bench, "abort").die()
    ledger = bench.open()
    before = bench.rows(RUN)
    with pytest.raises(InvalidArguments, match="already"):
        ledger.redrive(RUN, new_run_id=RUN)
    with pytest.raises(InvalidName):
        ledger.redrive(RUN, new_run_id="a\nb")
    assert bench.rows(RUN) == before


def test_a_registered_agent_goes_on_with_the_new_id(bench: Bench) -> None:
    ledger, fails = bench.open(), [True]
    tool = Tool(5)
    look = ledger.tool(name="look", effect=Effect.READ)(lambda: tool())

    @ledger.agent()
    def agent(number: int) -> int:
        seen = look()
        if fails:
            ledger.abort_run(RUN, "no")
        return seen + number

    with pytest.raises(RunClosed):
        ledger.run(agent, 1, run_id=RUN)
    new = ledger.redrive(RUN)
    fails.clear()
    assert ledger.recover() == [new]
    assert (ledger.run(agent, 1, run_id=new), tool.calls) == (6, 1)


# --- looking ----------------------------------------------------------------------------------------------------------

PLANS = [
    (effect, how, options)
    for effect in (Effect.READ, Effect.IDEMPOTENT, Effect.MUTATE, None)
    for how in ("died", "ambiguous", "failed")
    for options in ({"version": "1"}, {"version": "1", "retry": RetryPolicy(max_attempts=1)})
]


@pytest.mark.parametrize("block", ["dispatch", "block"])
@pytest.mark.parametrize(("effect", "how", "options"), PLANS)
@pytest.mark.filterwarnings("ignore::agent_run_ledger.UndeclaredEffectWarning")
def test_the_plan_is_what_then_happens(
    effect: Effect | None, how: str, options: dict[str, Any], block: str, bench: Bench
) -> None:
    in_doubt(bench, effect, how, **options)
    ledger = bench.open(undeclared=block)
    planned = [action.action for action in ledger.plan(RUN)]
    before = bench.kinds(RUN)
    tool = Tool("done")
    ledger.create_run("pay", RUN)
    ledger.execute_step(RUN, "look", {}, lambda: 1, effect=Effect.READ)
    try:
        ledger.execute_step(RUN, "pay", {"amount": 5}, tool, effect=effect, **options)
        happened = "dispatch"
    except StepInDoubt:
        happened = "park"
    except RunClosed:
        happened = "dead_letter"
    assert bench.kinds(RUN)[: len(before)] == before, "a plan writes nothing"
    expected = {"dispatch_undeclared": "dispatch"}
    assert [expected.get(action, action) for action in planned] == [happened]
    assert tool.calls == (happened == "dispatch")
    if happened == "dispatch":
        assert ("redispatched_undeclared" in bench.kinds(RUN)) == (planned == ["dispatch_undeclared"])


def test_a_tool_that_is_registered_says_anew_what_may_be_done(bench: Bench) -> None:
    in_doubt(bench, None)
    ledger = bench.open()
    assert [action.action for action in ledger.plan(RUN)] == ["dispatch_undeclared"]
    ledger.tool(name="pay", effect=Effect.MUTATE)(lambda amount: 1)
    assert [action.action for action in ledger.plan(RUN)] == ["park"]
    asking = bench.open()
    asking.tool(name="pay", receipt=lambda key, arguments: Receipt.absent())(lambda amount: 1)
    assert [action.action for action in asking.plan(RUN)] == ["ask"]


def test_a_trace_tells_all_that_led_to_a_dead_letter(bench: Bench) -> None:
    dead = Dead(bench, "attempts")
    dead.die()
    lines = bench.open().trace(RUN)
    poison = [(line.event, line.attempt) for line in lines if line.tool_name == "last"]
    assert [attempt for event, attempt in poison if event == "dispatched"] == [1, 2, 3, 4]
    assert (poison[-1][0], lines[-1].event) == ("dead letter", "dead letter")
    assert "dispatched 4 times" in lines[-1].text
    assert [line.seq for line in lines] == sorted(line.seq for line in lines)
    assert all(json.dumps(line.text) for line in lines)


def test_a_trace_names_who_did_what_and_why(bench: Bench) -> None:
    ledger = in_doubt(bench)
    ledger.resolve(RUN, 2, executed=False, by="ann", reason="nothing there")
    ledger.cancel(RUN, by="bob", reason="no more")
    said = [(line.event, line.text) for line in ledger.trace(RUN)[-2:]]
    assert said == [("resolved, not executed", "nothing there (by ann)"), ("cancelled", "no more (by bob)")]


def test_a_run_that_waits_has_a_plan_that_says_for_what(bench: Bench) -> None:
    ledger = bench.open()
    Meanwhile(bench, raising(Patience()))
    with pytest.raises(Patience), ledger.open_run("wait", RUN) as run:
        _wait(run)
    (action,) = bench.open().plan(RUN)
    assert (action.action, action.tool_name, action.reason) == ("wait", "run.wait_for", "it waits for a signal")
    assert action.not_before == bench.rows(RUN)[0].seq - 1 + _at(bench) + 60


def _wait(run: Run) -> None:
    run.wait_for("go", 60)


def _at(bench: Bench) -> float:
    return float(json.loads(bench.rows(RUN)[1].body)["at"])


def test_what_is_refused_is_named_and_not_shown_whole(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    much: Any = "x" * 5_000_000
    for act in (
        lambda: ledger.resolve(RUN, much, output=1),
        lambda: ledger.resolve(RUN, 1, executed=much),
        lambda: ledger.fork(RUN, much),
        lambda: ledger.approve(RUN, much, much),
        lambda: ledger.release(RUN, by=[]),  # type: ignore[arg-type]
        lambda: ledger.signal(RUN, "word", by={}),  # type: ignore[arg-type]
    ):
        with pytest.raises(LedgerError) as refused:
            act()
        assert len(str(refused.value)) < 1000
    assert bench.kinds(RUN) == ["created"]
    assert ledger._store.inbox(RUN, 0) == []
