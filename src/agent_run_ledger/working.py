"""What a worker does with one run that it has claimed: begin its program, and let go of the run with a word on when to look again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from agent_run_ledger.agents import Start, abegin, run_to_its_end
from agent_run_ledger.drivers.sync import Suspended
from agent_run_ledger.engine import requests
from agent_run_ledger.engine.history import parse
from agent_run_ledger.errors import IllegalTransition, StoreCorrupt, StoreError
from agent_run_ledger.rules import canonical

if TYPE_CHECKING:
    from agent_run_ledger.contract import Lease
    from agent_run_ledger.drivers.leases import HeldRun
    from agent_run_ledger.ledger import AgentRunLedger


def work(ledger: AgentRunLedger, lease: Lease) -> str:
    """Go on with a claimed run in the calling thread, and say how it stands then: `ended`, `waits`, `parked` or `lost`.

    What stops its program is written in its log. Raises `StoreError` where the store is away, and what is no `Exception`: that is meant
    for the process.
    """
    held = _begun(ledger, lease)
    if isinstance(held, str):
        return held
    try:
        run_to_its_end(ledger, _start(ledger, lease, held))
    except Suspended:
        return "waits"
    except StoreError:
        raise
    except Exception:
        return _stands(held)
    return "ended"


async def awork(ledger: AgentRunLedger, lease: Lease) -> str:
    """`work` of an async agent, in the running event loop."""
    held = await ledger._asynchronous.in_thread(lambda: _begun(ledger, lease))
    if isinstance(held, str):
        return held
    try:
        await abegin(ledger, _start(ledger, lease, held))
    except Suspended:
        return "waits"
    except StoreError:
        raise
    except Exception:
        return _stands(held)
    return "ended"


def is_async(ledger: AgentRunLedger, lease: Lease) -> bool:
    """Whether the run's agent is async."""
    return ledger._agents[lease.agent or ""].takes.is_async


def _start(ledger: AgentRunLedger, lease: Lease, held: HeldRun) -> Start:
    created = held.history.created
    given = canonical.decode(created)["input"] if created is not None else {}
    return Start(ledger._agents[lease.agent or ""], given, lease.run_id, None, suspends=True, is_worked=True)


def _begun(ledger: AgentRunLedger, lease: Lease) -> HeldRun | str:
    """The run, known and held; or how it stands, where its program has nothing to do."""
    leases = ledger._leases
    try:
        held = leases.take(lease)
    except StoreCorrupt:  # nobody may act upon it; what is wrong with it is for `verify` to say
        ledger._store.release(lease.run_id, lease.token)
        return "parked"
    history = held.history
    if (
        not history.state.is_terminal
        and history.parent is not None
        and _is_cancelled_with_children(ledger, history.parent)
    ):
        said = {"reason": "its parent was cancelled", "by": f"run {history.parent}", "children": True}
        with suppress(IllegalTransition):
            ledger._driver.obey(requests.act(held, "cancel", said, str(said["by"]), keeps=False))
        return "ended"
    if history.state.is_terminal:
        leases.give_back(held)
        return "ended"
    if (
        history.retry_at is not None and history.retry_at > ledger._clock.now()
    ):  # whoever parked it could not say so any more
        leases.give_back(held)
        return "waits"
    return held


def _is_cancelled_with_children(ledger: AgentRunLedger, parent: str) -> bool:
    summary = next(iter(ledger._store.summaries(parent)), None)
    if summary is None:
        return False
    end = ledger._end(summary)
    return end.kind == "cancelled" and parse(end.body).get("children", False)


def _stands(held: HeldRun) -> str:
    """How a run stands whose program an exception has left."""
    history = held.history
    if not held.token:
        return "lost"
    if history.state.is_terminal:
        return "ended"
    return "waits" if held.again_in is not None or history.retry_at is not None else "parked"
