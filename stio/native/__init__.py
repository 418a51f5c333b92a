"""The engine: a library in C that moves bytes between files, host memory and devices, on threads of its own.

Python decides, C moves. Python opens and checks files, plans, allocates, makes tensors and raises errors; the engine
gets ranges of bytes and reports which groups of them are complete. It never calls Python and takes no lock of it, so
its speed does not depend on other Python threads. `engine.h` is its contract; `engine.c` has transfers and threads,
`ring.c` the slots that devices copy from, `drivers.c` the functions of CUDA's and HIP's drivers, `pinned.c` pinned
memory, `cufile.c` reads by GPUDirect Storage. `delta.c`, on its caller's thread, finds and writes changed elements of
tensors. This module finds the library, checks its version and declares its functions; nothing else calls it.

Without the library (`STIO_NATIVE=0`, no compiler at the installation, not Linux) `available()` is false, and loads use
the plain executor, `stio.loading.plain`; the threads of a save then do all of its work.

Scheduling (`engine.c`). There are 6 to 16 threads for the process, at a lower priority than the program. The next chunk
is one of the transfer that has had the fewest bytes by its weight (`next_transfer`); a group ends with its last chunk
(`stio_chunk_ended`). One thread always waits for no device, and where all threads wait for a disk one more is started,
so a stream that stands still or a slow disk stops no other load. Events are polled every 20 microseconds: with
interrupts an H200 received 48.7 GB/s, without 51. Long-lived threads with O_DIRECT were as fast as kernel AIO and
io_uring.

Rings (`ring.c`). The first load to a device makes its ring: three slots of 2 MiB for each thread, small enough for the
processor's cache, 96 MiB at most. After ten seconds without work (`set_idle`) the memory goes back to the system.

GPUDirect Storage (`cufile.c`) reads chunks of at most 2 MiB into the memory of tensors. Ranges below 64 KiB and
scattered blocks go through the ring, and so does the rest of a transfer after a failed read. Where there is no
`/proc/modules`, cuFile 1.20 does not return from `cuFileDriverOpen`, so it is not called.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shlex
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("stio")

VERSION = 5
"""Version of the library's interface, `STIO_ENGINE_VERSION`."""
LIBRARY = Path(__file__).parent / "libstio.so"
"""The library, which the installation compiles."""
CHUNK_BYTES = 2 << 20
"""Size of a slot of a ring, `STIO_CHUNK_BYTES`."""
PINNED_BYTES = 512 << 20
"""Most bytes that are pinned at once, `STIO_PINNED_BYTES`."""
POPULATE, TOUCH, CUFILE, WRITE = 1, 2, 4, 8
"""Flags of a range; see `engine.h`."""
READING, TRUNCATED, SHRUNK, DRIVER, NO_MEMORY = 1, 2, 3, 4, 5
"""Kinds of a failure."""

MAX_THREADS = 16
"""Most threads of the engine, `STIO_MAX_THREADS`."""

_MIN_THREADS = 6  # threads that wait for a disk need no processor
_COUNTED_SECONDS = 1.0
_counted = -_COUNTED_SECONDS  # when the processors were counted
_TEXT_BYTES = 256
_MAX_TAKEN = 256
_END_MS = 10_000


class Done(NamedTuple):
    """A group that is complete."""

    group: int
    """Its number."""
    thread: int
    """Number of the thread that moved its last bytes."""
    started: float
    """When its first bytes were taken, a reading of `time.perf_counter`."""
    ended: float
    """When its last bytes were there."""


class Failure(Exception):
    """A transfer ended early, or memory was not pinned. Never leaves stio: the caller raises an error that it knows."""

    def __init__(self, found: _FailureStruct) -> None:
        self.kind: int = found.kind
        self.code: int = found.code
        self.group: int = found.group
        self.populates = found.doing == POPULATE
        self.offset: int = found.offset
        self.nbytes: int = found.nbytes
        self.text: str = found.text.decode(errors="replace")
        super().__init__(f"{self.text or f'kind {self.kind}'}, code {self.code}")


class _FailureStruct(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("doing", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_uint64),
        ("text", ctypes.c_char * _TEXT_BYTES),
    )


