"""A list that is made when somebody looks at it is that list, whoever looks and however."""

from __future__ import annotations

import copy
import heapq
import json
import operator
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, StepRecord
from agent_run_ledger.late import Late
from support.processes import environment

ITEMS = [3, 1, 2]

LOOKS: dict[str, Callable[[list[int]], Any]] = {
    "an item": lambda items: items[1],
    "a slice": lambda items: items[::-1],
    "its length": len,
    "iteration": lambda items: [*items],
    "unpacking": lambda items: (lambda *given: given)(*items),
    "a copy": lambda items: list(items),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "JSON": json.dumps,
    "its truth": bool,
    "its text": repr,
    "in": lambda items: (2 in items, 9 in items),
    "equal": lambda items: (items == [3, 1, 2], operator.eq([3, 1, 2], items), items == [], operator.ne([3], items)),
    "less": lambda items: (items < [4], operator.lt([2], items), items >= [3, 1, 2]),
    "sum": lambda items: (operator.add(items, [4]), operator.add([4], items), items * 2, 2 * items),
    "sorted": sorted,
    "reversed": lambda items: list(reversed(items)),
    "found": lambda items: (items.index(2), items.count(3)),
    "joined to another": lambda items: operator.iadd([0], items),
    "in a place of another": lambda items: operator.setitem(other := [7, 8], slice(0, 1), items) or other,
    "matched": lambda items: (lambda first, *rest: (first, rest))(*items),
    "zipped": lambda items: [*zip(items, items, strict=True)],
    "the largest": max,
}

CHANGES: dict[str, Callable[[list[int]], Any]] = {
    "append": lambda items: items.append(4),
    "extend": lambda items: items.extend([4, 5]),
    "insert": lambda items: items.insert(0, 9),
    "pop": lambda items: items.pop(),
    "remove": lambda items: items.remove(1),
    "clear": lambda items: items.clear(),
    "sort": lambda items: items.sort(),
    "reverse": lambda items: items.reverse(),
    "an item": lambda items: operator.setitem(items, 0, 9),
    "a slice": lambda items: operator.setitem(items, slice(0, 2), []),
    "del": lambda items: operator.delitem(items, 0),
    "+=": lambda items: operator.iadd(items, [4]),
    "*=": lambda items: operator.imul(items, 2),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_the_list(name: str) -> None:
    late = Late(lambda: list(ITEMS), 3)
    assert isinstance(late, list)
    assert LOOKS[name](late) == LOOKS[name](list(ITEMS))


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_changes_it_changes_the_list(name: str) -> None:
    late, usual = Late(lambda: list(ITEMS), 3), list(ITEMS)
    assert CHANGES[name](late) == CHANGES[name](usual)
    assert late == usual
    assert len(late) == len(usual)


def test_nothing_of_a_list_is_left_out() -> None:
    given = {name for name in vars(list) if callable(getattr(list, name))} - set(vars(object)) - {"__class_getitem__"}
    assert given <= set(vars(Late))


def test_its_length_and_who_does_not_look_make_nothing() -> None:
    def made() -> list[int]:
        raise AssertionError("they were made")

    late = Late(made, 3)
    assert len(late) == 3
    assert late
    fill = late.filling()
    del late
    fill()


def test_a_heap_is_made_of_what_was_looked_at() -> None:
    late = Late(lambda: list(ITEMS), 3)
    heapq.heapify(copy.copy(late))
    assert late == ITEMS


def test_records_say_how_the_run_stood_when_it_was_resumed(tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        run_id = ledger.create_run("goal")
        for n in (1, 2):
            ledger.execute_step(run_id, "fetch", {"n": n}, lambda: {"total": 12})
    with AgentRunLedger(tmp_path / "agent.db") as ledger:
        unseen, seen = ledger.resume_run(run_id), list(ledger.resume_run(run_id))
        ledger.execute_step(run_id, "fetch", {"n": 3}, lambda: {"total": 12})
        after = ledger.resume_run(run_id)
    assert [type(record) for record in seen] == [StepRecord, StepRecord]
    assert unseen == seen == after[:2]
    assert len(after) == 3


def test_whoever_does_not_look_at_records_loads_no_dataclasses(tmp_path: Path) -> None:
    program = (
        "import sys; from agent_run_ledger import AgentRunLedger\n"
        f"with AgentRunLedger({str(tmp_path / 'agent.db')!r}) as ledger:\n"
        "    run_id = ledger.create_run('goal', 'run')\n"
        "    ledger.resume_run('run')\n"
        "    ledger.execute_step('run', 'fetch', {}, lambda: 1)\n"
        "    ledger.execute_step('run', 'fetch', {'n': 2}, lambda: 1)\n"
        "print({'dataclasses', 'agent_run_ledger.model'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, check=True, text=True
    )
    assert done.stdout == "set()\n"


def test_two_that_nobody_has_looked_at_are_compared_and_joined_as_lists() -> None:
    def two() -> tuple[Late[int], Late[int]]:
        return Late(lambda: list(ITEMS), len(ITEMS)), Late(lambda: list(ITEMS), len(ITEMS))

    for holds in (operator.eq, operator.le, operator.ge):
        assert holds(*two())
    assert not operator.ne(*two())
    one, other = two()
    assert [one] == [other]
    assert operator.add(*two()) == ITEMS + ITEMS


def test_what_a_thread_adds_while_another_fills_it_is_not_lost() -> None:
    is_making, may_go_on = threading.Event(), threading.Event()

    def make() -> list[int]:
        is_making.set()
        assert may_go_on.wait(60)
        return list(ITEMS)

    late = Late(make, len(ITEMS))
    threads = [
        threading.Thread(target=late.fill),
        threading.Thread(target=lambda: is_making.wait(60) and late.append(4)),
    ]
    for thread in threads:
        thread.start()
    assert is_making.wait(60)
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert late == [*ITEMS, 4]
