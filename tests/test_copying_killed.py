"""Copying in real processes that are killed, and over a network that fails: the run goes on in one place, and nothing of it is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from agent_run_ledger import AgentRunLedger, RunMoved, RunNotFound, RunOwned, StoreUnavailable
from agent_run_ledger.contract import Request, Row
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.stores.postgres import PostgresStore, migrate
from support.databases import databases
from support.postgres import Address
from support.processes import child
from support.proxy import Proxy, is_any, is_commit

RUN = "october"


@pytest.fixture
def database() -> Iterator[str]:
    with databases().fresh(migrate) as dsn:
        yield dsn


def begin(path: Path) -> list[Row]:
    """A run with some steps and a signal, of which nobody has the lease: all that there is of it."""
    with AgentRunLedger(path, durability="process") as ledger:
        ledger.create_run("go on", RUN)
        for size in (1, 300_000, 2_000_000):
            ledger.execute_step(RUN, "write", {"size": size}, lambda size: "x" * size)
        ledger.signal(RUN, "note", 1)
        return ledger._store.read(RUN)


def standing(place: Any) -> tuple[list[Row], list[Request]]:
    with closing(open_store(place, durability="process", clock=SystemClock())) as store:
        return packed(store).read(RUN), store.inbox(RUN, 0)


def goes_on_in(place: Any) -> bool:
    """Whether somebody could go on with the run here."""
    with (
        closing(open_store(place, durability="process", clock=SystemClock())) as store,
        suppress(RunMoved, RunNotFound),
    ):
        lease = store.claim(RUN, "somebody", 30.0)
        store.release(RUN, lease.token)
        return True
    return False


DIES = """
import os, signal
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock

at, when = int(arguments[2]), arguments[3]
writes = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Mortal:
    def __init__(self, place):
        self.store = open_store(place, durability="full", clock=SystemClock())

    def __getattr__(self, name):
        verb = getattr(self.store, name)
        if name not in ("claim", "append", "move_away", "adopt", "release"):
            return verb
        def write(*given, **named):
            global writes
            writes += 1
            if writes < at:
                return verb(*given, **named)
            if when == "before":
                die()
            if when == "amid" and name == "adopt":
                pages = list(given[4])
                def some():
                    yield pages[0]
                    die()
                given = (*given[:4], some(), *given[5:])
            verb(*given, **named)
            die()
        return write

