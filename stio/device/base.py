"""The interface of a device: host memory to read into, memory on the device, and copies between them in order.

An `Accelerator` is one load's use of a device. Workers fill its staging memory, and it copies from there. A group of
tensors (`LoadedGroup`) is passed to the consumer with the events behind its copies: the consumer's stream waits for
them, the host does not. This module also resolves names of devices such as "auto" and "cuda".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from stio.errors import DeviceError
from stio.runtime.memory import Region


class Event(Protocol):
    """A point in the order of a device's copies."""

    def query(self) -> bool:
        """Return whether everything before the event has been done.

        Raises:
            DeviceError: A copy failed.
        """

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until everything before the event has been done.

        Raises:
            DeviceError: A copy failed.
        """


@runtime_checkable
class Accelerator(Protocol):
    """What loads need from a device. `stio.device.cuda` implements it by torch, `stio.testing.FakeDevice` for tests."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors, its index resolved."""

    def staging(self, nbytes: int) -> Region:
        """Return host memory for copies, pinned where that works. It is released with the last reference to it."""

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return new uint8 tensors `[size]` on the device, each an allocation of its own.

        Copies and work `on_queue` may use them at once. One call for many tensors: each call may wait for the GIL.

        Raises:
            DeviceMemoryError: The device is full; nothing stays allocated.
        """

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy uint8 device tensors `[size]`, each into an allocation of its own, in one call; return the new ones.

        Called in the context of `on_queue`, which reports a device that is full.
        """

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue copies of regions into uint8 device tensors `[region.nbytes]`; return an event behind them.

        Does not wait. All regions are host memory, or all are device memory (parts of what `allocate` returned). They
        must stay unchanged until the event has passed.

        Raises:
            DeviceError: The device refused; none of the regions is being read any more.
        """

    def on_queue(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's work on the device is queued behind the copies."""

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[Event]) -> None:
        """Let the calling thread's current stream wait for the events, and record that it uses the tensors."""


Target: TypeAlias = torch.device | Accelerator
"""Device of tensors: the CPU or an accelerator of torch, with its index; or an object of the caller (tests)."""


@dataclass(slots=True)
class LoadedGroup:
    """Tensors of one group, and what a consumer must wait for."""

    tensors: dict[str, torch.Tensor]
    """By name."""
    hand_over: Callable[[Iterable[torch.Tensor], Iterable[Event]], None] | None = None
    """`Accelerator.hand_over` of the device; None on the CPU, where no copy is under way."""
    events: Sequence[Event] = ()
    """Events behind the copies and casts."""
    results: dict[str, torch.Tensor] | None = None
    """What the consumer gets instead of the tensors, whose memory it shares; None: it gets the tensors."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the data is there for any stream.

        Raises:
            DeviceError: A copy failed.
        """
        for event in self.events:
            event.synchronize()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors; the calling thread's current stream waits for their data, the thread does not."""
        if self.hand_over is not None:
            self.hand_over(self.tensors.values(), self.events)
        return self.tensors if self.results is None else self.results

    def take_one(self, name: str) -> torch.Tensor:
        """Return one tensor as `take` does, and remove it here."""
        tensor = self.tensors[name]
        if self.hand_over is not None:
            self.hand_over([tensor], self.events)
        self.tensors.pop(name, None)
        return tensor


def current_device() -> torch.device | None:
    """Return the calling thread's current accelerator; None where torch has not initialized one.

    Each thread has its own (`torch.cuda.set_device`), and loads run on other threads, where it is device 0. Before the
    initialization no device was chosen. Initialization takes long, so this function does not start it.
    """
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later versions return None
        return None
    if accelerator is None:
        return None
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return torch.device(accelerator.type, _current_index()) if is_initialized and is_initialized() else None


def with_current_index(device: Any, current: torch.device | None) -> Any:
    """Return `current` for `"auto"` and for its type without an index; any other device unchanged."""
    if current is None or isinstance(device, Accelerator):
        return device
    if device == "auto":
        return current
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        return device  # `resolve_device` raises for it
    return current if str(parsed) == current.type else device  # without an index


def resolve_device(device: Any) -> torch.device:
    """Return the device for `"auto"`, a name, an index or a `torch.device`; its index is set.

    Raises:
        DeviceError: torch has no such device, or this machine does not.
    """
    if device == "auto":
        device = _available_accelerator() or "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        advice = "; `memory='lazy'` leaves tensors on the CPU in their files" if device == "disk" else ""
        raise DeviceError(f"torch has no such device{advice}", requested=device, expected=_devices_here()) from error
    if parsed.type in ("cpu", "meta"):
        if parsed.type == "meta":
            raise DeviceError(
                "tensors on 'meta' have no data to load", requested=device, expected="cpu or an accelerator"
            )
        return torch.device("cpu")
    accelerator = _available_accelerator()
    if accelerator is None or parsed.type != accelerator.type:
        no_cuda = parsed.type == "cuda" and torch.version.cuda is None and torch.version.hip is None
        why = ": it is built without CUDA" if no_cuda else ""
        raise DeviceError(f"this torch has no such device here{why}", requested=str(parsed), expected=_devices_here())
    index = parsed.index if parsed.index is not None else _current_index()
    num_devices = torch.accelerator.device_count()
    if index >= num_devices:
        raise DeviceError(
            "there is no device of that number", requested=str(parsed), expected=f"0 to {num_devices - 1}"
        )
    return torch.device(parsed.type, index)


def _devices_here() -> str:
    accelerator = _available_accelerator()
    return f"one of: cpu, {accelerator.type}, auto" if accelerator else "one of: cpu, auto"


def _available_accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _current_index() -> int:
    return int(torch.accelerator.current_device_index())
