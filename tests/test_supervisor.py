"""The supervisor: what it starts again and when it gives up, how it ends, whom it waits for, and what it says of the disk."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger.cli import main
from agent_run_ledger.cli.supervise import _size
from agent_run_ledger.model import RetryPolicy
from agent_run_ledger.supervisor import MEBIBYTE, Deaths, Disk, exit_status, free_bytes, log_bytes
from support.processes import environment
from support.supervised import (
    HEARS,
    LEAVES,
    MINUTE,
    ORPHAN,
    QUICK,
    Pipe,
    Supervised,
    driven,
    python,
    rounds,
    running,
    supervised,
    words_of,
)

# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [(0, 0), (7, 7), (255, 255), (-15, 143), (-9, 137), (-2, 130)])
def test_a_program_s_end_is_told_as_a_shell_tells_it(code: int, status: int) -> None:
    assert exit_status(code) == status


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1, exclude_max=True), st.integers(1, 40))
def test_the_wait_is_drawn_from_nothing_to_the_capped_exponential(
    base: float, cap: float, draw: float, row: int
) -> None:
    deaths = Deaths(RetryPolicy(base=base, cap=cap), healthy_seconds=60, most=1000, within_seconds=0)
    waits = [deaths.wait_after(1000.0 * number, 1.0, draw) for number in range(row)]
    assert waits == [pytest.approx(draw * min(cap, base * 2**number)) for number in range(row)]


def test_a_program_that_lived_long_enough_has_the_first_wait_again() -> None:
    deaths = Deaths(RetryPolicy(base=1, cap=30), healthy_seconds=60, most=1000, within_seconds=0)
    lives = [1.0, 1.0, 59.9, 60.0, 1.0]
    assert [deaths.wait_after(100.0 * at, lived, 1.0) for at, lived in enumerate(lives)] == [1, 2, 4, 1, 2]


@given(st.lists(st.floats(0, 50), max_size=30), st.integers(1, 8), st.floats(0, 100))
def test_a_crash_loop_is_as_many_deaths_in_as_much_time(gaps: list[float], most: int, within: float) -> None:
    deaths = Deaths(RetryPolicy(base=1, cap=30), healthy_seconds=10, most=most, within_seconds=within)
    times: list[float] = []
    for gap in gaps:
        times.append((times[-1] if times else 0.0) + gap)
        gives_up = deaths.wait_after(times[-1], gap, 0.5) is None
        assert gives_up == (len([at for at in times[-most:] if times[-1] - at <= within]) == most)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("500", 500), ("64M", 64 * MEBIBYTE), ("1g", 1024**3), ("3K", 3072), ("2T", 2 * 1024**4)],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: str, count: int) -> None:
    assert _size(text) == count


# --- the disk ---------------------------------------------------------------------------------------------------------


def looks(free: Sequence[int | None], log: Sequence[int]) -> list[list[str]]:
    """The events of one look after the other, with that much free of which 100 are the least, and a log of which 50 are the most."""
    frees, logs = iter(free), iter(log)
    disk = Disk("agent.db", 100, 50, free=lambda path: next(frees), log=lambda path: next(logs))
    return [[line.event for line in disk.look()] for _ in free]


def test_little_room_is_said_once_and_so_is_room_again() -> None:
    free = [100, 99, 50, 99, 100, 109, 110, 500, 20]
    assert looks(free, [0] * 9) == [[], ["disk_low"], [], [], [], [], ["disk_ok"], [], ["disk_low"]]


def test_nothing_is_said_of_a_disk_of_which_nothing_is_known() -> None:
    assert looks([None, 10, None, 200], [0] * 4) == [[], ["disk_low"], [], ["disk_ok"]]


def test_a_long_log_is_said_once_and_so_is_a_short_one() -> None:
    assert looks([999] * 5, [50, 51, 90, 50, 0]) == [[], ["wal_long"], [], ["wal_ok"], []]


def test_the_disk_of_a_ledger_that_is_not_there_yet_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    found = free_bytes(str(tmp_path / "not" / "yet" / "agent.db"))
    assert found is not None
    assert 0 < found <= disk.f_blocks * disk.f_frsize


def test_the_log_is_that_of_the_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "agent.db")
    assert log_bytes(str(tmp_path / "link.db")) == 0
    (tmp_path / "agent.db-wal").write_bytes(bytes(1234))
    assert log_bytes(str(tmp_path / "link.db")) == 1234


def test_the_log_is_found_when_the_current_folder_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deploy"
    folder.mkdir()
    (tmp_path / "agent.db-wal").write_bytes(bytes(100))
    monkeypatch.chdir(folder)
    disk = Disk("../agent.db", 0, 50)
    folder.rmdir()
    assert [line.event for line in disk.look()] == ["wal_long"]


LOOKS = """
import sys
from agent_run_ledger.supervisor import Disk
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
lines = list(Disk(sys.argv[1], 2**60, 1).look())
print(len(lines) > 0, [name for name in opened if name.startswith(sys.argv[1])])
"""


def test_nothing_is_opened_beside_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    for name in (path, tmp_path / "agent.db-wal"):
        name.write_bytes(b"data")
    looked = subprocess.run(
        [sys.executable, "-c", LOOKS, str(path)], capture_output=True, text=True, check=True, env=environment()
    )
    assert looked.stdout.split(maxsplit=1) == ["True", "[]\n"]


# --- starting again ---------------------------------------------------------------------------------------------------


def test_a_program_that_is_killed_is_started_again() -> None:
    with supervised(python(HEARS, "SIGTERM"), *QUICK) as service:
        (_, first, parent) = service.hear()
        assert int(parent) == service.pid
        os.kill(int(first), signal.SIGKILL)
        died = service.event("died")
        assert (died["pid"], died["signal"]) == (int(first), "SIGKILL")
        (_, second, _) = service.hear()
        assert second != first
        service.send(signal.SIGTERM)
        assert service.ends() == 7
    assert service.story == ["started", "died", "backoff", "started", "draining", "died"]


def test_a_program_that_ends_with_status_0_is_done() -> None:
    with supervised(["sh", "-c", "echo done"]) as service:
        assert service.ends() == 0
        assert service.hear() == ["done"]
    assert service.story == ["started", "ended"]


def test_always_starts_a_program_that_is_done_again() -> None:
    with supervised(["sh", "-c", "echo done"], "--always", "--max-deaths", 3, *QUICK) as service:
        assert service.ends() == 125
        assert [service.hear() for _ in range(4)] == [["done"], ["done"], ["done"], []]


def test_a_crash_loop_ends_with_125_and_no_further_start() -> None:
    with supervised(["sh", "-c", "echo here; exit 3"], "--max-deaths", 4, *QUICK) as service:
        assert service.ends() == 125
        assert [service.hear() for _ in range(5)] == [["here"]] * 4 + [[]]
    assert [event["status"] for event in service.events if event["event"] == "died"] == [3, 3, 3, 3]
    assert service.story[-2:] == ["died", "crash_loop"]


@pytest.mark.parametrize(("name", "status"), [("no-such-program", 127), ("plain-file", 126), (".", 126)])
def test_a_program_that_cannot_be_started_is_not_tried_again(name: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "plain-file").write_text("no program", encoding="utf-8")
    with supervised([str(tmp_path / name)]) as service:
        assert service.ends() == status
    assert service.story == ["cannot_start"]


def test_a_program_that_vanishes_is_waited_for(tmp_path: Path) -> None:
    """While a deploy replaces it, for instance."""
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text(f"#!/bin/sh\nmv {program} {away}\necho here; exit 1\n", encoding="utf-8")
    program.chmod(0o755)
    with supervised([str(program)], "--backoff-base", 0.1) as service:
        assert service.hear() == ["here"]
        service.event("cannot_start")
        away.rename(program)
        assert service.hear() == ["here"]


# --- what a program finds ---------------------------------------------------------------------------------------------


def test_the_program_has_no_blocked_signal_and_a_group_of_its_own() -> None:
    script = """
