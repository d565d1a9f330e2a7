"""A run that somebody else drives, in the hands of whoever wants its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_run_ledger.agents import Agent, refuse_itself
from agent_run_ledger.drivers.context import is_in_an_event_loop
from agent_run_ledger.engine.history import parse
from agent_run_ledger.errors import InvalidArguments, PayloadErased, RunClosed, RunMoved, RunNotEnded, StoreCorrupt
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.ledger import AgentRunLedger
    from agent_run_ledger.model import RunRecord

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LONGER = 0.005, 0.25, 1.5


class Handle:
    """A run that workers go on with: what `submit` returns, and `AgentRunLedger.handle` finds.

    It holds nothing but the run's id, so it may be made anew in any process.
    """

    def __init__(self, ledger: AgentRunLedger, run_id: str, agent: Agent | None) -> None:
        self._ledger = ledger
        self._agent = agent
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"<Handle of run {self.run_id!r}>"

    @property
    def status(self) -> str:
        """The state of the run as it is now, like `BLOCKED`."""
        return self._ledger.get_run(self.run_id).status

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the run has ended, for ever or for `timeout` seconds, and return its result as its agent declares it.

        Raises `RunClosed` where the run ends without one, and where it is in quarantine; `RunNotEnded`, a `TimeoutError`, when the time is
        up; `RunMoved` where it goes on in another ledger. A run that is parked is waited for: a worker goes on with it when what it lacks has come.
        """
        refuse_itself(self.run_id)
        if is_in_an_event_loop():
            raise InvalidArguments(
                "an event loop runs in this thread, which must not wait: `await handle.aresult()` instead"
            )
        waiting = _Waiting(self, timeout)
        while not waiting.is_over():
            self._ledger._clock.sleep(waiting.pause())
        return waiting.result()

    async def aresult(self, timeout: float | None = None) -> Any:
        """`result` in an event loop."""
        refuse_itself(self.run_id)
        waiting, driver = _Waiting(self, timeout), self._ledger._asynchronous
        while not await driver.looked_up(waiting.is_over):
            await driver.pause(waiting.pause())
        return await driver.looked_up(waiting.result)

    def cancel(self, *, children: bool = False, by: str = "", reason: str = "") -> None:
        """`AgentRunLedger.cancel` of this run."""
        self._ledger.cancel(self.run_id, children=children, by=by, reason=reason)


class _Waiting:
    """One wait for the end of a run, which looks at no more than what was written since it looked last."""

    def __init__(self, handle: Handle, timeout: float | None) -> None:
        if timeout is not None and (type(timeout) not in (int, float) or not timeout >= 0):
            raise InvalidArguments(f"timeout is a number of seconds of at least 0, or None, not {timeout!r}")
        self._handle = handle
        self._timeout = timeout
        self._clock, self._store = handle._ledger._clock, handle._ledger._store
        self._until = None if timeout is None else self._clock.elapsed() + timeout
        self._seen = 0
        self._pause = _FIRST_PAUSE_SECONDS

    def is_over(self) -> bool:
        """Whether the run has ended. Raises `RunNotEnded` when the time is up, `RunNotFound` and `RunMoved`."""
        run_id = self._handle.run_id
        if self._seen:
            rows = self._store.read(run_id, self._seen, payloads_up_to=0)
            last = rows[-1] if rows else None
            head = self._store.head(run_id) if not rows and self._pause == _LONGEST_PAUSE_SECONDS else None
        else:
            head, _, last = self._handle._ledger._summary(run_id)
        if last is not None:
            self._seen = last.seq
            try:
                state = RunState(parse(last.body)["state"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise StoreCorrupt(
                    f"run {run_id!r} cannot be read ({error}): run `agent-run-ledger verify`."
                ) from error
            if state.is_terminal or state is RunState.QUARANTINE:
                return True
        if head is not None and head.moved_to is not None:
            raise RunMoved(run_id, head.moved_to)
        if self._until is not None and self._clock.elapsed() >= self._until:
            record = self._handle._ledger.get_run(run_id)
            raise RunNotEnded(run_id, self._timeout or 0.0, record.status, standing(record))
        return False

    def pause(self) -> float:
        """How long to wait before the next look, in seconds."""
        pause, self._pause = self._pause, min(self._pause * _LONGER, _LONGEST_PAUSE_SECONDS)
        return pause if self._until is None else max(0.0, min(pause, self._until - self._clock.elapsed()))

    def result(self) -> Any:
        """What the run returned. Raises `RunClosed` where it returned nothing."""
        ledger, agent, run_id = self._handle._ledger, self._handle._agent, self._handle.run_id
        summary = ledger._summary(run_id)
        record = ledger._record(summary)
        if record.status != RunState.COMPLETED:
            raise RunClosed(run_id, record.status, record.cause, _ADVICE.get(RunState(record.status)))
        payload = ledger._end(summary).payload
        if payload is None:
            raise PayloadErased(run_id, "the result")
        return agent.result(payload) if agent is not None else record.result


_ADVICE = {
    RunState.QUARANTINE: "it has no result yet. Look at it with `agent-run-ledger show`; `release` lets it go on.",
    RunState.CANCELLED: "it has no result. Submit it under another run id, or `fork` it.",
    RunState.FAILED: "it has no result. `agent-run-ledger trace` tells what led there; `redrive` goes on from it in a new run.",
    RunState.DEAD_LETTER: "it has no result. `agent-run-ledger trace` tells what led there; `redrive` goes on from it in a new run.",
}


def standing(record: RunRecord) -> str:
    """How a run that has not ended stands, in words to be read behind its state."""
    because = f" (it was left by {record.cause})" if record.cause else ""
    if record.owner is not None:
        return f"owned by {record.owner!r}{because}"
    if record.queue is None:
        return f"owned by nobody, and in no queue: it waits for its program{because}"
    if record.due_in_seconds is None:
        return f"and no worker looks at it before somebody asks something of it{because}"
    if record.due_in_seconds > 0:
        return f"and due in {record.due_in_seconds:.1f} s for a worker of queue {record.queue!r}{because}"
    return f"and has been due for {-record.due_in_seconds:.1f} s for a worker of queue {record.queue!r}{because}"
