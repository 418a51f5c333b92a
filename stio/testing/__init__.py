"""For tests of storages, devices and of code that uses stio: one contract, and fakes that misbehave on request.

A storage's test class subclasses `SourceContract`. `MemoryRoot` and `FaultyRoot` stand where a path stands
(`stio.load(FaultyRoot(...))`), so does `MemoryDestination` (`stio.save(tensors, MemoryDestination())`), `FakeDevice`
stands for a device (`device=FakeDevice()`). Needs pytest.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stio.device.tensors import FORMAT_DTYPES
from stio.errors import ChangedDuringReadError, TruncatedError
from stio.format.header_build import build_header
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.storage.base import Source
from stio.testing.fake_device import POISON, FakeDevice
from stio.testing.faulty_root import FaultyRoot, MemoryRoot, Read
from stio.testing.memory_destination import MemoryDestination, Write

__all__ = [
    "POISON",
    "FakeDevice",
    "FaultyRoot",
    "MemoryDestination",
    "MemoryRoot",
    "Read",
    "SourceContract",
    "Write",
    "checkpoint_bytes",
    "checkpoint_files",
    "write_checkpoint",
]

_GUARD = bytes([POISON]) * 64
_NUM_THREADS = 8


# Checkpoints, as the format wants them. No saver: nothing is atomic or durable here.


def checkpoint_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of one safetensors file."""
    entries = []
    for name, tensor in tensors.items():
        dtype, shape = FORMAT_DTYPES[tensor.dtype], list(tensor.shape)
        if dtype == "F4":
            shape[-1] *= 2  # the format counts elements, torch pairs
        entries.append((name, dtype, shape))
    head, order = build_header(entries, metadata)
    return head + b"".join(_bytes_of(tensors[name]) for name in order)


