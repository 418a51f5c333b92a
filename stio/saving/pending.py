"""One save, from the call to the durable checkpoint, and where it is in that life (`LIFE_CYCLE`).

A save runs on its own thread and is four values, each made from the one before: planned (`PlannedSave`), staged (a
`SaveScheduler`, which copies the tensors and writes them), written (`WrittenSave`), published (`SaveResult`);
`PendingSave._save` shows them in order. A caller may wait for two moments: the snapshot is complete, so the tensors may
change; and the checkpoint is durable. A save that fails or is cancelled before its commit leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, Self, TypeAlias

from stio import process
from stio.device import Readiness, describe_tensors
from stio.errors import SaveInProgressError, StorageError, printable
from stio.format import TensorSource
from stio.format.files import MANIFEST_SUFFIX, FilePattern, HashName, manifest_change, new_hasher, step_of
from stio.limits import DEFAULT_BUDGET_BYTES, PAGE_BYTES
from stio.runtime import Notifier, Operation, current_operation, memory
from stio.runtime.reports import CALLER, progress_callback, shown, traced
from stio.saving.deltas import Chain, DeltaSave
from stio.saving.options import (
    BufferedDestination,
    Destination,
    DestinationLike,
    SaveOptions,
    SaveResult,
    absolute_destination,
)
from stio.saving.plan import PlannedSave, WritePlan, WrittenSave, plan_writes
from stio.saving.retention import Retention
from stio.saving.scheduler import SaveScheduler
from stio.saving.staging_pool import SMALLEST_BLOCK_BYTES, Blocks, StagingPool, block_bytes_for
from stio.saving.surroundings import warn_of_link_to_step, warn_of_surroundings
from stio.saving.tensors import TensorsLike, tensors_of
from stio.storage import Note, Root, Transaction
from stio.storage.commit import WrittenFiles, begin_local
from stio.text import log

Planner: TypeAlias = Callable[[Sequence[TensorSource], int], WritePlan]
"""Assigns each tensor to a file, and makes the headers; called with the tensors and the block size in bytes."""

State: TypeAlias = Literal["new", "staging", "staged", "committing", "published", "failed", "rolled back"]
"""Where a save is. `"failed"`: it ended before its snapshot was complete. `"rolled back"`: it ended after that."""

Event: TypeAlias = Literal["begin", "stage", "commit", "publish", "fail"]
"""What its thread reports: `"stage"` when the snapshot is complete, `"fail"` for an error and for a cancel."""

LIFE_CYCLE: Mapping[tuple[State, Event], State] = {
    ("new", "begin"): "staging",
    ("staging", "stage"): "staged",
    ("staged", "commit"): "committing",  # a cancel has no effect from here on
    ("committing", "publish"): "published",
    ("staging", "fail"): "failed",
    ("staged", "fail"): "rolled back",
    ("committing", "fail"): "rolled back",
    ("published", "fail"): "published",  # of what follows the commit
}
"""The state of a save after an event; no other event happens in a state."""


@dataclass(slots=True)
class SharedBySaves:
    """What all saves of one saver share. A save without a saver has its own."""

    pool: StagingPool
    """Staging memory."""
    notifier: Notifier = field(default_factory=Notifier)
    """Notified when a save is staged, and when it has ended."""
    retention: Retention | None = None
    """Counts the steps; None: there is no saver."""
    chain: Chain | None = None
    """What the next save may be a delta of; None: every save is full."""
    base: str | os.PathLike[str] | None = None
    """Without a saver: what the save is a delta of, if it is to be one."""

    @classmethod
    def alone(cls, budget_bytes: int | str | None = None, base: str | os.PathLike[str] | None = None) -> SharedBySaves:
        """Return what a save has that belongs to no saver.

        Args:
            budget_bytes: Most bytes of staging memory; None: the default.
            base: Path or URL of what it is a delta of; None: it is full.
        """
        return cls(StagingPool(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes), base=base)


class PendingSave:
    """A save under way: its snapshot is complete, its checkpoint is not durable yet.

    `await` it (any loop) or call `result()` (any thread) for the `SaveResult`. Cancelling such a wait cancels only
    the wait; `cancel` rolls the save back.
    """

    # The arguments are internal. In a saver the caller waits for the snapshot, so staging has priority. A save without
    # one (`saver` is what `SharedBySaves.alone` returns, by default without arguments) has priority for writing: its
    # caller waits for the end.

    def __init__(
        self,
        tensors: TensorsLike,
        destination: DestinationLike,
        options: SaveOptions,
        *,
        saver: SharedBySaves | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.destination = destination
        """The destination, as it was given."""
        self._options, self._filename_pattern = options, options.filename_pattern
        self._tensors, tied = tensors_of(tensors)
        self._absolute_destination = absolute_destination(destination)
        self._max_shard_bytes = options.max_shard_bytes(destination)  # None: the destination is one file
        saver = saver or SharedBySaves.alone()
        # A place without a step, such as `best`, is saved to again: nothing may be based on it.
        chain = saver.chain if step_of(str(destination)) is not None else None
        self._delta: DeltaSave | None = None
        if saver.base is not None or chain is not None:
            self._delta = DeltaSave(
                self._absolute_destination,
                options,
                max_shard_bytes=self._max_shard_bytes,
                chain=chain,
                base=saver.base,
            )
        self._planner: Planner = planner or partial(
            plan_writes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=options.metadata if self._delta is None else self._delta.metadata,
            shared=options.shared,
            tied=tied,
        )
        self._stage_first = saver.retention is not None
        self._retention, self._notifier, self._pool = saver.retention, saver.notifier, saver.pool
        self._previous: PendingSave | None = None
        # "previous": a save that came between; None once this one has begun.
        self._order: dict[str, PendingSave | None] = {}
        self.state: State = "new"
        """See `LIFE_CYCLE`; set by the save's own thread, and by the one that completes the snapshot."""
        self.delivered = False
        """Whether a caller got the outcome: the result, or what was raised."""
        self.cancelled = False
        """Whether `cancel` was called, in time or too late; the exit of the process does not call it."""
        self.written: WrittenFiles | None = None
        """The files that the save published; None before that, and if its destination is no local path."""
        self._called = perf_counter()
        self._staged_seconds = 0.0
        self._ready = Readiness.now(self._tensors)  # after all that this thread has queued on its current streams
        self.operation: Operation[SaveResult] = Operation(
            self._run,
            name="save",
            kind="save",
            about=shown(destination),
            notifier=self._notifier,
            exit_patience=options.EXIT_PATIENCE_SECONDS,
        )
        """Its thread."""

    def start(self, previous: PendingSave | None = None) -> Self:
        """Begin the save, behind another one; returns at once.

        Raises:
            StorageError: The system starts no more threads.
        """
        self._previous = previous
        self.operation.start()
        return self

    @property
    def started(self) -> bool:
        """Whether the save has its place behind the one before it."""
        return self.operation.running or self.operation.done

    def comes_before(self, other: PendingSave) -> bool:
        """Return whether this save has begun. If not, it waits for the other one from now on."""
        return self.started or self._order.setdefault("previous", other) is None

    # The steps of a save, on its own thread.

    def _after(self, event: Event) -> None:
        self.state = LIFE_CYCLE[self.state, event]

    def _run(self, operation: Operation[SaveResult]) -> SaveResult:
        between = self._order.setdefault("previous", None)
        if between is not None:
            self._previous = between
        self._order["previous"] = None  # `_previous` alone refers to that save, until it is durable
        self._after("begin")
        try:
            with process.switch_interval(self._options.switch_interval):
                return self._save(operation)
        except BaseException:
            self._after("fail")
            raise

    def _save(self, operation: Operation[SaveResult]) -> SaveResult:
        trace = self._options.trace
        with traced(trace, "plan"), process.collection_paused(len(self._tensors)):
            planned = self._plan(operation)
        if self._previous is not None:
            self._wait_for_previous(operation, None)
        whole = replace(planned.files, sources=())
        if self._delta is not None:
            planned = self._compared(operation, self._delta, planned)
        staged = self._stage(operation, planned)
        has_all = planned.own is planned.files
        files = replace(planned.files, sources=())  # the scheduler releases the tensors once they are staged
        del planned
        transaction: Transaction | None = None
        try:
            staged.start(self._ready, self._on_staged)
            if self._previous is not None:
                self._wait_for_previous(operation, staged)
                self._previous = None  # or each save of a training run would hold the one before it
            with traced(trace, "begin"):
                transaction = self._begin_transaction(operation, len(files.shards))
            written = self._write(operation, staged, files, transaction, hashes_blocks=has_all)
            result = self._publish(operation, written, transaction, whole)
        except BaseException:
            staged.stop()
            staged.join()  # no worker writes into files that are removed now
            if transaction is not None:
                transaction.roll_back()
            raise
        finally:
            if not self._stage_first:
                self._pool.clear()
        self._report(written, transaction)
        return result

    def _plan(self, operation: Operation[SaveResult]) -> PlannedSave:
        """Return what is written, and in which blocks."""
        tensors, self._tensors = self._tensors, {}
        sources = describe_tensors(tensors, check=operation.check)
        operation.check()
        data_bytes = sum([source.nbytes for source in sources])
        needed_bytes = data_bytes - (self._delta.held_bytes if self._delta is not None else 0)
        budget_bytes = self._pool.budget_for(needed_bytes, pinned=self._ready.staging_allocator() != memory.allocate)
        if budget_bytes is not None and isinstance(self._absolute_destination, BufferedDestination):
            self._absolute_destination, buffer_bytes = self._absolute_destination.within(budget_bytes)
            budget_bytes = max(SMALLEST_BLOCK_BYTES, budget_bytes - buffer_bytes)
        block_bytes = block_bytes_for(data_bytes, budget_bytes, stage_first=self._stage_first, num_tensors=len(sources))
        plans = self._make_plans(sources, block_bytes)
        if not self._stage_first:  # a pool of its own
            largest = max([block.nbytes for shard in plans[1].shards for block in shard.blocks], default=0)
            block_bytes = -(-largest // PAGE_BYTES) * PAGE_BYTES
        return PlannedSave(*plans, block_bytes, budget_bytes)

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        """Return the plan of the files, and that of what this process stages and writes: here the same."""
        plan = self._planner(sources, block_bytes)
        return plan, plan

    def _compared(self, operation: Operation[SaveResult], delta: DeltaSave, planned: PlannedSave) -> PlannedSave:
        """Return the plan of what differs from the base, if there is one; the tensors may have been copied then."""
        with traced(self._options.trace, "compare"):
            planned = delta.compare(planned, self._pool, self._ready, operation)
        if delta.is_staged:
            self._on_staged()
        if delta.kind == "delta":  # what other libraries look for is not there
            pattern = FilePattern(self._options.filename_pattern).of_delta
            self._options = replace(self._options, filename_pattern=pattern)
        return delta.plan(planned)

    def _stage(self, operation: Operation[SaveResult], planned: PlannedSave) -> SaveScheduler:
        """Return what copies the tensors and writes them."""
        delta, make = self._delta, self._ready.staging_allocator()
        blocks: Blocks | None = None if delta is None else delta.image(planned, self._pool, make)
        if blocks is None:
            self._pool.fit(planned.block_bytes, make, limit_bytes=planned.budget_bytes)
        scheduler = SaveScheduler(
            planned.own,
            blocks or self._pool,
            stage_first=self._stage_first and not self.staged,
            progress=progress_callback(self._options.progress, "saving"),
            trace=self._options.trace,
        )
        scheduler.on_stop(self._notifier.notify)
        operation.on_cancel(scheduler.stop)
        return scheduler

    def _wait_for_previous(self, operation: Operation[SaveResult], scheduler: SaveScheduler | None) -> None:
        """Wait until the save before this one is staged, or has ended early; a cancel ends the wait.

        One of a chain waits until it has ended: until then that one reads the image.

        Args:
            operation: This save's.
            scheduler: Waits until the save before this one is durable, or until this scheduler has failed.
        """
        save = self._previous
        with traced(self._options.trace, "wait", detail="for the save before"):
            while save is not None:
                passed = save._staged_or_done if scheduler is None and self._delta is None else save.done
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
        if self.staged:  # by the comparison with the save before
            return
        self._ready = Readiness()  # what is written now is stio's own
        staged = perf_counter()
        self._staged_seconds = staged - self._called
        self._after("stage")
        if self._stage_first:
            if self._options.trace is not None:
                self._options.trace.add("wait", self._called, staged, detail="for the snapshot", lane=CALLER)
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
            if self._delta is not None and self._delta.kind == "delta" and transaction.path != self._delta.path:
                message = "another program has changed a link on the way to the destination; save again"
                raise StorageError(message, path=transaction.path, expected=self._delta.path)
            if self._hash is not None:
                transaction.require_names(self._manifest_name(transaction.shard_names))
            if transaction.is_recorded and self._retention is not None:
                self._retention.begin(transaction.path, self._own_pattern)
        except BaseException:
            transaction.roll_back()
            raise
        return transaction

    def _write(
        self,
        operation: Operation[SaveResult],
        staged: SaveScheduler,
        files: WritePlan,
        transaction: Transaction,
        *,
        hashes_blocks: bool,
    ) -> WrittenSave:
        """Write all files; return once they are durable."""
        hasher = None if self._hash is None else partial(new_hasher, self._hash)
        writers = transaction.create([shard.nbytes for shard in files.shards])
        staged.write_to(writers, hasher if hashes_blocks else None)
        digests = staged.complete()
        operation.set_log_detail(lambda: f"{staged.written_bytes:,} bytes in {len(files.shards):,} files")
        if digests is None and hasher is not None:
            with traced(self._options.trace, "hash"):
                digests = transaction.digests(hasher, operation.check)
        return WrittenSave(
            path=transaction.path,
            plan=files,
            names=transaction.shard_names,
            index=FilePattern(self._options.filename_pattern).index if transaction.takes_index else None,
            hashes={} if digests is None else dict(zip(transaction.shard_names, digests, strict=True)),
            seconds=perf_counter() - self._called,
        )

    def _publish(
        self, operation: Operation[SaveResult], written: WrittenSave, transaction: Transaction, whole: WritePlan
    ) -> SaveResult:
        """Publish the files, with their index and the change of the manifest.

        Args:
            operation: This save's.
            written: What was written.
            transaction: The transaction.
            whole: The plan of the full save, which says what a delta and its base have together.
        """
        manifest = self._manifest_name(written.names)
        note = transaction.read_note(manifest)
        change = manifest_change(note, self._hash, written.file_states(), path=manifest)
        notes = [] if change is None else [Note(manifest, *change)]
        index = None if written.index is None else written.plan.index(written.names)
        with traced(self._options.trace, "commit"):
            transaction.prepare_commit(operation.check)
            operation.refuse_cancel()
            self._after("commit")
            transaction.commit(index=index, notes=notes)
        self._after("publish")
        file_bytes, delta = sum([shard.nbytes for shard in written.plan.shards]), self._delta
        changed_bytes = None if delta is None else delta.changed_bytes
        return SaveResult(
            path=written.path,
            kind="full" if delta is None else delta.kind,
            files=written.names,
            total_bytes=whole.total_bytes,
            changed_bytes=whole.total_bytes if changed_bytes is None else changed_bytes,
            file_bytes=file_bytes,
            written_bytes=file_bytes + len(index or b"") + len((change and change[1]) or b""),
            aliases=whole.aliases,
            staged_seconds=self._staged_seconds,
            written_seconds=written.seconds,
            committed_seconds=perf_counter() - self._called,
            hashes=written.hashes,
        )

    def _report(self, written: WrittenSave, transaction: Transaction) -> None:
        """Count the save for its saver, and log what lies beside it."""
        pattern = self._own_pattern
        if (published := transaction.published()) is not None:  # what a caller's own destination holds is not deleted
            self.written = published if isinstance(published, WrittenFiles) else None
            base = None if self._delta is None else self._delta.base
            if self._delta is not None:
                self._delta.end(written, published, pattern)
            if self._retention is not None:
                self._retention.add(written.path, pattern, published, None if base is None else base.path)
            if self.written is not None and written.path in self.written.made:
                return  # a new directory, with nothing beside the checkpoint
        store = getattr(self._absolute_destination, "root", None)
        if isinstance(store, Root) or self.written is not None:
            with suppress(Exception):  # whatever is met there, the save has succeeded
                warn_of_surroundings(store, written, pattern)

    @property
    def _own_pattern(self) -> str | None:
        """The pattern of the file names of full saves in a directory, None if the destination is one file."""
        return None if self._max_shard_bytes is None else self._filename_pattern

    @property
    def _hash(self) -> HashName | None:
        """The hash function of the digests. A delta has them: who applies one in place compares its files first."""
        is_delta = self._delta is not None and self._delta.kind == "delta"
        return self._options.hash or ("sha256" if is_delta else None)

    def _manifest_name(self, names: tuple[str, ...]) -> str:
        if self._max_shard_bytes is None:
            return f"{names[0]}{MANIFEST_SUFFIX}"
        return FilePattern(self._options.filename_pattern).manifest

    # The caller's interface, from any thread.

    def __repr__(self) -> str:
        failure = self.operation.failure
        state = "saved" if self.state == "published" else "rolled back"
        if failure is not None:
            state = f"failed, {type(failure).__name__}"
        return f"<PendingSave {printable(shown(self.destination))!r}: {state if self.done() else 'under way'}>"

    @property
    def staged(self) -> bool:
        """Whether the snapshot was completed: the tensors may change."""
        return self.state in ("staged", "committing", "published", "rolled back")

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
