"""Files of small checkpoints for tests. These functions are no saver: nothing they write is atomic or durable."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from stio.device.describe import describe_tensors
from stio.device.torch_private import copy_of
from stio.format.files.names import FilePattern
from stio.format.header import build_header
from stio.saving.plan import build_index


def checkpoint_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of one safetensors file."""
    entries = [(source.name, source.dtype, source.shape) for source in describe_tensors(tensors)]
    head, order = build_header(entries, metadata)
    return head + b"".join(_bytes_of(tensors[name]) for name in order)


def checkpoint_files(tensors: Mapping[str, torch.Tensor], num_shards: int = 1) -> dict[str, bytes]:
    """Return the files of a checkpoint by name: one file, or shards with every n-th tensor and their index."""
    if num_shards == 1:
        return {"model.safetensors": checkpoint_bytes(tensors)}
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for k in range(num_shards):
        shard = FilePattern("model{suffix}.safetensors").shard(k, num_shards)
        files[shard] = checkpoint_bytes({name: tensors[name] for name in names[k::num_shards]})
        weight_map |= dict.fromkeys(names[k::num_shards], shard)
    index = build_index(weight_map, sum(tensor.nbytes for tensor in tensors.values()), {})
    return {**files, "model.safetensors.index.json": index}


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor], num_shards: int = 1) -> Path:
    """Write the files of a checkpoint and return their directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in checkpoint_files(tensors, num_shards).items():
        (directory / name).write_bytes(data)
    return directory


def _bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach() if tensor.is_contiguous() else copy_of(tensor)
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
