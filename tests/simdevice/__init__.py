"""A device for torch that needs no hardware: asynchronous as CUDA is, and stricter: a missing wait gives wrong bits each time.

`install()` compiles it against the torch that is installed (seconds, once; g++), and registers it as the device type `sim`,
with two devices, for the rest of the process. torch then takes it for the accelerator: `torch.accelerator` and
`torch.get_device_module` serve it. What it has:

- Streams are threads, 32 in the pool of each device, as with CUDA: the 33rd that is made is the first one again.
  Each copy, cast and fill can be delayed (`set_delay`), so that a missing wait reads too early every time.
- Lists of tensors (`torch._foreach_copy_`, `_foreach_clone`) are copied as by CUDA's kernels, which compute: NaNs of 16-bit floats,
  BOOL bytes, and what they refuse. See `copy_batch` in simdevice.cpp.
- The GIL is released where torch's calls for CUDA release it, so long that a thread that waits for it takes it (`set_released`):
  allocations, copies, `record_stream`, the recording, waits and ends of events, ends of tensors. A query of an event, the
  allocation of compiled models (`_empty_strided_cuda`) and ends of storages hold it.
- Memory belongs to the stream under which it was allocated. Released, it is given out again under that stream at once, if no
  other stream was recorded. It is filled with a pattern when it is allocated and when it is released, in stream order. Its
  addresses are not accessible: a host that follows one gets SIGSEGV.
- Pinned memory is filled in the same way, and given out again when the copies are done. Copies of memory that is not pinned
  take it before they return, or wait, as CUDA's do.
- A context is counted for each device (`contexts`), made by the same calls as with CUDA.
- Faults: `refuse_copy`, `fail_copy`, `refuse_pinning`, `torch.sim.set_per_process_memory_fraction`.
- A forked child of a process that used it cannot use it.

All other operators are computed by the CPU, behind what their stream has queued, and the host waits for them. There are no
kernels: nothing of their speed, of graphs or of peer access can be shown on it. Where it differs from CUDA:
a failed copy is told by its own stream only, and not by every later call; a stream is busy just after an allocation, which is
filled there; generators, autocast, sparse tensors, the backward pass of convolutions and `torch.from_dlpack` are missing.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "NAME", "Unavailable", "build", "clear_faults", "contexts", "delayed", "fail_copy", "install", "installed",
    "library", "num_copies", "num_unpinned_early", "pinned_bytes", "read", "refuse_copy", "refuse_pinning", "set_delay",
    "set_fills",
    "set_released",
    "why_unavailable",
]  # fmt: skip

NAME = "sim"
"""The device type: `torch.device("sim", 1)`."""

NUM_DEVICES = 2

OLDEST_TORCH = (2, 13)
"""The oldest release of torch whose interface for devices this was compiled against."""

RELEASED_SECONDS = 50e-6
"""How long a call that releases the GIL sleeps by default. The GIL's switch interval is 5 ms."""

_FOLDER = Path(__file__).parent
_SOURCES = ("simdevice.cpp", "memory.hpp", "runtime.hpp")
_library: Any = None
_why_unavailable = ""
_delay_seconds = 0.0


class Unavailable(Exception):
    """The simulated device cannot be had here; the message is the reason."""


