"""Face B, and what all faces share: opening a ledger, looking at runs, and driving one step by step."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from agent_run_ledger.contract import Clock, Row, Store, Summary
from agent_run_ledger.drivers import reading
from agent_run_ledger.drivers.leases import POLL_SECONDS, HeldRun, Leases
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine import requests, runs
from agent_run_ledger.engine.call import StepOptions, declared
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import (
    InvalidArguments,
    InvalidName,
    KeyUnavailable,
    LeaseLost,
    NotDurableWarning,
    RunClosed,
    RunInputMismatch,
    RunOwned,
    StepInDoubt,
    StoreCorrupt,
    UnorderedStep,
    UnserialisableArguments,
)
from agent_run_ledger.fleet.face import Fleet
from agent_run_ledger.late import Late
from agent_run_ledger.operator import Operator
from agent_run_ledger.rules import canonical, digests, loops
from agent_run_ledger.rules.budget import Limits, shared, shared_budget
from agent_run_ledger.rules.names import check_name, check_run_id, is_account
from agent_run_ledger.run import OpenRun, branch_of, finish, function_call, perform
from agent_run_ledger.stores import lifetime, open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.stores.room import Room
from agent_run_ledger.words import MIN_FREE, RunState

if TYPE_CHECKING:
    from decimal import Decimal

    from agent_run_ledger.agents import Agent, Registered, Start, Tool
    from agent_run_ledger.checkpoints import ConsistencyProof, InclusionProof, TreeHead
    from agent_run_ledger.drivers.asynchronous import AsyncDriver
    from agent_run_ledger.engine import damage
    from agent_run_ledger.heads import Against, Emitting, HeadLog
    from agent_run_ledger.model import (
        Budget,
        CopiedRun,
        Diagnosis,
        Finding,
        Inspection,
        RestoredLedger,
        RetryPolicy,
        RunRecord,
        ServerDiagnosis,
        SharedBudget,
        StepRecord,
        VerificationReport,
    )
    from agent_run_ledger.prices import Prices
    from agent_run_ledger.rules.loops.policy import LoopDetectorPolicy
    from agent_run_ledger.signing import Signer
    from agent_run_ledger.stores.encryption import Encryption

Durability = Literal["full", "process"]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="Registered")


_LONGEST_LEASE = 10 * 366 * 86_400


class _Unsaid(int):
    """A default that can be told apart from the same number given by the caller."""


_LOOP_THRESHOLD = _Unsaid(loops.MAX_REPETITIONS)

PAYLOAD_LIMIT = 16 * 1024 * 1024

OUTAGE_SECONDS = 60.0
"""How long a store that cannot be reached is waited for, where nobody says."""

_open: weakref.WeakSet[Ledger] = weakref.WeakSet()


def compute_fingerprint(tool_name: str, arguments: Any) -> str:
    """What the loop rules call the same call, in hex: SHA-256 over the tool's name and the digest of its canonical arguments.

    >>> compute_fingerprint("fetch", {"id": 1, "page": 2}) == compute_fingerprint("fetch", {"page": 2, "id": 1})
    True
    """
    try:
        stored = canonical.encode(arguments)
    except canonical.Unstorable as error:
        raise UnserialisableArguments(f"these arguments have no fingerprint: {error}", error.path) from None
    return digests.fingerprint(check_name("tool_name", tool_name), digests.plain(stored)).hex()


def as_stored(value: Any) -> str:
    """A value as ledgers keep it: canonical JSON, with a tag where a type is none of JSON's.

    >>> as_stored({"b": 1, "a": (2, 3)})
    '{"a":{"$tuple":[2,3]},"b":1}'
    """
    return canonical.encode(value).decode()


def ledgers_in(folder: str) -> list[str]:
    """The names of the files in a folder that are ledgers."""
    from agent_run_ledger.stores import diagnosis  # only who looks needs it

    return diagnosis.ledgers_in(folder)


class Ledger(Operator):
    """A ledger that is open: a context manager, thread-safe, closed at the latest when the interpreter exits."""

    def __init__(
        self,
        db_path: str | os.PathLike[str] | Store,
        *,
        limits: Limits,
        shared_limits: dict[str, Limits],
        prices: Prices | None,
        unknown_price: str,
        policy: LoopDetectorPolicy | None,
        durability: Durability,
        lease_seconds: float,
        heartbeat_seconds: float,
        undeclared: str,
        owner: str | None,
        payload_limit: int,
        min_free_bytes: int | None,
        outage_seconds: float,
        heads: HeadLog | None,
        encryption: Encryption | None,
        clock: Clock | None,
    ) -> None:
        if durability not in ("full", "process"):
            raise ValueError(f"durability is 'full' or 'process', not {durability!r}")
        if unknown_price not in ("charge_reservation", "refuse"):
            raise ValueError(f"unknown_price is 'charge_reservation' or 'refuse', not {unknown_price!r}")
        if undeclared not in ("dispatch", "block"):
            raise ValueError(f"undeclared is 'dispatch' or 'block', not {undeclared!r}")
        for name, seconds in (("heartbeat_seconds", heartbeat_seconds), ("lease_seconds", lease_seconds)):
            if type(seconds) not in (int, float) or not 0 < seconds <= _LONGEST_LEASE:
                raise ValueError(
                    f"{name} is a number of seconds, more than 0 and at most {_LONGEST_LEASE}, not {seconds!r}"
                )
        if type(outage_seconds) not in (int, float) or not 0 <= outage_seconds <= _LONGEST_LEASE:
            raise ValueError(f"outage_seconds is a number of seconds, at least 0, not {outage_seconds!r}")
        if heartbeat_seconds >= lease_seconds:
            raise ValueError("heartbeat_seconds must be less than lease_seconds")
        if type(payload_limit) is not int or payload_limit < 1:
            raise ValueError(f"payload_limit is a whole number of bytes, at least 1, not {payload_limit!r}")
        if prices is not None and not callable(getattr(prices, "cost", None)):
            raise TypeError(f"prices is a PriceBook, or has a cost(usage, model), not {prices!r}")
        if policy is not None:
            from agent_run_ledger.rules.loops.policy import LoopDetectorPolicy

            if not isinstance(policy, LoopDetectorPolicy):
                raise TypeError(f"policy is a LoopDetectorPolicy, not {policy!r}")
        if not isinstance(db_path, str | os.PathLike) and not hasattr(db_path, "append"):
            raise TypeError(f"db_path is a path, ':memory:' or a store, not {db_path!r}")
        if heads is not None and not hasattr(heads, "add"):
            raise TypeError(f"heads is a HeadLog, not {heads!r}")
        if isinstance(db_path, str) and "\0" in db_path:
            raise ValueError(f"db_path {db_path!r} holds a NUL character, which no file name has")
        label = check_name("owner", owner) if owner is not None else f"{_host_name()}-{os.getpid()}"
        self._clock: Clock = clock or SystemClock()
        self._payload_limit = payload_limit
        if isinstance(db_path, str | os.PathLike):
            if os.fspath(db_path) == ":memory:":
                import warnings

                text = "this ledger is in memory: its runs are gone with the process. Give a path to keep them."
                warnings.warn(text, NotDurableWarning, stacklevel=3)
            self._store = open_store(db_path, durability=durability, clock=self._clock, outage_seconds=outage_seconds)
        else:
            self._store = db_path
        if clock is None and self._store.is_remote:
            # Timers, and what is written down, are by one clock for all who share the store, whatever their machines say.
            self._clock = getattr(self._store, "clock", self._clock)
        self._encryption = encryption
        if encryption is not None:
            self._store = _encrypted(self._store, encryption)
        self._outage_seconds = outage_seconds
        self._durability = durability
        self._min_free = _min_free(min_free_bytes)
        self._limits = limits
        self._shared = shared_limits
        """What is declared about budgets that runs share, by their accounts."""
        self._terms = (
            label,
            lease_seconds,
            heartbeat_seconds,
            limits,
            prices,
            unknown_price,
            undeclared,
            policy.rule if policy is not None else loops.breaker,
            policy.reactions if policy is not None else loops.HALTS,
            self._shared,
        )
        self._tools: dict[str, Tool] = {}
        self._head_log = heads
        self._stand_on(self._store, self._clock)

    def _stand_on(self, store: Store, clock: Clock) -> None:
        """Be a new owner of nothing in this store."""
        store = packed(store)
        self._store, self._clock = store, clock
        self._leases = Leases(store, clock, *self._terms)
        self._driver = SyncDriver(store, clock, self._leases, self._durability)
        if self._min_free and (path := getattr(store, "path", None)) is not None:
            self._leases.room = Room(os.path.dirname(os.path.abspath(path)), self._min_free)
        self._emitting: Emitting | None = None
        if self._head_log is not None:
            from agent_run_ledger.heads import Emitting

            self._emitting = Emitting(self, self._head_log)
            self._leases.saw = self._emitting.saw
        self._is_beside = False
        """Whether the store is another ledger's to close."""
        self._async_driver: AsyncDriver | None = None
        self._starting = threading.RLock()
        _open.add(self)

    def _elsewhere(self, store: Store, clock: Clock, durability: Durability = "process") -> Self:
        """This ledger as a process of its own would open it on another store: it shares what is registered and declared, and no run."""
        from copy import copy

        other = copy(self)
        other._durability = durability
        other._head_log = None
        other._stand_on(store, clock)
        return other

    def _beside(self, label: str | None) -> Self:
        """This ledger as another owner of the same store: it shares what is registered and declared, and no run. Closing it keeps the store."""
        from copy import copy

        other = copy(self)
        if label is not None:
            other._terms = (label, *self._terms[1:])
        other._stand_on(self._store, self._clock)
        other._is_beside = True
        _open.discard(other)
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give every lease back and let go of the storage. Calling it again does nothing."""
        _open.discard(self)
        if self._async_driver is not None:
            self._async_driver.close()
        if self._emitting is not None:
            self._emitting.close()
        self._driver.close(keeps_store=self._is_beside)

    @property
    def _asynchronous(self) -> AsyncDriver:
        """The driver for event loops, made when somebody uses one: `asyncio` is not free to import."""
        if self._async_driver is None:
            from agent_run_ledger.drivers.asynchronous import AsyncDriver

            with self._starting:
                if self._async_driver is None:
                    arguments = (self._driver, self._store, self._clock, self._leases, self._durability)
                    self._async_driver = AsyncDriver(*arguments)
        return self._async_driver

    # --- looking ------------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> RunRecord:
        """The run as it stands. Raises `RunNotFound`, and `KeyUnavailable` where it is encrypted and its key is not here."""
        summary = self._summary(run_id)
        if summary.first.encoding is not None or summary.last.encoding is not None:
            reading.opened(self._store, run_id)
            self._store.read(run_id)  # which is damaged, then
        return self._record(summary)

    def runs(self, status: str | None = None) -> list[RunRecord]:
        """All runs, oldest first; those in one state where `status` names it. Nobody may act upon a damaged run: it is in none."""
        if status is not None and status not in RunState.__members__:
            raise ValueError(f"there is no run state {status!r}; the states are {', '.join(RunState)}")
        found = map(self._record, (each for each in self._store.summaries() if not is_account(each.head.run_id)))
        return [run for run in found if status is None or (run.status == status and not run.is_damaged)]

    def steps(self, run_id: str) -> list[StepRecord]:
        """The steps of a run that can be read, in the order of their first intents. Raises `RunNotFound`."""
        return self._readable(run_id).steps

    def inspect(self, run_id: str) -> Inspection:
        """The run and its steps as closely as they can be looked at; where they are damaged, too. Raises `RunNotFound`."""
        from agent_run_ledger.model import Inspection

        run, seen = self.get_run(run_id), self._readable(run_id)
        is_seen = self._is_seen(run)
        return Inspection(
            run=run,
            steps=seen.steps,
            environments=seen.environments,
            in_doubt=seen.in_doubt,
            redispatched=seen.redispatched,
            is_owner_seen=is_seen,
            is_waiting=self._waits(run, is_seen),
            trouble=seen.trouble,
        )

    def is_waiting(self, run: RunRecord) -> bool:
        """Whether the run goes on as soon as its program runs again: it has not ended, and nobody is seen to work on it."""
        return self._waits(run, self._is_seen(run))

    def _is_seen(self, run: RunRecord) -> bool:
        from agent_run_ledger.stores import diagnosis

        return diagnosis.is_seen(self._store, run.run_id, run.owner)

    @staticmethod
    def _waits(run: RunRecord, is_owner_seen: bool) -> bool:
        state = RunState(run.status)
        is_elsewhere = is_owner_seen or run.moved_to is not None
        return not (is_elsewhere or run.is_damaged or state.is_terminal or state is RunState.QUARANTINE)

    def verify(
        self,
        run_id: str | None = None,
        against: Against | None = None,
        *,
        key: str | None = None,
        told: Callable[[int], None] | None = None,
        found: Callable[[Finding], None] | None = None,
    ) -> VerificationReport:
        """Recompute every entry, of one run or of all, and report each disagreement. `told` hears how many entries are done, and `found`
        each finding as soon as it is made.

        A database without a tree head kept elsewhere proves only that it agrees with itself: who can write the file can rebuild it.
        `against` is such heads, `TreeHead`s or the texts of notes: entries that were cut off or put back to an older state since are
        found as `rollback`, entries that were written anew as `fork`. `key` is the public key by which each text has to be signed.

        Raises `RunNotFound`, and `BadNote` where what is held against it is no head, or not signed so.
        """
        from agent_run_ledger import verifying  # only who verifies needs it

        return verifying.verify(self._store, run_id, against, key=key, told=told, found=found)

    def tree_head(self, run_id: str, size: int | None = None) -> TreeHead:
        """The size and root of the run's tree as it is now, or as it was when it had `size` entries. They are on stable storage by then.

        It is put together from what is stored with a few entries; `verify` holds that to all of them. Raises `RunNotFound`, `ValueError`
        where the run has not so many entries, and `StoreCorrupt` where what is stored gives no root.
        """
        from agent_run_ledger import proving

        return proving.tree_head(self._store, check_name("run_id", run_id), size)

    def prove(self, run_id: str, seq: int, size: int | None = None) -> InclusionProof:
        """What proves that an entry is in the run's tree as it is now, or as it was when it had `size` entries.

        `merkle.verify_inclusion` holds it to the root of a head of that size. Raises as `tree_head` does.
        """
        from agent_run_ledger import proving

        return proving.inclusion(self._store, check_name("run_id", run_id), seq, size)

    def prove_consistency(self, run_id: str, size1: int, size2: int | None = None) -> ConsistencyProof:
        """What proves that the run's tree, as it is now or of `size2` entries, has only added entries to that of `size1`.

        `merkle.verify_consistency` holds it to the roots of two heads. Raises as `tree_head` does.
        """
        from agent_run_ledger import proving

        return proving.consistency(self._store, check_name("run_id", run_id), size1, size2)

    def _record(self, summary: Summary) -> RunRecord:
        from agent_run_ledger.engine import damage, records

        record = records.run_record(summary, self._end(summary))
        if record.is_damaged:
            rows = [row for page in reading.pages(self._store, record.run_id) for row in page]
            record.status = str(damage.last_state(rows))
        elif (
            record.cause is None and record.status == RunState.BLOCKED and summary.last.kind not in ("waiting", "asked")
        ):
            # something came in since it was parked: a signal, or the outcome of a step beside the one in doubt
            with suppress(StoreCorrupt, KeyUnavailable):
                record.cause = reading.read(self._store, record.run_id).cause_text
        return record

    def _summary(self, run_id: str) -> Summary:
        summary = next(iter(self._store.summaries(check_name("run_id", run_id))), None)
        if summary is None:
            raise reading.absent(self._store, run_id)
        return summary

    def _end(self, summary: Summary) -> Row:
        """The entry with which the run ended or stands: the last one, but for those that say what was erased since."""
        from agent_run_ledger.engine import damage, erasing

        with suppress(*damage.DAMAGE):
            seq = erasing.ended_at(summary.last)
            found = self._store.read(summary.head.run_id, seq - 1, limit=1) if seq is not None else ()
            return found[0] if found else summary.last
        return summary.last

    def _readable(self, run_id: str) -> damage.Readable:
        from agent_run_ledger.engine import damage

        store = self._store
        if not store.read(check_name("run_id", run_id), limit=1, payloads_up_to=0):
            raise reading.absent(store, run_id)
        read, fetch = partial(reading.pages, store, run_id), partial(store.payload, run_id)
        return damage.readable(run_id, reading.opened(store, run_id), read, fetch)

    # --- budgets that runs share --------------------------------------------------------------------------------------

    def budget(
        self,
        name: str,
        *,
        tokens: int | None = None,
        usd: Decimal | int | str | float | None = None,
        tokens_per_day: int | None = None,
        usd_per_day: Decimal | int | str | float | None = None,
    ) -> Budget:
        """`shared_budget`, which is known to this ledger from now on: also to runs that have it by their own log alone, as children do."""
        pool = shared_budget(name, tokens=tokens, usd=usd, tokens_per_day=tokens_per_day, usd_per_day=usd_per_day)
        self._shared.update(shared(pool))
        return pool

    def budgets(self) -> list[SharedBudget]:
        """The budgets that runs share, oldest first, and how much of each is used by now: also those of runs that have begun others.

        One that cannot be read, or one of whose runs cannot be, has its `trouble`.
        """
        from agent_run_ledger.engine import sharing

        found = []
        for summary in self._store.summaries():
            if is_account(account := summary.head.run_id):
                try:
                    found.append(self._leases.accounts.look(account))
                except StoreCorrupt as error:
                    found.append(sharing.unread(account, str(error)))
        return found

    # --- acting -------------------------------------------------------------------------------------------------------

    def detach(self, run_id: str) -> None:
        """Give the run back, so that another process may go on with it at once.

        Raises `UnorderedStep` while a step is in flight: its outcome could not be written any more.
        """
        run = self._run(run_id)
        with run.lock:
            if run.is_busy:
                raise UnorderedStep(run_id, "detach", run.busy_with)
            if not run.is_held and self._store.head(run_id) is None:
                raise reading.absent(self._store, run_id)
            self._driver.give_back(run)

    def copy(
        self,
        run_id: str,
        to: str | os.PathLike[str] | Ledger,
        *,
        children: bool = False,
        told: Callable[[str], None] | None = None,
    ) -> list[CopiedRun]:
        """Copy a run to another ledger, entry for entry, with its secret, what was asked of it, and its place in its queue.

        One that has ended stands in both then. One that has not is moved: it goes on there under the same id, and whoever claims it here
        gets `RunMoved`. With `children` the runs that its program has begun go with it; without, a run that waits for one is refused.
        The same call again finishes what was interrupted, and writes nothing where all is done. `told` hears how far it is.

        Raises `RunNotFound`, `RunOwned` while somebody works on it, and `CopyRefused`: another run of this id stands there, it is
        damaged, or it belongs to a run that stays.

        >>> with AgentRunLedger("agent.db") as ledger:
        ...     [copied.is_moved for copied in ledger.copy("october", "other.db")]
        [True]
        """
        from agent_run_ledger.copying import Copying

        if self._store.head(check_run_id(run_id)) is None:
            raise reading.absent(self._store, run_id)
        if isinstance(to, Ledger):
            return Copying(self, to._store, told).run(run_id, children=children)
        if os.fspath(to) == ":memory:":
            raise ValueError(
                "a ledger in memory that nobody else has would be gone at once: give a path, or an open ledger"
            )
        store = open_store(to, durability="full", clock=self._clock, outage_seconds=self._outage_seconds)
        if self._encryption is not None:
            store = _encrypted(store, self._encryption)
        try:
            return Copying(self, packed(store), told).run(run_id, children=children)
        finally:
            store.close()

    def export(
        self,
        run_id: str,
        path: str | os.PathLike[str],
        *,
        payloads: bool = True,
        secret: bool = False,
        heads: str | Iterable[str] | None = None,
        signer: Signer | None = None,
        overwrite: bool = False,
        told: Callable[[int], None] | None = None,
    ) -> TreeHead:
        """Write one run into one file, a *bundle*, that can be verified without this ledger, and return the head that it ends with.

        With the run's `secret` its payloads can be held to the log, it can be brought into another ledger, and whoever has it can tell
        whether an erased payload was what he thinks. Without `payloads` there are no arguments, outputs, errors, goals or reasons in
        it, and the log can be verified all the same. `heads` are texts with heads that were kept elsewhere, as of `HeadLog`: those of
        this run go into the file, each with its proof; `signer` signs the one that it ends with. It stands there when it is whole, or not
        at all, and takes the place of a file only if it is to `overwrite` it. `told` hears how many entries are done.

        Raises `RunNotFound`, `BadNote`, and `CopyRefused` where there is a file, the run is damaged, or is not what one of the heads says.

        >>> with AgentRunLedger("agent.db") as ledger:
        ...     head = ledger.export("october", "october.arl", secret=True)
        >>> verify_bundle("october.arl", against=head).ok
        True
        """
        from agent_run_ledger import exporting

        return exporting.export(
            self._store,
            check_name("run_id", run_id),
            path,
            has_payloads=payloads,
            has_secret=secret,
            heads=heads,
            signer=signer,
            overwrite=overwrite,
            told=told,
        )

    def import_run(self, path: str | os.PathLike[str], *, told: Callable[[int], None] | None = None) -> CopiedRun:
        """Bring the run of a bundle into this ledger, entry for entry and under its id; where it stands already, nothing is written.

        The run has ended, for one that has not may go on only where it is (`copy` moves it), and its secret and its payloads are in the
        bundle. `told` hears how many entries are done. Raises `BadBundle`, and `CopyRefused` where `verify_bundle` finds something,
        where it cannot be brought here, or where another run of this id stands here.

        >>> with AgentRunLedger("other.db") as ledger:
        ...     ledger.import_run("october.arl").entries
        4
        """
        from agent_run_ledger import exporting

        return exporting.take_in(self._store, path, told)

    def _run(self, run_id: str) -> HeldRun:
        return self._leases.known(run_id) or self._leases.run(check_run_id(run_id))

    def _start(
        self, run_id: str | None, draft: Draft, wait: float | None, *, waits_for_itself: bool = False
    ) -> HeldRun:
        """Create a run, or attach to the one that has this id; its program begins at its first line. The run is pinned.

        Where this very ledger drives it already: waits until it does not, for ever if `waits_for_itself`.
        """
        name = f"run_{os.urandom(10).hex()}" if run_id is None else check_run_id(run_id)
        if run_id is None or self._store.head(name) is None:
            with self._starting:
                run = self._leases.create(name, [draft])
                if run is not None:
                    run.__enter__()
                    return run
        run = self._leases.run(name)
        self._attach(run, wait, draft, waits_for_itself=waits_for_itself)
        return run

    def _attach(
        self, run: HeldRun, wait: float | None, draft: Draft | None = None, *, waits_for_itself: bool = False
    ) -> None:
        """Take and pin a run that exists, if it was created as `draft` says; its program begins at its first line."""
        deadline = self._clock.elapsed() + (wait or 0.0)
        while True:
            with self._starting, run.lock:
                if not run.is_busy and not run.pins:
                    was_held = run.is_held
                    run.is_settled = False
                    run.__enter__()
                    break
            if not waits_for_itself and self._clock.elapsed() >= deadline:
                raise RunOwned(run.run_id, self._leases.owner, 0.0)  # another thread of this ledger drives it
            self._clock.sleep(POLL_SECONDS)
        try:
            self._leases.await_claim(run, deadline - self._clock.elapsed())
            if draft is not None:
                try:
                    runs.check_same(run.history, draft)
                except RunInputMismatch:
                    if not was_held:
                        self._leases.give_back(run)
                    raise
            with run.lock:
                if run.is_held:
                    self._driver.pay(run)
                    if run.history.is_in_doubt or run.history.trailing:
                        self._leases.fetch_requests(run)
            if run.requests:  # before its program decides anything: it may be what it waits for
                with suppress(LeaseLost):  # then whoever has it answers, or its program when it claims it again
                    self._driver.obey(requests.answer(run, keeps=True))
            with run.lock:
                run.restart()
        except BaseException:
            run.__exit__(None, None, None)
            raise


class AgentRunLedger(Fleet, Ledger):
    """The agent's loop, step by step, over many runs.

    `db_path` is a file, `":memory:"`, or a store. `max_steps` limits each run, `loop_threshold` equal calls with an equal outcome
    trip the breaker. `durability="full"` survives a power cut, `"process"` any death of the process. `owner` is a label for people.
    A PostgreSQL server that cannot be reached is waited for, for `outage_seconds`. To `heads` a signed head is added of each run that ends.
    With an `encryption` new runs are encrypted.

    >>> ledger = AgentRunLedger("agent.db")
    >>> run_id = ledger.create_run(goal="Reconcile October invoices")
    >>> ledger.execute_step(run_id, "fetch_invoice", {"invoice_id": "INV-109"}, lambda: {"total": 120})
    {'total': 120}
    >>> ledger.finish_run(run_id)
    >>> ledger.close()
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] | Store = ":memory:",
        max_steps: int = 50,
        loop_threshold: int = _LOOP_THRESHOLD,
        *,
        durability: Durability = "full",
        lease_seconds: float = 30.0,
        heartbeat_seconds: float = 3.0,
        budget: Budget | None = None,
        prices: Prices | None = None,
        unknown_price: str = "charge_reservation",
        policy: LoopDetectorPolicy | None = None,
        undeclared: str = "dispatch",
        owner: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        min_free_bytes: int | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
        heads: HeadLog | None = None,
        encryption: Encryption | None = None,
        clock: Clock | None = None,
    ) -> None:
        if loop_threshold is not _LOOP_THRESHOLD:
            from agent_run_ledger.rules.loops.policy import LoopDetectorPolicy

            if policy is not None:
                raise ValueError(
                    "loop_threshold=N is short for policy=LoopDetectorPolicy(max_repetitions=N): give one of them"
                )
            policy = LoopDetectorPolicy(max_repetitions=loop_threshold)
        if type(max_steps) is not int or max_steps < 1:
            raise ValueError(f"max_steps must be a whole number of at least 1, not {max_steps!r}")
        if budget is not None:
            from agent_run_ledger.model import Budget

            if not isinstance(budget, Budget):
                raise TypeError(f"budget is a Budget, not {budget!r}")
        super().__init__(
            db_path,
            limits=Limits.of(budget).over(Limits(steps=max_steps)),
            shared_limits=shared(budget),
            prices=prices,
            unknown_price=unknown_price,
            policy=policy,
            durability=durability,
            lease_seconds=lease_seconds,
            heartbeat_seconds=heartbeat_seconds,
            undeclared=undeclared,
            owner=owner,
            payload_limit=payload_limit,
            min_free_bytes=min_free_bytes,
            outage_seconds=outage_seconds,
            heads=heads,
            encryption=encryption,
            clock=clock,
        )
        self._agents = {}
        self._queues = {}
        self._workers = set()

    def _beside(self, label: str | None) -> Self:
        other = super()._beside(label)
        other._workers = set()
        return other

    def close(self) -> None:
        """Stop its workers when the steps in flight have ended, give every lease back, and let go of the storage.

        Calling it again does nothing.
        """
        for worker in list(self._workers):
            worker.stop()
        super().close()

    @classmethod
    def open_read_only(
        cls,
        path: str | os.PathLike[str],
        *,
        outage_seconds: float = OUTAGE_SECONDS,
        encryption: Encryption | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """The ledger at `path` to look at, also while agents work on it: it is not made, written or migrated.

        What would write raises `StoreReadOnly`. Raises `StoreUnavailable` where there is no such file, and where a server cannot be
        reached for `outage_seconds`; else as opening it does.

        >>> with AgentRunLedger.open_read_only("agent.db") as ledger:
        ...     [run.goal for run in ledger.runs()]
        ['Reconcile October invoices']
        """
        if os.fspath(path) == ":memory:":
            raise ValueError("a ledger in memory is seen by its own ledger object only: give the path of a file")
        store = open_store(
            path, durability="full", clock=clock or SystemClock(), outage_seconds=outage_seconds, read_only=True
        )
        return cls(store, outage_seconds=outage_seconds, encryption=encryption, clock=clock)

    @staticmethod
    def migrate(
        dsn: str,
        *,
        dry_run: bool = False,
        partitions: int | None = None,
        triggers: bool = True,
        grant: str | None = None,
    ) -> list[str]:
        """Make a PostgreSQL database a ledger, or bring an older one up to date, and return the SQL; with `dry_run` the SQL that would.

        Nothing where it is up to date. `partitions` spreads a new ledger's tables over so many parts; `triggers=False` leaves out what
        keeps the log append-only; `grant` is a role that may use the ledger from then on. Raises a `StoreError`; then nothing was changed.
        """
        from agent_run_ledger.stores import migrate

        return migrate(dsn, dry_run=dry_run, partitions=partitions, triggers=triggers, grant=grant)

    def backup(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, told: Callable[[str], None] | None = None
    ) -> VerificationReport:
        """Copy this ledger to the file `path` while it is in use, and verify the copy, of which this returns the report.

        The copy is the ledger as it is at one moment, in one file; nobody waits for it. It stands at `path` when it is whole and has
        verified, or not at all. `told` hears how far it is. Raises `BackupRefused` where there is a file already and it is not to
        `overwrite` it, where the copy does not verify, and for a ledger in memory or on a server, which has tools of its own.

        >>> with AgentRunLedger("agent.db") as ledger:
        ...     ledger.backup("backup.db").ok
        True
        """
        from agent_run_ledger.backups import back_up

        return back_up(self._store, os.fspath(path), overwrite=overwrite, told=told)

    @staticmethod
    def restore(
        backup: str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        told: Callable[[str], None] | None = None,
    ) -> RestoredLedger:
        """Put a copy of a backup in the place of the ledger at `path`, and begin a new epoch there.

        Nobody has a run in it, and no process that used the ledger before can write to it: fencing tokens are above all that were ever
        handed out. What stands at `path` is kept under another name, and replaced only if it is to `overwrite` it. Raises
        `BackupRefused`, and `StoreBusy` while anybody uses the ledger at `path`; nothing was changed then.

        >>> AgentRunLedger.restore("backup.db", "restored.db").runs
        1
        """
        from agent_run_ledger.backups import restore

        return restore(os.fspath(backup), os.fspath(path), overwrite=overwrite, told=told)

    @staticmethod
    def new_epoch(place: str | os.PathLike[str]) -> int:
        """Begin a new epoch, and return it: for a database that was restored by other tools, by the role that owns its tables.

        Nobody has a run there then, and fencing tokens that were handed out before are refused. Raises a `StoreError`.
        """
        from agent_run_ledger.stores import new_epoch

        return new_epoch(os.fspath(place), int(SystemClock().now()))

    @staticmethod
    def diagnose(path: str | os.PathLike[str]) -> Diagnosis | ServerDiagnosis:
        """What stands around a ledger, also one that cannot be read: of a file the disk, of a database the server and its role's rights.

        Raises `StoreError` where there is no file, or where the server cannot be reached.
        """
        from agent_run_ledger.stores import diagnose

        return diagnose(path)

    def create_run(self, goal: str, run_id: str | None = None, *, wait: float | None = None) -> str:
        """Make a run and return its id. A `run_id` that exists with an equal goal is attached to: the next call replays it.

        Raises `RunInputMismatch` for another goal, and `RunOwned` where another owner has the run for more than `wait` seconds.
        """
        run = self._start(run_id, self._created(goal), wait)
        run.__exit__(None, None, None)
        return run.run_id

    def _created(self, goal: str) -> Draft:
        if not isinstance(goal, str):
            raise InvalidArguments(f"goal must be a string, not {type(goal).__name__}; nothing was written")
        return runs.created(goal, None, pipeline=False, limit=self._payload_limit, limits=self._limits)

    def execute_step(
        self,
        run_id: str,
        tool_name: str,
        arguments: Mapping[str, Any],
        execution_fn: Callable[..., Any],
        **options: Unpack[StepOptions],
    ) -> Any:
        """Run one step, or return what it returned when it ran before. The options are those of `StepOptions`.

        The exact `arguments` and the step's idempotency key are on stable storage before `execution_fn` is called, and its outcome
        before this returns. A function with required parameters is called with the stored arguments by keyword, another one bare.
        Raises `StepFailed` where it raises, `RunawayLoopDetectedException` and `BudgetExceededException` where it is refused,
        `RunClosed` on a run that has ended, `ReplayDivergence` where the log has another call at this place.
        """
        call = function_call(tool_name, arguments, execution_fn, declared(options), self._payload_limit)
        run = self._run(run_id)
        call.branch = branch_of(run, tool_name)
        return perform(self, run, call, is_async=False)

    def aexecute_step(
        self,
        run_id: str,
        tool_name: str,
        arguments: Mapping[str, Any],
        execution_fn: Callable[..., Any],
        **options: Unpack[StepOptions],
    ) -> Coroutine[Any, Any, Any]:
        """`execute_step` in an event loop: the call is made now, and what this returns is awaited for its outcome.

        `execution_fn` may be an async function or a plain one; a plain one runs in the loop's thread, or with `timeout=` in one of
        its own. Calls that are awaited together run side by side.
        """
        call = function_call(tool_name, arguments, execution_fn, declared(options), self._payload_limit, may_await=True)
        run = self._run(run_id)
        call.branch = branch_of(run, tool_name)
        return self._asynchronous.call(run, call)

    def resume_run(
        self, run_id: str, *, tools: Mapping[str, Callable[..., Any]] | None = None, wait: float | None = None
    ) -> list[StepRecord]:
        """Take a run over and return its steps; the next `execute_step` goes on at the first position without an outcome.

        The caller is handed failures as records, so what he does next has acted on them. A run that has ended is only read. Steps in
        doubt of registered tools, and of those in `tools` by name, are settled first, as their effects say; one that cannot be is in
        the records as BLOCKED.
        """
        run = self._run(run_id)
        known = self._tools
        if tools:
            known = known | {name: _as_tool(name, function) for name, function in tools.items()}
        self._attach(run, wait)
        try:
            if known and run.history.is_in_doubt and not run.history.state.is_terminal:
                from agent_run_ledger.settle import settle

                with suppress(StepInDoubt, RunClosed):
                    settle(self, run, known, reads=True)
                self._leases.await_claim(run, None)
            with run.lock:
                run.restart()
                runs.skip_recorded(run)
                return self._records(run)
        finally:
            run.__exit__(None, None, None)

    def _records(self, run: HeldRun) -> list[StepRecord]:
        """The steps of a run as they are now: made when somebody looks at them, or before they change."""
        history = run.history
        kept = list(history.positions.values())

        def made() -> list[StepRecord]:
            from agent_run_ledger.engine.records import step_record

            fetch = partial(self._store.payload, run.run_id)
            return [step_record(run.run_id, step, fetch, replayed=True) for step in kept]

        if not all(step.is_kept for step in kept):
            return made()  # long values are looked up, which takes the store
        if run.before_change is not None:
            run.before_change()
        late = Late(made, len(kept))
        run.before_change = late.filling()
        return late

    def recover(self) -> list[str]:
        """Go on with every run of a registered agent that nobody works on, and return the ids of those that ended.

        Steps in doubt of registered tools that may have changed something are settled first, from what is stored and as their effects
        say, without a call of agent code or of a model; then the agent is begun, replays, and goes on. It sweeps until nothing more can be done here: runs that
        wait for a time, a signal or a person are left waiting, parked ones with their cause, those of others to them.
        """
        from agent_run_ledger.recover import recover

        return recover(self, self._agents)

    def finish_run(self, run_id: str, result: Any = None) -> None:
        """Complete the run, with an optional result. Completing it again with an equal result does nothing."""
        finish(self, self._run(run_id), result)

    def abort_run(self, run_id: str, reason: str) -> None:
        """End the run as FAILED. Raises `IllegalTransition` where it has ended."""
        self._driver.obey(runs.abort(self._run(run_id), runs.abortion(reason)))

    def open_run(self, goal: str, run_id: str | None = None, *, wait: float | None = None) -> OpenRun:
        """A run as a context manager: it is finished on a clean exit, parked on an exception, and its lease is kept meanwhile."""
        return OpenRun(self, lambda patience: self._start(run_id, self._created(goal), patience), wait)

    # --- registered tools and agents ----------------------------------------------------------------------------------

    def tool(
        self, function: Any = None, /, *, name: str | None = None, **options: Unpack[StepOptions]
    ) -> Callable[[F], F]:
        """Register the function below as a tool: called inside a run it is a durable step, outside of one a plain call.

        The options are those of `StepOptions`; the return annotation stands in for `returns=`. Arguments are checked against their
        annotations. A parameter `idempotency_key` is given the step's key, and `step_key=` may be given with a call.
        """
        if function is not None:
            raise InvalidArguments("@ledger.tool takes parentheses: @ledger.tool() or @ledger.tool(effect=...)")

        from agent_run_ledger.agents import Tool, as_tool

        def register(fn: F) -> F:
            tool = Tool(fn, name, declared(options))
            self._register(self._tools, tool, "tool")
            return as_tool(fn, tool)

        return register

    def agent(
        self,
        function: Any = None,
        /,
        *,
        name: str | None = None,
        budget: Budget | None = None,
        returns: Any = None,
        retry: RetryPolicy | None = None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> Callable[[F], F]:
        """Register the function below as an agent: plain Python, sync or async, whose calls of tools are the steps of its run.

        A parameter annotated `Run` is given the run. `run` and `arun` start it, `submit` leaves it to workers; called inside another
        agent it is a child run. Where a worker drives it and an exception leaves it, it is begun anew as `retry` says, and goes on
        where it stood; then, or at once after one that is `fatal`, the run is FAILED.
        """
        if function is not None:
            raise InvalidArguments("@ledger.agent takes parentheses: @ledger.agent() or @ledger.agent(budget=...)")

        from agent_run_ledger.agents import Agent, as_agent

        def register(fn: F) -> F:
            agent = Agent(fn, name, budget, returns, retry, fatal)
            self._shared.update(shared(budget))
            self._register(self._agents, agent, "agent")
            return as_agent(fn, agent, self)

        return register

    @staticmethod
    def _register(known: dict[str, R], registered: R, what: str) -> None:
        if known.setdefault(registered.name, registered) is not registered:
            raise InvalidName(f"there is {what} {registered.name!r} already; give this one another name=")

    def run(
        self,
        agent: Callable[..., Any],
        /,
        *args: Any,
        run_id: str | None = None,
        wait: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run an agent and return its result; with the `run_id` of a run that exists, go on with that one.

        A completed run returns its result without a call. An exception that leaves the agent parks the run and is raised as it is;
        running it again goes on there. A run that this ledger object runs already is waited for. Raises `RunInputMismatch` for
        other arguments, `RunClosed` for a run that has ended otherwise, and `RunOwned` as `create_run` does.
        """
        from agent_run_ledger.agents import abegin, run_to_its_end

        start = self._agent_start(agent, args, kwargs, run_id, wait)
        if start.agent.takes.is_async:
            return self._asynchronous.run(lambda: abegin(self, start))
        return run_to_its_end(self, start)

    def arun(
        self,
        agent: Callable[..., Any],
        /,
        *args: Any,
        run_id: str | None = None,
        wait: float | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """`run` in an event loop, of an async agent; a plain one runs in a thread of its own."""
        from agent_run_ledger.agents import abegin, run_to_its_end

        start = self._agent_start(agent, args, kwargs, run_id, wait)
        if start.agent.takes.is_async:
            return abegin(self, start)
        return self._asynchronous.threaded(lambda: run_to_its_end(self, start), start.agent.name)()

    def _agent_start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None,
        wait: float | None,
    ) -> Start:
        from agent_run_ledger.agents import Start

        agent = self._registered(function)
        if run_id is not None:
            check_run_id(run_id)
        return Start(agent, agent.arguments(args, kwargs), run_id, wait)

    @staticmethod
    def _registered(function: Callable[..., Any]) -> Agent:
        """The agent that a function is. Raises `InvalidArguments` where it is none."""
        from agent_run_ledger.agents import Agent

        agent = getattr(function, "registered", None)
        if not isinstance(agent, Agent):
            raise InvalidArguments(f"{function!r} is no agent: register it with @ledger.agent(); nothing was started")
        return agent


def _as_tool(name: str, function: Callable[..., Any]) -> Tool:
    from agent_run_ledger.agents import Tool

    registered = getattr(function, "registered", None)
    return registered if isinstance(registered, Tool) else Tool(function, name, declared({}))


def _min_free(given: int | None) -> int:
    """How many bytes of its disk a ledger leaves free. Raises `ValueError`."""
    where, value = "min_free_bytes", given
    if given is None and (text := os.environ.get(MIN_FREE, "")):
        where, value = MIN_FREE, int(text) if text.isdecimal() else -1
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(
            f"{where} is a whole number of bytes, at least 0, not {given if given is not None else text!r}"
        )
    return value or 0


def _host_name() -> str:
    """What `socket.gethostname` says, without its import, which costs as much as a step on a disk."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket

    return socket.gethostname()


def _encrypted(store: Store, encryption: Encryption) -> Store:
    from agent_run_ledger.stores.encrypted import encrypted

    return encrypted(store, encryption)


def _close_all() -> None:
    for ledger in list(_open):
        ledger.close()


lifetime.close_before(_close_all)
