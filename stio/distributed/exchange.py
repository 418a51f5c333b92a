"""The exchange of a save to a store: each file has one owner, which uploads it, and the others send it their bytes.

A store takes an object from its begin to its end, from one process. So the bytes of a file come together at its owner,
window by window. Each rank packs its bytes of a window, and where they go, into one message. The owner puts the
messages of a window in their places, and uploads it. Several windows are under way: some are packed, one of each owner
is sent, some wait for the upload. Their number is bounded on each rank.

The messages are sent in steps (`steps.py`). In a step the ranks exchange
which messages are packed, and which owners have room for a window. Each of these then gets its next window, if all
ranks have packed it. All ranks pack in the same order, so the first window that is not sent is packed everywhere in the
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from stio.distributed.ranks import Ranks
from stio.distributed.steps import SteppedTransfer
from stio.errors import MismatchError, RankError
from stio.format.manifest import Hasher
from stio.runtime import memory
from stio.runtime.calls import LOOK_SECONDS
from stio.runtime.locks import Condition
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled, Operation, is_interrupted
from stio.runtime.trace import Trace
from stio.saving.plan_parts import Packet, Window
from stio.storage.base import FileWriter

_Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

WINDOW_BYTES = 8 << 20
"""Largest window: a part of an upload. At 1 Gbit/s it takes 70 ms to another host."""

NUM_WINDOWS = 6
"""Most windows in the memory of one rank: `_NUM_PACKED`, `_NUM_IMAGES`, and the messages that are received."""

_NUM_PACKED = 2
"""Windows whose bytes are packed, until they are sent."""

_NUM_IMAGES = 3
"""Windows that an owner has: one is uploaded, one waits for that, one is received."""

_ITEM_BYTES = 8
"""A message consists of numbers of this size, then bytes. The numbers: how many runs, and `_RUN_NUMBERS` of each."""

_RUN_NUMBERS = 5

TABLE_PART = 8
"""The tables of a window have at most one n-th of its size on all ranks together, unless it is a smallest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """What is sent in which order; the same on all ranks, but for the packets."""

    path: str
    """The destination, for messages."""
    owners: Sequence[int]
    """The rank that uploads each file."""
    headers: Sequence[bytes]
    """The header of each file, which its owner adds."""
    windows: Sequence[Window]
    """See `cut_windows`."""
    window_bytes: int
    """Size of the largest window."""
    packets: Sequence[Packet]
    """What this rank has of the windows."""


def table_bytes(packet: Packet) -> int:
    """Return the size of the numbers with which a message begins."""
    return _ITEM_BYTES * (1 + _RUN_NUMBERS * len(packet.runs))


