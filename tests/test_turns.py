"""Outcomes are handed out in the order of the first time: the rules by hand, then random programs that are crashed and replayed."""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from agent_run_ledger.engine.turns import Turns

# --- the rules, one by one --------------------------------------------------------------------------------------------


def make_all(turns: Turns, *positions: str) -> None:
    for position in positions:
        turns.made(position)


def hand_out_all(turns: Turns) -> list[str]:
    order = []
    while (position := turns.next()) is not None:
        turns.handed(position)
        order.append(position)
    return order


def test_nobody_waits_in_a_new_run() -> None:
    turns = Turns()
    assert turns.is_idle
    assert not turns.is_replaying
    assert turns.next() is None
    assert turns.holds_up() is None


def test_recorded_outcomes_go_in_the_order_of_their_seq_whoever_waits_first() -> None:
    turns = Turns([(1, "1"), (2, "2"), (3, "3")], [(4, "3"), (5, "1"), (6, "2")])
    make_all(turns, "1", "2", "3")
    turns.waiting("2", 6)
    assert turns.next() is None
    turns.waiting("1", 5)
    assert turns.next() is None
    turns.waiting("3", 4)
    assert turns.next() == "3"
    assert hand_out_all(turns) == ["3", "1", "2"]
    assert turns.is_idle


def test_asking_whose_turn_it_is_changes_nothing() -> None:
    turns = Turns([(1, "1")], [(2, "1")])
    turns.made("1")
    turns.waiting("1", 2)
    assert [turns.next(), turns.next()] == ["1", "1"]


def test_an_outcome_waits_for_every_call_whose_intent_stands_before_it() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1")])
    turns.made("1")
    turns.waiting("1", 3)
    assert turns.next() is None
    turns.made("2")
    assert turns.next() == "1"


def test_an_outcome_does_not_wait_for_calls_whose_intents_stand_behind_it() -> None:
    turns = Turns([(1, "1"), (3, "2")], [(2, "1")])
    turns.made("1")
    turns.waiting("1", 2)
    assert turns.next() == "1"


def test_a_recorded_value_is_a_call_that_was_made_and_waits_for_nothing() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1")])
    turns.made("1")
    turns.waiting("1", 3)
    make_all(turns, "2")
    turns.abandoned("2")
    assert hand_out_all(turns) == ["1"]


def test_a_live_outcome_waits_until_the_recorded_ones_are_handed_out() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "2")])
    make_all(turns, "1", "2")
    turns.waiting("1", 4)
    assert turns.next() is None
    turns.waiting("2", 3)
    assert hand_out_all(turns) == ["2", "1"]


def test_a_live_outcome_waits_until_the_calls_of_the_log_are_made_for_they_were_made_without_it() -> None:
    """`wait({1}, timeout=5)` gave up and 2 was called; the process died. Now 1 is quick: 2 must be called all the same."""
    turns = Turns([(1, "1"), (2, "2")])
    turns.made("1")
    assert not turns.at_once("1", 3)
    turns.waiting("1", 3)
    assert turns.next() is None
    turns.made("2")
    assert turns.next() == "1"


def test_an_outcome_whose_turn_is_over_goes_first() -> None:
    """The key of 1 is used again while the replay is under way: what comes later may depend on it."""
    turns = Turns([(1, "#k"), (2, "1"), (4, "2")], [(3, "#k"), (5, "1")])
    make_all(turns, "#k", "1")
    turns.waiting("1", 5)
    turns.waiting("#k", 3)
    turns.handed("#k")
    assert turns.next() is None
    turns.made("#k")
    turns.waiting("#k", 3)
    assert turns.next() == "#k"
    turns.handed("#k")
    assert turns.seen == 3
    turns.made("2")
    assert hand_out_all(turns) == ["1"]
    assert turns.seen == 5


def test_live_outcomes_go_in_the_order_of_their_seq() -> None:
    turns = Turns()
    make_all(turns, "1", "2", "3")
    for position, seq in (("1", 6), ("3", 4), ("2", 5)):
        turns.waiting(position, seq)
    assert hand_out_all(turns) == ["3", "2", "1"]


def test_a_recorded_outcome_that_is_abandoned_lets_the_next_one_pass() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1"), (4, "2")])
    make_all(turns, "1", "2")
    turns.waiting("2", 4)
    assert turns.next() is None
    turns.abandoned("1")
    assert turns.next() == "2"


def test_what_is_abandoned_out_of_order_is_passed_over_when_its_turn_would_come() -> None:
    turns = Turns([(1, "1"), (2, "2"), (3, "3")], [(4, "1"), (5, "2"), (6, "3")])
    make_all(turns, "1", "2", "3")
    turns.abandoned("2")
    turns.waiting("1", 4)
    turns.waiting("3", 6)
    assert hand_out_all(turns) == ["1", "3"]


def test_a_live_outcome_that_is_abandoned_is_not_handed_out() -> None:
    turns = Turns()
    make_all(turns, "1", "2")
    turns.waiting("1", 3)
    turns.waiting("2", 4)
    turns.abandoned("1")
    assert hand_out_all(turns) == ["2"]
    assert turns.is_idle


