"""A network between PostgreSQL's clients and a server: it fails when it is told to, and else hands on every byte as it is.

It reads as much of the protocol as it takes to know which reply belongs to which request: the kind and the length of each message,
and the texts of statements. Connections are not encrypted.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from types import TracebackType
from typing import Literal, Self

from support.daemons import PATIENCE_SECONDS, free_port
from support.postgres import Address, dsn

Matches = Callable[[str], bool]
"""Whether it is this statement, by its text."""


def is_commit(statement: str) -> bool:
    """Whether it is a COMMIT and nothing else."""
    return statement.strip(" \n;").upper() == "COMMIT"


def is_any(_: str) -> bool:
    """Whether it is a statement at all."""
    return True


class Loss:
    """What will be lost on its way, once: the request to do a statement, or the reply to it."""

    def __init__(self, what: Literal["request", "reply"], of: Matches) -> None:
        self.what, self.of = what, of
        self.statement: str | None = None
        """The text of the one that it met."""
        self._has_happened = threading.Event()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Return once it has happened and the connection is cut; False where it has not within so many seconds."""
        return self._has_happened.wait(seconds)

    def happen(self) -> None:
        self._has_happened.set()


class Proxy:
    """Listens on a port of 127.0.0.1 and hands every connection on to the server at `upstream`."""

    def __init__(self, upstream: Address) -> None:
        self.upstream = upstream
        self.address = Address("127.0.0.1", free_port())
        self._news = threading.Condition()
        self._connections: set[_Connection] = set()
        self._losses: list[Loss] = []
        self._listener: socket.socket | None = None
        self._is_black_hole = False
        self._delay: Callable[[], float] = float

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self.cut()

    def dsn(self, database: str = "postgres", **parameters: str) -> str:
        """A URL for a client that goes this way."""
        return dsn(database, self.address, **parameters)

    # --- what a test tells it -----------------------------------------------------------------------------------------

    def cut(self) -> int:
        """End all connections, at both ends, and say how many there were. New ones are let in."""
        with self._news:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()
        return len(connections)

    def refuse(self) -> None:
        """Let nobody in: who tries is refused at once. Connections that stand go on."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # so that nobody waits in `accept` any more
            self._listener.close()
            self._listener = None

    def accept(self) -> None:
        """Let clients in."""
        if self._listener is None:
            self._listener = socket.create_server(tuple(self.address), backlog=128)
            threading.Thread(target=self._serve, args=[self._listener], daemon=True).start()

    def delay(self, seconds: Callable[[], float]) -> None:
        """Let every message take so much longer, in either direction; `seconds` is asked for each."""
        with self._news:
            self._delay = seconds

    def black_hole(self) -> None:
        """Hand nothing on and end nothing: who waits for an answer waits. What is sent meanwhile arrives after `heal`."""
        with self._news:
            self._is_black_hole = True

    def lose_request(self, of: Matches = is_commit) -> Loss:
        """Cut the connection instead of handing on the next statement like this one: nothing of it is done."""
        return self._lose(Loss("request", of))

    def lose_reply(self, of: Matches = is_commit) -> Loss:
        """Let the server do the next statement like this one, swallow its reply and cut the connection: the client cannot know."""
        return self._lose(Loss("reply", of))

    def heal(self) -> None:
        """Be a good network from now on, and let clients in. What was cut stays cut."""
        with self._news:
            self._losses.clear()
            self._is_black_hole = False
            self._delay = float
            self._news.notify_all()
        self.accept()

    def trouble(self, chance: random.Random) -> str:
        """Do one of the things that networks do, which `chance` chooses, and say which. `heal` ends those that last."""
        times, longest = random.Random(chance.random()), chance.choice([0.001, 0.01, 0.05])
        of = chance.choice([is_commit, is_any])
        troubles: dict[str, Callable[[], object]] = {
            "cut": self.cut,
            "refuse": self.refuse,
            "black hole": self.black_hole,
            "delay": lambda: self.delay(lambda: times.uniform(0.0, longest)),
            "lose request": lambda: self.lose_request(of),
            "lose reply": lambda: self.lose_reply(of),
        }
        name = chance.choice(list(troubles))
        troubles[name]()
        return name

    # --- what its connections ask -------------------------------------------------------------------------------------

    def take_loss(self, statement: str) -> Loss | None:
        """The loss that is meant for this statement, which no other meets any more."""
        with self._news:
            for loss in self._losses:
                if loss.of(statement):
                    loss.statement = statement
                    self._losses.remove(loss)
                    return loss
        return None

    def hold(self, connection: _Connection) -> None:
        """Return when the connection's next message may go on."""
        with self._news:
            seconds = self._delay()
        if seconds > 0:
            connection.is_cut.wait(seconds)
        with self._news:
            self._news.wait_for(lambda: not self._is_black_hole or connection.is_cut.is_set())

    def forget(self, connection: _Connection) -> None:
        """It has ended."""
        with self._news:
            self._connections.discard(connection)

    def wake(self) -> None:
        """Let those who are held look again."""
        with self._news:
            self._news.notify_all()

    def _lose(self, loss: Loss) -> Loss:
        with self._news:
            self._losses.append(loss)
        return loss

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection = _Connection(self, listener.accept()[0])
                with self._news:
                    self._connections.add(connection)
                threading.Thread(target=connection.serve, daemon=True).start()


