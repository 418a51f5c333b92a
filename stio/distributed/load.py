"""Loads into modules and nested states that hold `DTensor`s.

A save may replace the checkpoint between the opens of two ranks. So each rank describes what it has opened
(`describe_opened`), and ranks that have opened files at one place must have opened the same files. A place is a path on
one filesystem of one machine, or a URL: other hosts may have copies of their own.

Tensors that several ranks need may be broadcast. Without that each rank reads all that it needs, so a slow store
sends the same bytes once for each rank. Here the ranks first agree on what they need in common (`SharedFill`). Then
each reads its share of that, chunk by chunk, and sends each chunk by a broadcast when it is read
(`placements.py` makes the plan). What a rank needs alone it reads itself after that.

The chunks are sent in one order, a chunk of each rank in turn, in steps of a few (`transfer.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from time import perf_counter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from stio.device import TORCH_DTYPES, LoadedGroup
from stio.distributed.parts import part_of
from stio.distributed.placements import (
    NO_ROWS,
    Chunk,
    ChunkRows,
    RowRange,
    Rows,
    RowTensor,
    common_rows,
    cut_chunks,
    needed_rows,
    rows_of,
)
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.transfer import RankTransfer
from stio.errors import ChangedDuringReadError, FormatError, RankError
from stio.format import Header, row_slices
from stio.limits import Limits
from stio.loading import (
    Delivery,
    Group,
    LoadOptions,
    LoadScheduler,
    Memory,
    fill_from,
    load,
    scheduled,
    select_tensors,
    stored_shape,
)
from stio.loading.targets import Casting, LoadReport, LoadTarget, ModuleTarget, StateTarget, checked_casting
from stio.runtime import Notifier, Operation, run_blocking
from stio.runtime.memory import default_budget_bytes
from stio.runtime.reports import Progress, Trace, traced
from stio.storage import RequestedSource
from stio.storage.checkpoint import CacheLike, OpenCheckpoint, SourceLike
from stio.storage.commit import boot_id
from stio.text import described_by, is_url, keywords_for

Broadcast: TypeAlias = bool | Literal["auto"]
"""Whether ranks send each other what several of them need; `stio.distributed.load_into` describes it."""


@described_by(load)
async def load_into(
    target: object,
    source: SourceLike,
    *,
    memory: Memory = "auto",
    budget_bytes: int | str | None = None,
    strict: bool = True,
    limits: Limits | None = None,
    verify: bool = False,
    follow_symlinks: bool = False,
    progress: Progress = None,
    cache: CacheLike | None = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
    casting: Casting = "safe",
    broadcast: Broadcast = "auto",
    process_group: ProcessGroup | None = None,
    rank_timeout: float = RANK_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into a module or a state that is sharded over ranks; each rank calls this, and reads its part.

    Parameters and buffers that are `DTensor`s get their part of the checkpoint's tensor; others get the whole tensor.
    Works for `fully_shard` (FSDP2), also of a module made on `meta` and given memory by `to_empty`, for tensor
    parallelism (`parallelize_module`), and for both on one mesh. Rows are read alone; of parts of other dimensions
    whole rows are read, as far as that is faster. The call returns when all ranks have loaded. If one fails, is
    cancelled or killed, it raises on all of them; some tensors have new values then.

    Buffers that are not in the checkpoint (`persistent=False`) are not filled; `LoadReport.unfilled` names them. After
    `to_empty` compute them anew.

    A nested state, such as that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, is compared with
    the one that `stio.save_state` saved: tensors are filled in place, numbers, text and None are replaced in their
    containers at the end. The number of ranks may be another one than at the save. A mapping of tensors by name is also
    filled from an ordinary checkpoint.

    Args:
        target: A module; or a state of dictionaries, lists and tuples with `DTensor`s, tensors and plain values. It is
            changed in place, and after an error or a cancel some tensors have new values.
        strict: Module and checkpoint must hold the same names, and a state the same keys. Otherwise what both have is
            loaded; sequences must have the same lengths in any case.
        verify: See `stio.load`. Each rank reads all files for that.
        progress: See `stio.load`. It counts what this rank reads.
        casting: Which dtypes of a nested state may be copied into which, as in numpy: `"safe"`, only if the target
            holds every value exactly (moments in F32 are not copied into BF16); `"same_kind"`, floating ones into any
            floating ones, integers into any integers. For a module and for tensors by name it is `"same_kind"`.
        broadcast: Whether of tensors that several ranks need each rank reads a part and sends it to the others, so that
            no byte is read twice: replicated tensors, copies of HSDP, parts of inner dimensions. `"auto"`: if the
            source is behind a network and most ranks need most of these tensors; not with a `DiskCache`. Files of this
            machine are read faster by each rank. All ranks must pass the same. Has no effect on a nested state.
        process_group: The ranks that call this. None: all ranks of the default group.
        rank_timeout: Seconds without a sign of life of a rank, after which the load fails on all others.
        ...: The other arguments are those of `stio.load`.

    Returns:
        The names that are missing or unexpected (of a state: paths such as `state['step']`); both are empty with
        `strict=True`.

    Raises:
        ValueError: An argument has a wrong value, or `broadcast` differs between ranks.
        MismatchError: Target and checkpoint differ, a tensor is on `meta`, or a placement cannot be loaded.
        FormatError: The nested state in the checkpoint is malformed.
        ChangedDuringReadError: The checkpoint was replaced while ranks opened it.
        RankError: The load failed on another rank, whose error is `__cause__`.
        StioError: See `stio.load`.
    """
    given = locals()
    async with Ranks(process_group, about="load", timeout=rank_timeout) as ranks:
        options = LoadOptions(**keywords_for(LoadOptions, given))
        if not (isinstance(broadcast, bool) or broadcast == "auto"):
            raise ValueError(f"broadcast= takes True, False or 'auto', not {broadcast!r}")
        shared = SharedFill(ranks, options, broadcast, source)
        report = await fill_from(
            source,
            _filled(target, checked_casting(casting)),
            options,
            on_begin=ranks.bind,
            fill_first=shared.fill,
        )
        require_same(await ranks.arrive("loaded", shared.opened_as), path=report.path)
        return report


