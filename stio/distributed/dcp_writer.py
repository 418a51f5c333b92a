"""Saves of torch's distributed checkpoint (DCP) as checkpoints in the hub's layout, published by stio's commit.

DCP's planner decides which rank writes which part of which tensor. The coordinator then plans the files
(`dcp_layout.py`) and begins the transaction. Each rank joins the staging directory and writes its parts. When all have
written, the coordinator writes the headers and commits.

With `hash=` the ranks share the work: each reads some of the files when all have written. The last file waits for the
values that are no tensors, so the coordinator reads it.

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

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stio.device.tensor_memory import require_values
from stio.distributed.dcp_layout import RankTask, SaveLayout, plan_save
from stio.distributed.dcp_part import (
    FileDigest,
    PartSave,
    PlainValue,
    digests_of_share,
    item_nbytes,
    parts_of_items,
    require_right_parts,
    values_of_items,
)
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.torch_private import is_async_save, store_of
from stio.errors import ClosedError, SaveInProgressError, printable
from stio.format.naming import MANIFEST_SUFFIX, index_name, manifest_name
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import HashName, new_hasher
from stio.runtime.keywords import described_by
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
from stio.saving.pending import EXIT_PATIENCE_SECONDS, hiding_on_disk, manifest_notes, warn_of_hiding
from stio.saving.plan import ShardPlan, WritePlan
from stio.saving.plan_parts import data_places
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS
from stio.storage.commit.file_writer import LocalFileWriter
from stio.storage.commit.transaction import Invitation, LocalTransaction, begin_local


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
        self._options = SaveOptions(
            max_shard_size=max_shard_size,
            metadata=metadata,
            filename_pattern=filename_pattern,
            shared="clone",
            shard_names=shard_names,
            commit=commit,
            durability=durability,
            hash=hash,
            lock_timeout=lock_timeout,
            progress=progress,
            trace=trace,
            switch_interval=switch_interval,
        )
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
        begin = Operation(partial(self._begin, plans), name="begin", about=self._name, discard=_OpenSave.roll_back)
        self._open = opened = begin.result()
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
        values = {one.index.fqn: one.storage_data.value for one in found if isinstance(one.storage_data, PlainValue)}
        hashes = {one.index.fqn: one.storage_data.text for one in found if isinstance(one.storage_data, FileDigest)}
        publish = partial(_publish, opened=opened, values=values, hashes=hashes, options=self._options)
        try:
            self.result = Operation(publish, name="commit", about=self._name).result()
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

    def _begin(self, plans: Sequence[SavePlan], operation: Operation[_OpenSave]) -> _OpenSave:
        options, path = self._options, self._path
        assert path is not None
        started = perf_counter()
        with traced(options.trace, "plan"):
            max_shard_bytes = options.max_shard_bytes(path)
            layout = plan_save(plans, max_shard_bytes=max_shard_bytes, metadata=options.metadata)
        operation.check()
        where = absolute_destination(path)
        assert isinstance(where, str)
        with traced(options.trace, "begin"):
            transaction = begin_local(
                where,
                num_shards=len(layout.plan.shards),
                filename_pattern=options.filename_pattern,
                shard_names=options.shard_names,
                commit=options.commit,
                durability=options.durability,
                lock_timeout=options.lock_timeout,
                check=operation.check,
            )
            try:
                names = transaction.shard_names
                is_file = max_shard_bytes is None
                manifest = f"{names[0]}{MANIFEST_SUFFIX}" if is_file else manifest_name(options.filename_pattern)
                if options.hash is not None:
                    transaction.require_names(manifest)
                sizes = [shard.nbytes for shard in layout.plan.shards]
                writers = transaction.create(sizes, own_bytes=[0] * len(sizes))
                return _OpenSave(transaction, layout, writers, manifest, options.hash, len(plans), started)
            except BaseException:
                transaction.roll_back()
                raise

    async def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        task = plan.storage_data
        if not isinstance(task, RankTask):
            raise ValueError("the planner has dropped the storage_data of the plan, which the writer needs")
        if task.num_ranks == 1:
            return await self._write_part(task, plan.items, planner)
        key = Invitation.from_json(task.invitation).nonce
        ranks = Ranks(
            self._process_group,
            about="save",
            timeout=self._rank_timeout,
            key=key,
            exit_patience=EXIT_PATIENCE_SECONDS,
        )
        async with ranks:
            results = await self._write_part(task, plan.items, planner, ranks)
            if self._open is not None and task.hash is not None:
                self._open.complete_early()
            await ranks.arrive("written")
            if task.hash is not None:
                results += digests_of_share(task, ranks)
                await ranks.arrive("hashed")
        return results

    async def _write_part(
        self, task: RankTask, items: Sequence[WriteItem], planner: SavePlanner, ranks: Ranks | None = None
    ) -> list[WriteResult]:
        values = values_of_items([item for item in items if item.type == WriteItemType.BYTE_IO], planner)
        of_tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        require_right_parts(self._local_items, planner)
        require_values(state if isinstance(state := getattr(planner, "state_dict", None), Mapping) else {})
        tensors, ranges = parts_of_items(of_tensors, planner)
        assert self._path is not None
        save = PartSave(tensors, ranges, task, self._path, self._options, budget_bytes=self._budget_bytes)
        del tensors
        if ranks is not None:
            ranks.on_failure(save.cancel)
        await save.complete()
        results = [
            WriteResult(index=item.index, size_in_bytes=item_nbytes(item), storage_data=None) for item in of_tensors
        ]
        return results + values


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


class _OpenSave:
    """A save that has begun, on the coordinator; rolled back if it is dropped.

    Args:
        transaction: Its transaction.
        layout: Its files.
        writers: Their writers, with which nothing was written yet.
        manifest: Name of the manifest.
        hash: The hash of the files, if any.
        num_ranks: Number of ranks that save.
        started: When it began, by `perf_counter`.
    """

    def __init__(
        self,
        transaction: LocalTransaction,
        layout: SaveLayout,
        writers: Sequence[LocalFileWriter],
        manifest: str,
        hash: HashName | None,
        num_ranks: int,
        started: float,
    ) -> None:
        self._pid = os.getpid()
        self.transaction, self.layout, self.writers, self.manifest = transaction, layout, writers, manifest
        self.started = started
        self._hash, self._num_ranks = hash, num_ranks
        self._invitation = transaction.invite().to_json()

    def tasks(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Return the plans of the ranks with their tasks."""
        places = data_places(self.layout.plan)
        sizes = tuple(shard.nbytes for shard in self.layout.plan.shards)
        found = []
        for plan in plans:
            own = {item.index.fqn: places[item.index.fqn] for item in plan.items if item.index.fqn in places}
            task = RankTask(
                invitation=self._invitation,
                num_ranks=self._num_ranks,
                sizes=sizes,
                places=own,
                hash=self._hash,
                num_early=self.layout.num_early,
            )
            found.append(SavePlan(plan.items, task, plan.planner_data, plan.usable))
        return found

    def complete_early(self) -> None:
        """Write what the ranks do not write into the files that are known before the end."""
        early = self.layout.plan.shards[: self.layout.num_early]
        for shard, writer in zip(early, self.writers, strict=False):
            _complete_file(writer, shard, b"")

    def roll_back(self) -> None:
        """Remove the new files. Idempotent; does nothing after the commit."""
        if os.getpid() == self._pid:  # a forked child has a copy of this object, and not the save
            self.transaction.roll_back()

    def __del__(self) -> None:
        if hasattr(self, "transaction"):
            self.roll_back()


