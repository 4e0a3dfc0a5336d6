"""Markdown tables of results: `table` of given cells, and `grid` of cells in any order. `with_blocks` puts them into a page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minirt.bench.report import markdown_table
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table. The first `left` columns are text; the others are numbers, aligned to the right."""
    return "\n".join(markdown_table(columns, rows, left))


def with_blocks(text: str, make: Mapping[str, Callable[[str], str]]) -> str:
    """The text of a page with each block made again: what is between `<!-- NAME -->` and `<!-- end of NAME -->`."""

    def anew(match: re.Match[str]) -> str:
        made = make[match["name"]](match["name"])
        return match["start"] + (f"{made}\n" if made else "") + match["end"]

    pattern = rf"(?P<start><!-- (?P<name>{'|'.join(make)}) -->\n)(?:.*?\n)??(?P<end><!-- end of (?P=name) -->)"
    return re.sub(pattern, anew, text, flags=re.DOTALL)


def grid(title: str, cells: Iterable[tuple[str, Mapping[Any, str]]], columns: Iterable[Any] = ()) -> str:
    """A table of cells in any order. Rows and columns are in the order in which they are first named.

    Args:
        cells: name of a row, and texts of some of its columns. A column's key is its head, or a tuple that ends with the head, if
            several columns have this head.
        columns: those that come first.
    """
    rows: dict[str, dict[Any, str]] = {}
    keys = dict.fromkeys(columns)
    for row, texts in cells:
        keys |= dict.fromkeys(texts)
        rows.setdefault(row, {}).update(texts)
    heads = [key[-1] if isinstance(key, tuple) else key for key in keys]
    return table([title, *heads], ([row, *(texts.get(key, NONE) for key in keys)] for row, texts in rows.items()))


def rows_of(records: Records) -> Iterator[Result]:
    """The rows of all records, each with its record, the record's format and its mark."""
    for record in records.values():
        for row in record["results"]:
            yield row | {"record": record, "format": format_of(record), "mark": mark(record)}
