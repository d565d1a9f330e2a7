"""What errors say, one by one: those of Python itself, statuses, SQLSTATEs, chains, the tool's own word, and hostile ones."""

import asyncio
import concurrent.futures
import doctest
import errno
import http
import http.client
import itertools
import json
import smtplib
import socket
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from email.message import Message
from email.utils import format_datetime
from typing import Any

import httpx
import psycopg
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from agent_run_ledger.rules import classify as module
from agent_run_ledger.rules.classify import Classified, Verdict, classify, retry_after

NOW = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT


def named(name: str, *bases: type, package: str = "somebody.inner") -> BaseException:
    """An exception of somebody's client, known by its name alone."""
    made: BaseException = type(name, bases or (Exception,), {"__module__": package})("told")
    return made


def answered(status: int, headers: dict[str, str] | None = None, body: Any = None, **more: Any) -> BaseException:
    """An error of httpx for an answer."""
    request = httpx.Request("POST", "http://pay.test/charges")
    response = httpx.Response(status, headers=headers, json=body, request=request, **more)
    return httpx.HTTPStatusError("told", request=request, response=response)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    """Raised `from` the other, which was caught."""
    try:
        try:
            raise cause
        except BaseException:
            raise error from cause
    except BaseException as caught:
        return caught


def while_handling(
    error: BaseException | Callable[[], BaseException], earlier: BaseException, *, hidden: bool = False
) -> BaseException:
    """Made and raised in an `except` that has caught the other, perhaps `from None`."""
    try:
        try:
            raise earlier
        except BaseException:
            made = error if isinstance(error, BaseException) else error()
            if hidden:
                raise made from None
            raise made  # noqa: B904
    except BaseException as caught:
        return caught


# --- Python's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        OSError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"),
        type("Refused", (ConnectionRefusedError,), {})(),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        socket.herror(),
        urllib.error.URLError(ConnectionRefusedError()),
        urllib.error.URLError(socket.gaierror()),
        smtplib.SMTPConnectError(421, b"too busy"),
        smtplib.SMTPHeloError(451, b"later"),
        smtplib.SMTPDataError(452, b"no space left"),
        smtplib.SMTPAuthenticationError(454, b"temporary authentication failure"),
        smtplib.SMTPRecipientsRefused({"a@b.test": (450, b"greylisted")}),
    ],
    ids=repr,
)
def test_what_never_got_there_may_be_tried_again(error: BaseException) -> None:
    assert classify(error) == Classified("retryable", True)


@pytest.mark.parametrize(
    "error",
    [
        http.client.InvalidURL("nonnumeric port: 'x'"),
        ssl.SSLCertVerificationError("certificate has expired"),
        urllib.error.URLError(ssl.SSLCertVerificationError("certificate has expired")),
        smtplib.SMTPAuthenticationError(535, b"credentials invalid"),
        smtplib.SMTPSenderRefused(550, b"no", "a@b.test"),
        smtplib.SMTPDataError(554, b"spam"),
        smtplib.SMTPNotSupportedError(),
    ],
    ids=repr,
)
def test_after_a_definite_no_another_try_cannot_help(error: BaseException) -> None:
    assert classify(error) == Classified("fatal", True)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        socket.timeout("timed out"),  # noqa: UP041
        asyncio.TimeoutError("of asyncio"),  # noqa: UP041
        concurrent.futures.TimeoutError("of a future"),
        asyncio.CancelledError(),
        BrokenProcessPool(),
        ConnectionError(),
        ConnectionResetError(),
        ConnectionAbortedError(),
        BrokenPipeError(),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        http.client.RemoteDisconnected(),
        http.client.BadStatusLine("x"),
        http.client.LineTooLong("header line"),
        http.client.IncompleteRead(b""),
        asyncio.IncompleteReadError(b"", 1),
        subprocess.TimeoutExpired("cmd", 1),
        urllib.error.URLError(TimeoutError()),
        urllib.error.URLError(ConnectionResetError()),
        ssl.SSLError(1, "decryption failed or bad record mac"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed"),
        smtplib.SMTPServerDisconnected("Connection unexpectedly closed"),
        named("ReadTimeout", TimeoutError),
        named("TimeoutError"),
    ],
    ids=repr,
)
def test_a_timeout_or_a_lost_connection_is_ambiguous(error: BaseException) -> None:
    assert classify(error) == Classified("ambiguous", False)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("timeout"),
        TypeError(),
        AttributeError(),
        RuntimeError(),
        json.JSONDecodeError("msg", "doc", 0),
        OSError(errno.ENOENT, "No such file"),
        PermissionError(),
        EOFError(),
        KeyboardInterrupt(),
        subprocess.CalledProcessError(1, "cmd"),
        urllib.error.URLError("unknown url type"),
        http.client.CannotSendRequest(),
        smtplib.SMTPException(),
        named("ReadError", package="tarfile"),
        named("ConnectionTimeout"),
        named("OperationalError", package="sqlite3"),
        ExceptionGroup("several", [ValueError(), ConnectionRefusedError()]),
    ],
    ids=repr,
)
def test_what_does_not_tell_is_unknown(error: BaseException) -> None:
    assert classify(error) == Classified("unknown", False)


