"""Programs that run beside the tests: each in a folder of its own that anybody may enter, as nobody, and never longer than the tests.

Standard library only, for it is also the script of the guard: a process that waits for its parent's end, however that comes
about, then ends whoever still stands in the folder, and removes it.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 60.0
"""How long anything here is waited for, on a machine that is busy with other things."""

IS_ROOT = os.geteuid() == 0
_NOBODY = pwd.getpwnam("nobody")


def as_nobody() -> dict[str, Any]:
    """What `subprocess` needs to start a program that refuses to run as root; nothing where the tests are not root's."""
    return {"user": _NOBODY.pw_uid, "group": _NOBODY.pw_gid, "extra_groups": []} if IS_ROOT else {}


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Return once `happened` says so. Fails, in the words of `what`, where it does not."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.002)


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens.

    It lies below those that the kernel hands to clients: a client that tries again and again while its server is down could be given
    the server's own port otherwise.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as known:
        first = int(known.read().split()[0])
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(first // 2, first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def standing_in(folder: str | os.PathLike[str]) -> list[int]:
    """The processes whose working directory is this folder or one in it."""
    inside = os.fspath(folder)
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile, or is somebody else's
                place = os.readlink(f"/proc/{name}/cwd")
                if place == inside or place.startswith(inside + os.sep):
                    found.append(int(name))
    return found


def kill_all(folder: str | os.PathLike[str]) -> None:
    """SIGKILL for everybody who stands in the folder, until nobody does."""
    while found := standing_in(folder):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)  # until the kernel has taken them away


class Home:
    """A folder for a program that runs as nobody. It goes, with whoever stands in it, by `close` or when this process ends."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-")).resolve()
        self.path.chmod(0o755)
        self.hand_over(self.path)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # what Ctrl-C ends is the tests, and then it is the guard's turn
        )

    def hand_over(self, path: Path) -> None:
        """Let the program own this file or folder."""
        if IS_ROOT:
            os.chown(path, _NOBODY.pw_uid, _NOBODY.pw_gid)

    def folder(self, name: str) -> Path:
        """A new folder in it that nobody else may read."""
        path = self.path / name
        path.mkdir(mode=0o700)
        self.hand_over(path)
        return path

    def start(self, *command: str | Path, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a program in a folder of this home. What it says goes to the end of `log`."""
        with log.open("ab") as told:
            return subprocess.Popen(
                command,
                cwd=cwd,
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                start_new_session=True,
                **as_nobody(),
            )

    def run(self, *command: str | Path) -> None:
        """Run a program to its end. Fails with what it said where it fails."""
        done = subprocess.run(
            command, cwd=self.path, env=_ENVIRONMENT, capture_output=True, text=True, timeout=300, **as_nobody()
        )
        assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"

    def close(self) -> None:
        """End whoever stands in it and remove it."""
        self._guard.communicate()


_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.environ.get("PATH", os.defpath)}
"""None of the variables by which libpq would look elsewhere."""


def _guard(folder: str) -> None:
    sys.stdin.buffer.read()  # returns when the parent has let go, or is gone
    for number in (signal.SIGQUIT, signal.SIGCONT):  # servers then clean up behind themselves
        for pid in standing_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    until = time.monotonic() + 5.0
    while standing_in(folder) and time.monotonic() < until:
        time.sleep(0.01)
    kill_all(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    _guard(sys.argv[1])
