"""Making a database a ledger: once, whole or not at all; what it refuses afterwards, and what people see of it."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from agent_run_ledger import AgentRunLedger, RetryPolicy, StepFailed
from agent_run_ledger.contract import Erasure, QueueTerms, Store, Tombstone
from agent_run_ledger.errors import NotALedger, SchemaTooNew, StoreError, StoreReadOnly
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.postgres import PostgresStore, migrate, migrating
from agent_run_ledger.stores.postgres.schema import RUN_TABLES, SCHEMA_VERSION, TABLES, VIEWS, scripts
from agent_run_ledger.testing import a_row
from agent_run_ledger.testing.stores.words import LISTING, SECRET, claim_due, create, enqueue, in_threads, refuses
from support.databases import databases


def nothing(_: str) -> None:
    """Leave a database as it is."""


@pytest.fixture
def empty() -> Iterator[str]:
    with databases().fresh(nothing) as dsn:
        yield dsn


@pytest.fixture
def dsn() -> Iterator[str]:
    with databases().fresh(migrate) as dsn:
        yield dsn


@pytest.fixture
def owner(dsn: str) -> Iterator[psycopg.Connection]:
    """Whoever may do everything with the tables."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def store(dsn: str) -> Iterator[PostgresStore]:
    store = PostgresStore(dsn, outage_seconds=5.0)
    yield store
    store.close()


def tables(connection: psycopg.Connection) -> set[str]:
    found = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v')"
    )
    return {name for (name,) in found}


# --- migrate ----------------------------------------------------------------------------------------------------------


def test_a_database_without_a_ledger_is_refused_with_the_command_that_makes_one(empty: str) -> None:
    error = refuses(StoreError, lambda: PostgresStore(empty))
    assert "agent-run-ledger migrate --db postgresql://" in str(error)
    assert not isinstance(error, NotALedger)


def test_a_dry_run_says_what_would_be_done_and_does_nothing(empty: str) -> None:
    plan = migrate(empty, dry_run=True)
    with psycopg.connect(empty, autocommit=True) as connection:
        assert tables(connection) == set()
        for statement in plan:
            connection.execute(statement.encode())
        assert tables(connection) == {*TABLES, *VIEWS}
    PostgresStore(empty).close()
    assert migrate(empty, dry_run=True) == []


def test_what_was_done_is_said_and_a_second_time_there_is_nothing_to_do(empty: str) -> None:
    assert migrate(empty, dry_run=True) == migrate(empty)
    assert migrate(empty) == []
    with psycopg.connect(empty) as connection:
        assert dict(connection.execute("SELECT key, value FROM meta").fetchall()) == {
            "schema": SCHEMA_VERSION,
            "epoch": 0,
            "triggers": 1,
        }


def test_of_several_that_migrate_at_once_one_does(empty: str) -> None:
    plans: list[list[str]] = []
    in_threads([lambda: plans.append(migrate(empty)) for _ in range(4)])
    assert [bool(plan) for plan in sorted(plans, key=len)] == [False, False, False, True]
    store = PostgresStore(empty)
    create(store, "r")
    store.close()


def test_a_migration_that_fails_leaves_nothing(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION json_text(document TEXT, member TEXT) RETURNS INT LANGUAGE sql AS 'SELECT 1'"
        )
        refuses(StoreError, lambda: migrate(empty))
        assert tables(connection) == set()
        refuses(StoreError, lambda: migrate(empty, grant="a role that does not exist"))
        connection.execute("DROP FUNCTION json_text")
    migrate(empty)


