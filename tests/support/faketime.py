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
    if clock == "+0":
        return []
    # The command `faketime` would stand between: it takes no such file, and signals would end it and not what it has started.
    (library, *_) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    shift = f"FAKETIME_TIMESTAMP_FILE={clock}" if isinstance(clock, Path) else f"FAKETIME={clock}"
    return ["env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_NO_CACHE=1", shift, f"LD_PRELOAD={library}"]


def sleep_otherwise() -> None:
    """Called in such a process: libfaketime refuses the call that `time.sleep` makes."""

    def sleep(seconds: float) -> None:
        select.select([], [], [], seconds)

    time.sleep = sleep
    SystemClock.sleep = staticmethod(sleep)  # type: ignore[method-assign, assignment] # it is time.sleep
