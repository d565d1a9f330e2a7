"""Recovery: go on with every run whose program is registered here and that nobody works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_run_ledger.agents import Agent, Start, abegin, run_to_its_end
from agent_run_ledger.drivers import reading
from agent_run_ledger.drivers.context import refuse_in_an_event_loop
from agent_run_ledger.drivers.sync import Suspended
from agent_run_ledger.engine.call import DurableWait
from agent_run_ledger.engine.history import History, StepHistory, parse
from agent_run_ledger.engine.waits import has_come
from agent_run_ledger.errors import RunOwned, StoreCorrupt, StoreError
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.names import child_of
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.contract import Summary
    from agent_run_ledger.ledger import AgentRunLedger


def recover(ledger: AgentRunLedger, agents: Mapping[str, Agent]) -> list[str]:
    """See `AgentRunLedger.recover`."""
    if any(each.takes.is_async for each in (*agents.values(), *ledger._tools.values())):
        refuse_in_an_event_loop("recover")
    ended: list[str] = []
    tried: set[str] = set()  # the runs of which nothing more can be done here
    while True:
        has_gone_on = False
        for summary in sorted(ledger._store.summaries(), key=_trouble):
            run_id = summary.head.run_id
            agent = _program_of(summary, agents)
            if agent is None or run_id in tried or _rests(ledger, summary, agents):
                continue
            tried.add(run_id)
            result = _go_on(ledger, agent, summary)
            if result == "ended":
                ended.append(run_id)
            elif result == "waits" and ledger._summary(run_id).last.seq > summary.last.seq:
                tried.discard(run_id)  # once what it waits for comes, it goes on
            has_gone_on = has_gone_on or result != "owned"
        if not has_gone_on:
            return ended


def _trouble(summary: Summary) -> tuple[bool, int]:
    """What makes a run wait for the others: that it was parked, and how many owners died since its last entry.

    A program that ends its process stops all that comes behind it, so it comes last.
    """
    return summary.last.kind == "parked", summary.head.deaths


def _program_of(summary: Summary, agents: Mapping[str, Agent]) -> Agent | None:
    """The agent whose run this is, if it is registered here and the run has not ended and not moved away."""
    if summary.head.moved_to is not None:
        return None
    try:
        begun = parse(summary.first.body)
        state = RunState(parse(summary.last.body)["state"])
        agent = begun.get("agent")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # damaged: nobody may act upon it
    if state.is_terminal or state is RunState.QUARANTINE or not isinstance(agent, str):
        return None
    if begun.get("queue") is not None:  # its workers know when it is due, and how many may run at once
        return None
    return agents.get(agent)


def _rests(ledger: AgentRunLedger, summary: Summary, agents: Mapping[str, Agent]) -> bool:
    """Whether everything that the run could do waits for what has not come: it need not be begun to know that."""
    head = summary.head
    if head.owner is not None:
        return False
    try:
        history = reading.read(ledger._store, head.run_id)
    except StoreError:  # damaged: whoever begins it is told
        return False
    open_steps = [each for each in history.positions.values() if each.outcome is None]
    requests = ledger._store.inbox(head.run_id, history.honoured)
    if not open_steps or any(request.id not in history.answered for request in requests):
        return False
    now = ledger._clock.now()
    return all(_is_waiting(ledger, history, each, now, agents) for each in open_steps)


def _is_waiting(
    ledger: AgentRunLedger, history: History, recorded: StepHistory, now: float, agents: Mapping[str, Agent]
) -> bool:
    if recorded.waits is not None:
        if recorded.until is not None and now >= recorded.until:
            return False
        if recorded.waits == "sleep" or not any(history.signals.values()):
            return True
        if recorded.child is not None:
            return has_come(history, recorded, DurableWait("child", recorded.child, None)) is None
        stored = recorded.arguments or ledger._store.payload(history.run_id, recorded.seq)
        if stored is None:  # erased: its program knows what it waits for
            return False
        sort: Any = recorded.waits
        return has_come(history, recorded, DurableWait(sort, canonical.decode(stored)["name"], None)) is None
    if recorded.tool not in agents:
        return False
    child = next(iter(ledger._store.summaries(child_of(recorded.key))), None)
    return child is not None and _rests(ledger, child, agents)


def _go_on(ledger: AgentRunLedger, agent: Agent, summary: Summary) -> str:
    """Begin the program of one run. What stops it is written in its log, and stops no other run."""
    run_id, created = summary.head.run_id, summary.first.payload
    given = canonical.decode(created)["input"] if created is not None else {}
    start = Start(agent, given, run_id, None, suspends=True)
    try:
        if agent.takes.is_async:
            ledger._asynchronous.run(lambda: abegin(ledger, start), "recover")
        else:
            run_to_its_end(ledger, start)
    except Suspended:
        return "waits"
    except RunOwned as owned:
        if owned.run_id == run_id:
            return "owned"
    except StoreCorrupt:  # this run: what is wrong with it is for `verify` to say
        return "parked"
    except (StoreError, KeyboardInterrupt, SystemExit):  # the last two may be meant for whoever recovers
        raise
    except BaseException:
        pass
    last = ledger._summary(run_id).last
    body = parse(last.body)
    if not RunState(body["state"]).is_terminal:
        return "parked"
    return "ended" if body["token"] == ledger._run(run_id).token else "owned"
