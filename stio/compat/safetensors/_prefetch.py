"""`safe_open.prefetch`: tensors and slices of one file that are declared ahead, and read in the background.

The interface is that of safetensors 0.9.0rc1: `prefetch` returns a `PrefetchLoader`, which returns each tensor once, by
`take` or by iteration, and the file object itself is unchanged. In an earlier state of the interface `prefetch`
returned None, and `get_tensor` of the file object returned the tensors. That is not done here: `get_tensor` would take
a tensor from a loader that other code holds, and the `take` of that code would fail. Code for that state gets the right
tensors: it drops the loader, whose reading ends, and `get_tensor` reads each tensor. Such code should call `take`.

Beyond the original: it loads to the CPU too, and to every device of torch; a plan may have any index that `stio.load`
takes in `slices=`, with several intervals along a dimension; and `budget_bytes` bounds what was read and not taken.

A loader is a load of stio (`stio.loading`). Its workers stop reading when the budget is full of groups of which some
tensor was not taken. A requested tensor is read before all others (`LoadScheduler.promote`). If it would have to wait
for budget, it is read alone at once (`LoadScheduler.is_blocked`): possibly only the waiting caller could release
budget, by taking other tensors. It needs no budget, because it is taken when it is read. So no order of `take` makes a
loader wait for ever. What was read and not taken is at most the budget, or one group that is larger. If the tensor's
group is read later, this tensor is read again and dropped. A group whose tensors were all taken is not read.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from types import EllipsisType, TracebackType
from typing import Any, Self, SupportsIndex

import torch

from stio.compat.safetensors import _accelerator
from stio.compat.safetensors._errors import SafetensorError, reading, wrong_type
from stio.compat.safetensors._file import File
from stio.compat.safetensors._tensors import require_torch_dtypes, require_whole_pairs
from stio.device.base import LoadedGroup, Target, resolve_device
from stio.device.tensors import torch_shape
from stio.format.slicing import select
from stio.loading.body import carry_out
from stio.loading.open import OpenCheckpoint
from stio.loading.options import LoadOptions
from stio.loading.plan import Group
from stio.loading.prepare import prepare
from stio.loading.scheduler import LoadScheduler
from stio.runtime.blocking import run_blocking
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation, close_all


class PrefetchLoader:
    """Tensors of one file that are read in the background. Made by `safe_open.prefetch`; a context manager.

    Each tensor is returned once, by `take` or by iteration. It stays valid after the loader is closed. On a device its
    data are there for every stream; a part that a copy cannot cut out (with steps) only for the stream that was current
    at `prefetch`. Several threads may use a loader. It has its own descriptor of the file, so the file object may be
    closed before it. Reading ends, and tensors that were not taken are freed,
    when the loader is closed or deleted. In a forked child it is closed.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("__weakref__", "_load")

    def __init__(self, load: _Load) -> None:
        self._load = load

    def names(self) -> list[str]:
        """Return the names of the plan, in the order of their data; also those that were taken."""
        return list(self._load.names)

    def __len__(self) -> int:
        return len(self._load.names)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, or the part that the plan has, after a wait for its data if necessary.

        A KeyboardInterrupt during the wait leaves the loader as it was.

        Raises:
            SafetensorError: The plan does not have the name, the tensor was taken before, the loader was closed, or
                the file is shorter than its header says.
            OSError: The system refuses to read, or the file was changed. Every later call raises it too.
            torch.OutOfMemoryError: The device is full.
        """
        return self._load.take(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of those that were not taken, as they become ready; errors as for `take`."""
        while (name := self._load.claim_ready()) is not None:
            yield name, self._load.finish(name)

    def close(self) -> None:
        """End the reading and free what was not taken; wait until no thread of the loader is left. Idempotent."""
        self._load.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_load"):
            self._load.cancel()


def prefetch(
    file: File,
    plan: Mapping[str, Any] | None,
    device: str | int,
    *,
    threads: int,
    budget_bytes: int | str | None,
) -> PrefetchLoader:
    """Start to read the tensors of a plan; see `safe_open.prefetch`."""
    names, slices = _checked(plan, file)
    target: Target = torch.device("cpu")
    moved_to = None
    if device != "cpu":
        served = _accelerator.served(device)
        if served is not None:
            target = served
        else:  # torch itself copies each tensor when it is taken
            with reading(file.path):
                moved_to = resolve_device(device)
    options = LoadOptions(device=target, memory="auto" if file.is_mapped else "copy", budget_bytes=budget_bytes)
    source = file.opened_again()
    # No aliases are passed: stio records them under a metadata key of its own, and this format has none.
    opened = OpenCheckpoint(file.path, [source], [file.header], file.header.metadata, {})
    load = _Load(opened, names, slices, options, max_workers=threads, moved_to=moved_to)
    try:
        load.start()
    except BaseException:
        load.close()
        raise
    return PrefetchLoader(load)


