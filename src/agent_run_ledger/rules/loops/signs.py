"""The signs of a loop. Each is a function of the last calls, the newest last, and says ok, suspected or certain."""

from __future__ import annotations

from itertools import pairwise

from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.words import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from agent_run_ledger.rules.loops.similarity import Embedder

    class Sign(Protocol):
        """One way to see a loop: `read` says how many of the last calls are one, `continues` whether a call would be one more."""

        @property
        def is_of_one_question(self) -> bool:
            """Whether it says ok wherever the last call does not ask what the one before it has asked."""

        def read(self, calls: Sequence[Call]) -> Reading:
            """What the last of these calls shows together with those before it."""

        def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
            """Whether `asked`, the next call, goes on with what these calls have shown."""


OK = Verdict()

Reading = tuple[Verdict, int]
"""What a sign says, and to how many calls after these it would say ok, whatever they are: it need not be asked then."""

TURNS = 3
"""After so many turns a cycle is certain."""
LONGEST_PERIOD = 6
PATIENCE = 2
"""Transient errors are given so many times the calls that others are, in every rule but that of identical calls."""
WINDOW = PATIENCE * TURNS * LONGEST_PERIOD
"""How many calls the longest cycle has that is waited for."""
REMEMBERED = WINDOW + 1
"""With how many calls before it a call is compared."""


def _patience(calls: Sequence[Call]) -> int:
    return PATIENCE if any(call.is_transient for call in calls) else 1


