"""Times, sizes and counts as text."""

from __future__ import annotations

import pytest

from stio.text import counted, natural_key, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"), (7e-6, "7 µs"), (9.996e-4, "1 ms"), (0.0201, "20.1 ms"), (0.09994, "99.9 ms"), (0.42, "0.42 s"),
        (0.9996, "1 s"), (1.5234, "1.52 s"), (99.96, "100 s"), (12345.6, "12,346 s"),
    ],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (32_000_000, "32 MB"),
        (1.7384e9, "1.74 GB"),
        (999.6e6, "1 GB"),
        (5e15, "5,000 TB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert show_bytes(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "file") == text


def test_numbers_in_names_are_in_their_order() -> None:
    ordered = ["", "02", "2", "10", "9" * 5000, "a", "a.1", "a.2.b", "a.02.c", "a.10.a", "a.b", "b1", "b01x", "é1"]
    assert sorted(set(ordered), key=natural_key) == ordered
