"""What a text says apart from what is new in it every time: request ids, times, echoes of the question, mere thanks."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from operator import eq

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

words = re.compile(r"\w+").findall
"""The words of a text: runs of letters, digits and underscores."""

# --- names of what differs in every call ------------------------------------------------------------------------------

# The longer patterns are compiled when a text is first looked at, which costs a process a millisecond: many never look at one.
_VOLATILE = (
    r"(?:x[-_]?)?(?:request|req|trace|span|parent|correlation|client|invocation|operation|call|tool[-_]?call|message|session|run)"
    r"[-_]?(?:id|uuid|guid|token)"
    r"|idempotency[-_]?key|nonce|uuid|guid|etag"
    r"|(?:\w+[-_])?(?:timestamp|ts)|\w+[-_]at|(?:\w+[-_])?(?:ms|millis|elapsed|duration|latency|took)"
    r"|(?:server|client|current|local|system)[-_]?time|(?:attempt|retry)(?:[-_]?(?:number|no|count))?|attempts|retries"
)
_ENDINGS = (
    "id", "guid", "token", "key", "nonce", "etag", "timestamp", "ts", "at", "ms", "millis", "elapsed", "duration", "latency", "took",
    "time", "attempt", "retry", "number", "no", "count", "attempts", "retries",
)  # fmt: skip
"""With one of these ends whatever `_VOLATILE` matches."""
_ID = r"(?:\w+[-_])?(?:id|number|ref|reference|confirmation(?:[-_]code)?)_?"
_IN_A_SENTENCE = frozenset({"request", "req", "trace", "id", "line", "attempt", "pid", "port", "ref"})


@lru_cache(maxsize=1024)
def is_volatile(name: str) -> bool:
    """Whether a field of this name tells one call from the next and nothing else. Values are never looked at."""
    spelt = f"{name[:-2]}_{name[-2:]}" if name[-2:] in ("At", "Id") else name  # createdAt is created_at
    if spelt.isascii() and not spelt.lower().endswith(_ENDINGS):
        return False  # nearly always, and then the pattern need not be compiled
    return re.fullmatch(_VOLATILE, spelt, re.IGNORECASE) is not None


@lru_cache(maxsize=1024)
def is_fresh(name: str) -> bool:
    """Whether a field of this name is volatile, or is new in the answer of every write: its id, which a sentence calls `#481`."""
    return name == "#" or is_volatile(name) or name.endswith("Id") or re.fullmatch(_ID, name, re.I) is not None


def is_volatile_in_error(name: str) -> bool:
    """Whether what follows this name in an error is volatile, also in a sentence: `(request 5be736fff9, line 71)`."""
    return is_volatile(name) or name.lower() in _IN_A_SENTENCE


_NAMES = re.compile(r'"([\w-]+)":')
_FIELD = r'"([\w-]+)":(?:"(?:[^"\\]|\\.)*"|[^][{},]+),?'


def names(text: str) -> list[str]:
    """The names of the fields of canonical arguments, as they stand one after the other."""
    return _NAMES.findall(text)


def steady_arguments(text: str, named: Sequence[str]) -> str:
    """Canonical arguments without case, runs of spaces, and the fields that are known, by name, to differ in every call."""
    if any(map(is_volatile, named)):
        text = re.sub(_FIELD, _keep_unless_volatile, text)
    return " ".join(text.casefold().split())


def _keep_unless_volatile(field: re.Match[str]) -> str:
    return "" if is_volatile(field[1]) else field[0]


Fields = dict[str, tuple[str, frozenset[str]]]
"""The values of canonical arguments by where they stand: each as text, and the words of it."""


def fields(text: str) -> Fields:
    """The fields of canonical arguments. What cannot be read is one value."""
    try:
        whole = json.loads(text)
    except ValueError:  # damaged, or a number of more digits than Python reads
        whole = text
    found: Fields = {}
    waiting: list[tuple[str, Any]] = [("", whole)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend([(f"{place}.{name}", each) for name, each in value.items()])
        elif isinstance(value, list):
            waiting.extend([(f"{place}.{at}", each) for at, each in enumerate(value)])
        else:
            said = str(value).casefold()
            found[place] = said, frozenset([word.strip("\"'`.,;:!?()[]") for word in said.split()])
    return found


_MARKS = str.maketrans("", "", "\"'`.,;:!?()[]{}")


def letters(text: str, named: Sequence[str]) -> str:
    """What is left of flat canonical arguments none of whose values has a space in it, without case and marks; empty for others.

    Where the letters of two differ, and what their fields are `named` does not, neither is a rewording of the other: a value is one word.
    """
    if not text.isascii() or " " in text or "[" in text or text.count("{") != 1 or text.count('":') != len(named):
        return ""
    return text.casefold().translate(_MARKS)


def is_reworded(one: Fields, other: Fields) -> bool:
    """Whether two questions are about the same: more than half of the words of every field that changed are in both.

    What stands between spaces is a word here. So a name, a path or a number is either the same or another one, and a call for the next
    of them is no rewording. Nor is what `is_replaced`.
    """
    for place, (value, mine) in one.items():
        its = other.get(place)
        if its is not None and its[0] != value:
            shared, fewer = len(mine & its[1]), min(len(mine), len(its[1]))
            if 2 * shared <= fewer or fewer - shared > FEW_WORDS:
                return False
    return True


def is_replaced(one: Fields, other: Fields) -> bool:
    """Whether in a field that changed many words went and many others came: the next document in the same prompt.

    A text that only grows, or loses, is the same one.
    """
    for place, (value, mine) in one.items():
        its = other.get(place)
        if its is not None and its[0] != value and min(len(mine), len(its[1])) - len(mine & its[1]) > FEW_WORDS:
            return True
    return False


FEW_WORDS = 6


# --- two texts side by side -------------------------------------------------------------------------------------------


def pieces(text: str) -> list[str]:
    """A text in pieces that are compared with those of another one: words, or fields with their values."""
    return text.replace(",", " ").split()


def differ_only_in(one: Sequence[str], other: Sequence[str], may_differ: Callable[[str], bool]) -> bool:
    """Whether two texts, in pieces, are the same but for the values of fields whose names may have different ones.

    A field is `name: value`, `name=value`, `"name":"value"`, or a name and its value in a sentence; the name of `#481` is `#`.
    """
    if len(one) != len(other):
        return False
    differed = False
    for at, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine == its:
            differed = False
            continue
        if not differed and not may_differ(_name_before(one, at)):  # else it is the value of that name, or more of it
            name = _name(mine)
            if name == mine or name != _name(its) or not may_differ(name):
                return False
        differed = True
    return True


def are_mostly_equal(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two texts, in pieces, are as long, and no more than half of them differs."""
    return len(one) == len(other) and 2 * sum(map(eq, one, other)) >= len(one)


