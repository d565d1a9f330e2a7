"""The outside world as a payment service: idempotency keys, a status endpoint, a log of every request, and faults on demand.

Run as a module it is the service, in a process of its own on the loopback interface. `service()` starts it for a test.

    POST /keyed          makes a resource, once for each Idempotency-Key, for as long as it remembers the key
    POST /unkeyed        makes a resource each time; the key is kept with it as a reference, and protects nobody
    GET  /quotes/...     changes nothing
    POST /model          a model: its answer is another one each time it is asked
    GET  /by-key/<key>   the status endpoint: the first resource that was made with this key, or 404
    POST /admin          orders of the test: `Service` has a method for each
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from support.processes import environment
from support.wire import ask, request
from support.witness import Witness

WINDOW = 24 * 3600.0
"""Seconds for which `/keyed` remembers a key, by the service's own clock, which moves only when it is told."""

Deed = Literal["hold", "commit and hold", "504", "commit and 504", "close", "commit and close"]


@dataclass
class Fault:
    """What befalls some requests. `commit` says that the resource is made before."""

    do: Deed
    path: str
    """The beginning of the paths that it befalls."""
    first: int = 1
    """The first request that it befalls, counted from 1 over those with such a path since the fault was set."""
    times: int = 1
    each: bool = False
    """Whether every single path counts for itself, as `/by-key/` does for each key."""
    seen: Counter[str] = field(default_factory=Counter)

    def befalls(self, path: str) -> bool:
        if not path.startswith(self.path):
            return False
        counted = path if self.each else self.path
        self.seen[counted] += 1
        return self.first <= self.seen[counted] < self.first + self.times


