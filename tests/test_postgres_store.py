"""The store on PostgreSQL: the conformance suite, and what only a server can do to a ledger."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper

from agent_run_ledger.contract import Append, QueueTerms, Store
from agent_run_ledger.errors import LeaseLost, RunOwned, StoreError, StoreReadOnly
from agent_run_ledger.stores.postgres import PostgresStore, queues
from agent_run_ledger.stores.postgres.connections import MOST_CONNECTIONS, place_of
from agent_run_ledger.stores.postgres.link import Link, timed
from agent_run_ledger.stores.postgres.reading import last_written
from agent_run_ledger.testing import StoreContract, a_row
from agent_run_ledger.testing.stores.words import (
    LISTING,
    SECRET,
    claim_due,
    create,
    enqueue,
    head_of,
    in_threads,
    note_of,
    refuses,
)
from support.clocks import DatabaseClock, ledger_with_a_clock
from support.daemons import wait_until
from support.databases import Databases, databases
from support.pgbouncer import PgBouncer
from support.postgres import Server
from support.processes import environment


@pytest.fixture
def dsn() -> Iterator[str]:
    with databases().fresh(ledger_with_a_clock) as dsn:
        yield dsn


@pytest.fixture
def clock(dsn: str) -> Iterator[DatabaseClock]:
    with DatabaseClock(dsn) as clock:
        yield clock


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def store(self, dsn: str, clock: DatabaseClock) -> Iterator[Store]:
        store = PostgresStore(dsn, outage_seconds=5.0, _now=DatabaseClock.SQL)
        yield store
        store.close()


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    with Server() as server, PgBouncer(server.start()) as pooler:
        yield pooler


@pytest.fixture(scope="module")
def made(pooler: PgBouncer) -> Iterator[Databases]:
    made = Databases(pooler.server.dsn())
    yield made
    made.close()


@pytest.mark.system("pgbouncer")
class TestPostgresStoreBehindPgBouncer(StoreContract):
    """In transaction mode: each statement may be done by another session than the last."""

    @pytest.fixture
    def dsn(self, made: Databases) -> Iterator[str]:
        with made.fresh(ledger_with_a_clock) as dsn:
            yield dsn

    @pytest.fixture
    def store(self, pooler: PgBouncer, dsn: str, clock: DatabaseClock) -> Iterator[Store]:
        store = PostgresStore(pooler.dsn(urlsplit(dsn).path[1:]), outage_seconds=5.0, _now=DatabaseClock.SQL)
        yield store
        store.close()


# --- what only two connections can show -------------------------------------------------------------------------------


@pytest.fixture
def store(dsn: str) -> Iterator[PostgresStore]:
    store = PostgresStore(dsn, outage_seconds=20.0, _now=DatabaseClock.SQL)
    yield store
    store.close()


def waiting(connection: psycopg.Connection) -> int:
    """How many sessions of this database wait for a lock."""
    ((count,),) = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ).fetchall()
    return int(count)


def held_open(store: PostgresStore, connection: psycopg.Connection, act: Callable[[PostgresStore], object]) -> None:
    """Do what `act` does with a store in a transaction of this connection, which stays open."""
    link = as_link(connection)
    link.execute("SELECT 1")  # so that what opens a transaction opens none of its own
    idle, store._links._idle = store._links._idle, [link]
    try:
        act(store)
    finally:
        store._links._idle = idle


def as_link(connection: psycopg.Connection) -> Any:
    for dumper in (Int8Dumper, Int8BinaryDumper):
        connection.adapters.register_dumper(int, dumper)
    return connection


def in_a_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that does this, and a list that will hold what it returned or raised."""
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("together", [False, True])
def test_a_claim_waits_for_an_append_that_is_under_way_and_its_owner_reads_it(
    together: bool, store: PostgresStore, dsn: str, clock: DatabaseClock
) -> None:
    old = create(store, "r", lease_seconds=10.0)
    clock.advance(11.0)
    rows = [a_row(2), a_row(3)] if together else [a_row(2)]
    with Link.connect(dsn) as writing, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(store, writing, lambda s: s.append("r", old.token, 0, rows, synced=True))
        thread, outcome = in_a_thread(lambda: (store.claim("r", "b", 30.0), store.read("r")))
        wait_until(lambda: waiting(looking) == 1, "the claim to wait")
        writing.commit()
        thread.join(60)
    ((lease, read),) = outcome
    assert lease.token > old.token
    assert [row.seq for row in read] == [1, *(row.seq for row in rows)]


