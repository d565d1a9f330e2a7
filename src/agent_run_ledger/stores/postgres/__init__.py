"""The same ledger on PostgreSQL: one database that many machines share."""

from __future__ import annotations

from agent_run_ledger.stores.postgres.diagnosis import diagnose
from agent_run_ledger.stores.postgres.epochs import new_epoch
from agent_run_ledger.stores.postgres.migrating import migrate
from agent_run_ledger.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore", "diagnose", "migrate", "new_epoch"]
