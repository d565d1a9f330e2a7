"""Packed payloads: whatever is packed comes back byte for byte, in any order and after any erasing, and nothing else is taken for one."""

from __future__ import annotations

import builtins
import os
import random
import signal
import zlib
from binascii import crc32
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger.contract import PACKED, Append, Erasure, Lease, Row, Store
from agent_run_ledger.errors import LeaseLost, StoreCorrupt, StoreError, StoreUnavailable
from agent_run_ledger.stores import open_store
from agent_run_ledger.stores.memory import MemoryStore
from agent_run_ledger.stores.packed import LONG_BYTES, PackedStore, packed
from agent_run_ledger.stores.packing import MOST_BYTES, MOST_DEPTH, OWN, Packed, Piece, decode, encode, plain_size
from agent_run_ledger.stores.repeats import Parts
from agent_run_ledger.stores.unpacking import _Source
from agent_run_ledger.testing import FakeClock, StoreContract, a_row
from agent_run_ledger.testing.stores.words import create
from support.ledgers import KINDS, Bench
from support.talking import as_payload, message, noise, text


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestPackedStore(StoreContract):
    """What packs is a store like any other."""

    @pytest.fixture(params=["memory", "sqlite"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
        place = ":memory:" if request.param == "memory" else tmp_path / "ledger.db"
        store = packed(open_store(place, durability="process", clock=clock))
        yield store
        store.close()


def rows_of(payloads: Sequence[bytes], first: int = 2) -> list[Row]:
    return [
        a_row(seq, payload=payload)._replace(digest=sha256(payload).digest())
        for seq, payload in enumerate(payloads, first)
    ]


def append(store: Store, lease: Lease, rows: Sequence[Row]) -> None:
    for row in rows:
        assert store.append("r", lease.token, 0, [row], synced=False)


def kept(store: Store) -> int:
    """How many bytes of payloads the storage has."""
    return sum(len(row.payload or b"") for row in store.read("r"))


# --- what is packed comes back ----------------------------------------------------------------------------------------

BLOCKS = [text(random.Random(seed), size) for seed, size in enumerate([5, 60, 300, 700, 2_000, 9_000, 30_000])]
values = st.recursive(
    st.sampled_from([*BLOCKS, BLOCKS[3] + '"\\', '\\"' * 400, "ä" * 900, "", 17, 1.5, None, [0.125] * 300]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(["content", "role", '"', "\\"]), inner, max_size=3)
        | st.builds(lambda each: [{"content": each, "role": "user"}] * 3, inner)
    ),
    max_leaves=12,
)
json_payloads = values.map(as_payload)
any_payloads = (
    json_payloads
    | st.binary(max_size=200)
    | st.builds(lambda each, count: each * count, st.binary(min_size=1, max_size=40), st.integers(1, 900))
    | st.builds(
        lambda parts: b'"'.join(parts),
        st.lists(st.sampled_from([b"\\", b"},{", b"[{", b"]", b",", b"x" * 600]), max_size=30),
    )
)


@given(payload=any_payloads)
def test_the_parts_of_a_payload_are_the_payload(payload: bytes) -> None:
    digests, offsets = Parts.of(payload)
    assert (offsets[0], offsets[-1], len(digests)) == (0, len(payload), len(offsets) - 1)
    assert digests == [sha256(payload[a:b]).digest() for a, b in pairwise(offsets)]
    assert all(a < b for a, b in pairwise(offsets)) or payload == b""


@settings(deadline=None, max_examples=150)
@given(
    payloads=st.lists(any_payloads, max_size=14),
    fresh=st.sets(st.integers(0, 14)),
    erased=st.sets(st.integers(2, 16)),
    also=st.sets(st.integers(2, 16)),
)
def test_any_payloads_in_any_order_come_back_also_in_another_process_and_when_others_were_erased(
    payloads: list[bytes], fresh: set[int], erased: set[int], also: set[int]
) -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rows = rows_of(payloads)
    for number, row in enumerate(rows):
        if number in fresh:
            store = packed(inner)
        append(store, lease, [row])
    assert store.read("r")[1:] == packed(inner).read("r")[1:] == rows
    assert all(store.payload("r", row.seq) == row.payload for row in rows)
    assert all(
        row.encoding is None or len(row.payload or b"") < len(rows[row.seq - 2].payload or b"")
        for row in inner.read("r")
    )
    size = len(rows) + 1
    for number, gone in enumerate([erased, also], 1):
        spans = [(seq, seq) for seq in sorted(gone) if seq <= size]
        store.erase("r", lease.token, [a_row(size + number, "erased", state="COMPLETED")], Erasure(spans))
        rows = [row._replace(payload=None, digest=None) if row.seq in gone else row for row in rows]
        assert store.read("r")[1:size] == packed(inner).read("r")[1:size] == rows


@settings(deadline=None, max_examples=50)
@given(payload=json_payloads, limit=st.integers(0, 60_000))
def test_what_is_left_out_is_what_is_longer_once_it_is_put_together(payload: bytes, limit: int) -> None:
    store = packed(MemoryStore(clock=FakeClock()))
    lease = create(store, "r")
    rows = rows_of([payload, payload])
    append(store, lease, rows)
    left = [row if len(payload) <= limit else row._replace(payload=None) for row in rows]
    assert store.read("r", 1, payloads_up_to=limit) == left


# --- what is copied ---------------------------------------------------------------------------------------------------


def talk(turns: int, size: int, window: int | None = None) -> list[bytes]:
    """What the entries of a conversation hold: the messages so far, and the answer, again and again."""
    rng = random.Random(7)
    messages: list[dict[str, str]] = []
    payloads = []
    for _ in range(turns):
        messages = [*messages, message("user", text(rng, size))][-(window or turns * 2) :]
        answer = text(rng, size)
        payloads += [as_payload({"messages": messages, "model": "m"}), as_payload(answer)]
        messages = [*messages, message("assistant", answer)]
    return payloads


@pytest.mark.parametrize("size", [100, 300, 600, 2_000])
@pytest.mark.parametrize("window", [None, 100])
def test_a_list_that_grows_or_slides_is_kept_once_however_short_its_messages_are(size: int, window: int | None) -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    payloads = talk(300, size, window)
    append(store, lease, rows_of(payloads))
    assert [row.payload for row in store.read("r", 1)] == payloads
    entries = 600
    assert kept(inner) < entries * (1.05 * size + 120)


def test_an_edit_in_the_middle_costs_the_message_that_was_edited() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    messages = [message("user", text(rng, 1_000)) for _ in range(200)]
    append(store, lease, rows_of([as_payload(messages)]))
    before = kept(inner)
    messages[77] = message("user", text(rng, 1_000))
    del messages[150]
    edited = as_payload(messages)
    append(store, lease, rows_of([edited], 3))
    assert kept(inner) - before < 1_300
    assert store.payload("r", 3) == edited


def test_a_document_that_is_passed_along_is_kept_once_wherever_it_stands() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    document, vector = text(rng, 50_000), [rng.random() for _ in range(1_000)]
    payloads = [
        as_payload(document),
        as_payload({"page": document, "question": "who?"}),
        as_payload([{"text": document}, {"text": "short"}]),
        as_payload(vector),
        as_payload({"k": 3, "vector": vector}),
        as_payload(document),
    ]
    append(store, lease, rows_of(payloads))
    assert [row.payload for row in store.read("r", 1)] == payloads
    assert kept(inner) < 1.05 * (len(payloads[0]) + len(payloads[3]))


def test_a_payload_that_is_no_shorter_packed_is_kept_plainly_and_found_again() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    bytes_of_chance = random.Random(1).randbytes(20_000).replace(b'"', b"'")
    append(store, lease, rows_of([bytes_of_chance, b"[" + bytes_of_chance[: LONG_BYTES - 2] + b"]", bytes_of_chance]))
    assert [row.encoding for row in inner.read("r", 1)] == [None, None, PACKED]
    assert store.payload("r", 4) == bytes_of_chance


def test_short_payloads_stay_plain_and_those_of_a_conversation_are_packed_from_1_kb_on() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    append(store, lease, rows_of([as_payload(text(rng, size)) for size in (3_000, 5_000, 3_000, 900)]))
    assert [row.encoding for row in inner.read("r", 1)] == [None, PACKED, PACKED, None]


def test_a_short_answer_in_a_conversation_is_found_again_in_the_next_question() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    said, answer = [message("system", text(rng, 6_000))], noise(rng, 900)
    append(
        store, lease, rows_of([as_payload(said), as_payload(answer), as_payload([*said, message("assistant", answer)])])
    )
    assert [row.encoding for row in inner.read("r", 1)] == [PACKED, None, PACKED]
    assert len(inner.payload("r", 4) or b"") < 100


def test_what_is_known_of_runs_is_bounded_and_who_was_written_to_last_is_kept() -> None:
    store = PackedStore(MemoryStore(clock=FakeClock()))
    rng = random.Random(3)
    payload = as_payload([message("user", text(rng, 70)) for _ in range(9_000)])
    for number in range(12):
        lease = create(store, f"r{number}")  # type: ignore[arg-type]
        assert store.append(f"r{number}", lease.token, 0, rows_of([payload]), synced=False)
    assert store._digests == sum(each.size for each in store._runs.values()) <= 131_072
    assert list(store._runs)[-1] == "r11"
    assert len(store._runs) < 12


# --- only what stands in the store is copied --------------------------------------------------------------------------


class Failing(MemoryStore):
    """Fails once, after or before it has written."""

    moment = "never"

    def append(self, run_id: str, token: int, inbox: int, rows: Sequence[Row], *, synced: bool) -> bool:
        moment, self.moment = self.moment, "never"
        if moment == "before":
            raise StoreUnavailable("it fails")
        if moment == "refused":
            return False
        super().append(run_id, token, inbox, rows, synced=synced)
        if moment == "after":
            raise StoreUnavailable("nobody knows")
        return True


@pytest.mark.parametrize("moment", ["before", "after", "refused"])
def test_what_was_not_acknowledged_is_copied_from_by_nobody(moment: str) -> None:
    inner = Failing(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    first, lost = (as_payload(text(rng, 20_000)) for _ in range(2))
    append(store, lease, rows_of([first]))
    inner.moment = moment
    (row,) = rows_of([lost], 3)
    if moment == "refused":
        assert not store.append("r", lease.token, 0, [row], synced=True)
    else:
        with pytest.raises(StoreUnavailable):
            store.append("r", lease.token, 0, [row], synced=True)
    if moment == "after":
        assert store.append("r", lease.token, 0, [row], synced=True)  # as it was: the rows stand there
        append(store, lease, rows_of([lost, first], 4))
        assert [row.payload for row in store.read("r", 1)] == [first, lost, lost, first]
    else:
        append(store, lease, rows_of([first, lost], 3))
        assert [row.payload for row in store.read("r", 1)] == [first, first, lost]


def test_of_many_appends_that_are_written_together_none_copies_from_another() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    payload = as_payload(text(rng, 20_000))
    given = [Append("r", lease.token + (number == 0), 0, rows_of([payload], 2)) for number in range(2)]
    refused, written = store.append_all(given, synced=True)
    assert isinstance(refused, LeaseLost)
    assert written is True
    assert store.payload("r", 2) == payload


def test_what_was_lost_before_the_run_came_back_to_its_owner_is_copied_from_by_nobody() -> None:
    """A server that took over from another one may not have its last commits; whoever claims the run then has a new token."""
    inner = MemoryStore(clock=FakeClock())
    store, other = packed(inner), packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    first, lost, instead = (as_payload(text(rng, 20_000)) for _ in range(3))
    append(store, lease, rows_of([first, lost]))
    inner._runs["r"].rows.pop()
    for who, which, payload in (("b", other, instead), ("a", store, lost)):
        inner.release("r", lease.token)
        lease = which.claim("r", who, 30.0)
        append(which, lease, rows_of([payload], len(inner.read("r")) + 1))
    assert [row.payload for row in packed(inner).read("r", 1)] == [first, instead, lost]


def test_a_process_that_is_forked_while_another_thread_packs_goes_on_by_itself() -> None:
    store = PackedStore(MemoryStore(clock=FakeClock()))
    lease = create(store, "r")  # type: ignore[arg-type]
    rng = random.Random(3)
    rows = rows_of([as_payload(text(rng, 20_000))] * 2)
    append(store, lease, rows[:1])  # type: ignore[arg-type]
    with store._lock, store._unpacking._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            append(store, lease, rows[1:])  # type: ignore[arg-type]
            os._exit(store.read("r", 1) != rows)
    assert os.waitpid(child, 0)[1] == 0


def test_what_was_lost_while_its_owner_went_on_is_copied_from_by_nobody() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    first, lost, instead = (as_payload(text(rng, 20_000)) for _ in range(3))
    append(store, lease, rows_of([first, lost]))
    inner._runs["r"].rows.pop()
    with pytest.raises(StoreError, match="must have the seq that follows"):
        store.append("r", lease.token, 0, rows_of([b"short"], 4), synced=False)
    assert isinstance(store.append_all([Append("r", lease.token, 0, [a_row(4)])] * 2, synced=False)[0], StoreError)
    append(store, lease, rows_of([instead, lost], 3))
    assert [row.payload for row in packed(inner).read("r", 1)] == [first, instead, lost]


def test_who_has_read_what_was_lost_reads_what_stands_there_instead() -> None:
    inner = MemoryStore(clock=FakeClock())
    reader = packed(inner)
    lease = create(inner, "r")
    rng = random.Random(3)
    lost, instead = (as_payload(text(rng, 20_000)) for _ in range(2))
    append(packed(inner), lease, rows_of([lost, lost]))
    assert reader.payload("r", 3) == lost
    del inner._runs["r"].rows[1:]
    append(packed(inner), lease, rows_of([instead, instead]))
    assert reader.payload("r", 3) == instead


# --- erasing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_puts_a_packed_payload_in_the_place_of_a_packed_one_and_of_nothing_else(
    kind: str, tmp_path: Path
) -> None:
    def container(word: bytes) -> bytes:
        return encode(3, Packed(len(word), 0, [Piece(len(word), OWN, 0)], word))

    with Bench(kind, tmp_path) as bench, closing(bench.store()) as store:
        lease = create(store, "r")
        plain, old = a_row(2, payload=b"plain"), a_row(3, payload=container(b"old"))._replace(encoding=PACKED)
        gone, end = a_row(4, payload=b"gone"), a_row(5, "finished", state="COMPLETED")
        assert store.append("r", lease.token, 0, [plain, old, gone, end], synced=True)
        new = [plain._replace(payload=b"other", encoding=PACKED), old._replace(payload=container(b"new"))]
        for _ in range(2):
            said = a_row(6, "erased", state="COMPLETED")
            store.erase("r", lease.token, [said], Erasure([(4, 4)], packed=[*new, gone._replace(encoding=PACKED)]))
        rows = store.read("r", 1)
        assert rows[:2] == [plain, old._replace(payload=container(b"new"))]
        assert rows[2].payload is None
        assert list(store.check()) == []


def test_the_bytes_of_what_is_erased_are_gone_and_each_is_kept_once_by_those_that_need_it() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    rng = random.Random(3)
    said = [noise(rng, 12_000) for _ in range(3)]
    payloads = [as_payload(said[:2]), *[as_payload({"of": said[1], "n": n, "to": said[2]}) for n in range(20)]]
    append(store, lease, rows_of(payloads))
    before = kept(inner)
    store.erase("r", lease.token, [a_row(23, "erased", state="COMPLETED")], Erasure([(2, 2)]))
    assert [row.payload for row in store.read("r", 2, limit=20)] == payloads[1:]
    assert abs(before - kept(inner) - 6_900) < 1_500  # the first is gone; the second stands in one of the twenty
    assert said[0].encode() not in b"".join(inflated(row) for row in inner.read("r"))


def test_an_entry_that_holds_what_is_erased_twice_gets_it_twice_and_others_copy_from_it() -> None:
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    document = text(random.Random(3), 6_000)
    payloads = [as_payload(document), as_payload([document, document]), as_payload({"a": document, "b": document})]
    append(store, lease, rows_of(payloads))
    store.erase("r", lease.token, [a_row(5, "erased", state="COMPLETED")], Erasure([(2, 2)]))
    assert [row.payload for row in packed(inner).read("r", 2, limit=2)] == payloads[1:]
    assert len(inner.payload("r", 4) or b"") < 100


def test_who_has_read_a_run_before_something_of_it_was_erased_reads_the_rest_afterwards() -> None:
    inner = MemoryStore(clock=FakeClock())
    store, reader = packed(inner), PackedStore(inner)
    lease = create(store, "r")
    document = text(random.Random(3), 6_000)
    payloads = [as_payload(document), as_payload({"a": document}), as_payload({"a": document, "b": 1})]
    append(store, lease, rows_of(payloads))
    assert reader.payload("r", 3) == payloads[1]
    store.erase("r", lease.token, [a_row(5, "erased", state="COMPLETED")], Erasure([(2, 2)]))
    reader._unpacking._kept[("r", 3)] = _Source(None, decode(3, encode(3, Packed(6_002, 1, [Piece(6_002, 2, 0)], b""))))
    reader._unpacking._kept.pop(("r", 2), None)  # it was read long ago
    assert reader.payload("r", 4) == payloads[2]


def inflated(row: Row) -> bytes:
    """All that stands in a payload as it is kept."""
    return decode(row.seq, row.payload).own if row.encoding == PACKED and row.payload else row.payload or b""


# --- what is damaged --------------------------------------------------------------------------------------------------

SOME = Packed(
    5_000, 1, [Piece(3_000, OWN, 0), Piece(1_500, 4, 17), Piece(500, OWN, 3_000)], random.Random(1).randbytes(3_500)
)


def sealed(body: bytes) -> bytes:
    return body + crc32(body).to_bytes(4, "big")


def test_every_byte_of_a_packed_payload_matters() -> None:
    for own in (SOME.own, bytes(3_500)):  # as it is, and deflated
        container = encode(9, SOME._replace(own=own))
        assert decode(9, container) == SOME._replace(own=own)
        for at in range(0, len(container), 1 if len(container) < 500 else 17):
            with pytest.raises(ValueError, match="check sum"):
                decode(9, container[:at] + bytes([container[at] ^ 1]) + container[at + 1 :])
        for changed in (container[:-1], container + b"\x00", b""):
            with pytest.raises(ValueError, match="check sum"):
                decode(9, changed)


def squeezed(body: bytes) -> bytes:
    deflating = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflating.compress(body) + deflating.flush()


@pytest.mark.parametrize(
    "body",
    {
        "of a kind to come": b"\x03\x01\x00\x01\x02a",
        "spare bytes behind": b"\x01\x01\x00\x01\x02ab",
        "own bytes are missing": b"\x01\x02\x00\x01\x04a",
        "shorter than it says": b"\x01\x09\x00\x01\x02a",
        "a piece of nothing": b"\x01\x01\x00\x02\x02\x00a",
        "copies from itself": b"\x01\x01\x01\x01\x03\x00\x00",
        "copies from later": b"\x01\x01\x01\x01\x03\x09\x00",
        "copies and is not deep": b"\x01\x01\x00\x01\x03\x01\x00",
        "deeper than may be": b"\x01\x01\x41\x01\x02a",
        "a number longer than it has to be": b"\x01\x81\x00\x00\x01\x02a",
        "a number without an end": b"\x01" + b"\xff" * 12,
        "more pieces than bytes": b"\x01\x01\x00\xff\x7f\x02a",
        "longer than any payload": b"\x01\x81\x80\x80\x80\x01\x00\x01\x02a",
        "inflates to more than it says": b"\x02\x01\x00\x03" + squeezed(b"\x01\x02a" + bytes(1_000_000)),
        "says that it inflates to more than it could hold": b"\x02\x01\x00\xff\xff\x7f" + squeezed(bytes(2_000_000)),
        "spare bytes behind what is deflated": b"\x02\x01\x00\x03" + squeezed(b"\x01\x02a") + b"x",
        "deflated and cut off": b"\x02\x01\x00\x03" + squeezed(b"\x01\x02a")[:-2],
        "not deflated": b"\x02\x01\x00\x03\xff\xff",
    }.values(),
)
def test_what_is_no_packed_payload_is_refused_whatever_its_check_sum_says(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(9, sealed(body))


def tampered(rows: list[Row]) -> Store:
    """A store that holds exactly these rows, through the one that puts them together."""
    inner = MemoryStore(clock=FakeClock())
    lease = create(inner, "r", rows=rows[:1])
    assert inner.append("r", lease.token, 0, rows[1:], synced=True)
    return packed(inner)


def a_packed(seq: int, *pieces: Piece, own: bytes = b"", depth: int = 1) -> Row:
    container = encode(seq, Packed(sum(piece.size for piece in pieces), depth, list(pieces), own))
    return a_row(seq, payload=container)._replace(encoding=PACKED)


@pytest.mark.parametrize(
    "rows",
    {
        "from an entry without a payload": [a_row(1), a_packed(2, Piece(9, 1, 0))],
        "from one that is too short": [a_row(1, payload=b"short"), a_packed(2, Piece(9, 1, 0))],
        "from behind the end of one": [a_row(1, payload=b"short"), a_packed(2, Piece(1, 1, 5))],
        "from a packed one that is too short": [
            a_row(1, payload=b"short"),
            a_packed(2, Piece(5, 1, 0)),
            a_packed(3, Piece(2, 2, 4), depth=2),
        ],
        "deeper than it says": [
            a_row(1, payload=b"short"),
            a_packed(2, Piece(5, 1, 0)),
            a_packed(3, Piece(5, 2, 0)),
        ],
        "from what is kept in another way": [
            a_row(1, payload=b"short")._replace(encoding="zlib"),
            a_packed(2, Piece(5, 1, 0)),
        ],
        "from one that is damaged": [
            a_row(1, payload=b"short"),
            a_row(2, payload=b"\x01broken")._replace(encoding=PACKED),
            a_packed(3, Piece(5, 2, 0), depth=2),
        ],
    }.values(),
)
def test_what_copies_from_where_nothing_is_cannot_be_read(rows: list[Row]) -> None:
    store = tampered(rows)
    with pytest.raises(StoreCorrupt, match=rf"entry {len(rows)}: its payload is packed and cannot be put together"):
        store.payload("r", len(rows))
    assert store.read("r", payloads_up_to=0)[-1].payload is None
    (summary,) = store.summaries("r")
    assert summary.last == rows[-1]  # as it is kept, for whoever lists


def test_what_would_take_all_memory_is_refused_before_it_is_made() -> None:
    """Each entry says that it is the one before, sixteen times."""
    rows = [a_row(1, payload=b"x" * 4_096)]
    size = 4_096
    while size * 16 <= MOST_BYTES:
        seq = rows[-1].seq + 1
        rows.append(a_packed(seq, *[Piece(size, seq - 1, 0)] * 16, depth=min(seq, MOST_DEPTH)))
        size *= 16
        assert plain_size(rows[-1].payload or b"") == size
    one_more = encode(9, Packed(size * 16, 9, [Piece(size, 8, 0)] * 16, b""))
    with pytest.raises(ValueError, match="says that it has"):
        decode(9, one_more)


def test_a_python_without_zlib_packs_what_repeats_and_reads_that(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without_zlib(name: str, *arguments: Any) -> Any:
        if name == "zlib":
            raise ImportError(name)
        return imports(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_zlib)
    inner = MemoryStore(clock=FakeClock())
    store = packed(inner)
    lease = create(store, "r")
    payload = as_payload(text(random.Random(3), 9_000))
    append(store, lease, rows_of([payload, payload]))
    assert [row.encoding for row in inner.read("r", 1)] == [None, PACKED]
    assert store.payload("r", 3) == payload


def test_a_payload_says_how_long_it_is_before_it_is_put_together() -> None:
    assert plain_size(encode(9, SOME)) == 5_000
