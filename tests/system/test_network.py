"""What the operating system saw of the network: the core talks to nobody outside this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LOOPBACK = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "::1"')


def addressed(folder: Path, *arguments: str) -> list[str]:
    """The traced calls of a Python process and its children that name an internet address."""
    trace = folder / "trace"
    command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(trace)]
    done = subprocess.run(
        [*command, sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    calls = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    return [call for call in calls if "sa_family=AF_INET" in call]


@pytest.mark.system("strace")
def test_the_witness_sees_a_call_by_address(tmp_path: Path) -> None:
    calls = addressed(tmp_path, "-c", "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('127.0.0.1', 9))")
    assert len(calls) == 1
    assert LOOPBACK.search(calls[0])
    assert not LOOPBACK.search(calls[0].replace("127.0.0.1", "192.0.2.1"))


@pytest.mark.system("strace")
def test_importing_the_package_talks_to_nobody(tmp_path: Path) -> None:
    assert addressed(tmp_path, "-c", "from agent_run_ledger import *") == []


@pytest.mark.system("strace")
def test_the_demo_talks_to_nobody_outside_this_machine(tmp_path: Path) -> None:
    calls = addressed(tmp_path, "-m", "agent_run_ledger", "demo")
    assert [call for call in calls if not LOOPBACK.search(call)] == []