class _DoneStruct(ctypes.Structure):
    _fields_ = (
        ("group", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("started", ctypes.c_double),
        ("ended", ctypes.c_double),
    )


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int

# Calls that wait release the GIL; those that only set something keep it.
_WAITING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "stio_engine_end": (None, (_INT,)),
    "stio_ring_trim": (None, (_POINTER,)),
    "stio_transfer_take": (_INT, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
    "stio_transfer_end": (None, (_POINTER,)),
    "stio_copies_queue": (_INT, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, ctypes.c_size_t, _POINTER)),
    "stio_pinned_new": (_POINTER, (_POINTER, _POINTER, ctypes.c_size_t, _INT, _POINTER, _POINTER)),
    "stio_driver_open": (_POINTER, (ctypes.c_char_p, _INT, _POINTER, ctypes.c_char_p)),
    "stio_cufile_load": (_POINTER, (ctypes.c_char_p, ctypes.c_char_p)),
    "stio_cufile_open": (_POINTER, (_POINTER, _INT, _POINTER, ctypes.c_char_p)),
    "stio_cufile_close": (None, (_POINTER,)),
    "stio_delta_make": (None, (_POINTER, ctypes.c_size_t, _POINTER, _POINTER, ctypes.c_uint64)),
    "stio_delta_write": (None, (_POINTER, _INT, _POINTER, _POINTER)),
    "stio_delta_free": (None, (_POINTER,)),
    "stio_delta_apply": (
        ctypes.c_size_t,
        (_POINTER, ctypes.c_size_t, _INT, ctypes.c_uint64, _POINTER, ctypes.c_size_t),
    ),
}
_SHORT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "stio_engine_version": (_INT, ()),
    "stio_engine_set_threads": (None, (_INT,)),
    "stio_engine_set_idle": (None, (_INT,)),
    "stio_engine_num_threads": (_INT, ()),
    "stio_ring_new": (_POINTER, (_POINTER, _POINTER, _POINTER, _INT)),
    "stio_ring_state": (ctypes.c_uint64, (_POINTER, _POINTER, _POINTER)),
    "stio_ring_free": (None, (_POINTER,)),
    "stio_pinned_free": (None, (_POINTER,)),
    "stio_pinned_bytes": (ctypes.c_uint64, ()),
    "stio_transfer_new": (_POINTER, (_INT, _INT)),
    "stio_transfer_add": (_INT, (_POINTER, _POINTER, ctypes.c_size_t)),
    "stio_transfer_arrange": (None, (_POINTER, _POINTER, ctypes.c_size_t)),
    "stio_transfer_wake": (None, (_POINTER,)),
    "stio_transfer_stop": (None, (_POINTER,)),
    "stio_transfer_try_end": (_INT, (_POINTER,)),
    "stio_transfer_moved_bytes": (ctypes.c_uint64, (_POINTER,)),
    "stio_transfer_free": (None, (_POINTER,)),
    "stio_cufile_failed": (_INT, (_POINTER, _POINTER)),
    "stio_delta_new": (_POINTER, (ctypes.c_uint64, _INT, ctypes.c_size_t)),
    "stio_delta_size": (_INT, (_POINTER, _POINTER, _POINTER)),
}


