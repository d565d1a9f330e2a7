"""The machine's own times: the wall clock, the clock of leases, and which boot the latter counts from."""

from __future__ import annotations

import functools
import sys
import time

if sys.platform == "linux":
    _elapsed = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
elif sys.platform == "darwin":
    _elapsed = functools.partial(
        time.clock_gettime, time.CLOCK_MONOTONIC
    )  # goes on in sleep, unlike time.monotonic there
else:
    _elapsed = time.monotonic


class SystemClock:
    """The `Clock` of every ledger that is not under test: the functions themselves, since each step asks four times."""

    now = staticmethod(time.time)
    elapsed = staticmethod(_elapsed)
    sleep = staticmethod(time.sleep)


def boot_id() -> str:
    """What names this boot of this machine, the same in all its containers; empty where nothing does."""
    try:
        return _boot_id()
    except OSError:  # not remembered: the next time there may be a descriptor to read it with
        return ""


@functools.cache
def _boot_id() -> str:
    if sys.platform == "darwin":
        import subprocess

        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except subprocess.SubprocessError:
            return ""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode().strip()
