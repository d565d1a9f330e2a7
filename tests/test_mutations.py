"""Whatever somebody does to the tables behind the ledger's back, `verify` finds it, or a head that was kept elsewhere does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Effect, Finding, merkle
from support.audited import LONG, Tables, everything, read_only
from support.ledgers import Bench

PROVED = ""
"""A column that `verify` is responsible for: a change of it is found."""
LEASE = "the lease, and how its owners ended"
WORKERS = "when and where a worker may take the run"
INBOX = "what was asked of the run; what became of it stands in the log"
CLOCK = "clocks and workers of the ledger, nothing of runs"
DELETED = "of a run that is gone: a head that was kept elsewhere says what it was"

DECIDED: dict[str, dict[str, str]] = {
    "entries": dict.fromkeys(
        (
            "run_id",
            "seq",
            "kind",
            "position",
            "attempt",
            "body",
            "roots",
            "digest",
            "fingerprint",
            "encoding",
            "payload",
        ),
        PROVED,
    ),
    "payloads": dict.fromkeys(("run_id", "digest", "bytes"), PROVED),
    "secrets": dict.fromkeys(("run_id", "secret"), PROVED),
    "runs": {
        **dict.fromkeys(
            ("run_id", "fencing_token", "inbox", "created_at", "agent", "queue", "priority", "key"), PROVED
        ),
        **dict.fromkeys(("owner", "lease_until", "lease_seconds", "lease_boot", "lease_call"), LEASE),
        **dict.fromkeys(("deaths", "deaths_after"), LEASE),
        **dict.fromkeys(("due", "moved_to", "made"), WORKERS),
        "note": "a divergence: it goes with the next entry",
    },
    "inbox": {
        **dict.fromkeys(("run_id", "id"), PROVED),
        **dict.fromkeys(("kind", "payload", "who", "at", "nonce"), INBOX),
    },
    "tombstones": dict.fromkeys(("run_id", "size", "root", "who", "why", "at"), DELETED),
    "meta": dict.fromkeys(("key", "value"), CLOCK),
    "boots": dict.fromkeys(("boot", "ahead", "reached", "news"), CLOCK),
    "workers": dict.fromkeys(("worker", "said", "beat", "since", "at"), CLOCK),
    "queues": {"name": CLOCK},
}
"""What `verify` says of each column of each table: that it is proved, or why it proves nothing."""

ONLY_HERE = {
    "sqlite": {("runs", "lease_boot"), ("workers", "beat")} | {("boots", each) for each in DECIDED["boots"]},
    "postgres": {("runs", "lease_call"), ("runs", "made"), ("inbox", "nonce"), ("queues", "name")}
    | {("workers", each) for each in ("since", "at")},
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(request.param, tmp_path_factory.mktemp("mutations")) as opened:
        everything(opened)
        yield opened


@pytest.fixture(scope="module")
def tables(bench: Bench) -> Iterator[Tables]:
    opened = Tables(bench)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ledger(bench: Bench, tables: Tables) -> Iterator[AgentRunLedger]:
    with read_only(bench) as opened:
        assert [each for each in opened.verify().findings if each.code != "storage"] == []
        yield opened


def of(ledger: AgentRunLedger, run_id: str | None = None) -> list[Finding]:
    """What is found, but for the triggers that are gone."""
    return [each for each in ledger.verify(run_id).findings if "trigger" not in each.message]


def names(found: list[Finding], run_id: str) -> bool:
    return any(run_id in (each.run_id, each.message) or repr(run_id) in each.message for each in found)


def forged(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:] if value else b"\x00"
    if isinstance(value, str):
        return value + "x"
    return value + 10_000 if isinstance(value, int | float) else None


INVENTED = {"attempt": 1, "position": "9", "encoding": "zlib", "agent": "x", "queue": "x", "key": "x", "bytes": b"x"}
"""What is put where there was nothing; hashes else."""
NEVER_EMPTY = {"run_id", "seq", "id", "fencing_token", "inbox", "created_at", "priority"}
KEYS = {"entries": "seq", "payloads": "digest", "runs": "run_id", "secrets": "run_id", "inbox": "id"}


def replacements(column: str, value: Any, beside: Any) -> Iterator[Any]:
    """What is written over a value: a change, nothing at all, and what stands in the next row."""
    if column == "fencing_token":  # a higher one is that of an owner who has written nothing
        yield -1
        return
    yield forged(value) if value is not None else INVENTED.get(column, b"\x01" * 32)
    if value is not None and column not in NEVER_EMPTY:
        yield type(value)() if column in ("kind", "body", "roots", "digest") else None
    if beside not in (None, value) and column not in ("run_id", "seq", "id"):
        yield beside


def test_every_column_of_the_schema_is_proved_or_it_is_said_why_not(bench: Bench, tables: Tables) -> None:
    found = {(table, column) for table, columns in tables.columns().items() for column in columns}
    decided = {(table, column) for table, columns in DECIDED.items() for column in columns}
    other = {"sqlite": "postgres", "postgres": "sqlite"}[bench.kind]
    assert found == decided - ONLY_HERE[other]


PROVED_COLUMNS = [
    (table, column) for table, columns in DECIDED.items() for column, why in columns.items() if why is PROVED
]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), PROVED_COLUMNS)
def test_a_change_of_any_value_of_a_column_that_is_proved_is_found(
    bench: Bench, tables: Tables, ledger: AgentRunLedger, table: str, column: str
) -> None:
    at = KEYS[table]
    rows = tables.rows(f"SELECT run_id, {at}, {column} FROM {table} ORDER BY run_id, {at}")
    step = {"sqlite": 1, "postgres": 7}[bench.kind] if table == "entries" else 1
    rows = [row for number, row in enumerate(rows) if row[0] != LONG or number % 71 == 0][::step]
    for number, (run_id, key, value) in enumerate(rows):
        beside = rows[(number + 1) % len(rows)][2]
        for new in replacements(column, value, beside):
            more = ", due = NULL" if column == "queue" else ""
            change = (f"UPDATE {table} SET {column} = ?{more} WHERE run_id = ? AND {at} = ?", (new, run_id, key))
            with tables.changed(table, run_id, partial(tables.write, change)):
                is_of_its_log = table == "entries" and column != "run_id" and new != b""
                found = of(ledger, run_id if is_of_its_log else None)
                is_named = names(found, run_id) or (column == "run_id" and names(found, new))
                assert is_named, f"{table}.{column} of {run_id}, {key}: {value!r} became {new!r}"
    assert rows
    assert of(ledger) == []


UNPROVED_COLUMNS = [
    (table, column) for table in ("runs", "inbox") for column, why in DECIDED[table].items() if why is not PROVED
]
NUMBERS = {"lease_until", "lease_seconds", "due", "made", "at", "deaths", "deaths_after"}


@pytest.mark.parametrize(("table", "column"), UNPROVED_COLUMNS)
def test_what_proves_nothing_is_no_finding_whatever_it_is(
    tables: Tables, ledger: AgentRunLedger, table: str, column: str
) -> None:
    if column not in tables.columns()[table]:
        return  # the other store's
    run_id = {"runs": "queued", "inbox": "cancelled"}[table]
    ((value,),) = tables.rows(f"SELECT {column} FROM {table} WHERE run_id = ?", run_id)
    new = forged(value) or (7.5 if column in NUMBERS else "x")
    new = int(new) if column.startswith("deaths") else new
    more = ", due = NULL" if column == "moved_to" else ""
    change = (f"UPDATE {table} SET {column} = ?{more} WHERE run_id = ?", (new, run_id))
    with tables.changed(table, run_id, partial(tables.write, change)):
        assert of(ledger, run_id) == []


# --- rows -------------------------------------------------------------------------------------------------------------

COLUMNS = tuple(DECIDED["entries"])


def entries(tables: Tables, run_id: str) -> list[dict[str, Any]]:
    found = tables.rows(f"SELECT {', '.join(COLUMNS)} FROM entries WHERE run_id = ? ORDER BY seq", run_id)
    return [dict(zip(COLUMNS, row, strict=True)) for row in found]


def put(tables: Tables, run_id: str, rows: list[dict[str, Any]]) -> None:
    """These rows are all the entries of a run."""
    tables.write(("DELETE FROM entries WHERE run_id = ?", (run_id,)))
    tables.insert("entries", COLUMNS, [[row[name] for name in COLUMNS] for row in rows])


def numbered(rows: list[dict[str, Any]], run_id: str) -> list[dict[str, Any]]:
    """As if these were all the run has ever had: columns and bodies say so, and all hashes are right."""
    frontier: list[bytes] = []
    made = []
    for seq, row in enumerate(rows, 1):
        body = json.dumps(json.loads(row["body"]) | {"seq": seq, "run": run_id}, separators=(",", ":")).encode()
        frontier, roots = merkle.append(frontier, seq - 1, merkle.leaf_hash(body))
        made.append(row | {"run_id": run_id, "seq": seq, "body": body, "roots": roots})
    return made


def renumbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns alone say so."""
    return [row | {"seq": seq} for seq, row in enumerate(rows, 1)]


