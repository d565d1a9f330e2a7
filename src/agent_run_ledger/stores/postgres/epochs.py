"""The epoch that begins where a database was restored: every fencing token from then on is above every one before."""

from __future__ import annotations

import psycopg

from agent_run_ledger.errors import NotALedger
from agent_run_ledger.stores.postgres.connections import connection_terms, place_of
from agent_run_ledger.stores.postgres.faults import named
from agent_run_ledger.stores.postgres.schema import version_of

# Nobody claims, makes or renews anything meanwhile, and whoever waits for this sees the new epoch.
_ALONE = b"LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE"
_BEGIN = b"""
UPDATE meta SET value = greatest(
    meta.value + 1, extract(epoch FROM clock_timestamp())::bigint,
    (SELECT coalesce(max(fencing_token), 0) / 1048576 + 1 FROM runs))
WHERE key = 'epoch' RETURNING value
"""
_FREE = b"""
UPDATE runs SET owner = NULL, lease_until = NULL, lease_seconds = NULL, lease_call = NULL, fencing_token = %s::bigint * 1048576
"""
_NO_WORKERS = b"DELETE FROM workers"


def new_epoch(dsn: str) -> int:
    """Begin an epoch above every one that the database knows of: nobody has a run then, and old tokens are refused.

    Takes the role that owns the tables. Raises a `StoreError`; nothing was changed then.
    """
    place = place_of(dsn)
    try:
        with psycopg.connect(**connection_terms(dsn), autocommit=True) as connection, connection.transaction():
            connection.execute(b"SELECT set_config('synchronous_commit', 'on', true)")
            if not version_of(connection, place):
                raise NotALedger(f"{place} holds no ledger; nothing was changed. Check the address.")
            connection.execute(_ALONE)
            ((epoch,),) = connection.execute(_BEGIN).fetchall()
            connection.execute(_FREE, (epoch,))
            connection.execute(_NO_WORKERS)
            return int(epoch)
    except psycopg.Error as error:
        raise named(error, place) from error
