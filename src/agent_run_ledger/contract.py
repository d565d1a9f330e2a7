"""What a store promises: finished bytes in, the same bytes out, and every write fenced. It knows no rules.

`testing.StoreContract` is this page as tests; a store that passes it can stand under the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from agent_run_ledger.errors import LedgerError


SECRET_BYTES = 32
"""The length of a run's secret. What is kept in its place and is longer is sealed under a key that somebody else keeps."""
SEALED = b"ARLK\x01"
"""What a sealed secret begins with; then come the length of its key's id in one byte, that id, and what was sealed."""
AES_GCM = "aes-256-gcm"
"""The encoding of what is kept encrypted: `Row.encoding`."""
PACKED = "packed"
"""The encoding of what is kept in pieces, some of them copied from earlier entries of the run: `stores/packing.py` says how."""
PACKED_AES_GCM = "packed, aes-256-gcm"
"""The encoding of what was packed and then encrypted."""


def sealed_under(secret: bytes) -> str | None:
    """The id of the key under which a run's secret is sealed; None where it is plain, or where a file holds something else in its place."""
    if type(secret) is not bytes or len(secret) <= SECRET_BYTES or not secret.startswith(SEALED):
        return None
    begin = len(SEALED) + 1
    return secret[begin : begin + secret[begin - 1]].decode(errors="replace")


class Clock(Protocol):
    """The three times a ledger needs. `testing.FakeClock` is one that a test can move."""

    def now(self) -> float:
        """Wall time, Unix seconds: only ever recorded, never compared between owners."""

    def elapsed(self) -> float:
        """Seconds of a clock that never goes back and goes on while the machine sleeps: leases are measured by it."""

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class Row(NamedTuple):
    """One entry as it is stored. `body` holds the hashed bytes; what stands beside it is a copy or can be erased."""

    seq: int
    """From 1, without gaps, per run."""
    kind: str
    position: str | None
    attempt: int | None
    body: bytes
    roots: bytes
    """The roots of the subtrees that this entry closes, 32 bytes each, smallest first; the first is the leaf itself."""
    payload: bytes | None = None
    """The exact bytes of arguments, output, error, goal or reason; None where there is none, it was erased, or was left out."""
    digest: bytes | None = None
    """SHA-256 of the payload as it was before any encoding; goes with the payload: beside it a payload of None was left out."""
    fingerprint: bytes | None = None
    """SHA-256 of tool and argument digest, for intents; goes with the payload."""
    encoding: str | None = None
    """How the payload is kept where it is not kept plainly; None for whoever uses a ledger's own store, which gives every payload plainly."""


class Append(NamedTuple):
    """One run's rows on their way into the store: the arguments of `append`."""

    run_id: str
    token: int
    inbox: int
    rows: Sequence[Row]


class Lease(NamedTuple):
    """The right to append to one run, as `create` and `claim` give it."""

    run_id: str
    owner: str
    token: int
    """The fencing token: every change of owner raises it, every write carries it."""
    secret: bytes
    """The run's 32 random bytes that salt its digests; empty where they were erased."""
    agent: str | None = None
    """The agent of its listing, where `claim_due` gave the lease: who claims one run by name knows whose it is."""
    deaths: int = 0
    """As `Head.deaths` says when the lease is given."""


class Listing(NamedTuple):
    """What a listing sorts a run by and a worker finds it by: copies of what its first entry says."""

    created_at: float
    """Wall time of its first entry, Unix seconds."""
    agent: str | None = None
    """The name of the agent that is its program; None where that is not registered anywhere."""
    queue: str | None = None
    """Whose workers may take it; None where none ever looks at it."""
    priority: int = 0
    """Larger ones are taken first."""
    key: str | None = None
    """Runs of one queue with an equal key can be limited together."""


