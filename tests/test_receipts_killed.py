"""Money is moved once: SIGKILL around a request, timeouts and status endpoints that fail, judged by the receiver's own log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import twelve
from support.payments import WINDOW, Request, Service, service
from support.refunding import (
    AFTER_OUTCOME,
    BEFORE_OUTCOME,
    CASES,
    IN_RECEIPT,
    LATER,
    Case,
)
from support.twelve import Nursery
from support.wire import AFTER_REPLY, BEFORE_REPLY, BEFORE_REQUEST
from support.witness import Witness

pytestmark = pytest.mark.slow

SIGKILLED = -9
MOMENTS = [BEFORE_REQUEST, BEFORE_REPLY, AFTER_REPLY, BEFORE_OUTCOME, AFTER_OUTCOME]
WAYS_ON = [("agent", "run"), ("agent", "recover"), ("steps", "run"), ("steps", "resume")]
MUTATIONS = ("/keyed", "/unkeyed", "/quotes")
ASKS = [name for name, case in CASES.items() if case.in_doubt == "ask"]
PARKS = [name for name, case in CASES.items() if case.in_doubt == "park"]
LATE = [name for name, case in CASES.items() if case.is_late]
assert LATER > WINDOW


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with twelve.nursery("support.refunding") as process:
        yield process


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("payments")) as running:
        yield running


@pytest.fixture
def payments(started: Service, tmp_path: Path) -> Service:
    started.begin(tmp_path.name)
    return started


class Story:
    """The lives of one refund, from its first process to its last."""

    def __init__(self, nursery: Nursery, payments: Service, folder: Path, case: str, **order: Any) -> None:
        self._nursery = nursery
        # an event loop has a thread that writes and syncs; else what survives the process is enough, and quicker
        durability = "full" if order.get("is_async") else "process"
        folder.mkdir(exist_ok=True)
        self._order = {"durability": durability} | order | {"folder": str(folder), "port": payments.port, "case": case}
        self.payments = payments
        self.case = CASES[case]
        self.witness = Witness(folder / "witness")

    def live(self, **order: Any) -> int:
        """One more process. Returns how it ended."""
        return self._nursery.live(**self._order | order)

    def dies(self, moment: str, **order: Any) -> None:
        assert self.live(die=moment, **order) == SIGKILLED

    def time_passes(self) -> None:
        """Until the receiver has forgotten its keys, if that is the case."""
        if self.case.is_late:
            self.payments.advance(LATER)
            self._order["later"] = self._order.get("later", 0.0) + LATER

    def ends(self, **order: Any) -> dict[str, Any]:
        """One more process, which comes to its end; what it reports."""
        assert self.live(**order) == 0
        told: dict[str, Any] = self.witness.notes("after")[-1]
        assert told["findings"] == []
        return told

    def refunds(self) -> list[Request]:
        """The requests that were to move money, which must not be told apart."""
        came = self.payments.requests(*MUTATIONS)
        assert len({request.bytes for request in came}) <= 1, "another key or other bytes"
        assert all(request.key for request in came)
        assert self.payments.conflicts() == []
        return came

    def questions(self) -> list[Request]:
        """What the status endpoint was asked: always for the one key."""
        asked = self.payments.requests("/by-key/")
        assert len({request.bytes for request in asked}) <= 1
        return asked


def expect_the_model_was_not_asked_again(story: Story, ended: dict[str, Any], *, is_killed_twice: bool = False) -> None:
    """It was asked once for each answer that the ledger has, and would have chosen somebody else the next time.

    If `is_killed_twice`, the second process may have died while it asked what to do next, and then nobody has the answer.
    """
    asked = [request.body for request in story.payments.requests("/model")]
    if is_killed_twice and len(asked) == 3:
        assert asked[1] == asked.pop()
    assert asked[0] == b"whom?"
    assert len(asked) == len(set(asked)) <= 2
    for request in story.refunds():
        assert request.body == b'{"customer": "customer-1", "amount": 100}'
    if ended["status"] == "COMPLETED":
        assert ended["result"][0] == {"customer": "customer-1", "amount": 100}
        assert len(asked) == 2


def expect_it_stays_parked(story: Story, ended: dict[str, Any], **order: Any) -> None:
    """However often somebody tries: nothing is sent."""
    assert ended["status"] == "BLOCKED"
    assert ended["steps"][-1][:2] == ["refund", "BLOCKED"]
    came = len(story.payments.requests())
    for face, mode in ((order["face"], "run"), (order["face"], order["mode"])):
        again = story.ends(**order | {"face": face, "mode": mode})
        assert again["status"] == "BLOCKED"
        assert again["error"] == (None if mode == "recover" else "StepInDoubt")
    assert len(story.payments.requests()) == came


# --- killed around one request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("face", "mode"), WAYS_ON, ids=map("-".join, WAYS_ON))
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_a_refund_that_is_killed_around_its_request_is_settled_as_its_tool_declares(
    name: str, is_async: bool, face: str, mode: str, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face=face, is_async=is_async)
    story.dies(moment)
    was_sent = moment != BEFORE_REQUEST
    assert len(story.refunds()) == was_sent
    story.time_passes()
    ended = story.ends(mode=mode)
    expect_the_model_was_not_asked_again(story, ended)
    requests, resources, questions = expected(story.case, moment)
    assert (len(story.refunds()), len(payments.resources()), len(story.questions())) == (requests, resources, questions)
    if story.case.in_doubt == "park" and moment != AFTER_OUTCOME:
        expect_it_stays_parked(story, ended, face=face, mode=mode)
        return
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    if payments.resources():
        assert ended["result"][1] == {"refund": 1, "of": {"customer": "customer-1", "amount": 100}}
    assert ended["kinds"].count("asked") == ended["kinds"].count("answered") == questions


def expected(case: Case, moment: str) -> tuple[int, int, int]:
    """How many requests, resources and questions there are in the end, by the table of effects."""
    was_sent = int(moment != BEFORE_REQUEST)
    makes = int(case.path != "/quotes/today")
    if moment == AFTER_OUTCOME:
        return 1, makes, 0
    if case.in_doubt == "again":
        return was_sent + 1, makes, 0
    if case.in_doubt == "ask":
        return 1, 1, 1
    return was_sent, was_sent, 0


@pytest.mark.parametrize("moment", [BEFORE_REQUEST, BEFORE_REPLY, BEFORE_OUTCOME])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LATE])
def test_it_is_settled_too_where_every_further_process_is_killed_the_same_way_but_the_last(
    name: str, is_async: bool, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face="agent", is_async=is_async)
    story.dies(moment)
    for mode in ("run", "recover"):
        ended = story.live(mode=mode, die=moment)
        will_be_sent = story.case.in_doubt == "again" or (story.case.in_doubt == "ask" and moment == BEFORE_REQUEST)
        assert ended == (SIGKILLED if will_be_sent else 0)
    ended_well = story.ends(mode="run")
    expect_the_model_was_not_asked_again(story, ended_well)
    assert len(payments.resources()) <= 1
    assert ended_well["status"] == ("BLOCKED" if name in PARKS else "COMPLETED")


@pytest.mark.parametrize("moment", [BEFORE_REQUEST, BEFORE_REPLY])
@pytest.mark.parametrize(("is_async", "mode"), [(False, "run"), (True, "recover")], ids=["sync-run", "async-recover"])
@pytest.mark.parametrize("name", ["IDEMPOTENT", *ASKS])
def test_the_process_that_settles_it_may_be_killed_anywhere(
    name: str, is_async: bool, mode: str, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    order: dict[str, Any] = {"face": "agent", "is_async": is_async, "durability": "process"}
    undisturbed = Story(nursery, payments, tmp_path / "undisturbed", name, **order)
    undisturbed.dies(moment)
    undisturbed.time_passes()
    places = undisturbed.ends(mode=mode)["places"]
    for die_at in range(1, len(places) + 1):
        payments.begin(f"{payments.name}-{die_at}")
        story = Story(nursery, payments, tmp_path / str(die_at), name, **order)
        story.dies(moment)
        story.time_passes()
        assert story.live(mode=mode, die_at=die_at) == SIGKILLED
        try:
            ended = story.ends(mode=mode)
            expect_the_model_was_not_asked_again(story, ended, is_killed_twice=True)
            assert (ended["status"], ended["error"], len(payments.resources())) == ("COMPLETED", None, 1)
            assert len(story.refunds()) <= (1 if story.case.in_doubt == "ask" else 3)
        except AssertionError as error:
            error.add_note(f"killed at {die_at}, {places[die_at - 1]}")
            raise


# --- a live failure, and the agent's own second try -------------------------------------------------------------------

FAULTS = ["commit and hold", "commit and 504", "commit and close", "hold", "504", "close"]
PATIENCE_SECONDS = 0.2
"""How long the agent's client waits for an answer that never comes."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("face", ["agent", "steps"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LATE])
def test_an_agent_that_tries_again_after_an_ambiguous_failure_moves_no_money_twice(
    name: str, is_async: bool, face: str, fault: Any, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    order: dict[str, Any] = {"face": face, "is_async": is_async, "program": "stubborn", "patience": PATIENCE_SECONDS}
    story = Story(nursery, payments, tmp_path, name, **order)
    payments.fault(fault, story.case.path)
    ended = story.ends()
    if name == "READ":  # nothing to continue: a second look is a look of its own
        assert len({(request.path, request.body) for request in payments.requests("/quotes")}) == 1
        assert len(payments.requests("/quotes")) == 2
        return
    expect_the_model_was_not_asked_again(story, ended)
    was_made = fault.startswith("commit")
    if story.case.in_doubt == "park":
        assert ended["error"] == "StepInDoubt"
        assert (len(story.refunds()), len(payments.resources())) == (1, was_made)
        expect_it_stays_parked(story, ended, face=face, mode="run", program="stubborn")
        return
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    assert ended["result"][1] == {"refund": 1, "of": {"customer": "customer-1", "amount": 100}}
    assert len(payments.resources()) == 1
    if story.case.in_doubt == "ask":  # the step itself was settled, so the agent never heard of a failure
        assert (len(story.refunds()), len(story.questions())) == (1 if was_made else 2, 1)
        assert [tool for tool, *_ in ended["steps"]] == ["ask_model", "refund", "ask_model"]
    else:
        assert len(story.refunds()) == 2
        assert [tool for tool, *_ in ended["steps"]] == ["ask_model", "refund", "refund", "ask_model"]
        (_, _, first), (_, _, second) = ended["steps"][1:3]
        assert first == second, "the second try has another key"


@pytest.mark.parametrize("face", ["agent", "steps"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LATE])
def test_a_program_that_cancels_its_refund_and_tries_again_moves_no_money_twice(
    name: str, face: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face=face, is_async=True, program="impatient")
    payments.fault("commit and hold", story.case.path)
    ended = story.ends()
    if name == "READ":
        assert len(payments.requests("/quotes")) == 2
        return
    expect_the_model_was_not_asked_again(story, ended)
    assert len(payments.resources()) == 1
    if story.case.in_doubt == "park":
        assert ended["error"] == "StepInDoubt"
        assert len(story.refunds()) == 1
        return
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    assert ended["result"][1] == {"refund": 1, "of": {"customer": "customer-1", "amount": 100}}
    assert len(story.refunds()) == (1 if story.case.in_doubt == "ask" else 2)
    (_, _, first), (_, _, second) = ended["steps"][1:3]
    assert first == second, "the second try has another key"


@pytest.mark.parametrize("face", ["agent", "steps"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LATE])
def test_the_ledgers_own_timeout_and_a_second_try_move_no_money_twice(
    name: str, is_async: bool, face: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    order: dict[str, Any] = {"face": face, "is_async": is_async, "program": "stubborn", "options": {"timeout": 0.2}}
    story = Story(nursery, payments, tmp_path, name, **order)
    payments.fault("commit and hold", story.case.path)
    story.ends()
    payments.let_go()
    ended = story.ends()
    if name == "READ":
        assert len(payments.requests("/quotes")) == 2
        return
    expect_the_model_was_not_asked_again(story, ended)
    assert len(payments.resources()) == 1
    if story.case.in_doubt == "park":
        assert (ended["status"], ended["error"], len(story.refunds())) == ("BLOCKED", "StepInDoubt", 1)
        return
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    assert len(story.refunds()) <= (1 if story.case.in_doubt == "ask" else 3)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("mode", ["run", "recover"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["IDEMPOTENT", "undeclared"])
def test_the_second_try_may_be_killed_as_well(
    name: str, is_async: bool, mode: str, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face="agent", is_async=is_async, program="stubborn")
    payments.fault("commit and 504", story.case.path)
    # a request whose reply was an error has left its client all the same; its outcome is none of a refund that returned
    passes = 1 if moment in (BEFORE_OUTCOME, AFTER_OUTCOME) else 2
    story.dies(moment, die_again=passes)
    ended = story.ends(mode=mode)
    expect_the_model_was_not_asked_again(story, ended)
    assert (ended["status"], len(payments.resources())) == ("COMPLETED", 1)
    again = int(moment not in (BEFORE_REQUEST, AFTER_OUTCOME))
    assert len(story.refunds()) == 2 + again
    assert len({key for tool, _, key in ended["steps"] if tool == "refund"}) == 1


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_made", [True, False], ids=["made", "not made"])
def test_what_a_receipt_settles_after_a_failure_may_be_killed_as_well(
    is_made: bool, is_async: bool, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, "MUTATE with receipt", face="agent", is_async=is_async)
    payments.fault("commit and 504" if is_made else "504", "/unkeyed")
    if is_made:
        story.dies(IN_RECEIPT)
    else:
        story.dies(moment, die_again=1 if moment in (BEFORE_OUTCOME, AFTER_OUTCOME) else 2)
    ended = story.ends(mode="recover")
    expect_the_model_was_not_asked_again(story, ended)
    assert (ended["status"], len(payments.resources())) == ("COMPLETED", 1)
    assert len(story.refunds()) == (1 if is_made else 2)


# --- receipts that do not say -----------------------------------------------------------------------------------------

QUICK = {"retry": {"max_attempts": 4, "base": 0.001, "cap": 0.001}}
"""Asks four times and waits for next to nothing in between."""


@pytest.mark.parametrize(("moment", "receipt"), [(BEFORE_REQUEST, "told"), (BEFORE_REPLY, "raised")])
@pytest.mark.parametrize(("face", "mode"), WAYS_ON, ids=map("-".join, WAYS_ON))
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ASKS)
def test_a_status_endpoint_that_fails_first_is_asked_until_it_says(
    name: str,
    receipt: str,
    is_async: bool,
    face: str,
    mode: str,
    moment: str,
    nursery: Nursery,
    payments: Service,
    tmp_path: Path,
) -> None:
    story = Story(nursery, payments, tmp_path, name, face=face, is_async=is_async, receipt=receipt, options=QUICK)
    story.dies(moment)
    story.time_passes()
    payments.fault("504", "/by-key/", times=3)
    ended = story.ends(mode=mode)
    expect_the_model_was_not_asked_again(story, ended)
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    assert (len(story.refunds()), len(payments.resources()), len(story.questions())) == (1, 1, 4)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["run", "recover"])
@pytest.mark.parametrize("receipt", ["told", "raised", "garbled"])
def test_a_refund_nobody_can_be_asked_about_is_parked_and_the_next_process_asks_anew(
    receipt: str, mode: str, is_async: bool, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    order: dict[str, Any] = {"face": "agent", "is_async": is_async, "options": QUICK}
    story = Story(nursery, payments, tmp_path, "MUTATE with receipt", **order)
    story.dies(BEFORE_REPLY)
    payments.fault("504", "/by-key/", times=1_000)
    for life in (1, 2):
        ended = story.ends(mode=mode, receipt=receipt)
        assert ended["status"] == "BLOCKED"
        assert ended["error"] == (None if mode == "recover" else "StepInDoubt")
        assert len(story.questions()) == 4 * life
        assert len(story.refunds()) == 1
    payments.mend()
    ended = story.ends(mode=mode)
    expect_the_model_was_not_asked_again(story, ended)
    assert (ended["status"], len(payments.resources()), len(story.questions())) == ("COMPLETED", 1, 9)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["run", "recover"])
def test_a_question_that_is_never_answered_is_given_up_after_the_timeout(
    mode: str, is_async: bool, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    options = QUICK | {"timeout": 0.1}
    story = Story(nursery, payments, tmp_path, "MUTATE with receipt", face="agent", is_async=is_async, options=options)
    story.dies(BEFORE_REPLY)
    payments.fault("hold", "/by-key/", times=2)
    ended = story.ends(mode=mode)
    payments.let_go()
    assert (ended["status"], ended["error"]) == ("COMPLETED", None)
    assert (len(story.refunds()), len(payments.resources()), len(story.questions())) == (1, 1, 3)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["run", "recover"])
def test_a_question_that_kills_its_process_is_asked_as_often_as_a_step_is_tried_and_no_more(
    mode: str, is_async: bool, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, "MUTATE with receipt", face="agent", is_async=is_async, options=QUICK)
    story.dies(BEFORE_REPLY)
    for _ in range(4):
        story.dies(IN_RECEIPT, mode=mode)
    ended = story.ends(mode=mode, die=IN_RECEIPT)
    assert ended["status"] == "BLOCKED"
    assert ended["kinds"].count("asked") == 4
    assert ended["kinds"].count("answered") == 0
    assert (len(story.refunds()), len(story.questions())) == (1, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_processes_that_die_of_questions_do_not_count_once_one_was_answered(
    is_async: bool, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, "MUTATE with receipt", face="agent", is_async=is_async, options=QUICK)
    story.dies(BEFORE_REPLY)
    for _ in range(3):
        story.dies(IN_RECEIPT)
    assert story.ends()["status"] == "COMPLETED"
    assert (len(story.refunds()), len(payments.resources())) == (1, 1)


# --- a model that is not recorded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [BEFORE_REQUEST, BEFORE_REPLY])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_asked_behind_the_ledgers_back_sends_nothing_of_what_it_would_choose_now(
    name: str, is_async: bool, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face="steps", is_async=is_async, program="unrecorded")
    story.dies(moment)
    story.time_passes()
    ended = story.ends()
    assert (ended["status"], ended["error"]) == ("BLOCKED", "IntentDrift")
    assert '{"amount":100,"customer":"customer-1"}' in ended["text"], "what is stored is what may be sent"
    assert len(story.refunds()) == int(moment != BEFORE_REQUEST)
    assert story.questions() == []


@pytest.mark.parametrize("moment", [BEFORE_REQUEST, BEFORE_REPLY])
@pytest.mark.parametrize("mode", ["run", "recover"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_what_such_a_model_chose_first_is_settled_before_its_agent_is_asked_again(
    name: str, is_async: bool, mode: str, moment: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, name, face="agent", is_async=is_async, program="unrecorded")
    story.dies(moment)
    story.time_passes()
    for _ in range(2):
        ended = story.ends(mode=mode)
        requests, resources, questions = expected(story.case, moment)
        error = "StepInDoubt" if story.case.in_doubt == "park" else "ReplayDivergence"
        if name == "READ":  # is left to the agent, which asks for something else now: that is not sent
            requests, error = int(moment != BEFORE_REQUEST), "IntentDrift"
        assert len(story.refunds()) == requests
        assert (len(payments.resources()), len(story.questions())) == (resources, questions)
        assert all(request.body == b'{"customer": "customer-1", "amount": 100}' for request in story.refunds())
        assert ended["status"] == "BLOCKED"
        assert ended["error"] == (None if mode == "recover" else error)


@pytest.mark.parametrize(("first", "second"), list(itertools.product([BEFORE_REQUEST, BEFORE_REPLY], repeat=2)))
def test_the_model_itself_is_asked_again_where_its_answer_was_not_recorded(
    first: str, second: str, nursery: Nursery, payments: Service, tmp_path: Path
) -> None:
    story = Story(nursery, payments, tmp_path, "IDEMPOTENT", face="agent")
    for moment, mode in ((first, "run"), (second, "recover")):
        story.dies(f"model, {moment}", mode=mode)
    ended = story.ends(mode="recover")
    prompts = [request for request in payments.requests("/model") if request.body == b"whom?"]
    assert len({request.bytes for request in prompts}) == 1
    assert len(prompts) == 1 + (first == BEFORE_REPLY) + (second == BEFORE_REPLY)
    assert (ended["status"], len(story.refunds())) == ("COMPLETED", 1)
