"""Where entries are kept: one way to open a store, whatever it stands on."""

from __future__ import annotations

import os
import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from agent_run_ledger.errors import StoreError

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock, Store
    from agent_run_ledger.model import Diagnosis, ServerDiagnosis


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
    if is_address(name):
        store: Store = _postgres().PostgresStore(name, outage_seconds=outage_seconds, read_only=read_only)
        return store
    _refuse_other_addresses(name)
    from agent_run_ledger.stores.sqlite import SqliteStore

    return SqliteStore(name, durability=durability, clock=clock, busy_seconds=busy_seconds, read_only=read_only)


def is_address(place: str) -> bool:
    """Whether a place is that of a database on a server, and not of a file."""
    return place.startswith(("postgresql://", "postgres://"))


_OTHER_ADDRESS = r"\s*([a-z][a-z0-9+.-]+:/|(host|hostaddr|port|dbname|user|password|service)\s*=)"


def _refuse_other_addresses(name: str) -> None:
    """Make no file of what is meant as an address, and say nothing of it, for a password may stand in it."""
    if (":/" in name or "=" in name) and re.match(_OTHER_ADDRESS, name, re.IGNORECASE):
        raise StoreError(
            "this is no path of a file, and no address of a PostgreSQL database as it is spelt here; nothing was opened. An address is "
            "postgresql://user:password@host:port/database; a file that is really called so is ./ and its name."
        )


def diagnose(path: str | os.PathLike[str]) -> Diagnosis | ServerDiagnosis:
    """See `AgentRunLedger.diagnose`."""
    name = os.fsdecode(path)
    if is_address(name):
        found: ServerDiagnosis = _postgres().diagnose(name)
        return found
    _refuse_other_addresses(name)
    from agent_run_ledger.stores import diagnosis

    return diagnosis.diagnose(name)


def migrate(
    dsn: str, *, dry_run: bool = False, partitions: int | None = None, triggers: bool = True, grant: str | None = None
) -> list[str]:
    """See `AgentRunLedger.migrate`."""
    ran: list[str] = _postgres().migrate(dsn, dry_run=dry_run, partitions=partitions, triggers=triggers, grant=grant)
    return ran


def new_epoch(place: str, least: int) -> int:
    """See `AgentRunLedger.new_epoch`. A database's clock says by itself what `least` says for a file."""
    if is_address(place):
        epoch: int = _postgres().new_epoch(place)
        return epoch
    _refuse_other_addresses(place)
    from agent_run_ledger.stores import backups

    return backups.new_epoch(place, least)


def _postgres() -> ModuleType:
    try:
        return import_module("agent_run_ledger.stores.postgres")
    except ImportError as error:
        raise StoreError(
            f"a ledger on PostgreSQL needs psycopg ({error}); nothing was opened. Install the extra in the checkout of this project: "
            'pip install ".[postgres]"'
        ) from error