def _filled(target: object, casting: Casting) -> LoadTarget:
    """Return what fills a module or a state."""
    if not isinstance(target, nn.Module):
        return StateTarget(target, part_of=part_of, casting=casting)
    for part in target.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # or the next forward would use what was gathered before the load
    return ModuleTarget(target, part_of=part_of)


_DIGEST_BYTES = 16


def describe_opened(opened: OpenCheckpoint, source: object) -> bytes:
    """Return what ranks compare by `require_same`; empty if another rank cannot compare it.

    Args:
        opened: The checkpoint.
        source: As the caller named it: a link may lead elsewhere now.
    """
    if not isinstance(source, str | os.PathLike):
        return b""
    name, identities = os.fspath(source), [file.identity for file in opened.files]
    if all(one.etag for one in identities):
        place, states = repr(name), [one.etag for one in identities]
    elif boot_id() and all(one.device for one in identities):
        devices = sorted({one.device for one in identities})
        place = repr((boot_id(), name if is_url(name) else os.path.abspath(name), devices))
        states = [f"{one.nbytes} {one.mtime_ns}" for one in identities]
    else:
        return b""
    files = [(header.shard, state) for header, state in zip(opened.headers, states, strict=True)]
    return _digest(place) + _digest(repr(files))


def require_same(found: Sequence[bytes], *, path: str) -> None:
    """Require that ranks have opened the same checkpoint.

    Args:
        found: `describe_opened` of each rank.
        path: For messages.

    Raises:
        ChangedDuringReadError: Two ranks have opened different files at the same place.
    """
    first: dict[bytes, int] = {}
    for rank, one in enumerate(found):
        other = first.setdefault(one[:_DIGEST_BYTES], rank)
        if found[other] != one:
            raise ChangedDuringReadError(
                f"ranks {other} and {rank} have opened different checkpoints: it was replaced between their opens; "
                "load it again",
                path=path,
            )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