OTHERS: list[tuple[str, str, Verdict]] = [
    ("aiohttp.client_exceptions", "ClientConnectorError", "retryable"),
    ("aiohttp.client_exceptions", "ConnectionTimeoutError", "retryable"),
    ("aiohttp.client_exceptions", "NonHttpUrlClientError", "fatal"),
    ("aiohttp.client_exceptions", "ServerDisconnectedError", "ambiguous"),
    ("aiohttp.client_exceptions", "ServerTimeoutError", "ambiguous"),
    ("aiohttp.client_exceptions", "ClientPayloadError", "ambiguous"),
    ("aiohttp.client_exceptions", "ClientOSError", "ambiguous"),
    ("aiohttp.client_exceptions", "InvalidUrlRedirectClientError", "unknown"),
    ("aiohttp.client_exceptions", "NonHttpUrlRedirectClientError", "unknown"),
    ("botocore.exceptions", "EndpointConnectionError", "retryable"),
    ("botocore.exceptions", "ConnectTimeoutError", "retryable"),
    ("botocore.exceptions", "ConnectionClosedError", "ambiguous"),
    ("botocore.exceptions", "ReadTimeoutError", "ambiguous"),
    ("botocore.exceptions", "ClientError", "unknown"),
    ("psycopg_pool", "PoolTimeout", "retryable"),
    ("psycopg_pool", "TooManyRequests", "retryable"),
    ("psycopg_pool", "PoolClosed", "fatal"),
    ("psycopg2", "OperationalError", "ambiguous"),
    ("redis.exceptions", "ConnectionError", "ambiguous"),
    ("elastic_transport", "ConnectionTimeout", "unknown"),
]


@pytest.mark.parametrize(("package", "name", "verdict"), OTHERS)
def test_other_clients_are_known_by_the_names_of_their_errors(package: str, name: str, verdict: Verdict) -> None:
    told = Classified(verdict, verdict in ("retryable", "fatal"))
    error = named(name, package=package)
    assert classify(error) == told
    assert classify(type("Own", (type(error),), {})()) == told


# --- answers ----------------------------------------------------------------------------------------------------------

RETRYABLE = 408, 421, 423, 425, 429, 521, 523, 525, 529
AMBIGUOUS = 499, 502, 503, 504, 520, 522, 524, 598, 599
UNKNOWN = 300, 301, 302, 303, 304, 409, 500, 506, 507, 508, 510, 527, 530
FATAL = 307, 308, 400, 401, 402, 403, 404, 405, 406, 407, 410, 411, 412, 413, 414, 415, 416, 417, 418, 422, 424, 426, 428, 431, 451, 501, 505, 511, 526  # fmt: skip

STATUSES: list[tuple[int, Verdict]] = [
    *[(status, "retryable") for status in RETRYABLE],
    *[(status, "ambiguous") for status in AMBIGUOUS],
    *[(status, "unknown") for status in UNKNOWN],
    *[(status, "fatal") for status in FATAL],
]  # fmt: skip


class Answered(Exception):
    """An error that carries what it is given."""

    def __init__(self, **carried: Any) -> None:
        super().__init__()
        for name, value in carried.items():
            setattr(self, name, value)


@pytest.mark.parametrize(("status", "verdict"), STATUSES)
def test_an_answer_says_by_its_status_what_it_is(status: int, verdict: Verdict) -> None:
    told = Classified(verdict, verdict in ("retryable", "fatal"))
    assert classify(answered(status)) == told
    response = requests.Response()
    response.status_code = status
    assert classify(requests.HTTPError(response=response)) == told
    with urllib.error.HTTPError("http://pay.test", status, "", Message(), None) as error:
        assert classify(error) == told
    for carried in ("status", "status_code", "http_status", "code"):
        assert classify(Answered(**{carried: status})) == told


