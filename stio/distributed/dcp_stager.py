"""The snapshot of a state for `torch.distributed.checkpoint.async_save`, in memory that is used again."""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from stio.device.copy_out import Readiness, copy_out
from stio.device.describe import describe_tensors
from stio.device.tensor_memory import require_no_placeholders
from stio.device.tensors import tensors_in
from stio.distributed.torch_private import local_memory, with_local
from stio.format.sharding import TensorSource
from stio.format.state_tree import python_path
from stio.native import PINNED_BYTES
from stio.runtime.memory import Region
from stio.runtime.operation import Operation

Allocator: TypeAlias = Callable[[int], Region]

_Memory: TypeAlias = tuple[Allocator, Region]
"""Memory, and what has made it."""

_ALIGNMENT = 64

_ALLOCATION_BYTES = 64 << 20
"""Tensors share an allocation up to this size; a larger one has its own."""


class StioStager(AsyncStager):
    """Copies the state of a save into memory of the host, so that it may change while it is written.

        stager = StioStager()
        saved = dcp.async_save(state, storage_writer=StioStorageWriter("out/"), async_stager=stager)

    `stage` returns when the copy is complete. Its memory is pinned if there are tensors of an accelerator, and is used
    again for the next snapshot. A snapshot that is still being written keeps its memory; a second one then gets its
    own. `DTensor`s stay `DTensor`s. All that is no tensor is copied too.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._free: list[_Memory] = []  # not used by any snapshot
        self._is_closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; the state may change when this returns.

        Raises:
            TypeError: A tensor has no memory of its own, such as a wrapper of other tensors.
            ValueError: A tensor is sparse, nested, on meta or freed.
            HostMemoryError: There is too little memory.
            DeviceError: A copy failed.
        """
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for keys, tensor in _tensors_of(state_dict):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                path = python_path(keys)  # for messages, so long keys are cut: two may have one text
                tensors[path if path not in tensors else f"{path} ({len(tensors)})"] = tensor
        locals_of = {path: local_memory(tensor) for path, tensor in tensors.items()}
        ready = Readiness.now(locals_of)
        copied = Operation(partial(self._copy, locals_of, ready), name="stage").result()
        memo: dict[int, Any] = {}
        for path, tensor in tensors.items():
            local = copied[path]
            memo[id(tensor)] = with_local(tensor, local) if isinstance(tensor, DTensor) else local
        return copy.deepcopy(state_dict, memo)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` waits."""

    def close(self) -> None:
        """Release the memory that no snapshot uses; that of a snapshot is released with it. Idempotent."""
        self._is_closed = True
        self._free.clear()

    def _copy(
        self, tensors: Mapping[str, torch.Tensor], ready: Readiness, operation: Operation[Any]
    ) -> dict[str, torch.Tensor]:
        sources = describe_tensors(tensors, check=operation.check)
        require_no_placeholders(sources)  # later there are copies only
        allocate = ready.staging_allocator()
        free, self._free = self._free, []  # what is not used now, of other sizes, is released
        copies: dict[str, torch.Tensor] = {}
        for group in _groups(sources):
            operation.check()
            *offsets, nbytes = accumulate((_aligned(one.nbytes) for one in group), initial=0)
            region = _taken(free, nbytes, allocate)
            copy_out(
                [
                    (one.data, at, region.sub(offset + at, min(PINNED_BYTES, one.nbytes - at)))
                    for one, offset in zip(group, offsets, strict=True)
                    for at in range(0, one.nbytes, PINNED_BYTES)  # no copy crosses the end of a pinned piece
                ],
                ready,
            )
            copies |= tensors_in(
                self._lent(allocate, region),
                [one.name for one in group],
                [one.dtype for one in group],
                [one.shape for one in group],
                offsets,
            )
        return copies

    def _lent(self, allocate: Allocator, region: Region) -> Region:
        """Return a region over the same memory, which comes back when the last tensor over it is gone."""
        buffer: Any = (ctypes.c_char * region.nbytes).from_address(region.address)
        weakref.finalize(buffer, self._give_back, (allocate, region)).atexit = False
        return Region(region.address, region.nbytes, buffer)

    def _give_back(self, memory: _Memory) -> None:
        if not self._is_closed:
            self._free.append(memory)


def _groups(sources: Sequence[TensorSource]) -> list[list[TensorSource]]:
    """Return the tensors in groups of limited size; a larger tensor has an allocation of its own."""
    groups: list[list[TensorSource]] = [[]]
    nbytes = 0
    for source in sources:
        if groups[-1] and nbytes + source.nbytes > _ALLOCATION_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(source)
        nbytes += _aligned(source.nbytes)
    return groups


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _taken(free: list[_Memory], nbytes: int, allocate: Allocator) -> Region:
    """Return memory that was used before, or new."""
    size = max(nbytes, 1)
    for memory in free:
        if memory[0] == allocate and memory[1].nbytes == size:
            free.remove(memory)
            return memory[1]
    return allocate(size).sub(0, size)


def _tensors_of(state: object) -> Iterator[tuple[list[object], torch.Tensor]]:
    """Yield the tensors in mappings, lists and tuples, each with its keys."""
    ahead: list[tuple[list[object], object]] = [([], state)]
    seen = set()
    while ahead:
        keys, value = ahead.pop()
        if isinstance(value, torch.Tensor):
            yield keys, value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            ahead += [([*keys, key], one) for key, one in items]
