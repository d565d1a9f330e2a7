"""Conversations: messages of text as people write it, and of text that nothing can be deduced from."""

from __future__ import annotations

import json
import random
import string
from typing import Any

_WORDS = ["".join(random.Random(number).choices(string.ascii_lowercase, k=2 + number % 9)) for number in range(5_000)]


def text(rng: random.Random, size: int) -> str:
    """Words between spaces, drawn from five thousand: much like a language, and not as repetitive as one."""
    words = rng.choices(_WORDS, k=size // 3 + 1)
    return " ".join(words)[:size]


def noise(rng: random.Random, size: int) -> str:
    """Hexadecimal digits: half a byte of news in each."""
    return rng.randbytes(size // 2 + 1).hex()[:size]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def as_payload(value: Any) -> bytes:
    """As the ledger writes it: canonical JSON."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
