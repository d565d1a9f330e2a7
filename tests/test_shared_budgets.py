"""Budgets that runs share: together they use no more than it allows, whoever waits, dies, begins others or comes back the next day."""

from __future__ import annotations

import json
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_run_ledger import (
    AgentRunLedger,
    Budget,
    BudgetExceededException,
    InvalidArguments,
    InvalidName,
    Run,
    RunClosed,
    SharedBudget,
    StepFailed,
    current_step,
)
from agent_run_ledger.drivers.sync import SyncDriver
from agent_run_ledger.engine.effects import Draw
from support.ledgers import Bench, Died, Tool
from support.programs import LONG, Way
from support.shell import Shell

DAY = 86_400.0


def metered(ledger: AgentRunLedger, way: Way, usd: str, at_most: str, name: str = "ask") -> Any:
    """A tool that costs so much, and declares another price."""

    def ask() -> str:
        current_step().record_usage(usd=usd)
        return "said"

    return way.tool(ledger, ask, name=name, kind="model", max_usd=at_most, may_repeat=True)


def asking(ask: Any, times: int) -> Any:
    def agent() -> Any:
        for _ in range(times):
            yield ask()

    return agent


def state(ledger: AgentRunLedger, name: str | None = "team") -> tuple[Decimal, Decimal]:
    """What is spent, and what is reserved, of the one budget of this name."""
    (found,) = [each for each in ledger.budgets() if each.name == name]
    return found.spent_usd, found.reserved_usd


# --- by name ----------------------------------------------------------------------------------------------------------


def test_runs_that_share_a_budget_use_no_more_than_it_allows(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd="1.00")
    agent = way.agent(ledger, asking(metered(ledger, way, "0.10", "0.30"), 4), name="agent", budget=pool)
    way.start(ledger, agent, run_id="one")
    assert state(ledger) == (Decimal("0.40"), 0)
    way.start(ledger, agent, run_id="two")
    with pytest.raises(
        BudgetExceededException, match=r"budget 'team': the call may use 0\.3 USD, and of 1 USD 0\.2 USD are left"
    ):
        way.start(ledger, agent, run_id="three")
    assert ledger.get_run("three").status == "DEAD_LETTER"
    assert state(ledger) == (Decimal("0.80"), 0)
    assert [run.run_id for run in ledger.runs()] == ["one", "two", "three"]
    assert ledger.verify().findings == []


def test_each_day_has_its_own(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd_per_day="0.30")
    agent = way.agent(ledger, asking(metered(ledger, way, "0.10", "0.30"), 1), name="agent", budget=pool)
    way.start(ledger, agent, run_id="today")
    with pytest.raises(BudgetExceededException, match=r"0\.2 USD are left"):
        way.start(ledger, agent, run_id="too much")
    bench.clock.advance(DAY)
    way.start(ledger, agent, run_id="tomorrow")
    today, tomorrow = ledger.budgets()
    assert today.day is not None
    assert tomorrow.day is not None
    assert today.day < tomorrow.day
    assert (today.spent_usd, tomorrow.spent_usd) == (Decimal("0.10"), Decimal("0.10"))


def test_a_budget_of_each_run_and_a_shared_one_hold_both(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd="1.00")
    own = Budget(usd="0.50", within=pool)
    agent = way.agent(ledger, asking(metered(ledger, way, "0.20", "0.20"), 9), name="agent", budget=own)
    with pytest.raises(BudgetExceededException, match=r"of 0\.5 USD 0\.1 USD are left"):
        way.start(ledger, agent, run_id="one")
    with pytest.raises(BudgetExceededException, match=r"of 0\.5 USD 0\.1 USD are left"):
        way.start(ledger, agent, run_id="two")
    with pytest.raises(BudgetExceededException, match=r"budget 'team': 1 USD of 1 USD are spent"):
        way.start(ledger, agent, run_id="three")
    assert state(ledger) == (Decimal("1.00"), 0)


def test_what_nobody_tells_is_spent_as_it_was_granted_and_an_overrun_stops_the_others(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd="1.00")
    silent = way.tool(ledger, Tool("said"), name="silent", kind="model", max_usd="0.25")
    dear = metered(ledger, way, "0.90", "0.50", name="dear")

    def agent() -> Any:
        yield silent()
        yield dear()

    way.start(ledger, way.agent(ledger, agent, name="agent", budget=pool), run_id="one")
    assert state(ledger) == (Decimal("1.15"), 0)
    more = way.agent(ledger, asking(silent, 1), name="more", budget=pool)
    with pytest.raises(BudgetExceededException, match=r"1\.15 USD were used where 1 USD were allowed"):
        way.start(ledger, more, run_id="two")


