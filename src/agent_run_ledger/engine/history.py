"""What a run's log says: a fold over its entries. The same fold reads a stored run and follows a live one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from sys import intern
from typing import TYPE_CHECKING, Any

from agent_run_ledger import merkle
from agent_run_ledger.contract import Row
from agent_run_ledger.engine.account import Account
from agent_run_ledger.engine.suspicion import Suspicion
from agent_run_ledger.errors import StoreCorrupt
from agent_run_ledger.rules import canonical
from agent_run_ledger.rules.budget import NO_LIMITS, Limits
from agent_run_ledger.rules.loops.breaker import Rule
from agent_run_ledger.rules.loops.calls import ERRORS_LOOKED_AT
from agent_run_ledger.words import Effect, RunState, Verdict

if TYPE_CHECKING:
    from agent_run_ledger.model import Notice

_parse = json.JSONDecoder().raw_decode  # bodies have no white space around them, which is what `decode` looks for first
_STATES = {str(state): state for state in RunState}

AT_WORK = frozenset({RunState.RUNNING, RunState.CHECKPOINTED})

_ASIDES = frozenset({"asked", "answered", "waiting", "signal", "declined", "resolved", "released"})

KEPT_BYTES = 1024
"""Arguments and outputs of more bytes are not kept in memory, but fetched where somebody needs them."""

READ_BYTES = ERRORS_LOOKED_AT
"""Arguments and outcomes of more bytes are not read with their entries: the loop rules look at no longer ones."""


def parse(body: bytes) -> dict[str, Any]:
    """An entry's body as a dict. Raises `ValueError` where it is none."""
    parsed, end = _parse(text := body.decode())
    if end != len(text) or not isinstance(parsed, dict):
        raise ValueError("it is not one JSON object")
    return parsed


def _parse_all(rows: list[Row]) -> list[dict[str, Any]] | None:
    """All bodies in one call, a third cheaper; None where they have to be looked at one by one to say which is wrong."""
    try:
        parsed, end = _parse(text := "[" + b",".join([row.body for row in rows]).decode() + "]")
    except (ValueError, TypeError):
        return None
    return parsed if end == len(text) and len(parsed) == len(rows) else None


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, AssertionError)


def unreadable(run_id: str, row: Row, error: Exception) -> StoreCorrupt:
    """What whoever needs this entry is told."""
    return StoreCorrupt(
        f"run {run_id!r}, entry {row.seq}: its body cannot be read ({type(error).__name__}: {error}). "
        "Nothing was changed; run `agent-run-ledger verify` and restore from a backup."
    )


def _shared(text: str) -> str:
    """The same text, in memory once for all steps that say it."""
    return intern(text) if type(text) is str else text


def _order(row: Row, body: dict[str, Any]) -> int:
    """When this happened, in the order in which outcomes were handed out: after the one with this seq, if it is no outcome itself.

    An entry names it where outcomes stand before it that its program did not know of.
    """
    order = body.get("seen", row.seq)
    if type(order) is not int:
        raise TypeError(f"seen is {order!r}")
    return max(1, order)  # entry 1 is no outcome: who has seen none has seen that one


class Outcome:
    """How an attempt ended: `ok` is `completed`, `failed`, `cancelled` or `unstorable` (executed, output not storable)."""

    __slots__ = ("at", "digest", "is_open", "ok", "order", "payload", "retry_at", "seq")

    def __init__(self, row: Row, body: dict[str, Any]) -> None:
        self.seq = row.seq
        self.order = _order(row, body) if "seen" in body else row.seq
        self.at: float = body["at"]
        self.ok = _shared(body["ok"])
        self.retry_at: float | None = body.get("retry_at")
        self.is_open: bool = "ambiguous" in body or "unproven" in body
        """Whether the call may have taken effect although it failed, and a second one could do harm."""
        self.payload = row.payload
        """None beside a digest: it is not kept in memory. None without one: it was erased."""
        self.digest = row.digest

    @property
    def is_final(self) -> bool:
        """Whether a rerun hands it out whatever stands behind it: only a plain failure may be tried again."""
        return self.ok != "failed"