Operation = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Iterator[list[dict[str, Any]]]]
Rows = list[dict[str, Any]]


def deleted(rows: Rows, others: Rows) -> Iterator[Rows]:
    for at in range(len(rows) - 1):
        yield [*rows[:at], *rows[at + 1 :]]


def deleted_and_renumbered(rows: Rows, others: Rows) -> Iterator[Rows]:
    for at in range(len(rows) - 1):
        yield renumbered([*rows[:at], *rows[at + 1 :]])


def duplicated(rows: Rows, others: Rows) -> Iterator[Rows]:
    for at in range(len(rows)):
        yield renumbered([*rows[: at + 1], *rows[at:]])


def appended_again(rows: Rows, others: Rows) -> Iterator[Rows]:
    for row in rows:
        yield [*rows, row | {"seq": len(rows) + 1}]


def swapped(rows: Rows, others: Rows) -> Iterator[Rows]:
    for at in range(len(rows) - 1):
        yield renumbered([*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]])


def reordered(rows: Rows, others: Rows) -> Iterator[Rows]:
    yield renumbered(rows[::-1])
    yield renumbered([*rows[1:], rows[0]])


def without_its_beginning(rows: Rows, others: Rows) -> Iterator[Rows]:
    for at in range(1, len(rows)):
        yield renumbered(rows[at:])


