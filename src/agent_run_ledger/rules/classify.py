"""What an error says about the call that raised it: whether it took effect, whether another try can help, how long to wait."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeGuard, TypeVar

from agent_run_ledger.rules.failures import CAUSE_OF, CONTEXT_OF, MRO_OF, SUPPRESSED_OF, describe, names_of, text

Verdict = Literal["retryable", "fatal", "ambiguous", "unknown"]

MAX_RETRY_AFTER = 86_400.0
"""Seconds: no server makes a step wait for longer than a day."""


class Classified(NamedTuple):
    """What an error says about the call that raised it."""

    verdict: Verdict
    """`retryable`: it did not take effect, and another try may help. `fatal`: another try cannot help. `ambiguous`: it may have
    taken effect. `unknown`: the error does not tell."""
    is_executed_never: bool
    """Whether the error proves that the receiver did not do what was asked of it."""
    note: str | None = None
    """Why the tool's own classifier was not followed, where it raised or answered something else."""


_RETRYABLE = Classified("retryable", True)
_FATAL = Classified("fatal", True)
_HOPELESS = Classified("fatal", False)  # another try cannot help; what this one did is not told
_AMBIGUOUS = Classified("ambiguous", False)
_UNKNOWN = Classified("unknown", False)

_BY_ANSWER = {"retryable": _RETRYABLE, "fatal": _FATAL, "ambiguous": _AMBIGUOUS}


def classify(error: BaseException, own: Callable[[BaseException], object] | None = None) -> Classified:
    """Judge an error by what it is, what it carries and what it stands for. Imports nothing, and never raises.

    `own` is what the tool knows better, its option `classify=`. It answers "retryable", "fatal" or "ambiguous", and is believed: the
    first two say that the call did not take effect, or that another one harms nobody. None leaves the error to the general classifier. A
    broken one is no reason to lose an error: what it raised, or what else it answered, is said in `note`, for the caller to warn of, and
    the general classifier decides.

    The general one knows errors by the names of their classes: those of Python's own clients; of httpx, requests, urllib3, aiohttp and
    botocore; of openai, anthropic and whatever else carries an HTTP status; of psycopg and whatever else carries an SQLSTATE. It takes an
    error to be about the one thing that the call does: a tool that does two has to say by `own` what the failure of the second means.

    >>> classify(ConnectionRefusedError()).verdict, classify(TimeoutError()).verdict, classify(ValueError()).verdict
    ('retryable', 'ambiguous', 'unknown')
    """
    note = None
    if own is not None:
        answer, note = _ask(own, error)
        if answer is not None:
            return answer
    seen: dict[int, object] = {}
    told = _judge(error, seen) or _UNKNOWN
    if len(seen) >= _REACH and told is not _AMBIGUOUS:
        told = _UNKNOWN  # not all that stands behind it was looked at
    return told._replace(note=note)


def _ask(own: Callable[[BaseException], object], error: BaseException) -> tuple[Classified | None, str | None]:
    """What the tool's own classifier says, and why that is not followed."""
    try:
        answer = own(error)
    except Exception as trouble:
        return None, f"classify= raised {text(describe(trouble))}"
    if answer is None:
        return None, None
    said = str.__str__(answer) if _is_a(answer, str) else None
    if said in _BY_ANSWER:
        return _BY_ANSWER[said], None
    what = repr(said[:80]) if said is not None else f"an object of type {names_of(type(answer))[1]}"
    return None, f"classify= answered {what}; it may answer 'retryable', 'fatal', 'ambiguous' or None"


# --- an error and those behind it -------------------------------------------------------------------------------------

_REACH = 64
"""How many errors are looked at: causes can form rings, and attributes can be made up as they are read."""


