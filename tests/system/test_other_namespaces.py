"""Owners in other pid namespaces, as containers that share a volume are: death is proved by the kernel, not by a number."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger, Effect, RunOwned
from support.processes import child
from support.witness import Witness

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
LONG_LEASE = 600.0

OWNER = """
import os
from pathlib import Path
from support.witness import Witness
database, witness = arguments[0], Witness(Path(arguments[1]))
ledger = AgentRunLedger(database, durability="process", lease_seconds=600)
tell(os.getpid())
try:
    ledger.create_run("shared", "r")
except RunOwned:
    tell("RunOwned")
    sys.exit()
def work(number):
    witness.note("call", number=number)
    if number == hangs:
        tell("in flight")
        hear()
    return number
hangs = hear()
for number in range(3):
    ledger.execute_step("r", "work", {"number": number}, work, effect=Effect.READ)
ledger.finish_run("r")
tell("finished")
"""


def only_child_of(pid: int) -> int:
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found)


@pytest.mark.system("unshare")
def test_the_run_of_an_owner_killed_in_another_pid_namespace_goes_on_at_once_in_a_third(tmp_path: Path) -> None:
    database, witness = tmp_path / "agent.db", Witness(tmp_path / "witness")
    with child(OWNER, database, witness.path, prefix=NAMESPACE) as owner:
        assert owner.hear() == 1
        owner.tell(1)
        assert owner.hear() == "in flight"
        with child(OWNER, database, witness.path, prefix=NAMESPACE) as other:
            assert other.hear() == 1  # the owner's own number, which says nothing here
            assert other.hear() == "RunOwned"
        with AgentRunLedger(database) as here, pytest.raises(RunOwned):
            here.resume_run("r")
        os.kill(only_child_of(owner.pid), signal.SIGKILL)
        owner.ends()
    with child(OWNER, database, witness.path, prefix=NAMESPACE) as taker:
        assert taker.hear() == 1
        taker.tell(None)
        assert taker.hear() == "finished"  # ten minutes later, if it waited for the lease
        assert taker.ends() == 0
    assert [note["number"] for note in witness.notes("call")] == [0, 1, 1, 2]
    with AgentRunLedger(database) as ledger:
        assert ledger.get_run("r").status == "COMPLETED"
        assert ledger.verify().findings == []


@pytest.mark.system("unshare")
def test_an_owner_killed_here_is_known_to_be_dead_in_another_pid_namespace(tmp_path: Path) -> None:
    database, witness = tmp_path / "agent.db", Witness(tmp_path / "witness")
    with child(OWNER, database, witness.path) as owner:
        assert owner.hear() == owner.pid
        owner.tell(2)
        assert owner.hear() == "in flight"
        owner.kill()
    with child(OWNER, database, witness.path, prefix=NAMESPACE) as taker:
        assert taker.hear() == 1
        taker.tell(None)
        assert taker.hear() == "finished"
    assert [note["number"] for note in witness.notes("call")] == [0, 1, 2, 2]
    with AgentRunLedger(database) as ledger:
        assert [step.effect for step in ledger.steps("r")] == [Effect.READ] * 3
