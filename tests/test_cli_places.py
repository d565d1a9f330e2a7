"""The command line where a ledger is elsewhere: copy, migrate, every other command on a server, and no password in what they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from agent_run_ledger import (
    AgentRunLedger,
    BudgetExceededException,
    Effect,
    RunMoved,
    StepFailed,
    StoreError,
    StoreReadOnly,
)
from agent_run_ledger.cli import doctor
from agent_run_ledger.drivers import reading
from agent_run_ledger.model import ServerDiagnosis
from agent_run_ledger.stores.postgres import PostgresStore, migrate
from agent_run_ledger.stores.postgres.connections import place_of
from agent_run_ledger.stores.postgres.schema import SCHEMA_VERSION
from support.databases import databases
from support.shell import NAMES, Shell, is_one_line, is_safe

PASSWORD = "s3cret-pässword"
LISTED = "s3cret-p%C3%A4ssword"
"""As it is spelt in an address."""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def nothing(_: str) -> None:
    """Leave a database as it is."""


def with_password(dsn: str) -> str:
    """The address with a password in it; the servers of tests trust everybody."""
    parts = urlsplit(dsn)
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user or 'postgres'}:{LISTED}@{host}").geturl()


@pytest.fixture
def empty() -> Iterator[str]:
    with databases().fresh(nothing) as dsn:
        yield with_password(dsn)


@pytest.fixture
def server() -> Iterator[str]:
    """A database with a ledger in it, whose address has a password."""
    with databases().fresh(migrate) as dsn:
        yield with_password(dsn)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "agent.db"
    fill(path)
    return path


def fill(place: Any) -> None:
    """A completed run, one that an exception parked, one in doubt, one in quarantine, a dead letter, and two that wait."""
    with AgentRunLedger(place, max_steps=3, durability="process") as ledger:
        with ledger.open_run("Reconcile October", run_id="october") as run:
            run.step("fetch", {"id": 1}, lambda: {"total": 120}, effect=Effect.READ)
            run.result = {"booked": 1}
        with pytest.raises(StepFailed), ledger.open_run("Reconcile November", run_id="november") as run:
            run.step("fetch", {"id": 2}, lambda: 1 / 0, effect=Effect.READ)
        with pytest.raises(KeyboardInterrupt), ledger.open_run("Refund", run_id="refund") as run:
            run.step("pay", {"id": 2}, interrupted, effect=Effect.MUTATE)
        with pytest.raises(BudgetExceededException), ledger.open_run("Count", run_id="dead") as run:
            [run.step("count", {"number": number}, lambda number: number) for number in range(4)]


def interrupted(**_: Any) -> None:
    raise KeyboardInterrupt


# --- copy -------------------------------------------------------------------------------------------------------------


def test_copy_moves_what_has_not_ended_copies_what_has_and_says_which(shell: Shell, db: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    status, out, err = shell("--db", db, "copy", "october", "november", "--to", other)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"run 'october' was copied to {other}: 4 entries",
        f"run 'november' was moved to {other}, and goes on there: 4 entries",
    ]
    status, out, _ = shell("copy", "--db", db, "october", "november", "--to", other)
    assert out.splitlines() == [
        f"run 'october' stands in {other} already: 4 entries",
        f"run 'november' stands in {other} already, and goes on there: 4 entries",
    ]
    assert shell("--db", other, "verify")[0] == 0


def test_copy_tells_programs_what_became_of_each_run(shell: Shell, db: Path, server: str) -> None:
    said = shell.json("--db", db, "copy", "november", "--to", server)
    assert said == {
        "runs": [{"run_id": "november", "place": place_of(server), "entries": 4, "is_moved": True, "was_there": False}]
    }
    assert shell.json("--db", server, "show", "november")["run"]["status"] == "BLOCKED"


def test_copy_refuses_in_one_line_and_leaves_everything_as_it_was(shell: Shell, db: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    fill(other)
    assert "another run of this id stands there" in shell.refused("--db", db, "copy", "november", "--to", other)
    assert "the ledger in which it stands" in shell.refused("--db", db, "copy", "november", "--to", db)
    assert "there is no run 'unknown'" in shell.refused("--db", db, "copy", "unknown", "--to", other)
    assert "there is no database" in shell.refused("--db", tmp_path / "none.db", "copy", "x", "--to", other)
    assert not (tmp_path / "none.db").exists()
    assert shell.json("--db", db, "show", "november")["run"]["moved_to"] is None


def test_copy_to_a_database_that_was_not_migrated_names_the_command_that_does_it(
    shell: Shell, db: Path, empty: str
) -> None:
    said = shell.refused("--db", db, "copy", "november", "--to", empty)
    assert f"agent-run-ledger migrate --db {place_of(empty)}" in said
    assert shell.json("--db", db, "show", "november")["run"]["moved_to"] is None


def test_a_run_that_was_moved_is_shown_with_its_place_and_acts_on_it_are_refused(
    shell: Shell, db: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    shell("--db", db, "copy", "november", "refund", "--to", other)
    assert shell("--db", db, "runs")[1].count("moved to /") == 2
    assert f"moved to:      {other}" in shell("--db", db, "show", "november")[1]
    assert shell.json("--db", db, "show", "november")["run"]["moved_to"] == str(other)
    _, out, _ = shell("--db", db, "doctor")
    assert "2 of them moved to another ledger" in out
    assert "no run waits for its program" in out
    assert "no run stands until a person decides" in out
    for command in (
        ["signal", "november", "go", "--yes"],
        ["cancel", "november", "--yes"],
        ["resolve", "refund", "1", "--not-executed", "--yes"],
    ):
        assert f"was moved to {other} and goes on there" in shell.refused("--db", db, *command)
        assert shell("--db", other, *command)[0] == 0
    assert shell("--db", db, "fork", "november", "--from-step", "1", "--as", "again", "--yes")[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_are_copied_and_shown_safely(shell: Shell, tmp_path: Path, name: str) -> None:
    with AgentRunLedger(tmp_path / "a.db") as ledger:
        ledger.create_run("go on", name)
    status, out, _ = shell("--db", tmp_path / "a.db", "copy", "--to", tmp_path / "b.db", "--", name)
    assert status == 0
    assert is_one_line(out)
    assert is_safe(out)
    with AgentRunLedger(tmp_path / "b.db") as ledger:
        assert [run.run_id for run in ledger.runs()] == [name]


# --- migrate ----------------------------------------------------------------------------------------------------------


def test_migrate_shows_the_sql_does_it_once_and_then_has_nothing_to_do(shell: Shell, empty: str) -> None:
    status, sql, _ = shell("--db", empty, "migrate", "--dry-run")
    assert status == 0
    assert "CREATE TABLE entries" in sql
    assert "CREATE TRIGGER entries_are_never_changed" in sql
    assert "holds no ledger yet" in shell.refused("--db", empty, "runs")
    assert shell("--db", empty, "migrate")[:2] == (0, "the database is a ledger of this version now\n")
    assert shell("--db", empty, "migrate")[:2] == (0, "the database is up to date; nothing was changed\n")
    assert shell("--db", empty, "runs")[:2] == (0, "no runs\n")
    assert shell.json("--db", empty, "migrate", "--dry-run") == {"dry_run": True, "sql": []}


def test_migrate_leaves_out_triggers_makes_partitions_and_grants(
    shell: Shell, empty: str, role: Callable[[str], str]
) -> None:
    other = role("programs")
    said = shell.json("--db", empty, "migrate", "--no-triggers", "--partitions", "3", "--grant", other)
    sql = "\n".join(said["sql"])
    assert "CREATE TRIGGER" not in sql
    assert "CREATE TABLE entries_2 PARTITION OF entries" in sql
    assert f'TO "{other}"' in sql
    assert "only a new ledger can be partitioned" in shell.refused("--db", empty, "migrate", "--partitions", "3")


def test_migrate_is_for_a_server_and_says_what_a_file_does(shell: Shell, db: Path) -> None:
    assert "it is brought up to date when it is opened" in shell.refused("--db", db, "migrate")


# --- every command on a server ----------------------------------------------------------------------------------------


def test_every_command_that_looks_or_acts_works_on_a_server_and_prints_no_password(
    shell: Shell, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(server)
    said = []

    def does(status: int, *command: str) -> str:
        for before in (["--db", server], []):
            if before:
                monkeypatch.delenv("AGENT_RUN_LEDGER_DB", raising=False)
            else:
                monkeypatch.setenv("AGENT_RUN_LEDGER_DB", server)
            found, out, err = shell(*before, *command)
            assert found == status, (command, out, err)
            said.append(out + err)
        return out

    assert "november" in does(0, "runs")
    assert "ZeroDivisionError" in does(0, "show", "november")
    assert "in doubt" in does(0, "show", "refund")
    does(0, "trace", "november")
    does(0, "plan", "november")
    does(1, "plan", "refund")
    does(0, "dead-letters", "--trace")
    does(0, "approvals")
    does(0, "verify")
    does(0, "workers")
    does(0, "runs", "--stuck")
    does(1, "doctor")
    does(1, "doctor", "--json")
    does(0, "runs", "--json")
    does(3, "cancel", "november")
    does(0, "resolve", "refund", "1", "--not-executed", "--reason", "looked", "--yes")
    does(0, "signal", "november", "go", "--payload", "1", "--yes")
    does(0, "redrive", "dead", "--max-steps", "9", "--yes")
    does(0, "fork", "october", "--from-step", "1", "--yes")
    does(2, "release", "november", "--yes")
    does(2, "wake", "november")
    does(2, "show", "unknown")
    does(0, "migrate")
    does(0, "copy", "october", "--to", str(tmp_path / "copied.db"))
    shell("--db", server, "cancel", "november", "--yes")
    assert shell.json("--db", server, "show", "november")["run"]["status"] == "CANCELLED"
    assert "--db" in "".join(said)  # commands to paste are among what was said
    assert not any(PASSWORD in each or LISTED in each for each in said)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://ann:{}@127.0.0.1:1/agents",
        "postgresql://ann:{}@127.0.0.1:1/agents?foo=1",
        "postgresql://ann:{}/x@127.0.0.1:1/agents",
        "postgresql://ann:77/{}@127.0.0.1/agents",
        "postgresql://ann:{}@x@127.0.0.1:1/agents",
        "postgresql://ann:{}%zz@127.0.0.1:1/agents",
        "postgresql://ann:{} x@127.0.0.1:1/agents",
        "postgresql://ann:{}@[x/agents",
        "postgres://ann@127.0.0.1:1/agents?password={}",
        "postgresql://ann:{}@no.such.host.invalid/agents?connect_timeout=1",
    ],
)
def test_no_error_about_an_address_shows_its_password(
    shell: Shell, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("cli.shell._LOOK_SECONDS", "stores.postgres.diagnosis._OUTAGE_SECONDS"):
        monkeypatch.setattr(f"agent_run_ledger.{seconds}", 0.01)
    dsn = address.format("s3cret")
    for command in (["runs"], ["doctor"], ["migrate"], ["copy", "x", "--to", "y.db"]):
        status, out, err = shell("--db", dsn, *command)
        assert (status, out) == (2, "")
        assert is_one_line(err)
        assert "s3cret" not in err, err
    bare = [["runs", dsn]] if " " not in dsn else []
    for command in (*bare, [dsn, "runs"], ["--db", dsn, "fly"], ["runs", f"--db={dsn}", "--limit", dsn]):
        status, out, err = shell(*command)
        assert (status, out) == (2, "")
        assert "s3cret" not in err, err


def test_what_is_opened_to_be_looked_at_writes_nothing_on_a_server(server: str, tmp_path: Path) -> None:
    fill(server)
    with AgentRunLedger.open_read_only(server) as ledger:
        assert ledger.get_run("october").result == {"booked": 1}
        assert ledger.verify().ok
        for act in (
            lambda: ledger.create_run("new"),
            lambda: ledger.cancel("november"),
            lambda: ledger.signal("november", "go"),
            lambda: ledger.copy("november", tmp_path / "other.db"),
        ):
            with pytest.raises(StoreReadOnly):
                act()
        store = reading.behind(ledger._store)
        assert isinstance(store, PostgresStore)
        with pytest.raises(StoreReadOnly):  # the session itself does not
            store._links.run(lambda link: link.execute("DELETE FROM workers"))


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def role(server: str) -> Iterator[Callable[[str], str]]:
    """Makes roles for one test; what it gives is their names."""
    made: list[str] = []

    def make(name: str) -> str:
        with psycopg.connect(server, autocommit=True) as connection:
            (database,) = connection.execute("SELECT current_database()").fetchone() or ("",)
            connection.execute(f'CREATE ROLE "{database}_{name}" LOGIN')
        made.append(f"{database}_{name}")
        return made[-1]

    yield make
    with psycopg.connect(server, autocommit=True) as connection:
        for name in made:
            (others,) = connection.execute(
                "SELECT array_agg(d.datname) FROM pg_shdepend s JOIN pg_database d ON d.oid = s.dbid JOIN pg_roles r ON r.oid = s.refobjid "
                "WHERE r.rolname = %s",
                [name],
            ).fetchone() or (None,)
            for database in others or []:
                with psycopg.connect(urlsplit(server)._replace(path=f"/{database}").geturl()) as there:
                    there.execute(f'DROP OWNED BY "{name}"')
            connection.execute(f'DROP ROLE "{name}"')


def as_role(dsn: str, name: str) -> str:
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl()


def checks(shell: Shell, dsn: str) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["level"], check["message"]) for check in shell.json("--db", dsn, "doctor")["checks"]}


def test_doctor_looks_at_server_ledger_fleet_and_runs(shell: Shell, server: str) -> None:
    fill(server)
    status, _, err = shell("--db", server, "doctor")
    assert (status, err) == (1, "")  # a step is in doubt, and a person has to decide
    found = checks(shell, server)
    assert list(found) == [
        *("python", "server", "pooler", "commits", "clock", "schema", "log", "size", "workers", "stuck"),
        *("runs", "to decide", "waiting", "in doubt", "undeclared"),
    ]
    assert found["server"][1].startswith("PostgreSQL 1")
    assert found["commits"][0] == "problem"  # servers of tests do not sync
    assert found["commits"][1].startswith("fsync is off")
    assert found["clock"][0] == "ok"
    assert found["schema"] == ("ok", f"version {SCHEMA_VERSION}, the newest that this version knows")
    assert "superuser" in found["log"][1]
    assert not found["size"][1].startswith("0 bytes")
    assert found["workers"] == ("ok", "0 alive, with 0 runs")
    assert found["runs"][1].startswith("2 BLOCKED, 1 COMPLETED, 1 DEAD_LETTER")
    assert "'refund'" in found["to decide"][1]
    assert "'november'" in found["waiting"][1]


def test_doctor_says_what_a_commit_survives(server: str) -> None:
    seen = AgentRunLedger.diagnose(server)
    assert isinstance(seen, ServerDiagnosis)
    seen = replace(seen, syncs=True, writes_whole_pages=True)
    alone, standby, torn = seen, replace(seen, synchronous_standby_names="b"), replace(seen, writes_whole_pages=False)
    assert [
        (check.level, words in check.message)
        for check, words in (
            (doctor._commits(alone), "synchronous_standby_names is empty"),
            (doctor._commits(standby), "on the disk of a standby, too, before they are told (b)"),
            (doctor._commits(torn), "full_page_writes is off"),
        )
    ] == [("ok", True), ("ok", True), ("problem", True)]
    old, other = replace(seen, server_version="14.2"), replace(seen, is_standby=True, is_behind_pooler=True)
    found = [[check.level for check in doctor._server(each)] for each in (old, other)]
    assert found == [["warn", "ok", "ok", "ok"]] * 2
    (clock,) = [check for check in doctor._server(replace(seen, clock_ahead_seconds=-90.5)) if check.name == "clock"]
    assert (clock.level, clock.message.split(";")[0]) == ("warn", "the server's is 90.500 s behind this machine's")


def test_doctor_says_of_each_role_what_keeps_it_from_rewriting_the_log(
    shell: Shell, server: str, role: Callable[[str], str]
) -> None:
    granted = role("granted")
    migrate(server, grant=granted)
    assert checks(shell, as_role(server, granted))["log"] == (
        "ok",
        f"kept append-only by triggers, and role {granted!r} has no right to rewrite it",
    )
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("ALTER TABLE entries DISABLE TRIGGER entries_are_never_deleted")
        level, said = checks(shell, as_role(server, granted))["log"]
        assert (level, said.split(":")[0]) == ("ok", "kept append-only by rights")
        level, said = checks(shell, server)["log"]
        assert level == "problem"
        assert "UPDATE, DELETE, TRUNCATE" in said
        connection.execute(f'GRANT DELETE ON entries TO "{granted}"')
    assert checks(shell, as_role(server, granted))["log"][0] == "problem"


def test_doctor_reports_a_database_that_is_no_ledger_as_a_problem(shell: Shell, empty: str) -> None:
    status, out, _ = shell("--db", empty, "doctor")
    assert status == 1
    assert out.splitlines()[-1].startswith("problem  ledger")
    assert "agent-run-ledger migrate --db" in out


def test_doctor_says_what_is_stuck_and_who_works(shell: Shell, server: str) -> None:
    with AgentRunLedger(server) as ledger:
        agent = ledger.agent(name="agent")(lambda number: number)
        ledger.submit(agent, 1, run_id="left")
        ledger._store.beat("ann-1", json.dumps({"state": "running", "running_count": 3}).encode())
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("UPDATE runs SET due = due - 1000")
    found = checks(shell, server)
    assert found["stuck"][0] == "warn"
    assert "'left'" in found["stuck"][1]
    assert found["workers"] == ("ok", "1 alive, with 3 runs")


def test_a_dead_owner_is_not_seen_alive_once_its_lease_ran_out(server: str) -> None:
    store = PostgresStore(server)
    with AgentRunLedger(store) as ledger:
        ledger.create_run("go on", "mine")
        assert ledger.inspect("mine").is_owner_seen
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("UPDATE runs SET lease_until = lease_until - 1000")
        seen = ledger.inspect("mine")
        assert (seen.is_owner_seen, seen.is_waiting) == (False, True)


# --- without the extra ------------------------------------------------------------------------------------------------


def test_without_the_driver_every_command_says_what_to_install(
    shell: Shell, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("agent_run_ledger.stores.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for command in (["runs"], ["doctor"], ["migrate"]):
        assert 'pip install ".[postgres]"' in shell.refused("--db", "postgresql://localhost/agents", *command)
    assert 'pip install ".[postgres]"' in shell.refused(
        "--db", db, "copy", "november", "--to", "postgresql://localhost/a"
    )
    with pytest.raises(StoreError, match="needs psycopg"):
        AgentRunLedger.migrate("postgresql://localhost/agents")


def test_two_schemas_of_one_database_are_two_ledgers(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        for name in ("first", "second"):
            connection.execute(f"CREATE SCHEMA {name}")
    mark = "&" if "?" in empty else "?"
    first, second = (f"{empty}{mark}options=-csearch_path%3D{name}" for name in ("first", "second"))
    for place in (first, second):
        migrate(place)
    fill(first)
    with AgentRunLedger(first) as ledger:
        ledger.copy("november", second)
        with pytest.raises(RunMoved, match="search_path"):
            ledger.resume_run("november")
    with AgentRunLedger(second) as ledger:
        assert [run.run_id for run in ledger.runs()] == ["november"]
