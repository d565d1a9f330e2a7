"""What the loop rules have seen of a run, and what stands against it. They are shown an outcome when somebody asks what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.contract import Row
from agent_run_ledger.rules import loops
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.rules.loops.signs import OK
from agent_run_ledger.words import Effect, Verdict

if TYPE_CHECKING:
    from agent_run_ledger.engine.history import StepHistory

_MOST_UNSEEN = 1000
"""So many outcomes wait to be shown, at the most: each may hold some 16 KB."""


class _Ended(NamedTuple):
    """A step that has an outcome, which the rules have not been shown."""

    step: StepHistory
    arguments: bytes | None
    """As the step has them by then: long ones are let go of."""
    effect: str | None
    """As it was declared for this attempt."""
    row: Row
    body: dict[str, Any]

    def call(self) -> Call:
        """The step and its outcome as the rules see them."""
        step, body = self.step, self.body
        is_error = body["ok"] != "completed"
        return Call(
            step.number,
            step.tool,
            step.input,
            body.get("error_id") or body["payload"],
            loops.looked_at(self.arguments),
            loops.answered(self.row.payload, is_error=is_error),
            is_error=is_error,
            may_repeat=body.get("may_repeat", False),
            write=None if self.effect is None else self.effect != Effect.READ,
            is_thought=step.is_thought,
        )


class Suspicion:
    """The rules' memory of one run. It is a function of what its entries say, whenever the rules are asked."""

    __slots__ = ("_make_rule", "_released", "_rule", "_unseen", "_verdict", "_warned")

    def __init__(self, rule: Callable[[], Rule] | None) -> None:
        self._make_rule = rule
        self._rule = rule() if rule is not None else None
        self._released: Rule | None = None
        """The memory that an operator has overruled: once more, and it counts again."""
        self._verdict = OK
        self._warned = 0
        self._unseen: list[_Ended] = []

    @property
    def verdict(self) -> Verdict:
        """What the rules say of the run as it is now."""
        if self._unseen:
            self.catch_up()
        return self._verdict

    @property
    def warned(self) -> int:
        """How often the loop that stands against the run was met with less than its end: 1 notice, 2 refusal of a call."""
        if self._unseen:
            self.catch_up()
        return self._warned

    def ended(self, step: StepHistory, row: Row, body: dict[str, Any]) -> None:
        """A step has an outcome."""
        if self._rule is None:
            return
        self._unseen.append(_Ended(step, step.arguments, step.effect, row, body))
        if len(self._unseen) >= _MOST_UNSEEN:
            self._leave_out_forgotten()
            if len(self._unseen) >= _MOST_UNSEEN:
                self.catch_up()

    def warn(self, warned: int) -> None:
        """The loop that stands against the run was met with this."""
        self._warned = max(self.warned, warned)

    def begin_afresh(self, *, is_overruled: bool) -> None:
        """What was seen counts no more; where an operator has overruled it, only until the loop goes on."""
        self.catch_up()
        if is_overruled and self._verdict.level != "ok":
            self._released = self._rule
        self._verdict, self._warned = OK, 0
        if self._make_rule is not None:
            self._rule = self._make_rule()

    def goes_on(self, tool: str, salted: str, stored: bytes) -> bool:
        """Whether a call of these arguments, of which `salted` is the digest, goes on with what the verdict is about."""
        if self._unseen:
            self.catch_up()
        if self._verdict is OK or self._verdict.level == "ok" or self._rule is None:
            return False
        return self._rule.continues(Asked(tool, salted, loops.looked_at(stored)))

    def look_ahead(self, ended: Iterable[tuple[StepHistory, Row, dict[str, Any]]]) -> Verdict:
        """What the rules would say if these steps had these outcomes."""
        self.catch_up()
        if self._rule is None:
            return OK
        kept = self._verdict, self._rule, self._released, self._warned
        self._rule, self._released = copy(self._rule), copy(self._released)
        try:
            for step, row, body in ended:
                self._show(_Ended(step, step.arguments, step.effect, row, body).call())
            return self._verdict
        finally:
            self._verdict, self._rule, self._released, self._warned = kept

    def catch_up(self) -> None:
        """Show the rules the outcomes that they have not seen."""
        if len(self._unseen) == 1:  # as always where a run goes on step by step
            self._show(self._unseen.pop().call())
            return
        self._leave_out_forgotten()
        calls = [ended.call() for ended in self._unseen]
        self._unseen = []
        shown = 0  # from which one on it matters what the rules say: of a step it is said anew, of thoughts not
        if len(calls) > 1 and not self._must_see_all():
            shown = next((at for at in range(len(calls) - 1, 0, -1) if not calls[at].is_aside), 0)
        for call in calls[:shown]:
            assert self._rule is not None
            self._rule.remember(call)
        for call in calls[shown:]:
            self._show(call)

    def _must_see_all(self) -> bool:
        """Whether it matters what the rules say of each: where a loop was met with a warning, any of them may have ended it."""
        return self._warned > 0 or self._released is not None

    def _leave_out_forgotten(self) -> None:
        """Of many unseen outcomes keep the last ones: fresh rules that see these are as those that have seen all."""
        if self._rule is None or len(self._unseen) <= self._rule.reach or self._must_see_all():
            return
        assert self._make_rule is not None
        steps, at, later = 0, len(self._unseen), None
        while at and steps < self._rule.reach:
            at -= 1
            ended = self._unseen[at]
            if ended.step is not later and not ended.call().is_aside:
                steps, later = steps + 1, ended.step
        if at:
            del self._unseen[:at]
            self._rule = self._make_rule()

    def _show(self, call: Call) -> None:
        assert self._rule is not None
        self._verdict = self._rule.observe(call)
        if self._released is not None:
            again = self._released.observe(copy(call))  # a call remembers with what it was compared
            if again.level != "ok" and not call.may_repeat:
                self._verdict, self._rule = again, self._released
            self._released = None
        if self._verdict.level == "ok":
            self._warned = 0
