"""The same steps on chowki: a workflow that calls a step, which claims a key, calls the function, records its result and the state."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import version

import chowki
from chowki.guardrails import GuardrailConfig
from talk import INVOICE, OUTPUT, introduce, serve, timed


@chowki.step
def fetch_invoice(invoice_id: str, n: int) -> dict[str, object]:
    return OUTPUT


@chowki.workflow
def agent() -> str:
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        fetch_invoice(INVOICE, number)

    serve({"steps": lambda count: timed(step, count)})
    return "done"


def main(place: str) -> None:
    warnings.simplefilter("ignore")
    # nothing but the limit of 25 steps is another than it comes with
    guardrails = GuardrailConfig(max_steps_per_run=10**9)
    chowki.configure(db_path=place, resume_secret=b"benchmark" * 4, guardrails=guardrails)
    introduce(f"chowki {version('chowki')}", "WAL, synchronous=NORMAL: survives the process")
    agent(run_id="benchmark")


if __name__ == "__main__":
    main(sys.argv[1])
