"""The power fails at any moment of a recorded run: what was acknowledged is there, what was dispatched is known, and on it goes.

POWER_CUTS=N draws N random variants of what is kept at each moment, beside the plain ones; the default is 1. More of them take
longer than a test may: `-o faulthandler_timeout=0` lets them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.powercut import Event, Make, Recording, Remove, Resize, Sync, Told, Write, cut, record

MANY = int(os.environ.get("POWER_CUTS", "1"))

Recorder = Callable[..., Recording]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Records each program once."""
    known: dict[tuple[str, ...], Recording] = {}

    def recorded(*how: str) -> Recording:
        if how not in known:
            known[how] = record(how[0], tmp_path_factory.mktemp(how[0]) / "ledger", *how[1:])
        return known[how]

    return recorded


def now_and_then(number: int, event: Event | None) -> bool:
    """Enough for what is lost at once and often."""
    return number % 9 == 0 or isinstance(event, Told)


def paths(recording: Recording, kind: type[Event]) -> Iterator[str]:
    for event in recording.events:
        if isinstance(event, kind) and not isinstance(event, Told):
            yield Path(event.path).name


@pytest.mark.system("strace")
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("program", ["one_after_another", "side_by_side"])
def test_nothing_acknowledged_and_no_dispatched_intent_is_lost_wherever_the_power_is_cut(
    program: str, half: int, recorded: Recorder, record_property: Callable[[str, object], None]
) -> None:
    recording = recorded(program, "full")
    middle = len(recording.events) // 2
    report = cut(recording, MANY, where=lambda number, event: (number > middle) == bool(half))
    record_property("power cuts", str(report))
    assert (report.losses, report.damage) == ({}, {}), report
    assert report.cuts >= middle > 100
    assert report.images > 300
    if half:  # where the steps with a receipt stand
        assert report.receipts["found"] > 20


@pytest.mark.system("strace")
@pytest.mark.parametrize("program", ["one_after_another", "side_by_side"])
def test_what_is_cut_has_all_that_a_ledger_does_to_its_files(program: str, recorded: Recorder) -> None:
    recording = recorded(program, "full")
    assert set(paths(recording, Write)) == {"agent.db", "agent.db-wal", "agent.db-journal"}
    assert {"agent.db", "agent.db-wal", "agent.db-journal", "agent.db.lock"} <= set(paths(recording, Make))
    assert {"agent.db-wal", "agent.db-journal"} <= set(paths(recording, Remove))
    assert set(paths(recording, Resize)) == {"agent.db"}
    assert set(paths(recording, Sync)) == {"agent.db", "agent.db-wal", "agent.db-journal", "ledger"}
    # the log is emptied into the file, and begun anew, between two steps
    begins = [event for event in recording.events if isinstance(event, Write) and event.path.endswith("-wal")]
    assert sum(event.offset == 0 for event in begins) > list(paths(recording, Make)).count("agent.db-wal")
    told = [number for number, event in enumerate(recording.events) if isinstance(event, Told)]
    assert any(
        isinstance(event, Write) and event.path.endswith("agent.db")
        for first, last in pairwise(told)
        for event in recording.events[first:last]
    )
    assert len(recording.told("called")) >= 12
    assert {facts["effect"] for facts in recording.told("called")} == {"READ", "IDEMPOTENT", "MUTATE", None}


@pytest.mark.system("strace")
def test_on_a_disk_that_acknowledges_syncs_and_does_none_the_same_cuts_find_losses(recorded: Recorder) -> None:
    report = cut(recorded("one_after_another", "full"), 0, where=now_and_then, is_lying=True)
    assert {"a run", "an outcome", "an intent"} <= set(report.losses), report


@pytest.mark.system("strace")
def test_with_syncing_disabled_the_same_cuts_find_losses(recorded: Recorder) -> None:
    report = cut(recorded("one_after_another", "full", "never_sync"), 0, where=now_and_then)
    assert {"a run", "an outcome", "an intent", "at most once"} <= set(report.losses), report


@pytest.mark.system("strace")
@pytest.mark.parametrize("program", ["one_after_another", "side_by_side"])
def test_where_only_the_intents_are_not_synced_the_same_cuts_find_the_intents_that_are_lost(
    program: str, recorded: Recorder
) -> None:
    report = cut(recorded(program, "full", "sync_no_intents"), 0, where=now_and_then)
    assert set(report.losses) == {"an intent", "at most once"}, report
    assert report.damage == {}


@pytest.mark.system("strace")
@pytest.mark.parametrize("program", ["one_after_another", "side_by_side"])
def test_durability_of_the_process_loses_the_newest_in_a_power_cut_and_damages_nothing(
    program: str, recorded: Recorder
) -> None:
    report = cut(recorded(program, "process"), MANY, where=now_and_then)
    assert {"an outcome", "an intent"} <= set(report.losses), report
    assert set(report.losses) <= {"an outcome", "an intent", "at most once", "a recorded value"}, report
    assert report.damage == {}
