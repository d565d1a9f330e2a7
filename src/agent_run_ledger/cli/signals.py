"""SIGTERM ends a command as Ctrl-C does, and neither is lost where it does not wake the main thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agent_run_ledger.cli.shell import TERMINATED

_NUDGE = signal.SIGURG
"""A signal that means nothing to most programs."""
_PAUSES_SECONDS = (0.05, 0.2, 1.0)


class Ending:
    """What SIGTERM makes of a block of the main thread: `SystemExit`.

    Python calls a handler in the main thread alone. A signal that comes just before that goes to sleep, or to another thread, does not
    wake it: so the system rings at a pipe, too, and whoever listens there nudges the main thread with another signal.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._may_nudge = False
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._bell, False)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """The block may be ended by it."""
        handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._come)}
        self._may_nudge = signal.getsignal(_NUDGE) == signal.SIG_DFL
        if self._may_nudge:
            handlers[_NUDGE] = signal.signal(_NUDGE, lambda *_: None)  # what is ignored wakes nobody
        former = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, name="agent-run-ledger signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(former, warn_on_full_buffer=False)
            os.write(self._bell, b"\0")
            listener.join()
            os.close(self._bell)
            os.close(self._ear)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        sys.exit(TERMINATED)

    def _listen(self) -> None:
        while (number := os.read(self._ear, 1)[0]) != 0:
            if number in (signal.SIGTERM, signal.SIGINT) and self._may_nudge:
                threading.Thread(target=_nudge, daemon=True).start()


def _nudge() -> None:
    for seconds in _PAUSES_SECONDS:
        time.sleep(seconds)
        with suppress(OSError):
            signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)
