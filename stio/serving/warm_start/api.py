"""`warm_start` and `WarmStart`: a module on `meta` whose forward may run while its parameters are loaded.

On entering the block, module and checkpoint are compared (`Match`), and modules whose parameters cannot be placeholders
are rejected: by names, shapes and dtypes, before the first tensor is read. Parameters become placeholders
(`parameter.py`). Buffers are loaded before the block: a computation with a buffer on `meta` would raise no error. Then
the load runs beside the block, on threads of stio's own, so it continues while a forward blocks the thread of the event
loop.

Groups are small, so that the first ones arrive early, and are read in the given order. A use that waits for a parameter
moves its submodule to the front, and then the submodules behind it, since the forward uses them next. The load's thread
fills the parameters, so no fill waits for the thread of an event loop that a forward blocks. Until a submodule's own
parameters are filled, a hook blocks its forward: custom kernels and `autograd.Function` use parameters without regard
to their class. A hook is removed when the submodule's last parameter is filled, and all hooks at the end of the load.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.jit._trace import is_tracing
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from stio import process
from stio.device import (
    TORCH_DTYPES,
    Casts,
    DeviceMap,
    LoadedGroup,
    Lost,
    TargetMemory,
    TorchAccelerator,
    copy_of,
    moved,
    typed,
)
from stio.errors import ClosedError, MismatchError, TensorNotFoundError, WarmStartError, listed, printable
from stio.limits import Limits
from stio.loading import (
    Delivery,
    DevicesLike,
    DtypesLike,
    Group,
    LoadOptions,
    LoadScheduler,
    Memory,
    collect,
    load,
    open_with_options,
    planned_casts,
    scheduled,
    select_tensors,
)
from stio.loading.targets import LoadReport, ModuleTarget
from stio.process import new_lock
from stio.runtime import AsyncOnly, Notifier, Operation, close_all, runs_blocking
from stio.runtime.reports import Progress, Trace, shown
from stio.serving.warm_start.parameter import MatchedParameter, Placeholder, PlaceholderParameter, placeholder_of
from stio.storage.checkpoint import CacheLike, OpenCheckpoint, SourceLike
from stio.text import described_by, keywords_for

_is_tracing: Callable[[], bool] = is_tracing  # torch leaves it untyped


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
        restore_ended(module)
        into = ModuleTarget(module, fills=True)
        names = in_order(into.names, self._order)

        def body(operation: Operation[Any]) -> WarmStartLoad:
            with process.switch_interval(self._settings.switch_interval):
                return self._prepare(operation, module, into, names)

        load = await Operation(body, name="open", discard=WarmStartLoad.abandon).wait()
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

    def _prepare(
        self, operation: Operation[Any], module: nn.Module, into: ModuleTarget, names: list[str]
    ) -> WarmStartLoad:
        require_supported(module)  # it may have changed since the constructor
        settings = self._settings
        where = DeviceMap.of(settings.device)
        if isinstance(where, DeviceMap):
            raise ValueError("a warm start has one device; place a module on several by load_into(..., assign=True)")
        opened = open_with_options(operation, self._source, settings, strict=False)
        try:
            match = Match.of(module, into, names, opened, settings)
            # `casts` has the dtype of each tensor that is cast.
            options = replace(settings, dtype=None, streams="copy", lost=Lost())
            take_buffers: Callable[[], dict[str, torch.Tensor]] = dict
            if match.buffers:  # on the copy stream the load ends when all casts have: a forward may run on any stream
                stored = list(dict.fromkeys(match.buffers.values()))
                quiet = replace(options, progress=None)
                take_buffers = collect(
                    operation, select_tensors(opened, stored, quiet, casts=Casts(by_name=match.casts))
                )
            operation.check()
            device = where if isinstance(where, torch.device) else where.device
            load = WarmStartLoad(opened, options, match, take_buffers, device)
            with process.collection_paused(len(match.parameters)):
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


@dataclass(frozen=True, slots=True)
class Match:
    """The tensors that a module and a checkpoint have in common."""

    report: LoadReport
    """Names that only one of them has."""
    parameters: tuple[MatchedParameter, ...]
    """The parameters to be filled, in the order in which they are read."""
    buffers: Mapping[int, str]
    """Name of the data in the checkpoint, by the id of the buffer."""
    casts: Mapping[str, torch.dtype]
    """Dtype to cast to, by the checkpoint's name."""

    @classmethod
    def of(
        cls, module: nn.Module, into: ModuleTarget, names: Sequence[str], opened: OpenCheckpoint, options: LoadOptions
    ) -> Match:
        """Compare a module with a checkpoint; reads nothing.

        Args:
            module: The target.
            into: Its tensors.
            names: Their names in the order in which they are read.
            opened: The checkpoint.
            options: Options of the load. Floating tensors are cast to its `dtype`, others to the module's, as all are
                with None.

        Raises:
            MismatchError: Module and checkpoint differ.
            UnsupportedDtypeError: torch has no such dtype, or no such cast.
        """
        into.select(opened, options, lambda: None)
        stored = opened.dtypes_and_shapes()
        parameters: list[MatchedParameter] = []
        buffers: dict[int, str] = {}
        casts: dict[str, torch.dtype] = {}
        seen: set[int] = set()
        sources = into.sources
        kinds = {name: kind for name, (kind, _) in stored.items()}
        chosen = [source for source, _ in sources.values() if source in kinds]
        wanted = planned_casts(kinds, options.casts, path=opened.path, selected=chosen)
        for name in names:
            source, target = sources[name]
            if source not in stored or id(target) in seen:
                continue
            seen.add(id(target))
            own = wanted.floating or wanted.by_name.get(source)
            final = _final_dtype(name, stored[source][0], target, own, opened.path)
            casts.setdefault(source, final)
            if isinstance(target, nn.Parameter):
                parameters.append(MatchedParameter(target, name, source, final))
            else:
                buffers[id(target)] = source
        _require_meta(module, parameters, seen, opened.path)
        parameters += [
            MatchedParameter(parameter, name, None, parameter.dtype)
            for name, parameter in module.named_parameters()
            if parameter.is_meta and id(parameter) not in seen
        ]
        casts = {name: final for name, final in casts.items() if final != TORCH_DTYPES[stored[name][0]]}
        return cls(into.report, tuple(parameters), buffers, casts)


