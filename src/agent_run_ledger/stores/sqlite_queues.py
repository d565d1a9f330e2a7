"""How the workers of one machine find runs in an SQLite file: which are due, who takes them, and who says that he lives."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_run_ledger.contract import Beat, Lease, Listing, QueueTerms, Row
from agent_run_ledger.errors import StoreError
from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.connections import FULL, NORMAL, Connections
from agent_run_ledger.stores.faults import leaves_doubt
from agent_run_ledger.stores.holding import DEATHS, Held, Holding
from agent_run_ledger.stores.sqlite_log import Log
from agent_run_ledger.stores.timeline import Timeline

if TYPE_CHECKING:
    from queue import SimpleQueue

    from agent_run_ledger.contract import Clock

_FORGOTTEN_SECONDS = 86_400.0
_LOOK_SECONDS = 0.025
"""How often who waits looks whether another process has news. Each look and the sleep before it cost some 0.15 ms of a core."""

# The lanes of one queue: agents and priorities of which a run waits. Each is found by one step in the index `runs_that_wait`, however
# many runs there are.
_LANES = """
WITH RECURSIVE lanes (queue, agent, priority) AS (
    SELECT q.value, a.value, (
        SELECT max(priority) FROM runs
        WHERE owner IS NULL AND due IS NOT NULL AND queue = q.value AND agent = a.value
    ) FROM json_each(?1) q, json_each(?2) a
    UNION ALL
    SELECT queue, agent, (
        SELECT max(priority) FROM runs
        WHERE owner IS NULL AND due IS NOT NULL AND queue = lanes.queue AND agent = lanes.agent AND priority < lanes.priority
    ) FROM lanes WHERE priority IS NOT NULL
)
"""

# Of each lane the first ones, so that the longest backlog costs no more than a short one.
_DUE = f"""
{_LANES}
SELECT r.priority, r.due, r.run_id, r.fencing_token, r.queue, r.key, r.agent
FROM lanes CROSS JOIN runs r ON r.rowid IN (
    SELECT rowid FROM runs
    WHERE owner IS NULL AND due IS NOT NULL AND queue = lanes.queue AND agent = lanes.agent AND priority = lanes.priority
        AND due <= ?3 AND (key IS NULL OR key NOT IN (SELECT value FROM json_each(?4)))
    ORDER BY due LIMIT ?5
)
WHERE lanes.priority IS NOT NULL
ORDER BY r.priority DESC, r.due LIMIT ?5
"""

_NEXT_DUE = f"""
{_LANES}
SELECT min((
    SELECT min(due) FROM runs
    WHERE owner IS NULL AND due IS NOT NULL AND queue = lanes.queue AND agent = lanes.agent AND priority = lanes.priority
)) FROM lanes WHERE priority IS NOT NULL
"""

_BUSY_KEYS = "SELECT key, count(*) FROM runs WHERE owner IS NOT NULL AND due IS NOT NULL AND queue = ? GROUP BY key"
_BUSY = """
SELECT run_id, owner, fencing_token, lease_until, lease_seconds, lease_boot FROM runs INDEXED BY runs_that_are_busy
WHERE owner IS NOT NULL AND due IS NOT NULL
"""

# Nobody owns it, as was read in the same transaction; a new epoch begins above every token of the old ones.
_TAKE = f"""
UPDATE runs SET owner = ?, lease_until = ?, lease_seconds = ?, lease_boot = ?, note = NULL,
    fencing_token = max(fencing_token, (SELECT value FROM meta WHERE key = 'epoch') * 1048576) + 1
