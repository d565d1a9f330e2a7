"""Commits of decisions that may have to wait for something, or to look something up, before they can be taken."""

from __future__ import annotations

from typing import Any

from agent_run_ledger.engine import outcomes
from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import AwaitLate, Commit, Decision, Draw, Fetch, Flow, Quiet, Rest, Room
from agent_run_ledger.engine.live import LiveRun


def commit(run: LiveRun, call: Call, decide: Decision, token: int | None = None) -> Flow[None]:
    """Commit what may end the run, or has to look at arguments that are not in memory."""
    if (answer := (yield Commit(run, decide, token))) is not None:
        yield from insist(run, call, decide, token, answer)


def insist(run: LiveRun, call: Call, decide: Decision, token: int | None, answer: Any) -> Flow[None]:
    """Do what the decision lacks, and have it taken anew, until it is.

    Before the end of a run whatever is in flight finishes and is recorded, and nothing new begins; what is not in memory is fetched.
    """
    try:
        while answer is not None:
            if isinstance(answer, Fetch):
                call.fetched[answer.seq] = yield answer
            elif isinstance(answer, AwaitLate):
                call.left = outcomes.left_behind((yield answer))
            elif answer is outcomes.CLOSING:
                run.closing.add(call.position)  # until the end is written
                yield Quiet(run, ends=True)
            elif isinstance(answer, Draw):
                if (drawn := (yield answer)) is not None:
                    call.drawn = (answer.attempt, answer.accounts, drawn)
                elif run.is_draining:
                    yield from leave(run, call)
            elif answer is outcomes.NO_ROOM:
                yield Room(run, run.history.last_outcome)
            else:
                assert answer is outcomes.HELD
                run.closing.discard(call.position)
                yield Quiet(run, ends=False)
            answer = yield Commit(run, decide, token)
    finally:
        run.closing.discard(call.position)


def leave(run: LiveRun, call: Call) -> Flow[None]:
    """Begin nothing new: the program ends here, once each of its calls stands here or waits for something else."""
    while True:
        yield Rest(run, call, None, None, leaves=True)