class StepHistory:
    """One step: its first intent, its attempts, and the outcome of the last of them. `outcome` None: in flight or in doubt.

    A run has as many of them as steps, so what most steps never have stands in the class.
    """

    dependencies: tuple[str, ...] = ()
    is_carried = False
    """Whether it comes from the run that this one was made from: so does its key."""
    continues: str | None = None
    """The position of the step that this one continues: with its key, and with the attempts that it has left."""
    first_keyed_at: float | None = None
    """When the key was first sent, where that was for the step that this one continues."""
    is_thought = False
    """Whether it calls a model."""
    attempts = 0
    attempts_of_code = 0
    environment = ""
    effect: str | None = None
    has_receipt = False
    key_window: float | None = None
    child: str | None = None
    """The id of the run that it has begun, and waits for."""
    is_doubtful = False
    """Whether one of its attempts may have taken effect, for all that is known of them."""
    is_known_absent = False
    """Whether its receiver or an operator has said that the last of them did not."""
    signal: Signal | None = None
    """The signal by which its wait ended."""
    waits: str | None = None
    """What it waits for, where it calls nobody: `sleep`, `signal`, `approval`, or the end of its `child`."""
    until: float | None = None
    """The Unix time at which its wait is over, if nothing comes."""
    wait = 0.0
    is_asked = False
    """Whether its receiver was asked for the receipt, and has not answered."""
    unanswered = 0
    """How many questions in a row have got no answer."""
    ask_at: float | None = None
    """When the receiver, which could not say, is to be asked again."""
    is_absent = False
    """Whether an operator has said that it did not take effect."""
    cause: bytes | None = None
    """Why the run was parked for it."""
    followed = False
    redispatched = 0
    """The attempt that was made without knowing what a second dispatch does; 0: none was."""
    missed = 0
    """When its program was interrupted before it got the outcome, in the order of hand-outs, and went on; 0: it got it."""
    missed_at = 0.0
    outcome: Outcome | None = None
    earlier: Outcome | None = None
    """The outcome of the attempt before the one under way."""

    def __init__(self, row: Row, body: dict[str, Any], continued: StepHistory | None) -> None:
        assert row.position is not None
        self.position = row.position
        self.seq = row.seq
        self.order = _order(row, body) if "seen" in body else row.seq
        self.number: int = body["step"]
        self.tool: str = _shared(body["tool"])
        self.key: str = body["key"]
        self.input: str = body["payload"]
        self.arguments = row.payload
        """None beside a digest: they are not kept in memory. None without one: they were erased."""
        self.digest = row.digest
        self.fingerprint = row.fingerprint
        self.leaf = row.roots[:32]
        self.created_at: float = body["at"]
        if "after" in body:
            self.dependencies = tuple(body["after"])
        if "carried" in body:
            self.is_carried = True
        if "model" in body:
            self.is_thought = body["model"]
        if "waits" in body:
            self.waits, self.until = body["waits"], body.get("until")
        if continued is not None:
            self.continues, self.first_keyed_at = continued.position, continued.keyed_at
            self.attempts_of_code, self.environment = continued.attempts_to_draw_on, continued.environment
            self.is_doubtful = True
        self.dispatched(row, body)

    @property
    def keyed_at(self) -> float:
        """When the key was first sent."""
        return self.created_at if self.first_keyed_at is None else self.first_keyed_at

    @property
    def is_settled(self) -> bool:
        """Whether the program has its outcome. One whose retry was due has it, too, once something follows: there was no retry."""
        return self.outcome is not None and (self.outcome.retry_at is None or self.followed or self.missed > 0)

    @property
    def stands(self) -> bool:
        """Whether a rerun gets what is recorded: any outcome but a plain failure that nobody has acted upon."""
        return self.outcome is not None and (self.outcome.is_final or self.followed or self.missed > 0)

    @property
    def is_open(self) -> bool:
        """Whether it may have taken effect although it failed: the last attempt, or one before it."""
        return self.is_doubtful or (self.outcome is not None and self.outcome.is_open)

    @property
    def may_have_taken_effect(self) -> bool:
        """Whether it may have changed something, for all that is recorded: what has no side effect, or surely failed, has not."""
        if self.effect == "READ" or self.outcome is None:
            return self.effect != "READ"
        return self.outcome.ok != "failed" or self.is_open

    @property
    def attempts_to_draw_on(self) -> int:
        """How many of its attempts count for a call that continues it.

        None where the last one has surely failed: its program was told so, and calls anew as often as if no earlier one were in doubt.
        """
        has_result = self.outcome is not None and self.outcome.ok == "failed" and not self.outcome.is_open
        return 0 if has_result else self.attempts_of_code

    @property
    def is_watched(self) -> bool:
        """Whether the loop rules look at it: it calls somebody."""
        return self.waits is None or self.waits == "child"

    @property
    def is_retried(self) -> bool:
        """Whether it failed, and is to be tried again without anybody being told."""
        return self.outcome is not None and self.outcome.retry_at is not None and not self.is_settled

    @property
    def is_missed(self) -> bool:
        """Whether a replay tells the program that it was interrupted here."""
        return self.missed > 0 or (self.outcome is not None and self.outcome.ok == "cancelled")

    @property
    def interrupted_after(self) -> float | None:
        """Seconds from its first dispatch to the entry that says that its program was interrupted; None: it was not."""
        if not self.is_missed:
            return None
        assert self.outcome is not None
        return max(0.0, (self.missed_at or self.outcome.at) - self.created_at)

    @property
    def declared(self) -> Effect | None:
        """The effect that was declared at the last dispatch."""
        return Effect(self.effect) if self.effect else None

    def dispatched(self, row: Row, body: dict[str, Any]) -> None:
        """An intent: the next attempt of this step is under way. Changed code starts the count of attempts afresh.

        One that takes over a step in doubt, to have its receipt asked for, is no attempt of its own.
        """
        if self.attempts:
            self._redispatched(row)
        self.attempts = body["attempt"]
        environment = _shared(body["environment"])
        if "undispatched" not in body:
            self.attempts_of_code = self.attempts_of_code + 1 if environment == self.environment else 1
        self.environment = environment
        if "effect" in body:
            self.effect = _shared(body["effect"])
        if "receipt" in body:
            self.has_receipt = body["receipt"]
        if "key_window" in body:
            self.key_window = body["key_window"]
        self.left: int = body["left"]
        self.state: str = _shared(body["step_state"])
        self.token: int = body["token"]
        self.version = row.seq

    def _redispatched(self, row: Row) -> None:
        """What was declared for the last attempt, and became of it, is not this one's."""
        if self.outcome is None and not self.is_known_absent:
            self.is_doubtful = True  # nobody knows how the last attempt ended
        if self.arguments is None and self.digest is not None:
            self.arguments = row.payload  # those of every attempt; they were let go of after the last one
        self.effect, self.has_receipt, self.key_window, self.is_known_absent = None, False, None, False
        self.is_asked, self.ask_at, self.unanswered, self.is_absent, self.cause = False, None, 0, False, None
        self.doubted()

    def doubted(self) -> None:
        """Whatever its last outcome was, it is not known how it stands."""
        if self.outcome is not None:
            self.earlier, self.outcome = self.outcome, None

    def settled(self, row: Row, body: dict[str, Any]) -> None:
        """An outcome of the attempt under way. That an earlier one may have taken effect no later failure disproves."""
        self.outcome = Outcome(row, body)
        ok = self.outcome.ok
        if ok != "completed" or self.is_doubtful:
            self.is_doubtful = ok == "cancelled" or (ok == "failed" and (self.is_doubtful or "ambiguous" in body))
        if "wait" in body or self.wait:
            self.wait = body.get("wait", 0.0)
        self.left = body["left"]
        self.state = _shared(body["step_state"])
        self.token = body["token"]
        self.version = row.seq

    @property
    def is_kept(self) -> bool:
        """Whether all that is recorded of it is in memory, but for what was erased."""
        outcome = self.outcome or self.earlier
        is_outcome_kept = outcome is None or outcome.payload is not None or outcome.digest is None
        return is_outcome_kept and (self.arguments is not None or self.digest is None)

    def let_go_of_long(self) -> None:
        """The program has the outcome: of what is long only the digests stay in memory."""
        if self.arguments is not None and len(self.arguments) > KEPT_BYTES and self.digest is not None:
            self.arguments = None
        outcome = self.outcome
        if outcome is not None and outcome.payload is not None and len(outcome.payload) > KEPT_BYTES:
            outcome.payload = None

    def marked(self, row: Row, body: dict[str, Any]) -> None:
        """Another entry that concerns this step: a park, a dispatch on nobody's word, the end of its attempts."""
        kind = row.kind
        if kind == "redispatched_undeclared":
            self.redispatched = body["attempt"]
        elif kind == "asked":
            self.is_asked, self.ask_at = True, None
            self.unanswered += 1
            self.doubted()
        elif kind == "answered":
            self.is_asked, self.ask_at, self.unanswered = False, body.get("retry_at"), 0
            if body["verdict"] == "absent":
                self.is_known_absent, self.is_doubtful = True, False
            self.wait = body.get("wait", self.wait)
        elif kind == "parked":
            self.is_asked, self.ask_at, self.cause = False, None, row.payload
            self.doubted()
        elif kind == "waiting" and "child" in body:
            self.waits, self.child = "child", body["child"]
        elif kind == "resolved" and not body["executed"]:
            self.is_asked, self.ask_at, self.unanswered, self.is_absent = False, None, 0, True
            self.is_known_absent, self.is_doubtful = True, False
            self.attempts_of_code = 0
            self.doubted()
        self.state = body.get("step_state", self.state)
        self.token = body["token"]
        self.version = row.seq


