"""The nouns: what a run, a step, an entry and their limits are. Frozen data, no behaviour beyond reading itself.

Dataclasses cost a process 20 ms; what every step needs stands in `words`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

from agent_run_ledger.words import ACCOUNTS
from agent_run_ledger.words import Effect as Effect
from agent_run_ledger.words import Event as Event
from agent_run_ledger.words import RunState as RunState
from agent_run_ledger.words import StepState as StepState
from agent_run_ledger.words import Verdict as Verdict

if TYPE_CHECKING:
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a failing step is dispatched again.

    ``max_attempts`` counts dispatches over errors, crashes and reruns. Before retry ``i`` (from 0) the wait is drawn from
    ``uniform(0, min(cap, base * 2**i))`` seconds ("full jitter", Brooker, *Exponential Backoff And Jitter*, AWS 2015), or,
    with ``jitter="decorrelated"``, from ``min(cap, uniform(base, 3 * previous))``.
    """

    max_attempts: int = 4
    base: float = 0.5
    cap: float = 30.0
    jitter: Literal["full", "decorrelated"] = "full"

    def __post_init__(self) -> None:
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise ValueError(f"RetryPolicy.max_attempts is a whole number of at least 1, not {self.max_attempts!r}")
        for name, seconds in (("base", self.base), ("cap", self.cap)):
            if type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
                raise ValueError(f"RetryPolicy.{name} is a number of seconds of at least 0, not {seconds!r}")
        if self.jitter not in ("full", "decorrelated"):
            raise ValueError(f"RetryPolicy.jitter is 'full' or 'decorrelated', not {self.jitter!r}")


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What runs that share a budget may use together, as `ledger.budget(name, ...)` declares it; ``account`` is how logs name it.

    Both None: a log names it, and what it allows stands in the log of the account.
    """

    account: str
    tokens: int | None = None
    usd: Decimal | None = None

    def __post_init__(self) -> None:
        if type(self.account) is not str or not self.account.startswith(ACCOUNTS):
            raise ValueError(
                f"SharedLimits.account is what ledger.budget(name, ...) makes of a name, not {self.account!r}"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one run; ``None`` is no limit.

    ``steps`` counts first dispatches and refusals; ``None`` leaves it to ``max_steps``. ``tokens`` (of all kinds) and ``usd`` (an int, a
    Decimal, or a number as text; a float is taken as it is written) count what calls have used, and what those under way may use.
    ``seconds`` counts the time in which the run's program was at work. From ``deadline`` on, an aware datetime, nothing new is
    dispatched and the run ends; what runs at that moment is not interrupted. At the fraction ``notice_at`` of a limit (0 to 1; ``None``:
    never) `run.notices()` says so. ``within`` is the budget that the run shares with others, as `ledger.budget(name, ...)` gives it.
    """

    steps: int | None = None
    tokens: int | None = None
    usd: Decimal | int | str | float | None = None
    seconds: float | None = None
    deadline: datetime | None = None
    notice_at: float | None = None
    within: Budget | tuple[SharedLimits, ...] = ()

    def __post_init__(self) -> None:
        within = self.within.within if isinstance(self.within, Budget) else self.within
        is_more = isinstance(self.within, Budget) and replace(self.within, within=()) != Budget()
        if type(within) is not tuple or is_more or not all(type(each) is SharedLimits for each in within):
            raise ValueError(f"Budget.within is what ledger.budget(name, ...) gives, not {self.within!r}")
        object.__setattr__(self, "within", within)
        for name, count in (("steps", self.steps), ("tokens", self.tokens)):
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"Budget.{name} is a whole number of at least 1, not {count!r}")
        if self.usd is not None:
            object.__setattr__(self, "usd", dollars(self.usd, "Budget.usd"))
        for name, number, most in (("seconds", self.seconds, inf), ("notice_at", self.notice_at, 1)):
            if number is not None and (type(number) not in (int, float) or not 0 < number <= most):
                raise ValueError(
                    f"Budget.{name} is a number above 0{' and up to 1' if most == 1 else ''}, not {number!r}"
                )
        if self.deadline is not None and getattr(self.deadline, "tzinfo", None) is None:
            raise ValueError(f"Budget.deadline is a datetime with a time zone, not {self.deadline!r}")


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """A budget that runs share, as a reader sees it. ``account`` is the id of the log in which it is kept."""

    account: str
    name: str | None
    """As `ledger.budget` was given it; None for the budget of a run and of those that it has begun."""
    day: str | None
    """The day in UTC, ``YYYY-MM-DD``, of a budget of which each day has its own."""
    parent_run_id: str | None
    """The run whose budget it is, and of those that it has begun."""
    tokens: int | None
    usd: Decimal | None
    """What it allows; None: it has no such limit."""
    spent_tokens: int
    spent_usd: Decimal
    reserved_tokens: int
    reserved_usd: Decimal
    """What was granted to calls of which it is not known yet what they have used."""
    trouble: str | None = None
    """Why it cannot be read. Then nothing of it is known, and no call is granted anything."""


