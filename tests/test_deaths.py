"""A program that takes its process with it outside of a step is begun a few times and no more, and the other runs go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, ReplayDivergence, RetryPolicy, RunClosed
from agent_run_ledger.contract import Store
from agent_run_ledger.engine.effects import Wait
from agent_run_ledger.engine.runs import MOST_DEATHS, MOST_DEATHS_WHILE_WAITING
from support.ledgers import Bench
from support.processes import child
from support.programs import RUN, Calls, Upset, Way, calling, dies, mortal
from support.witness import Witness


class Lives:
    """One life of a program after the other, each of another process."""

    def __init__(self, bench: Bench, way: Way) -> None:
        self.bench, self.way = bench, way
        self.begun = 0
        self.look = Calls()
        self.dead: list[AgentRunLedger | Store] = []
        """Kept, for what is collected as garbage gives its runs back."""

    def program(self, ledger: AgentRunLedger, die: Callable[[], Any], steps: int) -> Any:
        """An agent that makes so many calls and then dies, outside of any of them."""
        look = self.way.tool(ledger, self.look, name="look", effect=Effect.READ)

        def agent() -> Any:
            self.begun += 1
            for number in range(steps):
                yield look(number)
            return die()

        return self.way.agent(ledger, agent)

    def die(self, steps: int = 0) -> None:
        ledger, die = mortal(self.bench)
        self.dead.append(ledger)
        with dies(self.bench):
            self.way.start(ledger, self.program(ledger, die, steps))

    def lose(self, times: int) -> None:
        """So many owners take the run and are never heard of."""
        store = self.bench.store()
        self.dead.append(store)
        for number in range(times):
            store.claim(RUN, f"owner {number}", 30.0)
            self.bench.owners_die()

    def live(self, steps: int = 0) -> Any:
        """A life that comes to its end."""
        ledger = self.bench.open()
        return self.way.start(ledger, self.program(ledger, lambda: "alive", steps))


@pytest.fixture
def lives(bench: Bench, way: Way) -> Iterator[Lives]:
    lives = Lives(bench, way)
    yield lives
    for dead in lives.dead:
        dead.close()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_program_that_died_without_a_word_too_often_is_begun_no_more_and_its_run_is_a_dead_letter(
    lives: Lives, steps: int
) -> None:
    for _ in range(MOST_DEATHS):
        lives.die(steps)
    before = lives.bench.kinds(RUN)
    for _ in range(2):
        with pytest.raises(RunClosed) as refused:
            lives.live(steps)
        assert f"begun {MOST_DEATHS} times and wrote nothing" in str(refused.value)
    assert (lives.begun, lives.look.seen) == (MOST_DEATHS, list(range(steps)))
    assert lives.bench.kinds(RUN) == [*before, "exhausted"]
    ledger = lives.bench.open()
    record = ledger.get_run(RUN)
    assert (record.status, record.owner) == ("DEAD_LETTER", None)
    assert record.cause == refused.value.cause
    assert [dead.run_id for dead in ledger.dead_letters()] == [RUN]
    last = ledger.trace(RUN)[-1]
    assert (last.event, last.text) == ("dead letter", record.cause)
    assert ledger.explain(RUN).reason == record.cause
    assert ledger.verify().findings == []


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_made_from_the_dead_letter_begins_without_those_deaths(lives: Lives, steps: int) -> None:
    for _ in range(MOST_DEATHS):
        lives.die(steps)
    with pytest.raises(RunClosed):
        lives.live(steps)
    again = lives.bench.open().redrive(RUN, reason="its program is mended")
    ledger = lives.bench.open()
    mended = lives.program(ledger, lambda: "alive", steps)
    assert lives.way.start(ledger, mended, run_id=again) == "alive"
    assert lives.look.seen == list(range(steps))


def test_one_that_lives_at_last_is_not_given_up(lives: Lives) -> None:
    for _ in range(MOST_DEATHS - 1):
        lives.die()
    assert lives.live() == "alive"


def test_whatever_is_written_starts_the_count_anew(lives: Lives) -> None:
    for steps in range(4):
        for _ in range(MOST_DEATHS - 1):
            lives.die(steps)
    assert lives.live(4) == "alive"
    assert lives.look.seen == [0, 1, 2, 3]


def test_who_gives_the_run_back_has_not_died_however_often_that_is(lives: Lives) -> None:
    """An exception for which it stands already writes nothing, and a program that is another than the recorded one neither."""
    bench, way = lives.bench, lives.way
    ledger, other = bench.open(), bench.open()
    for place, named, error in ((ledger, "look", Upset), (other, "listen", ReplayDivergence)):
        call = way.tool(place, lives.look, name=named, effect=Effect.READ)

        def agent(call: Callable[..., Any] = call) -> Any:
            lives.begun += 1
            yield call()
            raise Upset

        fails = way.agent(place, lambda agent=agent: agent(), name="agent")
        for _ in range(MOST_DEATHS + 2):
            with pytest.raises(error):
                way.start(place, fails)
    assert lives.begun == 2 * (MOST_DEATHS + 2)
    assert bench.kinds(RUN) == ["created", "intent", "outcome", "parked"]


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_run_whose_step_waits_for_its_next_attempt_may_lose_more_owners(lives: Lives, is_given_up: bool) -> None:
    """Nothing is written while it waits, and it may wait for long."""
    bench, way = lives.bench, lives.way

    def start(ledger: AgentRunLedger, work: Calls) -> Any:
        patient = RetryPolicy(base=3600.0, cap=3600.0)
        flaky = way.tool(ledger, work, name="flaky", effect=Effect.READ, retry=patient)
        return way.start(ledger, way.agent(ledger, calling(lambda: flaky(7)), name="agent"))

    ledger, die = mortal(bench)
    lives.dead.append(ledger)
    for driver in (ledger._driver, ledger._asynchronous):
        dying_as_it_waits(driver, die)
    with dies(bench):
        start(ledger, Calls(ConnectionResetError()))
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]
    lives.lose(MOST_DEATHS_WHILE_WAITING - 1 - (not is_given_up))
    if is_given_up:
        with pytest.raises(RunClosed):
            start(bench.open(), Calls())
    else:
        assert start(bench.open(), Calls()) == 7


def dying_as_it_waits(driver: Any, die: Callable[[], Any]) -> None:
    perform = driver.perform
    driver.perform = lambda effect: die() if isinstance(effect, Wait) else perform(effect)


def test_a_run_that_somebody_has_cancelled_is_cancelled(lives: Lives) -> None:
    for _ in range(MOST_DEATHS):
        lives.die()
    lives.bench.open().cancel(RUN, reason="enough")
    with pytest.raises(RunClosed):
        lives.live()
    assert lives.bench.open().get_run(RUN).status == "CANCELLED"


# --- in processes of their own ----------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, threading
from pathlib import Path
from support.witness import Witness

folder, order, runs = Path(arguments[0]), arguments[1], int(arguments[2])
witness = Witness(folder / "witness")
# A lease that outlasts any test: whoever waited for it to run out would be seen to hang.
ledger = AgentRunLedger(folder / "agent.db", durability="process", lease_seconds=600)

@ledger.tool(effect="READ")
def look(what):
    witness.note("looked", what=what)
    return what

@ledger.agent()
def kills(when):
    if when == "later":
        look("before")
    witness.note("begun", pid=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)

@ledger.agent()
def lives(number):
    threading.Event().wait(0.2)  # it says nothing for a while
    return look(number)

if order == "run":
    try:
        ledger.run(kills, arguments[3], run_id="kills")
    except RunClosed:
        pass
elif order == "submit":
    ledger.submit(kills, arguments[3], run_id="kills")
    for number in range(runs):
        ledger.submit(lives, number, run_id=f"lives {number}")
elif order == "recover":
    ledger.recover()
else:
    with ledger.worker(concurrency=runs + 1, poll_seconds=0.01):
        for run in ledger.runs():
            while ledger.get_run(run.run_id).status not in ("COMPLETED", "DEAD_LETTER"):
                pass
"""


