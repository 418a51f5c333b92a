"""One save, from the call to the durable checkpoint: plan, stage, write, commit.

A save runs on its own thread (`PendingSave._run` shows its steps in order). A caller may wait for two moments: the
snapshot is complete, so the tensors may change; and the checkpoint is durable. A save that fails or is cancelled before
its commit leaves nothing behind.

A save replaces what it has saved before. The index of another checkpoint in the directory is not its own, so it stays,
and readers of the directory follow it: `hiding_index` finds that out, for a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

from stio.device.copy_out import Readiness
from stio.device.describe import describe_tensors
from stio.device.tensor_memory import require_no_placeholders
from stio.errors import SaveInProgressError, StioError, printable
from stio.format.directory import INDEX_NAME, NamedCheckpoint, choose, of_index, without_index
from stio.format.header import PREFIX_BYTES, header_nbytes, parse_header
from stio.format.index import ShardIndex, parse_index
from stio.format.manifest import FileState, Hasher, manifest_change, new_hasher
from stio.format.naming import (
    FILE_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_SUFFIX,
    index_name,
    manifest_name,
    shard_number,
    step_of,
)
from stio.format.sharding import TensorSource
from stio.runtime import memory
from stio.runtime.limits import DEFAULT_BUDGET_BYTES, Limits
from stio.runtime.memory import allocate
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation, current_operation
from stio.runtime.process import collection_paused, switch_interval
from stio.runtime.progress import progress_callback
from stio.runtime.spans import CALLER
from stio.runtime.text import log
from stio.runtime.trace import shown, traced
from stio.saving.options import (
    DEFAULT_PATTERN,
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
from stio.saving.tensors import TensorsLike, tensors_of
from stio.storage.base import BufferedDestination, Note, ParallelRoot, Root, Source, Transaction
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.transaction import begin_local
from stio.storage.open import open_directory

EXIT_PATIENCE_SECONDS = 60.0
"""Longest time that the interpreter's exit waits for saves that make no progress, before they are rolled back."""

Planner: TypeAlias = Callable[[Sequence[TensorSource], int], WritePlan]
"""Assigns each tensor to a file, and makes the headers; called with the tensors and the block size in bytes."""

_READ_BY_NAME = {"diffusion_pytorch_model.safetensors": "diffusers", "adapter_model.safetensors": "PEFT"}
"""Files that a library reads whatever else is in a directory."""


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
        require_no_placeholders(sources)
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
        local = partial(begin_local, lock_timeout=options.lock_timeout, check=operation.check)
        begin = where.begin if isinstance(where, Destination) else partial(local, where)
        transaction = begin(
            num_shards=num_shards,
            filename_pattern=options.filename_pattern,
            shard_names=options.shard_names,
            commit=options.commit,
            durability=options.durability,
        )
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
        saved_index = index_name(self._options.filename_pattern) if transaction.takes_index else None
        saved = saved_index, names, [name for shard in plan.shards for name in shard.names]
        remote = getattr(self._absolute_destination, "root", None)
        # Of a store before the commit: from there on no cancel is heard.
        hiding = hiding_index(remote, *saved) if isinstance(remote, Root) else None
        with traced(self._options.trace, "commit"):
            transaction.prepare_commit(operation.check)
            operation.refuse_cancel()
            transaction.commit(index=index, notes=notes)
        self._committed = True
        committed_seconds = perf_counter() - self._started
        if (published := transaction.published()) is not None:  # what a caller's own destination holds is not deleted
            self.written = published if isinstance(published, WrittenFiles) else None
            if self._retention is not None:
                self._retention.add(transaction.path, self._own_pattern(), published)
        if self.written is not None:  # after the commit: it may have replaced an index
            path = transaction.path if self._max_shard_bytes is not None else os.path.dirname(transaction.path)
            with suppress(StioError), open_directory(path, follow_symlinks=False) as root:
                hiding = hiding_index(root, *saved)
                if self._own_pattern() == DEFAULT_PATTERN:
                    warn_of_another_name(root, saved[2])
        if hiding is not None:
            first = None if self._max_shard_bytes is None else saved_index or names[0]
            warn_of_hiding(hiding, transaction.path, first)
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

    def _own_pattern(self) -> str | None:
        """Return the pattern of the file names in a directory, None if the destination is one file."""
        return None if self._max_shard_bytes is None else self._options.filename_pattern

    def _hasher(self) -> Callable[[], Hasher] | None:
        """Return what makes a hasher for each file, if there are to be digests."""
        return None if self._options.hash is None else partial(new_hasher, self._options.hash)

    def _manifest_name(self, names: tuple[str, ...]) -> str:
        if self._max_shard_bytes is None:
            return f"{names[0]}{MANIFEST_SUFFIX}"
        return manifest_name(self._options.filename_pattern)

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


