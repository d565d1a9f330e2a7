"""What every command shares with the shell that called it: exit statuses, the ledger that is meant, JSON, commands to paste."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import fields
from typing import Any, Literal

import agent_run_ledger
from agent_run_ledger.cli.terminal import escaped, plain
from agent_run_ledger.redacting import without_passwords

OK, PROBLEM, ERROR, PREVIEWED, INTERRUPTED, TERMINATED, PIPE_CLOSED = 0, 1, 2, 3, 130, 143, 141
VARIABLE = "AGENT_RUN_LEDGER_DB"
KEYS_VARIABLE = "AGENT_RUN_LEDGER_KEYS"


_LOOK_SECONDS = 5.0
"""How long a server that cannot be reached keeps somebody waiting who only looks."""


class UsageError(Exception):
    """The command line asks for what cannot be done."""


def is_address(place: str) -> bool:
    """Whether a ledger is a database on a server, and not a file."""
    return place.startswith(("postgresql://", "postgres://"))


def path_of(given: argparse.Namespace) -> str:
    """The ledger that is meant. Raises `UsageError` that lists those in the current folder."""
    path: str | None = given.db if given.db is not None else os.environ.get(VARIABLE)
    if path == ":memory:":
        raise UsageError("a ledger in memory is seen by its own process only; give the path of a file")
    if path:
        return path
    from agent_run_ledger.ledger import ledgers_in

    found = ledgers_in(os.curdir)
    where = f"ledgers in this folder: {', '.join(found)}" if found else "there is no ledger in this folder"
    raise UsageError(f"which ledger? Give --db PLACE or set {VARIABLE}; {where}")


def opened_to_look(given: argparse.Namespace) -> agent_run_ledger.AgentRunLedger:
    """The ledger that is meant, opened read-only."""
    return agent_run_ledger.AgentRunLedger.open_read_only(
        path_of(given), outage_seconds=_LOOK_SECONDS, encryption=encryption_of(given)
    )


def opened(given: argparse.Namespace) -> agent_run_ledger.AgentRunLedger:
    """The ledger that is meant, opened for writing."""
    return agent_run_ledger.AgentRunLedger(path_of(given), encryption=encryption_of(given))


def encryption_of(given: argparse.Namespace) -> agent_run_ledger.Encryption | None:
    """What holds the keys of encrypted runs, where somebody says where it is. Raises `UsageError`."""
    place: str | None = given.keys if given.keys is not None else os.environ.get(KEYS_VARIABLE)
    if not place:
        return None
    from agent_run_ledger.cli.loading import made_by

    found: agent_run_ledger.Encryption = made_by(place, agent_run_ledger.Encryption)
    return found


def command_for(given: argparse.Namespace, name: str, *words: str, **options: str | Literal[True]) -> str:
    """A command to paste, about the ledger that this one was about: `agent-run-ledger --db agent.db show --steps 3 october`.

    A password is left out of it.
    """
    line = ["agent-run-ledger"]
    if given.db is not None:
        line += ["--db", _quoted(without_passwords(given.db) if is_address(given.db) else given.db)]
    line.append(name)
    for option, value in options.items():
        line.append(f"--{option.replace('_', '-')}")
        if value is not True:
            line.append(_quoted(value))
    if any(word.startswith("-") for word in words):
        line.append("--")  # what follows is no option, whatever it looks like
    return " ".join([*line, *map(_quoted, words)])


def _quoted(word: str) -> str:
    """One word of a shell. What a terminal would obey or hide is spelt out in the way of bash."""
    if escaped(word) == word:
        return shlex.quote(plain(word))
    return "$'" + plain(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def data_of(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, one level deep."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def run_data(record: agent_run_ledger.RunRecord) -> dict[str, Any]:
    """A run for `--json`: the fields of `RunRecord`, with the result as the ledger stores it, in JSON with its tags."""
    from agent_run_ledger.ledger import as_stored

    return data_of(record) | {"spent_usd": str(record.spent_usd), "result": json.loads(as_stored(record.result))}


def json_given(option: str, text: str) -> Any:
    """The value of an option that takes JSON, `@FILE` or `-`. Raises `UsageError` that says what is wrong with it."""
    try:
        if text == "-":
            text = sys.stdin.read() if sys.stdin is not None else ""
        elif text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else "it is nested too deep"
        raise UsageError(f"{option} is no JSON: {why}. A text stands in double quotes: {option} '\"sent\"'") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} stands in one object twice")
    return made


def stored(option: str, value: Any) -> str:
    """The value of an option as the log will have it. Raises `UsageError` where it cannot be stored."""
    from agent_run_ledger.ledger import as_stored

    try:
        return as_stored(value)
    except ValueError as error:
        raise UsageError(f"{option} cannot be stored: {error}") from None