def test_tables_of_another_program_are_left_alone(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        for table in ("runs (id INT)", "meta (key TEXT, value TEXT)", "meta (name TEXT)"):
            connection.execute(f"CREATE TABLE {table}")
            for use in (lambda: PostgresStore(empty), lambda: migrate(empty)):
                error = refuses(NotALedger, use)
                assert "search_path" in str(error)
            name = table.partition(" ")[0]
            assert tables(connection) == {name}
            connection.execute(f"DROP TABLE {name}")


def test_a_ledger_of_a_newer_version_is_left_alone(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("UPDATE meta SET value = value + 1 WHERE key = 'schema'")
    for use in (lambda: PostgresStore(dsn), lambda: migrate(dsn)):
        refuses(SchemaTooNew, use)


@pytest.mark.unpooled
def test_a_ledger_stands_in_the_schema_that_the_search_path_names(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "One, two"')
        dsn = f"{empty}{'&' if '?' in empty else '?'}options=-csearch_path%3D%22One,%5C%20two%22"
        migrate(dsn)
        assert tables(connection) == set()
        store = PostgresStore(dsn)
        create(store, "r")
        assert list(store.check()) == []
        store.close()
        assert connection.execute('SELECT run_id FROM "One, two".agent_runs').fetchall() == [("r",)]
        with pytest.raises(psycopg.IntegrityError):  # from wherever it is asked
            connection.execute('DELETE FROM "One, two".entries')


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("agent_run_ledger.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    error = refuses(StoreError, lambda: open_store("postgresql://localhost/x", durability="full", clock=SystemClock()))
    assert 'pip install ".[postgres]"' in str(error)


# --- partitions, triggers, rights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"partitions": 5}, {"triggers": False}, {"partitions": 1, "triggers": False}])
def test_a_ledger_that_is_made_otherwise_does_the_same(empty: str, options: dict[str, Any]) -> None:
    migrate(empty, **options)
    store = PostgresStore(empty)
    tokens = {f"r{number}": create(store, f"r{number}").token for number in range(20)}
    for run_id, token in tokens.items():
        assert store.append(run_id, token, 0, [a_row(2, payload=b"x" * 100_000)], synced=False)
        assert store.post(run_id, "signal", b"", "who", 1.0) == 1
    for number in range(20):
        enqueue(store, f"q{number}", priority=number % 3, key=f"k{number % 4}")
    first = claim_due(store, at_most=7)
    second = claim_due(store, QueueTerms("q", per_key=2), owner="b", at_most=50)
    assert len({lease.run_id for lease in [*first, *second]}) == len(first) + len(second) >= 8
    assert [summary.head.run_id for summary in store.summaries()] == [*tokens, *(f"q{number}" for number in range(20))]
    assert all(len(store.read(run_id)) == 2 for run_id in tokens)
    assert list(store.check()) == []
    store.close()
    with psycopg.connect(empty, autocommit=True) as connection:
        parts = options.get("partitions")
        for table in RUN_TABLES:
            ((count,),) = connection.execute(
                "SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass", [table]
            ).fetchall()
            assert count == (parts or 0)
        refused = 0
        try:
            connection.execute("UPDATE entries SET kind = 'other'")
        except psycopg.IntegrityError:
            refused = 1
        assert refused == options.get("triggers", True)


def test_only_a_new_ledger_is_partitioned(dsn: str, empty: str) -> None:
    refuses(StoreError, lambda: migrate(dsn, partitions=4))
    refuses(StoreError, lambda: migrate(empty, partitions=0))


@pytest.mark.unpooled
def test_a_role_with_the_rights_of_a_program_runs_the_ledger_and_cannot_rewrite_it(
    dsn: str, owner: psycopg.Connection
) -> None:
    owner.execute("DROP ROLE IF EXISTS a_program")
    owner.execute("CREATE ROLE a_program LOGIN")
    try:
        as_program = dsn.replace("postgres@", "a_program@")
        refuses(StoreError, lambda: PostgresStore(as_program))
        plan = migrate(dsn, grant="a_program")
        assert all("CREATE" not in statement for statement in plan)
        store = PostgresStore(as_program)
        the_whole_life_of_a_ledger(store)
        assert list(store.check()) == []
        lease = store.create("kept", "a", 30.0, SECRET, [a_row(1, payload=b"{}", state="COMPLETED")], LISTING)
        assert lease is not None
        said, stone = a_row(2, "erased", state="COMPLETED"), Tombstone("kept", 1, b"", "", "", 0.0)
        for refused in (
            lambda: store.erase("kept", lease.token, [said], Erasure([(1, 1)])),
            lambda: store.delete(stone, lease.token),
        ):
            assert "the role that owns the tables" in str(refuses(StoreError, refused))
        store.close()
        with psycopg.connect(as_program, autocommit=True) as connection:
            for view in ("agent_runs", "run_steps", "agent_step_journal"):
                connection.execute(f"SELECT * FROM {view}".encode())
            for forbidden in (
                "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL",
                "UPDATE entries SET kind = 'other'",
                "DELETE FROM entries",
                "TRUNCATE entries",
                "DELETE FROM runs",
                "UPDATE runs SET run_id = 'other'",
                "UPDATE runs SET queue = 'other'",
                "DELETE FROM payloads",
                "UPDATE secrets SET secret = NULL",
                "DELETE FROM inbox",
                "INSERT INTO tombstones VALUES ('r', 1, '', '', '', 1)",
                "UPDATE meta SET value = 9",
                "ALTER TABLE entries DISABLE TRIGGER ALL",
                "DROP TABLE entries",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(forbidden.encode())
    finally:
        owner.execute("DROP OWNED BY a_program")
        owner.execute("DROP ROLE a_program")


# --- older ledgers ----------------------------------------------------------------------------------------------------


def make_ledger_of(version: int, dsn: str, **options: Any) -> None:
    """Migrate as an earlier version of the library would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrating, "SCHEMA_VERSION", version)
        patch.setattr(migrating, "scripts", lambda: [each for each in scripts() if int(each[0][:4]) <= version])
        rights = {right.replace(NEW_SINCE[version], ""): of for right, of in migrating._RIGHTS.items()}
        patch.setattr(migrating, "_RIGHTS", rights)
        migrate(dsn, **options)


NEW_SINCE = {1: ", deaths, deaths_after", 2: "", 3: ""}
"""The columns that a program may change and that came after a version."""


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
@pytest.mark.parametrize("options", [{}, {"partitions": 3}, {"triggers": False}])
def test_an_older_ledger_is_refused_until_it_is_brought_up_to_date_and_goes_on_then(
    empty: str, version: int, options: dict[str, Any]
) -> None:
    make_ledger_of(version, empty, **options)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO runs (run_id, owner, fencing_token, lease_until, created_at) VALUES ('old', 'a', 7, 0, 1.5)"
        )
        connection.execute(
            "INSERT INTO entries (run_id, seq, kind, body, roots) VALUES ('old', 1, 'created', '{}', '')"
        )
    error = refuses(StoreError, lambda: PostgresStore(empty))
    assert f"has schema {version} and needs {SCHEMA_VERSION}" in str(error)
    plan = migrate(empty, dry_run=True)
    assert migrate(empty) == plan != []
    assert migrate(empty) == []
    store = PostgresStore(empty)
    assert list(store.check()) == []
    assert store.head("old") is not None
    lease = store.claim("old", "b", 30.0)
    assert (lease.token, lease.deaths) == (8, 1)
    with psycopg.connect(empty, autocommit=True) as connection:
        has_triggers = connection.execute("SELECT count(*) > 0 FROM pg_trigger WHERE NOT tgisinternal").fetchone()
        assert has_triggers == (options.get("triggers", True),), "it stays as it was made"
    the_whole_life_of_a_ledger(store)
    store.close()


@pytest.mark.unpooled
@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_role_of_programs_keeps_its_rights_when_the_ledger_is_brought_up_to_date(empty: str, version: int) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS a_program")
        connection.execute("CREATE ROLE a_program LOGIN")
        try:
            make_ledger_of(version, empty, grant="a_program")
            migrate(empty)
            store = PostgresStore(empty.replace("postgres@", "a_program@"))
            the_whole_life_of_a_ledger(store)
            store.close()
        finally:
            connection.execute("DROP OWNED BY a_program")
            connection.execute("DROP ROLE a_program")


def the_whole_life_of_a_ledger(store: Store) -> None:
    """Every verb that writes."""
    lease = create(store, "r")
    assert store.append("r", lease.token, 0, [a_row(2)], synced=True)
    store.annotate("r", lease.token, "a note")
    assert store.append("r", lease.token, 0, [a_row(3, payload=b"x" * 100_000), a_row(4)], synced=True)
    assert store.append("r", lease.token, 0, [a_row(5, payload=b"x" * 100_000)], synced=True)
    assert store.renew("r", lease.token, 30.0) == 0
    assert store.post("r", "signal", b"", "who", 1.0) == 1
    store.release("r", lease.token)
    assert store.claim("r", "b", 30.0).token > lease.token
    assert store.adopt("s", 3, SECRET, LISTING, [[a_row(1)], [a_row(2)]], [], None)
    store.move_away("s", store.claim("s", "a", 30.0).token, "elsewhere")
    assert store.adopt("s", 9, SECRET, LISTING, [[a_row(3)]], [], None)
    enqueue(store, "t", key="k")
    assert len(store.claim_due("w", -1.0, [QueueTerms("q", 1, 1)], ["agent"], 2)) == 1
    assert store.free_dead() == 1
    assert len(claim_due(store)) == 1
    store.beat("worker", b"")
    store.leave("worker")
    assert store.next_due(["q"], ["agent"]) is None


@pytest.mark.unpooled
def test_a_role_without_rights_is_told_how_to_get_them(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("DROP ROLE IF EXISTS a_reader")
    owner.execute("CREATE ROLE a_reader LOGIN")
    owner.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO a_reader")
    try:
        store = PostgresStore(dsn.replace("postgres@", "a_reader@"))
        error = refuses(StoreReadOnly, lambda: create(store, "r"))
        assert "--grant" in str(error)
        store.close()
    finally:
        owner.execute("DROP OWNED BY a_reader")
        owner.execute("DROP ROLE a_reader")


# --- append-only ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(store: PostgresStore) -> str:
    """A run that has ended."""
    lease = create(store, "ended")
    assert store.append(
        "ended", lease.token, 0, [a_row(2, payload=b"x" * 100_000), a_row(3, state="COMPLETED")], synced=True
    )
    store.release("ended", lease.token)
    return "ended"


SAID = b"""
INSERT INTO entries (run_id, seq, kind, body, roots) VALUES (%s, %s, 'erased', '{"state":"COMPLETED"}', '')
"""
"""The entry behind which something may be erased."""


def test_the_log_cannot_be_changed_by_its_owner_either(
    store: PostgresStore, owner: psycopg.Connection, ended: str
) -> None:
    create(store, "open", rows=[a_row(1, "created", b"{}"), a_row(2)])
    for forbidden in (
        "UPDATE entries SET body = ''",
        "UPDATE entries SET seq = seq + 10",
        "UPDATE entries SET payload = 'other'",
        "UPDATE entries SET payload = NULL",
        "DELETE FROM entries",
        "TRUNCATE entries",
        "UPDATE payloads SET bytes = 'other'",
        "DELETE FROM payloads",
        "TRUNCATE payloads",
        "UPDATE secrets SET secret = 'other'",
        "UPDATE runs SET run_id = 'other' WHERE run_id = 'open'",
        "UPDATE runs SET fencing_token = fencing_token - 1",
        "DELETE FROM runs",
        "TRUNCATE runs",
        "INSERT INTO entries SELECT * FROM entries",
        "INSERT INTO tombstones VALUES ('open', 2, '', 'who', 'why', 1)",
        "INSERT INTO tombstones VALUES ('unknown', 2, '', 'who', 'why', 1)",
    ):
        with pytest.raises(psycopg.IntegrityError):
            owner.execute(forbidden.encode())
    assert [len(store.read(run_id)) for run_id in (ended, "open")] == [3, 2]
    assert list(store.check()) == []


def test_what_a_payload_was_can_be_erased_and_an_ended_run_buried(
    store: PostgresStore, owner: psycopg.Connection, ended: str
) -> None:
    for statement in (
        "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE run_id = 'ended' AND seq = 1",
        "UPDATE payloads SET bytes = NULL",
        "UPDATE secrets SET secret = NULL",
        "DELETE FROM secrets",
    ):
        with pytest.raises(psycopg.IntegrityError):
            owner.execute(statement.encode())
    owner.execute(SAID, ["ended", 4])
    owner.execute(
        "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE run_id = 'ended' AND seq = 1"
    )
    owner.execute("UPDATE payloads SET bytes = NULL")
    owner.execute("UPDATE secrets SET secret = NULL")
    assert [row.payload for row in store.read(ended)] == [None] * 4
    assert (store.secret(ended), store.claim(ended, "a", 30.0).secret) == (b"", b"")
    assert list(store.check()) == []
    owner.execute("INSERT INTO tombstones VALUES ('ended', 4, '', 'who', 'why', 1)")
    for table in ("entries", "payloads", "runs"):
        owner.execute(f"DELETE FROM {table} WHERE run_id = 'ended'".encode())
    assert (store.head(ended), store.read(ended)) == (None, [])
    for forbidden in ("DELETE FROM tombstones", "UPDATE tombstones SET why = ''", "TRUNCATE tombstones"):
        with pytest.raises(psycopg.IntegrityError):
            owner.execute(forbidden.encode())
    with pytest.raises(psycopg.IntegrityError):
        owner.execute("INSERT INTO runs (run_id, fencing_token, created_at) VALUES ('ended', 0, 1)")
    assert store.create(ended, "a", 30.0, SECRET, [a_row(1)], LISTING) is None
    assert not store.enqueue(ended, SECRET, [a_row(1)], LISTING, 0.0)


def test_a_payload_that_was_erased_may_come_again_with_a_later_entry(
    store: PostgresStore, owner: psycopg.Connection
) -> None:
    token = create(store, "r").token
    rows = [a_row(2, payload=b"x" * 100_000), a_row(4, payload=b"x" * 100_000)]
    assert store.append("r", token, 0, rows[:1], synced=False)
    owner.execute(SAID, ["r", 3])
    owner.execute("UPDATE payloads SET bytes = NULL")
    assert store.payload("r", 2) is None
    assert store.append("r", token, 0, rows[1:], synced=False)
    assert store.payload("r", 2) == store.payload("r", 4) == b"x" * 100_000


# --- check ------------------------------------------------------------------------------------------------------------


def test_what_belongs_to_nothing_is_found(store: PostgresStore, owner: psycopg.Connection) -> None:
    create(store, "r")
    owner.execute("INSERT INTO entries (run_id, seq, kind, body, roots) VALUES ('it''s', 1, 'note', '', '')")
    owner.execute("INSERT INTO runs (run_id, fencing_token, created_at) VALUES ('empty', 0, 1)")
    owner.execute("INSERT INTO payloads VALUES ('r', 'digest', 'bytes')")
    assert [said.partition(": ")[2] for said in store.check()] == [
        "run 'it''s' has entries and no head",
        "run 'empty' has a head and no entries",
        "run 'r' has a payload that no entry names",
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE workers", "the table workers is missing from the schema"),
        ("ALTER TABLE runs ALTER note SET NOT NULL", "the table runs of the schema was changed"),
        ("DROP INDEX runs_ready", "the index runs_ready is missing from the schema"),
        ("ALTER TABLE inbox DROP CONSTRAINT inbox_run_id_nonce_key", "the constraint inbox_run_id_nonce_key is missing from the schema"),
        ("DROP TRIGGER entries_are_never_changed ON entries", "the trigger entries_are_never_changed is missing from the schema"),
        ("ALTER TABLE entries DISABLE TRIGGER entries_are_never_deleted", "the trigger entries_are_never_deleted of the schema was changed"),
        (
            "CREATE OR REPLACE FUNCTION refuse() RETURNS TRIGGER LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
            "the function refuse of the schema was changed",
        ),
        ("DROP VIEW agent_runs", "the view agent_runs is missing from the schema"),
        (
            "ALTER VIEW agent_runs RENAME TO old; CREATE VIEW agent_runs AS SELECT * FROM old WHERE run_id <> 'hidden'",
            "the view agent_runs of the schema was changed",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_from_the_schema_or_was_changed_is_found(
    store: PostgresStore, owner: psycopg.Connection, change: str, found: str
) -> None:
    assert list(store.check()) == []
    owner.execute(change.encode())
    assert f"{store.place}: {found}" in list(store.check())


# --- views ------------------------------------------------------------------------------------------------------------

COLUMNS = {
    "agent_runs": "run_id goal status total_steps created_at updated_at",
    "run_steps": "step_id run_id step_number tool_name arguments_json state output_json error_message fingerprint created_at "
    "completed_at state_version idempotency_key input_digest output_digest retry_budget_remaining fencing_token",
    "agent_step_journal": "task_id step_index tool_name idempotency_key arguments_json status output_json created_at updated_at",
}
RANDOM = {"step_id", "idempotency_key"}


def drive(ledger: AgentRunLedger) -> None:
    """Runs in many states."""

    def fail() -> None:
        raise KeyError("ä\0\u20ac")

    run = ledger.create_run("goal \0 \u20ac 'x'", "one")
    ledger.execute_step(run, "fetch", {"id": 7, "text": 'a\0b"'}, lambda: {"ok": [1, 2.5, None]})
    ledger.execute_step(run, "large", {"x": "y" * 100_000}, lambda: "z" * 100_000)
    with suppress(StepFailed):
        ledger.execute_step(run, "fails", {}, fail)
    ledger.execute_step(run, "after", {}, lambda: None)
    ledger.finish_run(run, {"done": True})
    run = ledger.create_run("second", "two")
    with suppress(KeyboardInterrupt):
        ledger.execute_step(run, "interrupted", {"a": 1}, partial(_raise, KeyboardInterrupt()), retry=RetryPolicy())
    run = ledger.create_run("third", "three")
    ledger.execute_step(run, "fetch", {}, lambda: 1)
    ledger.cancel("three", reason="enough")


def _raise(error: BaseException) -> None:
    raise error


def test_people_see_in_the_views_what_they_see_in_those_of_sqlite(
    store: PostgresStore, dsn: str, tmp_path: Path
) -> None:
    seen: list[dict[str, list[Any]]] = []
    path = tmp_path / "ledger.db"
    clock = Standing()
    for place in (path, store):
        ledger = AgentRunLedger(place, clock=clock, durability="process", owner="o")  # type: ignore[arg-type]
        drive(ledger)
        connection = sqlite3.connect(path) if place is path else psycopg.connect(dsn)
        views = {}
        for view, columns in COLUMNS.items():
            cursor = connection.execute(f"SELECT * FROM {view}")  # type: ignore[arg-type]
            assert [column[0] for column in cursor.description or ()] == columns.split()
            kept = [index for index, name in enumerate(columns.split()) if name not in RANDOM]
            views[view] = sorted([[row[index] for index in kept] for row in cursor.fetchall()], key=str)
        connection.close()
        ledger.close()
        seen.append(views)
    sqlite, postgres = seen
    for rows in (sqlite["agent_runs"], postgres["agent_runs"]):
        (one,) = [row for row in rows if row[0] == "one"]
        one[1] = None  # a text with a NUL is none that PostgreSQL could show
    for rows in (sqlite["run_steps"], postgres["run_steps"]):
        for row in rows:
            row[:] = ["KeyError" if str(value).startswith("KeyError") else value for value in row]
    assert postgres == sqlite


class Standing(SystemClock):
    """A wall clock that stands still."""

    now = staticmethod(lambda: 1_700_000_000.25)


def test_what_is_no_json_gives_nulls_and_never_an_error(store: PostgresStore, owner: psycopg.Connection) -> None:
    create(store, "r")
    for seq, body in enumerate(
        (b"\xff\xfe", b"{", b'{"step": "x", "at": [], "step_state": "\\u0000"}', b"", b"[" * 50_000), start=2
    ):
        owner.execute(
            "INSERT INTO entries (run_id, seq, kind, position, body, roots, payload) VALUES ('r', %s, 'intent', %s, %b, '', %b)",
            [seq, str(seq), body, body],
        )
    assert len(owner.execute("SELECT * FROM run_steps").fetchall()) == 5
    assert len(owner.execute("SELECT * FROM agent_step_journal").fetchall()) == 5
    assert len(owner.execute("SELECT * FROM agent_runs").fetchall()) == 1
