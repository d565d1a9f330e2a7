"""DESIGN §10 above the file: what cannot be stored or named is refused with a named error, and nothing is half-written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    InvalidArguments,
    InvalidName,
    LedgerError,
    PayloadTooLarge,
    RunOwned,
    Step,
    StoreUnavailable,
    UnserialisableArguments,
    UnserialisableOutput,
    compute_fingerprint,
)
from support.ledgers import Bench, never
from support.processes import environment

RUN, GOAL = "run", "go on"


@pytest.fixture
def ledger(bench: Bench) -> AgentRunLedger:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    return ledger


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNSTORABLE: dict[str, tuple[Any, str]] = {
    "an object": ({"a": {"b": [0, object()]}}, "$.a.b[1]"),
    "a function": ({"f": len}, "$.f"),
    "a module": ({"m": os}, "$.m"),
    "a lock": ({"l": [threading.Lock()]}, "$.l[0]"),
    "NaN": ({"a": [1.0, float("nan")]}, "$.a[1]"),
    "infinity": ({"a": float("inf")}, "$.a"),
    "minus infinity": ({"a": {"b": float("-inf")}}, "$.a.b"),
    "a surrogate": ({"a": "x\ud800y"}, "$.a"),
    "a surrogate in a key": ({"a": {"\udfff": 1}}, "$.a"),
    "too deep": ({"a": nested(201)}, "$.a"),
    "endless": ({"a": in_itself()}, "$.a"),
}


@pytest.mark.parametrize("what", UNSTORABLE)
def test_arguments_that_json_cannot_hold_are_refused_before_dispatch_with_their_path(
    bench: Bench, ledger: AgentRunLedger, what: str
) -> None:
    arguments, path = UNSTORABLE[what]
    with pytest.raises(UnserialisableArguments) as caught:
        ledger.execute_step(RUN, "t", arguments, never)
    assert isinstance(caught.value, LedgerError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.path.startswith(path)
    assert path in str(caught.value)
    assert len(str(caught.value)) < 2000
    str(caught.value).encode()
    assert bench.kinds(RUN) == ["created"]
    assert ledger.execute_step(RUN, "t", {"a": 1}, lambda: 1) == 1


@pytest.mark.parametrize("what", UNSTORABLE)
def test_an_output_that_json_cannot_hold_is_recorded_as_executed_with_its_path(
    bench: Bench, ledger: AgentRunLedger, what: str
) -> None:
    output, path = UNSTORABLE[what]
    with pytest.raises(UnserialisableOutput) as caught:
        ledger.execute_step(RUN, "t", {}, lambda: output)
    assert path in str(caught.value)
    assert caught.value.path.startswith(path)
    assert bench.kinds(RUN) == ["created", "intent", "outcome"]
    ledger.create_run(GOAL, RUN)
    with pytest.raises(UnserialisableOutput) as replayed:
        ledger.execute_step(RUN, "t", {}, never)
    assert (str(replayed.value), replayed.value.path) == (str(caught.value), caught.value.path)
    assert ledger.verify().ok


@pytest.mark.parametrize("what", UNSTORABLE)
def test_a_result_that_cannot_be_stored_leaves_the_run_open(bench: Bench, ledger: AgentRunLedger, what: str) -> None:
    result, path = UNSTORABLE[what]
    with pytest.raises(UnserialisableArguments) as caught:
        ledger.finish_run(RUN, result)
    assert caught.value.path.startswith(path)
    assert bench.kinds(RUN) == ["created"]
    ledger.finish_run(RUN, 1)


@pytest.mark.parametrize("what", UNSTORABLE)
def test_what_cannot_be_stored_has_no_fingerprint(what: str) -> None:
    with pytest.raises(UnserialisableArguments):
        compute_fingerprint("t", UNSTORABLE[what][0])


def test_nesting_up_to_200_is_stored(ledger: AgentRunLedger) -> None:
    deep = nested(199)
    assert ledger.execute_step(RUN, "t", {"a": deep}, lambda: nested(200)) == nested(200)


@pytest.mark.parametrize("size", [100, 101])
def test_the_payload_limit_counts_canonical_bytes(bench: Bench, size: int) -> None:
    ledger = bench.open(payload_limit=100)
    ledger.create_run("g", RUN)
    arguments = {"a": "x" * (size - len('{"a":""}'))}
    if size <= 100:
        assert ledger.execute_step(RUN, "t", arguments, lambda: "x" * 98) == "x" * 98
        return
    with pytest.raises(PayloadTooLarge, match=r"101 bytes.*the limit is 100") as caught:
        ledger.execute_step(RUN, "t", arguments, never)
    assert (caught.value.size, caught.value.limit) == (101, 100)
    with pytest.raises(PayloadTooLarge):
        ledger.create_run("x" * 200)
    with pytest.raises(PayloadTooLarge):
        ledger.finish_run(RUN, "x" * 200)
    with pytest.raises(PayloadTooLarge):
        bench.pipeline("pipeline", Step("s", lambda x: x), payload_limit=100).execute(x="x" * 200)
    assert bench.kinds(RUN) == ["created"]
    assert len(ledger.runs()) == 1


def test_the_limit_is_16_mib_unless_another_is_given(ledger: AgentRunLedger) -> None:
    with pytest.raises(PayloadTooLarge, match="the limit is 16777216"):
        ledger.execute_step(RUN, "t", {"a": "x" * 2**24}, never)
    assert len(ledger.execute_step(RUN, "t", {"a": "x" * 2**20}, lambda: "y" * 2**20)) == 2**20


BAD_NAMES = [
    "",
    "  ",
    "a" * 256,
    "ä" * 128,
    "a\x00b",
    "a\nb",
    "\x1b[31mred",
    "\x7f",
    "a\x85",
    "\ud800",
    None,
    7,
    b"bytes",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_cannot_be_one_is_refused_wherever_it_comes_in(bench: Bench, name: Any) -> None:
    ledger = bench.open()
    ledger.create_run(GOAL, RUN)
    calls = [
        lambda: ledger.execute_step(RUN, name, {}, never),
        lambda: ledger.execute_step(name, "t", {}, never),
        lambda: ledger.get_run(name),
        lambda: ledger.steps(name),
        lambda: ledger.resume_run(name),
        lambda: ledger.finish_run(name),
        lambda: ledger.abort_run(name, "why"),
        lambda: ledger.cancel(name),
        lambda: ledger.detach(name),
        lambda: ledger.tree_head(name),
        lambda: compute_fingerprint(name, {}),
        lambda: bench.pipeline(name),
        lambda: Step(name, never),
    ]
    if name is not None:  # None asks for a new id, and for all runs
        calls += [lambda: ledger.create_run(GOAL, name), lambda: ledger.verify(name)]
    for number, call in enumerate(calls):
        try:
            call()
        except InvalidName:
            continue
        pytest.fail(f"call {number} took it")
    assert bench.kinds(RUN) == ["created"]
    assert [run.run_id for run in ledger.runs()] == [RUN]


def test_names_of_255_bytes_are_names(bench: Bench) -> None:
    ledger = bench.open()
    for name in ("a" * 255, "ä" * 127 + "b", "\U0001f600" * 63):
        ledger.create_run(GOAL, name)
        assert ledger.execute_step(name, name, {}, lambda: 1) == 1
        assert ledger.steps(name)[0].tool_name == name


@pytest.mark.parametrize("arguments", [None, [1], "text", 7, {1}])
def test_arguments_are_a_mapping(bench: Bench, ledger: AgentRunLedger, arguments: Any) -> None:
    with pytest.raises(InvalidArguments, match="mapping"):
        ledger.execute_step(RUN, "t", arguments, never)
    assert bench.kinds(RUN) == ["created"]


@pytest.mark.parametrize("function", [None, 3, "print"])
def test_a_function_can_be_called(bench: Bench, ledger: AgentRunLedger, function: Any) -> None:
    with pytest.raises(InvalidArguments, match="not callable"):
        ledger.execute_step(RUN, "t", {}, function)
    assert bench.kinds(RUN) == ["created"]


def test_arguments_that_the_function_does_not_take_are_refused_before_dispatch(
    bench: Bench, ledger: AgentRunLedger
) -> None:
    for arguments in ({}, {"b": 1}, {"a": 1, "b": 2}):
        with pytest.raises(InvalidArguments):
            ledger.execute_step(RUN, "t", arguments, lambda a: never())
    assert bench.kinds(RUN) == ["created"]


@pytest.mark.parametrize("goal", [None, 7, ["list"]])
def test_a_goal_is_a_string(bench: Bench, goal: Any) -> None:
    with pytest.raises(InvalidArguments, match="goal"):
        bench.open().create_run(goal)


def test_words_that_cannot_be_stored_are_refused_by_name(bench: Bench, ledger: AgentRunLedger) -> None:
    with pytest.raises(UnserialisableArguments, match="goal"):
        ledger.create_run("\ud800")
    with pytest.raises(UnserialisableArguments, match="reason"):
        ledger.abort_run(RUN, "\ud800")
    with pytest.raises(UnserialisableArguments, match="reason"):
        ledger.cancel(RUN, reason="\ud800")
    with pytest.raises(InvalidName):
        ledger.cancel(RUN, by="\ud800")
    assert bench.kinds(RUN) == ["created"]


# --- closed ledgers, threads, forks -----------------------------------------------------------------------------------


def test_a_closed_ledger_is_a_named_error_whatever_it_is_asked(tmp_path: Path) -> None:
    ledger = AgentRunLedger(tmp_path / "ledger.db")
    ledger.create_run(GOAL, RUN)
    ledger.close()
    for call in (
        lambda: ledger.create_run(GOAL),
        lambda: ledger.create_run(GOAL, RUN),
        lambda: ledger.execute_step(RUN, "t", {}, never),
        lambda: ledger.resume_run(RUN),
        lambda: ledger.finish_run(RUN),
        lambda: ledger.abort_run(RUN, "why"),
        lambda: ledger.cancel(RUN),
        lambda: ledger.get_run(RUN),
        lambda: ledger.runs(),
        lambda: ledger.steps(RUN),
        lambda: ledger.verify(),
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


def test_a_ledger_works_from_any_thread(bench: Bench, ledger: AgentRunLedger) -> None:
    results: list[Any] = []

    def work() -> None:
        results.append(ledger.execute_step(RUN, "t", {"n": len(results)}, lambda n: n))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [0, 1, 2]
    assert ledger.verify().ok


FORK = """
import os, sys
from agent_run_ledger import AgentRunLedger, LedgerError, RunOwned
ledger = AgentRunLedger("ledger.db")
ledger.create_run("g", "parents")
ledger.execute_step("parents", "t", {}, lambda: 1)
child = os.fork()
if child == 0:
    code = 1
    try:
        ledger.execute_step("parents", "t", {}, lambda: 2)
    except RunOwned:
        own = ledger.create_run("g", "childs")
        ledger.execute_step(own, "t", {}, lambda: 3)
        code = 7
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ledger.execute_step("parents", "u", {}, lambda: 4) == 4
assert ledger.verify().ok
assert [(run.run_id, run.total_steps) for run in ledger.runs()] == [("parents", 2), ("childs", 1)]
"""


def test_a_forked_child_may_use_the_parents_ledger_for_runs_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore:This process:DeprecationWarning",
            "-c",
            FORK,
        ],  # a fork beside our heartbeat thread
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_owner_named_in_a_refusal_is_who_has_the_run(bench: Bench) -> None:
    bench.open(owner="'; DROP TABLE runs; --").create_run(GOAL, RUN)
    with pytest.raises(RunOwned) as caught:
        bench.open().create_run(GOAL, RUN)
    assert caught.value.owner.startswith("'; DROP TABLE runs; --")
