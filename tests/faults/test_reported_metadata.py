"""Fault 311: the metadata of any checkpoint can be passed to another save; what describes its tensors is made anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from faults.on_ranks import metadata_of_others
from safetensors import safe_open
from safetensors.torch import save_file
from support import require_equal, save_sharded

import stio
from stio import sync
from stio.compat.huggingface_hub import save_torch_state_dict

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
INDEX = "model.safetensors.index.json"


def tied() -> dict[str, torch.Tensor]:
    return {**TENSORS, "again": TENSORS["a"]}


def by_transformers(where: Path) -> None:
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    hf.GPT2LMHeadModel(config).save_pretrained(where, max_shard_size="5KB")


def by_hub(where: Path) -> None:
    where.mkdir()
    save_torch_state_dict(tied(), where, metadata={"note": "x"})


def with_any_json(where: Path) -> None:
    where.mkdir()
    values = {
        "total_size": 48,
        "total_parameters": 12,
        "list": [1, "ä"],
        "float": 1.5,
        "none": None,
        "object": {"k": True},
    }
    save_sharded(TENSORS, where, metadata=values)


def one_file(where: Path) -> None:
    where.mkdir()
    save_file(TENSORS, where / "model.safetensors", {"format": "np", "total_size": "7", "note": "x"})


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "plain": lambda where: sync.save(TENSORS, where, metadata={"note": "x"}),
    "tied": lambda where: sync.save(tied(), where, metadata={"note": "x"}),
    "tied in shards": lambda where: sync.save(tied(), where, max_shard_size=24, metadata={"note": "x"}),
    "manifest": lambda where: sync.save(tied(), where, max_shard_size=24, hash="sha256"),
    "state": lambda where: sync.save_state({"t": TENSORS, "step": 3}, where, metadata={"note": "x"}),
    "large state": lambda where: sync.save_state({"t": TENSORS, "many": list(range(30000))}, where),
    "transformers": by_transformers,
    "hub": by_hub,
    "any json": with_any_json,
    "one file": one_file,
}


def users_own(metadata: dict[str, Any]) -> dict[str, Any]:
    own = {"total_size", "total_parameters", "stio.aliases", "stio.state", "format"}
    return {key: value for key, value in metadata.items() if key not in own}


@pytest.fixture(params=CHECKPOINTS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    CHECKPOINTS[request.param](tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 24}, {"hash": "sha256"}], ids=str)
def test_c311_metadata_can_be_saved_again(tmp_path: Path, source: Path, options: dict[str, Any]) -> None:
    """With the same tensors, and with other ones that have other ties and other sizes."""
    with sync.open(source) as checkpoint:
        metadata = dict(checkpoint.metadata)
        tensors = {name: checkpoint.read(name) for name in checkpoint.keys()}  # noqa: SIM118
    for number, given in enumerate((tensors, {"other": torch.ones(3)}, {"x": TENSORS["b"], "y": TENSORS["b"]})):
        where = tmp_path / f"again-{number}"
        result = sync.save(given, where, metadata=metadata, **options)
        require_equal(sync.load(where), given)
        with sync.open(where) as checkpoint:
            found = dict(checkpoint.metadata)
        assert users_own(found) == users_own(metadata)
        assert found.get("total_size", result.total_bytes) == result.total_bytes
        assert "total_parameters" not in found
        assert json.loads(found.get("stio.aliases", "{}")) == dict(result.aliases)
        assert all(isinstance(value, str) for key, value in found.items() if key != "total_size")
    for name in ("a.safetensors", "b.safetensors"):
        sync.save(TENSORS, tmp_path / name, metadata=metadata)
        with safe_open(tmp_path / name, "pt") as file:
            assert all(isinstance(value, str) for value in file.metadata().values())
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.anyio
async def test_c311_a_saver_and_states(tmp_path: Path, source: Path) -> None:
    async with stio.open(source) as checkpoint:
        metadata = dict(checkpoint.metadata)
    state = {"w": TENSORS["a"], "step": 5}
    async with stio.Saver(metadata=metadata) as saver:
        await (await saver.save(TENSORS, tmp_path / "a"))
        await (await saver.save(TENSORS, tmp_path / "b", metadata=metadata))
        await (await saver.save_state(state, tmp_path / "c"))
    await stio.save_state(state, tmp_path / "d", metadata=metadata)
    for name in ("a", "b"):
        require_equal(await stio.load(tmp_path / name), TENSORS)
    for name in ("c", "d"):
        found = await stio.load_state(tmp_path / name)
        assert (found["step"], found["w"].tolist()) == (5, TENSORS["a"].tolist())


@pytest.mark.matrix
def test_c311_convert(tmp_path: Path, source: Path) -> None:
    with sync.open(source) as checkpoint:
        metadata = dict(checkpoint.metadata)
    sync.convert(source, tmp_path / "new", metadata=metadata, max_shard_size="1KB")
    sync.convert(tmp_path / "new", tmp_path / "back", metadata=metadata)
    require_equal(sync.load(tmp_path / "back"), sync.load(source))
    with sync.open(tmp_path / "back") as checkpoint, sync.open(source) as before:
        assert users_own(dict(checkpoint.metadata)) == users_own(metadata)
        assert checkpoint.aliases == before.aliases


def test_c311_a_copy_of_a_state_is_a_state(tmp_path: Path) -> None:
    state = {"t": tied(), "many": list(range(30000))}
    sync.save_state(state, tmp_path / "s")
    with sync.open(tmp_path / "s") as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.keys()}  # noqa: SIM118
        sync.save(tensors, tmp_path / "copy", metadata=checkpoint.metadata)
    found = sync.load_state(tmp_path / "copy")
    assert found["many"] == state["many"]
    require_equal(found["t"], tied())


@pytest.mark.parametrize("value", [1, None, ["x"], b"x"])
def test_c311_what_a_caller_writes_must_be_text(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="metadata"):
        sync.save(TENSORS, tmp_path / "m", metadata={"step": value})
    assert not (tmp_path / "m").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["large state", "transformers"])
def test_c311_ranks(tmp_path: Path, name: str) -> None:
    CHECKPOINTS[name](tmp_path / "source")
    with sync.open(tmp_path / "source") as checkpoint:
        metadata = dict(checkpoint.metadata)
    run_ranks(metadata_of_others, 2, tmp_path, str(tmp_path), TENSORS, metadata)
    require_equal(sync.load(tmp_path / "flat"), TENSORS)
    assert sync.load_state(tmp_path / "state")["step"] == 3
