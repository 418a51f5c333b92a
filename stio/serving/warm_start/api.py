"""`warm_start` and `WarmStart`: a module on `meta` whose forward may run while its parameters are loaded.

On entering the block, names, shapes and dtypes are compared, buffers are loaded, and parameters become placeholders
(`parameter.py`). Then the load runs beside the block (`load.py`), on threads of stio's own, so it continues while a
forward blocks the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from stio.device.base import DeviceMap, resolve_devices
from stio.device.tensors import DtypesLike
from stio.errors import ClosedError
from stio.loading.api import load
from stio.loading.body import collect, open_with_options
from stio.loading.module import ModuleTarget
from stio.loading.options import DevicesLike, LoadOptions, Memory
from stio.loading.select import select_tensors
from stio.loading.target import LoadReport
from stio.runtime.limits import Limits
from stio.runtime.notifier import AsyncOnly, runs_blocking
from stio.runtime.operation import Operation, close_all
from stio.runtime.process import collection_paused
from stio.runtime.process import switch_interval as shortened
from stio.runtime.progress import Progress
from stio.runtime.text import described_by, keywords_for
from stio.runtime.trace import Trace, shown
from stio.serving.warm_start.load import (
    Match,
    WarmStartLoad,
    in_order,
    require_supported,
    restore_ended,
)
from stio.storage.checkpoint.caches import CacheLike
from stio.storage.checkpoint.open import SourceLike


@described_by(load)
def warm_start(
    module: nn.Module,
    source: SourceLike,
    *,
    order: Iterable[str] | None = None,
    device: DevicesLike = "cpu",
    dtype: DtypesLike | None = None,
    memory: Memory = "auto",
    budget_bytes: int | str | None = None,
    strict: bool = True,
    limits: Limits | None = None,
    verify: bool = False,
    follow_symlinks: bool = False,
    progress: Progress = None,
    cache: CacheLike | None = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
) -> WarmStart:
    """Load a module on `meta` while its forward may run already.

        async with stio.warm_start(module, "model/", device="cuda") as warm:
            out = module(x)      # each submodule waits for its own parameters only
            await warm.done()    # all parameters are loaded

    The first use of a parameter, by any function, waits in the thread that uses it. From then on the parameter is the
    real one. It is the same object, so optimizers and tied modules may hold it. Its shape, dtype and device are correct
    from the start. A wait moves the submodule to the front of the load, then the submodules behind it, so the load
    follows the order of the forward. `state_dict()`, `deepcopy`, `pickle` and conversions wait for all parameters that
    they use. Until `done()`, an error is raised by tracing, CUDA graphs and transforms below torch's Python functions.

    Leaving the block waits until all parameters are loaded. If an exception or a cancel leaves it, the load ends, and
    the use of a parameter that is not loaded raises `ClosedError`; another warm start or `load_into(assign=True)` may
    fill it.

    Args:
        module: Its parameters are on `meta`, except for those that the checkpoint does not hold. Inside the block all
            buffers are real and on the device, so the checkpoint must hold those that are on `meta`.
        order: Names of parameters or submodules in the order in which a forward uses them. None: the module's order.
        device: Device of the parameters, a single one: an argument of `torch.device`, or `"auto"`.
        dtype: Cast floating parameters to it, see `stio.load`. None: the module's dtypes.
        strict: Module and checkpoint must hold the same names. With False, parameters that the checkpoint lacks may
            not be used before `done()`, and are on `meta` after it.
        ...: The other arguments are those of `stio.load`.

    Raises:
        ValueError: On entering the block: `device=` names more than one device.
        WarmStartError: The module shards, replicates or compiles its parameters, or they are lazy, or it has load
            hooks, overridden methods of a load, or extra state.
        MismatchError: On entering the block: module and checkpoint differ.
        TensorNotFoundError: On entering the block: `order` has a name that the module does not have.
        StioError: On entering the block, by `done()` or on leaving; see `stio.load`. A use of a parameter then raises
            `ClosedError`, with the error as its cause.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))
    return WarmStart(module, source, options, order)


