"""What libraries that know no deltas do with the directory of one, without stio and with the drop-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltas import next_state, write_chain

import stio.compat

NAMED = "delta.safetensors"
"""A name that no library looks for."""


def _written(module: torch.nn.Module, folder: Path, name: str) -> Path:
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    path = write_chain(folder, [state, next_state(state, 0.02, torch.Generator().manual_seed(0))])[1]
    (path / "model.safetensors").rename(path / name)
    return path


def _llama(folder: Path, name: str) -> Callable[[], Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes)
    path = _written(transformers.LlamaForCausalLM(config), folder, name)
    config.save_pretrained(path)
    return lambda: transformers.LlamaForCausalLM.from_pretrained(path)


def _unet(folder: Path, name: str) -> Callable[[], Any]:
    diffusers = pytest.importorskip("diffusers")
    kinds = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    module = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, **kinds)
    path = _written(module, folder, name)
    module.save_config(path)
    return lambda: diffusers.UNet2DModel.from_pretrained(path)


@pytest.mark.parametrize("made", [_llama, _unet])
def test_a_delta_by_another_name_is_no_model(made: Callable[..., Callable[[], Any]], tmp_path: Path) -> None:
    """By the usual name both would make weights at random, and log that they did (transformers 5.23, diffusers 0.42)."""
    load = made(tmp_path, NAMED)
    with pytest.raises(OSError, match="no file named"):
        load()


def test_a_delta_by_the_usual_name_is_refused_by_the_drop_ins(tmp_path: Path) -> None:
    load = _llama(tmp_path, "model.safetensors")
    stio.compat.install()
    try:
        with pytest.raises(stio.compat.safetensors.SafetensorError, match="stio convert"):
            load()
    finally:
        stio.compat.uninstall()


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for name in ("model.safetensors", NAMED):
        module = torch.nn.Linear(30, 30)
        path = _written(module, tmp_path / name, name)
        with pytest.raises((OSError, ValueError), match="valid metadata|not a folder containing"):
            accelerate.load_checkpoint_in_model(module, str(path))
