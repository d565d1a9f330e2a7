"""The connections to one PostgreSQL database: a few that are shared, what stands between, and how an outage is waited out."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import psycopg
from psycopg import conninfo
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper

from agent_run_ledger.errors import LedgerError, StoreError, StoreUnavailable
from agent_run_ledger.stores.postgres.clock import SERVER_TIME, ServerClock
from agent_run_ledger.stores.postgres.faults import (
    is_lost,
    is_passing,
    is_read_only,
    is_refused_connection,
    is_stale,
    named,
)
from agent_run_ledger.stores.postgres.link import Link

MOST_CONNECTIONS = 8
"""How many one store opens: more threads wait for one another, not for more connections."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_CONNECT_SECONDS = 10
_SILENCE_SECONDS = 30.0
_FORK_WAIT_SECONDS = 5.0
_never_closed: list[Link] = []

# What a connection says of itself unless the address says otherwise. A peer that is gone is noticed within half a minute.
_DEFAULTS: dict[str, str | int] = {
    "application_name": "agent-run-ledger",
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

_WHO_AND_WHEN = f"SELECT pg_backend_pid(), {SERVER_TIME}".encode()

# Each statement is planned once, for any values: to plan the longer ones takes longer than to do them, and to compile them takes a
# thousand times as long. Its plan is kept from when there were few runs, so it must be the one that is right for many: by the indexes.
_PLANS = b"""
SET plan_cache_mode = force_generic_plan; SET jit = off;
SET enable_seqscan = off; SET enable_bitmapscan = off
"""

T = TypeVar("T")


class Connections:
    """A stack of connections that are opened when they are needed; the one that was used last is used next.

    A KeyboardInterrupt, or whatever else comes in the middle of a statement, costs the connection: nothing of it is used again.
    """

    def __init__(self, dsn: str, outage_seconds: float, *, read_only: bool) -> None:
        self.terms = connection_terms(dsn, read_only=read_only)
        self.place = place_of(dsn)
        self.read_only = read_only
        self.outage_seconds = outage_seconds
        self.reply_seconds = min(10.0, max(0.5, outage_seconds / 4))
        self.is_closed = False
        self.clock = ServerClock()
        self.is_behind_pooler = False
        """Whether what is connected to hands its sessions to others between transactions."""
        self._next_warning = 0.0
        self._idle: list[Link] = []
        self._renew()

    def _renew(self) -> None:
        self._open: weakref.WeakSet[Link] = weakref.WeakSet()
        self._opening = 0
        self._free = threading.Condition()
        self._waiting = 0
        self._end = threading.Event()

    # --- work ---------------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Link], T], again: Callable[[Link], T] | None = None) -> T:
        """Do `work`, one statement or one transaction, and wait out an outage of up to `outage_seconds`.

        `work` may be done twice. Where that would not be the same, `again` is what is done once it is not known whether `work` was.
        """
        link = self.take()
        try:
            answer = work(link)
        except psycopg.Error as error:
            fault = error
        except BaseException as error:
            self._interrupted(link, error)
            raise
        else:
            self.give(link)
            return answer
        return self._go_on(link, fault, work, again or work)

    def _go_on(self, link: Link, fault: psycopg.Error, work: Callable[[Link], T], again: Callable[[Link], T]) -> T:
        """After a failure: done anew, for as long as an outage is waited for."""
        begun = time.monotonic()
        pause = 0.0
        is_in_doubt = False
        while True:
            if is_lost(fault):
                self._warn(fault)
                work, is_in_doubt = again, True
            is_final = not is_passing(fault) or (is_read_only(fault) and not _is_standby(link))
            self._let_go_of(link, fault)
            waited = time.monotonic() - begun
            if is_final or waited + pause > self.outage_seconds or self._end.wait(pause * random.uniform(0.5, 1.0)):
                raise _told(named(fault, self.place, waited), is_in_doubt) from fault
            pause = min(_LONGEST_PAUSE_SECONDS, max(_FIRST_PAUSE_SECONDS, pause * 2))
            try:
                link = self._connected(begun)
            except StoreError as error:
                raise _told(error, is_in_doubt) from error.__cause__
            try:
                answer = work(link)
            except psycopg.Error as error:
                fault = error
            except BaseException as error:
                self._interrupted(link, error)
                raise
            else:
                self.give(link)
                return answer

    def _interrupted(self, link: Link, error: BaseException) -> None:
        """After what is no failure of the database: our own answer, or whatever else came in the middle of a statement."""
        self._end_of(link, is_sound=isinstance(error, LedgerError | UnicodeEncodeError))
        if isinstance(error, UnicodeEncodeError):
            raise StoreError(
                f"{self.place} keeps text as UTF-8, which cannot hold U+{ord(error.object[error.start]):04X}; nothing was written."
            ) from error

    def _let_go_of(self, link: Link, fault: psycopg.Error) -> None:
        if is_stale(fault):
            self.is_behind_pooler = self.is_behind_pooler or fault.sqlstate != "0A000"
        elif is_lost(fault) and not link.closed:
            with suppress(psycopg.Error):  # nobody waits for its end any more
                link.cancel_safe(timeout=1.0)
        # What a primary that became a standby was asked, another server has to be asked: so its connection goes, too.
        keep = not (is_lost(fault) or is_stale(fault) or is_read_only(fault))
        self._end_of(link, is_sound=keep)
        if not keep:
            self._drop_idle()  # they lead to the same place

    def _warn(self, fault: psycopg.Error) -> None:
        """Tell whoever reads logs why nothing happens, once in a while."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _SILENCE_SECONDS
            logging.getLogger("agent_run_ledger").warning(
                "%s was lost or cannot be reached (%s): it is tried again for up to %.0f s",
                *(self.place, " ".join(str(fault).split()), self.outage_seconds),
            )

    # --- the stack ----------------------------------------------------------------------------------------------------

    def take(self) -> Link:
        """A connection that nobody else uses, until `give`."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._connected(time.monotonic())

    def give(self, link: Link) -> None:
        """Put a sound connection back."""
        self._idle.append(link)
        if self._waiting or self.is_closed:
            self._tell()

    def _tell(self) -> None:
        if self.is_closed:
            self._drop_idle()
        with self._free:
            self._free.notify()

    def _end_of(self, link: Link, *, is_sound: bool) -> None:
        if is_sound and not link.closed and link.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            self.give(link)
            return
        self.discard(link)

    def discard(self, link: Link) -> None:
        """Close a connection for good."""
        link.close()
        with self._free:
            self._open.discard(link)
            self._free.notify()

    def _drop_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):
                self.discard(self._idle.pop())

    def _connected(self, begun: float) -> Link:
        """One that is free, or a new one where there may be more. Waits out an outage that began at `begun`."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if (link := self._free_one(begun)) is not None:
                return link
            try:
                return self.open()
            except psycopg.Error as error:
                waited = time.monotonic() - begun
                if is_refused_connection(error) or not is_passing(error):
                    raise StoreError(
                        f"{self.place} does not take this ledger as its client ({' '.join(str(error).split())}); nothing was done. "
                        "Check the address, the role and its password."
                    ) from error
                self._warn(error)
                if waited + pause > self.outage_seconds or self._end.wait(pause * random.uniform(0.5, 1.0)):
                    raise named(error, self.place, waited) from error
                pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)
            finally:
                with self._free:
                    self._opening -= 1
                    self._free.notify()

    def _free_one(self, begun: float) -> Link | None:
        """A connection from the stack; None where a new one may be opened, which is counted then."""
        with self._free:
            self._waiting += 1
            try:
                while True:
                    if self.is_closed:
                        raise StoreUnavailable(f"the ledger on {self.place} is closed; nothing was done. Open it anew.")
                    with suppress(IndexError):
                        return self._idle.pop()
                    if len(self._open) + self._opening < MOST_CONNECTIONS:
                        self._opening += 1
                        return None
                    if not self._free.wait(max(0.0, begun + self.outage_seconds - time.monotonic())):
                        raise StoreUnavailable(
                            f"all {MOST_CONNECTIONS} connections to {self.place} were in use for {self.outage_seconds:.0f} s; nothing "
                            "was done. Call again."
                        )
            finally:
                self._waiting -= 1

    def open(self) -> Link:
        """A new connection. Raises `psycopg.Error`."""
        link = Link.connect(**self.terms, autocommit=True, prepare_threshold=None, row_factory=tuple_row)
        try:
            link.reply_seconds = self.reply_seconds
            for dumper in (Int8Dumper, Int8BinaryDumper):  # one type whatever the number, so one plan
                link.adapters.register_dumper(int, dumper)
            asked_at = self.clock.elapsed()
            ((process, said),) = link.execute(_WHO_AND_WHEN).fetchall()
            self.clock.hear(said, asked_at, is_another=not self._open)
            # What a pooler tells its client to be cancelled by is not the process that does the work.
            self.is_behind_pooler = self.is_behind_pooler or process != link.info.backend_pid
            if not self.is_behind_pooler:
                link.execute(_PLANS)
                link.prepare_threshold = 1
                if self.read_only:
                    link.execute(b"SET default_transaction_read_only = on")
        except BaseException:
            link.close()
            raise
        with self._free:
            self._open.add(link)
        return link

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def close(self, last: Callable[[Link], object] | None = None) -> None:
        """Do what is `last`, if that can be done at once, and close what is idle now, and the rest as it comes back."""
        if self.is_closed:
            return
        self.is_closed = True
        if last is not None:
            with suppress(psycopg.Error, LedgerError):
                self._do_at_once(last)
        self._end.set()
        self._drop_idle()
        with self._free:
            self._free.notify_all()

    def _do_at_once(self, work: Callable[[Link], object]) -> None:
        """Without waiting for anything; what is idle may have been open for longer than the server, so once more on a new one."""
        for link in [*self._idle[-1:], None]:
            link = self._idle.pop() if link is not None and self._idle else self.open()
            try:
                work(link)
                return
            except psycopg.Error as error:
                if not is_passing(error):
                    raise
            finally:
                self.discard(link)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections without a word to the server, which would end the parent's sessions."""
        for link in list(self._open):
            _never_closed.append(link)
            with suppress(OSError, psycopg.Error):
                os.close(link.fileno())
        self._idle = []
        self._renew()


