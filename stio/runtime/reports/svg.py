"""The frame of all pictures in SVG: of one width, for light and dark viewers.

Texts may come from hostile files. `text` escapes and cuts them, and no text becomes part of the style.
"""

from __future__ import annotations

from html import escape

from stio.errors import printable

WIDTH = 840
"""Of every picture, in pixels."""

LINE_HEIGHT = 19

_STYLE = """\
.stio{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.stio .title{font-size:15px;font-weight:600}
"""
_LIGHT = ".stio text{fill:#1f2328}.stio .soft{fill:#59636e}.stio .paper{fill:#fff}"
_DARK = ".stio text{fill:#e6edf3}.stio .soft{fill:#9198a1}.stio .paper{fill:#0d1117}"


def document(body: str, *, height: int, label: str, light: str, dark: str) -> str:
    """Return an SVG document.

    Args:
        body: Its elements.
        height: In pixels.
        label: Description for screen readers, not escaped yet.
        light: Style rules in addition to the common ones.
        dark: Rules that replace them for a dark viewer.
    """
    style = f"{_STYLE}{_LIGHT}{light}\n@media (prefers-color-scheme:dark){{{_DARK}{dark}}}"
    return (
        f'<svg class="stio" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"><style>{style}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>{body}</svg>\n'
    )


def text(value: str, limit: int = 200) -> str:
    """Return text for markup: control characters made visible, cut to `limit` characters, the rest escaped."""
    return escape(cut(printable(value), limit))


def cut(value: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if some are left out."""
    return value if len(value) <= limit else value[: limit - 1] + "…"
