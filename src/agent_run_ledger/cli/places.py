"""The commands about where a ledger is: copy runs or all of it to another place, put a backup in its place, make or update a database."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import agent_run_ledger
from agent_run_ledger.cli.options import number
from agent_run_ledger.cli.shell import (
    OK,
    PREVIEWED,
    UsageError,
    data_of,
    is_address,
    opened,
    opened_to_look,
    path_of,
)
from agent_run_ledger.cli.terminal import Progress, as_json, counted, plain


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands by `add_command(name, module, text, example)`, which returns a command's parser."""
    copy = add_command(
        "copy",
        "places",
        "Copy runs to another ledger, entry for entry. One that has ended stands in both then; one that has not is moved, and goes on "
        "there and no more here. The same command again finishes what was interrupted.",
        "--db agent.db copy october --to postgresql://ledger@db.internal/agents",
    )
    copy.add_argument("run_ids", metavar="RUN", nargs="+")
    copy.add_argument(
        "--to", metavar="PLACE", required=True, help="the other ledger: a file, or the address of a database"
    )
    copy.add_argument("--children", action="store_true", help="with the runs that a run has begun and waits for")
    backup = add_command(
        "backup",
        "places",
        "Copy a whole ledger to a file while it is in use, and verify the copy. It appears when it is whole and sound, or not at all. "
        "A PostgreSQL database is backed up by its own tools, like pg_dump.",
        "--db agent.db backup --to agent-monday.db",
    )
    backup.add_argument("--to", metavar="FILE", required=True, help="where the copy is put")
    backup.add_argument("--overwrite", action="store_true", help="replace the file that stands there")
    restore = add_command(
        "restore",
        "places",
        "Put a copy of a backup in the place of a ledger that nobody uses, and begin a new epoch: nobody has a run then, and who had one "
        "before cannot write to it. What stood there is kept beside it.",
        "--db agent.db restore agent-monday.db --overwrite",
    )
    restore.add_argument("backup", metavar="FILE")
    restore.add_argument("--overwrite", action="store_true", help="replace the ledger that stands there")
    new_epoch = add_command(
        "new-epoch",
        "places",
        "Begin a new epoch in a ledger that other tools have restored, as pg_restore or a recovery to a point in time do: nobody has a "
        "run then, and who had one before cannot write to it. Use the role that owns the tables. Whoever works on a run loses it.",
        "--db postgresql://owner@db.internal/agents new-epoch --yes",
    )
    new_epoch.add_argument("--yes", action="store_true", help="do it; without this nothing is written")
    migrate = add_command(
        "migrate",
        "places",
        "Make a PostgreSQL database a ledger, or bring an older one up to date: whole or not at all, and once, however many do it. Use a "
        "role that owns the tables, and another one for programs. A ledger in a file is brought up to date when it is opened.",
        "--db postgresql://owner@db.internal/agents migrate --grant agents",
    )
    migrate.add_argument("--dry-run", action="store_true", help="print the SQL, and change nothing")
    migrate.add_argument(
        "--partitions", metavar="N", type=number, help="spread the tables of a new ledger over N parts by the runs' ids"
    )
    migrate.add_argument(
        "--no-triggers",
        action="store_true",
        help="leave out the triggers that keep the log append-only, for an engine that has none: the role's rights must do it then",
    )
    migrate.add_argument(
        "--grant", metavar="ROLE", help="give this role the rights to use the ledger, and none to rewrite it"
    )


def copy(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    copied = []
    opened_to_look(given).close()  # a file that is not there is not made
    with opened(given) as ledger:
        for run_id in given.run_ids:
            try:
                found = ledger.copy(run_id, given.to, children=given.children, told=progress.show)
            finally:
                progress.clear()
            copied += found
            for each in found if not given.json else ():
                print(plain(f"run {each.run_id!r} {_said(each)}"), flush=True)
    if given.json:
        print(as_json({"runs": [data_of(each) for each in copied]}))
    return OK


def _said(copied: agent_run_ledger.CopiedRun) -> str:
    """What became of a run, to be read behind its id."""
    size = counted(copied.entries, "entry", "entries")
    if copied.was_there:
        goes_on = ", and goes on there" if copied.is_moved else ""
        return f"stands in {copied.place} already{goes_on}: {size}"
    return (
        f"was moved to {copied.place}, and goes on there: {size}"
        if copied.is_moved
        else f"was copied to {copied.place}: {size}"
    )


def backup(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    with opened_to_look(given) as ledger:
        try:
            report = ledger.backup(given.to, overwrite=given.overwrite, told=progress.show)
        finally:
            progress.clear()
    if given.json:
        print(as_json({"backup": given.to, "runs": report.runs, "entries": report.entries}))
    else:
        print(plain(f"{given.to} is a copy of the ledger: {_size(report)}, all verified"))
    return OK


def restore(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    try:
        restored = agent_run_ledger.AgentRunLedger.restore(
            given.backup, path_of(given), overwrite=given.overwrite, told=progress.show
        )
    finally:
        progress.clear()
    if given.json:
        print(as_json(data_of(restored)))
        return OK
    print(plain(f"{restored.path} is the ledger of {given.backup} now: {_size(restored)}, all verified"))
    if restored.replaced is not None:
        print(plain(f"what stood there is kept as {restored.replaced}"))
    print(
        f"epoch {restored.epoch} has begun: nobody has a run, and no program of before can write to it. What happened since the backup "
        "is forgotten here and not in the world: `plan RUN` shows what the next start of a run would do."
    )
    return OK


def _size(seen: agent_run_ledger.VerificationReport | agent_run_ledger.RestoredLedger) -> str:
    return f"{counted(seen.entries, 'entry', 'entries')} of {counted(seen.runs, 'run', 'runs')}"


def new_epoch(given: argparse.Namespace) -> int:
    opened_to_look(given).close()  # a file that is not there is not made
    if not given.yes:
        print(as_json({"epoch": None}) if given.json else "Nothing was written. With --yes a new epoch begins.")
        return PREVIEWED
    epoch = agent_run_ledger.AgentRunLedger.new_epoch(path_of(given))
    print(as_json({"epoch": epoch}) if given.json else f"epoch {epoch} has begun: nobody has a run now")
    return OK


def migrate(given: argparse.Namespace) -> int:
    place = path_of(given)
    if not is_address(place):
        raise UsageError(f"{place!r} is a file: it is brought up to date when it is opened, after a copy was made")
    ran = agent_run_ledger.AgentRunLedger.migrate(
        place, dry_run=given.dry_run, partitions=given.partitions, triggers=not given.no_triggers, grant=given.grant
    )
    if given.json:
        print(as_json({"dry_run": given.dry_run, "sql": ran}))
    elif given.dry_run:
        print("\n".join(ran) if ran else "-- nothing: the database is up to date")
    else:
        print(
            "the database is a ledger of this version now" if ran else "the database is up to date; nothing was changed"
        )
    return OK
