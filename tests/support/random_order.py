"""An agent whose next call depends on the order in which its calls come back, in processes that are killed at random.

Run as a module it is a nursery, as `support.twelve` is.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from agent_run_ledger import AgentRunLedger, Effect, Run, RunNotFound, current_step
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from support.twelve import Bounded, serve
from support.witness import Witness, digest

RUN = "random order"
NAMES = ("alpha", "beta", "gamma")
EQUALS, WORKERS, ROUNDS, LOOKS, ITEMS = 50, 3, 3, 5, 6
RACE = len(NAMES) + 1
TOLD = (2 * len(NAMES) + EQUALS) + (WORKERS * ROUNDS) + (2 * LOOKS) + (ROUNDS * RACE) + (2 * ROUNDS) + (2 * ITEMS) + 1
"""How often the program is told something, from its first line to its last."""
LOST = "lost"
"""What it is told of a call that it cancelled."""

Tool = Callable[[Any], Coroutine[Any, Any, Any]]

LONGEST_SECONDS = 0.003
PATIENCE_TURNS = 40
"""How many turns of the event loop the program waits for a slow answer before it does something about it."""
HANGS_SECONDS = 90.0


# --- death ------------------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """When a process is killed: `further` places behind the one where its program was told something for the `told`th time.

    A place is before or after a write to the store, before or after the effect of a call, or where the program is told something,
    be it replayed.
    """

    told: int
    further: int
    by_thread: bool
    """Whether a thread is woken to do it: the others go on until the system lets it run."""


class Killer:
    """Counts the places, and kills its own process when it is time."""

    def __init__(self, death: Death) -> None:
        self._mutex = threading.Lock()
        self._told, self._further, by_thread = death
        self._is_time = threading.Event()
        if by_thread:
            threading.Thread(target=self._kill_in_time, daemon=True).start()
        self._at_once = not by_thread

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_in_time(self) -> None:
        self._is_time.wait()
        self.kill()

    def told(self) -> None:
        with self._mutex:
            self._told -= 1

    def passes(self) -> None:
        with self._mutex:
            if self._told > 0:
                return
            self._further -= 1
            if self._further == 0:
                if self._at_once:
                    self.kill()
                self._is_time.set()


# --- life -------------------------------------------------------------------------------------------------------------


class Life:
    """One process of the program: what it opens, calls, hears and reports."""

    def __init__(self, folder: Path, seed: int, number: int, durability: Any, killer: Killer | None) -> None:
        self.seed = seed
        self.number = number
        self.killer = killer
        self.witness = Witness(folder / "witness")
        store: Any = open_store(folder / "runs.db", durability=durability, clock=SystemClock())
        # A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
        self.ledger = AgentRunLedger(
            Bounded(store, lambda place: self.passes()), max_steps=1000, durability=durability, lease_seconds=3600.0
        )
        self.heard: list[Any] = []

    def passes(self) -> None:
        if self.killer is not None:
            self.killer.passes()

    def tool(
        self, name: str, effect: Effect = Effect.IDEMPOTENT, seconds: float = LONGEST_SECONDS, turns: int = 0
    ) -> Tool:
        """A tool whose effect is a line in the witness's file. It answers who was asked what, and in which life.

        How long it takes is as random in the next life: up to so many seconds, then so many turns of the loop.
        """

        async def call(given: Any) -> Any:
            step = current_step()
            self.passes()
            facts = {"position": step.position, "key": step.idempotency_key, "bytes": digest(given)}
            self.witness.note("call", life=self.number, tool=name, given=given, **facts)
            self.passes()
            draw = random.Random(f"{self.seed} {self.number} {name} {given}")
            await asyncio.sleep(draw.choice([0.0, draw.uniform(0.0, seconds)]))
            for _ in range(draw.randint(0, turns)):
                await asyncio.sleep(0)
            return [name, given, self.number]

        return self.ledger.tool(name=name, effect=effect)(call)

    def hear(self, asked: list[Any], answer: Any) -> None:
        """The program is told this now."""
        self.heard.append([asked, answer])
        self.witness.note("told", life=self.number, asked=asked, answer=answer)
        if self.killer is not None:
            self.killer.told()
            self.killer.passes()

    @property
    def so_far(self) -> str:
        """Everything that the program was told until now, in its order."""
        return digest(self.heard)[:16]

    def report(self, kind: str, **facts: Any) -> None:
        """What the ledger says of the run, for the witness."""
        try:
            status = self.ledger.get_run(RUN).status
            steps = {step.position: step.state for step in self.ledger.steps(RUN)}
        except RunNotFound:
            status, steps = "", {}
        findings = [str(finding) for finding in self.ledger.verify().findings]
        self.witness.note(kind, life=self.number, status=status, steps=steps, findings=findings, **facts)

    def complain(self, text: str) -> None:
        self.witness.note("complaint", life=self.number, text=text)


def agent_of(life: Life) -> Callable[[], Coroutine[Any, Any, Any]]:
    """The agent, with everything that stands side by side in it."""
    named = {name: life.tool(name) for name in NAMES}
    equal = life.tool("equal", Effect.READ)
    chained, look, follow, prefer, end = (life.tool(name) for name in ("chained", "look", "follow", "prefer", "end"))
    slow = life.tool("slow", Effect.READ, seconds=0.0, turns=PATIENCE_TURNS)
    remind, thank = life.tool("remind"), life.tool("thank")
    runner = {name: life.tool(f"runner {name}", Effect.READ) for name in NAMES}
    prize = {name: life.tool(f"prize for {name}") for name in NAMES}
    mapped = life.tool("mapped", Effect.READ)

    async def ask(tool: Tool, name: str, given: Any) -> Any:
        answer = await tool(given)
        life.hear([name, given], answer)
        return answer

    async def hear(made: Awaitable[Any], name: str, given: Any) -> None:
        life.hear([name, given], await made)

    async def equals_beside_names(run: Run) -> None:
        """Three calls of different names and fifty of one; each of the three goes on while others are under way."""

        async def go_on(made: Awaitable[Any], name: str) -> None:
            await hear(made, name, 0)
            with run.branch(name):
                await ask(prefer, "prefer", [name, life.so_far])

        goes_on = [asyncio.create_task(go_on(named[name](0), name)) for name in NAMES]
        hears = [asyncio.create_task(hear(equal(n), "equal", n)) for n in range(EQUALS)]
        await asyncio.gather(*goes_on, *hears)

    async def task_group(run: Run) -> None:
        """Branches as tasks: what each asks next depends on what all have heard."""

        async def work(worker: int) -> None:
            with run.branch(f"worker {worker}"):
                for turn in range(ROUNDS):
                    await ask(chained, "chained", [worker, turn, life.so_far])

        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(work(worker))

    async def completed_loop() -> None:
        """What has completed is followed up before the next is looked at, while the rest goes on."""
        looks = [asyncio.create_task(look(n)) for n in range(LOOKS)]
        for completed in asyncio.as_completed(looks):
            answer = await completed
            life.hear(["look", answer[1]], answer)
            await ask(follow, "follow", life.so_far)

    async def race(turn: int) -> None:
        """The winner decides which tool is called next, and the losers are cancelled."""
        given = [turn, life.so_far]
        tasks = {asyncio.create_task(runner[name](given)): name for name in NAMES}
        completed, losers = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in tasks if task in completed]:
            life.hear([f"runner {tasks[task]}", given], task.result())
        winner = min(tasks[task] for task in completed)
        for loser in losers:
            loser.cancel()
        await asyncio.gather(*losers, return_exceptions=True)
        for loser in [task for task in tasks if task in losers]:
            life.hear([f"runner {tasks[loser]}", given], LOST if was_interrupted(loser) else loser.result())
        await ask(prize[winner], f"prize for {winner}", life.so_far)

    async def patience(turn: int) -> None:
        """An answer that comes in time is followed by another call than one that does not, and that may be on its way by then."""
        asked = asyncio.create_task(slow(turn))
        for _ in range(PATIENCE_TURNS):
            await asyncio.sleep(0)
            if asked.done():
                await hear(asked, "slow", turn)
                await ask(thank, "thank", life.so_far)
                return
        await ask(remind, "remind", life.so_far)
        await hear(asked, "slow", turn)

    async def map_of_branches(run: Run) -> None:
        async def each(item: int) -> None:
            await ask(mapped, "mapped", item)
            await ask(mapped, "mapped", [item, life.so_far])

        await run.map(each, range(ITEMS), concurrency=ITEMS // 2)

    @life.ledger.agent()
    async def agent(run: Run) -> Any:
        await equals_beside_names(run)
        await task_group(run)
        await completed_loop()
        for turn in range(ROUNDS):
            await race(turn)
            await patience(turn)
        await map_of_branches(run)
        await ask(end, "end", life.so_far)
        return life.heard

    async def start() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: life.complain(str(context)))
        return await life.ledger.arun(agent, run_id=RUN)

    return start


def was_interrupted(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or isinstance(task.exception(), TimeoutError)  # which is what a replay says


def live(folder: str, seed: int, number: int, durability: str, death: list[Any] | None) -> None:
    """One life of the agent. Opening the ledger and reading it are no places to die: nothing is written there."""
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
    killer = None if death is None else Killer(Death(*death))
    life = Life(Path(folder), seed, number, durability, killer)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, category, *where: life.complain(f"{category.__name__}: {message}")
    life.report("before")
    result = None
    try:
        result = asyncio.run(agent_of(life)())
    except Exception as error:
        life.complain("".join(traceback.format_exception(error)))
    life.report("after", result=result)
    life.ledger.close()
    if killer is not None:  # its thread has not had its turn yet
        killer.kill()


if __name__ == "__main__":
    serve(live)