WHERE run_id = ? RETURNING fencing_token, (SELECT secret FROM secrets s WHERE s.run_id = runs.run_id), {DEATHS.format("runs")}
"""

_NEWS = "SELECT sum(news) FROM boots"

_BEAT = """
INSERT INTO workers (worker, said, beat) VALUES (?, ?, ?)
ON CONFLICT (worker) DO UPDATE SET said = excluded.said, beat = excluded.beat
"""

_Ask = Callable[..., list[Any]]
"""Asks a statement with its values for all rows."""


class _Candidate(NamedTuple):
    """A run that may be claimed."""

    priority: int
    due: float
    run_id: str
    token: int
    queue: str
    key: str | None
    agent: str


class News:
    """Tells those of this process who wait that they should look again, and lets them look after what other processes did.

    It has no lock: a signal handler may tell while its own thread waits.
    """

    def __init__(self, files: Connections) -> None:
        self._files = files
        self._woken = 0
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._seen = threading.local()

    def tell(self) -> None:
        """Let the threads that wait in this process look at once."""
        for bell in tuple(self._waiting):
            bell.put(None)

    def wake(self) -> None:
        """Let all waits of this process return."""
        self._woken += 1
        self.tell()

    def wait(self, seconds: float) -> bool:
        """Whether there was news since this thread waited last, within so many seconds."""
        give_up = time.monotonic() + seconds
        from queue import Empty, SimpleQueue

        bell = SimpleQueue[None]()
        self._waiting.append(bell)
        try:
            while not self._is_new():
                left = give_up - time.monotonic()
                if left <= 0:
                    return False
                with suppress(Empty):
                    bell.get(timeout=min(left, _LOOK_SECONDS))
            return True
        finally:
            self._waiting.remove(bell)

    def _is_new(self) -> bool:
        if self._files.is_closed:
            return True
        seen = (self._woken, self._files.ask(_NEWS)[0][0])
        before = getattr(self._seen, "news", None)
        self._seen.news = seen
        return before != seen

    def after_fork_in_child(self) -> None:
        """Nobody waits here."""
        self._waiting.clear()


class SqliteQueues:
    """`Queues` in one file. What it promises is said there."""

    def __init__(
        self, files: Connections, log: Log, holding: Holding, timeline: Timeline, news: News, clock: Clock
    ) -> None:
        self._files = files
        self._log = log
        self._holding = holding
        self._timeline = timeline
        self._news = news
        self._clock = clock

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            due = self._timeline.now() + due_in
            (epoch,) = db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            is_made = self._log.make(db, run_id, epoch * 2**20, secret, listing, [rows], due=due)
            if is_made:
                self._timeline.mark(db, is_news=True)
            return is_made

        self._files.refuse_reentry()
        with self._files.mutex:
            try:
                is_made = self._files.transact(FULL, work)
            except (sqlite3.Error, OSError) as error:
                is_made = self._look_up_made(error, run_id, secret)
        self._news.tell()
        return is_made

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        owner = self._holding.own_name(owner)
        terms = {queue.name: queue for queue in queues}
        self._files.refuse_reentry()
        if at_most < 1 or not self._due(self._files.ask, terms, agents, 1)[0]:  # who finds nothing locks nothing
            return []
        take = partial(
            self._take_due, owner=owner, lease_seconds=lease_seconds, terms=terms, agents=agents, at_most=at_most
        )
        with self._files.mutex:
            try:
                self._files.ready()
                self._holding.owners.hold(owner)
                # A failed COMMIT leaves it open whether the runs are ours. Then `free_dead` finds that we do not know of them.
                leases = self._files.transact(FULL, take)
            except (sqlite3.Error, OSError) as error:
                raise self._files.failed(error) from error
            for lease in leases:
                self._holding.gain(lease.run_id, lease.token)
        return leases

    def next_due(self, queues: Sequence[str], agents: Sequence[str]) -> float | None:
        ((due,),) = self._files.ask(_NEXT_DUE, json.dumps(queues), json.dumps(agents))
        return None if due is None else max(0.0, due - self._timeline.now())

    def free_dead(self) -> int:
        files, owners = self._files, self._holding.owners
        files.refuse_reentry()
        with files.mutex:
            try:
                if not any(self._dead(files.ready())):  # who finds nothing locks nothing
                    return 0
                freed = files.transact(NORMAL, self._free)
                owners.bury()
            except (sqlite3.Error, OSError) as error:
                raise files.failed(error) from error
            finally:
                owners.leave()
        self._news.tell()
        return freed

    def wait_for_work(self, seconds: float) -> bool:
        return self._news.wait(seconds)

    def wake(self) -> None:
        self._news.wake()

    def beat(self, worker: str, said: bytes) -> None:
        def work(db: sqlite3.Connection) -> None:
            now = self._timeline.now()
            db.execute("DELETE FROM workers WHERE beat <= ?", (now - _FORGOTTEN_SECONDS,))
            db.execute(_BEAT, (worker, said, now))
            self._timeline.mark(db, is_news=False)

        self._files.write(NORMAL, work)

    def leave(self, worker: str) -> None:
        self._files.write(NORMAL, lambda db: db.execute("DELETE FROM workers WHERE worker = ?", (worker,)))

    def workers(self) -> list[Beat]:
        now = self._timeline.now()
        heard = self._files.ask(
            "SELECT worker, said, ? - beat FROM workers WHERE beat > ? ORDER BY rowid", now, now - _FORGOTTEN_SECONDS
        )
        return [Beat(worker, said, max(0.0, idle_seconds)) for worker, said, idle_seconds in heard]

    # --- inside a transaction -----------------------------------------------------------------------------------------

    def _due(
        self, ask: _Ask, terms: dict[str, QueueTerms], agents: Sequence[str], at_most: int
    ) -> tuple[list[_Candidate], dict[str, Counter[str | None]]]:
        """The first runs that may be claimed, each for itself, and how many are busy in each queue, by key."""
        now, named = self._timeline.now(), json.dumps(agents)
        busy = {name: _busy(ask, queue) for name, queue in terms.items()}
        found: list[_Candidate] = []
        for name, queue in terms.items():
            if queue.concurrency is None or busy[name].total() < queue.concurrency:
                full = json.dumps([key for key in busy[name] if _is_full(queue, busy[name], key)])
                found += map(_Candidate._make, ask(_DUE, json.dumps([name]), named, now, full, at_most))
        return sorted(found, key=lambda run: (-run.priority, run.due))[:at_most], busy

    def _take_due(
        self,
        db: sqlite3.Connection,
        *,
        owner: str,
        lease_seconds: float,
        terms: dict[str, QueueTerms],
        agents: Sequence[str],
        at_most: int,
    ) -> list[Lease]:
        def ask(statement: str, *values: object) -> list[Any]:
            return db.execute(statement, values).fetchall()

        held = (owner, self._clock.elapsed() + lease_seconds, lease_seconds, boot_id())
        leases: list[Lease] = []
        while True:
            runs, busy = self._due(ask, terms, agents, at_most - len(leases))
            taken = 0
            for run in runs:
                if _is_full(terms[run.queue], busy[run.queue], run.key):
                    continue  # by those that were taken just now
                busy[run.queue][run.key] += 1
                ((token, secret, deaths),) = ask(_TAKE, *held, run.run_id)
                leases.append(Lease(run.run_id, owner, token, secret or b"", run.agent, deaths))
                taken += 1
            if taken in (0, len(runs)):  # else there may be others behind those that had to be left
                return leases

    def _dead(self, db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
        """The runs of queues whose owners are dead or had their time, each with its token. The graves of the dead are open."""
        for run_id, *columns in db.execute(_BUSY).fetchall():
            held = Held(*columns)
            if self._holding.is_free(run_id, held):
                yield run_id, held.token

    def _free(self, db: sqlite3.Connection) -> int:
        freed = 0
        for run_id, token in self._dead(db):
            self._holding.free(db, run_id)
            self._holding.lose(run_id, token)
            freed += 1
        self._holding.free_dead(db)
        self._timeline.mark(db, is_news=True)
        return freed

    def _look_up_made(self, error: sqlite3.Error | OSError, run_id: str, secret: bytes) -> bool:
        fault = self._files.failed(error)
        if leaves_doubt(error):
            try:
                statement = "SELECT 1 FROM secrets WHERE run_id = ? AND secret = ?"
                if self._files.ready().execute(statement, (run_id, secret)).fetchone() and self._files.is_emptied():
                    return True
            except (sqlite3.Error, OSError, StoreError):
                pass  # the first failure says more
        raise fault from error


def _busy(ask: _Ask, queue: QueueTerms) -> Counter[str | None]:
    """How many of a queue's runs are owned, by key; nobody counts where there is no limit."""
    is_limited = queue.concurrency is not None or queue.per_key is not None
    return Counter(dict(ask(_BUSY_KEYS, queue.name))) if is_limited else Counter()


def _is_full(queue: QueueTerms, busy: Counter[str | None], key: str | None) -> bool:
    if queue.concurrency is not None and busy.total() >= queue.concurrency:
        return True
    return queue.per_key is not None and key is not None and busy[key] >= queue.per_key