def of_another_run(rows: Rows, others: Rows) -> Iterator[Rows]:
    mine = rows[0]["run_id"]
    for at in range(len(rows)):
        yield [*rows[:at], others[at % len(others)] | {"run_id": mine, "seq": at + 1}, *rows[at + 1 :]]
    yield [row | {"run_id": mine} for row in others]


def roots_rebuilt_over_other_bodies(rows: Rows, others: Rows) -> Iterator[Rows]:
    """A body was changed, and every root that covers it made anew: what the body says must agree with the rest of its row."""
    for at, row in enumerate(rows):
        body = json.loads(row["body"])
        for name in ("kind", "token", "state", "steps", "position", "payload", "spent", "key"):
            if name in body and not (name == "key" and "carried" in body):  # that is a key of the run it comes from
                lie: Any = {"steps": 99, "token": -1, "spent": {"usd": "99"}}.get(name, "x")
                changed = row | {"body": json.dumps(body | {name: lie}).encode()}
                yield numbered([*rows[:at], changed, *rows[at + 1 :]], row["run_id"])


def roots_of_one_entry_rebuilt(rows: Rows, others: Rows) -> Iterator[Rows]:
    """The leaf and what it closes are those of another body: the roots that were made of them are not."""
    for at, row in enumerate(rows):
        body = row["body"].replace(b'"token":', b'"token": ')
        leaves = [merkle.leaf_hash(each["body"]) for each in rows[:at]]
        frontier: list[bytes] = []
        for size, leaf in enumerate(leaves):
            frontier, _ = merkle.append(frontier, size, leaf)
        roots = merkle.append(frontier, at, merkle.leaf_hash(body))[1]
        yield [*rows[:at], row | {"roots": roots}, *rows[at + 1 :]]


