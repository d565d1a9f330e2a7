"""What may be in the way: the machine's SQLite, the file and the disk it lies on, and runs that wait for somebody."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agent_run_ledger import NotALedger, SchemaTooNew, StoreCorrupt
from agent_run_ledger.cli.reading import Reading, reading
from agent_run_ledger.stores.filelock import WriteLock
from agent_run_ledger.stores.owners import Owners, file_system_of
from agent_run_ledger.stores.schema import SCHEMA_VERSION, Database

LITTLE_SPACE_BYTES = 500 * 1024 * 1024
LONG_LOG_BYTES = 64 * 1024 * 1024
MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `problem` is what a person should act upon now, `warn` what he should know."""

    name: str
    level: Literal["ok", "warn", "problem"]
    message: str


def examine(path: str) -> Iterator[Check]:
    """Look at everything, one check after the other. Raises a `StoreError` where there is no such file."""
    if not os.path.isfile(path):
        with reading(path):  # says what is wrong with the path
            pass
    yield Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    yield _sqlite(sqlite3.sqlite_version_info)
    yield from _disk(path)
    try:
        yield from _schema(path)
        with reading(path) as ledger:
            yield from _runs(ledger)
    except (NotALedger, SchemaTooNew, StoreCorrupt, sqlite3.Error) as error:
        yield Check("ledger", "problem", str(error))


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether this SQLite can corrupt a WAL database when a checkpoint runs while another connection commits.

    Mended in 3.51.3, and in 3.50.7 and 3.44.6 of the older lines.
    """
    return not (
        version >= (3, 51, 3)
        or (version[:2] == (3, 50) and version >= (3, 50, 7))
        or (version[:2] == (3, 44) and version >= (3, 44, 6))
    )


def _sqlite(version: tuple[int, ...]) -> Check:
    spelt = ".".join(map(str, version))
    if not has_wal_reset_bug(version):
        return Check("sqlite", "ok", f"{spelt}, without the WAL-reset bug")
    safe = (
        "has the WAL-reset bug; this library is safe from it by construction: every write and every checkpoint of all its processes "
        "runs under one lock file (<database>.lock). Do not write to the file with other programs"
    )
    return Check("sqlite", "ok", f"{spelt} {safe}")


def _disk(path: str) -> Iterator[Check]:
    real = os.path.realpath(path)
    kind = "unknown"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            kind = file_system_of(real, mounts.read()) or kind
    except OSError:
        pass
    if Owners(real).is_local():
        yield Check(
            "file system",
            "ok",
            f"{kind}: a local disk, so the lock of a dead owner proves its death and its runs are free at once",
        )
    else:
        yield Check(
            "file system",
            "warn",
            f"{kind}: not known to be a local disk, so a dead owner's run is free only when its lease runs out, and SQLite is not "
            "safe on a disk that several machines share",
        )
    free = shutil.disk_usage(os.path.dirname(real)).free
    level: Literal["ok", "problem"] = "problem" if free < LITTLE_SPACE_BYTES else "ok"
    yield Check("free disk", level, _size(free))
    size, log = (os.path.getsize(name) if os.path.exists(name) else 0 for name in (real, real + "-wal"))
    if log > LONG_LOG_BYTES:
        said = f"{_size(size)}, and a log of {_size(log)} that slows every commit: some reader holds a transaction open"
        yield Check("size", "warn", said)
    else:
        yield Check("size", "ok", f"{_size(size)}, and a log of {_size(log)}")


def _schema(path: str) -> Iterator[Check]:
    real = os.path.realpath(path)
    connection = Database(real, WriteLock(real + ".lock", 1.0), 5.0, None).open_reader(is_alone=True)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    finally:
        connection.close()
    if version == SCHEMA_VERSION:
        yield Check("schema", "ok", f"version {version}, the newest that this version knows")
    else:
        yield Check(
            "schema", "warn", f"version {version}; it is brought to {SCHEMA_VERSION} when an agent opens it next"
        )
    if mode == "wal":
        yield Check("journal mode", "ok", "wal")
    else:
        yield Check("journal mode", "warn", f"{mode}; it is put back to wal when an agent opens the ledger next")


def _runs(ledger: Reading) -> Iterator[Check]:
    records = ledger.runs()
    states = Counter(record.status for record in records)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    yield Check("runs", "ok", counted)
    damaged, redispatched, in_doubt = [], Counter[str](), []
    waiting = {record.run_id for record in records if ledger.is_waiting(record)}
    for record in records:
        steps = ledger.steps(record.run_id)
        if steps.trouble:
            damaged.append(record.run_id)
        if steps.in_doubt and record.run_id in waiting:
            in_doubt.append(record.run_id)
        redispatched.update(step.tool_name for step in steps.records if step.step_number in steps.redispatched)
    if damaged:
        yield Check("damage", "problem", f"{_named(damaged)} cannot be read whole; `verify` says more")
    yield Check("waiting", "warn" if waiting else "ok", _waiting(sorted(waiting)))
    yield Check("in doubt", "warn" if in_doubt else "ok", _in_doubt(in_doubt))
    if redispatched:
        tools = ", ".join(f"{tool!r} ({count} ×)" for tool, count in redispatched.most_common(MOST_NAMES))
        said = (
            f"dispatched again after a crash without a declared effect, so perhaps done twice: {tools}. Declare effect="
        )
        yield Check("undeclared", "warn", said)
    else:
        yield Check("undeclared", "ok", "no tool without a declared effect was dispatched again")


def _waiting(run_ids: list[str]) -> str:
    if not run_ids:
        return "no run waits for its program"
    return f"{_named(run_ids)} waiting for their program: start it again to go on"


def _in_doubt(run_ids: list[str]) -> str:
    if not run_ids:
        return "no step was dispatched without its outcome being known"
    return f"{_named(run_ids)} with a step that was dispatched and whose outcome is not known; it is settled when the run goes on"


def _named(run_ids: list[str]) -> str:
    names = ", ".join(repr(run_id) for run_id in run_ids[:MOST_NAMES])
    more = f" and {len(run_ids) - MOST_NAMES} more" if len(run_ids) > MOST_NAMES else ""
    return f"{len(run_ids)} run{'s' if len(run_ids) != 1 else ''} ({names}{more})"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
