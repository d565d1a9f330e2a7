"""The two programs that were published, as they were written, apart from the functions that they call out to."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import environment

PIPELINE = """
from agent_run_ledger import RunLedger, Step, LoopDetectorPolicy

ledger = RunLedger(
    run_id="financial-audit-pipeline-2026",
    db_path="./runs.db",
    policy=LoopDetectorPolicy(max_repetitions=3, threshold=0.92),
)

@ledger.step(name="fetch_quarterly_data")
def fetch_data(company_id: str):
    return api.get_financials(company_id)

@ledger.step(name="synthesize_report", depends_on=["fetch_quarterly_data"])
def synthesize_report(data: dict):
    return llm.generate(data)

result = ledger.execute(company_id="acme-corp")
"""

AGENT = """
from agent_run_ledger import AgentRunLedger

ledger = AgentRunLedger(db_path="production_agent.db", max_steps=30, loop_threshold=3)
run_id = ledger.create_run(goal="Reconcile October invoices")
"""

STEP = """
ledger.execute_step(
    run_id=run_id,
    tool_name="fetch_invoice",
    arguments={"invoice_id": "INV-109"},
    execution_fn=lambda: fetch_invoice("INV-109"),
)
"""

WORLD = """
import json, os, signal, sys, warnings

def note(*words):
    fd = os.open("witness", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(words).encode() + b"\\n")
    os.close(fd)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def tell(value):
    sys.stdout.write(json.dumps(value) + "\\n")
"""


class World:
    """A folder in which programs are run, and what they called out to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *parts: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WORLD + "\n".join(parts)]
        return subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=100)

    def succeed(self, *parts: str) -> Any:
        done = self.run(*parts)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def calls(self) -> list[list[Any]]:
        witness = self.folder / "witness"
        return [json.loads(line) for line in witness.read_text().splitlines()] if witness.exists() else []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


FETCH = """
class api:
    def get_financials(company):
        note("fetch", company)
        return {"company": company, "revenue": [1, 2.5]}
"""
DYING = """
class llm:
    def generate(data):
        note("report", data)
        die()
"""
FAILING = """
class llm:
    def generate(data):
        note("report", data)
        raise ConnectionError("the model is away")
"""
WORKING = """
class llm:
    def generate(data):
        note("report", data)
        return "the report of " + data["company"]
"""
DATA = {"company": "acme-corp", "revenue": [1, 2.5]}


@pytest.mark.parametrize(("ending", "code"), [(DYING, -signal.SIGKILL), (FAILING, 1)], ids=["killed", "exception"])
def test_the_pipeline_goes_on_at_the_step_in_which_it_was_left(world: World, ending: str, code: int) -> None:
    left = world.run(FETCH, ending, PIPELINE)
    assert left.returncode == code
    if code == 1:
        assert "StepFailed: Tool execution failed: ConnectionError: the model is away" in left.stderr
    assert world.calls() == [["fetch", "acme-corp"], ["report", DATA]]
    assert world.succeed(FETCH, WORKING, PIPELINE, "tell(result)") == "the report of acme-corp"
    assert world.calls() == [["fetch", "acme-corp"], ["report", DATA], ["report", DATA]]
    assert world.succeed(FETCH, WORKING, PIPELINE, "tell(result)") == "the report of acme-corp"
    assert len(world.calls()) == 3


def test_the_pipeline_is_killed_twice_and_still_calls_its_first_step_once(world: World) -> None:
    for _ in range(2):
        assert world.run(FETCH, DYING, PIPELINE).returncode == -signal.SIGKILL
    world.succeed(FETCH, WORKING, PIPELINE, "tell(result)")
    assert [call[0] for call in world.calls()] == ["fetch", "report", "report", "report"]
    with sqlite3.connect(world.folder / "runs.db") as connection:
        (step,) = connection.execute("SELECT count(DISTINCT idempotency_key) FROM run_steps GROUP BY run_id").fetchall()
    assert step == (2,)


FETCH_INVOICE = """
def fetch_invoice(invoice):
    note("fetch_invoice", invoice)
    return {"invoice": invoice, "total": 120}
"""
REFUSED = """
try:
    {step}
except {error} as error:
    tell([type(error).__name__, str(error)])
"""


def indented(step: str) -> str:
    return step.strip().replace("\n", "\n    ")


