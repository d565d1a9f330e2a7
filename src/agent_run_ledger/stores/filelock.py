"""Locks that the kernel drops with their holder: one exclusive lock per open file."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from agent_run_ledger.errors import StoreBusy, StoreReadOnly, StoreUnavailable

T = TypeVar("T")

if sys.platform == "win32":
    import msvcrt

    _HELD_ELSEWHERE = (errno.EACCES, errno.EDEADLK)

    def try_lock(fd: int, path: str) -> bool:
        """Lock the open file, unless somebody has it. Raises `StoreUnavailable` where the system gives no locks."""
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                return False
            raise StoreUnavailable(_no_locks(path, error)) from error
        return True

    def locking(fd: int) -> Callable[[], object] | None:
        """What takes the lock at once or raises an `OSError`; None where it takes more than one call into C."""
        return None

    def unlocking(fd: int) -> Callable[[], object]:
        """What gives the lock back, and does nothing where it is not held."""

        def unlock() -> None:
            with contextlib.suppress(PermissionError):  # it is not held
                msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

        return unlock

else:
    import fcntl

    _TRY = fcntl.LOCK_EX | fcntl.LOCK_NB

    def try_lock(fd: int, path: str) -> bool:
        """Lock the open file, unless somebody has it. Raises `StoreUnavailable` where the system gives no locks.

        The lock belongs to this opening of the file, not to the process.
        """
        try:
            fcntl.flock(fd, _TRY)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreUnavailable(_no_locks(path, error)) from error
        return True

    def locking(fd: int) -> Callable[[], object] | None:
        """What takes the lock at once or raises an `OSError`; None where it takes more than one call into C."""
        return functools.partial(fcntl.flock, fd, _TRY)

    def unlocking(fd: int) -> Callable[[], object]:
        """What gives the lock back, and does nothing where it is not held: a call into C, which nothing interrupts."""
        return functools.partial(fcntl.flock, fd, fcntl.LOCK_UN)


def _nothing() -> None: ...


class WriteLock:
    """The lock beside a database under which all our processes write and checkpoint, one at a time.

    SQLite before 3.51.3 can corrupt a WAL database when a checkpoint runs while another connection commits; under this
    lock that cannot happen. It is also the queue of the writers, so that SQLite's own busy handler is hardly ever needed.
    """

    __slots__ = ("_fd", "_path", "busy_seconds", "release", "take")

    take: Callable[[], object]
    """Take the lock if it is free. Whatever it raises, `acquire` waits for the lock or says what is wrong."""
    release: Callable[[], object]
    """Give the lock back; nothing happens where it is not held, so it may stand in the `finally` of its `acquire`."""

    def __init__(self, path: str, busy_seconds: float) -> None:
        self._path = path
        self._fd = -1
        self.busy_seconds = busy_seconds
        self.take, self.release = self.acquire, _nothing

    def acquire(self) -> None:
        """Wait for the lock, at most `busy_seconds`; `StoreBusy` after that. Who has it already keeps it."""
        if self._fd < 0:
            fd = self._open()
            self.release = unlocking(fd)
            self._fd = fd
            self.take = locking(fd) or self.acquire
        if not try_lock(self._fd, self._path):
            self._wait()

    def during(self, work: Callable[[], T]) -> T:
        """Do `work` under the lock."""
        try:
            self.acquire()
            return work()
        finally:
            try:
                self.release()
            except BaseException:  # an audit hook written in Python runs before it, and can be interrupted
                self.release()
                raise

    def close(self) -> None:
        """Let go of the file without unlocking it: an unlock in a forked child would drop its parent's lock."""
        fd, self._fd, self.take, self.release = self._fd, -1, self.acquire, _nothing
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except PermissionError as error:
            raise StoreReadOnly(_cannot_lock(self._path, error)) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise StoreReadOnly(_cannot_lock(self._path, error)) from error
            raise StoreUnavailable(_cannot_lock(self._path, error)) from error

    def _wait(self) -> None:
        give_up = time.monotonic() + self.busy_seconds
        pause = 0.000_05
        while time.monotonic() < give_up:
            time.sleep(pause)
            if try_lock(self._fd, self._path):
                return
            pause = min(pause * 1.5, 0.005)
        raise StoreBusy(
            f"another process kept {self._path!r} locked for more than {self.busy_seconds:g} s; nothing was written. "
            "Call again, or look for a writer that hangs."
        )


def _cannot_lock(path: str, error: OSError) -> str:
    return (
        f"the lock file {path!r} cannot be opened ({error.strerror}), and without it nothing is written; nothing was "
        "changed. Make the folder and the file writable for this user, or open the ledger read-only."
    )


def _no_locks(path: str, error: OSError) -> str:
    return (
        f"the system gives no lock on {path!r} ({error.strerror}), and without it nothing is written; nothing was changed. "
        "Call again; if it stays so, put the database on a local disk."
    )
