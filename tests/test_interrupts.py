"""Ctrl-C at every place where Python can raise it: no lock stays held, no transaction open, and what was said to be written is."""

from __future__ import annotations

import _thread
import collections
import dis
import gc
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agent_run_ledger.contract import Listing, QueueTerms, Row
from agent_run_ledger.stores.sqlite import SqliteStore
from agent_run_ledger.stores.sqlite_log import LARGE_PAYLOAD_BYTES
from agent_run_ledger.testing import FakeClock, a_row
from agent_run_ledger.testing.stores.words import LISTING

_IS_PLACE = [name.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) for name in dis.opname]


QUEUED = Listing(1.5, "agent", "q")


class Interrupts:
    """Presses Ctrl-C at chosen places of what it runs: before its n-th call, counted over all functions that are called.

    Python then raises KeyboardInterrupt by itself, where it looks for signals next. To raise from the trace function would
    also reach places where nothing ever comes, such as that between the last line of a `with` and the release of its lock.
    """

    def __init__(self, *places: int, in_hooks: bool = True) -> None:
        """`in_hooks`: also inside of the audit hook of these tests, which runs before every lock and unlock."""
        self._in_hooks = in_hooks
        self._left = list(places)
        self._seen = 0
        self._press = collections.defaultdict(_thread.interrupt_main)
        self.has_returned = False
        self.error: KeyboardInterrupt | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last place was not reached."""
        return bool(self._left)

    def run(self, work: Callable[[], object]) -> None:
        """Do `work`; the interrupt and all the frames that it went through are kept in `error`."""
        before = signal.signal(signal.SIGINT, self._raise)
        gc.disable()  # what other tests left behind has interrupts of its own
        try:
            sys.settrace(self._trace)
            work()
            self.has_returned = True
            sys.settrace(None)
        except KeyboardInterrupt as error:
            self.error = error
        finally:
            sys.settrace(None)
            gc.enable()
            signal.signal(signal.SIGINT, before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and _IS_PLACE[frame.f_code.co_code[frame.f_lasti]]:
            self._seen += 1
            if self._left and self._seen >= self._left[0]:
                del self._left[0]
                sys.settrace(None)
                self._press[
                    self._seen
                ]  # looked up, not called: after a call Python would look for signals here already
        return self._trace

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._in_hooks and frame is not None and frame.f_code.co_name == "refuse_to_leave_the_machine":
            self._press[number, self._seen, len(self._press)]  # it comes when the hook is done
            return
        if self._left:
            sys.settrace(self._trace)
        raise KeyboardInterrupt


class Ledger:
    """A store that is interrupted, a second one on the same file, and somebody with plain SQL who sees what is committed."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(path, durability="process", clock=self.clock)
        self.other = SqliteStore(path, durability="process", clock=self.clock, busy_seconds=0.0)
        self.db = sqlite3.connect(path, isolation_level=None)
        self.tokens = {name: self._made(self.store, name) for name in ("run", "spare")}
        self.tokens["probe"] = self._made(self.other, "probe")
        self.number = 0

    def _made(self, store: SqliteStore, run_id: str) -> int:
        lease = store.create(run_id, "a" if store is self.store else "b", 1e9, b"s" * 32, [a_row(1)], LISTING)
        assert lease is not None
        return lease.token

    def size(self, run_id: str) -> int:
        (size,) = self.db.execute("SELECT count(*) FROM entries WHERE run_id = ?", (run_id,)).fetchone()
        return int(size)

    def next_rows(self, count: int = 1, payload: bytes | None = None) -> list[Row]:
        size = self.size("run")
        return [a_row(size + number, payload=payload) for number in range(1, count + 1)]

    def new_owner(self) -> str:
        """An owner that the store does not hold yet. The former ones are let go of, so that there are never many."""
        owners = self.store._holding.owners
        for owner in owners.held - {"a"}:
            os.close(owners._held.pop(owner))
            os.unlink(owners._path(owner))
        return f"owner {self.number}"

    def append(self, *, synced: bool, count: int = 1, payload: bytes | None = None) -> Callable[[], object]:
        rows = self.next_rows(count, payload)
        return lambda: self.store.append("run", self.tokens["run"], 0, rows, synced=synced)

    def assert_is_usable(self) -> None:
        """The interrupted store writes, everybody sees it at once, and nobody has to wait for it."""
        assert repr(self.store._files.mutex).startswith("<unlocked")
        assert repr(self.store._files._reader_mutex).startswith("<unlocked")
        assert self.other.append("probe", self.tokens["probe"], 0, [a_row(self.size("probe") + 1)], synced=False)
        if Path(self.other._holding.owners.folder, "dead").exists():
            assert self.other._holding.owners.prove_death("dead")  # its lock is kept by nobody
            self.other._holding.owners.leave()
        for synced in (True, False, True):  # first as it was before: a level that is wrongly remembered is seen
            size = self.size("run")
            assert self.store.append("run", self.tokens["run"], 0, [a_row(size + 1)], synced=synced)
            assert self.size("run") == size + 1
            assert self.store._files.writer is not None
            assert self.store._files.writer.execute("PRAGMA synchronous").fetchone() == (1 + synced,)
        assert self.other.append("probe", self.tokens["probe"], 0, [a_row(self.size("probe") + 1)], synced=False)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.db.close()
    ledger.store.close()
    ledger.other.close()