def build() -> Path:
    """Compile the device, or find it compiled; return the shared library.

    The result is kept in `build/simdevice` of the checkout, under a name made of the sources and of torch's version.

    Raises:
        Unavailable: No compiler, no headers, or a torch that is too old.
        RuntimeError: The compiler fails.
    """
    if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise Unavailable(f"the simulated device needs torch {oldest} or newer, this is {torch.__version__}")
    if not sys.platform.startswith("linux"):
        raise Unavailable("the simulated device needs Linux")
    compiler = shutil.which("g++")
    root = Path(torch.__file__).parent
    if compiler is None or not (root / "include" / "ATen" / "ATen.h").exists():
        raise Unavailable("the simulated device needs g++ and torch's headers")
    command = [
        compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        str(_FOLDER / _SOURCES[0]), f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    source = str(_FOLDER / _SOURCES[0])
    options = [part for part in command if part != source]  # a copy of this folder finds it compiled
    made_of = hashlib.sha256(repr((torch.__version__, str(root), options)).encode())
    for name in (*_SOURCES, "../../stio/native/engine.h"):
        made_of.update((_FOLDER / name).read_bytes())
    folder = _writable_folder()
    library = folder / f"simdevice-{made_of.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs beside each other compile it once
        if not library.exists():
            new = library.with_suffix(f".{os.getpid()}")
            done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
            if done.returncode:  # not Unavailable: the tests would be skipped, and nothing would fail
                raise RuntimeError(f"g++ cannot compile the simulated device:\n{done.stderr[:2000]}")
            new.replace(library)
    return library


def _writable_folder() -> Path:
    for folder in (
        _FOLDER.parents[1] / "build" / "simdevice",
        Path(tempfile.gettempdir()) / f"simdevice-{os.getuid()}",
    ):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
    raise Unavailable("there is no folder to compile the simulated device in")


def _loaded() -> ctypes.CDLL:
    if torch.accelerator.is_available():
        raise Unavailable("torch has an accelerator already, and can have one only")
    try:
        return ctypes.CDLL(str(build()))
    except OSError as error:  # a folder from which no code may be loaded
        raise Unavailable(f"the simulated device cannot be loaded: {error}") from error


def why_unavailable() -> str:
    """Return why `install` failed in this process; nothing if it did not."""
    return _why_unavailable


def installed() -> bool:
    """Return whether this process has the device."""
    return _library is not None


def install(delay_seconds: float = 0.0) -> types.ModuleType:
    """Give this process the device, once; return `torch.sim`.

    Raises:
        Unavailable: It cannot be compiled here, or torch has another accelerator.
    """
    global _library, _why_unavailable
    if _library is None:
        try:
            library = _loaded()
        except Unavailable as error:
            _why_unavailable = str(error)
            raise
        library.sim_has_context.restype = library.sim_is_forked.restype = ctypes.c_bool
        library.sim_num_copies.restype = library.sim_num_unpinned_early.restype = ctypes.c_int64
        library.sim_total_bytes.restype = library.sim_pinned_bytes.restype = ctypes.c_uint64
        library.sim_reach.restype = ctypes.c_void_p
        library.sim_drain.restype = ctypes.c_bool
        _library = library
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        library.sim_init()
        library.sim_driver.restype = library.sim_stream.restype = ctypes.c_void_p
        _add_driver()
        _add_allocation()
        atexit.register(library.sim_drain)  # no stream works on at the process's exit
    set_delay(delay_seconds)
    set_released(RELEASED_SECONDS)
    return torch.sim  # type: ignore[attr-defined,no-any-return]


def _add_driver() -> None:
    """Let the engine of stio copy to the device: by the table of its driver, see simdevice.cpp."""
    from stio import native
    from stio.device.pinned import drivers

    def open_driver(device: torch.device, stream: Any) -> tuple[native.Driver | str, int]:
        handle = 0 if stream is None else _library.sim_stream(device.index, ctypes.c_int64(stream.stream_id))
        return native.Driver(_library.sim_driver(), device.index + 1), handle

    drivers[NAME] = open_driver


def _add_allocation() -> None:
    """Give stio what `_empty_strided_cuda` is for CUDA: an allocation that keeps the GIL."""
    from stio.device.torch_private import EMPTY_STRIDED

    function = ctypes.PyDLL(_library._name).sim_empty_strided
    function.restype, function.argtypes = ctypes.py_object, [ctypes.py_object] * 3
    EMPTY_STRIDED[NAME] = function


def set_delay(seconds: float) -> None:
    """Delay each copy, cast and fill that is queued from now on; of a batch of copies the first."""
    global _delay_seconds
    _delay_seconds = seconds
    _library.sim_delay(ctypes.c_double(seconds))


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Delay what is queued in a block by so much at least; nothing where torch has another accelerator."""
    if not installed():
        yield
        return
    before = _delay_seconds
    set_delay(max(seconds, before))
    try:
        yield
    finally:
        set_delay(before)


def set_released(seconds: float) -> None:
    """Set how long a call sleeps that releases the GIL with CUDA; 0 where no other thread of Python is busy.

    On an H200 with 16 processors a busy thread took the GIL in nearly each such call. On few processors it does so only
    if the call leaves it one.
    """
    _library.sim_released(ctypes.c_double(seconds))


def refuse_copy(number: int) -> None:
    """Refuse the n-th copy from now when it is submitted, as a driver does that is given what it cannot take."""
    _library.sim_refuse_copy(ctypes.c_int64(number))


def fail_copy(number: int) -> None:
    """Let the n-th copy from now fail when it is done; events behind it raise, as those of a lost device do."""
    _library.sim_fail_copy(ctypes.c_int64(number))


def refuse_pinning(refuse: bool = True) -> None:
    """Refuse to pin memory, as a low memlock limit does."""
    _library.sim_refuse_pinning(ctypes.c_bool(refuse))


def set_fills(fills: bool) -> None:
    """Fill memory with a pattern when it is allocated and released, or not: no device does, so benchmarks turn it off."""
    _library.sim_set_fills(ctypes.c_bool(fills))


def clear_faults() -> None:
    """Take back what was asked for; streams with a failed copy work again. Waits for all streams."""
    refuse_copy(0)
    fail_copy(0)
    refuse_pinning(False)
    _library.sim_drain()
    _library.sim_clear_failures()


def num_copies() -> int:
    """Return how many copies were submitted so far."""
    return int(_library.sim_num_copies())


def contexts() -> set[int]:
    """Return the devices on which this process has a context."""
    return {index for index in range(NUM_DEVICES) if _library.sim_has_context(index)}


def num_unpinned_early() -> int:
    """Return how often memory was unpinned while a copy read it or wrote to it."""
    return int(_library.sim_num_unpinned_early())


def pinned_bytes(*, with_cached: bool = False) -> int:
    """Return how much pinned memory is held, or with what is kept for the next one that asks."""
    return int(_library.sim_pinned_bytes(ctypes.c_bool(with_cached)))


def library() -> ctypes.CDLL:
    """Return the library, for what is called beside all streams (`sim_write`, `sim_current`)."""
    assert _library is not None
    return _library  # type: ignore[no-any-return]


def read(address: int, nbytes: int) -> bytes:
    """Return what is in the device's memory now, beside all streams."""
    return ctypes.string_at(_reached(address), nbytes)


def _reached(address: int) -> int:
    found = _library.sim_reach(ctypes.c_void_p(address))
    if found is None:
        raise ValueError(f"{address:#x} is no address of a simulated device")
    return int(found)


def _index(device: Any = None) -> int:
    """Return the number of a device; of the current one if none is given, or one without a number."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index is None:
        return int(torch.accelerator.current_device_index())
    if not 0 <= index < NUM_DEVICES:
        raise RuntimeError(f"there is no simulated device {index}")
    return int(index)


class _Device:
    """A context in which a device is the thread's current one. The way back makes no context, as in `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device == -1 else _index(device)  # -1: none, as in `torch.cuda.device`

    def __enter__(self) -> None:
        self.before = -1
        if self.idx < 0:
            return
        self.before = torch._C._accelerator_exchangeDevice(self.idx)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self.before)


