"""The memory of the loop rules: the last calls, what stands against the run, and whether a next call would go on with it."""

from __future__ import annotations

from typing import Protocol

from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.rules.loops.signs import OK, REMEMBERED, Identical
from agent_run_ledger.words import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_run_ledger.rules.loops.signs import Sign


_SLACK = 16
"""Signs that rest look at calls later than they came: so many more are remembered."""


class Rule(Protocol):
    """What a run's history is folded with. Its memory is a function of the calls it was shown: a replayed ledger halts at the same step."""

    def observe(self, call: Call) -> Verdict:
        """What this call shows together with those before it."""

    def continues(self, asked: Asked) -> bool:
        """Whether this next call goes on with what the last verdict is about: it is the one that is refused."""


class Breaker:
    """Shows the last calls to every sign, the surest first. All that it knows is a function of the calls it was shown, in their order."""

    def __init__(self, identical: Identical, signs: Sequence[Sign]) -> None:
        self._signs: tuple[Sign, ...] = (identical, identical, *signs)
        """The first looks at all calls, thoughts among them, the others at the steps alone."""
        self._room = max(REMEMBERED, identical.limit + 1) + _SLACK
        self._calls: list[Call] = []
        self._steps: list[Call] = []
        """Those of the calls that are no thoughts and no notes."""
        self._rests = [0] * len(self._signs)
        """How many more calls each sign has nothing to say of."""
        self._verdict = OK
        self._found: tuple[Sign, Sequence[Call]] | None = None
        """What the verdict is about."""

    def observe(self, call: Call) -> Verdict:
        """What this call shows together with those before it. Another attempt of the last step takes its place: all are one call."""
        calls, steps = self._calls, self._steps
        for known in (calls, steps):
            if known and known[-1].number == call.number:
                known.pop()
                self._rests = [0] * len(self._signs)
            elif len(known) > self._room:
                del known[0]
        calls.append(call)
        is_aside = call.is_aside
        if not is_aside:
            steps.append(call)
        verdict = self._read(0, calls)
        if verdict.level == "ok" and is_aside:
            return self._verdict  # who thinks goes on with nothing, and breaks nothing off
        if verdict.level == "ok":
            self._found = None
            if len(calls) == len(steps):
                self._rests[1] = 0  # it has just looked at the same
            else:
                verdict = self._read(1, steps)
            for number in range(2, len(self._signs)):
                if verdict.level != "ok":
                    break
                verdict = self._read(number, steps)
        if verdict.level != "ok":
            self._rests = [0] * len(self._signs)  # not all of them have looked
        self._verdict = verdict
        return verdict

    def __copy__(self) -> Breaker:
        """Its memory as it is, to be shown what may not happen."""
        other = Breaker.__new__(Breaker)
        other._signs, other._room, other._rests = self._signs, self._room, list(self._rests)
        other._calls, other._steps = list(self._calls), list(self._steps)
        other._verdict, other._found = self._verdict, self._found
        return other

    def _read(self, number: int, calls: Sequence[Call]) -> Verdict:
        if self._rests[number] > 0:
            self._rests[number] -= 1
            return OK
        sign = self._signs[number]
        verdict, self._rests[number] = sign.read(calls)
        if verdict.level != "ok":
            evidence = set(verdict.evidence)
            self._found = sign, [call for call in calls if call.number in evidence]
        return verdict

    def continues(self, asked: Asked) -> bool:
        """Whether this next call goes on with what the last verdict is about."""
        return self._found is not None and self._found[0].continues(asked, self._found[1])