def _judge(error: object, seen: dict[int, object]) -> Classified | None:
    """What an error and those behind it tell; None: nothing.

    What it was raised from or made of is the same call, and may tell more than it does. An error that was merely being handled when it
    was raised is of an earlier call: that one may have taken effect, whatever became of the later one. It proves nothing else.
    """
    if not _is_a(error, BaseException) or id(error) in seen or len(seen) >= _REACH:
        return None
    seen[id(error)] = error
    told, open_to = _by_itself(error)
    if open_to != "nothing":
        beneath = [answer for each in _made_of(error) if (answer := _judge(each, seen)) is not None]
        if _AMBIGUOUS in beneath:
            told = _AMBIGUOUS
        elif beneath and open_to == "anything":
            told = _UNKNOWN if _is_a(error, BaseExceptionGroup) else beneath[0]
    if told is _AMBIGUOUS:
        return told
    links = list(_links(error, tells_all=open_to == "nothing"))
    if len(links) >= _REACH:
        return _UNKNOWN
    for link in links:
        earlier = CONTEXT_OF(link)
        if not any(earlier is each for each in links) and _judge(earlier, seen) is _AMBIGUOUS:
            return _AMBIGUOUS
    if told is _RETRYABLE and any(_by_class(link)[0] is _FATAL for link in links):
        return _FATAL  # no connection, because of a certificate
    return told


def _made_of(error: BaseException) -> Iterator[object]:
    """What an error says it stands for: what it was raised from, its reason, its arguments, its members."""
    yield CAUSE_OF(error)
    yield _quiet(error, "reason")  # urllib and urllib3
    arguments = _quiet(error, "args")
    if type(arguments) is tuple:
        yield from arguments[:2]
    if _is_a(error, BaseExceptionGroup):
        yield from _MEMBERS_OF(error)[:_REACH]


_MEMBERS_OF = BaseExceptionGroup.__dict__["exceptions"].__get__


def _links(error: BaseException, tells_all: bool) -> Iterator[BaseException]:
    """The error and those by which the same call came to it.

    What `from None` hides is one of them in a client that says itself what happened; elsewhere it may be an earlier call.
    """
    known: dict[int, object] = {}
    waiting: list[object] = [error]
    while waiting and len(known) < _REACH:
        each = waiting.pop()
        if _is_a(each, BaseException) and id(each) not in known:
            known[id(each)] = each
            yield each
            waiting += _made_of(each)
            if SUPPRESSED_OF(each) and CAUSE_OF(each) is None and (tells_all or each is not error):
                waiting.append(CONTEXT_OF(each))


# --- one error --------------------------------------------------------------------------------------------------------


_Open = Literal["nothing", "doubt", "anything"]


def _by_itself(error: BaseException) -> tuple[Classified | None, _Open]:
    """What an error tells without those that it is made of, and what those can change.

    A client may make up an answer of one that was lost: then it is in doubt, whatever it says. A wrapper says what it wraps, and so does a
    group, but for one thing: that its tasks beside the failed ones did nothing, since they were cancelled.
    """
    if _is_a(error, BaseExceptionGroup):
        return None, "anything"
    named, open_to = _by_class(error)
    if named is _AMBIGUOUS and open_to == "nothing":
        return named, open_to
    answered = _by_answer(error)
    if answered is not None:
        return answered, "doubt"
    if _quiet(error, "pgconn") is not None:  # psycopg: set by an attempt to connect, and by nothing else
        return _RETRYABLE, "nothing"
    return named, open_to


def _by_class(error: BaseException) -> tuple[Classified | None, _Open]:
    """What the name of its class tells, or of one above it."""
    for cls in MRO_OF(type(error)):
        for name in _names(cls):
            if name in _BY_NAME:
                return _BY_NAME[name], "nothing"
            if name in _WRAPPERS:
                return _AMBIGUOUS, "anything"
    if _is_a(error, OSError) and type(number := _quiet(error, "errno")) is int and number in _BY_ERRNO:
        return _BY_ERRNO[number], "nothing"
    return None, "anything"


def _by_answer(error: BaseException) -> Classified | None:
    """What the receiver answered: a status of HTTP, a state of SQL, a reply of SMTP."""
    status = _status(error)
    if status is not None:
        return _by_status(error, status)
    for name in ("sqlstate", "pgcode"):  # psycopg and asyncpg, psycopg2
        state = _quiet(error, name)
        if _is_a(state, str) and len(state := str.__str__(state)) == 5:
            return _BY_SQLSTATE.get(state) or _BY_SQLSTATE.get(state[:2]) or _UNKNOWN
    code = _quiet(error, "smtp_code")
    if type(code) is int and 400 <= code < 600:  # RFC 5321 §4.2.1: the action was not taken, for now or for good
        return _RETRYABLE if code < 500 else _FATAL
    return None


