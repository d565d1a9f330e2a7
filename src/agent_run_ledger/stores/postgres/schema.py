"""Whether a database holds a ledger that this version can use, and what is missing from it or was changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files

import psycopg

from agent_run_ledger.errors import NotALedger, SchemaTooNew, StoreError
from agent_run_ledger.stores.postgres.link import Link, unhurried

SCHEMA_VERSION = 4
"""The number of the last file in `migrations`."""

TABLES = ("meta", "entries", "payloads", "runs", "inbox", "secrets", "tombstones", "queues", "workers")
RUN_TABLES = ("entries", "payloads", "runs", "inbox", "secrets", "tombstones")
"""Those whose keys begin with a run's id, which is what they can be partitioned by."""
VIEWS = ("readable_entries", "agent_runs", "step_entries", "run_steps", "agent_step_journal")
FUNCTIONS = (
    "readable_json",
    "json_text",
    "json_number",
    "refuse",
    "refuse_without_tombstone",
    "refuse_with_tombstone",
    "refuse_before_the_end",
    "refuse_unless_said",
)

_VERSION = b"SELECT value FROM meta WHERE key = 'schema'"
_TAKEN = b"SELECT name FROM unnest(%s::text[]) AS n (name) WHERE to_regclass(quote_ident(name)) IS NOT NULL"
_META = b"SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass('meta') AND attname IN ('key', 'value')"

# Which schema the ledger stands in, and whether triggers keep its log append-only.
_WHERE = b"""
SELECT relnamespace::regnamespace::text, coalesce((SELECT value <> 0 FROM meta WHERE key = 'triggers'), true)
FROM pg_class WHERE oid = to_regclass('meta')
"""

# What the server knows of each object, with its name; partitioned or not, it says the same.
_OBJECTS = b"""
WITH relations AS (
    SELECT c.oid, c.relname AS name, c.relkind AS kind FROM unnest(%s::text[]) AS n (name) JOIN pg_class c ON c.oid = to_regclass(n.name)
)
SELECT 'table ' || name, string_agg(
    a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
    || coalesce(' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid, true), ''), ', ' ORDER BY a.attnum)
FROM relations r JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
WHERE kind IN ('r', 'p') GROUP BY name
UNION ALL
SELECT 'constraint ' || conname, pg_get_constraintdef(c.oid, true) FROM relations r JOIN pg_constraint c ON c.conrelid = r.oid
WHERE contype IN ('p', 'u', 'c')
UNION ALL
SELECT 'index ' || c.relname, replace(pg_get_indexdef(c.oid, 0, true), ' ONLY ', ' ')
FROM relations r JOIN pg_index i ON i.indrelid = r.oid JOIN pg_class c ON c.oid = i.indexrelid
UNION ALL
SELECT 'view ' || name, pg_get_viewdef(oid, true) FROM relations WHERE kind = 'v'
UNION ALL
SELECT 'trigger ' || tgname, pg_get_triggerdef(t.oid, true) || ' ' || tgenabled::text FROM relations r JOIN pg_trigger t ON t.tgrelid = r.oid
WHERE NOT tgisinternal
UNION ALL
SELECT 'function ' || proname, prosrc FROM pg_proc WHERE proname = ANY(%s) AND pronamespace = CASE %s::text
    WHEN 'pg_temp' THEN pg_my_temp_schema() ELSE (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('meta')) END
"""

# What belongs to no run that can be listed, or to no entry, so that nobody who goes through the runs would come by it.
_STRAYS = b"""
SELECT 'run ' || quote_literal(run_id) || ' has entries and no head' FROM (
    SELECT run_id FROM entries EXCEPT SELECT run_id FROM runs) e
UNION ALL
SELECT 'run ' || quote_literal(run_id) || ' has a head and no entries' FROM (
    SELECT run_id FROM runs EXCEPT SELECT run_id FROM entries EXCEPT SELECT run_id FROM tombstones) r
UNION ALL
SELECT 'run ' || quote_literal(run_id) || ' has a tombstone and entries' FROM (
    SELECT run_id FROM tombstones INTERSECT SELECT run_id FROM entries) t
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
    """What is wrong with the tables, one sentence each: what belongs nowhere, and what is not as the migrations made it."""
    with unhurried(link):
        wrong = [said for (said,) in link.execute(_STRAYS)]
        return [*wrong, *_changes(link)]


def _changes(link: Link) -> Iterator[str]:
    """Compares with what this very server makes of the migrations, in a temporary schema that is gone at once.

    Where a role may make no temporary tables, as on a standby, nothing is known to be wrong.
    """
    present: dict[str, str] = {}
    expected: dict[str, str] = {}
    names = ([*TABLES, *VIEWS], [*FUNCTIONS])
    with (
        suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction),
        link.transaction(force_rollback=True),
    ):
        ((schema, has_triggers),) = link.execute(_WHERE).fetchall()
        link.execute(b"SELECT set_config('search_path', %s || ', pg_temp', true)", (schema,))
        present = dict(link.execute(_OBJECTS, (*names, schema)).fetchall())
        link.execute(b"SELECT set_config('search_path', 'pg_temp, ' || %s, true)", (schema,))
        for name, script in scripts():
            if has_triggers or "triggers" not in name:
                link.execute(script.encode())
        expected = dict(link.execute(_OBJECTS, (*names, "pg_temp")).fetchall())
    for name, definition in expected.items():
        if name not in present:
            yield f"the {name} is missing from the schema"
        elif present[name] != definition:
            yield f"the {name} of the schema was changed"


def _foreign(place: str, taken: list[str]) -> str:
    tables = ", ".join(repr(name) for name in taken)
    return (
        f"{place} has tables of another program under the names of a ledger's ({tables}); it was not changed. Check the address, or give "
        "the ledger a schema of its own by the role's search_path."
    )