import os
blocked = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))]
print(*blocked, os.getpgrp() == os.getpid())
"""
    with supervised(python(script)) as service:
        blocked, ignored, is_leader = service.hear()
        assert int(blocked, 16) == 0
        assert is_leader == "True"
        of_python = (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)  # this child ignores them itself
        status = Path("/proc/self/status").read_text()
        (ours,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
        assert int(ignored, 16) & ~(of_python | int(ours, 16)) == 0
        assert service.ends() == 0


def test_the_program_has_the_files_that_its_caller_lets_through() -> None:
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        shows = f"import os; print(os.readlink('/proc/self/fd/{file.fileno()}'))"
        with supervised(python(shows), pass_fds=[file.fileno()]) as service:
            assert service.hear() == [os.devnull]


@pytest.mark.parametrize(
    ("options", "inherited", "told"),
    [
        ((), None, 64 * MEBIBYTE),
        (("--min-free", "2G"), "5M", 2 * 1024**3),
        ((), "5M", 5 * MEBIBYTE),
        (("--min-free", 0), None, 0),
    ],
)
def test_the_program_s_ledgers_are_told_how_much_has_to_be_free(
    options: tuple[object, ...], inherited: str | None, told: int
) -> None:
    variables = environment() | ({} if inherited is None else {"AGENT_RUN_LEDGER_MIN_FREE": inherited})
    with supervised(["sh", "-c", "echo $AGENT_RUN_LEDGER_MIN_FREE"], *options, env=variables) as service:
        assert service.hear() == [str(told)]


# --- ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_end_is_handed_on_and_the_status_is_the_program_s(number: signal.Signals) -> None:
    with supervised(python(HEARS, number.name)) as service:
        service.hear()
        service.send(number)
        assert service.hear() == [number.name]
        assert service.ends() == 7
        assert service.hear() == []
    assert service.story == ["started", "draining", "died"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_status_of_a_program_that_ends_by_the_signal_is_128_and_its_number(
    number: signal.Signals, status: int
) -> None:
    with supervised(["sh", "-c", "echo ready; exec sleep 60"]) as service:
        service.hear()
        service.send(number)
        assert service.ends() == status


def test_a_drained_program_that_ends_with_0_is_0_also_with_always() -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('ready', flush=True); signal.pause()"
    )
    with supervised(python("from sys import exit; " + script), "--always") as service:
        service.hear()
        service.send(signal.SIGTERM)
        assert service.ends() == 0


def test_a_program_that_does_not_end_in_its_grace_is_killed_and_the_status_is_137() -> None:
    with supervised(python(HEARS), "--grace", 0.2) as service:
        service.hear()
        service.send(signal.SIGTERM)
        assert service.ends() == 137
    assert service.story == ["started", "draining", "killed", "died"]


def test_a_second_request_to_end_kills_at_once() -> None:
    with driven(python(HEARS), grace_seconds=600, echo_seconds=0) as service:
        service.hear()
        service.send(signal.SIGINT)
        assert service.hear() == ["SIGINT"]
        service.send(signal.SIGINT)
        assert service.ends() == 137
    assert service.story == ["started", "draining", "hurried", "killed", "died"]


def test_a_request_that_is_only_sent_twice_is_one() -> None:
    with driven(python(HEARS, "SIGUSR1"), grace_seconds=600, echo_seconds=600) as service:
        service.hear()
        for _ in range(2):
            service.send(signal.SIGTERM)
        assert service.hear() == ["SIGTERM"]
        service.send(signal.SIGTERM)
        service.send(signal.SIGUSR1)
        assert service.hear() == ["SIGUSR1"]
        assert service.ends() == 7
    assert service.story == ["started", "draining", "died"]


def test_a_stopped_program_is_woken_to_end() -> None:
    with supervised(python(HEARS, "SIGTERM"), "--grace", 600) as service:
        (_, pid, _) = service.hear()
        os.kill(int(pid), signal.SIGSTOP)
        service.send(signal.SIGTERM)
        assert service.ends() == 7


def test_a_request_to_end_while_nothing_runs_ends_at_once() -> None:
    with driven(["sh", "-c", "exit 1"], base=30) as service:
        service.event("backoff")
        service.send(signal.SIGTERM)
        assert service.ends() == 143
    assert service.story == ["started", "died", "backoff", "draining"]


def test_other_signals_are_handed_on_and_end_nothing() -> None:
    others = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGWINCH]
    with supervised(python(HEARS, "SIGTERM")) as service:
        service.hear()
        for number in others:
            service.send(number)
            assert service.hear() == [number.name]
        service.send(signal.SIGTERM)
        assert service.ends() == 7


def test_a_signal_to_the_supervisor_s_group_reaches_the_program_once() -> None:
    with supervised(python(HEARS, "SIGUSR1")) as service:
        service.hear()
        os.killpg(service.pid, signal.SIGTERM)
        assert service.hear() == ["SIGTERM"]
        service.event("draining")
        service.send(signal.SIGUSR1)
        assert service.hear() == ["SIGUSR1"]
        assert service.ends() == 7


def ignoring(*numbers: signal.Signals) -> list[str]:
    """A prefix for a command that is started by somebody who ignores these signals."""
    script = "import os, signal, sys; [signal.signal(int(each), signal.SIG_IGN) for each in sys.argv[1].split()]"
    return python(f"{script}; os.execvp(sys.argv[2], sys.argv[2:])", " ".join(str(int(each)) for each in numbers))


def test_what_the_caller_ignores_stays_ignored() -> None:
    with supervised(python(HEARS, "SIGTERM"), prefix=ignoring(signal.SIGHUP, signal.SIGINT)) as service:
        service.hear()
        service.send(signal.SIGHUP)
        service.send(signal.SIGINT)
        service.send(signal.SIGWINCH)
        assert service.hear() == ["SIGWINCH"]
        service.send(signal.SIGTERM)
        assert service.ends() == 7


def test_a_caller_that_ignores_the_deaths_of_children_hides_none() -> None:
    with supervised(["sh", "-c", "exit 3"], "--max-deaths", 2, *QUICK, prefix=ignoring(signal.SIGCHLD)) as service:
        assert service.ends() == 125
    assert [event["status"] for event in service.events if event["event"] == "died"] == [3, 3]


def test_a_killed_supervisor_takes_its_program_along() -> None:
    with supervised(python(HEARS, "SIGTERM")) as service:
        service.hear()
        service.send(signal.SIGKILL)
        assert service.hear() == ["SIGTERM"]
        assert service.hear() == []


# --- what a program leaves behind -------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """What orphans talk through."""
    with closing(Pipe(tmp_path)) as opened:
        yield opened


@pytest.mark.parametrize(("how", "grace"), [("ends", 600), ("stays", 0.2)])
def test_what_a_dead_program_leaves_behind_is_ended_before_the_next_start(how: str, grace: float, pipe: Pipe) -> None:
    program = python(LEAVES, "9", *python(ORPHAN, pipe.path, how))
    with supervised(program, *QUICK, "--max-deaths", 2, "--grace", grace) as service:
        first = service.hear()[1]
        assert pipe.hear() == "told" or how == "stays"
        assert service.event("left_behind")["pids"] == [int(first)]
        service.event("started")
        with pytest.raises(ProcessLookupError):
            os.kill(int(first), 0)
        assert service.ends() == 125
    assert service.story.count("left_behind") == 2


def test_what_a_program_that_is_done_leaves_behind_is_ended_too(pipe: Pipe) -> None:
    with supervised(python(LEAVES, "0", *python(ORPHAN, pipe.path, "ends"))) as service:
        assert service.ends() == 0
        assert pipe.hear() == "told"
    assert service.story == ["started", "ended", "left_behind"]


def test_orphans_are_waited_for_while_the_program_lives() -> None:
    script = """
