"""The small rules: waits, budgets, loops, names, digests, and what a function tells about itself."""

from __future__ import annotations

import doctest
import functools
import inspect
import keyword
import re
import subprocess
import sys
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import InvalidArguments, InvalidName, LoopDetectorPolicy, RetryPolicy, compute_fingerprint
from agent_run_ledger.rules import budget, digests, functions, names
from agent_run_ledger.rules.backoff import delay
from agent_run_ledger.rules.names import check_name, sanitize_identifier
from support.ledgers import HOSTILE
from support.processes import environment

draws = st.floats(0, 1, exclude_max=True)
seconds = st.floats(0, 1e6)


# --- backoff ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), seconds, seconds, draws)
def test_full_jitter_waits_between_nothing_and_the_capped_exponential(
    retry: int, base: float, cap: float, draw: float
) -> None:
    policy = RetryPolicy(base=base, cap=cap)
    ceiling = min(cap, base * 2**retry) if retry < 500 else (cap if base else 0.0)
    assert delay(retry, policy, draw) == pytest.approx(draw * ceiling)
    assert 0 <= delay(retry, policy, draw) <= cap


def test_full_jitter_does_not_pile_up_at_the_cap() -> None:
    policy = RetryPolicy(base=1.0, cap=10.0)
    assert [delay(9, policy, draw) for draw in (0.0, 0.25, 0.5)] == [0.0, 2.5, 5.0]


def test_the_default_policy_waits_half_a_second_at_most_at_first_and_half_a_minute_at_last() -> None:
    policy = RetryPolicy()
    assert policy.max_attempts == 4
    assert [delay(retry, policy, 1.0) for retry in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


@given(seconds, seconds, st.floats(0, 1e6), draws)
def test_decorrelated_jitter_is_drawn_between_base_and_three_times_the_wait_before(
    base: float, cap: float, previous: float, draw: float
) -> None:
    wait = delay(3, RetryPolicy(base=base, cap=cap, jitter="decorrelated"), draw, previous)
    assert wait == pytest.approx(min(cap, base + draw * (max(base, 3 * previous) - base)))
    assert 0 <= wait <= cap


@pytest.mark.parametrize(
    "wrong",
    [{"max_attempts": 0}, {"base": -1.0}, {"cap": -0.1}, {"jitter": "none"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_retry_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="RetryPolicy"):
        RetryPolicy(**wrong)


# --- budget -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100), st.integers(0, 120), st.integers(0, 120), st.integers(0, 3000))
def test_a_budget_is_spent_by_steps_and_refusals_and_at_last_by_entries(
    limit: int, steps: int, refused: int, entries: int
) -> None:
    assert (budget.steps_spent(limit, steps, refused) is not None) == (steps + refused >= limit)
    assert (budget.entries_spent(limit, entries) is not None) == (entries >= 20 * limit)


# --- loops ------------------------------------------------------------------------------------------------------------

calls = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2]), st.sampled_from("xy")), max_size=30)


@given(calls, st.integers(1, 4))
def test_a_loop_is_certain_exactly_when_the_last_n_calls_and_outcomes_are_equal(
    made: list[tuple[str, int, str]], limit: int
) -> None:
    detector = LoopDetectorPolicy(max_repetitions=limit).detector()
    for number, (tool, argument, outcome) in enumerate(made, 1):
        verdict = detector.observe(tool, {"n": argument}, outcome)
        last = made[max(0, number - limit) : number]
        if len(last) == limit and len(set(last)) == 1:
            assert (verdict.level, verdict.rule) == ("certain", "identical_calls")
            assert verdict.evidence == tuple(range(number - limit + 1, number + 1))
            assert tool in verdict.reason
        else:
            assert verdict.rule != "identical_calls"


def test_equal_calls_whose_errors_are_equal_are_a_loop_and_whose_errors_differ_are_none() -> None:
    detector = LoopDetectorPolicy(max_repetitions=2).detector()
    assert detector.observe("t", {}, error=TimeoutError("slow")).level == "ok"
    assert detector.observe("t", {}, error=TimeoutError("slower")).level == "ok"
    assert detector.observe("t", {}, error="TimeoutError: slower").level == "certain"


def test_an_error_and_an_output_of_equal_text_are_different_outcomes() -> None:
    detector = LoopDetectorPolicy(max_repetitions=2).detector()
    detector.observe("t", {}, result="ValueError: x")
    assert detector.observe("t", {}, error="ValueError: x").level == "ok"


