"""What the errors of real clients say: each is made by its client, against a server on this machine where that is cheap."""

import contextlib
import http.client
import socket
import ssl
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import psycopg
import pytest
import requests
import urllib3

from agent_run_ledger.rules.classify import Classified, Verdict, classify, retry_after

RETRYABLE = Classified("retryable", True)
FATAL = Classified("fatal", True)
HOPELESS = Classified("fatal", False)
AMBIGUOUS = Classified("ambiguous", False)
UNKNOWN = Classified("unknown", False)

PATIENCE = 20.0
"""Seconds for what happens at once; a test that waits for as long has failed."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's user has set for his browser is none of the clients' business."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


# --- a server that behaves badly --------------------------------------------------------------------------------------

Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(behave: Behaviour) -> Iterator[int]:
    """The port of a server that does this to every connection, and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE)

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE)
                if stopping.is_set():
                    return
                with contextlib.suppress(ConnectionError):
                    behave(connection)

    stopping = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stopping.set()
        with contextlib.suppress(ConnectionError), socket.create_connection(listener.getsockname(), PATIENCE):
            pass
        thread.join(PATIENCE)
        listener.close()


def read_request(connection: socket.socket) -> None:
    """A whole HTTP request: its head, and the body that the head announces."""
    with connection.makefile("rb") as stream:
        length = 0
        for line in iter(stream.readline, b"\r\n"):
            assert line, "the client went away in the middle of its request"
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        stream.read(length)


def hang_up(connection: socket.socket) -> None:
    connection.recv(1)


def read_and_hang_up(connection: socket.socket) -> None:
    read_request(connection)


def reset(connection: socket.socket) -> None:
    read_request(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def say_nothing(connection: socket.socket) -> None:
    read_request(connection)
    connection.recv(1)  # until the client has given up


def answer(text: bytes) -> Behaviour:
    def behave(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(text)

    return behave


def answer_status(status: int, headers: str = "") -> Behaviour:
    body = b'{"error": {"type": "told"}}'
    head = f"HTTP/1.1 {status} Told\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return answer(head.encode() + body)


# --- the clients ------------------------------------------------------------------------------------------------------

AT_ONCE = 0.1
"""Seconds to wait for an answer that does not come."""


def by_httpx(url: str, read: float = PATIENCE) -> None:
    with httpx.Client(timeout=httpx.Timeout(PATIENCE, read=read)) as client:
        client.post(url, json={}).raise_for_status()


def by_requests(url: str, read: float = PATIENCE) -> None:
    with requests.Session() as session:
        session.post(url, json={}, timeout=(PATIENCE, read)).raise_for_status()


def by_urllib3(url: str, read: float = PATIENCE) -> None:
    with urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=PATIENCE, read=read)) as pool:
        pool.request("POST", url, json={})


def by_urllib(url: str, read: float = PATIENCE) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=read) as got:
        got.read()


def by_openai(url: str, read: float = PATIENCE) -> None:
    with openai.OpenAI(
        api_key="none", base_url=url, max_retries=0, timeout=httpx2.Timeout(PATIENCE, read=read)
    ) as client:
        client.chat.completions.create(model="none", messages=[])


def by_anthropic(url: str, read: float = PATIENCE) -> None:
    with anthropic.Anthropic(
        api_key="none", base_url=url, max_retries=0, timeout=httpx2.Timeout(PATIENCE, read=read)
    ) as client:
        client.messages.create(model="none", messages=[], max_tokens=1)


Client = Callable[..., None]
CLIENTS: dict[str, Client] = {
    "httpx": by_httpx,
    "requests": by_requests,
    "urllib3": by_urllib3,
    "urllib": by_urllib,
    "openai": by_openai,
    "anthropic": by_anthropic,
}


