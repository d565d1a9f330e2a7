"""Every interleaving of two owners of one run, with a crash and a lost lease anywhere: a search through all reachable states."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Row
from agent_run_ledger.stores.memory import MemoryStore
from support.replayed import (
    BEAT,
    LEASE_SECONDS,
    Ask,
    Called,
    Ended,
    Heard,
    Life,
    Memory,
    Pause,
    Place,
    Raised,
    Script,
    Sleep,
    Verb,
    begin_again,
)
from support.sharing import WRITES, Shared

PAST_THE_LEASE = LEASE_SECONDS + 1


# --- the search -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """One moment of the whole world, by the numbers of its parts."""

    shared: int
    left: int
    right: int
    behind: tuple[float, float]
    """How many seconds have passed that each of the two has not seen yet."""
    seen: int
    """What the outside world has seen."""
    crashes: int
    """How many may still happen; `lapses` and `beats` likewise."""
    lapses: int
    beats: int

    def place(self, side: int) -> int:
        return self.right if side else self.left


Seen = frozenset[tuple[str, str, int]]
"""Calls as the outside world sees them: `begun` or `done`, position, attempt."""


class Finish(NamedTuple):
    """What a last owner makes of a run when nobody disturbs him: how he ends, and the positions that he dispatched."""

    how: str
    dispatched: tuple[str, ...]


class Search:
    """All states that two scripts reach with at most so many crashes, lost leases and heartbeats, each held to P1 to P5.

    Who crashes is replaced by a process that plays `third`, else the same script. A last owner plays `left`. Programs that know the
    same are one, unless `is_merging` is False: then two are one only if all that they heard was the same.
    """

    def __init__(self, left: Script, right: Script, *, third: Script | None = None, is_merging: bool = True) -> None:
        self._scripts = (left, right)
        self._third = third
        self._last = left
        self._is_merging = is_merging
        self._first: str | None = None
        self.states = 0
        self.transitions = 0
        self.reached: Counter[str] = Counter()
        """What has happened on the way, and how often."""
        self._visited: list[State] = []
        self._shared: list[Shared] = []
        self._shared_by_contents: dict[Any, int] = {}
        self._performed: dict[tuple[int, int, Ask], tuple[int, int]] = {}
        self._answers: list[Any] = []
        self._answers_by_value: dict[Any, int] = {}
        self._places: list[Place] = []
        self._places_by_memory: dict[Any, Place] = {}
        self._roots: dict[Script, Place] = {}
        self._seen: list[Seen] = []
        self._seen_by_value: dict[Seen, int] = {}
        self._open: dict[tuple[int, int], int] = {}
        self._finishes: dict[Any, Finish] = {}

    def run(
        self, *, crashes: int, lapses: int, beats: int = 0, first: Literal["crash", "lapse"] | None = None
    ) -> Search:
        """Visit every state once, the nearest first. An assertion that fails says by which schedule it was reached.

        `first` leaves out where the one comes after the other, so that a long search can be made in two halves.
        """
        self._first = first
        left, right = map(self._root, self._scripts)
        shared, seen = self._intern(Shared()), self._intern_seen(frozenset())
        start = State(shared, left.number, right.number, (0.0, 0.0), seen, crashes, lapses, beats)
        came: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            for action in self._actions(state):
                try:
                    after = self._take(state, action)
                    self.transitions += 1
                    if after not in came:
                        came[after] = (state, action)
                        self._hold_to_promises(after)
                        queue.append(after)
                except Exception as error:
                    error.add_note("\n  ".join(["the schedule:", *self._schedule(came, state), action]))
                    raise
        self.states = len(came)
        self._visited = list(came)
        return self

    def moments(self) -> set[Any]:
        """The states as they are seen from outside: the store, the witness, what each program asks, and what may still happen."""
        return {
            (
                self._shared[state.shared].contents,
                self._seen[state.seen],
                self._places[state.left].asks,
                self._places[state.right].asks,
                (state.crashes, state.lapses, state.beats),
            )
            for state in self._visited
        }

    def _schedule(self, came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        """How a state was reached, an action a line."""
        lines: list[str] = []
        step = came[state]
        while step is not None:
            before, action = step
            if action in ("left", "right"):
                asks = self._places[before.place(action == "right")].asks
                action += f": {asks.name}" if isinstance(asks, Verb) else f": {asks}"
            lines.append(action)
            step = came[before]
        return lines[::-1]

    # --- actions ------------------------------------------------------------------------------------------------------

    def _actions(self, state: State) -> Iterator[str]:
        """All that can happen next."""
        for side, number in (("left", state.left), ("right", state.right)):
            place = self._places[number]
            if isinstance(place.asks, Ended):
                continue
            yield side
            if state.crashes and not place.is_fresh and not (self._first == "lapse" and state.lapses):
                yield f"{side} crashes"
            if state.beats and place.may_beat:
                yield f"{side} beats"
        shared = self._shared[state.shared]
        may_lapse = state.lapses and not (self._first == "crash" and state.crashes)
        if shared.is_held and (may_lapse or shared.is_orphaned):
            yield "the lease runs out"

    def _take(self, state: State, action: str) -> State:
        side = 1 if action.startswith("right") else 0
        if action == "the lease runs out":
            shared = self._shared[state.shared]
            lapses = state.lapses - (not shared.is_orphaned)
            after = self._intern(shared.later(PAST_THE_LEASE, on_the_wall=0.0))
            return self._pass(state._replace(shared=after, lapses=lapses), PAST_THE_LEASE)
        if action.endswith("crashes"):
            self.reached["crash"] += 1
            return self._start(state._replace(crashes=state.crashes - 1), side)
        if action.endswith("beats"):
            return self._beat(state._replace(beats=state.beats - 1), side)
        return self._answer(state, side)

    def _start(self, state: State, side: int) -> State:
        """An owner's process is gone, and a new one stands at the program's first line."""
        shared = self._shared[state.shared]
        new = str(shared.born + 1)
        names = (shared.names[0], new) if side else (new, shared.names[1])
        renamed = self._intern(replace(shared, names=names, born=shared.born + 1))
        script = self._third or self._places[state.place(side)].script
        return self._stand(state._replace(shared=renamed), side, self._root(script))

    def _answer(self, state: State, side: int) -> State:
        """The world answers what one program asks, and that program runs on."""
        asks = self._places[state.place(side)].asks
        answer = self._intern_answer(None)
        if isinstance(asks, Verb):
            answer, after = self._performed_by(state.shared, side, asks)
            if after != state.shared:
                self._expect_calls(state, after)
                state = state._replace(shared=after, seen=self._still_open(state.seen, after))
        elif isinstance(asks, Called):
            self._expect_effect(state, side, asks)
            state = self._see(state, "done", asks)
        elif isinstance(asks, Sleep):
            after = self._intern(self._shared[state.shared].later(asks.seconds, on_the_wall=asks.seconds))
            state = self._pass(state._replace(shared=after), asks.seconds)
        return self._go_on(state, side, answer)

    def _performed_by(self, shared: int, side: int, verb: Verb) -> tuple[int, int]:
        """The answer to a verb and what is shared after it, by number."""
        key = (shared, side, verb)
        if key not in self._performed:
            before = self._shared[shared]
            answer, after = before.asked(before.names[side], verb)
            self._performed[key] = self._intern_answer(answer), self._intern(after)
        answered = self._answers[self._performed[key][0]]
        if isinstance(answered, Raised):
            self.reached[f"{verb.name}: {answered.name}"] += 1
        elif verb.name == "append" and answered is False:
            self.reached["append: the inbox has moved"] += 1
        elif verb.name in WRITES:
            self.reached[verb.name] += 1
        return self._performed[key]

    def _go_on(self, state: State, side: int, answer: int) -> State:
        """One program hears an answer, and runs on until it asks something that others can see or change."""
        state = self._hear(state, side, answer)
        place = self._places[state.place(side)]
        asks = place.asks
        if isinstance(asks, Pause) and not self._time_may_pass(state):
            return self._go_on(state, side, self._intern_answer(None))
        if isinstance(asks, Called):
            self._expect_dispatch(state, side, asks)
            state = self._see(state, "begun", asks)
        elif isinstance(asks, Ended):
            self.reached[asks.how] += 1
            if asks.how in place.script.starts_again:
                return self._start(state, side)
            _expect_end(self._shared[state.shared], side, place.script, asks)
        return state

    def _time_may_pass(self, state: State) -> bool:
        """Whether a lease may still run out: else it makes no difference that a program stands before an effect."""
        return bool(state.crashes or state.lapses or state.beats) or self._shared[state.shared].is_orphaned

    def _beat(self, state: State, side: int) -> State:
        """The heartbeat's thread has its turn, whole, and the program stands where it stood."""
        asks = self._places[state.place(side)].asks
        state = self._hear(state, side, self._intern_answer(BEAT))
        while (beating := self._places[state.place(side)].asks) != asks:
            assert isinstance(beating, Verb)
            answer, after = self._performed_by(state.shared, side, beating)
            state = self._hear(state._replace(shared=after), side, answer)
        return state

    def _hear(self, state: State, side: int, answer: int) -> State:
        """One program hears an answer and asks the next thing."""
        place = self._places[state.place(side)]
        heard = (answer, state.behind[side], self._shared[state.shared].wall)
        if heard not in place.next:
            told = (*place.heard, Heard(self._answers[answer], *heard[1:]))
            asks, memory = begin_again(place.script, told, place.asked)
            place.next[heard] = self._place(place.script, told, (*place.asked, asks), memory)
        return self._stand(state, side, place.next[heard])

    @staticmethod
    def _stand(state: State, side: int, place: Place) -> State:
        """One program stands at this place, and has seen the time."""
        if side:
            return state._replace(right=place.number, behind=(state.behind[0], 0.0))
        return state._replace(left=place.number, behind=(0.0, state.behind[1]))

    def _pass(self, state: State, seconds: float) -> State:
        """Time passes. A program sees it when it goes on, if it can see it at all; more than a lease is as good as a lease."""
        left, right = self._places[state.left], self._places[state.right]
        behind = (
            min(state.behind[0] + seconds, PAST_THE_LEASE) if left.waits else 0.0,
            min(state.behind[1] + seconds, PAST_THE_LEASE) if right.waits else 0.0,
        )
        return state._replace(behind=behind)

    # --- P1 and P2: what the outside world saw ------------------------------------------------------------------------

    def _see(self, state: State, what: str, call: Called) -> State:
        return state._replace(seen=self._intern_seen(self._seen[state.seen] | {(what, call.position, call.attempt)}))

    def _still_open(self, seen: int, shared: int) -> int:
        """What of all that was seen can still be contradicted: the calls of an attempt under way, and all that must not be repeated.

        A call of any other attempt is refused by `_expect_dispatch`, so there is no need to remember those.
        """
        key = (seen, shared)
        if key not in self._open:
            steps = self._shared[shared].history.positions
            self._open[key] = self._intern_seen(
                frozenset(
                    (what, position, attempt)
                    for what, position, attempt in self._seen[seen]
                    if (step := steps[position]).outcome is None
                    and (step.attempts == attempt or step.tool in self._last.must_not_repeat)
                )
            )
        return self._open[key]

    def _expect_dispatch(self, state: State, side: int, call: Called) -> None:
        """A function is entered: by the run's owner, under a lease that runs, after its intent, once, and after no outcome."""
        shared, seen = self._shared[state.shared], self._seen[state.seen]
        _expect_intent(shared, call)
        is_owner = (shared.owned.holder, shared.owned.token) == (shared.names[side], call.token)
        assert is_owner, f"P5: {call.tool} was dispatched by a former owner"
        assert shared.is_held, f"P5: {call.tool} was dispatched although the lease had run out"
        assert ("begun", call.position, call.attempt) not in seen, f"P2: {call.tool} was called twice for one intent"
        if call.tool in self._last.must_not_repeat:
            begun = [each for each in seen if each[:2] == ("begun", call.position)]
            assert not begun, f"P2: {call.tool} was dispatched again"
        self.reached["dispatched again"] += call.attempt > 1

    def _expect_effect(self, state: State, side: int, call: Called) -> None:
        """A call reaches the world. After an outcome it may do so only where its caller was overtaken in the middle of it."""
        shared, seen = self._shared[state.shared], self._seen[state.seen]
        _expect_one_payload(shared, call)
        is_owner = (shared.owned.holder, shared.owned.token) == (shared.names[side], call.token)
        is_settled = shared.history.positions[call.position].outcome is not None
        assert not (is_owner and is_settled), f"P1: the run's owner calls {call.tool}, which has an outcome"
        if call.tool in self._last.must_not_repeat:
            assert not is_settled, f"P2: {call.tool} has an outcome that was recorded without it"
            done = [each for each in seen if each[:2] == ("done", call.position)]
            assert not done, f"P2: {call.tool} took effect twice"
        self.reached["a late effect of a former owner"] += is_settled

    def _expect_calls(self, state: State, after: int) -> None:
        """No outcome is invented: what is recorded was seen to be done."""
        seen = self._seen[state.seen]
        for row in self._shared[after].rows[len(self._shared[state.shared].rows) :]:
            if row.kind == "outcome" and json.loads(row.body)["ok"] != "cancelled":
                done = ("done", row.position, row.attempt)
                assert done in seen, f"step {row.position} has an outcome of attempt {row.attempt}, which nobody saw"

    def _hold_to_promises(self, state: State) -> None:
        """What must be true in any state. What the log alone says is looked at as its contents come up, in `_expect_sound`."""
        shared, seen = self._shared[state.shared], self._seen[state.seen]
        steps = shared.history.positions
        for _, position, attempt in seen:
            assert position in steps, f"P2: step {position} was called, and the log knows nothing of it"
            assert steps[position].attempts >= attempt, f"P2: attempt {attempt} of step {position} has no intent"
            limit = self._last.max_attempts(steps[position].tool)
            assert attempt <= limit, f"P3: step {position} was dispatched {attempt} times"
        finish = self._finishes[shared.rows, shared.requests]
        for position in finish.dispatched:
            if position in steps and steps[position].tool in self._last.must_not_repeat:
                begun = [each for each in seen if each[:2] == ("begun", position)]
                assert not begun, f"P2: a last owner dispatches {steps[position].tool} again"

    # --- P3 and P4, and that every run ends: once for each contents of the log ------------------------------------------

    def _expect_sound(self, shared: Shared) -> None:
        if (shared.rows, shared.requests) in self._finishes:
            return
        steps = shared.history.positions.values()
        assert shared.history.steps <= self._last.max_steps, f"P3: the run has {shared.history.steps} steps"
        for step in steps:
            assert step.attempts <= self._last.max_attempts(step.tool), f"P3: {step.tool} has {step.attempts} attempts"
        assert _verified(shared.store()) == [], "P4: the log does not verify"
        self._finishes[shared.rows, shared.requests] = self._finish(shared)

    def _finish(self, shared: Shared) -> Finish:
        """Let everybody be gone, and one last owner play the run to its end, on a store of his own with the same contents."""
        now = replace(shared.later(PAST_THE_LEASE, on_the_wall=0.0), names=("last", "nobody"))
        dispatched: list[str] = []

        def answer(ask: Ask) -> Heard:
            nonlocal now
            answer, slept = None, 0.0
            if isinstance(ask, Verb):
                answer, now = now.asked("last", ask)
            elif isinstance(ask, Called):
                _expect_intent(now, ask)
                dispatched.append(ask.position)
            elif isinstance(ask, Sleep):
                slept = ask.seconds
                now = now.later(slept, on_the_wall=slept)
            return Heard(answer, slept, now.wall)

        ended = Life(self._last, answer).live()
        assert isinstance(ended, Ended)
        assert _verified(now.store()) == [], "P4: the log does not verify after a last owner has had it"
        _expect_end(now, 0, self._last, ended)
        if shared.rows and shared.waiting and not shared.history.state.is_terminal:
            assert now.history.state == "CANCELLED", "a request to cancel was not answered"
        self.reached[f"a last owner: {ended.how}"] += 1
        return Finish(ended.how, tuple(dispatched))

    # --- parts by number ----------------------------------------------------------------------------------------------

    def _intern(self, shared: Shared) -> int:
        contents = shared.contents
        if contents not in self._shared_by_contents:
            self._expect_sound(shared)
            self._shared_by_contents[contents] = len(self._shared)
            self._shared.append(shared)
        return self._shared_by_contents[contents]

    def _intern_answer(self, answer: Any) -> int:
        key = (type(answer), answer)
        if key not in self._answers_by_value:
            self._answers_by_value[key] = len(self._answers)
            self._answers.append(answer)
        return self._answers_by_value[key]

    def _intern_seen(self, seen: Seen) -> int:
        if seen not in self._seen_by_value:
            self._seen_by_value[seen] = len(self._seen)
            self._seen.append(seen)
        return self._seen_by_value[seen]

    def _place(self, script: Script, heard: tuple[Heard, ...], asked: tuple[Ask, ...], memory: Memory) -> Place:
        """The place of a program that asks this and knows this, however it came there."""
        known = memory if self._is_merging else Memory(len(self._places), waits=True)
        key = (script, asked[-1], known, not heard)
        if key not in self._places_by_memory:
            place = Place(len(self._places), script, heard, asked, waits=known.waits)
            self._places_by_memory[key] = place
            self._places.append(place)
        return self._places_by_memory[key]

    def _root(self, script: Script) -> Place:
        if script not in self._roots:
            asks, memory = begin_again(script, (), ())
            self._roots[script] = self._place(script, (), (asks,), memory)
        return self._roots[script]