class Head(NamedTuple):
    """The mutable row of a run: who owns it, and how many requests of others wait in its inbox."""

    run_id: str
    owner: str | None
    token: int
    inbox: int
    note: str | None
    """A divergence that a program met; it proves nothing and goes with the next entry or claim."""
    listing: Listing
    idle_seconds: float | None = None
    """Since its owner claimed or renewed it, by the store's clock; None without an owner, or where another boot's clock counts."""
    lease_left: float | None = None
    """Seconds until the lease runs out, negative once it has; None as above."""
    due_in: float | None = None
    """Seconds until a worker may take it, 0 or less where one may now; None where none will look before a request comes."""
    moved_to: str | None = None
    """Where the run goes on, once it was moved away from here: nobody owns it here, and it is never due."""
    deaths: int = 0
    """From how many owners it was taken since its last entry was written, because they were dead or their lease ran out. Who gives the
    run back in good order leaves the number as it is, and an adopted run begins with none."""


class QueueTerms(NamedTuple):
    """One queue that a worker serves, and how many of its runs may be owned at once, by all workers together."""

    name: str
    concurrency: int | None = None
    """Of the whole queue; None: as many as there are slots."""
    per_key: int | None = None
    """Of those with one `key`; runs without a key are not limited."""

    @property
    def is_limited(self) -> bool:
        """Whether a run that is due may have to wait for others to end."""
        return self.concurrency is not None or self.per_key is not None


class Beat(NamedTuple):
    """What a worker said last."""

    worker: str
    said: bytes
    idle_seconds: float
    """Since it said so, by the store's clock."""


class Request(NamedTuple):
    """What somebody who is not the owner asks of a run, in the order in which it came."""

    id: int
    kind: str
    payload: bytes
    who: str
    at: float


class Summary(NamedTuple):
    """What a listing needs of one run, without reading all of it."""

    head: Head
    first: Row
    last: Row


class Erasure(NamedTuple):
    """What is to be erased of an ended run, by the numbers of its entries and of the requests in its inbox, each from first to last."""

    entries: Sequence[tuple[int, int]]
    requests: Sequence[tuple[int, int]] = ()
    secret: bool = False
    """Whether the run's secret goes, too."""
    packed: Sequence[Row] = ()
    """Entries that stay and copied from what goes, each with the packed payload that takes the place of its own. All else of them stays."""


class Tombstone(NamedTuple):
    """What is left of a deleted run: how long its log was, its root, who deleted it, why, and when (Unix seconds)."""

    run_id: str
    size: int
    root: bytes
    who: str
    why: str
    at: float


class Queues(Protocol):
    """How workers find runs. A run of a queue is *due* at a time of the store's clock, or not before a request comes.

    Whoever may lose a run says when it is due, so that no run is forgotten: a run that is owned stays due from when it was claimed,
    so that a dead owner's is taken again. A run without a queue is never due.
    """

    def enqueue(self, run_id: str, secret: bytes, rows: Sequence[Row], listing: Listing, due_in: float) -> bool:
        """Make a run with its first entries that nobody owns, due in so many seconds, on stable storage.

        False where a run of that id exists already: nothing is written then. Workers that wait are told.
        """

    def claim_due(
        self, owner: str, lease_seconds: float, queues: Sequence[QueueTerms], agents: Sequence[str], at_most: int
    ) -> list[Lease]:
        """Take up to `at_most` runs of these queues and agents that are due and that nobody owns, each under a new token.

        Larger priority first, then the one that has been due for longer, over all the queues together. No limit of a queue is passed,
        however many claim at once. Skips what others are claiming at this moment.
        """

    def next_due(self, queues: Sequence[str], agents: Sequence[str]) -> float | None:
        """Seconds until the first run of these that nobody owns is due, 0.0 where one is now; None where there is none. Waits for no lock."""

    def free_dead(self) -> int:
        """Take every run of a queue from an owner who is known to be dead or whose lease ran out, and say how many there were."""

    def wait_for_work(self, seconds: float) -> bool:
        """Return after `seconds`, or at once (True) when somebody may have made a run due or called `wake`. Only ever a hint.

        Whatever happened since the calling thread waited last counts, so that nothing falls between a claim that found nothing and the wait.
        """

    def wake(self) -> None:
        """Let all of this store's `wait_for_work` return."""

    def beat(self, worker: str, said: bytes) -> None:
        """Note what a worker says of itself, and that it lives now."""

    def leave(self, worker: str) -> None:
        """Forget a worker, which has ended in good order."""

    def workers(self) -> list[Beat]:
        """What all workers said last, those that were first heard first; dead ones too, until they are forgotten after a day."""


