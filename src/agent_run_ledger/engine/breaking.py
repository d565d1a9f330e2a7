"""With what a run that repeats itself, or that has nearly used up its budget, is met: a notice, the refusal of a call, its end."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine import admission
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.history import Blocked
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Draft, Sealed
from agent_run_ledger.errors import CallBlocked
from agent_run_ledger.rules import budget, canonical
from agent_run_ledger.rules.loops import HALT, NOTICE, STAGES
from agent_run_ledger.words import Event, RunState, Verdict

ENDS = {
    "certain": (Event.LOOP_DETECTED, RunState.DEAD_LETTER),
    "suspected": (Event.LOOP_SUSPECTED, RunState.QUARANTINE),
}
"""How a run ends that is halted."""


def against(run: LiveRun, call: Call, salted: str, now: float) -> Verdict | None:
    """What stands against a call that is about to be dispatched: it goes on with a loop, or is made more often than its tool may be."""
    history, may_repeat = run.history, call.options.may_repeat
    if not may_repeat:
        return history.suspicion.verdict if history.suspicion.goes_on(call.tool, salted, call.stored) else None
    if may_repeat is True or (call.tool, salted) not in history.repeats:
        return None
    often, first, since = history.repeats[call.tool, salted]
    if may_repeat.times is not None and often >= may_repeat.times:
        why = f"{often} times, as often as it may be"
    elif may_repeat.seconds is not None and now - since >= may_repeat.seconds:
        why = f"{often} times in {now - since:.1f} s, and may be for {may_repeat.seconds:g} s"
    else:
        return None
    return Verdict("certain", "may_repeat", f"{call.tool!r} was called with equal arguments {why}", (first,))


def stage(run: LiveRun, verdict: Verdict) -> str:
    """What a call that goes on with the loop is met with: what was said of it before is not said again."""
    first = STAGES.index(run.reactions.get(verdict.level, HALT))
    return STAGES[min(max(first, run.history.suspicion.warned), len(STAGES) - 1)]


def refusal(verdict: Verdict) -> dict[str, Any]:
    """What an entry says of why a call was refused."""
    return {"rule": verdict.rule, "reason": verdict.reason, "evidence": list(verdict.evidence)}


def blocked(run: LiveRun, call: Call, salted: str, verdict: Verdict) -> Draft:
    """The entry of a call that is refused in a run that goes on. It keeps its position, and is no step."""
    fields = {"tool": call.tool, "rule": verdict.rule, "input": salted} | admission.follows(run, call.branch)
    fields |= admission.seen(run, call)
    return Draft("blocked", None, fields, canonical.encode(refusal(verdict)), call.position)


def told(run: LiveRun, blocked: Blocked) -> CallBlocked:
    """What its program is told, now and at every replay."""
    said = blocked.refusal
    return CallBlocked(run.run_id, blocked.tool, said["rule"], said["reason"], tuple(said["evidence"]))


def notices(run: LiveRun, sealed: list[Sealed]) -> list[Draft]:
    """The notices that go with these entries, as far as outcomes among them give reason to any."""
    outcomes = [(row, body) for row, body in sealed if row.kind == "outcome"]
    if not outcomes or not run.gives_notice:
        return []
    row, body = outcomes[-1]
    said = [*_of_a_loop(run, sealed), *_of_the_budget(run, sealed[-1][1])]
    drafts = []
    for rule, reason, evidence, hint in said:
        text = f"Notice: {reason}{f' (steps {chr(44).join(map(str, evidence))})' if evidence else ''}. {hint}"
        payload = canonical.encode({"reason": reason, "evidence": list(evidence), "text": text})
        drafts.append(Draft("notice", None, {"step": body["step"], "rule": rule}, payload, row.position))
    return drafts


_Said = tuple[str, str, tuple[int, ...], str]


def _of_a_loop(run: LiveRun, sealed: list[Sealed]) -> list[_Said]:
    if NOTICE not in run.reactions.values() or run.history.suspicion.warned:
        return []
    verdict = run.history.look_ahead(sealed)
    if verdict.level == "ok" or run.reactions[verdict.level] != NOTICE:
        return []
    return [
        (
            verdict.rule,
            verdict.reason,
            verdict.evidence,
            "Do something else: the next such call is refused.",
        )
    ]


def _of_the_budget(run: LiveRun, last: dict[str, Any]) -> list[_Said]:
    """One for each limit of which more than the fraction is used that was asked for, once."""
    fraction = run.limits.notice_at
    if fraction is None:
        return []
    spent = budget.Amount.read(last.get("spent", {}))
    known = {notice.reason for notice in run.history.notices if notice.rule == "budget"}
    nearly = budget.nearly_spent(run.limits, last["steps"] + last.get("refused", 0), spent, fraction)
    return [("budget", reason, (), "Come to an end soon.") for reason in nearly if reason not in known]