# Each prepares, uninterrupted, and returns what is interrupted, and what must then hold if it returned.


def append(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    size = ledger.size("run")
    return ledger.append(synced=False), lambda: ledger.size("run") == size + 1


def append_several(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.append(synced=False)()
    size = ledger.size("run")
    return ledger.append(synced=True, count=2), lambda: ledger.size("run") == size + 2


def append_large(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    size, payload = ledger.size("run"), b"%d" % ledger.number * LARGE_PAYLOAD_BYTES
    return ledger.append(synced=False, payload=payload), lambda: ledger.size("run") == size + 1


def append_with_a_new_connection(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.store._files.drop()
    return append(ledger)


def append_with_a_new_lock_file(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.store._files.lock.close()
    return append(ledger)


def append_what_stands(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    work = ledger.append(synced=True)
    work()
    size = ledger.size("run")
    return work, lambda: ledger.size("run") == size


def renew(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    end = ledger.clock.elapsed() + 1e6 + ledger.number
    statement = "SELECT 1 FROM runs WHERE run_id = 'run' AND lease_until = ?"
    return (
        lambda: ledger.store.renew("run", ledger.tokens["run"], 1e6 + ledger.number),
        lambda: ledger.db.execute(statement, (end,)).fetchone() is not None,
    )


def create(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    name, owner = f"new {ledger.number}", ledger.new_owner()
    return (
        lambda: ledger.store.create(name, owner, 30.0, b"s" * 32, [a_row(1), a_row(2)], LISTING),
        lambda: ledger.size(name) == 2,
    )


def claim_of_a_free_run(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.db.execute("UPDATE runs SET owner = NULL WHERE run_id = 'spare'")
    return claim(ledger)


def claim_of_a_dead_owner(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.db.execute("UPDATE runs SET owner = 'dead' WHERE run_id = 'spare'")
    Path(ledger.store._holding.owners.folder, "dead").touch()
    return claim(ledger)


def claim(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    owner = ledger.new_owner()
    statement = "SELECT 1 FROM runs WHERE run_id = 'spare' AND owner = ?"
    return (
        lambda: ledger.store.claim("spare", owner, 30.0),
        lambda: ledger.db.execute(statement, (owner,)).fetchone() is not None,
    )


def release(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.db.execute("UPDATE runs SET owner = NULL WHERE run_id = 'spare'")
    token = ledger.store.claim("spare", "a", 30.0).token
    statement = "SELECT 1 FROM runs WHERE run_id = 'spare' AND owner IS NULL"
    return (
        lambda: ledger.store.release("spare", token),
        lambda: ledger.db.execute(statement).fetchone() is not None,
    )


def post(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    statement = "SELECT 1 FROM inbox WHERE run_id = 'spare' AND at = ?"
    return (
        lambda: ledger.store.post("spare", "signal", b"", "me", float(ledger.number)),
        lambda: ledger.db.execute(statement, (float(ledger.number),)).fetchone() is not None,
    )


def annotate(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    note = f"note {ledger.number}"
    return (
        lambda: ledger.store.annotate("run", ledger.tokens["run"], note),
        lambda: ledger.db.execute("SELECT 1 FROM runs WHERE note = ?", (note,)).fetchone() is not None,
    )


def enqueue(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    name = f"queued {ledger.number}"
    return (
        lambda: ledger.store.enqueue(name, b"s" * 32, [a_row(1), a_row(2)], QUEUED, 0.0),
        lambda: ledger.size(name) == 2,
    )


def claim_due(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.db.execute("UPDATE runs SET owner = NULL WHERE queue = 'q'")
    enqueue(ledger)[0]()
    owner = ledger.new_owner()
    statement = "SELECT 1 FROM runs WHERE queue = 'q' AND owner = ?"
    return (
        lambda: ledger.store.claim_due(owner, 30.0, [QueueTerms("q", 99, 9)], ["agent"], 1),
        lambda: ledger.db.execute(statement, (owner,)).fetchone() is not None,
    )


def free_dead(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    claim_due(ledger)[0]()
    ledger.db.execute("UPDATE runs SET owner = 'dead' WHERE queue = 'q' AND owner IS NOT NULL")
    Path(ledger.store._holding.owners.folder, "dead").touch()
    return (
        lambda: ledger.store.free_dead(),
        lambda: ledger.db.execute("SELECT 1 FROM runs WHERE owner = 'dead'").fetchone() is None,
    )


def wait_for_work(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    ledger.store.wake()
    return lambda: [ledger.store.wait_for_work(0.0) for _ in range(2)], lambda: True


def read(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    return lambda: [ledger.store.read("spare"), ledger.store.head("run"), list(ledger.store.summaries())], lambda: True


def read_beside_a_writer(ledger: Ledger) -> tuple[Callable[[], object], Callable[[], bool]]:
    work, _ = read(ledger)

    def beside() -> None:
        with ledger.store._files.mutex:
            work()

    return beside, lambda: True


VERBS = [
    append,
    append_several,
    append_large,
    append_with_a_new_connection,
    append_with_a_new_lock_file,
    append_what_stands,
    renew,
    create,
    claim_of_a_free_run,
    claim_of_a_dead_owner,
    release,
    post,
    annotate,
    enqueue,
    claim_due,
    free_dead,
    wait_for_work,
    read,
    read_beside_a_writer,
]


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_anywhere_leaves_nothing_held_and_loses_nothing(ledger: Ledger, verb: Any) -> None:
    while True:
        ledger.number += 1
        work, is_done = verb(ledger)
        interrupts = Interrupts(ledger.number)
        interrupts.run(work)
        if interrupts.is_over:
            break
        assert interrupts.error is not None
        assert is_done() or not interrupts.has_returned
        ledger.assert_is_usable()  # while the interrupt's frames, and what they refer to, are still there
    assert interrupts.has_returned
    assert is_done()
    assert ledger.number > 10
    assert list(ledger.store.check()) == []


@pytest.mark.parametrize("verb", [append, append_several, create, claim_of_a_dead_owner, free_dead])
def test_a_second_interrupt_while_the_first_is_cleaned_up_leaves_nothing_held_either(ledger: Ledger, verb: Any) -> None:
    first, second = 1, 1
    while True:
        ledger.number += 1
        work, _ = verb(ledger)
        interrupts = Interrupts(first, first + second, in_hooks=False)
        interrupts.run(work)
        ledger.assert_is_usable()
        if interrupts.error is None:
            break
        first, second = (first + 1, 1) if interrupts.is_over else (first, second + 1)
    assert ledger.number > first > 10


@pytest.mark.parametrize("verb", [create, claim_of_a_dead_owner, claim_due, free_dead])
def test_an_interrupt_leaves_no_owner_locked_out(ledger: Ledger, verb: Any) -> None:
    for place in range(1, 1000):
        ledger.number = place
        work, is_done = verb(ledger)
        interrupts = Interrupts(place)
        interrupts.run(work)
        if not is_done():
            work()
            assert is_done()
        if interrupts.is_over:
            break
    assert interrupts.has_returned


def test_an_interrupted_close_can_be_done_again(tmp_path: Path) -> None:
    for place in range(1, 1000):
        ledger = Ledger(tmp_path / f"{place}.db")
        interrupts = Interrupts(place)
        interrupts.run(ledger.store.close)
        ledger.store.close()
        head = ledger.other.head("run")
        assert head is not None
        assert head.owner is None
        assert ledger.other.append("probe", ledger.tokens["probe"], 0, [a_row(2)], synced=True)
        ledger.db.close()
        ledger.other.close()
        if interrupts.is_over:
            break
    assert interrupts.has_returned


def test_a_transaction_that_was_left_open_is_rolled_back_before_anything_is_built_on_it(ledger: Ledger) -> None:
    for synced in (False, True):
        ledger.store._files.ready().execute("BEGIN IMMEDIATE")
        assert ledger.append(synced=synced)()
        assert ledger.size("run") == 2 + synced