@dataclass(frozen=True, slots=True)
class MayRepeat:
    """How often a tool may be called with equal arguments in one run, as polling is: so many `times`, for so many `seconds` from the first.

    Both are limits of what the loop rules leave alone; ``None`` is no limit.
    """

    times: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.times is not None and (type(self.times) is not int or self.times < 1):
            raise ValueError(f"MayRepeat.times is a whole number of at least 1, not {self.times!r}")
        if self.seconds is not None and (type(self.seconds) not in (int, float) or not 0 < self.seconds < inf):
            raise ValueError(f"MayRepeat.seconds is a number of seconds above 0, not {self.seconds!r}")


def dollars(given: Decimal | int | str | float, what: str) -> Decimal:
    """An amount of US dollars above 0. Raises `ValueError`, which names `what` it was given for."""
    try:
        amount = Decimal(repr(given) if type(given) is float else given)
    except (ArithmeticError, ValueError, TypeError):
        amount = Decimal(0)
    exponent = amount.as_tuple().exponent
    is_odd = type(given) is bool or (type(given) is str and "_" in given)
    if is_odd or not isinstance(exponent, int) or not 0 < amount < 10**15 or exponent < -30:
        raise ValueError(f"{what} is an amount of US dollars above 0, not {given!r}")
    return amount


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the outside world says about an idempotency key: found with its output, absent, or unknown."""

    verdict: Literal["found", "absent", "unknown"]
    output: object = None
    reason: str = ""

    @classmethod
    def found(cls, output: object) -> Receipt:
        """The call took effect, and this is its output."""
        return cls("found", output)

    @classmethod
    def absent(cls) -> Receipt:
        """The receiver has never seen this key."""
        return cls("absent")

    @classmethod
    def unknown(cls, reason: str) -> Receipt:
        """The receiver could not say."""
        return cls("unknown", reason=reason)


@dataclass(frozen=True, slots=True)
class Approval:
    """That somebody approved what a run asked approval for: who, why, when (Unix seconds), and the arguments that he saw."""

    by: str
    reason: str
    at: float
    arguments: object = None


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What a run waits for somebody to approve. ``digest`` is SHA-256 over ``arguments_json``, in hex. Times are Unix seconds."""

    run_id: str
    name: str
    position: str
    arguments_json: str | None
    digest: str
    asked_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """What the next start of a run would do about one of its steps, and why. Nothing is done yet.

    ``action`` is ``dispatch``, ``dispatch_undeclared``, ``ask`` (for its receipt), ``wait``, ``park`` or ``dead_letter``.
    """

    step_number: int
    tool_name: str
    position: str
    action: str
    reason: str
    not_before: float | None = None


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One thing that happened to a run. ``at`` is Unix seconds, ``event`` a word or two, ``text`` what is to be said about it."""

    seq: int
    at: float
    event: str
    step_number: int | None
    tool_name: str | None
    attempt: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a program, or its model, should know. ``text`` is for a model to read, beside the answer of step ``step_number``.

    ``rule`` is the loop rule that saw it, or ``"budget"``; ``evidence`` are the numbers of the steps that it is about.
    """

    step_number: int
    position: str
    rule: str
    reason: str
    evidence: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class BlockedCall:
    """A call that the breaker refused in a run that went on. Its arguments are not recorded, only their digest is."""

    position: str
    tool_name: str
    rule: str
    reason: str
    evidence: tuple[int, ...]
    """Numbers of the steps that it would have gone on with."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What calls have used, as far as it is known, and what was charged for them.

    ``tokens`` and ``usd`` are what they were charged: what was told, else what had been reserved for them. The buckets are those of
    `Usage`, and hold what was told.
    """

    calls: int
    tokens: int
    usd: Decimal
    input_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    long_cache_write_tokens: int
    """Of the cache writes."""
    reasoning_tokens: int
    """Of the output."""
    unmetered: int
    """Calls of which nobody told how many tokens they used; those whose process died are among them."""
    unpriced: int
    """Calls of which nobody told what their tokens cost."""
    overran: int
    """Calls that used more than was reserved for them."""

    @property
    def told_tokens(self) -> int:
        """The sum of the four buckets; what is missing to ``tokens`` nobody told."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run has cost, or all runs together. The parts of ``models``, and those of ``tools``, add up to what is charged in ``spent``."""

    run_id: str | None
    """None: of all runs."""
    status: str | None
    spent: Spending
    """What this run's own calls have used: those that cost anything, or may have."""
    reserved_tokens: int
    reserved_usd: Decimal
    """What calls have reserved that were dispatched and have no outcome: they are in flight, or in doubt."""
    saved_tokens: int
    saved_usd: Decimal
    """What was not paid again: the sum of what was spent each time another owner went on with the run and made a new call."""
    carried_tokens: int
    carried_usd: Decimal
    """What the run has taken over from the one that it was made from. That has paid for it; it counts for this run's limits all the same."""
    models: dict[str, Spending]
    """By the name of the model; under ``""`` what no model is known of."""
    tools: dict[str, Spending]
    """By the name of the tool: those of which anything was told or charged, or should have been."""
    limits: Budget | None
    """As far as the log knows them: from where the run was made from another one, and from where its budget ended it."""
    runs: tuple[Cost, ...] = ()
    """Of all runs: each of them, oldest first."""
    trouble: str | None = None
    """Why the run cannot be read. Then what it has cost is not known, and is in no sum."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One of the steps that a halt rests on. Texts are shortened to 1,000 characters; None where there is none or it was erased."""

    step_number: int
    tool_name: str
    arguments: str | None
    outcome: str | None
    """Its output, or its error as ``Type: message``."""
    state: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run was halted, or why it stands."""

    run_id: str
    status: str
    rule: str | None
    """The rule that halted it: one of the breaker's, or ``"budget"``; None where it was something else."""
    reason: str | None
    tool_name: str | None
    """The tool whose call was refused."""
    evidence: tuple[Evidence, ...]
    notices: tuple[Notice, ...]
    blocked: tuple[BlockedCall, ...]
    steps: int
    """How many steps it has."""
    refused: int
    """How many calls were refused; they count against the limit of steps."""
    spent_tokens: int
    spent_usd: Decimal
    reserved_tokens: int
    reserved_usd: Decimal
    limits: Budget | None
    """As for `Cost`."""


