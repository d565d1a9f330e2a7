"""The commands that act on a run: each shows what it is about to do and what the next start would then do, and does it with --yes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    Event,
    IllegalTransition,
    RunNotFound,
    RunState,
    StepRecord,
    StepState,
)
from agent_run_ledger.cli.preview import Act, perform, seen_for
from agent_run_ledger.cli.shell import UsageError, command_for, data_of, json_given, opened_to_look, stored
from agent_run_ledger.cli.terminal import counted, since, table, when
from agent_run_ledger.cli.tracing import facts_of, traced, warnings_about
from agent_run_ledger.cli.waiting import waits_of

if TYPE_CHECKING:
    from agent_run_ledger.model import ApprovalRequest, Inspection

_LIVE = frozenset(state for state in RunState if not state.is_terminal)


# --- a step in doubt --------------------------------------------------------------------------------------------------


def resolve(given: argparse.Namespace) -> int:
    run_id, number = given.run_id, given.step_number
    value = json_given("--output", given.output) if given.output is not None else None
    output = stored("--output", value) if given.output is not None else None
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, "RESOLVE", _LIVE - {RunState.QUARANTINE})
        step, planned = _step(seen, number), ledger.plan(run_id)
        lines = [line for line in ledger.trace(run_id) if line.step_number == number]
    ours = [each for each in planned if each.step_number == number]
    if not ours:
        raise IllegalTransition(seen.run.status, f"RESOLVE of step {number}, which is {step.state} already", run_id)
    if step.tool_name in WAITS:
        raise UsageError(f"step {number} of run {run_id!r} calls nobody, it waits: {WAITS[step.tool_name]}")
    others = [each for each in planned if each.step_number != number]
    again = [replace(each, action="dispatch", reason=_ABSENT, not_before=None) for each in ours]

    def deed(opened: AgentRunLedger) -> None:
        said = {"executed": False} if given.not_executed else {"output": value}
        opened.resolve(run_id, number, **said, by=given.by, reason=given.reason)

    since_when = next((line.at for line in reversed(lines) if line.event == "dispatched"), step.created_at)
    act = Act(
        f"say of step {number} ({step.tool_name!r}) of run {run_id!r} that it "
        + ("did not take effect" if given.not_executed else "took effect and returned the output below"),
        seen,
        deed,
        lambda opened: _step(opened.inspect(run_id), number).state_version != step.state_version,
        [*again, *others] if given.not_executed else others,
    )
    act.facts = {
        "tool": f"{step.tool_name}  ({step.effect or 'no effect declared'})",
        "arguments": step.arguments_json,
        "key": step.idempotency_key,
        "in doubt": f"since {when(since_when)} ({since(since_when)})",
        "attempts": step.attempts,
        "output": output,
    }
    act.details = traced(lines)
    act.data = {
        "step": data_of(step),
        "in_doubt_since": since_when,
        "output": output,
        "trace": [data_of(line) for line in lines],
    }
    return perform(given, act)


_ABSENT = "an operator has said that it did not take effect"

WAITS = {
    "run.sleep": "it is over when its time has come",
    "run.wait_for": "`signal` sends what it waits for",
    "run.approve": "`approve` or `deny` answers it",
}
"""Steps that call nobody, and what ends them."""


def _step(seen: Inspection, number: int) -> StepRecord:
    for step in seen.steps:
        if step.step_number == number:
            return step
    raise UsageError(
        f"run {seen.run.run_id!r} has no step {number}: it has {counted(len(seen.steps), 'step', 'steps')}"
    )


# --- a whole run ------------------------------------------------------------------------------------------------------


def release(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, Event.RELEASE, {RunState.QUARANTINE})
        planned = ledger.plan(given.run_id)
    act = Act(
        f"let run {given.run_id!r} out of quarantine",
        seen,
        lambda opened: opened.release(given.run_id, by=given.by, reason=given.reason),
        lambda opened: opened.get_run(given.run_id).status != RunState.QUARANTINE,
        planned,
    )
    return perform(given, act)


def cancel(given: argparse.Namespace) -> int:
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, Event.CANCEL, _LIVE)
    act = Act(
        f"end run {given.run_id!r}{' and the runs that it has begun' if given.children else ''} as CANCELLED",
        seen,
        lambda opened: opened.cancel(given.run_id, children=given.children, by=given.by, reason=given.reason),
        lambda opened: opened.get_run(given.run_id).status == RunState.CANCELLED,
        "Nothing starts it again.",
    )
    if seen.in_doubt and not seen.is_owner_seen:
        numbers = ", ".join(map(str, seen.in_doubt))
        act.warnings.append(f"! In doubt: step {numbers}. What it did outside, if it did it, is not undone.")
    return perform(given, act)


def redrive(given: argparse.Namespace) -> int:
    run_id = given.run_id
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, "REDRIVE", {RunState.FAILED, RunState.DEAD_LETTER})
        _require_free(ledger, given.new_run_id)
    undone = [step for step in seen.steps if step.state != StepState.COMPLETED]
    act = Act(
        f"make a new run{_named(given)} from run {run_id!r}, with all {counted(len(seen.steps), 'step', 'steps')} of it",
        seen,
        lambda opened: opened.redrive(
            run_id,
            max_steps=given.max_steps,
            budget=Budget(tokens=given.max_tokens, usd=given.max_usd),
            by=given.by,
            reason=given.reason,
            new_run_id=given.new_run_id,
        ),
        lambda opened: True,
        f"When {_started(seen)}, recorded outcomes are handed out without a call; what has none goes on as its "
        "effect says, with the same key and a fresh count of attempts.",
        facts={
            "limit of steps": given.max_steps,
            "limit of tokens": given.max_tokens,
            "limit of US dollars": given.max_usd,
        },
        asks_owner=False,
    )
    if undone:
        rows = ((step.step_number, step.tool_name, step.state, step.error_message) for step in undone)
        act.details = "Not completed:\n" + table(("STEP", "TOOL", "STATE", "ERROR"), rows, stretch=3, is_wrapped=True)
    limits = {"max_steps": given.max_steps, "max_tokens": given.max_tokens, "max_usd": given.max_usd}
    act.data = limits | {"not_completed": [step.step_number for step in undone]}
    return perform(given, act)


def fork(given: argparse.Namespace) -> int:
    run_id, first = given.run_id, given.from_step
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, "FORK", list(RunState))
        _require_free(ledger, given.new_run_id)
    if first > len(seen.steps) + 1:
        raise UsageError(
            f"run {run_id!r} has {counted(len(seen.steps), 'step', 'steps')}: --from-step is at most {len(seen.steps) + 1}"
        )
    left = [step for step in seen.steps if step.step_number >= first]
    act = Act(
        f"make a new run{_named(given)} from run {run_id!r}, with the {counted(first - 1, 'step', 'steps')} before step {first}",
        seen,
        lambda opened: opened.fork(run_id, first, by=given.by, reason=given.reason, new_run_id=given.new_run_id),
        lambda opened: True,
        f"When {_started(seen)}, the outcomes of {counted(first - 1, 'step', 'steps')} are handed out without a "
        f"call, and it goes on at step {first}.",
        asks_owner=False,
    )
    if left:
        rows = (
            (step.step_number, step.tool_name, step.state, step.effect or "undeclared", step.arguments_json)
            for step in left
        )
        act.details = "Not carried:\n" + table(("STEP", "TOOL", "STATE", "EFFECT", "ARGUMENTS"), rows, stretch=4)
    if changing := [str(step.step_number) for step in left if step.effect != "READ"]:
        act.warnings.append(
            f"! Step {', '.join(changing)} may have changed something already. The new run makes such calls with keys of its own."
        )
    act.data = {"from_step": first, "not_carried": [step.step_number for step in left]}
    return perform(given, act)


def _require_free(ledger: AgentRunLedger, run_id: str | None) -> None:
    """Raises `UsageError` where there is a run of that name."""
    if run_id is None:
        return
    with suppress(RunNotFound):
        ledger.get_run(run_id)
        raise UsageError(f"there is a run {run_id!r} already; nothing was written")


def _started(seen: Inspection) -> str:
    """How a run begins that is made from this one."""
    if seen.run.queue is None:
        return "its program is started with the new run id"
    return f"`wake` has a worker of queue {seen.run.queue!r} begin it"


def _named(given: argparse.Namespace) -> str:
    return f" {given.new_run_id!r}" if given.new_run_id is not None else ""


# --- what a run waits for ---------------------------------------------------------------------------------------------


_SENT = "Sent: its program takes it, at once where it waits for it in some process, else when it is started again"


def signal(given: argparse.Namespace) -> int:
    payload = json_given("--payload", given.payload) if given.payload is not None else None
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, "SIGNAL", _LIVE)
        waits = waits_of(ledger, seen.run, seen.steps)
    is_awaited = any(wait.kind == "signal" and given.name in wait.words for wait in waits)
    act = Act(
        f"send run {given.run_id!r} the signal {given.name!r}",
        seen,
        lambda opened: opened.signal(given.run_id, given.name, payload, by=given.by),
        lambda opened: False,
        "The run waits for it."
        if is_awaited
        else "The next wait_for of this name takes it; nothing of that name is waited for now.",
        facts={"payload": stored("--payload", payload)},
        asks_owner=False,
        asked=_SENT,
    )
    act.data = {"name": given.name, "payload": payload}
    return perform(given, act)


def approve(given: argparse.Namespace) -> int:
    return _decide(given, "approve")


def deny(given: argparse.Namespace) -> int:
    return _decide(given, "deny")


def _decide(given: argparse.Namespace, verb: str) -> int:
    run_id, name, digest = given.run_id, given.name, given.digest
    with opened_to_look(given) as ledger:
        seen = seen_for(given, ledger, verb.upper(), _LIVE)
        request = _request(ledger.approvals(run_id), given)
    act = Act(
        f"{verb} {name!r} of run {run_id!r}, with exactly these arguments",
        seen,
        lambda opened: getattr(opened, verb)(
            run_id, name, digest, position=request.position, by=given.by, reason=given.reason
        ),
        lambda opened: False,
        "Its program goes on with these arguments." if verb == "approve" else "Its program gets ApprovalDenied.",
        facts={what: value for what, value in facts_of(request) if what not in ("run", "name")},
        columns=None,
        asks_owner=False,
        asked=_SENT,
        warnings=list(warnings_about(request)),
        data={"approval": data_of(request)},
    )
    return perform(given, act)


def _request(found: Sequence[ApprovalRequest], given: argparse.Namespace) -> ApprovalRequest:
    """What waits under this name with this digest. Raises `UsageError` where nothing does."""
    named = [each for each in found if each.name == given.name]
    for each in named:
        if each.digest == given.digest:
            return each
    if not named:
        waiting = (
            f"what waits is {', '.join(repr(each.name) for each in found)}"
            if found
            else "nothing of it waits for approval"
        )
        raise UsageError(f"run {given.run_id!r} does not wait for the approval {given.name!r}; {waiting}")
    raise UsageError(
        f"the arguments of {given.name!r} in run {given.run_id!r} have another digest than {given.digest!r}: they are not what was looked "
        f"at. Nothing was written; look again: {command_for(given, 'approvals', given.run_id)}"
    )
