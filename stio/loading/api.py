"""The public functions that load: `open`, `load`, `load_into`, and the `Checkpoint` and `Stream` that they return.

Each is one coroutine that starts an operation (`stio.loading.body`) and waits for it, on asyncio, uvloop or trio;
`stio.sync` runs the same coroutines in a thread without a loop. No task group and no cancel scope of stio is open while
the caller's code runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from stio import process
from stio.device import Lost, TorchEvent
from stio.errors import ClosedError, printable
from stio.format import TensorInfo
from stio.limits import Limits
from stio.loading.body import FillSome, collect, fill, open_with_options, reading_operation, scheduled
from stio.loading.casts import DtypesLike
from stio.loading.consumers import GroupQueue
from stio.loading.options import DevicesLike, LoadOptions, Memory
from stio.loading.plan import Names
from stio.loading.read_paths import Delivery
from stio.loading.select import (
    PlacementsLike,
    checked_placements,
    plain_names,
    reusable_names,
    select_tensors,
    shards_of,
)
from stio.loading.targets.base import LoadReport, LoadTarget
from stio.loading.targets.module import ModuleTarget
from stio.runtime import AsyncOnly, Operation, close_all, runs_blocking
from stio.runtime.reports import Progress, Trace, shown
from stio.storage.checkpoint import CacheLike, OpenCheckpoint, SourceLike
from stio.text import counted, described_by, keywords_for, show_bytes


async def load(
    source: SourceLike,
    *,
    names: Names | None = None,
    slices: Mapping[str, object] | None = None,
    placements: PlacementsLike | None = None,
    device: DevicesLike = "cpu",
    dtype: DtypesLike | None = None,
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
) -> dict[str, torch.Tensor]:
    """Load a checkpoint.

    A cancel ends the load. It is raised when no thread writes to the load's memory any more.

    Args:
        source: A `.safetensors` (or `.sft`) file, a directory (its `model.safetensors.index.json`, its only other
            index, its only `*.safetensors`, or its complete set of shards), an index file, or a storage of your own
            (`stio.storage.base.Root`). Names that begin with a dot do not count, and a variant
            (`model.fp16.safetensors`) is loaded instead of another checkpoint only if it is named. A URL of one of
            these with `s3://`, `gs://`, `az://`, `http://` or `https://` needs the extra `remote`; its bytes are
            streamed, never mapped. `hf://owner/name@revision` needs the extra `hub`; its files are in the hub's cache
            before the load begins.
        names: What to load: one name, several names, or a predicate that gets a name. None: everything. Only the shards
            that hold these names by the index are opened; the others may be missing, and are not checked.
        slices: By name, an index as `numpy.s_[...]` gives it; only the bytes of that part are read, and short gaps
            between them. A list of slices selects several intervals of a dimension, one after the other.
        placements: A `stio.distributed.Placements`: this rank reads its part of each tensor, and gets `DTensor`s. No
            other rank is waited for, or compared with this one. A tensor with an index in `slices` must be replicated.
            Without `names` and with `strict`, each rule must fit a tensor.
        device: Device of the tensors: an argument of `torch.device`, or `"auto"`. Or one device for each tensor: a
            mapping from names, and from prefixes of names that end at a dot (the longest one counts, `""` means all
            others), or a callable that gets a name.
        dtype: Cast floating tensors to it: a dtype of torch, or its name in torch or in the format (`"bfloat16"` or
            `"BF16"`). Scales of quantized weights are not cast; quantized weights that have scales are refused, and so
            is a dtype that would lose the values, such as `"int8"`. Or a mapping from names, or a function of the name,
            that casts these tensors only, whatever they are. None: as stored.
        memory: How tensors on the CPU get their memory: `"map"` maps the files and reads them now, `"lazy"` maps
            them and reads at the first use, `"copy"` reads into memory of their own, `"auto"` chooses between `"map"`
            and `"copy"` by the filesystem. A file that the system refuses to map is copied, with a line in the log. Of
            a delta, files with tensors of which it has changed elements are copied too.
            `"gds"` reads from the disk into the memory of a GPU by GPUDirect Storage (needs NVIDIA's cuFile), and falls
            back to staged reads with a warning.
        budget_bytes: Most bytes between storage and the consumer at one time: a number, or text such as `"2GB"` or
            `"512MiB"`. None: 512 MiB, or 256 MiB if tensors go to an accelerator; less where memory is short.
        strict: Index and shards must hold the same names. With False, and for `names`, the index decides where they
            differ, with a warning.
        limits: Bounds on the numbers in a file, as a `stio.Limits`.
        verify: Compare every file with the checkpoint's manifest before any tensor is returned. Without a manifest,
            files in the hub's cache are compared with their names there.
        follow_symlinks: Allow shards that are links to a place outside the checkpoint's directory.
        progress: A callable that gets a `stio.ProgressEvent`, `True` for a tqdm bar, or a tqdm class.
        cache: A `stio.HostCache`: files in it are not read again, and files that are read may be added to it. Tensors
            on the CPU are then copies. Or a `stio.DiskCache`: what was read from a URL is on this machine's disk for
            the next load, and is mapped from there. Or a tuple of one of each: objects go to the disk, and to memory.
        trace: A `stio.Trace` that records what each thread did and when.
        switch_interval: The interpreter's switch interval during the load, in seconds. None: unchanged.

    Returns:
        Tensors by name, in the order of their data, with the shapes of the header (or of the slices), on `device`.
        Tied weights are the same tensor under each name. Each tensor has a storage of exactly its bytes, and is valid
        as long as it is referenced. No file stays open; with `memory="map"` or `"lazy"` the mappings do.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has a wrong value, or two of them contradict each other.
        IntegrityError: With `verify=True`: a file differs from the checkpoint's manifest, or there is none.
        StioError: See `stio.errors`.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))
    chosen, placements = reusable_names(names), checked_placements(placements)
    take = await reading_operation(
        source,
        options,
        lambda operation, opened: collect(
            operation, select_tensors(opened, chosen, options, slices=slices, placements=placements)
        ),
        shards_of=partial(shards_of, names=chosen, slices=slices, strict=strict),
    ).wait()
    return take()