def test_appends_go_on_when_a_session_has_lost_its_statements(store: PostgresStore) -> None:
    token = create(store, "r").token
    for seq in range(2, 10):
        if seq == 6:
            for link in store._links._idle:
                link.execute("DEALLOCATE ALL")
        assert store.append("r", token, 0, [a_row(seq)], synced=True)
    assert [row.seq for row in store.read("r")] == list(range(1, 10))


def test_only_who_wrote_the_entry_before_in_this_session_appends_without_looking(
    store: PostgresStore, dsn: str
) -> None:
    token = create(store, "r").token
    assert store.append("r", token, 0, [a_row(2)], synced=True)
    with pytest.raises(StoreError, match="follows its run's last one"):
        store.append("r", token, 0, [a_row(4)], synced=True)
    assert store.append("r", token, 0, [a_row(3)], synced=True)
    with psycopg.connect(dsn) as restoring:  # a standby that had less is the primary now
        restoring.execute("ALTER TABLE entries DISABLE TRIGGER USER")
        restoring.execute("DELETE FROM entries WHERE seq > 1")
    store._links._drop_idle()
    with pytest.raises(StoreError, match="follows its run's last one"):
        store.append("r", token, 0, [a_row(4)], synced=True)


@pytest.mark.parametrize("together", [False, True])
def test_an_append_waits_for_a_claim_that_is_under_way_and_is_refused(
    together: bool, store: PostgresStore, dsn: str, clock: DatabaseClock
) -> None:
    old = create(store, "r", lease_seconds=10.0)
    clock.advance(11.0)
    rows = [a_row(2), a_row(3)] if together else [a_row(2)]
    with Link.connect(dsn) as claiming, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(PostgresStore(dsn, _now=DatabaseClock.SQL), claiming, lambda s: s.claim("r", "b", 30.0))
        thread, outcome = in_a_thread(lambda: store.append("r", old.token, 0, rows, synced=True))
        wait_until(lambda: waiting(looking) == 1, "the append to wait")
        claiming.commit()
        thread.join(60)
    assert isinstance(outcome[0], LeaseLost)
    assert len(store.read("r")) == 1


def test_a_post_waits_for_an_append_that_is_under_way_and_the_next_append_sees_it(
    store: PostgresStore, dsn: str
) -> None:
    token = create(store, "r").token
    with Link.connect(dsn) as writing, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(store, writing, lambda s: s.append("r", token, 0, [a_row(2)], synced=True))
        thread, outcome = in_a_thread(lambda: store.post("r", "cancel", b"", "operator", 1.0))
        wait_until(lambda: waiting(looking) == 1, "the request to wait")
        writing.commit()
        thread.join(60)
    assert outcome == [1]
    assert store.append("r", token, 0, [a_row(3)], synced=True) is False


def test_an_append_waits_for_a_renewal_and_is_written(store: PostgresStore, dsn: str) -> None:
    token = create(store, "r").token
    with Link.connect(dsn) as renewing, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(store, renewing, lambda s: s.renew("r", token, 30.0))
        thread, outcome = in_a_thread(lambda: store.append("r", token, 0, [a_row(2)], synced=True))
        wait_until(lambda: waiting(looking) == 1, "the append to wait")
        renewing.commit()
        thread.join(60)
    assert outcome == [True]


