"""What is decided before a load: sizes of groups, the executor, and what comes from a disk."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing

import pytest
import safetensors.torch
import torch
from fakes import FakeDevice
from support import needs_engine

import stio.sync
from stio import native
from stio.format.header import build_header
from stio.limits import ACCELERATOR_BUDGET_BYTES
from stio.loading.body import scheduled
from stio.loading.options import LoadOptions
from stio.loading.read_paths import Delivery
from stio.loading.select import select_tensors
from stio.runtime import workers
from stio.storage.checkpoint.open import open_checkpoint
from stio.storage.local import LocalFile, LocalRoot

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


@pytest.fixture
def made(monkeypatch):
    """Prepare loads that are never run, and close what they hold."""
    with ExitStack() as closing_all:

        def make(source, *, prompt=False, **options):
            opened = open_checkpoint(source)
            closing_all.callback(opened.close)
            options = LoadOptions(**options)
            scheduler = scheduled(select_tensors(opened, None, options), Delivery(prompt=prompt))
            for path in scheduler._paths:
                closing_all.callback(path.close)
            closing_all.callback(scheduler._executor.close)
            closing_all.callback(scheduler._planned.owned.close)
            return scheduler

        yield make


@pytest.mark.parametrize(
    ("budget_mib", "prompt", "longest_mib"),
    [(512, False, 64), (64, False, 32), (512, True, 32), (4096, False, 64)],
)
@pytest.mark.parametrize("memory", ["map", "copy"])
def test_a_group_is_at_most_a_quarter_of_the_budget(made, sparse, budget_mib, prompt, longest_mib, memory):
    """Or one tensor; a stream's are smaller, so that the first comes early."""
    scheduler = made(sparse, memory=memory, budget_bytes=budget_mib * MIB, prompt=prompt)
    sizes = [group.nbytes for group in scheduler.plan.groups]
    assert sum(group.payload_bytes for group in scheduler.plan.groups) == 64 * 32 * MIB
    assert longest_mib * MIB - MIB <= max(sizes) <= longest_mib * MIB + MIB


@pytest.mark.parametrize("num_mib", [1, 100, 700])
def test_a_load_to_a_device_begins_within_its_default_budget(made, tmp_path, num_mib):
    header, _ = build_header((f"t{k}", "U8", (MIB,)) for k in range(num_mib))
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + num_mib * MIB)
    scheduler = made(path, device=FakeDevice())
    assert scheduler.budget.total_bytes <= ACCELERATOR_BUDGET_BYTES
    assert max(group.nbytes for group in scheduler.plan.groups) <= 65 * MIB


# The executor.


@pytest.fixture
def small(tmp_path):
    safetensors.torch.save_file({f"t{k}": torch.rand(10) for k in range(3)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


class OwnFile(LocalFile):
    """A file of a caller that reads in a way of its own."""

    def read_into(self, offset, regions):
        super().read_into(offset, regions)


def own_root(directory):
    def open_at(name, path, dir_fd):
        return OwnFile(os.open(name, os.O_RDONLY, dir_fd=dir_fd), path)

    return LocalRoot(directory, open_at=open_at)


@needs_engine
@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
def test_local_files_are_moved_by_the_engine(made, small, sparse, memory, monkeypatch):
    assert made(sparse, memory=memory)._executor.name == "engine"
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: 0.9)
    assert made(small, memory=memory)._executor.name == "engine"


@needs_engine
@pytest.mark.parametrize("memory", ["map", "copy"])
def test_a_small_load_out_of_the_page_cache_wakes_no_other_thread(made, small, memory, monkeypatch):
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: 1.0)
    threads: list[str] = []
    monkeypatch.setattr(workers, "start_thread", lambda run, *, name: threads.append(name))
    monkeypatch.setattr(native, "Transfer", None)
    trace = stio.Trace()
    executor = made(small, memory=memory)._executor
    assert executor.name == "plain"
    wanted = safetensors.torch.load_file(small)
    loaded = stio.sync.load(small, memory=memory, trace=trace)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {k: t.tolist() for k, t in wanted.items()}
    assert not threads
    assert {span.lane for span in trace.spans} == {"load"}


@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
@pytest.mark.parametrize("why", ["no engine", "a file of one's own", "a fake device", "no thread"])
def test_what_the_plain_executor_is_for(made, small, monkeypatch, why, memory):
    source, options = small, {"memory": memory}
    if why == "no engine":
        monkeypatch.setattr(native, "_library", lambda: None)
    elif why == "a file of one's own":
        source = own_root(small.parent)
    elif why == "a fake device":
        options = {"device": FakeDevice()}
    elif native.available():
        monkeypatch.setattr(native._functions(), "transfer_new", lambda *_: None, raising=False)
    assert made(source, **options)._executor.name == "plain"


def test_no_more_threads_than_reads(made, sparse, small):
    executors = [made(source, device=FakeDevice())._executor for source in (sparse, small)]
    assert [executor._num_workers for executor in executors] == [4, 1]


@needs_engine
@pytest.mark.parametrize(
    ("resident", "memory", "touches"),
    [
        (0.0, "map", True), (0.3, "map", True), (0.5, "map", False), (1.0, "map", False), (None, "map", False),
        (0.0, "lazy", False), (0.0, "copy", False),
    ],
)  # fmt: skip
def test_what_comes_from_a_disk_is_touched_on_the_way(monkeypatch, made, sparse, resident, memory, touches):
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: resident)
    scheduler, added = made(sparse, memory=memory), []

    class Recorded(native.Ranges):
        def file_to_host(self, group, fd, direct_fd, offset, nbytes, target, flags=0):
            added.append((nbytes, flags))

    [path] = scheduler._paths
    for group in scheduler.plan.groups[:2]:
        path.begin([group])
        path.add_ranges(group, Recorded())
    assert {flags for _, flags in added} == (
        set() if memory == "lazy" else {native.POPULATE | native.TOUCH * touches} if memory == "map" else {0}
    )


# Memory that a load will hold.


@pytest.mark.matrix
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
        scheduler = scheduled(select_tensors(opened, None, options, slices=slices), Delivery())
        held = sum(scheduler._paths[group.selection].held_bytes(group) for group in scheduler.plan.groups)
        loaded = stio.sync.load(tmp_path / "x.safetensors", memory=memory, dtype=dtype, slices=slices)
    own = {name for name, tensor in loaded.items() if memory == "copy" or tensor.dtype != tensors[name].dtype}
    own |= set(slices or ()) if memory == "map" else set()
    limit = sum(loaded[name].nbytes for name in own)
    assert held <= limit + 8192  # images are whole pages, with the header before the first tensor
    if memory == "copy":
        assert held >= sum(tensor.nbytes for tensor in loaded.values())
