"""Tables in Markdown, each from one list of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Column = Callable[[list[Row]], str]
Columns = Mapping[str, Column]  # heading -> the cell for the rows of one line


def markdown(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(x).replace('|', '/') for x in line)} |" for line in lines)


def table(columns: Columns, rows: Iterable[Row]) -> str:
    """A table in Markdown, a line for all rows that share the entry "work", or for each row."""
    lines: dict[Any, list[Row]] = {}
    for index, row in enumerate(rows):
        lines.setdefault(str(row.get("work", index)), []).append(row)
    cells = ([column(line) for column in columns.values()] for line in lines.values())
    return markdown([*columns], cells)


# --- columns ---


def entry(name: str, form: str = "") -> Column:
    """The first row's entry in a format; a dash where there is none."""

    def cell(rows: list[Row]) -> str:
        value = rows[0].get(name)
        values = value if isinstance(value, list) else [value]
        return ", ".join(format(each, form) for each in values if each is not None) or "-"

    return cell


def digits(number: float) -> str:
    """A number with three digits, or as a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def with_noise(numbers: Iterable[float]) -> str:
    """A median, and the quartiles around it if there are any."""
    low, median, high = map(digits, numbers)
    return median if low == high else f"{median} ({low}-{high})"


TARGETS: Columns = {
    "case": entry("claim"),
    "number": entry("what"),
    "target": entry("target"),
    "measured": lambda rows: measured(rows[0]),
    "met": entry("met"),
}


def measured(row: Row) -> str:
    if row["found"] is None:
        return "-"
    low, high = row.get("quartiles") or [row["found"]] * 2
    return with_noise((low, row["found"], high))
