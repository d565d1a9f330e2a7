"""Settling steps in doubt before their program begins: from what is stored, as their tools declare. Nobody is asked to think again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.steps import step
from agent_run_ledger.errors import LedgerError, RunOwned, StepInDoubt, StoreError
from agent_run_ledger.rules import canonical

if TYPE_CHECKING:
    from agent_run_ledger.agents import Tool
    from agent_run_ledger.drivers.leases import HeldRun
    from agent_run_ledger.ledger import Ledger


def settle(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool]) -> None:
    """Settle the in-doubt steps of these tools, each as its effect says, with the stored arguments and the stored key.

    Raises `StepInDoubt` where one of them cannot be settled, and `RunClosed` where its attempts are used up.
    """
    doubts: list[StepInDoubt] = []
    for call in _calls(ledger, held, tools):
        try:
            with held.lock:
                held.make(call)
            flow = step(held, call)
            if call.is_async:
                ledger._asynchronous.run(lambda flow=flow, call=call: ledger._asynchronous.obey(flow, call))  # type: ignore[misc]
            else:
                ledger._driver.obey(flow)
        except StepInDoubt as doubt:
            doubts.append(doubt)
        except LedgerError as error:
            _unless_it_is_over(held, error)
        except Exception:  # one that its tool declares as `raises=`: it is recorded
            continue
    _tell(ledger, held, doubts)


async def asettle(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool]) -> None:
    """`settle` in an event loop."""
    doubts: list[StepInDoubt] = []
    for call in _calls(ledger, held, tools):
        try:
            with held.lock:
                held.make(call)
            await ledger._asynchronous.obey(step(held, call), call)
        except StepInDoubt as doubt:
            doubts.append(doubt)
        except LedgerError as error:
            _unless_it_is_over(held, error)
        except Exception:
            continue
    _tell(ledger, held, doubts)


def _calls(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool]) -> Iterator[Call]:
    """What has to be settled, in log order, as calls that nobody waits for."""
    for recorded in list(held.history.positions.values()):
        tool = tools.get(recorded.tool)
        if recorded.outcome is not None or recorded.waits is not None or tool is None or tool.options.kind == "model":
            continue
        stored = recorded.arguments
        if stored is None and recorded.digest is not None:
            stored = ledger._store.payload(held.run_id, recorded.seq)
        if stored is None:
            continue  # erased: its program may still know them
        options = tool.options if tool.options.effect is not None else tool.options._replace(effect=recorded.declared)
        call = tool.call(canonical.decode(stored), options, ledger._payload_limit)
        call.stored, call.digest = stored, recorded.digest or b""
        call.branch, call.place, call.after, call.settles = held.root, recorded.position, recorded.dependencies, True
        yield call


def _unless_it_is_over(held: HeldRun, error: LedgerError) -> None:
    """That a step failed is recorded, and its program will hear of it; what ended the run, or the storage, is news now."""
    if isinstance(error, StoreError | RunOwned) or held.history.state.is_terminal:
        raise error


def _tell(ledger: Ledger, held: HeldRun, doubts: list[StepInDoubt]) -> None:
    """The program begins at its first line; where a step stays in doubt it does not begin."""
    with held.lock:
        if doubts:
            raise doubts[0]
        ledger._leases.hold(held)
        held.restart()