here, there = AgentRunLedger(Mortal(arguments[0])), AgentRunLedger(Mortal(arguments[1]))
here.copy("october", there)
tell("done")
"""


@pytest.mark.parametrize("to", ["file", "database"])
@pytest.mark.parametrize("when", ["before", "amid", "behind"])
def test_a_copy_that_is_killed_leaves_at_most_one_place_and_the_same_command_makes_it_one(
    tmp_path: Path, database: str, to: str, when: str
) -> None:
    at = 0
    while True:
        at += 1
        here = tmp_path / f"here{at}.db"
        there: Any = database if to == "database" else tmp_path / f"there{at}.db"
        before = begin(here)
        with child(DIES, here, there, at, when) as copying:
            is_killed = copying.ends() == -signal.SIGKILL
        assert [goes_on_in(here), goes_on_in(there)].count(True) <= 1
        assert standing(here)[0] == before
        assert standing(there)[0] in ([], before)  # whole, or not at all
        with AgentRunLedger(here) as ledger:
            (copied,) = ledger.copy(RUN, there)
        assert (copied.is_moved, copied.entries) == (True, len(before))
        assert [goes_on_in(here), goes_on_in(there)] == [False, True]
        assert standing(there) == standing(here)
        with AgentRunLedger(there) as ledger:
            ledger.resume_run(RUN)
            assert ledger.execute_step(RUN, "write", {"size": 2}, lambda size: "y" * size) == "yy"
            ledger.finish_run(RUN)
            assert ledger.verify(RUN).findings == []
        if not is_killed:
            assert at > 3  # claim, move_away and adopt at least
            return
        if to == "database":
            _forget(database)


def _forget(database: str) -> None:
    """Take the run out of the database, so that it can come again."""
    with psycopg.connect(database) as connection:
        connection.execute("INSERT INTO tombstones VALUES (%s, 1, '', 'a test', 'to begin anew', 1.0)", [RUN])
        for table in ("entries", "payloads", "inbox", "secrets", "runs"):
            connection.execute(f"DELETE FROM {table} WHERE run_id = %s", [RUN])
        connection.execute("ALTER TABLE tombstones DISABLE TRIGGER ALL")
        connection.execute("DELETE FROM tombstones")
        connection.execute("ALTER TABLE tombstones ENABLE TRIGGER ALL")


def test_two_that_copy_one_run_to_two_places_at_once_do_not_make_two_of_it(tmp_path: Path) -> None:
    begin(tmp_path / "here.db")
    script = """
    ledger = AgentRunLedger(arguments[0])
    tell("ready")
    hear()
    try:
        ledger.copy("october", arguments[1])
        tell("moved")
    except (RunOwned, RunMoved) as error:
        tell(type(error).__name__)
    """.replace("\n    ", "\n")
    places = [tmp_path / "one.db", tmp_path / "two.db"]
    with child(script, tmp_path / "here.db", places[0]) as one, child(script, tmp_path / "here.db", places[1]) as two:
        assert [one.hear(), two.hear()] == ["ready", "ready"]
        one.tell()
        two.tell()
        said = [one.hear(), two.hear()]
    assert said.count("moved") == 1, said
    assert [goes_on_in(place) for place in (tmp_path / "here.db", *places)].count(True) == 1


# --- a network that fails ---------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    told = psycopg.conninfo.conninfo_to_dict(database)
    with Proxy(Address(str(told["host"]), int(told["port"] or 5432))) as proxy:
        yield proxy


@pytest.mark.parametrize("of", [is_any, is_commit])
@pytest.mark.parametrize("what", ["reply", "request"])
def test_what_a_network_loses_on_the_way_there_makes_no_two_of_it(
    tmp_path: Path, database: str, proxy: Proxy, what: str, of: Callable[[str], bool]
) -> None:
    here, name = tmp_path / "here.db", str(psycopg.conninfo.conninfo_to_dict(database)["dbname"])
    before = begin(here)
    there = AgentRunLedger(PostgresStore(proxy.dsn(name), outage_seconds=20.0))
    with AgentRunLedger(here) as ledger, there:
        lost = proxy.lose_reply(of) if what == "reply" else proxy.lose_request(of)
        with suppress(StoreUnavailable):
            ledger.copy(RUN, there)
        assert lost.wait()
        assert [goes_on_in(here), goes_on_in(database)].count(True) <= 1
        ledger.copy(RUN, there)
    assert [goes_on_in(here), goes_on_in(database)] == [False, True]
    assert standing(database)[0] == before


@pytest.mark.parametrize("of", [is_any, is_commit])
@pytest.mark.parametrize("what", ["reply", "request"])
def test_what_a_network_loses_on_the_way_back_makes_no_two_of_it(
    tmp_path: Path, database: str, proxy: Proxy, what: str, of: Callable[[str], bool]
) -> None:
    first, here, name = (
        tmp_path / "first.db",
        tmp_path / "here.db",
        str(psycopg.conninfo.conninfo_to_dict(database)["dbname"]),
    )
    before = begin(first)
    with AgentRunLedger(first) as ledger:
        ledger.copy(RUN, database)
    with AgentRunLedger(PostgresStore(proxy.dsn(name), outage_seconds=20.0)) as ledger:
        lost = proxy.lose_reply(of) if what == "reply" else proxy.lose_request(of)
        with suppress(StoreUnavailable, RunOwned):
            ledger.copy(RUN, here)
        assert [goes_on_in(here), goes_on_in(database)].count(True) <= 1
        ledger.copy(RUN, here)
        if of is is_any:
            assert lost.wait()
    assert [goes_on_in(here), goes_on_in(database)] == [True, False]
    assert standing(here)[0] == before
