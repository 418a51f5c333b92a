"""timm over stio: weights of image models that are saved and loaded are as over safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

timm = pytest.importorskip("timm")

Compare = Callable[..., Any]
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)

MODELS = {
    "resnet10t": {"num_classes": 5},
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5},
}


def output(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(IMAGES)


def made(name: str, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    return timm.create_model(name, **MODELS[name], **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("safe", [True, "both"])
def test_model_is_saved_for_the_hub(compare: Compare, name: str, safe: bool | str) -> None:
    from timm.models import save_for_hf

    compare(lambda folder: save_for_hf(made(name), folder, safe_serialization=safe), loads=False, saves=True)


@pytest.mark.parametrize("name", MODELS)
def test_pretrained_file_and_checkpoint(compare: Compare, tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file
    from timm.models import load_checkpoint

    path = tmp_path / "model.safetensors"
    save_file(made(name).state_dict(), path, {"format": "pt"})

    def action(folder: Path) -> Any:
        first = made(name, 2, checkpoint_path=str(path))
        second = made(name, 3)
        load_checkpoint(second, str(path))
        third = made(name, 4, pretrained=True, pretrained_cfg_overlay={"file": str(path), "num_classes": 5})
        assert torch.equal(output(first), output(second))
        assert torch.equal(output(first), output(third))
        return first, second, third, output(third)

    compare(action)


@pytest.mark.parametrize("name", MODELS)
def test_model_of_a_local_directory(compare: Compare, tmp_path: Path, name: str) -> None:
    """What `save_for_hf` wrote is found by `local-dir:`."""
    from timm.models import save_for_hf

    source = made(name)
    save_for_hf(source, tmp_path / "source", model_args=MODELS[name], safe_serialization=True)

    def action(folder: Path) -> Any:
        torch.manual_seed(2)
        module = timm.create_model(f"local-dir:{tmp_path / 'source'}", pretrained=True)
        assert torch.equal(output(module), output(source))
        return module, output(module)

    compare(action)
