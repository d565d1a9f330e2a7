"""Every error a user can meet. Each says what happened, what was and was not done, and what to do next."""

from __future__ import annotations


class LedgerError(Exception):
    """Root of all errors of this library: catch it to catch them all."""


# --- runs -------------------------------------------------------------------------------------------------------------


class RunNotFound(LedgerError, ValueError):
    """No run has this id in this ledger. Nothing was written. Check the id and the database path."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"there is no run {run_id!r} in this ledger; nothing was written. Check the id and the database path."
        )
        self.run_id = run_id


class RunDeleted(RunNotFound):
    """The run was deleted, and its tombstone says by whom, when and why. Nothing was written. Its id is not used again: take another one.

    ``size`` and ``root`` are those of its log, for whoever has kept a head of it.
    """

    def __init__(self, run_id: str, size: int, root: bytes, who: str, why: str, at: float) -> None:
        LedgerError.__init__(
            self,
            f"run {run_id!r} was deleted by {who!r} at {at:.0f} (Unix time), with its {size} entries: {why or 'no reason is given'}. "
            "Nothing was written; its id is not used again: take another one.",
        )
        self.run_id = run_id
        self.size = size
        self.root = root
        self.who = who
        self.why = why
        self.at = at


class PayloadErased(LedgerError):
    """What is asked for was erased, so it can be neither read nor replayed. Nothing was written.

    `agent-run-ledger trace RUN` says who erased it and why. A call that needs it is to be made in a new run.
    """

    def __init__(self, run_id: str, what: str) -> None:
        super().__init__(
            f"run {run_id!r}: {what} was erased, so it can be neither read nor replayed; nothing was written. `agent-run-ledger trace` says "
            "who erased it and why. Start a new run for what is to be done again."
        )
        self.run_id = run_id
        self.what = what


class RunClosed(LedgerError, RuntimeError):
    """The run has ended or is quarantined: it takes no further step. Nothing was dispatched and nothing was written."""

    def __init__(self, run_id: str, status: str, cause: str | None = None, done: str | None = None) -> None:
        because = f" ({cause})" if cause else ""
        done = done or (
            "nothing was dispatched and nothing was written. Start a new run, or look at this one with "
            "`agent-run-ledger show`."
        )
        super().__init__(f"run {run_id!r} is {status}{because}: {done}")
        self.run_id = run_id
        self.status = status
        self.cause = cause


class RunNotEnded(LedgerError, TimeoutError):
    """The run whose result was waited for has not ended in that time. Nothing is lost: it goes on, and may be waited for again."""

    def __init__(self, run_id: str, seconds: float, status: str, standing: str) -> None:
        super().__init__(
            f"run {run_id!r} has not ended within {seconds:g} s: it is {status}, {standing}. It goes on; wait for its result again."
        )
        self.run_id = run_id
        self.seconds = seconds
        self.status = status


class RunOwned(LedgerError):
    """Another owner works on this run. Nothing was done. Wait until it ends, detaches, dies, or its lease runs out."""

    def __init__(self, run_id: str, owner: str, idle_seconds: float) -> None:
        super().__init__(
            f"run {run_id!r} is owned by {owner!r}, last heard of {idle_seconds:.1f} s ago; nothing was done. "
            "It is free as soon as that owner detaches, closes its ledger or dies, or when its lease runs out."
        )
        self.run_id = run_id
        self.owner = owner
        self.idle_seconds = idle_seconds


class RunMoved(LedgerError):
    """This run was moved to another ledger and goes on there. Nothing was done here, where it stands as it was when it was moved.

    ``place`` says where. If it is not there, whatever moved it was interrupted: the same copy once more finishes it.
    """

    def __init__(self, run_id: str, place: str) -> None:
        super().__init__(
            f"run {run_id!r} was moved to {place} and goes on there; nothing was done here. If it is not there, the copy was "
            "interrupted: call the same copy again, and it is finished."
        )
        self.run_id = run_id
        self.place = place


class CopyRefused(LedgerError, ValueError):
    """A run cannot be copied as it was asked for. Nothing was written to the other ledger, and the run stays as it was."""

    def __init__(self, run_id: str, place: str, why: str) -> None:
        super().__init__(f"run {run_id!r} was not copied to {place}, and nothing was written: {why}")
        self.run_id = run_id
        self.place = place
        self.why = why


class LeaseLost(LedgerError):
    """Another owner has taken this run over, so this write was refused in its own transaction.

    What the step did in the outside world has happened; the new owner settles it. The next call here reads the run anew.
    """

    def __init__(self, run_id: str, token: int) -> None:
        super().__init__(
            f"run {run_id!r} was taken over by another owner (our fencing token {token} is old): this write was refused "
            "and nothing more is started here. The new owner settles what was in flight; the next call reads the run anew."
        )
        self.run_id = run_id
        self.token = token


class RunInputMismatch(LedgerError):
    """This run id was created with another goal or input. Nothing was written. Use a new run id, or the old input."""

    def __init__(self, run_id: str, what: str) -> None:
        super().__init__(
            f"run {run_id!r} exists with another {what}; nothing was written. Use another run id, or give the same {what}."
        )
        self.run_id = run_id
        self.what = what


class IllegalTransition(LedgerError):
    """The lifecycle has no such transition. Nothing was written."""

    def __init__(self, state: str, event: str, run_id: str | None = None) -> None:
        where = f"run {run_id!r}: " if run_id else ""
        super().__init__(f"{where}a run that is {state} cannot take {event}; nothing was written.")
        self.run_id = run_id
        self.state = state
        self.event = event


# --- replay -----------------------------------------------------------------------------------------------------------


class ReplayDivergence(LedgerError):
    """The program asks for another call than the one that is recorded at this position.

    Nothing was run and nothing was appended; the lease was given back. Bring the old code or input back and the run goes on.
    """

    def __init__(
        self, run_id: str, position: str, recorded: str, asked: str, path: str | None = None, hint: str = ""
    ) -> None:
        at = f", first difference at {path}" if path else ""
        super().__init__(
            f"run {run_id!r}, position {position}: recorded is {recorded}, the program now asks for {asked}{at}. "
            f"Nothing was run and nothing was written; with the old code or input the run goes on.{hint}"
        )
        self.run_id = run_id
        self.position = position
        self.recorded = recorded
        self.asked = asked
        self.path = path


class IntentDrift(ReplayDivergence):
    """The divergent position is in doubt: the recorded call may have been made, and the program now asks for another.

    ``stored_arguments`` are those of the recorded call, exactly; the message shows them without secrets.
    """

    def __init__(
        self,
        run_id: str,
        position: str,
        recorded: str,
        asked: str,
        path: str | None,
        stored_arguments: str,
        shown: str | None = None,
    ) -> None:
        super().__init__(
            run_id,
            position,
            recorded,
            asked,
            path,
            f" The recorded call is in doubt: it was dispatched with {stored_arguments if shown is None else shown} and its outcome is not known. "
            "Go on with exactly that call, or cancel the run.",
        )
        self.stored_arguments = stored_arguments


class UnorderedStep(LedgerError, RuntimeError):
    """A step was asked for while another step of the same run was in flight, so their order could not be replayed.

    This step was not dispatched and nothing was written. Make the calls one after the other, or each line of them in a branch of its
    own: `run.branch(name)`, `run.gather`, `run.map`, or `step_key=` for a call that has no order.
    """

    def __init__(self, run_id: str, tool_name: str, in_flight: str) -> None:
        super().__init__(
            f"run {run_id!r}: {tool_name!r} was asked for while {in_flight!r} is in flight in the same run; their order "
            "could not be replayed, so it was not dispatched and nothing was written. Make the calls one after the other, "
            "or each task's or thread's in a branch of its own (`with run.branch(name)`, `run.gather`, `run.map`), or give the "
            "call a step_key."
        )
        self.run_id = run_id
        self.tool_name = tool_name
        self.in_flight = in_flight


class ProgramEnded(LedgerError, RuntimeError):
    """A run was asked for something by what its program left behind: a task or thread that outlived it. Nothing was done.

    The program has returned, or an exception has left it, and the run was finished or parked. Await, join or cancel what you start.
    """

    def __init__(self, run_id: str, asked: str) -> None:
        super().__init__(
            f"run {run_id!r}: {asked!r} was asked for by a task or thread that outlived the run's program, which has returned or failed; "
            "nothing was dispatched and nothing was written. Await, join or cancel what the program starts before it ends."
        )
        self.run_id = run_id
        self.asked = asked


class EffectConflict(LedgerError, RuntimeError):
    """A tool that changes something was called inside a step that says it changes nothing. The tool was not called.

    The step would be run again after a crash, and the change with it. Declare what the step does, or call the tool beside it.
    """

    def __init__(self, run_id: str, step_tool: str, tool_name: str) -> None:
        super().__init__(
            f"run {run_id!r}: {tool_name!r} is Effect.MUTATE and was called inside of a step of {step_tool!r}, which is Effect.READ: "
            f"after a crash that step is run again, and the change would be made twice. {tool_name!r} was not called. Declare what "
            f"{step_tool!r} does, or call {tool_name!r} beside it."
        )
        self.run_id = run_id
        self.step_tool = step_tool
        self.tool_name = tool_name


class Reentered(LedgerError, RuntimeError):
    """A signal handler called the ledger while its own thread was inside of it. This call did nothing.

    Let the handler raise `SystemExit` (`sys.exit()`): the program ends, and every lease is given back as it does.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: a signal handler called the ledger while its own thread was inside of it; this call did nothing. Let the "
            "handler call sys.exit(): the program ends then, and its leases are given back."
        )


