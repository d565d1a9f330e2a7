"""The command that keeps a program running: its options, its log, its exit statuses."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from agent_run_ledger.cli.options import number, seconds
from agent_run_ledger.cli.shell import VARIABLE, UsageError
from agent_run_ledger.cli.terminal import as_json_line, plain
from agent_run_ledger.words import MIN_FREE

if TYPE_CHECKING:
    from agent_run_ledger.supervisor import Line, Program, Settings

_TEXT = (
    "Keep a program running: start it, start it again when it dies, and end it in good order on SIGTERM or Ctrl-C. Works as process 1 "
    "of a container. What happens is logged to standard error, a line an event; with --json each line is a JSON object."
)
_STATUS = """\
exit status:
  0         CMD ended with status 0 (with --always it is started again then, too)
  CMD's own after SIGTERM or SIGINT: what CMD ended with; 128+N if signal N ended it, so 137 if it had to be killed
  128+N     signal N came while CMD was not running
  2         the command line is wrong
  125       CMD died --max-deaths times within --within seconds
  126, 127  CMD could not be started the first time: not executable, not found

signals: SIGTERM and SIGINT are handed on to CMD, which has --grace seconds to end; a second one kills at once. SIGHUP, SIGUSR1,
SIGUSR2, SIGQUIT and SIGWINCH are handed on; where there is a terminal, SIGHUP ends like SIGTERM. What CMD leaves behind is ended
with it."""
_SUFFIXES = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command by `add_command(name, module, text, example)`, which returns the command's parser with --db and --json."""
    parser = add_command(
        "supervise", "supervise", _TEXT, "supervise --recover billing.agent -- python -m billing.agent"
    )
    parser.usage = "agent-run-ledger supervise [options] -- CMD [ARGUMENT ...]"
    parser.epilog = f"{parser.epilog}\n\n{_STATUS}"

    before = parser.add_argument_group("before each start")
    before.add_argument(
        "--recover",
        dest="before",
        action="append",
        type=_recovery,
        metavar="MODULE[:LEDGER]",
        help="recover this program's runs, by `agent-run-ledger recover`",
    )
    before.add_argument(
        "--before",
        action="append",
        type=_command,
        metavar="COMMAND",
        help="run this, one string of shell words; it may fail. May be given several times, mixed with --recover",
    )
    _add_seconds(before, "--before-timeout", "how long each of them may take (default: 600)")

    restarts = parser.add_argument_group("restarts")
    restarts.add_argument("--always", action="store_true", help="start CMD again after status 0, too")
    _add_seconds(
        restarts, "--backoff-base", "the wait before restart i (from 0) is drawn from 0 to BASE * 2**i (default: 1)"
    )
    _add_seconds(restarts, "--backoff-cap", "but is never longer than this (default: 30)")
    _add_seconds(restarts, "--healthy", "having lived this long, CMD has the first wait again (default: 60)")
    restarts.add_argument(
        "--max-deaths", metavar="N", type=number, help="give up at this many deaths (default: 10) ..."
    )
    _add_seconds(restarts, "--within", "... in this time (default: 300)")

    ending = parser.add_argument_group("the end")
    _add_seconds(ending, "--grace", "how long CMD has to end before it is killed (default: 25)")

    disk = parser.add_argument_group("the disk", "looked at where a ledger is named, by --db or the environment")
    disk.add_argument(
        "--min-free",
        type=_size,
        metavar="SIZE",
        help=f"say so when less than this is free, like 64M or 1G; CMD's ledgers are told by ${MIN_FREE} and begin no new step then "
        "(default: that variable, else 64M)",
    )
    disk.add_argument(
        "--max-wal", type=_size, metavar="SIZE", help="say so when the ledger's log is longer (default: 64M)"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD", help="the program and its arguments")


def _add_seconds(group: argparse._ArgumentGroup, option: str, text: str) -> None:
    group.add_argument(option, type=seconds, metavar="SECONDS", help=text)


def supervise(given: argparse.Namespace) -> int:
    """Keep CMD running, and return the exit status."""
    import signal

    if not hasattr(signal, "sigtimedwait"):
        raise UsageError("supervise needs Linux; on this system use the service manager it has")
    from agent_run_ledger import supervisor

    return supervisor.supervise(_settings(given), _log_lines if given.json else _log_text)


def _settings(given: argparse.Namespace) -> Settings:
    from agent_run_ledger.model import RetryPolicy
    from agent_run_ledger.supervisor import Program, Settings

    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    if not words or not words[0]:
        raise UsageError("supervise what? Give the command behind --: agent-run-ledger supervise -- python agent.py")
    least = given.min_free
    if least is None and (text := os.environ.get(MIN_FREE)):
        try:
            least = _size(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{MIN_FREE}: {error}") from None
    path = given.db if given.db is not None else os.environ.get(VARIABLE)
    optional = {
        "before_seconds": given.before_timeout,
        "grace_seconds": given.grace,
        "healthy_seconds": given.healthy,
        "most_deaths": given.max_deaths,
        "within_seconds": given.within,
        "least_free_bytes": least,
        "longest_log_bytes": given.max_wal,
    }
    base = 1.0 if given.backoff_base is None else given.backoff_base
    cap = 30.0 if given.backoff_cap is None else given.backoff_cap
    return Settings(
        Program(words[0], tuple(words)),
        before=tuple(given.before or ()),
        always=given.always,
        backoff=RetryPolicy(base=base, cap=cap),
        database=path if path and path != ":memory:" and "://" not in path else None,
        **{name: value for name, value in optional.items() if value is not None},
    )


# --- the log ----------------------------------------------------------------------------------------------------------


def _log_text(line: Line) -> None:
    _write(f"supervise: {plain(line.text)}\n")


def _log_lines(line: Line) -> None:
    _write(as_json_line({"at": time.time(), "event": line.event, "text": line.text, **line.facts}) + "\n")


def _write(line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read the log has gone; the program is not to die of that
        sys.stderr.write(line)
        sys.stderr.flush()


# --- values of options ------------------------------------------------------------------------------------------------


def _recovery(module: str) -> Program:
    from agent_run_ledger.supervisor import Program

    return Program(f"recover {module}", (sys.executable, "-m", "agent_run_ledger", "recover", module))


def _command(text: str) -> Program:
    from agent_run_ledger.supervisor import Program

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{plain(text)!r} are no shell words: {error}") from None
    if not words or not words[0]:
        raise argparse.ArgumentTypeError("a command is needed, not an empty string")
    return Program(words[0], tuple(words))


def _size(text: str) -> int:
    """Bytes: a whole number, or one with K, M, G or T behind it, each 1024 times the one before."""
    number, factor = (text[:-1], _SUFFIXES[text[-1].upper()]) if text[-1:].upper() in _SUFFIXES else (text, 1)
    if not number.isascii() or not number.isdecimal() or len(number) > 18:
        raise argparse.ArgumentTypeError(f"a size like 500000, 64M or 1G is needed, not {plain(text)[:60]!r}")
    return int(number) * factor
