"""One save from its plan to its publication, on one thread of stio's own.

The engine's run stands between the parts of a transaction; where it raises, nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol

import torch

from stio.device.save_sources import LazyTensor, Readiness, sources_of, staging_for
from stio.errors import (
    FormatError,
)
from stio.format.manifest import FileState, Manifest, build_manifest, merge_states, parse_manifest
from stio.format.naming import index_name, manifest_name
from stio.format.sharding import TensorSource
from stio.runtime.hashing import HashName, new_hasher
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused
from stio.runtime.process import switch_interval as shortened
from stio.runtime.progress import progress_callback
from stio.runtime.spans import CALLER
from stio.runtime.trace import traced
from stio.saving.options import Destination, SaveOptions, SaveResult
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.scheduler import SaveScheduler
from stio.saving.staging_pool import StagingPool, block_bytes_for
from stio.storage.base import Note, Transaction
from stio.storage.commit.target import OneFile
from stio.storage.commit.transaction import LocalTransaction, begin_local

__all__ = ["Before", "Durable", "Planner", "SaveBody", "manifest_notes"]


class Planner(Protocol):
    """Decides which tensor goes into which file, with which header; `plan_writes` unless a face has its own rules."""

    def __call__(self, sources: Sequence[TensorSource], *, block_bytes: int) -> WritePlan:
        """Return the plan; see `stio.saving.plan`."""


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


class Before(Protocol):
    """A save whose turn comes first."""

    def wait_turn(self, operation: Operation[SaveResult], *, durable: bool) -> None:
        """Hold `operation` until this save is staged, or done."""


class SaveBody:
    """What a save's own thread does."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor | LazyTensor],
        destination: str | OneFile | Destination,
        settings: SaveOptions,
        pool: StagingPool,
        *,
        tell_staged: Callable[[], None],
        tell_durable: Callable[[Durable], None],
        stage_first: bool,
        after: Before | None,
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
            run = SaveScheduler(
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
        self, operation: Operation[SaveResult], plan: WritePlan, run: SaveScheduler, transaction: Transaction
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


def manifest_notes(
    name: str, old: bytes | None, algorithm: HashName | None, states: Mapping[str, FileState]
) -> list[Note]:
    """Return what a save changes in the manifest around its commit.

    A checkpoint without a manifest, or with one of another algorithm, has none until its successor is in place: a
    crash before the commit would otherwise leave a manifest beside it that calls its files wrong.

    Args:
        name: The manifest's name in the destination's directory.
        old: What stands in it now, None if there is none.
        algorithm: How the new files were hashed; None: they were not, and the manifest must not outlive the old ones.
        states: By name, the new files.
    """
    if algorithm is None:
        return [] if old is None else [Note(name, None, None)]
    new: dict[str, tuple[FileState, ...]] = {shard: (state,) for shard, state in states.items()}
    before = None
    if old is not None:
        try:
            known = parse_manifest(old, path=name)
        except FormatError:
            known = None
        if known is not None and known.algorithm == algorithm:
            before = build_manifest(Manifest(algorithm, merge_states(known.files, new)))
    return [Note(name, before, build_manifest(Manifest(algorithm, new)))]
