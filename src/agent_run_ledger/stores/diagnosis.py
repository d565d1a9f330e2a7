"""What stands around a database file, seen without writing: its file system, its size, its version, and who is alive."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from contextlib import closing

from agent_run_ledger.contract import Store
from agent_run_ledger.errors import NotALedger, SchemaTooNew, StoreCorrupt, StoreReadOnly
from agent_run_ledger.model import Diagnosis
from agent_run_ledger.stores.faults import named
from agent_run_ledger.stores.filelock import WriteLock
from agent_run_ledger.stores.owners import Owners, file_system_of
from agent_run_ledger.stores.schema import APPLICATION_ID, SCHEMA_VERSION, Database

MOST_FILES = 1000
"""How many files of a folder are looked at for ledgers."""


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Look at the file and at what it lies on. Raises a `StoreError` where there is no file, or none that may be read."""
    real = os.path.realpath(os.fsdecode(path))
    version = mode = trouble = None
    lock = WriteLock(real + ".lock", 1.0)
    try:
        with closing(Database(real, lock, 5.0, None).open_reader(is_alone=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            mode = _journal_mode(real)
    except (NotALedger, SchemaTooNew, StoreCorrupt, StoreReadOnly) as error:
        trouble = str(error)
    except sqlite3.Error as error:
        trouble = str(named(error, real))
    finally:
        lock.close()
    return Diagnosis(
        path=real,
        sqlite_version=sqlite3.sqlite_version,
        has_wal_reset_bug=has_wal_reset_bug(sqlite3.sqlite_version_info),
        file_system=_file_system(real),
        is_local=Owners(real).is_local(),
        free_bytes=shutil.disk_usage(os.path.dirname(real)).free,
        size_bytes=_size(real),
        log_bytes=_size(real + "-wal"),
        schema_version=version,
        newest_schema_version=SCHEMA_VERSION,
        journal_mode=mode,
        trouble=trouble,
    )


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether this SQLite can corrupt a WAL database when a checkpoint runs while another connection commits.

    Mended in 3.51.3, and in 3.50.7 and 3.44.6 of the older lines.
    """
    return not (
        version >= (3, 51, 3)
        or (version[:2] == (3, 50) and version >= (3, 50, 7))
        or (version[:2] == (3, 44) and version >= (3, 44, 6))
    )


def is_seen(store: Store, run_id: str, owner: str | None) -> bool:
    """Whether whoever owns the run is seen to live: by the lock that he holds on this machine, else by his lease.

    Where neither says anything he lives. The kernel's list is read. To try the lock would tell more, and could make a program that takes the run over at that moment
    believe that somebody has it.
    """
    if not isinstance(owner, str):  # a damaged head may hold anything, and nobody has such a lock
        return False
    database = getattr(store, "path", None)
    if not isinstance(database, str):
        head = store.head(run_id)
        return head is not None and head.owner == owner and (head.lease_left is None or head.lease_left > 0)
    if (locked := _locked()) is None:
        return True
    folder = Owners(database).folder
    for name in (owner, "sha256_" + hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()):
        try:
            inode = os.stat(os.path.join(folder, name)).st_ino
        except (OSError, ValueError):
            continue
        if str(inode) in locked:
            return True
    return False


def ledgers_in(folder: str) -> list[str]:
    """The names of the files in a folder that are ledgers. They are looked at through connections that leave no trace."""
    with os.scandir(folder) as entries:
        files = sorted(entry.name for _, entry in zip(range(MOST_FILES), entries, strict=False) if entry.is_file())
    return [name for name in files if _is_ledger(os.path.join(folder, name))]


def _journal_mode(path: str) -> str | None:
    """The journal mode of a ledger, or None where this user may not write the files that a log needs.

    A connection that takes the file for immutable, as a reader without rights has to, says "delete" of every file. The header is
    not read past SQLite: to close a file loses all locks that this process holds on it through SQLite.
    """
    try:
        with closing(_opened(path, "mode=ro")) as connection:
            return str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    except sqlite3.OperationalError:
        return None


def _is_ledger(path: str) -> bool:
    try:
        with closing(_opened(os.path.abspath(path), "immutable=1")) as connection:
            return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)
    except (sqlite3.Error, ValueError):  # not a database, or a name that SQLite cannot take
        return False


def _opened(path: str, parameter: str) -> sqlite3.Connection:
    escaped = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{escaped}?{parameter}", uri=True)


def _locked() -> set[str] | None:
    """The inodes of files that somebody has locked whole; None where the kernel keeps no list."""
    try:
        with open("/proc/locks", encoding="ascii") as locks:  # "1: FLOCK  ADVISORY  WRITE 16489 fe:00:2189639 0 EOF"
            return {line.split()[5].rpartition(":")[2] for line in locks if " FLOCK " in line and " -> " not in line}
    except (OSError, IndexError):
        return None


def _file_system(path: str) -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            return file_system_of(path, mounts.read()) or "unknown"
    except OSError:
        return "unknown"


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
