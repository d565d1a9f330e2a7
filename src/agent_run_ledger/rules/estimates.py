"""How much a model call may use at most, read from its request before it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from agent_run_ledger.prices import Prices, listed
from agent_run_ledger.usage import MOST_TOKENS, Usage, model_of

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens", "maxTokens")
_ANSWERS = ("n", "candidate_count", "candidateCount", "best_of")
_SETTINGS = ("config", "generation_config", "generationConfig", "inferenceConfig")
"""Where Gemini and Bedrock put limits."""

_SAID = ("messages", "input", "contents", "prompt", "system", "instructions", "system_instruction", "systemInstruction")
_ESSENTIAL = ("messages", "input", "contents", "prompt")
_BEYOND = frozenset(
    (
        "previous_response_id",
        "conversation",
        "cached_content",
        "cachedContent",
        "container",
        "mcp_servers",
        "promptVariables",
        "data_sources",
        "web_search_options",
        "search_parameters",
        "plugins",
        "context_management",
        "extra_body",
        "models",
        "fallbacks",
        "prediction",
        "audio",
        "modalities",
        "response_modalities",
        "responseModalities",
    )
)
"""What makes a provider read more than the request holds, ask another model, or answer in more than text."""

_TIERS = ("service_tier", "serviceTier", "speed", "inference_geo", "performanceConfig")
_USUAL_TIERS = ("default", "standard", "standard_only", "flex", "batch")
"""Tiers that cost no more than a price list says."""

_TEXT_BLOCKS = frozenset(
    (
        "message",
        "text",
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
        "refusal",
        "thinking",
        "reasoning",
        "tool_use",
        "tool_result",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    )
)
_TEXT_KEYS = frozenset(
    (
        "role",
        "content",
        "parts",
        "text",
        "name",
        "refusal",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "functionCall",
        "function_response",
        "functionResponse",
        "toolUse",
        "toolResult",
        "reasoningContent",
        "reasoning_content",
        "cachePoint",
        "thought",
        "thought_signature",
        "thoughtSignature",
    )
)
"""The keys that a message, or a part of one without a type, may have."""

_FREE_KEYS = frozenset(
    (
        "arguments",
        "input",
        "args",
        "tool_calls",
        "function_call",
        "functionCall",
        "toolUse",
        "cache_control",
        "cachePoint",
        "reasoningContent",
        "encrypted_content",
        "signature",
        "annotations",
    )
)
"""What stands under these is text for the model, whatever its keys."""

_CLIENT_TOOLS = ("function", "custom", None)
_CLIENT_TOOL_KEYS = frozenset(("function_declarations", "functionDeclarations"))

_TEMPLATE_TOKENS = 256
"""What a provider puts around a conversation, with much room; the bytes of its JSON cover what is put around each message."""

_TOOLS_TOKENS = 1024
"""What a provider puts before declared tools, beside their own text."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that a call may use: all its tokens, and dollars, or None where its model has no known price."""

    tokens: int
    usd: Decimal | None


def estimate(arguments: Mapping[str, Any], prices: Prices | None = None) -> Estimate | None:
    """The most that a model call with these arguments may use; None where the arguments do not bound it. Raises nothing for JSON.

    ``arguments`` is the request in plain JSON values, as a step records it, or has it as one of its values. The output is bounded
    by the request's own limit (``max_tokens`` and its other names), the input by its bytes, because a token stands for at least
    one of them. That holds for text: a request with images, files, the provider's own tools or a conversation that the provider
    keeps has no bound here. Nor has one without a limit, or without messages.
    """
    request = _request(arguments)
    if request is None:
        return None
    size, output = _size(arguments), _output(request)
    if size is None or output is None or not _is_text(request):
        return None
    given = size + _TEMPLATE_TOKENS + (_TOOLS_TOKENS if _tools(request) else 0)
    if given + output > MOST_TOKENS:
        return None
    model = model_of(request) or model_of(arguments)
    if model is None or prices is None or any(request.get(name) not in (None, *_USUAL_TIERS) for name in _TIERS):
        return Estimate(given + output, None)
    return Estimate(given + output, _dearest(given, output, model, prices))


def _dearest(given: int, output: int, model: str, prices: Prices) -> Decimal | None:
    """The cost where all the input falls into the bucket that is dearest. A model without a price for cache writes makes none."""
    plain = listed(Usage(input_tokens=given, output_tokens=output), model, prices)
    if plain is None:
        return None
    written = listed(Usage(cache_write_tokens=given, output_tokens=output), model, prices)
    kept = listed(Usage(cache_write_tokens=given, long_cache_write_tokens=given, output_tokens=output), model, prices)
    return max(cost for cost in (plain, written, kept) if cost is not None)


