"""A worker inside the test's own thread: it claims what is due, works on one run after the other, and lets time pass when told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Lease, QueueTerms
from agent_run_ledger.testing import FakeClock
from agent_run_ledger.working import awork, is_async, work

QUEUE = "default"


def submit(ledger: AgentRunLedger, agent: Any, *args: Any, run_id: str, due_in: float = 0.0, priority: int = 0) -> None:
    """Leave a run to the workers of the queue."""
    registered = agent.registered
    draft = registered.created(registered.arguments(args, {}), ledger, None, QUEUE, priority, None)
    assert ledger._leases.enqueue(run_id, [draft], due_in)


def pump(
    ledger: AgentRunLedger, clock: FakeClock, *, until: float = 3600.0, queues: Sequence[QueueTerms] = ()
) -> list[str]:
    """Work on everything that is due, and on what becomes due within `until` seconds; how it stood each time, in order."""
    said: list[str] = []
    left = until
    while True:
        ledger._store.free_dead()
        leases = ledger._leases.claim_due(queues or [QueueTerms(QUEUE)], list(ledger._agents), 10)
        said += [f"{lease.run_id} {_work(ledger, lease)}" for lease in leases]
        if leases:
            continue
        due = ledger._store.next_due([QUEUE], list(ledger._agents))
        if due is None or due > left:
            return said
        left -= due
        clock.advance(due + 0.001)


def work_once(ledger: AgentRunLedger, *agents: str) -> str:
    """Work on the one run that is due, of one of these agents, and say how it stands then."""
    (lease,) = ledger._leases.claim_due([QueueTerms(QUEUE)], agents or list(ledger._agents), 1)
    return _work(ledger, lease)


def _work(ledger: AgentRunLedger, lease: Lease) -> str:
    return asyncio.run(awork(ledger, lease)) if is_async(ledger, lease) else work(ledger, lease)
