"""`recover`, on the command line: which ledger a module makes, what comes of its runs, and how the command ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger
from support.processes import child, environment
from support.shell import Shell


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, in which the modules of a test lie; what is imported from it is forgotten again."""
    known, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]
    sys.path[:] = path


# --- which ledger -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        ("", "nowhere", "there is no module 'nowhere' in this folder"),
        ("", "nowhere.below", "there is no module 'nowhere.below' in this folder"),
        ("", "app.below", "there is no module 'app.below'"),
        ("", "app.py", "'app.py' is a file: give the module, 'app'"),
        ("", "./jobs/app.py", "give the module, 'jobs.app'"),
        ("", "a\x1b[31m\nb", "is no name of a module"),
        ("", "", "is no name of a module"),
        ("", "app", "module 'app' has no AgentRunLedger at its top level"),
        ("", "app:ledger", "module 'app' has no 'ledger'"),
        ("ledger = 5", "app:ledger", "app:ledger is no AgentRunLedger but a int"),
        ("import nowhere", "app", "module 'app' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("1 / 0", "app", "module 'app' cannot be imported: ZeroDivisionError: division by zero"),
        ("(", "app", "module 'app' cannot be imported: SyntaxError"),
        ("import sys; sys.exit('needs a token')", "app", "module 'app' cannot be imported: SystemExit: needs a token"),
        ("one, two = (AgentRunLedger(f'{n}.db') for n in 'ab')", "app", "say which, like app:one; they are one, two"),
        ("pipe = RunLedger('run', 'a.db')", "app", "pipe is a pipeline: run its program again"),
    ],
)
def test_a_module_without_the_one_ledger_is_one_safe_line(
    shell: Shell, folder: Path, module: str, given: str, said: str
) -> None:
    (folder / "app.py").write_text(f"from agent_run_ledger import AgentRunLedger, RunLedger\n{module}\n")
    assert said in shell.refused("recover", given)


def test_where_an_import_fails_is_named(shell: Shell, folder: Path) -> None:
    (folder / "app.py").write_text("import settings\n")
    (folder / "settings.py").write_text("\n\nport = int('many')\n")
    assert "settings.py, line 3)" in shell.refused("recover", "app")


# --- what comes of the runs -------------------------------------------------------------------------------------------

APP = """
import asyncio, os, sys
from agent_run_ledger import AgentRunLedger, Effect, Receipt, current_run

ledger = AgentRunLedger("agent.db")
is_ill = "ILL" in os.environ  # the process that begins the runs dies in their tools

def came(what):
    with open("witness", "a") as file:
        file.write(what + "\\n")
    if is_ill:
        os._exit(9)
    return what

@ledger.tool(effect=Effect.READ)
def look(number: int) -> str:
    return came(f"look {number}")

@ledger.tool(effect=Effect.MUTATE)
def pay(number: int) -> str:
    return came(f"pay {number}")

@ledger.tool(effect=Effect.MUTATE, receipt=lambda key, arguments: Receipt.found("paid before"))
def charge(number: int) -> str:
    return came(f"charge {number}")

@ledger.tool(effect=Effect.READ)
async def alook(number: int) -> str:
    return came(f"alook {number}")

@ledger.agent()
def looks(number: int) -> str:
    return look(number)

@ledger.agent()
async def alooks(number: int) -> str:
    return await alook(number)

@ledger.agent()
def pays(number: int) -> str:
    return pay(number)

@ledger.agent()
def charges(number: int) -> str:
    return charge(number)

@ledger.agent()
def asks(number: int) -> str:
    look(number)
    return current_run().approve("go on", {"number": number}).by

@ledger.agent()
def sleeps(number: int) -> str:
    look(number)
    current_run().sleep(86_400.0)

@ledger.agent()
def leaves(number: int) -> str:
    look(number)
    raise SystemExit(0)

@ledger.agent()
def fails(number: int) -> str:
    look(number)
    raise RuntimeError("no money left\\x1b[31m")
"""


