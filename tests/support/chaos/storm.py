"""One storm, from its calm to its calm: runs are submitted, processes and networks fail, everything ends, and then it is judged."""

from __future__ import annotations

import heapq
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Row
from agent_run_ledger.errors import IllegalTransition
from agent_run_ledger.words import RunState
from support.chaos import outside
from support.chaos.arenas import Arena
from support.chaos.checker import Evidence, judge, overtaken
from support.chaos.fleet import Fleet, WorkerProcess
from support.chaos.journal import Journal, now, read
from support.chaos.program import WORD, Agents, register, state_of
from support.chaos.schedule import Fault, schedule
from support.chaos.worker import Order, ledger_in
from support.processes import environment

_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Plan:
    """How much of a storm."""

    seed: int = 1
    workers: int = 6
    runs: int = 300
    """Besides their children."""
    seconds: float = 60.0
    """For how long things go wrong."""
    fault_every: float = 0.8
    """Seconds between two faults, on the average."""
    lease_seconds: float = 2.5
    outage_seconds: float = 6.0
    """How long a worker's store waits for its server, before it leaves that to the worker."""
    concurrency: int = 8
    clocks: tuple[str, ...] = ()
    """By how much the wall clocks of the workers are wrong, slot by slot; those of the others are right."""
    faults: tuple[Fault, ...] | None = None
    """What goes wrong; None: whatever the seed says."""
    patience_seconds: float = 120.0
    """How long the runs may take to their ends when nothing goes wrong any more."""


@dataclass(frozen=True)
class Report:
    """What came of it."""

    problems: list[str]
    """The promises that were broken, a sentence each."""
    summary: list[str]
    """What really happened, in a line each."""
    replaced: int
    """How many worker processes were replaced by others."""


class _Asking(NamedTuple):
    """What somebody asks of a run in the middle of it."""

    at: float
    run_id: str
    word: str | None
    """A signal's value; None: it is cancelled."""


