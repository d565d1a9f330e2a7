"""What changed code makes of the runs that are open: each is replayed against it, with nothing dispatched and nothing written."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn, Protocol

from agent_run_ledger.agents import Agent, program_of
from agent_run_ledger.contract import Append, Row, Store, Summary
from agent_run_ledger.drivers.context import callers, refuse_in_an_event_loop
from agent_run_ledger.drivers.leases import HeldRun
from agent_run_ledger.engine import admission
from agent_run_ledger.engine.effects import (
    AwaitLate,
    Commit,
    Fetch,
    GiveBack,
    Inquire,
    Invoke,
    Quiet,
    Rest,
    Turn,
    Wait,
    Warn,
)
from agent_run_ledger.engine.history import History
from agent_run_ledger.engine.log import Draft
from agent_run_ledger.errors import (
    InvalidArguments,
    LedgerError,
    ReplayDivergence,
    RunInputMismatch,
    StepInDoubt,
    StoreReadOnly,
    StoreUnavailable,
)
from agent_run_ledger.ledger import AgentRunLedger
from agent_run_ledger.pipeline import RunLedger
from agent_run_ledger.rules import canonical, failures
from agent_run_ledger.rules.names import is_account
from agent_run_ledger.run import Run
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.clock import SystemClock
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.packed import packed
from agent_run_ledger.words import RunState

Verdict = Literal["goes on", "stands", "diverges", "fails", "not here"]

TIMEOUT_SECONDS = 10.0
_TURNS, _QUIET_SECONDS = 50, 0.25
"""How long an event loop in which calls stand at their frontiers may still bring something new: turns, or seconds if it has timers."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would become of one open run. `verdict` is one of

    - `goes on`: the code makes the calls that are recorded; `position` and `text` say what comes next;
    - `stands`: it would stand where it stands now, in doubt, waiting, or left by the same error;
    - `diverges`: the code makes another call than the one that is `recorded` at `position`;
    - `fails`: it cannot be replayed to the end of what is recorded, or would be ended;
    - `not here`: its program is not registered with this ledger.
    """

    run_id: str
    program: str | None
    """The agent's name, or the pipeline's run id; None where a program drives the run that is registered nowhere."""
    status: str
    verdict: Verdict
    text: str
    position: str | None = None
    recorded: str | None = None
    asked: str | None = None
    path: str | None = None
    """Where the arguments differ first, as a JSON path."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would become of every open run. `ok`: none diverges and none fails."""

    ok: bool
    runs: list[Foreseen]


def preflight(
    ledger: AgentRunLedger | RunLedger,
    db_path: str | os.PathLike[str] | None = None,
    *,
    timeout: float = TIMEOUT_SECONDS,
    told: Callable[[int, int], object] | None = None,
) -> Forecast:
    """Replay every open run of a database against the agents of this ledger, or this pipeline, as they are now.

    The database is that of the ledger, or the one at `db_path`; it is opened read-only, and each run is replayed on a copy in memory.
    The code of agents runs, up to the first call that is not recorded: it must not do by itself what only tools may do. No tool is
    called. A replay may take `timeout` seconds, kept by SIGALRM and so only in the main thread. `told(done, of)` hears how far it is.

    >>> forecast = preflight(ledger)
    >>> forecast.ok, [run.verdict for run in forecast.runs]
    (True, ['goes on'])
    """
    refuse_in_an_event_loop("preflight")
    store, is_own = _opened(ledger, db_path)
    try:
        found = [
            summary for summary in store.summaries() if not (_has_ended(summary) or is_account(summary.head.run_id))
        ]
        runs = []
        with _tools_refuse(ledger):
            for number, summary in enumerate(found):
                if told is not None:
                    told(number, len(found))
                runs.append(_foresee(ledger, store, summary, timeout))
    finally:
        if not is_own:
            store.close()
    return Forecast(not any(run.verdict in ("diverges", "fails") for run in runs), runs)


@contextmanager
def nothing_is_opened() -> Iterator[None]:
    """Ledgers that are made in this block know where they stand and open nothing, for what a module registers is all that is needed.

    Opening one could make a database, or bring one to a schema that the old code, which still runs, does not know.
    """
    from agent_run_ledger import ledger as room

    names = vars(room)
    opens = names["open_store"]
    names["open_store"] = lambda path, **_: _Unopened(os.fsdecode(path))
    try:
        yield
    finally:
        names["open_store"] = opens


class _Unopened:
    """The store of a ledger that was made while a module was imported for preflight."""

    is_remote = False

    def __init__(self, path: str) -> None:
        self.path = path if path == ":memory:" or "://" in path else os.path.realpath(path)

    def close(self) -> None:
        """There is nothing to close."""

    def __getattr__(self, name: str) -> Any:
        raise StoreUnavailable(
            f"preflight opens nothing, and the module uses its ledger ({self.path}) while it is imported; nothing was done. Put what "
            "starts runs under `if __name__ == '__main__':`."
        )


