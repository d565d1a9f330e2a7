"""Two processes on the same runs, as they are opened by default: in a file of their host, and on a server that two machines could share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agent_run_ledger import AgentRunLedger
from support.processes import Child, child
from support.witness import Witness

RUNS, STEPS = 20, 5

PROGRAM = """
from pathlib import Path
from support.witness import Witness
place, witness, options = arguments[0], Witness(Path(arguments[1])), json.loads(arguments[2])
ledger = AgentRunLedger(place, **options)
hanging = None

@ledger.tool(effect="READ")
def look(at):
    witness.note("look", run=current_step().run_id, at=at)
    if at == hanging:
        tell("hanging")
        hear()
    return at * 2

@ledger.agent()
def agent(number):
    return sum(look(number + at) for at in range(5))

tell("open")
match hear():
    case ["work"]:
        with ledger.worker(concurrency=4):
            hear()
    case ["run", *numbers]:
        tell([ledger.run(agent, number, run_id=f"run-{number}", wait=60) for number in numbers])
    case ["hang", at]:
        hanging = at
        ledger.run(agent, 0, run_id="run-0")
    case ["try", wait]:
        try:
            tell(["ran", ledger.run(agent, 0, run_id="run-0", wait=wait)])
        except RunOwned as owned:
            tell(["owned", owned.owner, owned.idle_seconds])
ledger.close()
"""


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path / "witness")


def begun(process: Child, *word: object) -> Child:
    assert process.hear() == "open"
    process.tell(word)
    return process


def looks(witness: Witness) -> Counter[tuple[str, int]]:
    return Counter((note["run"], note["at"]) for note in witness.notes("look"))


EACH_ONCE = Counter((f"run-{number}", number + at) for number in range(RUNS) for at in range(STEPS))


def test_two_workers_with_default_settings_do_each_step_once(place: str, witness: Witness) -> None:
    with (
        AgentRunLedger(place) as ledger,
        child(PROGRAM, place, witness.path, "{}") as one,
        child(PROGRAM, place, witness.path, "{}") as two,
    ):

        @ledger.agent()
        def agent(number: int) -> int:
            raise AssertionError("workers run it")

        for process in (one, two):
            begun(process, "work")
        handles = [ledger.submit(agent, number, run_id=f"run-{number}") for number in range(RUNS)]
        assert [handle.result(60) for handle in handles] == [10 * number + 20 for number in range(RUNS)]
        for process in (one, two):
            process.tell("end")
            assert process.ends() == 0
        assert looks(witness) == EACH_ONCE
        assert ledger.verify().findings == []
        assert ledger.workers() == []


def test_two_programs_that_run_the_same_runs_do_each_step_once_and_get_the_same_results(
    place: str, witness: Witness
) -> None:
    with child(PROGRAM, place, witness.path, "{}") as one, child(PROGRAM, place, witness.path, "{}") as two:
        numbers = list(range(RUNS))
        begun(one, "run", *numbers)
        begun(two, "run", *reversed(numbers))
        results = [10 * number + 20 for number in numbers]
        assert one.hear() == results
        assert two.hear() == results[::-1]
    assert looks(witness) == EACH_ONCE
    with AgentRunLedger(place) as ledger:
        assert ledger.verify().findings == []


def test_who_comes_second_is_told_who_has_the_run_and_takes_it_over_when_that_one_is_dead(
    place: str, witness: Witness
) -> None:
    # a file proves the death of its owner; on a server the lease has to run out
    options = "{}" if place.endswith(".db") else '{"lease_seconds": 2, "heartbeat_seconds": 0.4}'
    with child(PROGRAM, place, witness.path, options) as one:
        begun(one, "hang", 3)
        assert one.hear() == "hanging"
        with child(PROGRAM, place, witness.path, options) as two:
            told, owner, idle_seconds = begun(two, "try", 0).hear()
            assert told == "owned"
            assert str(one.pid) in owner
            assert 0 <= idle_seconds < 30
        one.kill()
    with child(PROGRAM, place, witness.path, options) as three:
        assert begun(three, "try", 30).hear() == ["ran", 20]
    assert looks(witness) == {("run-0", at): 2 if at == 3 else 1 for at in range(STEPS)}
    with AgentRunLedger(place) as ledger:
        assert ledger.verify().findings == []
        assert [step.attempts for step in ledger.steps("run-0")] == [1, 1, 1, 2, 1]
