"""Which commands there are, what each takes, and how the program ends. What they do stands in the other modules of this folder."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import NoReturn

import agent_run_ledger
from agent_run_ledger.cli import bundles, fleet, places, preflight, proving, supervise
from agent_run_ledger.cli.options import age, count, money, number, seconds
from agent_run_ledger.cli.shell import ERROR, INTERRUPTED, KEYS_VARIABLE, PIPE_CLOSED, VARIABLE, UsageError
from agent_run_ledger.cli.terminal import plain, showing, writable
from agent_run_ledger.redacting import of_this_process, without_passwords

_EPILOG = f"""\
examples:
  agent-run-ledger demo --keep demo
  agent-run-ledger --db demo/agent.db runs --status DEAD_LETTER
  agent-run-ledger --db demo/agent.db show reconcile-2026-10
  agent-run-ledger --db demo/agent.db verify && echo sound
  {VARIABLE}=demo/agent.db agent-run-ledger doctor --json

exit status: 0 all is well; 1 a problem was found (a finding, a broken promise, a run that waits for a person); 2 the command
was wrong or the ledger cannot be read or written; 3 a preview was shown and nothing was written (--yes was not given);
130 interrupted; 141 whoever read the output went away; 143 ended by SIGTERM.
Commands that look open the ledger read-only and may be used while agents work on it. Commands that write show first what they
are about to do and what the next start would then do, and do it only with --yes."""

Command = Callable[[argparse.Namespace], int]


@writable()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Prints errors as one line; raises nothing but `SystemExit` for usage and SIGTERM."""
    try:
        given = _parser().parse_args(arguments)
        with showing(None if given.reveal else of_this_process()):
            return _done(given)
    except (UsageError, agent_run_ledger.LedgerError) as error:
        return _failed(error)


