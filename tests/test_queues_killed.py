"""Processes that share one queue in a file are killed in the middle of it: each run has one owner at a time, and none is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from agent_run_ledger.contract import Listing, QueueTerms
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import FakeClock, a_row
from agent_run_ledger.testing.stores.words import SECRET, claim_due, enqueue, head_of
from support.processes import Child, child
from support.witness import Witness

RUNS, ENTRIES = 40, 8
WORKER = """
import fcntl, os, random
from agent_run_ledger.contract import QueueTerms
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.testing import a_row
from support.witness import Witness

folder, owner, entries = arguments[0], arguments[1], int(arguments[2])
store, witness, chance = SqliteStore(f"{folder}/ledger.db", clock=SystemClock(), durability="process"), Witness(
    f"{folder}/witness"), random.Random(owner)

def work(lease):
    fd = os.open(f"{folder}/{lease.run_id}.worked-on", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever dies lets go of it
    except BlockingIOError:
        witness.note("doubled", run_id=lease.run_id, owner=owner)
        return
    witness.note("began", run_id=lease.run_id, owner=owner, token=lease.token)
    size, inbox = len(store.read(lease.run_id)), len(store.inbox(lease.run_id, 0))
    while size < entries:
        if store.append(lease.run_id, lease.token, inbox, [a_row(size + 1, f"of {lease.token}")], synced=False):
            size += 1
            witness.note("wrote", run_id=lease.run_id, seq=size, token=lease.token)
        inbox = len(store.inbox(lease.run_id, 0))
        turn()
        if chance.random() < 0.2:
            break
    witness.note("ended", run_id=lease.run_id, owner=owner)
    os.close(fd)
    store.release(lease.run_id, lease.token, inbox=inbox, due_in=None if size == entries else chance.random() / 50)

def turn():
    tell()
    hear()

while True:
    store.beat(owner, b"")
    store.free_dead()
    leases = store.claim_due(owner, 600.0, [QueueTerms("q", 9, 2), QueueTerms("p")], ["agent"], 3)
    for lease in leases:
        work(lease)
    if not leases:
        turn()
        store.wait_for_work(min(0.2, store.next_due(["q", "p"], ["agent"]) or 0.2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_killed_at_random_lose_no_run_and_never_share_one(tmp_path: Path, seed: int) -> None:
    """Leases last for ten minutes: only what the kernel says of the dead frees their runs in time."""
    chance, witness = random.Random(seed), Witness(tmp_path / "witness")
    store = SqliteStore(tmp_path / "ledger.db", clock=SystemClock())
    for number in range(RUNS):
        enqueue(store, f"r{number}", queue="pq"[number % 2], key=f"k{number % 7}", priority=number % 3)
    killed: list[str] = []
    with contextlib.ExitStack() as stack:

        def another() -> tuple[str, Child]:
            owner = f"w{len(killed)}-{len(workers)}"
            return owner, stack.enter_context(child(WORKER, tmp_path, owner, ENTRIES))

        workers: list[tuple[str, Child]] = []
        while len(workers) < 4:
            workers.append(another())
        for _ in range(2_000):
            for number, (owner, worker) in enumerate(workers):
                worker.hear()
                worker.tell()  # and while they are all at it, some of them die
                if chance.random() < 0.08 and len(killed) < 25:
                    for _ in range(chance.randrange(20_000)):
                        pass
                    worker.kill()
                    killed.append(owner)
                    workers[number] = another()
            if chance.random() < 0.3:
                store.post(f"r{chance.randrange(RUNS)}", "signal", b"", "test", 1.0, due_in=chance.choice([0.0, 0.01]))
            if all(len(store.read(f"r{number}")) == ENTRIES for number in range(RUNS)):
                break
        else:
            pytest.fail("some run is lost: nobody goes on with it")

    assert witness.notes("doubled") == []
    began = [(note["owner"], note["run_id"]) for note in witness.notes("began")]
    ended = [(note["owner"], note["run_id"]) for note in witness.notes("ended")]
    assert len(killed) > 8
    assert sum(began.count(each) > ended.count(each) for each in set(began)) > 3, "nobody died at work"
    for number in range(RUNS):
        tokens = [int(row.kind.removeprefix("of ")) for row in store.read(f"r{number}", 1)]
        assert tokens == sorted(tokens)
        taken = [note["token"] for note in witness.notes("began") if note["run_id"] == f"r{number}"]
        assert len(taken) == len(set(taken)), "a token was given twice"
    for note in witness.notes("wrote"):
        assert store.read(note["run_id"], note["seq"] - 1, limit=1)[0].kind == f"of {note['token']}"
    store.free_dead()
    assert {summary.head.owner for summary in store.summaries()} == {None}
    assert list(store.check()) == []
    store.close()


# --- at every statement -----------------------------------------------------------------------------------------------


class Mortal:
    """A connection whose process dies with its n-th statement: before it is done, or after."""

    def __init__(self, connection: Any, die_at: int, *, after: bool) -> None:
        self._connection, self._left, self._after = connection, die_at, after

    def execute(self, *given: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = self._connection.execute(*given)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def live(path: Path, said: int, die_at: int, *, after: bool) -> None:
    """What a worker does: its words go out as each thing is done."""
    store = SqliteStore(path, clock=FakeClock())

    def tell(*words: Any) -> None:
        os.write(said, json.dumps(words).encode() + b"\n")

    store._files.writer = cast(Any, Mortal(store._files.ready(), die_at, after=after))
    store.beat("mortal", b"")
    store.free_dead()
    tell("freed")
    enqueue(store, "new", key="k")
    tell("enqueued")
    leases = claim_due(store, QueueTerms("q", 3, 1), owner="mortal", at_most=3)
    tell("claimed", [[lease.run_id, lease.token] for lease in leases])
    for lease in leases:
        store.append(lease.run_id, lease.token, 0, [a_row(2)], synced=True)
        tell("wrote", lease.run_id)
    store.release(leases[0].run_id, leases[0].token, due_in=50.0)
    tell("released")
    store.post("waits", "signal", b"", "mortal", 1.0)
    tell("posted")
    store.claim("timer", "mortal", 30.0)
    tell("named")
    assert store.adopt("adopted", 7, SECRET, Listing(1.5, "agent", "q"), [[a_row(1)], [a_row(2)]], [], 0.0)
    tell("adopted")
    tell("survived")
    os._exit(0)


@pytest.mark.parametrize("after", [False, True])
def test_who_dies_at_any_statement_loses_nothing_that_was_acknowledged(tmp_path: Path, after: bool) -> None:
    prepared = tmp_path / "prepared.db"
    with contextlib.closing(SqliteStore(prepared, clock=FakeClock())) as store:
        for run_id in ("old", "waits", "timer"):
            enqueue(store, run_id, due_in=1e6 if run_id == "timer" else 0.0)
        tokens = {lease.run_id: lease.token for lease in claim_due(store, owner="dies")}
        store.release("waits", tokens["waits"])
        os.close(store._holding.owners._held.pop("dies"))  # as if its process were gone, with the other run
    for die_at in range(1, 1000):
        path = tmp_path / f"{die_at}.db"
        shutil.copy(prepared, path)
        shutil.copytree(f"{prepared}.owners", f"{path}.owners")
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                live(path, writer, die_at, after=after)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as file:
            told = {word: rest for word, *rest in map(json.loads, file)}
        os.waitpid(process, 0)
        if "survived" in told:
            break
        judge(path, told)
    else:
        pytest.fail("it never came to its end")
    assert die_at > 40


def judge(path: Path, told: dict[str, list[Any]]) -> None:
    """What the next worker finds."""
    clock = FakeClock()
    with contextlib.closing(SqliteStore(path, clock=clock)) as store:
        store.free_dead()
        assert {summary.head.owner for summary in store.summaries()} == {None}
        clock.advance(51.0)
        leases = {lease.run_id: lease for lease in claim_due(store, owner="next")}
        due = {"old"} | {run_id for run_id, word in (("new", "enqueued"), ("adopted", "adopted")) if word in told}
        due |= {run_id for run_id, word in (("waits", "posted"), ("timer", "named")) if word in told}
        assert due <= leases.keys()
        for run_id, token in told.get("claimed", [[]])[0]:
            assert leases[run_id].token > token
        assert all(len(store.read(run_id)) == 2 for run_id in told.get("wrote", []))
        if "posted" in told:
            assert head_of(store, "waits").inbox == 1
        for lease in leases.values():
            rows, inbox = len(store.read(lease.run_id)), head_of(store, lease.run_id).inbox
            assert store.append(lease.run_id, lease.token, inbox, [a_row(rows + 1)], synced=True)
        assert list(store.check()) == []