def _opened(ledger: AgentRunLedger | RunLedger, db_path: str | os.PathLike[str] | None) -> tuple[Store, bool]:
    """The store to read, and whether it is the ledger's own, to be left open."""
    store: Any = ledger._store
    if db_path is None:
        db_path = getattr(store, "path", None)
        if db_path is None:  # one in memory, or of the user's own kind
            return store, True
    if os.fsdecode(db_path) == ":memory:":
        raise StoreUnavailable("a ledger in memory has no run that could be read; give the path of a database (--db)")
    return packed(open_store(db_path, durability="full", clock=SystemClock(), read_only=True)), False


def _has_ended(summary: Summary) -> bool:
    try:
        return RunState(json.loads(summary.last.body)["state"]).is_terminal
    except (ValueError, KeyError, TypeError):
        return False  # it cannot be read, which is news


@contextmanager
def _tools_refuse(ledger: AgentRunLedger | RunLedger) -> Iterator[None]:
    """No tool can be called, not even beside its run, as in a thread that the agent starts by itself."""
    tools = list(ledger._tools.values()) if isinstance(ledger, AgentRunLedger) else []
    functions = [tool.function for tool in tools]
    for tool in tools:
        tool.function = _refuse
    try:
        yield
    finally:
        for tool, function in zip(tools, functions, strict=True):
            tool.function = function


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise StoreReadOnly("preflight calls no tool")


# --- one run ----------------------------------------------------------------------------------------------------------