def _told(error: StoreError, is_in_doubt: bool) -> StoreError:
    """The error itself, unless it speaks of the last try only and an earlier one was lost on its way."""
    if not is_in_doubt or (type(error) is StoreUnavailable and "nothing was" not in str(error)):
        return error
    return StoreUnavailable(f"An earlier try of this call was lost on its way, and may have been done; then: {error}")


def _is_standby(link: Link) -> bool:
    """Whether the server follows another one, whose place it may take at any moment."""
    try:
        return link.execute(b"SELECT pg_is_in_recovery()").fetchone() == (True,)
    except psycopg.Error:
        return True


def place_of(dsn: str) -> str:
    """An address in words for people, without its password."""
    try:
        told = {key: str(value) for key, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
        are_numbers = all(port.isdecimal() for port in told.get("port", "").split(",") if port)
    except psycopg.Error:  # what libpq says of it holds all of it, and so its password
        are_numbers = False
    if not are_numbers:  # nor is a port shown that is none: a password with a slash in it is taken for one
        raise StoreError(
            "this is no address of a PostgreSQL database; nothing was opened. It is spelt postgresql://user:password@host:port/database, "
            "with what would mean something else in it written as %XX."
        ) from None
    user = f"{told['user']}@" if "user" in told else ""
    hosts, ports = told.get("host", "").split(","), told.get("port", "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    where = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    schema = f"?options={quote(told['options'])}" if "search_path" in told.get("options", "") else ""
    return f"postgresql://{user}{where}/{told.get('dbname', '')}{schema}"


def connection_terms(dsn: str, *, read_only: bool = False) -> dict[str, Any]:
    """What a connection to this address is opened with. Raises a `StoreError` where it is none."""
    place_of(dsn)  # says what is wrong with it
    given = conninfo.conninfo_to_dict(dsn)
    terms: dict[str, Any] = {**_DEFAULTS, **given, "client_encoding": "UTF8"}
    if not read_only and "," in str(given.get("host", "")):
        terms.setdefault("target_session_attrs", "read-write")  # of several servers the primary, whichever that is now
    return terms
