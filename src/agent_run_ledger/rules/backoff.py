"""How long to wait before a retry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_run_ledger.model import RetryPolicy


def delay(retry: int, policy: RetryPolicy, draw: float, previous: float = 0.0) -> float:
    """Seconds before retry `retry` (from 0), for a `draw` from [0, 1).

    Full jitter: anywhere between nothing and the capped exponential, so that the waits do not pile up at the cap. Decorrelated:
    `min(cap, uniform(base, 3 * previous))`, where `previous` is the wait before (the base where there was none).
    """
    if policy.jitter == "decorrelated":
        top = max(policy.base, 3 * previous)
        return min(policy.cap, policy.base + draw * (top - policy.base))
    # 2.0**1024 overflows a float; any cap is reached long before
    return draw * min(policy.cap, policy.base * 2.0 ** min(retry, 1000))
