"""An HTTP client to the byte, sync and async, that says where it stands, so that a process can be killed exactly there."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from http.client import RemoteDisconnected
from typing import Any, NamedTuple

Moment = Callable[[str], None]
"""Is told of each moment of a request that is passed."""

BEFORE_REQUEST, BEFORE_REPLY, AFTER_REPLY = "before the request", "before the reply", "after the reply"
PATIENCE_SECONDS = 30.0


class Refused(Exception):
    """The receiver answered with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class Answer(NamedTuple):
    status: int
    body: bytes

    def value(self) -> Any:
        """What it says. Raises `Refused` where it is an error."""
        if self.status >= 400:
            raise Refused(self.status)
        return json.loads(self.body)


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request. Headers are spelled with underscores."""
    lines = [f"{method} {path} HTTP/1.1", "Host: payments", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _nowhere(moment: str) -> None:
    """Nobody wants to know."""


def ask(port: int, sent: bytes, passed: Moment = _nowhere, timeout: float = PATIENCE_SECONDS) -> Answer:
    """Send the bytes and read the answer. Raises `TimeoutError`, `ConnectionError`."""
    passed(BEFORE_REQUEST)
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        connection.sendall(sent)
        with connection.makefile("rb") as reader:
            reply = reader.read(1)  # so it has come, and the service is done
            passed(BEFORE_REPLY)
            reply += reader.read()
    passed(AFTER_REPLY)
    return _answer(reply)


async def aask(port: int, sent: bytes, passed: Moment = _nowhere, timeout: float = PATIENCE_SECONDS) -> Answer:
    """`ask` in an event loop."""
    passed(BEFORE_REQUEST)
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            reply = await reader.read(1)
            passed(BEFORE_REPLY)
            reply += await reader.read()
        finally:
            writer.close()
    passed(AFTER_REPLY)
    return _answer(reply)


def _answer(reply: bytes) -> Answer:
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head:
        raise RemoteDisconnected("the connection was closed without an answer")
    return Answer(int(head.split(b" ", 2)[1]), body)