class _Load:
    """The load of one loader, and its tensors by name between the workers and the threads that take them.

    Workers and takers share no lock: what only one of them may do is decided by `dict.pop`.

    Args:
        opened: The file, closed by `close` and at the end of this object.
        names: Names to load, in the order of their data.
        slices: By name, the part to load.
        options: Options of the load.
        max_workers: Most threads that read.
        moved_to: Device to which torch copies each tensor when it is taken.
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        names: list[str],
        slices: Mapping[str, Any],
        options: LoadOptions,
        *,
        max_workers: int,
        moved_to: torch.device | None,
    ) -> None:
        self.names = names
        """See above."""
        self._opened = opened
        self._slices = slices
        self._options = options
        self._max_workers = max_workers
        self._moved_to = moved_to
        self._unclaimed = dict.fromkeys(names)
        self._ready: deque[str] = deque()  # names of tensors that were delivered, perhaps taken by now
        self._delivered: dict[str, LoadedGroup] = {}
        self._group_of: dict[str, Group] = {}
        self._left: dict[int, set[str]] = {}  # by index of the group, names of which the tensor was not taken
        self._arrived: set[int] = set()  # indices of groups that were delivered
        self._scheduler: LoadScheduler | None = None
        self._prepared = self._closed = False
        self._notifier = Notifier()
        self._alone: list[Operation[LoadedGroup]] = []  # loads of one tensor that a taker waits for
        self._operation: Operation[None] = Operation(
            self._run, name="prefetch", kind="load", about=opened.path, notifier=self._notifier
        )

    def start(self) -> None:
        """Start the load, and wait until its reads are planned. The error of a read is raised by `take`.

        Raises:
            SafetensorError: An index does not fit its tensor, or there is no such device.
        """
        with _accelerator.loading(self._opened.path):
            run_blocking(self._operation.wait_until(lambda: self._prepared))
        if not self._prepared:
            self._require_open()

    def take(self, name: str) -> torch.Tensor:
        """See `PrefetchLoader.take`."""
        if not isinstance(name, str):
            raise wrong_type("name", name, "str")
        self._require_open()
        if name not in self._group_of:
            raise SafetensorError(f"{name} is not in the prefetch plan")
        if self._unclaimed.pop(name, self) is self:
            raise SafetensorError(f"{name}: tensor already delivered (each is returned once, by take or by iteration)")
        return self.finish(name)

    def claim_ready(self) -> str | None:
        """Wait for a tensor that is not claimed yet, and claim it for `finish`; None if all are claimed."""
        while True:
            self._require_open()
            while self._ready:
                try:
                    name = self._ready.popleft()
                except IndexError:  # another thread took it
                    break
                if self._unclaimed.pop(name, self) is not self:
                    return name
            if not self._unclaimed:
                return None
            if self._operation.done:  # an interrupted `finish` had it
                self._ready.extend(list(self._unclaimed))
                continue
            self._notifier.block_until(lambda: self._operation.done or bool(self._ready) or not self._unclaimed)

    def finish(self, name: str) -> torch.Tensor:
        """Return a tensor that the caller has claimed; an error returns the claim."""
        try:
            with _accelerator.loading(self._opened.path):
                return self._wait_for(name)
        except BaseException:
            self._unclaimed[name] = None
            self._ready.append(name)
            self._notifier.notify()
            raise

    def close(self) -> None:
        """See `PrefetchLoader.close`."""
        self._closed = True
        self._unclaimed.clear()
        try:
            run_blocking(close_all([self._operation, *self._alone], self._opened.close))
        finally:
            self._delivered.clear()
            self._notifier.notify()

    def cancel(self) -> None:
        """End the reading without a wait; what it uses is freed with the last reference."""
        self._operation.cancel()

    def __del__(self) -> None:
        self._opened.close()

    def _run(self, operation: Operation[None]) -> None:
        try:
            scheduler = prepare(
                self._opened,
                self.names,
                self._options,
                deliver=self._put,
                hold=True,
                kept=(),
                slices=self._slices,
                prompt=True,
                max_workers=self._max_workers,
                on_blocked=self._notifier.notify,
            )
            for group in scheduler.plan.groups:
                self._left[group.index] = set(group.names)
                self._group_of.update(dict.fromkeys(group.names, group))
            self._scheduler = scheduler
            self._prepared = True
            self._notifier.notify()
            carry_out(operation, scheduler)
        except BaseException:
            self._delivered.clear()  # they are not taken any more, and the error's frames refer to this object
            raise
        finally:
            self._scheduler = None  # it refers to this object: without the cycle both are freed at once

    def _put(self, group: Group, loaded: LoadedGroup) -> None:
        """Deliver a group (called by workers)."""
        self._delivered.update(dict.fromkeys(group.names, loaded))
        self._arrived.add(group.index)
        left = self._left[group.index]
        for name in group.names:
            if name not in left:  # it was read alone
                self._delivered.pop(name, None)
                loaded.tensors.pop(name, None)
        self._release(group)
        self._ready.extend(name for name in group.names if name in left)
        self._notifier.notify()

    def _release(self, group: Group) -> None:
        """Release a group's budget if nothing is left in it; or do not read it, if that has not started."""
        scheduler = self._scheduler
        if scheduler is not None and not self._left[group.index]:
            scheduler.discard(group)
            if group.index in self._arrived:
                scheduler.release(group)

    def _wait_for(self, name: str) -> torch.Tensor:
        group, scheduler = self._group_of[name], self._scheduler
        if name not in self._delivered and scheduler is not None and group.index not in self._arrived:
            scheduler.promote([name])
            self._notifier.block_until(
                lambda: (
                    self._operation.done
                    or name in self._delivered
                    or group.index in self._arrived
                    or scheduler.is_blocked(group)
                )
            )
        self._require_open()
        loaded = self._delivered.get(name)
        if loaded is None or name not in loaded.tensors:  # or an interrupted call has taken it from the group
            tensor = self._read_alone(name)
        else:
            tensor = loaded.tensors[name]
            loaded.tensors.pop(name, None)
        if self._moved_to is not None:
            tensor = tensor.to(self._moved_to)
        self._left[group.index].discard(name)
        self._delivered.pop(name, None)
        self._release(group)
        return tensor

    def _read_alone(self, name: str) -> torch.Tensor:
        """Read one tensor outside the budget, for the caller that waits for it."""
        operation: Operation[LoadedGroup] = Operation(
            lambda operation: self._load_alone(operation, name), name="load", kind="load", about=self._opened.path
        )
        self._alone.append(operation)
        try:
            self._require_open()  # after the append: `close` cancels it, or this sees that it was closed
            return operation.result().tensors[name]
        finally:
            self._alone.remove(operation)

    def _load_alone(self, operation: Operation[Any], name: str) -> LoadedGroup:
        groups: list[LoadedGroup] = []
        slices = {name: self._slices[name]} if name in self._slices else {}
        scheduler = prepare(
            self._opened,
            [name],
            self._options,
            deliver=lambda _, loaded: groups.append(loaded),
            slices=slices,
            max_workers=self._max_workers,
        )
        carry_out(operation, scheduler)
        return groups[0]

    def _require_open(self) -> None:
        """Raise the error of the load, if it has one; or one that says that the loader was closed."""
        if self._closed or self._operation.cancelled:
            raise SafetensorError("prefetch loader closed")
        if self._operation.done:
            with _accelerator.loading(self._opened.path):
                self._operation.outcome()


