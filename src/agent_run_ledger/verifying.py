"""A ledger is verified: every run is audited, accounts are held to the runs that draw on them, and all to the heads that were kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

from agent_run_ledger import heads
from agent_run_ledger.contract import Row, Store
from agent_run_ledger.drivers import reading
from agent_run_ledger.engine.audit import Audit, Origin
from agent_run_ledger.engine.audit_budgets import Settlements
from agent_run_ledger.errors import LedgerError, StoreCorrupt
from agent_run_ledger.model import Finding, VerificationReport
from agent_run_ledger.proving import tree_head
from agent_run_ledger.rules.names import check_name, is_account

_TOLD_EVERY = 500
"""After so many entries whoever waits for a verification hears how far it is."""


def verify(
    store: Store,
    run_id: str | None,
    against: heads.Against | None,
    *,
    key: str | None,
    told: Callable[[int], None] | None,
    found: Callable[[Finding], None] | None,
) -> VerificationReport:
    """As `Ledger.verify`. One page of entries is in memory at a time, and the findings."""
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if found is not None:
            found(finding)

    expected = heads.kept(against, key)
    if run_id is not None:
        ids: Iterator[str] = iter((check_name("run_id", run_id),))
        if expected and run_id not in expected:
            raise ValueError(f"among the heads to verify against is none of run {run_id!r}")
        expected = {run_id: expected[run_id]} if expected else {}
    else:
        ids = (summary.head.run_id for summary in store.summaries())
        for message in store.check():
            report(Finding("", None, "storage", message))
    compared = sum(map(len, expected.values()))
    settlements = Settlements()
    origins: list[tuple[str, Origin]] = []
    entries = number = covered = unheld = unchecked = 0
    for each in ids:
        try:
            comparison = heads.Comparison(expected.pop(each, ()))
            secret, rows = reading.as_far_as_it_opens(store, each)
            auditor = Audit(each, secret, report)
            for row in rows:
                auditor.take(row)
                comparison.take(auditor.leaves, auditor.frontier)
                if told is not None and auditor.leaves % _TOLD_EVERY == 0:
                    told(entries + auditor.leaves)
            head = store.head(each)  # after the entries, than which it may not be older
        except StoreCorrupt as error:
            report(Finding(each, None, "storage", str(error)))
            continue
        if auditor.leaves or head is not None:
            auditor.end(head, reading.behind(store).inbox(each, 0))
            number += 1
            unchecked += auditor.unchecked
        elif not compared:
            if run_id is None:
                continue  # deleted since it was listed
            raise reading.absent(store, each)
        for finding in comparison.end(auditor.leaves, store.tombstone(each) if compared else None):
            report(finding)
        covered += comparison.covered
        unheld += comparison.unheld
        entries += auditor.leaves
        if told is not None:
            told(entries)
        if is_account(each):
            settlements.note(each, auditor.budgets)
        if auditor.origin is not None:
            origins.append((each, auditor.origin))
    _settle(store, settlements, report)
    for each, origin in origins:
        _compare(store, each, origin, report)
    for gone, missing in expected.items():
        comparison = heads.Comparison(missing)
        for finding in comparison.end(0, store.tombstone(gone)):
            report(finding)
        unheld += comparison.unheld
    return VerificationReport(not findings, findings, entries, number, compared - unheld, covered, unheld, unchecked)


def _compare(store: Store, run_id: str, origin: Origin, report: Callable[[Finding], None]) -> None:
    """Hold what a run says of the one that it was made from to that one, if it is here: it may have been deleted, or stand elsewhere."""
    if store.head(origin.run_id) is None:
        return
    said, which = (
        f"{origin.size} entries with the root {origin.root}",
        f"run {origin.run_id!r}, from which it was made,",
    )
    try:
        root = tree_head(store, origin.run_id, origin.size).root.hex()
    except (ValueError, LedgerError) as error:
        report(Finding(run_id, origin.seq, "origin", f"{which} had {said}: {error}", origin.root))
        return
    if root != origin.root:
        message = f"{which} had {said}, and has {root} now"
        report(Finding(run_id, origin.seq, "origin", message, origin.root, root))


def _settle(store: Store, settlements: Settlements, report: Callable[[Finding], None]) -> None:
    """Hold what accounts say to the logs of the runs that are here. What is wrong with these themselves was found by then."""
    for run_id in settlements.runs:
        if store.head(run_id) is not None:
            with suppress(StoreCorrupt):
                rows: Iterator[list[Row]] = reading.pages(store, run_id, payloads_up_to=0)
                settlements.hold(run_id, chain.from_iterable(rows), report)