OPERATIONS: list[Operation] = [
    deleted, deleted_and_renumbered, duplicated, appended_again, swapped, reordered, without_its_beginning, of_another_run,
    roots_rebuilt_over_other_bodies, roots_of_one_entry_rebuilt,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("run_id", ["varied", "looping", "forked", "parent", "@account/budget/team"])
def test_what_is_done_to_the_rows_of_a_log_is_found(
    bench: Bench, tables: Tables, ledger: AgentRunLedger, run_id: str, operation: Operation
) -> None:
    rows, others = entries(tables, run_id), entries(tables, "open")
    done = 0
    for changed in list(operation(rows, others))[:: {"sqlite": 1, "postgres": 9}[bench.kind]]:
        with tables.changed("entries", run_id, partial(put, tables, run_id, changed)):
            assert names(of(ledger, run_id), run_id), [row["seq"] for row in changed]
        done += 1
    assert done
    assert of(ledger) == []


@pytest.mark.parametrize("at", [1, 2, 63, 64, 500, 511, 998, 999])
def test_the_same_is_found_in_a_run_of_a_thousand_entries(
    bench: Bench, tables: Tables, ledger: AgentRunLedger, at: int
) -> None:
    rows = entries(tables, LONG)
    assert len(rows) == 1000
    swap = renumbered([*rows[: at - 1], rows[at], rows[at - 1], *rows[at + 1 :]])
    cut = [*rows[: at - 1], *rows[at:]]
    changes: list[Rows] = [swap, cut, renumbered(cut)]
    if at < 999:  # a last outcome that was never there, in a log that was made anew: only a head that was kept tells
        changes.append(numbered(cut, LONG))
    for changed in changes:
        with tables.changed("entries", LONG, partial(put, tables, LONG, changed)):
            found = of(ledger, LONG)
            assert found
            assert {each.run_id for each in found} == {LONG}


@pytest.mark.parametrize("table", ["payloads", "secrets", "runs", "inbox"])
def test_a_row_beside_the_log_that_is_taken_away_or_put_in_is_found(
    tables: Tables, ledger: AgentRunLedger, table: str
) -> None:
    columns = tables.columns()[table]
    rows = tables.rows(f"SELECT {', '.join(columns)} FROM {table}")
    for row in rows:
        run_id = str(row[columns.index("run_id")])
        at, key = KEYS[table], row[columns.index(KEYS[table])]
        gone = (f"DELETE FROM {table} WHERE run_id = ? AND {at} = ?", (run_id, key))
        with tables.changed(table, run_id, partial(tables.write, gone)):
            assert names(of(ledger), run_id)
        if table == "secrets":
            continue  # of a run that there is not: it binds nothing, and nobody reads it
        other = list(row)
        other[columns.index(at)] = {"payloads": b"\x02" * 32, "runs": "nobody", "inbox": 99}[table]
        if "nonce" in columns:
            other[columns.index("nonce")] = None
        with tables.changed(table, run_id, partial(tables.insert, table, columns, [other])):
            assert names(of(ledger), run_id if table != "runs" else "nobody")
    assert rows


# --- what only a head that was kept elsewhere finds -------------------------------------------------------------------


def remade(ledger: AgentRunLedger, total: int) -> None:
    with ledger.open_run("pay", "paid") as run:
        run.step("pay", {"total": total}, lambda total: {"paid": total}, effect=Effect.READ)
        run.step("note", {}, lambda: "noted", effect=Effect.READ)


KEPT = ("entries", "payloads", "secrets", "runs")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_run_that_was_remade_whole_is_found_by_a_head_that_was_kept_and_by_nothing_else(
    tmp_path: Path, kind: str
) -> None:
    with Bench(kind, tmp_path) as bench, Bench(kind, tmp_path / "other") as other:
        (tmp_path / "other").mkdir()
        remade(bench.open(), 7)
        remade(other.open(), 9_000)
        head = bench.open().tree_head("paid")
        note = head.note()
        here, there = Tables(bench), Tables(other)
        for table in KEPT:
            columns = here.columns()[table]
            rows = there.rows(f"SELECT {', '.join(columns)} FROM {table}")
            here.write((f"DELETE FROM {table}", ()))
            here.insert(table, columns, rows)
        here.close()
        there.close()
        with read_only(bench) as ledger:
            assert of(ledger) == [], "it agrees with itself"
            found = [each for each in ledger.verify(against=note).findings if "trigger" not in each.message]
            assert [(each.run_id, each.seq, each.code) for each in found] == [("paid", head.size, "fork")]


@pytest.mark.parametrize("operation", ["truncated", "rolled back"])
def test_what_was_cut_off_at_the_end_is_found_by_a_head_that_was_kept(tmp_path: Path, operation: str) -> None:
    with Bench("sqlite", tmp_path) as bench:
        with bench.open() as ledger, ledger.open_run("pay", "paid") as run:
            run.step("pay", {"total": 7}, lambda total: {"paid": total}, effect=Effect.READ)
        with AgentRunLedger(bench.path) as ledger:
            ledger.backup(tmp_path / "old.db")
        with bench.open() as ledger:
            ledger.create_run("later", "later")
            ledger.finish_run("later")
            notes = ledger.tree_head("paid").note(), ledger.tree_head("later").note()
        if operation == "rolled back":
            for ending in ("", "-wal", "-shm"):
                Path(f"{bench.path}{ending}").unlink(missing_ok=True)
            bench.path.write_bytes((tmp_path / "old.db").read_bytes())
        else:
            cut = Tables(bench)
            cut.write(("DELETE FROM entries WHERE run_id = 'later' AND seq = 2", ()))
            cut.close()
        with read_only(bench) as ledger:
            assert of(ledger) == []
            found = [each for each in ledger.verify(against=notes).findings if "trigger" not in each.message]
            assert [(each.run_id, each.code) for each in found] == [("later", "rollback")]
