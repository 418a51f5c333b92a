"""Saving, for people: `save`, and a `Saver` whose saves go on while the training does.

The work is the engine's; what stands here turns calls into saves (`stio.saving.pending`) and waits for them, on asyncio,
uvloop or trio. No task group and no cancel scope of the caller's is held while the caller's code runs.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.saving.nested import flatten
from stio.saving.options import DestinationLike, SaveKeywords, SaveOptions, SaveResult, TensorsLike
from stio.saving.pending import PendingSave
from stio.saving.saver import SaverBase
from stio.saving.staging_pool import StagingPool

__all__ = ["Saver", "save"]


async def save(
    tensors: TensorsLike,
    destination: DestinationLike,
    *,
    budget_bytes: int | None = None,
    **keywords: Unpack[SaveKeywords],
) -> SaveResult:
    """Save a checkpoint, atomically and durably.

    Args:
        tensors: Tensors by name (some may be `stio.LazyTensor`), or a module. They must not change meanwhile; a `Saver`
            returns earlier.
        destination: A path ending in `.safetensors` is one file; any other path is a directory in the hub's layout,
            updated in place where it holds a checkpoint. Other files in it are not touched.
        budget_bytes: Most bytes of staging memory, 512 MiB by default. A tensor that a producer made comes on top.
        **keywords: See `SaveKeywords`.

    Returns:
        What was saved, once it survives a power cut.

    Raises:
        NoSpaceError: It does not fit; known before the first byte is written.
        ConcurrentSaveError: Another save changed the destination meanwhile.
        CommitUncertainError: It is in place, but the system did not confirm that it is durable.
        StioError: See `stio.errors`. The old checkpoint stands whatever else is raised, a cancel included.
    """
    return await PendingSave(
        tensors,
        destination,
        SaveOptions(**keywords),
        pool=StagingPool(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes),
        stage_first=False,
    ).complete()


class Saver(SaverBase):
    """Saves that cost the caller the snapshot alone: writing and publishing go on meanwhile.

        async with stio.Saver(keep_last=3) as saver:
            pending = await saver.save(model.state_dict(), "step-100/")  # the snapshot is complete
            ...                                                          # training goes on, tensors may change
            result = await pending                                       # durable, or it raises

    A save that failed and that nobody awaited is raised by the next `save`, or on leaving. Leaving the block waits for
    what is under way, by an exception too; leaving it by a cancel rolls back. Staging memory is kept between saves.
    """

    async def save(
        self, tensors: TensorsLike, destination: DestinationLike, **keywords: Unpack[SaveKeywords]
    ) -> PendingSave:
        """Begin a save; return once its snapshot is complete, and the tensors may change.

        A cancel of this call rolls the save back.

        Args:
            tensors: See `stio.save`.
            destination: See `stio.save`.
            **keywords: See `SaveKeywords`; they go before the saver's own.

        Raises:
            SaveInProgressError: As many saves as may be are under way, and `when_full="error"`.
            StioError: This save failed before its snapshot was complete, or an earlier one did and nobody was told.
        """
        while (pending := self._submit(tensors, destination, keywords)) is None:
            if (oldest := self._oldest()) is not None:
                await oldest.ended()
        await pending.wait_staged()
        return pending

    async def save_state(
        self, state: object, destination: DestinationLike, **keywords: Unpack[SaveKeywords]
    ) -> PendingSave:
        """Begin to save nested state; return once its snapshot is complete, and all of it may change.

        Args:
            state: See `stio.save_state`.
            destination: See `stio.save`.
            **keywords: See `SaveKeywords`; they go before the saver's own.

        Raises:
            StioError: See `save`.
        """
        tensors, keywords = await flatten(state, self._keywords | keywords)
        return await self.save(tensors, destination, **keywords)

    async def aclose(self) -> None:
        """Wait for what is under way; raise what failed and nobody was told of. Idempotent.

        A cancel meanwhile rolls back what is left.
        """
        self._close()
        try:
            await self._drain()
        finally:
            failed = self._finish()
        if failed is not None:
            raise failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            return
        self._close()
        try:
            if isinstance(error, Exception | SystemExit):
                await self._drain()
            else:
                await self._roll_back()
        finally:
            self._finish()  # the exception at hand goes first; failures were logged

    async def _drain(self) -> None:
        try:
            while (oldest := self._oldest()) is not None:
                await oldest.ended()
        except BaseException:
            await self._roll_back()
            raise

    async def _roll_back(self) -> None:
        interrupted: BaseException | None = None
        for pending in reversed(self.pending):
            pending.cancel()
        for pending in self.pending:
            try:
                await pending.aclose()
            except BaseException as error:
                interrupted = error  # it has ended all the same; the others must, too
        if interrupted is not None:
            raise interrupted
