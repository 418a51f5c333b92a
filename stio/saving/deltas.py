"""What a save knows of the checkpoint before it, so that it may write only what differs (`stio.format.delta`).

A `Saver` with `full_every` has a `Chain`: the base of its next delta, and the *image*, which is the bytes of the last
snapshot in memory. The image is the staging memory of the last full save: its blocks are not given back once they are
written. A later save compares its tensors with the image while the caller waits, and brings the image up to date in the
same pass. What it writes then comes from the image and from what the comparison found, so the tensors are free. By hand
(`save(base=)`) the image is read from the base, one tensor at a time.

A save in a chain waits for the end of the one before it: until then that one writes from the image, and only then is it
known whether it is there to be a base. After a save that failed, the next one is full.
"""

from __future__ import annotations

import logging
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

from stio.device import LazyTensor, Readiness, describe_tensors, tensors_in
from stio.errors import MismatchError, printable
from stio.format import TensorSource
from stio.format.delta import (
    DELTA_KEY,
    DELTA_POINTER,
    DELTA_TENSOR,
    FORMAT,
    ID_KEY,
    MAX_LINKS,
    ChangedTensor,
    Delta,
    names_of,
)
from stio.format.files import FileName, FilePattern, step_of
from stio.process import contextmanager
from stio.runtime import Cancelled, Operation, WorkerPool, mark_progress
from stio.runtime.memory import Region, allocate, move, num_processors
from stio.runtime.reports import counters
from stio.saving.options import DEFAULT_PATTERN, SaveOptions
from stio.saving.plan import PlannedSave, WritePlan, WrittenSave, plan_resolved
from stio.saving.staging_pool import SMALLEST_BLOCK_BYTES, StagingPool, block_bytes_for
from stio.saving.tensors import ProducedTensors
from stio.storage import Published
from stio.storage.checkpoint import (
    Changes,
    Comparison,
    OpenCheckpoint,
    OpenOptions,
    digest_of,
    open_checkpoint,
    read_tensor,
)
from stio.storage.commit import WrittenFiles
from stio.text import is_url, log, without_secrets

_Row: TypeAlias = tuple[str, str, tuple[int, ...], Region]
"""Name, dtype, shape and bytes of a tensor."""

_INLINE_BYTES = 64 << 10
"""Longest description in the metadata, as of the tree of nested state; a longer one is a tensor."""

_NUM_THREADS = 4
"""Most threads that compare: so many reach the rate of the memory."""

_BYTES_OF_A_THREAD = 4 << 20
"""Fewer bytes are not worth another thread."""

