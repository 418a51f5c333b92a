"""Warm starts, for people: a module on `meta` whose forward may start while its parameters are still being loaded.

On entering the block, names, shapes and dtypes are compared, buffers are loaded, and parameters become ones that
wait (`stio.loading.warm_start.parameter`). Then the load goes on beside the block (`stio.loading.warm_start.load`), on threads of the engine's: it
needs nothing of a loop whose thread a forward blocks. What both faces share stands here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import nn

from stio.device.base import LoadedGroup
from stio.device.placement import Placement
from stio.errors import ClosedError
from stio.loading.body import gather, verify
from stio.loading.module import Into, LoadReport
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.loading.options import Keywords, Settings, SourceLike
from stio.loading.targets import LoadOptions
from stio.loading.warm_start.load import WarmStartLoad
from stio.loading.warm_start.match import Fit, in_order, install_buffers, require_fit, revive
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused
from stio.runtime.process import switch_interval as shortened
from stio.runtime.trace import traced

__all__ = ["WarmStart", "WarmStartBase", "warm_start"]


def warm_start(
    module: nn.Module, source: SourceLike, *, order: Iterable[str] | None = None, **keywords: Unpack[Keywords]
) -> WarmStart:
    """Load a module on `meta` while its forward may run already.

        async with stio.warm_start(module, "model/", device="cuda") as warm:
            out = module(x)      # each submodule waits for its own parameters only
            await warm.done()    # everything is there

    A parameter waits, in the thread that uses it, at its first use on whatever path, and is the real one from then
    on: the same object, which optimizers and tied modules may hold. Its shape, dtype and device are known at once. A
    wait moves the submodule to the front and what comes behind it next, so a forward finds its own order.
    `state_dict()`, `deepcopy`, `pickle` and conversions wait for all that they touch. Tracing, CUDA graphs and
    transforms that look below torch's Python functions are refused until `done()`.

    Leaving the block waits until all is there. If an exception or a cancel leaves it, the load ends, and using a
    parameter that has not come raises `ClosedError`; another warm start or `load_into(assign=True)` may fill it.

    Args:
        module: Its parameters are on `meta`, except for those that the checkpoint does not hold. Buffers are real
            when the block begins, on the device; so the checkpoint must hold those that are on `meta`.
        source: See `load`.
        order: Names of parameters or submodules in the order in which a forward uses them; else the module's own.
        **keywords: See `Keywords`. Without `dtype` parameters have the module's dtype. With `strict=False`
            parameters that the checkpoint lacks may not be used before `done()`, and are on `meta` after it.

    Raises:
        ValueError: On entering the block: `device=` names more than one device.
        WarmStartError: The module shards, replicates or compiles its parameters, or they are lazy.
        MismatchError: On entering the block: module and checkpoint differ.
        TensorNotFoundError: On entering the block: `order` names what the module has not.
        StioError: On entering the block, by `done()` or on leaving; see `load`. A use of a parameter raises
            `ClosedError` then, with the error as its cause.
    """
    return WarmStart(module, source, Settings(**keywords), order)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What is there when the block may begin."""

    filling: WarmStartLoad
    """The load, not begun yet; the parameters wait for it."""
    fit: Fit
    """How module and checkpoint go together."""
    buffers: tuple[LoadedGroup, ...]
    """Loaded buffers, not handed over yet."""
    device: torch.device
    """Where the module will be."""


