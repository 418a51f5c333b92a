"""One save, from the call to the durable checkpoint: plan, stage, write, commit.

A save runs on its own thread (`PendingSave._run` shows its steps in order). A caller may wait for two moments: the
snapshot is complete, so the tensors may change; and the checkpoint is durable. A save that fails or is cancelled before
its commit leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

from stio.device.copy_out import Readiness
from stio.device.describe import describe_tensors
from stio.errors import SaveInProgressError, StioError, printable
from stio.format.files.manifest import FileState, Hasher, manifest_change, new_hasher
from stio.format.files.names import MANIFEST_SUFFIX, FilePattern
from stio.format.shared import TensorSource
from stio.limits import DEFAULT_BUDGET_BYTES
from stio.runtime import memory
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation, current_operation
from stio.runtime.process import collection_paused, switch_interval
from stio.runtime.reports.progress import progress_callback
from stio.runtime.reports.spans import CALLER
from stio.runtime.reports.trace import shown, traced
from stio.saving.options import (
    BufferedDestination,
    Destination,
    DestinationLike,
    SaveOptions,
    SaveResult,
    absolute_destination,
)
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.retention import Retention
from stio.saving.scheduler import SaveScheduler
from stio.saving.staging_pool import SMALLEST_BLOCK_BYTES, StagingPool, block_bytes_for
from stio.saving.surroundings import Saved, warn_of_link_to_step, warn_of_surroundings
from stio.saving.tensors import TensorsLike, tensors_of
from stio.storage.base import Note, Root, Transaction
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.transaction import begin_local
from stio.storage.open import open_directory
from stio.text import log

EXIT_PATIENCE_SECONDS = 60.0
"""Longest time that the interpreter's exit waits for saves that make no progress, before they are rolled back."""

Planner: TypeAlias = Callable[[Sequence[TensorSource], int], WritePlan]
"""Assigns each tensor to a file, and makes the headers; called with the tensors and the block size in bytes."""


