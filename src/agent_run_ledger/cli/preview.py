"""Look, ask, do: what a command that writes shows before it does anything, and the deed itself with --yes."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from agent_run_ledger import AgentRunLedger, IllegalTransition, RunMoved, RunState
from agent_run_ledger.cli.shell import OK, PREVIEWED, command_for, data_of, opened, run_data
from agent_run_ledger.cli.terminal import as_json, labelled, plain
from agent_run_ledger.cli.tracing import next_start

if TYPE_CHECKING:
    from agent_run_ledger.model import Inspection, PlannedAction

_COLUMNS = 400
"""How much of a step's arguments or output a preview shows; `--json` shows them whole."""

Deed = Callable[[AgentRunLedger], str | None]


@dataclass(slots=True)
class Act:
    """What somebody is about to do to a run."""

    does: str
    """In one line, ending without a full stop: `resolve step 3 of run 'x': it took effect`."""
    seen: Inspection
    deed: Deed
    """Does it, on a ledger that is open for writing; gives the id of the run that it made, if it made one."""
    is_done: Callable[[AgentRunLedger], bool]
    """Whether the log has it; where somebody else owns the run it may still wait in the inbox."""
    then: list[PlannedAction] | str
    """What the next start would then do; a sentence where it is not about steps."""
    _: KW_ONLY
    asks_owner: bool = True
    """Whether it is the owner of the run, where there is one, who does it."""
    asked: str = "Asked: the run's owner takes this into the log, unless the run ends first"
    """What is said where the log has it not yet."""
    facts: dict[str, object] = field(default_factory=dict)
    """What a person has to see before, by name."""
    columns: int | None = _COLUMNS
    """How many columns of each fact are shown; None: all, where somebody vouches for the exact bytes."""
    details: str = ""
    """A table to be shown below the facts."""
    warnings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """What `--json` shows beside."""


def perform(given: argparse.Namespace, act: Act) -> int:
    """Show the preview, and do it if that is wanted."""
    record = act.seen.run
    data = {
        "does": act.does,
        "run": run_data(record),
        "by": given.by,
        "reason": getattr(given, "reason", ""),
        **act.data,
        "next_start": act.then if isinstance(act.then, str) else [data_of(each) for each in act.then],
        "is_done": False,
        "is_asked": False,
        "new_run_id": None,
    }
    if not given.json:
        print(_preview(given, act))
        print()
    if not (given.yes or (not given.json and is_confirmed(given))):
        print(as_json(data) if given.json else "Nothing was written. With --yes it is done.")
        return PREVIEWED
    with opened(given) as ledger:
        made = act.deed(ledger)
        is_done = made is not None or act.is_done(ledger)
        after = ledger.get_run(made or record.run_id)
        planned = ledger.plan(after.run_id)
    if given.json:
        data |= {"run": run_data(after), "next_start": [data_of(each) for each in planned]}
        print(as_json(data | {"is_done": is_done, "is_asked": not is_done, "new_run_id": made}))
    elif made is not None:
        print(f"Done: run {made!r} was made and not started.\n\n{next_start(after, planned)}")
    elif is_done:
        print(f"Done: run {record.run_id!r} is {after.status}.")
    else:
        print(f"{act.asked}. See: {command_for(given, 'trace', record.run_id)}")
    return OK


def _preview(given: argparse.Namespace, act: Act) -> str:
    record = act.seen.run
    facts = [
        ("run", f"{record.run_id}  ({record.status})"),
        ("cause", record.cause),
        *act.facts.items(),
        ("by", given.by),
        ("reason", getattr(given, "reason", None) or None),
    ]
    parts = [f"This will {plain(act.does)}.", labelled(facts, columns=act.columns)]
    if act.details:
        parts.append(act.details)
    if act.asks_owner and act.seen.is_owner_seen:
        act.warnings.append(
            f"! {record.owner!r} works on this run now: it is asked to, and does it when no step of it is in flight."
        )
    parts += ["\n".join(act.warnings)] if act.warnings else []
    parts.append(plain(act.then) if isinstance(act.then, str) else next_start(record, act.then))
    return "\n\n".join(parts)


def is_confirmed(given: argparse.Namespace) -> bool:
    """Whether a person at a terminal says yes."""
    if "-" in (getattr(given, "output", None), getattr(given, "payload", None)):
        return False  # standard input was read for something else
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input("Do it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def seen_for(given: argparse.Namespace, ledger: AgentRunLedger, what: str, states: Collection[RunState]) -> Inspection:
    """The run that is to be acted upon. Raises `IllegalTransition` where it is in a state that does not take this, and `RunMoved`."""
    if given.by is None:
        given.by = who()
    seen = ledger.inspect(given.run_id)
    if seen.run.moved_to is not None and what != "FORK":  # which takes nothing from it but what stands here
        raise RunMoved(given.run_id, seen.run.moved_to)
    state = RunState(seen.run.status)
    if state not in states:
        raise IllegalTransition(state, what, given.run_id)
    return seen


def who() -> str:
    """Who is at the keyboard: `ann@build-7`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a number without a name, as in many containers
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
