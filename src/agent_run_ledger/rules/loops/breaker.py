"""The memory of the loop rules: the last calls, what stands against the run, and whether a next call would go on with it."""

from __future__ import annotations

from typing import Protocol

from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.rules.loops.signs import OK, REMEMBERED, WINDOW, Identical
from agent_run_ledger.words import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_run_ledger.rules.loops.signs import Sign


_SLACK = 16
"""Signs that rest look at calls later than they came: so many more are remembered."""


class Rule(Protocol):
    """What a run's history is folded with. Its memory is a function of the calls it was shown: a replayed ledger halts at the same step."""

    reach: int
    """A fresh rule that is shown the calls from the last so many steps on is as one that was shown all, whatever comes next."""

    def observe(self, call: Call) -> Verdict:
        """What this call shows together with those before it."""

    def remember(self, call: Call) -> None:
        """Take a call in of which nobody needs a verdict. What is observed next, and is a step, is seen as if this one had been observed."""

    def continues(self, asked: Asked) -> bool:
        """Whether this next call goes on with what the last verdict is about: it is the one that is refused."""


class Breaker:
    """Shows the last calls to every sign, the surest first. All that it knows is a function of the calls it was shown, in their order."""

    def __init__(self, identical: Identical, signs: Sequence[Sign]) -> None:
        self._identical = identical
        """Looks at all calls, thoughts among them, and then again at the steps alone."""
        self._signs = (identical, *signs)
        self._room = max(REMEMBERED, identical.limit + 1) + _SLACK
        self.reach = 2 * self._room  # those that are remembered, and those with which the first of them were compared
        self._calls: list[Call] = []
        self._steps: list[Call] = []
        """Those of the calls that are no thoughts and no notes."""
        self._rests = 0
        """To how many more steps no sign has anything to say, unless a step asks again."""
        self._verdict = OK
        self._found: tuple[Sign, Sequence[Call]] | None = None
        """What the verdict is about."""

    def observe(self, call: Call) -> Verdict:
        """What this call shows together with those before it. Another attempt of the last step takes its place: all are one call."""
        calls, steps = self._calls, self._steps
        if calls and calls[-1].number == call.number:
            self._forget_last()
        last = calls[-1] if calls else None
        calls.append(call)
        is_aside = call.is_aside
        if not is_aside:
            asks_again = bool(steps) and call.tool == steps[-1].tool and call.is_again(steps[-1])
            if self._rests and not asks_again and last is steps[-1]:
                steps.append(call)
                self._rests -= 1
                return OK
            steps.append(call)
        del calls[: -self._room], steps[: -self._room]
        if is_aside and self._verdict.level != "ok" and self._identical.limit == 1:
            return self._verdict  # else any thought would take its place
        verdict, _ = self._identical.read(calls)
        if verdict.level != "ok":
            self._found = self._identical, self._evidence(calls, verdict)
        elif is_aside:
            return self._verdict  # who thinks goes on with nothing, and breaks nothing off
        else:
            verdict = self._look(asks_again=asks_again)
        if verdict.level != "ok":
            self._rests = 0
        self._verdict = verdict
        return verdict

    def remember(self, call: Call) -> None:
        """Take a call in without a look at it."""
        if self._calls and self._calls[-1].number == call.number:
            self._forget_last()
        self._rests = 0
        for known in (self._calls,) if call.is_aside else (self._calls, self._steps):
            known.append(call)
            del known[: -self._room]

    def _look(self, *, asks_again: bool) -> Verdict:
        """What the first sign says that says anything of the steps."""
        self._found, self._rests = None, WINDOW
        for sign in self._signs:
            if asks_again or not sign.is_of_one_question:
                verdict, rests = sign.read(self._steps)
                if verdict.level != "ok":
                    self._found = sign, self._evidence(self._steps, verdict)
                    return verdict
                if not sign.is_of_one_question:
                    self._rests = min(self._rests, rests)
        return OK

    @staticmethod
    def _evidence(calls: Sequence[Call], verdict: Verdict) -> list[Call]:
        numbers = set(verdict.evidence)
        return [call for call in calls if call.number in numbers]

    def _forget_last(self) -> None:
        last = self._calls.pop()
        if self._steps and self._steps[-1] is last:
            self._steps.pop()
        self._rests = 0

    def __copy__(self) -> Breaker:
        """Its memory as it is, to be shown what may not happen."""
        other = Breaker(self._identical, self._signs[1:])
        other._calls, other._steps, other._rests = list(self._calls), list(self._steps), self._rests
        other._verdict, other._found = self._verdict, self._found
        return other

    def continues(self, asked: Asked) -> bool:
        """Whether this next call goes on with what the last verdict is about."""
        return self._found is not None and self._found[0].continues(asked, self._found[1])