# --- steps ------------------------------------------------------------------------------------------------------------


class StepFailed(LedgerError, RuntimeError):
    """The tool raised. The error is recorded and is raised again, from the record, whenever this position is replayed.

    ``original_type`` is the qualified name of the tool's exception, ``error`` its whole record (type, message, traceback,
    cause); ``is_a("pkg.Name")`` tells whether the tool's exception was of that class or of one below it.
    """

    def __init__(
        self, run_id: str, step_number: int | None, tool_name: str, error: dict[str, object], text: str
    ) -> None:
        super().__init__(f"Tool execution failed: {text}")
        self.run_id = run_id
        self.step_number = step_number
        self.tool_name = tool_name
        self.error = error

    @property
    def original_type(self) -> str:
        return f"{self.error.get('module')}.{self.error.get('type')}"

    def is_a(self, qualified_name: str) -> bool:
        bases = self.error.get("bases")
        return isinstance(bases, list) and qualified_name in bases


class StepCancelled(StepFailed, TimeoutError):
    """The step was interrupted and the program went on: what it did outside is not known; it is recorded as cancelled."""


class StepInDoubt(LedgerError, RuntimeError):
    """A step was dispatched, its outcome is not known, and its tool declares effects that must not happen twice.

    It was not dispatched again. The run is parked as BLOCKED until somebody says what happened.
    """

    def __init__(self, run_id: str, step_number: int | None, tool_name: str, position: str, why: str) -> None:
        super().__init__(
            f"run {run_id!r}, step {step_number} ({tool_name!r}): {why}. Whether it took effect is not known, so it was not "
            "dispatched again; the run is parked as BLOCKED. Look at the receiving system, and say what you saw with "
            "ledger.resolve(run_id, step_number, output=...) or executed=False: then run the program again."
        )
        self.run_id = run_id
        self.step_number = step_number
        self.tool_name = tool_name
        self.position = position


