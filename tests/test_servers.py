"""The servers, databases and networks that tests make: where they could lie, they are put to the test themselves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from support import proxy
from support.daemons import standing_in, wait_until
from support.databases import Databases, databases
from support.pair import Pair
from support.postgres import Server
from support.processes import child


def make_table(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE numbers (number integer PRIMARY KEY)")
        connection.execute("CREATE VIEW doubled AS SELECT 2 * number AS number FROM numbers")
        connection.execute("CREATE FUNCTION one() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
        kept = "BEFORE UPDATE ON numbers FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()"
        connection.execute(f"CREATE TRIGGER kept {kept}")


def numbers(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY number")]


# --- databases --------------------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    """A database with an empty table of numbers."""
    with databases().fresh(make_table) as made:
        yield made


@pytest.mark.parametrize("number", [1, 2])
def test_no_database_has_anything_of_another_test(url: str, number: int) -> None:
    assert numbers(url) == []
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")


def test_a_database_is_used_again_under_another_name_and_only_where_its_schema_is_as_it_was(url: str) -> None:
    def kept_by(statement: str) -> bool:
        """Whether the database that the statement was done in is handed out again."""
        place = psycopg.conninfo.conninfo_to_dict
        names, oids = [], []
        for _ in range(3):
            with made.fresh(make_table) as lent, psycopg.connect(lent, autocommit=True) as connection:
                assert numbers(lent) == []
                names.append(place(lent)["dbname"])
                oids.append(
                    connection.execute("SELECT oid FROM pg_database WHERE datname = %s", [names[-1]]).fetchone()
                )
                connection.execute("INSERT INTO numbers VALUES (1)")
                if len(names) == 1:
                    connection.execute(statement)
        assert len(set(names)) == 3
        return oids[0] == oids[2]

    with contextlib.closing(Databases(url)) as made:
        assert kept_by("UPDATE numbers SET number = 2")
        assert kept_by("TRUNCATE numbers")
        for statement in (
            "ALTER TABLE numbers ADD COLUMN more integer",
            "ALTER TABLE numbers ALTER COLUMN number SET DEFAULT 7",
            "CREATE OR REPLACE VIEW doubled AS SELECT 3 AS number",
            "CREATE OR REPLACE FUNCTION one() RETURNS integer LANGUAGE sql AS 'SELECT 2'",
            "ALTER TABLE numbers DISABLE TRIGGER ALL",
            "DROP TRIGGER kept ON numbers",
            "CREATE INDEX ON numbers (number)",
            "GRANT SELECT ON numbers TO PUBLIC",
            "CREATE SCHEMA other",
        ):
            assert not kept_by(statement), statement


def test_a_client_that_a_test_leaves_behind_is_gone_with_its_database(url: str) -> None:
    made = Databases(url)
    with made.fresh(make_table) as left:
        connection = psycopg.connect(left)
    made.close()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
    with psycopg.connect(url) as looking:
        names = looking.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", [f"{made.prefix}%"]).fetchall()
    assert names == []


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        yield started.start()


def test_a_server_that_was_killed_has_all_that_it_answered_for(server: Server) -> None:
    make_table(server.dsn())
    open_connection = psycopg.connect(server.dsn(), autocommit=True)
    for number in range(100):
        open_connection.execute("INSERT INTO numbers VALUES (%s)", [number])
    server.kill()
    assert standing_in(server.data) == []
    with pytest.raises(psycopg.OperationalError):
        open_connection.execute("SELECT 1")
    open_connection.close()
    server.start()
    assert numbers(server.dsn()) == list(range(100))


def test_terminated_backends_are_those_of_the_one_database(server: Server) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE other")
    here, there = psycopg.connect(server.dsn(), autocommit=True), psycopg.connect(server.dsn("other"), autocommit=True)
    assert server.terminate_backends("other") == 1
    with pytest.raises(psycopg.OperationalError):
        there.execute("SELECT 1")
    here.execute("SELECT 1")
    here.close()
    there.close()


HAS_A_SERVER = """
from support.postgres import Server
server = Server().start()
tell(str(server.home.path))
hear()
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at work", "stopped"])
def test_a_server_goes_with_a_test_process_that_is_killed(is_stopped: bool) -> None:
    with child(HAS_A_SERVER) as process:
        home = process.hear()
        members = standing_in(home)
        assert members
        for pid in members if is_stopped else ():
            os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not os.path.exists(home), "the server to end")
    assert standing_in(home) == []


# --- two servers ------------------------------------------------------------------------------------------------------


def test_a_standby_that_is_promoted_has_all_that_its_primary_answered_for() -> None:
    with Pair() as pair:
        make_table(pair.dsn())
        connection = psycopg.connect(pair.dsn(), autocommit=True)
        for number in range(100):
            connection.execute("INSERT INTO numbers VALUES (%s)", [number])
        pair.primary.kill()
        connection.close()
        pair.promote()
        assert numbers(pair.dsn()) == list(range(100))


def test_a_primary_answers_no_commit_that_its_standby_does_not_have() -> None:
    with Pair() as pair, pair.primary.connect() as looking, psycopg.connect(pair.dsn(), autocommit=True) as connection:
        make_table(pair.dsn())
        pair.standby.kill()
        writing = threading.Thread(target=connection.execute, args=["INSERT INTO numbers VALUES (1)"])
        writing.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: looking.execute(waits).fetchone(), "a COMMIT to wait for the standby")
        pair.standby.start()
        writing.join()
        assert numbers(pair.standby.dsn()) == [1]


