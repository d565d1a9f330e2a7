"""The demo's agent: an ordinary loop of a model and its tools, over the ledger. Nothing in it knows of any crash."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_run_ledger import AgentRunLedger, Effect, LedgerError, Run, StepFailed
from agent_run_ledger.demo.models import Message, Model, chosen
from agent_run_ledger.demo.tools import MONTH, Tools
from agent_run_ledger.demo.witness import Witness

RUN_ID = f"reconcile-{MONTH}"
GOAL = f"Reconcile the invoices of {MONTH}"
MAX_STEPS = 120
LEASE_SECONDS = 3600.0
"""Longer than the demo waits for anything: it shows that a dead owner's lease is not waited for."""
INSTRUCTIONS = f"""You are a bookkeeper. Reconcile the open invoices of {MONTH} with the bank statement.
List the open invoices and read the bank statement first. Then take the invoices one by one, with one tool call at a time: \
read it, find its match, and post an entry if it was paid. A payment that is a little short was reduced by bank charges: post the \
charges too. Book each invoice at most once. At the end, without any tool call, sum up what is booked and what a person has to look at."""


class Agent:
    """A model and its tools in a loop: ask the model, do what it says, tell it what came of it, until it is done."""

    def __init__(self, run: Run, model: Model, tools: Tools, witness: Witness) -> None:
        self._run = run
        self._model = model
        self._tools = tools.by_name()
        self._witness = witness

    def reconcile(self) -> str:
        """Returns what the model says at the end."""
        messages: list[Message] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"Please reconcile {MONTH}."},
        ]
        while True:
            answer = self._step("call_model", {"model": self._model.name, "messages": messages}, self._ask, Effect.READ)
            message = answer["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            messages += [self._answer(call) for call in message["tool_calls"]]

    def _ask(self, model: str, messages: list[Message]) -> dict[str, Any]:
        self._witness.saw("call_model")
        return self._model(model, messages)

    def _answer(self, call: dict[str, Any]) -> Message:
        return {"role": "tool", "tool_call_id": call["id"], "content": self._act(call["function"])}

    def _act(self, asked: dict[str, Any]) -> str:
        """Do what the model asks for. It is told what goes wrong, too, and may do better."""
        try:
            function, effect = self._tools[asked["name"]]
            return json.dumps(self._step(asked["name"], json.loads(asked["arguments"]), function, effect))
        except (StepFailed, KeyError, ValueError, TypeError) as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    def _step(self, tool: str, arguments: dict[str, Any], function: Callable[..., Any], effect: Effect) -> Any:
        made = self._witness.calls
        outcome = self._run.step(tool, arguments, function, effect=effect)
        about = "" if tool == "call_model" else str(next(iter(arguments.values()), ""))
        sys.stdout.write(json.dumps({"tool": tool, "about": about, "is_replayed": self._witness.calls == made}) + "\n")
        sys.stdout.flush()
        return outcome


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    for name, meaning in (
        ("--ledger", "the ledger's file"),
        ("--data", "the folder with the CSV files"),
        ("--service", "the address of the bookkeeping service"),
        ("--witness", "the file in which each call leaves a line"),
    ):
        parser.add_argument(name, required=True, help=meaning)
    given = parser.parse_args()
    witness = Witness(Path(given.witness))
    witness.began(began)
    try:
        tools = Tools(Path(given.data), given.service, witness)
        ledger = AgentRunLedger(given.ledger, max_steps=MAX_STEPS, loop_threshold=3, lease_seconds=LEASE_SECONDS)
        with ledger, ledger.open_run(GOAL, run_id=RUN_ID) as run:
            run.result = Agent(run, chosen(), tools, witness).reconcile()
    except (LedgerError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