def blow(plan: Plan, arena: Arena, folder: Path, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Have the storm. `tell` hears how it goes."""
    began = time.monotonic()
    journal = Journal(folder / "faults.journal")
    with (
        outside.started(folder, plan.seed, environment()) as (door, seen_outside),
        arena,
        _ledger(plan, arena, door, folder) as (ledger, agents),
    ):

        def ordered(slot: int, name: str, path: Path) -> Order:
            return {
                "name": name, "place": arena.place(slot), "door": str(door), "journal": str(path),
                "lease_seconds": plan.lease_seconds, "outage_seconds": plan.outage_seconds, "concurrency": plan.concurrency,
                "clock": plan.clocks[slot] if slot < len(plan.clocks) else "+0",
            }  # fmt: skip

        askings = list(_submitted(plan, ledger, agents))
        with Fleet(folder, plan.workers, ordered, journal) as fleet:
            fleet.await_work()
            tell(f"{plan.runs} runs, {plan.workers} workers, seed {plan.seed}: the storm begins")
            asker = threading.Thread(target=_ask, args=[ledger, askings, now()])
            asker.start()
            _Weather(plan, arena, fleet, journal).pass_by(tell)
            asker.join()
            tell("it is over; the runs go on to their ends")
            unended = _await_ends(plan, ledger, fleet, tell)
            fleet.end()
            complaints, journals = fleet.complaints(), fleet.journals()
        journals["storm"] = read(folder / "storm.journal")
        runs = [run.run_id for run in ledger.runs()]
        logs = {run_id: ledger._store.read(run_id) for run_id in runs}
        heads = {run_id: head for run_id in runs if (head := ledger._store.head(run_id)) is not None}
        cancelled = {asking.run_id for asking in askings if asking.word is None}
        evidence = Evidence(
            journals, read(folder / "faults.journal"), read(seen_outside), logs, heads,
            [f"{found.run_id} {found.seq} {found.code}: {found.message}" for found in ledger.verify().findings],
            arena.is_death_proved,
            {run_id: _expected(rows[0], cancelled) for run_id, rows in logs.items()},
        )  # fmt: skip
    problems = [*complaints, *unended, *judge(evidence)]
    return Report(problems, [*_summary(evidence), f"in {time.monotonic() - began:.0f} s"], len(fleet.past))


@contextmanager
def _ledger(plan: Plan, arena: Arena, door: Path, folder: Path) -> Iterator[tuple[AgentRunLedger, Agents]]:
    """That of whoever looks after the storm, who submits, asks and looks, and is a witness like any other."""
    order: Order = {
        "name": "storm", "place": arena.place(None), "door": str(door), "journal": str(folder / "storm.journal"),
        "lease_seconds": plan.lease_seconds, "outage_seconds": 60.0, "concurrency": 1, "clock": "+0",
    }  # fmt: skip
    journal = Journal(Path(order["journal"]))
    with ledger_in(order, journal) as ledger:
        yield ledger, register(ledger, outside.Outside(door), journal)


def _submitted(plan: Plan, ledger: AgentRunLedger, agents: Agents) -> Iterator[_Asking]:
    """Submit all runs, due all over the storm, and say what will be asked of them."""
    chance = random.Random(plan.seed)
    for number in range(plan.runs):
        agent = agents[number % len(agents)]
        run_id = f"{agent.__name__}-{number}"
        due_in = chance.uniform(0.0, 0.9 * plan.seconds)
        ledger.submit(agent, number, run_id=run_id, delay=due_in, priority=chance.randrange(3))
        if agent is agents.waiter:
            yield from (_Asking(chance.uniform(0.0, plan.seconds), run_id, f"word {number}.{each}") for each in (1, 2))
        elif chance.random() < 0.04:
            yield _Asking(due_in + chance.uniform(0.0, 4.0), run_id, None)


def _ask(ledger: AgentRunLedger, askings: list[_Asking], began: float) -> None:
    for asking in sorted(askings):
        time.sleep(max(0.0, began + asking.at - now()))
        if asking.word is not None:
            ledger.signal(asking.run_id, WORD, asking.word)
        else:
            with suppress(IllegalTransition):  # it has ended already
                ledger.cancel(asking.run_id, children=True)


class _Weather:
    """What goes wrong, one thing after the other, and what ends it."""

    def __init__(self, plan: Plan, arena: Arena, fleet: Fleet, journal: Journal) -> None:
        self._arena, self._fleet, self._journal = arena, fleet, journal
        faults = plan.faults
        self._faults = (
            faults
            if faults is not None
            else schedule(
                plan.seed,
                arena.kinds,
                seconds=plan.seconds,
                slots=plan.workers,
                every=plan.fault_every,
                lease_seconds=plan.lease_seconds,
            )
        )

    def pass_by(self, tell: Callable[[str], None]) -> None:
        """Return when everything has gone wrong, and nothing is wrong any more."""
        began = now()
        ahead: list[tuple[float, int, Fault | Callable[[], None]]] = [
            (fault.at, number, fault) for number, fault in enumerate(self._faults)
        ]
        heapq.heapify(ahead)
        while ahead:
            at, number, thing = heapq.heappop(ahead)
            time.sleep(max(0.0, began + at - now()))
            if not isinstance(thing, Fault):
                thing()
                continue
            tell(f"{at:5.1f} s: {thing.kind}")
            end = self._inflict(thing)
            if end is not None:
                heapq.heappush(ahead, (now() - began + thing.lasts, number, end))
        self._arena.calm(self._journal)

    def _inflict(self, fault: Fault) -> Callable[[], None] | None:
        if fault.kind == "kill":
            self._fleet.kill(fault.slot)
        elif fault.kind == "drain":
            self._fleet.drain(fault.slot)
        elif fault.kind == "stop":
            stopped: WorkerProcess | None = self._fleet.stop(fault.slot)
            return None if stopped is None else lambda: self._fleet.go_on(stopped)
        else:
            return self._arena.inflict(fault, self._journal)
        return None


def _await_ends(plan: Plan, ledger: AgentRunLedger, fleet: Fleet, tell: Callable[[str], None]) -> list[str]:
    """Wait until all runs have ended. Those that have not in time, with the reason as far as one is known."""
    until = time.monotonic() + plan.patience_seconds
    left = -1
    while running := [run for run in ledger.runs() if not RunState(run.status).is_terminal]:
        if len(running) != left:
            left = len(running)
            tell(f"{left} runs have not ended")
        if time.monotonic() > until:
            for each in fleet.present:
                each.tell_where_it_stands()
            reasons = {stuck.run_id: stuck.reason for stuck in ledger.stuck(0.0)}
            return [
                f"{run.run_id} has not ended: {run.status}, {run.cause}, {reasons.get(run.run_id)}" for run in running
            ]
        time.sleep(_POLL_SECONDS)
    return []


def _expected(first: Row, cancelled: set[str]) -> set[str]:
    """The states that a run may have ended in. Who is to be cancelled may have been done already, and takes its children along."""
    said = json.loads(first.body)
    return {state_of(first)} | ({"CANCELLED"} if cancelled & {said["run"], said.get("parent")} else set())


def _summary(evidence: Evidence) -> list[str]:
    """What really happened, in a line each."""
    faults = Counter[str]()
    for note in evidence.faults:
        faults[note["kind"]] += note.get("hit", 1)
    failed = Counter(f"{note['verb']}: {note['error']}" for _, note in evidence.notes("failed"))
    claims = Counter(note["run"] for _, note in evidence.notes("claimed"))
    calls = evidence.notes("called")
    world = Counter(
        note["kind"] if note["kind"] != "asked" else f"{note['what']}, {note['mood']}" for note in evidence.outside
    )
    entries = [
        (note["run"], entry["seq"], entry["leaf"]) for _, note in evidence.notes("written") for entry in note["entries"]
    ]
    there = {(run_id, row.seq, row.roots[:32].hex()) for run_id, rows in evidence.logs.items() for row in rows}
    return [
        f"runs: {len(evidence.logs)}, entries: {sum(map(len, evidence.logs.values()))}, acknowledged: {len(entries)}, "
        f"of which lost (without a sync, by a crash): {sum(entry not in there for entry in entries)}",
        f"claims: {sum(claims.values())}, most of one run: {max(claims.values(), default=0)}",
        f"faults that hit: {_told(faults)}",
        f"what workers met: {_told(failed)}",
        f"calls: {len(calls)}, of which second attempts: {sum(note['attempt'] > 1 for _, note in calls)}, "
        f"overtaken while the process was stopped: {len(overtaken(evidence))}",
        f"the outside: {_told(world)}",
    ]


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items())) or "nothing"
