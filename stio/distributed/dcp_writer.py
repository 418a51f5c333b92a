"""Saves of torch's distributed checkpoint (DCP) as checkpoints in the hub's layout, published by stio's commit.

DCP's planner decides which rank writes which part of which tensor. The coordinator then plans the files
(`dcp_layout.py`) and begins the transaction. Each rank joins the staging directory, and writes its parts as in any save
of many ranks (`shared_save.py`); the coordinator writes the headers too. When all have written, it commits. The last
file waits for the values that are no tensors: the coordinator alone completes it, and hashes it.

DCP sends its messages of all saves over one group. Two saves at one time would take each other's messages. So one on a
thread of `dcp.async_save` comes first, and the next one of the group waits for the end of that thread.

DCP does not report failures to a writer. So the ranks report them to each other by `Ranks` while they write. What fails
before or after that is rolled back when the writer is used again, closed or dropped, and by recovery.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stio.device.describe import LazyTensor
from stio.device.tensor_memory import require_values
from stio.distributed.dcp_layout import (
    RankTask,
    SaveLayout,
    item_nbytes,
    parts_of_items,
    plan_save,
    require_right_parts,
    values_of_items,
)
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.shared_save import FileTransaction, SaveToFiles, bytes_of_files
from stio.distributed.torch_private import is_async_save, store_of
from stio.errors import ClosedError, SaveInProgressError, printable
from stio.format.placements import ByteRange
from stio.format.sharding import TensorSource
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import HashName, new_hasher
from stio.runtime.keywords import described_by, keywords_for
from stio.runtime.limits import checked_size
from stio.runtime.locks import new_lock
from stio.runtime.log import log
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation
from stio.runtime.progress import Progress
from stio.runtime.trace import Trace, traced
from stio.saving.api import save
from stio.saving.options import (
    DEFAULT_PATTERN,
    CommitStep,
    Destination,
    Durability,
    SaveOptions,
    SaveResult,
    ShardNames,
    absolute_destination,
)
from stio.saving.pending import EXIT_PATIENCE_SECONDS, PendingSave
from stio.saving.plan import ShardPlan, WritePlan
from stio.saving.plan_parts import WrittenPart, data_places, plan_parts
from stio.storage.base import Note, Transaction
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS
from stio.storage.commit.transaction import Invitation, JoinedTransaction, LocalTransaction


@described_by(save)
class StioStorageWriter(StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` save, as safetensors files.

        dcp.save(state, storage_writer=StioStorageWriter("out/"))

    The result is a checkpoint in the hub's layout: `stio.load` and every other safetensors reader can open it. A tensor
    has the name that DCP gives it, its path joined by dots. If the state has other values too, the checkpoint is also
    one of nested state, and `stio.load_state` returns what `dcp.load` restores. These values may be those that
    `stio.save_state` takes, without tensors in them; others are refused, and nothing is pickled into the checkpoint.
    Tied tensors are stored once for each name.

    Nothing is visible before the commit, which is the last step. If one rank fails or is killed, the call raises on all
    of them and the old checkpoint remains. A writer may be used for one save after the other.

    Args:
        path: A path on a filesystem that all ranks share. None: the `checkpoint_id` of the call.
        budget_bytes: Most bytes of staging memory of a rank. None: 512 MiB.
        hash: See `stio.save`. The files are read again for that, each by one rank.
        progress: See `stio.save`. It counts the bytes of this rank.
        process_group: The ranks that save: the same as of `dcp.save`.
        rank_timeout: Seconds without a sign of life of a rank, after which the save fails on all others.
        ...: The other arguments are those of `stio.save`.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is not allowed, or the path is no local path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        budget_bytes: int | str | None = None,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        filename_pattern: str = DEFAULT_PATTERN,
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
        super().__init__()
        self._options = SaveOptions(shared="clone", **keywords_for(SaveOptions, locals()))
        self._budget_bytes = None if budget_bytes is None else checked_size(budget_bytes)
        self._process_group, self._rank_timeout = process_group, rank_timeout
        self._path: str | os.PathLike[str] | None = None
        self._open: _OpenSave | None = None  # on the coordinator
        self._local_items: Sequence[WriteItem] = ()
        self._is_writing = False
        self.result: SaveResult | None = None
        """Report of the last save, on the coordinator; None before its commit, and on other ranks."""
        if path is not None:
            self._set_path(path)

    # DCP's interface, in the order of its calls.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path that can be saved to."""
        try:
            return not isinstance(absolute_destination(checkpoint_id), Destination)
        except (TypeError, ValueError, ImportError):
            return False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path, as it was given."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a new save; what is left of a save that has failed is removed.

        An `async_save` of these ranks that is under way ends first.

        Args:
            checkpoint_id: The path of the new save; None: that of the one before.
        """
        _wait_for_async_save(self._process_group)
        self.close()
        if checkpoint_id is not None:
            self._set_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for a new save, see `reset`. DCP calls this on all ranks, before it sends a message.

        Raises:
            SaveInProgressError: The save before this one has not ended.
            ValueError: There is no path; or each rank would save alone (`use_collectives=False`).
        """
        _wait_for_async_save(self._process_group)
        if self._is_writing:
            raise SaveInProgressError(
                "this writer is writing another save; wait for its end, or make a writer for each save", path=self._name
            )
        self.close()
        self.result = None
        if self._path is None:
            raise ValueError("the writer has no path; pass one to StioStorageWriter, or checkpoint_id=")
        if kwargs.get("use_collectives") is False and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("use_collectives=False: the ranks of a save by stio agree on one checkpoint; leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            ValueError: It is not complete, because the planner caches plans.
        """
        _require_complete(plan)
        self._local_items = plan.items
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the files, begin the transaction and create the files. DCP calls this on the coordinator.

        Args:
            plans: The plan of each rank.

        Returns:
            The plans, each with the task of its rank.

        Raises:
            StioError: The save cannot begin.
            ValueError: A name, an option or the process group does not fit.
        """
        for plan in plans:
            _require_complete(plan)
        if len(plans) > 1 and dist.get_world_size(self._process_group) != len(plans):
            raise ValueError(
                f"{len(plans)} ranks save, and process_group= of the writer has "
                f"{dist.get_world_size(self._process_group)}; pass the process group of dcp.save to the writer too"
            )
        assert self._path is not None
        opened = _OpenSave(self._path, self._options)
        Operation(partial(opened.begin, plans), name="begin", about=self._name, discard=_OpenSave.roll_back).result()
        self._open = opened
        return opened.tasks(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the files, and wait until all ranks have.

        Args:
            plan: The rank's items.
            planner: Has their data.

        Returns:
            A future that is complete. Its value has what is no tensor, for `finish`.

        Raises:
            TypeError: A value is neither a tensor nor one that `stio.save_state` takes.
            MismatchError: A tensor is another one than the plan says.
            RankError: Another rank has failed.
            StioError: See `stio.save`.
        """
        self._is_writing = True
        try:
            results = run_blocking(self._write(plan, planner))
        except BaseException:
            self.close()  # the other ranks have left
            raise
        finally:
            self._is_writing = False
            self._local_items = ()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the headers and publish the checkpoint. DCP calls this on the coordinator.

        Args:
            metadata: DCP's; the checkpoint itself says the same.
            results: What `write_data` returned on each rank.

        Raises:
            ClosedError: The save was closed meanwhile.
            StioError: See `stio.save`; the old checkpoint remains.
        """
        opened = self._open
        if opened is None:
            raise ClosedError("the save was closed before it was complete", path=self._name)
        found = [one for of_rank in results for one in of_rank]
        values = {one.index.fqn: one.storage_data.value for one in found if isinstance(one.storage_data, _PlainValue)}
        try:
            self.result = Operation(partial(opened.publish, values), name="commit", about=self._name).result()
        finally:
            self.close()

    def close(self) -> None:
        """Roll back a save that has begun and is not complete. Idempotent; the writer can be used again."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.roll_back()

    # How.

    @property
    def _name(self) -> str:
        return os.fsdecode(self._path) if self._path is not None else ""

    def _set_path(self, path: str | os.PathLike[str]) -> None:
        self._options.max_shard_bytes(path)  # for its errors
        if isinstance(absolute_destination(path), Destination):
            raise ValueError(
                f"a writer of DCP saves to a path on a filesystem that all ranks share, not to {printable(str(path))}; "
                "stio.distributed.save takes URLs"
            )
        self._path = path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_local_items": (), "_is_writing": False}

    async def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        task = plan.storage_data
        if not isinstance(task, RankTask):
            raise ValueError("the planner has dropped the storage_data of the plan, which the writer needs")
        ranks = Ranks(
            self._process_group,
            about="save",
            timeout=self._rank_timeout,
            key=Invitation.from_json(task.invitation).nonce,
            is_alone=task.num_ranks == 1,
            exit_patience=EXIT_PATIENCE_SECONDS,
        )
        async with ranks.reports():
            values = values_of_items([item for item in plan.items if item.type == WriteItemType.BYTE_IO], planner)
            of_tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
            require_right_parts(self._local_items, planner)
            require_values(state if isinstance(state := getattr(planner, "state_dict", None), Mapping) else {})
            tensors, ranges = parts_of_items(of_tensors, planner)
            assert self._path is not None
            save = _PartSave(tensors, ranges, task, self, ranks)
            del tensors
            written = await save.complete()
        if self._open is not None:
            self._open.hashes = written.hashes
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=0 if item.index.fqn in values else item_nbytes(item),
                storage_data=_PlainValue(values[item.index.fqn]) if item.index.fqn in values else None,
            )
            for item in plan.items
        ]


class _PartSave(SaveToFiles):
    """What one rank writes. It ends when all ranks have written; the coordinator then commits.

    Args:
        tensors: What the rank writes of each tensor.
        ranges: Where these bytes are in the whole tensor.
        task: The rank's task.
        writer: The writer.
        ranks: The ranks, not entered yet.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | LazyTensor],
        ranges: Mapping[str, Sequence[ByteRange]],
        task: RankTask,
        writer: StioStorageWriter,
        ranks: Ranks,
    ) -> None:
        self._ranges, self._task = ranges, task
        self._headers = [b""] * len(task.sizes) if writer._open is None else writer._open.early_headers()
        assert writer._path is not None
        super().__init__(tensors, {}, writer._path, writer._options, ranks=ranks, budget_bytes=writer._budget_bytes)

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        task = self._task
        files = tuple(
            ShardPlan(header=header, names=(), listed=(), nbytes=nbytes, data_bytes=0, blocks=())
            for header, nbytes in zip(self._headers, task.sizes, strict=True)
        )
        plan = WritePlan(sources=(), shards=files, aliases={}, total_bytes=0, metadata={})
        parts = {source.name: WrittenPart(source, self._ranges[source.name]) for source in sources}
        own = plan_parts(plan, parts, block_bytes, with_headers=True, places=task.places)
        self._own_bytes = bytes_of_files(own)
        return own, own

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        joined = JoinedTransaction(Invitation.from_json(self._task.invitation), operation.check)
        return _PartTransaction(joined, self._ranks, self._own_bytes, self._task.num_early)


