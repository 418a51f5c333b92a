"""The queue between a load and its consumer, which takes what is ready on another thread than the load's.

A `GroupQueue` passes groups to one consumer, a task of any event loop or a thread, in the order in which they become
ready. `next` returns them one by one, and first releases the budget of the previous group. So the memory under way,
with the consumer's group, is at most the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter

from stio.device import LoadedGroup
from stio.loading.plan import Group
from stio.loading.scheduler import LoadScheduler
from stio.runtime import Notifier, Operation
from stio.runtime.reports import Trace, traced


class GroupQueue:
    """Groups for one consumer, in the order in which they become ready.

    Args:
        body: Runs on a thread: prepares a load that delivers to `put`, passes its scheduler to `attach`, runs it.
        name: Name of that thread.
        about: Name of the source, for the log.
        trace: Records spans of the consumer: its wait for a group, and its use of the group until it takes the next.
    """

    def __init__(
        self,
        body: Callable[[Operation[None], GroupQueue], None],
        *,
        name: str,
        about: str = "",
        trace: Trace | None = None,
    ) -> None:
        self._items: deque[tuple[Group, LoadedGroup]] = deque()
        self._notifier = Notifier()
        self._scheduler: LoadScheduler | None = None
        self._promoted: list[set[str]] = []
        self._aliases: Mapping[str, str] = {}
        self._unreleased: deque[Group] = deque()  # with the groups in `_items`, those that consumers use
        self._waiting: list[bool] = []  # an item for each consumer that waits
        self._trace = trace
        self._taken = 0.0  # when the consumer took the group that it uses
        self.operation: Operation[None] = Operation(
            partial(self._run, body), name=name, kind="load", about=about, notifier=self._notifier
        )
        """The operation of the load; a cancel of it ends the queue."""

    def _run(self, body: Callable[[Operation[None], GroupQueue], None], operation: Operation[None]) -> None:
        try:
            body(operation, self)
        except BaseException:
            self._items.clear()  # they have no consumer, and the error's frames refer to this queue
            raise
        finally:
            self._scheduler = None  # it refers to this queue: without the cycle both are freed at once

    def attach(self, scheduler: LoadScheduler, aliases: Mapping[str, str] | None = None) -> None:
        """Set the scheduler that delivers, and the names that share another tensor's data (called by the body)."""
        self._aliases = aliases or {}
        self._scheduler = scheduler
        for names in self._promoted.copy():  # in the order of their calls; the last one is first
            scheduler.promote(self._with_data(names))

    def put(self, group: Group, loaded: LoadedGroup) -> None:
        """Deliver a group."""
        self._items.append((group, loaded))
        self._unreleased.append(group)
        self._notifier.notify()

    async def next(self) -> LoadedGroup | None:
        """Return the next group, None at the end. A cancel of the caller cancels the operation.

        Raises:
            BaseException: The error of the load. Groups that are still in the queue are dropped.
        """
        self._release(perf_counter())
        while True:
            self._waiting.append(True)
            try:
                with traced(self._trace, "wait", detail="for the next group"):
                    await self.operation.wait_until(lambda: bool(self._items))
                if self.operation.done:
                    self.operation.outcome()  # raises its error: after that no further group is returned
            except BaseException:
                self._items.clear()
                raise
            finally:
                self._waiting.pop()
            self._taken = perf_counter()
            try:
                _, loaded = self._items.popleft()
            except IndexError:  # another consumer took it, or the end
                if self.operation.done:
                    return None
                continue
            if self._waiting:  # another consumer must not wait for the next call of this one
                self._release(self._taken)
            return loaded

    def promote(self, names: set[str]) -> None:
        """Read the groups with these names before all others whose read has not started."""
        self._promoted.append(names)  # first: `attach` reads it after it has set the scheduler
        scheduler = self._scheduler
        if scheduler is not None and not self.operation.done:
            scheduler.promote(self._with_data(names))
            with suppress(ValueError):
                self._promoted.remove(names)

    def _with_data(self, names: set[str]) -> set[str]:
        """Replace aliases by the names that have data: a plan has only those."""
        return {self._aliases.get(name, name) for name in names}

    async def aclose(self) -> None:
        """Cancel the operation, and wait until its threads have ended."""
        try:
            await self.operation.aclose()
        finally:
            self._items.clear()

    def _release(self, now: float) -> None:
        """Release the budget of the groups that consumers have taken. A signal handler may do so at the same time."""
        scheduler = self._scheduler
        while len(self._unreleased) > len(self._items):
            with suppress(IndexError, ValueError):  # released in between
                group = self._unreleased[0]
                # After the end of the operation nothing waits for budget.
                if scheduler is not None and not self.operation.done:
                    scheduler.release(group)
                self._unreleased.remove(group)
                if self._trace is not None:
                    self._trace.add("consume", self._taken, now, num_bytes=group.payload_bytes)