def test_of_the_same_rows_that_come_twice_at_once_one_is_written_and_both_are_answered(
    store: PostgresStore, dsn: str
) -> None:
    """As after a cut: the server is still at work for the first, when it comes again."""
    token = create(store, "r").token
    with Link.connect(dsn) as writing, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(store, writing, lambda s: s.append("r", token, 0, [a_row(2)], synced=True))
        thread, outcome = in_a_thread(lambda: store.append("r", token, 0, [a_row(2)], synced=True))
        wait_until(lambda: waiting(looking) == 1, "the second to wait")
        writing.commit()
        thread.join(60)
    assert outcome == [True]
    assert len(store.read("r")) == 2


def test_what_breaks_a_rule_of_the_schema_fails_nothing_that_comes_with_it(store: PostgresStore) -> None:
    tokens = [create(store, f"r{number}").token for number in range(3)]
    bad: Any = a_row(2)._replace(body=None)
    answers = store.append_all(
        [
            Append("r0", tokens[0], 0, [a_row(2)]),
            Append("r1", tokens[1], 0, [bad]),
            Append("r2", tokens[2], 0, [a_row(2), a_row(3)]),
        ],
        synced=True,
    )
    assert (answers[0], answers[2]) == (True, True)
    assert isinstance(answers[1], StoreError)
    assert [len(store.read(f"r{number}")) for number in range(3)] == [2, 1, 3]
    assert refuses(StoreError, lambda: store.append("r1", tokens[1], 0, [bad], synced=True)).args == answers[1].args


def test_a_claim_of_what_is_due_waits_for_nobody(store: PostgresStore, dsn: str) -> None:
    for number in range(3):
        enqueue(store, f"r{number}", priority=-number)
    with Link.connect(dsn) as claiming:
        held_open(
            PostgresStore(dsn, _now=DatabaseClock.SQL),
            claiming,
            lambda s: s.claim_due("a", 30.0, [QueueTerms("q")], ["agent"], 2),
        )
        assert [lease.run_id for lease in claim_due(store, at_most=9)] == ["r2"]
        assert store.next_due(["q"], ["agent"]) == 0.0
        claiming.rollback()
    assert sorted(lease.run_id for lease in claim_due(store, at_most=9)) == ["r0", "r1"]


def test_workers_of_two_stores_pass_no_limit_together(store: PostgresStore, dsn: str) -> None:
    """Who counts waits for who claims: a claim that is under way is counted."""
    for number in range(6):
        enqueue(store, f"r{number}")
    terms = [QueueTerms("q", concurrency=4)]
    assert len(store.claim_due("x", 30.0, terms, ["agent"], 1)) == 1
    with Link.connect(dsn) as claiming, psycopg.connect(dsn, autocommit=True) as looking:
        held_open(
            PostgresStore(dsn, _now=DatabaseClock.SQL),
            claiming,
            lambda s: s.claim_due("a", 30.0, terms, ["agent"], 2),
        )
        thread, outcome = in_a_thread(lambda: store.claim_due("b", 30.0, terms, ["agent"], 9))
        wait_until(lambda: waiting(looking) == 1, "the second claim to wait")
        claiming.commit()
        thread.join(60)
    (leases,) = outcome
    assert isinstance(leases, list)
    assert len(leases) == 1


# --- what waits for the disk ------------------------------------------------------------------------------------------