import os, signal, subprocess
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH, signal.SIGTERM})
orphan = subprocess.run(["sh", "-c", "sleep 0 & echo $!"], stdout=subprocess.PIPE).stdout
print(int(orphan), flush=True)
while signal.sigwait({signal.SIGWINCH, signal.SIGTERM}) == signal.SIGWINCH:
    print(flush=True)
"""
    with supervised(python(script)) as service:
        (orphan,) = service.hear()
        for _ in rounds():
            if not Path(f"/proc/{orphan}").exists():
                break
            service.send(signal.SIGWINCH)
            service.hear()
        service.send(signal.SIGTERM)
        assert service.ends() == 0


def test_a_process_that_was_there_before_the_supervisor_is_left_alone() -> None:
    """An entry point that starts something in the background and then becomes the supervisor."""
    entry = ["sh", "-c", 'sleep 60 & echo $!; exec "$@"', "sh"]
    with supervised(["sh", "-c", "exit 3"], "--max-deaths", 2, *QUICK, prefix=entry) as service:
        (stranger,) = service.hear()
        assert service.process.wait(MINUTE) == 125
        os.kill(int(stranger), signal.SIGTERM)  # it is there


# --- before each start ------------------------------------------------------------------------------------------------


def test_what_is_to_run_before_each_start_does_and_may_fail() -> None:
    before = ("--before", "sh -c 'echo one; exit 9'", "--before", "no-such-program", "--before", "echo 'two words'")
    with supervised(["sh", "-c", "echo program; exit 3"], *before, "--max-deaths", 2, *QUICK) as service:
        assert service.ends() == 125
        assert [service.hear() for _ in range(7)] == [["one"], ["two", "words"], ["program"]] * 2 + [[]]
    assert service.story.count("cannot_start") == 2


BILLING = """
import os, signal, sys
from agent_run_ledger import AgentRunLedger, Effect