def test_a_status_may_be_of_an_enumeration() -> None:
    assert classify(Answered(code=http.HTTPStatus.NOT_FOUND)).verdict == "fatal"


@pytest.mark.parametrize("code", [0, 14, 200, 299, 600, 1006, -32000, 4.04, "404", True, None])
def test_a_number_that_is_no_status_of_a_failure_says_nothing(code: object) -> None:
    assert classify(Answered(code=code, status=code, response=Answered(status_code=code))).verdict == "unknown"


def test_an_answer_that_reports_no_failure_leaves_the_word_to_what_stands_behind_the_error() -> None:
    assert classify(caused(Answered(status_code=200), httpx.ReadError("reset"))).verdict == "ambiguous"


def test_where_class_and_answer_differ_there_is_doubt() -> None:
    assert classify(type("ConnectTimeout", (Exception,), {"status_code": 504})()).verdict == "ambiguous"
    assert classify(type("ReadTimeout", (Exception,), {"status_code": 400})()).verdict == "ambiguous"


def test_an_answer_that_a_client_makes_up_is_in_doubt() -> None:
    """As aiohttp does it, which says 400 when it cannot read what the server said."""
    unreadable = type("BadHttpMessage", (type("HttpProcessingError", (Exception,), {"code": 400}),), {})()
    assert classify(unreadable).verdict == "ambiguous"
    assert classify(caused(Answered(status=400), unreadable)).verdict == "ambiguous"
    assert classify(caused(Answered(status=400), ValueError())).verdict == "fatal"
    assert classify(caused(Answered(status=429), answered(404))).verdict == "retryable"


@pytest.mark.parametrize("header", ["X-Should-Retry", "x-should-retry", "Stripe-Should-Retry"])
@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (429, "false", Classified("fatal", True)),
        (400, "false", Classified("fatal", True)),
        (500, "false", Classified("fatal", False)),
        (409, "false", Classified("fatal", False)),
        (504, "false", Classified("ambiguous", False)),
        (400, "true", Classified("retryable", True)),
        (500, "true", Classified("unknown", False)),
        (503, "true", Classified("ambiguous", False)),
        (429, "maybe", Classified("retryable", True)),
    ],
)
def test_a_server_may_say_whether_to_try_again_and_not_whether_it_was_done(
    header: str, status: int, said: str, told: Classified
) -> None:
    assert classify(answered(status, {header: said})) == told


def test_a_refusal_after_a_redirect_proves_nothing() -> None:
    first = httpx.Response(303)
    assert classify(answered(404, history=[first])) == Classified("fatal", False)
    assert classify(answered(429, history=[first])) == Classified("unknown", False)
    assert classify(answered(404, history=[])) == Classified("fatal", True)
    assert classify(Answered(status=404, history=(first,))) == Classified("fatal", False)
    assert classify(Answered(status=404, history="long")) == Classified("fatal", True)


@pytest.mark.parametrize(
    "carried",
    [
        {"code": "insufficient_quota"},
        {"type": "insufficient_quota"},
        {"body": {"code": "insufficient_quota"}},
        {"body": {"error": {"type": "insufficient_quota"}}},
    ],
)
def test_too_many_requests_for_want_of_money_is_fatal(carried: dict[str, Any]) -> None:
    assert classify(Answered(status_code=429, **carried)) == Classified("fatal", True)
    assert classify(Answered(status_code=503, **carried)) == Classified("ambiguous", False)
    assert classify(Answered(status_code=500, **carried)) == Classified("unknown", False)


# --- SQLSTATE ---------------------------------------------------------------------------------------------------------

SQLSTATES: list[tuple[str, Verdict]] = [
    *[(code, "retryable") for code in ("40001", "40P01", "40000", "55P03", "55006", "57014", "57P03", "08001", "08004")],
    *[(code, "retryable") for code in ("53000", "53100", "53200", "53300", "25006", "25P02", "25P03")],
    *[(code, "fatal") for code in ("22P02", "22003", "23505", "23503", "28P01", "28000", "42601", "42P01", "42501")],
    *[(code, "fatal") for code in ("P0001", "0A000", "40002", "44000", "54001", "55000", "3D000", "3F000")],
    *[(code, "ambiguous") for code in ("08000", "08003", "08006", "08007", "08P01", "40003", "57P01", "57P02", "57P05")],
    *[(code, "unknown") for code in ("XX000", "58030", "25001", "34000", "2F005")],
]  # fmt: skip


