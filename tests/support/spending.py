"""Runs that spend nearly all of their budget, in processes that compete for them, and the judge of what budgets promise."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from decimal import Decimal
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

from agent_run_ledger import (
    AgentRunLedger,
    AttemptsExhausted,
    Budget,
    BudgetExceededException,
    Effect,
    Price,
    PriceBook,
    Run,
    RunClosed,
    RunOwned,
    RunState,
    StepFailed,
    current_run,
)
from agent_run_ledger.contract import Row
from agent_run_ledger.rules.budget import NOTHING, Amount

RATE = Decimal("0.000003")
"""US dollars a token, of whatever kind."""

PRICES = PriceBook({"m": Price(input="3", output="3")})


# --- what must be true ------------------------------------------------------------------------------------------------


def judge(rows: list[Row], limit: Budget, used: int, *, keeps: bool = True) -> Amount:
    """Hold a run's entries to its budget, each of them. Returns what is spent and reserved at last.

    The sum is made here anew: an intent reserves, an attempt without an outcome has spent what it reserved, an outcome is charged.
    `used`: the tokens that were really used. `keeps`: whether the calls have kept to their maxima.
    """
    spent, held = NOTHING, dict[str, Amount]()
    most = Amount(limit.tokens or 0, Decimal(limit.usd or 0))
    is_over = False
    for row in rows:
        body, position = json.loads(row.body), row.position or ""
        if row.kind == "intent":
            assert not is_over, f"entry {row.seq} dispatches, and more than the budget is spent"
            spent = spent.plus(held.pop(position, NOTHING))
            held[position] = Amount.read(body.get("holds", {}))
        elif row.kind == "outcome":
            reserved, charged = held.pop(position), Amount.read(body.get("charges", {}))
            assert ("overran" in body) == (charged.tokens > reserved.tokens or charged.usd > reserved.usd)
            spent = spent.plus(charged)
        if RunState(body["state"]).is_terminal:  # of what has no outcome by now nobody will ever know more
            spent, held = together(spent, held), {}
        assert Amount.read(body.get("spent", {})) == spent, f"entry {row.seq} says another sum"
        is_over = is_over or spent.tokens > most.tokens or spent.usd > most.usd
        committed = together(spent, held)
        if keeps:
            assert committed.tokens <= most.tokens, f"entry {row.seq} passes the limit of tokens"
            assert committed.usd <= most.usd, f"entry {row.seq} passes the limit of dollars"
    committed = together(spent, held)
    if keeps:  # of an attempt that was killed nobody knows more than what it had reserved
        assert used <= committed.tokens, "more was used than the ledger knows of"
        assert RATE * used <= committed.usd
    return committed


def judge_account(rows: list[Row], limit: Budget) -> Amount:
    """Hold the account of a budget that runs share to what it allows, entry by entry, likewise. Returns what is spent and reserved at last."""
    spent, held = NOTHING, dict[str, Amount]()
    for row in rows:
        body = json.loads(row.body)
        if row.kind == "granted":
            held[json.dumps(body["grant"])] = Amount.read(body["holds"])
        elif row.kind == "settled":
            assert held.pop(json.dumps(body["grant"])).tokens >= body["charges"].get("tokens", 0)
            spent = spent.plus(Amount.read(body["charges"]))
        committed = together(spent, held)
        assert committed.tokens <= (limit.tokens or 0), f"entry {row.seq} passes the limit of tokens"
        assert committed.usd <= Decimal(limit.usd or 0), f"entry {row.seq} passes the limit of dollars"
    return together(spent, held)


def together(spent: Amount, held: dict[str, Amount]) -> Amount:
    return list(accumulate(held.values(), Amount.plus, initial=spent))[-1]


# --- processes --------------------------------------------------------------------------------------------------------

BRANCHES = 8
LARGE = 400
"""What each of the first nine calls uses, so that nine tenths are spent when the branches begin."""

LIMIT = Budget(tokens=4000, usd=RATE * 4000)
KEEPING, OVERRUNNING = [f"keeps-{number}" for number in range(6)], [f"overruns-{number}" for number in range(3)]
"""Runs whose calls keep to their maxima, and runs in which half of the small ones do not."""

LAST = OVERRUNNING[-1]
"""Begun when all others have ended, and nobody is killed over it: here calls do overrun side by side, whatever befell the others."""

SHARING = [f"shares-{number}" for number in range(8)]
"""Runs of which none has a limit of its own: together they may use as much as one of the others."""


def work(outside: str, path: str, name: str, shares: str = "") -> None:
    """One process: goes on with whatever run it gets hold of, until all have ended, and tells the outside of every call.

    A note is one write to the pipe `outside`, which no death takes back. If it `shares`, all runs have one budget together.
    """
    draw = random.Random(name)
    fd = os.open(outside, os.O_WRONLY)

    def note(kind: str, **facts: Any) -> None:
        os.write(fd, json.dumps({"kind": kind, "worker": name} | facts).encode() + b"\n")

    def ask(most: int, run_id: str) -> Any:
        used = most if most == LARGE else draw.randint(most // 2, most)
        if run_id in OVERRUNNING and 20 < most < LARGE:
            used = 3 * most
        note("asked", run=run_id, used=used)
        time.sleep(draw.random() / 100)  # a model takes its time
        tells = used >= most or draw.random() < 1 / 3
        if tells:
            return {"model": "m", "usage": {"prompt_tokens": used - used // 3, "completion_tokens": used // 3}}
        if draw.random() < 1 / 2:
            raise ValueError("it makes no sense")
        return None

    def spend(most: int, number: int) -> None:
        run = current_run()
        with suppress(StepFailed):
            run.step(
                "ask", {"number": number}, lambda: ask(most, run.run_id), kind="model", max_tokens=most, max_usd=RATE * most,
                effect=Effect.IDEMPOTENT, may_repeat=True,
            )  # fmt: skip

    def branch(first: int) -> NoReturn:
        number = 0
        while True:
            number += 1
            spend(5 + (first + number) % 4 * 9, number)

    terms: dict[str, Any] = {"max_steps": 1000, "prices": PRICES, "durability": "process"}
    terms |= {"lease_seconds": 2, "heartbeat_seconds": 0.2} if shares else {"budget": LIMIT}
    with AgentRunLedger(path, **terms) as ledger:
        pool = ledger.budget("all", tokens=LIMIT.tokens, usd=LIMIT.usd) if shares else None

        @ledger.agent(budget=pool)
        def agent(run: Run) -> None:
            for number in range(1 if shares else 9):
                spend(LARGE, number)
            run.gather(*[partial(branch, number) for number in range(BRANCHES)])

        left = list(SHARING) if shares else [*KEEPING, *OVERRUNNING]
        while left:
            run_id = draw.choice(left[:-1] or left)  # the last one at last
            try:
                ledger.run(agent, run_id=run_id, wait=0.05)
            except RunOwned:
                continue
            except (BudgetExceededException, AttemptsExhausted, RunClosed):
                left.remove(run_id)
    note("ended")
