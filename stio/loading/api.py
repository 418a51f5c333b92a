"""Loading, for people: `open`, `load`, `load_into`, and the checkpoint and stream that they work with.

The work is the engine's; what stands here turns calls into operations (`stio.loading.body`) and waits for them, on
asyncio, uvloop or trio. No task group and no cancel scope of the caller's is held while the caller's code runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self, Unpack

import torch
from torch import nn

from stio.loading.body import IntoLoad, start_load
from stio.loading.module import LoadReport
from stio.loading.options import Keywords, Settings, SourceLike
from stio.loading.plan import Names
from stio.loading.session import CheckpointBase, StreamBase

__all__ = ["Checkpoint", "Stream", "load", "load_into", "open"]


async def load(
    source: SourceLike,
    *,
    names: Names | None = None,
    slices: Mapping[str, object] | None = None,
    **keywords: Unpack[Keywords],
) -> dict[str, torch.Tensor]:
    """Load a checkpoint.

    Args:
        source: A `.safetensors` file, a directory (its `model.safetensors.index.json`, or its only
            `*.safetensors`), or an index file.
        names: What to load: one name, several, or a predicate; everything by default.
        slices: By name, an index as `numpy.s_[...]` gives it; only those bytes are read.
        **keywords: See `Keywords`.

    Returns:
        Tensors by name, in the order of their data; tied weights are the same tensor under each name. They live
        on their own: nothing stays open.

    Raises:
        IntegrityError: With `verify=True`: a file is not what the checkpoint's manifest says, or there is none.
        StioError: See `stio.errors`. Whatever is raised, a cancel included, no thread reads into memory any more.
    """
    settings = Settings(**keywords)
    take = await start_load(source, settings, names, slices).wait()
    return take()


async def load_into(
    module: nn.Module, source: SourceLike, *, assign: bool = False, **keywords: Unpack[Keywords]
) -> LoadReport:
    """Load a checkpoint into a module.

    Names and shapes are compared before anything is read. A cancel or an error leaves the module partly filled.

    Args:
        module: The target; its `state_dict()` decides names and shapes.
        source: See `load`.
        assign: Replace the module's tensors (they may be on `meta`) instead of copying into them.
        **keywords: See `Keywords`; `device` counts with `assign` only.

    Returns:
        The names that are missing or unexpected (only with `strict=False` are there any).

    Raises:
        MismatchError: Module and checkpoint differ.
        StioError: See `load`.
    """
    return await _place(IntoLoad(source, module, Settings(**keywords), assign=assign))


async def _place(load: IntoLoad) -> LoadReport:
    load.feed.operation.start()
    try:
        while (landed := await load.feed.next()) is not None:
            load.place(landed)
    except BaseException:
        try:
            await load.feed.aclose()  # placing failed: nobody takes what is still to come
        finally:
            load.discard()
        raise
    return load.complete()


def open(source: SourceLike, **keywords: Unpack[Keywords]) -> Checkpoint:
    """Return a checkpoint to be opened by `async with`; see `load` for what `source` takes.

    With `verify=True` all its files are hashed on entering the block, which raises as `load` does.
    """
    return Checkpoint(source, Settings(**keywords))


class Checkpoint(CheckpointBase):
    """An open checkpoint. Get one by `async with stio.open(...)`; leaving the block ends what it still does.

    Tensors that it gave out stay valid after that.
    """

    async def __aenter__(self) -> Self:
        self._opened = await self._start_open().wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End operations under way, and give the descriptors back. Idempotent."""
        opened, operations = self._begin_close()
        interrupted: BaseException | None = None
        for operation in operations:
            try:
                await operation.aclose()
            except BaseException as error:
                interrupted = error  # it has ended all the same; the others must, before their files are closed
        if opened is not None:
            opened.discard()
        if interrupted is not None:
            raise interrupted

    async def load(
        self, names: Names | None = None, slices: Mapping[str, object] | None = None
    ) -> dict[str, torch.Tensor]:
        """Load tensors; see `stio.load`."""
        take = await self._start_load(names, slices).wait()
        return take()

    async def read(self, name: str, index: object = None) -> torch.Tensor:
        """Load one tensor, or a part of it.

        Args:
            name: The tensor.
            index: What `tensor[index]` would pick, as `numpy.s_[...]` gives it; only those bytes are read.

        Raises:
            TensorNotFoundError: There is none of this name.
            SliceError: The index does not fit.
        """
        take = await self._start_load(*self._one(name, index)).wait()
        return take()[name]

    def stream(self, names: Names | None = None, slices: Mapping[str, object] | None = None) -> Stream:
        """Return tensors as they become ready, within the budget; see `Stream`."""
        return Stream(self._feed(names, slices))

    async def load_into(self, module: nn.Module, *, strict: bool | None = None, assign: bool = False) -> LoadReport:
        """Load into a module; see `stio.load_into`."""
        return await _place(self._into(module, strict=strict, assign=assign))


class Stream(StreamBase, AsyncIterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor, in the order in which they become ready.

    Reading runs ahead by the budget and no further. Iterate it, or hold it by `async with` first; leaving the
    block ends it, and so does dropping it: nothing goes on for an iterator that nobody holds.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        self._begin()
        while not self._names:
            landed = await self._feed.next()
            if landed is None:
                raise StopAsyncIteration
            self._unpack(landed)
        return self._pop()

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the reading, and wait until nothing of it is left. Idempotent."""
        self._end()
        await self._feed.aclose()