ledger = AgentRunLedger("agent.db", durability="process")
who = "recover" if "recover" in sys.argv else "program"

@ledger.tool(effect=Effect.READ)
def look():
    with open("calls", "a") as calls:
        calls.write(who + " ")
    if who == "program":
        os.kill(os.getpid(), signal.SIGKILL)
    return "seen"

@ledger.agent()
def work():
    return look()

if __name__ == "__main__":
    print(ledger.run(work, run_id="r"))
"""
"""A program that dies in a step of its run, and a module from which that run can be recovered."""


def test_a_run_that_died_with_its_program_is_recovered_before_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "billing.py").write_text(BILLING, encoding="utf-8")
    with supervised([sys.executable, "billing.py"], "--recover", "billing", *QUICK, cwd=tmp_path) as service:
        assert service.ends() == 0
        assert service.hear_all()[-1] == "seen"
    assert (tmp_path / "calls").read_text(encoding="utf-8").split() == ["program", "recover"]
    assert [event["program"] for event in service.events if event["event"] == "died"] == [sys.executable]


def test_a_failed_recovery_is_reported_and_the_program_is_started(tmp_path: Path) -> None:
    with supervised(["echo", "program"], "--recover", "no_such_module_anywhere", cwd=tmp_path) as service:
        died = service.event("died")
        assert died["program"] == "recover no_such_module_anywhere"
        assert died["status"] != 0
        assert service.event("started")["program"] == "echo"
        assert service.ends() == 0


def test_what_runs_before_a_start_has_its_time_and_no_more() -> None:
    slow = f"{sys.executable} -I -S -c '{HEARS}'"
    with supervised(["echo", "program"], "--before", slow, "--before-timeout", 0.1, "--grace", 0.1) as service:
        assert service.ends() == 0
    assert service.story[:2] == ["started", "overdue"]
    assert service.story[-3:] == ["died", "started", "ended"]


def test_a_request_to_end_before_the_start_is_obeyed_and_nothing_is_started() -> None:
    waits = f"{sys.executable} -I -S -c '{HEARS}' SIGTERM"
    with supervised(["echo", "program"], "--before", waits) as service:
        service.hear()
        service.send(signal.SIGUSR1)  # meant for the program
        service.send(signal.SIGTERM)
        assert service.hear() == ["SIGTERM"]
        assert service.ends() == 143
    assert service.story == ["started", "draining", "died"]


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_for_people_is_a_line_an_event_without_arguments() -> None:
    command = [word for word in words_of(["--max-deaths", 2, *QUICK]) if word != "--json"]
    done = subprocess.run(
        [*command, "sh", "-c", ": secret; exit 3"], env=environment(), capture_output=True, text=True, timeout=MINUTE
    )
    assert (done.returncode, done.stdout) == (125, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("supervise: started sh (pid ")
    assert all(line.startswith("supervise: ") for line in lines)
    assert len(lines) == 6
    assert "secret" not in done.stderr


@pytest.mark.parametrize("end", [["sh", "-c", 'exec "$@" 2>&-', "sh"], ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]])
def test_a_log_that_cannot_be_written_is_in_nobody_s_way(end: list[str]) -> None:
    with supervised(["sh", "-c", "echo here; exit 3"], "--max-deaths", 3, *QUICK, prefix=end) as service:
        assert service.ends() == 125
        assert [service.hear() for _ in range(4)] == [["here"]] * 3 + [[]]


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--"],
        ["--", ""],
        ["--grace", "-1", "--", "true"],
        ["--grace", "nan", "--", "true"],
        ["--grace", "inf", "--", "true"],
        ["--max-deaths", "0", "--", "true"],
        ["--min-free", "64X", "--", "true"],
        ["--min-free", "", "--", "true"],
        ["--max-wal", "-1", "--", "true"],
        ["--before", "", "--", "true"],
        ["--before", "'", "--", "true"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2_and_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["supervise", *arguments])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.count("\n") == 1


def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUN_LEDGER_MIN_FREE", "plenty")
    assert main(["supervise", "--", "true"]) == 2
    assert "AGENT_RUN_LEDGER_MIN_FREE" in capsys.readouterr().err


def test_the_program_s_own_options_are_its_own() -> None:
    for separator in ([], ["--"]):
        with running([*words_of([])[:-1], *separator, "echo", "--json", "--", "--grace"]) as service:
            assert service.ends() == 0
            assert service.hear() == ["--json", "--", "--grace"]


# --- terminals --------------------------------------------------------------------------------------------------------

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs a command in a terminal of its own, whose keyboard is this program's standard input."""