@dataclass(slots=True)
class StepRecord:
    """One step of a run as a reader sees it. Times are Unix seconds, digests and keys lower-case hex."""

    step_id: str
    run_id: str
    step_number: int
    tool_name: str
    arguments_json: str | None
    state: str
    output_json: str | None = None
    error_message: str | None = None
    fingerprint: str = ""
    created_at: float = 0.0
    completed_at: float | None = None
    state_version: int = 0
    idempotency_key: str = ""
    input_digest: str = ""
    output_digest: str | None = None
    retry_budget_remaining: int = 0
    fencing_token: int = 0
    position: str = ""
    attempts: int = 0
    effect: str | None = None
    replayed: bool = False


@dataclass(slots=True)
class RunRecord:
    """One run as a reader sees it. Times are Unix seconds; ``result`` is the finished run's value, ``cause`` why it stands."""

    run_id: str
    goal: str | None
    status: str
    total_steps: int
    created_at: float
    updated_at: float
    owner: str | None = None
    fencing_token: int = 0
    spent_tokens: int = 0
    spent_usd: Decimal = field(default_factory=Decimal)
    result: object = None
    cause: str | None = None
    parent_run_id: str | None = None
    queue: str | None = None
    """The queue whose workers go on with it; None where its program is started by hand."""
    due_in_seconds: float | None = None
    """When this was read: seconds until a worker may take it, 0 or less where one may; None where none looks before it is asked to."""
    moved_to: str | None = None
    """The ledger in which it goes on; None where that is this one."""

    is_damaged: ClassVar[bool] = False
    """Whether entries that this record needs cannot be read. Then `cause` says why and `status` is what the last readable entry says."""