_SPARE_BYTES = 4 * SMALLEST_BLOCK_BYTES
"""Staging memory that must be left beside an image, for what a delta writes."""


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint on which a delta may be based."""

    path: str
    """Path without links, or URL; in a directory with names of its own, that of its index or file."""
    id: str
    """Its id, or the digest of its files."""
    depth: int
    """Number of deltas from here to the full checkpoint, this one included."""
    is_directory: bool
    """Whether it was saved as a directory."""
    bases: tuple[str, ...] = ()
    """Paths of the checkpoints that it is based on."""
    published: tuple[Published, ...] = ()
    """What the saves of its chain have published, as far as this process knows it."""

    def is_there(self) -> bool:
        """Return whether its chain is unchanged, as far as it is on this machine."""
        return all(one.is_whole() for one in self.published if isinstance(one, WrittenFiles))

    def is_under(self, path: str) -> bool:
        """Return whether a save to a path would replace it, or what it is based on."""
        return any(one == path or one.startswith(f"{path}/") for one in (self.path, *self.bases))


class SnapshotImage:
    """The bytes of the last snapshot, file by file as they were written; the `Blocks` of the full save that fills it.

    Args:
        plan: The full save.
        block_bytes: Size of its blocks.
        memory: Memory of `room_for` bytes or more.
        pool: Its condition guards the save.
        make: What has allocated the memory.
    """

    def __init__(
        self, plan: WritePlan, block_bytes: int, memory: Region, pool: StagingPool, make: Callable[[int], Region]
    ) -> None:
        self.memory = memory
        """The memory."""
        self.changed, self.allocate = pool.changed, make
        self.nbytes = sum(shard.nbytes for shard in plan.shards)
        """Bytes of the files; nothing touches the rest."""
        self.described = _described(plan)
        """Dtypes, shapes and aliases."""
        self.tensors: dict[str, Region] = {}
        """The bytes of each tensor."""
        blocks, start = [], 0
        for shard in plan.shards:
            for block in shard.blocks:
                blocks.append(memory.sub(start + block.offset, block_bytes))
                for piece in block.pieces:
                    if not piece.start:
                        source = plan.sources[piece.source]
                        self.tensors[source.name] = memory.sub(start + block.offset + piece.at, source.nbytes)
            start += _whole_blocks(shard.nbytes, block_bytes)
        self._left = blocks[::-1]

    @staticmethod
    def room_for(plan: WritePlan, block_bytes: int) -> int:
        """Return the bytes of memory for a save: whole blocks, none of which crosses the end of pinned memory."""
        return sum(_whole_blocks(shard.nbytes, block_bytes) for shard in plan.shards)

    def try_take(self) -> Callable[[], Region] | None:
        """Take the next block, in the order of the plan."""
        block = self._left.pop()
        return lambda: block

    def give_back(self, block: Region) -> None:
        """Do nothing: the block stays in the image."""


def _whole_blocks(nbytes: int, block_bytes: int) -> int:
    return -(-nbytes // block_bytes) * block_bytes


def _described(plan: WritePlan) -> tuple[Mapping[str, object], Mapping[str, str]]:
    return {source.name: (source.dtype, source.shape) for source in plan.sources}, plan.aliases


class Chain:
    """What a saver knows of its last save. Its saves use it one after the other.

    Args:
        full_every: Number of saves of which one is full, and the others are deltas.
    """

    def __init__(self, full_every: int) -> None:
        self.full_every = min(full_every, MAX_LINKS + 1)
        """See above."""
        self.base: Base | None = None
        """The last save; None: there is none, or it failed, and the next one is full."""
        self.image: SnapshotImage | None = None
        """Its tensors; None: there was too little memory."""
        self._has_warned = False
        counters.add_holder(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of the image."""
        return 0 if self.image is None else self.image.nbytes

    def make_image(
        self, planned: PlannedSave, pool: StagingPool, make: Callable[[int], Region]
    ) -> SnapshotImage | None:
        """Return the image that a full save fills; None if there is no room for it."""
        old, self.image = self.image, None
        if self.full_every == 1:
            return None
        plan, limit_bytes = planned.own, planned.budget_bytes
        needed = sum(shard.nbytes for shard in plan.shards) + _SPARE_BYTES
        if limit_bytes is not None and needed > limit_bytes:
            if not self._has_warned:
                self._has_warned = True
                log(
                    logging.WARNING,
                    "every save is full, whatever full_every= says: a delta needs the last snapshot in memory, %s "
                    "bytes with what it writes, and there are %s; raise budget_bytes=, or give the host more memory",
                    f"{needed:,}",
                    f"{limit_bytes:,}",
                )
            return None
        room = SnapshotImage.room_for(plan, planned.block_bytes)
        memory = old.memory if old is not None and old.allocate == make and old.memory.nbytes >= room else None
        del old  # before there is another one
        memory = memory or make(room).sub(0, room)
        self.image = SnapshotImage(plan, planned.block_bytes, memory, pool, make)
        return self.image

    def clear(self) -> None:
        """Release the image."""
        self.base = self.image = None


