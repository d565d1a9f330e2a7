"""What the errors of PostgreSQL and of the way to it mean for the user of a ledger: one function from theirs to ours."""

from __future__ import annotations

import psycopg

from agent_run_ledger.errors import (
    NotALedger,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_CONFLICTS = frozenset(
    {"40001", "40P01", "55P03", "57014"}
)  # serialization failure, deadlock, lock not available, statement timeout
_NOT_NOW = frozenset({"53300", "53400", "57P03"})  # too many connections, limit exceeded, cannot connect now
_ENDED = frozenset({"57P01", "57P02", "57P05", "25P03"})  # the session was ended, by whomever
_STALE = frozenset({"0A000", "26000", "42P05"})  # a prepared statement that its table, or a pooler, has left behind
_FULL = frozenset({"53100"})
_READ_ONLY = frozenset({"25006"})
_CORRUPT = frozenset({"XX001", "XX002"})
_NO_RIGHT = frozenset({"42501"})
_UNKNOWN_OBJECTS = frozenset({"42P01", "42703"})

# What a server says to a client that it will not have at all; libpq gives no code for it.
_REFUSALS = (
    "authentication failed",
    "does not exist",
    "pg_hba.conf",
    "permission denied",
    "no password supplied",
    "no such",
)


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection is gone, or not to be trusted any more: what was asked last may have been done all the same."""
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError)
    return code in _ENDED or code.startswith(("08", "58")) or code == "40003"


def is_passing(error: psycopg.Error) -> bool:
    """Whether another try may do, with nothing changed by anybody."""
    code = error.sqlstate
    return is_lost(error) or code in _CONFLICTS or code in _NOT_NOW or code in _READ_ONLY or is_stale(error)


def is_stale(error: psycopg.Error) -> bool:
    """Whether a prepared statement is not what it was: nothing was done, and another connection will do."""
    code = error.sqlstate
    return code in _STALE and (code != "0A000" or "cached plan" in str(error))


def is_read_only(error: psycopg.Error) -> bool:
    """Whether the server writes nothing: for good, or because it is a standby."""
    return error.sqlstate in _READ_ONLY


def is_refused_connection(error: psycopg.Error) -> bool:
    """Whether the server was reached and will not have this client, now or later."""
    said = str(error)
    return any(words in said for words in _REFUSALS)


def named(error: psycopg.Error, place: str, waited_seconds: float = 0.0) -> StoreError:
    """The error of ours that says what `error` means for the ledger at `place`, and what to do."""
    said = _words(error)
    code = error.sqlstate
    after = f" for {waited_seconds:.0f} s" if waited_seconds >= 1.0 else ""
    if code in _CONFLICTS:
        return StoreBusy(
            f"others kept what is needed in {place} locked{after} ({said}); nothing was written. Call again, or look for a session "
            "that holds a transaction open."
        )
    if code in _NOT_NOW:
        return StoreUnavailable(
            f"{place} takes no further connection{after} ({said}); nothing was written. Call again."
        )
    if code in _READ_ONLY:
        return StoreReadOnly(
            f"{place} cannot be written{after} ({said}); nothing was changed. It may be a standby: give the address of the primary, or "
            "of both, or open the ledger read-only."
        )
    if code in _NO_RIGHT:
        return StoreReadOnly(
            f"this role may not do in {place} what a ledger needs ({said}); nothing was changed. Give it the rights: "
            "`agent-run-ledger migrate --grant ROLE`."
        )
    if code in _FULL:
        return StoreFull(f"the disk of {place} is full ({said}); this was not written. Make room and call again.")
    if code in _CORRUPT:
        return StoreCorrupt(f"{place} is damaged ({said}). Keep it for inspection and restore a backup.")
    if code in _UNKNOWN_OBJECTS:
        return NotALedger(
            f"{place} has no table of a ledger where one was ({said}); nothing was written. Somebody dropped or moved it: restore a "
            "backup, or check the search_path."
        )
    if is_lost(error):
        return StoreUnavailable(
            f"{place} could not be reached{after} ({said}); what was not acknowledged may or may not be written. Look after the "
            "server and the way to it, then call again."
        )
    return StoreError(f"{place} refused this ({said}); nothing was written.")


def _words(error: psycopg.Error) -> str:
    """What the server or the driver said, in one line."""
    said = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(said.split())
