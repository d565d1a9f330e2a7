"""What goes into one append: what the flow decided, and the answers to what others asked of the run."""

from __future__ import annotations

from agent_run_ledger.engine.effects import Decision, Moment, Plan
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.engine.log import Sealed, seal
from agent_run_ledger.engine.runs import honour
from agent_run_ledger.rules import lifecycle


def prepare(run: LiveRun, decide: Decision, moment: Moment) -> tuple[Plan, list[Sealed]]:
    """Decide, and seal what is to be appended; nothing is changed yet. Requests come after what the flow decided, in order."""
    plan = decide(run, moment)
    drafts = plan.drafts
    if run.requests:
        state = run.history.state
        for draft in drafts:
            state = lifecycle.after(state, draft.event, run.run_id) if draft.event else state
        drafts = list(drafts)
        for request in run.requests:
            answer = None if state.is_terminal else honour(request)
            if answer is not None:
                drafts.append(answer)
                state = lifecycle.after(state, answer.event, run.run_id) if answer.event else state
                plan.synced = True
    return plan, seal(run.history, run.token, moment.now, drafts) if drafts else []
