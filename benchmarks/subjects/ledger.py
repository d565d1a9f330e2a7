"""Our own steps: one run of a ledger with every guarantee on, in a plain program or in an event loop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from talk import INVOICE, OUTPUT, answer, conversation, introduce, requests, serve, timed

import agent_run_ledger
from agent_run_ledger import AgentRunLedger, Effect

EFFECTS = {"READ": Effect.READ}


def plain(ledger: AgentRunLedger, effect: Effect | None, length: int) -> Callable[[int], list[float]]:
    """Steps one after the other, of one run that is `length` steps long when the first is timed, and at most a tenth longer."""
    run_id, number = "", 0

    def step() -> None:
        nonlocal number
        number += 1
        ledger.execute_step(
            run_id, "fetch_invoice", {"invoice_id": INVOICE, "n": number}, lambda: OUTPUT, effect=effect
        )

    def another() -> None:
        nonlocal run_id, number
        run_id, number = ledger.create_run(goal="benchmark"), 0
        for _ in range(length):
            step()

    def steps(count: int) -> list[float]:
        taken: list[float] = []
        while len(taken) < count:
            room = length + max(length // 10, 10) - number
            if length and not room:
                another()
            else:
                taken += timed(step, min(count - len(taken), room) if length else count)
        return taken

    another()
    return steps


def conversing(ledger: AgentRunLedger) -> Callable[..., None]:
    """A chat whose model is called with all messages so far."""

    def turns(count: int, asked: int, answered: int, kind: str) -> None:
        run_id = ledger.create_run(goal="conversation")
        messages: list[dict[str, str]] = []
        for question, reply in conversation(count, asked, answered, kind):
            messages += [{"role": "user", "content": question}] if question else []
            said = {"role": "assistant", "content": reply}
            messages.append(ledger.execute_step(run_id, "model", {"messages": messages}, lambda said=said: said))

    return turns


async def side_by_side(ledger: AgentRunLedger, runs: int, count: int) -> float:
    """Steps a second of so many runs in one event loop, of so many steps each."""

    async def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
        return OUTPUT

    async def agent(run_id: str) -> None:
        for n in range(count):
            await ledger.aexecute_step(run_id, "fetch_invoice", {"invoice_id": INVOICE, "n": n}, fetch_invoice)

    run_ids = [ledger.create_run("benchmark") for _ in range(runs)]
    begun = time.perf_counter()
    await asyncio.gather(*(agent(run_id) for run_id in run_ids))
    return runs * count / (time.perf_counter() - begun)


async def in_a_loop(ledger: AgentRunLedger) -> None:
    """The same in an event loop, where the function is a coroutine's."""
    run_id = ledger.create_run(goal="benchmark")
    number = 0

    async def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
        return OUTPUT

    for _, (count,) in requests():
        taken = []
        for _ in range(count):
            number += 1
            begun = time.perf_counter()
            await ledger.aexecute_step(run_id, "fetch_invoice", {"invoice_id": INVOICE, "n": number}, fetch_invoice)
            taken.append((time.perf_counter() - begun) * 1e6)
        answer(taken)


def main(place: str, durability: Any, *options: str) -> None:
    survives = {"full": "survives the machine", "process": "survives the process"}[durability]
    effect = next((EFFECTS[option] for option in options if option in EFFECTS), None)
    length = next((int(option) for option in options if option.isdigit()), 0)
    with AgentRunLedger(place, max_steps=10**9, durability=durability) as ledger:
        introduce(f"agent-run-ledger {agent_run_ledger.__version__}", f'durability="{durability}": {survives}')
        if "async" in options:
            asyncio.run(in_a_loop(ledger))
        else:
            serve(
                {
                    "steps": plain(ledger, effect, length),
                    "turns": conversing(ledger),
                    "throughput": lambda runs, count: asyncio.run(side_by_side(ledger, runs, count)),
                }
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
