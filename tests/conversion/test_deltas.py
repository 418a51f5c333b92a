"""`stio.convert` makes a full checkpoint of a delta."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deltas import next_state, write_chain

import stio
from stio.storage.checkpoint import open_checkpoint


@pytest.fixture
def states() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [{"w": torch.randn(3000, 70, generator=generator), "b": torch.ones(500).bfloat16(), "n": torch.arange(40)}]
    for _ in range(3):
        found.append(next_state(found[-1], 0.02, generator))
    return found


@pytest.mark.parametrize(
    "options", [{}, {"max_shard_size": "100KB"}, {"budget_bytes": 8 << 20}, {"hash": "sha256"}], ids=str
)
def test_the_result_is_full(tmp_path: Path, states: list[dict[str, torch.Tensor]], options: dict[str, object]) -> None:
    source = write_chain(tmp_path / "run", states)[-1]
    stio.sync.convert(source, tmp_path / "full", **options)
    opened = open_checkpoint(tmp_path / "full")
    opened.close()
    assert (opened.links, opened.metadata.get("format")) == ((), "pt")
    assert "stio.delta" not in opened.metadata
    found = stio.sync.load(tmp_path / "full")
    assert found.keys() == states[-1].keys()
    assert all(torch.equal(found[name], one) for name, one in states[-1].items())


def test_casts_are_of_the_changed_values(tmp_path: Path, states: list[dict[str, torch.Tensor]]) -> None:
    source = write_chain(tmp_path / "run", states)[-1]
    stio.sync.convert(source, tmp_path / "half", dtype="bfloat16")
    found = stio.sync.load(tmp_path / "half")
    assert torch.equal(found["w"], states[-1]["w"].bfloat16())
    assert torch.equal(found["n"], states[-1]["n"])


def test_in_place(tmp_path: Path, states: list[dict[str, torch.Tensor]]) -> None:
    """The steps before stay; a delta that was based on this one has another base now, and says so."""
    paths = write_chain(tmp_path / "run", states)
    stio.sync.convert(paths[2], paths[2])
    assert torch.equal(stio.sync.load(paths[2])["w"], states[2]["w"])
    assert torch.equal(stio.sync.load(paths[1])["w"], states[1]["w"])
    with pytest.raises(stio.MismatchError, match="was replaced"):
        stio.sync.load(paths[3])


def test_into_a_file_of_the_chain(tmp_path: Path, states: list[dict[str, torch.Tensor]]) -> None:
    paths = write_chain(tmp_path / "run", states)
    with pytest.raises(ValueError, match="is a file of the source"):
        stio.sync.convert(paths[2], paths[0] / "model.safetensors")