def _publish(
    operation: Operation[SaveResult],
    *,
    opened: _OpenSave,
    values: Mapping[str, object],
    hashes: Mapping[str, str],
    options: SaveOptions,
) -> SaveResult:
    """Complete the files of a save, and commit.

    Args:
        operation: The operation on whose thread this runs.
        opened: The save.
        values: What is no tensor, by name.
        hashes: The digests that are known, by file.
        options: The keywords.
    """
    transaction, names = opened.transaction, opened.transaction.shard_names
    plan, tree = opened.layout.completed(values, operation.check)
    for shard, writer in zip(plan.shards, opened.writers, strict=True):
        operation.check()
        if not writer.finished:
            _complete_file(writer, shard, tree if shard is plan.shards[-1] else b"")
        transaction.finish_file(writer.name, shard.nbytes)
    all_hashes: dict[str, str] = {}
    if options.hash is not None:
        with traced(options.trace, "hash"):
            for name in names:
                known = hashes.get(name)
                all_hashes[name] = known or transaction.digest(name, new_hasher(options.hash), operation.check)
    written_seconds = perf_counter() - opened.started
    sizes = [shard.nbytes for shard in plan.shards]
    notes = manifest_notes(transaction, opened.manifest, options.hash, sizes, all_hashes)
    index = plan.index(names) if transaction.takes_index else None
    with traced(options.trace, "commit"):
        transaction.prepare_commit(operation.check)
        operation.refuse_cancel()
        transaction.commit(index=index, notes=notes)
    is_file = options.max_shard_bytes(transaction.path) is None
    _warn_of_other_readers(transaction, index_name(options.filename_pattern), plan, is_file=is_file)
    return SaveResult(
        path=transaction.path,
        files=names,
        total_bytes=plan.total_bytes,
        file_bytes=sum(sizes),
        aliases={},
        staged_seconds=written_seconds,  # the snapshots of other ranks are not timed
        written_seconds=written_seconds,
        committed_seconds=perf_counter() - opened.started,
        hashes=all_hashes,
    )


def _warn_of_other_readers(transaction: LocalTransaction, index: str, plan: WritePlan, *, is_file: bool) -> None:
    """Log what else is in the directory that a reader follows: another index, or a checkpoint of torch's own writer."""
    path, names = transaction.path, transaction.shard_names
    own_index = index if transaction.takes_index else None
    tensors = [name for shard in plan.shards for name in shard.names]
    if (hiding := hiding_on_disk(path, own_index, names, tensors)) is not None:
        warn_of_hiding(hiding, path, None if is_file else own_index or names[0])
    if not is_file and os.path.lexists(os.path.join(path, _OF_TORCH)):
        log(
            logging.WARNING,
            "%s: saved, but the directory holds a checkpoint of torch's own writer too, and torch's own reader reads "
            "that one: load with StioStorageReader, or delete %s and the .distcp files",
            printable(path),
            _OF_TORCH,
        )


def _complete_file(writer: LocalFileWriter, shard: ShardPlan, tree: bytes) -> None:
    """Write what the ranks have not: the header, and the tree at the end."""
    writer.own_bytes = len(shard.header) + len(tree)
    for offset, data in ((0, shard.header), (shard.nbytes - len(tree), tree)):
        if data:
            region = allocate(len(data)).sub(0, len(data))
            region.write(0, data)
            writer.write_from(offset, region)
    writer.finish()