def warn_of_link_to_step(path: str, resolved: str) -> None:
    """Log that a destination leads by a link to a step, which the save replaces.

    Args:
        path: The destination, absolute.
        resolved: The same without links.
    """
    named, reached = step_of(os.path.normpath(path)), step_of(resolved)
    if reached is None or (named is not None and named[0] == reached[0]) or not os.path.lexists(resolved):
        return
    # A directory whose name is a number, with further directories, may be that of a job: `123456/final`.
    if reached[1] == resolved or not os.path.basename(reached[1]).isdecimal() or os.path.isfile(resolved):
        log(
            logging.WARNING,
            "%s leads by a link to %s, so the save replaces step %d; save to a path of its own, and change the link "
            "when that save is durable",
            printable(path),
            printable(resolved),
            reached[0],
        )


def hiding_index(root: Root, index: str | None, files: Collection[str], tensors: Iterable[str]) -> str | None:
    """Return the index by which a load of a directory gets other files than those of a save; None: there is none.

    Nothing is raised: what cannot be read does not decide either.

    Args:
        root: The directory.
        index: The index of the saved checkpoint, if it has one.
        files: Its files.
        tensors: Names of its tensors.

    Returns:
        The name of the index. A variant, such as `model.fp16.safetensors`, is meant to be loaded by its name.
    """
    with suppress(StioError):
        own = of_index(index) if index is not None else next(iter(without_index(files)), None)
        if own is None or (index is None and any(shard_number(name) is not None for name in files)):
            return None  # no name of a checkpoint; or a shard of one whose index comes later
        names = _names(root, own)
        found = choose({*names, *files}, path=root.path).index
        if found is None or found == index or own.is_variant_of(of_index(found)):
            return None
        other = _read(root, found)
        is_gone = not any(shard in names or _exists(root, shard) for shard in other.shards)
        if is_gone or not other.weight_map or not {*other.shards}.isdisjoint(files):
            return None
        if of_index(found).stem == own.stem or not other.weight_map.keys().isdisjoint(tensors):
            return found
    return None


def warn_of_another_name(root: Root, tensors: Iterable[str]) -> None:
    """Log that the directory of a saved checkpoint has a file with its tensors that a framework reads by its name.

    Args:
        root: The directory, on this machine, to which a save with the default pattern of names has saved.
        tensors: Names of the tensors of the saved checkpoint.
    """
    for name in _READ_BY_NAME.keys() & {*root.listdir()}:
        with suppress(StioError), closing(root.open(name)) as file:
            if _tensors_of(file).isdisjoint(tensors):
                continue
            log(
                logging.WARNING,
                "%s: saved, but %s reads %s there, which has tensors of these names; save with filename_pattern=%r, or "
                "delete that file",
                printable(root.path),
                _READ_BY_NAME[name],
                name,
                name.replace(FILE_SUFFIX, "{suffix}" + FILE_SUFFIX),
            )


def warn_of_hiding(hiding: str, path: str, first: str | None) -> None:
    """Log that a load of the directory of a saved checkpoint gets another one.

    Args:
        hiding: The index that it follows.
        path: The destination.
        first: Index or first file of the checkpoint, if the destination is a directory.
    """
    log(
        logging.WARNING,
        "%s: saved, but a load of its directory follows %s there; load it by its path, or delete that index "
        "and its shards",
        printable(path if first is None else f"{path.rstrip('/')}/{first}"),
        printable(hiding),
    )


def _tensors_of(file: Source) -> set[str]:
    """Return the names in a header."""
    file_bytes = file.identity.nbytes
    prefix = _bytes(file, 0, min(PREFIX_BYTES, file_bytes))
    nbytes = header_nbytes(prefix, file_bytes=file_bytes, path=file.path)
    raw = _bytes(file, PREFIX_BYTES, nbytes)
    return {*parse_header(raw, file_bytes=file_bytes, path=file.path, shard="").names}


def _bytes(file: Source, offset: int, nbytes: int) -> bytes:
    region = allocate(max(nbytes, 1)).sub(0, nbytes)
    file.read_into(offset, [region])
    return region.tobytes()


def _names(root: Root, own: NamedCheckpoint) -> list[str]:
    """Return the names in a directory; of a store those that decide, since a list of all of them may be long."""
    if not isinstance(root, ParallelRoot):
        return [*root.listdir()]
    return [name for name in dict.fromkeys([INDEX_NAME, own.whole + INDEX_SUFFIX]) if _exists(root, name)]


def _exists(root: Root, name: str) -> bool:
    with suppress(StioError):
        root.open(name).close()
        return True
    return False


def _read(root: Root, name: str) -> ShardIndex:
    with closing(root.open(name)) as file:
        return parse_index(_bytes(file, 0, min(file.identity.nbytes, Limits().header_bytes)), path=file.path)
