"""The commands about runs in files of their own: export, import, and what verify says of such a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import agent_run_ledger
from agent_run_ledger.cli.proving import heads_given, signer_given, signing
from agent_run_ledger.cli.shell import OK, data_of, opened_to_look, path_of
from agent_run_ledger.cli.terminal import Progress, as_json, counted, plain

_SUFFIX = ".arl"


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands by `add_command(name, module, text, example)`, which returns a command's parser."""
    export = add_command(
        "export",
        "bundles",
        "Write a run into one file that can be verified without this ledger: by `verify FILE`, or by the short program in the "
        "documentation.",
        "--db demo/agent.db export reconcile-2026-10 --out reconcile.arl --with-secret",
    )
    export.add_argument("run_id", metavar="RUN")
    export.add_argument("--out", metavar="FILE", required=True, help="the file, by custom with the ending .arl")
    what = export.add_mutually_exclusive_group()
    what.add_argument(
        "--with-secret",
        action="store_true",
        help="with the run's secret: by it payloads are held to the log, and the run can be imported elsewhere",
    )
    what.add_argument(
        "--without-payloads",
        action="store_true",
        help="without arguments, outputs, errors, goals and reasons: the log can be verified all the same",
    )
    export.add_argument(
        "--heads", metavar="FILE", action="append", help="with the heads of this run that were kept in this file"
    )
    export.add_argument(
        "--sign", metavar="KEYFILE", help="with a head that is signed with the private key in this file"
    )
    export.add_argument("--overwrite", action="store_true", help="replace the file that stands there")
    import_ = add_command(
        "import",
        "bundles",
        "Bring a run that has ended into this ledger from a file that `export --with-secret` wrote, entry for entry and under its id. "
        "Where it stands already nothing is written.",
        "--db other.db import reconcile.arl",
    )
    import_.add_argument("file", metavar="FILE")


def export(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    with signing(), opened_to_look(given) as ledger:
        heads = None if given.heads is None else heads_given(given.heads)
        try:
            head = ledger.export(
                given.run_id,
                given.out,
                payloads=not given.without_payloads,
                secret=given.with_secret,
                heads=heads,
                signer=signer_given(given.sign),
                overwrite=given.overwrite,
                told=lambda entries: progress.show(f"exporting: {counted(entries, 'entry', 'entries')}"),
            )
        finally:
            progress.clear()
    if given.json:
        print(as_json({"run_id": head.run_id, "file": given.out, "size": head.size, "root": head.root.hex()}))
        return OK
    size = counted(head.size, "entry", "entries")
    print(plain(f"run {head.run_id!r} was written to {given.out}: {size}, root {head.root.hex()}"))
    return OK


def import_(given: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    with agent_run_ledger.AgentRunLedger(path_of(given)) as ledger:
        try:
            copied = ledger.import_run(given.file, told=progress.checked)
        finally:
            progress.clear()
    if given.json:
        print(as_json(data_of(copied)))
        return OK
    size = counted(copied.entries, "entry", "entries")
    what = "stands in {} already" if copied.was_there else "was brought into {}"
    print(plain(f"run {copied.run_id!r} {what.format(copied.place)}: {size}"))
    return OK


def is_bundle(name: str) -> bool:
    """Whether this is meant to be a file that `export` wrote, and no run's id: it begins as one does, or has its ending."""
    try:
        with open(name, "rb") as file:
            begins = file.read(64)
    except (OSError, ValueError):
        return False
    return begins.startswith(b'{"bundle":') or name.endswith(_SUFFIX)
