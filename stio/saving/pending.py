"""One save under way, as the faces hold it: what waits for its two moments, and what rolls it back.

The snapshot is complete first (the faces wait for that), the checkpoint durable later (`await pending`,
`pending.result()`). The work itself is `save_body.py`'s, on a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Any

from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation
from stio.runtime.trace import shown
from stio.saving.body import Durable, Planner, SaveBody
from stio.saving.options import DestinationLike, SaveOptions, SaveResult, TensorsLike, named, settled
from stio.saving.staging_pool import StagingPool

__all__ = ["PendingSave"]

logger = logging.getLogger("stio")

EXIT_PATIENCE_SECONDS = 60.0
"""How long the interpreter's exit lets a save go on before it is rolled back."""


class PendingSave:
    """A save under way: its snapshot is complete, its checkpoint is not durable yet.

    `await` it (any loop) or call `result()` (any thread) for the `SaveResult`. Cancelling such a wait cancels the
    wait alone; `cancel` rolls the save back.
    """

    def __init__(
        self,
        tensors: TensorsLike,
        destination: DestinationLike,
        settings: SaveOptions,
        *,
        pool: StagingPool,
        stage_first: bool = True,
        after: PendingSave | None = None,
        when_durable: Callable[[Durable], None] = lambda saved: None,
        planner: Planner | None = None,
    ) -> None:
        self.destination = destination
        """Where to."""
        self._staged = self._delivered = self._cancelled = False
        self._notifier = Notifier()
        self._body = body = SaveBody(
            named(tensors),
            settled(destination),
            settings,
            pool,
            tell_staged=self._tell_staged,
            tell_durable=when_durable,
            stage_first=stage_first,
            after=after,
            planner=planner,
        )
        self._operation: Operation[SaveResult] = Operation(
            body.carry_out, name="save", kind="save", notifier=self._notifier, exit_patience=EXIT_PATIENCE_SECONDS
        )
        self._operation.about = shown(destination)
        self._operation.start()

    def __del__(self) -> None:
        # The saver tells of it when it is used again or closed; it may be dropped before, or the interpreter end.
        operation: Operation[SaveResult] | None = getattr(self, "_operation", None)  # None: refused by `__init__`
        error = operation.failure if operation is not None else None
        if error is not None and not self._delivered:
            logger.error("saving to %s failed, and nobody waited for it: %s", self.destination, error)

    @property
    def staged(self) -> bool:
        """Whether the snapshot is complete: the tensors may change."""
        return self._staged

    @property
    def delivered(self) -> bool:
        """Whether somebody was told what became of it."""
        return self._delivered

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called, in time or too late."""
        return self._cancelled

    def done(self) -> bool:
        """Whether the save has ended: durable, failed or rolled back."""
        return self._operation.done

    def cancel(self) -> None:
        """Ask for the save to be rolled back. Never blocks; without effect once publishing has begun.

        Who waits for the save afterwards gets `ClosedError`, or the result if it was too late.
        """
        self._cancelled = True
        self._operation.cancel()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait in this thread until the checkpoint is durable.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The timeout passed; the save goes on.
            ClosedError: The save was cancelled, and is rolled back.
            StioError: It failed; the old checkpoint stands.
        """
        if not self._operation.join(timeout):
            raise TimeoutError(f"the save to {self.destination} is not done after {timeout} s")
        return self.outcome()

    def __await__(self) -> Generator[Any, Any, SaveResult]:
        return self._wait().__await__()

    async def _wait(self) -> SaveResult:
        await self._notifier.wait_for(self.done)
        return self.outcome()

    def outcome(self) -> SaveResult:
        """Return or raise what became of it; only once it is `done`."""
        self._delivered = True
        return self._operation.outcome()

    # For the faces: waiting for the snapshot, and for an end that is not theirs to report.

    async def wait_staged(self) -> None:
        """Wait until the tensors may change; a cancel rolls the save back before it goes on.

        Raises:
            StioError: The save failed before that.
        """
        try:
            await self._notifier.wait_for(self._staged_or_done)
        except BaseException:
            self._delivered = True  # the caller has the cancel in hand, and no pending save
            await self._operation.aclose()
            raise
        self._require_staged()

    def wait_staged_blocking(self) -> None:
        """Wait in this thread until the tensors may change; a KeyboardInterrupt rolls the save back first."""
        try:
            self._notifier.wait_for_blocking(self._staged_or_done)
        except BaseException:
            self._delivered = True
            self._operation.close()
            raise
        self._require_staged()

    async def complete(self) -> SaveResult:
        """Wait until the checkpoint is durable; a cancel rolls the save back before it goes on."""
        self._delivered = True
        return await self._operation.wait()

    def complete_blocking(self) -> SaveResult:
        """Wait in this thread until the checkpoint is durable; a KeyboardInterrupt rolls the save back first."""
        self._delivered = True
        return self._operation.result()

    async def ended(self) -> None:
        """Wait until the save has ended, whatever became of it; a cancel ends the wait alone."""
        await self._notifier.wait_for(self.done)

    async def aclose(self) -> None:
        """Roll back, and wait until nothing of it is left."""
        await self._operation.aclose()

    def close(self) -> None:
        """Roll back, and wait in this thread until nothing of it is left."""
        self._operation.close()

    def join(self) -> None:
        """Wait in this thread until the save has ended, whatever became of it."""
        self._operation.join()

    def wait_turn(self, operation: Operation[SaveResult], *, durable: bool) -> None:
        """Hold another save's body until this one is staged, or done (called by the body)."""
        operation.on_cancel(self._notifier.notify)
        passed = self.done if durable else self._staged_or_done
        self._notifier.wait_for_blocking(lambda: passed() or operation.cancelled)
        operation.check()
        before = self._body.after  # one that was ended before its turn: those that it waited for still are
        if before is not None and self._operation.done:
            before.wait_turn(operation, durable=durable)

    def _staged_or_done(self) -> bool:
        return self._staged or self._operation.done

    def _require_staged(self) -> None:
        if not self._staged:
            self.outcome()

    def _tell_staged(self) -> None:
        self._staged = True
        self._notifier.notify()