def test_the_order_of_keys_makes_no_other_call() -> None:
    detector = LoopDetectorPolicy(max_repetitions=2).detector()
    detector.observe("t", {"a": 1, "b": 2}, {"x": 1, "y": 2})
    assert detector.observe("t", {"b": 2, "a": 1}, {"y": 2, "x": 1}).level == "certain"


def test_calls_that_may_repeat_are_never_a_loop() -> None:
    detector = LoopDetectorPolicy(max_repetitions=2).detector()
    assert {detector.observe("poll", {}, "pending", may_repeat=True).level for _ in range(10)} == {"ok"}


@pytest.mark.parametrize(
    "wrong", [{"max_repetitions": 0}, {"max_repetitions": 1.5}, {"threshold": -0.1}, {"threshold": 1.1}]
)
def test_a_loop_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoopDetectorPolicy(**wrong)


# --- names ------------------------------------------------------------------------------------------------------------


@given(
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=80).filter(lambda text: text.strip())
)
def test_any_text_without_control_characters_is_a_name_and_stays_as_it_is(name: str) -> None:
    if len(name.encode()) <= 255:
        assert check_name("run_id", name) == name
    else:
        with pytest.raises(InvalidName, match="at most 255"):
            check_name("run_id", name)


@pytest.mark.parametrize("sample", [sample for name, sample in HOSTILE.items() if name != "ELF"])
def test_a_hostile_name_is_a_name(sample: str) -> None:
    assert check_name("tool_name", sample) == sample


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        " ",
        "\t\n",
        "\u2003\u00a0",
        "a\x00b",
        "a\nb",
        "\x7f",
        "a\x85b",
        "\x9f",
        "\x1b[31m",
        HOSTILE["ELF"],
        "\ud800",
        "ab\udfff",
    ],
)
def test_empty_names_and_names_with_control_characters_or_surrogates_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidName, match="run_id"):
        check_name("run_id", wrong)


@pytest.mark.parametrize("name", [None, 7, b"bytes", ["list"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(InvalidName, match="must be a string"):
        check_name("run_id", name)


def test_a_name_takes_255_bytes_at_most_whatever_its_characters() -> None:
    for fits, too_long in (("a" * 255, "a" * 256), ("-" * 255, "-" * 256), ("ä" * 127, "ä" * 128)):
        assert check_name("run_id", fits) == fits
        with pytest.raises(InvalidName, match="256 bytes, at most 255"):
            check_name("run_id", too_long)


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digests_are_what_the_design_says_over_the_stored_bytes() -> None:
    assert digests.plain(b"yes") == sha256(b"yes").digest()
    assert digests.salted(b"salt", b"yes") == sha256(b"saltyes").hexdigest()
    key = digests.idempotency_key(b"s" * 32, "run", "3", "tool", b'{"a":1}')
    assert key == sha256(b"s" * 32 + b"\x00run\x003\x00tool\x00" + b'{"a":1}').hexdigest()


def test_a_fingerprint_tells_tools_and_arguments_apart_and_does_not_see_the_order_of_keys() -> None:
    one = compute_fingerprint("fetch", {"id": 1, "page": 2})
    assert len(one) == 64
    assert one == one.lower()
    assert one == compute_fingerprint("fetch", {"page": 2, "id": 1})
    assert one != compute_fingerprint("fetch", {"id": 1, "page": 3})
    assert one != compute_fingerprint("fetch2", {"id": 1, "page": 2})
    assert compute_fingerprint("t", {"n": 1}) != compute_fingerprint("t", {"n": 1.0})


@given(*[st.sampled_from(["a", "b", "ab", "1", "11"])] * 6)
def test_two_steps_share_a_key_only_if_run_position_tool_and_arguments_are_equal(
    run: str, position: str, tool: str, other_run: str, other_position: str, other_tool: str
) -> None:
    one = digests.idempotency_key(b"s", run, position, tool, b"{}")
    other = digests.idempotency_key(b"s", other_run, other_position, other_tool, b"{}")
    assert (one == other) == ((run, position, tool) == (other_run, other_position, other_tool))


# --- functions --------------------------------------------------------------------------------------------------------


def plain(a: int, b: int = 2, *, c: int, d: int = 4) -> int:
    return a + b + c + d


def takes_any(a: int, **rest: int) -> int:
    return a


def positional_only(a: int, /) -> int:
    return a


async def asynchronous() -> None: ...


class Caller:
    def __call__(self, x: int) -> int:
        return x

    async def method(self, y: int) -> None: ...


@functools.wraps(plain)
def wrapped(*args: Any, **kwargs: Any) -> int:
    return plain(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "names", "required"),
    [
        (plain, ("a", "b", "c", "d"), ("a", "c")),
        (wrapped, ("a", "b", "c", "d"), ("a", "c")),
        (functools.partial(plain, 1), ("b", "c", "d"), ("c",)),
        (lambda: None, (), ()),
        (lambda *args, **kwargs: None, (), ()),
        (takes_any, ("a",), ("a",)),
        (Caller(), ("x",), ("x",)),
        (Caller().method, ("y",), ("y",)),
        (len, (), ("obj",)),
        (dict, (), ()),
    ],
)
def test_a_functions_parameters_are_read_however_it_is_made(
    function: Any, names: tuple[str, ...], required: tuple[str, ...]
) -> None:
    takes = functions.signature(function)
    assert (set(takes.names), takes.required) == (set(names), required)


@pytest.mark.parametrize("function", [asynchronous, Caller().method, functools.partial(asynchronous)])
def test_an_async_function_is_known_by_sight(function: Any) -> None:
    assert functions.signature(function).is_async
    assert not functions.signature(plain).is_async


@pytest.mark.parametrize("thing", [3, "text", None])
def test_what_cannot_be_called_is_refused(thing: Any) -> None:
    with pytest.raises(InvalidArguments, match="not callable"):
        functions.signature(thing)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (plain, {"a": 1}, "missing: c"),
        (plain, {"a": 1, "c": 2, "e": 3}, "not a parameter: e"),
        (plain, {}, "missing: a, c"),
        (positional_only, {"a": 1}, "not a parameter: a"),
        (takes_any, {"a": 1, 2: 3}, "not a parameter: 2"),
    ],
)
def test_arguments_that_do_not_fit_are_named(function: Any, arguments: dict[Any, Any], says: str) -> None:
    with pytest.raises(InvalidArguments, match=says):
        functions.check_arguments("tool", functions.signature(function), arguments)


