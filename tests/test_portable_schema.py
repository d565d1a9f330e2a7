"""The ledger on PostgreSQL uses what engines of its family share, those among them that distribute rows by `run_id`.

None of those engines is started here: what is held is the SQL itself, and the rules are tried on SQL that breaks them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_run_ledger.stores import postgres
from agent_run_ledger.stores.postgres.schema import RUN_TABLES, scripts

DOCS = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "use-postgresql.md"
TYPES = {"TEXT", "BIGINT", "BYTEA", "DOUBLE PRECISION"}
OF_NO_RUN = {"meta", "queues", "workers"}
"""Small tables that are about no run; an engine that distributes keeps a copy of each on every node."""

SEVERAL_RUNS = {
    "appending._APPEND_ALL": "many async runs are committed together",
    "store._GIVE_BACK": "a store that is closed gives back what it has",
    "queues._TAKE": "workers claim in batches",
    "queues._CLAIM_DUE": "workers claim in batches",
    "queues._FIRST_FIT": "workers claim in batches",
    "queues._FIRST": "workers claim in batches",
    "queues._TAKE_THESE": "workers claim in batches",
    "queues._FIND_TAKEN": "workers claim in batches, and an answer was lost",
    "epochs._FREE": "nobody has any run in a database that was restored",
    "queues._FREE_DEAD": "dead owners' runs are claimed",
}
"""Statements that write to several runs, and why they may."""

FUNCTIONS = {
    *(
        "clock_timestamp",
        "extract",
        "set_config",
        "coalesce",
        "greatest",
        "least",
        "max",
        "min",
        "count",
        "octet_length",
        "starts_with",
    ),
    *("unnest", "row_number", "any", "array"),
    "pg_backend_pid",  # once for a connection: whether a pooler stands between
}
"""What the statements of a running ledger call."""


# --- reading SQL ------------------------------------------------------------------------------------------------------


def without_words(sql: str) -> str:
    """The SQL without comments, without what stands in quotes, and with single spaces."""
    sql = re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.S)
    sql = re.sub(r"\$\$.*?\$\$", "$$", sql, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"'(?:[^']|'')*'", "''", sql)).strip()


def statements(script: str) -> list[str]:
    return [each.strip() for each in without_words(script).split(";") if each.strip()]


def parts(text: str) -> list[str]:
    """What stands between the commas that are in no brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


@dataclass
class Table:
    """A table as its statement makes it."""

    name: str
    columns: dict[str, str]
    keys: list[list[str]]


def tables(script: str) -> Iterator[Table]:
    for statement in statements(script):
        if found := re.fullmatch(r"CREATE TABLE (\w+) ?\((.*)\)", statement, re.S):
            table = Table(found[1], {}, [])
            for part in parts(found[2]):
                if key := re.match(r"(?:PRIMARY KEY|UNIQUE) ?\(([^)]*)\)", part):
                    table.keys.append([each.strip() for each in key[1].split(",")])
                else:
                    name, _, rest = part.partition(" ")
                    table.columns[name] = rest
                    if re.search(r"PRIMARY KEY|UNIQUE", rest):
                        table.keys.append([name])
            yield table


# --- the rules --------------------------------------------------------------------------------------------------------

_NOT_SHARED = re.compile(
    r"SERIAL|IDENTITY|SEQUENCE|NEXTVAL|REFERENCES|FOREIGN|JSONB|EXTENSION|EXCLUDE|INHERITS|UNLOGGED|TABLESPACE|GENERATED|"
    r"CREATE (?:TYPE|DOMAIN|RULE|OPERATOR|CAST)|MATERIALIZED VIEW|ADVISORY|DEFERRABLE|\w+\[\]",
    re.I,
)


def problems_of_tables(script: str) -> list[str]:
    """What in the tables and indexes is not shared, or cannot be spread by `run_id`."""
    found = []
    for table in tables(script):
        for name, rest in table.columns.items():
            kind = re.match(r"DOUBLE PRECISION|\w+", rest)
            if kind is None or kind[0] not in TYPES:
                found.append(f"{table.name}.{name} is {rest}")
        if not table.keys:
            found.append(f"{table.name} has no key")
        if table.name in OF_NO_RUN:
            found += [f"{table.name} is about runs" for name in table.columns if "run" in name]
        else:
            found += [f"{table.name} has a key {key}" for key in table.keys if key[0] != "run_id"]
    for statement in statements(script):
        is_made = re.match(
            r"CREATE (?:OR REPLACE )?(TABLE|INDEX|UNIQUE INDEX|VIEW|FUNCTION|TRIGGER)|INSERT INTO meta", statement
        )
        if added := re.fullmatch(r"ALTER TABLE (\w+) ADD COLUMN (\w+) (DOUBLE PRECISION|\w+)(.*)", statement):
            if added[3] not in TYPES or re.search(r"PRIMARY KEY|UNIQUE", added[4]) or _NOT_SHARED.search(added[4]):
                found.append(f"{added[1]}.{added[2]} is {added[3]}{added[4]}")
        elif is_made is None:
            found.append(f"a statement of another kind: {statement[:60]}")
        elif is_made[1] == "UNIQUE INDEX" and not re.search(r"\( ?run_id", statement):
            found.append(f"a unique index that does not begin with run_id: {statement[:60]}")
        elif is_made[1] in ("TABLE", "INDEX", "UNIQUE INDEX", None) and (bad := _NOT_SHARED.search(statement)):
            found.append(f"{bad[0]} in {statement[:60]}")
    return found


