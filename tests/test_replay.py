"""Replay is strict: what is recorded is handed out, and a program that asks for something else is stopped."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from agent_run_ledger import Effect, IntentDrift, ReplayDivergence, StepFailed
from support.ledgers import GOAL, RUN, Bench, Died, Tool, never, program, raising


def recorded(bench: Bench) -> None:
    """A run of two steps, whose process then died."""
    ledger = program(bench)
    ledger.execute_step(RUN, "fetch", {"id": 1, "options": {"page": 1, "tags": ["a", "b"]}}, lambda: "one")
    ledger.execute_step(RUN, "post", {"n": 2}, lambda: "two")


SAME = {"options": {"tags": ["a", "b"], "page": 1}, "id": 1}


def test_what_is_recorded_is_handed_out_without_a_call_or_an_entry(bench: Bench) -> None:
    recorded(bench)
    before = bench.rows(RUN)
    ledger = program(bench)
    assert ledger.execute_step(RUN, "fetch", SAME, never) == "one"
    assert ledger.execute_step(RUN, "post", {"n": 2}, never) == "two"
    assert bench.rows(RUN) == before
    assert ledger.execute_step(RUN, "third", {}, lambda: "three") == "three"


@pytest.mark.parametrize(
    ("tool", "arguments", "path"),
    [
        ("fetch2", SAME, None),
        ("fetch", SAME | {"id": 2}, "$.id"),
        ("fetch", SAME | {"id": 1.0}, "$.id"),
        ("fetch", SAME | {"more": None}, "$.more"),
        ("fetch", {"id": 1}, "$.options"),
        ("fetch", {"id": 1, "options": {"page": 1, "tags": ["a", "c"]}}, "$.options.tags[1]"),
        ("fetch", {"id": 1, "options": {"page": 1, "tags": ("a", "b")}}, "$.options.tags"),
    ],
    ids=["tool", "value", "type", "new key", "missing key", "deep", "tuple"],
)
def test_another_call_is_a_divergence_that_says_where_and_nothing_is_run_or_written(
    bench: Bench, tool: str, arguments: dict[str, Any], path: str | None
) -> None:
    recorded(bench)
    before = bench.rows(RUN)
    ledger = program(bench)
    with pytest.raises(ReplayDivergence) as caught:
        ledger.execute_step(RUN, tool, arguments, never)
    error = caught.value
    assert not isinstance(error, IntentDrift)
    assert (error.run_id, error.position, error.path) == (RUN, "1", path)
    assert ("'fetch'" in error.recorded, repr(tool) in error.asked) == (True, True)
    for part in (RUN, "position 1", "'fetch'", repr(tool), *([path] if path else [])):
        assert part in str(error)
    assert bench.rows(RUN) == before


def test_a_diverged_run_is_shown_blocked_with_its_cause_and_owned_by_nobody(bench: Bench) -> None:
    recorded(bench)
    ledger = program(bench)
    assert ledger.get_run(RUN).status == "CHECKPOINTED"
    with pytest.raises(ReplayDivergence) as caught:
        ledger.execute_step(RUN, "other", {}, never)
    record = bench.open().get_run(RUN)
    assert (record.status, record.owner, record.cause) == ("BLOCKED", None, str(caught.value))
    assert [run.run_id for run in ledger.runs(status="BLOCKED")] == [RUN]
    assert ledger.verify().ok


def test_a_diverged_run_goes_on_once_the_old_code_is_back(bench: Bench) -> None:
    recorded(bench)
    diverged = program(bench)
    with pytest.raises(ReplayDivergence):
        diverged.execute_step(RUN, "other", {}, never)
    ledger = bench.open()  # at once: the lease was given back
    ledger.create_run(GOAL, RUN)
    assert ledger.execute_step(RUN, "fetch", SAME, never) == "one"
    assert ledger.execute_step(RUN, "post", {"n": 2}, never) == "two"
    assert ledger.execute_step(RUN, "third", {}, lambda: 3) == 3
    record = ledger.get_run(RUN)
    assert (record.status, record.cause) == ("CHECKPOINTED", None)


def test_a_divergence_of_a_run_that_has_ended_leaves_it_as_it_is(bench: Bench) -> None:
    recorded(bench)
    program(bench).finish_run(RUN)
    ledger = program(bench)
    with pytest.raises(ReplayDivergence):
        ledger.execute_step(RUN, "other", {}, never)
    record = ledger.get_run(RUN)
    assert (record.status, record.cause) == ("COMPLETED", None)


@pytest.mark.parametrize("effect", [None, *Effect])
def test_another_call_at_a_position_in_doubt_is_intent_drift_and_prints_the_stored_call(
    bench: Bench, effect: Effect | None
) -> None:
    ledger = program(bench)
    with pytest.raises(Died):
        ledger.execute_step(RUN, "pay", {"amount": 100, "to": "acme"}, raising(Died()), effect=effect)
    before = bench.rows(RUN)
    with pytest.raises(IntentDrift) as caught:
        program(bench).execute_step(RUN, "pay", {"amount": 90, "to": "acme"}, never, effect=effect)
    error = caught.value
    assert isinstance(error, ReplayDivergence)
    assert error.path == "$.amount"
    assert error.stored_arguments == 'pay({"amount":100,"to":"acme"})'
    assert error.stored_arguments in str(error)
    assert bench.rows(RUN) == before
    assert bench.open().get_run(RUN).status == "BLOCKED"


def test_a_call_where_a_value_is_recorded_diverges_and_the_other_way_round(bench: Bench) -> None:
    def agent(first: Callable[[Any], Any], error: BaseException | None = None) -> Any:
        with bench.open().open_run(GOAL, RUN) as run:
            seen = first(run)
            if error:
                raise error
            return seen

    with pytest.raises(Died):
        agent(lambda run: run.now(), Died())
    before = bench.rows(RUN)
    for other, asked in (
        (lambda run: run.step("t", {}, never), "'t'"),
        (lambda run: run.random(), "run.random()"),
        (lambda run: run.uuid4(), "run.uuid4()"),
    ):
        with pytest.raises(ReplayDivergence) as caught:
            agent(other)
        assert (caught.value.recorded, caught.value.asked) == ("run.now()", asked)
        record = bench.open().get_run(RUN)
        assert (record.status, record.owner, record.cause) == ("BLOCKED", None, str(caught.value))
    assert bench.rows(RUN) == before
    agent(lambda run: run.now())
    assert bench.open().get_run(RUN).status == "COMPLETED"


def test_a_value_where_a_step_is_recorded_diverges(bench: Bench) -> None:
    recorded(bench)
    before = bench.rows(RUN)
    bench.owners_die()

    def agent() -> None:
        with bench.open().open_run(GOAL, RUN) as run:
            run.now()

    with pytest.raises(ReplayDivergence, match=r"recorded is 'fetch', the program now asks for run\.now\(\)"):
        agent()
    assert bench.rows(RUN) == before


def test_recorded_values_are_the_same_at_every_replay(bench: Bench) -> None:
    lives: list[tuple[float, float, uuid.UUID, float]] = []

    def agent() -> None:
        with bench.open().open_run(GOAL, RUN) as run:
            lives.append((run.now(), run.random(), run.uuid4(), run.now()))
            raise Died

    for _ in range(3):
        bench.clock.advance(1000)
        with pytest.raises(Died):
            agent()
    (now, random, unique, _), *others = lives
    assert others == [lives[0]] * 2
    assert 0 <= random < 1
    assert isinstance(unique, uuid.UUID)
    assert now == bench.clock.now() - 2000


def test_recorded_values_take_positions_of_their_own_and_are_no_steps(bench: Bench) -> None:
    with bench.open().open_run(GOAL, RUN) as run:
        run.now()
        run.step("t", {}, lambda: 1)
        run.uuid4()
        run.step("u", {}, lambda: 2)
    steps = bench.open().steps(RUN)
    assert [(step.position, step.step_number) for step in steps] == [("2", 1), ("4", 2)]


def test_resume_run_stands_behind_recorded_values_too(bench: Bench) -> None:
    with pytest.raises(Died), bench.open().open_run(GOAL, RUN) as run:
        raise Died(run.now(), run.step("t", {}, lambda: 1), run.random())
    ledger = bench.open()
    ledger.resume_run(RUN)
    ledger.execute_step(RUN, "next", {}, lambda: 2)
    assert ledger.steps(RUN)[-1].position == "4"


def test_a_failure_is_replayed_before_the_program_may_diverge_after_it(bench: Bench) -> None:
    ledger = program(bench)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, raising(ValueError("no")))
    ledger.execute_step(RUN, "fallback", {}, lambda: 1)
    ledger = program(bench)
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "t", {}, never)
    with pytest.raises(ReplayDivergence, match="position 2"):
        ledger.execute_step(RUN, "another way", {}, never)


def test_a_deploy_that_changes_nothing_recorded_resumes_with_one_line_of_info(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(bench)
    caplog.set_level(logging.INFO, logger="agent_run_ledger")
    ledger = program(bench)
    ledger.execute_step(RUN, "fetch", SAME, lambda: "changed code")
    ledger.execute_step(RUN, "post", {"n": 2}, lambda: "changed code")
    assert caplog.messages == []
    for tool in ("third", "fourth"):
        ledger.execute_step(RUN, tool, {}, lambda: 3)
    (line,) = caplog.messages
    assert "replayed 2 recorded steps" in line
    assert RUN in line


def test_a_declared_effect_retry_or_version_may_change_between_lives(bench: Bench) -> None:
    recorded(bench)
    ledger = program(bench)
    tool = Tool()
    assert ledger.execute_step(RUN, "fetch", SAME, tool, effect=Effect.MUTATE, version="2") == "one"
    assert tool.calls == 0
