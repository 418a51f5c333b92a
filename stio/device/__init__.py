"""Tensors, devices, and copies between host memory and devices, in both directions. Nothing here opens a file.

Start with `base.py`: `Accelerator` is the interface that loads need from a device, a `LoadedGroup` is delivered to the
consumer of a load, and a `DeviceMap` finds the device of each tensor. `cuda.py` implements the interface by torch, and
has the engine's rings of pinned memory. Loads use `tensors.py` (tensors over memory, the memory of a group on the
device, dtypes, casts). Saves use `describe.py` (what can be saved of a tensor) and `copy_out.py` (its bytes into host
memory). `tensor_memory.py` checks that the data of a tensor is there. `copy_in.py` copies loaded tensors into memory
of the caller. `names_in_files.py` has the names that transformers gives to tensors in files. `pinned.py` allocates
pinned memory, and finds the drivers that the engine calls. `torch_private.py` has torch's private names that loads and
saves use.

Lifetimes on an accelerator. A copy is queued first and done later. Until it is done, the device reads and writes memory
that no Python code uses any more. These rules keep that memory valid:

1. Host memory. The device reads a slot (pinned host memory), or the image of a cached file, until the event behind its
   copies has passed; only then a slot is filled again, or the image released. If the event fails, the device may still
   read the slot: it is kept and never filled again. No allocator protects pinned memory that copies use: it is unpinned
   and unmapped with its last reference.
2. The memory of a group is allocated under the caller's stream, so the allocator may return memory that work there
   still reads. The copy stream waits for an event behind the allocation. A disk that writes by GPUDirect Storage waits
   for no stream: the load waits for that event on the host.
3. A group is delivered when all events of its copies have passed, so its tensors are for any stream. Until then, and
   after a cancel until `stio_transfer_end` has returned, its memory is referenced (P4).
4. Warm starts allocate and cast under the copy stream, and record their caller's stream: without that the allocator
   would return freed memory to the copy stream, and the next load would write there while the caller's stream reads.
5. Saves. A thread of the save waits for an event on the caller's stream (`Readiness`) and then queues copies out of the
   tensors, on the stream that all saves of the device share. That stream never waits for another one, so no save waits
   for what another one waits for. The save holds a tensor until the event behind its copy has passed.

6. Loads into memory of the caller. The copies out of a group's memory are queued on the caller's current stream, which
   is recorded: the memory is freed at once, and may have been allocated under another stream.

All events of a group are waited for, not only the last one, because each event reports the failure of its own copies.
"""