def _done(given: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    try:
        status: int = given.command(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes at exit, which would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (UsageError, agent_run_ledger.LedgerError, OSError) as error:
        return _failed(error)
    return status


def _failed(error: Exception) -> int:
    sys.stderr.write(f"agent-run-ledger: {plain(without_passwords(str(error)))}\n")
    return ERROR


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"{self.prog}: {plain(without_passwords(message))}; see {self.prog} --help\n")


class _Commands:
    """The commands that are being added to the parser, and the options that several of them take."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        # SUPPRESS: these stand before the command, too, and the second must not undo the first.
        self._showing = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
        _add_showing(self._showing)
        self._db = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
        _add_db(self._db)
        self._acts = _Parser(add_help=False)
        self._acts.add_argument(
            "--by", metavar="WHO", help="who acts, for the log (default: your user name and this host)"
        )
        self._acts.add_argument("--yes", action="store_true", help="do it; without this the preview is all")

    def add(self, name: str, home: str, text: str, example: str, *, of: str = "ledger") -> argparse.ArgumentParser:
        """One command: the function of its name in the module `home`. It is about a `ledger`, an `act` on one, or a `program`.

        A name that Python keeps for itself has a function with one more underscore.
        """
        parents = [self._showing] if of == "program" else [self._showing, self._db]
        if of == "act":
            parents.append(self._acts)
        added = self._commands.add_parser(
            name,
            help=re.split(r"[.:] |\.$", text)[0],
            description=textwrap.fill(text, 110),
            epilog=f"example: agent-run-ledger {example}",
            parents=parents,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        function = name.replace("-", "_") + "_" * iskeyword(name)
        added.set_defaults(command=_later(f"agent_run_ledger.cli.{home}", function))
        return added


def _later(module: str, function: str) -> Command:
    """A command of which nothing is imported before it is used."""

    def command(given: argparse.Namespace) -> int:
        status: int = getattr(import_module(module), function)(given)
        return status

    return command


def _add_showing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value, for programs")
    parser.add_argument("--reveal", action="store_true", help="show secrets, too: what the ledger holds, as it is")


def _add_db(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--db", metavar="PLACE", help=f"the ledger: its file, or its address, postgresql://… (default: ${VARIABLE})"
    )
    parser.add_argument(
        "--keys",
        metavar="MODULE[:NAME]",
        help=f"where the Encryption is that has the keys of encrypted runs (default: ${KEYS_VARIABLE})",
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="agent-run-ledger",
        description="Look at the runs of AI agents in a ledger, act on those that wait for somebody, and recover them after a crash.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agent-run-ledger {agent_run_ledger.__version__}")
    _add_db(parser)
    _add_showing(parser)
    commands = _Commands(parser)
    _add_looking(commands)
    _add_acting(commands)
    _add_forgetting(commands)
    _add_programs(commands)
    return parser


def _add_looking(commands: _Commands) -> None:
    add = commands.add
    runs = add("runs", "looking", "List the runs of a ledger.", "--db demo/agent.db runs --status DEAD_LETTER")
    runs.add_argument("--status", metavar="STATE", help="only runs in this state, like BLOCKED or COMPLETED")
    runs.add_argument(
        "--limit", metavar="N", type=count, help="only the newest N runs (default: 50; 0 and --json: all)"
    )
    runs.add_argument(
        "--stuck",
        action="store_true",
        help="only runs that somebody should go on with and that have not got on, each with the reason; the exit status is 1 if there "
        "are any",
    )
    runs.add_argument(
        "--after", metavar="SECONDS", type=seconds, help="with --stuck: how long that is so at least (default: 300)"
    )
    show = add(
        "show",
        "looking",
        "Show one run and its steps, and what it waits for.",
        "--db demo/agent.db show reconcile-2026-10 --steps 0",
    )
    show.add_argument("run_id", metavar="RUN")
    show.add_argument("--steps", metavar="N", type=count, help="only the last N steps (default: 50; 0 and --json: all)")
    plan = add(
        "plan",
        "tracing",
        "Show what the next start of a run would do about each of its unsettled steps. Nothing is done. The exit status is 1 "
        "where it would leave the run parked, or end it.",
        "--db demo/agent.db plan reconcile-2026-10",
    )
    plan.add_argument("run_id", metavar="RUN")
    trace = add(
        "trace",
        "tracing",
        "Show what happened to a run, in order: every attempt, error, question to a receipt and its answer, wait, act of an "
        "operator, and the end.",
        "--db demo/agent.db trace reconcile-2026-10",
    )
    trace.add_argument("run_id", metavar="RUN")
    cost = add(
        "cost",
        "costs",
        "Show what a run has cost, or all runs: what was spent, by model and by tool, what is reserved, what replays have saved, and "
        "of how many calls something is not known.",
        "--db demo/agent.db cost reconcile-2026-10",
    )
    cost.add_argument("run_id", metavar="RUN", nargs="?")
    cost.add_argument(
        "--limit",
        metavar="N",
        type=count,
        help="without RUN: list only the newest N runs (default: 50; 0 and --json: all)",
    )
    add(
        "budgets",
        "costs",
        "List the budgets that runs share, and how much of each is spent and reserved by now: those that programs declare by name, and "
        "those of runs with a budget that have begun others.",
        "--db agent.db budgets",
    )
    explain = add(
        "explain",
        "explaining",
        "Show why a run was halted, or why it stands: the rule, the reason, the steps that this rests on side by side, what its program "
        "was told before, and for a budget what was spent and reserved.",
        "--db demo/agent.db explain runaway-loop",
    )
    explain.add_argument("run_id", metavar="RUN")
    letters = add(
        "dead-letters",
        "tracing",
        "List the dead letters: runs that were halted for good, each with its cause and the last line of its trace.",
        "--db demo/agent.db dead-letters --trace",
    )
    letters.add_argument("--trace", action="store_true", help="show the whole trace of each")
    approvals = add(
        "approvals",
        "tracing",
        "List what waits for the approval of a person, with the exact arguments, their digest and when it expires.",
        "--db agent.db approvals",
    )
    approvals.add_argument("run_id", metavar="RUN", nargs="?")
    verify = add(
        "verify",
        "looking",
        "Recompute every entry of one run, or of all, and report what does not agree. A database alone proves only that "
        "it agrees with itself; with --against it is held to heads that were kept elsewhere. Without --db, RUN may be a bundle, which is "
        "verified alone.",
        "--db demo/agent.db verify",
    )
    verify.add_argument("run_id", metavar="RUN", nargs="?", help="a run, or a file that `export` wrote")
    verify.add_argument(
        "--against",
        metavar="FILE",
        action="append",
        help="heads that were kept elsewhere, or - for standard input: what was cut off or rewritten since is found; may be repeated",
    )
    verify.add_argument(
        "--key",
        metavar="KEY",
        help="the public key by which each of these heads, and each in a bundle, has to be signed, or @FILE",
    )
    proving.add(add)
    bundles.add(add)
    add(
        "doctor",
        "looking",
        "Check the machine, the file or the server, and the runs for what may be in the way.",
        "--db demo/agent.db doctor",
    )


def _add_acting(commands: _Commands) -> None:
    def act(name: str, text: str, example: str, *, has_reason: bool = True) -> argparse.ArgumentParser:
        added = commands.add(name, "acting", text, f"--db agent.db {example}", of="act")
        added.add_argument("run_id", metavar="RUN")
        if has_reason:
            added.add_argument("--reason", metavar="TEXT", default="", help="why, for the log")
        return added

    resolve = act(
        "resolve",
        "Say what became of a step that is in doubt. With --output it took effect, and the output is recorded as its outcome. With "
        "--not-executed it did not, and the next start dispatches it again with the same arguments and the same key.",
        "resolve refund-209 3 --output '{\"refund\": \"re_17\"}' --reason 'found in the dashboard' --yes",
    )
    resolve.add_argument("step_number", metavar="STEP", type=number)
    said = resolve.add_mutually_exclusive_group(required=True)
    said.add_argument("--output", metavar="JSON", help="its output: JSON, @FILE, or - for standard input")
    said.add_argument("--not-executed", action="store_true", help="it did not take effect")
    act(
        "release",
        "Let a run in QUARANTINE go on. Its program goes on where it stands when it is started again.",
        "release research-7 --reason 'these calls are meant' --yes",
    )
    cancel = act(
        "cancel",
        "End a run as CANCELLED: at once where nobody works on it, else by its owner before its next step.",
        "cancel refund-209 --reason 'the customer has withdrawn' --yes",
    )
    cancel.add_argument("--children", action="store_true", help="end the runs that it has begun and waits for, too")
    redrive = act(
        "redrive",
        "Make a new run from one that is FAILED or DEAD_LETTER. It carries all settled steps, so that none of them is paid for "
        "again, counts attempts afresh, and is not started. The old run stays as it is.",
        "redrive refund-209 --max-steps 100 --reason 'the API is mended' --yes",
    )
    redrive.add_argument("--max-steps", metavar="N", type=number, help="the new run's limit of steps")
    redrive.add_argument(
        "--max-tokens", metavar="N", type=number, help="its limit of tokens; what the old run has spent counts, too"
    )
    redrive.add_argument("--max-usd", metavar="USD", type=money, help="its limit of US dollars, likewise")
    redrive.add_argument("--as", dest="new_run_id", metavar="NEW_ID", help="the new run's id (default: a fresh one)")
    fork = act(
        "fork",
        "Make a new run from the first steps of another one. It carries the steps before --from-step and is not started. The old run "
        "stays as it is.",
        "fork research-7 --from-step 12 --as research-7b --yes",
    )
    fork.add_argument("--from-step", metavar="N", type=number, required=True, help="the first step that is not carried")
    fork.add_argument("--as", dest="new_run_id", metavar="NEW_ID", help="the new run's id (default: a fresh one)")
    signal = act(
        "signal",
        "Send a run a signal that it waits for, or will wait for: the payload is what its wait_for returns.",
        "signal order-7 paid --payload '{\"amount\": 120}' --yes",
        has_reason=False,
    )
    signal.add_argument("name", metavar="NAME")
    signal.add_argument(
        "--payload", metavar="JSON", help="what it carries: JSON, @FILE, or - for standard input (default: null)"
    )
    for name, text in (
        ("approve", "Approve exactly the arguments that have this digest. Another digest is refused."),
        ("deny", "Deny what waits for approval: the run's program gets ApprovalDenied."),
    ):
        decide = act(name, text, f"{name} refund-209 refund --digest 3f9a…c1 --yes")
        decide.add_argument("name", metavar="NAME")
        decide.add_argument(
            "--digest",
            metavar="DIGEST",
            required=True,
            help="of the arguments that were looked at, as `approvals` shows it",
        )


def _add_forgetting(commands: _Commands) -> None:
    forget = commands.add(
        "forget",
        "forgetting",
        "Erase what a run that has ended has kept: arguments, outputs, errors, goal, signals and reasons, of one step or of all. Its log "
        "still verifies, and says what was erased, by whom, when and why.",
        "--db agent.db forget refund-209 --reason 'the customer asked for it' --yes",
        of="act",
    )
    forget.add_argument("run_id", metavar="RUN")
    forget.add_argument("--step", metavar="N", type=number, help="only this step")
    forget.add_argument(
        "--all",
        action="store_true",
        help="the run's secret, too: then nobody can find out whether something was what it kept",
    )
    gc = commands.add(
        "gc",
        "forgetting",
        "Delete runs that ended some time ago, each with all that belongs to it. A tombstone says how long its log was, its root, who "
        "deleted it and why.",
        "--db agent.db gc --older-than 30d --keep-proofs --yes",
        of="act",
    )
    gc.add_argument(
        "--older-than", metavar="AGE", type=age, required=True, help="since they ended: 30d, 12h, 90m, 45s or 4w"
    )
    gc.add_argument(
        "--keep-proofs", action="store_true", help="keep the entries, which still verify, and erase what they have kept"
    )
    gc.add_argument("--dry-run", action="store_true", help="list what would be done, and do nothing")
    rewrap = commands.add(
        "rewrap",
        "forgetting",
        "Seal the keys of all encrypted runs under the key that new runs get. What they encrypt stays as it is. Then the old key is needed by "
        "backups only.",
        "--db agent.db --keys billing.keys rewrap --yes",
    )
    rewrap.add_argument("--yes", action="store_true", help="do it; without this it is said what it would do")
    for each in (forget, gc):
        each.add_argument("--reason", metavar="TEXT", default="", help="why, for the log")
    for each in (forget, gc, rewrap):
        each.add_argument(
            "--no-scrub",
            action="store_true",
            help="do not rewrite the file, which keeps writers waiting: free pages hold the bytes until the next time without this",
        )


def _add_programs(commands: _Commands) -> None:
    recover = commands.add(
        "recover",
        "programs",
        "Recover the runs of a program after a crash: settle the steps in doubt of its registered tools and go on with its registered "
        "agents. MODULE is imported as `python -m` would find it; it makes an AgentRunLedger, named by LEDGER where there are "
        "several. The exit status is 0 if every run has ended or waits by plan, 1 if one needs a person.",
        "recover billing.agent:ledger",
        of="program",
    )
    recover.add_argument("module", metavar="MODULE[:LEDGER]")
    fleet.add(commands.add)
    places.add(commands.add)
    preflight.add(commands.add)
    supervise.add(commands.add)
    demo = commands.add(
        "demo",
        "programs",
        "See a real agent killed with SIGKILL at step 38 of 45, let it go on, and see what the outside saw. Without "
        "OPENAI_BASE_URL its model is scripted; with it (and OPENAI_MODEL, OPENAI_API_KEY) any OpenAI-compatible endpoint.",
        "demo --keep demo",
        of="program",
    )
    demo.add_argument("--keep", metavar="DIR", help="keep the demo's files in this new or empty folder")