@dataclass(slots=True)
class _Owner:
    """A submodule and the placeholders that its forward needs."""

    placeholders: list[Placeholder]
    """Its own parameters that have data in the checkpoint."""
    left: set[Placeholder]
    """Those that are not filled yet."""
    handle: RemovableHandle | None = None
    """Its hook."""


class WarmStartLoad:
    """One load into placeholder parameters.

    Args:
        opened: The checkpoint; closed when the load has ended.
        options: Options of the load.
        match: What module and checkpoint have in common; its `casts` are used instead of `options.dtype`.
        take_buffers: Returns the loaded buffers, which are not yet passed to the stream of the caller's thread.
        device: Device of the parameters and buffers.
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        options: LoadOptions,
        match: Match,
        take_buffers: Callable[[], dict[str, torch.Tensor]],
        device: torch.device,
    ) -> None:
        self._opened = opened
        self._path = opened.path
        self._options = options
        self.report = match.report
        """Names that only the module or only the checkpoint has."""
        self._casts = Casts(by_name=match.casts)
        self._names_of_buffers = match.buffers
        self._take_buffers = take_buffers
        self._device = device
        self._placeholders: list[Placeholder] = []
        self._by_source: dict[str, list[Placeholder]] = {}
        self._owners: dict[Placeholder, list[_Owner]] = {}
        self._encoders: list[nn.TransformerEncoder] = []
        self._lock = new_lock()  # for fills, `_owners` and `_encoders`, on stio's threads
        self._abandoned = False
        self._scheduler: LoadScheduler | None = None
        self._groups: list[int] = []  # of the plan, in the order of the parameters
        self._group_of: dict[str, int] = {}
        self._needed: list[str] = []
        self._process = os.getpid()
        self._stream: Any = None
        self.notifier = Notifier()
        """Notified when parameters were filled, and at the end."""
        self.operation: Operation[None] = Operation(
            self._body, name="warm_start", kind="load", about=opened.path, notifier=self.notifier
        )
        """The load; not started by the constructor."""

    # The module.

    def make_placeholders(self, module: nn.Module, parameters: Sequence[MatchedParameter]) -> None:
        """Make placeholders of a module's parameters: of all of them or, after an error, of none."""
        loaded: dict[int, Placeholder] = {}
        try:
            for found in parameters:
                placeholder = Placeholder(found, device=self._device, wait=self.wait, has_ended=self.has_ended)
                self._placeholders.append(placeholder)
                if found.source is not None:
                    self._by_source.setdefault(found.source, []).append(placeholder)
                    loaded[id(found.parameter)] = placeholder
            self._attach(module, loaded)
        except BaseException:
            self.abandon()
            raise

    def _attach(self, module: nn.Module, loaded: Mapping[int, Placeholder]) -> None:
        """Add hooks to the modules of placeholders that will be filled, which are given by the id of the parameter."""
        for part in module.modules():
            own = [loaded[id(parameter)] for parameter in part._parameters.values() if id(parameter) in loaded]
            if own:
                owner = _Owner(own, set(own))
                for placeholder in own:
                    self._owners.setdefault(placeholder, []).append(owner)
                owner.handle = part.register_forward_pre_hook(_waits(self, own), prepend=True)
            if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False):
                # It checks its first layer only before it makes a nested tensor. The fast path of the layers alone
                # accepts such a tensor, and a layer with placeholders uses the other path.
                part.use_nested_tensor = False
                self._encoders.append(part)

    def _detach(self) -> None:
        """Remove hooks and settings from the module. Idempotent."""
        with self._lock:
            owners, self._owners = self._owners, {}
            encoders, self._encoders = self._encoders, []
        for owner in [owner for owners_of_one in owners.values() for owner in owners_of_one]:
            if owner.handle is not None:
                owner.handle.remove()
        for encoder in encoders:
            encoder.use_nested_tensor = True

    def abandon(self) -> None:
        """Undo `make_placeholders`; the operation was not started."""
        self._abandoned = True
        self.notifier.notify()
        self._release_all()
        self.restore_unfilled()

    def close(self) -> None:
        """Release module and files, as the end of the load does, if the operation was never started."""
        if not self.operation.running:
            self._release_all()

    def _release_all(self) -> None:
        self._scheduler = None
        self._detach()
        for placeholder in self._placeholders:
            if placeholder.filled:
                placeholder.release()
        self._placeholders = [placeholder for placeholder in self._placeholders if not placeholder.filled]
        self._by_source = {}
        self._opened.discard()

    def restore_unfilled(self) -> None:
        """Restore parameters that the checkpoint lacks (strict=False) to plain ones on `meta`. Idempotent."""
        placeholders, self._placeholders = self._placeholders, []
        for placeholder in placeholders:
            placeholder.restore()

    # The load.

    def start(self, module: nn.Module) -> None:
        """Place the buffers, and start the load. Called on the caller's thread, whose current stream will use both."""
        self._stream = TorchAccelerator.current_streams().get(self._device)
        take_buffers, self._take_buffers = self._take_buffers, dict
        try:
            tensors = take_buffers()
            record(tensors.values(), self._device, self._stream)
            place_buffers(module, self._names_of_buffers, tensors, self._device, self._path)
            self.operation.start()
        except BaseException:
            self.abandon()
            raise

    def _body(self, operation: Operation[None]) -> None:
        try:
            with process.switch_interval(self._options.switch_interval):
                names = list(self._by_source)
                selected = select_tensors(self._opened, names, self._options, casts=self._casts)
                scheduler = scheduled(selected, Delivery(deliver=self._deliver, prompt=True))
                self._group_of = {name: group.index for group in scheduler.plan.groups for name in group.names}
                self._groups = list(dict.fromkeys(self._group_of[name] for name in names))
                scheduler.arrange(self._groups)
                self._scheduler = scheduler
                self._reorder()  # for uses that started to wait before there was a scheduler
                operation.on_cancel(scheduler.stop)
                scheduler.run()
                (self._options.lost or Lost()).report(self._path)
        finally:
            self._release_all()

    def _deliver(self, _: Group, group: LoadedGroup) -> None:
        """Fill a group's parameters."""
        tensors = group.take()
        record(tensors.values(), self._device, self._stream)  # the load has allocated them under the copy stream
        # Names that are tied in the checkpoint and not in the module: copied before a use may change the first one.
        others = [(placeholder, name) for name in tensors for placeholder in self._by_source[name][1:]]
        twins = _copies([(tensors[name], placeholder.dtype) for placeholder, name in others], self._device)
        record(twins, self._device, self._stream)
        filled = [(placeholder, twin) for (placeholder, _), twin in zip(others, twins, strict=True)]
        self._fill(filled + [(self._by_source[name][0], tensor) for name, tensor in tensors.items()])
        self.notifier.notify()

    def _fill(self, filled: Sequence[tuple[Placeholder, torch.Tensor]]) -> None:
        """Fill placeholders.

        The hook of a module is removed before the last fill, so no copy of the module has the hook, and when all other
        parameters of the module are filled.
        """
        with self._lock:
            for placeholder, tensor in filled:
                for owner in self._owners.get(placeholder, ()):
                    owner.left.discard(placeholder)
                    if not owner.left and owner.handle is not None:
                        owner.handle.remove()
                        owner.handle = None
                placeholder.fill(tensor if placeholder.parameter.dim() else typed(tensor, ()))

    # Called by uses of parameters.

    def has_ended(self) -> bool:
        """Whether no more parameters will be filled."""
        return self._abandoned or self.operation.done

    def wait(self, placeholders: Sequence[Placeholder]) -> None:
        """Block until these are filled.

        Raises:
            ClosedError: They will not be filled: the load failed or was cancelled.
            TensorNotFoundError: The checkpoint has no data for one of them.
            WarmStartError: A trace or a CUDA graph would capture the placeholder.
        """
        for placeholder in placeholders:
            if placeholder.source is None:
                message = "the checkpoint has no data for this parameter, which strict=False allows"
                raise TensorNotFoundError(message, path=self._path, requested=placeholder.name)
        if all(placeholder.filled for placeholder in placeholders):
            return
        self._require_ordinary()
        self._needed = [needed.source for needed in placeholders if needed.source is not None and not needed.filled]
        self._reorder()
        self.notifier.block_until(lambda: self.has_ended() or all(placeholder.filled for placeholder in placeholders))
        for placeholder in placeholders:
            if not placeholder.filled:
                raise self._error_for(placeholder)

    def _require_ordinary(self) -> None:
        what = ""
        if _is_tracing():
            what = "torch.jit.trace"
        elif self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            what = "a CUDA graph"
        if what:
            raise WarmStartError(f"{what} would capture parameters that are not loaded yet; capture after `done()`")

    def _reorder(self) -> None:
        """Read the needed parameters next, then those of their submodules, then the following ones in the order."""
        scheduler, needed = self._scheduler, self._needed
        if scheduler is None or not needed or self.has_ended():
            return
        own = [
            sibling.source
            for name in needed
            for placeholder in self._by_source.get(name, ())
            for owner in self._owners.get(placeholder, ())
            for sibling in owner.placeholders
            if sibling.source is not None
        ]
        first = [self._group_of[name] for name in (*needed, *own)]
        scheduler.arrange([*first, *self._groups[self._groups.index(first[0]) :]])

    def _error_for(self, placeholder: Placeholder) -> ClosedError:
        failure = self.operation.failure
        why = "ended before that" if failure is None else f"failed: {failure}"
        if os.getpid() != self._process:
            why = "is the parent's, and not of a forked child; fork after `done()`"
        error = ClosedError(f"{printable(placeholder.name)} was not loaded: the warm start {why}", path=self._path)
        error.__cause__ = failure
        return error