def _name_before(text: Sequence[str], at: int) -> str:
    """The name whose value may stand here: in the piece before, or, as for the time of a day, in the one before that."""
    if at > 1 and text[at - 2].endswith((":", "=")) and not text[at - 1].endswith((":", "=")):
        return _name(text[at - 2])
    return _name(text[at - 1]) if at else ""


def _name(piece: str) -> str:
    return "#" if piece[:1] == "#" else piece.partition(":")[0].partition("=")[0].strip("\"'{}[]()\\")


def complaint(text: str, asked: str) -> str:
    """An error without what it repeats of the question: what is left is what it complains about."""
    known = set(words(asked))
    return " ".join(["~" if word in known else word for word in words(text)])


# --- what kind of answer it is ----------------------------------------------------------------------------------------

_TRANSIENT = (
    r"\b(?:408|425|429|50[0234]|52[0-9])\b|timed[ -]?out|time-?out|too many requests|rate.?limit|temporar|unavailable|overloaded"
    r"|connection ?(?:reset|refused|aborted)|broken ?pipe|try again later"
)
_READ_OF_AN_ERROR = 400


def is_transient(error: str) -> bool:
    """Whether an error says that the same call may well succeed a moment later: 429, 5xx, timeouts, connections."""
    return re.search(_TRANSIENT, error[:_READ_OF_AN_ERROR].lower()) is not None


_ERROR_TEXT = re.compile(r"""\s*(?:[{]\s*["']error["']|error\b|exception\b|traceback\b|fatal\b)""", re.IGNORECASE)


def is_error_text(text: str) -> bool:
    """Whether an output is an error that was returned instead of raised."""
    return _ERROR_TEXT.match(text) is not None


_LONGEST_THANKS = 160
_THANKS = frozenset(
    {
        "a", "all", "an", "and", "been", "code", "exit", "for", "from", "has", "have", "in", "is", "it", "item", "message", "none", "null",
        "of", "ok", "okay", "on", "output", "response", "result", "returncode", "row", "rows", "sent", "set", "stderr", "stdout", "status",
        "success", "successful", "successfully", "succeeded", "the", "this", "to", "true", "was", "were", "with", "written", "you", "your",
        "done", "0", "1", "200", "201", "202", "204",
    }
)  # fmt: skip
_REFUSALS = frozenset(
    {
        "cannot", "couldn", "denied", "doesn", "error", "expired", "failed", "failure", "incomplete", "invalid", "missing", "no", "not",
        "pending", "refused", "rejected", "unable", "unknown",
    }
)  # fmt: skip


def is_bare(text: str, asked: str) -> bool:
    """Whether an answer says no more than that the call was taken: empty, `OK`, `{"status": "ok"}`, `You have clicked king.`

    An empty list is no thanks: it answers a question.
    """
    if len(text) > _LONGEST_THANKS:
        return False
    said = words(text.lower())
    if not said:
        return not text.strip(" \t\r\n\"'.")
    if not _REFUSALS.isdisjoint(said):
        return False
    left = [word for word in said if word not in _THANKS and not word.endswith("ed")]
    if not left:
        return True
    known = set(words(asked.lower()))
    new = len([word for word in left if word not in known])
    return len(left) < len(said) and new <= len(said) // 4 and new < len(left)


_ASIDE = frozenset(
    {"thought", "thoughts", "thinking", "think", "reasoning", "reflection", "note", "notes", "scratchpad", "plan"}
)
_LONGEST_ASIDE = 2 + max(map(len, _ASIDE)) + 1
_KEYS = re.compile(r'"((?:[^"\\]|\\.)*)":')


def is_aside(arguments: str) -> bool:
    """Whether arguments are thoughts or notes, by the names of all their fields: `{"thought":"…"}`."""
    if not arguments.startswith('{"') or arguments[2:_LONGEST_ASIDE].partition('"')[0] not in _ASIDE:
        return False
    return _ASIDE.issuperset(_KEYS.findall(arguments))


def is_nothing(arguments: str) -> bool:
    """Whether all fields of the arguments are empty texts: `{"command":""}`. No fields at all are no such thing."""
    return arguments.endswith('":""}') and arguments.count('":') == arguments.count('":""')