DISK: dict[str, tuple[str, Callable[[PostgresStore], object]]] = {
    "create": ("on", lambda s: create(s, "new")),
    "enqueue": ("on", lambda s: enqueue(s, "new")),
    "adopt": ("on", lambda s: s.adopt("new", 1, SECRET, LISTING, [[a_row(1)]], [], None)),
    "claim": ("on", lambda s: s.claim("free", "b", 30.0)),
    "claim due": ("on", lambda s: claim_due(s)),
    "claim within limits": ("on", lambda s: claim_due(s, QueueTerms("q", 1, 1))),
    "move away": ("on", lambda s: s.move_away("r", 1, "elsewhere")),
    "post": ("on", lambda s: s.post("r", "signal", b"", "who", 1.0)),
    "append": ("on", lambda s: s.append("r", 1, 0, [a_row(2)], synced=True)),
    "append several": ("on", lambda s: s.append("r", 1, 0, [a_row(2), a_row(3)], synced=True)),
    "append unsynced": ("off", lambda s: s.append("r", 1, 0, [a_row(2)], synced=False)),
    "append several unsynced": ("off", lambda s: s.append("r", 1, 0, [a_row(2), a_row(3)], synced=False)),
    "renew": ("off", lambda s: s.renew("r", 1, 30.0)),
    "release": ("off", lambda s: s.release("r", 1)),
    "beat": ("off", lambda s: s.beat("worker", b"")),
}


