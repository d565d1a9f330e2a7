"""Stores outlive neither a fork nor the interpreter unprepared: they stand still for the one and are closed at the other, last of all."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class Mortal(Protocol):
    """What a store does when the process is copied or ends."""

    def before_fork(self) -> None:
        """Stand still, with nothing open that must not be copied."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Go on with locks and files of one's own; what the parent owns stays the parent's."""

    def close(self) -> None:
        """Give everything back."""


_stores: weakref.WeakSet[Mortal] = weakref.WeakSet()
_registry = threading.RLock()  # a collection of garbage can come in the middle of anything
_standing: list[Mortal] = []


_standing_on: list[Callable[[], None]] = []


def close_before(close: Callable[[], None]) -> None:
    """Have this called at exit before the stores are closed, by whoever stands on them."""
    _standing_on.append(close)


def watch(store: Mortal) -> None:
    """Prepare `store` for every fork, and close it at exit, for as long as somebody has it."""
    with _registry:
        _stores.add(store)


def forget(store: Mortal) -> None:
    """Stop watching a store that was closed."""
    with _registry:
        _stores.discard(store)


def _before_fork() -> None:
    _registry.acquire()
    _standing[:] = _stores
    for store in _standing:
        store.before_fork()


def _after_fork_in_parent() -> None:
    for store in _standing:
        store.after_fork_in_parent()
    _standing.clear()
    _registry.release()


def _after_fork_in_child() -> None:
    global _registry
    for store in _standing:
        store.after_fork_in_child()
    _standing.clear()
    _registry = threading.RLock()


def _close_all() -> None:
    for close in _standing_on:
        close()
    with _registry:
        stores = list(_stores)
    for store in stores:
        store.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_close_all)