def test_the_agents_tool_that_fails_raises_runtime_error(world: World) -> None:
    failing = 'def fetch_invoice(invoice):\n    raise ValueError("no invoice " + invoice)'
    refused = REFUSED.format(step=indented(STEP), error="RuntimeError")
    kind, text = world.succeed(failing, AGENT, refused)
    assert (kind, text) == ("StepFailed", "Tool execution failed: ValueError: no invoice INV-109")


def test_the_agents_fourth_equal_call_is_refused_before_it_is_executed_and_for_every_other_process(
    world: World,
) -> None:
    imports = "from agent_run_ledger import RunawayLoopException, RunClosed"
    refused = REFUSED.format(step=indented(STEP), error="RunawayLoopException")
    kind, text = world.succeed(FETCH_INVOICE, AGENT, imports, STEP * 3, refused)
    assert kind == "RunawayLoopDetectedException"
    assert "3 times in a row" in text
    assert world.calls() == [["fetch_invoice", "INV-109"]] * 3

    run_id = only_run(world)
    known = f"run_id = {run_id!r}\nledger.resume_run(run_id)"
    look = "tell([ledger.get_run(run_id).status, len(ledger.steps(run_id))])"
    assert world.succeed(FETCH_INVOICE, ledger_only(), known, look) == ["DEAD_LETTER", 3]
    refused = REFUSED.format(step=indented(STEP), error="RunClosed")
    kind, text = world.succeed(FETCH_INVOICE, imports, ledger_only(), known, refused)
    assert kind == "RunClosed"
    assert "DEAD_LETTER" in text
    assert len(world.calls()) == 3


def test_the_agents_31st_step_is_refused_before_it_is_executed_and_for_every_other_process(world: World) -> None:
    imports = "from agent_run_ledger import BudgetExceededException, RunClosed"
    step = STEP.replace('"INV-109"', "number")
    loop = "for number in range(30):\n    " + indented(step)
    refused = REFUSED.format(step=indented(step.replace("number", "30")), error="BudgetExceededException")
    kind, text = world.succeed(FETCH_INVOICE, AGENT, imports, loop, refused)
    assert kind == "BudgetExceededException"
    assert "30 steps" in text
    assert world.calls() == [["fetch_invoice", number] for number in range(30)]

    known = f"run_id = {only_run(world)!r}\nledger.resume_run(run_id)"
    refused = REFUSED.format(step=indented(step.replace("number", "31")), error="RunClosed")
    kind, text = world.succeed(FETCH_INVOICE, imports, ledger_only(), known, refused)
    assert kind == "RunClosed"
    assert "DEAD_LETTER" in text
    assert len(world.calls()) == 30


def test_the_agent_that_was_killed_is_resumed_and_goes_on_at_the_frontier(world: World) -> None:
    dying = """
def fetch_invoice(invoice):
    note("fetch_invoice", invoice)
    if invoice == "INV-110":
        die()
    return {"invoice": invoice, "total": 120}
"""
    second = STEP.replace("INV-109", "INV-110")
    assert world.run(dying, AGENT, STEP, second).returncode == -signal.SIGKILL
    known = f"run_id = {only_run(world)!r}\nrecords = ledger.resume_run(run_id)"
    told = "tell([[r.tool_name, r.step_number, r.state, r.output_json] for r in records])"
    records = world.succeed(FETCH_INVOICE, ledger_only(), known, "warnings.simplefilter('ignore')", second, told)
    assert records == [
        ["fetch_invoice", 1, "COMPLETED", '{"invoice":"INV-109","total":120}'],
        ["fetch_invoice", 2, "RUNNING", None],
    ]
    assert [call[1] for call in world.calls()] == ["INV-109", "INV-110", "INV-110"]
    (status,) = rows(world, "SELECT status FROM agent_step_journal WHERE step_index = 2")
    assert status == ("committed",)


def ledger_only() -> str:
    return AGENT.replace('run_id = ledger.create_run(goal="Reconcile October invoices")', "")


def rows(world: World, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(world.folder / "production_agent.db")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def only_run(world: World) -> str:
    ((run_id, goal),) = rows(world, "SELECT run_id, goal FROM agent_runs")
    assert goal == "Reconcile October invoices"
    return str(run_id)