class Signal:
    """Something that was sent to a run by name and that no call has taken yet."""

    __slots__ = ("digest", "has_approved", "name", "payload", "position", "sent", "seq")

    def __init__(self, row: Row, body: dict[str, Any]) -> None:
        self.seq = row.seq
        self.name: str = body["name"]
        self.position = row.position
        """For the answer to a request for approval: that of the request."""
        self.sent: float = body["sent"]
        self.payload = row.payload
        """What was sent and by whom; None: it is not kept in memory, or was erased."""
        self.digest: str | None = body.get("of")
        """For the answer to a request for approval: the salted digest of the arguments that were shown."""
        self.has_approved: bool = body.get("approved", True)


class Blocked:
    """A call that was refused because it goes on with a repetition, by a run that goes on."""

    __slots__ = ("input", "order", "position", "refusal", "tool")

    def __init__(self, row: Row, body: dict[str, Any]) -> None:
        self.position = row.position or ""
        self.order = _order(row, body)
        self.tool: str = body["tool"]
        self.input: str = body["input"]
        self.refusal: dict[str, Any] = canonical.decode(row.payload) if row.payload is not None else _ERASED


_ERASED: dict[str, Any] = {"rule": "", "reason": "(erased)", "evidence": [], "text": "(erased)"}


class Missed:
    """A call that was made and interrupted before anything else of it was written, by a program that went on."""

    __slots__ = ("arguments", "digest", "input", "order", "position", "seq", "tool")

    def __init__(self, row: Row, body: dict[str, Any]) -> None:
        self.position = row.position or ""
        self.seq = row.seq
        self.order = _order(row, body)
        self.tool: str = body["tool"]
        self.input: str = body["payload"]
        self.arguments = row.payload
        self.digest = row.digest