class PendingSave:
    """A save under way: its snapshot is complete, its checkpoint is not durable yet.

    `await` it (any loop) or call `result()` (any thread) for the `SaveResult`. Cancelling such a wait cancels only
    the wait; `cancel` rolls the save back.
    """

    # The arguments are internal. With a `pool`, a saver's staging memory, the caller waits for the snapshot, so staging
    # has priority. Without a pool the caller waits for the end: the save has its own staging memory, `budget_bytes`
    # (None: the default), and writing has priority.

    _hashes_blocks = True  # False where this process does not have all blocks of a file

    def __init__(
        self,
        tensors: TensorsLike,
        destination: DestinationLike,
        options: SaveOptions,
        *,
        pool: StagingPool | None = None,
        budget_bytes: int | str | None = None,
        notifier: Notifier | None = None,
        retention: Retention | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.destination = destination
        """The destination, as it was given."""
        self._options = options
        named = tensors_of(tensors)
        self._tensors = named.by_name
        self._absolute_destination = absolute_destination(destination)
        self._max_shard_bytes = options.max_shard_bytes(destination)  # None: the destination is one file
        self._planner: Planner = planner or partial(
            plan_writes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=options.metadata,
            shared=options.shared,
            tied=named.tied,
        )
        self._stage_first = pool is not None
        self._pool = pool or StagingPool(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes)
        self._previous: PendingSave | None = None
        # "previous": a save that came between; None once this one has begun.
        self._order: dict[str, PendingSave | None] = {}
        self.started = False
        """Whether the save has its place behind the one before it."""
        self._retention = retention
        self.staged = False
        """Whether the snapshot is complete: the tensors may change."""
        self.delivered = False
        """Whether a caller got the outcome: the result, or what was raised."""
        self.cancelled = False
        """Whether `cancel` was called, in time or too late."""
        self.written: WrittenFiles | None = None
        """The files that the save published; None before that, and if its destination is no local path."""
        self._committed = False
        self._notifier = notifier or Notifier()
        self._started = perf_counter()
        self._staged_seconds = 0.0
        self._ready = Readiness.now(self._tensors)  # after all that this thread has queued on its current streams
        self.operation: Operation[SaveResult] = Operation(
            self._run,
            name="save",
            kind="save",
            about=shown(destination),
            notifier=self._notifier,
            exit_patience=EXIT_PATIENCE_SECONDS,
        )
        """Its thread."""

    def start(self, previous: PendingSave | None = None) -> Self:
        """Begin the save, behind another one; returns at once.

        Raises:
            StorageError: The system starts no more threads.
        """
        self._previous = previous
        self.operation.start()
        self.started = True
        return self

    def comes_before(self, other: PendingSave) -> bool:
        """Return whether this save has begun. If not, it waits for the other one from now on."""
        return self.started or self._order.setdefault("previous", other) is None

    # The steps of a save, on its own thread.

    def _run(self, operation: Operation[SaveResult]) -> SaveResult:
        options, trace = self._options, self._options.trace
        between = self._order.setdefault("previous", None)
        if between is not None:
            self._previous = between
        self.started = True
        self._order["previous"] = None  # `_previous` alone refers to that save, until it is durable
        with switch_interval(options.switch_interval):
            with traced(trace, "plan"), collection_paused(len(self._tensors)):
                plan, own_plan, fit_pool = self._plan(operation)
            self._wait_for_previous(operation, None)
            fit_pool()
            scheduler = SaveScheduler(
                own_plan,
                self._pool,
                ready=self._ready,
                on_staged=self._on_staged,
                stage_first=self._stage_first,
                hasher=self._hasher() if self._hashes_blocks else None,
                progress=progress_callback(options.progress, "saving"),
                trace=trace,
                on_stop=self._notifier.notify,
            )
            del own_plan
            plan = replace(plan, sources=())  # the scheduler releases the tensors once they are staged
            operation.on_cancel(scheduler.stop)
            scheduler.start()
            transaction: Transaction | None = None
            try:
                self._wait_for_previous(operation, scheduler)
                self._previous = None  # or each save of a training run would hold the one before it
                with traced(trace, "begin"):
                    transaction = self._begin_transaction(operation, len(plan.shards))
                scheduler.write_to(transaction.create([shard.nbytes for shard in plan.shards]))
                digests = scheduler.complete()
                operation.set_log_detail(lambda: f"{scheduler.written_bytes:,} bytes in {len(plan.shards):,} files")
                return self._commit(operation, plan, transaction, digests)
            finally:
                scheduler.stop()
                scheduler.join()  # no worker writes into files that are removed now
                if transaction is not None and not self._committed:
                    transaction.roll_back()
                if not self._stage_first:
                    self._pool.clear()

    def _plan(self, operation: Operation[SaveResult]) -> tuple[WritePlan, WritePlan, Callable[[], None]]:
        """Return the plans of `_make_plans`, and a function that sets the pool's block size."""
        tensors, self._tensors = self._tensors, {}
        sources = describe_tensors(tensors, check=operation.check)
        operation.check()
        data_bytes = sum(source.nbytes for source in sources)
        allocate = self._ready.staging_allocator()
        budget_bytes = self._pool.budget_for(data_bytes, pinned=allocate != memory.allocate)
        if budget_bytes is not None and isinstance(self._absolute_destination, BufferedDestination):
            self._absolute_destination, buffer_bytes = self._absolute_destination.within(budget_bytes)
            budget_bytes = max(SMALLEST_BLOCK_BYTES, budget_bytes - buffer_bytes)
        block_bytes = block_bytes_for(data_bytes, budget_bytes, stage_first=self._stage_first, num_tensors=len(sources))
        # The pool is set later: the save before this one may still take blocks.
        fit_pool = partial(self._pool.fit, block_bytes, allocate, limit_bytes=budget_bytes)
        return *self._make_plans(sources, block_bytes), fit_pool

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        """Return the plan of the files, and that of what this process stages and writes: here the same."""
        plan = self._planner(sources, block_bytes)
        return plan, plan

    def _wait_for_previous(self, operation: Operation[SaveResult], scheduler: SaveScheduler | None) -> None:
        """Wait until the save before this one is staged, or has ended early; a cancel ends the wait.

        Args:
            operation: This save's.
            scheduler: Waits until the save before this one is durable, or until this scheduler has failed.
        """
        save = self._previous
        with traced(self._options.trace if save else None, "wait", detail="for the save before"):
            while save is not None:
                passed = save._staged_or_done if scheduler is None else save.done
                save._block(passed, operation, scheduler)
                if scheduler is not None and scheduler.is_stopped():
                    scheduler.complete()  # raises
                # If it ended before its turn, the saves that it waited for may still be under way.
                save = save._previous if save.done() else None

    def _block(
        self, passed: Callable[[], bool], operation: Operation[SaveResult], scheduler: SaveScheduler | None
    ) -> None:
        """Block a later save's thread until this one has passed a point, or the later one ends."""
        operation.on_cancel(self._notifier.notify)
        self._notifier.block_until(
            lambda: passed() or operation.cancelled or (scheduler is not None and scheduler.is_stopped())
        )
        operation.check()

    def _on_staged(self) -> None:
        staged = perf_counter()
        self._staged_seconds = staged - self._started
        trace = self._options.trace
        if self._stage_first and trace is not None:
            trace.add("wait", self._started, staged, detail="for the snapshot", lane=CALLER)
        self.staged = True
        self._notifier.notify()

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        options, where = self._options, self._absolute_destination
        if isinstance(where, Destination):
            transaction = where.begin(
                num_shards=num_shards,
                filename_pattern=options.filename_pattern,
                shard_names=options.shard_names,
                commit=options.commit,
                durability=options.durability,
            )
        else:
            transaction = begin_local(where, num_shards, options, operation.check)
        try:
            if isinstance(self.destination, str | os.PathLike) and isinstance(where, str):
                warn_of_link_to_step(where, transaction.path)
            if options.hash is not None:
                transaction.require_names(self._manifest_name(transaction.shard_names))
            if transaction.is_recorded and self._retention is not None:
                self._retention.begin(transaction.path, self._own_pattern())
        except BaseException:
            transaction.roll_back()
            raise
        return transaction

    def _commit(
        self, operation: Operation[SaveResult], plan: WritePlan, transaction: Transaction, digests: list[str] | None
    ) -> SaveResult:
        """Publish the files, which are written and durable."""
        new_hasher = self._hasher()
        if digests is None and new_hasher is not None:
            with traced(self._options.trace, "hash"):
                digests = transaction.digests(new_hasher, operation.check)
        written_seconds = perf_counter() - self._started
        names = transaction.shard_names
        hashes = {} if digests is None else dict(zip(names, digests, strict=True))
        manifest = self._manifest_name(names)
        states = {
            name: FileState(shard.nbytes, hashes[name])
            for name, shard in zip(names, plan.shards, strict=True)
            if name in hashes
        }
        change = manifest_change(transaction.read_note(manifest), self._options.hash, states, path=manifest)
        notes = [] if change is None else [Note(manifest, *change)]
        index = plan.index(names) if transaction.takes_index else None
        with traced(self._options.trace, "commit"):
            transaction.prepare_commit(operation.check)
            operation.refuse_cancel()
            transaction.commit(index=index, notes=notes)
        self._committed = True
        committed_seconds = perf_counter() - self._started
        self._after_commit(plan, transaction)
        return SaveResult(
            path=transaction.path,
            files=names,
            total_bytes=plan.total_bytes,
            file_bytes=sum(shard.nbytes for shard in plan.shards),
            aliases=plan.aliases,
            staged_seconds=self._staged_seconds,
            written_seconds=written_seconds,
            committed_seconds=committed_seconds,
            hashes=hashes,
        )

    def _after_commit(self, plan: WritePlan, transaction: Transaction) -> None:
        """Count the save for its saver, and report what lies beside it."""
        if (published := transaction.published()) is not None:  # what a caller's own destination holds is not deleted
            self.written = published if isinstance(published, WrittenFiles) else None
            if self._retention is not None:
                self._retention.add(transaction.path, self._own_pattern(), published)
        pattern = self._own_pattern()
        index = FilePattern(self._options.filename_pattern).index if transaction.takes_index else None
        saved = Saved(index, transaction.shard_names, [name for shard in plan.shards for name in shard.names])
        if isinstance(store := getattr(self._absolute_destination, "root", None), Root):
            warn_of_surroundings(store, transaction.path, saved, pattern)
        elif self.written is not None:
            path = transaction.path if pattern is not None else os.path.dirname(transaction.path)
            with suppress(StioError), open_directory(path, follow_symlinks=False) as root:
                warn_of_surroundings(root, transaction.path, saved, pattern)

    def _own_pattern(self) -> str | None:
        """Return the pattern of the file names in a directory, None if the destination is one file."""
        return None if self._max_shard_bytes is None else self._options.filename_pattern

    def _hasher(self) -> Callable[[], Hasher] | None:
        """Return what makes a hasher for each file, if there are to be digests."""
        return None if self._options.hash is None else partial(new_hasher, self._options.hash)

    def _manifest_name(self, names: tuple[str, ...]) -> str:
        if self._max_shard_bytes is None:
            return f"{names[0]}{MANIFEST_SUFFIX}"
        return FilePattern(self._options.filename_pattern).manifest

    # The caller's interface, from any thread.

    def __repr__(self) -> str:
        failure = self.operation.failure
        state = "saved" if self._committed else "rolled back"
        if failure is not None:
            state = f"failed, {type(failure).__name__}"
        return f"<PendingSave {printable(shown(self.destination))!r}: {state if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether the save has ended: durable, failed or rolled back."""
        return self.operation.done

    def cancel(self) -> None:
        """Roll the save back. Never blocks; without effect once the commit has begun.

        A later wait for the save raises `ClosedError`, or returns the result if the cancel came too late.
        """
        self.cancelled = True
        self.operation.cancel()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait in this thread until the checkpoint is durable.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The timeout passed; the save continues.
            ClosedError: The save was cancelled, and is rolled back.
            StioError: It failed; the old checkpoint remains.
        """
        self._require_other_thread(PendingSave.done)
        if not self.operation.join(timeout):
            raise TimeoutError(
                f"the save to {self.destination} is not done after {timeout} s, and continues; wait again"
            )
        return self.outcome()

    def __await__(self) -> Generator[Any, Any, SaveResult]:
        return self._wait().__await__()

    async def _wait(self) -> SaveResult:
        await self.ended()
        return self.outcome()

    def outcome(self) -> SaveResult:
        """Return or raise the outcome; only once the save is `done`."""
        self.delivered = True
        return self.operation.outcome()

    async def wait_staged(self) -> None:
        """Wait until the tensors may change.

        An interruption rolls the save back before it is passed on, unless the commit has begun.

        Raises:
            StioError: The save failed before that.
        """
        self._require_other_thread(PendingSave._staged_or_done)
        try:
            await self.operation.wait_until(self._staged_or_done)
        except BaseException:
            self.delivered = True  # the caller gets the interruption, and no pending save
            raise
        if not self.staged:
            self.outcome()

    async def complete(self) -> SaveResult:
        """Wait until the checkpoint is durable.

        An interruption rolls the save back before it is passed on, unless the commit has begun.
        """
        self.delivered = True
        return await self.operation.wait()

    async def ended(self) -> None:
        """Wait until the save has ended, whatever its outcome; an interruption ends only the wait."""
        await self._notifier.wait_for(self.done)

    async def aclose(self) -> None:
        """Roll the save back, and wait until nothing of it is left."""
        await self.operation.aclose()

    def _require_other_thread(self, passed: Callable[[PendingSave], bool]) -> None:
        """Require that no save that this one waits for has called the code that waits: a callback, a finaliser.

        Raises:
            SaveInProgressError: Both would wait for ever.
        """
        mine = current_operation()
        save: PendingSave | None = self
        while mine is not None and save is not None and not passed(save):
            if save.operation is mine:
                raise SaveInProgressError(
                    "a thread of a save cannot wait for that save or a later one of its saver; wait in another thread",
                    path=str(self.destination),
                )
            save = save._order.get("previous") or save._previous

    def _staged_or_done(self) -> bool:
        return self.staged or self.operation.done

    def __del__(self) -> None:
        # A saver raises the failure when it is used again or closed, but it may be dropped before that.
        operation: Operation[SaveResult] | None = getattr(self, "operation", None)  # None: `__init__` raised
        error = operation.failure if operation is not None else None
        if error is not None and not self.delivered:
            log(logging.ERROR, "saving to %s failed, and was not awaited: %s", self.destination, error)