class Identical:
    """`limit` equal calls in a row with one equal outcome are a certain loop: nothing can change by asking once more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    def is_of_one_question(self) -> bool:
        return self.limit > 1

    def read(self, calls: Sequence[Call]) -> Reading:
        last, count = calls[-1], 0
        if last.may_repeat:
            return OK, 0
        for call in reversed(calls):
            if (call.input, call.outcome, call.tool) != (last.input, last.outcome, last.tool) or call.may_repeat:
                break
            count += 1
            if count == self.limit:
                break
        if count < self.limit:
            return OK, 0
        reason = f"{last.tool!r} was called {count} times in a row with equal arguments and an equal outcome"
        return Verdict("certain", "identical_calls", reason, _numbers(calls[-count:])), 0

    def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
        return (asked.tool, asked.input) == (evidence[-1].tool, evidence[-1].input)


class Cycle:
    """The same two to six calls in the same order, with the same outcomes, are certain after their third turn."""

    is_of_one_question = False

    def read(self, calls: Sequence[Call]) -> Reading:
        rests = TURNS * LONGEST_PERIOD
        for period in range(2, LONGEST_PERIOD + 1):
            if len(calls) < TURNS * period:
                rests = min(rests, TURNS * period - len(calls) - 1)
                break
            if not calls[-1].repeats(calls[-1 - period]):
                rests = min(rests, (TURNS - 1) * period - 1)  # in all turns but the first, each has one that it repeats
                continue
            rests = 0
            turn = calls[-period:]
            if all(call.is_again(turn[0]) for call in turn):
                continue  # one call again and again is what the rules of rows are for
            length = TURNS * _patience(turn) * period
            if len(calls) < length:
                continue
            if all(calls[-at].repeats(calls[-at - period]) for at in range(2, length - period + 1)):
                names = ", ".join([repr(call.tool) for call in turn])
                reason = f"{names} went round {length // period} times with the same arguments and the same outcomes"
                return Verdict("certain", "cycle", reason, _numbers(calls[-length:])), 0
        return OK, rests

    def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
        return any(asked.is_again(call) for call in evidence)


class Repetition:
    """`limit` calls in a row that differ only in fields which differ every time: request ids, times, the id of what was written."""

    is_of_one_question = True

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def read(self, calls: Sequence[Call]) -> Reading:
        last, row = calls[-1], 1
        while row < self.limit * PATIENCE and row < len(calls) and last.repeats(calls[-1 - row]):
            row += 1
        if row < self.limit or row < self.limit * _patience((last,)):
            return OK, 0
        reason = (
            f"{last.tool!r} was called {row} times in a row, and at most ids and times differ in arguments and outcomes"
        )
        return Verdict("suspected", "repetition", reason, _numbers(calls[-row:])), 0

    def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
        return asked.is_again(evidence[-1])


class SimilarInputs:
    """`limit` calls of one tool in a row whose inputs are alike, cosine at or above `threshold`, and whose answers are the same."""

    is_of_one_question = False

    def __init__(self, limit: int, threshold: float, embedder: Embedder | None) -> None:
        self.limit = limit
        self.threshold = threshold
        self.embedder = embedder

    def read(self, calls: Sequence[Call]) -> Reading:
        last, row = calls[-1], 1
        if last.may_repeat:
            return OK, self.limit - 1
        while row < self.limit * PATIENCE and row < len(calls) and self._is_alike(calls[-row], calls[-1 - row]):
            row += 1
        if (
            row < self.limit
            or row < self.limit * _patience((last,))
            or last.is_bare
            or all(call.input == last.input for call in calls[-row:])
        ):
            return OK, max(0, self.limit - row - 1)
        reason = f"{last.tool!r} was called {row} times in a row with nearly the same arguments and the same answer"
        return Verdict("suspected", "similar_inputs", reason, _numbers(calls[-row:])), 0

    def _is_alike(self, later: Call, earlier: Call) -> bool:
        if later.is_like_last is None:
            later.is_like_last = self._compare(later, earlier)
        return later.is_like_last

    def _compare(self, later: Call, earlier: Call) -> bool:
        if later.tool != earlier.tool or earlier.may_repeat:
            return False
        is_same_answer = later.answers_like(earlier)
        if not is_same_answer and not (later.is_error and earlier.is_error):
            return False
        if later.likeness(earlier, self.embedder) < self.threshold:
            return False
        if not is_same_answer:
            return later.complains_like(earlier)
        # A long frame makes words alike whatever it holds; who brings an embedder knows better.
        return later.is_error or self.embedder is not None or not later.replaces(earlier)

    def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
        return asked.likeness(evidence[-1], self.embedder) >= self.threshold


class NothingNew:
    """`limit` steps in a row from which nothing was learnt: each asked again, or got an answer that was known already.

    A bare acknowledgement of a new call tells nothing either, but the call may have changed something: it ends the row. So an
    unchanged test after each edit is no loop.
    """

    is_of_one_question = False

    def __init__(self, limit: int, embedder: Embedder | None) -> None:
        self.limit = limit
        self.embedder = embedder

    def read(self, calls: Sequence[Call]) -> Reading:
        row, last = 0, calls[-1]
        if not _is_known(calls, len(calls) - 1):
            return OK, 0 if last.is_error or last.is_idle else self.limit - 1
        needed = self.limit * _patience((last,))
        is_one_answer = True
        for at in range(len(calls) - 1, 0, -1):
            call = calls[at]
            if call.is_idle:
                continue
            if call.is_bare or call.may_repeat or not ((is_known := _is_known(calls, at)) or call.is_error):
                break
            if is_one_answer and not (is_known and call.answers_like(last)):
                # Whoever asks for several things again may have lost sight of one, and what fails in a new way tells what will not do.
                is_one_answer = False
                needed += 1
            row += is_known
            if row == needed:
                break
        if row < needed:
            return OK, max(0, self.limit - row - 1)
        evidence = calls[at - 1 :]
        rule, reason = "nothing_new", f"the last {row} calls asked again or got answers that were known already"
        if is_one_answer:
            rule, said = (
                ("same_error", "failed in the same way") if last.is_error else ("same_answer", "got the same answer")
            )
            reason = f"{len(evidence)} calls in a row {said}, whatever their arguments"
        return Verdict("suspected", rule, reason, _numbers(evidence)), 0

    def continues(self, asked: Asked, evidence: Sequence[Call]) -> bool:
        """Whether it is as near to these calls as they are to each other."""
        of_one_tool = [(one, other) for one, other in pairwise(evidence) if one.tool == other.tool]
        spread = min([one.likeness(other, self.embedder) for one, other in of_one_tool], default=1.0)
        return any(asked.tool == call.tool and asked.likeness(call, self.embedder) >= spread for call in evidence)


def _is_known(calls: Sequence[Call], at: int) -> bool:
    """Whether the call there told nothing that those before it had not told."""
    call = calls[at]
    if call.is_known is None:
        call.is_known = call.is_known_from(calls[max(0, at - REMEMBERED) : at])
    return call.is_known


def _numbers(calls: Sequence[Call]) -> tuple[int, ...]:
    return tuple([call.number for call in calls])
