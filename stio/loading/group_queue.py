"""Groups on their way from the workers to one consumer, who may be a task of any loop or a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter

from stio.device.base import LoadedGroup
from stio.loading.plan import Group
from stio.loading.scheduler import LoadScheduler
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation
from stio.runtime.trace import Trace

__all__ = ["GroupQueue"]


class GroupQueue:
    """Hands groups over one by one; taking one gives the budget of the one before back.

    So at most the budget is on the way, the group in the consumer's hands included.

    Args:
        body: Runs on a thread: makes a run that delivers to `put`, announces it by `attach`, carries it out.
        name: Name of that thread.
        about: What is loaded, for the log.
        trace: Where it goes what the consumer did: wait for a group, and use it until it asked for the next.
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
        self._run: LoadScheduler | None = None
        self._promoted: set[str] = set()
        self._aliases: Mapping[str, str] = {}
        self._held: Group | None = None
        self._trace = trace
        self._taken = 0.0  # when the consumer got the group that it holds
        self.operation: Operation[None] = Operation(
            self._carry_out(body), name=name, kind="load", about=about, notifier=self._notifier
        )
        """The thread's work; cancelling it ends the feed."""

    def _carry_out(self, body: Callable[[Operation[None], GroupQueue], None]) -> Callable[[Operation[None]], None]:
        def run(operation: Operation[None]) -> None:
            try:
                body(operation, self)
            except BaseException:
                self._items.clear()  # nobody will fetch them, and the error's frames would keep us, and us them
                raise
            finally:
                self._run = None  # it delivers to us: a circle, which would keep what nobody fetched

        return run

    def attach(self, run: LoadScheduler, aliases: Mapping[str, str] | None = None) -> None:
        """Say whose budget is given back, and which names are another tensor's (called by the body)."""
        self._aliases = aliases or {}
        self._run = run
        run.promote(self._with_data(self._promoted))

    def put(self, group: Group, landed: LoadedGroup) -> None:
        """Deliver a group (called by workers)."""
        self._items.append((group, landed))
        self._notifier.notify()

    async def next(self) -> LoadedGroup | None:
        """Return the next group, None at the end; waits in the current task."""
        asked = self._ask()
        self._give_back()
        try:
            await self._notifier.wait_for(self._ready)
        except GeneratorExit:
            self.operation.cancel()  # the coroutine is thrown away, it must not wait any more
            raise
        except BaseException:
            # The exception at hand goes first; `Task.cancelling` remembers a second cancel.
            with suppress(asyncio.CancelledError):
                await self.aclose()
            raise
        return self._pick(asked)

    def next_blocking(self) -> LoadedGroup | None:
        """Return the next group, None at the end; waits in this thread."""
        asked = self._ask()
        self._give_back()
        try:
            self._notifier.wait_for_blocking(self._ready)
        except BaseException:
            self.close()
            raise
        return self._pick(asked)

    def promote(self, names: set[str]) -> None:
        """Have the groups of these names read before all that has not begun."""
        self._promoted |= names
        run = self._run
        if run is not None and not self.operation.done:
            run.promote(self._with_data(names))

    def _with_data(self, names: set[str]) -> set[str]:
        """A plan knows the names that have data, the caller those that the checkpoint shows."""
        return {self._aliases.get(name, name) for name in names}

    async def aclose(self) -> None:
        """End the operation, and wait until nothing of it is left."""
        try:
            await self.operation.aclose()
        finally:
            self._items.clear()

    def close(self) -> None:
        """End the operation, and wait in this thread until nothing of it is left."""
        self.operation.close()
        self._items.clear()

    def _ready(self) -> bool:
        return bool(self._items) or self.operation.done

    def _ask(self) -> float:
        """Record what the consumer did with the group that it holds; return the time."""
        now, group = perf_counter(), self._held
        if self._trace is not None and group is not None:
            self._trace.add("consume", self._taken, now, num_bytes=group.payload_bytes)
        return now

    def _pick(self, asked: float) -> LoadedGroup | None:
        self._taken = perf_counter()
        if self._trace is not None:
            self._trace.add("wait", asked, self._taken, detail="for the next group")
        if self.operation.done:
            try:
                self.operation.outcome()  # an error withholds what is still in line
            except BaseException:
                self._items.clear()
                raise
            if not self._items:
                return None
        self._give_back()  # of another task that takes from the same feed
        self._held, landed = self._items.popleft()
        return landed

    def _give_back(self) -> None:
        group, self._held = self._held, None
        run = self._run
        # Once it is done nobody waits for budget (and in a forked child the run's lock may be held for ever).
        if group is not None and run is not None and not self.operation.done:
            run.release(group)