@pytest.mark.parametrize(("code", "verdict"), SQLSTATES)
def test_a_database_says_by_its_sqlstate_what_it_is(code: str, verdict: Verdict) -> None:
    told = Classified(verdict, verdict in ("retryable", "fatal"))
    assert classify(psycopg.errors.lookup(code)()) == told
    assert classify(Answered(pgcode=code)) == told
    assert classify(caused(named("DBAPIError"), psycopg.errors.lookup(code)())) == told


# --- chains -----------------------------------------------------------------------------------------------------------


def test_an_error_of_ones_own_that_comes_from_a_timeout_is_ambiguous() -> None:
    assert classify(caused(RuntimeError(), httpx.ReadTimeout("slow"))).verdict == "ambiguous"
    assert classify(caused(ExceptionGroup("several", [ValueError()]), TimeoutError())).verdict == "ambiguous"
    assert classify(caused(RuntimeError(), caused(LookupError(), TimeoutError()))).verdict == "ambiguous"
    assert classify(while_handling(RuntimeError(), TimeoutError())).verdict == "ambiguous"
    assert classify(while_handling(RuntimeError(), TimeoutError(), hidden=True)).verdict == "ambiguous"
    assert classify(RuntimeError("booking failed", TimeoutError())).verdict == "ambiguous"


def test_an_error_of_ones_own_tells_what_it_was_raised_from() -> None:
    assert classify(caused(RuntimeError(), ConnectionRefusedError())) == Classified("retryable", True)
    assert classify(caused(RuntimeError(), answered(404))) == Classified("fatal", True)
    assert classify(caused(RuntimeError(), answered(500))) == Classified("unknown", False)
    assert classify(RuntimeError("no", ConnectionRefusedError())) == Classified("retryable", True)


def test_what_was_only_being_handled_proves_nothing() -> None:
    """A GET was refused, so a POST was made; it went well, and then its answer could not be read."""
    for earlier in (answered(404), ConnectionRefusedError(), httpx.ConnectError("refused")):
        assert classify(while_handling(ValueError(), earlier)) == Classified("unknown", False)
        assert classify(while_handling(ValueError(), earlier, hidden=True)) == Classified("unknown", False)


