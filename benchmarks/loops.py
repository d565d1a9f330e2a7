"""How right the loop detectors are on recordings of real agents, beside the published rules taken literally, and what a check costs.

    python benchmarks/loops.py --data recordings.jsonl.gz                      # the table
    python benchmarks/loops.py --data recordings.jsonl.gz --json               # the same for programs
    python benchmarks/loops.py --data recordings.jsonl.gz --leave-one-out      # fixed on all sources but one, measured on that one
    python benchmarks/loops.py --cost                                          # microseconds of a check, early and late in a run

A recording is a line of JSON: `id`, `source`, `set` (`natural`, `synthetic_loop` or `hard_negative`), `success`, `steps` with `tool`,
`args`, `result`, `error` and where the result was cut `result_sha`; the label in `gold`, or at the top where something was injected:
`label`, `kind`, `start`, `end`, `by`. A detector trips at the first verdict that is not ok. That is a hit behind the `start` of a loop,
and a miss at it or before it. It is false on a successful run without a label, and inside of what was read or made as healthy. Calls
that poll (`polling_constant`) are declared `may_repeat`, as a user would; nothing else is declared.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from agent_run_ledger import LoopDetectorPolicy
from agent_run_ledger.rules.loops.breaker import Breaker
from agent_run_ledger.rules.loops.calls import Asked, Call
from agent_run_ledger.rules.loops.policy import Detector
from agent_run_ledger.rules.loops.signs import OK, Cycle, Identical, NothingNew, Repetition, SimilarInputs
from agent_run_ledger.words import Verdict

Recording = dict[str, Any]
Make = Callable[[], Detector]

# --- what is compared -------------------------------------------------------------------------------------------------


class Literally:
    """Equal calls with an equal outcome in a row, and nothing else."""

    def __init__(self, limit: int = 3) -> None:
        self._sign, self._calls = Identical(limit), deque[Call](maxlen=limit)

    def observe(self, call: Call) -> Verdict:
        self._calls.append(call)
        verdict, _ = self._sign.read(list(self._calls))
        return verdict

    def continues(self, asked: Asked) -> bool:
        return self._sign.continues(asked, self._calls)


class Cosine:
    """`limit` inputs of one tool in a row, each with a cosine of at least `threshold` to the one before. Outcomes count for nothing."""

    def __init__(self, threshold: float = 0.92, limit: int = 3, *, with_answers: bool = False) -> None:
        self._threshold, self._limit, self._with_answers = threshold, limit, with_answers
        self._last: Asked | None = None
        self._numbers: list[int] = []

    def observe(self, call: Call) -> Verdict:
        text = f"{call.text} {call.answer}" if self._with_answers else call.text
        asked = Asked(call.tool, call.input + call.outcome * self._with_answers, text)
        if self._last is None or asked.likeness(self._last, None) < self._threshold:
            self._numbers.clear()
        self._last = asked
        self._numbers.append(call.number)
        if len(self._numbers) < self._limit or call.may_repeat:
            return OK
        return Verdict("suspected", "cosine", "the last inputs are alike", tuple(self._numbers[-self._limit :]))

    def continues(self, asked: Asked) -> bool:
        return self._last is not None and asked.likeness(self._last, None) >= self._threshold


def detectors() -> dict[str, Make]:
    return {
        "default policy": LoopDetectorPolicy().detector,
        "identical calls, N=3": lambda: Detector(Literally()),
        "cosine of inputs, 0.92": lambda: Detector(Cosine()),
        "cosine of steps, 0.92": lambda: Detector(Cosine(with_answers=True)),
    }


# --- one recording ----------------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """Where a detector trips, from 0, and where a ledger halts: before the next call that goes on with the pattern."""

    said: int | None
    refused: int | None


def label(recording: Recording) -> dict[str, Any] | None:
    return recording["gold"] if recording["set"] == "natural" else recording


def observed(recording: Recording, at: int) -> tuple[Any, ...]:
    """The arguments for `Detector.observe` of one step."""
    step = recording["steps"][at]
    result = step["result"]
    if "result_sha" in step:
        result = f"{result} …sha {step['result_sha']}"  # two cut results are equal only if the whole ones are
    polls = recording["set"] == "hard_negative" and recording["kind"] == "polling_constant"
    may_repeat = polls and recording["start"] <= at <= recording["end"]
    return step["tool"], step["args"], result if step["error"] is None else None, step["error"], may_repeat


def trip(make: Make, recording: Recording) -> Trip:
    detector, said = make(), None
    steps = recording["steps"]
    for at in range(len(steps)):
        if detector.observe(*observed(recording, at)).level == "ok":
            continue
        said = at if said is None else said
        if at + 1 == len(steps) or detector.continues(steps[at + 1]["tool"], steps[at + 1]["args"]):
            return Trip(said, at)
    return Trip(said, None)


# --- all of them ------------------------------------------------------------------------------------------------------


class Score:
    """Shares by name, and how many steps of a loop were made on average before it was halted."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.steps: list[int] = []

    def add(self, recording: Recording, at: int | None) -> None:
        gold = label(recording)
        kind = gold["label"] if gold else None
        if kind == "loop":
            assert gold is not None
            is_hit = at is not None and at > gold["start"]
            group = gold["by"] if recording["set"] == "natural" else gold["kind"]
            self._count(f"recall, {_SETS[recording['set']]}: {group}", is_hit)
            self._count(f"recall, {_SETS[recording['set']]}: all", is_hit)
            self.steps.append((at if is_hit and at is not None else gold["end"]) - gold["start"] + 1)
        elif recording["set"] == "hard_negative":
            if at is None or at >= recording["start"]:
                self._count(f"false, injected: {recording['kind']}", at is not None and at <= recording["end"] + 1)
                self._count("false, injected: all", at is not None and at <= recording["end"] + 1)
        elif kind != "ambiguous":
            if recording["success"] is True:
                self._count("false, successful runs", at is not None)
            if kind == "healthy":
                assert gold is not None
                self._count("false, read by eye", at is not None and gold["start"] <= at <= gold["end"] + 1)

    def _count(self, name: str, is_true: bool) -> None:
        self.counts[name][0] += is_true
        self.counts[name][1] += 1

    def share(self, name: str) -> float | None:
        true, of = self.counts.get(name, (0, 0))
        return 100 * true / of if of else None

    def as_data(self) -> dict[str, Any]:
        shares = {name: {"percent": self.share(name), "of": of} for name, (_, of) in sorted(self.counts.items())}
        return {"shares": shares, "loop_steps": statistics.fmean(self.steps) if self.steps else None}


