"""Objects as notebooks show them: a small table in HTML. Text may come from hostile files, so it is escaped and cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from stio.errors import one_line, printable

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
    texts = "".join(f'<{tag} style="text-align:left">{_text(cell)}</{tag}>' for cell in cells)
    return f"<tr>{texts}</tr>"


def _text(value: str) -> str:
    return escape(printable(value))