def test_arguments_that_fit_pass() -> None:
    functions.check_arguments("tool", functions.signature(plain), {"c": 1, "a": 2})
    functions.check_arguments("tool", functions.signature(takes_any), {"a": 1, "anything": 2})


def compiled(source: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # source text is what this test is about
    return namespace["f"]


def test_code_is_other_code_when_it_does_something_else_and_the_same_when_it_has_only_moved() -> None:
    body = "def f(x):\n    return [x + 1 for _ in {'a', 'b'}]\n"
    same = compiled(body), compiled("\n\n# a comment\n" + body)
    assert len({functions.signature(f).environment for f in same}) == 1
    others = [body.replace("1", "2"), body.replace("x +", "x -"), body.replace("'a'", "'c'"), body.replace("x", "y")]
    assert len({functions.signature(f).environment for f in (same[0], *map(compiled, others))}) == 5


def test_a_functions_digest_is_the_same_in_every_process() -> None:
    script = (
        "from agent_run_ledger.rules import functions\n"
        "def f(x):\n    return x in {'a', 'b', 'c', 'd'} or [lambda: {1, 2}]\n"
        "print(functions.signature(f).environment)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
            env=environment() | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(printed) == 1


class AsyncCaller:
    async def __call__(self, x: int) -> int:
        return x

    async def method(self) -> None: ...

    @classmethod
    async def of_the_class(cls) -> None: ...

    @staticmethod
    async def of_nobody() -> None: ...


@functools.wraps(asynchronous)
def passed_on(*args: Any) -> Any:
    return asynchronous(*args)


@functools.wraps(plain)
async def in_a_thread(*args: Any, **kwargs: Any) -> int:
    return plain(*args, **kwargs)


@pytest.mark.parametrize(
    "function",
    [
        AsyncCaller(),
        AsyncCaller().method,
        AsyncCaller.of_the_class,
        AsyncCaller.of_nobody,
        functools.partial(functools.partial(asynchronous)),
        functools.partial(AsyncCaller()),
        functools.partial(AsyncCaller().method),
        passed_on,
        in_a_thread,
        functools.partial(in_a_thread, 1),
    ],
)
def test_an_async_function_is_known_whatever_it_is_wrapped_in(function: Any) -> None:
    assert functions.signature(function).is_async


@pytest.mark.parametrize(
    "function", [AsyncCaller, wrapped, functools.partial(plain, 1), Caller(), len, functools.partial]
)
def test_what_only_makes_or_holds_something_is_not_async(function: Any) -> None:
    assert not functions.signature(function).is_async


def test_an_object_that_answers_to_every_name_is_read_in_bounds() -> None:
    class Answers:
        def __getattr__(self, name: str) -> Any:
            return Answers()

        def __call__(self, x: int) -> int:
            return x

    assert not functions.signature(Answers()).is_generator


def pays(amount: int, idempotency_key: str, note: str = "") -> None: ...


def pays_by_name(*, amount: int, idempotency_key: str = "") -> None: ...


def keeps_its_own(amount: int, idempotency_key: str, /) -> None: ...


KEYED = {
    "by place": pays,
    "by name": pays_by_name,
    "partial": functools.partial(pays, note="x"),
    "wrapped": functools.wraps(pays)(lambda *args, **kwargs: pays(*args, **kwargs)),
}


@pytest.mark.parametrize("function", KEYED.values(), ids=KEYED)
def test_the_parameter_for_the_key_is_the_ledgers_to_fill(function: Any) -> None:
    takes = functions.signature(function)
    assert takes.takes_key
    assert "idempotency_key" not in takes.names + takes.required
    functions.check_arguments("pay", takes, {"amount": 5})
    for refuse in (
        lambda: functions.check_arguments("pay", takes, {"amount": 5, "idempotency_key": "mine"}),
        lambda: functions.bound(takes, (), {"amount": 5, "idempotency_key": "mine"}),
    ):
        with pytest.raises(InvalidArguments, match="'idempotency_key' is given by the ledger"):
            refuse()


def test_a_key_given_by_position_is_refused_too() -> None:
    assert functions.bound(functions.signature(pays), (5,), {"note": "x"}) == {"amount": 5, "note": "x"}
    with pytest.raises(InvalidArguments, match="'idempotency_key' is given by the ledger"):
        functions.bound(functions.signature(pays), (5, "x"), {})


def test_what_is_no_parameter_for_the_key_is_an_argument_like_others() -> None:
    for function in (plain, takes_any, keeps_its_own):
        assert not functions.signature(function).takes_key
    assert functions.signature(keeps_its_own).required == ("amount", "idempotency_key")
    assert functions.bound(functions.signature(takes_any), (1,), {"idempotency_key": "x"}) == {
        "a": 1,
        "idempotency_key": "x",
    }


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "arguments"),
    [
        (plain, (1,), {"c": 3}, {"a": 1, "c": 3}),
        (plain, (1, 2), {"d": 4, "c": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}),
        (plain, (), {"c": 3, "a": 1}, {"a": 1, "c": 3}),
        (wrapped, (1,), {"c": 3}, {"a": 1, "c": 3}),
        (functools.partial(plain, 1), (2,), {"c": 3}, {"b": 2, "c": 3}),
        (takes_any, (1,), {"more": 2}, {"a": 1, "more": 2}),
        (Caller(), (1,), {}, {"x": 1}),
        (Caller().method, (1,), {}, {"y": 1}),
        (lambda: None, (), {}, {}),
    ],
)
def test_the_arguments_of_a_call_are_bound_to_their_names_as_they_were_given(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert functions.bound(functions.signature(function), args, kwargs) == arguments


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "says"),
    [
        (plain, (), {}, "missing a required argument: 'a'"),
        (plain, (1,), {}, "missing a required argument: 'c'"),
        (plain, (1, 2, 3), {"c": 1}, "too many positional arguments"),
        (plain, (1,), {"a": 1, "c": 3}, "multiple values for argument 'a'"),
        (plain, (1,), {"c": 3, "e": 5}, "got an unexpected keyword argument 'e'"),
        (positional_only, (1,), {}, "a tool takes its arguments by keyword, and a cannot be given so"),
        (lambda *numbers: None, (1,), {}, r"a tool takes its arguments by keyword, and \*numbers cannot be given so"),
        (len, ([],), {}, "a tool takes its arguments by keyword, and obj cannot be given so"),
    ],
)
def test_a_call_that_python_could_not_make_is_refused_in_its_words(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArguments, match=f"^'pay': {says}; nothing was dispatched$"):
        functions.bound(functions.signature(function), args, kwargs, tool="pay")