# --- a network that fails ---------------------------------------------------------------------------------------------

INSERT = "INSERT INTO numbers VALUES (%s)"


def alone(connection: psycopg.Connection) -> None:
    connection.execute("INSERT INTO numbers VALUES (1)", prepare=False)


def with_parameters(connection: psycopg.Connection) -> None:
    connection.execute(INSERT, [1], prepare=False)


def prepared(connection: psycopg.Connection) -> None:
    connection.execute(INSERT, [1], prepare=True)


def in_a_pipeline(connection: psycopg.Connection) -> None:
    with connection.pipeline():
        connection.execute("SELECT 1")
        connection.execute(INSERT, [1])


def in_a_transaction(connection: psycopg.Connection) -> None:
    with connection.transaction():
        connection.execute(INSERT, [1])


WAYS = {
    alone: proxy.is_any,
    with_parameters: proxy.is_any,
    prepared: proxy.is_any,
    in_a_pipeline: lambda statement: statement.startswith("INSERT"),
    in_a_transaction: proxy.is_commit,
}
Write = Callable[[psycopg.Connection], None]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with Server(tcp=True) as started:
        make_table(started.start().dsn())
        yield started


@pytest.fixture
def network(upstream: Server) -> Iterator[proxy.Proxy]:
    with psycopg.connect(upstream.dsn()) as connection:
        connection.execute("DELETE FROM numbers")
    with proxy.Proxy(upstream.address) as opened:
        yield opened


@pytest.mark.parametrize("write", WAYS)
def test_where_the_reply_is_lost_it_is_done_and_the_client_is_told_that_nothing_is_known(
    write: Write, upstream: Server, network: proxy.Proxy
) -> None:
    connection = psycopg.connect(network.dsn(), autocommit=True)
    loss = network.lose_reply(WAYS[write])
    with pytest.raises(psycopg.OperationalError):
        write(connection)
    assert loss.wait()
    assert numbers(upstream.dsn()) == [1]
    connection.close()


@pytest.mark.parametrize("write", WAYS)
def test_where_the_request_is_lost_nothing_is_done_and_the_client_is_told_the_same(
    write: Write, upstream: Server, network: proxy.Proxy
) -> None:
    connection = psycopg.connect(network.dsn(), autocommit=True)
    loss = network.lose_request(WAYS[write])
    with pytest.raises(psycopg.OperationalError):
        write(connection)
    assert loss.wait()
    assert numbers(upstream.dsn()) == []
    connection.close()


@pytest.mark.parametrize("lose", [proxy.Proxy.lose_reply, proxy.Proxy.lose_request])
def test_only_the_statement_that_is_meant_is_lost_and_only_once(
    lose: Callable[[proxy.Proxy, proxy.Matches], proxy.Loss], upstream: Server, network: proxy.Proxy
) -> None:
    first, second = (psycopg.connect(network.dsn(), autocommit=True) for _ in range(2))
    loss = lose(network, lambda statement: "lost" in statement)
    for connection in (first, second):
        assert connection.execute("SELECT 'kept'").fetchone() == ("kept",)
    assert loss.statement is None
    with pytest.raises(psycopg.OperationalError):
        first.execute("SELECT 'lost'")
    assert loss.statement == "SELECT 'lost'"
    assert second.execute("SELECT 'lost'").fetchone() == ("lost",)
    first.close()
    second.close()


def test_every_byte_arrives_as_it_was_sent(network: proxy.Proxy) -> None:
    sent = random.Random(1).randbytes(3_000_000)
    with psycopg.connect(network.dsn()) as connection:
        assert connection.execute("SELECT %b::bytea", [sent], binary=True).fetchone() == (sent,)
        with connection.cursor() as cursor, cursor.copy("COPY numbers FROM STDIN") as rows:
            for number in range(1000):
                rows.write_row([number])
        assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (1000,)


def test_a_cut_ends_every_connection_and_lets_new_ones_in(network: proxy.Proxy) -> None:
    connections = [psycopg.connect(network.dsn()) for _ in range(3)]
    assert network.cut() == 3
    for connection in connections:
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()
    with psycopg.connect(network.dsn()) as connection:
        connection.execute("SELECT 1")


def test_who_is_refused_is_told_at_once_and_those_who_are_in_stay(network: proxy.Proxy) -> None:
    with psycopg.connect(network.dsn()) as connection:
        network.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(network.dsn())
        connection.execute("SELECT 1")
        network.accept()
        psycopg.connect(network.dsn()).close()


def test_what_a_black_hole_takes_arrives_when_it_has_healed(upstream: Server, network: proxy.Proxy) -> None:
    with psycopg.connect(network.dsn(), autocommit=True) as connection:
        network.black_hole()
        writing = threading.Thread(target=alone, args=[connection])
        writing.start()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(network.dsn(connect_timeout="2"))
        assert (writing.is_alive(), numbers(upstream.dsn())) == (True, [])
        network.heal()
        writing.join()
        assert numbers(upstream.dsn()) == [1]


def test_equal_chances_are_equal_troubles(upstream: Server) -> None:
    def told(seed: int) -> list[str]:
        chance = random.Random(seed)
        with proxy.Proxy(upstream.address) as network:
            troubles = []
            for _ in range(20):
                troubles.append(network.trouble(chance))
                network.heal()
            psycopg.connect(network.dsn()).close()
        return troubles

    assert told(1) == told(1) != told(2)
    assert len(set(told(1))) > 3
