"""What may be in the way: the machine's SQLite, the file and the disk it lies on, and runs that wait for somebody."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agent_run_ledger import AgentRunLedger, StoreCorrupt
from agent_run_ledger.cli.shell import UsageError
from agent_run_ledger.cli.waiting import waits_of
from agent_run_ledger.model import Diagnosis

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
    if path.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            "doctor looks at the file of a ledger, and this one is a database: `verify` and `runs --stuck` look at it"
        )
    diagnosis = AgentRunLedger.diagnose(path)
    yield Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    yield _sqlite(diagnosis)
    yield from _disk(diagnosis)
    if diagnosis.trouble is not None:
        yield Check("ledger", "problem", diagnosis.trouble)
        return
    yield from _schema(diagnosis)
    try:
        with AgentRunLedger.open_read_only(path) as ledger:
            yield from _runs(ledger)
    except StoreCorrupt as error:
        yield Check("ledger", "problem", str(error))


def _sqlite(diagnosis: Diagnosis) -> Check:
    if not diagnosis.has_wal_reset_bug:
        return Check("sqlite", "ok", f"{diagnosis.sqlite_version}, without the WAL-reset bug")
    safe = (
        "has the WAL-reset bug; this library is safe from it by construction: every write and every checkpoint of all its processes "
        "runs under one lock file (<database>.lock). Do not write to the file with other programs"
    )
    return Check("sqlite", "ok", f"{diagnosis.sqlite_version} {safe}")


def _disk(diagnosis: Diagnosis) -> Iterator[Check]:
    if diagnosis.is_local:
        yield Check(
            "file system",
            "ok",
            f"{diagnosis.file_system}: a local disk, so the lock of a dead owner proves its death and its runs are free at once",
        )
    else:
        yield Check(
            "file system",
            "warn",
            f"{diagnosis.file_system}: not known to be a local disk, so a dead owner's run is free only when its lease runs out, and "
            "SQLite is not safe on a disk that several machines share",
        )
    level: Literal["ok", "problem"] = "problem" if diagnosis.free_bytes < LITTLE_SPACE_BYTES else "ok"
    yield Check("free disk", level, _size(diagnosis.free_bytes))
    said = f"{_size(diagnosis.size_bytes)}, and a log of {_size(diagnosis.log_bytes)}"
    if diagnosis.log_bytes > LONG_LOG_BYTES:
        said += " that slows every commit: some reader holds a transaction open"
        yield Check("size", "warn", said)
    else:
        yield Check("size", "ok", said)


def _schema(diagnosis: Diagnosis) -> Iterator[Check]:
    version, newest, mode = diagnosis.schema_version, diagnosis.newest_schema_version, diagnosis.journal_mode
    if version == newest:
        yield Check("schema", "ok", f"version {version}, the newest that this version knows")
    else:
        yield Check("schema", "warn", f"version {version}; it is brought to {newest} when an agent opens it next")
    if mode == "wal":
        yield Check("journal mode", "ok", "wal")
    elif mode is None:
        said = "could not be read: SQLite has to write beside the file for that, and this user may not"
        yield Check("journal mode", "warn", said)
    else:
        yield Check("journal mode", "warn", f"{mode}; it is put back to wal when an agent opens the ledger next")


def _runs(ledger: AgentRunLedger) -> Iterator[Check]:
    records = ledger.runs()
    states = Counter("that cannot be read" if record.is_damaged else record.status for record in records)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    yield Check("runs", "ok", counted)
    damaged, redispatched, in_doubt = [], Counter[str](), []
    waiting, planned, to_decide = [], [], []
    for record in records:
        seen = ledger.inspect(record.run_id)
        kinds = {wait.kind for wait in waits_of(ledger, record, seen.steps)}
        if kinds & {"resolve", "release"}:
            to_decide.append(record.run_id)
        elif kinds & {"program", "receipt"}:
            waiting.append(record.run_id)
        elif kinds:
            planned.append(record.run_id)
        if seen.trouble or seen.run.is_damaged:
            damaged.append(record.run_id)
        if seen.in_doubt and seen.is_waiting:
            in_doubt.append(record.run_id)
        redispatched.update(str(step.tool_name) for step in seen.steps if step.step_number in seen.redispatched)
    if damaged:
        yield Check("damage", "problem", f"{_named(damaged)} cannot be read whole; `verify` says more")
    yield Check("to decide", "problem" if to_decide else "ok", _to_decide(to_decide))
    yield Check("waiting", "warn" if waiting else "ok", _waiting(sorted(waiting), planned))
    yield Check("in doubt", "warn" if in_doubt else "ok", _in_doubt(in_doubt))
    if redispatched:
        tools = ", ".join(f"{tool!r} ({count} ×)" for tool, count in redispatched.most_common(MOST_NAMES))
        said = (
            f"dispatched again after a crash without a declared effect, so perhaps done twice: {tools}. Declare effect="
        )
        yield Check("undeclared", "warn", said)
    else:
        yield Check("undeclared", "ok", "no tool without a declared effect was dispatched again")


def _to_decide(run_ids: list[str]) -> str:
    if not run_ids:
        return "no run stands until a person decides"
    return f"{_named(run_ids)} standing until a person decides; `show` says which command helps"


def _waiting(run_ids: list[str], planned: list[str]) -> str:
    by_plan = f"; {_named(planned)} waiting for a time, a signal or an approval" if planned else ""
    if not run_ids:
        return f"no run waits for its program{by_plan}"
    return f"{_named(run_ids)} waiting for their program: start it again to go on{by_plan}"


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
