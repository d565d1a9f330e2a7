"""The one thread that writes for event loops: it takes whatever has come together while it wrote last."""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from agent_run_ledger.errors import StoreUnavailable

T = TypeVar("T")

_LAST_WRITE_SECONDS = 60.0


class Writer(Generic[T]):
    """A queue and the thread that empties it, started when it is first needed. `write` is given all that waits, in order."""

    def __init__(self, write: Callable[[list[T]], None]) -> None:
        self._write = write
        self._forget()
        _alive.add(self)

    def _forget(self) -> None:
        """Be without a thread: at the start, and in a forked child, whose parent's thread is not there."""
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._ended: threading.Lock | None = None
        """Held by the thread as long as it lives; None before there is one."""
        self._is_closed = False

    def put(self, item: T) -> None:
        """Have the item written behind those that wait. Raises `StoreUnavailable` once closed."""
        if self._ended is None or self._is_closed:
            with self._mutex:
                if self._is_closed:
                    raise StoreUnavailable("the ledger is closed; nothing was done. Open it anew.")
                if self._ended is None:
                    ended = threading.Lock()
                    ended.acquire()
                    _thread.start_new_thread(_empty, (self._items, weakref.WeakMethod(self._write), ended))
                    self._ended = ended
                    weakref.finalize(self, self._items.put, None).atexit = False  # of a ledger that nobody closes
        self._items.put(item)

    def close(self, rest: Sequence[T]) -> None:
        """Write what waits, and `rest` behind it, and end the thread."""
        with self._mutex:
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        if self._ended is None:
            if rest:
                self._write(list(rest))
            return
        for item in rest:
            self._items.put(item)
        self._items.put(None)
        if self._ended.acquire(timeout=_LAST_WRITE_SECONDS):
            self._ended.release()


def _empty(
    items: SimpleQueue[T | None], write: weakref.WeakMethod[Callable[[list[T]], None]], ended: threading.Lock
) -> None:
    try:
        while _write_once(items, write):
            pass
    finally:
        ended.release()


def _write_once(items: SimpleQueue[T | None], write: weakref.WeakMethod[Callable[[list[T]], None]]) -> bool:
    """Write what has come together. A call of its own, so that nothing of it is kept alive while the thread waits for more."""
    taken: list[T | None] = [items.get()]
    while not items.empty():
        taken.append(items.get())
    batch = [item for item in taken if item is not None]
    perform = write()
    if batch and perform is not None:
        perform(batch)
    return len(batch) == len(taken)


_alive: weakref.WeakSet[Writer[Any]] = weakref.WeakSet()


def _in_child() -> None:
    for writer in list(_alive):
        writer._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
