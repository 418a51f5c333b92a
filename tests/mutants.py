"""Breaks the device path and the engine in many ways, one at a time, and proves that the tests find each, every time.

    python tests/mutants.py [--only NAME ...] [--times N] [--jobs N] [--list]

Each mutant is a copy of the checkout in which one order, wait or hand-over is missing or wrong. Its tests run there on the
simulated device, three times; all of the runs must fail. Unmutated they must pass first, or nothing is proved. A mutant
whose old text is no longer in the code is an error: it is to be written anew, or taken out if what it broke is gone.

Exit status: 0, each was caught each time; 1, one was not; 2, something else went wrong, so nothing is proved.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

REPOSITORY = Path(__file__).parents[1]
COPIED = ("stio", "tests", "pyproject.toml", "hatch_build.py")
RUN_SECONDS = 120
"""A run that takes longer is stopped; the mutant is caught by that. Unmutated each selection takes some seconds."""

ORDERS = "tests/gpu/test_orders.py::"
DELIVERED = ORDERS + "test_what_is_delivered_is_there_for_any_stream"
BEHIND_LAST = ORDERS + "test_a_tensor_is_delivered_behind_the_last_of_its_copies"
OTHER_STREAMS = ORDERS + "test_no_other_stream_than_the_caller_s_is_waited_for"
MEMORY_OF = ORDERS + "test_memory_is_of_the_stream_that_is_current_in_the_caller_s_thread"
ALLOCATED = ORDERS + "test_copies_are_behind_the_allocation_itself"
DROPPED_WARM = ORDERS + "test_dropped_memory_of_a_warm_start_stays_until_its_reader_is_through"
LEFT = ORDERS + "test_no_copy_is_under_way_when_a_stream_was_left"
BEHIND_CAST = ORDERS + "test_a_tensor_is_read_behind_its_cast"
DROPPED = ORDERS + "test_dropped_memory_stays_until_its_reader_is_through"
BITS = "tests/gpu/test_bits.py::test_c301_no_path_changes_a_bit_on_a_device"
SLOT = ORDERS + "test_a_slot_is_filled_again_behind_its_copies"
FAILED_COPY = ORDERS + "test_a_copy_that_fails_is_told"
SAVE = ORDERS + "test_a_save_is_behind_what_the_caller_has_queued"
SAVE_STREAM = ORDERS + "test_a_save_waits_for_no_other_stream"
SECOND = ORDERS + "test_another_device_than_the_thread_s_first"
UNPINNED = ORDERS + "test_without_pinned_memory_all_goes_on"
CONTEXT = "tests/gpu/test_streams.py::test_the_default_device_stays_without_a_context"
CONTRACT = "tests/device/test_contract.py::"

FAULTS = "tests/gpu/test_faults.py::"
GPU_ENGINE = "tests/gpu/test_engine.py::"
NO_COPY = GPU_ENGINE + "test_a_copy_that_does_not_come"

ENGINE = "tests/native/test_engine.py::"
CUFILE = "tests/native/test_cufile.py::"
REFRESH = "tests/gpu/test_refresh.py::"
IMAGES = "tests/loading/test_images.py::"
EACH_EVENT = ENGINE + "test_a_group_is_complete_behind_each_of_its_events"
ARRANGED = ENGINE + "test_arranged_groups_are_next_and_none_is_lost"

POLICY_TESTS = "tests/serving/pool/test_policy.py::"
POOL_ON_DEVICE = "tests/gpu/test_pool.py::"

ENGINE_C = "stio/native/engine.c"
POLICY = "stio/serving/pool/policy.py"
POOL = "stio/serving/pool/thread.py"
RING = "stio/native/ring.c"
CUFILE_C = "stio/native/cufile.c"
PINNED_C = "stio/native/pinned.c"
DELTA_C = "stio/native/delta.c"
DELTAS = "tests/native/test_delta.py::"
DELTA_FUZZ = DELTAS + "test_the_fuzz_finds_nothing"
PINNED_TESTS = "tests/native/test_pinned.py::"
UNPINNING = "tests/gpu/test_unpinning.py::"
CUDA = "stio/device/cuda.py"
PRIVATE = "stio/device/torch_private.py"
RINGS = "stio/device/cuda.py"
WARM = "stio/serving/warm_start/api.py"
PINNED = "stio/device/pinned.py"
COPYING = "stio/device/copy_out.py"
BASE = "stio/device/base.py"
PATHS = "stio/loading/read_paths.py"

ON_COPY_STREAM = "            with on_stream(self._module, self.device, self.copy_stream):\n                copy_each("
WAITS_FIRST = "            may_begin.synchronize()\n"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    name: str
    broken: str
    """What is broken, in a sentence."""
    file: str
    changes: tuple[tuple[str, str], ...]
    """Old text, which must occur once, and new text."""
    tests: tuple[str, ...]
    """What pytest is given."""
    delay: float = 0.0
    """Seconds by which the simulated device delays each copy."""
    stage: str = ""
    """The stage of the nightly run that has its tests; empty where `make test` has one of them."""


SLOW = "slow"


def mutant(
    name: str,
    broken: str,
    file: str,
    *changes: tuple[str, str],
    tests: str | Sequence[str],
    delay: float = 0.0,
    stage: str = "",
) -> Mutant:
    return Mutant(name, broken, file, changes, (tests,) if isinstance(tests, str) else tuple(tests), delay, stage)


MUTANTS = (
    # Copies of loads.
    mutant(
        "copies on the reader's stream",
        "the plain executor queues copies on the current stream of the reader's thread, the event on the copy stream",
        CUDA,
        (ON_COPY_STREAM, "            with self.as_current():\n                copy_each("),
        tests=f"{OTHER_STREAMS}[root]",
    ),
    mutant(
        "copies and events on the reader's stream",
        "the plain executor queues copies and their events on the current stream of the reader's thread",
        CUDA,
        (ON_COPY_STREAM, "            with self.as_current():\n                copy_each("),
        (
            "                return TorchEvent(self._module, self.device, self.copy_stream)",
            "                return TorchEvent(self._module, self.device, self._module.current_stream(self.device))",
        ),
        tests=f"{OTHER_STREAMS}[root]",
    ),
    mutant(
        "event before the copies",
        "the event of a batch of the plain executor is recorded before its copies are queued",
        CUDA,
        (
            "                copy_each([target for target, _ in pairs], sources, non_blocking=True)\n"
            "                return TorchEvent(self._module, self.device, self.copy_stream)",
            "                event = TorchEvent(self._module, self.device, self.copy_stream)\n"
            "                copy_each([target for target, _ in pairs], sources, non_blocking=True)\n"
            "                return event",
        ),
        tests=(f"{DELIVERED}[load-root]", f"{SLOT}[1048576-root]"),
        delay=0.02,
    ),
    mutant(
        "copies are not waited for",
        "the plain executor takes copies that it has queued for copies that have ended",
        PATHS,
        ("        self._accelerator.copy(pairs).synchronize()", "        self._accelerator.copy(pairs)"),
        tests=(f"{DELIVERED}[load-root]", f"{DELIVERED}[warm start-root]", f"{SLOT}[1048576-root]"),
    ),
    mutant(
        "a group is delivered at its first block",
        "the plain executor delivers a group when the first of its blocks is there",
        "stio/loading/plain.py",
        (
            "        is_complete = not self._num_left[group.index]",
            "        is_complete = self._num_left[group.index] == len(group.blocks) - 1",
        ),
        tests=(f"{BEHIND_LAST}[stream-root]", f"{BEHIND_LAST}[warm start-root]"),
    ),
    mutant(
        "a group is delivered when it has begun",
        "a group that the engine is to move is delivered when it is given to it",
        "stio/loading/engine.py",
        (
            "        else:\n            self._groups[group.index] = group\n",
            "        else:\n            self._done.append(group)\n",
        ),
        (
            "                group = self._groups.pop(one.group)\n                self._done.append(group)\n",
            "                continue\n",
        ),
        tests=(f"{DELIVERED}[load-file]", f"{DELIVERED}[stream-file]", f"{DELIVERED}[warm start-file]"),
    ),
    mutant(
        "a refused copy is not waited for",
        "a slot is given back while the copies before the refused one still read it",
        CUDA,
        (
            "            with suppress(RuntimeError):  # a lost device raises its error again\n"
            "                self.copy_stream.synchronize()\n",
            "",
        ),
        tests=f"{CONTRACT}test_a_refused_copy_leaves_nobody_who_reads[real]",
    ),
    mutant(
        "failed copies are not told",
        "the plain executor takes a copy that failed for one that is done",
        CUDA,
        (
            '            raise DeviceError(f"copying on {self._device} failed: {error}") from error\n',
            "            del error\n",
        ),
        tests=(f"{FAILED_COPY}[root-load-1]", f"{FAILED_COPY}[root-stream-1]"),
    ),
    mutant(
        "a copy stream for each load",
        "each load makes a copy stream of its own",
        CUDA,
        (
            "        known = _streams.setdefault(device, (module, of_loads, of_saves))\n",
            "        known = module, of_loads, of_saves\n",
        ),
        tests="tests/device/test_cuda.py::test_all_loads_share_a_copy_stream",
        stage=SLOW,
    ),
    # Memory of tensors.
    mutant(
        "memory of the reader's stream",
        "tensors are allocated under the current stream of the load's thread, not under that of its caller",
        CUDA,
        (
            "        with self.on_stream(needed_bytes=sum(prod(shape) * dtype.itemsize for dtype, shape in wanted)):",
            "        with self.as_current():",
        ),
        tests=(f"{MEMORY_OF}[load-file]", f"{MEMORY_OF}[stream-root]"),
    ),
    mutant(
        "memory of the stream that was current at `open`",
        "a load of an open checkpoint allocates under the stream that was current when it was opened",
        "stio/loading/api.py",
        ("        return replace(self._options, streams=None)\n", "        return self._options\n"),
        tests=(f"{MEMORY_OF}[load of an open one-file]", f"{MEMORY_OF}[stream-file]", f"{MEMORY_OF}[read-root]"),
    ),
    mutant(
        "no event behind the allocation",
        "copies do not wait for what the allocating stream may still do with freed memory",
        CUDA,
        (
            "                self.copy_stream.wait_event(TorchEvent(self._module, self.device, self._stream).event)\n",
            "                pass\n",
        ),
        tests=(
            f"{DROPPED}[file-large-usual stream]",
            f"{DROPPED}[root-small-own stream]",
            f"{MEMORY_OF}[load-file]",
        ),
        stage=SLOW,
    ),
    mutant(
        "the event is before the allocation",
        "copies wait for what was queued before memory was allocated, not for what was queued when it was",
        CUDA,
        (
            "            tensors = new_tensors(wanted, self.device)\n",
            "            event = TorchEvent(self._module, self.device, self._stream)\n"
            "            tensors = new_tensors(wanted, self.device)\n",
        ),
        ("wait_event(TorchEvent(self._module, self.device, self._stream).event)", "wait_event(event.event)"),
        tests=(f"{ALLOCATED}[file]", f"{ALLOCATED}[root]"),
    ),
    mutant(
        "the event of another stream",
        "copies wait for the load's thread's stream, not for the one under which memory was allocated",
        CUDA,
        (
            "wait_event(TorchEvent(self._module, self.device, self._stream).event)",
            "wait_event(TorchEvent(self._module, self.device, self.default_stream(self.device)).event)",
        ),
        tests=(f"{DROPPED}[file-large-own stream]", f"{DROPPED}[root-small-own stream]"),
    ),
    mutant(
        "casts on the load's thread's stream",
        "casts run on the current stream of the load's thread, not on that of its caller",
        PATHS,
        ("            with self._accelerator.on_stream():\n", "            if True:\n"),
        tests=(f"{BEHIND_CAST}[load-file]", f"{BEHIND_CAST}[stream-root]"),
    ),
    # Bits.
    mutant(
        "lists of tensors by CUDA's kernel",
        "lists of tensors on one device go to the kernel that converts them through float",
        PRIVATE,
        ("    pairs.append((nothing, nothing))\n", ""),
        tests="tests/gpu/test_bits.py::test_c301_no_path_changes_a_bit_of_a_dtype_alone[warm_start, buffers that are there]",
    ),
    mutant(
        "BOOL by plain copies",
        "bytes of BOOL are copied as truth values",
        PRIVATE,
        ("    if dtype not in _COPIED_AS_INTEGERS and ", "    if dtype != torch.float4_e2m1fn_x2 and "),
        tests="tests/test_bits.py::test_c301_no_path_changes_a_bit_on_the_cpu[load_into, beside memory with gaps]",
    ),
    mutant(
        "strided memory by kernels",
        "tensors that are not contiguous are copied as what they are",
        PRIVATE,
        ("    integer = INTEGERS.get(dtype.itemsize)\n", "    integer = None\n"),
        tests=f"{BITS}[load_into, turned memory]",
        stage=SLOW,
    ),
    mutant(
        "strided parts of the drop-in by kernels",
        "a part of a tensor that is not contiguous is made so by torch before it goes to the device",
        PRIVATE,
        ("    return (tensor if is_plain else copy_of(tensor)).to(device)\n", "    return tensor.to(device)\n"),
        tests=f"{BITS}[drop-in, get_slice]",
    ),
    # The ring.
    mutant(
        "a ring of the default stream",
        "the engine copies on the default stream of the device",
        RINGS,
        (
            "            driver, handle = open_driver(device, stream)\n",
            "            driver, handle = open_driver(device, accelerator.default_stream(device))\n",
        ),
        tests=(f"{OTHER_STREAMS}[file]", f"{DROPPED}[file-large-own stream]"),
    ),
    mutant(
        "a ring is used after a failure",
        "the next load uses a ring of which a copy has failed",
        RINGS,
        (" and not known.ring.has_failed", ""),
        tests=(f"{FAILED_COPY}[file-load-1]", f"{NO_COPY}[load-refused-2]"),
    ),
    mutant(
        "a load ends before its copies",
        "a load that was cancelled gives its memory back while the engine's copies are under way",
        "stio/loading/engine.py",
        ("        self._transfer.end()\n", "        self._transfer.stop()\n"),
        tests=f"{LEFT}[file]",
    ),
    mutant(
        "a load ends before its workers",
        "a load that was cancelled gives its memory back while copies of the plain executor are under way",
        "stio/loading/plain.py",
        (
            '        """Stop, and wait until no worker is left."""\n        self.stop()\n'
            "        self._workers.join()\n",
            '        """Stop, and wait until no worker is left."""\n        self.stop()\n',
        ),
        (
            "        if self._workers.stopped:\n            self._workers.join()\n",
            "        if self._workers.stopped:\n",
        ),
        tests=f"{LEFT}[root]",
    ),
    mutant(
        "refused pinning is not told",
        "a ring without pinned memory is used in silence",
        PATHS,
        ("            self._ring.warn_if_refused()\n", "            pass\n"),
        tests=UNPINNED,
    ),
    mutant(
        "refused pinning is told by each load",
        "each load warns of a ring without pinned memory",
        RINGS,
        ("            self._has_warned = True\n", ""),
        tests=f"{GPU_ENGINE}test_refused_pinning_is_told_once_and_tried_again_by_the_next_ring",
        stage=SLOW,
    ),
    mutant(
        "each refusal to pin is tried and told again",
        "where the system refuses to pin memory each slot of the plain executor asks again, with a warning each",
        PINNED,
        ("                    self.was_refused = True\n", ""),
        tests="tests/device/test_cuda.py::test_c97_pinning_fails",
    ),
    mutant(
        "a cache releases too early",
        "the memory of a cached file is released while copies of the load still read it",
        "stio/loading/planned.py",
        (
            "            owned.callback(image.release)\n        paths = [read.load",
            "            image.release()\n        paths = [read.load",
        ),
        tests=f"{ORDERS}test_a_cache_keeps_what_is_copied_from",
    ),
    mutant(
        "pinning must not be refused",
        "a load fails where the system refuses to pin memory",
        PINNED,
        (
            "                    self.was_refused = True\n",
            "                    self.was_refused = True\n                    raise\n",
        ),
        tests=UNPINNED,
    ),
    # GPUDirect Storage.
    mutant(
        "cuFile writes without a wait",
        "cuFile writes to memory while the stream under which it was allocated still uses it",
        "stio/loading/gds_path.py",
        ("        self._accelerator.copy([]).synchronize()\n", ""),
        tests=f"{ORDERS}test_a_disk_writes_behind_what_is_queued_for_the_memory",
    ),
    mutant(
        "files are registered with another current device",
        "files are registered with cuFile while number 0 is the thread's current device",
        "stio/loading/gds_path.py",
        ("accelerator.as_current() if isinstance(accelerator, TorchAccelerator) else nullcontext()", "nullcontext()"),
        tests=f"{ORDERS}test_a_disk_writes_to_the_second_device_as_the_thread_s_current_one",
    ),
    mutant(
        "cuFile: no context",
        "a thread calls cuFile with the device as the current one that it used last",
        CUFILE_C,
        ("bool ok = stio_make_current(range->ring->driver, range->ring->context, &failure);", "bool ok = true;"),
        tests=CUFILE + "test_the_device_is_the_current_one",
    ),
    mutant(
        "cuFile: a short read begins again",
        "what a second read brings is written to the place of the first",
        CUFILE_C,
        ("            failure.offset - range->offset);", "            one->begin - range->offset);"),
        tests=CUFILE + "test_a_short_read_goes_on",
    ),
    mutant(
        "cuFile: a failure is a success",
        "a chunk that cuFile could not read is complete",
        ENGINE_C,
        ("if (stio_cufile_read(one)) return true;", "if (stio_cufile_read(one) || true) return true;"),
        tests=CUFILE + "test_after_a_failure_the_ring_reads_the_rest[1--5044]",
    ),
    mutant(
        "cuFile: a failure is forgotten",
        "cuFile is tried again for each chunk",
        ENGINE_C,
        (
            "        __atomic_store_n(&one->transfer->cufile_refused, true, __ATOMIC_RELAXED);",
            "",
        ),
        tests=CUFILE + "test_after_a_failure_cufile_is_not_tried_again",
        stage=SLOW,
    ),
    mutant(
        "cuFile: a failure is not told",
        "a read that failed leaves no reason behind",
        CUFILE_C,
        ("    if (file->failure.kind == 0) file->failure = failure;\n", ""),
        tests=CUFILE + "test_after_a_failure_the_ring_reads_the_rest[1--5044]",
    ),
    mutant(
        "cuFile: neighbours share a read",
        "a chunk for cuFile has several ranges, of which the first one alone is read",
        ENGINE_C,
        ("(STIO_POPULATE | STIO_WRITE | STIO_CUFILE)", "(STIO_POPULATE | STIO_WRITE)"),
        tests=CUFILE + "test_neighbours_of_other_kinds_are_read_apart",
    ),
    mutant(
        "cuFile: chunks are not aligned",
        "chunks for cuFile end within a page, which the disk then reads twice",
        ENGINE_C,
        ("if (range->direct_fd >= 0 || range->flags & STIO_CUFILE) base", "if (range->direct_fd >= 0) base"),
        tests=CUFILE + "test_reads_begin_at_pages_and_end_within_a_chunk",
    ),
    mutant(
        "cuFile: nobody looks at slots",
        "while threads are busy with reads of cuFile nobody looks whether copies out of slots have passed",
        ENGINE_C,
        ("is_for_cufile(transfer, one.ranges) ? NULL : one.ranges->ring;", "one.ranges->ring;"),
        tests=CUFILE + "test_slots_end_while_cufile_reads_without_end",
    ),
    # Devices and contexts.
    mutant(
        "the caller's current device is ignored",
        "a device without a number means number 0, not the one that is current in the caller's thread",
        BASE,
        (
            "    return current if str(parsed) == current.type else device  # without an index",
            "    return device",
        ),
        tests=f"{SECOND}[False]",
    ),
    mutant(
        "the number of a device is ignored",
        "loads go to device 0, whichever is named",
        BASE,
        ("    return torch.device(parsed.type, index)", "    return torch.device(parsed.type, 0)"),
        tests=f"{SECOND}[True]",
    ),
    mutant(
        "an event is waited for with another current device",
        "a thread whose current device is number 0 waits for an event of another one: a context is made on number 0",
        CUDA,
        (
            "            with self._module.device(self._device):\n                yield",
            "            yield",
        ),
        tests=CONTEXT,
        stage=SLOW,
    ),
    mutant(
        "a stream is entered with another current device",
        "a thread whose current device is number 0 comes back from a stream of another one: a context is made on number 0",
        CUDA,
        ("    with module.device(device), module.stream(stream):", "    with module.stream(stream):"),
        tests=CONTEXT,
        stage=SLOW,
    ),
    mutant(
        "memory of dropped tensors",
        "a stream frees device memory at the end of each tensor, which releases the GIL",
        "stio/loading/api.py",
        ("[] if self._closed else group.device_storages()", "[]"),
        tests="tests/gpu/test_memory.py::test_a_stream_frees_dropped_tensors_with_its_next_group",
    ),
    mutant(
        "memory of several consumers",
        "each consumer of a stream holds a group that no budget counts",
        "stio/loading/api.py",
        ("self._storages = [] if self._closed else group", "self._storages += [] if self._closed else group"),
        tests="tests/gpu/test_memory.py::test_consumers_of_one_stream_hold_one_group_together",
    ),
    # Loads into memory of the caller, as bytes.
    mutant(
        "bytes into memory with gaps",
        "memory that is not contiguous gets the bytes of the tensor one after the other",
        "stio/device/copy_in.py",
        ("return _is_plain(type(tensor)) and tensor.is_contiguous()", "return _is_plain(type(tensor))"),
        tests=f"{IMAGES}test_what_has_changed_since_the_load_began_is_copied_by_torch",
    ),
    mutant(
        "bytes of another dtype",
        "memory of another dtype gets the bytes of the tensor as they are",
        "stio/device/copy_in.py",
        ("target.dtype == dtype and target.shape == shape and is_there", "True"),
        tests=f"{REFRESH}test_memory_that_is_another_during_the_load",
    ),
    mutant(
        "bytes into memory that was freed",
        "memory that is freed during a load is written nevertheless",
        "stio/device/copy_in.py",
        (
            "begin, end, address, _ = self.extent(name, target, storage)",
            "begin, end, address = 0, target.nbytes, target.data_ptr()",
        ),
        tests=f"{REFRESH}test_memory_that_is_freed_during_the_load_is_not_written",
    ),
    mutant(
        "a tensor for each of a group on the CPU",
        "a load into memory on the CPU makes a tensor for each tensor of the file",
        "stio/loading/targets/base.py",
        ("memory.is_cpu and not by_engine", "memory.is_cpu"),
        tests=f"{IMAGES}test_one_tensor_of_bytes_for_a_group",
    ),
    mutant(
        "a copy on the CPU that cannot be cancelled",
        "a copy of the engine on the CPU does not look for a cancel",
        "stio/device/copy_in.py",
        ("            if is_interrupted():\n                raise Cancelled\n", "            pass\n"),
        tests=f"{IMAGES}test_a_cancel_ends_a_copy_within_a_second",
    ),
    mutant(
        "copies without a thread",
        "where no thread can be started for the copies of a load, nothing is copied",
        "stio/device/copy_in.py",
        ("if by_torch or not (is_same", "if not (is_same"),
        tests=f"{IMAGES}test_where_no_thread_can_be_started_torch_copies",
    ),
    mutant(
        "copies into memory that is not held",
        "the engine writes to memory that a tensor had when the copies began, and that may be freed meanwhile",
        "stio/device/copy_in.py",
        ("            held.append(storage)\n", ""),
        tests=f"{IMAGES}test_memory_that_a_tensor_no_longer_has_is_held_during_the_copies",
    ),
    mutant(
        "bytes of what is cast",
        "a load with dtype= copies the bytes of the file",
        "stio/loading/planned.py",
        ("copied = frozenset() if selected.casts else delivery.copied", "copied = delivery.copied"),
        tests=f"{IMAGES}test_what_is_cast_on_the_way_is_no_copy_of_bytes",
    ),
    mutant(
        "overlapping memory in any order",
        "memory that overlaps gets parts of several tensors",
        "stio/loading/targets/base.py",
        ("self._is_apart or not self._overlaps(found)", "True"),
        tests=f"{IMAGES}test_memory_that_overlaps_gets_the_tensors_in_their_order",
        stage=SLOW,
    ),
    mutant(
        "the engine reads pages of a lazy load",
        "a copy out of pages that are not read yet takes threads of the engine",
        "stio/loading/read_paths.py",
        ("delivery if populates else replace(delivery, copied=frozenset())", "delivery"),
        tests=f"{IMAGES}test_a_lazy_load_leaves_the_reads_of_its_pages_to_its_own_thread",
    ),
    mutant(
        "bytes are not counted as a change",
        "autograd does not see that a load has written a tensor",
        "stio/device/copy_in.py",
        ("            torch.autograd.graph.increment_version(target)  #", "            pass  #"),
        tests=f"{REFRESH}test_all_kinds_of_memory_are_filled",
    ),
    mutant(
        "bytes on another stream",
        "the copies into the caller's memory are queued on the default stream",
        "stio/device/copy_in.py",
        (".current_stream(device)\n            image", ".default_stream(device)\n            image"),
        tests=f"{REFRESH}test_what_is_queued_just_before_the_copies_reads_the_old_values",
    ),
    mutant(
        "the stream that copies the bytes is not recorded",
        "the memory of a group is used again while another stream of the caller still reads it",
        "stio/device/copy_in.py",
        ("            image.memory.record_stream(stream)", "            # "),
        tests=f"{REFRESH}test_another_stream_is_current_when_the_bytes_are_copied",
    ),
    mutant(
        "a save reads memory that was freed while it waited",
        "a save does not look again whether tensors still have their memory",
        COPYING,
        ("                require_held(storage, address, end)\n", "                pass\n"),
        tests="tests/device/test_copy_out.py::test_a_tensor_that_gets_other_memory_while_its_save_waits",
    ),
    mutant(
        "the driver's copies are refused in silence",
        "a load whose copies were refused reports success",
        "stio/native/drivers.c",
        ("    stio_driver_failed(driver, code, failure);\n    return -1;\n", "    (void)failure;\n    return 0;\n"),
        tests="tests/native/test_copies.py::test_a_refused_copy_is_told_and_those_before_it_are_queued",
    ),
    mutant(
        "copies to the host by the call for the device",
        "saves call the driver's function that copies within the device",
        "stio/native/drivers.c",
        ("code = to_host ? driver", "code = !to_host ? driver"),
        tests="tests/device/test_copy_out.py::test_many_tensors_of_a_device_take_one_call",
    ),
    # Warm starts.
    mutant(
        "a warm start does not wait for casts",
        "parameters, buffers and twins are used on any stream while their casts and copies are under way",
        CUDA,
        (
            "                TorchEvent(self._module, self.device, self._stream).synchronize()\n",
            "                pass\n",
        ),
        tests=(
            f"{BEHIND_CAST}[warm start-file]",
            f"{BEHIND_CAST}[buffer of a warm start-root]",
            f"{ORDERS}test_both_of_two_tied_parameters_of_a_warm_start_are",
        ),
    ),
    mutant(
        "a warm start waits for the caller's work",
        "parameters of a warm start are allocated under the stream that is current where it was called",
        "stio/serving/warm_start/api.py",
        ('replace(settings, dtype=None, streams="copy", lost=Lost())', "replace(settings, dtype=None, lost=Lost())"),
        tests=f"{FAULTS}test_fault_5_a_warm_start_waits_for_no_work_of_the_user[plain]",
    ),
    mutant(
        "parameters of a warm start are not recorded",
        "the allocator is not told that the caller's stream uses memory of the copy stream",
        WARM,
        ("        record(tensors.values(), self._device, self._stream)  #", "        #"),
        tests=(f"{DROPPED_WARM}[parameter-usual stream]", f"{DROPPED_WARM}[parameter-own stream]"),
    ),
    mutant(
        "twins of a warm start are not recorded",
        "the allocator is not told that the caller's stream uses the copy for a second parameter",
        WARM,
        ("        record(twins, self._device, self._stream)\n", ""),
        tests=f"{DROPPED_WARM}[tied parameter-own stream]",
        stage=SLOW,
    ),
    mutant(
        "buffers of a warm start are not recorded",
        "the allocator is not told that the caller's stream uses buffers in memory of the copy stream",
        WARM,
        ("            record(tensors.values(), self._device, self._stream)\n", ""),
        tests=f"{DROPPED_WARM}[buffer-own stream]",
    ),
    mutant(
        "parameters of a warm start are recorded for the default stream",
        "the default stream is recorded, not the one that is current where the warm start begins",
        WARM,
        ("        self._stream = TorchAccelerator.current_streams().get(self._device)\n", ""),
        tests=f"{DROPPED_WARM}[parameter-own stream]",
    ),
    # Saves.
    mutant(
        "a save ignores the caller's mark",
        "a save does not wait for what the caller's stream was told before it",
        COPYING,
        (WAITS_FIRST, ""),
        tests=SAVE,
    ),
    mutant(
        "a save marks the default stream",
        "a save waits for the default stream, not for the caller's current one",
        CUDA,
        (
            "return cls(module, device, module.current_stream(device))",
            "return cls(module, device, module.default_stream(device))",
        ),
        tests=SAVE,
    ),
    mutant(
        "a save marks one device",
        "of the devices that a save's tensors are on only the first is marked",
        COPYING,
        (
            "            if device is not None and device not in found:",
            "            if device is not None and not found:",
        ),
        tests=f"{ORDERS}test_a_save_of_two_devices_is_behind_both",
    ),
    mutant(
        "a save marks on its own thread",
        "a save waits for the current stream of its own thread, not for the caller's",
        "stio/saving/pending.py",
        (
            "        self._ready = Readiness.now(self._tensors)",
            "        self._ready = Readiness()",
        ),
        tests=SAVE,
    ),
    mutant(
        "a save does not wait for its copies",
        "a save goes on, and lets its caller go on, while its copies are under way",
        COPYING,
        ("                waits.callback(event.synchronize)\n", ""),
        tests=SAVE,
        delay=0.02,
    ),
    mutant(
        "a save's event before its copies",
        "the event of a save is recorded before its copies are queued",
        COPYING,
        (
            WAITS_FIRST,
            f"{WAITS_FIRST}            event = TorchEvent(module, device, stream)\n",
        ),
        ("            return TorchEvent(module, device, stream)\n", "            return event\n"),
        tests=SAVE,
        delay=0.02,
    ),
    mutant(
        "a save's copies on the worker's stream",
        "copies of a save are queued on the current stream of the worker's thread, the event on the save's",
        COPYING,
        (
            "queue_copies(device, stream, ranges, to_host=True)",
            "queue_copies(device, module.default_stream(device), ranges, to_host=True)",
        ),
        tests="tests/device/test_copy_out.py::test_many_tensors_of_a_device_take_one_call",
        delay=0.001,
    ),
    mutant(
        "a save on the caller's stream",
        "a save copies on the caller's stream, so that it waits for what is queued there later",
        COPYING,
        ("        stream = save_stream(module, device)\n", "        stream = module.default_stream(device)\n"),
        tests=f"{SAVE_STREAM}[the caller's]",
    ),
    mutant(
        "a save on the stream of loads",
        "a save copies on the stream of loads, so that it waits for their copies",
        CUDA,
        (
            "    return _streams_of(module, device)[2]\n",
            "    return _streams_of(module, device)[1]\n",
        ),
        tests=f"{SAVE_STREAM}[that of loads]",
    ),
    mutant(
        "a stream for each save",
        "each save takes a stream of torch's pool, and one in 32 the stream of loads",
        CUDA,
        (
            "        known = _streams.setdefault(device, (module, of_loads, of_saves))\n",
            "        known = module, of_loads, of_saves\n",
        ),
        tests=f"{FAULTS}test_fault_2_saves_share_a_stream",
    ),
    mutant(
        "saves wait on the stream that they share",
        "the stream of saves waits for the caller's work, so other saves wait for it too",
        COPYING,
        (WAITS_FIRST, "            stream.wait_event(may_begin.event)\n"),
        tests=f"{FAULTS}test_fault_2_a_save_waits_for_nothing_that_another_one_waits_for",
    ),
    mutant(
        "what is produced is not waited for",
        "a save does not wait for the work behind a tensor that its producer returned",
        COPYING,
        (WAITS_FIRST, ""),
        tests=f"{ORDERS}test_what_is_made_for_a_save_is_saved_behind_its_making",
    ),
    mutant(
        "a refused copy of a save is not waited for",
        "staging memory is given back while copies before the refused one still write to it",
        COPYING,
        (
            "        with suppress(RuntimeError):  # a lost device raises its error again\n"
            "            stream.synchronize()\n",
            "",
        ),
        tests=f"{ORDERS}test_a_refused_copy_of_a_save_is_told_when_the_others_are_done",
    ),
    mutant(
        "failed copies of a save are not told",
        "a save publishes what a failed copy left in its staging memory",
        COPYING,
        ("    with ExitStack() as waits:", "    with suppress(DeviceError), ExitStack() as waits:"),
        tests=f"{FAILED_COPY}[root-save-1]",
        stage=SLOW,
    ),
    mutant(
        "staging memory of a save is given back too early",
        "a block is filled again while it is still to be written",
        "stio/saving/scheduler.py",
        (
            "        if self._hashers is not None:\n            self._hash(",
            "        self._pool.give_back(region)\n        if self._hashers is not None:\n            self._hash(",
        ),
        ("        self._pool.give_back(self._regions.pop(number))\n", "        del self._regions[number]\n"),
        tests=f"{ORDERS}test_staging_memory_of_a_save_is_used_again_behind_its_write",
    ),
    # Pinned memory.
    mutant(
        "a closed saver keeps its pinned memory",
        "memory that a saver has pinned is released only with its last save",
        "stio/saving/staging_pool.py",
        ("            self._free.clear()\n", ""),
        tests="tests/saving/test_staging_pool.py::test_clear_releases_what_is_not_in_use",
    ),
    mutant(
        "a closed cache keeps its pinned memory",
        "memory that a cache keeps for its next files stays pinned when it is closed",
        "stio/serving/host_cache.py",
        ("        self._kept.clear()\n", "        pass\n"),
        tests="tests/serving/cache/test_host_cache.py::test_pinned_memory_that_is_kept_is_released[close]",
    ),
    mutant(
        "a load that outlives its cache keeps the memory",
        "memory of a closed cache is kept for later files if a load used it at the close",
        "stio/serving/host_cache.py",
        (
            "entry.image.take_memory()\n                if not self._closed:\n                    self._keep(regions)\n",
            "entry.image.take_memory()\n                self._keep(regions)\n",
        ),
        tests="tests/serving/cache/test_host_cache.py::"
        "test_pinned_memory_of_a_closed_cache_is_released_with_its_last_load",
    ),
    mutant(
        "a cache pins all memory anew",
        "memory of an evicted file is not used for the next one",
        "stio/serving/host_cache.py",
        ("        self._kept += [", "        _ = ["),
        tests="tests/serving/cache/test_host_cache.py::test_pinned_memory_of_an_evicted_file_is_used_again",
    ),
    mutant(
        "copies of a save are not waited for after an error",
        "a save whose copy was refused releases its staging memory while earlier copies write to it",
        COPYING,
        (
            "        with suppress(RuntimeError):  # a lost device raises its error again\n"
            "            stream.synchronize()\n",
            "",
        ),
        (
            "    with ExitStack() as waits:  # all events are waited for, even if something fails",
            "    with ExitStack() as waits:",
        ),
        ("            waits.callback(event.synchronize)\n", "            waits.callback(lambda: None)\n"),
        tests=f"{UNPINNING}test_a_refused_copy[saver-first device-3]",
        delay=0.02,
    ),
    mutant(
        "copies over the end of a pinned piece",
        "a stager copies a large tensor in one piece",
        "stio/distributed/dcp_writer.py",
        ("pairwise([0, *ends, source.nbytes])", "pairwise([0, source.nbytes])"),
        tests=f"{UNPINNING}test_a_stager_s_copies_stay_within_pinned_pieces[first device]",
        stage=SLOW,
    ),
    mutant(
        "a cache reads when all memory is pinned",
        "the first bytes are read into a cache behind the pinning of memory for all groups",
        "stio/loading/engine.py",
        (
            "                self._transfer.add(ranges)\n                ranges = native.Ranges()\n",
            "                pass\n",
        ),
        tests="tests/serving/cache/test_host_cache.py::test_segments_are_filled_while_others_are_pinned",
    ),
    mutant(
        "a saver pins whatever a snapshot takes",
        "the default budget of a saver is not bounded by the host's memory",
        "stio/saving/staging_pool.py",
        ("        return self.budget_bytes if fits else", "        return self.budget_bytes if fits or pinned else"),
        tests=f"{FAULTS}test_fault_3_a_saver_without_a_budget_pins_no_more_than_the_host_has",
    ),
    mutant(
        "what was refused is never pinned again",
        "a saver uses plain memory for ever once pinning was refused",
        PINNED,
        (
            "        return self.device == other.device and not self.was_refused and not other.was_refused\n",
            "        return self.device == other.device\n",
        ),
        tests=f"{FAULTS}test_after_a_refusal_memory_is_pinned_again[a saver]",
    ),
    # The engine in C.
    mutant(
        "engine: a slot is used again early",
        "a thread fills a slot again without a wait for the event behind its copies",
        RING,
        (
            "            unlink_copied_from(oldest);\n            wait_for(oldest);\n        } else {",
            "            unlink_copied_from(oldest);\n            oldest->state = SLOT_FREE;\n        } else {",
        ),
        tests=ENGINE + "test_a_slot_is_filled_again_behind_its_copies",
        stage=SLOW,
    ),
    mutant(
        "engine: an event is not waited for",
        "an event that has not passed is taken for one that has",
        RING,
        (
            "const int code = wait_until_passed(ring->driver, one->event);",
            "const int code = 0;",
        ),
        tests=EACH_EVENT,
    ),
    mutant(
        "engine: threads are part of a capture",
        "threads of the engine do not say that they are no part of a capture of a graph",
        RING,
        ("driver->exchange_capture_mode != NULL) code", "driver->exchange_capture_mode == NULL) code"),
        tests="tests/device/test_rings.py::test_threads_of_the_engine_may_act_while_a_graph_is_captured",
    ),
    mutant(
        "engine: event before the copies",
        "the event of a chunk is recorded before its copies are queued",
        RING,
        (
            "    int code = 0;\n    bool queued = false;\n",
            "    const int early = ring->driver->event_record(filled->event, ring->stream);\n"
            "    int code = 0;\n    bool queued = false;\n",
        ),
        ("code = ring->driver->event_record(filled->event, ring->stream);", "code = early;"),
        tests=EACH_EVENT,
    ),
    mutant(
        "engine: event on another stream",
        "the event of a chunk is recorded on the default stream",
        RING,
        (
            "code = ring->driver->event_record(filled->event, ring->stream);",
            "code = ring->driver->event_record(filled->event, NULL);",
        ),
        tests=EACH_EVENT,
    ),
    mutant(
        "engine: copies on another stream",
        "copies are queued on the default stream",
        RING,
        ("(size_t)(high - low), ring->stream);", "(size_t)(high - low), NULL);"),
        tests=EACH_EVENT,
    ),
    mutant(
        "engine: a group is complete with its last chunk cut",
        "a group is complete when all of it is cut, and one chunk has ended",
        ENGINE_C,
        ("if (of->is_cut && of->under_way == 0) {", "if (of->is_cut) {"),
        tests=EACH_EVENT,
    ),
    mutant(
        "engine: a refused copy is not waited for",
        "a chunk has failed while the copies before the refused one are under way",
        RING,
        ("    if (refused != 0 && queued && code == 0) code = wait_until_passed(ring->driver, filled->event);\n", ""),
        tests=ENGINE + "test_a_failure_is_reported_behind_the_copies_before_it",
    ),
    mutant(
        "engine: the end does not wait",
        "the end of a transfer returns while its chunks are under way",
        ENGINE_C,
        (
            "const bool ends = !is_own(transfer) || transfer->under_way == 0;",
            "const bool ends = true;",
        ),
        tests=ENGINE + "test_the_end_waits_for_copies[True]",
    ),
    mutant(
        "engine: a stop begins chunks",
        "chunks of a transfer that is stopped go on",
        ENGINE_C,
        ("    return !transfer->is_stopped && next_place", "    return next_place"),
        ("    const bool is_stopped = one->transfer->is_stopped;\n", "    const bool is_stopped = false;\n"),
        tests=ENGINE + "test_a_stop_begins_no_chunk",
    ),
    mutant(
        "engine: a ring is given back in use",
        "the memory of a ring is released while transfers use it",
        RING,
        (
            "        if (ring->num_users != 0 || ring->is_releasing) continue;\n",
            "        if (ring->is_releasing) continue;\n",
        ),
        tests=ENGINE + "test_a_ring_without_users_is_given_back_in_time",
    ),
    mutant(
        "engine: memory is released in the ring",
        "memory is taken out of a ring behind its release, so that a transfer which begins meanwhile fills it",
        RING,
        (
            "    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread) ring->of_thread[thread].memory = NULL;\n"
            "    ring->is_trimmed = false;\n    ring->is_releasing = true;\n",
            "    ring->is_trimmed = false;\n    ring->is_releasing = true;\n",
        ),
        (
            "    ring->is_releasing = false;\n}",
            "    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread) ring->of_thread[thread].memory = NULL;\n"
            "    ring->is_releasing = false;\n}",
        ),
        tests=ENGINE + "test_memory_that_is_being_released_is_not_used_again",
        stage=SLOW,
    ),
    mutant(
        "engine: memory stays pinned",
        "memory of a ring is unmapped and not unpinned",
        RING,
        (
            "        if (taken[thread].is_pinned && ring->driver->unpin(memory) == 0) unpinned_bytes += SLOTS_BYTES;\n",
            "",
        ),
        tests=ENGINE + "test_a_ring_is_trimmed_and_released",
    ),
    # Deltas.
    mutant(
        "engine: an element is its first byte",
        "only the first byte of an element is compared",
        DELTA_C,
        ("mask |= mask >> (1 << k);", "mask |= 0;"),
        tests=DELTAS + "test_each_byte_of_each_element_counts[engine-2]",
    ),
    mutant(
        "engine: the image keeps the old bytes",
        "a comparison does not bring the image up to date",
        DELTA_C,
        ("        memcpy(image + k, line, LINE);\n", ""),
        tests=DELTAS + "test_small_tensors[engine-16]",
    ),
    mutant(
        "engine: the image is left behind a whole tensor",
        "the image is not brought up to date behind the place where collecting ends",
        DELTA_C,
        ("    if (at < nbytes) memcpy(old + at, new + at, nbytes - at);\n", ""),
        tests=DELTAS + "test_the_image_is_up_to_date_behind_the_place_where_collecting_ends[engine-2]",
    ),
    mutant(
        "engine: the new bytes are read twice",
        "values and image may differ where somebody writes to the new bytes while they are compared",
        DELTA_C,
        ("            memcpy(value, image + byte, ", "            memcpy(value, fresh + byte, "),
        tests=DELTA_FUZZ + "[engine-usual]",
        stage=SLOW,
    ),
    mutant(
        "engine: bytes that differ by their highest bit are equal",
        "without SSE2 a byte counts as equal if only its highest bit differs",
        DELTA_C,
        ("(((x & low) + low) | x) & ~low", "((x & low) + low) & ~low"),
        tests=DELTA_FUZZ + "[engine-without SSE2]",
        stage=SLOW,
    ),
    mutant(
        "engine: the largest code is a gap",
        "a gap as long as the largest code is written as that code alone",
        DELTA_C,
        ("            if (gap >= M1) {", "            if (gap > M1) {"),
        tests=DELTAS + "test_gaps_around_the_largest_codes[engine-1]",
    ),
    mutant(
        "engine: codes of two bytes are counted without those that go on",
        "the size of codes of two bytes is too small where a gap takes several",
        DELTA_C,
        ("                part->escapes += gap / M2;\n", ""),
        tests=DELTAS + "test_gaps_around_the_largest_codes[engine-1]",
    ),
    mutant(
        "engine: gaps of two bytes add up",
        "codes of one byte are turned into two bytes as if each gap began at the first one",
        DELTA_C,
        ("                    gap = 0;\n", ""),
        tests=DELTAS + "test_many_gaps_with_the_shorter_codes[engine-2]",
    ),
    mutant(
        "engine: no room for codes that go on",
        "memory for codes is too short behind a long gap",
        DELTA_C,
        (" + items + (part->tail + items) / M1 + 1", " + items + 1"),
        tests=DELTA_FUZZ + "[engine-usual]",
        stage=SLOW,
    ),
    mutant(
        "engine: the gap between two pieces is lost",
        "the first change of a piece is coded without what is unchanged at the end of the pieces before",
        DELTA_C,
        ("put(code, code_bytes, tail + lead_of(part, &done))", "put(code, code_bytes, lead_of(part, &done))"),
        tests=DELTAS + "test_pieces_are_one_tensor[engine-100]",
    ),
    mutant(
        "engine: the gap between two pieces is counted twice",
        "the codes of two bytes of a piece's first gap are counted beside those of the joined gap",
        DELTA_C,
        ("part->escapes - lead / M2 + ", "part->escapes + "),
        tests=DELTAS + "test_pieces_are_one_tensor[engine-70000]",
    ),
    mutant(
        "engine: a piece ends with its line",
        "elements behind the end of a piece count as unchanged",
        DELTA_C,
        ("    part->tail -= (LINE - nbytes) >> shift;\n", ""),
        tests=DELTAS + "test_pieces_are_one_tensor[engine-100]",
    ),
    mutant(
        "engine: a missing piece is not noticed",
        "what is not compared counts as if it was not in the tensor",
        DELTA_C,
        ("    if (compared != delta->num_elements) return -1;\n", ""),
        tests=DELTAS + "test_a_piece_that_is_missing_is_an_error[engine]",
    ),
    mutant(
        "engine: collecting ends early",
        "a tensor counts as changed too much at a quarter of its elements",
        DELTA_C,
        (
            "    made->max_count = (num_elements * (uint64_t)item_bytes + each - 1) / each;",
            "    made->max_count = num_elements / 4 + each;",
        ),
        tests=DELTAS + "test_a_tensor_is_whole_if_it_is_not_longer[engine-positions1-101-True]",
    ),
    mutant(
        "engine: as long as the tensor is short enough",
        "a tensor is not whole where codes and values are as long as it",
        DELTA_C,
        ("(changed << delta->shift) >= whole", "(changed << delta->shift) > whole"),
        tests=DELTAS + "test_a_tensor_is_whole_if_it_is_not_longer[engine-positions2-601-False]",
    ),
    mutant(
        "engine: codes may lead past the end",
        "positions behind the end of the tensor are no error",
        DELTA_C,
        ("        if (end > num_elements) return false;\n", ""),
        tests=DELTAS + "test_malformed_codes_are_refused_before_the_first_write[engine-0-past the end by one]",
    ),
    mutant(
        "engine: the number of codes is not compared",
        "fewer or more changes than values are no error",
        DELTA_C,
        ("    if (count != one->count) return false;\n", ""),
        tests=DELTAS + "test_malformed_codes_are_refused_before_the_first_write[engine-0-more than said]",
    ),
    mutant(
        "engine: the last code may go on",
        "codes that end within a gap are no error",
        DELTA_C,
        (
            "    return code_at(codes, one->num_codes - 1, code_bytes) != (code_bytes == 1 ? M1 : M2);",
            "    return true;",
        ),
        tests=DELTAS + "test_malformed_codes_are_refused_before_the_first_write[engine-0-nothing but going on]",
    ),
    mutant(
        "engine: half of the last code is looked at",
        "a last code whose first byte is 255 counts as one that goes on",
        DELTA_C,
        (
            "return code_at(codes, one->num_codes - 1, code_bytes) != (code_bytes == 1 ? M1 : M2);",
            "return codes[(one->num_codes - 1) * (uint64_t)code_bytes] != M1;",
        ),
        tests=DELTAS
        + "test_malformed_codes_are_refused_before_the_first_write"
        + "[engine-0-two bytes, a code of which one byte is the largest]",
    ),
    mutant(
        "engine: only the first delta is checked",
        "of a chain the codes of the later deltas are not checked",
        DELTA_C,
        (
            "    for (size_t k = 0; k < num_changes; ++k) {\n        const stio_changes *const one = &changes[k];\n        if",
            "    for (size_t k = 0; k < 1; ++k) {\n        const stio_changes *const one = &changes[k];\n        if",
        ),
        tests=DELTAS + "test_malformed_codes_are_refused_before_the_first_write[engine-1-past the end by one]",
    ),
    mutant(
        "engine: the newest delta first",
        "the deltas of a chain are applied in the wrong order",
        DELTA_C,
        ("apply_window(&cursors[k], ", "apply_window(&cursors[num_changes - 1 - k], "),
        tests=DELTAS + "test_a_chain_is_applied_in_its_order[engine-2-1]",
    ),
    mutant(
        "engine: values stay behind skipped codes",
        "where blocks of codes are passed over their values are not",
        DELTA_C,
        ("            at->value += changes << shift;\n", ""),
        tests=DELTAS + "test_pieces_get_their_part[engine-2-1]",
    ),
    mutant(
        "engine: pinned memory stays pinned",
        "memory that is released is unmapped and not unpinned",
        PINNED_C,
        ("        code = one->driver->unpin(one->memory + at);\n", "        code = 0;\n"),
        tests=PINNED_TESTS + "test_memory_is_pinned_and_released[9437184]",
    ),
    mutant(
        "engine: only the first piece is unpinned",
        "of memory that was pinned in pieces the others stay pinned",
        PINNED_C,
        ("at < one->pinned_bytes && code == 0; at +=", "at < 1 && code == 0; at +="),
        tests=PINNED_TESTS + "test_it_is_pinned_in_pieces",
        stage=SLOW,
    ),
    mutant(
        "engine: memory that stays pinned is unmapped",
        "memory that the driver does not unpin is given back to the system",
        PINNED_C,
        ("    if (code == 0) stio_pages_unmap(", "    stio_pages_unmap("),
        tests=PINNED_TESTS + "test_processes[unpin is refused]",
        stage=SLOW,
    ),
    mutant(
        "engine: what was pinned before a refusal stays",
        "where the driver refuses a piece the pieces before it are not released",
        PINNED_C,
        ("        release(made);\n        return NULL;\n", "        return NULL;\n"),
        tests=PINNED_TESTS + "test_a_refusal_of_the_driver_leaves_nothing[2]",
        stage=SLOW,
    ),
    mutant(
        "engine: a child unpins its parent's memory",
        "a forked child releases memory that its parent has pinned",
        PINNED_C,
        ("const bool is_own = one->generation == engine.generation;", "const bool is_own = true;"),
        tests=PINNED_TESTS + "test_processes[fork]",
    ),
    mutant(
        "engine: unpinned in another context",
        "a thread of the engine unpins memory in the context that is its current one",
        PINNED_C,
        ("stio_make_current(one->driver, one->context, &ignored) && release(one)", "release(one)"),
        tests=PINNED_TESTS + "test_each_device_pins_and_unpins_in_its_context",
    ),
    mutant(
        "engine: one thread touches all",
        "threads of the engine do not help to touch memory",
        PINNED_C,
        ("        if (touch_part(one)) return true;\n", "        (void)one;\n"),
        tests=PINNED_TESTS + "test_several_threads_touch_it",
        stage=SLOW,
    ),
    mutant(
        "engine: pinned while it is touched",
        "memory is pinned and used while other threads write to its pages",
        PINNED_C,
        ("    while (made->num_touching > 0) pthread_cond_wait(&engine.changed, &engine.lock);\n", ""),
        (
            "    stio_pages_touch(one->memory + begin, nbytes);\n",
            "    usleep(this_is_engine ? 20000 : 0);\n    stio_pages_touch(one->memory + begin, nbytes);\n",
        ),
        ("bool stio_pinned_work(void) {\n", "bool stio_pinned_work(void) {\n    this_is_engine = true;\n"),
        ("struct stio_pinned {\n", "static _Thread_local bool this_is_engine;\nstruct stio_pinned {\n"),
        tests=PINNED_TESTS + "test_memory_is_the_callers_when_it_is_pinned",
        stage=SLOW,
    ),
    mutant(
        "engine: all threads unpin",
        "all threads of the engine unpin memory at once, and loads stand still",
        PINNED_C,
        ("    if (one == NULL || engine.is_unpinning) return false;\n", "    if (one == NULL) return false;\n"),
        tests=PINNED_TESTS + "test_a_release_waits_for_nothing_and_loads_go_on",
    ),
    mutant(
        "engine: a trim is not waited for",
        "a trim returns before the memory is given back",
        RING,
        (
            "        while (((ring->is_trimmed && ring->num_users == 0) || ring->is_releasing) && engine.num_threads > 0)\n            pthread_cond_wait(&engine.changed, &engine.lock);\n",
            "",
        ),
        tests=ENGINE + "test_a_ring_is_trimmed_and_released",
    ),
    mutant(
        "engine: wrong place on the device",
        "the second chunk of a range is copied to the place of the first",
        RING,
        ("range->target + (uint64_t)(low - range->offset);", "range->target;"),
        tests=ENGINE + "test_bytes_arrive_and_no_others[file to device]",
        stage=SLOW,
    ),
    mutant(
        "engine: wrong place in memory",
        "the second chunk of a range is moved to the place of the first",
        ENGINE_C,
        (
            "(range->target + (uint64_t)(one->begin - range->offset));\n    if (range->fd < 0) {",
            "(range->target);\n    if (range->fd < 0) {",
        ),
        tests=ENGINE + "test_bytes_arrive_and_no_others[file to host]",
        stage=SLOW,
    ),
    mutant(
        "engine: gaps go into tensors",
        "the bytes between two ranges are read into the memory of the second",
        ENGINE_C,
        ("        if (low > at) buffers[num_buffers++] = (struct iovec){discarded, (size_t)(low - at)};\n", ""),
        tests=ENGINE + "test_ranges_of_a_group_share_reads_and_gaps_go_nowhere[100-file to host]",
    ),
    mutant(
        "engine: direct reads are not aligned",
        "a chunk for a device begins where its bytes begin, so that none is read past the page cache",
        ENGINE_C,
        ("        if (range->direct_fd >= 0) base = one->begin / PAGE * PAGE;\n        ok =", "        ok ="),
        tests=ENGINE + "test_direct_reads_go_past_the_page_cache[5000-direct to device]",
    ),
    mutant(
        "engine: direct reads go on behind the memory",
        "a direct read into memory of the caller fills its last page",
        ENGINE_C,
        (
            "whole = nbytes / (size_t)PAGE * (size_t)PAGE;",
            "whole = (nbytes + (size_t)PAGE - 1) / (size_t)PAGE * (size_t)PAGE;",
        ),
        tests=ENGINE + "test_bytes_arrive_and_no_others[direct to host]",
        stage=SLOW,
    ),
    mutant(
        "engine: a truncated read is taken as whole",
        "a read at the end of the file is no failure",
        ENGINE_C,
        (
            "        if (count <= 0) {\n            set_failure(failure, count < 0",
            "        if (count == 0) break;\n        if (count < 0) {\n            set_failure(failure, count < 0",
        ),
        tests=ENGINE + "test_a_truncated_file_fails[file to host]",
    ),
    mutant(
        "engine: a short read begins again",
        "behind a short read the same bytes are read again, into the rest of the memory",
        ENGINE_C,
        ("        offset += count;\n        left -=", "        left -="),
        tests="tests/native/test_faults.py::test_each_fault_at_each_call[direct-short]",
        stage=SLOW,
    ),
    mutant(
        "engine: no limit of writes",
        "writes do not count against the most chunks of a transfer",
        ENGINE_C,
        ("{ return range->ring != NULL || (range->flags & STIO_WRITE) != 0; }", "{ return range->ring != NULL; }"),
        tests="tests/native/test_faults.py::test_so_many_writes_are_under_way_and_copies_pass_them[1]",
    ),
    mutant(
        "engine: copies wait behind writes",
        "beyond the most writes a transfer moves nothing",
        ENGINE_C,
        ("    while (at < transfer->last && (next_range(transfer->order[at])->flags & STIO_WRITE)) ++at;\n", ""),
        tests="tests/native/test_faults.py::test_so_many_writes_are_under_way_and_copies_pass_them[1]",
    ),
    mutant(
        "engine: a write that was passed over is lost",
        "the group before the one that was cut leaves the order",
        ENGINE_C,
        (
            "        memmove(first + 1, first, (place - transfer->first) * sizeof *first); /* writes that were passed over */\n",
            "        (void)first;\n",
        ),
        tests="tests/native/test_faults.py::test_so_many_writes_are_under_way_and_copies_pass_them[1]",
    ),
    mutant(
        "engine: a refused direct write is an error",
        "a filesystem without writes past the page cache cannot be saved to",
        ENGINE_C,
        ("        if (count < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {", "        if (false) {"),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[refused-direct]",
        stage=SLOW,
    ),
    mutant(
        "engine: a failed direct write is made through the page cache",
        "the page cache takes what the disk has refused",
        ENGINE_C,
        ("        if (count < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {", "        if (count < 0) {"),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[broken-direct]",
    ),
    mutant(
        "engine: a torn direct write goes on past the page cache",
        "behind a part of a page the next write is not aligned",
        ENGINE_C,
        ("    while (done < nbytes && done % (size_t)PAGE == 0 && !__atomic", "    while (done < nbytes && !__atomic"),
        (
            "            done += (size_t)count;\n        }\n    }\n    return done;",
            "            done = nbytes;\n        }\n    }\n    return done;",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[torn-direct]",
        stage=SLOW,
    ),
    mutant(
        "engine: a short write is whole",
        "what a short write left is not written",
        ENGINE_C,
        (
            "        memory += count;\n        offset += count;\n        nbytes -= (size_t)count;\n",
            "        nbytes = 0;\n        (void)offset;\n",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[short-buffered]",
        stage=SLOW,
    ),
    mutant(
        "engine: the rest of a short write begins again",
        "behind a short write the same bytes are written again",
        ENGINE_C,
        (
            "        memory += count;\n        offset += count;\n        nbytes",
            "        offset += count;\n        nbytes",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[short-buffered]",
        stage=SLOW,
    ),
    mutant(
        "engine: a signal ends a write",
        "a write that a signal interrupts has failed",
        ENGINE_C,
        (
            "        const ssize_t count = pwrite(fd, memory, nbytes, offset);\n        if (count < 0 && errno == EINTR) continue;\n",
            "        const ssize_t count = pwrite(fd, memory, nbytes, offset);\n",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[interrupted-buffered]",
    ),
    mutant(
        "engine: a signal ends a direct write",
        "a direct write that a signal interrupts has failed",
        ENGINE_C,
        (
            "offset + (int64_t)done);\n        if (count < 0 && errno == EINTR) continue;\n        if (count < 0 && (errno == EINVAL",
            "offset + (int64_t)done);\n        if (count < 0 && (errno == EINVAL",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_write[interrupted-direct]",
        stage=SLOW,
    ),
    mutant(
        "engine: the bytes before the first page are not written",
        "a write at any offset begins at a page",
        ENGINE_C,
        ("        if (!write_all(range->fd, memory, head, one->begin, failure)) return false;\n", ""),
        tests=ENGINE + "test_bytes_are_written_and_no_others[0-True]",
        stage=SLOW,
    ),
    mutant(
        "engine: a chunk of a write is written at the begin of its range",
        "only the first chunk of a write is at its place",
        ENGINE_C,
        (
            "    const char *const memory = (const char *)(uintptr_t)range->source + (one->begin - range->offset);\n    const size_t nbytes",
            "    const char *const memory = (const char *)(uintptr_t)range->source;\n    const size_t nbytes",
        ),
        tests=ENGINE + "test_bytes_are_written_and_no_others[0-False]",
    ),
    mutant(
        "engine: the copies of a chunk begin at the first one",
        "each copy of a chunk takes the bytes of the first range",
        ENGINE_C,
        (
            "        const char *const source = (const char *)(uintptr_t)part->source + at;\n        memcpy",
            "        const char *const source = (const char *)(uintptr_t)one->ranges->source + at;\n        memcpy",
        ),
        tests=ENGINE + "test_copies_of_a_group_share_chunks[100]",
    ),
    mutant(
        "engine: a signal is an error",
        "a read that a signal interrupts has failed",
        ENGINE_C,
        (
            "        if (count < 0 && errno == EINTR) continue;\n        if (count <= 0) {\n            set_failure(failure, count",
            "        if (count <= 0) {\n            set_failure(failure, count",
        ),
        tests="tests/native/test_faults.py::test_each_fault_at_each_call[direct-interrupted]",
    ),
    mutant(
        "engine: a failure is lost",
        "a transfer whose chunk has failed is stopped, and says nothing",
        ENGINE_C,
        (
            "        transfer->has_failed = true;\n    }\n    if (failure->kind != 0)",
            "    }\n    if (failure->kind != 0)",
        ),
        tests=ENGINE + "test_an_errno_is_reported[False-EISDIR]",
    ),
    mutant(
        "engine: a wake-up is lost",
        "a wake-up is forgotten when nobody waits",
        ENGINE_C,
        (
            "    pthread_mutex_lock(&engine.lock);\n    transfer->is_woken = true;\n",
            "    pthread_mutex_lock(&engine.lock);\n",
        ),
        tests=ENGINE + "test_a_wake_up_is_not_lost",
    ),
    mutant(
        "engine: a group that is complete wakes nobody",
        "who waits for a group is not woken",
        ENGINE_C,
        ("stio_now()};\n            wakes = true;\n", "stio_now()};\n"),
        tests=ENGINE + "test_a_group_that_comes_wakes_the_consumer",
    ),
    mutant(
        "engine: work wakes no thread",
        "threads without work are not woken by ranges",
        ENGINE_C,
        (
            "    start_spare();\n    pthread_cond_broadcast(&engine.work);\n",
            "    start_spare();\n",
        ),
        tests=ENGINE + "test_a_group_that_comes_wakes_the_consumer",
    ),
    mutant(
        "engine: arrange drops a group",
        "the last group that was not named is lost",
        ENGINE_C,
        (
            "        if (!one->is_marked) order[count++] = one;\n",
            "        if (!one->is_marked && k + 1 < num_left) order[count++] = one;\n",
        ),
        (
            "    if (order != NULL) memcpy(transfer->order + transfer->first, order, num_left * sizeof *order);\n",
            "    if (order != NULL) memcpy(transfer->order + transfer->first, order, count * sizeof *order);\n    transfer->last = transfer->first + count;\n",
        ),
        tests=ARRANGED,
    ),
    mutant(
        "engine: arrange does nothing",
        "the groups stay in their order",
        ENGINE_C,
        ("    if (order != NULL) memcpy(transfer->order + transfer->first, order, num_left * sizeof *order);\n", ""),
        tests=ARRANGED,
    ),
    mutant(
        "engine: no limit of chunks",
        "a transfer has more chunks under way than it may",
        ENGINE_C,
        ("    if (transfer->max_chunks == 0 ||", "    if (true || transfer->max_chunks == 0 ||"),
        tests=ENGINE + "test_no_more_chunks_than_allowed_are_under_way",
    ),
    mutant(
        "engine: no thread is left beside a disk",
        "threads that wait for a disk stop all other transfers",
        ENGINE_C,
        ("    if (next_transfer(false) != NULL) start_threads(", "    if (false) start_threads("),
        tests="tests/native/test_faults.py::test_a_disk_that_stands_still_stops_no_other_transfer",
        stage=SLOW,
    ),
    mutant(
        "engine: one transfer has all threads",
        "a transfer moves chunks of files by more threads than the limit",
        ENGINE_C,
        (
            "    if (engine.num_in_files < engine.limit || transfer->under_way == 0) return true;\n",
            "    return true;\n",
        ),
        tests="tests/native/test_faults.py::test_a_disk_that_stands_still_stops_no_other_transfer",
        stage=SLOW,
    ),
    mutant(
        "engine: time without work is made up for",
        "a transfer that had no work stops all others until it has moved as much",
        ENGINE_C,
        ("    if (transfer->first == transfer->last) transfer->turn = turn_beside_others(transfer);", ""),
        tests=ENGINE + "test_a_transfer_that_had_no_work_does_not_stop_others",
    ),
    mutant(
        "engine: ranges that are moved in other ways share a chunk",
        "a range that is to be read is populated with the one before it",
        ENGINE_C,
        ("    while (is_shared && made.end", "    while (range->fd >= 0 && made.end"),
        ("        if (next->direct_fd != range->direct_fd || next->flags != range->flags) break;", ""),
        tests=ENGINE + "test_a_mapping_is_populated[1]",
    ),
    mutant(
        "engine: a mapping is not populated",
        "the pages of a mapping are left to page faults",
        ENGINE_C,
        (
            "    do code = madvise((void *)start, nbytes, MADV_POPULATE_READ) == 0 ? 0 : errno;\n",
            "    (void)start;\n    (void)nbytes;\n    do code = 0;\n",
        ),
        tests=ENGINE + "test_a_mapping_is_populated[1]",
    ),
    mutant(
        "engine: a forked child waits",
        "take in a forked child waits for its parent's transfer",
        ENGINE_C,
        ("    if (!is_own(transfer) && !transfer->has_failed) {", "    if (false) {"),
        tests=ENGINE + "test_a_forked_child_uses_the_engine_anew",
        stage=SLOW,
    ),
    mutant(
        "engine: a forked child waits at the end",
        "the end of a parent's transfer waits in a forked child",
        ENGINE_C,
        (
            "    while (until_idle && is_own(transfer) && transfer->under_way > 0)",
            "    while (transfer->under_way > 0)",
        ),
        tests=ENGINE + "test_a_forked_child_uses_the_engine_anew",
        stage=SLOW,
    ),
    mutant(
        "engine: threads take signals",
        "signals are delivered to the engine's threads",
        ENGINE_C,
        ("    pthread_sigmask(SIG_SETMASK, &all, &before);", "    pthread_sigmask(SIG_BLOCK, NULL, &before);"),
        tests=ENGINE + "test_signals_are_for_the_programs_threads",
    ),
    mutant(
        "engine: a thread turns without work",
        "a thread that waits until a ring is to be given back does not sleep",
        ENGINE_C,
        (
            "        wait_until(&engine.work, due == 0 ? NULL : &until);\n",
            "        wait_until(&engine.work, &until);\n",
        ),
        tests=ENGINE + "test_a_ring_without_users_is_given_back_in_time",
    ),
    # Pools of models.
    mutant(
        "pool: closed models get users",
        "a model that is to be evicted for others gets further users",
        POLICY,
        (" and model not in closed and not model.wants_update:", " and not model.wants_update:"),
        tests=POLICY_TESTS + "test_nobody_starves_beside_a_model_that_is_always_in_use",
    ),
    mutant(
        "pool: no caller is due",
        "the time for which a caller has waited does not count",
        POLICY,
        (
            "            is_due = now - min(call.called for call in model.calls) >= self._hold_seconds",
            "            is_due = False",
        ),
        tests=POLICY_TESTS + "test_nobody_starves_beside_a_model_that_is_always_in_use",
    ),
    mutant(
        "pool: every caller is due",
        "a model is evicted for the first caller of another one at once",
        POLICY,
        (
            "            is_due = now - min(call.called for call in model.calls) >= self._hold_seconds",
            "            is_due = True",
        ),
        tests=POLICY_TESTS + "test_alternating_callers_share_swaps",
    ),
    mutant(
        "pool: models in use are evicted",
        "a model that has users is evicted",
        POLICY,
        ("if not one.num_users and (is_due or not one.calls)]", "if is_due or not one.calls]"),
        tests=POLICY_TESTS + "test_random_histories[0]",
        stage=SLOW,
    ),
    mutant(
        "pool: evictions do not wait",
        "memory is freed while work that uses it is queued on the device",
        POOL,
        (
            "            _wait_for(entry.events)\n            return left or entry.content.drop()\n",
            "            return left or entry.content.drop()\n",
        ),
        tests=POOL_ON_DEVICE + "test_memory_is_reused_behind_the_work_that_a_block_has_queued",
    ),
    mutant(
        "pool: updates do not wait for their copies",
        "an update ends while its copies are queued on the device",
        "stio/serving/pool/content.py",
        ("closing(opened), _own_stream(resolve_device(self.options.device)):\n", "closing(opened):\n"),
        tests=POOL_ON_DEVICE + "test_an_update_in_place_keeps_addresses_and_bits",
        delay=0.002,
    ),
    mutant(
        "pool: what is left of an eviction does not count",
        "memory of evicted models that is still referenced counts as free",
        POOL,
        (
            "            self.policy.leftover_bytes = sum(one.nbytes for one in self._leftovers)\n",
            "            self.policy.leftover_bytes = 0\n",
        ),
        tests="tests/serving/pool/test_pool.py::test_a_tensor_that_is_kept_is_named_and_counts",
    ),
    mutant(
        "pool: a caller that leaves is decided before its error is there",
        "a caller that leaves while it gets an error is counted as a user that leaves",
        POOL,
        (
            "        self._value, self._error = value, error  # before the decision: a caller that loses it looks at them\n",
            "",
        ),
        (
            "        self._notifier.notify()\n        return True\n",
            "        self._value, self._error = value, error\n        self._notifier.notify()\n        return True\n",
        ),
        tests="tests/serving/pool/test_pool.py::test_a_caller_that_leaves_while_it_gets_an_error_gives_back_nothing",
    ),
)


class Broken(Exception):
    """The proof itself does not work; the message says why."""


# The copy.


def copied(folder: Path, parent: Path = REPOSITORY) -> Path:
    """Copy what the tests need to a new folder; what is compiled stays where it is."""
    folder.mkdir()
    for name in COPIED:
        source = parent / name
        if source.is_dir():
            shutil.copytree(source, folder / name)  # with what Python has compiled: it looks at the times of change
        else:
            shutil.copy(source, folder / name)
    (REPOSITORY / "build").mkdir(exist_ok=True)
    (folder / "build").symlink_to(REPOSITORY / "build", target_is_directory=True)
    (folder / "mutant_plugin.py").write_text(PLUGIN)
    return folder


def apply(one: Mutant, folder: Path) -> None:
    """Break the copy.

    Raises:
        Broken: The code is no longer what the mutant was written for.
    """
    path = folder / one.file
    text = path.read_text()
    for old, new in one.changes:
        if text.count(old) != 1:
            raise Broken(
                f"{one.name!r} does not apply: the code has changed, write the mutant anew "
                f"({text.count(old)} times in {one.file}: {old!r})"
            )
        text = text.replace(old, new)
    if path.suffix == ".py":
        compile(text, one.file, "exec")
    path.write_text(text)
    if path.suffix == ".c":
        command = [sys.executable, str(folder / "hatch_build.py")]
        if said := subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip():
            raise Broken(f"{one.name!r} does not compile: {said}")
    for old_code in path.parent.glob(f"__pycache__/{path.stem}.*"):
        old_code.unlink()


PLUGIN = '''"""Requires that what is tested is the copy, in child processes too, and on the simulated device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_finish(session):
    import stio

    if "STIO_TEST_DEVICE" not in os.environ:  # the engine's tests have a device of their own
        if HERE not in Path(stio.__file__).parents:
            pytest.exit(f"tested is {stio.__file__}, not the copy", returncode=90)
        return
    import simdevice

    if HERE not in Path(stio.__file__).parents or HERE not in Path(simdevice.__file__).parents:
        pytest.exit(f"tested is {stio.__file__}, not the copy", returncode=90)
    if not simdevice.installed():
        pytest.exit(simdevice.why_unavailable(), returncode=91)