@dataclass(slots=True)
class DamagedRunRecord(RunRecord):
    """A run that `runs` lists and cannot read: it is in no state that anybody may act upon."""

    is_damaged: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What one worker said last. Times are seconds; what an unreadable word of it would have said is empty."""

    name: str
    """The owner of the runs that it works on."""
    host: str
    pid: int
    started_at: float
    """Unix seconds, by the worker's clock."""
    state: str
    """``running``, ``draining`` (it takes nothing new), or ``unreadable``."""
    queues: tuple[str, ...]
    agents: tuple[str, ...]
    """The agents that it knows."""
    concurrency: int
    """How many runs it works on at once, at the most."""
    running: tuple[str, ...]
    """The ids of up to 100 of them."""
    running_count: int
    limits: dict[str, tuple[int | None, int | None]]
    """What it was told of its queues: how many runs of one may be worked on at once, and how many with one key."""
    version: str
    idle_seconds: float
    """Since it said so, by the store's clock."""
    is_alive: bool
    """Whether that is less than its lease ago."""


@dataclass(frozen=True, slots=True)
class StuckRun:
    """A run that has not got on for ``seconds``, and why, in a sentence. ``kind`` names the reason for programs."""

    run_id: str
    status: str
    kind: Literal["owner_silent", "step_in_flight", "program_busy", "no_worker", "no_agent", "no_room"]
    reason: str
    seconds: float
    owner: str | None
    queue: str | None


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A run that stands in another ledger now, entry for entry."""

    run_id: str
    place: str
    """The other ledger, without secrets."""
    entries: int
    is_moved: bool
    """Whether it goes on there, and no more here; a run that has ended stays here, too."""
    was_there: bool
    """Whether it stood there already, and nothing was written there."""


@dataclass(frozen=True, slots=True)
class RestoredLedger:
    """A backup that stands in the place of a ledger now."""

    path: str
    runs: int
    entries: int
    epoch: int
    """The epoch that began with it: fencing tokens are above ``epoch * 2**20`` from now on."""
    replaced: str | None
    """Where what stood there before is kept; None where nothing did."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was erased of one run, or that it was deleted."""

    run_id: str
    status: str
    ended_at: float
    """Unix seconds."""
    payloads: int
    """How many entries have lost their payload: arguments, outputs, errors, the goal, signals, reasons."""
    is_everything: bool
    """Whether the run's secret went, too, so that nobody can find out any more whether a payload was what he thinks."""
    is_deleted: bool
    """Whether nothing is left of the run but a tombstone."""
    pending: tuple[str, ...] = ()
    """What may still hold the bytes, one sentence each, and what takes them out."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What `gc` did; with ``is_tried`` what it would do."""

    runs: tuple[Forgotten, ...]
    left: tuple[tuple[str, str], ...]
    """Runs that are old enough and were left as they are, each with the reason."""
    pending: tuple[str, ...]
    """As for `Forgotten`."""
    is_tried: bool


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """What ``rewrap`` did to the keys of runs; what these have encrypted stays as it is."""

    runs: tuple[str, ...]
    """Those whose key was under another key before."""
    left: tuple[tuple[str, str], ...]
    """Those whose key could not be had, each with the reason."""
    pending: tuple[str, ...]
    """What may still hold a key as it was sealed before, as for `Forgotten`."""