def _foresee(ledger: AgentRunLedger | RunLedger, store: Store, summary: Summary, timeout: float) -> Foreseen:
    run_id = summary.head.run_id
    try:
        first, status = json.loads(summary.first.body), str(json.loads(summary.last.body)["state"])
        program = first.get("agent") or (run_id if first.get("pipeline") else None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Foreseen(run_id, None, "", "fails", "it cannot be read: `agent-run-ledger verify` says more")

    def foreseen(verdict: Verdict, text: str, **where: str | None) -> Foreseen:
        return Foreseen(run_id, program, status, verdict, text, **where)

    if program is None:
        return foreseen(
            "not here", "it is driven by a program that is registered nowhere: step by step, or with open_run"
        )
    if isinstance(ledger, RunLedger):
        if not first.get("pipeline") or ledger.run_id != run_id:
            return foreseen("not here", f"this pipeline is {ledger.run_id!r}")
        replay: _Replay = _OfPipeline(ledger)
    elif first.get("pipeline") or (agent := ledger._agents.get(program)) is None:
        what = "pipeline" if first.get("pipeline") else "agent"
        return foreseen("not here", f"no {what} {program!r} is registered with this ledger")
    else:
        replay = _OfAgent(ledger, agent, first.get("parent"))
    if status == RunState.QUARANTINE:
        return foreseen("stands", "it is in quarantine, and is replayed only when it is released")
    try:
        copy = _Copy(store, run_id)
    except LedgerError as error:
        return foreseen("fails", f"it cannot be read: {error}")
    return _Replayed(copy, replay, timeout).verdict(foreseen)


class _Copy(MemoryStore):
    """A run as it stands, in memory. Whoever is about to write to it is at the frontier of what is recorded."""

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__(clock=SystemClock())
        self.run_id = run_id
        self.at_frontier: Callable[[str, Sequence[Row]], None] = lambda run_id, rows: None
        rows, secret = store.read(run_id), store.secret(run_id)
        self.history = History.read(run_id, secret, rows)
        head = store.head(run_id)
        assert head is not None
        super().adopt(run_id, head.token, secret, head.listing, [rows], store.inbox(run_id, 0), None)

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        self.at_frontier(run_id, rows)
        return False

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        for append in appends:
            self.at_frontier(append.run_id, append.rows)
        return [False for _ in appends]


class Frontier(BaseException):
    """What comes next is not recorded: the replay ends here."""


class _LeaveLoop(SystemExit):
    """An event loop stands still at once."""


class _TimeIsUp(SystemExit):
    """The replay took too long. A `SystemExit`, so that an event loop stands still for it."""


class _Replay(Protocol):
    """How a program is started on a copy of its run, up to where it would finish."""

    def run(self, copy: _Copy, own: Callable[[Any], Any]) -> None: ...


class _OfAgent:
    def __init__(self, ledger: AgentRunLedger, agent: Agent, parent: str | None) -> None:
        self._ledger, self._agent, self._parent = ledger, agent, parent

    def run(self, copy: _Copy, own: Callable[[Any], Any]) -> None:
        agent, created = self._agent, copy.history.created
        if created is None:
            raise InvalidArguments("its input was erased")
        given = agent.given(Draft("created", None, {}, created))
        ledger = own(self._ledger._elsewhere(copy, copy.clock))
        # As who runs it again would: with its arguments as the code checks and spells them now.
        draft = agent.created(agent.arguments((), given), ledger, self._parent)
        if agent.takes.is_async:
            ledger._asynchronous.run(lambda: self._replay_async(ledger, copy.run_id, draft))
            return
        held = ledger._start(copy.run_id, draft, None)
        try:
            run = self._begun(ledger, held, is_async=False)
            with program_of(run, held):
                agent.call(run, agent.given(draft))
        finally:
            held.__exit__(None, None, None)

    async def _replay_async(self, ledger: AgentRunLedger, run_id: str, draft: Draft) -> None:
        agent = self._agent
        held = await ledger._asynchronous.start(
            lambda: ledger._start(run_id, draft, None), None, waits_for_itself=False
        )
        try:
            run = self._begun(ledger, held, is_async=True)
            with program_of(run, held):
                await agent.call(run, agent.given(draft))
        finally:
            held.__exit__(None, None, None)

    def _begun(self, ledger: AgentRunLedger, held: HeldRun, *, is_async: bool) -> Run:
        self._agent.apply(held)
        if (refusal := admission.refusal(held, pipeline=False)) is not None:
            raise refusal
        return Run(ledger, held, is_async=is_async)


class _OfPipeline:
    def __init__(self, pipeline: RunLedger) -> None:
        self._pipeline = pipeline

    def run(self, copy: _Copy, own: Callable[[Any], Any]) -> None:
        created = copy.history.created
        if created is None:
            raise InvalidArguments("its input was erased")
        own(self._pipeline._elsewhere(copy, copy.clock)).execute(**canonical.decode(created)["input"])


_HARMLESS = (Commit, Turn, Quiet, Fetch, GiveBack)
"""What a replay may do on its copy. Everything else is no replay any more."""


class _Replayed:
    """One replay: it is run as it is made, and then says what it came to."""

    def __init__(self, copy: _Copy, replay: _Replay, timeout: float) -> None:
        self._copy = copy
        copy.at_frontier = self._write
        self._next: list[tuple[Verdict, str | None, str]] = []
        """What stands at the frontiers that were come to: the verdict, the position, and what would happen."""
        self._divergence: ReplayDivergence | None = None
        self._doubt: StepInDoubt | None = None
        self._error: BaseException | None = None
        self._performed = 0
        self._under_way = 0
        self._is_watched = self._has_left = False
        self._is_over = False
        try:
            with _alarm(timeout):
                replay.run(copy, self._own)
        except (Frontier, _LeaveLoop):
            pass
        except _TimeIsUp:
            self._error = TimeoutError(
                f"the replay took longer than {timeout:g} s without coming to what is not recorded"
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._error = error
        finally:
            self._is_over = True
            self._ledger_is_left()

    def verdict(self, foreseen: Callable[..., Foreseen]) -> Foreseen:
        """What the replay came to, the worst first."""
        if (divergence := self._divergence) is not None:
            where = {"recorded": divergence.recorded, "asked": divergence.asked, "path": divergence.path}
            at = f", first difference at {divergence.path}" if divergence.path else ""
            text = f"recorded is {divergence.recorded}, the code asks for {divergence.asked}{at}"
            return foreseen("diverges", text, position=divergence.position, **where)
        for verdict in ("fails", "goes on", "stands"):
            for found, position, text in self._next:
                if found == verdict:
                    return foreseen(found, text, position=position)
        if (doubt := self._doubt) is not None:
            return foreseen(
                "stands", f"step {doubt.step_number} {doubt.tool_name!r} is in doubt", position=doubt.position
            )
        if self._error is None:
            return foreseen("goes on", "the program comes to its end without another call")
        return self._left_by(self._error, foreseen)

    def _left_by(self, error: BaseException, foreseen: Callable[..., Foreseen]) -> Foreseen:
        if isinstance(error, RunInputMismatch | InvalidArguments):
            return foreseen("fails", f"its arguments no longer fit: {error}")
        said = failures.text(failures.describe(error))
        if self._copy.history.cause_text == said:
            return foreseen("stands", f"it is left by {said}, as it was")
        return foreseen("fails", said if isinstance(error, LedgerError | TimeoutError) else f"the code raises {said}")

    # --- what drivers do ----------------------------------------------------------------------------------------------

    def _own(self, ledger: Any) -> Any:
        self._ledger = ledger
        sync, asynchronous = ledger._driver, ledger._asynchronous
        sync.perform = self._performing(sync.perform)
        asynchronous.perform = self._performing_async(asynchronous.perform)
        return ledger

    def _ledger_is_left(self) -> None:
        if (ledger := getattr(self, "_ledger", None)) is not None:
            ledger.close()

    def _performing(self, perform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def performing(effect: Any) -> Any:
            self._performed += 1
            if isinstance(effect, Warn | AwaitLate):
                return None
            try:
                if not isinstance(effect, _HARMLESS):
                    self._stop_at(effect)
                with self._noting():
                    return perform(effect)
            except Frontier:
                if callers.task is None or callers.task() is None:
                    raise
                # A plain call in an event loop, as that of `run.now()`, cannot stand still: its task ends, the others go on.
                raise sys.modules["asyncio"].CancelledError from None

        return performing

    def _performing_async(self, perform: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def performing(effect: Any) -> Any:
            self._performed += 1
            if isinstance(effect, Warn | AwaitLate):
                return None
            self._under_way += 1
            try:
                if not isinstance(effect, _HARMLESS):
                    self._stop_at(effect)
                with self._noting():
                    return await perform(effect)
            except Frontier:
                self._under_way -= 1
                try:
                    await self._stand_still()
                finally:
                    self._under_way += 1
            finally:
                self._under_way -= 1

        return performing

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what the program is told of its place in the log, whatever it makes of that."""
        try:
            yield
        except ReplayDivergence as error:
            self._divergence = self._divergence or error
            raise
        except StepInDoubt as error:
            self._doubt = self._doubt or error
            raise

    def _write(self, run_id: str, rows: Sequence[Row]) -> None:
        if not self._is_over:
            self._next.append(_foretold(rows))
        raise Frontier

    def _stop_at(self, effect: Any) -> NoReturn:
        self._next.append(_due(effect))
        raise Frontier

    async def _stand_still(self) -> None:
        """A call at its frontier never returns; the others come to theirs meanwhile."""
        asyncio = sys.modules["asyncio"]
        if self._has_left:
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()
        if not self._is_watched:
            self._is_watched = True
            self._look(loop, -1, 0.0, 0)
        await loop.create_future()

    def _look(self, loop: Any, performed: int, since: float, turns: int) -> None:
        """Leave the loop when nothing new has come in it for a while."""
        if performed != self._performed:
            performed, since, turns = self._performed, loop.time(), 0
        has_timers = getattr(loop, "_scheduled", True)
        if turns >= _TURNS and not self._under_way and (not has_timers or loop.time() - since >= _QUIET_SECONDS):
            self._has_left = True
            raise _LeaveLoop
        if turns < _TURNS:
            loop.call_soon(self._look, loop, performed, since, turns + 1)
        else:
            loop.call_later(0.01, self._look, loop, performed, since, turns)


def _due(effect: Any) -> tuple[Verdict, str | None, str]:
    """What an effect that is no replay is about. As a rule an entry is written first, so that nobody comes so far."""
    if isinstance(effect, Rest):
        call = effect.call
        until = "" if effect.until is None else f" until {_when(effect.until)}"
        what = (
            f"for the {call.wait.sort} {call.wait.name!r}"
            if call.wait is not None and call.wait.name
            else "for its time"
        )
        return "stands", call.position, f"it waits {what}{until}"
    if isinstance(effect, Wait):
        return "goes on", None, f"a step would be tried again, not before {_when(effect.until)}"
    if isinstance(effect, Invoke | Inquire):
        step = effect.step
        return "goes on", step.position, f"step {step.number} {step.tool!r} would be dispatched"
    return "goes on", None, f"what is not recorded would begin: {type(effect).__name__}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _foretold(rows: Sequence[Row]) -> tuple[Verdict, str | None, str]:
    """What an append would have said, as far as it matters to whoever deploys."""
    for row in rows:
        body, payload = json.loads(row.body), row.payload
        position = row.position
        match row.kind:
            case "intent":
                again = f", attempt {row.attempt}" if (row.attempt or 1) > 1 else ""
                return "goes on", position, f"step {body['step']} {body['tool']!r} would be dispatched{again}"
            case "value":
                return "goes on", position, f"run.{body['name']}() would be recorded"
            case "finished":
                return "goes on", position, "it would come to its end"
            case "refused" | "exhausted" | "aborted":
                return "fails", position, f"it would be ended: {_reason(payload)}"
            case "cancelled":
                return "stands", position, "its cancellation was asked for"
            case "parked" if position is None:
                return "fails", position, f"the code raises {_reason(payload)}"
            case "parked":
                return "stands", position, _reason(payload)
            case "signal":
                return "goes on", position, "what was sent to it would be taken"
            case "asked":
                return "goes on", position, "the receiver would be asked for its receipt"
    return "goes on", rows[0].position, f"the entry {rows[0].kind!r} would be written"


def _reason(payload: bytes | None) -> str:
    return str(canonical.decode(payload)["reason"]) if payload is not None else "(erased)"


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `_TimeIsUp` in the block when its time is up, and again each second until it is left. Only the main thread can be so alarmed."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
