"""Who is alive: each owner holds the lock of a file of its own, and who can take that lock knows that the owner is dead."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time

from agent_run_ledger.errors import StoreError, StoreReadOnly, StoreUnavailable
from agent_run_ledger.stores.filelock import try_lock

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_LONGEST_NAME = 200
_LONGEST_PAUSE_SECONDS = 0.1

# What may be the disk of another machine: a lock there, or its absence, proves nothing about a process here.
_REMOTE = (
    "9p|acfs|afs|beegfs|ceph|cifs|coda|davfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs|nfs4|ocfs2|orangefs|panfs|prl_fs|pvfs2|"
    "smb3|smbfs|vboxsf|virtiofs|vmhgfs|fuse.*"
)


class Owners:
    """The owner files of one database: `<database>.owners/<owner id>`.

    A missing file proves nothing. A dead owner's file is removed only under its lock, and whoever takes a lock checks that
    its file still stands at its path.
    """

    def __init__(self, database: str) -> None:
        self.folder = database + ".owners"
        self._graves: dict[str, int] = {}
        self._held: dict[str, int] = {}

    def hold(self, owner: str) -> None:
        """Hold `owner`'s lock from now until `close`. Raises `StoreError` while another ledger is alive under that id."""
        if owner in self._held:
            return
        path = self._path(owner)
        pause = 0.000_2
        while pause < _LONGEST_PAUSE_SECONDS:
            fd = self._open(path, os.O_CREAT)
            try:
                if try_lock(fd, path) and _stands_at(fd, path):
                    self._held[owner] = fd
                    return
            finally:
                if owner not in self._held:
                    os.close(fd)
            time.sleep(pause)  # it may only be somebody who buries a former owner of this id
            pause *= 2
        raise StoreError(
            f"another ledger is alive under the owner id {owner!r}; nothing was done. Give each ledger an id of its own, or "
            "leave owner= out."
        )

    @property
    def held(self) -> frozenset[str]:
        """The owners whose lock this store holds."""
        return frozenset(self._held)

    @property
    def dead(self) -> frozenset[str]:
        """The owners whose graves are open: dead, and nobody can take their place until the graves are closed."""
        return frozenset(self._graves)

    def prove_death(self, owner: str) -> bool:
        """Open the grave of `owner` if the kernel proves that it is dead; end with `bury` or `leave`.

        Believe it only for a lease of this boot, and where `is_local`.
        """
        if owner in self._graves:
            return True
        path = self._path(owner)
        try:
            self._graves[owner] = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            if try_lock(self._graves[owner], path) and _stands_at(self._graves[owner], path):
                return True
        except (OSError, StoreUnavailable):
            pass  # what cannot be locked proves nothing
        self._close_grave(owner)
        return False

    def bury(self) -> None:
        """Remove the files of the dead owners under their locks, once no run is left that they have."""
        for owner in self.dead:
            _unlink(self._path(owner))
        self.leave()

    def leave(self) -> None:
        """Close the graves that are open; a file that still stands is left to the next who looks."""
        for owner in self.dead:
            self._close_grave(owner)

    def _close_grave(self, owner: str) -> None:
        if owner in self._graves:
            fd = self._graves[owner]
            del self._graves[owner]  # nothing is called between this and the close, so no interrupt comes there
            os.close(fd)

    def is_local(self) -> bool:
        """Whether the database lies on a disk of this machine, so that the locks of its owners prove something."""
        try:
            return _is_local(self.folder)
        except OSError:
            return False

    def close(self, *, remove: bool) -> None:
        """Let go of every owner file; `remove` them where no run is left that somebody could want to prove free."""
        for owner, fd in list(self._held.items()):
            if remove:
                _unlink(self._path(owner))
            with contextlib.suppress(OSError):
                del self._held[owner]  # nothing is called between this and the close, so no interrupt comes there
                os.close(fd)
        self.leave()

    def abandon(self) -> list[str]:
        """In a forked child: close the copies of the descriptors and never unlock, which would drop the parent's locks."""
        owners = list(self._held)
        self.close(remove=False)
        return owners

    def _path(self, owner: str) -> str:
        is_plain = 0 < len(owner) <= _LONGEST_NAME and owner[0] not in ".-" and _PLAIN.issuperset(owner)
        if is_plain and not owner.startswith("sha256_"):
            return os.path.join(self.folder, owner)
        import hashlib

        return os.path.join(self.folder, "sha256_" + hashlib.sha256(owner.encode()).hexdigest())

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
        try:
            try:
                return os.open(path, flags, 0o666)
            except FileNotFoundError:
                os.makedirs(self.folder, exist_ok=True)
                return os.open(path, flags, 0o666)
        except OSError as error:
            kind = StoreReadOnly if isinstance(error, PermissionError) or error.errno == 30 else StoreUnavailable
            raise kind(
                f"the owner file {path!r} cannot be opened ({error.strerror}), so no run can be owned; nothing was changed. "
                "Make the folder writable for this user, or open the ledger read-only."
            ) from error


def _stands_at(fd: int, path: str) -> bool:
    try:
        here, there = os.fstat(fd), os.stat(path)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # a file that stays proves nothing wrong: the next taker finds it unlocked
        os.unlink(path)


@functools.cache
def _is_local(folder: str) -> bool:
    if sys.platform == "darwin":
        return _is_local_on_macos(folder)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = file.read()
    kind = file_system_of(folder, mounts)
    return kind is not None and re.fullmatch(_REMOTE, kind) is None


def file_system_of(path: str, mountinfo: str) -> str | None:
    """The type of the file system that `path` lies on, from the text of /proc/self/mountinfo (proc(5))."""
    best, kind = "", None
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 7 or "-" not in fields[6:]:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):  # of two mounts on one point the later one is seen
            best, kind = point, fields[fields.index("-", 6) + 1]
    return kind


def _is_local_on_macos(folder: str) -> bool:
    import subprocess

    try:
        listed = subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    best, is_local = "", False
    for line in listed.splitlines():  # "/dev/disk3s1 on / (apfs, local, journaled)"
        _, _, rest = line.partition(" on ")
        point, _, options = rest.rpartition(" (")
        if (folder == point or folder.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, is_local = point, "local" in options.rstrip(")").split(", ")
    return is_local
