"""Outcomes are handed out in the order of the first time: the rules by hand, then random programs that are crashed and replayed."""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import pytest

from agent_run_ledger.engine.turns import HoldUp, Turns

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
    turns.made("#k")
    turns.waiting("#k", 3)
    turns.handed("#k")
    assert turns.seen == 5, "and not what it had seen before"


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
    turns = Turns([(0, "1"), (0, "2"), (0, "3")], [(4, "1"), (4, "2"), (5, "3")])
    make_all(turns, "1", "2", "3")
    for position, seq in (("3", 5), ("2", 6), ("1", 4)):
        turns.waiting(position, seq)
    assert hand_out_all(turns) == ["1", "2", "3"], "2 was interrupted when 1 had been handed out and 3 had not"


def test_a_call_that_was_made_while_an_outcome_was_recorded_and_not_handed_out_comes_before_it() -> None:
    """`wait({1}, timeout=5)` gave up while the outcome of 1 was being written: seqs say that 2 was called after 1 was known."""
    by_seq = Turns([(1, "1"), (3, "2")], [(2, "1")])
    by_seen = Turns([(0, "1"), (0, "2")], [(2, "1")])
    for turns in (by_seq, by_seen):
        turns.made("1")
        turns.waiting("1", 2)
    assert by_seq.next() == "1", "and the program, which had not seen it, would not call 2"
    assert by_seen.next() is None
    by_seen.made("2")
    assert by_seen.next() == "1"


def test_an_interruption_comes_before_what_another_branch_did_for_it() -> None:
    """1.1 is interrupted, whereupon the other branch calls 2.1 and is answered; only then the first branch makes its next call."""
    by_seq = Turns([(1, "1.1"), (2, "2.1"), (5, "1.2")], [(3, "2.1"), (4, "1.1")])
    by_seen = Turns([(0, "1.1"), (0, "2.1"), (3, "1.2")], [(3, "2.1"), (0, "1.1")])
    for turns in (by_seq, by_seen):
        turns.made("1.1")
        turns.waiting("1.1", 4)
    assert by_seq.holds_up() == HoldUp("2.1", is_made=False), "for ever"
    assert by_seen.next() == "1.1"


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


def test_the_last_of_several_in_flight_waits_like_the_others() -> None:
    """Whoever waits for the first completed is about to see that the second is not."""
    turns = Turns()
    make_all(turns, "1", "2")
    turns.waiting("1", 3)
    turns.handed("1")
    assert not turns.at_once("2", 4)
    turns.waiting("2", 4)
    assert hand_out_all(turns) == ["2"]
    turns.made("3")
    assert turns.at_once("3", 6), "nothing was in flight beside it"


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
    turns.waiting("1", 5)
    assert hand_out_all(turns) == ["1"]


def test_a_live_outcome_is_not_handed_out_at_once_before_a_recorded_one() -> None:
    for intents in ([(1, "1"), (2, "2")], []):
        turns = Turns(intents, [(3, "2")])
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
    assert turns.holds_up() == HoldUp("1", is_made=True)
    turns.waiting("1", 4)
    assert turns.holds_up() == HoldUp("3", is_made=False)
    turns.made("3")
    assert turns.holds_up() is None, "1 has its turn"


def test_a_recorded_call_that_the_program_does_not_make_is_named_as_such() -> None:
    turns = Turns([(1, "1"), (2, "2")], [(3, "1"), (4, "2")])
    turns.made("2")
    turns.waiting("2", 4)
    assert turns.holds_up() == HoldUp("1", is_made=False)
    turns = Turns([(1, "1"), (2, "2")])
    turns.made("1")
    turns.waiting("1", 3)
    assert turns.holds_up() == HoldUp("2", is_made=False)


def test_a_hold_up_can_be_read() -> None:
    assert str(HoldUp("3.1", is_made=True)) == "the call at position 3.1 is made but not awaited"
    assert str(HoldUp("3.1", is_made=False)) == "the call at position 3.1 has not been made"


# --- what a step costs ------------------------------------------------------------------------------------------------


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


# --- random programs, crashed and replayed ----------------------------------------------------------------------------
#
# A driver in small, without store and clock: latencies are counted in turns of the event loop, so that a seed is a schedule.


class Entry(NamedTuple):
    """A line of the log. `order` is what `Turns` is told: the seq of an outcome; what had been `seen` at anything else."""

    kind: str
    position: str
    text: str
    order: int


class Interrupted(TimeoutError):
    """At replay: here the program was interrupted while it waited."""


class Diverged(Exception):
    """The program makes another call than the one that is recorded."""


class StandsStill(Exception):
    """Nothing will ever happen again."""


