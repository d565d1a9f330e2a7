"""Hundreds of interrupted runs recovered by processes that are killed in the middle of it, judged by what the outside world saw."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from support.interrupted import TOOLS, is_asked_for, run_id
from support.payments import Request, Service, service
from support.processes import environment
from support.witness import Witness

pytestmark = pytest.mark.slow

RUNS, SEEDS, KILLS = 250, [1, 2], 3


@pytest.fixture
def payments(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path) as running:
        yield running


class Crowd:
    """All runs, and the processes that work on them, one life after the other."""

    def __init__(self, folder: Path, payments: Service, count: int) -> None:
        self.folder, self.payments, self.count = folder, payments, count
        self.settled: list[tuple[int, set[str]]] = []
        """For each life that recovers: how many requests had come before it, and the keys of the steps that had an outcome."""

    def start(self, **order: Any) -> subprocess.Popen[bytes]:
        order |= {"folder": str(self.folder), "port": self.payments.port}
        return subprocess.Popen([sys.executable, "-m", "support.interrupted", json.dumps(order)], env=environment())

    def live(self, **order: Any) -> int:
        """One process from its start to its end."""
        return self.start(**order).wait()

    def note_what_is_settled(self) -> None:
        self.settled.append((len(self.payments.requests()), set(self._keys("COMPLETED"))))

    def _keys(self, state: str) -> list[str]:
        with AgentRunLedger.open_read_only(self.folder / "runs.db") as ledger:
            steps = [step for run in ledger.runs() for step in ledger.steps(run.run_id)]
        return [step.idempotency_key for step in steps if step.state == state]

    def statuses(self) -> Counter[str]:
        with AgentRunLedger.open_read_only(self.folder / "runs.db") as ledger:
            return Counter(run.status for run in ledger.runs())

    def recovered(self) -> list[str]:
        """The ids that the last life said it has brought to their end."""
        ids: list[str] = Witness(self.folder / "witness").notes("recovered")[-1]["ids"]
        return ids


def expect_each_step_once(crowd: Crowd) -> None:
    """What a step asked for was asked again only while nobody knew its outcome, to the byte, and was done once."""
    came: dict[str, list[tuple[int, Request]]] = defaultdict(list)
    for number, request in enumerate(crowd.payments.requests("/quotes", "/model", "/keyed", "/unkeyed")):
        assert request.key is not None
        came[request.key].append((request.number - 1, request))
        assert number < 20 * crowd.count
    for key, requests in came.items():
        assert len({request.bytes for _, request in requests}) == 1, "another call under the same key"
        for begun, completed in crowd.settled:
            asked_later = [number for number, _ in requests if number >= begun]
            assert not (asked_later and key in completed), "a step that has an outcome was called again"
        lives = Counter(sum(begun <= number for begun, _ in crowd.settled) for number, _ in requests)
        assert max(lives.values()) == 1, "a process called it twice"
    calls = Counter((json.loads(requests[0][1].body)["number"], tool_of(requests[0][1])) for requests in came.values())
    assert set(calls.values()) == {1}, "one step under two keys"
    assert len(calls) == crowd.count * len(TOOLS)
    made = Counter(
        (json.loads(resource.body)["number"], resource.path, json.loads(resource.body)["tool"])
        for resource in crowd.payments.resources()
    )
    assert set(made.values()) == {1}, "money was moved twice"
    assert len(made) == 2 * crowd.count
    asked_for = Counter(json.loads(request.body)["number"] for request in crowd.payments.requests("/unkeyed"))
    assert asked_for == dict.fromkeys(filter(is_asked_for, range(crowd.count)), 1), "sent although it was made"
    assert crowd.payments.conflicts() == []


def tool_of(request: Request) -> str:
    name: str = json.loads(request.body)["tool"]
    return name.rpartition(" ")[2]


@pytest.mark.parametrize("seed", SEEDS)
def test_interrupted_runs_are_recovered_by_processes_that_are_killed_themselves(
    seed: int, payments: Service, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    crowd = Crowd(tmp_path, payments, RUNS)
    assert crowd.live(count=RUNS, seed=seed) == -signal.SIGKILL
    assert crowd.statuses() == {"RUNNING": RUNS}
    for _ in range(KILLS):
        crowd.note_what_is_settled()
        assert crowd.live(die_at=chance.randrange(50, 1_000)) == -signal.SIGKILL
    assert crowd.statuses()["COMPLETED"] < RUNS
    crowd.note_what_is_settled()
    assert crowd.live() == 0
    assert crowd.statuses() == {"COMPLETED": RUNS}
    assert len(crowd.recovered()) == len(set(crowd.recovered()))
    expect_each_step_once(crowd)
    expect_nothing_is_left_to_do(crowd)


def test_runs_that_were_parked_for_a_receipt_are_recovered_too_once_the_receiver_says(
    payments: Service, tmp_path: Path
) -> None:
    seed, count = 3, 60
    chance = random.Random(seed)
    crowd = Crowd(tmp_path, payments, count)
    assert crowd.live(count=count, seed=seed) == -signal.SIGKILL
    payments.fault("504", "/by-key/", times=8, each=True)  # as many as are asked for before a run is parked
    for _ in range(KILLS):
        crowd.note_what_is_settled()
        assert crowd.live(die_at=chance.randrange(20, 200)) == -signal.SIGKILL
    crowd.note_what_is_settled()
    assert crowd.live() == 0
    parked = crowd.statuses()["BLOCKED"]
    assert crowd.statuses() == {"COMPLETED": count - parked, "BLOCKED": parked}
    assert parked
    crowd.note_what_is_settled()
    assert crowd.live() == 0
    assert len(crowd.recovered()) == parked
    assert set(crowd.recovered()) <= {run_id(number) for number in range(count) if is_asked_for(number)}
    assert crowd.statuses() == {"COMPLETED": count}
    expect_each_step_once(crowd)
    expect_nothing_is_left_to_do(crowd)


def test_two_processes_that_recover_at_once_do_everything_once(payments: Service, tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, payments, 60)
    assert crowd.live(count=60, seed=4) == -signal.SIGKILL
    crowd.note_what_is_settled()
    both = [crowd.start(), crowd.start()]
    assert [process.wait() for process in both] == [0, 0]
    ended = [note["ids"] for note in Witness(tmp_path / "witness").notes("recovered")]
    assert sorted(ended[0] + ended[1]) == [run_id(number) for number in range(60)]
    assert crowd.statuses() == {"COMPLETED": 60}
    expect_each_step_once(crowd)


def expect_nothing_is_left_to_do(crowd: Crowd) -> None:
    """Another life sends nothing, and the log is whole."""
    came = len(crowd.payments.requests())
    assert crowd.live() == 0
    assert crowd.recovered() == []
    assert len(crowd.payments.requests()) == came
    with AgentRunLedger.open_read_only(crowd.folder / "runs.db") as ledger:
        assert ledger.verify().findings == []