def _request(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments, or the only one among them, that has something for a model to read and a limit."""
    found = [
        place
        for place in (arguments, *(value for value in arguments.values() if isinstance(value, Mapping)))
        if any(place.get(name) is not None for name in _ESSENTIAL) and any(True for _ in _limits(place))
    ]
    return found[0] if len(found) == 1 else None


def _limits(request: Mapping[str, Any]) -> Iterator[Any]:
    for place in _places(request):
        for name in _LIMITS:
            if place.get(name) is not None:
                yield place[name]


def _places(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield request
    for name in _SETTINGS:
        if isinstance(place := request.get(name), Mapping):
            yield place


def _output(request: Mapping[str, Any]) -> int | None:
    """The most tokens of all answers together: the largest limit, as often as answers are asked for."""
    limits = list(_limits(request))
    answers = [place[name] for place in _places(request) for name in _ANSWERS if place.get(name) is not None] or [1]
    if any(type(number) is not int or number < 0 for number in (*limits, *answers)):
        return None
    return int(max(limits)) * max(1, *map(int, answers))


def _tools(request: Mapping[str, Any]) -> list[Any]:
    """All tools that are declared, wherever a provider wants them."""
    found: list[Any] = []
    for place in _places(request):
        for name in ("tools", "functions", "toolConfig"):
            value = place.get(name)
            found += value if isinstance(value, list | tuple) else [] if value is None else [value]
    return found


def _is_text(request: Mapping[str, Any]) -> bool:
    """That all a model will read is text, and stands in the request."""
    if any(place.get(name) is not None for place in _places(request) for name in _BEYOND):
        return False
    if isinstance(request.get("prompt"), Mapping):
        return False  # one that the provider keeps
    if not all(_is_a_client_tool(tool) for tool in _tools(request)):
        return False
    return all(_is_readable(place[name]) for place in _places(request) for name in _SAID if place.get(name) is not None)


def _is_a_client_tool(tool: Any) -> bool:
    """A tool that the program itself runs. Those of a provider bring tokens that no request shows."""
    if not isinstance(tool, Mapping):
        return False
    if "function_declarations" in tool or "functionDeclarations" in tool:
        return all(key in _CLIENT_TOOL_KEYS or value is None for key, value in tool.items())
    if "tools" in tool:  # Bedrock's toolConfig
        specs = tool["tools"]
        return isinstance(specs, list | tuple) and all(
            isinstance(spec, Mapping) and spec.keys() <= {"toolSpec", "cachePoint"} for spec in specs
        )
    function = tool.get("function", tool)
    return tool.get("type") in _CLIENT_TOOLS and isinstance(function, Mapping) and "name" in function


def _is_readable(value: Any) -> bool:
    """That this part of a conversation is text. It is no deeper than `_size` has walked."""
    if isinstance(value, str) or value is None:
        return True
    if isinstance(value, list | tuple):
        return all(_is_readable(part) for part in value)
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    if kind is None and not value.keys() <= _TEXT_KEYS:
        return False
    if kind is not None and (type(kind) is not str or kind not in _TEXT_BLOCKS):
        return False
    return all(
        _is_a_result(part) if key in ("toolResult", "functionResponse", "function_response") else _is_readable(part)
        for key, part in value.items()
        if key not in _FREE_KEYS and not isinstance(part, bool | int | float)
    )


def _is_a_result(value: Any) -> bool:
    """What a tool returned, as Bedrock and Gemini put it: any JSON, but in Bedrock's blocks text and JSON only."""
    if not isinstance(value, Mapping):
        return False
    if "toolUseId" in value:
        blocks = value.get("content")
        return isinstance(blocks, list) and all(
            isinstance(block, Mapping) and block.keys() <= {"text", "json"} for block in blocks
        )
    return value.keys() <= {"id", "name", "response", "scheduling", "will_continue", "willContinue"}


_MOST_DEPTH = 200
_MOST_PARTS = 10**6


def _size(value: Any) -> int | None:
    """At least the bytes of this as JSON text without spaces; None where it is no JSON, deeper than 200, or endless."""
    size, level = 0, [value]
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for part in level:
            if isinstance(part, str):
                size += len(part.encode("utf-8", "surrogatepass")) + 3
            elif isinstance(part, Mapping):
                size += 2 + len(part)
                below += part.keys()
                below += part.values()
            elif isinstance(part, list | tuple):
                size += 2
                below += part
            elif part is None or isinstance(part, bool):
                size += 6
            elif isinstance(part, int | float):
                size += len(repr(part)) + 1
            else:
                return None
        if not below:
            return size
        if len(below) > _MOST_PARTS:
            return None
        level = below
    return None