def dies_of(folder: Path, order: str, when: str = "at once", *, runs: int = 0) -> bool:
    """Whether a process is killed that does so."""
    with child(PROGRAM, folder, order, runs, when) as process:
        status = process.ends()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def deaths_of(folder: Path, order: str, when: str = "at once", *, runs: int = 0) -> int:
    """How many processes die of this order, before one comes to its end."""
    for deaths in range(20):
        if not dies_of(folder, order, when, runs=runs):
            return deaths
    pytest.fail("it is begun for ever")


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("order", ["worker", "recover", "run"])
def test_as_many_processes_die_of_it_as_may_and_no_more(tmp_path: Path, order: str, when: str) -> None:
    died = dies_of(tmp_path, "submit" if order == "worker" else "run", when)
    died += deaths_of(tmp_path, order, when)
    witness = Witness(tmp_path / "witness")
    assert died == len(witness.notes("begun")) == MOST_DEATHS
    assert len(witness.notes("looked")) == (when == "later")
    with AgentRunLedger.open_read_only(tmp_path / "agent.db") as ledger:
        run = ledger.get_run("kills")
        assert (run.status, run.owner) == ("DEAD_LETTER", None)
        assert ledger.verify().findings == []


@pytest.mark.slow
def test_runs_that_only_were_in_the_same_process_come_to_their_end(tmp_path: Path) -> None:
    """They too were begun again and again without a word, for they were slow to say one."""
    runs = 8
    assert not dies_of(tmp_path, "submit", runs=runs)
    assert deaths_of(tmp_path, "worker", runs=runs) == MOST_DEATHS
    with AgentRunLedger.open_read_only(tmp_path / "agent.db") as ledger:
        statuses = {run.run_id: run.status for run in ledger.runs()}
        assert statuses == {"kills": "DEAD_LETTER"} | {f"lives {number}": "COMPLETED" for number in range(runs)}
        assert ledger.verify().findings == []
