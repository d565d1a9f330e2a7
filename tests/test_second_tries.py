"""A program that calls again what it was never told the outcome of: the second call is the first one, whenever it was interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    Receipt,
    StepFailed,
    StepInDoubt,
    UndeclaredEffectWarning,
    current_run,
    current_step,
)

TURNS = range(14)


class Outside:
    """A receiver that does what it is sent, each time, and knows by which key."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def act(self) -> dict[str, int]:
        self.done.append(current_step().idempotency_key)
        return {"receipt": len(self.done)}

    def ask(self, key: str, arguments: dict[str, Any]) -> Receipt:
        return Receipt.found({"receipt": self.done.index(key) + 1}) if key in self.done else Receipt.absent()


@pytest.mark.parametrize("effect", [Effect.IDEMPOTENT, Effect.MUTATE])
@pytest.mark.parametrize("durability", ["process", "full"])
@pytest.mark.parametrize("turns", TURNS)
def test_a_call_cancelled_at_any_turn_and_made_again_is_one_call(
    tmp_path: Path, turns: int, durability: Any, effect: Effect
) -> None:
    outside = Outside()
    with AgentRunLedger(tmp_path / "agent.db", durability=durability) as ledger:
        receipt = outside.ask if effect is Effect.MUTATE else None

        @ledger.tool(effect=effect, receipt=receipt)
        async def pay(amount: int) -> dict[str, int]:
            await asyncio.sleep(0)
            paid = outside.act()
            await asyncio.sleep(0)
            return paid

        @ledger.agent()
        async def agent() -> Any:
            first = asyncio.create_task(pay(5))
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()
            try:
                return await first
            except asyncio.CancelledError:
                return await pay(5)

        result = ledger.run(agent, run_id="run")
        assert len(set(outside.done)) == 1
        if effect is Effect.MUTATE:
            assert len(outside.done) == 1  # it was asked, not sent again
            assert result == {"receipt": 1}
        assert ledger.run(agent, run_id="run") == result
        assert ledger.verify().findings == []


def test_an_outcome_that_was_recorded_and_never_handed_out_is_what_the_second_call_gets(tmp_path: Path) -> None:
    outside, seen = Outside(), set()
    for turns in TURNS:
        with AgentRunLedger(tmp_path / f"{turns}.db", durability="process") as ledger:
            outside.done.clear()

            @ledger.tool(effect=Effect.IDEMPOTENT)
            async def pay(amount: int) -> dict[str, int]:
                return outside.act()

            @ledger.agent()
            async def agent(turns: int) -> Any:
                first = asyncio.create_task(pay(5))
                for _ in range(turns):
                    await asyncio.sleep(0)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                return await pay(5)

            result = ledger.run(agent, turns, run_id="run")
            events = [line.event for line in ledger.trace("run") if line.step_number is not None]
            if "missed" in events and "taken over" in events:
                seen.add(turns)
                assert outside.done == outside.done[:1]
                assert result == {"receipt": 1}
    assert seen, "no turn lies between an outcome's commit and its delivery"


@pytest.mark.parametrize("turns", TURNS)
def test_another_call_in_between_makes_no_difference(tmp_path: Path, turns: int) -> None:
    outside = Outside()
    with AgentRunLedger(tmp_path / "agent.db", durability="process") as ledger:

        @ledger.tool(effect=Effect.IDEMPOTENT)
        async def pay(amount: int) -> dict[str, int]:
            return outside.act()

        @ledger.agent()
        async def agent() -> Any:
            first = asyncio.create_task(pay(5))
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()
            (got,) = await asyncio.gather(first, return_exceptions=True)
            await current_run().step("look", {}, lambda: 1, effect=Effect.READ)
            return got if isinstance(got, dict) else await pay(5)

        assert ledger.run(agent, run_id="run")
        assert len(set(outside.done)) == 1
        assert ledger.verify().findings == []


def test_a_step_that_was_resolved_is_not_made_again_by_the_program_that_was_told_of_the_doubt(tmp_path: Path) -> None:
    calls = []

    def breaks(amount: int) -> None:
        calls.append(amount)
        raise ConnectionResetError("gone")

    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        ledger.create_run("pay", "run")
        for _ in range(2):
            with pytest.raises(StepInDoubt):
                ledger.execute_step("run", "pay", {"amount": 5}, breaks, effect=Effect.MUTATE)
        ledger.resolve("run", 1, output="paid", by="ann", reason="it is on the statement")
        assert ledger.execute_step("run", "pay", {"amount": 5}, breaks, effect=Effect.MUTATE) == "paid"
        assert calls == [5]
        with pytest.raises(StepInDoubt):  # another payment of the same amount is another payment
            ledger.execute_step("run", "pay", {"amount": 5}, breaks, effect=Effect.MUTATE)
        assert calls == [5, 5]
        assert ledger.verify().findings == []


def test_the_views_say_in_doubt_of_a_failure_that_is_in_doubt_again(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "agent.db"
    with AgentRunLedger(path) as ledger:
        ledger.create_run("pay", "run")
        with pytest.raises(Exception, match="no"):
            ledger.execute_step("run", "pay", {}, told_no, effect=Effect.MUTATE)
    with AgentRunLedger(path) as ledger:
        ledger.create_run("pay", "run")
        with pytest.raises(StepInDoubt):
            ledger.execute_step("run", "pay", {}, told_no, effect=Effect.MUTATE)
        (step,) = ledger.steps("run")
        assert (step.state, step.completed_at) == ("BLOCKED", None)
    connection = sqlite3.connect(path)
    try:
        seen = connection.execute("SELECT status FROM agent_step_journal").fetchall()
        assert seen == [("in_doubt",)]
        assert connection.execute("SELECT state, completed_at FROM run_steps").fetchall() == [("BLOCKED", None)]
    finally:
        connection.close()


def told_no() -> None:
    raise ValueError("no")


def test_a_second_try_of_an_undeclared_call_is_said_aloud(tmp_path: Path) -> None:
    keys = []

    def times_out(amount: int) -> str:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            raise TimeoutError
        return "paid"

    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        ledger.create_run("pay", "run")
        with pytest.raises(StepFailed):
            ledger.execute_step("run", "pay", {"amount": 5}, times_out)
        with pytest.warns(UndeclaredEffectWarning, match="pay"):
            assert ledger.execute_step("run", "pay", {"amount": 5}, times_out) == "paid"
        assert len(set(keys)) == 1
        assert ledger.inspect("run").redispatched == [2]
        assert ledger.verify().findings == []