class Alarm:
    """A timer of the program's own."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.has_rung = False

    def ring(self) -> None:
        self.has_rung = True
        self.callback()


class Life:
    """One process: it takes a run over with its log, runs the program to its end, and appends to the log."""

    def __init__(self, log: list[Entry], seed: int, pause: int, *, is_quick: bool) -> None:
        self.log = list(log)
        self.transactions = [0]
        """The sizes of the log between which a crash may come."""
        self.events: list[tuple[str, ...]] = []
        self.pause = pause
        """How many turns of the loop lie between two hand-outs, at least."""
        self.is_quick = is_quick
        """Whether a call that is the only one in flight waits for nothing, unless it is to be interrupted: that others do to it."""
        self.calls: dict[str, Entry] = {}
        self.outcomes: dict[str, Entry] = {}
        for entry in log:
            if entry.kind == "intent":
                self.calls.setdefault(entry.position, entry)
            else:
                self.outcomes.pop(entry.position, None)  # the last one counts, and stands where it was written
                self.outcomes[entry.position] = entry
        self.turns = Turns(
            [(entry.order, entry.position) for entry in self.calls.values()],
            [(entry.order, entry.position) for entry in self.outcomes.values()],
        )
        self._random = random.Random(seed)
        self._slowness = self._random.choice([0, 3, 12, 40])
        self._turns_of_a_commit = self._random.choice([0, 0, 1, 6])
        self._turn = 0
        self._timers: list[tuple[int, int, Callable[[], object]]] = []
        self._timers_made = 0
        self._turns_without_timer = 0
        self._futures: dict[str, asyncio.Future[None]] = {}
        self._is_pausing = False
        self._has_to_run_on = False
        """Since an outcome that was handed out at once: the next one that is not leaves the program its time first."""
        self._late: list[Alarm] = []
        self._interruptions: list[Entry] = []

    def run(self, program: Piece, *, is_shared: bool) -> Life:
        async def main() -> None:
            self._end = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(program(Branch(self, "", [], is_shared=is_shared)))
            task.add_done_callback(self._ended)
            self._let_it_run_on()
            self._tick()
            await self._end

        asyncio.run(main())
        return self

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self._end.done():
            error = task.exception()
            self._end.set_exception(error) if error else self._end.set_result(None)

    # turns of the loop instead of time

    def after(self, turns: int, callback: Callable[[], object]) -> None:
        self._timers_made += 1
        heapq.heappush(self._timers, (self._turn + turns + 1, self._timers_made, callback))

    def _tick(self) -> None:
        self._turn += 1
        self._turns_without_timer = 0 if self._timers else self._turns_without_timer + 1
        while self._timers and self._timers[0][0] <= self._turn:
            heapq.heappop(self._timers)[2]()
        if self._turns_without_timer > 100 and not self._end.done():
            self._end.set_exception(StandsStill(self.turns.holds_up()))
        if not self._end.done():
            asyncio.get_running_loop().call_soon(self._tick)

    async def sleep(self, turns: int) -> None:
        woken = asyncio.Event()
        self.after(turns, woken.set)
        await woken.wait()

    def alarm(self, turns: int, callback: Callable[[], object]) -> Alarm:
        alarm = Alarm(callback)
        self.after(turns, lambda: self._ring(alarm))
        return alarm

    def _ring(self, alarm: Alarm) -> None:
        """None rings while the program still runs on from another event: such a race within microseconds is nobody's to repeat."""
        if self._is_pausing:
            self._late.append(alarm)
        else:
            alarm.ring()
            self._let_it_run_on()

    # durable calls

    def call(self, branch: Branch, position: str, tool: str) -> Coroutine[Any, Any, str]:
        if position in self.calls and self.calls[position].text != tool:
            raise Diverged(f"{position} was {self.calls[position].text} and is now {tool}")
        self.events.append(("called", position, tool))
        self.turns.made(position)
        return self._call(branch, Entry("intent", position, tool, self.turns.seen))

    async def _call(self, branch: Branch, intent: Entry) -> str:
        position = intent.position
        try:
            outcome = self.outcomes.get(position)
            if outcome is None:
                if position not in self.calls:
                    self.calls[position] = intent
                    await self._append(*self._interruptions_left_by(branch), intent)
                if latency := self._random.randint(0, self._slowness):
                    await self.sleep(latency)
                value = f"{intent.text}={self._random.randrange(100)}"
                outcome = Entry("outcome", position, value, len(self.log) + 1)
                await self._append(outcome)
            if self.is_quick and outcome.kind == "outcome" and self.turns.at_once(position, outcome.order):
                self._note_hand_out(position)
                self._has_to_run_on = True
            else:
                self._futures[position] = asyncio.get_running_loop().create_future()
                self.turns.waiting(position, outcome.order)
                self.after(0, self._hand_out)
                await self._futures[position]
        except asyncio.CancelledError:
            self.turns.abandoned(position)
            if position not in self.outcomes or self.outcomes[position].kind == "outcome":
                self._interruptions.append(Entry("interrupted", position, "", self.turns.seen))
            self.events.append(("interrupted", position))
            raise
        if outcome.kind == "interrupted":
            raise Interrupted
        return outcome.text

    async def _append(self, *entries: Entry) -> None:
        self.log += entries
        self.transactions.append(len(self.log))
        if self._turns_of_a_commit:
            await self.sleep(self._turns_of_a_commit)

    def _interruptions_left_by(self, branch: Branch) -> list[Entry]:
        """What was interrupted in this branch or in one that it has joined: it goes on without them."""
        left = [entry for entry in self._interruptions if branch.holds(entry.position)]
        self._interruptions = [entry for entry in self._interruptions if not branch.holds(entry.position)]
        return left

    def _hand_out(self) -> None:
        if self._has_to_run_on and not self._is_pausing:
            self._let_it_run_on()
        while not self._is_pausing and (position := self.turns.next()) is not None:
            if (future := self._futures.pop(position)).cancelled():  # the call itself hears of it a turn later
                self.turns.abandoned(position)
                continue
            self.turns.handed(position)
            self._note_hand_out(position)
            future.set_result(None)
            self._let_it_run_on()

    def _note_hand_out(self, position: str) -> None:
        recorded = self.outcomes.get(position)
        self.events.append(
            ("interrupted" if recorded is not None and recorded.kind == "interrupted" else "handed", position)
        )

    def _let_it_run_on(self) -> None:
        self._is_pausing = True
        self._has_to_run_on = False
        self.after(self.pause, self._go_on)

    def _go_on(self) -> None:
        self._is_pausing = False
        if self._late:
            self._ring(self._late.pop(0))
        self._hand_out()


