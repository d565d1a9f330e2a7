"""Where entries are kept: one way to open a store, whatever it stands on."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from agent_run_ledger.errors import StoreError

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock, Store


def open_store(
    path: str | os.PathLike[str],
    *,
    durability: Literal["full", "process"],
    clock: Clock,
    busy_seconds: float = 30.0,
    outage_seconds: float = 60.0,
    read_only: bool = False,
) -> Store:
    """Open the store that `path` names: `":memory:"`, the address of a PostgreSQL database, or an SQLite file, which is made where there is none.

    A file that others keep locked is waited for `busy_seconds`, a database that cannot be reached `outage_seconds`. Raises a `StoreError`
    that says what is wrong and what to do; a file that is not a ledger is left as it is.
    """
    name = os.fsdecode(path)
    if name == ":memory:":
        from agent_run_ledger.stores.memory import MemoryStore

        return MemoryStore(clock=clock)
    if name.startswith(("postgresql://", "postgres://")):
        store: Store = _postgres().PostgresStore(name, outage_seconds=outage_seconds, read_only=read_only)
        return store
    from agent_run_ledger.stores.sqlite import SqliteStore

    return SqliteStore(name, durability=durability, clock=clock, busy_seconds=busy_seconds, read_only=read_only)


def migrate(
    dsn: str, *, dry_run: bool = False, partitions: int | None = None, triggers: bool = True, grant: str | None = None
) -> list[str]:
    """See `AgentRunLedger.migrate`."""
    ran: list[str] = _postgres().migrate(dsn, dry_run=dry_run, partitions=partitions, triggers=triggers, grant=grant)
    return ran


def _postgres() -> ModuleType:
    try:
        return import_module("agent_run_ledger.stores.postgres")
    except ImportError as error:
        raise StoreError(
            f"a ledger on PostgreSQL needs psycopg ({error}); nothing was opened. Install the extra in the checkout of this project: "
            'pip install ".[postgres]"'
        ) from error