class History:
    """One run as its entries tell it. Nothing is in here that the entries do not say."""

    def __init__(self, run_id: str, secret: bytes, rule: Callable[[], Rule] | None = None) -> None:
        self.run_id = run_id
        self.secret = secret
        self.state = RunState.PENDING
        self.size = 0
        self.frontier: list[bytes] = []
        self.steps = 0
        self.refused = 0
        self.pipeline = False
        self.created: bytes | None = None
        self.created_digest = ""
        self.created_at = 0.0
        self.parent: str | None = None
        """The run whose program has begun this one."""
        self.queue: str | None = None
        """The queue whose workers go on with it."""
        self.priority = 0
        self.failures = 0
        """How often its program was left by an exception, to be begun anew by whoever works for its queue."""
        self.retry_at: float | None = None
        """The Unix time at which it is to be begun anew, where that is what it waits for."""
        self.token = 0
        self.result: bytes | None = None
        self.result_digest = ""
        self.cause: bytes | None = None
        self.caused_at: str | None = None
        """Where the call or step stands that the cause is about."""
        self.caused_by: str | None = None
        """The tool that was to be called when that was refused."""
        self.honoured = 0
        """The id up to which every request has become an entry."""
        self.answered: set[int] = set()
        """The ids of those behind it that have."""
        self.positions: dict[str, StepHistory] = {}
        self.values: dict[str, tuple[dict[str, Any], bytes | None]] = {}
        self.missed: dict[str, Missed] = {}
        self.blocked: dict[str, Blocked] = {}
        self.notices: list[Notice] = []
        self.signals: dict[str, list[Signal]] = {}
        """What was sent to the run and no call has taken, by name, in the order in which it came."""
        self.doubts: dict[tuple[str, str], StepHistory] = {}
        """Steps that may have taken effect although they failed or were interrupted, by tool and input: an equal call continues them."""
        self.asides = 0
        """Entries that tell of waiting, and count for no limit."""
        self.granted = NO_LIMITS
        """What the run may use, where that was said when it was made from another one; what an account allows."""
        self.stated = NO_LIMITS
        """How many steps, tokens and dollars the log says that the run may use: in its first entry, and where a later program said otherwise."""
        self.within: tuple[str, ...] = ()
        """The accounts that its first entry says that it shares."""
        self.begins_runs = False
        """Whether one of its calls is a run of its own."""
        self.last_outcome = 0
        """The seq of the last outcome."""
        self.account = Account()
        self.worked = 0.0
        """Seconds in which the run's program was at work, up to the last entry."""
        self.last_at = 0.0
        self.trailing: dict[str, StepHistory] = {}
        """Steps whose failure nobody has acted upon."""
        self.running: set[str] = set()
        """Positions of steps that are dispatched and have no outcome."""
        self.waiting: set[str] = set()
        """Positions of steps that wait for a retry, or for somebody to say what happened."""
        self.repeats: dict[tuple[str, str], tuple[int, int, float]] = {}
        """How often a call was made that may be repeated, by tool and input; the step that was the first, and when that was."""
        self.suspicion = Suspicion(rule)

    @classmethod
    def read(cls, run_id: str, secret: bytes, rows: Iterable[Row], rule: Callable[[], Rule] | None = None) -> History:
        """Fold stored entries. Raises `StoreCorrupt` where a body is no body."""
        history = cls(run_id, secret, rule)
        history.take([list(rows)])
        return history

    def take(self, pages: Iterable[list[Row]]) -> None:
        """Take the next stored entries in. Raises `StoreCorrupt` where a body is no body."""
        row: Row | None = None
        for rows in pages:
            bodies = _parse_all(rows)
            try:
                for index, row in enumerate(rows):
                    self.absorb(row, bodies[index] if bodies is not None else parse(row.body))
                    if row.kind == "outcome":
                        self.positions[row.position or ""].let_go_of_long()  # the loop rules have it now
            except _UNREADABLE as error:
                assert row is not None
                raise unreadable(self.run_id, row, error) from error
        if row is not None:
            try:
                self.suspicion.catch_up()
            except _UNREADABLE as error:
                raise unreadable(self.run_id, row, error) from error

    def absorb(self, row: Row, body: dict[str, Any]) -> None:
        """Take one more entry in."""
        kind = row.kind
        if kind == "intent":
            self._intent(row, body)
        elif kind == "outcome":
            self._outcome(row, body)
        elif kind == "created":
            self.created, self.created_digest = row.payload, body["payload"]
            self.created_at = body["at"]
            self.pipeline = body.get("pipeline", False)
            self.parent, self.queue, self.priority = body.get("parent"), body.get("queue"), body.get("priority", 0)
            limits = Limits.read(body)
            if "forked_from" in body or "account" in body:
                self.granted = limits
            self.stated = limits.of_spending
            self.within = tuple(body.get("within", ()))
        else:
            self._other(row, body)
        closed = len(row.roots) // 32 - 1
        if closed:
            del self.frontier[-closed:]
        self.frontier.append(row.roots[-32:])
        self.size = row.seq
        at: float = body["at"]
        if self.state in AT_WORK and body["token"] == self.token and at > self.last_at:
            self.worked += at - self.last_at
        self.last_at = at
        self.state = _STATES[body["state"]]
        if self.account.held and self.state.is_terminal:
            self.account.closed()
        self.steps = body["steps"]
        self.refused = body.get("refused", 0)
        self.token = body["token"]

    def _intent(self, row: Row, body: dict[str, Any]) -> None:
        self.cause = self.retry_at = None
        position = row.position or ""
        self.running.add(position)
        account = self.account
        if body["token"] != account.program and "carried" not in body:
            account.began(body["token"])
        if account.held or "holds" in body:
            account.take("intent", position, body)
        if "limits" in body:
            self.stated = Limits.read(body["limits"]).of_spending
        step = self.positions.get(position)
        if step is not None:
            self.waiting.discard(position)
            self.trailing.pop(position, None)
            self._undoubted(step)
            step.dispatched(row, body)
            return
        if self.trailing:
            self._follow(body)
        if "begins" in body:
            self.begins_runs = True
        continued = self.positions[body["continues"]] if "continues" in body else None
        self.positions[position] = step = StepHistory(row, body, continued)
        if continued is not None:
            self.doubts.pop((step.tool, step.input), None)

    def _outcome(self, row: Row, body: dict[str, Any]) -> None:
        position = row.position or ""
        step = self.positions[position]
        step.settled(row, body)
        self.last_outcome = row.seq
        if self.account.held or "charges" in body:
            self.account.take("outcome", position, body)
        self.running.discard(position)
        ok = body["ok"]
        if "signal" in body:
            self._taken(step, body["signal"])
        elif (
            (step.is_doubtful or (step.has_receipt and "unproven" in body))
            and step.effect != "READ"
            and not ("undispatched" in body or "retry_at" in body)
        ):
            self.doubts[step.tool, step.input] = step
        if ok == "failed":
            if not self.pipeline:  # its steps stand in no order: nothing follows a failure there
                self.trailing[position] = step
            if "retry_at" in body:
                self.waiting.add(position)
                return
        if self.waiting:
            self.waiting.discard(position)
        if step.is_watched:
            self.suspicion.ended(step, row, body)
        if "may_repeat" in body and step.waits is None:
            often, first, since = self.repeats.get((step.tool, step.input), (0, step.number, step.created_at))
            self.repeats[step.tool, step.input] = often + 1, first, since

    def look_ahead(self, rows: Iterable[tuple[Row, dict[str, Any]]]) -> Verdict:
        """What the loop rules would say with these entries, of which some are outcomes, behind the log."""
        ended = []
        for row, body in rows:
            step = self.positions.get(row.position or "")
            if row.kind == "outcome" and step is not None and step.is_watched and "retry_at" not in body:
                ended.append((step, row, body))
        return self.suspicion.look_ahead(ended)

    def _other(self, row: Row, body: dict[str, Any]) -> None:
        kind, position = row.kind, row.position
        if self.trailing and (
            kind == "forked" or (position is not None and kind in ("refused", "blocked", "value", "missed"))
        ):
            self._follow(body)
        if kind in _ASIDES:
            self.asides += 1
        if kind == "notice":
            self._noticed(row, body)
        elif kind == "blocked":
            assert position is not None
            self.blocked[position] = Blocked(row, body)
            self.suspicion.warn(2)
        elif kind == "value":
            assert position is not None
            self.values[position] = (body, row.payload)
        elif kind == "finished":
            for step in self.trailing.values():
                step.followed = True
            self.trailing.clear()
            self.result, self.result_digest = row.payload, body["payload"]
        elif kind in ("parked", "refused", "exhausted", "aborted", "cancelled"):
            self.cause, self.caused_at, self.caused_by = row.payload, position, body.get("tool")
            if position is None:
                self.retry_at = body.get("retry_at")
                self.failures += self.retry_at is not None
        elif kind == "signal":
            self.signals.setdefault(body["name"], []).append(Signal(row, body))
        elif kind in ("released", "forked"):
            self._begin_afresh(kind)
        elif kind in ("granted", "settled"):
            self.account.take(kind, None, body)
        elif kind == "limited":
            self.granted = Limits.read(body)
            self.stated = self.granted.of_spending
        if position is not None and (known := self.positions.get(position)) is not None:
            if kind == "missed":
                known.missed, known.missed_at = _order(row, body), body["at"]
                if known.waits is not None:
                    self._given_back(known)
                elif known.may_have_taken_effect:
                    self.doubts[known.tool, known.input] = known
                self.trailing.pop(position, None)
                self.waiting.discard(position)
            elif kind in ("parked", "asked", "waiting", "resolved"):
                self.running.discard(position)
                self.waiting.add(position)
                self.trailing.pop(position, None)
                self._undoubted(known)
            known.marked(row, body)
        elif kind == "missed":
            self.missed[position or ""] = Missed(row, body)
        if "request" in body:
            self.answered.add(body["request"])
            while self.honoured + 1 in self.answered:
                self.honoured += 1
                self.answered.discard(self.honoured)

    def _noticed(self, row: Row, body: dict[str, Any]) -> None:
        from agent_run_ledger.model import Notice

        said: dict[str, Any] = canonical.decode(row.payload) if row.payload is not None else _ERASED
        evidence = tuple(said["evidence"])
        self.notices.append(
            Notice(body["step"], row.position or "", body["rule"], said["reason"], evidence, said["text"])
        )
        if body["rule"] != "budget":
            self.suspicion.warn(1)

    def _undoubted(self, step: StepHistory) -> None:
        """How this step stands is being found out, or said: no other call has to continue it."""
        if self.doubts.get((step.tool, step.input)) is step:
            del self.doubts[step.tool, step.input]

    def _taken(self, step: StepHistory, seq: int) -> None:
        """A wait is over by this signal."""
        for name, waiting in self.signals.items():
            kept = [signal for signal in waiting if signal.seq != seq]
            if len(kept) < len(waiting):
                step.signal = next(signal for signal in waiting if signal.seq == seq)
                self.signals[name] = kept
                return

    def _given_back(self, step: StepHistory) -> None:
        """The program was interrupted before it got this signal: it is there for the next wait."""
        if (signal := step.signal) is not None:
            step.signal = None
            waiting = [*self.signals.get(signal.name, ()), signal]
            self.signals[signal.name] = sorted(waiting, key=lambda each: each.seq)

    def _begin_afresh(self, kind: str) -> None:
        """An operator lets the run go on: what stopped it counts from nothing."""
        self.repeats.clear()
        self.cause = None
        self.suspicion.begin_afresh(is_overruled=kind == "released")
        if kind == "forked":
            for step in self.positions.values():
                if step.outcome is None or not step.stands:
                    step.attempts_of_code = step.unanswered = 0

    def _follow(self, body: dict[str, Any]) -> None:
        """A call acts on the failures that it names: its program had been told of them."""
        for position in body.get("follows", ()):
            if (step := self.trailing.pop(position, None)) is not None:
                step.followed = True
                self.waiting.discard(position)

    def stands_as(self, state: RunState, settled: set[str], token: int | None = None) -> RunState:
        """The state of a run with branches, of which the steps at `settled` have just ended: as its busiest branch.

        What was dispatched under another fencing token than `token`, the owner's, is in doubt by now, and keeps no run from standing.
        """
        running, steps = self.running - settled, self.positions
        if any(token is None or at not in steps or steps[at].token == token for at in running):
            return RunState.RUNNING
        if state is RunState.BLOCKED or self.waiting - settled:
            return RunState.BLOCKED
        return RunState.RUNNING if running else state

    def at_work(self, now: float) -> float:
        """Seconds in which its program was at work, if it still is."""
        return self.worked + (max(0.0, now - self.last_at) if self.state in AT_WORK else 0.0)

    def is_missed(self, position: str) -> bool:
        """Whether it is recorded that the program was interrupted in this call."""
        step = self.positions.get(position)
        return step.is_missed if step is not None else position in self.missed

    @property
    def cause_text(self) -> str | None:
        """Why the run stands or has ended, in words."""
        steps = (self.positions[position] for position in sorted(self.waiting) if position in self.positions)
        parked = (step.cause for step in steps if step.outcome is None)
        cause = self.cause or next((each for each in parked if each is not None), None)
        return canonical.decode(cause)["reason"] if cause is not None else None

    @property
    def is_in_doubt(self) -> bool:
        """Whether there are steps that were dispatched and have no outcome, or that wait for one."""
        return bool(self.running or self.waiting)

    @property
    def root(self) -> bytes:
        return merkle.frontier_root(self.frontier)