class Branch:
    """Where a program makes calls. What it has seen goes into the names of its further calls, so that no difference is lost."""

    def __init__(self, life: Life, path: str, seen: list[str], *, is_shared: bool) -> None:
        self.life = life
        self.path = path
        self.seen = seen
        self.is_shared = is_shared
        """Whether what one branch sees is known to all at once."""
        self._taken = 0

    def holds(self, position: str) -> bool:
        return not self.path or position.startswith(self.path + ".")

    def _take(self) -> str:
        self._taken += 1
        return f"{self.path}.{self._taken}" if self.path else str(self._taken)

    def call(self) -> Coroutine[Any, Any, str]:
        return self.life.call(self, self._take(), f"tool_{self.digest}")

    def branch(self) -> Branch:
        return Branch(self.life, self._take(), self.seen if self.is_shared else [], is_shared=self.is_shared)

    def saw(self, what: object) -> None:
        self.seen.append(str(what))
        self.life.events.append(("saw", self.path, str(what)))

    @property
    def digest(self) -> str:
        return f"{zlib.crc32(repr(self.seen).encode()):08x}"


Piece = Callable[[Branch], Coroutine[Any, Any, str]]
"""A piece of a program: it does something in a branch, and returns what the branch has seen."""
Maker = Callable[[random.Random, Callable[[], Piece]], Piece]
"""Makes a piece at random; the second argument makes another one, to be put inside."""


