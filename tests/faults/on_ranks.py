"""What ranks do for tests whose files import transformers: in each rank that import would take seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

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