class Screen:
    """What a supervisor and its program show in a terminal, told apart."""

    def __init__(self, service: Supervised) -> None:
        self._service = service

    def until(self, *wanted: str) -> list[str]:
        """Read on until each of these words or events has been seen; the words and events on the way."""
        seen: list[str] = []
        while not set(wanted) <= set(seen):
            words = self._service.hear()
            assert words, f"{wanted} did not come, only {seen}"
            line = " ".join(words).removeprefix("^C")  # what the keyboard shows
            seen.append(json.loads(line)["event"] if line.startswith("{") else line.partition(" ")[0])
            if seen[-1] == "ready":
                self.supervisor = int(words[2])
        return seen

    def type(self, keys: bytes) -> None:
        keyboard = self._service.process.stdin
        assert keyboard
        keyboard.write(keys)
        keyboard.flush()


@contextmanager
def in_a_terminal(program: Sequence[str], *options: object) -> Iterator[tuple[Supervised, Screen]]:
    with running([sys.executable, "-c", TERMINAL, *words_of(options), *program]) as service:
        yield service, Screen(service)


def test_control_c_reaches_the_program_once() -> None:
    with in_a_terminal(python(HEARS, "SIGUSR1"), "--grace", 600) as (service, screen):
        screen.until("ready")
        os.kill(screen.supervisor, signal.SIGSTOP)
        screen.type(b"\x03")
        screen.until("SIGINT")
        os.kill(screen.supervisor, signal.SIGCONT)  # now the supervisor sees what the program has seen
        screen.until("draining")
        os.kill(screen.supervisor, signal.SIGUSR1)
        assert "SIGINT" not in screen.until("SIGUSR1", "died")
        assert service.process.wait(MINUTE) == 7


def test_a_request_to_end_that_does_not_come_from_the_terminal_is_handed_on_there_too() -> None:
    with in_a_terminal(python(HEARS, "SIGINT"), "--grace", 600) as (service, screen):
        screen.until("ready")
        os.kill(screen.supervisor, signal.SIGINT)
        screen.until("SIGINT", "died")
        assert service.process.wait(MINUTE) == 7


def test_the_program_can_read_from_the_terminal() -> None:
    with in_a_terminal(["sh", "-c", 'read answer; echo "so: $answer"']) as (service, screen):
        screen.until("started")
        screen.type(b"yes\n")
        screen.until("so:", "ended")
        assert service.process.wait(MINUTE) == 0


def test_a_terminal_that_is_closed_ends_the_program_for_good() -> None:
    with in_a_terminal(python(HEARS, "SIGHUP")) as (service, screen):
        screen.until("ready")
        supervisor = os.pidfd_open(screen.supervisor)
        try:
            service.process.kill()
            assert select.select([supervisor], [], [], MINUTE)[0], "the supervisor lives on without its terminal"
        finally:
            os.close(supervisor)
