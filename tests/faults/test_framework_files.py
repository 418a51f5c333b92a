"""Files of other libraries whose names, or whose bytes, are not those that the caller means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import save_file
from torch import nn

import stio
from stio import sync
from stio.compat import huggingface_hub as hub
from stio.compat.safetensors import SafetensorError, safe_open
from stio.compat.safetensors import numpy as drop_in_numpy
from stio.compat.safetensors import torch as drop_in

# 419. Tensors that zipnn has compressed.

PACKED = '{"w": {"dtype": "bfloat16", "shape": "[4, 4]"}}'


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A file as zipnn's scripts write it: the bytes of a tensor are compressed, and the metadata has its dtype."""
    metadata = {"format": "pt", "znn_compressed_vectors": PACKED}
    return save_file({"w": torch.arange(40, dtype=torch.uint8)}, tmp_path / "model.safetensors", metadata)


@pytest.mark.parametrize(
    "load",
    [
        drop_in.load_file,
        drop_in_numpy.load_file,
        lambda path: drop_in.load(path.read_bytes()),
        lambda path: drop_in_numpy.load(path.read_bytes()),
        lambda path: drop_in.load_model(nn.Linear(2, 2), path),
        lambda path: safe_open(path, "pt").get_tensors(),
    ],
)
def test_c419_the_drop_in_returns_no_packed_bytes(packed: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(SafetensorError, match=r"zipnn.*znn_compressed_vectors.*zipnn_safetensors\(\)"):
        load(packed)


def test_c419_what_zipnn_itself_reads_stays(packed: Path) -> None:
    with safe_open(packed, "pt") as file:
        assert file.metadata()["znn_compressed_vectors"] == PACKED
        assert torch.equal(file.get_tensor("w"), torch.arange(40, dtype=torch.uint8))


def _open(path: Path) -> None:
    with sync.open(path):
        pass


def _warm_start(path: Path) -> None:
    with sync.warm_start(nn.Linear(2, 2, device="meta"), path):
        pass


@pytest.mark.parametrize(
    "load",
    [
        sync.load,
        lambda path: sync.load(path.parent),
        lambda path: sync.load_into(nn.Linear(2, 2), path, strict=False),
        _warm_start,
        _open,
        lambda path: sync.convert(path, path.with_name("new.safetensors")),
    ],
)
def test_c419_loads_return_no_packed_bytes(packed: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(stio.UnsupportedDtypeError, match=r"zipnn.*znn_compressed_vectors.*zipnn_safetensors\(\)"):
        load(packed)


def test_c419_shards_of_which_one_is_packed(tmp_path: Path) -> None:
    metadata = {"znn_compressed_vectors": PACKED}
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors", metadata)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "w": "model-00002-of-00002.safetensors"}}'
    )
    with pytest.raises(stio.UnsupportedDtypeError, match="znn_compressed_vectors"):
        sync.load(tmp_path)

    with pytest.raises(stio.UnsupportedDtypeError, match="znn_compressed_vectors"):
        sync.convert(tmp_path, tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


def _load_model(path: Path) -> None:
    hub.load_torch_model(nn.Linear(2, 2), path.parent)


@pytest.mark.parametrize(
    "load",
    [
        hub.load_state_dict_from_file,
        lambda path: hub.load_state_dict_from_file(path, safe=False),
        _load_model,
        lambda path: hub.load_torch_model(nn.Linear(2, 2), path.parent, safe=False),
        lambda path: hub.load_torch_model(nn.Linear(2, 2), path),
    ],
)
def test_c419_the_hub_returns_no_packed_bytes(packed: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(stio.UnsupportedDtypeError, match=r"zipnn\.zipnn_safetensors\(\)"):
        load(packed)


# 465. Adapters, and other names.


class Adapter(nn.Module):
    """A layer with the names that PEFT gives to an adapter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 3)
        self.lora_A = nn.ModuleDict({name: nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 3, bias=False)})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A file as PEFT writes it."""
    tensors = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(3, 2)}
    return save_file(tensors, tmp_path / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["default", "second"])
def test_c465_names_that_lack_the_adapter(adapter: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.ModuleDict({"q": Adapter(name)})
    with pytest.raises(stio.MismatchError, match=rf"'\.{name}\.'.*set_peft_model_state_dict"):
        sync.load_into(module, adapter)
    sync.load_into(module, adapter, strict=False)
    assert "nothing is loaded" in caplog.text
    assert "set_peft_model_state_dict" in caplog.text


@pytest.mark.parametrize("inner", [nn.Sequential(nn.Linear(3, 3)), nn.ModuleDict({"fc": nn.Linear(3, 3)})])
def test_c465_names_that_have_nothing_to_do_with_adapters(tmp_path: Path, inner: nn.Module) -> None:
    path = save_file({"fc.weight": torch.ones(3, 3), "fc.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(stio.MismatchError) as caught:
        sync.load_into(nn.ModuleDict({"fc": inner}), path)
    assert "peft" not in str(caught.value).lower()


def test_c465_a_dictionary_has_the_names_of_the_checkpoint(adapter: Path) -> None:
    module = nn.ModuleDict({"q": Adapter("default")})
    before = module["q"].lora_A["default"].weight
    tensors = {name.replace(".default.", "."): one for name, one in module.state_dict().items() if "lora" in name}
    report = sync.distributed.load_into(tensors, adapter)
    assert (report.missing, report.unexpected) == ((), ())
    assert module["q"].lora_A["default"].weight is before
    assert bool((before == 1).all())