def _waits(load: WarmStartLoad, placeholders: Sequence[Placeholder]) -> Callable[[nn.Module, object], None]:
    """Return a hook. It is a plain function: a copy of the module would copy the object of a bound method too."""

    def wait_for_parameters(module: nn.Module, inputs: object) -> None:
        # torch.jit.script fails here on purpose: parameters without data must not be compiled; script after `done()`.
        if left := [placeholder for placeholder in placeholders if not placeholder.filled]:
            load.wait(left)

    return wait_for_parameters


def _copies(pairs: Sequence[tuple[torch.Tensor, torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Return copies of tensors with these dtypes.

    They are complete, for any stream; nothing that a user has queued is waited for.
    """
    if not pairs:
        return []
    with nullcontext() if device.type == "cpu" else TorchAccelerator(device).on_stream():
        return [copy_of(tensor) if tensor.dtype == dtype else tensor.to(dtype) for tensor, dtype in pairs]


def record(tensors: Iterable[torch.Tensor], device: torch.device, stream: Any) -> None:
    """Record that a stream, None: the default one, uses tensors that a load has allocated under the copy stream."""
    if device.type != "cpu":
        TorchAccelerator(device).record(tensors, stream)


_FOREIGN = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.", "torch.jit.")
"""Python modules whose classes handle parameters themselves."""


def require_supported(module: nn.Module) -> None:
    """Raise for modules whose parameters cannot be placeholders.

    Raises:
        WarmStartError: A part of the module, or a parameter, that handles uses of parameters itself.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"warm_start takes a module, not {type(module).__name__}")
    foreign: dict[type[nn.Module], bool] = {}  # a model has thousands of modules, of a few kinds
    for name, part in module.named_modules():
        kind = type(part)
        if kind not in foreign:
            foreign[kind] = any(f"{base.__module__}.".startswith(_FOREIGN) for base in kind.__mro__)
        if foreign[kind] or getattr(part, "_compiled_call_impl", None) is not None:
            shown = f"the submodule {printable(name)!r}, a {kind.__name__}," if name else f"a {kind.__name__}"
            raise WarmStartError(
                f"{shown} cannot be warm-started: it is compiled, or shards or replicates its parameters; warm-start "
                "the plain module, and wrap or compile it after `done()`"
            )
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and (why := _unsupported(tensor)):
                shown = f"{name}.{leaf}" if name else leaf
                raise WarmStartError(f"{printable(shown)} cannot be warm-started, {why}")


def _unsupported(tensor: torch.Tensor) -> str:
    """Return why a warm start cannot fill this tensor; empty if it can."""
    kind = type(tensor)
    if isinstance(tensor, PlaceholderParameter):
        placeholder = placeholder_of(tensor)
        return "" if placeholder is None or placeholder.has_ended() else "another warm start has not filled it yet"
    if is_lazy(tensor):
        return "it is lazy: first set its shapes by a forward with an input on 'meta'"
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if isinstance(tensor, nn.Parameter):
        plain = plain and kind.__torch_function__ is nn.Parameter.__torch_function__
    if tensor.is_meta and not plain:
        return f"its class {kind.__name__} handles its uses itself; warm-start the module before the conversion"
    return ""


def restore_ended(module: nn.Module) -> None:
    """Restore parameters that an earlier warm start left without data to plain ones on `meta`."""
    for parameter in module.parameters():
        if (
            isinstance(parameter, PlaceholderParameter)
            and (placeholder := placeholder_of(parameter)) is not None
            and placeholder.has_ended()
        ):
            placeholder.restore()


def in_order(names: Sequence[str], order: Iterable[str] | None) -> list[str]:
    """Return names in the caller's order; names that it does not mention come last, in the module's order.

    Args:
        names: The module's, in its own order.
        order: Names of tensors, and of submodules for all tensors in them.

    Raises:
        TensorNotFoundError: `order` has a name that the module does not have.
    """
    if order is None:
        return list(names)
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            below.setdefault(".".join(parts[:k]), []).append(name)
    found: dict[str, None] = {}
    for item in [order] if isinstance(order, str) else order:
        if item not in below:
            raise TensorNotFoundError("order= takes names of the module's parameters and submodules", requested=item)
        found |= dict.fromkeys(below[item])
    return [*found, *(name for name in names if name not in found)]


def _final_dtype(name: str, stored: str, target: torch.Tensor, cast_to: torch.dtype | None, path: str) -> torch.dtype:
    TORCH_DTYPES.require([stored], path=path)
    own = TORCH_DTYPES[stored]
    final = cast_to if cast_to is not None and own.is_floating_point else target.dtype
    if TORCH_DTYPES.loses_values(stored, final):
        message = "a cast would lose the values of a tensor; load_into(..., assign=True) keeps the checkpoint's dtype"
        raise MismatchError(message, path=path, expected=str(final), found=f"{stored} for {name}")
    if final != own:
        Lost().cast(
            name, torch.empty(1, dtype=own), final
        )  # an error of the cast is raised now, and not during the load
    if target.requires_grad and not (final.is_floating_point or final.is_complex):
        message = "a parameter of this dtype cannot have a gradient; call requires_grad_(False) on it first"
        raise MismatchError(message, path=path, found=f"{final} for {name}")
    return final


def _require_meta(module: nn.Module, parameters: Sequence[MatchedParameter], seen: set[int], path: str) -> None:
    """Require that all parameters to fill are on `meta`, and that no buffer stays there."""
    if real := tuple(matched.name for matched in parameters if not matched.parameter.is_meta):
        message = "these parameters have data, a warm start fills those on 'meta'; load_into copies"
        raise MismatchError(f"{message}: {listed(real)}", path=path)
    left = tuple(name for name, buffer in module.named_buffers() if buffer.is_meta and id(buffer) not in seen)
    if left:
        message = "the checkpoint does not hold these buffers, and a forward would compute without their data"
        raise MismatchError(f"{message}; make them on a device and not on 'meta': {listed(left)}", path=path)


def place_buffers(
    module: nn.Module, buffers: Mapping[int, str], tensors: Mapping[str, torch.Tensor], device: torch.device, path: str
) -> None:
    """Put loaded buffers into the module, and move all others to the device.

    If a buffer is on the device already, the values are copied into it, so that other references to it have them too.

    Raises:
        MismatchError: The memory of a buffer was freed or shrunk.
    """
    memory = TargetMemory(path)
    made: dict[int, torch.Tensor] = {}
    used: set[str] = set()
    for prefix, part in module.named_modules():
        for leaf, old in part._buffers.items():
            if old is None:
                continue
            if id(old) not in made:
                source, name = buffers.get(id(old)), f"{prefix}.{leaf}" if prefix else leaf
                if source is not None:
                    made[id(old)] = _placed(old, tensors[source], source in used, name, memory)
                    used.add(source)
                else:
                    if old.device != device:
                        memory.require(name, old)
                    made[id(old)] = moved(old, device)
            part._buffers[leaf] = made[id(old)]


def _placed(old: torch.Tensor, new: torch.Tensor, is_used: bool, name: str, memory: TargetMemory) -> torch.Tensor:
    if old.device == new.device:
        with torch.no_grad():
            memory.copy([(name, old, new)])
            return old
    new = new if old.dim() else typed(new, ())
    return copy_of(new) if is_used else new
