"""The bodies of loads, each one function that an operation runs on its thread: open, plan, read, close.

A load from a path costs two thread switches, to its thread and back: opening, reading and closing are one body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch

from stio import native, process
from stio.device import DeviceMap, LoadedGroup
from stio.errors import FormatError, IntegrityError, LimitError
from stio.format.files import ShardIndex
from stio.limits import DEFAULT_BUDGET_BYTES, Limits
from stio.loading.consumers import GroupQueue
from stio.loading.options import LoadOptions
from stio.loading.planned import plan_load, plan_prefetch
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler
from stio.loading.select import SelectedTensors, select_tensors
from stio.loading.targets.base import LoadTarget
from stio.loading.targets.module import ModuleTarget
from stio.runtime import Operation
from stio.runtime.reports import shown, traced
from stio.storage.checkpoint import CachedFile, OpenCheckpoint, OpenOptions, SourceLike, open_checkpoint, verify_files

T = TypeVar("T")

_DEFAULT_LIMITS = Limits()

FillSome: TypeAlias = Callable[[Operation[Any], OpenCheckpoint, LoadTarget, list[str]], list[str]]
"""Fills some of a target's tensors by other means than a load of their own. Called on the operation's thread with the
names to load; returns those that remain."""


def open_with_options(
    operation: Operation[Any],
    source: SourceLike,
    options: LoadOptions,
    *,
    strict: bool | None = None,
    with_manifest: bool = False,
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None,
    compare: Callable[[OpenCheckpoint], object] | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint with these options; with `verify=True`, compare its files with their manifest.

    Args:
        operation: A cancel of it ends the call.
        source: The checkpoint.
        options: Options of the load.
        strict: Replaces the value of the options unless it is None.
        with_manifest: Read the manifest, even if nothing is verified.
        shards_of: Returns the shards of an index that are needed; None: all.
        compare: Called before anything is hashed; it raises if the checkpoint is not what is expected.
    """
    cache = options.disk_cache
    how = OpenOptions(
        limits=options.limits or _DEFAULT_LIMITS,
        strict=options.strict if strict is None else strict,
        follow_symlinks=options.follow_symlinks,
        with_manifest=with_manifest or options.verify,
        shards_of=shards_of,
        replacement=(lambda file: file) if cache is None else cache.replacement,
        check=operation.check,
    )
    opened: OpenCheckpoint | None = None
    try:
        with traced(options.trace, "open", detail="" if options.trace is None else shown(source)):
            opened = open_checkpoint(source, how)
            opened.require_plain()
        if compare is not None:
            compare(opened)
        if options.verify:
            budget_bytes = options.budget or DEFAULT_BUDGET_BYTES
            if cache is not None and not opened.openers:  # otherwise verification and load would each read the store
                opened.fetch(cache, budget_bytes=budget_bytes)
            with traced(options.trace, "verify"):
                verify_files(opened, check=operation.check, budget_bytes=budget_bytes)
    except BaseException as error:
        if opened is not None:
            opened.close()
        # A limit may be the caller's own. A file that is damaged in a cache would make each later load fail too.
        if cache is not None and isinstance(error, FormatError | IntegrityError) and not isinstance(error, LimitError):
            cache.discard(error)
        raise
    return opened


def scheduled(selected: SelectedTensors, delivery: Delivery, *, max_workers: int | None = None) -> LoadScheduler:
    """Return a load that is ready to run; see `plan_load`."""
    with traced(selected.options.trace, "plan", detail=selected.opened.path):
        return LoadScheduler(plan_load(selected, delivery, max_workers=max_workers), selected.options, delivery)


def gather(
    operation: Operation[Any], selected: SelectedTensors, *, max_workers: int | None = None
) -> list[LoadedGroup]:
    """Load to the end; return the groups."""
    groups: list[LoadedGroup] = []
    delivery = Delivery(deliver=lambda _, loaded: groups.append(loaded))
    scheduled(selected, delivery, max_workers=max_workers).run_for(operation)
    return groups


