"""What readers see: records and the three views, whose columns and contents are a promise."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Effect,
    ReplayDivergence,
    RetryPolicy,
    RunRecord,
    Step,
    StepFailed,
    StepInDoubt,
    StepRecord,
    UndeclaredEffectWarning,
    UnserialisableOutput,
    compute_fingerprint,
)
from agent_run_ledger.contract import AES_GCM, PACKED, PACKED_AES_GCM, Row
from agent_run_ledger.testing.stores.words import LISTING
from support.ledgers import Bench, Died, Tool, raising, raw, told

RUN = "run"

VIEWS = {
    "agent_runs": ["run_id", "goal", "status", "total_steps", "created_at", "updated_at"],
    "run_steps": [
        "step_id", "run_id", "step_number", "tool_name", "arguments_json", "state", "output_json", "error_message",
        "fingerprint", "created_at", "completed_at", "state_version", "idempotency_key", "input_digest", "output_digest",
        "retry_budget_remaining", "fencing_token",
    ],
    "agent_step_journal": [
        "task_id", "step_index", "tool_name", "idempotency_key", "arguments_json", "status", "output_json", "created_at",
        "updated_at",
    ],
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench("sqlite", tmp_path) as opened:
        yield opened


def view(bench: Bench, name: str, run_id: str | None = None) -> list[dict[str, Any]]:
    with raw(bench.path) as connection:
        found = [dict(row) for row in connection.execute(f"SELECT * FROM {name}")]
    key = "task_id" if name == "agent_step_journal" else "run_id"
    return [row for row in found if run_id in (None, row[key])]


def look(bench: Bench, ledger: AgentRunLedger) -> None:
    """Every run and step is the same in the views as in the records."""
    runs = {run.run_id: run for run in ledger.runs()}
    assert [row["run_id"] for row in view(bench, "agent_runs")] == list(runs)
    for row in view(bench, "agent_runs"):
        record = dataclasses.asdict(runs[row["run_id"]])
        assert row == {column: record[column] for column in VIEWS["agent_runs"]}
    for run_id in runs:
        records = [dataclasses.asdict(step) for step in ledger.steps(run_id)]
        assert view(bench, "run_steps", run_id) == [
            {column: record[column] for column in VIEWS["run_steps"]} for record in records
        ]
        journal = view(bench, "agent_step_journal", run_id)
        same = {"task_id": "run_id", "step_index": "step_number"}
        for row, record in zip(journal, records, strict=True):
            for column in (
                "task_id",
                "step_index",
                "tool_name",
                "idempotency_key",
                "arguments_json",
                "output_json",
                "created_at",
            ):
                assert row[column] == record[same.get(column, column)]


def test_the_views_have_exactly_these_columns(bench: Bench) -> None:
    bench.open().create_run("goal")
    with raw(bench.path) as connection:
        for name, columns in VIEWS.items():
            assert [row["name"] for row in connection.execute(f"PRAGMA table_info({name})")] == columns


def test_records_have_exactly_these_fields_in_this_order() -> None:
    assert [field.name for field in dataclasses.fields(StepRecord)] == [
        "step_id", "run_id", "step_number", "tool_name", "arguments_json", "state", "output_json", "error_message",
        "fingerprint", "created_at", "completed_at", "state_version", "idempotency_key", "input_digest", "output_digest",
        "retry_budget_remaining", "fencing_token", "position", "attempts", "effect", "replayed",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(RunRecord)] == [
        "run_id", "goal", "status", "total_steps", "created_at", "updated_at", "owner", "fencing_token", "spent_tokens",
        "spent_usd", "result", "cause", "parent_run_id", "queue", "due_in_seconds", "moved_to",
    ]  # fmt: skip


def test_a_completed_step_is_shown_whole(bench: Bench) -> None:
    ledger = bench.open(owner="me")
    run_id = ledger.create_run("the goal")
    begun = bench.clock.now()

    def tool(b: int, a: tuple[int, ...]) -> str:
        bench.clock.advance(2.5)
        return "ä"

    ledger.execute_step(run_id, "t", {"b": 1, "a": (1, 2)}, tool, effect=Effect.READ)
    (step,) = ledger.steps(run_id)
    assert step.step_id.startswith("step_")
    assert len(step.step_id) == 25
    assert dataclasses.asdict(step) == {
        "step_id": step.step_id,
        "run_id": run_id,
        "step_number": 1,
        "tool_name": "t",
        "arguments_json": '{"a":{"$tuple":[1,2]},"b":1}',
        "state": "COMPLETED",
        "output_json": '"ä"',
        "error_message": None,
        "fingerprint": compute_fingerprint("t", {"a": (1, 2), "b": 1}),
        "created_at": begun,
        "completed_at": begun + 2.5,
        "state_version": 3,
        "idempotency_key": step.idempotency_key,
        "input_digest": step.input_digest,
        "output_digest": step.output_digest,
        "retry_budget_remaining": 3,
        "fencing_token": 1,
        "position": "1",
        "attempts": 1,
        "effect": "READ",
        "replayed": False,
    }
    for digest in (step.fingerprint, step.idempotency_key, step.input_digest, step.output_digest):
        assert digest is not None
        assert len(digest) == 64
        assert set(digest) <= set("0123456789abcdef")
    record = ledger.get_run(run_id)
    assert (record.goal, record.status, record.total_steps, record.created_at, record.updated_at) == (
        "the goal", "CHECKPOINTED", 1, begun, begun + 2.5,
    )  # fmt: skip
    assert record.owner is not None
    assert record.owner.startswith("me-")
    assert (record.spent_tokens, record.spent_usd, record.result, record.cause) == (0, Decimal(0), None, None)
    look(bench, ledger)


def journal(bench: Bench) -> list[str]:
    return [row["status"] for row in view(bench, "agent_step_journal", RUN)]


def test_views_and_records_agree_at_every_turn_of_a_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    look(bench, ledger)
    seen = []

    def see(answer: Any) -> Any:
        look(bench, ledger)
        seen.append((ledger.get_run(RUN).status, ledger.steps(RUN)[-1].state, journal(bench)[-1]))
        return answer

    sleep = bench.clock.sleep
    monkeypatch.setattr(bench.clock, "sleep", lambda seconds: see(sleep(seconds)))
    ledger.execute_step(RUN, "a", {}, lambda: see(1))
    see(None)
    answers = [lambda: (_ for _ in ()).throw(ValueError(see("no"))), lambda: see(2)]
    ledger.execute_step(RUN, "b", {}, lambda: answers.pop(0)(), retry=RetryPolicy(base=0.5, cap=0.5))
    assert list(dict.fromkeys(seen)) == [
        ("RUNNING", "RUNNING", "pending"),
        ("CHECKPOINTED", "COMPLETED", "committed"),
        ("BLOCKED", "FAILED", "failed"),
    ]
    with pytest.raises(StepFailed):
        ledger.execute_step(RUN, "c", {}, raising(KeyError("id")))
    see(None)
    assert ledger.steps(RUN)[-1].error_message == "KeyError: 'id'"
    with pytest.raises(UnserialisableOutput):
        ledger.execute_step(RUN, "d", {}, object)
    see(None)
    with pytest.raises(KeyboardInterrupt):
        ledger.execute_step(RUN, "e", {}, raising(KeyboardInterrupt()), effect=Effect.READ)
    see(None)
    ledger.execute_step(RUN, "f", {}, lambda: "x" * 3_000)
    see(None)
    ledger.finish_run(RUN, {"done": True})
    look(bench, ledger)
    assert journal(bench) == ["committed", "committed", "failed", "failed", "failed", "committed"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_of_what_is_packed_or_encrypted_a_view_shows_that_it_is_there_and_no_text(tmp_path: Path, kind: str) -> None:
    with Bench(kind, tmp_path) as bench:
        store = bench.store()
        for number, encoding in enumerate([None, PACKED, AES_GCM, PACKED_AES_GCM], 1):
            row = Row(
                1,
                "intent",
                "1",
                1,
                b'{"tool":"t","step":%d}' % number,
                bytes(32),
                b'{"n":1}',
                b"d" * 32,
                b"f" * 32,
                encoding,
            )
            assert store.create(f"r{number}", "a", 30.0, b"s" * 32, [row], LISTING)
        shown = bench.ask("SELECT arguments_json, input_digest, fingerprint FROM run_steps ORDER BY run_id")
        digests = ((b"d" * 32).hex(), (b"f" * 32).hex())
        assert shown == [('{"n":1}', *digests), (None, *digests), (None, None, None), (None, None, None)]
        store.close()


def test_an_error_of_an_earlier_attempt_is_shown_until_the_next_outcome(bench: Bench) -> None:
    def program() -> AgentRunLedger:
        bench.owners_die()
        ledger = bench.open()
        ledger.create_run("goal", RUN)
        return ledger

    with pytest.raises(StepFailed):
        program().execute_step(RUN, "t", {}, raising(ValueError("no")))
    ledger = program()
    with pytest.raises(Died):
        ledger.execute_step(RUN, "t", {}, raising(Died()))
    (step,) = ledger.steps(RUN)
    assert (step.state, step.error_message, step.completed_at) == ("RUNNING", "ValueError: no", None)
    look(bench, ledger)
    with told(UndeclaredEffectWarning):
        program().execute_step(RUN, "t", {}, lambda: 1)
    (step,) = ledger.steps(RUN)
    assert (step.state, step.error_message, step.attempts) == ("COMPLETED", None, 3)
    look(bench, ledger)


def test_a_dispatch_without_an_outcome_is_pending_while_its_owner_holds_the_run_and_else_in_doubt(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    with pytest.raises(Died):
        ledger.execute_step(RUN, "t", {}, raising(Died()), effect=Effect.MUTATE)
    assert journal(bench) == ["pending"]
    bench.owners_die()
    other = bench.open()
    other.create_run("goal", RUN)
    assert journal(bench) == ["in_doubt"]
    with pytest.raises(StepInDoubt):
        other.execute_step(RUN, "t", {}, Tool(), effect=Effect.MUTATE)
    assert journal(bench) == ["in_doubt"]
    look(bench, other)


def test_a_diverged_run_is_blocked_in_the_view_too(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    ledger.execute_step(RUN, "t", {}, lambda: 1)
    ledger.create_run("goal", RUN)
    with pytest.raises(ReplayDivergence, match="recorded is 't'"):
        ledger.execute_step(RUN, "other", {}, Tool())
    assert [row["status"] for row in view(bench, "agent_runs")] == ["BLOCKED"]
    look(bench, ledger)


def test_a_pipeline_is_shown_by_the_same_views(bench: Bench) -> None:
    pipeline = bench.pipeline(RUN, Step("a", lambda n: n), Step("b", lambda a: a + 1, ["a"]))
    pipeline.execute(n=1)
    steps = pipeline.steps(RUN)
    assert [(step.position, step.tool_name, step.step_number, step.arguments_json) for step in steps] == [
        ("a", "a", 1, '{"n":1}'),
        ("b", "b", 2, '{"a":1}'),
    ]
    assert pipeline.get_run(RUN).result == 2
    look(bench, bench.open())


def test_what_is_erased_is_null_and_the_rest_stands(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    ledger.execute_step(RUN, "t", {"a": 1}, lambda: 2)
    ledger.finish_run(RUN)
    ledger.forget(RUN)
    (row,) = view(bench, "run_steps")
    erased = ("arguments_json", "output_json", "error_message", "fingerprint", "input_digest", "output_digest")
    assert [row[column] for column in erased] == [None] * 6
    assert (row["tool_name"], row["state"], row["step_number"]) == ("t", "COMPLETED", 1)
    assert [row["goal"] for row in view(bench, "agent_runs")] == [None]
    (step,) = ledger.steps(RUN)
    assert (step.arguments_json, step.output_json, step.output_digest, step.state) == (None, None, None, "COMPLETED")
    assert ledger.get_run(RUN).goal is None
    assert ledger.verify().ok


def test_a_body_that_is_no_json_gives_nulls_and_no_error(bench: Bench) -> None:
    ledger = bench.open()
    ledger.create_run("goal", RUN)
    ledger.execute_step(RUN, "t", {}, lambda: 2)
    with raw(bench.path, without_triggers=True) as connection:
        connection.execute("UPDATE entries SET body = x'ff00', payload = x'fe'")
    for name in VIEWS:
        assert len(view(bench, name)) == 1


@pytest.mark.parametrize("name", VIEWS)
def test_the_views_are_for_reading(bench: Bench, name: str) -> None:
    bench.open().create_run("goal", RUN)
    with raw(bench.path) as connection:
        for statement in (
            f"DELETE FROM {name}",
            f"UPDATE {name} SET tool_name = 'x'",
            f"INSERT INTO {name} DEFAULT VALUES",
        ):
            with pytest.raises(sqlite3.OperationalError):
                connection.execute(statement)


def test_runs_are_listed_oldest_first_and_by_state(bench: Bench) -> None:
    ledger = bench.open()
    for run_id in ("z", "a", "m"):
        ledger.create_run("goal", run_id)
        bench.clock.advance(1)
    ledger.finish_run("a", result=[1])
    assert [run.run_id for run in ledger.runs()] == ["z", "a", "m"]
    assert [run.run_id for run in ledger.runs(status="PENDING")] == ["z", "m"]
    assert [run.result for run in ledger.runs(status="COMPLETED")] == [[1]]
    assert ledger.runs(status="FAILED") == []
    with pytest.raises(ValueError, match="no run state 'DONE'"):
        ledger.runs(status="DONE")
