"""The breaker's eye: which runs of calls are loops, which only look like some, and what is remembered to tell."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_run_ledger import AgentRunLedger, Effect, LoopDetectorPolicy, RetryPolicy, RunawayLoopDetectedException
from agent_run_ledger.rules.loops import answered, looked_at, wording
from agent_run_ledger.rules.loops.breaker import Breaker
from agent_run_ledger.rules.loops.calls import LOOKED_AT, Asked, Call
from agent_run_ledger.rules.loops.policy import Detector
from agent_run_ledger.rules.loops.signs import LONGEST_PERIOD, TURNS, WINDOW
from agent_run_ledger.testing import FakeClock
from agent_run_ledger.words import Verdict
from support.looping import LOOPS, ROUTE, STUBBORN, WORDS, Kind, Step, act, hexes, text


def verdicts(steps: Sequence[Step], policy: LoopDetectorPolicy | None = None) -> list[Verdict]:
    detector = (policy or LoopDetectorPolicy()).detector()
    return [detector.observe(*step) for step in steps]


def tripped(steps: Sequence[Step], policy: LoopDetectorPolicy | None = None) -> int | None:
    """The number of the first step after which a verdict is not ok."""
    return next((number for number, said in enumerate(verdicts(steps, policy), 1) if said.level != "ok"), None)


# --- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOOPS, ids=[kind.name for kind in LOOPS])
@pytest.mark.parametrize("seed", range(5))
def test_a_loop_is_seen(kind: Kind, seed: int) -> None:
    draw = random.Random(seed)
    before = [Step("start", {"n": number}, f"{text(draw)} {number}") for number in range(seed)]
    steps = before + [kind.make(draw, at) for at in range(30)]
    number = tripped(steps)
    assert number is not None
    assert seed < number <= seed + kind.by
    said = verdicts(steps)[number - 1]
    assert said.reason
    assert said.rule
    assert 1 < len(said.evidence) <= said.evidence[-1] <= number


def test_the_verdict_says_how_sure_it_is() -> None:
    draw = random.Random(1)
    sure = {kind.name: verdicts([kind.make(draw, at) for at in range(kind.by)])[-1] for kind in LOOPS}
    assert (sure["one call"].level, sure["one call"].rule) == ("certain", "identical_calls")
    assert (sure["two in turn"].level, sure["two in turn"].rule) == ("certain", "cycle")
    assert (sure["a request id"].level, sure["a request id"].rule) == ("suspected", "repetition")
    assert (sure["an error that echoes"].level, sure["an error that echoes"].rule) == ("suspected", "similar_inputs")
    assert (sure["one error of several tools"].level, sure["one error of several tools"].rule) == (
        "suspected",
        "same_error",
    )
    assert (sure["a growing text"].level, sure["a growing text"].rule) == ("suspected", "same_answer")


# --- what only looks like one -----------------------------------------------------------------------------------------

HEALTHY: dict[str, Callable[[random.Random], Iterator[Step]]] = {
    "pages": lambda draw: (Step("list", {"of": "boats", "offset": 20 * at}, text(draw)) for at in range(30)),
    "one after the other": lambda draw: (
        Step("boat", {"boat_id": f"B{at}"}, {"boat_id": f"B{at}", "state": "moored"}) for at in range(30)
    ),
    "the same state of each": lambda draw: (
        Step("in_stock", {"item": f"rope-{at}"}, {"in_stock": True}) for at in range(30)
    ),
    "nothing in any of them": lambda draw: (Step("search", {"path": f"src/{word}.txt"}, []) for word in WORDS),
    "the same number of each": lambda draw: (Step("count", {"path": f"src/{word}.txt"}, 0) for word in WORDS),
    "acknowledged": lambda draw: (
        Step("label", {"boat": at}, draw.choice(["OK", None, "", {"status": "ok"}])) for at in range(30)
    ),
    "acknowledged in a sentence": lambda draw: (
        Step("remove", {"letter_id": str(at)}, f"Letter with id {at} removed successfully.") for at in range(30)
    ),
    "polled, and it moves": lambda draw: (
        Step("job", {"id": 7}, {"state": "running", "percent": at}) for at in range(30)
    ),
    "polled, and it is declared": lambda draw: (
        Step("job", {"id": 7}, {"state": "running"}, may_repeat=True) for at in range(30)
    ),
    "keys that are pressed": lambda draw: (
        Step("press", {"key": "down"}, {"screen": text(draw)}, write=True) for at in range(30)
    ),
    "the next of a queue": lambda draw: (Step("take", {}, {"job_id": at}) for at in range(30)),
    "what is read has new ids": lambda draw: (
        Step("latest", {"box": "in"}, {"letter_id": at, "from": "Wells", "about": "tides"}, write=False)
        for at in range(30)
    ),
    "tested between edits": lambda draw: (
        step
        for at in range(15)
        for step in (
            Step("edit", {"path": "tide.py", "patch": text(draw)}, "OK"),
            Step("test", {}, "1 failed, 20 passed"),
        )
    ),
    "tested and linted between edits": lambda draw: (
        step
        for at in range(10)
        for step in (
            Step("edit", {"path": "tide.py", "patch": text(draw)}, ""),
            Step("test", {}, "1 failed, 20 passed"),
            Step("lint", {}, "2 findings in tide.py"),
        )
    ),
    "one call fails twice": lambda draw: iter(
        [Step("berth", {"pier": 4}, None, STUBBORN)] * 2 + [Step("berth", {"pier": 4}, "free")]
    ),
    "a busy server": lambda draw: (
        Step("boat", {"boat": at}, None, "HTTP 503: Service Unavailable")
        if at % 8
        else Step("boat", {"boat": at}, f"moored at {at}")
        for at in range(40)
    ),
    "three spellings of a date": lambda draw: iter(
        [
            Step(
                "plan", {"what": "tide", "where": "Wells", "when": when}, None, "ValueError: when has the wrong format"
            )
            for when in ("2031-05-04 10:00:00", "2031-05-04T10:00:00", "2031-05-04T10:00:00Z")
        ]
        + [Step("plan", {"what": "tide", "where": "Wells", "when": "2031-05-04 10:00"}, {"id": 4})]
    ),
    "empty, empty, found": lambda draw: iter(
        [Step("find", {"query": query}, "[]") for query in ROUTE[:3]]
        + [Step("find", {"query": "boats"}, ["Anna", "Berta"])]
    ),
    "polled between equal calls": lambda draw: (
        step
        for at in range(30)
        for step in (
            Step("look", {}, "a grey door"),
            Step("job", {}, None, f"ValueError: not yet {at}", may_repeat=True),
        )
    ),
    "the next document in the same prompt": lambda draw: (
        Step("classify", {"prompt": f"{' '.join(WORDS * 6)}: {' '.join(hexes(draw) for _ in range(12))}"}, "positive")
        for _ in range(30)
    ),
    "new errors": lambda draw: (
        Step("run", {"code": text(draw)}, None, f"NameError: {text(draw, 4)}") for at in range(30)
    ),
    "looked at again after a change": lambda draw: (
        step
        for at in range(10)
        for step in (
            Step("write", {"path": "log.txt", "text": text(draw)}, None),
            Step("read", {"path": "notes.txt"}, "rope, tar, oil"),
        )
    ),
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("seed", range(5))
def test_what_only_looks_like_a_loop_is_none(kind: str, seed: int) -> None:
    assert tripped(list(HEALTHY[kind](random.Random(seed)))) is None


# --- limits and settings ----------------------------------------------------------------------------------------------


@given(
    st.integers(1, 60),
    st.sampled_from(["free", "", None, {"id": 4}]),
    st.sampled_from([None, "TimeoutError: late", "KeyError: 'x'"]),
)
def test_identical_calls_are_never_halted_before_the_limit_and_always_at_it(
    limit: int, result: Any, error: str | None
) -> None:
    policy = LoopDetectorPolicy(max_repetitions=limit)
    said = verdicts([Step("berth", {"pier": 4}, result, error)] * limit, policy)
    assert {each.level for each in said[:-1]} <= {"ok"}
    assert (said[-1].level, said[-1].rule, said[-1].evidence) == (
        "certain",
        "identical_calls",
        tuple(range(1, limit + 1)),
    )


@given(st.integers(2, LONGEST_PERIOD), st.integers(2, 100), st.integers(0, 40))
def test_a_cycle_is_certain_after_its_third_turn(period: int, limit: int, before: int) -> None:
    steps = [Step("start", {"n": at}, f"new {at}") for at in range(before)]
    steps += [Step("room", {"n": at % period}, f"a room with {at % period} doors") for at in range(TURNS * period)]
    last = verdicts(steps, LoopDetectorPolicy(max_repetitions=limit))[-1]
    assert (last.level, last.rule) == ("certain", "cycle")
    assert last.evidence == tuple(range(before + 1, before + TURNS * period + 1))


def test_what_fails_for_a_while_is_given_twice_the_time() -> None:
    def failing(error: str) -> int | None:
        return tripped([Step("boat", {"boat": f"B{at}"}, None, error) for at in range(20)])

    assert failing("KeyError: 'tide'") == 5
    assert failing("HTTP 429: too many requests") == failing("TimeoutError: no answer in 30 s") == 9


def test_more_repetitions_are_more_patience_in_every_rule_of_rows() -> None:
    patient = LoopDetectorPolicy(max_repetitions=6)
    for kind in LOOPS:
        draw = random.Random(3)
        steps = [kind.make(draw, at) for at in range(40)]
        usual, late = tripped(steps), tripped(steps, patient)
        assert usual is not None
        assert late is not None
        assert late >= usual, kind.name


def test_the_threshold_says_from_where_on_inputs_are_alike() -> None:
    long = " ".join(WORDS)
    steps = [Step("score", {"text": long, "by": word}, "3 of 5, but too long") for word in WORDS[:8]]
    assert verdicts(steps)[4].rule == "similar_inputs"
    assert tripped(steps, LoopDetectorPolicy(threshold=0.999)) is None


def test_an_embedder_says_how_alike_inputs_are() -> None:
    asked: list[str] = []

    def embed(text: str) -> Sequence[float]:
        asked.append(text)
        return [1.0, float("tide" in text)]

    steps = [Step("ask", {"q": f"{word} tide"}, "who knows: it is all the same") for word in WORDS[:8]]
    assert tripped(steps) is None
    assert tripped(steps, LoopDetectorPolicy(embedder=embed)) == 5
    assert '{"q":"basin tide"}' in asked


@pytest.mark.parametrize(
    "embedder",
    [lambda text: [1.0] * len(text), lambda text: None, lambda text: text, lambda text: 1 / 0],
    ids=["other lengths", "nothing", "a text", "raises"],
)
def test_where_an_embedder_fails_words_are_counted_and_that_is_said(
    embedder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [
        Step("ask", {"q": f"when does the ferry to {word} leave"}, "at noon")
        for word in ("a", "bc", "def", "ghij", "klmno", "p")
    ]
    assert tripped(steps, LoopDetectorPolicy(embedder=embedder, threshold=0.5)) == tripped(
        steps, LoopDetectorPolicy(threshold=0.5)
    )
    assert "words are counted instead" in caplog.text


def test_an_embedder_is_a_function() -> None:
    with pytest.raises(ValueError, match="embedder is a function"):
        LoopDetectorPolicy(embedder=5)  # type: ignore[arg-type]


# --- what goes on with a loop -----------------------------------------------------------------------------------------


def looping(kind: str) -> Detector:
    """A detector that has just seen this loop."""
    (found,) = [each for each in LOOPS if each.name == kind]
    detector, draw = LoopDetectorPolicy().detector(), random.Random(1)
    for at in range(found.by):
        said = detector.observe(*found.make(draw, at))
    assert said.level != "ok"
    return detector


def test_only_a_call_that_goes_on_with_the_loop_is_refused() -> None:
    for kind, goes_on, leaves in [
        ("one call", ("berth", {"pier": 4}), ("berth", {"pier": 5})),
        ("one call", ("berth", {"pier": 4}), ("quay", {"pier": 4})),
        ("a request id", ("berth", {"pier": 4, "request_id": "x"}), ("berth", {"pier": 5, "request_id": "x"})),
        ("two in turn", ("look", {}), ("pull", {"what": "door"})),
        ("two in turn", ("push", {"what": "door"}), ("push", {"what": "window"})),
        ("other words, no answer", ("find", {"query": "find the ferry please"}), ("find", {"query": "boats"})),
        ("an error that echoes", ("ledger", {"sql": "select name from boats where harbour = 'Wells' and tide > 3 order by c9"}),
         ("ledger", {"sql": "show columns of boats"})),
        ("one error, other arguments", ("register", {"any": "thing"}), ("harbour master", {"any": "thing"})),
    ]:  # fmt: skip
        detector = looping(kind)
        assert detector.continues(*goes_on), (kind, goes_on)
        assert not detector.continues(*leaves), (kind, leaves)


def test_nothing_goes_on_where_nothing_is_suspected() -> None:
    detector = LoopDetectorPolicy().detector()
    assert not detector.continues("berth", {"pier": 4})
    detector.observe("berth", {"pier": 4}, "free")
    assert not detector.continues("berth", {"pier": 4})


def test_a_call_that_leaves_the_loop_ends_the_verdict() -> None:
    detector = looping("one call")
    assert detector.observe("harbour master", {}, "he is in").level == "ok"
    assert not detector.continues("berth", {"pier": 4})


def test_nor_does_one_where_a_single_call_is_enough() -> None:
    detector = LoopDetectorPolicy(max_repetitions=1).detector()
    assert detector.observe("berth", {"pier": 4}, error="KeyError: 4").level == "certain"
    assert detector.observe("think", {"thought": "once more"}, "").level == "certain"
    assert detector.continues("berth", {"pier": 4})


def test_a_thought_ends_no_verdict() -> None:
    detector = looping("one call")
    assert detector.observe("think", {"thought": "once more"}, "").level == "certain"
    assert detector.continues("berth", {"pier": 4})


# --- memory -----------------------------------------------------------------------------------------------------------

some_steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["find", "boat"]),
        st.sampled_from([{"q": "the ferry"}, {"q": "the ferry now"}, {"q": "a boat"}, {"thought": "hm"}]),
        st.sampled_from(["", "OK", [], {"id": 1, "of": "x"}, {"id": 2, "of": "x"}]),
        st.sampled_from([None, None, "KeyError: 'a'", "HTTP 503"]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([None, True, False]),
    ),
    max_size=60,
)


@given(some_steps, st.integers(0, 60))
def test_what_is_remembered_is_the_window_and_nothing_before_it(steps: list[Step], begin: int) -> None:
    """Whoever has seen only the last calls says the same as whoever has seen all, once as many have passed as are remembered."""
    repeated = steps * (1 + 4 * WINDOW // max(1, len(steps))) if steps else []
    begin = min(begin, max(0, len(repeated) - 3 * WINDOW))
    whole, part = verdicts(repeated), verdicts(repeated[begin:])
    same = [(each.level, each.rule) for each in whole[begin:]][3 * WINDOW :]
    assert same == [(each.level, each.rule) for each in part][3 * WINDOW :]


@given(some_steps)
def test_the_same_calls_give_the_same_verdicts(steps: list[Step]) -> None:
    assert verdicts(steps) == verdicts(steps)


some_loops = st.lists(
    st.tuples(st.sampled_from(LOOPS), st.integers(0, 20), st.integers(1, 14), st.booleans()), min_size=1, max_size=5
)


@settings(max_examples=400)
@given(some_loops, some_steps, st.sampled_from([1, 2, 3, 5]))
def test_a_sign_that_rests_misses_nothing(
    loops: list[tuple[Kind, int, int, bool]], steps: list[Step], limit: int
) -> None:
    """Signs are not asked about calls of which they can say nothing: that is no other breaker than one that asks them every time."""
    for kind, seed, length, is_first in loops:
        draw = random.Random(seed)
        more = [kind.make(draw, at) for at in range(length)]
        steps = more + steps if is_first else steps + more
    policy = LoopDetectorPolicy(max_repetitions=limit)
    resting, restless = policy.rule(), policy.rule()
    assert isinstance(restless, Breaker)
    one, other = Detector(resting), Detector(restless)
    for step in steps:
        said = one.observe(*step)
        restless._rests = 0
        assert said == other.observe(*step)
        assert one.continues(step.tool, step.arguments) == other.continues(step.tool, step.arguments)


def test_memory_does_not_grow_with_the_run() -> None:
    rule = LoopDetectorPolicy().rule()

    def size() -> int:
        seen, waiting, total = set(), [rule], 0
        while waiting:
            each: Any = waiting.pop()
            if id(each) in seen or isinstance(each, type):
                continue
            seen.add(id(each))
            total += sys.getsizeof(each)
            if isinstance(each, dict):
                waiting += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple | set):
                waiting += each
            elif hasattr(each, "__dict__"):
                waiting.append(vars(each))
            for cls in type(each).__mro__:
                waiting += [getattr(each, name) for name in getattr(cls, "__slots__", ()) if hasattr(each, name)]
        return total

    draw = random.Random(5)
    sizes = []
    for number in range(1, 2001):
        asked, told = f'{{"q":"{text(draw, 30)}"}}', text(draw, 300)
        rule.observe(Call(number, "find", f"{number}", f"{number}", asked, told))
        if number in (200, 2000):
            sizes.append(size())
    assert sizes[1] < 1.2 * sizes[0] < 2_000_000


def test_a_value_that_is_too_long_is_equal_or_not_and_is_not_looked_at() -> None:
    assert looked_at(b'"' + b"x" * (LOOKED_AT - 2) + b'"') is not None
    assert looked_at(b'"' + b"x" * LOOKED_AT + b'"') is None
    assert looked_at(None) is None
    assert answered(b'"a\\nb"', is_error=False) == "a\nb"
    assert answered(b'{"a":1}', is_error=False) == '{"a":1}'
    assert answered(b'{"type":"KeyError","message":"x"}', is_error=True) == "KeyError: x"
    for damaged in (b"\xff", b'"\xff"', b'"', b"[]"):
        assert answered(damaged, is_error=True) is None
        assert looked_at(b"\xff") is None is answered(b"\xff", is_error=False)
    assert wording.fields("{") == {"": ("{", frozenset({"{"}))}
    long = [Step("read", {"text": "x " * LOOKED_AT, "request_id": str(at)}, "y " * LOOKED_AT) for at in range(20)]
    assert tripped(long) is None
    assert tripped([long[0]] * 3) == 3


def test_another_attempt_of_a_step_takes_the_place_of_the_one_before() -> None:
    rule = LoopDetectorPolicy().rule()
    for number in (1, 2, 2, 2):
        assert rule.observe(Call(number, "berth", "4", "full")).level == "ok"
    assert rule.observe(Call(3, "berth", "4", "full")).evidence == (1, 2, 3)
    assert rule.observe(Call(3, "berth", "4", "free")).level == "ok"


def test_a_model_that_is_asked_between_the_steps_breaks_no_row() -> None:
    rule = LoopDetectorPolicy().rule()
    for number in range(1, 6):
        if number % 2:
            said = rule.observe(Call(number, "berth", "4", "full"))
        else:
            rule.observe(Call(number, "model", f"{number}", f"{number}", is_thought=True))
    assert (said.rule, said.evidence) == ("identical_calls", (1, 3, 5))


# --- names and words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["request_id", "x-request-id", "requestId", "traceId", "created_at", "createdAt", "ts", "elapsed_ms", "nonce"],
)
def test_some_names_are_of_what_differs_every_time(name: str) -> None:
    assert wording.is_volatile(name)


@pytest.mark.parametrize(
    "name", ["order_id", "id", "date", "checksum", "progress", "offset", "page", "status", "format", "chat", "data"]
)
def test_all_other_names_are_of_what_matters(name: str) -> None:
    assert not wording.is_volatile(name)


def test_values_are_never_looked_at_to_say_what_is_volatile() -> None:
    sums = [Step("sum", {"path": "a.tar"}, f"checksum: {hexes(random.Random(at))} of a.tar") for at in range(20)]
    assert tripped(sums) is None


@pytest.mark.parametrize(
    "answer", ["", "None", "OK", "ok.", '{"status": "ok"}', "{'success': True}", "Done", "You have clicked king."]
)
def test_an_acknowledgement_tells_nothing(answer: str) -> None:
    assert wording.is_bare(answer, '{"element":"king"}')


@pytest.mark.parametrize(
    "answer", ["[]", "{}", "No results found.", "pending", "3", "failed", "Draft rejected", "I am unable to do this"]
)
def test_an_answer_that_tells_something_is_none(answer: str) -> None:
    assert not wording.is_bare(answer, '{"element":"king"}')


def test_a_question_in_other_words_is_no_question_for_the_next_one() -> None:
    def asked(value: object) -> Asked:
        return Asked("t", str(value), json.dumps({"of": value, "limit": 20}))

    assert asked("The ferry to Wells").rewords(asked('"the ferry"'))
    assert not asked("B-17").rewords(asked("B-18"))
    assert not asked(17).rewords(asked(18))
    assert not asked("src/tide/a.py").rewords(asked("src/tide/b.py"))
    assert not Asked("t", "1", None).rewords(asked(18))


# --- in a ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOOPS, ids=[kind.name for kind in LOOPS])
def test_a_run_that_is_read_again_halts_at_the_same_step(kind: Kind, tmp_path: Any) -> None:
    """A fresh process at every step, against a ledger that was open all the time, against a detector without a ledger."""
    draw = random.Random(2)
    steps = [kind.make(draw, at) for at in range(24)]

    def play(name: str, *, again: bool) -> tuple[int, str, tuple[int, ...]]:
        ledger = AgentRunLedger(tmp_path / f"{name}.db", durability="process")
        ledger.create_run("loop", run_id="run")
        try:
            for number, step in enumerate(steps, 1):
                if again:
                    ledger.close()
                    ledger = AgentRunLedger(tmp_path / f"{name}.db", durability="process")
                    ledger.resume_run("run")
                effect = Effect.MUTATE if step.write else Effect.READ if step.error else None
                try:
                    ledger.execute_step(
                        "run", step.tool, step.arguments, lambda *_, step=step, **__: act(step), effect=effect
                    )
                except RunawayLoopDetectedException as halted:
                    return number, halted.rule, halted.evidence
                except Exception as failed:
                    if step.error is None or step.error.partition(": ")[2] not in str(failed):
                        raise
        finally:
            ledger.close()
        raise AssertionError("it was not halted")

    halted = play("open", again=False)
    assert halted == play("again", again=True)
    assert halted[0] <= kind.by + 3


def test_the_calls_of_a_model_between_the_steps_of_a_run_break_no_row(tmp_path: Any) -> None:
    def turns(ledger: AgentRunLedger) -> None:
        for turn in range(9):
            ledger.execute_step("run", "ask", {"turn": turn}, lambda turn: f"try once more: {turn}", kind="model")
            ledger.execute_step("run", "berth", {"pier": 4}, lambda pier: "full", effect=Effect.READ)

    with AgentRunLedger(tmp_path / "runs.db") as ledger:
        ledger.create_run("moor", run_id="run")
        with pytest.raises(RunawayLoopDetectedException) as halted:
            turns(ledger)
    assert (halted.value.rule, halted.value.evidence) == ("identical_calls", (2, 4, 6))


def test_arguments_of_a_step_that_was_tried_again_are_looked_at_when_the_run_is_read_again(tmp_path: Any) -> None:
    clock, policy = FakeClock(), RetryPolicy(max_attempts=3)
    failed: set[str] = set()

    def score(text: str, aspect: str) -> str:
        if aspect not in failed:
            failed.add(aspect)
            raise ConnectionError("gone")
        return "too long to be scored"

    with AgentRunLedger(tmp_path / "runs.db", clock=clock, heartbeat_seconds=29.0) as ledger:
        ledger.create_run("score", run_id="run")
        for aspect in WORDS[:5]:
            given = {"text": " ".join(WORDS * 8), "aspect": aspect}
            ledger.execute_step("run", "score", given, score, effect=Effect.READ, retry=policy)
        assert {record.attempts for record in ledger.steps("run")} == {2}
    with AgentRunLedger(tmp_path / "runs.db", clock=clock, heartbeat_seconds=29.0) as ledger:
        ledger.resume_run("run")
        with pytest.raises(RunawayLoopDetectedException, match="nearly the same arguments"):
            ledger.execute_step("run", "score", given | {"aspect": WORDS[6]}, score, effect=Effect.READ)


@pytest.mark.parametrize(
    ("name", "volatile"),
    [
        ("requestId", True),
        ("createdAt", True),
        ("request_id", True),
        ("modelId", False),
        ("Id", False),
        ("At", False),
        ("", False),
    ],
)
def test_names_in_camel_case_are_read_as_others_are(name: str, volatile: bool) -> None:
    assert wording.is_volatile(name) is volatile
    detector = LoopDetectorPolicy().detector()
    levels = [detector.observe("look", {name: number}, "the same").level for number in range(3)]
    assert levels[:2] == ["ok", "ok"]
    assert levels[2] == "suspected" or not volatile