@described_by(load)
async def load_into(
    module: nn.Module,
    source: SourceLike,
    *,
    assign: bool = False,
    device: DevicesLike = "cpu",
    dtype: DtypesLike | None = None,
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
) -> LoadReport:
    """Load a checkpoint into a module.

    Names and shapes are compared before any tensor is read. A cancel ends the load, and is raised when no thread writes
    to its memory. After a cancel or an error some of the module's tensors have new values.

    Args:
        module: The target. The result is that of its `load_state_dict`. If it has load hooks, overridden methods of a
            load or extra state, all tensors are loaded first, and `load_state_dict` runs on the load's thread: the
            whole state is in host memory once. A module for which that is not possible is refused before anything is
            changed. So is a tensor whose memory was freed or shrunk, or is read-only. Do not free or shrink memory
            during the load.
        assign: Replace the module's tensors (they may be on `meta`) instead of copying into them.
        device: Device of the new tensors, with `assign=True` only. Otherwise tensors stay where they are. The forms are
            those of `stio.load`.
        strict: Module and checkpoint must hold the same names.
        ...: The other arguments are those of `stio.load`.

    Returns:
        A report: the names that are missing or unexpected (both are empty with `strict=True`), and the buffers that no
        checkpoint holds (`persistent=False`), which are not filled.

    Raises:
        MismatchError: Module and checkpoint differ, a tensor of the module cannot be filled, or a copy into its dtype
            would lose the values (floats into integers).
        StioError: See `stio.load`.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))
    target = ModuleTarget(module, assign=assign)
    target.warn_of_device(device)
    return await fill_from(source, target, options)


async def fill_from(
    source: SourceLike | OpenCheckpoint,
    target: LoadTarget,
    options: LoadOptions,
    *,
    on_begin: Callable[[Operation[Any]], object] = lambda operation: None,
    fill_first: FillSome | None = None,
) -> LoadReport:
    """Load a checkpoint into a target; see `load_into`.

    Args:
        source: See `load_into`. An open checkpoint stays open, and is not verified.
        target: What is filled.
        options: Options of the load.
        on_begin: Called with the operation of the load, before it is started. If it is cancelled, this raises
            `ClosedError`.
        fill_first: Called when names and shapes have been compared, before tensors are read.
    """

    def body(operation: Operation[None], queue: GroupQueue) -> None:
        fill(operation, queue, source, target, options, fill_first)

    about = source.path if isinstance(source, OpenCheckpoint) else shown(source)
    queue = GroupQueue(body, name="load_into", about=about, trace=options.trace)
    on_begin(queue.operation)
    queue.operation.start()
    try:
        while (loaded := await queue.next()) is not None:
            target.copy(loaded)
            del loaded  # the next call returns its memory to the budget
    except GeneratorExit:
        queue.operation.cancel()  # a coroutine that is closed must not wait
        target.discard()
        raise
    except BaseException:
        try:
            await queue.aclose()  # a copy failed: the remaining groups have no consumer
        finally:
            target.discard()
        raise
    report = target.complete()
    await _settle(target.lost)
    target.lost.report(report.path)
    return report


async def _settle(lost: Lost) -> None:
    """Wait for the numbers of lost values that devices compute, outside of the event loop's thread."""
    devices = {number.device for number in lost.values() if isinstance(number, torch.Tensor)}
    if devices:
        events = [TorchEvent.now(device) for device in devices]

        def body(operation: Operation[None]) -> None:
            for event in events:
                event.synchronize()

        await Operation(body, name="load").wait()


