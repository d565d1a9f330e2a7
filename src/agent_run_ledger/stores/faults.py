"""What the errors of SQLite and of the system mean for the user of a ledger: one function from theirs to ours."""

from __future__ import annotations

import os
import sqlite3

from agent_run_ledger.errors import (
    NotALedger,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.stores.room import free_bytes

_BUSY, _LOCKED, _READONLY, _INTERRUPT, _IOERR = 5, 6, 8, 9, 10
_CORRUPT, _FULL, _CANTOPEN, _CONSTRAINT, _NOTADB, _PERM, _AUTH = 11, 13, 14, 19, 26, 3, 23
_READONLY_DBMOVED = 8 | (4 << 8)
_IOERR_FSYNC = 10 | (4 << 8)

_LEAST_ROOM_BYTES = 64 * 1024
_SAYS_NOTHING_WAS_WRITTEN = frozenset({1, _PERM, _BUSY, _LOCKED, _READONLY, _CONSTRAINT, _AUTH, 18, 20, 25})


def code(error: sqlite3.Error | OSError) -> int:
    """SQLite's primary result code; 0 where the error is Python's own or the system's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_refused(error: sqlite3.Error | OSError) -> bool:
    """Whether a rule of the schema forbade it: then nothing was written now, and it may stand there already."""
    return code(error) == _CONSTRAINT


def leaves_doubt(error: sqlite3.Error | OSError) -> bool:
    """Whether a transaction that failed so may have been written all the same: it has to be looked up."""
    return code(error) not in _SAYS_NOTHING_WAS_WRITTEN


def is_failed_sync(error: sqlite3.Error | OSError) -> bool:
    """Whether the system could not bring to the disk what was written to a file: after that it may not try again."""
    return getattr(error, "sqlite_errorcode", 0) == _IOERR_FSYNC


def named(error: sqlite3.Error | OSError, path: str) -> StoreError:
    """The error of ours that says what `error` means for the ledger at `path`, and what to do."""
    said = str(error)
    if isinstance(error, OSError):
        return StoreUnavailable(
            f"the system refused what the database {path!r} needs ({said}); what was not acknowledged may not be written. "
            "Look after the disk and the limits of this process, then call again."
        )
    match code(error):
        case 5 | 6:
            return StoreBusy(
                f"another process kept the database {path!r} locked for longer than the busy timeout ({said}); nothing was "
                "written. Call again, or look for a program that holds a transaction open."
            )
        case 8 if getattr(error, "sqlite_errorcode", 0) == _READONLY_DBMOVED:
            return StoreUnavailable(
                f"the database {path!r} was moved or deleted while it was open; this was not written. Put the file back, "
                "or open the ledger anew."
            )
        case 3 | 8 | 23:
            return StoreReadOnly(
                f"the database {path!r} cannot be written ({said}); nothing was changed. Make the file and its folder "
                "writable for this user, or open the ledger read-only."
            )
        case 13:
            return _full(path, said)
        case 10 if _is_full(path):  # the file that goes with the log could not grow
            return _full(path, said)
        case 10:
            return StoreUnavailable(
                f"the disk under {path!r} failed ({said}); what was not acknowledged may not be written. Look after the "
                "disk, then call again."
            )
        case 11:
            return StoreCorrupt(
                f"the database {path!r} is damaged or truncated ({said}); it was not changed. Keep it for inspection and "
                "restore a backup."
            )
        case 14:
            return _cannot_open(path, said)
        case 26:
            return NotALedger(f"{path!r} is not an SQLite database ({said}); it was not changed. Check the path.")
        case 0 if "decode" in said:
            return StoreCorrupt(f"the database {path!r} holds text where bytes belong ({said}). Restore a backup.")
        case 0:
            return StoreUnavailable(f"the database {path!r} cannot be used: {said}. Open the ledger anew.")
    return StoreError(f"the database {path!r} refused this ({said}); nothing was written.")


def _full(path: str, said: str) -> StoreError:
    return StoreFull(
        f"the disk under {path!r} is full ({said}); what was not acknowledged was not written. Make room and call again."
    )


def _is_full(path: str) -> bool:
    free = free_bytes(os.path.dirname(path) or os.curdir)
    return free is not None and free < _LEAST_ROOM_BYTES


def _cannot_open(path: str, said: str) -> StoreError:
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        return StoreUnavailable(
            f"there is no folder {folder!r}, so the database {path!r} cannot be opened or made. Make the folder, or check "
            "the path."
        )
    if os.path.isdir(path):
        return StoreUnavailable(f"{path!r} is a folder, not a database. Give the path of a file.")
    if not os.path.exists(path) and os.access(folder, os.W_OK | os.X_OK):
        return StoreUnavailable(f"there is no database {path!r}. Check the path.")
    if not os.access(path, os.R_OK) and os.path.exists(path):
        return StoreUnavailable(f"the database {path!r} may not be read by this user. Check its rights.")
    if not os.access(folder, os.W_OK | os.X_OK):
        return StoreReadOnly(
            f"the folder {folder!r} is not writable for this user, so the database {path!r} cannot be opened; nothing was "
            "changed. Make it writable."
        )
    return StoreUnavailable(
        f"the database {path!r} cannot be opened ({said}). Check the path and the limits on open files."
    )
