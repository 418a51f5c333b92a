"""Pictures of rates: bars in proportion, well-formed whatever the labels are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.bar_chart import Panel, Rate, draw_panels

SVG = "{http://www.w3.org/2000/svg}"
RATES = [
    Rate("limit", 2e9, 1.9e9, 2.5e9, "limit"),
    Rate("stio", 1e9, 0.8e9, 1.2e9, "ours"),
    Rate("other", 0.5e9, 0.5e9, 0.5e9, "peer"),
]


def bars(root: ElementTree.Element) -> dict[str, float]:
    found = {element.get("class", ""): float(element.get("width", "")) for element in root.iter(f"{SVG}rect")}
    del found["paper"]
    return found


def test_bars_are_in_proportion() -> None:
    root = ElementTree.fromstring(draw_panels([Panel("A title", RATES, ["A sentence."])]))
    widths = bars(root)
    assert widths["ours"] == pytest.approx(widths["limit"] / 2, abs=0.1)
    assert widths["peer"] == pytest.approx(widths["limit"] / 4, abs=0.1)
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert texts == ["A title", "A sentence.", "limit", "2 GB/s", "stio", "1 GB/s", "other", "500 MB/s"]
    (mark,) = [path for path in root.iter(f"{SVG}path") if path.get("class") == "mark"]
    limit = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "limit")
    assert (mark.get("d") or "").startswith(f"M{float(limit.get('x', '')) + widths['limit']} ")


def test_everything_stays_within_the_picture() -> None:
    root = ElementTree.fromstring(draw_panels([Panel("x", RATES, ["a long sentence " * 30])]))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", "0")) + float(rect.get("width", "")) <= width
        assert float(rect.get("y", "0")) + float(rect.get("height", "")) <= height


@pytest.mark.parametrize("label", ["</text><script>", "a & b", "\x1b[2J\n\x00", "\ud800", "x" * 1000, ""])
def test_labels_cannot_break_out(label: str) -> None:
    rates = [Rate(label, 1.0, 1.0, 1.0, "peer")]
    root = ElementTree.fromstring(draw_panels([Panel(label, rates, [label])]).encode())
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{t}" for t in ("svg", "style", "rect", "text", "title", "path")
    }


def test_panels_stand_below_each_other() -> None:
    """Each has its own scale, and the picture is as high as all of them."""
    panels = [Panel("First", RATES, ["Seconds."]), Panel("Second", [Rate("slow", 10.0, 9.0, 11.0, "ours")])]
    root = ElementTree.fromstring(draw_panels(panels))
    places = {"".join(text.itertext()): float(text.get("y", "")) for text in root.iter(f"{SVG}text")}
    assert places["First"] < places["Seconds."] < places["other"] < places["Second"] < places["slow"]
    assert places["slow"] < float(root.get("height", ""))
    assert root.get("aria-label") == "First Seconds. Second"
    assert bars(root)["ours"] > bars(root)["limit"] / 2


def test_nothing_to_draw() -> None:
    assert not bars(ElementTree.fromstring(draw_panels([Panel("", [])])))