def interrupted(folder: Path, *agents: str) -> None:
    """Runs of these agents, each of which died in its first tool with its process. Their ids are the agents' names."""
    (folder / "app.py").write_text(APP)
    for agent in agents:
        script = f"import app; app.ledger.run(app.{agent}, 7, run_id={agent!r})"
        died = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment() | {"ILL": "1"}, check=False)
        assert died.returncode == 9
    (folder / "witness").write_text("")


def recover(shell: Shell, *more: str) -> tuple[int, str, str]:
    """What the command does in a process that has not imported the program yet."""
    sys.modules.pop("app", None)
    return shell("recover", "app", *more)


def witnessed(folder: Path) -> list[str]:
    return (folder / "witness").read_text().splitlines()


def test_interrupted_runs_are_gone_on_with_and_told_of(shell: Shell, folder: Path) -> None:
    interrupted(folder, "looks", "alooks", "charges")
    status, out, err = recover(shell)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "3 runs ended, no runs left waiting"
    assert [line.split()[:2] for line in out.splitlines()[3:]] == [
        ["looks", "COMPLETED"],
        ["alooks", "COMPLETED"],
        ["charges", "COMPLETED"],
    ]
    assert witnessed(folder) == ["look 7", "alook 7"]
    status, out, _ = recover(shell, "--json")
    assert (status, json.loads(out)) == (0, {"ok": True, "ended": [], "waiting": [], "needs_somebody": []})


def test_what_the_program_prints_does_not_come_between_the_json(shell: Shell, folder: Path) -> None:
    interrupted(folder, "looks")
    (folder / "app.py").write_text(
        APP.replace("def came(what):", "print('imported')\ndef came(what):\n    print('in a tool')")
    )
    status, out, err = recover(shell, "--json")
    assert (status, [each["run_id"] for each in json.loads(out)["ended"]]) == (0, ["looks"])
    assert err == "imported\nin a tool\n"


def test_what_waits_by_plan_is_well_and_told_of(shell: Shell, folder: Path) -> None:
    interrupted(folder, "asks", "sleeps")
    status, out, _ = shell("recover", "app:ledger")
    assert status == 0
    assert "no runs ended, 2 runs left waiting" in out
    assert "waits for somebody to approve 'go on'" in out
    assert "waits for its time, " in out
    found = json.loads(recover(shell, "--json")[1])
    assert [(each["run_id"], each["waits_for"][0]["kind"]) for each in found["waiting"]] == [
        ("asks", "approval"),
        ("sleeps", "time"),
    ]
    assert (found["ok"], found["needs_somebody"]) == (True, [])


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("pays", "somebody who says whether step 1 ('pay') took effect"),
        ("fails", "its program, which was left by RuntimeError: no money left\\x1b[31m"),
    ],
)
def test_a_run_that_needs_a_person_is_a_problem(shell: Shell, folder: Path, agent: str, said: str) -> None:
    interrupted(folder, "looks", agent)
    status, out, err = recover(shell)
    assert (status, err) == (1, "")
    assert "1 run ended, 1 run left waiting" in out
    assert said in " ".join(out.split())
    assert "! a person has to look" in out
    assert json.loads(recover(shell, "--json")[1])["needs_somebody"] == [agent]
    assert "pay 7" not in witnessed(folder)


def test_an_agent_that_ends_the_process_is_an_error_and_comes_last_the_next_time(shell: Shell, folder: Path) -> None:
    interrupted(folder, "leaves", "looks")
    status, out, err = recover(shell)
    assert (status, out) == (1, "")
    assert "an agent ended the process with status 0" in err
    assert "look 7" in witnessed(folder)
    assert recover(shell)[0] == 1
    with AgentRunLedger.open_read_only(folder / "agent.db") as ledger:
        assert {run.run_id: run.status for run in ledger.runs()} == {"leaves": "BLOCKED", "looks": "COMPLETED"}