class WarmStartBase:
    """What the faces share: all but the waiting.

    Args:
        module: The target.
        source: The checkpoint.
        settings: Keywords.
        order: See `warm_start`.
    """

    def __init__(self, module: nn.Module, source: SourceLike, settings: Settings, order: Iterable[str] | None) -> None:
        require_fit(module)
        self._module: nn.Module | None = module
        self._source = source
        self._settings = settings
        self._order = order
        self._filling: WarmStartLoad | None = None
        self._report = LoadReport((), ())

    def _begin(self) -> Operation[_Ready]:
        """Begin what is to be done before the block."""
        module, self._module = self._module, None  # whoever keeps us must not keep it
        if module is None:
            raise RuntimeError("a warm start is entered once; make another one")
        revive(module)
        into = Into(module, fills=True)
        names = in_order(list(into.sources), self._order)

        def body(operation: Operation[Any]) -> _Ready:
            with shortened(self._settings.switch_interval):
                return self._prepare(operation, module, into, names)

        return Operation(body, name="open", discard=lambda ready: ready.filling.abandon()).start()

    def _prepare(self, operation: Operation[Any], module: nn.Module, into: Into, names: list[str]) -> _Ready:
        require_fit(module)  # it may have changed since it was given to us
        settings = self._settings
        options = settings.load_options()
        target = options.device
        if isinstance(target, Placement):
            raise ValueError("a warm start has one device; place a module on several by load_into(..., assign=True)")
        with traced(settings.trace, "open"):
            opened = open_checkpoint(
                self._source, replace(settings.open_options(), strict=False), check=operation.check
            )
        try:
            fit = Fit.of(module, into, names, opened, dtype=settings.dtype, strict=settings.strict)
            verify(opened, settings, operation)
            options = replace(options, dtype=fit.casts or None, prompt=True)
            buffers = _load_buffers(operation, opened, fit, options)
            operation.check()
            device = target if isinstance(target, torch.device) else target.device
            filling = WarmStartLoad(opened, options, device, settings.switch_interval)
            with collection_paused(len(fit.wishes)):
                filling.adopt(module, fit.wishes)
        except BaseException:
            opened.discard()
            raise
        return _Ready(filling, fit, buffers, device)

    def _go_on(self, module: nn.Module, ready: _Ready) -> None:
        """Finish what is to be done before the block, on the caller's thread and stream, and begin the load."""
        try:
            tensors: dict[str, torch.Tensor] = {}
            for landed in ready.buffers:
                tensors |= landed.take()
            install_buffers(module, ready.fit.buffers, tensors, ready.device)
            ready.filling.operation.start()
        except BaseException:
            ready.filling.abandon()
            raise
        self._filling = ready.filling
        self._report = ready.fit.report

    @property
    def _load(self) -> WarmStartLoad:
        if self._filling is None:
            raise ClosedError("the warm start has not begun; use it inside its `with` block", path=str(self._source))
        return self._filling

    def _outcome(self) -> LoadReport:
        self._load.operation.outcome()
        self._load.settle()
        return self._report


def _load_buffers(
    operation: Operation[Any], opened: OpenCheckpoint, fit: Fit, options: LoadOptions
) -> tuple[LoadedGroup, ...]:
    if not fit.buffers:
        return ()
    names = list(dict.fromkeys(fit.buffers.values()))
    loaded = gather(operation, opened, names, replace(options, progress=None, prompt=False))
    for landed in loaded:
        landed.wait()  # here and on the host, casts too: a forward may run on any stream
    return tuple(loaded)


class WarmStart(WarmStartBase):
    """A warm start under way. Get one by `async with stio.warm_start(...)`."""

    async def __aenter__(self) -> Self:
        module = self._module
        ready = await self._begin().wait()
        assert module is not None
        self._go_on(module, ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                await self.done()
            except BaseException:
                with suppress(asyncio.CancelledError):  # the exception at hand goes first
                    await self.aclose()
                raise
        elif isinstance(error, GeneratorExit):
            self._load.operation.cancel()  # the coroutine is thrown away, it must not wait any more
        else:
            with suppress(asyncio.CancelledError):
                await self.aclose()

    async def done(self) -> LoadReport:
        """Wait until all parameters are there; a cancel ends the wait alone.

        Returns:
            The names that are missing or unexpected (only with `strict=False` are there any).

        Raises:
            ClosedError: The load was ended before that.
            StioError: What it failed with.
        """
        load = self._load
        await load.notifier.wait_for(lambda: load.operation.done)
        return self._outcome()

    async def aclose(self) -> None:
        """End the load, if it has not ended, and wait until nothing of it is left. Idempotent."""
        if self._filling is not None:
            try:
                await self._filling.operation.aclose()
            finally:
                self._filling.close()