@pytest.mark.parametrize("verb", DISK)
def test_each_transaction_says_for_itself_whether_it_waits_for_the_disk(
    verb: str, store: PostgresStore, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was set before, for the session or for the database."""
    monkeypatch.setattr(
        store._bell, "ring_elsewhere", lambda _: None
    )  # it would ring in the same transaction, and not after it
    create(store, "r")
    store.release("free", create(store, "free").token)
    enqueue(store, "due")
    expected, act = DISK[verb]
    with Link.connect(dsn) as connection:
        connection.execute("SELECT set_config('synchronous_commit', 'local', true)")
        held_open(store, connection, act)
        assert connection.execute("SHOW synchronous_commit").fetchone() == (expected,)
        connection.rollback()


def test_what_stands_there_already_is_on_the_disk_when_it_is_answered_for() -> None:
    """Whoever wrote it first need not have waited."""
    with Server(settings={"wal_writer_delay": "10s"}) as server:
        ledger_with_a_clock(server.start().dsn())
        store = PostgresStore(server.dsn())
        token = create(store, "r").token
        with server.connect() as connection:
            for rows in ([a_row(2)], [a_row(3), a_row(4)]):
                assert store.append("r", token, 0, rows, synced=False)
                ((written,),) = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchall()
                is_flushed = b"SELECT pg_current_wal_flush_lsn() >= %s"
                assert store.append("r", token, 0, rows, synced=True)
                assert connection.execute(is_flushed, [written]).fetchone() == (True,)
        store.close()


# --- the database's clock ---------------------------------------------------------------------------------------------


def test_two_stores_that_share_an_owners_name_are_two_owners(store: PostgresStore, dsn: str) -> None:
    lease = create(store, "r", owner="same")
    other = PostgresStore(dsn, _now=DatabaseClock.SQL)
    refuses(RunOwned, lambda: other.claim("r", "same", 30.0))
    assert store.claim("r", "same", 30.0) == lease
    other.close()
    assert store.append("r", lease.token, 0, [a_row(2)], synced=True)


def test_a_store_that_is_closed_gives_back_what_it_took(dsn: str) -> None:
    first, second = (PostgresStore(dsn, _now=DatabaseClock.SQL) for _ in range(2))
    create(first, "made")
    create(second, "claimed")
    second.close()
    first.claim("claimed", "b", 30.0)
    enqueue(first, "due")
    claim_due(first)
    third = PostgresStore(dsn, _now=DatabaseClock.SQL)
    create(third, "third")
    first.close()
    owners = {summary.head.run_id: summary.head.owner for summary in third.summaries()}
    assert owners == {"made": None, "claimed": None, "due": None, "third": "a"}
    third.close()


def test_without_a_clock_of_a_test_leases_are_measured_by_the_databases(dsn: str) -> None:
    store = PostgresStore(dsn)
    create(store, "r", lease_seconds=1000.0)
    head = head_of(store)
    assert head.lease_left is not None
    assert 0.0 < head.lease_left <= 1000.0
    refuses(RunOwned, lambda: store.claim("r", "b", 30.0))
    create(store, "over", lease_seconds=-1.0)
    assert store.claim("over", "b", 30.0).owner == "b"
    store.close()


def test_a_new_epoch_begins_above_every_token_of_the_old_ones(store: PostgresStore, dsn: str) -> None:
    for run_id in ("r", "s"):
        store.release(run_id, create(store, run_id).token)
    enqueue(store, "old")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE meta SET value = 7 WHERE key = 'epoch'")
    first = 7 * 2**20 + 1
    assert store.first_token() == first == create(store, "new").token
    assert [lease.token for lease in claim_due(store)] == [first]
    assert store.claim("r", "a", 30.0).token == first
    enqueue(store, "queued")
    assert head_of(store, "queued").token == first - 1
    assert [lease.token for lease in claim_due(store, QueueTerms("q", 9))] == [first]


# --- forks and interrupts ---------------------------------------------------------------------------------------------


def test_a_forked_child_has_connections_and_owners_of_its_own(dsn: str) -> None:
    """Nothing of the parent's is used or closed by it, and it cannot write to its runs."""
    program = f"""
import os
from agent_run_ledger.contract import Append
from agent_run_ledger.errors import LeaseLost
from agent_run_ledger.stores.postgres import PostgresStore
from agent_run_ledger.testing import a_row
from agent_run_ledger.testing.stores.words import create

store = PostgresStore({dsn!r})
lease = create(store, "parents")
session = store._links._idle[0].info.backend_pid
child = os.fork()
if child == 0:
    try:
        store.append("parents", lease.token, 0, [a_row(2, "child")], synced=True)
        os._exit(1)
    except LeaseLost:
        pass
    if str(store.append_all([Append("parents", lease.token, 0, [a_row(2)])] * 2, synced=True)[0]) == "True":
        os._exit(2)
    own = create(store, "childs")
    if not store.append("childs", own.token, 0, [a_row(2)], synced=True) or own.owner == lease.owner:
        os._exit(3)
    store.release("parents", lease.token)
    store.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert store._links._idle[0].info.backend_pid == session
assert store.append("parents", lease.token, 0, [a_row(2)], synced=True)
assert store._links._idle[0].info.backend_pid == session
assert store.head("childs").owner is None
print("done")
"""
    run = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


def test_an_interrupt_in_the_middle_of_a_statement_costs_the_connection_and_nothing_else(
    store: PostgresStore, dsn: str
) -> None:
    token = create(store, "r").token
    with psycopg.connect(dsn) as holding, psycopg.connect(dsn, autocommit=True) as looking:
        holding.execute("SELECT 1 FROM runs WHERE run_id = 'r' FOR UPDATE")

        def interrupt() -> None:
            wait_until(lambda: waiting(looking) == 1, "the append to wait")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            store.append("r", token, 0, [a_row(2, "interrupted")], synced=True)
        thread.join()
        wait_until(lambda: waiting(looking) == 0, "the statement to be cancelled")
        assert store._links._idle == []
        holding.rollback()
    assert len(store.read("r")) == 1
    assert store.append("r", token, 0, [a_row(2)], synced=True)
    assert len(store._links._open) == 1


def test_more_threads_than_connections_wait_for_one_another(store: PostgresStore) -> None:
    tokens = [create(store, f"r{number}").token for number in range(3 * MOST_CONNECTIONS)]

    def work(number: int) -> None:
        for seq in range(2, 12):
            assert store.append(f"r{number}", tokens[number], 0, [a_row(seq)], synced=False)

    in_threads([partial(work, number) for number in range(len(tokens))])
    assert len(store._links._open) <= MOST_CONNECTIONS
    assert all(len(store.read(f"r{number}")) == 11 for number in range(len(tokens)))


# --- the bell ---------------------------------------------------------------------------------------------------------


def settle(store: PostgresStore) -> None:
    while store.wait_for_work(0.02):
        pass


def settle_and_wait(store: PostgresStore, is_still: threading.Event) -> bool:
    settle(store)
    is_still.set()
    return store.wait_for_work(60.0)


@pytest.mark.unpooled
def test_who_waits_hears_of_what_another_process_makes_due(store: PostgresStore, dsn: str) -> None:
    other = PostgresStore(dsn, _now=DatabaseClock.SQL)
    settle(store)
    for act in (
        lambda: enqueue(other, "r"),
        lambda: other.post("r", "signal", b"", "somebody", 1.0),
        lambda: other.release("r", claim_due(other)[0].token, due_in=5.0),
    ):
        is_still = threading.Event()
        thread, outcome = in_a_thread(partial(settle_and_wait, store, is_still))
        assert is_still.wait(60)
        act()
        thread.join(60)
        assert outcome == [True]
    settle(store)
    enqueue(other, "while nobody waits")
    assert store.wait_for_work(60.0)
    other.close()


@pytest.mark.unpooled
def test_what_comes_before_there_is_a_line_is_heard_of(store: PostgresStore, dsn: str) -> None:
    other = PostgresStore(dsn, _now=DatabaseClock.SQL)
    assert store.wait_for_work(0.0)
    enqueue(other, "r")
    assert store.wait_for_work(60.0)
    other.close()


@pytest.mark.unpooled
def test_a_line_that_is_cut_is_laid_again_and_nothing_that_was_missed_is_slept_through(
    store: PostgresStore, dsn: str
) -> None:
    settle(store)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            " OR query LIKE '%coalesce(current_schema()%' AND pid <> pg_backend_pid()"
        )
    assert store.wait_for_work(60.0)
    other = PostgresStore(dsn, _now=DatabaseClock.SQL)
    wait_until(lambda: not store.wait_for_work(0.02) and store._bell._line is not None, "another line")
    enqueue(other, "r")
    assert store.wait_for_work(60.0)
    other.close()


