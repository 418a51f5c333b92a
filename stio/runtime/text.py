"""Text for readers: times, sizes and counts, and the order of names with numbers."""

from __future__ import annotations

import re
from typing import Any

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