# --- what is held to the promises -------------------------------------------------------------------------------------


def _expect_intent(shared: Shared, call: Called) -> None:
    """P1 and P2: a function is entered after its intent was written, and not if it has an outcome that stands."""
    step = shared.history.positions.get(call.position)
    assert step is not None, f"P2: {call.tool} was dispatched without an intent"
    assert step.outcome is None, f"P1: {call.tool} has an outcome and was called again"
    assert step.attempts == call.attempt, f"P2: attempt {call.attempt} of {call.tool} was dispatched without its intent"
    failure: Row | None = None
    for row in shared.rows:
        if row.kind == "outcome" and row.position == call.position:
            failure = row
            assert json.loads(row.body)["ok"] == "failed", f"P1: {call.tool} had an outcome and was called again"
        elif row.kind in ("intent", "value") and failure is not None:
            assert row.position == call.position, (
                f"P1: {call.tool} had failed, that was acted upon, and it was called again"
            )
    _expect_one_payload(shared, call)


def _expect_one_payload(shared: Shared, call: Called) -> None:
    """P2: every intent of a position has one tool, one key and one payload, and they are what the function was given."""
    for row in shared.rows:
        if row.kind == "intent" and row.position == call.position:
            body = json.loads(row.body)
            assert (body["tool"], body["key"]) == (call.tool, call.key), f"P2: {call.tool} has another key"
            assert json.loads(row.payload or b"") == {"given": json.loads(call.given)}, (
                f"P2: {call.tool} has another payload"
            )


def _expect_end(shared: Shared, side: int, script: Script, ended: Ended) -> None:
    """A program ends with what it should, or with an error that says why not; the run stands as it was told, and is given back."""
    history = shared.history
    assert ended.how in script.may_end, f"the program ended with {ended.how}"
    keeps = shared.owned.holder == shared.names[side] and not history.state.is_terminal
    assert not keeps, "the program has ended and keeps a run that could go on"
    if ended.how == "StepInDoubt" and history.state != "CANCELLED":  # as somebody may have done meanwhile
        assert history.state == "BLOCKED"
        assert "in doubt" in (history.cause_text or "")
        assert [step.state for step in history.positions.values() if step.outcome is None] == ["BLOCKED"]
    elif ended.how == "returned":
        assert json.loads(ended.value) == script.returns
        assert history.state.is_terminal or shared.waiting, "the program has ended, and the run has not"
        assert script.returns is None or history.state == "COMPLETED"
    else:
        assert history.state.is_terminal, f"the program ended with {ended.how}, and the run has not ended"


def _verified(store: MemoryStore) -> list[Any]:
    """What `verify` finds in a store."""
    return AgentRunLedger(store, clock=store.clock).verify().findings
