"""The demo's models: a scripted one, and any endpoint that speaks OpenAI's chat.completions. Both answer a conversation."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Protocol

from agent_run_ledger.demo.tools import DESCRIPTIONS, MONTH

Message = dict[str, Any]
CHARACTERS_PER_TOKEN = 4
_TIMEOUT_SECONDS = 300


class Model(Protocol):
    """Answers a conversation with the next message of the assistant, and says how many tokens that took."""

    name: str

    def __call__(self, model: str, messages: list[Message]) -> dict[str, Any]:
        """`{"message": ..., "usage": {"input_tokens": ..., "output_tokens": ..., "is_estimate": ...}}`."""


class ModelSettings(ValueError):
    """The environment names an endpoint, and something that is needed with it is missing."""


def chosen(environment: Mapping[str, str] = os.environ) -> Model:
    """The endpoint that OPENAI_BASE_URL names, with OPENAI_MODEL and OPENAI_API_KEY; without that variable the scripted model."""
    base = environment.get("OPENAI_BASE_URL", "")
    if not base:
        return ScriptedModel()
    name = environment.get("OPENAI_MODEL", "")
    if not name:
        raise ModelSettings("OPENAI_BASE_URL is set, so set OPENAI_MODEL too (or unset both for the scripted model)")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ModelSettings(f"OPENAI_BASE_URL must be an http or https address, not {base!r}")
    return EndpointModel(base, name, environment.get("OPENAI_API_KEY", ""))


def estimate(value: Any) -> int:
    """A rough count of tokens: one for each four characters of JSON, rounded up."""
    return -(-len(json.dumps(value, ensure_ascii=False)) // CHARACTERS_PER_TOKEN)


class EndpointModel:
    """A model behind `POST <base>/chat/completions`."""

    def __init__(self, base: str, name: str, key: str) -> None:
        self.name = name
        self._address = base.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        is_here = urllib.parse.urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))

    def __call__(self, model: str, messages: list[Message]) -> dict[str, Any]:
        asked = {"model": model, "messages": messages, "tools": DESCRIPTIONS}
        request = urllib.request.Request(self._address, json.dumps(asked).encode(), self._headers)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise RuntimeError(f"{self._address} answered {error.code}: {said}") from error
        given = answer["choices"][0]["message"]
        message: Message = {"role": "assistant", "content": given.get("content")}
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        return {"message": message, "usage": _usage(answer.get("usage"), asked, message)}


def _usage(given: Any, asked: Any, answered: Any) -> dict[str, Any]:
    try:
        return {
            "input_tokens": int(given["prompt_tokens"]),
            "output_tokens": int(given["completion_tokens"]),
            "is_estimate": False,
        }
    except (TypeError, KeyError, ValueError):
        return {"input_tokens": estimate(asked), "output_tokens": estimate(answered), "is_estimate": True}


class ScriptedModel:
    """No model at all: a bookkeeper's rules over the conversation. It decides from what it was told, as a model would."""

    name = "scripted"

    def __call__(self, model: str, messages: list[Message]) -> dict[str, Any]:
        message = _next(messages)
        asked = {"model": model, "messages": messages, "tools": DESCRIPTIONS}
        usage = {"input_tokens": estimate(asked), "output_tokens": estimate(message), "is_estimate": True}
        return {"message": message, "usage": usage}


def _next(messages: list[Message]) -> Message:
    told = dict(_told(messages))
    for name in ("list_invoices", "read_bank"):
        if (name, MONTH) not in told:
            return _call(messages, name, month=MONTH)
    remarks = []
    for listed in told["list_invoices", MONTH]:
        number = listed["number"]
        for name in ("read_invoice", "find_match"):
            if (name, number) not in told:
                return _call(messages, name, number=number)
        found = told["find_match", number]
        if not found["payments"]:
            remarks.append(f"{number} of {listed['customer']} is unpaid ({listed['gross']} EUR).")
            continue
        paid = found["payments"][0]
        short = -Decimal(found["difference"])
        if ("post_entry", number) not in told:
            text = f"Payment of {number} by {paid['counterparty']}, {paid['date']}"
            charges = f"{short:.2f}"
            entry = {"bank_line": paid["line"], "received": paid["amount"], "charges": charges, "text": text}
            return _call(messages, "post_entry", invoice=number, **entry)
        if short:
            remarks.append(f"{number} came {short} EUR short; booked as bank charges.")
        if found["matched_by"] != "reference":
            remarks.append(f"{number} was matched by {found['matched_by']}; its reference says {paid['reference']!r}.")
        remarks += [
            f"{number} was paid again on bank line {again['line']}; not booked." for again in found["payments"][1:]
        ]
    booked = sum(name == "post_entry" for name, _ in told)
    return {"role": "assistant", "content": "\n".join([f"{booked} payments of {MONTH} are booked.", *remarks])}


def _told(messages: list[Message]) -> Iterator[tuple[tuple[str, str], Any]]:
    """What each call came to, by tool and first argument."""
    asked: dict[str, tuple[str, str]] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            first = next(iter(json.loads(call["function"]["arguments"]).values()))
            asked[call["id"]] = (call["function"]["name"], first)
        if message["role"] == "tool":
            yield asked[message["tool_call_id"]], json.loads(message["content"])


def _call(messages: list[Message], name: str, **arguments: str) -> Message:
    number = 1 + sum(message["role"] == "tool" for message in messages)
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }
