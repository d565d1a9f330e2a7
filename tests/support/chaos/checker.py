"""The judge of a storm: holds what the store has against what every process saw, and says what was promised and is not so.

It stands on nothing of the engine but the bytes of the entries, and knows no excuse but those that are written down here.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_run_ledger.contract import Head, Row
from support.chaos.journal import Note

_TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "DEAD_LETTER"}
_IN_FLIGHT_SECONDS = 1.0
"""How long a process that was stopped and goes on may take from its last look at the lease to the call."""


@dataclass
class Evidence:
    """What is left when a storm is over."""

    journals: dict[str, list[Note]]
    """What each worker saw, by its name."""
    faults: list[Note]
    """What was done to them, and when."""
    outside: list[Note]
    """What the outside world was asked, and did."""
    logs: dict[str, list[Row]]
    heads: dict[str, Head]
    findings: list[str]
    """What `verify` says."""
    is_death_proved: bool = False
    """Whether the store may take a run from an owner that was killed before his lease has run out."""
    expected: Mapping[str, set[str]] = field(default_factory=dict)
    """The states in which a run may have ended, by run id; any other one: COMPLETED."""

    def notes(self, kind: str) -> list[tuple[str, Note]]:
        """The notes of this kind of all workers, each with the worker's name."""
        return [(name, note) for name, notes in self.journals.items() for note in notes if note["kind"] == kind]


def judge(evidence: Evidence) -> list[str]:
    """Every broken promise, in a sentence each; nothing where all were kept."""
    bodies = {run_id: [json.loads(row.body) for row in rows] for run_id, rows in evidence.logs.items()}
    return [
        *ends(evidence, bodies),
        *one_outcome(evidence, bodies),
        *one_story(evidence),
        *tokens(evidence, bodies),
        *live_leases(evidence),
        *delays(evidence),
        *naps(evidence, bodies),
        *acknowledged(evidence),
        *effects(evidence, bodies),
        *calls(evidence, bodies),
    ]


Bodies = Mapping[str, Sequence[dict[str, Any]]]


