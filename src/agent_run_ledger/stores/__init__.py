"""Where entries are kept: one way to open a store, whatever it stands on."""

from __future__ import annotations

import os
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
    """Open the store that `path` names: `":memory:"`, or an SQLite file, which is made where there is none.

    Raises a `StoreError` that says what is wrong and what to do; a file that is not a ledger is left as it is.
    """
    name = os.fsdecode(path)
    if name == ":memory:":
        from agent_run_ledger.stores.memory import MemoryStore

        return MemoryStore(clock=clock)
    if name.startswith(("postgresql://", "postgres://")):
        raise StoreError(
            "PostgreSQL is not in this version of agent-run-ledger; nothing was opened. Give the path of an SQLite file."
        )
    from agent_run_ledger.stores.sqlite import SqliteStore

    return SqliteStore(name, durability=durability, clock=clock, busy_seconds=busy_seconds, read_only=read_only)