@pytest.fixture(scope="session", autouse=True)
def _children_import_the_copy(request):
    if any("context" in item.name for item in request.session.items):  # those whose tests start processes
        from support import run_python

        found = run_python("import stio; print(stio.__file__)").stdout.strip()
        if HERE not in Path(found).parents:
            pytest.exit(f"child processes test {found}, not the copy", returncode=90)
'''


# Runs.


@dataclass(slots=True)
class Run:
    """What became of one run of the tests."""

    caught: bool
    by: str
    """The test that failed, or how else the run ended."""
    seconds: float


_going: set[subprocess.Popen[str]] = set()
_guard = threading.Lock()
_stopping = threading.Event()


def is_native(test: str) -> bool:
    """Return whether it is a test of the engine alone, which needs no torch."""
    return test.startswith("tests/native/")


def run_tests(folder: Path, tests: Sequence[str], delay: float, *, seconds: float = RUN_SECONDS) -> Run:
    """Run tests in a copy.

    Raises:
        Broken: pytest did not come to run them, or skipped one.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "mutant_plugin", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(folder), str(folder / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    environment.pop("STIO_TEST_DEVICE", None)
    if not all(map(is_native, tests)):
        environment |= {"STIO_TEST_DEVICE": "sim", "STIO_TEST_DEVICE_DELAY": str(delay)}
    if _stopping.is_set():
        raise Broken("stopped")
    start = perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with _guard:
        _going.add(process)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        return Run(
            True, f"no end after {seconds:.0f} s: {_last_test(process.communicate()[0])}", perf_counter() - start
        )
    finally:
        with _guard:
            _going.discard(process)
    took = perf_counter() - start
    if process.returncode < 0:
        return Run(True, f"killed by {signal.Signals(-process.returncode).name}: {_last_test(output)}", took)
    if process.returncode == 1 and "+ Timeout +" in output:
        return Run(True, f"no end, says pytest-timeout: {_last_test(output)}", took)
    if process.returncode not in (0, 1):
        raise Broken(f"pytest ended with status {process.returncode}:\n{output[-3000:]}")
    if "SKIPPED" in output or "skipped" in output.splitlines()[-1]:
        raise Broken(f"tests were skipped, so nothing is proved:\n{output[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::[^\]\n]*?(?:\]|(?= - )|$))", output, re.MULTILINE)
    if process.returncode == 1 and not failed:
        raise Broken(f"pytest failed, but no test did:\n{output[-3000:]}")
    return Run(process.returncode == 1, _short(failed[0]) if failed else "", took)


def stop(process: subprocess.Popen[str]) -> None:
    """End a run and the processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _last_test(output: str) -> str:
    """Return the test whose frames a crash or a timeout shows."""
    found = re.findall(r'File "[^"]*/(tests/[^"]*)", line \d+ in (test_\w+)', output)
    return _short("::".join(found[-1])) if found else "a test"


def _short(name: str) -> str:
    return name.strip().removeprefix("tests/")


@dataclass(slots=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    runs: list[Run] = field(default_factory=list)

    @property
    def caught(self) -> bool:
        return all(run.caught for run in self.runs)

    def __str__(self) -> str:
        by = " / ".join(dict.fromkeys(run.by if run.caught else "NOT CAUGHT" for run in self.runs))
        count = f"{sum(run.caught for run in self.runs)} of {len(self.runs)}"
        seconds = " ".join(f"{run.seconds:.0f}" for run in self.runs)
        return f"{self.mutant.name} | {self.mutant.broken} | {by} | {count} | {seconds} s"


def require_baseline(folder: Path, mutants: Sequence[Mutant], jobs: int) -> None:
    """Require that the unmutated code passes all tests that are used, or nothing is proved.

    Raises:
        Broken: It does not.
    """
    together: dict[tuple[float, bool], dict[str, None]] = {}
    for one in mutants:
        together.setdefault((one.delay, is_native(one.tests[0])), {}).update(dict.fromkeys(one.tests))
    shares = [
        (delay, list(tests)[k::jobs])
        for (delay, _), tests in together.items()
        for k in range(jobs)
        if list(tests)[k::jobs]
    ]
    with ThreadPoolExecutor(jobs) as pool:
        for run in pool.map(lambda share: run_tests(folder, share[1], share[0], seconds=600), shares):
            if run.caught:
                raise Broken(f"the unmutated code fails {run.by}: nothing is proved")


def judged(one: Mutant, baseline: Path, folder: Path, times: int) -> Verdict:
    """Break a copy of the baseline, and run its tests so many times."""
    copied(folder, baseline)
    apply(one, folder)
    verdict = Verdict(one, [run_tests(folder, one.tests, one.delay) for _ in range(times)])
    shutil.rmtree(folder, ignore_errors=True)
    return verdict


def chosen(names: Sequence[str] | None) -> list[Mutant]:
    """Return the mutants of these names, or whose names contain them; all by default.

    Raises:
        Broken: There is none of that name.
    """
    if not names:
        return list(MUTANTS)
    exact = {one.name for one in MUTANTS}
    found = [
        one for one in MUTANTS if any(name == one.name or (name not in exact and name in one.name) for name in names)
    ]
    missing = [name for name in names if not any(name in one.name for one in found)]
    if missing:
        raise Broken(f"there is no mutant called {missing[0]!r}; see --list")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of mutants, or parts of them")
    parser.add_argument("--times", type=int, default=3, metavar="N", help="runs of each mutant (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs beside each other (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the mutants and their tests, and run nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended on the way out
    try:
        return carry_out(arguments)
    except Broken as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def carry_out(arguments: argparse.Namespace) -> int:
    mutants = chosen(arguments.only)
    if len({one.name for one in MUTANTS}) < len(MUTANTS):
        raise Broken("two mutants have one name")
    if arguments.list:
        for one in mutants:
            print(f"{one.name} | {one.broken} | {one.file} | {' '.join(map(_short, one.tests))} | delay {one.delay} s")
        return 0
    if arguments.times < 1 or arguments.jobs < 1:
        raise Broken("--times and --jobs take positive numbers")
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        room = Path(name)
        start = perf_counter()
        baseline = copied(room / "baseline")  # of which all others are copies: the checkout may change meanwhile
        trial = copied(room / "trial", baseline)
        for one in mutants:  # before anything runs: whether each of them applies
            before = (trial / one.file).read_text()
            apply(one, trial)
            (trial / one.file).write_text(before)
        require_baseline(baseline, mutants, arguments.jobs)
        print(f"unmutated: all selections pass ({perf_counter() - start:.0f} s)", flush=True)
        print("mutant | what is broken | the test that caught it | runs caught | seconds", flush=True)
        verdicts: list[Verdict] = []
        pool = ThreadPoolExecutor(arguments.jobs)
        try:
            runs = [
                pool.submit(judged, one, baseline, room / f"mutant-{k}", arguments.times)
                for k, one in enumerate(mutants)
            ]
            for future in as_completed(runs):
                verdicts.append(future.result())
                print(verdicts[-1], flush=True)
        finally:
            _stopping.set()
            with _guard:
                for process in _going:
                    stop(process)
            pool.shutdown(cancel_futures=True)
    missed = [verdict.mutant.name for verdict in verdicts if not verdict.caught]
    print(
        f"{len(verdicts) - len(missed)} of {len(verdicts)} mutants caught in each of {arguments.times} runs, "
        f"{perf_counter() - start:.0f} s"
    )
    for missed_name in missed:
        print(f"NOT CAUGHT: {missed_name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
