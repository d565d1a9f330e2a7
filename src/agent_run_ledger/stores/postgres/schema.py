"""Whether a database holds a ledger that this version can use, and what is missing from it or was changed."""

from __future__ import annotations

from importlib.resources import files

import psycopg

from agent_run_ledger.errors import NotALedger, SchemaTooNew, StoreError
from agent_run_ledger.stores.postgres.connections import Link

SCHEMA_VERSION = 1
"""The number of the last file in `migrations`."""

TABLES = ("meta", "entries", "payloads", "runs", "inbox", "secrets", "tombstones", "queues", "workers")
RUN_TABLES = ("entries", "payloads", "runs", "inbox", "secrets", "tombstones")
"""Those whose keys begin with a run's id, which is what they can be partitioned by."""

_VERSION = b"SELECT value FROM meta WHERE key = 'schema'"
_TAKEN = b"SELECT name FROM unnest(%s::text[]) AS n (name) WHERE to_regclass(quote_ident(name)) IS NOT NULL"
_META = b"SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass('meta') AND attname IN ('key', 'value')"

# What belongs to no run that can be listed, or to no entry, so that nobody who goes through the runs would come by it.
_STRAYS = b"""
SELECT 'run ' || quote_literal(run_id) || ' has entries and no head' FROM (
    SELECT run_id FROM entries EXCEPT SELECT run_id FROM runs) e
UNION ALL
SELECT 'run ' || quote_literal(run_id) || ' has a head and no entries' FROM (
    SELECT run_id FROM runs EXCEPT SELECT run_id FROM entries EXCEPT SELECT run_id FROM tombstones) r
UNION ALL
SELECT 'run ' || quote_literal(run_id) || ' has a payload that no entry names' FROM (
    SELECT run_id, digest FROM payloads WHERE bytes IS NOT NULL EXCEPT SELECT run_id, digest FROM entries) p
"""


def scripts() -> list[tuple[str, str]]:
    """The files of `migrations` with their names, in order: `0001_first.sql` and the like bring a database to that version."""
    folder = files("agent_run_ledger.stores.postgres") / "migrations"
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [(file.name, file.read_text(encoding="utf-8")) for file in found]


def version_of(link: psycopg.Connection[tuple[object, ...]], place: str) -> int:
    """The version of the ledger's schema, 0 where there is none yet. Raises `NotALedger` where its names are another program's."""
    taken = [str(name) for (name,) in link.execute(_TAKEN, (list(TABLES),))]
    if not taken:
        return 0
    is_ours = link.execute(_META).fetchall() == [(2,)]
    found = link.execute(_VERSION).fetchone() if is_ours else None
    if found is None:
        raise NotALedger(_foreign(place, taken))
    return int(str(found[0]))


def refuse_unusable(link: Link, place: str) -> None:
    """Raises the `StoreError` that says why the database is no ledger of this version."""
    version = version_of(link, place)
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{place} has schema {version}, this version of agent-run-ledger knows schemas up to {SCHEMA_VERSION}; it was not changed. "
            "Upgrade agent-run-ledger."
        )
    if version < SCHEMA_VERSION:
        state = f"has schema {version} and needs {SCHEMA_VERSION}" if version else "holds no ledger yet"
        raise StoreError(
            f"{place} {state}; nothing was changed. Bring it up to date once, with a role that may make tables: "
            f"`agent-run-ledger migrate --db {place}`."
        )


def findings(link: Link) -> list[str]:
    """What is wrong with the tables, one sentence each."""
    return [said for (said,) in link.execute(_STRAYS)]


def _foreign(place: str, taken: list[str]) -> str:
    tables = ", ".join(repr(name) for name in taken)
    return (
        f"{place} has tables of another program under the names of a ledger's ({tables}); it was not changed. Check the address, or give "
        "the ledger a schema of its own by the role's search_path."
    )