def problems_of_a_statement(name: str, sql: str) -> list[str]:
    """What in a statement of a running ledger is not shared, or writes to several runs that it need not."""
    sql, found = without_words(sql), []
    if bad := re.search(
        r"JSON|ADVISORY|NEXTVAL|CTID|PG_TEMP|TRUNCATE|LOCK TABLE|generate_series|regexp_\w+|->", sql, re.I
    ):
        found.append(f"{name} uses {bad[0]}")
    called = {each.lower() for each in re.findall(r"\b(\w+) ?\(", sql)}
    named = {each.lower() for each in re.findall(r"(?:\b(?:AS|INTO|WITH|RECURSIVE)|,) (\w+) \(", sql)}
    words = {
        "in",
        "as",
        "and",
        "or",
        "exists",
        "conflict",
        "values",
        "materialized",
        "lateral",
        "select",
        "by",
        "then",
        "else",
        "where",
    }
    found += [f"{name} calls {each}" for each in sorted(called - FUNCTIONS - named - words)]
    writes = re.findall(r"(?:INSERT INTO|UPDATE|DELETE FROM) (\w+)", sql)
    about_runs = [table for table in writes if table in RUN_TABLES] or re.search(
        r"FROM runs.* FOR (NO KEY )?UPDATE", sql
    )
    if about_runs and name not in SEVERAL_RUNS and _writes_to_several(sql):
        found.append(f"{name} writes to several runs")
    return found


def _writes_to_several(sql: str) -> bool:
    """Whether it is not by its run's id, given once, that a statement finds what it writes to."""
    if re.search(r"run_id = ANY|run_id IN|AS \w+ \(run_id|\brun_id = \w+\.id\b", sql):
        return True
    makes = re.search(r"INSERT INTO \w+ \(run_id[^)]*\) (?:VALUES \(%s|SELECT %s|SELECT run_id)", sql)
    return not (makes or re.search(r"\brun_id = %s", sql))


OF_ITS_LOG = ("reading.LOG_END", "reading.IS_FLUSHED_TO")
"""What a ledger that may only read asks before it gives a head: whether the server has flushed its log so far. One that may write syncs."""


def running() -> Iterator[tuple[str, str]]:
    """Every statement that a running ledger sends, by its name. Migrating, `check` and `doctor` are not a running ledger."""
    for found in pkgutil.iter_modules(postgres.__path__):
        if found.name in ("migrating", "schema", "diagnosis", "bell"):
            continue
        module = importlib.import_module(f"{postgres.__name__}.{found.name}")
        for name, value in vars(module).items():
            text = value.decode() if isinstance(value, bytes) else value
            if (
                isinstance(text, str)
                and not name.startswith("__")
                and re.search(r"\b(?:SELECT|INSERT|UPDATE|DELETE)\b", text)
            ):
                yield f"{found.name}.{name}", text


def first_script() -> str:
    (script,) = [text for name, text in scripts() if name == "0001_first.sql"]
    return script


# --- they hold --------------------------------------------------------------------------------------------------------


def test_every_table_is_plain_and_every_key_of_one_about_runs_begins_with_the_run() -> None:
    assert {table.name for table in tables(first_script())} == {*RUN_TABLES, *OF_NO_RUN}
    for name, script in scripts():
        if "triggers" not in name:
            assert problems_of_tables(script) == [], name


def test_triggers_stand_in_files_of_their_own_that_can_be_left_out() -> None:
    for name, script in scripts():
        kinds = {statement.split()[1] for statement in statements(script) if statement.startswith("CREATE")}
        if "triggers" in name:
            assert "TRIGGER" in kinds, name
            assert kinds <= {"FUNCTION", "TRIGGER"}, name
        else:
            assert "TRIGGER" not in kinds, name
            assert "TRIGGER" not in without_words(script).upper(), name


def test_no_statement_of_a_running_ledger_uses_what_is_not_shared_or_writes_to_several_runs_for_nothing() -> None:
    found = dict(running())
    assert len(found) > 40
    assert set(SEVERAL_RUNS) <= set(found)
    assert set(OF_ITS_LOG) <= set(found)
    asked = [(name, sql) for name, sql in found.items() if name not in OF_ITS_LOG]
    assert [problem for name, sql in asked for problem in problems_of_a_statement(name, sql)] == []


def test_views_alone_call_the_functions_that_a_migration_makes() -> None:
    made = set(re.findall(r"CREATE FUNCTION (\w+)", first_script()))
    assert made
    assert [name for name, sql in running() if made & set(re.findall(r"\w+", sql))] == []


