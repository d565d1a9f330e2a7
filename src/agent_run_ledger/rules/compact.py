"""JSON text without a space in it, by an encoder that is built once and not anew for every call."""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def encoder(*, sort_keys: bool) -> Callable[[Any], str]:
    """A function from plain data to JSON text: UTF-8 as it is, no NaN, no cycle check.

    `json.JSONEncoder.encode` makes a new C encoder each time, a third of the price of a small object. Where this Python's `json` has
    no C encoder of the usual shape, the slower way is taken.
    """
    usual = json.JSONEncoder(
        ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False, check_circular=False
    )
    try:
        chunks = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
            None, usual.default, json.encoder.encode_basestring, None, ":", ",", sort_keys, False, False
        )
        probe = {"b": [1, None, 0.5], "a": "é"}
        if "".join(chunks(probe, 0)) != usual.encode(probe):
            return usual.encode
    except (AttributeError, TypeError):
        return usual.encode
    join = "".join
    return lambda value: join(chunks(value, 0))
