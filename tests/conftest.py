"""What every test may rely on: nothing random, nobody outside, and a clear word where the machine lacks a program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from agent_run_ledger.stores.postgres import migrate
from support import databases
from support.ledgers import KINDS, Bench
from support.programs import Way

# The same examples every time, so that a red test is red again; HYPOTHESIS_PROFILE=explore looks for new ones.
# A shared machine may be slow at any moment, which says nothing about the code: no deadline, no complaint about speed.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, **UNTIMED)
hypothesis.settings.register_profile("explore", max_examples=2_000, print_blob=True, **UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

DEBIAN_PACKAGES = {
    "/usr/lib/postgresql/15/bin/postgres": "postgresql-15",
    "dmsetup": "dmsetup",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "umount": "mount",
    "unshare": "util-linux",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A system test promises something of the real machine: without its program it fails, it is not skipped."""
    for marker in item.iter_markers("system"):
        for program in marker.args:
            if shutil.which(program) is None:
                package = DEBIAN_PACKAGES.get(program, program)
                pytest.fail(f"this test needs `{program}`: apt-get install {package}", pytrace=False)


def refuse_to_leave_the_machine(event: str, arguments: tuple[Any, ...]) -> None:
    """Tests are hermetic: what they talk to is on the loopback interface."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = str(arguments[1][0])
        if not (host.startswith("127.") or host in ("::1", "localhost")):
            raise AssertionError(f"a test tried to reach {host}: tests talk to this machine only")


sys.addaudithook(refuse_to_leave_the_machine)


def pytest_unconfigure() -> None:
    databases.let_go()


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Storage with a clock that moves when told: in memory, in a file, and on a server."""
    with Bench(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a ledger that several processes open, each for itself."""
    if request.param == "sqlite":
        yield str(tmp_path / "agent.db")
    else:
        with databases.databases().fresh(migrate) as url:
            yield url


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def way(request: pytest.FixtureRequest) -> Way:
    """The two ways to write a program."""
    return Way(is_async=request.param)
