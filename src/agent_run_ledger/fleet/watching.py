"""How workers and runs stand: who lives, which run has not got on, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agent_run_ledger.drivers import reading
from agent_run_ledger.engine.history import History, StepHistory, parse
from agent_run_ledger.errors import InvalidArguments, StoreCorrupt
from agent_run_ledger.model import StuckRun, WorkerRecord
from agent_run_ledger.rules.names import is_account
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.contract import Beat, Head, Store, Summary
    from agent_run_ledger.ledger import AgentRunLedger

MOST_RUNNING = 100
"""How many of the runs that it works on a worker names."""

_LEASE_SECONDS = 30.0
"""That of a worker who does not say."""

_Kind = Literal["owner_silent", "step_in_flight", "program_busy", "no_worker", "no_agent", "no_room"]


# --- workers ----------------------------------------------------------------------------------------------------------


def workers(store: Store) -> list[WorkerRecord]:
    """See `Fleet.workers`."""
    return [_record(beat) for beat in store.workers()]


def _record(beat: Beat) -> WorkerRecord:
    try:
        said = json.loads(beat.said)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        said = {"state": "unreadable"}
    lease = said.get("lease_seconds")
    running = _texts(said.get("running"))
    return WorkerRecord(
        name=beat.worker,
        host=_text(said.get("host")),
        pid=_whole(said.get("pid")),
        started_at=_number(said.get("started_at")),
        state=_text(said.get("state")),
        queues=_texts(said.get("queues")),
        agents=_texts(said.get("agents")),
        concurrency=_whole(said.get("concurrency")),
        running=running,
        running_count=_whole(said.get("running_count")) or len(running),
        limits=_limits(said.get("limits")),
        version=_text(said.get("version")),
        idle_seconds=beat.idle_seconds,
        is_alive=beat.idle_seconds < (_number(lease) or _LEASE_SECONDS),
    )


# A worker of another version may say anything.


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else 0.0


def _limits(value: Any) -> dict[str, tuple[int | None, int | None]]:
    limits = {}
    for name, most in value.items() if isinstance(value, dict) else ():
        if isinstance(most, list) and len(most) == 2:
            limits[name] = _whole(most[0]) or None, _whole(most[1]) or None
    return limits


# --- stuck runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Open:
    """A run that has not ended, as far as a summary says."""

    head: Head
    status: str
    at: float
    """When the last of its entries was written, in Unix seconds."""


def stuck(ledger: AgentRunLedger, after_seconds: float) -> list[StuckRun]:
    """See `Fleet.stuck`."""
    if type(after_seconds) not in (int, float) or not after_seconds >= 0:
        raise InvalidArguments(f"after_seconds is a number of seconds of at least 0, not {after_seconds!r}")
    runs = list(_open_runs(ledger._store.summaries()))
    fleet = _Fleet(ledger, [each for each in workers(ledger._store) if each.is_alive], runs)
    now = ledger._clock.now()
    found = [
        fleet.unowned(run) if run.head.owner is None else _owned(ledger, run, fleet, now, after_seconds) for run in runs
    ]
    return [each for each in found if each is not None and each.seconds >= after_seconds]


def _open_runs(summaries: Iterable[Summary]) -> Iterator[_Open]:
    for summary in summaries:
        if is_account(summary.head.run_id):
            continue
        try:
            last = parse(summary.last.body)
            state, at = RunState(last["state"]), float(last["at"])
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # damaged: nobody may act upon it, and `verify` says so
        if not state.is_terminal:
            yield _Open(summary.head, state, at)


def _owned(ledger: AgentRunLedger, run: _Open, fleet: _Fleet, now: float, after_seconds: float) -> StuckRun | None:
    """Why a run that somebody owns does not get on; None where it does."""
    head = run.head
    if head.lease_left is None or head.lease_left < 0:
        silent = head.idle_seconds if head.idle_seconds is not None else max(0.0, now - run.at)
        since = (
            f"has not renewed its lease for {_told(silent)}" if head.idle_seconds is not None else "is of another boot"
        )
        return _found(
            run,
            "owner_silent",
            f"its owner {head.owner!r} {since}: it is dead, or stands still; {fleet.taker(head)}",
            silent,
        )
    if now - run.at < after_seconds:
        return None
    try:
        history = reading.read(ledger._store, head.run_id)
    except StoreCorrupt:
        return None
    flying = [each for each in history.positions.values() if _is_in_flight(each, history, head)]
    if flying:
        step = min(flying, key=lambda each: _dispatched(each))
        seconds = max(0.0, now - _dispatched(step))
        tool = ledger._tools.get(step.tool)
        timeout = tool.options.timeout if tool is not None else None
        limit = f"; its timeout is {_told(timeout)}" if timeout is not None else ""
        more = f", and {len(flying) - 1} more" if len(flying) > 1 else ""
        return _found(
            run,
            "step_in_flight",
            f"step {step.number} ({step.tool!r}){more} has been in flight for {_told(seconds)} while its owner renews the lease: it is "
            f"slow, or hangs{limit}",
            seconds,
        )
    seconds = max(0.0, now - run.at)
    return _found(
        run,
        "program_busy",
        f"no step of it has been in flight for {_told(seconds)} while its owner renews the lease: its program is busy outside of steps, "
        "or stands still",
        seconds,
    )


def _is_in_flight(step: StepHistory, history: History, head: Head) -> bool:
    return step.outcome is None and step.waits is None and step.position in history.running and step.token == head.token


def _found(run: _Open, kind: _Kind, reason: str, seconds: float) -> StuckRun:
    return StuckRun(run.head.run_id, run.status, kind, reason, seconds, run.head.owner, run.head.listing.queue)


class _Fleet:
    """The workers that live, and what they have taken."""

    def __init__(self, ledger: AgentRunLedger, alive: list[WorkerRecord], runs: Iterable[_Open]) -> None:
        self._alive = alive
        self._limits: dict[str, tuple[int | None, int | None]] = {}
        for worker in alive:
            self._limits |= worker.limits
        self._limits |= {name: (terms.concurrency, terms.per_key) for name, terms in ledger._queues.items()}
        self._taken = Counter[tuple[str | None, str | None]]()
        for run in runs:
            if run.head.owner is not None and run.head.due_in is not None:
                queue, key = run.head.listing.queue, run.head.listing.key
                self._taken[queue, None] += 1
                if key is not None:
                    self._taken[queue, key] += 1

    def taker(self, head: Head) -> str:
        """Who takes a run over whose owner is dead."""
        queue = head.listing.queue
        if queue is None:
            return "it goes on when its program is started again"
        if any(queue in worker.queues for worker in self._alive):
            return f"a worker of queue {queue!r} is about to take it over"
        return f"no live worker serves its queue {queue!r}"

    def unowned(self, run: _Open) -> StuckRun | None:
        """Why a run that is due is not taken."""
        queue, agent, key = run.head.listing.queue, run.head.listing.agent, run.head.listing.key
        if queue is None or run.head.due_in is None or run.head.due_in > 0:
            return None
        due = -run.head.due_in
        begin = f"it has been due for {_told(due)}, and "
        serving = [worker for worker in self._alive if queue in worker.queues]
        if not serving:
            return _found(run, "no_worker", f"{begin}no live worker serves its queue {queue!r}", due)
        knowing = [worker for worker in serving if agent in worker.agents]
        if not knowing:
            workers = "the live worker" if len(serving) == 1 else f"none of the {len(serving)} live workers"
            knows = "does not know" if len(serving) == 1 else "knows"
            return _found(run, "no_agent", f"{begin}{workers} of its queue {queue!r} {knows} its agent {agent!r}", due)
        return _found(run, "no_room", begin + self._fullness(queue, key, knowing), due)

    def _fullness(self, queue: str, key: str | None, knowing: list[WorkerRecord]) -> str:
        most, per_key = self._limits.get(queue, (None, None))
        if most is not None and self._taken[queue, None] >= most:
            return f"its queue {queue!r} is full: {most} of its runs may be worked on at once"
        if per_key is not None and key is not None and self._taken[queue, key] >= per_key:
            return f"its queue {queue!r} has {per_key} with the key {key!r} at work, as many as may be at once"
        slots = sum(worker.concurrency for worker in knowing)
        if all(worker.running_count >= worker.concurrency or worker.state == "draining" for worker in knowing):
            return f"all {slots} slots of the live workers that know its agent are taken"
        return "live workers with free slots know its agent: a limit of its queue may be in the way, or they cannot reach the store"


def _dispatched(step: StepHistory) -> float:
    """When its last attempt was dispatched, in Unix seconds; where that is not kept in memory, when the attempt before it ended."""
    return max(step.created_at, step.earlier.at if step.earlier is not None else 0.0)


def _told(seconds: float) -> str:
    """A duration for people, in the unit in which it is a small number."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