# --- what a claim costs -----------------------------------------------------------------------------------------------


def pages_of_a_claim(connection: psycopg.Connection) -> int:
    """How many pages the server looks at to find one run that is due, rolled back."""
    statement = timed(queues._CLAIM_DUE, DatabaseClock.SQL)
    values = (["q"], ["agent", "other"], 1, 1, 1, "w", 30.0, 30.0, "call", "off")
    with connection.transaction(force_rollback=True):
        ((plan,),) = connection.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, values).fetchall()
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


def test_a_claim_looks_at_no_more_of_a_long_queue_than_of_a_short_one(store: PostgresStore, dsn: str) -> None:
    """Nor of runs that are due later, whatever their priority, nor of agents that are not asked for."""
    fill = """
        INSERT INTO runs (run_id, fencing_token, created_at, agent, queue, priority, due)
        SELECT %s || i, 0, 1.5, %s, 'q', %s, %s + i * 1e-6 FROM generate_series(1, 20000) i
    """
    enqueue(store, "r")
    with psycopg.connect(dsn, autocommit=True) as connection:
        as_link(connection)
        short = pages_of_a_claim(connection)
        for run_id, agent, priority, due in (
            ("due", "agent", 0, 1.0),
            ("later", "agent", 7, 1e9),
            ("others", "not asked for", 9, 1.0),
        ):
            connection.execute(fill, (run_id, agent, priority, due))
            connection.execute("ANALYZE runs")
            assert pages_of_a_claim(connection) <= short + 30
    assert len(claim_due(store, at_most=9)) == 9
    assert store.next_due(["q"], ["agent"]) == 0.0


