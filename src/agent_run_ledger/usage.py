"""What a model call used: disjoint buckets of tokens, and how they are read from what providers return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_run_ledger.words import TELLS_USAGE

if TYPE_CHECKING:
    from decimal import Decimal

MOST_TOKENS = 2**63 - 1
"""The largest count that every store can keep."""

_MOST_TOKENS_OF_A_CALL = 10**12
"""A provider's object that says more is not understood."""

_LONGEST_MODEL_NAME = 512
_MOST_DETAILS = 1000


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one or more model calls, each counted in one bucket only, and the dollars where the provider says them.

    The four buckets: ``input_tokens`` (not from a cache), ``cache_read_tokens``, ``cache_write_tokens``, ``output_tokens``.
    Two counts are parts of a bucket: ``reasoning_tokens`` of the output, ``long_cache_write_tokens`` of the cache writes (those
    that the provider keeps longer than usual and charges more for: 1 hour at Anthropic and on Bedrock, 12 hours at OpenAI).
    ``usd`` is None where it is not known, which is not 0; an int, a text, a `Decimal`, or a float by its shortest text.
    Raises `TypeError` for other types, `ValueError` for counts below 0 and parts above their whole.
    """

    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    usd: Decimal | None = None
    long_cache_write_tokens: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if type(count) is not int:
                raise TypeError(f"Usage.{name} is a whole number, not {type(count).__name__}")
            if not 0 <= count <= MOST_TOKENS:
                raise ValueError(f"Usage.{name} is a whole number from 0 to 2**63 - 1")
        if self.reasoning_tokens > self.output_tokens:
            raise ValueError("Usage.reasoning_tokens is a part of output_tokens")
        if self.long_cache_write_tokens > self.cache_write_tokens:
            raise ValueError("Usage.long_cache_write_tokens is a part of cache_write_tokens")
        if self.usd is not None:
            from agent_run_ledger.rules.money import exact_usd

            object.__setattr__(self, "usd", exact_usd(self.usd))

    @property
    def total_tokens(self) -> int:
        """The sum of the four buckets."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        """Both together. The dollars of a sum are known when those of both are; `Usage()`, nothing at all, changes nothing."""
        if not isinstance(other, Usage):
            return NotImplemented
        if other == _NOTHING:
            return self
        if self == _NOTHING:
            return other
        usd = None
        if self.usd is not None and other.usd is not None:
            from agent_run_ledger.rules.money import add

            usd = add((self.usd, other.usd))
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS}, usd=usd)

    @classmethod
    def read(cls, obj: object) -> Usage | None:
        """The usage that a provider's response, or its usage object, tells of; None where it tells of none that is understood.

        Reads the shapes of OpenAI (chat completions, responses), Anthropic, Gemini, Bedrock Converse, LiteLLM and LangChain, as
        objects or as mappings. None means *not known*, never 0. Raises nothing, whatever the object does. ::

            Usage.read({"usage": {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}})
            # Usage(input_tokens=8, cache_read_tokens=4, output_tokens=7)
        """
        if issubclass(type(obj), Usage):  # isinstance would ask the object
            return obj  # type: ignore[return-value]
        if type(obj) is dict and TELLS_USAGE.isdisjoint(obj):
            return None
        for name in ("usage", "usage_metadata", "usageMetadata", None):
            try:
                found = _read(obj if name is None else _field(obj, name))
            except Exception:  # a foreign object may raise anything, and a contradiction is no usage
                continue
            if found is not None:
                return found
        return None


_COUNTS = (
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "long_cache_write_tokens",
)
_NOTHING = Usage()


def model_of(obj: object) -> str | None:
    """The model's name in a provider's response, or in the arguments of a call; None where there is none. Raises nothing."""
    for container in (None, "response_metadata"):  # LangChain's
        for name in ("model", "model_name", "model_version", "modelVersion", "model_id", "modelId"):
            try:
                found = _field(obj if container is None else _field(obj, container), name)
            except Exception:  # as in Usage.read
                continue
            if type(found) is str and 0 < len(found) <= _LONGEST_MODEL_NAME:
                return found
    return None


# --- the shapes -------------------------------------------------------------------------------------------------------


def _read(usage: object) -> Usage | None:
    """The first shape that it has. Raises ValueError where it contradicts itself."""
    if usage is None or isinstance(usage, str | bytes | int | float | list | tuple):
        return None
    for shape in (_own, _prompt_tokens, _input_tokens, _gemini, _bedrock):
        if (found := shape(usage)) is not None:
            return found
    return None


def _own(usage: object) -> Usage | None:
    """The fields of a `Usage`, as a mapping."""
    if not isinstance(usage, Mapping) or not {"usd", "cache_read_tokens"} <= usage.keys():
        return None
    return Usage(**{name: _count(usage, name) or 0 for name in _COUNTS}, usd=usage["usd"])


def _prompt_tokens(usage: object) -> Usage | None:
    """OpenAI's chat completions, and LiteLLM, which gives all providers these names: the prompt includes what was cached."""
    if (prompt := _count(usage, "prompt_tokens")) is None:
        return None
    details, more = _field(usage, "prompt_tokens_details"), _field(usage, "completion_tokens_details")
    return _whole(
        prompt,
        _count(usage, "completion_tokens"),
        _count(usage, "total_tokens"),
        cache_read=_most(
            (details, "cached_tokens"), (usage, "cache_read_input_tokens"), (usage, "prompt_cache_hit_tokens")
        ),
        cache_write=_most(
            (details, "cache_write_tokens"), (details, "cache_creation_tokens"), (usage, "cache_creation_input_tokens")
        ),
        long_cache_write=_long_writes(details),
        reasoning=_most((more, "reasoning_tokens"), (usage, "reasoning_tokens")),
        usd=_usd(usage),
    )