@described_by(load)
def open(
    source: SourceLike,
    *,
    device: DevicesLike = "cpu",
    dtype: DtypesLike | None = None,
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
) -> Checkpoint:
    """Return a checkpoint to be opened by `async with`. Nothing is read before the block is entered.

    Args:
        budget_bytes: See `stio.load`. Each operation on the checkpoint has a budget of its own.
        strict: Index and shards, and a module and the checkpoint, must hold the same names.
        verify: Hash all files on entering the block and compare them with the manifest; raises as `stio.load` does.
        ...: The other arguments are those of `stio.load`.

    Returns:
        The checkpoint; it can be entered once.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has a wrong value, or two of them contradict each other.
        StioError: On entering the block; see `stio.load`.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))
    return Checkpoint(source, options)


class Checkpoint(AsyncOnly):
    """An open checkpoint, made by `async with stio.open(...)`.

    Leaving the block cancels its operations under way, waits for their threads, and closes the files. Tensors that were
    returned stay valid. Outside the block every method raises `ClosedError`.

    Args:
        source: The checkpoint.
        options: Options of the open and of the loads.
    """

    _sync_name = "open"

    def __init__(self, source: SourceLike, options: LoadOptions) -> None:
        self._source = source
        self._options = options
        self._opened: OpenCheckpoint | None = None
        # By id: a `WeakSet` cannot be listed while another thread adds to it.
        self._operations: weakref.WeakValueDictionary[int, Operation[Any]] = weakref.WeakValueDictionary()

    @property
    def _now(self) -> OpenCheckpoint:
        if self._opened is None:
            raise ClosedError("the checkpoint is not open; use it inside its `with` block", path=shown(self._source))
        return self._opened

    def __repr__(self) -> str:
        opened = self._opened
        if opened is None:
            return f"<Checkpoint {printable(shown(self._source))!r}, not open>"
        headers = opened.headers
        parts = [counted(sum(map(len, headers)), "tensor"), show_bytes(sum(header.data_bytes for header in headers))]
        if len(headers) > 1:
            parts.append(counted(len(headers), "shard"))
        if opened.aliases:
            parts.append(f"tied names: {len(opened.aliases):,}")
        return f"<Checkpoint {printable(opened.path)!r}: {', '.join(parts)}>"

    def keys(self) -> list[str]:
        """Return the names of all tensors in the order of their data, aliases last."""
        opened = self._now
        return [name for header in opened.headers for name in header.names] + list(opened.aliases)

    def __len__(self) -> int:
        return sum(len(header) for header in self._now.headers) + len(self._now.aliases)

    def __contains__(self, name: object) -> bool:
        return any(name in header for header in self._now.headers) or name in self._now.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Text metadata of the shards and of their index."""
        return self._now.metadata

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share another tensor's data (tied weights), to that tensor's name."""
        return self._now.aliases

    def info(self, name: str) -> TensorInfo:
        """Return the entry of a tensor in the header: dtype, shape, shard and offsets.

        Raises:
            TensorNotFoundError: There is no tensor of this name.
        """
        return self._now.info(_checked_name(name))

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise RuntimeError("the checkpoint is open already; make another one by stio.open")
        source, options = self._source, self._options

        def body(operation: Operation[Any]) -> OpenCheckpoint:
            opened = open_with_options(operation, source, options)
            operation.set_log_detail(lambda: f"{len(opened.files):,} files")
            return opened

        operation = Operation(body, name="open", about=shown(source), discard=OpenCheckpoint.close)
        self._opened = await operation.wait()
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        await self._close(may_wait=kind is not GeneratorExit or runs_blocking())

    async def aclose(self) -> None:
        """Cancel operations under way, wait until they have ended, and close the files. Idempotent."""
        await self._close()

    async def _close(self, *, may_wait: bool = True) -> None:
        opened, self._opened = self._opened, None
        # After the assignment: `_own` registers an operation first, and looks at `_opened` then.
        operations = [one for known in self._operations.valuerefs() if (one := known()) is not None]
        await close_all(operations, (lambda: None) if opened is None else opened.discard, may_wait=may_wait)

    @described_by(load)
    async def load(
        self,
        names: Names | None = None,
        slices: Mapping[str, object] | None = None,
        *,
        placements: PlacementsLike | None = None,
    ) -> dict[str, torch.Tensor]:
        """Load tensors; see `stio.load`.

        Args:
            ...: The other arguments are those of `stio.load`.

        Returns:
            See `stio.load`.

        Raises:
            ClosedError: The checkpoint is not open, or was closed during the load.
            StioError: See `stio.load`.
        """
        take = await self._load_operation(names, slices, checked_placements(placements)).wait()
        return take()

    async def read(self, name: str, index: object = None) -> torch.Tensor:
        """Load one tensor, or a part of it.

        Args:
            name: Name of the tensor.
            index: An index as in `tensor[index]`, made by `numpy.s_[...]`; only the bytes of that part are read. None:
                the whole tensor.

        Returns:
            The tensor, or a tensor of the shape of `tensor[index]`, on the checkpoint's `device`.

        Raises:
            TensorNotFoundError: There is no tensor of this name.
            SliceError: The index does not fit the shape of the tensor.
            ClosedError: The checkpoint is not open, or was closed during the read.
        """
        _checked_name(name)
        slices = None if index is None else {self._now.aliases.get(name, name): index}
        take = await self._load_operation(name, slices).wait()
        return take()[name]

    def _options_here(self) -> LoadOptions:
        """Return the options, with the calling thread's current streams."""
        return replace(self._options, streams=None)

    @described_by(load)
    def stream(
        self,
        names: Names | None = None,
        slices: Mapping[str, object] | None = None,
        *,
        placements: PlacementsLike | None = None,
    ) -> Stream:
        """Return a stream of the tensors as they become ready, within the budget; see `Stream`.

        Args:
            ...: The other arguments are those of `stio.load`.
        """
        opened, options, placed = self._now, self._options_here(), checked_placements(placements)

        def body(operation: Operation[None], queue: GroupQueue) -> None:
            with process.switch_interval(options.switch_interval):
                selected = select_tensors(opened, names, options, slices=slices, placements=placed)
                scheduler = scheduled(selected, Delivery(deliver=queue.put, hold=True, keeps=False))
                queue.attach(scheduler, opened.aliases)
                scheduler.run_for(operation)  # the consumer releases the budget, so reading waits for it

        queue = GroupQueue(body, name="stream", about=opened.path, trace=options.trace)
        self._own(queue.operation)
        return Stream(queue)

    @described_by(load_into)
    async def load_into(self, module: nn.Module, *, strict: bool | None = None, assign: bool = False) -> LoadReport:
        """Load into a module; see `stio.load_into`.

        Args:
            strict: See `stio.load_into`. None: the value of `stio.open`.
            ...: The other arguments are those of `stio.load_into`.

        Returns:
            See `stio.load_into`.

        Raises:
            ClosedError: The checkpoint is not open, or was closed during the load.
            StioError: See `stio.load_into`.
        """
        options = self._options_here()
        if strict is not None:
            options = replace(options, strict=strict)
        return await fill_from(self._now, ModuleTarget(module, assign=assign), options, on_begin=self._own)

    def _load_operation(
        self, names: Names | None, slices: Mapping[str, object] | None, placements: PlacementsLike | None = None
    ) -> Operation[Callable[[], dict[str, torch.Tensor]]]:
        opened, options = self._now, self._options_here()

        def body(operation: Operation[Any]) -> Callable[[], dict[str, torch.Tensor]]:
            with process.switch_interval(options.switch_interval):
                selected = select_tensors(opened, names, options, slices=slices, placements=placements)
                return collect(operation, selected)

        return self._own(Operation(body, name="load", kind="load", about=opened.path))

    def _own(self, operation: Operation[Any]) -> Operation[Any]:
        """Register an operation, which is cancelled when the checkpoint is closed."""
        self._operations[id(operation)] = operation
        if self._opened is None:
            raise ClosedError("the checkpoint was closed", path=shown(self._source))
        return operation


