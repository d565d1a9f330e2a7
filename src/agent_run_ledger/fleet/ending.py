"""What signals make of the workers of this process: the first has them drain, the second ends the process."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from agent_run_ledger.fleet.worker import Worker


_AGAIN_SECONDS = 0.05
"""A signal that comes just before a thread goes to sleep does not wake it, so it is sent again."""

_LAST_SECONDS = 1.0


class _Ending:
    """The end of the workers that are guarded together, from the first signal on.

    A signal handler comes in the middle of anything, perhaps of a lock that its own thread holds: it waits for nothing and takes no lock.
    It sets a flag, and a thread that waits for that does the rest.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        """Those that have not ended."""
        self.number: int | None = None
        """The signal that came first."""
        self.status: int | None = None
        """What the process is to end with, once the workers have ended."""
        self.is_awaited = False
        """Whether the main thread waits for the workers, and need not be told that they have ended."""
        self.over = threading.Event()
        self.is_told = False
        """Whether the main thread was told that they have ended."""
        self._pid = os.getpid()
        self._handlers: dict[int, Any] = {}
        """What was there before, by signal."""
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._wait, name="agent-run-ledger signals", daemon=True)
        self._thread.start()

    @property
    def is_ahead(self) -> bool:
        """Whether no signal has come yet; a forked child has an end of its own."""
        return self.number is None and os.getpid() == self._pid

    def listen(self, number: int, default: Callable[..., Any] | signal.Handlers) -> None:
        """Handle this signal, unless somebody else does. Call in the main thread."""
        if signal.getsignal(number) == default:
            self._handlers[number] = signal.signal(number, self._come)

    def leave(self, number: int) -> None:
        """Put back what handled this signal before. Call in the main thread."""
        if number in self._handlers:
            before = self._handlers.pop(number)
            if signal.getsignal(number) == self._come:
                signal.signal(number, before)

    def be_silent(self) -> None:
        """Return when no signal will be sent any more, if one might be."""
        if self.status is not None:
            self._thread.join(_LAST_SECONDS)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None:
            self.is_told = True
            raise SystemExit(self.status)
        if self.is_ahead and _is_exiting:  # what it asks for is being done
            self.number = number
            return
        if not (self.is_ahead and self.workers):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        self._bell.release()

    def _wait(self) -> None:
        self._bell.acquire()
        workers = list(self.workers)
        for worker in workers:
            worker.drain()
        drained = [worker.stop() for worker in workers]
        number = cast(int, self.number)
        self.status = 0 if all(drained) else 128 + number
        self.over.set()
        while not (self.is_awaited or self.is_told or _is_exiting):
            with suppress(OSError):
                signal.pthread_kill(cast(int, threading.main_thread().ident), number)
            time.sleep(_AGAIN_SECONDS)


_now: list[_Ending] = []
"""The one that is at work, if any is."""
_is_exiting: list[bool] = []


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def guard(worker: Worker) -> None:
    """Have the first SIGTERM drain this worker, where this is the main thread and nobody else handles it."""
    if not _is_main():
        return
    ending = _begun()
    ending.workers.append(worker)
    ending.listen(signal.SIGTERM, signal.SIG_DFL)


def unguard(worker: Worker) -> None:
    """The worker has ended. In the main thread the signal is what it was, if this was the last one and none has come."""
    for ending in _now:
        with suppress(ValueError):  # it was forgotten before
            ending.workers.remove(worker)
        if not ending.workers and ending.number is None and _is_main():
            ending.leave(signal.SIGTERM)


@contextmanager
def awaited(worker: Worker) -> Iterator[None]:
    """The block waits for the worker's end: SIGTERM and Ctrl-C in the main thread bring it about, and then the block ends."""
    if not _is_main():
        yield
        return
    ending = _begun()
    if worker not in ending.workers:
        ending.workers.append(worker)
    ending.is_awaited = True
    try:
        ending.listen(signal.SIGTERM, signal.SIG_DFL)
        ending.listen(signal.SIGINT, signal.default_int_handler)
        yield
        if ending.number is not None:
            while not ending.over.wait(_AGAIN_SECONDS):
                pass
            ending.is_told = True
            if ending.status:
                raise SystemExit(ending.status)
    finally:
        ending.is_awaited = False
        ending.leave(signal.SIGINT)
        if worker.state == "stopped":
            unguard(worker)


def _begun() -> _Ending:
    if not _now or not _now[-1].is_ahead:
        for before in _now:
            before.leave(signal.SIGTERM)
        _now[:] = [_Ending()]
    return _now[-1]


@atexit.register
def _exit() -> None:
    """The program ends by itself: whatever drains by now has nobody to tell, and must not send a signal that nobody handles any more."""
    _is_exiting.append(True)
    for ending in _now:
        ending.be_silent()