PARAMETERS = st.sampled_from(["a", "b", "c", "d", "e"])


@given(
    st.lists(st.integers(), max_size=6), st.dictionaries(PARAMETERS, st.integers()), st.sampled_from([plain, takes_any])
)
def test_a_call_is_bound_exactly_where_python_would_make_it(
    args: list[int], kwargs: dict[str, int], function: Any
) -> None:
    try:
        wanted = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError:
        with pytest.raises(InvalidArguments):
            functions.bound(functions.signature(function), args, kwargs)
    else:
        wanted.update(wanted.pop("rest", {}))
        assert functions.bound(functions.signature(function), args, kwargs) == wanted


def test_functions_of_one_code_and_other_defaults_are_told_apart() -> None:
    def of_one_code(*defaults: Any) -> Any:
        def f(a: int, b: int) -> None: ...

        f.__defaults__ = defaults or None
        return f

    one, other, third = of_one_code(), of_one_code(1), of_one_code(1, 2)
    for _ in range(2):
        assert functions.signature(one).required == ("a", "b")
        assert functions.signature(other).required == ("a",)
        assert functions.signature(third).required == ()


# --- identifiers ------------------------------------------------------------------------------------------------------

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@given(
    st.text()
    | st.text(st.sampled_from("abZ019_ -."), max_size=70)
    | st.sampled_from(keyword.kwlist + keyword.softkwlist)
)
def test_what_comes_out_is_an_identifier_and_comes_out_again_as_it_is(name: str) -> None:
    try:
        identifier = sanitize_identifier(name)
    except InvalidName:
        return
    assert identifier.isidentifier()
    assert not keyword.iskeyword(identifier)
    assert IDENTIFIER.fullmatch(identifier)
    assert type(identifier) is str
    assert sanitize_identifier(identifier) == identifier


