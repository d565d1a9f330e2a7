"""Whether the disk beneath a ledger has room for what would come next."""

from __future__ import annotations

import os
from contextlib import suppress


def free_bytes(folder: str) -> int | None:
    """Bytes that this user may still write in a folder; None where nobody can tell."""
    with suppress(OSError, AttributeError):  # what is wrong with the folder the store says
        disk = os.statvfs(folder)
        if disk.f_blocks:  # what is no real disk says nothing
            return disk.f_bavail * disk.f_frsize
    return None


class Room:
    """Looks at the free space of one folder's disk each time it is asked, which costs a microsecond or two.

    A disk that is full takes no outcome: what was dispatched would be in doubt. So nothing new is dispatched while there is less than
    `min_free` bytes, and what runs can still be written down, as far as it fits into them.
    """

    def __init__(self, folder: str, min_free: int) -> None:
        self.folder = folder
        self.min_free = min_free

    def lack(self) -> str | None:
        """What is wrong, or None."""
        free = free_bytes(self.folder)
        if free is None or free >= self.min_free:
            return None
        return f"the disk of {self.folder!r} has {free} bytes free, and at least {self.min_free} are asked for"
