"""One connection to a PostgreSQL database, and the short way of the statement that is done most."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from struct import Struct
from typing import Any
from zlib import crc32

import psycopg
from psycopg import generators
from psycopg.rows import TupleRow

SYNCED = "set_config('synchronous_commit', %s, true) IS NOT NULL"
"""A condition by which a statement says of its own transaction whether it is synced, so that nothing is left in a session. It must
stand where a row is looked at; its argument is what `level` gives."""

_bigint = Struct("!q").pack
_MOST_NOTED = 1000
_SOON_SECONDS = 0.0005


class Link(psycopg.Connection[TupleRow]):
    """One connection, in autocommit. No statement relies on what another left in its session."""

    reply_seconds: float | None = None
    """How long an answer is waited for, before it is taken for lost on its way; None: as long as it takes."""
    _statements: dict[bytes, bytes] | None = None
    """The names of those that `written` has prepared here, by what they say."""
    _answers_soon = False
    """Whether the last answer to such a statement came within half a millisecond."""
    _last: dict[str, tuple[int, int]] | None = None
    """What was appended last over this connection: a run's token and its entry's seq. No server that has lost it can still be connected."""

    def written(self, statement: bytes, values: Sequence[int | str | bytes | None]) -> int | None:
        """How many rows a statement wrote that returns none; None where that is not known: `execute` then does it, or says what is wrong.

        It goes to the server without a cursor, which halves what a client works for a commit. Its places are of the types BIGINT, TEXT
        and BYTEA, as the values are.
        """
        if self.prepare_threshold is None:  # others may have the session next
            return None
        name = self._name_of(statement)
        sent = time.perf_counter()
        self.pgconn.send_query_prepared(name, [_sent(value) for value in values], [1] * len(values))
        if self._answers_soon:
            self._stay_awake(sent + _SOON_SECONDS)
        (result,) = self.wait(generators.execute(self.pgconn))
        self._answers_soon = time.perf_counter() - sent < _SOON_SECONDS
        if result.status == psycopg.pq.ExecStatus.COMMAND_OK:
            return int(result.command_tuples or 0)
        self._statements = None
        return None

    def is_next(self, run_id: str, token: int, seq: int) -> bool:
        """Whether it is known that the entry before this one stands there, under the same token: then it is the last one."""
        return self._last is not None and self._last.get(run_id) == (token, seq - 1)

    def note(self, run_id: str, token: int, seq: int) -> None:
        """This entry has been appended here."""
        if self._last is None or len(self._last) >= _MOST_NOTED:
            self._last = {}
        self._last[run_id] = (token, seq)

    def _stay_awake(self, until: float) -> None:
        """Look for the answer until it is there, at most until then. Whoever else has something to do goes first.

        A thread that sleeps for the time of a commit finds its core asleep, and its caches cold: that takes as long as the commit.
        """
        self.pgconn.flush()
        answer = select.poll()
        answer.register(self.pgconn.socket, select.POLLIN)
        while not answer.poll(0) and time.perf_counter() < until:
            os.sched_yield()

    def _name_of(self, statement: bytes) -> bytes:
        if self._statements is None:
            self._statements = {}
        if (name := self._statements.get(statement)) is None:
            name = b"written_%08x" % crc32(statement)  # what stands there by this name says the same
            places = count(1)
            self.pgconn.send_prepare(name, re.sub(rb"%[sb]", lambda _: b"$%d" % next(places), statement))
            self.wait(generators.execute(self.pgconn))
            self._statements[statement] = name
        return name

    def __del__(self, *_: Any) -> None:
        """It may end with whoever had it: then libpq closes it, and there is nothing to warn of."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, self.reply_seconds if timeout is None else timeout)


@contextmanager
def unhurried(link: Link) -> Iterator[None]:
    """What is asked in here may take as long as it takes."""
    seconds, link.reply_seconds = link.reply_seconds, None
    try:
        yield
    finally:
        link.reply_seconds = seconds


def _sent(value: int | str | bytes | None) -> bytes | None:
    """A value in the form in which PostgreSQL sends and takes it in binary."""
    if isinstance(value, str):
        return value.encode()
    return _bigint(value) if isinstance(value, int) else value


def level(synced: bool) -> str:
    """What a transaction has to say to be synced, or not to be."""
    return "on" if synced else "off"


@cache
def timed(statement: str, now: str) -> bytes:
    """A statement in which the expression that says what time it is stands where `{now}` stood."""
    return statement.replace("{now}", now).encode()
