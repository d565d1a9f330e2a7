"""What somebody asks workers to do: checked whole before anything is written, and made once for each run id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.contract import QueueTerms
from agent_run_ledger.drivers.context import place_variable, step_variable
from agent_run_ledger.engine import runs
from agent_run_ledger.engine.history import History
from agent_run_ledger.errors import IllegalTransition, InvalidArguments, RunOwned
from agent_run_ledger.fleet.handle import Handle
from agent_run_ledger.rules.names import check_name, check_run_id

if TYPE_CHECKING:
    from agent_run_ledger.agents import Agent
    from agent_run_ledger.engine.log import Draft
    from agent_run_ledger.ledger import AgentRunLedger

LONGEST_DELAY_SECONDS = 10 * 366 * 86_400
_LARGEST_PRIORITY = 2**31 - 1

TAKEN = ("run_id", "queue", "priority", "delay", "key")
"""The keywords of `submit` that are its own."""


class Order(NamedTuple):
    """One run that workers are to make, ready to be written."""

    agent: Agent
    run_id: str | None
    draft: Draft
    due_in: float


def order(
    agent: Agent,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    run_id: str | None,
    queue: str,
    priority: int,
    delay: float,
    key: str | None,
    ledger: AgentRunLedger,
) -> Order:
    """What `submit` is asked for. Raises where it cannot be; nothing is written by then."""
    place, step = place_variable.get(), step_variable.get()
    if place is not None and step is None and run_id is None:
        raise InvalidArguments(
            f"submit was called by the program of run {place.run.run_id!r}, and a replay would call it again: nothing was written. Call "
            f"the agent itself, or run.map({agent.name}, items): each call is a run of its own then, on any worker. Or give submit a run_id."
        )
    filled = agent.takes.positional[: len(args)]
    unclear = [name for name in TAKEN if name in agent.takes.names and name not in filled]
    if unclear:
        raise InvalidArguments(
            f"agent {agent.name!r} has a parameter {unclear[0]!r}, and submit has one of that name: give the agent's by position, or call "
            "it otherwise; nothing was written"
        )
    if run_id is not None:
        check_run_id(run_id)
    if type(priority) is not int or not -_LARGEST_PRIORITY <= priority <= _LARGEST_PRIORITY:
        raise InvalidArguments(
            f"priority is a whole number from {-_LARGEST_PRIORITY} to {_LARGEST_PRIORITY}, not {priority!r}; nothing was written"
        )
    if type(delay) not in (int, float) or not 0 <= delay <= LONGEST_DELAY_SECONDS:
        raise InvalidArguments(
            f"delay is a number of seconds from 0 to {LONGEST_DELAY_SECONDS}, not {delay!r}; nothing was written"
        )
    if key is not None:
        check_name("key", key)
    given = agent.arguments(args, kwargs)
    draft = agent.created(given, ledger, None, check_name("queue", queue), priority, key)
    return Order(agent, run_id, draft, float(delay))


def place(ledger: AgentRunLedger, asked: Order) -> Handle:
    """Make the run, or attach to the one that has its id. Raises `RunInputMismatch` where that was given something else."""
    run_id = f"run_{os.urandom(10).hex()}" if asked.run_id is None else asked.run_id
    if not ledger._leases.enqueue(run_id, [asked.draft], asked.due_in):
        store = ledger._store
        history = History.read(run_id, store.secret(run_id), store.read(run_id, limit=1))
        runs.check_same(history, asked.draft)
        head = store.head(run_id)
        if head is not None and head.owner is None and head.due_in is None and head.listing.queue is not None:
            with suppress(RunOwned, IllegalTransition):  # somebody has just taken it, or there is nothing left to do
                ledger.wake(run_id)
    return Handle(ledger, run_id, asked.agent)


def terms(name: str, concurrency: int | None, per_key: int | None) -> QueueTerms:
    """What is declared about a queue. Raises where that is nonsense."""
    for what, most in (("concurrency", concurrency), ("per_key", per_key)):
        if most is not None and (type(most) is not int or most < 1):
            raise InvalidArguments(
                f"queue {name!r}: {what} is a whole number of at least 1, or None for no limit, not {most!r}"
            )
    return QueueTerms(check_name("queue", name), concurrency, per_key)
