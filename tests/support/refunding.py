"""An agent that asks a model whom to refund, and refunds, in processes that kill themselves at a moment they are told.

The payments are those of `support.payments`. The model answers something else each time, so a model that is asked twice is seen in
the requests. Run as a module it is a nursery, as `support.twelve` is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    LedgerError,
    Receipt,
    RetryPolicy,
    RunNotFound,
    StepFailed,
    current_step,
)
from agent_run_ledger.drivers import asynchronous  # noqa: F401 - here, so that no process has to
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.programs import Way
from support.twelve import Boundaries, Bounded, serve
from support.wire import Answer, aask, ask, request
from support.witness import Witness

RUN, GOAL = "refund", "refund whoever the model says"
IMPATIENCE_SECONDS = 0.2

BEFORE_OUTCOME, AFTER_OUTCOME, IN_RECEIPT = "before the outcome", "after the outcome", "in the receipt"


@dataclass(frozen=True)
class Case:
    """One way to declare the refund, and what may be done about it when it is in doubt."""

    path: str
    in_doubt: Literal["again", "ask", "park"]
    options: dict[str, Any] = field(default_factory=dict)
    has_receipt: bool = False
    undeclared: str = "dispatch"
    is_late: bool = False
    """Whether the receiver has forgotten the key when the next process begins."""

    @property
    def method(self) -> str:
        return "GET" if self.path.startswith("/quotes") else "POST"


LATER = 48 * 3600.0
"""Seconds after which a process of a late case begins; the service has forgotten its keys by then."""
_WINDOW = {"effect": Effect.IDEMPOTENT, "key_window": 24 * 3600.0}

CASES = {
    "READ": Case("/quotes/today", "again", {"effect": Effect.READ}),
    "IDEMPOTENT": Case("/keyed", "again", {"effect": Effect.IDEMPOTENT}),
    "MUTATE with receipt": Case("/unkeyed", "ask", {"effect": Effect.MUTATE}, has_receipt=True),
    "MUTATE": Case("/unkeyed", "park", {"effect": Effect.MUTATE}),
    "undeclared": Case("/keyed", "again"),
    "undeclared, blocked": Case("/unkeyed", "park", undeclared="block"),
    "IDEMPOTENT, forgotten, with receipt": Case("/keyed", "ask", _WINDOW, has_receipt=True, is_late=True),
    "IDEMPOTENT, forgotten": Case("/keyed", "park", _WINDOW, is_late=True),
}


class Later(SystemClock):
    """The machine's clocks, the wall clock being set forward."""

    def __init__(self, seconds: float) -> None:
        self.now = lambda: time.time() + seconds