class _PartTransaction(FileTransaction):
    """Its transaction. All ranks have joined, the coordinator too."""

    def __init__(self, files: JoinedTransaction, ranks: Ranks, own_bytes: Sequence[int], num_early: int) -> None:
        super().__init__(files, ranks, own_bytes)
        self._hashed = range(num_early)

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Wait until all ranks have written; the coordinator commits."""
        run_blocking(self._ranks.arrive("agreed"))


class _PlainValue:
    """A value that is no tensor, in the result that a rank returns to the coordinator."""

    def __init__(self, value: object) -> None:
        self.value = value


def _require_complete(plan: SavePlan) -> None:
    if not plan.usable:
        raise ValueError(
            "the planner caches plans (enable_plan_caching=True), and the plan of a save by stio is another one each "
            "time; use a planner without it"
        )


_OF_TORCH = ".metadata"
"""The file that torch's own reader of a directory begins with."""

_async_saves: MutableMapping[ProcessGroup, threading.Thread] = WeakKeyDictionary()
"""The thread of the last `dcp.async_save` of each group."""

_order = new_lock(of_callers=True)
"""Held while that is replaced."""


def _wait_for_async_save(process_group: ProcessGroup | None) -> None:
    """Wait until the thread of the `dcp.async_save` before this save has ended, if the same ranks do both."""
    if not dist.is_initialized() or dist.get_world_size(process_group) <= 1:
        return
    _, group = store_of(process_group)
    mine = threading.current_thread()
    with _order:
        before = _async_saves.get(group)
        if is_async_save(mine):
            _async_saves[group] = mine
    if before is not None and before is not mine:
        before.join()