# The broadcast.

CHUNK_BYTES = 8 << 20
"""Largest chunk: one request to a store. At 1 Gbit/s it takes 70 ms to another host."""

_MIN_CHUNK_BYTES = 64 << 10
_CHUNKS_IN_BUDGET = 16
"""The budget holds the chunk that is received, and those that are read ahead."""

_MIN_SHARED_BYTES = 4 << 20
"""With `"auto"`, fewer bytes are read by each rank: the agreement takes longer."""

_MAX_CHUNKS_IN_STEP = 4
"""Chunks that are sent between two looks at failures."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is sent, the same on all ranks."""

    opened: OpenCheckpoint
    """The checkpoint."""
    tensors: Sequence[RowTensor]
    """All tensors of the checkpoint."""
    chunks: Sequence[Chunk]
    """See `cut_chunks`."""


class _Need(msgspec.Struct, array_like=True):
    """What a rank needs. A rank that takes no part in a broadcast shares None in its place."""

    checkpoint: bytes
    """Digest of the checkpoint that it has opened."""
    required: bool
    """Whether it has `broadcast=True`."""
    budget_bytes: Annotated[int, msgspec.Meta(ge=1)]
    rows: list[RowRange]
    """Of each tensor."""


class _Agreement(msgspec.Struct, array_like=True):
    """What the first rank has decided. None in its place: no broadcast."""

    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]
    rows: list[RowRange]
    """Of each tensor, the rows that are sent."""


class SharedFill:
    """Fills the tensors that several ranks need, before each rank reads the rest.

    Args:
        ranks: The ranks.
        options: Options of the load.
        broadcast: See `load_into`. All ranks must give the same.
        source: The checkpoint, as the caller named it.
    """

    def __init__(self, ranks: Ranks, options: LoadOptions, broadcast: Broadcast, source: object) -> None:
        self._ranks, self._options, self._broadcast, self._source = ranks, options, broadcast, source
        self.opened_as = b""
        """The result of `describe_opened`, once the checkpoint is open."""

    def fill(
        self, operation: Operation[Any], opened: OpenCheckpoint, target: LoadTarget, names: list[str]
    ) -> list[str]:
        """Fill what is sent, and return the names that remain. A `FillSome` for `fill_from`.

        All ranks call it. When it returns or raises, no thread uses memory of the module or of the broadcast.

        Args:
            operation: The operation of the load, on whose thread this runs.
            opened: The checkpoint.
            target: The module, compared with the checkpoint. Of another target nothing is filled.
            names: Names to load.

        Raises:
            Cancelled: The operation was cancelled.
            RankError: A rank has failed, or the connection to it broke.
            ValueError: `broadcast` differs between ranks.
            ChangedDuringReadError: Ranks have opened different checkpoints.
        """
        self.opened_as = describe_opened(opened, self._source)
        with traced(self._options.trace, "agree"):
            plan = self._agree(opened, target, names)
        if plan is None or not isinstance(target, ModuleTarget):
            return names
        sent = {plan.tensors[piece.tensor].name for chunk in plan.chunks for piece in chunk.pieces}
        _Broadcast(operation, plan, target, self._ranks, self._options).fill()
        return [name for name in names if name not in sent]

    def _agree(self, opened: OpenCheckpoint, target: LoadTarget, names: Sequence[str]) -> _Plan | None:
        """Return what is sent, which the first rank decides; None if each rank reads what it needs."""
        ranks, options, required = self._ranks, self._options, self._broadcast is True
        takes_part = required or (self._broadcast == "auto" and _may_pay(opened, options))
        if ranks.num_ranks == 1 or not takes_part or not isinstance(target, ModuleTarget) or target.keeps:
            ranks.share("need", None)
            if ranks.rank == 0:
                ranks.share("decision", None)
            return None
        tensors = _tensors(opened)
        whole = [name for name in names if name not in opened.patches]  # the others are read, and changed, by each rank
        need = _Need(
            checkpoint=_layout_digest(opened),
            required=required,
            budget_bytes=options.budget or default_budget_bytes(),
            rows=_needs(tensors, target, whole, path=opened.path),
        )
        ranks.share("need", need)
        if ranks.rank == 0:
            needs = [run_blocking(ranks.fetch("need", of=rank, kind=_Need | None)) for rank in range(ranks.num_ranks)]
            ranks.share("decision", _decide(tensors, needs, required=required, path=opened.path))
        decision: _Agreement | None = run_blocking(ranks.fetch("decision", kind=_Agreement | None))
        if decision is None:
            _require_agreement(required, 0)
            return None
        _require_rows(decision.rows, tensors)
        chunks = cut_chunks(tensors, decision.rows, ranks.num_ranks, decision.chunk_bytes)
        return _Plan(opened, tensors, chunks) if chunks else None


