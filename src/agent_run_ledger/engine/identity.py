"""Whether a call is the one that is recorded at its position, and where the two differ."""

from __future__ import annotations

from agent_run_ledger.engine.call import Call
from agent_run_ledger.engine.history import Missed, StepHistory
from agent_run_ledger.engine.live import LiveRun
from agent_run_ledger.errors import IntentDrift, ReplayDivergence
from agent_run_ledger.rules import canonical, digests


def lacks_arguments(call: Call, step: StepHistory) -> bool:
    """Whether it takes recorded arguments that are not in memory to decide: those that are not the call's, byte for byte."""
    is_left_out = step.arguments is None and step.digest is not None
    return is_left_out and step.digest != call.digest and step.seq not in call.fetched


def recorded_arguments(call: Call, recorded: StepHistory | Missed) -> bytes | None:
    """The recorded arguments, from wherever they are; None where they were erased."""
    if recorded.arguments is not None:
        return recorded.arguments
    return call.stored if recorded.digest == call.digest else call.fetched.get(recorded.seq)


def divergence(run: LiveRun, call: Call, step: StepHistory) -> ReplayDivergence | None:
    """What the program is told where it asks for another call than the one that stands at this position."""
    if step.tool == call.tool and call.after != step.dependencies:
        recorded, asked = f"{step.tool!r} after {list(step.dependencies)}", f"{call.tool!r} after {list(call.after)}"
        return ReplayDivergence(run.run_id, step.position, recorded, asked)
    return difference(run, call, step)


def difference(run: LiveRun, call: Call, recorded: StepHistory | Missed) -> ReplayDivergence | None:
    """What the program is told where tool or arguments are others than those that are recorded."""
    is_same_tool = recorded.tool == call.tool
    if is_same_tool and (recorded.digest == call.digest if recorded.digest else _is_same_input(run, call, recorded)):
        return None
    from agent_run_ledger.rules import difference as differences  # only who has gone wrong needs it

    path = None
    arguments = recorded_arguments(call, recorded)
    if is_same_tool and arguments is not None:
        if call.options.identity is not None and _is_identical(call, arguments):
            return None
        differs_at = differences.difference(arguments, call.stored)
        path = _shown(differs_at) if differs_at is not None else None
    names = run.run_id, recorded.position, repr(recorded.tool), repr(call.tool)
    if isinstance(recorded, StepHistory) and recorded.outcome is None:
        stored = arguments.decode() if arguments is not None else "(erased)"
        return IntentDrift(*names, path, f"{recorded.tool}({stored})", f"{recorded.tool}({_shown(stored)})")
    said = _KEY_IS_USED.format(call.key) if call.key is not None else ""
    return ReplayDivergence(*names, path, said + differences.hint(arguments, call.stored))


def _shown(text: str) -> str:
    """Arguments, or a way through them, as an error may show them."""
    from agent_run_ledger.rules.redaction import Redactor  # only who has gone wrong needs it

    return Redactor().text(text)


_KEY_IS_USED = " The position is that of step_key {!r}, which names the recorded call: give another call another key."


def _is_same_input(run: LiveRun, call: Call, recorded: StepHistory | Missed) -> bool:
    return recorded.input == digests.salted(run.history.secret, call.stored)


def _is_identical(call: Call, recorded: bytes) -> bool:
    """Whether the two calls are one by what their tool says identifies a call."""
    identity = call.options.identity
    assert identity is not None
    told = [canonical.encode(identity(canonical.decode(stored))) for stored in (recorded, call.stored)]
    return told[0] == told[1]
