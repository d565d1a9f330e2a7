"""Trials in real processes, each a fork of this one that dies of SIGKILL at the boundary it is told."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from agent_run_ledger.errors import InvalidArguments
from agent_run_ledger.stores import open_store
from agent_run_ledger.testing.clock import SkippingClock
from agent_run_ledger.testing.crashes import Stage
from agent_run_ledger.testing.flows import Flow, live
from agent_run_ledger.testing.life import Answer, Life, standing
from agent_run_ledger.testing.notes import Note, from_lines, to_line

_HARMLESS = frozenset({"agent-run-ledger idle", "agent-run-ledger signals"})
"""The names of threads of this library that hold nothing and wait: for work, or to be told of a signal."""


class KillingStage(Stage):
    """Where processes are real. Each trial has a folder with its database and its notes, which is removed behind it."""

    def __init__(self, flow: Flow, answer: Answer | None, seconds: float) -> None:
        super().__init__(flow, answer)
        self._seconds = seconds
        _refuse_beside_threads()

    def play(self, run_id: str, die_at: int | None) -> list[Note]:
        folder = Path(tempfile.mkdtemp(prefix="crashtest-"))
        try:
            for life_ends_at in (None,) if die_at is None else (die_at, None):
                self._live(folder, run_id, life_ends_at)
            with open(folder / "notes", encoding="utf-8") as lines:
                return from_lines(lines)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _live(self, folder: Path, run_id: str, die_at: int | None) -> None:
        def process() -> None:
            clock = SkippingClock()
            notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            store = open_store(folder / "runs.db", durability="process", clock=clock)
            life = Life(
                store, clock, lambda note: os.write(notes, to_line(note)),
                answer=self._answer, die_at=die_at, by_sigkill=True,
            )  # fmt: skip
            live(self._flow, life, run_id)
            for run in standing(store):
                os.write(notes, to_line(run))
            store.close()

        ended = in_a_fork(process, self._seconds)
        if ended not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a process under test ended with status {ended}; its standard error says why")
        if ended != 0 and die_at is None:
            raise RuntimeError("a process under test was killed by somebody else")


def in_a_fork(work: Callable[[], None], seconds: float) -> int:
    """Do the work in a fork of this process, and return how that ended: 0, 1 where it raised, or minus the signal it died of.

    Raises `TimeoutError` where it takes longer; it is killed then.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: those that there are hold nothing
        pid = os.fork()
    if pid == 0:
        _work_and_exit(work)
    try:
        _await_end(pid, seconds)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work_and_exit(work: Callable[[], None]) -> None:
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # what this process inherited is its parent's to close


def _await_end(pid: int, seconds: float) -> None:
    if not hasattr(os, "pidfd_open"):
        return  # it is waited for as long as it takes
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            raise TimeoutError(f"a process under test did not end within {seconds:g} s (timeout=); it was killed")
    finally:
        os.close(descriptor)


def _refuse_beside_threads() -> None:
    """A fork has only the thread that made it: whatever lock another one holds at that moment is held for ever."""
    if not hasattr(os, "fork"):
        raise InvalidArguments("kill=True needs os.fork, which this system does not have; nothing was run")
    here = threading.current_thread()
    others = [thread.name for thread in threading.enumerate() if thread is not here and thread.name not in _HARMLESS]
    if others:
        raise InvalidArguments(
            f"kill=True forks this process, which is not safe beside its other threads ({', '.join(others)}): end them first, or "
            "call crashtest where there are none; nothing was run"
        )
