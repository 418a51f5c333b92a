"""An open checkpoint at a prompt: what it says, and that it stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import save_raw

import stio
from stio import sync


@pytest.mark.anyio
async def test_an_open_checkpoint(tmp_path: Path) -> None:
    where = tmp_path / "m"
    tied = torch.zeros(2, 3)
    tensors = {f"h.{k}.w": torch.zeros(2, 3, dtype=torch.bfloat16) for k in range(11)}
    await stio.save({**tensors, "a": tied, "b": tied}, where, max_shard_size=100)
    checkpoint = stio.open(where)
    assert repr(checkpoint) == f"<Checkpoint '{where}', not open>"
    async with checkpoint:
        assert repr(checkpoint) == f"<Checkpoint '{where}': 12 tensors, 156 B, 2 shards, tied names: 1>"
    assert "not open" in repr(checkpoint)


def test_the_blocking_twin_shows_the_same(tmp_path: Path) -> None:
    sync.save({"w": torch.zeros(2)}, tmp_path / "m.safetensors")
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint '{tmp_path}/m.safetensors': 1 tensor, 8 B>"


def test_a_long_path_leaves_room_for_the_counts(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200)
    sync.save({"w": torch.zeros(2)}, folder / "m.safetensors")
    with sync.open(folder / "m.safetensors") as checkpoint:
        assert ": 1 tensor, 8 B>" in repr(checkpoint)


@pytest.mark.slow
def test_100_000_tensors_stay_small(tmp_path: Path) -> None:
    header = {f"{'deep.' * 40}{k}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for k in range(100_000)}
    save_raw(tmp_path / "m.safetensors", header, b"")
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        assert len(repr(checkpoint)) < 400
