"""Python processes for tests: started with the same code as the tests, ended with them, waited for without sleeping."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import agent_run_ledger

TESTS = Path(__file__).resolve().parent.parent
SOURCE = Path(agent_run_ledger.__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """What a process needs to import the code under test and `support`."""
    return os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "PYTHONUNBUFFERED": "1"}


class Child:
    """A process that talks by lines: `tell` writes one to it, `hear` waits for its next. A line is JSON."""

    def __init__(self, script: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-c", script, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment())

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, word: Any = None) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(word) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The next line. Fails where the process ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()} and without a word"
        return json.loads(line)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has cleaned up."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def ends(self) -> int:
        """Wait for its end."""
        return self.process.wait()


@contextmanager
def child(script: str, *arguments: object, prefix: Sequence[str] = ()) -> Iterator[Child]:
    """A process that runs `script` (see `WORDS`), killed at the latest when the block ends."""
    started = Child(WORDS + script, *map(str, arguments), prefix=prefix)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        for pipe in (started.process.stdin, started.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was told to a process that is gone
                    pipe.close()


WORDS = """
import json, sys
from agent_run_ledger import *

def tell(word=None):
    print(json.dumps(word), flush=True)

def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit("the test has ended")
    return json.loads(line)

arguments = sys.argv[1:]
"""
"""What a child's script can use: `tell(word)`, `hear()`, its `arguments`, and every public name."""
