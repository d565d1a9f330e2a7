"""What signals make of the workers of this process: the first has them drain, the second ends the process."""

from __future__ import annotations

import _thread
import atexit
import os
import select
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
    It rings, and a thread that listens does the rest. Nor does that wait for the handler: Python calls it in the main thread alone, which
    a signal does not wake where it comes just before that goes to sleep, or to another thread. So the system itself rings, too.
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
        self._first = _thread.allocate_lock()
        """Whoever gets it is the first that knows of the first signal."""
        self._is_unhandled = False
        """Whether the handler is still to be called for the first signal."""
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
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
            _ring_at(self._bell, instead_of=-1)

    def leave(self, number: int) -> None:
        """Put back what handled this signal before. Call in the main thread."""
        if number in self._handlers:
            before = self._handlers.pop(number)
            if signal.getsignal(number) == self._come:
                signal.signal(number, before)
            if not self._handlers:
                self.be_deaf()

    def be_deaf(self) -> None:
        """No signal rings any more. Call in the main thread."""
        _ring_at(-1, instead_of=self._bell)

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
        if self.is_ahead and self.workers and self._first.acquire(blocking=False):
            self.number = number
            with suppress(BlockingIOError):  # it is full: the thread has much to hear
                os.write(self._bell, b"\0")
        elif self._is_unhandled and os.getpid() == self._pid and not self._has_come_again(number):
            self._is_unhandled = False
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _has_come_again(self, number: int) -> bool:
        ear = select.poll()
        ear.register(self._ear, select.POLLIN)
        return bool(ear.poll(0)) and number in os.read(self._ear, select.PIPE_BUF)

    def _hear(self) -> None:
        """Return once the first signal has come, whether its handler was called by then or not."""
        while True:
            (number,) = os.read(self._ear, 1)
            is_ours = (
                number in self._handlers and signal.getsignal(number) == self._come
            )  # the program may have taken it over since
            if is_ours and self.workers and not _is_exiting:
                self._is_unhandled = True
                if self._first.acquire(blocking=False):
                    self.number = number
                    return
                self._is_unhandled = False
            if self._first.locked():
                return

    def _wait(self) -> None:
        self._hear()
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


def _ring_at(bell: int, *, instead_of: int) -> None:
    """Have the system write each signal's number there as it comes, unless somebody else wants to be told."""
    before = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    if before != instead_of:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


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


# A forked child's signals are no news to its parent: none comes to it before it is deaf.

_masks: dict[int, set[int | signal.Signals]] = {}
"""What a thread that forks lets through otherwise."""


def _before_fork() -> None:
    if _now:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def _in_parent() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for ending in _now:
        ending.be_deaf()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


@atexit.register
def _exit() -> None:
    """The program ends by itself: whatever drains by now has nobody to tell, and must not send a signal that nobody handles any more."""
    _is_exiting.append(True)
    for ending in _now:
        ending.be_silent()