class WaitTimeout(LedgerError, TimeoutError):
    """What a run waited for did not come in time. That is recorded: this wait never ends otherwise, whatever comes later."""

    def __init__(self, run_id: str, name: str) -> None:
        super().__init__(
            f"run {run_id!r}: {name!r} did not come in time; whatever is sent from now on is for the next wait."
        )
        self.run_id = run_id
        self.name = name


class ApprovalDenied(LedgerError, RuntimeError):
    """Somebody looked at what a run asked approval for, and said no. ``by`` and ``reason`` say who and why."""

    def __init__(self, run_id: str, name: str, by: str, reason: str) -> None:
        why = f": {reason}" if reason else ""
        super().__init__(f"run {run_id!r}: {by!r} denied {name!r}{why}. Nothing was dispatched.")
        self.run_id = run_id
        self.name = name
        self.by = by
        self.reason = reason


class ApprovalMismatch(LedgerError, ValueError):
    """An answer to a request for approval that nobody makes: another name, other arguments, or too late. Nothing was written."""


class AttemptsExhausted(RunClosed):
    """A step used up its attempts over errors, crashes and reruns: the run is a dead letter, with the whole trace kept."""

    def __init__(self, run_id: str, step_number: int | None, tool_name: str, attempts: int) -> None:
        cause = f"step {step_number}, {tool_name!r}, was dispatched {attempts} times without a result"
        done = "it was not dispatched again, and every attempt is kept in the log. Mend the cause, then ledger.redrive(run_id)."
        super().__init__(run_id, "DEAD_LETTER", cause, done)
        self.step_number = step_number
        self.tool_name = tool_name
        self.attempts = attempts


