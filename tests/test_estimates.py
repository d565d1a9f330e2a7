from __future__ import annotations

import copy
import itertools
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger import Price, PriceBook, Usage
from agent_run_ledger.rules.estimates import Estimate, estimate

BOOK = PriceBook(
    {
        "m": Price(input="3", cache_read="0.30", cache_write="3.75", long_cache_write="6", output="15"),
        "plain": Price(input="2", output="8"),
    }
)

# --- requests as they are written -------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "model": "m",
    "max_completion_tokens": 1000,
    "temperature": 0.5,
    "messages": [
        {"role": "system", "content": "You reconcile invoices."},
        {"role": "user", "content": [{"type": "text", "text": "Which are open?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "list", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "INV-109"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "list", "parameters": {"type": "object", "properties": {"image": {}}}},
        }
    ],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "max_output_tokens": 1000,
    "instructions": "You reconcile invoices.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Which are open?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "c1", "name": "list", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "INV-109"},
    ],
    "tools": [{"type": "function", "name": "list", "parameters": {"type": "object"}}],
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 1000,
    "thinking": {"type": "enabled", "budget_tokens": 500},
    "system": [
        {"type": "text", "text": "You reconcile invoices.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ],
    "messages": [
        {"role": "user", "content": "Which are open?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                {"type": "tool_use", "id": "t1", "name": "list", "input": {"type": "image", "page": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "INV"}],
                }
            ],
        },
    ],
    "tools": [{"name": "list", "description": "Lists.", "input_schema": {"type": "object"}}],
}
GEMINI: dict[str, Any] = {
    "model": "m",
    "contents": [
        {"role": "user", "parts": [{"text": "Which are open?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "list", "args": {"a": 1}}, "thoughtSignature": "c2ln"}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "list", "response": {"found": ["INV"]}}}]},
    ],
    "config": {
        "max_output_tokens": 1000,
        "system_instruction": "You reconcile invoices.",
        "tools": [{"function_declarations": [{"name": "list"}]}],
    },
}
BEDROCK: dict[str, Any] = {
    "modelId": "m",
    "system": [{"text": "You reconcile invoices."}, {"cachePoint": {"type": "default"}}],
    "messages": [
        {"role": "user", "content": [{"text": "Which are open?"}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "t1", "name": "list", "input": {}}}]},
        {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "INV"}, {"json": {"a": 1}}]}}],
        },
    ],
    "inferenceConfig": {"maxTokens": 1000},
    "toolConfig": {"tools": [{"toolSpec": {"name": "list", "inputSchema": {"json": {}}}}]},
}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Which are open?", "max_tokens": 1000}
REQUESTS = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI,
    "bedrock": BEDROCK,
    "completion": COMPLETION,
}
each_request = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)


