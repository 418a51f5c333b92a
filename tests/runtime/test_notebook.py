"""Tables for notebooks: bounded, and safe whatever the text in them."""

from __future__ import annotations

from itertools import count

from stio.runtime.text import MAX_ROWS, table


def test_a_table() -> None:
    html = table("two", ["name"], [["a"], ["b"]], num_rows=2)
    assert html.startswith("<div><p>two</p><table><thead><tr><th")
    assert html.count("<td") == 2
    assert "more" not in html


def test_text_is_escaped_and_cut() -> None:
    evil = "<script>alert(1)</script>\"'&\x1b[2J"
    html = table(evil, [evil], [[evil], ["x" * 10_000]], num_rows=2)
    assert "<script" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;\\x1b[2J" in html
    assert len(html) < 2_000


def test_a_title_is_escaped_and_whole() -> None:
    html = table(f"<b>\x1b{'x' * 200}: 3 tensors", (), [], num_rows=0)
    assert html.startswith(f"<div><p>&lt;b&gt;\\x1b{'x' * 200}: 3 tensors</p>")


def test_rows_beyond_the_most_are_counted_and_not_made() -> None:
    html = table("many", (), ([str(k)] for k in count()), num_rows=100_000)
    assert html.count("<tr>") == MAX_ROWS
    assert html.endswith(f"<p>and {100_000 - MAX_ROWS:,} more</p></div>")