LATER: dict[str, Callable[[], BaseException]] = {
    "a refused connection": ConnectionRefusedError,
    "a client's own": lambda: httpx.ConnectError("refused"),
    "a client's own, with causes": lambda: caused(httpx.ConnectError("refused"), ConnectionRefusedError()),
    "an answer that says no": lambda: answered(404),
    "an answer that does not tell": lambda: answered(500),
    "a database that rolled back": psycopg.errors.SerializationFailure,
    "a request that is none": lambda: httpx.LocalProtocolError("told"),
    "one's own for an answer": lambda: caused(RuntimeError(), answered(404)),
    "one's own": ValueError,
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_a_second_try_that_is_refused_leaves_the_first_in_doubt(later: Callable[[], BaseException]) -> None:
    assert classify(while_handling(later, httpx.ReadTimeout("slow"))) == Classified("ambiguous", False)
    assert classify(while_handling(later, while_handling(KeyError(), TimeoutError()))) == Classified("ambiguous", False)


def test_hiding_a_timeout_does_not_undo_it() -> None:
    assert classify(while_handling(answered(404), httpx.ReadTimeout("slow"), hidden=True)).verdict == "ambiguous"
    assert classify(while_handling(named("APIConnectionError"), TimeoutError(), hidden=True)).verdict == "ambiguous"


def test_the_first_try_is_found_below_the_errors_of_a_client_that_hides_its_causes() -> None:
    """As httpx does it: its error is raised from that of httpcore, which hides that of the socket."""
    refused = while_handling(ConnectionRefusedError(), httpx.ReadTimeout("slow"))
    inner = while_handling(named("ConnectError"), refused, hidden=True)
    assert classify(caused(httpx.ConnectError("refused"), inner)).verdict == "ambiguous"


def test_how_a_client_notices_that_it_cannot_connect_is_no_earlier_call() -> None:
    inner = while_handling(named("ConnectTimeout"), TimeoutError("timed out"), hidden=True)
    assert classify(inner) == Classified("retryable", True)
    assert classify(caused(httpx.ConnectTimeout("slow"), inner)) == Classified("retryable", True)
    assert classify(caused(httpx.ConnectError("reset"), ConnectionResetError())) == Classified("retryable", True)


def test_a_certificate_that_is_refused_is_fatal_whoever_says_so() -> None:
    refused = ssl.SSLCertVerificationError("certificate has expired")
    assert classify(caused(httpx.ConnectError("tls"), caused(named("ConnectError"), refused))) == Classified(
        "fatal", True
    )
    assert classify(caused(named("SSLError"), refused)) == Classified("fatal", True)


@pytest.mark.parametrize(
    "name", ["APIConnectionError", "APITimeoutError", "ConnectionError", "ProtocolError", "Timeout"]
)
def test_a_wrapper_of_a_client_is_ambiguous_unless_it_wraps_something_clear(name: str) -> None:
    assert classify(named(name)) == Classified("ambiguous", False)
    assert classify(caused(named(name), ValueError())) == Classified("ambiguous", False)
    assert classify(caused(named(name), httpx.ReadError("reset"))) == Classified("ambiguous", False)
    assert classify(caused(named(name), httpx.ConnectTimeout("slow"))) == Classified("retryable", True)
    assert classify(while_handling(named(name), httpx.ConnectTimeout("slow"))) == Classified("ambiguous", False)


def test_a_plain_timeout_stays_one_whatever_it_was_raised_from() -> None:
    """Somebody created a job, asked for it until it was time to give up, and got 404 last."""
    assert classify(caused(TimeoutError("gave up"), answered(404))) == Classified("ambiguous", False)


def test_a_group_is_ambiguous_where_one_of_it_is_and_proves_nothing() -> None:
    assert classify(ExceptionGroup("several", [ValueError(), httpx.ReadTimeout("slow")])).verdict == "ambiguous"
    inner = ExceptionGroup("inner", [ValueError(), caused(RuntimeError(), TimeoutError())])
    assert classify(ExceptionGroup("outer", [answered(404), inner])).verdict == "ambiguous"
    assert classify(ExceptionGroup("several", [answered(404)])) == Classified("unknown", False)
    assert classify(caused(ExceptionGroup("several", [ValueError()]), answered(404))) == Classified("unknown", False)
    assert classify(BaseExceptionGroup("several", [asyncio.CancelledError(), ValueError()])).verdict == "ambiguous"


# --- the tool's own word ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("retryable", Classified("retryable", True)),
        ("fatal", Classified("fatal", True)),
        ("ambiguous", Classified("ambiguous", False)),
    ],
)
@pytest.mark.parametrize("error", [TimeoutError(), ConnectionRefusedError(), ValueError(), answered(404)], ids=repr)
def test_the_tools_own_word_is_believed(error: BaseException, answer: str, told: Classified) -> None:
    asked: list[BaseException] = []
    assert classify(error, lambda each: (asked.append(each), answer)[1]) == told
    assert asked == [error]


def test_a_tool_that_does_not_know_leaves_it_to_the_general_classifier() -> None:
    assert classify(TimeoutError(), lambda error: None) == Classified("ambiguous", False)


class Sly(str):
    def __hash__(self) -> int:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "answer", ["unknown", "RETRYABLE", "", True, 7, ["fatal"], b"fatal", object(), Sly("x" * 10**6)]
)
def test_another_answer_is_noted_and_not_followed(answer: object) -> None:
    told = classify(ConnectionRefusedError(), lambda error: answer)
    assert told[:2] == ("retryable", True)
    assert told.note is not None
    assert told.note.startswith("classify= answered ")
    assert len(told.note) < 300


def test_a_text_of_ones_own_class_is_an_answer() -> None:
    assert classify(ValueError(), lambda error: Sly("fatal")) == Classified("fatal", True)


def test_a_broken_classifier_is_noted_and_not_followed() -> None:
    def broken(error: BaseException) -> str:
        raise LookupError("no such table")

    told = classify(TimeoutError(), broken)
    assert told == Classified("ambiguous", False, "classify= raised LookupError: no such table")
    assert classify(TimeoutError(), Unreadable).note is not None
    assert classify(TimeoutError(), "fatal").note is not None  # type: ignore[arg-type]


def test_an_interruption_in_the_tools_own_classifier_goes_on_its_way() -> None:
    def interrupted(error: BaseException) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classify(TimeoutError(), interrupted)


