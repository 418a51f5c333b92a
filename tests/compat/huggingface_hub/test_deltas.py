"""The hub's functions load a delta as what it means: a whole checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from deltas import next_state, write_chain
from torch import nn

from stio.compat import huggingface_hub


def test_a_model_and_a_state_dict(tmp_path: Path) -> None:
    before = {"weight": torch.randn(40, 30), "bias": torch.randn(40)}
    after = next_state(before, 0.05, torch.Generator().manual_seed(0))
    path = write_chain(tmp_path, [before, after])[1]
    model = nn.Linear(30, 40)
    assert huggingface_hub.load_torch_model(model, path, strict=True).missing_keys == []
    found = huggingface_hub.load_state_dict_from_file(path / "model.safetensors")
    assert found.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(found[name], tensor)