class _OpenSave(PendingSave):
    """A save on the coordinator, which begins, publishes or rolls it back; also rolled back if it is dropped.

    Its bytes are written by a `_PartSave` on each rank; it is never started itself.
    """

    layout: SaveLayout
    """Its files."""
    hashes: Mapping[str, str]
    """Digests of the files that are complete when all ranks have written; of others empty."""
    _transaction: LocalTransaction | None = None

    def __init__(self, path: str | os.PathLike[str], options: SaveOptions) -> None:
        super().__init__({}, path, options)
        self._pid = os.getpid()

    def begin(self, plans: Sequence[SavePlan], operation: Operation[Any]) -> _OpenSave:
        """Plan the files, begin the transaction, and create the files; return this object."""
        options = self._options
        with traced(options.trace, "plan"):
            self.layout = plan_save(plans, max_shard_bytes=self._max_shard_bytes, metadata=options.metadata)
        operation.check()
        shards = self.layout.plan.shards
        with traced(options.trace, "begin"):
            transaction = self._begin_transaction(operation, len(shards))
            assert isinstance(transaction, LocalTransaction)
            self._transaction = transaction
            try:
                self._last = transaction.create([shard.nbytes for shard in shards], own_bytes=[0] * len(shards))[-1]
                self._invitation = transaction.invite().to_json()
            except BaseException:
                self.roll_back()
                raise
        return self

    def tasks(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Return the plans of the ranks with their tasks."""
        places = data_places(self.layout.plan)
        sizes = tuple(shard.nbytes for shard in self.layout.plan.shards)
        found = []
        for plan in plans:
            own = {item.index.fqn: places[item.index.fqn] for item in plan.items if item.index.fqn in places}
            task = RankTask(
                invitation=self._invitation,
                num_ranks=len(plans),
                sizes=sizes,
                places=own,
                num_early=self.layout.num_early,
            )
            found.append(SavePlan(plan.items, task, plan.planner_data, plan.usable))
        return found

    def early_headers(self) -> list[bytes]:
        """Return the header of each file; of one that is not known yet no bytes."""
        num_early = self.layout.num_early
        return [shard.header if k < num_early else b"" for k, shard in enumerate(self.layout.plan.shards)]

    def publish(self, values: Mapping[str, object], operation: Operation[SaveResult]) -> SaveResult:
        """Complete the files, and commit.

        Args:
            values: What is no tensor, by name.
            operation: The operation on whose thread this runs.
        """
        transaction, options = self._transaction, self._options
        assert transaction is not None
        plan, tree = self.layout.completed(values, operation.check)
        if values:
            self._write_late(plan.shards[-1], tree)
        for name, shard in zip(transaction.shard_names, plan.shards, strict=True):
            operation.check()
            transaction.finish_file(name, shard.nbytes)
        digests = None
        if options.hash is not None:
            with traced(options.trace, "hash"):
                digests = [
                    known or transaction.digest(name, new_hasher(options.hash), operation.check)
                    for name, known in self.hashes.items()
                ]
        self._staged_seconds = perf_counter() - self._started  # the snapshots of other ranks are not timed
        result = self._commit(operation, plan, transaction, digests)
        if self._max_shard_bytes is not None and os.path.lexists(os.path.join(transaction.path, _OF_TORCH)):
            log(
                logging.WARNING,
                "%s: saved, but the directory holds a checkpoint of torch's own writer too, and torch's own reader "
                "reads that one: load with StioStorageReader, or delete %s and the .distcp files",
                printable(transaction.path),
                _OF_TORCH,
            )
        return result

    def _write_late(self, shard: ShardPlan, tree: bytes) -> None:
        """Write what the ranks could not: the header of the last file, and the tree at its end."""
        self._last.own_bytes = len(shard.header) + len(tree)
        for offset, data in ((0, shard.header), (shard.nbytes - len(tree), tree)):
            region = allocate(len(data)).sub(0, len(data))
            region.write(0, data)
            self._last.write_from(offset, region)
        self._last.finish()

    def roll_back(self) -> None:
        """Remove the new files. Idempotent; does nothing after the commit."""
        # A forked child has a copy of this object, and not the save.
        if self._transaction is not None and os.getpid() == self._pid:
            self._transaction.roll_back()

    def __del__(self) -> None:
        if hasattr(self, "_pid"):
            self.roll_back()
        super().__del__()