class _Library:
    """The functions of the library, by their names without `stio_`."""

    def __init__(self, path: Path) -> None:
        waiting, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for library, functions in ((waiting, _WAITING), (short, _SHORT)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("stio_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def _library() -> _Library | None:
    if os.environ.get("STIO_NATIVE", "1") == "0" or not sys.platform.startswith("linux"):
        return None
    try:
        library = _Library(LIBRARY)
    except (OSError, AttributeError) as error:
        compiler = LIBRARY.parents[2] / "hatch_build.py"  # only in a checkout
        if compiler.exists() and not LIBRARY.exists():
            logger.warning(
                "loads and saves use Python's threads, which are slower, since the engine of this checkout is not "
                "compiled: `python %s` compiles it, and STIO_NATIVE=0 does without it",
                shlex.quote(str(compiler)),
            )
            return None
        logger.info("loads and saves use Python's threads, which are slower, since there is no engine: %s", error)
        return None
    if (found := library.engine_version()) != VERSION:
        logger.warning("loads and saves use Python's threads, since %s has version %d, not %d", LIBRARY, found, VERSION)
        return None
    return library


@atexit.register
def _end_at_exit() -> None:
    """End the threads before the interpreter frees what they read and write.

    Registered when this module is imported, which is before `stio.runtime.operation`: so it is called after all
    operations have ended, and after exit functions of the user that wait for a load.
    """
    if _library.cache_info().currsize and (library := _library()) is not None:
        library.engine_end(_END_MS)


def available() -> bool:
    """Return whether the library is here, and not switched off by `STIO_NATIVE=0`."""
    return _library() is not None


def name() -> str:
    """Return what moves the bytes of loads and saves: `"engine 5"`, with the version of the library, or `"plain"`."""
    return f"engine {VERSION}" if available() else "plain"


def _functions() -> _Library:
    library = _library()
    if library is None:
        raise RuntimeError("there is no engine")
    return library


def _pair(low: int, high: int) -> int:
    """Return two int32 of the library's structure as one int64: the first one in the low half (x86-64, aarch64)."""
    return (low & 0xFFFFFFFF) | high << 32


class Ranges:
    """Ranges to move, in the form that the library takes."""

    def __init__(self) -> None:
        self._fields = array("q")

    def __len__(self) -> int:
        return len(self._fields) // 7

    def file_to_host(
        self, group: int, fd: int, direct_fd: int, offset: int, nbytes: int, target: int, flags: int = 0
    ) -> None:
        """Add bytes of a file for host memory at `target`, or, with `POPULATE`, pages of its mapping there."""
        self._fields.extend((offset, 0, target, nbytes, 0, _pair(fd, direct_fd), _pair(group, flags)))

    def file_to_device(
        self,
        group: int,
        fd: int,
        direct_fd: int,
        offset: int,
        nbytes: int,
        target: int,
        ring: Ring,
        cufile: CuFile | None = None,
    ) -> None:
        """Add bytes of a file for memory of a ring's device at `target`.

        With `cufile`, that reads them until one of its reads fails. Nothing that is queued may use the memory.
        """
        source, flags = (0, 0) if cufile is None else (cufile.pointer, CUFILE)
        descriptors, number = _pair(fd, direct_fd), _pair(group, flags)
        self._fields.extend((offset, source, target, nbytes, ring.pointer, descriptors, number))

    def host_to_device(self, group: int, source: int, nbytes: int, target: int, ring: Ring) -> None:
        """Add host memory at `source`, which should be pinned, for memory of a ring's device."""
        self._fields.extend((0, source, target, nbytes, ring.pointer, _pair(-1, -1), group))

    def host_to_host(self, group: int, source: int, nbytes: int, target: int, offset: int = 0) -> None:
        """Add host memory at `source` for host memory at `target`.

        Many short ranges of a group cost less if their offsets, counted from anywhere, ascend by their lengths.
        """
        self._fields.extend((offset, source, target, nbytes, 0, -1, group))

    def host_to_host_each(self, group: int, moves: Iterable[tuple[int, int, int, int]]) -> None:
        """Add many, each as offset, source, length and target; faster than one by one."""
        rows = [(offset, source, target, nbytes, 0, -1, group) for offset, source, nbytes, target in moves]
        self._fields.fromlist(list(chain.from_iterable(rows)))

    def of_device(self, source: int, nbytes: int, target: int) -> None:
        """Add memory of a device at `source` for memory of it, or of the host, at `target`; for `queue_copies` only."""
        self._fields.extend((0, source, target, nbytes, 0, -1, 0))

    def host_to_file(self, group: int, source: int, nbytes: int, fd: int, direct_fd: int, offset: int) -> None:
        """Add host memory at `source` for a file; past the page cache as far as `direct_fd`, if not -1, allows."""
        self._fields.extend((offset, source, 0, nbytes, 0, _pair(fd, direct_fd), _pair(group, WRITE)))

    def buffer(self) -> tuple[int, int]:
        """Return address and number of the ranges."""
        address, count = self._fields.buffer_info()
        return address, count // 7


class Driver(NamedTuple):
    """Table of a driver's functions, and the context of one device."""

    table: int
    """Address of a `stio_driver`."""
    context: int
    """The device's context, not 0."""


def open_driver(kind: str, device: int) -> Driver | str:
    """Return the driver of a device; a text with the reason if it is not here.

    Args:
        kind: `"cuda"` or `"hip"`.
        device: Number of the device.
    """
    context = ctypes.c_void_p()
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    table = _functions().driver_open(kind.encode(), device, ctypes.byref(context), why)
    if table is None or context.value is None:
        return why.value.decode(errors="replace")
    return Driver(table, context.value)


class Ring:
    """Pinned memory out of which a device copies, shared by all loads to the device.

    Args:
        driver: Of the device.
        stream: Handle of the stream on which all copies are queued; the caller keeps it.
        node: NUMA node of the device; None: unknown.
    """

    def __init__(self, driver: Driver, stream: int, node: int | None) -> None:
        self._library = _functions()
        self.pointer: int = self._library.ring_new(driver.table, driver.context, stream, -1 if node is None else node)
        """Address of the ring."""
        if not self.pointer:
            raise MemoryError("no memory for a ring")

    def _state(self) -> tuple[int, int, int]:
        refused, failed = ctypes.c_int(), ctypes.c_int()
        held = self._library.ring_state(self.pointer, ctypes.byref(refused), ctypes.byref(failed))
        return int(held), refused.value, failed.value

    @property
    def held_bytes(self) -> int:
        """Size of its memory."""
        return self._state()[0]

    @property
    def was_refused(self) -> bool:
        """Whether the driver refused to pin memory, so that copies are slower."""
        return bool(self._state()[1])

    @property
    def has_failed(self) -> bool:
        """Whether copies that were queued have failed; every later one fails too."""
        return bool(self._state()[2])

    def trim(self) -> None:
        """Return its memory to the system, unless a load uses it. Blocks for milliseconds."""
        self._library.ring_trim(self.pointer)

    def release(self) -> None:
        """Release it, when the last load that uses it has ended. It must not be used any more."""
        self._library.ring_free(self.pointer)


def load_cufile(path: str) -> int:
    """Load NVIDIA's cuFile; return the address of the table of its functions.

    Raises:
        OSError: The library is not there, or cannot be loaded.
    """
    why = ctypes.create_string_buffer(_TEXT_BYTES)
    table = _functions().cufile_load(path.encode(), why)
    if not table:
        raise OSError(why.value.decode(errors="replace"))
    return int(table)


class CuFile:
    """A file that cuFile reads into the memory of devices. The device is the current one of the thread that makes it.

    Args:
        table: What `load_cufile` returned.
        fd: Descriptor of the file, with O_DIRECT where the filesystem has that; the caller keeps it open.

    Raises:
        OSError: cuFile refuses it.
    """

    def __init__(self, table: int, fd: int) -> None:
        self._library = _functions()
        has_driver, why = ctypes.c_int(), ctypes.create_string_buffer(_TEXT_BYTES)
        self.pointer: int = self._library.cufile_open(table, fd, ctypes.byref(has_driver), why)
        """Address of the file's handle."""
        if not self.pointer:
            raise OSError(why.value.decode(errors="replace"))
        self.has_driver = bool(has_driver.value)
        """Whether nvidia-fs is loaded. If not, cuFile may read through host memory."""

    @property
    def failure(self) -> Failure | None:
        """The first read that failed."""
        failure = _FailureStruct()
        return Failure(failure) if self._library.cufile_failed(self.pointer, ctypes.byref(failure)) else None

    def close(self) -> None:
        """Release it. The transfers that read it have ended."""
        self._library.cufile_close(self.pointer)


class Transfer:
    """An order of ranges, which the engine moves. Used by one thread, except `wake`, `stop` and `moved_bytes`.

    Args:
        weight: Share of the engine's threads beside other transfers.
        max_chunks: Most slots of rings that it uses, and most writes that are under way, at one time; 0: no limit.

    Raises:
        OSError: The process cannot start a thread.
    """

    def __init__(self, *, weight: int = 1, max_chunks: int = 0) -> None:
        self._library = _functions()
        self._process = os.getpid()
        self._pointer: int | None = self._library.transfer_new(weight, max_chunks)
        if not self._pointer:
            raise OSError("the engine cannot start a thread")
        self._done = (_DoneStruct * _MAX_TAKEN)()

    def add(self, ranges: Ranges) -> None:
        """Append ranges. All ranges of a group come in one call, in the order of their places in the file.

        Raises:
            MemoryError: There is no memory for them.
        """
        address, count = ranges.buffer()
        if count and self._library.transfer_add(self._pointer, address, count):
            raise MemoryError("no memory for ranges")

    def arrange(self, groups: Iterable[int]) -> None:
        """Move these groups next, in this order, as far as they are not moved yet; then the others, as before."""
        numbers = array("i", groups)
        self._library.transfer_arrange(self._pointer, numbers.buffer_info()[0], len(numbers))

    def take(self, seconds: float | None = None) -> list[Done]:
        """Wait, without the GIL, for groups that are complete; return them. Empty after `wake`, `stop` or the time.

        Raises:
            Failure: The transfer has failed.
        """
        failure = _FailureStruct()
        timeout = -1 if seconds is None else _milliseconds(seconds)
        count = self._library.transfer_take(
            self._pointer, ctypes.byref(self._done), _MAX_TAKEN, timeout, ctypes.byref(failure)
        )
        if count < 0:
            raise Failure(failure)
        return [Done(one.group, one.thread, one.started, one.ended) for one in self._done[:count]]

    def wake(self) -> None:
        """Let `take` return. Callable from any thread; short."""
        self._library.transfer_wake(self._pointer)

    def stop(self) -> None:
        """Begin no further chunk. Callable from any thread; short."""
        self._library.transfer_stop(self._pointer)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are moved."""
        return int(self._library.transfer_moved_bytes(self._pointer))

    def end(self) -> None:
        """Stop, and wait, without the GIL, until nothing is under way, on a device neither. Idempotent."""
        if not self._library.transfer_try_end(self._pointer):
            self._library.transfer_end(self._pointer)

    def __del__(self) -> None:  # not in `end`: another thread may be in `stop`
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer and os.getpid() == self._process:
            if not self._library.transfer_try_end(pointer):
                self._library.transfer_end(pointer)  # waits without the GIL; `transfer_free` keeps it
            self._library.transfer_free(pointer)


def queue_copies(driver: Driver, stream: int, ranges: Ranges, *, to_host: bool) -> None:
    """Queue copies of ranges of a device (`Ranges.of_device`) on a stream, in their order, by one call without the GIL.

    Makes the device's context the calling thread's current one. The memory must stay until the copies have ended.

    Args:
        driver: Of the device.
        stream: Handle of the stream.
        ranges: What is copied.
        to_host: To memory of the host, which should be pinned: otherwise each copy is waited for.

    Raises:
        Failure: The driver refused a copy; those before it are queued.
    """
    failure = _FailureStruct()
    copied = _functions().copies_queue(
        driver.table, driver.context, stream, to_host, *ranges.buffer(), ctypes.byref(failure)
    )
    if copied < 0:
        raise Failure(failure)


def pin(driver: Driver, nbytes: int, node: int | None) -> tuple[int, int, Callable[[], object]]:
    """Return address and size of new pinned memory, and a function, written in C and short, that releases it.

    Blocks without the GIL: several threads touch the memory first. Makes the driver's context the calling thread's
    current one. The function is called once, when no copy uses the memory any more; a thread of the engine unpins it.

    Args:
        driver: Of the device.
        nbytes: Size, not 0. Memory is pinned in pieces of `PINNED_BYTES`; a copy should not cross the end of one.
        node: NUMA node of the device; None: unknown.

    Raises:
        Failure: The driver refused, or there is no memory.
    """
    library, memory, failure = _functions(), ctypes.c_void_p(), _FailureStruct()
    where = -1 if node is None else node
    pinned = library.pinned_new(
        driver.table, driver.context, nbytes, where, ctypes.byref(memory), ctypes.byref(failure)
    )
    if pinned is None or memory.value is None:
        raise Failure(failure)
    return memory.value, nbytes, partial(library.pinned_free, pinned)


class EngineComparison:
    """A comparison of an image of one tensor with its new bytes; `stio.storage.checkpoint.changes` has the rules.

    Args:
        num_elements: Number of elements of the tensor.
        item_bytes: Bytes of an element.
        num_pieces: Number of pieces, which together are the tensor.

    Raises:
        MemoryError: There is no memory for it.
    """

    def __init__(self, num_elements: int, item_bytes: int, num_pieces: int) -> None:
        self._library = _functions()
        self._code_bytes = 0
        self._pointer: int | None = self._library.delta_new(num_elements, item_bytes, num_pieces)
        if not self._pointer:
            raise MemoryError("no memory for a comparison")

    def compare(self, k: int, image: int, fresh: int, num_elements: int) -> None:
        """Compare piece `k`. Each piece once, in any order; several threads may compare different pieces.

        Args:
            k: Number of the piece in the order of the tensor.
            image: Address of its old bytes, which become the new ones in the same pass.
            fresh: Address of its new bytes.
            num_elements: Number of its elements.
        """
        self._library.delta_make(self._pointer, k, image, fresh, num_elements)

    def size(self) -> tuple[int, int, int] | None:
        """Return the number of changed elements, the bytes of a code, and the bytes of all codes.

        Returns:
            None: the tensor is not longer than codes and values, or there was no memory for them.
        """
        count, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
        self._code_bytes = self._library.delta_size(self._pointer, ctypes.byref(count), ctypes.byref(nbytes))
        if self._code_bytes < 0:
            raise ValueError("the pieces are not the whole tensor")
        return (count.value, self._code_bytes, nbytes.value) if self._code_bytes else None

    def write(self, codes: int, values: int) -> None:
        """Write codes and values to these addresses, after `size`, without the GIL."""
        self._library.delta_write(self._pointer, self._code_bytes, codes, values)

    def __del__(self) -> None:
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer:
            self._library.delta_free(pointer)


def apply_changes(
    changes: Sequence[tuple[int, int, int, int, int]],
    item_bytes: int,
    num_elements: int,
    pieces: Sequence[tuple[int, int, int]],
) -> int | None:
    """Write changed elements of a tensor into memory, without the GIL.

    Args:
        changes: Of each delta, the oldest first: address of the codes, address of the elements, number of codes, bytes
            of a code, number of elements.
        item_bytes: Bytes of an element.
        num_elements: Number of elements of the whole tensor.
        pieces: Parts that are in memory: first element, number of elements, address. Ascending, and apart.

    Returns:
        The first delta whose codes are malformed; nothing is written then.

    Raises:
        MemoryError: There is no memory for the cursors.
    """
    rows, parts = array("Q", chain.from_iterable(changes)), array("Q", chain.from_iterable(pieces))
    wrong = _functions().delta_apply(
        rows.buffer_info()[0], len(changes), item_bytes, num_elements, parts.buffer_info()[0], len(pieces)
    )
    if wrong > len(changes):
        raise MemoryError("no memory for the cursors of a delta")
    return int(wrong) - 1 if wrong else None


def pinned_bytes() -> int:
    """Return how many bytes the engine has pinned now, those of rings included."""
    library = _library()
    return 0 if library is None else int(library.pinned_bytes())


def num_threads() -> int:
    """Return how many threads the engine has now."""
    library = _library()
    return 0 if library is None else int(library.engine_num_threads())


def count_processors(num_processors: Callable[[], int]) -> None:
    """Call `set_threads` with the number of processors, once a second at most: to read their quotas takes 50 us."""
    global _counted
    now = time.monotonic()
    if now - _counted >= _COUNTED_SECONDS:
        _counted = now
        set_threads(num_processors())


def set_threads(num_processors: int) -> None:
    """Let the engine use a thread for each processor, 6 at least and 16 at most."""
    _functions().engine_set_threads(min(MAX_THREADS, max(_MIN_THREADS, num_processors)))


def set_idle(seconds: float) -> None:
    """Return the memory of rings that no load uses to the system after so many seconds without work (10)."""
    _functions().engine_set_idle(_milliseconds(seconds))


def _milliseconds(seconds: float) -> int:
    """Return a time rounded up, as far as the library's `int` goes: 24 days."""
    return min(max(0, ceil(seconds * 1000)), 2**31 - 1)