_SETS = {"natural": "natural loops", "synthetic_loop": "injected loops"}


def measure(make: Make, recordings: Iterable[Recording]) -> dict[str, Any]:
    said, refused = Score(), Score()
    for recording in recordings:
        where = trip(make, recording)
        said.add(recording, where.said)
        refused.add(recording, where.refused)
    return {"said": said.as_data(), "refused": refused.as_data()}


def microseconds(make: Make, recordings: Sequence[Recording]) -> float:
    """The mean of one check over all steps, the reading of arguments and results into canonical JSON included."""
    steps = [[observed(recording, at) for at in range(len(recording["steps"]))] for recording in recordings]
    begun = time.process_time()
    for each in steps:
        detector = make()
        for step in each:
            detector.observe(*step)
    return 1e6 * (time.process_time() - begun) / sum(map(len, steps))


# --- leave one source out ---------------------------------------------------------------------------------------------

GRID = tuple(itertools.product((0.88, 0.92, 0.96), (3, 4, 5), (4, 5)))
"""Threshold, calls with similar inputs, steps that told nothing new. What the default policy takes is among them."""


def policy_of(threshold: float, similar: int, nothing_new: int) -> Make:
    signs = (Cycle(), Repetition(3), SimilarInputs(similar, threshold, None), NothingNew(nothing_new, None))
    return lambda: Detector(Breaker(Identical(3), signs))


def merit(score: Score) -> float:
    """Recall of the three kinds of loops, less ten times the share of false trips of the three kinds of healthy runs; then early halts."""
    recalls = ("recall, natural loops: eye", "recall, natural loops: all", "recall, injected loops: all")
    falses = ("false, successful runs", "false, read by eye", "false, injected: all")
    good = sum(score.share(name) or 0 for name in recalls) - 10 * sum(score.share(name) or 0 for name in falses)
    return good - statistics.fmean(score.steps or [0])


def leave_one_out(recordings: Sequence[Recording]) -> dict[str, Any]:
    """For each source: what the setting that is best on all others makes of it."""
    trips = {setting: [trip(policy_of(*setting), each).said for each in recordings] for setting in GRID}

    def score(setting: tuple[float, int, int], source: str, *, is_left: bool) -> Score:
        found = Score()
        for recording, at in zip(recordings, trips[setting], strict=True):
            if (recording.get("host_source", recording["source"]) == source) is is_left:
                found.add(recording, at)
        return found

    told: dict[str, Any] = {}
    together = Score()
    for source in sorted({each.get("host_source", each["source"]) for each in recordings}):
        merits = {setting: merit(score(setting, source, is_left=False)) for setting in GRID}
        best = max(merits, key=merits.__getitem__)
        left = score(best, source, is_left=True)
        told[source] = {"setting": best} | left.as_data()
        for name, (true, of) in left.counts.items():
            together.counts[name][0] += true
            together.counts[name][1] += of
        together.steps += left.steps
    return told | {"all sources": together.as_data()}


