from __future__ import annotations

import copy
import dataclasses
import itertools
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import anthropic.types
import anthropic.types.beta
import openai.types.chat
import openai.types.responses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import Usage
from agent_run_ledger.usage import model_of
from support.processes import environment

# --- the same work, as each service tells of it -----------------------------------------------------------------------

WORK = Usage(
    input_tokens=1200,
    cache_read_tokens=5000,
    cache_write_tokens=800,
    output_tokens=450,
    reasoning_tokens=300,
    long_cache_write_tokens=300,
)


def openai_chat(work: Usage) -> dict[str, Any]:
    whole = work.total_tokens - work.output_tokens
    return {
        "prompt_tokens": whole,
        "completion_tokens": work.output_tokens,
        "total_tokens": work.total_tokens,
        "prompt_tokens_details": {
            "audio_tokens": None,
            "cached_tokens": work.cache_read_tokens,
            "cache_write_tokens": work.cache_write_tokens,
            "cache_write_tokens_details": {
                "ttl_12h_tokens": work.long_cache_write_tokens,
                "ttl_30m_tokens": work.cache_write_tokens - work.long_cache_write_tokens,
            },
        },
        "completion_tokens_details": {"audio_tokens": 0, "reasoning_tokens": work.reasoning_tokens},
    }


def openai_responses(work: Usage) -> dict[str, Any]:
    chat = openai_chat(work)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": work.output_tokens,
        "output_tokens_details": {"reasoning_tokens": work.reasoning_tokens},
        "total_tokens": work.total_tokens,
    }


def anthropic_messages(work: Usage) -> dict[str, Any]:
    return {
        "input_tokens": work.input_tokens,
        "output_tokens": work.output_tokens,
        "cache_creation_input_tokens": work.cache_write_tokens,
        "cache_read_input_tokens": work.cache_read_tokens,
        "cache_creation": {
            "ephemeral_1h_input_tokens": work.long_cache_write_tokens,
            "ephemeral_5m_input_tokens": work.cache_write_tokens - work.long_cache_write_tokens,
        },
        "server_tool_use": None,
        "service_tier": "standard",
        "output_tokens_details": {"thinking_tokens": work.reasoning_tokens},
    }


def bedrock_converse(work: Usage) -> dict[str, Any]:
    return {
        "inputTokens": work.input_tokens,
        "outputTokens": work.output_tokens,
        "totalTokens": work.total_tokens,
        "cacheReadInputTokens": work.cache_read_tokens,
        "cacheWriteInputTokens": work.cache_write_tokens,
        "cacheDetails": [
            {"ttl": "1h", "inputTokens": work.long_cache_write_tokens},
            {"ttl": "5m", "inputTokens": work.cache_write_tokens - work.long_cache_write_tokens},
        ],
    }


def litellm(work: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": work.total_tokens - work.output_tokens,
        "completion_tokens": work.output_tokens,
        "total_tokens": work.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": work.cache_read_tokens,
            "cache_write_tokens": None,
            "cache_creation_token_details": {
                "ephemeral_5m_input_tokens": work.cache_write_tokens - work.long_cache_write_tokens,
                "ephemeral_1h_input_tokens": work.long_cache_write_tokens,
            },
        },
        "completion_tokens_details": {"reasoning_tokens": work.reasoning_tokens, "text_tokens": 150},
        "cache_creation_input_tokens": work.cache_write_tokens,
        "cache_read_input_tokens": work.cache_read_tokens,
    }


def langchain(work: Usage) -> dict[str, Any]:
    """As langchain-anthropic 1.7 makes it: the lifetimes are told of, and the generic count is emptied."""
    return {
        "input_tokens": work.total_tokens - work.output_tokens,
        "output_tokens": work.output_tokens,
        "total_tokens": work.total_tokens,
        "input_token_details": {
            "cache_read": work.cache_read_tokens,
            "cache_creation": 0,
            "ephemeral_5m_input_tokens": work.cache_write_tokens - work.long_cache_write_tokens,
            "ephemeral_1h_input_tokens": work.long_cache_write_tokens,
        },
        "output_token_details": {"reasoning": work.reasoning_tokens},
    }


def gemini(work: Usage) -> dict[str, Any]:
    """Gemini tells of no cache writes: its caches are made by calls of their own."""
    return {
        "promptTokenCount": work.input_tokens + work.cache_write_tokens + work.cache_read_tokens - 50,
        "toolUsePromptTokenCount": 50,
        "candidatesTokenCount": work.output_tokens - work.reasoning_tokens,
        "thoughtsTokenCount": work.reasoning_tokens,
        "cachedContentTokenCount": work.cache_read_tokens,
        "totalTokenCount": work.total_tokens,
    }