def test_a_call_that_was_never_made_holds_nothing_up_once_it_is_abandoned() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1"), (4, "2")])
    turns.made("1")
    turns.waiting("1", 3)
    assert turns.next() is None
    turns.abandoned("2")
    assert hand_out_all(turns) == ["1"]
    assert not turns.is_replaying


def test_an_interruption_has_its_turn_like_any_outcome() -> None:
    """2 was interrupted after 1 was handed out, and before 3 was: `seen` was 4 then, and the entry came later."""
    turns = Turns([(1, "1"), (2, "2"), (3, "3")], [(4, "1"), (4, "2"), (5, "3")])
    make_all(turns, "1", "2", "3")
    for position, seq in (("3", 5), ("2", 6), ("1", 4)):
        turns.waiting(position, seq)
    assert hand_out_all(turns) == ["1", "2", "3"]


def test_seen_is_the_last_outcome_that_the_program_knows_of() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1")])
    assert turns.seen == 0
    make_all(turns, "1", "2")
    turns.waiting("2", 8)
    turns.waiting("1", 3)
    turns.handed("1")
    assert turns.seen == 3
    turns.handed("2")
    assert turns.seen == 8
    turns.made("3")
    assert turns.at_once("3", 10)
    assert turns.seen == 10


# --- nobody waits without need ----------------------------------------------------------------------------------------


def test_the_only_call_in_flight_needs_no_waiting_replayed_or_live() -> None:
    turns = Turns([(1, "1"), (3, "2")], [(2, "1"), (4, "2")])
    for position, seq in (("1", 2), ("2", 4), ("3", 6), ("4", 8)):
        turns.made(position)
        assert turns.at_once(position, seq)
        assert turns.is_idle
    assert not turns.is_replaying


def test_beside_another_call_in_flight_everybody_waits_for_his_turn() -> None:
    turns = Turns()
    make_all(turns, "1", "2")
    assert not turns.at_once("1", 3)
    turns.abandoned("2")
    assert turns.at_once("1", 3)


def test_nothing_is_handed_out_at_once_before_what_stands_before_it() -> None:
    turns = Turns([(1, "1"), (2, "2"), (3, "3")], [(4, "2"), (5, "1")])
    turns.made("1")
    assert not turns.at_once("1", 5), "2 comes first"
    turns.made("2")
    turns.waiting("2", 4)
    assert turns.next() is None, "3 has not been made"
    turns.made("3")
    turns.abandoned("3")
    assert hand_out_all(turns) == ["2"]
    assert turns.at_once("1", 5)


def test_a_live_outcome_is_not_handed_out_at_once_before_a_recorded_one() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "2")])
    turns.made("1")
    assert not turns.at_once("1", 4)


def test_a_refusal_to_hand_out_at_once_changes_nothing() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1")])
    turns.made("1")
    assert not turns.at_once("1", 3)
    turns.waiting("1", 3)
    turns.made("2")
    assert turns.next() == "1"


# --- a replay that stands still says why ------------------------------------------------------------------------------


def test_what_holds_a_replay_up_is_named() -> None:
    turns = Turns([(1, "1"), (2, "2"), (3, "3")], [(4, "1"), (5, "2")])
    make_all(turns, "1", "2")
    assert turns.holds_up() is None, "nobody waits"
    turns.waiting("2", 5)
    assert turns.holds_up() == "the call at position 1 is made but not awaited"
    turns.waiting("1", 4)
    assert turns.holds_up() == "the call at position 3 has not been made"
    turns.made("3")
    assert turns.holds_up() is None, "1 has its turn"


def test_a_recorded_call_that_the_program_does_not_make_is_named_as_such() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1"), (4, "2")])
    turns.made("2")
    turns.waiting("2", 4)
    assert turns.holds_up() == "the call at position 1 has not been made"
    turns = Turns([(1, "1"), (2, "2")])
    turns.made("1")
    turns.waiting("1", 3)
    assert turns.holds_up() == "the call at position 2 has not been made"


class Counted(str):
    """A position that counts how often it is looked at."""

    looks = 0
    __slots__ = ()

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


@pytest.mark.parametrize("width", [1, 7, 100])
@pytest.mark.parametrize("is_replay", [True, False])
def test_a_step_costs_the_same_whatever_the_length_of_the_run(width: int, is_replay: bool) -> None:
    """Replayed or live, `width` calls at a time, which wait in the worst order; a tenth of them is abandoned."""

    def looks(steps: int) -> int:
        positions = [Counted(step) for step in range(steps)]
        seqs = {position: step + step // width * width + width for step, position in enumerate(positions)}
        intents = [(seqs[position] - width, position) for position in positions]
        turns = Turns(intents, [(seqs[position], position) for position in positions]) if is_replay else Turns()
        Counted.looks = 0
        for first in range(0, steps, width):
            batch = positions[first : first + width]
            make_all(turns, *batch)
            for position in batch[::-1]:
                turns.next()
                if int(position) % 10 == 3:
                    turns.abandoned(position)
                else:
                    turns.waiting(position, seqs[position])
            turns.holds_up()
            assert hand_out_all(turns) == [position for position in batch if int(position) % 10 != 3]
        assert not turns.is_replaying
        return Counted.looks

    assert looks(14_000) <= looks(1_400) * 10.5