def _names(cls: type) -> tuple[str, str]:
    """A class as its package spells it, such as `httpx.ReadTimeout`, and its bare name, which many packages share."""
    module, qualified = names_of(cls)
    bare = qualified.rpartition(".")[2]
    return f"{module.partition('.')[0]}.{bare}", bare


# fmt: off
_BY_NAME: dict[str, Classified] = {
    name: told
    for told, names in {
        # no connection was made or got, so nothing was sent
        _RETRYABLE: [
            "ConnectionRefusedError", "gaierror", "herror",
            "ConnectTimeout", "ConnectTimeoutError", "ConnectError", "NewConnectionError", "NameResolutionError",
            "PoolTimeout", "EmptyPoolError", "FullPoolError",
            "httpx.ProxyError", "httpx2.ProxyError", "httpcore.ProxyError", "httpcore2.ProxyError",  # the tunnel was refused
            "ClientConnectorError", "aiohttp.ConnectionTimeoutError", "botocore.EndpointConnectionError",
            "psycopg.ConnectionTimeout", "psycopg_pool.TooManyRequests",
            "SMTPRecipientsRefused",  # nobody got it; some of the refusals may be for now only
        ],
        # the program asked for what cannot be sent, or the receiver is not the one it says it is
        _FATAL: [
            "InvalidURL", "MissingSchema", "InvalidSchema", "UnsupportedProtocol", "LocationValueError",
            "NonHttpUrlClientError", "SSLCertVerificationError", "SMTPNotSupportedError", "psycopg_pool.PoolClosed",
        ],
        # the program broke the protocol, possibly after its request was complete
        _HOPELESS: ["LocalProtocolError"],
        # lost on the way, or an answer that came and cannot be read
        _AMBIGUOUS: [
            "TimeoutError", "TimeoutExpired", "CancelledError", "BrokenExecutor",
            "ConnectionAbortedError", "ConnectionResetError", "BrokenPipeError", "IncompleteReadError",
            "SSLEOFError", "SSLZeroReturnError", "SMTPServerDisconnected",
            "RemoteDisconnected", "BadStatusLine", "IncompleteRead", "LineTooLong",
            "ReadTimeout", "WriteTimeout", "ReadTimeoutError", "ReadError", "WriteError", "CloseError", "RemoteProtocolError",
            "DecodingError", "HttpProcessingError", "ChunkedEncodingError", "ContentDecodingError", "urllib3.DecodeError",
            "ServerDisconnectedError", "ServerTimeoutError", "ClientPayloadError", "botocore.ConnectionClosedError",
        ],
        # a redirect was followed: the answer that sent us there may have been the effect
        _UNKNOWN: [
            "TooManyRedirects", "InvalidUrlRedirectClientError", "NonHttpUrlRedirectClientError",
            "tarfile.ReadError", "shutil.ReadError",  # of the same name, and about files
        ],
    }.items()
    for name in names
}
# ambiguous, unless what they were raised from or made of says more
_WRAPPERS = frozenset({
    "ConnectionError", "Timeout", "TimeoutException", "NetworkError", "ProtocolError", "ProxyError", "SSLError", "ClientOSError",
    "APIConnectionError", "APITimeoutError", "psycopg.OperationalError", "psycopg2.OperationalError",
})
# fmt: on

_BY_ERRNO = {
    errno.EADDRNOTAVAIL: _RETRYABLE,  # no free port to connect from
    # they end attempts to connect, and connections as well
    errno.ENETDOWN: _AMBIGUOUS,
    errno.ENETUNREACH: _AMBIGUOUS,
    errno.ENETRESET: _AMBIGUOUS,
    errno.EHOSTDOWN: _AMBIGUOUS,
    errno.EHOSTUNREACH: _AMBIGUOUS,
}


