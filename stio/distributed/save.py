"""Saves of modules and state that are sharded over ranks: `save`, and a `Saver`.

Each rank writes its parts of the files, and the first one publishes them. On a rank that is a `ShardedSave`, a
`PendingSave` with three things of its own. The plan: ranks compare their states, then each plans its parts.
The transaction: the first rank has it, the others join it. The end: a rank agrees when what it writes is durable, and
the first one commits when all have agreed. A rank that fails or is cancelled before that ends the save on all of them.
The others have ended their writes before the first rank removes the files.

How a rank writes depends on the destination (`sharded_write.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stio.device import LazyTensor, Readiness
from stio.distributed.agreement import RankState, Share, agree, require_all_parts, tree_of
from stio.distributed.parts import identify, part_of, replica_of
from stio.distributed.plan_parts import WrittenPart
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.sharded_write import FileTransaction, RankTransaction, Store, StoreTransaction
from stio.errors import RankError, printable
from stio.format import SharedPolicy, TensorSource, TiedNames, resolve_shared
from stio.format.files import HashName
from stio.format.state import STATE_KEY, TREE_TENSOR
from stio.remote import RemoteDestination
from stio.runtime import Operation, run_blocking
from stio.runtime.memory import allocate
from stio.runtime.reports import Progress, Trace
from stio.saving import (
    DEFAULT_PATTERN,
    CommitStep,
    DestinationLike,
    Durability,
    PendingSave,
    SaveOptions,
    SaveResult,
    ShardNames,
    SharedBySaves,
    WritePlan,
    flatten,
    plan_writes,
    tensors_of,
)
from stio.saving import Saver as LocalSaver
from stio.saving import save as local_save
from stio.storage import Transaction
from stio.storage.commit import LOCK_TIMEOUT_SECONDS
from stio.text import described_by, keywords_for

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
    ranks = Ranks(process_group, about="save", timeout=rank_timeout)
    async with ranks.reports():
        options = SaveOptions(**keywords_for(SaveOptions, given))
        pending = await _sharded(module_or_state, destination, options, ranks, saver=SharedBySaves.alone(budget_bytes))
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
        ranks = Ranks(self._process_group, about="save", timeout=self._rank_timeout, key=key)
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
    if nested is None:
        nested = not isinstance(state, nn.Module) and not _is_flat(state)
    tied = None
    if nested:
        tensors, with_tree = await flatten(state, options.metadata)
        options = replace(options, metadata=with_tree)
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
    held = HeldTensors(tensors, shares, tied or TiedNames())
    return ShardedSave(held, destination, options, ranks, **arguments)


def _is_flat(state: object) -> bool:
    return isinstance(state, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor | LazyTensor) for name, tensor in state.items()
    )


# The save on one rank.

_MAX_COMPARED_BYTES = 16 << 20
"""Longest tensor that is compared with those of other ranks: SHA-256 takes 10 ms of it."""


class HeldTensors(NamedTuple):
    """What a rank holds of the tensors of a save."""

    tensors: Mapping[str, torch.Tensor | LazyTensor]
    """What it holds of each."""
    shares: Mapping[str, Share]
    """Which part that is, see `RankState`."""
    tied: TiedNames
    """See `resolve_shared`; the same on all ranks."""


class ShardedSave(PendingSave):
    """One save of many ranks, on one of them.

    See `PendingSave` for the other arguments.

    Args:
        held: What this rank has.
        destination: The destination.
        options: The keywords.
        ranks: The ranks, not entered yet. The caller waits for the save in a block of `Ranks.reports`.
    """

    def __init__(
        self, held: HeldTensors, destination: DestinationLike, options: SaveOptions, ranks: Ranks, **arguments: Any
    ) -> None:
        self._ranks, self._shares, self._tied = ranks, held.shares, held.tied
        self._undo = ExitStack()
        super().__init__(held.tensors, destination, options, **arguments)
        where = self._absolute_destination
        if isinstance(where, RemoteDestination):
            self._absolute_destination = Store(where)
        elif not isinstance(where, str | os.PathLike):
            raise ValueError(
                f"many ranks save to a path on a filesystem that they share, or to a URL of s3, gs or az, not to "
                f"{where}"
            )

    def _run(self, operation: Operation[SaveResult]) -> SaveResult:
        # What was begun is undone after this rank has left the others: a failure is reported by then, and deletions may
        # take long. On the first rank the others have left too and ended their writes: some filesystems keep the names
        # of open files.
        with self._undo:
            return run_blocking(self._run_on_ranks(operation))

    async def _run_on_ranks(self, operation: Operation[SaveResult]) -> SaveResult:
        self._ranks.bind(operation)
        async with self._ranks:
            return super()._run(operation)

    # The plan.

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        """Return the plan of the files and that of this rank's parts."""
        plan, parts = self._plan_all(sources, block_bytes)
        require_all_parts(plan, parts, self._ranks, path=str(self.destination))
        where = self._absolute_destination
        kind = StoreTransaction if isinstance(where, Store) else FileTransaction
        self._transaction: RankTransaction = kind(self._ranks, where, self._options, self.operation)
        return plan, self._transaction.plan(plan, parts, block_bytes)

    def _plan_all(
        self, sources: Sequence[TensorSource], block_bytes: int
    ) -> tuple[WritePlan, Mapping[str, WrittenPart]]:
        """Return the plan of the files and the parts that this rank writes, once all ranks have the same state."""
        options, ranks = self._options, self._ranks
        if options.shared == "error":
            resolve_shared(sources, "error")
        state = RankState(
            sources=sources,
            shares=self._shares,
            metadata=options.metadata,
            tree=tree_of(options.metadata, sources),
            settings=self._settings(),
            values=self._compared_values(sources),
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
        )
        with_ties = options.shared == "dedupe"
        state, meshes, ties = agree(state, ranks, with_ties=with_ties, path=str(self.destination))
        whole = state.whole(ties)
        plan = plan_writes(
            whole,
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=state.metadata,
            shared="dedupe" if ties else "clone",
            tied=self._tied,
        )
        return plan, state.parts(plan.sources, meshes)

    def _settings(self) -> dict[str, str]:
        """Return the options that decide what is written and where; they must be equal on all ranks."""
        options = self._options
        found = {
            f"the option {name}": repr(getattr(options, name))
            for name in ("filename_pattern", "shared", "shard_names", "commit", "durability", "hash")
        }
        found["the option max_shard_size"] = repr(self._max_shard_bytes)
        found["what the module declares about tied names"] = repr(
            (sorted(self._tied.sources.items()), sorted(self._tied.required))
        )
        found["the destination"] = str(self._absolute_destination)
        for key, text in sorted((options.metadata or {}).items()):
            if key != STATE_KEY:
                found[f"the metadata under {printable(key)!r}"] = text
        return found

    def _compared_values(self, sources: Sequence[TensorSource]) -> dict[str, str]:
        """Return digests of the tensors that must have equal values on all ranks, such as states of generators.

        Copies of weights may differ by rounding, and statistics of a module by the batches of a rank. So tensors of
        several floating-point numbers are not compared, nor are large ones.
        """
        compared = [
            source
            for source in sources
            if source.name not in self._shares
            and source.name != TREE_TENSOR
            and isinstance(source.data, torch.Tensor)
            and 0 < source.nbytes <= _MAX_COMPARED_BYTES
            and (not (source.data.is_floating_point() or source.data.is_complex()) or source.data.numel() == 1)
        ]
        found = {}
        for source in compared:
            region = allocate(source.nbytes).sub(0, source.nbytes)
            (self._ready or Readiness()).copy_out([(source.data, 0, region)])
            found[source.name] = hashlib.sha256(region.view()).hexdigest()
        return found

    # The transaction.

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        transaction, is_first = self._transaction, self._ranks.rank == 0
        own = super()._begin_transaction(operation, num_shards) if is_first else transaction.join()
        self._undo.callback(own.roll_back)
        transaction.begin(own)
        if len(own.shard_names) != num_shards:
            raise RankError("rank 0 has sent the names of another number of files", ranks=(0,))
        return transaction
