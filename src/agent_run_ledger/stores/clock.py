"""The machine's own times: the wall clock, the clock of leases, and which boot the latter counts from."""

from __future__ import annotations

import functools
import sys
import time

if sys.platform == "linux":

    def _elapsed() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

elif sys.platform == "darwin":

    def _elapsed() -> float:
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # goes on while the machine sleeps, unlike time.monotonic there

else:

    def _elapsed() -> float:
        return time.monotonic()


class SystemClock:
    """The `Clock` of every ledger that is not under test."""

    def now(self) -> float:
        return time.time()

    def elapsed(self) -> float:
        return _elapsed()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@functools.cache
def boot_id() -> str:
    """What names this boot of this machine, the same in all its containers; empty where nothing does."""
    if sys.platform == "darwin":
        import subprocess

        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().decode().strip()
    except OSError:
        return ""
