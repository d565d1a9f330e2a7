"""What goes into one append: what the flows of a run decided, and the answers to what others asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from agent_run_ledger.engine import breaking
from agent_run_ledger.engine.effects import Decision, Moment, Plan
from agent_run_ledger.engine.live import SENT, LiveRun
from agent_run_ledger.engine.log import PAUSES, Draft, Sealed, seal
from agent_run_ledger.engine.requests import honour
from agent_run_ledger.rules import lifecycle
from agent_run_ledger.rules.budget import NOTHING, Amount


class Prepared:
    """What one append of a run is to write, and what it answers to each of the decisions that are in it."""

    __slots__ = ("drafts", "plans", "sealed", "synced")

    def __init__(self, plans: list[Plan], drafts: list[Draft], sealed: list[Sealed], synced: bool | None) -> None:
        self.plans = plans
        """One for each decision that was taken, in order; fewer than were given where the last of them has to be written first."""
        self.drafts = drafts
        self.sealed = sealed
        self.synced = synced
        """Whether stable storage is needed before going on; None leaves it to the ledger's durability."""


def prepare(run: LiveRun, decisions: Sequence[Decision], moment: Moment) -> Prepared:
    """Decide, and seal what is to be appended; nothing is changed yet. Requests come after what the flows decided, in order.

    Several decisions go into one append as long as they only begin and end attempts, each of its own step.
    """
    plan = decisions[0](run, moment)
    plans, drafts, synced = [plan], plan.drafts, plan.synced
    if len(decisions) > 1:
        drafts = list(drafts)
        synced = False if not drafts else synced
        try:
            while len(plans) < len(decisions) and all(_is_alongside(draft) for draft in plan.drafts):
                run.ahead += sum(draft.is_first for draft in plan.drafts)
                run.is_dispatching = run.is_dispatching or any(draft.kind == "intent" for draft in plan.drafts)
                for draft in plan.drafts:
                    run.is_beginning = run.is_beginning or "begins" in draft.fields
                    if "holds" in draft.fields:
                        run.reserved_ahead = run.reserved_ahead.plus(Amount.read(draft.fields["holds"]))
                run.is_settling = run.is_settling or any(draft.kind == "outcome" for draft in plan.drafts)
                plan = decisions[len(plans)](run, moment)
                _name_failures_once(drafts, plan.drafts)
                plans.append(plan)
                drafts += plan.drafts
                if plan.drafts and synced is not True and plan.synced is not False:
                    synced = plan.synced
        finally:
            run.ahead, run.reserved_ahead = 0, NOTHING
            run.is_dispatching = run.is_settling = run.is_beginning = False
    if run.requests:
        drafts = list(drafts)
        if _honour(run, drafts):
            synced = True
    sealed = seal(run.history, run.token, moment.now, drafts) if drafts else []
    if run.gives_notice and (said := breaking.notices(run, sealed)):
        drafts = [*drafts, *said]
        sealed = seal(run.history, run.token, moment.now, drafts)
    return Prepared(plans, drafts, sealed, synced)


def _name_failures_once(before: list[Draft], drafts: list[Draft]) -> None:
    """What acts upon a failure says so, unless something before it in the same append does."""
    named = {position for draft in before for position in draft.fields.get("follows", ())}
    for draft in drafts if named else ():
        if left := [position for position in draft.fields.pop("follows", ()) if position not in named]:
            draft.fields["follows"] = left


_ALONGSIDE = frozenset({"intent", "outcome", "redispatched_undeclared"})


def _is_alongside(draft: Draft) -> bool:
    """Whether a decision about another step may be taken before this is in the log: it is about a step of its own.

    A signal that is taken here is nobody else's, which the others have to see first.
    """
    return draft.kind in _ALONGSIDE and "continues" not in draft.fields and "signal" not in draft.fields


def _honour(run: LiveRun, drafts: list[Draft]) -> bool:
    """Add what answers the requests of others. What was sent is answered at once, the rest when no step is in flight, in order."""
    ended = {draft.position for draft in drafts if draft.kind in PAUSES}
    is_quiet = not any(draft.kind == "intent" for draft in drafts) and set(run.in_flight) <= ended
    has_ended = run.history.state.is_terminal or any(draft.event in lifecycle.ENDINGS for draft in drafts)
    is_honoured = False
    for request in run.requests:
        if has_ended:
            break
        if not (is_quiet or request.kind in SENT):
            continue
        if answer := honour(run, request, drafts):
            drafts += answer
            has_ended = any(draft.event in lifecycle.ENDINGS for draft in answer)
            is_honoured = True
        else:
            is_quiet = False  # the others that are no signals wait for this one
    return is_honoured
