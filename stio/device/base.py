"""The interface of a device: host memory to read into, memory on the device, and copies between them in order.

An `Accelerator` is one load's use of a device. The load allocates the memory of its tensors there, and copies from host
memory into it; a group of tensors (`LoadedGroup`) is delivered when its copies have ended, so any thread and any stream
may use it. This module also resolves names of devices such as "auto" and "cuda".

The device of a tensor may depend on its name. A mapping is read as a `device_map`: by the tensor's name, or by the
longest prefix of the name that ends at a dot, so names of modules work. A device is resolved for its first tensor. An
entry for a device that this machine does not have is no error for loads of other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from stio.errors import DeviceError, printable
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
    """What loads need from a device. `stio.device.cuda` implements it by torch."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors, its index resolved."""

    def staging(self, nbytes: int) -> Region:
        """Return host memory for copies, pinned where that works. It is released with the last reference to it."""

    def allocate(self, wanted: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """Return new tensors of these dtypes and shapes on the device, for copies that are queued later.

        Each is contiguous and has a storage of exactly its bytes. One call for many tensors: each call queues an event.

        Raises:
            DeviceMemoryError: The device is full; nothing stays allocated.
        """

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue copies of regions into uint8 device tensors `[region.nbytes]`; return an event behind them.

        Does not wait. All regions are host memory, or all are device memory (parts of what `allocate` returned). They
        must stay allocated and unchanged until the event has passed.

        Raises:
            DeviceError: The device refused; none of the regions is being read any more.
        """

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context for torch's work with tensors whose copies have ended: casts, and slices.

        Raises:
            DeviceMemoryError: The work in it needs more memory than the device has.
        """


class Image(NamedTuple):
    """The bytes of a group in one tensor, for a consumer that copies them into memory of its own."""

    memory: torch.Tensor
    """The bytes, as uint8."""
    tensors: Mapping[str, tuple[int, torch.dtype, Sequence[int]]]
    """By name, the first byte of each tensor, its dtype and its shape."""


@dataclass(slots=True)
class LoadedGroup:
    """Tensors of one group. Their bytes are there for every thread and every stream.

    What was cast or cut on a device is there for the load's stream, on which that is queued; another one waits for it.
    """

    tensors: dict[str, torch.Tensor]
    """By name."""
    image: Image | None = None
    """What the consumer gets instead of tensors if it copies the bytes of each as they are; see `Delivery.copied`."""
    results: dict[str, torch.Tensor] | None = None
    """What the consumer gets instead of the tensors, whose memory it shares; None: it gets the tensors."""

    def rename(self, names: Mapping[str, Sequence[str]]) -> None:
        """Put tensors under the names that were selected, by the name that has data; empty: leave all as they are."""
        if names and self.image is None:
            self.tensors = {new: tensor for name, tensor in self.tensors.items() for new in names[name]}

    def take(self) -> dict[str, torch.Tensor]:
        """Return what the consumer gets."""
        return self.tensors if self.results is None else self.results

    def device_storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of what the consumer gets on devices, to be held until it has released the tensors.

        The end of a tensor releases the GIL. If memory of a device is freed there, a busy thread has time to take the
        GIL, for 5 ms. The end of a storage keeps it.
        """
        return [tensor.untyped_storage() for tensor in self.take().values() if not tensor.is_cpu]


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


def with_current_index(device: Any) -> Any:
    """Return `device=` of a call, with the index of the calling thread's current device where it has none.

    That is `"auto"`, or a type of devices ("cuda"), also as a value of a mapping or of a function of the name.

    Raises:
        TypeError: A key of a mapping is no name.
    """
    current = current_device()
    if isinstance(device, Mapping):  # a copy: the caller may change the mapping before it is used
        for name in device:
            if not isinstance(name, str):
                raise TypeError(f"device= takes a mapping from names, not from {name!r}")
        return {name: _with_index(where, current) for name, where in device.items()}
    if callable(device) and not isinstance(device, torch.device | Accelerator) and current is not None:
        return lambda name: _with_index(device(name), current)
    return _with_index(device, current)


def _with_index(device: Any, current: torch.device | None) -> Any:
    if current is None or isinstance(device, Accelerator):
        return device
    if device == "auto":
        return current
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        return device  # `resolve_device` raises for it
    return current if str(parsed) == current.type else device  # without an index


_CPU = torch.device("cpu")
"""Not made anew: the first such call of a thread, as of each small load, takes 20 microseconds or more."""


def resolve_device(device: Any) -> torch.device:
    """Return the device for `"auto"`, a name, an index or a `torch.device`; its index is set.

    Raises:
        DeviceError: torch has no such device, or this machine does not.
    """
    if device == "cpu":
        return _CPU
    if device == "auto":
        device = _available_accelerator() or "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        advice = "; `memory='lazy'` leaves tensors on the CPU in their files" if device == "disk" else ""
        raise DeviceError(
            f"torch has no such device{advice}", requested=str(device), expected=_devices_here()
        ) from error
    if parsed.type in ("cpu", "meta"):
        if parsed.type == "meta":
            raise DeviceError(
                "tensors on 'meta' have no data to load", requested=device, expected="cpu or an accelerator"
            )
        return _CPU
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


# Devices by name of tensor.


class DeviceMap:
    """A device for each name. Equal devices are one object.

    Args:
        where: Returns for a tensor's name what `torch.device` accepts, `"auto"` or an `Accelerator`; or a mapping to
            those, see above.
    """

    def __init__(self, where: Callable[[str], Any] | Mapping[str, Any]) -> None:
        self._where = partial(_by_prefix, where) if isinstance(where, Mapping) else where
        self._known: dict[str | int | torch.device, torch.device | Accelerator] = {}
        self._devices: dict[torch.device, torch.device] = {}

    @classmethod
    def of(cls, device: Any) -> torch.device | Accelerator | DeviceMap:
        """Return the device of all tensors, its index set, or a device for each of them.

        Raises:
            DeviceError: torch has no such device, or this machine does not.
        """
        # First, because the check of a protocol takes 10 us.
        if device is None or isinstance(device, str | int | torch.device):
            return resolve_device(device)
        if isinstance(device, Accelerator):
            return device
        if isinstance(device, Mapping) or (callable(device) and not isinstance(device, type)):
            return cls(device)
        return resolve_device(device)

    def __call__(self, name: str) -> torch.device | Accelerator:
        """Return the device of a tensor.

        Raises:
            DeviceError: No device is given for it, or this machine does not have it.
        """
        device = self._where(name)
        if not isinstance(device, str | int | torch.device):
            return self._resolved(device, name)
        if device not in self._known:
            self._known[device] = self._resolved(device, name)
        return self._known[device]

    def _resolved(self, device: Any, name: str) -> torch.device | Accelerator:
        if isinstance(device, Accelerator):
            return device
        try:
            found = resolve_device(device)
        except DeviceError as error:  # add the tensor's name
            message = f"{error.message}; device= leads {printable(name)!r} there"
            raise DeviceError(message, requested=error.requested, expected=error.expected) from error
        return self._devices.setdefault(found, found)


def _by_prefix(devices: Mapping[str, Any], name: str) -> Any:
    prefix = name
    while prefix not in devices:
        if not prefix:
            raise DeviceError(
                "device= has no entry for a tensor; add one, or an entry for '', which stands for all other tensors",
                requested=name,
                expected="an entry for its name, or for a prefix of it that ends at a dot",
            )
        prefix = prefix.rpartition(".")[0]
    return devices[prefix]
