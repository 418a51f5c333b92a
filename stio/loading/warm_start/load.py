"""The load of a warm start: fills parameters as their groups come, in the order in which they are waited for.

Groups are read in the order that was given, small ones, so that the first are there early. Who waits for a parameter
moves its submodule to the front and turns the order: from there on first, as a forward goes on from where it is.
Workers fill parameters themselves, so nothing waits for the thread of a loop that a forward blocks. Before a
submodule's own parameters are there, a hook holds its forward: custom kernels and `autograd.Function` take
parameters where no class of theirs is asked. The hooks go with the last parameter, all of them with the load's end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.jit._trace import is_tracing
from torch.utils.hooks import RemovableHandle

from stio.device.base import LoadedGroup
from stio.errors import ClosedError, TensorNotFoundError, WarmStartError, printable
from stio.loading.open import OpenCheckpoint
from stio.loading.plan import Group, ReadPlan
from stio.loading.prepare import prepare
from stio.loading.scheduler import LoadScheduler
from stio.loading.targets import LoadOptions
from stio.loading.warm_start.parameter import Slot
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation
from stio.runtime.process import switch_interval as shortened

__all__ = ["Awaited", "WarmStartLoad"]

_is_tracing: Callable[[], bool] = is_tracing  # torch leaves it untyped


@dataclass(frozen=True, slots=True)
class Awaited:
    """One parameter that shall wait for its data."""

    parameter: nn.Parameter
    """The parameter, on `meta`."""
    name: str
    """What the module calls it."""
    source: str | None
    """What the checkpoint calls its data; None if it has none."""
    dtype: torch.dtype
    """What it shall be of."""


@dataclass(slots=True)
class _Owner:
    """A submodule and what its forward waits for."""

    slots: list[Slot]
    """Its own parameters that will come."""
    left: set[Slot]
    """Those that have not."""
    handle: RemovableHandle | None = None
    """Its hook."""


@dataclass(slots=True)
class _Order:
    """The groups of a plan in the order of the parameters."""

    groups: list[int] = field(default_factory=list)
    """Indices in the plan."""
    at: dict[int, int] = field(default_factory=dict)
    """Where in `groups` each is."""
    group_of: dict[str, int] = field(default_factory=dict)
    """By the checkpoint's names."""

    @classmethod
    def of(cls, plan: ReadPlan, names: Sequence[str]) -> _Order:
        """Order a plan's groups by the first of their names."""
        group_of = {name: group.index for group in plan.groups for name in group.names}
        groups = list(dict.fromkeys(group_of[name] for name in names))
        return cls(groups, {group: k for k, group in enumerate(groups)}, group_of)

    def onward_from(self, names: Sequence[str]) -> list[int]:
        """Return the groups with these names first, then those behind the first of them, then those before it."""
        first = [self.group_of[name] for name in names]
        start = self.at[first[0]]
        return [*first, *self.groups[start:], *self.groups[:start]]


