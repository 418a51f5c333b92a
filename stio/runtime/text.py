"""Text for readers: times, sizes and counts, the order of names with numbers, and tables in HTML for notebooks.

The text of a table may come from hostile files, so it is escaped and cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Any

from stio.errors import one_line, printable

_NUMBER = re.compile("([0-9]+)")


def show_seconds(seconds: float) -> str:
    """Return a time as text: `1.52 s`, `0.42 s`, `20.1 ms`, `7 µs`."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.09995:
        return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds:.2f} s"
    if seconds >= 0.0009995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs"


def show_bytes(nbytes: float) -> str:
    """Return a size as text, in powers of ten: `512 B`, `32 MB`, `1.74 GB`."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value >= 99.95 or units[0] == "B" else f"{value:.3g} {units[0]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def natural_key(name: str) -> tuple[list[Any], str]:
    """Return a key that sorts names with numbers by their values: `layers.2` before `layers.10`."""
    parts: list[Any] = _NUMBER.split(name)
    # By length, then by digits: the interpreter refuses to convert thousands of digits.
    parts[1::2] = ((len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2]))
    return parts, name


MAX_ROWS = 40
"""Most rows of a table. The title has the whole number."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_rows: int) -> str:
    """Return a table as HTML, at most `MAX_ROWS` long; a line below it says how many rows are left out.

    Args:
        title: Text above the table, not escaped yet. It is not cut: the caller cuts the names in it.
        columns: Titles of the columns; empty: the table has no head.
        rows: Cells of the first rows, not escaped yet.
        num_rows: Number of all rows.
    """
    head = _row(columns, "th") if columns else ""
    shown = list(islice(rows, MAX_ROWS))
    body = "".join(_row(cells, "td") for cells in shown)
    more = f"<p>and {num_rows - len(shown):,} more</p>" if num_rows > len(shown) else ""
    return f"<div><p>{escape(one_line(title))}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>{more}</div>"


def _row(cells: Sequence[str], tag: str) -> str:
    texts = "".join(f'<{tag} style="text-align:left">{escape(printable(cell))}</{tag}>' for cell in cells)
    return f"<tr>{texts}</tr>"
