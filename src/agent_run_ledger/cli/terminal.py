"""What is shown: text without secrets and control characters, JSON without secrets, tables, and a line of progress."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime
from typing import Any, TextIO

from agent_run_ledger.redacting import Redactor

_DANGEROUS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WIDTH_OF_A_FILE = 160
_SECONDS_BETWEEN = 0.02
_LONGEST_READ = 10_000
"""Of a text that is cut, so many characters at most are looked at: a payload may have megabytes."""

_redactor: Redactor | None = Redactor()
"""Through which everything goes that is shown; None while somebody has asked to see secrets."""


@contextmanager
def showing(redactor: Redactor | None) -> Iterator[None]:
    """Show everything through this redactor meanwhile, or, without one, as it is."""
    global _redactor
    before, _redactor = _redactor, redactor
    try:
        yield
    finally:
        _redactor = before


@contextmanager
def writable() -> Iterator[None]:
    """Standard output and error take any text, whatever the caller has closed and whichever encoding is set."""
    with ExitStack() as stack:
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            stream = getattr(sys, name)
            if stream is None:  # closed by whoever started us, as cron and systemd may do: nobody reads it
                stack.enter_context(redirect(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        yield


def plain(text: str) -> str:
    """`text` for a terminal: without secrets, and `escaped`."""
    return escaped(_redactor.text(text) if _redactor is not None else text)


def escaped(text: str) -> str:
    """`text` with every control, bidi and other invisible character, and every lone surrogate, spelt out as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(each) if unicodedata.category(each) in _DANGEROUS else each for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def as_json(value: Any) -> str:
    """One JSON text without secrets, in ASCII, so that a terminal is safe from it too."""
    return _dumped(value, 2)


def as_json_line(value: Any) -> str:
    """`as_json` in one line, for a stream of them."""
    return _dumped(value, None)


def _dumped(value: Any, indent: int | None) -> str:
    if _redactor is None:
        text = json.dumps(value, indent=indent, default=str)
    else:
        redactor = _redactor
        text = json.dumps(redactor.data(value), indent=indent, default=lambda each: redactor.text(str(each)))
    return text.replace("\x7f", "\\u007f")


def counted(number: int, one: str, many: str) -> str:
    """`1 run`, `3 runs`, `no runs`."""
    return f"{number or 'no'} {one if number == 1 else many}"


def cut(value: object, columns: int) -> str:
    """`value` as text that is safe to show, cut to that many columns. A damaged row may hold anything; None is empty."""
    text = "" if value is None else str(value)
    longest = max(_LONGEST_READ, 2 * columns)
    if len(text) > longest:
        text = text[:longest] + "…"
    text = _redactor.text(text) if _redactor is not None else text
    head = escaped(text[: columns + 1])
    if len(text) <= columns + 1 and columns_of(head) <= columns:
        return head
    while head and columns_of(head) > columns - 1:
        head = head[:-1]
    return head + "…"


def columns_of(text: str) -> int:
    """How many columns of a terminal `text` takes."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else not unicodedata.combining(each) for each in text)


def when(seconds: float) -> str:
    """A time in the zone of whoever reads it, to the second."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return "(no time)"


def took(seconds: float | None) -> str:
    """A duration for people; nothing where there is none."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if not days else f"{days} d {hours % 24} h"


def since(seconds: float) -> str:
    """How long ago a time was, or how far off it is: `5 min ago`, `in 2 h 0 min`. Unix seconds."""
    ago = time.time() - seconds
    return f"{took(ago)} ago" if ago >= 0 else f"in {took(-ago)}"


def labelled(facts: Iterable[tuple[str, object]], *, columns: int | None = None) -> str:
    """One line a fact, each value cut to so many columns, if any; facts that are None are left out."""
    return "\n".join(
        f"{name + ':':<14} {plain(str(value)) if columns is None else cut(str(value), columns)}"
        for name, value in facts
        if value is not None
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, stretch: int | None = None, is_wrapped: bool = False
) -> str:
    """Columns of text; the one at index `stretch` gets what the others leave of the line.

    What does not fit there is cut, or, where `is_wrapped`, goes on below.
    """
    shown = [[cut(cell, 60 if at != stretch else 2000) for at, cell in enumerate(row)] for row in rows]
    widths = [max(columns_of(row[at]) for row in ([*heads], *shown)) for at in range(len(heads))]
    if stretch is not None:
        others = sum(widths) - widths[stretch] + 2 * (len(widths) - 1)
        room = max(width() - others, len(heads[stretch]), 20)
        widths[stretch] = min(widths[stretch], room)
        if is_wrapped:
            shown = [part for row in shown for part in _wrapped(row, stretch, room)]
        for row in shown:
            row[stretch] = cut(row[stretch], room)
    lines = ([*heads], *shown)
    return "\n".join(
        "  ".join(cell + " " * (width - columns_of(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _wrapped(row: list[str], at: int, room: int) -> Iterator[list[str]]:
    """The row, and below it rows that hold nothing but the rest of the cell at index `at`."""
    parts = folded(row[at], room)
    yield [*row[:at], parts[0], *row[at + 1 :]]
    for part in parts[1:]:
        yield [part if index == at else "" for index in range(len(row))]


def folded(text: str, columns: int) -> list[str]:
    """Text that is safe to show in lines of so many columns at most, broken at spaces where there are some. One line at least."""
    lines = []
    while columns_of(text) > columns:
        end = columns
        while end > 1 and columns_of(text[:end]) > columns:
            end -= 1
        space = text.rfind(" ", 0, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end])
        text = text[end:].removeprefix(" ")
    return [*lines, text]


def width() -> int:
    """The columns of the terminal; of a file what still can be read."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_OF_A_FILE


class Progress:
    """A line that changes where a person watches; `milestone` lines stay, and are all that a file gets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_watched = stream.isatty()
        self._is_open = False
        self._next = 0.0

    def show(self, text: str) -> None:
        """Replace the changing line, a few times a second."""
        if self._is_watched and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + cut(text, columns) + "\x1b[K")
            self._stream.flush()
            self._is_open = True

    def checked(self, entries: int) -> None:
        """Show how far `verify` is."""
        self.show(f"verifying: {counted(entries, 'entry', 'entries')} checked")

    def milestone(self, text: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._stream.write(plain(text) + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the changing line away."""
        if self._is_open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_open = False
