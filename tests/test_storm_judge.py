"""The judge of a storm can condemn: what really happened to a worker that nobody disturbs, and then was changed, is found in each kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger
from agent_run_ledger.contract import Row
from agent_run_ledger.stores.memory import MemoryStore
from support.chaos.checker import Evidence, judge, overtaken
from support.chaos.journal import Journal, Note, read
from support.chaos.outside import World, opened
from support.chaos.program import WORD, register
from support.chaos.schedule import DISTURBANCES, OUTAGES, TROUBLES, schedule
from support.chaos.watched import WatchedStore

WORKER, OTHER = "worker", "other"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """What is left of one run of each agent, with nothing gone wrong."""
    folder = tmp_path_factory.mktemp("calm")
    seen, world = Journal(folder / "worker.journal"), Journal(folder / "outside.journal")
    store = MemoryStore()
    with opened(folder / "door", World(world, 1, is_good=True)) as outside:
        watched: Any = WatchedStore(store, seen)
        ledger = AgentRunLedger(watched, heartbeat_seconds=0.01)
        agents = register(ledger, outside, seen)
        handles = [ledger.submit(agent, 1, run_id=agent.__name__) for agent in agents]
        for word in ("one", "two"):
            ledger.signal("waiter", WORD, word)
        with ledger.worker():
            for handle in handles:
                handle.result(60.0)
        runs = [run.run_id for run in ledger.runs()]
        logs = {run_id: store.read(run_id) for run_id in runs}
        heads = {run_id: head for run_id in runs if (head := store.head(run_id)) is not None}
        findings = [str(finding) for finding in ledger.verify().findings]
        ledger.close()
    return Evidence(
        {WORKER: read(folder / "worker.journal"), OTHER: []},
        [],
        read(folder / "outside.journal"),
        logs,
        heads,
        findings,
    )


@pytest.fixture
def evidence(calm: Evidence) -> Evidence:
    return copy.deepcopy(calm)


def notes(evidence: Evidence, kind: str, run_id: str = "clerk") -> list[Note]:
    return [note for note in evidence.journals[WORKER] if note["kind"] == kind and note["run"] == run_id]


def write(evidence: Evidence, run_id: str, like: int, **changes: Any) -> None:
    """Put an entry like that one at the end of a log, with changes."""
    rows = evidence.logs[run_id]
    row = rows[like]
    body = json.loads(row.body) | {"seq": len(rows) + 1, "state": json.loads(rows[-1].body)["state"]} | changes
    rows.append(row._replace(seq=len(rows) + 1, body=json.dumps(body).encode()))


def index(evidence: Evidence, kind: str, run_id: str = "clerk", **said: Any) -> int:
    """Where the first entry of that kind stands in a log."""
    for number, row in enumerate(evidence.logs[run_id]):
        if row.kind == kind and said.items() <= json.loads(row.body).items():
            return number
    raise AssertionError(f"{run_id} has no {kind}")


def last_at(evidence: Evidence) -> float:
    return float(evidence.journals[WORKER][-1]["at"])


def test_what_went_well_is_not_condemned(evidence: Evidence) -> None:
    assert judge(evidence) == []
    for kind in ("claimed", "written", "called", "heard", "releases", "renewed", "enqueued", "posts"):
        assert evidence.notes(kind), "the witness has slept"
    assert {note["kind"] for note in evidence.outside} == {"asked", "effect"}


# --- each broken promise ----------------------------------------------------------------------------------------------


def a_second_outcome_of_a_step(evidence: Evidence) -> None:
    write(evidence, "clerk", index(evidence, "outcome"), attempt=2)


def a_second_outcome_of_an_attempt(evidence: Evidence) -> None:
    at = index(evidence, "outcome")
    row = evidence.logs["clerk"][at]
    failed = json.dumps(json.loads(row.body) | {"ok": "failed"}).encode()
    evidence.logs["clerk"][at] = row._replace(body=failed)
    write(evidence, "clerk", at)


def an_older_token_in_the_log(evidence: Evidence) -> None:
    at = index(evidence, "intent")
    for number, row in enumerate(evidence.logs["clerk"]):
        token = 9 if number == at else 8
        evidence.logs["clerk"][number] = row._replace(body=json.dumps(json.loads(row.body) | {"token": token}).encode())


def an_older_token_for_a_later_claim(evidence: Evidence) -> None:
    first = notes(evidence, "claimed")[0]
    later = last_at(evidence) + 100
    evidence.journals[OTHER].append(first | {"token": 0, "began": later, "at": later})


def one_token_for_two_owners(evidence: Evidence) -> None:
    claimed = notes(evidence, "claimed")[-1]
    evidence.journals[OTHER].append(dict(claimed))


def an_entry_under_an_old_token(evidence: Evidence) -> None:
    written = notes(evidence, "written")[-1]
    evidence.journals[OTHER].append(
        {"kind": "claimed", "run": "clerk", "token": 99, "began": 0.0, "at": 0.0, "seconds": 0.0, "is_due": False}
    )
    assert written["token"] < 99


def an_entry_that_is_lost(evidence: Evidence) -> None:
    evidence.logs["clerk"].pop()
    evidence.expected = {"clerk": {"CHECKPOINTED"}}


def an_entry_that_is_another(evidence: Evidence) -> None:
    row = evidence.logs["clerk"][3]
    evidence.logs["clerk"][3] = row._replace(roots=bytes(32) + row.roots[32:])


def an_effect_twice(evidence: Evidence) -> None:
    evidence.outside.append(next(note for note in evidence.outside if note["kind"] == "effect"))


def an_effect_that_never_was(evidence: Evidence) -> None:
    evidence.outside.remove(next(note for note in evidence.outside if note["kind"] == "effect"))


def one_key_for_two_calls(evidence: Evidence) -> None:
    asked = next(note for note in evidence.outside if note["kind"] == "asked" and "position" in note)
    evidence.outside.append(asked | {"position": "77"})


def a_call_of_what_is_recorded(evidence: Evidence) -> None:
    called = notes(evidence, "called")[0]
    evidence.journals[OTHER].append(called | {"at": last_at(evidence)})


def another_story(evidence: Evidence) -> None:
    heard = notes(evidence, "heard")[0]
    evidence.journals[OTHER].append(heard | {"value": "another"})


def a_live_lease_that_is_taken(evidence: Evidence) -> None:
    claimed = notes(evidence, "claimed")[-1]
    notes(evidence, "releases")[-1]["token"] = -1  # it was of another run
    soon = claimed["at"] + 0.002
    evidence.journals[OTHER].append(claimed | {"token": 99, "began": soon, "at": soon})


def a_run_that_is_taken_before_it_is_due(evidence: Evidence) -> None:
    enqueued = notes(evidence, "enqueued")[0]
    enqueued["due_in"] = 3600.0


def a_nap_that_was_too_short(evidence: Evidence) -> None:
    at = index(evidence, "intent", waits="sleep")
    row = evidence.logs["clerk"][at]
    evidence.logs["clerk"][at] = row._replace(payload=b'{"seconds":3600.0}')


def a_run_that_has_not_ended(evidence: Evidence) -> None:
    row = evidence.logs["clerk"][-1]
    evidence.logs["clerk"][-1] = row._replace(body=json.dumps(json.loads(row.body) | {"state": "BLOCKED"}).encode())


def a_run_that_is_owned(evidence: Evidence) -> None:
    _change_head(evidence, owner="worker")


def a_run_that_is_due(evidence: Evidence) -> None:
    _change_head(evidence, due_in=1.0)


def _change_head(evidence: Evidence, **changes: Any) -> None:
    evidence.heads["clerk"] = evidence.heads["clerk"]._replace(**changes)


def a_finding(evidence: Evidence) -> None:
    evidence.findings.append("clerk 3 root: it is another")


BROKEN: dict[Callable[[Evidence], None], str] = {
    a_second_outcome_of_a_step: "which had completed",
    a_second_outcome_of_an_attempt: "a second outcome of attempt 1",
    an_older_token_in_the_log: "has token 8, behind 9",
    an_older_token_for_a_later_claim: "claimed under token 0",
    one_token_for_two_owners: "was given to worker and to other",
    an_entry_under_an_old_token: "written under token",
    an_entry_that_is_lost: "(finished) was acknowledged under token",
    an_entry_that_is_another: "is another one",
    an_effect_twice: "the outside did it 2 times",
    an_effect_that_never_was: "the outside did it 0 times",
    one_key_for_two_calls: "was the key of",
    a_call_of_what_is_recorded: "after its outcome was recorded",
    another_story: "heard another 'plan'",
    a_live_lease_that_is_taken: "before the lease of worker",
    a_run_that_is_taken_before_it_is_due: "before it was due",
    a_nap_that_was_too_short: "instead of 3600.0",
    a_run_that_has_not_ended: "clerk is BLOCKED",
    a_run_that_is_owned: "clerk is owned by worker",
    a_run_that_is_due: "clerk is due in 1.0 s",
    a_finding: "verify: clerk 3 root",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__.replace("_", " "))
def test_it_finds(breaks: Callable[[Evidence], None], evidence: Evidence) -> None:
    breaks(evidence)
    assert any(BROKEN[breaks] in problem for problem in judge(evidence)), judge(evidence)


# --- what it excuses, and no more -------------------------------------------------------------------------------------


def _lose_an_unsynced_entry(evidence: Evidence) -> Note:
    """The last entry of a log is gone, which was acknowledged without a sync; nothing was synced behind it."""
    row: Row = evidence.logs["clerk"].pop()
    evidence.expected = {"clerk": {"CHECKPOINTED"}}
    (written,) = (note for note in notes(evidence, "written") if note["entries"][-1]["seq"] == row.seq)
    written |= {"synced": False, "began": last_at(evidence) + 1, "at": last_at(evidence) + 2}
    return written


def test_an_entry_without_a_sync_may_be_gone_where_the_server_crashed_right_behind_it(evidence: Evidence) -> None:
    written = _lose_an_unsynced_entry(evidence)
    assert any("is not there" in problem for problem in judge(evidence))
    evidence.faults.append({"kind": "crash", "began": written["at"] + 1, "at": written["at"] + 1})
    assert judge(evidence) == []


def test_it_may_not_be_gone_where_another_one_was_synced_between(evidence: Evidence) -> None:
    written = _lose_an_unsynced_entry(evidence)
    evidence.faults.append({"kind": "crash", "began": written["at"] + 9, "at": written["at"] + 9})
    synced = notes(evidence, "written", "buyer")[0]
    synced |= {"synced": True, "began": written["at"] + 1, "at": written["at"] + 2}
    assert any("is not there" in problem for problem in judge(evidence))


def test_the_run_of_a_dead_owner_may_be_taken_at_once_only_where_his_death_is_proved(evidence: Evidence) -> None:
    a_live_lease_that_is_taken(evidence)
    evidence.faults.append({"kind": "kill", "worker": WORKER, "at": notes(evidence, "claimed")[-1]["at"] + 0.001})
    assert any("before the lease" in problem for problem in judge(evidence))
    evidence.is_death_proved = True
    assert not any("before the lease" in problem for problem in judge(evidence))


def test_a_call_is_excused_where_its_process_was_stopped_behind_its_last_look_at_the_lease(evidence: Evidence) -> None:
    a_call_of_what_is_recorded(evidence)
    called = evidence.journals[OTHER][-1]
    assert overtaken(evidence) == set()
    claimed = notes(evidence, "claimed")[-1]
    claimed |= {"token": called["token"] + 1}
    evidence.faults.append({"kind": "continue", "worker": OTHER, "at": called["at"] - 0.1})
    assert overtaken(evidence) == {(OTHER, called["at"])}
    assert not any("after its outcome" in problem for problem in judge(evidence))


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_a_seed_is_a_storm_and_has_every_kind_of_fault() -> None:
    kinds = DISTURBANCES | OUTAGES | TROUBLES
    terms: dict[str, Any] = {"seconds": 60.0, "slots": 6, "every": 0.8, "lease_seconds": 2.5}
    one, again, other = (schedule(seed, kinds, **terms) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert {fault.kind for fault in one} == set(kinds)
    assert all(0 <= fault.slot < 6 and 0 < fault.at < 60 for fault in one)
    assert any(fault.kind == "stop" and fault.lasts > 2.5 for fault in one)
