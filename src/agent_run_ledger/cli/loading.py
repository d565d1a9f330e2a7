"""Finding a user's ledger by `MODULE[:LEDGER]`: the module is imported as `python -m` would find it."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any

import agent_run_ledger
from agent_run_ledger.cli.shell import UsageError


def ledger_of(place: str) -> agent_run_ledger.AgentRunLedger:
    """The ledger that a module makes when it is imported: `billing.agent`, or `billing.agent:ledger` where there are several.

    Raises `UsageError` in one line: no such module, an error while it is imported, no ledger in it, or several of them.
    """
    ledger: agent_run_ledger.AgentRunLedger = made_by(place, agent_run_ledger.AgentRunLedger)
    return ledger


def made_by(place: str, *classes: type) -> Any:
    """The one object of these classes at the top level of a module, or the one that `MODULE:NAME` names. Raises as `ledger_of`."""
    name, _, attribute = place.partition(":")
    module = _imported(name)
    wanted = " and no ".join(each.__name__ for each in classes)
    if attribute:
        return _named(module, attribute, classes, wanted)
    found = {id(value): key for key, value in reversed(vars(module).items()) if isinstance(value, classes)}
    names = sorted(found.values())
    if len(names) == 1:
        return vars(module)[names[0]]
    if names:
        raise UsageError(
            f"module {name!r} has several ledgers: say which, like {name}:{names[0]}; they are {', '.join(names)}"
        )
    pipelines = sorted(key for key, value in vars(module).items() if isinstance(value, agent_run_ledger.RunLedger))
    more = f"; {', '.join(pipelines)} is a pipeline: run its program again, and it goes on" if pipelines else ""
    raise UsageError(f"module {name!r} has no {wanted} at its top level{more}")


def _imported(name: str) -> ModuleType:
    if name.endswith(".py"):
        raise UsageError(f"{name!r} is a file: give the module, {name[:-3].strip('./').replace('/', '.')!r}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is no name of a module")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name!r} in this folder or where Python looks for modules") from None
        raise UsageError(_failed(name, error)) from error
    except (Exception, SystemExit) as error:
        raise UsageError(_failed(name, error)) from error


def _failed(name: str, error: BaseException) -> str:
    """What went wrong while a module was imported, and where."""
    where = ""
    if frames := traceback.extract_tb(error.__traceback__):
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"module {name!r} cannot be imported: {type(error).__name__}: {error}{where}"


def _named(module: ModuleType, path: str, classes: tuple[type, ...], wanted: str) -> Any:
    value: Any = module
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise UsageError(f"module {module.__name__!r} has no {path!r}") from None
    if not isinstance(value, classes):
        raise UsageError(f"{module.__name__}:{path} is no {wanted} but a {type(value).__name__}")
    return value
