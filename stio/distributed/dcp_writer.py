"""Saves of torch's distributed checkpoint (DCP) as checkpoints in the hub's layout, published by stio's commit.

DCP's planner decides which rank writes which part of which tensor. The coordinator puts these decisions together
(`dcp_layout.py`). Then `write_data` is one save of many ranks (`sharded_save.py`), of the parts that the planner chose.
So DCP's `finish` has nothing to do. The values that are no tensors come from the ranks that the planner chose; the
first rank makes the tree of them, and writes it like its part of a tensor.

DCP does not report failures to a writer. So the ranks report them to each other by `Ranks` while they write.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stio.device.describe import describe_tensors
from stio.device.tensor_memory import require_values
from stio.distributed.dcp_layout import (
    SaveLayout,
    layout_of,
    parts_of_items,
    require_right_parts,
    state_paths,
    values_of_items,
)
from stio.distributed.ranks import MAX_VALUE_BYTES, RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.sharded_save import SaveToFiles
from stio.errors import SaveInProgressError, printable
from stio.format.placements import ByteRange
from stio.format.sharding import TensorSource
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR, parse_tree
from stio.loading.nested import torch_value
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import HashName
from stio.runtime.keywords import described_by, keywords_for
from stio.runtime.limits import Limits, checked_size
from stio.runtime.log import log
from stio.runtime.progress import Progress
from stio.runtime.trace import Trace
from stio.saving.api import save
from stio.saving.nested import tree_text
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
from stio.saving.pending import EXIT_PATIENCE_SECONDS
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.plan_parts import WrittenPart
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS

_CHUNK_BYTES = MAX_VALUE_BYTES // 2
"""Longest part of a rank's values that is sent at once."""

_COMMON_OPTIONS = (
    "max_shard_size", "metadata", "filename_pattern", "shard_names", "commit", "durability", "hash",
)  # fmt: skip
"""Those that decide what is written and where: all ranks take the coordinator's."""

_OF_TORCH = ".metadata"
"""The file that torch's own reader of a directory begins with."""


