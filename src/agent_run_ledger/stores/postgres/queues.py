"""How workers find runs: what is due and unowned is claimed in batches, by as many at once as like, without waiting for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from agent_run_ledger.contract import Beat, Lease, QueueTerms
from agent_run_ledger.stores.postgres.connections import Connections
from agent_run_ledger.stores.postgres.link import SYNCED, Link, timed
from agent_run_ledger.stores.postgres.reading import DEATHS, LAST_SEQ, ONE_MORE_DEATH

_FORGOTTEN_SECONDS = 86_400

# What is looked for: runs of these queues and agents, level by level of their priorities. Each line of the index `runs_ready` is entered
# at its first run, so neither a long line nor one whose runs are due later costs more than a short one.
_LEVELS = """
moment AS MATERIALIZED (
    SELECT {now} AS now
), lines AS MATERIALIZED (
    SELECT q.queue, a.agent FROM unnest(%b::text[]) AS q (queue), unnest(%b::text[]) AS a (agent)
), levels (priority) AS (
    SELECT (SELECT max(top.priority) FROM lines CROSS JOIN LATERAL (
        SELECT r.priority FROM runs r
        WHERE r.queue = lines.queue AND r.agent = lines.agent AND r.owner IS NULL AND r.due IS NOT NULL
        ORDER BY r.priority DESC LIMIT 1
    ) top)
    UNION ALL
    SELECT (SELECT max(top.priority) FROM lines CROSS JOIN LATERAL (
        SELECT r.priority FROM runs r
        WHERE r.queue = lines.queue AND r.agent = lines.agent AND r.owner IS NULL AND r.due IS NOT NULL
            AND r.priority < levels.priority
        ORDER BY r.priority DESC LIMIT 1
    ) top)
    FROM levels WHERE levels.priority IS NOT NULL
)
"""

# The first of all lines, locked. What somebody else has locked is not waited for; what is locked here and not taken is free again in a
# moment. `[]` is a further condition.
_FIRST = """
SELECT p.* FROM levels CROSS JOIN LATERAL (
    SELECT c.* FROM lines CROSS JOIN LATERAL (
        SELECT r.run_id, r.queue, r.key, r.priority, r.due FROM runs r
        WHERE r.queue = lines.queue AND r.agent = lines.agent AND r.priority = levels.priority
            AND r.owner IS NULL AND r.due IS NOT NULL AND r.due <= (SELECT now FROM moment) []
        ORDER BY r.due LIMIT %s FOR UPDATE SKIP LOCKED
    ) c
    ORDER BY c.due LIMIT %s
) p LIMIT %s
"""

_LEASED = f"""run_id, fencing_token, (SELECT secret FROM secrets s WHERE s.run_id = runs.run_id), agent,
    {DEATHS.format("runs")}"""

_TAKE = f"""
UPDATE runs SET
    owner = %s, lease_until = {{now}} + %s::float8, lease_seconds = %s, lease_call = %s, note = NULL,
    fencing_token = greatest(fencing_token, (SELECT value FROM meta WHERE meta.key = 'epoch') * 1048576) + 1
