"""What the owners of a run share, the store and the clock, and that a store keeps P4 and P5 whatever it is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from agent_run_ledger import LedgerError
from agent_run_ledger.contract import Head, Lease, Request, Row
from agent_run_ledger.engine.history import History
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.testing import FakeClock
from support.replayed import LEASE_SECONDS, ME, RUN, SECRET, WALL, Raised, Verb

WRITES = frozenset({"create", "claim", "renew", "release", "append", "post", "annotate"})


class Owned(NamedTuple):
    """Who owns the run if the store keeps its promise, whatever the store says."""

    holder: str | None
    token: int
    until: float


NOBODY = Owned(None, 0, 0.0)


class Write(NamedTuple):
    """A verb that changed the store, and when."""

    elapsed: float
    verb: Verb


@dataclass(frozen=True)
class Shared:
    """The store's contents and the clock at one moment, and the names of the two owners that live then."""

    names: tuple[str, str] = ("1", "2")
    born: int = 2
    """How many owners there have been."""
    elapsed: float = 0.0
    wall: float = WALL
    owned: Owned = NOBODY
    writes: tuple[Write, ...] = ()
    rows: tuple[Row, ...] = ()
    head: Head | None = None
    requests: tuple[Request, ...] = ()

    @cached_property
    def is_held(self) -> bool:
        """Whether a lease runs."""
        return self.owned.holder is not None and self.owned.until > self.elapsed

    @cached_property
    def is_orphaned(self) -> bool:
        """Whether a lease runs whose owner is dead: it runs out in any case, and is not the one that may be lost."""
        return self.is_held and self.role(self.owned.holder) == "gone"

    def role(self, owner: str | None) -> str | None:
        """An owner as the two see him: the left one, the right one, or one that is gone."""
        if owner is None:
            return None
        return ("left", "right")[self.names.index(owner)] if owner in self.names else "gone"

    @property
    def contents(self) -> tuple[Any, ...]:
        """All that makes a difference to what happens next. Writes take no time, so a lease runs or has run out."""
        head = self.head and (self.role(self.head.owner), self.head.token, self.head.note)
        owned = (self.role(self.owned.holder), self.owned.token, self.is_held)
        return (self.rows, head, owned, self.requests, self.wall)

    @cached_property
    def history(self) -> History:
        return History.read(RUN, SECRET, self.rows)

    @property
    def waiting(self) -> int:
        """How many requests no entry answers yet."""
        return len(self.requests) - self.history.honoured

    def store(self) -> MemoryStore:
        """A store with these contents, made by the verbs that made them."""
        clock = FakeClock(self.wall, 0.0)
        store = MemoryStore(clock=clock)
        for write in self.writes:
            clock.advance(write.elapsed - clock.elapsed())
            _perform(store, write.verb)
        clock.advance(self.elapsed - clock.elapsed())
        return store

    def later(self, seconds: float, *, on_the_wall: float) -> Shared:
        """The same, after a time. Wall time is only ever recorded, so it may stand still."""
        return replace(self, elapsed=self.elapsed + seconds, wall=self.wall + on_the_wall)

    def asked(self, me: str, verb: Verb) -> tuple[Any, Shared]:
        """What a store with these contents answers an owner of this name, and what is shared then. Holds both to P4 and P5."""
        named = verb
        if verb.name in ("create", "claim"):
            run_id, _, *others = verb.arguments
            named = replace(verb, arguments=(run_id, me, *others))
        store = self.store()
        try:
            answer = _perform(store, named)
        except LedgerError as error:
            answer = Raised(type(error).__name__, error)
        after = replace(
            self,
            owned=_expect_ownership(self, me, verb, answer),
            rows=tuple(store.read(RUN)),
            head=store.head(RUN),
            requests=tuple(store.inbox(RUN, 0)),
        )
        if verb.name in WRITES and not isinstance(answer, Raised):
            after = replace(after, writes=(*self.writes, Write(self.elapsed, named)))
        _expect_append_only(self, after, verb, answer)
        return _as_seen_by(me, answer), after


def _perform(store: MemoryStore, verb: Verb) -> Any:
    return getattr(store, verb.name)(*verb.arguments, **dict(verb.options))


def _as_seen_by(me: str, answer: Any) -> Any:
    """An answer without the names that owners have here."""
    if isinstance(answer, Lease):
        return answer._replace(owner=ME)
    if isinstance(answer, Head) and answer.owner is not None:
        return answer._replace(owner=ME if answer.owner == me else "another")
    return tuple(answer) if isinstance(answer, list) else answer


# --- what is held to the promises -------------------------------------------------------------------------------------


def _expect_ownership(before: Shared, me: str, verb: Verb, answer: Any) -> Owned:
    """P5: hold the answer to a verb to who owns the run, and say who owns it then."""
    owned = before.owned
    is_mine = owned.holder == me
    is_refused = isinstance(answer, Raised)
    until = before.elapsed + LEASE_SECONDS
    if verb.name == "create" and isinstance(answer, Lease):
        assert before.head is None, "P5: a run was made twice"
        return Owned(me, answer.token, until)
    if verb.name == "claim" and before.head is not None:
        may = is_mine or not before.is_held
        assert is_refused is not may, f"P5: {me} claims the run at {before.elapsed}, it is {owned}: {answer}"
        if is_refused:
            return owned
        assert answer.token > owned.token or (is_mine and answer.token == owned.token), "P5: a token was given twice"
        return Owned(me, answer.token, until)
    if verb.name in ("renew", "append"):
        token = verb.arguments[1]
        may = is_mine and token == owned.token
        assert is_refused is not may, f"P5: {verb.name} by {me} under token {token}, the run is {owned}: {answer}"
        return owned._replace(until=until) if verb.name == "renew" and may else owned
    if verb.name == "release" and is_mine and verb.arguments[1] == owned.token:
        return owned._replace(holder=None)
    return owned


def _expect_append_only(before: Shared, after: Shared, verb: Verb, answer: Any) -> None:
    """P4 and P5: entries are only added, by the run's owner; tokens only go up; nothing begins once the end was asked for."""
    assert after.rows[: len(before.rows)] == before.rows, f"P4: {verb.name} rewrote the log"
    assert after.requests[: len(before.requests)] == before.requests, f"P4: {verb.name} rewrote the inbox"
    assert before.head is None or after.head is not None, f"P4: {verb.name} dropped the run"
    if after.head is not None:
        owner = (after.head.owner, after.head.token)
        assert owner == after.owned[:2], f"P5: {verb.name} gave the run to {owner}, it should be {after.owned}"
        assert before.head is None or after.head.token >= before.head.token, "P5: a token went down"
    added = after.rows[len(before.rows) :]
    if verb.name == "append" and answer is True:
        assert added == tuple(verb.arguments[3]), "P4: what was appended is not what stands there"
    else:
        assert not added or verb.name == "create", f"P4: {verb.name} added entries"
    for row in added:
        assert json.loads(row.body)["token"] == after.owned.token, f"P5: entry {row.seq} carries another token"
        if row.kind == "intent":
            assert not before.waiting, f"step {row.position} was begun after the run's end was asked for"
