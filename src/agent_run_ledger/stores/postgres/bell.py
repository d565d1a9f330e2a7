"""The bell: whoever waits for work hears at once of what others made due, in this process or by the database."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

import psycopg

from agent_run_ledger.stores.postgres.connections import Connections
from agent_run_ledger.stores.postgres.link import SYNCED, Link

_CHANNEL = "agent_run_ledger"
# In a transaction of its own, which waits for no disk: a NOTIFY takes a lock that all of them share until its commit is done.
_RING = f"SELECT pg_notify('{_CHANNEL}', coalesce(current_schema(), '') || ' ' || %s) WHERE {SYNCED}".encode()
_LISTEN = f"LISTEN {_CHANNEL}".encode()
_SCHEMA = b"SELECT coalesce(current_schema(), '')"

_RECONNECT_SECONDS = 1.0


class Bell:
    """Only ever a hint: what nobody heard is found by looking.

    Of the threads that wait one listens to the database, on a connection of its own that stays open, so that what rings while nobody
    waits is heard by the next. Behind a pooler, which hands no notifications on, only this process is heard.
    """

    def __init__(self, links: Connections, mark: str) -> None:
        self._links = links
        self._mark = mark
        """What tells this store's own ringing, which was heard without the database."""
        self._news = threading.Condition()
        self._rung = 0
        self._heard = threading.local()
        """`rung` is how often it had rung when the thread waited last."""
        self._has_listener = False
        self._is_closed = False
        self._line: Link | None = None
        self._schema = ""
        self._not_before = 0.0
        self._waker: tuple[socket.socket, socket.socket] | None = None

    def wait(self, seconds: float) -> bool:
        """Return after `seconds`, or True as soon as it has rung since the calling thread waited last."""
        end = time.monotonic() + seconds
        heard = getattr(self._heard, "rung", None)
        while True:
            listens = is_rung = False
            try:
                with self._news:
                    left = end - time.monotonic()
                    if self._rung != heard or self._is_closed or left <= 0:
                        self._heard.rung = self._rung
                        return self._rung != heard or self._is_closed
                    if self._has_listener:
                        self._news.wait(left)
                        continue
                    waker = self._waker = self._waker or _pair()
                    listens = True  # first, for an interrupt may come anywhere
                    self._has_listener = True
                is_rung = self._listen(left, waker[0])
            finally:
                if listens:
                    with self._news:
                        self._has_listener = False
                        self._rung += is_rung
                        self._news.notify_all()  # the next one listens, or all have heard

    def ring(self) -> None:
        """Wake all who wait in this process."""
        with self._news:
            self._rung += 1
            self._news.notify_all()
            self._wake_listener()

    def ring_elsewhere(self, link: Link) -> None:
        """Wake all who wait, wherever they are."""
        self.ring()
        with suppress(psycopg.Error):
            link.execute(_RING, (self._mark, "off"))

    def close(self) -> None:
        """Let everybody go who waits, and hear nothing any more."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
            self._wake_listener()
            self._news.wait_for(lambda: not self._has_listener, timeout=5.0)
            if not self._has_listener:
                self._hang_up()
                for end in self._waker or ():
                    end.close()
                self._waker = None

    def _wake_listener(self) -> None:
        if self._has_listener and self._waker is not None:
            with suppress(BlockingIOError):  # then it is full of reasons to wake up
                self._waker[1].send(b"\0")

    def _listen(self, seconds: float, waker: socket.socket) -> bool:
        """Whether the database rang within `seconds`. Returns when the waker is used, too."""
        line = self._line
        if line is None and self._call():
            return True  # nobody knows what was missed before
        with selectors.DefaultSelector() as selector:
            selector.register(waker, selectors.EVENT_READ)
            if line is not None:
                selector.register(line.fileno(), selectors.EVENT_READ)
            elif self._can_call():
                seconds = min(seconds, _RECONNECT_SECONDS)
            selector.select(seconds)
        with suppress(BlockingIOError):
            while waker.recv(4096):
                pass
        if line is None:
            return False
        try:
            told = [notify.payload for notify in line.notifies(timeout=0)]
        except psycopg.Error:  # nobody knows what was missed
            self._hang_up()
            return True
        return any(said.startswith(f"{self._schema} ") and not said.endswith(self._mark) for said in told)

    def _call(self) -> bool:
        """Whether there is a line now."""
        if not self._can_call() or time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _RECONNECT_SECONDS
        try:
            self._line = self._links.open()
            if self._can_call():
                self._line.execute(_LISTEN)
                ((self._schema,),) = self._line.execute(_SCHEMA).fetchall()
                return True
        except psycopg.Error:
            pass  # then it is tried again in a while
        self._hang_up()
        return False

    def _can_call(self) -> bool:
        return not self._links.is_behind_pooler and not self._is_closed

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            self._links.discard(line)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair
