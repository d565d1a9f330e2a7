"""Supervisors in processes of their own, and programs for them that say which signals they get."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.processes import environment

MINUTE = 60.0
QUICK = ("--backoff-base", "0.01")
"""Options for tests that wait for restarts."""

HEARS = """
import os, signal, sys
signals = {signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGWINCH")}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", os.getpid(), os.getppid(), flush=True)
while True:
    name = signal.Signals(signal.sigwait(signals)).name
    print(name, flush=True)
    if name in sys.argv[1:]:
        sys.exit(7)
"""
"""Says which signals it gets, and ends with status 7 at those that it is given."""


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script, *arguments]


class Lines:
    """The lines that come out of a file descriptor, each waited for at most a minute."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self) -> str | None:
        """The next line; None at the end."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor], [], [], MINUTE)
            assert ready, f"nothing came for a minute after {self._rest!r}"
            more = os.read(self._descriptor, 65536)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode().rstrip("\r")


class Supervised:
    """A supervisor, what its program says (`hear`), and what its log says (`event`)."""

    def __init__(self, command: Sequence[str], **settings: Any) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **settings
        )
        assert self.process.stdout
        assert self.process.stderr
        self.pid = self.process.pid
        self._words, self._log = Lines(self.process.stdout.fileno()), Lines(self.process.stderr.fileno())
        self.events: list[dict[str, Any]] = []

    def hear(self) -> list[str]:
        """The words of the program's next line; none when nobody will say anything any more."""
        return (self._words.next() or "").split()

    def hear_all(self) -> list[str]:
        """The lines that are left, to the end."""
        return list(iter(self._words.next, None))

    def event(self, name: str) -> dict[str, Any]:
        """The next event of this name. What the programs say there is passed over."""
        while (found := self._next_event()) is not None:
            if found["event"] == name:
                return found
        raise AssertionError(f"the supervisor ended without {name}: {self.events}")

    def _next_event(self) -> dict[str, Any] | None:
        while (line := self._log.next()) is not None:
            if line.startswith("{"):
                self.events.append(json.loads(line))
                return self.events[-1]
        return None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """Wait for its end, and for all that it has to say."""
        while self._next_event() is not None:
            pass
        return self.process.wait(MINUTE)

    @property
    def story(self) -> list[str]:
        return [event["event"] for event in self.events]


def rounds() -> Iterator[None]:
    """As many as there is time for in a minute. Who is not done then has failed."""
    end = time.monotonic() + MINUTE
    while time.monotonic() < end:
        yield
    raise AssertionError("it did not happen within a minute")


def words_of(options: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "agent_run_ledger", "supervise", "--json", *map(str, options), "--"]


@contextmanager
def running(command: Sequence[str], env: dict[str, str] | None = None, **settings: Any) -> Iterator[Supervised]:
    """What runs while the block does, and no longer, whatever became of its parents."""
    mark = f"STARTED_BY_THE_TEST={secrets.token_hex()}"
    name, _, value = mark.partition("=")
    started = Supervised(command, env=(env or environment()) | {name: value}, **settings)
    try:
        yield started
    finally:
        for _ in rounds():
            if not (left := marked(mark)):
                break
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        started.process.wait(MINUTE)
        for stream in (started.process.stdin, started.process.stdout, started.process.stderr):
            assert stream
            stream.close()


def marked(mark: str) -> list[int]:
    """The living processes that have this variable: a dead one has none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def supervised(program: Sequence[str], *options: object, prefix: Sequence[str] = (), **settings: Any) -> Any:
    """`agent-run-ledger supervise` with these options and this program."""
    return running([*prefix, *words_of(options), *program], **settings)


DRIVER = """
import json, sys
from agent_run_ledger.model import RetryPolicy
from agent_run_ledger.supervisor import Program, Settings, supervise

def tell(line):
    sys.stderr.write(json.dumps({"event": line.event, "text": line.text, **line.facts}) + "\\n")
    sys.stderr.flush()

settings = json.loads(sys.argv[1])
settings["backoff"] = RetryPolicy(base=settings.pop("base", 0.01))
sys.exit(supervise(Settings(Program("program", tuple(sys.argv[2:])), **settings), tell, draw=lambda: 0.999))
"""
"""A supervisor with settings that the command line does not have, and draws that are no chance."""


def driven(program: Sequence[str], **settings: Any) -> Any:
    return running([sys.executable, "-c", DRIVER, json.dumps(settings), *program])


LEAVES = """
import os, subprocess, sys
number, *command = sys.argv[1:]
child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
print("left", child.stdout.readline().decode().strip(), flush=True)
os.kill(os.getpid(), int(number))
os._exit(0)
"""
"""Starts a process in a session of its own, waits for its first word, kills itself by a signal or, with 0, ends well."""

ORPHAN = """
import os, signal, sys
signals = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
out = os.open(sys.argv[1], os.O_WRONLY)
print(os.getpid(), flush=True)
while True:
    signal.sigwait(signals)
    os.write(out, b"told\\n")
    if sys.argv[2] == "ends":
        sys.exit()
"""
"""Says into a pipe when it is told to end, and ends then, or not."""


class Pipe:
    """A named pipe: where its writers find it, and what they say. `hear` is None when the last of them has gone."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "pipe")
        os.mkfifo(self.path)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._descriptor, True)
        self.hear = Lines(self._descriptor).next

    def close(self) -> None:
        os.close(self._descriptor)
