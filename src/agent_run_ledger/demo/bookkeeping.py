"""The demo's outside world: a small bookkeeping service that deduplicates on Idempotency-Key and logs every request."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import threading
from decimal import Decimal, InvalidOperation
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number  INTEGER PRIMARY KEY,
    key     TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    invoice TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    id     INTEGER PRIMARY KEY,
    method TEXT NOT NULL,
    path   TEXT NOT NULL,
    key    TEXT,
    step   INTEGER,
    answer INTEGER NOT NULL,
    note   TEXT NOT NULL
);
"""


class Refused(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Books:
    """The service's own database: entries, and a log of every request, whatever was answered."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.executescript(SCHEMA)

    def post(self, key: str, step: int | None, body: str) -> tuple[int, bool]:
        """Book an entry once per key. Returns its number, and whether it was booked before."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                found = self._db.execute("SELECT number, request FROM entries WHERE key = ?", (key,)).fetchone()
                if found is not None and found[1] != body:
                    raise Refused(409, "this key was used for another entry")
                if found is None:
                    invoice = balanced(body)
                    statement = "INSERT INTO entries (key, request, invoice) VALUES (?, ?, ?) RETURNING number"
                    number = self._db.execute(statement, (key, body, invoice)).fetchone()[0]
                else:
                    number = found[0]
                self._log("POST", "/entries", key, step, 200, "booked" if found is None else "deduplicated")
                self._db.execute("COMMIT")
            except BaseException:
                self._db.rollback()
                raise
        return number, found is not None

    def log(self, method: str, path: str, key: str | None, step: int | None, answer: int, note: str) -> None:
        with self._lock:
            self._log(method, path, key, step, answer, note)

    def _log(self, *row: Any) -> None:
        self._db.execute("INSERT INTO requests (method, path, key, step, answer, note) VALUES (?, ?, ?, ?, ?, ?)", row)


def balanced(body: str) -> str:
    """The invoice that an entry is about. Raises `Refused` unless its debits equal its credits."""
    try:
        entry = json.loads(body)
        sums = {
            side: sum((Decimal(line.get(side, "0")) for line in entry["lines"]), Decimal())
            for side in ("debit", "credit")
        }
        invoice = str(entry["invoice"])
    except (ValueError, KeyError, TypeError, AttributeError, InvalidOperation) as error:
        raise Refused(422, "an entry is an object with an invoice and lines") from error
    if sums["debit"] != sums["credit"] or not sums["debit"]:
        raise Refused(422, f"debits are {sums['debit']}, credits {sums['credit']}")
    return invoice


class Holding:
    """Holds back one answer: that to the first entry booked for step `from_step` or a later one, until its sender is gone."""

    def __init__(self, from_step: int | None) -> None:
        self._from_step = from_step
        self._lock = threading.Lock()

    def takes(self, step: int | None) -> bool:
        with self._lock:
            if self._from_step is None or step is None or step < self._from_step:
                return False
            self._from_step = None
            return True


class Handler(BaseHTTPRequestHandler):
    books: Books
    holding: Holding

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        key, step = self.headers.get("Idempotency-Key"), self._step()
        try:
            if self.path != "/entries":
                raise Refused(404, "there is no such page")
            if not key:
                raise Refused(400, "an entry needs an Idempotency-Key")
            number, was_booked = self.books.post(key, step, body)
        except Refused as refused:
            self._refuse(refused, key, step)
            return
        if not was_booked and self.holding.takes(step):
            say({"held": {"key": key, "step": step, "number": number}})
            self.connection.recv(1)  # returns when the sender is gone
            self.close_connection = True
            return
        self._answer(200, {"entry": number})

    def do_GET(self) -> None:
        self._refuse(Refused(404, "there is no such invoice"), None, self._step())

    def _step(self) -> int | None:
        given = self.headers.get("Agent-Step", "")
        return int(given) if given.isdecimal() else None

    def _refuse(self, refused: Refused, key: str | None, step: int | None) -> None:
        self.books.log(self.command, self.path, key, step, refused.status, str(refused))
        self._answer(refused.status, {"error": str(refused)})

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The log is in the database."""


def say(news: dict[str, Any]) -> None:
    """Tell whoever started the service."""
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Return when standard input ends, which is when whoever started the service closes it or dies."""
    while sys.stdin.buffer.read(1024):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", required=True, metavar="FILE", help="the service's own SQLite file")
    parser.add_argument(
        "--hold-from-step", type=int, metavar="N", help="hold one answer back, so that a crash can be timed"
    )
    given = parser.parse_args()
    Handler.books = Books(given.books)
    Handler.holding = Holding(given.hold_from_step)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say({"url": f"http://127.0.0.1:{server.server_address[1]}"})
    end_with_parent()
    os._exit(0)  # an answer that is held back is not waited for; what was booked is committed


if __name__ == "__main__":
    main()