# --- Retry-After ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "86401"}, 86_400.0),
        ({"retry-after": "9" * 5000}, 86_400.0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "9" * 5000}, 86_400.0),
        ({"Retry-After-Ms": "20", "Retry-After": "7"}, 0.02),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:50:37 GMT"}, 60.0),
        ({"retry-after": "Sunday, 06-Nov-94 08:50:37 GMT"}, 60.0),
        ({"retry-after": "Sun Nov  6 08:50:37 1994"}, 60.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:07 GMT"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:60 GMT"}, 22.0),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 86_400.0),
        ({}, None),
        *[
            ({"retry-after": junk}, None)
            for junk in (
                "", "-1", "+1", "NaN", "nan", "inf", "1e999", "1e3", "1_0", "0x10", "²", "７", "1,2", ".", "1.2.3", "soon", "7 s",
                "Sun, 32 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 0000 08:49:37 GMT", "Sun, 06 Nov 1994 25:49:37 GMT",
                "Sun, 06 Nov 1994 08:49:37 +0200", "Sun, 06 Brumaire 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT",
                "Sun, 06 Nov " + "9" * 5000 + " 08:49:37 GMT", "Sun, ٠٦ Nov 1994 08:49:37 GMT", "a b c d e f", "a Nov c d e GMT",
            )
        ],
    ],
)  # fmt: skip
def test_the_wait_that_a_server_asks_for_is_read_in_seconds(headers: dict[str, str], seconds: float | None) -> None:
    plain = Answered(response=Answered(status_code=429, headers=headers))
    assert retry_after(plain, NOW) == seconds
    assert retry_after(Answered(headers=headers), NOW) == seconds
    if all(value.isascii() for value in headers.values()):
        assert retry_after(answered(429, headers), NOW) == seconds
        assert retry_after(caused(RuntimeError(), answered(503, headers)), NOW) == seconds


@pytest.mark.parametrize(
    "value", [b"7", 8, -1, float("nan"), float("inf"), pytest.param(10**5000, id="digits"), ["7"], {"7": 7}, None, True]
)
def test_a_wait_that_is_no_text_is_not_followed(value: object) -> None:
    assert retry_after(Answered(headers={"retry-after": value, "retry-after-ms": value}), NOW) is None


@pytest.mark.parametrize("headers", [None, 7, [], "retry-after", object(), {1: 2}])
def test_headers_that_are_none_say_nothing(headers: object) -> None:
    assert retry_after(Answered(headers=headers, response=headers), NOW) is None


def test_the_longest_wait_of_several_is_kept_and_that_of_an_earlier_call_is_not() -> None:
    group = ExceptionGroup("several", [answered(429, {"retry-after": "7"}), answered(429, {"retry-after": "9"})])
    assert retry_after(group, NOW) == 9
    assert retry_after(while_handling(httpx.ReadTimeout("slow"), answered(429, {"retry-after": "3600"})), NOW) is None


@given(st.text(max_size=70))
def test_no_text_of_a_server_breaks_the_reading(said: str) -> None:
    wait = retry_after(Answered(headers={"retry-after": said, "retry-after-ms": said}), NOW)
    assert wait is None or 0 <= wait <= 86_400


@given(st.integers(0, 32_000_000_000), st.floats(-100_000, 100_000))
def test_a_date_is_a_wait_of_at_most_a_day_from_now(date: int, ahead: float) -> None:
    said = format_datetime(datetime.fromtimestamp(date, UTC), usegmt=True)
    wait = retry_after(Answered(headers={"retry-after": said}), date - ahead)
    assert wait == min(max(0.0, date - (date - ahead)), 86_400.0)


# --- hostile errors ---------------------------------------------------------------------------------------------------


