"""What may be said about loops: when calls are one and what it is met with, and the same rules over calls that no ledger keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_run_ledger.rules import canonical, digests, failures
from agent_run_ledger.rules.loops import ALIKE, HALTS, MAX_REPETITIONS, STAGES, answered, breaker, looked_at
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.words import Verdict

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


@dataclass(frozen=True, slots=True)
class LoopDetectorPolicy:
    """When a run that repeats itself is halted.

    `max_repetitions` equal calls in a row with one equal outcome are a certain loop, and so is a cycle of up to six calls after its third
    turn. Calls that differ only in ids and times, or whose inputs are alike (cosine at or above `threshold`, 0 to 1) with the same answer,
    are suspected after as many, and calls from which nothing new is learnt two later. `embedder` maps the canonical text of arguments to
    a sequence of floats, always of one length and the same for the same text; without one, words are counted.

    `reactions` says with what a loop that is `suspected` or `certain` is met first: `"notice"`, of which `run.notices()` tells; `"block"`,
    which refuses the next call that goes on with it by `CallBlocked`; or `"halt"`, which ends the run (a suspected one in quarantine).
    Each further call that goes on with it meets the next of these.
    """

    max_repetitions: int = MAX_REPETITIONS
    threshold: float = ALIKE
    embedder: Callable[[str], Sequence[float]] | None = field(default=None, kw_only=True)
    reactions: Mapping[str, str] = field(default_factory=HALTS.copy, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.max_repetitions) is not int or self.max_repetitions < 1:
            raise ValueError(f"max_repetitions must be a whole number of at least 1, not {self.max_repetitions!r}")
        if self.embedder is not None and not callable(self.embedder):
            raise ValueError(f"embedder is a function of a text, not {self.embedder!r}")
        if type(self.threshold) not in (int, float) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, not {self.threshold!r}")
        given = dict(self.reactions)
        if not given.keys() <= {"suspected", "certain"} or not all(stage in STAGES for stage in given.values()):
            raise ValueError(
                f"reactions say 'notice', 'block' or 'halt' for 'suspected' and for 'certain', and nothing else: {given!r}"
            )
        object.__setattr__(self, "reactions", HALTS | given)

    def rule(self) -> Rule:
        """A fresh rule, as a run's history is folded with."""
        return breaker(self.max_repetitions, self.threshold, self.embedder)

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

        `write` tells whether the call changed something. A write that is made again is a loop although its answer has a new id; from a
        call that changed nothing a new id is news.
        """
        self._number += 1
        given = canonical.encode(arguments)
        if error is None:
            output = canonical.encode(result)
            outcome, answer = "output " + digests.plain(output).hex(), answered(output, is_error=False)
        else:
            answer = error if isinstance(error, str) else failures.text(failures.describe(error))
            outcome = "error " + answer
        number, question = self._number, (tool, digests.plain(given).hex())
        call = Call(number, *question, outcome, looked_at(given), answer, error is not None, may_repeat, write)
        return self._rule.observe(call)

    def continues(self, tool: str, arguments: Any) -> bool:
        """Whether a next call would go on with what the last verdict is about. It is the one that a ledger refuses.

        >>> detector = LoopDetectorPolicy(max_repetitions=1).detector()
        >>> detector.observe("fetch", {"id": 7}, "nothing").level
        'certain'
        >>> detector.continues("fetch", {"id": 7}), detector.continues("fetch", {"id": 8})
        (True, False)
        """
        given = canonical.encode(arguments)
        return self._rule.continues(Asked(tool, digests.plain(given).hex(), looked_at(given)))
