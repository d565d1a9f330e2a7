"""What was measured, as tables: printed, written as a page, and kept as JSON of one shape, so that two commits can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHAPE = 1
"""The number of the JSON's shape: another one where a program that reads it has to be changed."""


@dataclass(frozen=True)
class Wanted:
    """What a figure is to be: at most, or at least, so much."""

    column: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    """Such as "stretch"."""

    def is_met(self, figures: Mapping[str, float]) -> bool | None:
        """Whether it is; None where there is no such figure."""
        figure = figures.get(self.column)
        if figure is None:
            return None
        return (self.at_most is None or figure <= self.at_most) and (self.at_least is None or figure >= self.at_least)

    def __str__(self) -> str:
        limit = f"≤ {self.at_most:,g}" if self.at_most is not None else f"≥ {self.at_least:,g}"
        return f"{self.column} {limit}" + (f" ({self.note})" if self.note else "")


@dataclass
class Row:
    """One subject: its figures by column, what is wanted of them, or why there are none."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    wanted: Sequence[Wanted] = ()
    note: str = ""
    """What it promises, or which setting this is."""
    error: str = ""
    """Why it could not be measured."""


@dataclass
class Table:
    """Rows that were measured together."""

    key: str
    """Its name in the JSON, which stays."""
    title: str
    about: str
    """Which calls are timed and where, in sentences."""
    columns: Mapping[str, int]
    """The columns and with how many digits behind the point each is shown."""
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, figures: dict[str, float], *wanted: Wanted) -> None:
        """One more row, of a subject that was measured."""
        self.rows.append(Row(name, figures, wanted))


# --- as text ----------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """The table with its title and its sentences."""
    has_notes, has_wanted = any(row.note for row in table.rows), any(row.wanted for row in table.rows)
    head = ["", *table.columns, *(["wanted"] if has_wanted else []), *(["note"] if has_notes else [])]
    lines = [head]
    for row in table.rows:
        cells = [row.name, *(_figure(row.figures.get(name), digits) for name, digits in table.columns.items())]
        if has_wanted:
            cells.append("; ".join(f"{wanted}: {_verdict(wanted, row)}" for wanted in row.wanted))
        if has_notes or row.error:
            cells.append(f"not measured: {row.error}" if row.error else row.note)
        lines.append(cells)
    widths = [max(len(line[at]) for line in lines if at < len(line)) for at in range(max(map(len, lines)))]
    numbers = range(1, 1 + len(table.columns))
    shown = [_line(line, widths, numbers) for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + (":" if at in numbers else "-") for at, width in enumerate(widths)) + "|"
    return "\n".join([f"## {table.title}", "", table.about, "", shown[0], rule, *shown[1:], ""])


def _line(cells: Sequence[str], widths: Sequence[int], numbers: range) -> str:
    padded = [*cells, *[""] * (len(widths) - len(cells))]
    return (
        "| "
        + " | ".join(
            text.rjust(width) if at in numbers else text.ljust(width)
            for at, (text, width) in enumerate(zip(padded, widths, strict=True))
        )
        + " |"
    )


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _verdict(wanted: Wanted, row: Row) -> str:
    met = wanted.is_met(row.figures)
    return "not measured" if met is None else "**yes**" if met else "no"


# --- as data ----------------------------------------------------------------------------------------------------------


def as_data(tables: Sequence[Table], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The tables as JSON: `figures` by table, row and column; `wanted` with what came of it; and what was not measured."""
    return {
        "shape": SHAPE,
        **facts,
        "figures": {table.key: {row.name: row.figures for row in table.rows if row.figures} for table in tables},
        "wanted": [
            {
                "table": table.key, "row": row.name, "column": wanted.column, "note": wanted.note,
                "at_most": wanted.at_most, "at_least": wanted.at_least,
                "figure": row.figures.get(wanted.column), "met": wanted.is_met(row.figures),
            }
            for table in tables for row in table.rows for wanted in row.wanted
        ],
        "not_measured": {f"{table.key}, {row.name}": row.error for table in tables for row in table.rows if row.error},
    }  # fmt: skip


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float, float]]:
    """Table, row, column, and the two figures, for each that both have."""
    for table, rows in before["figures"].items():
        for row, figures in rows.items():
            others = after["figures"].get(table, {}).get(row, {})
            for column, figure in figures.items():
                if column in others:
                    yield table, row, column, figure, others[column]