@dataclass(slots=True)
class Inspection:
    """One run as closely as it can be looked at, also where entries of it are damaged."""

    run: RunRecord
    steps: list[StepRecord]
    """Every step that can be read."""
    environments: list[str]
    """Of each of these steps, what its last attempt ran in: version or code digest, this library, Python."""
    in_doubt: list[int]
    """Numbers of steps that were dispatched and have no outcome; they are in flight while the run's owner lives."""
    redispatched: list[int]
    """Numbers of steps that were dispatched again although their tool does not declare what that does."""
    is_owner_seen: bool
    """Whether a process that can be seen from here owns the run."""
    is_waiting: bool
    """Whether the run goes on as soon as its program runs again."""
    trouble: str | None
    """The first thing that could not be read."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What stands around a ledger's file: the SQLite that reads it, the disk, sizes in bytes, and its version."""

    path: str
    sqlite_version: str
    has_wal_reset_bug: bool
    """Whether this SQLite has the bug that the lock beside the file keeps ledgers safe from."""
    file_system: str
    is_local: bool
    """Whether the disk is known to be this machine's, so that the lock of a dead owner proves its death."""
    free_bytes: int
    size_bytes: int
    log_bytes: int
    schema_version: int | None
    newest_schema_version: int
    """What an agent of this version brings the file to."""
    journal_mode: str | None
    trouble: str | None
    """Why the file cannot be read as a ledger; the schema and the journal mode are not known then."""


@dataclass(frozen=True, slots=True)
class ServerDiagnosis:
    """What stands around a ledger on PostgreSQL: the server that answers, the way to it, and what the role may do there."""

    place: str
    """Its address, without the password."""
    host: str
    """Which of its hosts answered: a name, an address, or the folder of a socket."""
    server_version: str
    is_behind_pooler: bool
    """Whether a pooler stands between that gives each transaction a session of its own."""
    is_standby: bool
    role: str
    is_superuser: bool
    schema_version: int | None
    newest_schema_version: int
    """What `migrate` of this version brings it to."""
    has_triggers: bool
    """Whether the log is kept append-only by triggers."""
    may_rewrite: tuple[str, ...]
    """What this role may do to entries that stands: ``UPDATE``, ``DELETE``, ``TRUNCATE``."""
    synchronous_commit: str
    """What the server would do if a ledger did not say in each transaction what it wants."""
    synchronous_standby_names: str
    syncs: bool
    """Whether the server brings to its disk what it says to have committed."""
    writes_whole_pages: bool
    """Whether a page that was half written when the machine stopped can be restored."""
    most_connections: int
    clock_ahead_seconds: float
    """How far its clock is ahead of this machine's."""
    round_trip_seconds: float
    size_bytes: int
    """Of the ledger's tables and indexes."""
    trouble: str | None
    """Why it cannot be used as a ledger; of the ledger nothing is known then."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that ``verify`` found wrong. ``seq`` is None where it concerns the run and not one entry.

    Where two things should agree, ``expected`` is what the rest of the ledger says and ``found`` what stands there, as text, hashes in hex.
    """

    run_id: str
    seq: int | None
    code: str
    message: str
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What ``verify`` saw: ``ok`` says that there is no finding among ``entries`` entries of ``runs`` runs."""

    ok: bool
    findings: list[Finding]
    entries: int
    runs: int
    heads: int = 0
    """How many heads that were kept elsewhere it was held to."""
    covered: int = 0
    """How many entries those of them cover that agree."""
    unheld: int = 0
    """How many more heads are of runs that were deleted since: their tombstones say who and why, and prove nothing."""
    unchecked: int = 0
    """How many payloads could not be held to the log: they are encrypted under a key that is not here, or they or the run's secret are
    withheld from a bundle."""
