"""Loop detectors: each sees the last calls and their outcomes, and says ok, suspected or certain, with its evidence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from agent_run_ledger.model import Verdict
from agent_run_ledger.rules import canonical, digests, failures

OK = Verdict()


class Call(NamedTuple):
    """One call and how it ended, as the detectors see it: equal strings mean equal things, nothing else is known of them."""

    number: int
    """The step's number, from 1."""
    tool: str
    input: str
    outcome: str


class Rule(Protocol):
    """One way to see a loop. Its memory is a function of the calls it was shown, so a replayed ledger halts at the same step."""

    def observe(self, call: Call) -> Verdict:
        """What this call shows together with those before it. The next call *like it* is what a verdict refuses."""


class IdenticalCalls:
    """`limit` equal calls in a row with one equal outcome are a certain loop: nothing can change by asking once more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: deque[int] = deque(maxlen=limit)
        self._before: tuple[str, str, str] | None = None
        """Tool, input and outcome that the calls of the row have in common."""
        self._broken: tuple[tuple[str, str, str] | None, tuple[int, ...]] = (None, ())
        """The row that the last call broke: another attempt of it may show that it goes on."""

    def observe(self, call: Call) -> Verdict:
        number, alike, numbers = call.number, (call.tool, call.input, call.outcome), self._numbers
        if numbers and numbers[-1] == number:
            numbers.pop()  # another attempt of the same step: all attempts are one call
            if not numbers:
                self._before, before = self._broken
                numbers.extend(before)
        if alike != self._before:
            self._broken = (self._before, tuple(numbers))
            numbers.clear()
            self._before = alike
        numbers.append(number)
        if len(numbers) < self._limit:
            return OK
        reason = f"{call.tool!r} was called {len(numbers)} times in a row with equal arguments and an equal outcome"
        return Verdict("certain", "identical_calls", reason, tuple(numbers))


@dataclass(frozen=True, slots=True)
class LoopDetectorPolicy:
    """When a run that repeats itself is halted.

    `max_repetitions` equal calls in a row with one equal outcome are a certain loop: the next such call is refused and the run is a
    dead letter. `threshold` (0 to 1) belongs to the similarity rule, which this version does not have yet: it is checked and kept.
    """

    max_repetitions: int = 3
    threshold: float = 0.92

    def __post_init__(self) -> None:
        if type(self.max_repetitions) is not int or self.max_repetitions < 1:
            raise ValueError(f"max_repetitions must be a whole number of at least 1, not {self.max_repetitions!r}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, not {self.threshold!r}")

    def rule(self) -> Rule:
        """A fresh rule, as a run's history is folded with."""
        return IdenticalCalls(self.max_repetitions)

    def detector(self) -> Detector:
        """A fresh detector that works without a ledger.

        >>> detector = LoopDetectorPolicy(max_repetitions=2).detector()
        >>> detector.observe("fetch", {"id": 7}, error=TimeoutError("slow")).level
        'ok'
        >>> detector.observe("fetch", {"id": 7}, error=TimeoutError("slow")).evidence
        (1, 2)
        """
        return Detector(self.rule())


class Detector:
    """A policy's rules over calls that no ledger keeps, for evaluation and for loops of other makes."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._number = 0

    def observe(
        self,
        tool: str,
        arguments: Any,
        result: Any = None,
        error: BaseException | str | None = None,
        may_repeat: bool = False,
        write: bool | None = None,
    ) -> Verdict:
        """Show one call and its outcome; the evidence counts calls from 1. `may_repeat` calls are allowed to be alike.

        `write` tells whether the call changed something; no rule of this version asks for it.
        """
        self._number += 1
        if may_repeat:
            outcome = f"call {self._number}"
        elif error is None:
            outcome = "output " + digests.plain(canonical.encode(result)).hex()
        else:
            outcome = "error " + (error if isinstance(error, str) else failures.text(failures.describe(error)))
        given = digests.plain(canonical.encode(arguments)).hex()
        return self._rule.observe(Call(self._number, tool, given, outcome))
