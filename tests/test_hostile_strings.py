"""Strings that attack somebody stay data, wherever they come in and wherever they are shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import InvalidName, ReplayDivergence, RunLedger, Step, StepFailed, compute_fingerprint
from agent_run_ledger.rules.canonical import decode
from agent_run_ledger.stores import open_store
from support.ledgers import HOSTILE, Bench, never, raising, raw

MORE = {
    "bidi": "\u202eexe.cod",
    "ANSI": "\x1b[2J\x1b[31m",
    "format": "%s%n{0.__class__}",
    "quote": "\"'`\\",
    "tag": "$tuple",
    "wild": "100% _",
}
EVERY = HOSTILE | MORE
NAMES = {name: sample for name, sample in EVERY.items() if name not in ("ELF", "ANSI")}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "ledger").mkdir()
    with Bench("sqlite", tmp_path / "ledger") as opened:
        yield opened


@pytest.mark.parametrize("sample", NAMES.values(), ids=NAMES)
def test_as_a_run_id_tool_name_and_step_name_it_is_a_name(bench: Bench, sample: str) -> None:
    before = set(bench.path.parent.parent.iterdir())
    ledger = bench.open(owner=sample)
    ledger.create_run(sample, sample)
    assert ledger.execute_step(sample, sample, {sample: sample}, lambda: {sample: [sample]}) == {sample: [sample]}
    ledger.create_run(sample, sample)
    assert ledger.execute_step(sample, sample, {sample: sample}, never) == {sample: [sample]}
    ledger.finish_run(sample, sample)
    record = ledger.get_run(sample)
    assert (record.run_id, record.goal, record.status, record.result) == (sample, sample, "COMPLETED", sample)
    (step,) = ledger.steps(sample)
    assert (step.run_id, step.tool_name) == (sample, sample)
    assert decode((step.arguments_json or "").encode()) == {sample: sample}
    assert step.fingerprint == compute_fingerprint(sample, {sample: sample})
    pipeline = bench.pipeline(sample + "!", Step(sample, lambda: sample), Step("after", lambda x: x, [sample]))
    assert pipeline.execute() == sample
    assert [step.position for step in pipeline.steps(sample + "!")] == [sample, "after"]
    assert ledger.verify().ok
    assert [run.run_id for run in ledger.runs()] == [sample, sample + "!"]
    assert set(bench.path.parent.parent.iterdir()) == before, "nothing was written elsewhere"
    assert all(name.startswith("ledger.db") for name in os.listdir(bench.path.parent))


@pytest.mark.parametrize("sample", [EVERY["ELF"], EVERY["ANSI"]], ids=["ELF", "ANSI"])
def test_with_control_characters_it_is_no_name(bench: Bench, sample: str) -> None:
    ledger = bench.open()
    run_id = ledger.create_run("g")
    for call in (
        lambda: ledger.create_run("g", sample),
        lambda: ledger.execute_step(run_id, sample, {}, never),
        lambda: Step(sample, never),
        lambda: RunLedger(sample, bench.path),
        lambda: bench.open(owner=sample),
    ):
        with pytest.raises(InvalidName) as caught:
            call()
        assert str(caught.value).isprintable(), "the message itself is harmless"
    assert len(ledger.runs()) == 1


@pytest.mark.parametrize("sample", EVERY.values(), ids=EVERY)
def test_as_goal_argument_output_error_reason_and_result_it_comes_back_as_it_was(bench: Bench, sample: str) -> None:
    ledger = bench.open()
    run_id = ledger.create_run(sample)
    assert ledger.execute_step(run_id, "t", {sample: [sample, {sample: sample}]}, lambda: (sample, {sample})) == (
        sample,
        {sample},
    )
    with pytest.raises(StepFailed) as live:
        ledger.execute_step(run_id, "t", {}, raising(ValueError(sample)))
    assert str(live.value) == f"Tool execution failed: ValueError: {sample}"
    error = type(sample.replace("\x00", "") or "E", (Exception,), {"__module__": sample})
    with pytest.raises(StepFailed):
        ledger.execute_step(run_id, "t", {"other": 1}, raising(error(sample)))
    ledger.finish_run(run_id, {sample: sample})
    aborted = ledger.create_run("g", "aborted")
    ledger.abort_run(aborted, sample)

    record = ledger.get_run(run_id)
    assert (record.goal, record.result) == (sample, {sample: sample})
    assert ledger.get_run(aborted).cause == sample
    steps = ledger.steps(run_id)
    assert decode((steps[0].arguments_json or "").encode()) == {sample: [sample, {sample: sample}]}
    assert steps[1].error_message == f"ValueError: {sample}"
    assert ledger.verify().ok


@pytest.mark.parametrize("sample", EVERY.values(), ids=EVERY)
def test_in_the_views_it_is_data(bench: Bench, sample: str) -> None:
    ledger = bench.open()
    run_id = ledger.create_run(sample)
    ledger.execute_step(run_id, "t", {"a": sample}, lambda: sample)
    with pytest.raises(StepFailed):
        ledger.execute_step(run_id, "t", {"b": sample}, raising(ValueError(sample)))
    with raw(bench.path) as connection:
        ((goal,),) = connection.execute("SELECT goal FROM agent_runs").fetchall()
        steps: list[Any] = connection.execute(
            "SELECT arguments_json, output_json, error_message FROM run_steps"
        ).fetchall()
        journal: list[Any] = connection.execute("SELECT arguments_json, output_json FROM agent_step_journal").fetchall()
        tables = {row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # SQLite's json_extract ends a text at NUL, so goal and error show what stands before it; the JSON columns are whole.
    shown = (sample, sample.split("\x00")[0])
    assert goal in shown
    assert [json.loads(row["arguments_json"]) for row in steps] == [{"a": sample}, {"b": sample}]
    assert json.loads(steps[0]["output_json"]) == json.loads(journal[0]["output_json"]) == sample
    assert steps[1]["error_message"].removeprefix("ValueError: ") in shown
    assert {"entries", "runs", "payloads"} <= tables


@pytest.mark.parametrize("sample", EVERY.values(), ids=EVERY)
def test_in_an_error_message_it_names_and_breaks_nothing(bench: Bench, sample: str) -> None:
    ledger = bench.open()
    run_id = ledger.create_run("g")
    ledger.execute_step(run_id, "t", {sample: sample}, lambda: 1)
    ledger.create_run("g", run_id)
    with pytest.raises(ReplayDivergence) as caught:
        ledger.execute_step(run_id, "t", {sample: sample + "!"}, never)
    assert caught.value.path
    assert ledger.get_run(run_id).cause == str(caught.value)
    assert ledger.verify().ok


def test_many_hostile_runs_stand_side_by_side_in_one_file(bench: Bench) -> None:
    ledger = bench.open()
    for sample in NAMES.values():
        ledger.create_run("g", sample)
    assert [run.run_id for run in ledger.runs()] == list(NAMES.values())
    for sample in NAMES.values():
        assert ledger.get_run(sample).run_id == sample
        assert ledger.steps(sample) == []
    store = open_store(bench.path, durability="process", clock=bench.clock)
    assert list(store.check()) == []
    store.close()
