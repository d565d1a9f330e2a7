"""What strace saw of the disk: nothing is dispatched before its intent is on stable storage, nothing returned before its outcome is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import environment

TRACED = "trace=openat,open,creat,rename,renameat,renameat2,fdatasync,fsync,write,pwrite64,pwritev"

STEPS = """
import os, sys
from agent_run_ledger import *

marker = os.open("marker", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def say(word):
    os.write(marker, (word + "\\n").encode())

durability, effect = sys.argv[1], sys.argv[2]
ledger = AgentRunLedger("agent.db", durability=durability)
run_id = ledger.create_run("goal")
say("created")
for number in range(3):
    say("asked")
    options = {} if effect == "undeclared" else {"effect": Effect[effect]}
    ledger.execute_step(run_id, "work", {"number": number}, lambda: say("called") or say("done"), **options)
    say("returned")
ledger.finish_run(run_id)
say("finished")
ledger.close()
with AgentRunLedger("agent.db", durability=durability) as ledger:
    assert ledger.resume_run(run_id)
    assert ledger.verify().ok
"""


class Trace:
    """The traced calls of a process and its threads, in order: what is written and synced, and the words in between."""

    def __init__(self, folder: Path, script: str, *arguments: str) -> None:
        self.folder = folder
        path = folder / "trace"
        command = ["strace", "-f", "-y", "-qq", "-s", "16", "-e", TRACED, "-o", str(path), sys.executable, "-c", script]
        subprocess.run([*command, *arguments], cwd=folder, env=environment(), check=True, timeout=100)
        self.calls = path.read_text(encoding="utf-8", errors="replace").splitlines()
        self.events = [event for call in self.calls if (event := self._event(call))]

    def _event(self, call: str) -> str:
        if word := re.search(r'write\(\d+<[^>]*/marker>, "(\w+)\\n"', call):
            return word[1]
        if re.search(r"p?writev?(64)?\(\d+<[^>]*/agent\.db-wal>", call):
            return "WRITE"
        if re.search(r"f(data)?sync\(\d+<[^>]*/agent\.db-wal>\) += 0", call):
            return "SYNC"
        if re.search(rf"f(data)?sync\(\d+<{re.escape(str(self.folder))}>\) += 0", call):
            return "SYNC FOLDER"
        return ""

    def between(self, first: str, last: str) -> list[list[str]]:
        """What happened between each `first` and the `last` that follows it, repeated writes told once."""
        found: list[list[str]] = []
        inside: list[str] | None = None
        for event in self.events:
            if event == first:
                inside = []
            elif event == last and inside is not None:
                found.append(inside)
                inside = None
            elif inside is not None and inside[-1:] != [event]:
                inside.append(event)
        return found


@pytest.mark.system("strace")
@pytest.mark.parametrize("effect", ["undeclared", "IDEMPOTENT", "MUTATE"])
def test_intent_and_outcome_are_on_stable_storage_before_the_dispatch_and_the_return(
    effect: str, tmp_path: Path
) -> None:
    trace = Trace(tmp_path, STEPS, "full", effect)
    assert trace.between("asked", "called") == [["WRITE", "SYNC"]] * 3
    assert trace.between("called", "done") == [[]] * 3
    assert trace.between("done", "returned") == [["WRITE", "SYNC"]] * 3
    assert [events[:2] for events in trace.between("returned", "finished")] == [["WRITE", "SYNC"]]


@pytest.mark.system("strace")
def test_the_intent_of_a_step_without_side_effects_is_not_synced_and_its_outcome_is(tmp_path: Path) -> None:
    trace = Trace(tmp_path, STEPS, "full", "READ")
    assert trace.between("asked", "called") == [["WRITE"]] * 3
    assert trace.between("done", "returned") == [["WRITE", "SYNC"]] * 3


@pytest.mark.system("strace")
def test_durability_of_the_process_writes_every_step_and_syncs_only_the_run_and_its_end(tmp_path: Path) -> None:
    trace = Trace(tmp_path, STEPS, "process", "undeclared")
    assert trace.between("asked", "called") == [["WRITE"]] * 3
    assert trace.between("done", "returned") == [["WRITE"]] * 3
    assert [events[:2] for events in trace.between("returned", "finished")] == [["WRITE", "SYNC"]]
    before_created = trace.events[: trace.events.index("created")]
    assert before_created[-1] == "SYNC"


@pytest.mark.system("strace")
def test_the_folder_is_synced_when_the_log_is_made_so_that_the_log_is_there_after_a_power_cut(tmp_path: Path) -> None:
    trace = Trace(tmp_path, STEPS, "full", "undeclared")
    before_created = trace.events[: trace.events.index("created")]
    assert "SYNC FOLDER" in before_created[before_created.index("WRITE") :]


def opened(trace: Trace) -> list[str]:
    """Every opening of the database, its log and its index."""
    return [call for call in trace.calls if re.search(r'open(at)?\(.*"[^"]*agent\.db(-wal|-shm|-journal)?"', call)]


@pytest.mark.system("strace")
def test_nobody_opens_the_database_beside_sqlite(tmp_path: Path) -> None:
    calls = opened(Trace(tmp_path, STEPS, "full", "undeclared"))
    assert len(calls) >= 4
    # SQLite opens with O_NOFOLLOW, Python does not; closing a descriptor of our own would drop SQLite's locks
    assert [call for call in calls if "O_NOFOLLOW" not in call] == []


@pytest.mark.system("strace")
def test_the_witness_sees_who_opens_the_database_beside_sqlite(tmp_path: Path) -> None:
    calls = opened(Trace(tmp_path, f"{STEPS}\nopen('agent.db', 'rb').close()\n", "full", "undeclared"))
    assert len([call for call in calls if "O_NOFOLLOW" not in call]) == 1
