"""Saves by torch's distributed checkpoint: the files of `stio.save` where there are tensors only, or nested state."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors import safe_open
from test_load import WAYS, Model, by_fsdp, by_hsdp, new_model
from test_save import failing_once, files_in, odd_tensors, patched, spread_of, tensor_of
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from stio import sync
from stio.distributed import StioStager, StioStorageWriter, dcp_part
from stio.runtime.memory import Region
from stio.storage.commit import syscalls as calls
from stio.storage.commit.transaction import LocalTransaction


def whole_of(tensor: Any) -> Any:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def whole_state(state: Any) -> Any:
    """Return nested state with whole tensors, and with text as keys as DCP has them."""
    if isinstance(state, dict):
        return {str(key): whole_state(value) for key, value in state.items()}
    return [whole_state(value) for value in state] if isinstance(state, list) else whole_of(state)


def require_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            require_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        assert found == expected


def writer(path: str, **options: Any) -> StioStorageWriter:
    return StioStorageWriter(path, rank_timeout=30, **options)


def saved_as_whole(folder: str, name: str, state: dict[str, Any], **options: Any) -> None:
    """Save by DCP and by `stio.save` of the whole; the files must be equal."""
    path, whole = f"{folder}/{name}", {key: whole_of(tensor) for key, tensor in state.items()}
    for repeat in range(2):  # beside nothing, then over the checkpoint
        dcp.save(state, storage_writer=writer(path, **options))
        dist.barrier()
        if dist.get_rank() == 0:
            sync.save(whole, f"{folder}/whole-{name}", shared="clone", **options)
            found, expected = files_in(path), files_in(f"{folder}/whole-{name}")
            assert sorted(found.values()) == sorted(expected.values()) or repeat, name
            assert (found.keys() == expected.keys()) is not bool(repeat and len(found) > 2) or len(found) < 3
            loaded = sync.load(path)
            assert loaded.keys() == whole.keys()
            for key, tensor in whole.items():
                assert torch.equal(loaded[key].view(torch.uint8), tensor.contiguous().view(torch.uint8)) or not tensor.ndim
        dist.barrier()


def tensors_only(folder: str) -> None:
    two = init_device_mesh("cpu", (2, 2))
    one = init_device_mesh("cpu", (4,))
    rules: list[tuple[DeviceMesh, Sequence[Placement]]] = [
        (one, [Shard(0)]),
        (one, [Shard(1)]),
        (one, [Replicate()]),
        (two, [Shard(0), Shard(1)]),
        (two, [Replicate(), Shard(0)]),
    ]
    whole = odd_tensors()
    for k, (mesh, rule) in enumerate(rules):
        state = {name: spread_of(tensor, mesh, rule) for name, tensor in whole.items()}
        saved_as_whole(folder, f"rule-{k}", state | {"plain": torch.arange(5)}, max_shard_size=300_000 if k % 2 else "1GB")
    state = {name: spread_of(tensor, one, [Shard(0)]) for name, tensor in whole.items()}
    saved_as_whole(folder, "one.safetensors", state, metadata={"a": "b"}, hash="sha256")
