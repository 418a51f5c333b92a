"""An open checkpoint at a prompt and in a notebook: what it says, and that it stays small and safe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support import save_raw

import stio
from stio import sync


def cells(html: str | None) -> list[list[str]]:
    assert html is not None
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html) if "<td" in row]


@pytest.mark.anyio
async def test_an_open_checkpoint(tmp_path: Path) -> None:
    where = tmp_path / "m"
    tied = torch.zeros(2, 3)
    tensors = {f"h.{k}.w": torch.zeros(2, 3, dtype=torch.bfloat16) for k in range(11)}
    await stio.save({**tensors, "a": tied, "b": tied}, where, max_shard_size=100)
    checkpoint = stio.open(where)
    assert repr(checkpoint) == f"<Checkpoint '{where}', not open>"
    assert checkpoint._repr_html_() is None
    async with checkpoint:
        assert repr(checkpoint) == f"<Checkpoint '{where}': 12 tensors, 156 B, 2 shards, tied names: 1>"
        html = checkpoint._repr_html_()
        rows = cells(html)
        assert [row[0] for row in rows] == ["a", *(f"h.{k}.w" for k in range(11))], "in natural order"
        assert rows[1][1:4] == ["BF16", "[2, 3]", "12 B"]
        assert {row[4] for row in rows} == {"1/2", "2/2"}
        assert html is not None
        assert str(where) in html
    assert "not open" in repr(checkpoint)
    assert checkpoint._repr_html_() is None


def test_the_blocking_twin_shows_the_same(tmp_path: Path) -> None:
    sync.save({"w": torch.zeros(2)}, tmp_path / "m.safetensors")
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint '{tmp_path}/m.safetensors': 1 tensor, 8 B>"
        assert cells(checkpoint._repr_html_()) == [["w", "F32", "[2]", "8 B"]]


def test_hostile_names(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
    sync.save({evil: torch.zeros(1)}, tmp_path / "m.safetensors")
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        html = checkpoint._repr_html_()
    assert html is not None
    assert "<img" not in html
    assert not {"\x1b", "\u202e"} & set(html)
    assert r"&lt;img src=x onerror=alert(1)&gt;\x1b[2J\u202e" in html


def test_a_long_path_leaves_room_for_the_counts(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200)
    sync.save({"w": torch.zeros(2)}, folder / "m.safetensors")
    with sync.open(folder / "m.safetensors") as checkpoint:
        html = checkpoint._repr_html_()
    assert html is not None
    assert ": 1 tensor, 8 B</p>" in html


def test_100_000_tensors_stay_small(tmp_path: Path) -> None:
    header = {f"{'deep.' * 40}{k}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for k in range(100_000)}
    save_raw(tmp_path / "m.safetensors", header, b"")
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        html = checkpoint._repr_html_()
        assert html is not None
        assert len(html) < 20_000
        assert "and 99,960 more" in html
        assert len(repr(checkpoint)) < 400
