"""What of a text or of data is a secret, by its name, its shape or a private list, and the copy that may be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

HIDDEN = "[redacted]"
"""What stands in the place of a secret."""

Scan = Callable[[str], Iterable[tuple[int, int]]]
"""Finds secrets in a text: where each begins, and the index behind its end."""

_SHORTEST_VALUE = 4
_DEEPEST = 250
"""Ledgers keep nothing that is nested deeper; what stands deeper in a text is hidden whole."""


# --- names ------------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+")
_ALWAYS = frozenset(
    {
        "password", "passwords", "passwd", "pwd", "passphrase", "passcode", "htpasswd", "secret", "secrets",
        "credential", "credentials", "authorization", "cookie", "cookies", "sessionid", "phpsessid", "jsessionid",
        "csrf", "xsrf", "csrftoken", "otp", "totp", "cvv", "cvc", "apikey", "authkey", "privatekey", "secretkey",
        "accesskey", "clientsecret", "authtoken", "accesstoken", "refreshtoken", "sessiontoken", "bearer",
    }
)  # fmt: skip
"""A name with one of these words in it names a secret, whatever the value is."""
_OF_TEXT = frozenset({"token", "jwt"})
"""As above, where the value is a text that is no number: `fencing_token: 7` and `token: 300` count something."""
_KEYS = frozenset(
    {
        "access", "account", "api", "auth", "client", "consumer", "deploy", "encryption", "master", "private", "secret",
        "service", "session", "shared", "signing", "ssh", "storage", "subscription",
    }
)  # fmt: skip
"""Words that make a `key` behind them a secret."""
_PLURAL = frozenset({"access", "api", "auth", "bearer", "id", "refresh", "session"})
"""Words that make `tokens` behind them secrets; all other tokens are counted."""
_DESCRIBES = frozenset(
    {
        "at", "budget", "count", "enabled", "endpoint", "expiration", "expires", "expiry", "field", "file", "format",
        "in", "len", "length", "limit", "name", "names", "path", "policy", "required", "seconds", "size", "ttl", "type",
        "uri", "url", "usage", "used", "valid", "version",
    }
)  # fmt: skip
"""A name that ends in one of these tells about a secret, and its value is none: `token_type`, `password_policy`."""


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case, whichever way they are joined.

    >>> words_of("X-Api-Key"), words_of("dbPassword"), words_of("AWS_SECRET_ACCESS_KEY")
    (('x', 'api', 'key'), ('db', 'password'), ('aws', 'secret', 'access', 'key'))
    """
    return tuple([word.lower() for word in _WORD.findall(name)])


@dataclass(frozen=True, slots=True)
class Private:
    """What one place calls secret beside what everybody does: names, compared by words, and values, wherever they stand."""

    names: tuple[tuple[str, ...], ...] = ()
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], values: Iterable[str]) -> Private:
        """Raises `ValueError` for a name without a word and for a value that is too short to be told from any other text."""
        split, spelt = [], set[str]()
        for name in names:
            split.append(words_of(name))
            if not split[-1]:
                raise ValueError(f"the name {name!r} has no word in it")
        for value in values:
            if len(value.strip()) < _SHORTEST_VALUE:
                raise ValueError(f"a value has to have at least {_SHORTEST_VALUE} characters")
            # As it is, and as JSON and Python spell it inside of a text.
            spelt |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
        return cls(tuple(split), tuple(sorted(spelt, key=len, reverse=True)))

    def has_name(self, words: tuple[str, ...]) -> bool:
        """Whether the words of one of the names follow each other in these."""
        return any(
            words[at : at + len(name)] == name for name in self.names for at in range(len(words) - len(name) + 1)
        )


def _is_secret(name: str, private: Private, *, is_counted: bool) -> bool:
    """Whether a value of that name is a secret; `is_counted` says that it is a number."""
    words = words_of(name)
    if not words:
        return False
    if private.has_name(words):
        return True
    if words[-1] in _DESCRIBES:
        return False
    if not _ALWAYS.isdisjoint(words) or any(one in _KEYS and other == "key" for one, other in pairwise(words)):
        return True
    if is_counted:
        return False
    return (
        not _OF_TEXT.isdisjoint(words)
        or words[-1] == "auth"
        or (words[-1] == "pass" and len(words) > 1)
        or (words[-1] == "tokens" and not _PLURAL.isdisjoint(words))
    )


# --- shapes -----------------------------------------------------------------------------------------------------------


def _shape(start: str, rest: str, least: int) -> str:
    """A secret that tells itself by its beginning. Where a text was cut, however little is left of it."""
    return rf"(?<![\w-]){start}(?:{rest}{{{least},}}|{rest}*(?=…))"


