"""How things are measured: subjects in processes of their own, which take turns with their floor; medians, spread, and the machine.

The floor F is measured before and after each burst of a subject's steps, so that both have met the same machine. A ratio is that of one
burst; what is told is the median over bursts. The half of a subject's bursts counts whose floors were the quickest: whoever else was
busy on the machine is measured less.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUBJECTS = HERE / "subjects"
PEERS = {f"on_{name}": name for name in ("absurd", "burr", "chowki", "dbos", "langgraph")}
"""The programs in `subjects` that need an environment of their own, and its name: `.venv-NAME`, of `requirements/bench-NAME.txt`."""

OURS = "ledger"
"""The program in `subjects` that is us."""

ANSWER_SECONDS = 300.0
"""A subject that is silent for longer is given up."""


class NotMeasured(Exception):
    """A subject could not be installed, started or asked; the message is the last that it said."""


# --- subjects ---------------------------------------------------------------------------------------------------------


class Subject:
    """A process that answers what it is asked, as `subjects/talk.py` says."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._complaints, text=True, env=environment, cwd=tempfile.gettempdir()
        )  # fmt: skip
        told = self._hear()
        self.name: str = told["name"]
        """With its version."""
        self.promise: str = told["promise"]
        """What is durable when one of its steps is over, and by which setting."""

    def ask(self, verb: str, *given: Any) -> Any:
        with suppress(BrokenPipeError):  # it is gone; what it said last is read below
            print(json.dumps([verb, *given]), file=self._pipe(self._process.stdin), flush=True)
        return self._hear()

    def close(self) -> None:
        """End it; whatever it still had to do is not waited for."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            with suppress(BrokenPipeError):
                self._pipe(pipe).close()

    def _hear(self) -> Any:
        watch = threading.Timer(ANSWER_SECONDS, self._process.kill)
        watch.start()
        try:
            line = self._pipe(self._process.stdout).readline()
        finally:
            watch.cancel()
        if not line:
            status = self._process.wait()
            self._complaints.seek(0)
            said = self._complaints.read()
            self.close()
            raise NotMeasured(last_words(said, status))
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@dataclass
class Started:
    """Subjects that answer, and what those said that do not."""

    subjects: dict[str, Subject] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def trying(self, name: str, ask: Callable[..., T], *given: Any) -> T | None:
        """Ask one of them; where that fails it is no longer one of them, and the answer is None."""
        try:
            return ask(self.subjects[name], *given)
        except NotMeasured as error:
            del self.subjects[name]
            self.errors[name] = str(error)
            return None


def last_words(said: str, status: int) -> str:
    """The last line that a process wrote about its end."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"exit status {status}")


# --- turns ------------------------------------------------------------------------------------------------------------


class Burst(NamedTuple):
    """Some steps of a subject, and the floor around them, in microseconds each."""

    floor: float
    taken: list[float]

    @property
    def p50(self) -> float:
        return statistics.median(self.taken)


Rounds = Mapping[str, Sequence[Burst]]


