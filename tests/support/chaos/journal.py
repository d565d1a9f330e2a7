"""What a process of a storm saw, in a file of its own that only grows: it outlives whoever wrote it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

Note = dict[str, Any]
"""One thing that happened: its `kind`, when it was written down (`at`), and more. Times are those of `now`."""


def now() -> float:
    """Seconds of a clock that all processes of this machine share, and that nobody sets."""
    return time.monotonic()


class Journal:
    """Notes of one process, each one `write` to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._written = self._on_disk = 0
        self._syncing = threading.Lock()

    def note(self, kind: str, **facts: Any) -> None:
        """Write one note down, now: no death of the process takes it back."""
        line = json.dumps({"kind": kind, "at": now(), **facts}, separators=(",", ":")).encode() + b"\n"
        assert os.write(self._file, line) == len(line)
        self._written += 1

    def sync(self) -> None:
        """Return when all that was noted is on the disk."""
        number = self._written
        with self._syncing:
            if self._on_disk < number:  # else somebody's sync meanwhile was this one's, too
                written = self._written
                os.fdatasync(self._file)
                self._on_disk = written


def read(path: Path) -> list[Note]:
    """The notes of a journal in the order in which they were written. A last one that is torn off was never made."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]
