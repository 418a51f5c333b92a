"""No path of several ranks changes a bit; what is compared is in `bit_paths.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bit_paths
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerators import gpu
from distributed.ranks import run_ranks
from fakes import write_checkpoint
from support import module_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stio import sync
from stio.device.base import resolve_device
from stio.distributed import Placements, StioStager, StioStorageReader, StioStorageWriter

KINDS = ["matrix", "cube", "large"]
PLACED: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
NUM_RANKS = 2


def whole() -> bit_paths.Tensors:
    """Return the tensors that ranks have parts of. Parts of two numbers of F4 are no parts of torch's elements."""
    return {
        name: one
        for name, one in bit_paths.tensors().items()
        if name.split(".")[1] in KINDS and not name.startswith("F4.")
    }


def local(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return this rank's part of a tensor, contiguous; moved as integers."""
    bits = bit_paths.integers(tensor)
    if isinstance(placement, Shard):
        bits = bits.chunk(NUM_RANKS, placement.dim)[dist.get_rank()].contiguous()
    return bits.clone().view(tensor.dtype)


def spread(mesh: DeviceMesh, placement: Placement, *, fill: bool) -> dict[str, DTensor]:
    """Return sharded tensors, with their values if `fill`; else no byte is right."""
    found = {}
    for name, one in whole().items():
        part = local(one, placement)
        if not fill:
            bit_paths.integers(part).fill_(0x5A)
        found[name] = DTensor.from_local(part, mesh, [placement], shape=one.shape, stride=one.stride())
    return found


def require_parts(state: dict[str, Any], placement: Placement) -> None:
    expected = {name: local(one, placement) for name, one in whole().items()}
    bit_paths.require_same_bits({name: one.to_local() for name, one in state.items()}, expected)


def loads(source: str, folder: str, way: str) -> None:
    mesh, placement = init_device_mesh("cpu", (NUM_RANKS,)), PLACED[way]
    for broadcast in (False, True) if way == "replicated" else (False,):
        state = spread(mesh, placement, fill=False)
        sync.distributed.load_into(state, source, broadcast=broadcast)
        require_parts(state, placement)
    state = spread(mesh, placement, fill=False)
    dcp.load(state, storage_reader=StioStorageReader(source))
    require_parts(state, placement)
    require_parts(sync.load(source, placements=Placements(mesh, lambda name, shape: [placement])), placement)


def saves(source: str, folder: str, way: str) -> None:
    state = spread(init_device_mesh("cpu", (NUM_RANKS,)), PLACED[way], fill=True)
    sync.distributed.save(state, f"{folder}/saved")
    dcp.save(state, storage_writer=StioStorageWriter(f"{folder}/by-dcp"))
    dcp.async_save(state, storage_writer=StioStorageWriter(f"{folder}/staged"), async_stager=StioStager()).result()
    with sync.distributed.Saver() as saver:
        saver.save(state, f"{folder}/by-saver").result()
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("saved", "by-dcp", "staged", "by-saver"):
            bit_paths.require_same_bits(bit_paths.read_files(Path(folder, name)), whole())


def broadcasts(source: str, folder: str) -> None:
    """Fill modules on a device, by ranks that read parts and send them to each other."""
    if os.environ.get("STIO_TEST_DEVICE") == "sim":
        import simdevice

        simdevice.install()
        simdevice.set_released(0)
    device = resolve_device("auto")
    for broadcast in (False, True):
        memory = {
            name: torch.full_like(bit_paths.integers(one), 0x5A, device=device).view(one.dtype)
            for name, one in whole().items()
        }
        module = module_of(memory)
        sync.distributed.load_into(module, source, broadcast=broadcast)
        torch.accelerator.synchronize()
        bit_paths.require_same_bits(module.state_dict(), whole())


def checkpoint(folder: Path) -> str:
    return str(write_checkpoint(folder / "checkpoint", whole(), 2))


@pytest.mark.slow
@pytest.mark.parametrize("way", PLACED)
@pytest.mark.parametrize("move", [loads, saves], ids=lambda move: move.__name__)
def test_c301_no_path_of_ranks_changes_a_bit(move: Callable[..., None], way: str, fast_path: Path) -> None:
    run_ranks(move, NUM_RANKS, fast_path, checkpoint(fast_path), str(fast_path), way)


@pytest.mark.slow
@gpu
def test_c301_broadcasts_to_a_device_change_no_bit(fast_path: Path) -> None:
    run_ranks(broadcasts, NUM_RANKS, fast_path, checkpoint(fast_path), str(fast_path))
