"""Recompute a run from its entries and payloads, and name everything that does not agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from agent_run_ledger import merkle
from agent_run_ledger.contract import AES_GCM, PACKED, PACKED_AES_GCM, Head, Listing, Request, Row, sealed_under
from agent_run_ledger.engine.audit_budgets import BudgetAudit
from agent_run_ledger.engine.erasing import Spans
from agent_run_ledger.engine.history import KEPT_BYTES, History, parse
from agent_run_ledger.engine.log import PAUSES
from agent_run_ledger.engine.runs import listing
from agent_run_ledger.model import Finding
from agent_run_ledger.rules import canonical, digests
from agent_run_ledger.rules.budget import NOTHING
from agent_run_ledger.rules.lifecycle import DELTA
from agent_run_ledger.words import Event, RunState

_MOST_TOKEN = 2**53
"""Tokens are epochs, which are Unix seconds, times 2**20, and a count: for longer than anybody asks they are less than this."""
_LATER = "outcome, to be retried"
_COLUMNS: tuple[tuple[str, type, Any], ...] = (
    ("seq", int, 0), ("kind", str, ""), ("position", str, None), ("attempt", int, None), ("body", bytes, b""),
    ("roots", bytes, b""), ("payload", bytes, None), ("digest", bytes, None), ("fingerprint", bytes, None),
    ("encoding", str, None),
)  # fmt: skip
"""Each column's type, and what is taken for it where the type is another; None: the column may be empty."""
_NO_MOVE = {
    "created", "value", "missed", "redispatched_undeclared", "answered", "signal", "declined", "forked", "notice", "blocked",
    "limited", "granted", "settled", "erased",
}  # fmt: skip
_EVENTS = {
    "intent": {Event.START_STEP},
    "outcome": {Event.STEP_SUCCESS, Event.STEP_ERROR},
    _LATER: {Event.WAIT},
    "refused": {Event.LOOP_DETECTED, Event.LOOP_SUSPECTED, Event.BUDGET_EXHAUSTED},
    "exhausted": {Event.BUDGET_EXHAUSTED},
    "parked": {Event.WAIT},
    "asked": {Event.WAIT},
    "waiting": {Event.WAIT},
    "resolved": {Event.WAIT},
    "released": {Event.RELEASE},
    "finished": {Event.FINISH},
    "aborted": {Event.ABORT},
    "cancelled": {Event.CANCEL},
}


@lru_cache(maxsize=256)  # a file may hold any number of kinds that there are not
def _follow(what: str, state: RunState) -> frozenset[RunState]:
    """The states in which an entry of this kind may leave a run that was in that one."""
    if what in _NO_MOVE:
        return frozenset({state})
    reach = DELTA[state]
    return frozenset(reach[event] for event in _EVENTS.get(what, ()) if event in reach)


def audit(
    run_id: str, head: Head | None, secret: bytes, rows: Iterable[Row], requests: Sequence[Request] = ()
) -> list[Finding]:
    """Every finding of one run of which everything is at hand."""
    findings: list[Finding] = []
    auditor = Audit(run_id, secret, findings.append)
    for row in rows:
        auditor.take(row)
    auditor.end(head, requests)
    return findings


class Origin(NamedTuple):
    """What a run says of the one that it was made from, in the entry behind what was carried over."""

    seq: int
    run_id: str
    size: int
    root: str


