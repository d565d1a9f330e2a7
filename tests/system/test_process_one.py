"""The supervisor as process 1 of a pid namespace, as in a container, and on a disk that fills up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.supervised import HEARS, LEAVES, MINUTE, ORPHAN, QUICK, Pipe, driven, python, rounds, supervised

MEBIBYTE = 1024 * 1024
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def only_child_of(pid: int) -> int:
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """What orphans talk through."""
    with closing(Pipe(tmp_path)) as opened:
        yield opened


@pytest.mark.system("unshare")
def test_as_process_1_it_ends_its_program_and_hands_signals_on() -> None:
    with supervised(python(HEARS, "SIGTERM"), prefix=NAMESPACE) as service:
        (_, _, parent) = service.hear()
        assert parent == "1"
        inside = only_child_of(service.pid)
        os.kill(inside, signal.SIGHUP)
        assert service.hear() == ["SIGHUP"]
        os.kill(inside, signal.SIGTERM)
        assert service.hear() == ["SIGTERM"]
        assert service.ends() == 7


@pytest.mark.system("unshare")
def test_as_process_1_it_starts_its_program_again_and_ends_what_was_left_behind(
    pipe: Pipe,
) -> None:
    program = python(LEAVES, "9", *python(ORPHAN, pipe.path, "ends"))
    with supervised(program, "--max-deaths", 2, *QUICK, prefix=NAMESPACE) as service:
        assert service.ends() == 125
        assert pipe.hear() == "told"
    assert service.story.count("left_behind") == 2


@pytest.mark.system("unshare")
def test_as_process_1_it_waits_for_the_orphans_of_others() -> None:
    script = """
import os, signal, subprocess
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH, signal.SIGTERM})
subprocess.run(["sh", "-c", "setsid sh -c 'sleep 0 & sleep 0 & sleep 0 &' &"])
print("ready", flush=True)
while signal.sigwait({signal.SIGWINCH, signal.SIGTERM}) == signal.SIGWINCH:
    print(*(name for name in os.listdir("/proc") if name.isdecimal()), flush=True)
"""
    with supervised(python(script), prefix=NAMESPACE) as service:
        service.hear()
        inside = only_child_of(service.pid)
        for _ in rounds():
            os.kill(inside, signal.SIGWINCH)
            if len(service.hear()) == 2:  # the supervisor and its program
                break
        os.kill(inside, signal.SIGTERM)
        assert service.ends() == 0


@pytest.mark.system("mount", "umount")
def test_a_disk_that_fills_up_is_reported_and_so_is_room_that_is_made(tmp_path: Path) -> None:
    point, ballast = tmp_path / "disk", tmp_path / "disk" / "ballast"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)], check=True, timeout=MINUTE)
    try:
        watched = {"database": str(point / "agent.db"), "least_free_bytes": MEBIBYTE, "look_seconds": 0.05}
        with driven(python(HEARS, "SIGTERM"), **watched) as service:
            service.hear()
            ballast.write_bytes(bytes(3 * MEBIBYTE + 1))
            low = service.event("disk_low")
            assert low["free_bytes"] < MEBIBYTE == low["limit_bytes"]
            ballast.unlink()
            assert service.event("disk_ok")["free_bytes"] == 4 * MEBIBYTE
            service.send(signal.SIGTERM)
            assert service.ends() == 7
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=MINUTE)
    assert service.story == ["started", "disk_low", "disk_ok", "draining", "died"]
