"""Copying runs to another ledger: one that has ended stands in both then, one that has not is moved, and goes on in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from agent_run_ledger.contract import Head, Row, Store
from agent_run_ledger.drivers import reading
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.engine import audit, waits
from agent_run_ledger.engine.erasing import says_erased
from agent_run_ledger.engine.history import parse
from agent_run_ledger.errors import CopyRefused, RunMoved, RunOwned, StoreError, StoreUnavailable
from agent_run_ledger.model import CopiedRun, Finding
from agent_run_ledger.rules.names import child_of
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from agent_run_ledger.engine.history import History
    from agent_run_ledger.ledger import Ledger

_BYTES_AT_ONCE = 1 << 20
"""How many bytes of payloads are in memory on their way, beside one payload that may be longer."""
_ENTRIES_BETWEEN_WORDS = 500


@dataclass(slots=True)
class _Member:
    """One run of those that are copied together, as it stands at the source."""

    run_id: str
    head: Head
    """As it was before it was claimed: a claim may make it due."""
    is_ended: bool
    parent: str | None
    held: HeldRun | None = None
    """It has not ended and is ours: what is to be moved."""
    was_held: bool = False
    was_there: bool = False
    """Whether all its entries stood at the target already."""
    begun: int = 0
    """How many of its entries and requests stand at the target that it comes back to."""
    asked: int = 0
    size: int = 0
    waited_for: list[str] = field(default_factory=list)
    """The runs that are told when it ends."""

    @property
    def is_moved(self) -> bool:
        """Whether it was moved away by an earlier call."""
        return self.head.moved_to is not None

    @property
    def due_in(self) -> float | None:
        """When it is due at the target: as it was at the source, or at once where nobody knows that any more."""
        return 0.0 if self.is_moved and not self.is_ended else self.head.due_in


class Copying:
    """One call of `copy`, from what a ledger stands on to another store.

    What has not ended is moved, in this order: it is claimed, it is looked whether the target can take it, the source lets go of it for
    good, the target takes it in whole. So at no moment can it go on in two places; if this dies between the last two it goes on in none,
    and the same call once more finds it let go of and goes on from there.
    """

    def __init__(self, ledger: Ledger, target: Store, told: Callable[[str], None] | None) -> None:
        self._ledger = ledger
        self._source, self._target = ledger._store, target
        self._told = told
        self._members: dict[str, _Member] = {}
        """Parents before their children."""

    def run(self, run_id: str, *, children: bool) -> list[CopiedRun]:
        """Copy the run, with its `children` if that is asked; children before their parents in what is returned."""
        if self._source is self._target or (self._source.place == self._target.place != ":memory:"):
            raise self._refusal(run_id, "that is the ledger in which it stands.")
        try:
            self._gather(run_id, children)
            for member in self._members.values():
                self._refuse_to_part(member)
                self._look(member)
            self._let_go()
            bottom_up = list(reversed(self._members.values()))
            for member in bottom_up:
                self._take_in(member, waits=member.run_id != run_id)
            for member in bottom_up[:-1]:
                self._wake(member)
        finally:
            for member in self._members.values():
                self._give_back(member)
        place = self._target.place
        return [CopiedRun(each.run_id, place, each.size, not each.is_ended, each.was_there) for each in bottom_up]

    # --- what is copied -----------------------------------------------------------------------------------------------

    def _gather(self, run_id: str, children: bool) -> None:
        """Claim a run and, if they are wanted, those that its program has begun."""
        head = self._source.head(run_id)
        if head is None:
            raise reading.absent(self._source, run_id)
        held = self._ledger._leases.run(run_id)
        was_held = held.is_held
        if head.moved_to is None:
            history = self._claim(held)
        else:
            history = reading.read(self._source, run_id)
        member = _Member(run_id, head, history.state.is_terminal, history.parent, was_held=was_held)
        self._members[run_id] = member
        if head.moved_to is None and not member.is_ended:
            member.held = held
            member.waited_for = waits.watchers(held)
        for child in self._children(history, every=children):
            if child in self._members:
                continue
            if children:
                self._gather(child, True)
            elif not member.is_ended:
                raise self._refusal(
                    run_id, f"its program waits for run {child!r}, which it has begun. Copy both, with children."
                )

    def _claim(self, held: HeldRun) -> History:
        """Hold the run, unless it has ended, and keep others of this ledger out. Its program stands where it stood."""
        leases = self._ledger._leases
        with self._ledger._starting, held.lock:
            if held.is_busy or held.pins:
                raise RunOwned(held.run_id, leases.owner, 0.0)
            held.is_settled = False
            held.__enter__()
        try:
            leases.await_claim(held, None)
            with held.lock:
                if held.is_held:
                    self._ledger._driver.pay(held)
                    leases.fetch_requests(held)
        except BaseException:
            held.__exit__(None, None, None)
            raise
        if held.history.state.is_terminal:
            held.__exit__(None, None, None)
        return held.history

    def _children(self, history: History, *, every: bool) -> list[str]:
        """The runs that a program has begun: all of them, or those whose end it has not seen."""
        steps = [step for step in history.positions.values() if every or step.outcome is None]
        named = dict.fromkeys(step.child or child_of(step.key) for step in steps)
        return [child for child in named if self._source.head(child) is not None]

    def _refuse_to_part(self, member: _Member) -> None:
        """Raises where somebody stays who waits for the run: nobody would tell him of its end."""
        for waiting in member.waited_for:
            summary = next(iter(self._source.summaries(waiting)), None)
            if waiting in self._members or summary is None or summary.head.moved_to is not None:
                continue
            if not RunState(parse(summary.last.body)["state"]).is_terminal:
                raise self._refusal(member.run_id, f"run {waiting!r} waits for its end. Copy that one, with children.")

    # --- what stands at the target ------------------------------------------------------------------------------------

    def _look(self, member: _Member) -> None:
        """Find out what is to be written. Raises where the target cannot take the run, or must not."""
        run_id, there = member.run_id, self._target.head(member.run_id)
        if there is not None and there.owner == self._ledger._leases.owner:
            raise self._refusal(run_id, "that is the ledger in which it stands, by another name.")
        if there is None and member.is_moved and member.head.moved_to != self._target.place:
            raise RunMoved(run_id, member.head.moved_to or "")
        if there is not None:
            if member.is_moved and there.moved_to is not None:
                raise RunMoved(run_id, there.moved_to)
            member.begun = self._compare(member, comes_back=there.moved_to is not None)
            member.asked, member.was_there = there.inbox, there.moved_to is None
        if member.was_there:
            member.size = member.begun
            if there is not None and there.inbox < member.head.inbox:
                raise self._refusal(run_id, "it stands there already, and something was asked of it here since.")
        else:
            self._audit(member)

    def _compare(self, member: _Member, *, comes_back: bool) -> int:
        """How many entries stand at the target, all equal to those of the source, which has more only where the run comes back."""
        run_id, number = member.run_id, 0
        here, there = (chain.from_iterable(reading.pages(store, run_id)) for store in (self._source, self._target))
        for number, (ours, theirs) in enumerate(zip_longest(here, there), 1):
            if theirs is None and comes_back:
                return number - 1
            if ours is None and not member.is_ended and not comes_back:
                continue  # it went on there
            if says_erased(ours) and says_erased(theirs):
                continue  # it has ended, and each side may forget what it likes
            # A payload may have been erased on one side: the body names it.
            if ours is None or theirs is None or ours[:6] != theirs[:6]:
                raise self._refusal(run_id, f"another run of this id stands there; they differ at entry {number}.")
        return number

    def _audit(self, member: _Member) -> None:
        """Read the whole run once: what is damaged is not carried on."""
        run_id = member.run_id
        findings: list[Finding] = []
        auditor = audit.Audit(run_id, self._source.secret(run_id), findings.append)
        for row in self._whole(run_id, 0):
            auditor.take(row)
            self._say("checked", run_id, auditor.leaves)
        auditor.end(self._source.head(run_id), self._source.inbox(run_id, 0))
        if findings:
            raise self._refusal(run_id, f"it is damaged: {findings[0].message}. `verify` says more.")
        member.size = auditor.leaves

    # --- letting go, and taking in ------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        try:
            for held in [each.held for each in self._members.values() if each.held is not None]:
                with held.lock:
                    self._source.move_away(held.run_id, held.token, self._target.place)
                    self._ledger._leases.lost(held)
                    held.slim()
        except Exception:
            self._take_back()
            raise

    def _take_in(self, member: _Member, *, waits: bool) -> None:
        """Let the target have it. One that `waits` for its parent is not due before that is there, too."""
        if member.was_there:
            return
        source, run_id = self._source, member.run_id
        head = source.head(run_id) or member.head
        requests = source.inbox(run_id, member.asked)
        due_in = None if waits else member.due_in
        try:
            is_written = self._target.adopt(
                run_id, head.token, source.secret(run_id), head.listing, self._pages(member), requests, due_in
            )
        except StoreUnavailable:
            raise  # whether it is written is not known
        except Exception:
            self._take_back()
            raise
        if not is_written:
            self._take_back()
            was_deleted = self._target.tombstone(run_id) is not None
            raise self._refusal(
                run_id, f"a run of this id {'existed and was deleted' if was_deleted else 'was just made'} there."
            )

    def _take_back(self) -> None:
        """Let everything go on at the source, where nothing of it has come to the target."""
        ours = [each for each in self._members.values() if each.held is not None and not each.was_there]
        with suppress(StoreError):  # then nobody knows, and the same call again finds out
            if any((head := self._target.head(each.run_id)) is not None and head.moved_to is None for each in ours):
                return
            for each in ours:
                head = self._source.head(each.run_id) or each.head
                secret = self._source.secret(each.run_id)
                self._source.adopt(each.run_id, head.token, secret, head.listing, (), (), each.head.due_in)

    def _wake(self, member: _Member) -> None:
        """Let a child go on that lay still until its parent was there."""
        head = self._target.head(member.run_id)
        if member.is_ended or member.due_in is None or head is None or head.due_in is not None:
            return
        if head.listing.queue is not None and head.owner is None:
            with suppress(RunOwned):
                lease = self._target.claim(member.run_id, self._ledger._leases.owner, 30.0)
                self._target.release(member.run_id, lease.token, due_in=member.due_in)

    def _give_back(self, member: _Member) -> None:
        held = member.held
        if held is not None:
            held.__exit__(None, None, None)
            if held.is_held and not member.was_held:
                self._ledger._leases.give_back(held, is_visit=True)

    # --- rows on their way --------------------------------------------------------------------------------------------

    def _whole(self, run_id: str, after: int) -> Iterator[Row]:
        for page in reading.pages(self._source, run_id, after):
            for row in page:
                yield reading.whole(self._source, run_id, row)

    def _pages(self, member: _Member) -> Iterator[list[Row]]:
        page: list[Row] = []
        size = 0
        for row in self._whole(member.run_id, member.begun):
            page.append(row)
            size += len(row.body) + len(row.payload or b"")
            self._say("copied", member.run_id, row.seq)
            if size > _BYTES_AT_ONCE:
                yield page
                page, size = [], 0
        if page:
            yield page

    def _say(self, what: str, run_id: str, number: int) -> None:
        if self._told is not None and number % _ENTRIES_BETWEEN_WORDS == 0:
            self._told(f"run {run_id!r}: {number} entries {what}")

    def _refusal(self, run_id: str, why: str) -> CopyRefused:
        return CopyRefused(run_id, self._target.place, why)
