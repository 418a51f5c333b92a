"""The public functions that save: `save`, and a `Saver` whose saves run in the background.

Each is one coroutine that begins a save (`stio.saving.pending`) and waits for it, on asyncio, uvloop or trio;
`stio.sync` runs the same coroutines in a thread without a loop. No task group and no cancel scope of the caller is held
while the caller's code runs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self, TypeAlias
from weakref import WeakSet

from stio.errors import ClosedError, CommitUncertainError, SaveInProgressError, StioError
from stio.format.shared import SharedPolicy
from stio.runtime.hashing import HashName
from stio.runtime.process import after_fork_in_child
from stio.runtime.progress import Progress
from stio.runtime.trace import Trace
from stio.saving.nested import flatten
from stio.saving.options import (
    DEFAULT_PATTERN,
    INHERITED,
    CommitStep,
    DestinationLike,
    Durability,
    Inherited,
    SaveOptions,
    SaveResult,
    ShardNames,
    TensorsLike,
)
from stio.saving.pending import PendingSave, SavedCheckpoint
from stio.saving.staging_pool import StagingPool
from stio.storage.commit.retention import remove_checkpoint

logger = logging.getLogger("stio")

WhenFull: TypeAlias = Literal["wait", "error"]


async def save(
    tensors: TensorsLike,
    destination: DestinationLike,
    *,
    budget_bytes: int | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    filename_pattern: str = DEFAULT_PATTERN,
    shared: SharedPolicy = "dedupe",
    shard_names: ShardNames = "auto",
    commit: CommitStep = "index",
    durability: Durability = "full",
    hash: HashName | None = None,
    progress: Progress = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
) -> SaveResult:
    """Save a checkpoint, atomically and durably.

    A cancel rolls the save back before it is passed on, unless the commit has begun.

    Args:
        tensors: Tensors by name (some may be `stio.LazyTensor`), or a module. They must not change during the
            save; a `Saver` returns earlier.
        destination: A path ending in `.safetensors` is one file; any other path is a directory in the hub's layout,
            updated in place where it holds a checkpoint. Other files in it are not touched.
        budget_bytes: Most bytes of staging memory. None: 512 MiB. A produced tensor is not included.
        max_shard_size: Most bytes of tensors in one file of a directory: a number, or text such as `"5GB"`. None:
            `"5GB"`. Not for a destination that is one file.
        metadata: Text to store with the checkpoint.
        filename_pattern: Names of the files in a directory; `{suffix}` becomes empty or `-00001-of-00003`.
        shared: Tensors that share memory: `"dedupe"` saves them once and restores them as one, `"clone"` saves each,
            `"error"` refuses them.
        shard_names: `"auto"` gives shards names of their own beside an old checkpoint; `"hub"` keeps the plain names
            there, and needs `commit="files"`.
        commit: What publishes a checkpoint in a directory that holds one: `"index"` (one rename), or `"files"` (one by
            one; a reader in that moment may see both).
        durability: `"full"`: what was saved survives a power cut. `"none"` leaves out every fsync; it survives only a
            crash of the process.
        hash: Write a manifest with a digest of every file: `"sha256"` or `"xxh3"`.
        progress: A callable that gets a `stio.ProgressEvent`, `True` for a tqdm bar, or a tqdm class.
        trace: A `stio.Trace` that records spans of the work.
        switch_interval: The interpreter's switch interval during the save, in seconds. None: unchanged.

    Returns:
        What was saved, once it survives a power cut.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has a wrong value, or two of them contradict each other.
        NoSpaceError: It does not fit; raised before the first byte is written.
        ConcurrentSaveError: Another save changed the destination at the same time.
        CommitUncertainError: It is in place, but the system did not confirm that it is durable.
        StioError: See `stio.errors`. After any other exception, a cancel included, the old checkpoint remains.
    """
    options = SaveOptions(
        max_shard_size=max_shard_size,
        metadata=metadata,
        filename_pattern=filename_pattern,
        shared=shared,
        shard_names=shard_names,
        commit=commit,
        durability=durability,
        hash=hash,
        progress=progress,
        trace=trace,
        switch_interval=switch_interval,
    )
    return await PendingSave(tensors, destination, options, budget_bytes=budget_bytes).complete()


class Saver:
    """Saves with a caller that waits only for the snapshot: writing and committing continue in the background.

        async with stio.Saver(keep_last=3) as saver:
            pending = await saver.save(model.state_dict(), "step-100/")  # the snapshot is complete
            ...                                                          # training continues, tensors may change
            result = await pending                                       # durable, or it raises

    The failure of a save that was not awaited is raised by the next `save`, or on leaving the block. Leaving the block
    waits for the saves that are under way, also after an exception; after a cancel it rolls them back. Staging memory
    is reused.

    Args:
        keep_last: Delete the saver's own older checkpoints once this many newer ones are durable. None: keep all.
        max_pending: Most saves under way at one time. Each holds its own snapshot.
        when_full: What `save` does when so many are under way: wait for the oldest, or raise `SaveInProgressError`.
        budget_bytes: Most bytes of staging memory. None: as many as the snapshots take, so that a save is staged at the
            speed of memory. Below a snapshot's size it is written while it is staged.
        max_shard_size: Default for `save`; see `stio.save`.
        metadata: Default for `save`; see `stio.save`.
        filename_pattern: Default for `save`; see `stio.save`.
        shared: Default for `save`; see `stio.save`.
        shard_names: Default for `save`; see `stio.save`.
        commit: Default for `save`; see `stio.save`.
        durability: Default for `save`; see `stio.save`.
        hash: Default for `save`; see `stio.save`.
        progress: Default for `save`; see `stio.save`.
        trace: Default for `save`; see `stio.save`.
        switch_interval: Default for `save`; see `stio.save`.
    """

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        max_pending: int = 1,
        when_full: WhenFull = "wait",
        budget_bytes: int | None = None,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        filename_pattern: str = DEFAULT_PATTERN,
        shared: SharedPolicy = "dedupe",
        shard_names: ShardNames = "auto",
        commit: CommitStep = "index",
        durability: Durability = "full",
        hash: HashName | None = None,
        progress: Progress = None,
        trace: Trace | None = None,
        switch_interval: float | None = None,
    ) -> None:
        if keep_last is not None:
            _require_count("keep_last", keep_last)
        _require_count("max_pending", max_pending)
        if when_full not in ("wait", "error"):
            raise ValueError(f"when_full= takes 'wait' or 'error', not {when_full!r}")
        self._options = SaveOptions(
            max_shard_size=max_shard_size,
            metadata=metadata,
            filename_pattern=filename_pattern,
            shared=shared,
            shard_names=shard_names,
            commit=commit,
            durability=durability,
            hash=hash,
            progress=progress,
            trace=trace,
            switch_interval=switch_interval,
        )
        self._keep_last = keep_last
        self._max_pending = max_pending
        self._when_full = when_full
        self._budget_bytes = budget_bytes
        self._closed = False
        self._start_afresh()
        _savers.add(self)

    def _start_afresh(self) -> None:
        """Reset to no saves. In a forked child, the saves and the checkpoints so far belong to the parent."""
        self._pool = StagingPool(self._budget_bytes)
        self._lock = threading.Lock()
        self._saves: deque[PendingSave] = deque()  # in the order of their calls; ended ones leave in `_collect`
        self._failures: deque[BaseException] = deque()
        # By path and file names, in the order of their saves.
        self._checkpoints: dict[tuple[str, str | None], SavedCheckpoint] = {}

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves that have not ended, the oldest first."""
        with self._lock:
            return tuple(save for save in self._saves if not save.done())

    async def save(
        self,
        tensors: TensorsLike,
        destination: DestinationLike,
        *,
        max_shard_size: int | str | Inherited | None = INHERITED,
        metadata: Mapping[str, str] | Inherited | None = INHERITED,
        filename_pattern: str | Inherited = INHERITED,
        shared: SharedPolicy | Inherited = INHERITED,
        shard_names: ShardNames | Inherited = INHERITED,
        commit: CommitStep | Inherited = INHERITED,
        durability: Durability | Inherited = INHERITED,
        hash: HashName | Inherited | None = INHERITED,
        progress: Progress | Inherited = INHERITED,
        trace: Trace | Inherited | None = INHERITED,
        switch_interval: float | Inherited | None = INHERITED,
    ) -> PendingSave:
        """Begin a save; return once its snapshot is complete, and the tensors may change.

        A cancel of this call rolls the save back.

        Args:
            tensors: See `stio.save`.
            destination: See `stio.save`.
            max_shard_size: See `stio.save`; by default the saver's own.
            metadata: See `stio.save`; by default the saver's own.
            filename_pattern: See `stio.save`; by default the saver's own.
            shared: See `stio.save`; by default the saver's own.
            shard_names: See `stio.save`; by default the saver's own.
            commit: See `stio.save`; by default the saver's own.
            durability: See `stio.save`; by default the saver's own.
            hash: See `stio.save`; by default the saver's own.
            progress: See `stio.save`; by default the saver's own.
            trace: See `stio.save`; by default the saver's own.
            switch_interval: See `stio.save`; by default the saver's own.

        Raises:
            SaveInProgressError: As many saves as allowed are under way, and `when_full="error"`.
            StioError: This save failed before its snapshot was complete, or an earlier one failed and was not awaited.
        """
        options = self._options.with_changes(
            max_shard_size=max_shard_size,
            metadata=metadata,
            filename_pattern=filename_pattern,
            shared=shared,
            shard_names=shard_names,
            commit=commit,
            durability=durability,
            hash=hash,
            progress=progress,
            trace=trace,
            switch_interval=switch_interval,
        )
        return await self._save(tensors, destination, options)

    async def save_state(
        self,
        state: object,
        destination: DestinationLike,
        *,
        max_shard_size: int | str | Inherited | None = INHERITED,
        metadata: Mapping[str, str] | Inherited | None = INHERITED,
        filename_pattern: str | Inherited = INHERITED,
        shared: SharedPolicy | Inherited = INHERITED,
        shard_names: ShardNames | Inherited = INHERITED,
        commit: CommitStep | Inherited = INHERITED,
        durability: Durability | Inherited = INHERITED,
        hash: HashName | Inherited | None = INHERITED,
        progress: Progress | Inherited = INHERITED,
        trace: Trace | Inherited | None = INHERITED,
        switch_interval: float | Inherited | None = INHERITED,
    ) -> PendingSave:
        """Begin to save nested state; return once its snapshot is complete, and all of it may change.

        Args:
            state: See `stio.save_state`.
            destination: See `stio.save`.
            max_shard_size: See `stio.save`; by default the saver's own.
            metadata: See `stio.save`; by default the saver's own.
            filename_pattern: See `stio.save`; by default the saver's own.
            shared: See `stio.save`; by default the saver's own.
            shard_names: See `stio.save`; by default the saver's own.
            commit: See `stio.save`; by default the saver's own.
            durability: See `stio.save`; by default the saver's own.
            hash: See `stio.save`; by default the saver's own.
            progress: See `stio.save`; by default the saver's own.
            trace: See `stio.save`; by default the saver's own.
            switch_interval: See `stio.save`; by default the saver's own.

        Raises:
            StioError: See `save`.
        """
        options = self._options.with_changes(
            max_shard_size=max_shard_size,
            metadata=metadata,
            filename_pattern=filename_pattern,
            shared=shared,
            shard_names=shard_names,
            commit=commit,
            durability=durability,
            hash=hash,
            progress=progress,
            trace=trace,
            switch_interval=switch_interval,
        )
        tensors, with_tree = await flatten(state, options.metadata)
        return await self._save(tensors, destination, replace(options, metadata=with_tree))

    async def aclose(self) -> None:
        """Wait for the saves that are under way; raise the first failure that was not awaited. Idempotent.

        A cancel during the wait rolls back the saves that have not ended.
        """
        failed = await self._close(self._drain)
        if failed is not None:
            raise failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:  # the exception that left the block is raised; failures were logged
            await self._close(self._drain if isinstance(error, Exception | SystemExit) else self._roll_back)

    async def _save(self, tensors: TensorsLike, destination: DestinationLike, options: SaveOptions) -> PendingSave:
        while (pending := self._submit(tensors, destination, options)) is None:
            if under_way := self.pending:
                await under_way[0].ended()
        await pending.wait_staged()
        return pending

    def _submit(self, tensors: TensorsLike, destination: DestinationLike, options: SaveOptions) -> PendingSave | None:
        """Begin a save; None if the oldest one must end first.

        Raises:
            SaveInProgressError: As many saves as allowed are under way, and `when_full="error"`.
            BaseException: The failure of an earlier save that was not awaited.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the saver is closed", path=str(destination))
            self._collect()
            if self._failures:
                raise self._failures.popleft()
            if len(self._saves) >= self._max_pending:
                if self._when_full == "error":
                    raise SaveInProgressError(
                        "a save is under way; await it, or let this one wait by when_full='wait'",
                        path=str(self._saves[0].destination),
                        expected=f"at most {self._max_pending}",
                        found=len(self._saves),
                    )
                return None
            previous = self._saves[-1] if self._saves else None
            save = PendingSave(
                tensors, destination, options, pool=self._pool, previous=previous, when_durable=self._retain
            )
            self._saves.append(save)
            return save

    def _collect(self) -> None:
        """Remove the saves that have ended, and collect failures that were not awaited. The caller holds the lock."""
        while self._saves and self._saves[0].done():
            save = self._saves.popleft()
            if save.delivered:
                continue
            try:
                save.outcome()
            except BaseException as error:
                if save.cancelled and not isinstance(error, CommitUncertainError):
                    continue  # rolled back, as intended
                logger.error("saving failed, and was not awaited: %s", error)
                self._failures.append(error)

    async def _close(self, end_saves: Callable[[], Awaitable[None]]) -> BaseException | None:
        """Refuse further saves, end those under way, release the memory; return the first failure not awaited."""
        with self._lock:
            self._closed = True
        try:
            await end_saves()
        finally:
            with self._lock:
                self._collect()
                self._pool.clear()
                failures, self._failures = self._failures, deque()
        return failures[0] if failures else None

    async def _drain(self) -> None:
        try:
            while under_way := self.pending:
                await under_way[0].ended()
        except BaseException:
            await self._roll_back()
            raise

    async def _roll_back(self) -> None:
        interrupted: BaseException | None = None
        for pending in reversed(self.pending):  # in the order of their calls the next one could begin
            pending.cancel()
        for pending in self.pending:
            try:
                await pending.aclose()
            except BaseException as error:
                interrupted = error  # the others must be waited for too
        if interrupted is not None:
            raise interrupted

    def _retain(self, saved: SavedCheckpoint) -> None:
        """Delete the checkpoints that are older than the newest `keep_last`. Called on a save's thread."""
        if self._keep_last is None:
            return
        key = saved.path, saved.filename_pattern
        before = self._checkpoints.pop(key, saved)  # the directory of a checkpoint that is replaced may be the saver's
        self._checkpoints[key] = replace(saved, fresh=before.fresh)
        while len(self._checkpoints) > self._keep_last:
            old = self._checkpoints.pop(next(iter(self._checkpoints)))
            spare = frozenset().union(*(checkpoint.files for checkpoint in self._checkpoints.values()))
            try:
                remove_checkpoint(old.path, filename_pattern=old.filename_pattern, whole=old.fresh, spare=spare)
            except StioError as error:
                logger.warning("an old checkpoint could not be deleted: %s", error)


def _require_count(keyword: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{keyword} takes a number, not {value!r}")
    if value < 1:
        raise ValueError(f"{keyword} must be at least 1, not {value}")


_savers: WeakSet[Saver] = WeakSet()


@after_fork_in_child
def _forget_parent() -> None:
    """Start afresh in a forked child: the threads of the parent's saves are not here, but may have held its locks."""
    for saver in list(_savers):
        saver._start_afresh()