_BY_SQLSTATE = {
    # a class of SQLSTATEs, and the exceptions to it; any other is unknown
    "08": _AMBIGUOUS,  # the connection was lost
    "08001": _RETRYABLE,  # it was not made
    "08004": _RETRYABLE,
    "0A": _FATAL,
    "22": _FATAL,
    "23": _FATAL,
    "25006": _RETRYABLE,  # read-only: it was sent to a standby, or to the one that was replaced
    "25P02": _RETRYABLE,  # the transaction had failed before, and is rolled back
    "25P03": _RETRYABLE,
    "25P04": _RETRYABLE,
    "28": _FATAL,
    "3D": _FATAL,
    "3F": _FATAL,
    "40": _RETRYABLE,  # rolled back: serialization failure, deadlock
    "40002": _FATAL,  # by a constraint
    "40003": _AMBIGUOUS,  # statement completion unknown
    "42": _FATAL,
    "44": _FATAL,
    "53": _RETRYABLE,  # out of memory, disk, connections
    "54": _FATAL,
    "55": _FATAL,
    "55006": _RETRYABLE,  # object in use
    "55P03": _RETRYABLE,  # lock not available
    "57": _AMBIGUOUS,  # the server shuts down, crashed or closed the session
    "57014": _RETRYABLE,  # the statement was cancelled, and undone
    "57P03": _RETRYABLE,  # the server takes no connections yet
    "P0": _FATAL,  # a function said no
}


# --- HTTP -------------------------------------------------------------------------------------------------------------

_BY_STATUS = {
    # Any other 3xx is unknown: 301 and 302 answer a POST that was done as often as one that has to be sent elsewhere, 303 always does.
    307: _FATAL,  # the same request is to be sent elsewhere: nothing was done here
    308: _FATAL,
    # Any other 4xx is a definite no.
    408: _RETRYABLE,  # the request did not come in time
    409: _UNKNOWN,  # a lock that is soon released, a state that stays, or the trace of an earlier attempt: only the receiver knows
    421: _RETRYABLE,
    423: _RETRYABLE,
    425: _RETRYABLE,
    429: _RETRYABLE,
    499: _AMBIGUOUS,  # a proxy's word for a client that went away meanwhile
    # Any other 5xx is unknown: the receiver may have failed before, in or after what was asked. 500 is one of them.
    501: _FATAL,
    502: _AMBIGUOUS,
    503: _AMBIGUOUS,  # mostly a refusal, but said by proxies too
    504: _AMBIGUOUS,
    505: _FATAL,
    511: _FATAL,  # by the network before it
    # Cloudflare's, of what stands behind it
    520: _AMBIGUOUS,  # an answer that cannot be read
    521: _RETRYABLE,  # refused the connection
    522: _AMBIGUOUS,  # did not accept the connection, or not the request, in time
    523: _RETRYABLE,  # unreachable
    524: _AMBIGUOUS,  # did not answer in time
    525: _RETRYABLE,  # no TLS handshake
    526: _FATAL,  # its certificate is not valid
    529: _RETRYABLE,  # overloaded, as anthropic and others say it
    # what some proxies say for their own timeouts
    598: _AMBIGUOUS,
    599: _AMBIGUOUS,
}


def _by_status(error: BaseException, status: int) -> Classified:
    """What the status means, and the exceptions to it that the answer itself makes."""
    told = _BY_STATUS.get(status) or (_FATAL if 400 <= status < 500 else _UNKNOWN)
    if told is _AMBIGUOUS:
        return told  # that another try cannot help, or may, does not make it less so
    if status == 429 and _is_out_of_money(error):
        told = _FATAL
    hint = _header(error, "X-Should-Retry") or _header(error, "Stripe-Should-Retry")
    if hint == "false":
        told = _FATAL if told.is_executed_never else _HOPELESS
    elif hint == "true" and told.is_executed_never:
        told = _RETRYABLE
    if told.is_executed_never and _was_redirected(error):  # the answer that sent us here may have been the effect
        return _UNKNOWN if told is _RETRYABLE else _HOPELESS
    return told