@dataclass(frozen=True)
class Request:
    """One request as it came, to the byte."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def key(self) -> str | None:
        return dict(self.headers).get("Idempotency-Key")

    @property
    def bytes(self) -> tuple[Any, ...]:
        """All of it but when it came: equal for two requests that nobody could tell apart."""
        return self.method, self.path, self.headers, self.body


@dataclass(frozen=True)
class Resource:
    """What was made in the outside world."""

    number: int
    path: str
    key: str | None
    body: bytes


class Service:
    """The service as a test sees it: its log, what it made, and its faults."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, port: int) -> None:
        self._process = process
        self._folder = folder
        self.name, self._log = "requests", Witness(folder / "requests")
        self.port = port

    def begin(self, name: str = "requests") -> None:
        """Forget everything: no resources, no keys, no faults, and a log of its own for what comes."""
        self._order(begin=name)
        self.name, self._log = name, Witness(self._folder / name)

    def fault(self, do: Deed, path: str, first: int = 1, times: int = 1, *, each: bool = False) -> None:
        """Befall the requests to come, as `Fault` says; the first fault that fits is the one."""
        self._order(fault={"do": do, "path": path, "first": first, "times": times, "each": each})

    def mend(self) -> None:
        """No faults any more. What is held stays held."""
        self._order(mend=True)

    def advance(self, seconds: float) -> None:
        """Let its clock go on, so that it forgets the keys whose window is over."""
        self._order(advance=seconds)

    def let_go(self) -> None:
        """Answer every request that is held."""
        self._order(let_go=True)

    def requests(self, *paths: str) -> list[Request]:
        """What came, in order: those whose path begins as one of these, or all."""
        return [
            Request(
                note["number"],
                note["method"],
                note["path"],
                tuple((name, value) for name, value in note["headers"]),
                note["body"].encode("latin-1"),
            )
            for note in self._log.notes("request")
            if note["path"].startswith(paths or "")
        ]

    def resources(self) -> list[Resource]:
        """What was made, in order."""
        return [
            Resource(note["number"], note["path"], note["key"], note["body"].encode("latin-1"))
            for note in self._log.notes("created")
        ]

    def conflicts(self) -> list[str]:
        """The keys that came with another body than the first time, which the service refused."""
        return [note["key"] for note in self._log.notes("conflict")]

    def _order(self, **order: Any) -> None:
        assert ask(self.port, request("POST", "/admin", json.dumps(order).encode())).status == 200


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    """The service in a process of its own, whose logs lie in `folder`; it ends with the block, at the latest with the test."""
    command = [sys.executable, "-m", "support.payments", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Service(process, folder, json.loads(process.stdout.readline())["port"])
        process.stdin.close()


# --- the service's own process ----------------------------------------------------------------------------------------


@dataclass
class World:
    """What the service knows. Threads take its lock."""

    log: Witness
    lock: threading.Lock = field(default_factory=threading.Lock)
    faults: list[Fault] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    remembered: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each key: when it came first, and the number of the resource that was made for it."""
    now: float = 0.0
    requests: int = 0
    questions: int = 0

    def take(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Deed | None:
        """Write a request down. What befalls it."""
        self.requests += 1
        text = body.decode("latin-1")
        self.log.note("request", number=self.requests, method=method, path=path, headers=headers, body=text)
        befalling = [fault.do for fault in self.faults if fault.befalls(path)]
        return befalling[0] if befalling else None

    def answer(self, method: str, path: str, key: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        """Do what was asked for: the status and the answer."""
        if path.startswith("/by-key/"):
            found = next((made for made in self.made if made["key"] == path.removeprefix("/by-key/")), None)
            return (200, found["answer"]) if found is not None else (404, {"error": "no such key"})
        if path.startswith("/quotes/"):
            return 200, {"quote": path.removeprefix("/quotes/")}
        if path == "/model":
            self.questions += 1
            return 200, {"customer": f"customer-{self.questions}", "amount": 100 * self.questions}
        if method == "POST" and path == "/keyed":
            return self._once(key, body)
        if method == "POST" and path == "/unkeyed":
            return 200, self._make(path, key, body)["answer"]
        return 404, {"error": "no such page"}

    def _once(self, key: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        if key is None:
            return 400, {"error": "an Idempotency-Key is needed"}
        since, number = self.remembered.get(key, (0.0, 0))
        if not number or self.now - since > WINDOW:
            made = self._make("/keyed", key, body)
            self.remembered[key] = self.now, made["number"]
        else:
            made = self.made[number - 1]
            if made["body"] != body.decode("latin-1"):
                self.log.note("conflict", key=key)
                return 422, {"error": "this key came with another body"}
        return 200, made["answer"]

    def _make(self, path: str, key: str | None, body: bytes) -> dict[str, Any]:
        number = len(self.made) + 1
        resource = {"number": number, "path": path, "key": key, "body": body.decode("latin-1")}
        self.log.note("created", **resource)
        resource["answer"] = {"refund": number, "of": json.loads(body)}
        self.made.append(resource)
        return resource


class Handler(BaseHTTPRequestHandler):
    world: World
    folder: Path
    wake: tuple[int, int]
    """A pipe whose end is closed to wake whatever is held."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.path == "/admin":
            self.obey(json.loads(body))
            self.answer(200, {})
            return
        world, woken = self.world, self.wake[0]
        with world.lock:
            fault = world.take(self.command, self.path, list(self.headers.items()), body)
            status, answer = 504, {"error": "no answer in time"}
            if fault is None or fault.startswith("commit"):
                status, answer = world.answer(self.command, self.path, self.headers.get("Idempotency-Key"), body)
        if fault is not None and fault.endswith("hold"):
            readable, _, _ = select.select([self.connection, woken], [], [])
            fault = None if woken in readable else "close"
        if fault is not None and fault.endswith("close"):
            self.close_connection = True
        else:
            self.answer(status if fault is None else 504, answer)

    do_GET = do_POST = handle_any  # noqa: N815 - these names are the standard library's

    def obey(self, order: dict[str, Any]) -> None:
        with self.world.lock:
            match order:
                case {"begin": name}:
                    Handler.world = World(Witness(self.folder / name))
                case {"fault": fault}:
                    self.world.faults.append(Fault(**fault))
                case {"mend": _}:
                    self.world.faults.clear()
                case {"advance": seconds}:
                    self.world.now += seconds
                case {"let_go": _}:
                    os.close(self.wake[1])
                    Handler.wake = os.pipe()

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The log is a file."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # hundreds of runs may ask at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks may be killed at any time, and then nobody is there to answer."""


def say(news: dict[str, Any]) -> None:
    """Tell whoever started the service."""
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    Handler.world = World(Witness(Handler.folder / "requests"))
    Handler.wake = os.pipe()
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say({"port": server.server_address[1]})
    sys.stdin.buffer.read()  # ends when whoever started the service closes it or dies
    os._exit(0)  # what is held is not waited for


if __name__ == "__main__":
    main()
