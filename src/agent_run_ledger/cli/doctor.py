"""What may be in the way: the file and the disk it lies on, or the server and the way to it, and runs that wait for somebody."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agent_run_ledger import AgentRunLedger, Encryption, KeyUnavailable, RunRecord, RunState, StoreCorrupt
from agent_run_ledger.cli.waiting import waits_of
from agent_run_ledger.model import Diagnosis, ServerDiagnosis

LITTLE_SPACE_BYTES = 500 * 1024 * 1024
LONG_LOG_BYTES = 64 * 1024 * 1024
MOST_NAMES = 5
OLDEST_TRIED = 15
FAR_OFF_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `problem` is what a person should act upon now, `warn` what he should know."""

    name: str
    level: Literal["ok", "warn", "problem"]
    message: str


def examine(path: str, encryption: Encryption | None = None) -> Iterator[Check]:
    """Look at everything, one check after the other. Raises a `StoreError` where there is no such file, or no way to the server."""
    diagnosis = AgentRunLedger.diagnose(path)
    yield Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    if isinstance(diagnosis, Diagnosis):
        yield _sqlite(diagnosis)
        yield from _disk(diagnosis)
    else:
        yield from _server(diagnosis)
    if diagnosis.trouble is not None:
        yield Check("ledger", "problem", diagnosis.trouble)
        return
    try:
        with AgentRunLedger.open_read_only(path, encryption=encryption) as ledger:
            if isinstance(diagnosis, Diagnosis):
                yield from _schema(diagnosis)
                yield from _runs(ledger, ledger.runs())
            else:
                yield from _tables(diagnosis)
                yield from _fleet(ledger)
                yield from _runs(ledger, ledger.runs(), reads_ended=False)  # there may be a million
    except (StoreCorrupt, KeyUnavailable) as error:
        yield Check("ledger", "problem", str(error))


# --- a file -----------------------------------------------------------------------------------------------------------


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


# --- a server ---------------------------------------------------------------------------------------------------------


def _server(diagnosis: ServerDiagnosis) -> Iterator[Check]:
    release = int(diagnosis.server_version.partition(".")[0])
    trip = diagnosis.round_trip_seconds * 1000
    said = f"PostgreSQL {diagnosis.server_version} at {diagnosis.host}, which answers in {trip:.1f} ms"
    if release < OLDEST_TRIED:
        yield Check("server", "warn", f"{said}; versions before {OLDEST_TRIED} were not tried")
    elif diagnosis.is_standby:
        yield Check("server", "warn", f"{said}; it is a standby: it can be looked at, and no agent can write to it")
    else:
        yield Check("server", "ok", said)
    if diagnosis.is_behind_pooler:
        said = "one stands between, so statements are not prepared, and workers hear of new runs by looking"
        yield Check("pooler", "ok", said)
    else:
        yield Check("pooler", "ok", "none stands between")
    yield _commits(diagnosis)
    ahead = diagnosis.clock_ahead_seconds
    said = f"the server's is {abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} this machine's; leases go by the server's alone"
    yield Check("clock", "warn" if abs(ahead) > FAR_OFF_SECONDS else "ok", said)


def _commits(diagnosis: ServerDiagnosis) -> Check:
    if not diagnosis.syncs or not diagnosis.writes_whole_pages:
        setting = "fsync" if not diagnosis.syncs else "full_page_writes"
        said = f"{setting} is off on this server: a crash of its machine may lose what was committed, or the whole database"
        return Check("commits", "problem", said)
    standbys = diagnosis.synchronous_standby_names
    said = (
        f"are on the disk of a standby, too, before they are told ({standbys})"
        if standbys
        else "are on the server's disk alone: synchronous_standby_names is empty, so what is lost with it is lost"
    )
    return Check(
        "commits",
        "ok",
        f"of durability='full' {said}. Each transaction says for itself whether it is synced (the role's own "
        f"synchronous_commit is {diagnosis.synchronous_commit!r})",
    )


def _tables(diagnosis: ServerDiagnosis) -> Iterator[Check]:
    yield Check("schema", "ok", f"version {diagnosis.schema_version}, the newest that this version knows")
    rewrites = ", ".join(diagnosis.may_rewrite)
    role = f"role {diagnosis.role!r}"
    if diagnosis.has_triggers and rewrites:
        owns = "is a superuser" if diagnosis.is_superuser else f"has {rewrites} on it"
        said = f"kept append-only by triggers. {role} {owns}: programs need no such role, `migrate --grant` gives one what it needs"
        yield Check("log", "ok", said)
    elif diagnosis.has_triggers:
        yield Check("log", "ok", f"kept append-only by triggers, and {role} has no right to rewrite it")
    elif rewrites:
        said = f"nothing keeps {role} from rewriting it: there are no triggers, and it has {rewrites} on the entries"
        yield Check("log", "problem", said)
    else:
        yield Check("log", "ok", f"kept append-only by rights: there are no triggers, and {role} may only add entries")
    yield Check("size", "ok", f"{_size(diagnosis.size_bytes)} of tables and indexes")


def _fleet(ledger: AgentRunLedger) -> Iterator[Check]:
    workers = ledger.workers()
    alive = [worker for worker in workers if worker.is_alive]
    running = sum(worker.running_count for worker in alive)
    silent = f"; {len(workers) - len(alive)} not heard of any more" if len(alive) < len(workers) else ""
    yield Check("workers", "ok", f"{len(alive)} alive, with {running} runs{silent}")
    stuck = ledger.stuck()
    said = (
        f"{_named([run.run_id for run in stuck])} not getting on; `runs --stuck` says why"
        if stuck
        else "no run is stuck"
    )
    yield Check("stuck", "warn" if stuck else "ok", said)


# --- runs -------------------------------------------------------------------------------------------------------------


def _runs(ledger: AgentRunLedger, records: list[RunRecord], *, reads_ended: bool = True) -> Iterator[Check]:
    """How they stand. Whether those that have ended can be read is for `verify` to say where they are not read here."""
    states = Counter("that cannot be read" if record.is_damaged else record.status for record in records)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    if moved := sum(record.moved_to is not None for record in records):
        counted += f"; {moved} of them moved to another ledger"
    owners = {record.owner for record in records if record.owner is not None}
    yield Check("runs", "ok", f"{counted}; {len(owners)} owners at work" if owners else counted)
    damaged, redispatched, in_doubt = [], Counter[str](), []
    waiting, planned, to_decide = [], [], []
    for record in records:
        if not reads_ended and not record.is_damaged and RunState(record.status).is_terminal:
            continue
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
