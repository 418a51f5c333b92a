"""Worker pool: a few threads that run one function together until there is nothing left to do.

The function takes a piece of work from a queue of its own, does it, takes the next, and returns when there is none.
The thread that waits for the end works too, so the work is done even if the system refuses new threads. The
first error of a worker stops the others and is raised in the thread that waits; `Cancelled` stops them and is no error.

The pool and the queue share one condition: a worker that sleeps on it until there is work wakes when the pool stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from stio.process import Condition, be_nice, this_thread
from stio.runtime.operation import Cancelled, start_thread, without_panic

T = TypeVar("T")


class WorkerPool:
    """Threads that work on one queue: of a load, a save, a verification, a comparison.

    The pool holds no reference to the function that it runs. The owner of that function usually refers to the pool, so
    the reference counts free both, without the garbage collector.

    Args:
        name: Name of the threads; a number follows it (`read-1`).
        changed: The condition that guards the queue; it is notified when the pool stops and when a worker ends.
        on_stop: Called when the pool stops, for waits that do not check `stopped`. It must take no lock, and may be
            called several times.
    """

    def __init__(
        self, name: str, *, changed: Condition | None = None, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self.changed = changed or Condition()
        """See above."""
        self._on_stop = on_stop
        self._num_working = self._num_started = 0
        self._error: BaseException | None = None
        self.stopped = False
        """Whether workers should end: `stop` was called, or a worker raised."""

    def run(self, work: Callable[[], None], num_workers: int) -> None:
        """Run a function on this thread and on others until all calls have returned.

        Args:
            work: Called once in each worker.
            num_workers: Most threads that work, this one among them.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        self.start(work, num_workers - 1)
        self.work_along(work)
        self.join()
        self.raise_error()

    def start(self, work: Callable[[], None], num_threads: int) -> int:
        """Run a function on new threads, on fewer than that if the system refuses; returns at once.

        The threads have a lower priority than the event loop's. `join` must follow.

        Returns:
            Number of threads that were started.
        """
        for k in range(num_threads):
            with self.changed:
                self._num_working += 1
            try:
                start_thread(partial(self._run_on_thread, [work]), name=f"{self._name}-{self._num_started + 1}")
            except RuntimeError:  # the limit of threads: the thread that calls `work_along` does it all
                with self.changed:
                    self._num_working -= 1
                return k
            self._num_started += 1
        return num_threads

    def work_along(self, work: Callable[[], None]) -> None:
        """Run the function on this thread too. Raises nothing: an error stops the pool, and `raise_error` raises it."""
        with self.changed:
            self._num_working += 1
        once = [work]
        del work
        self._run(once)

    def items(self, left: list[T]) -> Iterator[T]:
        """Yield what is left in a list that all workers take from, the last first, until the pool stops."""
        while not self.stopped and left:
            try:
                item = left.pop()
            except IndexError:
                return
            yield item

    def stop(self) -> None:
        """End the workers after their current piece. Never blocks; callable from any thread. Idempotent."""
        self.stopped = True
        self.changed.wake()
        self._on_stop()

    def join(self) -> None:
        """Wait until no worker is left."""
        with self.changed:
            self.changed.wait_for(lambda: not self._num_working)

    def raise_error(self) -> None:
        """Raise what ended the pool early, if anything did; only after `join`.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if self.stopped:
                raise Cancelled
        finally:
            del error  # its traceback holds this frame

    def is_stopped(self) -> bool:
        """Return `stopped`, as a function for work that checks it between its pieces."""
        return self.stopped

    def _run_on_thread(self, once: list[Callable[[], None]]) -> None:
        be_nice()
        self._run(once)

    def _run(self, once: list[Callable[[], None]]) -> None:
        """Take the only item off a list, and call it.

        The traceback of an error refers to the frames below the one that caught it too, and those are not cleared. So
        no such frame may refer to the function: it would keep all memory of the load allocated.
        """
        outer, this_thread.pool = getattr(this_thread, "pool", None), self
        try:
            once.pop()()
        except BaseException as error:
            with self.changed:
                if self._error is None and not isinstance(error, Cancelled):
                    self._error = without_panic(error)
            self.stop()
        this_thread.pool = outer
        with self.changed:
            self._num_working -= 1
            self.changed.notify_all()