def test_a_run_of_another_program_is_left_alone_and_told_of(shell: Shell, folder: Path) -> None:
    interrupted(folder)
    with AgentRunLedger(folder / "agent.db") as ledger:
        ledger.create_run("driven step by step", run_id="others")
    status, out, _ = recover(shell)
    assert status == 1
    assert "waits for its program" in out
    with AgentRunLedger.open_read_only(folder / "agent.db") as ledger:
        assert ledger.get_run("others").status == "PENDING"


def test_a_run_that_ended_badly_is_a_problem(shell: Shell, folder: Path) -> None:
    (folder / "app.py").write_text(APP.replace('AgentRunLedger("agent.db")', 'AgentRunLedger("agent.db", max_steps=1)'))
    app = (folder / "app.py").read_text()
    interrupted(folder, "asks")
    (folder / "app.py").write_text(app)
    status, out, _ = recover(shell)
    assert status == 1
    assert out.startswith("1 run ended, no runs left waiting")
    assert "DEAD_LETTER" in out


# --- signals ----------------------------------------------------------------------------------------------------------

ENDLESS = """
import asyncio, sys
from agent_run_ledger import AgentRunLedger, Effect
ledger = AgentRunLedger("agent.db")

@ledger.tool(effect=Effect.READ)
def stand() -> None:
    print('"in the tool"', flush=True)
    sys.stdin.readline()

@ledger.tool(effect=Effect.READ)
async def astand() -> None:
    print('"in the tool"', flush=True)
    await asyncio.sleep(3600)

@ledger.agent()
def stands() -> None:
    stand()

@ledger.agent()
async def astands() -> None:
    await astand()
"""

RECOVER = """
import os
from agent_run_ledger.cli import main
os.chdir(arguments[0])
sys.exit(main(["recover", "app"]))
"""


ASLEEP = """
import signal, threading
from agent_run_ledger import AgentRunLedger, Effect

ledger = AgentRunLedger("agent.db")

@ledger.tool(effect=Effect.READ)
def stand() -> None:
    def send() -> None:
        print('"in the tool"', flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    if IS_RECOVERED:
        threading.Timer(0.5, send).start()
    else:
        print('"in the tool"', flush=True)
    threading.Event().wait()

@ledger.agent()
def stands() -> None:
    stand()
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_that_does_not_wake_the_main_thread_ends_recovery_all_the_same(
    folder: Path, number: str, status: int
) -> None:
    (folder / "app.py").write_text(ASLEEP.replace("IS_RECOVERED", "False"))
    begin = "import os; os.chdir(arguments[0]); sys.path.insert(0, ''); import app; app.ledger.run(app.stands, run_id='run')"
    with child(begin, folder) as first:
        assert first.hear() == "in the tool"
        first.kill()
    (folder / "app.py").write_text(ASLEEP.replace("IS_RECOVERED", "True").replace("SIGTERM", number))
    with child(RECOVER, folder) as recovery:
        assert recovery.hear() == "in the tool"
        assert recovery.ends() == status
    with AgentRunLedger.open_read_only(folder / "agent.db") as ledger:
        assert ledger.get_run("run").owner is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("agent", ["stands", "astands"])
def test_a_signal_ends_recovery_in_good_order(folder: Path, agent: str, number: signal.Signals, status: int) -> None:
    (folder / "app.py").write_text(ENDLESS)
    begin = f"import os; os.chdir(arguments[0]); sys.path.insert(0, ''); import app; app.ledger.run(app.{agent}, run_id='run')"
    with child(begin, folder) as first:
        assert first.hear() == "in the tool"
        first.kill()
    with child(RECOVER, folder) as recovery:
        assert recovery.hear() == "in the tool"
        recovery.send(number)
        assert recovery.ends() == status
    with AgentRunLedger.open_read_only(folder / "agent.db") as ledger:
        record = ledger.get_run("run")
        assert record.owner is None, "its lease was given back"
        assert ledger.verify().ok
    assert sorted(each for each in os.listdir(folder / "agent.db.owners")) == []
