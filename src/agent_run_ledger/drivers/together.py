"""Commits of many runs, decided each under its run's lock and written in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from agent_run_ledger.contract import Append, Clock, Store
from agent_run_ledger.drivers.leases import HeldRun, Leases
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine.commit import Prepared, prepare
from agent_run_ledger.engine.effects import Commit, Decision, Moment
from agent_run_ledger.errors import StoreError

AT_ONCE = 32
"""How many runs are written in one transaction: of more the transaction saves nothing, and what waits for it fills memory."""


class Waiting(Protocol):
    """A commit that waits to be written."""

    run: HeldRun
    effect: Commit

    @property
    def is_abandoned(self) -> bool:
        """Whether whoever awaited it was cancelled. It is done all the same: what it says may be written by now."""


W = TypeVar("W", bound=Waiting)
Answers = list[tuple[W, Any, BaseException | None]]


class Together(Generic[W]):
    """Writes what waits. One member that is refused, stale or impossible fails no other."""

    def __init__(self, store: Store, clock: Clock, leases: Leases, sync: SyncDriver, *, synced: bool) -> None:
        self._store = store
        self._clock = clock
        self._leases = leases
        self._sync = sync
        self._synced = synced

    def write(self, commits: Sequence[W], put_off: Callable[[W], object] | None) -> Answers[W]:
        """Write all, and say of each what it answers or raises. Where its thread must not wait for a sync, such are `put_off`."""
        answers: Answers[W] = []
        lines: dict[HeldRun, list[W]] = {}
        for commit in commits:
            if (line := lines.get(commit.run)) is None:
                lines[commit.run] = [commit]
            else:
                line.append(commit)
        # Whoever else writes many runs takes their locks in the same order.
        runs = list(lines) if len(lines) == 1 else sorted(lines, key=_run_id)
        while runs:
            for first in range(0, len(runs), AT_ONCE):
                self._transact(runs[first : first + AT_ONCE], lines, answers, put_off)
            runs = [run for run in runs if lines[run]]  # more of a run, and what has to be decided anew
        return answers

    def _transact(
        self,
        runs: list[HeldRun],
        lines: dict[HeldRun, list[W]],
        answers: Answers[W],
        put_off: Callable[[W], object] | None,
    ) -> None:
        """One transaction. Leaves in `lines` what has to wait for the next one."""
        elapsed = self._clock.elapsed()
        ready: list[tuple[HeldRun, list[W], Prepared]] = []
        locked = 0
        synced = False
        try:
            for run in runs:
                run.lock.acquire()
                locked += 1
                line, lines[run] = lines[run], []
                token = line[0].effect.token
                if (
                    len(line) > 1
                    or not run.is_held
                    or elapsed >= run.expires
                    or run.owed
                    or (token or run.token) != run.token
                ):
                    line = self._fit(run, line, answers)
                    if not line:
                        continue
                run.is_touched = True
                # A program that was interrupted goes on behind what it left: that is decided on what stands in the log.
                decisions = [commit.effect.decide for commit in (line[:1] if run.interrupted else line)]
                moment = self._leases.moment()
                try:
                    prepared = self._prepared(run, decisions, moment)
                except Exception as error:  # the first is impossible by itself
                    answers.append((line[0], None, error))
                    lines[run] = line[1:]
                    continue
                if put_off is not None and prepared.synced and prepared.sealed:
                    for commit in line:
                        try:
                            put_off(commit)
                        except Exception as error:  # closed meanwhile
                            answers.append((commit, None, error))
                    continue
                if len(prepared.plans) < len(line):
                    lines[run] = line[len(prepared.plans) :]
                    line = line[: len(prepared.plans)]
                if prepared.sealed:
                    synced = synced or (self._synced if prepared.synced is None else prepared.synced)
                    ready.append((run, line, prepared))
                else:
                    _answer(run, line, prepared, answers)
            if ready:
                self._append(ready, synced, lines, answers)
        finally:
            for run in runs[:locked]:
                run.lock.release()

    @staticmethod
    def _prepared(run: HeldRun, decisions: list[Decision], moment: Moment) -> Prepared:
        """As many as go together; where one of them is impossible, the first alone."""
        try:
            return prepare(run, decisions, moment)
        except Exception:
            return prepare(run, decisions[:1], moment)

    def _fit(self, run: HeldRun, line: list[W], answers: Answers[W]) -> list[W]:
        """Those of the commits for which the run is still ours, and the run made ready for them."""
        fit = []
        for commit in line:
            try:
                self._sync.make_ready(run, commit.effect.token)
                fit.append(commit)
            except BaseException as error:
                answers.append((commit, None, error))
        return fit

    def _append(
        self,
        ready: list[tuple[HeldRun, list[W], Prepared]],
        synced: bool,
        lines: dict[HeldRun, list[W]],
        answers: Answers[W],
    ) -> None:
        appends = [
            Append(run.run_id, run.token, run.inbox, [row for row, _ in prepared.sealed]) for run, _, prepared in ready
        ]
        try:
            written = self._store.append_all(appends, synced=synced)
        except BaseException as error:
            for run, line, prepared in ready:
                self._leases.failed(run, prepared.drafts, error)
                answers += [(commit, None, error) for commit in line]
            if not isinstance(error, Exception):
                raise
            return
        for (run, line, prepared), answer in zip(ready, written, strict=True):
            if answer is True:
                self._leases.wrote(run, prepared.sealed)
                _answer(run, line, prepared, answers)
                continue
            if answer is False:
                try:
                    self._leases.fetch_requests(run)
                    lines[run] = [*line, *lines[run]]  # decided anew, with what others ask of the run
                    continue
                except StoreError as error:
                    answer = error
            self._leases.failed(run, prepared.drafts, answer)
            answers += [(commit, None, answer) for commit in line]


def _answer(run: HeldRun, line: list[W], prepared: Prepared, answers: Answers[W]) -> None:
    for commit, plan in zip(line, prepared.plans, strict=True):
        run.replayed += plan.is_replay
        answers.append((commit, plan.answer, plan.error))
        if commit.is_abandoned:  # its call has ended, so that nobody else would say that it is not in flight
            for draft in plan.drafts:
                if draft.kind == "intent":
                    run.in_flight.pop(draft.position or "", None)


def _run_id(run: HeldRun) -> str:
    return run.run_id