def _checked(plan: Mapping[str, Any] | None, file: File) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a plan in the order of their data, and the indices of those that are sliced."""
    header = file.header
    if plan is None:
        require_torch_dtypes(header.dtypes, header.shapes)
        return list(header.names), {}
    if not isinstance(plan, Mapping):
        raise wrong_type("plan", plan, "dict")
    plan = dict(plan)
    for name in plan:
        if not isinstance(name, str):
            raise SafetensorError(f"prefetch plan keys must be tensor names, got {type(name).__name__}")
        if name not in header:
            raise SafetensorError(f"File does not contain tensor {name}")
    if not plan:
        raise SafetensorError("prefetch plan selects no tensors")
    rows = sorted(map(header.index_of, plan))
    require_torch_dtypes([header.dtypes[row] for row in rows], [header.shapes[row] for row in rows])
    slices = {name: index for name, index in plan.items() if index is not None}
    for name, index in slices.items():
        row = header.index_of(name)
        _require_in_range(index, header.shapes[row], name)
        if header.dtypes[row] == "F4":
            shape = header.shapes[row]
            with reading(file.path):
                by_pairs = select(index, torch_shape("F4", shape), 1).shape
                require_whole_pairs(shape, select(index, shape, 1).shape, by_pairs)
    return [header.names[row] for row in rows], slices


def _require_in_range(index: Any, shape: tuple[int, ...], name: str) -> None:
    """Refuse a bound of a slice past the end, as the original does: a plan that was made for another shape is wrong."""
    items = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not None]
    ellipsis = next((k for k, item in enumerate(items) if isinstance(item, EllipsisType)), len(items))
    for k, item in enumerate(items):
        dim = k if k < ellipsis else len(shape) - len(items) + k
        if not 0 <= dim < len(shape):
            return  # stio's own check of the index says what is wrong
        for part in item if isinstance(item, list) else [item]:
            if isinstance(part, slice):
                _require_bounds(part, shape[dim], name)


def _require_bounds(part: slice, size: int, name: str) -> None:
    for label, bound in (("start", part.start), ("stop", part.stop)):
        if isinstance(bound, SupportsIndex) and not -size <= operator.index(bound) <= size:
            raise SafetensorError(f"prefetch plan slice {label} {bound} for {name} is out of range for {size} rows")
