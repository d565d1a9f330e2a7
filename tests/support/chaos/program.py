"""What the workers of a storm do: agents of ten steps or so, sync and async, with every kind of effect, timers, signals and children."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from agent_run_ledger import AgentRunLedger, Effect, Receipt, RetryPolicy, Run, StepFailed, current_run, current_step
from agent_run_ledger.contract import Row
from support.chaos.journal import Journal
from support.chaos.outside import Outside

PATIENT = RetryPolicy(max_attempts=40, base=0.05, cap=0.5)
"""No storm is long enough to use up what a step may be tried."""
HURRIED_SECONDS = 0.7
"""A timeout that the outside world's late answers exceed, and its usual ones do not."""


WORD = "word"
"""The signal that waiters wait for, twice."""


class Agents(NamedTuple):
    """The agents of one ledger."""

    clerk: Any
    buyer: Any
    chief: Any
    waiter: Any


class BadTemper(Exception):
    """What a program raises that would rather be begun anew."""


def register(ledger: AgentRunLedger, outside: Outside, journal: Journal) -> Agents:
    """Give a ledger the tools and agents of a storm. What they do and hear stands in the journal."""

    def called() -> dict[str, Any]:
        """What the outside is told of the step that calls it; noted before it is."""
        step = current_step()
        about = {"key": step.idempotency_key, "run": step.run_id, "position": step.position, "attempt": step.attempt}
        journal.note("called", tool=step.tool_name, token=step.fencing_token, **about)
        return about

    def heard(label: str, value: Any) -> Any:
        """The program goes on with this value."""
        journal.note("heard", run=current_run().run_id, label=label, value=_digest(value))
        return value

    def read_receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        said = outside.ask("receipt", key=key, run=current_step().run_id, attempt=current_step().attempt)
        return _receipt(said)

    async def aread_receipt(key: str, arguments: dict[str, Any]) -> Receipt:
        said = await outside.aask("receipt", key=key, run=current_step().run_id, attempt=current_step().attempt)
        return _receipt(said)

    # --- tools --------------------------------------------------------------------------------------------------------

    @ledger.tool(kind="model", retry=PATIENT)
    def think(about: str) -> str:
        return str(outside.ask("model", **called()))

    @ledger.tool(effect=Effect.READ, retry=PATIENT, timeout=HURRIED_SECONDS)
    def look(at: str) -> str:
        return str(outside.ask("look", **called()))

    @ledger.tool(effect=Effect.IDEMPOTENT, retry=PATIENT)
    def order(what: str) -> str:
        return str(outside.ask("order", **called()))

    @ledger.tool(receipt=read_receipt, retry=PATIENT)
    def pay(bill: str) -> str:
        return str(outside.ask("pay", **called()))

    @ledger.tool(receipt=read_receipt, retry=PATIENT, timeout=HURRIED_SECONDS)
    def pay_in_a_hurry(bill: str) -> str:
        return str(outside.ask("pay", **called()))

    @ledger.tool(kind="model", retry=PATIENT)
    async def athink(about: str) -> str:
        return str(await outside.aask("model", **called()))

    @ledger.tool(effect=Effect.IDEMPOTENT, retry=PATIENT, timeout=HURRIED_SECONDS)
    async def aorder(what: str) -> str:
        return str(await outside.aask("order", **called()))

    @ledger.tool(receipt=aread_receipt, retry=PATIENT)
    async def apay(bill: str) -> str:
        return str(await outside.aask("pay", **called()))

    # --- agents -------------------------------------------------------------------------------------------------------

    @ledger.agent(retry=PATIENT)
    def clerk(number: int, run: Run) -> list[str]:
        """One after the other; its program fails twice before it goes on."""
        said = [heard("plan", think(f"plan {number}"))]
        said.append(heard("ordered", order(f"paper for {said[-1]}")))
        said.append(heard("paid", pay(f"the bill of {said[-1]}")))
        run.sleep(0.2 + number % 5 / 5)
        said.append(heard("looked", look(f"whether {said[-1]} came")))
        if outside.ask("temper", key=run.run_id):
            raise BadTemper(run.run_id)
        said.append(heard("thought", think(f"of {said[-1]}")))
        said += heard("side by side", run.gather(lambda: order("ink"), lambda: look("at the ink")))
        said.append(heard("paid again", pay_in_a_hurry(f"the bill of {said[-1]}")))
        return [*said, heard("done", think(f"the end of {number}"))]

    @ledger.agent(retry=PATIENT)
    async def buyer(number: int, run: Run) -> list[str]:
        """Async, with steps side by side."""
        said = [heard("plan", await athink(f"plan {number}"))]
        said += heard("ordered", await run.map(aorder, [f"{number} {thing}" for thing in ("nuts", "tea", "salt")]))
        await run.sleep(0.5)
        said.append(heard("paid", await apay(f"the bill of {said[-1]}")))
        said += heard("both", await run.gather(lambda: athink("left"), lambda: apay("right")))
        said.append(heard("ordered again", await aorder(f"more of {said[-1]}")))
        return [*said, heard("done", await athink(f"the end of {number}"))]

    @ledger.agent(retry=RetryPolicy(max_attempts=2, base=0.05, cap=0.1))
    def helper(number: int) -> str:
        """A child that pays and fails, if its number says so."""
        paid = heard("paid", pay(f"help {number}"))
        if _fails(number):
            raise ValueError(f"helper {number} cannot")
        return heard("helped", think(f"of {paid}"))

    @ledger.agent(retry=PATIENT)
    async def runner(number: int) -> str:
        """A child that is async."""
        return heard("ran", await aorder(f"errand {number} for {await athink(f'errand {number}')}"))

    @ledger.agent(retry=PATIENT)
    def chief(number: int, run: Run) -> list[str]:
        """Others work for it."""
        said = [heard("plan", think(f"plan {number}"))]
        said += heard("ran", run.map(runner, [10 * number, 10 * number + 1]))
        try:
            said.append(heard("helped", helper(number)))
        except StepFailed as error:
            said.append(heard("not helped", str(error)))
        said.append(heard("paid", pay(f"the wages of {number}")))
        return [*said, heard("done", think(f"the end of {number}"))]

    @ledger.agent(retry=PATIENT)
    def waiter(number: int, run: Run) -> list[Any]:
        """It waits for two words, which are different ones."""
        said: list[Any] = [heard("plan", think(f"plan {number}"))]
        said.append(heard("first", run.wait_for(WORD)))
        said.append(heard("ordered", order(f"a chair for {said[-1]}")))
        said.append(heard("second", run.wait_for(WORD)))
        return [*said, heard("paid", pay(f"the bill of {said[-2]}"))]

    return Agents(clerk, buyer, chief, waiter)


def state_of(first: Row) -> str:
    """How a run ends that begins with this entry, where nobody cancels it."""
    assert first.payload is not None
    given = json.loads(first.payload)["input"]
    return "FAILED" if json.loads(first.body)["agent"] == "helper" and _fails(given["number"]) else "COMPLETED"


def _fails(number: int) -> bool:
    return number % 3 == 2


def _receipt(said: list[str]) -> Receipt:
    if said[0] == "found":
        return Receipt.found(said[1])
    return Receipt.absent() if said[0] == "absent" else Receipt.unknown("it would not say")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
