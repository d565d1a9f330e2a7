"""A step that kills its process is tried a few times and no more, its run is a dead letter with its trace, and other runs go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from support.processes import child
from support.witness import Witness

ATTEMPTS = 3
DEFAULT_ATTEMPTS = 4

PROCESS = """
import asyncio, os, signal, threading, warnings
from agent_run_ledger import Receipt
from pathlib import Path
from support.witness import Witness

folder, effect, is_async, attempts = Path(arguments[0]), arguments[1], arguments[2] == "async", int(arguments[3])
warnings.simplefilter("ignore", UndeclaredEffectWarning)
witness = Witness(folder / "witness")
# A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
ledger = AgentRunLedger(folder / "agent.db", durability="process", lease_seconds=600)
declared = {"retry": RetryPolicy(max_attempts=attempts, base=0, cap=0)} if attempts else {}
if effect == "receipt":
    declared["receipt"] = lambda key, given: Receipt.absent()
elif effect != "undeclared":
    declared["effect"] = effect
is_feast = False
seated, may_eat = threading.Semaphore(0), threading.Event()

def swallow(what):
    step = current_step()
    witness.note("call", what=what, key=step.idempotency_key, attempt=step.attempt, pid=os.getpid())
    if what.startswith("poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return what

async def aswallow(what):
    return swallow(what)

bite = ledger.tool(name="swallow", **declared)(aswallow if is_async else swallow)

@ledger.tool(effect="READ")
def taste(what):
    witness.note("tasted", what=what)
    if is_feast:
        seated.release()
        may_eat.wait()
        if what != "poison":
            threading.Event().wait()  # whoever kills the process interrupts this one here
    return what

def meal(what):
    return bite(taste(what))

async def ameal(what):
    return await bite(taste(what))

agent = ledger.agent(name="meal")(ameal if is_async else meal)
order = hear()
if order == "recover":
    tell(ledger.recover())
elif order == "step":
    try:
        ledger.create_run("by steps", "poison")
        call = {"what": "poison"}
        if is_async:
            asyncio.run(ledger.aexecute_step("poison", "swallow", call, aswallow, **declared))
        ledger.execute_step("poison", "swallow", call, swallow, **declared)
    except LedgerError as error:
        tell(type(error).__name__)
else:
    is_feast = True
    for guest in order:
        threading.Thread(target=ledger.run, args=(agent, guest), kwargs={"run_id": guest}, daemon=True).start()
        seated.acquire()
    may_eat.set()
    threading.Event().wait()
ledger.close()
"""


class Table:
    """Processes that share a ledger, one after the other."""

    def __init__(self, folder: Path, effect: str, way: str, attempts: int = ATTEMPTS) -> None:
        self._arguments = (folder, effect, way, attempts)
        self.folder = folder

    def live(self, order: Any) -> Any:
        """One process. What it says; None where it was killed."""
        with child(PROCESS, *self._arguments) as process:
            process.tell(order)
            assert process.process.stdout is not None
            line = process.process.stdout.readline()
            if line:
                return json.loads(line)
            assert process.ends() == -signal.SIGKILL
            return None

    def deaths(self, order: Any) -> int:
        """How many processes die of this order, before one comes to its end."""
        deaths = 0
        while (said := self.live(order)) is None:
            deaths += 1
            assert deaths < 20
        self.said = said
        return deaths

    def calls(self, what: str) -> list[dict[str, Any]]:
        return [note for note in Witness(self.folder / "witness").notes("call") if note["what"] == what]


def expect_a_dead_letter(table: Table, run_id: str, attempts: int = ATTEMPTS) -> None:
    """Its step was tried so often, with one key, each time by another process; and its trace says so."""
    calls = table.calls(run_id)
    assert [call["attempt"] for call in calls] == list(range(1, attempts + 1))
    assert len({call["key"] for call in calls}) == 1
    assert len({call["pid"] for call in calls}) == attempts
    with AgentRunLedger.open_read_only(table.folder / "agent.db") as ledger:
        record = ledger.get_run(run_id)
        assert record.status == "DEAD_LETTER"
        assert record.cause is not None
        assert f"dispatched {attempts} times" in record.cause
        assert record.owner is None
        lines = ledger.trace(run_id)
        dispatched = [line for line in lines if line.event == "dispatched" and line.tool_name == "swallow"]
        assert [line.attempt for line in dispatched] == list(range(1, attempts + 1))
        assert lines[-1].event == "dead letter"
        assert lines[-1].seq > dispatched[-1].seq
        assert f"dispatched {attempts} times" in lines[-1].text
        assert ledger.steps(run_id)[-1].state == "DEAD_LETTER"
        assert run_id in [dead.run_id for dead in ledger.dead_letters()]
        assert ledger.verify().findings == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("effect", ["READ", "IDEMPOTENT", "undeclared", "receipt"])
def test_a_step_that_kills_its_process_is_tried_max_attempts_times_and_the_other_runs_go_on(
    effect: str, way: str, tmp_path: Path
) -> None:
    table = Table(tmp_path, effect, way)
    assert table.live(["poison", "bread", "wine"]) is None
    assert table.deaths("recover") == ATTEMPTS - 1
    assert sorted(table.said) == ["bread", "poison", "wine"]
    expect_a_dead_letter(table, "poison")
    with AgentRunLedger.open_read_only(tmp_path / "agent.db") as ledger:
        for run_id in ("bread", "wine"):
            assert (ledger.get_run(run_id).status, ledger.get_run(run_id).result) == ("COMPLETED", run_id)
            assert len(table.calls(run_id)) == 1
    assert table.live("recover") == []
    assert len(table.calls("poison")) == ATTEMPTS


@pytest.mark.slow
def test_several_poisoned_runs_kill_as_many_processes_as_their_attempts_and_no_more(tmp_path: Path) -> None:
    table = Table(tmp_path, "READ", "sync")
    guests = ["poison", "bread", "poisoned fish", "wine"]
    assert table.live(guests) is None
    assert table.deaths("recover") == 2 * ATTEMPTS - 1
    for run_id in ("poison", "poisoned fish"):
        expect_a_dead_letter(table, run_id)
    with AgentRunLedger.open_read_only(tmp_path / "agent.db") as ledger:
        assert {run.run_id: run.status for run in ledger.runs()} == {
            "poison": "DEAD_LETTER",
            "poisoned fish": "DEAD_LETTER",
            "bread": "COMPLETED",
            "wine": "COMPLETED",
        }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "async"])
def test_step_by_step_too_and_without_a_policy_as_often_as_is_the_default(way: str, tmp_path: Path) -> None:
    table = Table(tmp_path, "IDEMPOTENT", way, attempts=0)
    assert table.deaths("step") == DEFAULT_ATTEMPTS
    assert table.said == "AttemptsExhausted"
    expect_a_dead_letter(table, "poison", DEFAULT_ATTEMPTS)
    assert table.live("step") == "RunClosed"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_what_must_not_be_dispatched_twice_kills_one_process_and_its_run_is_parked(way: str, tmp_path: Path) -> None:
    table = Table(tmp_path, "MUTATE", way)
    assert table.live(["poison", "bread"]) is None
    assert table.live("recover") == ["bread"]
    assert len(table.calls("poison")) == 1
    with AgentRunLedger.open_read_only(tmp_path / "agent.db") as ledger:
        assert ledger.get_run("poison").status == "BLOCKED"
