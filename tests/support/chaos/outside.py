"""The outside world: a process that models, shops and banks are in, which does what it is asked, not always answers, and forgets nothing.

It is asked over a Unix socket, one line of JSON for each question. Standard library only, for it is a script as well.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.chaos.journal import Journal

PATIENCE_SECONDS = 1.0
"""How long who asks waits for an answer."""
_LATE_SECONDS = 1.6
_NO_ANSWER = "it did not answer in time"

Question = dict[str, Any]
Answer = dict[str, Any]


# --- asking it --------------------------------------------------------------------------------------------------------


class Outside:
    """The way to it, for programs. What comes back is the answer's value, or one of the errors that a network gives."""

    def __init__(self, address: str | Path) -> None:
        self._address = str(address)

    def ask(self, what: str, **about: Any) -> Any:
        """Ask, and wait for the answer. Raises `ConnectionRefusedError`: it will not; `ConnectionResetError`, `TimeoutError`: who knows."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(PATIENCE_SECONDS)
            asking.connect(self._address)
            asking.sendall(_line({"what": what, **about}))
            try:
                said = asking.makefile("rb").readline()
            except TimeoutError:
                raise TimeoutError(_NO_ANSWER) from None
        return _value(said)

    async def aask(self, what: str, **about: Any) -> Any:
        """`ask` in an event loop."""
        reader, writer = await asyncio.open_unix_connection(self._address)
        try:
            writer.write(_line({"what": what, **about}))
            said = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        except TimeoutError:
            raise TimeoutError(_NO_ANSWER) from None
        finally:
            writer.close()
        return _value(said)


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _value(line: bytes) -> Any:
    if not line:
        raise ConnectionResetError("it hung up without an answer")
    said = json.loads(line)
    if "refused" in said:
        raise ConnectionRefusedError(said["refused"])
    return said["value"]


# --- the world --------------------------------------------------------------------------------------------------------


class World:
    """What is outside: it notes each question before it does anything, and each effect before it answers.

    A shop (`order`) knows a key again and does nothing twice. A bank (`pay`) does what it is asked as often as it is asked; whoever asks
    it first for a `receipt` is told whether it has seen the key, and when it has said that it has not, it refuses the attempts that were
    on their way by then: without that no receipt could be relied upon, for what is on its way cannot be seen.
    """

    def __init__(self, journal: Journal, seed: int, *, is_good: bool = False) -> None:
        self._journal = journal
        self._seed = seed
        self._is_good = is_good
        self._lock = threading.Lock()
        self._done: dict[str, Any] = {}
        self._absent_up_to: dict[str, int] = {}
        self._asked = Counter[tuple[str, str]]()

    def hear(self, question: Question) -> tuple[Answer | None, float]:
        """Do what is asked. The answer, None where it hangs up instead, and after how many seconds it comes."""
        what, key = question["what"], question["key"]
        with self._lock:
            self._asked[what, key] += 1
            chance = random.Random(f"{self._seed} {what} {key} {self._asked[what, key]}")
            mood = (
                "good" if self._is_good else chance.choices(["good", "refuses", "hangs up", "late"], [85, 5, 5, 5])[0]
            )
            self._journal.note("asked", mood=mood, **question)
            if mood == "refuses":
                return {"refused": "not now"}, 0.0
            answer = self._do(what, key, question, chance)
        self._journal.sync()
        if mood == "hangs up":
            return None, 0.0
        thinks = 0.0 if self._is_good else chance.uniform(0.0, 0.03)
        return answer, _LATE_SECONDS if mood == "late" else thinks

    def _do(self, what: str, key: str, question: Question, chance: random.Random) -> Answer:
        if what == "receipt":
            return {"value": self._receipt(key, question["attempt"], chance)}
        if what == "temper":  # of programs that fail twice and then do not
            return {"value": self._asked[what, key] <= 2}
        if what == "order" and key in self._done:
            self._journal.note("known", **question)
            return {"value": self._done[key]}
        if what == "pay" and question["attempt"] <= self._absent_up_to.get(key, 0):
            self._journal.note("overtaken", **question)
            return {"refused": "it was said of this attempt that it never came"}
        value = f"{what} {uuid.uuid4().hex[:12]}"  # a model never says the same twice, and a bank has a number for everything
        if what in ("order", "pay"):
            self._done[key] = value
            self._journal.note("effect", value=value, **question)
        return {"value": value}

    def _receipt(self, key: str, attempt: int, chance: random.Random) -> list[str]:
        if not self._is_good and chance.random() < 0.1:
            return ["unknown"]
        if key in self._done:
            return ["found", self._done[key]]
        self._absent_up_to[key] = attempt
        return ["absent"]


class _Door(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, address: str, world: World) -> None:
        self.world = world
        super().__init__(address, _Guest)

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked has gone before he was answered."""


class _Guest(socketserver.StreamRequestHandler):
    server: _Door

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line.endswith(b"\n"):
            return  # who asked was killed over it
        answer, seconds = self.server.world.hear(json.loads(line))
        time.sleep(seconds)
        if answer is not None:
            with suppress(OSError):
                self.wfile.write(_line(answer))


@contextmanager
def opened(address: Path, world: World) -> Iterator[Outside]:
    """The world behind its door, in threads of this process."""
    with _Door(str(address), world) as door:
        threading.Thread(target=door.serve_forever, args=[0.05], daemon=True).start()
        try:
            yield Outside(address)
        finally:
            door.shutdown()


@contextmanager
def started(folder: Path, seed: int, environment: dict[str, str]) -> Iterator[tuple[Path, Path]]:
    """The world as a process of its own: the path of its door, and of its journal, which is on the disk before it answers."""
    door, journal = folder / "door", folder / "outside.journal"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(door), str(journal), str(seed)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield door, journal
    finally:
        process.communicate()  # it ends when nobody holds its door any more
        assert process.returncode == 0


def main(door: str, journal: str, seed: str) -> None:
    with opened(Path(door), World(Journal(Path(journal)), int(seed))):
        sys.stdout.write("open\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