def _input_tokens(usage: object) -> Usage | None:
    """OpenAI's responses and LangChain (caches inside the input), Anthropic (beside it). What is there tells them apart."""
    if (given := _count(usage, "input_tokens")) is None:
        return None
    output, total = _count(usage, "output_tokens"), _count(usage, "total_tokens")
    details = _field(usage, "input_tokens_details", "input_token_details")
    more = _field(usage, "output_tokens_details", "output_token_details")
    beside_read = _most((usage, "cache_read_input_tokens"))
    beside_write = max(
        _most((usage, "cache_creation_input_tokens")), _writes_by_lifetime(_field(usage, "cache_creation"))
    )
    reasoning = _most((more, "reasoning_tokens"), (more, "thinking_tokens"), (more, "reasoning"))
    if details is None and (beside_read or beside_write):
        long_write = _long_writes(usage)
        return _whole(
            given + beside_read + beside_write, output, total, beside_read, beside_write, long_write, reasoning
        ) + _compactions(usage)
    if (beside_read or beside_write) and (output is None or total != given + output):
        raise ValueError("caches both inside the input and beside it")
    # LangChain's integrations empty cache_creation where they say the lifetimes, and put a service tier before the names
    tiers = ("", "priority_", "flex_")
    return _whole(
        given,
        output,
        total,
        cache_read=_most(
            (usage, "cache_read_tokens"),
            (details, "cached_tokens"),
            *((details, f"{tier}cache_read") for tier in tiers),
        ),
        cache_write=max(
            _most(
                (usage, "cache_write_tokens"),
                (details, "cache_write_tokens"),
                *((details, f"{tier}cache_creation") for tier in tiers),
            ),
            _writes_by_lifetime(details),
        ),
        long_cache_write=_long_writes(details),
        reasoning=max(reasoning, _most(*((more, f"{tier}reasoning") for tier in tiers))),
        usd=_usd(usage),
    ) + _compactions(usage)


def _gemini(usage: object) -> Usage | None:
    """Gemini: the prompt includes what was cached, thoughts stand beside the candidates. Its JSON leaves out what is 0."""
    if (prompt := _count(usage, "prompt_token_count", "promptTokenCount")) is None:
        return None
    answered = _count(
        usage, "candidates_token_count", "candidatesTokenCount", "response_token_count", "responseTokenCount"
    )
    thoughts = _count(usage, "thoughts_token_count", "thoughtsTokenCount")
    return _whole(
        prompt + (_count(usage, "tool_use_prompt_token_count", "toolUsePromptTokenCount") or 0),
        None if answered is None and thoughts is None else (answered or 0) + (thoughts or 0),
        _count(usage, "total_token_count", "totalTokenCount"),
        cache_read=_count(usage, "cached_content_token_count", "cachedContentTokenCount") or 0,
        reasoning=thoughts or 0,
    )