class RunawayLoopDetectedException(LedgerError, RuntimeError):
    """The breaker refused a call because the run repeats itself. The call was not dispatched; the refusal is recorded.

    ``rule``, ``reason`` and ``evidence`` (step numbers) say why.
    """

    def __init__(self, run_id: str, rule: str, reason: str, evidence: tuple[int, ...], status: str) -> None:
        super().__init__(
            f"run {run_id!r} is {status}: {reason} (steps {', '.join(map(str, evidence))}). The call was not dispatched."
        )
        self.run_id = run_id
        self.rule = rule
        self.reason = reason
        self.evidence = evidence
        self.status = status


RunawayLoopException = RunawayLoopDetectedException


class CallBlocked(LedgerError, RuntimeError):
    """The breaker refused one call because it goes on with a repetition; the run goes on. A replay is told the same.

    Its text is made to be read by a model: give it to it as the call's answer. ``rule``, ``reason`` and ``evidence`` (step numbers) say why.
    """

    def __init__(self, run_id: str, tool_name: str, rule: str, reason: str, evidence: tuple[int, ...]) -> None:
        super().__init__(
            f"{tool_name!r} was not called: {reason} (steps {', '.join(map(str, evidence))}). Do something else; the next such call ends "
            "the run."
        )
        self.run_id = run_id
        self.tool_name = tool_name
        self.rule = rule
        self.reason = reason
        self.evidence = evidence