def _may_pay(opened: OpenCheckpoint, options: LoadOptions) -> bool:
    """Return whether the source is behind a network, and each rank would read from there.

    Files in the page cache are read faster by each rank. A `DiskCache` reads each object once for all ranks of a host.
    """
    is_remote = any(isinstance(file, RequestedSource) for file in opened.files)
    return is_remote and options.disk_cache is None and not options.verify


def _require_agreement(required: bool, rank: int) -> None:
    if required:
        raise ValueError(f"broadcast= must be the same on all ranks; rank {rank} does not broadcast")


def _decide(
    tensors: Sequence[RowTensor], found: Sequence[_Need | None], *, required: bool, path: str
) -> _Agreement | None:
    """Return the decision of the first rank."""
    needs = [need for need in found if need is not None]
    if len(needs) < len(found):
        _require_agreement(required, found.index(None))
        return None
    require_same([_digest("") + need.checkpoint for need in needs], path=path)  # of one place
    for need in needs:
        _require_rows(need.rows, tensors)
    of_ranks = [need.rows for need in needs]
    rows = [common_rows(one) for one in zip(*of_ranks, strict=True)]
    sent = sum((end - begin) * one.rows.nbytes for one, (begin, end) in zip(tensors, rows, strict=True))
    if not any(need.required for need in needs):
        # All ranks receive all that is sent. If most of it is of no use to most of them, to read it is less work.
        needed = sum(
            (end - begin) * one.rows.nbytes
            for of_rank in of_ranks
            for one, (begin, end), common in zip(tensors, of_rank, rows, strict=True)
            if common != NO_ROWS
        )
        if sent < _MIN_SHARED_BYTES or 2 * needed < sent * len(needs):
            return None
    chunk_bytes = min(need.budget_bytes for need in needs) // _CHUNKS_IN_BUDGET
    chunk_bytes = max(_MIN_CHUNK_BYTES, min(CHUNK_BYTES, chunk_bytes))
    return _Agreement(chunk_bytes, rows)


def _tensors(opened: OpenCheckpoint) -> list[RowTensor]:
    found = []
    for file, header in enumerate(opened.headers):
        columns = zip(header.names, header.dtypes, header.shapes, header.begins, strict=True)
        for name, dtype, shape, begin in columns:
            try:
                items, item_bytes = stored_shape(dtype, shape, name=name)
                rows = rows_of(items, item_bytes)
            except FormatError:  # rows that do not end on a byte; a load of the tensor says so
                items, rows = shape, Rows(0, 0, 0)
            found.append(RowTensor(name, file, begin, dtype, items, rows))
    return found


