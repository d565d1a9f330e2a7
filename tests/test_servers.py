"""The servers, databases and networks that tests make: where they could lie, they are put to the test themselves."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from support.daemons import standing_in, wait_until
from support.databases import Databases, databases
from support.pair import Pair
from support.postgres import Server
from support.processes import child
from support.proxy import Proxy, is_any


def make_table(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE numbers (number integer PRIMARY KEY)")


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
        if is_stopped:
            for pid in members:
                signal.pidfd_send_signal(open_pid(pid), signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not standing_in(home), "the server to end")