def test_a_call_of_which_nothing_is_known_takes_all_that_is_left(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd="1.00", tokens=500)
    seen: list[SharedBudget] = []

    def ask() -> dict[str, Any]:
        seen.extend(ledger.budgets())
        return {"model": "m", "usage": {"prompt_tokens": 30, "completion_tokens": 20}}

    tool = way.tool(ledger, ask, name="ask", kind="model")
    way.start(ledger, way.agent(ledger, asking(tool, 1), name="agent", budget=pool), run_id="one")
    assert [(each.reserved_tokens, each.reserved_usd) for each in seen] == [(500, Decimal("1.00"))]
    (after,) = ledger.budgets()
    assert (after.spent_tokens, after.spent_usd) == (50, Decimal("1.00"))  # nobody told what its tokens cost


def test_the_limits_that_were_declared_last_hold(bench: Bench, way: Way) -> None:
    first = bench.open()
    agent = way.agent(
        first, asking(metered(first, way, "0.10", "0.10"), 3), name="a", budget=first.budget("team", usd="0.2")
    )
    with pytest.raises(BudgetExceededException):
        way.start(first, agent, run_id="one")
    second = bench.open()
    pool = second.budget("team", usd="0.5")
    again = way.agent(second, asking(metered(second, way, "0.10", "0.10"), 3), name="a", budget=pool)
    way.start(second, again, run_id="two")
    assert state(second) == (Decimal("0.50"), 0)
    (account,) = [each.account for each in second.budgets()]
    assert bench.kinds(account).count("limited") == 1


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_call_waits_where_only_what_others_may_use_stands_in_its_way(bench: Bench, way: Way) -> None:
    bench.on_real_time()
    ledger, other = bench.open(), bench.open()
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow() -> str:
        is_asked.set()
        assert may_answer.wait(LONG)
        current_step().record_usage(usd="0.1")
        return "slow"

    tool = way.tool(ledger, slow, name="slow", kind="model", max_usd="0.8")
    first = way.agent(ledger, asking(tool, 1), name="first", budget=ledger.budget("team", usd="1.0"))
    quick = metered(other, way, "0.5", "0.5")
    second = way.agent(other, asking(quick, 1), name="second", budget=other.budget("team", usd="1.0"))
    begins = threading.Thread(target=way.start, args=(ledger, first), kwargs={"run_id": "first"})
    begins.start()
    assert is_asked.wait(LONG)
    waits = threading.Thread(target=way.start, args=(other, second), kwargs={"run_id": "second"})
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    assert bench.kinds("second") == ["created"]
    may_answer.set()
    for each in (begins, waits):
        each.join(LONG)
        assert not each.is_alive()
    assert ledger.get_run("second").status == "COMPLETED"
    assert state(ledger) == (Decimal("0.6"), 0)


def test_a_run_that_waits_for_room_can_be_cancelled(bench: Bench, way: Way) -> None:
    bench.on_real_time()
    ledger, other = bench.open(heartbeat_seconds=0.05), bench.open(heartbeat_seconds=0.05)
    may_answer = threading.Event()
    is_asked = threading.Event()

    def slow() -> str:
        is_asked.set()
        assert may_answer.wait(LONG)
        return "slow"

    tool = way.tool(ledger, slow, name="slow", kind="model", max_usd="1")
    first = way.agent(ledger, asking(tool, 1), name="first", budget=ledger.budget("team", usd="1.0"))
    quick = metered(other, way, "0.5", "0.5")
    second = way.agent(other, asking(quick, 1), name="second", budget=other.budget("team", usd="1.0"))
    ends: list[BaseException] = []

    def start() -> None:
        try:
            way.start(other, second, run_id="second")
        except RunClosed as closed:
            ends.append(closed)

    begins = threading.Thread(target=way.start, args=(ledger, first), kwargs={"run_id": "first"})
    begins.start()
    assert is_asked.wait(LONG)
    waits = threading.Thread(target=start)
    waits.start()
    while ledger._store.head("second") is None:
        waits.join(0.01)
    ledger.cancel("second")
    waits.join(LONG)
    assert not waits.is_alive()
    assert len(ends) == 1
    assert ledger.get_run("second").status == "CANCELLED"
    may_answer.set()
    begins.join(LONG)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_an_attempt_that_died_is_spent_and_the_next_one_is_granted_anew(bench: Bench, way: Way) -> None:
    model = Tool(Died(), "said")
    for often in range(2):
        bench.owners_die()
        ledger = bench.open()
        tool = way.tool(ledger, model, name="ask", kind="model", max_usd="0.3")
        agent = way.agent(ledger, asking(tool, 1), name="agent", budget=ledger.budget("team", usd="1.0"))
        if often:
            way.start(ledger, agent)
        else:
            with pytest.raises(Died):
                way.start(ledger, agent)
            assert state(ledger) == (0, Decimal("0.3"))
    assert state(ledger) == (Decimal("0.6"), 0)  # of the first nobody knows, and the second did not say
    assert ledger.verify().findings == []


