"""crashtest: a flow is stopped at every durable boundary, started again, and held against a run without a crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agent_run_ledger.drivers.context import refuse_in_an_event_loop
from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing.clock import SkippingClock
from agent_run_ledger.testing.flows import Flow, flow_of, live
from agent_run_ledger.testing.judging import Judge, Trial
from agent_run_ledger.testing.life import Answer, Life, standing
from agent_run_ledger.testing.notes import Note
from agent_run_ledger.testing.report import Report
from agent_run_ledger.testing.witness import Witness, look, since

MOST_BOUNDARIES = 200
"""At how many boundaries a flow is stopped, where nobody says."""


def crashtest(
    flow: Any,
    /,
    *args: Any,
    witness: Witness | None = None,
    kill: bool = False,
    limit: int | None = MOST_BOUNDARIES,
    reset: Callable[[], object] | None = None,
    answer: Answer | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    **kwargs: Any,
) -> Report:
    """Stop a flow at every durable boundary, start it again, and report what happened otherwise than without a crash.

    `flow` is an agent (`@ledger.agent()`), a pipeline (a `RunLedger`), or a function `flow(ledger, ...)`, each sync or async; `args`
    and `kwargs` are its arguments. It is run on fresh storage each time, never on the ledger that it is registered with: once
    without a crash, and then once for each durable boundary, at which the process is stopped and a second one goes on. Waits of the
    ledger (back-off, `run.sleep`) take no time.

    `witness()` says what the outside has now: a list of effects, a mapping of what to how often, or a number. It is called before
    and after each trial, and what came in between is compared with what came in a trial without a crash. Without a witness every
    function that was called twice, and that nothing protects, counts as doubled. `reset()` is called before each trial, and may put
    the outside back to where it was.

    `answer(ledger, run_id)` is called when a run waits for a signal or an approval, and sends it.

    `kill=True` runs each process as a fork of this one, on a file, and kills it with SIGKILL: what it had in memory is gone, so
    the witness must look outside of the process. `timeout` is how many seconds each of them may take.

    At most `limit` boundaries are tried, evenly spread, None: all of them. `options` are those of the `AgentRunLedger` that a
    function is given.

    >>> def flow(ledger: AgentRunLedger) -> None:
    ...     with ledger.open_run("pay", run_id="pay-7") as run:
    ...         run.step("charge", {"amount": 5}, lambda: charges.append(5))
    >>> charges = []
    >>> report = crashtest(flow, witness=lambda: charges)
    >>> report.ok, report.doubled[0].tool_name
    (False, 'charge')
    """
    subject = flow_of(flow, args, kwargs, options)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidArguments(f"limit= is a whole number of at least 1, or None, not {limit!r}")
    if kill:
        from agent_run_ledger.testing.killing import KillingStage

        stage: Stage = KillingStage(subject, answer, timeout)
    else:
        if subject.is_async:
            refuse_in_an_event_loop("crashtest")
        stage = Stage(subject, answer)
    try_once = partial(_try_once, stage, witness, reset)
    reference = try_once(None)
    if not reference.boundaries:
        raise stage.error or InvalidArguments(f"{subject.name!r} makes no run: there is nothing to stop it at")
    judge = Judge(reference, lambda: try_once(None))
    chosen = spread(len(reference.boundaries), limit)
    for die_at in chosen:
        trial = try_once(die_at)
        judge.judge(_died_at(trial, die_at, reference), trial)
    return judge.report(subject.name, len(chosen), kill=kill)


class Stage:
    """Where trials take place: here, processes inside this one, on a store in memory."""

    def __init__(self, flow: Flow, answer: Answer | None) -> None:
        self._flow = flow
        self._answer = answer
        self.error: Exception | None = None
        """What the last process raised."""

    def play(self, run_id: str, die_at: int | None) -> list[Note]:
        """Run the flow, stop it where it is said, and start it again. Returns all that its processes noted."""
        notes: list[Note] = []
        clock = SkippingClock()
        store = MemoryStore(clock=clock)
        try:
            for life_ends_at in (None,) if die_at is None else (die_at, None):
                life = Life(store, clock, notes.append, answer=self._answer, die_at=life_ends_at)
                self.error = live(self._flow, life, run_id)
            notes += standing(store)
        finally:
            store.close()
        return notes


def _try_once(stage: Stage, witness: Witness | None, reset: Callable[[], object] | None, die_at: int | None) -> Trial:
    if reset is not None:
        reset()
    run_id = f"crashtest-{'once' if die_at is None else die_at}"
    before = look(witness)
    notes = stage.play(run_id, die_at)
    return Trial(run_id, notes, since(before, look(witness)))


def _died_at(trial: Trial, die_at: int, reference: Trial) -> str:
    """Behind what the process died in this trial: where calls come in any order, that is not always the same."""
    boundaries = trial.boundaries if len(trial.boundaries) >= die_at else reference.boundaries
    return boundaries[die_at - 1]


def spread(boundaries: int, limit: int | None) -> list[int]:
    """Which boundaries are tried, from 1: all of them, or `limit` that are evenly spread, the first and the last among them.

    >>> spread(10, 4)
    [1, 4, 7, 10]
    """
    if limit is None or limit >= boundaries:
        return list(range(1, boundaries + 1))
    if limit == 1:
        return [(boundaries + 1) // 2]
    return [1 + round(number * (boundaries - 1) / (limit - 1)) for number in range(limit)]