class Exchange(SteppedTransfer):
    """The exchange on one rank. All ranks start one, and `wait` or `close` it.

    Args:
        plan: What is sent.
        ranks: The ranks.
        uploads: The writers of all files; this rank uses those that it owns.
        save: The operation of the save; its cancel ends the exchange.
        new_hasher: Makes a hasher for each file; None: no digests.
        trace: Records spans.
    """

    def __init__(
        self,
        plan: SendPlan,
        ranks: Ranks,
        uploads: Sequence[FileWriter],
        *,
        save: Operation[Any],
        new_hasher: Callable[[], Hasher] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(ranks, "save")
        self._plan, self._trace = plan, trace
        self._changed = Condition()
        self.stream = _MessagePacker(plan, self._changed)
        """Takes the bytes of this rank; see `stio.saving.plan.plan_stream`."""
        own = {file: uploads[file] for file, owner in enumerate(plan.owners) if owner == ranks.rank}
        hashers = {} if new_hasher is None else {file: new_hasher() for file in own}
        patience = save.exit_patience
        self._uploads = _OwnUploads(plan, own, hashers, self._changed, trace, exit_patience=patience)
        self._left: dict[int, deque[int]] = {owner: deque() for owner in sorted(set(plan.owners))}
        for number, window in enumerate(plan.windows):
            self._left[plan.owners[window.file]].append(number)
        self._operation = Operation(self._run, name="send", about=plan.path, exit_patience=patience)
        save.on_cancel(self._operation.cancel)

    def start(self) -> None:
        """Begin; returns at once.

        Raises:
            StorageError: The system starts no more threads.
        """
        self._operation.start()

    def wait(self) -> None:
        """Wait until the bytes of this rank are sent, and its files are uploaded.

        Raises:
            Cancelled: The exchange was cancelled.
            RankError: A rank has failed.
            StioError: See `Upload`.
        """
        self._operation.join()
        if self._operation.cancelled and self._operation.failure is None:
            raise Cancelled
        self._operation.outcome()

    def close(self) -> None:
        """End it on all ranks, and wait until no thread of it is left on this one."""
        self._operation.close()

    def digests(self) -> dict[int, str]:
        """Return the digest of each file that this rank has uploaded, by its number."""
        return self._uploads.digests()

    # On the thread of the exchange.

    def _run(self, operation: Operation[None]) -> None:
        uploading = self._uploads.operation
        operation.on_cancel(uploading.cancel)
        operation.on_cancel(self._ranks.wake)
        try:
            uploading.start()
            self.run()
            uploading.join()
            operation.check()
            uploading.outcome()
        except BaseException as error:
            self.stream.end(error)
            raise
        finally:
            uploading.close()

    def _failure(self) -> BaseException | None:
        return self._uploads.operation.failure

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def _is_complete(self) -> bool:
        return not any(self._left.values())

    def _numbers(self) -> list[int]:
        """Return for each owner whether it has room, and the size of each rank's message for it; -1: not packed yet."""
        rank, numbers = self._ranks.rank, []
        for owner, left in self._left.items():
            sizes = [0] * self._ranks.num_ranks
            sizes[rank] = self.stream.message_bytes(left[0]) if left else 0
            numbers += [int(owner == rank and self._uploads.has_room), *sizes]
        return numbers

    def _step(self, sums: Sequence[int]) -> bool:
        """Send the next window of each owner that has room for it; return whether there was one."""
        rank, length = self._ranks.rank, 1 + self._ranks.num_ranks
        sizes_of = {owner: sums[k * length + 1 : (k + 1) * length] for k, owner in enumerate(self._left)}
        chosen = [
            owner
            for k, (owner, left) in enumerate(self._left.items())
            if left and sums[k * length] and min(sizes_of[owner]) >= 0
        ]
        # First: if there is no memory, no operation may be under way.
        parts = self._receive_buffers(sizes_of[rank]) if rank in chosen else {}
        begin, num_bytes = perf_counter(), 0
        under_way: list[Any] = []
        taken_bytes = 0
        own: tuple[Window, list[_Bytes]] | None = None
        for owner in chosen:
            number = self._left[owner].popleft()
            message = self.stream.take(number) if sizes_of[owner][rank] else None
            taken_bytes += sizes_of[owner][rank]
            if owner == rank:
                under_way += [self._group.recv([torch.from_numpy(data)], other, 0) for other, data in parts.items()]
                own = self._plan.windows[number], [*parts.values(), *([] if message is None else [message])]
            elif message is not None:
                under_way.append(self._group.send([torch.from_numpy(message)], owner, 0))
                num_bytes += len(message)
        for one in under_way:
            one.wait()
        if self._trace is not None and under_way:
            self._trace.add("send", begin, perf_counter(), num_bytes=num_bytes)
        if own is not None and not self._must_stop():
            try:
                self._assemble(*own)
            except BaseException as error:
                self._error = error
        self.stream.release(taken_bytes)
        return bool(chosen)

    def _receive_buffers(self, sizes: Sequence[int]) -> dict[int, _Bytes]:
        """Return memory for the messages of other ranks, by rank.

        Raises:
            MemoryError: There is none. `run` then reports it, and leaves the group, which ends the steps of the others.
        """
        own = self._ranks.rank
        return {rank: np.empty(size, np.uint8) for rank, size in enumerate(sizes) if size and rank != own}

    def _assemble(self, window: Window, messages: Sequence[_Bytes]) -> None:
        """Put the bytes of a window in their places, for the upload."""
        image = self._uploads.take_image()
        header = self._plan.headers[window.file][window.begin : window.end]
        image[: len(header)] = np.frombuffer(header, np.uint8)
        nbytes = len(header) + sum(_unpack(message, image, window.begin) for message in messages)
        if nbytes != window.end - window.begin:
            raise MismatchError(
                "the parts of all ranks do not make up a file",
                path=self._plan.path,
                expected=f"{window.end - window.begin:,} bytes from {window.begin:,} on",
                found=f"{nbytes:,}",
            )
        self._uploads.put(window, image)


class _MessagePacker:
    """Packs the bytes of this rank into messages, as they come; an `OrderedWriter`.

    Args:
        plan: What is sent.
        changed: Guards it.
    """

    is_ordered: Literal[True] = True
    """See `OrderedWriter`."""

    def __init__(self, plan: SendPlan, changed: Condition) -> None:
        self.path = plan.path
        """The destination, for messages."""
        self._changed = changed
        self._most_bytes = _NUM_PACKED * plan.window_bytes
        self._packets = deque(plan.packets)
        self._unpacked = {packet.window for packet in plan.packets}
        self._packed: dict[int, _Bytes] = {}  # messages, by window
        self._held_bytes = 0
        self._at = 0  # bytes that were taken from the writers, which come in any order
        self._message: _Bytes = np.empty(0, np.uint8)  # of the first packet, from its first byte on
        self._error: BaseException | None = None

    def write_from(self, offset: int, region: Region) -> None:
        """Take a block; wait until those before it were taken, and while too many messages wait.

        Raises:
            Cancelled: The thread should end, or the exchange was cancelled.
            BaseException: The exchange has failed.
        """
        with self._changed:
            self._wait(lambda: self._at == offset)
        at, end = offset, offset + region.nbytes
        while self._packets and at < end:
            packet = self._packets[0]
            at = max(at, packet.begin)
            step = min(end, packet.begin + packet.nbytes) - at
            if step <= 0:
                break  # the gap before the next packet
            if at == packet.begin:
                self._message = self._new_message(packet)
            data_at = len(self._message) - packet.nbytes + at - packet.begin
            memory.move(self._message.ctypes.data + data_at, region.address + at - offset, step)
            at += step
            if at == packet.begin + packet.nbytes:
                with self._changed:
                    self._packets.popleft()
                    self._unpacked.discard(packet.window)
                    self._packed[packet.window] = self._message
                    self._message = np.empty(0, np.uint8)
                    self._changed.notify_all()
        with self._changed:
            self._at = end
            self._changed.notify_all()

    def finish(self) -> None:
        """Return at once; `Exchange.wait` waits for the uploads."""

    def end(self, error: BaseException) -> None:
        """Make writers raise an error of the exchange."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def message_bytes(self, window: int) -> int:
        """Return the size of the message of a window: 0 if there is none, -1 if it is not packed yet."""
        with self._changed:
            return -1 if window in self._unpacked else len(self._packed.get(window, ()))

    def take(self, window: int) -> _Bytes:
        """Take the message of a window; `release` must follow."""
        with self._changed:
            return self._packed.pop(window)

    def release(self, nbytes: int) -> None:
        """Count messages as freed."""
        with self._changed:
            self._held_bytes -= nbytes
            self._changed.notify_all()

    def _new_message(self, packet: Packet) -> _Bytes:
        nbytes = table_bytes(packet) + packet.nbytes
        with self._changed:
            self._wait(lambda: not self._held_bytes or self._held_bytes + nbytes <= self._most_bytes)
            self._held_bytes += nbytes
        message = np.empty(nbytes, np.uint8)
        numbers = message[: table_bytes(packet)].view(np.int64)
        numbers[0] = len(packet.runs)
        numbers[1:].reshape(-1, _RUN_NUMBERS)[...] = packet.runs
        return message

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, under the condition, until something holds."""
        while True:
            if self._error is not None:
                raise self._error
            if is_interrupted():
                raise Cancelled
            if ready():
                return
            self._changed.wait(LOOK_SECONDS)


def _unpack(message: _Bytes, image: _Bytes, begin: int) -> int:
    """Put the bytes of a message in their places in a window; return how many there are.

    Args:
        message: The message, of any content.
        image: The window.
        begin: Its first byte in the file.

    Raises:
        RankError: The message names bytes that it does not have, or places that are not in the window.
    """
    num_runs = int.from_bytes(message[:_ITEM_BYTES].tobytes(), "little")
    data_at = _ITEM_BYTES * (1 + _RUN_NUMBERS * num_runs)
    if not _ITEM_BYTES <= data_at <= len(message):
        raise RankError(f"a rank has sent a message of {len(message):,} bytes that has {num_runs:,} ranges")
    table = np.frombuffer(message[_ITEM_BYTES:data_at].tobytes(), np.int64).reshape(num_runs, _RUN_NUMBERS)
    data, found = message[data_at:], 0
    for offset, at, nbytes, num_ranges, stride in map(np.ndarray.tolist, table):
        first, length = offset - begin, nbytes * num_ranges
        last = first + stride * (num_ranges - 1) + nbytes
        is_run = num_ranges == 1 or (num_ranges > 1 and stride >= nbytes)
        if nbytes <= 0 or not is_run or first < 0 or last > len(image) or at < 0 or at + length > len(data):
            raise RankError(
                f"a rank has sent bytes {offset:,} to {begin + last:,} for the window that begins at {begin:,}, from "
                f"byte {at:,} on of {len(data):,}"
            )
        target = image[first:last]
        if num_ranges > 1:
            target = np.lib.stride_tricks.as_strided(target, (num_ranges, nbytes), (stride, 1))
        target[...] = data[at : at + length].reshape(target.shape)
        found += length
    return found


class _OwnUploads:
    """Uploads the files of this rank, window by window, on a thread.

    Args:
        plan: What is sent.
        writers: The writers of the files, by their numbers.
        hashers: A hasher for each of them, if there are to be digests.
        changed: Guards it.
        trace: See `Exchange`.
        exit_patience: Of the save.
    """

    def __init__(
        self,
        plan: SendPlan,
        writers: Mapping[int, FileWriter],
        hashers: Mapping[int, Hasher],
        changed: Condition,
        trace: Trace | None,
        *,
        exit_patience: float,
    ) -> None:
        self._writers, self._hashers = writers, hashers
        self._num_left = sum(window.file in writers for window in plan.windows)
        self._window_bytes, self._changed, self._trace = plan.window_bytes, changed, trace
        self._full: deque[tuple[Window, _Bytes]] = deque()
        self._free: list[_Bytes] = []
        self._num_used = 0
        self.operation: Operation[None] = Operation(
            self._run, name="upload", about=plan.path, exit_patience=exit_patience
        )
        """Its thread."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for another window."""
        return self._num_used < _NUM_IMAGES

    def take_image(self) -> _Bytes:
        """Take memory for a window."""
        with self._changed:
            self._num_used += 1
            return self._free.pop() if self._free else np.empty(self._window_bytes, np.uint8)

    def put(self, window: Window, image: _Bytes) -> None:
        """Give a window that is complete to the upload."""
        with self._changed:
            self._full.append((window, image))
            self._changed.notify_all()

    def digests(self) -> dict[int, str]:
        """Return the digest of each file, by its number."""
        return {file: hasher.hexdigest() for file, hasher in self._hashers.items()}

    def _run(self, operation: Operation[None]) -> None:
        operation.on_cancel(self._changed.wake)
        while self._num_left:
            with self._changed:
                self._changed.wait_for(lambda: self._full or operation.cancelled)
                operation.check()
                window, image = self._full.popleft()
            begin, nbytes = perf_counter(), window.end - window.begin
            region = Region(image.ctypes.data, nbytes, image)
            if window.file in self._hashers:
                self._hashers[window.file].update(region.view())
            self._writers[window.file].write_from(window.begin, region)
            if self._trace is not None:
                self._trace.add("upload", begin, perf_counter(), num_bytes=nbytes, detail=f"shard {window.file + 1}")
            with self._changed:
                self._free.append(image)
                self._num_used -= 1
                self._num_left -= 1
                self._changed.notify_all()
        for writer in self._writers.values():
            writer.finish()
