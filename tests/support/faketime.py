"""Processes whose wall clock is wrong: what a command is put behind, and what such a process has to mind."""

from __future__ import annotations

import select
import time
from pathlib import Path

from agent_run_ledger.stores.clock import SystemClock


def clocked(clock: str | Path) -> list[str]:
    """What a command is put behind so that its wall clock is off by `clock`, or by what stands in that file at the moment.

    Its other clocks are true. By "+0" it is the machine's own, without libfaketime.
    """
    settings = ["FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_NO_CACHE=1"]
    if isinstance(clock, Path):  # `faketime` itself takes no such file: what it does is to preload this library
        (library, *_) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        return ["env", *settings, f"FAKETIME_TIMESTAMP_FILE={clock}", f"LD_PRELOAD={library}"]
    return [] if clock == "+0" else ["env", *settings, "faketime", "-f", clock]


def sleep_otherwise() -> None:
    """Called in such a process: libfaketime refuses the call that `time.sleep` makes."""

    def sleep(seconds: float) -> None:
        select.select([], [], [], seconds)

    time.sleep = sleep
    SystemClock.sleep = staticmethod(sleep)  # type: ignore[method-assign, assignment] # it is time.sleep