def in_turns(floor: Subject, started: Started, *, rounds: int, seconds: float) -> dict[str, list[Burst]]:
    """Bursts of about so many seconds, all subjects in each round, the floor before and after each.

    A subject that fails is among the errors from then on.
    """

    def burst(subject: Subject, count: int) -> list[float]:
        taken: list[float] = subject.ask("steps", count)
        return taken[len(taken) // 10 :]  # the first ones find cold caches, as nobody's steps in a row do

    def how_many(subject: Subject) -> int:
        subject.ask("steps", 5)
        each = statistics.median(subject.ask("steps", 20))
        return int(min(2_000, max(10, seconds * 1e6 / each)))

    counts = {name: count for name in list(started.subjects) if (count := started.trying(name, how_many))}
    least = max(20, how_many(floor) // 2)
    measured: dict[str, list[Burst]] = {name: [] for name in counts}
    for _ in range(rounds):
        before = statistics.median(burst(floor, least))
        for name in list(started.subjects):
            taken = started.trying(name, burst, counts[name])
            if taken is None:
                del measured[name]
                continue
            after = statistics.median(burst(floor, least))
            measured[name].append(Burst((before + after) / 2, taken))
            before = after
    return measured


def quietest(bursts: Sequence[Burst]) -> list[Burst]:
    """The half of them whose floors were the quickest, at least one."""
    return sorted(bursts, key=lambda burst: burst.floor)[: (len(bursts) + 1) // 2]


def cost(bursts: Sequence[Burst]) -> dict[str, float]:
    """What a step of these bursts costs: the median and the 99th percentile in microseconds, and in floors with the quartiles of that."""
    counted = quietest(bursts)
    every = sorted(each for burst in counted for each in burst.taken)
    ratios = [burst.p50 / burst.floor for burst in counted]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "p50 µs": statistics.median(burst.p50 for burst in counted),
        "p99 µs": every[int(len(every) * 0.99)],
        "of F": statistics.median(ratios),
        "from": low,
        "to": high,
    }


def times(rounds: Rounds, name: str, other: str) -> float:
    """How many times as long as a step of `other` one of `name` takes: the median over the rounds."""
    pairs = zip(rounds[name], rounds[other], strict=True)
    return statistics.median(one.p50 / two.p50 for one, two in pairs)


def floor_cost(rounds: Rounds) -> dict[str, float]:
    """What the floor itself took around all of them."""
    floors = [burst.floor for bursts in rounds.values() for burst in quietest(bursts)]
    return {"p50 µs": statistics.median(floors), "of F": 1.0}


# --- one run of the benchmarks ----------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where is measured, and how long."""

    disk: Path
    memory: Path | None
    """A folder in memory (tmpfs), where the machine has one."""
    is_quick: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    """Each subject's name with its version, by its program."""
    _places: int = 0
    _pythons: dict[str, Path | NotMeasured] = field(default_factory=dict)

    def say(self, what: str) -> None:
        """Tell who waits what is being done."""
        print(f"{datetime.now().astimezone():%H:%M:%S} {what}", file=sys.stderr, flush=True)

    def place(self, folder: Path | None = None) -> Path:
        """A new path for a database, in a folder of its own."""
        self._places += 1
        made = (folder or self.disk) / f"{self._places:04}"
        made.mkdir()
        return made / "ledger.db"

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment, which is made where it is missing."""
        if peer not in self._pythons:
            self.say(f"the environment of {peer}")
            command = [sys.executable, str(ROOT / "tools" / "environment.py"), f".venv-{peer}", f"bench-{peer}"]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            python = ROOT / f".venv-{peer}" / "bin" / "python"
            said = NotMeasured(f"its environment: {last_words(done.stderr, done.returncode)}")
            self._pythons[peer] = said if done.returncode else python
        found = self._pythons[peer]
        if isinstance(found, NotMeasured):
            raise found
        return found

    def command(self, program: str, *given: object) -> list[str]:
        """What starts a program of `subjects`, in the peer's environment or in this one."""
        python = self.python(PEERS[program]) if program in PEERS else Path(sys.executable)
        return [str(python), str(SUBJECTS / f"{program}.py"), *map(str, given)]

    def once(self, program: str, *given: object) -> dict[str, float]:
        """What a program of `subjects` says that answers once and ends."""
        command = self.command(program, *given)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment(program),
                cwd=tempfile.gettempdir(), timeout=ANSWER_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"silent for {ANSWER_SECONDS:.0f} s") from None
        if done.returncode:
            raise NotMeasured(last_words(done.stderr, done.returncode))
        told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return told

    @contextmanager
    def subject(self, program: str, place: object, *options: str) -> Iterator[Subject]:
        """One of `subjects`, started for the block."""
        subject = Subject(self.command(program, place, *options), environment(program))
        if program in PEERS or program == OURS:
            self.versions.setdefault(program, subject.name)
        try:
            yield subject
        finally:
            subject.close()

    @contextmanager
    def subjects(self, wanted: Mapping[str, tuple[str, object, Sequence[str]]], *trial: Any) -> Iterator[Started]:
        """Several of them, by name: program, place and options. What does not start, or fails at the trial, is told in `errors`."""
        with ExitStack() as stack:
            started = Started()
            for name, (program, place, options) in wanted.items():
                try:
                    started.subjects[name] = stack.enter_context(self.subject(program, place, *options))
                except NotMeasured as error:
                    started.errors[name] = str(error)
                else:
                    started.trying(name, Subject.ask, *trial)
            yield started
            for name, why in started.errors.items():
                self.say(f"not measured: {name}: {why}")


def environment(program: str) -> dict[str, str]:
    """The environment variables of a program: our own finds this checkout, a peer finds what is installed beside it."""
    return installed() if program in PEERS else installed() | {"PYTHONPATH": str(ROOT / "src")}


def installed() -> dict[str, str]:
    """Environment variables with which an interpreter finds what is installed beside it, and nothing else."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@contextmanager
def bench(folder: str | None, *, is_quick: bool) -> Iterator[Bench]:
    """Folders on a disk and in memory, for the block."""
    shared = Path("/dev/shm")
    with ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True))
        memory = None
        if os.access(shared, os.W_OK):
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared, ignore_cleanup_errors=True)))
        yield Bench(Path(disk), memory, is_quick)


# --- the machine ------------------------------------------------------------------------------------------------------


def machine(disk: Path) -> dict[str, object]:
    """What this was measured on."""
    return {
        "processor": _line_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "filesystem": filesystem(disk),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
    }


def filesystem(folder: Path) -> str:
    """The type of the filesystem of a folder, as the kernel names it."""
    best = ("", "unknown")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mounted, kind, *_ = line.split(" ")
            if folder.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
                best = (mounted, kind)
    return best[1]


def _line_of(path: str, name: str) -> str | None:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def commit() -> str:
    """The commit of this checkout, with a plus sign where something was changed since."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def load() -> list[float]:
    """How many processes wanted a core in the last one, five and fifteen minutes."""
    return [round(each, 2) for each in os.getloadavg()]


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """The seconds that the block took, in a list of one."""
    taken: list[float] = []
    begun = time.perf_counter()
    yield taken
    taken.append(time.perf_counter() - begun)