def test_a_crash_between_grant_and_intent_is_granted_once(
    bench: Bench, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.open()
    granted = ledger._leases.accounts.draw

    def dies(effect: Draw) -> Any:
        granted(effect)
        raise Died

    monkeypatch.setattr(ledger._leases.accounts, "draw", dies)
    agent = way.agent(
        ledger, asking(metered(ledger, way, "0.1", "0.3"), 1), name="agent", budget=ledger.budget("team", usd=1)
    )
    with pytest.raises(Died):
        way.start(ledger, agent)
    assert state(ledger) == (0, Decimal("0.3"))
    bench.owners_die()
    again = bench.open()
    seen: list[tuple[Decimal, Decimal]] = []

    def ask() -> None:
        seen.append(state(again))
        current_step().record_usage(usd="0.1")

    tool = way.tool(again, ask, kind="model", max_usd="0.3")
    way.start(again, way.agent(again, asking(tool, 1), name="agent", budget=again.budget("team", usd=1)))
    assert seen == [(0, Decimal("0.3"))]
    assert state(again) == (Decimal("0.1"), 0)


def test_what_a_dead_process_reserved_keeps_no_other_waiting_for_ever(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    dies = way.tool(ledger, Tool(Died()), name="dies", kind="model", max_usd="0.8")
    pool = ledger.budget("team", usd="1.0")
    with pytest.raises(Died):
        way.start(ledger, way.agent(ledger, asking(dies, 1), name="first", budget=pool), run_id="first")
    bench.owners_die()
    other = bench.open()
    ask = metered(other, way, "0.1", "0.3")
    second = way.agent(other, asking(ask, 1), name="second", budget=other.budget("team", usd="1.0"))
    with pytest.raises(BudgetExceededException, match=r"0\.8 USD of it by calls of which nobody knows how they ended"):
        way.start(other, second, run_id="second")


def test_nor_does_a_run_wait_for_what_its_own_dead_process_reserved(bench: Bench, way: Way) -> None:
    model = Tool(Died(), "said")
    ledger = bench.open()
    tool = way.tool(ledger, model, name="ask", kind="model", max_usd="0.8")
    agent = way.agent(ledger, asking(tool, 1), name="agent", budget=ledger.budget("team", usd="1.0"))
    with pytest.raises(Died):
        way.start(ledger, agent)
    bench.owners_die()
    again = bench.open()
    tool = way.tool(again, model, name="ask", kind="model", max_usd="0.8")
    agent = way.agent(again, asking(tool, 1), name="agent", budget=again.budget("team", usd="1.0"))
    with pytest.raises(BudgetExceededException, match=r"of 1 USD 0\.2 USD are left"):
        way.start(again, agent)
    assert model.calls == 1


def test_what_was_granted_and_never_begun_is_free_once_the_run_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.open()
    perform = SyncDriver.perform

    def dies(self: SyncDriver, effect: Any) -> Any:
        answer = perform(self, effect)
        if isinstance(effect, Draw):
            raise Died
        return answer

    pool = ledger.budget("team", usd="1")

    @ledger.tool(kind="model", max_usd="0.3")
    def ask() -> None:
        pass

    @ledger.agent(budget=pool)
    def agent() -> None:
        ask()

    monkeypatch.setattr(SyncDriver, "perform", dies)
    with pytest.raises(Died):
        ledger.run(agent, run_id="one")
    monkeypatch.undo()
    assert state(ledger) == (0, Decimal("0.3"))
    ledger.cancel("one")
    assert state(ledger) == (0, 0)


def test_a_run_that_ends_in_doubt_has_spent_what_it_reserved(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    tool = way.tool(ledger, Tool(Died()), name="ask", kind="model", max_usd="0.3")
    agent = way.agent(
        ledger, asking(tool, 1), name="agent", budget=Budget(usd=1, within=ledger.budget("team", usd="1.0"))
    )
    with pytest.raises(Died):
        way.start(ledger, agent)
    bench.owners_die()
    other = bench.open()
    other.cancel("run")
    assert state(other) == (Decimal("0.3"), 0)
    assert other.get_run("run").spent_usd == Decimal("0.3")
    cost = other.cost("run")
    assert (cost.spent.usd, cost.reserved_usd) == (Decimal("0.3"), 0)
    assert other.verify().findings == []


# --- parents and children ---------------------------------------------------------------------------------------------


def test_the_runs_that_a_run_begins_draw_on_its_budget(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    ask = metered(ledger, way, "0.10", "0.30")

    def asks(number: int) -> Any:
        yield ask()
        yield ask()
        return number

    child = way.agent(ledger, asks, name="child", budget=Budget(steps=9))

    def body() -> Any:
        yield ask()
        yield child(0)
        yield ask()
        for number in range(1, 9):
            yield child(number)

    parent = way.agent(ledger, body, name="parent", budget=Budget(usd="1.0"))
    with pytest.raises(StepFailed, match=r"the budget of run 'run' and its children: the call may use 0\.3 USD"):
        way.start(ledger, parent)
    assert state(ledger, None) == (Decimal("0.80"), 0)
    assert ledger.get_run("run").spent_usd == Decimal("0.20")
    assert ledger.verify().findings == []


def test_what_was_in_flight_when_the_first_child_began_counts(bench: Bench) -> None:
    ledger = bench.on_real_time().open()
    is_asked, may_answer = threading.Event(), threading.Event()

    @ledger.tool(kind="model", max_usd="0.5")
    def slow() -> None:
        is_asked.set()
        assert may_answer.wait(LONG)
        current_step().record_usage(usd="0.4")

    @ledger.tool(kind="model", max_usd="0.6")
    def ask() -> None:
        current_step().record_usage(usd="0.1")

    @ledger.agent()
    def child() -> None:
        ask()

    def begins() -> None:
        assert is_asked.wait(LONG)
        threading.Timer(0.2, may_answer.set).start()
        child()

    @ledger.agent(budget=Budget(usd="1.0"))
    def parent(run: Run) -> None:
        run.gather(slow, begins)

    ledger.run(parent, run_id="run")
    assert state(ledger, None) == (Decimal("0.5"), 0)
    account = "@account/children/run"
    kinds = bench.kinds(account)
    assert kinds[:3] == ["created", "settled", "granted"]
    assert [json.loads(row.body)["grant"] for row in bench.rows(account) if row.kind == "settled"][-1][0] == "run"


def test_children_share_what_their_parent_shares(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    ask = metered(ledger, way, "0.10", "0.10")
    grandchild = way.agent(ledger, asking(ask, 3), name="grandchild")
    child = way.agent(ledger, lambda: (yield grandchild()), name="child")
    parent = way.agent(ledger, lambda: (yield child()), name="parent", budget=ledger.budget("team", usd="0.25"))
    with pytest.raises(StepFailed, match="budget 'team'"):
        way.start(ledger, parent)
    assert state(ledger) == (Decimal("0.20"), 0)


def test_a_redriven_run_shares_what_the_old_one_shared(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    pool = ledger.budget("team", usd="0.25")
    agent = way.agent(ledger, asking(metered(ledger, way, "0.10", "0.10"), 3), name="agent", budget=pool)
    with pytest.raises(BudgetExceededException):
        way.start(ledger, agent)
    again = ledger.redrive("run", new_run_id="again")
    with pytest.raises(BudgetExceededException, match="budget 'team'"):
        way.start(ledger, agent, run_id=again)
    ledger.budget("team", usd="0.35")
    way.start(ledger, agent, run_id=ledger.redrive("run"))
    assert state(ledger) == (Decimal("0.30"), 0)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_budget_that_is_declared_nowhere_dispatches_nothing(bench: Bench, way: Way) -> None:
    ledger, other = bench.open(), bench.open()
    model = Tool("said")
    tool = way.tool(ledger, model, name="ask", kind="model", max_usd="0.3")
    pool = other.budget("team", usd=1)
    agent = way.agent(ledger, asking(tool, 1), name="agent", budget=pool)
    way.start(ledger, agent)  # it came with the budget
    third = bench.open()
    bare = way.agent(third, asking(way.tool(third, model, name="ask", kind="model", max_usd="0.3"), 1), name="agent")
    way.start(third, bare, run_id=third.fork("run", 1))  # and stands in the account
    bench.clock.advance(DAY)
    daily = other.budget("team", usd_per_day=1)
    way.start(
        other, way.agent(other, asking(metered(other, way, "0", "0.1"), 1), name="agent", budget=daily), run_id="daily"
    )
    bench.clock.advance(DAY)
    with pytest.raises(InvalidArguments, match=r"nothing is known of budget 'team' of \d{4}-\d\d-\d\d.*declare it"):
        way.start(third, bare, run_id=third.fork("daily", 1))
    assert model.calls == 2


@pytest.mark.parametrize("name", ["", "a/b", "x" * 201, "a\0b"])
def test_names_of_budgets_are_names(name: str, tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger, pytest.raises(InvalidName):
        ledger.budget(name, usd=1)


@pytest.mark.parametrize(
    "limits", [{}, {"usd": 0}, {"usd": -1}, {"tokens": 0}, {"usd_per_day": "much"}, {"tokens": 1.5}]
)
def test_a_budget_allows_something(limits: dict[str, Any], tmp_path: Path) -> None:
    with AgentRunLedger(tmp_path / "agent.db") as ledger, pytest.raises(ValueError, match=r"[bB]udget"):
        ledger.budget("team", **limits)


@pytest.mark.parametrize("within", ["team", Budget(usd=1), ("team",), None])
def test_a_budget_is_within_what_a_ledger_gives(within: Any) -> None:
    with pytest.raises(ValueError, match=r"ledger\.budget"):
        Budget(within=within)


def test_accounts_are_acted_upon_by_the_ledger_alone(bench: Bench, way: Way) -> None:
    ledger = bench.open()
    agent = way.agent(
        ledger, asking(metered(ledger, way, "0.1", "0.1"), 1), name="agent", budget=ledger.budget("team", usd=1)
    )
    way.start(ledger, agent)
    (account,) = [each.account for each in ledger.budgets()]
    for act in (
        lambda: ledger.create_run("mine", account),
        lambda: ledger.cancel(account),
        lambda: ledger.abort_run(account, "no"),
        lambda: ledger.redrive(account),
        lambda: ledger.fork(account, 1),
        lambda: ledger.signal(account, "x"),
        lambda: way.start(ledger, agent, run_id=account),
        lambda: ledger.submit(agent, run_id=account),
    ):
        with pytest.raises(InvalidName, match="shared budgets"):
            act()
    assert ledger.verify(account).ok


# --- looking ----------------------------------------------------------------------------------------------------------


def test_the_command_line_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, path = Shell(capsys, monkeypatch), tmp_path / "agent.db"
    with AgentRunLedger(path, durability="process") as ledger:
        assert shell("--db", str(path), "budgets")[0] == 0
        way = Way(False)
        ask = metered(ledger, way, "0.1", "0.1")
        child = way.agent(ledger, asking(ask, 1), name="child")
        body = Budget(usd="0.5", within=ledger.budget("team", usd_per_day="1.5", tokens=1000))
        way.start(ledger, way.agent(ledger, lambda: (yield child()), name="parent", budget=body))
    status, text, _ = shell("--db", str(path), "budgets")
    lines = [line.split() for line in text.splitlines()]
    assert status == 0
    assert [line[0] for line in lines] == ["BUDGET", "team", "team", "run"]
    status, text, _ = shell("--db", str(path), "budgets", "--json")
    found = json.loads(text)
    assert [(each["name"], each["usd"], each["spent_usd"]) for each in found] == [
        ("team", None, "0.1"), ("team", "1.5", "0.1"), (None, "0.5", "0.1"),
    ]  # fmt: skip
