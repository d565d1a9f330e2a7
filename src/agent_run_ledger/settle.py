"""Settling steps in doubt before their program begins: from what is stored, as their tools declare. Nobody is asked to think again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.effects import Result
from agent_run_ledger.engine.steps import step
from agent_run_ledger.errors import StepInDoubt
from agent_run_ledger.rules import canonical
from agent_run_ledger.words import Effect

if TYPE_CHECKING:
    from agent_run_ledger.agents import Tool
    from agent_run_ledger.drivers.leases import HeldRun
    from agent_run_ledger.ledger import Ledger


def settle(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool], *, reads: bool = False) -> None:
    """Settle the in-doubt steps of these tools, each as its effect says, with the stored arguments and the stored key.

    What has no side effect is left to the program, which may have given up on it, unless `reads`: where there is none to come back to it.
    A failure is recorded, and its program will hear of it. Raises `StepInDoubt` where a step cannot be settled, when the others are.
    """
    with _before_its_program(ledger, held) as doubts:
        for call in _calls(ledger, held, tools, reads=reads):
            with _settling(held, call, doubts):
                if call.is_async:
                    ledger._asynchronous.run(partial(ledger._asynchronous.obey, step(held, call), call))
                else:
                    ledger._driver.obey(step(held, call))


async def asettle(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool]) -> None:
    """`settle` in an event loop, of all steps side by side."""
    errors: list[BaseException] = []

    async def one(call: Call) -> None:
        with _settling(held, call, doubts):
            await ledger._asynchronous.obey(step(held, call), call)

    def ended(call: Call, result: Result) -> None:
        if result.error is not None:
            errors.append(result.error)

    with _before_its_program(ledger, held) as doubts:
        waiting = list(_calls(ledger, held, tools, reads=False))
        await ledger._asynchronous.side_by_side(lambda: [waiting.pop(0) for _ in list(waiting)], one, ended)
        if errors:
            raise errors[0]


def _calls(ledger: Ledger, held: HeldRun, tools: Mapping[str, Tool], *, reads: bool) -> Iterator[Call]:
    """What has to be settled, in log order, as calls that nobody waits for."""
    for recorded in list(held.history.positions.values()):
        tool = tools.get(recorded.tool)
        if recorded.outcome is not None or recorded.waits is not None or tool is None or tool.options.kind == "model":
            continue
        effect = tool.options.effect or recorded.declared
        if effect is Effect.READ and not reads:
            continue
        stored = recorded.arguments
        if stored is None and recorded.digest is not None:
            stored = ledger._store.payload(held.run_id, recorded.seq)
        if stored is None:
            continue  # erased: its program may still know them
        options = tool.options._replace(
            effect=effect,
            key_window=tool.options.key_window or recorded.key_window,
        )
        call = tool.call(canonical.decode(stored), options, ledger._payload_limit)
        call.stored, call.digest = stored, recorded.digest or b""
        call.branch, call.place, call.after, call.settles = held.root, recorded.position, recorded.dependencies, True
        yield call


@contextmanager
def _before_its_program(ledger: Ledger, held: HeldRun) -> Iterator[list[StepInDoubt]]:
    """What is done before a program begins is in nobody's order. Where a step stays in doubt the program does not begin."""
    doubts: list[StepInDoubt] = []
    settled = set(held.history.running | held.history.waiting)
    held.is_begun = False
    try:
        yield doubts
    finally:
        held.is_begun = True
    if doubts:
        raise doubts[0]
    with held.lock:
        ledger._leases.hold(held)
        held.restart()
        held.settled = settled


@contextmanager
def _settling(held: HeldRun, call: Call, doubts: list[StepInDoubt]) -> Iterator[None]:
    try:
        with held.lock:
            held.make(call)
        yield
    except StepInDoubt as doubt:
        doubts.append(doubt)
    except Exception:
        if not call.is_delivered:  # it is none of the step's own errors
            raise
