"""Markdown tables of results: `table` of given cells, and `Grid` filled cell by cell. `with_blocks` puts them into a page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minirt.bench.tools.results import Records, Result, format_of, mark

NONE = "–"  # a cell without a measured value


def milliseconds(ms: float) -> str:
    """Format milliseconds with about three digits: two decimals below 10, else one."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:,.1f}"


def ms(seconds: float | Mapping[str, Any] | None) -> str:
    """Milliseconds of seconds, or of the median of a summary."""
    if seconds is None:
        return NONE
    return milliseconds((seconds["median"] if isinstance(seconds, Mapping) else seconds) * 1e3)


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def percent(value: float | None) -> str:
    """Like `share`, but a small share is not 0%."""
    return "< 1%" if value is not None and 0 < value < 0.01 else share(value)


def signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. All columns but the first are numbers, aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_blocks(text: str, make: Mapping[str, Callable[[str], str]]) -> str:
    """The text of a page with each block made again: what is between `<!-- NAME -->` and `<!-- end of NAME -->`."""

    def anew(match: re.Match[str]) -> str:
        made = make[match["name"]](match["name"])
        return match["start"] + (f"{made}\n" if made else "") + match["end"]

    pattern = rf"(?P<start><!-- (?P<name>{'|'.join(make)}) -->\n)(?:.*?\n)??(?P<end><!-- end of (?P=name) -->)"
    return re.sub(pattern, anew, text, flags=re.DOTALL)


class Grid:
    """A table that is filled cell by cell. Rows and columns are in the order in which they are first named.

    Args:
        columns: those that come first.
        empty: the text of a cell that is not filled.
    """

    def __init__(self, title: str, columns: Iterable[Any] = (), empty: str = NONE) -> None:
        self._title, self._empty = title, empty
        self._columns = dict.fromkeys(columns)
        self._rows: dict[str, dict[Any, str]] = {}
        self._marks: dict[str, str] = {}

    def put(self, row: str, column: Any, text: str, mark: str = "") -> None:
        """`column`: its head, or a tuple that ends with the head, if several columns have this head. `mark`: of the row."""
        self._columns[column] = None
        self._rows.setdefault(row, {})[column] = text
        self._marks[row] = mark or self._marks.get(row, "")

    def __str__(self) -> str:
        heads = [column[-1] if isinstance(column, tuple) else column for column in self._columns]
        rows = (
            [row + self._marks[row], *(cells.get(column, self._empty) for column in self._columns)]
            for row, cells in self._rows.items()
        )
        return table([self._title, *heads], rows)


def rows_of(records: Records) -> Iterator[Result]:
    """The rows of all records, each with its record, the record's format and its mark."""
    for record in records.values():
        for row in record["results"]:
            yield row | {"record": record, "format": format_of(record), "mark": mark(record)}