class WarmStart(AsyncOnly):
    """A warm start under way, made by `async with stio.warm_start(...)`.

    Args:
        module: The target.
        source: The checkpoint.
        settings: Options of the load.
        order: See `warm_start`.
    """

    _sync_name = "warm_start"

    def __init__(
        self, module: nn.Module, source: SourceLike, settings: LoadOptions, order: Iterable[str] | None
    ) -> None:
        require_supported(module)
        self._module: nn.Module | None = module
        self._source = source
        self._settings = settings
        if order is not None and not isinstance(order, Iterable):
            raise TypeError(f"order= takes names of parameters and submodules, not {order!r}")
        self._order = order
        self._load: WarmStartLoad | None = None

    async def __aenter__(self) -> Self:
        module, self._module = self._module, None  # a reference to the warm start must not hold the module
        if module is None:
            raise RuntimeError("a warm start cannot be entered twice; make another one")
        load = await self._begin(module).wait()
        load.start(module)
        self._load = load
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                await self.done()
            except GeneratorExit:
                self._begun.operation.cancel()
                raise
            except BaseException:
                with suppress(asyncio.CancelledError):  # the first exception is raised
                    await self.aclose()
                raise
        elif isinstance(error, GeneratorExit) and not runs_blocking():
            self._begun.operation.cancel()  # a coroutine that is closed must not wait again
        else:
            with suppress(asyncio.CancelledError):
                await self.aclose()

    async def done(self) -> LoadReport:
        """Wait until all parameters are loaded. A cancel ends the wait, and not the load.

        Returns:
            The names that are missing or unexpected; there are none with `strict=True`.

        Raises:
            ClosedError: The load was cancelled, or the block was not entered.
            StioError: The error of the load.
        """
        load = self._begun
        await load.notifier.wait_for(lambda: load.operation.done)
        load.operation.outcome()
        load.restore_unfilled()
        return load.report

    async def aclose(self) -> None:
        """Cancel the load if it runs, and wait until its threads have ended. Idempotent.

        After that, the use of a parameter that is not loaded raises `ClosedError`.
        """
        if self._load is None:
            return
        await close_all([self._load.operation], self._load.close)

    def _begin(self, module: nn.Module) -> Operation[WarmStartLoad]:
        """Start the work before the block."""
        restore_ended(module)
        into = ModuleTarget(module, fills=True)
        names = in_order(into.names, self._order)

        def body(operation: Operation[Any]) -> WarmStartLoad:
            with shortened(self._settings.switch_interval):
                return self._prepare(operation, module, into, names)

        return Operation(body, name="open", discard=WarmStartLoad.abandon)

    def _prepare(
        self, operation: Operation[Any], module: nn.Module, into: ModuleTarget, names: list[str]
    ) -> WarmStartLoad:
        require_supported(module)  # it may have changed since the constructor
        settings = self._settings
        where = resolve_devices(settings.device)
        if isinstance(where, DeviceMap):
            raise ValueError("a warm start has one device; place a module on several by load_into(..., assign=True)")
        opened = open_with_options(operation, self._source, settings, strict=False)
        try:
            match = Match.of(module, into, names, opened, settings)
            # `casts` has the dtype of each tensor that is cast.
            options = replace(settings, dtype=None, streams="copy", lost={})
            take_buffers: Callable[[], dict[str, torch.Tensor]] = dict
            if match.buffers:  # on the copy stream the load ends when all casts have: a forward may run on any stream
                stored = list(dict.fromkeys(match.buffers.values()))
                quiet = replace(options, progress=None)
                take_buffers = collect(operation, select_tensors(opened, stored, quiet, casts=match.casts or None))
            operation.check()
            device = where if isinstance(where, torch.device) else where.device
            load = WarmStartLoad(opened, options, match, take_buffers, device)
            with collection_paused(len(match.parameters)):
                load.make_placeholders(module, match.parameters)
        except BaseException:
            opened.discard()
            raise
        return load

    @property
    def _begun(self) -> WarmStartLoad:
        if self._load is None:
            raise ClosedError("the warm start is not entered; use it inside its `with` block", path=shown(self._source))
        return self._load