_SHAPES = (
    ("PRIVATE KEY", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"),
    ("sk-", _shape("sk-", r"[\w-]", 16)),
    ("_live_", _shape("[srp]k_live_", r"\w", 10)),
    ("_test_", _shape("[srp]k_test_", r"\w", 10)),
    ("whsec_", _shape("whsec_", r"[\w+/=]", 16)),
    ("gh", _shape("gh[opusr]_", r"\w", 20)),
    ("github_pat_", _shape("github_pat_", r"\w", 20)),
    ("glpat-", _shape("glpat-", r"[\w.-]", 16)),
    ("xox", _shape("xox[abeprs]-", r"[\w-]", 10)),
    ("xapp-", _shape("xapp-", r"[\w-]", 10)),
    ("AKIA", _shape("AKIA", r"[0-9A-Z]", 16)),
    ("ASIA", _shape("ASIA", r"[0-9A-Z]", 16)),
    ("AIza", _shape("AIza", r"[\w-]", 30)),
    ("ya29.", _shape(r"ya29\.", r"[\w.-]", 20)),
    ("npm_", _shape("npm_", r"\w", 30)),
    ("hf_", _shape("hf_", r"\w", 24)),
    ("pypi-", _shape("pypi-AgE", r"[\w-]", 30)),
    ("SG.", _shape(r"SG\.", r"[\w.-]", 30)),
    ("eyJ", _shape(r"eyJ[\w-]{8,}\.eyJ", r"[\w.-]", 8)),
)
"""What a text has to hold for a shape to be looked for, and the shape."""
_HEADER = re.compile(r"(?P<kept>\b(?:Bearer|Basic)\s+)(?=[^\s\"',;]*[\d=…])[^\s\"',;]{8,}", re.IGNORECASE)
_HOOK = re.compile(r"(?P<kept>hooks\.slack\.com/services/)[\w/…]+")
_CURL = re.compile(r"(?P<kept>(?<![\w-])(?:-u|--user)[ =]+[\"']?[^\s:\"']+:)[^\s\"']+")

# Up to the last @ of a word, or of what stands in quotes: who forgot to escape one in his password is not to see the rest of it.
_PASSWORD = re.compile(
    r"""(?P<quoted>['"]postgres(?:ql)?://[^'":/?#@]*):[^'"]*@ | (?P<plain>://[^\s:/?#@]*):\S*@ | (?<=password=)[^&\s]+""",
    re.VERBOSE,
)
_ADDRESS = re.compile(r"""://[^\s"'<>]*+""")
_USER = re.compile(r"://(?P<name>[^:/?#@]*)(?P<mark>[:@]?)")
_PORT = re.compile(r"\d{1,5}(?:[/?#…,]|$)")
_LONGEST_USER = 20
"""What is longer than that and stands in front of a host is a token rather than somebody's name."""

_QUERY = re.compile(
    r"(?P<kept>[?&](?:key|sig|signature|sas|hmac|code(?==[^&\s\"'<>]{20,})|X-Amz-(?:Signature|Credential))=)[^&\s\"'<>#]+",
    re.IGNORECASE,
)


def without_passwords(text: str) -> str:
    """A text about databases, with the passwords taken out of all addresses in it."""
    return _PASSWORD.sub(lambda found: f"{user}@" if (user := found["quoted"] or found["plain"]) else "", text)


def _without_shapes(text: str) -> str:
    for mark, shape in _SHAPES:
        if mark in text:
            text = re.sub(shape, HIDDEN, text, flags=re.DOTALL)
    for pattern in (_HEADER, _HOOK, _CURL, _QUERY):
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return _ADDRESS.sub(_without_user, text)


def _without_user(found: re.Match[str]) -> str:
    """A word that begins at `://`, without what stands before the host in each of its addresses, but for a user's name.

    Up to the last @ of the word: an @ in a password that nobody escaped hides more, not less. What looks like a port is one, so that an
    address in front of an e-mail address stays what it is.
    """
    word = found.group()
    end = word.rfind("@")
    if end < 0:
        if not word.endswith("…"):
            return word
        end = len(word) - 1
    for user in _USER.finditer(word, 0, end + 1):
        if user["mark"] == ":" and user.end() < end and not _PORT.match(word, user.end()):
            begin = user.end()
        elif user["mark"] == "@" and len(user["name"]) >= _LONGEST_USER:
            begin = user.start("name")
        else:
            continue
        return word[:begin] + HIDDEN + word[end:]
    return word


# --- names in texts ---------------------------------------------------------------------------------------------------

# A name, and what leads from it to its value: as JSON, Python, headers, addresses, command lines, XML and pydantic write it.
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<dashes>--?)?(?P<name>[\w.-]++)
    (?: (?P<close>\\*["'])(?:,\s*\\*["'](?:value|content|payload)\\*["']:\s*|(?P<pair>,\s*)|\]?[ \t]*[:=]\s*)
      | [ \t]*(?:=>|:=|[:=])[ \t]*
      | (?(dashes)[ \t]+|[ \t]+(?=[bBrRuUfF]{0,2}\\*["']))
      | (?P<tag>>)
      | (?P<input>\n[^\n]*?\binput_value=) )""",
    re.VERBOSE,
)
_OPEN = re.compile(r"""[bBrRuUfF]{0,2}(?P<escapes>\\*)(?P<quote>["'])""")
_QUOTE = {quote: re.compile(rf"(\\*){quote}") for quote in "\"'"}
_BRACKET = re.compile(r"""[\[({]|[\])}]|\\*["']""")
_SCHEME = r"(?:(?:Bearer|Basic|Digest|Token|Negotiate|ApiKey)\s+)?"
_BARE = re.compile(rf"""{_SCHEME}(?:\[redacted\]|[^\s"'<>&;,)\]}}]|[,)\]}}](?=[^\s"',;)\]}}]))+""", re.IGNORECASE)
_LINE = re.compile(r"""[^\n\r"'<>]+""")
_NUMBER = re.compile(r"[-+.\d_,eE]*\d[-+.\d_,eE]*$")
_NEAR = 40
_NOTHING = frozenset({"null", "true", "false", "None", "True", "False"})


def _without_named(text: str, private: Private) -> str:
    """The text without the values of secret names, wherever it says name and value."""
    parts: list[str] = []
    done = at = 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end("name")
        if not _is_secret(found["name"], private, is_counted=False):
            continue
        begin, end = _value_of(text, found)
        if begin == end:
            continue
        value = text[begin:end]
        if value in _NOTHING or (_NUMBER.match(value) and not _is_secret(found["name"], private, is_counted=True)):
            continue
        parts += (text[done:begin], HIDDEN)
        done = at = end
    return "".join((*parts, text[done:])) if parts else text


def _value_of(text: str, found: re.Match[str]) -> tuple[int, int]:
    """Where the value behind a name begins, and the index behind its end; the same twice where there is none."""
    begin = found.end()
    nothing = (begin, begin)
    before = text[found.start() - 1 : found.start()]
    if found["tag"] is not None and before != "<":
        return nothing
    opened = _OPEN.match(text, begin)
    if opened is not None:
        end = _end_of_quoted(text, opened)
        if found["pair"] is not None and not (
            text[max(0, found.start() - _NEAR) : found.start()].rstrip("\\\"'").endswith(("[", "("))
            and text[end : end + _NEAR].lstrip("\\\"'")[:1] in ("]", ")", "")
        ):
            return nothing  # a list of more than a name and its value
        return opened.end(), end
    if found["pair"] is not None:
        return nothing
    if text[begin : begin + 1] in ("{", "[", "("):
        return begin, _end_of_brackets(text, begin)
    words = words_of(found["name"])
    is_header = "cookie" in words and ":" in text[found.end("name") : begin]
    bare = (_LINE if is_header else _BARE).match(text, begin)
    return (begin, bare.end()) if bare is not None else nothing


def _end_of_quoted(text: str, opened: re.Match[str]) -> int:
    """Where what is quoted ends. A quote in it has more backslashes than the one that opened it, however deep the text is quoted."""
    escapes = len(opened["escapes"])
    for closing in _QUOTE[opened["quote"]].finditer(text, opened.end()):
        if len(closing[1]) % (2 * escapes + 2) == escapes:
            return closing.end() - 1 - escapes
    return len(text)


def _end_of_brackets(text: str, begin: int) -> int:
    """Where what stands in brackets ends, the closing one included."""
    depth, at = 0, begin
    while (found := _BRACKET.search(text, at)) is not None:
        mark, at = found.group(), found.end()
        if mark in ("[", "(", "{"):
            depth += 1
        elif mark in ("]", ")", "}"):
            depth -= 1
            if depth == 0:
                return at
        elif (opened := _OPEN.match(text, found.start())) is not None:
            closing = _end_of_quoted(text, opened)
            at = min(len(text), closing + len(mark))
    return len(text)


# --- most texts hold nothing of that ----------------------------------------------------------------------------------

_MARKS = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "authorization", "cookie"),
    *("sessionid", "sessid", "csrf", "xsrf", "otp", "cvv", "cvc", "key", "token", "bearer", "jwt", "auth", "pass"),
    *("private key", "sk-", "_live_", "_test_", "whsec_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox"),
    *("xapp-", "akia", "asia", "aiza", "ya29.", "npm_", "hf_", "pypi-", "sg.", "eyj", "basic", "hooks.slack", "-u", "://"),
    *("sig=", "signature=", "sas=", "hmac=", "code=", "x-amz-", "\\u00"),
)  # fmt: skip
"""In lower case: a text with none of these has no secret that we know. The last one is how JSON may spell any letter of the others."""


def _may_hold_one(text: str, private: Private) -> bool:
    lower = text.lower()
    return any(mark in lower for mark in _MARKS) or any(name[0] in lower for name in private.names)


# --- the copy that may be shown -----------------------------------------------------------------------------------------

_NAMES = frozenset({"name", "key", "header", "field", "param", "parameter", "variable"})
_VALUES = frozenset({"value", "content", "payload"})


@dataclass(frozen=True, slots=True)
class Redactor:
    """Makes copies that may be shown. It is exact about what is not secret, and hides too much rather than too little."""

    private: Private = Private()
    scan: Scan | None = None

    def text(self, text: str) -> str:
        """The text without secrets, the JSON in it included.

        >>> Redactor().text('login({"user":"ann","password":"s3cret"}) at https://ann:pw@db.internal/x')
        'login({"user":"ann","password":"[redacted]"}) at https://ann:[redacted]@db.internal/x'
        """
        return self._text(text, 0)

    def data(self, value: Any) -> Any:
        """A copy of JSON data without secrets. What is neither mapping, list, tuple nor text is as it was.

        >>> Redactor().data({"apiKey": "k", "max_tokens": 300, "headers": [["Authorization", "Bearer x"]]})
        {'apiKey': '[redacted]', 'max_tokens': 300, 'headers': [['Authorization', '[redacted]']]}
        """
        return self._data(value, 0)

    def _text(self, text: str, depth: int) -> str:
        if not text:
            return text
        for value in self.private.values:
            text = text.replace(value, HIDDEN)
            if text.endswith("…"):
                text = _without_start_of(value, text)
        if self.scan is not None:
            for begin, end in sorted(self.scan(text), reverse=True):
                text = text[:begin] + HIDDEN + text[end:]
        if not _may_hold_one(text, self.private):
            return text
        if text[0] in '{["':
            text = self._json(text, depth)
        return _without_named(_without_shapes(text), self.private)

    def _json(self, text: str, depth: int) -> str:
        """The text as it was where it is no JSON, or hides nothing."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return text
        shown = self._data(read, depth + 1)
        return text if shown == read else json.dumps(shown, ensure_ascii=False, separators=(",", ":"))

    def _data(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(value, depth) if depth < _DEEPEST else HIDDEN
        if isinstance(value, Mapping | list | tuple) and depth >= _DEEPEST:
            return HIDDEN
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple):
            return self._items(value, depth)
        return value

    def _mapping(self, given: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        """`{"name": "Authorization", "value": "..."}` says what a value is called as well as a key does."""
        names = [each for key, each in given.items() if key in _NAMES and isinstance(each, str)]
        shown = {}
        for key, each in given.items():
            called = [*names, key] if key in _VALUES else [key]
            shown[self._data(key, depth) if isinstance(key, str) else key] = (
                HIDDEN
                if any(isinstance(name, str) and self._hides(name, each) for name in called)
                else self._data(each, depth + 1)
            )
        return shown

    def _items(self, given: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        """A pair may be a name and its value, and so may an option of a command line and the word behind it."""
        shown = []
        for at, each in enumerate(given):
            before = given[at - 1] if at else None
            is_hidden = (
                isinstance(before, str) and (len(given) == 2 or before.startswith("-")) and self._hides(before, each)
            )
            shown.append(HIDDEN if is_hidden else self._data(each, depth + 1))
        return shown

    def _hides(self, name: str, value: Any) -> bool:
        """Whether the value is a secret by its name. What is empty, or says no more than yes or no, tells nobody anything."""
        if value is None or isinstance(value, bool) or value in ("", [], {}, ()):
            return False
        is_counted = isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.match(value) is not None)
        return _is_secret(name, self.private, is_counted=is_counted)


def _without_start_of(value: str, text: str) -> str:
    """A text that was cut, without what is left at its end of a private value."""
    for length in range(min(len(value) - 1, len(text) - 1), _SHORTEST_VALUE - 1, -1):
        if text.endswith(value[:length] + "…"):
            return text[: -length - 1] + HIDDEN + "…"
    return text
