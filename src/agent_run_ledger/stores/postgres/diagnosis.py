"""What stands around a ledger on a server, seen without writing: the server, what is between, the role's rights, and how it commits."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from agent_run_ledger.errors import StoreError
from agent_run_ledger.model import ServerDiagnosis
from agent_run_ledger.stores.postgres.connections import Connections
from agent_run_ledger.stores.postgres.link import Link
from agent_run_ledger.stores.postgres.schema import SCHEMA_VERSION, TABLES, refuse_unusable, version_of

_OUTAGE_SECONDS = 5.0
"""Whoever asks what is wrong is not kept waiting until it is mended."""

_CLOCK = b"SELECT extract(epoch FROM clock_timestamp())::double precision"
_SERVER = b"""
SELECT current_setting('server_version'), pg_is_in_recovery(), current_user::text,
    (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
    current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
    current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on',
    current_setting('max_connections')::int
"""

# With their parts and indexes, whoever owns them.
_SIZE = b"""
SELECT coalesce(sum(pg_total_relation_size(coalesce(p.relid, to_regclass(n.name)))), 0)::bigint
FROM unnest(%s::text[]) AS n (name) LEFT JOIN LATERAL pg_partition_tree(to_regclass(n.name)) p ON true
"""
_TRIGGERS = b"""
SELECT count(*) FROM pg_trigger
WHERE tgrelid = to_regclass('entries') AND NOT tgisinternal AND tgenabled IN ('O', 'A')
    AND tgname IN ('entries_are_never_changed', 'entries_are_never_deleted', 'entries_are_never_truncated')
"""
_REWRITES = b"""
SELECT right_ FROM unnest(ARRAY['UPDATE', 'DELETE', 'TRUNCATE']) AS r (right_)
WHERE has_table_privilege('entries', right_) OR (right_ = 'UPDATE' AND has_any_column_privilege('entries', 'UPDATE'))
"""


def diagnose(dsn: str) -> ServerDiagnosis:
    """Look at the server and at what leads to it. Raises a `StoreError` where it cannot be reached or lets nobody in."""
    links = Connections(dsn, _OUTAGE_SECONDS, read_only=True)
    try:
        return links.run(lambda link: _look(links, link))
    finally:
        links.close()


def _look(links: Connections, link: Link) -> ServerDiagnosis:
    ahead, trip = _clock(link)
    ((release, is_standby, role, is_superuser, commits, standbys, syncs, whole_pages, most),) = _ask(link, _SERVER)
    schema = trouble = None
    try:
        schema = version_of(link, links.place) or None
        refuse_unusable(link, links.place)
    except StoreError as error:
        trouble = str(error)
    size, triggers, rewrites = 0, 0, ()
    if trouble is None:
        size, triggers = _ask(link, _SIZE, list(TABLES))[0][0], _ask(link, _TRIGGERS)[0][0]
        rewrites = tuple(right for (right,) in _ask(link, _REWRITES))
    return ServerDiagnosis(
        place=links.place,
        host=link.info.host or link.info.hostaddr,
        server_version=release,
        is_behind_pooler=links.is_behind_pooler,
        is_standby=is_standby,
        role=role,
        is_superuser=is_superuser,
        schema_version=schema,
        newest_schema_version=SCHEMA_VERSION,
        has_triggers=triggers == 3,
        may_rewrite=rewrites,
        synchronous_commit=commits,
        synchronous_standby_names=standbys,
        syncs=syncs,
        writes_whole_pages=whole_pages,
        most_connections=most,
        clock_ahead_seconds=ahead,
        round_trip_seconds=trip,
        size_bytes=size,
        trouble=trouble,
    )


def _clock(link: Link) -> tuple[float, float]:
    """How far the server's clock is ahead of this machine's, and how long an answer takes, both in seconds; the best of three."""
    seen = []
    for _ in range(3):
        before, began = time.time(), time.monotonic()
        ((there,),) = _ask(link, _CLOCK)
        trip = time.monotonic() - began
        seen.append((trip, there - before - trip / 2))
    trip, ahead = min(seen)
    return ahead, trip


def _ask(link: psycopg.Connection[Any], statement: bytes, *values: object) -> list[tuple[Any, ...]]:
    return link.execute(statement, values).fetchall()
