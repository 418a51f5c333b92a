"""Files by the one way of all saves: staged beside the destination, synced, renamed over it.

Raw memory takes the same way as tensors of bytes; the plan puts the true dtypes and shapes into the header. The header
is the one that the original writes: no metadata unless the caller gave some.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from stio.compat.safetensors._errors import SafetensorError, saving
from stio.compat.safetensors._spec import TensorSpec
from stio.device.tensors import tensors_in
from stio.format.sharding import TensorSource
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.memory import Region
from stio.saving.options import SaveOptions
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_files
from stio.saving.staging_pool import StagingPool
from stio.storage.commit.target import OneFile

__all__ = ["bytes_at", "write_specs", "write_tensors"]


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return somebody else's memory as a tensor of bytes."""
    owner = (ctypes.c_char * max(nbytes, 1)).from_address(address) if nbytes else None
    return tensors_in(Region(address, nbytes, owner), [""], ["U8"], [(nbytes,)], [0])[""]


def write_specs(specs: Mapping[str, TensorSpec], path: str, metadata: Mapping[str, str] | None) -> None:
    """Write raw memory to a file.

    Args:
        specs: What and where, checked.
        path: The file.
        metadata: Text for the header.

    Raises:
        SafetensorError: The system refuses, or the header cannot be.
    """
    tensors = {name: bytes_at(spec.data_ptr, spec.data_len) for name, spec in specs.items()}
    _write(tensors, path, partial(_plan, specs=specs, metadata=metadata))


def write_tensors(tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str] | None) -> None:
    """Write tensors to a file, the numbers that they show.

    Args:
        tensors: By name, checked.
        path: The file.
        metadata: Text for the header.

    Raises:
        SafetensorError: The system refuses, or the header cannot be.
    """
    _write(tensors, path, partial(_plan, specs={}, metadata=metadata))


def _plan(
    sources: Sequence[TensorSource],
    *,
    block_bytes: int,
    specs: Mapping[str, TensorSpec],
    metadata: Mapping[str, str] | None,
) -> WritePlan:
    """Plan one file with all tensors; where there are specs, their dtypes and shapes are the true ones."""
    if specs:
        sources = [
            replace(source, dtype=specs[source.name].dtype, shape=tuple(specs[source.name].shape)) for source in sources
        ]
    return plan_files(sources, [([source.name for source in sources], metadata)], block_bytes=block_bytes)


def _write(tensors: Mapping[str, torch.Tensor], path: str, planner: partial[WritePlan]) -> None:
    # stio makes missing directories. A caller of this function expects an error, and looks at a typo by it.
    if not os.path.isdir(os.path.dirname(path) or ".") or not path:
        reason = f"{os.strerror(errno.ENOENT)} (os error {errno.ENOENT})"
        raise SafetensorError(f'Error while serializing: I/O error: {reason} at path "{path}"')
    with saving():
        PendingSave(
            tensors,
            OneFile(path),
            SaveOptions(),
            pool=StagingPool(DEFAULT_BUDGET_BYTES),
            stage_first=False,
            planner=planner,
        ).complete_blocking()
