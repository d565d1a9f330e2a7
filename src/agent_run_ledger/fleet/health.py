"""How a worker is, over HTTP: for whoever restarts what hangs, and whoever counts what is ready. Nothing of a run is in it."""

from __future__ import annotations

import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from agent_run_ledger.errors import InvalidArguments

if TYPE_CHECKING:
    from agent_run_ledger.fleet.worker import Worker

_REQUEST_SECONDS = 5.0
"""How long somebody may take to ask."""
_POLL_SECONDS = 0.1


class Health:
    """`GET /healthz` is 200 while the worker's loop goes round, `GET /readyz` while it takes what is due; else 503, with the reason."""

    def __init__(self, worker: Worker, address: tuple[str, int]) -> None:
        _check(address)
        self._server = _Server(address, worker)
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment] # bytes are for Unix sockets
        """Where it listens; the port that was found where 0 was given."""
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="worker's health", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _check(address: object) -> None:
    match address:
        case (str(), int(port)) if type(port) is int and 0 <= port < 65536:
            return
    raise InvalidArguments(f'health is an address, like ("127.0.0.1", 8080), not {address!r}')


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], worker: Worker) -> None:
        self.worker = worker
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Answer)

    def server_bind(self) -> None:
        """Bind; without asking any name server how this host is called, which nobody needs here."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked has gone before he was answered."""


class _Answer(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "agent-run-ledger", ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        worker = self.server.worker
        asked = self.path.partition("?")[0]
        if asked not in ("/healthz", "/readyz"):
            self._answer(HTTPStatus.NOT_FOUND, {"reason": "there are /healthz and /readyz"})
            return
        trouble = worker.why_unhealthy() if asked == "/healthz" else worker.why_unready()
        said: dict[str, object] = {"ok": trouble is None, "state": worker.state}
        if trouble is not None:
            said["reason"] = trouble
        self._answer(HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE, said)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request that is answered here."""
        self._answer(HTTPStatus(code), {"reason": HTTPStatus(code).phrase})

    def _answer(self, status: HTTPStatus, said: dict[str, object]) -> None:
        body = json.dumps({"ok": False, **said}).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds, and are no news."""