class BudgetExceededException(LedgerError, RuntimeError):
    """A limit of the run is spent. The call was not dispatched, the refusal is recorded, and the run is a dead letter."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(f"run {run_id!r} is DEAD_LETTER: {reason}. The call was not dispatched.")
        self.run_id = run_id
        self.reason = reason


# --- input ------------------------------------------------------------------------------------------------------------


class InvalidName(LedgerError, ValueError):
    """A run id, tool name or step name is empty, too long, or holds control characters. Nothing was written."""


class InvalidArguments(LedgerError, TypeError):
    """Arguments do not fit the function or pipeline they are for. Nothing was dispatched and nothing was written."""


class InvalidPipeline(LedgerError, ValueError):
    """The steps of a pipeline do not make a graph: a cycle, an unknown dependency, a name used twice. Nothing was run."""


class UnserialisableArguments(LedgerError, TypeError):
    """An argument cannot be stored. Nothing was dispatched and nothing was written; ``path`` says where it stands."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class UnserialisableOutput(LedgerError, TypeError):
    """A tool returned what cannot be stored. The tool *was* executed, and is recorded as executed, without its output.

    It is not executed again. Return plain data, or declare the type with ``returns=`` or ``register_type``.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class PayloadTooLarge(LedgerError, ValueError):
    """Arguments, a goal or a result are larger than ``payload_limit``. Nothing was dispatched and nothing was written.

    Store large things elsewhere and pass a reference. (An output that is too large is an `UnserialisableOutput`: its tool has run.)
    """

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what}: {size} bytes, and the limit is {limit} (payload_limit=). Store large things elsewhere and pass a reference."
        )
        self.size = size
        self.limit = limit


# --- heads and signatures ---------------------------------------------------------------------------------------------


class BadNote(LedgerError, ValueError):
    """A text is no tree head, no signed note or no key, or is not signed by the key that it should be signed by. It proves nothing.

    ``why`` says what is wrong with it.
    """

    def __init__(self, why: str, text: str = "") -> None:
        is_secret = "PRIVATE" in text  # a private key, given where another text belongs
        begins = f" (it begins {text[:60]!r})" if text and not is_secret else ""
        super().__init__(
            f"this proves nothing: {why}{begins}. Check that it is the text as it was written, and the right key."
        )
        self.why = why


class BadBundle(LedgerError, ValueError):
    """A file is no bundle of a run, or not a whole one, or one of a newer format. Nothing was taken out of it.

    ``line`` is the number of its line that is wrong, from 1, and ``why`` says what is wrong with it.
    """

    def __init__(self, path: str, line: int, why: str) -> None:
        super().__init__(
            f"{path}, line {line}: {why}. This is no whole bundle of a run, and nothing was taken out of it; get the file anew."
        )
        self.path = path
        self.line = line
        self.why = why


class HeadRefused(LedgerError, RuntimeError):
    """The signer has signed another past of this run: its head is not signed, and nothing was written. Somebody changed the ledger.

    Keep the database and the log of heads as they are, and look with ``verify --against``. ``why`` says in what the two differ.
    """

    def __init__(self, run_id: str, why: str) -> None:
        super().__init__(
            f"the head of run {run_id!r} was not signed: {why}. Nothing was written. Keep the database and the log of heads as they are; "
            "`agent-run-ledger verify --against` says what differs. A ledger that was restored needs a new log."
        )
        self.run_id = run_id
        self.why = why


class InvalidPrivateList(LedgerError, ValueError):
    """The list of what is private, which `$AGENT_RUN_LEDGER_PRIVATE` names, cannot be used. Nothing is shown without it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the private list {path!r} cannot be used, and nothing is shown without it: {why}")
        self.path = path


# --- stores -----------------------------------------------------------------------------------------------------------


class StoreError(LedgerError):
    """The store could not do what was asked."""


class SchemaTooNew(StoreError):
    """The database was written by a newer version of this library. It was not changed. Upgrade the library."""


class NotALedger(StoreError):
    """The file is not a ledger of this library. It was not changed. Check the path."""


class KeyUnavailable(StoreError):
    """What the run has kept is encrypted, and its key is not here. Nothing was written. Open the ledger with `encryption=` that has the key.

    Without it `runs` lists the run, and `verify` checks all but what is encrypted.
    """

    def __init__(self, run_id: str, key_id: str | None, why: str = "the ledger was opened without encryption=") -> None:
        which = f"under the key {key_id!r}" if key_id is not None else "under a key of unknown name"
        super().__init__(
            f"run {run_id!r} is encrypted {which}, which is not here ({why}); nothing was written. Open the ledger with the encryption= "
            "that has it (on the command line: --keys MODULE:NAME)."
        )
        self.run_id = run_id
        self.key_id = key_id


class StoreCorrupt(StoreError):
    """The database is damaged or truncated. It was not changed. Restore it from a backup; keep this file for inspection."""


class StoreReadOnly(StoreError):
    """The database cannot be written: read-only file, folder or disk. Nothing was changed. Check the rights."""


class StoreFull(StoreError):
    """The disk is full. What was not acknowledged was not written; make room and call again."""


class StoreBusy(StoreError):
    """Another process kept the database locked for longer than the busy timeout. Nothing was written. Call again."""


class BackupRefused(StoreError):
    """A backup was not made, or not restored, as it was asked for: something stands there, or the copy does not verify. Nothing was replaced."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or is closed. What was not acknowledged may not be written; open it and look."""


class NotDurableWarning(UserWarning):
    """This ledger lives in memory: it is gone with the process."""


class UndeclaredEffectWarning(UserWarning):
    """A step in doubt was dispatched again although its tool does not declare what a second dispatch does."""


class ReplayStalledWarning(UserWarning):
    """A replay waited for a call that is recorded and that the program does not make, and went on in another order than before."""


class PlainDataWarning(UserWarning):
    """An object of an undeclared class was stored as plain data, and plain data is what the caller gets."""
