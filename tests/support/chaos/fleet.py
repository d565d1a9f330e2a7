"""The worker processes of a storm: as many as there are slots, whatever becomes of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from support.chaos import worker
from support.chaos.journal import Journal, Note, read
from support.chaos.worker import Order
from support.daemons import wait_until
from support.faketime import clocked
from support.processes import environment

_ENDS_IN_SECONDS = 60.0


class WorkerProcess:
    """One life of one slot."""

    def __init__(self, order: Order, said: Path) -> None:
        self.name = order["name"]
        self.journal = Path(order["journal"])
        self.said = said
        """The file of what it says and logs."""
        self.is_stopped = False
        self.is_ending = False
        """Whether it was told to end."""
        with said.open("wb") as told:
            self.process = subprocess.Popen(
                [*clocked(order["clock"]), sys.executable, "-m", worker.__name__, json.dumps(order)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
            )

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has cleaned up."""
        self.process.kill()
        self.process.wait()

    def drain(self) -> None:
        """SIGTERM: it is to end in good order, and not waited for."""
        self.is_ending = True
        self.process.terminate()

    def ends_well_with(self) -> list[int]:
        """The statuses that it may have ended with. Whoever is told to end before it listens ends at once."""
        if not self.is_ending:
            return [-signal.SIGKILL]
        return [0] if self.has_begun else [0, -signal.SIGTERM]

    @property
    def has_begun(self) -> bool:
        """Whether it works by now, or has."""
        return any(note["kind"] == "begins" for note in read(self.journal))

    def tell_where_it_stands(self) -> None:
        """Have it write the stacks of its threads to where it says things."""
        if self.process.poll() is None and not self.is_stopped:
            self.process.send_signal(signal.SIGUSR1)


class Fleet:
    """The processes by slot. What is done to them, and when, stands in the journal."""

    def __init__(self, folder: Path, slots: int, ordered: Callable[[int, str, Path], Order], journal: Journal) -> None:
        self._folder = folder
        self._ordered = ordered
        self._journal = journal
        self._lives = [0] * slots
        self.past: list[WorkerProcess] = []
        """Those that were killed, or told to end before the storm was over."""
        self.present = [self._started(slot) for slot in range(slots)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in [*self.past, *self.present]:
            if each.process.poll() is None:
                each.kill()

    def _started(self, slot: int) -> WorkerProcess:
        self._lives[slot] += 1
        name = f"worker-{slot}.{self._lives[slot]}"
        order = self._ordered(slot, name, self._folder / f"{name}.journal")
        Path(order["journal"]).touch()
        return WorkerProcess(order, self._folder / f"{name}.log")

    def await_work(self) -> None:
        """Return when all work."""
        wait_until(lambda: all(each.has_begun for each in self.present), "workers to begin")

    def kill(self, slot: int) -> None:
        """Kill the slot's process, stopped or not, and start another."""
        self._journal.note("kill", worker=self.present[slot].name)
        self.present[slot].kill()
        self._replace(slot)

    def drain(self, slot: int) -> None:
        """Let the slot's process end in good order, while another one begins."""
        self._journal.note("drain", worker=self.present[slot].name)
        self.go_on(self.present[slot])
        self.present[slot].drain()
        self._replace(slot)

    def _replace(self, slot: int) -> None:
        self.past.append(self.present[slot])
        self.present[slot] = self._started(slot)

    def stop(self, slot: int) -> WorkerProcess | None:
        """Let the slot's process stand still; None where it does already."""
        stopped = self.present[slot]
        if stopped.is_stopped:
            return None
        self._journal.note("stop", worker=stopped.name)
        stopped.stop()
        return stopped

    def go_on(self, stopped: WorkerProcess) -> None:
        """Let a process go on that was stopped, if it still is."""
        if stopped.is_stopped and stopped.process.poll() is None:
            self._journal.note("continue", worker=stopped.name)
            stopped.go_on()

    def end(self) -> None:
        """Let all end in good order, and wait for them."""
        for each in self.present:
            self.go_on(each)
            each.drain()
        until = time.monotonic() + _ENDS_IN_SECONDS
        for each in [*self.past, *self.present]:
            try:
                each.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.tell_where_it_stands()

    def complaints(self) -> list[str]:
        """Of those that ended otherwise than they were told to, a sentence each."""
        found = []
        for each in [*self.past, *self.present]:
            status = each.process.poll()
            if status is None:
                found.append(f"{each.name} was told to end and has not: see {each.said}")
            elif status not in each.ends_well_with():
                found.append(f"{each.name} ended with {status}: see {each.said}")
        return found

    def journals(self) -> dict[str, list[Note]]:
        """What each process has seen, by its name."""
        return {each.name: read(each.journal) for each in [*self.past, *self.present]}