def _checked_name(name: str) -> str:
    """Return the name of one tensor.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is text, not {printable(name)}; load() takes several names")
    return name


class Stream(AsyncOnly, AsyncIterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor, in the order in which they become ready.

    Reading is ahead of the consumer by at most the budget. Iterate the stream, or enter it by `async with` first. The
    load ends when the block is left, when the wait for the next tensor is cancelled, or when the stream is deleted.
    Tensors that were returned stay valid. A stream frees the device memory of dropped tensors when its next group is
    taken, and when it ends, is closed or is deleted.

    Args:
        queue: Its groups; the operation is not started.
    """

    _sync_name = "open"

    def __init__(self, queue: GroupQueue) -> None:
        self._queue = queue
        self._pairs: deque[tuple[str, torch.Tensor]] = deque()
        self._storages: list[torch.UntypedStorage] = []  # of the group that was taken
        self._begun = self._closed = False

    def promote(self, names: str | Iterable[str]) -> None:
        """Read these tensors before all others whose read has not started.

        Args:
            names: One name, or several.

        Raises:
            TypeError: It is neither a name nor names.
        """
        self._queue.promote(plain_names(names))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        pair = self._take_nowait() or await self._take()
        if pair is None:
            raise StopAsyncIteration
        return pair

    def _take_nowait(self) -> tuple[str, torch.Tensor] | None:
        """Return the next name and tensor of the group that was taken; None if there is none."""
        try:
            return self._pairs.popleft()
        except IndexError:
            return None

    async def _take(self) -> tuple[str, torch.Tensor] | None:
        """Return the next name and tensor, None at the end."""
        while True:
            if pair := self._take_nowait():
                return pair
            self._storages = []
            self._begin()
            group = await self._queue.next()
            if group is None:
                return self._take_nowait()  # one of another consumer, which has left
            tensors = group.take()
            # Only those of one group, even if there are several consumers: no budget counts what is held here.
            self._storages = [] if self._closed else group.device_storages()
            self._pairs.extend(tensors.items())
            del group, tensors

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is GeneratorExit and not runs_blocking():
            self._closed = True
            self._discard()
            self._queue.operation.cancel()  # a coroutine that is closed must not wait
        else:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel the load, and wait until its threads have ended. Idempotent."""
        self._closed = True
        self._discard()
        await self._queue.aclose()

    def _discard(self) -> None:
        self._pairs.clear()
        self._storages = []

    def _begin(self) -> None:
        if self._closed:
            raise ClosedError("the stream was closed")
        if not self._begun:
            self._queue.operation.start()
            self._begun = True

    def __del__(self) -> None:
        if hasattr(self, "_queue"):
            self._queue.operation.cancel()
