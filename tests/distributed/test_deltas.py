"""Many ranks load a delta: what each holds is a part of what was saved, however the bytes came to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deltas import next_state, write_chain
from distributed.ranks import run_ranks
from servers import http_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from stio import sync
from stio.distributed import StioStorageReader

NUM = 3


def states() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [{"0": torch.randn(300, 40), "wide": torch.randn(8, 900).bfloat16(), "same": torch.arange(9000)}]
    found[0] = {name: torch.randn(one.shape, generator=generator).to(one.dtype) for name, one in found[0].items()}
    for _ in range(NUM - 1):
        found.append(next_state(found[-1], 0.02, generator) | {"same": found[0]["same"]})
    return found


def _spread(placement: Placement, zero: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    last = states()[-1]
    return {
        name: distribute_tensor(torch.zeros_like(one) if zero else one, mesh, [placement]) for name, one in last.items()
    }


def load_parts(source: str, **options: Any) -> None:
    """Load into tensors that are sharded by rows, by columns, and replicated, and into plain ones."""
    for placement in (Shard(0), Shard(-1), Replicate()):
        expected, module = _spread(placement, zero=False), nn.Module()
        for name, tensor in _spread(placement, zero=True).items():
            if placement == Shard(-1) and tensor.dim() == 1:
                continue
            module.register_buffer(name, tensor)
        sync.distributed.load_into(module, source, strict=False, **options)
        for name, tensor in module.named_buffers():
            assert torch.equal(tensor.to_local(), expected[name].to_local()), (placement, name)
    plain = nn.Module()
    for name, one in states()[-1].items():
        plain.register_buffer(name, torch.zeros_like(one))
    sync.distributed.load_into(plain, source, **options)
    for name, one in states()[-1].items():
        assert torch.equal(plain.get_buffer(name), one), name


def read_by_dcp(source: str) -> None:
    for placement in (Shard(0), Replicate()):
        state, expected = _spread(placement, zero=True), _spread(placement, zero=False)
        dcp.load(state, storage_reader=StioStorageReader(source))
        for name, tensor in state.items():
            assert torch.equal(tensor.to_local(), expected[name].to_local()), (placement, name)


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, "auto", False])
def test_a_broadcast_leaves_changed_tensors_to_each_rank(tmp_path: Path, broadcast: bool | str) -> None:
    write_chain(tmp_path / "run", states())
    with http_server() as server:
        for path in (tmp_path / "run").glob("*/*"):
            server.put(f"/run/{path.relative_to(tmp_path / 'run')}", path.read_bytes())
        run_ranks(_load_broadcast, 2, tmp_path, f"{server.url}/run/step-{NUM - 1}", broadcast)


def _load_broadcast(source: str, broadcast: bool | str) -> None:
    load_parts(source, broadcast=broadcast)


@pytest.mark.slow
def test_files(tmp_path: Path) -> None:
    source = str(write_chain(tmp_path / "run", states())[-1])
    run_ranks(load_parts, 2, tmp_path, source)
    run_ranks(read_by_dcp, 2, tmp_path, source)