def _was_redirected(error: BaseException) -> bool:
    histories = [_quiet(place, "history") for place in (_quiet(error, "response"), error)]
    return any((type(hops) is list or type(hops) is tuple) and len(hops) > 0 for hops in histories)


def _is_out_of_money(error: BaseException) -> bool:
    """OpenAI says 429 also when nothing is left to pay with."""
    body = _quiet(error, "body")
    inner = body.get("error") if type(body) is dict else None
    said = [_quiet(error, name) for name in ("code", "type")]
    said += [place.get(name) for place in (body, inner) if type(place) is dict for name in ("code", "type")]
    return any(type(each) is str and each == "insufficient_quota" for each in said)


def _status(error: object) -> int | None:
    """The status of the HTTP answer that an error carries, as the usual clients spell it."""
    for place in (_quiet(error, "response"), error):
        for name in ("status_code", "status", "http_status", "code"):
            value = _quiet(place, name)
            if _is_a(value, int) and 300 <= (status := int.__int__(value)) < 600:  # some are of a subclass, HTTPStatus
                return status
    return None


def _header(error: BaseException, name: str) -> str | None:
    for place in (_quiet(error, "response"), error):
        headers = _quiet(place, "headers")
        for spelling in (name, name.lower()):
            try:
                value = headers.get(spelling)  # type: ignore[attr-defined]
            except Exception:  # it may be anything
                continue
            if _is_a(value, str):
                return str.__str__(value).strip()
    return None


# --- how long to wait -------------------------------------------------------------------------------------------------


def retry_after(error: BaseException, now: float) -> float | None:
    """Seconds, from 0 to `MAX_RETRY_AFTER`, that the server asks to wait; None: it does not say. Never raises.

    Read from the headers `Retry-After-Ms` and `Retry-After` (seconds, or a date, to which `now` in Unix seconds is compared) of the
    answer that the error carries or stands for. What is no number and no date is not followed.
    """
    waits = [wait for link in _links(error, tells_all=False) if (wait := _wait(link, now)) is not None]
    return max(waits, default=None)


def _wait(error: BaseException, now: float) -> float | None:
    milliseconds = _number(_header(error, "Retry-After-Ms") or "")
    if milliseconds is not None:
        return min(milliseconds / 1000, MAX_RETRY_AFTER)
    said = _header(error, "Retry-After") or ""
    seconds = _number(said)
    if seconds is None and (date := _date(said)) is not None:
        seconds = max(0.0, date - now)
    return min(seconds, MAX_RETRY_AFTER) if seconds is not None else None


def _number(said: str) -> float | None:
    """Digits, with a decimal point or without: no sign, no exponent, no NaN. Infinite where there are too many of them."""
    is_number = said.isascii() and said.replace(".", "", 1).isdigit()
    return float(said) if is_number else None


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _date(said: str) -> float | None:
    """Unix seconds of an HTTP date, in any of the three forms of RFC 9110 §5.6.7; None: it is none."""
    words = said[:64].replace(",", " ").replace("-", " ").split()
    if len(words) == 5:  # asctime: Sun Nov  6 08:49:37 1994
        words = [words[0], words[2], words[1], words[4], words[3], "GMT"]
    if len(words) != 6 or words[2] not in _MONTHS or words[5] not in ("GMT", "UTC"):
        return None
    numbers = [words[3], words[1], *words[4].split(":")]
    if len(numbers) != 5 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    from datetime import UTC, datetime  # here, since few errors carry a date

    year, day, hour, minute, second = map(int, numbers)
    if len(numbers[0]) == 2:  # RFC 850, which no server of this century should send
        year += 2000 if year < 70 else 1900
    try:
        return datetime(year, _MONTHS.index(words[2]) + 1, day, hour, minute, min(second, 59), tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None


# --- reading what may be anything -------------------------------------------------------------------------------------

_T = TypeVar("_T")


def _is_a(value: object, cls: type[_T]) -> TypeGuard[_T]:
    """`isinstance`, of what a value is and not of what it says it is."""
    return issubclass(type(value), cls)


def _quiet(place: object, name: str) -> object:
    try:
        return getattr(place, name, None)
    except Exception:  # an attribute may be any code
        return None
