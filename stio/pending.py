"""One save under way: its body, on one thread of stio's own, and what the faces hand out to wait for it.

A save has two moments to wait for: the snapshot is complete (the faces wait for that), and the checkpoint is durable
(`await pending`, `pending.result()`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch

from stio.codec.naming import index_name, manifest_name
from stio.codec.sharding import TensorSource
from stio.device.sources import LazyTensor, Readiness, sources_of, staging_for
from stio.device.tensors import collection_paused
from stio.engine.bell import Bell
from stio.engine.pool import Pool, block_bytes_for
from stio.engine.runtime import Operation
from stio.engine.save import SaveRun
from stio.engine.switching import switch_interval as shortened
from stio.events import shown, traced
from stio.manifest import FileState, manifest_notes, new_hasher
from stio.plan.write import WritePlan, plan_writes
from stio.progress import progress_callback
from stio.saving import Destination, DestinationLike, SaveResult, SaveSettings, TensorsLike, named, settled
from stio.spans import CALLER
from stio.storage.base import Transaction
from stio.storage.commit import LocalTransaction, begin_local
from stio.storage.destination import OneFile

__all__ = ["Durable", "PendingSave", "Planner"]

logger = logging.getLogger("stio")

EXIT_PATIENCE_SECONDS = 60.0
"""How long the interpreter's exit lets a save go on before it is rolled back."""


class Planner(Protocol):
    """Decides which tensor goes into which file, with which header; `plan_writes` unless a face has its own rules."""

    def __call__(self, sources: Sequence[TensorSource], *, block_bytes: int) -> WritePlan:
        """Return the plan; see `stio.plan.write`."""


@dataclass(frozen=True, slots=True)
class Durable:
    """A checkpoint that was saved, as whoever may delete it later has to know it."""

    path: str
    """The destination, links resolved."""
    filename_pattern: str | None
    """Names of its files, in a directory; None: it is one file."""
    fresh: bool
    """Whether its directory was not there before, so that all of it is the saver's own."""
    files: frozenset[str]
    """Paths of what it consists of; some may be missing."""


