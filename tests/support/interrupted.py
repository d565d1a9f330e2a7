"""Hundreds of runs of sync and async agents that stand still in the middle of something, and processes that recover them.

Run as a module it is one such process: `interrupt` begins all runs and kills itself when every one of them stands where it was told;
`recover` recovers what it finds, and kills itself at a boundary where it is told to.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, Receipt, RetryPolicy, current_step
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.programs import Way
from support.twelve import Boundaries, Bounded
from support.wire import AFTER_REPLY, BEFORE_REPLY, BEFORE_REQUEST, Answer, aask, ask, request
from support.witness import Witness

TOOLS = ("look", "choose", "pay", "tell")
MOMENTS = (BEFORE_REQUEST, BEFORE_REPLY, AFTER_REPLY)
TWICE = RetryPolicy(max_attempts=8, base=0.0, cap=0.0)
"""More attempts than there are processes, and no wait."""


def run_id(number: int) -> str:
    return f"run-{number:03}"


def is_asked_for(number: int) -> bool:
    """Whether that run's payment has a receipt, and its receiver no memory for keys."""
    return number % 3 == 0


def standing(number: int, seed: int) -> tuple[str, str]:
    """Where a run stands still: in which tool, and at which moment of its request."""
    chance = random.Random(f"{seed}/{number}")
    return chance.choice(TOOLS), chance.choice(MOMENTS)


class Process:
    """One process of all the agents."""

    def __init__(self, folder: Path, port: int, die_at: int | None) -> None:
        self.port = port
        self.boundary = Boundaries(die_at)
        self.witness = Witness(folder / "witness")
        store = Bounded(open_store(folder / "runs.db", durability="process", clock=SystemClock()), self.boundary)
        # A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
        self.ledger = AgentRunLedger(store, durability="process", lease_seconds=3600.0)
        self.stands: Callable[[int, str, str], bool] = lambda number, tool, moment: False
        """Whether a run stands still here."""
        self.stood_still = threading.Semaphore(0)
        self.agent, self.async_agent = self.agent_of(Way(False)), self.agent_of(Way(True))

    def agent_of(self, way: Way) -> Callable[..., Any]:
        """The agent of these runs, in the one way or the other; its tools have names of their own."""
        tools = {
            "look": self.tool(way, "look", {"effect": Effect.READ}),
            "choose": self.tool(way, "choose", {"kind": "model"}),
            "pay": self.tool(way, "pay", {"effect": Effect.IDEMPOTENT}),
            "ask and pay": self.tool(way, "ask and pay", {"receipt": way.function(self.receipt_of(way))}),
            "tell": self.tool(way, "tell", {"effect": Effect.IDEMPOTENT}),
        }

        def work(number: int) -> Generator[Any, Any, Any]:
            yield tools["look"](number)
            choice = yield tools["choose"](number)
            paid = yield tools["ask and pay" if is_asked_for(number) else "pay"](number, choice["amount"])
            yield tools["tell"](number, paid["refund"])
            return choice["amount"]

        return way.agent(self.ledger, work, name=f"work, {self.spelling(way)}")

    @staticmethod
    def spelling(way: Way) -> str:
        return "async" if way.is_async else "sync"

    def tool(self, way: Way, name: str, options: dict[str, Any]) -> Callable[..., Any]:
        def call(number: int, value: int = 0) -> Any:
            body = json.dumps({"number": number, "tool": name, "value": value}).encode()
            path = {"look": "/quotes/today", "choose": "/model", "ask and pay": "/unkeyed"}.get(name, "/keyed")
            sent = request("POST", path, body, Idempotency_Key=current_step().idempotency_key)
            if way.is_async:
                return self._aexchange(sent, number, name)
            return ask(self.port, sent, lambda moment: self._passed(number, name, moment)).value()

        return way.tool(self.ledger, call, name=f"{name}, {self.spelling(way)}", retry=TWICE, **options)

    def receipt_of(self, way: Way) -> Callable[..., Any]:
        def read(answer: Answer) -> Receipt:
            self.boundary("in a receipt")
            if answer.status == 404:
                return Receipt.absent()
            return Receipt.found(answer.value()) if answer.status == 200 else Receipt.unknown("no answer in time")

        def receipt(idempotency_key: str, arguments: dict[str, Any]) -> Any:
            self.boundary("before a receipt")
            sent = request("GET", f"/by-key/{idempotency_key}")
            if not way.is_async:
                return read(ask(self.port, sent))

            async def asked() -> Receipt:
                return read(await aask(self.port, sent))

            return asked()

        return receipt

    def _passed(self, number: int, tool: str, moment: str) -> None:
        self.boundary(f"in {tool}, {moment}")
        if self.stands(number, tool, moment):
            self.stood_still.release()
            threading.Event().wait()

    async def _aexchange(self, sent: bytes, number: int, tool: str) -> Any:
        """`aask`, where standing still leaves the loop to the other runs: what is passed says so, and then it is waited."""
        stopped = asyncio.Event()

        def passed(moment: str) -> None:
            self.boundary(f"in {tool}, {moment}")
            if self.stands(number, tool, moment):
                raise _StandStill

        try:
            return (await aask(self.port, sent, passed)).value()
        except _StandStill:
            self.stood_still.release()
            await stopped.wait()

    # --- what a process does ------------------------------------------------------------------------------------------

    def interrupt(self, count: int, seed: int) -> None:
        """Begin all runs side by side, every second one async, and die when each stands still."""
        self.boundary.die_at = None

        def stands(number: int, tool: str, moment: str) -> bool:
            where, when = standing(number, seed)
            if where == "pay" and is_asked_for(number):
                where = "ask and pay"
            return (tool, moment) == (where, when)

        async def begin() -> None:
            ids = range(1, count, 2)
            await asyncio.gather(*(self.ledger.arun(self.async_agent, each, run_id=run_id(each)) for each in ids))

        self.stands = stands
        begun: list[Any] = [
            (self.ledger.run, (self.agent, each), {"run_id": run_id(each)}) for each in range(0, count, 2)
        ]
        for target, args, kwargs in [*begun, (asyncio.run, (begin(),), {})]:
            threading.Thread(target=target, args=args, kwargs=kwargs, daemon=True).start()
        for _ in range(count):
            self.stood_still.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def recover(self) -> None:
        self.witness.note("recovered", ids=self.ledger.recover(), places=len(self.boundary.passed))


class _StandStill(BaseException):
    """The call goes no further."""


def main() -> None:
    warnings.simplefilter("error")
    order = json.loads(sys.argv[1])
    process = Process(Path(order["folder"]), order["port"], order.get("die_at"))
    if "count" in order:
        process.interrupt(order["count"], order["seed"])
    process.recover()
    process.ledger.close()


if __name__ == "__main__":
    main()
