"""Values of options: what they may be, and the line that says what is wrong with them."""

from __future__ import annotations

import argparse
import math

from agent_run_ledger.cli.terminal import plain


def count(text: str) -> int:
    """A whole number, 0 too."""
    return _whole(text, 0)


def number(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, not {plain(text)[:60]!r}")
    return int(text)


def money(text: str) -> str:
    """An amount of US dollars above 0, as it is written: it stays exact."""
    from agent_run_ledger import Budget

    try:
        Budget(usd=text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"an amount of US dollars above 0 is needed, not {plain(text)[:60]!r}"
        ) from None
    return text


def seconds(text: str) -> float:
    """A number of seconds, 0 too."""
    given = _float(text)
    if not 0 <= given < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds of at least 0 is needed, not {plain(text)[:60]!r}")
    return given


_AGES = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def age(text: str) -> float:
    """A span of time such as `30d`, in seconds."""
    given = _float(text[:-1]) * _AGES.get(text[-1:], math.nan)
    if not 0 <= given < math.inf:
        raise argparse.ArgumentTypeError(f"a time such as 30d, 12h, 90m or 45s is needed, not {plain(text)[:60]!r}")
    return given


def some_seconds(text: str) -> float:
    """A number of seconds that are some."""
    given = _float(text)
    if not 0 < given < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, not {plain(text)[:60]!r}")
    return given


def address(text: str) -> tuple[str, int]:
    """Where to listen: `HOST:PORT`, `[::1]:PORT`, or a port of this machine's own."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"an address like 127.0.0.1:8080 is needed, not {plain(text)[:60]!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