@pytest.fixture(params=CLIENTS.values(), ids=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


@pytest.fixture(params=[client for name, client in CLIENTS.items() if name != "urllib3"])
def client_that_raises(request: pytest.FixtureRequest) -> Client:
    """Those that make an error of a status."""
    chosen: Client = request.param
    return chosen


@contextlib.contextmanager
def failing(client: Client, url: str, read: float = PATIENCE) -> Iterator[Exception]:
    """The error of a client that posts to this address."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        client(url, read)
    try:
        yield caught.value
    finally:
        if isinstance(caught.value, urllib.error.HTTPError):
            caught.value.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_refused_connection_was_never_made(client: Client) -> None:
    with failing(client, f"http://127.0.0.1:{free_port()}/pay") as error:
        assert classify(error) == RETRYABLE


def test_a_name_that_is_not_found_was_never_reached(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    with failing(client, "http://nowhere.invalid/pay") as error:
        assert classify(error) == RETRYABLE


LOST: dict[str, Behaviour] = {
    "hangs up": hang_up,
    "reads the request and hangs up": read_and_hang_up,
    "resets the connection": reset,
    "answers what is no HTTP": answer(b"OK\r\n\r\n"),
    "answers half a line": answer(b"HTTP/1.1 2"),
    "answers half a body": answer(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"),
}


@pytest.mark.parametrize("behave", LOST.values(), ids=LOST)
def test_a_call_that_was_sent_and_not_answered_is_ambiguous(client: Client, behave: Behaviour) -> None:
    with serving(behave) as port, failing(client, f"http://127.0.0.1:{port}/pay") as error:
        assert classify(error) == AMBIGUOUS


def test_a_call_that_is_never_answered_is_ambiguous(client: Client) -> None:
    with serving(say_nothing) as port, failing(client, f"http://127.0.0.1:{port}/pay", AT_ONCE) as error:
        assert classify(error) == AMBIGUOUS


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, FATAL), (401, FATAL), (403, FATAL), (404, FATAL), (409, UNKNOWN), (413, FATAL), (422, FATAL), (408, RETRYABLE),
        (429, RETRYABLE), (500, UNKNOWN), (501, FATAL), (502, AMBIGUOUS), (503, AMBIGUOUS), (504, AMBIGUOUS), (529, RETRYABLE),
    ],
)  # fmt: skip
def test_an_answer_says_what_it_is(client_that_raises: Client, status: int, told: Classified) -> None:
    with serving(answer_status(status)) as port, failing(client_that_raises, f"http://127.0.0.1:{port}/pay") as error:
        assert classify(error) == told


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("Retry-After: 7", 7.0), ("retry-after-ms: 250", 0.25), ("Retry-After: Thu, 01 Jan 1970 00:01:40 GMT", 60.0)],
)
@pytest.mark.parametrize("status", [429, 503])
def test_the_wait_that_the_server_asks_for_is_read(
    client_that_raises: Client, status: int, header: str, seconds: float
) -> None:
    behave = answer_status(status, f"{header}\r\n")
    with serving(behave) as port, failing(client_that_raises, f"http://127.0.0.1:{port}/pay") as error:
        assert retry_after(error, 40.0) == seconds


def test_a_server_that_says_not_to_try_again_is_believed(client_that_raises: Client) -> None:
    behave = answer_status(429, "x-should-retry: false\r\n")
    with serving(behave) as port, failing(client_that_raises, f"http://127.0.0.1:{port}/pay") as error:
        assert classify(error) == FATAL


def test_a_refused_second_try_after_a_timeout_leaves_the_first_in_doubt(client: Client) -> None:
    def twice(url: str, read: float) -> None:
        try:
            client(url, read)
        except Exception:
            client(f"http://127.0.0.1:{free_port()}/pay")

    with serving(say_nothing) as port, failing(twice, f"http://127.0.0.1:{port}/pay", AT_ONCE) as error:
        assert classify(error) == AMBIGUOUS


def test_a_redirect_that_is_followed_makes_a_refusal_prove_nothing() -> None:
    """A POST that was done, and sends the client on to see what came of it."""

    def see_other(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 303 See Other\r\nLocation: /gone\r\nContent-Length: 0\r\n\r\n")
        read_request(connection)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with serving(see_other) as port, failing(by_requests, f"http://127.0.0.1:{port}/pay") as error:
        assert classify(error) == HOPELESS


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("behave", "told"), [(None, RETRYABLE), (read_and_hang_up, AMBIGUOUS), (answer_status(404), FATAL)]
)  # fmt: skip
async def test_an_async_client_says_the_same(behave: Behaviour | None, told: Classified) -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(behave)) if behave else free_port()
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            with pytest.raises(httpx.HTTPError) as caught:
                (await client.post(f"http://127.0.0.1:{port}/pay", json={})).raise_for_status()
        assert classify(caught.value) == told


def test_a_plain_connection_says_the_same() -> None:
    connection = http.client.HTTPConnection("127.0.0.1", free_port(), timeout=PATIENCE)
    with contextlib.closing(connection), pytest.raises(ConnectionRefusedError) as refused:
        connection.request("POST", "/pay", b"{}")
    assert classify(refused.value) == RETRYABLE
    with serving(read_and_hang_up) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("POST", "/pay", b"{}")
            with pytest.raises(http.client.RemoteDisconnected) as lost:
                connection.getresponse()
    assert classify(lost.value) == AMBIGUOUS


# --- every class of httpx ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [httpx, httpx2])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ConnectError", RETRYABLE),
        ("ConnectTimeout", RETRYABLE),
        ("PoolTimeout", RETRYABLE),
        ("ProxyError", RETRYABLE),
        ("UnsupportedProtocol", FATAL),
        ("InvalidURL", FATAL),
        ("LocalProtocolError", HOPELESS),
        ("ReadTimeout", AMBIGUOUS),
        ("WriteTimeout", AMBIGUOUS),
        ("TimeoutException", AMBIGUOUS),
        ("ReadError", AMBIGUOUS),
        ("WriteError", AMBIGUOUS),
        ("CloseError", AMBIGUOUS),
        ("NetworkError", AMBIGUOUS),
        ("RemoteProtocolError", AMBIGUOUS),
        ("ProtocolError", AMBIGUOUS),
        ("DecodingError", AMBIGUOUS),
        ("TooManyRedirects", UNKNOWN),
        ("CookieConflict", UNKNOWN),
        ("StreamError", UNKNOWN),
    ],
)
def test_every_error_of_httpx_says_what_it_is(package: Any, name: str, told: Classified) -> None:
    assert classify(getattr(package, name)("told")) == told


@pytest.mark.parametrize(
    ("client", "url", "kind"),
    [
        (by_httpx, "ftp://127.0.0.1/", httpx.UnsupportedProtocol),
        (by_httpx, "/pay", httpx.UnsupportedProtocol),
        (by_httpx, "http://127.0.0.1:port/", httpx.InvalidURL),
        (by_requests, "ftp://127.0.0.1/", requests.exceptions.InvalidSchema),
        (by_requests, "/pay", requests.exceptions.MissingSchema),
        (by_requests, "http://127.0.0.1:port/", requests.exceptions.InvalidURL),
        (by_urllib3, "ftp://127.0.0.1/", urllib3.exceptions.URLSchemeUnknown),
        (by_urllib3, "http://127.0.0.1:port/", urllib3.exceptions.LocationParseError),
        (by_urllib, "http://127.0.0.1:port/", http.client.InvalidURL),
    ],
)
def test_an_address_that_cannot_be_asked_is_fatal(client: Client, url: str, kind: type[Exception]) -> None:
    with failing(client, url) as error:
        assert isinstance(error, kind)
        assert classify(error) == FATAL


# --- requests ---------------------------------------------------------------------------------------------------------

NEW = urllib3.exceptions.NewConnectionError(urllib3.connection.HTTPConnection("pay.test"), "refused")
SLOW = urllib3.exceptions.ConnectTimeoutError(urllib3.connection.HTTPConnection("pay.test"), "slow")
POOL = urllib3.HTTPConnectionPool("pay.test")


def given_up(reason: Exception) -> Exception:
    return urllib3.exceptions.MaxRetryError(POOL, "/pay", reason)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (requests.ConnectionError(given_up(NEW)), RETRYABLE),
        (requests.ConnectTimeout(given_up(SLOW)), RETRYABLE),
        (requests.ConnectionError(urllib3.exceptions.EmptyPoolError(POOL, "none left")), RETRYABLE),
        (requests.exceptions.ProxyError(given_up(urllib3.exceptions.ProxyError("no proxy", NEW))), RETRYABLE),
        (
            requests.exceptions.SSLError(
                given_up(urllib3.exceptions.SSLError(ssl.SSLCertVerificationError("expired")))
            ),
            FATAL,
        ),
        (requests.exceptions.InvalidURL("told"), FATAL),
        (requests.exceptions.MissingSchema("told"), FATAL),
        (requests.exceptions.InvalidSchema("told"), FATAL),
        (requests.ConnectionError(), AMBIGUOUS),
        (
            requests.ConnectionError(urllib3.exceptions.ProtocolError("aborted", http.client.RemoteDisconnected())),
            AMBIGUOUS,
        ),
        (requests.ConnectionError(urllib3.exceptions.ReadTimeoutError(POOL, "/pay", "slow")), AMBIGUOUS),
        (requests.ReadTimeout(), AMBIGUOUS),
        (requests.Timeout(), AMBIGUOUS),
        (requests.exceptions.ChunkedEncodingError(), AMBIGUOUS),
        (requests.exceptions.ContentDecodingError(), AMBIGUOUS),
        (requests.exceptions.SSLError(given_up(urllib3.exceptions.SSLError(ssl.SSLEOFError(8, "EOF")))), AMBIGUOUS),
        (
            requests.exceptions.ProxyError(given_up(urllib3.exceptions.ProxyError("no proxy", OSError("407")))),
            AMBIGUOUS,
        ),
        (requests.TooManyRedirects(), UNKNOWN),
        (
            requests.exceptions.RetryError(given_up(urllib3.exceptions.ResponseError("too many 500 error responses"))),
            UNKNOWN,
        ),
        (requests.exceptions.JSONDecodeError("told", "", 0), UNKNOWN),
        (requests.RequestException(), UNKNOWN),
    ],
)
def test_every_error_of_requests_says_what_it_is(error: Exception, told: Classified) -> None:
    assert classify(error) == told


# --- openai and anthropic ---------------------------------------------------------------------------------------------

STATUSES: list[tuple[int, Verdict]] = [
    (400, "fatal"), (401, "fatal"), (402, "fatal"), (403, "fatal"), (404, "fatal"), (412, "fatal"), (413, "fatal"), (422, "fatal"),
    (501, "fatal"), (408, "retryable"), (429, "retryable"), (529, "retryable"), (409, "unknown"), (500, "unknown"),
    (499, "ambiguous"), (502, "ambiguous"), (503, "ambiguous"), (504, "ambiguous"),
]  # fmt: skip


def asked(kind: str, respond: Callable[[httpx2.Request], httpx2.Response], retries: int = 0) -> Exception:
    """The error of a provider's client whose server is this function."""
    transport = httpx2.MockTransport(respond)
    if kind == "openai":
        with (
            openai.OpenAI(api_key="none", max_retries=retries, http_client=httpx2.Client(transport=transport)) as gpt,
            pytest.raises(openai.OpenAIError) as caught,
        ):
            gpt.chat.completions.create(model="none", messages=[])
        return caught.value
    with (
        anthropic.Anthropic(
            api_key="none", max_retries=retries, http_client=httpx2.Client(transport=transport)
        ) as claude,
        pytest.raises(anthropic.AnthropicError) as failed,
    ):
        claude.messages.create(model="none", messages=[], max_tokens=1)
    return failed.value


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize(("status", "verdict"), STATUSES)
def test_every_status_of_a_provider_says_what_it_is(kind: str, status: int, verdict: Verdict) -> None:
    error = asked(kind, lambda request: httpx2.Response(status, json={"error": {"type": "told"}}))
    assert isinstance(error, (openai.APIStatusError, anthropic.APIStatusError))
    assert classify(error) == Classified(verdict, verdict in ("retryable", "fatal"))


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (httpx2.ConnectError("refused"), RETRYABLE),
        (httpx2.ConnectTimeout("slow"), RETRYABLE),
        (httpx2.PoolTimeout("busy"), RETRYABLE),
        (httpx2.UnsupportedProtocol("told"), FATAL),
        (httpx2.ReadTimeout("slow"), AMBIGUOUS),
        (httpx2.WriteTimeout("slow"), AMBIGUOUS),
        (httpx2.ReadError("reset"), AMBIGUOUS),
        (httpx2.RemoteProtocolError("hung up"), AMBIGUOUS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_connection_error_of_a_provider_says_what_its_cause_says(
    kind: str, cause: Exception, told: Classified
) -> None:
    def fail(request: httpx2.Request) -> httpx2.Response:
        raise cause

    error = asked(kind, fail)
    assert isinstance(error, (openai.APIConnectionError, anthropic.APIConnectionError))
    assert classify(error) == told


def test_a_provider_that_wants_money_is_not_asked_again() -> None:
    body = {
        "error": {
            "message": "You exceeded your current quota",
            "type": "insufficient_quota",
            "code": "insufficient_quota",
        }
    }
    error = asked("openai", lambda request: httpx2.Response(429, json=body, headers={"retry-after": "7"}))
    assert isinstance(error, openai.RateLimitError)
    assert classify(error) == FATAL


def test_a_providers_answer_that_cannot_be_read_is_unknown() -> None:
    error = openai.APIResponseValidationError(
        httpx2.Response(200, request=httpx2.Request("POST", "http://ai.test")), None
    )
    assert classify(error) == UNKNOWN
    assert classify(openai.OpenAIError("no key")) == UNKNOWN


# --- psycopg ----------------------------------------------------------------------------------------------------------


def packet(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def failure(severity: str, code: str) -> bytes:
    fields = {"S": severity, "V": severity, "C": code, "M": "told"}
    return packet(b"E", b"".join(f"{name}{value}\0".encode() for name, value in fields.items()) + b"\0")


READY = packet(b"Z", b"I")


def accept(connection: socket.socket) -> None:
    """As much of PostgreSQL as it takes to be connected to, without a password."""
    connection.recv(65536)
    settings = [packet(b"S", b"client_encoding\0UTF8\0"), packet(b"S", b"server_version\x0017.0\0")]
    connection.sendall(packet(b"R", struct.pack("!I", 0)) + b"".join(settings) + READY)


def refuse_login(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(failure("FATAL", "57P03"))


def drop_statement(connection: socket.socket) -> None:
    accept(connection)
    connection.recv(65536)


def fail_statement(severity: str, code: str) -> Behaviour:
    def behave(connection: socket.socket) -> None:
        accept(connection)
        connection.recv(65536)
        connection.sendall(failure(severity, code) + (READY if severity == "ERROR" else b""))
        if severity == "ERROR":
            connection.recv(65536)

    return behave


def by_psycopg(port: int) -> None:
    dsn = f"host=127.0.0.1 port={port} user=nobody dbname=none sslmode=disable gssencmode=disable connect_timeout={PATIENCE:.0f}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO charges VALUES (1)")


@pytest.mark.parametrize(
    ("behave", "told"),
    [
        (None, RETRYABLE),
        (hang_up, RETRYABLE),
        (refuse_login, RETRYABLE),
        (drop_statement, AMBIGUOUS),
        (fail_statement("FATAL", "57P01"), AMBIGUOUS),
        (fail_statement("ERROR", "40003"), AMBIGUOUS),
        (fail_statement("ERROR", "40001"), RETRYABLE),
        (fail_statement("ERROR", "40P01"), RETRYABLE),
        (fail_statement("ERROR", "57014"), RETRYABLE),
        (fail_statement("ERROR", "23505"), FATAL),
        (fail_statement("ERROR", "42P01"), FATAL),
        (fail_statement("ERROR", "XX000"), UNKNOWN),
        (fail_statement("ERROR", "ZZ999"), UNKNOWN),
    ],
)
def test_a_database_that_fails_says_whether_it_was_done(behave: Behaviour | None, told: Classified) -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(behave)) if behave else free_port()
        with pytest.raises(psycopg.Error) as caught:
            by_psycopg(port)
        assert classify(caught.value) == told


def test_other_errors_of_psycopg_say_what_they_are() -> None:
    assert classify(psycopg.errors.ConnectionTimeout("slow")) == RETRYABLE
    assert classify(psycopg.OperationalError("the connection is closed")) == AMBIGUOUS
    assert classify(psycopg.InterfaceError("the cursor is closed")) == UNKNOWN
    assert classify(psycopg.ProgrammingError("the query has 2 placeholders")) == UNKNOWN


def test_a_connection_that_the_program_closed_itself_is_ambiguous_all_the_same() -> None:
    """Its text alone tells it from one that was lost in the statement before."""
    with serving(drop_statement) as port:
        dsn = f"host=127.0.0.1 port={port} user=nobody sslmode=disable gssencmode=disable"
        connection = psycopg.connect(dsn, autocommit=True)
        connection.close()
        with pytest.raises(psycopg.OperationalError) as caught:
            connection.execute("SELECT 1")
    assert classify(caught.value) == AMBIGUOUS
