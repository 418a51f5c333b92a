"""Pictures of traces: well-formed, bounded, honest about time, and closed to hostile names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import stio
from stio.runtime.reports.timeline import MAX_BYTES, Span, draw
from stio.runtime.reports.trace import Trace

SVG = "{http://www.w3.org/2000/svg}"
PLOT = 712

HOSTILE = [
    "</text><script>alert(1)</script>",
    '"><image href="https://example.org/x"/>',
    "a & b < c > d ' e \"",
    "\x00\x01\x1b[31m\r\n\t",
    "\ud800 \udfff",
    "\u202e\u202d\u2028",
    "]]>--><!--",
    "&#x3c;script&#x3e; &amp;lt;",
    "}</style><style>*{display:none}",
    "x" * 100_000,
    "\U0001f600" * 500,
    "",
]


def parsed(svg: str) -> ElementTree.Element:
    assert len(svg.encode()) <= MAX_BYTES
    return ElementTree.fromstring(svg)


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    plot = next(element for element in root.iter(f"{SVG}svg") if element.get("class") == "plot")
    return [element for element in plot.iter(f"{SVG}path") if (element.get("class") or "").startswith("bar")]


def extent(bar: ElementTree.Element) -> tuple[float, float]:
    """Return where the first rectangle of a shape begins, and how wide it is."""
    found = re.match(r"M([0-9.]+) [0-9.]+h([0-9.]+)v", bar.get("d") or "")
    assert found
    return float(found[1]), float(found[2])


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def tip(element: ElementTree.Element) -> str:
    title = element.find(f"{SVG}title")
    return "" if title is None else title.text or ""


def work(num: int, *, lanes: int = 2, seconds: float = 1e-3) -> list[Span]:
    """Return spans one after the other, reads and tensors in turns, on each lane."""
    return [
        Span(("read", "tensors")[k % 2], f"read-{lane}", k * seconds, (k + 1) * seconds, 1_000_000, "CopiedPath")
        for lane in range(1, lanes + 1)
        for k in range(num)
    ]


# What is drawn.


def test_each_lane_is_a_row_in_an_order_for_people() -> None:
    lanes = ["caller", "copy", "read-10", "read-2", "stream"]
    root = parsed(draw([Span("read", lane, 0, 1) for lane in lanes]))
    shown = [text.split("\n")[0] for text in texts(root)]
    places = [next(k for k, text in enumerate(shown) if text.startswith(lane)) for lane in lanes]
    assert sorted(lanes, key=lambda lane: places[lanes.index(lane)]) == [
        "stream",
        "read-2",
        "read-10",
        "copy",
        "caller",
    ]


def test_bars_stand_where_their_time_was() -> None:
    spans = [Span("read", "read-1", 2.0, 3.0, 50_000_000, "StagedPath"), Span("wait", "read-1", 3.0, 6.0)]
    read, wait = bars(parsed(draw(spans)))
    assert extent(read) == pytest.approx((0, PLOT / 4), abs=0.01)
    assert extent(wait) == pytest.approx((PLOT / 4, PLOT * 3 / 4), abs=0.01)
    assert tip(read) == "read 1 s, 50 MB, 50 MB/s"
    assert tip(wait) == "wait 3 s"
    assert read.get("class") != wait.get("class")


def test_what_lies_within_is_drawn_above() -> None:
    spans = [Span("copy", "load", 1, 2), Span("read", "load", 0, 4)]
    assert [tip(bar).split()[0] for bar in bars(parsed(draw(spans)))] == ["read", "copy"]


def test_the_legend_has_seconds_and_bytes_of_each_kind() -> None:
    spans = [Span("read", "read-1", 0, 2, 10**9), Span("read", "read-2", 1, 2, 10**9), Span("open", "load", 0, 0.5)]
    assert {"read 3 s, 2 GB, 667 MB/s", "open 0.50 s"} <= set(texts(parsed(draw(spans))))


def test_the_line_at_the_top_is_the_summary_and_the_label() -> None:
    root = parsed(draw([Span("read", "load", 0, 2, 10**9)], title="a load"))
    sentence = "1 GB in 2 s, 500 MB/s; read 100 % of the time"
    assert texts(root)[:2] == ["a load", sentence]
    assert root.get("aria-label") == sentence


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.42, ["0 ms", "100 ms", "200 ms", "300 ms", "400 ms"]),
        (10, ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]),
        (5e-5, ["0 µs", "10 µs", "20 µs", "30 µs", "40 µs", "50 µs"]),
        (86400, ["0 s", "20000 s", "40000 s", "60000 s", "80000 s"]),
    ],
)
def test_ticks_are_round(seconds: float, labels: list[str]) -> None:
    root = parsed(draw([Span("read", "load", 5, 5 + seconds)]))
    axis = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "axis")
    assert ["".join(text.itertext()) for text in axis] == labels


def test_light_and_dark() -> None:
    svg = draw(work(4))
    light, dark = svg.split("@media (prefers-color-scheme:dark)")
    for rule in (".paper{fill:", " text{fill:", ".row{fill:", ".wait{fill:"):
        (one,), (other,) = (re.findall(re.escape(rule) + "([^;}]+)", part) for part in (light, dark))
        assert one != other


def test_pictures_on_one_page_keep_their_colours() -> None:
    """The style of each holds for the whole page."""
    one, other = (
        draw([Span(name, "load", k, k + 1) for k, name in enumerate(names)])
        for names in (("read", "copy"), ("copy", "mine"))
    )
    assert one.split("<style>")[1].split("</style>")[0] == other.split("<style>")[1].split("</style>")[0]


@pytest.mark.parametrize("spans", [[], [Span("read", "load", 1, 1)], [Span("read", "load", float("nan"), 1)]])
def test_next_to_nothing(spans: list[Span]) -> None:
    parsed(draw(spans))


# Many spans.


def blocks(bar: ElementTree.Element) -> list[tuple[float, float]]:
    """Return where each rectangle of a shape begins, and how wide it is."""
    return [(float(x), float(width)) for x, width in re.findall(r"M([0-9.]+) [0-9.]+h([0-9.]+)v", bar.get("d") or "")]


def test_spans_without_a_visible_gap_are_one_block() -> None:
    spans = [Span(("read", "hash")[k % 4 == 3], "read-1", k, k + 1.0, 10) for k in range(20_000)]
    read, hashed = bars(parsed(draw(spans)))
    assert tip(read) == "read 15,000 s, 150 kB, 10 B/s"
    assert len(blocks(read)) == 1
    assert sum(width for _, width in blocks(read)) == pytest.approx(PLOT, rel=0.01)
    assert tip(hashed).startswith("hash 5,000 s")


def test_gaps_of_a_few_spans_are_drawn() -> None:
    (read,) = bars(parsed(draw([Span("read", "read-1", 2.0 * k, 2.0 * k + 1) for k in range(50)])))
    assert len(blocks(read)) == 50


def test_spans_that_overlap_are_one_block() -> None:
    (copy,) = bars(parsed(draw([Span("copy", "copy", k, k + 2.5) for k in range(9)])))
    assert blocks(copy) == [(0, PLOT)]


def test_a_gap_shows_when_nothing_was_done() -> None:
    spans = [Span("read", "read-1", k, k + 1.0) for k in [*range(10_000), *range(30_000, 40_000)]]
    (read,) = bars(parsed(draw(spans)))
    assert not [x for x, width in blocks(read) if x + width > PLOT * 0.26 and x < PLOT * 0.74]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "spans",
    [
        pytest.param(work(5_000, lanes=8), id="alternating"),
        pytest.param([Span("read", f"lane-{k}", k, k + 1.0) for k in range(5_000)], id="lanes"),
        pytest.param([Span(f"kind-{k}", "load", k, k + 1.0) for k in range(5_000)], id="kinds"),
        pytest.param(
            [Span(f"kind-{k % 99}", f"lane-{k % 97}", 0, 1e6, 1, "&" * 99) for k in range(9_000)], id="all over"
        ),
        pytest.param(
            [Span("&" * 99, "&" * 99 + str(k % 24), k, k + 1.0, 1, "&" * 99) for k in range(2_400)], id="escapes"
        ),
    ],
)
def test_a_picture_stays_below_a_megabyte(spans: list[Span]) -> None:
    root = parsed(draw(spans, title="&" * 1000))
    assert int(root.get("height") or 0) < 1000


def test_too_many_lanes_share_the_last_row() -> None:
    root = parsed(draw([Span("read", f"lane-{k:02}", k, k + 1.0) for k in range(100)]))
    assert [text for text in texts(root) if text.startswith("77 more")]


# Hostile names.


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_and_nothing_else(name: str) -> None:
    spans = [Span(name, name, 0, 1, 1, name), Span("read", "load", 0, 1, 1, name)]
    plain = parsed(draw([Span("x", "x", 0, 1, 1, "x"), Span("read", "load", 0, 1, 1, "x")], title="x"))
    root = parsed(draw(spans, title=name or "x"))
    assert [element.tag for element in root.iter()] == [element.tag for element in plain.iter()]
    assert [style.text for style in root.iter(f"{SVG}style")] == [style.text for style in plain.iter(f"{SVG}style")]
    assert all(len(text) < 250 for text in texts(root))


def test_a_picture_fetches_nothing() -> None:
    text = draw(work(10), title="t")
    assert not re.findall(r"(?:src|href|url|import|fetch|script|on\w+=)\b", text)
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}


# The public methods.


def test_a_trace_saves_its_picture(tmp_path: Path) -> None:
    trace = Trace(origin=0.0)
    trace.add("read", 1.0, 2.0, num_bytes=7, detail="naïve", lane="read-1")
    path = tmp_path / "a.svg"
    trace.save_svg(str(path), title="Größe")
    text = path.read_text(encoding="utf-8")
    assert ("Größe" in text, "7 B in 1 s" in text) == (True, True)
    assert text.startswith("<svg")
    trace.save_svg(path)
    assert "Größe" not in path.read_text(encoding="utf-8")


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stio.Trace().save_svg(tmp_path / "nowhere" / "a.svg")