class Life:
    """One process of the program: what it opens, calls and reports."""

    def __init__(
        self,
        folder: Path,
        port: int,
        case: str,
        *,
        is_async: bool = False,
        durability: Any = "full",
        die: str | None = None,
        die_again: int = 1,
        die_at: int | None = None,
        later: float = 0.0,
        patience: float = 30.0,
        receipt: str = "told",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.case, self.port, self.patience = CASES[case], port, patience
        self.way = Way(is_async)
        self.witness = Witness(folder / "witness")
        self._die, self._passes, self._has_returned = die, die_again, False
        self._count = Boundaries(die_at)
        store = Bounded(open_store(folder / "runs.db", durability=durability, clock=SystemClock()), self._boundary)
        # A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
        self.ledger = AgentRunLedger(
            store,
            durability=durability,
            lease_seconds=3600.0,
            undeclared=self.case.undeclared,
            clock=Later(later),
        )
        self.options = self.case.options | (options or {})
        if "retry" in self.options:
            self.options["retry"] = RetryPolicy(**self.options["retry"])
        if self.case.has_receipt:
            self.options["receipt"] = self.way.function(self.receipt(READINGS[receipt]))

    # --- what is called -----------------------------------------------------------------------------------------------

    def ask_model(self, prompt: str) -> Any:
        def passed(moment: str) -> None:
            self.passed(f"model, {moment}")

        return self._exchange(request("POST", "/model", prompt.encode()), Answer.value, passed)

    def refund(self, customer: str, amount: int) -> Any:
        body = json.dumps({"customer": customer, "amount": amount}).encode()
        sent = request(self.case.method, self.case.path, body, Idempotency_Key=current_step().idempotency_key)
        return self._exchange(sent, self._returned, self.passed, self.patience)

    def _returned(self, answer: Answer) -> Any:
        value = answer.value()
        self._has_returned = True
        return value

    def receipt(self, read: Callable[[Answer], Any]) -> Callable[..., Any]:
        """A receipt that asks the status endpoint and makes of the answer what `read` does."""

        def lookup(idempotency_key: str, arguments: dict[str, Any]) -> Any:
            assert arguments.keys() == {"customer", "amount"}
            self.passed(IN_RECEIPT)
            return self._exchange(request("GET", f"/by-key/{idempotency_key}"), read)

        return lookup

    def _exchange(
        self,
        sent: bytes,
        read: Callable[[Answer], Any],
        passed: Callable[[str], None] = lambda moment: None,
        patience: float = 30.0,
    ) -> Any:
        if not self.way.is_async:
            return read(ask(self.port, sent, passed, patience))

        async def exchange() -> Any:
            return read(await aask(self.port, sent, passed, patience))

        return exchange()

    # --- where it dies ------------------------------------------------------------------------------------------------

    def passed(self, moment: str) -> None:
        """Die here, if this is the moment, at the pass that was told."""
        self._count(moment)
        if moment == self._die:
            self._passes -= 1
            if not self._passes:
                os.kill(os.getpid(), signal.SIGKILL)

    def _boundary(self, place: str) -> None:
        """The first write after the refund has returned is that of its outcome."""
        self._count(place)
        if self._has_returned and place.startswith("before append"):
            self.passed(BEFORE_OUTCOME)
        elif self._has_returned and place.startswith("after append"):
            self._has_returned = False
            self.passed(AFTER_OUTCOME)

    # --- what it reports ----------------------------------------------------------------------------------------------

    def report(self, result: Any, error: BaseException | None) -> None:
        """What the program was told, and what the ledger says of the run."""
        try:
            status = self.ledger.get_run(RUN).status
            steps = [[step.tool_name, step.state, step.idempotency_key] for step in self.ledger.steps(RUN)]
        except RunNotFound:
            status, steps = "", []
        told = {"result": result, "error": type(error).__name__ if error is not None else None, "text": str(error)}
        told["places"] = self._count.passed
        kinds = [row.kind for row in self.ledger._store.read(RUN)]
        findings = [str(finding) for finding in self.ledger.verify().findings]
        self.witness.note("after", status=status, steps=steps, kinds=kinds, findings=findings, **told)


def told(answer: Answer) -> Receipt:
    """What the status endpoint says; an error of its own tells nothing."""
    if answer.status == 404:
        return Receipt.absent()
    return Receipt.found(answer.value()) if answer.status == 200 else Receipt.unknown(f"HTTP {answer.status}")


def raised(answer: Answer) -> Receipt:
    """The same by somebody who does not think of errors: the ledger has to make *unknown* of what he lets through."""
    return Receipt.absent() if answer.status == 404 else Receipt.found(answer.value())


def garbled(answer: Answer) -> Any:
    """The same by somebody who forgot what a receipt is."""
    return answer.status == 200


READINGS = {"told": told, "raised": raised, "garbled": garbled}


# --- programs ---------------------------------------------------------------------------------------------------------

Steps = Generator[Any, Any, Any]


def once(calls: Any, done: list[Any]) -> Steps:
    """Refund whom the model says. `done` are the outputs of the steps that need no call any more."""
    choice = done.pop(0) if done else (yield calls.ask_model("whom?"))
    refund = done.pop(0) if done else (yield calls.refund(customer=choice["customer"], amount=choice["amount"]))
    said = done.pop(0) if done else (yield calls.ask_model(f"what now? refunded: {json.dumps(refund)}"))
    return [choice, refund, said]


def stubborn(calls: Any, done: list[Any]) -> Steps:
    """The same, and where the refund fails it is asked for once more, as agents do."""
    choice = yield calls.ask_model("whom?")
    try:
        refund = yield calls.refund(customer=choice["customer"], amount=choice["amount"])
    except StepFailed:
        refund = yield calls.refund(customer=choice["customer"], amount=choice["amount"])
    said = yield calls.ask_model(f"what now? refunded: {json.dumps(refund)}")
    return [choice, refund, said]


def impatient(calls: Any, done: list[Any]) -> Steps:
    """The same, and where the refund takes too long it is cancelled and asked for once more. For event loops."""
    choice = yield calls.ask_model("whom?")
    try:
        first = calls.refund(customer=choice["customer"], amount=choice["amount"])
        refund = yield asyncio.wait_for(first, IMPATIENCE_SECONDS)
    except TimeoutError:
        refund = yield calls.refund(customer=choice["customer"], amount=choice["amount"])
    said = yield calls.ask_model(f"what now? refunded: {json.dumps(refund)}")
    return [choice, refund, said]


def unrecorded(calls: Any, done: list[Any]) -> Steps:
    """The same by an agent whose model is no step: it is asked again each time the program begins."""
    choice = yield calls.unrecorded_model("whom?")
    refund = yield calls.refund(customer=choice["customer"], amount=choice["amount"])
    return [choice, refund]


PROGRAMS: dict[str, Callable[[Any, list[Any]], Steps]] = {
    program.__name__: program for program in (once, stubborn, impatient, unrecorded)
}


class Registered:
    """Face C: the calls of registered tools."""

    def __init__(self, life: Life) -> None:
        self.unrecorded_model = life.ask_model
        self.ask_model = life.way.tool(life.ledger, life.ask_model, kind="model")
        self.refund = life.way.tool(life.ledger, life.refund, **life.options)


class StepByStep:
    """Face B: the same calls, spelled out."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._execute = life.ledger.aexecute_step if life.way.is_async else life.ledger.execute_step
        self.unrecorded_model = life.ask_model
        self.tools = {"ask_model": life.way.function(life.ask_model), "refund": life.way.function(life.refund)}

    def ask_model(self, prompt: str) -> Any:
        return self._execute(RUN, "ask_model", {"prompt": prompt}, self.tools["ask_model"], kind="model")

    def refund(self, **arguments: Any) -> Any:
        return self._execute(RUN, "refund", arguments, self.tools["refund"], **self._life.options)


def run_by_name(life: Life, body: Any, mode: str) -> Any:
    """Face C: the agent is run, or run again, or whatever was interrupted is recovered by a process that does not name it."""
    calls = Registered(life)

    def refunds() -> Steps:
        return (yield from body(calls, []))

    agent = life.way.agent(life.ledger, refunds)
    if mode == "recover":
        life.witness.note("recovered", ids=life.ledger.recover())
        return life.ledger.get_run(RUN).result
    return life.way.start(life.ledger, agent, run_id=RUN)


def run_by_steps(life: Life, body: Any, mode: str) -> Any:
    """Face B: the program begins at its first line, or goes on behind what `resume_run` has settled."""
    calls = StepByStep(life)
    done: list[Any] = []
    if mode == "resume":
        records = life.ledger.resume_run(RUN, tools=calls.tools)  # type: ignore[call-arg, unused-ignore]
        done = [json.loads(step.output_json) for step in records if step.state == "COMPLETED" and step.output_json]
    else:
        life.ledger.create_run(GOAL, RUN)
    program = life.way.program(body)
    result = asyncio.run(program(calls, done)) if life.way.is_async else program(calls, done)
    life.ledger.finish_run(RUN, result)
    return result


FACES = {"agent": run_by_name, "steps": run_by_steps}


def live(folder: str, port: int, case: str, face: str, mode: str = "run", program: str = "once", **more: Any) -> None:
    """One life of the program."""
    warnings.simplefilter("ignore")  # that an undeclared step is dispatched again is said, and meant here
    life = Life(Path(folder), port, case, **more)
    result, error = None, None
    try:
        result = FACES[face](life, PROGRAMS[program], mode)
    except LedgerError as raised:
        error = raised
    life.report(result, error)
    life.ledger.close()


if __name__ == "__main__":
    serve(live)