Shape = Callable[[Usage], dict[str, Any]]
SHAPES: list[Shape] = [openai_chat, openai_responses, anthropic_messages, bedrock_converse, litellm, langchain]


def as_told(shape: Shape, work: Usage) -> Usage:
    """Bedrock says nothing of reasoning; it is in the output all the same."""
    return dataclasses.replace(work, reasoning_tokens=0) if shape is bedrock_converse else work


def in_snake_case(usage: dict[str, Any]) -> dict[str, Any]:
    return {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): value for name, value in usage.items()}


def as_objects(value: Any) -> Any:
    """The same fields as attributes, all the way down."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: as_objects(part) for name, part in value.items()})
    return [as_objects(part) for part in value] if isinstance(value, list) else value


counts = st.integers(0, 10**9)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    write, output = draw(counts), draw(counts)
    return Usage(
        input_tokens=draw(st.integers(50, 10**9)),
        cache_read_tokens=draw(counts),
        cache_write_tokens=write,
        output_tokens=output,
        reasoning_tokens=draw(st.integers(0, output)),
        long_cache_write_tokens=draw(st.integers(0, write)),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_work_has_the_same_buckets_in_every_shape(shape: Shape) -> None:
    assert Usage.read(shape(WORK)) == as_told(shape, WORK)


@pytest.mark.parametrize("shape", SHAPES)
@given(work=usages())
def test_any_work_has_the_same_buckets_in_every_shape(shape: Shape, work: Usage) -> None:
    told = shape(work)
    assert Usage.read(told) == Usage.read(as_objects(told)) == Usage.read({"usage": told}) == as_told(shape, work)


@given(work=usages())
def test_gemini_has_the_same_buckets_but_for_cache_writes(work: Usage) -> None:
    work = dataclasses.replace(
        work,
        input_tokens=work.input_tokens + work.cache_write_tokens,
        cache_write_tokens=0,
        long_cache_write_tokens=0,
    )
    told = gemini(work)
    assert Usage.read(told) == Usage.read({"usageMetadata": told, "modelVersion": "gemini"}) == work
    assert Usage.read(as_objects({"usage_metadata": in_snake_case(told)})) == Usage.read(in_snake_case(told)) == work


@pytest.mark.parametrize("shape", SHAPES)
def test_other_mappings_than_dicts_are_read(shape: Shape) -> None:
    assert Usage.read(UserDict({"usage": UserDict(shape(WORK))})) == as_told(shape, WORK)


@given(work=usages(), usd=st.none() | st.decimals(min_value=0, max_value=10**6, places=9))
def test_a_usage_reads_back_from_its_own_fields(work: Usage, usd: Decimal | None) -> None:
    work = dataclasses.replace(work, usd=usd)
    assert Usage.read(work) is work
    assert Usage.read(dataclasses.asdict(work)) == work


def test_objects_of_the_real_packages_are_read() -> None:
    chat = openai.types.CompletionUsage.model_validate(openai_chat(WORK))
    responses = openai.types.responses.ResponseUsage.model_validate(openai_responses(WORK))
    messages = anthropic.types.Usage.model_validate(anthropic_messages(WORK))
    beta = anthropic.types.beta.BetaUsage.model_validate(anthropic_messages(WORK))
    assert [Usage.read(usage) for usage in (chat, responses, messages, beta)] == [WORK] * 4
    assert [Usage.read(usage.model_dump()) for usage in (chat, responses, messages, beta)] == [WORK] * 4


def test_responses_of_the_real_packages_are_read_with_their_models() -> None:
    completion = openai.types.chat.ChatCompletion.model_construct(
        model="gpt-5", usage=openai.types.CompletionUsage.model_validate(openai_chat(WORK))
    )
    message = anthropic.types.Message.model_construct(
        model="claude-sonnet-5", usage=anthropic.types.Usage.model_validate(anthropic_messages(WORK))
    )
    assert (Usage.read(completion), model_of(completion)) == (WORK, "gpt-5")
    assert (Usage.read(message), model_of(message)) == (WORK, "claude-sonnet-5")


# --- details ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "work"),
    [
        ({"input_tokens": 5, "output_tokens": 7}, Usage(5, 0, 0, 7)),
        ({"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": None}, Usage(5, 0, 0, 7)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5)),  # embeddings
        ({"promptTokenCount": 5, "totalTokenCount": 5}, Usage(5)),  # nothing was put out
        ({"promptTokenCount": 5, "thoughtsTokenCount": 9}, Usage(5, 0, 0, 9, 9)),
        ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_cache_hit_tokens": 4}, Usage(5, 4, 0, 1)),  # DeepSeek
        ({"input_tokens": 9, "output_tokens": 1, "cache_read_tokens": 4}, Usage(5, 4, 0, 1)),  # PydanticAI
        (
            {
                "input_tokens": 9,
                "output_tokens": 3,
                "total_tokens": 12,
                "input_token_details": {"flex": 5, "flex_cache_read": 4},
                "output_token_details": {"flex": 1, "flex_reasoning": 2},
            },
            Usage(5, 4, 0, 3, 2),  # LangChain of OpenAI's other tiers
        ),
    ],
)
def test_shapes_with_less_or_more_are_read(told: dict[str, Any], work: Usage) -> None:
    assert Usage.read(told) == work


def test_tokens_that_only_the_total_tells_of_count_as_output() -> None:
    told = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 315,
        "completion_tokens_details": {"reasoning_tokens": 300},
    }
    assert Usage.read(told) == Usage(10, 0, 0, 305, 300)


def test_calls_that_shortened_the_conversation_are_counted() -> None:
    told = anthropic_messages(WORK) | {
        "iterations": [
            {"type": "compaction", "input_tokens": 100, "cache_read_input_tokens": 20, "output_tokens": 10},
            {"type": "message", "input_tokens": 1200, "output_tokens": 450},
        ]
    }
    assert Usage.read(told) == WORK + Usage(100, 20, 0, 10)
    told["iterations"].append({"type": "advisor_message", "input_tokens": 1, "output_tokens": 1})
    assert Usage.read(told) is None


@pytest.mark.parametrize(
    ("cost", "usd"),
    [
        (0.1, Decimal("0.1")),
        (2.1e-05, Decimal("0.000021")),
        ("0.25", Decimal("0.25")),
        (0, Decimal(0)),
        (None, None),
        (-1, None),
        (float("nan"), None),
        (True, None),
        ({"total_cost": 1}, None),
    ],
)
def test_a_cost_is_taken_as_it_is_written_and_never_guessed(cost: object, usd: Decimal | None) -> None:
    assert Usage.read(litellm(WORK) | {"cost": cost}) == dataclasses.replace(WORK, usd=usd)


def test_a_fee_for_a_key_of_ones_own_is_not_the_cost() -> None:
    read = Usage.read(openai_chat(WORK) | {"cost": 0, "is_byok": True})
    assert read is not None
    assert read.usd is None


# --- what is not understood is missing --------------------------------------------------------------------------------


class Raising:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Disguised:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


class Endless:
    def __getattr__(self, name: str) -> Any:
        return self


class Deep:
    def __getattr__(self, name: str) -> Any:
        return getattr(self, name + "x")


class Lying(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        raise KeyError(key)


CYCLE: dict[str, Any] = {}
CYCLE["usage"] = CYCLE["input_tokens"] = CYCLE["prompt_tokens_details"] = CYCLE


@pytest.mark.parametrize(
    "obj",
    [
        None,
        0,
        True,
        "usage",
        b"usage",
        [],
        {},
        {"usage": None},
        {"usage": []},
        {"usage": "12"},
        object(),
        Usage,
        Lying(input_tokens=1, output_tokens=1),
        CYCLE,
        {"input_tokens": 5},
        {"output_tokens": 5},
        {"input_tokens": None, "output_tokens": 5},
        {"prompt_tokens": 5},
        {"prompt_tokens": 5, "total_tokens": 4},
        {"promptTokenCount": 5},
        {"inputTokens": 5},
        {
            "input_tokens": 5,
            "output_tokens": 7,
            "cache_read_input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 3},
        },
    ],
    ids=map(str, itertools.count(1)),
)
def test_what_does_not_look_like_usage_is_missing(obj: object) -> None:
    assert Usage.read(obj) is None


@pytest.mark.parametrize(
    "wrong", [-1, True, 1.0, "12", 10**12 + 1, 10**3000, [1], {}, float("nan")], ids=lambda w: str(w)[:20]
)
@pytest.mark.parametrize("shape", [*SHAPES, gemini])
def test_no_count_that_is_none_becomes_a_usage(shape: Shape, wrong: object) -> None:
    for name, value in shape(WORK).items():
        if type(value) is int:
            assert Usage.read(shape(WORK) | {name: wrong}) is None, name


@pytest.mark.parametrize("shape", [openai_chat, openai_responses, langchain])
def test_more_from_the_cache_than_was_put_in_is_a_contradiction(shape: Shape) -> None:
    told = copy.deepcopy(shape(WORK))
    details = next(
        value for name, value in told.items() if name.startswith(("prompt", "input")) and type(value) is dict
    )
    details["cache_read" if "cache_read" in details else "cached_tokens"] = 10**6
    assert Usage.read(told) is None


@pytest.mark.parametrize("kind", [Raising, Disguised, Endless, Deep])
def test_objects_that_do_strange_things_are_missing_usage_and_no_model(kind: type[Any]) -> None:
    for obj in (kind(), {"usage": kind()}, {"usage_metadata": {"input_tokens": kind(), "output_tokens": 1}}):
        assert Usage.read(obj) is None
        assert model_of(obj) is None


FIELDS = sorted(
    {name for shape in [*SHAPES, gemini] for name in shape(WORK)} | {"usage", "cost", "usd", "iterations", "ttl"}
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), parts, max_size=6),
    max_leaves=20,
)


@given(anything)
def test_reading_never_raises(obj: object) -> None:
    for shape in (obj, as_objects(obj) if isinstance(obj, dict) else obj):
        found = Usage.read(shape)
        assert found is None or found.total_tokens >= 0
        assert model_of(shape) is None


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        {"model": "m"},
        {"modelVersion": "m"},
        SimpleNamespace(model_version="m"),
        {"modelId": "m"},
        SimpleNamespace(response_metadata={"model_name": "m"}, usage_metadata={}),
        {"model": None, "model_name": "m"},
    ],
)
def test_the_model_is_found_in_responses_and_requests(obj: object) -> None:
    assert model_of(obj) == "m"


@pytest.mark.parametrize("obj", [None, {}, {"model": ""}, {"model": 3}, {"model": "m" * 513}])
def test_what_is_no_name_is_no_model(obj: object) -> None:
    assert model_of(obj) is None


# --- the class --------------------------------------------------------------------------------------------------------


def test_the_total_is_the_sum_of_the_four_buckets() -> None:
    assert WORK.total_tokens == 1200 + 5000 + 800 + 450


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, Decimal(1)])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Usage) if field.name != "usd"])
def test_counts_of_another_type_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=name):
        Usage(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_tokens": -1},
        {"output_tokens": 2**63},
        {"reasoning_tokens": 1},
        {"cache_write_tokens": 1, "long_cache_write_tokens": 2},
        {"usd": "-0.01"},
        {"usd": "NaN"},
        {"usd": float("inf")},
        {"usd": "1e15"},
        {"usd": "1e-31"},
        {"usd": "0e-999999"},
        {"usd": 10**3000},
        {"usd": "x"},
        {"usd": "1" * 65},
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_impossible_usages_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Usage\.|dollars"):
        Usage(**wrong)


@pytest.mark.parametrize("wrong", [True, b"1", [], 1j])
def test_dollars_of_another_type_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="dollars"):
        Usage(usd=wrong)


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_a_float_is_the_amount_that_is_written(amount: float) -> None:
    assert Usage(usd=amount).usd == Decimal(repr(amount))  # type: ignore[arg-type]


@given(usages(), usages(), usages())
def test_sums_do_not_depend_on_the_order(a: Usage, b: Usage, c: Usage) -> None:
    assert (a + b) + c == a + (b + c) == sum([c, b, a], Usage())
    assert (a + b).total_tokens == a.total_tokens + b.total_tokens


def test_dollars_of_a_sum_are_known_when_all_are() -> None:
    assert (Usage(1, usd=Decimal("0.1")) + Usage(2, usd=Decimal("0.2"))).usd == Decimal("0.3")
    assert (Usage(1, usd=Decimal("0.1")) + Usage(2)).usd is None
    assert (Usage() + Usage(usd=Decimal("0.1"))).usd == Decimal("0.1")


def test_ten_thousand_small_costs_sum_exactly_at_any_precision() -> None:
    with localcontext() as context:
        context.prec = 3
        total = sum((Usage(1, usd=Decimal("0.000123456789")) for _ in range(10_000)), Usage(usd=Decimal(10**9)))
    assert total.usd == Decimal("1000000001.234567890000")


def test_usage_is_read_without_loading_decimals() -> None:
    program = (
        "import sys; from agent_run_ledger import Usage\n"
        "assert Usage.read({'prompt_tokens': 3, 'completion_tokens': 4}).total_tokens == 7\n"
        "print({'decimal', 'pydantic', 'openai', 'anthropic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, check=True, text=True
    )
    assert done.stdout == "set()\n"
