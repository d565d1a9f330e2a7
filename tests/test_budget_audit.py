"""`verify` holds what calls reserve and use to the limits that the log states, and what accounts count to the logs of their runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import AgentRunLedger, Budget, BudgetExceededException, Finding, current_step, merkle
from support.audited import Tables, read_only
from support.ledgers import KINDS, Bench, Died

TEAM, CHILDREN = "@account/budget/team", "@account/children/parent"


def asking(ledger: AgentRunLedger, at_most: str = "0.30") -> Callable[[str], str]:
    """A tool that costs what it is told to, and declares a maximum."""

    @ledger.tool(kind="model", max_usd=at_most, may_repeat=True)
    def ask(usd: str) -> str:
        current_step().record_usage(usd=usd)
        return "said"

    return ask


def spending(bench: Bench) -> None:
    """A run that overran once, one that shares a budget, and its child."""
    ledger = bench.open()
    ask = asking(ledger)
    pool = ledger.budget("team", usd="2.00")

    @ledger.agent(budget=Budget(usd="1.00"))
    def alone() -> None:
        for usd in ("0.10", "0.40", "0.20"):
            ask(usd)

    @ledger.agent(budget=Budget(usd="0.60"))
    def child() -> None:
        ask("0.20")

    @ledger.agent(budget=Budget(usd="1.50", within=pool))
    def parent() -> None:
        ask("0.10")
        child()
        ask("0.10")

    ledger.run(alone, run_id="alone")
    ledger.run(parent, run_id="parent")


def rewritten(bench: Bench, run_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Finding]:
    """What is found once every body of a run was changed so, and all hashes and sums were made anew."""
    tables = Tables(bench)
    rows = tables.rows("SELECT seq, body FROM entries WHERE run_id = ? ORDER BY seq", run_id)
    frontier: list[bytes] = []
    spent, held = Decimal(0), dict[str, Decimal]()
    changed = 0
    for seq, stored in rows:
        said = json.loads(stored)
        body = change(dict(said))
        changed += body != said
        at = json.dumps(body["grant"]) if "grant" in body else body.get("position", "")
        if body["kind"] in ("intent", "granted"):
            held[at] = Decimal(body.get("holds", {}).get("usd", 0))
        elif body["kind"] in ("outcome", "settled"):
            held.pop(at, None)
            spent += Decimal(body.get("charges", {}).get("usd", 0))
        if "spent" in body:
            body["spent"] = {"usd": format(spent, "f")}
        data = json.dumps(body).encode()
        frontier, roots = merkle.append(frontier, seq - 1, merkle.leaf_hash(data))
        tables.write(
            (
                "UPDATE entries SET kind = ?, body = ?, roots = ? WHERE run_id = ? AND seq = ?",
                (body["kind"], data, roots, run_id, seq),
            )
        )
    tables.close()
    assert changed
    with read_only(bench) as ledger:
        return [each for each in ledger.verify().findings if "trigger" not in each.message]


def having(of: str, number: int = -1, /, **said: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of the bodies of this kind; None takes a field away."""

    def change(body: dict[str, Any]) -> dict[str, Any]:
        if body["kind"] == of and number in (-1, body["seq"]):
            body |= said
        return {name: value for name, value in body.items() if value is not None}

    return change


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    opened = Bench("sqlite", tmp_path)
    spending(opened)
    with opened.open() as ledger:
        assert ledger.verify().findings == []
    return opened


CHANGES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("alone", "created", 1, {"max_usd": "0.50"}),
    ("alone", "intent", 6, {"holds": {"usd": "0.95"}}),
    ("alone", "outcome", 5, {"overran": None}),
    ("alone", "outcome", 7, {"overran": True}),
    ("alone", "created", 1, {"max_steps": 2}),
    (TEAM, "created", 1, {"max_usd": "0.20"}),
    (TEAM, "granted", 2, {"holds": {"usd": "2.50"}}),
    (TEAM, "settled", -1, {"charges": {"usd": "0.01"}}),
    (CHILDREN, "created", 1, {"max_usd": "0.20"}),
    (CHILDREN, "settled", 2, {"charges": {"usd": "0.01"}}),
    ("parent", "outcome", -1, {"charges": {"usd": "0.30"}}),
]


@pytest.mark.parametrize(("run_id", "kind", "seq", "said"), CHANGES, ids=range(len(CHANGES)))
def test_a_log_that_was_made_anew_and_passes_what_it_allows_is_found(
    bench: Bench, run_id: str, kind: str, seq: int, said: dict[str, Any]
) -> None:
    found = rewritten(bench, run_id, having(kind, seq, **said))
    assert {each.code for each in found} == {"budget"}
    assert all(each.expected is not None and each.found is not None for each in found)
    assert {each.run_id for each in found} <= {run_id, TEAM, CHILDREN}


def test_an_account_that_counts_for_a_call_to_which_nothing_was_granted_is_found(bench: Bench) -> None:
    found = rewritten(bench, TEAM, having("settled", grant=["parent", "9", 1]))
    assert {(each.run_id, each.code) for each in found} == {(TEAM, "budget")}


@pytest.mark.parametrize("kind", ["granted", "settled", "limited"])
def test_an_entry_of_accounts_in_another_log_is_found(bench: Bench, kind: str) -> None:
    found = rewritten(
        bench, "alone", having("outcome", 3, kind=kind, grant=["a", "1", 1], holds={}, under=1, charges={})
    )
    assert ("alone", 3, "lifecycle") in {(each.run_id, each.seq, each.code) for each in found}


def test_a_log_that_says_that_it_is_an_account_is_found(bench: Bench) -> None:
    found = rewritten(bench, "alone", having("created", account="@account/budget/other"))
    assert ("alone", 1, "lifecycle") in {(each.run_id, each.seq, each.code) for each in found}


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_raises_or_lowers_a_budget_says_so_in_the_log_and_nothing_is_found(tmp_path: Path, kind: str) -> None:
    with Bench(kind, tmp_path) as bench:
        for usd, often in ((Decimal("0.50"), 1), (Decimal("5.00"), 6), (Decimal("1.60"), 7), (None, 12)):
            bench.owners_die()
            ledger = bench.open(budget=Budget(usd=usd))
            ask = asking(ledger)

            @ledger.agent(name="agent")
            def agent(often: int = often, ask: Any = ask) -> None:
                for _ in range(often):
                    ask("0.20")
                raise Died

            with pytest.raises((Died, BudgetExceededException)):
                ledger.run(agent, run_id="run")
            assert ledger.verify().findings == []
        said = [json.loads(row.body) for row in bench.rows("run")]
        assert said[0]["max_usd"] == "0.50"
        assert [body["limits"].get("max_usd") for body in said if "limits" in body] == ["5.00", "1.60", None]