def test_a_renewal_leaves_every_index_alone(store: PostgresStore, dsn: str) -> None:
    enqueue(store, "r")
    (lease,) = claim_due(store)
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'runs'"
    with Link.connect(dsn) as connection:
        ((updates, within_the_page),) = connection.execute(
            counts
        ).fetchall()  # a pooler's session may have more to tell
        for _ in range(5):
            held_open(store, connection, lambda s: s.renew("r", lease.token, 30.0))
        assert connection.execute(counts).fetchall() == [(updates + 5, within_the_page + 5)]


# --- text, and readers ------------------------------------------------------------------------------------------------


def test_a_note_is_kept_as_well_as_the_database_can(store: PostgresStore) -> None:
    token = create(store, "r").token
    store.annotate("r", token, "at $.a\0b\ud800 ä")
    assert note_of(store) == "at $.a\ufffdb? ä"


def test_what_no_text_can_hold_is_refused_and_nothing_is_written(store: PostgresStore) -> None:
    token = create(store, "r").token
    for bad in ("nul\0", "surrogate\ud800"):
        for call in (
            partial(store.append, "r", token, 0, [a_row(2)._replace(position=bad)], synced=True),
            partial(store.append, "r", token, 0, [a_row(2), a_row(3)._replace(kind=bad)], synced=True),
            partial(store.create, bad, "a", 30.0, SECRET, [a_row(1)], LISTING),
            partial(store.post, "r", "signal", b"", bad, 1.0),
            partial(store.claim, "r", bad, 30.0),
        ):
            error = refuses(StoreError, call)
            assert "nothing was" in str(error)
    assert len(store.read("r")) == 1
    assert store.append("r", token, 0, [a_row(2)], synced=True)


def test_who_only_reads_writes_nothing(store: PostgresStore, dsn: str) -> None:
    token = create(store, "r").token
    reader = PostgresStore(dsn, read_only=True, _now=DatabaseClock.SQL)
    assert reader.read("r") == store.read("r")
    assert [summary.head for summary in reader.summaries()] == [store.head("r")]
    for call in (
        lambda: reader.append("r", token, 0, [a_row(2)], synced=True),
        lambda: create(reader, "s"),
        lambda: reader.claim("r", "b", 30.0),
        lambda: reader.post("r", "cancel", b"", "operator", 1.0),
        lambda: enqueue(reader, "s"),
        lambda: claim_due(reader),
        lambda: reader.release("r", token),
    ):
        refuses(StoreReadOnly, call)
    reader.close()
    assert head_of(store).owner == "a"


def test_the_place_is_told_without_the_password() -> None:
    assert place_of("postgresql://ann:secret@db.example:5433,other/ledger?sslmode=require") == (
        "postgresql://ann@db.example:5433,other/ledger"
    )
    error = refuses(StoreError, lambda: place_of("postgresql://ann:secret@[nonsense"))
    assert "secret" not in str(error)


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_synced_is_in_the_servers_log_on_its_disk(dsn: str, read_only: bool) -> None:
    with closing(PostgresStore(dsn)) as store, closing(PostgresStore(dsn, read_only=read_only)) as syncing:
        lease = create(store, "r")
        with psycopg.connect(dsn, autocommit=True) as connection:
            for seq in range(2, 12):
                assert store.append("r", lease.token, 0, [a_row(seq)], synced=False)
                (end,) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone() or (None,)
                syncing.sync("r")
                (flushed,) = connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone() or (
                    None,
                )
                assert flushed >= last_written(int(end), 8192, 16 * 1024 * 1024)


def test_a_log_that_ends_with_a_page_is_flushed_at_the_end_of_that_page() -> None:
    segment = 16 * 1024 * 1024
    assert last_written(8192 + 24, 8192, segment) == 8192
    assert last_written(8192 + 32, 8192, segment) == 8192 + 32
    assert last_written(8192 + 40, 8192, segment) == 8192 + 40
    assert last_written(segment + 40, 8192, segment) == segment
    assert last_written(segment + 24, 8192, segment) == segment + 24
