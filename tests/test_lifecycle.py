"""δ: one table, total over states and events, and the diagram that is made from it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from agent_run_ledger import Event, IllegalTransition, RunState
from agent_run_ledger.rules import lifecycle
from support.processes import environment

PAIRS = [(state, event) for state in RunState for event in Event]
TERMINAL = {RunState.COMPLETED, RunState.FAILED, RunState.DEAD_LETTER, RunState.CANCELLED}

# Where an event leads does not depend on where the run stands; whether it may happen does.
LEADS_TO = {
    Event.START_STEP: RunState.RUNNING,
    Event.STEP_SUCCESS: RunState.CHECKPOINTED,
    Event.STEP_ERROR: RunState.CHECKPOINTED,
    Event.BUDGET_EXHAUSTED: RunState.DEAD_LETTER,
    Event.LOOP_DETECTED: RunState.DEAD_LETTER,
    Event.LOOP_SUSPECTED: RunState.QUARANTINE,
    Event.WAIT: RunState.BLOCKED,
    Event.WAKE: RunState.CHECKPOINTED,
    Event.RELEASE: RunState.CHECKPOINTED,
    Event.FINISH: RunState.COMPLETED,
    Event.ABORT: RunState.FAILED,
    Event.CANCEL: RunState.CANCELLED,
}


def outcome(state: RunState, event: Event) -> RunState | None:
    try:
        return lifecycle.after(state, event)
    except IllegalTransition:
        return None


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_event_in_every_state_has_its_one_effect_or_is_illegal(state: RunState, event: Event) -> None:
    after = outcome(state, event)
    if event is Event.HEARTBEAT_EXPIRED:
        assert after == (None if state in TERMINAL else state), "who owns a run is no part of its state"
    else:
        assert after in (None, LEADS_TO[event])


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_run_that_has_ended_takes_nothing(state: RunState) -> None:
    assert state.is_terminal
    assert [event for event in Event if outcome(state, event) is not None] == []


def test_the_states_that_are_final_are_these_four() -> None:
    assert {state for state in RunState if state.is_terminal} == TERMINAL


def test_the_states_are_exactly_these_strings() -> None:
    assert [str(state) for state in RunState] == [
        "PENDING", "RUNNING", "BLOCKED", "CHECKPOINTED", "QUARANTINE", "COMPLETED", "FAILED", "DEAD_LETTER", "CANCELLED",
    ]  # fmt: skip


def test_a_run_that_lives_can_be_finished_aborted_cancelled_and_run_out_of_budget() -> None:
    for state in set(RunState) - TERMINAL - {RunState.QUARANTINE}:
        for event in (Event.FINISH, Event.ABORT, Event.CANCEL, Event.BUDGET_EXHAUSTED, Event.START_STEP, Event.WAIT):
            assert outcome(state, event) is LEADS_TO[event], f"{state} {event}"


def test_quarantine_is_left_by_release_abort_or_cancel_only() -> None:
    moves = {event for event in Event if outcome(RunState.QUARANTINE, event) not in (None, RunState.QUARANTINE)}
    assert moves == {Event.RELEASE, Event.ABORT, Event.CANCEL}
    assert {state for state in RunState if outcome(state, Event.RELEASE)} == {RunState.QUARANTINE}


def test_an_outcome_needs_a_step_that_runs_or_waits() -> None:
    for event in (Event.STEP_SUCCESS, Event.STEP_ERROR):
        assert {state for state in RunState if outcome(state, event)} == {RunState.RUNNING, RunState.BLOCKED}


def test_every_state_can_be_reached_and_every_run_can_end() -> None:
    reached, border = {RunState.PENDING}, {RunState.PENDING}
    while border:
        border = {after for state in border for event in Event if (after := outcome(state, event))} - reached
        reached |= border
    assert reached == set(RunState)


def test_an_illegal_transition_names_state_event_and_run() -> None:
    with pytest.raises(IllegalTransition, match="COMPLETED cannot take START_STEP") as caught:
        lifecycle.after(RunState.COMPLETED, Event.START_STEP, "audit")
    assert (caught.value.state, caught.value.event, caught.value.run_id) == ("COMPLETED", "START_STEP", "audit")


def arrows(diagram: str) -> set[tuple[str, str, str]]:
    found = set()
    for line in diagram.splitlines():
        if match := re.fullmatch(r"    (\w+) --> (\w+): (.+)", line):
            found |= {(match[1], match[2], event) for event in match[3].split(", ")}
    return found


def test_the_diagram_shows_every_arrow_and_no_other() -> None:
    moves = {
        (str(state), str(after), str(event))
        for state, event in PAIRS
        if event is not Event.HEARTBEAT_EXPIRED and (after := outcome(state, event)) is not None
    }
    diagram = lifecycle.diagram()
    assert arrows(diagram) == moves
    lines = diagram.splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> PENDING"]
    assert {line for line in lines if line.endswith("--> [*]")} == {f"    {state} --> [*]" for state in TERMINAL}


def test_the_module_prints_the_diagram_of_the_documentation() -> None:
    command = [sys.executable, "-m", "agent_run_ledger.rules.lifecycle"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=60)
    assert printed.stdout == lifecycle.diagram() + "\n"
