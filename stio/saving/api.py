"""The public functions that save: `save`, and a `Saver` whose saves run in the background.

Each is one coroutine that begins a save (`stio.saving.pending`) and waits for it, on asyncio, uvloop or trio;
`stio.sync` runs the same coroutines in a thread without a loop. No task group and no cancel scope of stio is open while
the caller's code runs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from types import TracebackType
from typing import Any, Literal, NoReturn, Self
from weakref import WeakSet

from stio import process
from stio.errors import ClosedError, CommitUncertainError, SaveInProgressError, StorageError, printable
from stio.format import SharedPolicy
from stio.format.files import HashName
from stio.process import new_lock
from stio.runtime import (
    AsyncOnly,
    Notifier,
    Operation,
    close_all,
    copy_of,
    current_operation,
    end_all_at_exit,
    memory,
    runs_blocking,
)
from stio.runtime.reports import Progress, Trace
from stio.saving.deltas import Chain
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
    adopted_directory,
)
from stio.saving.pending import PendingSave, SharedBySaves
from stio.saving.retention import Retention
from stio.saving.staging_pool import StagingPool
from stio.saving.tensors import TensorsLike
from stio.storage.commit import LOCK_TIMEOUT_SECONDS
from stio.text import described_by, keywords_for, log


async def save(
    tensors: TensorsLike,
    destination: DestinationLike,
    *,
    base: str | os.PathLike[str] | None = None,
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
) -> SaveResult:
    """Save a checkpoint, atomically and durably.

    A cancel rolls the save back before it is passed on, unless the commit has begun.

    Args:
        tensors: Tensors by name (some may be `stio.LazyTensor`), or a module. They must not change during the
            save; a `Saver` returns earlier.
        destination: A path ending in `.safetensors` is one file; any other path is a directory in the hub's layout,
            updated in place where it holds a checkpoint. Other files in it are not touched. A path that looks like a
            file of another kind (`w.pt`, `w.sft`) is refused, unless it is a directory or ends in a slash. A URL of one
            of these with `s3://`, `gs://` or `az://` needs the extra `remote`; one put commits it.
        base: A checkpoint in the same directory as the destination, or below that: only what differs from it is
            written, a delta, which is loaded together with it. It has the same names, dtypes and shapes, and is read
            tensor by tensor; one that no `Saver(full_every=)` has saved is also read whole once by each process that
            loads the delta, to compare its digest. If more than half would be written, the save is full; see
            `SaveResult.kind`. A `stio.LazyTensor` that changed much is produced twice. None: all tensors are written.
        budget_bytes: Most bytes of staging memory: a number, or text such as `"2GB"`. None: 512 MiB. A produced tensor
            is not included, and a tensor of the base neither.
        max_shard_size: Most bytes of tensors in one file of a directory: a number, or text such as `"5GB"`. None:
            `"5GB"`. Not for a destination that is one file.
        metadata: Text to store with the checkpoint. `checkpoint.metadata` of another one is accepted: entries that each
            save makes anew, such as `total_size`, are ignored.
        filename_pattern: Names of the files in a directory; `{suffix}` becomes empty or `-00001-of-00003`.
        shared: Tensors that share memory: `"dedupe"` saves them once and restores them as one, `"clone"` saves each,
            `"error"` refuses them. `_tied_weights_keys` of a module decides which name is kept, else the first is.
        shard_names: `"auto"` gives shards names of their own beside an old checkpoint; `"hub"` keeps the plain names
            there, and needs `commit="files"`.
        commit: What publishes a checkpoint in a directory that holds one: `"index"` (one rename), or `"files"` (one by
            one; a reader in that moment may see both).
        durability: `"full"`: what was saved survives a power cut. `"none"` leaves out every fsync; it survives only a
            crash of the process.
        hash: Write a manifest with a digest of every file: `"sha256"` or `"xxh3"`.
        lock_timeout: Seconds for which the save waits for locks of other saves, all waits together. Then it raises
            `ConcurrentSaveError`, which names the process that holds the lock, if that is known.
        progress: A callable that gets a `stio.ProgressEvent`, `True` for a tqdm bar, or a tqdm class.
        trace: A `stio.Trace` that records spans of the work.
        switch_interval: The interpreter's switch interval during the save, in seconds. None: unchanged.

    Returns:
        What was saved, once it survives a power cut; with `durability="none"`, once it is published.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has a wrong value, or two of them contradict each other.
        NoSpaceError: It does not fit; raised before the first byte is written, where space can be reserved.
        ConcurrentSaveError: Another save changed the destination at the same time, or held its lock for too long.
        CommitUncertainError: It is in place, but the system did not confirm that it is durable.
        StioError: See `stio.errors`. After any other exception the old checkpoint remains; after a cancel too, unless
            the commit had begun: then the new checkpoint is complete.
    """
    options = SaveOptions(**keywords_for(SaveOptions, locals()))
    alone = SharedBySaves.alone(budget_bytes, base)
    return await PendingSave(tensors, destination, options, saver=alone).complete()


@described_by(save)
class Saver(AsyncOnly):
    """Saves with a caller that waits only for the snapshot: writing and committing continue in the background.

        async with stio.Saver(keep_last=3) as saver:
            pending = await saver.save(model.state_dict(), "step-100/")  # the snapshot is complete
            ...                                                          # training continues
            result = await pending                                       # durable, or it raises

    The failure of a save that was not awaited is raised by the next `save`, or on leaving the block. Leaving the block
    waits for the saves that are under way, also after an exception; after a cancel it rolls them back, except one whose
    commit has begun. Staging memory is reused, and returned to the system at the end. Keywords of a save that are given
    to the saver are defaults, which a save may replace.

    Args:
        keep_last: Number of steps to keep; None: all. Older steps of this saver are deleted once this many newer ones
            are complete: durable, with as many saves as the steps before. A step is its number: all saves with the
            same number are one step, whatever their names and folders (`model/step-3`, `optim-3.safetensors`). It is
            the last number in the name after `step`, `epoch`, `iter`, `iteration`, `checkpoint` or `ckpt`; else that of
            the nearest folder such as `step-3`; else the parent folder, if its name is a number; else the last number
            in the name. A destination without any, such as `best`, is never deleted. What another program has replaced,
            changed or added stays, and a warning names it. Each deletion is a line of the logger `stio`, level INFO.
        keep_every: Steps that this number divides stay, beside those of `keep_last`; None: there are no such steps.
        drop_higher: Delete steps with a higher number once a step that is saved after them is complete, for a run that
            went back; their paths differ by the step alone. Of an earlier run those of `adopt` are deleted.
        adopt: Directory of the steps of an earlier run that this run goes on from: its complete checkpoints count as
            steps of this saver, in the order of their numbers, so `keep_last` deletes them too. Of them only files of
            tensors, indexes and manifests are deleted. A directory that does not exist is no error. None: what earlier
            runs saved stays.
        full_every: Of so many saves one is full, and the others are deltas: they hold only what changed since the save
            before them, and are loaded together with it. None: every save is full. A save is full too if more than half
            would be written, if names, dtypes or shapes differ from the save before it, if its destination is in
            another directory, has a lower step, is the same, holds a full checkpoint or has no number (`best`), and
            after a save that failed. The staging memory keeps the last snapshot, and each save waits
            for the end of the one before it. `keep_last` keeps what a delta that stays is loaded with.
        max_pending: Most saves under way at one time. Each holds its own snapshot.
        when_full: What `save` does when so many are under way: wait for the oldest, or raise `SaveInProgressError`.
        budget_bytes: Most bytes of staging memory: a number, or text such as `"2GB"`. None: as many as the snapshots
            take, so that a save is staged at the speed of memory. Of tensors on a device staging memory is pinned,
            which cannot be swapped: None then means at most half of the host's memory that is free. A snapshot that is
            larger is written while it is staged, and `save` returns when its last part was copied.
        ...: The other arguments are those of `stio.save`.
    """

    _sync_name = "Saver"
    _is_used = True  # also of one whose `__init__` raised

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        drop_higher: bool = False,
        adopt: str | os.PathLike[str] | None = None,
        full_every: int | None = None,
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
    ) -> None:
        for keyword, count in (("keep_last", keep_last), ("keep_every", keep_every), ("full_every", full_every)):
            if count is not None:
                _require_count(keyword, count)
        for keyword, value in (("adopt", adopt), ("keep_every", keep_every), ("drop_higher", drop_higher or None)):
            if value is not None and keep_last is None:
                raise ValueError(f"{keyword}= needs keep_last=: without it no step is deleted")
        adopted = None if adopt is None else adopted_directory(adopt)
        _require_count("max_pending", max_pending)
        if when_full not in ("wait", "error"):
            raise ValueError(f"when_full= takes 'wait' or 'error', not {when_full!r}")
        self._options = SaveOptions(**keywords_for(SaveOptions, locals()))
        self._new_retention = partial(Retention, keep_last, keep_every=keep_every, drop_higher=drop_higher)
        self._max_pending = max_pending
        self._when_full = when_full
        self._budget_bytes, self._full_every = budget_bytes, full_every
        self._closed = False
        self._start_afresh()
        self._shared.retention = self._new_retention(adopt=adopted)
        _savers.add(self)
        self._is_used = False

    def _start_afresh(self) -> None:
        """Reset to no saves. In a forked child, the saves and the checkpoints so far belong to the parent."""
        chain = None if self._full_every is None else Chain(self._full_every)
        self._shared = SharedBySaves(StagingPool(self._budget_bytes), Notifier(), self._new_retention(), chain)
        self._lock = new_lock(of_callers=True)
        self._saves: list[PendingSave] = []  # in their order; ended ones leave in `_collect`
        self._failures: deque[BaseException] = deque()

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a Saver cannot be pickled or copied: its threads and its staging memory belong to this process; make a "
            "Saver where it is used"
        )

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves under way, the oldest first."""
        return tuple(save for save in self._saves.copy() if save.operation.running)

    @described_by(save)
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
        lock_timeout: float | Inherited = INHERITED,
        progress: Progress | Inherited = INHERITED,
        trace: Trace | Inherited | None = INHERITED,
        switch_interval: float | Inherited | None = INHERITED,
    ) -> PendingSave:
        """Begin a save; return once its snapshot is complete, and the tensors may change.

        A cancel of this call rolls the save back, unless its commit has begun. Keywords that are not given have the
        values of the saver.

        Args:
            tensors: Tensors by name, or a module; see `stio.save`. When this call has returned, they may change, and
                their memory may be freed or shrunk.
            ...: The other arguments are those of `stio.save`.

        Returns:
            The save under way. Its result is there once the checkpoint survives a power cut.

        Raises:
            SaveInProgressError: As many saves as allowed are under way, and `when_full="error"`; or a thread of a save
                under way calls this.
            ClosedError: The saver was closed.
            StioError: This save failed before its snapshot was complete, or an earlier one failed and was not awaited.
        """
        return await self._save(tensors, destination, keywords_for(SaveOptions, locals()))

    @described_by(save)
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
        lock_timeout: float | Inherited = INHERITED,
        progress: Progress | Inherited = INHERITED,
        trace: Trace | Inherited | None = INHERITED,
        switch_interval: float | Inherited | None = INHERITED,
    ) -> PendingSave:
        """Begin to save nested state; return once its snapshot is complete, and all of it may change.

        Keywords that are not given have the values of the saver.

        Args:
            state: The nested state; see `stio.save_state`.
            ...: The other arguments are those of `stio.save`.

        Returns:
            The save under way; see `save`.

        Raises:
            StioError: See `save`.
        """
        return await self._save_state(state, destination, keywords_for(SaveOptions, locals()))

    async def aclose(self) -> None:
        """Wait for the saves that are under way; raise the first failure that was not awaited. Idempotent.

        A cancel during the wait rolls back the saves whose commit has not begun.

        Raises:
            SaveInProgressError: A callback or a finaliser calls it on a thread of a save under way; the saver stays
                open.
            StioError: An earlier save failed.
        """
        failures = await self._close(self._drain)
        if failures:
            raise failures.popleft()  # its traceback refers to this frame, which must not refer to it

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        elif isinstance(error, GeneratorExit) and not runs_blocking():
            self._closed = True
            self._cancel_all()  # a coroutine that is closed must not wait
        else:  # the exception that left the block is raised; failures were logged
            await self._close(self._drain if isinstance(error, Exception | SystemExit) else self._roll_back)

    async def _save(
        self, tensors: TensorsLike, destination: DestinationLike, changes: Mapping[str, Any]
    ) -> PendingSave:
        options = self._options.with_changes(**changes)

        async def make(saver: SharedBySaves) -> PendingSave:
            return PendingSave(tensors, destination, options, saver=saver)

        return await self._begin(make, destination, options)

    async def _save_state(self, state: object, destination: DestinationLike, changes: Mapping[str, Any]) -> PendingSave:
        tensors, metadata = await flatten(state, self._options.with_changes(**changes).metadata)
        return await self._save(tensors, destination, {**changes, "metadata": metadata})

    async def _begin(
        self, make: Callable[..., Awaitable[PendingSave]], destination: DestinationLike, options: SaveOptions
    ) -> PendingSave:
        """Make a save when there is a place for it, start it, and wait for its snapshot.

        Args:
            make: Makes it, of what all saves of this saver share.
            destination: Its destination.
            options: Its keywords.
        """
        self._is_used = True
        while True:
            self._require_open(destination)
            if not self._has_place():
                self._require_wait(destination)
                await self._shared.notifier.wait_for(self._has_place)
                continue
            if self._shared.retention is not None:
                self._shared.retention.attempt(destination, options.filename_pattern)
            # Without a lock: this calls `state_dict` and other code of the user.
            save = await make(saver=self._shared)
            try:
                if self._admit(save):
                    await save.wait_staged()
                    return save
            except GeneratorExit:
                save.cancel()
                raise
            except BaseException:
                save.delivered = True
                if not save.done():  # interrupted between the start and the wait
                    await save.aclose()
                raise

    def _require_wait(self, destination: DestinationLike) -> None:
        """Require that the next save may wait for a place.

        Raises:
            SaveInProgressError: `when_full="error"`, or this is a thread of a save under way (a callback of its).
        """
        message = ""
        if self._when_full == "error":
            message = "a save is under way; await it, or let this one wait by when_full='wait'"
        elif self._is_own_thread():
            message = "a save is under way, and its own thread cannot wait for it; save in another thread"
        if message:
            raise SaveInProgressError(
                message, path=str(destination), expected=f"at most {self._max_pending}", found=len(self.pending)
            )

    def _is_own_thread(self) -> bool:
        """Return whether a save under way calls this: a callback, a finaliser, a handler of its log lines."""
        return current_operation() in [save.operation for save in self.pending]

    def _require_open(self, destination: DestinationLike) -> None:
        """Raise the failure of an earlier save that was not awaited, or `ClosedError`."""
        if self._closed:
            raise ClosedError("the saver is closed", path=str(destination))
        self._collect()
        try:
            failure = self._failures.popleft()
        except IndexError:
            return
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame

    def _has_place(self) -> bool:
        return self._closed or len(self.pending) < self._max_pending

    def _admit(self, save: PendingSave) -> bool:
        """Start a save behind all others; False if there is no place for it, or the saver was closed.

        A signal handler that interrupts this and saves too comes first, since this save waits for the handler.
        """
        with self._lock:
            if self._closed or not self._has_place():
                return False
            try:
                self._saves.append(save)
                previous = None
                for other in reversed(self._saves[: self._saves.index(save)]):
                    if other.comes_before(save):
                        previous = other
                        break
                    self._saves.remove(other)
                    self._saves.append(other)
                if not self._closed:  # a signal handler may have closed it
                    save.start(previous)
            finally:
                if not save.started:
                    with suppress(ValueError):
                        self._saves.remove(save)
            return save.started

    def _collect(self) -> None:
        """Remove the saves that have ended, and collect failures that were not awaited."""
        for save in self._saves.copy():
            if not save.done():
                continue
            try:
                self._saves.remove(save)
            except ValueError:  # removed by another thread, or by a signal handler
                continue
            if save.delivered:
                continue
            try:
                save.outcome()
            except BaseException as error:
                is_uncertain = isinstance(error, CommitUncertainError)
                failure = save.operation.failure
                if (save.cancelled and not is_uncertain) or failure is None:
                    continue  # rolled back, as intended; or at the exit, which logs it
                # A copy, without the frames of this thread and its callers: they may refer to the save.
                self._failures.append(copy_of(failure))
                log(logging.ERROR, "saving failed, and was not awaited: %s", error)

    async def _close(self, end_saves: Callable[[], Awaitable[None]]) -> deque[BaseException]:
        """Refuse further saves, end those under way, release the memory; return the failures that were not awaited."""
        if self._is_own_thread():
            raise SaveInProgressError(
                "a save of this saver is under way, and its own thread cannot wait for its end; use another thread"
            )
        with self._lock:
            self._closed = self._is_used = True
        try:
            await end_saves()
        finally:
            self._collect()
            shared = self._shared
            pool, shared.pool = shared.pool, StagingPool(self._budget_bytes)  # no save uses the old one any more
            if pool.allocate != memory.allocate:
                with suppress(StorageError):  # no more threads: the pool is released with the last save of the caller's
                    Operation(lambda _: pool.clear(), name="release").start()  # it takes a lock
            if shared.chain is not None:
                shared.chain.clear()
            failures, self._failures = self._failures, deque()
        return failures

    async def _drain(self) -> None:
        try:
            await self._shared.notifier.wait_for(lambda: not self.pending)
        except GeneratorExit:
            self._cancel_all()
            raise
        except BaseException:
            await self._roll_back()
            raise

    async def _roll_back(self) -> None:
        operations = self._cancel_all()
        await close_all(operations)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not (self._is_used or is_finalizing()):  # at the interpreter's end the names of modules are gone
            log(
                logging.WARNING,
                "a Saver began no save; if you called save(), await it, or use stio.sync.Saver, which needs no loop",
            )

    def _cancel_all(self) -> list[Operation[Any]]:
        pending = self.pending
        for save in reversed(pending):  # in their order the next one could begin
            save.cancel()
        return [save.operation for save in pending]


def _require_count(keyword: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{keyword} takes a number, not {value!r}")
    if value < 1:
        raise ValueError(f"{keyword} must be at least 1, not {printable(value)}")


_savers: WeakSet[Saver] = WeakSet()


@atexit.register
def _report_at_exit(*, patient_only: bool = False) -> None:
    """Log failures of saves that nobody has awaited; there is no later call of the saver that raises them."""
    end_all_at_exit(patient_only=patient_only)
    for saver in list(_savers):
        saver._collect()


def _report_in_child(report: Callable[..., None]) -> None:
    """Report at the end of a process of `multiprocessing` too: one that was forked calls no functions of `atexit`.

    Other threads of such a process are waited for after that; what they load goes on.
    """
    if parent_process() is not None:
        Finalize(None, report, kwargs={"patient_only": True}, exitpriority=0)


_report_in_child(_report_at_exit)
register_after_fork(_report_at_exit, _report_in_child)  # a child forgets what its parent has registered


@process.after_fork_in_child
def _forget_parent() -> None:
    """Start afresh in a forked child: the threads of the parent's saves are not here, but may have held its locks."""
    for saver in list(_savers):
        saver._start_afresh()
