"""Recompute a run from its entries and payloads, and name everything that does not agree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from agent_run_ledger import merkle
from agent_run_ledger.contract import AES_GCM, Head, Listing, Request, Row, sealed_under
from agent_run_ledger.engine.erasing import Spans
from agent_run_ledger.engine.history import KEPT_BYTES, History
from agent_run_ledger.engine.log import PAUSES
from agent_run_ledger.engine.runs import listing
from agent_run_ledger.model import Event, Finding, RunState
from agent_run_ledger.rules import canonical, digests
from agent_run_ledger.rules.lifecycle import DELTA

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
    "outcome, to be retried": {Event.WAIT},
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


def audit(
    run_id: str, head: Head | None, secret: bytes, rows: Iterable[Row], requests: Sequence[Request] = ()
) -> list[Finding]:
    """Every finding of one run of which everything is at hand."""
    auditor = Audit(run_id, secret)
    for row in rows:
        auditor.take(row)
    return auditor.end(head, requests)


class Audit:
    """Every finding of one run, in log order: sequence, leaves, roots, columns, digests, keys, lifecycle, fencing, head.

    It takes one whole entry after the other, keeps no long payload, and at the end is told of the head as it is *then*. A payload that
    a later entry says was erased is no finding, its digest in the body still stands. A bare database proves only that it agrees with
    itself.

    Where it looks at a bundle, the secret may be withheld, which is None, and so may all payloads: `unchecked` counts those that could
    not be held to the log.
    """

    def __init__(self, run_id: str, secret: bytes | None, *, has_payloads: bool = True) -> None:
        self.run_id = run_id
        self.findings: list[Finding] = []
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
        self.listing: Listing | None = None
        """What the run is to be found by, as its first entry says."""
        self.history = History(run_id, secret)
        """The fold that everybody else reads runs with; an entry that it cannot take is a finding."""

    def take(self, row: Row) -> None:
        """The next entry."""
        self.entry(self.typed(row))

    def end(self, head: Head | None, requests: Sequence[Request]) -> list[Finding]:
        """There are no more entries: everything that was found."""
        for first, last in self.erased.found:
            which = f"entry {first}" if first == last else f"entries {first} to {last}"
            self.found(first, "erased", f"the payload of {which} is gone, and no later entry says that it was erased")
        if self.lost_secret and (self.secret or self.is_sealed):
            self.found(None, "secret", "an entry says that the run's secret was erased, and it is there")
        elif self.leaves and self.has_secret and not (self.lost_secret or self.secret or self.is_sealed):
            self.found(None, "secret", "the run's secret is gone, and no entry says that it was erased")
        self.head(head, [request.id for request in requests])
        return self.findings

    def found(self, seq: int | None, code: str, message: str) -> None:
        self.findings.append(Finding(self.run_id, seq, code, message))

    def typed(self, row: Row) -> Row:
        """A file holds whatever is written into it: text where bytes belong, a fraction where a number does."""
        fits = row
        for name, kind, usual in _COLUMNS:
            value = getattr(row, name)
            if type(value) is not kind and (value is not None or usual is not None):
                self.found(row.seq, "column", f"{name} is of type {type(value).__name__}, it should be {kind.__name__}")
                fitting: Any = {name: self.size + 1 if name == "seq" else usual}
                fits = fits._replace(**fitting)
        return fits

    def entry(self, row: Row) -> None:
        if row.seq != self.size + 1:
            missing = (
                f"entries {self.size + 1} to {row.seq - 1} are missing" if row.seq > self.size + 1 else "out of order"
            )
            self.found(row.seq, "sequence", f"expected entry {self.size + 1}, found entry {row.seq}: {missing}")
        self.frontier, roots = merkle.append(self.frontier, self.leaves, merkle.leaf_hash(row.body))
        self.leaves += 1
        if roots != row.roots:
            which = "leaf" if roots[:32] != row.roots[:32] else "subtree roots"
            self.found(row.seq, "root", f"the stored {which} are {row.roots.hex()}, the bodies give {roots.hex()}")
        self.size = max(row.seq, self.size + 1)
        try:
            body = json.loads(row.body)
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            self.found(row.seq, "body", f"the body is no JSON object: {error}")
            return
        if row.kind == "created":
            self.is_carrying = "forked_from" in body
            self.listing = listing(body) if "at" in body else None
        elif "carried" not in body:
            self.is_carrying = False
        elif not self.is_carrying:
            self.found(
                row.seq,
                "lifecycle",
                "the entry says that it was carried over from another run, and stands behind the fork",
            )
        try:  # a field of the body may hold anything, whatever should stand there
            self.columns(row, body)
            if row.kind == "erased":
                self.erasing(row, body)
            self.payload(row, body)
            self.moves(row, body)
            self.order(row, body)
            if row.payload is not None and (len(row.payload) > KEPT_BYTES or row.encoding is not None):
                row = row._replace(payload=None)
            self.history.absorb(row, body)
        except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            self.found(row.seq, "body", f"the entry does not fit the log before it ({type(error).__name__}: {error})")
            return
        spent = self.history.account.spent.written()
        if body.get("spent", {}) != spent:
            self.found(
                row.seq, "count", f"the entries say that {spent} is spent, the body says {body.get('spent', {})}"
            )

    def columns(self, row: Row, body: dict[str, Any]) -> None:
        given = {
            "run": self.run_id, "seq": row.seq, "kind": row.kind, "position": row.position, "attempt": row.attempt,
        }  # fmt: skip
        for name, value in given.items():
            if body.get(name) != value:
                self.found(row.seq, "column", f"{name}: the row says {value!r}, the hashed body {body.get(name)!r}")
        key = (row.position, row.attempt, row.kind)
        if row.position is not None and row.attempt is not None and row.kind in ("intent", "outcome"):
            if key in self.seen:
                self.found(row.seq, "twice", f"a second {row.kind} of position {row.position}, attempt {row.attempt}")
            self.seen.add(key)
        elif row.kind in (
            "asked",
            "parked",
            "resolved",
        ):  # what had failed is in doubt again, and its end may be found out
            self.seen.discard((row.position, row.attempt, "outcome"))

    def payload(self, row: Row, body: dict[str, Any]) -> None:
        if "payload" not in body:
            if any(each is not None for each in (row.payload, row.digest, row.fingerprint, row.encoding)):
                self.found(
                    row.seq, "payload", "there is a payload, or what goes with one, where the hashed body names none"
                )
            return
        if not self.has_payloads or (row.payload is not None and not self.has_secret):
            self.unchecked += 1
        if row.payload is None:
            if self.has_payloads:
                self.erased.add(row.seq)
            if row.digest is not None:
                self.found(row.seq, "payload", "the payload is missing although its digest was not erased with it")
            elif row.fingerprint is not None or row.encoding is not None:
                self.found(row.seq, "payload", "the payload is erased, and a column that goes with it is not")
            return
        self.kept.add(row.seq)
        if row.encoding == AES_GCM and self.is_sealed:
            self.unchecked += 1
            return
        if row.encoding == AES_GCM:
            self.found(
                row.seq,
                "payload",
                "the payload cannot be decrypted: it was not encrypted for this entry, or was changed",
            )
            return
        if row.encoding is not None:
            self.found(row.seq, "payload", f"the payload's encoding {row.encoding!r} is not known to this version")
            return
        if self.has_secret and not self.secret:
            self.found(row.seq, "secret", "the run's secret is gone and this payload is not: nothing binds it any more")
        elif self.secret and digests.salted(self.secret, row.payload) != body["payload"]:
            self.found(row.seq, "payload", "the payload is not the one whose salted digest is in the hashed body")
        if row.digest != digests.plain(row.payload):
            self.found(row.seq, "digest", "the plain digest is not that of the payload")
        if row.kind == "intent":
            if row.fingerprint != digests.fingerprint(str(body.get("tool")), digests.plain(row.payload)):
                self.found(row.seq, "fingerprint", "the fingerprint is not that of tool and arguments")
            self.key(row, row.payload, body)
        elif row.fingerprint is not None:
            self.found(row.seq, "fingerprint", f"an entry of kind {row.kind!r} has no fingerprint")
        try:
            canonical.decode(row.payload)
        except (ValueError, RecursionError) as error:
            self.found(row.seq, "payload", f"the payload cannot be decoded: {error}")

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
            self.found(
                row.seq,
                "order",
                f"ended is {body.get('ended')!r}, and the run has ended with entry {self.ended or None}",
            )

    def key(self, row: Row, arguments: bytes, body: dict[str, Any]) -> None:
        """A key is made of position and arguments, or it is that of the step which is continued, or that of the run it came from."""
        known = self.history.positions
        begun = known.get(str(body.get("continues"))) if "continues" in body else known.get(row.position or "")
        if "carried" in body and self.is_carrying:
            return
        if begun is not None and ("continues" in body or begun.continues is not None or begun.is_carried):
            if (begun.tool, begun.input, begun.key) != (body.get("tool"), body.get("payload"), body.get("key")):
                self.found(
                    row.seq, "key", f"the idempotency key is not that of the call which it continues, {begun.key}"
                )
            return
        key = digests.idempotency_key(self.secret, self.run_id, str(row.position), str(body.get("tool")), arguments)
        if self.secret and body.get("key") != key:
            self.found(row.seq, "key", f"the idempotency key is {body.get('key')}, arguments and position give {key}")

    def order(self, row: Row, body: dict[str, Any]) -> None:
        """What its program had seen is an outcome that stands before, or none; what it acts upon, failures that nobody had acted upon."""
        if "seen" in body and not (
            type(body["seen"]) is int and (body["seen"] in self.outcomes or body["seen"] in (0, 1))
        ):
            self.found(row.seq, "order", f"seen is {body['seen']!r}, and no outcome before has that number")
        follows = body.get("follows", [])
        if type(follows) is not list or not all(
            type(each) is str and each in self.history.trailing for each in follows
        ):
            self.found(row.seq, "order", f"follows is {follows!r}, and not all of these are failures to act upon")
        if row.kind == "outcome":
            self.outcomes.add(row.seq)
            waiting = (
                {signal.seq for signals in self.history.signals.values() for signal in signals}
                if "signal" in body
                else ()
            )
            if "signal" in body and body["signal"] not in waiting:
                self.found(
                    row.seq,
                    "order",
                    f"signal is {body['signal']!r}, and no signal of that number was there to be taken",
                )
        elif row.kind == "answered":
            asked = self.history.positions.get(row.position or "")
            if asked is None or not asked.is_asked:
                self.found(row.seq, "order", "an answer of a receiver that was not asked")

    def moves(self, row: Row, body: dict[str, Any]) -> None:
        state = body.get("state")
        if row.kind in _NO_MOVE:
            legal = {self.state}
        else:
            reach = DELTA[self.state]
            what = "outcome, to be retried" if row.kind == "outcome" and "retry_at" in body else row.kind
            legal = {reach[event] for event in _EVENTS.get(what, ()) if event in reach}
            if row.kind in PAUSES and row.position is not None:  # the others go on
                # a first version took what an earlier owner had dispatched for running
                tokens = (None, body["token"]) if type(body.get("token")) is int else (None,)
                legal = {self.history.stands_as(each, {row.position}, token) for each in legal for token in tokens}
        if state not in legal:
            after = f"{row.kind!r} after {self.state}"
            self.found(row.seq, "lifecycle", f"{state} does not follow from {after} by the lifecycle table")
        if isinstance(state, str) and state in RunState.__members__:
            self.state = RunState(state)
            if self.state.is_terminal and not self.ended:
                self.ended = row.seq
        token = body.get("token")
        if not isinstance(token, int) or token < self.token:
            self.found(row.seq, "fencing", f"fencing token {token} after {self.token}: tokens never go down")
        else:
            self.token = token
        self.steps += row.kind == "intent" and (row.attempt == 1 or "continues" in body)
        self.refused += row.kind in ("refused", "blocked")
        if (body.get("steps"), body.get("refused", 0)) != (self.steps, self.refused):
            self.found(
                row.seq, "count", f"steps and refusals are {self.steps} and {self.refused}, the body says otherwise"
            )

    def head(self, head: Head | None, requests: list[int]) -> None:
        if head is None:
            self.found(None, "head", "the run has entries and no head")
            return
        if type(head.token) is not int or type(head.inbox) is not int:
            self.found(
                None, "head", f"fencing token and inbox counter are {head.token!r} and {head.inbox!r}, not numbers"
            )
            return
        if self.size == 0:
            self.found(None, "sequence", "the run has a head and no entries")
        if self.listing is not None and head.listing != self.listing:
            self.found(
                None, "head", f"the head is listed as {tuple(head.listing)}, its first entry says {tuple(self.listing)}"
            )
        if head.token < self.token:
            self.found(
                None, "fencing", f"the head's fencing token {head.token} is older than the last entry's {self.token}"
            )
        if head.inbox < self.history.honoured:
            self.found(None, "head", f"the inbox counter {head.inbox} is lower than the last request in the log")
        if requests != list(range(1, head.inbox + 1)):
            self.found(None, "head", f"the inbox counter is {head.inbox}, and the inbox holds the requests {requests}")