class WarmStartLoad:
    """One load into parameters that wait; their `Gate`.

    Args:
        opened: The checkpoint; closed when the load has ended.
        options: How to load.
        device: Where the parameters will be.
        switch_interval: Seconds, see `Settings`.
    """

    def __init__(
        self, opened: OpenCheckpoint, options: LoadOptions, device: torch.device, switch_interval: float | None
    ) -> None:
        self._opened = opened
        self._path = opened.path
        self._options = options
        self._device = device
        self._switch_interval = switch_interval
        self._slots: list[Slot] = []
        self._by_source: dict[str, list[Slot]] = {}
        self._owners: dict[Slot, list[_Owner]] = {}
        self._encoders: list[nn.TransformerEncoder] = []
        self._leaving = threading.Lock()
        self._abandoned = False
        self._run: LoadScheduler | None = None
        self._order = _Order()
        self._wanted: list[str] = []
        self._process = os.getpid()
        self.notifier = Notifier()
        """Rung when parameters were filled, and at the end."""
        self.operation: Operation[None] = Operation(
            self._body, name="warm_start", kind="load", about=opened.path, notifier=self.notifier
        )
        """The load; not begun yet."""

    # The module.

    def adopt(self, module: nn.Module, wishes: Sequence[Awaited]) -> None:
        """Let a module's parameters wait from here on: all of them or, after an error, none."""
        try:
            for wish in wishes:
                slot = Slot(
                    wish.parameter,
                    name=wish.name,
                    source=wish.source,
                    dtype=wish.dtype,
                    device=self._device,
                    gate=self,
                )
                self._slots.append(slot)
                if wish.source is not None:
                    self._by_source.setdefault(wish.source, []).append(slot)
            self._attach(module)
        except BaseException:
            self.abandon()
            raise

    def _attach(self, module: nn.Module) -> None:
        slot_of = {id(slot.parameter): slot for slots in self._by_source.values() for slot in slots}
        for part in module.modules():
            own = [slot_of[id(p)] for p in part._parameters.values() if id(p) in slot_of]
            if own:
                owner = _Owner(own, set(own))
                for slot in own:
                    self._owners.setdefault(slot, []).append(owner)
                owner.handle = part.register_forward_pre_hook(_waits(self, own), prepend=True)
            if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False):
                # It looks at its first layer alone before it makes a nested tensor, which only the fast path of the
                # layers takes; one that waits takes the other.
                part.use_nested_tensor = False
                self._encoders.append(part)

    def _detach(self) -> None:
        """Take everything off the module that is not a parameter of it. Idempotent."""
        with self._leaving:
            owners, self._owners = self._owners, {}
            encoders, self._encoders = self._encoders, []
        for owner in [owner for owners_of_one in owners.values() for owner in owners_of_one]:
            if owner.handle is not None:
                owner.handle.remove()
        for encoder in encoders:
            encoder.use_nested_tensor = True

    def abandon(self) -> None:
        """Undo `adopt`; nothing was begun."""
        self._abandoned = True
        self.notifier.notify()
        self._detach()
        for slot in self._slots:
            slot.restore()
        self._slots, self._by_source = [], {}
        self._opened.discard()

    def close(self) -> None:
        """Let go of module and files, which the load does at its end, if it never came so far as to begin."""
        if not self.operation.running:
            self._finish()

    def _finish(self) -> None:
        self._run = None
        self._detach()
        for slot in self._slots:
            if slot.filled:
                slot.release()
        self._slots, self._by_source = [slot for slot in self._slots if not slot.filled], {}
        self._opened.discard()

    def settle(self) -> None:
        """Leave what the checkpoint lacks, which strict=False let pass, on `meta` as it was. Idempotent."""
        with self._leaving:
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.restore()

    # The load.

    def _body(self, operation: Operation[None]) -> None:
        try:
            with shortened(self._switch_interval):
                transfer = prepare(self._opened, list(self._by_source), self._options, deliver=self._deliver)
                self._order = _Order.of(transfer.plan, list(self._by_source))
                transfer.run.arrange(self._order.groups)
                self._run = transfer.run
                self._hurry()  # for those who waited before there was a run
                operation.on_cancel(transfer.run.stop)
                transfer.carry_out()
        finally:
            self._finish()

    def _deliver(self, group: Group, landed: LoadedGroup) -> None:
        """Fill a group's parameters (called by workers)."""
        landed.wait()  # on the host: other streams than this thread's may use them next
        for name, tensor in landed.take().items():
            first, *others = self._by_source[name]
            for slot in others:  # names that are tied in the checkpoint and not in the module
                self._fill(slot, _twin(tensor, slot.dtype))
            self._fill(first, tensor)
        self.notifier.notify()

    def _fill(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Fill one; a hook goes before its module's last parameter comes, so that no copy of the module has it."""
        with self._leaving:
            for owner in self._owners.get(slot, ()):
                owner.left.discard(slot)
                if not owner.left and owner.handle is not None:
                    owner.handle.remove()
                    owner.handle = None
        slot.fill(tensor)

    # Waiting.

    @property
    def ended(self) -> bool:
        """Whether no more parameters will be filled."""
        return self._abandoned or self.operation.done

    def wait(self, slots: Sequence[Slot]) -> None:
        """Block until these are filled.

        Raises:
            ClosedError: They never will be: the load failed, or was ended.
            TensorNotFoundError: The checkpoint has no data for one of them.
            WarmStartError: What runs here would keep what the parameter is now.
        """
        for slot in slots:
            if slot.source is None:
                raise TensorNotFoundError(
                    "the checkpoint has no data for this parameter, which strict=False let pass",
                    path=self._path,
                    found=slot.name,
                )
        if all(slot.filled for slot in slots):
            return
        self._require_ordinary()
        self._wanted = [slot.source for slot in slots if slot.source is not None and not slot.filled]
        self._hurry()
        self.notifier.wait_for_blocking(lambda: self.ended or all(slot.filled for slot in slots))
        for slot in slots:
            if not slot.filled:
                raise self._refusal(slot)

    def _require_ordinary(self) -> None:
        what = ""
        if _is_tracing():
            what = "torch.jit.trace"
        elif self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            what = "a CUDA graph"
        if what:
            raise WarmStartError(f"{what} would capture parameters that are not there yet; capture after `done()`")

    def _hurry(self) -> None:
        """Have read next what is waited for, its submodule, and what comes behind that."""
        run, wanted = self._run, self._wanted
        if run is None or not wanted or self.ended:
            return
        own = [
            sibling.source
            for name in wanted
            for slot in self._by_source.get(name, ())
            for owner in self._owners.get(slot, ())
            for sibling in owner.slots
            if sibling.source is not None
        ]
        run.arrange(self._order.onward_from([*wanted, *own]))

    def _refusal(self, slot: Slot) -> ClosedError:
        name, failure = printable(slot.name), self.operation.failure
        if os.getpid() != self._process:
            return ClosedError(
                f"{name} never comes in a forked child: the parent's warm start loads it", path=self._path
            )
        if failure is None:
            return ClosedError(f"{name} never came: the warm start was ended before that", path=self._path)
        error = ClosedError(f"{name} never came: the warm start failed: {failure}", path=self._path)
        error.__cause__ = failure
        return error


def _waits(filling: WarmStartLoad, slots: Sequence[Slot]) -> Callable[[nn.Module, object], None]:
    """Return a hook. A plain function: copies of a module would copy what a method belongs to."""

    def wait_for_parameters(module: nn.Module, inputs: object) -> None:
        # If you are sent here by torch.jit.script: it must not compile what is not there yet; script after `done()`.
        if left := [slot for slot in slots if not slot.filled]:
            filling.wait(left)

    return wait_for_parameters


def _twin(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    twin = tensor.to(dtype, copy=True)
    if twin.device.type != "cpu":
        torch.accelerator.current_stream(twin.device).synchronize()
    return twin
