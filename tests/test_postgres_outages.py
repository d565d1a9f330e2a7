"""The way to the database fails, or the database does: what was asked is done once, or is said not to be known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from agent_run_ledger.contract import Append, Listing, QueueTerms, Request, Store
from agent_run_ledger.errors import LeaseLost, LedgerError, StoreBusy, StoreReadOnly, StoreUnavailable
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.postgres import PostgresStore
from agent_run_ledger.testing import a_row
from agent_run_ledger.testing.stores.words import LISTING, SECRET, create, enqueue, head_of
from support.clocks import DatabaseClock, ledger_with_a_clock
from support.daemons import wait_until
from support.databases import databases
from support.postgres import Address, Server
from support.proxy import Proxy, is_any, is_commit

Q = Listing(1.5, "agent", "q")


@pytest.fixture
def dsn() -> Iterator[str]:
    with databases().fresh(ledger_with_a_clock) as dsn:
        yield dsn


@pytest.fixture
def clock(dsn: str) -> Iterator[DatabaseClock]:
    with DatabaseClock(dsn) as clock:
        yield clock


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    told = psycopg.conninfo.conninfo_to_dict(dsn)
    with Proxy(Address(str(told["host"]), int(told["port"] or 5432))) as proxy:
        yield proxy


@pytest.fixture
def store(dsn: str, proxy: Proxy) -> Iterator[PostgresStore]:
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    store = PostgresStore(proxy.dsn(name), outage_seconds=20.0, _now=DatabaseClock.SQL)
    yield store
    store.close()


def answer(call: Callable[[], object]) -> object:
    try:
        return call()
    except LedgerError as error:
        return str(error)


# --- an answer, or a request, that is lost ----------------------------------------------------------------------------

WRITES: dict[str, Callable[[Store], object]] = {
    "create": lambda s: s.create("new", "a", 30.0, SECRET, [a_row(1), a_row(2, payload=b"x" * 100_000)], LISTING),
    "create what exists": lambda s: s.create("plain", "b", 30.0, b"o" * 32, [a_row(1)], LISTING),
    "create in a queue": lambda s: s.create("new", "a", 30.0, SECRET, [a_row(1)], Q),
    "enqueue": lambda s: s.enqueue("new", SECRET, [a_row(1)], Q, 5.0),
    "enqueue what exists": lambda s: s.enqueue("queued", b"o" * 32, [a_row(1)], Q, 5.0),
    "claim": lambda s: s.claim("free", "b", 30.0),
    "claim one's own": lambda s: s.claim("plain", "a", 30.0),
    "claim what is held": lambda s: s.claim("plain", "b", 30.0),
    "renew": lambda s: s.renew("plain", 1, 60.0),
    "renew with an old token": lambda s: s.renew("free", 1, 60.0),
    "release": lambda s: s.release("claimed", 1, due_in=3.0),
    "append": lambda s: s.append("plain", 1, 0, [a_row(2)], synced=True),
    "append what is refused": lambda s: s.append("plain", 1, 1, [a_row(2)], synced=True),
    "append several": lambda s: s.append("plain", 1, 0, [a_row(2, payload=b"x" * 100_000), a_row(3)], synced=False),
    "append behind a note": lambda s: s.append("noted", 1, 0, [a_row(2)], synced=True),
    "append together": lambda s: [
        str(each)
        for each in s.append_all(
            [
                Append("plain", 1, 0, [a_row(2)]),
                Append("noted", 1, 0, [a_row(2), a_row(3)]),
                Append("free", 1, 0, [a_row(2)]),
                Append("plain", 1, 0, [a_row(3)]),
            ],
            synced=True,
        )
    ],
    "annotate": lambda s: s.annotate("plain", 1, "a note"),
    "post": lambda s: s.post("plain", "signal", b"1", "who", 1.0),
    "post to a queue": lambda s: s.post("queued", "signal", b"1", "who", 1.0, due_in=1.0),
    "claim what is due": lambda s: s.claim_due("w", 30.0, [QueueTerms("q")], ["agent"], 2),
    "free the dead": lambda s: [s.free_dead()][1:],  # how many there were may be lost
    "move away": lambda s: s.move_away("plain", 1, "elsewhere"),
    "claim what was moved": lambda s: s.claim("moved", "b", 30.0),
    "post to what was moved": lambda s: s.post("moved", "signal", b"1", "who", 1.0),
    "beat": lambda s: s.beat("worker", b"said"),
    "leave": lambda s: s.leave("gone"),
}
TRANSACTIONS: dict[str, Callable[[Store], object]] = {
    "claim what is due, within limits": lambda s: s.claim_due("w", 30.0, [QueueTerms("q", 9, 1)], ["agent"], 2),
}


def prepare(store: Store, clock: DatabaseClock) -> None:
    """Runs in every state that a write could meet."""
    dead = store.create("dead", "d", 10.0, SECRET, [a_row(1)], Q)
    assert dead is not None
    clock.advance(11.0)
    create(store, "plain")
    create(store, "noted")
    store.annotate("noted", 1, "a note")
    free = create(store, "free")
    store.release("free", free.token)
    store.move_away("moved", create(store, "moved").token, "elsewhere")
    enqueue(store, "claimed")
    store.claim("claimed", "a", 30.0)
    for number in range(3):
        enqueue(store, "queued" if number == 1 else f"queued{number}", key="k" if number else None)
        clock.advance(1.0)
    store.beat("gone", b"")


def everything(store: Store) -> list[object]:
    """All that can be read of a store."""
    runs = [summary.head.run_id for summary in store.summaries()]
    told: list[object] = [store.head(run_id) for run_id in runs]
    told += [store.read(run_id) for run_id in runs]
    told += [store.inbox(run_id, 0) for run_id in runs]
    told += [store.secret(run_id) for run_id in runs]
    return [*told, list(store.check()), store.workers(), store.next_due(["q"], ["agent"])]


@pytest.mark.parametrize("what", ["reply", "request"])
@pytest.mark.parametrize("name", [*WRITES, *TRANSACTIONS])
def test_what_is_lost_on_its_way_is_done_once_and_answered(
    name: str, what: str, store: PostgresStore, proxy: Proxy, clock: DatabaseClock
) -> None:
    memory = MemoryStore(clock=clock)
    before = clock.elapsed()
    prepare(memory, clock)
    clock.advance(before - clock.elapsed())
    prepare(store, clock)
    write, of = (WRITES[name], is_any) if name in WRITES else (TRANSACTIONS[name], is_commit)
    lost = proxy.lose_reply(of) if what == "reply" else proxy.lose_request(of)
    given = answer(lambda: write(store))
    assert lost.wait()
    assert given == answer(lambda: write(memory)), lost.statement
    assert everything(store) == everything(memory)


@pytest.mark.parametrize("of", [is_any, is_commit])
@pytest.mark.parametrize("what", ["reply", "request"])
def test_a_run_that_was_being_taken_in_is_there_whole_or_can_be_taken_in_again(
    what: str, of: Callable[[str], bool], store: PostgresStore, proxy: Proxy
) -> None:
    """Its pages are gone through once: who gives them gives them again."""
    pages = [[a_row(1), a_row(2)], [a_row(3, payload=b"x" * 100_000)]]

    def adopt() -> bool:
        return store.adopt("r", 7, SECRET, Q, iter(pages), [Request(1, "signal", b"1", "who", 2.0)], None)

    lost = proxy.lose_reply(of) if what == "reply" else proxy.lose_request(of)
    if "nothing of it was written" in str(answer(adopt)):
        assert store.head("r") is None
        assert adopt()
    assert lost.wait()
    assert (store.read("r"), len(store.inbox("r", 0))) == ([row for page in pages for row in page], 1)
    head = head_of(store)
    assert (head.owner, head.token, head.inbox) == (None, 7, 1)
    assert not adopt()


def test_a_request_that_arrives_when_nobody_expects_it_any_more_is_not_posted_twice(
    store: PostgresStore, dsn: str
) -> None:
    """The server is still at work for a call whose caller has given it up: the next try waits for it, and finds what it did."""
    create(store, "r")
    with psycopg.connect(dsn) as other, psycopg.connect(dsn, autocommit=True) as looking:
        other.execute("SELECT 1 FROM runs WHERE run_id = 'r' FOR UPDATE")
        posted: list[int] = []
        thread = threading.Thread(
            target=lambda: posted.append(store.post("r", "signal", b"1", "who", 1.0)), daemon=True
        )
        thread.start()
        wait_until(lambda: waiting(looking) == 1, "the request to wait")
        looking.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        wait_until(lambda: waiting(looking) == 1, "the request to be made again")
        other.rollback()
        thread.join(60)
    assert posted == [1]
    assert len(store.inbox("r", 0)) == 1


def waiting(connection: psycopg.Connection) -> int:
    """How many sessions of this database wait for a lock."""
    (count,) = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ).fetchone() or (0,)
    return int(count)


def test_runs_that_were_claimed_in_vain_come_with_the_next_claim(store: PostgresStore, proxy: Proxy, dsn: str) -> None:
    """The outage was longer than the store waits for it: whoever asks again gets what it has, long before its lease runs out."""
    enqueue(store, "r")
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    hasty = PostgresStore(proxy.dsn(name), outage_seconds=0.2, _now=DatabaseClock.SQL)
    lost = proxy.lose_reply(is_any)
    proxy.refuse()
    with pytest.raises(StoreUnavailable):
        hasty.claim_due("w", 30.0, [QueueTerms("q")], ["agent"], 5)
    assert lost.wait()
    proxy.accept()
    assert head_of(store).owner == "w"
    (lease,) = hasty.claim_due("w", 30.0, [QueueTerms("q")], ["agent"], 5)
    assert (lease.run_id, lease.token) == ("r", head_of(store).token)
    assert hasty.claim_due("w", 30.0, [QueueTerms("q")], ["agent"], 5) == []
    assert hasty.append("r", lease.token, 0, [a_row(2)], synced=True)
    hasty.close()


# --- outages ----------------------------------------------------------------------------------------------------------


def test_who_uses_a_store_hears_nothing_of_sessions_that_the_server_ends(store: PostgresStore, dsn: str) -> None:
    token = create(store, "r").token
    with psycopg.connect(dsn, autocommit=True) as connection:
        for seq in range(2, 12):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            assert store.append("r", token, 0, [a_row(seq)], synced=True)
    assert [row.seq for row in store.read("r")] == list(range(1, 12))


def test_a_network_that_hands_nothing_on_is_given_up_and_another_connection_is_made(dsn: str, proxy: Proxy) -> None:
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    store = PostgresStore(proxy.dsn(name), outage_seconds=8.0)  # so an answer is waited for two seconds
    token = create(store, "r").token
    proxy.black_hole()
    written: list[bool] = []
    thread = threading.Thread(
        target=lambda: written.append(store.append("r", token, 0, [a_row(2)], synced=True)), daemon=True
    )
    thread.start()
    wait_until(lambda: len(proxy._connections) > 1, "another connection")
    proxy.heal()
    thread.join(60)
    assert written == [True]
    assert [row.seq for row in store.read("r")] == [1, 2]
    store.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_nothing_is_said_not_to_be_written_of_which_an_earlier_try_was_lost(
    is_lost: bool, proxy: Proxy, dsn: str
) -> None:
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    store = PostgresStore(proxy.dsn(name, options="-clock_timeout=50"), outage_seconds=0.3)
    token = create(store, "r").token
    with psycopg.connect(dsn) as holding:
        holding.execute("SELECT 1 FROM runs WHERE run_id = 'r' FOR UPDATE")
        if is_lost:
            proxy.lose_request(is_any)
        with pytest.raises(StoreUnavailable if is_lost else StoreBusy) as raised:
            store.append("r", token, 0, [a_row(2)], synced=True)
        assert ("may have been done" in str(raised.value)) is is_lost
    assert store.append("r", token, 0, [a_row(2)], synced=True)
    store.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        ledger_with_a_clock(server.start().dsn())
        yield server


def test_a_server_that_was_killed_and_comes_back_has_everything_and_is_gone_on_with(server: Server) -> None:
    store = PostgresStore(server.dsn(), outage_seconds=60.0)
    token = create(store, "r").token
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        assert store.append("r", token, 0, [a_row(2)], synced=True)
    finally:
        starting.join()
    assert [row.seq for row in store.read("r")] == [1, 2]
    store.close()


def test_an_outage_that_lasts_is_told_and_what_was_asked_can_be_asked_again(server: Server) -> None:
    store = PostgresStore(server.dsn(), outage_seconds=0.3)
    token = create(store, "r").token
    server.stop("immediate")
    calls: list[Callable[[], object]] = [
        lambda: store.append("r", token, 0, [a_row(2)], synced=True),
        lambda: store.read("r"),
        lambda: store.claim("r", "b", 30.0),
        lambda: store.post("r", "cancel", b"", "who", 1.0),
        lambda: create(store, "s"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable) as raised:
            call()
        assert "call again" in str(raised.value).lower()
    (answered,) = store.append_all([Append("r", token, 0, [a_row(2)])], synced=True)
    assert isinstance(answered, StoreUnavailable)
    assert not store.wait_for_work(0.0) or not store.wait_for_work(0.0)
    server.start()
    for call in calls[:2]:
        assert call()
    assert [row.seq for row in store.read("r")] == [1, 2]
    store.close()


def test_closing_waits_for_no_server(server: Server) -> None:
    store = PostgresStore(server.dsn(), outage_seconds=600.0)
    create(store, "r")
    server.stop("immediate")
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.read("r")


def test_a_store_that_is_closed_waits_for_no_server_any_longer(server: Server) -> None:
    store = PostgresStore(server.dsn(), outage_seconds=600.0)
    create(store, "r")
    server.stop("immediate")
    raised: list[BaseException] = []

    def work() -> None:
        try:
            store.read("r")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: not store._links._idle, "the reader to find the connection lost")
    store.close()
    thread.join(60)
    assert isinstance(raised[0], StoreUnavailable)


def test_a_server_with_too_many_clients_is_waited_for(server: Server) -> None:
    server.settings |= {"max_connections": "6", "superuser_reserved_connections": "0", "max_wal_senders": "0"}
    server.restart()
    store = PostgresStore(server.dsn(), outage_seconds=60.0)
    create(store, "r")
    store._links._drop_idle()
    others = [psycopg.connect(server.dsn()) for _ in range(6)]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(store.head("r")), daemon=True)
    thread.start()
    wait_until(
        lambda: "too many clients" in server.log.read_text() or "remaining connection" in server.log.read_text(),
        "a refusal",
    )
    for other in others:
        other.close()
    thread.join(60)
    assert found
    store.close()


def test_a_database_that_takes_no_writes_says_so_at_once(server: Server) -> None:
    store = PostgresStore(server.dsn(), outage_seconds=600.0)
    token = create(store, "r").token
    with server.connect() as connection:
        connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
    store._links._drop_idle()
    with pytest.raises(StoreReadOnly):
        store.append("r", token, 0, [a_row(2)], synced=True)
    assert len(store.read("r")) == 1
    store.close()


def test_an_old_token_is_refused_after_an_outage_too(
    store: PostgresStore, proxy: Proxy, dsn: str, clock: DatabaseClock
) -> None:
    old = create(store, "r", lease_seconds=10.0)
    other = PostgresStore(dsn, _now=DatabaseClock.SQL)
    clock.advance(11.0)
    new = other.claim("r", "b", 30.0)
    proxy.lose_request(is_any)
    with pytest.raises(LeaseLost):
        store.append("r", old.token, 0, [a_row(2)], synced=True)
    assert other.append("r", new.token, 0, [a_row(2)], synced=True)
    other.close()