class Unreadable(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


class Hiding(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("no")

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("no")


class Hidden(Exception, metaclass=Hiding):
    pass


class Pretender(Exception):
    """Says that it is another."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return ConnectionRefusedError

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        return ConnectionRefusedError()


class Endless(Exception):
    """Each one has another as its reason."""

    made = itertools.count()

    @property
    def reason(self) -> BaseException:
        next(self.made)
        return Endless(Endless())


class Text(str):
    def partition(self, *_: Any) -> Any:
        raise RuntimeError("no")

    def __format__(self, *_: Any) -> str:
        raise RuntimeError("no")


def odd_module(module: object) -> BaseException:
    made: BaseException = type("TimeoutError", (Exception,), {"__module__": module})()
    return made


def without_module() -> BaseException:
    """Made by code that runs in no module."""
    names: dict[str, Any] = {}
    exec(
        "made = type('TimeoutError', (Exception,), {'__qualname__': text('Inner.TimeoutError')})()",
        {"text": Text},
        names,
    )
    error: BaseException = names["made"]
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "unreadable": lambda: Unreadable(),
    "hidden": lambda: Hidden(),
    "pretending": lambda: Pretender(),
    "endless": lambda: Endless(),
    "with an unreadable answer": lambda: Answered(response=Unreadable(), reason=Unreadable()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_error_is_unknown(name: str) -> None:
    error = HOSTILE[name]()
    assert classify(error) == Classified("unknown", False)
    assert retry_after(error, NOW) is None


def test_the_looking_ends() -> None:
    Endless.made = itertools.count()
    classify(Endless())
    assert next(Endless.made) < 10_000


@pytest.mark.parametrize("module", [7, None, Text("httpx"), ""], ids=["number", "none", "text", "empty"])
def test_a_class_of_an_odd_module_is_known_by_its_name(module: object) -> None:
    assert classify(odd_module(module)).verdict == "ambiguous"
    assert classify(without_module()).verdict == "ambiguous"


def test_what_stands_behind_an_unreadable_error_is_seen() -> None:
    assert classify(caused(Unreadable(), TimeoutError())).verdict == "ambiguous"


def test_errors_that_cause_each_other_come_to_an_end() -> None:
    one, other = RuntimeError(), RuntimeError()
    one.__cause__, other.__cause__ = other, one
    assert classify(one).verdict == "unknown"
    other.__context__ = TimeoutError()
    assert classify(one).verdict == "ambiguous"


@pytest.mark.parametrize("length", [1, 10, 63, 64, 65, 300])
def test_where_not_all_was_looked_at_nothing_is_proved(length: int) -> None:
    """Somebody calls himself again from within `except`, and the very first try timed out."""
    error: BaseException = TimeoutError()
    for _ in range(length):
        error = while_handling(ConnectionRefusedError(), error)
    assert not classify(error).is_executed_never
    error = ConnectionRefusedError()
    for _ in range(length):
        error = caused(RuntimeError(), error)
    assert classify(error).is_executed_never == (length < 63)
    error = while_handling(OSError(), TimeoutError())
    for _ in range(length):
        outer = httpx.ConnectError("refused")
        outer.__cause__, error = error, outer
    assert not classify(error).is_executed_never


def test_a_group_of_very_many_is_looked_at_in_part() -> None:
    many = [ValueError() for _ in range(100_000)]
    assert classify(ExceptionGroup("many", many)).verdict == "unknown"
    assert classify(ExceptionGroup("many", [TimeoutError(), *many])).verdict == "ambiguous"


LEAVES: list[tuple[Callable[[], BaseException], bool]] = [
    (TimeoutError, True),
    (ConnectionRefusedError, False),
    (ValueError, False),
    (lambda: answered(404), False),
    (lambda: answered(503), True),
]
# an error, and whether something in it or behind it is in doubt
ERRORS = st.recursive(
    st.sampled_from(LEAVES).map(lambda leaf: (leaf[0](), leaf[1])),
    lambda inner: st.one_of(
        inner.map(lambda told: (caused(RuntimeError(), told[0]), told[1])),
        st.tuples(inner, st.booleans()).map(
            lambda given: (while_handling(RuntimeError(), given[0][0], hidden=given[1]), given[0][1])
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda many: (ExceptionGroup("several", [told[0] for told in many]), any(told[1] for told in many))  # type: ignore[misc]
        ),
    ),
    max_leaves=8,
)


@given(ERRORS)
def test_doubt_is_found_wherever_it_is_and_nowhere_else(told: tuple[BaseException, bool]) -> None:
    error, is_in_doubt = told
    assert (classify(error).verdict == "ambiguous") == is_in_doubt


# --- the module -------------------------------------------------------------------------------------------------------


def test_classifying_imports_nothing() -> None:
    program = (
        "import sys; from agent_run_ledger.rules.classify import classify, retry_after; before = set(sys.modules)\n"
        "class Answer(Exception): status_code, headers = 429, {'retry-after': '7'}\n"
        "for error in (TimeoutError(), Answer(), ValueError()): classify(error, lambda error: None), retry_after(error, 0.0)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


def test_the_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)
