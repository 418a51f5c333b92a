"""The summary of many spans: totals, covered time, and the sentence."""

from __future__ import annotations

import math

import pytest

from stio.runtime.reports.timeline import CALLER, Span, covered_seconds, summarize, usable


def span(name: str, start: float, end: float, *, lane: str = "read-1", num_bytes: int = 0) -> Span:
    return Span(name, lane, start, end, num_bytes)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 2)], 2),
        ([(0, 1), (3, 4)], 2),
        ([(0, 3), (1, 2), (2, 5)], 5),
        ([(0, 2), (0, 1)], 2),
        ([(1, 1)], 0),
    ],
)
def test_covered_time_counts_what_overlaps_once(times: list[tuple[float, float]], seconds: float) -> None:
    assert covered_seconds(usable(span("read", *time) for time in reversed(times))) == seconds


@pytest.mark.parametrize(
    ("start", "end"), [(math.nan, 1), (0, math.nan), (-math.inf, 0), (0, math.inf), (2, 1), (0, 1e300)]
)
def test_spans_without_a_place_in_time_are_left_out(start: float, end: float) -> None:
    assert usable([span("read", start, end)]) == []


def test_outer_spans_come_before_what_lies_within() -> None:
    spans = [span("inner", 0, 1), span("outer", 0, 2), span("early", -1, 0)]
    assert [found.name for found in usable(spans)] == ["early", "outer", "inner"]


def test_start_end_and_bytes() -> None:
    summary = summarize(
        [span("read", 0, 2, num_bytes=10), span("read", 1, 3, lane="read-2", num_bytes=5), span("tensors", 3, 4)]
    )
    assert (summary.start, summary.end, summary.num_bytes) == (0, 4, 15)


MB = 10**6

SENTENCES = [
    ([], "nothing was recorded"),
    ([span("open", 0, 0.5)], "0.50 s in all"),
    ([span("read", 1, 1, num_bytes=MB)], "1 MB in 0 µs"),
    (
        [span("open", 0, 1), span("read", 1, 4, num_bytes=300 * MB), span("populate", 3, 5, num_bytes=100 * MB)],
        "400 MB in 5 s, 80 MB/s; read 60 %, populate 40 % of the time",
    ),
    (
        [
            span("read", 0, 8, num_bytes=800 * MB),
            span("copy", 5, 10, lane="copy", num_bytes=800 * MB),
            span("wait", 8, 9),
            span("wait", 0, 1, lane=CALLER),
            span("consume", 1, 3, lane=CALLER),
            span("consume", 2, 4, lane=CALLER),
        ],
        "800 MB in 10 s, 80 MB/s; read 80 %, copy 50 %, consume 30 %, threads waiting 10 %, caller waiting 10 % of the time",
    ),
    (
        [
            span("stage", 0, 1, num_bytes=200 * MB),
            span("write", 1, 3, num_bytes=200 * MB),
            span("sync", 3, 4),
            span("wait", 0, 1, lane=CALLER),
        ],
        "200 MB in 4 s, 50 MB/s; stage 25 %, write 50 %, sync 25 %, caller waiting 25 % of the time",
    ),
]


@pytest.mark.parametrize(("spans", "sentence"), SENTENCES)
def test_the_sentence_says_where_the_time_went(spans: list[Span], sentence: str) -> None:
    assert summarize(spans).sentence == sentence
