"""What a power cut may leave of a ledger: a program is recorded by strace, and its disk rebuilt as it may look after each call.

The disk that is assumed promises no more than POSIX does:

- What was written to a file since its last sync is kept, dropped or torn, each write for itself, in any order. Only sectors of 512
  bytes are whole. A file that became longer may be that long, with zeros where bytes are missing.
- A name that was made or removed since the last sync of its folder is there or not. To sync a file does not keep its name.
- What a sync that failed should have kept is not kept by a later one either, until it is written again: Linux takes it for written.
  That holds for contents only. File systems keep names in a journal, and write nothing more when that fails.

The index beside the log is worth nothing after a power cut, so nonsense is put in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from agent_run_ledger import AgentRunLedger, Effect, RunRecord, StepInDoubt, StepRecord
from agent_run_ledger.stores import clock
from support.powercut_programs import PROGRAMS, Outside, parks
from support.processes import environment
from support.witness import digest

# --- the recording ----------------------------------------------------------------------------------------------------


class Write(NamedTuple):
    path: str
    offset: int
    data: bytes


class Resize(NamedTuple):
    path: str
    size: int


class Make(NamedTuple):
    path: str
    is_folder: bool


class Remove(NamedTuple):
    path: str


class Sync(NamedTuple):
    path: str
    since: int
    """The number of the first event that had not happened when this sync was called: it may not cover that one."""
    is_done: bool


class Told(NamedTuple):
    facts: dict[str, Any]


Event = Write | Resize | Make | Remove | Sync | Told

_TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,fsync,fdatasync,sync_file_range,"
    "copy_file_range,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat"
)
_HEX = r"((?:\\x[0-9a-f]{2})*)"
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)")
_FILE = re.compile(rf"\d+<{_HEX}>(\(deleted\))?(?:, )?")
_STRING = re.compile(rf'"{_HEX}"')


@dataclass
class Recording:
    """What a program did to the files of its ledger, and what it told the outside world meanwhile."""

    program: str
    folder: Path
    events: list[Event]
    faults: int
    """How many calls were made to fail."""

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.facts for event in self.events if isinstance(event, Told) and event.facts["kind"] == kind]


def record(
    program: str, folder: Path, durability: str, *weakened: str, fault: str | None = None, log_pages: int = 16
) -> Recording:
    """Run the program under strace, with its ledger in the new `folder`; with a `fault` as strace's `inject` takes it.

    After `log_pages` pages the log is emptied into the file and begun anew: often, so that this is cut as well.
    """
    folder.mkdir()
    trace, witness = folder.with_suffix(".trace"), folder.with_suffix(".witness")
    command = ["strace", "--follow-forks", "--seccomp-bpf", "--decode-fds=path", "--quiet=all", "--strings-in-hex=all"]
    command += ["--string-limit=10000000", f"--trace={_TRACED}", f"--output={trace}"]
    command += [] if fault is None else [f"--inject={fault}"]
    command += [sys.executable, "-m", "support.powercut_programs", program, str(folder / "agent.db"), str(witness)]
    subprocess.run([*command, durability, f"{log_pages}", *weakened], env=environment(), check=True, timeout=100)
    lines = trace.read_text(encoding="ascii").splitlines()
    trace.unlink()
    faults = sum(line.endswith("(INJECTED)") for line in lines)
    return Recording(program, folder, list(Trace(str(folder), str(witness)).events(lines)), faults)


class Trace:
    """Reads what strace wrote. A call counts when it has returned, and what is told when the program begins to tell it."""

    def __init__(self, folder: str, witness: str) -> None:
        self._folder = folder
        self._witness = witness
        self._number = 0
        self._files: set[str] = set()
        self._begun: dict[str, tuple[str, int]] = {}

    def events(self, lines: Iterable[str]) -> Iterator[Event]:
        for line in lines:
            for event in self._of(line):
                self._number += 1
                yield event

    def _of(self, line: str) -> Iterator[Event]:
        parts = _LINE.fullmatch(line)
        if parts is None:
            assert "+++" in line or "---" in line, line
            return
        process, name, begun_name, rest = parts.groups()
        since = self._number
        if name is None:
            name = begun_name
            if (told := self._told(name, rest)) is not None:
                yield told
            if rest.endswith("<unfinished ...>"):
                self._begun[process] = (rest.removesuffix("<unfinished ...>"), since)
                return
        else:
            begun, since = self._begun.pop(process)
            rest = begun + rest
        given, _, answer = rest.rpartition(" = ")
        if (event := self._event(name, given.rstrip().removesuffix(")"), answer, since)) is not None:
            yield event

    def _told(self, name: str, rest: str) -> Told | None:
        file = _FILE.match(rest)
        if name != "write" or file is None or _text(file[1]) != self._witness:
            return None
        said = _STRING.match(rest, file.end())
        assert said is not None, rest
        return Told(json.loads(_bytes(said[1])))

    def _event(self, name: str, given: str, answer: str, since: int) -> Event | None:
        is_done = not answer.startswith("-1 ")
        file = _FILE.match(given)
        if file is not None:
            path, rest = _text(file[1]), given[file.end() :]
            if file[2] is not None or not self._is_ours(path):
                return None
            match name:
                case "fsync" | "fdatasync":
                    return Sync(path, since, is_done)
                case "pwrite64" if is_done:
                    said = _STRING.match(rest)
                    assert said is not None, given[:200]
                    length, offset = rest[said.end() :].removeprefix(", ").split(", ")
                    assert answer == length, "a write that was cut short"
                    return Write(path, int(offset), _bytes(said[1]))
                case "ftruncate" if is_done:
                    return Resize(path, int(rest))
        else:
            paths = [_text(said[1]) for said in _STRING.finditer(given)]
            if not any(map(self._is_ours, paths)):
                return None
            match name:
                case "openat" if "O_TRUNC" not in given:
                    if not is_done or "O_CREAT" not in given or paths[0] in self._files:
                        return None
                    self._files.add(paths[0])
                    return Make(paths[0], is_folder=False)
                case "mkdir" if is_done:
                    return Make(paths[0], is_folder=True)
                case "unlink" if is_done:
                    self._files.discard(paths[0])
                    return Remove(paths[0])
        assert not is_done, f"the model of the disk does not know {name}({given[:200]})"
        return None

    def _is_ours(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self._folder}/") and not path.endswith("-shm")


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def _text(escaped: str) -> str:
    return os.fsdecode(_bytes(escaped))


# --- the disk ---------------------------------------------------------------------------------------------------------

Piece = tuple[int, int]
"""From which byte of a write on, and up to which."""
Kept = dict[int, "list[Piece] | None"]
"""Which of the changes that may be lost are kept, by number: whole (None), or only these pieces of a write."""
Image = dict[str, "bytes | None"]
"""The files of a folder by name, with what is in them; None for a folder."""


@dataclass(eq=False)
class Change:
    """Something done to a file, or a name that was made or removed."""

    number: int
    event: Write | Resize | Make | Remove
    file: File | None = None
    """What a made name stands for; None for a folder."""
    is_certain: bool = False
    """A power cut cannot undo it."""
    is_forsaken: bool = False
    """The sync that should have kept it failed, so that no later one keeps it."""


@dataclass(eq=False)
class File:
    """What stands in a file for certain, and what was done to it since, in order."""

    contents: bytes = b""
    changes: list[Change] = field(default_factory=list)

    def read(self, kept: Kept) -> bytes:
        """The file with what is certain and what is `kept`."""
        read = bytearray(self.contents)
        for change in self.changes:
            if not change.is_certain and change.number not in kept:
                continue
            match change.event:
                case Write(_, offset, data):
                    pieces = None if change.is_certain else kept[change.number]
                    for begin, end in [(0, len(data))] if pieces is None else pieces:
                        read.extend(bytes(max(0, offset + begin - len(read))))
                        read[offset + begin : offset + end] = data[begin:end]
                case Resize(_, size):
                    del read[size:]
                    read.extend(bytes(size - len(read)))
        return bytes(read)

    def fold(self) -> None:
        """Put what is certain into the contents, up to the first change that is not."""
        first = next((at for at, change in enumerate(self.changes) if not change.is_certain), len(self.changes))
        if first:
            self.contents = File(self.contents, self.changes[:first]).read({})
            del self.changes[:first]


class Disk:
    """A folder, and all that is in it, as it is and as a power cut may leave it."""

    def __init__(self, folder: Path, *, is_lying: bool = False) -> None:
        self._folder = str(folder)
        self._is_lying = is_lying
        """It acknowledges every sync and does none."""
        self._number = 0
        self._files: dict[str, File] = {}
        self._names: list[Change] = []

    def perform(self, event: Event) -> None:
        number, self._number = self._number, self._number + 1
        match event:
            case Write() | Resize():
                self._files[event.path].changes.append(Change(number, event))
            case Make(path, is_folder):
                made = Change(number, event)
                if not is_folder:
                    made.file = self._files[path] = File()
                self._names.append(made)
            case Remove(path):
                del self._files[path]
                self._names.append(Change(number, event))
            case Sync() if not self._is_lying:
                self._sync(event)

    def _sync(self, sync: Sync) -> None:
        file = self._files.get(sync.path)
        named = [name for name in self._names if os.path.dirname(name.event.path) == sync.path]
        for change in named if file is None else file.changes:
            if change.number < sync.since and not change.is_certain:
                change.is_certain = sync.is_done and not change.is_forsaken
                change.is_forsaken = not change.is_certain and file is not None
        if file is not None:
            file.fold()

    def uncertain(self) -> list[Change]:
        """What a power cut may undo, the oldest first."""
        files = [name.file for name in self._names if name.file is not None]
        changes = [change for file in files for change in file.changes]
        return sorted(
            (change for change in changes + self._names if not change.is_certain), key=lambda change: change.number
        )

    def image(self, kept: Kept, *, is_as_long: bool = False) -> Image:
        """The disk with what is certain and what is `kept`; if `is_as_long` every file as long as if all had been."""
        found: dict[str, File | None] = {}
        for change in self._names:
            if change.is_certain or change.number in kept:
                if isinstance(change.event, Make):
                    found[change.event.path] = change.file
                else:
                    found.pop(change.event.path, None)
        image: Image = {}
        for path, file in found.items():
            folder, name = os.path.dirname(path), os.path.relpath(path, self._folder)
            if folder != self._folder and folder not in found:
                continue
            if file is None:
                image[name] = None
            elif is_as_long:
                everything: Kept = dict.fromkeys(change.number for change in file.changes)
                image[name] = file.read(kept).ljust(len(file.read(everything)), b"\0")
            else:
                image[name] = file.read(kept)
        return image


def torn(write: Write, chance: random.Random) -> list[Piece]:
    """Some sectors or pages of a write, seldom all or none of them."""
    size = chance.choice((512, 512, 4096))
    first = size - write.offset % size
    bounds = [0, *range(first, len(write.data), size), len(write.data)]
    return [piece for piece in pairwise(bounds) if chance.random() < 0.5]


def fates(changes: list[Change], chance: random.Random, many: int, is_last: bool) -> Iterator[tuple[Kept, bool]]:
    """What may be kept of the changes that may be lost, and whether files are as long as they were.

    `many` are drawn at random. Before a sync, when there are most of them (`is_last`), each is also lost, torn and kept alone; of
    more than 6 * `many` only that many are.
    """

    def tear(change: Change) -> list[Piece] | None:
        return torn(change.event, chance) if isinstance(change.event, Write) else None

    everything: Kept = dict.fromkeys(change.number for change in changes)
    names: Kept = dict.fromkeys(change.number for change in changes if isinstance(change.event, Make | Remove))
    yield {}, False
    if not changes:
        return
    yield everything, False
    yield names, False
    yield names, True
    some = changes if len(changes) <= 6 * many else chance.sample(changes, 6 * many)
    for change in [*(some if is_last else []), changes[-1]]:
        yield {number: None for number in everything if number != change.number}, chance.random() < 0.5
        yield everything | {change.number: tear(change)}, False
        yield names | {change.number: None}, chance.random() < 0.5
    for _ in range(many):
        share = chance.random()
        kept: Kept = {
            change.number: tear(change) if chance.random() < 0.5 else None
            for change in changes
            if chance.random() < share
        }
        yield kept, chance.random() < 0.5


# --- the judgement ----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What an image was opened to, and what came of its program when it was run again."""

    damage: list[str] = field(default_factory=list)
    """What may never be, whatever was lost."""
    statuses: dict[str, str] = field(default_factory=dict)
    steps: dict[tuple[str, str], StepRecord] = field(default_factory=dict)
    """The steps by run and position, before the program was run again."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """What it told the outside world when it was run again."""


@dataclass
class Report:
    """How many states were tried, and what was wrong with how many of them."""

    cuts: int = 0
    states: int = 0
    images: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    damage: Counter[str] = field(default_factory=Counter)
    receipts: Counter[str] = field(default_factory=Counter)
    """What receipts said, and in how many states."""

    def __str__(self) -> str:
        return (
            f"{self.cuts} cuts, {self.states} states, {self.images} different ones; lost: {dict(self.losses)}; "
            f"damaged: {dict(self.damage)}; receipts: {dict(self.receipts)}"
        )


def everywhere(number: int, event: Event | None) -> bool:
    return True


def where_something_was_told(number: int, event: Event | None) -> bool:
    return isinstance(event, Told)


def cut(
    recording: Recording,
    many: int,
    *,
    where: Callable[[int, Event | None], bool] = everywhere,
    is_lying: bool = False,
) -> Report:
    """Cut the power before the first event and after each, and judge what is left: the plain variants, and `many` random ones.

    Only at the end and `where` the number or the event is wanted. `is_lying`: on a disk that acknowledges every sync and does none.
    """
    report = Report()
    disk = Disk(recording.folder, is_lying=is_lying)
    known: dict[tuple[bytes, frozenset[str]], Found] = {}
    told: list[dict[str, Any]] = []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for number, event in enumerate([None, *recording.events]):
            if event is not None:
                disk.perform(event)
            if isinstance(event, Told):
                told.append(event.facts)
            is_end = number == len(recording.events)
            if not (is_end or where(number, event)):
                continue
            report.cuts += 1
            is_last = is_end or isinstance(recording.events[number], Sync)
            called = {facts["key"]: facts["position"] for facts in told if facts.get("has_receipt")}
            for kept, is_as_long in fates(disk.uncertain(), random.Random(number), many, is_last):
                image = disk.image(kept, is_as_long=is_as_long)
                name = _name_of(image), frozenset(called)
                if name not in known:
                    known[name] = resume(recording.program, image, Path(folder, "left"), called)
                found = known[name]
                report.states += 1
                report.damage.update(set(found.damage))
                report.losses.update(set(losses(told, found)))
                report.receipts.update({facts["verdict"] for facts in found.told if facts["kind"] == "asked"})
    report.images = len({image for image, _ in known})
    return report


def _name_of(image: Image) -> bytes:
    name = hashlib.sha1(usedforsecurity=False)
    for path in sorted(image):
        contents = image[path]
        name.update(f"{path} {None if contents is None else len(contents)}\0".encode())
        name.update(contents or b"")
    return name.digest()


def resume(program: str, image: Image, folder: Path, called: dict[str, str]) -> Found:
    """Open what is left in the `folder`, on another boot of the machine, look at it, and run its program again.

    `called`: where the steps stand whose receipts the outside world has, by their keys.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in sorted(image):  # a folder before what is in it
        contents = image[name]
        if contents is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(contents)
            if name.endswith("-wal"):
                (folder / name.replace("-wal", "-shm")).write_bytes(b"nonsense" * 4096)
    found = Found()

    def opened() -> AgentRunLedger:
        return AgentRunLedger(folder / "agent.db", durability="process")

    def look() -> Iterator[tuple[RunRecord, list[StepRecord]]]:
        with opened() as ledger:
            found.damage += [f"not clean: {finding.code}" for finding in ledger.verify().findings]
            for run in ledger.runs():
                yield run, ledger.steps(run.run_id)

    def note(kind: str, **facts: Any) -> None:
        found.told.append({"kind": kind, **facts})

    with mock.patch.object(clock, "_boot_id", return_value="the next boot"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an undeclared step that is dispatched again says so
        try:
            for run, steps in look():
                found.statuses[run.run_id] = run.status
                found.steps |= {(run.run_id, step.position): step for step in steps}
            with suppress(StepInDoubt):
                PROGRAMS[program](opened, Outside(note, called))
            for run, steps in look():
                if run.status != ("BLOCKED" if any(map(parks, steps)) else "COMPLETED"):
                    found.damage.append(f"a run that is {run.status}")
        except Exception as error:
            found.damage.append(type(error).__name__)
    for facts in found.told:
        step = found.steps.get(_place(facts)) if facts["kind"] == "called" else None
        if step is not None and step.state == "COMPLETED":
            found.damage.append("a completed step was called again")
        if facts["kind"] == "failed":
            found.damage.append(facts["error"])
    return found


def _stored(text: str | None) -> str:
    """The digest of what is stored; empty where that is nothing, or damaged."""
    try:
        return "" if text is None else digest(json.loads(text))
    except ValueError:
        return ""


def _place(facts: dict[str, Any]) -> tuple[str, str]:
    return facts["run"], facts["position"]


def losses(told: Iterable[dict[str, Any]], found: Found) -> Iterator[str]:
    """What was told before the power was cut and does not hold any more, each as its kind."""
    again = {(facts["kind"], facts.get("run"), facts.get("position")): facts for facts in found.told}
    for facts in told:
        kind, run = facts["kind"], facts.get("run")
        if run is None:
            continue
        if run not in found.statuses:
            yield "a run"
            continue
        if kind == "finished" and found.statuses[run] != "COMPLETED":
            yield "an end"
        elif kind == "valued" and found.statuses[run] != "COMPLETED":
            if again.get((kind, run, None), {}).get("value") != facts["value"]:
                yield "a recorded value"
        elif kind == "acknowledged":
            step = found.steps.get(_place(facts))
            if step is None or step.state != "COMPLETED" or _stored(step.output_json) != facts["output"]:
                yield "an outcome"
        elif kind == "called":
            step = found.steps.get(_place(facts))
            called_again = again.get((kind, *_place(facts)))
            if facts["effect"] != Effect.READ and (
                step is None or step.idempotency_key != facts["key"] or _stored(step.arguments_json) != facts["bytes"]
            ):
                yield "an intent"
            if called_again is not None and called_again["key"] != facts["key"]:
                yield "a key"
            if called_again is not None and facts["effect"] == Effect.MUTATE:
                yield "at most once"
