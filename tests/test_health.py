"""A worker says over HTTP how it is: whether its loop goes round, and whether it takes what is due."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, Worker
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from support.fleets import LONG, Gate, until, worker

LOCAL = ("127.0.0.1", 0)


def ask(working: Worker, path: str, method: str = "GET", *, body: bytes | None = None) -> tuple[int, Any]:
    """The status, and what the body says."""
    assert working.health_address is not None
    connection = http.client.HTTPConnection(*working.health_address, timeout=LONG)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        said = answer.read()
        assert answer.headers["Content-Type"] == "application/json"
        assert "Python" not in answer.headers["Server"]
        if method == "HEAD":
            assert said == b""
            return answer.status, int(answer.headers["Content-Length"])
        return answer.status, json.loads(said)
    finally:
        connection.close()


class Blocked(MemoryStore):
    """A store in which somebody may get stuck."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.gate = Gate(is_open=True)

    def next_due(self, *args: Any) -> float | None:
        self.gate()
        return super().next_due(*args)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Blocked:
    return Blocked(clock)


@pytest.fixture
def ledger(store: Blocked, clock: FakeClock) -> Any:
    with AgentRunLedger(store, clock=clock) as opened:
        opened.agent(name="agent")(lambda: None)
        yield opened


def test_a_worker_that_goes_round_is_healthy_and_ready(ledger: AgentRunLedger) -> None:
    with worker(ledger, health=LOCAL) as working:
        assert working.health_address is not None
        assert working.health_address[1] > 0
        for path in ("/healthz", "/readyz", "/readyz?verbose=1"):
            assert ask(working, path) == (200, {"ok": True, "state": "running"})
            assert ask(working, path, "HEAD")[0] == 200


def test_a_loop_that_stands_still_is_unhealthy_with_the_reason(
    ledger: AgentRunLedger, store: Blocked, clock: FakeClock
) -> None:
    with worker(ledger, health=LOCAL) as working:
        store.gate.close()
        before = len(store.gate.came)
        store.gate.await_count(before + 1)
        clock.advance(29)
        assert ask(working, "/healthz")[0] == 200
        clock.advance(2)
        status, said = ask(working, "/healthz")
        assert (status, said["ok"]) == (503, False)
        assert said["reason"] == "the loop that claims runs has been silent for 31 s"
        store.gate.open()
        until(lambda: ask(working, "/healthz")[0] == 200)


def test_a_worker_whose_store_has_not_answered_is_healthy_and_not_ready(
    ledger: AgentRunLedger, store: Blocked, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_run_ledger import StoreUnavailable

    asked = []

    def away(*_: Any) -> Any:
        asked.append(1)
        raise StoreUnavailable("away")

    with worker(ledger, health=LOCAL) as working:
        with monkeypatch.context() as patched:
            for verb in ("next_due", "claim_due", "beat", "free_dead"):
                patched.setattr(store, verb, away)
            until(lambda: asked)
            clock.advance(31)
            seen = len(asked)
            until(lambda: len(asked) > seen + 1)
            assert ask(working, "/healthz") == (200, {"ok": True, "state": "running"})
            status, said = ask(working, "/readyz")
            assert (status, said["reason"]) == (503, "the store has not answered for 31 s")
        until(lambda: ask(working, "/readyz")[0] == 200)


def test_a_draining_worker_is_healthy_and_not_ready_and_an_ended_one_does_not_answer(ledger: AgentRunLedger) -> None:
    gate = Gate()
    passes = ledger.tool(name="pass", effect=Effect.READ)(lambda: gate())

    @ledger.agent()
    def secret_agent() -> Any:
        return passes()

    working = ledger.worker(poll_seconds=0.02, health=LOCAL)
    ledger.submit(secret_agent, run_id="secret-run")
    gate.await_count(1)
    working.drain()
    assert ask(working, "/readyz") == (503, {"ok": False, "state": "draining", "reason": "it is draining"})
    assert ask(working, "/healthz") == (200, {"ok": True, "state": "draining"})
    gate.open()
    assert working.stop()
    with pytest.raises(OSError, match="refused"):
        ask(working, "/healthz")


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz/", "/../etc/passwd", "/%2e%2e/healthz", "/healthz%00"])
def test_there_is_nothing_else_to_be_had(ledger: AgentRunLedger, path: str) -> None:
    with worker(ledger, health=LOCAL) as working:
        assert ask(working, path) == (404, {"ok": False, "reason": "there are /healthz and /readyz"})


@pytest.mark.parametrize("method", ["POST", "DELETE", "<script>alert(1)</script>"])
def test_nothing_can_be_done_there(ledger: AgentRunLedger, method: str) -> None:
    with worker(ledger, health=LOCAL) as working:
        assert ask(working, "/healthz", method) == (501, {"ok": False, "reason": "Not Implemented"})


@pytest.mark.parametrize(
    "said", [b"\x7fELF\x02\x01\x01\x00\r\n\r\n", b"GET /healthz\x00 HTTP/9.9\r\n\r\n", b"\r\n", b"GET " + b"a" * 70_000]
)
def test_what_is_no_request_is_told_so_and_hurts_nobody(ledger: AgentRunLedger, said: bytes) -> None:
    with worker(ledger, health=LOCAL) as working:
        assert working.health_address is not None
        with socket.create_connection(working.health_address, timeout=LONG) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in _read(connection)
        assert ask(working, "/healthz")[0] == 200


def _read(connection: socket.socket) -> bytes:
    said = b""
    try:
        while more := connection.recv(65_536):
            said += more
    except ConnectionResetError:
        pass
    return said


def test_somebody_who_connects_and_says_nothing_keeps_nobody_waiting(ledger: AgentRunLedger) -> None:
    with worker(ledger, health=LOCAL) as working:
        assert working.health_address is not None
        with socket.create_connection(working.health_address, timeout=LONG):
            assert ask(working, "/healthz")[0] == 200


def test_an_address_that_is_taken_starts_no_worker(ledger: AgentRunLedger) -> None:
    before = threading.active_count()
    with socket.create_server(LOCAL) as taken, pytest.raises(OSError, match="in use"):
        ledger.worker(health=taken.getsockname())
    assert ledger.workers() == []
    assert threading.active_count() == before


def test_it_may_listen_on_ipv6(ledger: AgentRunLedger) -> None:
    if not socket.has_ipv6:
        pytest.fail("this machine has no IPv6")
    with worker(ledger, health=("::1", 0)) as working:
        assert working.health_address is not None
        assert working.health_address[0] == "::1"
        assert ask(working, "/healthz")[0] == 200


def test_nothing_of_runs_or_agents_is_told(ledger: AgentRunLedger) -> None:
    gate = Gate()

    @ledger.agent(name="secret")
    def secret() -> Any:
        return gate()

    with worker(ledger, health=LOCAL, name="secret") as working:
        ledger.submit(secret, run_id="secret", queue="default", key="secret")
        gate.await_count(1)
        for path in ("/healthz", "/readyz", "/secret"):
            assert "secret" not in json.dumps(ask(working, path))
        gate.open()
