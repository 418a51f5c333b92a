"""The bodies of loads, each one function that an operation runs on its thread: open, plan, read, close.

A load from a path costs two thread switches, to its thread and back: opening, reading and closing are one body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch

from stio import native
from stio.device.base import LoadedGroup, resolve_devices
from stio.errors import FormatError, IntegrityError, LimitError
from stio.format.files.index import ShardIndex
from stio.loading.caches import ObjectCache
from stio.loading.consumers import GroupQueue
from stio.loading.integrity import verify_files
from stio.loading.module import ModuleTarget
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.loading.options import LoadOptions, SourceLike
from stio.loading.planned import plan_load
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler
from stio.loading.select import SelectedTensors, select_tensors
from stio.loading.target import LoadTarget
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused, contextmanager
from stio.runtime.process import switch_interval as shortened
from stio.runtime.trace import shown, traced

T = TypeVar("T")

FillSome: TypeAlias = Callable[[Operation[Any], OpenCheckpoint, LoadTarget, list[str]], list[str]]
"""Fills some of a target's tensors by other means than a load of their own. Called on the operation's thread with the
names to load; returns those that remain."""


def open_with_options(
    operation: Operation[Any],
    source: SourceLike,
    options: LoadOptions,
    *,
    strict: bool | None = None,
    shards_of: Callable[[ShardIndex], Collection[str] | None] = lambda index: None,
) -> OpenCheckpoint:
    """Open a checkpoint with these options; `strict` replaces their value unless it is None."""
    cache = options.disk_cache
    with traced(options.trace, "open", detail=shown(source)), discarding_damage(cache):
        opened = open_checkpoint(
            source,
            limits=options.limits,
            strict=options.strict if strict is None else strict,
            follow_symlinks=options.follow_symlinks,
            with_manifest=options.verify,
            shards_of=shards_of,
            replacement=(lambda file: file) if cache is None else cache.replacement,
            check=operation.check,
        )
        opened.require_plain()
        if cache is not None and options.verify and not opened.openers:
            fetch_all(opened, cache, options)  # otherwise verification and load would each read the store
        return opened


def discarding_damage(cache: ObjectCache | None) -> AbstractContextManager[None]:
    """Remove a cached file that turns out to be damaged inside the block: otherwise each later load would fail too."""
    return nullcontext() if cache is None else _discarding_damage(cache)


@contextmanager
def _discarding_damage(cache: ObjectCache) -> Iterator[None]:
    try:
        yield
    except (FormatError, IntegrityError) as error:
        if not isinstance(error, LimitError):  # a limit may be the caller's own
            cache.discard(error)
        raise


def fetch_all(opened: OpenCheckpoint, cache: ObjectCache, options: LoadOptions) -> None:
    """Replace all files of a checkpoint by files of a cache on disk."""
    before, nbytes = opened.files, [file.identity.nbytes for file in opened.files]
    with ExitStack() as undo:
        undo.callback(opened.close)
        opened.files = cache.fetch(before, nbytes, budget_bytes=options.budget or DEFAULT_BUDGET_BYTES, owned=undo)
        undo.pop_all()
    for old, new in zip(before, opened.files, strict=True):
        if new is not old:
            old.close()


def verify(operation: Operation[Any], opened: OpenCheckpoint, options: LoadOptions) -> None:
    """With `verify=True`, compare the files with their manifest, before any tensor is read."""
    if options.verify:
        with traced(options.trace, "verify"), discarding_damage(options.disk_cache):
            verify_files(opened, check=operation.check, budget_bytes=options.budget or DEFAULT_BUDGET_BYTES)


def scheduled(
    selected: SelectedTensors, options: LoadOptions, delivery: Delivery, *, max_workers: int | None = None
) -> LoadScheduler:
    """Return a load that is ready to run; see `plan_load`."""
    with traced(options.trace, "plan", detail=selected.opened.path):
        return LoadScheduler(plan_load(selected, options, delivery, max_workers=max_workers), options, delivery)


def gather(
    operation: Operation[Any], selected: SelectedTensors, options: LoadOptions, *, max_workers: int | None = None
) -> list[LoadedGroup]:
    """Load to the end; return the groups. The consumer's thread calls `LoadedGroup.take` of each."""
    groups: list[LoadedGroup] = []
    delivery = Delivery(deliver=lambda _, loaded: groups.append(loaded))
    scheduled(selected, options, delivery, max_workers=max_workers).run_for(operation)
    return groups


def collect(
    operation: Operation[Any], selected: SelectedTensors, options: LoadOptions
) -> Callable[[], dict[str, torch.Tensor]]:
    """Load to the end; return a function that returns all tensors. The consumer's thread calls it once.

    The tensors are in the order of the checkpoint's data, aliases last.
    """
    groups, opened = gather(operation, selected, options), selected.opened
    headers, aliases = opened.headers, opened.aliases

    def take() -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        # The operation's thread may be the last to hold this function, and at the interpreter's exit a thread that
        # frees a tensor aborts the process.
        while groups:
            tensors |= groups.pop(0).take()
        ordered = {name: tensors[name] for header in headers for name in header.names if name in tensors}
        return ordered | {name: tensors[name] for name in aliases if name in tensors}

    return take


def fill(
    operation: Operation[None],
    queue: GroupQueue,
    source: SourceLike | OpenCheckpoint,
    target: LoadTarget,
    options: LoadOptions,
    fill_first: FillSome | None = None,
) -> None:
    """Load into a target; groups that the consumer's thread must copy are put in the queue."""
    with shortened(options.switch_interval), ExitStack() as closing_all:
        if isinstance(source, OpenCheckpoint):  # it was verified when it was opened
            opened, options = source, replace(options, verify=False)
        else:  # the names that the target needs are compared, and not those of the index
            opened = open_with_options(operation, source, options, strict=False)
            closing_all.callback(opened.close)
        names = target.select(opened, options, operation.check)
        verify(operation, opened, options)
        if fill_first is not None:
            names = fill_first(operation, opened, target, names)
        if isinstance(target, ModuleTarget) and target.keeps:
            if not target.assigns:  # a second copy of the module might not fit on its device
                options = replace(options, device="cpu")
            delivery = Delivery(deliver=lambda _, loaded: target.keep(loaded))
            scheduler = scheduled(select_tensors(opened, names, options), options, delivery)
            queue.attach(scheduler)
            scheduler.run_for(operation)
            with collection_paused(len(names)):
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
        scheduler = scheduled(select_tensors(opened, names, options, slices=target.slices), options, delivery)
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
        with shortened(options.switch_interval):
            resolve_devices(options.device)  # a missing device is an error before any file is opened
            with closing(open_with_options(operation, source, options, shards_of=shards_of)) as opened:
                verify(operation, opened, options)
                return read(operation, opened)

    return Operation(body, name="load", kind="load", about=shown(source))