# --- they can fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE extra (id BIGSERIAL, PRIMARY KEY (id));",
        "CREATE TABLE extra (run_id TEXT NOT NULL, at TIMESTAMPTZ, PRIMARY KEY (run_id));",
        "CREATE TABLE extra (run_id TEXT NOT NULL, seq BIGINT, PRIMARY KEY (seq, run_id));",
        "CREATE TABLE extra (run_id TEXT NOT NULL, name TEXT UNIQUE, PRIMARY KEY (run_id));",
        "CREATE TABLE extra (run_id TEXT NOT NULL);",
        "CREATE TABLE extra (run_id TEXT REFERENCES runs (run_id), PRIMARY KEY (run_id));",
        "CREATE TABLE extra (run_id TEXT, said JSONB, PRIMARY KEY (run_id));",
        "CREATE TABLE extra (run_id TEXT, tags TEXT[], PRIMARY KEY (run_id));",
        "CREATE TABLE extra (run_id TEXT, id BIGINT GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (run_id));",
        "CREATE TABLE workers (worker TEXT PRIMARY KEY, run_id TEXT);",
        "CREATE UNIQUE INDEX extra ON runs (owner);",
        "CREATE INDEX extra ON runs USING gin (to_tsvector(note)) TABLESPACE fast;",
        "CREATE SEQUENCE extra;",
        "CREATE EXTENSION pgcrypto;",
        "CREATE TYPE state AS ENUM ('a');",
        "ALTER TABLE runs ADD COLUMN said JSONB;",
        "ALTER TABLE runs ADD COLUMN name TEXT UNIQUE;",
        "ALTER TABLE runs ADD COLUMN other TEXT REFERENCES runs (run_id);",
        "ALTER TABLE runs DROP COLUMN note;",
        "ALTER TABLE runs ADD CONSTRAINT one FOREIGN KEY (run_id) REFERENCES entries (run_id);",
        "DO $$ BEGIN PERFORM 1; END $$;",
    ],
)
def test_a_table_that_is_not_portable_is_found(sql: str) -> None:
    assert problems_of_tables(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE runs SET note = NULL WHERE owner = %s",
        "UPDATE runs SET note = NULL WHERE run_id = ANY(%s)",
        "UPDATE runs SET note = NULL WHERE run_id IN (SELECT run_id FROM runs WHERE note IS NOT NULL)",
        "DELETE FROM inbox WHERE at < %s",
        "INSERT INTO entries (run_id, seq) SELECT n.* FROM unnest(%s::text[], %s::bigint[]) AS n (run_id, seq)",
        "SELECT 1 FROM runs WHERE owner = %s FOR UPDATE",
        "SELECT pg_advisory_xact_lock(1)",
        "SELECT nextval('ids')",
        "SELECT body::jsonb ->> 'at' FROM entries WHERE run_id = %s",
        "SELECT * FROM generate_series(1, 3)",
        "SELECT regexp_matches(note, 'x') FROM runs WHERE run_id = %s",
        "SELECT json_text(readable_json(body), 'state') FROM entries WHERE run_id = %s",
        "SELECT * FROM jsonb_to_recordset(%s) AS x (a INT)",
    ],
)
def test_a_statement_that_is_not_portable_is_found(sql: str) -> None:
    assert problems_of_a_statement("a statement", sql)


# --- and the documentation says what is left ---------------------------------------------------------------------------

BEYOND_TABLES = {
    "triggers": (r"CREATE TRIGGER", "scripts"),
    "functions in PL/pgSQL": (r"LANGUAGE plpgsql", "scripts"),
    "partial indexes": (r"CREATE INDEX.* WHERE", "scripts"),
    'COLLATE "C"': (r"COLLATE", "scripts"),
    "data-modifying WITH": (r"WITH .*\( ?(INSERT|UPDATE)", "running"),
    "ON CONFLICT": (r"ON CONFLICT", "running"),
    "FOR NO KEY UPDATE": (r"FOR NO KEY UPDATE", "running"),
    "SKIP LOCKED": (r"SKIP LOCKED", "running"),
    "LATERAL": (r"LATERAL", "running"),
    "set_config": (r"set_config", "running"),
    "pg_notify": (r"pg_notify", "bell"),
    "pg_advisory_xact_lock": (r"pg_advisory_xact_lock", "migrating"),
}
"""What another engine must have beside plain tables, as the documentation calls it, and where it is used."""


@pytest.mark.parametrize("feature", BEYOND_TABLES)
def test_what_another_engine_must_have_is_used_and_documented(feature: str) -> None:
    pattern, where = BEYOND_TABLES[feature]
    texts = {
        "scripts": [text for _, text in scripts()],
        "running": [text for _, text in running()],
    }.get(where) or [Path(postgres.__path__[0], f"{where}.py").read_text(encoding="utf-8")]
    assert any(re.search(pattern, re.sub(r"\s+", " ", text)) for text in texts)
    assert feature in DOCS.read_text(encoding="utf-8")
