"""Making a database a ledger, and bringing an older one up to date: once, whole or not at all, by a role of its own."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from agent_run_ledger.errors import SchemaTooNew, StoreError
from agent_run_ledger.stores.postgres.connections import connection_terms, place_of
from agent_run_ledger.stores.postgres.faults import is_refused_connection, named
from agent_run_ledger.stores.postgres.schema import RUN_TABLES, SCHEMA_VERSION, scripts, version_of

_LOCK = 0x41524C31
"""What two migrations at once wait for each other by: "ARL1"."""

# A renewal finds room for the new version of its row on the same page. A queue's rows die young.
_STORAGE = (
    "ALTER TABLE {} SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)"
)

_RIGHTS = {
    "SELECT": "meta, entries, payloads, runs, inbox, secrets, tombstones, queues, workers, readable_entries, agent_runs, step_entries, "
    "run_steps, agent_step_journal",
    "INSERT": "entries, payloads, runs, inbox, secrets, queues, workers",
    "UPDATE (bytes)": "payloads",
    "UPDATE (owner, fencing_token, lease_until, lease_seconds, lease_call, inbox, note, due, moved_to, deaths, deaths_after)": "runs",
    "UPDATE": "queues, workers",
    "DELETE": "workers",
}

# Who has these rights already, by what the migrations before made.
_PROGRAMS = b"""
SELECT DISTINCT grantee FROM information_schema.column_privileges
WHERE table_schema = current_schema() AND table_name = 'runs' AND column_name = 'owner' AND privilege_type = 'UPDATE'
    AND grantee NOT IN (current_user, 'PUBLIC')
"""


def migrate(
    dsn: str, *, dry_run: bool = False, partitions: int | None = None, triggers: bool = True, grant: str | None = None
) -> list[str]:
    """The SQL that brought the database up to date, in order; with `dry_run` the SQL that would.

    Nothing where it is up to date. `partitions` spreads the tables of a new ledger over so many parts by the runs' ids; `triggers=False`
    leaves out what keeps the log append-only where an engine has none; `grant` names a role that is given the rights to use the ledger
    and none to rewrite it; roles that have them get those to what is new. Raises a `StoreError` that says what is wrong; the database is as it was then.
    """
    place = place_of(dsn)
    try:
        with psycopg.connect(**connection_terms(dsn), autocommit=True) as connection, connection.transaction():
            plan = _plan(connection, place, partitions, triggers, grant)
            for script in [] if dry_run else plan:
                connection.execute(script.encode())
            return plan
    except psycopg.Error as error:
        if is_refused_connection(error) and error.sqlstate is None:
            raise StoreError(
                f"{place} cannot be reached ({' '.join(str(error).split())}); nothing was changed."
            ) from error
        raise named(error, place) from error


def _plan(
    connection: psycopg.Connection[Any], place: str, partitions: int | None, triggers: bool, grant: str | None
) -> list[str]:
    connection.execute(b"SELECT set_config('synchronous_commit', 'on', true)")
    connection.execute(b"SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
    ((encoding, schema),) = connection.execute(
        b"SELECT current_setting('server_encoding'), current_schema()"
    ).fetchall()
    if encoding != "UTF8":
        raise StoreError(
            f"{place} keeps its text as {encoding}, and a ledger needs UTF8; nothing was changed. Make a database with ENCODING 'UTF8'."
        )
    if schema is None:
        raise StoreError(
            f"{place} has no schema that its search_path names; nothing was changed. Make one, or set another search_path."
        )
    version = version_of(connection, place)
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{place} has schema {version}, this version of agent-run-ledger knows schemas up to {SCHEMA_VERSION}; it was not changed. "
            "Upgrade agent-run-ledger."
        )
    if partitions is not None and (version or partitions < 1):
        raise StoreError(f"only a new ledger can be partitioned, into 1 part or more; {place} was not changed.")
    if version:  # it stays as it was made
        found = connection.execute(b"SELECT value <> 0 FROM meta WHERE key = 'triggers'").fetchone()
        triggers = found is None or bool(found[0])
    name = sql.Identifier(schema).as_string()
    # Functions remember where the ledger stands, whoever calls them from wherever.
    plan = [f"SET LOCAL search_path TO {name}, pg_temp"] if version < SCHEMA_VERSION or grant else []
    for file, script in scripts():
        number, _, part = file.partition("_")
        if int(number) > version and (triggers or part != "triggers.sql"):
            plan.append(_partitioned(script, partitions))
            if part == "first.sql":
                plan += _parts(partitions)
    if version == 0:
        plan.append(f"INSERT INTO meta (key, value) VALUES ('schema', {SCHEMA_VERSION}), ('triggers', {int(triggers)})")
    elif version < SCHEMA_VERSION:
        plan.append(f"UPDATE meta SET value = {SCHEMA_VERSION} WHERE key = 'schema'")
    programs = {str(role) for (role,) in connection.execute(_PROGRAMS)} if 0 < version < SCHEMA_VERSION else set()
    if grant is not None:
        programs.add(grant)
    for role in sorted(programs):
        to = sql.Identifier(role).as_string()
        plan.append(f"GRANT USAGE ON SCHEMA {name} TO {to}")
        plan += [f"GRANT {right} ON {tables} TO {to}" for right, tables in _RIGHTS.items()]
    return plan


def _partitioned(script: str, partitions: int | None) -> str:
    return script.replace("/* PARTITION BY HASH (run_id) */", "PARTITION BY HASH (run_id)") if partitions else script


def _parts(partitions: int | None) -> list[str]:
    if partitions is None:
        return [_STORAGE.format("runs")]
    parts = []
    for table in RUN_TABLES:
        for number in range(partitions):
            part = f"{table}_{number}"
            parts.append(
                f"CREATE TABLE {part} PARTITION OF {table} FOR VALUES WITH (MODULUS {partitions}, REMAINDER {number})"
            )
            if table == "runs":
                parts.append(_STORAGE.format(part))
    return parts
