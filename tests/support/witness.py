"""The outside world, in a file that only grows: what was really called, as a program that dies cannot take it back."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


class Witness:
    """Notes that outlive whoever made them. Each is one `write` to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, kind: str, **facts: Any) -> None:
        """Write one note down, now."""
        line = json.dumps({"kind": kind, **facts}).encode() + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            written = os.write(fd, line)
            assert written == len(line)
        finally:
            os.close(fd)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """The notes of one kind, in the order in which they were made."""
        if not self.path.exists():
            return []
        notes = [json.loads(line) for line in self.path.read_bytes().splitlines()]
        return [note for note in notes if note["kind"] == kind]


def digest(value: Any) -> str:
    """The exact bytes of a value, short enough for a note."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
