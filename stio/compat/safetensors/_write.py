"""Files of the safetensors drop-in, written by an ordinary save: staged beside the destination, synced, renamed.

Raw memory is saved as tensors of bytes; the plan puts the true dtypes and shapes into the header. The header is the one
that the original library writes: no metadata unless the caller gives some.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from stio.compat.safetensors._errors import SafetensorError, saving
from stio.compat.safetensors._specs import TensorSpec
from stio.device.tensors import tensors_in
from stio.format.sharding import TensorSource
from stio.runtime.blocking import run_blocking
from stio.runtime.memory import Region
from stio.saving.options import SaveOptions
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_files
from stio.storage.commit.target import OneFile


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return memory of the caller as a tensor of bytes `[nbytes]`, without a copy; the caller keeps it allocated."""
    owner = (ctypes.c_char * max(nbytes, 1)).from_address(address) if nbytes else None
    return tensors_in(Region(address, nbytes, owner), [""], ["U8"], [(nbytes,)], [0])[""]


def write_specs(specs: Mapping[str, TensorSpec], path: str, metadata: Mapping[str, str] | None) -> None:
    """Write raw memory to a file.

    Args:
        specs: Dtype, shape and address of each tensor, checked.
        path: The file.
        metadata: Text for the header.

    Raises:
        SafetensorError: The system refused, or there is no valid header for these tensors.
    """
    tensors = {name: bytes_at(spec.data_ptr, spec.data_len) for name, spec in specs.items()}

    def plan(sources: Sequence[TensorSource], block_bytes: int) -> WritePlan:
        true = [
            replace(source, dtype=specs[source.name].dtype, shape=tuple(specs[source.name].shape)) for source in sources
        ]
        return plan_files(true, block_bytes, metadata=metadata)

    _write(tensors, path, plan)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str] | None) -> None:
    """Write tensors to a file: their values, also of views that are conjugated or negated.

    Args:
        tensors: By name, checked.
        path: The file.
        metadata: Text for the header.

    Raises:
        SafetensorError: The system refused, or there is no valid header for these tensors.
    """
    _write(tensors, path, partial(plan_files, metadata=metadata))


def _write(
    tensors: Mapping[str, torch.Tensor], path: str, planner: Callable[[Sequence[TensorSource], int], WritePlan]
) -> None:
    # stio makes missing directories. The original raises an error, by which its callers find a wrong path.
    if not os.path.isdir(os.path.dirname(path) or ".") or not path:
        reason = f"{os.strerror(errno.ENOENT)} (os error {errno.ENOENT})"
        raise SafetensorError(f'Error while serializing: I/O error: {reason} at path "{path}"')
    with saving():
        run_blocking(PendingSave(tensors, OneFile(path), SaveOptions(), planner=planner).complete())