def one_after_another(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    count = rng.randint(1, 3)

    async def piece(branch: Branch) -> str:
        for _ in range(count):
            branch.saw(await branch.call())
        return branch.digest

    return piece


def side_by_side(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    count = rng.randint(2, 5)

    async def piece(branch: Branch) -> str:
        branch.saw(await asyncio.gather(*[branch.call() for _ in range(count)]))
        return branch.digest

    return piece


def as_they_complete(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    count, every = rng.randint(2, 6), rng.randint(1, 3)

    async def piece(branch: Branch) -> str:
        for index, completed in enumerate(asyncio.as_completed([branch.call() for _ in range(count)])):
            branch.saw(await completed)
            if index % every == 0:
                branch.saw(await branch.call())
        return branch.digest

    return piece


def a_few_at_a_time(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    count, limit = rng.randint(3, 6), rng.randint(1, 3)

    async def piece(branch: Branch) -> str:
        gate = asyncio.Semaphore(limit)

        async def limited(call: Coroutine[Any, Any, str]) -> None:
            try:
                async with gate:
                    branch.saw(await call)
            finally:
                call.close()

        await asyncio.gather(*[limited(branch.call()) for _ in range(count)])
        return branch.digest

    return piece


def first_completed(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    count, waits_for_losers = rng.randint(2, 4), rng.random() < 0.5

    async def piece(branch: Branch) -> str:
        racing = [asyncio.create_task(branch.call()) for _ in range(count)]
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        branch.saw([task.done() and task.result() for task in racing])
        branch.saw([task.cancel() for task in racing])
        if waits_for_losers:
            await asyncio.wait(racing)
        branch.saw(await branch.call())
        await asyncio.wait(racing)
        branch.saw([task.cancelled() for task in racing])
        return branch.digest

    return piece


def through_a_queue(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    counts = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))]

    async def produce(branch: Branch, results: asyncio.Queue[str], count: int) -> None:
        for _ in range(count):
            await results.put(await branch.call())

    async def piece(branch: Branch) -> str:
        results: asyncio.Queue[str] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for count in counts:
                group.create_task(produce(branch.branch(), results, count))
            for _ in range(sum(counts)):
                branch.saw(await results.get())
                branch.saw(await branch.call())
        return branch.digest

    return piece


def with_an_onlooker(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    """A task that makes no call sees how far another has come."""
    hops = rng.randint(0, 3)

    async def piece(branch: Branch) -> str:
        event = asyncio.Event()
        done: list[str] = []

        async def look() -> None:
            await event.wait()
            for _ in range(hops):
                await asyncio.sleep(0)
            branch.saw(len(done))

        async with asyncio.TaskGroup() as group:
            group.create_task(look())
            done.append(await branch.call())
            event.set()
            done.append(await branch.call())
            done.append(await branch.call())
        branch.saw(await branch.call())
        return branch.digest

    return piece


def in_branches(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    parts = [inner() for _ in range(rng.randint(2, 3))]
    is_group = rng.random() < 0.5

    async def piece(branch: Branch) -> str:
        if is_group:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part(branch.branch())) for part in parts]
            branch.saw([task.result() for task in tasks])
        else:
            branch.saw(await asyncio.gather(*[part(branch.branch()) for part in parts]))
        return branch.digest

    return piece


def first_branch(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    parts = [inner() for _ in range(rng.randint(2, 3))]

    async def piece(branch: Branch) -> str:
        racing = [asyncio.create_task(part(branch.branch())) for part in parts]
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        branch.saw([task.done() and task.result() for task in racing])
        branch.saw([task.cancel() for task in racing])
        await asyncio.wait(racing)
        branch.saw([task.cancelled() for task in racing])
        branch.saw(await branch.call())
        return branch.digest

    return piece


def given_up(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    """As `wait_for` does it."""
    turns = rng.randint(0, 30)

    async def piece(branch: Branch) -> str:
        task = asyncio.create_task(branch.call())
        alarm = branch.life.alarm(turns, task.cancel)
        try:
            branch.saw(await task)
        except Interrupted:
            branch.saw("given up")
        except asyncio.CancelledError:
            if not alarm.has_rung:
                raise
            branch.saw("given up")
        branch.saw(await branch.call())
        return branch.digest

    return piece


def looked_at_later(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    """As `wait(timeout=)` does it: the call goes on."""
    turns = rng.randint(0, 30)

    async def piece(branch: Branch) -> str:
        time_is_up = asyncio.Event()
        branch.life.alarm(turns, time_is_up.set)
        task, timer = asyncio.create_task(branch.call()), asyncio.create_task(time_is_up.wait())
        await asyncio.wait([task, timer], return_when=asyncio.FIRST_COMPLETED)
        branch.saw(task.done())
        branch.saw(await branch.call())
        branch.saw(await task)
        branch.saw(await branch.call())
        return branch.digest

    return piece


def after_a_nap(rng: random.Random, inner: Callable[[], Piece]) -> Piece:
    turns = rng.randint(0, 30)

    async def piece(branch: Branch) -> str:
        woken = asyncio.Event()
        branch.life.alarm(turns, woken.set)
        await woken.wait()
        branch.saw(await branch.call())
        return branch.digest

    return piece


CALLS: list[Maker] = [
    one_after_another, side_by_side, as_they_complete, a_few_at_a_time, first_completed, through_a_queue,
]  # fmt: skip
BRANCHES: list[Maker] = [in_branches, first_branch]
TIMED: list[Maker] = [given_up, looked_at_later, after_a_nap]


def random_program(rng: random.Random, makers: list[Maker], depth: int = 2) -> Piece:
    """Pieces one after another; in branches, and in branches of branches, there may be further programs."""
    chosen = [
        rng.choice(makers if depth else [maker for maker in makers if maker not in BRANCHES])(
            rng, lambda: random_program(rng, makers, depth - 1)
        )
        for _ in range(rng.randint(1, 3 if depth == 2 else 2))
    ]

    async def program(branch: Branch) -> str:
        for piece in chosen:
            await piece(branch)
        return branch.digest

    return program


def in_order(events: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """These events, but for the order of what is interrupted at once: asyncio cancels a group's tasks in no order."""
    ordered: list[tuple[str, ...]] = []
    for kind, group in groupby(events, lambda event: event[0]):
        together = list(group)
        ordered += sorted(together) if kind == "interrupted" else together
    return ordered


def until_news(life: Life, log: list[Entry]) -> list[tuple[str, ...]]:
    """What happened before the first hand-out that this log does not know of."""
    known = {entry.position for entry in log if entry.kind == "outcome"}
    return in_order(takewhile(lambda event: event[0] != "handed" or event[1] in known, life.events))


def waits_that_ended(life: Life, log: list[Entry], of: Life) -> list[tuple[str, ...]]:
    """The hand-outs and interruptions of which this log has the last word, as it was `of` that life."""
    ends = {
        entry.position: "handed" if entry.kind == "outcome" else "interrupted"
        for entry in log
        if entry.kind != "intent"
    }
    known = {event for event in of.events if ends.get(event[1]) == event[0]}
    return in_order(event for event in life.events if event in known)


def live_and_replay(
    seed: int, makers: list[Maker], *, pause: int = 16, is_exact: bool = True, is_quick: bool = False
) -> Counter[str]:
    """A program runs, dies at a random commit, is run again on what the log has, dies, is run again. Returns what it went through.

    `is_exact`: everything that is not news happens in the same order, of all branches together. Otherwise the hand-outs do, and each
    branch makes the calls that it made.
    """
    program = random_program(random.Random(seed), makers)
    life = Life([], seed, pause, is_quick=is_quick).run(program, is_shared=is_exact)
    events = Counter(event[0] for event in life.events)
    for number in range(1, 4):
        log = life.log[: random.Random(f"{seed}/{number}").choice(life.transactions)]
        replay = Life(log, seed + number * 1_000_003, pause, is_quick=is_quick).run(program, is_shared=is_exact)
        if is_exact and not is_quick:
            assert until_news(replay, log) == until_news(life, log)
        assert waits_that_ended(replay, log, of=life) == waits_that_ended(life, log, of=life)
        made = {event[1:] for event in replay.events if event[0] == "called"}
        assert {(entry.position, entry.text) for entry in log if entry.kind == "intent"} <= made
        events.update(event[0] for event in replay.events)
        events["crashed"] += 0 < len(log) < len(life.log)
        life = replay
    return events


def test_random_programs_see_the_same_order_again_whatever_they_share() -> None:
    """What one branch has seen, all know at once: the slightest change of order changes the next call."""
    events: Counter[str] = Counter()
    for seed in range(160):
        events += live_and_replay(seed, [*CALLS, *BRANCHES, *BRANCHES, with_an_onlooker])
    assert min(events[kind] for kind in ("called", "handed", "interrupted", "crashed")) > 150


def test_random_programs_that_go_by_the_clock_see_the_same_order_again() -> None:
    """Timers of the program's own interrupt calls, or make it call something else meanwhile. Branches share what they return."""
    events: Counter[str] = Counter()
    for seed in range(160):
        events += live_and_replay(seed, [*CALLS, *BRANCHES, *TIMED, *TIMED], is_exact=False)
    assert min(events[kind] for kind in ("called", "handed", "interrupted", "crashed")) > 150


def test_a_call_that_is_alone_may_be_handed_its_outcome_at_once() -> None:
    for seed in range(80):
        live_and_replay(seed, [*CALLS, *BRANCHES], is_quick=True)


@pytest.mark.parametrize(
    ("makers", "options"),
    [
        pytest.param([*CALLS, *BRANCHES], {"pause": 2}, id="the program is not left the time to run on"),
        pytest.param([with_an_onlooker], {"is_quick": True}, id="an onlooker is not left the time to look"),
    ],
)
def test_these_programs_would_show_a_change_of_order(makers: list[Maker], options: dict[str, Any]) -> None:
    """What the driver has to see to; and what a call that is handed its outcome at once takes from those beside it."""

    def differs(seed: int) -> bool:
        try:
            live_and_replay(seed, makers, **options)
        except (AssertionError, Diverged, StandsStill, Interrupted, ExceptionGroup):
            return True
        return False

    assert any(differs(seed) for seed in range(30))
