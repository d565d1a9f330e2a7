"""Copies of a whole ledger that are known to be good, and a ledger made of one, in which no old owner can write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from agent_run_ledger.contract import Store
from agent_run_ledger.errors import BackupRefused, NotALedger
from agent_run_ledger.ledger import AgentRunLedger
from agent_run_ledger.model import RestoredLedger, VerificationReport
from agent_run_ledger.stores import backups, is_address
from agent_run_ledger.stores.clock import SystemClock

Told = Callable[[str], None]


def back_up(store: Store, target: str, *, overwrite: bool, told: Told | None) -> VerificationReport:
    """See `AgentRunLedger.backup`."""
    path = getattr(store, "path", None)
    if store.is_remote:
        raise BackupRefused(
            "this ledger is a PostgreSQL database: its server's own tools back it up, as pg_dump does, and nothing was copied. What "
            "they restore begins a new epoch by `agent-run-ledger new-epoch`."
        )
    if not isinstance(path, str):
        raise BackupRefused("this ledger is in memory: there is no file to copy, and nothing was copied.")
    if is_address(target):
        raise BackupRefused("a backup is a file, and that is no path of one; nothing was copied.")
    _refuse_taken(target, overwrite, "overwrite=True or --overwrite replaces it")
    if os.path.exists(target) and os.path.samefile(path, target):
        raise BackupRefused(f"{target!r} is the ledger itself; nothing was copied.")
    with suppress(NotALedger):  # another ledger may stand there, and be used
        backups.refuse_used(os.path.realpath(target))
    with _unfinished(target) as made:
        report = _copied(path, made, told)
        if not report.ok:
            unsound = target + ".unsound"
            backups.put_in_place(made, unsound)
            raise BackupRefused(
                f"the copy does not verify: {len(report.findings)} findings, the first {report.findings[0].message!r}. It is no backup; it was "
                f"kept as {unsound!r} for inspection, and nothing was replaced. Look at the ledger with `agent-run-ledger verify`."
            )
        backups.without_commits(target)
        backups.put_in_place(made, target)
    return report


def restore(backup: str, path: str, *, overwrite: bool, told: Told | None) -> RestoredLedger:
    """See `AgentRunLedger.restore`."""
    if is_address(backup) or is_address(path):
        raise BackupRefused(
            "a PostgreSQL database is restored by its server's own tools; nothing was changed. `agent-run-ledger new-epoch` begins a new "
            "epoch in it then."
        )
    real = os.path.realpath(path)
    _refuse_taken(
        real, overwrite, "overwrite=True or --overwrite has the backup take its place, and keeps it beside it"
    )
    if os.path.exists(real) and os.path.exists(backup) and os.path.samefile(real, backup):
        raise BackupRefused(f"{backup!r} is the ledger itself; nothing was changed.")
    backups.refuse_used(real)  # as far as that is seen at a glance: what follows may take long
    with _unfinished(real) as made:
        report = _copied(backup, made, told)
        if not report.ok:
            raise BackupRefused(
                f"the backup {backup!r} does not verify: {len(report.findings)} findings, the first {report.findings[0].message!r}; nothing was "
                "changed. `agent-run-ledger verify` says more; take an older backup."
            )
        with backups.alone(real) as last:
            epoch = backups.new_epoch(made, max(int(SystemClock().now()), last + 1))
            backups.as_one_file(made)
            replaced = backups.replace(real, made, epoch)
    return RestoredLedger(real, report.runs, report.entries, epoch, replaced)


def _copied(path: str, made: str, told: Told | None) -> VerificationReport:
    """Copy one file to another, new one, and verify that."""
    say = told or (lambda text: None)
    backups.copy_file(path, made, lambda done, of: say(f"copying: {_mebibytes(done)} of {_mebibytes(of)} MiB"))
    with AgentRunLedger.open_read_only(made) as copy:
        return copy.verify(told=lambda entries: say(f"verifying: {entries} entries checked"))


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _refuse_taken(path: str, overwrite: bool, hint: str) -> None:
    if os.path.exists(path) and not overwrite:
        raise BackupRefused(f"there is a file {path!r} already; nothing was changed. {hint}.")


@contextmanager
def _unfinished(target: str) -> Iterator[str]:
    """The path of a file that does not exist yet, beside `target`; whatever is left of it at the end is removed."""
    path = f"{target}.{os.urandom(6).hex()}.unfinished"
    try:
        yield path
    finally:
        for suffix in ("", "-wal", "-shm", "-journal", ".lock"):
            with suppress(FileNotFoundError):
                os.unlink(path + suffix)
