"""Recordings of real agents, run as durable agents in processes that are killed: what is called again, changed, lost, halted elsewhere.

    python benchmarks/replay_recordings.py --data recordings.jsonl.gz              # 500 of them, the breaker off
    python benchmarks/replay_recordings.py --data recordings.jsonl.gz --halts      # 1,000 that the breaker halts
    python benchmarks/replay_recordings.py --data recordings.jsonl.gz --runs 50 --seed 7 --json

A recording is a line of JSON as `loops.py` reads it. Each is a run whose steps are the recorded calls: the call answers what is recorded,
or raises it. Nothing is declared of the calls but `may_repeat`: of all of them where the breaker is to be off, else of those that poll.

The runs are played in child processes, many after one another in each. A child says what it does over a socket, and waits until it is
heard: that it calls the outside, and what its program was told. The parent, which is the outside, sends SIGKILL at a random one of these
moments of every run, or within two milliseconds behind it, and starts the next child, up to three times for a run, until all are over.
Then a last child runs them all once more. Counted are:

- calls repeated: calls of a step whose outcome stood in the ledger, or of which a program had been told, when the child began;
- outcomes changed: steps of which a program was told, or the ledger says, something else than what is recorded;
- runs lost: runs that did not end as the recording does, with `--halts` as the same run that nobody killed;
- halts moved (with `--halts`): runs that were halted, but at another step, by another rule or for other evidence.

Two kinds of calls may be made again, with their first key; they are told beside it: one that was cut off before its outcome was
recorded, and a failure behind which nothing is recorded, which a run that is started again tries once more. The exit status is 1
unless all of the above are 0 and `verify` finds nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

from loops import Recording, observed, read, trip

from agent_run_ledger import (
    AgentRunLedger,
    LoopDetectorPolicy,
    Run,
    RunawayLoopDetectedException,
    RunClosed,
    RunNotFound,
    StepFailed,
    StepRecord,
    current_step,
)

Runs = dict[str, Recording]

BATCH = 25
"""Runs in one ledger."""

PATIENCE_SECONDS = 60.0
"""A child that says nothing for so long hangs."""

MOST_KILLS = 3
"""Of one run: a step whose process died four times in it is given up."""

LATEST_KILL_SECONDS = 0.002

# --- a child ----------------------------------------------------------------------------------------------------------


class RecordedError(Exception):
    """What a recorded call answered."""


def live(parent: Connection, place: str, batch: Runs, most_steps: int, *, is_breaker_on: bool) -> None:
    """Run these runs one after the other to their ends, those that have begun from where they stand. Every note is waited for."""
    warnings.simplefilter("ignore")  # that a call in doubt is made again is said, and meant here

    def note(*said: Any) -> None:
        parent.send(said)
        parent.recv()

    with AgentRunLedger(place, max_steps=most_steps, durability="process") as ledger:

        @ledger.agent()
        def play(name: str, run: Run) -> list[str]:
            told = []
            for at in range(len(batch[name]["steps"])):
                told.append(digest(step(run, name, at)))
                note("told", name, at, told[-1])
            return told

        def step(run: Run, name: str, at: int) -> Any:
            tool, arguments, result, error, may_repeat = observed(batch[name], at)

            def call() -> Any:
                note("called", name, at, current_step().idempotency_key)
                if error is not None:
                    raise RecordedError(error)
                return result

            try:
                return run.step(tool, arguments, call, may_repeat=may_repeat or not is_breaker_on)
            except StepFailed as failed:
                return str(failed)

        for name in batch:
            try:
                result, error = ledger.run(play, name, run_id=name), None
            except RunawayLoopDetectedException as halted:
                result, error = None, [halted.rule, *halted.evidence]
            except RunClosed:
                result, error = None, ["closed"]
            except Exception as raised:
                result, error = None, ["broken", repr(raised)]
            note("over", name, result, error)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def expected(recording: Recording) -> list[str]:
    """What its program is told, step by step."""
    told = []
    for at in range(len(recording["steps"])):
        _, _, result, error, _ = observed(recording, at)
        told.append(digest(result if error is None else f"Tool execution failed: RecordedError: {error}"))
    return told


# --- the outside ------------------------------------------------------------------------------------------------------


class Child:
    """A process that plays runs. It waits at each of its notes until it is told to go on."""

    _processes = multiprocessing.get_context("forkserver")
    _processes.set_forkserver_preload(
        ["agent_run_ledger.ledger", "agent_run_ledger.stores.sqlite"]
    )  # so that a start is fast

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._here, there = self._processes.Pipe()
        self._process: BaseProcess = self._processes.Process(target=live, args=(there, *arguments), kwargs=options)
        self._process.start()
        there.close()
        self.hangs = self.is_killed = False

    def notes(self) -> Iterator[tuple[Any, ...]]:
        """What it says, until it has ended or hangs."""
        try:
            while self._here.poll(PATIENCE_SECONDS):
                yield self._here.recv()
            self.hangs = True
        except (EOFError, ConnectionResetError):
            return

    def go_on(self) -> None:
        with suppress(BrokenPipeError):  # it was killed, and had said one thing more
            self._here.send(None)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self.is_killed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hangs:
            self.kill()
        self._process.join()
        self._here.close()


class Ended(NamedTuple):
    """How a run stands in the ledger: what it came to and why, and of each step what it is and what is recorded."""

    status: str
    cause: str | None
    steps: list[tuple[str, str]]


class Outside:
    """Whom the runs of one ledger call: it starts their processes, kills them, and counts what it sees."""

    def __init__(self, folder: Path, runs: Runs, most_steps: int, *, is_breaker_on: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        """How often the process of each run was killed while it was under way."""
        self.ended: dict[str, Ended] = {}
        self.results: dict[str, tuple[Any, Any]] = {}
        """What each run that is over returned, and what it raised instead, when somebody was told first."""
        self.changed: set[tuple[str, int]] = set()
        folder.mkdir()
        self._place = str(folder / "runs.db")
        self._runs, self._most_steps, self._is_breaker_on = runs, most_steps, is_breaker_on
        self._expected = {name: expected(recording) for name, recording in runs.items()}
        self._over: set[str] = set()
        self._keys: dict[tuple[str, int], str] = {}
        self._called: set[tuple[str, int]] = set()
        self._failed: dict[str, tuple[str, int]] = {}
        """Of each run that stood at a failure when its process had died, that step."""
        self._recorded: set[tuple[str, int]] = set()

    def play(self, draw: random.Random | None, notes: dict[str, int] | None = None) -> None:
        """Until all runs are over. With something to `draw` from each is killed; `notes` says how many it makes if nobody does."""
        self._over.clear()
        while left := {name: recording for name, recording in self._runs.items() if name not in self._over}:
            aims = {} if draw is None or notes is None else {name: self._aim(name, draw, notes[name]) for name in left}
            self._live(left, draw, aims)

    def _aim(self, name: str, draw: random.Random, notes: int) -> int:
        """At which of its notes a run is killed next; 0: it is not."""
        if not self.kills[name] or (self.kills[name] < MOST_KILLS and draw.random() < 0.5):
            return draw.randint(1, notes)
        return 0

    def _live(self, batch: Runs, draw: random.Random | None, aims: dict[str, int]) -> None:
        """One child, to its end or its death."""
        name, heard = next(iter(batch)), 0
        with Child(self._place, batch, self._most_steps, is_breaker_on=self._is_breaker_on) as child:
            for kind, of, *said in child.notes():
                heard = heard + 1 if of == name else 1
                name = of
                self._hear(kind, name, *said)
                if draw is not None and heard == aims.get(name) and not child.is_killed:
                    if draw.random() < 0.5:
                        child.go_on()
                        time.sleep(draw.random() * LATEST_KILL_SECONDS)
                    child.kill()
                else:
                    child.go_on()
        if child.is_killed:
            self.counts["processes killed"] += 1
            self.kills[name] += 1
        if child.hangs:
            self._over.add(name)
            self.results.setdefault(name, (None, ["hangs"]))
        self._look(batch)

    def _hear(self, kind: str, name: str, *said: Any) -> None:
        if kind == "over":
            self._over.add(name)
            result = said[0], said[1]
            if result not in (self.results.setdefault(name, result), (None, ["closed"])):
                self.changed.add((name, len(self._expected[name])))
            return
        at, what = said
        if kind == "told":
            self._recorded.add((name, at))
            if what != self._expected[name][at]:
                self.changed.add((name, at))
            return
        self.counts["calls"] += 1
        step = name, at
        if self._keys.setdefault(step, what) != what or (step in self._recorded and step != self._failed.get(name)):
            self.counts["calls repeated"] += 1
            print(f"{name}, step {at + 1} was called again", file=sys.stderr)
        elif step in self._recorded:
            self.counts["last failures tried again"] += 1
        elif step in self._called:
            self.counts["calls in doubt made again"] += 1
        self._called.add(step)

    def _look(self, batch: Runs) -> None:
        """Read what the ledger says of these runs: what is recorded now must never be called again."""
        with AgentRunLedger(self._place, durability="process") as ledger:
            for name in batch:
                try:
                    run, steps = ledger.get_run(name), ledger.steps(name)
                except RunNotFound:
                    return  # nor has any behind it begun
                told = [(step.state, digest(_told(step))) for step in steps]
                self.ended[name] = Ended(run.status, run.cause, told)
                self._failed.pop(name, None)
                if name not in self._over and steps and steps[-1].state == "FAILED":
                    self._failed[name] = name, len(steps) - 1
                for at, step in enumerate(steps):
                    if step.state in ("COMPLETED", "FAILED"):
                        self._recorded.add((name, at))
                        if told[at][1] != self._expected[name][at]:
                            self.changed.add((name, at))
                    else:  # in doubt; it may be the second attempt of a failure
                        self._recorded.discard((name, at))

    def findings(self) -> int:
        """What does not hold in the ledger by its own proof."""
        with AgentRunLedger(self._place, durability="process") as ledger:
            return len(ledger.verify().findings)


def _told(step: StepRecord) -> Any:
    if step.output_json is not None:
        return json.loads(step.output_json)
    return f"Tool execution failed: {step.error_message}"


# --- what is measured -------------------------------------------------------------------------------------------------


def replayed(folder: Path, runs: Runs, draw: random.Random, most_steps: int) -> tuple[Outside, dict[str, str]]:
    """The breaker off: the runs, killed, and why each of those that are lost is."""
    outside = Outside(folder, runs, most_steps, is_breaker_on=False)
    outside.play(draw, {name: 2 * len(recording["steps"]) for name, recording in runs.items()})
    outside.play(None)
    lost = {}
    for name, recording in runs.items():
        ended, result = outside.ended.get(name), outside.results[name]
        if ended is None or ended.status != "COMPLETED" or result != (expected(recording), None):
            lost[name] = f"{ended and ended[:2]}, {str(result)[:200]}"
    return outside, lost


def halted(
    folder: Path, runs: Runs, draw: random.Random, most_steps: int
) -> tuple[Outside, dict[str, str], dict[str, str]]:
    """The breaker on: the runs, killed; why each of those that are lost is; and the halts that are not where they were without a kill."""
    undisturbed = Outside(folder / "undisturbed", runs, most_steps, is_breaker_on=True)
    undisturbed.play(None)
    outside = Outside(folder / "killed", runs, most_steps, is_breaker_on=True)
    outside.play(draw, {name: 2 * len(undisturbed.ended[name].steps) for name in runs})
    outside.play(None)
    lost, moved = {}, {}
    for name in runs:
        reference, ended = undisturbed.ended[name], outside.ended.get(name)
        told, told_here = undisturbed.results[name], outside.results[name]
        if ended is None or (ended.status != reference.status):
            lost[name] = f"{ended and ended[:2]} instead of {reference[:2]}, {told_here}"
        elif ended != reference or told_here not in (told, (None, ["closed"])):
            moved[name] = f"{len(ended.steps)} steps, {told_here} instead of {len(reference.steps)}, {told}"
        outside.counts["runs halted"] += reference.status in ("QUARANTINE", "DEAD_LETTER")
    return outside, lost, moved


def halts(recording: Recording) -> bool:
    """Whether the breaker refuses one of its calls."""
    at = trip(LoopDetectorPolicy().detector, recording).refused
    return at is not None and at + 1 < len(recording["steps"])


def measure(
    recordings: Sequence[Recording], wanted: int, seed: int, folder: Path, *, is_breaker_on: bool
) -> dict[str, Any]:
    draw = random.Random(seed)
    chosen = [each for each in recordings if halts(each)] if is_breaker_on else list(recordings)
    draw.shuffle(chosen)
    del chosen[wanted:]
    most_steps = max(len(each["steps"]) for each in chosen) + 1
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    for first in range(0, len(chosen), BATCH):
        runs = {f"run-{first + at}": each for at, each in enumerate(chosen[first : first + BATCH])}
        place, moved = folder / str(first), {}
        if is_breaker_on:
            place.mkdir()
            outside, lost, moved = halted(place, runs, draw, most_steps)
        else:
            outside, lost = replayed(place, runs, draw, most_steps)
        counts.update(outside.counts)
        counts.update({
            "runs": len(runs), "steps": sum(len(ended.steps) for ended in outside.ended.values()),
            "runs killed": sum(outside.kills[name] > 0 for name in runs), "outcomes changed": len(outside.changed),
            "runs lost": len(lost), "halts moved": len(moved), "findings of verify": outside.findings(),
        })  # fmt: skip
        for name, why in (lost | moved).items():
            print(f"{name} ({runs[name]['id']}): {why}", file=sys.stderr)
        done, seconds = counts["runs"], time.monotonic() - begun
        print(f"{done} of {len(chosen)} runs, {counts['processes killed']} kills, {seconds:.0f} s", file=sys.stderr)
    return {name: counts[name] for name in (*PROMISES, *BESIDE)} | {
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 1),
    }


PROMISES = ("calls repeated", "outcomes changed", "runs lost", "halts moved", "findings of verify")
"""What is to be 0."""

BESIDE = (
    "runs", "runs halted", "runs killed", "processes killed", "steps", "calls", "calls in doubt made again", "last failures tried again",
)  # fmt: skip
"""What happened, so that it is seen that something did."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", metavar="FILE", required=True, help="recordings, one JSON object a line, may be gzipped"
    )
    parser.add_argument("--runs", type=int, help="how many of them (500, with --halts 1000), or all there are")
    parser.add_argument("--halts", action="store_true", help="the breaker on, and recordings that it halts")
    parser.add_argument("--seed", type=int, default=1, help="which recordings, and where they are killed")
    parser.add_argument("--dir", default=None, help="where the ledgers are made (default: the temp directory)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    given = parser.parse_args()
    wanted = given.runs or (1000 if given.halts else 500)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        told = measure(read(given.data), wanted, given.seed, Path(folder), is_breaker_on=given.halts)
    if given.json:
        print(json.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name:<28}{value:>12}")
    sys.exit(any(told[name] for name in PROMISES))


if __name__ == "__main__":
    main()
