"""An append-only file beside the ledger: each call that is really made leaves a line, also if nobody lives to tell of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from agent_run_ledger import current_step


class Witness:
    """Writes one line a call. It knows nothing of the ledger but the key of the step that the call belongs to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.calls = 0
        """How many calls this process has made."""

    def saw(self, tool: str) -> None:
        """A call of `tool` is being made now."""
        self.calls += 1
        self._write({"tool": tool, "key": current_step().idempotency_key})

    def began(self, at: float) -> None:
        """The program began its work at `at`, on the clock of `time.monotonic()`."""
        self._write({"began": at})

    def _write(self, line: dict[str, Any]) -> None:
        line |= {"pid": os.getpid(), "at": time.monotonic()}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """What the witness saw, in order. Times are of `time.monotonic()`, which all processes of a machine share."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
