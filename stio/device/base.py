"""What a device owes the engine: staging memory to read into, memory of its own, and a queue of copies between.

An `Accelerator` is one load's use of a device. Readers fill its staging memory, it copies from there in order,
and a group's tensors are handed over (`LoadedGroup`) behind the mark of their last copy; the host waits for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from stio.errors import DeviceError, StioError
from stio.runtime.memory import Region

__all__ = ["Accelerator", "Event", "LoadedGroup", "Target", "current_device", "numbered", "resolve_device"]


class Event(Protocol):
    """A mark on a device's copy queue."""

    def query(self) -> bool:
        """Return whether everything before the mark has been done."""

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until it has."""


@runtime_checkable
class Accelerator(Protocol):
    """The few calls that staging needs from a device; torch's generic API serves most, a fake serves tests."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors, its index resolved."""

    def staging(self, nbytes: int) -> Region:
        """Return host memory for copies, pinned where that works. The caller reuses it between loads."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new 1-D uint8 tensor, allocated for the copy queue.

        Raises:
            DeviceMemoryError: The device is full.
        """

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue copies of regions into 1-D uint8 device tensors, and a mark behind them. Does not wait.

        All regions are the host's, or all the device's own (parts of what `empty` returned). They must stay as they are
        until the mark has passed.

        Raises:
            DeviceError: The device refused; none of the regions is being read any more.
        """

    def on_queue(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's work on the device goes behind the copies that were queued."""

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[Event]) -> None:
        """Let the calling thread's current stream wait for the marks and note that it uses the tensors."""


Target: TypeAlias = torch.device | Accelerator
"""Where tensors go: the CPU or an accelerator of torch's, its index set; or an object that stands for itself."""


@dataclass(slots=True)
class LoadedGroup:
    """Tensors of one group, ready to be handed over."""

    tensors: dict[str, torch.Tensor]
    """By name."""
    hand_over: Callable[[], None] | None = None
    """Makes the calling thread's stream wait for the copies; None on the CPU, where nothing is under way."""
    events: Sequence[Event] = ()
    """Marks of the copies, for a host that must know that the data is there, whichever stream will use it."""

    def wait(self) -> None:
        """Block this thread, without the GIL, until the data is there.

        Raises:
            DeviceError: A copy failed.
        """
        try:
            for event in self.events:
                event.synchronize()
        except RuntimeError as error:
            if isinstance(error, StioError):
                raise
            raise DeviceError(f"copying failed: {error}") from error

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors to the calling thread; its current stream waits for them, the thread does not."""
        if self.hand_over is not None:
            self.hand_over()
        return self.tensors


def current_device() -> torch.device | None:
    """Return the calling thread's current accelerator; None where torch has not begun to use one.

    It is a thread's own (`torch.cuda.set_device`), and loads run on threads of theirs, where it is number 0. As long as
    nothing has begun nobody has chosen, and nothing is begun to find that out: it takes long.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    has_begun = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return torch.device(accelerator.type, _current_index()) if has_begun is not None and has_begun() else None


def numbered(device: Any, current: torch.device | None) -> Any:
    """Return the device that is meant where `current` is the current one; what it does not concern stays as it is."""
    if current is None or isinstance(device, Accelerator):
        return device
    if device == "auto":
        return current
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        return device  # `resolve_device` will say so
    return current if str(wanted) == current.type else device  # without a number


def resolve_device(device: Any) -> torch.device:
    """Return the device meant by `"auto"`, a name, an index or a `torch.device`; its index is set.

    Raises:
        DeviceError: torch knows no such device, or it is not there.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        device = accelerator or "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(f"torch knows no such device: {error}", found=device) from error
    if wanted.type in ("cpu", "meta"):
        if wanted.type == "meta":
            raise DeviceError("tensors on 'meta' have no data to load", found=device, expected="cpu or an accelerator")
        return torch.device("cpu")
    if accelerator is None or wanted.type != accelerator.type:
        there = f"cpu, {accelerator.type}" if accelerator else "cpu"
        raise DeviceError("this torch has no such device here", found=str(wanted), expected=f"one of: {there}")
    index = wanted.index if wanted.index is not None else _current_index()
    if index >= torch.accelerator.device_count():
        raise DeviceError(
            "there is no device of that number",
            found=str(wanted),
            expected=f"0 to {torch.accelerator.device_count() - 1}",
        )
    return torch.device(wanted.type, index)


def _current_index() -> int:
    current = (
        getattr(torch.accelerator, "current_device_index", None) or torch.accelerator.current_device_idx
    )  # torch 2.6
    return int(current())
