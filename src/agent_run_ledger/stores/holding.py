"""Which runs the owners of one store hold, and whether a run that somebody else has may be taken."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING, NamedTuple

from agent_run_ledger.stores.clock import boot_id
from agent_run_ledger.stores.owners import Owners

if TYPE_CHECKING:
    from agent_run_ledger.contract import Clock

_GIVE_BACK = "UPDATE runs SET owner = NULL WHERE owner = ?"

# Deaths are counted from the last entry on. Nothing is written for that where entries are: whether there has been one since is asked here.
_BEREAVE = """
UPDATE runs SET owner = NULL,
    deaths = CASE WHEN deaths_after = (SELECT max(seq) FROM entries e WHERE e.run_id = runs.run_id) THEN deaths + 1 ELSE 1 END,
    deaths_after = (SELECT max(seq) FROM entries e WHERE e.run_id = runs.run_id)
"""
_BEREAVE_ONE = f"{_BEREAVE} WHERE run_id = ? AND owner IS NOT NULL"
_BEREAVE_ALL = f"{_BEREAVE} WHERE owner = ?"
DEATHS = """CASE WHEN {0}.deaths = 0 THEN 0
    WHEN {0}.deaths_after = (SELECT max(seq) FROM entries e WHERE e.run_id = {0}.run_id) THEN {0}.deaths ELSE 0 END"""
"""`Head.deaths`, with the name of the table of heads to be put in."""


class Held(NamedTuple):
    """The columns of a head that say who has the run and until when, as they are read from `runs`."""

    owner: str | None
    token: int
    until: float
    seconds: float
    boot: str | None

    def idle_seconds(self, elapsed: float) -> float:
        """Since its owner claimed or renewed it; 0.0 where another boot's clock counts."""
        return max(0.0, elapsed - (self.until - self.seconds)) if self.boot == boot_id() else 0.0


class Holding:
    """What this process knows of owners and leases, its own and those of others. Used under the mutex of the writer."""

    def __init__(self, path: str, clock: Clock) -> None:
        self.owners = Owners(path)
        self._clock = clock
        self.tokens: dict[str, int] = {}
        """The token of each run that was claimed here, until it is given back."""
        self._watched: dict[str, tuple[Held, float]] = {}
        self.inherited: dict[str, int] = {}
        """The token of each run that the parent of this process had when it was forked."""
        self._inherited_owners: frozenset[str] = frozenset()

    def own_name(self, owner: str) -> str:
        """An owner id from before a fork names the parent's owner; the child's is spelt with its process id."""
        return f"{owner}.{os.getpid():x}" if owner in self._inherited_owners else owner

    def is_inherited(self, run_id: str, token: int) -> bool:
        """Whether it is the parent of this process that has the run under this token."""
        return bool(self.inherited) and self.inherited.get(run_id) == token

    def has(self, run_id: str, token: int) -> bool:
        """Whether this store has the run under this token, as far as it knows."""
        return self.tokens.get(run_id) == token

    def gain(self, run_id: str, token: int) -> None:
        """Note that the run is ours from now on."""
        self.tokens[run_id] = token
        self._watched.pop(run_id, None)

    def lose(self, run_id: str, token: int) -> None:
        """Note that the run is no longer ours under this token."""
        if self.has(run_id, token):
            del self.tokens[run_id]

    def is_free(self, run_id: str, held: Held) -> bool:
        """Whether the run may be taken from its owner, whose grave is open where the kernel proves it dead."""
        assert held.owner is not None
        elapsed, here = self._clock.elapsed(), boot_id()
        is_local = self.owners.is_local()
        if held.boot and held.boot == here:
            if held.owner in self.owners.held and is_local:
                # Ours by name. Unless it is ours by token too, it was a dead owner's of the same name.
                return held.until <= elapsed or not self.has(run_id, held.token)
            return (is_local and self.owners.prove_death(held.owner)) or held.until <= elapsed
        if held.boot and here and is_local:
            # This machine was started anew since, and nothing of that boot is alive.
            self.owners.prove_death(held.owner)
            return True
        # Another machine's clock says nothing here: the lease is watched, unchanged, for as long as it is valid.
        watched, since = self._watched.get(run_id, (None, elapsed))
        if watched != held:
            self._watched[run_id] = (held, elapsed)
            return False
        return elapsed - since >= held.seconds

    def free(self, db: sqlite3.Connection, run_id: str) -> None:
        """Take the run from its owner, who is dead or had his time, unless that is done by now."""
        db.execute(_BEREAVE_ONE, (run_id,))

    def free_dead(self, db: sqlite3.Connection) -> None:
        """Free every run of the owners whose graves are open, so that these can be buried once that is committed."""
        for owner in self.owners.dead:
            db.execute(_BEREAVE_ALL, (owner,))

    def give_back(self, db: sqlite3.Connection) -> None:
        """Free every run of our own owners."""
        for owner in self.owners.held:
            db.execute(_GIVE_BACK, (owner,))

    def after_fork_in_child(self) -> None:
        """What was ours is the parent's."""
        self._inherited_owners |= frozenset(self.owners.abandon())
        self.inherited |= self.tokens
        self.tokens = {}
