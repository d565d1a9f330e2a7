"""Runs in files of their own: one run is exported as a bundle, a bundle is verified without a ledger, and one that has ended brought in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain, zip_longest
from secrets import token_hex
from typing import TYPE_CHECKING, BinaryIO

from agent_run_ledger import bundles, merkle, proving
from agent_run_ledger.bundles import LONGEST, Digest, End, KeptHead, Opening
from agent_run_ledger.checkpoints import Note, TreeHead, notes, signed
from agent_run_ledger.contract import Head, Request, Row, Store, sealed_under
from agent_run_ledger.drivers import reading
from agent_run_ledger.engine.audit import Audit
from agent_run_ledger.engine.erasing import says_erased
from agent_run_ledger.errors import BadBundle, BadNote, CopyRefused, KeyUnavailable, RunNotFound
from agent_run_ledger.heads import Against, Comparison, kept
from agent_run_ledger.model import CopiedRun, Finding, VerificationReport
from agent_run_ledger.rules.names import check_run_id

if TYPE_CHECKING:
    from agent_run_ledger.signing import Signer

Told = Callable[[int], None] | None
_ENTRIES_BETWEEN_WORDS = 500
_BYTES_AT_ONCE = 1 << 20
"""How many bytes of payloads are in memory on their way into a ledger, beside one payload that may be longer."""


# --- export -----------------------------------------------------------------------------------------------------------


def export(
    store: Store,
    run_id: str,
    path: str | os.PathLike[str],
    *,
    has_payloads: bool,
    has_secret: bool,
    heads: str | Iterable[str] | None,
    signer: Signer | None,
    overwrite: bool,
    told: Told,
) -> TreeHead:
    """As `Ledger.export`."""
    place = os.fspath(path)
    if has_secret and not has_payloads:
        raise ValueError(
            "secret=True with payloads=False: whoever has the secret can guess what was withheld. Give one of them"
        )
    if os.path.exists(place) and not overwrite:
        raise CopyRefused(run_id, place, "there is a file already. overwrite=True or --overwrite replaces it.")
    own = getattr(store, "path", None)
    for itself in [f"{own}{suffix}" for suffix in ("", "-wal", "-shm", ".lock")] if isinstance(own, str) else ():
        if os.path.exists(place) and os.path.exists(itself) and os.path.samefile(place, itself):
            raise CopyRefused(run_id, place, "that is the ledger itself.")
    summary = next(iter(store.summaries(run_id)), None)
    if summary is None:
        raise RunNotFound(run_id)
    if (key_id := sealed_under(store.secret(run_id))) is not None:
        raise KeyUnavailable(run_id, key_id)
    head = proving.tree_head(store, run_id)
    given = dict(_notes_of(run_id, heads))
    if signer is not None:
        given[head.note(signer)] = head
    secret = store.secret(run_id)
    opening = Opening(run_id, summary.head.listing, secret if has_secret else None, has_payloads)
    rows = (reading.whole(store, run_id, row) for page in reading.pages(store, run_id) for row in page)
    comparison = Comparison(given.values())

    def refuse_damage(finding: Finding) -> None:
        raise CopyRefused(run_id, place, f"it is damaged: {finding.message}. `verify` says more.")

    with _written(place) as file:
        lines = _Lines(file, run_id, place)
        auditor = Audit(run_id, secret, refuse_damage)
        lines.write("the listing", bundles.opening_line, opening)
        for note, each in sorted(given.items(), key=lambda item: item[1].size):
            if each.size <= head.size:  # else it is a finding below
                proof = proving.consistency(store, run_id, each.size, head.size).proof
                lines.write("a head", bundles.head_line, note, proof)
        for row in rows:
            if auditor.leaves == head.size:
                break  # what was appended since the head was taken
            auditor.take(row)
            comparison.take(auditor.leaves, auditor.frontier)
            lines.write(f"entry {row.seq}", bundles.entry_line, row, has_payloads=has_payloads)
            _say(told, auditor.leaves)
        stands = store.head(run_id)  # behind the entries, than which it may not be older
        requests = [] if stands is None else [each for each in store.inbox(run_id, 0) if each.id <= stands.inbox]
        auditor.end(stands, requests)
        assert stands is not None
        for finding in comparison.end(auditor.leaves):
            raise CopyRefused(run_id, place, f"{finding.message}.")
        for request in requests:
            lines.write(f"request {request.id}", bundles.request_line, request, has_payloads=has_payloads)
        lines.write("the end", bundles.end_line, End(head.size, head.root, stands.token, stands.inbox))
        lines.write("the digest", bundles.digest_line, lines.digest.digest())
    return head


class _Lines:
    """The lines of a bundle on their way into its file."""

    def __init__(self, file: BinaryIO, run_id: str, place: str) -> None:
        self._file, self._run_id, self._place = file, run_id, place
        self.digest = sha256()

    def write(self, what: str, make: Callable[..., bytes], *given: object, **options: object) -> None:
        """Write the line that `make` makes. Raises `CopyRefused` where a store holds what no bundle can."""
        try:
            line = make(*given, **options)
        except (TypeError, ValueError) as error:  # a file holds whatever is written into it
            raise CopyRefused(
                self._run_id, self._place, f"it is damaged: {what} cannot be written: {error}."
            ) from error
        if len(line) > LONGEST:
            why = f"{what} takes {len(line)} bytes, and a line of a bundle has at most {LONGEST}."
            raise CopyRefused(self._run_id, self._place, why)
        self.digest.update(line)
        self._file.write(line)


def _notes_of(run_id: str, heads: str | Iterable[str] | None) -> Iterator[tuple[str, TreeHead]]:
    """The heads of this run that cover something, each as the text of its note. Raises `BadNote`, and `ValueError` where there is none."""
    if heads is None:
        return
    is_there = False
    for text in [heads] if isinstance(heads, str) else heads:
        for note in notes(text):
            head = TreeHead.read(note.text)
            if head.run_id == run_id and head.size:
                is_there = True
                yield signed(note.text, *note.signatures), head
    if not is_there:
        raise ValueError(f"among the heads that were given is none of run {run_id!r}")


@contextmanager
def _written(path: str) -> Iterator[BinaryIO]:
    """A file that is there under its name when all of it is on stable storage, and not before; where something is raised, not at all."""
    partial = f"{path}.{token_hex(4)}.partial"
    try:
        # It may hold what only its owner should see; who wants to share it says so himself.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- verify -----------------------------------------------------------------------------------------------------------


def verify_bundle(
    path: str | os.PathLike[str],
    against: Against | None = None,
    *,
    key: str | None = None,
    told: Told = None,
    found: Callable[[Finding], None] | None = None,
) -> VerificationReport:
    """Recompute a run from a bundle alone, as `Ledger.verify` does from a ledger, and report each disagreement.

    A bundle proves only that it agrees with itself: who can write it can write all of it anew. `against` is heads that were kept
    elsewhere, as for `Ledger.verify`. With `key`, a public key, each of them has to be signed by it, and so has each head in the bundle,
    of which there has to be one where none is given. `told` hears how many entries are done, and `found` of each finding in the end.

    Raises `BadBundle` where the file is no bundle, is cut off, or is of a newer format; `BadNote` where what is held against it is no
    head, or not signed so; and `ValueError` where that is of other runs only.

    >>> verify_bundle("october.arl").ok
    True
    """
    expected = kept(against, key) if against is not None else {}
    with open(path, "rb") as file:
        read = _Reading(file, os.fspath(path), told)
        if against is not None and read.run_id not in expected:
            raise ValueError(f"among the heads to verify against is none of run {read.run_id!r}")
        read.go_on(expected.get(read.run_id, []))
    findings = read.findings(key, is_signed=key is not None and against is None)
    if found is not None:
        for finding in findings:
            found(finding)
    auditor, comparison = read.auditor, read.comparison
    compared, covered, unchecked = len(comparison.heads), comparison.covered, auditor.unchecked
    return VerificationReport(not findings, findings, auditor.leaves, 1, compared, covered, 0, unchecked)


class _Reading:
    """One reading of a bundle from its first line to its last: the entries are checked as they come, the rest is kept."""

    def __init__(self, file: BinaryIO, place: str, told: Told = None) -> None:
        self._parts = bundles.parts(_lines(file), place)
        opening = next(self._parts)
        assert isinstance(opening, Opening)
        self.opening, self.run_id = opening, opening.run_id
        self._found: list[Finding] = []
        self.auditor = Audit(self.run_id, opening.secret, self._found.append, has_payloads=opening.has_payloads)
        self.comparison = Comparison(())
        self.requests: list[Request] = []
        self._kept: list[KeptHead] = []
        self._told = told

    def go_on(self, heads: Iterable[TreeHead] = ()) -> None:
        """Read the rest, held to these heads and to those in the bundle, which stand before its entries."""
        auditor = self.auditor
        for part in self._parts:
            if isinstance(part, Row):
                if not auditor.leaves:
                    self._compare(heads)
                auditor.take(part)
                self.comparison.take(auditor.leaves, auditor.frontier)
                _say(self._told, auditor.leaves)
            elif isinstance(part, KeptHead):
                self._kept.append(part)
            elif isinstance(part, Request):
                self.requests.append(part)
            elif isinstance(part, End):
                self.end = part
            elif isinstance(part, Digest):
                self.digest = part
        if not auditor.leaves:
            self._compare(heads)

    def _compare(self, heads: Iterable[TreeHead]) -> None:
        self.comparison = Comparison([*heads, *(each.head for each in self._kept if each.head.run_id == self.run_id)])

    def findings(self, key: str | None = None, *, is_signed: bool = False) -> list[Finding]:
        """Everything that does not agree. With `key` all heads in the bundle are signed by it; with `is_signed` there is one at least."""
        run_id, end, auditor = self.run_id, self.end, self.auditor
        found = self._found
        if self.digest.said != self.digest.found:
            message = f"the file says that its lines have the SHA-256 {self.digest.said.hex()}, they have {self.digest.found.hex()}"
            found.append(Finding(run_id, None, "file", message))
        stands = Head(run_id, None, end.token, end.inbox, None, self.opening.listing)
        auditor.end(stands, self.requests)
        root = merkle.frontier_root(auditor.frontier)
        if (end.size, end.root) != (auditor.leaves, root):
            said = f"the file says that its {end.size} entries have the root {end.root.hex()}"
            message = f"{said}, there are {auditor.leaves} with the root {root.hex()}"
            found.append(Finding(run_id, None, "root", message))
        found += self.comparison.end(auditor.leaves)
        for each in self._kept:
            found += self._of_head(each, root)
        if key is not None:
            found += _unsigned(run_id, [each.note for each in self._kept], key, is_signed=is_signed)
        return found

    def _of_head(self, kept: KeptHead, root: bytes) -> Iterator[Finding]:
        head, size = kept.head, self.auditor.leaves
        if head.run_id != self.run_id:
            yield Finding(self.run_id, None, "head", f"a head in the file is one of run {head.run_id!r}")
        elif not merkle.verify_consistency(head.size, size, kept.proof, head.root, root):
            message = f"the proof beside the head of {head.size} entries does not lead from it to that of all {size}"
            yield Finding(self.run_id, None, "proof", message)


def _unsigned(run_id: str, found: list[Note], key: str, *, is_signed: bool) -> Iterator[Finding]:
    """What is not signed by this key. Raises `BadNote` where that is no key."""
    from agent_run_ledger.signing import Verifier

    verifier = Verifier(key)
    if is_signed and not found:
        yield Finding(run_id, None, "signature", "there is no head in the file that anybody could have signed")
    for note in found:
        try:
            verifier.check(note)
        except BadNote as error:
            yield Finding(run_id, None, "signature", f"a head in the file proves nothing: {error.why}")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(LONGEST), b"")


def _say(told: Told, entries: int) -> None:
    if told is not None and entries % _ENTRIES_BETWEEN_WORDS == 0:
        told(entries)


# --- import -----------------------------------------------------------------------------------------------------------


def take_in(store: Store, path: str | os.PathLike[str], told: Told) -> CopiedRun:
    """As `Ledger.import_run`."""
    place = os.fspath(path)
    with open(path, "rb") as file:
        checked = _Reading(file, place, told)
        checked.go_on()
        run_id, opening = check_run_id(checked.run_id), checked.opening

        def refusal(why: str) -> CopyRefused:
            return CopyRefused(run_id, store.place, why)

        if findings := checked.findings():
            raise refusal(f"{place} is damaged: {findings[0].message}. `verify` says more.")
        if not checked.auditor.state.is_terminal:
            raise refusal(
                "it has not ended. It goes on where it is, and what a bundle holds of it can be looked at and verified; "
                "`copy` moves it to another ledger."
            )
        if opening.secret is None or not opening.has_payloads:
            what = "its payloads" if not opening.has_payloads else "its secret"
            raise refusal(f"it was exported without {what}, and without that it can only be verified.")

        def rows() -> Iterator[Row]:
            """The entries once more, from a file that has not changed since it was checked."""
            file.seek(0)
            for part in bundles.parts(_lines(file), place):
                if isinstance(part, Row):
                    yield part
                elif isinstance(part, Digest) and part != checked.digest:
                    raise BadBundle(place, 1, "it was changed while it was read")

        there = store.head(run_id)
        begun = 0
        if there is not None:
            comes_back = there.moved_to is not None
            begun = _compare(rows(), store, run_id, comes_back, refusal)
            if not comes_back:
                return CopiedRun(run_id, store.place, begun, is_moved=False, was_there=True)
        asked = there.inbox if there is not None else 0
        requests = [each for each in checked.requests if each.id > asked]
        pages = _pages(row for row in rows() if row.seq > begun)
        is_written = store.adopt(run_id, checked.end.token, opening.secret, opening.listing, pages, requests, None)
    if not is_written:
        raise refusal("a run of this id existed and was deleted there, or was just made.")
    return CopiedRun(run_id, store.place, checked.auditor.leaves, is_moved=False, was_there=False)


def _compare(
    rows: Iterator[Row], store: Store, run_id: str, comes_back: bool, refusal: Callable[[str], CopyRefused]
) -> int:
    """How many entries stand in the ledger, all equal to those of the bundle, which has more only where the run was moved away."""
    number = 0
    there = chain.from_iterable(reading.pages(store, run_id))
    for number, (ours, theirs) in enumerate(zip_longest(rows, there), 1):
        if theirs is None and comes_back:
            return number - 1
        if says_erased(ours) and says_erased(theirs):
            continue  # it has ended, and each side may forget what it likes
        # A payload may have been erased on one side: the body names it.
        if ours is None or theirs is None or ours[:6] != theirs[:6]:
            raise refusal(f"another run of this id stands there; they differ at entry {number}.")
    return number


def _pages(rows: Iterable[Row]) -> Iterator[list[Row]]:
    page: list[Row] = []
    size = 0
    for row in rows:
        page.append(row)
        size += len(row.body) + len(row.payload or b"")
        if size > _BYTES_AT_ONCE:
            yield page
            page, size = [], 0
    if page:
        yield page