class PendingSave:
    """A save under way: its snapshot is complete, its checkpoint is not durable yet.

    `await` it (any loop) or call `result()` (any thread) for the `SaveResult`. Cancelling such a wait cancels the
    wait alone; `cancel` rolls the save back.
    """

    def __init__(
        self,
        tensors: TensorsLike,
        destination: DestinationLike,
        settings: SaveSettings,
        *,
        pool: Pool,
        stage_first: bool = True,
        after: PendingSave | None = None,
        when_durable: Callable[[Durable], None] = lambda saved: None,
        planner: Planner | None = None,
    ) -> None:
        self.destination = destination
        """Where to."""
        self._staged = self._delivered = self._cancelled = False
        self._bell = Bell()
        self._body = body = _Body(
            named(tensors),
            settled(destination),
            settings,
            pool,
            tell_staged=self._tell_staged,
            tell_durable=when_durable,
            stage_first=stage_first,
            after=after,
            planner=planner,
        )
        self._operation: Operation[SaveResult] = Operation(
            body.carry_out, name="save", kind="save", bell=self._bell, exit_patience=EXIT_PATIENCE_SECONDS
        )
        self._operation.about = shown(destination)
        self._operation.start()

    def __del__(self) -> None:
        # The saver tells of it when it is used again or closed; it may be dropped before, or the interpreter end.
        operation: Operation[SaveResult] | None = getattr(self, "_operation", None)  # None: refused by `__init__`
        error = operation.failure if operation is not None else None
        if error is not None and not self._delivered:
            logger.error("saving to %s failed, and nobody waited for it: %s", self.destination, error)

    @property
    def staged(self) -> bool:
        """Whether the snapshot is complete: the tensors may change."""
        return self._staged

    @property
    def delivered(self) -> bool:
        """Whether somebody was told what became of it."""
        return self._delivered

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called, in time or too late."""
        return self._cancelled

    def done(self) -> bool:
        """Whether the save has ended: durable, failed or rolled back."""
        return self._operation.done

    def cancel(self) -> None:
        """Ask for the save to be rolled back. Never blocks; without effect once publishing has begun.

        Who waits for the save afterwards gets `ClosedError`, or the result if it was too late.
        """
        self._cancelled = True
        self._operation.cancel()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait in this thread until the checkpoint is durable.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The timeout passed; the save goes on.
            ClosedError: The save was cancelled, and is rolled back.
            StioError: It failed; the old checkpoint stands.
        """
        if not self._operation.join(timeout):
            raise TimeoutError(f"the save to {self.destination} is not done after {timeout} s")
        return self.outcome()

    def __await__(self) -> Generator[Any, Any, SaveResult]:
        return self._wait().__await__()

    async def _wait(self) -> SaveResult:
        await self._bell.wait_for(self.done)
        return self.outcome()

    def outcome(self) -> SaveResult:
        """Return or raise what became of it; only once it is `done`."""
        self._delivered = True
        return self._operation.outcome()

    # For the faces: waiting for the snapshot, and for an end that is not theirs to report.

    async def wait_staged(self) -> None:
        """Wait until the tensors may change; a cancel rolls the save back before it goes on.

        Raises:
            StioError: The save failed before that.
        """
        try:
            await self._bell.wait_for(self._staged_or_done)
        except BaseException:
            self._delivered = True  # the caller has the cancel in hand, and no pending save
            await self._operation.aclose()
            raise
        self._require_staged()

    def wait_staged_blocking(self) -> None:
        """Wait in this thread until the tensors may change; a KeyboardInterrupt rolls the save back first."""
        try:
            self._bell.wait_for_blocking(self._staged_or_done)
        except BaseException:
            self._delivered = True
            self._operation.close()
            raise
        self._require_staged()

    async def complete(self) -> SaveResult:
        """Wait until the checkpoint is durable; a cancel rolls the save back before it goes on."""
        self._delivered = True
        return await self._operation.wait()

    def complete_blocking(self) -> SaveResult:
        """Wait in this thread until the checkpoint is durable; a KeyboardInterrupt rolls the save back first."""
        self._delivered = True
        return self._operation.result()

    async def ended(self) -> None:
        """Wait until the save has ended, whatever became of it; a cancel ends the wait alone."""
        await self._bell.wait_for(self.done)

    async def aclose(self) -> None:
        """Roll back, and wait until nothing of it is left."""
        await self._operation.aclose()

    def close(self) -> None:
        """Roll back, and wait in this thread until nothing of it is left."""
        self._operation.close()

    def join(self) -> None:
        """Wait in this thread until the save has ended, whatever became of it."""
        self._operation.join()

    def wait_turn(self, operation: Operation[SaveResult], *, durable: bool) -> None:
        """Hold another save's body until this one is staged, or done (called by the body)."""
        operation.on_cancel(self._bell.ring)
        passed = self.done if durable else self._staged_or_done
        self._bell.wait_for_blocking(lambda: passed() or operation.cancelled)
        operation.check()
        before = self._body.after  # one that was ended before its turn: those that it waited for still are
        if before is not None and self._operation.done:
            before.wait_turn(operation, durable=durable)

    def _staged_or_done(self) -> bool:
        return self._staged or self._operation.done

    def _require_staged(self) -> None:
        if not self._staged:
            self.outcome()

    def _tell_staged(self) -> None:
        self._staged = True
        self._bell.ring()


