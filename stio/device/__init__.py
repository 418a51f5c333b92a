"""Tensors, devices, and copies between host memory and devices, in both directions. Nothing here opens a file.

Start with `base.py`: `Accelerator` is the interface that loads need from a device, a `LoadedGroup` is delivered to
the consumer of a load. `cuda.py` implements the interface by torch. Loads use `copy_queue.py` (slots of staging memory,
submission, events), `group_memory.py` (the memory of a group on the device) and `tensors.py` (tensors over memory,
dtypes, casts). Saves use `describe.py` (what can be saved of a tensor) and `copy_out.py` (its bytes into host memory).
`pinned.py` allocates pinned memory. `placement.py` finds the device of each tensor. `torch_private.py` has torch's
private names that loads and saves use.

Lifetimes on an accelerator. A copy is queued first and done later. Until it is done, the device reads and writes memory
that no Python code uses any more. These rules keep that memory valid:

1. Slots. The device reads a slot (pinned host memory) until the event behind its copies has passed; only then it is
   filled again. If the event fails, the device may still read the slot: it is held until the queue is closed, and never
   filled again. Slots must be pinned, because copies from other memory are slow and block the host. The image of a
   cached file is read in the same way: a load releases it when its copy queues are closed.
2. The memory of a group. One stream, the copy stream of the device, allocates it, writes it and casts it. The allocator
   may return freed memory at once for later work on that stream, which is behind the copies. That is not enough for
   work that is in no stream: a disk that writes by GPUDirect Storage, or a call that returns. So a new slot on the
   device waits for an event on the host. And `close` waits for all events before it frees the memory of groups under
   way: a cancelled load returns when no copy touches its buffers (P4).
3. The consumer uses another stream. `Accelerator.hand_over` lets that stream wait for the group's events. It also calls
   `record_stream`: without it the allocator would return freed memory to the copy stream, and the next load would write
   there, while the consumer's stream still reads. It runs on the consumer's thread, because it uses the thread's
   current stream.
4. Small tensors. Neighbouring ones are copied into one buffer, and cloned from there behind the copies: each tensor has
   an allocation of its own, so a user's `record_stream` protects it. The buffer is freed under the copy stream.
5. Saves. A thread of the save waits for an event on the caller's stream (`Readiness`) and then queues copies out of the
   tensors, on the stream that all saves of the device share. That stream never waits for another one, so no save waits
   for what another one waits for. The save holds a tensor until the event behind its copy has passed.

All events of a group are waited for, not only the last one, because each event reports the failure of its own copies.
"""
