"""Calls that may be left behind: each function in a daemon thread, so that whoever waits for it may stop waiting."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

from agent_run_ledger.engine.effects import Result

IDLE_SECONDS = 10.0
"""How long a thread that has nothing to do stays for the next call."""
MOST_IDLE = 32
"""How many threads stay. Busy ones are not limited: an abandoned call must not keep another from its turn."""


class Work:
    """One call of a function in a thread of its own.

    It is made first and started then, so that whoever keeps it has it also where an interrupt comes in between. Context
    variables are its maker's; thread-locals are what the thread's last call has left.
    """

    __slots__ = ("__weakref__", "_call", "_result", "_to_tell", "name")

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
        self.name = name
        """The thread's name during the call."""
        self._call = [(copy_context(), function, arguments)]
        """Empty once the call is somebody's: of the thread that makes it, or of whoever took it back."""
        self._result: Result | None = None
        self._to_tell: dict[object, Callable[[], object]] = {}

    def start(self) -> None:
        """Have the function called, unless that was asked before or it was taken back. Does not wait for it.

        Raises `RuntimeError` where no thread is to be had: the machine has no more, or the interpreter is shutting down.
        Whatever it raises, an interrupt too, the call is taken back where it has not begun; the error has a note then. Where the
        lack shows a little later, that error is the result.
        """
        if not self._call:
            return
        try:
            if sys.is_finalizing():  # a new thread would never have its turn, and its starter wait for that
                raise RuntimeError("cannot start a thread: the interpreter is shutting down")
            while (worker := _pop_idle()) is not None:
                if worker.give(self):
                    return
            _Worker(self).begin()
        except BaseException as error:
            if self.take_back():
                error.add_note(f"{self.name!r} was not called.")
            raise

    def take_back(self) -> bool:
        """Whether the function was not called yet, and so never will be: the work is over then, too."""
        return self._end_uncalled(_TAKEN_BACK) or self._result is _TAKEN_BACK

    def wait(self, seconds: float | None) -> bool:
        """Wait up to so many seconds, or for ever; whether it is over. An interrupt ends the wait and nothing else."""
        if self._result is None and not sys.is_finalizing():  # at the very end no other thread runs any more
            # A lock that only this wait and its ringer know: what is left behind by an interrupt is nobody's.
            bell = threading.Lock()
            bell.acquire()
            ticket = self._enlist(bell.release)
            try:
                bell.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX))
            finally:
                self._to_tell.pop(ticket, None)
        return self._result is not None

    @property
    def is_over(self) -> bool:
        """Whether the function has ended, or never will be called."""
        return self._result is not None

    @property
    def result(self) -> Result:
        """What the function did, once it is over; `error` is whatever it raised, `SystemExit` among it."""
        if self._result is None:
            raise RuntimeError(f"{self.name!r} is not over")
        if self._result is _TAKEN_BACK:
            return Result(None, RuntimeError(f"{self.name!r} was not called"))
        return self._result

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call `tell` once it is over, in the work's thread; here and now where it is. What `tell` raises is dropped.

        It should be short, and must not wait for another work: the thread counts as idle already.
        """
        self._enlist(tell)

    def _enlist(self, tell: Callable[[], object]) -> object:
        ticket = object()
        self._to_tell[ticket] = tell
        # The result is set before the list is read, and here the other way round: one of the two sees the other, and
        # `pop` decides if both do.
        if self._result is not None and self._to_tell.pop(ticket, None) is not None:
            with suppress(Exception):
                tell()
        return ticket

    def _tell(self) -> None:
        for ticket in list(self._to_tell):
            tell = self._to_tell.pop(ticket, None)
            if tell is not None:
                with suppress(BaseException):  # as a closed event loop does; the others are told nevertheless
                    tell()

    def _end_uncalled(self, result: Result) -> bool:
        try:
            # No call stands between these two lines, so that no interrupt comes between them.
            del self._call[0]
            self._result = result
        except IndexError:
            return False
        self._tell()
        return True


_TAKEN_BACK = Result(None, None)


def start(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Work:
    """Call `function(**arguments)` in a thread of that name, with the caller's context variables."""
    work = Work(function, arguments, name)
    work.start()
    return work


def _result_of(context: Context, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Result:
    try:
        return Result(context.run(function, **arguments), None)
    except BaseException as error:
        return Result(None, error)
    finally:
        del context, function, arguments  # the traceback of an error keeps this frame, which need not keep them


class _Worker:
    """A thread that does one work after the other, and ends when there was none for a while.

    Nothing here is done under a lock, since a signal handler or a finalizer may come in between and start another work.
    """

    __slots__ = ("_bell", "_next", "_thread")

    def __init__(self, work: Work) -> None:
        self._next: dict[str, Work | None] = {_WORK: work}
        """What comes next; None once the thread is to end. The first to put something there has decided."""
        self._bell = threading.Lock()
        """Released when there is something next."""
        self._bell.acquire()
        self._thread = threading.Thread(target=self._live, name=work.name, daemon=True)

    def begin(self) -> None:
        """Start the thread, without waiting for it."""
        # User's code runs in it, and debuggers, coverage and logging know no other threads than those of `threading`. But
        # their start waits for the thread's first turn, in locks that an interrupt of the main thread leaves in disorder.
        # So it is another thread that starts this one.
        _thread.start_new_thread(self._begin, ())

    def _begin(self) -> None:
        try:
            self._thread.start()
        except Exception as error:
            if (work := self._next[_WORK]) is not None:
                work._end_uncalled(Result(None, RuntimeError(f"{work.name!r} was not called: {error}")))

    def give(self, work: Work) -> bool:
        """Whether the thread does this work; it may be about to end. Call with a worker from among the idle."""
        try:
            return self._next.setdefault(_WORK, work) is work
        finally:
            self._bell.release()  # also where an interrupt comes after the work was given

    def _live(self) -> None:
        while (work := self._next[_WORK]) is not None:
            del self._next[_WORK]
            self._thread.name = work.name
            result = None
            with suppress(IndexError):  # it was taken back
                result = _result_of(*work._call.pop())
            self._thread.name = "agent-run-ledger idle"
            _idle.append(self)  # before anybody can know: who then starts another work finds this thread
            if result is not None:
                work._result = result
                work._tell()
            del work, result  # nothing is kept while it waits
            self._await_next()

    def _await_next(self) -> None:
        if len(_idle) <= MOST_IDLE and self._bell.acquire(timeout=IDLE_SECONDS):
            return
        if self._next.setdefault(_WORK, None) is None:
            with suppress(ValueError):  # somebody has it in hand, and will find that it has ended
                _idle.remove(self)
        else:
            self._bell.acquire()  # given this very moment: the bell rings, if it has not yet


_WORK = "work"
_idle: list[_Worker] = []
"""The last to become idle is the next to work, so that the others have a chance to end."""


def _pop_idle() -> _Worker | None:
    try:
        return _idle.pop()
    except IndexError:
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the threads are the parent's
