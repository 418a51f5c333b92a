"""Block sizes follow what is in the page cache: long blocks where nothing waits for a disk, short ones where it does."""

from __future__ import annotations

from contextlib import closing

import pytest
import safetensors.torch
import torch

import stio.sync
from stio.format.header_build import build_header
from stio.loading.open import open_checkpoint
from stio.loading.options import LoadOptions
from stio.loading.prepare import prepare
from stio.runtime.limits import PAGE_BYTES
from stio.storage.local import LocalFile
from stio.storage.mapped import MappedFile

pytestmark = pytest.mark.usefixtures("plain_workers")

MIB = 1 << 20


@pytest.fixture
def sparse(tmp_path):
    """A file of 64 tensors of 32 MiB that occupies nothing."""
    path = tmp_path / "model.safetensors"
    header, _ = build_header((f"t{k:02d}", "U8", (32 * MIB,)) for k in range(64))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 64 * 32 * MIB)
    return path


@pytest.mark.parametrize(
    ("resident", "budget_mib", "longest_mib", "first_piece_mib"),
    [
        (1.0, 512, 256, 256), (1.0, 64, 32, 256), (0.9, 512, 128, 32), (0.3, 512, 128, 32), (0.0, 64, 16, 32),
        (None, 512, 128, 32),
    ],
)  # fmt: skip
def test_blocks_are_as_long_as_what_is_in_memory_allows(
    monkeypatch, sparse, resident, budget_mib, longest_mib, first_piece_mib
):
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: resident)
    opened = open_checkpoint(sparse)
    try:
        options = LoadOptions(memory="map", budget_bytes=budget_mib * MIB)
        scheduler = prepare(opened, None, options, deliver=lambda group, landed: None)
        sizes = [group.nbytes for group in scheduler.plan.groups]
        assert sum(group.payload_bytes for group in scheduler.plan.groups) == 64 * 32 * MIB
        assert longest_mib * MIB <= max(sizes) + MIB // 2 and max(sizes) <= max(longest_mib, 32) * MIB + MIB
        [path] = scheduler._paths
        assert path._pacer.piece_bytes == first_piece_mib * MIB
        path.close()
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("resident", "memory", "touches"),
    [
        (0.0, "map", True), (0.3, "map", True), (0.5, "map", False), (1.0, "map", False), (None, "map", False),
        (0.0, "lazy", False), (0.0, "copy", False),
    ],
)  # fmt: skip
def test_what_comes_from_a_disk_is_touched_on_the_way(monkeypatch, tmp_path, resident, memory, touches):
    path, touched = tmp_path / "model.safetensors", []
    header, _ = build_header([("a", "U8", (20 * MIB,)), ("b", "U8", (20 * MIB,))])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 40 * MIB)
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: resident)
    monkeypatch.setattr(MappedFile, "touch", lambda self, offset, nbytes: touched.append((offset, nbytes)))
    opened = open_checkpoint(path)
    try:
        options = LoadOptions(memory=memory)
        prepare(opened, None, options, deliver=lambda group, landed: None).run()
    finally:
        opened.close()
    nbytes = sum(nbytes for _, nbytes in touched)
    assert 40 * MIB <= nbytes <= 40 * MIB + 2 * PAGE_BYTES if touches else nbytes == 0


# Memory that a load will hold.


@pytest.mark.parametrize("memory", ["copy", "map"])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "slices", [None, {"a": (slice(None), slice(0, 3))}, {"a": slice(None, None, -1)}, {"a": [2, 0]}], ids=repr
)
def test_the_memory_that_tensors_hold_is_known_before_the_read(tmp_path, memory, dtype, slices):
    """Never more than they hold: then what fits would be refused."""
    tensors = {"a": torch.rand(8, 6), "b": torch.arange(40), "c": torch.zeros(0), "d": torch.rand(30).half()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    with closing(open_checkpoint(tmp_path / "x.safetensors")) as opened:
        options = LoadOptions(memory=memory, dtype=dtype)
        scheduler = prepare(opened, None, options, slices=slices, deliver=lambda group, loaded: None)
        held = sum(scheduler._paths[group.selection].held_bytes(group) for group in scheduler.plan.groups)
        loaded = stio.sync.load(tmp_path / "x.safetensors", memory=memory, dtype=dtype, slices=slices)
    own = {name for name, tensor in loaded.items() if memory == "copy" or tensor.dtype != tensors[name].dtype}
    own |= set(slices or ()) if memory == "map" else set()
    limit = sum(loaded[name].nbytes for name in own)
    assert held <= limit + 8192  # images are whole pages, with the header before the first tensor
    if memory == "copy":
        assert held >= sum(tensor.nbytes for tensor in loaded.values())