# --- what a check costs -----------------------------------------------------------------------------------------------


def costs(late: int = 100_000) -> dict[str, dict[str, float]]:
    """Microseconds of a check with results of 2,000 characters, about step 10 and about step `late`, for several kinds of runs."""
    draw = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(400)]

    def prose(length: int = 2000) -> str:
        return " ".join(draw.choices(known, k=length // 4))[:length]

    def record() -> str:
        fields = {f"{draw.choice(known)}_{number}": f"{draw.choice(known)} {draw.random()}" for number in range(50)}
        return json.dumps(fields)[:2000]

    same = prose()
    kinds: dict[str, Callable[[int], tuple[Any, ...]]] = {
        "new texts": lambda at: ("read", {"path": f"src/{at}"}, prose()),
        "new records": lambda at: ("get", {"order": at}, record()),
        "one call, new records": lambda at: ("get", {"order": 1}, record()),
        "one call, one answer": lambda at: ("get", {"order": 1}, same),
        "new errors": lambda at: ("run", {"command": prose(200)}, None, f"ValueError: {prose()}"),
        "one error, new calls": lambda at: ("run", {"command": prose(200)}, None, f"ValueError: {same}"),
        "one answer, reworded calls": lambda at: ("find", {"text": f"{same[:200]} {prose(40)}"}, same),
    }
    told = {}
    for name, kind in kinds.items():
        steps = [kind(at) for at in range(64)]
        early = [_microseconds_of(LoopDetectorPolicy().detector(), steps[:20]) for _ in range(50)]
        detector = LoopDetectorPolicy().detector()
        for at in range(late):
            detector.observe(*steps[at % 64])
        told[name] = {
            "step 10": statistics.median(early),
            f"step {late}": statistics.median(_microseconds_of(detector, steps) for _ in range(50)),
        }
    return told


def _microseconds_of(detector: Detector, steps: Sequence[tuple[Any, ...]]) -> float:
    begun = time.process_time()  # what else the machine does is not counted
    for step in steps:
        detector.observe(*step)
    return 1e6 * (time.process_time() - begun) / len(steps)


# --- the table --------------------------------------------------------------------------------------------------------


def read(path: str) -> list[Recording]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def table(columns: dict[str, dict[str, Any]], title: str) -> None:
    names = sorted({name for column in columns.values() for name in column["shares"]})
    width = max(map(len, names)) + 2
    print(f"\n{title}\n{'':<{width}}" + "".join(f"{name:>24}" for name in columns))
    for name in names:
        row = [column["shares"].get(name) for column in columns.values()]
        cells = [f"{cell['percent']:.1f} % of {cell['of']}" if cell else "" for cell in row]
        print(f"{name:<{width}}" + "".join(f"{cell:>24}" for cell in cells))
    means = [f"{column['loop_steps']:.2f}" if column["loop_steps"] is not None else "" for column in columns.values()]
    print(f"{'loop steps made before the halt':<{width}}" + "".join(f"{mean:>24}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="recordings, one JSON object a line, may be gzipped")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="fix what can be fixed on all sources but one, measure on that one"
    )
    parser.add_argument(
        "--cost", action="store_true", help="what a check costs, early and late in a run; needs no recordings"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    options = parser.parse_args()
    if options.data is None and not options.cost:
        parser.error("--data FILE or --cost")
    told: dict[str, Any] = {}
    if options.cost:
        told["microseconds"] = costs()
    if options.data is not None:
        recordings = read(options.data)
        told["data"] = {"recordings": len(recordings), "sha256": _digest(options.data)}
        if options.leave_one_out:
            told["left out"] = leave_one_out(recordings)
        else:
            for name, make in detectors().items():
                told[name] = measure(make, recordings) | {"microseconds": microseconds(make, recordings)}
    if options.json:
        print(json.dumps(told, indent=1))
        return
    if "microseconds" in told:
        for name, each in told["microseconds"].items():
            print(f"{name:<30}" + "".join(f"{when:>14} {value:7.1f} µs" for when, value in each.items()))
    if "left out" in told:
        table(told["left out"], "Measured on the source that was left out")
        for source, each in told["left out"].items():
            if "setting" in each:
                print(f"{source}: threshold, similar inputs, nothing new = {each['setting']}")
    elif options.data is not None:
        chosen = {name: told[name] for name in detectors()}
        table({name: each["said"] for name, each in chosen.items()}, "Tripped: the first verdict that is not ok")
        table({name: each["refused"] for name, each in chosen.items()}, "Halted: the first call that goes on with it")
        for name, each in chosen.items():
            print(f"{name}: {each['microseconds']:.1f} µs a check")


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
