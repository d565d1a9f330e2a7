"""Opening a file as a ledger: is it one, of which version, and bringing an older one up to date, once."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Sequence

from agent_run_ledger.errors import NotALedger, SchemaTooNew, StoreCorrupt, StoreError, StoreReadOnly, StoreUnavailable
from agent_run_ledger.stores.faults import named
from agent_run_ledger.stores.filelock import WriteLock

APPLICATION_ID = 0x41524C31
"""What `PRAGMA application_id` says in every ledger: "ARL1"."""
SCHEMA_VERSION = 6
"""The number of the last file in `migrations`."""

OBJECTS = "SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
"""Asks a database for the names and the SQL of its tables, indexes, triggers and views."""

# Who may not write an older file reads it as if it had been brought up to date, through what stands here in the place of its tables.
_COLUMNS_OF_RUNS = {
    3: """NULL AS queue, 0 AS priority, NULL AS key, NULL AS due, NULL AS moved_to,
        said_in((SELECT body FROM entries WHERE run_id = r.run_id AND seq = 1), 'at') AS created_at,
        said_in((SELECT body FROM entries WHERE run_id = r.run_id AND seq = 1), 'agent') AS agent""",
    4: "0 AS deaths, NULL AS deaths_after",
}
"""The columns that came with a version, as they would stand in an older file."""
_TABLES = {
    3: "CREATE TEMP TABLE boots (boot, ahead, reached, news); CREATE TEMP TABLE workers (worker, said, beat);",
}

_FOLDER = os.path.dirname(__file__)
_LOG_LIMIT_BYTES = 8 * 1024 * 1024
_FULL = 2
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # https://www.sqlite.org/fileformat2.html, 3: The Rollback Journal


def load_migrations() -> list[str]:
    """The scripts of `migrations`, in order: the n-th brings a file from version n-1 to version n."""
    names = sorted(name for name in os.listdir(os.path.join(_FOLDER, "migrations")) if name.endswith(".sql"))
    return [_read("migrations", name) for name in names]


def load_whole() -> str:
    """What all migrations make of an empty file, in one script that makes each thing once: a new file takes a quarter of the time."""
    return _read("schema.sql")


def _read(*path: str) -> str:
    with open(os.path.join(_FOLDER, *path), encoding="utf-8") as script:
        return script.read()


class Database:
    """One SQLite file, and how connections to it are made. Makes none by itself; writes only what `prepare` says."""

    def __init__(self, path: str, lock: WriteLock, busy_seconds: float, migrations: Sequence[str] | None) -> None:
        self.path = path
        self._lock = lock
        self._busy_seconds = busy_seconds
        self._migrations = migrations
        self._version = SCHEMA_VERSION if migrations is None else len(migrations)

    def open_writer(self) -> sqlite3.Connection:
        """A connection to an up-to-date ledger: a new file is made and an older one migrated first, by one process only."""
        try:
            if not os.path.exists(self.path) or os.path.getsize(self.path) == 0:
                self._refuse_unmakeable()
            elif not (os.access(self.path, os.W_OK) and os.access(os.path.dirname(self.path), os.W_OK | os.X_OK)):
                self._refuse_read_only()
            elif not os.path.isdir(self.path + ".owners"):  # where owners have been, the file is ours
                self._refuse_foreign()
            connection = self._connect(self.path, uri=False)
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise named(error, self.path) from error
        return connection

    def open_reader(self, *, is_alone: bool = False) -> sqlite3.Connection:
        """A connection that cannot write. `is_alone`: no writer of ours has looked at the file before."""
        try:
            if is_alone and not os.path.exists(self.path):
                raise StoreUnavailable(f"there is no database {self.path!r}, and a read-only ledger makes none.")
            if is_alone:
                self._refuse_foreign()
            connection = self._connect(_uri(self.path, "mode=ro"), uri=True)
            try:
                try:
                    version = self._check(connection)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
                        raise StoreReadOnly(
                            f"a process was killed while it wrote the database {self.path!r} itself. What it left half-written has "
                            "to be undone first, and a read-only ledger writes nothing; nothing was changed. Open the ledger once "
                            "for writing, then read-only again."
                        ) from error
                    # On a disk that nobody can write SQLite cannot make the files that go with the log, nor needs them.
                    if os.access(os.path.dirname(self.path), os.W_OK) or os.path.exists(self.path + "-wal"):
                        raise
                    connection.close()
                    connection = self._connect(_uri(self.path, "immutable=1"), uri=True)
                    version = self._check(connection)
                if version < max(_COLUMNS_OF_RUNS):
                    connection.executescript(_stand_ins(version))
                connection.execute("PRAGMA query_only=1")
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise named(error, self.path) from error
        return connection

    def expected_objects(self, version: int) -> dict[str, str]:
        """The SQL of every table, index, trigger and view that a ledger of this version has, by name."""
        try:
            connection = self._connect(":memory:", uri=False)
            try:
                for script in self._known_migrations()[:version]:
                    connection.executescript(script)
                return objects(connection)
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise named(error, self.path) from error

    def _connect(self, name: str, *, uri: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(
            name,
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
            uri=uri,
        )
        connection.create_function("said_in", 2, _said_in, deterministic=True)
        return connection

    def _refuse_unmakeable(self) -> None:
        folder = os.path.dirname(self.path)
        if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
            self._refuse_read_only()

    def _refuse_read_only(self) -> None:
        raise StoreReadOnly(
            f"the database {self.path!r} or its folder is not writable for this user; nothing was changed. Make both "
            "writable, or open the ledger read-only."
        )

    def _refuse_foreign(self) -> None:
        """Look at a file first through a connection that takes no locks and leaves no trace.

        A plain connection would play the log of a foreign database back into it when it closes. The application id is
        written before a file is put into WAL mode, so it always stands in the file itself.
        """
        try:
            self._glance()
        except (sqlite3.Error, StoreError):
            if os.path.exists(self.path + ".lock"):
                # One of us may be making this file at this moment, and a half-made one looks like anything: look when he is done.
                self._lock.during(self._look_again)
            else:
                self._look_again()

    def _look_again(self) -> None:
        try:
            self._glance()
        except sqlite3.Error:
            if not self._is_half_made():
                raise

    def _glance(self) -> None:
        connection = self._connect(_uri(self.path, "immutable=1"), uri=True)
        try:
            if not self._is_new(connection):
                self._known_version(connection)
        except sqlite3.Error:
            # Where there is a log somebody may be copying it into the file at this moment: then errors mean nothing.
            if not os.path.exists(self.path + "-wal"):
                raise
        finally:
            connection.close()

    def _is_half_made(self) -> bool:
        """Whether one of us was killed while making this file, and SQLite will undo what stands there.

        The journal alone does not say so: another program's database must be left to that program, and whatever was put in the
        place of a lost file would be cut off. Where there is a first page it carries our id, and where there is none yet, zeros.
        """
        pages_before = self._pages_before_unfinished_write()
        if pages_before is None:
            return False
        connection = self._connect(_uri(self.path, "immutable=1"), uri=True)
        try:
            # Without this a file that is shorter than its header says is not read at all.
            connection.execute("PRAGMA writable_schema=1")
            return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)
        except sqlite3.DatabaseError:
            if pages_before > 0:
                return False
        finally:
            connection.close()
        # To close the file loses this process's locks on it; nobody has locks on what is no database.
        with open(self.path, "rb") as file:
            return not any(file.read(512))

    def _pages_before_unfinished_write(self) -> int | None:
        """How many pages the file had before the write whose rollback journal stands beside it; None where none does."""
        path = self.path + "-journal"
        if not os.path.exists(path):  # nearly always: then nothing is opened beside SQLite
            return None
        try:
            with open(path, "rb") as journal:  # it has no locks that closing it could drop
                header = journal.read(20)
        except FileNotFoundError:
            return None
        return int.from_bytes(header[16:], "big") if len(header) == 20 and header.startswith(_JOURNAL_MAGIC) else None

    def _check(self, connection: sqlite3.Connection) -> int:
        """The version of the ledger; refuses what is none, or a newer one."""
        if self._is_new(connection):
            raise NotALedger(f"{self.path!r} is an empty database, not a ledger; it was not changed. Check the path.")
        return self._known_version(connection)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        # In this order: whoever makes the file writes both in one commit, so where there are tables there is an id by now.
        is_empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        if application_id == APPLICATION_ID:
            return False
        if application_id == 0 and is_empty:
            return True
        raise NotALedger(
            f"{self.path!r} is a database of another program (application id {application_id}); it was not changed. "
            "Check the path."
        )

    def _known_version(self, connection: sqlite3.Connection) -> int:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > self._version:
            raise SchemaTooNew(
                f"the database {self.path!r} has schema {version}, this version of agent-run-ledger knows schemas up to "
                f"{self._version}; it was not changed. Upgrade agent-run-ledger."
            )
        if version < 1:
            raise StoreCorrupt(
                f"the database {self.path!r} carries a ledger's application id and schema version {version}, which no ledger "
                "has; it was not changed. Restore a backup."
            )
        return int(version)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._pages_before_unfinished_write() is not None:
            # Of a killed process, or of one that is at it and done when we have the lock. SQLite undoes it with the first read.
            self._lock.during(lambda: connection.execute("PRAGMA schema_version").fetchone())
        is_current = not self._is_new(connection) and self._known_version(connection) == self._version
        if not is_current:
            self._lock.during(lambda: self._bring_up_to_date(connection))
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != "wal":
            self._set_wal(connection)
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"PRAGMA journal_size_limit={_LOG_LIMIT_BYTES}")
        if sys.platform == "darwin":
            connection.execute("PRAGMA fullfsync=1")
            connection.execute("PRAGMA checkpoint_fullfsync=1")
        # Read back: an SQLite that will not sync is not to be trusted.
        connection.execute(f"PRAGMA synchronous={_FULL}")
        (level,) = connection.execute("PRAGMA synchronous").fetchone()
        if level != _FULL:
            raise StoreError(
                f"this SQLite does not take synchronous=FULL for {self.path!r} (it says {level}), so nothing it writes could "
                "be promised; nothing was written. Use an SQLite without that restriction."
            )

    def _bring_up_to_date(self, connection: sqlite3.Connection) -> None:
        # Looked at again: while we waited for the lock another process may have done it.
        version = 0 if self._is_new(connection) else self._known_version(connection)
        if version == self._version:
            return
        scripts = self._scripts(version)
        if version:
            self._back_up(connection, version)
        connection.execute(f"PRAGMA synchronous={_FULL}")
        try:
            # First, so that the first page is never written without it: see `_is_half_made`.
            stamp = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={self._version};"
            connection.executescript("\n".join(["BEGIN IMMEDIATE;", stamp, *scripts, "COMMIT;"]))
        except BaseException:
            if connection.in_transaction:
                connection.rollback()
            raise

    def _set_wal(self, connection: sqlite3.Connection) -> None:
        (mode,) = self._lock.during(lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone())
        if mode != "wal":
            raise StoreError(
                f"the database {self.path!r} cannot use a write-ahead log here (journal mode {mode!r}); nothing was written. "
                "Put it on a local disk."
            )

    def _back_up(self, connection: sqlite3.Connection, version: int) -> None:
        """Copy the file by SQLite itself to `<database>.v<version>.backup`, whole or not at all."""
        backup = f"{self.path}.v{version}.backup"
        unfinished = backup + ".unfinished"
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        copy = sqlite3.connect(unfinished, isolation_level=None)
        try:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        finally:
            copy.close()
        os.replace(unfinished, backup)
        if os.name == "posix":  # the copy has to be there for good before the original is changed
            folder = os.open(os.path.dirname(backup), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _scripts(self, version: int) -> Sequence[str]:
        """What brings a file of this version, 0 for a new one, up to date."""
        return [load_whole()] if version == 0 and self._migrations is None else self._known_migrations()[version:]

    def _known_migrations(self) -> Sequence[str]:
        return load_migrations() if self._migrations is None else self._migrations


def _stand_ins(version: int) -> str:
    """What stands in the place of the tables that a file of this version lacks, and of those that lack columns."""
    columns = ", ".join(columns for came, columns in _COLUMNS_OF_RUNS.items() if came > version)
    tables = " ".join(tables for came, tables in _TABLES.items() if came > version)
    return f"CREATE TEMP VIEW runs AS SELECT r.rowid AS rowid, r.*, {columns} FROM main.runs r; {tables}"


def objects(connection: sqlite3.Connection) -> dict[str, str]:
    """The SQL of every table, index, trigger and view of a database, by name."""
    return dict(connection.execute(OBJECTS))


def _said_in(body: bytes, name: str) -> str | float | None:
    """What the body of an entry says under this name, a text or a number; None where it says nothing of the kind."""
    import json

    try:
        said = json.loads(body)[name]
        if isinstance(said, str):
            said.encode()  # refuses what SQLite could not take
            return said
        return float(said)
    except Exception:  # who wrote into the file may have written anything
        return None


def _uri(path: str, parameter: str) -> str:
    escaped = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{escaped}?{parameter}"
