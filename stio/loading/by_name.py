"""A load whose tensors any threads take by name, each once, in any order.

Reading stops when the budget is full of groups of which some tensor was not taken. A requested tensor is read before
all others (`LoadScheduler.promote`). If it would have to wait for budget, it is read alone at once
(`LoadScheduler.is_blocked`): possibly only the waiting caller could release budget, by taking other tensors. It needs
no budget, because it is taken when it is read. So no order of requests makes a load wait for ever. What was read and
not taken is at most the budget, or one group that is larger. If the tensor's group is read later, this tensor is read
again and dropped. A group whose tensors were all taken is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch

from stio.device import LoadedGroup
from stio.errors import ClosedError
from stio.loading.body import gather, scheduled
from stio.loading.options import LoadOptions
from stio.loading.plan import Group
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler
from stio.loading.select import select_tensors
from stio.runtime import Notifier, Operation, close_all, run_blocking
from stio.storage.checkpoint import OpenCheckpoint


class LoadByName:
    """One load, and its tensors by name between the scheduler's thread and the threads that take them.

    These threads share no lock: what only one of them may do is decided by `dict.pop`.

    Args:
        opened: The checkpoint, closed by `close` and at the end of this object. It has no aliases.
        names: Names to load, in the order of their data.
        options: Options of the load.
        slices: By name, the part to load.
        max_workers: Most threads of the plain executor.
        moved_to: Device to which torch copies each tensor when it is taken.
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        names: Collection[str],
        options: LoadOptions,
        *,
        slices: Mapping[str, Any],
        max_workers: int,
        moved_to: torch.device | None,
    ) -> None:
        self.names = names
        """See above."""
        self.path = opened.path
        """The checkpoint."""
        self._opened = opened
        self._slices = slices
        self._options = options
        self._max_workers = max_workers
        self._moved_to = moved_to
        self._unclaimed = dict.fromkeys(names)
        self._ready: deque[str] = deque()  # names of tensors that were delivered, perhaps taken by now
        self._delivered: dict[str, torch.Tensor] = {}
        self._group_of: dict[str, Group] = {}
        self._left: dict[int, set[str]] = {}  # by index of the group, names of which the tensor was not taken
        self._arrived: set[int] = set()  # indices of groups that were delivered
        self._scheduler: LoadScheduler | None = None
        self._prepared = self._closed = False
        self._notifier = Notifier()
        self._alone: list[Operation[torch.Tensor]] = []  # loads of one tensor that a taker waits for
        self._operation: Operation[None] = Operation(
            self._run, name="prefetch", kind="load", about=opened.path, notifier=self._notifier
        )

    def start(self) -> None:
        """Start the load, and wait until its reads are planned. The error of a read is raised by `take`.

        Raises:
            StioError: An index does not fit its tensor, or there is no such device.
        """
        run_blocking(self._operation.wait_until(lambda: self._prepared))
        if not self._prepared:
            self.require_open()

    def claim(self, name: str) -> bool:
        """Claim a tensor of the load for `take`; return False if it was claimed before."""
        return self._unclaimed.pop(name, self) is not self

    def claim_ready(self) -> str | None:
        """Wait for a tensor that is not claimed yet, and claim it; None if all are claimed."""
        while True:
            self.require_open()
            while self._ready:
                try:
                    name = self._ready.popleft()
                except IndexError:  # another thread took it
                    break
                if self.claim(name):
                    return name
            if not self._unclaimed:
                return None
            if self._operation.done:  # an interrupted `take` had it
                self._ready.extend(list(self._unclaimed))
                continue
            self._notifier.block_until(lambda: self._operation.done or bool(self._ready) or not self._unclaimed)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor that the caller has claimed, after a wait if necessary; an error returns the claim."""
        try:
            return self._wait_for(name)
        except BaseException:
            self._unclaimed[name] = None
            self._ready.append(name)
            self._notifier.notify()
            raise

    def require_open(self) -> None:
        """Raise the error of the load, if it has one; or `ClosedError` if it was closed."""
        if self._closed or self._operation.cancelled:
            raise ClosedError("prefetch loader closed")
        if self._operation.done:
            self._operation.outcome()

    def close(self) -> None:
        """End the load, free what was not taken, and wait until no thread of it is left. Idempotent."""
        self._closed = True
        self._unclaimed.clear()
        try:
            run_blocking(close_all([self._operation, *self._alone], self._opened.close))
        finally:
            self._delivered.clear()
            self._notifier.notify()

    def cancel(self) -> None:
        """End the load without a wait; what it uses is freed with the last reference."""
        self._operation.cancel()

    def __del__(self) -> None:
        self._opened.close()

    def _run(self, operation: Operation[None]) -> None:
        try:
            delivery = Delivery(
                deliver=self._put, hold=True, keeps=False, prompt=True, on_blocked=self._notifier.notify
            )
            selected = select_tensors(self._opened, self.names, self._options, slices=self._slices)
            scheduler = scheduled(selected, delivery, max_workers=self._max_workers)
            for group in scheduler.plan.groups:
                self._left[group.index] = set(group.names)
                self._group_of.update(dict.fromkeys(group.names, group))
            self._scheduler = scheduler
            self._prepared = True
            self._notifier.notify()
            scheduler.run_for(operation)
        except BaseException:
            self._delivered.clear()  # they are not taken any more, and the error's frames refer to this object
            raise
        finally:
            self._scheduler = None  # it refers to this object: without the cycle both are freed at once

    def _put(self, group: Group, loaded: LoadedGroup) -> None:
        """Deliver a group."""
        self._delivered.update(loaded.tensors)
        self._arrived.add(group.index)
        left = self._left[group.index]
        for name in group.names:
            if name not in left:  # it was read alone
                self._delivered.pop(name, None)
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
                lambda: self._operation.done or group.index in self._arrived or scheduler.is_blocked(group)
            )
        self.require_open()
        tensor = self._delivered.get(name)
        if tensor is None:  # or an interrupted call has taken it
            tensor = self._read_alone(name)
        if self._moved_to is not None:
            tensor = tensor.to(self._moved_to)
        self._left[group.index].discard(name)
        self._delivered.pop(name, None)
        self._release(group)
        return tensor

    def _read_alone(self, name: str) -> torch.Tensor:
        """Read one tensor outside the budget, for the caller that waits for it."""
        slices = {name: self._slices[name]} if name in self._slices else {}

        def body(operation: Operation[torch.Tensor]) -> torch.Tensor:
            selected = select_tensors(self._opened, [name], self._options, slices=slices)
            (group,) = gather(operation, selected, max_workers=self._max_workers)
            return group.tensors[name]

        operation = Operation(body, name="load", kind="load", about=self._opened.path)
        self._alone.append(operation)
        try:
            self.require_open()  # after the append: `close` cancels it, or this sees that it was closed
            return operation.result()
        finally:
            self._alone.remove(operation)