def _bedrock(usage: object) -> Usage | None:
    """Bedrock's Converse: caches beside the input."""
    if (given := _count(usage, "inputTokens")) is None:
        return None
    cache_read, cache_write = _most((usage, "cacheReadInputTokens")), _most((usage, "cacheWriteInputTokens"))
    long_write = 0
    for detail in _list(_field(usage, "cacheDetails")):
        if _field(detail, "ttl") != "5m":
            long_write += _count(detail, "inputTokens") or 0
    return _whole(
        given + cache_read + cache_write,
        _count(usage, "outputTokens"),
        _count(usage, "totalTokens"),
        cache_read,
        cache_write,
        long_write,
    )


def _whole(
    all_input: int,
    output: int | None,
    total: int | None,
    cache_read: int = 0,
    cache_write: int = 0,
    long_cache_write: int = 0,
    reasoning: int = 0,
    usd: Decimal | None = None,
) -> Usage:
    """Disjoint buckets of counts that include each other. Tokens of the total that no part tells of were put out: some
    services count reasoning only there."""
    if output is None and (total is None or total < all_input):
        raise ValueError("how much was put out is not said")
    if total is not None:
        output = max(output or 0, total - all_input)
    assert output is not None
    return Usage(
        input_tokens=all_input - cache_read - cache_write,
        cache_read_tokens=cache_read,
        cache_write_tokens=cache_write,
        output_tokens=output,
        reasoning_tokens=reasoning,
        usd=usd,
        long_cache_write_tokens=long_cache_write,
    )


def _compactions(usage: object) -> Usage:
    """Anthropic's calls that shortened the conversation: they are paid for, and stand in no other count."""
    found = _NOTHING
    for call in _list(_field(usage, "iterations")):
        kind = _field(call, "type")
        if kind == "message":
            continue  # counted in the whole
        counted = _input_tokens(call) if kind == "compaction" else None
        if counted is None:
            raise ValueError("a call inside the call that is not understood")
        found = found + counted
    return found


_LIFETIMES = {
    "ephemeral_5m_input_tokens": False,
    "ephemeral_30m_input_tokens": False,
    "ephemeral_1h_input_tokens": True,
    "ephemeral_12h_input_tokens": True,
    "ttl_30m_tokens": False,
    "ttl_12h_tokens": True,
}
"""How cache writes are told apart by how long they are kept, and which of them are long."""


def _writes_by_lifetime(detail: object, long_only: bool = False) -> int:
    return sum(_count(detail, name) or 0 for name, is_long in _LIFETIMES.items() if is_long or not long_only)


def _long_writes(obj: object) -> int:
    """The cache writes with a long life, from wherever a service tells of lifetimes."""
    places = ("cache_creation", "cache_write_tokens_details", "cache_creation_token_details")
    return max(
        _writes_by_lifetime(obj, long_only=True),
        *(_writes_by_lifetime(_field(obj, place), long_only=True) for place in places),
    )


# --- foreign objects --------------------------------------------------------------------------------------------------


def _field(obj: object, *names: str) -> object:
    """The first of these that a mapping or object has and that is not None."""
    for name in names:
        value = obj.get(name) if isinstance(obj, Mapping) else getattr(obj, name, None)
        if value is not None:
            return value
    return None


def _count(obj: object, *names: str) -> int | None:
    """The first of these counts that is there. Raises ValueError where it is no count."""
    value = _field(obj, *names)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS_OF_A_CALL:
        raise ValueError("a count of tokens that is none")
    return value


def _most(*places: tuple[object, str]) -> int:
    """One count that may stand in several places: the largest, 0 where it is in none."""
    return max(_count(obj, name) or 0 for obj, name in places)


def _list(value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MOST_DETAILS:
        raise ValueError("details that are no list")
    return value


def _usd(usage: object) -> Decimal | None:
    """The dollars that LiteLLM and OpenRouter say. With a key of the customer's own, the amount is a fee and not the cost."""
    cost = _field(usage, "cost")
    if cost is None or _field(usage, "is_byok"):
        return None
    from agent_run_ledger.rules.money import exact_usd

    try:
        return exact_usd(cost)
    except (TypeError, ValueError):
        return None  # the tokens are a fact all the same
