"""The embedded store: one SQLite file in WAL mode, written by one connection at a time, read beside it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from agent_run_ledger.contract import (
    Append,
    Beat,
    Erasure,
    Head,
    Lease,
    Listing,
    QueueTerms,
    Request,
    Row,
    Summary,
    Tombstone,
)
from agent_run_ledger.errors import LeaseLost, LedgerError, RunMoved, RunNotFound, RunOwned, StoreError
from agent_run_ledger.stores import lifetime
from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.connections import FULL, NORMAL, Connections
from agent_run_ledger.stores.faults import leaves_doubt
from agent_run_ledger.stores.holding import DEATHS, Held, Holding
from agent_run_ledger.stores.schema import OBJECTS
from agent_run_ledger.stores.sqlite_erasing import Erasing
from agent_run_ledger.stores.sqlite_log import ROW, Log, kept_aside
from agent_run_ledger.stores.sqlite_queues import News, SqliteQueues
from agent_run_ledger.stores.timeline import Timeline

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

_SUMMARIES_PER_PAGE = 200

# Nobody owns it, as was read in the same transaction; a new epoch begins above every token of the old ones. From now on somebody could
# lose the run, so it is due, if it is in a queue.
_CLAIM = """
UPDATE runs SET owner = ?1, lease_until = ?2, lease_seconds = ?3, lease_boot = ?4, note = NULL,
    fencing_token = max(fencing_token, (SELECT value FROM meta WHERE key = 'epoch') * 1048576) + 1,
    due = CASE WHEN queue IS NOT NULL THEN min(coalesce(due, ?5), ?5) END
WHERE run_id = ?6 AND fencing_token = ?7 AND owner IS NULL
RETURNING fencing_token
"""

_RENEW = """
UPDATE runs SET lease_until = ?, lease_seconds = ?, lease_boot = ?
WHERE run_id = ? AND fencing_token = ? AND owner IS NOT NULL
RETURNING inbox
"""

_RELEASE = """
UPDATE runs SET owner = NULL, due = CASE WHEN queue IS NOT NULL THEN ?4 + CASE WHEN inbox > ?3 THEN 0.0 ELSE ?5 END END
WHERE run_id = ?1 AND fencing_token = ?2 AND owner IS NOT NULL
RETURNING queue
"""

_MOVE_AWAY = """
UPDATE runs SET owner = NULL, due = NULL, moved_to = ?3
WHERE run_id = ?1 AND fencing_token = ?2 AND owner IS NOT NULL
RETURNING 1
"""

_LEASE = "SELECT owner, fencing_token, lease_until, lease_seconds, lease_boot, moved_to FROM runs WHERE run_id = ?"
_EPOCH = "SELECT value FROM meta WHERE key = 'epoch'"
_SECRET = "SELECT secret FROM secrets WHERE run_id = ?"
_LEASED = f"SELECT {DEATHS.format('r')}, (SELECT secret FROM secrets s WHERE s.run_id = r.run_id) FROM runs r WHERE r.run_id = ?"

# Of a lease of another boot nobody can say how much of it is left.
_HEAD = f"""r.run_id, r.owner, r.fencing_token, r.inbox, r.note, r.created_at, r.agent, r.queue, r.priority, r.key,
    CASE WHEN r.owner IS NOT NULL AND r.lease_boot = ?2 THEN max(0.0, ?3 - (r.lease_until - r.lease_seconds)) END,
    CASE WHEN r.owner IS NOT NULL AND r.lease_boot = ?2 THEN r.lease_until - ?3 END,
    r.due - ?4, r.moved_to, {DEATHS.format("r")}"""
_HEAD_OF = f"SELECT {_HEAD} FROM runs r WHERE r.run_id = ?1"

_SUMMARIES = f"""
SELECT r.rowid, {_HEAD}, {ROW.format("f")}, {ROW.format("l")}
FROM runs r
JOIN entries f ON f.run_id = r.run_id AND f.seq = (SELECT min(seq) FROM entries WHERE run_id = r.run_id)
JOIN entries l ON l.run_id = r.run_id AND l.seq = (SELECT max(seq) FROM entries WHERE run_id = r.run_id)
WHERE {{}} ORDER BY r.rowid LIMIT {_SUMMARIES_PER_PAGE}
"""
_SUMMARIES_AFTER = _SUMMARIES.format("r.rowid > ?1")
_SUMMARY_OF = _SUMMARIES.format("r.run_id = ?1")

# What belongs to no run that can be listed, or to no entry, so that nobody who goes through the runs would come by it.
_STRAYS = """
SELECT 'run ' || quote(run_id) || ' has entries and no head' FROM (
    SELECT run_id FROM entries EXCEPT SELECT run_id FROM runs)