@given(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,62}\Z").filter(lambda name: not keyword.iskeyword(name)))
def test_an_identifier_stays_as_it_is(name: str) -> None:
    assert sanitize_identifier(name) == name


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("fetch invoice-2026.10", "fetch_invoice_2026_10"),
        ("a - b", "a_b"),
        ("a_-b", "a__b"),
        ("7 up", "_7_up"),
        ("class", "class_"),
        ("None", "None_"),
        ("match", "match"),
        ("_", "_"),
        ("a" * 63, "a" * 63),
    ],
)
def test_separators_digits_and_keywords_are_mended(name: str, identifier: str) -> None:
    assert sanitize_identifier(name) == identifier


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a'b", r"holds \"'\" at index 1"),
        ('a"b', "holds '\"' at index 1"),
        ("a;b", "holds ';' at index 1"),
        ("a/b", "holds '/' at index 1"),
        ("a\\b", "at index 1"),
        ("../../etc", r"holds '/' at index 2"),
        ("a..b", r"holds '\.' at index 2: two dots"),
        ("..", "two dots"),
        (".hidden", r"holds '\.' at index 0"),
        ("-rf", "holds '-' at index 0"),
        ("a ", "holds ' ' at index 1"),
        ("a\x00b", r"holds U\+0000 at index 1"),
        ("a\nb", r"holds U\+000A at index 1"),
        ("a\u202eb", r"holds U\+202E at index 1"),
        ("\u0430bc", r"holds U\+0430 at index 0"),
        ("stra\u00dfe", r"holds U\+00DF at index 4"),
        ("\u0663", r"holds U\+0663 at index 0"),
        ("\ud800", r"holds U\+D800 at index 0"),
        ("", "empty"),
        ("a" * 64, "64 characters, at most 63"),
        ("1" * 63, "64 characters, at most 63"),
        (None, "made of a string"),
        (b"a", "made of a string"),
    ],
)
def test_what_cannot_be_mended_is_refused_with_the_character_and_its_place(name: object, says: str) -> None:
    with pytest.raises(InvalidName, match=says) as caught:
        sanitize_identifier(name)
    assert str(caught.value).encode().decode().isprintable()


@pytest.mark.parametrize("sample", HOSTILE.values())
def test_no_hostile_name_is_an_identifier(sample: str) -> None:
    with pytest.raises(InvalidName):
        sanitize_identifier(sample)


def test_a_string_that_lies_about_itself_is_taken_for_what_it_holds() -> None:
    class Liar(str):
        def __str__(self) -> str:
            return "'; DROP TABLE entries; --"

        def replace(self, *_: Any) -> str:  # type: ignore[override]
            return "'; DROP TABLE entries; --"

    assert sanitize_identifier(Liar("a b")) == "a_b"


@pytest.mark.parametrize("module", [names, functions])
def test_the_examples_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
