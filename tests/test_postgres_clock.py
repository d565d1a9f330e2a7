"""The clock of a ledger on a server: what the server said last goes on, and the better of two answers counts."""

from __future__ import annotations

import pytest

from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.postgres.clock import ServerClock

SERVER = 5_000_000_000.0
"""A time that is no machine's own."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ServerClock:
    made = ServerClock()
    monkeypatch.setattr(made, "elapsed", lambda: 100.0)
    return made


def at(clock: ServerClock, elapsed: float) -> ServerClock:
    clock.elapsed = lambda: elapsed  # type: ignore[method-assign] # as the fixture does
    return clock


def test_before_the_server_has_said_anything_it_is_the_machines_own() -> None:
    before = SystemClock.now()
    assert before <= ServerClock().now() <= SystemClock.now()


def test_what_the_server_said_goes_on(clock: ServerClock) -> None:
    clock.hear(SERVER, asked_at=99.0)  # it was said half-way between question and answer
    assert clock.now() == SERVER + 0.5
    assert at(clock, 160.0).now() == SERVER + 60.5


def test_of_two_answers_the_one_that_came_faster_counts(clock: ServerClock) -> None:
    clock.hear(SERVER, asked_at=99.9)
    at(clock, 101.0).hear(SERVER + 9.0, asked_at=99.0)
    assert clock.now() == pytest.approx(SERVER + 1.05)
    clock.hear(SERVER + 3.0, asked_at=100.99)
    assert clock.now() == pytest.approx(SERVER + 3.005)


def test_an_old_answer_gives_way_to_a_slower_one(clock: ServerClock) -> None:
    clock.hear(SERVER, asked_at=99.9)
    at(clock, 20_000.0).hear(SERVER + 7.0, asked_at=19_999.0)
    assert clock.now() == SERVER + 7.5


def test_another_server_may_have_another_time(clock: ServerClock) -> None:
    clock.hear(SERVER, asked_at=99.9)
    clock.hear(SERVER - 50.0, asked_at=98.0, is_another=True)
    assert clock.now() == SERVER - 49.0