class DeltaSave:
    """One save that may be a delta: compared with its base, planned, and published.

    Args:
        destination: Its destination, absolute.
        options: The caller's text, and the names of the files of a full save in a directory.
        max_shard_bytes: See `plan_writes`; None: the destination is one file.
        chain: That of a saver; None: `base` is given.
        base: Path or URL of the base.
    """

    def __init__(
        self,
        destination: object,
        options: SaveOptions,
        *,
        max_shard_bytes: int | None,
        chain: Chain | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        self._chain, self._base = chain, base
        self._max_shard_bytes = max_shard_bytes
        self._destination, self._pattern = destination, FilePattern(options.filename_pattern)
        self.metadata = {**(options.metadata or {}), ID_KEY: secrets.token_hex(16)}
        """The text of its files, with its id."""
        self.path = _path_of(destination)
        """The destination without links, or its URL; None: nothing there is a base or a delta."""
        self.base: Base | None = None
        """What it is a delta of; None: it is full."""
        self.changed_bytes: int | None = None
        """Bytes of the elements that changed; None: of all tensors, it is full."""
        self.is_staged = False
        """Whether the image has the tensors already, so that they may change."""
        self._found: _Comparer | None = None
        if base is not None and (self.path is None or not isinstance(base, str | os.PathLike)):
            raise ValueError("base= and the destination are paths or URLs of checkpoints")

    @property
    def kind(self) -> Literal["full", "delta"]:
        """What it is."""
        return "full" if self.base is None else "delta"

    @property
    def held_bytes(self) -> int:
        """Bytes of staging memory that it needs no more: those of the image."""
        return 0 if self._chain is None else self._chain.held_bytes

    def compare(
        self, planned: PlannedSave, pool: StagingPool, ready: Readiness, operation: Operation[Any]
    ) -> PlannedSave:
        """Compare the tensors with the base, if there is one; else return the plan as it is.

        Raises:
            ValueError: `base=` cannot be the base of this save.
            StioError: It cannot be read, or has other tensors.
        """
        if self._base is not None:
            with self._opened_base(planned.files, operation) as (base, opened):
                if not self._holds_full() and self._has_few_changes(planned, opened, pool, ready, operation):
                    self.base = base
            return planned
        chain = self._chain
        assert chain is not None
        last, chain.base = chain.base, None  # until this save has succeeded
        image = chain.image
        if last is not None and self.path is not None and last.is_under(self.path):
            log(logging.WARNING, "%s is replaced, and deltas that are based on it can no longer be loaded", self.path)
        if last is None or image is None or image.described != _described(planned.files):
            return planned
        if not self._may_follow(last) or self._holds_full():
            return planned
        limit_bytes = planned.budget_bytes
        if limit_bytes is not None:
            planned = replace(planned, budget_bytes=max(SMALLEST_BLOCK_BYTES, limit_bytes - image.nbytes))
        if self._has_few_changes(planned, image, pool, ready, operation):
            self.base = last
        self.is_staged = True
        bare = tuple([replace(source, data=None) for source in planned.files.sources])  # the caller's may be freed now
        files = replace(planned.files, sources=bare)
        return replace(planned, files=files, own=files)

    def _has_few_changes(
        self,
        planned: PlannedSave,
        image: SnapshotImage | OpenCheckpoint,
        pool: StagingPool,
        ready: Readiness,
        operation: Operation[Any],
    ) -> bool:
        """Compare the tensors; return whether a delta of them is worth it, and keep what was found if it is."""
        num_bytes = planned.files.total_bytes
        piece_bytes = block_bytes_for(num_bytes, planned.budget_bytes, stage_first=False)
        pool.fit(piece_bytes, ready.staging_allocator(), limit_bytes=planned.budget_bytes)
        found = _Comparer(planned, image, pool, ready)
        operation.on_cancel(found.stop)
        found.run()
        self._found = None if found.is_full else found
        return not found.is_full

    def plan(self, planned: PlannedSave) -> PlannedSave:
        """Return the plan of what is written: that of a delta, or of the full save."""
        found, self._found = self._found, None
        sources: Sequence[TensorSource] = planned.files.sources
        aliases, metadata = planned.files.aliases, self.metadata
        if found is not None and self.base is not None:
            self.changed_bytes = found.changed_bytes
            changed, own, whole = _stored(found.changes, sources)
            name = _relative(self.base.path, self.path or "")
            assert name is not None
            is_directory = self._max_shard_bytes is not None
            text = Delta(name, self.base.id, self.base.depth + 1, is_directory, changed).encode()
            metadata = {**metadata, "format": FORMAT, DELTA_KEY: text.decode()}
            if len(text) > _INLINE_BYTES:
                metadata[DELTA_KEY] = DELTA_POINTER
                region = allocate(len(text)).sub(0, len(text))
                region.write(0, text)
                own += _over([(DELTA_TENSOR, "U8", (len(text),), region)])
            sources, aliases = [*own, *self._in_image(whole)], {}
        elif self.is_staged:
            sources = self._in_image(sources)
        else:
            return planned
        num_bytes, limit_bytes = sum([source.nbytes for source in sources]), planned.budget_bytes
        block_bytes = block_bytes_for(num_bytes, limit_bytes, stage_first=False, num_tensors=len(sources))
        plan = plan_resolved(sources, aliases, block_bytes, max_shard_bytes=self._max_shard_bytes, metadata=metadata)
        return PlannedSave(plan, plan, block_bytes, limit_bytes)

    def _in_image(self, sources: Sequence[TensorSource]) -> Sequence[TensorSource]:
        """Return tensors with their bytes in the image, if they are there; else as they are."""
        image = None if self._chain is None else self._chain.image
        if image is None:
            return sources
        return _over([(source.name, source.dtype, source.shape, image.tensors[source.name]) for source in sources])

    def image(self, planned: PlannedSave, pool: StagingPool, make: Callable[[int], Region]) -> SnapshotImage | None:
        """Return the memory that the blocks of a full save become; None: those of the pool are used."""
        if self._chain is None or self.path is None or self.is_staged:
            return None
        return self._chain.make_image(planned, pool, make)

    def end(self, written: WrittenSave, published: Published, filename_pattern: str | None) -> None:
        """Let the next save be based on this one, which was published.

        Args:
            written: Its files.
            published: The same, to find out whether they are there still.
            filename_pattern: Names of the files in a directory; None: it is one file.
        """
        chain, path = self._chain, written.path
        if chain is None or path != self.path or chain.image is None:
            return
        if filename_pattern not in (None, DEFAULT_PATTERN):  # other checkpoints may be in the directory
            path = f"{path}/{written.index or written.names[0]}"
        before = () if self.base is None else self.base.published
        depth = 0 if self.base is None else self.base.depth + 1
        is_directory = self._max_shard_bytes is not None
        bases = () if self.base is None else (*self.base.bases, self.base.path)
        chain.base = Base(path, self.metadata[ID_KEY], depth, is_directory, bases, (*before, published))

    def _holds_full(self) -> bool:
        """Return whether the destination is a directory with a full checkpoint: it would be loaded, and not a delta."""
        if self._max_shard_bytes is None or self.path is None:
            return False
        root = getattr(self._destination, "root", None)
        try:
            names = os.listdir(self.path) if root is None else root.listdir()
        except OSError:  # there is nothing, or the transaction says why not
            return False
        return any(self._pattern.matches(name) and FileName(name).without_delta is None for name in names)

    def _may_follow(self, base: Base) -> bool:
        """Return whether this save may be a delta of the last one of its saver."""
        assert self._chain is not None
        if self.path is None or base.depth + 1 >= self._chain.full_every or _relative(base.path, self.path) is None:
            return False
        if base.is_under(self.path):
            return False
        before, now = step_of(base.path), step_of(self.path)
        # A run that went back deletes the higher steps, by `drop_higher` or by itself.
        goes_back = before is not None and now is not None and now.number < before.number
        return not goes_back and base.is_directory == (self._max_shard_bytes is not None) and base.is_there()

    @contextmanager
    def _opened_base(self, plan: WritePlan, operation: Operation[Any]) -> Iterator[tuple[Base, OpenCheckpoint]]:
        """Open the base that the caller named, and require that this save can be a delta of it."""
        given = os.fspath(self._base)  # type: ignore[arg-type]
        path = without_secrets(given).rstrip("/") if is_url(given) else os.path.realpath(given)
        shown = printable(without_secrets(given))
        assert self.path is not None
        if _relative(path, self.path) is None:
            raise ValueError(
                f"base={shown!r} is not beside the destination: a delta names its base relative to the directory that "
                f"holds the delta, here {printable(posixpath.dirname(self.path))!r}; save there, or without base="
            )
        with closing(open_checkpoint(given, OpenOptions(check=operation.check))) as opened:
            opened.require_plain()
            depth = max(0, len(opened.links) - 1)
            if depth >= MAX_LINKS:
                raise ValueError(
                    f"base={shown!r} is the last of {depth} deltas, and a chain has {MAX_LINKS} at most; save without "
                    "base="
                )
            found, wanted = (opened.dtypes_and_shapes(), opened.aliases), _described(plan)
            for what, old, new in zip(("tensor", "name that shares a tensor"), found, wanted, strict=True):
                if differing := [name for name in {**old, **new} if old.get(name) != new.get(name)]:
                    raise MismatchError(
                        f"base={shown!r} has other tensors than this save, so this cannot be a delta; save without "
                        f"base=. The first {what} that differs is {printable(differing[0])!r}",
                        path=path,
                        expected=str(old.get(differing[0])),
                        found=str(new.get(differing[0])),
                    )
            known = opened.id or f"sha256:{digest_of(opened, 'sha256')}"
            bases = [link.path if is_url(link.path) else os.path.realpath(link.path) for link in opened.links]
            base = Base(path, known, depth, True, tuple(bases))
            if base.is_under(self.path):
                raise ValueError(f"base={shown!r} is based on what is at the destination; save to another place")
            yield base, opened
            with ExitStack() as owned:
                for file in opened.open_files(range(len(opened.files)), owned):
                    file.check_unchanged()


def _path_of(destination: object) -> str | None:
    if isinstance(destination, str):
        return os.path.realpath(destination)
    url = str(destination)
    return url.rstrip("/") if is_url(url) and hasattr(destination, "root") else None


def _relative(base: str, delta: str) -> str | None:
    """Return the path of a base relative to the directory that holds the delta, None if it is not below that."""
    folder = posixpath.dirname(delta).rstrip("/")
    name = base.removeprefix(f"{folder}/")
    is_in_the_way = base == delta or base.startswith(f"{delta}/") or not name.isprintable()
    return None if name == base or is_in_the_way or "\\" in name else name


# What differs.


class _ComparedTensor:
    """A tensor that is compared, by pieces of a few megabytes."""

    def __init__(self, source: TensorSource, piece_bytes: int) -> None:
        self.source = source
        self.pieces = [
            (k, start, min(piece_bytes, source.nbytes - start))
            for k, start in enumerate(range(0, source.nbytes, piece_bytes))
        ]
        self.item_bytes = ChangedTensor(source.name, source.dtype, source.shape, 0).item_bytes
        self.comparison = Comparison(source.nbytes // self.item_bytes, self.item_bytes, len(self.pieces))
        self.num_left = len(self.pieces)


class _Comparer:
    """Compares the tensors of one save with the image of another one, on a few threads.

    Args:
        planned: The save. What has changed must fit into its budget, beside the image.
        image: The image, which is brought up to date; or the base, whose tensors are read one by one.
        pool: Staging memory, for tensors on devices and of other layouts: a block for each thread.
        ready: When the tensors may be read.
    """

    def __init__(
        self,
        planned: PlannedSave,
        image: SnapshotImage | OpenCheckpoint,
        pool: StagingPool,
        ready: Readiness,
    ) -> None:
        sources, is_image = planned.files.sources, isinstance(image, SnapshotImage)
        tensors = [_ComparedTensor(source, pool.block_bytes) for source in sources if source.nbytes]
        lazy = [one for one in tensors if isinstance(one.source.data, LazyTensor)]
        others = [one for one in tensors if not isinstance(one.source.data, LazyTensor)]
        others.sort(key=lambda one: one.source.nbytes)  # the last are the first that are taken: the longest
        # Those of a base are read whole. The lazy ones are produced one after the other.
        self._left = [
            [(one, pieces)]
            for one in others
            for pieces in ([[piece] for piece in one.pieces] if is_image else [one.pieces])
        ]
        if lazy:
            self._left.append([(one, one.pieces) for one in lazy])
        self._image, self._pool, self._ready = image, pool, ready
        self._produced = ProducedTensors()
        self._workers = WorkerPool("save", changed=pool.changed, on_stop=self._produced.stop)
        self.stop = self._workers.stop
        """Ends the comparison early; callable from any thread."""
        self._total_bytes = self._max_bytes = sum(source.nbytes for source in sources)
        if is_image and planned.budget_bytes is not None:
            self._max_bytes = planned.budget_bytes
        self._found_bytes = 0
        self.changed_bytes = 0
        """Bytes of the changed elements. Of a tensor that is written whole all count."""
        self.changes: dict[str, Changes | None] = {}
        """By name what has changed, None: most of the tensor. Unchanged tensors are not in it."""
        self.is_full = False
        """Whether that is longer than half of the tensors, or than the budget, so that all of them are written."""

    def run(self) -> None:
        """Compare; returns when nothing uses the tensors any more.

        Raises:
            Cancelled: `stop` was called.
            Exception: The first error of a worker.
        """
        wanted = min(_NUM_THREADS, num_processors(), 1 + self._total_bytes // _BYTES_OF_A_THREAD, len(self._left))
        try:
            self._workers.run(self._work, max(1, wanted))
        finally:
            self._left.clear()
            self._produced.clear()

    def _work(self) -> None:
        scratch: list[Region] = []

        def take() -> Region:
            if not scratch:
                scratch.append(self._take_block())
            return scratch[0]

        try:
            for tensors in self._workers.items(self._left):
                for one, pieces in tensors:
                    self._compare(one, pieces, take)
        finally:
            for block in scratch:
                self._pool.give_back(block)

    def _take_block(self) -> Region:
        with self._pool.changed:
            while not self._workers.stopped:
                if (take := self._pool.try_take()) is not None:
                    break
                self._pool.changed.wait()
            else:
                raise Cancelled
        return take()

    def _compare(
        self, one: _ComparedTensor, pieces: Sequence[tuple[int, int, int]], take: Callable[[], Region]
    ) -> None:
        source, kept = one.source, self._image
        if isinstance(kept, SnapshotImage):
            image = kept.tensors[source.name]
        elif self.is_full:
            return
        else:
            image = read_tensor(kept, kept.info(source.name))
        for k, start, nbytes in pieces:
            if self._workers.stopped:
                raise Cancelled
            if isinstance(source.data, LazyTensor):
                region = take().sub(0, nbytes)
                for copy in self._produced.copies(source, start, region):
                    Readiness().copy_out([copy])
                    del copy  # with the tensor in it, before the next one is made
                address, owner = region.address, region.owner
            else:
                address, owner = self._ready.bytes_at(source, start, nbytes, take)
            if self.is_full:
                move(image.address + start, address, nbytes)
            else:
                one.comparison.compare(k, image.address + start, address, nbytes // one.item_bytes)
            del owner
            mark_progress()
        with self._pool.changed:
            one.num_left -= len(pieces)
            is_last = not one.num_left
        if is_last and not self.is_full:
            self._add(one, one.comparison.changes())

    def _add(self, one: _ComparedTensor, found: Changes | None) -> None:
        """Add what has changed in a tensor, until it is too much."""
        name, nbytes = one.source.name, one.source.nbytes
        if found is not None and not found.count:
            return
        with self._pool.changed:
            self.changes[name] = found
            self.changed_bytes += nbytes if found is None else found.values.nbytes
            self._found_bytes += nbytes if found is None else found.nbytes
            if self._found_bytes > min(self._total_bytes // 2, self._max_bytes):
                self.is_full = True
                self.changes.clear()


def _stored(
    changes: Mapping[str, Changes | None], sources: Sequence[TensorSource]
) -> tuple[list[ChangedTensor], list[TensorSource], list[TensorSource]]:
    """Return the changed tensors, their positions and values, and the tensors that are written whole."""
    changed: list[ChangedTensor] = []
    rows: list[_Row] = []
    for source in sources:
        one = changes.get(source.name)
        if one is None:
            continue
        entry = ChangedTensor(source.name, source.dtype, source.shape, one.count)
        positions, values = names_of(len(changed))
        rows.append(
            (positions, "U8" if one.code_bytes == 1 else "U16", (one.codes.nbytes // one.code_bytes,), one.codes)
        )
        is_packed = prod(source.shape) != entry.num_elements
        rows.append((values, "U8" if is_packed else source.dtype, (one.count,), one.values))
        changed.append(entry)
    whole = [source for source in sources if source.name in changes and changes[source.name] is None]
    return changed, _over(rows), whole


def _over(rows: Sequence[_Row]) -> list[TensorSource]:
    """Return tensors over memory, to save them."""
    tensors = {name: tensors_in(region, [name], ["U8"], [(region.nbytes,)], [0])[name] for name, _, _, region in rows}
    return [
        replace(source, dtype=dtype, shape=shape, storage_key=None)
        for source, (_, dtype, shape, _) in zip(describe_tensors(tensors), rows, strict=True)
    ]