@described_by(save)
class StioStorageWriter(StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` save, as safetensors files.

        dcp.save(state, storage_writer=StioStorageWriter("out/"))

    The result is a checkpoint in the hub's layout: `stio.load` and every other safetensors reader can open it. A tensor
    has the name that DCP gives it, its path joined by dots. If the state has other values too, the checkpoint is also
    one of nested state, and `stio.load_state` returns the state, with keys of their own types and mappings as dicts.
    These values may be those that `stio.save_state` takes, without tensors in them; others are refused, and nothing is
    pickled into the checkpoint.
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
        self._is_writing = False
        self._written: SaveResult | None = None
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
        """Prepare for a new save.

        Args:
            checkpoint_id: The path of the new save; None: that of the one before.
        """
        if checkpoint_id is not None:
            self._set_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for a new save, see `reset`. DCP calls this on all ranks, before it sends a message.

        Raises:
            SaveInProgressError: The save before this one has not ended.
            ValueError: There is no path; or each rank would save alone (`use_collectives=False`).
        """
        if self._is_writing:
            raise SaveInProgressError(
                "this writer is writing another save; wait for its end, or make a writer for each save",
                path=os.fsdecode(self._path or ""),
            )
        self._written = self.result = None
        if self._path is None:
            raise ValueError("the writer has no path; pass one to StioStorageWriter, or checkpoint_id=")
        if kwargs.get("use_collectives") is False and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("use_collectives=False: the ranks of a save by stio agree on one checkpoint; leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, with the paths of the values in the state.

        Raises:
            ValueError: It is not complete, because the planner caches plans; or see `state_paths`.
        """
        if not plan.usable:
            raise ValueError(
                "the planner caches plans (enable_plan_caching=True), and the plan of a save by stio is another one "
                "each time; use a planner without it"
            )
        return replace(plan, storage_data=state_paths(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Put the plans of the ranks together. DCP calls this on the coordinator.

        Args:
            plans: The plan of each rank.

        Returns:
            The plans, each with what all ranks save.

        Raises:
            MismatchError: The plans do not fit together.
            ValueError: A name or the process group does not fit.
        """
        if len(plans) > 1 and dist.get_world_size(self._process_group) != len(plans):
            raise ValueError(
                f"{len(plans)} ranks save, and process_group= of the writer has "
                f"{dist.get_world_size(self._process_group)}; pass the process group of dcp.save to the writer too"
            )
        layout = layout_of(plans, {name: getattr(self._options, name) for name in _COMMON_OPTIONS})
        return [SavePlan(plan.items, layout, plan.planner_data, plan.usable) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the checkpoint; return when all ranks have, and it is published.

        Args:
            plan: The rank's items.
            planner: Has their data.

        Returns:
            A future that is complete.

        Raises:
            TypeError: A value is neither a tensor nor one that `stio.save_state` takes.
            MismatchError: A tensor is another one than the plan says.
            RankError: Another rank has failed.
            StioError: See `stio.save`.
        """
        self._is_writing = True
        try:
            self._written = run_blocking(self._write(plan, planner))
        finally:
            self._is_writing = False
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Set `result`: the checkpoint is published. DCP calls this on the coordinator."""
        self.result = self._written
        if self.result is not None and os.path.lexists(os.path.join(self.result.path, _OF_TORCH)):
            log(
                logging.WARNING,
                "%s: saved, but the directory holds a checkpoint of torch's own writer too, and torch's own reader "
                "reads that one: load with StioStorageReader, or delete %s and the .distcp files",
                printable(self.result.path),
                _OF_TORCH,
            )

    # How.

    def _set_path(self, path: str | os.PathLike[str]) -> None:
        self._options.max_shard_bytes(path)  # for its errors
        if isinstance(absolute_destination(path), Destination):
            raise ValueError(
                f"a writer of DCP saves to a path on a filesystem that all ranks share, not to {printable(str(path))}; "
                "stio.distributed.save takes URLs"
            )
        self._path = path

    async def _write(self, plan: SavePlan, planner: SavePlanner) -> SaveResult:
        layout, path = plan.storage_data, self._path
        if not isinstance(layout, SaveLayout):
            raise ValueError("the planner has dropped the storage_data of the plan, which the writer needs")
        assert path is not None
        ranks = Ranks(
            self._process_group,
            about="save",
            timeout=self._rank_timeout,
            key=layout.key,
            is_alone=layout.num_ranks == 1,
            exit_patience=EXIT_PATIENCE_SECONDS,
        )
        async with ranks.reports():
            require_right_parts(plan.items, planner)
            require_values(state if isinstance(state := getattr(planner, "state_dict", None), Mapping) else {})
            options = replace(self._options, **layout.options)
            save = _PlannedSave(plan, planner, path, options, ranks=ranks, budget_bytes=self._budget_bytes)
            return await save.complete()


class _PlannedSave(SaveToFiles):
    """The save on one rank, of the parts that DCP's planner has chosen.

    See `ShardedSave` for the other arguments.

    Args:
        plan: What the rank writes, and what all ranks save.
        planner: Has the data.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, path: str | os.PathLike[str], options: SaveOptions, **arguments: Any
    ) -> None:
        self._layout: SaveLayout = plan.storage_data
        self._values = values_of_items([item for item in plan.items if item.tensor_data is None], planner)
        self._own_tree = tree_text(self._values)  # raises for a value that is not saved
        tensors, self._ranges = parts_of_items([item for item in plan.items if item.tensor_data is not None], planner)
        super().__init__(tensors, {}, path, options, **arguments)

    def _plan_all(
        self, sources: Sequence[TensorSource], block_bytes: int
    ) -> tuple[WritePlan, Mapping[str, WrittenPart]]:
        metadata = dict(self._options.metadata or {})
        metadata.pop(STATE_KEY, None)  # of another checkpoint
        parts = {source.name: WrittenPart(source, self._ranges[source.name]) for source in sources}
        tree_bytes = 0
        if self._layout.has_tree:
            metadata[STATE_KEY] = POINTER
            tree_bytes = self._share_tree(parts)
        plan = plan_writes(
            describe_tensors(self._layout.whole(tree_bytes)),
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=metadata,
            shared="clone",
        )
        return plan, parts

    def _share_tree(self, parts: dict[str, WrittenPart]) -> int:
        """Make the tree on the first rank, from the values of all; it becomes one of its parts. Return its length."""
        ranks, path = self._ranks, str(self.destination)
        chunks = [self._own_tree[at : at + _CHUNK_BYTES] for at in range(0, len(self._own_tree), _CHUNK_BYTES)]
        num_chunks = self._arrive("chunks", len(chunks), kind=int)
        if ranks.rank:
            for k, chunk in enumerate(chunks):
                ranks.share(f"values {k}", chunk)
            tree_bytes: int = run_blocking(ranks.fetch("tree", kind=int))
            return tree_bytes
        values = dict(self._values)
        for rank in range(1, ranks.num_ranks):
            text = b"".join(run_blocking(ranks.fetch(f"values {k}", of=rank)) for k in range(num_chunks[rank]))
            values |= parse_tree(text, path=path, limits=Limits(), foreign=torch_value).fill(lambda one: one)
        text = self._layout.tree(values, self.operation.check)
        ranks.share("tree", len(text))
        tree = describe_tensors({TREE_TENSOR: torch.frombuffer(bytearray(text), dtype=torch.uint8)})[0]
        parts[TREE_TENSOR] = WrittenPart(tree, [ByteRange(0, len(text))])
        return len(text)
