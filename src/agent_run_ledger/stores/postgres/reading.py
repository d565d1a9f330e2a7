"""Reading: entries, payloads, heads and summaries, each by one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_run_ledger.contract import Head, Listing, Row, Summary

SUMMARIES_PER_PAGE = 200

LAST_SEQ = "(SELECT max(seq) FROM entries e WHERE e.run_id = runs.run_id)"
ONE_MORE_DEATH = f"CASE WHEN deaths_after = {LAST_SEQ} THEN deaths + 1 ELSE 1 END"
"""Deaths are counted from the last entry on. Where an append was under way just now this sees the log before it, and the next death or
whoever looks finds that an entry was written: one death too few is counted then."""
DEATHS = """CASE WHEN {0}.deaths = 0 THEN 0
        WHEN {0}.deaths_after = (SELECT max(seq) FROM entries e WHERE e.run_id = {0}.run_id) THEN {0}.deaths ELSE 0 END"""
"""`Head.deaths`, with the name of the table of heads to be put in."""

_HEAD = f"""{{0}}.run_id, {{0}}.owner, {{0}}.fencing_token, {{0}}.inbox, {{0}}.note,
    {{0}}.created_at, {{0}}.agent, {{0}}.queue, {{0}}.priority, {{0}}.key,
    CASE WHEN {{0}}.owner IS NOT NULL THEN greatest(0, {{{{now}}}} - ({{0}}.lease_until - {{0}}.lease_seconds)) END,
    CASE WHEN {{0}}.owner IS NOT NULL THEN {{0}}.lease_until - {{{{now}}}} END,
    {{0}}.due - {{{{now}}}}, {{0}}.moved_to, {DEATHS}"""
_HEAD_COLUMNS = 15

_ROW = """{0}.seq, {0}.kind, {0}.position, {0}.attempt, {0}.body, {0}.roots,
    CASE WHEN {0}.payload IS NULL AND {0}.digest IS NOT NULL
        THEN (SELECT bytes FROM payloads p WHERE p.run_id = {0}.run_id AND p.digest = {0}.digest)
        ELSE {0}.payload END,
    {0}.digest, {0}.fingerprint, {0}.encoding"""

HEAD = f"SELECT {_HEAD.format('r')} FROM runs r WHERE run_id = %s"
SECRET = b"SELECT secret FROM secrets WHERE run_id = %s"
EPOCH = b"SELECT value FROM meta WHERE key = 'epoch'"
INBOX = b"SELECT id, kind, payload, who, at FROM inbox WHERE run_id = %s AND id > %s ORDER BY id"

READ = f"SELECT {_ROW.format('e')} FROM entries e WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s".encode()

# The length of what is kept apart from its row is known without reading it.
READ_SHORT = b"""
SELECT seq, kind, position, attempt, body, roots,
    CASE WHEN digest IS NULL THEN payload
        WHEN payload IS NULL THEN (SELECT bytes FROM payloads p
            WHERE p.run_id = e.run_id AND p.digest = e.digest AND octet_length(p.bytes) <= %s)
        WHEN octet_length(payload) <= %s THEN payload END,
    digest, fingerprint, encoding
FROM entries e WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s
"""
PAYLOAD = b"""
SELECT CASE WHEN payload IS NULL AND digest IS NOT NULL
    THEN (SELECT bytes FROM payloads p WHERE p.run_id = e.run_id AND p.digest = e.digest)
    ELSE payload END
FROM entries e WHERE run_id = %s AND seq = %s
"""

ROOTS = b"SELECT seq, roots FROM entries WHERE run_id = %s AND seq = ANY(%s::bigint[])"

# How far the server has written its log, and how the log is divided. A standby has nothing that is not on its primary's disk.
LOG_END = b"""
SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_insert_lsn() - '0/0'::pg_lsn END,
    current_setting('wal_block_size')::bigint, (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_segment_size')
"""
IS_FLUSHED_TO = b"SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn >= %s::bigint"
_PAGE_HEADER, _SEGMENT_HEADER = 24, 40

_SUMMARIES = f"""
SELECT {_HEAD.format("r")}, {_ROW.format("f")}, {_ROW.format("l")}, r.made
FROM runs r
CROSS JOIN LATERAL (SELECT * FROM entries WHERE run_id = r.run_id ORDER BY seq LIMIT 1) f
CROSS JOIN LATERAL (SELECT * FROM entries WHERE run_id = r.run_id ORDER BY seq DESC LIMIT 1) l
WHERE [] ORDER BY r.made, r.run_id LIMIT {SUMMARIES_PER_PAGE}
"""
SUMMARIES_AFTER = _SUMMARIES.replace("[]", "(r.made, r.run_id) > (%s, %s)")
"""The next page, after a place in the order in which runs were made."""
SUMMARY_OF = _SUMMARIES.replace("[]", "r.run_id = %s")
BEFORE_ALL: tuple[object, ...] = (float("-inf"), "")


def as_head(found: Sequence[Any]) -> Head:
    """What `HEAD` answers."""
    run_id, owner, token, inbox, note, *listing, idle, left, due_in, place, deaths = found[:_HEAD_COLUMNS]
    return Head(run_id, owner, token, inbox, note, Listing._make(listing), idle, left, due_in, place, deaths)


def as_summary(found: Sequence[Any]) -> Summary:
    """What the statements of summaries answer, one for each run."""
    first, last = found[_HEAD_COLUMNS:][: len(Row._fields)], found[_HEAD_COLUMNS + len(Row._fields) : -1]
    return Summary(as_head(found), Row._make(first), Row._make(last))


def place_in_order(found: Sequence[Any]) -> tuple[object, ...]:
    """Where the run of a summary stands in the order in which runs were made."""
    return found[-1], found[0]


def last_written(end: int, page: int, segment: int) -> int:
    """Where the last record of the server's log ends, if the next one would begin at `end`.

    At the beginning of a page that is past its header, which is not flushed before there is a record behind it.
    """
    header = _SEGMENT_HEADER if (end - end % page) % segment == 0 else _PAGE_HEADER
    return end - header if end % page == header else end