def bytes_of(value: Any) -> int:
    """What the tokenizer with the most tokens, one for each byte, makes of all text in it."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return bytes_of(list(value)) + bytes_of(list(value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, list) else len(str(value))


def changed(request: dict[str, Any], **values: Any) -> dict[str, Any]:
    return copy.deepcopy(request) | values


# --- the bound --------------------------------------------------------------------------------------------------------


@each_request
def test_a_request_is_bounded_by_its_bytes_and_its_own_limit(request_: dict[str, Any]) -> None:
    found = estimate(request_, BOOK)
    assert found is not None
    assert bytes_of(request_) + 1000 <= found.tokens <= 2 * bytes_of(request_) + 3000


@each_request
def test_no_division_of_the_tokens_costs_more_than_the_estimate(request_: dict[str, Any]) -> None:
    found = estimate(request_, BOOK)
    assert found is not None
    assert found.usd is not None
    for share in (1, 2, 4):
        given, output = (found.tokens - 1000) // share, 1000 // share
        for usage in (
            Usage(given, 0, 0, output, output),
            Usage(0, given, 0, output),
            Usage(0, 0, given, output),
            Usage(0, 0, given, output, long_cache_write_tokens=given),
            Usage(given - given // 2, 0, given // 2, output, long_cache_write_tokens=given // 3),
        ):
            cost = BOOK.cost(usage, "m")
            assert cost is not None
            assert cost <= found.usd


@given(st.lists(st.text(), min_size=1, max_size=30), st.integers(0, 10**6), st.integers(1, 20))
def test_no_text_has_more_tokens_than_the_estimate(texts: list[str], limit: int, answers: int) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    found = estimate({"messages": messages, "max_tokens": limit, "n": answers})
    assert found is not None
    a_token_for_each_byte = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    assert found.tokens >= a_token_for_each_byte + 8 * len(texts) + limit * answers


@pytest.mark.parametrize("character", ["a", "é", "漢", "\U0001f600", "\n", '"'])
def test_long_texts_are_counted_in_bytes_and_not_in_characters(character: str) -> None:
    text = character * 10_000
    found = estimate(changed(COMPLETION, prompt=text))
    assert found is not None
    assert len(text.encode()) + 1000 <= found.tokens <= len(text.encode()) + 1400


@each_request
def test_the_request_may_be_one_of_the_arguments(request_: dict[str, Any]) -> None:
    alone, inside = estimate(request_, BOOK), estimate({"request": request_, "attempt": 1}, BOOK)
    assert alone is not None
    assert inside is not None
    assert inside.tokens >= alone.tokens
    named = {name: value for name, value in request_.items() if name not in ("model", "modelId")}
    beside = estimate({"request": named, "model": "plain"}, BOOK)
    assert beside is not None
    assert beside.usd is not None


def test_two_requests_in_one_call_have_no_bound() -> None:
    assert estimate({"first": CHAT, "second": CHAT}) is None


def test_the_largest_limit_counts() -> None:
    small, large = estimate(COMPLETION), estimate(changed(COMPLETION, max_completion_tokens=5000))
    assert small is not None
    assert large is not None
    assert large.tokens >= small.tokens + 4000


def test_a_model_that_writes_no_cache_is_bounded_by_its_input_price() -> None:
    found = estimate(changed(COMPLETION, model="plain"), BOOK)
    assert found is not None
    assert found.usd == (Decimal(found.tokens - 1000) * 2 + 8000) / 10**6


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"model": None}, {"service_tier": "priority"}, {"speed": "fast"}]
)
def test_a_price_that_is_not_known_is_none_and_the_tokens_are_bounded_all_the_same(change: dict[str, Any]) -> None:
    found = estimate(changed(COMPLETION, **change), BOOK)
    assert found is not None
    assert (found.tokens > 1000, found.usd) == (True, None)
    assert estimate(COMPLETION) == Estimate(estimate(COMPLETION, BOOK).tokens, None)  # type: ignore[union-attr]


# --- what has no bound ------------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"question": "Which are open?"},
        {"question": "Which are open?", "max_tokens": 1000},
        {"messages": [{"role": "user", "content": "x"}]},
        changed(COMPLETION, max_tokens=None),
        changed(COMPLETION, max_tokens=-1),
        changed(COMPLETION, max_tokens="1000"),
        changed(COMPLETION, max_tokens=True),
        changed(COMPLETION, max_tokens=2**63),
        changed(COMPLETION, n="2"),
        changed(COMPLETION, prompt={"id": "pmpt_1"}),
        changed(COMPLETION, prompt=[1, 2, 3]),
        changed(COMPLETION, data=b"x"),
        changed(COMPLETION, data=object()),
        changed(CHAT, messages=[{"role": "user", "content": [IMAGE]}]),
        changed(CHAT, messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        changed(CHAT, messages=[{"role": "assistant", "audio": {"id": "a"}}]),
        changed(CHAT, web_search_options={}),
        changed(CHAT, modalities=["text", "audio"]),
        changed(CHAT, extra_body={"plugins": []}),
        changed(RESPONSES, previous_response_id="resp_1"),
        changed(RESPONSES, conversation="conv_1"),
        changed(RESPONSES, tools=[{"type": "web_search"}]),
        changed(RESPONSES, tools=[{"type": "mcp", "server_url": "https://example.com"}]),
        changed(RESPONSES, input=[{"type": "item_reference", "id": "i"}]),
        changed(RESPONSES, input=[{"id": "i"}]),
        changed(RESPONSES, input=[{"type": "function_call_output", "output": [{"type": "input_image"}]}]),
        changed(MESSAGES, messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        changed(
            MESSAGES, messages=[{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]
        ),
        changed(MESSAGES, tools=[{"type": "web_search_20260101", "name": "web_search"}]),
        changed(MESSAGES, tools=["list"]),
        changed(MESSAGES, mcp_servers=[{}]),
        changed(GEMINI, contents=[{"parts": [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]}]),
        changed(GEMINI, contents=[{"parts": [{"functionResponse": {"name": "a", "response": {}, "parts": [{}]}}]}]),
        changed(GEMINI, config={"max_output_tokens": 5, "cached_content": "cachedContents/1"}),
        changed(GEMINI, config={"max_output_tokens": 5, "tools": [{"google_search": {}}]}),
        changed(BEDROCK, messages=[{"role": "user", "content": [{"image": {"format": "png"}}]}]),
        changed(
            BEDROCK,
            messages=[{"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"image": {}}]}}]}],
        ),
        changed(CHAT, tools=[{"type": "function", "function": "name"}]),
        changed(CHAT, tools=[{"type": [], "name": "list"}]),
        changed(BEDROCK, toolConfig={"tools": 1}),
        changed(BEDROCK, toolConfig={"tools": [{"systemTool": {"name": "search"}}]}),
    ],
    ids=map(str, itertools.count(1)),
)
def test_what_the_request_does_not_bound_has_no_estimate(request_: dict[str, Any]) -> None:
    assert estimate(request_, BOOK) is None


def test_arguments_without_end_have_no_estimate() -> None:
    cycle = changed(COMPLETION)
    cycle["metadata"] = cycle
    assert estimate(cycle) is None
    wide: list[Any] = []
    for _ in range(64):
        wide = [wide, wide]  # 2**64 in all
    assert estimate(changed(COMPLETION, metadata=wide)) is None
    deep: Any = "x"
    for _ in range(250):
        deep = [deep]
    assert estimate(changed(COMPLETION, metadata=deep)) is None
    assert estimate(changed(COMPLETION, prompt=deep)) is None


NAMES = sorted({name for request in REQUESTS.values() for name in request} | {"tools", "type", "content", "toolResult"})
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), parts, max_size=5),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), json, max_size=6))
def test_no_json_makes_it_raise(arguments: dict[str, Any]) -> None:
    estimate(arguments, BOOK)
    for request in REQUESTS.values():
        estimate(request | arguments, BOOK)
