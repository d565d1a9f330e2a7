"""`verify` names every line that somebody changed, dropped, moved or added behind the ledger's back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    Finding,
    Receipt,
    RetryPolicy,
    RunawayLoopException,
    StepFailed,
    VerificationReport,
    merkle,
)
from agent_run_ledger.engine.audit import audit
from agent_run_ledger.engine.history import History
from support.ledgers import KINDS, Bench, Died, Tool, packs_nothing, raising, raw

RUN = "audited"
OTHER = "another"
SAID = [{"content": f"{number} " * 900, "role": "user"} for number in range(10, 14)]
"""A conversation of messages that are long enough to be packed."""


def every_kind_of_entry(bench: Bench) -> None:
    """Runs that hold one of each: steps of every outcome, retries, values, a large payload, a packed one, a cancellation, a park, an end."""
    with bench.open().open_run("talk", "talks") as run:
        for number in range(3):
            run.step("ask", {"messages": SAID[: number + 1]}, lambda messages: SAID[len(messages)])
    ledger = packs_nothing(bench.open(loop_threshold=2))
    with ledger.open_run("audit", RUN) as run:
        run.now()
        run.step("a", {"n": 1}, lambda n: {"text": "ä", "n": n}, effect=Effect.READ)
        run.step("large", {"n": 2}, lambda: "x" * 70_000)
        with pytest.raises(StepFailed):
            run.step("b", {}, raising(ValueError("no")), retry=RetryPolicy(max_attempts=2, base=0.0))
        with pytest.raises(KeyboardInterrupt):
            run.step("c", {}, raising(KeyboardInterrupt()), effect=Effect.READ)
        run.step("d", {}, lambda: None)
        with pytest.raises(StepFailed):
            run.step("e", {"n": 5}, raising(TimeoutError("slow")), effect=Effect.IDEMPOTENT)
        run.step("e", {"n": 5}, lambda: 5, effect=Effect.IDEMPOTENT)
        answers = [Receipt.unknown("down"), Receipt.found(6)]
        receipt = lambda key, arguments: answers.pop(0)  # noqa: E731
        run.step("f", {"n": 6}, raising(TimeoutError("slow")), receipt=receipt)
    ledger.create_run("cancelled", OTHER)
    ledger.execute_step(OTHER, "t", {}, lambda: bench.open().cancel(OTHER, by="ann"))
    for run_id in ("parked", "looping", "aborted"):
        ledger.create_run(run_id, run_id)
    for _ in range(2):
        ledger.execute_step("looping", "t", {}, lambda: 1)
    with pytest.raises(RunawayLoopException):
        ledger.execute_step("looping", "t", {}, lambda: 1)
    ledger.abort_run("aborted", "why")
    ledger.execute_step("parked", "t", {}, lambda: 1)
    with pytest.raises(Died), bench.open().open_run("open", "open") as run:
        run.step("t", {}, raising(Died()))
    with bench.open().open_run("open", "open") as run:
        run.step("t", {}, Tool("done"), effect=Effect.READ)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_ledger_has_no_finding(tmp_path: Path, kind: str) -> None:
    with Bench(kind, tmp_path) as bench:
        every_kind_of_entry(bench)
        ledger = bench.open()
        entries = {run.run_id: len(bench.rows(run.run_id)) for run in ledger.runs()}
        assert ledger.verify() == VerificationReport(
            ok=True, findings=[], entries=sum(entries.values()), runs=len(entries)
        )
        for run_id, size in entries.items():
            assert ledger.verify(run_id) == VerificationReport(ok=True, findings=[], entries=size, runs=1)


def test_an_empty_ledger_has_no_finding(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        assert bench.open().verify() == VerificationReport(ok=True, findings=[], entries=0, runs=0)


def test_each_finding_is_told_as_soon_as_it_is_made_and_the_rest_is_looked_at_all_the_same(tmp_path: Path) -> None:
    with Bench("sqlite", tmp_path) as bench:
        every_kind_of_entry(bench)
        tamper(bench, "UPDATE entries SET payload = CAST('7' AS BLOB) WHERE seq = 2 AND payload IS NOT NULL")
        heard: list[Any] = []
        with AgentRunLedger(bench.path, clock=bench.clock) as ledger:
            report = ledger.verify(told=heard.append, found=heard.append)
        assert [each for each in heard if isinstance(each, Finding)] == report.findings
        assert isinstance(heard[0], Finding), "before the first run is done"
        assert heard[-1] == report.entries
        assert len({finding.run_id for finding in report.findings}) > 3
        digests = [finding for finding in report.findings if finding.code == "digest"]
        assert all(len(each.expected or "") == len(each.found or "") == 64 for each in digests)


# --- tampering --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench("sqlite", tmp_path) as opened:
        every_kind_of_entry(opened)
        yield opened


def findings(bench: Bench, run_id: str | None = None) -> list[Finding]:
    with AgentRunLedger(bench.path, clock=bench.clock) as ledger:
        report = ledger.verify(run_id)
    assert report.ok == (not report.findings)
    return report.findings


def names(finding: Finding, run_id: str) -> bool:
    return finding.run_id == run_id or (finding.run_id == "" and repr(run_id) in finding.message)


def tamper(bench: Bench, statement: str, *parameters: Any) -> None:
    with raw(bench.path, without_triggers=True) as connection:
        assert connection.execute(statement, parameters).rowcount != 0, "nothing was changed"


def forged(column: str, old: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(old, bytes):
        return bytes([old[0] ^ 1]) + old[1:]
    if isinstance(old, str):
        return old + "x"
    if isinstance(old, int | float):
        return old + 1
    return {"attempt": 1, "position": "9", "encoding": "zlib"}.get(column, b"\x01" * 32)


def entries_of(bench: Bench) -> list[sqlite3.Row]:
    with raw(bench.path) as connection:
        return connection.execute("SELECT * FROM entries WHERE run_id = ? ORDER BY seq", (RUN,)).fetchall()


COLUMNS = ["kind", "position", "attempt", "body", "roots", "digest", "fingerprint", "encoding", "payload"]


def test_the_columns_that_are_tampered_with_below_are_all_there_are(bench: Bench) -> None:
    assert set(entries_of(bench)[0].keys()) == {"run_id", "seq", *COLUMNS}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_change_of_any_column_of_any_entry_is_found_and_named(bench: Bench, column: str) -> None:
    for entry in entries_of(bench):
        new = forged(column, entry[column])
        statement = f"UPDATE entries SET {column} = ? WHERE run_id = ? AND seq = ?"
        tamper(bench, statement, new, RUN, entry["seq"])
        found = findings(bench)
        assert (RUN, entry["seq"]) in {(finding.run_id, finding.seq) for finding in found}, (
            f"{entry['kind']} {entry['seq']}"
        )
        assert all(names(finding, RUN) and finding.code and finding.message for finding in found)
        assert findings(bench, RUN) == [finding for finding in found if finding.run_id]
        tamper(bench, statement, entry[column], RUN, entry["seq"])
    assert findings(bench) == []


@pytest.mark.parametrize("column", ["kind", "position", "attempt", "body", "roots", "digest", "fingerprint"])
def test_a_column_that_is_emptied_is_found_and_named(bench: Bench, column: str) -> None:
    for entry in entries_of(bench):
        if entry[column] is None:
            continue
        statement = f"UPDATE entries SET {column} = ? WHERE run_id = ? AND seq = ?"
        empty: Any = "" if column == "kind" else b"" if column in ("body", "roots") else None
        tamper(bench, statement, empty, RUN, entry["seq"])
        found = findings(bench)
        is_large = entry["payload"] is None  # without its digest it looks erased, and its payload is left over
        assert any(names(finding, RUN) and (is_large or finding.seq == entry["seq"]) for finding in found)
        tamper(bench, statement, entry[column], RUN, entry["seq"])


@pytest.mark.parametrize("column", ["body", "roots", "payload", "digest", "fingerprint"])
def test_text_where_bytes_belong_is_found_and_breaks_nothing(bench: Bench, column: str) -> None:
    tamper(bench, f"UPDATE entries SET {column} = 'text' WHERE run_id = ? AND seq = 3", RUN)
    assert (RUN, 3) in {(finding.run_id, finding.seq) for finding in findings(bench)}


def test_a_change_of_any_subtree_root_is_found_and_named(bench: Bench) -> None:
    for entry in entries_of(bench):
        roots = entry["roots"]
        statement = "UPDATE entries SET roots = ? WHERE run_id = ? AND seq = ?"
        for changed in (roots[:-1] + bytes([roots[-1] ^ 1]), roots + roots[:32], roots[:-32] or b"\x00"):
            tamper(bench, statement, changed, RUN, entry["seq"])
            assert (RUN, entry["seq"]) in {(finding.run_id, finding.seq) for finding in findings(bench, RUN)}
        tamper(bench, statement, roots, RUN, entry["seq"])


def test_every_single_bit_of_a_body_counts(bench: Bench) -> None:
    body = entries_of(bench)[2]["body"]
    for index in range(0, len(body), 17):
        changed = bytearray(body)
        changed[index] ^= 1 << index % 8
        tamper(bench, "UPDATE entries SET body = ? WHERE run_id = ? AND seq = 3", bytes(changed), RUN)
        assert (RUN, 3) in {(finding.run_id, finding.seq) for finding in findings(bench)}


def test_any_stretch_that_was_cut_out_of_the_log_is_found_and_named(bench: Bench) -> None:
    size = len(entries_of(bench))
    for first in range(1, size):
        for last in range(first, size):
            with raw(bench.path, without_triggers=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT * FROM entries WHERE run_id = ?", (RUN,))
                connection.execute("DELETE FROM entries WHERE run_id = ? AND seq BETWEEN ? AND ?", (RUN, first, last))
            found = findings(bench, RUN)
            assert (RUN, last + 1, "sequence") in {(each.run_id, each.seq, each.code) for each in found}
            with raw(bench.path, without_triggers=True) as connection:
                connection.execute("DELETE FROM entries WHERE run_id = ?", (RUN,))
                connection.execute("INSERT INTO entries SELECT * FROM kept")
                connection.execute("DROP TABLE kept")
    assert findings(bench) == []


def test_a_log_that_lost_its_first_entry_is_found_among_all_runs(bench: Bench) -> None:
    tamper(bench, "DELETE FROM entries WHERE run_id = ? AND seq = 1", RUN)
    assert (RUN, 2, "sequence") in {(finding.run_id, finding.seq, finding.code) for finding in findings(bench)}


def test_two_entries_that_changed_places_are_found_and_named(bench: Bench) -> None:
    with raw(bench.path, without_triggers=True) as connection:
        for old, new in ((4, -4), (5, 4), (-4, 5)):
            connection.execute("UPDATE entries SET seq = ? WHERE run_id = ? AND seq = ?", (new, RUN, old))
    assert {(RUN, 4), (RUN, 5)} <= {(finding.run_id, finding.seq) for finding in findings(bench)}


@pytest.mark.parametrize("source", [1, 2, 3])
def test_an_entry_that_was_put_in_is_found_and_named(bench: Bench, source: int) -> None:
    size = len(entries_of(bench))
    columns = ", ".join(COLUMNS)
    statement = f"INSERT INTO entries (run_id, seq, {columns}) SELECT run_id, ?, {columns} FROM entries WHERE run_id = ? AND seq = ?"
    tamper(bench, statement, size + 1, RUN, source)
    assert (RUN, size + 1) in {(finding.run_id, finding.seq) for finding in findings(bench)}


def test_an_entry_from_another_run_is_found_and_named(bench: Bench) -> None:
    columns = ", ".join(COLUMNS)
    statement = (
        f"INSERT INTO entries (run_id, seq, {columns}) SELECT ?, ?, {columns} FROM entries WHERE run_id = ? AND seq = 2"
    )
    tamper(bench, statement, RUN, len(entries_of(bench)) + 1, OTHER)
    assert RUN in {finding.run_id for finding in findings(bench)}


def test_a_log_that_was_cut_at_its_end_differs_from_a_head_that_was_kept(bench: Bench) -> None:
    ledger = bench.open()
    kept = ledger.tree_head(RUN)
    assert (kept.run_id, kept.size, len(kept.root)) == (RUN, len(entries_of(bench)), 32)
    tamper(bench, "DELETE FROM entries WHERE run_id = ? AND seq = ?", RUN, kept.size)
    now = bench.open().tree_head(RUN)
    assert now.size == kept.size - 1
    assert now.root != kept.root


# --- payloads, secrets, heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE payloads SET bytes = CAST(bytes || '!' AS BLOB)",
        "UPDATE payloads SET bytes = NULL",
        "UPDATE payloads SET digest = CAST('other' AS BLOB)",
        "UPDATE payloads SET run_id = 'other'",
        "DELETE FROM payloads",
    ],
)
def test_a_large_payload_that_was_changed_or_taken_away_is_found_and_named(bench: Bench, statement: str) -> None:
    large = next(row.seq for row in bench.rows(RUN) if row.payload is not None and len(row.payload) > 65_536)
    tamper(bench, statement)
    assert (RUN, large) in {(finding.run_id, finding.seq) for finding in findings(bench)}


def test_a_payload_that_no_entry_names_is_found(bench: Bench) -> None:
    tamper(bench, "INSERT INTO payloads VALUES (?, x'00', x'01')", RUN)
    assert any(names(finding, RUN) for finding in findings(bench))


@pytest.mark.parametrize(
    "statement", ["UPDATE secrets SET secret = NULL", "UPDATE secrets SET secret = zeroblob(32)", "DELETE FROM secrets"]
)
def test_a_secret_that_was_changed_or_taken_away_while_its_payloads_stand_is_found(
    bench: Bench, statement: str
) -> None:
    tamper(bench, statement)
    assert RUN in {finding.run_id for finding in findings(bench)}


@pytest.mark.parametrize(
    ("statement", "run_id"),
    [
        ("UPDATE runs SET fencing_token = 0 WHERE run_id = 'audited'", RUN),
        ("UPDATE runs SET inbox = inbox + 1 WHERE run_id = 'audited'", RUN),
        ("UPDATE runs SET inbox = 0 WHERE run_id = 'another'", OTHER),
        ("DELETE FROM inbox WHERE run_id = 'another'", OTHER),
        ("INSERT INTO inbox VALUES ('audited', 1, 'cancel', x'', 'mallory', 1)", RUN),
    ],
)
def test_a_head_or_an_inbox_that_does_not_fit_the_log_is_found(bench: Bench, statement: str, run_id: str) -> None:
    tamper(bench, statement)
    assert {finding.run_id for finding in findings(bench)} == {run_id}


HEAD_COLUMNS = {
    "run_id": "'elsewhere'",
    "fencing_token": "-1",
    "inbox": "inbox + 1",
    "created_at": "created_at + 0.0000002",
    "agent": "'another'",
    "queue": "'express'",
    "priority": "priority + 1",
    "key": "'other'",
}
UNPROVEN = {"owner", "lease_until", "lease_seconds", "lease_boot", "note", "due", "moved_to", "deaths", "deaths_after"}
"""The lease and how its owners ended, the note, when a worker may take a run, and where it was moved: nothing is claimed of them."""


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[Bench]:
    """A run that says all that a run can be found by, and one that says nothing."""
    with Bench("sqlite", tmp_path) as opened:
        ledger = opened.open()

        @ledger.agent()
        def books(month: str) -> str:
            return month

        ledger.submit(books, "2026-10", run_id="queued", queue="nightly", priority=3, key="customer")
        ledger.create_run("plain", "plain")
        assert findings(opened) == []
        yield opened


def test_the_columns_of_a_head_are_all_tampered_with_or_prove_nothing(queued: Bench) -> None:
    with raw(queued.path) as connection:
        (head, _) = connection.execute("SELECT * FROM runs ORDER BY run_id DESC").fetchall()
    assert set(head.keys()) == HEAD_COLUMNS.keys() | UNPROVEN
    assert [head[name] for name in ("agent", "queue", "priority", "key")] == ["books", "nightly", 3, "customer"]


@pytest.mark.parametrize("run_id", ["queued", "plain"])
@pytest.mark.parametrize("column", HEAD_COLUMNS)
def test_a_change_of_any_column_of_a_head_that_proves_something_is_found(
    queued: Bench, run_id: str, column: str
) -> None:
    tamper(queued, f"UPDATE runs SET {column} = {HEAD_COLUMNS[column]} WHERE run_id = ?", run_id)
    found = findings(queued)
    assert any(names(finding, run_id) for finding in found)
    assert not any(names(finding, other) for finding in found for other in {"queued", "plain"} - {run_id})


@pytest.mark.parametrize("column", ["agent", "queue", "key", "created_at"])
def test_what_a_run_is_found_by_cannot_be_taken_from_its_head(queued: Bench, column: str) -> None:
    tamper(queued, f"UPDATE runs SET {column} = NULL, due = NULL WHERE run_id = 'queued'")
    assert {(each.run_id, each.code) for each in findings(queued)} == {("queued", "head")}


@pytest.mark.parametrize("field", ["agent", "queue", "priority", "key", "at"])
def test_a_first_entry_that_was_rewritten_no_longer_agrees_with_what_its_run_is_found_by(
    queued: Bench, field: str
) -> None:
    with raw(queued.path, without_triggers=True) as connection:
        (body,) = connection.execute("SELECT body FROM entries WHERE run_id = 'queued'").fetchone()
        said = json.loads(body)
        changed = json.dumps(said | {field: said[field] * 2}).encode()
        roots = merkle.append([], 0, merkle.leaf_hash(changed))[1]
        connection.execute("UPDATE entries SET body = ?, roots = ? WHERE run_id = 'queued'", (changed, roots))
    assert ("queued", "head") in {(each.run_id, each.code) for each in findings(queued)}


@pytest.mark.parametrize("column", sorted(UNPROVEN))
def test_what_proves_nothing_is_no_finding(queued: Bench, column: str) -> None:
    new = {"lease_until": "1e9", "lease_seconds": "1e9", "due": "1e9", "deaths": "7"}.get(column, "'somebody'")
    if column == "moved_to":
        new += ", due = NULL"
    tamper(queued, f"UPDATE runs SET {column} = {new} WHERE run_id = 'queued'")
    assert findings(queued) == []


def test_the_clock_of_the_ledger_and_its_workers_prove_nothing(queued: Bench) -> None:
    with raw(queued.path) as connection:
        connection.execute("UPDATE boots SET boot = 'another', news = 7")
        connection.execute("INSERT INTO workers VALUES ('w', x'ff', 1.5)")
    assert findings(queued) == []


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM runs WHERE run_id = 'audited'",
        "DELETE FROM entries WHERE run_id = 'audited'",
        "UPDATE runs SET run_id = 'elsewhere' WHERE run_id = 'audited'",
        "UPDATE entries SET run_id = 'elsewhere' WHERE run_id = 'audited'",
    ],
)
def test_a_run_that_lost_its_head_or_its_entries_is_found(bench: Bench, statement: str) -> None:
    tamper(bench, statement)
    assert any(names(finding, RUN) for finding in findings(bench))
    assert findings(bench, RUN) != []


@pytest.mark.parametrize(
    "name",
    ["entries_are_never_changed", "entries_follow_one_another", "run_steps", "runs_that_wait", "workers"],
)
def test_a_part_of_the_schema_that_was_taken_away_or_changed_is_found(bench: Bench, name: str) -> None:
    with raw(bench.path) as connection:
        ((kind,),) = connection.execute("SELECT type FROM sqlite_master WHERE name = ?", (name,))
        connection.execute(f"DROP {kind} {name}")
    assert any(name in finding.message for finding in findings(bench))


# --- forgeries that know the format -----------------------------------------------------------------------------------


def rewritten(bench: Bench, change: Callable[[bytes], bytes], seq: int) -> None:
    """A body changed together with the roots of the whole log, as by somebody who knows how they are made."""
    frontier: list[bytes] = []
    with raw(bench.path, without_triggers=True) as connection:
        for entry in connection.execute("SELECT * FROM entries WHERE run_id = ? ORDER BY seq", (RUN,)).fetchall():
            body = change(entry["body"]) if entry["seq"] == seq else entry["body"]
            frontier, roots = merkle.append(frontier, entry["seq"] - 1, merkle.leaf_hash(body))
            update = "UPDATE entries SET body = ?, roots = ? WHERE run_id = ? AND seq = ?"
            connection.execute(update, (body, roots, RUN, entry["seq"]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"state":"CHECKPOINTED"', b'"state":"BLOCKED"'),
        (b'"token":1', b'"token":0'),
        (b'"run":"audited"', b'"run":"forged!"'),
        (b'"position":"2"', b'"position":"3"'),
        (b'"attempt":1', b'"attempt":2'),
        (b'"steps":1', b'"steps":7'),
    ],
)
def test_a_body_rewritten_with_its_roots_must_still_agree_with_the_rest(bench: Bench, old: bytes, new: bytes) -> None:
    seq = next(row.seq for row in bench.rows(RUN) if row.kind == "outcome")
    body = bench.rows(RUN)[seq - 1].body
    if old not in body:
        pytest.fail(f"{old!r} is not in {body!r}")
    rewritten(bench, lambda body: body.replace(old, new), seq)
    assert {finding.run_id for finding in findings(bench)} == {RUN}


@pytest.mark.parametrize("kind", ["intent", "outcome"])
def test_a_second_intent_or_outcome_of_one_attempt_is_found_and_named(tmp_path: Path, kind: str) -> None:
    with Bench("memory", tmp_path) as bench:
        ledger = bench.open()
        ledger.create_run("g", RUN)
        ledger.execute_step(RUN, "t", {}, lambda: 1)
        store = bench.store()
        rows, head = store.read(RUN), store.head(RUN)
        source = next(row for row in rows if row.kind == kind)
        seq = len(rows) + 1
        body = json.dumps(json.loads(source.body) | {"seq": seq}).encode()
        frontier = History.read(RUN, b"", rows).frontier
        again = source._replace(seq=seq, body=body, roots=merkle.append(frontier, len(rows), merkle.leaf_hash(body))[1])
        found = audit(RUN, head, store.secret(RUN), [*rows, again])
        assert audit(RUN, head, store.secret(RUN), rows) == []
        assert (RUN, seq, "twice") in {(each.run_id, each.seq, each.code) for each in found}


def entry_of(bench: Bench, kind: str, having: bytes = b"") -> int:
    """The number of the last entry of this kind that says this."""
    return [row.seq for row in bench.rows(RUN) if row.kind == kind and having in row.body][-1]


def told_of(bench: Bench, seq: int, **said: Any) -> set[str]:
    """The codes of what is found at an entry whose body says this instead, and None of what is not to be said at all."""

    def change(body: bytes) -> bytes:
        changed = json.loads(body) | said
        return json.dumps({name: value for name, value in changed.items() if value is not None}).encode()

    rewritten(bench, change, seq)
    return {finding.code for finding in findings(bench, RUN) if finding.seq == seq}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"key": "0" * 64}, "key"),
        ({"continues": "1"}, "key"),
        ({"continues": None}, "key"),
        ({"continues": "99"}, "key"),
        ({"continues": ["1"]}, "key"),
        ({"continues": None, "attempt": 1}, "key"),
        ({"tool": "f"}, "key"),
        ({"steps": 6}, "count"),
        ({"carried": True}, "lifecycle"),
    ],
)
def test_an_intent_that_continues_another_has_the_key_of_that_one(
    bench: Bench, said: dict[str, Any], code: str
) -> None:
    assert code in told_of(bench, entry_of(bench, "intent", b'"continues"'), **said)


def test_a_key_of_ones_own_is_no_key_of_a_call_that_continues_another(bench: Bench) -> None:
    """Not even the one that its position and arguments would give."""
    from agent_run_ledger.rules import digests

    seq = entry_of(bench, "intent", b'"continues"')
    row, store = bench.rows(RUN)[seq - 1], bench.store()
    body = json.loads(row.body)
    own = digests.idempotency_key(store.secret(RUN), RUN, body["position"], body["tool"], row.payload or b"")
    store.close()
    assert own != body["key"]
    assert "key" in told_of(bench, seq, key=own)


@pytest.mark.parametrize("state", ["RUNNING", "CHECKPOINTED", "COMPLETED", "DEAD_LETTER"])
def test_a_run_whose_receiver_is_asked_stands_blocked(bench: Bench, state: str) -> None:
    assert "lifecycle" in told_of(bench, entry_of(bench, "asked"), state=state)


@pytest.mark.parametrize("state", ["RUNNING", "CHECKPOINTED", "COMPLETED"])
def test_an_answer_moves_nothing_by_itself(bench: Bench, state: str) -> None:
    assert "lifecycle" in told_of(bench, entry_of(bench, "answered"), state=state)


@pytest.mark.parametrize("kind", ["asked", "answered"])
def test_a_question_and_an_answer_name_their_step_and_attempt(bench: Bench, kind: str) -> None:
    seq = entry_of(bench, kind)
    for said in ({"position": "1"}, {"attempt": 9}, {"token": 0}):
        assert told_of(bench, seq, **said) & {"column", "fencing"}


def test_a_second_outcome_that_nobody_was_asked_about_is_found_however_it_is_called(tmp_path: Path) -> None:
    """What is learnt from a receiver may be said of an attempt that has failed, but only once that is in doubt again."""
    with Bench("memory", tmp_path) as bench:
        ledger = bench.open()
        ledger.create_run("g", RUN)
        with pytest.raises(StepFailed):
            ledger.execute_step(RUN, "t", {}, raising(ValueError("no")), effect=Effect.MUTATE)
        store = bench.store()
        rows, head = store.read(RUN), store.head(RUN)
        outcome = rows[-1]
        body = json.dumps(json.loads(outcome.body) | {"seq": 4, "reconciled": True}).encode()
        roots = merkle.append(History.read(RUN, b"", rows).frontier, 3, merkle.leaf_hash(body))[1]
        again = outcome._replace(seq=4, body=body, roots=roots)
        found = audit(RUN, head, store.secret(RUN), [*rows, again])
        assert (RUN, 4, "twice") in {(each.run_id, each.seq, each.code) for each in found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settles", ["a receipt", "an operator"])
def test_a_failure_that_is_found_to_have_taken_effect_is_no_finding(tmp_path: Path, kind: str, settles: str) -> None:
    with Bench(kind, tmp_path) as bench:
        ledger = bench.open()
        ledger.create_run("g", RUN)
        with pytest.raises(StepFailed):
            ledger.execute_step(RUN, "t", {}, raising(ValueError("no")), effect=Effect.MUTATE)
        bench.owners_die()
        ledger = bench.open()
        if settles == "an operator":
            ledger.resolve(RUN, 1, output="done", by="ann")
        else:
            ledger.create_run("g", RUN)
            ledger.execute_step(RUN, "t", {}, Tool("never"), receipt=lambda key, arguments: Receipt.found("done"))
        assert [step.output_json for step in ledger.steps(RUN)] == ['"done"']
        assert ledger.verify().findings == []


@pytest.mark.parametrize(
    ("said", "codes"),
    [
        ({"carried": None}, {"key", "lifecycle"}),
        ({"forked_from": None}, {"lifecycle", "key"}),
    ],
)
def test_what_a_fork_carried_over_is_held_to_the_fork(tmp_path: Path, said: dict[str, Any], codes: set[str]) -> None:
    with Bench("sqlite", tmp_path) as bench:
        ledger = bench.open()
        ledger.create_run("g", "first")
        for number in range(2):
            ledger.execute_step("first", "t", {"n": number}, lambda n: n)
        ledger.finish_run("first")
        ledger.fork("first", 2, by="ann", new_run_id=RUN)
        assert findings(bench) == []
        seq = 1 if "forked_from" in said else entry_of(bench, "intent", b'"carried"')
        told_of(bench, seq, **said)
        found = {finding.code for finding in findings(bench, RUN)}
        assert found & codes


def test_an_erased_payload_is_a_finding_unless_an_entry_says_so(bench: Bench) -> None:
    bench.open().forget(RUN, 1)
    assert findings(bench) == []
    with raw(bench.path, without_triggers=True) as connection:
        connection.execute(
            "UPDATE entries SET payload = NULL, digest = NULL, fingerprint = NULL, encoding = NULL WHERE run_id = ?",
            (RUN,),
        )
    assert {finding.code for finding in findings(bench)} >= {"erased"}


# --- a bad row hurts nobody else --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"not json", b"[]", b"{}", b"\xff\xfe", b""])
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_run_that_cannot_be_read_is_listed_as_such_beside_the_others(bench: Bench, body: bytes, which: str) -> None:
    seq = 1 if which == "first" else len(entries_of(bench))
    tamper(bench, "UPDATE entries SET body = ? WHERE run_id = ? AND seq = ?", body, RUN, seq)
    ledger = bench.open()
    listed = {run.run_id: run for run in ledger.runs()}
    assert listed[RUN].is_damaged
    assert listed[RUN] not in ledger.runs(status="BLOCKED"), "a damaged run is no parked one"
    assert "cannot be read" in str(listed[RUN].cause)
    assert listed[OTHER].status == "CANCELLED"
    assert (RUN, seq) in {(finding.run_id, finding.seq) for finding in ledger.verify().findings}


def test_a_payload_that_cannot_be_read_is_shown_as_such_beside_the_other_steps(bench: Bench) -> None:
    failed = next(row.seq for row in bench.rows(RUN) if row.kind == "outcome" and b'"failed"' in row.body)
    for payload in (b"not json", b"7", b"\xff"):
        tamper(
            bench,
            "UPDATE entries SET payload = ? WHERE run_id = ? AND seq >= ? AND kind = 'outcome'",
            payload,
            RUN,
            failed,
        )
        assert len(bench.open().steps(RUN)) == 8