class _Body:
    """What a save's own thread does."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor | LazyTensor],
        destination: str | OneFile | Destination,
        settings: SaveSettings,
        pool: Pool,
        *,
        tell_staged: Callable[[], None],
        tell_durable: Callable[[Durable], None],
        stage_first: bool,
        after: PendingSave | None,
        planner: Planner | None,
    ) -> None:
        self._started = perf_counter()
        self._tensors = tensors
        self._ready = Readiness.now(tensors)  # here, in the caller's thread: its stream's work so far comes first
        self._max_shard_bytes = settings.max_shard_bytes(destination)
        self._planner: Planner = planner or partial(
            plan_writes, max_shard_bytes=self._max_shard_bytes, metadata=settings.metadata, shared=settings.shared
        )
        self._destination = destination
        self._settings = settings
        self._pool = pool
        self._stage_first = stage_first
        self._announce = tell_staged
        self._announce_durable = tell_durable
        self.after = after
        self._staged_seconds = 0.0

    def carry_out(self, operation: Operation[SaveResult]) -> SaveResult:
        """Stage, write and publish; leaves nothing behind when it raises."""
        settings = self._settings
        with shortened(settings.switch_interval):
            with traced(settings.trace, "plan"), collection_paused(len(self._tensors)):
                plan = self._plan()
            if self.after is not None:
                with traced(settings.trace, "wait", detail="for the save before"):
                    self.after.wait_turn(operation, durable=False)
            self._fit()
            run = SaveRun(
                plan,
                self._pool,
                ready=self._ready,
                on_staged=self._tell_staged,
                stage_first=self._stage_first,
                hasher=partial(new_hasher, settings.hash) if settings.hash is not None else None,
                progress=progress_callback(settings.progress),
                trace=settings.trace,
            )
            plan = replace(plan, sources=())  # the run lets go of the tensors when they are staged
            operation.on_cancel(run.stop)
            run.start()
            try:
                if self.after is not None:
                    with traced(settings.trace, "wait", detail="for the save before"):
                        self.after.wait_turn(operation, durable=True)
                    self.after = None  # or all saves of a training run would stay, a chain
                with traced(settings.trace, "begin"):
                    transaction = self._begin(len(plan.shards))
                return self._write(operation, plan, run, transaction)
            finally:
                run.stop()
                run.join()
                if not self._stage_first:
                    self._pool.clear()  # ours alone; we are part of a circle, which waits for the collector

    def _plan(self) -> WritePlan:
        tensors, self._tensors = self._tensors, {}
        sources = sources_of(tensors)
        total = sum(source.nbytes for source in sources)
        block_bytes = block_bytes_for(total, self._pool.budget_bytes, stage_first=self._stage_first)
        make = staging_for(tensors.values())
        self._fit = partial(self._pool.fit, block_bytes, make)  # not now: a save before this one may still take blocks
        return self._planner(sources, block_bytes=block_bytes)

    def _begin(self, num_shards: int) -> Transaction:
        settings = self._settings
        where = self._destination
        begin = where.begin if isinstance(where, Destination) else partial(begin_local, where)
        return begin(
            num_shards=num_shards,
            filename_pattern=settings.filename_pattern,
            shard_names=settings.shard_names,
            commit=settings.commit,
            durability=settings.durability,
        )

    def _write(
        self, operation: Operation[SaveResult], plan: WritePlan, run: SaveRun, transaction: Transaction
    ) -> SaveResult:
        settings = self._settings
        try:
            run.write_to(transaction.create([shard.nbytes for shard in plan.shards]))
            digests = run.complete()
            operation.remark(lambda: f"{run.written_bytes:,} bytes in {len(plan.shards):,} files")
            written_seconds = perf_counter() - self._started
            names = transaction.shard_names
            hashes = {} if digests is None else dict(zip(names, digests, strict=True))
            states = {
                name: FileState(shard.nbytes, hashes[name])
                for name, shard in zip(names, plan.shards, strict=True)
                if hashes
            }
            manifest = self._manifest_name(names)
            notes = manifest_notes(manifest, transaction.read_note(manifest), settings.hash, states)
            index = plan.index(names) if transaction.wants_index else None
            operation.settle()
            with traced(settings.trace, "commit"):
                transaction.commit(index=index, notes=notes)
            committed_seconds = perf_counter() - self._started
        except BaseException:
            run.stop()
            run.join()  # nobody writes into files that are removed now
            transaction.abort()
            raise
        if isinstance(transaction, LocalTransaction):  # a place of one's own is nobody's to delete from
            self._announce_durable(self._durable(transaction))
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

    def _durable(self, transaction: LocalTransaction) -> Durable:
        path, names = transaction.path, transaction.shard_names
        pattern = None if self._max_shard_bytes is None else self._settings.filename_pattern
        where = path if pattern is not None else os.path.dirname(path)
        files = {*names, self._manifest_name(names), *([] if pattern is None else [index_name(pattern)])}
        return Durable(
            path, pattern, transaction.makes_directory, frozenset(os.path.join(where, name) for name in files)
        )

    def _manifest_name(self, names: tuple[str, ...]) -> str:
        if self._max_shard_bytes is None:
            return f"{names[0]}.manifest.json"
        return manifest_name(self._settings.filename_pattern)

    def _tell_staged(self) -> None:
        self._staged_seconds = perf_counter() - self._started
        if self._stage_first and self._settings.trace is not None:
            staged = self._started + self._staged_seconds
            self._settings.trace.add("wait", self._started, staged, detail="for the snapshot", lane=CALLER)
        self._announce()