_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102


class _Connection:
    """One client's connection, and the one to the server that was made for it."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        path = proxy.upstream.path
        self._server = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
        self._target = path or tuple(proxy.upstream)
        self.is_cut = threading.Event()
        self._mutex = threading.Lock()
        self._prepared: dict[bytes, str] = {}
        self._bound: dict[bytes, str] = {}
        self._met: Loss | None = None
        """The loss of the reply to what the client has asked for since it last waited for an answer."""
        self._awaited: deque[Loss | None] = deque([None])
        """For each time that the server will say that it is ready, what becomes of the reply up to there; the first is to the log-in."""

    def serve(self) -> None:
        """Hand on what comes until one side has ended."""
        try:
            with self._client, self._server, suppress(OSError, EOFError):
                self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._server.connect(self._target)
                with self._client.makefile("rb") as asked, self._server.makefile("rb") as answered:
                    if self._has_logged_in(asked, answered):
                        back = threading.Thread(target=self._hand_back, args=[answered], daemon=True)
                        back.start()
                        try:
                            self._hand_on(asked)
                        finally:
                            self.cut()
                            back.join()
        finally:
            self._proxy.forget(self)

    def cut(self) -> None:
        """End it, at both ends."""
        self.is_cut.set()
        self._proxy.wake()
        for end in (self._client, self._server):
            with suppress(OSError):  # it has ended already
                end.shutdown(socket.SHUT_RDWR)

    def _has_logged_in(self, asked: BufferedReader, answered: BufferedReader) -> bool:
        """Hand on what comes before messages have kinds. False where the client came only to cancel a statement."""
        while True:
            head = _read(asked, 8)
            length, code = struct.unpack("!II", head)
            self._send(self._server, head + _read(asked, length - 8))
            if code == _CANCEL_REQUEST:
                answered.read()  # until the server has closed it
                return False
            if code not in (_SSL_REQUEST, _GSS_REQUEST):
                return True
            answer = _read(answered, 1)
            if answer != b"N":
                raise AssertionError(f"the server answers {answer!r}: nothing that is encrypted can be read here")
            self._send(self._client, answer)

    def _hand_on(self, asked: BufferedReader) -> None:
        while True:
            kind, message = _message(asked)
            statement = self._statement(kind, message[5:])
            loss = self._proxy.take_loss(statement) if statement is not None else None
            if loss is not None and loss.what == "request":
                self.cut()
                loss.happen()
                return
            with self._mutex:
                self._met = loss or self._met
                if kind in b"QSF":
                    self._awaited.append(self._met)
                    self._met = None
            self._send(self._server, message)

    def _statement(self, kind: bytes, body: bytes) -> str | None:
        """The text of the statement that this message asks to do, if it does."""
        if kind == b"Q":
            return body.rstrip(b"\0").decode()
        if kind == b"P":
            name, text = body.split(b"\0", 2)[:2]
            self._prepared[name] = text.decode()
        elif kind == b"B":
            portal, name = body.split(b"\0", 2)[:2]
            self._bound[portal] = self._prepared.get(name, "")
        elif kind == b"E":
            return self._bound.get(body.split(b"\0", 1)[0], "")
        return None

    def _hand_back(self, answered: BufferedReader) -> None:
        with suppress(OSError, EOFError):
            while True:
                kind, message = _message(answered)
                with self._mutex:
                    loss = self._awaited[0] if self._awaited else self._met
                    if kind == b"Z":
                        self._awaited.popleft()
                if loss is None:
                    self._send(self._client, message)
                elif kind == b"Z":
                    self.cut()
                    loss.happen()
        self.cut()

    def _send(self, end: socket.socket, message: bytes) -> None:
        self._proxy.hold(self)
        end.sendall(message)


def _message(source: BufferedReader) -> tuple[bytes, bytes]:
    """The kind of the next message, and all of it."""
    head = _read(source, 5)
    return head[:1], head + _read(source, int.from_bytes(head[1:], "big") - 4)


def _read(source: BufferedReader, length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data