def checkpoint_files(tensors: Mapping[str, torch.Tensor], num_shards: int = 1) -> dict[str, bytes]:
    """Return the files of a checkpoint by name: one file, or shards that tensors go to in turn, and their index."""
    if num_shards == 1:
        return {"model.safetensors": checkpoint_bytes(tensors)}
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for k in range(num_shards):
        shard = f"model-{k + 1:05d}-of-{num_shards:05d}.safetensors"
        files[shard] = checkpoint_bytes({name: tensors[name] for name in names[k::num_shards]})
        weight_map |= dict.fromkeys(names[k::num_shards], shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor], num_shards: int = 1) -> Path:
    """Write the files of a checkpoint and return their directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in checkpoint_files(tensors, num_shards).items():
        (directory / name).write_bytes(data)
    return directory


def _bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


# What every storage must do.


def read_guarded(source: Source, offset: int, *lengths: int) -> bytes:
    """Read into one region for each length; fail if a byte beside them is touched."""
    room = memory.allocate(sum(lengths) + len(_GUARD) * (len(lengths) + 1))
    room.write(0, bytes([POISON]) * room.nbytes)
    regions, at = [], len(_GUARD)
    for length in lengths:
        regions.append(room.sub(at, length))
        at += length + len(_GUARD)
    try:
        source.read_into(offset, regions)
    finally:
        after, at = room.tobytes(), 0
        for length in lengths:
            assert after[at : at + len(_GUARD)] == _GUARD, "bytes beside the regions were touched"
            at += len(_GUARD) + length
        assert after[at : at + len(_GUARD)] == _GUARD, "bytes beside the regions were touched"
    return b"".join(region.tobytes() for region in regions)


class SourceContract:
    """The tests that every storage passes. Subclass it as `Test...` and say how a file is opened.

    A storage without paths replaces `create` and `overwrite` instead of `open`.
    """

    DATA = random.Random(7).randbytes(3 * PAGE_BYTES + 577)
    """What the file holds, no multiple of anything."""

    file: Path

    def open(self, path: Path) -> Source:
        """Return the source for a file."""
        raise NotImplementedError

    def create(self, directory: Path, data: bytes) -> Source:
        """Return a source with these bytes."""
        self.file = directory / "contract.bin"
        self.file.write_bytes(data)
        return self.open(self.file)

    def overwrite(self, data: bytes) -> None:
        """Replace the bytes behind the source that `create` made, in place."""
        before = self.file.stat()
        self.file.write_bytes(data)
        # The clock of a filesystem may not have ticked between two writes of a test.
        os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[Source]:
        """Open a source of `DATA`."""
        source = self.create(tmp_path, self.DATA)
        yield source
        source.close()

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 1), (0, 8), (0, 4096), (8, 4096), (1, 4095), (4095, 2), (4096, 4096), (4096, 8192), (5000, 3000)],
    )
    def test_reads_at_offsets(self, source: Source, offset: int, nbytes: int) -> None:
        """Any offset and length gives the file's bytes, and touches nothing beside them."""
        assert read_guarded(source, offset, nbytes) == self.DATA[offset : offset + nbytes]

    def test_reads_everything(self, source: Source) -> None:
        """The last byte is there, and nothing comes after it."""
        assert read_guarded(source, 0, len(self.DATA)) == self.DATA
        assert read_guarded(source, len(self.DATA) - 1, 1) == self.DATA[-1:]

    def test_fills_regions_in_order(self, source: Source) -> None:
        """One read goes to many places, more of them than one call of the system takes."""
        assert read_guarded(source, 100, 1, 2, 3, 4000, 5) == self.DATA[100:4111]
        assert read_guarded(source, 3, *[3] * 3000) == self.DATA[3:9003]

    def test_takes_empty_regions(self, source: Source) -> None:
        """They may stand anywhere, alone and at the end of the file too."""
        assert read_guarded(source, 7, 0, 5, 0, 0, 6, 0) == self.DATA[7:18]
        assert read_guarded(source, 7, 0) == b""
        assert read_guarded(source, len(self.DATA), 0, 0) == b""
        source.read_into(0, [])

    @pytest.mark.parametrize("lengths", [(10,), (4096,), (2, 8), (3, 0, 5000)])
    def test_c90_past_the_end(self, source: Source, lengths: tuple[int, ...]) -> None:
        """The error says where the file ends."""
        with pytest.raises(TruncatedError) as caught:
            read_guarded(source, len(self.DATA) - 3, *lengths)
        assert caught.value.offset == len(self.DATA)
        assert caught.value.path == source.path
        with pytest.raises(TruncatedError):
            read_guarded(source, len(self.DATA) + 100, 1)

    def test_c90_shrunk_file(self, source: Source) -> None:
        """What is still there can be read; what is not is an error, and no old bytes."""
        self.overwrite(self.DATA[:5000])
        assert read_guarded(source, 0, 5000) == self.DATA[:5000]
        with pytest.raises(TruncatedError) as caught:
            read_guarded(source, 4990, 100)
        assert caught.value.offset == 5000

    def test_identity(self, source: Source) -> None:
        """It holds the size, and stays what it was when the file was opened."""
        identity = source.identity
        assert identity.nbytes == len(self.DATA)
        self.overwrite(self.DATA + b"more")
        assert source.identity == identity

    def test_unchanged_file(self, source: Source) -> None:
        """Reading does not count as a change."""
        read_guarded(source, 0, len(self.DATA))
        source.check_unchanged()

    @pytest.mark.parametrize("change", ["rewritten", "appended", "cut"])
    def test_c91_changed_file(self, source: Source, change: str) -> None:
        """A rewrite of the same length, an append and a cut are all seen."""
        data = {"rewritten": self.DATA[::-1], "appended": self.DATA + b"x", "cut": self.DATA[:-1]}[change]
        self.overwrite(data)
        with pytest.raises(ChangedDuringReadError) as caught:
            source.check_unchanged()
        assert caught.value.path == source.path
        assert caught.value.expected == source.identity

    def test_close_is_idempotent(self, tmp_path: Path) -> None:
        """Whoever closes twice means no harm."""
        source = self.create(tmp_path, self.DATA)
        source.close()
        source.close()

    def test_concurrent_reads(self, source: Source) -> None:
        """Readers on many threads do not get each other's bytes."""

        def read_some(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(25):
                offset = chance.randrange(len(self.DATA))
                first = chance.randint(0, (len(self.DATA) - offset) // 2)
                second = chance.randint(0, len(self.DATA) - offset - first)
                assert read_guarded(source, offset, first, second) == self.DATA[offset : offset + first + second]

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(read_some, range(_NUM_THREADS)))