class _Event(torch.Event):
    """An event that is recorded and waited for with the stream's device as the current one, as `torch.cuda.Event` is.

    torch's generic event sets the device back afterwards, which makes a context on the one that was current.
    """

    def record(self, stream: Any = None) -> None:
        stream = stream or torch.accelerator.current_stream()
        with _Device(stream.device_index):
            super().record(stream)

    def wait(self, stream: Any = None) -> None:
        stream = stream or torch.accelerator.current_stream()
        with _Device(stream.device_index):
            super().wait(stream)


class _Stream(torch.Stream):
    """A stream that waits with its device as the current one, as `torch.cuda.Stream` does."""

    def wait_event(self, event: Any) -> None:
        with _Device(self.device_index):
            super().wait_event(event)

    def wait_stream(self, stream: Any) -> None:
        event = _Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event


def _own(stream: torch.Stream) -> _Stream:
    return _Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class _StreamContext:
    """A context in which a stream is the current one, and its device. The way back sets the device, as in `torch.cuda.stream`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        here = torch.accelerator.current_device_index()
        self.before = torch.accelerator.current_stream(here)
        self.there = torch.accelerator.current_stream(self.stream.device_index)
        _set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is None:
            return
        if self.stream.device_index != self.before.device_index:
            _set_stream(self.there)
        _set_stream(self.before)


def _set_stream(stream: torch.Stream) -> None:
    if stream.device_index != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(stream.device_index)
    torch.accelerator.set_stream(stream)


def _synchronize(device: Any = None) -> None:
    """As `torch.cuda.synchronize`: with the device as the current one."""
    with _Device(device):
        torch.accelerator.synchronize()


def _module() -> types.ModuleType:
    """Return what `torch.get_device_module` returns: the part of `torch.cuda` that programs ask of any device."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def fraction(fraction: float, device: Any = None) -> None:
        """Set the share of the device's memory that this process may take."""
        index = _index(device)
        _library.sim_limit(index, ctypes.c_uint64(int(fraction * _library.sim_total_bytes(index))))

    def sleep(cycles: int) -> None:
        """Keep the current stream busy, for so many cycles of 2 GHz."""
        _library.sim_sleep(_index(), ctypes.c_double(cycles / 2e9))

    def properties(device: Any = None) -> types.SimpleNamespace:
        """Return the device's name and the size of its memory."""
        return types.SimpleNamespace(
            name="simulated device", total_memory=int(_library.sim_total_bytes(_index(device)))
        )

    public: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "_is_in_bad_fork": lambda: bool(_library.sim_is_forked()),
        "_lazy_init": lambda: None,
        "_sleep": sleep,
        "current_device": accelerator.current_device_index,
        "current_stream": lambda device=None: _own(accelerator.current_stream(_index(device))),
        "default_stream": lambda device=None: _Stream(stream_id=0, device_index=_index(device), device_type=20),
        "device": _Device,
        "device_count": lambda: NUM_DEVICES,
        "empty_cache": accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_rng_state": lambda device=NAME: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: bool(contexts()),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(_index(device)),
        "max_memory_reserved": lambda device=None: accelerator.max_memory_reserved(_index(device)),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(_index(device)),
        "memory_allocated": lambda device=None: accelerator.memory_allocated(_index(device)),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(_index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "set_per_process_memory_fraction": fraction,
        "set_rng_state": lambda state, device=NAME: None,
        "set_stream": _set_stream,
        "stream": _StreamContext,
        "synchronize": _synchronize,
    }
    for name, value in public.items():
        setattr(module, name, value)
    return module