class Store(Queues, Protocol):
    """One ledger's storage. Thread-safe. Every verb is one transaction; none calls user code."""

    is_remote: bool
    """Whether its verbs may wait for a network: an event loop must not call them itself."""
    place: str
    """Where it is, in words for people, without secrets: a path, or an address."""

    def first_token(self) -> int:
        """The fencing token that `create` gives: the epoch, times 2**20, plus one. A restored backup begins a new epoch."""

    def create(
        self, run_id: str, owner: str, lease_seconds: float, secret: bytes, rows: Sequence[Row], listing: Listing
    ) -> Lease | None:
        """Make a run with its first entries and give it to `owner` with the first token, on stable storage.

        None where a run of that id exists already: nothing is written then. Where it has a queue it is due from now on.
        """

    def adopt(
        self,
        run_id: str,
        token: int,
        secret: bytes,
        listing: Listing,
        pages: Iterable[Sequence[Row]],
        requests: Sequence[Request],
        due_in: float | None,
    ) -> bool:
        """Take in a run of another store as it stands there, all of it or nothing, owned by nobody, on stable storage.

        `token` is the last one that was given there; the next claim gives a larger one. A run that was moved away from here comes
        back so: its `pages` and `requests` begin behind what stands here. False where any other run of that id exists, or existed
        and was deleted.
        """

    def move_away(self, run_id: str, token: int, place: str) -> None:
        """Let go of a run for good, on stable storage, because it goes on at `place`: nothing is appended to it here any more.

        From now on `claim` and `post` raise `RunMoved`, and no worker is given it. Raises `LeaseLost` where the token is old.
        """

    def claim(self, run_id: str, owner: str, lease_seconds: float) -> Lease:
        """Take a run that nobody holds, whose owner is known to be dead, or whose lease ran out; on stable storage.

        The token goes up whenever the owner changes or a new claim is made; an owner that claims its own live run gets the lease it
        has, renewed. A run of a queue is due from then on, for it could be lost. Raises `RunNotFound`, `RunOwned` while somebody else
        holds it, or `RunMoved`.
        """

    def renew(self, run_id: str, token: int, lease_seconds: float) -> int:
        """Move the lease's end and return the inbox counter. Raises `LeaseLost` where the token is old."""

    def release(self, run_id: str, token: int, *, inbox: int = 0, due_in: float | None = None) -> None:
        """Give the run back. Does nothing where the token is old.

        A run of a queue is due in `due_in` seconds; at once where its inbox is past `inbox`, which is as far as the owner has looked;
        with None not before a request comes.
        """

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        """Write all rows or none, if the token is the run's token and its inbox counter is still `inbox`.

        True: written, and on stable storage if `synced`. False: the inbox has moved, nothing is written. Raises `LeaseLost` where the
        token is old. After a failure in which nothing is known the store looks the rows up before it answers. Rows that stand there
        already, byte for byte, are not written again and answer True, whatever came into the inbox since: what raised
        `StoreUnavailable` may be called again as it was. Other bytes at a seq that is taken are refused with a `StoreError`.
        """

    def append_all(self, appends: Sequence[Append], *, synced: bool) -> list[bool | LedgerError]:
        """Do many appends in one transaction, so with one sync, and answer each as if `append` had been called for it, in order.

        True and False as there, and the error that it would have raised. Each is written whole or not at all, and one that is
        refused fails no other. A run may come more than once: the later ones build on the earlier. What happens to the storage is
        never raised: where it takes nothing, or nothing is known after a failure, every answer says so, and only of what is
        written all the same it is True. Raises `Reentered`, for then nothing was begun.
        """

    def read(
        self, run_id: str, after: int = 0, *, limit: int | None = None, payloads_up_to: int | None = None
    ) -> list[Row]:
        """The entries of a run with `seq > after`, in order, the first `limit` of them; [] where there is none.

        A payload of more than `payloads_up_to` bytes, as it is kept, is left out where it has a digest: its row has the digest and
        None for the payload, and costs no memory for it. Both None: everything.
        """

    def payload(self, run_id: str, seq: int) -> bytes | None:
        """The payload of one entry, as `read` gives it whole; None where there is none, it was erased, or there is no such entry."""

    def roots(self, run_id: str, seqs: Sequence[int]) -> dict[int, bytes]:
        """The `roots` of these entries of a run, by seq, and nothing else of them, in one look; without those that are not there."""

    def sync(self, run_id: str) -> None:
        """Return when what stands in the run by now is on stable storage, whoever wrote it and however; also where nothing may be written."""

    def head(self, run_id: str) -> Head | None:
        """The run's head, or None where there is no such run."""

    def secret(self, run_id: str) -> bytes:
        """The run's secret as it was given; empty where it was erased."""

    def reseal(self, run_id: str, sealed: bytes, anew: bytes) -> bool:
        """Put `anew` in the place of a run's sealed secret, on stable storage. False where another one stands there, or a plain one."""

    def summaries(self, run_id: str | None = None) -> Iterator[Summary]:
        """One summary per run, oldest first; of one run where `run_id` is given. Reads in pages, holds no transaction in between."""

    def post(self, run_id: str, kind: str, payload: bytes, who: str, at: float, *, due_in: float = 0.0) -> int:
        """Put a request into a run's inbox and return its id, which is the new inbox counter. Raises `RunNotFound` and `RunMoved`.

        A run of a queue is due in `due_in` seconds, unless it is sooner. Workers that wait are told.
        """

    def inbox(self, run_id: str, after: int) -> list[Request]:
        """The requests with `id > after`, in order."""

    def annotate(self, run_id: str, token: int, note: str | None) -> None:
        """Set the head's note, where the token is the run's."""

    def erase(self, run_id: str, token: int, rows: Sequence[Row], erasure: Erasure) -> None:
        """Append these rows, which say so, and erase what `erasure` names, in one transaction, on stable storage.

        Payloads go with their digests, fingerprints and encodings; what another entry of the run shares stays that one's. Packed payloads
        of entries that stay are put in the place of those there, and of nothing that is not packed. Requests lose
        what was asked, which is `{}` then, and who asked. Raises `LeaseLost` where the token is old. May be called again as it was.
        """

    def delete(self, tombstone: Tombstone, token: int) -> None:
        """Leave nothing of an ended run but its tombstone, in one transaction, on stable storage. Its id is never used again.

        Raises `LeaseLost` where the token is old, and a `StoreError` where the run has not ended or has another size.
        """

    def tombstone(self, run_id: str) -> Tombstone | None:
        """What is left of a run that was deleted; None where none of that id was."""

    def scrub(self) -> list[str]:
        """Take what was erased or deleted out of the storage for good, and say what may still hold it, one sentence each.

        May rewrite the whole storage, which keeps writers waiting meanwhile.
        """

    def check(self) -> Iterable[str]:
        """What the storage itself knows to be wrong with it, one sentence each; nothing where it is sound."""

    def close(self) -> None:
        """Give back every run this store claimed and let go of the storage. Calling it again does nothing."""
