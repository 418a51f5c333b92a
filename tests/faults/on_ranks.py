"""What ranks do for tests whose files import transformers: in each rank that import would take seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import stio
from stio import sync


class Tied(nn.Module):
    """Three names of one tensor; the last one sorts first."""

    def __init__(self, keys: Any = None) -> None:
        super().__init__()
        self.middle = nn.Linear(4, 4, bias=False)
        self.zebra = nn.Linear(4, 4, bias=False)
        self.apple = nn.Linear(4, 4, bias=False)
        self.zebra.weight = self.apple.weight = self.middle.weight
        if keys is not None:
            self._tied_weights_keys = keys


def ties(folder: str) -> dict[str, str]:
    """Save a sharded model whose class declares its ties, and one which ranks describe differently."""
    module = fully_shard(Tied(["middle", "zebra"]))
    result = sync.distributed.save(module, f"{folder}/module")
    with pytest.raises(stio.StioError, match="what the module declares about tied names"):
        sync.distributed.save(Tied(["middle", "zebra"] if dist.get_rank() else ["zebra"]), f"{folder}/differ")
    return dict(result.aliases)


def metadata_of_others(folder: str, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    sync.distributed.save(tensors, f"{folder}/flat", metadata=metadata)
    sync.distributed.save({"t": tensors, "step": 3}, f"{folder}/state", metadata=metadata)
    assert dist.get_world_size() == 2


def quantized(folder: str, layouts: dict[str, dict[str, torch.Tensor]]) -> None:
    """Load quantized files into plain modules and states, and with a cast."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind, tensors in layouts.items():
        owner = next(iter(tensors))
        wide = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in tensors.items()}
        with pytest.raises(stio.StioError, match="scales|dtype"):
            sync.distributed.load_into(wide, f"{folder}/{kind}.safetensors")
        assert not any(bool(one.any()) for one in wide.values())
        same = {name: torch.zeros_like(one) for name, one in tensors.items()}
        sync.distributed.load_into(same, f"{folder}/{kind}.safetensors")
        assert all(torch.equal(same[name].float(), one.float()) for name, one in tensors.items())
        placements = stio.distributed.Placements(mesh, {owner: [Shard(0)]})
        try:
            found = sync.load(f"{folder}/{kind}.safetensors", placements=placements, dtype="BF16")
        except stio.UnsupportedDtypeError:
            assert kind.startswith("fp8")
        else:
            assert found[owner].dtype == tensors[owner].dtype


def narrower(folder: str) -> None:
    """Load states into narrower ones."""
    state = {"optim": {"m": torch.zeros(4, dtype=torch.bfloat16), "step": torch.tensor(0, dtype=torch.int32)}}
    with pytest.raises(stio.StioError, match="casting='same_kind'"):
        sync.distributed.load_into(state, f"{folder}/state.safetensors")
    sync.distributed.load_into(state, f"{folder}/state.safetensors", casting="same_kind")
    assert state["optim"]["m"].tolist() == [1.0] * 4 and state["optim"]["step"] == 3
    with pytest.raises(ValueError, match="casting= takes"):
        sync.distributed.load_into(state, f"{folder}/state.safetensors", casting="unsafe")  # type: ignore[arg-type]