def ends(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """All runs have ended as they should, `verify` has no word to say, nobody owns anything, and nothing is due."""
    for run_id, entries in bodies.items():
        state = entries[-1]["state"]
        if state not in evidence.expected.get(run_id, {"COMPLETED"}):
            yield f"{run_id} is {state}, behind {entries[-1]['kind']!r}"
    for run_id, head in evidence.heads.items():
        if head.owner is not None:
            yield f"{run_id} is owned by {head.owner}"
        if head.due_in is not None:
            yield f"{run_id} is due in {head.due_in:.1f} s"
    yield from (f"verify: {finding}" for finding in evidence.findings)


def one_outcome(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """Of one step one outcome is accepted: behind one that has completed no other stands, and each attempt has one at the most."""
    for run_id, entries in bodies.items():
        ended: dict[str, str] = {}
        seen = set()
        for body in entries:
            if body["kind"] != "outcome":
                continue
            position, attempt = body["position"], body["attempt"]
            if ended.get(position) == "completed":
                yield f"{run_id}: entry {body['seq']} is an outcome of {position}, which had completed"
            elif (position, attempt) in seen and not body.get("reconciled"):
                yield f"{run_id}: entry {body['seq']} is a second outcome of attempt {attempt} of {position}"
            ended[position] = body["ok"]
            seen.add((position, attempt))


def one_story(evidence: Evidence) -> Iterator[str]:
    """Whatever a program was told at a place, it was told each time it came there, in whatever process."""
    told: dict[tuple[str, str], str] = {}
    for name, note in evidence.notes("heard"):
        first = told.setdefault((note["run"], note["label"]), note["value"])
        if note["value"] != first:
            yield f"{note['run']}: its program in {name} heard another {note['label']!r} than the one before"


def tokens(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """Fencing tokens never go down: not in a log, not from one claim to a later one, and nothing is written under an older one."""
    for run_id, entries in bodies.items():
        highest = 0
        for body in entries:
            if body["token"] < highest:
                yield f"{run_id}: entry {body['seq']} has token {body['token']}, behind {highest}"
            highest = max(highest, body["token"])
    given: dict[tuple[str, int], str] = {}
    claims: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, note in evidence.notes("claimed"):
        owner = given.setdefault((note["run"], note["token"]), name)
        if owner != name:
            yield f"{note['run']}: token {note['token']} was given to {owner} and to {name}"
        claims[note["run"]].append((note["at"], note["token"]))
    for kind in ("claimed", "written", "renewed"):
        for name, note in evidence.notes(kind):
            newer = [token for at, token in claims[note["run"]] if at < note["began"] and token > note["token"]]
            if newer:
                yield (
                    f"{note['run']}: {name} has {kind} under token {note['token']}, and {max(newer)} had been given before"
                )


def live_leases(evidence: Evidence) -> Iterator[str]:
    """Nobody takes a run whose owner's lease has not run out, unless the owner gave it back, or is dead where that is proof enough.

    A renewal is not synced: where the server crashes right behind it, the lease is what it was before.
    """
    gone = {name: note["at"] for name, note in evidence.notes("closes")}
    if evidence.is_death_proved:
        gone |= {note["worker"]: note["at"] for note in evidence.faults if note["kind"] == "kill"}
    given_back: dict[tuple[str, int], float] = {}
    for _, note in evidence.notes("releases"):
        lease = note["run"], note["token"]
        given_back[lease] = min(note["at"], given_back.get(lease, note["at"]))
    may_be_gone = _Crashes(evidence).may_have_taken
    held: dict[str, list[tuple[int, str, float, float]]] = defaultdict(list)
    for kind in ("claimed", "renewed"):
        for name, note in evidence.notes(kind):
            if kind == "renewed" and may_be_gone(note):
                continue
            until = note["began"] + note["seconds"]
            until = min(until, gone.get(name, until), given_back.get((note["run"], note["token"]), until))
            held[note["run"]].append((note["token"], name, note["at"], until))
    for name, note in evidence.notes("claimed"):
        for token, owner, at, until in held[note["run"]]:
            if token < note["token"] and at < note["began"] and note["at"] < until:
                early = until - note["at"]
                yield f"{note['run']}: {name} took it {early:.3f} s before the lease of {owner} (token {token}) was over"


def delays(evidence: Evidence) -> Iterator[str]:
    """No worker takes a run before it is due for the first time, or somebody asks something of it."""
    due = {note["run"]: note["began"] + note["due_in"] for _, note in evidence.notes("enqueued")}
    for _, note in evidence.notes("posts"):
        due[note["run"]] = min(note["at"], due.get(note["run"], note["at"]))
    for name, note in evidence.notes("claimed"):
        if note["is_due"] and note["at"] < due.get(note["run"], 0.0):
            yield f"{note['run']}: {name} took it {due[note['run']] - note['at']:.3f} s before it was due"


def naps(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """A run that sleeps sleeps for no less than it asked for, by the times in its log."""
    for run_id, entries in bodies.items():
        asked: dict[str, tuple[float, float]] = {}
        for row, body in zip(evidence.logs[run_id], entries, strict=True):
            if body["kind"] == "intent" and body.get("waits") == "sleep" and row.payload is not None:
                asked.setdefault(body["position"], (body["at"], json.loads(row.payload)["seconds"]))
            elif body["kind"] == "outcome" and body["position"] in asked:
                began, seconds = asked[body["position"]]
                if body["at"] - began < seconds:
                    yield f"{run_id}: at {body['position']} it slept {body['at'] - began:.3f} s instead of {seconds}"


class _Crashes:
    """The crashes of the server, and what they may have taken: what was written without a sync, and with nothing synced behind it."""

    def __init__(self, evidence: Evidence) -> None:
        self._crashes = [(note["began"], note["at"]) for note in evidence.faults if note["kind"] == "crash"]
        self._synced = [
            (note["began"], note["at"])
            for kind in ("written", "claimed")
            for _, note in evidence.notes(kind)
            if note.get("synced", True)
        ]

    def may_have_taken(self, note: Note) -> bool:
        """Whether what this note acknowledges may be gone, if it was not synced."""
        return any(
            note["began"] < over and not any(note["at"] < began and at < crash for began, at in self._synced)
            for crash, over in self._crashes
        )


def acknowledged(evidence: Evidence) -> Iterator[str]:
    """An entry that the store has acknowledged is there, with that very leaf.

    Only one that was written without a sync may be gone, where the server crashed before anything was synced behind it.
    """
    may_be_gone = _Crashes(evidence).may_have_taken
    for _, note in evidence.notes("written"):
        rows = evidence.logs.get(note["run"], [])
        for entry in note["entries"]:
            seq = entry["seq"]
            leaf = rows[seq - 1].roots[:32].hex() if seq <= len(rows) else None
            if leaf != entry["leaf"] and (note["synced"] or not may_be_gone(note)):
                what = "is not there" if leaf is None else "is another one"
                yield (
                    f"{note['run']}: entry {seq} ({entry['kind']}) was acknowledged under token {note['token']}, and {what}"
                )


def effects(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """Per key one effect at the most, of one call; and a step that has completed with an effect has that one as its outcome."""
    done = Counter[str]()
    asked: dict[str, tuple[str, str]] = {}
    for note in evidence.outside:
        if note["kind"] == "effect":
            done[note["key"]] += 1
        if note["kind"] == "asked" and "position" in note:
            call = note["run"], note["position"]
            if asked.setdefault(note["key"], call) != call:
                yield f"{note['key']} was the key of {asked[note['key']]} and of {call}"
    for key, count in done.items():
        if count > 1:
            yield f"{asked.get(key, key)}: the outside did it {count} times"
    for run_id, entries in bodies.items():
        tools = {body["position"]: (body["tool"], body["key"]) for body in entries if body["kind"] == "intent"}
        for body in entries:
            if body["kind"] == "outcome" and body["ok"] == "completed":
                tool, key = tools[body["position"]]
                if tool.lstrip("a").startswith(("pay", "order")) and done[key] != 1:
                    yield f"{run_id}: {tool} at {body['position']} has completed, and the outside did it {done[key]} times"


def calls(evidence: Evidence, bodies: Bodies) -> Iterator[str]:
    """No call is made for a step whose outcome was recorded before.

    But for one: a process that is stopped between its last look at the lease and the call makes it when it goes on, whoever has the run
    by then. `overtaken` finds those.
    """
    recorded: dict[tuple[str, str], tuple[float, int]] = {}
    for _, note in evidence.notes("written"):
        for entry in note["entries"]:
            if entry["kind"] == "outcome" and _has_completed(bodies, note["run"], entry["seq"]):
                step = note["run"], entry["position"]
                recorded[step] = min((note["at"], note["token"]), recorded.get(step, (note["at"], note["token"])))
    excused = overtaken(evidence)
    for name, note in evidence.notes("called"):
        at, token = recorded.get((note["run"], note["position"]), (note["at"], 0))
        if note["at"] > at and (name, note["at"]) not in excused:
            yield (
                f"{note['run']}: {name} called {note['tool']} at {note['position']} under token {note['token']}, "
                f"{note['at'] - at:.3f} s after its outcome was recorded under token {token}"
            )


def overtaken(evidence: Evidence) -> set[tuple[str, float]]:
    """The calls that were made under an old token by a process that had just been stopped for longer than its lease: who and when."""
    continued = [(note["worker"], note["at"]) for note in evidence.faults if note["kind"] == "continue"]
    newest: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for _, note in evidence.notes("claimed"):
        newest[note["run"]].append((note["at"], note["token"]))
    found = set()
    for name, note in evidence.notes("called"):
        is_old = any(at < note["at"] and token > note["token"] for at, token in newest[note["run"]])
        if is_old and any(worker == name and 0 <= note["at"] - at < _IN_FLIGHT_SECONDS for worker, at in continued):
            found.add((name, note["at"]))
    return found


def _has_completed(bodies: Bodies, run_id: str, seq: int) -> bool:
    entries = bodies.get(run_id, ())
    return seq <= len(entries) and entries[seq - 1].get("ok") == "completed"
