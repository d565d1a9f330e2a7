"""Whether the disk beneath a ledger has room for what would come next."""

from __future__ import annotations

import os

VARIABLE = "AGENT_RUN_LEDGER_MIN_FREE"
"""The environment variable that says how many bytes are to be free where the program does not say it."""
_LOOK_SECONDS = 1.0


class Room:
    """Looks at the free space of one folder's disk, at most once a second.

    A disk that is full takes no outcome: what was dispatched would be in doubt. So nothing new is dispatched while there is less than
    `min_free` bytes, and what runs can still be written down.
    """

    def __init__(self, folder: str, min_free: int) -> None:
        self.folder = folder
        self.min_free = min_free
        self._looked_at = float("-inf")
        self._lack: str | None = None

    def lack(self, elapsed: float) -> str | None:
        """What is wrong, or None. `elapsed` are the seconds of the ledger's clock."""
        if elapsed - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = elapsed
            self._lack = self._look()
        return self._lack

    def _look(self) -> str | None:
        try:
            found = os.statvfs(self.folder)
        except OSError:  # what is wrong with the folder the store says
            return None
        free = found.f_bavail * found.f_frsize
        if free >= self.min_free:
            return None
        return f"the disk of {self.folder!r} has {free} bytes free, and at least {self.min_free} are asked for"
