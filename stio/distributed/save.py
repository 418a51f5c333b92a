"""Saves of modules and state that are sharded over ranks: `save`, and a `Saver`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stio.device.describe import LazyTensor
from stio.distributed.agreement import Share
from stio.distributed.parts import identify, part_of, replica_of
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.sharded_save import SaveToFiles, ShardedSave
from stio.distributed.sharded_upload import SaveToStore, is_store
from stio.errors import RankError
from stio.format.manifest import HashName
from stio.format.shared import UNDECLARED, SharedPolicy
from stio.runtime.progress import Progress
from stio.runtime.text import described_by, keywords_for
from stio.runtime.trace import Trace
from stio.saving.api import Saver as LocalSaver
from stio.saving.api import save as local_save
from stio.saving.nested import flatten
from stio.saving.options import (
    DEFAULT_PATTERN,
    CommitStep,
    DestinationLike,
    Durability,
    SaveOptions,
    SaveResult,
    ShardNames,
    absolute_destination,
)
from stio.saving.pending import EXIT_PATIENCE_SECONDS, PendingSave
from stio.saving.tensors import tensors_of
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS

_TOLD = "_stio_told"
"""Attribute of an error that a save of a `Saver` has told to the other ranks: the key of that save."""


@described_by(local_save)
async def save(
    module_or_state: object,
    destination: DestinationLike,
    *,
    budget_bytes: int | str | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    filename_pattern: str = DEFAULT_PATTERN,
    shared: SharedPolicy = "dedupe",
    shard_names: ShardNames = "auto",
    commit: CommitStep = "index",
    durability: Durability = "full",
    hash: HashName | None = None,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    progress: Progress = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
    process_group: ProcessGroup | None = None,
    rank_timeout: float = RANK_TIMEOUT_SECONDS,
) -> SaveResult:
    """Save what is sharded over ranks as one checkpoint; each rank calls this, and writes what it holds.

    The files are the same, byte for byte, as `stio.save` writes of the gathered tensors, on any number of ranks.
    Nothing is gathered: a rank stages its parts, within the budget, and writes them into the files, on a filesystem
    that all ranks share. To a store each file is uploaded by one rank, its owner, and the others send it their parts.
    Of copies (`Replicate`, plain tensors) one is written. If one rank fails, is cancelled or killed, the call raises on
    all of them, and the old checkpoint remains.

    All ranks save all names, in any order. What differs by rank, such as the state of a random generator, is gathered
    first, by `torch.distributed.all_gather_object`, and the list is saved on all ranks. Of plain tensors one copy is
    written. Values that are no tensors, and plain tensors of integers, bools or a single number up to 16 MiB, must be
    equal on all ranks; a difference is an error, and is named. Other plain tensors are not compared: copies of weights
    may differ by rounding.

    Args:
        module_or_state: What is saved; the same names on all ranks. A module, to save its `state_dict()`; tensors by
            name, saved as by `stio.save`; or nested state, saved as by `stio.save_state`, such as that of
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Tensors are `DTensor`s or plain ones. It
            must not change before this function returns; a `Saver` returns earlier.
        destination: See `stio.save`. A path is on a filesystem that all ranks share; a `RemoteRoot` of a store is
            accepted too.
        budget_bytes: Most bytes of staging memory of a rank; to a store, also of its uploads and of what is sent. None:
            512 MiB.
        max_shard_size: See `stio.save`. To a store all ranks upload if there are as many files as ranks.
        hash: See `stio.save`. Files of a path are read again for that, each by one rank.
        progress: See `stio.save`. It counts the bytes of this rank.
        process_group: The ranks that call this. None: all ranks of the default group.
        rank_timeout: Seconds without a sign of life of a rank, after which the save fails on all others.
        ...: The other arguments are those of `stio.save`.

    Returns:
        What was saved; the same on all ranks but for the times. With `durability="full"` it survives a power cut.

    Raises:
        MismatchError: The ranks do not save the same, or a placement cannot be saved.
        RankError: The save failed on another rank, whose error is `__cause__`.
        StioError: See `stio.save`.
    """
    given = locals()
    ranks = _ranks(process_group, rank_timeout)
    async with ranks.reports():
        options = SaveOptions(**keywords_for(SaveOptions, given))
        pending = await _sharded(module_or_state, destination, options, ranks, budget_bytes=budget_bytes)
        return await pending.complete()


@described_by(LocalSaver, save)
class Saver(LocalSaver):
    """Saves what is sharded over ranks, with callers that wait only for the snapshot of what they hold.

        async with stio.distributed.Saver(keep_last=3) as saver:
            pending = await saver.save(model, "step-100/")  # the snapshot of this rank is complete
            ...                                             # training continues, tensors may change
            result = await pending                          # durable, on all ranks, or it raises

    A `stio.Saver` for many ranks. Each rank makes one and calls it in the same order. If an exception leaves the block
    on one rank, the next save of another rank raises `RankError` at once. `save` takes what `stio.distributed.save`
    takes; `save_state` saves nested state, also where it is a flat mapping.

    Args:
        keep_last: See `stio.Saver`. The first rank deletes.
        budget_bytes: See `stio.Saver`. Each rank has a budget of its own.
        ...: The other arguments are those of `stio.Saver` and `stio.distributed.save`.
    """

    _sync_name = "distributed.Saver"

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        drop_higher: bool = False,
        adopt: str | os.PathLike[str] | None = None,
        max_pending: int = 1,
        when_full: Literal["wait", "error"] = "wait",
        budget_bytes: int | str | None = None,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        filename_pattern: str = DEFAULT_PATTERN,
        shared: SharedPolicy = "dedupe",
        shard_names: ShardNames = "auto",
        commit: CommitStep = "index",
        durability: Durability = "full",
        hash: HashName | None = None,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        progress: Progress = None,
        trace: Trace | None = None,
        switch_interval: float | None = None,
        process_group: ProcessGroup | None = None,
        rank_timeout: float = RANK_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(**keywords_for(LocalSaver, locals()))
        self._process_group, self._rank_timeout = process_group, rank_timeout
        self._first_key = ""  # that of the first save; the others have it and their number
        self._numbers = itertools.count()
        self._last_key = ""  # that of the last save; an error of it, which the other ranks know, has it too

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            others_know = isinstance(error, RankError | GeneratorExit) or getattr(error, _TOLD, None) == self._last_key
            if error is not None and not others_know:
                with suppress(Exception):  # the error of the block is raised
                    ranks = await self._next_ranks().__aenter__()  # where the others wait, or will
                    await ranks.__aexit__(kind, error, trace)
        finally:
            await super().__aexit__(kind, error, trace)

    def _next_ranks(self) -> Ranks:
        key = f"{self._first_key}.{next(self._numbers)}" if self._first_key else None
        ranks = _ranks(self._process_group, self._rank_timeout, key)
        self._first_key, self._last_key = self._first_key or ranks.key, ranks.key
        return ranks

    async def _save(self, tensors: object, destination: DestinationLike, changes: Mapping[str, Any]) -> PendingSave:
        return await self._begin_on_ranks(tensors, destination, changes, nested=None)

    async def _save_state(self, state: object, destination: DestinationLike, changes: Mapping[str, Any]) -> PendingSave:
        return await self._begin_on_ranks(state, destination, changes, nested=True)

    async def _begin_on_ranks(
        self, state: object, destination: DestinationLike, changes: Mapping[str, Any], *, nested: bool | None
    ) -> PendingSave:
        ranks = self._next_ranks()
        try:
            async with ranks.reports():
                options = self._options.with_changes(**changes)
                make = partial(_sharded, state, destination, options, ranks, nested=nested)
                return await self._begin(make, destination, options)
        except BaseException as error:
            vars(error)[_TOLD] = ranks.key  # not its `id`, which the next error may have when this one is freed
            raise


def _ranks(process_group: ProcessGroup | None, rank_timeout: float, key: str | None = None) -> Ranks:
    return Ranks(process_group, about="save", timeout=rank_timeout, key=key, exit_patience=EXIT_PATIENCE_SECONDS)


async def _sharded(
    state: object,
    destination: DestinationLike,
    options: SaveOptions,
    ranks: Ranks,
    *,
    nested: bool | None = None,
    **arguments: Any,
) -> ShardedSave:
    """Return the save of this rank's parts, which is not started.

    Args:
        state: See `save`.
        destination: See `save`.
        options: The keywords.
        ranks: The ranks.
        nested: Whether it is saved as nested state; None: if it is no module and no flat mapping of tensors.
        arguments: See `PendingSave`.
    """
    where = absolute_destination(destination)
    kind: type[ShardedSave] = SaveToStore if is_store(where) else SaveToFiles
    if not (isinstance(where, str | os.PathLike) or is_store(where)):
        raise ValueError(
            f"many ranks save to a path on a filesystem that they share, or to a URL of s3, gs or az, not to {where}"
        )
    if nested is None:
        nested = not isinstance(state, nn.Module) and not _is_flat(state)
    if nested:
        tensors, with_tree = await flatten(state, options.metadata)
        options, tied = replace(options, metadata=with_tree), UNDECLARED
    else:
        assert isinstance(state, Mapping | nn.Module)
        tensors, tied = tensors_of(state)
    shares: dict[str, Share] = {}
    meshes: dict[DeviceMesh, str] = {}
    for name, tensor in tensors.items():
        part = part_of(name, tensor) if isinstance(tensor, DTensor) else None
        if part is not None and isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            known = meshes[mesh] = meshes.get(mesh) or identify(mesh)
            # A rank that is not in the mesh has nothing, also of a scalar, which cannot be empty.
            tensors[name] = part.local if mesh.get_coordinate() is not None else part.local.new_empty(0)
            shares[name] = Share(part.shape, part.index, known, *replica_of(tensor))
    return kind(tensors, shares, destination, options, ranks=ranks, tied=tied, **arguments)


def _is_flat(state: object) -> bool:
    return isinstance(state, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor | LazyTensor) for name, tensor in state.items()
    )
