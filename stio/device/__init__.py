"""Tensors, devices, and copies between host memory and devices, in both directions. Nothing here opens a file.

Start with `base.py`: `Accelerator` is the interface that loads need from a device, a `LoadedGroup` is delivered to the
consumer of a load, and a `DeviceMap` finds the device of each tensor. `cuda.py` implements the interface by torch
(`TorchAccelerator`, `TorchEvent`), and has the engine's rings of pinned memory (`DeviceRing`).

Loads use `tensors.py` (`TORCH_DTYPES`: the format's dtypes in torch and what they mean there; tensors over memory;
where in its storage a tensor is), `casts.py` (`Casts`, and `Lost`: the values that casts lose) and `copy_in.py`
(`TargetMemory`: checks memory of the caller, and copies loaded tensors into it). Saves use `describe.py` (what can be
saved of a tensor, and which tensors stand for data that is elsewhere) and `copy_out.py` (`Readiness`: when tensors may
be read; it copies their bytes into host memory).

`names_in_files.py` has the names that transformers gives to tensors in files (`FileNames`). `pinned.py` allocates
pinned memory, and finds the drivers that the engine calls. `torch_private.py` has torch's private names that loads and
saves use.

Streams and events are torch's generic ones, so any device type with them is supported; a device whose driver the engine
does not know is loaded by the plain executor. CUDA uses its own events, since those can sleep while a thread waits.

Lifetimes on an accelerator. A copy is queued first and done later. Until it is done, the device reads and writes memory
that no Python code uses any more. These rules keep that memory valid:

1. Slots. A slot belongs to one engine thread, then to the copies out of it, until the event behind all of them has
   passed. An event recorded earlier would pass before the last copy: the slot would be refilled, and the group
   delivered, too early. A slot whose event fails may still be read: it is never filled again, and its ring takes no
   further chunk. The same holds for images of cached files.
2. Group memory is allocated under the stream that was current in the caller's thread at the call, so what the caller
   frees serves the next load, and the allocator needs no record of another stream. Work queued there may still use that
   memory: the copy stream waits for an event behind the allocation. GPUDirect Storage waits for no stream, so the load
   waits for that event on the host. If torch has to ask the driver for more than 512 MiB, the load allocates in two
   steps, and waits for what is queued until the second.
3. A group is delivered when all events of its copies have passed on the host, so its tensors are valid for every thread
   and stream, and no event is handed over. Until then, and after a cancel or error until `stio_transfer_end` has
   returned, its memory is referenced. Every event is waited for, since each reports the failure of its own copies.
4. Casts and slices that a copy cannot do run on the caller's stream, behind the copies. If a cast may lose values, the
   lost ones are counted there, and the load waits for that count.
5. Loads into existing tensors fill memory of their own; the caller's thread then copies on its current stream, which is
   recorded for that memory. Work queued there may still read the old values.
6. Warm starts wait for no work of the caller, since its forward may be running. They allocate and cast under the copy
   stream, wait there on the host, and record the stream that was current at the call. Without the record the allocator
   would give freed memory to the next load while the caller's stream still reads it. Code on other streams calls
   `record_stream`, as for any tensor of torch.
7. Saves mark the caller's current stream at the call (`Readiness`). A thread of the save waits for the mark, then
   queues copies to pinned blocks on the stream that all saves of the device share, and waits for their event. That
   stream never waits for another, so no save waits for what another one waits for. A tensor is held until its event has
   passed.
8. Pinned memory is unmapped with its last reference, and no allocator knows the copies that use it. So whoever copies
   waits for the events before dropping it, after an error and a cancel too. Unpinning waits for the whole device and
   takes milliseconds, so a thread of the engine does it, and a `Saver` and a `HostCache` keep theirs until they are
   closed. What the driver refuses to unpin stays mapped. A forked child has none. If the driver refuses to pin, plain
   memory is used, with one warning.

No bit changes. torch computes in places where it should move bytes: its list kernels convert 16-bit floats through
float32, which changes NaNs, and copies of BOOL make 0 or 1 of each byte. The driver copies where it can; otherwise
`copy_each` keeps lists away from those kernels and views BOOL, packed F4 and non-contiguous memory as integers.

The GIL. torch releases it at the end of each tensor, and beside a busy Python thread may get it back only a switch
interval later: dropping 10,000 small tensors takes 0.1 s, or 10 to 30. So no load makes and drops a tensor per tensor
of the file, unless torch must copy or cast it, and device tensors are made by calls that keep the GIL.
"""

from stio.device.base import Accelerator, DeviceMap, LoadedGroup, resolve_device, with_current_index
from stio.device.casts import Casts, Lost, select_and_cast
from stio.device.copy_in import TargetMemory
from stio.device.copy_out import Readiness
from stio.device.cuda import DeviceRing, TorchAccelerator, TorchEvent
from stio.device.describe import LazyTensor, describe_tensors, how_to_save, require_values
from stio.device.names_in_files import FileNames
from stio.device.tensors import TORCH_DTYPES, GroupMemory, tensors_in, typed
from stio.device.torch_private import copy_of, moved, traits_of

__all__ = [
    "TORCH_DTYPES",
    "Accelerator",
    "Casts",
    "DeviceMap",
    "DeviceRing",
    "FileNames",
    "GroupMemory",
    "LazyTensor",
    "LoadedGroup",
    "Lost",
    "Readiness",
    "TargetMemory",
    "TorchAccelerator",
    "TorchEvent",
    "copy_of",
    "describe_tensors",
    "how_to_save",
    "moved",
    "require_values",
    "resolve_device",
    "select_and_cast",
    "tensors_in",
    "traits_of",
    "typed",
    "with_current_index",
]
