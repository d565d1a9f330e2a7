"""Random programs on random ledgers: whatever they do, whenever they die, and whatever operators do meanwhile, the ledger is healthy."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_run_ledger import Budget, Effect, LedgerError, Receipt, RetryPolicy, Run, current_step
from support.explorer import Life, World

RUN = "run"
LIVES = 4
LONGEST = 7
"""A program makes so many calls at the most."""

Does = Callable[[Life, Any, Any, random.Random], None]


class Refused(Exception):
    """What a tool raises."""


def _outcome(draw: random.Random) -> BaseException | Any:
    return draw.choice([7, {"text": "ä" * draw.randint(0, 900)}, "x" * 1500, Refused("no"), TimeoutError("slow"), None])


def _step(life: Life, ledger: Any, run: Any, draw: random.Random) -> None:
    answers = [_outcome(draw) for _ in range(3)]
    costs = draw.choice([None, "0.05", "0.40"])
    name = draw.choice("abc")
    effect = draw.choice([None, *Effect])
    retry = RetryPolicy(max_attempts=draw.randint(1, 3), base=0.0) if draw.random() < 0.3 else None
    receipt = draw.choice([None, None, Receipt.found(1), Receipt.absent(), Receipt.unknown("down")])
    limit = draw.choice([None, "0.10", "0.30"])

    def tool(**given: Any) -> Any:
        life.tick("in a tool")
        if costs is not None:
            current_step().record_usage(usd=costs)
        answer = answers.pop() if answers else 7
        if isinstance(answer, BaseException):
            raise answer
        return answer

    options: dict[str, Any] = {"effect": effect, "retry": retry, "max_usd": limit}
    if limit is not None:
        options["kind"] = "model"
    if receipt is not None:
        options["receipt"] = lambda key, arguments: receipt
    run.step(name, {"n": draw.choice([1, 1, 2])}, tool, **{k: v for k, v in options.items() if v is not None})


def _value(life: Life, ledger: Any, run: Any, draw: random.Random) -> None:
    draw.choice([run.now, run.random, run.uuid4])()


def _sleep(life: Life, ledger: Any, run: Any, draw: random.Random) -> None:
    run.sleep(draw.choice([0, 5]))


def _signal(life: Life, ledger: Any, run: Any, draw: random.Random) -> None:
    if draw.random() < 0.7:
        ledger.signal(RUN, "go", draw.random(), by="ann")
    run.wait_for("go", timeout=3.0)


def _branches(life: Life, ledger: Any, run: Any, draw: random.Random) -> None:
    for name in ("left", "right"):
        with run.branch(name):
            _step(life, ledger, run, draw)


DOES: list[Does] = [_step, _step, _step, _value, _sleep, _signal, _branches]


def play(life: Life, seed: int) -> None:
    """The program of this seed, from its first line: the same calls in every life, with answers that may differ."""
    draw = random.Random(seed)
    ledger, changes = life.ledger, random.Random(seed * LIVES + life.number * (draw.random() < 0.5))
    budget = changes.choice([None, Budget(usd="0.90"), Budget(usd="0.35", steps=5), Budget(steps=3)])
    shared = ledger.budget("team", usd=changes.choice(["0.80", "1.20"])) if draw.random() < 0.3 else None
    if shared is not None:
        budget = Budget(usd="0.70", within=shared)

    @ledger.agent(name="child", budget=Budget(usd="0.30") if draw.random() < 0.5 else None)
    def child(run: Run) -> int:
        _step(life, ledger, run, random.Random(seed + 1))
        return 1

    seeds = [draw.random() for _ in range(draw.randint(1, LONGEST))]
    calls_child = draw.random() < 0.2

    @ledger.agent(name="agent", budget=budget)
    def agent(run: Run) -> int:
        for number, each in enumerate(seeds):
            inner = random.Random(each)
            with suppress(Refused, TimeoutError, LedgerError):
                inner.choice(DOES)(life, ledger, run, inner)
            if calls_child and number == 0:
                child()
        return len(seeds)

    ledger.run(agent, run_id=RUN)


def operate(life: Life, draw: random.Random) -> None:
    """What somebody may do about the runs that stand there."""
    ledger = life.ledger
    for run in ledger.runs():
        acts: list[Callable[[], Any]] = [
            lambda run_id=run.run_id: ledger.cancel(run_id, by="ann"),
            lambda run_id=run.run_id: ledger.release(run_id, by="ann"),
            lambda run_id=run.run_id: ledger.resolve(run_id, 1, output=3, by="ann"),
            lambda run_id=run.run_id: ledger.resolve(run_id, 2, executed=False, by="ann"),
            lambda run_id=run.run_id: ledger.redrive(run_id, budget=Budget(usd="2.00", steps=40), by="ann"),
            lambda run_id=run.run_id: ledger.fork(run_id, draw.randint(1, 4), by="ann"),
        ]
        if draw.random() < 0.4:
            with suppress(LedgerError):
                draw.choice(acts)()


def healthy(seed: int, folder: Path | None = None) -> World:
    """A ledger, in memory or in a folder, that a random program was at work on, in a few lives of which most died."""
    draw = random.Random(-seed - 1)
    world = World(folder, {"max_steps": 40, "loop_threshold": draw.choice([2, 3, 9]), "undeclared": "dispatch"})
    for number in range(draw.randint(1, LIVES)):
        dies_at = draw.randint(1, 90) if draw.random() < 0.7 else None
        with world.life(dies_at) as life, suppress(LedgerError, Refused, TimeoutError):
            if number and draw.random() < 0.4:
                operate(life, draw)
            play(life, seed)
    return world