def _needs(tensors: Sequence[RowTensor], target: ModuleTarget, names: Sequence[str], *, path: str) -> list[RowRange]:
    """Return the rows of each tensor that this rank needs."""
    wanted, slices = set(names), target.slices
    TORCH_DTYPES.require([one.dtype for one in tensors if one.name in wanted], path=path)
    needs = []
    for one in tensors:
        if one.name not in wanted:
            needs.append(NO_ROWS)
        elif one.name in slices:
            needs.append(needed_rows(one.rows, slices[one.name]))
        else:
            needs.append((0, one.rows.num))
    return needs


def _require_rows(rows: Sequence[RowRange], tensors: Sequence[RowTensor]) -> None:
    """Require that another rank has sent rows that the tensors have.

    Raises:
        RankError: It has not.
    """
    fit = [0 <= begin <= end <= one.rows.num for one, (begin, end) in zip(tensors, rows, strict=False)]
    if len(rows) != len(tensors) or not all(fit):
        raise RankError("a rank has sent no valid rows of the tensors; do all ranks run the same stio?")


def _layout_digest(opened: OpenCheckpoint) -> bytes:
    """Return a digest of a checkpoint's layout, and of what names its content and is the same on all hosts."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file, header in zip(opened.files, opened.headers, strict=True):
        digest.update(repr((header.shard, header.data_start, file.identity.nbytes, file.identity.etag)).encode())
        for rows in row_slices(len(header)):
            columns = (header.names, header.dtypes, header.shapes, header.ends)
            digest.update(repr([column[rows] for column in columns]).encode())
    return digest.digest()


class _Broadcast(RankTransfer):
    """The broadcast of all chunks. Threads read those of this rank, within the budget, ahead of their broadcast.

    For the load that does it, the checkpoint consists of chunks: tensors of bytes.

    Args:
        operation: The operation of the load, on whose thread this runs.
        plan: What is sent.
        target: Is filled.
        ranks: The ranks.
        options: Options of the load.
    """

    def __init__(
        self, operation: Operation[Any], plan: _Plan, target: ModuleTarget, ranks: Ranks, options: LoadOptions
    ) -> None:
        self._notifier = Notifier()
        reading = Operation(self._read_own, name="share", about=plan.opened.path, notifier=self._notifier)
        super().__init__(ranks, operation, reading, "broadcast", range(len(plan.chunks)))
        self._plan, self._target, self._trace = plan, target, options.trace
        budget_bytes = options.budget or default_budget_bytes()
        received_bytes = max(chunk.nbytes for chunk in plan.chunks)
        self._received = torch.empty(received_bytes, dtype=torch.uint8, device="cpu")
        self._options = replace(
            options,
            device="cpu",
            dtype=None,
            memory=options.memory if options.memory in ("auto", "map", "copy") else "auto",
            budget_bytes=max(budget_bytes - received_bytes, budget_bytes // 2, 1),
        )
        self._read: dict[int, tuple[Group, torch.Tensor]] = {}  # by chunk; bytes that were not sent yet
        self._num_unsent: dict[int, int] = {}  # by group
        self._scheduler: LoadScheduler | None = None

    def fill(self) -> None:
        """Send all, and fill the target. When this returns or raises, no thread reads."""
        self._target.synchronize()
        self.run()  # the files are known to be unchanged then

    def _is_own(self, number: int) -> bool:
        return number % self._ranks.num_ranks == self._ranks.rank

    # On the thread that reads.

    def _read_own(self, operation: Operation[None]) -> None:
        opened = self._plan.opened
        own = [(number, chunk) for number, chunk in enumerate(self._plan.chunks) if self._is_own(number)]
        headers = [
            _in_chunks(header, [(number, chunk) for number, chunk in own if chunk.file == file])
            for file, header in enumerate(opened.headers)
        ]
        in_chunks = replace(opened, headers=headers, aliases={}, manifest=None, patches={})
        selected = select_tensors(in_chunks, [str(number) for number, _ in own], self._options)
        delivery = Delivery(deliver=self._deliver, hold=True, keeps=False)
        scheduler = scheduled(selected, delivery)
        self._scheduler = scheduler
        try:
            scheduler.run_for(operation)
        finally:
            self._scheduler = None  # it refers to this object

    def _deliver(self, group: Group, loaded: LoadedGroup) -> None:
        self._num_unsent[group.index] = len(loaded.tensors)
        self._read.update((int(name), (group, data)) for name, data in loaded.tensors.items())
        self._notifier.notify()

    # On the thread of the load.

    def _wait(self, seconds: float) -> None:
        self._notifier.block_until(lambda: self._num_ready() > 0 or self._beside.failure is not None, seconds)

    def _num_ready(self) -> int:
        num_ready = 0
        for number in islice(self._left, _MAX_CHUNKS_IN_STEP):
            if self._is_own(number) and number not in self._read:
                break
            num_ready += 1
        return num_ready

    def _send(self, items: Sequence[int]) -> None:
        for number in items:
            self._send_chunk(number)

    def _send_chunk(self, number: int) -> None:
        """Send a chunk, or receive it; and copy what this rank needs of it."""
        chunk, is_own = self._plan.chunks[number], self._is_own(number)
        data = self._read[number][1] if is_own else self._received[: chunk.nbytes]
        begin, how = perf_counter(), dist.BroadcastOptions()
        how.rootRank = number % self._ranks.num_ranks
        sending = self._group.broadcast([data], how)
        if is_own:
            self._copy_all(chunk, data)
        sending.wait()
        if self._trace is not None:
            self._trace.add("send" if is_own else "receive", begin, perf_counter(), num_bytes=chunk.nbytes)
        if not is_own:
            self._copy_all(chunk, data)
            return
        del data
        self._release(number)

    def _release(self, number: int) -> None:
        """Release the memory of a chunk that was sent."""
        group, _ = self._read.pop(number)
        self._num_unsent[group.index] -= 1
        scheduler = self._scheduler
        if not self._num_unsent[group.index] and scheduler is not None:
            scheduler.release(group)

    def _copy_all(self, chunk: Chunk, data: torch.Tensor) -> None:
        """Copy what this rank needs of a chunk. An error is kept: others wait for this rank in the next step."""
        if self._error is None and not self._operation.cancelled:
            try:
                for piece in chunk.pieces:
                    self._copy(piece, data)
            except BaseException as error:
                self._error = error

    def _copy(self, piece: ChunkRows, data: torch.Tensor) -> None:
        one = self._plan.tensors[piece.tensor]
        dtype, num_rows = TORCH_DTYPES[one.dtype], piece.rows[1] - piece.rows[0]
        part = data[piece.offset : piece.offset + num_rows * one.rows.nbytes]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
            part = part.clone()
        shape = (*one.shape[: one.rows.dim], num_rows, *one.shape[one.rows.dim + 1 :]) if one.shape else ()
        self._target.copy_rows(one.name, part.view(dtype).view(shape), one.rows.dim, piece.rows[0], one.shape)


def _in_chunks(header: Header, chunks: Sequence[tuple[int, Chunk]]) -> Header:
    """Return a header in which some chunks of the file are tensors of bytes, and so is all that is between them."""
    names, edges = list[str](), [0]
    for number, chunk in chunks:
        names += [f"before {number}", str(number)]
        edges += [chunk.begin, chunk.begin + chunk.nbytes]
    names.append("rest")
    edges.append(header.data_end)
    shapes: list[tuple[int, ...]] = [(end - begin,) for begin, end in pairwise(edges)]
    dtypes = ["U8"] * len(names)
    return replace(header, names=names, dtypes=dtypes, shapes=shapes, begins=edges[:-1], ends=edges[1:])
