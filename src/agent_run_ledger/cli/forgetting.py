"""The commands that make a ledger forget: erase what a run has kept, and delete what is old. What may hold the bytes yet is said."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from agent_run_ledger import AgentRunLedger, Collected, Forgotten
from agent_run_ledger.cli.preview import is_confirmed, who
from agent_run_ledger.cli.shell import (
    OK,
    PREVIEWED,
    PROBLEM,
    UsageError,
    command_for,
    data_of,
    encryption_of,
    opened,
    opened_to_look,
)
from agent_run_ledger.cli.terminal import as_json, counted, plain, table, when


def forget(given: argparse.Namespace) -> int:
    if given.all and given.step is not None:
        raise UsageError("--all is more than one step: give one of --all and --step")
    given.by = given.by or who()

    def erase(ledger: AgentRunLedger, *, dry_run: bool) -> Forgotten:
        said: dict[str, Any] = {"by": given.by, "reason": given.reason, "scrub": not given.no_scrub}
        return ledger.forget(given.run_id, given.step, everything=given.all, dry_run=dry_run, **said)

    with opened_to_look(given) as ledger:
        tried = erase(ledger, dry_run=True)
    which = f"step {given.step} of run {given.run_id!r}" if given.step is not None else f"run {given.run_id!r}"
    secret = ", and its secret" if tried.is_everything else ""
    does = f"erase {counted(tried.payloads, 'payload', 'payloads')} of {which}{secret}"
    if not given.json:
        print(
            plain(f"This will {does}. It is {tried.status}, and nothing of them can be read or replayed any more."),
            end="\n\n",
        )
    if not _is_wanted(given):
        return _previewed(given, {"does": does, "run": data_of(tried), "is_done": False})
    with opened(given) as ledger:
        done = erase(ledger, dry_run=False)
    if given.json:
        print(as_json({"does": does, "run": data_of(done), "is_done": True}))
        return OK
    print(f"Done. See: {command_for(given, 'trace', given.run_id)}")
    _tell_pending(done.pending)
    return OK


def gc(given: argparse.Namespace) -> int:
    given.by = given.by or who()

    def collect(ledger: AgentRunLedger, *, dry_run: bool) -> Collected:
        said: dict[str, Any] = {"by": given.by, "reason": given.reason, "scrub": not given.no_scrub}
        return ledger.gc(given.older_than, keep_proofs=given.keep_proofs, dry_run=dry_run, **said)

    with opened_to_look(given) as ledger:
        tried = collect(ledger, dry_run=True)
    if not given.json:
        what = "erase what these runs have kept" if given.keep_proofs else "delete these runs"
        print(f"This will {what}.\n\n{_table(tried.runs)}" if tried.runs else "No run is that old.")
        _tell_left(tried.left)
        print()
    if given.dry_run:
        if given.json:
            print(as_json(_data(tried)))
        return OK
    if not _is_wanted(given):
        return _previewed(given, _data(tried))
    with opened(given) as ledger:
        done = collect(ledger, dry_run=False)
    if given.json:
        print(as_json(_data(done)))
        return OK
    print(f"Done: {counted(len(done.runs), 'run', 'runs')}.")
    _tell_left([each for each in done.left if each not in tried.left])
    _tell_pending(done.pending)
    return OK


def rewrap(given: argparse.Namespace) -> int:
    if encryption_of(given) is None:
        raise UsageError("which keys? Give --keys MODULE:NAME, where NAME is an Encryption")
    if not given.yes:
        print(
            as_json({"is_done": False})
            if given.json
            else "This will seal keys anew. Nothing was written. With --yes it is done."
        )
        return PREVIEWED
    with opened(given) as ledger:
        done = ledger.rewrap(scrub=not given.no_scrub)
    if given.json:
        left = [{"run_id": run_id, "reason": reason} for run_id, reason in done.left]
        print(as_json({"runs": done.runs, "left": left, "pending": done.pending, "is_done": True}))
    else:
        print(f"Done: {counted(len(done.runs), 'run', 'runs')}.")
        _tell_left(done.left)
        _tell_pending(done.pending)
    return PROBLEM if done.left else OK


def _is_wanted(given: argparse.Namespace) -> bool:
    return given.yes or (not given.json and is_confirmed(given))


def _previewed(given: argparse.Namespace, data: dict[str, Any]) -> int:
    print(as_json(data) if given.json else "Nothing was written. With --yes it is done.")
    return PREVIEWED


def _data(collected: Collected) -> dict[str, Any]:
    left = [{"run_id": run_id, "reason": reason} for run_id, reason in collected.left]
    runs = [data_of(each) for each in collected.runs]
    return {"runs": runs, "left": left, "pending": collected.pending, "is_done": not collected.is_tried}


def _table(runs: Sequence[Forgotten]) -> str:
    rows = [(each.run_id, each.status, when(each.ended_at), each.payloads) for each in runs]
    return table(("RUN", "STATUS", "ENDED", "PAYLOADS"), rows, stretch=0)


def _tell_left(left: Iterable[tuple[str, str]]) -> None:
    for _, reason in left:
        print(plain(f"! left as it is: {reason}"))


def _tell_pending(pending: Iterable[str]) -> None:
    for each in pending:
        print(plain(f"! pending: {each}"))
