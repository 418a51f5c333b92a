"""Times, sizes and counts as text, for the command line, pictures and summaries."""

from __future__ import annotations


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
