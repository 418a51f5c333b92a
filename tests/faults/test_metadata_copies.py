"""403, 404. Which metadata the files of a save have: all that hold for it, and none that describe another's layout."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from stio import sync

TORCHAO = {"format": "pt", "quantization": '{"version": 2}', "tensor_names": '["a"]'}


def metadata_of(path: Path) -> dict[str, str] | None:
    with safe_open(path, "pt") as file:
        found: dict[str, str] | None = file.metadata()
        return found


def index_of(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "model.safetensors.index.json").read_text())["metadata"]
    return found


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_c403_each_shard_of_a_save_has_the_metadata(tmp_path: Path) -> None:
    tensors = {name: torch.ones(4) for name in "abc"}
    sync.save(tensors, tmp_path / "m", max_shard_size=16, metadata=TORCHAO)
    assert len(shards(tmp_path / "m")) == 3
    for path in shards(tmp_path / "m"):
        assert metadata_of(path) == TORCHAO
    assert index_of(tmp_path / "m") == {"total_size": 48, **TORCHAO}
    with sync.open(tmp_path / "m") as checkpoint:
        assert {key: checkpoint.metadata[key] for key in TORCHAO} == TORCHAO


def test_c403_what_only_stio_reads_is_in_the_index(tmp_path: Path) -> None:
    shared = torch.ones(4)
    sync.save({"a": shared, "b": torch.ones(4), "c": shared}, tmp_path / "m", max_shard_size=16, metadata={"k": "v"})
    for path in shards(tmp_path / "m"):
        assert metadata_of(path) == {"format": "pt", "k": "v"}
    assert "stio.aliases" in index_of(tmp_path / "m")


@pytest.mark.parametrize("max_shard_size", [16, "5GB"])
def test_c403_convert_changes_shards_and_keeps_the_metadata(tmp_path: Path, max_shard_size: int | str) -> None:
    save_file({name: torch.ones(4) for name in "abc"}, tmp_path / "m.safetensors", TORCHAO)
    sync.convert(tmp_path / "m.safetensors", tmp_path / "sharded", max_shard_size=16)
    sync.convert(tmp_path / "sharded", tmp_path / "again", max_shard_size=max_shard_size)
    for path in shards(tmp_path / "sharded") + shards(tmp_path / "again"):
        assert metadata_of(path) == TORCHAO


def test_c404_values_that_differ_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m").mkdir()
    for k, name in enumerate("ab", 1):
        text = {"format": "pt", "rank": str(k), "same": "1", f"only{k}": "x"}
        save_file({name: torch.ones(4)}, tmp_path / "m" / f"model-0000{k}-of-00002.safetensors", text)
    with caplog.at_level(logging.WARNING, "stio"):
        sync.convert(tmp_path / "m", tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt", "same": "1", "only1": "x", "only2": "x"}
    assert "metadata that differ between the shards are left out: rank" in caplog.text


def test_c404_a_value_of_the_index_is_that_of_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "m", max_shard_size=16, metadata={"k": "v"})
    path = shards(tmp_path / "m")[0]
    raw = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(raw[:8] + raw[8 : 8 + nbytes].replace(b'"k":"v"', b'"k":"w"') + raw[8 + nbytes :])
    with caplog.at_level(logging.WARNING, "stio"):
        sync.convert(tmp_path / "m", tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt", "k": "v"}
    assert caplog.text == ""


@pytest.mark.parametrize("key", ["DCP_SHARDING_INFO", "fst.shard.set", "fst.shard.index", "fst.shard.count"])
def test_c404_the_layout_of_another_save_is_not_copied(tmp_path: Path, key: str) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors", {"format": "pt", key: "1", "other": "x"})
    sync.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt", "other": "x"}
    with sync.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.metadata[key] == "1"
        sync.save(checkpoint.load(), tmp_path / "saved.safetensors", metadata=checkpoint.metadata)
    assert metadata_of(tmp_path / "saved.safetensors") == {"format": "pt", "other": "x"}