WHERE run_id = ANY([]) AND owner IS NULL AND {SYNCED}
RETURNING {_LEASED}, priority, due
"""

_CLAIM_DUE = f"WITH RECURSIVE {_LEVELS}, first AS ({_FIRST.replace('[]', '')})" + _TAKE.replace(
    "[]", "ARRAY(SELECT run_id FROM first)"
)

# Where a queue is limited: what is under way is counted when all who claimed before are done, and nobody claims while it is counted.
_ADD_QUEUES = b"INSERT INTO queues (name) SELECT unnest(%b::text[]) ON CONFLICT (name) DO NOTHING"
_LOCK_QUEUES = b"SELECT name FROM queues WHERE name = ANY(%s) ORDER BY name FOR UPDATE"
_UNDER_WAY = b"""
SELECT queue, key, count(*) FROM runs
WHERE queue = ANY(%s) AND owner IS NOT NULL AND due IS NOT NULL GROUP BY queue, key
"""
_FIRST_FIT = f"WITH RECURSIVE {_LEVELS}" + _FIRST.replace(
    "[]",
    """AND (r.key IS NULL OR (r.queue, r.key) NOT IN (SELECT * FROM unnest(%b::text[], %b::text[])))
            AND r.run_id NOT IN (SELECT unnest(%b::text[]))""",
)
_TAKE_THESE = _TAKE.replace("[]", "%s")

# What a call took whose answer was lost is still taken: by its mark it is found.
_FIND_TAKEN = f"""
UPDATE runs SET lease_until = {{now}} + %s::float8
WHERE queue = ANY(%s) AND owner = %s AND due IS NOT NULL AND lease_call = ANY(%s) AND {SYNCED}
RETURNING {_LEASED}, priority, due
"""

_NEXT_DUE = f"""
WITH RECURSIVE {_LEVELS}
SELECT min(head.due) - (SELECT now FROM moment) FROM levels, lines CROSS JOIN LATERAL (
    SELECT r.due FROM runs r
    WHERE r.queue = lines.queue AND r.agent = lines.agent AND r.priority = levels.priority AND r.owner IS NULL AND r.due IS NOT NULL
    ORDER BY r.due LIMIT 1
) head
"""

_FREE_DEAD = f"""
UPDATE runs SET owner = NULL, deaths = {ONE_MORE_DEATH}, deaths_after = {LAST_SEQ}
WHERE owner IS NOT NULL AND lease_until <= {{now}} AND {SYNCED} AND run_id = ANY(ARRAY(
    SELECT run_id FROM runs WHERE owner IS NOT NULL AND due IS NOT NULL AND lease_until <= {{now}} FOR UPDATE SKIP LOCKED
))
"""

_BEAT = f"""
INSERT INTO workers (worker, said, at) SELECT %s, %b, {{now}} WHERE {SYNCED}
ON CONFLICT (worker) DO UPDATE SET said = excluded.said, at = excluded.at
"""
_LEAVE = f"DELETE FROM workers WHERE (worker = %s OR at < {{now}} - {_FORGOTTEN_SECONDS}) AND {SYNCED}"
_WORKERS = f"""
SELECT worker, said, {{now}} - at FROM workers WHERE at >= {{now}} - {_FORGOTTEN_SECONDS} ORDER BY since, worker
"""


class Claims:
    """What one store claims for its workers."""

    def __init__(self, links: Connections, now: str, mark: str) -> None:
        self._links = links
        self._now = now
        self._mark = mark
        self._calls = 0
        self._unanswered: list[str] = []
        """The marks of calls of which it is not known what they took."""

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        """As `Queues.claim_due`. May not be called twice at once for one owner."""
        self._calls += 1
        call = f"{self._mark}.{self._calls}"
        names = [queue.name for queue in queues]
        before, self._unanswered = self._unanswered, [*self._unanswered, call]
        take: Any = partial(
            self._take_limited if any(queue.is_limited for queue in queues) else self._take, queues, agents, at_most
        )
        lease = (owner, lease_seconds, lease_seconds, call)

        def find_or_take(link: Link) -> list[Any]:
            values = (lease_seconds, names, owner, [*before, call], "on")
            return link.execute(timed(_FIND_TAKEN, self._now), values, binary=True).fetchall() or list(
                take(lease, link)
            )

        taken = self._links.run(find_or_take if before else partial(take, lease), find_or_take)
        self._unanswered = []
        taken.sort(key=lambda found: (-found[5], found[6]))
        return [
            Lease(run_id, owner, token, secret or b"", agent, deaths)
            for run_id, token, secret, agent, deaths, _, _ in taken
        ]

    def _take(
        self, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int, lease: tuple[Any, ...], link: Link
    ) -> list[Any]:
        names = [queue.name for queue in queues]
        values = (names, list(agents), at_most, at_most, at_most, *lease, "on")
        return link.execute(timed(_CLAIM_DUE, self._now), values, binary=True).fetchall()

    def _take_limited(
        self, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int, lease: tuple[Any, ...], link: Link
    ) -> list[Any]:
        limited = [queue.name for queue in queues if queue.is_limited]
        with link.transaction():
            if len(link.execute(_LOCK_QUEUES, (limited,)).fetchall()) < len(set(limited)):
                link.execute(_ADD_QUEUES, (limited,))
                link.execute(_LOCK_QUEUES, (limited,))
            slots = _Slots(queues, link.execute(_UNDER_WAY, (limited,)).fetchall())
            taken: list[str] = []
            while (left := at_most - len(taken)) > 0 and (names := slots.open_queues()):
                values = (names, list(agents), *slots.full_keys(), taken, left, left, left)
                found = link.execute(timed(_FIRST_FIT, self._now), values).fetchall()
                taken += [run_id for run_id, queue, key, *_ in found if slots.take(queue, key)]
                if len(found) < left:
                    break
            if not taken:
                return []
            return link.execute(timed(_TAKE_THESE, self._now), (*lease, taken, "on"), binary=True).fetchall()


class _Slots:
    """How many runs of each queue, and of each of its keys, may still be taken."""

    def __init__(self, queues: Sequence[QueueTerms], under_way: Sequence[Any]) -> None:
        self._terms = {queue.name: queue for queue in queues}
        self._busy = Counter[tuple[str, str | None]]()
        for queue, key, count in under_way:
            self._count(queue, key, count)

    def take(self, queue: str, key: str | None) -> bool:
        """Take one, if there is one."""
        if not self._is_open(queue) or (key is not None and self._is_full(queue, key)):
            return False
        self._count(queue, key, 1)
        return True

    def open_queues(self) -> list[str]:
        """The queues of which one more may be taken."""
        return [name for name in self._terms if self._is_open(name)]

    def full_keys(self) -> tuple[list[str], list[str]]:
        """The keys of which none may be taken: their queues, and the keys themselves."""
        full = [(queue, key) for queue, key in self._busy if key is not None and self._is_full(queue, key)]
        return [queue for queue, _ in full], [key for _, key in full]

    def _count(self, queue: str, key: str | None, count: int) -> None:
        self._busy[queue, None] += count
        if key is not None:
            self._busy[queue, key] += count

    def _is_open(self, queue: str) -> bool:
        most = self._terms[queue].concurrency
        return most is None or self._busy[queue, None] < most

    def _is_full(self, queue: str, key: str) -> bool:
        most = self._terms[queue].per_key
        return most is not None and self._busy[queue, key] >= most


def next_due(queues: Sequence[str], agents: Sequence[str], now: str, link: Link) -> float | None:
    """As `Queues.next_due`."""
    ((seconds,),) = link.execute(timed(_NEXT_DUE, now), (list(queues), list(agents))).fetchall()
    return None if seconds is None else max(0.0, seconds)


def free_dead(now: str, link: Link) -> int:
    """As `Queues.free_dead`; nothing here proves a death but a lease that ran out."""
    return link.execute(timed(_FREE_DEAD, now), ("off",)).rowcount


def beat(worker: str, said: bytes, now: str, link: Link) -> None:
    """As `Queues.beat`."""
    link.execute(timed(_BEAT, now), (worker, said, "off"))


def leave(worker: str, now: str, link: Link) -> None:
    """As `Queues.leave`; whoever is silent for a day is forgotten with it."""
    link.execute(timed(_LEAVE, now), (worker, "off"))


def workers(now: str, link: Link) -> list[Beat]:
    """As `Queues.workers`."""
    return [Beat._make(found) for found in link.execute(timed(_WORKERS, now), binary=True)]