class Audit:
    """One run's entries, one after the other: sequence, leaves, roots, columns, digests, keys, lifecycle, fencing, budgets, and at the end
    its head as it is *then*.

    `report` is told every finding as soon as it is made, in log order. No long payload is kept. A payload that a later entry says was
    erased is no finding, its digest in the body still stands. A bare database proves only that it agrees with itself.

    Where it looks at a bundle, the secret may be withheld, which is None, and so may all payloads: `unchecked` counts those that could
    not be held to the log.
    """

    def __init__(
        self, run_id: str, secret: bytes | None, report: Callable[[Finding], None], *, has_payloads: bool = True
    ) -> None:
        self.run_id = run_id
        self._report = report
        self.has_secret, self.has_payloads = secret is not None, has_payloads
        secret = b"" if secret is None else secret
        is_bytes = type(secret) is bytes  # a file holds whatever is written into it
        if not is_bytes:
            self.found(None, "secret", f"the run's secret is of type {type(secret).__name__}, it should be bytes")
        self.is_sealed = is_bytes and sealed_under(secret) is not None
        """Whether what the run has kept is encrypted, and its key is not here."""
        self.unchecked = 0
        """Payloads that could not be held to the log, for that or because something is withheld."""
        self.secret = secret = secret if is_bytes and not self.is_sealed else b""
        self.size = 0
        self.leaves = 0
        self.frontier: list[bytes] = []
        self.state = RunState.PENDING
        self.token = 0
        self.steps = 0
        self.refused = 0
        self.outcomes: set[int] = set()
        self.seen: set[tuple[str | None, int | None, str]] = set()
        self.is_carrying = False
        """Whether the run was made from another one, and what stands here was carried over."""
        self.erased = Spans()
        """Entries of which the payload is gone, and no entry so far says so."""
        self.kept = Spans()
        """Entries that have their payload."""
        self.ended = 0
        """The entry with which the run ended."""
        self.lost_secret = False
        """Whether an entry says that the secret was erased."""
        self.origin: Origin | None = None
        """What it was made from."""
        self.listing: Listing | None = None
        """What the run is to be found by, as its first entry says."""
        self.history = History(run_id, secret)
        """The fold that everybody else reads runs with; an entry that it cannot take is a finding."""
        self.budgets = BudgetAudit(self.history, self.found)
        self._fitting: set[tuple[type, ...]] = set()
        """Types of columns that were looked at, and are as they should be."""

    def take(self, row: Row) -> None:
        """The next entry."""
        types = tuple(map(type, row))
        if types not in self._fitting:
            fits = self.typed(row)
            if fits is row:
                self._fitting.add(types)
            row = fits
        self.entry(row)

    def end(self, head: Head | None, requests: Sequence[Request]) -> None:
        """There are no more entries."""
        for first, last in self.erased.found:
            which = f"entry {first}" if first == last else f"entries {first} to {last}"
            self.found(first, "erased", f"the payload of {which} is gone, and no later entry says that it was erased")
        if self.lost_secret and (self.secret or self.is_sealed):
            self.found(None, "secret", "an entry says that the run's secret was erased, and it is there")
        elif self.leaves and self.has_secret and not (self.lost_secret or self.secret or self.is_sealed):
            self.found(None, "secret", "the run's secret is gone, and no entry says that it was erased")
        self.head(head, [request.id for request in requests])

    def found(self, seq: int | None, code: str, message: str, expected: object = None, found: object = None) -> None:
        """Where two things should agree, `expected` is what the rest of the run says, and `found` what stands there."""
        self._report(Finding(self.run_id, seq, code, message, _as_text(expected), _as_text(found)))

    def typed(self, row: Row) -> Row:
        """A file holds whatever is written into it: text where bytes belong, a fraction where a number does."""
        fits = row
        for name, kind, usual in _COLUMNS:
            value = getattr(row, name)
            if type(value) is not kind and (value is not None or usual is not None):
                wrong, right = type(value).__name__, kind.__name__
                self.found(row.seq, "column", f"{name} is of type {wrong}, it should be {right}", right, wrong)
                fitting: Any = {name: self.size + 1 if name == "seq" else usual}
                fits = fits._replace(**fitting)
        return fits

    def entry(self, row: Row) -> None:
        seq, kind = row.seq, row.kind
        if seq != self.size + 1:
            expected = self.size + 1
            missing = f"entries {expected} to {seq - 1} are missing" if seq > expected else "out of order"
            self.found(seq, "sequence", f"expected entry {expected}, found entry {seq}: {missing}", expected, seq)
        self.frontier, roots = merkle.append(self.frontier, self.leaves, sha256(b"\x00" + row.body).digest())
        self.leaves += 1
        if roots != row.roots:
            which = "leaf" if roots[:32] != row.roots[:32] else "subtree roots"
            message = f"the stored {which} are {row.roots.hex()}, the bodies give {roots.hex()}"
            self.found(seq, "root", message, roots, row.roots)
        self.size = max(seq, self.size + 1)
        try:
            body = parse(row.body)
        except (ValueError, RecursionError) as error:
            self.found(seq, "body", f"the body is no JSON object: {error}")
            return
        if kind == "created":
            self.is_carrying = "forked_from" in body
            self.listing = listing(body) if "at" in body else None
        elif "carried" not in body:
            self.is_carrying = False
        elif not self.is_carrying:
            message = "the entry says that it was carried over from another run, and stands behind the fork"
            self.found(seq, "lifecycle", message)
        if (kind == "created") is not (self.leaves == 1):
            self.found(
                seq, "lifecycle", f"{kind!r} is entry {self.leaves} of the run; the first one is created, and no other"
            )
        try:  # a field of the body may hold anything, whatever should stand there
            if kind == "forked":
                self.origins(row, body)
            self.columns(row, body)
            if kind == "erased":
                self.erasing(row, body)
            self.payload(row, body)
            self.moves(row, body)
            self.order(row, body)
            if row.payload is not None and (len(row.payload) > KEPT_BYTES or row.encoding is not None):
                row = row._replace(payload=None)
            self.budgets.before(row, body)
            self.history.absorb(row, body)
            self.budgets.after(row, body)
        except (
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            AssertionError,
            ArithmeticError,
            RecursionError,
        ) as error:
            self.found(seq, "body", f"the entry does not fit the log before it ({type(error).__name__}: {error})")
            return
        amount, says = self.history.account.spent, body.get("spent", _NONE)
        if (amount is not NOTHING or says is not _NONE) and says != (spent := amount.written()):
            self.found(seq, "count", f"the entries say that {spent} is spent, the body says {says}", spent, says)

    def origins(self, row: Row, body: dict[str, Any]) -> None:
        run_id, size, root = body.get("from"), body.get("size"), body.get("root")
        if isinstance(run_id, str) and type(size) is int and isinstance(root, str):
            self.origin = Origin(row.seq, run_id, size, root)
        else:
            self.found(row.seq, "origin", f"the run was made from {run_id!r}, {size!r} entries with the root {root!r}")

    def columns(self, row: Row, body: dict[str, Any]) -> None:
        get = body.get
        seq, kind, position, attempt = given = row[:4]
        if given != (get("seq"), get("kind"), get("position"), get("attempt")) or get("run") != self.run_id:
            for name, value in zip(("run", "seq", "kind", "position", "attempt"), (self.run_id, *given), strict=True):
                if get(name) != value:
                    message = f"{name}: the row says {value!r}, the hashed body {get(name)!r}"
                    self.found(seq, "column", message, get(name), value)
        if position is None:
            return
        key = (position, attempt, kind)
        if attempt is not None and kind in ("intent", "outcome"):
            if key in self.seen:
                self.found(seq, "twice", f"a second {kind} of position {position}, attempt {attempt}")
            self.seen.add(key)
        elif kind in ("asked", "parked", "resolved"):  # what had failed is in doubt again, and its end may be found out
            self.seen.discard((position, attempt, "outcome"))

    def payload(self, row: Row, body: dict[str, Any]) -> None:
        seq, payload = row.seq, row.payload
        if "payload" not in body:
            if any(each is not None for each in (payload, row.digest, row.fingerprint, row.encoding)):
                message = "there is a payload, or what goes with one, where the hashed body names none"
                self.found(seq, "payload", message)
            return
        if not self.has_payloads or (payload is not None and not self.has_secret):
            self.unchecked += 1
        if payload is None:
            if self.has_payloads:
                self.erased.add(seq)
            if row.digest is not None:
                self.found(seq, "payload", "the payload is missing although its digest was not erased with it")
            elif row.fingerprint is not None or row.encoding is not None:
                self.found(seq, "payload", "the payload is erased, and a column that goes with it is not")
            return
        self.kept.add(seq)
        if row.encoding in (AES_GCM, PACKED_AES_GCM) and self.is_sealed:
            self.unchecked += 1
            return
        if row.encoding in (AES_GCM, PACKED_AES_GCM):
            message = "the payload cannot be decrypted: it was not encrypted for this entry, or was changed"
            self.found(seq, "payload", message)
            return
        if row.encoding == PACKED:
            message = "the payload is packed and cannot be put together: it, or one from which it copies, was changed"
            self.found(seq, "payload", message)
            return
        if row.encoding is not None:
            message = f"the payload's encoding {row.encoding!r} is not known to this version"
            self.found(seq, "payload", message, None, row.encoding)
            return
        if self.has_secret and not self.secret:
            self.found(seq, "secret", "the run's secret is gone and this payload is not: nothing binds it any more")
        elif self.secret and (salted := digests.salted(self.secret, payload)) != body["payload"]:
            message = "the payload is not the one whose salted digest is in the hashed body"
            self.found(seq, "payload", message, body["payload"], salted)
        digest = digests.plain(payload)
        if row.digest != digest:
            self.found(seq, "digest", "the plain digest is not that of the payload", digest, row.digest)
        if row.kind == "intent":
            fingerprint = digests.fingerprint(str(body.get("tool")), digest)
            if row.fingerprint != fingerprint:
                message = "the fingerprint is not that of tool and arguments"
                self.found(seq, "fingerprint", message, fingerprint, row.fingerprint)
            self.key(row, payload, body)
        elif row.fingerprint is not None:
            message = f"an entry of kind {row.kind!r} has no fingerprint"
            self.found(seq, "fingerprint", message, None, row.fingerprint)
        try:
            canonical.decode(payload)
        except (ValueError, RecursionError) as error:
            self.found(seq, "payload", f"the payload cannot be decoded: {error}")

    def erasing(self, row: Row, body: dict[str, Any]) -> None:
        """What is said to be erased is gone, and the run had ended by then."""
        spans = body.get("entries")
        if type(spans) is not list or not all(
            type(span) is list and len(span) == 2 and all(type(each) is int for each in span) for span in spans
        ):
            self.found(row.seq, "erased", f"entries is {spans!r}, and these are no numbers of entries")
            spans = []
        for first, last in spans:
            if still := self.kept.within(first, last):
                self.found(still[0][0], "erased", f"entry {row.seq} says that this payload was erased, and it is there")
            self.erased.remove(first, last)
        self.lost_secret = self.lost_secret or body.get("secret") is True
        if body.get("ended") != self.ended or not self.state.is_terminal:
            message = f"ended is {body.get('ended')!r}, and the run has ended with entry {self.ended or None}"
            self.found(row.seq, "order", message, self.ended or None, body.get("ended"))

    def key(self, row: Row, arguments: bytes, body: dict[str, Any]) -> None:
        """A key is made of position and arguments, or it is that of the step which is continued, or that of the run it came from."""
        known = self.history.positions
        begun = known.get(str(body["continues"])) if "continues" in body else known.get(row.position or "")
        if "carried" in body and self.is_carrying:
            return
        says = body.get("key")
        if begun is not None and ("continues" in body or begun.continues is not None or begun.is_carried):
            if (begun.tool, begun.input, begun.key) != (body.get("tool"), body.get("payload"), says):
                message = f"the idempotency key is not that of the call which it continues, {begun.key}"
                self.found(row.seq, "key", message, begun.key, says)
            return
        key = digests.idempotency_key(self.secret, self.run_id, str(row.position), str(body.get("tool")), arguments)
        if self.secret and says != key:
            message = f"the idempotency key is {says}, arguments and position give {key}"
            self.found(row.seq, "key", message, key, says)

    def order(self, row: Row, body: dict[str, Any]) -> None:
        """What its program had seen is an outcome that stands before, or none; what it acts upon, failures that nobody had acted upon."""
        seq, kind = row.seq, row.kind
        if "seen" in body:
            seen = body["seen"]
            if not (type(seen) is int and (seen in self.outcomes or seen in (0, 1))):
                self.found(seq, "order", f"seen is {seen!r}, and no outcome before has that number", None, seen)
        if "follows" in body:
            follows, trailing = body["follows"], self.history.trailing
            if type(follows) is not list or not all(type(each) is str and each in trailing for each in follows):
                message = f"follows is {follows!r}, and not all of these are failures to act upon"
                self.found(seq, "order", message, list(trailing), follows)
        if kind == "outcome":
            self.outcomes.add(seq)
            if "signal" in body:
                waiting = [signal.seq for signals in self.history.signals.values() for signal in signals]
                if body["signal"] not in waiting:
                    message = f"signal is {body['signal']!r}, and no signal of that number was there to be taken"
                    self.found(seq, "order", message, sorted(waiting), body["signal"])
        elif kind == "answered":
            asked = self.history.positions.get(row.position or "")
            if asked is None or not asked.is_asked:
                self.found(seq, "order", "an answer of a receiver that was not asked")

    def moves(self, row: Row, body: dict[str, Any]) -> None:
        seq, kind = row.seq, row.kind
        state, token = body.get("state"), body.get("token")
        legal = _follow(_LATER if kind == "outcome" and "retry_at" in body else kind, self.state)
        if kind in PAUSES and row.position is not None:  # the others go on
            # a first version took what an earlier owner had dispatched for running
            tokens = (token, None) if type(token) is int else (None,)
            stands, settled = self.history.stands_as, {row.position}
            is_legal = any(stands(each, settled, under) == state for under in tokens for each in legal)
            if not is_legal:
                legal = frozenset(stands(each, settled, under) for under in tokens for each in legal)
        else:
            is_legal = isinstance(state, str) and state in legal
        if not is_legal:
            message = f"{state} does not follow from {kind!r} after {self.state} by the lifecycle table"
            self.found(seq, "lifecycle", message, " or ".join(sorted(legal)), state)
        if isinstance(state, str) and state in _STATES:
            self.state = _STATES[state]
            if self.state.is_terminal and not self.ended:
                self.ended = seq
        if not isinstance(token, int) or not self.token <= token < _MOST_TOKEN:
            message = f"fencing token {token} after {self.token}: tokens never go down, and never come so far as {_MOST_TOKEN}"
            self.found(seq, "fencing", message, f"{self.token} or more", token)
        else:
            self.token = token
        if kind == "intent":
            self.steps += row.attempt == 1 or "continues" in body
        elif kind in ("refused", "blocked"):
            self.refused += 1
        says = (body.get("steps"), body.get("refused", 0))
        if says != (self.steps, self.refused):
            message = f"steps and refusals are {self.steps} and {self.refused}, the body says {says[0]} and {says[1]}"
            self.found(seq, "count", message, [self.steps, self.refused], list(says))

    def head(self, head: Head | None, requests: list[int]) -> None:
        if head is None:
            self.found(None, "head", "the run has entries and no head")
            return
        if type(head.token) is not int or type(head.inbox) is not int:
            message = f"fencing token and inbox counter are {head.token!r} and {head.inbox!r}, not numbers"
            self.found(None, "head", message)
            return
        if self.size == 0:
            self.found(None, "sequence", "the run has a head and no entries")
        if self.listing is not None and head.listing != self.listing:
            listed, says = list(head.listing), list(self.listing)
            self.found(None, "head", f"the head is listed as {listed}, its first entry says {says}", says, listed)
        if head.token >= _MOST_TOKEN:
            message = f"no epoch comes so far as to the fencing token {head.token}"
            self.found(None, "fencing", message, f"less than {_MOST_TOKEN}", head.token)
        if head.token < self.token:
            message = f"the head's fencing token {head.token} is older than the last entry's {self.token}"
            self.found(None, "fencing", message, f"{self.token} or more", head.token)
        if head.inbox < self.history.honoured:
            message = f"the inbox counter {head.inbox} is lower than the last request in the log"
            self.found(None, "head", message, f"{self.history.honoured} or more", head.inbox)
        if len(requests) != head.inbox or any(id != number for number, id in enumerate(requests, 1)):
            message = f"the inbox counter is {head.inbox}, and the inbox holds the requests {requests}"
            self.found(None, "head", message, head.inbox, requests)


_NONE: dict[str, Any] = {}
_STATES = {str(state): state for state in RunState}


def _as_text(value: object) -> str | None:
    """As a finding says it: hashes in hex."""
    return None if value is None else value.hex() if isinstance(value, bytes) else str(value)
