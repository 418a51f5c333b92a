"""The device that is measured, by torch's generic interface; what only CUDA has is in `cuda_runtime` alone."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_child import Absent, NoDevice

SIMULATED = "sim"
"""The name of a device that needs no hardware, see tests/simdevice."""

_CYCLES_PER_SECOND = 2e9
_BUSY_BYTES, _MAX_COPIES = 128 << 20, 400  # a queue of commands holds about 1,000
_device = torch.device("cpu")


def use(name: str) -> None:
    """Choose the device by its name; the accelerator that torch sees where that is empty.

    Raises:
        NoDevice: There is no such device.
    """
    global _device
    if name.partition(":")[0] == SIMULATED:
        _install_simulated()
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if seen is None:
        raise NoDevice("torch sees no accelerator here")
    if name.partition(":")[0] not in ("", seen.type):
        raise NoDevice(f"torch sees {seen.type} here, not {name}")
    _device = torch.device(seen.type, torch.device(name or seen.type).index or 0)
    if _device.index:
        torch.accelerator.set_device_index(_device.index)


def _install_simulated() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import simdevice

    try:
        simdevice.install()
    except simdevice.Unavailable as reason:
        raise NoDevice(str(reason)) from reason
    simdevice.set_fills(False)  # no device fills memory that it gives out
    simdevice.set_released(0)  # `meters.busy_thread` sets it


def device() -> torch.device:
    """Give the device."""
    return _device


def is_simulated() -> bool:
    """Tell whether no figure means anything here."""
    return _device.type == SIMULATED


def describe() -> dict[str, Any]:
    """Give what a reader of the figures must know about the device."""
    found = torch.get_device_module(_device).get_device_properties(_device)
    text = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    if _device.type == "cuda":
        text += f", CUDA {torch.version.cuda}"
    if is_simulated():
        text = "a rehearsal on a simulated device: no figure means anything"
    return {"accelerator": text, "is_rehearsal": is_simulated()}


def prepare() -> None:
    """Make the device's context, so that no contestant pays for it on the clock."""
    torch.zeros(1, device=_device)
    synchronize()


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    torch.accelerator.synchronize(_device)


class Memory:
    """What of the device's memory is used beyond what was used when this was made; torch keeps nothing unused then."""

    def __init__(self) -> None:
        gc.collect()
        synchronize()
        _ask("empty_cache")
        _ask("reset_peak_memory_stats", _device)
        self._used_bytes, self._reserved_bytes = _ask("memory_allocated", _device), _ask("memory_reserved", _device)

    def figures(self) -> dict[str, int]:
        """Give the bytes that tensors hold, their peak since then, those that torch keeps, where it reports them."""
        if self._used_bytes is None:
            return {}
        return {
            "used_bytes": _ask("memory_allocated", _device) - self._used_bytes,
            "added_peak_bytes": _ask("max_memory_allocated", _device) - self._used_bytes,
            "reserved_bytes": _ask("memory_reserved", _device) - self._reserved_bytes,
        }


def _ask(name: str, *arguments: Any) -> Any:
    """Call a function of torch's generic interface, of the device's own module where a torch is too old; or None."""
    for module in (torch.accelerator, torch.get_device_module(_device)):
        if hasattr(module, name):
            with suppress(RuntimeError):  # its allocator keeps no count
                return getattr(module, name)(*arguments)
    return None


def pinned(size_bytes: int) -> torch.Tensor:
    """Give host memory that the device reads without help, touched."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)


def stream() -> torch.Stream:
    """Give a stream."""
    return torch.Stream(device=_device)


def current_stream() -> torch.Stream:
    """Give the calling thread's stream."""
    return torch.accelerator.current_stream(_device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Have what the calling thread queues go to a stream."""
    before = current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def recorded(stream: torch.Stream, *, sleeps: bool = False) -> Any:
    """Give an event behind what a stream has to do; where only CUDA has the choice, the host that waits sleeps."""
    if sleeps:
        cuda_runtime()
        # `torch.cuda.Event` of torch 2.10 and older accepts no generic stream.
        numbers = {"stream_id": stream.stream_id, "device_index": stream.device_index}
        stream = torch.cuda.Stream(**numbers, device_type=stream.device_type)
    event = torch.cuda.Event(blocking=True) if sleeps else torch.Event(device=_device)
    event.record(stream)
    return event


def keep_busy(seconds: float) -> torch.Event:
    """Give the calling thread's stream something to do, about so long; return the event behind it."""
    module = torch.get_device_module(_device)
    if hasattr(module, "_sleep"):
        module._sleep(int(seconds * _CYCLES_PER_SECOND))
    else:
        source, target = torch.ones(2, _BUSY_BYTES, dtype=torch.uint8, device=_device)
        synchronize()
        start = time.perf_counter()
        target.copy_(source)
        for _ in range(min(_MAX_COPIES, int(seconds / seconds_since(start)))):
            target.copy_(source)
    return recorded(current_stream())


@contextmanager
def busy_stream(stream: torch.Stream, seconds: float) -> Iterator[torch.Event]:
    """Keep a stream busy from the block's begin on, by a kernel that is loaded; give the event behind it."""
    with on(stream):
        keep_busy(0.0)
        synchronize()
        event = keep_busy(seconds)
    yield event


def cuda_runtime() -> Any:
    """Give what only CUDA has: its runtime's functions, to register host memory.

    Raises:
        Absent: This is another device.
    """
    if _device.type != "cuda":
        raise Absent("only CUDA has this")
    return torch.cuda.cudart()


@contextmanager
def registered(memory: np.ndarray, *, read_only: bool = False) -> Iterator[None]:
    """Register host memory with CUDA, and take it back at the end; the memory is held until then.

    Raises:
        Absent: This is another device.
        OSError: CUDA refuses.
    """
    runtime = cuda_runtime()
    status = int(
        runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 8 if read_only else 0)
    )  # an enum: always true
    if status:
        raise OSError(f"cudaHostRegister: error {status}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(memory.ctypes.data)


def has_gds() -> bool:
    """Tell whether the driver of GPUDirect Storage is loaded: without it cuFile reads through the host."""
    return Path("/proc/driver/nvidia-fs/version").exists()


def seconds_since(start: float) -> float:
    """Give the seconds since `start` at which the device has done all that was asked of it."""
    synchronize()
    return time.perf_counter() - start
