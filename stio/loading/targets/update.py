"""Copies what was changed since the version that a target holds, and was read by `read_update`, into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from stio.device import Lost, TargetMemory, tensors_in
from stio.runtime import WorkerPool
from stio.runtime.memory import num_processors
from stio.storage.checkpoint import Changes, apply_changes

_ONE_THREAD_BYTES = 1 << 20
"""Elements of fewer bytes are copied by the calling thread alone."""


def apply_to_host(jobs: Iterable[tuple[torch.Tensor, Sequence[Changes]]]) -> None:
    """Copy changed elements, which were checked, into contiguous tensors on the CPU, on a few threads."""
    left = [(tensor.data_ptr(), tensor.nbytes, changes) for tensor, changes in jobs]
    left.sort(key=lambda job: sum(one.nbytes for one in job[2]))  # the last is taken first
    workers = WorkerPool("apply")

    def work() -> None:
        for address, nbytes, changes in workers.items(left):
            num_elements = nbytes // changes[0].item_bytes
            apply_changes(changes, num_elements, [(0, num_elements, address)])

    nbytes = sum(one.nbytes for _, _, changes in left for one in changes)
    workers.run(work, 1 if nbytes < _ONE_THREAD_BYTES else min(len(left), num_processors()))


def apply_by_torch(name: str, tensor: torch.Tensor, dtype: str, changes: Sequence[Changes], lost: Lost) -> None:
    """Copy changed elements into a tensor of any layout and dtype; on a device, on the current stream.

    Args:
        name: Its name, to count the values that a cast loses.
        tensor: The tensor.
        dtype: Dtype of the elements, as in the format.
        changes: The elements, which were checked; the oldest first.
        lost: Where these values are counted.
    """
    for one in changes:
        codes = tensors_in(one.codes, [""], [f"U{8 * one.code_bytes}"], [(one.codes.nbytes // one.code_bytes,)], [0])
        count = one.count * (2 if dtype == "F4" else 1)
        values = tensors_in(one.values, [""], [dtype], [(count,)], [0])[""]
        if values.dtype != tensor.dtype:
            values = lost.cast(name, values.to(tensor.device), tensor.dtype)
        TargetMemory.copy_elements(tensor, codes[""], values)