UNION ALL
SELECT 'run ' || quote(run_id) || ' has a head and no entries' FROM (
    SELECT run_id FROM runs EXCEPT SELECT run_id FROM entries EXCEPT SELECT run_id FROM tombstones)
UNION ALL
SELECT 'run ' || quote(run_id) || ' has a tombstone and entries' FROM (
    SELECT run_id FROM tombstones INTERSECT SELECT run_id FROM entries)
UNION ALL
SELECT 'run ' || quote(run_id) || ' has a payload that no entry names' FROM (
    SELECT run_id, digest FROM payloads WHERE bytes IS NOT NULL EXCEPT SELECT run_id, digest FROM entries)
"""

# One writer per run: others only put requests here, move the counter, the one column that needs no token, and bring a worker to it.
_POST = """
UPDATE runs SET inbox = inbox + 1, due = CASE WHEN queue IS NOT NULL THEN min(coalesce(due, ?2), ?2) END
WHERE run_id = ?1 AND moved_to IS NULL RETURNING inbox, queue
"""
_INBOX = "INSERT INTO inbox (run_id, id, kind, payload, who, at) VALUES (?, ?, ?, ?, ?, ?)"


class SqliteStore:
    """A `Store` in one file on one machine.

    Every write and every checkpoint of all processes runs under the lock file beside the database. Connections never
    cross a fork: they are closed before it and opened anew on both sides when next needed.
    """

    is_remote = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Literal["full", "process"] = "full",
        clock: Clock,
        busy_seconds: float = 30.0,
        read_only: bool = False,
        migrations: Sequence[str] | None = None,
    ) -> None:
        self.path = self.place = os.path.realpath(os.fsdecode(path))
        self.durability = durability
        self.clock = clock
        self.read_only = read_only
        self._holding = Holding(self.path, clock)
        self._files = Connections(self.path, busy_seconds, read_only=read_only, migrations=migrations)
        self._log = Log(self._files, self._holding)
        self._news = News(self._files)
        self._erasing = Erasing(self._files, self._log, self._holding)
        self._files.open()
        self._timeline = Timeline(self._files, clock)
        self._queues = SqliteQueues(self._files, self._log, self._holding, self._timeline, self._news, clock)
        lifetime.watch(self)

    # --- runs and leases ----------------------------------------------------------------------------------------------

    def first_token(self) -> int:
        return int(self._files.ask(_EPOCH)[0][0]) * 1048576 + 1

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        owner = self._holding.own_name(owner)
        self._files.refuse_reentry()
        with self._files.mutex:
            end = self.clock.elapsed() + lease_seconds

            def work(db: sqlite3.Connection) -> int | None:
                token = int(db.execute(_EPOCH).fetchone()[0]) * 1048576 + 1
                held = (owner, end, lease_seconds, boot_id())
                due = self._timeline.now()
                is_made = self._log.make(db, run_id, token, secret, listing, [rows], due=due, held=held)
                return token if is_made else None

            try:
                self._files.ready()
                self._holding.owners.hold(owner)
                token = self._files.transact(FULL, work)
            except (sqlite3.Error, OSError) as error:
                token = self._look_up_created(error, run_id, owner, end)
            if token is None:
                return None
            self._holding.gain(run_id, token)
            return Lease(run_id, owner, token, secret)

    def adopt(
        self,
        run_id: str,
        token: int,
        secret: bytes,
        listing: Listing,
        pages: Iterable[Sequence[Row]],
        requests: Sequence[Request],
        due_in: float | None,
    ) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            due = None if due_in is None else self._timeline.now() + due_in
            inbox = len(requests)
            is_made = self._log.bring_back(db, run_id, token, spooled, due=due, inbox=inbox) or self._log.make(
                db, run_id, token, secret, listing, spooled, due=due, inbox=inbox
            )
            if is_made:
                asked = ((run_id, each.id, each.kind, each.payload, each.who, each.at) for each in requests)
                db.executemany(_INBOX, asked)
                self._timeline.mark(db, is_news=True)
            return is_made

        with kept_aside(pages) as spooled:  # who reads from elsewhere holds no lock meanwhile
            is_made = self._files.write(FULL, work)
        self._news.tell()
        return is_made

    def move_away(self, run_id: str, token: int, place: str) -> None:
        if self._holding.is_inherited(run_id, token):
            raise LeaseLost(run_id, token)

        def work(db: sqlite3.Connection) -> None:
            if db.execute(_MOVE_AWAY, (run_id, token, place)).fetchone() is None:
                is_known = db.execute(_LEASE, (run_id,)).fetchone() is not None
                raise LeaseLost(run_id, token) if is_known else RunNotFound(run_id)

        self._files.write(FULL, work)
        self._holding.lose(run_id, token)

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        owner = self._holding.own_name(owner)
        self._files.refuse_reentry()
        with self._files.mutex:
            try:
                self._files.ready()
                self._holding.owners.hold(owner)
                # A failed COMMIT leaves it open whether the run is ours. Nothing was done under the new token then, and
                # we hold this owner's lock: the next claim takes the run from ourselves.
                take = partial(self._take, run_id=run_id, owner=owner, lease_seconds=lease_seconds)
                lease = self._files.transact(FULL, take)
                self._holding.owners.bury()
            except (sqlite3.Error, OSError) as error:
                raise self._files.failed(error) from error
            finally:
                self._holding.owners.leave()
            if not self._holding.has(run_id, lease.token):
                self._holding.gain(run_id, lease.token)
                self._log.noted.discard(run_id)
            return lease

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        if self._holding.is_inherited(run_id, token):
            raise LeaseLost(run_id, token)

        def work(db: sqlite3.Connection) -> int:
            end = self.clock.elapsed() + lease_seconds
            renewed = db.execute(_RENEW, (end, lease_seconds, boot_id(), run_id, token)).fetchone()
            if renewed is None:
                is_known = db.execute(_LEASE, (run_id,)).fetchone() is not None
                raise LeaseLost(run_id, token) if is_known else RunNotFound(run_id)
            return int(renewed[0])

        return self._files.write(NORMAL, work)

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        if self._holding.is_inherited(run_id, token):
            return

        def work(db: sqlite3.Connection) -> bool:
            released = db.execute(_RELEASE, (run_id, token, inbox, self._timeline.now(), due_in)).fetchone()
            self._holding.lose(run_id, token)  # where it fails and is ours still, a claim takes it from ourselves
            is_news = released is not None and released[0] is not None  # of a queue: if not to be taken, it made room
            if is_news:
                self._timeline.mark(db, is_news=True)
            return is_news

        if self._files.write(NORMAL, work):
            self._news.tell()

    # --- entries ------------------------------------------------------------------------------------------------------

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        return self._log.append(run_id, token, inbox, rows, synced=synced)

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        return self._log.append_all(appends, synced=synced)

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        return self._log.read(run_id, after, limit=limit, payloads_up_to=payloads_up_to)

    def payload(self, run_id: str, seq: int) -> bytes | None:
        return self._log.payload(run_id, seq)

    def roots(self, run_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
        return self._log.roots(run_id, seqs)

    def sync(self, run_id: str) -> None:
        self._log.sync(run_id)

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        self._erasing.erase(run_id, token, rows, erasure)

    def delete(self, tombstone: Tombstone, token: int) -> None:
        self._erasing.delete(tombstone, token)

    def tombstone(self, run_id: str) -> Tombstone | None:
        return self._erasing.tombstone(run_id)

    def scrub(self) -> list[str]:
        return self._erasing.scrub()

    # --- looking, and what others ask ---------------------------------------------------------------------------------

    def head(self, run_id: str) -> Head | None:
        found = self._files.ask(_HEAD_OF, run_id, *self._times())
        return _head(found[0]) if found else None

    def secret(self, run_id: str) -> bytes:
        found = self._files.ask(_SECRET, run_id)
        return found[0][0] or b"" if found else b""

    def reseal(self, run_id: str, sealed: bytes, anew: bytes) -> bool:
        return self._erasing.reseal(run_id, sealed, anew)

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        statement, key = (_SUMMARIES_AFTER, cast(Any, 0)) if run_id is None else (_SUMMARY_OF, run_id)
        while True:
            page = self._files.ask(statement, key, *self._times())
            for found in page:
                yield Summary(_head(found[1:16]), Row._make(found[16:26]), Row._make(found[26:]))
            if run_id is not None or len(page) < _SUMMARIES_PER_PAGE:
                return
            key = page[-1][0]

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        def work(db: sqlite3.Connection) -> int:
            counted = db.execute(_POST, (run_id, self._timeline.now() + due_in)).fetchone()
            if counted is None:
                *_, place = db.execute(_LEASE, (run_id,)).fetchone() or (None,)
                raise RunMoved(run_id, place) if place is not None else RunNotFound(run_id)
            number, queue = counted
            db.execute(_INBOX, (run_id, number, kind, payload, who, at))
            if queue is not None:
                self._timeline.mark(db, is_news=True)
            return int(number)

        number = self._files.write(FULL, work)
        self._news.tell()
        return number

    def inbox(self, run_id: str, after: int) -> list[Request]:
        statement = "SELECT id, kind, payload, who, at FROM inbox WHERE run_id = ? AND id > ? ORDER BY id"
        return [Request(*found) for found in self._files.ask(statement, run_id, after)]

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        if self._holding.is_inherited(run_id, token):
            return

        def work(db: sqlite3.Connection) -> None:
            self._log.noted.add(run_id)
            db.execute("UPDATE runs SET note = ? WHERE run_id = ? AND fencing_token = ?", (note, run_id, token))

        self._files.write(NORMAL, work)

    # --- queues -------------------------------------------------------------------------------------------------------

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        return self._queues.enqueue(run_id, secret, rows, listing, due_in)

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        return self._queues.claim_due(owner, lease_seconds, queues, agents, at_most)

    def next_due(self, queues: Sequence[str], agents: Sequence[str]) -> float | None:
        return self._queues.next_due(queues, agents)

    def free_dead(self) -> int:
        return self._queues.free_dead()

    def wait_for_work(self, seconds: float) -> bool:
        return self._news.wait(seconds)

    def wake(self) -> None:
        self._news.wake()

    def beat(self, worker: str, said: bytes) -> None:
        self._queues.beat(worker, said)

    def leave(self, worker: str) -> None:
        self._queues.leave(worker)

    def workers(self) -> list[Beat]:
        return self._queues.workers()

    # --- soundness, and the end ---------------------------------------------------------------------------------------

    def check(self) -> Iterable[str]:
        try:
            wrong = [said for (said,) in self._files.ask("PRAGMA integrity_check") if said != "ok"]
            present = dict(self._files.ask(OBJECTS))
            wrong += [said for (said,) in self._files.ask(_STRAYS)]
            expected = self._files.database.expected_objects(self._files.ask("PRAGMA user_version")[0][0])
        except StoreError as error:
            return [str(error)]
        for name, sql in expected.items():
            if name not in present:
                wrong.append(f"the {name} is missing from the schema")
            elif present[name] != sql:
                wrong.append(f"the {name} of the schema was changed")
        return [f"{self.path}: {said}" for said in wrong]

    def close(self) -> None:
        self._close(self._files.lock.busy_seconds)

    def __del__(self) -> None:
        # Whoever collects garbage may hold the lock that closing in good order needs: it is not waited for.
        if hasattr(self, "_files"):
            self._close(0.0)

    # --- inside a transaction -----------------------------------------------------------------------------------------

    def _take(self, db: sqlite3.Connection, *, run_id: str, owner: str, lease_seconds: float) -> Lease:
        """The lease by which `owner` now has the run. Of a dead owner all runs were freed."""
        found = db.execute(_LEASE, (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(run_id)
        *columns, place = found
        if place is not None:
            raise RunMoved(run_id, place)
        held = Held(*columns)
        holder, token = held.owner, held.token
        elapsed = self.clock.elapsed()
        lease = (elapsed + lease_seconds, lease_seconds, boot_id())
        if holder == owner and self._holding.has(run_id, token):
            db.execute(_RENEW, (*lease, run_id, token)).fetchone()
        else:
            if holder is not None:
                if not self._holding.is_free(run_id, held):
                    raise RunOwned(run_id, holder, held.idle_seconds(elapsed))
                self._holding.free_dead(db)
                self._holding.free(db, run_id)
            (token,) = db.execute(_CLAIM, (owner, *lease, self._timeline.now(), run_id, token)).fetchone()
        deaths, secret = db.execute(_LEASED, (run_id,)).fetchone()
        return Lease(run_id, owner, int(token), secret or b"", deaths=deaths)

    def _times(self) -> tuple[str | None, float, float]:
        """What tells how old a lease is and how far off a run is due: this boot, if it is known, and both clocks."""
        return boot_id() or None, self.clock.elapsed(), self._timeline.now()

    def _look_up_created(self, error: sqlite3.Error | OSError, run_id: str, owner: str, end: float) -> int:
        fault = self._files.failed(error)
        if leaves_doubt(error):
            statement = "SELECT fencing_token FROM runs WHERE run_id = ? AND owner = ? AND lease_until = ?"
            try:
                found = self._files.ready().execute(statement, (run_id, owner, end)).fetchone()
                if found is not None and self._files.is_emptied():
                    return int(found[0])
            except (sqlite3.Error, OSError, StoreError):
                pass  # the first failure says more
        raise fault from error

    # --- the end, and forks -------------------------------------------------------------------------------------------

    def _close(self, wait_seconds: float) -> None:
        self._files.close(wait_seconds, self._give_back)
        self._news.tell()
        lifetime.forget(self)

    def _give_back(self) -> None:
        """Free every run of our owners. Where that fails their locks go with their files left, which proves them dead."""
        try:
            if self._holding.owners.held:
                self._files.transact(NORMAL, self._holding.give_back)
            is_given_back = True
        except (sqlite3.Error, OSError, StoreError):
            is_given_back = False
        self._holding.owners.close(remove=is_given_back)

    def before_fork(self) -> None:
        self._files.before_fork()

    def after_fork_in_parent(self) -> None:
        self._files.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        self._files.after_fork_in_child()
        self._holding.after_fork_in_child()
        self._news.after_fork_in_child()
        self._log.noted = set()


def _head(found: Sequence[Any]) -> Head:
    run_id, owner, token, inbox, note, *listing, idle_seconds, lease_left, due_in, place, deaths = found
    return Head(run_id, owner, token, inbox, note, Listing(*listing), idle_seconds, lease_left, due_in, place, deaths)
