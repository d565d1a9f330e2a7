"""The operator's hand: what others than its program may ask of a run, and see of it. Every act is an entry with who and why."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from functools import partial
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from agent_run_ledger.drivers import reading
from agent_run_ledger.engine import recovery, requests, runs
from agent_run_ledger.engine.recovery import Declaration
from agent_run_ledger.errors import (
    ApprovalMismatch,
    IllegalTransition,
    InvalidArguments,
    KeyUnavailable,
    RunOwned,
    StoreCorrupt,
)
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.budget import Limits, shared
from agent_run_ledger.rules.names import check_name, check_run_id, child_of
from agent_run_ledger.words import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_run_ledger.agents import Tool
    from agent_run_ledger.contract import Clock, Row, Store
    from agent_run_ledger.drivers.leases import HeldRun, Leases
    from agent_run_ledger.drivers.sync import SyncDriver
    from agent_run_ledger.engine.history import History, StepHistory
    from agent_run_ledger.model import (
        ApprovalRequest,
        Budget,
        Collected,
        Cost,
        Explanation,
        Forgotten,
        PlannedAction,
        Rewrapped,
        RunRecord,
        TraceLine,
    )


class _Unsaid:
    """Nothing was given, which is something else than None."""

    def __repr__(self) -> str:
        return "..."


_UNSAID: Any = _Unsaid()


class Operator:
    """What a ledger lets people and other programs do about a run. Each act takes `by=`, who does it, and `reason=`.

    Where nobody owns the run it is done here and now, and raises where it cannot be. Else its owner does it, as soon as none of its steps is
    in flight; what he cannot do by then is an entry `declined`, and no error here.
    """

    _store: Store
    _clock: Clock
    _leases: Leases
    _driver: SyncDriver
    _payload_limit: int
    _tools: dict[str, Tool]
    _shared: dict[str, Limits]

    if TYPE_CHECKING:

        def _run(self, run_id: str) -> HeldRun: ...
        def get_run(self, run_id: str) -> RunRecord: ...
        def runs(self, status: str | None = None) -> list[RunRecord]: ...
        def _is_seen(self, run: RunRecord) -> bool: ...

    # --- acts ---------------------------------------------------------------------------------------------------------

    def cancel(self, run_id: str, *, children: bool = False, by: str = "", reason: str = "") -> None:
        """End a run as CANCELLED: at once where nobody works on it, else by its owner before its next step.

        With `children` the runs that its program has begun and waits for end with it, and theirs. A step in flight finishes and is
        recorded first. Raises `RunNotFound` and, for a run that has ended, `IllegalTransition`.
        """
        who = self._who(by)
        said = {"reason": _reason(reason) or f"cancelled by {who}"} | ({"children": True} if children else {})
        self._ask(run_id, "cancel", said, who)
        history = reading.read(self._store, run_id)
        # One that is begun at this very moment is not in the log yet: who claims it looks how its parent has ended.
        for step in history.positions.values() if children else ():
            if step.outcome is None and self._store.head(child := child_of(step.key)) is not None:
                with suppress(IllegalTransition):
                    self.cancel(child, children=True, by=by, reason=f"its parent {run_id} was cancelled")

    def resolve(
        self,
        run_id: str,
        step_number: int,
        *,
        output: Any = _UNSAID,
        executed: bool = True,
        by: str = "",
        reason: str = "",
    ) -> None:
        """Say what became of a step in doubt: that it took effect and returned `output`, or with `executed=False` that it did not.

        Then the next start of the program gets that output, or dispatches the step again with the same key and a fresh count of
        attempts. A step whose failure nobody has acted upon may be resolved, too. Raises `IllegalTransition` for any other.
        """
        if type(step_number) is not int:
            raise InvalidArguments(f"step_number is a whole number, not {shown(step_number)}; nothing was written")
        if type(executed) is not bool:
            raise InvalidArguments(f"executed is True or False, not {shown(executed)}; nothing was written")
        if executed is (output is _UNSAID):
            wanted = "output=, which may be None" if executed else "no output="
            raise InvalidArguments(f"resolve(executed={executed}) takes {wanted}; nothing was written")
        said: dict[str, Any] = {"step": step_number, "executed": executed, "reason": _reason(reason)}
        if executed:
            said["output"] = canonical.decode(runs.stored(output, "the output", self._payload_limit))
        self._ask(run_id, "resolve", said, self._who(by))

    def release(self, run_id: str, *, by: str = "", reason: str = "") -> None:
        """Let a run out of QUARANTINE: what halted it is counted afresh. Raises `IllegalTransition` for any other run."""
        self._ask(run_id, "release", {"reason": _reason(reason)}, self._who(by))

    def signal(self, run_id: str, name: str, payload: Any = None, *, by: str = "") -> None:
        """Send something to the run, by name. One `run.wait_for(name)` takes it, the one that waits or the next that will.

        What is sent is kept in order. Raises `RunNotFound` and, for a run that has ended, `IllegalTransition`.
        """
        value = canonical.decode(runs.stored(payload, "the signal", self._payload_limit))
        self._send(run_id, "signal", {"name": check_name("signal", name), "value": value}, by)

    def approvals(self, run_id: str | None = None) -> list[ApprovalRequest]:
        """What runs wait for somebody to approve, oldest first; of one run where `run_id` is given."""
        ids = [run_id] if run_id is not None else [run.run_id for run in self.runs() if _is_open(run)]
        found = [self._asked_for(history, step) for history, step in self._unanswered(ids)]
        return sorted(found, key=lambda request: request.asked_at)

    def approve(
        self, run_id: str, name: str, digest: str, *, position: str | None = None, by: str = "", reason: str = ""
    ) -> None:
        """Approve what the run asks approval for under this name: those very bytes, which `digest` names (`approvals` shows it).

        With the request's `position` it is an answer to that very request, and not to a later one for equal arguments. Raises
        `ApprovalMismatch` where the run asks for no such thing, or does not any more.
        """
        self._answer(run_id, name, digest, position, True, by, reason)

    def deny(
        self, run_id: str, name: str, digest: str, *, position: str | None = None, by: str = "", reason: str = ""
    ) -> None:
        """Say no to what the run asks approval for: its program gets `ApprovalDenied`. Raises as `approve` does."""
        self._answer(run_id, name, digest, position, False, by, reason)

    def redrive(
        self,
        run_id: str,
        *,
        max_steps: int | None = None,
        budget: Budget | None = None,
        new_run_id: str | None = None,
        by: str = "",
        reason: str = "",
    ) -> str:
        """Make a new run from one that is FAILED or DEAD_LETTER, and return its id. The old one stays as it is; nothing is started.

        It has all steps of the old one with their outcomes and keys, so that nothing is paid again; attempts and loops count afresh,
        and `max_steps` or `budget` raise the limit that ended it. Start its program with the new id, or `wake` it where it has a queue:
        it is in the same one, with the same priority and key.
        """
        history = reading.read(self._store, check_run_id(run_id))
        if history.state not in (RunState.FAILED, RunState.DEAD_LETTER):
            raise IllegalTransition(history.state, "REDRIVE", run_id)
        return self._fork(history, history.steps + 1, max_steps, budget, new_run_id, by, reason)

    def fork(
        self, run_id: str, from_step: int, *, new_run_id: str | None = None, by: str = "", reason: str = ""
    ) -> str:
        """Make a new run that stands where this one stood before its step number `from_step` began, and return its id.

        The steps before are carried with their outcomes and keys. The run itself stays as it is, and nothing is started.
        """
        history = reading.read(self._store, check_run_id(run_id))
        if type(from_step) is not int or not 1 <= from_step <= history.steps + 1:
            raise InvalidArguments(
                f"from_step is a number from 1 to {history.steps + 1}, for run {run_id!r} has {history.steps} steps; not {shown(from_step)}"
            )
        going = [step for step in history.positions.values() if step.outcome is None and step.waits is None]
        carried = [step.number for step in going if step.number < from_step]
        if carried and self._is_seen(self.get_run(run_id)):  # the fork would find it in doubt, and it is not
            raise IllegalTransition(history.state, f"FORK behind step {carried[0]}, which is in flight", run_id)
        return self._fork(history, from_step, None, None, new_run_id, by, reason)

    def forget(
        self,
        run_id: str,
        step: int | None = None,
        *,
        everything: bool = False,
        dry_run: bool = False,
        scrub: bool = True,
        by: str = "",
        reason: str = "",
    ) -> Forgotten:
        """Erase the payloads of a run that has ended, or of one `step` of it: arguments, outputs, errors, its goal, signals, reasons.

        What they were cannot be read or replayed any more; the log still verifies, and has an entry that says which went, who did it
        and why. A payload that a step shares with others of its run stays theirs. With `everything` the run's secret goes, too, so that
        nobody can try whether a payload was what he thinks. Names stay: of the run, tools, agents, queues, signals and keys, and `by` and
        `reason`. With `scrub` the storage is rewritten, so that no free page holds what was erased; what may hold it yet is in
        `Forgotten.pending`. What is gone already is no error. With `dry_run` nothing is done.

        Raises `RunNotFound`, `RunOwned`, and `IllegalTransition` for a run that goes on, or whose parent does: a replay needs it.
        """
        from agent_run_ledger.forgetting import Forgetting

        if step is not None and type(step) is not int:
            raise InvalidArguments(f"step is the number of a step, not {shown(step)}; nothing was erased")
        if step is not None and everything:
            raise InvalidArguments("everything is more than one step: give one of them; nothing was erased")
        check_run_id(run_id)
        doing = Forgetting(self, self._who(by), _reason(reason))  # type: ignore[arg-type] # a Ledger is all this and more
        return doing.forget(run_id, step, everything=everything, is_tried=dry_run, scrub=scrub)

    def gc(
        self,
        older_than: timedelta | float,
        *,
        keep_proofs: bool = False,
        dry_run: bool = False,
        scrub: bool = True,
        by: str = "",
        reason: str = "",
    ) -> Collected:
        """Delete the runs that ended longer ago than `older_than`, a timedelta or seconds, each with all that belongs to it.

        A tombstone is left: how long its log was, its root, who deleted it, why and when; the id is not used again. With `keep_proofs`
        entries stay and payloads are erased, as `forget` does. Runs that a run has begun which goes on are left, and those that cannot
        be read. With `dry_run` nothing is done.
        """
        from agent_run_ledger.forgetting import Forgetting

        seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
        if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
            raise InvalidArguments(
                f"older_than is a timedelta or a number of seconds, not {shown(older_than)}; nothing was erased"
            )
        doing = Forgetting(self, self._who(by), _reason(reason))  # type: ignore[arg-type] # as above
        return doing.collect(seconds, keep_proofs=keep_proofs, is_tried=dry_run, scrub=scrub)

    def rewrap(self, *, scrub: bool = True) -> Rewrapped:
        """Seal the key of each encrypted run under the key that new runs get: the `key_id` of this ledger's `encryption`.

        What is encrypted stays as it is, so this costs little; a run that goes on does not notice. Then the old wrapping key is needed
        by backups only. Raises `InvalidArguments` for a ledger that was opened without `encryption`.
        """
        seal = getattr(self._store, "rewrap", None)
        if seal is None:
            raise InvalidArguments(
                "this ledger was opened without encryption=, so it has no key to seal others under; nothing was done"
            )
        from agent_run_ledger.model import Rewrapped

        done, left = [], []
        for summary in self._store.summaries():
            run_id = summary.head.run_id
            try:
                if seal(run_id):
                    done.append(run_id)
            except (KeyUnavailable, StoreCorrupt) as error:
                left.append((run_id, str(error)))
        return Rewrapped(tuple(done), tuple(left), tuple(self._store.scrub()) if scrub and done else ())

    # --- looking ------------------------------------------------------------------------------------------------------

    def dead_letters(self) -> list[RunRecord]:
        """The runs that are DEAD_LETTER, oldest first; `trace` tells what led there."""
        return self.runs(RunState.DEAD_LETTER)

    def trace(self, run_id: str) -> list[TraceLine]:
        """What happened to the run, in order: every attempt, error, question, answer and refusal, and what operators did."""
        from agent_run_ledger.engine import tracing

        return tracing.trace(self._whole(self.get_run(run_id).run_id))

    def cost(self, run_id: str | None = None) -> Cost:
        """What the run has spent and reserved, by model and by tool, and what replays of it have saved; of all runs without `run_id`.

        Reads every entry, without arguments and outputs. Raises `RunNotFound`, and `StoreCorrupt` for one run that is damaged; among
        all runs such a one is a `Cost` with its `trouble`.
        """
        from agent_run_ledger.engine import costing

        if run_id is not None:
            return self._cost(self.get_run(run_id))
        found = []
        for record in self.runs():
            try:
                found.append(self._cost(record))
            except (StoreCorrupt, KeyUnavailable) as error:
                found.append(costing.unread(record.run_id, record.status, str(error)))
        return costing.together(found)

    def _cost(self, record: RunRecord) -> Cost:
        from agent_run_ledger.engine import costing

        fold = costing.Costing(record.run_id)
        reading.opened(self._store, record.run_id)
        for page in reading.pages(self._store, record.run_id, payloads_up_to=0):
            for row in page:
                fold.take(reading.whole(self._store, record.run_id, row) if row.kind in costing.LIMITS_SAID else row)
        return fold.cost(record.status)

    def explain(self, run_id: str) -> Explanation:
        """Why the run was halted, or why it stands: the rule, the reason, the steps that this rests on, what it was told before.

        Raises `RunNotFound` and `StoreCorrupt`.
        """
        from agent_run_ledger.engine import explaining

        record = self.get_run(run_id)
        fetch = partial(self._store.payload, run_id)
        return explaining.explain(reading.read(self._store, run_id), record, fetch)

    def plan(self, run_id: str) -> list[PlannedAction]:
        """What the next start of the run's program would do about each step that is not settled.

        By what was declared when the step was dispatched last; a tool that is registered here declares it anew.
        """
        from agent_run_ledger.model import PlannedAction

        history = reading.read(self._store, check_name("run_id", run_id))
        head = self._store.head(run_id)
        if history.state.is_terminal or head is None or head.moved_to is not None:
            return []
        now, planned = self._clock.now(), []
        for step in history.positions.values():
            declared = self._declared(step)
            for action in recovery.plan_recovery([step], {step.tool: declared}, {}, now):
                why = action.reason, action.not_before
                planned.append(PlannedAction(step.number, step.tool, step.position, action.kind, *why))
        return planned

    def _declared(self, step: StepHistory) -> Declaration:
        """What is declared about a step's tool, as far as this ledger knows: where it is not registered, what its last dispatch said."""
        undeclared = self._leases.undeclared
        tool = self._tools.get(step.tool)
        if tool is not None:
            call = tool.call({}, tool.options, self._payload_limit)
            declared = recovery.declaration(call, undeclared=undeclared)
            return declared._replace(effect=declared.effect or step.declared)
        return Declaration(
            effect=step.declared,
            max_attempts=step.attempts_of_code + step.left,
            has_receipt=step.has_receipt,
            key_window=step.key_window,
            blocks_undeclared=undeclared == "block",
        )

    # --- how ----------------------------------------------------------------------------------------------------------

    def _who(self, by: str) -> str:
        return check_name("by", by) if by != "" else self._leases.owner

    def _ask(self, run_id: str, kind: str, said: dict[str, Any], who: str) -> None:
        """Do it here, or have the owner do it."""
        run = self._run(run_id)
        said = {**said, "by": who}
        try:
            self._leases.await_claim(run, None)
            if self._driver.obey(requests.act(run, kind, said, who, keeps=run.pins > 0)):
                return
        except RunOwned:
            pass
        self._store.post(run_id, kind, canonical.encode(said), who, self._clock.now())
        try:  # the owner may have let go of the run before it could see what was posted: then it is answered here
            self._leases.await_claim(run, None)
            with run.lock:
                if run.is_held:
                    self._leases.fetch_requests(run)
            self._driver.obey(requests.answer(run, keeps=run.pins > 0))
        except RunOwned:
            pass

    def _send(self, run_id: str, kind: str, said: dict[str, Any], by: str) -> None:
        who = self._who(by)
        state = RunState(self.get_run(check_run_id(run_id)).status)
        if state.is_terminal:
            raise IllegalTransition(state, kind.upper(), run_id)
        self._store.post(run_id, kind, canonical.encode({**said, "by": who}), who, self._clock.now())

    def _answer(
        self, run_id: str, name: str, digest: str, position: str | None, approved: bool, by: str, reason: str
    ) -> None:
        now = self._clock.now()
        asked = [
            step
            for _, step in self._unanswered([run_id])
            if step.digest is not None and step.digest.hex() == digest and position in (None, step.position)
        ]
        open_ones = [step for step in asked if step.until is None or now < step.until]
        if not any(_name(self._arguments(run_id, step)) == name for step in open_ones):
            raise ApprovalMismatch(
                f"run {run_id!r} does not ask anybody to approve {shown(name)} with the digest {shown(digest)}, or does not any "
                "more; nothing was written. `approvals` shows what is asked for."
            )
        said = {"name": name, "digest": digest, "approved": approved, "reason": _reason(reason)}
        if position is not None:
            said["position"] = position
        self._send(run_id, "approval", said, by)

    def _unanswered(self, ids: list[str]) -> Iterator[tuple[History, StepHistory]]:
        for run_id in ids:
            history = reading.read(self._store, check_name("run_id", run_id))
            for step in history.positions.values() if not history.state.is_terminal else ():
                if step.waits == "approval" and step.outcome is None:
                    yield history, step

    def _arguments(self, run_id: str, step: StepHistory) -> bytes | None:
        return step.arguments if step.arguments is not None else self._store.payload(run_id, step.seq)

    def _asked_for(self, history: History, step: StepHistory) -> ApprovalRequest:
        from agent_run_ledger.model import ApprovalRequest

        arguments = self._arguments(history.run_id, step)
        return ApprovalRequest(
            history.run_id,
            _name(arguments),
            step.position,
            arguments.decode() if arguments is not None else None,
            step.digest.hex() if step.digest is not None else "",
            step.created_at,
            step.until,
        )

    def _whole(self, run_id: str) -> Iterator[Row]:
        for page in reading.pages(self._store, run_id):
            yield from (reading.whole(self._store, run_id, row) for row in page)

    def _fork(
        self,
        history: History,
        before: int,
        max_steps: int | None,
        budget: Budget | None,
        new_run_id: str | None,
        by: str,
        reason: str,
    ) -> str:
        from agent_run_ledger.engine import forking
        from agent_run_ledger.model import Budget

        if budget is not None and not isinstance(budget, Budget):
            raise TypeError(f"budget is a Budget, not {shown(budget)}")
        steps = budget.steps if budget is not None and budget.steps is not None else max_steps
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"max_steps must be a whole number of at least 1, not {shown(steps)}")
        limits = Limits.of(budget)._replace(steps=steps).written()
        self._shared.update(shared(budget))
        name = f"run_{os.urandom(10).hex()}" if new_run_id is None else check_run_id(new_run_id, "new_run_id")
        told = {"by": self._who(by), "reason": _reason(reason)}
        drafts = forking.carried(history, self._whole(history.run_id), before, told, limits, name)
        if not self._leases.lay_down(name, drafts):
            raise InvalidArguments(f"there is a run {name!r} already; nothing was written")
        return name


def _name(arguments: bytes | None) -> str:
    """Under which name somebody is asked to approve these arguments."""
    return canonical.decode(arguments)["name"] if arguments is not None else ""


def _reason(reason: str) -> str:
    runs.stored(reason, "the reason", 10_000)
    if not isinstance(reason, str):
        raise InvalidArguments(f"reason is a string, not {shown(reason)}; nothing was written")
    return reason


def _is_open(run: RunRecord) -> bool:
    return not run.is_damaged and run.moved_to is None and not RunState(run.status).is_terminal