def collect(operation: Operation[Any], selected: SelectedTensors) -> Callable[[], dict[str, torch.Tensor]]:
    """Load to the end; return a function that returns all tensors. The consumer's thread calls it once.

    The tensors are in the order of the checkpoint's data, aliases last.
    """
    groups, opened = gather(operation, selected), selected.opened
    names = [name for header in opened.headers for name in header.names] + list(opened.aliases)

    def take() -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        # The operation's thread may be the last to hold this function, and at the interpreter's exit a thread that
        # frees a tensor aborts the process.
        while groups:
            tensors |= groups.pop(0).take()
        in_order = list(tensors) == names
        return tensors if in_order else {name: tensors[name] for name in names if name in tensors}

    return take


def prefetch(
    operation: Operation[Any], opened: OpenCheckpoint, cached: Sequence[CachedFile], options: LoadOptions
) -> None:
    """Read all files of a checkpoint into their images in a cache, which are released at the end."""
    planned = plan_prefetch(opened, cached, options)
    LoadScheduler(planned, options, Delivery(), doing="prefetching").run_for(operation)


def fill(
    operation: Operation[None],
    queue: GroupQueue,
    source: SourceLike | OpenCheckpoint,
    target: LoadTarget,
    options: LoadOptions,
    fill_first: FillSome | None = None,
) -> None:
    """Load into a target; groups that the consumer's thread must copy are put in the queue."""
    with process.switch_interval(options.switch_interval), ExitStack() as closing_all:
        names: list[str] = []

        def compare(opened: OpenCheckpoint) -> None:
            names[:] = target.select(opened, options, operation.check)

        if isinstance(source, OpenCheckpoint):  # it was verified when it was opened
            opened = source
            compare(opened)
        else:  # the names that the target needs are compared, and not those of the index
            opened = open_with_options(operation, source, options, strict=False, compare=compare)
            closing_all.callback(opened.close)
        if fill_first is not None:
            names = fill_first(operation, opened, target, names)
        if isinstance(target, ModuleTarget) and target.keeps:
            if not target.assigns:  # a second copy of the module might not fit on its device
                options = replace(options, device="cpu")
            delivery = Delivery(deliver=lambda _, loaded: target.keep(loaded))
            scheduler = scheduled(select_tensors(opened, names, options), delivery)
            queue.attach(scheduler)
            scheduler.run_for(operation)
            with process.collection_paused(len(names)):
                target.make()
            return
        if not names and fill_first is not None:
            return
        options = replace(options, device=target.device)  # the copies stay on one device
        # If no device queue orders the copies, the load's thread makes them, and no event loop is needed.
        direct = target.on_cpu
        delivery = Delivery(
            deliver=(lambda _, loaded: target.copy(loaded)) if direct else queue.put,
            hold=not direct,
            keeps=False,
            views=True,
            # An event loop's thread must not wait for the engine.
            copied=target.copied_names(by_engine=direct and native.available()),
        )
        scheduler = scheduled(select_tensors(opened, names, options, slices=target.slices), delivery)
        queue.attach(scheduler)
        scheduler.run_for(operation)


def reading_operation(
    source: SourceLike,
    options: LoadOptions,
    read: Callable[[Operation[Any], OpenCheckpoint], T],
    *,
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None,
) -> Operation[T]:
    """Return an operation that opens a checkpoint, verifies it, reads from it by a function, and closes it.

    `shards_of` returns the shards of an index that the function needs; None: all.
    """

    def body(operation: Operation[Any]) -> T:
        with process.switch_interval(options.switch_interval):
            DeviceMap.of(options.device)  # a missing device is an error before any file is opened
            with closing(open_with_options(operation, source, options, shards_of=shards_of)) as opened:
                return read(operation, opened)

    return Operation(body, name="load", kind="load", about=shown(source))
