"""Signed heads of runs: a log of them to keep elsewhere, the signer's refusal to contradict itself, and what is read of them later."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from agent_run_ledger import merkle
from agent_run_ledger.checkpoints import ORIGIN, Note, TreeHead, notes
from agent_run_ledger.drivers.writer import Writer
from agent_run_ledger.errors import BadNote, HeadRefused, LedgerError, StoreUnavailable
from agent_run_ledger.model import Finding
from agent_run_ledger.stores.filelock import WriteLock

if TYPE_CHECKING:
    from agent_run_ledger.contract import Tombstone
    from agent_run_ledger.ledger import Ledger
    from agent_run_ledger.signing import Signer

STANDARD_OUTPUT = "-"
_BUSY_SECONDS = 10.0

Against = TreeHead | str | Iterable[TreeHead | str]
"""Heads that were kept elsewhere: themselves, or texts of notes, as many as a text holds."""


class HeadLog:
    """Signed heads, one behind the other, in a file or, with `"-"`, on standard output, where programs that ship logs find them.

    A ledger that is given it as `heads=` adds a head whenever one of its runs ends, and with `every=N` whenever a run has N more
    entries; `add` does so on demand. It also is what the signer remembers: a head that contradicts an earlier one of the same file is
    refused, whichever process wrote that. On standard output it remembers as long as the process lives.

    >>> log = HeadLog("heads.log", Signer.generate("billing-host"), every=100)
    >>> with AgentRunLedger("agent.db", heads=log) as ledger:
    ...     with ledger.open_run("Reconcile October invoices", "october") as run:
    ...         total = run.step("add", {"numbers": [1, 2]}, lambda: 3)
    >>> with AgentRunLedger.open_read_only("agent.db") as ledger, open("heads.log") as kept:
    ...     ledger.verify(against=kept.read()).ok
    True
    """

    def __init__(self, path: str | os.PathLike[str], signer: Signer, *, every: int | None = None) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every is a number of entries, at least 1, not {every!r}")
        self.path = os.fspath(path)
        self.signer = signer
        self.every = every
        self._mutex = threading.Lock()
        _logs.add(self)
        self._last: dict[str, TreeHead] = {}
        """The largest head of each run that is signed."""
        self._read = 0
        """So many bytes of the file are known."""

    def add(self, ledger: Ledger, run_id: str, size: int | None = None) -> str | None:
        """Sign the run's head, as it stands or of that size, and write it down; None where what is signed covers it already.

        What it covers is on stable storage before, and the note is when this returns. Raises `HeadRefused`, and then nothing is signed.
        """
        with self._mutex:
            if self.path == STANDARD_OUTPUT:
                note = self._signed(ledger, run_id, size)
                if note is not None:
                    sys.stdout.write(note + "\n")
                    sys.stdout.flush()
                return note
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b", buffering=0) as file:
                lock = WriteLock(self.path, _BUSY_SECONDS)
                try:
                    return lock.during(lambda: self._append(file.fileno(), ledger, run_id, size))
                finally:
                    lock.close()

    def _append(self, file: int, ledger: Ledger, run_id: str, size: int | None) -> str | None:
        self._catch_up(file)
        note = self._signed(ledger, run_id, size)
        if note is not None:
            data = (note + "\n").encode()
            self._read += os.write(file, data)
            os.fsync(file)
        return note

    def _catch_up(self, file: int) -> None:
        """Read what other processes have signed meanwhile. What a crash left of a note was never handed out: it is cut off.

        Raises `BadNote` where the file is anything else than such a log: nothing of it is changed.
        """
        stands = os.fstat(file).st_size
        if stands < self._read:
            self._read = 0  # another file: what it says counts, and what is known stays known
        data = os.pread(file, stands - self._read, self._read)
        *parts, _ = data.split(b"\n\n")
        if len(parts) % 2:
            parts.pop()
        known = sum(len(part) + 2 for part in parts)
        begun, begins = data[known:], ORIGIN.encode()
        is_torn = (begun.startswith(begins) or begins.startswith(begun)) and b"\r" not in begun
        if not (is_torn and data[:known].startswith(begins[:known])):
            raise BadNote(f"{self.path!r} is no log of heads as this library writes it; nothing was changed")
        for found in notes(data[:known].decode(errors="replace")):
            self._remember(TreeHead.read(found.text))
        self._read += known
        if self._read < stands:
            os.ftruncate(file, self._read)

    def _remember(self, head: TreeHead) -> None:
        known = self._last.get(head.run_id)
        if known is None or known.size <= head.size:
            self._last[head.run_id] = head

    def _signed(self, ledger: Ledger, run_id: str, size: int | None) -> str | None:
        head, last = ledger.tree_head(run_id), self._last.get(run_id)
        if last is not None:
            if head.size < last.size:
                raise HeadRefused(
                    run_id, f"{last.size} entries are signed for and {head.size} stand there: the run was rolled back"
                )
            proof = ledger.prove_consistency(run_id, last.size, head.size).proof  # by now it may have more
            if not merkle.verify_consistency(last.size, head.size, proof, last.root, head.root):
                raise HeadRefused(run_id, f"the first {last.size} entries are not those that are signed for")
            if (size or head.size) <= last.size:
                return None
        if size is not None:
            head = ledger.tree_head(run_id, size)
        note = head.note(self.signer)
        self._last[run_id] = head
        return note


_logs: weakref.WeakSet[HeadLog] = weakref.WeakSet()


def _in_child() -> None:
    for log in list(_logs):
        log._mutex = threading.Lock()  # a thread that is not here may have been adding


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Emitting:
    """Adds heads to a log beside a ledger's runs, in a thread of its own: no step waits for a signature or for the log's disk.

    What watches a run does not end it: what goes wrong here is logged as an error, and the next head covers what this one would have.
    """

    def __init__(self, ledger: Ledger, log: HeadLog) -> None:
        self._ledger = ledger
        self._log = log
        self._writer: Writer[tuple[str, int]] = Writer(self._add)

    def saw(self, run_id: str, before: int, size: int, has_ended: bool) -> None:
        """A run that had `before` entries has `size` now."""
        every = self._log.every
        if has_ended or (every is not None and before // every < size // every):
            try:
                self._writer.put((run_id, size))
            except StoreUnavailable:  # the ledger is being closed
                return

    def close(self) -> None:
        """Add what waits, and end."""
        self._writer.close(())

    def _add(self, seen: list[tuple[str, int]]) -> None:
        for run_id, size in dict(sorted(seen, key=lambda each: each[1])).items():
            try:
                self._log.add(self._ledger, run_id, size)
            except (LedgerError, OSError) as error:
                import logging

                logging.getLogger("agent_run_ledger").error(
                    "nothing was added to the log of heads for run %r: %s", run_id, error
                )


# --- heads that were kept ---------------------------------------------------------------------------------------------


def kept(against: Against | None, key: str | None) -> dict[str, list[TreeHead]]:
    """The heads that a ledger is to be held to, by run. Raises `BadNote` where one is none, or is not signed by `key`, a public key."""
    if against is None:
        if key is not None:
            raise ValueError("key= says who has signed the heads of against=: give both")
        return {}
    found: dict[str, list[TreeHead]] = {}
    for each in [against] if isinstance(against, TreeHead | str) else against:
        for head in _heads(each, key):
            found.setdefault(head.run_id, []).append(head)
    if not found:
        raise BadNote("there is no head in it")
    return found


def _heads(given: TreeHead | str, key: str | None) -> Iterator[TreeHead]:
    if isinstance(given, TreeHead):
        if key is not None:
            raise BadNote(f"the head of run {given.run_id!r} is no signed note, and it should be signed by {key}")
        yield given
        return
    if not isinstance(given, str):
        raise TypeError(f"against= takes heads and texts of notes, not {given!r}")
    for note in notes(given):
        _check(note, key)
        yield TreeHead.read(note.text)


def _check(note: Note, key: str | None) -> None:
    if key is not None:
        from agent_run_ledger.signing import Verifier

        Verifier(key).check(note)


class Comparison:
    """One run's entries, as they are recomputed, held to its heads that were kept elsewhere."""

    def __init__(self, heads: Iterable[TreeHead]) -> None:
        self.heads = list(heads)
        self._roots = {head.size: merkle.EMPTY_ROOT for head in self.heads if head.size == 0}
        self._sizes = {head.size for head in self.heads}
        self.unheld = 0
        """How many heads are of a run that was deleted, and of when it was shorter: nothing is left to be held to them."""
        self.covered = 0
        """How many entries are covered by those heads that they agree with, once there are no more."""

    def take(self, size: int, frontier: Sequence[bytes]) -> None:
        """So many entries give this frontier."""
        if size in self._sizes:
            self._roots[size] = merkle.frontier_root(frontier)

    def end(self, size: int, tombstone: Tombstone | None = None) -> Iterator[Finding]:
        """There are no more than `size` entries: in what they are not what the heads say.

        Of a run that was deleted its tombstone says how long it was, and its root then. A head of an earlier size proves nothing about it.
        """
        if tombstone is not None and size == 0:
            self._roots[tombstone.size] = tombstone.root
            held = [head for head in self.heads if head.size >= tombstone.size]
            self.unheld, self.heads = len(self.heads) - len(held), held
        for head in self.heads:
            root = self._roots.get(head.size)
            if root is None:
                left = f"{size} are left" if size else "there is no such run"
                why = "they were cut off, or the ledger was put back to an older state"
                message = f"a head that was kept covers {head.size} entries, and {left}: {why}"
                yield Finding(head.run_id, None, "rollback", message)
            elif root != head.root:
                said = f"a head that was kept says that the first {head.size} entries have the root {head.root.hex()}"
                message = f"{said}, they give {root.hex()}: they are not what was written then"
                yield Finding(head.run_id, head.size, "fork", message)
            else:
                self.covered = max(self.covered, head.size)
